"""The figures that rules may ask for: what they are, and how they come from the samples of a job.

A rate needs two samples of a node that lie some ten seconds apart. What a node's sample does not have, a
counter that has begun anew and a figure that cannot be true are not known; then the figure of the whole job
is not known either, since a sum that leaves a node out says something else.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expanse_controller.columns import COLUMNS, Value, values
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_HELD_IDLE, JobSample

# A share may come out somewhat above 1, since its two parts are not read at the same moment.
SHARE_TOLERANCE = 1.05
MIN_PEERS = 2
PEERS = "peers_"

# What rules need of a stored sample.
READ = (
    "state",
    "processes",
    "cpu_ns",
    "memory_bytes",
    "memory_limit_bytes",
    "io_read_bytes",
    "io_write_bytes",
    "run_queue_wait_ns",
    "cpu_pressure_some_us",
    "memory_pressure_some_us",
    "io_pressure_some_us",
    "gpus",
    "gpu_busy_ns",
    "gpu_measured_ns",
    "gpu_sm_active_ns",
    "gpu_profiled_ns",
    "gpu_power_mw",
    "gpu_memory_bytes",
    "gpu_memory_total_bytes",
    "gpu_throttled_ns",
    "python_loading_ns",
    "python_hottest_permille",
    "python_waiting_permille",
)
Reading = tuple[Value, ...]  # in the order of READ
_PICK = operator.itemgetter(*(COLUMNS.index(name) for name in READ))
_AT = {name: place for place, name in enumerate(READ)}
_STATE, GPUS = _AT["state"], _AT["gpus"]


def reading(sample: JobSample) -> Reading:
    """What rules need of `sample`, as the store would have it."""
    picked: Reading = _PICK(values(sample))
    return picked


class Span(NamedTuple):
    """A job on a node: its newest reading and an earlier one, `seconds` before; None: there is none yet."""

    new: Reading
    old: Reading | None
    seconds: float


# A figure's numerator and denominator on one node; None: not known.
Term = Callable[[Span], tuple[float, float] | None]


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure by its name in expressions. `over_nodes`: how a job's comes from those of its nodes.

    sum: of all nodes · mean: weighted, by GPUs or by measured time where there are such, else by node ·
    most: the largest · all: true on every node · peers: the median of the others' · job: not from samples
    """

    name: str
    unit: str  # empty: true or false
    about: str
    over_nodes: str
    term: Term | None = None
    is_gpu: bool = False  # nodes on which the job holds no GPU do not matter

    @property
    def is_number(self) -> bool:
        """Whether it is not just true or false."""
        return self.unit != ""

    @property
    def is_share(self) -> bool:
        """Whether it lies between 0 and 1."""
        return self.unit == _SHARE


def _gauge(name: str, scale: float = 1.0) -> Term:
    at = _AT[name]

    def term(span: Span) -> tuple[float, float] | None:
        value = span.new[at]
        return None if value is None else (value * scale, 1.0)

    return term


def _ratio(name: str, whole: str) -> Term:
    at, of = _AT[name], _AT[whole]

    def term(span: Span) -> tuple[float, float] | None:
        value, total = span.new[at], span.new[of]
        return None if value is None or not total else (float(value), float(total))

    return term


def _rate(name: str, scale: float = 1.0) -> Term:
    at = _AT[name]

    def term(span: Span) -> tuple[float, float] | None:
        grown = _grown(span, at)
        return None if grown is None else (grown * scale, span.seconds)

    return term


def _rate_per_gpu(name: str, scale: float) -> Term:
    at = _AT[name]

    def term(span: Span) -> tuple[float, float] | None:
        grown, gpus = _grown(span, at), span.new[GPUS]
        return None if grown is None or not gpus else (grown * scale, span.seconds * gpus)

    return term


def _rate_ratio(name: str, whole: str) -> Term:
    at, of = _AT[name], _AT[whole]

    def term(span: Span) -> tuple[float, float] | None:
        grown, total = _grown(span, at), _grown(span, of)
        return None if grown is None or not total else (grown, total)

    return term


def _grown(span: Span, at: int) -> float | None:
    """By how much a counter grew; None where it began anew."""
    new, old = span.new[at], span.old[at] if span.old else None
    return new - old if new is not None and old is not None and new >= old else None


def _held_idle(span: Span) -> tuple[float, float]:
    return float(span.new[_STATE] == JOB_STATE_HELD_IDLE), 1.0


