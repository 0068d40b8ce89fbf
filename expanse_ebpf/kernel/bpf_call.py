"""bpf(2) itself, for what the installed libbpf may not know."""

from __future__ import annotations

import ctypes
import errno
import platform

_NUMBERS = {"x86_64": 321, "aarch64": 280}

# Numbers of include/uapi/linux/bpf.h.
MAP_CREATE, PROG_LOAD, BTF_LOAD, LINK_CREATE = 0, 5, 18, 28
TRACE_UPROBE_MULTI = 48

_libc: ctypes.CDLL | None = None


def bpf(command: int, attributes: bytes) -> int:
    """The descriptor that a command gives; raises OSError."""
    global _libc
    number = _NUMBERS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, "bpf(2) has no known number on this machine")
    if _libc is None:
        _libc = ctypes.CDLL(None, use_errno=True)
    buffer = ctypes.create_string_buffer(attributes, 128)
    descriptor: int = _libc.syscall(
        ctypes.c_long(number), ctypes.c_int(command), buffer, ctypes.c_uint(len(buffer))
    )
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "bpf(2) refused")
    return descriptor
