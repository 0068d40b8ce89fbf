"""Whose the processes are that NVML lists.

NVML may answer with numbers of the host's pid namespace or of some container's, even with both in one list.
So a number alone is nobody's:

1. A process fits a number when it has that number in any pid namespace that it is in, and has the GPU
   open. Of a client of MPS unified memory is enough, since the server has the GPU open for it.
2. A number that exactly one process fits is that process's. A process is in one list once: what is known
   to be another number's no longer fits this one.
3. Every other number stays unresolved, also one that fits a process in the agent's own namespace and
   another process in a container: either could be meant. So does one that is the number of a process here
   that was not looked at lately.
4. An MPS server outside of all jobs is known, and nobody's: what it uses is its clients'. One that a job
   has begun is the job's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from expanse_ebpf.gpu.identifiers import Devices
from expanse_ebpf.gpu.open_files import MigMinors, OpenFiles

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import GpuSample

PID_MAX = 1 << 22  # the kernel's own limit
_MPS_SERVER = "nvidia-cuda-mps-server"

_Owner = TypeVar("_Owner")


class Credited(NamedTuple, Generic[_Owner]):
    """Who is on which device, by UUID of the GPU or instance."""

    uses: dict[_Owner, dict[str, int]]  # for certain: device to one process of the owner's
    users: dict[str, set[_Owner | None]]  # all that are on a device; None: somebody who is not known
    numbers: dict[str, dict[int, _Owner]]  # by the numbers that NVML has listed
    memory: dict[_Owner, int]  # bytes over all devices, of owners of whom NVML tells any


def credit(
    samples: Iterable[GpuSample],
    devices: Devices,
    owners: Mapping[int, _Owner | None],
    files: OpenFiles,
    mig_minors: MigMinors | None = None,
) -> Credited[_Owner]:
    """Say in every sample's `processes` whose each is, count those of nobody, and return who uses what.

    `owners` has the job of each process that may be meant, None for one of no job; `files` looks at the
    same processes.
    """
    candidates = {pid: opened for pid in owners if (opened := files.of(pid)) is not None and opened.any}
    usable = {pid: devices.opened(o.minors, o.caps, mig_minors) for pid, o in candidates.items()}
    by_number: dict[int, list[int]] = defaultdict(list)
    for pid, opened in candidates.items():
        for number in {pid, *opened.numbers}:
            by_number[number].append(pid)
    found: Credited[_Owner] = Credited({}, {}, {}, {})
    for sample in samples:
        _reject(sample)
        incomplete = sample.rejected_processes or "processes" in sample.unavailable
        users = found.users[sample.uuid] = {None} if incomplete else set()
        for kind in dict.fromkeys(process.kind for process in sample.processes):
            listed = [process for process in sample.processes if process.kind == kind]
            fits = []
            for process in listed:
                fitting = {
                    pid
                    for pid in by_number.get(process.pid, ())
                    if _has_open(sample.uuid, usable[pid], devices) or (kind == "mps" and candidates[pid].uvm)
                }
                # The process of that very number may have opened the GPU since it was looked at.
                known = process.pid in fitting or process.pid not in owners or files.fresh(process.pid)
                fits.append(fitting if known else set())
            for process, settled in zip(listed, _settle(fits), strict=True):
                process.job, process.resolved = "", settled is not None
                if settled is None:
                    users.add(None)
                    sample.unresolved_processes += 1
                    files.hurry(process.pid)  # it may have opened the GPU since
                    continue
                number, process.pid = process.pid, settled
                owner = owners[settled]
                if owner is None:
                    if candidates[settled].program != _MPS_SERVER:
                        users.add(None)
                    continue
                process.job = str(owner)
                users.add(owner)
                found.uses.setdefault(owner, {}).setdefault(sample.uuid, settled)
                found.numbers.setdefault(sample.uuid, {})[number] = owner
                if process.HasField("memory_bytes"):
                    found.memory[owner] = found.memory.get(owner, 0) + process.memory_bytes
    return found


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
