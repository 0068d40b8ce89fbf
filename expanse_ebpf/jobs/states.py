"""What a job's processes say about its state: pure rules."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from expanse_ebpf.jobs.paths import Place
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    JOB_STATE_STARTING,
    JobState,
)

Role = Literal["user", "slurmstepd", "pause"]


def process_role(place: Place, comm: str, uid: int | None) -> Role:
    """Whose process it is, by the place of its cgroup, its name (/proc/PID/comm) and its real user id.

    Only root's real user id makes a slurmstepd: a user cannot have that, not even through setuid.
    """
    if place.role == "slurmstepd":
        return "slurmstepd"
    if place.role == "conmon":
        return "pause"
    if place.scheduler == "slurm" and uid == 0:
        if comm == "slurmstepd":  # v1 has no cgroup of its own for it
            return "slurmstepd"
        if comm == "sleep" and place.step == "extern":  # the extern step's place holder
            return "slurmstepd"
    if place.scheduler == "kubernetes" and comm == "pause":
        return "pause"
    return "user"


def user_pids(roles: Mapping[int, Role]) -> frozenset[int]:
    """The processes that count as the job's."""
    return frozenset(pid for pid, role in roles.items() if role == "user")


def decide(
    scheduler: str, roles: Mapping[int, Role], *, had_processes: bool, populated: bool | None
) -> JobState:
    """The state of a job with these processes.

    `had_processes`: it has had any, or its cgroup was there before the agent. `populated` is the word
    of cgroup.events, None where there is none (v1). A job that its scheduler still holds, with nothing
    of the user's running, is idle and not over, however long that lasts.
    """
    if any(role == "user" for role in roles.values()):
        return JOB_STATE_RUNNING
    if roles:
        return JOB_STATE_HELD_IDLE if scheduler in ("slurm", "kubernetes") else JOB_STATE_RUNNING
    if populated:  # processes that cannot be seen from here, or came just now
        return JOB_STATE_RUNNING
    return JOB_STATE_ENDED if had_processes else JOB_STATE_STARTING
