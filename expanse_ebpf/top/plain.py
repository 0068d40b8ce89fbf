"""A snapshot as a plain table, for pipes and for terminals that can do no more."""

from __future__ import annotations

from collections.abc import Sequence

from expanse_ebpf.top import columns, text
from expanse_ebpf.top.rates import Values
from expanse_ebpf.top.text import Locale

_MOST_TEXT = 20  # columns of a terminal for a name that somebody chose


def render(
    snapshot: Values,
    width: int | None = None,
    height: int | None = None,
    sort: str = "cpu",
    locale: Locale | None = None,
) -> str:
    """The node, its jobs and the collector's own cost as lines of text.

    `width` and `height` in characters; None: as large as it comes, for a pipe.
    """
    locale = locale or Locale()
    jobs = columns.sort(snapshot["jobs"], sort)
    table, left_out = _table(jobs, width, sort) if jobs else (["no jobs"], "")
    cost, *wrong = footer(snapshot)
    foot = [cost, *([left_out] if left_out else []), *wrong]
    gap = [] if height is not None and height < 12 else [""]
    room = len(jobs)
    if height is not None:
        foot = foot[: max(1, height // 6)]
        # Less the first line, the titles, the line that says "more", and the prompt below.
        room = max(1, height - 4 - 2 * len(gap) - len(foot))
    lines = [headline(snapshot), *gap, *table[: room + 1]]
    if len(jobs) > room:
        lines.append(f"… {len(jobs) - room} more")
    lines += gap + foot
    if height is not None:
        lines = lines[: max(1, height - 1)]
    if width is not None:
        lines = [text.fit(line, width).rstrip() for line in lines]
    return "".join(locale.text(line.rstrip()) + "\n" for line in lines)


def _table(jobs: list[Values], width: int | None, sort: str) -> tuple[list[str], str]:
    """The table's lines, and one that says what has no room in it."""

    def need(column: columns.Column, jobs: Sequence[Values]) -> int:
        needed = columns.printed(column, jobs)
        a_text = not column.right and column.name not in ("key", columns.PYTHON)
        return min(needed, max(column.width, _MOST_TEXT)) if a_text and width is not None else needed

    chosen, left_out = columns.choose(jobs, width, history=False, sort=sort, need=need)
    widths = columns.widths(chosen, jobs, width, need)
    rows = [[c.title for c in chosen]]
    rows += [[columns.cell(c, job, widths[c.name]) for c in chosen] for job in jobs]
    lines = [
        "  ".join(text.fit(cell, widths[c.name], c.right) for cell, c in zip(row, chosen, strict=True))
        for row in rows
    ]
    return lines, columns.left_out_line(left_out)


def headline(snapshot: Values, date: bool = True) -> str:
    """The node in one line."""
    host = snapshot["host"]
    time = (snapshot["time"] or text.UNKNOWN).replace("T", " ").partition(".")[0]
    if not date:
        time = time.rpartition(" ")[2]
    used = None
    if host["memory_total_bytes"] is not None and host["memory_available_bytes"] is not None:
        used = max(0, host["memory_total_bytes"] - host["memory_available_bytes"])
    count = len(snapshot["jobs"])
    parts = [
        text.clean(snapshot["node"] or text.UNKNOWN),
        f"{time} UTC",
        f"{count} job{'' if count == 1 else 's'}",
        f"cpu {text.number(host['cpu_cores'])} of {text.count(host['cpus_online'])} cores",
        f"memory {text.size(used)} of {text.size(host['memory_total_bytes'])}",
        f"load {text.number(host['load_1m'])}",
    ]
    if snapshot["stale"]:
        parts.insert(0, f"STALE, {snapshot['age_s']:.0f} s old")
    return " · ".join(parts)


def own_cost(snapshot: Values) -> str:
    """What the collector itself costs, in one line."""
    collector = snapshot["collector"]
    bpf = collector["bpf"]["ns_per_s"]
    return (
        f"collector {text.number(collector['cpu_cores'], 3)} cores · {text.size(collector['pss_bytes'])} PSS"
        f" · BPF {text.nanoseconds(bpf)}{'' if bpf is None else ' per s'}"
    )


def trouble(snapshot: Values) -> list[str]:
    """What is missing or lost at the collector: one line each, mostly none."""
    collector = snapshot["collector"]
    lines = [
        f"source {text.clean(s['name'])} is off: {text.clean(s['reason'] or 'no reason given')}"
        for s in collector["sources"]
        if not s["up"]
    ]
    missing: dict[str, list[str]] = {}  # by reason, which many parts may share
    for source in collector["sources"]:
        for part, reason in sorted(source["unavailable"].items()):
            missing.setdefault(reason, []).append(part)
    lines += [f"not known: {text.clean(', '.join(p))}: {text.clean(r)}" for r, p in missing.items()]
    for field, words in (
        ("events_lost", "cgroup events lost; the cgroup tree was compared instead"),
        ("reports_dropped", "reports dropped before the controller took them"),
        ("ticks_missed", "ticks missed"),
        ("slots_exhausted", "cgroups without an accounting slot"),
    ):
        if collector[field]:
            lines.append(f"{collector[field]} {words}")
    return lines


def footer(snapshot: Values) -> list[str]:
    """The collector's own cost, and what is wrong with it."""
    return [own_cost(snapshot), *trouble(snapshot)]
