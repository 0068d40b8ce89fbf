"""From times to intervals: known values, and how often the intervals hold the truth."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import coverage
from expanse_ebpf.bench import statistics
from expanse_ebpf.bench.plan import Stopping
from expanse_ebpf.bench.statistics import Comparison, Interval, compare, enough, shift, t_quantile

TIMES = st.floats(1e-2, 1e4)
FEW = settings(max_examples=30, deadline=None)  # each resamples twice
PAIRS = st.lists(st.tuples(TIMES, TIMES), min_size=2, max_size=12)


def drawn(count: int, slower: float, noise: float, seed: int = 1) -> list[tuple[float, float]]:
    """Pairs of some 100 s; the second time is longer by `slower`, and both are noisy (shares)."""
    numbers = random.Random(seed)
    return [
        (100 * math.exp(numbers.gauss(0, noise)), 100 * (1 + slower) * math.exp(numbers.gauss(0, noise)))
        for _ in range(count)
    ]


@pytest.mark.parametrize(
    ("probability", "degrees", "published"),
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
        (0.90, 1, 3.078),
        (0.975, 1, 12.706),
        (0.999, 1, 318.309),
        (0.975, 2, 4.303),
        (0.95, 5, 2.015),
        (0.975, 7, 2.365),
        (0.99, 7, 2.998),
        (0.999, 10, 4.144),
        (0.975, 30, 2.042),
        (0.975, 39, 2.023),
        (0.995, 100, 2.626),
    ],
)
def test_quantiles_of_students_t_are_those_of_published_tables(
    probability: float, degrees: int, published: float
) -> None:
    assert t_quantile(probability, degrees) == pytest.approx(published, abs=6e-4)


def test_quantiles_are_exact_where_there_is_a_formula() -> None:
    for probability in (0.6, 0.75, 0.975, 0.98, 0.9995):
        odd = 2 * probability - 1
        assert t_quantile(probability, 1) == pytest.approx(math.tan(math.pi * odd / 2), rel=1e-11)
        assert t_quantile(probability, 2) == pytest.approx(odd * math.sqrt(2 / (1 - odd * odd)), rel=1e-11)


def test_the_interval_is_students_at_the_adjusted_level() -> None:
    # Log ratios -1, 0, 1, 2 percent: mean 0.5, deviation sqrt(5/3); t of 0.98 with 3 degrees is 3.482.
    pairs = [(2.0, 2.0 * math.exp(each / 100)) for each in (-1, 0, 1, 2)]
    found = compare(pairs)
    half = 3.482 * math.sqrt(5 / 3) / 2
    assert found.pairs == 4
    assert found.percent == pytest.approx(100 * math.expm1(0.005))
    assert found.interval.low == pytest.approx(100 * math.expm1((0.5 - half) / 100), abs=1e-3)
    assert found.interval.high == pytest.approx(100 * math.expm1((0.5 + half) / 100), abs=1e-3)
    assert found.spread_percent == pytest.approx(100 * math.expm1(math.sqrt(5 / 3) / 100))


@FEW
@given(PAIRS, TIMES)
def test_the_unit_of_time_does_not_matter(pairs: list[tuple[float, float]], unit: float) -> None:
    here = compare(pairs)
    there = compare([(off * unit, beside * unit) for off, beside in pairs])
    assert there.percent == pytest.approx(here.percent, rel=1e-6, abs=1e-9)
    assert there.interval.low == pytest.approx(here.interval.low, rel=1e-6, abs=1e-9)
    assert there.interval.high == pytest.approx(here.interval.high, rel=1e-6, abs=1e-9)


@FEW
@given(PAIRS)
def test_swapped_sides_give_the_opposite(pairs: list[tuple[float, float]]) -> None:
    def log(percent: float) -> float:
        return math.log1p(percent / 100)

    one, other = compare(pairs), compare([(beside, off) for off, beside in pairs])
    assert log(other.percent) == pytest.approx(-log(one.percent), abs=1e-8)
    assert one.measurable == other.measurable
    assert other.spread_percent == pytest.approx(one.spread_percent)


@FEW
@given(st.data())
def test_the_order_of_the_pairs_does_not_matter(data: st.DataObject) -> None:
    pairs = data.draw(PAIRS)
    assert compare(data.draw(st.permutations(pairs))) == compare(pairs)


@FEW
@given(PAIRS)
def test_the_estimate_lies_in_its_interval(pairs: list[tuple[float, float]]) -> None:
    found = compare(pairs)
    assert found.interval.low <= found.percent <= found.interval.high


def test_more_pairs_narrow_the_interval() -> None:
    few, many = compare(drawn(10, 0.01, 0.01)), compare(drawn(90, 0.01, 0.01))
    assert many.interval.high - many.interval.low < (few.interval.high - few.interval.low) / 2


def test_the_two_intervals_agree_where_noise_is_normal() -> None:
    found = compare(drawn(400, 0.02, 0.01))
    assert found.bootstrap is not None
    width = found.interval.high - found.interval.low
    # That of the bootstrap is made at a lower level, of 0.03.
    assert found.bootstrap.high - found.bootstrap.low == pytest.approx(width * 2.178 / 2.06, rel=0.06)
    assert found.bootstrap.low == pytest.approx(found.interval.low, abs=0.1 * width)


def test_only_the_bootstrap_sees_on_which_side_the_noise_has_its_tail() -> None:
    numbers = random.Random(2)
    found = compare([(1.0, math.exp(0.02 * numbers.lognormvariate(0, 1))) for _ in range(30)])
    assert found.bootstrap is not None
    up, down = found.bootstrap.high - found.percent, found.percent - found.bootstrap.low
    assert up > 1.3 * down


def test_the_bootstrap_can_be_repeated_by_its_seed() -> None:
    pairs = drawn(9, 0.0, 0.02)
    assert compare(pairs, seed=3) == compare(pairs, seed=3)
    assert compare(pairs, seed=3).bootstrap != compare(pairs, seed=4).bootstrap


def test_drawing_leaves_pythons_own_random_numbers_alone() -> None:
    before = random.getstate()
    compare(drawn(9, 0.0, 0.02))
    assert random.getstate() == before


def test_few_pairs_have_an_interval_but_no_bootstrap() -> None:
    found = compare([(1.0, 1.01), (1.0, 1.02)])
    assert found.bootstrap is None
    assert found.interval.high - found.interval.low > 10


def test_pairs_nearly_all_equal_have_no_bootstrap() -> None:
    assert compare([(1.0, 1.0)] * 7 + [(1.0, 1.01)]).bootstrap is None


@pytest.mark.parametrize("beside", [1.0, 1.1, 0.3])
def test_equal_pairs_leave_no_doubt(beside: float) -> None:
    found = compare([(1.0, beside)] * 9)
    assert found.percent == pytest.approx(100 * (beside - 1))
    assert found.interval.high - found.interval.low < 1e-9
    assert found.bootstrap is not None
    assert found.bootstrap.high - found.bootstrap.low < 1e-9
    assert found.measurable == (beside != 1.0)


def test_two_pairs_however_far_apart_have_finite_bounds() -> None:
    found = compare([(1e-300, 1e300), (1e300, 1e-300)])
    assert found.interval.low >= -100
    assert math.isfinite(found.interval.high)


@pytest.mark.parametrize("pairs", [[], [(1.0, 1.0)]])
def test_fewer_than_two_pairs_are_refused(pairs: list[tuple[float, float]]) -> None:
    with pytest.raises(ValueError, match="two pairs"):
        compare(pairs)
    with pytest.raises(ValueError, match="two pairs"):
        shift(pairs)
    with pytest.raises(ValueError, match="two pairs"):
        statistics.bootstrap([beside for _, beside in pairs], 0.05, seed=1)


@pytest.mark.parametrize("time", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_no_time_is_refused(time: float, side: int) -> None:
    wrong = (time, 1.0) if side == 0 else (1.0, time)
    with pytest.raises(ValueError, match="above 0"):
        compare([(1.0, 1.0), (1.0, 1.1), wrong])
    with pytest.raises(ValueError, match="above 0"):
        enough([wrong], min_pairs=8, centres=3, within_points=0.5)


def test_a_shift_is_in_the_quantitys_own_unit() -> None:
    found = shift([(0.0, 1.0), (-5.0, -5.0), (10.0, 12.0), (3.0, 2.0)])
    half = 3.482 * math.sqrt(5 / 3) / 2
    assert (found.pairs, found.mean) == (4, 0.5)
    assert (found.low, found.high) == pytest.approx((0.5 - half, 0.5 + half), abs=1e-3)


def test_a_shift_of_nothing_is_nothing() -> None:
    assert shift([(7.0, 7.0)] * 3) == statistics.Shift(3, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_shift_of_what_is_no_number_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        shift([(1.0, 2.0), (1.0, value)])


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ((12, 0.1, -0.3, 0.5), "no measurable difference: +0.10 % (−0.30 to +0.50), 12 pairs"),  # noqa: RUF001
        ((12, -0.001, -0.3, 0.3), "no measurable difference: +0.00 % (−0.30 to +0.30), 12 pairs"),  # noqa: RUF001
        ((9, 0.0, 0.0, 0.0), "no measurable difference: +0.00 % (+0.00 to +0.00), 9 pairs"),
        ((9, 0.1, 0.0, 0.2), "no measurable difference: +0.10 % (+0.00 to +0.20), 9 pairs"),
        ((8, 0.0001, -0.002, 0.0022), "no measurable difference: +0.000 % (−0.002 to +0.002), 8 pairs"),  # noqa: RUF001
        ((20, 1.2, 0.8, 1.6), "1.2 % slower (0.8 to 1.6), 20 pairs"),
        ((20, -1.2, -1.6, -0.8), "1.2 % faster (0.8 to 1.6), 20 pairs"),
        ((20, 0.234, 0.031, 0.437), "0.23 % slower (0.03 to 0.44), 20 pairs"),
        ((20, 150.0, 100.0, 200.0), "150.0 % slower (100.0 to 200.0), 20 pairs"),
    ],
)
def test_the_outcome_in_words(found: tuple[int, float, float, float], said: str) -> None:
    pairs, percent, low, high = found
    assert Comparison(pairs, percent, Interval(low, high), None, 1.0).sentence() == said


def ratios(*percent: float) -> list[tuple[float, float]]:
    """Pairs whose running means, from the first on, are these (percent)."""
    logs = [math.log1p(each / 100) for each in percent]
    sums = [0.0] + [mean * count for count, mean in enumerate(logs, 1)]
    return [(10.0, 10.0 * math.exp(after - before)) for before, after in itertools.pairwise(sums)]


@pytest.mark.parametrize(
    ("means", "rule", "stops"),
    [
        ((1, 1, 1, 1, 1, 1, 1, 1), {}, True),
        ((1, 1, 1, 1, 1, 1, 1), {}, False),  # too few
        ((9, 9, 9, 9, 9, 1, 1.2, 1.4), {}, True),  # the last three alone count
        ((1, 1, 1, 1, 1, 1, 1.3, 1.6), {}, False),  # each two agree, all three do not
        ((1, 1, 1, 1, 1, 1.6, 1.3, 1), {}, False),
        ((1, 1, 1, 1, 1, 1, 1.6, 1), {}, False),  # the one between counts too
        ((1, 1, 1, 1, 1, 1, 1.49, 1), {}, True),
        ((-0.2, -0.2, -0.2, -0.2, -0.2, -0.2, 0.2, 0.2), {}, True),  # whatever the sign
        ((1, 1, 1, 1, 1, 1, 1.6, 1), {"within_points": 0.7}, True),
        ((1, 1, 1, 1, 1, 1, 1.3, 1.6), {"centres": 2}, True),
        ((1, 1, 1, 1, 2, 1, 1, 1), {"centres": 4}, False),
        ((1, 1, 1), {"min_pairs": 2}, False),  # the first of three estimates would be of a single pair
        ((1, 1, 1, 1), {"min_pairs": 2}, True),
        ((1,), {"min_pairs": 1, "centres": 1}, False),
        ((), {}, False),
    ],
)
def test_when_there_are_pairs_enough(means: tuple[float, ...], rule: dict[str, float], stops: bool) -> None:
    pairs = ratios(*means)
    asked = {"min_pairs": 8, "centres": 3, "within_points": 0.5} | rule
    found = enough(
        pairs,
        min_pairs=int(asked["min_pairs"]),
        centres=int(asked["centres"]),
        within_points=asked["within_points"],
    )
    assert found is stops


# Coverage. The seed is fixed: what is simulated is the same each time.


def coverage_of(share: coverage.Share | None, error: float) -> float:
    """In percent; `error`: the most that the simulation may have of its own."""
    assert share is not None
    assert share.error < error
    return share.mean


@pytest.mark.parametrize("sigma", [0.1, 3.0, 7.0, 10.0, 20.0])
def test_under_the_stopping_rule_students_interval_holds_the_truth_often_enough(sigma: float) -> None:
    found = coverage.simulate(coverage.Case(sigma_percent=sigma), 6000)
    assert coverage_of(found.student, error=0.1) >= 95


@pytest.mark.parametrize("sigma", [0.1, 7.0, 20.0])
def test_and_so_does_the_bootstraps(sigma: float) -> None:
    case = coverage.Case(sigma_percent=sigma, resamples=199)
    assert coverage_of(coverage.simulate(case, 1500, resampled=1500).bootstrap, error=0.2) >= 95


def test_and_so_do_both_where_single_pairs_lie_far_out() -> None:
    case = coverage.Case("Student t, 4 degrees", sigma_percent=7, resamples=199)
    found = coverage.simulate(case, 1000, resampled=1000)
    assert coverage_of(found.student, error=0.8) >= 95
    assert coverage_of(found.bootstrap, error=0.8) >= 95


def test_without_paying_for_the_looking_neither_would() -> None:
    case = coverage.Case(sigma_percent=7, student=0.05, bootstrap=0.05, resamples=199)
    assert coverage_of(coverage.simulate(case, 6000).student, error=0.1) < 95
    assert coverage_of(coverage.simulate(case, 1500, resampled=1500).bootstrap, error=0.2) < 95


def test_without_looking_there_would_be_nothing_to_pay_for() -> None:
    case = coverage.Case(sigma_percent=7, stopping=Stopping(12, 12), student=0.05)
    share = coverage.simulate(case, 1500).student
    assert share.mean == pytest.approx(95, abs=3 * share.error)


def test_the_probability_of_holding_the_truth_is_how_often_it_is_held() -> None:
    case = coverage.Case(sigma_percent=7, student=0.2)
    counted = dataclasses.replace(case, noise="counted")
    numbers, expected, held = random.Random(5), 0.0, 0.0
    for _ in range(1500):
        logs = coverage.bench(case, numbers)
        bounds = statistics.student(logs, case.student)
        expected += coverage.held(case, logs, bounds) / 1500
        held += coverage.held(counted, logs, bounds) / 1500
    assert held == pytest.approx(expected, abs=3 * math.sqrt(0.8 * 0.2 / 1500))
