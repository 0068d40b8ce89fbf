"""The agent as a whole: the real command, real BPF, real cgroups, a real controller."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from expanse_ebpf.ship import remote
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, Report

from .kernel.groups import Groups
from .kernel.test_accounting import programs_of, wait_until_gone

ME = (sys.executable, "-m", "expanse_ebpf")
BURN = "while True: pass"


class Node:
    """One agent under test and its files."""

    def __init__(
        self, folder: Path, environment: dict[str, str], options: tuple[str, ...], world: tuple[str, ...] = ()
    ) -> None:
        self.socket, self.log = folder / "agent.sock", folder / "agent.log"
        command = [
            *world,
            *ME,
            "agent",
            "--socket",
            str(self.socket),
            "--state-dir",
            str(folder),
            "--interval",
            "0.5",
        ]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
            )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self.process.poll() is None, self.said()
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)

    def _answers(self) -> bool:
        with suppress(Exception):
            return bool(self.top())
        return False

    def said(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def top(self, *options: str) -> dict[str, Any]:
        command = [*ME, "top", "--once", "--json", "--socket", str(self.socket), *options]
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
        return dict(json.loads(result.stdout))

    def wait_for(self, condition: Callable[[dict[str, Any]], Any], seconds: float = 15) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while True:
            snapshot = self.top()
            if condition(snapshot):
                return snapshot
            assert time.monotonic() < deadline, json.dumps(snapshot)[:3000] + self.said()
            time.sleep(0.2)

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(15)


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    nodes: list[Node] = []

    def one(*options: str, folder: str = "node", world: tuple[str, ...] = (), **environment: str) -> Node:
        (tmp_path / folder).mkdir(exist_ok=True)
        nodes.append(Node(tmp_path / folder, environment, options, world))
        return nodes[-1]

    yield one
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
            node.process.wait()
        assert "Traceback" not in node.said()


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


def job(snapshot: dict[str, Any], key: str) -> dict[str, Any] | None:
    return next((j for j in snapshot["jobs"] if j["key"] == key), None)


@pytest.fixture
def run(request: pytest.FixtureRequest) -> Iterator[Callable[..., tuple[str, subprocess.Popen[bytes]]]]:
    """Start a job by `expanse-ebpf run`; its key and the process."""
    started: list[subprocess.Popen[bytes]] = []

    def one(name: str, *command: str, world: tuple[str, ...] = ()) -> tuple[str, subprocess.Popen[bytes]]:
        name = f"{name}-{os.getpid()}"
        run = [*world, *ME, "run", "--name", name, "--", *command]
        started.append(subprocess.Popen(run, stdin=subprocess.DEVNULL))
        return f"run/{name}", started[-1]

    yield one
    for process in started:
        if process.poll() is None:
            process.terminate()
            process.wait(15)


def test_a_job_from_its_start_to_its_end_on_the_node_and_in_the_store(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    node = start("--standalone", "--db", str(tmp_path / "reports.db"))
    address = next(line.split()[-1] for line in node.said().splitlines() if "controller on" in line)
    code = "import time\nt = time.time()\nx = bytearray(30 << 20)\nwhile time.time() < t + 6: x[0] = 1"
    key, process = run("train", sys.executable, "-c", code)
    snapshot = node.wait_for(lambda s: (job(s, key) or {}).get("cpu_cores"))
    time.sleep(1)
    seen = job(node.top("--job", key), key)
    assert snapshot["node"] == os.uname().nodename
    assert seen is not None
    assert (seen["scheduler"], seen["user"], seen["state"]) == ("run", "root", "running")
    assert 0.3 < seen["cpu_cores"] < 1.1  # others may share the two CPUs
    assert seen["counters"]["run_cores"] == pytest.approx(seen["cpu_cores"], abs=0.1)
    assert seen["memory_bytes"] > 30 << 20
    assert seen["processes"] == 1
    assert seen["counters"]["context_switches_per_s"] >= 0  # it may have a CPU to itself
    assert process.wait(20) == 0
    node.wait_for(lambda s: job(s, key) is None, 4)
    ended = None
    for report in client.watch(str(node.socket), 100):
        ended = next(
            (j for j in report.jobs if j.identity.id == key.split("/")[1] and j.state == JOB_STATE_ENDED),
            ended,
        )
        if ended or report.sequence >= snapshot["sequence"] + 60:
            break
    assert ended is not None
    # 6 s of wall time on a machine that other tests share; the tail after the last tick is in it.
    assert ended.cpu_ns >= ended.counters.run_ns * 0.99
    assert ended.counters.execs >= 1
    (stored,) = remote.snapshot(address, "", 10)
    assert stored.current.node.name == snapshot["node"]
    assert node.stop() == 0
    import sqlite3

    with sqlite3.connect(tmp_path / "reports.db") as store:
        rows = store.execute("SELECT count(*) FROM samples").fetchone()[0]
    assert rows >= 8


# What a host of each kind has mounted, made in a mount namespace of this one.
WORLDS = {
    "v2": "umount -l /sys/fs/cgroup && mount -t cgroup2 none /sys/fs/cgroup",
    "v1": "umount /sys/fs/cgroup/unified",
    "hybrid": "true",
}


@pytest.mark.parametrize("kind", WORLDS)
def test_both_cgroup_worlds(
    kind: str, start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]]
) -> None:
    """Where the controllers stay with v1, the pure v2 host is one without a memory controller."""
    world = ("unshare", "--mount", "sh", "-c", f'{WORLDS[kind]} && exec "$@"', "sh")
    check = subprocess.run([*world, *ME, "check", "--json"], capture_output=True, text=True, check=False)
    modes = [f["detail"] for f in json.loads(check.stdout)["findings"] if f["name"] == "cgroups"]
    assert kind in modes[0]
    node = start(world=world)
    key, process = run("world", sys.executable, "-c", "x = bytearray(20 << 20)\n" + BURN, world=world)
    node.wait_for(lambda s: (job(s, key) or {}).get("cpu_cores"))
    time.sleep(1.5)  # past the interval in which it began
    seen = job(node.top(), key)
    assert seen is not None
    assert seen["counters"]["run_cores"] == pytest.approx(seen["cpu_cores"], abs=0.1)
    if kind == "v2":
        assert seen["memory_bytes"] is None
        assert "memory" in seen["unavailable"]
    else:
        assert seen["memory_bytes"] > 20 << 20
    process.terminate()
    assert process.wait(15) == 128 + signal.SIGTERM
    node.wait_for(lambda s: job(s, key) is None)
    assert node.stop() == 0


def test_jobs_and_the_rest_add_up_to_what_the_node_did(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]]
) -> None:
    node = start()
    # Busy all over: /proc/stat looks at what runs only now and then, and would miss short naps.
    keys = [run(f"adds-up-{cpu}", "taskset", "-c", cpu, sys.executable, "-c", BURN)[0] for cpu in "01"]
    node.wait_for(lambda s: all((job(s, key) or {}).get("cpu_cores") for key in keys))
    reports: list[Report] = []
    for report in client.watch(str(node.socket), 1):
        reports.append(report)
        if len(reports) == 13:
            break
    first, last = reports[0], reports[-1]

    def ran(report: Report) -> int:
        return (
            sum(j.counters.run_ns for j in report.jobs)
            + report.host.system.run_ns
            + report.host.overflow.run_ns
        )

    busy = last.host.cpu_busy_ns - first.host.cpu_busy_ns
    assert ran(last) - ran(first) == pytest.approx(busy, rel=0.05)


def test_a_short_jobs_whole_life_fits_between_two_reports(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]]
) -> None:
    node = start("--interval", "2")
    keys = []
    for i in range(12):
        key, process = run(f"short-{i}", "/bin/true")
        assert process.wait(20) == 0
        keys.append(key)
    time.sleep(2.5)
    ended: dict[str, int] = {}
    for report in client.watch(str(node.socket), 100):
        for sample in report.jobs:
            if sample.state == JOB_STATE_ENDED:
                ended[f"run/{sample.identity.id}"] = sample.counters.execs
        if len(ended) >= len(keys) or report.interval_ns == 0:
            break
    for report in client.watch(str(node.socket), 100):
        for sample in report.jobs:
            if sample.state == JOB_STATE_ENDED:
                ended[f"run/{sample.identity.id}"] = sample.counters.execs
        if set(keys) <= set(ended):
            break
    assert set(keys) <= set(ended)
    assert all(ended[key] >= 1 for key in keys)


def test_a_slurm_job_that_only_the_freezer_tells_apart_is_found_and_counted(
    start: Start, groups: Groups
) -> None:
    node = start()
    root = Path("/sys/fs/cgroup/freezer") / f"slurm_{groups.tag}"
    step = root / "uid_65534" / "job_771" / "step_batch"
    for folder in (*reversed(step.parents[: len(step.parts) - len(root.parts)]), step):
        if not folder.exists():
            folder.mkdir()
            groups.directories.append(folder)
    environment = "os.environ.update(SLURM_JOB_ID='771', SLURM_JOB_NAME='resnet')\n"
    again = f"os.execv(sys.executable, [sys.executable, '-c', {BURN!r}])"
    groups.start(environment + again, step)
    # By the scheduler hook, since it has no CPU cgroup of its own. Its first interval is counted in part.
    snapshot = node.wait_for(lambda s: ((job(s, "slurm/771") or {}).get("cpu_cores") or 0) > 0.2, 20)
    seen = job(snapshot, "slurm/771")
    assert seen is not None
    assert (seen["user"], seen["uid"], seen["name"]) == ("nobody", 65534, "resnet")
    assert seen["memory_bytes"] is None
    # What belongs to no job goes on counting over the change of hierarchy.
    counts = []
    for report in client.watch(str(node.socket), 120):
        counts.append(report.host.system.context_switches)
        if report.sequence >= snapshot["sequence"]:
            break
    assert "told apart in the freezer" in node.said()
    assert len(counts) > 3
    assert counts == sorted(counts)


def test_another_user_sees_their_own_jobs_only(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    node = start()
    tmp_path.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    key, _ = run("roots", "sleep", "60")
    theirs, _ = run("theirs", "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "sleep", "60")
    node.wait_for(lambda s: (job(s, theirs) or {}).get("uid") == 65534 and job(s, key))
    code = (
        "import sys, json\nfrom expanse_ebpf.top import client\n"
        "r = next(iter(client.watch(sys.argv[1], 1)))\nprint(json.dumps([j.identity.id for j in r.jobs]))"
    )
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        *ME[:1],
        "-c",
        code,
        str(node.socket),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [theirs.removeprefix("run/")]


def test_prometheus_gets_the_same_figures(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]]
) -> None:
    node = start("--metrics-listen", "127.0.0.1:0")
    port = node.said().partition("metrics on 127.0.0.1:")[2].split()[0]
    key, _ = run("scraped", "sleep", "60")
    node.wait_for(lambda s: job(s, key))
    time.sleep(0.6)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
    ids = [s.labels["job_id"] for s in families["expanse_job_info"].samples]
    assert key.removeprefix("run/") in ids


def test_after_kill_9_nothing_is_left_and_the_next_agent_starts(start: Start, tmp_path: Path) -> None:
    node = start("--standalone", "--db", str(tmp_path / "reports.db"))
    children = Path(f"/proc/{node.process.pid}/task/{node.process.pid}/children").read_text().split()
    assert len(children) == 1
    mine = programs_of(node.process.pid)
    assert len(mine) > 8
    sequence = node.top()["sequence"]
    node.process.kill()
    node.process.wait()
    wait_until_gone(mine)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{children[0]}").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path(f"/proc/{children[0]}").exists(), "the controller outlived the agent"
    again = start("--standalone", "--db", str(tmp_path / "reports.db"))
    assert again.top()["sequence"] > sequence
    assert again.stop() == 0


def test_a_second_agent_on_the_same_socket_is_refused_in_one_line(start: Start) -> None:
    node = start()
    command = [*ME, "agent", "--socket", str(node.socket), "--state-dir", str(node.socket.parent)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "already runs" in result.stderr


def test_jobs_past_the_cap_are_added_up(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]]
) -> None:
    node = start(EXPANSE_AGENT_MAX_JOBS="2")
    for i in range(4):
        run(f"many-{i}", sys.executable, "-c", "import time\nwhile True: time.sleep(0.01)")
    node.wait_for(lambda s: s["host"]["overflow_jobs"] >= 2)
    time.sleep(1)
    snapshot = node.top()
    assert len(snapshot["jobs"]) == 2
    assert snapshot["host"]["overflow"]["context_switches_per_s"] > 50


def test_reports_wait_for_a_controller_that_comes_late(start: Start, tmp_path: Path) -> None:
    import socket as sockets

    with sockets.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    node = start("--controller", f"127.0.0.1:{port}")
    waiting = node.wait_for(lambda s: s["collector"]["reports_unsent"] >= 3)
    first = waiting["sequence"]
    command = [sys.executable, "-m", "expanse_controller", "serve", "--listen", f"127.0.0.1:{port}"]
    with subprocess.Popen(
        [*command, "--db", str(tmp_path / "late.db")], stdout=subprocess.DEVNULL
    ) as controller:
        try:
            node.wait_for(lambda s: s["collector"]["reports_unsent"] <= 1, 30)
            assert node.top()["collector"]["reports_dropped"] == 0
            (stored,) = remote.snapshot(f"127.0.0.1:{port}", "", 10)
            assert stored.current.sequence > first
        finally:
            controller.terminate()


def test_without_bpf_jobs_are_still_found_and_the_reason_is_said_once(
    start: Start, run: Callable[..., tuple[str, subprocess.Popen[bytes]]], tmp_path: Path
) -> None:
    """Under a user that may not load BPF programs."""
    folder = tmp_path / "plain"
    folder.mkdir()
    for parent in (folder, *folder.parents):
        if str(parent).startswith("/tmp/"):
            parent.chmod(0o755)
    os.chown(folder, 65534, 65534)
    command = [
        "setpriv",
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        *ME,
        "agent",
        "--interval",
        "0.5",
    ]
    log = folder / "log"
    with (
        log.open("wb") as output,
        subprocess.Popen(
            [*command, "--socket", str(folder / "s"), "--state-dir", str(folder)], stderr=output
        ) as agent,
    ):
        try:
            key, _ = run("plain", "sleep", "60")
            found = None
            deadline = time.monotonic() + 20
            while found is None and time.monotonic() < deadline:
                time.sleep(0.3)
                with suppress(Exception):
                    for report in client.watch(str(folder / "s"), 1):
                        found = next((j for j in report.jobs if f"run/{j.identity.id}" == key), None)
                        break
            assert found is not None, log.read_text()
            assert not found.counters.HasField("context_switches")
            assert found.HasField("cpu_ns")
        finally:
            agent.terminate()
    said = log.read_text()
    assert "Traceback" not in said
    assert said.count("CAP_BPF and CAP_PERFMON missing") == 1, said


def test_names_that_are_not_utf_8_trouble_nobody(start: Start, groups: Groups) -> None:
    node = start("--metrics-listen", "127.0.0.1:0")
    port = node.said().partition("metrics on 127.0.0.1:")[2].split()[0]
    odd = groups.make().parent / os.fsdecode(b"expanse-run-\xff\xfe" + groups.tag.encode())
    odd.mkdir()
    groups.directories.append(odd)
    below = odd / os.fsdecode(b"\xe0")
    below.mkdir()
    groups.directories.append(below)
    groups.start("time.sleep(60)", below)
    time.sleep(1.5)
    assert node.top()["jobs"] is not None
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert list(text_string_to_metric_families(answer.read().decode()))
    assert node.stop() == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--interval", "0"], "agent.interval_s"),
        (["--interval", "soon"], "agent.interval_s"),
        (["--counters", "cycles,bogus"], "bogus"),
        (["--controller", "nowhere"], "HOST:PORT"),
        (["--hierarchy", "perf_event_x"], "cpu.hierarchy"),
        (["--metrics-listen", "127.0.0.1:99999"], "agent.metrics_listen"),
        (["--config", "/nonexistent/x.toml"], "/nonexistent/x.toml"),
        (["--db", "x"], "--standalone"),
        (["--no-such-flag"], "--no-such-flag"),
        (["--socket", "/proc/nowhere/s"], "/proc/nowhere/s"),
    ],
)
def test_bad_input_is_one_line_with_cause_and_remedy(options: list[str], words: str, tmp_path: Path) -> None:
    defaults = ["--state-dir", str(tmp_path)]
    if "--socket" not in options:
        defaults += ["--socket", str(tmp_path / "s")]
    result = subprocess.run(
        [*ME, "agent", *defaults, *options], capture_output=True, text=True, timeout=30, check=False
    )
    assert result.returncode in (1, 2)
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "s").exists()


def test_a_tick_that_fails_is_counted_and_the_next_one_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from expanse_ebpf.agent import Agent
    from expanse_ebpf.config import load

    overrides = {
        "agent.socket": str(tmp_path / "s"),
        "agent.state_dir": str(tmp_path),
        "agent.interval_s": 0.1,
    }
    agent = Agent(load(None, {}, overrides))
    agent.start()
    try:
        update = agent._table.update
        answers = iter([RuntimeError("odd job"), RuntimeError("odd job")])

        def odd() -> Any:
            for error in answers:
                raise error
            return update()

        monkeypatch.setattr(agent._table, "update", odd)
        agent.run(3)
        assert agent.newest is not None
        assert agent.newest.collector.ticks_missed == 2
        assert caplog.text.count("Traceback") == 1
    finally:
        agent.stop()
