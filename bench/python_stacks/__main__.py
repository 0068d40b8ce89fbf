"""What sampling Python stacks costs: a sample, a visit, the sampler's process, and the jobs looked at.

samples  Nanoseconds per sample by the kernel's own run-time statistics, less an empty program of the same
         kind on the same process in the same windows. At the agent's rate, where 20 ms have passed since
         the last sample and the caches hold other things, and at 997 Hz, where they do not. "swept" reads
         64 MiB again and again, as programs with large arrays do.
visits   Nanoseconds per visit of a waiting thread, four times a second, less what the iterator takes for
         each thread that it passes over.
agent    A process that drives the sampler as the agent does, beside 8 busy processes: its CPU time, that of
         the BPF programs which run in the jobs' time, its memory. A visit runs in its own time.
targets  What 8 busy processes get done unwatched and beside the sampler, py-spy or austin, and what those
         take. In blocks: each case once, in random order. py-spy and austin are given the parent of the
         eight (--subprocesses, -C): that costs less than one of them for each. They sample every process
         so many times a second of wall time, we every CPU.

What the clock's interrupt takes besides its program shows only in what the targets get done.

In brackets the interval of order statistics that covers the median with at least 95 % (from six values on;
of fewer, the range). Other work on the machine widens it. Needs root and clang.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from bench.python_stacks.job_cost import OURS, agent, targets
from bench.python_stacks.kernel_cost import samples, visits
from bench.python_stacks.running import QUICK, Extent, Summary, interpreters

PARTS = ("samples", "visits", "agent", "targets")
Row = dict[str, Any]


def plain(value: Summary) -> Row:
    return asdict(value)


def show_samples(rows: list[Row]) -> None:
    print(f"{'sample':34} {'rate':>7} {'empty':>6} {'above empty':>24}   (ns; target at 30 frames: <= 12000)")
    for row in rows:
        what = f"{row['python']}, {row['frames']} frames{', swept' if row['swept'] else ''}"
        if row["resolved"] < 0.99:
            what += f" ({row['resolved']:.0%} resolved)"
        empty, above = row["empty_ns"].median, row["above_empty_ns"].text()
        print(f"{what:34} {row['rate_hz']:4} Hz {empty:6.0f} {above:>24}")


def show_visits(rows: list[Row]) -> None:
    print(f"{'visit of a thread that':34} {'passing':>7} {'above passing by':>24}   (ns)")
    for row in rows:
        above = row["above_passing_ns"].text()
        print(
            f"{row['thread']:34} {row['passing_ns']:7.0f} {above:>24}   {row['counted']:.1f} of "
            f"{row['threads']} threads, {row['tasks']:.0f} tasks: {row['cpu_ms']:.2f} ms for all of it"
        )


def show_agent(row: Row) -> None:
    print(
        f"sampler's process: {row['own_cores']:.5f} cores, BPF programs in the jobs' time "
        f"{row['in_jobs_cores']:.5f}, together {row['cores']:.5f} (target for the whole agent: 0.03); "
        f"{row['loading_cpu_s']:.2f} s to load"
    )
    before, after = (row[key] / 2**20 for key in ("pss_before_bytes", "pss_bytes"))
    print(f"memory: {after:.1f} MiB PSS, {before:.1f} before the sampler was loaded")
    seen = ", ".join(f"{number:.1f} {kind}" for kind, number in row["seen_per_s"].items())
    print(f"per second: {seen}")
    for name, program in row["programs"].items():
        if program["runs_per_s"]:
            print(f"  {name:20} {program['runs_per_s']:8.1f} runs/s {program['cores']:.6f} cores")
    for part, why in row["unavailable"].items():
        print(f"unavailable: {part}: {why}")


def show_targets(rows: list[Row]) -> None:
    print(
        f"{'tool':22} {'cores':>26} {'times ours':>20} {'targets slower by, %':>24} "
        f"{'per CPU second, %':>24} {'samples/s':>9} {'PSS MiB':>8}"
    )
    for row in rows:
        times = "" if row["tool"] == OURS else row["times_ours"].text(".1f")
        print(
            f"{row['tool']:22} {row['cores'].text('.5f'):>26} {times:>20} "
            f"{row['slower_percent'].text('.2f'):>24} {row['slower_by_cpu_percent'].text('.2f'):>24} "
            f"{row['samples_per_s']:9.0f} {row['pss_bytes'] / 2**20:8.1f}   {row['pairs']} pairs"
        )
    print("targets: py-spy >= 40 times ours; slower by <= 0.3 %")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.python_stacks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="some seconds of each, to see that it works")
    parser.add_argument("--json", action="store_true", help="everything, with each single value")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    parser.add_argument("--python", action="append", help="interpreters to look at; the first in all parts")
    parser.add_argument("--austin", metavar="COMMAND", help="that of beside this Python if not given")
    parser.add_argument("--pairs", type=int, help="of the part targets, unwatched and beside the sampler")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="of the random order")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("python_stacks: needs root; run it with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("python_stacks: ended"))  # and everything is put away
    extent = QUICK if arguments.quick else Extent()
    if arguments.pairs:
        extent = replace(extent, pairs=arguments.pairs)
    pythons = arguments.python or interpreters()
    parts = arguments.part or PARTS
    results: Row = {"seed": arguments.seed}
    if "samples" in parts:
        results["samples"] = samples(extent, pythons)
    if "visits" in parts:
        results["visits"] = visits(extent, pythons[0])
    if "agent" in parts:
        results["agent"] = agent(extent, pythons[0])
    if "targets" in parts:
        results["targets"] = targets(extent, pythons[0], arguments.austin, arguments.seed)
    if arguments.json:
        json.dump(results, sys.stdout, default=plain, indent=1)
        print()
        return
    shows: dict[str, Callable[[Any], None]] = {
        "samples": show_samples,
        "visits": show_visits,
        "agent": show_agent,
        "targets": show_targets,
    }
    for part, show in shows.items():
        if part in results:
            show(results[part])
            print()


if __name__ == "__main__":
    main()
