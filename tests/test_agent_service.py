"""What the real agent and controller tell the service manager that started them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from expanse_ebpf.top import client


class Service:
    """A process and what it has told so far."""

    def __init__(self, process: subprocess.Popen[bytes], told: socket.socket, log: Path) -> None:
        self.process = process
        self.messages: list[str] = []
        self._told = told
        self._log = log

    def wait_for(self, message: str, number: int = 1) -> list[str]:
        """All messages, as soon as there are so many that begin like this."""
        deadline = time.monotonic() + 60
        while sum(m.startswith(message) for m in self.messages) < number:
            assert time.monotonic() < deadline, (message, self.messages, self._log.read_text())
            try:
                self.messages.append(self._told.recv(4096).decode())
            except TimeoutError:
                continue
        return self.messages

    def wait_for_silence(self) -> None:
        """Until nothing has come for twice the time that a watchdog of 0.9 s waits."""
        self._told.settimeout(1.8)
        with suppress(TimeoutError):
            while True:
                self._told.recv(4096)


@contextmanager
def service(
    folder: Path, *command: str, watchdog_s: float = 0, world: tuple[str, ...] = ()
) -> Iterator[Service]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told, (folder / "log").open("wb") as log:
        told.bind(str(folder / "notify"))
        told.settimeout(0.2)
        environment = {**os.environ, "NOTIFY_SOCKET": str(folder / "notify")}
        if watchdog_s:
            environment["WATCHDOG_USEC"] = str(round(watchdog_s * 1e6))
        process = subprocess.Popen(
            [*world, sys.executable, "-m", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
        )
        try:
            yield Service(process, told, folder / "log")
        finally:
            process.kill()
            process.wait()


def agent(folder: Path, *options: str) -> list[str]:
    return ["expanse_ebpf", "agent", "--socket", f"{folder}/agent.sock", "--state-dir", str(folder), *options]


def test_the_agent_is_ready_when_it_has_a_report_and_says_so_when_it_stops(tmp_path: Path) -> None:
    with service(tmp_path, *agent(tmp_path, "--interval", "0.5")) as running:
        messages = running.wait_for("READY=1")
        report = next(client.watch(f"{tmp_path}/agent.sock", 1))
        assert report.interval_ns == 0  # the first, kept for those who come later
        assert len(messages) == 2
        assert messages[0].startswith("STATUS=")
        assert "a report every 0.5 s" in messages[0]
        running.process.send_signal(signal.SIGTERM)
        assert running.wait_for("STOPPING=1")[-1] == "STOPPING=1"
        assert running.process.wait(20) == 0


def test_the_agent_gives_signs_of_life_between_reports_too(tmp_path: Path) -> None:
    with service(tmp_path, *agent(tmp_path, "--interval", "3600"), watchdog_s=0.9) as running:
        running.wait_for("READY=1")
        running.wait_for("WATCHDOG=1", number=4)


def test_an_agent_that_hangs_gives_none_and_says_where_it_hangs(tmp_path: Path) -> None:
    with service(tmp_path, *agent(tmp_path, "--interval", "0.5"), watchdog_s=0.9) as running:
        running.wait_for("WATCHDOG=1", number=2)
        running.process.send_signal(signal.SIGSTOP)
        running.wait_for_silence()
        running.process.send_signal(signal.SIGABRT)
        running.process.send_signal(signal.SIGCONT)
        assert running.process.wait(20) == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in (tmp_path / "log").read_text()
    assert "agent.py" in (tmp_path / "log").read_text()


def test_a_source_that_is_off_is_told_with_its_reason(tmp_path: Path) -> None:
    options = agent(tmp_path, "--interval", "0.5")
    with service(tmp_path, *options, world=("setpriv", "--bounding-set", "-all")) as running:
        status = running.wait_for("READY=1")[0]
    assert "; cpu is off: " in status
    assert "CAP_BPF" in status


def test_the_controller_is_ready_when_it_listens(tmp_path: Path) -> None:
    command = ["expanse_controller", "serve", "--listen", "127.0.0.1:0", "--db", f"{tmp_path}/reports.db"]
    with service(tmp_path, *command, watchdog_s=0.9) as running:
        messages = running.wait_for("READY=1")
        assert messages[0].startswith("STATUS=listening on 127.0.0.1:")
        running.wait_for("WATCHDOG=1", number=3)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0


def test_a_standalone_controller_is_not_taken_for_the_agent(tmp_path: Path) -> None:
    options = ["--standalone", "--db", f"{tmp_path}/reports.db", "--interval", "0.5"]
    with service(tmp_path, *agent(tmp_path, *options)) as running:
        messages = running.wait_for("READY=1")
        running.wait_for("STATUS=", number=2)  # the link
        assert not [message for message in messages if "listening" in message]
        assert messages.count("READY=1") == 1
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(20) == 0
