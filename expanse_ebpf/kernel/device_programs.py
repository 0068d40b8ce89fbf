"""The BPF programs that decide which devices a cgroup may open: which they are, and their instructions.

They are other programs' (systemd's, a container runtime's, SLURM's); they are read and never changed.
"""

from __future__ import annotations

import ctypes
import errno
import os

from expanse_ebpf.kernel import libbpf
from expanse_ebpf.kernel.libbpf import BpfError

_CGROUP_DEVICE = 6  # BPF_CGROUP_DEVICE, an attach type
_EFFECTIVE = 1  # BPF_F_QUERY_EFFECTIVE
# The kernel attaches at most 64 to one cgroup (BPF_CGROUP_MAX_PROGS), and those of ancestors count as well.
_MAX_PROGRAMS = 256
_INSTRUCTION = 8  # bytes
_MAX_INSTRUCTIONS = 32768


def attached(directory: str) -> tuple[int, ...]:
    """Ids of the programs that decide for a v2 cgroup; a device may be opened when all of them allow it.

    Those of its ancestors are among them unless the cgroup's own override them. Raises OSError when the
    directory cannot be opened, BpfError when the kernel refuses (EPERM: without CAP_NET_ADMIN) or has no
    such programs (EINVAL, ENOSYS).
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        ids = (ctypes.c_uint32 * _MAX_PROGRAMS)()
        count = ctypes.c_uint32(_MAX_PROGRAMS)
        result = libbpf.library().bpf_prog_query(fd, _CGROUP_DEVICE, _EFFECTIVE, None, ids, count)
    finally:
        os.close(fd)
    if result < 0:
        raise BpfError("reading a cgroup's device programs", -result)
    return tuple(ids[: count.value])


def instructions(program: int) -> bytes:
    """The instructions of the program with this id as the kernel runs them, 8 bytes each.

    Raises BpfError: ENOENT when it is gone, EPERM when the kernel does not show them (without
    CAP_SYS_ADMIN, or while net.core.bpf_jit_harden keeps them hidden), E2BIG when there are too many.
    """
    library = libbpf.library()
    what = f"reading device program {program}"
    fd = library.bpf_prog_get_fd_by_id(program)
    if fd < 0:
        raise BpfError(what, -fd)
    try:
        length = _info(fd, what, libbpf.ProgramInfo()).xlated_prog_len
        if length > _MAX_INSTRUCTIONS * _INSTRUCTION:
            raise BpfError(what, errno.E2BIG)
        code = ctypes.create_string_buffer(length)
        wanted = libbpf.ProgramInfo(xlated_prog_len=length, xlated_prog_insns=ctypes.addressof(code))
        got = _info(fd, what, wanted)
    finally:
        os.close(fd)
    # The kernel answers without an error and takes the pointer or the length back.
    if not length or not got.xlated_prog_insns:
        raise BpfError(what, errno.EPERM)
    return code.raw[: got.xlated_prog_len]


def _info(fd: int, what: str, info: libbpf.ProgramInfo) -> libbpf.ProgramInfo:
    size = ctypes.c_uint32(ctypes.sizeof(info))
    result = libbpf.library().bpf_obj_get_info_by_fd(fd, ctypes.byref(info), size)
    if result < 0:
        raise BpfError(what, -result)
    return info
