"""Rules and what comes of them, as tables for people and as plain values for JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from expanse_controller.rules.dry_run import DryRun
from expanse_controller.rules.engine import STATES
from expanse_controller.rules.figures import FIGURES
from expanse_controller.rules.rule import Rule
from expanse_ebpf.wire.collector_pb2 import Evidence, RuleState

_STEPS = ((86400, "d"), (3600, "h"), (60, "m"))


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
        "window": {"seconds": rule.seconds, "stacks": rule.stacks} if rule.action == "trace" else None,
        "severity": rule.severity,
        "line": rule.line,
        "evaluation_us": round(rule.expression.mean_s * 1e6, 1),
    }


def rules(found: Sequence[Rule]) -> str:
    """A table of rules, with what each asks."""
    rows = [("rule", "each", "for", "cooldown", "action", "severity", "asks")]
    rows += [
        (
            rule.name,
            rule.each,
            span(rule.for_s),
            span(rule.cooldown_s),
            f"trace {rule.seconds:g} s" if rule.action == "trace" and rule.seconds else rule.action,
            rule.severity,
            rule.expression.source,
        )
        for rule in found
    ]
    return table(rows) if found else "no rules"


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


def figures() -> str:
    """A table of the figures that there are."""
    rows = [("figure", "unit", "over nodes", "")]
    rows += [(one["name"], one["unit"], one["over_nodes"], one["about"]) for one in of_figures()]
    return table(rows)


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


def states(found: Sequence[Mapping[str, Any]]) -> str:
    """A table of what `of_state` made."""
    rows = [("state", "rule", "job", "node", "since", "window", "")]
    rows += [
        (
            one["state"],
            one["rule"],
            one["job"],
            one["node"],
            when(one["since_ns"]),
            one["window"],
            "; ".join(filter(None, (one["reason"], _figures(one["evidence"])))),
        )
        for one in found
    ]
    return table(rows) if found else "no rule has looked at a job yet"


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
            {"rule": rule, "job": job, "node": node} | {f"{state}_s": seconds[state] for state in STATES}
            for (rule, job, node), seconds in sorted(run.seconds.items())
        ],
    }


def dry_run(run: DryRun) -> str:
    """What a dry run found: when each rule would have fired, then for how long each stood how."""
    found = of_dry_run(run)
    if not run.looks:
        return "no samples in that time"
    rows = [("time", "rule", "job", "action", "figures")]
    rows += [
        (when(one["time_ns"]), one["rule"], one["job"], one["action"], _figures(one["evidence"]))
        for one in found["fired"]
    ]
    fired = table(rows) if run.fired else "no rule would have fired"
    stood = [("rule", "job", "node", *STATES)]
    stood += [
        (one["rule"], one["job"], one["node"], *(span(one[f"{state}_s"]) for state in STATES))
        for one in found["states"]
    ]
    head = f"{when(run.from_ns)} to {when(run.to_ns)}, {run.looks} looks"
    return f"{head}\n\n{fired}\n\n{table(stood)}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, the first in capitals, cells one below the other; what others wrote is made harmless."""
    cells = [
        ["".join(c if c.isprintable() else "�" for c in " ".join(cell.split())) for cell in row]
        for row in rows
    ]
    cells[0] = [cell.upper() for cell in cells[0]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ("  ".join(f"{cell:{w}}" for cell, w in zip(row, widths, strict=True)) for row in cells)
    return "\n".join(line.rstrip() for line in lines)


def span(seconds: float) -> str:
    """A duration as a rules file has it: `90s`, `2h`."""
    for size, unit in _STEPS:
        if seconds >= size and seconds % size == 0:
            return f"{seconds / size:g}{unit}"
    return f"{seconds:g}s"


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
