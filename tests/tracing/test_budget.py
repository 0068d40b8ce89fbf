"""The cost of a window to the threads that it traces, in simulated threads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from expanse_ebpf.tracing.budget import BURST_S, SETTLED_S, SHORTEST_ON_S, CostBudget, Decision, Span

# Share of its time that a thread would pay with the probes in place, by the second since the window began.
Rate = Callable[[float], float]

STEP_S = 0.001
CYCLE = ("cycle", 25.0)


@dataclass
class Window:
    """What became of a simulated window. The clock of the caller does not begin at 0."""

    budget: CostBudget
    elapsed_s: float = 0.0
    cost_s: float = 0.0
    traced_s: float = 0.0
    attached: bool = False
    asked: int = 0
    decisions: list[Decision] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    @property
    def cost_share(self) -> float:
        return self.cost_s / self.elapsed_s

    @property
    def traced_share(self) -> float:
        return self.traced_s / self.elapsed_s


def simulate(
    budget: CostBudget,
    rate: Rate,
    *,
    until_s: float = math.inf,
    late: float = 0.0,
    foreign: float = 0.0,
    switch_s: float = 0.0,
    begin_s: float = 1000.0,
) -> Window:
    """A window with a thread that pays at that rate, asked when it wants to be or `late` (a share) later.

    Attaching and detaching each take half of `switch_s`, in which the probes still cost.
    """
    window = Window(budget)

    def live(seconds: float, costs: bool) -> None:
        left = min(seconds, until_s - window.elapsed_s)
        while left > 1e-9:
            step = min(left, STEP_S)
            window.cost_s += costs * step * rate(window.elapsed_s)
            window.elapsed_s += step
            left -= step

    while until_s - window.elapsed_s > 1e-6:
        window.asked += 1
        decision = budget.update(
            begin_s + window.elapsed_s, window.cost_s, window.cost_s * foreign, window.attached
        )
        window.decisions.append(decision)
        if decision is Decision.CLOSE:
            break
        if decision is Decision.ATTACH:
            assert not window.attached
            live(switch_s / 2, True)
            window.attached = True
            window.spans.append(Span(begin_s + window.elapsed_s, math.inf))
        elif decision is Decision.DETACH:
            assert window.attached
            live(switch_s / 2, True)
            window.attached = False
            window.spans[-1] = Span(window.spans[-1].from_s, begin_s + window.elapsed_s)
        else:
            assert budget.wait_s > 0
            before = window.elapsed_s
            live(max(budget.wait_s * (1 + late), 1e-6), window.attached)
            window.traced_s += window.attached * (window.elapsed_s - before)
    if window.attached:
        window.spans[-1] = Span(window.spans[-1].from_s, begin_s + window.elapsed_s)
    return window


def steady(rate: float) -> Rate:
    return lambda _: rate


# A thread with so many hits a second, each of so many µs; without probes it would have all its time for
# itself, so it cannot pay more than 100 %. Windows of 25 s, 2 %.
@pytest.mark.parametrize(
    ("hits", "hit_us", "traced", "cost"),
    [
        # hits   µs    traced   cost
        (1_000, 0.7, 1.0, 0.0007),
        (1_000, 10.0, 1.0, 0.01),
        (10_000, 0.7, 1.0, 0.007),
        (10_000, 10.0, 0.2, 0.02),
        (100_000, 0.7, 0.29, 0.02),
        (100_000, 10.0, 0.02, 0.02),
        (2_850, 7.0, 1.0, 0.01995),  # just below the share
        (1_000_000, 10.0, 0.02, 0.02),
    ],
)
def test_a_steady_thread_is_traced_as_much_as_its_share_allows(
    hits: int, hit_us: float, traced: float, cost: float
) -> None:
    window = simulate(CostBudget(0.02, *CYCLE), steady(min(hits * hit_us / 1e6, 1.0)))
    assert window.elapsed_s == pytest.approx(25, abs=0.001)
    assert window.traced_share == pytest.approx(traced, rel=0.15)
    assert window.cost_share == pytest.approx(cost, rel=0.12)
    assert window.budget.cost_share == pytest.approx(window.cost_share, rel=0.01)
    assert window.budget.traced_share == pytest.approx(window.traced_share, rel=0.05, abs=0.001)
    assert window.budget.cut == ""


@pytest.mark.parametrize("seconds", [0.3, 1.0, 2.0, 4.0])
def test_a_short_window_of_a_cheap_thread_is_not_cut(seconds: float) -> None:
    window = simulate(CostBudget(0.02, "close", seconds), steady(0.015))
    assert window.elapsed_s == pytest.approx(seconds, abs=0.001)
    assert window.traced_share == pytest.approx(1.0)


def rates() -> st.SearchStrategy[Rate]:
    """Rates that change after some ms to seconds, between nothing and all of the thread's time."""
    share = st.sampled_from([0.0, 0.0007, 0.01, 0.019, 0.03, 0.07, 0.2, 1.0]) | st.floats(0, 1)
    pieces = st.lists(st.tuples(st.integers(1, 3000), share), min_size=1, max_size=12)

    def rate(pieces: list[tuple[int, float]]) -> Rate:
        by_ms = [share for length, share in pieces for _ in range(length)]
        return lambda second: by_ms[int(second * 1000) % len(by_ms)]

    return pieces.map(rate)


