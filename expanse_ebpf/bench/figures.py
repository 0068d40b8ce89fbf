"""The figures of a report, from the records alone: how much longer, and what the collector took meanwhile."""

from __future__ import annotations

import math
import statistics as middle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from expanse_ebpf.bench import statistics
from expanse_ebpf.bench.results import Machine, Results, Run, Usage
from expanse_ebpf.bench.statistics import Comparison

MEASURED_ALONE: Final = 0.02  # of the CPUs' time may go elsewhere before the report warns
ENOUGH_PAIRS: Final = 8  # for a comparison to be relied on
_SAME = ("host", "kernel", "cpu", "cpus", "memory_bytes", "driver", "python", "expanse")


class Measure(NamedTuple):
    """A line of the table of resource use; `name` ends in its unit."""

    name: str
    title: str
    unit: str  # as it is shown
    scale: float  # from `name`'s unit to `unit`
    places: int
    field: str  # of Run, as `Run.missing` names it


MEASURES: Final = (
    Measure("collector_cores", "collector CPU", "cores", 1, 3, "collector"),
    Measure("collector_pss_bytes", "collector peak PSS", "MiB", 1 / 2**20, 1, "collector.pss_peak_bytes"),
    Measure(
        "job_memory_added_bytes", "memory added to the job", "MiB", 1 / 2**20, 1, "job_memory_peak_bytes"
    ),
    Measure("sent_bytes_per_s", "network sent", "KiB/s", 1 / 1024, 2, "collector.sent_bytes"),
    Measure("disk_bytes_per_s", "disk written", "KiB/s", 1 / 1024, 2, "collector.disk_bytes"),
    Measure("bpf_s_per_s", "BPF run time", "ms/s", 1000, 3, "bpf_s_per_s"),
    Measure("samples_received", "samples received", "", 1, 0, "samples"),
    Measure("samples_expected", "samples expected", "", 1, 0, "samples"),
    Measure("longest_gap_s", "longest gap between samples", "s", 1, 2, "samples.longest_gap_s"),
    Measure("age_s", "age of the newest sample", "s", 1, 2, "samples.age_median_s"),
    Measure("controller_cores", "controller CPU", "cores", 1, 3, "controller"),
    Measure(
        "controller_pss_bytes",
        "controller peak PSS",
        "MiB",
        1 / 2**20,
        1,
        "controller.pss_peak_bytes",
    ),
    Measure(
        "controller_disk_bytes_per_s",
        "controller disk written",
        "KiB/s",
        1 / 1024,
        2,
        "controller.disk_bytes",
    ),
    Measure("windows_opened", "windows opened per run", "", 1, 1, "windows"),
    Measure("traced_share", "share of the run traced", "%", 100, 1, "windows"),
    Measure("probes_most", "most probes attached", "", 1, 0, "windows"),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One workload beside one arm."""

    workload: str
    arm: str
    pairs: int  # complete ones
    comparison: Comparison | None  # None: see `why_not`
    why_not: str
    stopped: str  # "agreed", "max_pairs", "failed" or "not finished"
    detail: str
    values: dict[str, float]  # by the measure's name, in its unit; what is not known is absent
    memory_interval: tuple[float, float] | None  # bytes, of 95 %
    missing: dict[str, str]  # by the measure's name, why it is not known
    failed: tuple[Run, ...]
    warm_up: int  # runs that count for no time
    thrown_away: int  # runs that did not fail, but whose pair did, or was not completed


def cell(results: Results, workload: str, arm: str) -> Cell:
    """The figures of one comparison; what cannot be had is absent, never an error."""
    pairs = results.pairs(workload, arm)
    runs = [run for run in results.runs if (run.workload, run.arm) == (workload, arm)]
    comparison, why_not = None, "no pair is complete" if not pairs else ""
    if pairs:
        try:
            comparison = statistics.compare([(off.seconds or 0, run.seconds or 0) for off, run in pairs])
        except ValueError as error:
            why_not = str(error)
    end = results.end(workload, arm)
    watched = [run for run in runs if run.watched and not run.failed]
    values = _values([run for _, run in pairs], watched)
    added = _added(pairs)
    if added is not None:
        values["job_memory_added_bytes"] = added.mean
    missing = {m.name: _reason(m, runs, len(pairs)) for m in MEASURES if m.name not in values}
    failed = tuple(run for run in runs if run.failed)
    warm_up = sum(run.role == "warm_up" and not run.failed for run in runs)
    return Cell(
        *(workload, arm, len(pairs), comparison, why_not),
        stopped=end.reason if end else "not finished",
        detail=end.detail if end else "",
        values=values,
        memory_interval=(added.low, added.high) if added is not None else None,
        missing=missing,
        failed=failed,
        warm_up=warm_up,
        thrown_away=len(runs) - len(failed) - warm_up - 2 * len(pairs),
    )


def cells(results: Results) -> list[Cell]:
    """All comparisons, in the order in which they were begun."""
    return [cell(results, *names) for names in results.cells()]


def by_workload(listed: Iterable[Cell]) -> dict[str, list[Cell]]:
    """The comparisons of each workload."""
    found: dict[str, list[Cell]] = {}
    for each in listed:
        found.setdefault(each.workload, []).append(each)
    return found


def warnings(results: Results) -> list[str]:
    """What should not have been while the bench ran: one line each, mostly none."""
    machines = [record for record in results.records if isinstance(record, Machine)]
    lines = []
    for name in _SAME:
        found = list(dict.fromkeys(str(getattr(each, name)) for each in machines))
        if len(found) > 1:
            lines.append(f"{name.replace('_', ' ')} differs between sessions: {', '.join(found)}")
    governors = {each.governor for each in machines if each.governor not in (None, "performance")}
    if governors:
        lines.append(f"the frequency governor is {', '.join(sorted(map(str, governors)))}, not performance")
    done = [names for names in results.cells() if (end := results.end(*names)) and end.reason != "failed"]
    few = sum(len(results.pairs(*names)) < ENOUGH_PAIRS for names in done)
    if few:
        lines.append(f"{few} of {len(done)} comparisons have fewer than {ENOUGH_PAIRS} pairs: a first look")
    runs = [run for run in results.runs if run.pair]
    steals = [_finite(run.state.steal_share) for run in runs]
    lines += _busy("the hypervisor took", steals)
    cpus = machines[0].cpus if machines else 0
    if cpus > 0:
        others = [_finite(run.state.other_cores) for run in runs]
        lines += _busy("other programs used", [None if cores is None else cores / cpus for cores in others])
    return lines


def _busy(who: str, shares: Sequence[float | None]) -> list[str]:
    high = [share for share in shares if share is not None and share > MEASURED_ALONE]
    if not high:
        return []
    most = f"{max(high) * 100:.1f} %"
    return [
        f"{who} more than {MEASURED_ALONE:.0%} of the CPUs in {len(high)} of {len(shares)} runs, "
        f"up to {most}".replace("%", " %").replace("  ", " ")
    ]


# ---- resource use


def _values(measured: Sequence[Run], watched: Sequence[Run]) -> dict[str, float]:
    """`measured` are the runs that count; `watched` the closely watched one too."""

    def rate(run: Run, taken: float | None) -> float | None:
        return taken / run.wall_s if taken is not None and run.wall_s > 0 else None

    def use(part: str, of: Callable[[Usage], float | None]) -> list[float | None]:
        found = [(run, getattr(run, part)) for run in measured]
        return [rate(run, of(usage)) for run, usage in found if usage is not None]

    def peak(part: str) -> list[float | None]:
        found = [getattr(run, part) for run in watched]
        return [usage.pss_peak_bytes for usage in found if usage is not None]

    samples = [run.samples for run in measured if run.samples is not None]
    ages = [run.samples.age_median_s for run in watched if run.samples is not None]
    windows = [(run.windows, run.wall_s) for run in measured if run.windows is not None]
    values = {
        "collector_cores": _over(use("collector", lambda usage: usage.cpu_s)),
        "collector_pss_bytes": _over(peak("collector"), max),
        "sent_bytes_per_s": _over(use("collector", lambda usage: usage.sent_bytes)),
        "disk_bytes_per_s": _over(use("collector", lambda usage: usage.disk_bytes)),
        "bpf_s_per_s": _over([run.bpf_s_per_s for run in watched]),
        "samples_received": _over([each.received for each in samples], sum),
        "samples_expected": _over([each.expected for each in samples], sum),
        "longest_gap_s": _over([each.longest_gap_s for each in samples], max),
        "age_s": _over(ages),
        "controller_cores": _over(use("controller", lambda usage: usage.cpu_s)),
        "controller_pss_bytes": _over(peak("controller"), max),
        "controller_disk_bytes_per_s": _over(use("controller", lambda usage: usage.disk_bytes)),
        "windows_opened": _over([each.opened for each, _ in windows], middle.fmean),
        "traced_share": _over(
            [each.traced_s / wall_s for each, wall_s in windows if wall_s > 0], middle.fmean
        ),
        "probes_most": _over([each.probes_most for each, _ in windows], max),
    }
    return {name: value for name, value in values.items() if value is not None}


def _over(
    values: Iterable[float | None], kind: Callable[[list[float]], float] = middle.median
) -> float | None:
    """The median, or what else is asked for, of the values that are known; None where none is."""
    known = [value for value in map(_finite, values) if value is not None]
    return _finite(kind(known)) if known else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _added(pairs: Sequence[tuple[Run, Run]]) -> statistics.Shift | None:
    found = [(off.job_memory_peak_bytes, run.job_memory_peak_bytes) for off, run in pairs]
    known = [(float(off), float(run)) for off, run in found if off is not None and run is not None]
    try:
        return statistics.shift(known)
    except ValueError:
        return None


def _reason(measure: Measure, runs: Sequence[Run], pairs: int) -> str:
    """Why a figure is not known, as the runs tell; that of the closely watched run comes first."""
    watched = [run for run in runs if run.watched]
    for run in sorted(watched, key=lambda run: run.role != "warm_up"):
        for name in (measure.field, measure.field.partition(".")[0]):
            if name in run.missing:
                return run.missing[name]
    if measure.name == "job_memory_added_bytes" and pairs < 2:
        return "needs two pairs in which the job's memory was seen"
    if not any(not run.failed for run in watched):
        return "no run beside the arm has ended well"
    if not pairs:
        return "no pair is complete"
    return "does not go with this arm"
