"""From pairs of run times to how much longer the job took, and how sure that is.

A pair is one run beside nothing and one beside an arm, back to back. Its figure is the logarithm of the ratio
of the two times, so that "10 % longer" and "10 % shorter" weigh the same and drifts of the machine, which
both runs share, cancel. docs/benchmark-statistics.md explains the choice, and how looking again and again is
paid for.
"""

from __future__ import annotations

import functools
import math
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass

# An interval made at this level holds the truth in 95 % of benches that end by `enough`, however large the
# noise if it is normal; 0.05 would do for a number of pairs set beforehand. Found by simulation, for 5 pairs
# or more and up to 5 centres: `python -m bench.coverage`; docs/benchmark-statistics.md has the derivation.
STUDENT_LEVEL = 0.04
# Resampling takes few pairs for all there is, so it needs more room where single pairs lie far out.
BOOTSTRAP_LEVEL = 0.03
# (RESAMPLES + 1) * BOOTSTRAP_LEVEL / 2 is a whole number: the bounds are resamples, not between two.
RESAMPLES = 1999

_TOO_FEW = "an interval needs two pairs or more"
_LARGEST_LOG = 700.0  # its exponential is still a float


@dataclass(frozen=True, slots=True)
class Interval:
    """Percent by which the job took longer; negative: shorter."""

    low: float
    high: float

    def __contains__(self, percent: float) -> bool:
        return self.low <= percent <= self.high


@dataclass(frozen=True, slots=True)
class Comparison:
    """One arm against nothing."""

    pairs: int
    percent: float  # from the mean of the log ratios
    interval: Interval  # of 95 %, by Student's t, the repeated looking paid for
    bootstrap: Interval | None  # the same by resampling (studentised); None: pairs too few, or too alike
    spread_percent: float  # standard deviation of the pairs' log ratios, as a ratio

    @property
    def measurable(self) -> bool:
        """Whether the interval leaves 0 out."""
        return 0 not in self.interval

    def sentence(self) -> str:
        """The outcome in words; "no measurable difference" and the figures where 0 is in the interval."""
        least, most = sorted((abs(self.interval.low), abs(self.interval.high)))
        if not self.measurable:
            places = _places(most, 2)
            figures = (self.percent, self.interval.low, self.interval.high)
            percent, low, high = (_signed(figure, places) for figure in figures)
            return f"no measurable difference: {percent} % ({low} to {high}), {self.pairs} pairs"
        places = _places(least, 1)
        percent, low, high = (f"{abs(figure):.{places}f}" for figure in (self.percent, least, most))
        return (
            f"{percent} % {'slower' if self.percent > 0 else 'faster'} ({low} to {high}), {self.pairs} pairs"
        )


@dataclass(frozen=True, slots=True)
class Shift:
    """A difference of two quantities in their own unit (memory added to the job, say)."""

    pairs: int
    mean: float
    low: float
    high: float


def compare(pairs: Sequence[tuple[float, float]], *, seed: int = 0) -> Comparison:
    """Compare the times (off, beside the arm), in seconds, in any order; `seed` is that of the resampling.

    Raises ValueError for fewer than two pairs, and for a time that is no finite number above 0.
    """
    logs = _log_ratios(pairs)
    resampled = bootstrap(logs, BOOTSTRAP_LEVEL, seed=seed)
    return Comparison(
        pairs=len(logs),
        percent=_percent(_mean(logs)),
        interval=Interval(*map(_percent, student(logs, STUDENT_LEVEL))),
        bootstrap=Interval(*map(_percent, resampled)) if resampled else None,
        spread_percent=_percent(_deviation(logs)),
    )


def shift(pairs: Sequence[tuple[float, float]]) -> Shift:
    """The mean of what came on top, from pairs (without, with), with its interval of 95 % by Student's t.

    Raises ValueError for fewer than two pairs, and for a quantity that is no finite number.
    """
    if not all(math.isfinite(value) for pair in pairs for value in pair):
        raise ValueError("a quantity must be a finite number")
    differences = [after - before for before, after in pairs]
    low, high = student(differences, STUDENT_LEVEL)
    return Shift(len(differences), _mean(differences), low, high)


