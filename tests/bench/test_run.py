"""Whole runs: real jobs beside nothing, beside agents with controllers, and beside other programs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench import child, results, run, store, usage
from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.results import Run
from expanse_ebpf.errors import ConfigError, ExpanseError, UnavailableError
from tests.stand_ins.cuda import PROGRAMS, CudaStandIn, cuda_stand_in

INTERVAL_S = 0.2
PLAN = Plan("plan", (), (), interval_s=INTERVAL_S, settle_s=0.2)
COLLECTION = Arm("arm", "collection")
# Takes so long, keeps 32 MiB, and tells a time of its own.
WORK = """
import sys, time
kept = bytearray(b"x") * (32 << 20)
end = time.monotonic() + float(sys.argv[1])
while time.monotonic() < end: sum(range(1000))
print("took 12.5 s")
"""


def python(source: str, *arguments: str, **fields: Any) -> Workload:
    return Workload("work", "command", command=(sys.executable, "-c", source, *arguments), **fields)


def shell(script: str, **fields: Any) -> Workload:
    return Workload("work", "command", command=("sh", "-c", script), **fields)


def measured(
    workload: Workload,
    arm: Arm = COLLECTION,
    *,
    plan: Plan = PLAN,
    watched: bool = True,
    closely: bool = False,
    expected_s: float | None = None,
) -> Run:
    """A run; what it leaves in the records can be read again, and nothing else is left."""
    role: results.Role = "warm_up" if closely else "arm" if watched else "off"
    made = run.measure(
        *(plan, workload, arm),
        watched=watched,
        closely=closely,
        role=role,
        pair=0 if closely else 1,
        attempt=1,
        position=0,
        expected_s=expected_s,
    )
    assert results.parse(results.line(made)) == made
    assert (made.workload, made.arm, made.role, made.watched) == ("work", "arm", role, watched)
    return made


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where runs make theirs: none is left."""
    place = tmp_path / "runs"
    place.mkdir()
    monkeypatch.setenv("TMPDIR", str(place))
    monkeypatch.setattr("tempfile.tempdir", None)
    yield place
    assert list(place.iterdir()) == []


def test_a_run_beside_nothing_has_the_jobs_figures_alone() -> None:
    made = measured(python(WORK, "0.8"), watched=False)
    assert made.failed == ""
    assert made.seconds == made.wall_s >= 0.8
    assert made.job_memory_peak_bytes is not None
    assert 32 << 20 <= made.job_memory_peak_bytes < 64 << 20
    assert made.job_cpu_s is not None
    assert 0 < made.job_cpu_s < made.wall_s * 2
    assert abs(made.started_ns / 1e9 + made.wall_s - time.time()) < 10
    beside = (made.collector, made.controller, made.samples, made.windows, made.bpf_s_per_s)
    assert beside == (None,) * 5
    assert made.missing == {}


def test_beside_the_collector_it_is_told_what_both_took_and_what_came_of_the_samples() -> None:
    made = measured(python(WORK, "1.5"))
    assert made.failed == ""
    assert made.job_memory_peak_bytes is not None
    assert 32 << 20 <= made.job_memory_peak_bytes < 64 << 20
    for part in (made.collector, made.controller):
        assert part is not None
        assert part.cpu_s >= 0
        assert part.pss_peak_bytes is not None
        assert 8 << 20 < part.pss_peak_bytes < 256 << 20
    assert made.collector is not None
    assert made.collector.sent_bytes is not None
    samples = made.samples
    assert samples is not None
    assert made.collector.sent_bytes > 50 * samples.received > 0
    assert (samples.interval_s, samples.looks, samples.age_median_s) == (INTERVAL_S, 0, None)
    assert samples.expected >= int(made.wall_s / INTERVAL_S) >= 7
    assert samples.received <= samples.expected
    assert samples.longest_gap_s is not None
    assert samples.longest_gap_s > INTERVAL_S / 2
    assert {"bpf_s_per_s", "samples.age_median_s", "controller.sent_bytes"} <= made.missing.keys()
    assert made.windows is None


