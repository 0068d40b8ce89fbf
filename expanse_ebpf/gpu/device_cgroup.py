"""Which GPUs the kernel lets a job open: the word of the device cgroup.

A v1 group has a list to be read. In v2 BPF programs decide; they are read and followed, see
device_program.py. Both are asked about the cgroups in which the job has processes, since SLURM and
container runtimes limit those and not always the job's own: a job may open what any of them may, and
where both kinds limit it, what both allow. device_rules.py has the rules by which that tells GPUs.

There are three answers: which GPUs; that nothing limits the job; and that it cannot be told, which is not
the same. What was known stays known while it cannot be read any more, as of a job that has ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.gpu.cgroup_tree import GONE, Tree, has_processes, read_tree, state
from expanse_ebpf.gpu.device_limits import LimitsReader, UnreadError
from expanse_ebpf.gpu.device_program import NotUnderstoodError
from expanse_ebpf.gpu.device_rules import Capabilities, DeviceNumbers
from expanse_ebpf.gpu.open_files import MigMinors, read_majors, read_mig_minors
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.wire.collector_pb2 import GpuSample

_REREAD_S = 30.0
# A runtime makes a cgroup first, then limits it, then fills it. So after a change each round reads for this
# long, but not once more within _REREAD_S: then a job that changes all the time is read so often only.
_SETTLING_S = 5.0
_FORGET_S = 90.0
_MAX_CGROUPS = 256  # of a job, in one hierarchy

# In one round, for all jobs together. What is left over comes first in the next.
_STATES = 2000  # cgroups that are looked at for a change
_CGROUPS = 500  # that are read
_STEPS = 40_000  # instructions of new programs that are followed, some 20 ms

_LIMITS = ("devices", "unified")  # names of the hierarchies that can limit devices

_Key = tuple[tuple[object, ...], ...]  # of what a device's numbers depend on
# The reasons that are no fault: the job may open everything, and there is nothing to open.
NOTHING = "nothing limits its devices"
_NO_GPU = "this node has no GPU"
_NOT_YET = "its cgroups were not looked at yet"


@dataclass(slots=True)
class _Answer:
    asked_at: float
    allowed: frozenset[str] | None = None
    reason: str = _NOT_YET
    devices: _Key = ()
    trees: dict[str, Tree] | None = None  # by hierarchy, the job's own cgroup first; None: never read
    empty: bool = True  # the job had no process
    read_at: float = 0.0
    changed: bool = True  # the last reading found other cgroups than the one before
    settles_from: float = 0.0
    due_since: float | None = None  # waits to be read
    looked_at: int = 0  # which of its cgroups was looked at for a change, the last time

    @property
    def known(self) -> bool:
        return self.allowed is not None or self.reason == NOTHING


class DeviceCgroups:
    """Answers for jobs, kept and renewed when a job's cgroups or the devices change, or after 30 s.

    Where many jobs are to be read at once it takes several rounds, those first that have waited longest.
    `proc` is where procfs lies, `clock` gives seconds that never go back.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""  # why the last answer of allowed() was None
        self._proc = proc
        self._clock = clock
        self._answers: dict[Job, _Answer] = {}
        self._reader = LimitsReader()
        self._round: object = None  # the devices of look()
        self._key: _Key = ()
        self._numbers: DeviceNumbers | None = None
        self._numbers_at = 0.0

    def look(
        self, jobs: Collection[Job], devices: Sequence[GpuSample], mig_minors: MigMinors | None = None
    ) -> None:
        """Begin a round: look at all `jobs`, as far as it goes. allowed() with the same `devices` answers.

        `devices` are all GPUs and MIG instances of the node; `mig_minors` is what read_mig_minors() gave, if
        the caller has it. Never raises.
        """
        self._look(jobs, devices, mig_minors)
        self._round = devices

    def allowed(self, job: Job, devices: Sequence[GpuSample]) -> frozenset[str] | None:
        """UUIDs of those of `devices` that the kernel lets `job` open; None: it does not tell, see `reason`.

        `devices` are all GPUs and MIG instances of the node. A job that is not of the round for them, see
        look(), is looked at by itself. Never raises.
        """
        if not devices:
            self.reason = _NO_GPU
            return None
        if devices is not self._round or job not in self._answers:
            self._look((job,), devices, None)
        answer = self._answers[job]
        self.reason = answer.reason
        return answer.allowed

    def limited(self, job: Job) -> bool:
        """Whether something may limit the job's devices and it cannot be told to which.

        Then numbers in its environment, which may count from 0 within the limits, mean nothing.
        """
        answer = self._answers.get(job)
        return answer is not None and not answer.known

    # ---- rounds -----------------------------------------------------------------------------------

    def _look(
        self, jobs: Collection[Job], devices: Sequence[GpuSample], mig_minors: MigMinors | None
    ) -> None:
        now = self._clock()
        self._forget(now)
        if not devices:
            return
        numbers = self._current(devices, mig_minors, now)
        share = max(1, _STATES // max(1, len(jobs)))
        due: list[tuple[float, Job]] = []
        for job in jobs:
            answer = self._answers.get(job)
            if answer is None:
                answer = self._answers[job] = _Answer(now)
            answer.asked_at = now
            if answer.due_since is None and self._outdated(answer, job, share, now):
                answer.due_since = now
            if answer.due_since is not None:
                due.append((answer.due_since, job))
        due.sort(key=lambda one: one[0])
        self._reader.steps, left = _STEPS, _CGROUPS
        for _, job in due:
            if left <= 0 or self._reader.steps <= 0:
                break
            left -= self._read(job, numbers, now)

    def _outdated(self, answer: _Answer, job: Job, share: int, now: float) -> bool:
        if answer.trees is None:
            return True
        since = now - answer.read_at
        return (
            since >= _REREAD_S
            or now - answer.settles_from < _SETTLING_S
            or answer.devices is not self._key
            or answer.empty != (not job.pids)
            or {name: tree[0].directory for name, tree in answer.trees.items()} != _directories(job)
            or (since >= _SETTLING_S and (answer.changed or _differs(answer, share)))
        )

    def _read(self, job: Job, numbers: DeviceNumbers, now: float) -> int:
        """Renew the job's answer, unless it has to wait; how many cgroups that were."""
        answer = self._answers[job]
        trees = {name: read_tree(directory, _MAX_CGROUPS) for name, directory in _directories(job).items()}
        allowed, reason, waits = None, "", False
        try:
            allowed = self._judge(trees, job.pids, numbers)
            reason = "" if allowed is not None else NOTHING
        except NotUnderstoodError as error:
            reason = f"the program that limits its devices is not understood: {error}"
        except UnreadError as error:
            waits = self._reader.steps <= 0
            allowed, reason = (answer.allowed, answer.reason) if answer.known else (None, str(error))
        except UnavailableError as error:
            reason = str(error)
        except OSError as error:
            unread = f"its cgroup cannot be read: {error.strerror}"
            allowed, reason = (answer.allowed, answer.reason) if answer.known else (None, unread)
        # Of a job whose processes have ended the cgroup that was limited may be gone, and its own is left.
        if reason != NOTHING or job.pids is None or job.pids or answer.allowed is None:
            answer.allowed, answer.reason = allowed, reason
        if not waits:
            self._was_read(answer, job, trees, now)
        return sum(len(tree) for tree in trees.values()) or 1

    def _was_read(self, answer: _Answer, job: Job, trees: dict[str, Tree], now: float) -> None:
        answer.changed = trees != answer.trees or answer.empty != (not job.pids)
        if answer.trees is None or (answer.changed and now - answer.settles_from >= _REREAD_S):
            answer.settles_from = now
        answer.trees, answer.empty, answer.devices = trees, not job.pids, self._key
        answer.read_at, answer.due_since = now, None

    def _current(
        self, samples: Sequence[GpuSample], mig_minors: MigMinors | None, now: float
    ) -> DeviceNumbers:
        key = _key(samples)
        if self._numbers is None or self._key != key or now - self._numbers_at >= _REREAD_S:
            capabilities = Capabilities()
            if any(sample.parent_uuid for sample in samples):
                if mig_minors is None:
                    try:
                        mig_minors = read_mig_minors(self._proc)
                    except OSError:
                        mig_minors = {}
                capabilities = Capabilities.of(read_majors(self._proc), mig_minors)
            if self._key != key:
                self._key = key
            self._numbers, self._numbers_at = DeviceNumbers(samples, capabilities), now
        return self._numbers

    def _forget(self, now: float) -> None:
        for job in [j for j, answer in self._answers.items() if now - answer.asked_at > _FORGET_S]:
            del self._answers[job]

    # ---- what the cgroups say ---------------------------------------------------------------------

    def _judge(
        self, trees: dict[str, Tree], pids: frozenset[int] | None, numbers: DeviceNumbers
    ) -> frozenset[str] | None:
        """What all of the hierarchies that limit devices allow; None: none does. Raises as _allowed_in()."""
        answers = [self._allowed_in(name, tree, pids, numbers) for name, tree in trees.items()]
        said = [answer for answer in answers if answer is not None]
        return numbers.with_whole(frozenset.intersection(*said)) if said else None

    def _allowed_in(
        self, hierarchy: str, tree: Tree, pids: frozenset[int] | None, numbers: DeviceNumbers
    ) -> frozenset[str] | None:
        """What any of the cgroups with one of `pids` may open; None: one of them may open everything.

        Without such a process it is what the job's own cgroup may open. Raises UnavailableError when a
        cgroup does not tell, OSError when it cannot be read.
        """
        own = tree[0].directory
        if len(tree) > _MAX_CGROUPS:
            # In none of them more is allowed than in the job's own, which a job cannot change.
            said = numbers.allowed(self._reader.read(hierarchy, own))
            if said is None:
                raise UnreadError(f"it has more than {_MAX_CGROUPS} cgroups")
            return said
        directories = [one.directory for one in tree if has_processes(one.directory, pids)]
        answers: list[frozenset[str]] = []
        for directory in directories or [own]:
            try:
                limits = self._reader.read(hierarchy, directory)
            except OSError as error:
                if directory != own and error.errno in GONE:
                    continue
                raise
            said = numbers.allowed(limits)
            if said is None:
                return None
            answers.append(said)
        if not answers:
            raise UnreadError("its cgroups have ended while they were read")
        return frozenset.union(*answers)


def _key(devices: Iterable[GpuSample]) -> _Key:
    return tuple(
        (d.uuid, d.parent_uuid, d.HasField("minor"), d.minor, d.gpu_instance, d.compute_instance)
        for d in devices
    )


def _directories(job: Job) -> dict[str, str]:
    return {name: job.directories[name] for name in _LIMITS if name in job.directories}


def _differs(answer: _Answer, share: int) -> bool:
    """Whether one of the job's cgroups has changed; `share` of them are looked at, in turn."""
    states = [one for tree in (answer.trees or {}).values() for one in tree]
    for _ in range(min(share, len(states))):
        answer.looked_at = (answer.looked_at + 1) % len(states)
        known = states[answer.looked_at]
        if known != state(known.directory):
            return True
    return False
