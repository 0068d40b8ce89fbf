"""The columns of the table of jobs, for the plain table and the live view alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

from expanse_ebpf.export.origin import Origin, Origins
from expanse_ebpf.top import text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.table import Column, as_wide

HISTORY = "history"
PYTHON = "python"
PYTHON_WIDTH = 36
LEAST_PYTHON = 18  # columns; what gives way first
_LEAST_KEY = 20  # likewise
WARN_STATES = {"held_idle": "yellow", "stale": "red"}
_DIM_STATES = {"ended", "starting", "stale"}
_LITTLE_CPU = 0.5  # cores, below which it says more where a job waits
_TELLING = ("opted out", "unsupported interpreter")  # reasons for which the column is shown


def io_bytes(job: Values) -> float | None:
    """Bytes read and written per second."""
    return text.total([job["io"]["read_bytes_per_s"], job["io"]["write_bytes_per_s"]])


def _counter(name: str) -> Callable[[Values], Any]:
    return lambda job: job["counters"][name]


def is_standard(hot: Values) -> bool:
    """Whether a line is of the standard library: as a rule a thread of a pool that idles there."""
    return Origins().of(hot["file"] or "") is Origin.STANDARD


def _waits(job: Values) -> bool:
    """Whether the line where it waits says more than the one that was on a CPU most."""
    python = job["python"]
    # One that stands in the run queue would run.
    cores = text.total([job["cpu_cores"], job["counters"]["run_queue_wait_cores"]])
    if not python or python["waiting"] is None:
        return False
    if python["hottest"] is None:
        return True
    idle = is_standard(python["waiting"])
    return job["cpu_cores"] is not None and cores is not None and cores < _LITTLE_CPU and not idle


def _hottest(job: Values) -> Values | None:
    found: Values | None = job["python"] and job["python"]["hottest"]
    return None if _waits(job) else found


def _python_is_known(job: Values) -> object:
    return _hottest(job) or _waits(job) or job["unavailable"].get(PYTHON) in _TELLING or None


def python_line(job: Values, width: int = PYTHON_WIDTH) -> str:
    """Where a job's Python is, or why that is not known, in at most `width` columns."""
    if _waits(job):
        line = code_line({**job["python"]["waiting"], "share": None}, max(8, width - 9))
        return f"waiting: {line}"
    hot = _hottest(job)
    if hot is not None:
        return code_line(hot, width)
    reason = text.clean(job["unavailable"].get(PYTHON, ""))
    return text.fit(reason, width).rstrip() or text.UNKNOWN


def code_line(hot: Values, width: int = PYTHON_WIDTH) -> str:
    """A line of code and its share, "Trainer.step train.py:88 43%", in at most `width` columns.

    Where that is too long the class goes, then the file, then the end of the function.
    """
    function = text.clean(hot["function"])
    last = function.rpartition(".")[2]
    file = text.clean((hot["file"] or "").rpartition("/")[2])
    number = f":{hot['line']}" if hot["line"] else ""
    share = "" if hot["share"] is None else f" {hot['share'] * 100:.0f}%"
    place = f" {file}{number}" if file else number
    for line in (function + place, last + place, function + number, last + number):
        if text.cell_width(line + share) <= width:
            return line + share
    return text.fit(last, max(4, width - len(number + share))).rstrip() + number + share


def key_width(jobs: Sequence[Values]) -> int:
    """What the jobs' keys need, within reason."""
    return max(8, min(36, max((text.cell_width(job["key"]) for job in jobs), default=0)))


def is_dim(job: Values) -> bool:
    """Whether a job's figures are of the past, or not yet there."""
    return job["state"] in _DIM_STATES


def _bold(job: Values) -> str:
    return "" if is_dim(job) else "bold"


def _text(field: str) -> Callable[[Values], str]:
    return lambda job: text.clean(job[field] or text.UNKNOWN)


def _state(job: Values) -> str:
    """How the job stands; of one that runs, whether a window of deep tracing is open on it."""
    if job["state"] == "running" and job["window"] and job["window"]["state"] == "open":
        return "traced"
    return (job["state"] or text.UNKNOWN).replace("_", " ")


def _state_style(job: Values) -> str:
    return WARN_STATES.get(job["state"], "")


def _gpu(field: str) -> Callable[[Values], Any]:
    return lambda job: job["gpu"] and job["gpu"][field]


def gpus_held(job: Values) -> str:
    """How many GPUs and MIG instances it holds: "2", "1 MIG", "1+2 MIG".

    With "!" where the sources disagree, and "?" where they name what this node has not got.
    """
    gpu = job["gpu"]
    if gpu is None:
        return text.UNKNOWN
    whole, parts = gpu["count"] - gpu["mig_instances"], gpu["mig_instances"]
    held = f"{whole}+{parts} MIG" if whole and parts else f"{parts} MIG" if parts else str(whole)
    return held + "!" * bool(gpu["conflicts"]) + "?" * bool(gpu["unknown"])


def _held_style(job: Values) -> str:
    return "yellow" if gpus_held(job)[-1] in "?!" else ""


