"""Which job holds which GPU, when six sources say it, some of them wrongly.

The order of trust and every rule stand in docs/gpu-ownership.md. A source that gives devices out
(device_cgroup, pod_resources, slurm) makes a holder of whoever it names; one that only sees them used
(processes, environment, open_files) makes one as long as nobody was given the device.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from expanse_ebpf.gpu.identifiers import NO_LIST, Devices, Named
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import GpuHold, GpuHolder

# By trust, the most trusted first; the words of GpuHold.source.
SOURCES = ("device_cgroup", "pod_resources", "slurm", "processes", "environment", "open_files")
GIVEN = SOURCES[:2]

MAX_HOLDERS = 64  # of a device that are named; the kubelet may share a GPU among thousands
_MAX_SENTENCES = 20  # of one job or device
_MAX_SENTENCE = 200  # characters


class Who(NamedTuple):
    """A job, or a pod that this node knows no job of: the latter has a name alone."""

    scheduler: str = ""
    id: str = ""
    run: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"{self.scheduler}/{self.id}" if self.scheduler else self.name


@dataclass(slots=True)
class Claims:
    """What every source says of one job, as UUIDs. A source that says nothing is None or empty."""

    device_cgroup: frozenset[str] | None = None  # all that the kernel lets it open; None: not limited
    # Devices and shares ("" for a whole one) that the kubelet gave it; None: it does not know the pod.
    pod_resources: Sequence[tuple[str, str]] | None = None
    slurm: Named = NO_LIST  # SLURM_JOB_GPUS or SLURM_STEP_GPUS
    environment: Named = NO_LIST  # CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES
    processes: Mapping[str, int] = field(default_factory=dict)  # device to a process that NVML lists there
    open_files: frozenset[str] = frozenset()
    shared: bool = False  # what SLURM gave it are shares of GPUs


@dataclass(slots=True)
class JobHolds:
    """What one job holds; the parts of JobGpu that tell it."""

    holds: list[GpuHold] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Held:
    """Who holds one device; the parts of GpuSample that tell it."""

    holders: list[GpuHolder] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)


class Ownership(NamedTuple):
    """The answer: every job of the question, and every device of the node."""

    jobs: dict[Who, JobHolds]
    devices: dict[str, Held]


class _Job:
    """One job's claims as the devices of the node, and what speaks against them."""

    def __init__(self, who: Who, claims: Claims, devices: Devices) -> None:
        self.who = who
        self.claims = claims
        self.conflicts: list[str] = []
        self.unknown: dict[str, None] = dict.fromkeys((*claims.slurm.unknown, *claims.environment.unknown))
        self._devices = devices
        pods = claims.pod_resources
        open_files = self._here(claims.open_files)
        if open_files and len(_gpus(open_files, devices)) == len(_gpus(devices, devices)) > 1:
            open_files = set()  # CUDA opens them all to see what there is
        # None: it says nothing. Only the first two can say that a job has no GPU.
        self.says: dict[str, set[str] | None] = {
            "device_cgroup": None if claims.device_cgroup is None else self._here(claims.device_cgroup),
            "pod_resources": None if pods is None else self._here(uuid for uuid, _ in pods),
            "slurm": self._here(claims.slurm.uuids) or None,
            "processes": self._here(claims.processes) or None,
            "environment": self._here(claims.environment.uuids) or None,
            "open_files": open_files or None,
        }
        self.source = next((source for source in SOURCES if self.says[source] is not None), "")
        self.held = set(self.says.get(self.source) or ())
        self.shares = set(self.held) if claims.shared else {uuid for uuid, share in pods or () if share}
        if self.source not in ("device_cgroup", "pod_resources"):
            self.unknown.update({f"{n} (SLURM counts MIG instances too)": None for n in claims.slurm.unclear})

    @property
    def rank(self) -> int:
        """How far down the order of trust its holds are from."""
        return SOURCES.index(self.source) if self.source else len(SOURCES)

    @property
    def allotted(self) -> bool:
        """Whether the source is one that gives GPUs out."""
        return self.source in (*GIVEN, "slurm")

    def _here(self, uuids: Iterable[str]) -> set[str]:
        """Those of `uuids` that the node has, and of a GPU and an instance of it the instance."""
        named = set(uuids)
        found = {uuid for uuid in named if uuid in self._devices}
        self.unknown.update(dict.fromkeys(sorted(named - found)))
        return found - {self._devices.parent(uuid) for uuid in found}

    # ---- one source against another ---------------------------------------------------------------

    def compare(self) -> None:
        """Name what the sources below the one that decides say against it."""
        for source in SOURCES[self.rank + 1 :]:
            said = self.says[source]
            if said is None:
                continue
            if self.allotted:
                self._compare_with_given(source, said)
            elif self.source == "processes" and source == "environment":
                # Not every device that it may use has to be in use, but the other way round.
                claims = self.claims.environment
                if not claims.by_index and not claims.unknown:
                    self._object(
                        self.source, self._beyond(self.held, said), f"which {claims.variable} does not name"
                    )

    def _compare_with_given(self, source: str, said: set[str]) -> None:
        if source == "slurm" and self._beyond(said, self.held):
            other = set(self.claims.slurm.otherwise)
            if other and not self._beyond(other, self.held):
                said = other  # on this node it counts as NVML does
        beyond, missing = self._beyond(said, self.held), self._beyond(self.held, said)
        if source == "environment":
            beyond -= self.claims.environment.by_index  # may count from 0 within what was given
        refused = "which it does not hold" if source == "processes" else self._refusal(self.source)
        self._object(source, beyond, refused)
        # Only these two are meant to name everything that a job has.
        whole = source == "slurm" and self.claims.slurm.variable == "SLURM_JOB_GPUS"
        if source == "pod_resources" or (whole and not self.claims.slurm.unknown + self.claims.slurm.unclear):
            self._object(self.source, missing, self._refusal(source))

    def _beyond(self, some: Iterable[str], others: Collection[str]) -> set[str]:
        """Those of `some` that are none of `others`, nor instances or the GPU of one."""
        return {one for one in some if not any(self._devices.related(one, other) for other in others)}

    def _object(self, source: str, uuids: Collection[str], why: str) -> None:
        for uuid in self._devices if uuids else ():
            if uuid in uuids:
                self.conflicts.append(f"{self._word(source, uuid)}, {why}")

    def give_up(self, uuid: str, holder: Who) -> None:
        """Not hold `uuid`, which was given to another job, after all."""
        self.held.discard(uuid)
        self._object(self.source, {uuid}, f"which {holder} holds")

    def _word(self, source: str, uuid: str) -> str:
        variable = (self.claims.slurm if source == "slurm" else self.claims.environment).variable
        return {
            "device_cgroup": f"the device cgroup allows {uuid}",
            "pod_resources": f"the kubelet gave it {uuid}",
            "slurm": f"{variable} names {uuid}",
            "processes": f"its process {self.claims.processes.get(uuid)} uses {uuid}",
            "environment": f"{variable} names {uuid}",
            "open_files": f"it has {uuid} open",
        }[source]

    def _refusal(self, source: str) -> str:
        return {
            "device_cgroup": "which the device cgroup does not allow",
            "pod_resources": "which the kubelet did not give it",
            "slurm": f"which {self.claims.slurm.variable} does not name",
        }[source]


