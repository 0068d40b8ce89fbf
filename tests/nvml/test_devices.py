from __future__ import annotations

import time

import pytest

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.devices import Devices
from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuSample, NvmlStatus
from tests.nvml.conftest import EAGER, SERVE, MakeNode, MakeWorker, Node, Round, program
from tests.stand_ins.nvml import uuid


def told(found: Round) -> list[tuple[str, str]]:
    return [(event.uuid, event.kind) for event in found.events]


def history(node: Node, ticks: int) -> list[tuple[str, str]]:
    return [event for _ in range(ticks) for event in told(node.tick())]


@pytest.fixture
def node(make_node: MakeNode) -> Node:
    node = make_node(devices=2, command=EAGER)
    node.until_all_is_well()
    return node


@pytest.mark.parametrize("code", [15, 16])
def test_a_gpu_is_lost_in_one_event_and_back_in_one(node: Node, code: int) -> None:
    node.gpus.fail("*", code, 1)
    found = node.until(lambda found: found.gpu(1).state == "lost")
    assert told(found) == [(uuid(1), "lost")]
    assert dict(found.gpu(1).unavailable) == {"all": reasons.sentence(code)}
    assert (found.gpu(1).index, found.gpu(1).name) == (1, "NVIDIA H100 80GB HBM3")
    assert not found.gpu(1).HasField("power_mw")
    for _ in range(4):
        found = node.until(lambda found: found.gpu(0).state == "ok")
        assert found.states == ["ok", "lost"]
        assert found.gpu(0).power_mw == 70_000
        assert found.status.up
        assert told(found) == []
    node.gpus.heal()
    found = node.until(lambda found: found.gpu(1).state == "ok")
    assert told(found) == [(uuid(1), "back")]
    assert found.gpu(1).power_mw == 70_000
    assert history(node, 3) == []
    assert node.client.status.restarts == 0


def test_a_gpu_that_gives_no_handle_because_it_is_lost_is_lost(make_node: MakeNode) -> None:
    node = make_node(devices=2, command=EAGER)
    node.until_all_is_well()
    node.gpus.fail("nvmlDeviceGetHandleByIndex", 15, 0)
    found = node.until(lambda found: found.gpu(0).state == "lost")
    assert told(found) == [(uuid(0), "lost")]
    assert node.client.absent == {"index 0": 15}
    assert history(node, 3) == []
    node.gpus.heal()
    assert told(node.until(lambda found: found.gpu(0).state == "ok")) == [(uuid(0), "back")]
    assert node.client.absent == {}


def test_a_lost_gpu_is_not_looked_for_in_every_round(make_node: MakeNode) -> None:
    node = make_node(devices=2)
    node.until_all_is_well()
    node.gpus.fail("*", 15, 0)
    node.until(lambda _: node.client.absent == {"index 0": 15})
    calls = node.gpus.calls()
    for _ in range(5):
        assert node.until(lambda found: found.gpu(1).state == "ok").gpu(0).state == "lost"
    assert node.gpus.calls()["nvmlDeviceGetHandleByIndex_v2"] - calls["nvmlDeviceGetHandleByIndex_v2"] <= 2


def test_a_gpu_that_nvml_counts_no_more_is_lost(make_node: MakeNode) -> None:
    node = make_node(devices=2, command=EAGER)
    node.until_all_is_well()
    node.gpus.system(devices=1)
    found = node.until(lambda found: found.gpu(1).state == "lost")
    assert told(found) == [(uuid(1), "lost")]
    assert found.gpu(0).state == "ok"
    node.gpus.system(devices=2)
    assert told(node.until(lambda found: found.gpu(1).state == "ok")) == [(uuid(1), "back")]


def test_a_gpu_that_gives_no_handle_for_another_reason_is_silent_with_it(make_node: MakeNode) -> None:
    node = make_node(devices=2, command=EAGER)
    node.until_all_is_well()
    node.gpus.fail("nvmlDeviceGetHandleByIndex", 17, 0)
    found = node.until(lambda found: node.client.absent == {"index 0": 17})
    found = node.until(lambda found: found.gpu(1).state == "ok")
    assert found.gpu(0).state == "silent"
    assert dict(found.gpu(0).unavailable) == {"all": reasons.sentence(17)}
    assert found.gpu(1).state == "ok"
    assert told(found) == []


