"""The ledger of accounting slots: which are free, and what each job has run up.

The kernel adds to a slot's row of totals and never clears it (clearing would race with the CPUs), so
a slot's figures are the row less a baseline taken when the slot was given out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence

from expanse_ebpf.errors import UnavailableError

SLOT_SYSTEM = 0  # everything that belongs to no job
SLOT_OVERFLOW = 1  # cgroups for which no slot was free
_RESERVED = 2


class Slots:
    """Slots and their totals; a total is a list of `width` cumulative figures."""

    def __init__(self, count: int, width: int, row: Callable[[int], tuple[int, ...]]) -> None:
        """`row(slot)` reads the kernel's totals of a slot."""
        self._row = row
        self._width = width
        self._free = deque(range(_RESERVED, count))
        self._baseline: dict[int, tuple[int, ...]] = {s: row(s) for s in range(_RESERVED)}
        # What other slots have run up for the owner of this one.
        self._carried: dict[int, list[int]] = {s: [0] * width for s in range(_RESERVED)}
        self._heirs: dict[int, int] = {}  # retired slots, and who inherits what CPUs still charge to them

    def __len__(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free slot, with totals that start at 0; raises UnavailableError when there is none."""
        if not self._free:
            raise UnavailableError("no accounting slot is free: more cgroups than this build can tell apart")
        slot = self._free.popleft()
        self._baseline[slot] = self._row(slot)
        self._carried[slot] = [0] * self._width
        return slot

    def total(self, slot: int) -> list[int]:
        """Cumulative figures of the owner of `slot` since it got it."""
        return [
            now - before + carried
            for now, before, carried in zip(
                self._row(slot), self._baseline[slot], self._carried[slot], strict=True
            )
        ]

    def carry(self, slot: int, total: Sequence[int]) -> None:
        """Add what the owner of `slot` had run up before, elsewhere."""
        carried = self._carried[slot]
        for i, amount in enumerate(total):
            carried[i] += amount

    def retire(self, slot: int, heir: int) -> None:
        """Give `slot` back; its figures, and what CPUs still charge to it, go to `heir`."""
        if slot < _RESERVED or slot in self._heirs or slot not in self._baseline:
            return
        self._heirs[slot] = heir
        # Slots that were to pass on to this one now pass on to its heir.
        for other, their_heir in self._heirs.items():
            if their_heir == slot:
                self._heirs[other] = heir
        self._pass_on(slot)

    def end(self, slot: int) -> None:
        """The job has had its last record: what CPUs still charge to its slot belongs to no job."""
        if slot in self._baseline and slot not in self._heirs:
            self._baseline[slot] = self._row(slot)
            self._carried[slot] = [0] * self._width
            self.retire(slot, SLOT_SYSTEM)

    def settle(self, in_use: Collection[int]) -> None:
        """Pass on what retired slots still got, and free those that no CPU charges to any more (`in_use`)."""
        for slot in list(self._heirs):
            self._pass_on(slot)
            if slot not in in_use:
                del self._heirs[slot], self._baseline[slot], self._carried[slot]
                self._free.append(slot)

    @property
    def given(self) -> Collection[int]:
        """Slots that are not free: they may be charged."""
        return self._baseline.keys()

    @property
    def retired(self) -> Collection[int]:
        """Slots that are given back but may still be charged."""
        return self._heirs.keys()

    def _pass_on(self, slot: int) -> None:
        if self._heirs[slot] in self._carried:
            self.carry(self._heirs[slot], self.total(slot))
        self._baseline[slot] = self._row(slot)
        self._carried[slot] = [0] * self._width