def test_a_run_that_is_watched_closely_tells_bpf_time_and_the_age_of_samples() -> None:
    made = measured(python(WORK, "2.5"), Arm("arm", "both", cpu_counters=False), closely=True)
    assert made.failed == ""
    assert made.bpf_s_per_s is not None
    assert 0 < made.bpf_s_per_s < 1
    assert made.samples is not None
    assert made.samples.looks >= 1
    assert made.samples.age_median_s is not None
    assert made.samples.age_median_s > 0
    assert made.missing.keys() <= {"controller.sent_bytes", "collector.disk_bytes", "controller.disk_bytes"}


def test_where_nothing_is_written_to_a_disk_that_is_not_told_as_0(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage, "on_memory", lambda path: True)
    made = measured(python(WORK, "0.6"))
    assert made.controller is not None
    assert made.controller.disk_bytes is None
    assert "lies in memory" in made.missing["controller.disk_bytes"]


def test_the_store_is_written_to_the_disk(folders: Path) -> None:
    if usage.on_memory(folders):
        pytest.skip(f"{folders} lies in memory")
    made = measured(python(WORK, "1.2"))
    assert made.controller is not None
    assert made.controller.disk_bytes
    assert made.collector is not None
    assert made.collector.disk_bytes == 0


# ---- the job


def test_the_time_may_be_one_that_the_job_tells() -> None:
    made = measured(python(WORK, "0.1", time_pattern=r"took ([\d.]+) s"), watched=False)
    assert (made.failed, made.seconds) == ("", 12.5)
    assert made.wall_s < 12


@pytest.mark.parametrize(
    ("workload", "why"),
    [
        (shell("echo so far; echo it broke >&2; exit 7"), r"exit code 7: it broke"),
        (shell("kill -SEGV $$"), r"ended by SIGSEGV: it said nothing"),
        (Workload("work", "command", command=("/nowhere/program",)), r"/nowhere/program cannot be started"),
        (shell("sleep 60", limit_s=0.3), r"it took longer than limit_s, 0\.3 s"),
        (python(WORK, "0.1", time_pattern=r"lasted ([\d.]+)"), r"lasted"),
    ],
)
def test_a_run_that_fails_says_why_and_has_no_time(workload: Workload, why: str) -> None:
    made = measured(workload, watched=False)
    assert re.search(why, made.failed)
    assert made.seconds is None


def test_what_the_job_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    made = measured(shell(f"setsid sleep 60 & echo $! >{tmp_path}/pid"), watched=False)
    assert made.failed == ""
    assert not Path(f"/proc/{int((tmp_path / 'pid').read_text())}/exe").exists()
    assert jobs() == []


def test_a_job_is_alone_in_its_cgroup_and_has_its_signals(tmp_path: Path) -> None:
    script = f"cat /proc/self/cgroup >{tmp_path}/cgroup; grep SigIgn /proc/self/status >{tmp_path}/signals"
    assert measured(shell(script), watched=False).failed == ""
    assert "/expanse-run-bench-" in (tmp_path / "cgroup").read_text()
    ignored = int((tmp_path / "signals").read_text().split()[1], 16)
    assert not ignored & (1 << (signal.SIGINT - 1) | 1 << (signal.SIGPIPE - 1))


def jobs() -> list[str]:
    """Cgroups of runs."""
    return [path for path, _, _ in os.walk("/sys/fs/cgroup") if "/expanse-run-bench-" in path]


# ---- the arms


def test_traces_that_are_ready_have_nothing_attached() -> None:
    made = measured(python(WORK, "0.8"), Arm("arm", "traces_idle"), closely=True)
    assert made.failed == ""
    assert made.windows == results.Windows(opened=0, traced_s=0, probes_most=0)


@pytest.fixture(scope="module")
def cuda() -> CudaStandIn:
    return cuda_stand_in()


def launching(cuda: CudaStandIn, seconds: float) -> Workload:
    """A loop that launches kernels on a stand-in."""
    setting = [f"{name}={value}" for name, value in cuda.environment().items() if name not in os.environ]
    command = ("env", *setting, sys.executable, str(PROGRAMS / "loop.py"), str(seconds))
    return Workload("work", "command", command=command)


