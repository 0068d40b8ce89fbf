"""How much is measured, and the programs that are looked at."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from tests.stand_ins.cuda import CudaStandIn, Program

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Extent:
    """How much; times in seconds."""

    rounds: int = 12  # of hits, for each case
    calls: int = 1500  # in each
    switches: int = 16  # on and off, for each case
    perf_switches: int = 2  # and with perf events, which take seconds
    blocks: int = 6  # of a loop without a window, in one, and in one with a budget
    without_s: float = 1.0
    unbounded_s: float = 1.2
    budget_s: float = 5.5  # the burst that a window begins with is over after 5 s
    bystander_blocks: int = 6
    memory_s: float = 5.0


QUICK = Extent(
    rounds=2, calls=500, switches=3, perf_switches=1, blocks=1, without_s=0.4, unbounded_s=0.4, budget_s=1.5,
    bystander_blocks=1, memory_s=2.0,
)  # fmt: skip


class Figures(NamedTuple):
    """What a hammer says of a while."""

    launches: int
    seconds: float
    cpu_ns: int
    mean_ns: float  # of a launch, by the hammer's clock
    median_ns: int
    gaps: list[tuple[int, int]]  # when, how long: in ns of the monotonic clock

    @property
    def cpu_ns_per_launch(self) -> float:
        return self.cpu_ns / self.launches


class Hammer:
    """tests/stand_ins/cuda_programs/hammer.c, at work until the context ends."""

    def __init__(self, cuda: CudaStandIn, enter: Callable[[], None], rate: float = 0, **options: int) -> None:
        said = [f"{name}={value}" for name, value in options.items()]
        self._program: Program = cuda.start("hammer-shared", f"{rate:g}", "3600", *said, preexec_fn=enter)
        self.pid = self._program.pid
        until_mapped(self.pid, "libcuda.so.1")

    def begin(self) -> None:
        """What is measured begins now."""
        self.figures()

    def figures(self) -> Figures:
        """Those since it began, or was asked before."""
        os.kill(self.pid, signal.SIGUSR1)
        assert self._program.process.stdout is not None
        said = json.loads(self._program.process.stdout.readline())
        assert not said["errors"]
        gaps = [(at, length) for at, length in said.get("gaps", ())]
        names = ("launches", "seconds", "cpu_ns", "mean_ns", "median_ns")
        return Figures(*(said[name] for name in names), gaps)

    def __enter__(self) -> Hammer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._program.__exit__(kind, error, trace)


def until_mapped(pid: int, name: str) -> None:
    """Until a process has mapped a library."""
    maps, until = Path(f"/proc/{pid}/maps"), time.monotonic() + 20
    while name not in maps.read_text():
        if time.monotonic() > until:
            raise SystemExit(f"gpu_calls: process {pid} has not loaded {name}")
        time.sleep(0.01)


def own_pages(pid: int, name: str) -> list[int]:
    """Which pages of a file (in its order, by offset) are a process's own copies, in executable mappings."""
    pages = []
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as pagemap:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, kind, offset, _, _, *path = line.split()
            if not path or not path[0].endswith("/" + name) or "x" not in kind:
                continue
            begin, end = (int(each, 16) for each in span.split("-"))
            for number in range((end - begin) // 4096):
                entry = int.from_bytes(os.pread(pagemap.fileno(), 8, (begin // 4096 + number) * 8), "little")
                # Documentation/admin-guide/mm/pagemap.rst: 63 present, 61 of a file or shared
                if entry >> 63 & 1 and not entry >> 61 & 1:
                    pages.append(int(offset, 16) // 4096 + number)
    return pages