def test_samples_count_once_when_a_gpu_was_away(make_node: MakeNode) -> None:
    node = make_node(command=EAGER)
    node.gpus.auto(0, utilization=50)
    node.gpus.say("0", "auto", time.time_ns() // 1000 - 10_000_000)  # so long NVML has kept samples already
    before = node.until(lambda found: found.states == ["ok"] and found.gpu().measured_ns > 0).gpu()
    node.gpus.fail("nvmlDeviceGetHandleByIndex", 15, 0)
    node.until(lambda found: found.states == ["lost"])
    node.gpus.heal()
    after = node.until(lambda found: found.states == ["ok"]).gpu()
    assert after.measured_ns - before.measured_ns <= after.time_ns - before.time_ns + 200_000_000


def test_a_lost_gpu_stays_lost_while_there_is_no_worker(node: Node) -> None:
    node.gpus.fail("*", 15, 1)
    node.until(lambda found: found.gpu(1).state == "lost")
    node.gpus.remove()
    assert node.client._worker is not None
    node.client._worker.kill()
    node.wait_until_it_has_ended()
    for _ in range(3):
        found = node.tick()
        assert told(found) == []
    assert found.states == ["silent", "lost"]
    assert found.gpu(0).unavailable["all"].startswith("there is no ")


# ---- XID errors


def test_each_xid_is_told_once_and_counted(node: Node) -> None:
    node.gpus.event(1, 31)
    found = node.until(lambda found: bool(found.events))
    (event,) = found.events
    assert (event.uuid, event.kind, event.xid) == (uuid(1), "xid", 31)
    assert abs(event.time_ns - found.gpu(1).time_ns) < 60_000_000_000
    assert dict(found.gpu(1).xids) == {31: 1}
    assert dict(found.gpu(0).xids) == {}
    assert history(node, 3) == []
    with node.gpus.batch():
        node.gpus.event(1, 31)
        node.gpus.event(0, 48)
        node.gpus.event(1, 94)
        node.gpus.event(1, 31)
    found = node.until(lambda found: bool(found.events))
    assert [(event.uuid, event.xid) for event in found.events] == [
        (uuid(1), 31),
        (uuid(0), 48),
        (uuid(1), 94),
    ]
    assert dict(found.gpu(1).xids) == {31: 3, 94: 1}
    assert dict(found.gpu(0).xids) == {48: 1}


def test_a_storm_of_xids_is_told_in_the_round_in_which_it_comes(make_worker: MakeWorker) -> None:
    worker = make_worker(devices=2)
    worker.ask()
    with worker.gpus.batch():
        for _ in range(1000):
            worker.gpus.event(0, 31)
        worker.gpus.event(1, 31)
    found = worker.ask()
    assert [(event.uuid, event.xid) for event in found.events] == [(uuid(0), 31), (uuid(1), 31)]
    assert dict(found.gpu(0).xids) == {31: 1000}
    assert dict(found.gpu(1).xids) == {31: 1}
    assert worker.ask().events == []


@pytest.mark.parametrize("bound", ["_MOST = 100", "_LONGEST_S = -1", "_MOST_KINDS = 100"])
def test_a_flood_of_xids_that_is_not_taken_at_once_is_said_to_be_one(
    make_worker: MakeWorker, capfd: pytest.CaptureFixture[str], bound: str
) -> None:
    text = f"from expanse_ebpf.nvml import events\nevents.{bound}\n"
    worker = make_worker(command=program(f"{text}{SERVE}"))
    worker.ask()
    with worker.gpus.batch():
        for xid in range(150):
            worker.gpus.event(0, xid)
    worker.ask()
    worker.ask()
    if bound != "_LONGEST_S = -1":
        assert len(worker.ask().gpu().xids) == 64  # and no event was lost before
    assert capfd.readouterr().err.count("more Xid errors") == 1


def test_equal_xids_of_a_tick_are_one_event_and_all_are_counted() -> None:
    devices = Devices()
    devices.take({"device": {"uuid": uuid(0), "values": {}}}, 1)
    for count in (3, 4):
        devices.take({"event": {"uuid": uuid(0), "xid": 31, "count": count}}, 1)
    for nonsense in (0, -1, "9", 1 << 40):
        devices.take({"event": {"uuid": uuid(0), "xid": 31, "count": nonsense}}, 1)
    (sample,), events = devices.report(NvmlStatus(up=True), None, {}, 1)
    assert [(event.kind, event.xid) for event in events] == [("xid", 31)]
    assert dict(sample.xids) == {31: 7}


def test_other_events_are_none_of_ours(node: Node) -> None:
    node.gpus.event(0, 2, kind=4)  # nvmlEventTypePState
    assert history(node, 3) == []


def test_the_xid_with_which_a_gpu_falls_off_the_bus_is_told(node: Node) -> None:
    with node.gpus.batch():
        node.gpus.event(1, 79)
        node.gpus.fail("*", 15, 1)
    found = node.until(lambda found: bool(found.events))
    assert sorted(event.kind for event in found.events) == ["lost", "xid"]
    assert {event.uuid for event in found.events} == {uuid(1)}
    assert dict(found.gpu(1).xids) == {79: 1}


def test_a_lost_gpu_does_not_keep_back_the_xids_of_the_others(node: Node) -> None:
    node.gpus.fail("*", 15, 1)
    node.until(lambda found: found.gpu(1).state == "lost")
    for _ in range(3):
        node.tick()
    node.gpus.event(0, 48)
    found = node.until(lambda found: bool(found.events))
    assert [(event.uuid, event.xid) for event in found.events] == [(uuid(0), 48)]
    assert node.gpus.calls()["nvmlEventSetCreate"] == 2  # the second without the lost one


def test_a_gpu_that_is_back_tells_of_its_xids_again(node: Node) -> None:
    node.gpus.fail("*", 15, 1)
    node.until(lambda found: found.gpu(1).state == "lost")
    node.tick()
    node.gpus.heal()
    node.until(lambda found: found.gpu(1).state == "ok")
    node.tick()
    node.gpus.event(1, 13)
    assert node.until(lambda found: bool(found.events)).gpu(1).xids[13] == 1


def test_gpus_without_events_have_everything_else(make_node: MakeNode) -> None:
    node = make_node(devices=2)
    node.gpus.set(0, event_types=None)
    node.until_all_is_well()
    node.gpus.event(1, 48)
    assert [event.uuid for event in node.until(lambda found: bool(found.events)).events] == [uuid(1)]


def test_xids_are_counted_on_through_a_new_worker(node: Node) -> None:
    node.gpus.event(0, 48)
    node.until(lambda found: bool(found.events))
    assert node.client._worker is not None
    node.client._worker.kill()
    node.wait_until_it_has_ended()
    assert dict(node.tick().gpu(0).xids) == {48: 1}
    node.until_all_is_well()
    node.gpus.event(0, 48)
    assert dict(node.until(lambda found: bool(found.events)).gpu(0).xids) == {48: 2}


# ---- bounds


def test_events_of_one_tick_are_bounded() -> None:
    devices = Devices()
    for xid in range(10_000):
        devices.take({"event": {"uuid": uuid(0), "xid": xid}}, 1)
    _, events = devices.report(NvmlStatus(), None, {}, 1)
    assert events == [GpuEvent(time_ns=1, uuid=uuid(0), kind="xid", xid=xid) for xid in range(256)]


def test_all_instances_of_64_gpus_are_there() -> None:
    devices = Devices()

    def told(instances: int) -> list[GpuSample]:
        for number in range(64):
            own = [{"uuid": f"MIG-{number}-{i}", "gpu_instance": i, "values": {}} for i in range(instances)]
            line = {"uuid": uuid(number), "values": {"index": number}, "instances": own}
            devices.take({"device": line}, 1)
        samples, _ = devices.report(NvmlStatus(up=True), None, {}, 1)
        devices.end_tick()
        return samples

    samples = told(7)
    assert len(samples) == 512
    assert not any(sample.unavailable for sample in samples)
    samples = told(8)
    assert len(samples) == 512
    assert samples[0].unavailable["instances"] == reasons.sentence(reasons.TOO_MANY)
    assert not any("instances" in sample.unavailable for sample in told(7))
