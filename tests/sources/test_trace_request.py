"""What a request for a window means."""

from __future__ import annotations

import math
from typing import Any

import pytest

from expanse_ebpf.config import TracingConfig
from expanse_ebpf.errors import ConfigError
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.sources.trace_request import (
    FARTHEST_S,
    MOST_EVIDENCE,
    Plan,
    RefusedError,
    Traced,
    evidence,
    first_status,
    open_already,
    plan,
    wanted,
)
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_RUNNING,
    TRACE_STATE_BUDGET,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    Evidence,
    JobIdentity,
    TraceRequest,
    TraceStatus,
)

NOW_NS = 1_800_000_000 * 10**9
CONFIG = TracingConfig()


def job(id: str = "1", run: int = 1, pids: frozenset[int] | None = frozenset((7,)), **fields: Any) -> Job:
    made = Job(JobIdentity(scheduler="slurm", id=id, run=run, **fields))
    made.state, made.pids = JOB_STATE_RUNNING, pids
    return made


def ended(one: Job) -> Job:
    one.state = JOB_STATE_ENDED
    return one


def planned(age_s: float = 1e6, traced: Traced | None = None, local: bool = True, **fields: Any) -> Plan:
    request = TraceRequest(key="slurm/1", **fields)
    return plan(request, CONFIG, traced or Traced(), local=local, age_s=age_s, now_s=1000.0, now_ns=NOW_NS)


def refused(call: Any, *arguments: Any, **fields: Any) -> tuple[int, str]:
    with pytest.raises(RefusedError) as caught:
        call(*arguments, **fields)
    return caught.value.state, caught.value.reason


# ---- which job


def test_the_newest_run_that_lives_is_meant() -> None:
    old, new, gone = job(run=5), job(run=9), ended(job(run=11))
    for jobs in ([old, new, gone], [gone, new, old]):
        assert wanted(TraceRequest(key="slurm/1"), None, jobs) is new
    assert wanted(TraceRequest(key="slurm/1", run=5), None, [new, old]) is old


def test_other_peoples_jobs_are_as_unknown_as_none() -> None:
    mine, theirs, unknown = job("1", uid=1000), job("2", uid=1001), job("3")
    jobs = [mine, theirs, unknown]
    assert wanted(TraceRequest(key="slurm/1"), 1000, jobs) is mine
    assert wanted(TraceRequest(key="slurm/2"), None, jobs) is theirs
    for number in (2, 3, 4):
        assert refused(wanted, TraceRequest(key=f"slurm/{number}"), 1000, jobs) == (
            TRACE_STATE_NO_TARGETS,
            f"no job slurm/{number} of yours is on this node",
        )


@pytest.mark.parametrize(
    ("one", "state", "words"),
    [
        (ended(job()), TRACE_STATE_NO_TARGETS, "has ended"),
        (job(pids=frozenset()), TRACE_STATE_NO_TARGETS, "has no process"),
    ],
)
def test_a_job_without_processes_has_nothing_to_be_traced(one: Job, state: int, words: str) -> None:
    found, reason = refused(wanted, TraceRequest(key="slurm/1"), None, [one])
    assert (found, words in reason) == (state, True)


def test_a_job_whose_processes_were_not_counted_yet_may_have_some() -> None:
    one = job(pids=None)
    assert wanted(TraceRequest(key="slurm/1"), None, [one]) is one


def test_a_whole_array_is_too_much_for_one_window() -> None:
    jobs = [job("11", array="10_1"), job("12", array="10_2")]
    state, reason = refused(wanted, TraceRequest(key="slurm/10"), None, jobs)
    assert (state, reason) == (
        TRACE_STATE_FAILED,
        "slurm/10 means 2 jobs here, name one: slurm/11, slurm/12",
    )


def test_what_is_no_key_is_an_error_of_its_own() -> None:
    with pytest.raises(ConfigError):
        wanted(TraceRequest(key="train"), None, [])


# ---- how long, and from when on


def test_what_is_not_given_is_as_the_settings_have_it() -> None:
    assert planned() == Plan(NOW_NS, 25.0, 0.02, "")


@pytest.mark.parametrize("value", [math.nan, -3.0, -math.inf, math.inf])
def test_hostile_figures_count_as_not_given(value: float) -> None:
    assert planned(seconds=value, cost_share=value, run_share=value) == planned()


