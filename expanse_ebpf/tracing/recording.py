"""What a window has seen, call by call, until it becomes a Trace."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import NamedTuple

from expanse_ebpf.kernel.gpu_calls import Call, End
from expanse_ebpf.python_stacks.sampler import Frame, Stack
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import Trace

_LONGEST_TEXT = 512  # characters of a function's name or of a path
_MOST_SHAPES = 65_536
_MOST_STACKS = 16_384
_OPEN = 4096  # timed calls whose end may still come


class Kernel(NamedTuple):
    """What was launched, as the call tells it."""

    pid: int
    address: int
    # How the address leads to a name: that of the kernel's host stub; the handle that the driver gave; or,
    # where the runtime's own handle says nothing, a place in the host stub, which calls __cudaLaunchKernel.
    how: str  # stub | handle | caller


class Recording:
    """Events in columns, as far as `most` allows, and the tables that they refer to."""

    def __init__(self, most: int) -> None:
        self.lost = 0  # events that came when there were `most`
        self.kernels: dict[Kernel, int] = {}
        self.unresolved: dict[str, int] = {}  # launches by why they have no stack
        self._most = most
        self._time = array("Q")
        self._row = array("I")
        self._function = array("I")
        self._duration = array("Q")
        self._bytes = array("Q")
        self._stream = array("Q")
        self._kernel = array("I")
        self._shape = array("I")
        self._stack = array("I")
        self._target = array("Q")
        self._kind = array("I")
        self._open: dict[tuple[int, int], int] = {}  # (row, begin) of a timed call to its event
        self._shapes: dict[tuple[int, ...], int] = {}
        self._stacks: dict[tuple[tuple[Frame, ...], bool], int] = {}
        self._by_row: dict[int, int] = {}  # row of a stack to its index

    def __len__(self) -> int:
        return len(self._time)

    def add(
        self, call: Call, function: int, kernel: Kernel | None, kind: int, *, timed: bool, stack: int
    ) -> None:
        """Add a call of the function with that index; `stack` is what stack_index() gave, plus 1, or 0."""
        if len(self._time) >= self._most:
            self.lost += 1
            return
        if timed:
            self._open[call.row, call.time_ns] = len(self._time)
            if len(self._open) > _OPEN:
                del self._open[next(iter(self._open))]
        self._time.append(call.time_ns)
        self._row.append(call.row)
        self._function.append(function)
        self._duration.append(0)
        self._bytes.append(call.bytes)
        self._stream.append(call.stream)
        self._kernel.append(0 if kernel is None else self.kernels.setdefault(kernel, len(self.kernels)) + 1)
        self._shape.append(self._shape_of(call) if any(call.grid) else 0)
        self._stack.append(stack)
        self._target.append(0 if kernel is not None else call.target)
        self._kind.append(kind)

    def _shape_of(self, call: Call) -> int:
        """The index of the shape, plus 1; 0 when there are too many."""
        shape = (*call.grid, *call.block, call.shared_bytes)
        if shape not in self._shapes and len(self._shapes) >= _MOST_SHAPES:
            return 0
        return self._shapes.setdefault(shape, len(self._shapes)) + 1

    def end(self, end: End) -> None:
        """The end of a call that was added."""
        event = self._open.pop((end.row, end.begin_ns), None)
        if event is not None:
            self._duration[event] = end.duration_ns + 1

    def stack_index(self, row: int, find: Callable[[int], tuple[Stack, bool]]) -> int:
        """The index, plus 1, of the stack in that row of the kernel side; 0, and counted why, without one."""
        known = self._by_row.get(row)
        if known is not None:
            return known
        stack, whole = find(row)
        if stack.unresolved:
            self.unresolved[stack.unresolved] = self.unresolved.get(stack.unresolved, 0) + 1
            return 0
        key = (stack.frames, stack.truncated)
        if key not in self._stacks and len(self._stacks) >= _MOST_STACKS:
            self.unresolved["over_budget"] = self.unresolved.get("over_budget", 0) + 1
            return 0
        index = self._stacks.setdefault(key, len(self._stacks)) + 1
        if whole:
            self._by_row[row] = index
        return index

    def forget_rows(self) -> None:
        """The kernel side uses its rows anew."""
        self._by_row.clear()

    def fill(self, trace: Trace, base_ns: int, threads: Sequence[int], kernels: Sequence[int]) -> None:
        """Write events, shapes and stacks; their times count from monotonic time `base_ns`.

        `threads` and `kernels` give, for each row of a thread and each of `self.kernels`, its index in the
        trace.
        """
        order = sorted(range(len(self._time)), key=self._time.__getitem__)
        events = trace.events
        before = base_ns
        for i in order:
            events.time_ns.append(self._time[i] - before)
            before = self._time[i]
        events.thread.extend(threads[self._row[i]] for i in order)
        events.kernel.extend(kernels[self._kernel[i] - 1] + 1 if self._kernel[i] else 0 for i in order)
        for name, column in (
            ("function", self._function),
            ("duration_ns", self._duration),
            ("bytes", self._bytes),
            ("stream", self._stream),
            ("shape", self._shape),
            ("stack", self._stack),
            ("target", self._target),
            ("kind", self._kind),
        ):
            getattr(events, name).extend(column[i] for i in order)
        for gx, gy, gz, bx, by, bz, shared in self._shapes:
            trace.shapes.add(
                grid_x=gx, grid_y=gy, grid_z=gz, block_x=bx, block_y=by, block_z=bz, shared_bytes=shared
            )
        self._fill_stacks(trace)

    def _fill_stacks(self, trace: Trace) -> None:
        frames: dict[Frame, int] = {}
        for stack, truncated in self._stacks:
            indexes = [frames.setdefault(frame, len(frames)) for frame in stack]
            trace.traced_stacks.add(frames=indexes, truncated=truncated)
        for frame in frames:
            trace.frames.add(function=_short(frame.name), file=_short(frame.file), line=frame.line or 0)


def _short(text: str) -> str:
    return clean(text, _LONGEST_TEXT)
