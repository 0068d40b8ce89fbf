"""A function to put a probe on, to see what a hit costs on this machine.

It is some bytes of machine code in a file that has no name and that this process alone maps, so nobody
else pays. The loop that calls it is machine code too: Python's own time per call is longer than a hit.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

from expanse_ebpf.errors import UnavailableError

_SIZE = 4096  # of the file
_FUNCTION, _LOOP = 0x40, 0x60  # offsets in it; the call in the loop depends on their distance
_ROUNDS = 5
_MFD_CLOEXEC, _MFD_EXEC = 1, 0x10  # linux/memfd.h; the second since Linux 6.3
_FOLDERS = ("/dev/shm", "/run", "/var/tmp", "/tmp")  # where a file can be, if no memfd may be executable
_MAP_FAILED = ctypes.c_void_p(-1).value


class _Code(NamedTuple):
    """Machine code of one architecture."""

    # Begins by saving a register, as functions with a frame do. Linux emulates that on x86-64.
    push: bytes
    # Begins by making room on the stack, as functions without one do. Linux executes that out of line, in a
    # single step.
    room: bytes
    # loop(n): calls the function, which lies _LOOP - _FUNCTION before, n times.
    loop: bytes


# As an assembler makes it of the sources in tests/tracing/test_probe_target.py.
CODE = {
    "x86_64": _Code(
        push=bytes.fromhex("55 4889e5 5d c3"),
        room=bytes.fromhex("4883ec08 4883c408 c3"),
        loop=bytes.fromhex("53 4889fb 4885db 740a e8d2ffffff 48ffcb 75f6 5b c3"),
    ),
    "aarch64": _Code(
        push=bytes.fromhex("fd7bbfa9 fd030091 fd7bc1a8 c0035fd6"),
        room=bytes.fromhex("ff4300d1 ff430091 c0035fd6"),
        loop=bytes.fromhex(
            "fd7bbea9 fd030091 f30b00f9 f30300aa 930000b4 f3ffff97 730600f1 c1ffff54"
            "f30b40f9 fd7bc2a8 c0035fd6"
        ),
    ),
}


class ProbeTarget:
    """The function: a probe goes to `offset` of the file at `path`, a path of this process.

    With `single_step` its first instruction is one that the kernel cannot emulate, which costs twice as
    much. Raises UnavailableError on a machine that there is no code for, or that maps no new code.
    """

    offset = _FUNCTION

    def __init__(self, *, single_step: bool = False) -> None:
        machine = platform.machine()
        if machine not in CODE:
            raise UnavailableError(f"no machine code for {machine} to measure the cost of a probe with")
        code = CODE[machine]
        content = bytearray(_SIZE)
        function = code.room if single_step else code.push
        content[_FUNCTION : _FUNCTION + len(function)] = function
        content[_LOOP : _LOOP + len(code.loop)] = code.loop
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._fd, self._address = self._place(bytes(content))
        self.path = f"/proc/self/fd/{self._fd}"
        self._function = ctypes.CFUNCTYPE(None)(self._address + _FUNCTION)
        self._loop = ctypes.CFUNCTYPE(None, ctypes.c_ulong)(self._address + _LOOP)

    def _place(self, content: bytes) -> tuple[int, int]:
        """A file of this content and where it is mapped."""
        refused: list[str] = []
        for name, make in _makers():
            try:
                fd = make()
                try:
                    os.write(fd, content)
                    return fd, self._map(fd)
                except BaseException:
                    os.close(fd)
                    raise
            except OSError as error:
                refused.append(f"{name}: {error.strerror}")
        raise UnavailableError(f"this process may map no new code ({'; '.join(refused)})")

    def _map(self, fd: int) -> int:
        # Private and never writable: the kernel puts uprobes into such mappings alone (valid_vma() in
        # kernel/events/uprobes.c), and a policy against writable code lets these be.
        address = self._libc.mmap(None, _SIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return int(address)

    def call(self) -> None:
        """Call it once."""
        self._check_open()
        self._function()

    def call_loop(self, count: int) -> None:
        """Call it `count` times; other threads of Python run meanwhile."""
        self._check_open()
        self._loop(max(count, 0))

    def measure(self, count: int) -> float:
        """What one of `count` calls takes, in ns of this thread's CPU time: the median of some rounds."""
        self._check_open()
        each = max(count // _ROUNDS, 1)
        took = []
        for _ in range(_ROUNDS):
            begin = time.thread_time_ns()
            self._loop(each)
            took.append((time.thread_time_ns() - begin) / each)
        return statistics.median(took)

    def _check_open(self) -> None:
        if self._fd < 0:
            raise ValueError("the function is no longer there")

    def close(self) -> None:
        """Give the memory back; a probe that is still there loses its place. More than once is no error."""
        if self._fd >= 0:
            self._libc.munmap(self._address, _SIZE)
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ProbeTarget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _makers() -> Iterator[tuple[str, Callable[[], int]]]:
    """Ways to a file that may be executable, the likeliest first."""
    # Older kernels know no such flag; newer ones may be told to let memfds be executable only with it.
    for flag in (_MFD_EXEC, 0):
        yield "memfd", partial(os.memfd_create, "expanse-probe-target", _MFD_CLOEXEC | flag)
    for folder in _FOLDERS:
        yield folder, partial(_without_name, folder)


def _without_name(folder: str) -> int:
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.dup(file.fileno())