def test_people_on_the_node_may_have_other_shares_and_who_asks_the_controller_only_less() -> None:
    asked: dict[str, Any] = {"seconds": 1e300, "cost_share": 1e300, "run_share": 1e300}
    assert planned(age_s=0, **asked)[1:3] == (120.0, 1.0)
    for rule in ("", "slow"):
        far = planned(age_s=70, local=False, rule=rule, **asked)
        assert (far.seconds, far.cost_share) == (pytest.approx(30), 0.02)
        assert "tracing.run_share of the node" in far.reason
        assert planned(local=False, rule=rule, cost_share=0.01).cost_share == 0.01
        few = planned(age_s=99, local=False, rule=rule, run_share=0.01, seconds=5)
        assert few.seconds == pytest.approx(1)


def test_shares_near_nothing_are_the_least_that_can_be_set() -> None:
    assert planned(cost_share=1e-320).cost_share == 0.0001
    state, reason = refused(planned, age_s=1, run_share=1e-320)
    assert state == TRACE_STATE_BUDGET
    assert "at most 0.1 % of the run" in reason
    assert "possible in 9 min;" in reason


@pytest.mark.parametrize("start", [0, -(2**62), NOW_NS - 1, NOW_NS])
def test_a_start_that_is_past_is_now(start: int) -> None:
    assert planned(start_ns=start).start_ns == NOW_NS


def test_a_start_may_lie_a_little_ahead() -> None:
    near = NOW_NS + int(FARTHEST_S * 1e9)
    assert planned(start_ns=near).start_ns == near
    state, reason = refused(planned, start_ns=near + 1)
    assert (state, "clocks" in reason) == (TRACE_STATE_FAILED, True)
    assert refused(planned, start_ns=2**63 - 1)[0] == TRACE_STATE_FAILED
    # What the job will have run by then counts.
    assert planned(age_s=0, start_ns=NOW_NS + 7 * 10**9).seconds == pytest.approx(3)


def test_a_rule_waits_between_two_windows_and_people_do_not() -> None:
    traced = Traced(25.0, last_s=990.0)
    assert planned(traced=traced).seconds == 25
    assert refused(planned, traced=traced, rule="slow") == (
        TRACE_STATE_BUDGET,
        "a rule may open the job's next window in 50 s (tracing.pause_s)",
    )
    assert planned(traced=traced, rule="slow", start_ns=NOW_NS + 50 * 10**9).seconds == 25
    assert planned(traced=Traced(25.0, last_s=940.0), rule="slow").seconds == 25


def test_what_was_traced_before_counts() -> None:
    state, reason = refused(planned, age_s=100, traced=Traced(30.0, 0.0))
    assert (state, "possible in 2 s" in reason) == (TRACE_STATE_BUDGET, True)


def test_a_window_that_is_in_the_way_is_named_with_its_end() -> None:
    status = TraceStatus(id="8c1f", state=TRACE_STATE_OPEN, start_ns=NOW_NS, seconds=25)
    error = open_already(status, NOW_NS + 10**9)
    assert (error.state, error.reason) == (
        TRACE_STATE_BUDGET,
        "window 8c1f of the job is open already, until 08:00:25 UTC; wait for its end",
    )
    status.from_ns = NOW_NS + 2 * 10**9
    assert "until 08:00:27 UTC" in open_already(status, NOW_NS).reason
    ending = "window 8c1f of the job is just ending; try again in some seconds"
    assert open_already(status, NOW_NS + 28 * 10**9).reason == ending
    status.state = TRACE_STATE_FAILED
    assert open_already(status, NOW_NS).reason == ending


# ---- what is said of it


def test_the_first_status_says_what_was_asked_for_in_clean_words() -> None:
    request = TraceRequest(id="\x1b" * 100, key="run/\x07" + "x" * 1000, run=3, rule="\n" + "r" * 1000)
    status = first_status(request, TRACE_STATE_FAILED, "why")
    assert (status.identity.scheduler, status.identity.run, status.reason) == ("run", 3, "why")
    assert len(status.identity.id) < 300
    assert (status.identity.id + status.rule + status.id).isprintable()
    assert (len(status.rule), len(status.id)) == (128, 32)


def test_evidence_is_bounded_and_clean() -> None:
    given = [Evidence(name="busy\x1b" * 100, value=0.5), Evidence(name="note", text="\n" * 1000)] * 100
    found = evidence(TraceRequest(evidence=given))
    assert len(found) == MOST_EVIDENCE
    assert (found[0].value, found[1].HasField("value")) == (0.5, False)
    assert all((one.name + one.text).isprintable() and len(one.name + one.text) < 400 for one in found)
