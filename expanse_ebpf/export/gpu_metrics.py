# ruff: noqa: E501 (tables, one metric a line)
"""The metrics of GPUs and of NVML, declared as those in `metrics`."""

from __future__ import annotations

from expanse_ebpf.export import gpu_readers as read
from expanse_ebpf.export.declaration import gpu_metric as _gpu
from expanse_ebpf.export.declaration import job_metric as _job
from expanse_ebpf.export.declaration import node_metric as _node
from expanse_ebpf.export.readers import Reader, cases, figure, nothing, text, unavailable
from expanse_ebpf.wire.collector_pb2 import GpuSample

# Pairs of field and reason that are told apart. An instance lacks most of what NVML gives for whole GPUs.
MAX_REASONS = 200


def _kinds(field: str) -> Reader:
    """Both kinds of a counter of faults."""
    return cases(*(((kind,), figure(GpuSample, field.format(kind))) for kind in ("corrected", "uncorrected")))


# fmt: off
_PROFILE = (
    ("measured", "The time in which the profiler's other counters grew; their rate by its rate is a ratio."),
    ("graphics", "Time in which the graphics or compute engine was busy."),
    ("sm_active", "Time in which an SM had a warp, as a mean over the SMs."),
    ("sm_occupancy", "Time weighted with the warps on the SMs, of as many as fit."),
    ("tensor", "Time in which the tensor pipes were active, of the most they can do."),
    ("fp64", "Time in which the FP64 pipe was active."),
    ("fp32", "Time in which the FP32 pipe was active."),
    ("fp16", "Time in which the FP16 pipe was active."),
    ("integer", "Time in which the integer pipe was active."),
    ("dram", "Time weighted with the bandwidth of the GPU's memory that was used, of all there is."),
)

