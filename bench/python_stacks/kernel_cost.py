"""What one sample and one visit take, by the kernel's run-time statistics of the programs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Generator, Sequence
from pathlib import Path

from bench.python_stacks.driver import watch
from bench.python_stacks.running import (
    RATE_HZ,
    ROOT,
    WAITS_HZ,
    Extent,
    job,
    say,
    statistics_on,
    summary,
    target,
    version,
)
from expanse_ebpf.kernel import libbpf, perf
from expanse_ebpf.python_stacks.sampler import Sampler

FAST_HZ = 997
THREADS = 16  # that wait
SET_BPF = 0x40042408  # PERF_EVENT_IOC_SET_BPF


@contextlib.contextmanager
def empty_program() -> Generator[libbpf.Program]:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / f"empty_sample.{os.uname().machine}.bpf.o"
        command = ["clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", f"-I{ROOT}/bpf/include"]
        source = Path(__file__).with_name("empty_sample.bpf.c")
        subprocess.run([*command, "-c", str(source), "-o", str(output)], check=True)
        with libbpf.Object("empty_sample", Path(folder)) as made:
            made.load()
            yield made.programs["on_nothing"]


@contextlib.contextmanager
def sampled(pid: int, rate_hz: int, *programs: libbpf.Program) -> Generator[None]:
    """Each of `programs` runs `rate_hz` times a second of the process's CPU time; they take turns."""
    fds = []
    try:
        for program in programs:
            fds.append(perf.open_counter(perf.SOFTWARE["cpu-clock"], -1, pid=pid, frequency=rate_hz))
            fcntl.ioctl(fds[-1], SET_BPF, program.fd)
            time.sleep(0.5 / rate_hz)
        yield
    finally:
        for fd in fds:
            os.close(fd)


@contextlib.contextmanager
def sampler_of_a_job() -> Generator[tuple[Path, Sampler, int]]:
    """The job's cgroup, the sampler in this process, and the job's slot."""
    with contextlib.ExitStack() as stack:
        group = stack.enter_context(job())
        lifecycle, slot = watch(group)
        stack.callback(lifecycle.close)
        stack.enter_context(statistics_on())
        # Its own clocks at 1 Hz, so that they hardly add to those that are opened here.
        sampler = Sampler(rate_hz=1, waits_hz=WAITS_HZ, lifecycle=lifecycle)
        stack.callback(sampler.close)
        yield group, sampler, slot


def samples(extent: Extent, pythons: Sequence[str]) -> list[dict[str, object]]:
    """For each interpreter, depth and rate: ns per sample above an empty program."""
    cases = [(python, "count", frames) for python in pythons for frames in (10, 30, 60)]
    cases.insert(3, (pythons[0], "sweep", 30))
    results: list[dict[str, object]] = []
    with sampler_of_a_job() as (group, sampler, slot), empty_program() as nothing:
        sampler.select_slots(False, {slot: True})
        for python, what, frames in cases:
            name = version(python)
            say(f"samples: {name}, {what}, {frames} frames")
            with target(python, what, 1, group, frames) as running:
                results += [
                    {"python": name, "frames": frames, "swept": what == "sweep", **result}
                    for result in rounds(extent, sampler, slot, nothing, running.pid)
                ]
    return results


def rounds(
    extent: Extent, sampler: Sampler, slot: int, nothing: libbpf.Program, pid: int
) -> list[dict[str, object]]:
    ours = sampler.programs["on_sample"]
    with sampled(pid, FAST_HZ, ours):  # until it is looked up, and its stacks are known
        for _ in range(40):
            time.sleep(0.02)
            sampler.consume()
    sampler.drain()
    results: list[dict[str, object]] = []
    for rate, seconds in ((RATE_HZ, extent.rare_s), (FAST_HZ, extent.often_s)):
        empty, above, good, taken = [], [], 0, 0
        for _ in range(extent.rounds):
            with sampled(pid, rate, ours, nothing):
                before = ours.statistics()[0], sampler.samples(slot), *nothing.statistics()
                time.sleep(seconds)
                after = ours.statistics()[0], sampler.samples(slot), *nothing.statistics()
            # Not by runs: the sampler's own clocks interrupt others too, which takes next to nothing.
            ns, number, empty_ns, runs = (b - a for a, b in zip(before, after, strict=True))
            if number and runs:
                empty.append(empty_ns / runs)
                above.append(ns / number - empty[-1])
            for count in sampler.drain():
                taken += count.samples
                good += count.samples * (not count.stack.unresolved)
        results.append(
            {
                "rate_hz": rate,
                "samples": taken,
                "resolved": good / max(1, taken),
                "empty_ns": summary(empty),
                "above_empty_ns": summary(above),
            }
        )
    return results


def visits(extent: Extent, python: str) -> list[dict[str, object]]:
    """Ns per visit of a thread that waits, above those that are passed over; stack known."""
    results: list[dict[str, object]] = []
    with sampler_of_a_job() as (group, sampler, slot):
        if sampler.unavailable:
            say(f"visits: {sampler.unavailable}")
            return []
        program = sampler.programs["on_visit"]

        def visit() -> tuple[int, int, int, int]:
            """Nanoseconds and runs of the program, visits that were counted, CPU time of all this (ns)."""
            time.sleep(1 / WAITS_HZ)
            sampler.consume()
            before, began = program.statistics(), time.process_time_ns()
            sampler.visit()
            sampler.end_visit()
            took, after = time.process_time_ns() - began, program.statistics()
            counted = sum(count.samples for count in sampler.drain() if count.stack.waiting)
            return after[0] - before[0], after[1] - before[1], counted, took

        for what, words in (("rest", "has not run since"), ("nap", "has run since")):
            say(f"visits: a thread that {words}")
            with target(python, what, THREADS, group):
                sampler.select_slots(False, {})
                passing = statistics.median(ns / runs for ns, runs, _, _ in (visit() for _ in range(5)))
                sampler.select_slots(False, {slot: True})
                for _ in range(4):  # until it is looked up, and its stacks are known
                    visit()
                seen = [visit() for _ in range(extent.visits)]
            above = [(ns - passing * runs) / counted for ns, runs, counted, _ in seen if counted]
            results.append(
                {
                    "thread": words,
                    "threads": THREADS + 1,
                    "counted": statistics.mean(counted for _, _, counted, _ in seen),
                    "tasks": statistics.median(runs for _, runs, _, _ in seen),
                    "passing_ns": passing,
                    "above_passing_ns": summary(above),
                    "cpu_ms": statistics.median(took for _, _, _, took in seen) / 1e6,
                }
            )
    return results
