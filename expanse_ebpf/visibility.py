"""What a user without root may see of a report: their own jobs, and the node's plain figures."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from expanse_ebpf.wire.collector_pb2 import (
    CollectorSample,
    GpuEvent,
    GpuHolder,
    GpuProcess,
    GpuSample,
    HostSample,
    JobIdentity,
    Report,
    SourceStatus,
)

# Of a GPU everyone sees the plain numbers, and of the rest these; what is added later stays with root.
GPU_FIELDS = frozenset(
    (
        *("uuid", "parent_uuid", "name", "pci_bus_id", "serial", "mig_profile", "state"),
        *("throttled_ns", "xids", "profile", "unavailable"),
    )
)
_ROOTS_GPU_FIELDS = tuple(
    field.name
    for field in GpuSample.DESCRIPTOR.fields
    if (field.message_type is not None or field.type in (field.TYPE_STRING, field.TYPE_BYTES))
    and field.name not in GPU_FIELDS
)
HIDDEN_CONFLICT = "not shown: it may name jobs of other users"

_Run = tuple[str, str, int]


def visible(report: Report, uid: int) -> Report:
    """What a user without root may see of `report`.

    Built from named parts, so that a field added to the message later stays with root.
    """
    host, collector = HostSample(), CollectorSample()
    host.CopyFrom(report.host)
    host.ClearField("overflow")  # a sum over other people's jobs
    collector.CopyFrom(report.collector)
    del collector.sources[:]
    collector.sources.extend(
        SourceStatus(name=s.name, up=s.up, reason=s.reason, sample_ns=s.sample_ns)
        for s in report.collector.sources
    )
    own = [job for job in report.jobs if job.identity.HasField("uid") and job.identity.uid == uid]
    runs = {_run(job.identity) for job in own}
    foreign = _names_of_others(report, runs)
    seen = Report(
        node=report.node,
        sequence=report.sequence,
        time_ns=report.time_ns,
        interval_ns=report.interval_ns,
        jobs=own,
        host=host,
        collector=collector,
        gpus=[_visible_gpu(gpu, runs, foreign) for gpu in report.gpus],
        gpu_events=[
            GpuEvent(
                time_ns=event.time_ns,
                uuid=event.uuid,
                kind=event.kind,
                xid=event.xid,
                holders=_visible_holders(event.holders, runs),
            )
            for event in report.gpu_events
        ],
        traces=[status for status in report.traces if _is_of(uid, runs, status.identity)],
    )
    if report.HasField("nvml"):
        seen.nvml.CopyFrom(report.nvml)
    # Where a list of holders was shortened, somebody may be named who is not in the report.
    shortened = any(words.startswith("…") for gpu in report.gpus for words in gpu.conflicts)
    for job in seen.jobs:
        if job.gpu.conflicts:
            # One that was cut may end in a part of a name.
            job.gpu.conflicts[:] = [
                HIDDEN_CONFLICT
                if shortened or words.endswith("…") or any(name in words for name in foreign)
                else words
                for words in job.gpu.conflicts
            ]
    return seen


def _run(job: JobIdentity | GpuHolder) -> _Run:
    return job.scheduler, job.id, job.run


def _is_of(uid: int, own: Collection[_Run], job: JobIdentity) -> bool:
    """Whether the job is one of `own`, or that user's and no longer in the report."""
    return _run(job) in own or (job.HasField("uid") and job.uid == uid)


def _names_of_others(report: Report, own: Collection[_Run]) -> set[str]:
    """Keys and names of everyone in the report but the jobs `own`."""
    everyone = [job.identity for job in report.jobs] + [h for gpu in report.gpus for h in gpu.holders]
    others = [one for one in everyone if _run(one) not in own]
    return {f"{one.scheduler}/{one.id}" if one.scheduler else one.name for one in others} - {""}


def _visible_gpu(gpu: GpuSample, own: Collection[_Run], foreign: Collection[str]) -> GpuSample:
    """A GPU, with an empty entry for each holder and process that is not of the jobs `own`.

    Of contradictions the number is told: the words may name any job.
    """
    # A process has its job's key without a run, and two users may give their jobs the same name.
    keys = {f"{scheduler}/{id}" for scheduler, id, _ in own}.difference(foreign)
    seen = GpuSample()
    seen.CopyFrom(gpu)
    for name in _ROOTS_GPU_FIELDS:
        seen.ClearField(name)
    seen.processes.extend(p if p.job in keys else GpuProcess() for p in gpu.processes)
    seen.holders.extend(_visible_holders(gpu.holders, own))
    seen.conflicts.extend(HIDDEN_CONFLICT for _ in gpu.conflicts)
    return seen


def _visible_holders(holders: Iterable[GpuHolder], own: Collection[_Run]) -> list[GpuHolder]:
    return [holder if _run(holder) in own else GpuHolder() for holder in holders]
