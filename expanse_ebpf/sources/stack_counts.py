"""Python stacks as they are counted: bounded, exact in sum, and turned into pprof profiles."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from expanse_ebpf.export import pprof
from expanse_ebpf.export.origin import Origin, Origins
from expanse_ebpf.wire.transport import MAX_PROFILE_BYTES, MAX_PROFILE_PLAIN_BYTES

if TYPE_CHECKING:
    from expanse_ebpf.python_stacks.sampler import Count, Frame, Stack
    from expanse_ebpf.wire.profile_pb2 import Profile

MOST_STACKS = 4000  # different ones, of one job and minute
MOST_BYTES = MAX_PROFILE_BYTES  # of a packed profile
MOST_PLAIN_BYTES = MAX_PROFILE_PLAIN_BYTES  # of the same unpacked
RECENT_S = 10.0  # "hottest" is said of so long

# The one frame of a sample that could not be resolved, by reason.
SYNTHETIC = {
    "starting": "[starting]",
    "not_python": "[not Python]",
    "unsupported": "[unsupported interpreter]",
    "opted_out": "[opted out]",
    "native_thread": "[native thread]",
    "no_frames": "[no Python frame]",
    "unreadable": "[unreadable]",
    "changed": "[changed while read]",
    "over_budget": "[over budget]",
    "lost": "[lost]",
}
_TRUNCATED = ("[truncated]", "", 0, 0)


def in_words(reason: str) -> str:
    """A reason for people: "not Python"."""
    return SYNTHETIC.get(reason, reason.replace("_", " ")).strip("[]")


Line = tuple[str, str, int]  # function, file, line or 0
Labels = Callable[[int], Mapping[str, str]]
_Frame = tuple[str, str, int, int]


class StackCounts:
    """Stacks and how much was seen of each.

    When there are more than `most` different ones, or their frames and names take more than a profile may,
    the rarest are folded into "[over budget]": a program which never stands in the same place twice, or
    has names without end, costs no more memory than others.
    """

    def __init__(self, most: int = MOST_STACKS) -> None:
        self.most = most
        self.folded = False  # whether any stack was
        self._values: dict[Stack, list[int]] = {}  # samples, CPU ns, waiting ns
        self._rest: dict[int, list[int]] = {}  # what was folded, by accounting slot
        self._bytes = 0  # of the profile, about
        self._frames: set[Frame] = set()  # whose names are among them

    def __len__(self) -> int:
        return len(self._values) + len(self._rest)

    def add(self, count: Count) -> None:
        """Add what was counted."""
        stack = count.stack
        values = self._values.get(stack)
        if values is None:
            if len(self._values) >= self.most or self._bytes > MOST_PLAIN_BYTES:
                self._fold(len(self._values) // 2)  # not one by one: that would sort at every new stack
            values = self._values[stack] = [0, 0, 0]
            self._bytes += self._bytes_of(stack)
        values[0] += count.samples
        values[2 if stack.waiting else 1] += count.ns

    def _bytes_of(self, stack: Stack) -> int:
        """What the stack adds to a profile, about."""
        size = 64 + 4 * len(stack.frames)
        for frame in stack.frames:
            if frame not in self._frames:
                self._frames.add(frame)
                size += 32 + len(frame.name) + len(frame.file)
        return size

    def _fold(self, keep: int) -> None:
        """Keep the `keep` stacks with the most samples and add up the others."""
        order = sorted(self._values.items(), key=lambda item: (item[1][0], item[1][1] + item[1][2]))
        for stack, values in order[: max(1, len(order) - keep)]:
            rest = self._rest.setdefault(stack.slot, [0, 0, 0])
            for i, value in enumerate(values):
                rest[i] += value
            del self._values[stack]
            self.folded = True
        self._frames.clear()
        self._bytes = sum(map(self._bytes_of, self._values))

    def profile(self, *, rate_hz: int, time_ns: int, duration_ns: int, labels: Labels) -> Profile:
        """As a profile that begins at `time_ns`; `labels` gives those of a slot's stacks."""
        builder = pprof.ProfileBuilder(
            period_ns=round(1e9 / rate_hz), time_ns=time_ns, duration_ns=duration_ns
        )
        for stack, (samples, cpu, waiting) in self._values.items():
            builder.add(_frames(stack), (samples, cpu, waiting), {**labels(stack.slot), **_labels(stack)})
        for slot, (samples, cpu, waiting) in self._rest.items():
            own: dict[str, str | int] = {**labels(slot), pprof.UNRESOLVED: "over_budget"}
            builder.add([(SYNTHETIC["over_budget"], "", 0, 0)], (samples, cpu, waiting), own)
        return builder.build()

    def packed(
        self,
        *,
        rate_hz: int,
        time_ns: int,
        duration_ns: int,
        labels: Labels,
        most_bytes: int = MOST_BYTES,
    ) -> bytes:
        """The same, packed; the rarest stacks are folded until it has no more than `most_bytes`."""
        while True:
            profile = self.profile(rate_hz=rate_hz, time_ns=time_ns, duration_ns=duration_ns, labels=labels)
            data = pprof.dumps(profile)
            over = max(len(data) / most_bytes, profile.ByteSize() / MOST_PLAIN_BYTES)
            if over <= 1 or not self._values:
                return data
            # Stacks are not equally large, hence somewhat fewer than would do on the average.
            self._fold(int(len(self._values) * 0.75 / over))


