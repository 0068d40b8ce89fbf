"""Cgroups made and removed and jobs' first executions, as events; and the map from cgroup to slot."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import struct
from collections.abc import Callable, Collection
from typing import NamedTuple

from expanse_ebpf.kernel import cpus, libbpf
from expanse_ebpf.kernel.slots import Slots

_log = logging.getLogger(__name__)

MAX_SLOTS = 2048
PUT_UP = 128  # free slots lying ready in the kernel for cgroups to come
_RING_SIZE = 256 * 1024  # bytes, some 240 events
EXECS_REPORTED = 8  # executions per job that are events

# The order of enum hierarchy in bpf/include/job_slots.h, by the controllers' names in cgroup v1.
HIERARCHIES = ("unified", "cpuset", "cpu", "cpuacct", "blkio", "memory", "devices", "freezer", "pids")

CGROUP_MADE, CGROUP_REMOVED, PROCESS_EXECUTED = 1, 2, 3

# struct totals: ten figures, then five hardware counters of (value, enabled, running).
ROW = struct.Struct("=9Q64x15Q")
ROW_SIZE = 256
RUN_NS, SWITCHES, WAIT_NS, PAGE_FAULTS, MIGRATIONS, FORKS, EXECS, EXITS, CHANGES = range(9)
COUNTERS = 9  # index of the first hardware counter in a row
_EXEC_LIMIT_OFFSET = 9 * 8
_EVENT = struct.Struct("=QIIIIII")
_LOSSES = struct.Struct("=5Q")


class Configuration(ctypes.Structure):
    """struct config of bpf/include/job_slots.h."""

    _fields_ = [
        ("hierarchy", ctypes.c_uint32),
        ("hierarchy_id", ctypes.c_uint32),
        ("counters", ctypes.c_uint32),
        ("cpus", ctypes.c_uint32),
    ]


class Event(NamedTuple):
    """One lifecycle event."""

    kind: int
    hierarchy_id: int
    cgroup: int  # cgroup id
    slot: int  # given by the kernel side; 0: none
    inherited: bool  # the slot is the job's of the cgroup above
    pid: int
    path: str  # in its hierarchy; "" when it did not fit


class Losses(NamedTuple):
    """Counts kept by the kernel side."""

    submitted: int
    lost: int
    slots_short: int
    moves: int
    renames: int


def decode(record: bytes) -> Event | None:
    """An event from a ring buffer record; None when it is cut short."""
    if len(record) < _EVENT.size:
        return None
    cgroup, kind, hierarchy, slot, inherited, pid, size = _EVENT.unpack_from(record)
    path = record[_EVENT.size : _EVENT.size + max(0, size - 1)]
    # A path that fills the buffer may have been cut: better none than a wrong one.
    text = "" if size >= 1023 else os.fsdecode(path)
    return Event(kind, hierarchy, cgroup, slot, bool(inherited), pid, text)


class Lifecycle:
    """The loaded `task_lifecycle` programs."""

    def __init__(self, hierarchy: str, hierarchy_id: int, handle: Callable[[Event], None]) -> None:
        """Load for jobs told apart in `hierarchy` (of HIERARCHIES); events go to `handle` on consume()."""
        self.hierarchy = hierarchy
        self.configuration = Configuration(HIERARCHIES.index(hierarchy), hierarchy_id, 0, cpus.count())
        self._object = libbpf.load_shrinking(self._set_up)
        try:
            self._rows = self._object.maps["totals"].mapped(MAX_SLOTS * ROW_SIZE)
            self._losses = self._object.maps["losses"].mapped(_LOSSES.size)
            self._put_up = 0
            self.unassigned = 0  # cgroups for which the kernel's table had no room
            self.slots = Slots(MAX_SLOTS, 24, self.row)
            self.put_up()

            def received(record: bytes) -> None:
                event = decode(record)
                if event is None:
                    return
                try:
                    handle(event)
                except Exception:  # it would vanish in the C code that calls this
                    _log.exception("lifecycle event %r could not be handled", event)

            self._ring = libbpf.RingBuffer(self._object.maps["lifecycle_events"], received)
            for program in self._object.programs.values():
                program.attach()
        except BaseException:
            self._object.close()
            raise
        self.fd = self._ring.fd

    def _set_up(self, divisor: int) -> libbpf.Object:
        made = libbpf.Object("task_lifecycle")
        made.configure(self.configuration)
        made.resize("lifecycle_events", _RING_SIZE // divisor)
        return made

    @property
    def maps(self) -> dict[str, libbpf.Map]:
        """For objects that share `totals` and `slots`."""
        return self._object.maps

    @property
    def given(self) -> Collection[int]:
        """Accounting slots that are not free."""
        return self.slots.given

    @property
    def programs(self) -> dict[str, libbpf.Program]:
        """By name."""
        return self._object.programs

    def row(self, slot: int) -> tuple[int, ...]:
        """The kernel's totals of `slot`: see the indices RUN_NS … and COUNTERS."""
        return ROW.unpack_from(self._rows, slot * ROW_SIZE)

    def changes(self, slot: int) -> int:
        """A number that grows whenever the slot's list of processes may have changed."""
        return int.from_bytes(
            self._rows[slot * ROW_SIZE + CHANGES * 8 : slot * ROW_SIZE + CHANGES * 8 + 8], "little"
        )

    def losses(self) -> Losses:
        """The kernel side's counts."""
        return Losses(*_LOSSES.unpack_from(self._losses))

    def consume(self) -> int:
        """Handle all events there are; returns their number."""
        return self._ring.consume()

    def take(self) -> int:
        """A free slot for a cgroup that exists already; raises UnavailableError when none is left."""
        slot = self.slots.take()
        self._allow_execs(slot)
        return slot

    def taken(self) -> None:
        """The kernel has taken one of the slots that lay ready; lay another in its place."""
        self._put_up -= 1
        self.put_up()

    def put_up(self) -> None:
        """Lay slots ready until PUT_UP lie there, as far as there are free ones."""
        while self._put_up < PUT_UP and len(self.slots):
            self._object.maps["free_slots"].update(None, self.take().to_bytes(4, "little"))
            self._put_up += 1

    def assign(self, cgroup: int, slot: int) -> None:
        """From now on `cgroup`, and cgroups made below it, are accounted in `slot`.

        Where the kernel's table of cgroups is full it is left to no job, and counted.
        """
        try:
            self._object.maps["slots"].update(cgroup.to_bytes(8, "little"), struct.pack("=II", slot, 1))
        except libbpf.BpfError as error:
            if error.errno != errno.E2BIG:
                raise
            self.unassigned += 1

    def forget(self, cgroup: int) -> None:
        """`cgroup` is gone, or no job's."""
        self._object.maps["slots"].delete(cgroup.to_bytes(8, "little"))

    def merge(self, slot: int, heir: int) -> None:
        """`slot` was not needed: what it has run up, and what CPUs still charge to it, goes to `heir`."""
        self.slots.retire(slot, heir)

    def end(self, slot: int) -> None:
        """The job of `slot` has had its last record."""
        self.slots.end(slot)

    def moves(self) -> int:
        """A number that grows whenever a process was moved between cgroups."""
        return self.losses().moves

    def _allow_execs(self, slot: int) -> None:
        limit = self.row(slot)[EXECS] + EXECS_REPORTED
        struct.pack_into("=Q", self._rows, slot * ROW_SIZE + _EXEC_LIMIT_OFFSET, limit)

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self._ring.close()
        self._object.close()
