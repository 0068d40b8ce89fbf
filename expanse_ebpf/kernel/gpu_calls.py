"""The loaded `gpu_calls` programs: what they are told, and what they say."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import libbpf, uprobes
from expanse_ebpf.kernel.bpf_call import TRACE_UPROBE_MULTI
from expanse_ebpf.kernel.lifecycle import Configuration
from expanse_ebpf.kernel.python_stacks import OUTCOMES, PythonStacks

# The order of enum category in bpf/gpu_calls.bpf.c.
CATEGORIES = ("launch", "graph", "copy", "set", "alloc", "free", "sync", "collective", "load")
KINDS = 6  # rows of totals of a function whose kind is an argument; the last is that of all other values

_MAX_POINTS, _MAX_TOTALS, _MAX_ROWS, _GAP_BUCKETS = 4096, 2048, 4096, 512
_TIMED, _CALIBRATION, _STEPPED = 1, 2, 4
_POINT = struct.Struct("=IBBBBbbbbbbbBQQ")
_TOTAL = struct.Struct("=6Q16x")
_ROW = struct.Struct("=7Q5I")
_ROW_SIZE = 352
_U64 = struct.Struct("=Q")
_CALL = struct.Struct("=IIQIII4x8IQQQ")
_END = struct.Struct("=IIQQ")
_SITE = struct.Struct("=IIQ")
_KINDS = {1: "call", 2: "end", 3: "site", 4: "loaded"}
_NO_STACK = 16  # the outcome of a launch of which no stack was wanted


class Function(Protocol):
    """As tracing.functions.Function, which says what these are."""

    # Read-only, so that named tuples with narrower types fit.
    @property
    def layer(self) -> int: ...  # noqa: D102
    @property
    def category(self) -> str: ...  # noqa: D102
    @property
    def shape(self) -> int: ...  # noqa: D102
    @property
    def kind_arg(self) -> int: ...  # noqa: D102
    @property
    def bytes_arg(self) -> int: ...  # noqa: D102
    @property
    def times_arg(self) -> int: ...  # noqa: D102
    @property
    def type_arg(self) -> int: ...  # noqa: D102
    @property
    def stream_arg(self) -> int: ...  # noqa: D102
    @property
    def target_arg(self) -> int: ...  # noqa: D102
    @property
    def name_arg(self) -> int: ...  # noqa: D102
    @property
    def shift(self) -> int: ...  # noqa: D102
    @property
    def timed(self) -> bool: ...  # noqa: D102


class Inherited:
    """Maps of the agent's `task_lifecycle`, in a process that has inherited their descriptors."""

    def __init__(self, configuration: Configuration, slots_fd: int, totals_fd: int, slot: int) -> None:
        """`slot` is that of the one job that is looked at."""
        self.configuration = configuration
        self.maps = {"slots": libbpf.Map("slots", slots_fd), "totals": libbpf.Map("totals", totals_fd)}
        self.given = (slot,)


class Call(NamedTuple):
    """One call that is not inside another one."""

    row: int  # of the thread
    time_ns: int  # monotonic
    point: int
    outcome: str  # of the walk of its Python stack; "": none was wanted
    stack: int  # the row of the stack, when that is "resolved"
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    kind: int  # of a copy, plus 1
    stream: int  # plus 1; 0: it has none
    target: int
    bytes: int  # plus 1; 0: not known


class End(NamedTuple):
    """The end of the call that began at `begin_ns` in that thread."""

    row: int
    begin_ns: int
    duration_ns: int


class Site(NamedTuple):
    """Where a timed call returns to."""

    pid: int
    address: int


class Loaded(NamedTuple):
    """A kernel that was loaded, by its handle."""

    pid: int
    handle: int
    name: bytes


Record = Call | End | Site | Loaded


class Total(NamedTuple):
    """All calls of a function."""

    calls: int
    bytes: int
    sized: int
    timed: int
    time_ns: int
    nested: int


class Thread(NamedTuple):
    """A thread that calls. Ids as /proc here has them, 0 where it is not seen."""

    row: int
    hits: int
    stepped: int  # of them, those at instructions that the kernel must step over
    program_ns: int
    calls: int
    launches: int
    tid: int
    pid: int


class _Window(ctypes.Structure):
    """struct window of bpf/gpu_calls.bpf.c."""

    _fields_ = [
        ("counting", ctypes.c_uint32),
        ("stacks", ctypes.c_uint32),
        ("epoch", ctypes.c_uint32),
        ("rows", ctypes.c_uint32),
        ("by_user", ctypes.c_uint32),
        ("uid", ctypes.c_uint32),
        ("foreign_hits", ctypes.c_uint64),
        ("foreign_stepped", ctypes.c_uint64),
        ("events_lost", ctypes.c_uint64),
        ("unplaced", ctypes.c_uint64),
        ("sites_lost", ctypes.c_uint64),
        ("unpaired", ctypes.c_uint64),
        ("calibration_hits", ctypes.c_uint64),
    ]


def decode(record: bytes) -> Record | None:
    """A record from the ring buffer; None when it is none."""
    try:
        kind = _KINDS.get(int.from_bytes(record[:4], "little"))
        if kind == "call":
            _, row, time_ns, point, outcome, stack, *words = _CALL.unpack_from(record)
            gx, gy, gz, bx, by, bz, shared, copy, stream, target, size = words
            said = OUTCOMES[outcome] if outcome < len(OUTCOMES) else ""
            return Call(
                *(row, time_ns, point, said, stack, (gx, gy, gz), (bx, by, bz)),
                *(shared, copy, stream, target, size),
            )
        if kind == "end":
            _, row, begin_ns, duration_ns = _END.unpack_from(record)
            return End(row, begin_ns, duration_ns)
        if kind == "site":
            _, pid, address = _SITE.unpack_from(record)
            return Site(pid, address)
        if kind == "loaded":
            _, pid, handle = _SITE.unpack_from(record)
            return Loaded(pid, handle, record[_SITE.size :].partition(b"\0")[0])
    except struct.error:
        pass  # cut short
    return None


