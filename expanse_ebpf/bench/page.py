"""The report as one HTML page with plots: `page.html`, the figures and plotly.js in one file.

The page's content security policy lets nothing in but the page's own scripts, and no request out. Names are
text from outside: escaped for HTML, and for plotly too, whose labels have tags of their own (`<b>`, `<a>`).
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import json
import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final

from expanse_ebpf import text as words
from expanse_ebpf.bench import figures, report
from expanse_ebpf.bench.figures import MEASURES, Cell
from expanse_ebpf.bench.results import Results, Run
from expanse_ebpf.errors import UnavailableError

# Okabe and Ito's, as far as they can be told from both grounds and by the colour-blind.
_COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "star", "pentagon", "hexagon")
_PLOTTED: Final = (
    "collector_cores",
    "collector_pss_bytes",
    "sent_bytes_per_s",
    "disk_bytes_per_s",
    "bpf_s_per_s",
)
_EXPLAINED: Final = (
    "Each run beside an arm is paired with a run beside nothing, back to back and in random order; "
    "“longer by” is the mean of the logarithms of the pairs' ratios of times, as a percentage. "
    "The intervals hold the truth in 95 % of benches, by Student's t and by resampling (bootstrap), "
    "the repeated looking paid for: where 0 is in the first, no difference could be measured."
)
_RUNS = ("no.", "begun (UTC)", "arm", "beside", "pair", "seconds", "what became of it")

Plot = dict[str, Any]


def html(results: Results) -> str:
    """The page. Raises UnavailableError without plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise UnavailableError(
            "the page with plots needs plotly: pip install 'expanse-ebpf[bench]' (or plotly)"
        ) from None
    cells = figures.cells(results)
    title = "What watching costs"
    machine = results.machine
    if machine is not None:
        title += f" on {words.clean(machine.host)}"
    body = [f"<h1>{_escaped(title)}</h1>"]
    body += [
        f'<p class="{"warning" if line.startswith("WARNING") else "soft"}">{_escaped(line)}</p>'
        for line in report.head(results, cells)
    ]
    body.append(f"<p>{_escaped(_EXPLAINED)}</p>")
    plots: dict[str, Plot] = {}
    runs: dict[str, list[Run]] = {}
    for run in results.runs:
        runs.setdefault(run.workload, []).append(run)
    counted = {id(run) for each in cells for pair in results.pairs(each.workload, each.arm) for run in pair}
    for number, (workload, listed) in enumerate(figures.by_workload(cells).items()):
        ids = [f"{kind}{number}" for kind in ("intervals", "times", "use")]
        plots |= zip(ids, (_intervals(listed), _times(runs[workload], listed), _use(listed)), strict=True)
        body += _section(workload, listed, runs[workload], counted, ids)
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    library = get_plotlyjs()
    parts = {
        "policy": _policy(template, library),
        "title": _escaped(title),
        "body": "\n".join(body),
        "library": library,
        # Neither "</script>" nor "<!--" can stand in it, the only ways out of a script element.
        "data": json.dumps(plots, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
    }
    # In one pass: what is filled in is not searched for more places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def _policy(template: str, library: str) -> str:
    """A policy that lets in the two scripts by digest, styles (plotly makes its own) and no request."""
    own = re.findall(r"<script>(.*?)</script>", template, re.DOTALL)[-1]
    digests = [base64.b64encode(hashlib.sha256(each.encode()).digest()).decode() for each in (library, own)]
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data: blob:; "
        f"style-src 'unsafe-inline'; script-src {scripts}"
    )


# ---- HTML


def _escaped(text: str) -> str:
    return markup.escape(text)


