"""What a watch of gpu_smoke has seen of each GPU, from its reports."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from expanse_ebpf.wire.collector_pb2 import GpuSample, Report

SHARES = ("graphics", "sm_active", "sm_occupancy", "tensor", "fp64", "fp32", "fp16", "integer", "dram")
RATES = ("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received")
# Figures of one moment that are compared with nvidia-smi's: its name to (field, what one of its units is).
MOMENTS = {
    "utilization.gpu": ("utilization", 0.01),
    "memory.used": ("memory_used_bytes", 2**20),
    "memory.total": ("memory_total_bytes", 2**20),
    "power.draw": ("power_mw", 1000),
    "temperature.gpu": ("temperature_c", 1),
    "clocks.sm": ("sm_clock_mhz", 1),
    "clocks.mem": ("memory_clock_mhz", 1),
}
_IDENTITY = ("name", "index", "minor", "pci_bus_id", "mig_enabled", "persistence", "state", "parent_uuid")


def summary(reports: Sequence[Report], pid: int) -> dict[str, Any]:
    """By GPU; `pid`: of the load, 0 for none."""
    status = reports[-1].nvml
    rounds = [r.nvml for r in reports if r.nvml.up]
    found: dict[str, Any] = {
        "reports": len(reports),
        "nvml": {"up": status.up, "code": status.code, "reason": status.reason, "restarts": status.restarts},
        "a round, ms": [r.sample_ns / 1e6 for r in rounds],
        "the worker, PSS in MiB": status.pss_bytes / 2**20,
        "the worker, CPU ms a round": [(b.cpu_ns - a.cpu_ns) / 1e6 for a, b in itertools.pairwise(rounds)],
        "pid of the load": pid,
        "gpus": {},
    }
    for uuid in dict.fromkeys(gpu.uuid for r in reports for gpu in r.gpus):
        seen = [(r, gpu) for r in reports for gpu in r.gpus if gpu.uuid == uuid and gpu.state == "ok"]
        if len(seen) > 2:  # the first one only begins
            found["gpus"][uuid] = _gpu([gpu for _, gpu in seen[1:]])
    for job in reports[-1].jobs:
        found["GPUs of the load"] = [f"{hold.uuid} by {hold.source}" for hold in job.gpu.holds]
        found["conflicts of the load"] = list(job.gpu.conflicts)
    found["events"] = [f"{e.kind} {e.xid} {e.uuid}" for r in reports for e in r.gpu_events]
    return found


def _gpu(samples: list[GpuSample]) -> dict[str, Any]:
    first, last = samples[0], samples[-1]
    seconds = (last.time_ns - first.time_ns) / 1e9
    found: dict[str, Any] = {name: getattr(last, name) for name in _IDENTITY}
    found["seconds"] = seconds
    if last.HasField("measured_ns") and last.measured_ns > first.measured_ns:
        measured = last.measured_ns - first.measured_ns
        found["busy"] = (last.busy_ns - first.busy_ns) / measured
        found["measured, share of the time"] = measured / 1e9 / seconds
    for name in ("utilization", "power_mw"):
        if last.HasField(name):
            found[f"{name}, mean"] = statistics.mean(getattr(sample, name) for sample in samples)
    if last.HasField("energy_mj") and first.HasField("energy_mj"):
        found["energy by its counter, W"] = (last.energy_mj - first.energy_mj) / 1e3 / seconds
    found["profile"] = _profile(first, last)
    found["moments"] = [
        {name: getattr(s, f) / u for name, (f, u) in MOMENTS.items() if s.HasField(f)}
        | {"time": s.time_ns / 1e9}
        for s in samples
    ]
    found["throttled"] = {k: v - first.throttled_ns[k] for k, v in last.throttled_ns.items()}
    found["processes"] = [f"{p.pid} {p.kind} {p.memory_bytes} {p.job or 'nobody'}" for p in last.processes]
    found["unresolved"], found["rejected"] = last.unresolved_processes, last.rejected_processes
    found["holders"] = [f"{h.scheduler}/{h.id} by {h.source}" for h in last.holders]
    found["there"] = sorted(field.name for field, _ in last.ListFields())
    found["missing"] = dict(last.unavailable)
    return found


def _profile(first: GpuSample, last: GpuSample) -> dict[str, Any]:
    before, after = first.profile, last.profile
    measured = after.measured_ns - before.measured_ns
    if measured <= 0:
        return {"source": after.source}
    found: dict[str, Any] = {"source": after.source, "measured s": measured / 1e9}
    for name in SHARES:
        if after.HasField(f"{name}_ns"):
            found[name] = (getattr(after, f"{name}_ns") - getattr(before, f"{name}_ns")) / measured
    for name in RATES:
        field = f"{name}_bytes"
        if after.HasField(field):
            found[f"{name}, MiB/s"] = (
                (getattr(after, field) - getattr(before, field)) / measured * 1e9 / 2**20
            )
    return found
