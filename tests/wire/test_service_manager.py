"""sd_notify: what is said, to whom, and that nobody waits for it."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.wire.service_manager import ServiceManager


class Listener:
    """The service manager's end."""

    def __init__(self, address: str) -> None:
        self.environment = {"NOTIFY_SOCKET": address, "HOME": "/root"}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self._socket.setblocking(False)

    def received(self) -> list[str]:
        """What has come since the last call."""
        messages = []
        while True:
            try:
                messages.append(self._socket.recv(4096).decode())
            except BlockingIOError:
                return messages

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["file", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Listener]:
    made = Listener(str(tmp_path / "notify") if request.param == "file" else f"@{tmp_path}/notify")
    yield made
    made.close()


def test_readiness_is_said_once_and_a_status_when_it_changes(listener: Listener) -> None:
    service = ServiceManager(listener.environment)
    assert listener.received() == []
    for _ in range(2):
        service.status("1 job")
        service.ready()
    service.status("2 jobs")
    service.stopping()
    assert listener.received() == ["STATUS=1 job", "READY=1", "STATUS=2 jobs", "STOPPING=1"]


def test_a_status_cannot_say_anything_else(listener: Listener) -> None:
    service = ServiceManager(listener.environment)
    service.status("a source is off:\nREADY=1\r\nMAINPID=1\x1b[2J\0" + "x" * 5000 + "\ud800")
    (message,) = listener.received()
    assert message.startswith("STATUS=a source is off: READY=1 MAINPID=1␛[2J␀xxx")
    assert message.isprintable()
    assert len(message) < 300


def test_children_are_not_told_of_the_service_manager(listener: Listener) -> None:
    listener.environment |= {"WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    ServiceManager(listener.environment)
    assert listener.environment == {"HOME": "/root"}


def test_it_is_the_process_environment_unless_another_is_given(listener: Listener) -> None:
    program = (
        "import os, subprocess, sys\n"
        "from expanse_ebpf.wire.service_manager import ServiceManager\n"
        "ServiceManager().ready()\n"
        "print(subprocess.run(['env'], capture_output=True, text=True).stdout)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], env=listener.environment, capture_output=True, text=True, check=True
    )
    assert listener.received() == ["READY=1"]
    assert "HOME=" in told.stdout
    assert "NOTIFY_SOCKET" not in told.stdout


def test_signs_of_life_come_three_times_in_the_time_that_the_watchdog_waits(listener: Listener) -> None:
    service = ServiceManager(listener.environment | {"WATCHDOG_USEC": "600000"})
    assert service.alive() == pytest.approx(0.2, abs=0.01)
    assert listener.received() == ["WATCHDOG=1"]
    left = service.alive()
    assert 0 < left <= 0.2
    assert listener.received() == []
    time.sleep(left)
    service.alive()
    assert listener.received() == ["WATCHDOG=1"]


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "600000", "WATCHDOG_PID": "1"},  # meant for the process that started this one
        {"WATCHDOG_USEC": "9" * 400},
    ],
    ids=["absent", "off", "damaged", "another's", "absurd"],
)
def test_no_watchdog_no_signs(listener: Listener, environment: dict[str, str]) -> None:
    service = ServiceManager(listener.environment | environment)
    assert service.alive() == math.inf
    assert listener.received() == []


def test_without_a_service_manager_nothing_happens(tmp_path: Path) -> None:
    for environment in ({}, {"NOTIFY_SOCKET": str(tmp_path / "nobody")}, {"NOTIFY_SOCKET": "/" + "x" * 200}):
        service = ServiceManager(environment)
        service.status("x")
        service.ready()
        service.stopping()


def test_one_that_does_not_listen_is_not_waited_for_and_told_later(listener: Listener) -> None:
    service = ServiceManager(listener.environment)
    for number in range(5000):  # more than its queue takes
        service.status(str(number))
    service.ready()
    assert "READY=1" not in listener.received()
    service.status("4999")
    service.ready()
    assert listener.received() == ["STATUS=4999", "READY=1"]
