"""CPUs that go and come while jobs run on them: nothing is lost, nothing is counted twice.

    cpus.py [hook | owned | late]...

The accounting is driven directly, tick by tick. Software events stand in for hardware counters, but for
cycles where this machine counts them. Ends with an assertion when a figure is wrong.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expanse_ebpf.config import COUNTERS, Config, CpuConfig
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import lifecycle as kernel
from expanse_ebpf.kernel import perf
from expanse_ebpf.kernel.cpus import POSSIBLE, online
from expanse_ebpf.kernel.slots import SLOT_OVERFLOW, SLOT_SYSTEM
from expanse_ebpf.sources import Context
from expanse_ebpf.sources.cpu import CpuSource
from expanse_ebpf.wire.collector_pb2 import Counters, JobIdentity, Report

CGROUPS = Path("/sys/fs/cgroup")
FAULTS = 2  # its place among the counters
SPECS = [
    perf.SOFTWARE[name]
    for name in ("cpu-clock", "task-clock", "page-faults", "context-switches", "cpu-migrations")
]
if not perf.self_test(["cycles"])["cycles"]:
    SPECS[0] = perf.HARDWARE["cycles"]
# Works, touches fresh pages and sleeps, so that it is pushed from CPU to CPU and switches often.
WORK = """
import mmap, os, sys, time
open(sys.argv[1] + "/cgroup.procs", "w").write("0")
while True:
    with mmap.mmap(-1, 4096 * 50) as pages:
        for i in range(50):
            pages[i * 4096] = 1
    for i in range(3000): pass
    time.sleep(0.001 * os.cpu_count())
"""


def switch(cpu: int, on: bool) -> None:
    """Bring a CPU in or take it out."""
    Path(f"/sys/devices/system/cpu/cpu{cpu}/online").write_text("1" if on else "0")


def run_queues() -> dict[int, tuple[int, int]]:
    """(ns that tasks ran, times a task came) since boot, by CPU; those that are offline are not shown."""
    lines = Path("/proc/schedstat").read_text().splitlines()
    rows = [line.split() for line in lines if line.startswith("cpu")]
    return {int(row[0][3:]): (int(row[7]), int(row[9])) for row in rows}


def grown(now: dict[int, tuple[int, int]], then: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """What `run_queues` grew by on all CPUs."""
    return sum(now[cpu][0] - then[cpu][0] for cpu in now), sum(now[cpu][1] - then[cpu][1] for cpu in now)


def all_switches() -> int:
    """Switches of all CPUs since boot, offline ones and those away from the idle tasks included."""
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("ctxt")))


def switches_of_tasks() -> dict[str, int]:
    """How often each task that is there has left a CPU. None of those here has a second thread."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(FileNotFoundError, ProcessLookupError):
            counts = re.findall(r"^\w*voluntary_ctxt_switches:\s(\d+)$", status.read_text(), re.MULTILINE)
            found[status.parent.name] = sum(map(int, counts))
    return found


def events_open(pid: int | str = "self") -> int:
    """How many descriptors of perf events the process has."""
    found = 0
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found += "perf_event" in str(entry.readlink())
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


class Bounds:
    """What all CPUs together count at least and at most, from events opened after and before ours."""

    def __init__(self) -> None:
        self.low = [0] * len(SPECS)
        self.high = [0] * len(SPECS)
        self._after: dict[tuple[int, int], int] = {}
        self._before: dict[tuple[int, int], int] = {}

    @staticmethod
    def _add(to: list[int], events: dict[tuple[int, int], int], cpus: list[int]) -> None:
        for i, cpu in [key for key in events if key[1] in cpus]:
            fd = events.pop((i, cpu))
            to[i] += perf.read_counter(fd).value
            os.close(fd)

    @staticmethod
    def _begin(events: dict[tuple[int, int], int], cpus: list[int]) -> None:
        for i, spec in enumerate(SPECS):
            for cpu in cpus:
                events[i, cpu] = perf.open_counter(spec, cpu)

    @contextmanager
    def around(self, cpus: list[int]) -> Iterator[None]:
        """In this block the collector opens its events on these CPUs."""
        for to, events in ((self.low, self._after), (self.high, self._before)):
            self._add(to, events, cpus)
        self._begin(self._before, cpus)
        yield
        self._begin(self._after, cpus)

    def ended(self, tick: Callable[[], None]) -> None:
        """The collector's last tick."""
        everywhere = sorted({cpu for _, cpu in self._after})
        self._add(self.low, self._after, everywhere)
        tick()
        self._add(self.high, self._before, everywhere)

    @property
    def descriptors(self) -> int:
        return len(self._after) + len(self._before)