# As dear as it may be: probes that come off for their cost are there for too short a time to be met.
DEAR: dict[str, dict[str, object]] = {"tracing": {"cost_share": 1.0}}


def test_a_window_on_request_takes_its_part_of_the_run(
    cuda: CudaStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "points", lambda *_: 0)  # the kernel's own count alone
    arm = Arm("arm", "traces_on_request", settings=DEAR)
    made = measured(launching(cuda, 6), arm, closely=True, expected_s=6)
    assert made.failed == ""
    assert made.windows is not None
    assert made.windows.opened == 1
    assert 0 < made.windows.traced_s <= 1.8 + 0.1
    assert 10 < made.windows.probes_most < 500


def test_where_nothing_could_be_traced_the_run_is_worth_nothing() -> None:
    made = measured(python(WORK, "2.5"), Arm("arm", "traces_on_request"), expected_s=2.5)
    assert made.failed.startswith("nothing was traced: ")
    assert made.seconds is None
    assert made.windows is not None
    assert made.windows.opened == 0


@pytest.mark.slow
def test_a_rule_opens_a_window(cuda: CudaStandIn) -> None:
    made = measured(launching(cuda, 24), Arm("arm", "traces_by_rule", settings=DEAR))
    assert made.failed == ""
    assert made.windows is not None
    assert made.windows.opened == 1
    assert made.windows.traced_s > 0
    assert 10 < made.windows.probes_most < 500


def kill_agent(folders: Path) -> None:
    """Kill the agent of the run that is on, once its job says that it runs."""
    deadline = time.monotonic() + 30
    while not list(folders.glob("*/job.log")) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in usage.tree(os.getpid()):
        arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        if run.is_agent(arguments) and str(folders) in " ".join(arguments):
            os.kill(pid, signal.SIGKILL)


def test_an_agent_that_ends_before_the_job_fails_the_run(folders: Path) -> None:
    killer = threading.Thread(target=kill_agent, args=(folders,))
    killer.start()
    made = measured(shell("sleep 60"))
    killer.join()
    assert made.failed.startswith("the agent ended before the job: ended by SIGKILL: ")
    assert made.wall_s < 50
    assert (made.seconds, made.collector, made.samples) == (None, None, None)


def test_another_program_as_an_arm() -> None:
    record = "py-spy record -r 49 -f raw -o {folder}/stacks --subprocesses --pid {pid}"
    made = measured(python(WORK, "2"), Arm("arm", "command", command=tuple(record.split())), closely=True)
    assert made.failed == ""
    assert made.collector is not None
    assert made.collector.cpu_s > 0
    assert (made.controller, made.samples, made.bpf_s_per_s) == (None, None, None)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (("sh", "-c", "echo cannot attach; exit 3"), "sh ended before the job: exit code 3: cannot attach"),
        (("sh", "-c", "exit 0"), "sh ended before the job: exit code 0: it said nothing"),
        (("no-such-profiler",), "no-such-profiler: not found"),
    ],
)
def test_another_program_that_does_not_look_on_fails_the_run(command: tuple[str, ...], why: str) -> None:
    made = measured(shell("sleep 60"), Arm("arm", "command", command=command))
    assert made.failed.startswith(why)
    assert made.wall_s < 50


# ---- Ctrl-C

INTERRUPTED = """
import sys
from expanse_ebpf.bench import run
from expanse_ebpf.bench.plan import Arm, Plan, Workload
arm = Arm("arm", "command", command=("sleep", "60")) if sys.argv[1] == "peer" else Arm("arm", "collection")
run.measure(
    Plan("plan", (), (), interval_s=0.2, settle_s=float(sys.argv[2])),
    Workload("work", "command", command=("sh", "-c", "sleep 61 & sleep 62")),
    arm, watched=sys.argv[1] != "off", closely=True,
    role="warm_up", pair=0, attempt=1, position=0, expected_s=None,
)
"""


