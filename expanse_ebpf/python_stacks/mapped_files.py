"""The files whose code a process has mapped: from /proc/PID/maps, and how each is opened.

The process may be in another mount namespace, and its files may be renamed, replaced or deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from typing import NamedTuple

_MAPS_SIZE = 32 << 20  # bytes of /proc/PID/maps
_DELETED = b" (deleted)"


class Mapping(NamedTuple):
    """A line of /proc/PID/maps, of executable memory."""

    start: int
    end: int
    offset: int
    inode: int


_LINE = re.compile(
    rb"([0-9a-f]{1,16})-([0-9a-f]{1,16}) ..x. ([0-9a-f]{1,16}) ([0-9a-f]+:[0-9a-f]+) ([0-9]{1,20}) +(/.*)"
)


def parse_line(line: bytes) -> tuple[Mapping, bytes, bytes] | None:
    """A mapping of a file's code, its device and path as they are written; None if it is something else."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    start, end, offset, device, inode, path = match.groups()
    return Mapping(int(start, 16), int(end, 16), int(offset, 16), int(inode)), device, path


def read_maps(task: str) -> bytes:
    """/proc/PID/maps or that of a thread, at most some MiB of it; b"" once there is no memory any more."""
    data = bytearray()
    with open(f"{task}/maps", "rb", buffering=0) as file:
        # It gives a page or so at a time.
        while len(data) < _MAPS_SIZE and (part := file.read(1 << 20)):
            data += part
    return bytes(data)


def open_program(task: str) -> int:
    """The executable, deleted or not."""
    return os.open(f"{task}/exe", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def open_mapped(task: str, process: str, path: bytes, mapping: Mapping) -> int | None:
    """A mapped file, deleted or not; None if there is no way to it."""
    link = os.fsencode(f"{process}/map_files/{mapping.start:x}-{mapping.end:x}")
    # Without CAP_SYS_ADMIN, or if the mapping has just changed, only the name is left.
    for name in (link, *_names(task, path)):
        with contextlib.suppress(OSError):
            # A device may not like to be opened. And by now another file may have the name, even one whose
            # opening waits for somebody.
            found = os.open(name, os.O_PATH | os.O_CLOEXEC)
            try:
                status = os.fstat(found)
                if stat.S_ISREG(status.st_mode) and (name is link or status.st_ino == mapping.inode):
                    return os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            finally:
                os.close(found)
    return None


def _names(task: str, path: bytes) -> tuple[bytes, bytes]:
    """Where a file that /proc calls `path` may be: in the process's mount namespace, or in ours if it can."""
    return os.fsencode(f"{task}/root") + path, path


def living_name(task: str, path: bytes) -> bytes:
    """The file's name, without the mark that the kernel gives to those that are deleted."""
    if path.endswith(_DELETED) and not any(map(os.path.lexists, _names(task, path))):
        return path.removesuffix(_DELETED)
    return path


def another_thread(folder: str, but: int) -> int | None:
    """A thread that has memory, other than `but`, from a process's folder of threads."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        return next((int(entry.name) for entry in entries if int(entry.name) != but), None)
    return None
