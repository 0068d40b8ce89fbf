"""What there is to probe: the files that a job's processes map, and the functions in them.

A file's name does not tell what it holds: the runtime may be linked into the program or into some library,
its symbols hidden or stripped. So all code that a process maps is looked at, each file once, whoever maps it
and under which names.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection
from functools import lru_cache
from itertools import islice
from typing import NamedTuple, TypeVar

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.hierarchies import mounted
from expanse_ebpf.jobs.launch import pids_of
from expanse_ebpf.python_stacks.elf import Elf, ElfError
from expanse_ebpf.python_stacks.mapped_files import (
    Mapping,
    another_thread,
    open_mapped,
    parse_line,
    read_maps,
)
from expanse_ebpf.text import clean
from expanse_ebpf.tracing.points import Point, find_points, levels
from expanse_ebpf.tracing.same_file import Stamp, on_overlay, same_pages, stamp

_MOST_PROCESSES = 4096
_MOST_FILES = 256  # with points, each of which is kept open
_MOST_TOLD = 1024  # with points, or with a reason to have none
_MOST_MAPPED = 4096  # files of one process
_MOST_REMEMBERED = 65536  # files that are not looked at again
_MOST_DESCRIPTORS = 1024  # of one process, among which a GPU is looked for
_MOST_READ = 2 << 30  # bytes of all files together; a job may map what it likes
_SCAN_S = 2.0  # one scan: the rest is for the next one
_LONGEST_TEXT = 1024
_AGAIN_S = 5.0  # a library may take the place of another one of its size
_ELF = b"\x7fELF\x02\x01"
_NAMES = (b"libcuda", b"libnccl")  # libcuda.so.1, libcudart.so.12, libcudart-1234.so.13, libnccl.so.2
_NO_FUNCTION = "it has none of the functions that can be probed"

_Key = TypeVar("_Key")


class File(NamedTuple):
    """A file that was looked at because of what it holds, or should hold."""

    key: tuple[int, int]  # device and inode, as they were seen first; of no other file
    path: str  # as the process has it that was seen first
    attach_path: str  # where this process can open it; "" if it has no points
    points: tuple[Point, ...]
    levels: tuple[str, ...]  # runtime, driver, nccl: whose functions it has
    reason: str  # why there is no point, or not all


class ProcessView(NamedTuple):
    """What a process is to a window."""

    pid: int
    command: str
    state: str  # traced | no_cuda | no_probe_point | unreadable | exited
    reason: str
    files: tuple[tuple[int, int], ...]  # keys of those that it maps and that are in Targets.files


def processes_of(hierarchy: str, cgroup: str) -> list[int]:
    """The processes of a job's cgroup, a path in that hierarchy, and of those below it."""
    directory = _directory(hierarchy, cgroup)
    return sorted(pids_of([directory])) if directory else []


@lru_cache(4)
def _directory(hierarchy: str, cgroup: str) -> str | None:
    try:
        mounts = mounted()
    except UnavailableError:
        return None
    for mount in mounts:
        # In v1 several controllers may share a mount, which is called by the first.
        if hierarchy == mount.name or (mount.version == 1 and hierarchy in mount.controllers):
            return mount.directory(cgroup)
    return None


class _Held(NamedTuple):
    """A file that is probed."""

    file: File
    descriptor: int
    stamp: Stamp
    overlay: bool


class _Process:
    """What is known of one process."""

    __slots__ = ("due", "size", "task")

    def __init__(self, pid: int) -> None:
        self.task = f"{pid}/task/{pid}"
        self.size = b""
        self.due = float("-inf")


