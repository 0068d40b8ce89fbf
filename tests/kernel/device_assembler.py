"""Cgroup device programs as others write them, put into the kernel for real."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from expanse_ebpf.kernel import libbpf

BLOCK, CHARACTER = 1, 2
MKNOD, READ, WRITE = 1, 2, 4
ALLOW_OVERRIDE, ALLOW_MULTI = 1, 2

_TYPE_CGROUP_DEVICE, _ATTACH_CGROUP_DEVICE = 15, 6


def instruction(code: int, target: int = 0, source: int = 0, offset: int = 0, constant: int = 0) -> bytes:
    """One `struct bpf_insn`."""
    return struct.pack("<BBhi", code, target | source << 4, offset, constant)


# The words of the context into registers 2 to 5: type, access, major, minor.
PROLOGUE = (
    instruction(0x61, 2, 1, 0)
    + instruction(0x54, 2, constant=0xFFFF)
    + instruction(0x61, 3, 1, 0)
    + instruction(0x74, 3, constant=16)
    + instruction(0x61, 4, 1, 4)
    + instruction(0x61, 5, 1, 8)
)
# As runc has it: the type by a load of half a word.
PROLOGUE_OF_HALVES = instruction(0x69, 2, 1, 0) + PROLOGUE[16:]


class Allow(NamedTuple):
    """A rule; None stands for all."""

    kind: int | None = CHARACTER
    major: int | None = None
    minor: int | None = None
    access: int = MKNOD | READ | WRITE
    verdict: int = 1


def _comparisons(rule: Allow, beyond: int) -> bytes:
    """Jump `beyond` further than the last comparison where the rule does not fit."""
    steps: list[tuple[int, int, int, int]] = []  # code, target, source, constant
    if rule.kind is not None:
        steps.append((0x55, 2, 0, rule.kind))
    if rule.access != MKNOD | READ | WRITE:
        steps += [(0xBC, 1, 3, 0), (0x54, 1, 0, rule.access), (0x5D, 1, 3, 0)]
    if rule.major is not None:
        steps.append((0x55, 4, 0, rule.major))
    if rule.minor is not None:
        steps.append((0x55, 5, 0, rule.minor))
    return b"".join(
        instruction(code, target, source, len(steps) - 1 - i + beyond if code & 7 == 5 else 0, constant)
        for i, (code, target, source, constant) in enumerate(steps)
    )


def as_systemd(rules: Iterable[Allow], default: int = 0) -> bytes:
    """Each rule that fits jumps to a common end; none of them may fit everything."""
    blocks = [_comparisons(rule, 1) for rule in rules]
    if not blocks:  # the verifier refuses what cannot be reached
        return PROLOGUE + instruction(0xB7, 0, constant=default) + instruction(0x95)
    body = b""
    for i, block in enumerate(blocks):
        after = sum(len(b) // 8 + 1 for b in blocks[i + 1 :]) + 2  # the denial, and the jump behind it
        body += block + instruction(0x05, offset=after)
    end = instruction(0xB7, 0, constant=default) + instruction(0x05, offset=1)
    return PROLOGUE + body + end + instruction(0xB7, 0, constant=1) + instruction(0x95)


def as_runc(rules: Iterable[Allow], default: int = 0) -> bytes:
    """Each rule that fits ends the program; so have crun and SLURM it, SLURM with 1 as the default."""
    code = PROLOGUE_OF_HALVES
    for rule in rules:
        comparisons = _comparisons(rule, 2)
        code += comparisons + instruction(0xB4, 0, constant=rule.verdict) + instruction(0x95)
        if not comparisons:  # what follows cannot be reached, which the verifier refuses
            return code
    return code + instruction(0xB4, 0, constant=default) + instruction(0x95)


def _library() -> ctypes.CDLL:
    library = libbpf.library()
    library.bpf_prog_load.argtypes = (
        ctypes.c_int,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    library.bpf_prog_attach.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_uint)
    return library


def load(code: bytes) -> int:
    """The descriptor of the program in the kernel; the caller closes it."""
    fd = int(
        _library().bpf_prog_load(_TYPE_CGROUP_DEVICE, b"test_device", b"GPL", code, len(code) // 8, None)
    )
    if fd < 0:
        raise OSError(-fd, os.strerror(-fd))
    return fd


def number(fd: int) -> int:
    """The program's id."""
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("prog_id:")))


def attach(code: bytes, group: Path, flags: int = 0) -> int:
    """Load and attach; the cgroup keeps the program until it is removed. The program's id."""
    fd = load(code)
    directory = os.open(group, os.O_RDONLY | os.O_DIRECTORY)
    try:
        result = _library().bpf_prog_attach(fd, directory, _ATTACH_CGROUP_DEVICE, flags)
        if result < 0:
            raise OSError(-result, os.strerror(-result))
        return number(fd)
    finally:
        os.close(directory)
        os.close(fd)
