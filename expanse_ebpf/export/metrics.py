# ruff: noqa: E501 (tables, one metric a line)
"""Every metric that Expanse exposes, declared once: its name, unit, meaning, source and how it is read.

The Prometheus page and docs/metrics.md are both made from `METRICS`. Nothing here imports
prometheus_client.
"""

from __future__ import annotations

from typing import Any

from expanse_ebpf.config import COUNTERS
from expanse_ebpf.export import readers
from expanse_ebpf.export.declaration import GPU, JOB, NODE, Metric
from expanse_ebpf.export.declaration import job_metric as _job
from expanse_ebpf.export.declaration import node_metric as _node
from expanse_ebpf.export.gpu_metrics import GPU_METRICS, JOB_GPU_METRICS, NVML_METRICS
from expanse_ebpf.export.readers import MICRO, NANO, cases, figure, hardware
from expanse_ebpf.wire.collector_pb2 import JobSample, Report

# fmt: off
_SOFTWARE = (
    ("page_faults", "events", "page_faults", "Page faults", "kernel counters, charged by BPF"),
    ("context_switches", "events", "context_switches", "Context switches", "kernel counters, charged by BPF"),
    ("cpu_migrations", "events", "migrations", "Moves of a task to another CPU", "scheduler, counted by BPF"),
    ("run_queue_wait_seconds", "seconds", "run_queue_wait_ns", "Time that runnable tasks waited for a CPU", "scheduler, charged by BPF"),
    ("on_cpu_seconds", "seconds", "run_ns", "Time on CPUs as the scheduler hook sees it", "scheduler, charged by BPF"),
    ("forks", "processes", "forks", "Processes made (threads are not counted)", "counted by BPF"),
    ("execs", "programs", "execs", "Programs executed", "counted by BPF"),
)
_NETWORK = (
    ("receive_bytes", "bytes", "received_bytes", "Bytes received"),
    ("transmit_bytes", "bytes", "sent_bytes", "Bytes sent"),
    ("receive_packets", "packets", "received_packets", "Packets received"),
    ("transmit_packets", "packets", "sent_packets", "Packets sent"),
    ("dropped_packets", "packets", "dropped_packets", "Packets dropped"),
    ("error_packets", "packets", "error_packets", "Packets with errors"),
)


def _counters(prefix: str, labels: tuple[str, ...], message: type[Any], path: str, whose: str) -> list[Metric]:
    """The families of one Counters message."""
    ratios = cases(*(((event,), hardware(message, f"{path}.{event}", "running_ratio")) for event in COUNTERS))
    return [
        *(
            Metric(f"{prefix}_{event}_total", "events", f"{event.replace('_', ' ').capitalize()} {whose}, scaled up to the whole time.", "PMU, charged by BPF", labels, hardware(message, f"{path}.{event}", "value"))
            for event in COUNTERS
        ),
        Metric(f"{prefix}_hardware_running_ratio", "ratio", f"Share of the time in which the hardware counter {whose} was really counting.", "PMU", (*labels, "event"), ratios),
        *(
            Metric(f"{prefix}_{name}_total", unit, f"{text} {whose}.", source, labels, figure(message, f"{path}.{field}", NANO if unit == "seconds" else 1))
            for name, unit, field, text, source in _SOFTWARE
        ),
    ]


_PRESSURE = cases(*(
    ((resource, share), figure(JobSample, f"{resource}_pressure.{share}_us", MICRO))
    for resource in ("cpu", "memory", "io") for share in ("some", "full")
))
_DELAYS = cases(*(
    ((cause,), figure(JobSample, f"delays.{cause}_ns", NANO))
    for cause in ("cpu", "block_io", "swap_in", "memory_reclaim")
))

