"""The last readings of every job on every node, from which rates come."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from expanse_controller.rules.figures import Reading, Span

# A rate is over the time since the newest reading that is so old, else since the oldest one.
SPAN_S = 9.0
# Less than this says little of a job, more than this (or three reports) little of now.
MIN_SPAN_S, MAX_SPAN_S = 4.0, 60.0
# Readings that lie closer together than this are not kept.
STEP_S = 4.5

Node = tuple[str, str]  # name and installation


class JobReading(NamedTuple):
    """A job in a report."""

    key: str
    run: int
    reading: Reading


class NodeReading(NamedTuple):
    """A report, as far as rules need it. `age_s`: how long ago it came."""

    name: str
    install_id: str
    time_ns: int  # the node's wall clock
    interval_s: float
    age_s: float
    jobs: Sequence[JobReading]


_Kept = list[tuple[int, Reading]]  # by time


class History:
    """At most three readings of each job that is in a node's newest report."""

    def __init__(self) -> None:
        self._kept: dict[Node, dict[tuple[str, int], _Kept]] = {}

    def knows(self, node: Node) -> bool:
        """Whether it has seen a report of that node."""
        return node in self._kept

    def spans(self, node: NodeReading) -> list[tuple[JobReading, Span]]:
        """The node's jobs, of each key its newest run, with the time that its rates are over."""
        before = self._kept.get((node.name, node.install_id), {})
        now = self._kept[node.name, node.install_id] = {}
        found: dict[str, tuple[JobReading, Span]] = {}
        longest_s = max(MAX_SPAN_S, 3 * node.interval_s)
        for job in node.jobs:
            kept = now[job.key, job.run] = before.get((job.key, job.run), [])
            span = _span(kept, node.time_ns, job.reading, longest_s)
            if job.key not in found or found[job.key][0].run <= job.run:
                found[job.key] = job, span
        return list(found.values())

    def keep(self, nodes: Collection[Node]) -> None:
        """Forget all nodes but these."""
        for gone in self._kept.keys() - nodes:
            del self._kept[gone]

    def readings(self) -> int:
        """How many are kept."""
        return sum(len(kept) for jobs in self._kept.values() for kept in jobs.values())


def _span(kept: _Kept, time_ns: int, reading: Reading, longest_s: float) -> Span:
    """The span that ends with this reading, which is kept for later ones."""
    if kept and kept[-1][0] > time_ns:
        kept.clear()  # the node's clock was set back
    while len(kept) > 1 and _age_s(kept[1], time_ns) >= SPAN_S:
        del kept[0]
    old, seconds = None, 0.0
    if kept and MIN_SPAN_S <= _age_s(kept[0], time_ns) <= longest_s:
        old, seconds = kept[0][1], _age_s(kept[0], time_ns)
    if not kept or _age_s(kept[-1], time_ns) >= STEP_S:
        kept.append((time_ns, reading))
    return Span(reading, old, seconds)


def _age_s(entry: tuple[int, Reading], time_ns: int) -> float:
    return (time_ns - entry[0]) / 1e9


def newest(nodes: Iterable[NodeReading], most: int) -> tuple[list[NodeReading], int]:
    """Of the nodes so many that they have at most `most` jobs, all told; how many jobs the others have."""
    taken, jobs, left = [], 0, 0
    for node in nodes:
        if jobs + len(node.jobs) > most:
            left += len(node.jobs)
            continue
        jobs += len(node.jobs)
        taken.append(node)
    return taken, left
