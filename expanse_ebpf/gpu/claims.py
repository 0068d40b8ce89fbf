"""What every source says of every job, gathered once a tick for ownership.resolve().

Each source is a module of its own; here they are asked, and their answers put into UUIDs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.gpu.device_cgroup import NOTHING, DeviceCgroups
from expanse_ebpf.gpu.identifiers import Devices
from expanse_ebpf.gpu.open_files import OpenFiles, parse_mig_minors
from expanse_ebpf.gpu.ownership import Claims, Who
from expanse_ebpf.gpu.pod_resources import Claim, PodResources
from expanse_ebpf.gpu.processes import PID_MAX, credit
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.jobs.slurm import GPU_SHARE
from expanse_ebpf.wire.collector_pb2 import GpuSample

_CAPS_S = 30.0  # how often the list of MIG's capability devices is read
_MAX_CAPS_BYTES = 4 << 20


class Gathered(NamedTuple):
    """All claims, and the devices that they are about."""

    devices: Devices
    claims: dict[Who, Claims]
    # By GPU or instance, then by the number that NVML lists: the key of the job whose process that is.
    listed: dict[str, dict[int, str]]


def who(job: Job) -> Who:
    """The job as ownership knows it."""
    return Who(job.identity.scheduler, job.identity.id, job.identity.run)


class ClaimReader:
    """Asks the sources. `pods` is None where the kubelet is not to be asked; `proc` is for tests."""

    def __init__(
        self, pods: PodResources | None, proc: str = "/proc", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cgroups = DeviceCgroups(proc, clock)
        self._files = OpenFiles(proc, clock)
        self._pods = pods
        self._proc = proc
        self._clock = clock
        self._caps: dict[int, tuple[int, int | None, int | None]] = {}
        self._caps_due = 0.0
        self._polls: dict[Job, int] = {}  # of pods: how often the kubelet had been asked when they came
        self.unavailable: dict[str, str] = {}

    def read(self, jobs: Iterable[Job], samples: Sequence[GpuSample]) -> Gathered:
        """One round. Says in the samples' `processes` whose each is; never raises."""
        jobs = list(jobs)
        devices = Devices(samples)
        owners = {pid: job.key for job in jobs for pid in job.pids or ()}
        # Of no job, but NVML has that number: it may be the host's own process.
        numbers = {s.uuid: [p.pid for p in s.processes if 0 < p.pid <= PID_MAX] for s in samples}
        for listed in numbers.values():
            for pid in listed:
                owners.setdefault(pid, "")
        self._files.look(owners.keys())
        self._read_caps(any(sample.parent_uuid for sample in samples))
        uses = credit(samples, devices, owners, self._files, self._caps)
        by_number = {
            sample.uuid: {
                number: process.job
                for number, process in zip(numbers[sample.uuid], sample.processes, strict=True)
                if process.job
            }
            for sample in samples
        }
        self.unavailable = {}
        pods = self._claims_of_pods()
        claims: dict[Who, Claims] = {}
        for job in jobs:
            said = Claims()
            said.device_cgroup = self._cgroups.allowed(job, samples)
            if samples and said.device_cgroup is None and self._cgroups.reason != NOTHING:
                self.unavailable["device cgroup"] = f"{job.key}: {self._cgroups.reason}"
            if job.identity.scheduler == "kubernetes":
                said.pod_resources = self._of_pod(job, pods, devices)
            said.slurm, said.environment = devices.of(job.identity)
            said.shared = job.identity.scheduler == "slurm" and GPU_SHARE in job.identity.labels
            said.processes = uses.get(job.key, {})
            said.open_files = self._opened(job, devices)
            claims[who(job)] = said
        # Pods that have a GPU and no job here: they are holders by their name.
        for (namespace, name), held in (pods or {}).items():
            claims[Who(name=f"{namespace}/{name}")] = Claims(pod_resources=_found(held, devices))
        self._forget(jobs)
        return Gathered(devices, claims, by_number)

    def close(self) -> None:
        """Stop asking the kubelet."""
        if self._pods is not None:
            self._pods.close()

    def _read_caps(self, wanted: bool) -> None:
        now = self._clock()
        if not wanted or now < self._caps_due:
            return
        self._caps_due = now + _CAPS_S
        try:
            with Path(f"{self._proc}/driver/nvidia-caps/mig-minors").open("rb") as file:
                self._caps = parse_mig_minors(file.read(_MAX_CAPS_BYTES).decode("ascii", "replace"))
        except OSError as error:
            self._caps = {}
            self.unavailable["mig capabilities"] = f"{error.filename}: {error.strerror}"

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
        if job not in self._polls:
            self._polls[job] = self._pods.polls
            self._pods.poke()
        return [] if self._pods.polls > self._polls[job] + 1 else None

    def _forget(self, jobs: Sequence[Job]) -> None:
        for gone in self._polls.keys() - set(jobs):
            del self._polls[gone]


def _found(held: Iterable[Claim], devices: Devices) -> list[tuple[str, str]]:
    """Devices and shares; a name that no device here has stays as it is, and will be told as unknown."""
    found: list[tuple[str, str]] = []
    for claim in held:
        meant = devices.find(claim.device_id, "index")
        found += [(uuid, meant.replica) for uuid in meant.uuids] if meant else [(claim.device_id, "")]
    return found