class Watched:
    """The CPU source at work on some jobs; every tick is held against the one before."""

    def __init__(self, names: list[str], cpusets: dict[str, str]) -> None:
        self.groups = [CGROUPS / f"test-expanse-{name}" for name in names]
        for name, group in zip(names, self.groups, strict=True):
            group.mkdir()
            if name in cpusets:
                (group / "cpuset.cpus").write_text(cpusets[name])
        self.lifecycle = kernel.Lifecycle("unified", 0, lambda _: None)
        self.jobs = []
        for group in self.groups:
            slot = self.lifecycle.take()
            self.lifecycle.assign(group.stat().st_ino, slot)
            self.jobs.append(Job(JobIdentity(), {"unified": str(group)}, slot=slot))
        # Their statistics patch the kernel's code now and then, which is not what is looked at here.
        config = Config(cpu=CpuConfig(bpf_stats="off"))
        self.source = CpuSource(Context(config, self.lifecycle), SPECS)
        self.bounds = Bounds()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.ticks = 0
        self.mode = ""
        self._last: list[Counters] = []
        self._at = 0.0
        self._cpus = len(online(POSSIBLE))

    def start(self) -> None:
        with self.bounds.around(online()):
            self.source.start()
        self.first = run_queues()
        self.tick()
        self._total = self.total()
        self.second = run_queues()

    def work(self, group: int, count: int) -> None:
        for _ in range(count):
            command = [sys.executable, "-S", "-c", WORK, str(self.groups[group])]
            self.processes.append(subprocess.Popen(command))

    def tick(self) -> Report:
        report = Report()
        now = time.monotonic()
        self.source.sample(now, [(job, report.jobs.add()) for job in self.jobs], report)
        self.ticks += 1
        self.mode = report.collector.cpu_mode
        figures = [*(sample.counters for sample in report.jobs), report.host.system, report.host.overflow]
        ran = 0
        for then, these in zip(self._last, figures, strict=False):
            for field, value in these.ListFields():
                if field.name not in COUNTERS:
                    grown = value - getattr(then, field.name)
                    assert grown >= 0, (field.name, grown)
                    ran += grown if field.name == "run_ns" and then.HasField("run_ns") else 0
                else:
                    grown = value.value - getattr(then, field.name).value
                    assert grown >= 0, (field.name, grown)
                    assert 0 < value.running_ratio <= 1
        if self._last:
            passed = time.monotonic() - self._at
            assert ran / 1e9 <= self._cpus * 1.05 * passed, f"{ran / 1e9} s of run time in {passed} s"
        self._last, self._at = figures, now
        assert "reads" not in self.source.unavailable, self.source.unavailable
        return report

    def total(self) -> list[int]:
        """All figures, added up over the jobs and what belongs to none. CPUs add to them all the time."""
        slots = [SLOT_SYSTEM, SLOT_OVERFLOW, *(job.slot for job in self.jobs)]
        totals = [self.lifecycle.slots.total(slot) for slot in slots]
        return [sum(column) for column in zip(*totals, strict=True)]

    def _booked(self) -> int:
        """Switches that are booked, those on all CPUs that are online up to now."""
        accounting = self.source._accounting
        assert accounting is not None
        accounting.flush()
        return self.total()[kernel.SWITCHES]

    def quiet(self) -> tuple[int, dict[str, int], int]:
        """Switches that are booked, those of each task, and again those booked, while next to none happens.

        The jobs rest; what is on a CPU that is offline must have been booked when it went.
        """
        for process in self.processes:
            process.send_signal(signal.SIGSTOP)
        tries = []
        for _ in range(30):
            time.sleep(0.05)
            before = all_switches()
            reading = self._booked(), switches_of_tasks(), self._booked()
            tries.append((all_switches() - before, reading))
            if not tries[-1][0]:
                break
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        most, reading = min(tries, key=lambda one: one[0])
        print(f"at rest but for {most} switches at the most")
        return reading

    def booked_since(self, then: tuple[int, dict[str, int], int]) -> None:
        """Every switch away from a task since `then` is booked."""
        low, tasks, high = self.quiet()
        left = sum(count - then[1].get(task, 0) for task, count in tasks.items())
        gone = then[1].keys() - tasks.keys()
        low, high = low - then[2], high - then[0]
        print(f"with CPUs {online()} alone: {low} to {high} booked, tasks left {left} times; gone: {gone}")
        assert 100 < left <= high
        assert gone or low <= left

    def descriptors(self) -> None:
        """One event per counter and CPU that is online, and all of them count."""
        events = self.source._events
        assert events is not None
        wanted = {(spec.name, cpu) for spec in SPECS for cpu in online()}
        assert set(events.descriptors) == wanted, set(events.descriptors) ^ wanted
        assert events_open() == len(wanted) + self.bounds.descriptors
        before = {key: perf.read_counter(fd).enabled_ns for key, fd in events.descriptors.items()}
        time.sleep(0.05)  # an emulated CPU's clock may stand still between two of its ticks
        dead = [
            key for key, fd in events.descriptors.items() if perf.read_counter(fd).enabled_ns <= before[key]
        ]
        assert not dead, f"these count no more: {dead}"

    def check(self, *, ran: bool = True, counters: bool = True) -> None:
        """Sums against what the kernel and our own events say, all CPUs being online."""
        total: list[int] = []

        def last() -> None:
            self.tick()
            total.extend(self.total())

        before = run_queues()
        self.bounds.ended(last)
        after = run_queues()
        rise = [b - a for a, b in zip(self._total, total, strict=True)]
        low, high = grown(before, self.second), grown(after, self.first)
        # What has come and not left yet is not counted: one task per CPU at either end.
        print(f"switches {rise[kernel.SWITCHES]}, {low[1]} to {high[1]}")
        assert 100 < low[1] - self._cpus <= rise[kernel.SWITCHES] <= high[1] + self._cpus
        for i, spec in enumerate(SPECS if counters else []):
            counted = total[kernel.COUNTERS + 3 * i]
            print(f"{spec.name} {counted}, {self.bounds.low[i]} to {self.bounds.high[i]}")
            assert 0 < self.bounds.low[i] <= counted <= self.bounds.high[i], spec.name
        if ran:
            print(f"ran {rise[kernel.RUN_NS] / 1e9:.3f} s, {low[0] / 1e9:.3f} to {high[0] / 1e9:.3f} s")
            slack = 0.03 * high[0] + 5e7 * self._cpus  # interrupts; what runs now is in one of the two
            assert low[0] - slack < rise[kernel.RUN_NS] < high[0] + slack

    def close(self) -> None:
        for process in self.processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
        self.source.stop()
        self.lifecycle.close()


