"""What was measured, as text, as Markdown and as JSON: all of it from the records alone.

The JSON is one object:

    form        1; it changes when a field changes its meaning
    machine     as in the records, or null
    sessions    one per start of the bench, as in the records
    warnings    lines of text: what should not have been while it ran
    runs        counts: all, counted (in complete pairs), warm_up, failed, thrown_away
    cells       one per workload and arm, in the order in which they were begun:
        workload, arm, pairs
        percent, interval, bootstrap, spread_percent, measurable, sentence: as in `statistics.Comparison`,
                    intervals as [low, high]; null where there is none, `why_not` says why then
        stopped     "agreed", "max_pairs", "failed" or "not finished", with `detail`
        resources   the measures of `figures.MEASURES` by name, in the unit that ends the name; null: not
                    known. `job_memory_added_interval` is [low, high] in bytes, or null
        missing     the same names to the reasons
        warm_up, thrown_away: numbers of runs
        failed      the runs that failed: role, pair, attempt, started_ns, reason
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from expanse_ebpf import text as words
from expanse_ebpf.bench import figures
from expanse_ebpf.bench.figures import MEASURES, Cell, Measure
from expanse_ebpf.bench.results import Results, Run, Session
from expanse_ebpf.bench.statistics import Interval

WIDTH: Final = 110
UNKNOWN: Final = "\N{EN DASH}"
_NAME = 24  # columns at most for the name of a workload or an arm
_REASON = 400
HEADINGS: Final = ("arm", "pairs", "longer by", "95 % (t)", "95 % (bootstrap)", "ended")
STOPPED: Final = {
    "agreed": "agreed",
    "max_pairs": "most pairs",
    "failed": "given up",
    "not finished": "not finished",
}

Row = tuple[str, ...]


def text(results: Results) -> str:
    """Tables for a terminal of 110 columns."""
    cells = figures.cells(results)
    lines = [wrapped for line in head(results, cells) for wrapped in _wrap(line)]
    for workload, listed in figures.by_workload(cells).items():
        lines += ["", name(workload).upper(), *_columns([HEADINGS, *map(comparison_row, listed)])]
        lines += ["", *(wrapped for line in outcomes(listed) for wrapped in _wrap(line))]
        for part in _parts(listed):
            lines += ["", *_columns(resource_rows(part))]
        lines += [wrapped for line in notes(listed) for wrapped in _wrap(line)]
    return "\n".join(lines)


def markdown(results: Results) -> str:
    """The same for a README."""
    cells = figures.cells(results)
    lines = ["- " + _marked(line) for line in head(results, cells)]
    for workload, listed in figures.by_workload(cells).items():
        lines += ["", f"### {_marked(name(workload))}", ""]
        lines += _marked_table([HEADINGS, *map(comparison_row, listed)])
        lines += ["", *("- " + _marked(line) for line in outcomes(listed)), ""]
        lines += _marked_table(resource_rows(listed))
        lines += ["", *("- " + _marked(line) for line in notes(listed))]
    return "\n".join(lines).rstrip()


def as_json(results: Results) -> str:
    """All figures, in the shape that this module's docstring describes."""
    cells = figures.cells(results)
    document = {
        "form": 1,
        "machine": asdict(results.machine) if results.machine else None,
        "sessions": [asdict(record) for record in results.records if isinstance(record, Session)],
        "warnings": figures.warnings(results),
        "runs": counts(cells),
        "cells": [_cell(each) for each in cells],
    }
    return json.dumps(document, indent=2, allow_nan=False).replace("\x7f", "\\u007f")


def given_up(results: Results) -> list[str]:
    """The comparisons that were given up, and why: a line each."""
    return [
        f"{name(each.workload)} beside {name(each.arm)}: {words.clean(each.detail, _REASON)}"
        for each in figures.cells(results)
        if each.stopped == "failed"
    ]


# ---- the parts of a report, as clean text


def name(raw: str) -> str:
    """A workload's or an arm's name as it is shown."""
    return words.cut(words.clean(raw), _NAME)


