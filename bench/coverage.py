"""How often the intervals of a bench hold the truth, when the bench itself decides when to stop.

    python -m bench.coverage                               # as the kit makes them
    python -m bench.coverage --student 0.05 --bootstrap 0.05    # as if the looking cost nothing

Prints the tables from which docs/benchmark-statistics.md is made, in some minutes. Benches are made up: pairs
whose true log ratio is 0, with noise of many sizes and forms, added until `statistics.enough` says so, or
until there are as many as allowed.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import random
import statistics as figures
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from expanse_ebpf.bench import statistics
from expanse_ebpf.bench.plan import Stopping

SIGMAS = (0.1, 1.0, 2.0, 4.0, 7.0, 10.0, 14.0, 20.0)
MAX_PAIRS = (12, 40)
RULE = Stopping()
RESAMPLES = 399  # enough for coverage, which is an average over benches; a reported bound takes more


def _log_normal(drawn: random.Random, shape: float) -> float:
    square = math.exp(shape * shape)
    return (drawn.lognormvariate(0, shape) - math.sqrt(square)) / math.sqrt((square - 1) * square)


def _student_4(drawn: random.Random) -> float:
    return drawn.gauss(0, 1) / math.sqrt(drawn.gammavariate(2, 0.5)) / math.sqrt(2)


def _both_log_normal(drawn: random.Random) -> float:
    return (_log_normal(drawn, 1) - _log_normal(drawn, 1)) / math.sqrt(2)


def _outliers(drawn: random.Random) -> float:
    return drawn.gauss(0, 5 if drawn.random() < 0.05 else 1) / math.sqrt(0.95 + 0.05 * 25)


# Each draws the log ratio of a pair: mean 0, standard deviation 1.
NOISES: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda drawn: drawn.gauss(0, 1),
    "Student t, 4 degrees": _student_4,
    "one in 20 five times as wide": _outliers,
    "both runs log-normal, shape 1": _both_log_normal,
    "one run log-normal, shape 0.5": lambda drawn: _log_normal(drawn, 0.5),
    "one run log-normal, shape 1": lambda drawn: _log_normal(drawn, 1),
}


@dataclass(frozen=True, slots=True)
class Case:
    """Benches alike."""

    noise: str = "normal"
    sigma_percent: float = 1.0  # standard deviation of a pair's log ratio
    stopping: Stopping = RULE
    student: float = statistics.STUDENT_LEVEL
    bootstrap: float = statistics.BOOTSTRAP_LEVEL
    resamples: int = RESAMPLES


@dataclass(frozen=True, slots=True)
class Share:
    """A mean over benches, and the standard error that comes from their number. Percent."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of many benches of a case."""

    pairs: float  # in the mean
    student: Share  # how often the interval held the truth
    bootstrap: Share | None  # None: none was asked for
    bias: Share  # of the estimate, in percent of its standard error; the truth is 0


def bench(case: Case, drawn: random.Random) -> list[float]:
    """The log ratios of one bench, until it stops."""
    rule, noise, sigma = case.stopping, NOISES[case.noise], case.sigma_percent / 100
    pairs: list[tuple[float, float]] = []
    while len(pairs) < rule.max_pairs:
        pairs.append((1.0, math.exp(sigma * noise(drawn))))
        if len(pairs) >= rule.min_pairs and statistics.enough(
            pairs, min_pairs=rule.min_pairs, centres=rule.centres, within_points=rule.within_points
        ):
            break
    return [math.log(beside) for _, beside in pairs]


def held(case: Case, logs: list[float], bounds: tuple[float, float] | None) -> float:
    """Whether an interval holds the truth, 0 or 1; under normal noise the probability of that.

    The probability takes far fewer benches to average. It is known because the mean of normal noise does not
    depend on the residuals, and they alone give the width and (but for a trace) decide when to stop.
    """
    if bounds is None:
        return 1.0
    low, high = bounds
    if case.noise != "normal":
        return float(low <= 0 <= high)
    mean, error = figures.fmean(logs), case.sigma_percent / 100 / math.sqrt(len(logs))
    normal = figures.NormalDist(0, error)
    return normal.cdf(mean - low) - normal.cdf(mean - high)


