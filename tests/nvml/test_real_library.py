"""NVIDIA's own library, on a machine without its driver."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.process import Process
from tests.nvml.conftest import Node
from tests.stand_ins.nvml import StandIn
from tests.stand_ins.real_nvml import MissingError, real_library

pytestmark = pytest.mark.skipif(
    Path("/proc/driver/nvidia/version").exists(), reason="the driver is loaded: there is no such answer"
)


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return real_library()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture
def node(library: Path, tmp_path: Path) -> Iterator[Node]:
    node = Node(StandIn(tmp_path, installed=False), 0.1, GpuConfig(library=str(library)))
    yield node
    node.client.stop()


def test_it_says_that_the_driver_is_not_loaded(node: Node) -> None:
    found = node.until(lambda found: found.status.code not in ("", "starting"))
    assert (found.status.up, found.status.code) == (False, "driver_not_loaded")
    assert found.status.reason == "the NVIDIA driver is not loaded (NVML error 9)"
    assert found.samples == {}


def test_a_worker_tells_so_and_ends(library: Path) -> None:
    worker = Process(["--library", str(library)])
    worker.ask(b'{"round": 1, "at": 0}\n')
    said: list[bytes] = []
    until = time.monotonic() + 10
    while not (how := worker.ended()):
        assert time.monotonic() < until
        said += worker.answers()
        time.sleep(0.01)
    said += worker.answers()
    worker.close()
    assert said == [b'{"round":1,"nvml":{"code":9}}']
    assert how == "with status 3"


def test_a_client_of_it_begins_no_storm_of_workers(library: Path) -> None:
    client = Client(GpuConfig(library=str(library)), 0.1)
    begun = set()
    until = time.monotonic() + 2
    while time.monotonic() < until:
        client.tick(time.monotonic())
        if client._worker is not None:
            begun.add(client._worker.pid)
        time.sleep(0.05)
    client.stop()
    assert 1 <= len(begun) <= 2
