"""The panel of one job: its limits, pressure and processes, and what is missing and why."""

from __future__ import annotations

from expanse_ebpf.top import gpu_panel, text, windows
from expanse_ebpf.top.columns import is_standard
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.text import Line
from expanse_ebpf.wire.collector_pb2 import Process, ProcessesReply

MAX_PROCESSES = 200


class ProcessRates:
    """Cores that each process used between two answers, by pid and start, since pids are used again."""

    def __init__(self) -> None:
        self._before: dict[tuple[int, int], float] = {}
        self._when = 0.0
        self._cores: dict[tuple[int, int], float] = {}

    def add(self, reply: ProcessesReply, now: float) -> None:
        """Take in an answer that came at monotonic time `now` (seconds)."""
        seconds = now - self._when
        current = {(p.pid, p.started_ns): p.cpu_seconds for p in reply.processes if p.HasField("cpu_seconds")}
        self._cores = {
            key: (cpu - self._before[key]) / seconds
            for key, cpu in current.items()
            if seconds > 0 and cpu >= self._before.get(key, float("inf"))
        }
        self._before, self._when = current, now

    def cores(self, process: Process) -> float | None:
        """Cores used, None when it was not there before."""
        return self._cores.get((process.pid, process.started_ns))


def lines(
    key: str,
    job: Values | None,
    snapshot: Values,
    answer: ProcessesReply | str | None,
    rates: ProcessRates,
    width: int,
) -> list[Line]:
    """What the panel says; `answer` is None while it is awaited and a text when it is an error."""
    if job is None:
        return [(text.clean(key), "bold"), ("The job is no longer here.", "")]
    result: list[Line] = [(_title(job), "bold"), *((line, "") for line in _figures(job))]
    result += [(line, "") for line in _python(job["python"])]
    result += [(line, "") for line in windows.lines(job["window"])]
    result += gpu_panel.job_lines(job, snapshot, width)
    if answer is None:
        result += [("", ""), ("asking for its processes …", "dim")]
    elif isinstance(answer, str):
        result += [("", ""), (text.clean(answer), "yellow")]
    else:
        result += [("", ""), *_processes(answer, rates, width)]
    return result + gpu_panel.wrapped(text.not_known(job["unavailable"]), width)


def _title(job: Values) -> str:
    parts = [job["key"], job["name"], job["user"], job["account"], job["partition"], job["array"]]
    return text.clean(" · ".join(part for part in parts if part))


def _figures(job: Values) -> list[str]:
    counters, pressure = job["counters"], job["pressure"]
    limit = job["memory_limit_bytes"]
    memory = f"memory {text.size(job['memory_bytes'])}"
    if limit is not None:
        memory += f" of {text.size(limit)} ({text.percent(job['memory_used_ratio'])})"
    cpu = f"cpu {text.number(job['cpu_cores'])} cores ({text.number(job['cpu_user_cores'])} user, "
    cpu += f"{text.number(job['cpu_system_cores'])} system)"
    if job["cpu_limit_cores"] is not None:
        cpu += f" of {text.number(job['cpu_limit_cores'])}, throttled {text.percent(job['throttled_ratio'])}"
    stalls = ", ".join(f"{kind} {text.percent(values['some_ratio'])}" for kind, values in pressure.items())
    return [
        f"{cpu} · {memory}, peak {text.size(job['memory_peak_bytes'])}",
        f"read {text.size_rate(job['io']['read_bytes_per_s'])}"
        f" · write {text.size_rate(job['io']['write_bytes_per_s'])} · stalled: {stalls}",
        f"per s: {text.count(counters['page_faults_per_s'])} page faults"
        f" · {text.count(counters['migrations_per_s'])} migrations"
        f" · {text.count(counters['forks_per_s'])} forks · {text.count(counters['execs_per_s'])} execs",
    ]


def _python(python: Values | None) -> list[str]:
    """Which lines it is in, on a CPU and waiting."""
    if python is None:
        return []
    found = [
        f"python: {text.number(python['samples_per_s'], 0)} samples per s,"
        f" {text.percent(python['resolved_ratio'])} resolved"
    ]
    for title, hot in (("on a CPU", python["hottest"]), ("waiting", python["waiting"])):
        if hot is not None:
            place = (hot["file"] or "") + (f":{hot['line']}" if hot["line"] else "")
            line = f"  {title:<8} {text.percent(hot['share']):>6}  {hot['function']}  {place}"
            mark = "  (standard library)" if title == "waiting" and is_standard(hot) else ""
            found.append(text.clean(line + mark).rstrip())
    return found


def _processes(answer: ProcessesReply, rates: ProcessRates, width: int) -> list[Line]:
    order = sorted(answer.processes, key=lambda p: (-(rates.cores(p) or 0.0), p.pid))
    result: list[Line] = [
        (f"{'PID':>8} {'CORES':>6} {'MEMORY':>9} {'THREADS':>7} {'STATE':<10} COMMAND", "bold")
    ]
    for p in order[:MAX_PROCESSES]:
        memory = text.size(p.rss_bytes if p.HasField("rss_bytes") else None)
        threads = text.count(p.threads if p.HasField("threads") else None)
        state = text.fit(text.clean(p.state or text.UNKNOWN), 10)
        head = f"{p.pid:>8} {text.number(rates.cores(p)):>6} {memory:>9} {threads:>7} {state} "
        result.append((head + text.fit(text.clean(p.command), max(8, width - len(head))).rstrip(), ""))
    if len(order) > MAX_PROCESSES:
        result.append((f"… {len(order) - MAX_PROCESSES} more", "dim"))
    if not order:
        result.append(("no process", "dim"))
    return result
