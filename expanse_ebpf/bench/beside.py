"""What runs beside a job, as a run sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from expanse_ebpf.bench.child import Child
from expanse_ebpf.bench.results import Samples, Usage, Windows


class Job(NamedTuple):
    """The job that is looked at. Times are nanoseconds since the epoch."""

    name: str  # its key is run/NAME
    started_ns: int
    ended_ns: int = 0


@dataclass(slots=True)
class Seen:
    """What a run's record says of what ran beside the job; the fields are those of `results.Run`."""

    collector: Usage | None = None
    controller: Usage | None = None
    bpf_s_per_s: float | None = None
    samples: Samples | None = None
    windows: Windows | None = None
    missing: dict[str, str] = field(default_factory=dict)
    failed: str = ""


class Beside(Protocol):
    """What runs beside the job."""

    children: list[Child]  # those that must not end before the job does

    def begin(self) -> None:
        """Just before the job starts."""

    def started(self, pid: int) -> None:
        """The job runs, as `pid`."""

    def turn(self, elapsed_s: float) -> None:
        """About twice a second while it runs."""

    def end(self) -> None:
        """The job has ended."""

    @property
    def cpu_s(self) -> float:
        """CPU time that it took from begin to end."""

    def seen(self, job: Job) -> Seen:
        """What was seen."""
