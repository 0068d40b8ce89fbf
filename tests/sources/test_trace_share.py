"""How long a window may be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.sources.trace_share import LEAST_S, age_for, judge, longest, positive, wait_of


@pytest.mark.parametrize(
    ("wished", "age", "traced", "share", "seconds", "reason"),
    [
        (10, 1000, 0, 0.3, 10, ""),
        (
            10,
            7,
            0,
            0.3,
            3,
            "shortened to 3.0 s: at most 30 % of the run may be traced; --share 100% lifts that",
        ),
        (10, 107, 29, 0.3, 4.42857, "shortened to 4.4 s: at most 30 % of the run may be traced"),
        (
            10,
            100,
            30,
            0.3,
            0,
            "at most 30 % of the run may be traced; possible in 2 s; --share 100% lifts that",
        ),
        (10, 0, 0, 0.3, 0, "possible in 2 s"),
        (500, 10**6, 0, 0.3, 120, "shortened to 120 s, the most that tracing.max_window_s allows"),
        (
            500,
            70,
            0,
            0.3,
            30,
            "shortened to 30.0 s: at most 30 % of the run may be traced; --share 100% lifts that; "
            "120 s is the most in any case (tracing.max_window_s)",
        ),
        (
            300,
            0,
            1501.2,
            0.3,
            0,
            "at most 30 % of the run may be traced; possible in 1 h 24 min; --share 100% lifts that; "
            "120 s is the most in any case (tracing.max_window_s)",
        ),
        (10, 0, 0, 1, 10, ""),
        (0.2, 0.5, 0, 0.3, 0.2, ""),  # asked for so little, not cut to it
        (0.2, 0.1, 0, 0.3, 0, "possible in 1 s"),
        (10, 5, 0, 0.125, 0.714285, "at most 12.5 % of the run"),
    ],
)
def test_a_window_is_as_long_as_the_share_lets_it(
    wished: float, age: float, traced: float, share: float, seconds: float, reason: str
) -> None:
    verdict = judge(wished, 120, age, traced, share, may_lift=True)
    assert verdict.seconds == pytest.approx(seconds, abs=1e-4)
    assert verdict.reason == reason or (reason and reason in verdict.reason)


def test_a_rule_is_not_told_of_what_it_may_not_lift() -> None:
    assert judge(10, 120, 7, 0, 0.3, may_lift=False).reason == (
        "shortened to 3.0 s: at most 30 % of the run may be traced (tracing.run_share of the node)"
    )
    assert "lifts" not in judge(10, 120, 0, 0, 0.3, may_lift=False).reason


@pytest.mark.parametrize("value", [0.0, -1.0, -1e300, math.nan, math.inf, -math.inf])
def test_what_is_no_positive_number_counts_as_not_given(value: float) -> None:
    assert positive(value, 5, 10) == 5
    assert positive(value, 5, 3) == 3


def test_what_is_too_much_is_the_most() -> None:
    assert [positive(v, 5, 10) for v in (1e-300, 7, 1e300)] == [1e-300, 7, 10]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0, "1 s"), (41.1, "42 s"), (120, "120 s"), (121, "3 min"), (3600, "1 h"), (5005, "1 h 24 min")],
)
def test_a_wait_is_told_in_words_and_never_too_short(seconds: float, words: str) -> None:
    assert wait_of(seconds) == words


SECONDS = st.floats(0, 1e5)


@settings(max_examples=300)
@given(
    share=st.floats(0.001, 1),
    pauses=st.lists(
        st.tuples(SECONDS, st.floats(0.01, 1e4), st.floats(0, 1), st.floats(0, 60)), min_size=1, max_size=20
    ),
)
def test_never_more_than_the_share_of_a_run_lies_in_windows(
    share: float, pauses: list[tuple[float, float, float, float]]
) -> None:
    """At the end of any window, however long one waits between them, and whether they end early."""
    age = traced = 0.0
    for idle, wished, part, ahead in pauses:
        age += idle
        seconds = judge(wished, 3600, age + ahead, traced, share, may_lift=True).seconds
        assert 0 <= seconds <= min(wished, 3600)
        assert seconds == 0 or seconds >= min(wished, LEAST_S) - 1e-9
        if seconds:
            age += ahead + seconds * part
            traced += seconds * part
            assert traced <= share * age + 1e-6 * (1 + age)


@settings(max_examples=300)
@given(age=SECONDS, traced=SECONDS, share=st.floats(0.001, 0.999), wished=st.floats(0.01, 3600))
def test_when_it_is_said_to_be_possible_it_is(age: float, traced: float, share: float, wished: float) -> None:
    verdict = judge(wished, 3600, age, traced, share, may_lift=False)
    if not verdict.seconds:
        words = verdict.reason.partition("possible in ")[2].partition(" (")[0].split()
        wait = sum(
            int(n) * {"s": 1, "min": 60, "h": 3600}[unit]
            for n, unit in zip(words[::2], words[1::2], strict=True)
        )
        least = 1 if words[-1] == "s" else 60
        assert judge(wished, 3600, age + wait + 1e-3, traced, share, may_lift=False).seconds > 0
        if wait > 1:
            assert judge(wished, 3600, age + wait - least - 0.001, traced, share, may_lift=False).seconds == 0


def test_the_two_formulas_belong_together() -> None:
    assert longest(age_for(7, 20, 0.3), 20, 0.3) == pytest.approx(7)
    assert longest(3, 1000, 0.3) == 0
    assert longest(0, 1000, 1.0) == math.inf
