"""The window of deep tracing that a job has, as a report tells of it."""

from __future__ import annotations

from collections.abc import Iterable

from expanse_ebpf.top import text
from expanse_ebpf.top.deltas import Values, finite
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    JobIdentity,
    TraceStatus,
)

_STATES = {TRACE_STATE_WAITING: "waiting", TRACE_STATE_OPEN: "open"}


def of_job(job: JobIdentity, statuses: Iterable[TraceStatus]) -> Values | None:
    """The window that waits or is open on the job; None: there is none."""
    for status in statuses:
        of = status.identity
        if status.state in _STATES and (of.scheduler, of.id, of.run) == (job.scheduler, job.id, job.run):
            return {
                "id": status.id,
                "state": _STATES[status.state],
                "rule": status.rule or None,
                "reason": status.reason or None,
                "from_ns": status.from_ns or None,
                "seconds": finite(status.seconds),
                "targets": status.targets,
                "launches": status.launches,
                "cost_share": finite(status.cost_share),
            }
    return None


def lines(window: Values | None) -> list[str]:
    """What the panel of a job says of its window; nothing where there is none."""
    if window is None:
        return []
    by = f"by rule {window['rule']}" if window["rule"] else "asked for"
    length = text.UNKNOWN if window["seconds"] is None else f"{window['seconds']:g} s"
    said = f"deep trace: {window['state']}, {by}, {length} long"
    said += f" · {text.count(window['launches'])} launches · cost {text.percent(window['cost_share'])}"
    return [text.clean(f"{said} · {window['reason']}" if window["reason"] else said)]