def again(watched: Watched, cpu: int, seconds: float = 0.2) -> None:
    """`cpu` has just come: the tick that finds it, and one more."""
    with watched.bounds.around([cpu]):
        watched.tick()
    assert str(cpu) in watched.source.unavailable["cpus"]
    watched.descriptors()
    time.sleep(seconds)
    watched.tick()
    assert "cpus" not in watched.source.unavailable, watched.source.unavailable


def hook(cpu: int) -> None:
    watched = Watched(["a", "b"], {})
    try:
        watched.start()
        watched.work(0, len(online()) - 1)
        watched.work(1, 1)
        for _ in range(3):
            time.sleep(0.3)
            watched.tick()
        watched.descriptors()
        for _ in range(2):  # seen to go and to come
            then = watched.quiet()
            time.sleep(0.3)
            switch(cpu, False)
            time.sleep(0.4)
            watched.tick()
            watched.booked_since(then)
            watched.descriptors()
            time.sleep(0.2)
            watched.tick()
            switch(cpu, True)
            again(watched, cpu)
        for _ in range(3):  # gone and back between two ticks
            switch(cpu, False)
            time.sleep(0.1)
            switch(cpu, True)
            again(watched, cpu)
        watched.check()

        flips = "for i in 1 2 3 4 5 6; do echo 0 >$0; echo 1 >$0; done"
        file = f"/sys/devices/system/cpu/cpu{cpu}/online"
        flipping = subprocess.Popen(["bash", "-c", flips, file])
        while flipping.poll() is None:  # ticks anywhere in between
            watched.tick()
            time.sleep(0.02)
        assert flipping.returncode == 0
        watched.tick()
        watched.descriptors()
        watched.check(counters=False)
    finally:
        watched.close()


