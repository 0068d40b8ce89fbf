"""A job's cgroup and those below it, as they are found in the cgroup file system."""

from __future__ import annotations

import errno
import itertools
import os
from typing import NamedTuple

_MAX_FILE_BYTES = 4 << 20
GONE = (errno.ENOENT, errno.ENODEV)  # a cgroup that was removed, before and after opening it


class State(NamedTuple):
    """Changes with the cgroup and with the cgroups right below it."""

    directory: str
    inode: int  # 0: it is gone
    links: int  # children and 2 (kernfs_refresh_inode)


Tree = tuple[State, ...]


def state(directory: str) -> State:
    """Of one cgroup as it is now. Never raises."""
    try:
        found = os.stat(directory)  # noqa: PTH116 (each tick)
    except OSError:
        return State(directory, 0, 0)
    return State(directory, found.st_ino, found.st_nlink)


def read_tree(top: str, most: int) -> Tree:
    """`top` and then the cgroups below it, at most one more than `most`. Never raises."""
    states: list[State] = []
    pending = [top]
    while pending:
        directory = pending.pop()
        states.append(state(directory))
        try:
            with os.scandir(directory) as entries:
                below = (entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
                pending += itertools.islice(below, most + 1 - len(states) - len(pending))
        except OSError:
            continue
    return tuple(states)


def has_processes(directory: str, wanted: frozenset[int] | None) -> bool:
    """Whether there is one of `wanted` (None: any) in the cgroup itself. Never raises."""
    try:
        with open(f"{directory}/cgroup.procs", "rb") as file:
            pids = {int(line) for line in file.read(_MAX_FILE_BYTES).split() if line.isdigit()}
    except OSError:
        return False
    return bool(pids if wanted is None else pids & wanted)
