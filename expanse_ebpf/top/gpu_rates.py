"""From the GPU parts of reports to what is shown. A figure that is not known is None."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Final

from expanse_ebpf.export.gpu_readers import THROTTLE_REASONS
from expanse_ebpf.top.deltas import Deltas, Values, finite, iso_time, optional, ratio
from expanse_ebpf.wire.collector_pb2 import (
    GpuEvent,
    GpuHolder,
    GpuProcess,
    GpuProfile,
    GpuSample,
    JobGpu,
    NvmlStatus,
)

NO_THROTTLING: Final = "gpu_idle"  # the clocks are low for want of work
_TEXTS: Final = ("parent_uuid", "name", "pci_bus_id", "serial", "mig_profile", "state")
_PLAIN: Final = (
    *("index", "minor", "gpu_instance", "compute_instance", "mig_enabled", "persistence"),
    *("memory_used_bytes", "memory_free_bytes", "memory_reserved_bytes", "memory_total_bytes"),
    *("temperature_c", "memory_temperature_c"),
    *("sm_clock_mhz", "memory_clock_mhz", "sm_clock_max_mhz", "memory_clock_max_mhz"),
)
_UNITS: Final = (
    *("graphics", "sm_active", "sm_occupancy", "tensor", "fp64", "fp32", "fp16", "integer", "dram"),
)
_TOO_BUSY = "more than the time in which it was measured; this sample is not used"
_SLACK = 1.05  # a share of time above this is a bad sample


def throttle_words(bits: int | None) -> list[str] | None:
    """NVML's bits as words, those that are not known here as one hexadecimal number."""
    if bits is None:
        return None
    words = [word for bit, word in THROTTLE_REASONS.items() if bits & bit]
    unknown = bits & ~sum(THROTTLE_REASONS)
    return [*words, hex(unknown)] if unknown else words


def device(gpu: GpuSample, deltas: Deltas, parent_index: int | None = None) -> Values:
    """One GPU or MIG instance.

    `deltas` are those of its UUID, `parent_index` is the index of an instance's GPU.
    """
    used, total = optional(gpu, "memory_used_bytes"), optional(gpu, "memory_total_bytes")
    result: Values = {"uuid": gpu.uuid}
    result |= {name: getattr(gpu, name) or None for name in _TEXTS}
    result["parent_index"] = parent_index
    result |= {name: optional(gpu, name) for name in _PLAIN}
    result |= {
        "time": iso_time(gpu.time_ns) if gpu.time_ns else None,
        "busy_ratio": _share(deltas, "busy_ns", optional(gpu, "busy_ns"), _measured(deltas, gpu)),
        "utilization": _between_0_and_1(optional(gpu, "utilization")),
        "memory_utilization": _between_0_and_1(optional(gpu, "memory_utilization")),
        "memory_used_ratio": used / total if used is not None and total else None,
        "power_watts": _thousandths(optional(gpu, "power_mw")),
        "power_limit_watts": _thousandths(optional(gpu, "power_limit_mw")),
        "energy_joules": _thousandths(optional(gpu, "energy_mj")),
        "throttle_reasons": throttle_words(optional(gpu, "throttle_reasons")),
        "throttled_ratio": {
            cause: _throttled(deltas, cause, ns) for cause, ns in sorted(gpu.throttled_ns.items())
        },
        "pcie": {
            **_bytes_per_s(gpu, "pcie", deltas),
            **{name: optional(gpu, f"pcie_{name}") for name in ("replays", "generation", "width")},
        },
        "nvlink": {"links": optional(gpu, "nvlinks"), **_bytes_per_s(gpu, "nvlink", deltas)},
        "ecc": {
            name: optional(gpu, f"ecc_{name}")
            for name in (
                *("enabled", "corrected", "uncorrected"),
                *("corrected_lifetime", "uncorrected_lifetime"),
            )
        },
        "remapped_rows": {
            "corrected": optional(gpu, "remapped_rows_corrected"),
            "uncorrected": optional(gpu, "remapped_rows_uncorrected"),
            "pending": optional(gpu, "remapping_pending"),
            "failed": optional(gpu, "remapping_failed"),
        },
        "xids": {str(code): number for code, number in sorted(gpu.xids.items())},
        "processes": [_process(p) for p in gpu.processes if not _is_hidden(p)],
        "unresolved_processes": gpu.unresolved_processes,
        "rejected_processes": gpu.rejected_processes,
        "holders": [_holder(h) for h in gpu.holders if not _is_hidden(h)],
        # Of jobs that the reader may not see: the node's socket leaves an empty entry for each.
        "other_processes": sum(_is_hidden(p) for p in gpu.processes),
        "other_holders": sum(_is_hidden(h) for h in gpu.holders),
        "conflicts": list(gpu.conflicts),
        "profile": _profile(gpu.profile, deltas) if gpu.HasField("profile") else None,
    }
    result["unavailable"] = {**gpu.unavailable, **deltas.reasons}
    return result


