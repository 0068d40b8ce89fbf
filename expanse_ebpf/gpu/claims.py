"""What every source says of every job, gathered once a tick for ownership.resolve().

Each source is a module of its own; here they are asked, and their answers put into UUIDs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.gpu.device_cgroup import NOTHING, DeviceCgroups
from expanse_ebpf.gpu.identifiers import Devices, Named
from expanse_ebpf.gpu.open_files import OpenFiles, parse_mig_minors
from expanse_ebpf.gpu.ownership import Claims, Who
from expanse_ebpf.gpu.pod_resources import Claim, PodResources
from expanse_ebpf.gpu.processes import Credited, credit
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.jobs.slurm import GPU_SHARE
from expanse_ebpf.wire.collector_pb2 import GpuSample

_CAPS_S = 30.0  # how often the list of MIG's capability devices is read
_MAX_CAPS_BYTES = 4 << 20


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
        self._key: tuple[object, ...] = ()  # of what the devices' names depend on
        self._named: dict[Job, tuple[tuple[str, ...], tuple[Named, Named]]] = {}
        self._caps: dict[int, tuple[int, int | None, int | None]] = {}
        self._caps_due = 0.0
        self._why_no_caps = ""
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
        self._files.look(owners.keys())
        self._read_caps(any(sample.parent_uuid for sample in samples))
        credited = credit(samples, devices, owners, self._files, self._caps)
        pods = self._claims_of_pods()
        claims: dict[Who, Claims] = {}
        for job in jobs:
            said = claims[who(job)] = Claims()
            said.device_cgroup = self._cgroups.allowed(job, samples)
            if samples and said.device_cgroup is None and self._cgroups.reason != NOTHING:
                self.unavailable["device cgroup"] = f"{job.key}: {self._cgroups.reason}"
            if job.identity.scheduler == "kubernetes":
                said.pod_resources = self._of_pod(job, pods, devices)
            said.slurm, said.environment = self._names(job, devices)
            said.shared = job.identity.scheduler == "slurm" and GPU_SHARE in job.identity.labels
            said.processes = credited.uses.get(who(job), {})
            said.open_files = self._opened(job, devices)
        # Pods that have a GPU and no job here: they are holders by their name.
        for (namespace, name), held in (pods or {}).items():
            claims[Who(name=f"{namespace}/{name}")] = Claims(pod_resources=_found(held, devices))
        self._forget(jobs)
        return Gathered(devices, claims, credited)

    def _current(self, samples: Sequence[GpuSample]) -> Devices:
        """The devices by their names; the same object as long as nothing about those has changed."""
        key = tuple(
            (s.uuid, s.parent_uuid, s.index, s.minor, s.pci_bus_id, s.gpu_instance, s.compute_instance)
            for s in samples
        )
        if key != self._key:
            self._key, self._devices, self._named = key, Devices(samples), {}
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
            with Path(f"{self._proc}/driver/nvidia-caps/mig-minors").open("rb") as file:
                self._caps = parse_mig_minors(file.read(_MAX_CAPS_BYTES).decode("ascii", "replace"))
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

    def _claims_of_pods(self) -> dict[tuple[str, str], list[Claim]] | None:
        """A copy, out of which those that have a job are taken; None: the kubelet does not tell."""
        if self._pods is None:
            return None
        claims = self._pods.claims()
        if claims is None and self._pods.polls:  # there is a kubelet, or was
            self.unavailable["pod-resources"] = self._pods.reason
        return None if claims is None else dict(claims)

    def _of_pod(
        self, job: Job, pods: dict[tuple[str, str], list[Claim]] | None, devices: Devices
    ) -> list[tuple[str, str]] | None:
        if pods is None or self._pods is None:
            return None
        namespace, slash, name = job.identity.id.partition("/")
        held = pods.pop((namespace, name), None)
        if held is not None:
            return _found(held, devices)
        if not slash:  # its name is not known, so neither is what it was given
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
