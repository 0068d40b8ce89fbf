"""How much a report says of one GPU, whatever the node's users do.

A user chooses the names of their jobs, how many of them claim a GPU, and how many processes are on it. A list
that no controller takes, or that no message has room for, would hide the GPU from everybody. So a GPU's lists
end here, far below what a controller takes, and the report says how much it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from expanse_ebpf.gpu.ownership import MAX_HOLDERS, SOURCES

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuHolder, GpuProcess, GpuSample

MAX_PROCESSES = 256
# Room for as many with names of the usual length. With 64 GPUs and all conflicts that each may have, a report
# is still a message that is sent.
HOLDERS_BYTES = 12 << 10
PROCESSES_BYTES = 32 << 10
# Without the number, which would make a metric's label that changes with whatever a user starts.
_NOT_ALL = "only some are shown, those with the most memory"


def shorten(gpus: Iterable[GpuSample], events: Iterable[GpuEvent]) -> None:
    """Leave in each of them the holders and processes that fit, and say in a GPU how many others there are.

    Of holders those by the most trusted sources stay, of processes those with most memory.
    """
    for gpu in gpus:
        more = _keep(gpu.holders, _rank, MAX_HOLDERS, HOLDERS_BYTES)
        if more:
            gpu.conflicts.append(f"… and {more} more holder{'s' if more > 1 else ''}")
        if _keep(gpu.processes, _size, MAX_PROCESSES, PROCESSES_BYTES):
            gpu.unavailable["processes"] = _NOT_ALL
    for event in events:
        _keep(event.holders, _rank, MAX_HOLDERS, HOLDERS_BYTES)


def _rank(holder: GpuHolder) -> int:
    return SOURCES.index(holder.source) if holder.source in SOURCES else len(SOURCES)


def _size(process: GpuProcess) -> int:
    return -process.memory_bytes


def _keep(entries: Any, order: Callable[[Any], int], most: int, room: int) -> int:
    """Leave the first `most` of a repeated field by `order` that have room in so many bytes; how many go."""
    if len(entries) <= most and sum(entry.ByteSize() for entry in entries) <= room:
        return 0
    kept = []
    for entry in sorted(entries, key=order):
        size = entry.ByteSize()
        if size <= room:  # a long name does not keep shorter ones out
            kept.append(entry)
            room -= size
        if len(kept) == most:
            break
    gone = len(entries) - len(kept)
    del entries[:]
    entries.extend(kept)
    return gone
