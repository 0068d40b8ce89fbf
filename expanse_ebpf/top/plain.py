"""A snapshot as a plain table, for pipes and for terminals that can do no more."""

from __future__ import annotations

from expanse_ebpf.top import columns, text
from expanse_ebpf.top.rates import Values
from expanse_ebpf.top.text import Locale


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
    foot = footer(snapshot)
    gap = [] if height is not None and height < 12 else [""]
    room = len(jobs)
    if height is not None:
        foot = foot[: max(1, height // 6)]
        # Less the first line, the titles, the line that says "more", and the prompt below.
        room = max(1, height - 4 - 2 * len(gap) - len(foot))
    rows = jobs[:room]
    lines = [headline(snapshot), *gap, *(_table(rows, width) if jobs else ["no jobs"])]
    if len(jobs) > len(rows):
        lines.append(f"… {len(jobs) - len(rows)} more")
    lines += gap + foot
    if height is not None:
        lines = lines[: max(1, height - 1)]
    if width is not None:
        lines = [text.fit(line, width).rstrip() for line in lines]
    return "".join(locale.text(line.rstrip()) + "\n" for line in lines)


def _table(jobs: list[Values], width: int | None) -> list[str]:
    chosen = columns.choose(jobs, width, history=False)
    cells = [[column.show(job) for column in chosen] for job in jobs]
    widths = [max([len(c.title), *(text.cell_width(row[i]) for row in cells)]) for i, c in enumerate(chosen)]
    if width is not None:  # the job's key gives way, the figures do not
        over = sum(w + 2 for w in widths) - 2 - width
        widths[0] = max(min(widths[0], 6), widths[0] - max(0, over))
    rows = [[c.title for c in chosen], *cells]
    return [
        "  ".join(text.fit(cell, w, c.right) for cell, w, c in zip(row, widths, chosen, strict=True))
        for row in rows
    ]


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
