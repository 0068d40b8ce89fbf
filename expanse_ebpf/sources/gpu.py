"""Source "gpu": every NVIDIA GPU of the node, and which job holds and uses it.

What NVML says comes from a process of its own (expanse_ebpf/nvml), who holds what is worked out here by
expanse_ebpf/gpu; docs/gpu-ownership.md has the rules.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from expanse_ebpf.gpu.account import Account
from expanse_ebpf.gpu.bounds import shorten
from expanse_ebpf.gpu.claims import ClaimReader, Gathered, who
from expanse_ebpf.gpu.identifiers import Devices
from expanse_ebpf.gpu.ownership import GIVEN, Claims, JobHolds, Ownership, Who, resolve
from expanse_ebpf.gpu.pod_resources import PodResources
from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.devices import Devices as SeenDevices
from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuHold, GpuSample

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report

_log = logging.getLogger(__name__)
_PROFILED = ("sm_active_ns", "profiled_ns")
_NOBODYS_BYTES = 1 << 30  # of a GPU's memory, which the driver takes for itself


def create(context: Context) -> GpuSource:
    """The source as the configuration wants it."""
    config = context.config.gpu
    pods = partial(PodResources, config.pod_resources) if config.pod_resources else None
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
        self._devices = SeenDevices()
        self._accounts: dict[Job, Account] = {}
        self._shared: frozenset[str] = frozenset()  # GPUs that are not one job's alone
        self._resolved: tuple[tuple[Devices, dict[Who, Claims]], Ownership] | None = None

    def start(self) -> None:
        """Get ready: the worker is begun in the first tick in which there is a driver."""
        self._claims.start()

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
        ownership = self._resolve(gathered)
        self.unavailable = {f"gpu {name}": reasons.sentence(code) for name, code in absent.items()}
        self.unavailable |= self._claims.unavailable
        for sample in samples:
            held = ownership.devices[sample.uuid]
            sample.holders.extend(held.holders)
            sample.conflicts.extend(held.conflicts)
        for event in events:
            if event.uuid in ownership.devices:
                event.holders.extend(ownership.devices[event.uuid].holders)
            _tell(event)
        self._fill_jobs(jobs, samples, gathered, ownership)
        shorten(samples, events)
        report.gpus.extend(samples)
        report.gpu_events.extend(events)
        self._devices.end_tick()

    def _resolve(self, gathered: Gathered) -> Ownership:
        """Who holds what; as in the last tick when nobody says anything else."""
        asked = (gathered.devices, gathered.claims)
        if self._resolved is None or self._resolved[0] != asked:
            self._resolved = (asked, resolve(*asked))
        return self._resolved[1]

    def _fill_jobs(
        self,
        jobs: Sequence[tuple[Job, JobSample]],
        samples: Sequence[GpuSample],
        gathered: Gathered,
        ownership: Ownership,
    ) -> None:
        answered = {sample.uuid: sample for sample in samples if sample.state == "ok"}
        own_ns = self._use_by_job(answered, gathered, ownership)
        shared: set[str] = set()
        for job, sample in jobs:
            one = who(job)
            holds, memory = ownership.jobs[one], gathered.credited.memory.get(one)
            account = self._accounts.get(job)
            if account is None:
                if not (holds.holds or holds.conflicts or holds.unknown or memory):
                    continue
                account = self._accounts[job] = Account()
            alone = {
                hold.uuid
                for hold in holds.holds
                if hold.uuid in answered and _alone(one, hold, gathered, ownership)
            }
            shared.update(h.uuid for h in holds.holds if h.uuid not in alone and h.uuid in answered)
            self._fill_job(sample, holds, account, answered, alone, own_ns.get(one, {}))
            if memory is not None:
                sample.gpu.memory_bytes = memory
            elif holds.holds and all(_has_no_strangers(answered.get(hold.uuid)) for hold in holds.holds):
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
        self, answered: Mapping[str, GpuSample], gathered: Gathered, ownership: Ownership
    ) -> dict[Who, dict[str, int | None]]:
        """By job and shared GPU, for how long its processes kept it busy since the last round, in ns.

        None where somebody who is not known is on the GPU: that may be a process of the job's.
        """
        found: dict[Who, dict[str, int | None]] = {}
        for uuid in self._shared & answered.keys():
            use = self._devices.line(uuid).get("by_process")
            if not isinstance(use, dict) or "by_process" in answered[uuid].unavailable:
                continue
            numbers = gathered.credited.numbers.get(uuid, {})
            known = None not in gathered.credited.users.get(uuid, ()) and all(int(n) in numbers for n in use)
            for one, holds in ownership.jobs.items():
                if any(hold.uuid == uuid for hold in holds.holds):
                    mine = sum(busy_ns for number, busy_ns in use.items() if numbers.get(int(number)) == one)
                    found.setdefault(one, {})[uuid] = mine if known else None
        return found

    def stop(self) -> None:
        """End the worker, and ask the kubelet no more."""
        self._client.stop()
        self._claims.stop()


def _alone(one: Who, hold: GpuHold, gathered: Gathered, ownership: Ownership) -> bool:
    """Whether all that the GPU, or the instance, does is done for the job, which holds it.

    What was given to one job is that job's, unless another one's process is on it. Where only its own
    environment gave it to the job, or nobody did, it is so while every process on it is the job's; and a
    variable that says where to look for GPUs gives nothing.
    """
    if hold.sharers > 1 or hold.source in ("environment", "open_files"):
        return False
    devices = (hold.uuid, *gathered.devices.instances(hold.uuid))
    users = set().union(*(gathered.credited.users.get(uuid, ()) for uuid in devices))
    if not users <= ({one, None} if hold.source in GIVEN else {one}):
        return False
    key = f"{one.scheduler}/{one.id}", one.run
    return all(
        (f"{holder.scheduler}/{holder.id}", holder.run) == key
        for uuid in devices
        for holder in ownership.devices[uuid].holders
    )


def _has_no_strangers(sample: GpuSample | None) -> bool:
    """Whether NVML lists all processes on the device, and it is known of each whose it is.

    In a container without the node's pid namespace its lists are empty, however full the memory is.
    """
    if sample is None or sample.unresolved_processes or "processes" in sample.unavailable:
        return False
    return bool(sample.processes) or sample.memory_used_bytes < _NOBODYS_BYTES


def _tell(event: GpuEvent) -> None:
    """A line in the log: who reads that later has no report of the time."""
    what = f"Xid {event.xid}" if event.kind == "xid" else f"is {event.kind}"
    holders = ", ".join(h.name or f"{h.scheduler}/{h.id}" for h in event.holders[:8])
    _log.warning("GPU %s: %s; held by %s", event.uuid, what, holders or "nobody")
