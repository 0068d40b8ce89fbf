from __future__ import annotations

import pytest

from expanse_ebpf.nvml import reasons
from tests.nvml.conftest import EAGER, Asked, MakeNode, MakeWorker, Round
from tests.stand_ins.h100 import Fault
from tests.stand_ins.nvml import mig_uuid, uuid

GIB = 1 << 30


@pytest.fixture
def worker(make_worker: MakeWorker) -> Asked:
    return make_worker("--profiler", devices=2)


def instances(found: Round) -> list[str]:
    return [sample.uuid for sample in found.samples.values() if sample.parent_uuid]


def pids(found: Round) -> dict[str, list[int]]:
    return {name: [p.pid for p in s.processes] for name, s in found.samples.items() if s.processes}


def test_an_instance_has_its_identity_its_gpu_and_its_memory(worker: Asked) -> None:
    name = "NVIDIA H100 80GB HBM3 MIG 2g.20gb"
    second = {"gpu_instance": 3, "name": name, "memory_used": GIB, "memory_free": 9 * GIB}
    worker.gpus.mig(0, [{}, None, second])
    found = worker.ask()
    assert instances(found) == [mig_uuid(0, 2), mig_uuid(0, 0)]  # by their numbers: 3 and 7
    instance = found.samples[mig_uuid(0, 2)]
    assert (instance.parent_uuid, instance.state) == (uuid(0), "ok")
    assert (instance.gpu_instance, instance.compute_instance, instance.mig_profile) == (3, 0, "2g.20gb")
    assert instance.name == name
    assert (instance.memory_used_bytes, instance.memory_free_bytes) == (GIB, 9 * GIB)
    assert instance.memory_total_bytes == 10_468_982_784
    assert instance.time_ns == found.gpu(0).time_ns
    assert found.gpu(0).mig_enabled
    assert not found.gpu(1).mig_enabled


@pytest.mark.parametrize("name", [None, Fault(999)])
def test_an_instance_without_a_name_is_there(worker: Asked, name: Fault | None) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.set((0, 0), name=name)
    found = worker.ask()
    assert instances(found) == [mig_uuid(0, 0), mig_uuid(0, 1)]
    nameless = found.samples[mig_uuid(0, 0)]
    assert (nameless.name, nameless.mig_profile, nameless.gpu_instance) == ("", "", 7)
    assert nameless.memory_total_bytes == 10_468_982_784


def test_the_gpu_goes_before_its_instances_and_they_before_the_next_gpu(worker: Asked) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.mig(1, [{}])
    assert list(worker.ask().samples) == [uuid(0), mig_uuid(0, 0), mig_uuid(0, 1), uuid(1), mig_uuid(1, 0)]


def test_a_gpu_in_mig_mode_has_no_utilisation_and_all_else(worker: Asked) -> None:
    worker.gpus.mig(0, [{}])
    sample = worker.ask().gpu(0)
    for name in ("utilization", "memory_utilization", "busy_ns"):
        assert sample.unavailable[name] == reasons.sentence(3)
        assert not sample.HasField(name)  # type: ignore[arg-type]
    assert sample.power_mw == 70_000


def test_processes_are_on_the_line_of_their_instance(worker: Asked) -> None:
    worker.gpus.mig(0, [{}, {}, {"gpu_instance": 8, "compute_instance": 1}])
    worker.gpus.processes((0, 0), [(100, GIB)])
    worker.gpus.processes((0, 1), [(101, GIB), (103, 2 * GIB)])
    worker.gpus.processes((0, 2), [(102, 3 * GIB)])
    found = worker.ask()
    assert pids(found) == {mig_uuid(0, 0): [100], mig_uuid(0, 1): [101, 103], mig_uuid(0, 2): [102]}
    assert found.samples[mig_uuid(0, 2)].processes[0].memory_bytes == 3 * GIB
    assert found.gpu(0).state == "ok"


def test_one_process_in_two_instances_is_on_both_lines(worker: Asked) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.processes((0, 0), [(100, GIB)])
    worker.gpus.processes((0, 1), [(100, 2 * GIB)])
    assert pids(worker.ask()) == {mig_uuid(0, 0): [100], mig_uuid(0, 1): [100]}


def test_processes_of_which_the_instance_is_not_known_are_the_gpus(make_worker: MakeWorker) -> None:
    worker = make_worker(variant="unsuffixed")  # records without the numbers of the instance
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.processes((0, 0), [(100, GIB)])
    assert pids(worker.ask()) == {uuid(0): [100]}


def test_a_list_that_fails_is_missing_on_every_instance(worker: Asked) -> None:
    worker.gpus.mig(0, [{}])
    worker.gpus.fail("nvmlDeviceGetComputeRunningProcesses", 4)
    found = worker.ask()
    for name in (uuid(0), mig_uuid(0, 0)):
        assert found.samples[name].unavailable["processes"] == reasons.sentence(4)


