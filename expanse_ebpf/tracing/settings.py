"""What a window's process is told when it begins."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class WindowSettings:
    """One window on one node. Descriptors are those that the process inherits."""

    id: str
    slot: int  # the accounting slot of the job
    hierarchy: str  # in which jobs are told apart, see kernel.lifecycle.HIERARCHIES
    hierarchy_id: int
    cgroup: str  # of the job, a path in that hierarchy
    slots_fd: int  # the maps `slots` and `totals` of task_lifecycle
    totals_fd: int
    seconds: float
    start_ns: int = 0  # wall clock; 0: at once
    stacks: bool = False
    cost_share: float = 0.02
    foreign_share: float = 0.02  # the same for all processes of other jobs together
    over_cost: str = "cycle"
    max_events: int = 200_000
    uid: int | None = None  # only threads that run as this user; None: all of the job's

    def dumps(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> WindowSettings:
        """What `dumps` made."""
        return cls(**json.loads(text))