GPU_METRICS = (
    _gpu("info", "", "What the GPU is; join with it on (node, uuid). An instance of MIG has a parent_uuid.", "NVML", read.info, *read.GPU_INFO),
    _gpu("up", "0 or 1", "1 while NVML answers about the GPU.", "NVML", read.up),
    _gpu("state", "0 or 1", "1 for the state that the GPU is in.", "NVML", read.state, "state"),
    _gpu("timestamp_seconds", "seconds", "When the GPU was last read, by the node's clock (Unix time).", "agent", "time_ns!"),
    _gpu("holders", "holders", "Jobs and others that hold the GPU, as far as they are in the report: at most 64; 0: it is free.", "docs/gpu-ownership.md", read.holders),
    _gpu("holder_info", "", "Who holds the GPU, whose word that is, and how many share it. Someone whom the node knows no job of has a name alone.", "docs/gpu-ownership.md", read.holder_info, *read.HOLDER_INFO),
    _gpu("conflicts", "conflicts", "Contradictions about who holds the GPU.", "docs/gpu-ownership.md", read.conflicts),
    _gpu("busy_seconds_total", "seconds", "Time in which a kernel ran; counted from the agent's start.", "NVML's buffer of samples, each once", "busy_ns"),
    _gpu("measured_seconds_total", "seconds", "The time that those samples cover.", "NVML's buffer of samples, each once", "measured_ns"),
    _gpu("utilization_ratio", "ratio", "Share of NVML's last sampling period in which a kernel ran.", "NVML", "utilization"),
    _gpu("memory_utilization_ratio", "ratio", "Share of that period in which the GPU's memory was read or written.", "NVML", "memory_utilization"),
    _gpu("memory_used_bytes", "bytes", "Memory of the GPU in use, what the driver keeps for itself not included.", "NVML", "memory_used_bytes"),
    _gpu("memory_free_bytes", "bytes", "Memory of the GPU that is free.", "NVML", "memory_free_bytes"),
    _gpu("memory_reserved_bytes", "bytes", "Memory of the GPU that the driver keeps for itself.", "NVML", "memory_reserved_bytes"),
    _gpu("memory_size_bytes", "bytes", "All memory of the GPU.", "NVML", "memory_total_bytes"),
    _gpu("power_watts", "watts", "Power that the GPU draws.", "NVML", "power_mw"),
    _gpu("power_limit_watts", "watts", "Power limit that the driver enforces.", "NVML", "power_limit_mw"),
    _gpu("energy_joules_total", "joules", "Energy used since the driver was loaded.", "NVML", "energy_mj"),
    _gpu("temperature_celsius", "celsius", "Temperature of the GPU.", "NVML", "temperature_c"),
    _gpu("memory_temperature_celsius", "celsius", "Temperature of the GPU's memory.", "NVML", "memory_temperature_c"),
    _gpu("sm_clock_hertz", "hertz", "Clock of the SMs.", "NVML", "sm_clock_mhz"),
    _gpu("memory_clock_hertz", "hertz", "Clock of the GPU's memory.", "NVML", "memory_clock_mhz"),
    _gpu("sm_clock_max_hertz", "hertz", "Highest clock of the SMs.", "NVML", "sm_clock_max_mhz"),
    _gpu("memory_clock_max_hertz", "hertz", "Highest clock of the GPU's memory.", "NVML", "memory_clock_max_mhz"),
    _gpu("throttle_reason", "0 or 1", "1 for each reason for which the clocks are not higher now; gpu_idle is none to worry about.", "NVML", read.throttle_reasons, "reason"),
    _gpu("throttled_seconds_total", "seconds", "Time for which the clocks were held down, by cause. Causes overlap.", "NVML", read.throttled, "cause"),
    _gpu("pcie_transmit_bytes_total", "bytes", "Bytes sent by the GPU over PCIe.", "NVML", "pcie_sent_bytes"),
    _gpu("pcie_receive_bytes_total", "bytes", "Bytes received by the GPU over PCIe.", "NVML", "pcie_received_bytes"),
    _gpu("pcie_replays_total", "replays", "PCIe packets sent again.", "NVML", "pcie_replays"),
    _gpu("pcie_link_generation", "generation", "Generation of the PCIe link now.", "NVML", "pcie_generation"),
    _gpu("pcie_link_width", "lanes", "Lanes of the PCIe link now.", "NVML", "pcie_width"),
    _gpu("nvlinks", "links", "NVLinks of the GPU, those that are down among them.", "NVML", "nvlinks"),
    _gpu("nvlink_transmit_bytes_total", "bytes", "Payload sent by the GPU over all NVLinks.", "NVML", "nvlink_sent_bytes"),
    _gpu("nvlink_receive_bytes_total", "bytes", "Payload received by the GPU over all NVLinks.", "NVML", "nvlink_received_bytes"),
    _gpu("ecc_errors_total", "errors", "Memory errors since the driver was loaded.", "NVML, volatile counts", _kinds("ecc_{}"), "kind"),
    _gpu("ecc_errors_lifetime_total", "errors", "Memory errors in the GPU's life.", "NVML, aggregate counts", _kinds("ecc_{}_lifetime"), "kind"),
    _gpu("remapped_rows_total", "rows", "Rows of memory that were replaced, by the kind of their errors.", "NVML", _kinds("remapped_rows_{}"), "kind"),
    _gpu("row_remapping_pending", "0 or 1", "1 when rows will be replaced at the GPU's next reset.", "NVML", "remapping_pending"),
    _gpu("row_remapping_failed", "0 or 1", "1 when a row could not be replaced.", "NVML", "remapping_failed"),
    _gpu("xid_events_total", "events", "Xid events since the agent's start, by code.", "NVML events", read.xids, "xid"),
    _gpu("persistence_mode", "0 or 1", "1 when the driver stays with the GPU while nobody uses it.", "NVML", "persistence"),
    _gpu("mig_enabled", "0 or 1", "1 when the GPU is divided by MIG.", "NVML", "mig_enabled"),
    _gpu("ecc_enabled", "0 or 1", "1 when ECC is on.", "NVML", "ecc_enabled"),
    _gpu("processes", "processes", "Processes that NVML lists; those on MIG instances are their GPU's. Absent: not known, or more than are in the report.", "NVML", read.processes("processes")),
    _gpu("unresolved_processes", "processes", "Of these, those that no process which has the GPU open fits.", "NVML, /proc", read.processes("unresolved_processes")),
    _gpu("rejected_processes", "records", "Records in NVML's list that cannot be true.", "NVML", read.processes("rejected_processes")),
    *(_gpu(f"profile_{name}_seconds_total", "seconds", what, "GPM, or NVML's nearest figure", read.profile(f"{name}_ns"), "source") for name, what in _PROFILE),
    *(
        _gpu(f"profile_{link}_{way}_bytes_total", "bytes", f"Bytes {field} by the GPU over {title} as the profiler counts them, headers included.", "GPM", read.profile(f"{link}_{field}_bytes"), "source")
        for link, title in (("pcie", "PCIe"), ("nvlink", "NVLink")) for way, field in (("transmit", "sent"), ("receive", "received"))
    ),
)

