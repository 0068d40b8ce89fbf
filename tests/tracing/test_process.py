"""A window's process: what it says, what it is told, and that it ends, whatever it does."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expanse_ebpf.tracing import process
from expanse_ebpf.tracing.process import WindowProcess
from expanse_ebpf.tracing.settings import WindowSettings
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    Trace,
    TraceCounter,
    TraceReply,
)
from tests.tracing.made_up_window import command

Begin = Callable[..., WindowProcess]


@pytest.fixture
def begin() -> Iterator[Begin]:
    begun: list[WindowProcess] = []
    with open("/dev/zero", "rb") as slots, open("/dev/full", "rb") as totals:

        def begin(how: str, seconds: float = 60.0) -> WindowProcess:
            settings = WindowSettings("ab" * 8, 5, "cpu", 3, "/a", slots.fileno(), totals.fileno(), seconds)
            begun.append(WindowProcess(settings, command(how)))
            return begun[-1]

        yield begin
    for one in begun:
        one.kill()
        end_of(one)
        one.close()


def is_inherited(fd: int) -> bool:
    try:
        return os.get_inheritable(fd)
    except OSError:
        return False


def end_of(one: WindowProcess) -> str:
    until = time.monotonic() + 10
    while not (how := one.ended()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return how


def replies(one: WindowProcess, enough: Callable[[list[TraceReply]], bool]) -> list[TraceReply]:
    """What it says, until that is enough, or nothing more can come."""
    found: list[TraceReply] = []
    until = time.monotonic() + 20
    while not enough(found) and not one.at_end and not one.broken:
        assert time.monotonic() < until
        select.select([one.answers], [], [], 1)
        found += one.read()
    return found


def wait_until_dead(pid: int) -> None:
    until = time.monotonic() + 10
    with contextlib.suppress(FileNotFoundError):
        while b") Z " not in Path(f"/proc/{pid}/stat").read_bytes():
            assert time.monotonic() < until
            time.sleep(0.01)


def everything(_: list[TraceReply]) -> bool:
    return False


def state(number: int) -> Callable[[list[TraceReply]], bool]:
    return lambda found: any(reply.status.state == number for reply in found)


def test_it_says_how_it_stands_and_sends_a_trace_of_what_it_was_told(begin: Begin) -> None:
    one = begin("trace")
    assert one.tell(Trace(counters=[TraceCounter(name="CPU cores", value=[2.0])]))
    first = replies(one, state(TRACE_STATE_OPEN))
    assert first[-1].status.targets == 2
    assert one.tell(Trace(version="7"))
    one.stop()
    rest = replies(one, everything)
    assert rest[0].status.state == TRACE_STATE_DONE
    trace = Trace.FromString(zlib.decompress(b"".join(reply.part.data for reply in rest[1:])))
    assert (trace.counters[0].name, trace.version) == ("CPU cores", "7")
    assert (one.at_end, one.broken) == (True, "")
    assert end_of(one) == "with status 0"
    assert not one.tell(Trace(version="8"))


def test_it_inherits_the_two_maps_and_nothing_else(begin: Begin) -> None:
    opened = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    strangers = {fd for fd in map(int, opened) if is_inherited(fd)}  # of whoever has started the tests
    one = begin("descriptors")
    (reply,) = replies(one, everything)
    assert reply.status.state == TRACE_STATE_NO_TARGETS
    kept, _, told = reply.status.reason.rpartition("]")
    slots, totals = map(int, told.split())
    assert sorted(map(int, kept.strip("[").split(","))) == sorted({0, 1, 2, slots, totals} | strangers)
    end_of(one)
    one.close()
    one.close()
    assert set(os.listdir("/proc/self/fd")) == opened  # noqa: PTH208


def test_a_process_that_cannot_be_begun_leaves_no_descriptor() -> None:
    before = sorted(os.listdir("/proc/self/fd"))  # noqa: PTH208
    settings = WindowSettings("ab" * 8, 5, "cpu", 3, "/a", 0, 1, 1.0)
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            WindowProcess(settings, ("/nonexistent/python",))
    with pytest.raises(OSError, match="Bad file descriptor"):
        WindowProcess(WindowSettings("ab" * 8, 5, "cpu", 3, "/a", 0, 99_999, 1.0), command("trace"))
    assert sorted(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


@pytest.mark.parametrize(
    ("how", "words"), [("length", "4294967295 bytes"), ("bytes", "no TraceReply"), ("dies", "")]
)
def test_nonsense_is_not_read_on(begin: Begin, how: str, words: str) -> None:
    one = begin(how)
    replies(one, everything)
    assert words in one.broken
    assert bool(one.broken) == bool(words)
    assert list(one.read()) == []
    if how == "dies":
        assert end_of(one) == "with signal 9"


def test_half_a_message_is_none(begin: Begin) -> None:
    one = begin("length")
    replies(one, lambda _: bool(one._data))
    one.broken, one._data = "", bytearray(b"\0\0\0\x09abc")
    one.kill()
    assert replies(one, everything) == []
    assert one.broken == "has said half a message"


def test_what_it_writes_for_the_log_is_bounded(begin: Begin, caplog: pytest.LogCaptureFixture) -> None:
    one = begin("chatter", seconds=0.01)
    with caplog.at_level(logging.INFO):
        until = time.monotonic() + 20
        while one.read_errors():
            assert time.monotonic() < until
            select.select([one.errors], [], [], 1)
            assert len(one._line) <= 4 * process._MOST_LINE
            list(one.read())
    lines = [record.getMessage() for record in caplog.records]
    assert lines[0] == "window abababababababab: line 0 ␛[31m"
    assert len(lines) == 101
    assert "left out" in lines[-1]
    assert max(map(len, lines)) < 500
    assert one.last_words.startswith("xxx")


def test_one_that_ends_with_a_reason_tells_it(begin: Begin) -> None:
    one = begin("absent")
    assert replies(one, everything) == []
    while one.read_errors():
        select.select([one.errors], [], [], 1)
    assert (end_of(one), one.last_words) == ("with status 3", "no such module")


def test_telling_never_waits_and_what_is_not_taken_is_bounded(begin: Begin) -> None:
    one = begin("hangs")
    replies(one, state(TRACE_STATE_OPEN))
    taken = 0
    began = time.monotonic()
    while one.tell(Trace(version="x" * 100_000)):
        taken += 1
        assert taken < 100
    assert time.monotonic() - began < 5
    assert 5 <= taken <= 15
    assert not one.tell(Trace(version="x" * (2 << 20)))
    assert one.tell(Trace(version="y"))


def test_one_that_does_not_end_is_reminded_and_then_killed_with_what_it_has_begun(begin: Begin) -> None:
    one = begin("hangs")
    said = replies(one, lambda found: bool(found) and "child" in found[-1].status.reason)
    child = int(said[-1].status.reason.split()[1])
    now = time.monotonic()
    assert one.press(now + 1000) == ""  # nobody has told it to end
    one.stop()
    assert one.press(now + 1) == ""
    assert one.press(now + process.TERM_S + 2) == ""
    assert one.ended() == ""  # it ignores SIGTERM
    assert "30 s" in one.press(now + process.KILL_S + 2)
    assert end_of(one) == "with signal 9"
    wait_until_dead(child)


def test_what_a_killed_one_has_begun_ends_with_it(begin: Begin) -> None:
    one = begin("hangs")
    said = replies(one, lambda found: bool(found) and "child" in found[-1].status.reason)
    os.kill(one.pid, signal.SIGKILL)
    assert end_of(one) == "with signal 9"
    wait_until_dead(int(said[-1].status.reason.split()[1]))


def test_a_reminder_ends_one_that_does_not_look_at_its_input(begin: Begin) -> None:
    one = begin("length")
    replies(one, everything)
    one.stop()
    one.press(time.monotonic() + process.TERM_S + 1)
    assert end_of(one) == f"with signal {signal.SIGTERM.value}"
    assert one.press(time.monotonic() + 1000) != ""
    one.kill()  # of a number that may be another's by now


def test_its_cost_grows_while_it_runs_and_stays_when_it_has_ended(begin: Begin) -> None:
    one = begin("trace")
    replies(one, state(TRACE_STATE_OPEN))
    running = one.cpu_ns
    assert running > 1_000_000
    pss = one.pss_bytes
    assert pss is not None
    assert 1 << 20 < pss < 1 << 28
    one.stop()
    replies(one, everything)
    end_of(one)
    assert one.cpu_ns >= running
    assert one.pss_bytes is None