def _of_gpus(field: str, show: Callable[[float | None], str]) -> Callable[[Values], str]:
    """A figure of its GPUs, with "*" where it is not of all of them: there are none of the others."""

    def shown(job: Values) -> str:
        value = _gpu(field)(job)
        return show(value) + "*" * (value is not None and "gpu" in job["unavailable"])

    return shown


COLUMNS: tuple[Column, ...] = (
    Column(
        "key",
        "JOB",
        24,
        lambda j: text.clean(j["key"]),
        lambda j: j["key"],
        -1,
        right=False,
        least=_LEAST_KEY,
        usual=key_width,
    ),
    Column("name", "NAME", 16, _text("name"), lambda j: j["name"], 12, right=False),
    Column("user", "USER", 10, _text("user"), lambda j: j["user"], 11, right=False),
    Column(
        "cpu",
        "CORES",
        7,
        lambda j: text.number(j["cpu_cores"]),
        lambda j: j["cpu_cores"],
        0,
        style=_bold,
    ),
    Column(HISTORY, "HISTORY", 12, lambda _: "", lambda j: j["cpu_cores"], 9, right=False),
    Column(
        "ipc",
        "IPC",
        5,
        lambda j: text.number(j["counters"]["ipc"]),
        _counter("ipc"),
        10,
        needs=_counter("ipc"),
    ),
    Column(
        "miss",
        "MISS",
        6,
        lambda j: text.percent(j["counters"]["cache_miss_ratio"]),
        _counter("cache_miss_ratio"),
        12,
        needs=_counter("cache_miss_ratio"),
    ),
    Column(
        "switches",
        "SWITCH/S",
        8,
        lambda j: text.count(j["counters"]["context_switches_per_s"]),
        _counter("context_switches_per_s"),
        10,
    ),
    Column(
        "wait",
        "WAIT",
        6,
        lambda j: text.number(j["counters"]["run_queue_wait_cores"]),
        _counter("run_queue_wait_cores"),
        9,
    ),
    Column("memory", "MEMORY", 9, lambda j: text.size(j["memory_bytes"]), lambda j: j["memory_bytes"], 2),
    Column("io", "I/O", 11, lambda j: text.size_rate(io_bytes(j)), io_bytes, 8),
    Column("processes", "PROCS", 5, lambda j: text.count(j["processes"]), lambda j: j["processes"], 7),
    Column(
        "gpus",
        "GPU",
        5,
        gpus_held,
        _gpu("count"),
        1,
        needs=lambda j: j["gpu"],
        usual=as_wide(gpus_held, 5, 10),
        style=_held_style,
    ),
    Column(
        "gpu",
        "GPU%",
        6,
        _of_gpus("busy_ratio", text.percent),
        _gpu("busy_ratio"),
        1,
        needs=lambda j: j["gpu"],
        style=_bold,
    ),
    Column(
        "sm",
        "SM%",
        6,
        _of_gpus("sm_active_ratio", text.percent),
        _gpu("sm_active_ratio"),
        4,
        needs=_gpu("sm_active_ratio"),
    ),
    Column(
        "gpu_memory",
        "GPU MEM",
        9,
        _of_gpus("memory_bytes", text.size),
        _gpu("memory_bytes"),
        5,
        needs=lambda j: j["gpu"],
    ),
    Column(
        "power",
        "POWER",
        7,
        _of_gpus("power_watts", text.watts),
        _gpu("power_watts"),
        6,
        needs=lambda j: j["gpu"],
    ),
    Column(
        "state",
        "STATE",
        9,
        _state,
        lambda j: j["state"],
        1,
        right=False,
        style=_state_style,
    ),
    Column(
        PYTHON,
        "PYTHON",
        PYTHON_WIDTH,
        python_line,
        lambda j: (_hottest(j) or {}).get("share"),
        3,
        right=False,
        needs=_python_is_known,
        least=LEAST_PYTHON,
        shorten=python_line,
    ),
)
PRINTED = tuple(column for column in COLUMNS if column.name != HISTORY)  # of one moment
BY_NAME = {column.name: column for column in COLUMNS}
SORT_KEYS = tuple(column.name for column in PRINTED)


def sort(jobs: Iterable[Values], name: str, reverse: bool = False) -> list[Values]:
    """`jobs` by the column `name`, the most first, unknown last; `reverse` turns the known ones around.

    Those that look the same there stand in the order of their keys, so that they do not change places with
    every report.
    """
    order, show = BY_NAME[name].order, BY_NAME[name].show
    known: list[Values] = []
    unknown: list[Values] = []
    for job in jobs:
        (unknown if order(job) is None else known).append(job)
    known.sort(key=order, reverse=bool(known) and (not isinstance(order(known[0]), str)) != reverse)
    unknown.sort(key=_place)
    return [job for _, alike in groupby(known, show) for job in sorted(alike, key=_place)] + unknown


def _place(job: Values) -> tuple[str, int]:
    return job["key"], job["run"]


def matches(job: Values, wanted: str) -> bool:
    """Whether the text of a filter is in the job's key, name or user."""
    wanted = wanted.casefold()
    return any(wanted in (job[field] or "").casefold() for field in ("key", "name", "user", "state"))
