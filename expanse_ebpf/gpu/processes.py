"""Whose the processes are that NVML lists.

NVML may answer with numbers of the host's pid namespace or of some container's, even with both in one list.
So a number alone is nobody's:

1. A process fits a number when it has that number in any pid namespace that it is in, and has the GPU
   open. Of a client of MPS unified memory is enough, since the server has the GPU open for it.
2. A number that exactly one process fits is that process's. A process is in one list once: what is known
   to be another number's no longer fits this one.
3. Every other number stays unresolved, also one that fits a process in the agent's own namespace and
   another process in a container: either could be meant.
4. The MPS server is known, and nobody's: what it uses is its clients'.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from expanse_ebpf.gpu.identifiers import Devices
from expanse_ebpf.gpu.open_files import OpenFiles

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import GpuSample

PID_MAX = 1 << 22  # the kernel's own limit
_MPS_SERVER = "nvidia-cuda-mps-server"

MigMinors = Mapping[int, tuple[int, int | None, int | None]]


class Uses(dict[str, dict[str, int]]):
    """By job, the devices that a process of it uses for certain: UUID to that process's pid."""


def credit(
    samples: Iterable[GpuSample],
    devices: Devices,
    owners: Mapping[int, str],
    files: OpenFiles,
    mig_minors: MigMinors | None = None,
) -> Uses:
    """Say in every sample's `processes` whose each is, count those of nobody, and return who uses what.

    `owners` has the key of the job of each process that may be meant, empty for one of no job; `files`
    looks at the same processes. What was not looked at yet fits nothing.
    """
    candidates = {pid: opened for pid in owners if (opened := files.of(pid)) is not None and opened.any}
    usable = {pid: devices.opened(o.minors, o.caps, mig_minors) for pid, o in candidates.items()}
    by_number: dict[int, list[int]] = defaultdict(list)
    for pid, opened in candidates.items():
        for number in {pid, *opened.numbers}:
            by_number[number].append(pid)
    uses = Uses()
    for sample in samples:
        _reject(sample)
        for kind in dict.fromkeys(process.kind for process in sample.processes):
            listed = [process for process in sample.processes if process.kind == kind]
            fits = [
                {
                    pid
                    for pid in by_number.get(process.pid, ())
                    if _has_open(sample.uuid, usable[pid], devices) or (kind == "mps" and candidates[pid].uvm)
                }
                for process in listed
            ]
            for process, found in zip(listed, _settle(fits), strict=True):
                process.job, process.resolved = "", found is not None
                if found is None:
                    sample.unresolved_processes += 1
                    files.hurry(process.pid)  # it may have opened the GPU since
                    continue
                process.pid = found
                if candidates[found].program != _MPS_SERVER and owners[found]:
                    process.job = owners[found]
                    uses.setdefault(owners[found], {}).setdefault(sample.uuid, found)
    return uses


def _reject(sample: GpuSample) -> None:
    """Take out what cannot be a process."""
    for i in reversed(range(len(sample.processes))):
        if not 0 < sample.processes[i].pid <= PID_MAX:
            del sample.processes[i]
            sample.rejected_processes += 1


def _has_open(uuid: str, usable: frozenset[str], devices: Devices) -> bool:
    """Whether with `usable` open a process can be on `uuid`: the device, an instance of it, or its GPU.

    A process that has a GPU open, and no instance of it that is known, may be on any of them.
    """
    return any(devices.related(uuid, other) for other in usable)


def _settle(fits: Sequence[set[int]]) -> list[int | None]:
    """For each number, given the processes that fit it, the one that it is; None: not known which."""
    found: list[int | None] = [None] * len(fits)
    settled = True
    while settled:
        taken = {pid for pid in found if pid is not None}
        settled = False
        single: dict[int, list[int]] = defaultdict(list)
        for at, fitting in enumerate(fits):
            left = fitting - taken
            if found[at] is None and len(left) == 1:
                single[next(iter(left))].append(at)
        for pid, numbers in single.items():
            # Two numbers that only one process fits: the other one's is not known, nor which that is.
            if len(numbers) == 1:
                found[numbers[0]] = pid
                settled = True
    return found