def _section(
    workload: str, cells: Sequence[Cell], runs: Sequence[Run], counted: set[int], ids: Sequence[str]
) -> list[str]:
    intervals, times, use = (f'<div class="plot" id="{each}"></div>' for each in ids)
    rows = [_run_row(number, run, id(run) in counted) for number, run in enumerate(runs, 1)]
    return [
        f"<section><h2>{_escaped(report.name(workload))}</h2>",
        "<h3>How much longer the job took</h3>",
        intervals,
        _table([report.HEADINGS, *map(report.comparison_row, cells)]),
        _list(report.outcomes(cells)),
        "<h3>Run times, in the order in which they ran</h3>",
        times,
        f"<details><summary>All {len(rows)} runs</summary>{_table([_RUNS, *rows])}</details>",
        "<h3>What the collector took of the node</h3>",
        use,
        _table(report.resource_rows(cells)),
        _list(report.notes(cells)),
        "</section>",
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Iterable[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{_escaped(cell)}</{tag}>" for cell in cells) + "</tr>"

    head, *body = rows
    return (
        f'<div class="wide"><table>{row(head, "th")}{"".join(row(each, "td") for each in body)}</table></div>'
    )


def _list(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_escaped(line)}</li>' for line in lines)}</ul>" if lines else ""


def _run_row(number: int, run: Run, counted: bool) -> tuple[str, ...]:
    begun = report.UNKNOWN
    if 0 < run.started_ns < 1 << 62:
        begun = f"{datetime.fromtimestamp(run.started_ns // 10**9, UTC):%Y-%m-%d %H:%M:%S}"
    became = "counts" if counted else "thrown away: its pair was not completed"
    if run.failed:
        became = f"failed: {words.clean(run.failed)}"
    elif run.role == "warm_up":
        became = "warm-up"
    return (
        str(number),
        begun,
        report.name(run.arm),
        report.name(run.arm) if run.watched else "nothing",
        str(run.pair) if run.pair else report.UNKNOWN,
        f"{run.seconds:.3f}" if run.seconds is not None else report.UNKNOWN,
        became,
    )


# ---- plots, as plotly's JSON; "@…" is a colour that the page chooses


def _label(text: str) -> str:
    """A name in a label: plotly takes tags and entities for markup, so neither may be left."""
    return markup.escape(report.name(text))


def _intervals(cells: Sequence[Cell]) -> Plot:
    """A line per arm: the estimate, both intervals, and where 0 is."""
    found = [(-row, each, each.comparison) for row, each in enumerate(cells)]
    traces = []
    for title, shift, bar in (("Student's t", 0.13, 3), ("bootstrap", -0.13, 1.5)):
        shown = [
            (y, each, c.percent, interval)
            for y, each, c in found
            if c and (interval := c.interval if shift > 0 else c.bootstrap)
        ]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": title,
                "x": [percent for _, _, percent, _ in shown],
                "y": [y + shift for y, *_ in shown],
                "error_x": {
                    "type": "data",
                    "symmetric": False,
                    "array": [max(0.0, interval.high - percent) for _, _, percent, interval in shown],
                    "arrayminus": [max(0.0, percent - interval.low) for _, _, percent, interval in shown],
                    "thickness": bar,
                    "width": 5,
                },
                "marker": {"size": 9 if shift > 0 else 6, "color": _COLOURS[0 if shift > 0 else 1]},
                "hoverinfo": "text",
                "hovertext": [
                    f"{_label(each.arm)}<br>{report.signed(percent)} % "
                    f"({report.signed(interval.low)} to {report.signed(interval.high)}, {title})"
                    for _, each, percent, interval in shown
                ],
            }
        )
    return {
        "data": traces,
        "layout": {
            "height": 110 + 46 * len(cells),
            "margin": {"l": 10, "r": 15, "t": 10, "b": 70},
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
            "xaxis": _axis(title={"text": "% longer than beside nothing"}, zeroline=True),
            "yaxis": _axis(**_arms(cells), range=[0.6 - len(cells), 0.6], zeroline=False, showgrid=False),
        },
    }


