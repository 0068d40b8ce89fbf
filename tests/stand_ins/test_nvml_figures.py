"""The stand-in for libnvidia-ml.so.1 tells of GPUs, fields and MIG instances what it was told to."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pynvml

from tests.stand_ins.caller import Call
from tests.stand_ins.h100 import H100, Fault
from tests.stand_ins.nvml import ALL_LINKS, StandIn, mig_uuid, uuid

GIB = 1 << 30

# ---- a whole GPU


def test_a_node_of_idle_gpus(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    assert nvml("n.nvmlDeviceGetCount()") == 2
    assert nvml("n.nvmlSystemGetDriverVersion()") == "535.261.03"
    assert nvml("n.nvmlSystemGetNVMLVersion()") == "12.535.261.03"
    assert nvml("n.nvmlSystemGetCudaDriverVersion()") == 12020
    assert nvml("n.nvmlSystemGetCudaDriverVersion_v2()") == 12020
    assert [nvml(f"n.nvmlDeviceGetUUID(gpu({i}))") for i in range(2)] == [uuid(0), uuid(1)]
    assert [nvml(f"n.nvmlDeviceGetMinorNumber(gpu({i}))") for i in range(2)] == [3, 2]
    assert [nvml(f"n.nvmlDeviceGetIndex(gpu({i}))") for i in range(2)] == [0, 1]
    assert nvml(f"n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(b'{uuid(1)}'))") == 1
    assert nvml("n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(b'00000000:20:00.0'))") == 1
    assert nvml("n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByPciBusId(b'0000:20:00.0'))") == 1
    assert nvml("n.nvmlDeviceGetMemoryInfo(gpu(0)).total") == 85_520_809_984
    assert nvml("n.nvmlDeviceGetComputeRunningProcesses(gpu(0))") == []
    assert nvml.error("gpu(2)") == 2
    assert nvml.error(f"n.nvmlDeviceGetHandleByUUID(b'{uuid(2)}')") == 6
    assert nvml.error("n.nvmlDeviceGetHandleByPciBusId(b'0000:99:00.0')") == 6
    assert nvml("n.nvmlShutdown()") is None
    assert nvml.error("n.nvmlDeviceGetCount()") == 1


FIGURES: list[tuple[dict[str, Any], str, Any]] = [
    ({"name": "NVIDIA A100"}, "n.nvmlDeviceGetName(g)", "NVIDIA A100"),
    ({"serial": "42"}, "n.nvmlDeviceGetSerial(g)", "42"),
    ({"persistence": 0}, "n.nvmlDeviceGetPersistenceMode(g)", 0),
    (
        {"utilization": 71, "memory_utilization": 23},
        "n.nvmlDeviceGetUtilizationRates(g)",
        {"gpu": 71, "memory": 23},
    ),
    ({"power_mw": 345678}, "n.nvmlDeviceGetPowerUsage(g)", 345678),
    ({"power_limit_mw": 650000}, "n.nvmlDeviceGetEnforcedPowerLimit(g)", 650000),
    ({"power_limit_mw": 650000}, "n.nvmlDeviceGetPowerManagementLimit(g)", 650000),
    ({"energy_mj": 1 << 40}, "n.nvmlDeviceGetTotalEnergyConsumption(g)", 1 << 40),
    ({"temperature_c": 81}, "n.nvmlDeviceGetTemperature(g, 0)", 81),
    ({"temperature_c": -4}, "n.nvmlDeviceGetTemperatureV(g, 0)", -4),
    ({"clock_sm": 1755}, "n.nvmlDeviceGetClockInfo(g, n.NVML_CLOCK_SM)", 1755),
    ({"clock_memory": 2600}, "n.nvmlDeviceGetClockInfo(g, n.NVML_CLOCK_MEM)", 2600),
    ({"clock_max_sm": 1900}, "n.nvmlDeviceGetMaxClockInfo(g, n.NVML_CLOCK_SM)", 1900),
    ({"clock_max_video": 1500}, "n.nvmlDeviceGetMaxClockInfo(g, n.NVML_CLOCK_VIDEO)", 1500),
    ({"throttle_reasons": 0x44}, "n.nvmlDeviceGetCurrentClocksThrottleReasons(g)", 0x44),
    ({"throttle_reasons": 0x44}, "n.nvmlDeviceGetCurrentClocksEventReasons(g)", 0x44),
    ({"pcie_tx_kbps": 7}, "n.nvmlDeviceGetPcieThroughput(g, n.NVML_PCIE_UTIL_TX_BYTES)", 7),
    ({"pcie_rx_kbps": 8}, "n.nvmlDeviceGetPcieThroughput(g, n.NVML_PCIE_UTIL_RX_BYTES)", 8),
    ({"pcie_generation": 4}, "n.nvmlDeviceGetCurrPcieLinkGeneration(g)", 4),
    ({"pcie_width": 8}, "n.nvmlDeviceGetCurrPcieLinkWidth(g)", 8),
    ({"pcie_replays": 5}, "n.nvmlDeviceGetPcieReplayCounter(g)", 5),
    ({"nvlinks": 4, "nvlinks_down": 4}, "[n.nvmlDeviceGetNvLinkState(g, i) for i in range(4)]", [1, 1, 0, 1]),
    ({"ecc_mode": 0, "ecc_mode_pending": 1}, "n.nvmlDeviceGetEccMode(g)", [0, 1]),
    ({"ecc_corrected": 11}, "n.nvmlDeviceGetTotalEccErrors(g, 0, 0)", 11),
    ({"ecc_uncorrected": 12}, "n.nvmlDeviceGetTotalEccErrors(g, 1, 0)", 12),
    ({"ecc_corrected_lifetime": 13}, "n.nvmlDeviceGetTotalEccErrors(g, 0, 1)", 13),
    ({"ecc_uncorrected_lifetime": 14}, "n.nvmlDeviceGetTotalEccErrors(g, 1, 1)", 14),
    ({"remapped_corrected": 1, "remapped_uncorrected": 2}, "n.nvmlDeviceGetRemappedRows(g)", [1, 2, 0, 0]),
    ({"remapping_pending": 1, "remapping_failed": 1}, "n.nvmlDeviceGetRemappedRows(g)", [0, 0, 1, 1]),
    (
        {"violation_thermal": 99},
        "n.nvmlDeviceGetViolationStatus(g, n.NVML_PERF_POLICY_THERMAL).violationTime",
        99,
    ),
    ({"violation_base_clocks": 98}, "n.nvmlDeviceGetViolationStatus(g, 11).violationTime", 98),
    ({"mig_mode": 0, "mig_mode_pending": 1}, "n.nvmlDeviceGetMigMode(g)", [0, 1]),
    ({}, "n.nvmlDeviceGetMaxMigDeviceCount(g)", 0),
    ({}, "n.nvmlDeviceIsMigDeviceHandle(g)", 0),
    ({"event_types": 9}, "n.nvmlDeviceGetSupportedEventTypes(g)", 9),
    ({"gpm_supported": 0}, "n.nvmlGpmQueryDeviceSupport(g).isSupportedDevice", 0),
    (
        {"memory_total": 80 * GIB, "memory_used": 3 * GIB, "memory_reserved": GIB},
        "n.nvmlDeviceGetMemoryInfo(g)",
        {"total": 80 * GIB, "free": 76 * GIB, "used": 4 * GIB},
    ),
    (
        {"memory_total": 80 * GIB, "memory_used": 3 * GIB, "memory_reserved": GIB, "memory_free": 5},
        "n.nvmlDeviceGetMemoryInfo(g, n.nvmlMemory_v2)",
        {"version": 0x02000028, "total": 80 * GIB, "reserved": GIB, "free": 5, "used": 3 * GIB},
    ),
    (
        {"pci_bus_id": "00010000:C1:00.0", "pci_device_id": 0x233010DE, "pci_subsystem_id": 7},
        "n.nvmlDeviceGetPciInfo(g)",
        {
            "busIdLegacy": "0000:C1:00.0",
            "domain": 0x10000,
            "bus": 0xC1,
            "device": 0,
            "pciDeviceId": 0x233010DE,
            "pciSubSystemId": 7,
            "busId": "00010000:C1:00.0",
        },
    ),
]


def test_attributes_are_what_was_said_of_that_gpu_alone(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    for attributes, question, expected in FIGURES:
        before = nvml(f"(lambda g: {question})(gpu(1))")
        gpus.set(0, **attributes)
        assert nvml(f"(lambda g: {question})(gpu(0))") == expected, question
        assert nvml(f"(lambda g: {question})(gpu(1))") == before, question
        gpus.set(0, **{name: H100.get(name) for name in attributes})


def test_what_is_not_said_is_not_supported(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    for attributes, question, _ in FIGURES:
        name = next(iter(attributes), "")
        if name and not name.startswith(("remapping", "gpm")):  # those say less than their function asks
            gpus.set(0, **{name: None})
            assert nvml.error(f"(lambda g: {question})(gpu(0))") == 3, question
            gpus.set(0, **{name: Fault(999)})
            assert nvml.error(f"(lambda g: {question})(gpu(0))") == 999, question
            gpus.set(0, **{name: H100.get(name)})


def test_arguments_are_checked(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    for question in (
        "n.nvmlDeviceGetName(n.c_nvmlDevice_t())",
        "n.nvmlDeviceGetName(ctypes.cast(ctypes.create_string_buffer(8), n.c_nvmlDevice_t))",
        "n.nvmlDeviceGetClockInfo(gpu(0), 9)",
        "n.nvmlDeviceGetTemperature(gpu(0), 1)",
        "n.nvmlDeviceGetPcieThroughput(gpu(0), 2)",
        "n.nvmlDeviceGetTotalEccErrors(gpu(0), 2, 0)",
        "n.nvmlDeviceGetViolationStatus(gpu(0), 7)",
        "n.nvmlDeviceGetNvLinkState(gpu(0), 18)",
        "n.nvmlDeviceGetFieldValues(gpu(0), [])",
        "n.nvmlDeviceGetGpuInstanceId(gpu(0))",
    ):
        assert nvml.error(question) == 2, question
    assert nvml("library.nvmlDeviceGetName(gpu(0), ctypes.create_string_buffer(4), 4)") == 7


def test_the_version_of_a_structure_is_looked_at(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    assert nvml.error("n.nvmlDeviceGetMemoryInfo(gpu(0), n.nvmlMemory_v2 + 1)") == 25
    assert (
        nvml("library.nvmlDeviceGetTemperatureV(gpu(0), ctypes.byref(n.c_nvmlTemperature_v1_t(1, 0, 0)))")
        == 25
    )
    assert nvml("library.nvmlGpmQueryDeviceSupport(gpu(0), ctypes.byref(n.c_nvmlGpmSupport_t(2, 0)))") == 25
    assert nvml("library.nvmlGpmMetricsGet(ctypes.byref(n.c_nvmlGpmMetricsGet_t(2)))") == 25


# ---- fields


FIELDS = (
    "[[f.fieldId, f.nvmlReturn, f.valueType, plain(f.value)] for f in n.nvmlDeviceGetFieldValues(gpu(0), %s)]"
)


def test_fields_say_what_the_attributes_say(gpus: StandIn, call: Call) -> None:
    gpus.set(0, energy_mj=1 << 40, memory_temperature_c=77, nvlink_tx_kib=1800, power_mw=None)
    nvml = call(gpus)
    assert nvml(FIELDS % f"[83, 82, (138, {ALL_LINKS}), (138, 17), (138, 18), 186, 9999]") == [
        [83, 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 1 << 40],
        [82, 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 77],
        [138, 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 1800],
        [138, 0, pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 100],
        [138, 2, 0, 0],
        [186, 3, 0, 0],
        [9999, 3, 0, 0],
    ]
    now = time.time() * 1e6
    assert abs(nvml("n.nvmlDeviceGetFieldValues(gpu(0), [83])[0].timestamp") - now) < 5e6


def test_every_named_field_has_its_attribute(gpus: StandIn, call: Call) -> None:
    source = (Path(__file__).parent / "nvml_figures.c").read_text()
    named = {int(number): key for number, key in re.findall(r"\{(\d+), TYPE_\w+, \"(\w+)\"\}", source)}
    assert len(named) > 25
    gpus.set(
        0, nvlinks=18, **{key: 100 + number for number, key in named.items() if number not in (1, 2, 91)}
    )
    answers = call(gpus)(FIELDS % [(number, ALL_LINKS) for number in named])
    others = {1: 1, 2: 1, 91: 18}
    assert {answer[0]: answer[3] for answer in answers} == {n: others.get(n, 100 + n) for n in named}


def test_a_field_may_have_any_type_or_fail_alone(gpus: StandIn, call: Call) -> None:
    with gpus.batch():
        gpus.field(0, 83, Fault(999))
        gpus.field(0, 200, 7)
        gpus.field(0, 201, "uint 8", scope=3)
        gpus.field(0, 202, "sllong -9")
        gpus.field(0, 203, "double 1.5")
    nvml = call(gpus)
    answers = nvml(FIELDS % "[83, 200, 201, (201, 3), 202]")
    assert [answer[1:] for answer in answers] == [
        [999, 0, 0],
        [0, 3, 7],
        [3, 0, 0],
        [0, 1, 8],
        [0, 4, 2**64 - 9],
    ]
    assert nvml("n.nvmlDeviceGetFieldValues(gpu(0), [203])[0].value.dVal") == 1.5
    assert nvml("n.nvmlDeviceGetFieldValues(gpu(0), [203])[0].valueType") == 0
    gpus.field(0, 83, None)
    assert nvml(FIELDS % "[83]")[0][1] == 0


# ---- MIG


def test_a_gpu_is_cut_into_instances(gpus: StandIn, call: Call) -> None:
    gpus.mig(1, [{}, None, {"gpu_instance": 2, "compute_instance": 1, "memory_used": GIB, "gpu_slices": 3}])
    nvml = call(gpus)
    assert nvml("n.nvmlDeviceGetMigMode(gpu(1))") == [1, 1]
    assert nvml("n.nvmlDeviceGetMaxMigDeviceCount(gpu(1))") == 7
    assert [nvml.error(f"instance(1, {place})") for place in range(8)] == [None, 6, None, 6, 6, 6, 6, 2]
    assert nvml("n.nvmlDeviceGetUUID(instance(1, 0))") == mig_uuid(1, 0)
    assert nvml("n.nvmlDeviceGetName(instance(1, 0))") == "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert nvml("n.nvmlDeviceGetIndex(instance(1, 2))") == 2
    assert nvml("n.nvmlDeviceGetGpuInstanceId(instance(1, 2))") == 2
    assert nvml("n.nvmlDeviceGetComputeInstanceId(instance(1, 2))") == 1
    assert nvml("n.nvmlDeviceGetAttributes(instance(1, 2)).gpuInstanceSliceCount") == 3
    assert nvml("n.nvmlDeviceGetAttributes(instance(1, 2)).memorySizeMB") == 9984
    assert nvml("n.nvmlDeviceGetMemoryInfo(instance(1, 2)).used") == GIB
    assert nvml("n.nvmlDeviceIsMigDeviceHandle(instance(1, 0))") == 1
    parent = "n.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance(1, 0))"
    assert nvml(f"n.nvmlDeviceGetUUID({parent})") == uuid(1)
    assert nvml(f"n.nvmlDeviceGetIndex(n.nvmlDeviceGetHandleByUUID(b'{mig_uuid(1, 2)}'))") == 2
    assert nvml.error("n.nvmlDeviceGetAttributes(gpu(1))") == 3
    gpus.set(1, mig_mode=0)
    assert nvml.error(f"n.nvmlDeviceGetHandleByUUID(b'{mig_uuid(1, 2)}')") == 6
    assert nvml.error("instance(1, 0)") == 3
    assert nvml.error("instance(0, 0)") == 3


def test_an_instance_has_nothing_of_the_whole_gpu(gpus: StandIn, call: Call) -> None:
    gpus.mig(0, [{}])
    nvml = call(gpus)
    whole = ("PowerUsage", "TotalEnergyConsumption", "UtilizationRates", "MinorNumber", "MigMode", "EccMode")
    for name in whole:
        assert nvml.error(f"n.nvmlDeviceGet{name}(instance(0, 0))") == 3, name
    assert nvml.error("n.nvmlDeviceGetSamples(instance(0, 0), 1, 0)") == 3
    assert nvml(FIELDS.replace("gpu(0)", "instance(0, 0)") % "[83]") == [[83, 3, 0, 0]]


def test_what_nvml_refuses_for_a_gpu_in_mig_mode(gpus: StandIn, call: Call) -> None:
    gpus.samples(0, [(100, 50)])
    gpus.process_samples(0, [(100, 4242, 50, 5)])
    nvml = call(gpus)
    questions = (
        "n.nvmlDeviceGetUtilizationRates(gpu(0))",
        "n.nvmlDeviceGetSamples(gpu(0), 1, 0)",
        "n.nvmlDeviceGetProcessUtilization(gpu(0), 0)",
        "n.nvmlDeviceGetRemappedRows(gpu(0))",
    )
    assert [nvml.error(question) for question in questions] == [None] * 4
    gpus.mig(0, [{}])
    assert [nvml.error(question) for question in questions] == [3] * 4
    assert nvml("n.nvmlDeviceGetPowerUsage(gpu(0))") == 70_000
    gpus.mig(0, [])
    assert [nvml.error(question) for question in questions] == [None] * 4
    assert nvml.error(f"n.nvmlDeviceGetHandleByUUID(b'{mig_uuid(0, 0)}')") == 6
