"""More events than the PMU has counters for: what the CPU source makes of it.

Usage: pmu_sharing.py TURNS COUNT COUNT; writes /out/figures.json. Two jobs take the CPU in turn for so many
turns in each phase. The phases differ in what else is open: nothing; so many events that the kernel takes
turns among them ("shared", in one tick and in many); events that are pinned to all counters ("starved").
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from pmu_kit import EVENTS, PINNED, Ring, Watched, open_event, value
from prometheus_client import CollectorRegistry, generate_latest

from expanse_ebpf.export.prometheus import ReportCollector
from expanse_ebpf.kernel import perf
from expanse_ebpf.wire.collector_pb2 import Report

TURNS, COUNTS = int(sys.argv[1]), [int(argument) for argument in sys.argv[2:]]
TICK_S = 0.02
GENERAL = 6  # counters of this PMU that count anything, beside one for cycles alone


def page(report: Report) -> str:
    """The Prometheus page for `report`."""
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report))
    return generate_latest(registry).decode()


class Phases:
    def __init__(self) -> None:
        self.watched = Watched(["a", "b"])
        assert self.watched.source._events is not None
        self.own = {name: self.watched.source._events.descriptors[name, 0] for name in EVENTS}

    def tick(self, *, shown: bool = True) -> dict[str, Any]:
        """One report; and the product's own descriptors, before a flush and when its result was read."""
        before = {name: perf.read_counter(fd) for name, fd in self.own.items()}
        self.watched.accounting.flush()
        charged = self.watched.all_rows()
        after = {name: perf.read_counter(fd) for name, fd in self.own.items()}
        report = self.watched.report()
        return {
            "before": before,
            "after": after,
            "charged": charged,
            **self.watched.exported(report),
            "rows": self.watched.rows(),  # nothing of the jobs has run since the report
            "page": page(report) if shown else "",
        }

    def phase(self, *, many: bool = False) -> dict[str, Any]:
        """Ticks before, after and, if `many`, during all turns; each job's instructions by its own event."""
        ring = Ring(TURNS, COUNTS, self.watched.groups)
        tasks = [open_event("instructions", pid=one.pid, flags=PINNED) for one in ring.processes]
        ticks = [self.tick()]
        ring.go()
        ring.wait(*((TICK_S, lambda: ticks.append(self.tick(shown=False))) if many else ()))
        ticks.append(self.tick())
        counted = [value(fd) for fd in tasks]
        for fd in tasks:
            os.close(fd)
        ring.close()
        return {"ticks": ticks, "counted": counted}

    def starved(self) -> dict[str, Any]:
        """A tick before, one after turns without any counter, one after as many turns with all."""
        rings = [Ring(TURNS, COUNTS, self.watched.groups) for _ in range(2)]
        ticks = [self.tick()]
        for ring, taken in zip(rings, (GENERAL, 0), strict=True):
            with competing(min(taken, 1), taken, PINNED):
                ring.go()
                ring.wait()
                ticks.append(self.tick())
        for ring in rings:
            ring.close()
        return {"ticks": ticks}


@contextlib.contextmanager
def competing(cycles: int, instructions: int, flags: int = 0) -> Any:
    """So many more events on the CPU."""
    fds = [open_event("cycles", cpu=0, flags=flags) for _ in range(cycles)]
    fds += [open_event("instructions", cpu=0, flags=flags) for _ in range(instructions)]
    yield
    for fd in fds:
        os.close(fd)


def main() -> None:
    figures: dict[str, Any] = {}
    with competing(1, GENERAL, PINNED):
        starved = Watched([])
        figures["started without a counter"] = {
            "unavailable": dict(starved.source.unavailable),
            **starved.exported(starved.report()),
        }
        starved.close()

    phases = Phases()
    figures["alone"] = phases.phase()
    with competing(0, GENERAL):
        figures["shared"] = phases.phase()
        figures["shared, many ticks"] = phases.phase(many=True)
    figures["starved"] = phases.starved()
    Path("/out/figures.json").write_text(json.dumps(figures))
    phases.watched.close()


if __name__ == "__main__":
    main()
