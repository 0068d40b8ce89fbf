"""What cumulative figures have grown by, report after report, and what is not believed of it.

Rates are of time between reports as the agent's monotonic clock has it, never of wall clocks. A counter
that goes backwards within a run of a job is taken for a bad sample once, and for a new beginning when
the next report confirms it.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

Values = dict[str, Any]

CPU_SLACK = 1.05  # a CPU rate above CPUs times this is a bad sample
_BACKWARDS = "the counter went backwards; this sample is not used"
_TOO_MUCH = "more than this node's CPUs can do in the time; this sample is not used"


class Series:
    """The cumulative figures of one job, or of the node: their last good values and when those were."""

    __slots__ = ("dropped", "good", "seen")

    def __init__(self) -> None:
        self.good: dict[str, tuple[int, float]] = {}
        self.dropped: dict[str, tuple[int, float]] = {}
        self.seen = 0


class Deltas:
    """What has been added to one series since its last good values."""

    def __init__(self, series: Series, clock: float, since: float | None, cpus: int) -> None:
        self._series = series
        self._clock = clock
        self._since = since  # count what is new from 0 at this time; None: do not
        self._cpus = cpus
        self.reasons: dict[str, str] = {}
        self.bad = 0

    def delta(self, name: str, value: int | None) -> tuple[int, float] | None:
        """(how much more, in how many seconds), or None when that is not known."""
        if value is None:
            return None
        series = self._series
        base = series.good.get(name)
        if base is None:
            series.good[name] = (value, self._clock)
            if self._since is None or self._clock <= self._since:
                return None
            return value, self._clock - self._since
        if value < base[0]:
            dropped = series.dropped.pop(name, None)
            if dropped is None or value < dropped[0]:
                series.dropped[name] = (value, self._clock)
                self.bad += 1
                self.reasons[name] = _BACKWARDS
                return None
            # Lower for the second time: it did begin anew.
            base = dropped
        series.dropped.pop(name, None)
        series.good[name] = (value, self._clock)
        seconds = self._clock - base[1]
        return (value - base[0], seconds) if seconds > 0 else None

    def rate(self, name: str, value: int | None, scale: float = 1.0) -> float | None:
        """Added per second, times `scale`."""
        delta = self.delta(name, value)
        return None if delta is None else delta[0] * scale / delta[1]

    def cores(self, name: str, value: int | None) -> float | None:
        """CPU nanoseconds as cores in use; None when no machine of this size could have done that."""
        cores = self.rate(name, value, 1e-9)
        if cores is not None and self._cpus and cores > self._cpus * CPU_SLACK:
            self.bad += 1
            self.reasons[name] = _TOO_MUCH
            return None
        return cores


def optional(message: Any, field: str) -> Any:
    """A field's value, None when the message has it not."""
    return getattr(message, field) if message.HasField(field) else None


def finite(value: float | None) -> float | None:
    """`value`, None when it is no number."""
    return value if value is not None and math.isfinite(value) else None


def ratio(part: tuple[int, float] | None, whole: tuple[int, float] | None) -> float | None:
    """part / whole of two deltas over the same time."""
    if part is None or whole is None or not whole[0] or part[1] != whole[1]:
        return None
    return part[0] / whole[0]


def iso_time(time_ns: int) -> str | None:
    """Nanoseconds of the Unix epoch as "2026-03-01T12:00:00.000Z"; None past what a date can be."""
    try:
        time = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")
