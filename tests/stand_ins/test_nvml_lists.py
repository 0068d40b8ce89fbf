"""The stand-in for libnvidia-ml.so.1: samples, processes, events and GPM."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pynvml
import pytest

from tests.stand_ins.caller import Call, Caller, NvmlError
from tests.stand_ins.h100 import Fault
from tests.stand_ins.nvml import ALL_LINKS, StandIn

MIB = 1 << 20
GIB = 1 << 30

# ---- samples


def samples(nvml: Caller, since: int) -> list[tuple[int, int]]:
    kind, found = nvml(f"n.nvmlDeviceGetSamples(gpu(0), n.NVML_GPU_UTILIZATION_SAMPLES, {since})")
    assert kind == pynvml.NVML_VALUE_TYPE_UNSIGNED_INT
    return [(sample["timeStamp"], sample["sampleValue"]) for sample in found]


def test_samples_come_in_the_order_given_and_only_newer_ones(gpus: StandIn, call: Call) -> None:
    gpus.samples(0, [(100, 10), (140, 20), (120, 30)])
    nvml = call(gpus)
    assert samples(nvml, 0) == [(100, 10), (140, 20), (120, 30)]
    assert samples(nvml, 100) == [(140, 20), (120, 30)]
    with pytest.raises(NvmlError, match=r"^6$"):
        samples(nvml, 140)
    gpus.samples(0, [(100, 10), (140, 20), (120, 30), (150, 0)])
    assert samples(nvml, 140) == [(150, 0)]
    gpus.samples(0, Fault(999))
    with pytest.raises(NvmlError, match=r"^999$"):
        samples(nvml, 0)


def test_samples_fill_the_room_there_is(gpus: StandIn, call: Call) -> None:
    gpus.samples(0, [(time_us, 1) for time_us in range(100, 110)], kind="memory_utilization")
    nvml = call(gpus)
    nvml("count, kind, room = ctypes.c_uint(0), ctypes.c_uint(), (n.c_nvmlSample_t * 4)()")
    since = "ctypes.c_ulonglong(0)"
    question = (
        f"library.nvmlDeviceGetSamples(gpu(0), 2, {since}, ctypes.byref(kind), ctypes.byref(count), %s)"
    )
    assert nvml(question % "None") == 0
    assert nvml("count.value") == 120
    nvml("count.value = 4")
    assert nvml(question % "room") == 0
    assert nvml("[count.value, room[3].timeStamp]") == [4, 103]
    nvml("count.value = 0")
    assert nvml(question % "room") == 2


def test_process_samples(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    assert nvml.error("n.nvmlDeviceGetProcessUtilization(gpu(0), 0)") == 6
    gpus.process_samples(0, [(100, 4242, 70, 7), (120, 4343, 20, 2)])
    found = nvml("n.nvmlDeviceGetProcessUtilization(gpu(0), 100)")
    assert found == [{"pid": 4343, "timeStamp": 120, "smUtil": 20, "memUtil": 2, "encUtil": 0, "decUtil": 0}]
    assert len(nvml("n.nvmlDeviceGetProcessUtilization(gpu(0), 0)")) == 2
    gpus.set(0, understated=1)  # a process more since the question for the size
    assert nvml.error("n.nvmlDeviceGetProcessUtilization(gpu(0), 0)") == 7


def test_time_passes_for_a_gpu_that_works(gpus: StandIn, call: Call) -> None:
    began = time.time_ns() // 1000
    gpus.auto(0, utilization=87, memory_utilization=33, power_mw=400_000, nvlink_tx_kib_rate=1e6)
    nvml = call(gpus)
    time.sleep(0.5)
    found = samples(nvml, 0)
    assert len(found) >= 4
    assert {percent for _, percent in found} == {87}
    stamps = [stamp for stamp, _ in found]
    assert {later - earlier for earlier, later in itertools.pairwise(stamps)} == {100_000}
    assert began < stamps[0] <= began + 200_000
    assert stamps[-1] <= time.time_ns() // 1000
    energy = nvml("n.nvmlDeviceGetTotalEnergyConsumption(gpu(0))") - 1_000_000_000
    elapsed_s = (time.time_ns() // 1000 - began) / 1e6
    assert 0.3 * 400_000 < energy <= 400_000 * elapsed_s
    sent = nvml(f"n.nvmlDeviceGetFieldValues(gpu(0), [(138, {ALL_LINKS})])[0].value.ullVal")
    assert sent > 0.3 * 1e6
    assert nvml("n.nvmlDeviceGetSamples(gpu(0), 2, 0)")[1][0]["sampleValue"] == 33
    assert nvml("n.nvmlDeviceGetTotalEnergyConsumption(gpu(1))") == 1_000_000_000


# ---- processes

TWO = [(4242, GIB), (4343, 2 * GIB)]
_RECORDS = {16: "n.c_nvmlProcessInfo_v2_t._fields_[:2]", 24: "n.c_nvmlProcessInfo_v2_t._fields_"}
_RECORDS[32] = "n.c_nvmlProcessDetail_v1_t._fields_"


def listed(nvml: Caller, symbol: str, size: int, device: str = "gpu(0)") -> list[dict[str, int]]:
    """By the symbol itself, with records of some size."""
    nvml(f"Record = type('Record', (ctypes.Structure,), {{'_fields_': {_RECORDS[size]}}})")
    nvml("room, count = (Record * 8)(), ctypes.c_uint(8)")
    assert nvml("ctypes.sizeof(Record)") == size
    assert nvml(f"library.nvmlDeviceGet{symbol}({device}, ctypes.byref(count), room)") == 0
    found: list[dict[str, int]] = nvml("room[:count.value]")
    return found


@pytest.mark.parametrize(
    ("variant", "suffix", "size"),
    [
        *[("v3", "", 16), ("v3", "_v2", 24), ("v3", "_v3", 24), ("v2", "_v2", 24), ("unsuffixed", "", 16)],
        *[("old", "", 16), ("v3_long", "_v3", 32), ("v3_long", "_v2", 24), ("v3_short", "_v3", 16)],
    ],
)
def test_process_lists_have_the_records_of_their_driver(
    tmp_path: Path, call: Call, variant: str, suffix: str, size: int
) -> None:
    gpus = StandIn(tmp_path, devices=1, variant=variant)
    gpus.processes(0, TWO)
    gpus.processes(0, [(5, None)], kind="graphics")
    gpus.processes(0, [(6, 7)], kind="mps")
    nvml = call(gpus)
    found = listed(nvml, f"ComputeRunningProcesses{suffix}", size)
    assert [(record["pid"], record["usedGpuMemory"]) for record in found] == TWO
    assert {record.get("gpuInstanceId", ALL_LINKS) for record in found} == {ALL_LINKS}
    (one,) = listed(nvml, f"GraphicsRunningProcesses{suffix}", size)
    assert (one["pid"], one["usedGpuMemory"]) == (5, 2**64 - 1)
    assert listed(nvml, f"MPSComputeRunningProcesses{suffix}", size)[0]["pid"] == 6


def test_process_lists_by_pynvml_itself(gpus: StandIn, call: Call) -> None:
    gpus.processes(0, [(4242, GIB), (4343, None)])
    nvml = call(gpus)
    found = nvml("n.nvmlDeviceGetComputeRunningProcesses(gpu(0))")
    assert [(record["pid"], record["usedGpuMemory"]) for record in found] == [(4242, GIB), (4343, None)]
    gpus.set(0, understated=2)
    assert len(nvml("n.nvmlDeviceGetComputeRunningProcesses(gpu(0))")) == 2  # pynvml asks with room to spare
    gpus.processes(0, Fault(4))
    assert nvml.error("n.nvmlDeviceGetComputeRunningProcesses(gpu(0))") == 4


def test_a_list_without_room_tells_how_many_there_are(gpus: StandIn, call: Call) -> None:
    gpus.processes(0, TWO)
    nvml = call(gpus)
    nvml("room, count = (n.c_nvmlProcessInfo_v2_t * 2)(), ctypes.c_uint(0)")
    question = "library.nvmlDeviceGetComputeRunningProcesses_v3(gpu(0), ctypes.byref(count), %s)"
    assert nvml(question % "None") == 7
    assert nvml("count.value") == 2
    nvml("count.value = 1")
    assert nvml(question % "room") == 7
    assert nvml("count.value") == 2
    assert nvml(question % "None") == 2
    gpus.processes(0, [])
    nvml("count.value = 0")
    assert nvml(question % "None") == 0
    gpus.processes(0, TWO)
    gpus.set(0, understated=1)
    assert nvml(question % "None") == 7
    assert nvml("count.value") == 1


def test_a_gpu_in_mig_mode_lists_the_processes_of_its_instances(gpus: StandIn, call: Call) -> None:
    gpus.mig(0, [{}, {"gpu_instance": 9, "compute_instance": 1}])
    gpus.processes((0, 0), [(4242, GIB)])
    gpus.processes((0, 1), [(4343, MIB)])
    nvml = call(gpus)

    def found(device: str) -> list[tuple[int, ...]]:
        return [tuple(record.values()) for record in listed(nvml, "ComputeRunningProcesses_v3", 24, device)]

    assert found("gpu(0)") == [(4242, GIB, 7, 0), (4343, MIB, 9, 1)]
    assert found("instance(0, 1)") == [(4343, MIB, 9, 1)]


# ---- events


def registered(nvml: Caller, *devices: int) -> None:
    nvml("events = n.nvmlEventSetCreate()")
    for device in devices:
        nvml(f"n.nvmlDeviceRegisterEvents(gpu({device}), n.nvmlEventTypeXidCriticalError, events)")
    nvml(
        "wait = lambda ms=0: (lambda e: [n.nvmlDeviceGetIndex(e.device), e.eventType, e.eventData])"
        "(n.nvmlEventSetWait_v2(events, ms))"
    )


def test_an_event_is_told_once_to_each_set_that_waits_for_it(gpus: StandIn, call: Call) -> None:
    gpus.event(0, 13)  # before anybody asked
    nvml, other = call(gpus), call(gpus)
    for caller in (nvml, other):
        registered(caller, 0)
        assert caller.error("wait()") == 10
    gpus.event(0, 79)
    gpus.event(1, 31)  # of a GPU that they are not registered with
    gpus.event(0, 5, kind=2)  # of a kind that they are not registered for
    gpus.event(0, 48)
    for caller in (nvml, other):
        assert caller("wait()") == [0, 8, 79]
        assert caller("wait()") == [0, 8, 48]
        assert caller.error("wait()") == 10


def test_an_event_ends_the_wait_for_it(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    registered(nvml, 0, 1)
    began = time.monotonic()
    assert nvml.error("wait(200)") == 10
    assert time.monotonic() - began >= 0.2
    gpus.reset_calls()
    nvml.ask("wait(30000)")
    gpus.wait_for_call("nvmlEventSetWait_v2")
    gpus.event(1, 63, instance=(7, 1))
    assert nvml.answer() == [1, 8, 63]
    gpus.event(1, 63, instance=(7, 1))
    event = nvml("n.nvmlEventSetWait_v2(events, 0)")
    assert (event["gpuInstanceId"], event["computeInstanceId"]) == (7, 1)
    gpus.event(1, 63)
    assert nvml("n.nvmlEventSetWait_v2(events, 0)")["gpuInstanceId"] == ALL_LINKS
    assert nvml("n.nvmlEventSetFree(events)") is None


def test_events_that_a_gpu_has_not_got_are_refused(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    nvml("events = n.nvmlEventSetCreate()")
    assert nvml.error("n.nvmlDeviceRegisterEvents(gpu(0), 1 << 40, events)") == 3
    gpus.set(0, event_types=None)
    assert nvml.error("n.nvmlDeviceGetSupportedEventTypes(gpu(0))") == 3


def test_a_lost_gpu_ends_the_wait_for_all(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    registered(nvml, 0, 1)
    gpus.fail("*", 15, device=1)
    gpus.event(0, 79)
    assert nvml("wait()") == [0, 8, 79]
    assert nvml.error("wait(30000)") == 15


# ---- GPM

_GPM = """
def profile(take, *metrics):
    before, after = n.nvmlGpmSampleAlloc(), n.nvmlGpmSampleAlloc()
    take(before)
    take(after)
    question = n.c_nvmlGpmMetricsGet_t(1, len(metrics), before, after)
    for place, metric in enumerate(metrics):
        question.metrics[place].metricId = metric
    n.nvmlGpmMetricsGet(question)
    found = [[m.nvmlReturn, m.value] for m in question.metrics[:len(metrics)]]
    n.nvmlGpmSampleFree(before)
    n.nvmlGpmSampleFree(after)
    return found
