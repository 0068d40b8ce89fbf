"""Who a job is: from its cgroup's place, its processes and what the schedulers say.

Everything read from /proc is read between two looks at the process's start time and cgroup, so that
a pid that is used again never lends its owner or environment to another job.
"""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.jobs import paths, slurm, states
from expanse_ebpf.jobs.hierarchies import parse_proc_cgroup
from expanse_ebpf.jobs.kubernetes import PodNames
from expanse_ebpf.jobs.paths import Place
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import JobIdentity

_MAX_PIDS = 32  # processes looked at for one job
_MAX_STEPS = 64
_MAX_ENVIRONMENT = 512 << 10  # bytes
_MAX_LABELS = 32


class _Process(NamedTuple):
    pid: int
    start: int  # clock ticks after boot
    comm: str
    uid: int  # real user id
    place: Place | None  # of its cgroup
    role: states.Role


def _read(path: str, limit: int) -> bytes:
    """The first `limit` bytes of a file; raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        chunks = []
        while limit > 0 and (chunk := os.read(fd, min(limit, 1 << 16))):
            chunks.append(chunk)
            limit -= len(chunk)
        return b"".join(chunks)
    finally:
        os.close(fd)


def parse_stat(data: bytes) -> tuple[str, int] | None:
    """(command name, start time in clock ticks) of a /proc/PID/stat; the name may hold brackets."""
    opening, closing = data.find(b"("), data.rfind(b")")
    fields = data[closing + 1 :].split()
    if not 0 <= opening < closing or len(fields) < 20 or not fields[19].isdigit():
        return None
    return clean(data[opening + 1 : closing].decode("utf-8", "replace"), 64), int(fields[19])


def parse_uid(status: bytes) -> int | None:
    """The real user id in a /proc/PID/status."""
    match = re.search(rb"^Uid:\t([0-9]{1,10})\s", status, re.MULTILINE)
    return int(match[1]) if match and int(match[1]) < 2**32 else None


class IdentityReader:
    """Reads identities; `proc` and `read` are for tests.

    `pods` gives the names of pods; without it a pod's id stays its uid.
    """

    def __init__(
        self,
        proc: str = "/proc",
        pods: PodNames | None = None,
        units: paths.UnitFilter | None = None,
        read: Callable[[str, int], bytes] = _read,
    ) -> None:
        self._proc = proc
        self._pods = pods
        self._units = units
        self._read = read
        self._users: dict[int, str] = {}

    def identify(
        self, place: Place, cgroup_path: str, cgroup_id: int, directory: str, pids: Iterable[int]
    ) -> JobIdentity:
        """The identity of the job at `place`; what cannot be read stays empty. Never raises.

        `cgroup_path` is the cgroup's path in the hierarchy, `directory` where the job's own cgroup lies
        in the file system, `cgroup_id` that cgroup's id, `pids` some processes of the job or below.
        """
        job_path = "/" + "/".join([part for part in cgroup_path.split("/") if part][: place.depth])
        identity = JobIdentity(
            scheduler=place.scheduler,
            id=clean(place.id),
            run=cgroup_id,
            id_source="cgroup",
            uid=place.uid,
            pod_uid=place.pod_uid,
            qos=place.qos,
            sluid=place.sluid,
            cgroup=clean(job_path, 4096),
        )
        processes = sorted(self._processes(pids, job_path), key=lambda p: (p.start, p.pid))
        if place.sluid:
            self._resolve_sluid(identity, job_path, directory, processes)
        own = [p for p in processes if p.role == "user"]
        if place.uid is None:
            uid = self._owner(place.scheduler, directory, own)
            if uid is not None:
                identity.uid = uid
        if identity.HasField("uid"):
            identity.user = self._user(identity.uid)
        if place.scheduler == "slurm":
            for process in own:
                if slurm.fill(identity, slurm.parse_environment(self._environment(process, job_path))):
                    break
        elif own:
            environment = self._environment(own[0], job_path)
            slurm.fill_visible_gpus(identity, slurm.parse_environment(environment))
        if place.scheduler == "kubernetes":
            self._name_pod(identity, place)
        elif place.scheduler == "container":
            identity.name = identity.id if identity.id.startswith("lxc-") else identity.id[:12]
            identity.containers.append(identity.id)
        elif place.scheduler != "slurm":
            identity.name = clean(paths.unescape(place.id)) if place.scheduler == "unit" else identity.id
        return identity

    def complete(self, identity: JobIdentity) -> bool:
        """Whether another reading, with processes there, could not add anything."""
        if identity.scheduler == "kubernetes" and self._pods is not None and self._pods.available:
            return "/" in identity.id
        if identity.scheduler == "slurm" and (identity.id_source == "sluid" or not identity.name):
            return False
        return identity.HasField("uid")

    # ---- processes ----------------------------------------------------------------------------

    def _processes(self, pids: Iterable[int], job_path: str) -> Iterator[_Process]:
        for pid in islice(pids, _MAX_PIDS):
            process = self._process(pid, job_path)
            if process is not None:
                yield process

    def _process(self, pid: int, job_path: str) -> _Process | None:
        """The process if it is in the job's cgroup or below, and still the same afterwards."""
        try:
            before = parse_stat(self._read(f"{self._proc}/{pid}/stat", 4096))
            uid = parse_uid(self._read(f"{self._proc}/{pid}/status", 16384))
            place = paths.parse(self._path(pid, job_path) or "", self._units)
        except OSError:
            return None
        if before is None or uid is None:
            return None
        known = place if isinstance(place, Place) else None
        comm, start = before
        role = states.process_role(known, comm, uid) if known else "user"
        process = _Process(pid, start, comm, uid, known, role)
        return process if self._same(process, job_path) else None

    def _path(self, pid: int, job_path: str) -> str | None:
        """The cgroup of a process that lies in `job_path`, in whatever hierarchy; raises OSError."""
        data = self._read(f"{self._proc}/{pid}/cgroup", 65536)
        below = "/" if job_path == "/" else f"{job_path}/"
        # The deepest: controllers differ in how far down they go.
        found = [
            path
            for path in parse_proc_cgroup(os.fsdecode(data)).values()
            if path == job_path or path.startswith(below)
        ]
        return max(found, key=len, default=None)

    def _same(self, process: _Process, job_path: str) -> bool:
        """Whether the pid is still that process and in the job."""
        try:
            now = parse_stat(self._read(f"{self._proc}/{process.pid}/stat", 4096))
            return (
                now is not None and now[1] == process.start and self._path(process.pid, job_path) is not None
            )
        except OSError:
            return False

    def _guarded(self, process: _Process, name: str, limit: int, job_path: str) -> bytes:
        """A file of the process; empty when it cannot be read or the pid is another's by now."""
        try:
            data = self._read(f"{self._proc}/{process.pid}/{name}", limit)
        except OSError:
            return b""
        return data if self._same(process, job_path) else b""

    def _environment(self, process: _Process, job_path: str) -> bytes:
        return self._guarded(process, "environ", _MAX_ENVIRONMENT, job_path)

    # ---- owner ----------------------------------------------------------------------------------

    def _owner(self, scheduler: str, directory: str, own: list[_Process]) -> int | None:
        """The user whose job it is: for `run` the cgroup's owner unless root, else the oldest process's."""
        if scheduler == "run":
            try:
                owner = Path(directory).stat().st_uid
            except OSError:
                owner = 0
            if owner:
                return owner
        uids = [p.uid for p in own]
        if scheduler == "slurm":  # slurmstepd's children are root's until they have become the user's
            return next((uid for uid in uids if uid), uids[0] if uids else None)
        return uids[0] if uids else None

    def _user(self, uid: int) -> str:
        if uid not in self._users:
            try:
                name = clean(pwd.getpwuid(uid).pw_name)
            except (KeyError, OSError):
                return str(uid)
            if len(self._users) >= 1024:
                self._users.clear()
            self._users[uid] = name
        return self._users[uid]

    # ---- schedulers -----------------------------------------------------------------------------

    def _resolve_sluid(
        self, identity: JobIdentity, job_path: str, directory: str, processes: list[_Process]
    ) -> None:
        """Put the number in the SLUID's place, from a slurmstepd of this job that no user can pose as."""
        known = {p.pid for p in processes}
        stepds = [p for p in processes if p.role == "slurmstepd"]
        stepds += self._processes((pid for pid in self._stepd_pids(directory) if pid not in known), job_path)
        identity.id_source = "sluid"
        for process in stepds:
            if not self._is_slurmstepd(process):
                continue
            title = slurm.parse_stepd_title(self._guarded(process, "cmdline", 512, job_path))
            if title:
                identity.id, identity.id_source = title[0], "slurmstepd"
                return

    def _is_slurmstepd(self, process: _Process) -> bool:
        """In the cgroup that slurmstepd keeps for itself, which root alone can enter, or its very program."""
        if process.place is not None and process.place.role == "slurmstepd":
            return True
        try:
            program = Path(f"{self._proc}/{process.pid}/exe").readlink().name
        except OSError:
            return False
        return process.uid == 0 and program.removesuffix(" (deleted)") == "slurmstepd"

    def _stepd_pids(self, directory: str) -> Iterator[int]:
        try:
            with os.scandir(directory) as entries:
                steps = [e.name for e in islice(entries, 4 * _MAX_STEPS) if e.name.startswith("step_")]
        except OSError:
            return
        for step in steps[:_MAX_STEPS]:
            try:
                data = self._read(f"{directory}/{step}/slurm/cgroup.procs", 4096)
            except OSError:
                continue
            yield from (int(line) for line in data.split() if line.isdigit() and len(line) < 11)

    def _name_pod(self, identity: JobIdentity, place: Place) -> None:
        pod = self._pods.lookup(place.pod_uid) if self._pods is not None else None
        if pod is None:
            if place.container:
                identity.containers.append(place.container)
            return
        identity.id, identity.name = f"{pod.namespace}/{pod.name}", pod.name
        identity.pod_uid = pod.uid
        identity.containers.extend(
            sorted(set(pod.containers.values())) or [place.container] * bool(place.container)
        )
        for key, value in islice(pod.labels.items(), _MAX_LABELS):
            identity.labels[key] = value
