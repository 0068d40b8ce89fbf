"""The columns of the table of jobs, for the plain table and the live view alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from expanse_ebpf.export.origin import Origin, Origins
from expanse_ebpf.top import text
from expanse_ebpf.top.rates import Values

HISTORY = "history"
PYTHON = "python"
PYTHON_WIDTH = 36
LEAST_PYTHON = 18  # columns; what gives way first
_LEAST_KEY = 20  # likewise
_LITTLE_CPU = 0.5  # cores, below which it says more where a job waits
_TELLING = ("opted out", "unsupported interpreter")  # reasons for which the column is shown


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
        8,
        right=False,
    ),
    Column("cpu", "CORES", 7, lambda j: text.number(j["cpu_cores"]), lambda j: j["cpu_cores"], 0),
    Column(HISTORY, "HISTORY", 12, lambda _: "", lambda j: j["cpu_cores"], 6, right=False),
    Column(
        "ipc",
        "IPC",
        5,
        lambda j: text.number(j["counters"]["ipc"]),
        _counter("ipc"),
        7,
        needs=_counter("ipc"),
    ),
    Column(
        "miss",
        "MISS",
        6,
        lambda j: text.percent(j["counters"]["cache_miss_ratio"]),
        _counter("cache_miss_ratio"),
        9,
        needs=_counter("cache_miss_ratio"),
    ),
    Column(
        "switches",
        "SWITCH/S",
        8,
        lambda j: text.count(j["counters"]["context_switches_per_s"]),
        _counter("context_switches_per_s"),
        7,
    ),
    Column(
        "wait",
        "WAIT",
        6,
        lambda j: text.number(j["counters"]["run_queue_wait_cores"]),
        _counter("run_queue_wait_cores"),
        6,
    ),
    Column("memory", "MEMORY", 9, lambda j: text.size(j["memory_bytes"]), lambda j: j["memory_bytes"], 2),
    Column("io", "I/O", 11, lambda j: text.size_rate(io_bytes(j)), io_bytes, 5),
    Column("processes", "PROCS", 5, lambda j: text.count(j["processes"]), lambda j: j["processes"], 4),
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
        PYTHON,
        "PYTHON",
        PYTHON_WIDTH,
        python_line,
        lambda j: (_hottest(j) or {}).get("share"),
        3,
        right=False,
        needs=_python_is_known,
    ),
)
BY_NAME = {column.name: column for column in COLUMNS}
SORT_KEYS = tuple(column.name for column in COLUMNS if column.name != HISTORY)


Need = Callable[[Column, Sequence[Values]], int]


def usual(column: Column, jobs: Sequence[Values]) -> int:
    """The width of a column whose figures come and go: it should not jump with them."""
    return key_width(jobs) if column.name == "key" else column.width


def printed(column: Column, jobs: Sequence[Values]) -> int:
    """The width that a column has in print, with just these values."""
    return max([len(column.title), *(text.cell_width(column.show(job)) for job in jobs)])


def cell(column: Column, job: Values, width: int) -> str:
    """The job's value in at most about `width` columns."""
    return python_line(job, width) if column.name == PYTHON else column.show(job)


def choose(
    jobs: Sequence[Values], width: int | None, history: bool, sort: str = "cpu", need: Need = usual
) -> tuple[list[Column], list[Column]]:
    """The columns that make sense for these jobs, and fit into `width` columns of the terminal; the others.

    The job's key and the column `sort` are always there.
    """
    columns = [
        c
        for c in COLUMNS
        if (not c.needs or any(c.needs(j) is not None for j in jobs)) and (history or c.name != HISTORY)
    ]
    left_out: list[Column] = []
    while width is not None and sum(_least(c, need(c, jobs)) + 2 for c in columns) - 2 > width:
        spare = [c for c in columns if c.name not in ("key", sort)]
        if not spare:
            break
        left_out.append(max(spare, key=lambda c: (c.rank, c.width)))
        columns.remove(left_out[-1])
    return columns, sorted(left_out, key=COLUMNS.index)


def left_out_line(left_out: Sequence[Column]) -> str:
    """Which columns a wider terminal would show; empty for none."""
    titles = ", ".join(column.title for column in left_out)
    return f"not shown for want of room: {titles}" if titles else ""


def _least(column: Column, needed: int) -> int:
    """What a column can do with where there is little room."""
    return min(needed, {"key": _LEAST_KEY, PYTHON: LEAST_PYTHON}.get(column.name, needed))


def widths(
    columns: Sequence[Column], jobs: Sequence[Values], room: int | None, need: Need = usual
) -> dict[str, int]:
    """The width of each column; in all, with two blanks between them, no more than `room`, as a rule."""
    needed = {column.name: need(column, jobs) for column in columns}
    if room is None:
        return needed
    found = {column.name: _least(column, needed[column.name]) for column in columns}
    spare = room - sum(width + 2 for width in found.values()) + 2
    for name in ("key", PYTHON):
        if name in found and spare > 0:
            more = min(spare, needed[name] - found[name])
            found[name] += more
            spare -= more
    if spare < 0:  # the job's key gives way, the figures do not
        found["key"] = max(4, found["key"] + spare)
    return found


def key_width(jobs: Sequence[Values]) -> int:
    """What the jobs' keys need, within reason."""
    return max(8, min(36, max((text.cell_width(job["key"]) for job in jobs), default=0)))


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