def late(cpu: int) -> None:
    """The collector begins while a CPU is offline, or was never online."""
    before = run_queues()
    never = set(online(POSSIBLE)) - set(online())
    if never:  # has not been online since boot
        cpu = min(never)
        before[cpu] = (0, 0)
    else:
        switch(cpu, False)
    watched = Watched(["c"], {})
    try:
        watched.start()
        watched.descriptors()
        watched.work(0, 3)
        time.sleep(0.3)
        watched.tick()
        switch(cpu, True)
        watched.first[cpu], watched.second[cpu] = before[cpu], run_queues()[cpu]
        again(watched, cpu, 1)
        watched.check(ran=False)
    finally:
        watched.close()


def owned(cpu: int) -> None:
    """With CPUs that jobs own, and no switch hook."""
    (CGROUPS / "cgroup.subtree_control").write_text("+cpuset")
    watched = Watched(["d", "e"], {"d": str(cpu - 1), "e": str(cpu)})
    try:
        watched.start()
        watched.work(0, 1)
        watched.work(1, 2)
        settle(watched)
        place, owner = kernel.COUNTERS + 3 * FAULTS, watched.jobs[1].slot
        for gone in (True, False):
            booked = watched.lifecycle.slots.total(owner)[place]
            events = watched.source._events
            assert events is not None
            mine = perf.open_counter(SPECS[FAULTS], cpu)
            time.sleep(0.5)
            switch(cpu, False)
            if gone:
                watched.tick()
                assert watched.mode == "hook"
                time.sleep(0.2)
                watched.tick()
            switch(cpu, True)
            with watched.bounds.around([cpu]):
                watched.tick()
            # All that the CPU counted up to its end is its owner's.
            last = perf.read_counter(mine).value
            os.close(mine)
            print(f"faults {watched.lifecycle.slots.total(owner)[place] - booked} of {last}")
            assert 0 < last <= watched.lifecycle.slots.total(owner)[place] - booked
            watched.descriptors()
            settle(watched)
        watched.check(ran=False)
    finally:
        watched.close()


def settle(watched: Watched) -> None:
    """Until the hook is off: jobs that have CPUs of their own are looked for again."""
    for _ in range(40):
        watched.tick()
        if watched.mode == "owned":
            return
        time.sleep(0.1)
    raise AssertionError("the hook is still on")


def main(kinds: list[str]) -> None:
    for kind in kinds:
        print(os.uname().release, kind, flush=True)
        {"hook": hook, "late": late, "owned": owned}[kind](online()[-1])
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
