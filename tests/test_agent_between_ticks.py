"""What the agent's loop does between ticks, and for those who look at Python stacks."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf import sources
from expanse_ebpf.agent import Agent
from expanse_ebpf.config import load
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report, WatchProfileRequest
from tests.sources.made_up_sampler import MadeUpSampler, install


class Attentive:
    """A source that counts how often it is called."""

    name = "attentive"

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}
        self.fd = -1
        self.period_s = 0.0
        self.calls: list[str] = []
        self.on_beat: Callable[[], None] = lambda: None
        self.on_ready: Callable[[], None] = lambda: None
        self.writer = -1

    def start(self) -> None:
        self.fd, self.writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def ready(self) -> None:
        self.calls.append("ready")
        os.read(self.fd, 1)
        self.on_ready()

    def beat(self) -> None:
        self.calls.append("beat")
        self.on_beat()

    def sample(self, now: float, jobs: Any, report: Report) -> None:
        self.calls.append("sample")

    def stop(self) -> None:
        self.calls.append("stop")
        if self.fd >= 0:
            os.close(self.fd)
            os.close(self.writer)
            self.fd = -1


Made = Callable[..., Agent]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Made]:
    """An agent with no source of its own but those that a test names."""
    agents: list[Agent] = []

    def one(**overrides: Any) -> Agent:
        off = {f"sources.{name}": False for name in ("cpu", "cgroup", "host", "python")}
        files = {"agent.socket": str(tmp_path / "s"), "agent.state_dir": str(tmp_path)}
        named = {name.replace("__", "."): value for name, value in overrides.items()}
        agents.append(Agent(load(None, {}, {**off, **files, **named})))
        return agents[-1]

    yield one
    for agent in agents:
        agent.stop()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Attentive:
    made = Attentive()
    assert isinstance(made, sources.Attentive)
    monkeypatch.setattr(sources, "create", lambda *_: [made])
    return made


def test_a_source_is_called_at_its_period_and_when_its_file_is_readable(
    make: Made, source: Attentive
) -> None:
    agent = make(agent__interval_s=3600)
    source.period_s = 0.01

    def beaten() -> None:
        if source.calls.count("beat") == 5:
            os.write(source.writer, b"x")

    source.on_beat, source.on_ready = beaten, agent._asked_to_stop
    agent.start()
    agent.run()
    assert source.calls[0] == "sample"
    assert source.calls.count("sample") == 1
    assert source.calls[1:6] == ["beat"] * 5
    assert "ready" in source.calls
    agent.stop()
    assert source.calls[-1] == "stop"


def test_without_a_period_there_are_no_beats(make: Made, source: Attentive) -> None:
    agent = make(agent__interval_s=0.1)
    agent.start()
    agent.run(3)
    assert source.calls == ["sample"] * 3


def test_beats_that_take_longer_than_their_period_hold_up_no_ticks(make: Made, source: Attentive) -> None:
    agent = make(agent__interval_s=0.1)
    source.period_s = 0.001
    source.on_beat = lambda: time.sleep(0.01)
    agent.start()
    agent.run(4)
    assert source.calls.count("sample") == 4
    assert agent.newest is not None
    assert agent.newest.collector.ticks_missed == 0


@pytest.mark.parametrize("step", ["beat", "ready"])
def test_a_source_that_fails_between_ticks_is_off_and_the_rest_goes_on(
    make: Made, source: Attentive, step: str, caplog: pytest.LogCaptureFixture
) -> None:
    agent = make(agent__interval_s=0.1)

    def fail() -> None:
        raise RuntimeError("odd job")

    setattr(source, f"on_{step}", fail)
    source.period_s = 0.01 if step == "beat" else 0.0
    agent.start()
    os.write(source.writer, b"x")
    agent.run(3)
    assert agent.newest is not None
    status, python = agent.newest.collector.sources
    assert (python.name, python.up, python.reason) == ("python", False, "switched off (sources.python)")
    assert (status.up, status.reason) == (False, "RuntimeError: odd job")
    assert source.calls.count(step) == 1
    assert caplog.text.count("Traceback") == 1
    assert source.fd == -1


def test_a_source_that_is_tried_again_is_heard_again(
    make: Made, source: Attentive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("expanse_ebpf.agent._RETRY_TICKS", 1)
    agent = make(agent__interval_s=0.1)
    first = iter([True])

    def ready() -> None:
        if next(first, False):
            raise RuntimeError("odd job")
        agent._asked_to_stop()

    start = source.start

    def start_and_wake() -> None:
        start()
        os.write(source.writer, b"x")

    source.on_ready = ready
    monkeypatch.setattr(source, "start", start_and_wake)
    agent.start()
    agent.run()
    assert source.calls.count("ready") == 2
    assert agent.newest is not None
    assert agent.newest.collector.sources[0].up


# ---- those who look at Python stacks


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpSampler]:
    return install(monkeypatch)


def turning(agent: Agent) -> threading.Thread:
    """The agent's loop in a thread, which cannot have handlers of signals."""
    agent._signals = nullcontext  # type: ignore[assignment]
    thread = threading.Thread(target=agent.run)
    thread.start()
    return thread


def test_what_cannot_be_looked_at_is_said_over_the_socket(make: Made, samplers: type[MadeUpSampler]) -> None:
    agent = make(agent__interval_s=0.1, sources__python=True)
    agent.start()
    thread = turning(agent)
    try:
        for request, words in (
            (WatchProfileRequest(key="run/nothing"), "no job run/nothing is on this node"),
            (WatchProfileRequest(key="nonsense"), "not a job's key"),
            (WatchProfileRequest(pid=2**31 - 1), "may have exited"),
        ):
            with pytest.raises(UnavailableError, match=words):
                list(client.profile(agent.config.agent.socket, request, bool))
    finally:
        agent._asked_to_stop()
        thread.join(20)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sources__python": False}, "switched off: set sources.python"),
        ({"sources__python": True}, "no CAP_X"),
    ],
)
def test_where_python_is_off_the_reason_is_said(
    make: Made, samplers: type[MadeUpSampler], settings: dict[str, bool], words: str
) -> None:
    samplers.failure = UnavailableError("no CAP_X")
    agent = make(**settings)
    agent.start()
    with pytest.raises(UnavailableError, match=words):
        agent._watch_profile(WatchProfileRequest(key="run/x"), None)


def test_large_messages_go_out_only_while_the_controller_keeps_up(make: Made) -> None:
    class Stream:
        connected, unsent = True, 0

    agent = make()
    assert agent._ships_soon() is False
    agent._stream = stream = Stream()  # type: ignore[assignment]
    assert agent._ships_soon() is True
    stream.unsent = 100
    assert agent._ships_soon() is False
    stream.unsent, stream.connected = 0, False
    assert agent._ships_soon() is False
    agent._stream = None
