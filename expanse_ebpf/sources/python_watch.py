"""Somebody looks at the Python stacks of a job, or of one process and what it forks."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError, UnknownJobError
from expanse_ebpf.jobs.processes import in_cgroup
from expanse_ebpf.sources.stack_counts import StackCounts, in_words
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, ProfilePart, WatchProfileRequest
from expanse_ebpf.wire.keys import matches, parse_key

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.python_stacks.interpreter import Refusal
    from expanse_ebpf.python_stacks.sampler import Count

_MOST_ANCESTORS = 64


class Status(NamedTuple):
    """What /proc/PID/status says of a process."""

    tgid: int
    parent: int
    uids: frozenset[int]  # real, effective, saved and of the file system


def status(pid: int, proc: str = "/proc") -> Status | None:
    """The process or thread `pid`; None when there is none."""
    try:
        with open(f"{proc}/{pid}/status", "rb") as file:
            fields = dict(line.partition(b":")[::2] for line in file.read(4096).splitlines())
        return Status(int(fields[b"Tgid"]), int(fields[b"PPid"]), frozenset(map(int, fields[b"Uid"].split())))
    except (OSError, KeyError, ValueError):
        return None


def lives(pid: int, proc: str = "/proc") -> bool:
    """Whether any thread of the process still runs: its first one may have exited before the others."""
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            state = file.read(4096).rpartition(b")")[2].split()[0]
        return state not in (b"Z", b"X") or len(os.listdir(f"{proc}/{pid}/task")) > 1  # noqa: PTH208
    except (OSError, IndexError):
        return False


class ProcessTree:
    """A process and what it has forked.

    A descendant is known by its line of parents, so one that was never looked at before its parent ended
    does not belong. With `uid` only processes that are wholly that user's count: a set-uid program's
    stacks are not its caller's to see.
    """

    def __init__(self, pid: int, uid: int | None = None, proc: str = "/proc") -> None:
        """Raises UnknownJobError when there is no such process, or none of the user's."""
        self._uid = uid
        self._proc = proc
        found = status(pid, proc)
        if found is None or (uid is not None and found.uids != {uid}):
            whose = "" if uid is None else " of yours"
            raise UnknownJobError(f"no process {pid}{whose}; it may have exited")
        self.pid = found.tgid
        self._known = {self.pid: True}

    def __contains__(self, pid: int) -> bool:
        line: list[int] = []
        at = pid
        while at not in self._known:
            found = status(at, self._proc)
            if found is None or len(line) >= _MOST_ANCESTORS:
                return False  # not for good: it was not seen
            line.append(at)
            if self._uid is not None and found.uids != {self._uid}:
                self._known[at] = False
                break
            at = found.parent
            if at <= 1:
                break
        belongs = self._known.get(at, False)
        for known in line:
            self._known[known] = belongs
        return belongs

    def seen(self, pid: int) -> bool:
        """Whether it is known of `pid` that it belongs, or that it does not."""
        return pid in self._known

    def alive(self) -> bool:
        """Whether any process of it is left."""
        return any(belongs and lives(pid, self._proc) for pid, belongs in self._known.items())


