"""Which run comes next: pairs in random order, from a seed that is on record.

The order of a pair and of a round depends on the seed and on their numbers alone, so a bench that is resumed
goes on as it would have, and anybody can work out again who ran before whom.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.results import OFF, Role


@dataclass(frozen=True, slots=True)
class Cell:
    """One comparison: a workload beside an arm."""

    workload: Workload
    arm: Arm

    @property
    def names(self) -> tuple[str, str]:
        """(workload, arm), as records have them."""
        return self.workload.name, self.arm.name

    def __str__(self) -> str:
        return f"{self.workload.name} beside {self.arm.name}"


def cells(plan: Plan) -> list[Cell]:
    """Every workload beside every arm, in the plan's order."""
    return [Cell(workload, arm) for workload in plan.workloads for arm in plan.arms]


def round_order(seed: int, number: int, active: Sequence[Cell]) -> list[Cell]:
    """In which order the cells that are not done yet have their next pair in round `number`."""
    order = list(active)
    _dice(seed, "round", number).shuffle(order)
    return order


def pair_order(seed: int, cell: Cell, pair: int) -> tuple[Role, Role]:
    """Which run of a pair comes first.

    Of each two pairs, 1 and 2, 3 and 4, one has the off run first and one the other: what only the second run
    of a pair meets (caches, a machine that has warmed up) is then shared evenly.
    """
    first = _dice(seed, *cell.names, (pair - 1) // 2).random() < 0.5
    return (OFF, "arm") if first == (pair % 2 == 1) else ("arm", OFF)


def _dice(seed: int, *what: object) -> random.Random:
    return random.Random("/".join(map(str, (seed, *what))))
