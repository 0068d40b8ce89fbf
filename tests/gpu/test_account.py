"""What a job's GPUs did for it, added up."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from expanse_ebpf.gpu.account import Account
from expanse_ebpf.wire.collector_pb2 import GpuHold, GpuProfile, GpuSample, JobGpu

SECOND = 10**9


def gpu(uuid: str = "GPU-a", at: int = 1, **more: object) -> GpuSample:
    """A GPU that is half busy and takes 100 W, `at` so many seconds."""
    figures = {
        "busy_ns": at * SECOND // 2,
        "measured_ns": at * SECOND,
        "energy_mj": at * 100_000,
        "power_mw": 100_000,
        "memory_total_bytes": 80 << 30,
    }
    return GpuSample(uuid=uuid, **(figures | more))  # type: ignore[arg-type]


def instance(uuid: str, at: int, gpu_instance: int = 1, parent: str = "GPU-a") -> GpuSample:
    profile = GpuProfile(
        source="gpm", measured_ns=at * SECOND, graphics_ns=at * SECOND // 4, sm_active_ns=at * SECOND // 5
    )
    return GpuSample(
        uuid=uuid, parent_uuid=parent, gpu_instance=gpu_instance, memory_total_bytes=10 << 30, profile=profile
    )


def hold(uuid: str = "GPU-a", sharers: int = 1) -> GpuHold:
    return GpuHold(uuid=uuid, source="slurm", sharers=sharers)


def alone(holds: list[GpuHold]) -> set[str]:
    return {hold.uuid for hold in holds if hold.sharers == 1}


def tick(
    account: Account,
    holds: list[GpuHold],
    *samples: GpuSample,
    own: Mapping[str, int | None] | None = None,
) -> tuple[JobGpu, dict[str, str]]:
    result, missing = JobGpu(), dict[str, str]()
    account.tick(holds, {sample.uuid: sample for sample in samples}, alone(holds), own or {}, result, missing)
    return result, missing


def test_what_a_gpu_did_before_the_job_held_it_is_not_the_jobs() -> None:
    account = Account()
    result, _ = tick(account, [hold()], gpu(at=1000))
    assert (result.busy_ns, result.measured_ns, result.energy_mj) == (0, 0, 0)
    result, missing = tick(account, [hold()], gpu(at=1002))
    assert (result.busy_ns, result.measured_ns, result.energy_mj) == (SECOND, 2 * SECOND, 200_000)
    assert (result.power_mw, result.memory_total_bytes) == (100_000, 80 << 30)
    assert set(missing) == {"sm_active_ns", "profiled_ns", "throttled_ns"}


def test_what_it_did_while_nobody_held_it_is_not_the_jobs_either() -> None:
    account = Account()
    tick(account, [hold()], gpu(at=1))
    tick(account, [hold()], gpu(at=2))
    tick(account, [], gpu(at=10))
    tick(account, [hold()], gpu(at=20))
    result, _ = tick(account, [hold()], gpu(at=21))
    assert result.measured_ns == 2 * SECOND
    assert result.energy_mj == 200_000


def test_a_gpu_that_was_silent_for_a_while_is_made_up_for() -> None:
    account = Account()
    tick(account, [hold()], gpu(at=1))
    result, _ = tick(account, [hold()])
    assert result.measured_ns == 0
    assert not result.HasField("power_mw")
    result, _ = tick(account, [hold()], gpu(at=6))
    assert result.measured_ns == 5 * SECOND


def test_a_counter_that_begins_anew_takes_nothing_away() -> None:
    account = Account()
    for at in (5, 6, 1, 2):
        result, _ = tick(account, [hold()], gpu(at=at))
    assert result.measured_ns == 2 * SECOND
    assert result.energy_mj == 200_000


def test_of_a_shared_gpu_only_what_its_own_processes_did_is_the_jobs() -> None:
    account = Account()
    shared = [hold(sharers=2)]
    tick(account, shared, gpu(at=1), own={"GPU-a": 0})
    result, missing = tick(account, shared, gpu(at=2), own={"GPU-a": SECOND // 10})
    assert (result.busy_ns, result.measured_ns) == (SECOND // 10, SECOND)
    for name in ("power_mw", "energy_mj"):
        assert not result.HasField(name)
        assert "not its alone" in missing[name]


def test_when_nvml_does_not_tell_by_process_the_use_of_a_shared_gpu_is_not_known() -> None:
    result, missing = tick(Account(), [hold(sharers=2)], gpu())
    assert not result.HasField("busy_ns")
    assert "by process" in missing["busy_ns"]


@pytest.mark.parametrize("own_ns", [3 * SECOND, 10**18])
def test_a_job_cannot_have_kept_a_gpu_busy_for_longer_than_was_measured(own_ns: int) -> None:
    account = Account()
    tick(account, [hold(sharers=2)], gpu(at=1), own={"GPU-a": 0})
    result, _ = tick(account, [hold(sharers=2)], gpu(at=2), own={"GPU-a": own_ns})
    assert result.busy_ns == result.measured_ns == SECOND


def test_the_use_of_a_mig_instance_is_that_of_its_profile() -> None:
    account = Account()
    tick(account, [hold("MIG-1")], instance("MIG-1", 1))
    result, missing = tick(account, [hold("MIG-1")], instance("MIG-1", 5))
    assert (result.busy_ns, result.measured_ns) == (SECOND, 4 * SECOND)
    assert (result.sm_active_ns, result.profiled_ns) == (4 * SECOND // 5, 4 * SECOND)
    assert "a part of one" in missing["power_mw"]


def test_without_a_profile_the_use_of_a_mig_instance_is_not_known() -> None:
    sample = instance("MIG-1", 1)
    sample.ClearField("profile")
    result, missing = tick(Account(), [hold("MIG-1")], sample)
    assert not result.HasField("busy_ns")
    assert "gpu.profiler" in missing["busy_ns"]


def test_two_instances_in_one_gpu_instance_have_no_profile_of_their_own() -> None:
    account = Account()
    both = [instance("MIG-1", 1), instance("MIG-2", 1)]
    tick(account, [hold("MIG-1")], *both)
    result, missing = tick(account, [hold("MIG-1")], *both)
    assert not result.HasField("busy_ns")
    assert "GPU instance" in missing["busy_ns"]


def test_a_job_with_a_gpu_and_all_its_instances_has_its_memory_once() -> None:
    holds = [hold(), hold("MIG-1"), hold("MIG-2")]
    samples = [gpu(), instance("MIG-1", 1), instance("MIG-2", 1, gpu_instance=2)]
    result, _ = tick(Account(), holds, *samples)
    assert result.memory_total_bytes == 80 << 30
    assert result.power_mw == 100_000


def test_a_gpu_whose_use_is_not_told_is_not_taken_for_idle() -> None:
    account = Account()
    for _ in range(2):
        sample = gpu()
        sample.ClearField("busy_ns")
        sample.unavailable["busy_ns"] = "this GPU or driver has it not"
        result, missing = tick(account, [hold()], sample)
    assert not result.HasField("busy_ns")
    assert missing["busy_ns"] == "this GPU or driver has it not"


def test_several_gpus_are_added_up() -> None:
    account = Account()
    holds = [hold(), hold("GPU-b")]
    for at in (1, 2):
        result, _ = tick(account, holds, gpu(at=at), gpu("GPU-b", at, power_mw=50_000))
    assert (result.measured_ns, result.busy_ns) == (2 * SECOND, SECOND)
    assert (result.power_mw, result.memory_total_bytes) == (150_000, 160 << 30)


def test_what_a_gpu_did_between_being_shared_and_not_is_nobodys() -> None:
    account = Account()
    tick(account, [hold(sharers=2)], gpu(at=1), own={"GPU-a": 0})
    result, _ = tick(account, [hold()], gpu(at=601))
    assert (result.busy_ns, result.energy_mj) == (0, 0)
    result, _ = tick(account, [hold()], gpu(at=602))
    assert (result.measured_ns, result.energy_mj) == (SECOND, 100_000)


def test_a_reading_of_the_energy_that_cannot_be_true_adds_nothing() -> None:
    account = Account()
    for energy in (1000, 2000, 1 << 59, 3000, 4000, *(0, 1 << 60) * 40, 5000, 6000):
        result, _ = tick(account, [hold()], gpu(energy_mj=energy))
    assert result.energy_mj == 1000 + 1000 + 1000


def test_what_a_job_has_used_stays_known_when_it_holds_nothing_any_more() -> None:
    account = Account()
    for at in (1, 2):
        tick(account, [hold()], gpu(at=at))
    result, _ = tick(account, [], gpu(at=3))
    assert (result.energy_mj, result.measured_ns) == (100_000, SECOND)


def test_the_reason_for_no_activity_of_sms_is_the_true_one() -> None:
    profile = GpuProfile(source="gpm", measured_ns=SECOND, sm_active_ns=SECOND)
    _, missing = tick(Account(), [hold(sharers=2)], gpu(profile=profile), own={"GPU-a": 0})
    assert "not its alone" in missing["sm_active_ns"]
    _, missing = tick(Account(), [hold()], gpu())
    assert "gpu.profiler" in missing["sm_active_ns"]


# ---- throttling


def throttled(uuid: str = "GPU-a", at: int = 1, **causes: float) -> GpuSample:
    nanoseconds = {cause: int(seconds * SECOND) for cause, seconds in causes.items()}
    return gpu(uuid, time_ns=at * SECOND, throttled_ns=nanoseconds)


def test_throttling_counts_while_the_job_holds_the_gpus_and_is_added_up() -> None:
    account, holds = Account(), [hold("GPU-a"), hold("GPU-b")]
    result, missing = tick(
        account, holds, throttled("GPU-a", 1, power=500), throttled("GPU-b", 1, thermal=70)
    )
    assert result.HasField("throttled_ns")
    assert (result.throttled_ns, "throttled_ns" in missing) == (0, False)
    result, _ = tick(account, holds, throttled("GPU-a", 3, power=501), throttled("GPU-b", 3, thermal=70.5))
    assert result.throttled_ns == 1.5 * SECOND
    result, _ = tick(
        account, holds[:1], throttled("GPU-a", 4, power=502), throttled("GPU-b", 4, thermal=71.5)
    )
    assert result.throttled_ns == 2.5 * SECOND


def test_of_causes_that_overlap_the_longest_counts_and_sync_boost_is_none() -> None:
    account = Account()
    tick(account, [hold()], throttled(at=1, power=1, board_limit=1, sync_boost=1, idle=1))
    result, _ = tick(account, [hold()], throttled(at=3, power=2, board_limit=1.5, sync_boost=3, idle=3))
    assert result.throttled_ns == SECOND


def test_throttling_is_absent_with_a_reason_where_no_gpu_tells() -> None:
    result, missing = tick(Account(), [hold()], gpu())
    assert not result.HasField("throttled_ns")
    assert "NVML" in missing["throttled_ns"]
    result, missing = tick(Account(), [hold(), hold("GPU-b")], gpu(), throttled("GPU-b", power=1))
    assert (result.HasField("throttled_ns"), "throttled_ns" in missing) == (True, False)
    assert "throttled_ns" not in tick(Account(), [])[1]


def test_a_silent_gpus_throttling_is_told_when_it_answers_again() -> None:
    account = Account()
    tick(account, [hold()], throttled(at=1, power=1))
    result, missing = tick(account, [hold()])
    assert (result.throttled_ns, "throttled_ns" in missing) == (0, False)
    result, _ = tick(account, [hold()], throttled(at=3, power=2))
    assert result.throttled_ns == SECOND


def test_throttling_that_has_begun_anew_or_cannot_be_true_adds_nothing() -> None:
    account = Account()
    tick(account, [hold()], throttled(at=1, power=100))
    assert tick(account, [hold()], throttled(at=2, power=3))[0].throttled_ns == 0
    assert tick(account, [hold()], throttled(at=3, power=4))[0].throttled_ns == SECOND
    assert tick(account, [hold()], throttled(at=4, power=4000))[0].throttled_ns == SECOND
    assert tick(account, [hold()], throttled(at=5, power=4000, thermal=7))[0].throttled_ns == SECOND


def test_instances_have_their_gpus_throttling_once() -> None:
    account, holds = Account(), [hold("MIG-1"), hold("MIG-2")]
    for at in (1, 2):
        parts = instance("MIG-1", at), instance("MIG-2", at, gpu_instance=2)
        result, _ = tick(account, holds, throttled(at=at, power=at), *parts)
    assert result.throttled_ns == SECOND
