"""Python stacks of jobs or processes: who is looked at, and what the kernel side counts, with names.

The kernel side finds threads, walks frames and counts whole stacks. It asks here which interpreter a
process runs, and sends names, files and line tables the first time it comes across a code object.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import python_stacks as kernel
from expanse_ebpf.kernel.libbpf import BpfError
from expanse_ebpf.python_stacks import text
from expanse_ebpf.python_stacks.interpreter import Interpreter, Interpreters, Reason, Refusal
from expanse_ebpf.python_stacks.layouts import Layout, lines_format
from expanse_ebpf.python_stacks.lines import MAX_TABLE, Lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from expanse_ebpf.kernel.libbpf import Program

# Looking up processes may take the caller's loop so many seconds a turn, and one job so many in a
# while: what is left over is asked for again.
_LOOK_UP_S = 0.02
_LOOK_UP_S_PER_JOB, _LOOK_UP_WHILE_S = 0.25, 10.0
_MAX_REFUSALS = 256
_LONG_STARTING = 12  # tries: 10 s
_MAX_NEW_LAYOUTS = 8  # that processes of one job may bring in an hour
_MAX_PARTIAL = 256  # code objects of which only some parts have come
_MAX_CODES = 16384  # that are remembered; 0.6 KiB each, as a rule
_MAX_TABLES = 4 << 20  # bytes of their line tables, which may take eight times as much when decoded
_DECODED = 512 << 10  # bytes of line tables that are decoded in a drain; lines of others come later
_HUNG_S = 5.0  # a visit that takes longer waits for something that does not come
_MAX_CHILDREN = 1000
_MAX_TRIED = 8  # threads of a process, the first of which may have ended
_MAX_ENVIRONMENT = 64 << 20
_OPT_OUT = b"EXPANSE_PROFILE=off"
# Threads that wait without any Python in them are no news, and are not reported.
_TOLD_OF_VISITS = ("unreadable", "changed", "over_budget", "lost")


class Frame(NamedTuple):
    """One function of a stack."""

    name: str  # qualified; before 3.11 the plain name
    file: str
    line: int | None  # being executed; None: not known
    first_line: int


class Stack(NamedTuple):
    """Where a thread was."""

    slot: int  # of its job; 0 without a lifecycle
    pid: int  # as /proc here has it; 0: not known
    waiting: bool  # else on a CPU
    gil: str  # "held", "waiting", "released"; "": there is none, or it is not known
    python: str  # "3.11"; "3.14t" is free-threaded
    truncated: bool  # deeper than can be read: outer frames are missing
    frames: tuple[Frame, ...]  # innermost first
    unresolved: str  # why there are no frames: one of kernel.OUTCOMES; "" when there are


class Count(NamedTuple):
    """What a stack has grown by since the last drain."""

    stack: Stack
    samples: int  # on a CPU: samples; waiting: visits
    ns: int  # what they stand for


class _Code:
    """A code object."""

    __slots__ = ("_frames", "file", "first_line", "lines", "name", "undecoded")

    def __init__(self, name: str, file: str, first_line: int, lines: Lines, undecoded: int) -> None:
        self.name = name
        self.file = file
        self.first_line = first_line
        self.lines = lines
        self.undecoded = undecoded  # bytes of the line table, until a line is wanted
        self._frames: dict[int, Frame] = {}

    def frame(self, offset: int) -> Frame:
        """The frame that executes the instruction at `offset`."""
        known = self._frames.get(offset)
        if known is None:
            line = self.lines.line(offset)
            self.undecoded = 0
            known = self._frames[offset] = Frame(self.name, self.file, line, max(0, self.first_line))
        return known


class Sampler:
    """Samples the Python stacks of jobs (with `lifecycle`) or of processes that are named.

    Running threads by a clock on every CPU, waiting ones whenever visit() is called. Raises
    UnavailableError, or BpfError where the kernel refuses.
    """

    def __init__(self, *, rate_hz: int = 49, waits_hz: int = 4, lifecycle: kernel.Jobs | None = None) -> None:
        """`waits_hz` 0 leaves waiting threads out, `rate_hz` 0 those on CPUs."""
        self.period_ns = round(1e9 / rate_hz) if rate_hz else 0
        self.unavailable: dict[str, str] = {}  # parts that are missing, and why
        self.refusals: dict[int, Refusal] = {}  # by pid, the newest last
        self._lifecycle = lifecycle
        self._interpreters = Interpreters()
        self._asks: list[kernel.Ask] = []
        self._looked_up = defaultdict[int, float](float)  # seconds, by the slot of the job
        self._looked_up_since = 0.0
        self._decoded = 0  # bytes of line tables in this drain
        self._layouts: list[Layout] = []
        self._numbers: dict[bytes, int] = {}  # of the same
        self._brought = Counter[int]()  # new layouts, by the slot of the job that has brought them
        self._brought_since = 0.0
        self._parts: dict[int, dict[str, list[kernel.Part]]] = {}
        self._codes: dict[int, _Code] = {}
        self._tables = 0  # bytes
        self._old_codes: set[int] = set()  # to be forgotten with the next rows that are cleared
        self._records: dict[int, kernel.Stack] = {}
        self._stacks: dict[int, Stack] = {}
        self._outcomes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._visitor: threading.Thread | None = None
        self._visit_failed = ""
        self._visit_ns = round(1e9 / waits_hz) if waits_hz else 0
        self._kernel = kernel.PythonStacks(self._received, rate_hz, lifecycle)
        self.fd = self._kernel.fd  # readable: call consume()
        if waits_hz:
            try:
                self._kernel.load_waits()
            except BpfError as error:
                self.unavailable["waiting"] = f"waiting threads are not seen: {error}; needs Linux 5.18"
        self._last_visit = time.monotonic()

    @property
    def programs(self) -> Mapping[str, Program]:
        """The BPF programs, by name."""
        return self._kernel.programs

    @property
    def namespace_level(self) -> int:
        """How many process id namespaces lie between the host's and this process's own."""
        return self._kernel.level

    @property
    def stacks(self) -> kernel.PythonStacks:
        """The kernel side, for other programs that share its maps."""
        return self._kernel

    # ---- who is looked at

    def select_slots(self, default: bool, exceptions: Mapping[int, bool]) -> None:
        """Look at the jobs of all slots (`default`) or of none, but for the exceptions."""
        self._kernel.select(default, dict(exceptions))

    def select_pid(self, pid: int) -> None:
        """Look at a process, at what it has forked and at what it will fork."""
        for each in family(pid):
            self._kernel.want(each)

    def prepare(self, pid: int) -> None:
        """Look up a process before it is met, so that its first stacks are there already."""
        if self._kernel.level:
            return
        found = self._interpreters.find(pid)
        if isinstance(found, Refusal):
            outcome = _OUTCOMES.get(found.reason)
            if outcome is not None:
                self._kernel.know(pid, outcome)
        elif _opted_out(pid, pid):
            self._kernel.know(pid, "opted_out")
        else:
            with suppress(UnavailableError):  # told when it is met
                self._kernel.know(pid, "resolved", found.runtime, self._install(found.layout, 0))

    # ---- what the kernel side says

    def consume(self) -> None:
        """Answer the kernel side's questions; to be called when `fd` is readable."""
        self._kernel.consume()
        asks, self._asks = self._asks, []
        began = time.monotonic()
        if began - self._looked_up_since > _LOOK_UP_WHILE_S:
            self._looked_up_since = began
            self._looked_up.clear()
        end = began
        for ask in asks:
            if end - began > _LOOK_UP_S:
                break
            if self._looked_up[ask.slot] < _LOOK_UP_S_PER_JOB or self._lifecycle is None:
                start = end
                self._look_up(ask)
                end = time.monotonic()
                self._looked_up[ask.slot] += end - start

    def _received(self, record: kernel.Record) -> None:
        if isinstance(record, kernel.Stack):
            self._records[record.row] = record
        elif isinstance(record, kernel.Part):
            if record.code not in self._parts and len(self._parts) >= _MAX_PARTIAL:
                del self._parts[next(iter(self._parts))]
            self._parts.setdefault(record.code, {}).setdefault(record.kind, []).append(record)
        elif isinstance(record, kernel.Code):
            self._complete(record)
        else:
            self._asks.append(record)

    def _complete(self, record: kernel.Code) -> None:
        parts = self._parts.pop(record.code, {})
        if not {"name", "file"} <= parts.keys() or record.layout >= len(self._layouts):
            return
        layout = self._layouts[record.layout]
        name, file = (_decode(parts[kind][0], layout) for kind in ("name", "file"))
        table = b"".join(part.data for part in parts.get("lines", ()))
        if len(table) < record.lines_length:
            table = _whole_table(record, table)
        complete = len(table) == record.lines_length
        lines = Lines(table, lines_format(layout.minor), record.first_line, complete)
        self._tables += len(table)
        self._codes[record.code] = _Code(name, file, record.first_line, lines, len(table))

    def _look_up(self, ask: kernel.Ask) -> None:
        if not ask.pid:
            self._refuse(ask, Refusal(Reason.UNREADABLE, "its process id namespace is not seen from here"))
            return
        found = self._interpreters.find(ask.pid, ask.tid or None)
        if isinstance(found, Refusal):
            self._refuse(ask, found)
            return
        opted_out = _opted_out(ask.pid, ask.tid or ask.pid)
        # If it has executed another program meanwhile, what was found may be that one's.
        if not self._kernel.is_in(ask.host_pid, ask.space):
            return
        if opted_out:
            self._refuse(ask, Refusal(Reason.OPTED_OUT, "EXPANSE_PROFILE=off is in its environment"))
            return
        try:
            layout = self._install(found.layout, ask.slot)
        except UnavailableError as error:
            self._refuse(ask, Refusal(Reason.UNSUPPORTED, f"{_named(found)}: {error}"))
            return
        self._kernel.answer(ask.space, "resolved", found.runtime, layout)
        self.refusals.pop(ask.pid, None)

    def _install(self, layout: Layout, slot: int) -> int:
        """The layout's number. From 3.13 on it comes out of a file, and any job can make many."""
        number = self._numbers.get(bytes(layout))
        if number is not None:
            return number
        if time.monotonic() - self._brought_since > 3600:
            self._brought.clear()
            self._brought_since = time.monotonic()
        many = layout.minor >= 13 and self._lifecycle is not None
        if many and self._brought[slot] >= _MAX_NEW_LAYOUTS:
            raise UnavailableError("its job has brought too many kinds of interpreter")
        number = self._numbers[bytes(layout)] = self._kernel.install(layout)
        self._brought[slot] += many
        self._layouts.append(layout)
        return number

    def _refuse(self, ask: kernel.Ask, refusal: Refusal) -> None:
        self.refusals.pop(ask.pid, None)
        if refusal.reason is not Reason.STARTING:  # which is over soon, and then another may ask
            self.refusals[ask.pid] = refusal
        if len(self.refusals) > _MAX_REFUSALS:
            del self.refusals[next(iter(self.refusals))]
        outcome = _OUTCOMES.get(refusal.reason)
        if refusal.reason is Reason.STARTING and ask.tries >= _LONG_STARTING:
            outcome = "not_python"  # linked to libpython, and does not use it so far; it is looked at again
        if outcome is not None and self._kernel.is_in(ask.host_pid, ask.space):
            self._kernel.answer(ask.space, outcome)

    # ---- what was seen

    def visit(self) -> None:
        """Have the stacks of all threads that wait read. Each stands for the time since the last visit.

        In a thread of its own: reading a page of another process can take as long as whatever it comes from.
        """
        if not self._visit_ns or ("waiting" in self.unavailable and self._visitor is None):
            return
        now = time.monotonic()
        if self._visitor is not None and self._visitor.is_alive():
            if now - self._last_visit > _HUNG_S:
                self.unavailable["waiting"] = f"a visit has taken {now - self._last_visit:.0f} s so far"
            return
        if self._visitor is not None and self._visit_failed:
            self.unavailable["waiting"] = f"waiting threads are no longer seen: {self._visit_failed}"
            self._visitor = None
            return
        self.unavailable.pop("waiting", None)
        stands_for, self._last_visit = now - self._last_visit, now
        self._visitor = threading.Thread(target=self._visit, args=(stands_for,), daemon=True)
        self._visitor.start()

    def end_visit(self, seconds: float = _HUNG_S) -> None:
        """Wait until a visit that has begun is over, for so long at most."""
        if self._visitor is not None:
            self._visitor.join(seconds)

    def _visit(self, stands_for: float) -> None:
        try:
            self._kernel.visit(round(min(stands_for, _HUNG_S) * 1e9))
        except (BpfError, OSError) as error:
            self._visit_failed = str(error)

    def drain(self) -> list[Count]:
        """What has been counted since the last time; to be called about once a second."""
        # In this order: a stack is described before it is counted.
        grown = list(self._kernel.counted())
        self.consume()
        self._decoded = 0
        counts = []
        for row, samples, ns in grown:
            counts.append(Count(self._stack(row), samples, ns))
        counts += self._unresolved()
        self._tidy()
        self._kernel.follow_cpus()
        self.unavailable.pop("cpus", None)
        if self._kernel.missing:
            self.unavailable["cpus"] = f"not sampled: CPU {_listed(self._kernel.missing)}"
        return counts

    def stack(self, row: int) -> tuple[Stack, bool]:
        """The stack in that row, until the next drain(); and whether it has all lines that it ever will."""
        return self._stack(row), row in self._stacks

    def _stack(self, row: int) -> Stack:
        known = self._stacks.get(row)
        if known is not None:
            return known
        record = self._records.get(row)
        if record is None:
            return Stack(0, 0, False, "", "", False, (), "lost")
        stack, whole = self._named(record)
        if whole:
            self._stacks[row] = stack
            del self._records[row]
        return stack

    def _named(self, record: kernel.Stack) -> tuple[Stack, bool]:
        """The stack, and whether all its lines are there that can ever be."""
        frames = []
        whole = True
        for place in record.frames:
            code = self._codes.get(place >> kernel.OFFSET_BITS)
            if code is None:  # one of its parts did not come through
                return Stack(record.slot, record.pid, record.waiting, "", "", False, (), "lost"), True
            if code.undecoded and self._decoded + code.undecoded > _DECODED and self._decoded:
                frames.append(Frame(code.name, code.file, None, max(0, code.first_line)))
                whole = False
                continue
            self._decoded += code.undecoded
            frames.append(code.frame(place & ((1 << kernel.OFFSET_BITS) - 1)))
        layout = self._layouts[record.layout] if record.layout < len(self._layouts) else None
        python = _python(layout) if layout else ""
        stack = Stack(
            *(record.slot, record.pid, record.waiting, record.gil, python, record.truncated),
            tuple(frames),
            "",
        )
        return stack, whole

    def _unresolved(self) -> list[Count]:
        counts = []
        slots = self._lifecycle.given if self._lifecycle else (0,)
        none = (0,) * len(kernel.OUTCOMES)
        for slot in slots:
            now = self._kernel.outcomes(slot)
            before = self._outcomes.get(slot, (none, none))
            if now == before:
                continue
            self._outcomes[slot] = now
            for i, reason in enumerate(kernel.OUTCOMES[1:], 1):
                samples, visits = now[0][i] - before[0][i], now[1][i] - before[1][i]
                if samples:
                    stack = Stack(slot, 0, False, "", "", False, (), reason)
                    counts.append(Count(stack, samples, samples * self.period_ns))
                if visits and reason in _TOLD_OF_VISITS:
                    stack = Stack(slot, 0, True, "", "", False, (), reason)
                    counts.append(Count(stack, visits, visits * self._visit_ns))
        return counts

    def unresolved(self, slot: int) -> dict[str, int]:
        """Samples of the job in `slot` without a stack since the beginning, by why."""
        outcomes = self._kernel.outcomes(slot)[0]
        return {
            reason: count for reason, count in zip(kernel.OUTCOMES[1:], outcomes[1:], strict=True) if count
        }

    def samples(self, slot: int) -> int:
        """Samples taken of the job in `slot` since the beginning, resolved or not."""
        return sum(self._kernel.outcomes(slot)[0])

    def _tidy(self) -> None:
        """Forget stacks that are not counted any more, and all code objects once they are too many."""
        cleared = self._kernel.recycle()
        for row in cleared:
            self._records.pop(row, None)
            self._stacks.pop(row, None)
        if cleared:
            for code in self._old_codes:
                self._codes.pop(code, None)
            self._old_codes.clear()
        elif not self._old_codes and (len(self._codes) > _MAX_CODES or self._tables > _MAX_TABLES):
            self._old_codes = set(self._codes)
            self._tables = 0
            self._kernel.forget_codes()

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self.end_visit()
        self._kernel.close()


