"""The order of runs."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.bench import schedule
from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.schedule import Cell

CELL = Cell(Workload("loop", "switches"), Arm("collection", "collection"))


def test_every_workload_meets_every_arm() -> None:
    plan = Plan("p", (Workload("a", "switches"), Workload("b", "switches")), (CELL.arm, Arm("x", "both")))
    found = [cell.names for cell in schedule.cells(plan)]
    assert found == [("a", "collection"), ("a", "x"), ("b", "collection"), ("b", "x")]


@given(st.integers(0, 2**32 - 1), st.integers(1, 500))
def test_of_each_two_pairs_one_begins_with_nothing(seed: int, block: int) -> None:
    orders = {schedule.pair_order(seed, CELL, pair) for pair in (2 * block - 1, 2 * block)}
    assert orders == {("off", "arm"), ("arm", "off")}


def test_which_one_is_random_and_can_be_worked_out_again() -> None:
    first = [schedule.pair_order(7, CELL, pair) for pair in range(1, 400, 2)]
    assert first == [schedule.pair_order(7, CELL, pair) for pair in range(1, 400, 2)]
    assert 60 < first.count(("off", "arm")) < 140
    other = Cell(CELL.workload, Arm("stacks", "python_stacks"))
    assert first != [schedule.pair_order(7, other, pair) for pair in range(1, 400, 2)]
    assert first != [schedule.pair_order(8, CELL, pair) for pair in range(1, 400, 2)]


def test_each_round_has_an_order_of_its_own_and_misses_none() -> None:
    cells = [Cell(CELL.workload, Arm(f"arm{n}", "collection")) for n in range(5)]
    orders = [schedule.round_order(1, number, cells) for number in range(1, 20)]
    assert all(sorted(map(str, order)) == sorted(map(str, cells)) for order in orders)
    assert len({tuple(map(str, order)) for order in orders}) > 10
    assert cells == [Cell(CELL.workload, Arm(f"arm{n}", "collection")) for n in range(5)]
