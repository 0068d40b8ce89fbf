"""Which GPUs the kernel lets a job open: the word of the device cgroup.

A v1 group has a list to be read. In v2 BPF programs decide; they are read and followed, see
device_program.py. Both are asked about the cgroups in which the job has processes, since SLURM and
container runtimes limit those and not always the job's own: a job may open what any of them may, and
where both kinds limit it, what both allow. device_rules.py has the rules by which that tells GPUs.
"""

from __future__ import annotations

import errno
import itertools
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.gpu.device_program import DeviceProgram, NotUnderstoodError
from expanse_ebpf.gpu.device_rules import Capabilities, Devices, DevicesList, parse_devices_list
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import device_programs
from expanse_ebpf.kernel.libbpf import BpfError
from expanse_ebpf.wire.collector_pb2 import GpuSample

_REREAD_S = 30.0
# After a change, every call reads: a runtime makes a cgroup first, then limits it, then fills it.
_SETTLING_S = 5.0
_FORGET_S = 90.0
_MAX_CGROUPS = 256  # of a job, in one hierarchy
_MAX_LIST_BYTES = 1 << 15  # no more than parse_devices_list() takes, at 8 bytes a line
_MAX_FILE_BYTES = 4 << 20
_MAX_PROGRAMS = 512

_LIMITS = ("devices", "unified")  # names of the hierarchies that can limit devices

_Key = tuple[tuple[object, ...], ...]  # of what a device's numbers depend on
_GONE = (errno.ENOENT, errno.ENODEV)  # a cgroup that was removed, before and after opening it
# The reason that is no fault: the job may open everything.
NOTHING = "nothing limits its devices"


class _State(NamedTuple):
    """Changes with the cgroup and with the cgroups right below it."""

    directory: str
    inode: int  # 0: it is gone
    links: int  # children and 2 (kernfs_refresh_inode)


_Tree = tuple[_State, ...]


@dataclass(slots=True)
class _Answer:
    allowed: frozenset[str] | None
    reason: str
    devices: _Key
    trees: dict[str, _Tree]  # by hierarchy, the job's own cgroup first
    empty: bool  # the job had no process
    read_at: float
    changed_at: float
    asked_at: float


class _Programs:
    """The limits of a v2 cgroup: all of its programs have to allow."""

    def __init__(self, programs: Sequence[DeviceProgram]) -> None:
        self._programs = programs

    def allows(self, major: int, minor: int) -> bool:
        return all(program.allows(major, minor) for program in self._programs)


