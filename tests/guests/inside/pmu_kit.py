"""What the PMU programs share: perf events with flags, and processes that stand still until told to go."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from expanse_ebpf.config import Config
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import perf
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.lifecycle import Lifecycle
from expanse_ebpf.sources import Context
from expanse_ebpf.sources.cpu import CpuSource
from expanse_ebpf.wire.collector_pb2 import Counters, JobIdentity, Report

FILES = Path("/payload/files")
CGROUPS = Path("/sys/fs/cgroup")
EVENTS = ("cycles", "instructions")  # what this PMU has of the product's five
# Flags of perf_event_attr. The product's own events have none of them.
INHERIT, PINNED, USER_ONLY = 1 << 1, 1 << 2, 1 << 5


def open_event(name: str, *, pid: int = -1, cpu: int = -1, flags: int = 0) -> int:
    """A counting hardware event, for all that `cpu` does or for all that `pid` does."""
    attr = struct.pack("=IIQQQQQ16x", perf.TYPE_HARDWARE, 64, perf.HARDWARE[name].config, 0, 0, 3, flags)
    number = ctypes.c_long(perf.SYSCALLS[os.uname().machine])
    places = (ctypes.c_int(pid), ctypes.c_int(cpu), ctypes.c_int(-1), ctypes.c_ulong(perf.FLAG_CLOEXEC))
    fd: int = ctypes.CDLL(None, use_errno=True).syscall(number, attr, *places)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "perf_event_open")
    return fd


def value(fd: int) -> int:
    return perf.read_counter(fd).value


def make_group(name: str) -> Path:
    (group := CGROUPS / name).mkdir()
    return group


def start(
    program: str, arguments: Sequence[object], group: Path, *, fifo: bool = False, **ends: Any
) -> subprocess.Popen[bytes]:
    """One of the C programs, in its cgroup; it stops itself before the first turn and after the last.

    With `fifo` it keeps the CPU until it waits, so that the scheduler has nothing to decide.
    """

    def join() -> None:
        (group / "cgroup.procs").write_text("0")
        if fifo:
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))

    process = subprocess.Popen([FILES / program, *map(str, arguments)], preexec_fn=join, **ends)
    wait_stopped(process)
    return process


def wait_stopped(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status), f"{process.args} ended with status {status}"


def go_on(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.send_signal(signal.SIGCONT)


def end(*processes: subprocess.Popen[bytes]) -> None:
    for process in processes:
        process.kill()
        process.wait()


class Ring:
    """Processes that pass a byte round, each counting down in between (see pmu_turns.c)."""

    def __init__(self, turns: int, counts: Sequence[int], groups: Sequence[Path], **options: Any) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # wait() waits for it
        pipes = [os.pipe() for _ in counts]
        self.processes = [
            start("pmu_turns", (count, turns), group, stdin=pipe[0], stdout=following[1], **options)
            for count, group, pipe, following in zip(
                counts, groups, pipes, [*pipes[1:], pipes[0]], strict=True
            )
        ]
        self._first = pipes[0][1]
        for fd in {fd for pipe in pipes for fd in pipe} - {self._first}:
            os.close(fd)

    def go(self) -> None:
        """Begin the first turn."""
        go_on(*self.processes)
        os.write(self._first, b"x")

    def wait(self, tick_s: float | None = None, tick: Callable[[], object] = lambda: None) -> None:
        """Until all have had their last turn, with a `tick` every so often.

        The end is heard of at once: an idle CPU counts cycles here, for the job that ran last.
        """
        working = {process.pid for process in self.processes}
        while working:
            if tick_s is None:
                signal.sigwait({signal.SIGCHLD})
            else:
                signal.sigtimedwait({signal.SIGCHLD}, tick_s)
            working -= {pid for pid in working if os.waitpid(pid, os.WUNTRACED | os.WNOHANG)[0]}
            tick()

    def close(self) -> None:
        end(*self.processes)
        os.close(self._first)


def counters(message: Counters) -> dict[str, Any]:
    """What is exported, absent fields left out; a hardware counter as [value, running ratio]."""
    return {
        field.name: [found.value, found.running_ratio] if field.message_type else found
        for field, found in message.ListFields()
    }


class Watched:
    """The product's own CPU source, with its own events, and some jobs."""

    def __init__(self, names: Sequence[str]) -> None:
        self.lifecycle = Lifecycle("unified", 0, lambda _: None)
        self.source = CpuSource(Context(Config(), self.lifecycle))
        self.source.start()
        self.groups = [make_group(name) for name in names]
        self.jobs = []
        for name, group in zip(names, self.groups, strict=True):
            slot = self.lifecycle.take()
            self.lifecycle.assign(group.stat().st_ino, slot)
            self.jobs.append(Job(JobIdentity(scheduler="run", id=name, name=name), slot=slot))

    @property
    def accounting(self) -> Accounting:
        assert self.source._accounting is not None
        return self.source._accounting

    def all_rows(self) -> list[int]:
        """The kernel's totals of all slots together, as of the last flush."""
        # Slots are given out in order, so those behind the last job's have never been used.
        used = 1 + max(job.slot or 0 for job in self.jobs)
        rows = [self.lifecycle.row(slot) for slot in range(used)]
        return [sum(column) for column in zip(*rows, strict=True)]

    def rows(self) -> list[tuple[int, ...]]:
        """The kernel's totals of each job, as of the last flush."""
        return [self.lifecycle.row(job.slot or 0) for job in self.jobs]

    def exported(self, report: Report) -> dict[str, Any]:
        """What `report` says of the jobs and of the rest."""
        return {
            "jobs": [counters(sample.counters) for sample in report.jobs],
            "reasons": [dict(sample.unavailable) for sample in report.jobs],
            "system": counters(report.host.system),
            "overflow": counters(report.host.overflow),
        }

    def report(self) -> Report:
        """What the source reports now."""
        report = Report()
        samples = []
        for job in self.jobs:
            sample = report.jobs.add()
            sample.identity.CopyFrom(job.identity)
            samples.append((job, sample))
        self.source.sample(time.monotonic(), samples, report)
        return report

    def close(self) -> None:
        self.source.stop()
        self.lifecycle.close()
