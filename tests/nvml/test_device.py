from __future__ import annotations

import pytest

from expanse_ebpf.nvml import reasons
from expanse_ebpf.wire.collector_pb2 import GpuSample
from tests.nvml.conftest import Asked, MakeWorker
from tests.stand_ins.nvml import ALL_LINKS, Fault, Value, uuid

ALL_BITS = (1 << 64) - 1
# Everything that NVML tells of a GPU, each figure another number, in NVML's units.
SCRIPT: dict[str, Value] = {
    "name": "NVIDIA H100 80GB HBM3",
    "serial": "1652923000001",
    "minor": 5,
    "pci_bus_id": "00000000:9B:00.0",
    "persistence": 1,
    "mig_mode": 0,
    "utilization": 71,
    "memory_utilization": 42,
    "memory_total": 1000,
    "memory_reserved": 100,
    "memory_used": 700,
    "memory_free": 200,
    "power_mw": 612_345,
    "power_limit_mw": 700_000,
    "energy_mj": 123_456_789_012_345,
    "temperature_c": 66,
    "memory_temperature_c": 78,
    "clock_sm": 1755,
    "clock_memory": 2619,
    "clock_max_sm": 1980,
    "clock_max_memory": 2620,
    "throttle_reasons": 4,
    "violation_power": 11,
    "violation_thermal": 12,
    "violation_sync_boost": 13,
    "violation_board_limit": 14,
    "violation_reliability": 15,
    "pcie_tx_bytes": 21,
    "pcie_rx_bytes": 22,
    "pcie_replays": 23,
    "pcie_generation": 5,
    "pcie_width": 16,
    "nvlinks": 18,
    "nvlink_tx_kib": 31,
    "nvlink_rx_kib": 32,
    "ecc_mode": 1,
    "ecc_corrected": 41,
    "ecc_uncorrected": 42,
    "ecc_corrected_lifetime": 43,
    "ecc_uncorrected_lifetime": 44,
    "remapped_corrected": 51,
    "remapped_uncorrected": 52,
    "remapping_pending": 1,
    "remapping_failed": 0,
}
SAMPLE = GpuSample(
    uuid=uuid(0),
    name="NVIDIA H100 80GB HBM3",
    index=0,
    minor=5,
    pci_bus_id="00000000:9B:00.0",
    serial="1652923000001",
    mig_enabled=False,
    persistence=True,
    state="ok",
    busy_ns=0,
    measured_ns=0,
    utilization=0.71,
    memory_utilization=0.42,
    memory_used_bytes=700,
    memory_free_bytes=200,
    memory_reserved_bytes=100,
    memory_total_bytes=1000,
    power_mw=612_345,
    power_limit_mw=700_000,
    energy_mj=123_456_789_012_345,
    temperature_c=66,
    memory_temperature_c=78,
    sm_clock_mhz=1755,
    memory_clock_mhz=2619,
    sm_clock_max_mhz=1980,
    memory_clock_max_mhz=2620,
    throttle_reasons=4,
    throttled_ns={"power": 11, "thermal": 12, "sync_boost": 13, "board_limit": 14, "reliability": 15},
    pcie_sent_bytes=21,
    pcie_received_bytes=22,
    pcie_replays=23,
    pcie_generation=5,
    pcie_width=16,
    nvlinks=18,
    nvlink_sent_bytes=31 * 1024,
    nvlink_received_bytes=32 * 1024,
    ecc_corrected=41,
    ecc_uncorrected=42,
    ecc_corrected_lifetime=43,
    ecc_uncorrected_lifetime=44,
    ecc_enabled=True,
    remapped_rows_corrected=51,
    remapped_rows_uncorrected=52,
    remapping_pending=True,
    remapping_failed=False,
)