@pytest.mark.parametrize(
    ("kind", "settle_s", "file", "times"),
    [
        ("off", 0.1, "*/job.log", 1),
        ("peer", 0.1, "*/peer.log", 1),
        ("collection", 0.1, "*/controller.log", 1),  # while the controller starts
        ("collection", 60.0, "*/agent.sock", 2),
        ("collection", 0.1, "*/job.log", 3),
    ],
)
def test_an_interrupt_leaves_nothing(
    folders: Path, kind: str, settle_s: float, file: str, times: int
) -> None:
    before = set(jobs())
    kit = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(INTERRUPTED), kind, str(settle_s)], stderr=subprocess.PIPE
    )
    try:
        deadline = time.monotonic() + 30
        while not list(folders.glob(file)):
            assert time.monotonic() < deadline
            assert kit.poll() is None, kit.communicate()
            time.sleep(0.02)
        started = usage.tree(kit.pid)[1:]
        for _ in range(times):
            kit.send_signal(signal.SIGINT)
            time.sleep(0.05)
        _, errors = kit.communicate(timeout=40)
    finally:
        kit.kill()
        kit.communicate()
    assert kit.returncode == -signal.SIGINT, errors
    assert errors.decode().strip().endswith("KeyboardInterrupt")
    assert set(jobs()) - before == set()
    assert [pid for pid in started if Path(f"/proc/{pid}/exe").exists()] == []


def test_what_is_tidied_up_is_so_before_an_interrupt_is_heard() -> None:
    done = []

    def slow() -> None:
        signal.raise_signal(signal.SIGINT)
        done.append("slow")

    def tidy() -> None:
        with child.tidied() as stack:
            stack.callback(done.append, "last")
            stack.callback(slow)

    with pytest.raises(KeyboardInterrupt):
        tidy()
    assert done == ["slow", "last"]


# ---- before a bench


@pytest.mark.parametrize(
    ("line", "is_one"),
    [
        ("/v/bin/python -m expanse_ebpf agent --config x", True),
        ("/v/bin/python /v/bin/expanse-ebpf agent", True),
        ("expanse-ebpf agent", True),
        ("/v/bin/python -m expanse_ebpf top", False),
        ("vi expanse-ebpf", False),
        ("ssh agent", False),
        ("", False),
    ],
)
def test_an_agent_is_known_by_its_command_line(line: str, is_one: bool) -> None:
    assert run.is_agent(line.split()) is is_one


def test_a_node_with_a_collector_is_refused_with_its_pid(tmp_path: Path) -> None:
    source = "import sys; print(flush=True); input()"
    command = [sys.executable, "-c", source, "expanse-ebpf", "agent"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as stranger:
        assert stranger.stdout is not None
        stranger.stdout.readline()
        with pytest.raises(UnavailableError, match=rf"runs on this node already \(pid .*\b{stranger.pid}\b"):
            run.check(PLAN)
        assert stranger.pid in run.collectors()
        stranger.communicate(b"\n")
    assert stranger.pid not in run.collectors()


def test_a_plan_whose_runs_would_fail_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "collectors", list)
    run.check(replace(PLAN, arms=(COLLECTION, Arm("peer", "command", command=("sh", "-c", "true")))))
    cases: list[tuple[Plan, type[ExpanseError], str]] = [
        (
            replace(PLAN, arms=(Arm("x", "command", command=("no-such-thing",)),)),
            UnavailableError,
            "no-such-",
        ),
        (
            replace(PLAN, arms=(Arm("x", "traces_by_rule"),), controller="h:1"),
            ConfigError,
            "arms.x: the rules",
        ),
    ]
    for plan, kind, why in cases:
        with pytest.raises(kind, match=why):
            run.check(plan)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="run it as root"):
        run.check(PLAN)


def test_programs_are_told_with_their_versions() -> None:
    arms = (
        Arm("a", "command", command=("py-spy", "record")),
        Arm("b", "command", command=("true",)),
        COLLECTION,
    )
    found = run.tools(replace(PLAN, arms=arms))
    assert found.keys() == {"py-spy", "true"}
    assert re.fullmatch(r"py-spy \d+\.\d+\.\d+", found["py-spy"])
