"""Busy time out of NVML's buffers of samples, each sample once: pure arithmetic.

A sample says what share of a period the GPU was busy, and when that period ended. NVML keeps the newest
hundred or so, not always in order, and gives those that are later than a stamp; what is told twice here
would be counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

# NVML samples from every 20 ms to every second, by product. After a longer gap, as when the buffer ran
# over, a sample says nothing about the time before its own period.
LONGEST_US = 1_500_000
# Stamps are of the wall clock. One that lies further ahead was made before that clock was set back.
_AHEAD_US = 1_000_000


def since(seen_us: int, now_us: int) -> int:
    """The stamp after which samples are new: `seen_us`, or now when the clock has been set back since."""
    return now_us if seen_us > now_us + _AHEAD_US else seen_us


class Taken(NamedTuple):
    """What new samples have added."""

    samples: int
    busy_ns: int
    measured_ns: int


class Busy:
    """The samples of one GPU, taken as they come. `seen_us`: stamp of the newest that was ever taken."""

    __slots__ = ("seen_us",)

    def __init__(self, seen_us: int = 0) -> None:
        self.seen_us = seen_us

    def take(self, samples: Iterable[tuple[int, int]], now_us: int) -> Taken:
        """Add (stamp in microseconds, percent) pairs, in any order; those known already count for nothing.

        The very first sample has no beginning, so it only sets one. One of more than 100 % covers no time.
        """
        count = busy = measured = 0
        for stamp, percent in sorted(samples):
            if not self.seen_us < stamp <= now_us + _AHEAD_US:
                continue
            count += 1
            if self.seen_us and 0 <= percent <= 100 and stamp - self.seen_us <= LONGEST_US:
                span = stamp - self.seen_us
                measured += span * 1000
                busy += span * 10 * percent
            self.seen_us = stamp
        return Taken(count, busy, measured)