JOB_METRICS = (
    _job("info", "", "Who the job is; join with it on (node, scheduler, job_id, run).", "cgroup path, slurmstepd, kubelet", readers.job_info, *readers.JOB_INFO),
    _job("state", "0 or 1", "1 for the state that the job is in.", "cgroup", readers.job_state, "state"),
    _job("processes", "processes", "The user's processes in the job.", "cgroup.procs", "processes"),
    _job("cpu_seconds_total", "seconds", "CPU time used by the job.", "cgroup: cpu.stat, cpuacct", "cpu_ns"),
    _job("cpu_user_seconds_total", "seconds", "CPU time used in user mode.", "cgroup: cpu.stat, cpuacct", "cpu_user_ns"),
    _job("cpu_system_seconds_total", "seconds", "CPU time used in the kernel.", "cgroup: cpu.stat, cpuacct", "cpu_system_ns"),
    _job("cpu_limit_cores", "cores", "CPU quota; absent: none.", "cgroup: cpu.max, cpu.cfs_quota_us", "cpu_limit_cores"),
    _job("cpu_throttled_seconds_total", "seconds", "Time for which the CPU quota held the job back.", "cgroup: cpu.stat", "throttled_ns"),
    _job("cpu_throttled_periods_total", "periods", "Periods in which the CPU quota ran out.", "cgroup: cpu.stat", "throttled_periods"),
    _job("owns_cpus", "0 or 1", "1 when the job's CPUs are its own and it is counted without the scheduler hook.", "cgroup: cpuset", "owns_cpus"),
    *_counters("expanse_job", JOB, JobSample, "counters", "of the job"),
    _job("memory_bytes", "bytes", "Memory charged to the job.", "cgroup: memory.current, memory.usage_in_bytes", "memory_bytes"),
    _job("memory_peak_bytes", "bytes", "Most memory that was ever charged to the job.", "cgroup: memory.peak, memory.max_usage_in_bytes", "memory_peak_bytes"),
    _job("memory_limit_bytes", "bytes", "Memory limit; absent: none.", "cgroup: memory.max, memory.limit_in_bytes", "memory_limit_bytes"),
    _job("memory_anon_bytes", "bytes", "Anonymous memory of the job.", "cgroup: memory.stat", "memory_anon_bytes"),
    _job("memory_file_bytes", "bytes", "Page cache of the job.", "cgroup: memory.stat", "memory_file_bytes"),
    _job("oom_kills_total", "processes", "Processes of the job killed for want of memory.", "cgroup: memory.events, memory.oom_control", "oom_kills"),
    _job("io_read_bytes_total", "bytes", "Bytes read from block devices.", "cgroup: io.stat, blkio", "io_read_bytes"),
    _job("io_write_bytes_total", "bytes", "Bytes written to block devices.", "cgroup: io.stat, blkio", "io_write_bytes"),
    _job("io_reads_total", "operations", "Reads from block devices.", "cgroup: io.stat, blkio", "io_read_ops"),
    _job("io_writes_total", "operations", "Writes to block devices.", "cgroup: io.stat, blkio", "io_write_ops"),
    _job("pressure_seconds_total", "seconds", "Time for which some of the job's tasks, or all (full), stood still for want of the resource.", "cgroup: cpu.pressure, memory.pressure, io.pressure", _PRESSURE, "resource", "share"),
    *(_job(f"network_{name}_total", unit, f"{text} in the job's own network namespace.", "netlink", f"network.{field}") for name, unit, field, text in _NETWORK),
    _job("python_samples_total", "samples", "Samples that found the job on a CPU, of which its Python stacks are made.", "perf event, read by BPF", "python.samples"),
    _job("python_unresolved_total", "samples", "Of these samples, those without a Python stack, by reason.", "perf event, read by BPF", readers.python_unresolved, "reason"),
    _job("python_loading_seconds_total", "seconds", "Time in which the job's Python threads waited or ran inside a data loader, summed over the threads; a loader's worker processes are left out.", "perf event and visits, read by BPF", "python.loading_ns"),
    _job("delay_seconds_total", "seconds", "Time that the job's threads waited, by cause.", "taskstats", _DELAYS, "cause"),
    *JOB_GPU_METRICS,
)

