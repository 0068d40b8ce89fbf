"""Processes in detail."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import psutil
import pytest

from expanse_ebpf.jobs.processes import describe, in_cgroup

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)", "--name", "a b", b"\xff\x1b[2J"]


def test_a_row_for_each_living_process() -> None:
    before = time.time_ns()
    child = subprocess.Popen(SLEEP)
    try:
        deadline = time.monotonic() + 20
        while True:
            rows = {row.pid: row for row in describe([child.pid, os.getpid(), 2**22 + 5, -1, 2**80])}
            # Right after fork or exec it is not itself yet.
            if rows[child.pid].rss_bytes > 1 << 20 or time.monotonic() > deadline:
                break
        assert set(rows) == {child.pid, os.getpid()}
        row = rows[child.pid]
        assert row.command.endswith("import time; time.sleep(600) --name a b \ufffd␛[2J")
        assert row.user == "root"
        assert row.threads == 1
        assert row.rss_bytes > 1 << 20
        # The kernel tells the start in clock ticks.
        assert abs(row.started_ns - before) < 5_000_000_000
        assert rows[os.getpid()].cpu_seconds > 0
    finally:
        child.kill()
        child.wait()
    assert describe([child.pid]) == []


def test_no_more_rows_than_asked_for() -> None:
    parent = os.getppid()
    assert len(describe([os.getpid(), parent], limit=1)) == 1


def test_a_zombie_has_a_row_with_its_name() -> None:
    child = subprocess.Popen(["true"])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        (row,) = describe([child.pid])
        assert row.state == "zombie"
        assert row.command == "[true]"
    finally:
        child.wait()


def test_a_pid_used_anew_while_it_is_read_gives_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil.Process, "is_running", lambda self: False)
    assert describe([os.getpid()]) == []


def test_cgroup_of_a_process() -> None:
    with open("/proc/self/cgroup") as file:
        paths = [line.rstrip("\n").split(":", 2)[2] for line in file]
    deep = max(paths, key=len)
    pid = os.getpid()
    assert in_cgroup(pid, deep)
    assert in_cgroup(pid, "")
    assert not in_cgroup(pid, f"{deep}x".replace("//", "/"))
    assert not in_cgroup(2**22 + 5, deep)
