"""A sampler that says what a test tells it to."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Mapping
from typing import Any

import pytest

from expanse_ebpf.python_stacks.sampler import Count, Frame, Stack

MODULE = "expanse_ebpf.python_stacks.sampler"


PERIOD_NS = 20_408_163


def stack(
    *lines: str, slot: int = 5, pid: int = 100, waiting: bool = False, truncated: bool = False
) -> Stack:
    """A stack of "function:line", leaf first."""
    frames = tuple(
        Frame(name, "/srv/train.py", int(line) if line else None, 1)
        for name, _, line in (text.partition(":") for text in lines)
    )
    return Stack(slot, pid, waiting, "held", "3.11", truncated, frames, "")


def running(*lines: str, samples: int = 1, **fields: Any) -> Count:
    """So many samples of a stack on a CPU."""
    return Count(stack(*lines, **fields), samples, samples * PERIOD_NS)


def waiting(*lines: str, visits: int = 1, **fields: Any) -> Count:
    """So many visits, four a second, to a thread that waits."""
    return Count(stack(*lines, waiting=True, **fields), visits, visits * 250_000_000)


def unresolved(reason: str, samples: int = 1, slot: int = 5, pid: int = 100) -> Count:
    """Samples that could not be resolved."""
    return Count(Stack(slot, pid, False, "", "", False, (), reason), samples, samples * PERIOD_NS)


class MadeUpSampler:
    """What a test puts into `counts` comes out of drain(), once."""

    made: list[MadeUpSampler] = []  # noqa: RUF012 - by every test anew, see `install`
    failure: Exception | None = None

    def __init__(self, *, rate_hz: int, waits_hz: int, lifecycle: object = None) -> None:
        if self.failure is not None:
            raise self.failure
        self.rate_hz, self.waits_hz, self.lifecycle = rate_hz, waits_hz, lifecycle
        self.counts: list[Count] = []
        self.selections: list[tuple[bool, dict[int, bool]]] = []
        self.pids: list[int] = []
        self.visits = 0
        self.consumed = 0
        self.unavailable: dict[str, str] = {}
        self.refusals: dict[int, Any] = {}
        self.programs: dict[str, Any] = {}
        self.closed = False
        self.fd, self._writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.made.append(self)

    def wake(self) -> None:
        """Make `fd` readable."""
        os.write(self._writer, b"x")

    def consume(self) -> None:
        self.consumed += 1
        os.read(self.fd, 100)

    def visit(self) -> None:
        self.visits += 1

    def select_slots(self, default: bool, exceptions: Mapping[int, bool]) -> None:
        self.selections.append((default, dict(exceptions)))

    def select_pid(self, pid: int) -> None:
        self.pids.append(pid)

    def drain(self) -> list[Count]:
        counts, self.counts = self.counts, []
        return counts

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            os.close(self.fd)
            os.close(self._writer)


def install(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpSampler]:
    """Put it in the place of the real one; what was made is in `made`."""

    class Sampler(MadeUpSampler):
        made = []  # noqa: RUF012

    module = types.ModuleType(MODULE)
    module.Sampler = Sampler  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    return Sampler
