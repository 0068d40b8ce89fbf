"""How the figures of GPUs are read out of a Report; the rules are those of `readers`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from expanse_ebpf.export.readers import NANO, Reader, Row
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobSample, Report

MAX_GPUS = 512  # on a node's page, MIG instances among them
MAX_HOLDERS = 256  # of one GPU
MAX_XIDS = 64  # of one GPU, those with the lowest codes; the others are added up
MAX_CAUSES = 16  # of throttling
OTHER = "other"

# nvmlClocksEventReason… of nvml.h. Bits that are not among them are `other`.
THROTTLE_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}
STATES = ("ok", "lost", "silent")

GPU_INFO = (
    *("name", "index", "minor", "pci_bus_id", "serial", "parent_uuid"),
    *("mig_profile", "gpu_instance", "compute_instance"),
)
# Of GPU_INFO, the numbers: absent is empty, not 0.
_NUMBERS = {"index", "minor", "gpu_instance", "compute_instance"}


def info(gpu: GpuSample) -> Iterator[Row]:
    """The values of GPU_INFO."""
    yield (
        tuple(
            str(getattr(gpu, name)) if name not in _NUMBERS or gpu.HasField(name) else "" for name in GPU_INFO
        ),
        1,
    )


def up(gpu: GpuSample) -> Iterator[Row]:
    """Whether NVML answers about it."""
    yield (), int(gpu.state == "ok")


def state(gpu: GpuSample) -> Iterator[Row]:
    """1 for the state that it is in, 0 for the others; none for a state that is not known here."""
    if gpu.state in STATES:
        yield from (((name,), int(gpu.state == name)) for name in STATES)


HOLDER_INFO = ("scheduler", "job_id", "run", "name", "source", "sharers")


def _holders(gpu: GpuSample) -> dict[tuple[str, str, str, str], str]:
    """Who holds it, each once, and the source that says so."""
    found: dict[tuple[str, str, str, str], str] = {}
    for holder in gpu.holders[:MAX_HOLDERS]:
        run = str(holder.run) if holder.id else ""
        found.setdefault((holder.scheduler, holder.id, run, holder.name), holder.source)
    return found


def holder_info(gpu: GpuSample) -> Iterator[Row]:
    """The values of HOLDER_INFO, for each holder."""
    holders = _holders(gpu)
    for who, source in holders.items():
        yield (*who, source, str(len(holders))), 1


def holders(gpu: GpuSample) -> Iterator[Row]:
    """How many hold it; 0 of one that is free."""
    yield (), len(_holders(gpu))


def conflicts(gpu: GpuSample) -> Iterator[Row]:
    """How many contradictions there are about who holds it."""
    yield (), len(gpu.conflicts)


def throttle_reasons(gpu: GpuSample) -> Iterator[Row]:
    """1 for each reason that NVML gives now, 0 for the others."""
    if gpu.HasField("throttle_reasons"):
        bits = gpu.throttle_reasons
        yield from (((name,), int(bool(bits & bit))) for bit, name in THROTTLE_REASONS.items())
        yield (OTHER,), int(bool(bits & ~sum(THROTTLE_REASONS)))


def throttled(gpu: GpuSample) -> Iterator[Row]:
    """Time for which it was throttled, by cause."""
    yield from _bounded(sorted(gpu.throttled_ns.items()), MAX_CAUSES, NANO)


def xids(gpu: GpuSample) -> Iterator[Row]:
    """Xid events, by code."""
    yield from _bounded(((str(code), count) for code, count in sorted(gpu.xids.items())), MAX_XIDS)


def _bounded(figures: Iterable[tuple[str, int]], most: int, divisor: float = 1) -> Iterator[Row]:
    """The first `most` figures, and the sum of the rest as OTHER."""
    sums: dict[str, int] = {}
    for place, (name, value) in enumerate(figures):
        key = name if place < most else OTHER
        sums[key] = sums.get(key, 0) + value
    yield from (((name,), value / divisor) for name, value in sums.items())


def processes(field: str) -> Reader:
    """How many processes NVML lists, or a count of some of them; none where there is no list.

    Processes on a MIG instance stand in its GPU's list. Where that is not shown whole the counts are known.
    """

    def read(gpu: GpuSample) -> Iterator[Row]:
        if gpu.state != "ok" or gpu.parent_uuid:
            return
        value = getattr(gpu, field)
        is_count = isinstance(value, int)
        if "processes" not in gpu.unavailable or (is_count and gpu.processes):
            yield (), value if is_count else len(value)

    return read


def profile(field: str) -> Reader:
    """A counter of the GPU profiler, by its source."""
    divisor = NANO if field.endswith("_ns") else 1

    def read(gpu: GpuSample) -> Iterator[Row]:
        if gpu.HasField("profile") and gpu.profile.HasField(field):
            yield (gpu.profile.source,), getattr(gpu.profile, field) / divisor

    return read


# ---- of jobs

HOLD_INFO = ("uuid", "source", "sharers")


def hold_info(job: JobSample) -> Iterator[Row]:
    """The values of HOLD_INFO, for each GPU that the job holds."""
    for hold in _holds(job).values():
        yield (hold.uuid, hold.source, str(hold.sharers)), 1


def _holds(job: JobSample) -> dict[str, Any]:
    return {hold.uuid: hold for hold in reversed(job.gpu.holds[:MAX_GPUS]) if hold.uuid}


def held(job: JobSample) -> Iterator[Row]:
    """How many GPUs and instances the job holds; of a job that has to do with GPUs."""
    if job.HasField("gpu"):
        yield (), len(_holds(job))


def said(field: str) -> Reader:
    """How many sentences or names there are in a repeated field of JobGpu."""

    def read(job: JobSample) -> Iterator[Row]:
        if job.HasField("gpu"):
            yield (), len(getattr(job.gpu, field))

    return read


# ---- of nodes


def gpus(report: Report) -> Iterator[Row]:
    """GPUs and MIG instances; none where NVML is not asked."""
    if report.gpus or (report.HasField("nvml") and report.nvml.up):
        instances = sum(bool(gpu.parent_uuid) for gpu in report.gpus)
        yield ("gpu",), len(report.gpus) - instances
        yield ("mig",), instances


def nvml_missing(report: Report) -> Iterator[Row]:
    """Why NVML does not answer."""
    if report.HasField("nvml") and not report.nvml.up:
        yield (report.nvml.code or "unknown", report.nvml.reason or "no reason given"), 1
