"""Questions to the store's file, answered beside the writer."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from expanse_controller import schema
from expanse_controller.columns import COLUMNS, MAX_INTEGER
from expanse_controller.limits import MAX_PROFILE_NS
from expanse_controller.presence import labelled
from expanse_controller.store import signed
from expanse_ebpf.wire import keys
from expanse_ebpf.wire.collector_pb2 import (
    JobIdentity,
    Point,
    StoredJob,
    StoredTrace,
    TracePart,
    TraceStatus,
)

# Keeps an answer below gRPC's 4 MiB: longer series are thinned out evenly. Most values are counters,
# so thinning loses resolution and no quantity.
MAX_VALUES = 80_000
MAX_JOBS = 5000
MAX_NODES = 10  # that are named in an error
MAX_TRACES, USUAL_TRACES = 1000, 100
# So many that became known before others may have begun after them.
LATE_TRACES = 200

_JOB = """SELECT jobs.id, jobs.boot, jobs.identity, nodes.name, first_ns, last_ns, state
    FROM jobs JOIN boots ON boots.id = jobs.boot JOIN nodes ON nodes.id = boots.node """
_BY_KEY = "jobs.id IN (SELECT job FROM job_names WHERE scheduler = ? AND name >= ? AND name < ?) "
_TRACE = """SELECT boots.id, nodes.name, nodes.install_id, traces.status, evidence,
    (SELECT coalesce(sum(length(data)), 0) FROM trace_parts WHERE trace = traces.id)
    FROM traces JOIN boots ON boots.id = traces.boot JOIN nodes ON nodes.id = boots.node """


class Part(NamedTuple):
    """A stored profile: its row, its job's, what it covers, and its size in bytes."""

    row: int
    job: int
    from_ns: int
    to_ns: int
    bytes: int


Live = Mapping[int, tuple[int, int]]  # last time and state of jobs that the writer has not settled


