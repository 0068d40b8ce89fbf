"""What it takes to put 30 probes in place and to take them away, and how long that holds up a program."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_calls.stage import Extent, Hammer, own_pages, until_mapped
from bench.python_stacks.running import summary
from expanse_ebpf.kernel import uprobes
from expanse_ebpf.kernel.gpu_calls import GpuCalls
from expanse_ebpf.python_stacks.elf import Elf
from expanse_ebpf.python_stacks.sampler import Sampler
from expanse_ebpf.tracing.functions import FUNCTIONS
from expanse_ebpf.tracing.points import Point, find_points
from tests.python_stacks.driver import Jobs
from tests.stand_ins.cuda import CudaStandIn, cuda_stand_in
from tests.tracing.windows import into

POINTS = 30
OTHERS = (0, 7)  # processes that map the file as well
RATE = 20  # launches a second of the one that is looked at
LEAST_GAP_NS = 1000  # a reading of the clock takes some 50
MOST_GAP_NS = 1_000_000
_NICE = -20  # of that one: others on the machine must not be taken for the probes
_WINDOW_NICE = -15  # as a window's process has it
_AFTER_NS = 300_000  # the pages are fetched anew after the last probe is gone
_SPREAD = "int {name}(void) __attribute__((aligned(4096)));\nint {name}(void) {{ return 1; }}\n"


class Switch(NamedTuple):
    """One time on and off. Held up: what the hammer was kept from its loop, by pauses of LEAST_GAP_NS or
    more, without those of MOST_GAP_NS or more, which are other programs' turns on the CPU.
    """

    attach_ms: float
    detach_ms: float
    attach_longest_us: float
    detach_longest_us: float
    held_us: float  # in both together
    idle_us: float  # in as long a time without any switch before: interrupts, other programs
    idle_longest_us: float
    pages_within: int  # of the file that are the hammer's own copies while the probes are in place
    pages_left: int  # and when they are gone again


def points_of(path: Path) -> list[Point]:
    """The first POINTS functions of a library."""
    fd = os.open(path, os.O_RDONLY)
    try:
        points, reason = find_points(Elf(lambda offset, size: os.pread(fd, size, offset)))
    finally:
        os.close(fd)
    assert len(points) >= POINTS, reason
    return list(points[:POINTS])


def spread(folder: Path) -> Path:
    """A library with as many functions, each in a page of its own, as in a large library they may be."""
    # Not what the programs call: this would be called in its place.
    names = [each.symbol for each in FUNCTIONS if each.category in ("collective", "free", "sync", "alloc")]
    source, library = folder / "spread.c", folder / "libspread.so"
    source.write_text("".join(_SPREAD.format(name=name) for name in names[:POINTS]))
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


@contextlib.contextmanager
def programs(cuda: CudaStandIn, enter: Callable[[], None], others: int, library: Path) -> Iterator[Hammer]:
    """A hammer, and so many idle processes, all with the same files."""

    def begin() -> None:
        os.nice(_NICE)
        enter()

    with contextlib.ExitStack() as stack:
        os.environ["LD_PRELOAD"] = str(library)
        try:
            for _ in range(others):
                idle = stack.enter_context(cuda.launch("shared", "launch 1; say ready; wait"))
                idle.wait_for("ready")
                until_mapped(idle.pid, library.name)
            hammer = stack.enter_context(Hammer(cuda, begin, RATE, gaps=LEAST_GAP_NS))
        finally:
            del os.environ["LD_PRELOAD"]
        yield hammer


def switching(extent: Extent) -> dict[str, Any]:
    """Rows by how probes are put in place, by the file's layout, and by how many processes map it."""
    cuda, jobs = cuda_stand_in(), Jobs()
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    rows = []
    methods = [*([uprobes.MULTI] if uprobes.method() == uprobes.MULTI else []), uprobes.PERF]
    with contextlib.ExitStack() as stack:
        stack.callback(jobs.close)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        library = spread(Path(folder))
        group, slot = jobs.make("gpu-calls")
        sampler = Sampler(rate_hz=0, waits_hz=0, lifecycle=jobs.lifecycle)
        stack.callback(sampler.close)
        sampler.select_slots(False, {slot: True})
        calls = {}
        for by in methods:
            calls[by] = GpuCalls(lambda _: None, sampler.stacks, jobs.lifecycle.configuration, by=by)
            stack.callback(calls[by].close)
        os.setpriority(os.PRIO_PROCESS, 0, _WINDOW_NICE)
        stack.callback(os.setpriority, os.PRIO_PROCESS, 0, nice)
        for others in OTHERS:
            with programs(cuda, into(group), others, library) as hammer:
                for path, pages in ((cuda.driver, "one page"), (library, "a page each")):
                    for by in methods:
                        if by == uprobes.PERF and (others > 0) != (path == library):
                            continue  # the two extremes are enough: each takes seconds
                        times = extent.perf_switches if by == uprobes.PERF else extent.switches + 1
                        places = _places(calls[by], path)
                        found = [_switch(calls[by], path, places, hammer) for _ in range(times)]
                        first, *rest = found  # the warm-up, where there are more
                        row = _row(by, pages, others + 1, rest or found)
                        rows.append({**row, "pages_left_by_first": first.pages_left})
    return {"switching": rows}


