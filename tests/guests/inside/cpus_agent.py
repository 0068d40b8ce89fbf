"""The agent while CPUs go and come and clocks stop and jump: every report is held against the one before.

    cpus_agent.py [hotplug | stopped | stepped | asleep]...

Ends with an assertion when a figure is wrong. "stopped" waits for the whole machine to be stopped for a
while once it has written so.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from cpus import events_open, switch
from truth import until

from expanse_ebpf.config import COUNTERS
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.cpus import POSSIBLE, online
from expanse_ebpf.top import client
from expanse_ebpf.top.rates import Rates
from expanse_ebpf.wire.collector_pb2 import Counters, Report

INTERVAL_S = 0.5
INTERVAL_NS = INTERVAL_S * 1e9
SOCKET = "/run/expanse-ebpf/agent.sock"
COMMAND = "/opt/expanse-ebpf/bin/expanse-ebpf"
WORK = """
import mmap, os, threading, time
def work():
    while True:
        with mmap.mmap(-1, 4096 * 20) as pages:
            for i in range(20):
                pages[i * 4096] = 1
        for i in range(3000): pass
        time.sleep(0.002 * os.cpu_count())
for i in range(%d):
    threading.Thread(target=work).start()
"""


class Node:
    """The agent, two jobs, and the reports so far."""

    def __init__(self, threads: int) -> None:
        self.reports: list[Report] = []
        self.slept_ns = 0.0  # while suspended, when the kernel's clock stands
        command = [COMMAND, "agent", "--interval", str(INTERVAL_S), "--socket", SOCKET]
        self.agent = subprocess.Popen(command)
        self.jobs: list[subprocess.Popen[bytes]] = []
        until("the agent answers", lambda: Path(SOCKET).exists())
        threading.Thread(target=self._watch, daemon=True).start()
        self.more(2)
        for name in ("one", "two"):
            work = [sys.executable, "-S", "-c", WORK % threads]
            self.jobs.append(subprocess.Popen([COMMAND, "run", "--name", name, "--", *work]))
        until("both jobs are seen", lambda: len(self.reports[-1].jobs) == 2)
        self.events = [name for name in COUNTERS if self.reports[-1].host.system.HasField(name)]
        self.more(2)

    def _watch(self) -> None:
        with suppress(UnavailableError):  # at the end
            for report in client.watch(SOCKET):
                self.reports.append(report)

    def more(self, count: int) -> Report:
        """So many more reports, the last of them."""
        wanted = len(self.reports) + count
        until("more reports", lambda: len(self.reports) >= wanted)
        return self.reports[-1]

    def settled(self) -> None:
        """Two ticks on, descriptors and CPUs are as they must be."""
        report = self.more(2)
        assert report.host.cpus_online == len(online())
        # Emulated arm64 CPUs have a PMU. Emulated x86 ones have none, so there the next line says 0 == 0;
        # what becomes of descriptors on x86 is in cpus.py, with software events.
        assert self.events or os.uname().machine != "aarch64", dict(report.collector.sources[0].unavailable)
        # And the clock that samples Python stacks.
        assert events_open(self.agent.pid) == len(online()) * (len(self.events) + 1)
        (cpu,) = [source for source in report.collector.sources if source.name == "cpu"]
        assert cpu.up, cpu.reason
        assert set(cpu.unavailable) == set(COUNTERS) - set(self.events), dict(cpu.unavailable)

    def used(self) -> list[int]:
        """What the kernel says of the jobs' CPU time, in ns."""
        files = [
            Path(f"/sys/fs/cgroup{job.identity.cgroup}/cpu.stat") for job in sorted_jobs(self.reports[-1])
        ]
        return [int(file.read_text().split()[1]) * 1000 for file in files]

    def check(self) -> None:
        """All reports, from the first on."""
        before = self.used()
        last = self.more(2)
        after = self.used()
        for job, low, high in zip(sorted_jobs(last), before, after, strict=True):
            ran = job.counters.run_ns
            print(f"{job.identity.id} ran {ran / 1e9:.3f} s, {low / 1e9:.3f} to {high / 1e9:.3f} s")
            assert low * 0.97 - 5e7 <= ran <= high * 1.03 + 5e7
        possible = len(online(POSSIBLE))
        for then, now, following in zip(self.reports, self.reports[1:], self.reports[2:], strict=False):
            assert now.sequence == then.sequence + 1
            # The agent says which ticks it missed, and each other one began before the next was due.
            missed = following.collector.ticks_missed - then.collector.ticks_missed
            assert 0 < now.interval_ns < INTERVAL_NS * (3 + missed), (now.interval_ns, missed)
            # Taken somewhere in the tick, while the interval is from beginning to beginning.
            time_ns = now.interval_ns + following.collector.tick_ns
            of_none, *of_jobs = [b - a for a, b in pairs(then, now, "run_ns")]
            ran = sum(of_jobs)
            assert ran <= possible * 1.05 * time_ns, f"{ran} ns on {possible} CPUs in {time_ns} ns"
            # The scheduler's clock does not stand with the other while the machine is suspended, and is the
            # kernel's own measure of run time: the task that suspends it has run all the while. No job's has.
            over = ran + of_none - possible * 1.05 * time_ns
            asleep = now.time_ns - then.time_ns > time_ns + self.slept_ns / 2
            assert over <= (self.slept_ns if asleep else 0), f"{over} ns more than there were"
            busy = now.host.cpu_busy_ns - then.host.cpu_busy_ns
            assert 0 <= busy <= possible * 1.05 * time_ns, (
                f"busy {busy} ns on {possible} CPUs in {time_ns} ns"
            )
            for figure in ("run_ns", "context_switches", "page_faults", "migrations", "run_queue_wait_ns"):
                falls = [(a, b) for a, b in pairs(then, now, figure) if b < a]
                assert not falls, (figure, falls)
            for name in self.events:
                values = [(a.value, b.value) for a, b in pairs(then, now, name)]
                assert all(b >= a for a, b in values), (name, values)
        # Never more of them than the time allows: nothing is caught up.
        passed = sum(report.interval_ns for report in self.reports[1:])
        assert len(self.reports) <= passed / INTERVAL_NS + 2
        self._check_rates(possible)

    def _check_rates(self, possible: int) -> None:
        """What `top` and the controller would make of the reports."""
        rates = Rates()
        for report in self.reports:
            shown = rates.add(report)
            unused = [
                why for job in shown["jobs"] for why in job["unavailable"].values() if "not used" in why
            ]
            assert not unused, unused
            # All CPUs at work in a tick that comes late look like more than there are, and are left out as
            # they should be. By how much it can be late at most is known above, and was looked at there.
            host = shown["host"]
            cores = [host["cpu_cores"], host["system"]["run_cores"], shown["collector"]["cpu_cores"]]
            assert shown["bad_samples"] <= cores.count(None), shown
            known = {name: rate for name, rate in figures(shown) if rate is not None}
            assert all(rate >= 0 for rate in known.values()), known
            assert all(rate <= possible * 1.05 for name, rate in known.items() if name.endswith("cpu_cores"))
        # Not all of them unknown.
        assert len(shown["jobs"]) == 2
        for job in shown["jobs"]:
            assert min(job["cpu_cores"], job["counters"]["run_cores"]) > 0, job
            assert min(job["counters"][f"{name}_per_s"] for name in ("context_switches", *self.events)) > 0

    def top(self) -> None:
        shown = subprocess.run(
            [COMMAND, "top", "--once", "--json", "--socket", SOCKET], capture_output=True, check=True
        )
        assert {job["id"] for job in json.loads(shown.stdout)["jobs"]} == {"one", "two"}

    def close(self) -> None:
        for process in [*self.jobs, self.agent]:
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(60) for process in [*self.jobs, self.agent]]
        assert codes[-1] == 0, codes


