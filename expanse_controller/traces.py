"""Windows in the store's file: what its writer does, each function within a transaction of the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    Evidence,
    StoredTrace,
    TracePart,
    TraceStatus,
)

_OPEN = (
    "INSERT OR IGNORE INTO traces (boot, time_ns, window, job, state, told, status, evidence) "
    "VALUES (?, ?, ?, ?, ?, 0, ?, ?)"
)
# A node's last word about a window's end stays: what it called done may get lost on its way here. That it is
# silent is no word of its own.
_TELL = """INSERT INTO traces (boot, time_ns, window, job, state, told, status, evidence)
    VALUES (?, ?, ?, ?, ?, 1, ?, x'') ON CONFLICT (window, boot) DO UPDATE SET
    job = coalesce(excluded.job, job), state = excluded.state, told = 1, status = excluded.status"""
_END = "UPDATE traces SET state = ?, status = ? WHERE window = ? AND boot = ? AND told = 0"
_ADD_PART = """INSERT OR IGNORE INTO trace_parts (trace, part, parts, data)
    SELECT id, ?, ?, ? FROM traces WHERE window = ? AND boot = ?
    AND NOT EXISTS (SELECT 1 FROM trace_parts WHERE trace = traces.id AND parts != ?)"""
_RESTARTED = "the controller was restarted before this node had said how it ended"


class Place(NamedTuple):
    """A window on one node: the row of its boot, the time of its newest report (ns), the row of the job."""

    boot: int
    time_ns: int
    job: int | None


def is_final(status: TraceStatus) -> bool:
    """Whether nothing more is to be said of the window, its parts aside."""
    return status.state >= TRACE_STATE_DONE


def opened(
    db: sqlite3.Connection, places: Iterable[tuple[Place, TraceStatus]], evidence: Sequence[Evidence]
) -> None:
    """Note that a window was asked for on these nodes."""
    kept = StoredTrace(evidence=evidence).SerializeToString()
    db.executemany(
        _OPEN,
        [
            (place.boot, place.time_ns, status.id, place.job, status.state, status.SerializeToString(), kept)
            for place, status in places
        ],
    )


def told(
    db: sqlite3.Connection,
    statuses: Iterable[tuple[Place, TraceStatus]],
    boot: int,
    parts: Iterable[TracePart],
) -> None:
    """Store what a report brought: final statuses, and parts of windows whose final status is stored."""
    db.executemany(
        _TELL,
        [
            (place.boot, place.time_ns, status.id, place.job, status.state, status.SerializeToString())
            for place, status in statuses
        ],
    )
    db.executemany(
        _ADD_PART, [(part.index, part.parts, part.data, part.id, boot, part.parts) for part in parts]
    )


def ended(db: sqlite3.Connection, boot: int, status: TraceStatus) -> None:
    """Note how a window ended of which the node has not spoken."""
    db.execute(_END, (status.state, status.SerializeToString(), status.id, boot))


def recover(db: sqlite3.Connection) -> None:
    """End what an earlier controller had opened and nobody follows any more."""
    rows = db.execute("SELECT boot, status FROM traces WHERE state < ?", (TRACE_STATE_DONE,)).fetchall()
    for boot, blob in rows:
        status = TraceStatus.FromString(blob)
        status.state, status.reason = TRACE_STATE_FAILED, _RESTARTED
        ended(db, boot, status)
