"""How long a window may be: pure arithmetic on what a job has been traced so far.

At the end of a window all of a job's windows together are to be no more than a share of its run. A window
of s seconds that begins at age a, after others of t seconds, keeps to the share f where t + s <= f (a + s).
"""

from __future__ import annotations

import math
from typing import NamedTuple

LEAST_S = 0.5  # a window that would be shorter than that, for want of budget, is not opened


class Verdict(NamedTuple):
    """What comes of a wish."""

    seconds: float  # how long the window is to be; 0: none
    reason: str  # why there is none, or why it is shorter than was wished; empty: neither


def longest(age_s: float, traced_s: float, share: float) -> float:
    """How long a window that begins at age `age_s` may be; infinite where all of the run may be traced."""
    if share >= 1:
        return math.inf
    return max(0.0, (share * age_s - traced_s) / (1 - share))


def age_for(seconds: float, traced_s: float, share: float) -> float:
    """The age from which on a window may be so long."""
    return (traced_s + seconds * (1 - share)) / share


def judge(
    wished_s: float, most_s: float, age_s: float, traced_s: float, share: float, *, may_lift: bool
) -> Verdict:
    """How long a window of `wished_s` may be that begins at age `age_s`.

    `most_s` is the limit of any window; `may_lift`: who asked may also ask for a larger share.
    """
    seconds, reason, limit = min(wished_s, most_s), "", ""
    if seconds < wished_s:
        reason = f"shortened to {seconds:g} s, the most that tracing.max_window_s allows"
        limit = f"; {seconds:g} s is the most in any case (tracing.max_window_s)"
    room = longest(age_s, traced_s, share)
    lift = "; --share 100% lifts that" if may_lift else " (tracing.run_share of the node)"
    rule = f"at most {100 * share:.3g} % of the run may be traced"
    least = min(seconds, LEAST_S)
    if room < least:
        wait = wait_of(age_for(least, traced_s, share) - age_s)
        return Verdict(0.0, f"{rule}; possible in {wait}{lift}{limit}")
    if room < seconds:
        seconds, reason = room, f"shortened to {room:.1f} s: {rule}{lift}{limit}"
    return Verdict(seconds, reason)


def wait_of(seconds: float) -> str:
    """A time to be waited in words, rounded up: "42 s", "7 min", "1 h 24 min"."""
    if seconds <= 120:
        return f"{max(1, math.ceil(seconds))} s"
    hours, minutes = divmod(math.ceil(seconds / 60), 60)
    return " ".join(([f"{hours} h"] if hours else []) + ([f"{minutes} min"] if minutes else []))


def positive(value: float, default: float, most: float) -> float:
    """`value` where it is a number above 0, else `default`; `most` at the most."""
    return min(value, most) if math.isfinite(value) and value > 0 else min(default, most)
