"""Which cgroup hierarchies this node has, where they are mounted, and which one tells jobs apart."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from expanse_ebpf.errors import UnavailableError

# The kernel's names of v1 controllers: whatever else stands in a mount's options is a flag.
_CONTROLLERS = frozenset(
    {"cpuset", "cpu", "cpuacct", "blkio", "memory", "devices", "freezer", "net_cls", "net_prio"}
    | {"perf_event", "hugetlb", "pids", "rdma", "misc", "debug"}
)
# Which hierarchy to take when several see as many jobs.
_ORDER = ("unified", "freezer", "cpuset", "memory", "cpuacct", "cpu", "devices", "pids", "blkio", "io")
_OCTAL = re.compile(r"\\([01][0-7]{2})")
_DELETED = " (deleted)"
_NONE_MOUNTED = "no cgroup hierarchy is mounted; mount one with: mount -t cgroup2 none /sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """One mounted cgroup hierarchy."""

    name: str  # "unified", else the first controller ("memory"), else "name=systemd"
    version: Literal[1, 2]
    controllers: tuple[str, ...]
    mount: str  # absolute directory
    root: str  # what of the hierarchy is mounted there; "/" is all of it

    @property
    def named(self) -> bool:
        """Whether it is a v1 hierarchy without a controller, which BPF cannot reach from a task."""
        return self.version == 1 and not self.controllers

    def directory(self, path: str) -> str | None:
        """Where the cgroup `path` (as in /proc/PID/cgroup) lies; None when it is not below this mount."""
        if not path.startswith("/") or "/../" in f"{path}/":
            return None
        if self.root == "/":
            inside = path
        elif path == self.root or path.startswith(f"{self.root}/"):
            inside = path[len(self.root) :]
        else:
            return None
        return f"{self.mount.rstrip('/')}{inside}".rstrip("/") or "/"

    def path(self, directory: str) -> str | None:
        """The reverse of `directory`: the cgroup's path in the hierarchy; None when not below this mount."""
        mount = self.mount.rstrip("/")
        if directory != mount and not directory.startswith(f"{mount}/"):
            return None
        return f"{self.root.rstrip('/')}{directory[len(mount) :]}".rstrip("/") or "/"


def _unescape(field: str) -> str:
    """A mountinfo field with \\040 and the like undone; the kernel escapes ASCII characters only."""
    return _OCTAL.sub(lambda m: chr(int(m[1], 8)), field) if "\\" in field else field


def _hierarchy(kind: str, options: str, mount: str, root: str) -> Hierarchy | None:
    if kind == "cgroup2":
        return Hierarchy("unified", 2, (), mount, root)
    words = options.split(",")
    controllers = tuple(word for word in words if word in _CONTROLLERS)
    named = next((word for word in words if word.startswith("name=")), "")
    name = controllers[0] if controllers else named
    return Hierarchy(name, 1, controllers, mount, root) if name else None


def parse_mountinfo(text: str) -> list[Hierarchy]:
    """The hierarchies in a /proc/PID/mountinfo, in order of mounting, each once.

    Of several mounts of one hierarchy the one that shows most of it counts, then the first. The
    controllers of the unified hierarchy are not in mountinfo and stay empty.
    """
    by_mount: dict[str, Hierarchy | None] = {}
    for line in text.split("\n"):
        before, dash, after = line.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(tail) < 3:
            continue
        mount, root = _unescape(fields[4]), _unescape(fields[3])
        by_mount.pop(mount, None)  # a later mount hides the earlier one
        is_cgroup = tail[0] in ("cgroup", "cgroup2") and mount.startswith("/")
        by_mount[mount] = _hierarchy(tail[0], tail[2], mount, root) if is_cgroup else None
    found: dict[str, Hierarchy] = {}
    for hierarchy in by_mount.values():
        if hierarchy is not None:
            other = found.get(hierarchy.name)
            if other is None or len(hierarchy.root) < len(other.root):
                found[hierarchy.name] = hierarchy
    return list(found.values())


def parse_proc_cgroup(text: str) -> dict[str, str]:
    """A /proc/PID/cgroup as {controller, "name=systemd" or "unified": path}; bad lines are left out."""
    paths: dict[str, str] = {}
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        names, colon, path = rest.partition(":")  # a path may hold colons itself
        if not colon or not path.startswith("/"):
            continue
        if number == "0" and not names:
            # Only v2 marks the cgroup of a process that outlived it, and the mark is no part of the name.
            paths["unified"] = path.removesuffix(_DELETED) or "/"
        else:
            for name in names.split(","):
                if name:
                    paths[name] = path
    return paths


def parse_numbers(text: str) -> dict[int, str]:
    """The kernel's number of each hierarchy in a /proc/PID/cgroup to the name as in Hierarchy."""
    numbers: dict[int, str] = {}
    for line in text.split("\n"):
        number, colon, rest = line.partition(":")
        if colon and number.isascii() and number.isdigit():
            names = rest.partition(":")[0]
            numbers[int(number)] = names.partition(",")[0] or "unified"
    return numbers


def numbers(proc: str = "/proc") -> dict[int, str]:
    """As parse_numbers, of this process; empty when that cannot be read."""
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            return parse_numbers(file.read())
    except OSError:
        return {}


def mounted(proc: str = "/proc") -> list[Hierarchy]:
    """The hierarchies mounted here; raises UnavailableError when that cannot be read or there are none."""
    try:
        with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            hierarchies = parse_mountinfo(file.read())
    except OSError as error:
        raise UnavailableError(f"{proc}/self/mountinfo: {error.strerror}; mount /proc") from None
    if not hierarchies:
        raise UnavailableError(_NONE_MOUNTED)
    return [replace(h, controllers=_controllers(h.mount)) if h.version == 2 else h for h in hierarchies]


def _controllers(mount: str) -> tuple[str, ...]:
    try:
        with open(f"{mount}/cgroup.controllers", encoding="ascii", errors="replace") as file:
            return tuple(file.read(4096).split())
    except OSError:
        return ()


def mode(hierarchies: Sequence[Hierarchy]) -> Literal["v1", "v2", "hybrid"]:
    """How cgroups are used here; a named v1 hierarchy beside a unified one that has every controller is v2.

    Raises UnavailableError when nothing is mounted.
    """
    if not hierarchies:
        raise UnavailableError(_NONE_MOUNTED)
    if not any(h.version == 2 for h in hierarchies):
        return "v1"
    return "hybrid" if any(h.version == 1 and h.controllers for h in hierarchies) else "v2"


class Tally(NamedTuple):
    """How many jobs a hierarchy tells apart. Schedulers' come first: a node has systemd units anyway."""

    jobs: int
    units: int


def choose(tallies: Mapping[str, Tally], hierarchies: Sequence[Hierarchy]) -> str:
    """Name of the hierarchy that tells jobs apart: the one in which most jobs are seen, then most units.

    `tallies` are by hierarchy name. Raises UnavailableError when no hierarchy can serve.
    """
    names = [h.name for h in hierarchies if not h.named]
    if not names:
        raise UnavailableError(_NONE_MOUNTED)

    def rank(name: str) -> tuple[Tally, int]:
        order = _ORDER.index(name) if name in _ORDER else len(_ORDER)
        return tallies.get(name, Tally(0, 0)), -order

    return max(names, key=rank)
