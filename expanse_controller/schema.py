"""The store's file: its tables and how it is opened."""

from __future__ import annotations

import fcntl
import itertools
import os
import sqlite3
from pathlib import Path

from expanse_controller.columns import COLUMNS
from expanse_controller.errors import ControllerError

VERSION = 4
APPLICATION_ID = 0x45584250  # "EXBP"

# Each commit writes whole pages, most of them changed by some hundred bytes, so small pages keep the
# disk quiet. Smaller than this, a sample would no longer fit into its page.
PAGE_BYTES = 2048
# Pages in the log before they are moved into the file: the same few pages change again and again, so
# the longer the log, the fewer writes.
CHECKPOINT_PAGES = 4096

_PROFILES = (
    # With a row id, unlike samples: else blobs would begin in the inner pages of the tree as well, and
    # a look-up would go through many of them.
    """CREATE TABLE profiles (
        id INTEGER PRIMARY KEY,
        boot INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        job INTEGER NOT NULL,
        from_ns INTEGER NOT NULL,
        to_ns INTEGER NOT NULL,
        pprof BLOB NOT NULL
    )""",
    # By the report that brought them, as samples are: what makes them unique, and how they age.
    "CREATE UNIQUE INDEX profiles_by_report ON profiles (boot, time_ns, job, from_ns)",
    "CREATE INDEX profiles_by_job ON profiles (job, from_ns, to_ns)",
)
_TRACES = (
    # What each node says of a window, and what it was asked to do until it has said it (`told` is 0). Ages as
    # samples do, by the node's own clock.
    """CREATE TABLE traces (
        id INTEGER PRIMARY KEY,
        boot INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        window TEXT NOT NULL,
        job INTEGER,
        state INTEGER NOT NULL,
        told INTEGER NOT NULL,
        status BLOB NOT NULL,
        evidence BLOB NOT NULL
    )""",
    "CREATE UNIQUE INDEX traces_by_window ON traces (window, boot)",
    "CREATE INDEX traces_by_report ON traces (boot, time_ns)",
    "CREATE INDEX traces_by_job ON traces (job)",
    """CREATE TABLE trace_parts (
        id INTEGER PRIMARY KEY,
        trace INTEGER NOT NULL,
        part INTEGER NOT NULL,
        parts INTEGER NOT NULL,
        data BLOB NOT NULL
    )""",
    "CREATE UNIQUE INDEX trace_parts_by_trace ON trace_parts (trace, part)",
    """CREATE TRIGGER forget_parts AFTER DELETE ON traces BEGIN
        DELETE FROM trace_parts WHERE trace = OLD.id;
    END""",
)
_TABLES = (
    """CREATE TABLE nodes (
        id INTEGER PRIMARY KEY,
        name TEXT NOT NULL,
        install_id TEXT NOT NULL,
        UNIQUE (name, install_id)
    )""",
    # Where the boot stands, written every ten seconds: the running controller has it in memory, and one
    # that starts after a crash finds reports that come again by the key of their samples.
    """CREATE TABLE boots (
        id INTEGER PRIMARY KEY,
        node INTEGER NOT NULL,
        boot_id TEXT NOT NULL,
        sequence INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        received_ns INTEGER NOT NULL,
        report BLOB,
        UNIQUE (node, boot_id)
    )""",
    """CREATE TABLE jobs (
        id INTEGER PRIMARY KEY,
        boot INTEGER NOT NULL,
        scheduler TEXT NOT NULL,
        job_id TEXT NOT NULL,
        run INTEGER NOT NULL,
        identity BLOB NOT NULL,
        state INTEGER NOT NULL,
        first_ns INTEGER NOT NULL,
        last_ns INTEGER NOT NULL
    )""",
    "CREATE INDEX jobs_by_run ON jobs (boot, scheduler, run)",
    # Everything that a job is asked for by, see wire/keys.py.
    """CREATE TABLE job_names (
        scheduler TEXT NOT NULL,
        name TEXT NOT NULL,
        job INTEGER NOT NULL,
        PRIMARY KEY (scheduler, name, job)
    ) WITHOUT ROWID""",
    "CREATE INDEX job_names_by_job ON job_names (job)",
    """CREATE TRIGGER forget_names AFTER DELETE ON jobs BEGIN
        DELETE FROM job_names WHERE job = OLD.id;
    END""",
    "CREATE INDEX jobs_by_last ON jobs (last_ns)",
    # A node's jobs of one tick lie side by side: one page per commit instead of one per job.
    f"""CREATE TABLE samples (
        boot INTEGER NOT NULL,
        time_ns INTEGER NOT NULL,
        job INTEGER NOT NULL,
        {", ".join(COLUMNS)},
        PRIMARY KEY (boot, time_ns, job)
    ) WITHOUT ROWID""",
    *_PROFILES,
    *_TRACES,
)
# What brings a file of an older version to the next, by that version. A step stays as it is when COLUMNS
# grows: the file that it makes is then brought further by the next one. Added columns are NULL in rows that
# are there already, and no row is written anew.
_STEPS = {
    1: _PROFILES,
    2: tuple(
        f"ALTER TABLE samples ADD COLUMN {name}"
        for name in (
            *("gpus", "gpu_busy_ns", "gpu_measured_ns", "gpu_sm_active_ns", "gpu_profiled_ns"),
            *("gpu_energy_mj", "gpu_power_mw", "gpu_memory_bytes", "gpu_memory_total_bytes"),
        )
    ),
    3: (
        *(
            f"ALTER TABLE samples ADD COLUMN {name}"
            for name in (
                *("gpu_throttled_ns", "python_loading_ns"),
                *("python_hottest_permille", "python_waiting_permille"),
            )
        ),
        *_TRACES,
    ),
}


