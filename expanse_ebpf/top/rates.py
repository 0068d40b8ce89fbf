"""From cumulative reports to what is shown: rates, ratios and "not known".

A figure that is not known is None. Rates are of time between reports as the agent's monotonic clock
has it, never of wall clocks. A counter that goes backwards within a run of a job is taken for a bad
sample once, and for a new beginning when the next report confirms it.
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any, Final

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

Values = dict[str, Any]

CPU_SLACK = 1.05  # a CPU rate above CPUs times this is a bad sample
KEEP_REPORTS = 3  # a job that is missing from so many reports is forgotten
DEFAULT_INTERVAL_S = 5.0  # to judge the age of a report that tells no interval
HARDWARE: Final = ("cycles", "instructions", "cache_references", "cache_misses", "branch_misses")
STATES = {
    JobState.JOB_STATE_STARTING: "starting",
    JobState.JOB_STATE_RUNNING: "running",
    JobState.JOB_STATE_HELD_IDLE: "held_idle",
    JobState.JOB_STATE_ENDED: "ended",
}
_BACKWARDS = "the counter went backwards; this sample is not used"
_TOO_MUCH = "more than this node's CPUs can do in the time; this sample is not used"
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


class _Series:
    """The cumulative figures of one job, or of the node: their last good values and when those were."""

    __slots__ = ("dropped", "good", "seen")

    def __init__(self) -> None:
        self.good: dict[str, tuple[int, float]] = {}
        self.dropped: dict[str, tuple[int, float]] = {}
        self.seen = 0


class _Deltas:
    """What has been added to one series since its last good values."""

    def __init__(self, series: _Series, clock: float, since: float | None, cpus: int) -> None:
        self._series = series
        self._clock = clock
        self._since = since  # count what is new from 0 at this time; None: do not
        self._cpus = cpus
        self.reasons: dict[str, str] = {}
        self.bad = 0

    def delta(self, name: str, value: int | None) -> tuple[int, float] | None:
        """(how much more, in how many seconds), or None when that is not known."""
        if value is None:
            return None
        series = self._series
        base = series.good.get(name)
        if base is None:
            series.good[name] = (value, self._clock)
            if self._since is None or self._clock <= self._since:
                return None
            return value, self._clock - self._since
        if value < base[0]:
            dropped = series.dropped.pop(name, None)
            if dropped is None or value < dropped[0]:
                series.dropped[name] = (value, self._clock)
                self.bad += 1
                self.reasons[name] = _BACKWARDS
                return None
            # Lower for the second time: it did begin anew.
            base = dropped
        series.dropped.pop(name, None)
        series.good[name] = (value, self._clock)
        seconds = self._clock - base[1]
        return (value - base[0], seconds) if seconds > 0 else None

    def rate(self, name: str, value: int | None, scale: float = 1.0) -> float | None:
        """Added per second, times `scale`."""
        delta = self.delta(name, value)
        return None if delta is None else delta[0] * scale / delta[1]

    def cores(self, name: str, value: int | None) -> float | None:
        """CPU nanoseconds as cores in use; None when no machine of this size could have done that."""
        cores = self.rate(name, value, 1e-9)
        if cores is not None and self._cpus and cores > self._cpus * CPU_SLACK:
            self.bad += 1
            self.reasons[name] = _TOO_MUCH
            return None
        return cores


class Rates:
    """Turns the reports of one node, in their order, into snapshots."""

    def __init__(self) -> None:
        self._clock = 0.0  # seconds of the agent's monotonic time since the first report
        self._count = 0
        self._series: dict[tuple[str, str, int], _Series] = {}
        self._node = _Series()
        self._programs: dict[str, tuple[int, int, int, Values]] = {}
        self._last: Report | None = None

    def add(self, report: Report, age_s: float | None = None) -> Values:
        """The snapshot of `report`, which must be later than those before it."""
        elapsed = _elapsed(self._last, report)
        if elapsed is None:
            self._series, self._node, self._programs = {}, _Series(), {}
        else:
            self._clock += elapsed
        self._count += 1
        interval = report.interval_ns / 1e9
        cpus = report.host.cpus_online
        if self._last is not None:  # those that have gone since did their part
            cpus = max(cpus, self._last.host.cpus_online)
        jobs: list[Values] = []
        bad = 0
        for job in report.jobs:
            deltas = self._job_deltas(job, elapsed, cpus)
            jobs.append(_job(job, deltas))
            bad += deltas.bad
        self._series = {k: s for k, s in self._series.items() if self._count - s.seen < KEEP_REPORTS}
        node = _Deltas(self._node, self._clock, None, cpus)
        result = {
            "node": report.node.name or None,
            "time": _iso_time(report.time_ns),
            "interval_s": elapsed if elapsed is not None else (interval or None),
            "sequence": report.sequence,
            "age_s": None,
            "stale": False,
            "jobs": jobs,
            "host": _host(report.host, node),
            "collector": self._collector(report.collector, node),
        }
        result["bad_samples"] = bad + node.bad
        self._last = report
        set_age(result, age_s, interval)
        return result

    def _job_deltas(self, job: JobSample, elapsed: float | None, cpus: int) -> _Deltas:
        key = (job.identity.scheduler, job.identity.id, job.identity.run)
        series = self._series.get(key)
        since = None
        if series is None:
            series = self._series[key] = _Series()
            # Counters begin at 0 with the run. Whether the run began since the last report is told by
            # its CPU time: one that is older has used more than fits in between, or it is not judged.
            if elapsed and job.HasField("cpu_ns") and job.cpu_ns <= elapsed * 1e9 * CPU_SLACK * (cpus or 1):
                since = self._clock - elapsed
        series.seen = self._count
        return _Deltas(series, self._clock, since, cpus)

    def _collector(self, sample: CollectorSample, deltas: _Deltas) -> Values:
        programs = [self._program(p.name, p.run_ns, p.runs, p.measured_ns) for p in sample.programs]
        known = [p["ns_per_s"] for p in programs if p["ns_per_s"] is not None]
        return {
            "version": sample.version or None,
            "cpu_cores": deltas.cores("collector.cpu_ns", _optional(sample, "cpu_ns")),
            "pss_bytes": _optional(sample, "pss_bytes"),
            "rss_bytes": _optional(sample, "rss_bytes"),
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


def _optional(message: Any, field: str) -> Any:
    return getattr(message, field) if message.HasField(field) else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _iso_time(time_ns: int) -> str | None:
    try:
        time = datetime.fromtimestamp(time_ns / 1e9, UTC)
    except (OverflowError, ValueError, OSError):
        return None
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _ratio(part: tuple[int, float] | None, whole: tuple[int, float] | None) -> float | None:
    """part / whole of two deltas over the same time."""
    if part is None or whole is None or not whole[0] or part[1] != whole[1]:
        return None
    return part[0] / whole[0]


def _counters(counters: Counters, deltas: _Deltas, prefix: str = "") -> Values:
    hardware = {
        name: deltas.delta(prefix + name, getattr(counters, name).value if counters.HasField(name) else None)
        for name in HARDWARE
    }
    running = [getattr(counters, name).running_ratio for name in HARDWARE if counters.HasField(name)]
    running = [ratio for ratio in running if 0 < ratio <= 1]
    result: Values = {
        f"{name}_per_s": deltas.rate(prefix + name, _optional(counters, name))
        for name in ("context_switches", "page_faults", "migrations", "forks", "execs")
    }
    result["run_queue_wait_cores"] = deltas.rate(
        prefix + "run_queue_wait_ns", _optional(counters, "run_queue_wait_ns"), 1e-9
    )
    result["run_cores"] = deltas.cores(prefix + "run_ns", _optional(counters, "run_ns"))
    for name, delta in hardware.items():
        result[f"{name}_per_s"] = None if delta is None else delta[0] / delta[1]
    result["ipc"] = _ratio(hardware["instructions"], hardware["cycles"])
    result["cache_miss_ratio"] = _ratio(hardware["cache_misses"], hardware["cache_references"])
    result["running_ratio"] = min(running) if running else None
    return result


def _pressure(pressure: Pressure, name: str, deltas: _Deltas) -> Values:
    """Shares of time in which some, and all, tasks waited: 0 to 1."""
    return {
        f"{kind}_ratio": deltas.rate(f"{name}.{kind}_us", _optional(pressure, f"{kind}_us"), 1e-6)
        for kind in ("some", "full")
    }


def _network(network: NetworkCounters, name: str, deltas: _Deltas) -> Values:
    return {f"{field}_per_s": deltas.rate(f"{name}.{field}", getattr(network, field)) for field in _NETWORK}


def _python(python: PythonStacks, deltas: _Deltas) -> Values:
    """What the Python sampler saw: counts since the agent began, and the hottest lines."""
    samples = _optional(python, "samples")
    unresolved = {str(reason): number for reason, number in sorted(python.unresolved.items())}
    lost = _optional(python, "lost")
    resolved = None if samples is None else max(0, samples - sum(unresolved.values()) - (lost or 0))
    taken = deltas.delta("python.samples", samples)
    return {
        "samples": samples,
        "unresolved": unresolved,
        "lost": lost,
        "samples_per_s": None if taken is None else taken[0] / taken[1],
        "resolved_ratio": _ratio(deltas.delta("python.resolved", resolved), taken),
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
    return {"function": function, "file": file or None, "line": line or None, "share": _finite(share)}


def _job(job: JobSample, deltas: _Deltas) -> Values:
    identity = job.identity
    memory, limit = _optional(job, "memory_bytes"), _optional(job, "memory_limit_bytes")
    result: Values = {
        "key": f"{identity.scheduler}/{identity.id}",
        "scheduler": identity.scheduler,
        "id": identity.id,
        "run": identity.run,
        "name": identity.name or None,
        "user": identity.user or None,
        "uid": _optional(identity, "uid"),
        "account": identity.account or None,
        "partition": identity.partition or None,
        "array": identity.array or None,
        "state": STATES.get(job.state),
        "processes": _optional(job, "processes"),
        "cpu_cores": deltas.cores("cpu_ns", _optional(job, "cpu_ns")),
        "cpu_user_cores": deltas.cores("cpu_user_ns", _optional(job, "cpu_user_ns")),
        "cpu_system_cores": deltas.cores("cpu_system_ns", _optional(job, "cpu_system_ns")),
        "cpu_limit_cores": _finite(_optional(job, "cpu_limit_cores")),
        "throttled_ratio": deltas.rate("throttled_ns", _optional(job, "throttled_ns"), 1e-9),
        "throttled_periods_per_s": deltas.rate("throttled_periods", _optional(job, "throttled_periods")),
        "owns_cpus": job.owns_cpus,
        "memory_bytes": memory,
        "memory_peak_bytes": _optional(job, "memory_peak_bytes"),
        "memory_limit_bytes": limit,
        "memory_used_ratio": memory / limit if memory is not None and limit else None,
        "memory_anon_bytes": _optional(job, "memory_anon_bytes"),
        "memory_file_bytes": _optional(job, "memory_file_bytes"),
        "oom_kills": _optional(job, "oom_kills"),
        "counters": _counters(job.counters, deltas),
        "io": {
            f"{field}_per_s": deltas.rate(f"io_{field}", _optional(job, f"io_{field}"))
            for field in ("read_bytes", "write_bytes", "read_ops", "write_ops")
        },
        "pressure": {
            kind: _pressure(getattr(job, f"{kind}_pressure"), kind, deltas)
            for kind in ("cpu", "memory", "io")
        },
        "network": _network(job.network, "network", deltas) if job.HasField("network") else None,
        "delays": {
            f"{field}_cores": deltas.rate(f"delays.{field}_ns", _optional(job.delays, f"{field}_ns"), 1e-9)
            for field in ("cpu", "block_io", "swap_in", "memory_reclaim")
        },
        "python": _python(job.python, deltas) if job.HasField("python") else None,
        "gpus": list(identity.gpus),
        "containers": list(identity.containers),
        "labels": dict(identity.labels),
        "cgroup": identity.cgroup or None,
    }
    result["unavailable"] = {**job.unavailable, **deltas.reasons}
    return result


def _host(host: HostSample, deltas: _Deltas) -> Values:
    return {
        "cpus_online": host.cpus_online or None,
        "cpu_cores": deltas.cores("host.cpu_busy_ns", _optional(host, "cpu_busy_ns")),
        "memory_total_bytes": _optional(host, "memory_total_bytes"),
        "memory_available_bytes": _optional(host, "memory_available_bytes"),
        "load_1m": _finite(host.load_1m) if host.HasField("load_1m") else None,
        "network": {
            name: _network(net, f"host.{name}", deltas) for name, net in sorted(host.network.items())
        },
        "system": _counters(host.system, deltas, "system."),
        "overflow": _counters(host.overflow, deltas, "overflow."),
        "overflow_jobs": host.overflow_jobs,
        "unattributed_cgroups": host.unattributed_cgroups,
    }
