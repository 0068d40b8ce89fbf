"""A window as `expanse-ebpf trace` follows it: what has come of it so far, and what is said meanwhile."""

from __future__ import annotations

import math
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TextIO

from expanse_ebpf.errors import UnavailableError, UnknownJobError
from expanse_ebpf.top import client, text
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    JobIdentity,
    Trace,
    TracePart,
    TraceReply,
    TraceRequest,
    TraceState,
    TraceStatus,
)
from expanse_ebpf.wire.transport import MAX_TRACE_PARTS

MAX_BYTES = 512 << 20  # of all parts of all nodes
_REDRAW_S = 0.5


def by_agent(path: str, request: TraceRequest, enough: Callable[[], bool]) -> Iterator[TraceReply]:
    """As client.trace; raises UnknownJobError too, when the agent knows no such job."""
    try:
        yield from client.trace(path, request, enough)
    except UnavailableError as error:
        if str(error).startswith("no job "):
            raise UnknownJobError(str(error)) from None
        raise


class Windows:
    """One window on all its nodes: how each stands, and the parts of its trace that have come."""

    def __init__(self) -> None:
        self.statuses: dict[str, TraceStatus] = {}  # by node; this one alone may have no name
        self._parts: dict[str, dict[int, TracePart]] = {}
        self._bytes = 0
        self.opened = 0.0  # when the first was seen open; monotonic, 0: not yet

    def add(self, reply: TraceReply) -> None:
        """Take in what has come. Raises UnavailableError for more than any trace is."""
        if reply.HasField("status"):
            self.statuses[reply.node] = reply.status
            if reply.status.state == TRACE_STATE_OPEN and not self.opened:
                self.opened = time.monotonic()
        if reply.HasField("part"):
            parts = self._parts.setdefault(reply.node, {})
            self._bytes += len(reply.part.data)
            if self._bytes > MAX_BYTES or len(parts) >= MAX_TRACE_PARTS:
                raise UnavailableError(
                    "more is sent than any trace is; are agent and command of one version?"
                )
            parts[reply.part.index] = reply.part

    @property
    def id(self) -> str:
        """Of the window; empty while nobody has told it."""
        return next((status.id for status in self.statuses.values() if status.id), "")

    def traces(self) -> tuple[list[Trace], dict[str, str]]:
        """The traces that have come; and, by node, why one that should be there is not."""
        from expanse_ebpf.export import trace_parts
        from expanse_ebpf.export.trace_reader import Reader, TraceError

        traces: list[Trace] = []
        lost: dict[str, str] = {}
        for node in sorted({*self.statuses, *self._parts}):
            status, parts = self.statuses.get(node, TraceStatus()), self._parts.get(node, {})
            if parts:
                try:
                    trace = trace_parts.join(parts[index] for index in sorted(parts))
                    Reader(trace)  # what does not hold together is lost alone, not with all the others
                    traces.append(trace)
                except TraceError as error:
                    lost[node] = _joined(str(error), status.reason)
            elif status.state <= TRACE_STATE_DONE:
                last = f"the trace has not come; the window was last seen {state_name(status)}"
                lost[node] = _joined(last, status.reason)
        return traces, lost

    def as_json(self, lost: Mapping[str, str]) -> list[dict[str, Any]]:
        """How the window stands on each node; `lost` says why a trace that should be there is not."""
        return [
            {**status_as_json(node, status), "lost": lost.get(node)}
            for node, status in sorted(self.statuses.items())
        ]


def _joined(*reasons: str) -> str:
    return "; ".join(filter(None, reasons))


def state_name(status: TraceStatus) -> str:
    """Its state as it is written: waiting, open, done, no_targets, no_probe_point, budget, failed."""
    if status.state not in TraceState.values():
        return "unknown"
    return TraceState.Name(status.state).removeprefix("TRACE_STATE_").lower()