# What breaks for a figure to be missing: functions, and fields by (id, scope).
Broken = tuple[tuple[str, ...], tuple[tuple[int, int], ...], tuple[str, ...]]
REMAPPED = "nvmlDeviceGetRemappedRows"
ECC = "nvmlDeviceGetTotalEccErrors"
ONE_AT_A_TIME: dict[str, Broken] = {
    "utilization": (("nvmlDeviceGetUtilizationRates",), (), ("utilization", "memory_utilization")),
    "memory": (
        ("nvmlDeviceGetMemoryInfo",),
        (),
        ("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes", "memory_total_bytes"),
    ),
    "power": (("nvmlDeviceGetPowerUsage",), ((186, 0),), ("power_mw",)),
    "power limit": (("nvmlDeviceGetEnforcedPowerLimit",), (), ("power_limit_mw",)),
    "energy": (("nvmlDeviceGetTotalEnergyConsumption",), ((83, 0),), ("energy_mj",)),
    "temperature": (("nvmlDeviceGetTemperature",), (), ("temperature_c",)),
    "memory temperature": ((), ((82, 0),), ("memory_temperature_c",)),
    "clocks": (("nvmlDeviceGetClockInfo",), (), ("sm_clock_mhz", "memory_clock_mhz")),
    "greatest clocks": (("nvmlDeviceGetMaxClockInfo",), (), ("sm_clock_max_mhz", "memory_clock_max_mhz")),
    "throttle reasons": (("nvmlDeviceGetCurrentClocksThrottleReasons",), (), ("throttle_reasons",)),
    "throttled by power": ((), ((74, 0),), ("throttled_ns.power",)),
    "throttled by heat": ((), ((75, 0),), ("throttled_ns.thermal",)),
    "throttled by sync boost": ((), ((76, 0),), ("throttled_ns.sync_boost",)),
    "throttled by the board": ((), ((77, 0),), ("throttled_ns.board_limit",)),
    "throttled for reliability": ((), ((79, 0),), ("throttled_ns.reliability",)),
    "PCIe sent": ((), ((197, 0),), ("pcie_sent_bytes",)),
    "PCIe received": ((), ((198, 0),), ("pcie_received_bytes",)),
    "PCIe replays": (("nvmlDeviceGetPcieReplayCounter",), ((94, 0),), ("pcie_replays",)),
    "PCIe generation": (("nvmlDeviceGetCurrPcieLinkGeneration",), (), ("pcie_generation",)),
    "PCIe width": (("nvmlDeviceGetCurrPcieLinkWidth",), (), ("pcie_width",)),
    "NVLinks": ((), ((91, 0),), ("nvlinks",)),
    "NVLink sent": ((), ((138, ALL_LINKS),), ("nvlink_sent_bytes",)),
    "NVLink received": ((), ((139, ALL_LINKS),), ("nvlink_received_bytes",)),
    "ECC mode": ((), ((1, 0),), ("ecc_enabled",)),
    "ECC corrected": ((ECC,), ((3, 0),), ("ecc_corrected",)),
    "ECC uncorrected": ((ECC,), ((4, 0),), ("ecc_uncorrected",)),
    "ECC corrected, lifetime": ((ECC,), ((5, 0),), ("ecc_corrected_lifetime",)),
    "ECC uncorrected, lifetime": ((ECC,), ((6, 0),), ("ecc_uncorrected_lifetime",)),
    "remapped, corrected": ((REMAPPED,), ((142, 0),), ("remapped_rows_corrected",)),
    "remapped, uncorrected": ((REMAPPED,), ((143, 0),), ("remapped_rows_uncorrected",)),
    "remapping pending": ((REMAPPED,), ((144, 0),), ("remapping_pending",)),
    "remapping failed": ((REMAPPED,), ((145, 0),), ("remapping_failed",)),
    "name": (("nvmlDeviceGetName",), (), ("name",)),
    "serial": (("nvmlDeviceGetSerial",), (), ("serial",)),
    "minor": (("nvmlDeviceGetMinorNumber",), (), ("minor",)),
    "index": (("nvmlDeviceGetIndex",), (), ("index",)),
    "PCI address": (("nvmlDeviceGetPciInfo",), (), ("pci_bus_id",)),
    "persistence": (("nvmlDeviceGetPersistenceMode",), (), ("persistence",)),
    "MIG mode": (("nvmlDeviceGetMigMode",), (), ("mig_enabled",)),
    "busy time": (("nvmlDeviceGetSamples",), (), ("busy_ns", "measured_ns")),
    "processes": (("nvmlDeviceGetComputeRunningProcesses",), (), ("processes",)),
}


@pytest.fixture(scope="module")
def asked(make_worker: MakeWorker) -> Asked:
    return make_worker()


@pytest.fixture
def worker(asked: Asked) -> Asked:
    """One whose only GPU is as SCRIPT says."""
    gpus = asked.gpus
    gpus.heal()
    gpus.release()
    with gpus.batch():
        for subject, name in list(gpus._statements):
            if name.startswith("field."):
                gpus.say(subject, name, None)
        gpus.set(0, **SCRIPT)
    return asked


