"""CPU events per job, from the kernel's accounting slots.

Two ways of charging. With the scheduler hook, at every crossing between jobs. Where each job has CPUs
that no other job may use (cpusets), without any hook: what those CPUs count is their owner's.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from expanse_ebpf.config import COUNTERS
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import cpus, libbpf, perf
from expanse_ebpf.kernel import lifecycle as kernel
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.slots import SLOT_OVERFLOW, SLOT_SYSTEM, Slots

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import Counters, JobSample, Report

HARDWARE = tuple(perf.HARDWARE[name] for name in COUNTERS)
_NOT_OWNED = "its CPUs are counted without the scheduler hook, which alone tells these apart"
_NOT_COUNTED = "no counter register was free while it ran: more events are open than the PMU counts at once"
_RECHECK_TICKS = 15  # how often cpusets are read again, and CPUs that could not be counted tried


def create(context: Context) -> CpuSource:
    """The source, not started yet."""
    return CpuSource(context)


class CpuSource:
    """Source "cpu"."""

    name = "cpu"

    def __init__(self, context: Context, specs: Sequence[perf.EventSpec] = HARDWARE) -> None:
        """`specs` are the events behind the five hardware counters, by position in COUNTERS."""
        self._config = context.config.cpu
        self._overflow = context.overflow
        self._lifecycle = context.lifecycle
        self._why_no_bpf = context.why_no_bpf
        self._specs = specs
        self.unavailable: dict[str, str] = {}
        self.mode = "off"
        self._accounting: Accounting | None = None
        self._events: perf.OpenCounters | None = None
        self._scaled: dict[int, _Scaled] = {}
        self._owned: dict[int, int] = {}
        self._ticks = 0
        self._hotplugs = 0
        self._events_lost: list[int] = []
        self._cost = _ProgramCost(self._config.bpf_stats, self._config.bpf_stats_every)

    def start(self) -> None:
        """Load the accounting program and open the counters."""
        if self._lifecycle is None:
            raise UnavailableError(self._why_no_bpf)
        wanted = [s for name, s in zip(COUNTERS, self._specs, strict=True) if name in self._config.counters]
        for name in COUNTERS:
            if name not in self._config.counters:
                self.unavailable[name] = "switched off (cpu.counters)"
        hardware = [spec.name for spec in wanted if spec.type == perf.TYPE_HARDWARE]
        refused = {name: why for name, why in perf.self_test(hardware).items() if why} if hardware else {}
        self._events = perf.open_on_cpus([s for s in wanted if s.name not in refused], cpus.online())
        refused |= self._events.refused
        for name, spec in zip(COUNTERS, self._specs, strict=True):
            if spec.name in refused:
                self.unavailable[name] = refused[spec.name]
        self._accounting = Accounting(self._lifecycle, [self._descriptors(spec) for spec in self._specs])
        self._hotplugs, self._events_lost = -1, self._accounting.events_lost()  # the first tick looks
        self._accounting.attach()
        self.mode = "hook"
        self._cost.programs = {**self._lifecycle.programs, **self._accounting.programs}

    def _descriptors(self, spec: perf.EventSpec) -> dict[int, int]:
        assert self._events is not None
        return {cpu: fd for (name, cpu), fd in self._events.descriptors.items() if name == spec.name}

    def jobs_changed(self) -> None:
        """A job has come: until its CPUs are known to be its own, everything is charged by the hook."""
        if self._accounting is not None and self.mode == "owned":
            self._accounting.attach()
            self.mode = "hook"
            self._ticks = 0

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Bring all slots up to date and fill in `JobSample.counters`."""
        accounting, lifecycle = self._accounting, self._lifecycle
        assert accounting is not None
        assert lifecycle is not None
        slots = lifecycle.slots
        self._follow_cpus()
        accounting.flush()
        accounting.release(tuple(slots.retired))
        slots.settle(accounting.in_use())
        for job, sample in jobs:
            if job.slot is None:
                sample.unavailable["counters"] = "no accounting slot was free"
                continue
            for name in self._fill(job.slot, slots.total(job.slot), sample.counters):
                sample.unavailable[name] = _NOT_COUNTED
            if self.mode == "hook":
                sample.cpu_ns = sample.counters.run_ns  # a CPU cgroup, where there is one, knows better
            else:
                sample.owns_cpus = True
                sample.unavailable["run_queue_wait_ns"] = _NOT_OWNED
        self._fill(SLOT_SYSTEM, slots.total(SLOT_SYSTEM), report.host.system)
        self._fill(SLOT_OVERFLOW, self._overflow_total(slots), report.host.overflow)
        for slot in self._scaled.keys() - {job.slot for job, _ in jobs} - {SLOT_SYSTEM, SLOT_OVERFLOW}:
            del self._scaled[slot]
        self._choose_mode([job for job, _ in jobs])
        collector = report.collector
        collector.cpu_mode = self.mode
        try:
            self._cost.tick()
        except libbpf.BpfError as error:
            self.unavailable["program statistics"] = f"{error}; grant CAP_SYS_ADMIN, or cpu.bpf_stats = 'off'"
        self._cost.fill(report)
        losses = lifecycle.losses()
        collector.events_submitted, collector.events_lost = losses.submitted, losses.lost
        collector.slots_exhausted = losses.slots_short + lifecycle.unassigned
        errors = accounting.read_errors()
        if errors:
            self.unavailable["reads"] = f"{errors} readings of hardware counters failed"

    def _overflow_total(self, slots: Slots) -> list[int]:
        total = slots.total(SLOT_OVERFLOW)
        for job in self._overflow:
            if job.slot is not None:
                total = [a + b for a, b in zip(total, slots.total(job.slot), strict=True)]
        return total

    def _fill(self, slot: int, total: Sequence[int], counters: Counters) -> list[str]:
        """Set `counters` to what the slot's `total` says; the hardware counters that it says nothing of."""
        counters.context_switches = total[kernel.SWITCHES]
        counters.migrations = total[kernel.MIGRATIONS]
        counters.forks = total[kernel.FORKS]
        counters.execs = total[kernel.EXECS]
        if self.mode == "hook":
            counters.run_ns = total[kernel.RUN_NS]
            counters.run_queue_wait_ns = total[kernel.WAIT_NS]
            counters.page_faults = total[kernel.PAGE_FAULTS]
        scaled = self._scaled.setdefault(slot, _Scaled())
        not_counted = []
        for i, name in enumerate(COUNTERS):
            if name not in self.unavailable:
                at = kernel.COUNTERS + 3 * i
                value = scaled.update(i, total[at], total[at + 1], total[at + 2])
                if value is None:
                    not_counted.append(name)
                else:
                    target = getattr(counters, name)
                    target.value, target.running_ratio = value
        return not_counted

    def _follow_cpus(self) -> None:
        """Open the counters of CPUs that came since the last tick, give up those of CPUs that went."""
        accounting, events = self._accounting, self._events
        assert accounting is not None
        assert events is not None
        came: list[int] = []
        hotplugs = accounting.hotplugs
        if hotplugs != self._hotplugs or (events.missing and self._ticks % _RECHECK_TICKS == 2):
            self._hotplugs = hotplugs
            came = self._renew_events(accounting, events)
        if events.missing:
            why = f"{len(events.missing)} CPUs are not counted: {next(iter(events.missing.values()))}"
            self.unavailable["cpus"] = why
        elif came:
            self.unavailable["cpus"] = f"just online, and counted from now on: {', '.join(map(str, came))}"
        else:
            self.unavailable.pop("cpus", None)

    def _renew_events(self, accounting: Accounting, events: perf.OpenCounters) -> list[int]:
        lost, online = accounting.events_lost(), cpus.online()
        dead = {cpu for cpu, (a, b) in enumerate(zip(self._events_lost, lost, strict=True)) if a != b}
        for cpu in dead | (set(accounting.online) - set(online)):
            last: dict[int, perf.Reading | None] = {}
            for i, spec in enumerate(self._specs):
                if (spec.name, cpu) in events.descriptors:
                    last[i] = None
                    with suppress(OSError):
                        last[i] = perf.read_counter(events.descriptors[spec.name, cpu])
            accounting.end_events(cpu, last)
        self._events_lost = lost
        if online != accounting.online:
            accounting.online = online
            self.jobs_changed()  # where they may run has changed with it
        came = events.update(online, dead)
        for cpu in came:
            for i, spec in enumerate(self._specs):
                if (spec.name, cpu) in events.descriptors:
                    accounting.set_event(i, cpu, events.descriptors[spec.name, cpu])
        return came

    def _choose_mode(self, jobs: Sequence[Job]) -> None:
        """Charge by the hook, or by owners where all jobs have CPUs of their own."""
        self._ticks += 1
        if self._ticks % _RECHECK_TICKS != 2:  # early, so that a settled node drops its hook soon
            return
        accounting = self._accounting
        assert accounting is not None
        owners = owned_cpus(jobs, accounting.online) if self._config.mode != "hook" else None
        if owners is None:
            if self.mode == "owned":
                accounting.attach()
                self.mode = "hook"
        elif self.mode != "owned" or owners != self._owned:
            accounting.detach()
            accounting.own(owners)
            self.mode, self._owned = "owned", owners

    def stop(self) -> None:
        """Close everything; safe to call twice."""
        self._cost.close()
        if self._accounting is not None:
            self._accounting.close()
            self._accounting = None
        if self._events is not None:
            self._events.close()
            self._events = None
        self.mode = "off"


