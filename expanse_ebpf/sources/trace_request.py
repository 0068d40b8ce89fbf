"""What a request for a window means on this node: which job, from when on, how long, or why not."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.sources import trace_share
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    TRACE_STATE_BUDGET,
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_TARGETS,
    Evidence,
    TraceRequest,
    TraceState,
    TraceStatus,
)
from expanse_ebpf.wire.keys import matches, parse_key

if TYPE_CHECKING:
    from expanse_ebpf.config import TracingConfig
    from expanse_ebpf.jobs.job import Job

FARTHEST_S = 60.0  # that a window's start may lie ahead
MOST_EVIDENCE = 32
_LEAST_SHARE, _LEAST_COST = 0.001, 0.0001  # as in the settings


class RefusedError(Exception):
    """No window is opened: with which state, and why."""

    def __init__(self, state: TraceState, reason: str) -> None:
        super().__init__(reason)
        self.state = state
        self.reason = reason


def first_status(request: TraceRequest, state: TraceState, reason: str = "") -> TraceStatus:
    """How a request stands of which nothing is known yet but what it says."""
    status = TraceStatus(id=clean(request.id, 32), state=state, reason=reason, rule=clean(request.rule, 128))
    status.identity.scheduler, _, status.identity.id = clean(request.key).partition("/")
    status.identity.run = request.run
    return status


def open_already(status: TraceStatus, now_ns: int) -> RefusedError:
    """Why a job cannot have a window beside the one that stands so."""
    end_ns = max(status.start_ns, status.from_ns) + round(status.seconds * 1e9)
    if end_ns <= now_ns or status.state >= TRACE_STATE_DONE:
        why = f"window {status.id} of the job is just ending; try again in some seconds"
    else:
        until = time.strftime("%H:%M:%S", time.gmtime(end_ns // 10**9))
        why = f"window {status.id} of the job is open already, until {until} UTC; wait for its end"
    return RefusedError(TRACE_STATE_BUDGET, why)


def evidence(request: TraceRequest) -> list[Evidence]:
    """What the rule saw, as far as it is bounded."""
    found = []
    for given in request.evidence[:MOST_EVIDENCE]:
        found.append(Evidence(name=clean(given.name, 128), text=clean(given.text)))
        if given.HasField("value"):
            found[-1].value = given.value
    return found


def wanted(request: TraceRequest, uid: int | None, jobs: Iterable[Job]) -> Job:
    """The job that the user `uid` means (None: may see everything), the newest run of it.

    Raises RefusedError, and ConfigError for what is no key.
    """
    parse_key(request.key)
    found = [
        job
        for job in jobs
        if (uid is None or (job.identity.HasField("uid") and job.identity.uid == uid))
        and request.run in (0, job.identity.run)
        and matches(job.identity, request.key)
    ]
    key = clean(request.key)
    if not found:
        whose = "" if uid is None else " of yours"
        raise RefusedError(TRACE_STATE_NO_TARGETS, f"no job {key}{whose} is on this node")
    keys = sorted({job.key for job in found})
    if len(keys) > 1:
        several = clean(", ".join(keys))
        raise RefusedError(TRACE_STATE_FAILED, f"{key} means {len(keys)} jobs here, name one: {several}")
    job = max(found, key=lambda job: (job.state != JOB_STATE_ENDED, job.identity.run))
    if job.state == JOB_STATE_ENDED:
        raise RefusedError(TRACE_STATE_NO_TARGETS, f"the job {key} has ended")
    if job.pids is not None and not job.pids:
        raise RefusedError(TRACE_STATE_NO_TARGETS, f"the job {key} has no process on this node")
    return job


@dataclass(slots=True)
class Traced:
    """What a job has been traced, while it lives."""

    seconds: float = 0.0
    last_s: float | None = None  # when its last window ended; None: there was none


class Plan(NamedTuple):
    """A window that may be opened."""

    start_ns: int  # wall clock
    seconds: float
    cost_share: float
    reason: str  # why it is shorter than was asked for; empty: it is not


def plan(
    request: TraceRequest,
    config: TracingConfig,
    traced: Traced,
    *,
    local: bool,
    age_s: float,
    now_s: float,
    now_ns: int,
) -> Plan:
    """The window that a job may have of which `traced` is known, and whose age is `age_s` (seconds).

    `now_s` is by the clock of `Traced.last_s`, `now_ns` the wall clock. Figures that are no positive numbers
    count as not given. Who asks on this node (`local`) may give other shares than the settings; through a
    controller, which does not know who asks, nobody has more than they allow. Raises RefusedError.
    """
    start_ns = max(request.start_ns, now_ns)
    ahead_s = (start_ns - now_ns) / 1e9
    if ahead_s > FARTHEST_S:
        why = f"it is to begin {ahead_s:.0f} s from now, more than {FARTHEST_S:g} s: are the clocks right?"
        raise RefusedError(TRACE_STATE_FAILED, why)
    if request.rule and traced.last_s is not None:
        wait_s = traced.last_s + config.pause_s - now_s
        if wait_s > ahead_s:
            wait = trace_share.wait_of(wait_s)
            why = f"a rule may open the job's next window in {wait} (tracing.pause_s)"
            raise RefusedError(TRACE_STATE_BUDGET, why)
    run_share = trace_share.positive(request.run_share, config.run_share, 1.0 if local else config.run_share)
    cost_share = trace_share.positive(
        request.cost_share, config.cost_share, 1.0 if local else config.cost_share
    )
    verdict = trace_share.judge(
        trace_share.positive(request.seconds, config.window_s, math.inf),
        config.max_window_s,
        age_s + ahead_s,
        traced.seconds,
        max(run_share, _LEAST_SHARE),
        may_lift=local,
    )
    if not verdict.seconds:
        raise RefusedError(TRACE_STATE_BUDGET, verdict.reason)
    return Plan(start_ns, verdict.seconds, max(cost_share, _LEAST_COST), verdict.reason)