def figures(values: Any, name: str = "") -> Iterator[tuple[str, float | None]]:
    """All rates and ratios of a snapshot, with their names."""
    if isinstance(values, dict):
        for key, value in values.items():
            yield from figures(value, f"{name}.{key}")
    elif isinstance(values, list):
        for i, value in enumerate(values):
            yield from figures(value, f"{name}.{i}")
    elif name.endswith(("_per_s", "_cores", "_ratio", ".ipc")):
        yield name, values


def sorted_jobs(report: Report) -> list:
    return sorted(report.jobs, key=lambda job: job.identity.id)


def pairs(then: Report, now: Report, figure: str) -> list[tuple]:
    """(before, after) of a figure, for each job that was there before and for what belongs to none."""
    before = {job.identity.id: job.counters for job in then.jobs}
    both: list[tuple[Counters, Counters]] = [(then.host.system, now.host.system)]
    both += [(before[job.identity.id], job.counters) for job in now.jobs if job.identity.id in before]
    return [(getattr(a, figure), getattr(b, figure)) for a, b in both]


def hotplug(node: Node) -> None:
    cpu = online()[-1]
    for _ in range(2):
        switch(cpu, False)
        node.settled()
        switch(cpu, True)
        node.settled()
    for _ in range(5):  # in between ticks, or not
        switch(cpu, False)
        switch(cpu, True)
    node.settled()
    node.top()


