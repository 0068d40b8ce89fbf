"""Deep traces as they are read: the events as rows, after everything in a trace was looked at.

What a trace holds stands in `wire/collector.proto`. Every trace is taken as hostile: whatever does not hold
together raises TraceError and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, repeat
from typing import NamedTuple

from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import Trace, TraceFrame

# cudaMemcpyKind, by number: the last leaves it to the runtime to find out.
COPY_KINDS = ("host_to_host", "host_to_device", "device_to_host", "device_to_device", "default")
LAUNCHES = ("launch", "graph")
END_OF_TIME = (1 << 63) - 1  # the last nanosecond that Perfetto has a number for
_MOST_PID = (1 << 31) - 1
_LONGEST_NAME = 1024  # demangled names of kernels are long


class TraceError(ExpanseError):
    """This is not a trace, or one that does not hold together; the message says what is wrong with it."""


class Event(NamedTuple):
    """One call. Indexes are into the tables of its trace; None: not known, or does not apply."""

    time_ns: int  # wall clock
    thread: int
    function: int
    duration_ns: int | None
    bytes: int | None
    stream: int | None
    kernel: int | None
    shape: int | None
    stack: int | None
    target: int | None
    kind: int | None  # cudaMemcpyKind


class Function(NamedTuple):
    """What the totals say of a function."""

    name: str
    category: str  # "other" where they do not know it
    kind: str  # of collectives
    timed: bool  # whether the end of its calls is looked for


class Reader:
    """A trace that holds together. Raises TraceError when it does not."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._check()
        self.functions = self._functions()

    def __len__(self) -> int:
        return len(self.trace.events.time_ns)

    def events(self) -> Iterator[Event]:
        """In the order of time."""
        columns = self.trace.events
        times = accumulate(columns.time_ns, initial=self.trace.base_ns)
        next(times)
        optional = (
            *(columns.duration_ns, columns.bytes, columns.stream, columns.kernel, columns.shape),
            *(columns.stack, columns.target, columns.kind),
        )
        rows: Iterator[tuple[int, ...]] = zip(
            times,
            columns.thread,
            columns.function,
            *(column or repeat(0, len(self)) for column in optional),
            strict=True,
        )
        if any(step < 0 for step in columns.time_ns[1:]):
            rows = iter(sorted(rows))
        for time, thread, function, duration, size, stream, kernel, shape, stack, target, kind in rows:
            yield Event(
                time,
                thread,
                function,
                duration - 1 if duration else None,
                size - 1 if size else None,
                stream - 1 if stream else None,
                kernel - 1 if kernel else None,
                shape - 1 if shape else None,
                stack - 1 if stack else None,
                target or None,
                kind - 1 if kind else None,
            )

    def kernel_name(self, index: int) -> str:
        """A kernel's name, its address in brackets where it has none."""
        kernel = self.trace.kernels[index]
        return name(kernel.name) or f"[kernel at {kernel.address:#x}]"

    def frames(self, stack: int) -> list[Frame]:
        """A stack, innermost first."""
        return [Frame.of(self.trace.frames[index]) for index in self.trace.traced_stacks[stack].frames]

    @property
    def span(self) -> tuple[int, int]:
        """From when to when the window was open, wall clock; (0, 0) where it never was."""
        status = self.trace.status
        return (status.from_ns, status.to_ns) if 0 < status.from_ns <= status.to_ns else (0, 0)

    @property
    def spans(self) -> list[tuple[int, int]]:
        """From when to when the probes were in place, in order; those that overlap are one."""
        found: list[tuple[int, int]] = []
        for begin, end in sorted((span.from_ns, span.to_ns) for span in self.trace.spans):
            if found and begin < found[-1][1]:
                found[-1] = found[-1][0], max(end, found[-1][1])
            else:
                found.append((begin, end))
        return found

    @property
    def traced_ns(self) -> int:
        """The time in which the probes were in place."""
        if self.trace.spans:
            return sum(end - begin for begin, end in self.spans)
        begin, end = self.span
        return round((end - begin) * self.trace.status.traced_share)

    @property
    def job(self) -> str:
        """The job's key."""
        identity = self.trace.status.identity
        return name(f"{identity.scheduler}/{identity.id}") if identity.id else ""

    @property
    def node(self) -> str:
        """The node's name."""
        return name(self.trace.node.name) or "node"

    def _functions(self) -> list[Function]:
        said: dict[str, tuple[str, str]] = {}
        timed = set()
        for total in self.trace.totals:
            said[total.function] = name(total.category) or "other", name(total.kind)
            if total.timed or total.category == "sync":
                timed.add(total.function)
        return [
            Function(name(function), *said.get(function, ("other", "")), function in timed)
            for function in self.trace.functions
        ]

    def _check(self) -> None:
        trace, events = self.trace, self.trace.events
        count = len(events.time_ns)
        for column, least in (("thread", count), ("function", count)):
            _equal(f"events.{column}", len(getattr(events, column)), least)
        for column in ("duration_ns", "bytes", "stream", "kernel", "shape", "stack", "target", "kind"):
            if length := len(getattr(events, column)):
                _equal(f"events.{column}", length, count)
        _within("events.thread", events.thread, len(trace.threads))
        _within("events.function", events.function, len(trace.functions))
        _within("events.kernel", events.kernel, len(trace.kernels) + 1)
        _within("events.shape", events.shape, len(trace.shapes) + 1)
        _within("events.stack", events.stack, len(trace.traced_stacks) + 1)
        for stack in trace.traced_stacks:
            _within("traced_stacks.frames", stack.frames, len(trace.frames))
        for process in trace.processes:
            _within("processes.files", process.files, len(trace.files))
        times = accumulate(events.time_ns, initial=trace.base_ns)
        if not all(0 <= time <= END_OF_TIME for time in times):
            raise TraceError("the trace is damaged: a time in it is out of range")
        ids = [i for thread in trace.threads for i in (thread.pid, thread.tid)]
        if max(ids + [process.pid for process in trace.processes], default=0) > _MOST_PID:
            raise TraceError("the trace is damaged: a process id in it is out of range")
        for span in trace.spans:
            if not 0 <= span.from_ns <= span.to_ns:
                raise TraceError("the trace is damaged: a span in it ends before it begins")
        if not (math.isfinite(trace.status.traced_share) and math.isfinite(trace.status.cost_share)):
            raise TraceError("the trace is damaged: a share in it is no number")
        for counter in trace.counters:
            _equal("counters.value", len(counter.value), len(counter.time_ns))
            if any(time < 0 for time in counter.time_ns):
                raise TraceError("the trace is damaged: a time in it is out of range")


class Frame(NamedTuple):
    """A function, its file and the line in it, 0 where it is not known."""

    name: str
    file: str
    line: int

    @classmethod
    def of(cls, frame: TraceFrame) -> Frame:
        """From the message."""
        return cls(name(frame.function), name(frame.file), frame.line)

    @property
    def place(self) -> str:
        """Its file and line, as far as they are known."""
        return f"{self.file}:{self.line}" if self.line else self.file


def name(text: str) -> str:
    """A name out of a trace, safe to show."""
    return clean(text, _LONGEST_NAME)


def copy_kind(kind: int) -> str:
    """The name of a cudaMemcpyKind."""
    return COPY_KINDS[kind] if kind < len(COPY_KINDS) else str(kind)


def _equal(column: str, length: int, wanted: int) -> None:
    if length != wanted:
        raise TraceError(f"the trace is damaged: {column} has {length} entries instead of {wanted}")


def _within(column: str, indexes: Sequence[int], size: int) -> None:
    if indexes and max(indexes) >= size:
        raise TraceError(f"the trace is damaged: {column} points beyond its table")
