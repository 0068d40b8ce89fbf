"""Records of a bench that never was, complete and always the same."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

from expanse_ebpf.bench.results import (
    End,
    Machine,
    Record,
    Results,
    Role,
    Run,
    Samples,
    Session,
    State,
    Usage,
    Windows,
)

SECOND = 1_000_000_000
BEGIN = 1_764_511_200 * SECOND  # 2025-11-30 14:00:00 UTC
MIB = 1 << 20
CLOSELY = "looked at in the warm-up run alone, since looking costs"
ARMS = {"collection": 0.002, "traces": 0.05, "py-spy": 0.3}  # by how much the job takes longer
PEER = "py-spy"


def machine(**changes: object) -> Machine:
    """A virtual machine with two CPUs."""
    made: dict[str, object] = {
        "time_ns": BEGIN,
        "host": "node7",
        "kernel": "6.18.5",
        "architecture": "x86_64",
        "cpu": "A CPU of 2.5 GHz",
        "cpus": 2,
        "memory_bytes": 8 << 30,
        "virtualised": "kvm",
        "pmu": True,
        "governor": "performance",
        "turbo": None,
        "smt": False,
        "gpus": (),
        "driver": None,
        "python": "3.11.2",
        "expanse": "1.0",
        "tools": {PEER: "0.4.1"},
    }
    return Machine(**{**made, **changes})  # type: ignore[arg-type]


def state(**changes: object) -> State:
    """A machine that does nothing else."""
    made: dict[str, object] = {
        "load_1m": 0.4,
        "frequency_mhz": 2500.0,
        "temperature_c": 51.5,
        "gpu_temperature_c": None,
        "steal_share": 0.001,
        "other_cores": 0.01,
    }
    return State(**{**made, **changes})  # type: ignore[arg-type]


def run(workload: str, arm: str, role: Role, pair: int, seconds: float | None, **changes: object) -> Run:
    """One run; beside an arm (the warm-up run too) with all that is seen of it."""
    watched = changes.get("watched", role != "off")
    wall_s = (seconds or 1.0) + 0.5
    made: dict[str, object] = {
        "attempt": 1,
        "position": 0,
        "started_ns": BEGIN,
        "wall_s": wall_s,
        "state": state(),
        "job_cpu_s": 1.9 * wall_s,
        "job_memory_peak_bytes": 200 * MIB,
        "watched": watched,
    }
    if watched:
        made |= _seen(arm, wall_s, closely=role == "warm_up")
    return Run(workload, arm, role, pair, seconds=seconds, **{**made, **changes})  # type: ignore[arg-type]


def _seen(arm: str, wall_s: float, *, closely: bool) -> dict[str, object]:
    if arm == PEER:
        return {"collector": Usage(0.2 * wall_s, 30 * MIB, 0, None)}
    due = int(wall_s)
    return {
        "collector": Usage(0.01 * wall_s, (44 if closely else 41) * MIB, 0, int(1024 * wall_s)),
        "controller": Usage(0.004 * wall_s, 50 * MIB, int(4096 * wall_s), None),
        "bpf_s_per_s": 0.0004 if closely else None,
        "samples": Samples(1.0, due, due, 1.02, 0.61 if closely else None, 40 if closely else 0),
        "windows": Windows(1, 0.25 * wall_s, 18) if arm == "traces" else None,
        "missing": {"controller.sent_bytes": "it answers, and sends nothing of its own"}
        | ({} if closely else {"bpf_s_per_s": CLOSELY, "samples.age_median_s": CLOSELY}),
    }


def complete(pairs: int = 10, workloads: Iterable[str] = ("loop", "switches")) -> list[Record]:
    """A whole bench, and in it one run that failed and one that was begun anew."""
    drawn = random.Random(7)
    records: list[Record] = [machine(), Session(BEGIN, 7, 40, resumed=False)]
    for workload in workloads:
        for arm in ARMS:
            records.append(run(workload, arm, "warm_up", 0, 14.0, watched=False))
            records.append(run(workload, arm, "warm_up", 0, 14.1))
        failed = run(workload, PEER, "arm", 1, None, failed="exit code 1: no such process")
        records += [run(workload, PEER, "off", 1, 12.0), failed]
        for pair in range(1, pairs + 1):
            for arm, longer in ARMS.items():
                off_s = 12 * (1 + drawn.gauss(0, 0.005))
                arm_s = 12 * (1 + longer) * (1 + drawn.gauss(0, 0.005))
                attempt = 2 if (arm, pair) == (PEER, 1) else 1
                runs = [
                    run(workload, arm, "off", pair, off_s, attempt=attempt),
                    run(workload, arm, "arm", pair, arm_s, attempt=attempt),
                ]
                records += runs if drawn.random() < 0.5 else runs[::-1]
        records += [End(workload, arm, "agreed" if arm != "traces" else "max_pairs") for arm in ARMS]
    return records


def results(records: Iterable[Record] | None = None, folder: Path | None = None) -> Results:
    """Records as they are read, written to `folder` where one is given."""
    made = Results(folder or Path("bench"))
    for record in complete() if records is None else records:
        if folder is not None:
            made.add(record)
        else:
            made.records.append(record)
    return made