def job(gpu: JobGpu, deltas: Deltas, instances: Collection[str]) -> Values:
    """What a job holds and uses; `instances` are the UUIDs of the node's MIG instances."""
    busy = deltas.delta("gpu.busy_ns", optional(gpu, "busy_ns"))
    measured = deltas.delta("gpu.measured_ns", optional(gpu, "measured_ns"))
    profiled = deltas.delta("gpu.profiled_ns", optional(gpu, "profiled_ns"))
    busy_ratio = _checked(deltas, "gpu.busy_ns", ratio(busy, measured))
    return {
        "count": len(gpu.holds),
        "mig_instances": sum(hold.uuid in instances or hold.uuid.startswith("MIG-") for hold in gpu.holds),
        "holds": [
            {"uuid": hold.uuid, "source": hold.source or None, "sharers": hold.sharers or None}
            for hold in gpu.holds
        ],
        "gpus_busy": None if busy is None or busy_ratio is None else busy[0] * 1e-9 / busy[1],
        "busy_ratio": busy_ratio,
        "sm_active_ratio": _share(deltas, "gpu.sm_active_ns", optional(gpu, "sm_active_ns"), profiled),
        "power_watts": _thousandths(optional(gpu, "power_mw")),
        "energy_joules": _thousandths(optional(gpu, "energy_mj")),
        "memory_bytes": optional(gpu, "memory_bytes"),
        "memory_total_bytes": optional(gpu, "memory_total_bytes"),
        "conflicts": list(gpu.conflicts),
        "unknown": list(gpu.unknown),
    }


def event(event: GpuEvent) -> Values:
    """Something that happened to a GPU since the report before."""
    return {
        "time": iso_time(event.time_ns),
        "uuid": event.uuid,
        "kind": event.kind or None,
        "xid": event.xid if event.kind == "xid" else None,
        "holders": [_holder(h) for h in event.holders if not _is_hidden(h)],
        "other_holders": sum(_is_hidden(h) for h in event.holders),
    }


def nvml(status: NvmlStatus, deltas: Deltas) -> Values:
    """How it stands with NVML; `deltas` are the node's."""
    return {
        "up": status.up,
        "code": status.code or None,
        "reason": status.reason or None,
        "driver_version": status.driver_version or None,
        "nvml_version": status.nvml_version or None,
        "cuda_version": status.cuda_version or None,
        "restarts": status.restarts,
        "sample_s": status.sample_ns / 1e9,
        "pss_bytes": optional(status, "pss_bytes"),
        "cpu_cores": deltas.cores("nvml.cpu_ns", optional(status, "cpu_ns")),
    }


def _measured(deltas: Deltas, gpu: GpuSample) -> tuple[int, float] | None:
    return deltas.delta("measured_ns", optional(gpu, "measured_ns"))


def _share(deltas: Deltas, name: str, value: int | None, measured: tuple[int, float] | None) -> float | None:
    """The share of the time in which it was measured that a counter of active time grew by."""
    return _checked(deltas, name, ratio(deltas.delta(name, value), measured))


def _checked(deltas: Deltas, name: str, share: float | None) -> float | None:
    if share is not None and share > _SLACK:
        deltas.bad += 1
        deltas.reasons[name] = _TOO_BUSY
        return None
    return None if share is None else min(share, 1.0)


def _throttled(deltas: Deltas, cause: str, value: int) -> float | None:
    share = deltas.rate(f"throttled_ns.{cause}", value, 1e-9)
    # The driver counts in steps of its own, so that an interval may get more than its share.
    return None if share is None else min(share, 1.0)


def _bytes_per_s(message: Any, link: str, deltas: Deltas, prefix: str = "") -> Values:
    return {
        f"{way}_bytes_per_s": deltas.rate(
            f"{prefix}{link}_{way}_bytes", optional(message, f"{link}_{way}_bytes")
        )
        for way in ("sent", "received")
    }


def _profile(profile: GpuProfile, deltas: Deltas) -> Values:
    measured = deltas.delta("profile.measured_ns", optional(profile, "measured_ns"))
    result: Values = {"source": profile.source or None}
    for unit in _UNITS:
        value = optional(profile, f"{unit}_ns")
        result[f"{unit}_ratio"] = _share(deltas, f"profile.{unit}_ns", value, measured)
    result["pcie"] = _bytes_per_s(profile, "pcie", deltas, "profile.")
    result["nvlink"] = _bytes_per_s(profile, "nvlink", deltas, "profile.")
    return result


def _is_hidden(message: GpuHolder | GpuProcess) -> bool:
    return not message.ByteSize()


def _holder(holder: GpuHolder) -> Values:
    key = f"{holder.scheduler}/{holder.id}" if holder.scheduler else None
    return {
        "key": key,
        "run": holder.run or None,
        "source": holder.source or None,
        "name": holder.name or None,
    }


def _process(process: GpuProcess) -> Values:
    return {
        "pid": process.pid,
        "kind": process.kind or None,
        "memory_bytes": optional(process, "memory_bytes"),
        "job": process.job or None,
        "resolved": process.resolved,
    }


def _thousandths(value: int | None) -> float | None:
    return None if value is None else value / 1000


def _between_0_and_1(value: float | None) -> float | None:
    value = finite(value)
    return value if value is not None and 0 <= value <= 1 else None
