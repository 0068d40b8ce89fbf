"""The number of the first report."""

from __future__ import annotations

import time


def first_sequence() -> int:
    """The number from which an agent that starts now counts its reports: microseconds since boot.

    The controller stores each (node, boot, sequence) once, so numbers must rise within a boot, across
    restarts of the agent too. A node sends far fewer than one report per microsecond, so an agent that
    starts later always begins above every number used before it, with no file to keep. The clock goes
    on during suspend, and is not touched by steps of the wall clock.
    """
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
