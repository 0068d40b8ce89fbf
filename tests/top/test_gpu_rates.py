from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.top import gpu_panel, plain
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.gpu_rates import throttle_words
from expanse_ebpf.top.rates import KEEP_REPORTS, Rates, snapshot
from expanse_ebpf.wire.collector_pb2 import Report
from tests.top.any_message import fill
from tests.top.gpu_reports import GIB, MIG, POD, UUIDS, gpu_report
from tests.top.serving import SECOND
from tests.top.test_rates import rate_figures


def between(first: int = 20, second: int = 21) -> Values:
    return snapshot(gpu_report(first), gpu_report(second), 0.1)


def one_gpu(sequence: int, present: bool = True, **counters: int) -> Report:
    """A report with one GPU that has just these counters."""
    report = Report(sequence=sequence, time_ns=sequence * SECOND, interval_ns=SECOND)
    report.node.name = "n1"
    if present:
        report.gpus.add(uuid="GPU-1", **counters)
    return report


def figures_of(reports: list[Report], *path: str) -> list[Any]:
    """One figure of the GPU, report by report; "gone" where it is not there."""
    rates, found = Rates(), []
    for report in reports:
        value: Any = next(iter(rates.add(report)["gpus"]), "gone")
        for name in path if value != "gone" else ():
            value = value[name]
        found.append(value)
    return found


# ---- devices


def test_every_device_is_there_with_what_is_known_of_it() -> None:
    snap = between()
    assert [gpu["uuid"] for gpu in snap["gpus"]] == [*UUIDS, *MIG]
    gpu = snap["gpus"][1]
    assert (gpu["index"], gpu["minor"], gpu["name"], gpu["state"]) == (1, 1, "NVIDIA H200", "ok")
    assert gpu["busy_ratio"] == pytest.approx(0.45 / 0.98)
    assert (gpu["utilization"], gpu["memory_utilization"]) == (0.88, 0.41)
    assert (gpu["memory_used_bytes"], gpu["memory_total_bytes"]) == (30 * GIB, 141 * GIB)
    assert gpu["memory_used_ratio"] == pytest.approx(30 / 141)
    assert (gpu["power_watts"], gpu["power_limit_watts"], gpu["energy_joules"]) == (513, 700, 21 * 512)
    assert (gpu["temperature_c"], gpu["memory_temperature_c"], gpu["sm_clock_mhz"]) == (65, 80, 1755)
    assert gpu["throttled_ratio"] == {"power": pytest.approx(0.25), "thermal": 0}
    assert gpu["pcie"] == {
        "sent_bytes_per_s": 3e9,
        "received_bytes_per_s": 1e9,
        "replays": 2,
        "generation": 5,
        "width": 16,
    }
    assert gpu["nvlink"] == {"links": 18, "sent_bytes_per_s": 2e11, "received_bytes_per_s": 1e11}
    assert gpu["ecc"] == {
        "enabled": True,
        "corrected": 3,
        "uncorrected": 0,
        "corrected_lifetime": 7,
        "uncorrected_lifetime": 1,
    }
    assert gpu["remapped_rows"] == {"corrected": 1, "uncorrected": 0, "pending": True, "failed": None}
    assert (gpu["persistence"], gpu["mig_enabled"], gpu["xids"]) == (True, False, {})
    assert gpu["processes"] == [
        {"pid": 4001, "kind": "compute", "memory_bytes": 30 * GIB, "job": "slurm/4411", "resolved": True}
    ]
    assert gpu["holders"] == [{"key": "slurm/4411", "run": 1000, "source": "device_cgroup", "name": None}]


