"""Tiny maps, programs and links that are tried on the running kernel, to see what it can do.

Each trial gives the error's number, 0 when the kernel took everything, and leaves nothing behind. They
talk to bpf(2) themselves, so that they tell of the kernel and not of the installed libbpf.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import c_uint32, c_uint64

from expanse_ebpf.kernel import bpf_call, libbpf
from expanse_ebpf.kernel.bpf_call import BTF_LOAD, LINK_CREATE, MAP_CREATE, PROG_LOAD, TRACE_UPROBE_MULTI

# Numbers of include/uapi/linux/bpf.h.
_RING_BUFFER = 27
_KPROBE, _RAW_TRACEPOINT, _TRACING = 2, 17, 26
_TRACE_ITER = 28
_SLEEPABLE = 1 << 4
_GET_ATTACH_COOKIE, _BPF_LOOP, _COPY_FROM_USER_TASK = 174, 181, 191


class _RefusedError(Exception):
    """The kernel's answer to something that was tried."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.code = code


class _Load(ctypes.Structure):
    """The attributes of BPF_PROG_LOAD, up to the last that is used here."""

    _fields_ = (
        ("kind", c_uint32),
        ("instructions", c_uint32),
        ("code", c_uint64),
        ("license", c_uint64),
        ("log_level", c_uint32),
        ("log_size", c_uint32),
        ("log", c_uint64),
        ("kernel_version", c_uint32),
        ("flags", c_uint32),
        ("name", ctypes.c_char * 16),
        ("interface", c_uint32),
        ("attach_type", c_uint32),
        ("btf", c_uint32),
        ("function_size", c_uint32),
        ("functions", c_uint64),
        ("function_count", c_uint32),
        ("line_size", c_uint32),
        ("lines", c_uint64),
        ("line_count", c_uint32),
        ("attach_to", c_uint32),  # a type in the kernel's BTF
    )


class _Trial(ExitStack):
    """Closes at its end what the kernel gave, and keeps alive meanwhile what the kernel is to read."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[object] = []

    def bpf(self, command: int, attributes: bytes) -> int:
        """bpf(2), for what gives a descriptor; raises _RefusedError."""
        try:
            descriptor = bpf_call.bpf(command, attributes)
        except OSError as error:
            raise _RefusedError(error.errno or errno.EIO) from None
        self.callback(os.close, descriptor)
        return descriptor

    def address(self, data: bytes) -> int:
        """Where `data` lies until the end of the trial."""
        buffer = ctypes.create_string_buffer(data)
        self._kept.append(buffer)
        return ctypes.addressof(buffer)

    def load(self, kind: int, code: bytes, **attributes: int) -> int:
        """A program of `code`, with the attributes of _Load."""
        wanted = _Load(kind, len(code) // 8, self.address(code), self.address(b"GPL"), **attributes)
        return self.bpf(PROG_LOAD, bytes(wanted))


def _tried(steps: Callable[[_Trial], object]) -> int:
    with _Trial() as trial:
        try:
            steps(trial)
        except _RefusedError as refusal:
            return refusal.code
    return 0


# ---- BPF instructions, as far as they are used


def _instruction(code: int, to: int = 0, of: int = 0, offset: int = 0, number: int = 0) -> bytes:
    return struct.pack("=BBhi", code, of << 4 | to, offset, number)


def _set(register: int, number: int) -> bytes:
    return _instruction(0xB7, register, number=number)


def _call(helper: int) -> bytes:
    return _instruction(0x85, number=helper)


_RETURN_0 = _set(0, 0) + _instruction(0x95)


# ---- trials


def load_trivial_program() -> int:
    """Load a tracing program of two instructions."""
    return _tried(lambda trial: trial.load(_RAW_TRACEPOINT, _RETURN_0))


def make_ring_buffer() -> int:
    """Make a ring buffer map."""
    attributes = struct.pack("=IIII", _RING_BUFFER, 0, 0, resource.getpagesize())
    return _tried(lambda trial: trial.bpf(MAP_CREATE, attributes))


def load_loop() -> int:
    """Load a program that calls `bpf_loop`."""

    def steps(trial: _Trial) -> None:
        function = (
            _set(1, 1)
            # The address of the function eight instructions from the start, in two instructions.
            + _instruction(0x18, 2, of=4, number=6)
            + _instruction(0)
            + _set(3, 0)
            + _set(4, 0)
            + _call(_BPF_LOOP)
            + _RETURN_0
        )
        # The kernel wants to know the types of functions whose address is taken: `static int f()`.
        strings = b"\0int\0f\0"
        types = struct.pack("=IIII", 1, 1 << 24, 4, 1 << 24 | 32)
        types += struct.pack("=III", 0, 13 << 24, 1) + struct.pack("=III", 5, 12 << 24, 2)
        head = struct.pack("=HBBIIIII", 0xEB9F, 1, 0, 24, 0, len(types), len(types), len(strings))
        btf = head + types + strings
        trial.load(
            _RAW_TRACEPOINT,
            function + _RETURN_0,
            btf=trial.bpf(BTF_LOAD, struct.pack("=QQI", trial.address(btf), 0, len(btf))),
            function_size=8,
            function_count=2,
            functions=trial.address(struct.pack("=IIII", 0, 3, len(function) // 8, 3)),
        )

    return _tried(steps)


def load_attach_cookie() -> int:
    """Load a probe's program that asks for the number which that probe was given."""
    return _tried(lambda trial: trial.load(_KPROBE, _call(_GET_ATTACH_COOKIE) + _RETURN_0))


def link_uprobe_multi() -> int:
    """Put a uprobe_multi link on a file that nobody runs."""

    def steps(trial: _Trial) -> None:
        program = trial.load(_KPROBE, _RETURN_0, attach_type=TRACE_UPROBE_MULTI)
        try:
            file = os.memfd_create("expanse-trial")
        except OSError as error:
            raise _RefusedError(error.errno or errno.EIO) from None
        trial.callback(os.close, file)
        os.truncate(file, resource.getpagesize())
        path, offsets = trial.address(os.fsencode(f"/proc/self/fd/{file}")), trial.address(bytes(8))
        head = struct.pack("=IIII", program, 0, TRACE_UPROBE_MULTI, 0)
        trial.bpf(LINK_CREATE, head + struct.pack("=QQQQI", path, offsets, 0, 0, 1))

    return _tried(steps)


def link_sleepable_task_iterator() -> int:
    """Make an iterator over tasks that may wait for a page of their memory.

    libbpf looks up its number in the kernel's BTF; raises UnavailableError where that is not installed.
    """

    def steps(trial: _Trial) -> None:
        number = int(libbpf.library().libbpf_find_vmlinux_btf_id(b"task", _TRACE_ITER))
        if number < 0:
            raise _RefusedError(-number)
        code = (
            _instruction(0x79, 4, of=1, offset=8)  # the task, which is null at the end
            + _instruction(0x15, 4, offset=6)  # then do nothing
            + _instruction(0xBF, 1, of=10)  # else copy into the stack
            + _instruction(0x07, 1, number=-8)
            + _set(2, 8)
            + _set(3, 0)
            + _set(5, 0)
            + _call(_COPY_FROM_USER_TASK)
            + _RETURN_0
        )
        program = trial.load(_TRACING, code, flags=_SLEEPABLE, attach_type=_TRACE_ITER, attach_to=number)
        trial.bpf(LINK_CREATE, struct.pack("=IIII", program, 0, _TRACE_ITER, 0))

    return _tried(steps)
