"""Cgroups and processes for tests, real ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


class Groups:
    """Makes cgroups and starts programs in them; close() ends and removes everything."""

    def __init__(self) -> None:
        self.tag = f"test-expanse-{uuid.uuid4().hex[:8]}"
        self.directories: list[Path] = []
        self.processes: list[subprocess.Popen[str]] = []

    def make(self, hierarchy: str = "unified", name: str = "a") -> Path:
        """A new cgroup; `name` may have several components."""
        path = ROOT / hierarchy
        for part in f"{self.tag}-{name}".split("/"):
            path = path / part
            if not path.exists():
                path.mkdir()
                self.directories.append(path)
        if hierarchy == "cpuset":
            for file in ("cpuset.cpus", "cpuset.mems"):
                (path / file).write_text((path.parent / file).read_text())
        return path

    def start(self, code: str, *groups: Path, cpus: set[int] | None = None) -> subprocess.Popen[str]:
        """A Python program that joins the groups before its first line."""
        prologue = "import os,sys,time,signal\n"
        for group in groups:
            prologue += f"open({str(group / 'cgroup.procs')!r},'w').write('0')\n"
        if cpus:
            prologue += f"os.sched_setaffinity(0,{cpus!r})\n"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", prologue + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    stream.close()
        for directory in reversed(self.directories):
            for _ in range(100):
                try:
                    directory.rmdir()
                except FileNotFoundError:
                    pass
                except OSError:
                    for pid in (directory / "cgroup.procs").read_text().split():
                        os.kill(int(pid), signal.SIGKILL)
                    time.sleep(0.02)
                    continue
                break


def wait_stopped(process: subprocess.Popen[str], seconds: float = 30) -> None:
    """Until the process has stopped itself (SIGSTOP)."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if status(process.pid)["State"].startswith("T"):
            time.sleep(0.02)  # off its CPU as well
            return
        time.sleep(0.01)
    raise TimeoutError("the process did not stop")


def status(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
