"""Dry runs over a store that a controller filled."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from expanse_controller.columns import COLUMNS
from expanse_controller.errors import ControllerError
from expanse_controller.rules.dry_run import DryRun, dry_run
from expanse_controller.store import Item, Store
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JOB_STATE_RUNNING
from tests.controller.process import node
from tests.controller.rules.made import SECOND, START, Cluster, report, rule, rules, sample

IDLE, WORK = {"gpus": 2, "gpu_busy": 0.0, "cpu_cores": 1.0}, {"gpus": 2, "gpu_busy": 0.9, "cpu_cores": 1.0}
RULE = {"for": "30s", "cooldown": "2m"}


class Filled:
    """A store with a report of each node every five seconds."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.store = Store(path)
        self.t = 100.0
        self.busy = self.cpu = 0.0

    def run(self, seconds: float, *names: str, **job: Any) -> None:
        for _ in range(int(seconds) // 5):
            self.t += 5
            self.busy += 5 * job.get("gpu_busy", 0.0)
            self.cpu += 5 * job.get("cpu_cores", 0.0)
            items = []
            for name in names or ("gpu001",):
                made = sample(self.t, key="slurm/7", gpus=2, state=job.get("state", JOB_STATE_RUNNING))
                made.cpu_ns = int(self.cpu * SECOND)
                if "gpu_busy" in job:
                    made.gpu.busy_ns, made.gpu.measured_ns = int(self.busy * SECOND), int(self.t * SECOND)
                one = report(self.t, made)
                items.append(Item(node(name, f"install-{name}"), one, one.time_ns))
            self.store.write(items)

    def dry_run(
        self, when: str = "gpu_busy < 0.1", from_s: float = 0, to_s: float = 0, **keys: Any
    ) -> DryRun:
        at = [int((START + s) * SECOND) if s else 0 for s in (from_s, to_s)]
        return dry_run(self.path, rule(when, **(RULE | keys)), *at)

    @staticmethod
    def times(run: DryRun) -> Sequence[float]:
        return [fired.time_ns / SECOND - START for fired in run.fired]


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path / "reports.db")


def test_a_rule_fires_when_it_would_have_fired(filled: Filled) -> None:
    filled.run(120, **WORK)  # from 105 s to 220 s
    filled.run(200, **IDLE)  # to 420 s
    filled.run(60, **WORK)
    filled.store.close()
    run = filled.dry_run()
    # Looks are at 105, 115, …: rates are below 0.1 from 235 s on, and 30 s later it fires.
    assert filled.times(run) == [265, 385]
    assert {fired.firing.key for fired in run.fired} == {"slurm/7"}
    assert [e.name for e in run.fired[0].firing.request.evidence] == ["gpu_busy"]
    assert run.seconds["made", "slurm/7", ""]["no_data"] == 10  # one look without a rate
    assert run.seconds["made", "slurm/7", ""]["firing"] == 160  # until 415 s
    assert sum(run.seconds["made", "slurm/7", ""].values()) == run.looks * 10