class Reader:
    """A connection of its own to the file at `path`; belongs to one thread."""

    def __init__(self, path: Path) -> None:
        self._db = schema.open_reader(path)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def jobs(
        self, key: tuple[str, str] | None, limit: int, live: Live, only: Sequence[int] | None
    ) -> list[StoredJob]:
        """Jobs, those seen last first: all runs of `key` (scheduler, id) or all; of rows `only` if given."""
        limit = min(limit or MAX_JOBS, MAX_JOBS)
        if only is not None:
            found = [
                row for job in only[:MAX_JOBS] for row in self._db.execute(_JOB + "WHERE jobs.id = ?", (job,))
            ]
            jobs = [_stored(row, live) for row in found]
            if key:
                jobs = [j for j in jobs if keys.matches(j.identity, "/".join(key))]
        elif key:
            rows = self._db.execute(
                _JOB + f"WHERE {_BY_KEY} ORDER BY last_ns DESC LIMIT ?", (*_range(key), limit)
            )
            jobs = [_stored(row, live) for row in rows]
        else:
            rows = self._db.execute(_JOB + "ORDER BY last_ns DESC LIMIT ?", (limit,))
            jobs = [_stored(row, live) for row in rows]
        return sorted(jobs, key=lambda job: job.last_ns, reverse=True)[:limit]

    def series(
        self,
        key: tuple[str, str],
        run: int,
        node: str,
        from_ns: int,
        to_ns: int,
        fields: Sequence[str],
        live: Live,
    ) -> tuple[StoredJob, list[Point]] | None:
        """A job's samples between two times (ns; `to_ns` 0: to the end), None when there is no such job.

        `run` 0 is the newest run, `node` "" any node. `fields` are names of COLUMNS.
        """
        rows = self._db.execute(
            _JOB + f"WHERE {_BY_KEY} AND (? = 0 OR run = ?) AND (? = '' OR nodes.name = ?) "
            "ORDER BY first_ns DESC LIMIT 1",
            (*_range(key), signed(run), signed(run), node, node),
        )
        row = rows.fetchone()
        if row is None:
            return None
        job = _stored(row, live)
        unknown = set(fields) - set(COLUMNS)
        if unknown:
            raise ValueError(f"not a column: {unknown}")
        begin = max(from_ns, job.first_ns)
        end = min(to_ns or job.last_ns, job.last_ns)
        where, bounds = "boot = ? AND time_ns BETWEEN ? AND ? AND job = ?", (row[1], begin, end, row[0])
        (count,) = self._db.execute(f"SELECT count(*) FROM samples WHERE {where}", bounds).fetchone()
        step = max(1, -(-count * (len(fields) + 1) // MAX_VALUES))
        points = []
        for i, (time_ns, *values) in enumerate(
            self._db.execute(f"SELECT time_ns, {', '.join(fields)} FROM samples WHERE {where}", bounds)
        ):
            # The last point is always among those that stay.
            if (count - 1 - i) % step == 0:
                known = {name: value for name, value in zip(fields, values, strict=True) if value is not None}
                points.append(Point(time_ns=time_ns, values=known))
        return job, points

    def nodes(self, key: tuple[str, str]) -> list[str]:
        """The names of the nodes that have or had a job, at most MAX_NODES of them."""
        found = self._db.execute(
            "SELECT DISTINCT nodes.name FROM jobs JOIN boots ON boots.id = jobs.boot "
            f"JOIN nodes ON nodes.id = boots.node WHERE {_BY_KEY} ORDER BY nodes.name LIMIT ?",
            (*_range(key), MAX_NODES),
        )
        return [name for (name,) in found]

    def profiles(
        self,
        key: tuple[str, str],
        run: int,
        node: str,
        from_ns: int,
        to_ns: int,
        limit: int,
        live: Live,
    ) -> tuple[StoredJob, list[Part]] | None:
        """A job's profiles, on all its nodes, that have a part between two times (ns), the earliest first.

        None when there is no such job. `run` 0 is the newest one, `node` "" all nodes, `to_ns` 0 the end.
        Past `limit` profiles the rest is not looked for. The job's node is empty when there are several.
        """
        rows = self._db.execute(
            _JOB + f"WHERE {_BY_KEY} AND (? = 0 OR run = ?) AND (? = '' OR nodes.name = ?) "
            "ORDER BY first_ns DESC, jobs.id DESC LIMIT ?",
            (*_range(key), signed(run), signed(run), node, node, MAX_JOBS),
        ).fetchall()
        found = [(row[0], row[1], _stored(row, live)) for row in rows]
        if not run:
            found = _newest_run(found)
        if not found:
            return None
        begin, end = max(from_ns, 0), max(to_ns, 1) if to_ns else MAX_INTEGER
        parts: list[Part] = []
        for row, _, _ in found:
            if len(parts) > limit:
                break
            parts += map(
                Part._make,
                self._db.execute(
                    "SELECT id, job, from_ns, to_ns, length(pprof) FROM profiles "
                    "WHERE job = ? AND from_ns BETWEEN ? AND ? AND to_ns > ? ORDER BY from_ns LIMIT ?",
                    (row, begin - MAX_PROFILE_NS, end - 1, begin, limit + 1),
                ),
            )
        jobs = [job for _, _, job in found]
        told = StoredJob()
        told.CopyFrom(jobs[0])
        told.first_ns, told.last_ns = min(j.first_ns for j in jobs), max(j.last_ns for j in jobs)
        if len({j.node for j in jobs}) > 1:
            told.node = ""
        return told, sorted(parts, key=lambda part: (part.from_ns, part.row))

    def traces(self, key: tuple[str, str] | None, window: str, limit: int) -> list[tuple[int, StoredTrace]]:
        """Windows, the newest first, each with the row of its node's boot: those of `key`, or of all jobs.

        The nodes of a window stand together. `window` "" is any; `limit` 0 the usual number.
        """
        where: list[str] = ["1"]
        values: list[str] = []
        if key:
            where.append(_BY_KEY.replace("jobs.id", "traces.job"))
            values += _range(key)
        if window:
            where.append("traces.window = ?")
            values.append(window)
        limit = min(limit or USUAL_TRACES, MAX_TRACES)
        # The file has them in the order in which they became known, not in that of their beginnings.
        rows = self._db.execute(
            f"{_TRACE} WHERE {' AND '.join(where)} ORDER BY traces.id DESC LIMIT ?",
            (*values, limit + LATE_TRACES),
        )
        found, installations = [], []
        for boot, node, install_id, status, evidence, size in rows:
            trace = StoredTrace.FromString(evidence)
            trace.status.CopyFrom(TraceStatus.FromString(status))
            trace.node, trace.bytes = node, size
            found.append((boot, trace))
            installations.append(install_id)
        several = Counter((trace.status.id, trace.node) for _, trace in found)
        for (_, trace), install_id in zip(found, installations, strict=True):
            if several[trace.status.id, trace.node] > 1:
                trace.node = labelled(trace.node, install_id)
        began: dict[str, int] = {}
        for _, trace in found:
            began[trace.status.id] = max(began.get(trace.status.id, 0), _began(trace))
        place = {window: number for number, window in enumerate(began)}
        found.sort(key=lambda one: (-began[one[1].status.id], place[one[1].status.id], -_began(one[1])))
        return found[:limit]

    def trace_part(self, window: str, boot: int, number: int) -> TracePart | None:
        """A part of the trace of one node, which is told by the row of its boot."""
        row = self._db.execute(
            "SELECT parts, data FROM trace_parts "
            "WHERE trace = (SELECT id FROM traces WHERE window = ? AND boot = ?) AND part = ?",
            (window, boot, number),
        ).fetchone()
        return row and TracePart(id=window, index=number, parts=row[0], data=row[1])


def _began(trace: StoredTrace) -> int:
    return trace.status.from_ns or trace.status.start_ns


def _newest_run(found: list[tuple[int, int, StoredJob]]) -> list[tuple[int, int, StoredJob]]:
    """Of (row, boot, job), the newest first: what belongs to the newest run of each job.

    A run has another number on each node, so what ran at the same time on different nodes is one run.
    """
    began: dict[tuple[str, str], int] = {}
    seen: set[tuple[str, str, int]] = set()
    kept = []
    for row, boot, job in found:
        name = (job.identity.scheduler, job.identity.id)
        begin = began.setdefault(name, job.first_ns)
        if job.last_ns >= begin and (*name, boot) not in seen:
            kept.append((row, boot, job))
        seen.add((*name, boot))
    return kept


def _range(key: tuple[str, str]) -> tuple[str, str, str]:
    """The names that `key` means: from the second (included) to the third (excluded)."""
    scheduler, name = key
    after = "\U0010ffff" if keys.may_be_cut(scheduler, name) else "\0"
    return scheduler, name, name + after


def _stored(row: sqlite3.Row | tuple[int, int, bytes, str, int, int, int], live: Live) -> StoredJob:
    job, _, identity, node, first_ns, last_ns, state = row
    last_ns, state = live.get(job, (last_ns, state))
    return StoredJob(
        identity=JobIdentity.FromString(identity), node=node, first_ns=first_ns, last_ns=last_ns, state=state
    )
