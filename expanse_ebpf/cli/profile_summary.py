"""What `expanse-ebpf profile` says: while it samples, and in the end."""

from __future__ import annotations

import time
from typing import Any, NamedTuple, TextIO

from expanse_ebpf.export import pprof
from expanse_ebpf.sources.stack_counts import in_words
from expanse_ebpf.top import text
from expanse_ebpf.wire.profile_pb2 import Profile

SHOWN_LINES = 5
_REDRAW_S = 0.5


class HotLine(NamedTuple):
    """A line of code and its share of a time, 0 to 1."""

    function: str
    file: str
    line: int  # 0: not known
    share: float


class Summary(NamedTuple):
    """A profile in a few figures."""

    title: str
    note: str
    unavailable: dict[str, str]
    seconds: float
    rate_hz: float
    samples: int  # on CPUs and of waiting threads
    unresolved: dict[str, int]  # of them, by reason
    cpu_ns: int
    waiting_ns: int
    running: list[HotLine]
    waiting: list[HotLine]

    @classmethod
    def of(
        cls, profile: Profile, title: str, note: str = "", unavailable: dict[str, str] | None = None
    ) -> Summary:
        """The summary of a profile, which may be without any sample. Raises ProfileError."""
        samples = cpu_ns = waiting_ns = 0
        unresolved: dict[str, int] = {}
        lines: tuple[dict[tuple[str, str, int], int], ...] = ({}, {})
        for frames, (number, cpu, waiting), labels in pprof.Reader(profile).stacks():
            samples += number
            cpu_ns += cpu
            waiting_ns += waiting
            reason = str(labels.get(pprof.UNRESOLVED, ""))
            if reason:
                unresolved[reason] = unresolved.get(reason, 0) + number
            elif frames:
                leaf = frames[0]
                for found, value in zip(lines, (cpu, waiting), strict=True):
                    if value:
                        place = (leaf.name, leaf.file, leaf.line)
                        found[place] = found.get(place, 0) + value
        return cls(
            title=title,
            note=note,
            unavailable=dict(unavailable or {}),
            seconds=profile.duration_nanos / 1e9,
            rate_hz=round(1e9 / profile.period, 2) if profile.period else 0.0,
            samples=samples,
            unresolved=unresolved,
            cpu_ns=cpu_ns,
            waiting_ns=waiting_ns,
            running=_hottest(lines[0], cpu_ns),
            waiting=_hottest(lines[1], waiting_ns),
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
        """For people, at most `width` columns wide."""
        share = f", {text.percent(self.resolved / self.samples)} resolved" if self.samples else ""
        found = [f"{self.title}: {self.seconds:.1f} s at {self.rate_hz:g} Hz, {self.samples} samples{share}"]
        if self.note:
            found.append(self.note)
        if self.unresolved:
            counts = sorted(self.unresolved.items(), key=lambda item: (-item[1], item[0]))
            found.append("not resolved: " + ", ".join(f"{n} {in_words(reason)}" for reason, n in counts))
        for part, why in sorted(self.unavailable.items()):
            found.append(f"{part}: {why}")
        for title, total, hot in (
            ("on a CPU", self.cpu_ns, self.running),
            ("waiting", self.waiting_ns, self.waiting),
        ):
            if hot:
                found.append(f"{title}, {total / 1e9:.1f} s:")
                found += [
                    f"  {text.percent(h.share):>6}  {h.function}  {_place(h.file, h.line)}" for h in hot
                ]
        if not self.samples:
            found.append("it did nothing on a CPU, and no Python was seen waiting")
        return found if width is None else [text.fit(line, width).rstrip() for line in found]

    def as_json(self) -> dict[str, Any]:
        """For scripts; what is not known is null."""
        return {
            "target": self.title,
            "note": self.note or None,
            "seconds": round(self.seconds, 3),
            "rate_hz": self.rate_hz or None,
            "samples": self.samples,
            "resolved": self.resolved,
            "unresolved": self.unresolved,
            "cpu_seconds": self.cpu_ns / 1e9,
            "waiting_seconds": self.waiting_ns / 1e9,
            "running": [_as_json(line) for line in self.running],
            "waiting": [_as_json(line) for line in self.waiting],
            "unavailable": self.unavailable,
        }


def _hottest(lines: dict[tuple[str, str, int], int], total: int) -> list[HotLine]:
    order = sorted(lines.items(), key=lambda item: (-item[1], item[0]))
    return [HotLine(*place, value / total) for place, value in order[:SHOWN_LINES]]


def _as_json(line: HotLine) -> dict[str, Any]:
    return {**line._asdict(), "line": line.line or None, "share": round(line.share, 4)}


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
