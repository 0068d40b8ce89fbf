"""How long a worker may be silent until it is taken for hung.

What counts is the time since its last line, not that of a round: eight GPUs of which each takes its second
hang nowhere. To begin with NVML takes long, where the GPUs sleep between jobs the longest: 8 of them without
persistence mode need up to half a minute.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_BEGIN_S = 60.0  # until there is any line
_OPEN_S = 15.0  # for one device, which wakes it


class Patience:
    """With a worker that is begun `now`. `deadline_s`: for everything after its beginning."""

    def __init__(self, deadline_s: float, now: float) -> None:
        self._deadline_s = deadline_s
        self._since = now  # it has been silent, or was to begin
        self._begins = True
        self.limit_s = max(_BEGIN_S, 4 * deadline_s)

    def wait(self, since: float) -> None:
        """It has nothing to say before that time, or nobody has listened until then."""
        self._since = max(self._since, since)

    def hear(self, line: Mapping[str, Any], now: float) -> None:
        """A line of the worker."""
        self._since = max(self._since, now)
        self._begins = self._begins and "opening" in line
        self.limit_s = max(_OPEN_S, self._deadline_s) if self._begins else self._deadline_s

    def is_over(self, now: float) -> bool:
        """Whether it has been silent for too long."""
        return now - self._since > self.limit_s
