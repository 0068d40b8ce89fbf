"""Windows by way of the whole agent: the real command, real jobs; what is traced is tested elsewhere."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expanse_ebpf.agent import Agent
from expanse_ebpf.config import load
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_PROBE_POINT,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    NodeReply,
    NodeRequest,
    Trace,
    TraceReply,
    TraceRequest,
)

from .test_agent import Node, run, start  # noqa: F401 (fixtures)

Start = Callable[..., Node]
Started = Callable[..., tuple[str, subprocess.Popen[bytes]]]
# An agent whose windows' processes say that they are open, and send a trace in the end.
MADE_UP = (sys.executable, "-m", "tests.tracing.made_up_agent", "trace")
SLEEPER = "import time\nwhile True: time.sleep(0.05)"


class Asker:
    """A client of the node's socket that wants a window."""

    def __init__(self, path: Path, **fields: Any) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(str(path))
        self.socket.settimeout(20)
        body = NodeRequest(trace=TraceRequest(**fields)).SerializeToString()
        self.socket.sendall(struct.pack(">I", len(body)) + body)
        self.said: list[TraceReply] = []

    def next(self) -> TraceReply | None:
        """The next reply; None when the agent has hung up."""
        header = self._read(4)
        if header is None:
            return None
        reply = NodeReply.FromString(self._read(struct.unpack(">I", header)[0]) or b"")
        assert not reply.error, reply.error
        self.said.append(reply.trace)
        return reply.trace

    def _read(self, size: int) -> bytes | None:
        data = b""
        while len(data) < size:
            more = self.socket.recv(size - len(data))
            if not more:
                return None
            data += more
        return data

    def until(self, state: int) -> TraceReply:
        while (reply := self.next()) is not None:
            if reply.status.state == state:
                return reply
        raise AssertionError(self.said)

    def last_state(self) -> int:
        while self.next() is not None:
            pass
        return [reply.status.state for reply in self.said if reply.HasField("status")][-1]


@pytest.fixture
def ask() -> Iterator[Callable[..., Asker]]:
    made: list[Asker] = []

    def one(path: Path, **fields: Any) -> Asker:
        made.append(Asker(path, **({"run_share": 1.0, "seconds": 60.0} | fields)))
        return made[-1]

    yield one
    for asker in made:
        asker.socket.close()


