from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.rates import Rates, snapshot
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JOB_STATE_HELD_IDLE, Report
from tests.top.any_message import fill
from tests.top.serving import SECOND, make_report


def faults(sequence: int, value: int, run: int = 1) -> Report:
    """A report with one job whose page faults have reached `value`."""
    report = Report(sequence=sequence, time_ns=sequence * SECOND, interval_ns=SECOND)
    report.node.name, report.host.cpus_online = "n1", 2
    job = report.jobs.add(cpu_ns=SECOND // 2)
    job.identity.scheduler, job.identity.id, job.identity.run = "slurm", "501", run
    job.counters.page_faults = value
    return report


def rates_of(reports: list[Report]) -> list[tuple[float | None, int]]:
    """Page faults per second and bad samples, report by report."""
    rates = Rates()
    snapshots = [rates.add(report) for report in reports]
    return [(s["jobs"][0]["counters"]["page_faults_per_s"], s["bad_samples"]) for s in snapshots]


def figures(value: Any, path: str = "") -> dict[str, Any]:
    """All leaves of a snapshot by their path."""
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in figures(part, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, part in enumerate(value) for k, v in figures(part, f"{path}[{i}]").items()}
    return {path: value}


RATES = ("_per_s", "cpu_cores", "user_cores", "system_cores", "wait_cores", "run_cores", "ipc", "_ratio")


def rate_figures(snap: Values) -> dict[str, Any]:
    return {path: value for path, value in figures(snap).items() if path.endswith(RATES)}


# ---- resets


def test_a_new_run_counts_from_zero() -> None:
    reports = [faults(1, 400), faults(2, 520), faults(3, 30, run=2), faults(4, 90, run=2)]
    assert rates_of(reports) == [(None, 0), (120, 0), (30, 0), (60, 0)]


def test_what_cpus_did_before_they_went_is_no_bogus_value() -> None:
    rates = Rates()
    reports = [faults(1, 0), faults(2, 0)]
    for report, cpus, cpu_ns in zip(reports, (8, 2), (0, 7 * SECOND), strict=True):
        report.host.cpus_online, report.jobs[0].cpu_ns = cpus, cpu_ns
    assert [rates.add(report)["jobs"][0]["cpu_cores"] for report in reports] == [None, 7.0]


def test_a_single_bogus_value_is_dropped_and_makes_no_spike() -> None:
    reports = [faults(1, 1000), faults(2, 1050), faults(3, 0), faults(4, 1100)]
    # The last 50 were added in the two seconds since the last good sample.
    assert rates_of(reports) == [(None, 0), (50, 0), (None, 1), (25, 0)]


def test_a_counter_that_stays_low_has_begun_anew() -> None:
    reports = [faults(1, 1000), faults(2, 1050), faults(3, 0), faults(4, 10), faults(5, 30)]
    assert rates_of(reports) == [(None, 0), (50, 0), (None, 1), (10, 0), (20, 0)]


def test_a_dropped_sample_says_why() -> None:
    job = snapshot(faults(1, 1050), faults(2, 0))["jobs"][0]
    assert "backwards" in job["unavailable"]["page_faults"]


def test_a_cpu_rate_beyond_the_nodes_cpus_is_absent_with_its_reason() -> None:
    for cores, known in ((2.09, True), (2.11, False)):
        before, after = faults(1, 0), faults(2, 0)
        after.jobs[0].cpu_ns = before.jobs[0].cpu_ns + int(cores * SECOND)
        job = snapshot(before, after)["jobs"][0]
        assert job["cpu_cores"] == (pytest.approx(cores) if known else None)
        assert ("cpu_ns" in job["unavailable"]) is not known


def test_an_old_job_that_appears_late_has_no_rate_yet() -> None:
    empty, old = faults(1, 0), faults(2, 10**6)
    del empty.jobs[:]
    old.jobs[0].cpu_ns = 3600 * SECOND
    job = snapshot(empty, old)["jobs"][0]
    assert job["counters"]["page_faults_per_s"] is None
    assert job["cpu_cores"] is None


def test_a_value_that_was_missing_for_a_while_is_spread_over_that_time() -> None:
    gap = faults(2, 0)
    gap.jobs[0].counters.ClearField("page_faults")
    assert rates_of([faults(1, 0), gap, faults(3, 100)]) == [(None, 0), (None, 0), (50, 0)]


def test_a_job_that_vanishes_from_one_report_keeps_its_past() -> None:
    gap = faults(2, 0)
    del gap.jobs[:]
    rates = Rates()
    for report in (faults(1, 1000), gap):
        rates.add(report)
    assert rates.add(faults(3, 1100))["jobs"][0]["counters"]["page_faults_per_s"] == 50


# ---- time


def test_the_first_report_has_no_rate_and_not_zero() -> None:
    snap = snapshot(None, make_report(5))
    known = {
        path: value
        for path, value in rate_figures(snap).items()
        if value is not None and not path.endswith((".running_ratio", ".memory_used_ratio"))
    }
    # What the kernel measured of the BPF programs is known from one report alone.
    assert all(path.startswith(".collector.bpf") for path in known)
    assert snap["jobs"][0]["memory_bytes"] == 700 << 20


@pytest.mark.parametrize(
    ("steps", "wall_s", "interval_s"),
    [
        (1, 1.0, 1.0),  # the monotonic clock, whatever the wall clock says
        (1, 3600.0, 1.0),
        (5, 5.2, 5.2),  # missed reports: the wall clock where it is plausible
        (5, 3600.0, 5.0),
        (5, -20.0, 5.0),
    ],
)
def test_interval(steps: int, wall_s: float, interval_s: float) -> None:
    before, after = make_report(10), make_report(10 + steps)
    after.time_ns = before.time_ns + int(wall_s * SECOND)
    assert snapshot(before, after)["interval_s"] == pytest.approx(interval_s)


@pytest.mark.parametrize("change", ["boot", "name", "first report of an agent", "sequence"])
def test_reports_that_do_not_follow_each_other_give_no_rates(change: str) -> None:
    before, after = make_report(10), make_report(11)
    if change == "boot":
        after.node.boot_id = "boot-2"
    elif change == "name":
        after.node.name = "other"
    elif change == "sequence":
        after.sequence = 10
    else:
        after.interval_ns = 0
    assert snapshot(before, after)["jobs"][0]["cpu_cores"] is None


def test_data_older_than_two_intervals_is_stale() -> None:
    before, after = make_report(1), make_report(2)
    after.jobs[1].state = JOB_STATE_ENDED
    fresh, stale = snapshot(before, after, 1.9), snapshot(before, after, 2.1)
    assert (fresh["stale"], [j["state"] for j in fresh["jobs"]]) == (False, ["running", "ended", "held_idle"])
    assert (stale["stale"], [j["state"] for j in stale["jobs"]]) == (True, ["stale", "ended", "stale"])
    assert stale["age_s"] == 2.1


# ---- the object


def test_the_object_that_json_prints() -> None:
    snap = snapshot(make_report(8), make_report(9), 0.5)
    assert {"node", "time", "interval_s", "jobs", "host", "collector"} <= snap.keys()
    job = snap["jobs"][0]
    assert (job["key"], job["scheduler"], job["id"], job["run"]) == ("slurm/4411", "slurm", "4411", 1000)
    assert (job["name"], job["user"], job["state"], job["processes"]) == ("resnet50", "user0", "running", 4)
    assert job["cpu_cores"] == pytest.approx(1, abs=0.1)
    assert job["memory_used_ratio"] == pytest.approx(700 / 16384)
    counters = job["counters"]
    assert counters["context_switches_per_s"] == 1500
    assert counters["run_queue_wait_cores"] == pytest.approx(0.05)
    assert counters["ipc"] == pytest.approx(1.4)
    assert counters["cache_miss_ratio"] == pytest.approx(0.2)
    assert counters["branch_misses_per_s"] is None
    assert job["io"]["read_bytes_per_s"] == pytest.approx(3e6)
    assert job["network"] is None
    assert snap["host"]["cpu_cores"] == pytest.approx(7)
    collector = snap["collector"]
    assert collector["cpu_cores"] == pytest.approx(0.008)
    assert collector["pss_bytes"] == 41 << 20
    assert collector["bpf"] == {
        "programs": [
            {
                "name": "on_switch",
                "ns_per_run": pytest.approx(56),
                "runs_per_s": pytest.approx(2000),
                "ns_per_s": pytest.approx(112_000),
            }
        ],
        "ns_per_s": pytest.approx(112_000),
    }
    assert [s["up"] for s in collector["sources"]] == [True, False]


def test_without_a_pmu_hardware_counters_are_absent_with_the_reason() -> None:
    job = snapshot(make_report(8, pmu=False), make_report(9, pmu=False))["jobs"][0]
    assert job["counters"]["ipc"] is None
    assert job["counters"]["cycles_per_s"] is None
    assert job["counters"]["context_switches_per_s"] == 1500
    assert job["unavailable"] == {"cycles": "no PMU: ENOENT"}


def test_bpf_cost_is_of_the_newest_time_in_which_it_was_measured() -> None:
    def report(sequence: int, run_ns: int, runs: int, measured_ns: int) -> Report:
        made = faults(sequence, 0)
        made.collector.programs.add(name="p", run_ns=run_ns, runs=runs, measured_ns=measured_ns)
        return made

    rates = Rates()
    costs = [
        rates.add(r)["collector"]["bpf"]["ns_per_s"]
        for r in (
            report(1, 0, 0, 0),  # statistics were never on: not known
            report(2, 500, 10, SECOND),
            report(3, 500, 10, SECOND),  # off since: the last figure stands
            report(4, 1500, 20, 2 * SECOND),
            report(5, 70, 1, SECOND),  # loaded anew
        )
    ]
    assert costs == [None, 500, 500, 1000, 70]


def test_figures_that_are_no_numbers_are_absent() -> None:
    report = faults(1, 0)
    report.host.load_1m = float("nan")
    report.jobs[0].cpu_limit_cores = float("inf")
    report.jobs[0].counters.cycles.running_ratio = float("nan")
    snap = snapshot(None, report)
    assert snap["host"]["load_1m"] is None
    assert snap["jobs"][0]["cpu_limit_cores"] is None
    assert snap["jobs"][0]["counters"]["running_ratio"] is None


def test_held_and_unknown_states() -> None:
    report = faults(1, 0)
    assert snapshot(None, report)["jobs"][0]["state"] is None
    report.jobs[0].state = JOB_STATE_HELD_IDLE
    assert snapshot(None, report)["jobs"][0]["state"] == "held_idle"


# ---- Python stacks


def stacks(sequence: int, samples: int, changed: int, lost: int = 0) -> Report:
    report = faults(sequence, 0)
    python = report.jobs[0].python
    python.samples, python.lost = samples, lost
    python.unresolved["changed"] = changed
    return report


def test_samples_per_second_and_how_many_have_a_stack() -> None:
    python = snapshot(stacks(1, 1000, 500), stacks(2, 1100, 510, lost=10))["jobs"][0]["python"]
    assert (python["samples"], python["unresolved"], python["lost"]) == (1100, {"changed": 510}, 10)
    assert (python["samples_per_s"], python["resolved_ratio"]) == (100, 0.8)
    assert (python["hottest"], python["waiting"]) == (None, None)


def test_the_hottest_lines() -> None:
    report = stacks(1, 10, 0)
    python = report.jobs[0].python
    python.hottest_function, python.hottest_file = "step", "/srv/train.py"
    python.hottest_line, python.hottest_share = 88, 0.5
    python.waiting_function, python.waiting_share = "Queue.get", float("nan")
    shown = snapshot(None, report)["jobs"][0]["python"]
    assert shown["hottest"] == {"function": "step", "file": "/srv/train.py", "line": 88, "share": 0.5}
    assert shown["waiting"] == {"function": "Queue.get", "file": None, "line": None, "share": None}
    assert (shown["samples_per_s"], shown["resolved_ratio"]) == (None, None)


def test_a_job_that_is_not_sampled_has_no_figures_of_it() -> None:
    assert snapshot(None, faults(1, 0))["jobs"][0]["python"] is None


# ---- any report at all


GPU_FIELDS = ("gpu", "gpus", "gpu_events", "nvml")  # see test_gpu_rates


@st.composite
def any_reports(draw: st.DrawFn) -> list[Report]:
    """Reports that follow each other, or do not, some of the same jobs."""
    reports = []
    for sequence in range(draw(st.integers(1, 3))):
        report = Report()
        fill(report, draw, leave=GPU_FIELDS)
        if draw(st.booleans()):
            report.node.CopyFrom(Report().node)
            report.sequence, report.interval_ns = sequence + 1, draw(st.integers(0, 10 * SECOND))
            for job in report.jobs:
                job.identity.id, job.identity.scheduler, job.identity.run = "1", "run", 1
        reports.append(report)
    return reports


@settings(max_examples=150, deadline=None)
@given(any_reports(), st.one_of(st.none(), st.floats(0, 1e6)))
def test_any_report_gives_json_without_negative_rates(reports: list[Report], age_s: float | None) -> None:
    rates = Rates()
    for report in reports:
        snap = rates.add(report, age_s)
        assert json.loads(json.dumps(snap, allow_nan=False))["jobs"] == snap["jobs"]
        for path, value in rate_figures(snap).items():
            assert value is None or value >= 0, path
        if snap["host"]["cpus_online"]:
            cap = snap["host"]["cpus_online"] * 1.05
            assert all(j["cpu_cores"] is None or j["cpu_cores"] <= cap for j in snap["jobs"])
