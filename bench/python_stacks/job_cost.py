"""What the sampler's process takes, and what is left to those looked at; beside py-spy and austin."""

from __future__ import annotations

import contextlib
import json
import random
import re
import select
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.python_stacks.running import (
    PROCESSES,
    RATE_HZ,
    ROOT,
    SECOND,
    WAITS_HZ,
    Extent,
    Running,
    cpu_s,
    job,
    pss_bytes,
    say,
    statistics_on,
    summary,
    target,
)

UNWATCHED, OURS = "unwatched", "expanse-ebpf"


@dataclass(frozen=True)
class Figures:
    """What the driver answers."""

    programs: dict[str, tuple[int, int]]  # nanoseconds, runs
    seen: dict[str, int]
    unavailable: dict[str, str]

    def in_jobs_s(self, before: Figures) -> float:
        """Time of the programs that run in the jobs' time. A visit is in the driver's own."""
        names = self.programs.keys() - {"on_visit"}
        return sum(self.programs[name][0] - before.programs[name][0] for name in names) / SECOND

    def samples(self, before: Figures) -> int:
        kinds = [kind for kind in self.seen if kind.startswith("samples")]
        return sum(self.seen[kind] - before.seen.get(kind, 0) for kind in kinds)


class Driver:
    """driver.py, running. It has no sampler until it is told to."""

    def __init__(self, group: Path) -> None:
        command = [sys.executable, "-m", "bench.python_stacks.driver"]
        self._process = subprocess.Popen(
            [*command, str(group), str(RATE_HZ), str(WAITS_HZ)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        self.pid = self._process.pid
        self.ask("figures")

    def ask(self, command: str) -> Figures:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{command}\n".encode())
        readable, _, _ = select.select([self._process.stdout], [], [], 30)
        answer = self._process.stdout.readline() if readable else b""
        if not answer:
            raise SystemExit(f"python_stacks: the driver does not answer {command!r}")
        return Figures(**json.loads(answer))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


@contextlib.contextmanager
def busy(python: str) -> Iterator[tuple[Running, Driver]]:
    with job() as group, statistics_on(), target(python, "family", PROCESSES, group) as running:
        driver = Driver(group)
        try:
            yield running, driver
        finally:
            driver.close()


def agent(extent: Extent, python: str) -> dict[str, object]:
    """Cores and memory of the driver, over one long window."""
    with busy(python) as (_, driver):
        say(f"agent: {extent.agent_s:.0f} s beside {PROCESSES} busy processes")
        without, loading = pss_bytes(driver.pid), cpu_s(driver.pid)
        driver.ask("on")
        loading = cpu_s(driver.pid) - loading
        time.sleep(2)
        before, cpu, since = driver.ask("figures"), cpu_s(driver.pid), time.monotonic()
        time.sleep(extent.agent_s)
        spent, seconds = cpu_s(driver.pid) - cpu, time.monotonic() - since
        after = driver.ask("figures")
        programs = {
            name: {
                "cores": (ns - before.programs[name][0]) / SECOND / seconds,
                "runs_per_s": (runs - before.programs[name][1]) / seconds,
            }
            for name, (ns, runs) in after.programs.items()
        }
        return {
            "own_cores": spent / seconds,
            "in_jobs_cores": after.in_jobs_s(before) / seconds,
            "cores": (spent + after.in_jobs_s(before)) / seconds,
            "programs": programs,
            "seen_per_s": {kind: (n - before.seen.get(kind, 0)) / seconds for kind, n in after.seen.items()},
            "pss_bytes": pss_bytes(driver.pid),
            "pss_before_bytes": without,
            "loading_cpu_s": loading,
            "unavailable": after.unavailable,
        }


@dataclass(frozen=True)
class Reading:
    """One window."""

    work_per_s: float
    work_per_cpu_s: float
    cores: float  # of who looks, BPF programs included
    pss_bytes: int
    samples_per_s: float


def window(extent: Extent, running: Running, pid: int | None = None) -> Reading:
    """What is done, and what process `pid` takes, in one window from now on."""
    work, cpu, own = running.work(), running.cpu_s(), cpu_s(pid) if pid else 0.0
    since = time.monotonic()
    time.sleep(extent.window_s)
    work, cpu, own = running.work() - work, running.cpu_s() - cpu, cpu_s(pid) - own if pid else 0.0
    seconds = time.monotonic() - since
    return Reading(work / seconds, work / cpu, own / seconds, pss_bytes(pid) if pid else 0, 0.0)


def watched_by_us(extent: Extent, running: Running, driver: Driver) -> Reading:
    driver.ask("on")
    time.sleep(extent.settle_s)
    before, since = driver.ask("figures"), time.monotonic()
    reading = window(extent, running, driver.pid)
    after, seconds = driver.ask("figures"), time.monotonic() - since
    driver.ask("off")
    cores = reading.cores + after.in_jobs_s(before) / seconds
    return replace(reading, cores=cores, samples_per_s=after.samples(before) / seconds)


@dataclass(frozen=True)
class Tool:
    """Another profiler."""

    name: str
    program: tuple[str, ...]
    options: tuple[str, ...]  # -o FILE and -p PID are added
    samples: re.Pattern[str]  # in what it prints at the end

    def missing(self) -> str:
        """Why it cannot be had; empty if it can."""
        try:
            subprocess.run([*self.program, "--version"], check=True, capture_output=True)
        except OSError as error:
            return str(error)
        except subprocess.CalledProcessError as error:
            return str(error.stderr.decode(errors="replace")).strip()
        return ""

    def watched(self, extent: Extent, running: Running) -> Reading:
        """One window while it looks at the parent and its children."""
        with tempfile.TemporaryDirectory() as folder, open(f"{folder}/printed", "w+") as printed:
            command = [*self.program, *self.options, "-o", f"{folder}/stacks", "-p", str(running.pid)]
            process = subprocess.Popen(command, stdout=printed, stderr=printed)
            try:
                began = time.monotonic()
                time.sleep(extent.start_s)
                reading = window(extent, running, process.pid)
                process.send_signal(signal.SIGINT)
                seconds = time.monotonic() - began
                process.wait(20)
            finally:
                process.kill()
                process.wait()
            printed.seek(0)
            words = re.sub(r"\x1b\[[0-9;]*m", "", printed.read())
        found = self.samples.search(words)
        if found is None:
            raise SystemExit(f"python_stacks: {self.name} failed: {words}")
        return replace(reading, samples_per_s=int(found[1]) / seconds)


def others(austin: str | None) -> list[Tool]:
    """py-spy and austin, from beside the Python that runs this; those that cannot run are left out."""
    folder = Path(sys.executable).parent
    spy, record = (f"{folder}/py-spy",), ("record", "--subprocesses", "-r", str(RATE_HZ), "-f", "raw")
    looks = tuple(shlex.split(austin)) if austin else (f"{folder}/austin",)
    spied, counted = re.compile(r"Samples: (\d+)"), re.compile(r"Error rate[ .:]*\d+/(\d+)")
    able = []
    for tool in (
        Tool("py-spy", spy, record, spied),
        Tool("py-spy --nonblocking", spy, (*record, "--nonblocking"), spied),
        Tool("austin", looks, ("-C", "-i", str(10**6 // RATE_HZ)), counted),
    ):
        if why := tool.missing():
            say(f"targets: {tool.name} is left out: {why}")
        else:
            able.append(tool)
    return able


def targets(extent: Extent, python: str, austin: str | None, seed: int) -> list[dict[str, object]]:
    """What the eight get done beside each tool, as a part of what they do unwatched in the same block."""
    dice = random.Random(seed)
    tools = {tool.name: tool for tool in others(austin)}
    blocks = [[UNWATCHED, OURS]] * extent.pairs + [[UNWATCHED, *tools]] * extent.blocks
    dice.shuffle(blocks)
    readings: list[dict[str, Reading]] = []
    with busy(python) as (running, driver):
        for number, names in enumerate(blocks, 1):
            block = {}
            for name in dice.sample(names, len(names)):
                say(f"targets: block {number}/{len(blocks)}: {name}")
                if name == UNWATCHED:
                    block[name] = window(extent, running)
                elif name == OURS:
                    block[name] = watched_by_us(extent, running, driver)
                else:
                    block[name] = tools[name].watched(extent, running)
                time.sleep(0.2)
            readings.append(block)
    return [compared(name, readings) for name in (OURS, *tools)]


def compared(name: str, readings: Sequence[Mapping[str, Reading]]) -> dict[str, object]:
    pairs = [(block[UNWATCHED], block[name]) for block in readings if name in block]
    ours = statistics.median(block[OURS].cores for block in readings if OURS in block)
    return {
        "tool": name,
        "pairs": len(pairs),
        "cores": summary([reading.cores for _, reading in pairs]),
        "times_ours": summary([reading.cores / ours for _, reading in pairs]),
        "slower_percent": summary([100 - 100 * b.work_per_s / a.work_per_s for a, b in pairs]),
        "slower_by_cpu_percent": summary([100 - 100 * b.work_per_cpu_s / a.work_per_cpu_s for a, b in pairs]),
        "samples_per_s": statistics.median(reading.samples_per_s for _, reading in pairs),
        "pss_bytes": max(reading.pss_bytes for _, reading in pairs),
    }
