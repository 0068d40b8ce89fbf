"""Which GPUs a process has open: its descriptors of /dev/nvidiaN, and of MIG's capability devices.

A name in /proc/PID/fd is the process's own word, since anybody can mount a /dev of their own; so what it
names is looked at too. That never waits for a file system of the user's, and a descriptor that was only
located (O_PATH), for which no right is needed, does not count.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Collection
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.jobs.identity import parse_stat

GPU_MAJOR = 195  # of all GPUs, fixed in the driver
_MOST_MINORS = 254  # from here on: nvidia-modeset, nvidiactl
_MAX_DESCRIPTORS = 4096  # of one process
_MAX_PROCESSES = 65536
_AGAIN_S = 30.0

_NAME = re.compile(r"/nvidia(?P<gpu>[0-9]{1,3})|/nvidia-cap(?P<cap>[0-9]{1,7})|/(?P<uvm>nvidia-uvm)")
_CAP = re.compile(r"gpu([0-9]{1,3})/gi([0-9]{1,4})(?:/ci([0-9]{1,4}))?/access ([0-9]{1,7})")
# Devices that nearly every process has open
_OTHERS = ("/dev/null", "/dev/pts/", "/dev/urandom", "/dev/random", "/dev/shm/", "/dev/zero", "/dev/tty")


def parse_mig_minors(text: str) -> dict[int, tuple[int, int | None, int | None]]:
    """Minors of /dev/nvidia-caps/nvidia-capN, from the text of /proc/driver/nvidia-caps/mig-minors.

    A minor's value is (the GPU's own minor, GPU instance, compute instance or None): opening it is the
    right to use that instance. The file has a line for each instance that could ever be made,
    "gpu0/gi3/access 30" or "gpu0/gi3/ci0/access 31", of which a process needs both; lines of other kinds
    are left out.
    """
    found: dict[int, tuple[int, int | None, int | None]] = {}
    for line in text[: 4 << 20].splitlines():
        if match := _CAP.fullmatch(line.strip()):
            gpu, gi, ci, minor = match.groups()
            found[int(minor)] = (int(gpu), int(gi), int(ci) if ci is not None else None)
    return found


def parse_nspid(status: bytes) -> tuple[int, ...]:
    """A process's numbers in its pid namespaces, the reader's first, from a /proc/PID/status."""
    match = re.search(rb"^NSpid:((?:\t[0-9]{1,10}){1,33})$", status, re.MULTILINE)  # 32 levels at most
    return tuple(map(int, match[1].split())) if match else ()


def parse_majors(text: str) -> dict[str, int]:
    """The major numbers of character devices by name, from the text of /proc/devices."""
    lines = text.partition("Block devices:")[0].splitlines()
    pairs = (line.split() for line in lines[:4096])
    return {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}


class Opened(NamedTuple):
    """What one process has open of the NVIDIA driver."""

    minors: frozenset[int] = frozenset()  # of GPUs
    caps: frozenset[int] = frozenset()  # of capability devices, see parse_mig_minors
    uvm: bool = False  # unified memory: every CUDA process has it, but it belongs to no GPU
    numbers: tuple[int, ...] = ()  # its pid in every pid namespace it is in, see parse_nspid
    program: str = ""  # the name of its executable's file

    @property
    def any(self) -> bool:
        """Whether it has any of it open."""
        return bool(self.minors or self.caps or self.uvm)


NOTHING = Opened()


class _Process:
    """What is known of one process."""

    __slots__ = ("due", "opened", "start")

    def __init__(self, due: float) -> None:
        self.due = due
        self.start = -1
        self.opened: Opened | None = None


class _Look:
    """A look at one process, perhaps over several calls."""

    def __init__(self, pid: int, start: int, links: list[str]) -> None:
        self.pid = pid
        self.start = start
        self.links = links  # still to look at
        self.minors: set[int] = set()
        self.caps: set[int] = set()
        self.uvm = False


class OpenFiles:
    """Looks at processes a few at a time: each when it is first seen, then every 30 s.

    `proc` and `clock` are for tests. Nothing here raises: what cannot be read has nothing open.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._look: _Look | None = None
        self._majors: dict[str, int] = {}

    def look(self, pids: Collection[int], budget: int = 2000) -> int:
        """Go on looking at `pids`, those that have waited longest first; all others are forgotten.

        `budget` is the number of links that may be read, give or take one; the rest is for the next call.
        How many it has read comes back.
        """
        now = self._clock()
        known = self._processes
        for pid in known.keys() - pids:
            del known[pid]
        for pid in sorted(set(pids) - known.keys())[: _MAX_PROCESSES - len(known)]:
            known[pid] = _Process(now)
        self._majors = parse_majors(self._read(f"{self._proc}/devices", 65536).decode("ascii", "replace"))
        left = budget
        if self._look is not None:
            left = self._go_on(self._look, left, now)
        for pid in sorted(
            (p for p, process in known.items() if process.due <= now), key=lambda p: known[p].due
        ):
            if left <= 0 or self._look is not None:
                break
            left = self._begin(pid, left - 2, now)
        return budget - left

    def of(self, pid: int) -> Opened | None:
        """What the process had open when it was last looked at.

        None: it was not looked at yet, or it is another process by now.
        """
        process = self._processes.get(pid)
        if process is None or process.opened is None:
            return None
        if process.opened.any and self._start(pid) != process.start:
            process.opened, process.due = None, self._clock()
            return None
        return process.opened

    def hurry(self, pid: int) -> None:
        """Look at the process again before its time."""
        if pid in self._processes:
            self._processes[pid].due = min(self._processes[pid].due, self._clock())

    def _begin(self, pid: int, left: int, now: float) -> int:
        start = self._start(pid)
        if start is None:
            self._known(pid, -1, NOTHING, now)
            return left
        self._look = _Look(pid, start, self._links(pid))
        return self._go_on(self._look, left, now)

    def _go_on(self, look: _Look, left: int, now: float) -> int:
        known = look.pid in self._processes
        while known and look.links and left > 0:
            left -= 1 + self._take(look, look.links.pop())
        if known and look.links:
            return left
        self._look = None
        if known:
            opened = Opened(frozenset(look.minors), frozenset(look.caps), look.uvm)
            if opened.any:
                opened = opened._replace(numbers=self._numbers(look.pid), program=self._program(look.pid))
            # All of it is of one process, or it is nobody's: the new one is looked at in its turn.
            same = self._start(look.pid) == look.start
            self._known(look.pid, look.start, opened if same else NOTHING, now if same else now - _AGAIN_S)
        return left

    def _known(self, pid: int, start: int, opened: Opened, now: float) -> None:
        process = self._processes[pid]
        process.start, process.opened, process.due = start, opened, now + _AGAIN_S

    # ---- descriptors ----------------------------------------------------------------------------

    def _links(self, pid: int) -> list[str]:
        """The process's descriptors as links."""
        links = self._list(f"{self._proc}/{pid}/fd", _MAX_DESCRIPTORS)
        if not links:  # a first thread that has exited has none, while the others go on
            for thread in self._list(f"{self._proc}/{pid}/task", 2):
                links = links or self._list(f"{thread}/fd", _MAX_DESCRIPTORS)
        return links

    def _take(self, look: _Look, link: str) -> int:
        """Look where a link leads; how much more than that had to be asked."""
        try:
            name = os.readlink(link).removesuffix(" (deleted)")  # noqa: PTH115
        except OSError:
            return 0
        if not name.startswith("/") or name.startswith(_OTHERS):
            return 0
        if "nvidia" not in name and not name.startswith("/dev/"):
            return 0
        match = _NAME.fullmatch(name[name.rfind("/") :])
        kind = match.lastgroup if match else None
        number = int(match[kind]) if match and kind in ("gpu", "cap") else None
        try:
            if not os.lstat(link).st_mode & 0o600:  # neither read nor write: O_PATH
                return 1
            device = _character_device(link)
        except FileNotFoundError:  # a /proc that is not real leads nowhere; a real link has gone by now
            if not os.path.islink(link):  # noqa: PTH114
                return 1
            device = None
        except OSError:
            return 1
        else:
            if device is None:  # not a device at all, whatever it is called
                return 1
            major, number = device
            known = {self._majors.get("nvidia-caps", -1): "cap", self._majors.get("nvidia-uvm", -1): "uvm"}
            kind = "gpu" if major == GPU_MAJOR else known.get(major)
        if kind == "gpu" and number is not None and number < _MOST_MINORS:
            look.minors.add(number)
        elif kind == "cap" and number is not None:
            look.caps.add(number)
        elif kind == "uvm":
            look.uvm = True
        return 1

    # ---- /proc ------------------------------------------------------------------------------------

    def _list(self, directory: str, limit: int) -> list[str]:
        try:
            with os.scandir(directory) as entries:
                return [entry.path for entry in islice(entries, limit)]
        except OSError:
            return []

    def _read(self, path: str, limit: int) -> bytes:
        try:
            with open(path, "rb") as file:
                return file.read(limit)
        except OSError:
            return b""

    def _start(self, pid: int) -> int | None:
        found = parse_stat(self._read(f"{self._proc}/{pid}/stat", 4096))
        return found[1] if found else None

    def _numbers(self, pid: int) -> tuple[int, ...]:
        return parse_nspid(self._read(f"{self._proc}/{pid}/status", 16384)) or (pid,)

    def _program(self, pid: int) -> str:
        try:
            return Path(f"{self._proc}/{pid}/exe").readlink().name.removesuffix(" (deleted)")
        except OSError:
            return ""


# struct statx (include/uapi/linux/stat.h): stx_mode at 28, stx_rdev_major at 128
_STATX_BYTES, _MODE_AT, _RDEV_AT = 256, 28, 128
_AT_FDCWD, _AT_STATX_DONT_SYNC = -100, 0x4000
_STATX_TYPE = 0x1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _character_device(path: str) -> tuple[int, int] | None:
    """(major, minor) of the character device at `path`, None for what is none; raises OSError.

    os.stat() asks the file system, and one in user space may never answer; this takes what is at hand.
    """
    data = ctypes.create_string_buffer(_STATX_BYTES)
    statx = getattr(_libc(), "statx", None)  # in glibc since 2.28
    if statx is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    if statx(_AT_FDCWD, os.fsencode(path), _AT_STATX_DONT_SYNC, _STATX_TYPE, data) != 0:
        code = ctypes.get_errno()
        raise FileNotFoundError(code, path) if code == errno.ENOENT else OSError(code, path)
    (mode,) = struct.unpack_from("H", data.raw, _MODE_AT)
    if not stat.S_ISCHR(mode):
        return None
    major, minor = struct.unpack_from("II", data.raw, _RDEV_AT)
    return major, minor
