"""Instructions per switch and per flush: with no hook, with a program that does nothing, and with ours.

Usage: pmu_hook.py TIMES; prints one JSON object, case to instructions. On one CPU whose clock is its
count of instructions, so that everything that happens there is in the figures and they repeat.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from pmu_kit import EVENTS, FILES, Ring, end, go_on, make_group, open_event, start, value, wait_stopped

from expanse_ebpf.kernel import libbpf, perf
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.lifecycle import Lifecycle

TIMES = int(sys.argv[1])


def switches() -> int:
    """Context switches of the machine since boot."""
    lines = Path("/proc/stat").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("ctxt")))


def per_switch(counter: int, work: Callable[[], None]) -> float:
    before, instructions = switches(), value(counter)
    work()
    instructions = value(counter) - instructions
    return instructions / (switches() - before)


def ring(counter: int, here: Path, there: Path) -> float:
    """Two processes that wake each other in turn, one in each cgroup."""
    made = Ring(TIMES, (0, 0), (here, there), fifo=True)

    def work() -> None:
        made.go()
        made.wait()

    try:
        return per_switch(counter, work)
    finally:
        made.close()


def sleeps(counter: int, group: Path) -> float:
    """Every second switch is to the idle task, and every other one back from it."""
    process = start("pmu_sleeps", (TIMES,), group, fifo=True)

    def work() -> None:
        go_on(process)
        wait_stopped(process)

    try:
        return per_switch(counter, work)
    finally:
        end(process)


def per_run(counter: int, program: libbpf.Program) -> float:
    """Instructions per run, the system call and Python's way there included."""
    program.run(0)
    instructions = value(counter)
    for _ in range(TIMES):
        program.run(0)
    return (value(counter) - instructions) / TIMES


def main() -> None:
    counter = open_event("instructions", cpu=0)
    here, there = make_group("here"), make_group("there")
    works: dict[str, Callable[[], float]] = {
        "same job": lambda: ring(counter, here, here),
        "idle": lambda: sleeps(counter, here),
        "another job": lambda: ring(counter, here, there),
    }
    figures: dict[str, float] = {}

    def measure(hook: str) -> None:
        for name, work in works.items():
            figures[f"{name}, {hook}"] = work()

    with ExitStack() as stack:
        lifecycle = Lifecycle("unified", 0, lambda _: None)
        stack.callback(lifecycle.close)
        for group in (here, there):
            lifecycle.assign(group.stat().st_ino, lifecycle.take())
        empty = stack.enter_context(libbpf.Object("empty", FILES))
        empty.load()
        measure("no hook")
        empty.programs["on_switch"].attach()
        measure("empty program")
        empty.programs["on_switch"].detach()
        figures["run, empty program"] = per_run(counter, empty.programs["run"])
        events = perf.open_on_cpus([perf.HARDWARE[name] for name in EVENTS], [0])
        stack.callback(events.close)
        for open_ in range(len(EVENTS) + 1):
            fds = [{0: events.descriptors[name, 0]} for name in EVENTS[:open_]]
            accounting = Accounting(lifecycle, fds)
            accounting.attach()
            measure(f"{open_} counters")
            for program in ("scan", "flush"):
                figures[f"{program}, {open_} counters"] = per_run(counter, accounting.programs[program])
            accounting.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
