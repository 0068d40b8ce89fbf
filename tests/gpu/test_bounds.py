"""What a report says of a GPU stays below what a controller takes, whatever users do."""

from __future__ import annotations

import pytest

from expanse_controller import limits
from expanse_ebpf.gpu.bounds import MAX_HOLDERS, MAX_PROCESSES, shorten
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuHolder, GpuProcess, GpuSample, Report
from expanse_ebpf.wire.transport import MAX_MESSAGE_BYTES

LONG = clean("\U0001f600" * 1000)  # 256 characters, 1 KiB


def holders(number: int, source: str = "slurm", name: str = "") -> list[GpuHolder]:
    return [GpuHolder(scheduler="slurm", id=f"{i}{name}", run=i, source=source) for i in range(1, number + 1)]


def processes(number: int, job: str = "slurm/1") -> list[GpuProcess]:
    """Each has more memory than the one before."""
    return [
        GpuProcess(pid=i, memory_bytes=i << 20, kind="compute", job=job, resolved=True)
        for i in range(1, number + 1)
    ]


def test_a_gpu_of_usual_size_stays_as_it_is() -> None:
    gpu = GpuSample(
        uuid="GPU-1",
        holders=holders(MAX_HOLDERS, name="-" + "n" * 100),
        processes=processes(MAX_PROCESSES, "run/" + "n" * 60),
        conflicts=["one"],
    )
    event = GpuEvent(uuid="GPU-1", kind="xid", xid=79, holders=gpu.holders)
    before = gpu.SerializeToString(deterministic=True), event.SerializeToString()
    shorten([gpu], [event])
    assert (gpu.SerializeToString(deterministic=True), event.SerializeToString()) == before


@pytest.mark.parametrize(("number", "words"), [(65, "… and 1 more holder"), (257, "… and 193 more holders")])
def test_holders_past_the_limit_are_told_by_their_number(number: int, words: str) -> None:
    gpu = GpuSample(uuid="GPU-1", holders=holders(number), conflicts=["one"])
    event = GpuEvent(uuid="GPU-1", kind="xid", xid=79, holders=gpu.holders)
    shorten([gpu], [event])
    assert list(gpu.holders) == list(event.holders) == holders(MAX_HOLDERS)
    assert list(gpu.conflicts) == ["one", words]


def test_who_was_given_a_gpu_is_not_pushed_out_by_who_says_so() -> None:
    gpu = GpuSample(uuid="GPU-1", holders=holders(300))
    given = GpuHolder(scheduler="slurm", id="999", run=999, source="device_cgroup")
    gpu.holders.append(given)
    gpu.holders.insert(0, GpuHolder(name="of another release", source="hearsay"))
    shorten([gpu], [])
    assert list(gpu.holders) == [given, *holders(MAX_HOLDERS - 1)]


def test_of_many_processes_those_with_most_memory_are_shown() -> None:
    listed = processes(300)
    gpu = GpuSample(uuid="GPU-1", processes=[GpuProcess(pid=999, kind="compute"), *listed])
    shorten([gpu], [])
    assert list(gpu.processes) == listed[: 300 - MAX_PROCESSES - 1 : -1]
    assert "only some are shown" in gpu.unavailable["processes"]
    assert not gpu.conflicts


def test_long_names_do_not_keep_shorter_ones_out() -> None:
    short = GpuProcess(pid=7, memory_bytes=1, kind="compute", job="slurm/2", resolved=True)
    gpu = GpuSample(uuid="GPU-1", processes=[*processes(200, f"run/{LONG}"), short])
    gpu.holders.extend([*holders(60, name=LONG), *holders(1)])
    event = GpuEvent(uuid="GPU-1", holders=gpu.holders)
    shorten([gpu], [event])
    assert gpu.processes[-1] == short
    assert gpu.holders[-1] == event.holders[-1] == holders(1)[0]
    assert len(gpu.processes) > 20
    assert len(gpu.holders) > 10
    assert "only some are shown" in gpu.unavailable["processes"]
    assert list(gpu.conflicts) == [f"… and {61 - len(gpu.holders)} more holders"]


def test_a_controller_takes_the_worst_that_users_can_make_of_a_nodes_gpus() -> None:
    worst = Report()
    for i in range(64):
        gpu = worst.gpus.add(uuid=f"GPU-{i}", conflicts=[clean(LONG, 200)] * 21)
        gpu.holders.extend(holders(300, name=LONG))
        gpu.processes.extend(processes(3000, f"run/{LONG}"))
        worst.gpu_events.add(uuid=gpu.uuid, kind="xid", xid=31, holders=gpu.holders)
    shorten(worst.gpus, worst.gpu_events)
    assert max(gpu.ByteSize() for gpu in worst.gpus) < limits.MAX_GPU_BYTES // 3
    assert max(event.ByteSize() for event in worst.gpu_events) < limits.MAX_IDENTITY_BYTES // 3
    del worst.gpu_events[8:]
    assert worst.ByteSize() < MAX_MESSAGE_BYTES
    before = worst.SerializeToString(deterministic=True)
    limits.drop_absurd_gpus(worst)
    assert worst.SerializeToString(deterministic=True) == before