class _Scaled:
    """One slot's hardware counters, each tick's growth scaled by how long it was really counted."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}
        self._total: dict[int, float] = {}

    def update(self, i: int, value: int, enabled: int, running: int) -> tuple[int, float] | None:
        """(scaled total, running/enabled of this tick); None while the counter never ran."""
        was_value, was_enabled, was_running = self._last.get(i, (0, 0, 0))
        grown, wanted, ran = value - was_value, enabled - was_enabled, running - was_running
        if wanted > 0 and ran <= 0:
            return None  # not counted in this tick: the next one that is counted stands for both
        ratio = ran / wanted if wanted > 0 else 1.0
        self._last[i] = (value, enabled, running)
        self._total[i] = self._total.get(i, 0.0) + (grown / ratio if ratio > 0 else 0.0)
        return round(self._total[i]), min(ratio, 1.0)


class _ProgramCost:
    """What the BPF programs cost, as measured by the kernel.

    Measuring costs some 40 ns on every run of every BPF program on the machine, so by default one
    tick in many is measured and stands for the others.
    """

    def __init__(self, when: str, every: int) -> None:
        self._when = when
        self._every = every
        self._ticks = 0
        self._fd: int | None = None
        self._since = 0
        self._measured_ns = 0
        self.programs: Mapping[str, libbpf.Program] = {}
        self._seen: dict[str, tuple[int, int]] = {}

    def tick(self) -> None:
        """Begin or end measuring, by the tick's number."""
        wanted = self._when == "always" or (self._when == "sampled" and self._ticks % self._every == 0)
        self._ticks += 1
        if self._fd is not None:
            self._measured_ns += time.monotonic_ns() - self._since
            self._since = time.monotonic_ns()
            self._seen = {name: program.statistics() for name, program in self.programs.items()}
        if wanted and self._fd is None:
            self._fd = libbpf.enable_statistics()
            self._since = time.monotonic_ns()
        elif not wanted and self._fd is not None:
            self.close()

    def fill(self, report: Report) -> None:
        """Add each program that has run."""
        for name, (ns, runs) in self._seen.items():
            report.collector.programs.add(name=name, run_ns=ns, runs=runs, measured_ns=self._measured_ns)

    def close(self) -> None:
        """Stop measuring."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


_CPUSET_FILES = {"unified": ("cpuset.cpus.effective",), "cpuset": ("cpuset.effective_cpus", "cpuset.cpus")}


def owned_cpus(jobs: Sequence[Job], online: Sequence[int]) -> dict[int, int] | None:
    """CPU to slot when every job has CPUs that no other job may use; None when one has not."""
    owners: dict[int, int] = {}
    for job in jobs:
        allowed = _cpuset(job)
        if job.slot is None or not allowed or len(allowed) >= len(online):
            return None
        for cpu in allowed:
            if owners.setdefault(cpu, job.slot) != job.slot:
                return None
    return owners or None


def _cpuset(job: Job) -> list[int]:
    for hierarchy, files in _CPUSET_FILES.items():
        for file in files:
            directory = job.directories.get(hierarchy)
            if directory is None:
                continue
            try:
                with open(f"{directory}/{file}", encoding="ascii", errors="replace") as source:
                    return cpus.parse_cpu_list(source.read(65536))
            except OSError:
                continue
    return []