def bursts_late(second: float) -> float:
    return 0.0 if second < 4.95 else 1.0


@settings(deadline=None, max_examples=60)
@given(
    rate=rates(),
    share=st.sampled_from([0.002, 0.005, 0.02, 0.05, 0.2]),
    over_cost=st.sampled_from(["cycle", "close"]),
    until_s=st.floats(5, 15),
    late=st.floats(0, 0.05),
    switch=st.floats(0, 0.2),
)
@example(rate=bursts_late, share=0.02, over_cost="cycle", until_s=5.0, late=0.05, switch=0.0)
@example(rate=steady(1.0), share=0.02, over_cost="cycle", until_s=5.0, late=0.05, switch=0.2)
def test_whatever_a_thread_does_a_window_costs_its_share(
    rate: Rate, share: float, over_cost: str, until_s: float, late: float, switch: float
) -> None:
    """A window that is ended at any time from SETTLED_S on, whose probes come off as fast as they must."""
    switch_s = share * switch
    budget = CostBudget(share, over_cost, 30.0, switch_s=switch_s)
    window = simulate(budget, rate, until_s=until_s, late=late, switch_s=switch_s)
    if window.elapsed_s >= SETTLED_S:
        assert window.cost_share <= share * 1.25 + 1e-9
    # A burst, one wait that came at the wrong time, and what came in while the probes went.
    assert window.cost_s <= share * (window.elapsed_s + 2 * BURST_S * (1 + late)) + switch_s


@settings(deadline=None, max_examples=30)
@given(rate=rates(), switch_s=st.sampled_from([0.0, 0.001, 0.01]))
def test_spans_are_when_the_probes_were_there(rate: Rate, switch_s: float) -> None:
    window = simulate(CostBudget(0.02, "cycle", 8.0), rate, switch_s=switch_s)
    spans = window.budget.spans
    assert len(spans) == len(window.spans)
    for known, true in zip(spans, window.spans, strict=True):
        assert known.from_s == pytest.approx(true.from_s, abs=1e-6)
        assert known.to_s == pytest.approx(true.to_s, abs=1e-6)
    lengths = [span.to_s - span.from_s for span in spans]
    assert all(length >= 0 for length in lengths)
    assert all(one.to_s <= other.from_s for one, other in pairwise(spans))
    assert window.budget.traced_share == pytest.approx(sum(lengths) / window.budget.elapsed_s)


@pytest.mark.parametrize("rate", [0.03, 0.07, 0.3, 1.0])
@pytest.mark.parametrize("switch_s", [0.0, 0.002, 0.02])
def test_probes_that_come_back_stay_for_a_while(rate: float, switch_s: float) -> None:
    window = simulate(CostBudget(0.02, "cycle", 60.0, switch_s=switch_s), steady(rate), switch_s=switch_s)
    lengths = [span.to_s - span.from_s for span in window.spans[1:-1]]
    assert lengths
    assert min(lengths) >= SHORTEST_ON_S - 0.001
    # What bringing them back costs is a fifth of it all at the most.
    assert len(lengths) * switch_s <= 0.25 * window.cost_s


def test_taking_probes_off_and_on_counts_against_the_share() -> None:
    free = simulate(CostBudget(0.02, "cycle", 60.0), steady(0.1))
    dear = simulate(CostBudget(0.02, "cycle", 60.0, switch_s=0.01), steady(0.1))
    assert dear.cost_s + 0.01 * (len(dear.spans) - 1) == pytest.approx(free.cost_s, rel=0.06)
    assert dear.cost_s < 0.88 * free.cost_s


