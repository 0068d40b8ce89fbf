"""A window of deep tracing, as `top` shows it at its job."""

from __future__ import annotations

from expanse_ebpf.top import detail, plain
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.rates import snapshot
from expanse_ebpf.top.text import UNKNOWN
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_HELD_IDLE,
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    Report,
    TraceState,
)
from tests.top.serving import make_report

WINDOW = "8c1f0a9d2b7e4410"


def traced(state: TraceState, **fields: object) -> Report:
    """A report of three jobs, of which the second has a window."""
    report = make_report(21)
    status = report.traces.add(
        id=WINDOW, state=state, seconds=25, targets=2, launches=12_345, cost_share=0.004
    )
    status.identity.CopyFrom(report.jobs[1].identity)
    for name, value in fields.items():
        setattr(status, name, value)
    return report


def states(snap: Values) -> dict[str, str]:
    """What stands in the table's column."""
    titles, *rows = (line for line in plain.render(snap).splitlines() if line.startswith(("JOB", "slurm/")))
    place = titles.index("STATE")
    return {row.split()[0]: row[place : place + 9].split("  ")[0].strip() for row in rows}


def panel(snap: Values, number: int = 1) -> list[str]:
    job = snap["jobs"][number]
    return [line for line, _ in detail.lines(job["key"], job, snap, None, detail.ProcessRates(), 200)]


def test_a_job_with_an_open_window_is_marked_and_its_panel_says_which() -> None:
    snap = snapshot(make_report(20), traced(TRACE_STATE_OPEN, rule="launch_bound", from_ns=10**18))
    assert states(snap) == {"slurm/4411": "running", "slurm/4412": "traced", "slurm/4413": "held idle"}
    assert [job["window"] is None for job in snap["jobs"]] == [True, False, True]
    window = snap["jobs"][1]["window"]
    assert (window["id"], window["state"], window["rule"], window["from_ns"]) == (
        WINDOW,
        "open",
        "launch_bound",
        10**18,
    )
    assert snap["jobs"][1]["state"] == "running"  # it is
    said = "deep trace: open, by rule launch_bound, 25 s long · 12.3k launches · cost 0.4%"
    assert said in panel(snap)
    assert not any(line.startswith("deep trace") for line in panel(snap, 0))


def test_a_window_that_waits_or_was_shortened_says_so_and_one_that_is_over_is_none() -> None:
    snap = snapshot(
        make_report(20), traced(TRACE_STATE_WAITING, reason="shortened\x1b[2J", seconds=float("nan"))
    )
    (line,) = (line for line in panel(snap) if line.startswith("deep trace"))
    assert line.startswith(f"deep trace: waiting, asked for, {UNKNOWN} long · ")
    assert states(snap)["slurm/4412"] == "running"
    assert line.endswith("shortened\N{REPLACEMENT CHARACTER}[2J")
    assert snapshot(make_report(20), traced(TRACE_STATE_DONE))["jobs"][1]["window"] is None


def test_a_window_of_another_run_of_the_job_is_not_its_own() -> None:
    report = traced(TRACE_STATE_OPEN)
    report.traces[0].identity.run += 1
    assert [job["window"] for job in snapshot(make_report(20), report)["jobs"]] == [None] * 3


def test_what_is_held_idle_or_stale_stays_so() -> None:
    report = traced(TRACE_STATE_OPEN)
    report.jobs[1].state = JOB_STATE_HELD_IDLE
    assert states(snapshot(make_report(20), report))["slurm/4412"] == "held idle"
    assert states(snapshot(make_report(20), traced(TRACE_STATE_OPEN), 60.0))["slurm/4412"] == "stale"
