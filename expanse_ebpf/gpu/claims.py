"""What every source says of every job, gathered once a tick for ownership.resolve().

Each source is a module of its own; here they are asked, and their answers put into UUIDs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from expanse_ebpf.gpu.device_cgroup import NOTHING, DeviceCgroups
from expanse_ebpf.gpu.identifiers import Devices, Named
from expanse_ebpf.gpu.open_files import MigMinors, OpenFiles, read_mig_minors
from expanse_ebpf.gpu.ownership import Claims, Who
from expanse_ebpf.gpu.pod_resources import Claim, PodResources
from expanse_ebpf.gpu.processes import Credited, credit
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.jobs.slurm import GPU_SHARE
from expanse_ebpf.wire.collector_pb2 import GpuSample

_CAPS_S = 30.0  # how often the list of MIG's capability devices is read


class Gathered(NamedTuple):
    """All claims, the devices that they are about, and whose processes are on those."""

    devices: Devices
    claims: dict[Who, Claims]
    credited: Credited[Who]


def who(job: Job) -> Who:
    """The job as ownership knows it."""
    return Who(job.identity.scheduler, job.identity.id, job.identity.run)


class ClaimReader:
    """Asks the sources, from start() to stop().

    `pods` makes the client of the kubelet, None where that is not to be asked; `proc` is for tests.
    """

    def __init__(
        self,
        pods: Callable[[], PodResources] | None,
        proc: str = "/proc",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cgroups = DeviceCgroups(proc, clock)
        self._files = OpenFiles(proc, clock)
        self._make_pods = pods
        self._pods: PodResources | None = None
        self._proc = proc
        self._clock = clock
        self._devices = Devices(())
        self._named: dict[Job, tuple[tuple[str, ...], tuple[Named, Named]]] = {}
        self._caps: MigMinors = {}
        self._caps_due = 0.0
        self._why_no_caps = ""
        # The kubelet's last answer, and what it means with these devices
        self._said: tuple[Mapping[tuple[str, str], list[Claim]], Devices, dict[str, Claims]] | None = None
        self._answers: dict[Job, int] = {}  # of pods: how often the kubelet had answered when they came
        self.unavailable: dict[str, str] = {}

    def start(self) -> None:
        """Begin to ask the kubelet."""
        if self._make_pods is not None and self._pods is None:
            self._pods = self._make_pods()

    def stop(self) -> None:
        """Ask the kubelet no more."""
        if self._pods is not None:
            self._pods.close()
            self._pods = None

    def read(self, jobs: Iterable[Job], samples: Sequence[GpuSample]) -> Gathered:
        """One round. Says in the samples' `processes` whose each is; never raises."""
        jobs = list(jobs)
        self.unavailable = {}
        devices = self._current(samples)
        owners: dict[int, Who | None] = {pid: who(job) for job in jobs for pid in job.pids or ()}
        # Of no job, but NVML has that number: it may be the host's own process.
        owners |= {p.pid: None for s in samples for p in s.processes if p.pid not in owners}
        self._files.look(owners.keys(), groups=owners)
        self._read_caps(any(sample.parent_uuid for sample in samples))
        self._cgroups.look(jobs, samples, self._caps)
        credited = credit(samples, devices, owners, self._files, self._caps)
        pods = self._claims_of_pods(devices)
        claims: dict[Who, Claims] = {}
        for job in jobs:
            said = claims[who(job)] = Claims()
            said.device_cgroup = self._cgroups.allowed(job, samples)
            if samples and said.device_cgroup is None and self._cgroups.reason != NOTHING:
                self.unavailable["device cgroup"] = f"{job.key}: {self._cgroups.reason}"
            if job.identity.scheduler == "kubernetes":
                said.pod_resources = self._of_pod(job, pods)
            said.slurm, said.environment = self._names(job, devices)
            if self._cgroups.limited(job):
                said.environment = _by_name(said.environment)
            said.shared = job.identity.scheduler == "slurm" and GPU_SHARE in job.identity.labels
            said.processes = credited.uses.get(who(job), {})
            said.open_files = self._opened(job, devices)
        if pods is not None:  # those that have a GPU and no job here: they are holders by their name
            known = {job.identity.id for job in jobs if job.identity.scheduler == "kubernetes"}
            claims |= {Who(name=name): said for name, said in pods.items() if name not in known}
        self._forget(jobs)
        return Gathered(devices, claims, credited)

    def _current(self, samples: Sequence[GpuSample]) -> Devices:
        """The devices by their names; the same object as long as nothing about those has changed."""
        if not self._devices.same(samples):
            self._devices, self._named = Devices(samples), {}
        return self._devices

    def _names(self, job: Job, devices: Devices) -> tuple[Named, Named]:
        """What the job's environment names, looked up anew only when that has changed."""
        said = (job.identity.gpus_source, *job.identity.gpus)
        known = self._named.get(job)
        if known is None or known[0] != said:
            known = self._named[job] = (said, devices.of(job.identity))
        return known[1]

    def _read_caps(self, wanted: bool) -> None:
        if not wanted:
            return
        now = self._clock()
        if now < self._caps_due:
            if self._why_no_caps:
                self.unavailable["mig capabilities"] = self._why_no_caps
            return
        self._caps_due, self._why_no_caps = now + _CAPS_S, ""
        try:
            self._caps = read_mig_minors(self._proc)
        except OSError as error:
            self._caps = {}
            self._why_no_caps = self.unavailable["mig capabilities"] = f"{error.filename}: {error.strerror}"

    def _opened(self, job: Job, devices: Devices) -> frozenset[str]:
        found: set[str] = set()
        for pid in job.pids or ():
            opened = self._files.of(pid)
            if opened is not None and opened.any:
                found |= devices.opened(opened.minors, opened.caps, self._caps)
        return frozenset(found)

    # ---- pods -------------------------------------------------------------------------------------

    def _claims_of_pods(self, devices: Devices) -> dict[str, Claims] | None:
        """What the kubelet says, by "NAMESPACE/POD"; None: it does not tell."""
        if self._pods is None:
            return None
        said = self._pods.claims()
        if said is None:
            if self._pods.polls:  # there is a kubelet, or was
                self.unavailable["pod-resources"] = self._pods.reason
            return None
        # Looked up once for each answer: a kubelet may have thousands of pods and shares.
        if self._said is None or self._said[0] is not said or self._said[1] is not devices:
            found = {
                f"{namespace}/{name}": Claims(pod_resources=_found(held, devices))
                for (namespace, name), held in said.items()
            }
            self._said = (said, devices, found)
        return self._said[2]

    def _of_pod(self, job: Job, pods: dict[str, Claims] | None) -> Sequence[tuple[str, str]] | None:
        if pods is None or self._pods is None:
            return None
        if job.identity.id in pods:
            return pods[job.identity.id].pod_resources
        if "/" not in job.identity.id:  # its name is not known, so neither is what it was given
            return None
        # A pod that is younger than the last answer is not in it yet.
        if job not in self._answers:
            self._answers[job] = self._pods.answers
            self._pods.poke()
        return [] if self._pods.answers > self._answers[job] + 1 else None

    def _forget(self, jobs: Sequence[Job]) -> None:
        for kept in (self._answers, self._named):
            for gone in kept.keys() - set(jobs):
                del kept[gone]


def _found(held: Iterable[Claim], devices: Devices) -> list[tuple[str, str]]:
    """Devices and shares; a name that no device here has stays as it is, and will be told as unknown."""
    found: list[tuple[str, str]] = []
    for claim in held:
        meant = devices.find(claim.device_id, "index")
        found += [(uuid, meant.replica) for uuid in meant.uuids] if meant else [(claim.device_id, "")]
    return found


def _by_name(named: Named) -> Named:
    """Without what a number alone names: something limits the job, and within that it may count from 0."""
    uuids = tuple(uuid for uuid in named.uuids if uuid not in named.by_index)
    return named._replace(uuids=uuids, by_index=frozenset())