"""


def test_gpm_gives_metrics_between_two_samples(gpus: StandIn, call: Call) -> None:
    gpus.mig(1, [{"gpu_instance": 9}])
    gpus.gpm(0, {2: 55.5, 5: Fault(3), 10: float("nan")})
    gpus.gpm((1, 0), {2: 11.5})
    nvml = call(gpus)
    nvml(_GPM)
    found = nvml("profile(lambda sample: n.nvmlGpmSampleGet(gpu(0), sample), 2, 5, 10, 12)")
    assert str(found) == "[[0, 55.5], [3, 0.0], [0, nan], [3, 0.0]]"
    assert nvml("profile(lambda sample: n.nvmlGpmMigSampleGet(gpu(1), 9, sample), 2)") == [[0, 11.5]]
    assert nvml.error("profile(lambda sample: n.nvmlGpmMigSampleGet(gpu(1), 1, sample), 2)") == 2
    assert nvml.error("profile(lambda sample: n.nvmlGpmMigSampleGet(gpu(0), 9, sample), 2)") == 2
    gpus.gpm(0, {2: 66})
    assert nvml("profile(lambda sample: n.nvmlGpmSampleGet(gpu(0), sample), 2)") == [[0, 66]]


def test_gpm_refuses_samples_that_do_not_belong_together(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    nvml("a, b, c, none = [n.nvmlGpmSampleAlloc() for _ in range(4)]")
    nvml("[n.nvmlGpmSampleGet(gpu(d), s) for d, s in ((0, a), (0, b), (1, c))] and None")
    question = "n.nvmlGpmMetricsGet(n.c_nvmlGpmMetricsGet_t(1, %s))"
    assert nvml.error(question % "1, a, b") is None
    for wrong in ("1, b, a", "1, a, a", "1, a, c", "1, none, b", "0, a, b", "478, a, b"):
        assert nvml.error(question % wrong) == 2, wrong


def test_a_gpu_without_gpm(gpus: StandIn, call: Call) -> None:
    gpus.set(0, gpm_supported=0)
    nvml = call(gpus)
    assert nvml("n.nvmlGpmQueryDeviceSupport(gpu(0)).isSupportedDevice") == 0
    assert nvml("n.nvmlGpmQueryDeviceSupport(gpu(1)).isSupportedDevice") == 1
    assert nvml.error("n.nvmlGpmSampleGet(gpu(0), n.nvmlGpmSampleAlloc())") == 3