class ProfileWatch:
    """The stacks of some jobs as one client gets them: since its last part, each time.

    A user (`uid`) gets those of processes that are wholly theirs, which is looked at for each part: a job
    may run set-uid programs, and a process can become one. `over` says why nothing more will come;
    empty: more will. `collect` brings in what was sampled up to now, `done` is called when nobody looks
    any more.
    """

    def __init__(
        self,
        wants: Callable[[Job], bool],
        tree: ProcessTree | None,
        uid: int | None,
        rate_hz: int,
        collect: Callable[[], None],
        done: Callable[[ProfileWatch], None],
    ) -> None:
        self.over = ""
        self.note = ""
        self.wants = wants
        self.tree = tree
        self._uid = uid
        self._rate_hz = rate_hz
        self._collect = collect
        self._done = done
        self._labels: dict[int, dict[str, str]] = {}
        self._all_unplaced = 0
        self._begin()

    def _begin(self) -> None:
        self._counts = StackCounts()
        self._wanted: dict[Job, bool] = {}  # asked anew for each part: a job's user may become known
        self._theirs: dict[int, bool] = {}  # by process, likewise
        self._unplaced = 0
        self._time_ns, self._since = time.time_ns(), time.monotonic_ns()

    def take(self, job: Job, count: Count) -> None:
        """Add what was counted of `job`, as far as it is watched."""
        if job not in self._wanted:
            self._wanted[job] = self.wants(job)
        if self._wanted[job] and self._is_of_the_tree(job, count) and self._is_theirs(count.stack.pid):
            self._labels.setdefault(count.stack.slot, labels(job))
            self._counts.add(count)

    def _is_theirs(self, pid: int) -> bool:
        if self._uid is None or not pid:
            return True
        if pid not in self._theirs:
            found = status(pid)
            # Of one that is gone nobody can say any more whose it was.
            self._theirs[pid] = found is not None and found.uids == {self._uid}
        return self._theirs[pid]

    def _is_of_the_tree(self, job: Job, count: Count) -> bool:
        if self.tree is None:
            return True
        if count.stack.pid:
            belongs = count.stack.pid in self.tree
            if not belongs and not self.tree.seen(count.stack.pid):
                self._unplaced += count.samples
            return belongs
        # What is not resolved is known by its job alone. Where that has no other processes it belongs.
        belongs = all(each in self.tree for each in job.pids or ())
        self._unplaced += 0 if belongs else count.samples
        return belongs

    def look(self, jobs: Iterable[Job]) -> None:
        """See after each tick whether what is watched still lives."""
        if self.tree is not None and not self.tree.alive():
            self.over = self.over or "the process has ended"
        elif not any(self.wants(job) and job.state != JOB_STATE_ENDED for job in jobs):
            self.over = self.over or "the job has ended"

    def part(self, *, up_to_now: bool = False) -> ProfilePart:
        """What has come since the last part: up to the last tick, or up to now."""
        if up_to_now:
            self._collect()
        profile = self._counts.profile(
            rate_hz=self._rate_hz,
            time_ns=self._time_ns,
            duration_ns=time.monotonic_ns() - self._since,
            labels=lambda slot: self._labels.get(slot, {}),
        )
        unplaced = ""
        if self._unplaced:
            self._all_unplaced += self._unplaced
            unplaced = (
                f"{self._all_unplaced} samples of the job are left out: whether they are this process's "
                "is not known, for want of a stack or since theirs has ended"
            )
        self._begin()
        note = self.note or self.over or unplaced
        return ProfilePart(pprof=profile.SerializeToString(), note=note, rate_hz=self._rate_hz)

    def close(self) -> None:
        """Nobody looks any more."""
        self._done(self)


def told(refusal: Refusal | None) -> str:
    """Why a process has no stacks, in words; empty when it may have, and when it is only gone."""
    if refusal is None or refusal.reason == "exited":
        return ""
    return f"{in_words(refusal.reason)}: {refusal.detail}"


def labels(job: Job) -> dict[str, str]:
    """The labels that a job's stacks bear."""
    return {"job": job.key, "user": job.identity.user}


def wanted(
    request: WatchProfileRequest, uid: int | None, jobs: Iterable[Job]
) -> tuple[Callable[[Job], bool], ProcessTree | None]:
    """What a request means: which jobs, and which of their processes (None: all).

    `uid` None may see everything, anybody else their own. Raises UnknownJobError when there is nothing
    of that kind, UnavailableError when it cannot be sampled, ConfigError for what is no key.
    """
    if request.pid:
        tree = ProcessTree(request.pid, uid)
        mine = next((job for job in jobs if _holds(job, tree.pid)), None)
        if mine is None:
            raise UnknownJobError(f"process {request.pid} belongs to no job")
        return lambda job: job is mine, tree

    def wants(job: Job) -> bool:
        identity = job.identity
        return (
            (uid is None or (identity.HasField("uid") and identity.uid == uid))
            and request.run in (0, identity.run)
            and matches(identity, request.key)
        )

    parse_key(request.key)
    found = [job for job in jobs if wants(job)]
    if found and all(job.slot is None for job in found):
        raise UnavailableError(f"no accounting slot was free for {request.key}: it is not sampled")
    if not found:
        whose = "" if uid is None else " of yours"
        raise UnknownJobError(f"no job {request.key}{whose} is on this node")
    return wants, None


def _holds(job: Job, pid: int) -> bool:
    if job.state == JOB_STATE_ENDED or job.slot is None:
        return False
    return pid in (job.pids or ()) or (bool(job.identity.cgroup) and in_cgroup(pid, job.identity.cgroup))