def test_a_shared_device_has_its_holders_conflicts_and_events() -> None:
    snap = between()
    gpu = snap["gpus"][2]
    pod = {"key": None, "run": None, "source": "pod_resources", "name": POD}
    assert [h["key"] for h in gpu["holders"]] == ["slurm/4412", None]
    assert gpu["holders"][1] == pod
    assert len(gpu["conflicts"]) == 1
    assert (gpu["unresolved_processes"], gpu["rejected_processes"]) == (1, 2)
    assert gpu["xids"] == {"48": 3, "79": 1}
    assert [(e["uuid"], e["kind"], e["xid"]) for e in snap["gpu_events"]] == [(UUIDS[2], "xid", 79)]
    assert snap["gpu_events"][0]["holders"][1] == pod


def test_a_mig_instance_has_what_nvml_gives_of_it_and_nothing_of_the_whole() -> None:
    gpu = between()["gpus"][5]
    assert (gpu["parent_uuid"], gpu["mig_profile"]) == (UUIDS[3], "1g.18gb")
    assert (gpu["gpu_instance"], gpu["compute_instance"]) == (7, 0)
    assert (gpu["power_watts"], gpu["busy_ratio"], gpu["temperature_c"]) == (None, None, None)
    assert gpu["profile"]["sm_active_ratio"] == pytest.approx(0.1)
    assert gpu["unavailable"] == {"power_mw": "NVML gives it of the whole GPU only"}


def test_missing_is_none_and_never_zero() -> None:
    lost = between()["gpus"][4]
    known = {name for name, value in lost.items() if value not in (None, [], {}, 0)}
    assert known == {
        "uuid",
        "name",
        "index",
        "state",
        "unavailable",
        "pcie",
        "nvlink",
        "ecc",
        "remapped_rows",
    }
    assert {*lost["pcie"].values(), *lost["nvlink"].values(), *lost["ecc"].values()} == {None}
    assert lost["profile"] is None


def test_the_profile_says_whose_figures_they_are() -> None:
    report = gpu_report(21)
    report.gpus[1].profile.source = "nvml"
    gpus = snapshot(gpu_report(20), report)["gpus"]
    profile = gpus[0]["profile"]
    assert (profile["source"], gpus[1]["profile"]["source"]) == ("gpm", "nvml")
    assert profile["sm_active_ratio"] == pytest.approx(0.7)
    assert profile["sm_occupancy_ratio"] == pytest.approx(0.3)
    assert profile["tensor_ratio"] == pytest.approx(0.4)
    assert profile["dram_ratio"] == pytest.approx(0.5)
    assert profile["pcie"] == {"sent_bytes_per_s": 4e9, "received_bytes_per_s": None}
    assert all(profile[f"{unit}_ratio"] is None for unit in ("fp64", "fp32", "fp16", "integer", "graphics"))


def test_nvml() -> None:
    nvml = between()["nvml"]
    assert (nvml["up"], nvml["driver_version"], nvml["restarts"]) == (True, "580.65.06", 0)
    assert (nvml["pss_bytes"], nvml["cpu_cores"]) == (20 << 20, pytest.approx(0.002))
    assert snapshot(None, Report())["nvml"] is None
    down = gpu_report(21)
    down.nvml.up, down.nvml.code, down.nvml.reason = False, "hung", "no answer in 5 s"
    shown = snapshot(None, down)["nvml"]
    assert (shown["up"], shown["code"], shown["reason"]) == (False, "hung", "no answer in 5 s")


@pytest.mark.parametrize(
    ("bits", "words"),
    [
        (None, None),
        (0, []),
        (0x1, ["gpu_idle"]),
        (0x4 | 0x40, ["sw_power_cap", "hw_thermal_slowdown"]),
        (0x100 | 0x8000_0000_0000_0200, ["display_clock_setting", "0x8000000000000200"]),
    ],
)
def test_reasons_of_throttling_are_words_and_unknown_bits_hexadecimal(
    bits: int | None, words: list[str] | None
) -> None:
    assert throttle_words(bits) == words


# ---- time and resets


