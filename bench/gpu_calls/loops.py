"""How much slower a loop that launches gets in a window, and what the window's process takes meanwhile."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_calls.stage import SECOND, Extent, Figures, Hammer
from bench.python_stacks.running import cpu_s, pss_bytes, say, summary
from expanse_ebpf.wire.collector_pb2 import Trace
from tests.stand_ins.cuda import CudaStandIn, cuda_stand_in
from tests.tracing.windows import Node, into, node

RATES = (1_000, 10_000, 100_000)  # launches a second, without a window
BUDGETS = {"on": 0.02, "off": 1.0}  # most of the thread's time
OWN, OTHER = "own", "other"  # the loop is the traced job's, or that of a job that maps the same files
_AHEAD_S = 1.5  # in which a window's process begins
_LOOK_S = 0.25  # between two looks at it
_STEPS = 10_000  # of the loop that tells what a step takes


class Traced(NamedTuple):
    """A window that is over, and what its process took."""

    trace: Trace
    state: str
    bytes: int
    late_s: float  # that it opened after it was to
    cores: float  # while it was open
    cpu_s: float  # from its begin to its end
    pss_bytes: int  # the most


@dataclass
class Case:
    """One rate and kind of loop, and what was seen of it."""

    rate: int
    whose: str
    without: list[Figures]
    pairs: dict[str, list[tuple[Figures, Figures, Traced]]]  # before, within, the window


def steps_for(cuda: CudaStandIn, enter: Callable[[], None], rate: int) -> int:
    """How many steps of arithmetic before each launch make a loop of that rate."""
    with Hammer(cuda, enter, work=_STEPS) as hammer:
        hammer.begin()
        time.sleep(0.3)
        said = hammer.figures()
    step_ns = (said.cpu_ns_per_launch - said.mean_ns) / _STEPS
    return max(1, round((SECOND / rate - said.mean_ns) / step_ns))


def measured(
    machine: Node, group: Path, hammer: Hammer, seconds: float, budget: str
) -> tuple[Figures, Traced]:
    """What the hammer says of a window, from its first moment to its last."""
    start_ns = time.time_ns() + round(_AHEAD_S * SECOND)
    window = machine.window(
        group, seconds=seconds, cost_share=BUDGETS[budget], start_ns=start_ns, id=f"{start_ns:016x}"
    )
    pid, ended = window.process.pid, list[Trace]()
    reader = threading.Thread(target=lambda: ended.append(window.end()))
    reader.start()
    time.sleep(max(0.0, start_ns - time.time_ns()) / 1e9)
    hammer.begin()
    until = time.monotonic() + seconds
    before, began, most = cpu_s(pid), time.monotonic(), 0
    while (left := until - time.monotonic()) > 0:
        most = max(most, pss_bytes(pid))
        time.sleep(min(left, _LOOK_S))
    figures = hammer.figures()
    spent = cpu_s(pid)
    cores = (spent - before) / (time.monotonic() - began)
    with suppress(OSError, ValueError):  # until it has gone
        while reader.is_alive():
            most, spent = max(most, pss_bytes(pid)), cpu_s(pid)
            time.sleep(0.02)
    reader.join()
    (trace,) = ended
    late_s = (window.last.from_ns - start_ns) / 1e9
    return figures, Traced(trace, window.state, len(window.data), late_s, cores, spent, most)


def loops(extent: Extent) -> dict[str, Any]:
    """Rows by rate, budget and whose the loop is."""
    cuda = cuda_stand_in()
    rows = []
    with node() as machine:
        own, other = machine.job(OWN), machine.job(OTHER)
        with cuda.launch("shared", "launch 1; say ready; wait", preexec_fn=into(other)) as idle:
            idle.wait_for("ready")
            for rate in RATES:
                rows += _rows(_case(extent, machine, cuda, own, own, rate, extent.blocks))
            rows += _rows(_case(extent, machine, cuda, own, other, RATES[1], extent.bystander_blocks))
    return {"loops": rows}


def _case(
    extent: Extent, machine: Node, cuda: CudaStandIn, job: Path, traced: Path, rate: int, blocks: int
) -> Case:
    """A loop in `job` while windows open on the job `traced`."""
    case = Case(rate, OWN if job == traced else OTHER, [], {budget: [] for budget in BUDGETS})
    lengths = {"on": extent.budget_s, "off": extent.unbounded_s}
    if case.whose == OTHER:
        del lengths["on"]  # it counts what the others pay, and here they pay little
    with Hammer(cuda, into(job), work=steps_for(cuda, into(job), rate)) as hammer:
        for block in range(blocks):
            say(f"loops: {rate} launches/s, {case.whose} job, block {block + 1} of {blocks}")
            for budget in random.sample(list(lengths), len(lengths)):
                hammer.begin()
                time.sleep(extent.without_s)
                without = hammer.figures()
                within, window = measured(machine, traced, hammer, lengths[budget], budget)
                case.pairs[budget].append((without, within, window))
    return case


def _rows(case: Case) -> list[dict[str, Any]]:
    rows = []
    for budget, pairs in case.pairs.items():
        if not pairs:
            continue
        windows = [window for _, _, window in pairs]
        last = [window.trace.status for window in windows]
        events = [len(window.trace.events.time_ns) for window in windows]
        rows.append(
            {
                "rate": case.rate, "whose": case.whose, "budget": budget,
                "states": sorted({window.state for window in windows}),
                "without_per_s": summary([without.launches / without.seconds for without, _, _ in pairs]),
                "within_per_s": summary([within.launches / within.seconds for _, within, _ in pairs]),
                "slower_percent": summary(
                    [100 * (b.cpu_ns_per_launch / a.cpu_ns_per_launch - 1) for a, b, _ in pairs]
                ),
                # As the window's budget has it: of the time that passed.
                "share_percent": summary(
                    [
                        100 * (b.cpu_ns_per_launch - a.cpu_ns_per_launch) * b.launches / b.seconds / SECOND
                        for a, b, _ in pairs
                    ]
                ),
                "told_percent": summary([100 * status.cost_share for status in last]),
                "traced_percent": summary([100 * status.traced_share for status in last]),
                "spans": summary([len(window.trace.spans) for window in windows]),
                "late_ms": summary([1e3 * window.late_s for window in windows]),
                "cores": summary([window.cores for window in windows]),
                "cpu_s": summary([window.cpu_s for window in windows]),
                "pss_bytes": summary([window.pss_bytes for window in windows]),
                "events": summary(events),
                "events_lost": summary([window.trace.events_lost for window in windows]),
                "bytes_per_event": summary(
                    [w.bytes / n for w, n in zip(windows, events, strict=True) if n] or [0.0]
                ),
                "foreign_hits": summary([window.trace.foreign_hits for window in windows]),
                "median_ns": summary([within.median_ns for _, within, _ in pairs]),
                "median_without_ns": summary([without.median_ns for without, _, _ in pairs]),
            }
        )  # fmt: skip
    return rows
