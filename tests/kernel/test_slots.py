"""The ledger of slots, against a made-up kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.slots import SLOT_SYSTEM, Slots


class Rows:
    def __init__(self, count: int) -> None:
        self.rows = [[0, 0] for _ in range(count)]

    def charge(self, slot: int, amount: int) -> None:
        self.rows[slot][0] += amount
        self.rows[slot][1] += 2 * amount

    def __call__(self, slot: int) -> tuple[int, ...]:
        return tuple(self.rows[slot])


def ledger(count: int = 8) -> tuple[Rows, Slots]:
    rows = Rows(count)
    return rows, Slots(count, 2, rows)


def test_a_slot_starts_at_zero_whatever_its_row_held_before() -> None:
    rows, slots = ledger()
    first = slots.take()
    rows.charge(first, 900)
    slots.end(first)
    slots.settle(())
    taken = {slots.take() for _ in range(6)}
    assert first in taken
    rows.charge(first, 3)
    assert slots.total(first) == [3, 6]


def test_an_unneeded_slot_passes_on_what_it_has_and_still_gets() -> None:
    rows, slots = ledger()
    job, given = slots.take(), slots.take()
    rows.charge(job, 10)
    rows.charge(given, 5)
    slots.retire(given, job)
    assert slots.total(job) == [15, 30]
    rows.charge(given, 7)  # a CPU that has not looked again yet
    slots.settle({given})
    assert slots.total(job) == [22, 44]
    assert given in slots.retired
    slots.settle(())
    assert given not in slots.retired


def test_an_ended_job_keeps_its_figures_and_its_tail_goes_to_no_job() -> None:
    rows, slots = ledger()
    job = slots.take()
    rows.charge(job, 100)
    slots.end(job)
    assert slots.total(SLOT_SYSTEM) == [0, 0]
    rows.charge(job, 1)
    slots.settle(())
    assert slots.total(SLOT_SYSTEM) == [1, 2]


def test_an_heir_that_goes_hands_on_what_it_was_to_inherit() -> None:
    rows, slots = ledger()
    given, job = slots.take(), slots.take()
    slots.retire(given, job)
    slots.end(job)
    rows.charge(given, 4)
    slots.settle(())
    assert slots.total(SLOT_SYSTEM) == [4, 8]


def test_reserved_slots_are_never_given_back_and_running_out_is_an_error() -> None:
    _, slots = ledger(4)
    slots.retire(SLOT_SYSTEM, SLOT_SYSTEM)
    assert {slots.take(), slots.take()} == {2, 3}
    with pytest.raises(UnavailableError, match="no accounting slot"):
        slots.take()


@given(st.lists(st.tuples(st.sampled_from("tcres"), st.integers(0, 9), st.integers(0, 9)), max_size=80))
def test_nothing_charged_is_ever_lost_or_counted_twice(steps: list[tuple[str, int, int]]) -> None:
    rows, slots = ledger(10)
    live: list[int] = []
    charged = ended = 0
    for kind, a, b in steps:
        if kind == "t" and len(slots):
            live.append(slots.take())
        elif kind == "c":
            rows.charge(a, b)
            if a in live or a < 2 or a in slots.retired:
                charged += b
            # a charge to a free slot cannot happen: no cgroup maps to it and no CPU is on it
        elif kind == "r" and live:
            slots.retire(live.pop(a % len(live)), live[b % len(live)] if live else SLOT_SYSTEM)
        elif kind == "e" and live:
            slot = live.pop(a % len(live))
            ended += slots.total(slot)[0]
            slots.end(slot)
        elif kind == "s":
            slots.settle({a})
    slots.settle(())
    held = sum(slots.total(slot)[0] for slot in [*live, 0, 1])
    assert held + ended == charged
