"""What one context switch pays for the accounting hook, beside an empty program on the same hook.

The kernel's own run-time statistics are read, so their price (most of what an empty program shows) is
in both figures and the difference is ours. Pairs alternate; the median difference is printed with its
range. Four software events stand in for the hardware counters where there is no PMU: the read takes
the same path, without the rdpmc instructions.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from expanse_ebpf.jobs.hierarchies import numbers
from expanse_ebpf.kernel import libbpf, perf
from expanse_ebpf.kernel.accounting import Accounting
from expanse_ebpf.kernel.cpus import online
from expanse_ebpf.kernel.lifecycle import Lifecycle

ROOT = Path(__file__).resolve().parent.parent
GROUPS = Path("/sys/fs/cgroup/unified" if Path("/sys/fs/cgroup/unified").is_dir() else "/sys/fs/cgroup")
PAIRS = 7
ROUND_TRIPS = 40_000
CPU = 1
TARGETS = {"same job": 25, "idle next": 25, "crossing, 4 counters": 600}


def ping_pong(here: Path | None, there: Path | None) -> None:
    """Two processes on one CPU that wake each other in turn: one switch per message."""
    to_child, from_child = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        enter(there)
        for _ in range(ROUND_TRIPS):
            os.write(from_child[1], os.read(to_child[0], 1))
        os._exit(0)
    enter(here)
    for _ in range(ROUND_TRIPS):
        os.write(to_child[1], b"x")
        os.read(from_child[0], 1)
    os.waitpid(pid, 0)
    for fd in (*to_child, *from_child):
        os.close(fd)


def enter(group: Path | None) -> None:
    if group is not None:
        (group / "cgroup.procs").write_text("0")
    os.sched_setaffinity(0, {CPU})


def sleep_often() -> None:
    """Every second switch is to the idle task."""
    os.sched_setaffinity(0, {CPU})
    for _ in range(ROUND_TRIPS // 4):
        time.sleep(0.00002)


def per_run(program: libbpf.Program, work: Callable[[], None]) -> float:
    """Nanoseconds per run of `program` while `work` is done in a child."""
    program.attach()
    before = program.statistics()
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    os.waitpid(pid, 0)
    after = program.statistics()
    program.detach()
    return (after[0] - before[0]) / (after[1] - before[1])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / f"empty.{os.uname().machine}.bpf.o"
        command = ["clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", f"-I{ROOT}/bpf/include"]
        subprocess.run([*command, "-c", str(ROOT / "bench/empty.bpf.c"), "-o", str(output)], check=True)
        empty = libbpf.Object("empty", Path(folder))
        empty.load()
    number = next(n for n, name in numbers().items() if name == "unified")
    lifecycle = Lifecycle("unified", number, lambda _: None)
    hardware = perf.self_test()
    real = [name for name, why in hardware.items() if not why]
    names = real[:4] or ["cpu-clock", "task-clock", "page-faults", "context-switches"]
    specs = [(perf.HARDWARE if real else perf.SOFTWARE)[name] for name in names]
    events = perf.open_on_cpus(specs, online())
    fds = [{c: fd for (n, c), fd in events.descriptors.items() if n == name} for name in names]
    accounting = Accounting(lifecycle, fds)
    ours, yardstick = accounting.programs["on_switch"], empty.programs["on_switch"]
    groups = [GROUPS / f"test-expanse-bench-{os.getpid()}-{name}" for name in "ab"]
    statistics_fd = libbpf.enable_statistics()
    try:
        for group in groups:
            group.mkdir()
            lifecycle.assign(group.stat().st_ino, lifecycle.take())
        cases: dict[str, Callable[[], None]] = {
            "same job": lambda: ping_pong(groups[0], groups[0]),
            "idle next": sleep_often,
            "crossing, 4 counters": lambda: ping_pong(groups[0], groups[1]),
        }
        print(f"counters: {', '.join(names)}{'' if real else ' (no PMU here: software events)'}")
        print(
            f"{'switch':24} {'empty':>8} {'ours':>8} {'above empty':>24} {'target':>8}   (ns, {PAIRS} pairs)"
        )
        for name, work in cases.items():
            pairs = []
            for i in range(PAIRS + 1):
                order = (yardstick, ours) if i % 2 else (ours, yardstick)
                figures = {program: per_run(program, work) for program in order}
                if i:  # the first is the warm-up
                    pairs.append((figures[yardstick], figures[ours]))
                print(f"{name}: pair {i}/{PAIRS}", file=sys.stderr)
            above = sorted(b - a for a, b in pairs)
            middle = [statistics.median(column) for column in zip(*pairs, strict=True)]
            spread = f"{statistics.median(above):.0f} ({above[0]:.0f} to {above[-1]:.0f})"
            print(f"{name:24} {middle[0]:8.0f} {middle[1]:8.0f} {spread:>24} {'<= ' + str(TARGETS[name]):>8}")
    finally:
        os.close(statistics_fd)
        accounting.close()
        lifecycle.close()
        empty.close()
        events.close()
        for group in groups:
            if group.exists():
                group.rmdir()


if __name__ == "__main__":
    main()
