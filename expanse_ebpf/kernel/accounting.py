"""CPU events per slot: the loaded `cpu_accounting` programs and the hardware counters they read."""

from __future__ import annotations

import ctypes
import errno
import struct
from collections.abc import Mapping, Sequence

from expanse_ebpf.kernel import cpus, libbpf
from expanse_ebpf.kernel.lifecycle import COUNTERS, Configuration, Lifecycle
from expanse_ebpf.kernel.perf import Reading

# struct cpu_state of bpf/cpu_accounting.bpf.c.
_STATE_SIZE = 256
_DELAY_ROWS = 65536  # DELAY_ROWS there; with fewer, some pulled tasks' waits are missed
_SLOT_OFFSET = 8
_ERRORS_OFFSET = 104
_PENDING_OFFSET = 112
_OWNED_OFFSET = 116
_EVENTS_LOST_OFFSET = 120
_COUNTERS_OFFSET = 136
_CGROUP_AND_SLOT = struct.Struct("=QI")
_COUNTER = struct.Struct("=3Q")
_U32 = struct.Struct("=I")
_U64 = struct.Struct("=Q")


class Accounting:
    """Charges CPU events to the slots of `lifecycle`; hook off until attach()."""

    def __init__(self, lifecycle: Lifecycle, counters: Sequence[Mapping[int, int]] = ()) -> None:
        """`counters[i]` maps CPU to the perf event descriptor of counter i; an empty mapping: not open."""
        self._lifecycle = lifecycle
        configuration = Configuration.from_buffer_copy(lifecycle.configuration)
        self._cpus = configuration.cpus
        configuration.counters = sum(1 << i for i, fds in enumerate(counters) if fds)

        def set_up(divisor: int) -> libbpf.Object:
            made = libbpf.Object("cpu_accounting")
            made.configure(configuration)
            made.share(lifecycle.maps["totals"])
            made.share(lifecycle.maps["slots"])
            made.resize("cpus", self._cpus)
            made.resize("events", max(1, len(counters) * self._cpus))
            made.resize("delays", _DELAY_ROWS // divisor)
            return made

        self._object = libbpf.load_shrinking(set_up)
        try:
            for i, fds in enumerate(counters):
                for cpu, fd in fds.items():
                    self.set_event(i, cpu, fd)
            self._states = self._object.maps["cpus"].mapped(_STATE_SIZE * self._cpus)
            self._hotplugs = self._object.maps["hotplugs"].mapped(_U64.size)
            self._object.programs["on_migrate"].attach()
            self._object.programs["on_hotplug"].attach()
        except BaseException:
            self._object.close()
            raise
        self._hook = self._object.programs["on_switch"]
        self.online = cpus.online()  # to be kept up to date by the owner

    def set_event(self, counter: int, cpu: int, fd: int) -> None:
        """Counter number `counter` of `cpu` is read from perf event `fd` from now on."""
        self._object.maps["events"].update(_U32.pack(counter * self._cpus + cpu), _U32.pack(fd))

    def end_events(self, cpu: int, last: Mapping[int, Reading | None]) -> None:
        """The perf events of `cpu` have died; `last`: what each counter stood at, None where that is unknown.

        Books what was not charged yet. Those that are set next are taken to have begun at 0.
        """
        for i in last:
            self._object.maps["events"].delete(_U32.pack(i * self._cpus + cpu))
        # Where the CPU is back, nothing is in the middle of reading one of them after this.
        self._flush_cpu(self._flush_program, cpu)
        slot = self.slot(cpu)
        rest = [0] * len(self._lifecycle.row(slot))
        for i, reading in last.items():
            place = cpu * _STATE_SIZE + _COUNTERS_OFFSET + i * _COUNTER.size
            if reading is not None:
                charged = _COUNTER.unpack_from(self._states, place)
                at = COUNTERS + 3 * i
                rest[at : at + 3] = [max(0, now - then) for now, then in zip(reading, charged, strict=True)]
            _COUNTER.pack_into(self._states, place, 0, 0, 0)
        self._lifecycle.slots.carry(slot, rest)

    @property
    def hotplugs(self) -> int:
        """A number that grows whenever a CPU has come or gone."""
        return int(_U64.unpack_from(self._hotplugs)[0])

    def events_lost(self) -> list[int]:
        """For each CPU that can exist a number that grows whenever its perf events may have died."""
        return [
            _U32.unpack_from(self._states, cpu * _STATE_SIZE + _EVENTS_LOST_OFFSET)[0]
            for cpu in range(self._cpus)
        ]

    @property
    def programs(self) -> dict[str, libbpf.Program]:
        """By name."""
        return self._object.programs

    @property
    def hooked(self) -> bool:
        """Whether the scheduler hook is on."""
        return self._hook.attached

    def attach(self) -> None:
        """Charge at every crossing between jobs."""
        self.flush()
        self._set_owned(0)
        for cpu in set(range(self._cpus)) - set(self.online):
            _CGROUP_AND_SLOT.pack_into(self._states, cpu * _STATE_SIZE, 0, 0)
        self._hook.attach()

    def detach(self) -> None:
        """Charge CPUs by owner alone (see own())."""
        self.flush()
        self._hook.detach()
        self._set_owned(1)

    def _set_owned(self, owned: int) -> None:
        for cpu in range(self._cpus):
            _U32.pack_into(self._states, cpu * _STATE_SIZE + _OWNED_OFFSET, owned)

    def own(self, slots: Mapping[int, int]) -> None:
        """With the hook off: CPU to the slot of the job that owns it; all others belong to no job."""
        self.flush()
        for cpu in range(self._cpus):
            # No cgroup: with the hook back, whatever comes first is looked up.
            _CGROUP_AND_SLOT.pack_into(self._states, cpu * _STATE_SIZE, 0, slots.get(cpu, 0))

    def flush(self) -> int:
        """Charge all CPUs that ran anything since the last time; returns how many."""
        program = self._flush_program
        self._object.programs["scan"].run()
        count = 0
        for cpu in self.online:
            if _U32.unpack_from(self._states, cpu * _STATE_SIZE + _PENDING_OFFSET)[0]:
                count += self._flush_cpu(program, cpu)
        return count

    @property
    def _flush_program(self) -> libbpf.Program:
        return self._object.programs["flush" if self._hook.attached else "flush_owned"]

    def release(self, retired: Sequence[int]) -> None:
        """Make CPUs that were last on one of these slots look again, idle or not."""
        if not retired or not self._hook.attached:
            return
        for cpu in range(self._cpus):
            if self.slot(cpu) in retired:
                self._flush_cpu(self._object.programs["flush"], cpu)

    def slot(self, cpu: int) -> int:
        """The slot that `cpu` is charging to."""
        return int(_U32.unpack_from(self._states, cpu * _STATE_SIZE + _SLOT_OFFSET)[0])

    def in_use(self) -> set[int]:
        """Slots that some CPU is charging to."""
        return {self.slot(cpu) for cpu in range(self._cpus)}

    def read_errors(self) -> int:
        """Readings of hardware counters that failed."""
        return sum(
            _U64.unpack_from(self._states, cpu * _STATE_SIZE + _ERRORS_OFFSET)[0] for cpu in range(self._cpus)
        )

    def _flush_cpu(self, program: libbpf.Program, cpu: int) -> int:
        try:
            program.run(cpu)
        except libbpf.BpfError as error:
            if error.errno != errno.ENXIO:  # it went offline just now
                raise
            return 0
        return 1

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self._object.close()


assert ctypes.sizeof(Configuration) == 16
