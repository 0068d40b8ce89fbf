"""Where samples come from: one module per source, found through one registry.

A source that cannot start, or fails in a tick, is reported with its reason and never stops the others.
Modules are imported only for sources that are switched on, since the agent pays for every import in
memory on every node.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from expanse_ebpf.config import Config
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.kernel.lifecycle import Lifecycle
    from expanse_ebpf.wire.collector_pb2 import JobSample, NodeIdentity, Report

# In the order in which they are sampled. Each module has `create(context) -> Source`.
REGISTRY = {
    "cpu": "expanse_ebpf.sources.cpu",
    "cgroup": "expanse_ebpf.sources.cgroup",
    "host": "expanse_ebpf.sources.host",
    "python": "expanse_ebpf.sources.python",
    "network": "expanse_ebpf.sources.network",
    "delays": "expanse_ebpf.sources.delays",
    "gpu": "expanse_ebpf.sources.gpu",
    "traces": "expanse_ebpf.sources.traces",
}


@dataclass(frozen=True, slots=True)
class Context:
    """What a source may need."""

    config: Config
    lifecycle: Lifecycle | None  # None: the BPF programs are not loaded
    why_no_bpf: str = ""
    overflow: list[Job] = field(default_factory=list)  # jobs past `agent.max_jobs` in this tick
    # Whether a large message in the next report will soon be with the controller, not wait in memory.
    ships: Callable[[], bool] = lambda: False
    node: NodeIdentity | None = None  # this one


class Source(Protocol):
    """One source of samples."""

    name: str
    # Parts of the source that are missing and why; shown in SourceStatus.
    unavailable: dict[str, str]

    def start(self) -> None:
        """Open what is needed; raises UnavailableError with the reason."""

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in what the source knows at monotonic time `now` (seconds).

        `jobs` pairs each live job with its sample in `report`. A figure that cannot be read stays
        unset, with its reason in `JobSample.unavailable` or in `self.unavailable`.
        """

    def stop(self) -> None:
        """Close everything; safe to call twice and after a failed start."""


@runtime_checkable
class Attentive(Source, Protocol):
    """A source that wants to be called between samples too, from its start to its stop.

    Both calls are to take no longer than a few milliseconds: the next report waits for them.
    """

    fd: int  # ready() is called when it is readable
    period_s: float  # beat() is called so often; 0: never

    def ready(self) -> None:
        """Read what `fd` has."""

    def beat(self) -> None:
        """A period has passed."""


def create(names: Iterable[str], context: Context) -> list[Source]:
    """The sources with these names, not started yet, in the registry's order."""
    wanted = set(names)
    return [
        importlib.import_module(module).create(context) for name, module in REGISTRY.items() if name in wanted
    ]
