"""Reports of jobs whose figures are chosen, and an engine that looks at them by a made clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expanse_controller.rules.engine import Engine, Firing, NodeView
from expanse_controller.rules.rule import Rule, parse
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_RUNNING, JobSample, Report, RuleState

SECOND = 1_000_000_000
START = 1_800_000_000
LOOK = 10


def rules(text: str) -> list[Rule]:
    found = parse(text.encode())
    assert not found.faults
    return found.rules


def rule(when: str, **keys: Any) -> list[Rule]:
    """One rule that fires at once unless it is told otherwise."""
    lines = {"name": "made", "about": "Made for a test.", "when": when, "for": "0s", **keys}
    return rules("- " + "\n  ".join(f"{key}: {value}" for key, value in lines.items()))


def sample(t: float, key: str = "slurm/7", run: int = 4711, **figures: Any) -> JobSample:
    """A job that has had these figures for `t` seconds; a figure that is not given is absent."""
    made = JobSample(state=figures.get("state", JOB_STATE_RUNNING))
    made.identity.scheduler, made.identity.id = key.split("/", 1)
    made.identity.run = run
    if "processes" in figures:
        made.processes = figures["processes"]
    if "cpu_cores" in figures:
        made.cpu_ns = int(figures["cpu_cores"] * t * SECOND)
    if "memory" in figures:
        made.memory_bytes, made.memory_limit_bytes = figures["memory"]
    if "run_queue_wait" in figures:
        made.counters.run_queue_wait_ns = int(figures["run_queue_wait"] * t * SECOND)
    for kind in ("cpu", "memory", "io"):
        if f"{kind}_pressure" in figures:
            pressure = getattr(made, f"{kind}_pressure")
            pressure.some_us = int(figures[f"{kind}_pressure"] * t * 1_000_000)
    if "loading" in figures:
        made.python.loading_ns = int(figures["loading"] * t * SECOND)
    if "hottest" in figures:
        made.python.hottest_function, made.python.hottest_share = "step", figures["hottest"]
    if "gpus" in figures:
        _gpu(made, t, figures)
    return made


def _gpu(made: JobSample, t: float, figures: Mapping[str, Any]) -> None:
    gpus, gpu = figures["gpus"], made.gpu
    for number in range(gpus):
        gpu.holds.add(uuid=f"GPU-{number}", source="slurm", sharers=1)
    if "gpu_busy" in figures:
        gpu.measured_ns = gpus * int(t * SECOND)
        gpu.busy_ns = int(figures["gpu_busy"] * gpu.measured_ns)
    if "gpu_sm_active" in figures:
        gpu.profiled_ns = gpus * int(t * SECOND)
        gpu.sm_active_ns = int(figures["gpu_sm_active"] * gpu.profiled_ns)
    if "throttled" in figures:
        gpu.throttled_ns = int(figures["throttled"] * gpus * t * SECOND)
    if "gpu_power" in figures:
        gpu.power_mw = int(figures["gpu_power"] * 1000)


def report(t: float, *jobs: JobSample) -> Report:
    return Report(sequence=int(t) + 1, time_ns=int((START + t) * SECOND), interval_ns=SECOND, jobs=list(jobs))


def view(name: str, current: Report, age_s: float = 0.5, previous: Report | None = None) -> NodeView:
    return NodeView(name, f"install-{name}", previous, current, age_s)


class Cluster:
    """Nodes that report, and an engine that looks at them every ten seconds."""

    def __init__(self, found: Sequence[Rule]) -> None:
        self.engine = Engine(found)
        self.t = 100.0

    def look(self, nodes: Mapping[str, Sequence[Mapping[str, Any]]], age_s: float = 0.5) -> list[Firing]:
        """One look at these jobs, given by their figures, LOOK seconds after the one before."""
        self.t += LOOK
        views = [
            view(name, report(self.t, *(sample(self.t, **job) for job in jobs)), age_s)
            for name, jobs in nodes.items()
        ]
        return self.engine.look(views, self.now_ns)

    def looks(self, count: int, **job: Any) -> list[Firing]:
        """So many looks at one job on one node; what fired in the last of them."""
        fired: list[Firing] = []
        for _ in range(count):
            fired = self.look({"gpu001": [job]})
        return fired

    @property
    def now_ns(self) -> int:
        return int((START + self.t) * SECOND)

    def state(self) -> RuleState:
        """The only one that there is."""
        (one,) = self.engine.states()
        return one