def head(results: Results, cells: Sequence[Cell]) -> list[str]:
    """The machine in a few lines, what should not have been, and how many runs there were."""
    lines = []
    if (machine := results.machine) is not None:
        when = UNKNOWN
        if 0 < machine.time_ns < 1 << 62:
            when = f"{datetime.fromtimestamp(machine.time_ns // 10**9, UTC):%Y-%m-%d %H:%M} UTC"
        memory = words.size(machine.memory_bytes)
        where = {None: "", "": "bare metal"}.get(machine.virtualised, f"virtual ({machine.virtualised})")
        counters = {None: "", True: "with hardware counters", False: "without hardware counters"}[machine.pmu]
        governor = f"governor {machine.governor}" if machine.governor else ""
        gpus = (
            ", ".join(machine.gpus) and f"GPUs {', '.join(machine.gpus)}, driver {machine.driver or UNKNOWN}"
        )
        tools = ", ".join(f"{tool} {version}" for tool, version in machine.tools.items())
        every = (
            (machine.host, when, f"kernel {machine.kernel}", machine.architecture),
            (f"{machine.cpus} CPUs, {machine.cpu}", memory, where, counters, governor, gpus),
            (f"expanse-ebpf {machine.expanse}", f"Python {machine.python}", tools),
        )
        lines += [" · ".join(words.clean(part) for part in parts if part) for parts in every]
    lines += [f"WARNING: {words.clean(line, _REASON)}" for line in figures.warnings(results)]
    number = counts(cells)
    lines.append(
        f"{number['all']} runs: {number['counted']} in pairs that count, {number['warm_up']} warm-up, "
        f"{number['failed']} failed, {number['thrown_away']} thrown away since their pair was not completed"
    )
    return lines


def counts(cells: Sequence[Cell]) -> dict[str, int]:
    """How many runs there were, and what became of them."""
    found = {
        "counted": sum(2 * each.pairs for each in cells),
        "warm_up": sum(each.warm_up for each in cells),
        "failed": sum(len(each.failed) for each in cells),
        "thrown_away": sum(each.thrown_away for each in cells),
    }
    return {"all": sum(found.values()), **found}


def comparison_row(cell: Cell) -> Row:
    """By how much the job took longer beside one arm, under `HEADINGS`."""
    found = cell.comparison
    return (
        name(cell.arm),
        str(cell.pairs),
        f"{signed(found.percent)} %" if found else UNKNOWN,
        _interval(found.interval if found else None),
        _interval(found.bootstrap if found else None),
        STOPPED[cell.stopped],
    )


def outcomes(cells: Sequence[Cell]) -> list[str]:
    """A sentence for each comparison."""
    lines = []
    for each in cells:
        said = each.comparison.sentence() if each.comparison else f"no interval: {each.why_not}"
        detail = f"; {STOPPED[each.stopped]}: {words.clean(each.detail, _REASON)}" if each.detail else ""
        lines.append(f"{name(each.arm)}: {said}{detail}")
    return lines


def resource_rows(cells: Sequence[Cell]) -> list[Row]:
    """Titles, then a line per measure and a column per arm."""
    rows: list[Row] = [("resource use", *(name(each.arm) for each in cells))]
    for measure in MEASURES:
        title = f"{measure.title}, {measure.unit}" if measure.unit else measure.title
        rows.append((title, *(value(each, measure) for each in cells)))
    return rows


def value(cell: Cell, measure: Measure) -> str:
    """A measure in the unit that it is shown in; what is added to the job with its interval."""
    known = cell.values.get(measure.name)
    if known is None:
        return UNKNOWN
    if measure.name == "job_memory_added_bytes" and cell.memory_interval is not None:
        low, high = (signed(bound * measure.scale, measure.places) for bound in cell.memory_interval)
        return f"{signed(known * measure.scale, measure.places)} ({low} to {high})"
    figure, places = known * measure.scale, measure.places
    least = 10.0**-places
    # 0 means 0.
    return f"<{least:.{places}f}" if 0 < figure < least / 2 else f"{figure:,.{places}f}"


