from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.decode import busy_by_pid, error_code, number
from expanse_ebpf.nvml.devices import Devices
from expanse_ebpf.nvml.names import identifier
from expanse_ebpf.wire.collector_pb2 import GpuSample, NvmlStatus, Report

NAMES = [field.name for field in GpuSample.DESCRIPTOR.fields]
WORDS = st.sampled_from(
    [
        *NAMES,
        *(
            "throttled_ns.power",
            "throttled_ns.",
            "profile.sm_active_ns",
            "sm_active_ns",
            "measured_ns",
            "source",
        ),
        *(
            "values",
            "missing",
            "added",
            "stamp",
            "rejected",
            "by_process",
            "instances",
            "lost",
            "failed",
            "gpm",
        ),
        *(
            "device",
            "event",
            "nvml",
            "end",
            "xid",
            "pid",
            "kind",
            "compute",
            "order",
            "absent",
            "code",
            "cpu_ns",
        ),
        *(
            "GPU-1",
            "GPU-2",
            "MIG-1",
            "index 1",
            "1",
            "4242",
            "time_ns",
            "driver_version",
            "pss_bytes",
            "\ud800",
            "",
        ),
    ]
)
NUMBERS = st.one_of(
    st.integers(-5, 20),
    st.sampled_from(
        [1 << 31, (1 << 32) - 1, 1 << 53, (1 << 63) - 1, (1 << 64) - 1, 1 << 64, -(1 << 63), 10**400]
    ),
    st.floats(),
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | NUMBERS | WORDS | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(WORDS | st.text(max_size=5), inner, max_size=6)
    ),
    max_leaves=25,
)