def test_a_dry_run_says_what_the_controller_said(filled: Filled) -> None:
    cluster = Cluster(rule("gpu_busy < 0.1", **RULE))
    live = []
    for turn in range(60):
        job = {"key": "slurm/7", **(IDLE if turn // 20 == 1 else WORK)}
        if turn // 20 == 1:
            job["gpu_busy"] = 171 / (cluster.t + 10)  # the counter begins anew, and stands still
        cluster.t += 10
        made = report(cluster.t, sample(cluster.t, **job))
        filled.store.write([Item(node("gpu001", "install-gpu001"), made, made.time_ns)])
        cluster.t -= 10
        live += [(cluster.now_ns, f.key) for f in cluster.look({"gpu001": [job]})]
    filled.store.close()
    run = filled.dry_run()
    assert [(fired.time_ns, fired.firing.key) for fired in run.fired] == live
    assert live


def test_absent_figures_are_no_data(filled: Filled) -> None:
    filled.run(300, cpu_cores=1.0)
    filled.store.close()
    run = filled.dry_run()
    assert run.fired == []
    assert run.seconds == {("made", "slurm/7", ""): {"firing": 0, "no_data": run.looks * 10, "ok": 0}}
    assert run.looks == 31


def test_a_gap_is_no_data_for_a_while_and_then_nothing(filled: Filled) -> None:
    filled.run(60, **WORK)
    filled.t += 100_000
    filled.run(60, **WORK)
    filled.store.close()
    run = filled.dry_run()
    spent = run.seconds["made", "slurm/7", ""]
    assert spent["no_data"] == 290  # when it has been silent for 35 to 295 s, and twice a look without a rate
    assert run.looks < 60


def test_between_two_times(filled: Filled) -> None:
    filled.run(600, **IDLE)
    filled.store.close()
    assert filled.times(filled.dry_run(from_s=300, to_s=400)) == [340]
    none = filled.dry_run(from_s=10_000)
    assert (none.looks, none.fired, none.seconds) == (0, [], {})


def test_a_job_on_several_nodes_is_one_and_nodes_are_told_apart(filled: Filled) -> None:
    filled.run(60, "a", "b", "c", **IDLE)
    filled.store.close()
    run = filled.dry_run("gpus == 6")
    assert [fired.firing.nodes for fired in run.fired] == [("a", "b", "c")]
    run = filled.dry_run("gpus == 2 && peers_cpu_cores > 0.5", each="node")
    assert {place[2] for place in run.seconds} == {"a", "b", "c"}


def test_jobs_end(filled: Filled) -> None:
    filled.run(60, **IDLE)
    filled.run(5, state=JOB_STATE_ENDED)
    filled.store.close()
    assert sum(filled.dry_run().seconds["made", "slurm/7", ""].values()) == 60


def test_one_window_at_a_time(filled: Filled) -> None:
    filled.run(180, **IDLE)
    filled.store.close()
    two = rules(
        "".join(
            f"- {{name: {name}, about: x, when: gpus > 1, for: 0s, window: {{seconds: 25}}}}\n"
            for name in ("first", "second")
        )
    )
    run = dry_run(filled.path, two)
    assert [(f.firing.rule.name, f.time_ns // SECOND - START) for f in run.fired] == [
        ("first", 105),
        ("second", 205),
    ]


def test_a_running_controller_is_not_disturbed_and_its_file_not_changed(filled: Filled) -> None:
    filled.run(60, **IDLE)
    before = filled.path.read_bytes()
    assert filled.dry_run().looks
    assert filled.path.read_bytes() == before
    filled.run(60, **IDLE)
    filled.store.close()
    assert sorted(path.name for path in filled.path.parent.iterdir()) == ["reports.db", "reports.db.lock"]
    filled.dry_run()
    assert sorted(path.name for path in filled.path.parent.iterdir()) == ["reports.db", "reports.db.lock"]


def test_a_file_of_an_earlier_release_has_fewer_figures(filled: Filled) -> None:
    filled.run(120, **IDLE)
    filled.store.close()
    with sqlite3.connect(filled.path) as connection:
        for name in COLUMNS[COLUMNS.index("gpu_throttled_ns") :]:
            connection.execute(f"ALTER TABLE samples DROP COLUMN {name}")
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    assert filled.dry_run().fired
    assert filled.dry_run("loading < 1.0").seconds["made", "slurm/7", ""]["ok"] == 0


def test_what_is_no_store_is_told(tmp_path: Path) -> None:
    with pytest.raises(ControllerError, match="is not there"):
        dry_run(tmp_path / "absent.db", [])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "text").write_text("no database, but as long as one " * 100)
    with pytest.raises(ControllerError, match="cannot be read: file is not a database"):
        dry_run(tmp_path / "text", [])
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("CREATE TABLE x (y)")
    connection.close()
    with pytest.raises(ControllerError, match="is no store of expanse-controller"):
        dry_run(tmp_path / "other.db", [])