class Targets:
    """Follows a job's processes and the files that they map while a window is open.

    Nothing here raises. `proc` and `clock` are for tests.
    """

    def __init__(self, proc: str = "/proc", clock: Callable[[], float] = time.monotonic) -> None:
        self._proc = proc
        self._clock = clock
        self._processes: dict[int, _Process] = {}
        self._held: dict[tuple[int, int], _Held] = {}
        self._looked_at: dict[tuple[int, ...], File | None] = {}  # by what stat() says
        self._mapped: dict[tuple[str, bytes, int, bytes], File | None] = {}  # by how a process maps it
        self._told: set[tuple[int, int]] = set()
        self._new: list[File] = []
        self._read = 0
        self.files: list[File] = []  # all that there is something to say of
        self.views: dict[int, ProcessView] = {}  # each process that was looked at, as it was last seen alive
        self.left_out = 0  # processes, since there are too many

    def scan(self, pids: Collection[int]) -> list[File]:
        """Look at those of the processes that are new or have changed; the new files that are to be probed.

        After some seconds the rest of the work is left for the next scan.
        """
        now = self._clock()
        self._new = []
        wanted = self._wanted(sorted(set(pids)))
        # Those that wait longest come first.
        for pid in sorted(wanted, key=lambda pid: self._processes[pid].due):
            if self._clock() - now > _SCAN_S:
                break
            self._look(pid, self._processes[pid], now)
        return self._new

    def close(self) -> None:
        """Let go of the files."""
        for held in self._held.values():
            os.close(held.descriptor)
        self._held.clear()

    def _wanted(self, pids: list[int]) -> list[int]:
        known = self._processes
        new = [pid for pid in pids if pid not in known]
        if len(known) + len(new) > _MOST_PROCESSES:
            # Those that are gone and were not traced tell nobody anything.
            for pid in known.keys() - pids:
                view = self.views.get(pid)
                if view is None or view.state != "traced":
                    del known[pid]
                    self.views.pop(pid, None)
        room = max(0, _MOST_PROCESSES - len(known))
        self.left_out = max(self.left_out, len(new) - room)
        known.update((pid, _Process(pid)) for pid in new[:room])
        return [pid for pid in pids if pid in known]

    # ---- processes

    def _look(self, pid: int, process: _Process, now: float) -> None:
        """Look at a process if it has changed."""
        try:
            size = self._size(process)
            if size == process.size and now < process.due:
                return
            text = read_maps(f"{self._proc}/{process.task}")
            if not text:
                raise ProcessLookupError
            view = self._view(pid, process, text, now)
        except (FileNotFoundError, ProcessLookupError):
            self._gone(pid, process, now)
            return
        except PermissionError:
            view = self._unreadable(pid, "its memory may not be read by this user")
        except OSError as error:
            view = self._unreadable(pid, f"its mappings cannot be read: {error.strerror}")
        if view is not None:
            self.views[pid], process.size, process.due = view, size, now + _AGAIN_S

    def _unreadable(self, pid: int, reason: str) -> ProcessView:
        return ProcessView(pid, self._command(pid), "unreadable", reason, ())

    def _gone(self, pid: int, process: _Process, now: float) -> None:
        """Go on with another thread, since this one has ended; or see that there is none."""
        thread = another_thread(f"{self._proc}/{pid}/task", pid)
        if thread is not None and process.task != f"{pid}/task/{thread}":
            process.task = f"{pid}/task/{thread}"
            self._look(pid, process, now)
        elif pid not in self.views:
            self.views[pid] = ProcessView(pid, self._command(pid), "exited", "it has exited", ())

    def _size(self, process: _Process) -> bytes:
        """VmSize in pages."""
        with open(f"{self._proc}/{process.task}/statm", "rb", buffering=0) as file:
            return file.read(256).partition(b" ")[0]

    def _view(self, pid: int, process: _Process, text: bytes, now: float) -> ProcessView | None:
        """What a process is by its mappings; None if there was no time for all of them."""
        found: dict[int, File] = {}
        mapped = _files_in(text)
        namespace = self._namespace(pid, process)
        cuda = b" /dev/nvidia" in text
        for (device, inode, path), mapping in islice(mapped.items(), _MOST_MAPPED):
            file = self._file((namespace, device, inode, path), process, mapping)
            cuda = cuda or _says_cuda(path)
            if file is not None:
                found[id(file)] = file
            if self._clock() - now > 2 * _SCAN_S:
                return None
        files = list(found.values())
        reasons = [f"{file.path}: {file.reason}" for file in files if file.reason]
        if len(mapped) > _MOST_MAPPED:
            reasons.append(f"it maps {len(mapped)} files, of which {_MOST_MAPPED} were looked at")
        if any(file.points for file in files):
            state = "traced"
        elif any(file.reason not in ("", _NO_FUNCTION) for file in files):
            state = "unreadable"
        elif cuda or self._holds_gpu(process):
            state = "no_probe_point"
            reasons = reasons or ["it uses a GPU, but nothing that it maps has a function that can be probed"]
        else:
            state = "no_cuda"
        reason = clean("; ".join(reasons), _LONGEST_TEXT)
        return ProcessView(pid, self._command(pid), state, reason, tuple(file.key for file in files))

    def _command(self, pid: int) -> str:
        """Its command line, or [name] where it has none; "" once it is gone."""
        with contextlib.suppress(OSError):
            with open(f"{self._proc}/{pid}/cmdline", "rb", buffering=0) as file:
                line = file.read(_LONGEST_TEXT).rstrip(b"\0").replace(b"\0", b" ")
            if line:
                return clean(line, _LONGEST_TEXT)
            with open(f"{self._proc}/{pid}/comm", "rb", buffering=0) as file:
                return f"[{clean(file.read(64).rstrip(), 64)}]"
        return ""

    def _namespace(self, pid: int, process: _Process) -> str:
        try:
            return os.readlink(f"{self._proc}/{process.task}/ns/mnt")  # noqa: PTH115 (each scan)
        except OSError:
            return str(pid)

    def _holds_gpu(self, process: _Process) -> bool:
        folder = f"{self._proc}/{process.task}/fd"
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in islice(entries, _MOST_DESCRIPTORS):
                with contextlib.suppress(OSError):
                    if os.readlink(entry.path).startswith("/dev/nvidia"):  # noqa: PTH115
                        return True
        return False

    # ---- files

    def _file(
        self, mapped: tuple[str, bytes, int, bytes], process: _Process, mapping: Mapping
    ) -> File | None:
        """What is to be said of a mapped file, if anything."""
        # One path, device and inode are one file in one mount namespace; device and inode alone are not
        # where subvolumes share them.
        if mapped in self._mapped:
            return self._mapped[mapped]
        path = mapped[3].replace(b"\\012", b"\n")
        task = f"{self._proc}/{process.task}"
        descriptor = open_mapped(task, f"{self._proc}/{process.task.rpartition('/')[2]}", path, mapping)
        if descriptor is None:
            # It may be gone by now, or be a device; or nobody lets this user see it.
            return self._tell(_unseen(path, mapping, "it cannot be opened"))
        try:
            file = self._examine(descriptor, path)
        except OSError as error:
            file = _unseen(path, mapping, f"it cannot be read: {error.strerror}")
        if file is None or file.attach_path != _path_of(descriptor):
            os.close(descriptor)
        _remember(self._mapped, mapped, file)
        return self._tell(file)

    def _tell(self, file: File | None) -> File | None:
        """Have it in `files`, unless there are too many of which there is only a reason."""
        if file is not None and file.key not in self._told and (file.points or len(self._told) < _MOST_TOLD):
            self._told.add(file.key)
            self.files.append(file)
        return file

    def _examine(self, descriptor: int, path: bytes) -> File | None:
        """What is to be said of an open file. It is held from now on if this is where to attach."""
        status = os.fstat(descriptor)
        key = (status.st_dev, status.st_ino)
        if key in self._held:
            return self._held[key].file
        known = (*key, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if known in self._looked_at:
            return self._looked_at[known]
        points, reason = self._search(descriptor)
        file: File | None = None
        if points:
            overlay, mark = on_overlay(descriptor), stamp(status)
            file = self._other_view(descriptor, points, overlay, mark)
            if file is None and len(self._held) < _MOST_FILES:
                attach = _path_of(descriptor)
                file = File(key, clean(path, _LONGEST_TEXT), attach, points, levels(points), reason)
                self._held[key] = _Held(file, descriptor, mark, overlay)
                self._new.append(file)
                return file
            reason = f"more than {_MOST_FILES} files have such functions"
        elif not reason and _says_cuda(path):
            reason = _NO_FUNCTION
        if file is None and reason:
            file = _without_points(key, path, reason)
        _remember(self._looked_at, known, file)
        return file

    def _search(self, descriptor: int) -> tuple[tuple[Point, ...], str]:
        def read(offset: int, size: int) -> bytes:
            data = os.pread(descriptor, size, offset)
            self._read += len(data)
            return data

        try:
            if read(0, len(_ELF)) != _ELF:
                return (), ""  # code made at run time, or of 32 bits, for which there is no CUDA any more
            return find_points(Elf(read), listing=self._read < _MOST_READ)
        except ElfError as error:
            return (), str(error)

    def _other_view(
        self, descriptor: int, points: tuple[Point, ...], overlay: bool, mark: Stamp
    ) -> File | None:
        """The same file where it is held already, seen in another way."""
        for held in self._held.values():
            if (
                held.stamp == mark
                and held.file.points == points
                and (overlay or held.overlay)
                and same_pages(descriptor, held.descriptor) is not False
            ):
                return held.file
        return None


def _unseen(path: bytes, mapping: Mapping, reason: str) -> File:
    return _without_points((-1, hash((path, mapping.inode))), path, reason)


def _without_points(key: tuple[int, int], path: bytes, reason: str) -> File:
    return File(key, clean(path, _LONGEST_TEXT), "", (), (), reason)


def _path_of(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _says_cuda(path: bytes) -> bool:
    return path.rpartition(b"/")[2].startswith(_NAMES)


def _files_in(text: bytes) -> dict[tuple[bytes, int, bytes], Mapping]:
    """The files in /proc/PID/maps that have code: device, inode and path of each, and one of its mappings."""
    files: dict[tuple[bytes, int, bytes], Mapping] = {}
    for line in text.split(b"\n"):
        # Most lines are of other mappings: "x" is no hexadecimal digit, and what follows is longer than this.
        found = parse_line(line) if b"x" in line[:40] else None
        if found is not None:
            mapping, device, path = found
            if not path.startswith(b"/dev/") or path.startswith(b"/dev/shm/"):
                files.setdefault((device, mapping.inode, path), mapping)
    return files


def _remember(known: dict[_Key, File | None], key: _Key, file: File | None) -> None:
    if len(known) >= _MOST_REMEMBERED:
        del known[next(iter(known))]
    known[key] = file
