"""What `expanse-ebpf profile` says: while it samples, and in the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple, TextIO

from expanse_ebpf.export import pprof
from expanse_ebpf.export.origin import Origin, Origins
from expanse_ebpf.sources.stack_counts import in_words
from expanse_ebpf.top import text
from expanse_ebpf.wire.profile_pb2 import Profile

SHOWN_LINES = 5
_LEAST_TAIL = 20  # of what is said behind it
_LEAST_PLACE = 24  # columns of a path and its line number that are shown at least
_REDRAW_S = 0.5


class HotLine(NamedTuple):
    """A line of code and its share of a time, 0 to 1."""

    function: str
    file: str
    line: int  # 0: not known
    share: float
    inside: tuple[str, ...] = ()  # what it called to wait there, as a rule; outermost first
    standard: bool = False  # no code of a program's or of a library's was there


class Summary(NamedTuple):
    """A profile in a few figures."""

    title: str
    note: str
    unavailable: dict[str, str]
    seconds: float
    rate_hz: float
    samples: int  # on CPUs, and visits to waiting threads
    visits: int  # of them
    unresolved: dict[str, int]  # of them, by reason
    cpu_ns: int
    waiting_ns: int
    running: list[HotLine]
    waiting: list[HotLine]
    sampler: str = ""  # who has sampled it, in words

    @classmethod
    def of(
        cls,
        profile: Profile,
        title: str,
        note: str = "",
        unavailable: dict[str, str] | None = None,
        sampler: str = "",
    ) -> Summary:
        """The summary of a profile, which may be without any sample. Raises ProfileError."""
        samples = cpu_ns = waiting_ns = 0
        unresolved: dict[str, int] = {}
        running, waits = _Lines(), _Lines(Origins())
        for frames, (number, cpu, waiting), labels in pprof.Reader(profile).stacks():
            samples += number
            cpu_ns += cpu
            waiting_ns += waiting
            reason = str(labels.get(pprof.UNRESOLVED, ""))
            if reason:
                unresolved[reason] = unresolved.get(reason, 0) + number
            elif frames:
                running.add(frames, cpu)
                waits.add(frames, waiting)
        on_cpus = round(cpu_ns / profile.period) if profile.period else samples
        return cls(
            title=title,
            note=note,
            unavailable=dict(unavailable or {}),
            seconds=profile.duration_nanos / 1e9,
            rate_hz=round(1e9 / profile.period, 2) if profile.period else 0.0,
            samples=samples,
            visits=max(0, samples - on_cpus),
            unresolved=unresolved,
            cpu_ns=cpu_ns,
            waiting_ns=waiting_ns,
            running=running.hottest(cpu_ns),
            waiting=waits.hottest(waiting_ns),
            sampler=sampler,
        )

    @property
    def resolved(self) -> int:
        """Samples with a stack."""
        return self.samples - sum(self.unresolved.values())

    @property
    def reasons(self) -> list[str]:
        """Why samples have none, in words, the most frequent first."""
        order = sorted(self.unresolved, key=lambda reason: (-self.unresolved[reason], reason))
        return [in_words(reason) for reason in order]

    def lines(self, width: int | None = None) -> list[str]:
        """For people, at most `width` columns wide; a path that has no room loses its beginning."""
        share = f", {text.percent(self.resolved / self.samples)} resolved" if self.samples else ""
        found = [
            f"{self.title}: {self.seconds:.1f} s at {self.rate_hz:g} Hz, "
            f"{self.samples - self.visits} samples on CPUs, {self.visits} visits to waiting threads{share}"
        ]
        if self.sampler:
            found.append(self.sampler)
        if self.note:
            found.append(self.note)
        if self.unresolved:
            counts = sorted(self.unresolved.items(), key=lambda item: (-item[1], item[0]))
            found.append("not resolved: " + ", ".join(f"{n} {in_words(reason)}" for reason, n in counts))
        for part, why in sorted(self.unavailable.items()):
            found.append(f"{part}: {why}")
        on_cpu, waiting = (ns / 1e9 for ns in (self.cpu_ns, self.waiting_ns))
        if self.running:
            found.append(f"on a CPU, {on_cpu:.1f} s ({self._average(on_cpu, 2)} cores):")
            found += [_line(hot, width) for hot in self.running]
        if self.waiting:
            threads = f"{self._average(waiting, 1)} threads on average"
            found.append(f"waiting, {waiting:.1f} thread-seconds ({threads}):")
            found += [_line(hot, width) for hot in self.waiting]
        if not self.samples:
            found.append("it did nothing on a CPU, and no Python was seen waiting")
        return found if width is None else [text.fit(line, width).rstrip() for line in found]

    def _average(self, seconds: float, digits: int) -> str:
        return text.number(seconds / self.seconds if self.seconds else None, digits)

    def as_json(self) -> dict[str, Any]:
        """For scripts; what is not known is null."""
        return {
            "target": self.title,
            "note": self.note or None,
            "sampler": self.sampler or None,
            "seconds": round(self.seconds, 3),
            "rate_hz": self.rate_hz or None,
            "samples": self.samples,
            "visits": self.visits,
            "resolved": self.resolved,
            "unresolved": self.unresolved,
            "cpu_seconds": self.cpu_ns / 1e9,
            "waiting_seconds": self.waiting_ns / 1e9,
            "running": [_as_json(line) for line in self.running],
            "waiting": [_as_json(line) for line in self.waiting],
            "unavailable": self.unavailable,
        }


class _Lines:
    """How much of a time each line had: that of the leaf, or, with `origins`, what a wait is charged to."""

    def __init__(self, origins: Origins | None = None) -> None:
        self._origins = origins
        self._values: dict[tuple[str, str, int], int] = {}
        self._inside: dict[tuple[str, str, int], dict[tuple[str, ...], int]] = {}

    def add(self, frames: Sequence[pprof.Frame], value: int) -> None:
        if not value:
            return
        at = self._origins.charged(frames) if self._origins else 0
        place = frames[at].name, frames[at].file, frames[at].line
        self._values[place] = self._values.get(place, 0) + value
        inside = tuple(frame.name for frame in reversed(frames[:at]))
        ways = self._inside.setdefault(place, {})
        ways[inside] = ways.get(inside, 0) + value

    def hottest(self, total: int) -> list[HotLine]:
        order = sorted(self._values.items(), key=lambda item: (-item[1], item[0]))
        return [self._hot(place, value / total) for place, value in order[:SHOWN_LINES]]

    def _hot(self, place: tuple[str, str, int], share: float) -> HotLine:
        ways = self._inside[place]
        inside = min(ways, key=lambda way: (-ways[way], way))
        standard = self._origins is not None and self._origins.of(place[1]) is Origin.STANDARD
        return HotLine(*place, share, inside, standard)


def _as_json(line: HotLine) -> dict[str, Any]:
    return {**line._asdict(), "line": line.line or None, "share": round(line.share, 4)}


def _line(hot: HotLine, width: int | None) -> str:
    head, place = f"  {text.percent(hot.share):>6}  {hot.function}  ", _place(hot.file, hot.line)
    tail = ""
    if hot.inside:
        way = hot.inside if len(hot.inside) <= 3 else (hot.inside[0], "…", hot.inside[-1])
        tail = f"  in {' > '.join(way)}"
    elif hot.standard:
        tail = "  (standard library)"
    if width is None:
        return head + place + tail
    over = text.cell_width(head + place) + min(text.cell_width(tail), _LEAST_TAIL) - width
    if over > 0:  # the path's beginning goes first, then the function's
        place = _end(place, max(text.cell_width(place) - over, min(_LEAST_PLACE, text.cell_width(place))))
        if text.cell_width(head + place) > width:
            head = text.fit(head.rstrip(), max(12, width - text.cell_width(place) - 2)).rstrip() + "  "
    return head + place + tail


def _end(line: str, width: int) -> str:
    """The last `width` columns of a line, "…" standing for what is cut."""
    if text.cell_width(line) <= width:
        return line
    line = line[-4 * width :]  # a name can be long
    while line and text.cell_width(line) > width - 1:
        line = line[1:]
    return "…" + line


def _place(file: str, line: int) -> str:
    return f"{file}:{line}" if line else file


class Progress:
    """One line on a terminal, drawn over and over; on anything else nothing."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream if stream is not None and stream.isatty() else None
        self._samples = self._resolved = 0
        self._drawn = float("-inf")
        self._length = 0

    def __enter__(self) -> Progress:
        return self

    def add(self, profile: Profile) -> None:
        """Take in a part."""
        if self._stream is not None:
            summary = Summary.of(profile, "") if profile.sample else None
            if summary is not None:
                self._samples += summary.samples
                self._resolved += summary.resolved

    def show(self, seconds_left: float) -> None:
        """Draw it, unless that has just been done."""
        now = time.monotonic()
        if self._stream is None or now - self._drawn < _REDRAW_S:
            return
        self._drawn = now
        share = f", {text.percent(self._resolved / self._samples)} resolved" if self._samples else ""
        self._draw(f"{max(0.0, seconds_left):.0f} s left, {self._samples} samples{share}, Ctrl-C ends it")

    def _draw(self, line: str) -> None:
        if self._stream is not None:
            self._stream.write("\r" + line.ljust(self._length) + ("\r" if not line else ""))
            self._stream.flush()
            self._length = len(line)

    def __exit__(self, *_: object) -> None:
        if self._length:
            self._draw("")