def notes(cells: Sequence[Cell]) -> list[str]:
    """Why figures are missing, a line per reason; then each run that failed."""
    titles = {measure.name: measure.title for measure in MEASURES}
    reasons: dict[tuple[str, str], list[str]] = {}  # (what, why) to the arms
    for each in cells:
        by_reason: dict[str, list[str]] = {}
        for measure, reason in each.missing.items():
            by_reason.setdefault(reason, []).append(titles[measure])
        for reason, found in by_reason.items():
            reasons.setdefault((", ".join(found), reason), []).append(name(each.arm))
    lines = [
        f"{UNKNOWN} {', '.join(arms)}: {what}: {words.clean(reason, _REASON)}"
        for (what, reason), arms in reasons.items()
    ]
    return lines + [f"failed: {failure(run)}" for each in cells for run in each.failed]


def failure(run: Run) -> str:
    """A run that failed, and why."""
    which = "warm-up" if run.role == "warm_up" else f"pair {run.pair}, attempt {run.attempt}"
    beside = "beside nothing" if not run.watched else f"beside {name(run.arm)}"
    return f"{name(run.arm)}, {which}, {beside}: {words.clean(run.failed, _REASON)}"


def signed(figure: float, places: int = 2) -> str:
    """With a sign always, a real minus; what rounds to 0 is not negative."""
    return f"{round(figure, places) + 0.0:+,.{places}f}".replace("-", "\N{MINUS SIGN}")


def _interval(found: Interval | None) -> str:
    return f"{signed(found.low)} to {signed(found.high)}" if found else UNKNOWN


def _cell(cell: Cell) -> dict[str, Any]:
    found = cell.comparison
    bootstrap = found.bootstrap if found else None
    return {
        "workload": cell.workload,
        "arm": cell.arm,
        "pairs": cell.pairs,
        "percent": found.percent if found else None,
        "interval": [found.interval.low, found.interval.high] if found else None,
        "bootstrap": [bootstrap.low, bootstrap.high] if bootstrap else None,
        "spread_percent": found.spread_percent if found else None,
        "measurable": found.measurable if found else None,
        "sentence": found.sentence() if found else None,
        "why_not": cell.why_not or None,
        "stopped": cell.stopped,
        "detail": cell.detail,
        "resources": {
            **{measure.name: cell.values.get(measure.name) for measure in MEASURES},
            "job_memory_added_interval": cell.memory_interval,
        },
        "missing": cell.missing,
        "warm_up": cell.warm_up,
        "thrown_away": cell.thrown_away,
        "failed": [
            {
                "role": run.role,
                "pair": run.pair,
                "attempt": run.attempt,
                "started_ns": run.started_ns,
                "reason": run.failed,
            }
            for run in cell.failed
        ],
    }


# ---- lines


def _columns(rows: Sequence[Row]) -> list[str]:
    """Columns as wide as their longest entry; the first to the left, the others to the right."""
    widths = [max(map(words.cell_width, column)) for column in zip(*rows, strict=True)]
    right = [False, *[True] * (len(widths) - 1)]
    return ["  ".join(map(words.fit, row, widths, right)).rstrip() for row in rows]


def _parts(cells: Sequence[Cell]) -> list[list[Cell]]:
    """As many arms beside each other as a line has room for."""
    parts: list[list[Cell]] = [[]]
    for each in cells:
        if parts[-1] and max(map(words.cell_width, _columns(resource_rows([*parts[-1], each])))) > WIDTH:
            parts.append([])
        parts[-1].append(each)
    return parts


def _wrap(line: str) -> list[str]:
    """Lines of at most `WIDTH` columns, later ones indented; a word that is longer is broken."""
    lines, current = [], ""
    for word in line.split(" "):
        if current and words.cell_width(current) + 1 + words.cell_width(word) > WIDTH:
            lines.append(current)
            current = "   "
        current += f" {word}" if current else word
        while words.cell_width(current) > WIDTH:
            kept = words.cut(current, WIDTH).removesuffix("…")
            lines.append(kept)
            current = "    " + current[len(kept) :]
    return [*lines, current]


def _marked(line: str) -> str:
    """Text that Markdown takes for nothing else."""
    for sign in "\\`*_[]<>|#~&":
        line = line.replace(sign, f"\\{sign}")
    return line


def _marked_table(rows: Sequence[Row]) -> list[str]:
    lines = ["| " + " | ".join(map(_marked, row)) + " |" for row in rows]
    return [lines[0], "|---" + "|---:" * (len(rows[0]) - 1) + "|", *lines[1:]]
