"""The store by itself: retention, upkeep, failures."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_controller.store import EXPIRE_ROWS, OUT_OF_ORDER, REPLAYED, STORED, Item, Store
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED
from tests.controller.process import node, report

SECOND = 1_000_000_000
DAY = 86400 * SECOND
NOW = 1_800_000_000 * SECOND


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "x.db")
    yield made
    made.close()


def count(store: Store, table: str) -> int:
    with sqlite3.connect(store.path) as connection:
        number: int = connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
        return number


def test_outcomes(store: Store) -> None:
    items = [
        Item(node(), report(n, time_ns=t), NOW) for n, t in ((5, 50), (6, 60), (5, 50), (1, 99), (7, 70))
    ]
    assert store.write(items) == [STORED, STORED, REPLAYED, OUT_OF_ORDER, STORED]
    assert count(store, "samples") == 3


def test_same_sequence_of_other_boots_and_nodes_is_another_report(store: Store) -> None:
    senders = [node(), node(boot="boot-2"), node(install="install-2"), node(name="gpu002")]
    assert store.write([Item(sender, report(1), NOW) for sender in senders]) == [STORED] * 4
    assert count(store, "samples") == 4
    assert len(store.nodes()) == 3


def test_old_samples_go_in_batches_and_jobs_with_their_last_sample(store: Store) -> None:
    total = EXPIRE_ROWS["samples"] + 500
    for sequence in range(1, total + 1):
        store.write(
            [Item(node(), report(sequence, time_ns=NOW - 10 * DAY + sequence, run=1), NOW - 10 * DAY)]
        )
    store.write([Item(node(), report(total + 1, time_ns=NOW, run=2), NOW)])
    store.settle()
    assert store.expire(7 * 86400, NOW)
    assert count(store, "samples") == 501
    while store.expire(7 * 86400, NOW):
        pass
    assert (count(store, "samples"), count(store, "jobs"), count(store, "boots")) == (1, 1, 1)


def test_node_that_is_gone_for_good_is_forgotten(store: Store) -> None:
    store.write([Item(node("old"), report(1, time_ns=NOW - 9 * DAY), NOW - 9 * DAY)])
    store.write([Item(node("new", "i-2"), report(1, time_ns=NOW), NOW)])
    while store.expire(7 * 86400, NOW):
        pass
    assert [boot.identity.name for boot in store.nodes()] == ["new"]
    assert (count(store, "samples"), count(store, "jobs"), count(store, "boots"), count(store, "nodes")) == (
        1,
        1,
        1,
        1,
    )


@pytest.mark.parametrize("skew", [-30 * DAY, 30 * DAY])
def test_node_whose_clock_is_wrong_keeps_as_much_as_others(store: Store, skew: int) -> None:
    for sequence, age in ((1, 8 * DAY), (2, 6 * DAY), (3, 0)):
        store.write([Item(node(), report(sequence, time_ns=NOW - age + skew), NOW - age)])
    store.settle()
    while store.expire(7 * 86400, NOW):
        pass
    assert count(store, "samples") == 2


def test_failed_transaction_leaves_nothing_and_the_next_goes_on(store: Store) -> None:
    store.write([Item(node(), report(1), NOW)])
    blocker = sqlite3.connect(store.path, isolation_level=None)
    store._db.execute("PRAGMA busy_timeout = 1")
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(sqlite3.OperationalError):
        store.write([Item(node(), report(2, run=5), NOW), Item(node("b", "i-b"), report(1), NOW)])
    blocker.execute("ROLLBACK")
    blocker.close()
    assert (
        store.write([Item(node(), report(2, run=5), NOW), Item(node("b", "i-b"), report(1), NOW)])
        == [STORED] * 2
    )
    assert (count(store, "samples"), count(store, "jobs")) == (3, 3)


def test_full_disk_in_mid_transaction_leaves_nothing(store: Store) -> None:
    store.write([Item(node(), report(1), NOW)])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages}")
    big = [Item(node(), report(n, run=n, cgroup="c" * 3000), NOW + n * SECOND) for n in range(2, 40)]
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.write(big)
    assert count(store, "samples") == 1
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.write(big) == [STORED] * len(big)
    assert store.nodes()[0].newest.current.sequence == 39  # type: ignore[union-attr]
    assert (count(store, "samples"), count(store, "jobs")) == (39, 39)


def test_settling_forgets_jobs_that_are_in_no_newest_report(store: Store) -> None:
    first, last = report(1, time_ns=10, run=1), report(2, time_ns=20, run=1)
    last.jobs[0].state = JOB_STATE_ENDED
    store.write(
        [Item(node(), first, NOW), Item(node(), last, NOW), Item(node(), report(3, time_ns=30, run=2), NOW)]
    )
    assert len(store.live_jobs()) == 2
    store.settle()
    assert len(store.live_jobs()) == 1
    rows = store._db.execute("SELECT state, first_ns, last_ns FROM jobs ORDER BY id").fetchall()
    assert rows == [(JOB_STATE_ENDED, 10, 20), (2, 30, 30)]
    # One that comes back is the same row.
    store.write([Item(node(), report(4, time_ns=40, run=1), NOW)])
    assert count(store, "jobs") == 2
