"""Whether two open files are the same one to a uprobe.

A uprobe belongs to the inode whose pages are mapped, which device and number tell as a rule. But what is seen
through an overlay has the overlay's device: one file of an image looks like two through two containers'
overlays. And there the files of two mounts of one image, as of a squashfs for each task, look like one.
Memory tells: what is one file to the kernel lies in the same physical pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os

_OVERLAYFS = 0x794C7630  # OVERLAYFS_SUPER_MAGIC, include/uapi/linux/magic.h
_PRESENT, _FRAME = 1 << 63, (1 << 55) - 1  # of /proc/PID/pagemap: Documentation/admin-guide/mm/pagemap.rst
_INODE = (1 << 56) - 1  # with xino an overlay puts the layer's file system into the highest bits
_TRIES = 3  # a page may be moved between two looks

Stamp = tuple[int, int, int, int]


def stamp(status: os.stat_result) -> Stamp:
    """What is the same in all views of a file: an overlay passes on the real inode's number and times."""
    return status.st_ino & _INODE, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def on_overlay(file: int) -> bool:
    """Whether an open file is seen through an overlay."""
    buffer = ctypes.create_string_buffer(256)  # struct statfs: 120 bytes, `f_type` is the first 8
    if ctypes.CDLL(None, use_errno=True).fstatfs(file, buffer) != 0:
        return False
    return int.from_bytes(buffer.raw[:8], "little") == _OVERLAYFS


def same_pages(one: int, other: int) -> bool | None:
    """Whether two open files share their first page; None where that cannot be told.

    CAP_SYS_ADMIN is needed for the number of a page frame.
    """
    try:
        with _First(one) as ours, _First(other) as theirs:
            for _ in range(_TRIES):
                frame = ours.frame()
                if not frame:
                    return None
                if theirs.frame() == frame:
                    return True
    except (OSError, ValueError):  # ValueError: of an empty file
        return None
    return False


class _First:
    """The first page of a file, mapped."""

    def __init__(self, file: int) -> None:
        # To be written to for ctypes alone, which tells the address of nothing else.
        self._map = mmap.mmap(file, 1, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        view = ctypes.c_char.from_buffer(self._map)
        self._address = ctypes.addressof(view)
        del view  # the map cannot be closed while it is there

    def __enter__(self) -> _First:
        return self

    def __exit__(self, *_: object) -> None:
        self._map.close()

    def frame(self) -> int:
        """The number of its page frame, 0 if it is not told; OSError if the file was cut meanwhile."""
        # The kernel fetches the page: to touch it here would be a SIGBUS if the file has no page any more.
        _read("/proc/self/mem", self._address, 1)
        entry = int.from_bytes(_read("/proc/self/pagemap", self._address // mmap.PAGESIZE * 8, 8), "little")
        return entry & _FRAME if entry & _PRESENT else 0


def _read(path: str, offset: int, size: int) -> bytes:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(file, size, offset)
    finally:
        os.close(file)
