"""The store: every report once, in SQLite.

All methods but `nodes` and `live_jobs` belong to one thread.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from expanse_controller import schema, traces
from expanse_controller.columns import COLUMNS, Value, values
from expanse_controller.errors import ControllerError
from expanse_ebpf.wire import keys
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_UNSPECIFIED,
    Evidence,
    JobIdentity,
    JobProfile,
    JobSample,
    NodeIdentity,
    Report,
    TracePart,
    TraceStatus,
)

STORED, REPLAYED, OUT_OF_ORDER = "stored", "replayed", "out of order"
# What one transaction deletes at most: a profile takes as much room as a hundred samples, a trace some MiB.
EXPIRE_ROWS = {"samples": 2000, "profiles": 100, "traces": 4}
# The end of a job's known time goes to the file at this interval, as long as its state is the same.
SETTLE_S = 60.0
# Where a boot stands, its newest report included, goes to the file at this interval: written with every
# commit it would take as many pages as all its samples.
SAVE_S = 10.0
FORGET_BOOT_S = 3600.0

_INSERT = (
    f"INSERT OR IGNORE INTO samples (boot, time_ns, job, {', '.join(COLUMNS)}) "
    f"VALUES (?, ?, ?{', ?' * len(COLUMNS)})"
)
_INSERT_PROFILE = (
    "INSERT OR IGNORE INTO profiles (boot, time_ns, job, from_ns, to_ns, pprof) VALUES (?, ?, ?, ?, ?, ?)"
)
_ProfileRow = tuple[int | bytes, ...]


class Item(NamedTuple):
    """A report as it came, and beside it what is not kept in memory as the report is."""

    node: NodeIdentity
    report: Report
    received_ns: int  # wall clock
    profiles: Sequence[JobProfile] = ()
    traces: Sequence[TraceStatus] = ()  # final ones
    parts: Sequence[TracePart] = ()


@dataclass(slots=True)
class LiveJob:
    """A job that the newest reports of its node told of."""

    id: int
    identity: JobIdentity
    state: int
    last_ns: int


class Newest(NamedTuple):
    """The last two reports of a node."""

    previous: Report | None
    current: Report
    received_ns: int


@dataclass(slots=True, eq=False)
class Boot:
    """One boot of a node, the unit within which sequence numbers rise."""

    id: int
    identity: NodeIdentity
    sequence: int = 0
    time_ns: int = 0
    received_ns: int = 0
    newest: Newest | None = None
    saved_ns: int = 0  # when the report came that stands in the file's row
    jobs: dict[tuple[str, int | str], LiveJob] = field(default_factory=dict)


class Store:
    """The file at `path`, opened for this process alone. Raises ControllerError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = schema.lock(path)
        try:
            self._db = schema.open_writer(path)
        except BaseException:
            os.close(self._lock)
            raise
        self._boots: dict[tuple[str, str, str], Boot] = {}
        try:
            self._recover()
        except sqlite3.Error as error:
            self._db.close()
            os.close(self._lock)
            raise ControllerError(
                f"{path}: {error}; free some space, or give another file with --db"
            ) from None

    def close(self) -> None:
        """Write what is held back and close the file."""
        try:
            self.settle()
        except sqlite3.Error:
            pass  # every report is in the file already; only ends of jobs' known times are not
        finally:
            self._db.close()
            os.close(self._lock)

    # ---- for every thread

    def nodes(self) -> list[Boot]:
        """The newest boot of each node that has reported."""
        newest: dict[tuple[str, str], Boot] = {}
        for (name, install_id, _), boot in list(self._boots.items()):
            other = newest.get((name, install_id))
            if boot.newest is not None and (other is None or other.received_ns < boot.received_ns):
                newest[name, install_id] = boot
        return list(newest.values())

    def live_jobs(self) -> dict[int, tuple[int, int]]:
        """Time of the last sample (ns) and state of the jobs that are not settled yet, by row."""
        return {
            job.id: (job.last_ns, job.state)
            for boot in list(self._boots.values())
            for job in list(boot.jobs.values())
        }

    def bytes(self) -> int:
        """Size of the file and its log."""
        size = 0
        for name in (self.path, Path(f"{self.path}-wal")):
            try:
                size += name.stat().st_size
            except OSError:
                continue
        return size

    # ---- writing

    def write(self, items: Sequence[Item]) -> list[str]:
        """Store the reports in one transaction; what became of each: STORED, REPLAYED or OUT_OF_ORDER.

        Raises sqlite3.Error, and has then stored none of them.
        """
        outcomes: list[str] = []
        fresh: dict[Boot, list[Item]] = {}
        before: dict[Boot, tuple[int, int, int]] = {}
        rows: list[tuple[Value, ...]] = []
        profiles: list[_ProfileRow] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for item in items:
                boot = self._boot(item.node)
                outcome = self._outcome(boot, item.report)
                outcomes.append(outcome)
                if outcome == STORED:
                    before.setdefault(boot, (boot.sequence, boot.time_ns, boot.received_ns))
                    boot.sequence, boot.time_ns = item.report.sequence, item.report.time_ns
                    fresh.setdefault(boot, []).append(item)
                    rows += self._rows(boot, item.report)
                    profiles += self._profile_rows(boot, item)
                    if item.traces or item.parts:
                        self._write_traces(boot, item)
            self._db.executemany(_INSERT, rows)
            self._db.executemany(_INSERT_PROFILE, profiles)
            for boot, taken in fresh.items():
                boot.received_ns = taken[-1].received_ns
                if boot.received_ns - boot.saved_ns >= SAVE_S * 1e9:
                    self._save(boot, taken[-1].report)
            self._db.execute("COMMIT")
        except BaseException:
            for boot, place in before.items():
                boot.sequence, boot.time_ns, boot.received_ns = place
            self._roll_back()
            raise
        for boot, taken in fresh.items():
            last = boot.newest.current if boot.newest else None
            previous = taken[-2].report if len(taken) > 1 else last
            boot.newest = Newest(previous, taken[-1].report, taken[-1].received_ns)
        return outcomes

    @staticmethod
    def _outcome(boot: Boot, report: Report) -> str:
        if report.sequence > boot.sequence:
            return STORED
        # A replay is never newer than what is stored. This one is: its numbers began too low.
        return OUT_OF_ORDER if report.time_ns > boot.time_ns else REPLAYED

    def _rows(self, boot: Boot, report: Report) -> Iterable[tuple[Value, ...]]:
        for sample in report.jobs:
            job = self._job(boot, sample, report.time_ns)
            yield (boot.id, report.time_ns, job.id, *values(sample))

    def _profile_rows(self, boot: Boot, item: Item) -> Iterable[_ProfileRow]:
        time_ns = item.report.time_ns
        for profile in item.profiles:
            identity = profile.identity
            # A job that has ended, or one past the agent's limit, comes without a sample.
            job = boot.jobs.get(_key(identity)) or self._find_job(boot, identity)
            if job is None:
                job = self._new_job(boot, identity, JOB_STATE_UNSPECIFIED, profile.from_ns, time_ns)
            if job.state == JOB_STATE_UNSPECIFIED:
                job.last_ns = max(time_ns, job.last_ns)
                boot.jobs[_key(identity)] = job
            yield (boot.id, time_ns, job.id, profile.from_ns, profile.to_ns, profile.pprof)

    def _write_traces(self, boot: Boot, item: Item) -> None:
        statuses = [
            (self._place(boot, status.identity, item.report.time_ns), status) for status in item.traces
        ]
        traces.told(self._db, statuses, boot.id, item.parts)

    def _place(self, boot: Boot, identity: JobIdentity, time_ns: int) -> traces.Place:
        if identity.run:
            job = boot.jobs.get(_key(identity)) or self._find_job(boot, identity)
            return traces.Place(boot.id, time_ns, job.id if job else None)
        # Of a job that has no process there any more a node tells the id alone.
        row = self._db.execute(
            "SELECT id FROM jobs WHERE boot = ? AND scheduler = ? AND job_id = ? "
            "ORDER BY last_ns DESC LIMIT 1",
            (boot.id, identity.scheduler, identity.id),
        ).fetchone()
        return traces.Place(boot.id, time_ns, row[0] if row else None)

    def open_window(self, statuses: Sequence[tuple[Boot, TraceStatus]], evidence: Sequence[Evidence]) -> None:
        """Note that a window was asked for on these nodes, and why. Raises sqlite3.Error."""
        with self._transaction():
            places = [(self._place(boot, status.identity, boot.time_ns), status) for boot, status in statuses]
            traces.opened(self._db, places, evidence)

    def end_window(self, statuses: Sequence[tuple[Boot, TraceStatus]]) -> None:
        """Note how a window ended on nodes that have not said it themselves. Raises sqlite3.Error."""
        with self._transaction():
            for boot, status in statuses:
                traces.ended(self._db, boot.id, status)

    def knows_window(self, node: NodeIdentity, window: str) -> int | None:
        """How many parts a node's trace of a window has; 0: not known yet, None: there is no such window."""
        boot = self._boots.get((node.name, node.install_id, node.boot_id))
        row = (
            boot
            and self._db.execute(
                "SELECT coalesce((SELECT parts FROM trace_parts WHERE trace = traces.id LIMIT 1), 0) "
                "FROM traces WHERE window = ? AND boot = ? AND told = 1",
                (window, boot.id),
            ).fetchone()
        )
        return row[0] if row else None

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._roll_back()
            raise

    def _boot(self, node: NodeIdentity) -> Boot:
        key = (node.name, node.install_id, node.boot_id)
        boot = self._boots.get(key)
        if boot is None:
            db = self._db
            db.execute("INSERT OR IGNORE INTO nodes (name, install_id) VALUES (?, ?)", key[:2])
            (node_row,) = db.execute(
                "SELECT id FROM nodes WHERE name = ? AND install_id = ?", key[:2]
            ).fetchone()
            db.execute("INSERT OR IGNORE INTO boots VALUES (NULL, ?, ?, 0, 0, 0, NULL)", (node_row, key[2]))
            row = db.execute(
                "SELECT id, sequence, time_ns, received_ns, report FROM boots WHERE node = ? AND boot_id = ?",
                (node_row, key[2]),
            ).fetchone()
            boot = self._boots[key] = _loaded(node, *row)
        return boot

    def _job(self, boot: Boot, sample: JobSample, time_ns: int) -> LiveJob:
        identity = sample.identity
        job = boot.jobs.get(_key(identity)) or self._find_job(boot, identity)
        if job is None:
            job = self._new_job(boot, identity, sample.state, time_ns, time_ns)
        elif job.state != sample.state or job.identity != identity:
            # A pod is known by its uid until its name is: the run is the same, so the job is.
            job.identity.CopyFrom(identity)
            job.state = sample.state
            self._name(job)
            self._db.execute(
                "UPDATE jobs SET job_id = ?, identity = ?, state = ?, last_ns = ? WHERE id = ?",
                (
                    identity.id,
                    identity.SerializeToString(),
                    sample.state,
                    max(time_ns, job.last_ns),
                    job.id,
                ),
            )
        job.last_ns = max(time_ns, job.last_ns)
        boot.jobs[_key(identity)] = job
        return job

    def _new_job(self, boot: Boot, identity: JobIdentity, state: int, first_ns: int, last_ns: int) -> LiveJob:
        kept = JobIdentity()
        kept.CopyFrom(identity)
        row = self._db.execute(
            "INSERT INTO jobs VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                boot.id,
                identity.scheduler,
                identity.id,
                signed(identity.run),
                identity.SerializeToString(),
                state,
                first_ns,
                last_ns,
            ),
        ).lastrowid
        job = LiveJob(row or 0, kept, state, last_ns)
        self._name(job)
        return job

    def _save(self, boot: Boot, report: Report) -> None:
        self._db.execute(
            "UPDATE boots SET sequence = ?, time_ns = ?, received_ns = ?, report = ? WHERE id = ?",
            (boot.sequence, boot.time_ns, boot.received_ns, report.SerializeToString(), boot.id),
        )
        boot.saved_ns = boot.received_ns

    def _find_job(self, boot: Boot, identity: JobIdentity) -> LiveJob | None:
        row = self._db.execute(
            "SELECT id, identity, state, last_ns FROM jobs WHERE boot = ? AND scheduler = ? AND run = ? "
            "AND (run != 0 OR job_id = ?)",
            (boot.id, identity.scheduler, signed(identity.run), identity.id),
        ).fetchone()
        return row and LiveJob(row[0], JobIdentity.FromString(row[1]), row[2], row[3])

    def _roll_back(self) -> None:
        """End the failed transaction and forget what it made; rows are looked up again when needed."""
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")
        self._boots = {key: boot for key, boot in self._boots.items() if boot.newest is not None}
        for boot in self._boots.values():
            boot.jobs = {}
            boot.saved_ns = 0

    # ---- upkeep

    def settle(self) -> None:
        """Write the jobs' last times to the file and forget jobs that are in no newest report."""
        live_keys: dict[Boot, set[tuple[str, int | str]]] = {}
        ends: list[tuple[int, int]] = []
        for boot in self._boots.values():
            current = boot.newest.current.jobs if boot.newest else ()
            live_keys[boot] = {_key(sample.identity) for sample in current}
            ends += [(job.last_ns, job.id) for job in boot.jobs.values()]
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.executemany("UPDATE jobs SET last_ns = ? WHERE id = ?", ends)
            for boot in self._boots.values():
                if boot.newest is not None and boot.saved_ns < boot.received_ns:
                    self._save(boot, boot.newest.current)
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        for boot, live in live_keys.items():
            boot.jobs = {key: job for key, job in boot.jobs.items() if key in live}
        horizon = time.time_ns() - int(FORGET_BOOT_S * 1e9)
        newest = set(map(id, self.nodes()))
        self._boots = {
            key: boot for key, boot in self._boots.items() if id(boot) in newest or boot.received_ns > horizon
        }

    def expire(self, keep_s: float, now_ns: int) -> bool:
        """Delete one batch of what is older than `keep_s` seconds; whether there may be more.

        Age is told by the node's own clock, so that a node whose clock is wrong keeps as much as others.
        """
        db, keep_ns, more = self._db, int(keep_s * 1e9), False
        boots = db.execute("SELECT id, time_ns, received_ns FROM boots").fetchall()
        for boot, time_ns, received_ns in boots:
            cutoff, batch = time_ns - keep_ns + (now_ns - received_ns), False
            for table, rows in EXPIRE_ROWS.items():
                last = db.execute(
                    f"SELECT time_ns FROM {table} WHERE boot = ? AND time_ns < ? ORDER BY 1 LIMIT 1 OFFSET ?",
                    (boot, cutoff, rows - 1),
                ).fetchone()
                if last:
                    more, batch, cutoff = True, True, last[0] + 1
            db.execute("BEGIN IMMEDIATE")
            try:
                for table in EXPIRE_ROWS:
                    db.execute(f"DELETE FROM {table} WHERE boot = ? AND time_ns < ?", (boot, cutoff))
                db.execute("DELETE FROM jobs WHERE boot = ? AND last_ns < ?", (boot, cutoff))
                if received_ns < now_ns - keep_ns and not batch:
                    db.execute("DELETE FROM boots WHERE id = ?", (boot,))
                    db.execute("DELETE FROM nodes WHERE id NOT IN (SELECT node FROM boots)")
                    self._boots = {key: b for key, b in self._boots.items() if b.id != boot}
                db.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise
        return more

    def _name(self, job: LiveJob) -> None:
        self._db.executemany(
            "INSERT OR IGNORE INTO job_names VALUES (?, ?, ?)",
            [(job.identity.scheduler, name, job.id) for name in keys.names(job.identity)],
        )

    def _recover(self) -> None:
        """Take up each node's newest boot, and what a killed controller had not settled."""
        # A job that was alive had been settled at most an interval before; older ones are complete.
        self._db.execute(
            """UPDATE jobs SET last_ns = coalesce(
                (SELECT max(time_ns) FROM samples
                 WHERE boot = jobs.boot AND time_ns > jobs.last_ns AND job = jobs.id), last_ns)
            WHERE state != ? AND last_ns > (SELECT time_ns - ? FROM boots WHERE id = jobs.boot)""",
            (JOB_STATE_ENDED, int(3 * SETTLE_S * 1e9)),
        )
        traces.recover(self._db)
        newest = self._db.execute(
            """SELECT name, install_id, boot_id, max(received_ns)
            FROM boots JOIN nodes ON nodes.id = boots.node GROUP BY node"""
        ).fetchall()
        for name, install_id, boot_id, _ in newest:
            self._boot(NodeIdentity(name=name, install_id=install_id, boot_id=boot_id))


def _loaded(
    node: NodeIdentity, row: int, sequence: int, time_ns: int, received_ns: int, blob: bytes | None
) -> Boot:
    newest = Newest(None, Report.FromString(blob), received_ns) if blob is not None else None
    return Boot(row, node, sequence, time_ns, received_ns, newest, received_ns)


def _key(identity: JobIdentity) -> tuple[str, int | str]:
    return identity.scheduler, identity.run or identity.id


def signed(run: int) -> int:
    """A 64-bit number without a sign as SQLite stores it."""
    return run - 2**64 if run >= 2**63 else run