_OUTCOMES = {
    Reason.NOT_PYTHON: "not_python",
    Reason.UNSUPPORTED: "unsupported",
    Reason.UNREADABLE: "unreadable",
    Reason.NOT_PERMITTED: "unreadable",
    Reason.OPTED_OUT: "opted_out",
}


def family(pid: int, proc: str = "/proc") -> list[int]:
    """The process and its descendants, parents first."""
    found = [pid]
    for each in found:
        if len(found) > _MAX_CHILDREN:
            break
        with suppress(OSError):
            for thread in Path(f"{proc}/{each}/task").iterdir():
                with suppress(OSError):
                    found += [int(child) for child in (thread / "children").read_bytes().split()]
    return found


def _decode(part: kernel.Part, layout: Layout) -> str:
    kind = part.state >> layout.text_kind_shift & 7
    whole = len(part.data) >= part.length * kind
    return text.decode(part.data, part.length, kind, bool(part.state & layout.text_ascii), not whole)


def _whole_table(record: kernel.Code, beginning: bytes) -> bytes:
    """A line table that is longer than what the kernel side sends, if the process still has it."""
    size = min(record.lines_length, MAX_TABLE)
    # The memory of a process whose main thread has ended is there for the other threads.
    with suppress(OSError):
        for thread in [*Path(f"/proc/{record.pid}/task").iterdir()][:_MAX_TRIED]:
            with suppress(OSError), open(thread / "mem", "rb", buffering=0) as memory:
                table = os.pread(memory.fileno(), size, record.lines)
                return table if table.startswith(beginning) else beginning
    return beginning


def _opted_out(pid: int, tid: int) -> bool:
    """Also when that cannot be read: a process that has opted out must not be looked at."""
    try:
        with open(f"/proc/{pid}/task/{tid}/environ", "rb") as file:
            return _OPT_OUT in file.read(_MAX_ENVIRONMENT).split(b"\0")
    except OSError:
        return True


def _python(layout: Layout) -> str:
    return f"3.{layout.minor}{'t' if layout.free_threaded else ''}"


def _named(interpreter: Interpreter) -> str:
    return f"Python {interpreter.version}"


def _listed(missing: Mapping[int, str]) -> str:
    return f"{', '.join(map(str, sorted(missing)))}: {next(iter(missing.values()))}"
