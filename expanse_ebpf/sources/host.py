"""Source "host": CPUs, busy time, memory and load of the whole node.

Busy time is user, nice, system, interrupt time, without idle and waiting for I/O. Time of guests is in
user time already and is not added again; time stolen by the hypervisor was not this node's to use.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.cpus import ONLINE, parse_cpu_list
from expanse_ebpf.sources.cgroup_files import Rising, field, number

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_FILES = {"cpus": ONLINE, "busy": "/proc/stat", "memory": "/proc/meminfo", "load": "/proc/loadavg"}


def busy_ns(stat: bytes) -> int | None:
    """Busy time of all CPUs since boot, in ns, from /proc/stat."""
    words = stat.partition(b"\n")[0].split()
    # cpu user nice system idle iowait irq softirq steal guest guest_nice
    if len(words) < 8 or words[0] != b"cpu":
        return None
    total = 0
    for index in (1, 2, 3, 6, 7):
        value = number(words[index])
        if value is None:
            return None
        total += value
    total *= _NS_PER_TICK
    return total if total < 1 << 64 else None


def memory(meminfo: bytes) -> tuple[int | None, int | None]:
    """Memory in all and memory that could be had without swapping, in bytes, from /proc/meminfo."""
    total, available = field(meminfo, b"MemTotal:"), field(meminfo, b"MemAvailable:")
    if (total or 0) >= 1 << 54 or (available or 0) >= 1 << 54:
        return None, None
    return (None if total is None else total * 1024), (None if available is None else available * 1024)


def load(loadavg: bytes) -> float | None:
    """The load average of the last minute, from /proc/loadavg."""
    word = loadavg.partition(b" ")[0]
    whole, dot, part = word.partition(b".")
    if dot and whole.isdigit() and part.isdigit() and len(word) < 16:
        return float(word)
    return None


def create(context: Context) -> HostSource:
    """The source as the configuration wants it."""
    return HostSource()


class HostSource:
    """Reads four files of the node through descriptors that stay open."""

    name = "host"

    def __init__(self) -> None:
        self.unavailable: dict[str, str] = {}
        self._open: dict[str, int] = {}
        self._busy = Rising()

    def start(self) -> None:
        """Open the files; raises UnavailableError when there is not one of them."""
        for part, path in _FILES.items():
            try:
                self._open[part] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                self.unavailable[part] = f"{path}: {error.strerror}"
        if not self._open:
            raise UnavailableError(f"host: {'; '.join(self.unavailable.values())}")

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in the host's figures."""
        host = report.host
        host.cpus_online = (
            len(parse_cpu_list(self._read("cpus").decode("ascii", "replace"))) or os.cpu_count() or 1
        )
        busy = busy_ns(self._read("busy"))
        if busy is not None:
            host.cpu_busy_ns = self._busy.feed(busy)
        total, available = memory(self._read("memory"))
        if total is not None:
            host.memory_total_bytes = total
        if available is not None:
            host.memory_available_bytes = available
        average = load(self._read("load"))
        if average is not None:
            host.load_1m = average

    def _read(self, part: str) -> bytes:
        fd = self._open.get(part)
        if fd is None:
            return b""
        try:
            # Only the beginning is wanted: the line of all CPUs, the first lines of meminfo.
            data = os.pread(fd, 1024, 0)
        except OSError as error:
            self.unavailable[part] = f"{_FILES[part]}: {error.strerror}"
            return b""
        self.unavailable.pop(part, None)
        return data

    def stop(self) -> None:
        """Close the files."""
        while self._open:
            os.close(self._open.popitem()[1])
