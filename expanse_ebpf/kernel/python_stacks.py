"""The loaded `python_stacks` programs: what they are told, and what they say."""

from __future__ import annotations

import ctypes
import fcntl
import secrets
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import cpus, libbpf, perf
from expanse_ebpf.kernel.lifecycle import MAX_SLOTS, Configuration
from expanse_ebpf.kernel.python_layout import NOWHERE, Layout

# The order of enum outcome in bpf/include/python_maps.h.
OUTCOMES = (
    "resolved",
    "starting",
    "not_python",
    "unsupported",
    "opted_out",
    "native_thread",
    "no_frames",
    "unreadable",
    "changed",
    "over_budget",
    "lost",
)
GIL = ("", "held", "waiting", "released")

MAX_STACKS = 16384
OFFSET_BITS = 24
_PUT_UP = 4096  # free rows lying ready in the kernel for new stacks, and as many for waiting threads
_MAX_LAYOUTS = 1024
_SLOT_SIZE = 512
_SELECTED_OFFSET = 256
_OUTCOMES = struct.Struct(f"={len(OUTCOMES)}Q{(16 - len(OUTCOMES)) * 8}x{len(OUTCOMES)}Q")
_COUNT = struct.Struct("=QQ")
_PROCESS = struct.Struct("=Q")
_SPACE = struct.Struct("=QIIQII")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")
_ASK = struct.Struct("=IIQIIII")
_PART = struct.Struct("=IIQII")
_CODE = struct.Struct("=IIQQIIII")
_STACK = struct.Struct("=IIIIIIII")
_PARTS = {2: "name", 3: "file", 4: "lines"}
_ASK_KIND, _CODE_KIND, _STACK_KIND = 1, 5, 6
_FLAG_WAITING, _FLAG_TRUNCATED = 4, 8
_THREAD_BLOCK, _BLOCK = 256, 128
_SET_BPF = 0x40042408  # PERF_EVENT_IOC_SET_BPF
_RECORD_LIMIT = 8192  # bytes; none is longer
_ASKED_AGAIN_NS = 10**9  # when one that is not Python is asked for the next time
_GRACE_S = 0.05  # far longer than a program runs
_COMPARED = 4096  # bytes of the table of counts that are compared at once


