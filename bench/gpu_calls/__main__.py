"""What a window costs: a hit of a probe, putting probes in place, a loop that launches, memory.

hits       CPU time of a call of a probed function, less the same without a probe, by what the kernel does
           about the function's first instruction (it emulates a push, and steps over most others): with a
           program that returns at once, with a window's own, and with that and Python stacks. "Of it in the
           program" is by the program's own clock.
switching  Wall time to put 30 probes into a file and to take them away, by a uprobe_multi link and by perf
           events, for one process that maps it and for eight, and how long one of them is held up: pauses of
           its loop, which reads the clock, less those before. Each page that has a probe is a copy of its
           own; "left" are those that stay when the probes are gone.
loops      CPU time for each turn of a loop that computes and launches, in a window against right before it,
           at 1,000, 10,000 and 100,000 turns a second, with a budget of 2 % and without one; the same of
           another job that maps the same files. And what the window's process takes meanwhile.
memory     Of the agent and the program before, in and after a window by the commands; of its process.

The launches are those of the stand-ins in tests/stand_ins: each enters the runtime and the driver, two hits
of the emulated kind. In brackets the interval of order statistics that covers the median with at least 95 %
(of fewer than six values the range). Needs root, gcc, and a machine that does little else. Under 6 minutes,
with --quick under one.

examples:
  python -m bench.gpu_calls
  python -m bench.gpu_calls --quick
  python -m bench.gpu_calls --part hits --part loops --json > cost.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from bench.gpu_calls.hits import hits
from bench.gpu_calls.loops import loops
from bench.gpu_calls.memory import memory
from bench.gpu_calls.stage import QUICK, Extent
from bench.gpu_calls.switching import switching
from bench.python_stacks.running import Summary, say
from tests.stand_ins.cuda import cuda_stand_in

Row = dict[str, Any]
MIB = 2**20


def plain(value: Summary) -> Row:
    return asdict(value)


def show_hits(rows: list[Row]) -> None:
    print(
        f"{'first instruction':18}{'program':34}{'added by the probe':>26}{'of it in the program':>26}   (ns)"
    )
    said = {"empty": "empty", "full": "a window's", "stack": "a window's with a stack"}
    for row in rows:
        what = said[row["what"]]
        if row["what"] == "stack":
            what += f", {row['frames']} frames"
            if row["resolved"] < 0.99:
                what += f" ({row['resolved']:.0%} resolved)"
        program = "" if row["what"] == "empty" else row["program_ns"].text()
        print(f"{row['first']:18}{what:34}{row['added_ns'].text():>26}{program:>26}")


def show_switching(rows: list[Row]) -> None:
    print(
        f"{'30 probes by':14}{'in':13}{'processes':>9} {'attach, ms':>22} {'detach, ms':>25} "
        f"{'longest pause, us':>19} {'before':>8} {'held up, us/probe':>22} {'pages':>6} {'left':>8}"
    )
    for row in rows:
        longest = f"{row['attach_longest_us'].median:.0f} / {row['detach_longest_us'].median:.0f}"
        held = row["held_us_per_point"].text(".1f")
        if row["by"] == "perf":
            held = "-"  # in seconds other programs do more
        left = f"{row['pages_left_by_first']:.0f}, {row['pages_left'].median:.0f}"
        print(
            f"{row['by']:14}{row['pages']:13}{row['processes']:9} {row['attach_ms'].text('.2f'):>22} "
            f"{row['detach_ms'].text('.1f'):>25} {longest:>19} {row['idle_longest_us'].median:8.0f} "
            f"{held:>22} {row['pages_within'].median:6.0f} {left:>8}"
        )
    print("pauses: while attaching / detaching, medians; left: after the first time / after later ones")


def show_loops(rows: list[Row]) -> None:
    first = f"{'turns/s':>8} {'loop of':11}{'budget':7}"
    print(
        f"{first}{'slower by, %':>23} {'of the time, %':>22} {'by the window':>21} "
        f"{'traced, %':>22} {'in a window':>11}"
    )
    for row in rows:
        cells = [row[f"{name}_percent"].text(".2f") for name in ("slower", "share", "told")]
        print(
            f"{_loop(row)}{cells[0]:>23} {cells[1]:>22} {cells[2]:>21} "
            f"{row['traced_percent'].text('.1f'):>22} {row['within_per_s'].median:9.0f}/s"
        )
        if set(row["states"]) != {"done"}:
            print(f"         states: {', '.join(row['states'])}")
    print(
        f"{first}{'its process, cores':>23} {'CPU s, all of it':>22} {'PSS MiB':>8} {'events':>8} "
        f"{'lost':>8} {'bytes each':>10} {'launch, ns, without':>20}"
    )
    for row in rows:
        launch = f"{row['median_ns'].median:.0f}, {row['median_without_ns'].median:.0f}"
        print(
            f"{_loop(row)}{row['cores'].text('.3f'):>23} {row['cpu_s'].text('.2f'):>22} "
            f"{row['pss_bytes'].high / MIB:8.1f} {row['events'].median:8.0f} "
            f"{row['events_lost'].median:8.0f} {row['bytes_per_event'].median:10.2f} {launch:>20}"
        )


def _loop(row: Row) -> str:
    return f"{row['rate']:8} {row['whose'] + ' job':11}{row['budget']:7}"


def show_memory(row: Row) -> None:
    within, before, after = (row[f"agent_{when}_bytes"] / MIB for when in ("within", "before", "after"))
    print(f"agent: {before:.1f} MiB PSS before, {within:.1f} at most in the window, {after:.1f} after it")
    print(f"the window's process: {row['window_bytes'] / MIB:.1f} MiB PSS at most")
    for when in ("within", "after", "later"):
        added = row[f"target_{when}"]
        files = ", ".join(f"{size // 1024} KiB of {path}" for path, size in added.items())
        print(f"the program's own, added {'2 s ' if when == 'later' else ''}{when}: {files or 'nothing'}")


PARTS: dict[str, tuple[Callable[[Extent], Row], Callable[[Any], None]]] = {
    "hits": (hits, show_hits),
    "switching": (switching, show_switching),
    "loops": (loops, show_loops),
    "memory": (memory, show_memory),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu_calls",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="to see that it runs; the figures mean little")
    parser.add_argument("--json", action="store_true", help="everything, with each single value")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("gpu_calls: needs root; run it with sudo")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("gpu_calls: ended"))  # and everything is put away
    extent = QUICK if arguments.quick else Extent()
    say("compiling the stand-ins")
    cuda_stand_in()
    began, load = time.monotonic(), os.getloadavg()[0]
    results: Row = {"kernel": platform.release(), "cpus": os.cpu_count(), "load_before": load}
    parts = [part for part in PARTS if part in (arguments.part or PARTS)]
    for part in parts:
        say(part)
        results |= PARTS[part][0](extent)
    results["load_after"], results["seconds"] = os.getloadavg()[0], time.monotonic() - began
    if arguments.json:
        json.dump(results, sys.stdout, default=plain, indent=1)
        print()
        return
    print(
        f"Linux {results['kernel']}, {results['cpus']} CPUs; load {load:.1f} before, "
        f"{results['load_after']:.1f} after {results['seconds']:.0f} s\n"
    )
    for part in parts:
        PARTS[part][1](results[part])
        print()


if __name__ == "__main__":
    main()
