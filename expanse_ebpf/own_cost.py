"""What the agent itself costs: CPU time and memory."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from expanse_ebpf.sources.cgroup_files import field, number

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import CollectorSample

_PAGE = os.sysconf("SC_PAGESIZE")


class OwnCost:
    """Fills in the collector's own CPU time, PSS and RSS.

    `pss_every`: PSS is read anew every so many ticks only, since the kernel walks the whole address
    space for it (some 60 µs for 30 MiB); the last value stands in between. Where the kernel does not
    tell it, it stays absent.
    """

    def __init__(self, pss_every: int = 10) -> None:
        self._pss_every = pss_every
        self._tick = 0
        self._pss: int | None = None

    def fill(self, collector: CollectorSample) -> None:
        """Set `cpu_ns`, `pss_bytes` and `rss_bytes` of `collector`."""
        collector.cpu_ns = time.process_time_ns()
        if self._tick % self._pss_every == 0:
            kib = field(_read("/proc/self/smaps_rollup"), b"Pss:")
            self._pss = None if kib is None else kib * 1024
        self._tick += 1
        if self._pss is not None:
            collector.pss_bytes = self._pss
        pages = number(_read("/proc/self/statm").partition(b" ")[2].partition(b" ")[0])
        if pages is not None:
            collector.rss_bytes = pages * _PAGE


def _read(path: str) -> bytes:
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096)
    except OSError:
        return b""