JOB_GPU_METRICS = (
    _job("gpus", "GPUs", "GPUs and MIG instances that the job holds.", "docs/gpu-ownership.md", read.held),
    _job("gpu_hold_info", "", "A GPU or MIG instance that the job holds, whose word that is, and how many share it.", "docs/gpu-ownership.md", read.hold_info, *read.HOLD_INFO),
    _job("gpu_busy_seconds_total", "seconds", "Time in which the job's GPUs were busy while it held them, added up; of shared ones the job's part.", "NVML", "gpu.busy_ns"),
    _job("gpu_measured_seconds_total", "seconds", "The time in which that was measured, added up likewise.", "NVML", "gpu.measured_ns"),
    _job("gpu_sm_active_seconds_total", "seconds", "Time in which the SMs of the job's GPUs had a warp, added up.", "GPM", "gpu.sm_active_ns"),
    _job("gpu_profiled_seconds_total", "seconds", "The time in which that was measured, added up likewise.", "GPM", "gpu.profiled_ns"),
    _job("gpu_energy_joules_total", "joules", "Energy of the GPUs that the job held alone and whole.", "NVML", "gpu.energy_mj"),
    _job("gpu_power_watts", "watts", "Power of the GPUs that the job holds alone and whole.", "NVML", "gpu.power_mw"),
    _job("gpu_memory_bytes", "bytes", "GPU memory of the job's processes.", "NVML", "gpu.memory_bytes"),
    _job("gpu_memory_size_bytes", "bytes", "All memory of the GPUs and instances that the job holds.", "NVML", "gpu.memory_total_bytes"),
    _job("gpu_throttled_seconds_total", "seconds", "Time for which power, heat or a brake held down the clocks of the job's GPUs while it held them, added up; of causes that overlap the longest.", "NVML", "gpu.throttled_ns"),
    _job("gpu_conflicts", "conflicts", "Contradictions about what GPUs the job holds.", "docs/gpu-ownership.md", read.said("conflicts")),
    _job("gpu_unknown", "names", "GPUs that the job's variables name and the node has not got.", "docs/gpu-ownership.md", read.said("unknown")),
)

NVML_METRICS = (
    _node("gpus", "GPUs", "GPUs and MIG instances in the newest report.", "reports", read.gpus, "kind"),
    _node("unlisted_gpus", "GPUs", f"GPUs left out of the page: without a UUID, with that of another one, or past {read.MAX_GPUS}.", "reports", nothing),
    _node("unavailable_gpus", "GPUs", "GPUs and MIG instances that lack a figure, by figure and reason.", "reports", unavailable("gpus", MAX_REASONS), "field", "reason"),
    _node("nvml_up", "0 or 1", "1 while NVML answers; absent: it is not asked, or the node has no NVIDIA driver.", "agent", "nvml.up"),
    _node("nvml_unavailable_info", "", "Why NVML does not answer: a word for scripts and a sentence for people.", "agent", read.nvml_missing, "code", "reason"),
    _node("nvml_info", "", "The versions of the driver, of NVML, and of CUDA that the driver can run.", "NVML", text("nvml", "driver_version", "nvml_version", "cuda_version"), "driver_version", "nvml_version", "cuda_version"),
    _node("nvml_restarts_total", "restarts", "Times that the process which asks NVML was begun anew.", "agent", "nvml.restarts"),
    _node("nvml_sample_seconds", "seconds", "Time that NVML's last round took.", "agent", "nvml.sample_ns!"),
    _node("nvml_pss_bytes", "bytes", "Memory of the process that asks NVML; the collector's has it included.", "/proc/PID/smaps_rollup", "nvml.pss_bytes"),
    _node("nvml_cpu_seconds_total", "seconds", "CPU time of the process that asks NVML; the collector's has it included.", "its own clock", "nvml.cpu_ns"),
)
# fmt: on