NODE_METRICS = (
    _node("node_up", "0 or 1", "1 while the node's reports keep coming; 0: its other series have ended.", "reports", readers.nothing),
    _node("node_info", "", "Which installation and boot the node's reports come from.", "agent", readers.text("node", "install_id", "boot_id"), "install_id", "boot_id"),
    _node("report_timestamp_seconds", "seconds", "When the newest report was made, by the node's clock (Unix time).", "reports", "time_ns!"),
    _node("report_interval_seconds", "seconds", "Time between the newest report and the one before it.", "reports", "interval_ns!"),
    _node("jobs", "jobs", "Jobs in the newest report.", "reports", readers.jobs),
    _node("unavailable_jobs", "jobs", "Jobs that lack a figure, by figure and reason.", "reports", readers.unavailable("jobs", readers.MAX_REASONS), "field", "reason"),
    _node("duplicate_jobs", "jobs", "Jobs left out of the page since they have no id or the id of another one.", "reports", readers.nothing),
    _node("unattributed_cgroups", "cgroups", "Cgroups of a form that is not known; they count as no job's.", "cgroup tree", "host.unattributed_cgroups"),
    _node("overflow_jobs", "jobs", "Jobs past the limit `agent.max_jobs`; they have no series of their own.", "agent", "host.overflow_jobs"),
    *_counters("expanse_overflow", NODE, Report, "host.overflow", "of all jobs past the limit"),
    *_counters("expanse_system", NODE, Report, "host.system", "of everything that belongs to no job"),
    _node("host_cpus_online", "CPUs", "CPUs that are online.", "/sys/devices/system/cpu/online", "host.cpus_online!"),
    _node("host_cpu_busy_seconds_total", "seconds", "CPU time in which some task ran, over all CPUs.", "/proc/stat", "host.cpu_busy_ns"),
    _node("host_load1", "tasks", "Load average over one minute.", "/proc/loadavg", readers.load),
    _node("host_memory_size_bytes", "bytes", "Memory of the host.", "/proc/meminfo", "host.memory_total_bytes"),
    _node("host_memory_available_bytes", "bytes", "Memory that could be given out without swapping.", "/proc/meminfo", "host.memory_available_bytes"),
    *(_node(f"host_network_{name}_total", unit, f"{text} by the interface.", "netlink", readers.interfaces(field), "interface") for name, unit, field, text in _NETWORK),
    _node("collector_info", "", "The agent's version, and how it charges CPU events: hook, owned or off.", "agent", readers.text("collector", "version", "cpu_mode"), "version", "cpu_mode"),
    _node("collector_cpu_seconds_total", "seconds", "CPU time used by the agent itself.", "getrusage", "collector.cpu_ns"),
    _node("collector_pss_bytes", "bytes", "The agent's memory, its share of shared pages included.", "/proc/self/smaps_rollup", "collector.pss_bytes"),
    _node("collector_rss_bytes", "bytes", "The agent's resident memory.", "/proc/self/smaps_rollup", "collector.rss_bytes"),
    _node("collector_tick_seconds", "seconds", "Time that the previous tick took.", "agent", "collector.tick_ns!"),
    _node("collector_ticks_missed_total", "ticks", "Ticks that did not happen at their time.", "agent", "collector.ticks_missed"),
    _node("collector_events_total", "events", "Lifecycle events sent by the BPF programs.", "BPF", "collector.events_submitted"),
    _node("collector_events_lost_total", "events", "Lifecycle events that found no room in the ring buffer.", "BPF", "collector.events_lost"),
    _node("collector_slots_exhausted_total", "cgroups", "Cgroups that got no accounting slot in the kernel.", "BPF", "collector.slots_exhausted"),
    _node("collector_reports_unsent", "reports", "Reports that wait for the controller's acknowledgement.", "agent", "collector.reports_unsent"),
    _node("collector_reports_dropped_total", "reports", "Reports lost since the agent started.", "agent", "collector.reports_dropped"),
    _node("bpf_program_run_seconds_total", "seconds", "Run time of the BPF program while it was measured.", "bpf_prog_info", readers.programs("run_ns", NANO), "program"),
    _node("bpf_program_runs_total", "runs", "Runs of the BPF program while it was measured.", "bpf_prog_info", readers.programs("runs"), "program"),
    _node("bpf_program_measured_seconds_total", "seconds", "Time for which the BPF program was measured; what it costs is run time by this.", "bpf_prog_info", readers.programs("measured_ns", NANO), "program"),
    _node("source_up", "0 or 1", "1 when the source of samples works.", "agent", readers.sources("up"), "source"),
    _node("source_sample_seconds", "seconds", "Time that the source's last sample took.", "agent", readers.sources("sample_ns", NANO), "source"),
    _node("source_unavailable_info", "", "What a source cannot give, and why; part `all`: the whole source.", "agent", readers.source_missing, "source", "part", "reason"),
    *NVML_METRICS,
)
# fmt: on

METRICS = JOB_METRICS + GPU_METRICS + NODE_METRICS


def markdown() -> str:
    """The tables of docs/metrics.md."""
    lines = []
    for title, own, metrics in (
        ("Jobs", JOB, JOB_METRICS),
        ("GPUs and MIG instances", GPU, GPU_METRICS),
        ("Nodes and the collector", NODE, NODE_METRICS),
    ):
        common = ", ".join(f"`{label}`" for label in own)
        lines += [f"## {title}", "", f"Labels of all of these: {common}.", ""]
        lines += ["| metric | type | unit | more labels | meaning | source |", "|---|---|---|---|---|---|"]
        for m in metrics:
            more = ", ".join(f"`{label}`" for label in m.labels[len(own) :])
            lines.append(f"| `{m.name}` | {m.kind} | {m.unit} | {more} | {m.help} | {m.source} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    print(markdown(), end="")