def gap_bound_ns(bucket: int) -> int:
    """The upper bound of a bucket of gaps, itself not in it: eight buckets lie in each power of two."""
    octave, part = divmod(bucket, 8)
    return bucket + 1 if octave == 0 else (8 + part + 1) << (octave - 1)


def supported() -> str:
    """Why this kernel cannot trace calls; empty when it can."""
    return uprobes.supported()


class GpuCalls:
    """The programs, loaded and not attached anywhere. Records go to `handle` on consume()."""

    def __init__(
        self,
        handle: Callable[[Record], None],
        python: PythonStacks,
        configuration: Configuration,
        *,
        by: str = "",
        buffer_bytes: int = 4 << 20,
    ) -> None:
        """Share the maps of `python`, which decides what job is looked at and knows stacks.

        `by` is how probes are put in place, see uprobes; empty: as the kernel can. Raises UnavailableError,
        or BpfError where the kernel refuses.
        """
        reason = supported()
        if reason:
            raise UnavailableError(reason)
        self.method = by or uprobes.method()
        self._object = libbpf.Object("gpu_calls")
        try:
            self._object.configure(configuration)
            python.share(self._object)
            self._object.resize("call_records", buffer_bytes)
            self._object.resize("call_walks", 2 * configuration.cpus)
            if self.method == uprobes.MULTI:
                for name in ("on_call", "on_return"):
                    self._object.expect(name, TRACE_UPROBE_MULTI)
            self._object.load()
            maps = self._object.maps
            self.window = _Window.from_buffer(maps["the_windows"].mapped(ctypes.sizeof(_Window)))
            self._totals = maps["call_totals"].mapped(_MAX_TOTALS * 64)
            self._gaps = maps["gaps"].mapped(_GAP_BUCKETS * 8)
            self._rows = maps["thread_rows"].mapped(_MAX_ROWS * _ROW_SIZE)
            self.calls = uprobes.Probes(self._object.programs["on_call"], self.method)
            self.returns = uprobes.Probes(self._object.programs["on_return"], self.method)

            def received(data: bytes) -> None:
                record = decode(data)
                if record is not None:
                    handle(record)

            self._ring = libbpf.RingBuffer(maps["call_records"], received)
            self.fd = self._ring.fd
        except BaseException:
            self._object.close()
            raise
        self._points = 0
        self._total_rows = 0

    @property
    def programs(self) -> Mapping[str, libbpf.Program]:
        """By name."""
        return self._object.programs

    def add_total(self, kinds: int = 1) -> int:
        """A new row of totals, the first of `kinds`. Raises UnavailableError when there are too many."""
        if self._total_rows + kinds > _MAX_TOTALS:
            raise UnavailableError("too many functions")
        self._total_rows += kinds
        return self._total_rows - kinds

    def add_point(self, function: Function, total: int, below: int, above: int, *, stepped: bool) -> int:
        """The cookie for probes of `function` in one file, counted in row `total`.

        `below` and `above` are how many bytes of the file's code lie around it, `stepped` tells that the
        kernel must step over its first instruction. Raises UnavailableError when there are too many.
        """
        return self._add(
            _POINT.pack(
                *(total, function.layer, CATEGORIES.index(function.category), function.shape),
                *(
                    _TIMED * function.timed | _STEPPED * stepped,
                    function.kind_arg,
                    function.bytes_arg,
                    function.times_arg,
                ),
                *(function.type_arg, function.stream_arg, function.target_arg, function.name_arg),
                *(function.shift, below, above),
            )
        )

    def add_calibration(self) -> int:
        """The cookie for a probe that is there to be measured."""
        return self._add(_POINT.pack(0, 0, 0, 0, _CALIBRATION, *[-1] * 7, 0, 0, 0))

    @staticmethod
    def return_cookie(*, stepped: bool) -> int:
        """The cookie for a probe at a place to which calls return."""
        return _STEPPED * stepped

    def _add(self, point: bytes) -> int:
        if self._points >= _MAX_POINTS:
            raise UnavailableError("too many probe points")
        self._object.maps["points"].update(self._points.to_bytes(4, "little"), point)
        self._points += 1
        return self._points - 1

    def consume(self, most: int) -> int:
        """Handle so many records at most; returns their number."""
        return self._ring.consume(most)

    def total(self, row: int) -> Total:
        """What was counted in a row of totals."""
        return Total(*_TOTAL.unpack_from(self._totals, row * 64))

    def gaps(self) -> Iterator[tuple[int, int]]:
        """(bucket, count) of the times between launches."""
        for bucket in range(_GAP_BUCKETS):
            (count,) = _U64.unpack_from(self._gaps, bucket * 8)
            if count:
                yield bucket, count

    def threads(self) -> Sequence[Thread]:
        """All threads that have called."""
        return [self.thread(row) for row in range(min(self.window.rows, _MAX_ROWS))]

    def thread(self, row: int) -> Thread:
        """The thread that has that row."""
        _, hits, program_ns, calls, launches, stepped, _, _, _, _, tid, pid = _ROW.unpack_from(
            self._rows, row * _ROW_SIZE
        )
        return Thread(row, hits, stepped, program_ns, calls, launches, tid, pid)

    def detach(self) -> None:
        """Take all probes away; safe when there is none."""
        self.calls.detach()
        self.returns.detach()

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self.detach()
        self._ring.close()
        self._object.close()
