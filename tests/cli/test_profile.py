"""`expanse-ebpf profile` as people start it: with an agent, without one, and with a controller."""

from __future__ import annotations

import gzip
import io
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.cli import profile as profile_command
from expanse_ebpf.cli import profile_session
from expanse_ebpf.cli.profile_session import Target
from expanse_ebpf.cli.profile_summary import HotLine, Progress, Summary
from expanse_ebpf.config import Config
from expanse_ebpf.errors import ConfigError, UnavailableError, UnknownJobError
from expanse_ebpf.export import pprof
from expanse_ebpf.ship import remote
from expanse_ebpf.top.text import cell_width
from expanse_ebpf.wire.collector_pb2 import ProfileReply
from expanse_ebpf.wire.profile_pb2 import Profile
from tests.cli import nobody
from tests.kernel.test_accounting import programs_of
from tests.top.serving import ServedNode, make_report

COMMAND = [sys.executable, "-c", "from expanse_ebpf.cli import main; main()", "profile"]
PERIOD_NS = 20_408_163
Run = Callable[..., "subprocess.CompletedProcess[bytes]"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*COMMAND, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def made(**functions: tuple[int, int, int]) -> Profile:
    """A profile of functions with their values; a name that begins with `un_` is a reason instead."""
    builder = pprof.ProfileBuilder(period_ns=PERIOD_NS, time_ns=10**18, duration_ns=2 * 10**9)
    for name, values in functions.items():
        if name.startswith("un_"):
            builder.add([("[x]", "", 0, 0)], values, {"unresolved": name.removeprefix("un_")})
        else:
            builder.add(
                [(name, "/srv/train.py", 7, 1), ("main", "/srv/train.py", 20, 15)], values, {"pid": 7}
            )
    return builder.build()


# ---- what cannot be asked for


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give either --job KEY or --pid PID"),
        (["--job", "run/x", "--pid", "1"], "give either --job KEY or --pid PID"),
        (["--job", "nonsense"], "'nonsense' is not a job's key"),
        (["--pid", "0"], "--pid"),
        (["--pid", "1", "--rate", "1000"], "--rate"),
        *(
            (["--pid", "1", "--duration", text], f"--duration: '{text}' is not a time of 0.1 s or more")
            for text in ("0", "0.05s", "-5", "5x", "inf", "nan", "", " 5")
        ),
        (["run/train"], "'run/train' stands alone: use --job run/train"),
        (["4711"], "'4711' stands alone: use --pid 4711"),
        (["--pid", "1", "-o", "x.svg"], "no SVG is made; -o x.html is a flame graph"),
        (["--pid", "1", "--format", "svg"], "--format"),
        (["--pid", "1", "--format", "html", "--value", "cpu"], "--value goes with --format collapsed"),
        (["--pid", "1", "-o", "/nonexistent/x.html"], "there is no directory /nonexistent"),
        (["--pid", "1", "-o", "/"], "is a directory"),
        (["--pid", "1", "--from", "1h"], "--from needs --controller"),
        (["--pid", "1", "--node", "n"], "--node needs --controller"),
        (["--job", "run/x", "--controller", "x:1", "--rate", "9"], "--rate goes with a live profile"),
        (["--job", "run/x", "--controller", "x:1", "--socket", "/x"], "--socket goes with a live profile"),
        (["--pid", "1", "--controller", "x:1"], "give --job KEY"),
        (["--job", "x", "--controller", "x:1"], "'x' is not a job's key"),
        (["--job", "run/x", "--controller", "x"], "HOST:PORT"),
        (["--job", "run/x", "--controller", "x:1", "--from", "soon"], "'soon' is not a time"),
        (["--job", "run/x", "--controller", "x:1", "--from", "1h", "--to", "2h"], "not earlier than --to"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(profile_command.command, arguments)
    assert result.stdout == ""
    if isinstance(result.exception, ConfigError):
        said = str(result.exception)
        assert "\n" not in said
    else:  # click's own
        assert result.exit_code == 2
        said = result.stderr
    assert words in said


# ---- through an agent


@pytest.fixture
def node(tmp_path: Path) -> Iterator[ServedNode]:
    """An agent that makes a report, and a part, ten times a second."""
    end = threading.Event()

    def publish() -> None:
        sequence = 1
        while not end.wait(0.1):
            served.publish(make_report(sequence, interval_s=0.1))
            sequence += 1

    with ServedNode(str(tmp_path / "agent.sock")) as served:
        thread = threading.Thread(target=publish)
        thread.start()
        yield served
        end.set()
        thread.join(10)


def test_collapsed_stacks_go_to_standard_output_and_a_summary_beside(node: ServedNode) -> None:
    result = run("--job", "slurm/4411", "--duration", "0.5", "--socket", node.path)
    assert result.returncode == 0
    lines = result.stdout.decode().splitlines()
    assert 3 <= len(lines) <= 20
    assert all(line.endswith(f" {PERIOD_NS}") for line in lines)
    assert "part1 (/srv/train.py:7) 20408163" in lines[0]
    said = result.stderr.decode().splitlines()
    assert said[0].startswith("slurm/4411: ")
    counted = f"at 49 Hz, {len(lines)} samples on CPUs, 0 visits to waiting threads, 100.0% resolved"
    assert said[0].endswith(counted)
    assert said[1] == f"sampled by the agent on {node.path}"
    (watch,) = node.watches
    assert (watch.request.key, watch.request.pid) == ("slurm/4411", 0)
    assert (watch.asked[-1], watch.closed) == (True, 1)


@pytest.mark.parametrize(
    ("name", "options", "begins"),
    [
        ("x.html", [], b"<!DOCTYPE html>"),
        ("x.json", [], b"{"),
        ("x.pb.gz", [], b"\x1f\x8b"),
        ("x.PB", [], b"\x1f\x8b"),
        ("x.txt", [], b"part1 ("),
        ("x.folded", [], b"part1 ("),
        ("x", [], b"part1 ("),
        ("x.html", ["--format", "collapsed", "--value", "samples"], b"part1 ("),
    ],
)
def test_the_files_ending_says_the_format(
    node: ServedNode, tmp_path: Path, name: str, options: list[str], begins: bytes
) -> None:
    file = tmp_path / name
    arguments = ["--job", "slurm/4411", "--duration", "0.3", "--socket", node.path, "-o", str(file), *options]
    result = CliRunner().invoke(profile_command.command, arguments)
    assert (result.exit_code, result.stdout) == (0, "")
    assert file.read_bytes().lower().startswith(begins.lower())
    form = {"<": "html", "{": "speedscope", "\x1f": "pprof", "p": "collapsed"}[begins.decode("latin-1")[0]]
    assert f"written to {file} ({form})\n" in result.stderr


def test_pprof_in_a_pipe(node: ServedNode) -> None:
    result = run("--pid", "77", "--duration", "0.3", "--socket", node.path, "--format", "pprof", "-o", "-")
    assert result.returncode == 0
    stacks = list(pprof.Reader(pprof.loads(result.stdout)).stacks())
    assert stacks[0].frames[0].name == "part1"
    assert node.watches[0].request.pid == 77
    assert gzip.decompress(result.stdout)


def test_json_is_the_summary_alone(node: ServedNode) -> None:
    result = run("--job", "slurm/4411", "--duration", "0.5", "--socket", node.path, "--json")
    assert (result.returncode, result.stderr) == (0, b"")
    said = json.loads(result.stdout)
    assert said["target"] == "slurm/4411"
    assert said["resolved"] == said["samples"] >= 3
    assert said["rate_hz"] == 49
    assert said["running"][0]["file"] == "/srv/train.py"
    assert said["cpu_seconds"] == pytest.approx(said["samples"] * PERIOD_NS / 1e9)
    assert (said["waiting"], said["note"], said["visits"]) == ([], None, 0)
    assert said["sampler"] == f"sampled by the agent on {node.path}"


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, **options)


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_early_end_keeps_what_there_is(node: ServedNode, number: signal.Signals) -> None:
    with started(
        *("--job", "slurm/4411", "--duration", "600", "--socket", node.path),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        wait_until(lambda: node.watches and node.watches[0].parts > 4)
        process.send_signal(number)
        out, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.count(b"\n") >= 4
    assert b"resolved" in said
    assert b"Traceback" not in said


def test_a_second_ctrl_c_ends_it_at_once(tmp_path: Path) -> None:
    with ServedNode(str(tmp_path / "agent.sock")) as node:  # no ticks: it waits for the last part
        node.server._send_part = node.server._finish = lambda *_, **__: None  # type: ignore[method-assign]
        with started(
            *("--job", "slurm/4411", "--socket", node.path), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            wait_until(lambda: node.watches)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(30) == -signal.SIGINT


def test_a_job_that_ends_ends_the_profile(node: ServedNode) -> None:
    with started(
        *("--job", "slurm/4411", "--duration", "600", "--socket", node.path), stderr=subprocess.PIPE
    ) as process:
        wait_until(lambda: node.watches and node.watches[0].parts > 2)
        node.watches[0].over = "the job has ended"
        _, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert said.decode().splitlines()[2] == "the job has ended"


def test_an_agent_that_goes_away_leaves_what_there_is(tmp_path: Path) -> None:
    with ServedNode(str(tmp_path / "agent.sock")) as node:
        process = started(
            *("--job", "slurm/4411", "--duration", "600", "--socket", node.path),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        wait_until(lambda: node.watches)
        node.publish(make_report(1))
        node.publish(make_report(2))
    out, said = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.count(b"\n") == 2
    assert b"hung up" in said


def test_on_a_terminal_there_is_a_line_of_progress_and_no_pprof(node: ServedNode) -> None:
    master, slave = pty.openpty()
    try:
        with started(
            *("--job", "slurm/4411", "--duration", "1.5", "--socket", node.path),
            stdout=subprocess.DEVNULL,
            stderr=slave,
        ) as process:
            assert process.wait(60) == 0
        said = os.read(master, 100_000).decode()
        assert "s left, " in said
        assert "Ctrl-C ends it" in said
        assert "\r" in said.partition("slurm/4411: ")[0]
        assert said.rstrip().splitlines()[-1].split()[0].endswith("%")
        for form, words in (("pprof", b"pprof is binary"), ("html", b"HTML is for a browser")):
            refused = subprocess.run(
                [*COMMAND, "--pid", "1", "--format", form, "--socket", node.path],
                stdout=slave,
                stderr=subprocess.PIPE,
                timeout=60,
            )
            assert refused.returncode == 2
            assert words in refused.stderr
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize(
    ("options", "stacks"),
    [([], False), (["--value", "cpu"], True), (["-o", "-"], True), (["-f", "collapsed"], True)],
)
def test_a_terminal_is_shown_the_summary_alone_unless_it_wants_more(
    node: ServedNode, options: list[str], stacks: bool
) -> None:
    master, slave = pty.openpty()
    try:
        with started(
            *("-j", "slurm/4411", "-d", "0.5s", "--socket", node.path, *options), stdout=slave, stderr=slave
        ) as process:
            assert process.wait(60) == 0
        said = os.read(master, 100_000).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert ("part1 (/srv/train.py:7) 20408163" in said) is stacks
    assert "on a CPU, " in said
    assert ("-o train.html for a flame graph; --format collapsed for the stacks" in said) is not stacks


def test_a_socket_that_is_named_has_to_answer(child: Callable[..., int]) -> None:
    pid = child("sh", "-c", "echo; exec sleep 60")
    result = run("--pid", str(pid), "--socket", "/nonexistent/agent.sock", "--duration", "0.3")
    assert result.returncode == 1
    assert result.stderr.decode().startswith(
        "error: no agent answers on /nonexistent/agent.sock: start it with"
    )


def test_what_the_agent_refuses_and_nobody_else_can_do_has_its_exit_code(node: ServedNode) -> None:
    result = run("--job", "slurm/0", "--socket", node.path)
    assert result.returncode == 3
    said = result.stderr.decode()
    assert said.startswith("error: no job slurm/0 on this node")
    assert said.endswith("a controller may have the stacks of one that has ended: --controller HOST:PORT\n")


class Refused:
    """A session of one's own that cannot be had."""

    asked: list[int] = []  # noqa: RUF012 - rates, by every test anew

    def __init__(self, target: Target, rate_hz: int, config: Config) -> None:
        self.asked.append(rate_hz)
        raise UnavailableError("CAP_X is missing")


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rates at which a session of one's own was asked for, in vain."""
    monkeypatch.setattr(profile_session, "OwnSession", Refused)
    monkeypatch.setattr(Refused, "asked", [])
    return Refused.asked


@pytest.mark.parametrize("rate_hz", [None, 49])
def test_the_agent_comes_first(node: ServedNode, refused: list[int], rate_hz: int | None) -> None:
    session = profile_session.local(node.path, Target("slurm/4411", 0), rate_hz, Config())
    assert isinstance(session, profile_session.AgentSession)
    session.close()
    assert refused == []


@pytest.mark.parametrize(
    ("key", "rate_hz", "error", "words"),
    [
        ("slurm/4411", 99, UnavailableError, "the agent samples at 49 Hz; profiling without it: CAP_X"),
        ("slurm/boom", None, UnavailableError, "see its log; profiling without it: CAP_X is missing"),
        ("slurm/0", None, UnknownJobError, "no job slurm/0 on this node"),
    ],
)
def test_when_neither_can_do_it_what_says_most_is_said(
    node: ServedNode, refused: list[int], key: str, rate_hz: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        profile_session.local(node.path, Target(key, 0), rate_hz, Config())
    assert refused == [rate_hz or 49]
    wait_until(lambda: node.clients() == 0)


# ---- without an agent

SPIN = """
import sys, threading, queue, time
threading.Thread(target=queue.Queue().get, daemon=True).start()
def spin():
    x = 0
    for i in range(10**5):
        x += i
print(flush=True)
end = time.monotonic() + 60
while time.monotonic() < end:
    spin()
"""


@pytest.fixture
def child() -> Iterator[Callable[..., int]]:
    """Start a process that says when it is ready; its pid."""
    all_of_them: list[subprocess.Popen[bytes]] = []

    def start(*command: str, **environment: str) -> int:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={**os.environ, **environment}
        )
        all_of_them.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process.pid

    yield start
    for process in all_of_them:
        process.kill()
        process.communicate()


def alone(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return run(*arguments, EXPANSE_AGENT_SOCKET="/nonexistent/agent.sock")


def test_a_process_is_profiled_without_an_agent(child: Callable[..., int]) -> None:
    pid = child(sys.executable, "-S", "-c", SPIN)
    result = alone("--pid", str(pid), "--duration", "1.5", "--rate", "99", "--json")
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert said["sampler"] == "sampled by this command: no agent answers on /nonexistent/agent.sock"
    assert (said["target"], said["rate_hz"]) == (f"process {pid}", 99)
    assert said["running"][0]["function"] == "spin"
    assert said["resolved"] > 0.8 * said["samples"] > 20
    assert any(line["function"].endswith("wait") and line["standard"] for line in said["waiting"])


def test_a_job_is_profiled_without_an_agent() -> None:
    name = f"profiled-{os.getpid()}"
    job = subprocess.Popen(
        [
            *(sys.executable, "-m", "expanse_ebpf", "run", "--name", name, "--"),
            *(sys.executable, "-S", "-c", SPIN),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert job.stdout is not None
        job.stdout.readline()
        result = alone("--job", f"run/{name}", "--duration", "1.5", "--format", "pprof")
        assert result.returncode == 0, result.stderr
        stacks = list(pprof.Reader(pprof.loads(result.stdout)).stacks())
        assert {s.labels.get("job") for s in stacks} == {f"run/{name}"}
        assert "spin" in {s.frames[0].name for s in stacks}
        missing = alone("--job", f"run/not-{name}")
        assert missing.returncode == 3
        assert missing.stderr.decode().startswith(f"error: no job run/not-{name} on this node")
    finally:
        job.terminate()
        job.communicate()


def test_nothing_but_its_reason_when_nothing_can_be_profiled(child: Callable[..., int]) -> None:
    busy = child("sh", "-c", "echo; while :; do :; done")
    result = alone("--pid", str(busy), "--duration", "0.6")
    assert (result.returncode, result.stdout) == (1, b"")
    assert b"nothing could be profiled: not Python" in result.stderr
    assert result.stderr.count(b"\n") == 1
    idle = child("sh", "-c", "echo; exec sleep 60")
    result = alone("--pid", str(idle), "--duration", "0.3")
    assert result.returncode == 1
    assert b"nothing could be profiled: not Python" in result.stderr


@pytest.mark.parametrize(
    ("functions", "note", "said"),
    [
        ({"un_not_python": (5, 1, 0), "un_starting": (1, 1, 0)}, "", "not Python, starting"),
        (
            {"un_unsupported": (5, 1, 0)},
            "unsupported interpreter: Python 3.7",
            "unsupported interpreter: Python 3.7",
        ),
        ({"un_starting": (5, 1, 0)}, "the process has ended", "starting"),
        ({}, "the process has ended", "exited: the process has ended before anything could be sampled"),
        ({}, "opted out: it says so", "opted out: it says so"),
        ({}, "", "not Python: "),  # a sleeping program, looked at here
    ],
)
def test_the_reason_that_says_most(
    child: Callable[..., int], functions: dict[str, tuple[int, int, int]], note: str, said: str
) -> None:
    target = Target("", child("sh", "-c", "echo; exec sleep 60"))
    summary = Summary.of(made(**functions), str(target), note)
    with pytest.raises(profile_command.NothingProfiledError) as caught:
        profile_command._require(summary, target)
    assert str(caught.value).startswith(f"{target}: nothing could be profiled: {said}")
    profile_command._require(Summary.of(made(step=(1, 1, 0), **functions), "x", note), target)


@pytest.mark.parametrize(
    ("functions", "note", "said"),
    [
        (
            {"un_opted_out": (5, 1, 0), "un_starting": (1, 1, 0)},
            "",
            "opted out: EXPANSE_PROFILE=off is in its processes' environment",
        ),
        (
            {},
            "the job has ended",
            "exited: the job has ended before anything could be sampled; a controller may have the stacks of "
            "one that has ended: --controller HOST:PORT",
        ),
    ],
)
def test_the_reason_of_a_job_says_what_to_do(
    functions: dict[str, tuple[int, int, int]], note: str, said: str
) -> None:
    with pytest.raises(profile_command.NothingProfiledError) as caught:
        profile_command._require(Summary.of(made(**functions), "run/x", note), Target("run/x", 0))
    assert str(caught.value) == f"run/x: nothing could be profiled: {said}"


def test_a_job_that_did_nothing_is_no_error() -> None:
    profile_command._require(Summary.of(made(), "run/x"), Target("run/x", 0))


def test_a_process_that_is_gone_or_that_has_opted_out(child: Callable[..., int]) -> None:
    result = alone("--pid", str(2**22 + 1))
    assert result.returncode == 3
    assert b"it may have exited" in result.stderr
    pid = child(sys.executable, "-S", "-c", SPIN, EXPANSE_PROFILE="off")
    result = alone("--pid", str(pid), "--duration", "0.6")
    assert result.returncode == 1
    assert b"nothing could be profiled: opted out" in result.stderr


def test_a_python_that_does_nothing_is_no_error(child: Callable[..., int]) -> None:
    pid = child(
        sys.executable, "-S", "-c", "print(flush=True)\ndef doze():\n    import time; time.sleep(60)\ndoze()"
    )
    result = alone("--pid", str(pid), "--duration", "1")
    assert result.returncode == 0, result.stderr
    assert b"doze" in result.stdout
    assert b"nothing ran on a CPU: the stacks are of waiting threads" in result.stderr


def test_a_process_that_exits_meanwhile_leaves_what_it_did(tmp_path: Path) -> None:
    end = tmp_path / "end"
    code = f"import os\ndef spin():\n    while not os.path.exists({str(end)!r}): pass\nspin()"
    spinning = subprocess.Popen([sys.executable, "-S", "-c", code])
    profiling = started(
        *("--pid", str(spinning.pid), "--duration", "600"),
        env={**os.environ, "EXPANSE_AGENT_SOCKET": "/nonexistent"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    wait_until(lambda: len(programs_of(profiling.pid)) > 1 or profiling.poll() is not None)
    time.sleep(2)
    end.touch()
    spinning.wait(30)
    out, said = profiling.communicate(timeout=30)
    assert profiling.returncode == 0, said
    assert b"spin" in out
    assert b"the process has ended" in said


def test_without_rights_the_remedy_is_said_in_one_line(child: Callable[..., int]) -> None:
    pid = child("setpriv", f"--reuid={nobody.NOBODY}", "sh", "-c", "echo; exec sleep 60")
    command = nobody.argv("profile", "--pid", str(pid))
    environment = {**os.environ, "EXPANSE_AGENT_SOCKET": "/nonexistent/agent.sock"}
    result = subprocess.run(
        command, capture_output=True, timeout=60, stdin=subprocess.DEVNULL, env=environment
    )
    said = result.stderr.decode()
    assert result.returncode == 1
    assert "no agent answers on /nonexistent/agent.sock" in said
    assert "CAP_BPF" in said
    assert said.count("\n") == 1


# ---- what a controller has


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def fetch(address: str, key: str, **arguments: Any) -> ProfileReply:
        asked.append({"address": address, "key": key, **arguments})
        if key == "slurm/404":
            return ProfileReply()
        profile = made(step=(3, 3 * PERIOD_NS, 0), un_changed=(1, PERIOD_NS, 0))
        packed = pprof.dumps(profile)
        return ProfileReply(pprof=packed, parts=2, from_ns=10**18, to_ns=10**18 + 120 * 10**9)

    monkeypatch.setattr(remote, "fetch_profile", fetch)
    return asked


def test_what_a_controller_has_stored(fetched: list[dict[str, Any]]) -> None:
    before = time.time_ns()
    arguments = [
        "--controller",
        "head:9777",
        "--job",
        "slurm/1",
        "--from",
        "2h",
        "--to",
        "1h",
        "--node",
        "n1",
    ]
    result = CliRunner().invoke(profile_command.command, arguments)
    assert result.exit_code == 0, result.output
    assert "step (/srv/train.py:7) 61224489" in result.stdout
    assert "2 parts, 2001-09-09T01:46:40Z to 2001-09-09T01:48:40Z" in result.stderr
    assert "4 samples on CPUs, 0 visits to waiting threads, 75.0% resolved" in result.stderr
    assert "sampled by" not in result.stderr
    (asked,) = fetched
    assert (asked["address"], asked["key"], asked["node"]) == ("head:9777", "slurm/1", "n1")
    assert asked["to_ns"] - asked["from_ns"] == 3600 * 10**9
    assert abs(asked["to_ns"] + 3600 * 10**9 - before) < 60 * 10**9


def test_a_span_without_stacks_is_an_error_that_says_which(fetched: list[dict[str, Any]]) -> None:
    result = CliRunner().invoke(
        profile_command.command,
        ["--controller", "head:9777", "--job", "slurm/404", "--from", "2026-11-30T10:00:00Z"],
    )
    assert isinstance(result.exception, profile_command.NothingProfiledError)
    assert "no stacks of slurm/404 between 2026-11-30T10:00:00Z and " in str(result.exception)


@pytest.mark.parametrize(("text", "length"), [("30", 30), ("0.5s", 0.5), ("5m", 300), ("1.5h", 5400)])
def test_lengths_of_time(text: str, length: float) -> None:
    assert profile_command.seconds(text, "--duration") == length


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("90s", 10**18 - 90 * 10**9),
        ("-1.5h", 10**18 - 5400 * 10**9),
        ("3d", 10**18 - 259200 * 10**9),
        ("2001-09-09T01:46:40Z", 10**18),
        ("2001-09-09T03:46:40+02:00", 10**18),
    ],
)
def test_times(text: str, ns: int) -> None:
    assert profile_command.moment(text, 10**18, "--from") == ns


@given(st.text())
def test_any_text_is_a_time_or_a_config_error(text: str) -> None:
    said = ""
    try:
        profile_command.moment(text, 10**18, "--from")
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


# ---- what is said


def test_a_summary_in_figures_and_in_lines() -> None:
    profile = made(
        step=(30, 30 * PERIOD_NS, 0),
        get=(8, 0, 2 * 10**9),
        both=(14, 10 * PERIOD_NS, 10**9),
        un_changed=(2, 2 * PERIOD_NS, 0),
        un_not_python=(8, 8 * PERIOD_NS, 0),
    )
    summary = Summary.of(profile, "run/x", unavailable={"cpus": "not sampled: CPU 3"})
    assert (summary.samples, summary.resolved) == (62, 52)
    assert summary.visits == 12
    assert summary.running == [
        HotLine("step", "/srv/train.py", 7, 0.6),
        HotLine("both", "/srv/train.py", 7, 0.2),
    ]
    assert [(line.function, round(line.share, 3)) for line in summary.waiting] == [
        ("get", 0.667),
        ("both", 0.333),
    ]
    assert summary.lines() == [
        "run/x: 2.0 s at 49 Hz, 50 samples on CPUs, 12 visits to waiting threads, 83.9% resolved",
        "not resolved: 8 not Python, 2 changed while read",
        "cpus: not sampled: CPU 3",
        "on a CPU, 1.0 s (0.51 cores):",
        "   60.0%  step  /srv/train.py:7",
        "   20.0%  both  /srv/train.py:7",
        "waiting, 3.0 thread-seconds (1.5 threads on average):",
        "   66.7%  get  /srv/train.py:7",
        "   33.3%  both  /srv/train.py:7",
    ]
    assert all(len(line) <= 30 for line in summary.lines(30))
    assert json.loads(json.dumps(summary.as_json()))["unresolved"] == {"not_python": 8, "changed": 2}


def test_a_wait_is_charged_to_the_line_of_the_program() -> None:
    standard = "/usr/lib/python3.11/threading.py"
    wait, get = (
        ("Condition.wait", standard, 327, 300),
        ("Queue.get", "/usr/lib/python3.11/queue.py", 171, 154),
    )
    own = ("Trainer.step", "/srv/train.py", 18, 9)
    worker = [wait, ("_worker", "/usr/lib/python3.11/concurrent/futures/thread.py", 81, 60)]
    deep = [wait, get, ("a", standard, 1, 1), ("b", standard, 1, 1), own]
    builder = pprof.ProfileBuilder(period_ns=PERIOD_NS, time_ns=10**18, duration_ns=10 * 10**9)
    builder.add([wait, get, own, ("main", "/srv/train.py", 50, 40)], (10, PERIOD_NS, 9 * 10**9), {"pid": 7})
    builder.add(deep, (1, 0, 10**9), {"pid": 7})
    builder.add(worker, (30, 0, 27 * 10**9), {"pid": 7})
    summary = Summary.of(builder.build(), "run/x")
    assert summary.lines()[1:] == [
        "on a CPU, 0.0 s (0.00 cores):",
        f"  100.0%  Condition.wait  {standard}:327",
        "waiting, 37.0 thread-seconds (3.7 threads on average):",
        f"   73.0%  Condition.wait  {standard}:327  (standard library)",
        "   27.0%  Trainer.step  /srv/train.py:18  in Queue.get > Condition.wait",
    ]
    assert summary.waiting[1].inside == ("Queue.get", "Condition.wait")
    builder.add(deep, (99, 0, 99 * 10**9), {"pid": 7})
    lines = Summary.of(builder.build(), "run/x").lines()
    assert lines[-2].endswith("Trainer.step  /srv/train.py:18  in b > … > Condition.wait")


@given(st.text(st.characters(codec="utf-8"), max_size=80), st.text(max_size=200), st.integers(1, 99999))
def test_a_path_loses_its_beginning_and_never_its_line(function: str, file: str, line: int) -> None:
    builder = pprof.ProfileBuilder(period_ns=PERIOD_NS, time_ns=10**18, duration_ns=10**9)
    builder.add([(function, "/" + file + "/train.py", line, 1)], (1, PERIOD_NS, 5), {})
    for width in (40, 60, 80):
        shown = Summary.of(builder.build(), "run/x").lines(width)
        assert max(map(cell_width, shown)) <= width
        assert sum(said.endswith(f"/train.py:{line}") for said in shown) == 2


def test_what_is_said_behind_a_path_has_its_room() -> None:
    file = f"/home/ada/{'deep/' * 20}lib/python3.11/threading.py"
    builder = pprof.ProfileBuilder(period_ns=PERIOD_NS, time_ns=10**18, duration_ns=10**9)
    builder.add([("Condition.wait", file, 327, 300)], (1, 0, 5), {})
    shown = Summary.of(builder.build(), "run/x").lines(80)[-1]
    assert shown == "  100.0%  Condition.wait  …p/lib/python3.11/threading.py:327  (standard library)"


def test_the_five_hottest_lines_and_no_more() -> None:
    profile = made(**{f"f{number}": (1, PERIOD_NS, 0) for number in range(9)})
    assert [line.function for line in Summary.of(profile, "x").running] == [f"f{n}" for n in range(5)]


def test_nothing_at_all_is_said_as_such() -> None:
    summary = Summary.of(Profile(), "run/x")
    assert (summary.samples, summary.resolved, summary.rate_hz) == (0, 0, 0)
    assert "it did nothing on a CPU" in summary.lines()[-1]
    assert summary.as_json()["rate_hz"] is None


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_drawn_over_itself_and_wiped() -> None:
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.show(9.6)
        progress.show(9.5)  # too soon
        progress.add(made(step=(3, 3, 0), un_changed=(1, 1, 0)))
        progress._drawn = 0.0
        progress.show(8.7)
    lines = terminal.getvalue().split("\r")
    assert lines[1].startswith("10 s left, 0 samples, Ctrl-C")
    assert lines[2].startswith("9 s left, 4 samples, 75.0% resolved, ")
    assert (lines[3].strip(), len(lines[3]), lines[4]) == ("", len(lines[2]), "")


def test_what_is_no_terminal_gets_no_progress() -> None:
    for stream in (io.StringIO(), None):
        with Progress(stream) as progress:
            progress.add(made(step=(1, 1, 0)))
            progress.show(5)
        assert stream is None or stream.getvalue() == ""
