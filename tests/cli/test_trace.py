"""`expanse-ebpf trace` and `traces` as people start them: with an agent, and with a controller."""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import pty
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from expanse_ebpf import config
from expanse_ebpf.cli import trace as trace_command
from expanse_ebpf.cli import trace_session, traces
from expanse_ebpf.cli.trace_session import Progress, Windows, state_name
from expanse_ebpf.errors import ConfigError, UnavailableError, UnknownJobError
from expanse_ebpf.export import perfetto
from expanse_ebpf.ship import remote
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_BUDGET,
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_PROBE_POINT,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    StoredTrace,
    TracePart,
    TraceReply,
    TraceRequest,
    TraceState,
)
from tests.cli.tracing_node import BASE_NS, WINDOW, MadeUpWindow, TracingNode, made_trace, parts, status
from tests.top.serving import make_report

COMMAND = [sys.executable, "-c", "from expanse_ebpf.cli import main; main()"]


def started(*arguments: str, **options: Any) -> subprocess.Popen[bytes]:
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, **options)


def run(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error."""
    with started(*arguments, env={**os.environ, **environment}) as process:
        out, said = process.communicate(timeout=60)
    return process.returncode, out.decode(), said.decode()


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def told(
    state: TraceState = TRACE_STATE_OPEN, reason: str = "", node: str = "", **figures: float
) -> TraceReply:
    return TraceReply(node=node, status=status(state, reason, **figures))


def whole(launches: int = 10, node: str = "") -> list[TraceReply]:
    """A window that is over, and its trace in several parts."""
    return [
        told(TRACE_STATE_DONE, node=node, launches=launches, cost_share=0.003, traced_share=1.0),
        *parts(made_trace(node or "gpu017", launches), 100, node),
    ]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[TracingNode]:
    """An agent whose windows are open for an instant and then done."""
    with TracingNode(str(tmp_path / "agent.sock")) as served:
        served.begin = lambda window: window.end([told(TRACE_STATE_WAITING), told(launches=4), *whole()])
        yield served


# ---- what cannot be asked for


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give one job's key, as JOB or by --job KEY"),
        (["run/x", "--job", "run/y"], "give one job's key, as JOB or by --job KEY"),
        (["--job", "nonsense"], "'nonsense' is not a job's key"),
        (["nonsense"], "'nonsense' is not a job's key"),
        *(
            (
                ["run/x", "--seconds", text],
                f"--seconds: '{text}' is no length of a window: "
                "use 0.1 to 120 s (tracing.max_window_s): 25, 25s, 2m",
            )
            for text in ("soon", "nan", "0", "-1")
        ),
        (
            ["run/x", "--seconds", "2h"],
            "--seconds: 2h is longer than any window: use 0.1 to 120 s (tracing.max_window_s)",
        ),
        *(
            (
                ["run/x", "--cost", text],
                f"--cost: '{text}' is not a share between 0.01% and 100%: use 2% or 0.02",
            )
            for text in ("2", "0", "0%", "101%", "-1%", "nan", "", "2%%", "1e-3", "٢%")
        ),
        *(
            (
                ["run/x", "--share", text],
                f"--share: '{text}' is not a share between 0.1% and 100%: use 30% or 0.3",
            )
            for text in ("30", "x")
        ),
        (["run/x", "-o", "x.json"], "-o x.json: name it FILE.pftrace"),
        (["run/x", "-o", "-"], "-o -: name it FILE.pftrace"),
        (
            ["run/x", "-o", "/nonexistent/x.pftrace"],
            "-o /nonexistent/x.pftrace: the folder /nonexistent cannot be written: No such file or directory",
        ),
        (
            ["run/x", "-o", "/sys/kernel/x.pftrace"],
            "-o /sys/kernel/x.pftrace: the folder /sys/kernel cannot be written: ",
        ),
        (["run/x", "-o", f"{'x' * 300}.pftrace"], "File name too long"),
        (["run/x", "-o", "/proc/x.pftrace"], "-o /proc/x.pftrace: "),
        (["run/x", "--node", "n1", "--local"], "--node needs --controller HOST:PORT"),
        (["run/x", "--controller", "x:1", "--local"], "--controller and --local exclude each other"),
        (["run/x", "--controller", "x:1", "--socket", "/x"], "--controller and --socket exclude each other"),
        (["run/x", "--controller", "x"], "--controller: 'x' is not HOST:PORT"),
    ],
)
def test_what_makes_no_sense_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(trace_command.command, arguments)
    assert result.stdout == ""
    if isinstance(result.exception, ConfigError):
        said = str(result.exception)
        assert "\n" not in said
    else:  # click's own
        assert result.exit_code == 2
        said = result.stderr
    assert words in said


def test_a_place_where_no_file_can_be_made_is_told_before_a_window_is_opened(
    node: TracingNode, tmp_path: Path
) -> None:
    (tmp_path / "x.pftrace").mkdir()
    code, out, said = run("trace", "slurm/4411", "--socket", node.path, "-o", str(tmp_path / "x.pftrace"))
    assert (code, out) == (2, "")
    assert said == f"error: -o {tmp_path}/x.pftrace: is no file; name another\n"
    (tmp_path / "loop.pftrace").symlink_to(tmp_path / "loop.pftrace")
    assert run("trace", "slurm/4411", "--socket", node.path, "-o", str(tmp_path / "loop.pftrace"))[0] == 2
    assert node.windows == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.sock", "loop.pftrace", "x.pftrace"]


@pytest.mark.parametrize(
    ("given", "share"), [(None, 0), ("2%", 0.02), ("0.02", 0.02), ("100 %", 1), ("1", 1), ("0.01%", 0.0001)]
)
def test_shares(given: str | None, share: float) -> None:
    assert trace_command.share_of_one(given, "--cost", 0.0001, "2%") == pytest.approx(share)


@pytest.mark.parametrize("command", [trace_command.command, traces.command])
def test_the_help_fits_a_terminal(command: click.Command) -> None:
    result = CliRunner().invoke(command, ["--help"], terminal_width=80, prog_name="expanse-ebpf trace")
    assert result.exit_code == 0
    assert [line for line in result.output.splitlines() if len(line) > 80] == []


# ---- through this node's agent


def test_a_summary_goes_to_standard_output_and_how_it_went_beside(node: TracingNode) -> None:
    code, out, said = run("trace", "slurm/4411", "--socket", node.path)
    assert code == 0, said
    assert "gemm" in out
    assert said.splitlines() == ["waiting", "open", "done"]
    (window,) = node.windows
    assert window.request == TraceRequest(key="slurm/4411")
    wait_until(lambda: window.closed == 1 and node.clients() == 0)
    assert window.stops == 0


def test_what_is_asked_for_reaches_the_agent(node: TracingNode) -> None:
    options = ["-s", "2m", "--stacks", "--cost", "5%", "--share", "0.5", "--socket", node.path]
    assert run("trace", "slurm/4411", *options)[0] == 0
    assert node.windows[0].request == TraceRequest(
        key="slurm/4411", seconds=120, stacks=True, cost_share=0.05, run_share=0.5
    )


@pytest.mark.parametrize("flag", ["--job", "-j"])
def test_the_job_may_be_named_as_with_profile(node: TracingNode, flag: str) -> None:
    arguments = [flag, "slurm/4411", "--socket", node.path]
    assert CliRunner().invoke(trace_command.command, arguments).exit_code == 0
    assert node.windows[0].request.key == "slurm/4411"


def test_json_has_the_summary_and_how_the_window_stands(node: TracingNode) -> None:
    code, out, said = run("trace", "slurm/4411", "--socket", node.path, "--json")
    assert code == 0, said
    found = json.loads(out)
    assert set(found) == {"job", "window", "nodes", "summary", "file"}
    assert (found["job"], found["window"], found["file"]) == ("slurm/4411", WINDOW, None)
    assert isinstance(found["summary"], dict)
    assert found["nodes"] == [
        {
            "node": None,
            "state": "done",
            "reason": None,
            "rule": None,
            "from_ns": BASE_NS,
            "to_ns": BASE_NS + 2 * 10**9,
            "seconds": 2.0,
            "targets": 1,
            "launches": 10,
            "traced_share": 1.0,
            "cost_share": 0.003,
            "lost": None,
        }
    ]


@pytest.mark.parametrize("name", ["x.pftrace", "x.perfetto-trace", "X.PFTRACE", "x.pftrace.gz", "x.gz"])
def test_a_perfetto_trace_is_written_beside_the_summary(node: TracingNode, tmp_path: Path, name: str) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir()
    code, out, said = run("trace", "slurm/4411", "--socket", node.path, "-o", str(file), "--json")
    assert code == 0, said
    assert json.loads(out)["file"] == str(file)
    assert said.splitlines()[-1] == f"written to {file}: open it in https://ui.perfetto.dev"
    data = file.read_bytes()
    assert (gzip.decompress(data) if name.endswith(".gz") else data) == perfetto.dumps([made_trace()])
    assert [path.name for path in file.parent.iterdir()] == [name]
    assert stat.S_IMODE(file.stat().st_mode) == 0o666 & ~_umask()


def _umask() -> int:
    found = os.umask(0)
    os.umask(found)
    return found


def test_a_file_that_is_there_is_replaced_and_a_link_followed(node: TracingNode, tmp_path: Path) -> None:
    there, link = tmp_path / "there.pftrace", tmp_path / "link.pftrace"
    there.write_text("former")
    link.symlink_to("there.pftrace")
    assert run("trace", "slurm/4411", "--socket", node.path, "-o", str(link))[0] == 0
    assert there.read_bytes() == perfetto.dumps([made_trace()])
    assert link.is_symlink()


REFUSALS = [
    (TRACE_STATE_NO_TARGETS, 3, "no_targets", "there is no such job, or it has no process"),
    (TRACE_STATE_NO_PROBE_POINT, 4, "no_probe_point", "nothing that its processes map has a function"),
    (TRACE_STATE_BUDGET, 5, "budget", "the job's windows have used up what they may"),
    (TRACE_STATE_FAILED, 1, "failed", "the window failed"),
]


@pytest.mark.parametrize(("state", "code", "name", "words"), REFUSALS)
@pytest.mark.parametrize("reason", ["", "because of something"])
def test_without_a_trace_there_is_no_file_and_the_exit_code_says_why(
    node: TracingNode, tmp_path: Path, state: TraceState, code: int, name: str, words: str, reason: str
) -> None:
    node.begin = lambda window: window.end([told(TRACE_STATE_WAITING), told(state, reason)])
    file = tmp_path / "former.pftrace"
    file.write_text("former")
    ended, out, said = run("trace", "slurm/4411", "--socket", node.path, "-o", str(file), "--json")
    assert ended == code
    found = json.loads(out)
    assert (found["summary"], found["file"]) == (None, None)
    assert found["nodes"][0]["state"] == name
    assert found["nodes"][0]["reason"] == (reason or None)
    last = said.splitlines()[-1]
    assert last.startswith(f"error: slurm/4411: no trace: {name}: {reason or words}")
    assert file.read_text() == "former"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.sock", "former.pftrace"]


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (TRACE_STATE_DONE, "2 of 25 s: the job has ended"),
        (TRACE_STATE_BUDGET, "closed after 2 s: it cost 3 %"),
    ],
)
def test_a_window_that_was_cut_short_is_a_success_that_is_told(
    node: TracingNode, state: TraceState, reason: str
) -> None:
    last = told(state, reason, launches=10)
    node.begin = lambda window: window.end([told(), last, *whole()[1:]])
    code, out, said = run("trace", "slurm/4411", "--socket", node.path)
    assert code == 0
    assert out
    assert said.splitlines()[-1] == f"{state_name(last.status)}: {reason}"


@pytest.mark.parametrize(
    "state", [TRACE_STATE_NO_TARGETS, TRACE_STATE_BUDGET, TRACE_STATE_FAILED, TRACE_STATE_WAITING]
)
def test_figures_of_a_window_that_never_began_are_not_known(node: TracingNode, state: TraceState) -> None:
    refused = told(state, "because")
    refused.status.from_ns = refused.status.to_ns = 0
    refused.status.seconds = refused.status.targets = 0
    node.begin = lambda window: window.end([refused])
    _, out, _ = run("trace", "slurm/4411", "--socket", node.path, "--json")
    (found,) = json.loads(out)["nodes"]
    for figure in ("seconds", "targets", "launches", "traced_share", "cost_share", "from_ns", "to_ns"):
        assert found[figure] is None, figure


def test_what_the_agent_refuses_has_its_exit_code(node: TracingNode) -> None:
    assert run("trace", "slurm/0", "--socket", node.path) == (3, "", "error: no job slurm/0 on this node\n")
    code, _, said = run("trace", "run/boom", "--socket", node.path)
    assert (code, said) == (1, "error: the agent could not answer; see its log\n")
    code, _, said = run("trace", "run/x", "--socket", "/nonexistent/agent.sock")
    assert code == 1
    assert said.startswith("error: no agent answers on /nonexistent/agent.sock: start it with")


def test_the_environment_names_the_socket(node: TracingNode) -> None:
    assert run("trace", "slurm/4411", EXPANSE_AGENT_SOCKET=node.path)[0] == 0
    assert len(node.windows) == 1


# ---- it ends in another way


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_window_and_keeps_what_there_is(
    node: TracingNode, tmp_path: Path, number: signal.Signals
) -> None:
    def begin(window: MadeUpWindow) -> None:
        window.waiting.append(told(launches=7))
        window.at_stop = [told(TRACE_STATE_DONE, "ended early", launches=7), *whole(7)[1:]]

    node.begin = begin
    file = tmp_path / "x.pftrace"
    with started("trace", "slurm/4411", "--socket", node.path, "-o", str(file)) as process:
        assert process.stderr is not None
        assert process.stderr.readline() == b"open\n"
        process.send_signal(number)
        wait_until(lambda: node.windows[0].stops)
        out, said = process.communicate(timeout=30)
    assert process.returncode == 0, said
    assert b"gemm" in out
    assert b"done: ended early" in said
    assert b"Traceback" not in said
    assert file.read_bytes() == perfetto.dumps([made_trace(launches=7)])
    wait_until(lambda: node.windows[0].closed == 1)
    assert node.windows[0].stops == 1


def test_a_second_ctrl_c_gives_it_up(node: TracingNode, tmp_path: Path) -> None:
    node.begin = lambda window: window.waiting.append(told())  # and nothing more, whatever is asked
    file = tmp_path / "x.pftrace"
    with started("trace", "slurm/4411", "--socket", node.path, "-o", str(file)) as process:
        assert process.stderr is not None
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        wait_until(lambda: node.windows[0].stops)
        assert node.windows[0].closed == 0
        process.send_signal(signal.SIGINT)
        out, said = process.communicate(timeout=30)
    assert (process.returncode, out, said) == (130, b"", b"")
    wait_until(lambda: node.windows[0].closed == 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.sock"]


@pytest.mark.parametrize("sent", [0, 3])
def test_an_agent_that_goes_away_is_told_and_leaves_no_file(tmp_path: Path, sent: int) -> None:
    """After no part, and after some of them."""
    replies = [told(), *whole()[:1]] if sent else [told()]
    pieces = whole()[1 : 1 + sent]
    assert len(pieces) < len(whole()) - 1
    file = tmp_path / "x.pftrace"
    with TracingNode(str(tmp_path / "agent.sock")) as node:
        node.begin = lambda window: window.waiting.extend([*replies, *pieces])
        process = started("trace", "slurm/4411", "--socket", node.path, "-o", str(file), "--json")
        assert process.stderr is not None
        assert process.stderr.readline() == b"open\n"
        wait_until(lambda: not node.windows[0].waiting)
    out, said = process.communicate(timeout=30)
    assert process.returncode == 1
    assert json.loads(out)["summary"] is None
    last = said.decode().splitlines()[-1]
    why = f"not whole: {sent} of its" if sent else "has not come; the window was last seen open"
    assert last.startswith(f"error: slurm/4411: no trace: failed: the trace {'is ' if sent else ''}{why}")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_leaves_the_summary_and_what_was_there(
    node: TracingNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_traces: object) -> Iterator[bytes]:
        yield b"begun"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(perfetto, "chunks", full)
    file = tmp_path / "x.pftrace"
    file.write_text("former")
    result = CliRunner().invoke(
        trace_command.command, ["slurm/4411", "--socket", node.path, "-o", str(file), "--json"]
    )
    assert isinstance(result.exception, UnavailableError)
    assert "No space left on device" in str(result.exception)
    found = json.loads(result.stdout)
    assert found["summary"]
    assert found["file"] is None
    assert file.read_text() == "former"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent.sock", "x.pftrace"]


def test_an_agent_that_falls_silent_is_not_waited_for_for_ever(
    node: TracingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.begin = lambda window: window.waiting.append(told())
    monkeypatch.setattr(client, "SILENCE_S", 0.3)
    replies = trace_session.by_agent(node.path, TraceRequest(key="slurm/4411"), lambda: False)
    next(replies)
    with pytest.raises(UnavailableError, match="has said nothing for 0 s"):
        next(replies)


def test_a_trace_that_takes_its_time_after_ctrl_c_is_waited_for(node: TracingNode) -> None:
    node.begin = lambda window: window.waiting.append(told())
    turns = 0

    def enough() -> bool:
        nonlocal turns
        turns += 1
        if turns == 4:
            node.do(lambda: node.windows[0].end(whole()))
        return True

    replies = list(trace_session.by_agent(node.path, TraceRequest(key="slurm/4411"), enough))
    assert replies == [told(), *whole()]
    assert node.windows[0].stops == 1


def test_more_than_any_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(replies: Iterable[TraceReply]) -> None:
        windows = Windows()
        for reply in replies:
            windows.add(reply)

    with pytest.raises(UnavailableError, match="more is sent"):
        take(TraceReply(part=TracePart(index=index)) for index in range(10_000))
    take(whole())
    monkeypatch.setattr(trace_session, "MAX_BYTES", 250)
    with pytest.raises(UnavailableError, match="more is sent"):
        take(whole())


def test_names_from_a_trace_do_not_steer_the_terminal(node: TracingNode) -> None:
    reason = "\x1b[2J\x9b\nsecond line"
    node.begin = lambda window: window.end([told(TRACE_STATE_BUDGET, reason)])
    _, out, said = run("trace", "slurm/4411", "--socket", node.path, "--json")
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]", said + out)
    assert json.loads(out)["nodes"][0]["reason"] == reason


# ---- what is said meanwhile


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_one_line_says_how_it_stands(node: TracingNode) -> None:
    def begin(window: MadeUpWindow) -> None:
        window.waiting.append(told(launches=12_345, cost_share=0.004))
        window.at_stop = whole()

    node.begin = begin
    master, slave = pty.openpty()
    try:
        with started("trace", "slurm/4411", "--socket", node.path, stdout=slave, stderr=slave) as process:
            said = ""
            while "launches" not in said:
                said += os.read(master, 1000).decode()
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0
        said += os.read(master, 100_000).decode()
    finally:
        os.close(master)
        os.close(slave)
    line = said.split("\r")[1]
    assert re.match(r"open, [12] s left, 12,345 launches, cost 0\.4%, Ctrl-C ends it", line)
    assert "gemm" in said


def test_progress_of_several_nodes() -> None:
    windows, terminal = Windows(), Terminal()
    with Progress(terminal, "ends it") as progress:
        windows.add(told(TRACE_STATE_WAITING, node="n1"))
        progress.show(windows)
        windows.add(told(node="n2", launches=5, cost_share=0.01))
        progress.show(windows)
        progress.show(windows)  # nothing is new
        windows.add(told(node="n1", launches=1000, cost_share=0.004))
        progress.show(windows)
    lines = [line.rstrip() for line in terminal.getvalue().split("\r")]
    assert lines == [
        "",
        "waiting, 0 launches, cost 0.0%, Ctrl-C ends it",
        "open on 1 of 2 nodes, 2 s left, 5 launches, cost 1.0%, Ctrl-C ends it",
        "open on 2 of 2 nodes, 2 s left, 1,005 launches, cost 1.0%, Ctrl-C ends it",
        "",
        "",
    ]
    assert "1 s left" in progress.line(windows, windows.opened + 1.2)
    assert "0 s left" in progress.line(windows, windows.opened + 60)
    for name in ("n1", "n2"):
        windows.add(told(TRACE_STATE_DONE, node=name))
    assert progress.line(windows, windows.opened + 60) == "the trace comes, 0 launches, cost 0.0%"


def test_after_a_refusal_no_trace_is_promised() -> None:
    windows, progress = Windows(), Progress(None, "ends it")
    refused = told(TRACE_STATE_BUDGET, "one is open")
    refused.status.from_ns = refused.status.to_ns = 0
    windows.add(refused)
    assert progress.line(windows, 0) == "there is no trace, 0 launches, cost 0.0%"


def test_what_is_no_terminal_gets_a_line_per_change() -> None:
    windows, stream = Windows(), io.StringIO()
    with Progress(stream, "ends it") as progress:
        for reply in (
            told(reason="for 2 s", node="n1"),
            told(reason="for 2 s", node="n1", launches=5),
            told(TRACE_STATE_NO_TARGETS, "no such job", node="n2"),
            told(TRACE_STATE_DONE, node="n1"),
        ):
            windows.add(reply)
            progress.show(windows)
    assert stream.getvalue() == "n1: open: for 2 s\nn2: no_targets\nn1: done\n"
    Progress(None, "").show(windows)


def test_a_state_and_figures_that_nobody_knows_are_no_fault() -> None:
    windows = Windows()
    reply = told(cost_share=math.inf)
    reply.status.seconds = math.nan
    reply.status.state = 99  # type: ignore[assignment]
    windows.add(reply)
    (found,) = windows.as_json({})
    assert (found["state"], found["seconds"], found["cost_share"], found["to_ns"]) == (
        "unknown",
        None,
        None,
        None,
    )
    json.dumps(found, allow_nan=False)
    Progress(Terminal(), "").show(windows)


# ---- through a controller


class Controller:
    """What stands for expanse_ebpf.ship.remote."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.replies: list[TraceReply] = []
        self.stored: list[StoredTrace] = []

    def trace(self, address: str, request: TraceRequest) -> Iterator[TraceReply]:
        self.asked.append((address, request))
        yield from self.replies

    def stored_traces(self, address: str, window: str) -> Iterator[TraceReply]:
        self.asked.append((address, window))
        yield from self.replies

    def traces(self, address: str, key: str = "", limit: int = 0) -> list[StoredTrace]:
        self.asked.append((address, key, limit))
        return self.stored


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    made = Controller()
    for name in ("trace", "stored_traces", "traces"):
        monkeypatch.setattr(remote, name, getattr(made, name))
    return made


def test_a_controller_opens_it_on_all_nodes(controller: Controller, tmp_path: Path) -> None:
    first, second = whole(10, "n1"), whole(20, "n2")
    refused = told(TRACE_STATE_NO_PROBE_POINT, "no CUDA there", node="n3")
    # Parts of two nodes come in any order.
    controller.replies = [told(node="n1"), told(node="n2"), refused, *reversed(second), *first]
    file = tmp_path / "x.pftrace"
    result = CliRunner().invoke(
        trace_command.command,
        ["slurm/4411", "--controller", "head:9777", "--node", "n*", "-o", str(file), "--json"],
    )
    assert result.exit_code == 0, result.output
    assert controller.asked == [("head:9777", TraceRequest(key="slurm/4411", node="n*"))]
    found = json.loads(result.stdout)
    assert [(n["node"], n["state"], n["launches"]) for n in found["nodes"]] == [
        ("n1", "done", 10),
        ("n2", "done", 20),
        ("n3", "no_probe_point", 0),
    ]
    assert result.stderr.splitlines()[-2] == "n3: no_probe_point: no CUDA there"
    assert file.read_bytes() == perfetto.dumps([made_trace("n1", 10), made_trace("n2", 20)])


def test_of_nodes_without_a_trace_the_worst_is_told(controller: Controller) -> None:
    controller.replies = [
        told(TRACE_STATE_NO_TARGETS, "gone", node="n1"),
        told(TRACE_STATE_BUDGET, "30 % of its run", node="n2"),
        told(TRACE_STATE_NO_PROBE_POINT, "no CUDA", node="n3"),
    ]
    result = CliRunner().invoke(trace_command.command, ["slurm/4411", "--controller", "head:9777"])
    assert isinstance(result.exception, trace_command.BudgetError)
    assert str(result.exception).startswith("slurm/4411: no trace: budget: n2: 30 % of its run")
    controller.replies = []
    result = CliRunner().invoke(trace_command.command, ["slurm/4411", "--controller", "head:9777"])
    assert isinstance(result.exception, UnavailableError)


def test_a_damaged_trace_of_one_node_leaves_the_others(controller: Controller) -> None:
    bad = whole(5, "n2")
    bad[1].part.data = b"nonsense"
    controller.replies = [*whole(10, "n1"), *bad]
    result = CliRunner().invoke(trace_command.command, ["slurm/4411", "--controller", "head:9777"])
    assert result.exit_code == 0, result.output
    assert result.stderr.splitlines()[-1].startswith("n2: failed: the trace is damaged")


def test_a_trace_that_does_not_hold_together_leaves_the_others(
    controller: Controller, tmp_path: Path
) -> None:
    odd = made_trace("n2", 5)
    odd.events.kernel[0] = 99
    last = told(TRACE_STATE_DONE, node="n2", launches=5)
    controller.replies = [*whole(10, "n1"), last, *parts(odd, 100, "n2")]
    file = tmp_path / "x.pftrace"
    arguments = ["slurm/4411", "--controller", "head:9777", "--json", "-o", str(file)]
    result = CliRunner().invoke(trace_command.command, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["summary"]["launches"] == 10
    lost = {node["node"]: node["lost"] for node in found["nodes"]}
    assert lost["n1"] is None
    assert "events.kernel points beyond" in lost["n2"]
    assert result.stderr.splitlines()[-2].startswith("n2: failed: ")
    assert file.read_bytes() == perfetto.dumps([made_trace("n1", 10)])


def test_a_job_that_is_not_on_the_node_is_told_with_where_to_look(controller: Controller) -> None:
    reason = "slurm/4411 is not on node n9; it is on: n1, n2"
    controller.replies = [told(TRACE_STATE_NO_TARGETS, reason)]
    arguments = ["slurm/4411", "--controller", "head:9777", "--node", "n9"]
    result = CliRunner().invoke(trace_command.command, arguments)
    assert str(result.exception) == (
        f"slurm/4411: no trace: no_targets: {reason}; "
        "`expanse-ebpf top --once --controller head:9777` lists the jobs there are"
    )


def test_through_a_controller_the_line_says_that_ctrl_c_ends_nothing(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    controller.replies = [told(node="n1"), *whole(10, "n1")]
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        trace_command._by_controller("head:9777", TraceRequest(key="slurm/4411"))
    said = [line.rstrip() for line in terminal.getvalue().split("\r")]
    assert said[1] == "open, 2 s left, 0 launches, cost 0.0%, Ctrl-C leaves it, it goes on"
    assert said[2] == "the trace comes, 10 launches, cost 0.3%"


def test_the_configured_controller_is_asked_unless_local(
    controller: Controller, node: TracingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EXPANSE_CONTROLLER_ADDRESS", "configured:1")
    monkeypatch.setenv("EXPANSE_AGENT_SOCKET", node.path)
    controller.replies = whole(node="n1")
    for arguments in ([], ["--controller", "given:2"], ["--local"], ["--socket", node.path]):
        assert CliRunner().invoke(trace_command.command, ["slurm/4411", *arguments]).exit_code == 0
    assert [address for address, _ in controller.asked] == ["configured:1", "given:2"]
    assert len(node.windows) == 2


def test_a_file_of_settings_that_only_root_may_read_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[controller]\naddress = 'head:1'\n")
    monkeypatch.setattr(config, "DEFAULT_FILE", file)
    monkeypatch.delenv("EXPANSE_CONTROLLER_ADDRESS", raising=False)
    assert trace_command.settings().controller.address == "head:1"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert trace_command.settings().controller.address == ""


def test_who_gives_up_on_a_controller_is_told_where_the_trace_will_be(
    controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_address: str, _request: TraceRequest) -> Iterator[TraceReply]:
        yield told(node="n1")
        raise KeyboardInterrupt

    monkeypatch.setattr(remote, "trace", interrupted)
    result = CliRunner().invoke(trace_command.command, ["slurm/4411", "--controller", "head:9777"])
    assert result.exit_code != 0
    assert f"expanse-ebpf traces --window {WINDOW} --controller head:9777\n" in result.stderr


# ---- windows that are stored


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense", "--controller", "x:1"], "'nonsense' is not a job's key"),
        (["--window", "8C1F"], "--window: '8C1F' is no window's id"),
        (["-o", "x.pftrace"], "-o needs --window ID"),
        (["run/x", "--window", WINDOW], "give either JOB, to list its windows, or --window ID"),
        (["--controller", "x"], "--controller: 'x' is not HOST:PORT"),
    ],
)
def test_what_makes_no_sense_of_stored_windows_is_refused(arguments: list[str], words: str) -> None:
    result = CliRunner().invoke(traces.command, arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_without_a_controller_nothing_is_stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EXPANSE_CONTROLLER_ADDRESS", raising=False)
    monkeypatch.setattr(config, "DEFAULT_FILE", tmp_path / "none.toml")
    result = CliRunner().invoke(traces.command, [])
    assert "give --controller HOST:PORT" in str(result.exception)


def stored_windows() -> list[StoredTrace]:
    first = StoredTrace(node="n1", bytes=3 << 20, status=status(TRACE_STATE_DONE, launches=12_345))
    first.status.rule = "gpu_idle"
    first.evidence.add(name="gpu_utilization", value=0.02)
    first.evidence.add(name="line", text="loader.py:12")
    refused = StoredTrace(node="node-2", status=status(TRACE_STATE_NO_TARGETS, "no such \x1b[2Jjob"))
    refused.status.from_ns = refused.status.to_ns = 0
    return [first, refused]


def test_stored_windows_are_listed(controller: Controller) -> None:
    controller.stored = stored_windows()
    result = CliRunner().invoke(traces.command, ["slurm/4411", "--controller", "head:9777"])
    assert result.exit_code == 0, result.output
    assert controller.asked == [("head:9777", "slurm/4411", 50)]
    headings, *rows = result.stdout.splitlines()
    assert headings.split("  ")[0] == "WINDOW"
    assert headings.endswith("OPENED BY  STATE       LAUNCHES     SIZE  REASON")
    assert rows == [
        f"{WINDOW}  slurm/4411  n1      2026-11-30 00:53:20  gpu_idle   done          12,345  3.0 MiB",
        f"{WINDOW}  slurm/4411  node-2  -                    asked for  no_targets         -        -  "
        "no such \N{REPLACEMENT CHARACTER}[2Jjob",
    ]
    result = CliRunner().invoke(traces.command, ["--controller", "head:9777", "--json", "--limit", "7"])
    first, refused = json.loads(result.stdout)
    assert controller.asked[-1] == ("head:9777", "", 7)
    assert (first["window"], first["job"], first["node"], first["bytes"]) == (
        WINDOW,
        "slurm/4411",
        "n1",
        3 << 20,
    )
    assert (first["rule"], first["state"], first["launches"]) == ("gpu_idle", "done", 12_345)
    assert first["evidence"] == [
        {"name": "gpu_utilization", "value": 0.02},
        {"name": "line", "value": "loader.py:12"},
    ]
    assert (refused["bytes"], refused["from_ns"], refused["state"]) == (None, None, "no_targets")


def test_a_time_that_no_clock_shows_is_a_dash() -> None:
    assert [traces.when(ns) for ns in (0, -5, (1 << 63) - 1)] == ["-"] * 3


def test_no_window_at_all(controller: Controller) -> None:
    result = CliRunner().invoke(traces.command, ["slurm/4411", "--controller", "head:9777"])
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr == "controller head:9777 has stored no window of slurm/4411\n"
    result = CliRunner().invoke(traces.command, ["--controller", "head:9777", "--json"])
    assert json.loads(result.stdout) == []


def test_a_stored_window_is_fetched(controller: Controller, tmp_path: Path) -> None:
    controller.replies = [*whole(10, "n1"), *whole(20, "n2")]
    file = tmp_path / "x.pftrace"
    arguments = ["--window", WINDOW, "--controller", "head:9777", "-o", str(file), "--json"]
    result = CliRunner().invoke(traces.command, arguments)
    assert result.exit_code == 0, result.output
    assert controller.asked == [("head:9777", WINDOW)]
    found = json.loads(result.stdout)
    assert (found["job"], found["window"], len(found["nodes"])) == ("slurm/4411", WINDOW, 2)
    assert file.read_bytes() == perfetto.dumps([made_trace("n1", 10), made_trace("n2", 20)])
    controller.replies = []
    result = CliRunner().invoke(traces.command, arguments[:4])
    assert isinstance(result.exception, UnknownJobError)
    controller.replies = [told(TRACE_STATE_BUDGET, "spent", node="n1")]
    result = CliRunner().invoke(traces.command, arguments[:4])
    assert isinstance(result.exception, trace_command.BudgetError)


def test_of_a_trace_that_is_lost_the_reason_is_told_beside_the_one_that_came(controller: Controller) -> None:
    gone = told(TRACE_STATE_FAILED, "its trace is not whole: the window's process ended", node="n2")
    dropped = told(TRACE_STATE_DONE, "its trace was dropped", node="n3")
    controller.replies = [*whole(10, "n1"), *whole(20, "n2")[:2], gone, dropped]
    arguments = ["--window", WINDOW, "--controller", "head:9777", "--json"]
    result = CliRunner().invoke(traces.command, arguments)
    assert result.exit_code == 0, result.output
    count = len(whole(20, "n2")) - 1
    lost = {
        "n1": None,
        "n2": f"the trace is not whole: 1 of its {count} parts are there; {gone.status.reason}",
        "n3": "the trace has not come; the window was last seen done; its trace was dropped",
    }
    assert {found["node"]: found["lost"] for found in json.loads(result.stdout)["nodes"]} == lost
    assert result.stderr.splitlines() == [f"{node}: failed: {lost[node]}" for node in ("n2", "n3")]


# ---- completion


def test_job_keys_are_completed(node: TracingNode) -> None:
    node.publish(make_report(1))
    words = {"_EXPANSE_EBPF_COMPLETE": "bash_complete", "COMP_CWORD": "2", "EXPANSE_AGENT_SOCKET": node.path}
    code, out, _ = run(COMP_WORDS="expanse-ebpf trace slurm/441", **words)
    assert (code, out.splitlines()) == (0, ["plain,slurm/4411", "plain,slurm/4412", "plain,slurm/4413"])
    words["EXPANSE_AGENT_SOCKET"] = "/nonexistent"
    code, out, said = run(COMP_WORDS="expanse-ebpf trace slurm/", **words)
    assert (code, out.strip(), said) == (0, "", "")
