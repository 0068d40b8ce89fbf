"""A window in figures: what was called how often, on which node, from which line, and what is not known.

Calls, bytes and times are exact, counted in the kernel. What is said of single kernels, lines, threads and
communicators comes from the events that were kept; how many those are of all is said as well.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from expanse_ebpf.export.origin import Origins
from expanse_ebpf.export.trace_reader import LAUNCHES, Frame, Reader, TraceError, name
from expanse_ebpf.wire.collector_pb2 import Trace, TracePrice, TraceState

T = TypeVar("T")
TOP = 10  # kernels, lines and reasons that are named
_NO_BOUND = (1 << 63) - 1  # a bucket that reaches so far is open
_FEW, _FEW_OF = 5, 0.01  # calls whose end was not seen, and their share: no more are not worth a word
QUANTILES = {"median": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(slots=True)
class Calls:
    """Calls of one kind, exact."""

    calls: int = 0
    bytes: int = 0
    sized: int = 0  # calls whose bytes are known
    timed: int = 0  # calls whose end was seen
    time_ns: int = 0  # in those
    nested: int = 0  # inside another call, which is counted instead
    communicators: set[int] = field(default_factory=set)  # of the events that were kept

    def as_json(self) -> dict[str, Any]:
        """Bytes are absent when those of no call are known, times when no call was timed."""
        return _known(
            calls=self.calls,
            bytes=self.bytes if self.sized else None,
            calls_without_bytes=self.calls - self.sized if 0 < self.sized < self.calls else None,
            timed=self.timed or None,
            seconds=self.time_ns / 1e9 if self.timed else None,
            nested=self.nested or None,
            communicators=len(self.communicators) or None,
        )


@dataclass(slots=True)
class Figures:
    """One node's figures, or those of all nodes together."""

    node: str  # empty: all of them
    state: str
    reason: str
    from_ns: int  # wall clock; 0: not known
    to_ns: int
    traced_ns: int  # summed over the nodes, as are all counts
    traced_share: float
    cost_share: float  # the highest
    prices: list[TracePrice]
    targets: int
    untraced: list[tuple[str, int, str, str, str]]  # node, process, command, state, reason
    rate: float | None  # launches per second of traced time, the nodes' rates added up
    gaps: dict[str, float | None]  # ns, by the names of QUANTILES; None: beyond the last bucket
    gaps_counted: int
    categories: dict[str, Calls]
    functions: dict[str, Calls]  # of launches and graph launches
    copies: dict[str, Calls]  # by kind
    collectives: dict[str, Calls]  # by operation
    kernels: Counter[str]
    unnamed: Counter[str]  # launches of kernels without a name, by why
    lines: Counter[Frame]  # launches, graphs included
    unresolved: Counter[str]  # launches without a stack, by why
    waiting_thread: tuple[str, float] | None  # who waited most, and the share of the traced time
    unpaired: int
    foreign_hits: int
    events: int  # kept
    events_lost: int
    missing: dict[str, str]

    @classmethod
    def of(cls, readers: Sequence[Reader], node: str = "") -> Figures:
        """Those of some nodes' traces, at least one."""
        traces = [reader.trace for reader in readers]
        begins = [reader.span[0] for reader in readers if reader.span[0]]
        figures = cls(
            node=node,
            state=" and ".join(sorted({_state(trace) for trace in traces})),
            reason="; ".join(sorted({name(trace.status.reason) for trace in traces} - {""})),
            from_ns=min(begins, default=0),
            to_ns=max((reader.span[1] for reader in readers), default=0),
            traced_ns=sum(reader.traced_ns for reader in readers),
            traced_share=math.fsum(trace.status.traced_share for trace in traces) / len(traces),
            cost_share=max(trace.status.cost_share for trace in traces),
            prices=[trace.price for trace in traces if trace.HasField("price")],
            targets=sum(trace.status.targets for trace in traces),
            untraced=[
                (reader.node, p.pid, name(p.command), name(p.state), name(p.reason))
                for reader in readers
                for p in reader.trace.processes
                if p.state != "traced"
            ],
            rate=_rate(readers),
            gaps={},
            gaps_counted=sum(gap.count for trace in traces for gap in trace.gaps),
            categories={},
            functions={},
            copies={},
            collectives={},
            kernels=Counter(),
            unnamed=Counter(),
            lines=Counter(),
            unresolved=Counter(),
            waiting_thread=None,
            unpaired=sum(trace.unpaired for trace in traces),
            foreign_hits=sum(trace.foreign_hits for trace in traces),
            events=sum(map(len, readers)),
            events_lost=sum(trace.events_lost for trace in traces),
            missing={},
        )
        figures.gaps = gap_quantiles(traces)
        for reader in readers:
            figures._count(reader)
            figures._look_at_events(reader)
            figures._miss(reader, alone=len(readers) == 1)
        return figures

    @property
    def launches(self) -> int:
        """Kernels launched, those of graphs not counted."""
        return self.calls("launch").calls

    def calls(self, category: str) -> Calls:
        """The calls of a category, none if there were none."""
        return self.categories.get(category, Calls())

    def _count(self, reader: Reader) -> None:
        for total in reader.trace.totals:
            kind = name(total.kind) or "unknown"
            places = [(self.categories, name(total.category) or "other")]
            if total.category in LAUNCHES:
                places.append((self.functions, name(total.function)))
            elif total.category == "copy":
                places.append((self.copies, kind))
            elif total.category == "collective":
                places.append((self.collectives, kind))
            for table, key in places:
                calls = table.setdefault(key, Calls())
                for figure in ("calls", "bytes", "sized", "timed", "time_ns", "nested"):
                    setattr(calls, figure, getattr(calls, figure) + getattr(total, figure))
        for reason, count in reader.trace.stacks_unresolved.items():
            self.unresolved[name(reason)] += count

    def _look_at_events(self, reader: Reader) -> None:
        kernels: Counter[int] = Counter()
        stacks: Counter[int] = Counter()
        waits: Counter[int] = Counter()
        for event in reader.events():
            function = reader.functions[event.function]
            if event.kernel is not None:
                kernels[event.kernel] += 1
            if event.stack is not None and function.category in LAUNCHES:
                stacks[event.stack] += 1
            if function.category == "sync" and event.duration_ns:
                waits[event.thread] += event.duration_ns
            elif function.category == "collective" and event.target:
                operation = self.collectives.get(function.kind or "unknown")
                if operation is not None:
                    operation.communicators.add(event.target)
        for index, count in kernels.items():
            kernel = reader.trace.kernels[index]
            self.kernels[reader.kernel_name(index)] += count
            if not kernel.name:
                self.unnamed[name(kernel.reason) or "not known why"] += count
        origins = Origins()
        for index, count in stacks.items():
            if frames := reader.frames(index):
                self.lines[frames[origins.charged(frames)]] += count
        if waits and reader.traced_ns > 0:
            index, time_ns = waits.most_common(1)[0]
            thread = reader.trace.threads[index]
            share = time_ns / reader.traced_ns
            if self.waiting_thread is None or share > self.waiting_thread[1]:
                self.waiting_thread = f"{name(thread.name)} ({thread.tid})", share

    def _miss(self, reader: Reader, *, alone: bool) -> None:
        trace = reader.trace
        where = "" if alone else f"{reader.node}: "
        if trace.events_lost:
            kept, every = len(reader), len(reader) + trace.events_lost
            self.missing[f"{where}events"] = f"{kept} of {every} were kept; the others are counted alone"
        if not trace.stacks and self.launches:
            self.missing[f"{where}lines"] = "stacks were not asked for"
        timed = sum(total.calls for total in trace.totals if total.timed or total.category == "sync")
        if trace.unpaired > _FEW or trace.unpaired > _FEW_OF * timed:
            self.missing[f"{where}times"] = (
                f"{trace.unpaired} of {timed} ends unseen: the first call from each place is not watched yet"
            )
        if reader.span[1] and not any(_utilisation(counter.name) for counter in trace.counters):
            self.missing[f"{where}GPU utilisation"] = (
                "NVML tells it of no GPU that the job holds"
                if trace.counters
                else "no figures came while the window was open"
            )
        if reader.span[1] and reader.traced_ns <= 0:
            self.missing[f"{where}rate"] = "the probes were in place at no time"
        for file in trace.files:
            if file.reason:
                self.missing[f"{where}{name(file.path)}"] = name(file.reason)

    def as_json(self) -> dict[str, Any]:
        """For scripts; what is not known is absent."""
        hits = sum(price.hits for price in self.prices)
        program = sum(price.program_ns for price in self.prices)
        traced = self.traced_ns / 1e9
        return _known(
            node=self.node or None,
            state=self.state,
            reason=self.reason or None,
            from_ns=self.from_ns or None,
            to_ns=self.to_ns or None,
            traced_seconds=traced if traced > 0 else None,
            traced_share=self.traced_share if self.from_ns else None,
            cost_share=self.cost_share if self.from_ns else None,
            price=_known(
                hits=hits,
                trap_ns=max(price.trap_ns for price in self.prices),
                program_ns_per_hit=program / hits if hits else None,
                attach_ms=max(price.attach_ms for price in self.prices),
                detach_ms=max(price.detach_ms for price in self.prices),
                points=max(price.points for price in self.prices),
                methods=sorted({name(price.method) for price in self.prices} - {""}) or None,
            )
            if self.prices
            else None,
            targets=self.targets,
            untraced=[
                _known(node=node, pid=pid, command=command or None, state=state, reason=reason or None)
                for node, pid, command, state, reason in self.untraced
            ],
            launches=self.launches,
            launches_per_second=self.rate,
            launch_gap_ns=_known(**self.gaps) or None,
            launch_gaps=self.gaps_counted,
            launch_functions=_calls(self.functions),
            categories=_calls(self.categories),
            copies=_calls(self.copies),
            collectives=_calls(self.collectives),
            sync_busiest_thread=self.waiting_thread[0] if self.waiting_thread else None,
            sync_busiest_thread_share=self.waiting_thread[1] if self.waiting_thread else None,
            kernels=[{"name": kernel, "launches": count} for kernel, count in ranked(self.kernels)],
            kernels_of_launches=self.kernels.total(),
            unnamed_kernels=dict(ranked(self.unnamed)),
            lines=[
                _known(function=frame.name, file=frame.file or None, line=frame.line or None, launches=count)
                for frame, count in ranked(self.lines)
            ],
            lines_of_launches=self.lines.total(),
            stacks_unresolved=dict(ranked(self.unresolved)),
            unpaired=self.unpaired,
            foreign_hits=self.foreign_hits,
            events=self.events,
            events_lost=self.events_lost,
            missing=self.missing,
        )