def test_activity_is_told_of_each_instance(worker: Asked) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.gpm((0, 0), {2: 80.0})
    worker.gpus.gpm((0, 1), {2: 20.0})
    worker.ask()
    found = worker.ask()
    for number, share in ((0, 0.8), (1, 0.2)):
        profile = found.samples[mig_uuid(0, number)].profile
        assert profile.source == "gpm"
        assert profile.sm_active_ns == pytest.approx(share * profile.measured_ns, abs=2)


def test_an_instance_without_gpm_says_so_in_every_round(worker: Asked) -> None:
    worker.gpus.mig(0, [{}])
    worker.gpus.fail("nvmlGpmMigSampleGet", 3)
    for _ in range(2):
        instance = worker.ask().samples[mig_uuid(0, 0)]
        assert instance.unavailable["profile"] == reasons.sentence(3)
        assert not instance.HasField("profile")
        assert instance.memory_total_bytes


@pytest.mark.parametrize("code", [2, 3, 6, 999])  # most are also what is said of one that has gone
def test_memory_that_nvml_does_not_tell_leaves_the_instance(worker: Asked, code: int) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.fail("nvmlDeviceGetMemoryInfo", code, (0, 1))
    found = worker.ask()
    broken = found.samples[mig_uuid(0, 1)]
    assert broken.state == "ok"
    assert {n: broken.unavailable[n] for n in ("memory_used_bytes", "memory_total_bytes")} == {
        "memory_used_bytes": reasons.sentence(code),
        "memory_total_bytes": reasons.sentence(code),
    }
    assert found.samples[mig_uuid(0, 0)].memory_total_bytes


def test_instances_that_cannot_be_counted_leave_their_gpu(worker: Asked) -> None:
    worker.gpus.mig(0, [{}])
    worker.gpus.fail("nvmlDeviceGetMaxMigDeviceCount", 999)
    sample = worker.ask().gpu(0)
    assert sample.power_mw == 70_000
    assert sample.unavailable["instances"] == reasons.sentence(999)


def test_a_gpu_that_is_divided_anew_has_its_new_instances_and_no_old_ones(make_node: MakeNode) -> None:
    node = make_node(command=EAGER, profiler=True)
    assert instances(node.until_all_is_well()) == []
    node.gpus.mig(0, [{}, {}])
    node.until(lambda found: instances(found) == [mig_uuid(0, 0), mig_uuid(0, 1)])
    node.gpus.mig(0, [None, {}, {}])
    found = node.until(lambda found: instances(found) == [mig_uuid(0, 1), mig_uuid(0, 2)])
    assert not found.events  # none of them was lost
    node.gpus.mig(0, [])
    found = node.until(lambda found: not instances(found))
    assert found.gpu().state == "ok"
    found = node.until(lambda found: found.gpu().HasField("utilization"))
    assert found.gpu().HasField("busy_ns")
    assert not found.events


def test_an_instance_that_goes_is_noticed_at_once_and_so_is_the_one_in_its_place(make_node: MakeNode) -> None:
    node = make_node()  # which looks for instances now and then
    node.gpus.mig(0, [{}, {}])
    node.until_all_is_well()
    node.gpus.mig(0, [{}, None, {}])
    found = node.until(lambda found: mig_uuid(0, 1) not in found.samples)
    assert instances(found) == [mig_uuid(0, 0), mig_uuid(0, 2)]


def test_two_instances_that_go_at_once_take_nobody_with_them(make_node: MakeNode) -> None:
    node = make_node()
    node.gpus.mig(0, [{}, {}, {}])
    node.until_all_is_well()
    node.gpus.mig(0, [{}])
    found = node.until(lambda found: instances(found) == [mig_uuid(0, 0)])
    assert found.status.restarts == 0


def test_instances_of_a_lost_gpu_are_lost_with_it_in_one_event(make_node: MakeNode) -> None:
    node = make_node(devices=2)
    node.gpus.mig(0, [{}, {}])
    node.until_all_is_well()
    node.gpus.fail("*", 15, 0)
    found = node.until(lambda found: found.gpu(0).state == "lost")
    assert [(event.uuid, event.kind) for event in found.events] == [(uuid(0), "lost")]
    found = node.until(lambda found: found.gpu(1).state == "ok")
    assert {name: sample.state for name, sample in found.samples.items()} == {
        uuid(0): "lost",
        mig_uuid(0, 0): "lost",
        mig_uuid(0, 1): "lost",
        uuid(1): "ok",
    }
    # What they are is still known.
    assert found.samples[mig_uuid(0, 1)].gpu_instance == 8
    assert found.samples[mig_uuid(0, 1)].mig_profile == "1g.10gb"


def test_an_xid_in_an_instance_is_its_gpus(worker: Asked) -> None:
    worker.gpus.mig(0, [{}, {}])
    worker.ask()
    worker.gpus.event(0, 31, instance=(7, 0))
    found = worker.ask()
    assert [(event.uuid, event.xid) for event in found.events] == [(uuid(0), 31)]
    assert dict(found.gpu(0).xids) == {31: 1}
