"""What the processes of one part take: CPU time, memory, disk. From /proc and cgroup files."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from expanse_ebpf.bench import descriptors
from expanse_ebpf.bench.child import Child
from expanse_ebpf.bench.results import Usage

_MOST = 1 << 20
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Taken:
    """What a process and its descendants have taken since they began. None: /proc does not tell."""

    cpu_s: float
    written_bytes: int | None  # to disks


def taken(pid: int) -> Taken:
    """Of `pid` and its descendants, those included that have ended and were waited for."""
    cpu_s, written = 0.0, 0
    known = True
    for each in tree(pid):
        cpu_s += cpu_of_clock(each) + cpu_of_children(_read(f"/proc/{each}/stat"))
        bytes_of = number(_read(f"/proc/{each}/io"), "write_bytes")
        known = known and (bytes_of is not None or each != pid)
        written += bytes_of or 0
    return Taken(cpu_s, written if known else None)


def tree(pid: int) -> list[int]:
    """`pid` and its descendants, zombies too; none when it has gone."""
    children: dict[int, list[int]] = {}
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208 (names are what is wanted)
        if name.isdigit() and (parent := parent_of_stat(_read(f"/proc/{name}/stat"))) is not None:
            children.setdefault(parent, []).append(int(name))
            found.append(int(name))
    level, of_tree = [pid] if pid in found else [], []
    while level:
        of_tree += level
        level = [child for parent in level for child in children.get(parent, ())]
    return of_tree


def pss_bytes(pid: int) -> int | None:
    """Proportional set size of `pid` and its descendants; None where that of `pid` is not told."""
    total = None
    for each in tree(pid):
        kib = number(_read(f"/proc/{each}/smaps_rollup"), "Pss")
        if kib is not None:
            total = (total or 0) + kib * 1024
        elif each == pid:
            return None
    return total


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Anonymous resident memory of these processes; those that have gone count for nothing."""
    return 1024 * sum(number(_read(f"/proc/{pid}/status"), "RssAnon") or 0 for pid in pids)


def cgroup_cpu_s(directories: Iterable[str]) -> float | None:
    """CPU time of a job, from whichever of its cgroups tells it."""
    for directory in directories:
        usage_ns = _read(f"{directory}/cpuacct.usage").strip()
        if usage_ns.isdigit():
            return int(usage_ns) / 1e9
        usage_us = number(_read(f"{directory}/cpu.stat"), "usage_usec")
        if usage_us is not None:
            return usage_us / 1e6
    return None


def on_memory(path: Path) -> bool:
    """Whether a folder lies in memory (tmpfs), where nothing is written to a disk."""
    device = path.stat().st_dev
    named = f"{os.major(device)}:{os.minor(device)}"
    return any(
        line.split()[2] == named and line.partition(" - ")[2].split()[0] in ("tmpfs", "ramfs")
        for line in _read("/proc/self/mountinfo").splitlines()
    )


class Measure:
    """What one process and its descendants take between `begin` and `end`."""

    def __init__(self, child: Child, *, network: bool) -> None:
        self._child, self._network = child, network
        self._before = Taken(0.0, 0)
        self._after: Taken | None = None
        self._sent_before: dict[int, int] = {}
        self._sent: int | None = None
        self._pss: int | None = None

    def begin(self) -> None:
        """From here on."""
        self._before = taken(self._child.pid)
        if self._network:
            self._sent_before = descriptors.sent_bytes(tree(self._child.pid))

    def look(self) -> None:
        """At its memory."""
        pss = pss_bytes(self._child.pid)
        if pss is not None:
            self._pss = max(pss, self._pss or 0)

    def end(self) -> None:
        """To here."""
        self._after = taken(self._child.pid)
        if self._network and not self._child.ended:
            sent = descriptors.sent_bytes(tree(self._child.pid))
            self._sent = descriptors.sent_between(self._sent_before, sent)
        self.look()

    @property
    def cpu_s(self) -> float:
        """CPU time taken from begin to end; 0 before the end."""
        return self._after.cpu_s - self._before.cpu_s if self._after is not None else 0.0

    def usage(self, name: str, missing: dict[str, str]) -> Usage:
        """What it took; in `missing`, beginning with `name`, what is not known."""
        assert self._after is not None  # `end` was called
        written = None
        if self._after.written_bytes is not None and self._before.written_bytes is not None:
            written = self._after.written_bytes - self._before.written_bytes
        else:
            missing[f"{name}.disk_bytes"] = "/proc does not tell it"
        if self._pss is None:
            missing[f"{name}.pss_peak_bytes"] = "it had ended with the job, or /proc does not tell it"
        if self._network and self._sent is None:
            missing[f"{name}.sent_bytes"] = "it had ended with the job, or had closed a connection"
        return Usage(self.cpu_s, self._pss, written, self._sent)


def cpu_of_clock(pid: int) -> float:
    """Seconds of CPU time that all threads of a process have had, to the nanosecond; 0 when it has gone.

    /proc/PID/stat has it in ticks of 10 ms, which is as much as the agent takes in a second or two. The
    clock's number is as in Linux' include/linux/posix-timers_types.h (CPUCLOCK_SCHED).
    """
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | 2)
    return 0.0


# ---- texts of the kernel


def cpu_of_children(text: str) -> float:
    """Seconds of CPU time of children that were waited for, in /proc/PID/stat; 0 for an empty one."""
    fields = text.rpartition(")")[2].split()
    return sum(map(int, fields[13:15])) / _TICKS_PER_S


def parent_of_stat(text: str) -> int | None:
    """The parent in /proc/PID/stat."""
    fields = text.rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else None


def number(text: str, name: str) -> int | None:
    """The number behind `name` at the begin of a line, with or without a colon."""
    found = re.search(rf"^{name}:?\s+(\d+)", text, re.MULTILINE | re.ASCII)
    return int(found[1]) if found else None


def _read(path: str) -> str:
    try:
        with open(path, "rb", buffering=0) as file:
            return (file.read(_MOST) or b"").decode(errors="replace")
    except OSError:  # it has gone, or this kernel has no such file
        return ""