def lock(path: Path) -> int:
    """Take the store for this process; the descriptor that holds it. Raises ControllerError."""
    name = f"{path}.lock"
    try:
        descriptor = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ControllerError(
            f"{path} cannot be written: {error.strerror}; give another file with --db"
        ) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ControllerError(
            f"{path} is in use by another expanse-controller; stop it or give another file with --db"
        ) from None
    return descriptor


def open_writer(path: Path) -> sqlite3.Connection:
    """The connection that writes, its tables made where the file is new. Raises ControllerError."""
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise _unusable(path, error) from None
    try:
        found = connection.execute("PRAGMA application_id").fetchone()[0]
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        is_new = not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if not is_new and found != APPLICATION_ID:
            raise ControllerError(f"{path} is a database of another program; give another file with --db")
        if not is_new and version > VERSION:
            raise ControllerError(
                f"{path} was written by a newer expanse-controller (its schema is {version}, this one "
                f"knows {VERSION}); install that version or give another file with --db"
            )
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.execute("PRAGMA journal_mode = WAL")
        # A commit is in the log file, in the kernel's hands, when it returns: it outlives the death of
        # this process. The disk is waited for at checkpoints only, so a power cut may take what the
        # kernel had not written back yet, by default the last 30 s; the file stays whole.
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        connection.execute("PRAGMA cache_size = -4096")
        connection.execute("PRAGMA busy_timeout = 5000")
        connection.execute("BEGIN IMMEDIATE")
        steps = [_TABLES] if is_new else [_STEPS[old] for old in range(version, VERSION)]
        for statement in itertools.chain(*steps):
            connection.execute(statement)
        if steps:
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")
    except sqlite3.Error as error:
        connection.close()
        raise _unusable(path, error) from None
    except ControllerError:
        connection.close()
        raise
    return connection


def open_reader(path: Path) -> sqlite3.Connection:
    """A connection that only reads, beside the writer."""
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA query_only = 1")
    connection.execute("PRAGMA cache_size = -4096")
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection


def _unusable(path: Path, error: sqlite3.Error) -> ControllerError:
    return ControllerError(f"{path} cannot be used as the store: {error}; give another file with --db")
