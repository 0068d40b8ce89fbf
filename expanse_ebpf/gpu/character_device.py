"""Which character device a path leads to, without a wait for a file system of the user's."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import stat
import struct

# struct statx (include/uapi/linux/stat.h): stx_mode at 28, stx_rdev_major at 128
_STATX_BYTES, _MODE_AT, _RDEV_AT = 256, 28, 128
_AT_FDCWD, _AT_STATX_DONT_SYNC = -100, 0x4000
_STATX_TYPE = 0x1


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def character_device(path: str) -> tuple[int, int] | None:
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