@dataclass(frozen=True, slots=True)
class Summary:
    """One window on one node or several."""

    id: str
    job: str
    rule: str
    evidence: list[tuple[str, float | str]]
    total: Figures
    nodes: list[Figures]

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> Summary:
        """The summary of one window's traces, one of each node. Raises TraceError."""
        if not traces:
            raise TraceError("there is no trace to sum up")
        readers = [Reader(trace) for trace in traces]
        first = readers[0].trace
        return cls(
            id=name(first.status.id),
            job=readers[0].job,
            rule=name(first.status.rule),
            evidence=[
                (name(item.name), item.value if item.HasField("value") else name(item.text))
                for item in first.evidence
            ],
            total=Figures.of(readers, readers[0].node if len(readers) == 1 else ""),
            nodes=[Figures.of([reader], reader.node) for reader in readers] if len(readers) > 1 else [],
        )

    def as_json(self) -> dict[str, Any]:
        """For scripts: the figures of all nodes, and each node's under "nodes" where there are several."""
        evidence = {key: value for key, value in self.evidence if _finite(value)}
        return _known(
            window=self.id,
            job=self.job or None,
            rule=self.rule or None,
            evidence=evidence or None,
            **self.total.as_json(),
            nodes=[figures.as_json() for figures in self.nodes] or None,
        )

    def lines(self, width: int | None = None) -> list[str]:
        """For people, at most `width` columns wide."""
        from expanse_ebpf.export import trace_lines

        return trace_lines.lines(self, width)