def test_busy_is_of_the_time_that_was_measured() -> None:
    reports = [one_gpu(1, busy_ns=0, measured_ns=0), one_gpu(2, busy_ns=SECOND // 4, measured_ns=SECOND // 2)]
    assert figures_of(reports, "busy_ratio") == [None, 0.5]


def test_without_new_measurements_busy_is_not_known() -> None:
    reports = [
        one_gpu(1, busy_ns=5, measured_ns=9),
        one_gpu(2, busy_ns=5, measured_ns=9),
        one_gpu(3, busy_ns=7),
    ]
    assert figures_of(reports, "busy_ratio") == [None, None, None]


def test_more_busy_than_measured_is_a_bad_sample_with_its_reason() -> None:
    for share, known in ((104, 1.0), (106, None)):
        reports = [one_gpu(1, busy_ns=0, measured_ns=0), one_gpu(2, busy_ns=share, measured_ns=100)]
        snap = snapshot(*reports)
        assert snap["gpus"][0]["busy_ratio"] == known
        assert ("busy_ns" in snap["gpus"][0]["unavailable"], snap["bad_samples"]) == (
            known is None,
            known is None,
        )


def test_a_device_that_vanishes_and_returns_is_no_spike() -> None:
    def seen(sequence: int, present: bool = True) -> Report:
        return one_gpu(
            sequence,
            present,
            busy_ns=sequence * SECOND // 2,
            measured_ns=sequence * SECOND,
            pcie_sent_bytes=sequence * 1000,
        )

    for gone in (1, KEEP_REPORTS + 2):
        away = [seen(3 + i, present=False) for i in range(gone)]
        reports = [seen(1), seen(2), *away, seen(3 + gone), seen(4 + gone)]
        back = None if gone >= KEEP_REPORTS else 0.5
        assert figures_of(reports, "busy_ratio") == [None, 0.5, *["gone"] * gone, back, 0.5]
        back = None if gone >= KEEP_REPORTS else 1000
        sent = figures_of(reports, "pcie", "sent_bytes_per_s")
        assert sent == [None, 1000, *["gone"] * gone, back, 1000]


def test_counters_that_begin_anew_with_the_driver_are_no_spike() -> None:
    sent = [1000, 1050, 0, 10, 30]
    reports = [one_gpu(i, pcie_sent_bytes=value) for i, value in enumerate(sent, 1)]
    assert figures_of(reports, "pcie", "sent_bytes_per_s") == [None, 50, None, 10, 20]
    snap = snapshot(reports[1], reports[2])
    assert "backwards" in snap["gpus"][0]["unavailable"]["pcie_sent_bytes"]
    assert snap["bad_samples"] == 1


def test_a_device_is_known_by_its_uuid_whatever_its_place() -> None:
    before, after = gpu_report(20), gpu_report(21)
    order = list(reversed(after.gpus))
    del after.gpus[:]
    after.gpus.extend(order)
    for index, gpu in enumerate(after.gpus):
        gpu.index = index
    busy = {gpu["uuid"]: gpu["busy_ratio"] for gpu in snapshot(before, after)["gpus"]}
    assert busy == {gpu["uuid"]: gpu["busy_ratio"] for gpu in between()["gpus"]}


def test_throttling_is_at_most_all_of_the_time() -> None:
    before, after = one_gpu(1), one_gpu(2)
    before.gpus[0].throttled_ns["power"], after.gpus[0].throttled_ns["power"] = 0, 3 * SECOND
    assert snapshot(before, after)["gpus"][0]["throttled_ratio"] == {"power": 1.0}


# ---- jobs


def test_what_a_job_holds_and_uses() -> None:
    jobs = between()["jobs"]
    gpu = jobs[0]["gpu"]
    assert (gpu["count"], gpu["mig_instances"]) == (2, 0)
    assert gpu["holds"][0] == {"uuid": UUIDS[0], "source": "device_cgroup", "sharers": 1}
    assert gpu["gpus_busy"] == pytest.approx(1.35)
    assert gpu["busy_ratio"] == pytest.approx(1.35 / 1.96)
    assert gpu["sm_active_ratio"] == pytest.approx(0.7)
    assert (gpu["power_watts"], gpu["energy_joules"]) == (1025, 21 * 1025)
    assert (gpu["memory_bytes"], gpu["memory_total_bytes"]) == (49 * GIB, 282 * GIB)
    assert (gpu["conflicts"], gpu["unknown"]) == ([], [])
    assert (jobs[0]["gpus"], jobs[0]["gpus_source"]) == (["0", "1"], "SLURM_JOB_GPUS")
    shared, mig = jobs[1]["gpu"], jobs[2]["gpu"]
    assert shared["holds"][0]["sharers"] == 2
    assert (shared["busy_ratio"], shared["gpus_busy"], shared["power_watts"]) == (None, None, None)
    assert (len(shared["conflicts"]), len(shared["unknown"])) == (1, 1)
    assert (mig["count"], mig["mig_instances"], jobs[2]["state"]) == (1, 1, "held_idle")


def test_a_job_without_a_gpu_has_none() -> None:
    assert [job["gpu"] is None for job in snapshot(None, gpu_report(1, jobs=4))["jobs"]] == [False] * 3 + [
        True
    ]


def test_a_new_run_of_a_job_begins_anew() -> None:
    before, after = gpu_report(20), gpu_report(21)
    after.jobs[0].identity.run += 1
    after.jobs[0].cpu_ns = 3600 * SECOND * 64  # not judged to have begun in between
    gpu = snapshot(before, after)["jobs"][0]["gpu"]
    assert (gpu["busy_ratio"], gpu["gpus_busy"], gpu["sm_active_ratio"]) == (None, None, None)


def test_what_the_reader_may_not_see_is_counted() -> None:
    report = gpu_report(1)
    report.gpus[0].holders.add()
    report.gpus[0].processes.add()
    report.gpu_events[0].holders.add()
    snap = snapshot(None, report)
    gpu = snap["gpus"][0]
    assert (len(gpu["holders"]), gpu["other_holders"]) == (1, 1)
    assert (len(gpu["processes"]), gpu["other_processes"]) == (1, 1)
    assert (len(snap["gpu_events"][0]["holders"]), snap["gpu_events"][0]["other_holders"]) == (2, 1)


# ---- any report at all


@st.composite
def any_reports(draw: st.DrawFn) -> list[Report]:
    """Reports of the same node, and some of the same GPU and job."""
    reports = []
    for sequence in range(1, draw(st.integers(1, 3)) + 1):
        report = one_gpu(sequence, present=False)
        for _ in range(draw(st.integers(1, 2))):
            fill(report.gpus.add(), draw, 1)
        report.gpus[0].uuid = "GPU-1"
        fill(report.jobs.add().gpu, draw, 1)
        fill(report.gpu_events.add(), draw, 1)
        if draw(st.booleans()):
            fill(report.nvml, draw, 1)
        reports.append(report)
    return reports


@settings(max_examples=60, deadline=None)
@given(any_reports())
def test_any_report_gives_json_and_text_that_can_be_shown(reports: list[Report]) -> None:
    rates = Rates()
    for report in reports:
        snap = rates.add(report)
        assert json.loads(json.dumps(snap, allow_nan=False))["gpus"] == snap["gpus"]
        for path, value in rate_figures(snap).items():
            assert value is None or value >= 0, path
            if path.startswith((".gpus", ".jobs")) and ("busy" in path or "active" in path):
                assert value is None or value <= 1, path
        shown = [
            plain.render(snap),
            plain.render(snap, devices=True),
            plain.render(snap, 80, 24, devices=True),
        ]
        for gpu in snap["gpus"]:
            lines = gpu_panel.device_lines(gpu["uuid"], gpu, snap, snap["gpu_events"], 80)
            shown += [line for line, _ in lines]
        shown += [line for line, _ in gpu_panel.job_lines(snap["jobs"][0], snap, 80)]
        assert not any(c < " " for c in "".join(shown) if c != "\n")
        assert not any("\n" in line for line in shown[3:])
