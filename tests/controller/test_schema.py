"""Files that earlier releases wrote: they open, keep what is in them and take what is new."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from expanse_controller import schema
from expanse_controller.columns import COLUMNS
from expanse_controller.errors import ControllerError
from expanse_controller.reader import Reader
from expanse_controller.store import STORED, Item, Store
from tests.controller.process import node
from tests.controller.test_profiles import MINUTE, SECOND, T, of_minute, rows

# What versions 3 and 4 added.
GPU_COLUMNS = (
    *("gpus", "gpu_busy_ns", "gpu_measured_ns", "gpu_sm_active_ns", "gpu_profiled_ns", "gpu_energy_mj"),
    *("gpu_power_mw", "gpu_memory_bytes", "gpu_memory_total_bytes"),
)
RULE_COLUMNS = (
    *("gpu_throttled_ns", "python_loading_ns", "python_hottest_permille", "python_waiting_permille"),
)
NEW_COLUMNS = GPU_COLUMNS + RULE_COLUMNS


def old_file(path: Path, version: int) -> None:
    """A store as the release with that schema left it."""
    with sqlite3.connect(path) as connection:
        connection.executescript((Path(__file__).parent / "store-2.sql").read_text(encoding="utf-8"))
        if version == 1:
            connection.execute("DROP TABLE profiles")
        if version == 3:
            for name in GPU_COLUMNS:
                connection.execute(f"ALTER TABLE samples ADD COLUMN {name}")
        connection.execute(f"PRAGMA application_id = {schema.APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {version}")
    connection.close()


def tables(path: Path) -> dict[str, list[tuple[object, ...]]]:
    """The columns of each table."""
    with sqlite3.connect(path) as connection:
        names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        return {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for (name,) in names}


@pytest.mark.parametrize("version", range(1, schema.VERSION))
def test_an_old_file_gets_what_is_new_and_keeps_what_it_has(version: int, tmp_path: Path) -> None:
    db, fresh = tmp_path / "old.db", tmp_path / "new.db"
    old_file(db, version)
    store = Store(db)
    (boot,) = store.nodes()
    assert boot.newest is not None
    assert boot.newest.current.jobs[0].memory_bytes == 4096
    report = of_minute(3)
    gpu = report.jobs[0].gpu
    gpu.holds.add(uuid="GPU-1", source="slurm", sharers=1)
    gpu.busy_ns, gpu.power_mw, gpu.throttled_ns = 7, 0, 9
    python = report.jobs[0].python
    python.loading_ns, python.waiting_share = 5, 0.5  # in no function
    python.hottest_function, python.hottest_share = "step", 0.2504
    assert store.write([Item(node(), report, report.time_ns, list(report.profiles))]) == [STORED]
    assert store._db.execute("PRAGMA user_version").fetchone() == (schema.VERSION,)
    reader = Reader(db)
    found = reader.series(("slurm", "123"), 0, "", 0, 0, COLUMNS, store.live_jobs())
    reader.close()
    assert found is not None
    first, second, third = (dict(point.values) for point in found[1])
    kept = {"cpu_ns": 1e9, "memory_bytes": 4096, "delay_memory_reclaim_ns": 5}
    assert first == {"state": 2, "processes": 2, **kept}
    assert not set(second) & set(NEW_COLUMNS)
    assert {name: third[name] for name in set(NEW_COLUMNS) & set(third)} == {
        "gpus": 1,
        "gpu_busy_ns": 7,
        "gpu_power_mw": 0,
        "gpu_throttled_ns": 9,
        "python_loading_ns": 5,
        "python_hottest_permille": 250,
    }
    assert found[1][1].time_ns == T + 3 * MINUTE + SECOND // 2
    store.close()
    assert rows(db) == ([(2, 3)] if version > 1 else []) + [(3, 4)]
    Store(fresh).close()
    assert tables(db) == tables(fresh)
    Store(db).close()  # and it opens again


def test_a_step_that_fails_leaves_the_file_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    db = tmp_path / "old.db"
    old_file(db, 2)
    before = tables(db)
    with monkeypatch.context() as changed:
        changed.setitem(schema._STEPS, 2, (*schema._STEPS[2], "ALTER TABLE absent ADD COLUMN x"))
        with pytest.raises(ControllerError, match="no such table: absent"):
            Store(db)
    assert tables(db) == before
    Store(db).close()
    assert len(tables(db)["samples"]) == len(before["samples"]) + len(NEW_COLUMNS)
