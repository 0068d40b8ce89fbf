"""Source "gpu": every NVIDIA GPU of the node, and which job holds and uses it.

What NVML says comes from a process of its own (expanse_ebpf/nvml), who holds what is worked out here by
expanse_ebpf/gpu; docs/gpu.md has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from expanse_ebpf.gpu.account import Account
from expanse_ebpf.gpu.claims import ClaimReader, Gathered, who
from expanse_ebpf.gpu.ownership import GIVEN, JobHolds, Ownership, resolve
from expanse_ebpf.gpu.pod_resources import PodResources
from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.devices import Devices
from expanse_ebpf.wire.collector_pb2 import GpuHold, GpuSample

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report

_PROFILED = ("sm_active_ns", "profiled_ns")


def create(context: Context) -> GpuSource:
    """The source as the configuration wants it."""
    config = context.config.gpu
    pods = PodResources(config.pod_resources) if config.pod_resources else None
    client = Client(config, context.config.agent.interval_s)
    return GpuSource(client, ClaimReader(pods), profiler=config.profiler)


class GpuSource:
    """The node's GPUs. A node without a driver has none, and that is no failure."""

    name = "gpu"

    def __init__(self, client: Client, claims: ClaimReader, *, profiler: bool = False) -> None:
        self.unavailable: dict[str, str] = {}
        self._client = client
        self._claims = claims
        self._profiler = profiler
        self._devices = Devices()
        self._accounts: dict[Job, Account] = {}
        self._shared: frozenset[str] = frozenset()  # GPUs that are not one job's alone

    def start(self) -> None:
        """Nothing yet: the worker is begun in the first tick in which there is a driver."""

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in the GPUs, what happened to them, and each job's share."""
        wall_ns = time.time_ns()
        for line in self._client.tick(now, self._shared):
            self._devices.take(line, wall_ns)
        status, absent = self._client.status, self._client.absent
        if not self._client.present and not status.restarts and not status.up:
            return  # there is no driver and never was
        report.nvml.CopyFrom(status)
        samples, events = self._devices.report(status, self._client.listed, absent, wall_ns)
        gathered = self._claims.read((job for job, _ in jobs), samples)
        ownership = resolve(gathered.devices, gathered.claims)
        self.unavailable = {f"gpu {name}": reasons.sentence(code) for name, code in absent.items()}
        self.unavailable |= self._claims.unavailable
        for sample in samples:
            held = ownership.devices[sample.uuid]
            sample.holders.extend(held.holders)
            sample.conflicts.extend(held.conflicts)
        for event in events:
            if event.uuid in ownership.devices:
                event.holders.extend(ownership.devices[event.uuid].holders)
        self._fill_jobs(jobs, samples, gathered, ownership)
        report.gpus.extend(samples)
        report.gpu_events.extend(events)
        self._devices.end_tick()

    def _fill_jobs(
        self,
        jobs: Sequence[tuple[Job, JobSample]],
        samples: Sequence[GpuSample],
        gathered: Gathered,
        ownership: Ownership,
    ) -> None:
        answered = {sample.uuid: sample for sample in samples if sample.state == "ok"}
        memory = _memory_by_job(samples)
        own_ns = self._use_by_job(answered, gathered)
        shared: set[str] = set()
        for job, sample in jobs:
            holds = ownership.jobs[who(job)]
            account = self._accounts.get(job)
            if account is None:
                if not (holds.holds or holds.conflicts or holds.unknown or job.key in memory):
                    continue
                account = self._accounts[job] = Account()
            alone = {h.uuid for h in holds.holds if _alone(h, answered.get(h.uuid), job.key)}
            shared.update(h.uuid for h in holds.holds if h.uuid not in alone and h.uuid in answered)
            self._fill_job(sample, holds, account, answered, alone, own_ns.get(job.key, {}))
            if job.key in memory:
                sample.gpu.memory_bytes = memory[job.key]
            elif holds.holds and all(_all_resolved(answered.get(hold.uuid)) for hold in holds.holds):
                sample.gpu.memory_bytes = 0  # NVML lists all processes on what it holds: none is the job's
        # NVML tells the use by process of whole GPUs only.
        self._shared = frozenset(
            uuid for uuid in shared if not answered[uuid].parent_uuid and not answered[uuid].mig_enabled
        )
        for gone in self._accounts.keys() - {job for job, _ in jobs}:
            del self._accounts[gone]

    def _fill_job(
        self,
        sample: JobSample,
        holds: JobHolds,
        account: Account,
        answered: Mapping[str, GpuSample],
        alone: Collection[str],
        own_ns: Mapping[str, int | None],
    ) -> None:
        sample.gpu.holds.extend(holds.holds)
        sample.gpu.conflicts.extend(holds.conflicts)
        sample.gpu.unknown.extend(holds.unknown)
        missing: dict[str, str] = {}
        account.tick(holds.holds, answered, alone, own_ns, sample.gpu, missing)
        for name, reason in missing.items():
            if self._profiler or name not in _PROFILED:
                sample.unavailable[f"gpu.{name}"] = reason
        silent = [hold.uuid for hold in holds.holds if hold.uuid not in answered]
        if silent:
            sample.unavailable["gpu"] = f"no figures of {', '.join(silent[:4])}; see the GPU"

    def _use_by_job(
        self, answered: Mapping[str, GpuSample], gathered: Gathered
    ) -> dict[str, dict[str, int | None]]:
        """By job and shared GPU, for how long its processes kept it busy since the last round, in ns."""
        found: dict[str, dict[str, int | None]] = {}
        for uuid in self._shared & answered.keys():
            use = self._devices.line(uuid).get("by_process")
            if not isinstance(use, dict) or "by_process" in answered[uuid].unavailable:
                continue
            for holder in answered[uuid].holders:
                found.setdefault(f"{holder.scheduler}/{holder.id}", {}).setdefault(uuid, 0)
            for number, busy_ns in use.items():
                key = gathered.listed.get(uuid, {}).get(int(number))
                if key is not None:
                    by_gpu = found.setdefault(key, {})
                    by_gpu[uuid] = (by_gpu.get(uuid) or 0) + busy_ns
        return found

    def stop(self) -> None:
        """End the worker, and ask the kubelet no more."""
        self._client.stop()
        self._claims.close()


def _alone(hold: GpuHold, sample: GpuSample | None, key: str) -> bool:
    """Whether all that the GPU does is done for the job `key`, which holds it.

    What was given to one job is that job's, unless another one's process is on it. Where nobody gave it to
    anybody, it is so only while every process on it is the job's: a variable gives nothing.
    """
    if sample is None or hold.sharers > 1:
        return False
    if hold.source in GIVEN:
        return all(process.job in ("", key) for process in sample.processes)
    return hold.source == "processes" and all(process.job == key for process in sample.processes)


def _all_resolved(sample: GpuSample | None) -> bool:
    """Whether it is known of every process on the device whose it is."""
    return sample is not None and not sample.unresolved_processes and "processes" not in sample.unavailable


def _memory_by_job(samples: Sequence[GpuSample]) -> dict[str, int]:
    """GPU memory of each job's processes, by the job's key; jobs of which NVML tells none are left out."""
    found: dict[str, int] = {}
    for sample in samples:
        for process in sample.processes:
            if process.job and process.HasField("memory_bytes"):
                found[process.job] = found.get(process.job, 0) + process.memory_bytes
    return found
