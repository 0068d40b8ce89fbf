"""Which GPUs a process has open: its descriptors of /dev/nvidiaN, and of MIG's capability devices.

A name in /proc/PID/fd is the process's own word, since anybody can mount a /dev of their own; so what it
names is looked at too. That never waits for a file system of the user's, and a descriptor that was only
located (O_PATH), for which no right is needed, does not count.
"""

from __future__ import annotations

import os
import re
import time
from array import array
from collections.abc import Callable, Collection, Hashable, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.gpu.character_device import character_device
from expanse_ebpf.jobs.identity import parse_stat

GPU_MAJOR = 195  # of all GPUs, fixed in the driver
_MOST_MINORS = 254  # from here on: nvidia-modeset, nvidiactl
_MAX_DESCRIPTORS = 4096  # of one process
_MAX_PROCESSES = 65536
_AGAIN_S = 30.0
_HURRY_S = 5.0  # one that was looked at within this time is not urgent
_LEAST_PART = 64  # links; with more groups than the budget has parts, the others come first the next time
_MAX_CAPS_BYTES = 4 << 20

_NAME = re.compile(r"/nvidia(?P<gpu>[0-9]{1,3})|/nvidia-cap(?P<cap>[0-9]{1,7})|/(?P<uvm>nvidia-uvm)")
_CAP = re.compile(r"gpu([0-9]{1,3})/gi([0-9]{1,4})(?:/ci([0-9]{1,4}))?/access ([0-9]{1,7})")
# Devices that nearly every process has open
_OTHERS = ("/dev/null", "/dev/pts/", "/dev/urandom", "/dev/random", "/dev/shm/", "/dev/zero", "/dev/tty")


# Minors of capability devices, see parse_mig_minors()
MigMinors = Mapping[int, tuple[int, int | None, int | None]]


def parse_mig_minors(text: str) -> dict[int, tuple[int, int | None, int | None]]:
    """Minors of /dev/nvidia-caps/nvidia-capN, from the text of /proc/driver/nvidia-caps/mig-minors.

    A minor's value is (the GPU's own minor, GPU instance, compute instance or None): opening it is the
    right to use that instance. The file has a line for each instance that could ever be made,
    "gpu0/gi3/access 30" or "gpu0/gi3/ci0/access 31", of which a process needs both; lines of other kinds
    are left out.
    """
    found: dict[int, tuple[int, int | None, int | None]] = {}
    for line in text[:_MAX_CAPS_BYTES].splitlines():
        if match := _CAP.fullmatch(line.strip()):
            gpu, gi, ci, minor = match.groups()
            found[int(minor)] = (int(gpu), int(gi), int(ci) if ci is not None else None)
    return found


def read_mig_minors(proc: str = "/proc") -> dict[int, tuple[int, int | None, int | None]]:
    """What parse_mig_minors() finds in the driver's list; raises OSError when it cannot be read."""
    with open(f"{proc}/driver/nvidia-caps/mig-minors", "rb") as file:
        return parse_mig_minors(file.read(_MAX_CAPS_BYTES).decode("ascii", "replace"))


def parse_nspid(status: bytes) -> tuple[int, ...]:
    """A process's numbers in its pid namespaces, the reader's first, from a /proc/PID/status."""
    match = re.search(rb"^NSpid:((?:\t[0-9]{1,10}){1,33})$", status, re.MULTILINE)  # 32 levels at most
    return tuple(map(int, match[1].split())) if match else ()


def parse_majors(text: str) -> dict[str, int]:
    """The major numbers of character devices by name, from the text of /proc/devices."""
    lines = text.partition("Block devices:")[0].splitlines()
    pairs = (line.split() for line in lines[:4096])
    return {pair[1]: int(pair[0]) for pair in pairs if len(pair) == 2 and pair[0].isdecimal()}