_SHARE = "share, 0 to 1"
_ALL = (
    Figure("nodes", "nodes", "Nodes that the job is on.", "job"),
    Figure("age_s", "s", "Age of the oldest of its nodes' newest reports.", "job"),
    Figure("processes", "processes", "Of the user's.", "sum", _gauge("processes")),
    Figure("held_idle", "", "Allocated, and no process of the user's on any node.", "all", _held_idle),
    Figure("cpu_cores", "cores", "CPU time used per second.", "sum", _rate("cpu_ns", 1e-9)),
    Figure(
        "run_queue_wait",
        "threads",
        "Threads that waited for a CPU, on average.",
        "sum",
        _rate("run_queue_wait_ns", 1e-9),
    ),
    *(
        Figure(
            f"{kind}_pressure",
            _SHARE,
            f"Of the time in which some thread was held up for want of {want} (the kernel's PSI, some).",
            "mean",
            _rate(f"{kind}_pressure_some_us", 1e-6),
        )
        for kind, want in (("cpu", "CPUs"), ("memory", "memory"), ("io", "disk or network storage"))
    ),
    Figure(
        "memory_share",
        _SHARE,
        "Memory used of the job's limit; not known without one.",
        "most",
        _ratio("memory_bytes", "memory_limit_bytes"),
    ),
    Figure("io_read", "bytes/s", "Read from block devices.", "sum", _rate("io_read_bytes")),
    Figure("io_write", "bytes/s", "Written to block devices.", "sum", _rate("io_write_bytes")),
    Figure("gpus", "GPUs", "GPUs and MIG instances that it holds.", "sum", _gauge("gpus"), True),
    Figure(
        "gpu_busy",
        _SHARE,
        "Of the time in which some kernel ran, over its GPUs.",
        "mean",
        _rate_ratio("gpu_busy_ns", "gpu_measured_ns"),
        True,
    ),
    Figure(
        "gpu_sm_active",
        _SHARE,
        "Of the multiprocessors' time in which one had work, over its GPUs. From GPM: Hopper and newer.",
        "mean",
        _rate_ratio("gpu_sm_active_ns", "gpu_profiled_ns"),
        True,
    ),
    Figure(
        "gpu_memory_share",
        _SHARE,
        "GPU memory of its processes of all that it holds.",
        "mean",
        _ratio("gpu_memory_bytes", "gpu_memory_total_bytes"),
        True,
    ),
    Figure(
        "gpu_power", "W", "Of GPUs that it holds alone and whole.", "sum", _gauge("gpu_power_mw", 1e-3), True
    ),
    Figure(
        "throttled",
        _SHARE,
        "Of the time in which power, heat or a brake held its GPUs back, over its GPUs.",
        "mean",
        _rate_per_gpu("gpu_throttled_ns", 1e-9),
        True,
    ),
    Figure(
        "loading",
        "threads",
        "Python threads inside a data loader's `__next__`, on average.",
        "sum",
        _rate("python_loading_ns", 1e-9),
    ),
    Figure(
        "python_hottest_share",
        _SHARE,
        "Of the Python threads' time on CPUs in the hottest function.",
        "mean",
        _gauge("python_hottest_permille", 1e-3),
    ),
    Figure(
        "python_waiting_share",
        _SHARE,
        "Of the Python threads' waiting time in the function in which they wait most.",
        "mean",
        _gauge("python_waiting_permille", 1e-3),
    ),
    Figure(f"{PEERS}gpu_busy", _SHARE, "Median of `gpu_busy` of the job's other nodes.", "peers"),
    Figure(f"{PEERS}cpu_cores", "cores", "Median of `cpu_cores` of the job's other nodes.", "peers"),
)
FIGURES: Mapping[str, Figure] = {figure.name: figure for figure in _ALL}


def of_job(figure: Figure, spans: Sequence[Span]) -> float | bool | list[int]:
    """A job's figure from its nodes'; or the places in `spans` of those whose part is not known."""
    assert figure.term is not None
    terms, unknown = [], []
    for place, span in enumerate(spans):
        term = figure.term(span)
        if term is not None:
            terms.append(term)
        elif not figure.is_gpu or span.new[GPUS]:
            unknown.append(place)
    if not unknown and terms:
        value = _combined(figure, terms)
        if value is not None:
            return value
    return unknown or list(range(len(spans)))


def _combined(figure: Figure, terms: Sequence[tuple[float, float]]) -> float | bool | None:
    """The nodes' parts as one; None when it cannot be true (not a number, a share of more than 1)."""
    how = figure.over_nodes
    if how == "all":
        return all(part for part, _ in terms)
    if len(terms) == 1:
        value = terms[0][0] / terms[0][1]
    elif how == "sum":
        value = sum(part / whole for part, whole in terms)
    elif how == "most":
        value = max(part / whole for part, whole in terms)
    else:
        value = sum(part for part, _ in terms) / sum(whole for _, whole in terms)
    if not 0 <= value < math.inf:
        return None
    if figure.is_share and value > 1:
        return 1.0 if value <= SHARE_TOLERANCE else None
    return value


def medians_of_others(parts: Sequence[float | None]) -> list[float | None]:
    """For each the median of the others that are known; None where those are fewer than MIN_PEERS."""
    ranked = sorted((part, i) for i, part in enumerate(parts) if part is not None)
    ordered = [part for part, _ in ranked]
    place = {i: rank for rank, (_, i) in enumerate(ranked)}
    return [_median_without(ordered, place.get(i)) for i in range(len(parts))]


def _median_without(ordered: Sequence[float], place: int | None) -> float | None:
    """The median of `ordered` without the entry at `place`, if there is one."""
    count = len(ordered) - (place is not None)
    if count < MIN_PEERS:
        return None

    def at(rank: int) -> float:
        return ordered[rank + (place is not None and rank >= place)]

    return (at((count - 1) // 2) + at(count // 2)) / 2