def of(known: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with some of these keys, mostly as they are meant to be."""
    return st.fixed_dictionaries({}, optional={key: meant | ANYTHING for key, meant in known.items()})


UUIDS = st.sampled_from(["GPU-1", "GPU-2", "MIG-1", "MIG-2"])
FIGURES = st.dictionaries(WORDS, NUMBERS | st.booleans() | ANYTHING, max_size=12)
CODES = st.dictionaries(WORDS, st.sampled_from([3, 15, 999]) | ANYTHING, max_size=5)
PROCESS = of(
    {
        "pid": NUMBERS,
        "memory_bytes": NUMBERS,
        "kind": st.sampled_from(["compute", "mps"]),
        "gpu_instance": st.integers(0, 2),
        "compute_instance": st.integers(0, 1),
    }
)
PROFILE = of({"source": st.sampled_from(["gpm", "nvml"]), "added": FIGURES, "missing": CODES})
INSTANCE = of(
    {
        "uuid": UUIDS,
        "gpu_instance": st.integers(0, 2),
        "compute_instance": st.integers(0, 1),
        "name": st.text(max_size=5),
        "values": FIGURES,
        "missing": CODES,
        "profile": PROFILE,
    }
)
DEVICE = of(
    {
        "uuid": UUIDS,
        "time_ns": NUMBERS,
        "lost": st.just(15),
        "failed": st.just(999),
        "values": FIGURES,
        "missing": CODES,
        "added": st.fixed_dictionaries({"busy_ns": NUMBERS, "measured_ns": NUMBERS}),
        "stamp": NUMBERS,
        "processes": st.lists(PROCESS, max_size=4),
        "rejected": NUMBERS,
        "by_process": st.dictionaries(st.sampled_from(["1", "4242", "x", "²"]), NUMBERS),
        "profile": PROFILE,
        "instances": st.lists(INSTANCE, max_size=3),
    }
)
EVENT = of({"uuid": UUIDS, "xid": NUMBERS})
NVML = of(
    {
        "order": st.lists(UUIDS, max_size=4),
        "absent": st.dictionaries(st.just("index 1"), NUMBERS),
        "code": NUMBERS,
        "driver_version": st.text(max_size=5),
    }
)
LINE = st.one_of(
    of({"nvml": NVML}),
    of({"device": DEVICE}),
    of({"event": EVENT}),
    of({"end": NUMBERS, "cpu_ns": NUMBERS, "pss_bytes": NUMBERS}),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(LINE, max_size=6), max_size=4), st.data())
def test_whatever_a_worker_says_makes_a_report_that_can_be_sent(
    ticks: list[list[dict[str, Any]]], data: st.DataObject
) -> None:
    one = Client(GpuConfig(library="/nonexistent"), 0.1)
    devices = Devices()
    for number_of_tick, lines in enumerate(ticks):
        for line in lines:
            # Some get past the client, as they would had it asked for them.
            for taken in one._take(float(number_of_tick), line):
                devices.take(taken, 1)
            if data.draw(st.booleans()):
                devices.take(line, 1)
        samples, events = devices.report(one.status, one.listed, one.absent, 1)
        devices.end_tick()
        report = Report(nvml=one.status, gpus=samples, gpu_events=events)
        assert Report.FromString(report.SerializeToString()) == report
        for sample in samples:
            _check(sample)


def _check(sample: GpuSample) -> None:
    assert sample.uuid
    assert sample.state in ("ok", "lost", "silent")
    assert sample.busy_ns <= sample.measured_ns
    assert 0 <= sample.utilization <= 1
    if sample.HasField("memory_total_bytes"):
        assert sample.memory_used_bytes <= sample.memory_total_bytes
    for process in sample.processes:
        assert 0 < process.pid <= 1 << 22
        assert process.kind in ("compute", "graphics", "mps")
    if sample.state != "ok":
        assert set(sample.unavailable) == {"all"}
        assert not sample.HasField("power_mw")
    for name in sample.unavailable:
        group = name.partition(".")[0]
        assert group in {*NAMES, "all", "by_process", "instances"}


def sample_of(device: dict[str, Any]) -> GpuSample:
    devices = Devices()
    devices.take({"device": {"uuid": "GPU-1", **device}}, 1)
    (sample,), _ = devices.report(NvmlStatus(), frozenset(["GPU-1"]), {}, 1)
    return sample


@pytest.mark.parametrize(
    "value", [-1, 1 << 64, 1.5, "5", True, None, [5], {"a": 5}, float("nan"), float("inf"), 10**400]
)
def test_what_is_no_number_of_its_kind_is_no_figure(value: Any) -> None:
    sample = sample_of({"values": {"power_mw": value, "energy_mj": 7}})
    assert not sample.HasField("power_mw")
    assert dict(sample.unavailable) == {"power_mw": reasons.sentence(reasons.ABSURD)}
    assert sample.energy_mj == 7


def test_figures_that_the_model_has_not_are_left_out() -> None:
    sample = sample_of({"values": {"uuid": "GPU-2", "state": "lost", "processes": 3, "surprise": 1}})
    assert sample == GpuSample(uuid="GPU-1", state="ok")


def test_reasons_for_what_the_model_has_not_are_left_out() -> None:
    sample = sample_of({"values": {}, "missing": {"surprise": 3, "\ud800": 3, "power_mw": 4, "profile": 21}})
    assert dict(sample.unavailable) == {"power_mw": reasons.sentence(4), "profile": reasons.sentence(21)}


@pytest.mark.parametrize(
    "process",
    [
        {"pid": 1},
        {"kind": "compute"},
        *({"pid": pid, "kind": "compute"} for pid in (0, -1, 1.5, True, "1", (1 << 22) + 1, None, [])),
        *({"pid": 1, "kind": kind} for kind in ("", "other", "\ud800", None, 5, [], {})),
    ],
)
def test_a_process_that_cannot_be_one_is_rejected_and_counted(process: dict[str, Any]) -> None:
    good = {"pid": 1, "kind": "mps", "memory_bytes": "much"}
    sample = sample_of({"values": {}, "processes": [process, good, 7], "rejected": 2})
    assert [(p.pid, p.kind, p.HasField("memory_bytes")) for p in sample.processes] == [(1, "mps", False)]
    assert sample.rejected_processes == 3


def test_very_many_processes_devices_and_instances_are_bounded() -> None:
    devices = Devices()
    process = {"pid": 1, "kind": "compute", "memory_bytes": 1, "gpu_instance": None, "compute_instance": None}
    instances = [{"uuid": f"MIG-{i}", "gpu_instance": i} for i in range(10_000)]
    devices.take({"device": {"uuid": "GPU-1", "values": {}, "processes": [process] * 100_000}}, 1)
    devices.take({"device": {"uuid": "GPU-2", "values": {}, "instances": instances}}, 1)
    for i in range(10_000):
        devices.take({"device": {"uuid": f"GPU-{i}", "values": {}}}, 1)
    samples, _ = devices.report(NvmlStatus(), None, {}, 1)
    assert len(samples) == 512
    first = next(sample for sample in samples if sample.uuid == "GPU-1")
    assert len(first.processes) <= 1024


def test_more_devices_than_a_node_has_are_bounded_in_the_client_too() -> None:
    one = Client(GpuConfig(), 1.0)
    names = [f"GPU-{i}" for i in range(10_000)]
    list(one._take(0.0, {"nvml": {"order": names, "absent": dict.fromkeys(names, 15)}}))
    assert one.listed is not None
    assert len(one.listed) == len(one.absent) == 64
    for name in names:
        list(one._take(0.0, {"device": {"uuid": name, "stamp": 1}}))
    assert len(one._seen_us) == 64


def test_a_busy_time_longer_than_the_time_it_was_measured_in_is_not_taken() -> None:
    assert not sample_of({"values": {}, "added": {"busy_ns": 6, "measured_ns": 5}}).HasField("busy_ns")


def test_a_process_is_its_instances_where_only_one_fits() -> None:
    places = {"MIG-1": (1, 0), "MIG-2": (1, 1), "MIG-3": (2, 0)}
    instances = [
        {"uuid": name, "gpu_instance": gpu, "compute_instance": compute}
        for name, (gpu, compute) in places.items()
    ]
    of = {1: (1, 1), 2: (1, None), 3: (2, None), 4: (9, 0), 5: (None, None), 6: (1, "0")}
    processes = [
        {"pid": pid, "kind": "compute", "gpu_instance": gpu, "compute_instance": compute}
        for pid, (gpu, compute) in of.items()
    ]
    devices = Devices()
    line = {"uuid": "GPU-1", "values": {}, "instances": instances, "processes": processes}
    devices.take({"device": line}, 1)
    samples, _ = devices.report(NvmlStatus(), None, {}, 1)
    assert {sample.uuid: [process.pid for process in sample.processes] for sample in samples} == {
        "GPU-1": [2, 4, 5, 6],
        "MIG-1": [],
        "MIG-2": [1],
        "MIG-3": [3],
    }


def test_how_busy_processes_were_is_there_where_it_was_asked_for_and_can_be_true() -> None:
    devices = Devices()
    devices.take({"device": {"uuid": "GPU-1", "values": {}}}, 1)
    assert "by_process" not in devices.line("GPU-1")
    told = {"4242": 5, "4343": -1, "x": 5, "99999999": 5, "1": 1.5, "2": 0}
    devices.take({"device": {"uuid": "GPU-1", "values": {}, "by_process": told}}, 1)
    assert devices.line("GPU-1")["by_process"] == {"4242": 5, "2": 0}
    devices.end_tick()
    assert devices.line("GPU-1") == {}


def test_counters_begin_anew_when_the_profiler_has_another_source() -> None:
    devices = Devices()
    for source, added in (("gpm", 5), ("gpm", 6), ("nvml", 7)):
        profile = {"source": source, "added": {"dram_ns": added}, "missing": {}}
        devices.take({"device": {"uuid": "GPU-1", "values": {}, "profile": profile}}, 1)
    (sample,), _ = devices.report(NvmlStatus(), None, {}, 1)
    assert (sample.profile.source, sample.profile.dram_ns) == ("nvml", 7)


def test_a_name_that_was_told_once_is_known_while_nvml_is_silent() -> None:
    devices = Devices()
    devices.take({"device": {"uuid": "GPU-1", "values": {"name": "H100", "index": 3, "power_mw": 5}}}, 1)
    devices.report(NvmlStatus(), None, {}, 1)
    devices.end_tick()
    devices.take({"device": {"uuid": "GPU-1", "values": {}, "missing": {"name": 999}}}, 1)
    devices.report(NvmlStatus(), None, {}, 1)
    devices.end_tick()
    (sample,), _ = devices.report(NvmlStatus(reason="it is down"), None, {}, 1)
    assert (sample.name, sample.index, sample.state) == ("H100", 3, "silent")
    assert dict(sample.unavailable) == {"all": "it is down"}
    assert not sample.HasField("power_mw")


@pytest.mark.slow
def test_ten_thousand_rounds_leave_nothing_behind() -> None:
    devices = Devices()

    def rounds(count: int) -> None:
        for i in range(count):
            instances = [{"uuid": f"MIG-{i % 1000}", "gpu_instance": 1, "compute_instance": 0}]
            line = {"uuid": "GPU-1", "values": {"power_mw": i}, "missing": {}, "instances": instances}
            devices.take({"device": line}, i)
            devices.take({"event": {"uuid": "GPU-1", "xid": i}}, i)
            samples, _ = devices.report(NvmlStatus(), None, {}, i)
            assert [sample.uuid for sample in samples] == ["GPU-1", instances[0]["uuid"]]
            devices.end_tick()

    rounds(100)
    tracemalloc.start()
    try:
        rounds(500)
        before, _ = tracemalloc.get_traced_memory()
        rounds(10_000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 20_000


@settings(deadline=None)
@given(ANYTHING)
def test_the_parts_take_anything(value: Any) -> None:
    assert number(value) is None or 0 <= value < 1 << 63
    assert isinstance(error_code(value), int)
    assert identifier(value) in ("", value)
    assert all(busy >= 0 for busy in busy_by_pid({"by_process": value}).values())
    reasons.sentence(error_code(value))
    reasons.word(error_code(value))