def read_majors(proc: str = "/proc") -> dict[str, int]:
    """What parse_majors() finds in the kernel's list; nothing when it cannot be read."""
    return parse_majors(_read(f"{proc}/devices", 65536).decode("ascii", "replace"))


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

    __slots__ = ("checked", "due", "looked_at", "opened", "start", "urgent")

    def __init__(self, due: float) -> None:
        self.due = due
        self.urgent = False
        self.looked_at = float("-inf")
        self.start = -1
        self.checked = 0  # the call of look() after which it was seen to be the same process still
        self.opened: Opened | None = None


class _Look:
    """A look at one process, perhaps over several calls."""

    def __init__(self, pid: int, start: int, directory: str, numbers: array[int]) -> None:
        self.pid = pid
        self.start = start
        self.directory = directory
        self.numbers = numbers  # descriptors still to be looked at
        self.minors: set[int] = set()
        self.caps: set[int] = set()
        self.uvm = False


# Whether it is urgent, and a group. Lanes have their turns, and each has one look at a time.
_Lane = tuple[bool, Hashable]


class OpenFiles:
    """Looks at processes a few at a time: each when it is first seen, then every 30 s.

    `proc` and `clock` are for tests. Nothing here raises: what cannot be read has nothing open.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._looks: dict[_Lane, _Look] = {}
        self._calls = 0
        self._turns = 0
        self._last_turn: dict[_Lane, int] = {}
        self._majors: dict[str, int] = {}

    def look(
        self, pids: Collection[int], budget: int = 2000, groups: Mapping[int, Hashable] | None = None
    ) -> int:
        """Go on looking at `pids`, and forget all others. How many links it has read comes back.

        `budget` is the number of links that may be read, give or take one; the rest is for the next call.
        Half of it is for urgent processes, see hurry(). `groups` says whose the processes are (those that
        are not in it are one group): every group has its part of the budget, so that none keeps the others
        waiting, and in a group it begins with those that have waited longest.
        """
        now = self._clock()
        self._calls += 1
        known = self._processes
        for pid in known.keys() - pids:
            del known[pid]
        for pid in sorted(set(pids) - known.keys())[: _MAX_PROCESSES - len(known)]:
            known[pid] = _Process(now)
        self._majors = read_majors(self._proc)
        waiting = self._waiting(groups or {}, now)
        urgent = [lane for lane in waiting if lane[0]]
        left = budget
        if urgent:
            least = budget // 2 if len(urgent) < len(waiting) else 0
            left = least + self._share_out({lane: waiting.pop(lane) for lane in urgent}, left - least, now)
        return budget - self._share_out(waiting, left, now)

    def of(self, pid: int) -> Opened | None:
        """What the process had open when it was last looked at.

        None: it was not looked at yet, or it is another process by now, which is seen once after each look().
        """
        process = self._processes.get(pid)
        if process is None or process.opened is None:
            return None
        if process.opened.any and process.checked != self._calls:
            process.checked = self._calls
            if self._start(pid) != process.start:
                process.opened, process.due = None, self._clock()
                return None
        return process.opened

    def fresh(self, pid: int) -> bool:
        """Whether the process was looked at within the last seconds; True of one that is not looked at."""
        process = self._processes.get(pid)
        return process is None or self._clock() - process.looked_at < _HURRY_S

    def hurry(self, pid: int) -> None:
        """Look at the process again before its time; before all others if the last look is a while ago."""
        process = self._processes.get(pid)
        if process is not None:
            now = self._clock()
            process.due = min(process.due, now)
            process.urgent = process.urgent or now - process.looked_at >= _HURRY_S

    # ---- whose turn it is -----------------------------------------------------------------------

    def _waiting(self, groups: Mapping[int, Hashable], now: float) -> dict[_Lane, list[int]]:
        """The processes that are due, by lane, and the first of each the last."""
        for lane, look in list(self._looks.items()):
            process = self._processes.get(look.pid)
            # What has become urgent since is begun anew in the other lane.
            if process is None or process.urgent != lane[0]:
                del self._looks[lane]
        begun = {look.pid for look in self._looks.values()}
        waiting: dict[_Lane, list[int]] = {lane: [] for lane in self._looks}
        due = [(process.due, pid) for pid, process in self._processes.items() if process.due <= now]
        for _, pid in sorted(due, reverse=True):
            if pid not in begun:
                lane = self._processes[pid].urgent, groups.get(pid)
                waiting.setdefault(lane, []).append(pid)
        self._last_turn = {lane: turn for lane, turn in self._last_turn.items() if lane in waiting}
        return waiting

    def _share_out(self, waiting: dict[_Lane, list[int]], left: int, now: float) -> int:
        """Give each lane a part of `left` in turn until nothing is left of it or to be done."""
        lanes = sorted(waiting, key=lambda lane: self._last_turn.get(lane, -1))
        while lanes and left > 0:
            part = max(_LEAST_PART, left // len(lanes))
            for lane in list(lanes):
                if left <= 0:
                    break
                here = min(part, left)
                left -= here - self._serve(lane, waiting[lane], here, now)
                self._turns += 1
                self._last_turn[lane] = self._turns
                if not waiting[lane] and lane not in self._looks:
                    lanes.remove(lane)
        return left

    def _serve(self, lane: _Lane, pids: list[int], left: int, now: float) -> int:
        while left > 0 and (pids or lane in self._looks):
            look = self._looks.get(lane)
            if look is None:
                pid = pids.pop()
                left -= 2
                start = self._start(pid)
                if start is None:
                    self._known(pid, -1, NOTHING, now)
                    continue
                look = self._looks[lane] = _Look(pid, start, *self._descriptors(pid))
            while look.numbers and left > 0:
                left -= 1 + self._take(look, f"{look.directory}/{look.numbers.pop()}")
            if not look.numbers:
                del self._looks[lane]
                self._finish(look, now)
        return left

    def _finish(self, look: _Look, now: float) -> None:
        opened = Opened(frozenset(look.minors), frozenset(look.caps), look.uvm)
        if opened.any:
            opened = opened._replace(numbers=self._numbers(look.pid), program=self._program(look.pid))
        # All of it is of one process, or it is nobody's: the new one is looked at in its turn.
        same = self._start(look.pid) == look.start
        self._known(look.pid, look.start, opened if same else NOTHING, now if same else now - _AGAIN_S)

    def _known(self, pid: int, start: int, opened: Opened, now: float) -> None:
        process = self._processes[pid]
        process.start, process.opened, process.due = start, opened, now + _AGAIN_S
        process.looked_at, process.urgent = now, False

    # ---- descriptors ----------------------------------------------------------------------------

    def _descriptors(self, pid: int) -> tuple[str, array[int]]:
        """The folder of the process's descriptors, and their numbers."""
        folder = f"{self._proc}/{pid}/fd"
        numbers = _numbers_in(folder, _MAX_DESCRIPTORS)
        if not numbers:  # a first thread that has exited has none, while the others go on
            for thread in _numbers_in(f"{self._proc}/{pid}/task", 2):
                if not numbers:
                    folder = f"{self._proc}/{pid}/task/{thread}/fd"
                    numbers = _numbers_in(folder, _MAX_DESCRIPTORS)
        return folder, numbers

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
            device = character_device(link)
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

    def _start(self, pid: int) -> int | None:
        found = parse_stat(_read(f"{self._proc}/{pid}/stat", 4096))
        return found[1] if found else None

    def _numbers(self, pid: int) -> tuple[int, ...]:
        return parse_nspid(_read(f"{self._proc}/{pid}/status", 16384)) or (pid,)

    def _program(self, pid: int) -> str:
        try:
            return Path(f"{self._proc}/{pid}/exe").readlink().name.removesuffix(" (deleted)")
        except OSError:
            return ""


def _read(path: str, limit: int) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(limit)
    except OSError:
        return b""


def _numbers_in(directory: str, limit: int) -> array[int]:
    """The names in a folder that are numbers; an array, since there may be very many."""
    numbers = array("i")
    try:
        with os.scandir(directory) as entries:
            numbers.extend(int(entry.name) for entry in islice(entries, limit) if entry.name.isdecimal())
    except (OSError, OverflowError):
        pass
    return numbers