def windows_of(agent: int) -> list[int]:
    """Processes of windows that this agent has begun."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"window" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)


def job_that_runs(node: Node, run: Started, name: str) -> str:  # noqa: F811
    key, _ = run(name, sys.executable, "-S", "-c", SLEEPER)
    node.wait_for(lambda s: any(job["key"] == key and job["processes"] for job in s["jobs"]))
    return key


@pytest.mark.slow
def test_a_job_without_cuda_has_a_window_that_finds_no_probe_point(
    start: Start,  # noqa: F811
    run: Started,  # noqa: F811
    ask: Callable[..., Asker],
) -> None:
    node = start()
    key = job_that_runs(node, run, "plain")
    before = node.top()["collector"]
    asker = ask(node.socket, key=key)
    opened = asker.until(TRACE_STATE_OPEN)
    assert (opened.status.identity.id, opened.status.seconds) == (key.partition("/")[2], 60)
    assert opened.node == node.top()["node"]
    assert len(windows_of(node.process.pid)) == 1
    during = node.wait_for(lambda s: s["collector"]["pss_bytes"] > before["pss_bytes"] + (4 << 20))
    assert asker.last_state() == TRACE_STATE_NO_PROBE_POINT
    assert not any(reply.HasField("part") for reply in asker.said[:-1])
    node.wait_for(lambda s: s["collector"]["pss_bytes"] < during["collector"]["pss_bytes"] - (3 << 20))
    assert windows_of(node.process.pid) == []
    other = ask(node.socket, key="run/nothing-of-that-name")
    assert other.last_state() == TRACE_STATE_NO_TARGETS
    assert [s["up"] for s in node.top()["collector"]["sources"] if s["name"] == "traces"] == [True]


def test_a_client_gets_the_trace_when_it_wants_no_more(
    start: Start,  # noqa: F811
    run: Started,  # noqa: F811
    ask: Callable[..., Asker],
) -> None:
    node = start(world=MADE_UP)
    key = job_that_runs(node, run, "traced")
    asker = ask(node.socket, key=key)
    asker.until(TRACE_STATE_OPEN)
    time.sleep(1.2)  # two ticks, with a figure for its counters
    asker.socket.shutdown(socket.SHUT_WR)
    assert asker.last_state() == TRACE_STATE_DONE
    parts = [reply.part for reply in asker.said if reply.HasField("part")]
    trace = Trace.FromString(zlib.decompress(b"".join(part.data for part in parts)))
    assert (trace.node.name, trace.status.identity.id) == (node.top()["node"], key.partition("/")[2])
    assert {counter.name for counter in trace.counters} == {"CPU cores"}
    assert "window" in node.said()


def test_a_window_that_is_killed_fails_and_the_agent_goes_on(
    start: Start,  # noqa: F811
    run: Started,  # noqa: F811
    ask: Callable[..., Asker],
) -> None:
    node = start(world=MADE_UP)
    key = job_that_runs(node, run, "killed")
    asker = ask(node.socket, key=key)
    asker.until(TRACE_STATE_OPEN)
    (pid,) = windows_of(node.process.pid)
    os.kill(pid, signal.SIGKILL)
    assert asker.last_state() == TRACE_STATE_FAILED
    assert asker.said[-1].status.reason == "the window's process ended with signal 9"
    sequence = node.top()["sequence"]
    node.wait_for(lambda s: s["sequence"] > sequence)
    assert windows_of(node.process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_with_the_agent_its_windows_end(
    start: Start,  # noqa: F811
    run: Started,  # noqa: F811
    ask: Callable[..., Asker],
    number: signal.Signals,
) -> None:
    node = start(world=MADE_UP)
    keys = [job_that_runs(node, run, name) for name in ("one", "two")]
    askers = [ask(node.socket, key=key) for key in keys]
    for asker in askers:
        asker.until(TRACE_STATE_OPEN)
    pids = windows_of(node.process.pid)
    assert len(pids) == 2
    node.process.send_signal(number)
    node.process.wait(15)
    wait_until_gone(pids)
    if number == signal.SIGTERM:
        assert [asker.last_state() for asker in askers] == [TRACE_STATE_FAILED] * 2
        assert "the agent has stopped" in askers[0].said[-1].status.reason


def test_when_the_client_hangs_up_its_window_ends(
    start: Start,  # noqa: F811
    run: Started,  # noqa: F811
    ask: Callable[..., Asker],
) -> None:
    node = start(world=MADE_UP)
    asker = ask(node.socket, key=job_that_runs(node, run, "gone"))
    asker.until(TRACE_STATE_OPEN)
    pids = windows_of(node.process.pid)
    asker.socket.close()
    wait_until_gone(pids)


# ---- commands of the controller


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Agent]]:
    """An agent that makes its reports when a test says so."""
    agents: list[Agent] = []

    def one(**overrides: Any) -> Agent:
        off = {f"sources.{name}": False for name in ("cpu", "cgroup", "host", "python", "gpu")}
        files = {"agent.socket": str(tmp_path / "s"), "agent.state_dir": str(tmp_path)}
        agents.append(Agent(load(None, {}, {**off, **files, **overrides})))
        agents[-1].start()
        return agents[-1]

    yield one
    for agent in agents:
        agent._stream = None
        agent.stop()


def commanded(agent: Agent, *requests: TraceRequest) -> list[tuple[str, int, str]]:
    """What stands in the next report of these."""
    stream: Any = SimpleNamespace(
        take_commands=lambda: list(requests),
        send=lambda report: None,
        connected=True,
        unsent=0,
        dropped=0,
        state="",
    )
    agent._stream = stream
    agent._commands(1)
    return [(status.id, status.state, status.reason) for status in agent.tick().traces]


def test_a_command_is_answered_in_the_next_report(make: Callable[..., Agent]) -> None:
    agent = make()
    requests = [TraceRequest(id=f"{number:016x}", key="run/none") for number in range(2)]
    assert commanded(agent, *requests) == [
        (f"{number:016x}", TRACE_STATE_NO_TARGETS, "no job run/none is on this node") for number in range(2)
    ]
    assert commanded(agent) == []


def test_where_traces_are_off_commands_and_clients_are_told_why(
    make: Callable[..., Agent], monkeypatch: pytest.MonkeyPatch
) -> None:
    why = "traces are switched off: set sources.traces = true"
    agent = make(**{"sources.traces": False})
    request = TraceRequest(id="ab" * 8, key="run/none")
    assert commanded(agent, request) == [("ab" * 8, TRACE_STATE_FAILED, why)]
    assert commanded(agent) == []
    with pytest.raises(UnavailableError, match=why):
        agent._watch_trace(request, None)
    agent._stream = None
    agent.stop()
    monkeypatch.setattr("expanse_ebpf.kernel.gpu_calls.supported", lambda: "Linux is too old")
    agent = make()
    why = "traces are not available: Linux is too old"
    assert commanded(agent, request) == [("ab" * 8, TRACE_STATE_FAILED, why)]
    with pytest.raises(UnavailableError, match=why):
        agent._watch_trace(request, None)


def test_commands_while_traces_are_off_do_not_pile_up(make: Callable[..., Agent]) -> None:
    agent = make(**{"sources.traces": False})
    requests = [TraceRequest(id=f"{number:016x}", key="run/none") for number in range(1000)]
    assert len(commanded(agent, *requests)) == 64