def ranked(counts: Counter[T], most: int = TOP) -> list[tuple[T, int]]:
    """The most frequent, in an order that does not change from one run to the next."""
    return sorted(counts.items(), key=lambda item: (-item[1], str(item[0])))[:most]


def gap_quantiles(traces: Iterable[Trace]) -> dict[str, float | None]:
    """Gaps between launches in ns, by the names of QUANTILES; empty when there was none.

    The counts are exact. Where in its bucket a gap lies is not known: those of a bucket are taken to be
    spread evenly. None where the bucket has no upper bound.
    """
    buckets: Counter[tuple[int, int]] = Counter()  # by upper and lower bound
    for trace in traces:
        lower = 0
        for gap in sorted(trace.gaps, key=lambda gap: gap.up_to_ns):
            buckets[gap.up_to_ns, lower] += gap.count
            lower = gap.up_to_ns
    return {key: _quantile(buckets, share) for key, share in QUANTILES.items()} if buckets.total() else {}


def _quantile(buckets: Counter[tuple[int, int]], share: float) -> float | None:
    rank = share * buckets.total()
    below = 0
    for (upper, lower), count in sorted(buckets.items()):
        if count and below + count >= rank:
            return None if upper >= _NO_BOUND else lower + (upper - lower) * (rank - below) / count
        below += count
    return None


def _rate(readers: Iterable[Reader]) -> float | None:
    rates = [
        sum(total.calls for total in reader.trace.totals if total.category == "launch")
        * 1e9
        / reader.traced_ns
        for reader in readers
        if reader.traced_ns > 0
    ]
    return math.fsum(rates) if rates else None


def _state(trace: Trace) -> str:
    known = TraceState.DESCRIPTOR.values_by_number.get(trace.status.state)
    return known.name.removeprefix("TRACE_STATE_").lower() if known else "unknown"


def _utilisation(counter: str) -> bool:
    return counter.startswith("GPU ") and counter.endswith(" utilisation")


def _calls(table: dict[str, Calls]) -> dict[str, Any]:
    return {key: calls.as_json() for key, calls in sorted(table.items())}


def _known(**figures: Any) -> dict[str, Any]:
    """Without what is not known; JSON has no infinite numbers either."""
    return {key: value for key, value in figures.items() if value is not None and _finite(value)}


def _finite(value: object) -> bool:
    return not isinstance(value, float) or math.isfinite(value)
