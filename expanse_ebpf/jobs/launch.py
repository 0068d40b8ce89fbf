"""The cgroups of commands that run as jobs of their own: made, joined, watched, removed.

A job named NAME has the directory `expanse-run-` + percent-encoded NAME in every hierarchy in which
one can be made. While somebody works on such a directory they hold a lock (flock) on it, which the
kernel lets go when they die; so of two that start the same name one sees the other, and a directory
that has neither a lock nor a process is left over from a killed run and can go.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.jobs import paths
from expanse_ebpf.jobs.hierarchies import Hierarchy, mounted, parse_proc_cgroup

_BATCH = 256  # processes signalled at once, each with a descriptor
MAX_CGROUPS = 65536  # that a job made below its own
SETTLE_S = 2.0  # the kernel says EBUSY for a moment after the last process of a cgroup has gone

# v1's systemd moves what it finds in a unit of its own hierarchy back to that unit in any other, whenever
# it turns a controller on or off; so a job leaves the unit there too, as it does on v2.
CONTROLLERS = frozenset(
    {"memory", "cpu", "cpuacct", "cpuset", "freezer", "blkio", "pids", "devices", "name=systemd"}
)
ENABLED = ("cpu", "memory", "io", "pids")  # on v2, where the parent can


class LaunchError(ExpanseError):
    """A command cannot be started as a job. The exit code is one that the command itself hardly uses."""

    exit_code = 125


class NameTakenError(LaunchError):
    """A job of this name runs already."""


def pids_in(directory: str) -> set[int]:
    """The processes in one cgroup; none when it has gone."""
    try:
        with open(f"{directory}/cgroup.procs", encoding="ascii", errors="replace") as file:
            return {int(line) for line in file if line.strip().isdigit()} - {0}
    except OSError:  # it has gone, or is threaded and lists no processes
        return set()


def _tree(directory: str) -> list[str]:
    """`directory` and the cgroups below it, deepest first."""
    found: list[str] = []
    level = [directory]
    while level and len(found) < MAX_CGROUPS:
        found.extend(level)
        below: list[str] = []
        for parent in level:
            with contextlib.suppress(OSError), os.scandir(parent) as entries:
                below.extend(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
        level = below
    return found[::-1]


def pids_of(directories: Iterable[str]) -> set[int]:
    """The processes in these cgroups and below them."""
    return {pid for top in directories for directory in _tree(top) for pid in pids_in(directory)}


def remove(directories: Iterable[str], settle_s: float = SETTLE_S) -> list[str]:
    """Remove these cgroups and those below them; the ones that are still there after `settle_s` seconds."""
    left = list(directories)
    deadline = time.monotonic() + settle_s
    while True:
        for top in list(left):
            for directory in _tree(top):
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
            if not Path(top).is_dir():
                left.remove(top)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.02)


def signal_all(directories: Sequence[str], number: signal.Signals) -> int:
    """Send a signal to every process of these cgroups; how many there were."""
    pids = sorted(pids_of(directories))
    return sum(_signal(pids[i : i + _BATCH], directories, number) for i in range(0, len(pids), _BATCH))


def _signal(pids: Sequence[int], directories: Sequence[str], number: signal.Signals) -> int:
    count = 0
    with contextlib.ExitStack() as stack:
        opened: dict[int, int] = {}
        for pid in pids:
            with contextlib.suppress(OSError):
                opened[pid] = os.pidfd_open(pid)
                stack.callback(os.close, opened[pid])
        # A pid may have passed to a stranger since it was listed; a pidfd cannot.
        for pid in pids_of(directories) & opened.keys():
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(opened[pid], number)
                count += 1
    return count


def _claim(path: str) -> int:
    """Make the cgroup `path`, freshly, and lock it; the descriptor that holds the lock.

    Raises NameTakenError, or OSError when it cannot be made.
    """
    taken = NameTakenError("a job of this name runs already; give another --name")
    for _ in range(50):
        made = True
        try:
            Path(path).mkdir(0o755)
        except FileExistsError:
            made = False
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                if made and os.path.samestat(os.fstat(descriptor), Path(path).stat()):
                    return descriptor
                # Made anew even if empty: a job's run is told by the birth of its cgroup.
                if not made and (pids_of([path]) or remove([path], 0)):
                    raise taken
            os.close(descriptor)
        except BlockingIOError:
            os.close(descriptor)
            if pids_of([path]):
                raise taken from None
            time.sleep(0.01)  # somebody sweeps (see clear), or begins a job of this name
        except NameTakenError:
            os.close(descriptor)
            raise
    raise taken


def sweep(hierarchies: Iterable[Hierarchy]) -> list[str]:
    """Remove what killed or finished runs left at the top of the hierarchies; the directories that went.

    A directory that somebody works on is locked, and one with a process in it cannot be removed.
    """
    found: list[str] = []
    for hierarchy in hierarchies:
        with contextlib.suppress(OSError), os.scandir(hierarchy.mount) as entries:
            found += [entry.path for entry in entries if entry.name.startswith(paths.RUN_PREFIX)]
    return clear(found)


def clear(directories: Iterable[str]) -> list[str]:
    """Remove those of these cgroups that nobody works on and no process is in; the ones that went."""
    removed: list[str] = []
    for path in directories:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not pids_of([path]) and not remove([path], 0):
                    removed.append(path)
            finally:
                os.close(descriptor)
    return removed


class Cgroups:
    """The cgroups of one job, one per hierarchy, locked until `close`."""

    def __init__(self, name: str, parents: Sequence[str], remedy: str) -> None:
        """Make them below `parents`.

        Raises LaunchError when not one can be made, NameTakenError when the job runs already, and
        ConfigError for a name that no job can have.
        """
        directory = paths.run_component(name)
        self.directories: list[str] = []
        self._locks: list[int] = []
        self._join: list[int] = []
        refused = "no cgroup hierarchy is mounted where one could be made"
        try:
            for parent in parents:
                path = f"{parent}/{directory}"
                try:
                    lock = _claim(path)
                except OSError as error:
                    refused = f"{path}: {os.strerror(error.errno or 0)}"
                    continue
                self._locks.append(lock)
                self.directories.append(path)
                try:
                    _set_up(parent, path)
                    self._join.append(os.open(f"{path}/cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                except OSError as error:
                    refused = f"{path}: {os.strerror(error.errno or 0)}"
                    self.directories.pop()
                    remove([path], 0)
                    os.close(self._locks.pop())
        except NameTakenError:
            self.discard()
            raise
        if not self.directories:
            raise LaunchError(f"no cgroup can be made for the job: {refused}; {remedy}")

    def join(self, pid: int = 0) -> None:
        """Move a process in, by default the calling one; raises LaunchError when no cgroup takes it.

        A hierarchy that refuses (a real-time task in v1's cpu, say) is left out.
        """
        refused = ""
        for path, descriptor in zip(list(self.directories), list(self._join), strict=True):
            try:
                os.write(descriptor, b"%d" % pid)
            except OSError as error:
                refused = f"{path}: {os.strerror(error.errno or 0)}"
                self.directories.remove(path)
                remove([path], 0)
        if not self.directories:
            raise LaunchError(f"the command cannot be moved into its cgroup: {refused}")

    def discard(self, settle_s: float = 0) -> list[str]:
        """Remove the cgroups and close; those that are still there after `settle_s` seconds."""
        left = remove(self.directories, settle_s)
        self.close()
        return left

    def close(self) -> None:
        """Let go of the locks; safe to call twice."""
        for descriptor in self._locks + self._join:
            os.close(descriptor)
        self._locks, self._join = [], []


def _set_up(parent: str, path: str) -> None:
    """Give a new cgroup what it needs before a process can enter; raises OSError."""
    if Path(path, "cpuset.mems").exists() and not Path(path, "cgroup.controllers").exists():
        # In v1 a cpuset starts with no CPUs and no memory nodes, and takes no process until it has some.
        for name in ("cpuset.cpus", "cpuset.mems"):
            with open(f"{parent}/{name}", encoding="ascii") as source:
                value = source.read().strip()
            with open(f"{path}/{name}", "w", encoding="ascii") as target:
                target.write(value)


def enable_controllers(parent: str) -> None:
    """Have v2 account for the children of `parent` in the usual controllers, as far as it lets us."""
    try:
        with open(f"{parent}/cgroup.controllers", encoding="ascii") as file:
            available = set(file.read().split())
        # A cgroup other than the root cannot have both processes and controlled children; with the
        # threaded controllers the kernel would allow it and then let no process into the children.
        if Path(parent, "cgroup.type").exists() and pids_in(parent):
            return
    except OSError:
        return
    for name in ENABLED:
        if name in available:
            with (
                contextlib.suppress(OSError),
                open(f"{parent}/cgroup.subtree_control", "w", encoding="ascii") as file,
            ):
                file.write(f"+{name}")


def parents(
    hierarchies: Iterable[Hierarchy], wanted: frozenset[str], cgroup: dict[str, str] | None
) -> list[str]:
    """Where a job's cgroups go, the unified hierarchy first: below `cgroup`, or at the mounts' roots."""
    found: list[str] = []
    for hierarchy in sorted(hierarchies, key=lambda h: h.version, reverse=True):
        if hierarchy.version == 1 and not wanted.issuperset(hierarchy.controllers or (hierarchy.name,)):
            continue
        if cgroup is None:
            found.append(hierarchy.mount)
        elif hierarchy.name in cgroup and (directory := hierarchy.directory(cgroup[hierarchy.name])):
            found.append(directory)
    return found


def for_root(name: str) -> Cgroups:
    """Cgroups at the top of every hierarchy; raises LaunchError, ConfigError or UnavailableError."""
    hierarchies = mounted()
    paths.run_component(name)
    sweep(hierarchies)
    for hierarchy in hierarchies:
        if hierarchy.version == 2:
            enable_controllers(hierarchy.mount)
    return Cgroups(name, parents(hierarchies, CONTROLLERS, None), remedy="run it as root, or with --user")


def for_delegate(name: str) -> Cgroups | None:
    """A v2 cgroup beside or below the caller's own, where those are the caller's to use; else None.

    Raises NameTakenError or ConfigError.
    """
    unified = next((h for h in mounted() if h.version == 2), None)
    own = unified.directory(cgroup_of("self").get("unified", "")) if unified else None
    if unified is None or own is None or own == unified.mount:
        return None
    # Beside is better: controllers that are on for the caller are on there too. To move, one needs the
    # cgroup.procs of the nearest common ancestor as well.
    for parent in (str(Path(own).parent), own):
        if os.access(parent, os.W_OK) and os.access(f"{parent}/cgroup.procs", os.W_OK):
            try:
                return Cgroups(name, [parent], remedy="ask the agent")
            except NameTakenError:
                raise
            except LaunchError:
                continue
    return None


def cgroup_of(pid: int | str) -> dict[str, str]:
    """The cgroup paths of a process, by controller; empty when it has gone."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return parse_proc_cgroup(file.read(1 << 16))
    except OSError:
        return {}
