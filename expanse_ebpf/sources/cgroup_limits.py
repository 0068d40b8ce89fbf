"""The limits that hold for a cgroup: its own and those of every cgroup above it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from expanse_ebpf.sources import cgroup_files as parse

_READ = 16384


def contents(path: str) -> bytes | None:
    """What the file holds now (its first 16 KiB); None when it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        return os.read(fd, _READ)
    except OSError:
        return None
    finally:
        os.close(fd)


class Limits:
    """Limits of cgroups and their ancestors, each directory read at most once in `lifetime` ticks.

    A limit is often set above the job's own cgroup (on a pod, a SLURM node's root), where many jobs
    share it.
    """

    def __init__(self, lifetime: int) -> None:
        self.tick = 0
        self._lifetime = lifetime
        # The tick in which to read again, and what was read.
        self._read: dict[tuple[str, Callable[[str], float | None]], tuple[int, float | None]] = {}

    def tightest(self, directory: str, read: Callable[[str], float | None]) -> float | None:
        """The smallest limit from `directory` up to the top of its hierarchy; None when there is none."""
        best: float | None = None
        for path in _upwards(directory):
            known = self._read.get((path, read))
            if known is None or self.tick >= known[0]:
                known = self._read[path, read] = (self.tick + self._lifetime, read(path))
            if known[1] is not None and (best is None or known[1] < best):
                best = known[1]
        return best

    def prune(self, jobs: int) -> None:
        """Forget directories that nobody asked for lately."""
        if len(self._read) > 12 * jobs + 64:
            self._read = {k: v for k, v in self._read.items() if self.tick < v[0]}


def _upwards(directory: str) -> Iterator[str]:
    # The mount point is the last directory that has cgroup files; looking it up costs more than asking
    # the one or two directories above it for a limit file in vain.
    path = directory
    for _ in range(32):
        if path in ("/sys/fs/cgroup", "/sys/fs", "/", ""):
            return
        yield path
        path = path.rpartition("/")[0]


def memory_max(directory: str) -> float | None:
    """v2 memory limit of the directory itself in bytes; None when it has none."""
    return parse.limit(contents(f"{directory}/memory.max") or b"")


def cpu_max(directory: str) -> float | None:
    """v2 CPU quota of the directory itself in CPUs; None when it has none."""
    return parse.quota(contents(f"{directory}/cpu.max") or b"")


def cfs_quota(directory: str) -> float | None:
    """v1 CPU quota of the directory itself in CPUs; None when it has none."""
    quota = contents(f"{directory}/cpu.cfs_quota_us") or b""
    if quota in (b"", b"-1\n"):
        return None
    return parse.cores(quota, contents(f"{directory}/cpu.cfs_period_us") or b"")
