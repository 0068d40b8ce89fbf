"""A job as the agent holds it while it lives."""

from __future__ import annotations

from dataclasses import dataclass, field

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_STARTING, JobIdentity, JobState


@dataclass(eq=False, slots=True)
class Job:
    """One run of a job on this node."""

    identity: JobIdentity
    # Absolute directory of the job's own cgroup, by hierarchy name (see jobs/hierarchies.py). Only
    # hierarchies in which the job has a cgroup of its own are here.
    directories: dict[str, str] = field(default_factory=dict)
    state: JobState = JOB_STATE_STARTING
    # User processes (thread group leaders); None: never counted.
    pids: frozenset[int] | None = None
    # Its row of totals in the kernel; None: there is none.
    slot: int | None = None

    @property
    def key(self) -> str:
        """As on the command line: SCHEDULER/ID."""
        return f"{self.identity.scheduler}/{self.identity.id}"
