"""From cumulative reports to what is shown: rates, ratios and "not known".

A figure that is not known is None. What is believed of a counter, and what is not: see deltas.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from expanse_ebpf.top import gpu_rates, windows
from expanse_ebpf.top.deltas import CPU_SLACK, Deltas, Series, Values, finite, iso_time, optional, ratio
from expanse_ebpf.wire.collector_pb2 import (
    CollectorSample,
    Counters,
    HostSample,
    JobSample,
    JobState,
    NetworkCounters,
    Pressure,
    PythonStacks,
    Report,
)

KEEP_REPORTS = 3  # a job or GPU that is missing from so many reports is forgotten
DEFAULT_INTERVAL_S = 5.0  # to judge the age of a report that tells no interval
HARDWARE: Final = ("cycles", "instructions", "cache_references", "cache_misses", "branch_misses")
STATES = {
    JobState.JOB_STATE_STARTING: "starting",
    JobState.JOB_STATE_RUNNING: "running",
    JobState.JOB_STATE_HELD_IDLE: "held_idle",
    JobState.JOB_STATE_ENDED: "ended",
}
_NETWORK: Final = (
    "received_bytes",
    "sent_bytes",
    "received_packets",
    "sent_packets",
    "dropped_packets",
    "error_packets",
)


def snapshot(previous: Report | None, current: Report, age_s: float | None = None) -> Values:
    """What is known from two reports: the object that `top --once --json` prints.

    `age_s` is how long ago `current` was made, in seconds, where that is known.
    """
    rates = Rates()
    if previous is not None:
        rates.add(previous)
    return rates.add(current, age_s)


class Rates:
    """Turns the reports of one node, in their order, into snapshots."""

    def __init__(self) -> None:
        self._clock = 0.0  # seconds of the agent's monotonic time since the first report
        self._count = 0
        self._series: dict[tuple[str, str, int], Series] = {}
        self._gpus: dict[str, Series] = {}  # by UUID
        self._node = Series()
        self._programs: dict[str, tuple[int, int, int, Values]] = {}
        self._last: Report | None = None

    def add(self, report: Report, age_s: float | None = None) -> Values:
        """The snapshot of `report`, which must be later than those before it."""
        elapsed = _elapsed(self._last, report)
        if elapsed is None:
            self._series, self._gpus, self._node, self._programs = {}, {}, Series(), {}
        else:
            self._clock += elapsed
        self._count += 1
        interval = report.interval_ns / 1e9
        cpus = report.host.cpus_online
        if self._last is not None:  # those that have gone since did their part
            cpus = max(cpus, self._last.host.cpus_online)
        instances = {gpu.uuid for gpu in report.gpus if gpu.parent_uuid}
        indexes = {gpu.uuid: gpu.index for gpu in report.gpus if gpu.HasField("index")}
        jobs: list[Values] = []
        bad = 0
        for job in report.jobs:
            deltas = self._job_deltas(job, elapsed, cpus)
            jobs.append(_job(job, deltas, instances))
            jobs[-1]["window"] = windows.of_job(job.identity, report.traces)
            bad += deltas.bad
        gpus: list[Values] = []
        for gpu in report.gpus:
            # The counters are the driver's, so that those of a GPU that is new here have a past.
            series = self._gpus.setdefault(gpu.uuid, Series())
            series.seen = self._count
            deltas = Deltas(series, self._clock, None, 0)
            gpus.append(gpu_rates.device(gpu, deltas, indexes.get(gpu.parent_uuid)))
            bad += deltas.bad
        self._series = {k: s for k, s in self._series.items() if self._count - s.seen < KEEP_REPORTS}
        self._gpus = {k: s for k, s in self._gpus.items() if self._count - s.seen < KEEP_REPORTS}
        node = Deltas(self._node, self._clock, None, cpus)
        result = {
            "node": report.node.name or None,
            "time": iso_time(report.time_ns),
            "interval_s": elapsed if elapsed is not None else (interval or None),
            "sequence": report.sequence,
            "age_s": None,
            "stale": False,
            "jobs": jobs,
            "gpus": gpus,
            "gpu_events": [gpu_rates.event(e) for e in report.gpu_events],
            "nvml": gpu_rates.nvml(report.nvml, node) if report.HasField("nvml") else None,
            "host": _host(report.host, node),
            "collector": self._collector(report.collector, node),
        }
        result["bad_samples"] = bad + node.bad
        self._last = report
        set_age(result, age_s, interval)
        return result

    def _job_deltas(self, job: JobSample, elapsed: float | None, cpus: int) -> Deltas:
        key = (job.identity.scheduler, job.identity.id, job.identity.run)
        series = self._series.get(key)
        since = None
        if series is None:
            series = self._series[key] = Series()
            # Counters begin at 0 with the run. Whether the run began since the last report is told by
            # its CPU time: one that is older has used more than fits in between, or it is not judged.
            if elapsed and job.HasField("cpu_ns") and job.cpu_ns <= elapsed * 1e9 * CPU_SLACK * (cpus or 1):
                since = self._clock - elapsed
        series.seen = self._count
        return Deltas(series, self._clock, since, cpus)

    def _collector(self, sample: CollectorSample, deltas: Deltas) -> Values:
        programs = [self._program(p.name, p.run_ns, p.runs, p.measured_ns) for p in sample.programs]
        known = [p["ns_per_s"] for p in programs if p["ns_per_s"] is not None]
        return {
            "version": sample.version or None,
            "cpu_cores": deltas.cores("collector.cpu_ns", optional(sample, "cpu_ns")),
            "pss_bytes": optional(sample, "pss_bytes"),
            "rss_bytes": optional(sample, "rss_bytes"),
            "bpf": {"programs": programs, "ns_per_s": sum(known) if known else None},
            "sources": [
                {
                    "name": s.name,
                    "up": s.up,
                    "reason": s.reason or None,
                    "sample_s": s.sample_ns / 1e9,
                    "unavailable": dict(s.unavailable),
                }
                for s in sample.sources
            ],
            "tick_s": sample.tick_ns / 1e9,
            "events_submitted": sample.events_submitted,
            "events_lost": sample.events_lost,
            "reports_unsent": sample.reports_unsent,
            "reports_dropped": sample.reports_dropped,
            "ticks_missed": sample.ticks_missed,
            "slots_exhausted": sample.slots_exhausted,
            "cpu_mode": sample.cpu_mode or None,
        }

    def _program(self, name: str, run_ns: int, runs: int, measured_ns: int) -> Values:
        """One BPF program's cost over the newest stretch in which the kernel measured it.

        Statistics are on only now and then, so between two reports there may be nothing new; the last
        stretch stands until the next.
        """
        last = self._programs.get(name)
        before = (0, 0, 0)
        if last and last[0] <= run_ns and last[1] <= runs and last[2] <= measured_ns:
            before = last[:3]
        d_run, d_runs, d_measured = run_ns - before[0], runs - before[1], measured_ns - before[2]
        if last and before != (0, 0, 0) and not d_measured:
            return last[3]
        seconds = d_measured / 1e9
        figures: Values = {
            "name": name,
            "ns_per_run": d_run / d_runs if d_runs and seconds else None,
            "runs_per_s": d_runs / seconds if seconds else None,
            "ns_per_s": d_run / seconds if seconds else None,
        }
        self._programs[name] = (run_ns, runs, measured_ns, figures)
        return figures


def set_age(snapshot: Values, age_s: float | None, interval_s: float) -> None:
    """Say in `snapshot` how old it is; past two intervals it and its jobs are "stale"."""
    snapshot["age_s"] = None if age_s is None else round(age_s, 3)
    snapshot["stale"] = age_s is not None and age_s > 2 * (interval_s or DEFAULT_INTERVAL_S)
    for job in snapshot["jobs"] if snapshot["stale"] else ():
        if job["state"] != "ended":
            job["state"] = "stale"


def _elapsed(previous: Report | None, current: Report) -> float | None:
    """Seconds between two reports; None when `current` cannot be compared with `previous`."""
    if previous is None or not current.interval_ns:  # an interval of 0 is an agent's first report
        return None
    same = ("name", "install_id", "boot_id")
    if any(getattr(previous.node, field) != getattr(current.node, field) for field in same):
        return None
    steps = current.sequence - previous.sequence
    if steps <= 0:
        return None
    guess = steps * current.interval_ns / 1e9
    if steps == 1:
        return guess
    # Reports are missing in between. The wall clock knows how long that was, unless it was set.
    wall = (current.time_ns - previous.time_ns) / 1e9
    return wall if guess / 2 <= wall <= guess * 2 else guess


def _counters(counters: Counters, deltas: Deltas, prefix: str = "") -> Values:
    hardware = {
        name: deltas.delta(prefix + name, getattr(counters, name).value if counters.HasField(name) else None)
        for name in HARDWARE
    }
    running = [getattr(counters, name).running_ratio for name in HARDWARE if counters.HasField(name)]
    running = [share for share in running if 0 < share <= 1]
    result: Values = {
        f"{name}_per_s": deltas.rate(prefix + name, optional(counters, name))
        for name in ("context_switches", "page_faults", "migrations", "forks", "execs")
    }
    result["run_queue_wait_cores"] = deltas.rate(
        prefix + "run_queue_wait_ns", optional(counters, "run_queue_wait_ns"), 1e-9
    )
    result["run_cores"] = deltas.cores(prefix + "run_ns", optional(counters, "run_ns"))
    for name, delta in hardware.items():
        result[f"{name}_per_s"] = None if delta is None else delta[0] / delta[1]
    result["ipc"] = ratio(hardware["instructions"], hardware["cycles"])
    result["cache_miss_ratio"] = ratio(hardware["cache_misses"], hardware["cache_references"])
    result["running_ratio"] = min(running) if running else None
    return result


def _pressure(pressure: Pressure, name: str, deltas: Deltas) -> Values:
    """Shares of time in which some, and all, tasks waited: 0 to 1."""
    return {
        f"{kind}_ratio": deltas.rate(f"{name}.{kind}_us", optional(pressure, f"{kind}_us"), 1e-6)
        for kind in ("some", "full")
    }


def _network(network: NetworkCounters, name: str, deltas: Deltas) -> Values:
    return {f"{field}_per_s": deltas.rate(f"{name}.{field}", getattr(network, field)) for field in _NETWORK}


def _python(python: PythonStacks, deltas: Deltas) -> Values:
    """What the Python sampler saw: counts since the agent began, and the hottest lines."""
    samples = optional(python, "samples")
    unresolved = {str(reason): number for reason, number in sorted(python.unresolved.items())}
    lost = optional(python, "lost")
    resolved = None if samples is None else max(0, samples - sum(unresolved.values()) - (lost or 0))
    taken = deltas.delta("python.samples", samples)
    return {
        "samples": samples,
        "unresolved": unresolved,
        "lost": lost,
        "samples_per_s": None if taken is None else taken[0] / taken[1],
        "resolved_ratio": ratio(deltas.delta("python.resolved", resolved), taken),
        "hottest": _hot_line(
            python.hottest_function, python.hottest_file, python.hottest_line, python.hottest_share
        ),
        "waiting": _hot_line(
            python.waiting_function, python.waiting_file, python.waiting_line, python.waiting_share
        ),
    }


def _hot_line(function: str, file: str, line: int, share: float) -> Values | None:
    if not function:
        return None
    return {"function": function, "file": file or None, "line": line or None, "share": finite(share)}


def _job(job: JobSample, deltas: Deltas, instances: Collection[str]) -> Values:
    identity = job.identity
    memory, limit = optional(job, "memory_bytes"), optional(job, "memory_limit_bytes")
    result: Values = {
        "key": f"{identity.scheduler}/{identity.id}",
        "scheduler": identity.scheduler,
        "id": identity.id,
        "run": identity.run,
        "name": identity.name or None,
        "user": identity.user or None,
        "uid": optional(identity, "uid"),
        "account": identity.account or None,
        "partition": identity.partition or None,
        "array": identity.array or None,
        "state": STATES.get(job.state),
        "processes": optional(job, "processes"),
        "cpu_cores": deltas.cores("cpu_ns", optional(job, "cpu_ns")),
        "cpu_user_cores": deltas.cores("cpu_user_ns", optional(job, "cpu_user_ns")),
        "cpu_system_cores": deltas.cores("cpu_system_ns", optional(job, "cpu_system_ns")),
        "cpu_limit_cores": finite(optional(job, "cpu_limit_cores")),
        "throttled_ratio": deltas.rate("throttled_ns", optional(job, "throttled_ns"), 1e-9),
        "throttled_periods_per_s": deltas.rate("throttled_periods", optional(job, "throttled_periods")),
        "owns_cpus": job.owns_cpus,
        "memory_bytes": memory,
        "memory_peak_bytes": optional(job, "memory_peak_bytes"),
        "memory_limit_bytes": limit,
        "memory_used_ratio": memory / limit if memory is not None and limit else None,
        "memory_anon_bytes": optional(job, "memory_anon_bytes"),
        "memory_file_bytes": optional(job, "memory_file_bytes"),
        "oom_kills": optional(job, "oom_kills"),
        "counters": _counters(job.counters, deltas),
        "io": {
            f"{field}_per_s": deltas.rate(f"io_{field}", optional(job, f"io_{field}"))
            for field in ("read_bytes", "write_bytes", "read_ops", "write_ops")
        },
        "pressure": {
            kind: _pressure(getattr(job, f"{kind}_pressure"), kind, deltas)
            for kind in ("cpu", "memory", "io")
        },
        "network": _network(job.network, "network", deltas) if job.HasField("network") else None,
        "delays": {
            f"{field}_cores": deltas.rate(f"delays.{field}_ns", optional(job.delays, f"{field}_ns"), 1e-9)
            for field in ("cpu", "block_io", "swap_in", "memory_reclaim")
        },
        "python": _python(job.python, deltas) if job.HasField("python") else None,
        # Its environment's claim, as it stands there; what it really holds is in "gpu".
        "gpus": list(identity.gpus),
        "gpus_source": identity.gpus_source or None,
        "gpu": gpu_rates.job(job.gpu, deltas, instances) if job.HasField("gpu") else None,
        "containers": list(identity.containers),
        "labels": dict(identity.labels),
        "cgroup": identity.cgroup or None,
    }
    result["unavailable"] = {**job.unavailable, **deltas.reasons}
    return result


def _host(host: HostSample, deltas: Deltas) -> Values:
    return {
        "cpus_online": host.cpus_online or None,
        "cpu_cores": deltas.cores("host.cpu_busy_ns", optional(host, "cpu_busy_ns")),
        "memory_total_bytes": optional(host, "memory_total_bytes"),
        "memory_available_bytes": optional(host, "memory_available_bytes"),
        "load_1m": finite(host.load_1m) if host.HasField("load_1m") else None,
        "network": {
            name: _network(net, f"host.{name}", deltas) for name, net in sorted(host.network.items())
        },
        "system": _counters(host.system, deltas, "system."),
        "overflow": _counters(host.overflow, deltas, "overflow."),
        "overflow_jobs": host.overflow_jobs,
        "unattributed_cgroups": host.unattributed_cgroups,
    }
