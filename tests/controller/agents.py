"""Nodes made up of the agent's own stream, as far as windows go."""

from __future__ import annotations

import itertools
import select
import time
from types import TracebackType
from typing import Any

from expanse_ebpf.ship.client import ControllerStream
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    Report,
    TracePart,
    TraceRequest,
    TraceState,
    TraceStatus,
)
from tests.controller.process import eventually, node, report

ID = "00112233445566ff"


def status(window: str = ID, state: TraceState = TRACE_STATE_DONE, **fields: Any) -> TraceStatus:
    """What a node says of a window of slurm/123, 25 s long from 100 s after 1970."""
    times = {"start_ns": 10**11, "from_ns": 10**11, "seconds": 25.0, **fields}
    if state >= TRACE_STATE_DONE:
        times = {"to_ns": 125 * 10**9, "launches": 1000, **times}
    made = TraceStatus(id=window, state=state, **times)
    made.identity.scheduler, made.identity.id = "slurm", "123"
    return made


def parts_of(window: str, *data: bytes) -> list[TracePart]:
    """A trace in parts."""
    return [TracePart(id=window, index=i, parts=len(data), data=d) for i, d in enumerate(data)]


class Agent:
    """A node that has the job slurm/123; its reports are made by hand."""

    def __init__(self, address: str, name: str = "gpu001", run: int = 4711) -> None:
        self.node = node(name, f"install-{name}")
        self.run = run
        self._address = address
        self._numbers = itertools.count(1)
        self._stream = self._connected()

    def __enter__(self) -> Agent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.hang_up()

    def _connected(self) -> ControllerStream:
        stream = ControllerStream(self._address, self.node)
        stream.start()
        eventually(lambda: stream.connected)
        return stream

    def hang_up(self) -> None:
        self._stream.stop(0)

    def reconnect(self) -> None:
        """A new stream, with nothing known of what came down the old one."""
        self.hang_up()
        self._stream = self._connected()

    def made(self, *statuses: TraceStatus, parts: list[TracePart] | None = None) -> Report:
        """The next report."""
        made = report(next(self._numbers), run=self.run)
        made.traces.extend(statuses)
        made.trace_parts.extend(parts or [])
        return made

    def send(self, *statuses: TraceStatus, parts: list[TracePart] | None = None) -> None:
        """Send a report, without waiting."""
        self._stream.send(self.made(*statuses, parts=parts))

    def report(self, *statuses: TraceStatus, parts: list[TracePart] | None = None) -> None:
        """Send a report, and wait until it is stored."""
        self.send(*statuses, parts=parts)
        self.all_stored()

    def all_stored(self) -> None:
        eventually(lambda: self._stream.unsent == 0)

    def commands(self, timeout: float = 10.0) -> list[TraceRequest]:
        """What the controller asks for, as soon as it does; empty after `timeout` seconds."""
        select.select([self._stream.commands_fd], [], [], timeout)
        return self._stream.take_commands()

    def command(self) -> TraceRequest:
        (command,) = self.commands()
        return command

    def trace(self, window: str, *data: bytes) -> None:
        """A whole window, as a node reports it."""
        self.report(status(window, TRACE_STATE_OPEN, start_ns=time.time_ns()))
        self.report(status(window), parts=parts_of(window, *data)[:1])
        for part in parts_of(window, *data)[1:]:
            self.report(parts=[part])