def enough(
    pairs: Sequence[tuple[float, float]], *, min_pairs: int, centres: int, within_points: float
) -> bool:
    """Whether the last `centres` estimates, each with one pair more, lie within `within_points` (percent).

    The pairs are in the order in which they were run. Never before there are `min_pairs`, nor before the
    first of those rests on two pairs. Raises ValueError for a time that is no finite number above 0.
    """
    logs = _log_ratios(pairs)
    if len(logs) < max(min_pairs, centres + 1):
        return False
    estimates = [_percent(_mean(logs[: len(logs) - fewer])) for fewer in range(centres)]
    return max(estimates) - min(estimates) <= within_points


def student(values: Sequence[float], level: float) -> tuple[float, float]:
    """Interval for the mean of what `values` are drawn from, by Student's t.

    It misses in a share `level` of cases if the noise is normal and the number of values was set beforehand.
    Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(_TOO_FEW)
    mean = _mean(values)
    half = t_quantile(1 - level / 2, len(values) - 1) * _deviation(values) / math.sqrt(len(values))
    return mean - half, mean + half


def bootstrap(
    values: Sequence[float], level: float, *, seed: int, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """The same by resampling, which takes no form of the noise for granted.

    None where so many resamples have no spread that there is no bound: with fewer than four or five values,
    or when nearly all are equal. Bootstrap-t: each resample's mean is judged by its own standard error (Efron
    and Tibshirani, An Introduction to the Bootstrap, section 12.5), since percentiles of the means alone come
    out too narrow for few values. Raises ValueError for fewer than two values.
    """
    if len(values) < 2:
        raise ValueError(_TOO_FEW)
    n, mean, deviation = len(values), _mean(values), _deviation(values)
    if min(values) == max(values):
        return mean, mean
    drawn = random.Random(seed)
    # Sorted, so that the same values in another order give the same resamples.
    residuals = sorted((value - mean) / deviation for value in values)
    studentised = []
    for _ in range(resamples):
        resample = drawn.choices(residuals, k=n)
        total, squares = math.fsum(resample), math.fsum(map(operator.mul, resample, resample))
        variance = (squares - total * total / n) / (n - 1)
        if variance > 1e-12 * squares:
            studentised.append(total / math.sqrt(n * variance))
        else:
            studentised.append(math.copysign(math.inf, total))
    studentised.sort()
    beyond = max(1, round((resamples + 1) * level / 2))
    least, most = studentised[beyond - 1], studentised[-beyond]
    if math.isinf(least) or math.isinf(most):
        return None
    error = deviation / math.sqrt(n)
    return mean - most * error, mean - least * error


@functools.lru_cache(maxsize=1024)
def t_quantile(probability: float, degrees: int) -> float:
    """What Student's t with so many degrees of freedom stays below with `probability` (above 0.5)."""
    beyond = 1 - probability
    low, high = 0.0, 1.0
    while _t_tail(high, degrees) > beyond:
        low, high = high, 2 * high
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if _t_tail(middle, degrees) > beyond else (low, middle)
    return high


def _t_tail(t: float, degrees: int) -> float:
    """The probability that Student's t exceeds `t` >= 0 (Abramowitz and Stegun, 26.7.1)."""
    return _incomplete_beta(degrees / 2, 0.5, degrees / (degrees + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by the continued fraction 8.17.22 of NIST's Digital
    Library of Mathematical Functions, which converges fast for x < (a + 1) / (a + b + 2)."""
    if x > (a + 1) / (a + b + 2):
        return 1 - _incomplete_beta(b, a, 1 - x)
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    # Lentz's method: the fraction as the product of the ratios of its successive convergents.
    fraction, c, d = 1.0, math.inf, 1.0
    for step in range(1, 1000):
        m, odd = divmod(step, 2)
        if odd:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + term * d)
        c = 1 + term / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return math.exp(log_front) * fraction / a


def _log_ratios(pairs: Sequence[tuple[float, float]]) -> list[float]:
    if not all(math.isfinite(seconds) and seconds > 0 for pair in pairs for seconds in pair):
        raise ValueError("a time must be a finite number above 0")
    return [math.log(beside) - math.log(off) for off, beside in pairs]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _deviation(values: Sequence[float]) -> float:
    mean = _mean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _percent(log: float) -> float:
    return 100 * math.expm1(min(log, _LARGEST_LOG))


def _places(figure: float, least: int) -> int:
    """Decimal places with which a figure does not read as 0 unless it is."""
    return next((n for n in range(least, 7) if round(figure, n)), least)


def _signed(figure: float, places: int) -> str:
    """With a sign always, a real minus; what rounds to 0 is not negative."""
    return f"{round(figure, places) + 0.0:+.{places}f}".replace("-", "\N{MINUS SIGN}")