def figures(sample: GpuSample) -> GpuSample:
    found = GpuSample()
    found.CopyFrom(sample)
    found.time_ns = 0
    return found


def without(*names: str) -> GpuSample:
    sample = figures(SAMPLE)
    for name in names:
        group, _, cause = name.partition(".")
        if cause:
            del sample.throttled_ns[cause]
        else:
            sample.ClearField(group)  # type: ignore[arg-type]
    return sample


def test_every_figure_is_what_nvml_says_in_the_unit_of_the_model(worker: Asked) -> None:
    assert figures(worker.ask().gpu()) == SAMPLE


def test_no_figure_was_forgotten_in_these_tests() -> None:
    told = {name.partition(".")[0] for _, _, names in ONE_AT_A_TIME.values() for name in names}
    there = {field.name for field, _ in SAMPLE.ListFields()} | {"processes"}
    assert told == there - {"uuid", "state"}


@pytest.mark.parametrize("code", [3, 4, 13, 999])
@pytest.mark.parametrize("broken", ONE_AT_A_TIME.values(), ids=ONE_AT_A_TIME)
def test_what_nvml_does_not_tell_is_missing_with_the_reason_and_nothing_else_is(
    worker: Asked, broken: Broken, code: int
) -> None:
    functions, fields, names = broken
    with worker.gpus.batch():
        for function in functions:
            worker.gpus.fail(function, code, 0)
        for number, scope in fields:
            worker.gpus.field(0, number, Fault(code), scope)
    sample = figures(worker.ask().gpu())
    why = {name: reasons.sentence(code) for name in names if name != "measured_ns"}
    if names == ("mig_enabled",) or names == ("processes",):
        assert set(why) <= set(sample.unavailable)
    assert dict(sample.unavailable) == why
    sample.ClearField("unavailable")
    assert sample == without(*names)


@pytest.mark.parametrize("code", [2, 3, 999])
@pytest.mark.parametrize(
    "numbers",
    [(186,), (83,), (94,), (142, 143, 144, 145), (3, 4, 5, 6)],
    ids=["power", "energy", "replays", "remapped", "ecc"],
)
def test_what_an_older_driver_has_no_field_for_is_asked_by_its_own_function(
    worker: Asked, numbers: tuple[int, ...], code: int
) -> None:
    with worker.gpus.batch():
        for number in numbers:
            worker.gpus.field(0, number, Fault(code))
    assert figures(worker.ask().gpu()) == SAMPLE


def test_what_is_reserved_is_missing_alone_where_only_the_old_form_of_the_question_is_known(
    worker: Asked,
) -> None:
    worker.gpus.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    sample = worker.ask().gpu()
    # There, what is reserved counts as used.
    assert (sample.memory_total_bytes, sample.memory_used_bytes, sample.memory_free_bytes) == (1000, 800, 200)
    assert not sample.HasField("memory_reserved_bytes")
    assert set(sample.unavailable) == {"memory_reserved_bytes"}


def test_a_library_of_an_old_driver_gives_what_it_has(make_worker: MakeWorker) -> None:
    worker = make_worker(variant="old")
    worker.gpus.set(0, **SCRIPT)
    worker.gpus.processes(0, [(1, 1 << 30)])
    found = worker.ask()
    sample = found.gpu()
    assert sample.power_mw == 612_345
    assert [(p.pid, p.memory_bytes) for p in sample.processes] == [(1, 1 << 30)]
    assert set(sample.unavailable) == {"mig_enabled", "memory_reserved_bytes"}
    worker.gpus.event(0, 79)
    assert [event.xid for event in worker.ask().events] == [79]


def test_a_figure_that_was_not_supported_comes_when_it_is(worker: Asked) -> None:
    worker.gpus.set(0, temperature_c=None)
    assert not worker.ask().gpu().HasField("temperature_c")
    worker.gpus.set(0, temperature_c=50)
    assert worker.ask().gpu().temperature_c == 50