def _frames(stack: Stack) -> list[_Frame]:
    if stack.unresolved:
        return [(SYNTHETIC.get(stack.unresolved, f"[{stack.unresolved}]"), "", 0, 0)]
    frames: list[_Frame] = [(f.name, f.file, f.line or 0, f.first_line) for f in stack.frames]
    if stack.truncated:
        frames.append(_TRUNCATED)
    return frames


def _labels(stack: Stack) -> dict[str, str | int]:
    labels: dict[str, str | int] = {
        "pid": stack.pid,
        "gil": stack.gil,
        "python": stack.python,
        pprof.UNRESOLVED: stack.unresolved,
    }
    if stack.truncated and not stack.unresolved:
        labels["truncated"] = 1
    return labels


class RecentLines:
    """Which line had most of the last ten seconds, on a CPU or waiting.

    On a CPU it is the line of the leaf frame. A wait is charged as Origins does it, and a line of the
    program's own comes before those of threads that idle in a library. What could not be resolved counts
    in the whole and is never chosen.
    """

    def __init__(self, seconds: float = RECENT_S, waits: bool = False) -> None:
        self._seconds = seconds
        self._origins = Origins() if waits else None
        self._sums: dict[Line | None, int] = {}  # nanoseconds; None: not resolved
        self._ticks: deque[tuple[float, dict[Line | None, int]]] = deque()

    def add(self, now: float, counts: Iterable[Count]) -> None:
        """Take in what was counted up to monotonic time `now` (seconds) and forget what is too old."""
        tick: dict[Line | None, int] = {}
        for stack, _, ns in counts:
            line = self._line(stack)
            tick[line] = tick.get(line, 0) + ns
        self._ticks.append((now, tick))
        for line, ns in tick.items():
            self._sums[line] = self._sums.get(line, 0) + ns
        while self._ticks[0][0] <= now - self._seconds:
            for line, ns in self._ticks.popleft()[1].items():
                self._sums[line] -= ns
                if not self._sums[line]:
                    del self._sums[line]

    def _line(self, stack: Stack) -> Line | None:
        if stack.unresolved or not stack.frames:
            return None
        frame = stack.frames[self._origins.charged(stack.frames) if self._origins else 0]
        return frame.name, frame.file, frame.line or 0

    def _order(self, line: Line) -> tuple[Origin, int, Line]:
        origin = self._origins.of(line[1]) if self._origins else Origin.PROGRAM
        return origin, -self._sums[line], line

    def hottest(self) -> tuple[Line, float] | None:
        """The line and its share, 0 to 1; None when no line is known."""
        best = min((line for line in self._sums if line is not None), key=self._order, default=None)
        total = sum(self._sums.values())
        return None if best is None or not total else (best, self._sums[best] / total)
