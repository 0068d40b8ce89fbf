"""A snapshot as a plain table, for pipes and for terminals that can do no more."""

from __future__ import annotations

from expanse_ebpf.top import columns, gpus, table, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.text import Locale


def render(
    snapshot: Values,
    width: int | None = None,
    height: int | None = None,
    sort: str = "cpu",
    locale: Locale | None = None,
    devices: bool = False,
) -> str:
    """The node, its jobs, or with `devices` its GPUs, and the collector's own cost as lines of text.

    `width` and `height` in characters; None: as large as it comes, for a pipe.
    """
    locale = locale or Locale()
    if devices:
        rows, listed, none = gpus.rows(snapshot["gpus"]), gpus.COLUMNS, gpus.absent(snapshot)
    else:
        rows, listed, none = columns.sort(snapshot["jobs"], sort), columns.PRINTED, "no jobs"
    drawn, left_out = table.lines(listed, rows, width, sort) if rows else ([none], "")
    cost, *wrong = footer(snapshot)
    foot = [cost, *([left_out] if left_out else []), *(gpus.conflicts(snapshot) if devices else []), *wrong]
    gap = [] if height is not None and height < 12 else [""]
    if width is not None:
        foot = [part for line in foot for part in text.wrap(line, width)]
    room = len(rows)
    if height is not None:
        foot = foot[: max(1, height // 6, height - 4 - 2 * len(gap) - len(rows))]
        # Less the first line, the titles, the line that says "more", and the prompt below.
        room = max(1, height - 4 - 2 * len(gap) - len(foot))
    lines = [headline(snapshot), *gap, *drawn[: room + 1]]
    if len(rows) > room:
        lines.append(f"… {len(rows) - room} more")
    lines += gap + foot
    if height is not None:
        lines = lines[: max(1, height - 1)]
    if width is not None:
        lines = [text.fit(line, width).rstrip() for line in lines]
    return "".join(locale.text(line.rstrip()) + "\n" for line in lines)


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
    """What is missing or lost at the collector, and wrong with GPUs: one line each, mostly none."""
    collector = snapshot["collector"]
    lines = gpus.trouble(snapshot, "see --gpus")
    lines += [
        f"source {text.clean(s['name'])} is off: {text.clean(s['reason'] or 'no reason given')}"
        for s in collector["sources"]
        if not s["up"]
    ]
    missing: dict[str, list[str]] = {}  # by reason, which many parts may share
    for source in collector["sources"]:
        for part, reason in sorted(source["unavailable"].items()):
            missing.setdefault(reason, []).append(gpus.missing_part(part))
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
