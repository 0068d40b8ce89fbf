"""Single processes: those of a job that a person selected, told in detail; where one belongs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import Process

if TYPE_CHECKING:
    import psutil


def describe(pids: Iterable[int], limit: int = 500) -> list[Process]:
    """One row for each of `pids` that lives, in rising order, at most `limit` of them.

    A process that ends meanwhile has no row. All of a row is of one process, even when its pid is used
    anew while it is read.
    """
    # Here and not above: the agent pays for psutil only once somebody asks.
    import psutil

    rows: list[Process] = []
    users: dict[int, str] = {}
    for pid in sorted(set(pids)):
        if len(rows) >= limit:
            break
        try:
            process = psutil.Process(pid)
            row = _row(process, users)
            # psutil tells by the start time whether the pid is still the same process.
            if process.is_running():
                rows.append(row)
        except (psutil.Error, OSError, ValueError, OverflowError):
            continue
    return rows


def _row(process: psutil.Process, users: dict[int, str]) -> Process:
    import psutil

    row = Process(pid=process.pid, started_ns=round(process.create_time() * 1e9))
    with process.oneshot():
        row.state = process.status()
        row.threads = process.num_threads()
        times = process.cpu_times()
        row.cpu_seconds = times.user + times.system
        row.rss_bytes = process.memory_info().rss
        uid = process.uids().effective
        if uid not in users:
            users[uid] = _user(uid)
        row.user = users[uid]
        name = clean(process.name(), 64)
    try:
        line = b" ".join(_arguments(process.pid))
    except (psutil.Error, OSError):
        line = b""
    # Kernel threads and processes on their way out have no command line.
    row.command = clean(line) or f"[{name}]"
    return row


def _arguments(pid: int) -> list[bytes]:
    # Read here: psutil decodes, and reads the whole of a command line that may be megabytes long.
    with open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read(4096).rstrip(b"\0").split(b"\0")


def _user(uid: int) -> str:
    import pwd

    try:
        return clean(pwd.getpwuid(uid).pw_name, 64)
    except (KeyError, OSError):
        return str(uid)


def in_cgroup(pid: int, cgroup: str) -> bool:
    """Whether the process is in `cgroup` or below it, in any hierarchy; an empty name holds all."""
    if not cgroup:
        return True
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            paths = [clean(line.split(":", 2)[-1], 4096) for line in file.read(65536).split("\n")]
    except OSError:
        return False
    return any(f"{path}/".startswith(f"{cgroup}/") for path in paths)