def status_as_json(node: str, status: TraceStatus) -> dict[str, Any]:
    """How a window stands on one node; what is not known is null."""
    begun = begun_yet(status)
    return {
        "node": node or None,
        "state": state_name(status),
        "reason": status.reason or None,
        "rule": status.rule or None,
        "from_ns": status.from_ns or None,
        "to_ns": status.to_ns or None,
        "seconds": _finite(status.seconds) or None,
        "targets": status.targets if begun else None,
        "launches": status.launches if begun else None,
        "traced_share": _finite(status.traced_share) if begun else None,
        "cost_share": _finite(status.cost_share) if begun else None,
    }


def begun_yet(status: TraceStatus) -> bool:
    """Whether it has figures: it is open, or was."""
    return status.state == TRACE_STATE_OPEN or bool(status.from_ns)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def job_key(identity: JobIdentity) -> str:
    """The job's key; its id alone where no more is known."""
    return f"{identity.scheduler}/{identity.id}" if identity.scheduler else identity.id


class Progress:
    """How the window stands: one line on a terminal, drawn over and over; elsewhere a line per change."""

    def __init__(self, stream: TextIO | None, ctrl_c: str) -> None:
        """`ctrl_c`: what that does to the window, as in "Ctrl-C ends it"."""
        self._stream = stream
        self._ctrl_c = ctrl_c
        self._on_terminal = stream is not None and stream.isatty()
        self._drawn = float("-inf")
        self._columns = 0
        self._said: dict[str, str] = {}

    def __enter__(self) -> Progress:
        return self

    def show(self, windows: Windows) -> None:
        """Say what is new."""
        if self._stream is None:
            return
        changed = False
        for node, status in windows.statuses.items():
            said = state_name(status)
            if status.reason and status.state <= TRACE_STATE_OPEN:  # what it ends with is told in the end
                said += f": {status.reason}"
            if self._said.get(node) != said:
                self._said[node], changed = said, True
                if not self._on_terminal:
                    self._stream.write(text.clean(f"{node}: {said}" if node else said) + "\n")
                    self._stream.flush()
        now = time.monotonic()
        if self._on_terminal and (changed or now > self._drawn + _REDRAW_S):
            self._drawn = now
            self._draw(text.clean(self.line(windows, now)))

    def line(self, windows: Windows, now: float) -> str:
        """All nodes in one line, at the monotonic time `now`."""
        statuses = list(windows.statuses.values())
        open_ones = [status for status in statuses if status.state == TRACE_STATE_OPEN]
        waiting = any(status.state <= TRACE_STATE_WAITING for status in statuses)
        ended = "the trace comes" if any(map(begun_yet, statuses)) else "there is no trace"
        said = ["open" if open_ones else "waiting" if waiting else ended]
        if open_ones and len(statuses) > 1:
            said[0] = f"open on {len(open_ones)} of {len(statuses)} nodes"
        if open_ones:
            left = windows.opened + max(status.seconds for status in open_ones) - now
            said.append(f"{max(0.0, left):.0f} s left")
        said.append(f"{sum(status.launches for status in statuses):,} launches")
        said.append(f"cost {text.percent(max((s.cost_share for s in statuses), default=0.0))}")
        if open_ones or waiting:
            said.append(f"Ctrl-C {self._ctrl_c}")
        return ", ".join(said)

    def _draw(self, line: str) -> None:
        assert self._stream is not None
        width = shutil.get_terminal_size().columns - 1
        shown = text.fit(line, min(width, max(self._columns, text.cell_width(line))))
        self._stream.write("\r" + shown + ("" if line else "\r"))
        self._stream.flush()
        self._columns = text.cell_width(line)

    def __exit__(self, *_: object) -> None:
        if self._columns:
            self._draw("")


class Early:
    """Whether somebody has had enough."""

    happened = False


@contextmanager
def ended_early() -> Iterator[Early]:
    """The first SIGINT or SIGTERM ends the window, with what there is; the second is KeyboardInterrupt."""
    early = Early()
    numbers = (signal.SIGINT, signal.SIGTERM)

    def noticed(*_: object) -> None:
        early.happened = True
        for number in numbers:
            signal.signal(number, signal.default_int_handler)

    before = {number: signal.signal(number, noticed) for number in numbers}
    try:
        yield early
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