def test_over_its_share_a_window_closes_where_that_is_wanted() -> None:
    window = simulate(CostBudget(0.02, "close", 25.0), steady(0.07))
    # 2 % of 1 s, and 2 % of the time less what the burst has shrunk
    assert window.elapsed_s == pytest.approx(0.02 / (0.07 - 0.8 * 0.02), rel=0.15)
    assert window.decisions[-1] is Decision.CLOSE
    assert Decision.DETACH not in window.decisions
    assert window.budget.cut.startswith("it cost a thread 7.")
    assert window.budget.cut.endswith("% of the time, 2.00% are allowed")


def test_other_jobs_pay_no_more_than_the_traced_thread() -> None:
    window = simulate(CostBudget(0.02, *CYCLE), steady(0.01), foreign=10.0)
    assert window.cost_share == pytest.approx(0.002, rel=0.12)
    closed = simulate(CostBudget(0.02, "close", 25.0), steady(0.01), foreign=10.0)
    assert "processes of other jobs" in closed.budget.cut


def test_a_spell_of_many_calls_does_not_end_the_tracing() -> None:
    window = simulate(CostBudget(0.02, *CYCLE), lambda second: 0.5 if 8 <= second < 9 else 0.001)
    assert window.traced_share > 0.7
    assert window.spans[-1].to_s == pytest.approx(1025, abs=0.01)


def test_a_cheap_window_is_seldom_looked_at_and_a_dear_one_often() -> None:
    assert simulate(CostBudget(0.02, "cycle", 10.0), steady(0.0)).asked < 200
    # as left over, so often that it cannot be overdrawn by more than a burst
    budget = CostBudget(0.02, "cycle", 10.0)
    budget.update(0.0, 0.0, 0.0, True)
    assert budget.wait_s == pytest.approx(0.02)
    budget.update(5.0, 0.05, 0.0, True)
    assert budget.wait_s == pytest.approx(0.05)


def test_probes_do_not_come_back_for_the_last_moment() -> None:
    budget = CostBudget(0.5, "cycle", 1.0)
    assert budget.update(0.0, 0.0, 0.0, False) is Decision.ATTACH
    assert budget.update(0.0, 0.0, 0.0, True) is Decision.KEEP
    assert budget.update(0.5, 5.0, 0.0, True) is Decision.DETACH
    assert budget.update(0.5, 5.0, 0.0, False) is Decision.KEEP
    late = CostBudget(0.5, "cycle", 1.0)
    for attached in (True, False):
        late.update(0.0, 0.0, 0.0, attached)
    assert late.update(0.96, 0.0, 0.0, False) is Decision.KEEP
    assert late.wait_s == pytest.approx(0.04)
    assert late.update(1.0, 0.0, 0.0, False) is Decision.CLOSE
    assert late.cut == ""


def test_clocks_and_costs_that_go_back_are_not_believed() -> None:
    budget = CostBudget(0.02, "cycle", 10.0)
    budget.update(100.0, 0.0, 0.0, True)
    budget.update(104.0, 0.01, 0.0, True)
    assert budget.update(103.0, 0.0, math.nan, True) is Decision.KEEP
    assert budget.elapsed_s == 4.0
    assert budget.cost_share == pytest.approx(0.0025)
    assert budget.spans == [Span(100.0, 104.0)]


def test_before_it_begins_there_is_nothing() -> None:
    budget = CostBudget(0.02, "cycle", 10.0)
    assert (budget.cost_share, budget.traced_share, budget.spans) == (0.0, 0.0, [])


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, math.nan])
def test_a_share_beyond_reason_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        CostBudget(share, "cycle", 25.0)


def test_another_way_to_go_over_the_cost_is_refused() -> None:
    with pytest.raises(ValueError, match='"cycle" or "close", not "panic"'):
        CostBudget(0.02, "panic", 25.0)


def test_others_may_be_given_less_than_the_traced_job() -> None:
    """Who asks for a window may let it cost their own job more, and nobody else's."""
    budget = CostBudget(1.0, "close", 30.0, foreign_share=0.02)
    assert budget.update(0.0, 0.0, 0.0, False) is Decision.ATTACH
    assert budget.update(0.1, 0.0, 0.0, True) is Decision.KEEP
    assert budget.update(10.0, 5.0, 0.1, True) is Decision.KEEP
    assert budget.update(11.0, 5.5, 0.5, True) is Decision.CLOSE
    assert budget.cut == "it cost processes of other jobs 4.55% of the time, 2.00% are allowed"
