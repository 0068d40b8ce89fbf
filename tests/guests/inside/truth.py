"""What the kernel says itself of a process or a cgroup, and waiting; the host's tests use it as well."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LIMIT_S = 120


def switches(pid: int) -> int:
    """How often the process's first thread has left a CPU."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if "voluntary_ctxt_switches:" in line)


def faults(pid: int) -> int:
    """Page faults, small and large."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[7]) + int(fields[9])


def run_ns(pid: int) -> int:
    """Time on a CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


def wait_ns(pid: int) -> int:
    """Time on a run queue without a CPU."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])


def migrations(pid: int) -> int:
    """How often it has changed its CPU."""
    lines = Path(f"/proc/{pid}/sched").read_text().splitlines()
    return int(next(line.split(":")[1] for line in lines if line.startswith("se.nr_migrations")))


def usage_ns(group: Path) -> int:
    """CPU time of a cgroup of the unified hierarchy."""
    return int((group / "cpu.stat").read_text().split()[1]) * 1000


def until(what: str, ready: Callable[[], Any]) -> Any:
    """What `ready` gives as soon as it gives something."""
    deadline = time.monotonic() + LIMIT_S
    while not (found := ready()):
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {LIMIT_S} s")
        time.sleep(0.05)
    return found
