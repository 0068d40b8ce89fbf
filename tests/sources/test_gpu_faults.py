"""What goes wrong with NVML on nodes, as the source's reports show it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.gpu.claims import ClaimReader
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.process_list import read_pid_max
from expanse_ebpf.sources.gpu import GpuSource
from expanse_ebpf.wire.collector_pb2 import GpuSample, Report
from tests.stand_ins.nvml import StandIn, uuid

INTERVAL_S = 0.3
GIB = 1 << 30


class Node:
    """The source, tick by tick."""

    def __init__(self, gpus: StandIn, source: GpuSource) -> None:
        self.gpus = gpus
        self.source = source
        self._next = time.monotonic()

    def tick(self) -> Report:
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = max(self._next + INTERVAL_S, time.monotonic())
        report = Report(time_ns=time.time_ns())
        self.source.sample(time.monotonic(), [], report)
        return report

    def until(self, holds: Callable[[Report], bool]) -> Report:
        limit = time.monotonic() + 20
        while not holds(report := self.tick()):
            assert time.monotonic() < limit, f"at the end {report}"
        return report


class MakeNode(Protocol):
    def __call__(self, *, devices: int = 1, variant: str = "v3", installed: bool = True) -> Node: ...


@pytest.fixture
def make_node(tmp_path: Path) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(*, devices: int = 1, variant: str = "v3", installed: bool = True) -> Node:
        gpus = StandIn(tmp_path / f"nvml{len(nodes)}", devices=devices, variant=variant, installed=installed)
        client = Client(GpuConfig(library=str(gpus.library)), INTERVAL_S)
        nodes.append(Node(gpus, GpuSource(client, ClaimReader(None))))
        nodes[-1].source.start()
        return nodes[-1]

    yield make
    for node in nodes:
        node.gpus.release()
        node.source.stop()


def is_well(report: Report) -> bool:
    return report.nvml.up and bool(report.gpus) and all(gpu.state == "ok" for gpu in report.gpus)


def gpu(report: Report, number: int = 0) -> GpuSample:
    (found,) = (sample for sample in report.gpus if sample.uuid == uuid(number))
    return found


def loud(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


# ---- NV-05


def test_nvml_fails_for_every_handle_in_mid_run_and_recovers(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(devices=2)
    for _ in range(4):
        node.until(is_well)
    node.gpus.fail("*", 999, 0)
    node.gpus.fail("*", 999, 1)
    gap = [node.until(lambda report: not report.nvml.up)]
    gap += [node.tick() for _ in range(4)]
    assert [report.nvml.up for report in gap] == [False] * 5
    assert gap[-1].nvml.code == "unknown_error"
    assert [sample.state for sample in gap[-1].gpus] == ["silent", "silent"]
    assert not gap[-1].gpus[0].HasField("power_mw")
    assert [event for report in gap for event in report.gpu_events] == []
    node.gpus.heal()
    assert any(is_well(node.tick()) for _ in range(2))
    assert len(loud(caplog)) == 1


def test_the_loaded_driver_is_another_than_the_librarys(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    node.gpus.fail("nvmlInit", 18)
    report = node.until(lambda report: report.nvml.code not in ("", "starting"))
    assert report.nvml.code == "driver_library_mismatch"
    assert "different versions" in report.nvml.reason
    assert not report.nvml.up
    for _ in range(5):
        assert node.tick().nvml.code == "driver_library_mismatch"
    node.gpus.heal()
    assert is_well(node.until(is_well))
    assert len(loud(caplog)) == 1


def test_the_library_comes_later(make_node: MakeNode) -> None:
    node = make_node(installed=False)
    for _ in range(3):
        report = node.tick()
        assert (report.nvml.up, report.nvml.code) == (False, "library_not_found")
    node.gpus.install()
    assert is_well(node.until(is_well))


# ---- NV-07


@pytest.mark.parametrize("variant", ["unsuffixed", "v3", "v2", "v3_long", "v3_short"])
def test_processes_are_right_whatever_records_the_driver_has(make_node: MakeNode, variant: str) -> None:
    node = make_node(variant=variant)
    node.gpus.processes(0, [(4242, GIB), (4343, 2 * GIB), (read_pid_max() + 1, GIB)])
    sample = gpu(node.until(is_well))
    assert [(process.pid, process.memory_bytes) for process in sample.processes] == [
        (4242, GIB),
        (4343, 2 * GIB),
    ]
    assert sample.rejected_processes == 1


def test_without_process_lists_a_device_has_all_its_other_figures(make_node: MakeNode) -> None:
    sample = gpu(make_node(variant="none").until(is_well))
    assert sample.power_mw == 70_000
    assert sample.memory_total_bytes == 85_520_809_984
    assert "no such function" in sample.unavailable["processes"]
    assert not sample.processes


# ---- NV-08


def test_samples_that_are_not_in_order_count_once(make_node: MakeNode) -> None:
    node = make_node()
    t = time.time_ns() // 1000 - 10_000_000
    ms = 1000
    node.gpus.samples(0, [(t, 0)])
    assert gpu(node.until(is_well)).measured_ns == 0
    told = [(t + 100 * ms, 100), (t + 140 * ms, 100), (t + 120 * ms, 100)]
    node.gpus.samples(0, told)
    node.until(lambda report: gpu(report).measured_ns == 140_000_000)
    assert gpu(node.tick()).measured_ns == 140_000_000
    node.gpus.samples(0, [*told, (t + 150 * ms, 100)])
    sample = gpu(node.until(lambda report: gpu(report).measured_ns > 140_000_000))
    assert (sample.measured_ns, sample.busy_ns) == (150_000_000, 150_000_000)


@pytest.mark.slow
def test_an_idle_device_fills_no_log(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """600 times that NVML finds nothing: neither the agent nor the worker says a word."""
    node = make_node()
    node.gpus.samples(0, [])
    node.until(is_well)
    caplog.clear()
    node.gpus.reset_calls()
    client = node.source._client
    client._interval_s = 0.02
    limit = time.monotonic() + 60
    while node.gpus.calls().get("nvmlDeviceGetProcessUtilization", 0) < 600:
        assert time.monotonic() < limit
        time.sleep(0.005)
        client.tick(time.monotonic(), [uuid(0)])
    assert node.gpus.calls()["nvmlDeviceGetSamples"] >= 600
    assert loud(caplog, logging.DEBUG + 1) == []
    assert capfd.readouterr() == ("", "")


# ---- a device that is lost


def test_a_lost_gpu_is_one_event_and_its_unavailable_handle_a_reason_of_the_source(
    make_node: MakeNode,
) -> None:
    node = make_node(devices=2)
    node.until(is_well)
    node.gpus.fail("*", 15, 1)
    report = node.until(lambda report: bool(report.gpu_events))
    assert [(event.uuid, event.kind) for event in report.gpu_events] == [(uuid(1), "lost")]
    report = node.until(lambda report: bool(node.source.unavailable) and gpu(report, 0).state == "ok")
    assert node.source.unavailable == {
        "gpu index 1": "the GPU has fallen off the bus or is not accessible (NVML error 15)"
    }
    assert [sample.state for sample in report.gpus] == ["ok", "lost"]
    assert not report.gpu_events


def test_a_device_that_hangs_is_named_by_the_source(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=2)
    client = Client(GpuConfig(library=str(gpus.library), deadline_s=0.6), INTERVAL_S)
    node = Node(gpus, GpuSource(client, ClaimReader(None)))
    try:
        node.until(is_well)
        gpus.hang("nvmlDeviceGetMemoryInfo", 0)
        report = node.until(lambda report: report.nvml.code == "hung")
        assert report.nvml.reason == f"NVML has not answered about {uuid(0)} for 0.6 s"
        report = node.until(lambda report: [sample.state for sample in report.gpus] == ["silent", "ok"])
        assert set(node.source.unavailable) == {f"gpu {uuid(0)}"}
        assert node.source.unavailable[f"gpu {uuid(0)}"] == gpu(report).unavailable["all"]
    finally:
        gpus.release()
        node.source.stop()


def test_a_device_without_a_name_of_its_own_is_named_by_the_source(make_node: MakeNode) -> None:
    node = make_node(devices=2)
    node.gpus.set(1, uuid="GPU-\x1b[31mred")
    node.until(is_well)
    assert node.source.unavailable == {"gpu index 1": "NVML gives a figure that cannot be true"}


def test_a_storm_of_xids_is_one_event_of_its_tick(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    node.until(is_well)
    with node.gpus.batch():
        for _ in range(500):
            node.gpus.event(0, 31)
    report = node.until(lambda report: bool(report.gpu_events))
    assert [(event.kind, event.xid) for event in report.gpu_events] == [("xid", 31)]
    assert dict(gpu(report).xids) == {31: 500}
    assert not any(node.tick().gpu_events for _ in range(3))
    assert len(loud(caplog)) == 1
