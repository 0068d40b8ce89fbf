"""What rules would have done: over the samples of a store, at the times at which they were made."""

from __future__ import annotations

import heapq
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from expanse_controller import schema
from expanse_controller.columns import MAX_INTEGER
from expanse_controller.errors import ControllerError
from expanse_controller.rules.engine import GONE_S, LOOK_S, NO_DATA, STATES, Engine, Firing
from expanse_controller.rules.figures import READ, Reading
from expanse_controller.rules.history import JobReading, NodeReading
from expanse_controller.rules.rule import Rule
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobIdentity

LOOK_NS = int(LOOK_S * 1e9)


class Fired(NamedTuple):
    """When a rule would have done something."""

    time_ns: int
    firing: Firing


class DryRun(NamedTuple):
    """What came of it. `seconds`: by rule, job and node (empty: the job), for how long in which state.

    `reasons`: why there were no data, where there were none, the last time.
    """

    from_ns: int  # of the first report and the last look
    to_ns: int
    looks: int
    fired: list[Fired]
    seconds: dict[tuple[str, str, str], dict[str, float]]
    reasons: dict[tuple[str, str, str], str]


class _Report(NamedTuple):
    time_ns: int
    name: str
    install_id: str
    boot: int
    jobs: list[JobReading]


def dry_run(db: Path, rules: Sequence[Rule], from_ns: int = 0, to_ns: int = 0) -> DryRun:
    """Look at the store's samples from one time to another (ns, `to_ns` 0: to the end), every LOOK_S.

    Windows are taken to open and to last as long as they are asked to. Raises ControllerError.
    """
    engine = Engine(rules)
    run = DryRun(0, 0, 0, [], {}, {})
    try:
        with closing(_opened(db)) as connection:
            for look_ns, nodes in _looks(_reports(connection, from_ns, to_ns or MAX_INTEGER)):
                for firing in engine.step(nodes, look_ns):
                    run.fired.append(Fired(look_ns, firing))
                for place, state, reason in engine.standings():
                    run.seconds.setdefault(place, dict.fromkeys(STATES, 0.0))[state] += LOOK_S
                    if state == NO_DATA:
                        run.reasons[place] = reason
                run = run._replace(from_ns=run.from_ns or look_ns, to_ns=look_ns, looks=run.looks + 1)
    except sqlite3.Error as error:
        raise ControllerError(f"{db} cannot be read: {error}; give another file with --db") from None
    return run


def _opened(db: Path) -> sqlite3.Connection:
    if not db.is_file():
        raise ControllerError(f"{db} is not there; give the store's file with --db")
    connection = schema.open_reader(db)
    try:
        found = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if found != schema.APPLICATION_ID:
            raise ControllerError(f"{db} is no store of expanse-controller; give another file with --db")
        if version > schema.VERSION:
            raise ControllerError(f"{db} was written by a newer expanse-controller; use that one")
    except BaseException:
        connection.close()
        raise
    return connection


def _looks(reports: Iterator[_Report]) -> Iterator[tuple[int, list[NodeReading]]]:
    """The times of looks, and each node's newest report at that time. Where there is nothing, none."""
    newest: dict[tuple[str, str], _Report] = {}
    interval_s: dict[tuple[str, str], float] = {}
    look_ns = 0

    def nodes() -> list[NodeReading]:
        return [
            NodeReading(
                report.name,
                report.install_id,
                report.time_ns,
                interval_s.get(node, 0.0),
                (look_ns - report.time_ns) / 1e9,
                report.jobs,
            )
            for node, report in newest.items()
        ]

    for report in reports:
        look_ns = look_ns or report.time_ns
        while report.time_ns > look_ns:
            for node in [n for n, r in newest.items() if look_ns - r.time_ns > GONE_S * 1e9]:
                del newest[node]
            if not newest:
                look_ns = report.time_ns
                break
            yield look_ns, nodes()
            look_ns += LOOK_NS
        node = report.name, report.install_id
        if node in newest and newest[node].boot == report.boot:
            # The shortest: a node without jobs has no samples, which makes a gap.
            since_s = (report.time_ns - newest[node].time_ns) / 1e9
            interval_s[node] = min(interval_s.get(node, since_s), since_s)
        newest[node] = report
    if newest:
        yield look_ns, nodes()


def _reports(connection: sqlite3.Connection, from_ns: int, to_ns: int) -> Iterator[_Report]:
    """All reports with samples, by the nodes' own clocks."""
    there = {row[1] for row in connection.execute("PRAGMA table_info(samples)")}
    columns = ", ".join(name if name in there else "NULL" for name in READ)  # an older file has fewer
    boots = connection.execute(
        "SELECT boots.id, nodes.name, nodes.install_id FROM boots JOIN nodes ON nodes.id = boots.node"
    ).fetchall()
    jobs: dict[int, tuple[str, int]] = {}
    return heapq.merge(
        *(_of_boot(connection, boot, node, columns, (from_ns, to_ns), jobs) for boot, *node in boots),
        key=lambda report: report.time_ns,
    )


def _of_boot(
    connection: sqlite3.Connection,
    boot: int,
    node: Sequence[str],
    columns: str,
    between: tuple[int, int],
    jobs: dict[int, tuple[str, int]],
) -> Iterator[_Report]:
    rows = connection.execute(
        f"SELECT time_ns, job, {columns} FROM samples "
        "WHERE boot = ? AND time_ns BETWEEN ? AND ? ORDER BY time_ns",
        (boot, *between),
    )
    for time_ns, of_report in groupby(rows, key=lambda row: row[0]):
        found = []
        for _, job, *values in of_report:
            if job not in jobs:
                jobs[job] = _job(connection, job)
            key, run = jobs[job]
            reading: Reading = tuple(values)
            if key and reading[0] != JOB_STATE_ENDED:
                found.append(JobReading(key, run, reading))
        yield _Report(time_ns, node[0], node[1], boot, found)


def _job(connection: sqlite3.Connection, row: int) -> tuple[str, int]:
    """Key and run of a job; no key where it has gone."""
    found = connection.execute("SELECT identity FROM jobs WHERE id = ?", (row,)).fetchone()
    if found is None:
        return "", 0
    identity = JobIdentity.FromString(found[0])
    return f"{identity.scheduler}/{identity.id}", identity.run
