"""The summary of a window as people read it."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from datetime import UTC, datetime

from expanse_ebpf import text
from expanse_ebpf.export.trace_summary import Calls, Figures, Summary, ranked

_SHOWN = 5  # kernels, lines and the like
_LEAST_PLACE = 8  # columns of a file and line, or they are not worth it
_UNLIKE = 0.2  # off the median of the nodes is said


def lines(summary: Summary, width: int | None = None) -> list[str]:
    """The summary, at most `width` columns wide."""
    found = [*_head(summary), *_figures(summary.total, width), *_nodes(summary.nodes)]
    return found if width is None else [text.cut(line, width) for line in found]


def _head(summary: Summary) -> Iterator[str]:
    total = summary.total
    where = f"{len(summary.nodes)} nodes" if summary.nodes else total.node
    reason = f" ({total.reason})" if total.reason else ""
    yield f"{summary.job or 'job not known'} on {where}, window {summary.id}: {total.state}{reason}"
    if summary.rule:
        seen = ", ".join(f"{key} {_plain(value)}" for key, value in summary.evidence)
        yield f"opened by the rule {summary.rule}" + (f": {seen}" if seen else "")
    if total.from_ns:
        yield f"{_clock(total.from_ns)} UTC, {(total.to_ns - total.from_ns) / 1e9:.1f} s"
        yield (
            f"traced for {text.percent(total.traced_share)} of it; "
            f"cost the busiest thread {text.percent(total.cost_share)} of its time"
        )
    if total.prices:
        hits, inside = (sum(getattr(p, figure) for p in total.prices) for figure in ("hits", "program_ns"))
        trap = max(price.trap_ns for price in total.prices)
        program = f" and {text.nanoseconds(inside / hits)} in the tracer" if hits else ""
        yield f"{_number(hits, 'probe hit')}: {text.nanoseconds(trap)} in the kernel{program} each"


def _figures(all_of: Figures, width: int | None) -> Iterator[str]:
    yield f"{_number(all_of.targets, 'process', 'processes')} traced"
    for node, pid, command, state, reason in all_of.untraced[:_SHOWN]:
        place = f" on {node}" if not all_of.node else ""
        yield f"  not traced: {pid} {command}{place}: {reason or state.replace('_', ' ')}"
    yield from _more(len(all_of.untraced), "processes not traced")
    yield from _launches(all_of)
    for function, calls in sorted(all_of.functions.items(), key=lambda item: -item[1].calls):
        if calls.calls:
            nested = f", {calls.nested} more inside other calls" if calls.nested else ""
            yield f"  {calls.calls:>9}  {function}{nested}"
        elif calls.nested:
            yield f"  {function}: only inside other calls ({calls.nested})"
    yield from _kernels(all_of)
    yield from _python(all_of, width)
    yield from _calls(all_of)
    for part, why in sorted(all_of.missing.items()):
        yield f"{part}: {why}"
    if all_of.foreign_hits:
        yield f"{all_of.foreign_hits} hits by other jobs that map the same files"


def _launches(all_of: Figures) -> Iterator[str]:
    graphs = all_of.calls("graph").calls
    line = _number(all_of.launches, "launch", "launches")
    if all_of.rate is not None:
        line += f", {text.count(all_of.rate)}/s"
    if graphs:
        line += f", and {graphs} of graphs"
    yield line
    if all_of.gaps:
        gaps = ", ".join(
            f"{text.nanoseconds(value) if value is not None else 'beyond the last bucket'} {key}"
            for key, value in all_of.gaps.items()
        )
        yield f"  from one to the next: {gaps}"


def _kernels(all_of: Figures) -> Iterator[str]:
    if all_of.kernels:
        yield f"kernels, of {_of_events(all_of.kernels.total(), all_of)}:"
        for kernel, count in ranked(all_of.kernels, _SHOWN):
            yield f"  {text.percent(count / all_of.kernels.total()):>6}  {kernel}"
        yield from _more(len(all_of.kernels), "kernels")
    for reason, count in ranked(all_of.unnamed):
        yield f"  {_number(count, 'launch', 'launches')} of kernels without a name: {reason}"


def _python(all_of: Figures, width: int | None) -> Iterator[str]:
    if all_of.lines:
        yield f"Python lines, of {_of_events(all_of.lines.total(), all_of)} with a stack:"
        for frame, count in ranked(all_of.lines, _SHOWN):
            line = f"  {text.percent(count / all_of.lines.total()):>6}  {frame.name}  "
            room = len(frame.place) if width is None else width - text.cell_width(line)
            # Of a long path the end tells more, and the line's number stands there.
            fits = text.cell_width(frame.place) <= room or room < _LEAST_PLACE
            yield line + (frame.place if fits else "…" + frame.place[1 - room :])
        yield from _more(len(all_of.lines), "lines")
    if all_of.unresolved:
        reasons = ", ".join(f"{count} {why.replace('_', ' ')}" for why, count in ranked(all_of.unresolved))
        yield f"launches without a stack: {reasons}"


def _calls(all_of: Figures) -> Iterator[str]:
    if (syncs := all_of.calls("sync")).calls:
        line = _number(syncs.calls, "synchronisation")
        if syncs.timed:
            line += f", {text.nanoseconds(syncs.time_ns)} in the {syncs.timed} whose end was seen"
        yield line
        if all_of.waiting_thread:
            thread, share = all_of.waiting_thread
            yield f"  most in {thread}: {text.percent(share)} of the traced time"
    for table, title in ((all_of.copies, "copies"), (all_of.collectives, "collectives")):
        made = [(kind, calls) for kind, calls in table.items() if calls.calls]  # others are inside these
        if made:
            yield f"{title}:"
        for kind, calls in sorted(made, key=lambda item: (-item[1].bytes, item[0])):
            yield f"  {calls.calls:>9}  {kind.replace('_', ' ')}{_sized(calls)}"
    for category, title in (("set", "fill"), ("alloc", "allocation"), ("free", "free")):
        if (calls := all_of.calls(category)).calls:
            yield f"{_number(calls.calls, title)}{_sized(calls)}"


def _nodes(nodes: list[Figures]) -> Iterator[str]:
    """A line of each node; who is unlike the others is said to be."""
    rates = [node.rate for node in nodes if node.rate is not None]
    usual = statistics.median(rates) if rates else 0.0
    for node in sorted(nodes, key=lambda node: (node.rate is None, node.rate or 0.0, node.node)):
        parts = [node.state, f"{node.launches} launches"]
        if node.rate is not None:
            unlike = usual > 0 and abs(node.rate / usual - 1) > _UNLIKE
            parts.append(
                f"{text.count(node.rate)}/s" + (f" ({node.rate / usual:.2f} of the median)" if unlike else "")
            )
        if node.waiting_thread:
            parts.append(f"{text.percent(node.waiting_thread[1])} in syncs")
        if (gap := node.gaps.get("median")) is not None:
            parts.append(f"{text.nanoseconds(gap)} median gap")
        if node.from_ns:
            parts.append(f"traced {text.percent(node.traced_share)}")
        yield f"node {node.node}: {', '.join(parts)}" + (f" ({node.reason})" if node.reason else "")


def _of_events(count: int, all_of: Figures) -> str:
    every = all_of.events + all_of.events_lost
    lost = f" ({all_of.events} of {every} events were kept)" if all_of.events_lost else ""
    return f"{_number(count, 'launch', 'launches')}{lost}"


def _sized(calls: Calls) -> str:
    said = f", {text.size(calls.bytes)}" if calls.sized else ""
    if 0 < calls.sized < calls.calls:
        said += f" in the {calls.sized} whose size is known"
    if calls.timed:
        said += f", {text.nanoseconds(calls.time_ns)} in {calls.timed} of them"
    if calls.communicators:
        said += f", {_number(len(calls.communicators), 'communicator')}"
    return said


def _more(count: int, what: str) -> Iterator[str]:
    if count > _SHOWN:
        yield f"  and {count - _SHOWN} more {what}"


def _number(count: int, one: str, several: str = "") -> str:
    return f"{count} {one if count == 1 else several or one + 's'}"


def _plain(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def _clock(time_ns: int) -> str:
    try:
        return datetime.fromtimestamp(time_ns // 10**9, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return f"{time_ns} ns"
