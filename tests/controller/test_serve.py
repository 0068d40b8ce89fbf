"""`expanse-controller serve` as its operator, or the agent that embeds it, sees it."""

from __future__ import annotations

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from expanse_controller import schema
from tests.controller.process import COMMAND, Controller, client, eventually, node, report, up


def failed(*arguments: str) -> str:
    """The one line that a controller that cannot start leaves."""
    done = subprocess.run([*COMMAND, "serve", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stderr.splitlines() if line]
    assert len(lines) == 1, done.stderr
    return lines[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_it_with_everything_acknowledged_in_one_file(tmp_path: Path, number: int) -> None:
    db = tmp_path / "reports.db"
    with Controller(db) as controller, client(controller.address) as nodes:
        assert nodes.send(up(report(1)), hello=node()) == [1]
        controller.process.send_signal(number)
        _, errors = controller.process.communicate(timeout=20)
    assert (controller.process.returncode, errors) == (0, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["reports.db", "reports.db.lock"]
    with sqlite3.connect(db) as connection:
        assert connection.execute("SELECT count(*) FROM samples").fetchone() == (1,)
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_port_in_use(tmp_path: Path) -> None:
    with Controller(tmp_path / "a.db") as controller:
        line = failed("--listen", controller.address, "--db", str(tmp_path / "b.db"))
    assert f"{controller.address} cannot be listened on: Address already in use" in line
    assert "--listen" in line


def test_metrics_port_in_use(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        line = failed("--listen", "127.0.0.1:0", "--metrics-listen", address, "--db", str(tmp_path / "b.db"))
    assert address in line
    assert "--metrics-listen" in line


def _not_sqlite(db: Path) -> None:
    db.write_bytes(b"not a database, but as long as one " * 100)


def _other_program(db: Path) -> None:
    with sqlite3.connect(db) as connection:
        connection.execute("CREATE TABLE songs (name)")


def _newer(db: Path) -> None:
    schema.open_writer(db).execute("PRAGMA user_version = 99")


def _a_directory(db: Path) -> None:
    db.mkdir()


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (_not_sqlite, "file is not a database"),
        (_other_program, "a database of another program"),
        (_newer, "newer expanse-controller"),
        (_a_directory, "unable to open database file"),
    ],
)
def test_store_that_cannot_be_used(prepare: object, words: str, tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    prepare(db)  # type: ignore[operator]
    line = failed("--listen", "127.0.0.1:0", "--db", str(db))
    assert words in line
    assert "--db" in line


def test_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = failed("--listen", "127.0.0.1:0", "--db", str(tmp_path / "file" / "reports.db"))
    assert "cannot be made" in line
    assert "--db" in line
    assert "cannot be written" in failed("--listen", "127.0.0.1:0", "--db", "/proc/reports.db")


def test_store_of_another_controller(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    with Controller(db):
        assert "in use by another" in failed("--listen", "127.0.0.1:0", "--db", str(db))


@pytest.mark.parametrize("address", ["nonsense", "host:", ":5", "host:70000", "host:-1"])
def test_address_that_is_none(address: str) -> None:
    done = subprocess.run([*COMMAND, "serve", "--listen", address], capture_output=True, text=True)
    assert done.returncode == 2
    assert "is not HOST:PORT" in done.stderr


PARENT = """
import os, subprocess, sys, time
reader, writer = os.pipe()
command = sys.argv[1:] + ["--announce", str(writer)]
child = subprocess.Popen(command, pass_fds=[writer], stdout=subprocess.DEVNULL)
os.close(writer)
print(open(reader).readline(), end="", flush=True)
time.sleep(60)
"""


def test_embedded_controller_ends_with_its_parent(tmp_path: Path) -> None:
    serve = [*COMMAND, "serve", "--listen", "127.0.0.1:0", "--db", str(tmp_path / "x.db"), "--parent-death"]
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, *serve], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            announced = json.loads(parent.stdout.readline())
            host, _, port = announced["listen"].rpartition(":")
            socket.create_connection((host, int(port))).close()
        finally:
            parent.kill()
    eventually(lambda: not Path(f"/proc/{announced['pid']}").exists() or _is_zombie(announced["pid"]))
    assert not (tmp_path / "x.db-wal").exists()  # it ended in order


def _is_zombie(pid: int) -> bool:
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


def test_parent_that_is_gone_before_the_controller_is_ready(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [
            *COMMAND,
            "serve",
            "--listen",
            "127.0.0.1:0",
            "--db",
            str(tmp_path / "x.db"),
            "--parent-death",
            "--announce",
            str(writer),
        ],
        pass_fds=[writer],
        capture_output=True,
        text=True,
        timeout=60,
    )
    os.close(writer)
    assert done.returncode != 0
    assert "nobody reads it" in done.stderr
    assert "Traceback" not in done.stderr


def test_streams_that_are_open_do_not_hold_up_the_end(tmp_path: Path) -> None:
    from expanse_ebpf.ship.client import ControllerStream

    with Controller(tmp_path / "x.db") as controller:
        stream = ControllerStream(controller.address, node())
        stream.start()
        eventually(lambda: stream.connected)
        stream.send(report(1))
        code, errors = controller.terminate()
        assert code == 0
        assert errors == ""
        eventually(lambda: not stream.connected)
        assert stream.state.startswith(f"controller {controller.address} ")
        stream.stop(1)
