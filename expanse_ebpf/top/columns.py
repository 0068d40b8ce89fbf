"""The columns of the table of jobs, for the plain table and the live view alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from expanse_ebpf.top import text
from expanse_ebpf.top.rates import Values

HISTORY = "history"
PYTHON_WIDTH = 36


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how a job's value is shown, what it is sorted by, and how dear it is."""

    name: str
    title: str
    width: int  # columns of the terminal, as a rule
    show: Callable[[Values], str]
    order: Callable[[Values], Any]  # None sorts last, numbers downwards, text upwards
    rank: int  # columns of a high rank go first where there is no room
    right: bool = True
    needs: Callable[[Values], Any] | None = None  # shown only when this is known of at least one job


def io_bytes(job: Values) -> float | None:
    """Bytes read and written per second."""
    return text.total([job["io"]["read_bytes_per_s"], job["io"]["write_bytes_per_s"]])


def _counter(name: str) -> Callable[[Values], Any]:
    return lambda job: job["counters"][name]


def _hottest(job: Values) -> Values | None:
    found: Values | None = job["python"] and job["python"]["hottest"]
    return found


def hot_line(hot: Values | None, width: int = PYTHON_WIDTH) -> str:
    """The line in which most time goes by, "Trainer.step train.py:88 43%", in at most `width` columns."""
    if hot is None:
        return text.UNKNOWN
    file = text.clean((hot["file"] or "").rpartition("/")[2])
    place = text.fit(file, 15).rstrip() if text.cell_width(file) > 15 else file
    if place and hot["line"]:
        place += f":{hot['line']}"
    share = "" if hot["share"] is None else f"{hot['share'] * 100:.0f}%"
    rest = " ".join(part for part in (place, share) if part)
    function = text.clean(hot["function"])
    room = max(8, width - text.cell_width(rest) - 1)
    if text.cell_width(function) > room:
        function = text.fit(function, room).rstrip()
    return f"{function} {rest}".rstrip()


COLUMNS = (
    Column("key", "JOB", 24, lambda j: text.clean(j["key"]), lambda j: j["key"], -1, right=False),
    Column(
        "name",
        "NAME",
        16,
        lambda j: text.clean(j["name"] or text.UNKNOWN),
        lambda j: j["name"],
        9,
        right=False,
    ),
    Column(
        "user",
        "USER",
        10,
        lambda j: text.clean(j["user"] or text.UNKNOWN),
        lambda j: j["user"],
        7,
        right=False,
    ),
    Column("cpu", "CORES", 7, lambda j: text.number(j["cpu_cores"]), lambda j: j["cpu_cores"], 0),
    Column(HISTORY, "HISTORY", 12, lambda _: "", lambda j: j["cpu_cores"], 5, right=False),
    Column(
        "ipc",
        "IPC",
        5,
        lambda j: text.number(j["counters"]["ipc"]),
        _counter("ipc"),
        6,
        needs=_counter("ipc"),
    ),
    Column(
        "miss",
        "MISS",
        6,
        lambda j: text.percent(j["counters"]["cache_miss_ratio"]),
        _counter("cache_miss_ratio"),
        7,
        needs=_counter("cache_miss_ratio"),
    ),
    Column(
        "switches",
        "SWITCH/S",
        8,
        lambda j: text.count(j["counters"]["context_switches_per_s"]),
        _counter("context_switches_per_s"),
        6,
    ),
    Column(
        "wait",
        "WAIT",
        6,
        lambda j: text.number(j["counters"]["run_queue_wait_cores"]),
        _counter("run_queue_wait_cores"),
        5,
    ),
    Column("memory", "MEMORY", 9, lambda j: text.size(j["memory_bytes"]), lambda j: j["memory_bytes"], 2),
    Column("io", "I/O", 11, lambda j: text.size_rate(io_bytes(j)), io_bytes, 4),
    Column("processes", "PROCS", 5, lambda j: text.count(j["processes"]), lambda j: j["processes"], 3),
    Column(
        "state",
        "STATE",
        9,
        lambda j: (j["state"] or text.UNKNOWN).replace("_", " "),
        lambda j: j["state"],
        1,
        right=False,
    ),
    Column(
        "python",
        "PYTHON",
        PYTHON_WIDTH,
        lambda j: hot_line(_hottest(j)),
        lambda j: (_hottest(j) or {}).get("share"),
        8,
        right=False,
        needs=_hottest,
    ),
)
BY_NAME = {column.name: column for column in COLUMNS}
SORT_KEYS = tuple(column.name for column in COLUMNS if column.name != HISTORY)


def choose(jobs: Sequence[Values], width: int | None, history: bool) -> list[Column]:
    """The columns that make sense for these jobs and fit into `width` columns of the terminal."""
    columns = [
        c
        for c in COLUMNS
        if (not c.needs or any(c.needs(j) is not None for j in jobs)) and (history or c.name != HISTORY)
    ]
    while width is not None and len(columns) > 1 and total_width(columns, jobs) > width:
        columns.remove(max(columns, key=lambda c: (c.rank, c.width)))
    return columns


def key_width(jobs: Sequence[Values]) -> int:
    """What the jobs' keys need, within reason."""
    return max(8, min(36, max((text.cell_width(job["key"]) for job in jobs), default=0)))


def total_width(columns: Sequence[Column], jobs: Sequence[Values]) -> int:
    """Of a table of these columns, two blanks between them."""
    return sum((key_width(jobs) if c.name == "key" else c.width) + 2 for c in columns) - 2


def sort(jobs: Iterable[Values], name: str, reverse: bool = False) -> list[Values]:
    """`jobs` by the column `name`, the most first, unknown last; `reverse` turns the known ones around."""
    order = BY_NAME[name].order
    known: list[Values] = []
    unknown: list[Values] = []
    for job in jobs:
        (unknown if order(job) is None else known).append(job)
    known.sort(key=lambda j: (j["key"], j["run"]))
    known.sort(key=order, reverse=bool(known) and (not isinstance(order(known[0]), str)) != reverse)
    unknown.sort(key=lambda j: (j["key"], j["run"]))
    return known + unknown


def matches(job: Values, wanted: str) -> bool:
    """Whether the text of a filter is in the job's key, name or user."""
    wanted = wanted.casefold()
    return any(wanted in (job[field] or "").casefold() for field in ("key", "name", "user", "state"))
