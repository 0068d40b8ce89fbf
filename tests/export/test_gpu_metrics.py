"""GPUs on the Prometheus page."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.export.gpu_metrics import GPU_METRICS, JOB_GPU_METRICS
from expanse_ebpf.export.gpu_readers import MAX_GPUS, MAX_HOLDERS
from expanse_ebpf.export.prometheus import clean
from expanse_ebpf.wire.collector_pb2 import GpuSample, Report
from tests.export.gpus import GIB, SECOND, WATTS, gpu_node, instance_uuid, job, one_gpu, uuid
from tests.export.test_prometheus import filled, page, samples, series, values

ROOT = Path(__file__).resolve().parents[2]


def only(report: Report, name: str) -> dict[tuple[str, ...], float]:
    """Values of a metric of the one GPU, by the labels after its UUID."""
    return {labels[1:]: value for labels, value in values(page(report), name).items()}


# ---- each device once, held or not


@pytest.mark.parametrize("allocated", [False, True])
def test_every_gpu_is_on_the_page_whether_held_or_not(allocated: bool) -> None:
    text = page(gpu_node(allocated))
    everything = {(uuid(number),) for number in range(8)} | {(instance_uuid(n),) for n in range(2)}
    for name in ("expanse_gpu_up", "expanse_gpu_holders", "expanse_gpu_memory_size_bytes"):
        assert set(values(text, name)) == everything
    assert values(text, "expanse_gpus") == {("gpu",): 8, ("mig",): 2}
    assert values(text, "expanse_unlisted_gpus") == {(): 0}
    held = sum(value > 0 for value in values(text, "expanse_gpu_holders").values())
    assert held == (5 if allocated else 0)


def test_one_allocated_gpu_leaves_the_other_seven_on_the_page() -> None:
    report = gpu_node(allocated=False)
    report.gpus[3].holders.add(scheduler="kubernetes", id="default/a", run=5, source="pod_resources")
    holders = values(page(report), "expanse_gpu_holders")
    assert holders == {(g.uuid,): int(g.uuid == uuid(3)) for g in report.gpus}


def test_a_shared_gpu_lists_both_pods_and_its_power_counts_once() -> None:
    text = page(gpu_node())
    power = values(text, "expanse_gpu_power_watts")
    assert power == {(uuid(number),): watts for number, watts in enumerate(WATTS)}
    holders = {labels[1:] for labels in values(text, "expanse_gpu_holder_info") if labels[0] == uuid(0)}
    assert holders == {
        ("kubernetes", "default/a", "1", "", "pod_resources", "2"),
        ("kubernetes", "default/b", "2", "", "pod_resources", "2"),
    }
    assert values(text, "expanse_gpu_holders")[uuid(0),] == 2


def test_a_holder_that_the_node_knows_no_job_of_has_a_name_alone() -> None:
    text = page(gpu_node())
    (holder,) = (labels for labels in values(text, "expanse_gpu_holder_info") if labels[0] == uuid(3))
    assert holder[1:] == ("", "", "", "default/elsewhere", "pod_resources", "1")


def test_info_says_what_the_device_is_and_leaves_numbers_empty_that_are_not_known() -> None:
    text = page(gpu_node(allocated=False))
    rows = {labels[0]: labels[1:] for labels in values(text, "expanse_gpu_info")}
    name = "NVIDIA H100 80GB HBM3"
    assert rows[uuid(0)] == (name, "0", "7", "00000000:10:00.0", "", "", "", "", "")
    assert rows[instance_uuid(0)] == (
        *(f"{name} MIG 1g.10gb", "", "", "", "", uuid(7)),
        *("1g.10gb", "7", "0"),
    )


def test_units_are_base_units() -> None:
    report = one_gpu(
        sm_clock_mhz=1980,
        power_mw=512_345,
        energy_mj=7,
        temperature_c=-3,
        busy_ns=1_500_000_000,
        memory_used_bytes=GIB,
    )
    assert only(report, "expanse_gpu_sm_clock_hertz") == {(): 1.98e9}
    assert only(report, "expanse_gpu_power_watts") == {(): 512.345}
    assert only(report, "expanse_gpu_energy_joules_total") == {(): 0.007}
    assert only(report, "expanse_gpu_temperature_celsius") == {(): -3}
    assert only(report, "expanse_gpu_busy_seconds_total") == {(): 1.5}
    assert only(report, "expanse_gpu_memory_used_bytes") == {(): GIB}


@given(st.integers(0, 2**32 - 1))
def test_megahertz_become_hertz_exactly(clock: int) -> None:
    (row,) = next(m for m in GPU_METRICS if m.name == "expanse_gpu_sm_clock_hertz").read(
        GpuSample(sm_clock_mhz=clock)
    )
    assert row == ((), clock * 10**6)


def test_throttle_reasons_are_one_series_each_and_bits_without_a_name_are_other() -> None:
    rows = only(one_gpu(throttle_reasons=0x4 | 0x40), "expanse_gpu_throttle_reason")
    assert {labels[0] for labels, value in rows.items() if value} == {"sw_power_cap", "hw_thermal_slowdown"}
    assert len(rows) == 10
    rows = only(one_gpu(throttle_reasons=1 << 40), "expanse_gpu_throttle_reason")
    assert {labels[0] for labels, value in rows.items() if value} == {"other"}
    assert only(one_gpu(), "expanse_gpu_throttle_reason") == {}


def test_faults_are_told_apart_by_kind_and_by_the_time_they_are_counted_from() -> None:
    report = one_gpu(
        ecc_corrected=1, ecc_uncorrected=0, ecc_uncorrected_lifetime=3, remapped_rows_corrected=4
    )
    assert only(report, "expanse_gpu_ecc_errors_total") == {("corrected",): 1, ("uncorrected",): 0}
    assert only(report, "expanse_gpu_ecc_errors_lifetime_total") == {("uncorrected",): 3}
    assert only(report, "expanse_gpu_remapped_rows_total") == {("corrected",): 4}


def test_a_lost_gpu_is_down_and_says_so_and_has_no_processes() -> None:
    report = one_gpu()
    report.gpus[0].state = "lost"
    assert only(report, "expanse_gpu_up") == {(): 0}
    assert only(report, "expanse_gpu_state") == {("ok",): 0, ("lost",): 1, ("silent",): 0}
    assert only(report, "expanse_gpu_processes") == {}


def test_processes_that_are_not_listed_are_not_zero_processes() -> None:
    report = one_gpu(unresolved_processes=1)
    report.gpus[0].processes.add(pid=7)
    report.gpus[0].processes.add(pid=8)
    assert only(report, "expanse_gpu_processes") == {(): 2}
    assert only(report, "expanse_gpu_unresolved_processes") == {(): 1}
    assert only(report, "expanse_gpu_rejected_processes") == {(): 0}
    report.gpus[0].unavailable["processes"] = "2 of 300 processes are shown"
    assert only(report, "expanse_gpu_processes") == {}
    assert only(report, "expanse_gpu_unresolved_processes") == {(): 1}
    del report.gpus[0].processes[:]
    report.gpus[0].unavailable["processes"] = "not supported"
    for name in ("processes", "unresolved_processes", "rejected_processes"):
        assert only(report, f"expanse_gpu_{name}") == {}
    # Those on MIG instances stand in their GPU's list.
    assert set(values(page(gpu_node()), "expanse_gpu_processes")) == {(uuid(n),) for n in range(8)}


def test_what_a_gpu_lacks_is_absent_and_counted_by_reason() -> None:
    report = one_gpu(unavailable={"power_mw": "not supported"})
    report.gpus.add(uuid=uuid(1), state="ok", power_mw=0, unavailable={"ecc_corrected": "not supported"})
    report.gpus.add(uuid=uuid(2), state="ok", unavailable={"power_mw": "not supported"})
    text = page(report)
    assert values(text, "expanse_gpu_power_watts") == {(uuid(1),): 0}
    assert values(text, "expanse_unavailable_gpus") == {
        ("power_mw", "not supported"): 2,
        ("ecc_corrected", "not supported"): 1,
    }


def test_the_profilers_counters_say_their_source() -> None:
    text = page(gpu_node())
    rows = values(text, "expanse_gpu_profile_sm_active_seconds_total")
    assert rows == {(uuid(number), "gpm"): 450 for number in range(8)}
    assert values(text, "expanse_gpu_profile_fp64_seconds_total") == {}


# ---- jobs and NVML


def test_what_jobs_hold_and_use() -> None:
    text = page(gpu_node())

    def of_jobs(name: str) -> dict[str, float]:
        return {s.labels["job_id"]: s.value for s in samples(text) if s.name == name}

    assert of_jobs("expanse_job_gpus") == {"default/a": 1, "default/b": 1, "4711": 2, "4712": 1}
    assert of_jobs("expanse_job_gpu_busy_seconds_total") == {"4711": 250}
    assert of_jobs("expanse_job_gpu_measured_seconds_total") == {"4711": 1000}
    assert of_jobs("expanse_job_gpu_energy_joules_total") == {"4711": 7.5}
    assert of_jobs("expanse_job_gpu_power_watts") == {"4711": 1250}
    assert of_jobs("expanse_job_gpu_unknown") == {"default/a": 0, "default/b": 0, "4711": 0, "4712": 1}
    assert of_jobs("expanse_job_gpu_conflicts")["4712"] == 1
    holds = {
        (s.labels["job_id"], s.labels["uuid"], s.labels["source"], s.labels["sharers"])
        for s in samples(text)
        if s.name == "expanse_job_gpu_hold_info"
    }
    assert ("4711", uuid(2), "device_cgroup", "1") in holds
    assert ("default/a", uuid(0), "pod_resources", "2") in holds
    assert len(holds) == 5


def test_a_job_that_has_nothing_to_do_with_gpus_has_no_series_of_them() -> None:
    report = Report()
    job(report, "slurm", "1", 1)
    assert not any("gpu" in s.name for s in samples(page(report)))


def test_nvml_that_is_down_is_zero_with_its_reason() -> None:
    report = Report()
    report.nvml.code, report.nvml.reason = "driver_library_mismatch", "restart the node"
    text = page(report)
    assert values(text, "expanse_nvml_up") == {(): 0}
    assert set(values(text, "expanse_nvml_unavailable_info")) == {
        ("driver_library_mismatch", "restart the node")
    }
    assert values(text, "expanse_gpus") == {}
    report.nvml.up = True
    text = page(report)
    assert values(text, "expanse_nvml_up") == {(): 1}
    assert values(text, "expanse_nvml_unavailable_info") == {}
    assert values(text, "expanse_gpus") == {("gpu",): 0, ("mig",): 0}
    assert not any(s.name.startswith(("expanse_nvml", "expanse_gpu")) for s in samples(page(Report())))


# ---- nothing can break the page


def test_a_uuid_twice_or_none_leaves_the_first_whole_and_is_counted() -> None:
    report = one_gpu(power_mw=1000)
    report.gpus.add(uuid=uuid(0), state="lost", temperature_c=99)
    report.gpus.add(state="ok", temperature_c=98)
    report.gpus.add(uuid="\x00", temperature_c=1)
    report.gpus.add(uuid="\x01", temperature_c=2)
    text = page(report)
    assert len(set(series(text))) == len(series(text))
    assert values(text, "expanse_gpu_up") == {(uuid(0),): 1, ("\ufffd",): 0}
    assert values(text, "expanse_gpu_temperature_celsius") == {("\ufffd",): 1}
    assert values(text, "expanse_unlisted_gpus") == {(): 3}


def test_gpus_past_the_limit_are_left_out_and_counted() -> None:
    report = Report()
    for number in range(MAX_GPUS + 44):
        report.gpus.add(uuid=uuid(number), state="ok")
    text = page(report)
    assert len(values(text, "expanse_gpu_up")) == MAX_GPUS
    assert values(text, "expanse_unlisted_gpus") == {(): 44}
    assert values(text, "expanse_gpus") == {("gpu",): MAX_GPUS + 44, ("mig",): 0}


def test_labels_that_the_driver_or_a_job_can_make_up_are_bounded() -> None:
    report = one_gpu()
    gpu = report.gpus[0]
    holder = job(report, "slurm", "1", 1)
    for number in range(600):
        gpu.xids[number] = 1
        gpu.throttled_ns[f"cause {number:03}"] = SECOND
        gpu.holders.add(name=f"pod {number}")
        gpu.unavailable[f"field {number}"] = "odd"
        holder.gpu.holds.add(uuid=uuid(number))
    text = page(report)
    xids = values(text, "expanse_gpu_xid_events_total")
    assert (len(xids), sum(xids.values()), xids[uuid(0), "other"]) == (65, 600, 536)
    assert xids[uuid(0), "63"] == 1
    causes = values(text, "expanse_gpu_throttled_seconds_total")
    assert (len(causes), sum(causes.values())) == (17, 600)
    assert len(values(text, "expanse_gpu_holder_info")) == MAX_HOLDERS
    rows = values(text, "expanse_unavailable_gpus")
    assert (len(rows), sum(rows.values())) == (201, 600)
    assert len([s for s in samples(text) if s.name == "expanse_job_gpu_hold_info"]) == MAX_GPUS


def test_a_holder_that_is_listed_twice_is_one() -> None:
    report = one_gpu()
    for source in ("slurm", "device_cgroup"):
        report.gpus[0].holders.add(scheduler="slurm", id="1", run=4, source=source)
    assert only(report, "expanse_gpu_holders") == {(): 1}
    assert set(only(report, "expanse_gpu_holder_info")) == {("slurm", "1", "4", "", "slurm", "1")}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=8), st.integers(0, 3)), max_size=6))
def test_any_names_give_a_page_that_parses_without_duplicates(names: list[tuple[str, str, int]]) -> None:
    report = Report()
    for identifier, name, run in names:
        gpu = report.gpus.add(uuid=identifier, name=name, state=name, serial=identifier)
        gpu.throttled_ns[name] = 1
        gpu.profile.source, gpu.profile.measured_ns = identifier, 1
        for given_ in names:
            gpu.holders.add(scheduler=name, id=given_[0], name=given_[1], run=run, source=identifier)
        holder = job(report, "run", "x", run)
        holder.gpu.holds.add(uuid=identifier, source=name, sharers=run)
        report.nvml.code, report.nvml.reason = identifier, name
    text = page(report)
    assert len(set(series(text))) == len(series(text))
    assert {labels[0] for labels in values(text, "expanse_gpu_info")} == {clean(i) for i, _, _ in names if i}


# ---- where to read on


def test_metrics_of_who_holds_what_name_the_document_with_the_rules() -> None:
    cited = {m.source for m in (*GPU_METRICS, *JOB_GPU_METRICS) if m.source.startswith("docs/")}
    assert cited == {"docs/gpu-ownership.md"}
    assert "## The order of trust" in (ROOT / cited.pop()).read_text(encoding="utf-8")


# ---- what it costs


def test_the_document_says_how_many_series_a_gpu_makes() -> None:
    report = one_gpu()
    gpu = filled(report.gpus[0])
    gpu.uuid, gpu.parent_uuid, gpu.state = uuid(0), "", "ok"
    gpu.holders.add(scheduler="slurm", id="7", run=3, source="slurm")
    for cause in ("power", "thermal", "sync_boost", "board_limit", "reliability"):
        gpu.throttled_ns[cause] = 1
    most = sum(1 for s in samples(page(report)) if "uuid" in s.labels)
    gpu.ClearField("profile")
    plain = sum(1 for s in samples(page(report)) if "uuid" in s.labels)
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert f"makes {plain} series, {most} with the profiler" in text