ABSURD: dict[str, tuple[dict[str, Value], tuple[str, ...]]] = {
    "utilisation": ({"utilization": 4294967295}, ("utilization",)),
    "utilisation of 101 %": ({"utilization": 101}, ("utilization",)),
    "memory utilisation": ({"memory_utilization": 4294967295}, ("memory_utilization",)),
    "more used than there is": ({"memory_used": 1001, "memory_free": 0}, ("memory_used_bytes",)),
    "no memory at all": ({"memory_total": 0, "memory_used": 0}, ("memory_total_bytes",)),
    "power": ({"power_mw": 4294967295}, ("power_mw",)),
    "power limit": ({"power_limit_mw": 0}, ("power_limit_mw",)),
    "energy": ({"energy_mj": ALL_BITS}, ("energy_mj",)),
    "temperature": ({"temperature_c": 4294967295}, ("temperature_c",)),
    "temperature of the sun": ({"temperature_c": 5505}, ("temperature_c",)),
    "memory temperature": ({"memory_temperature_c": 0}, ("memory_temperature_c",)),
    "clock": ({"clock_sm": 4294967295}, ("sm_clock_mhz",)),
    "greatest clock": ({"clock_max_memory": 4294967295}, ("memory_clock_max_mhz",)),
    "throttle reasons": ({"throttle_reasons": ALL_BITS}, ("throttle_reasons",)),
    "throttled": ({"violation_power": ALL_BITS}, ("throttled_ns.power",)),
    "PCIe": ({"pcie_tx_bytes": ALL_BITS}, ("pcie_sent_bytes",)),
    "PCIe generation": ({"pcie_generation": 4294967295}, ("pcie_generation",)),
    "PCIe width": ({"pcie_width": 4294967295}, ("pcie_width",)),
    "NVLinks": ({"nvlinks": 4294967295}, ("nvlinks",)),
    "NVLink": ({"nvlink_tx_kib": ALL_BITS}, ("nvlink_sent_bytes",)),
    "ECC": ({"ecc_corrected": ALL_BITS}, ("ecc_corrected",)),
    "ECC mode": ({"ecc_mode": 4294967295}, ("ecc_enabled",)),
    "remapping": ({"remapping_pending": 4294967295}, ("remapping_pending",)),
    "persistence": ({"persistence": 4294967295}, ("persistence",)),
    "MIG mode": ({"mig_mode": 4294967295}, ("mig_enabled",)),
    "minor": ({"minor": 4294967295}, ("minor",)),
    "not a number": ({"field.82.0": "double nan"}, ("memory_temperature_c",)),
    "infinity": ({"field.197.0": "double inf"}, ("pcie_sent_bytes",)),
    "energy, negative": ({"field.83.0": "sllong -5"}, ("energy_mj",)),
    "replays, negative": ({"field.94.0": "sint -1"}, ("pcie_replays",)),
}


@pytest.mark.parametrize(("script", "names"), ABSURD.values(), ids=ABSURD)
def test_what_cannot_be_true_is_missing_with_that_reason(
    worker: Asked, script: dict[str, Value], names: tuple[str, ...]
) -> None:
    with worker.gpus.batch():
        for name, value in script.items():
            worker.gpus.say("0", name, value)
    sample = worker.ask().gpu()
    assert {name: sample.unavailable.get(name) for name in names} == dict.fromkeys(
        names, reasons.sentence(reasons.ABSURD)
    )
    for name in names:
        group, _, cause = name.partition(".")
        assert cause not in sample.throttled_ns if cause else not sample.HasField(group)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        ("double 612345.0", 612345),
        ("uint 5", 5),
        ("ulong 6", 6),
        ("sllong 7", 7),
        ("sint 8", 8),
        ("ushort 9", 9),
    ],
)
def test_a_field_may_be_of_any_type(worker: Asked, typed: str, value: int) -> None:
    worker.gpus.field(0, 186, typed)
    assert worker.ask().gpu().power_mw == value


def test_a_field_that_is_no_number_is_asked_by_its_own_function(worker: Asked) -> None:
    worker.gpus.field(0, 186, "double nan")
    assert worker.ask().gpu().power_mw == 612_345


def test_names_are_safe_to_show(worker: Asked) -> None:
    worker.gpus.set(0, serial="line\x1b[2J")
    sample = worker.ask().gpu()
    assert sample.serial == "line\u241b[2J"


def test_a_device_of_which_nothing_is_told_is_silent_and_all_is_back_at_once(worker: Asked) -> None:
    worker.gpus.fail("*", 999, 0)
    worker.gpus.fail("nvmlDeviceGetHandleByIndex", 0, 0)
    worker.gpus.fail("nvmlDeviceGetUUID", 0, 0)
    found = worker.ask()
    assert found.line()["failed"] == 999
    assert found.gpu().state == "silent"
    assert dict(found.gpu().unavailable) == {"all": reasons.sentence(999)}
    worker.gpus.heal()
    assert figures(worker.ask().gpu()) == SAMPLE
