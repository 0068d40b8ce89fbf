"""Every report once, whatever dies in between."""

from __future__ import annotations

import socket
import sqlite3
import time
from pathlib import Path

from expanse_ebpf.ship.client import ControllerStream
from expanse_ebpf.ship.sequence import first_sequence
from tests.controller.process import Controller, client, eventually, node, report, up


def stored(db: Path) -> list[int]:
    """CPU seconds of the stored samples, in order; equal to their reports' sequence numbers here."""
    with sqlite3.connect(db) as connection:
        rows = connection.execute("SELECT cpu_ns / 1000000000 FROM samples ORDER BY boot, time_ns, job")
        return [row[0] for row in rows]


def test_killed_controller_loses_no_acknowledged_report_and_stores_none_twice(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    with Controller(db) as first:
        stream = ControllerStream(first.address, node())
        stream.start()
        # More than one batch, so that some reports are on their way when the controller dies.
        for number in range(1, 301):
            stream.send(report(number))
        eventually(lambda: stream.unsent < 300)
        first.kill()
        acknowledged = 300 - stream.unsent
        assert stored(db)[:acknowledged] == list(range(1, acknowledged + 1))
        for number in range(301, 331):
            stream.send(report(number))
        with Controller(db, port=first.port):
            eventually(lambda: stream.unsent == 0)
            stream.stop(5)
    assert stream.dropped == 0
    assert stored(db) == list(range(1, 331))


def test_what_is_acknowledged_is_in_the_file_at_once(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    with Controller(db) as controller, client(controller.address) as nodes:
        assert nodes.send(up(report(5)), hello=node()) == [5]
        controller.kill()
    assert stored(db) == [5]


def test_replay_is_acknowledged_and_stored_once(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    reports = [up(report(number)) for number in range(1, 4)]
    with Controller(db) as controller, client(controller.address) as nodes:
        assert nodes.send(*reports, hello=node())[-1] == 3
        assert nodes.send(*reports, hello=node())[-1] == 3
        code, errors = controller.terminate()
    assert (code, errors) == (0, "")
    assert stored(db) == [1, 2, 3]


def test_replay_after_a_crash_is_stored_once(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    reports = [up(report(number)) for number in range(1, 40)]
    with Controller(db) as controller, client(controller.address) as nodes:
        assert nodes.send(reports[0], hello=node())[-1] == 1
        assert nodes.send(*reports[1:], hello=node())[-1] == 39
        controller.kill()
    with Controller(db) as controller, client(controller.address) as nodes:
        assert nodes.send(*reports, hello=node())[-1] == 39
        (job,) = nodes.jobs(key="slurm/123").jobs
        assert job.last_ns > job.first_ns
        controller.kill()
    assert stored(db) == list(range(1, 40))


def test_controller_that_is_not_there_yet(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    stream = ControllerStream(f"127.0.0.1:{port}", node(), max_unsent=20)
    stream.start()
    for number in range(1, 31):
        stream.send(report(number))
    eventually(lambda: "cannot be reached" in stream.state)
    assert stream.state == f"controller 127.0.0.1:{port} cannot be reached: connection refused"
    assert (stream.connected, stream.unsent, stream.dropped) == (False, 20, 10)
    with Controller(tmp_path / "reports.db", port=port):
        eventually(lambda: stream.connected and not stream.unsent)
        assert stream.state == f"connected to controller 127.0.0.1:{port}"
        stream.stop(5)
    # The oldest were given up, in order.
    assert stored(tmp_path / "reports.db") == list(range(11, 31))


def test_stop_brings_the_last_report_in(tmp_path: Path) -> None:
    with Controller(tmp_path / "reports.db") as controller:
        stream = ControllerStream(controller.address, node())
        stream.start()
        eventually(lambda: stream.connected)
        stream.send(report(1))
        stream.stop(10)
        assert stream.unsent == 0
    assert stored(tmp_path / "reports.db") == [1]


def test_second_agent_of_a_boot_goes_on_above_the_first(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    with Controller(db) as controller, client(controller.address) as nodes:
        for _ in range(2):
            first = first_sequence()
            made = [report(first), report(first + 1)]
            for r in made:
                r.jobs[0].cpu_ns = r.sequence
            assert nodes.send(*map(up, made), hello=node())[-1] == first + 1
            time.sleep(0.001)
        controller.kill()
    assert len(stored(db)) == 4


def test_sequence_that_begins_too_low_is_counted_and_does_not_stall_the_node(tmp_path: Path) -> None:
    with (
        Controller(tmp_path / "reports.db", "--metrics-listen", "127.0.0.1:0") as controller,
        client(controller.address) as nodes,
    ):
        assert nodes.send(up(report(100)), hello=node()) == [100]
        assert nodes.send(up(report(7)), hello=node()) == [7]
        controller.kill()
    assert stored(tmp_path / "reports.db") == [100]


def test_newest_sample_in_the_store_is_young(tmp_path: Path) -> None:
    """Prints nothing and times nothing: a sample must be in the file before the next report is due."""
    db = tmp_path / "reports.db"
    with Controller(db) as controller:
        stream = ControllerStream(controller.address, node())
        stream.start()
        for number in range(1, 4):
            stream.send(report(number))
            # Nothing but this one report makes the batch go to the file.
            eventually(lambda number=number: stored(db)[-1:] == [number])
        stream.stop(5)


def test_report_too_large_for_the_wire_is_dropped_and_counted(tmp_path: Path) -> None:
    with Controller(tmp_path / "reports.db") as controller:
        stream = ControllerStream(controller.address, node())
        stream.start()
        stream.send(report(1, cgroup="x" * 5_000_000))
        stream.send(report(2))
        eventually(lambda: stream.unsent == 0)
        stream.stop(5)
    assert stream.dropped == 1
    assert stored(tmp_path / "reports.db") == [2]
