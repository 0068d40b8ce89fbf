"""Cgroups that the agent makes for users who may not make any: their process becomes a job.

The process stays below the cgroups that it was in, and so under every limit that it had.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Iterable
from pathlib import Path

from expanse_ebpf.jobs import launch, paths
from expanse_ebpf.jobs.hierarchies import mounted
from expanse_ebpf.jobs.launch import Cgroups, LaunchError

MAX_PER_UID = 32  # jobs of one user at a time
# Controllers whose child cgroups stay under their parent's limits and need no setting up. In v1 those
# of blkio are not inherited, and a cpuset takes no process until it has CPUs.
CONTROLLERS = frozenset({"memory", "cpu", "cpuacct", "freezer", "pids"})


class Adoptions:
    """The jobs that the agent made cgroups for, for users who may not make them."""

    def __init__(self, max_per_uid: int = MAX_PER_UID) -> None:
        self._max_per_uid = max_per_uid
        self._lock = threading.Lock()
        self._jobs: list[tuple[int, dict[str, int]]] = []  # (uid, directory to inode)

    def adopt(self, name: str, pid: int, uid: int) -> list[str]:
        """Make cgroups for the job `name` and move the process `pid` of the user `uid` there.

        They are below those in which the process is, so it stays under every limit that it had. The
        unified one belongs to the user, who can neither write its files nor make cgroups in it. The
        directories, the unified one first. Raises LaunchError or ConfigError.
        """
        with self._lock, _Process(pid, uid) as process:
            cgroup = launch.cgroup_of(pid)
            _refuse_jobs(cgroup)
            process.check()
            if sum(owner == uid for owner, _ in self._jobs) >= self._max_per_uid:
                raise LaunchError(
                    f"you have {self._max_per_uid} jobs already; wait until one of them has ended"
                )
            parents = [
                parent for parent in launch.parents(mounted(), CONTROLLERS, cgroup) if _inherits(parent)
            ]
            cgroups = Cgroups(name, parents, remedy="see the agent's rights")
            try:
                _give(cgroups.directories[0], uid)
                cgroups.join(pid)
                process.check()
            except (OSError, LaunchError) as error:
                _put_back(cgroups.directories)
                cgroups.discard()
                if isinstance(error, LaunchError):
                    raise
                raise LaunchError(
                    f"cannot set up the cgroup: {error.strerror}; see the agent's rights"
                ) from None
            cgroups.close()
            self._jobs.append((uid, {directory: _inode(directory) for directory in cgroups.directories}))
            return cgroups.directories

    def remove_empty(self) -> list[str]:
        """Remove the cgroups of adopted jobs that have no process any more; the directories that went."""
        removed: list[str] = []
        with self._lock:
            for job in list(self._jobs):
                _uid, directories = job
                # One with another inode was removed and made again by somebody else, for a new job.
                own = [directory for directory, inode in directories.items() if _inode(directory) == inode]
                if launch.pids_of(own):
                    continue
                left = launch.remove(own, 0)
                removed += [directory for directory in own if directory not in left]
                if not left:
                    self._jobs.remove(job)
        return removed


def _inode(directory: str) -> int:
    try:
        return Path(directory).stat().st_ino
    except OSError:
        return 0


class _Process:
    """A process of a user, held by a pidfd so that its number cannot pass to another one unseen."""

    def __init__(self, pid: int, uid: int) -> None:
        """Raises LaunchError when there is no such process of this user alone."""
        if pid <= 0:  # what SO_PEERCRED gives for a process of a foreign pid namespace
            raise LaunchError("the agent cannot see the process that asked: it is in another pid namespace")
        try:
            self._descriptor = os.pidfd_open(pid)
        except OSError:
            raise LaunchError("the process that asked for a job has ended") from None
        try:
            if _uids_of(pid) != {uid}:
                raise LaunchError("the process that asked for a job is not only this user's")
            self.check()
        except LaunchError:
            os.close(self._descriptor)
            raise

    def check(self) -> None:
        """Raises LaunchError when it has ended: what was read or done by its pid may be another's."""
        # Not select(): its descriptors end at 1023, and counters alone may take more.
        poll = select.poll()
        poll.register(self._descriptor, select.POLLIN)
        if poll.poll(0):
            raise LaunchError("the process that asked for a job has ended")

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exc: object) -> None:
        os.close(self._descriptor)


def parse_uids(status: str) -> set[int]:
    """Real, effective, saved and file system uid in a /proc/PID/status; empty when they are not there."""
    for line in status.split("\n"):
        if line.startswith("Uid:"):
            return {int(word) for word in line.split()[1:] if word.isascii() and word.isdigit()}
    return set()


def _uids_of(pid: int) -> set[int]:
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            return parse_uids(file.read(1 << 14))
    except OSError:
        return set()


def _refuse_jobs(cgroup: dict[str, str]) -> None:
    """Raises LaunchError for a process of a scheduler's job, which must keep all of them to end them."""
    for path in cgroup.values():
        place = paths.parse(path)
        if isinstance(place, paths.Place) and place.scheduler in ("slurm", "kubernetes", "container", "run"):
            raise LaunchError(
                f"this process is in the job {place.scheduler}/{place.id} already; start it without `run`"
            )


def _inherits(parent: str) -> bool:
    """Whether children count towards the parent's limit: in v1's memory, until Linux 5.11, they need not."""
    try:
        return Path(f"{parent}/memory.use_hierarchy").read_text(encoding="ascii").strip() != "0"
    except OSError:
        return True


def _give(directory: str, uid: int) -> None:
    """Show whose job it is. The owner could make cgroups in it, hence the bound on descendants."""
    descendants = Path(directory, "cgroup.max.descendants")
    if descendants.exists():  # v2
        descendants.write_text("0", encoding="ascii")
        Path(directory).chmod(0o555)
        os.chown(directory, uid, -1)


def _put_back(directories: Iterable[str]) -> None:
    """Move a process that came in by mistake (its pid had been another's) out again, one level up."""
    for directory in directories:
        for pid in launch.pids_in(directory):
            with contextlib.suppress(OSError):
                Path(directory).parent.joinpath("cgroup.procs").write_text(str(pid), encoding="ascii")