def resolve(devices: Devices, claims: Mapping[Who, Claims]) -> Ownership:
    """Who holds each of `devices`, by what is claimed for every job. Never raises."""
    jobs = [_Job(who, claims[who], devices) for who in sorted(claims)]
    wanting: dict[str, list[_Job]] = {uuid: [] for uuid in devices}
    for job in jobs:
        job.compare()
        for uuid in job.held:
            wanting[uuid].append(job)
    holding = {uuid: _without_intruders(uuid, some) for uuid, some in wanting.items()}
    held = {uuid: _held(some) for uuid, some in holding.items()}
    for uuid, some in holding.items():
        contradiction = _contradiction(uuid, some)
        if contradiction:
            held[uuid].conflicts.append(contradiction)
        for job in some:
            for instance in devices.instances(uuid):
                _name_instance_of_others(job, uuid, instance, holding[instance], held[uuid])
    return Ownership(
        {
            job.who: JobHolds(
                [
                    GpuHold(uuid=uuid, source=job.source, sharers=len(holding[uuid]))
                    for uuid in (devices if job.held else ())
                    if uuid in job.held
                ],
                _bounded(job.conflicts),
                _bounded(job.unknown),
            )
            for job in jobs
        },
        {uuid: Held(it.holders, _bounded(it.conflicts)) for uuid, it in held.items()},
    )


def _without_intruders(uuid: str, jobs: list[_Job]) -> list[_Job]:
    """Those of `jobs` that hold the device: who was given it, if anybody, and not who only uses it.

    SLURM's list stands in the job's own environment. It counts for more than another variable and than a file
    that is open, but takes a GPU from nobody whose process is on it.
    """
    sources = {job.source for job in jobs}
    if sources & set(GIVEN):
        staying: Collection[str] = GIVEN
    elif "slurm" in sources:
        staying = ("slurm", "processes")
    else:
        return jobs
    holding = [job for job in jobs if job.source in staying]
    for job in jobs:
        if job.source not in staying:
            job.give_up(uuid, holding[0].who)
    return holding


def _contradiction(uuid: str, jobs: list[_Job]) -> str:
    """What is wrong with `jobs` all holding the device; empty for nothing."""
    names = ", ".join(f"{job.who} ({job.source})" for job in jobs[:MAX_HOLDERS])
    allotted = [job for job in jobs if job.allotted]
    if len(jobs) < 2 or not allotted or all(uuid in job.shares for job in jobs):
        return ""
    if len(allotted) < len(jobs):
        return f"allotted to one job, and used by another: {names}"
    return f"given to more than one job, and not as shares: {names}"


def _name_instance_of_others(job: _Job, gpu: str, instance: str, others: Iterable[_Job], held: Held) -> None:
    """A job has the whole GPU by a source that may not tell instances apart, and another an instance."""
    for other in others:
        if other.rank < job.rank:
            job.conflicts.append(f"it has all of {gpu} by {job.source}, but {other.who} has {instance} of it")
            held.conflicts.append(f"{job.who} has all of it by {job.source}, but {other.who} has {instance}")


def _held(jobs: list[_Job]) -> Held:
    """The holders, those by the most trusted sources first where not all can be named."""
    if len(jobs) <= MAX_HOLDERS:
        return Held([_holder(job) for job in jobs])
    named = sorted(jobs, key=lambda job: job.rank)[:MAX_HOLDERS]
    return Held([_holder(job) for job in named], [f"… and {len(jobs) - MAX_HOLDERS} more holders"])


def _holder(job: _Job) -> GpuHolder:
    who = job.who
    return GpuHolder(
        scheduler=clean(who.scheduler),
        id=clean(who.id),
        run=who.run,
        source=job.source,
        name=clean(who.name),
    )


def _gpus(uuids: Iterable[str], devices: Devices) -> set[str]:
    """The GPUs that these devices are or are parts of."""
    return {devices.parent(uuid) or uuid for uuid in uuids}


def _bounded(sentences: Collection[str]) -> list[str]:
    some = [clean(sentence, _MAX_SENTENCE) for sentence in islice(sentences, _MAX_SENTENCES)]
    more = len(sentences) - len(some)
    return [*some, f"… and {more} more"] if more else some