def _times(runs: Sequence[Run], cells: Sequence[Cell]) -> Plot:
    """Every run's time, by its place in the order; what failed, which has none, at the edge of the others."""
    times = [run.seconds for run in runs if run.seconds is not None and math.isfinite(run.seconds)]
    least, most = min(times, default=0.0), max(times, default=0.0)
    groups: dict[tuple[str, str], list[tuple[int, Run]]] = {("off", ""): []}
    groups |= {("arm", each.arm): [] for each in cells}
    groups |= {("warm_up", ""): [], ("failed", ""): []}
    for number, run in enumerate(runs, 1):
        kind: str = run.role if run.seconds is not None else "failed"
        groups[kind, run.arm if kind == "arm" else ""].append((number, run))
    named = {"off": "off", "warm_up": "warm-up (does not count)", "failed": "failed"}
    marks: dict[str, dict[str, object]] = {
        "off": {"symbol": "circle-open", "color": "@off"},
        "warm_up": {"symbol": "cross-thin-open", "color": "@off"},
        "failed": {"symbol": "x", "color": "@failed", "size": 10},
    }
    order = {each.arm: row for row, each in enumerate(cells)}
    traces = []
    for (kind, arm), members in groups.items():
        shown = [
            (number, run, run.wall_s if run.seconds is None else run.seconds)
            for number, run in members
            if math.isfinite(run.wall_s if run.seconds is None else run.seconds)
        ]
        if not shown:
            continue
        mark = {"size": 7} | (marks.get(kind) or _mark(order[arm]))
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": _label(arm) if kind == "arm" else named[kind],
                "x": [number for number, *_ in shown],
                "y": [max(least, min(seconds, most)) for *_, seconds in shown],
                "marker": mark,
                "hoverinfo": "text",
                "hovertext": [_hover(number, run, seconds) for number, run, seconds in shown],
            }
        )
    return {
        "data": traces,
        "layout": {
            "height": 380,
            "margin": {"l": 55, "r": 15, "t": 10, "b": 40},
            "showlegend": True,
            "legend": {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0},
            "xaxis": _axis(title={"text": "run"}, zeroline=False),
            "yaxis": _axis(title={"text": "seconds"}, zeroline=False),
        },
    }


def _hover(number: int, run: Run, seconds: float) -> str:
    which = f"pair {run.pair}" if run.pair else "warm-up"
    beside = _label(run.arm) if run.watched else f"nothing (compared with {_label(run.arm)})"
    failed = f"<br>failed: {markup.escape(words.clean(run.failed, 100))}" if run.failed else ""
    return f"run {number}, {which}<br>beside {beside}<br>{seconds:.3f} s{failed}"


def _use(cells: Sequence[Cell]) -> Plot:
    """Bars of what has a figure at all, measures of one unit each below the other."""
    shown = [m for m in MEASURES if m.name in _PLOTTED and any(m.name in each.values for each in cells)]
    traces, notes, layout = [], [], {}
    row = 24 * len(cells) + 62  # pixels, the title above and the numbers below included
    height = row * len(shown)
    for place, measure in enumerate(shown):
        axis = str(place + 1) if place else ""
        known = [(-no, each) for no, each in enumerate(cells) if measure.name in each.values]
        top, bottom = 1 - (place * row + 26) / height, 1 - (place * row + row - 26) / height
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "x": [each.values[measure.name] * measure.scale for _, each in known],
                "y": [y for y, _ in known],
                "xaxis": f"x{axis}",
                "yaxis": f"y{axis}",
                "marker": {"color": [_mark(-y)["color"] for y, _ in known]},
                "hoverinfo": "text",
                "text": [report.value(each, measure) for _, each in known],
                "textposition": "outside",
                "textfont": {"color": "@text"},
                "cliponaxis": False,
                "hovertext": [
                    f"{_label(each.arm)}: {report.value(each, measure)} {measure.unit}" for _, each in known
                ],
            }
        )
        layout[f"xaxis{axis}"] = _axis(anchor=f"y{axis}", rangemode="tozero", zeroline=True, nticks=6)
        layout[f"yaxis{axis}"] = _axis(
            **_arms(cells),
            anchor=f"x{axis}",
            domain=[max(0.0, bottom), min(1.0, top)],
            range=[0.5 - len(cells), 0.5],
            zeroline=False,
            showgrid=False,
        )
        title = {"text": f"<b>{measure.title}</b>, {measure.unit}", "xref": "paper", "yref": "paper"}
        place_of = {"x": 0, "y": min(1.0, top), "xanchor": "left", "yanchor": "bottom", "showarrow": False}
        notes.append(title | place_of)
    margin = {"l": 10, "r": 40, "t": 0, "b": 0}
    common = {"height": max(height, 60), "showlegend": False, "margin": margin, "annotations": notes}
    return {"data": traces, "layout": common | layout}


def _arms(cells: Sequence[Cell]) -> dict[str, object]:
    return {
        "tickvals": [-row for row in range(len(cells))],
        "ticktext": [_label(each.arm) for each in cells],
        "automargin": True,
    }


def _mark(row: int) -> dict[str, object]:
    return {"color": _COLOURS[row % len(_COLOURS)], "symbol": _SYMBOLS[row % len(_SYMBOLS)]}


def _axis(**more: object) -> dict[str, object]:
    return {"gridcolor": "@line", "zerolinecolor": "@zero", "linecolor": "@line", "fixedrange": True, **more}
