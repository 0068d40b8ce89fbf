"""What is behind the open descriptors of other processes: bytes sent by TCP, probes in place.

pidfd_getfd(2), since Linux 5.6, gives a copy of another process's descriptor, and the kernel tells about it.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Iterable, Iterator

from expanse_ebpf.kernel import bpf_call

_PIDFD_GETFD = 438  # the same number on every architecture
_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info, since Linux 4.19
_OBJ_GET_INFO_BY_FD = 15
# struct bpf_link_info: type, id, program; what follows depends on the type and begins at 16.
_LINK_INFO = 80
_PERF_EVENT, _UPROBE_MULTI = 7, 12
_OF_PERF_EVENT, _UPROBES = 16, (1, 2)  # where its kind stands since 6.6, and uprobes and uretprobes
_COUNT_OF_MULTI = 52  # where the number of places stands, since 6.8


def sent_bytes(pids: Iterable[int]) -> dict[int, int]:
    """Bytes sent so far by each TCP connection that the processes have open, by its inode."""
    sent = {}
    for pid in pids:
        for descriptor in _copies(pid, "socket:"):
            with socket.socket(fileno=os.dup(descriptor)) as connection:
                if connection.proto != socket.IPPROTO_TCP or connection.family == socket.AF_UNIX:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                if len(info) >= _BYTES_SENT + 8:
                    sent[os.fstat(descriptor).st_ino] = struct.unpack_from("=Q", info, _BYTES_SENT)[0]
    return sent


def sent_between(before: dict[int, int], after: dict[int, int]) -> int | None:
    """Bytes sent between two looks; None where a connection was closed meanwhile."""
    if before.keys() - after.keys():
        return None
    return sum(sent - before.get(inode, 0) for inode, sent in after.items())


def probes(pids: Iterable[int]) -> int | None:
    """Places at which uprobes of these processes are attached; None where the kernel (before 6.6) does not
    tell them from other perf events."""
    total = 0
    for pid in pids:
        for descriptor in _copies(pid, "anon_inode:bpf_link"):
            info = ctypes.create_string_buffer(_LINK_INFO)
            request = struct.pack("=IIQ", descriptor, len(info), ctypes.addressof(info))
            try:
                bpf_call.bpf(_OBJ_GET_INFO_BY_FD, request)
            except OSError:
                return None
            kind = struct.unpack_from("=I", info.raw)[0]
            if kind == _UPROBE_MULTI:
                total += max(1, struct.unpack_from("=I", info.raw, _COUNT_OF_MULTI)[0])
            elif kind == _PERF_EVENT:
                what = struct.unpack_from("=I", info.raw, _OF_PERF_EVENT)[0]
                if what == 0:
                    return None
                total += what in _UPROBES
    return total


def _copies(pid: int, kind: str) -> Iterator[int]:
    """Copies of a process's descriptors whose links in /proc begin with `kind`, each open for a moment."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 (names are what is wanted)
        pidfd = os.pidfd_open(pid)
    except OSError:  # it has gone
        return
    try:
        for name in names:
            try:
                fits = os.readlink(f"/proc/{pid}/fd/{name}").startswith(kind)  # noqa: PTH115
            except OSError:
                continue
            copy = libc.syscall(ctypes.c_long(_PIDFD_GETFD), pidfd, int(name), 0) if fits else -1
            if copy >= 0:
                try:
                    yield copy
                finally:
                    os.close(copy)
    finally:
        os.close(pidfd)