class DeviceCgroups:
    """Answers for jobs, kept and renewed when a job's cgroups or the devices change, or after 30 s.

    `proc` is where procfs lies, `clock` gives seconds that never go back.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self.reason = ""  # why the last answer was None
        self._proc = proc
        self._clock = clock
        self._answers: dict[Job, _Answer] = {}
        self._devices: tuple[_Key, float, Devices] | None = None
        # By the kernel's id. It hands ids out in a circle of 2^31 (idr_alloc_cyclic), so none is met again.
        self._programs: dict[int, DeviceProgram] = {}

    def allowed(self, job: Job, devices: Iterable[GpuSample]) -> frozenset[str] | None:
        """UUIDs of those of `devices` that the kernel lets `job` open; None: it does not tell, see `reason`.

        `devices` are all GPUs and MIG instances of the node. Never raises.
        """
        devices = list(devices)
        if not devices:
            self.reason = "this node has no GPU"
            return None
        now = self._clock()
        key = _key(devices)
        answer = self._answers.get(job)
        if answer is None or self._outdated(answer, job, key, now):
            answer = self._answers[job] = self._read(job, devices, key, answer, now)
        answer.asked_at = now
        self.reason = answer.reason
        return answer.allowed

    def _outdated(self, answer: _Answer, job: Job, key: _Key, now: float) -> bool:
        return (
            now - answer.read_at >= _REREAD_S
            or now - answer.changed_at < _SETTLING_S
            or answer.devices != key
            or answer.empty != (not job.pids)
            or {name: tree[0].directory for name, tree in answer.trees.items()} != _directories(job)
            or any(state != _state(state.directory) for tree in answer.trees.values() for state in tree)
        )

    def _read(
        self, job: Job, devices: list[GpuSample], key: _Key, former: _Answer | None, now: float
    ) -> _Answer:
        self._forget(now)
        trees = {name: _tree(directory) for name, directory in _directories(job).items()}
        answer = _Answer(None, "", key, trees, not job.pids, now, now, now)
        if former is not None and former.trees == trees and former.empty == answer.empty:
            answer.changed_at = former.changed_at
        try:
            answer.allowed = self._judge(trees, job.pids, self._current(devices, key, now))
            answer.reason = "" if answer.allowed is not None else NOTHING
        except NotUnderstoodError as error:
            answer.reason = f"the program that limits its devices is not understood: {error}"
        except UnavailableError as error:
            answer.reason = str(error)
        except OSError as error:
            answer.reason = f"its cgroup cannot be read: {error.strerror}"
        return answer

    def _judge(
        self, trees: dict[str, _Tree], pids: frozenset[int] | None, devices: Devices
    ) -> frozenset[str] | None:
        """What all of the hierarchies that limit devices allow; None: none does. Raises as _allowed_in()."""
        answers = [self._allowed_in(name, tree, pids, devices) for name, tree in trees.items()]
        said = [answer for answer in answers if answer is not None]
        return devices.with_whole(frozenset.intersection(*said)) if said else None

    def _allowed_in(
        self, hierarchy: str, tree: _Tree, pids: frozenset[int] | None, devices: Devices
    ) -> frozenset[str] | None:
        """What any of the cgroups with one of `pids` may open; None: one of them may open everything.

        Without such a process it is what the job's own cgroup may open. Raises UnavailableError when a
        cgroup does not tell, OSError when it cannot be read.
        """
        if len(tree) > _MAX_CGROUPS:
            raise UnavailableError(f"it has more than {_MAX_CGROUPS} cgroups")
        own = tree[0].directory
        directories = [state.directory for state in tree if _has_processes(state.directory, pids)]
        answers: list[frozenset[str]] = []
        for directory in directories or [own]:
            try:
                limits = self._limits(hierarchy, directory)
            except OSError as error:
                if directory != own and error.errno in _GONE:
                    continue
                raise
            said = devices.allowed(limits)
            if said is None:
                return None
            answers.append(said)
        if not answers:
            raise UnavailableError("its cgroups have ended while they were read")
        return frozenset.union(*answers)

    def _limits(self, hierarchy: str, directory: str) -> DevicesList | _Programs:
        if hierarchy == "devices":
            with open(f"{directory}/devices.list", "rb") as file:
                text = file.read(_MAX_LIST_BYTES + 1)
            if len(text) > _MAX_LIST_BYTES:
                raise UnavailableError("the list of its devices is too long")
            return DevicesList(parse_devices_list(text.decode("ascii", "replace")))
        for last in (False, True):
            try:
                return _Programs([self._program(number) for number in device_programs.attached(directory)])
            except BpfError as error:
                if error.errno in (errno.EINVAL, errno.ENOSYS):  # a kernel without programs for cgroups
                    break
                if error.errno == errno.EPERM:
                    raise UnavailableError(
                        f"{error.what} is not permitted: it takes CAP_SYS_ADMIN and CAP_NET_ADMIN, and "
                        "constants that are not blinded (sysctl net.core.bpf_jit_harden)"
                    ) from None
                if last or error.errno != errno.ENOENT:  # else it was replaced between two calls
                    raise
        return _Programs(())

    def _program(self, number: int) -> DeviceProgram:
        program = self._programs.get(number)
        if program is None:
            if len(self._programs) >= _MAX_PROGRAMS:
                self._programs.clear()
            program = self._programs[number] = DeviceProgram(device_programs.instructions(number))
        return program

    def _current(self, samples: list[GpuSample], key: _Key, now: float) -> Devices:
        if self._devices is None or self._devices[0] != key or now - self._devices[1] >= _REREAD_S:
            capabilities = Capabilities()
            if any(sample.parent_uuid for sample in samples):
                capabilities = Capabilities.parse(
                    _text(f"{self._proc}/devices"), _text(f"{self._proc}/driver/nvidia-caps/mig-minors")
                )
            self._devices = key, now, Devices(samples, capabilities)
        return self._devices[2]

    def _forget(self, now: float) -> None:
        for job in [j for j, answer in self._answers.items() if now - answer.asked_at > _FORGET_S]:
            del self._answers[job]


def _key(devices: Iterable[GpuSample]) -> _Key:
    return tuple(
        (d.uuid, d.parent_uuid, d.HasField("minor"), d.minor, d.gpu_instance, d.compute_instance)
        for d in devices
    )


def _directories(job: Job) -> dict[str, str]:
    return {name: job.directories[name] for name in _LIMITS if name in job.directories}


def _state(directory: str) -> _State:
    try:
        found = os.stat(directory)  # noqa: PTH116 (each tick)
    except OSError:
        return _State(directory, 0, 0)
    return _State(directory, found.st_ino, found.st_nlink)


def _tree(top: str) -> _Tree:
    """A cgroup and those below it, at most one more than _MAX_CGROUPS."""
    states: list[_State] = []
    pending = [top]
    while pending and len(states) <= _MAX_CGROUPS:
        directory = pending.pop()
        states.append(_state(directory))
        try:
            with os.scandir(directory) as entries:
                below = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
                pending += itertools.islice(below, _MAX_CGROUPS + 1)
        except OSError:
            continue
    return tuple(states)


def _has_processes(directory: str, wanted: frozenset[int] | None) -> bool:
    """Whether there is one of `wanted` (None: any) in the cgroup itself."""
    try:
        with open(f"{directory}/cgroup.procs", "rb") as file:
            pids = {int(line) for line in file.read(_MAX_FILE_BYTES).split() if line.isdigit()}
    except OSError:
        return False
    return bool(pids if wanted is None else pids & wanted)


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MAX_FILE_BYTES)
    except OSError:
        return ""