def stopped(node: Node) -> None:
    """The agent outlives a stop of the whole machine.

    Nothing here tells that the machine stood still but its real-time clock: the kernel's own clocks stop
    with it. So the reports must be as if nothing had been: none is missing, stamps and intervals agree
    with those clocks, and the jobs go on.
    """
    then, away = node.more(1), outside()
    print("stop me", flush=True)
    now = node.more(12)
    away = outside() - away
    across = [report for report in node.reports if then.sequence <= report.sequence <= now.sequence]
    assert [r.sequence for r in across] == list(range(then.sequence, now.sequence + 1))
    passed = sum(r.interval_ns for r in across[1:])
    moved = now.time_ns - then.time_ns
    longest = max(r.interval_ns for r in across[1:])
    missed = now.collector.ticks_missed - then.collector.ticks_missed
    print(f"stopped for {away:.0f} s or so: {passed / 1e9:.3f} s in {len(across) - 1} reports, ", end="")
    print(f"the longest {longest / 1e9:.3f} s, {missed} missed, stamps moved {moved / 1e9:.3f} s")
    assert away > 2
    assert abs(moved - passed) < 1e9
    for earlier, later in pairwise(across):
        switches = pairs(earlier, later, "context_switches")
        assert len(switches) == 3
        assert all(b > a for a, b in switches), switches


def outside() -> float:
    """Seconds of the machine's real-time clock, which nothing stops, less those of the kernel's clock."""
    return int(Path("/sys/class/rtc/rtc0/since_epoch").read_text()) - time.monotonic()


def stepped(node: Node) -> None:
    for step in (30, -30):
        then = node.more(1)
        time.clock_settime(time.CLOCK_REALTIME, time.time() + step)
        now = node.more(3)
        passed = sum(r.interval_ns for r in node.reports if r.sequence > then.sequence)
        moved = now.time_ns - then.time_ns
        print(f"stepped {step}: stamps moved {moved / 1e9:.3f} s in {passed / 1e9:.3f} s")
        assert abs(moved - passed - step * 1e9) < 1e9


def asleep(node: Node) -> None:
    """Suspended to RAM until the alarm of the real-time clock: all CPUs but one go and come."""
    then = node.more(1)
    before = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    subprocess.run(["rtcwake", "-m", "mem", "-s", "3"], check=True)
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic() - before
    node.slept_ns = slept * 1e9
    now = node.more(3)
    passed = sum(r.interval_ns for r in node.reports if r.sequence > then.sequence)
    moved = now.time_ns - then.time_ns
    print(f"slept {slept:.3f} s: stamps moved {moved / 1e9:.3f} s in {passed / 1e9:.3f} s")
    assert slept > 1
    assert abs(moved - passed - slept * 1e9) < 1e9
    node.settled()
    # This machine does not power off any more after that, but it does reset.
    Path("/usr/bin/busybox").unlink()
    Path("/usr/bin/busybox").write_text("#!/bin/bash\necho b >/proc/sysrq-trigger\nsleep 60\n")
    Path("/usr/bin/busybox").chmod(0o755)


def main(kinds: list[str]) -> None:
    node = Node(len(online()))
    try:
        for kind in kinds:
            print(os.uname().release, kind, flush=True)
            {"hotplug": hotplug, "stopped": stopped, "stepped": stepped, "asleep": asleep}[kind](node)
        node.check()
    finally:
        node.close()
    print("done")


if __name__ == "__main__":
    main(sys.argv[1:])
