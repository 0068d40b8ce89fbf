"""What a hit costs the thread that makes it, without any program to speak of and with what a window does."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_calls.stage import Extent
from bench.python_stacks.running import summary
from expanse_ebpf.kernel.gpu_calls import Call, GpuCalls, Record
from expanse_ebpf.python_stacks.sampler import Sampler
from expanse_ebpf.tracing.functions import FUNCTIONS
from expanse_ebpf.tracing.probe_target import ProbeTarget
from tests.python_stacks.driver import Jobs

LAUNCH = next(each for each in FUNCTIONS if each.symbol == "cudaLaunchKernel")
FRAMES = (15, 30, 100)
FIRST = {False: "emulated", True: "stepped"}  # what the kernel does about the instruction


class Caller(NamedTuple):
    """A process of the job whose thread calls the function, that many Python frames deep."""

    pid: int
    ask: int
    answer: int

    def measure(self) -> float:
        """CPU time of a call, ns."""
        os.write(self.ask, b"\n")
        return float(os.read(self.answer, 64))


@contextlib.contextmanager
def caller(target: ProbeTarget, group: Path, frames: int, calls: int) -> Iterator[Caller]:
    questions, answers = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            (group / "cgroup.procs").write_text("0")
            os.close(questions[1])
            _serve(target, frames, calls, questions[0], answers[1])
        finally:
            os._exit(0)
    os.close(questions[0])
    os.close(answers[1])
    try:
        assert os.read(answers[0], 8) == b"ready"
        yield Caller(pid, questions[1], answers[0])
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(questions[1])
        os.close(answers[0])


def _serve(target: ProbeTarget, frames: int, calls: int, questions: int, answers: int) -> None:
    """Runs in the child, which has forked in the midst of this program: some frames are there already."""
    if len(inspect.stack(0)) < frames - 1:  # call_loop() is the last
        _serve(target, frames, calls, questions, answers)
        return
    os.write(answers, b"ready")
    while os.read(questions, 1):
        began = time.thread_time_ns()
        target.call_loop(calls)
        os.write(answers, f"{(time.thread_time_ns() - began) / calls:.1f}".encode())


class Probed:
    """The programs of a window, on the function of a target."""

    def __init__(self, jobs: Jobs, slot: int) -> None:
        self.sampler = Sampler(rate_hz=0, waits_hz=0, lifecycle=jobs.lifecycle)
        self.sampler.select_slots(False, {slot: True})
        configuration = jobs.lifecycle.configuration
        self.calls = GpuCalls(self._record, self.sampler.stacks, configuration, buffer_bytes=16 << 20)
        self.calls.window.counting = 1
        total = self.calls.add_total()
        self._empty = self.calls.add_calibration()
        self._full = {
            stepped: self.calls.add_point(LAUNCH, total, 0, 1 << 20, stepped=stepped) for stepped in FIRST
        }
        self._records: list[Call] = []

    def _record(self, record: Record) -> None:
        if isinstance(record, Call):
            self._records.append(record)

    def measure(self, target: ProbeTarget, by: Caller, stepped: bool, what: str) -> tuple[float, float]:
        """CPU time of a call and what of it passed in the program, ns."""
        cookie = self._empty if what == "empty" else self._full[stepped]
        self.calls.window.stacks = what == "stack"
        if what != "without":
            refused = self.calls.calls.attach(target.path, [(target.offset, cookie)])
            assert not refused, refused
        before = self._spent()
        took = by.measure()
        hits, program_ns = (now - then for now, then in zip(self._spent(), before, strict=True))
        self.calls.detach()
        self._records.clear()
        while self.calls.consume(100_000):
            self.sampler.consume()
        self.sampler.consume()
        return took, program_ns / hits if hits else 0.0

    def _spent(self) -> tuple[int, int]:
        threads = self.calls.threads()
        return sum(each.hits for each in threads), sum(each.program_ns for each in threads)

    def frames(self) -> tuple[int, float]:
        """How deep the stack of the last launch was, and the share of the last launches that have one."""
        found = [each for each in self._records if each.outcome == "resolved"]
        if not found:
            return 0, 0.0
        stack, _ = self.sampler.stack(found[-1].stack)
        return len(stack.frames), len(found) / len(self._records)

    def close(self) -> None:
        self.calls.close()
        self.sampler.close()


def hits(extent: Extent) -> dict[str, Any]:
    """Rows by the first instruction and by what the probe does."""
    jobs = Jobs()
    rows: list[dict[str, Any]] = []
    try:
        group, slot = jobs.make("gpu-calls")
        for stepped in FIRST:
            with contextlib.ExitStack() as stack:
                target = stack.enter_context(ProbeTarget(single_step=stepped))
                callers = {
                    frames: stack.enter_context(caller(target, group, frames, extent.calls))
                    for frames in FRAMES
                }
                probed = Probed(jobs, slot)
                stack.callback(probed.close)
                for each in callers.values():
                    probed.sampler.prepare(each.pid)
                rows += _rows(extent, probed, target, callers, stepped)
    finally:
        jobs.close()
    return {"hits": rows}


def _rows(
    extent: Extent, probed: Probed, target: ProbeTarget, callers: dict[int, Caller], stepped: bool
) -> list[dict[str, Any]]:
    cases = [("empty", FRAMES[1]), ("full", FRAMES[1]), *(("stack", frames) for frames in FRAMES)]
    took: dict[tuple[str, int], list[tuple[float, float, float]]] = {case: [] for case in cases}
    deep: dict[tuple[str, int], tuple[int, float]] = {}
    for number in range(extent.rounds + 1):
        for case in random.sample(cases, len(cases)):
            what, frames = case
            by = callers[frames]
            without, _ = probed.measure(target, by, stepped, "without")
            each, program = probed.measure(target, by, stepped, what)
            deep[case] = probed.frames()
            if number:  # the first learns the stacks
                took[case].append((without, each - without, program))
    rows = []
    for (what, frames), values in took.items():
        without, added, program = (summary(column) for column in zip(*values, strict=True))
        depth, resolved = deep[what, frames]
        rows.append(
            {
                "first": FIRST[stepped], "what": what, "frames": depth if what == "stack" else 0,
                "resolved": resolved, "without_ns": without, "added_ns": added, "program_ns": program,
            }
        )  # fmt: skip
    return rows