def simulate(case: Case, benches: int, *, resampled: int = 0, seed: int = 1) -> Outcome:
    """Run so many benches; the first `resampled` of them have their bootstrap interval made too."""
    drawn = random.Random(f"{seed} {case}")
    pairs, student, bootstrap, estimates = [], [], [], []
    for number in range(benches):
        logs = bench(case, drawn)
        pairs.append(len(logs))
        estimates.append(figures.fmean(logs))
        student.append(held(case, logs, statistics.student(logs, case.student)))
        if number < resampled:
            bounds = statistics.bootstrap(logs, case.bootstrap, seed=number, resamples=case.resamples)
            bootstrap.append(held(case, logs, bounds))
    spread = figures.stdev(estimates)
    return Outcome(
        figures.fmean(pairs),
        _share(student),
        _share(bootstrap) if bootstrap else None,
        _share([estimate / spread for estimate in estimates]),
    )


def _share(values: list[float]) -> Share:
    return Share(100 * figures.fmean(values), 100 * figures.stdev(values) / math.sqrt(len(values)))


def main() -> None:
    """Print a table for each noise, and the least of each column."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--benches", type=int, default=4000, help="per line, a quarter of them resampled")
    parser.add_argument("--noise", choices=NOISES, action="append", help="one of the forms; again for more")
    parser.add_argument("--sigma", type=float, action="append", help="percent; again for more")
    parser.add_argument("--max-pairs", type=int, action="append", help="again for more")
    parser.add_argument("--min-pairs", type=int, default=RULE.min_pairs)
    parser.add_argument("--centres", type=int, default=RULE.centres)
    parser.add_argument("--student", type=float, default=statistics.STUDENT_LEVEL, help="level, e.g. 0.05")
    parser.add_argument("--bootstrap", type=float, default=statistics.BOOTSTRAP_LEVEL, help="level")
    asked = parser.parse_args()
    rules = [Stopping(asked.min_pairs, most, asked.centres) for most in asked.max_pairs or MAX_PAIRS]
    simulated = functools.partial(simulate, benches=asked.benches, resampled=asked.benches // 4)
    with ProcessPoolExecutor() as workers:
        for noise in asked.noise or NOISES:
            print(f"\n{noise}; standard errors in brackets\n\n{_HEADING}")
            cases = [
                Case(noise, sigma, rule, asked.student, asked.bootstrap)
                for rule, sigma in itertools.product(rules, asked.sigma or SIGMAS)
            ]
            outcomes = []
            for case, outcome in zip(cases, workers.map(simulated, cases), strict=True):
                outcomes.append(outcome)
                print(_row(case, outcome), flush=True)
            least = min(outcome.student.mean for outcome in outcomes)
            least_resampled = min((o.bootstrap.mean for o in outcomes if o.bootstrap), default=math.nan)
            print(f"\nleast: Student t {least:.2f} %, bootstrap-t {least_resampled:.2f} %")


_HEADING = (
    "| most pairs | sigma | pairs, mean | Student t | bootstrap-t | bias, % of a standard error |\n"
    "|---|---|---|---|---|---|"
)


def _row(case: Case, outcome: Outcome) -> str:
    cells = (
        str(case.stopping.max_pairs),
        f"{case.sigma_percent:g} %",
        f"{outcome.pairs:.1f}",
        f"{outcome.student.mean:.2f} ({outcome.student.error:.2f})",
        f"{outcome.bootstrap.mean:.2f} ({outcome.bootstrap.error:.2f})" if outcome.bootstrap else "",
        f"{outcome.bias.mean:+.1f} ({outcome.bias.error:.1f})",
    )
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
