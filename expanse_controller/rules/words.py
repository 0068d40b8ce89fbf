"""Rules and what comes of them, as tables for people and as plain values for JSON."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from expanse_controller.rules.dry_run import DryRun
from expanse_controller.rules.engine import LOOK_S, NO_DATA, STATES
from expanse_controller.rules.figures import FIGURES
from expanse_controller.rules.rule import Rule
from expanse_controller.rules.subject import NO_GPU
from expanse_ebpf.wire.collector_pb2 import Evidence, RuleState

_STEPS = ((86400, "d"), (3600, "h"), (60, "m"))
_LEAST_WIDTH = 20  # of a column that is wrapped
_OF_NODES = re.compile(r" \(of [^()]*\)$")
_GLUE = "\xa0"
NAMED = 3  # reasons that are told of with all the jobs that have them


def of_rule(rule: Rule) -> dict[str, Any]:
    """A rule, for JSON. Durations are in seconds."""
    return {
        "name": rule.name,
        "about": rule.about,
        "each": rule.each,
        "when": rule.expression.source,
        "figures": list(rule.expression.names),
        "for_s": rule.for_s,
        "cooldown_s": rule.cooldown_s,
        "action": rule.action,
        "window": {"seconds": rule.seconds or None, "stacks": rule.stacks}
        if rule.action == "trace"
        else None,
        "severity": rule.severity,
        "line": rule.line,
        "evaluation_us": round(rule.expression.mean_s * 1e6, 1),
    }


def rules(found: Sequence[Rule], width: int) -> str:
    """Rules one below the other, in lines of at most `width` characters, with what each asks."""
    return "\n\n".join(_rule(rule, width) for rule in found) if found else "no rules"


def _rule(rule: Rule, width: int) -> str:
    action = "no window"
    if rule.action == "trace":
        length = f" of {span(rule.seconds)}" if rule.seconds else ""
        action = f"window{length}{' with stacks' if rule.stacks else ''}"
    terms = (
        f"each {rule.each}",
        f"for {span(rule.for_s)}",
        f"cooldown {span(rule.cooldown_s)}",
        action,
        rule.severity,
    )
    # Only before && and || may a line of it begin.
    asked = re.sub(r" (?!&&|\|\|)", _GLUE, " ".join(rule.expression.source.split()))
    parts = ((f"{rule.name}: {rule.about}", 0), ("; ".join(terms), 2), (asked, 4))
    lines = (_wrapped(text, width, indent) for text, indent in parts)
    return "\n".join(line.replace(_GLUE, " ") for of_part in lines for line in of_part)


def of_figures() -> list[dict[str, str]]:
    """The figures that there are, for JSON."""
    return [
        {
            "name": one.name,
            "unit": one.unit or "true or false",
            "over_nodes": one.over_nodes,
            "about": one.about,
        }
        for one in FIGURES.values()
    ]


def figures(width: int) -> str:
    """A table of the figures that there are, `width` characters wide."""
    rows = [("figure", "unit", "over nodes", "about")]
    rows += [(one["name"], one["unit"], one["over_nodes"], one["about"]) for one in of_figures()]
    return table(rows, width)


def evidence(found: Iterable[Evidence]) -> dict[str, Any]:
    """Figures by name."""
    return {one.name: one.value if one.HasField("value") else one.text for one in found}


def of_state(state: RuleState) -> dict[str, Any]:
    """How a rule stands with a job, for JSON."""
    return {
        "rule": state.rule,
        "job": state.key,
        "node": state.node,
        "state": state.state,
        "since_ns": state.since_ns,
        "reason": state.reason,
        "window": state.window,
        "evidence": evidence(state.evidence),
    }


def states(found: Sequence[Mapping[str, Any]], everything: bool) -> str:
    """A table of what `of_state` made; unless `everything`, what has no data is in one line below it."""
    rows = [("state", "rule", "job", "node", "since", "window", "reason", "figures")]
    rows += [
        (
            one["state"],
            one["rule"],
            one["job"],
            one["node"],
            when(one["since_ns"]),
            one["window"],
            one["reason"],
            _figures(one["evidence"]),
        )
        for one in found
        if everything or one["state"] != NO_DATA
    ]
    told = [table(rows)] if rows[1:] else []
    if not everything:
        told += without_data((one["job"], one["reason"]) for one in found if one["state"] == NO_DATA)
    return "\n".join(told) or "no rule has looked at a job yet"


def without_data(found: Iterable[tuple[str, str]]) -> list[str]:
    """One line that tells how many jobs have no data and why, from jobs and reasons; none without jobs."""
    jobs: dict[str, set[str]] = {}
    for job, reason in found:
        jobs.setdefault(_OF_NODES.sub("", reason), set()).add(job)
    if not jobs:
        return []
    ranked = sorted(jobs.items(), key=lambda item: (-len(item[1]), item[0]))
    told = [_jobs(with_it, reason) for reason, with_it in ranked[:NAMED]]
    if ranked[NAMED:]:
        told.append(f"{len(set().union(*(others for _, others in ranked[NAMED:])))} for other reasons")
    return [_harmless(f"no data: {'; '.join(told)} (--all lists them)")]


def _jobs(found: Collection[str], reason: str) -> str:
    jobs = "1 job" if len(found) == 1 else f"{len(found)} jobs"
    if reason == NO_GPU:
        return f"{jobs} {reason if len(found) == 1 else reason.replace('holds', 'hold')}"
    return f"{jobs}, {reason}"


def of_dry_run(run: DryRun) -> dict[str, Any]:
    """What a dry run found, for JSON."""
    return {
        "from_ns": run.from_ns,
        "to_ns": run.to_ns,
        "looks": run.looks,
        "fired": [
            {
                "time_ns": fired.time_ns,
                "rule": fired.firing.rule.name,
                "job": fired.firing.key,
                "nodes": list(fired.firing.nodes),
                "action": fired.firing.rule.action,
                "severity": fired.firing.rule.severity,
                "evidence": evidence(fired.firing.request.evidence),
            }
            for fired in run.fired
        ],
        "states": [
            {"rule": rule, "job": job, "node": node}
            | {f"{state}_s": seconds[state] for state in STATES}
            | {"reason": run.reasons.get((rule, job, node), "")}
            for (rule, job, node), seconds in sorted(run.seconds.items())
        ],
    }


def dry_run(run: DryRun, everything: bool) -> str:
    """What a dry run found: when each rule would have fired, then for how long each stood how.

    Unless `everything`, what had no data all the time is in one line below it.
    """
    found = of_dry_run(run)
    if not run.looks:
        return "no samples in that time"
    rows = [("time", "rule", "job", "action", "figures")]
    rows += [
        (when(one["time_ns"]), one["rule"], one["job"], one["action"], _figures(one["evidence"]))
        for one in found["fired"]
    ]
    times = "once" if run.looks == 1 else f"{run.looks} times"
    told = [
        f"{when(run.from_ns)} to {when(run.to_ns)}, looked at {times}, every {span(LOOK_S)}",
        table(rows) if run.fired else "no rule would have fired",
    ]
    shown = [one for one in found["states"] if everything or one["firing_s"] or one["ok_s"]]
    stood = [("rule", "job", "node", *STATES, "reason")]
    stood += [
        (one["rule"], one["job"], one["node"], *(span(one[f"{s}_s"]) for s in STATES), one["reason"])
        for one in shown
    ]
    if shown:
        told.append(table(stood))
    told += without_data((one["job"], one["reason"]) for one in found["states"] if one not in shown)
    return "\n\n".join(told)


def table(rows: Sequence[Sequence[str]], width: int = 0) -> str:
    """Rows as lines, the first in capitals, cells one below the other, without columns that are empty.

    What others wrote is made harmless. With a `width` the last column is wrapped.
    """
    cells = [[_harmless(cell) for cell in row] for row in rows]
    cells[0] = [cell.upper() for cell in cells[0]]
    columns = [column for column in zip(*cells, strict=True) if any(column[1:])]
    widths = [max(map(len, column)) for column in columns]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    if width:
        widths[-1] = max(_LEAST_WIDTH, width - before)
    lines = []
    for row in zip(*columns, strict=True):
        first, *others = _wrapped(row[-1], widths[-1], 0) if width else [row[-1]]
        lines.append("  ".join(f"{cell:{w}}" for cell, w in zip((*row[:-1], first), widths, strict=True)))
        lines += [" " * before + other for other in others]
    return "\n".join(line.rstrip() for line in lines)


def _wrapped(text: str, width: int, indent: int) -> list[str]:
    left = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=left, subsequent_indent=left, break_on_hyphens=False
    ) or [""]


def _harmless(text: str) -> str:
    return "".join(c if c.isprintable() else "�" for c in " ".join(text.split()))


def span(seconds: float) -> str:
    """A duration: `2m`, `5m40s`, `1d2h`."""
    told = ""
    for size, unit in _STEPS:
        if seconds >= size:
            told += f"{int(seconds // size)}{unit}"
            seconds %= size
    return told + f"{seconds:g}s" if seconds or not told else told


def when(time_ns: int) -> str:
    """A moment in UTC, to the second."""
    try:
        return datetime.fromtimestamp(time_ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    except (ValueError, OverflowError, OSError):
        return str(time_ns)


def _figures(found: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in found.items()
    )