def _places(calls: GpuCalls, path: Path) -> list[tuple[int, int]]:
    return [
        (point.offset, calls.add_point(point.function, calls.add_total(6), 0, 0, stepped=False))
        for point in points_of(path)
    ]


def _switch(calls: GpuCalls, path: Path, places: list[tuple[int, int]], hammer: Hammer) -> Switch:
    hammer.begin()
    time.sleep(0.05)
    began = time.monotonic_ns()
    refused = calls.calls.attach(str(path), places)
    attached = time.monotonic_ns()
    assert not refused, refused
    time.sleep(0.05)
    within = len(own_pages(hammer.pid, path.name))
    ending = time.monotonic_ns()
    calls.detach()
    detached = time.monotonic_ns()
    time.sleep(0.01)
    gaps = hammer.figures().gaps
    on, off = (began, attached + _AFTER_NS), (ending, detached + _AFTER_NS)
    took = on[1] - on[0] + off[1] - off[0]
    before = (max(began - took, began - 49_000_000), began)
    idle = _sum(gaps, *before) * took / (before[1] - before[0])
    return Switch(
        attach_ms=(attached - began) / 1e6,
        detach_ms=(detached - ending) / 1e6,
        attach_longest_us=max(_within(gaps, *on), default=0) / 1e3,
        detach_longest_us=max(_within(gaps, *off), default=0) / 1e3,
        held_us=(_sum(gaps, *on) + _sum(gaps, *off)) / 1e3,
        idle_us=idle / 1e3,
        idle_longest_us=max(_within(gaps, *before), default=0) / 1e3,
        pages_within=within,
        pages_left=len(own_pages(hammer.pid, path.name)),
    )


def _within(gaps: list[tuple[int, int]], begin: int, end: int) -> list[int]:
    return [min(at + length, end) - max(at, begin) for at, length in gaps if at < end and at + length > begin]


def _sum(gaps: list[tuple[int, int]], begin: int, end: int) -> int:
    return sum(length for length in _within(gaps, begin, end) if length < MOST_GAP_NS)


def _row(by: str, pages: str, processes: int, found: list[Switch]) -> dict[str, Any]:
    columns = {name: summary([getattr(each, name) for each in found]) for name in Switch._fields}
    per_point = summary([(each.held_us - each.idle_us) / POINTS for each in found])
    return {
        "by": by, "pages": pages, "processes": processes, "points": POINTS,
        **columns, "held_us_per_point": per_point,
    }  # fmt: skip