class _Control(ctypes.Structure):
    """struct python_control of bpf/include/python_maps.h."""

    _fields_ = [
        ("visit_ns", ctypes.c_uint64),
        ("seed_a", ctypes.c_uint64),
        ("seed_b", ctypes.c_uint64),
        ("period_ns", ctypes.c_uint32),
        ("all", ctypes.c_uint32),
        ("by_process", ctypes.c_uint32),
        ("stack_epoch", ctypes.c_uint32),
        ("code_epoch", ctypes.c_uint32),
        ("visit_rows_up", ctypes.c_uint32),
        ("visit_rows_taken", ctypes.c_uint32),
        ("level", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
        ("namespace", ctypes.c_uint64),
    ]


class _InstalledLayout(ctypes.Structure):
    """struct installed_layout there: a layout, and how many bytes have to be read for all of it."""

    _fields_ = [
        ("at", Layout),
        ("thread_bytes", ctypes.c_uint32),
        ("frame_bytes", ctypes.c_uint32),
        ("code_from", ctypes.c_uint32),
        ("code_bytes", ctypes.c_uint32),
        ("code_version", ctypes.c_uint32),
    ]


class Ask(NamedTuple):
    """Which interpreter does this process run?"""

    slot: int
    space: int  # its address space, shared with what it forks
    host_pid: int
    pid: int  # as this process's /proc has it; 0: not visible there
    tid: int  # a thread of it that lives
    tries: int


class Part(NamedTuple):
    """A string of a code object, or a piece of its line table."""

    kind: str  # name | file | lines
    code: int
    length: int  # characters of the whole string; bytes of a piece
    state: int  # the string's state word; where in the table the piece belongs
    data: bytes


class Code(NamedTuple):
    """A code object, all parts of which have come."""

    code: int
    layout: int
    first_line: int
    lines: int  # address of the line table's bytes
    lines_length: int
    pid: int


class Stack(NamedTuple):
    """A stack that is counted in row `row`."""

    row: int
    slot: int
    pid: int
    layout: int
    gil: str
    waiting: bool
    truncated: bool
    frames: tuple[int, ...]  # code << OFFSET_BITS | offset of the instruction in bytes; innermost first


Record = Ask | Part | Code | Stack


def decode(record: bytes) -> Record | None:
    """A record from the ring buffer; None when it is none."""
    try:
        (kind,) = _U32.unpack_from(record)
        if kind == _STACK_KIND:
            _, slot, row, pid, layout, flags, depth, _ = _STACK.unpack_from(record)
            frames = struct.unpack_from(f"={depth & 0xFF}Q", record, _STACK.size)
            waiting, truncated = bool(flags & _FLAG_WAITING), bool(flags & _FLAG_TRUNCATED)
            return Stack(row, slot, pid, layout, GIL[flags & 3], waiting, truncated, frames)
        if kind in _PARTS:
            _, length, code, state, _ = _PART.unpack_from(record)
            return Part(_PARTS[kind], code, length, state, record[_PART.size :])
        if kind == _CODE_KIND:
            _, layout, code, lines, lines_length, first_line, pid, _ = _CODE.unpack_from(record)
            return Code(code, layout, first_line, lines, lines_length, pid)
        if kind == _ASK_KIND:
            _, slot, space, host_pid, pid, tid, tries = _ASK.unpack_from(record)
            return Ask(slot, space, host_pid, pid, tid, tries)
    except struct.error:
        pass  # cut short
    return None


class Jobs(Protocol):
    """How jobs are told apart, by maps that are shared."""

    @property
    def configuration(self) -> Configuration:
        """For the objects that share them."""

    @property
    def maps(self) -> Mapping[str, libbpf.Map]:
        """`slots` and `totals` among them."""

    @property
    def given(self) -> Collection[int]:
        """Accounting slots that jobs may have."""


class PythonStacks:
    """The programs, loaded and sampling. Records go to `handle` on consume()."""

    def __init__(self, handle: Callable[[Record], None], rate_hz: int, lifecycle: Jobs | None = None) -> None:
        """Sample jobs' processes by the slots of `lifecycle`; without it, those that are named by want().

        `rate_hz` 0 takes no samples: another object that share()s the maps walks stacks. Raises
        UnavailableError, or BpfError where the kernel refuses.
        """
        self._lifecycle = lifecycle
        self._rate_hz = rate_hz
        self._configuration = lifecycle.configuration if lifecycle else Configuration(0, 0, 0, cpus.count())
        # Each CPU keeps up to 128 free entries of such a table to itself, and evicts others for them.
        self._least = 256 * self._configuration.cpus
        self._layouts = 0  # that are installed
        self._enabled: dict[int, int] = {}  # what the clocks of the CPUs stood at
        self._free = deque(range(MAX_STACKS))  # rows that can be put up
        self._put_up = 0
        self._used: list[int] = []  # rows of the present epoch, in the order in which they were taken
        self._ending: list[int] = []  # rows of the epoch before
        self._renewed_at = 0.0
        self._seen = bytearray(MAX_STACKS * _COUNT.size)
        clock = partial(perf.open_counter, frequency=rate_hz)
        self._events = perf.OpenCounters([perf.SOFTWARE["cpu-clock"]] if rate_hz else [], clock)
        self._object = libbpf.load_shrinking(self._set_up)
        self._waits: libbpf.Object | None = None
        try:
            maps = self._object.maps
            self._slots = maps["python_slots"].mapped(MAX_SLOTS * _SLOT_SIZE)
            self._counts = maps["counts"].mapped(MAX_STACKS * _COUNT.size)
            self._control = _Control.from_buffer(maps["control"].mapped(ctypes.sizeof(_Control)))
            self._control.period_ns = round(1e9 / rate_hz) if rate_hz else 0
            self._control.by_process = lifecycle is None
            self._control.seed_a, self._control.seed_b = secrets.randbits(64), secrets.randbits(64)
            self._object.programs["identify"].run()

            def received(data: bytes) -> None:
                record = decode(data)
                if isinstance(record, Stack):
                    self._put_up -= not record.waiting
                    self._used.append(record.row)
                if record is not None:
                    handle(record)

            self._ring = libbpf.RingBuffer(maps["python_records"], received, limit=_RECORD_LIMIT)
            self.fd = self._ring.fd
            for name in ("on_python_fork", "on_python_exec", "on_python_exit"):
                self._object.programs[name].attach()
            self._put_rows_up()
            if not rate_hz:
                return
            self.follow_cpus()
            if not self._events.descriptors:
                reasons = [*self._events.refused.values(), *self._events.missing.values(), "none is online"]
                raise UnavailableError(f"no CPU can be sampled: {reasons[0]}")
        except BaseException:
            self.close()
            raise

    def _set_up(self, divisor: int) -> libbpf.Object:
        made = libbpf.Object("python_stacks")
        made.configure(self._configuration)
        if self._lifecycle is None:
            made.resize("slots", 1)
            made.resize("totals", 1)
        else:
            made.share(self._lifecycle.maps["slots"])
            made.share(self._lifecycle.maps["totals"])
        made.resize("python_records", 2 * 1024 * 1024 // divisor)
        made.resize("codes", max(32768 // divisor, self._least))
        made.resize("stacks", max(MAX_STACKS, self._least))
        made.resize("threads", max(16384 // divisor, self._least))
        made.resize("spaces", max(8192 // divisor, self._least))
        return made

    def load_waits(self) -> None:
        """Load what visit() needs; raises BpfError where this kernel cannot do it."""
        waits = libbpf.Object("python_waits")
        try:
            waits.configure(self._configuration)
            waits.resize("seen_threads", max(16384, self._least))
            self.share(waits, but="free_rows")
            waits.load()
            self._visit_rows = waits.maps["visit_rows"].mapped(_PUT_UP * _U64.size)
            waits.programs["on_visit"].attach()
        except BaseException:
            waits.close()
            raise
        self._waits = waits
        self._put_rows_up()

    def share(self, other: libbpf.Object, but: str = "") -> None:
        """Have `other`, which is not loaded yet, use these maps, `but` for one."""
        for name, shared in self._object.maps.items():
            if name not in ("walks", but) and not name.endswith(".rodata"):
                other.share(shared)

    def visit(self, stands_for_ns: int) -> None:
        """Read the stacks of all threads that wait; each visit stands for so much of their time."""
        if self._waits is not None:
            self._control.visit_ns = stands_for_ns
            self._waits.programs["on_visit"].iterate()

    @property
    def programs(self) -> dict[str, libbpf.Program]:
        """By name."""
        return {**self._object.programs, **(self._waits.programs if self._waits else {})}

    @property
    def missing(self) -> dict[int, str]:
        """CPUs that are not sampled, and why."""
        return self._events.missing

    @property
    def level(self) -> int:
        """How many process id namespaces lie between the host's and this process's own."""
        return int(self._control.level)

    def follow_cpus(self) -> None:
        """Sample CPUs that came. A perf event dies with its CPU, and stays dead when that comes back."""
        if not self._rate_hz:
            return
        dead = set()
        for (_, cpu), fd in self._events.descriptors.items():
            with suppress(OSError):
                enabled = perf.read_counter(fd).enabled_ns
                if enabled == self._enabled.get(cpu):
                    dead.add(cpu)
                self._enabled[cpu] = enabled
        for cpu in self._events.update(cpus.online(), dead):
            self._enabled.pop(cpu, None)
            fcntl.ioctl(
                self._events.descriptors["cpu-clock", cpu], _SET_BPF, self._object.programs["on_sample"].fd
            )

    # ---- who is looked at

    def select(self, default: bool, exceptions: dict[int, bool]) -> None:
        """Look at the jobs of all slots, or of none, but for the exceptions."""
        self._control.all = default
        for slot in range(MAX_SLOTS):
            wanted = exceptions.get(slot)
            value = 0 if wanted is None else 1 if wanted else 2
            at = slot * _SLOT_SIZE + _SELECTED_OFFSET
            if _U32.unpack_from(self._slots, at)[0] != value:
                _U32.pack_into(self._slots, at, value)

    def want(self, pid: int) -> None:
        """Look at this process, as /proc here has it, and at what it forks."""
        self._object.maps["wanted"].update(_U32.pack(pid), _U32.pack(1))

    # ---- what is known of them

    def is_in(self, host_pid: int, space: int) -> bool:
        """Whether the process still is in that address space, and has not executed another program."""
        known = self._object.maps["processes"].lookup(_U32.pack(host_pid), _PROCESS.size)
        return known is not None and _PROCESS.unpack(known)[0] == space

    def install(self, layout: Layout) -> int:
        """A number by which answer() refers to `layout`, 0 for the first, 1 for the next.

        Raises UnavailableError when there are too many.
        """
        if self._layouts >= _MAX_LAYOUTS:
            raise UnavailableError(f"more than {_MAX_LAYOUTS} kinds of interpreter")
        self._object.maps["layouts"].update(_U32.pack(self._layouts), bytes(installed(layout)))
        self._layouts += 1
        return self._layouts - 1

    def know(self, pid: int, outcome: str, runtime: int = 0, layout: int = 0) -> None:
        """As answer(), of a process that has not been met.

        Only where `level` is 0: else the kernel side knows `pid` by another number.
        """
        # Like those that the kernel side makes, with a CPU that there is not.
        space = time.monotonic_ns() << 10 | 1023
        row = _SPACE.pack(
            runtime, OUTCOMES.index(outcome), layout, time.monotonic_ns() + _ASKED_AGAIN_NS, 0, 0
        )
        self._object.maps["spaces"].update(_PROCESS.pack(space), row)
        self._object.maps["processes"].update(_U32.pack(pid), _PROCESS.pack(space))

    def answer(self, space: int, outcome: str, runtime: int = 0, layout: int = 0) -> None:
        """Processes in `space` can be walked ("resolved"), or every sample of them is `outcome`."""
        key = _PROCESS.pack(space)
        known = self._object.maps["spaces"].lookup(key, _SPACE.size)
        if known is not None:
            _, _, _, again_ns, tries, _ = _SPACE.unpack(known)
            state = OUTCOMES.index(outcome)
            row = _SPACE.pack(runtime, state, layout, again_ns, tries, 0)
            self._object.maps["spaces"].update(key, row)

    # ---- what was seen

    def consume(self) -> int:
        """Handle all records there are; returns their number."""
        return self._ring.consume()

    def outcomes(self, slot: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Samples on a CPU, and visits to waiting threads, by outcome (see OUTCOMES), since the beginning."""
        row = _OUTCOMES.unpack_from(self._slots, slot * _SLOT_SIZE)
        return row[: len(OUTCOMES)], row[len(OUTCOMES) :]

    def counted(self) -> Iterator[tuple[int, int, int]]:
        """(row, samples, ns) by which each stack has grown since the last time."""
        for start in range(0, len(self._seen), _COMPARED):
            block = self._counts[start : start + _COMPARED]
            if block == self._seen[start : start + _COMPARED]:
                continue
            for at in range(0, _COMPARED, _COUNT.size):
                samples, ns = _COUNT.unpack_from(block, at)
                had, had_ns = _COUNT.unpack_from(self._seen, start + at)
                if samples != had or ns != had_ns:
                    yield (start + at) // _COUNT.size, samples - had, ns - had_ns
            self._seen[start : start + _COMPARED] = block

    def recycle(self) -> list[int]:
        """Lay free rows ready; to be called once a drain, after counted(). The rows that have been cleared.

        Rows are cleared at a later drain than that at which the kernel side was told to use others: by
        then no program can be at one of them any more, and all that was counted there has been read.
        """
        if self._ending and time.monotonic() - self._renewed_at < _GRACE_S:
            return []
        cleared, self._ending = self._ending, []
        for row in cleared:
            _COUNT.pack_into(self._counts, row * _COUNT.size, 0, 0)
            _COUNT.pack_into(self._seen, row * _COUNT.size, 0, 0)
        self._free.extend(cleared)
        if not cleared and len(self._used) > MAX_STACKS // 2:
            self.renew()
        self._put_rows_up()
        return cleared

    def renew(self) -> None:
        """Have every stack described and counted anew, in another row, from now on."""
        self._control.stack_epoch += 1
        self._renewed_at = time.monotonic()
        self._ending, self._used = self._ending + self._used, []

    def _put_rows_up(self) -> None:
        while self._put_up < _PUT_UP and self._free:
            self._object.maps["free_rows"].update(None, _U32.pack(self._free.popleft()))
            self._put_up += 1
        if self._waits is not None:
            while self._control.visit_rows_up - self._control.visit_rows_taken < _PUT_UP and self._free:
                at = self._control.visit_rows_up % _PUT_UP
                _U64.pack_into(self._visit_rows, at * _U64.size, self._free.popleft())
                self._control.visit_rows_up += 1

    def forget_codes(self) -> None:
        """Have all code objects described anew, and all stacks with them."""
        self._control.code_epoch += 1
        self.renew()

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self._events.close()
        if self._waits is not None:
            self._waits.close()
        if hasattr(self, "_ring"):
            self._ring.close()
        self._object.close()


def installed(layout: Layout) -> _InstalledLayout:
    """`layout` and the sizes of what must be read; raises UnavailableError where they are too large."""

    def end(names: tuple[str, ...], size: int = 8) -> int:
        return max(int(at) for name in names if (at := getattr(layout, name)) != NOWHERE) + size

    frame = end(("frame_previous", "frame_code", "frame_instruction", "frame_bytecode"))
    if layout.frame_owner != NOWHERE:
        frame = max(frame, layout.frame_owner + 1)
    code_from = min(getattr(layout, name) for name in _OF_CODE) & ~7
    # From 3.12 to 3.15 co_version, new for each code object that is made, comes six ints after
    # co_firstlineno (Include/cpython/code.h).
    version = layout.code_first_line + 24 if layout.minor >= 12 else NOWHERE
    code_bytes = end(_OF_CODE) - code_from
    made = _InstalledLayout(layout, end(_OF_THREAD), frame, code_from, code_bytes, version)
    if made.thread_bytes > _THREAD_BLOCK or made.frame_bytes > _BLOCK or made.code_bytes > _BLOCK:
        raise UnavailableError("its structures are larger than any that is known")
    return made


_OF_THREAD = (
    "thread_next",
    "thread_interpreter",
    "thread_id",
    "thread_native_id",
    "thread_status",
    "thread_frame",
)
_OF_CODE = ("code_first_line", "code_file", "code_name", "code_lines")
