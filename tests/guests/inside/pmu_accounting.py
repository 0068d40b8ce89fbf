"""Two jobs take one CPU in turn; what the CPU source charges to each, beside events of the tasks' own.

Usage: pmu_accounting.py TURNS COUNT COUNT; writes /out/figures.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from pmu_kit import EVENTS, INHERIT, PINNED, USER_ONLY, Ring, Watched, open_event, value
from truth import switches

from expanse_ebpf.kernel import lifecycle as kernel

TURNS, COUNTS = int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]]
TICK_S = 0.02


def tick(watched: Watched, cpu: dict[str, int]) -> dict[str, Any]:
    """One report, and the CPU's own count just before a flush and just after its result is read.

    In between the jobs may take the CPU, and what they do is charged at once.
    """
    before = {name: value(fd) for name, fd in cpu.items()}
    watched.accounting.flush()
    charged = watched.all_rows()
    after = {name: value(fd) for name, fd in cpu.items()}
    rows = watched.rows()
    return {
        "before": before,
        "after": after,
        "charged": {name: charged[kernel.COUNTERS + 3 * i] for i, name in enumerate(EVENTS)},
        "rows": rows,
        **watched.exported(watched.report()),
    }


def main() -> None:
    watched = Watched(["a", "b"])
    # Pinned, so that they always count, whatever else is open.
    cpu = {name: open_event(name, cpu=0, flags=PINNED) for name in EVENTS}
    ring = Ring(TURNS, COUNTS, watched.groups)
    pids = [process.pid for process in ring.processes]
    tasks = [
        {name: open_event(name, pid=pid, flags=INHERIT) for name in EVENTS}
        | {"user": open_event("instructions", pid=pid, flags=USER_ONLY)}
        for pid in pids
    ]

    def standing() -> list[dict[str, int]]:
        return [
            {name: value(fd) for name, fd in task.items()} | {"switches": switches(pid)}
            for task, pid in zip(tasks, pids, strict=True)
        ]

    ticks, was = [tick(watched, cpu)], standing()
    ring.go()
    ring.wait(TICK_S, lambda: ticks.append(tick(watched, cpu)))
    tasks_grown = [
        {name: after[name] - before[name] for name in after}
        for before, after in zip(was, standing(), strict=True)
    ]
    figures = {
        "unavailable": watched.source.unavailable,
        "read_errors": watched.accounting.read_errors(),
        "ticks": ticks,
        "tasks": tasks_grown,
    }
    Path("/out/figures.json").write_text(json.dumps(figures))
    ring.close()
    watched.close()


if __name__ == "__main__":
    main()
