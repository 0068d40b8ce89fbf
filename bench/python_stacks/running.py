"""What is looked at, how long, and the figures that come of it."""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from expanse_ebpf.kernel import libbpf

ROOT = Path(__file__).resolve().parent.parent.parent
TARGET = Path(__file__).with_name("target.py")
GROUPS = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")
RATE_HZ, WAITS_HZ = 49, 4
PROCESSES, DEPTH = 8, 30
SECOND = 1_000_000_000


@dataclass(frozen=True)
class Extent:
    """How much is measured; times in seconds."""

    rounds: int = 6  # of samples, for each case
    rare_s: float = 1.2  # a round at the agent's rate
    often_s: float = 0.3  # and at a high one
    visits: int = 12
    agent_s: float = 15
    pairs: int = 20  # unwatched and the sampler
    blocks: int = 6  # unwatched and every other tool
    window_s: float = 2
    settle_s: float = 1  # until the sampler knows the stacks
    start_s: float = 3  # until the other tools have read all symbols


QUICK = Extent(
    rounds=2, rare_s=0.7, often_s=0.2, visits=4, agent_s=4, pairs=2, blocks=1, window_s=1, start_s=2
)


@dataclass(frozen=True)
class Summary:
    """A median, and an interval that covers that of the distribution."""

    median: float
    low: float
    high: float
    values: list[float]

    def text(self, form: str = ".0f") -> str:
        return f"{self.median:{form}} ({self.low:{form}} to {self.high:{form}})"


def summary(values: Sequence[float]) -> Summary:
    """The narrowest order statistics i and n+1-i with 95 %, whatever the distribution; their range if n < 6.

    The median lies outside with probability 2 P(B < i), B binomial with n and 1/2.
    """
    ordered, n = sorted(values), len(values)
    at, outside = 0, 2 * 0.5**n
    while (outside := outside + 2 * math.comb(n, at + 1) * 0.5**n) <= 0.05:
        at += 1
    return Summary(statistics.median(ordered), ordered[at], ordered[n - 1 - at], list(values))


def say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


def interpreters() -> list[str]:
    """3.11 and 3.13, as far as they are there; else the one that runs this."""
    found = []
    for name in ("3.11", "3.13"):
        kept = sorted((Path.home() / ".pyenv/versions").glob(f"{name}.*/bin/python{name}"))
        path = str(kept[-1]) if kept else shutil.which(f"python{name}")
        if path:
            found.append(path)
    return found or [sys.executable]


def version(python: str) -> str:
    command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@contextlib.contextmanager
def job() -> Generator[Path]:
    """A cgroup for what is looked at."""
    group = GROUPS / f"test-expanse-bench-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:  # a process is on its way out
                time.sleep(0.02)


@dataclass(frozen=True)
class Running:
    """Processes that run target.py."""

    pid: int
    counts: memoryview
    children: list[int]

    def work(self) -> int:
        return sum(self.counts)

    def cpu_s(self) -> float:
        return sum(map(cpu_s, self.children))


@contextlib.contextmanager
def target(python: str, what: str, number: int, group: Path, frames: int = DEPTH) -> Generator[Running]:
    """target.py, once it has begun: `number` threads or children, or one process with a CPU of its own."""
    alone = what in ("count", "sweep")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "counts"
        path.write_bytes(bytes(8 * number))
        with path.open("r+b") as file:
            counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")

        def enter() -> None:
            (group / "cgroup.procs").write_text("0")
            if alone:
                os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})

        command = [python, "-S", str(TARGET), what, str(frames), "0" if alone else str(number), str(path)]
        process = subprocess.Popen(command, start_new_session=True, preexec_fn=enter)
        try:
            deadline = time.monotonic() + 30
            while not (all(counts) if what == "family" else counts[0]):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"python_stacks: did not begin: {shlex.join(command)}")
                time.sleep(0.05)
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Running(process.pid, counts, [int(pid) for pid in children])
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def cpu_s(pid: int) -> float:
    """CPU time of all threads of another process, by the clock that clock_getcpuclockid(3) names."""
    return time.clock_gettime(~pid << 3 | 2)


def pss_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError("no Pss in smaps_rollup")


@contextlib.contextmanager
def statistics_on() -> Generator[None]:
    """The kernel's run-time statistics of BPF programs."""
    fd = libbpf.enable_statistics()
    try:
        yield
    finally:
        os.close(fd)
