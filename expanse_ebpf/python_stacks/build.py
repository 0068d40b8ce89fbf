"""What a file holds: an interpreter of which version, with which layout.

An interpreter is told by its content, the symbol `_PyRuntime` or the section `.PyRuntime`, and not by what
the file is called. The file may be anything: see elf.py.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from expanse_ebpf.python_stacks.elf import Elf, ElfError, Segment
from expanse_ebpf.python_stacks.layouts import (
    COOKIE,
    DEBUG_OFFSETS_SIZE,
    NEWEST,
    OLDEST,
    Layout,
    UnknownLayoutError,
    for_version,
    from_debug_offsets,
)

_PART_OF_NUMBER = {b".", *(b"%d" % digit for digit in range(10))}
_SUPPORTED = f"3.{OLDEST} to 3.{NEWEST} are supported"


class Build(NamedTuple):
    """What a file holds."""

    problem: str = ""  # why this interpreter cannot be read
    runtime: int = 0  # address of _PyRuntime before relocation; 0: no interpreter
    version: str = ""
    layout: Layout | None = None
    segments: tuple[Segment, ...] = ()
    wants_python: bool = False  # it is linked to a shared libpython


def examine(file: int, path: bytes) -> Build:
    """What an open file holds; never raises on account of its content."""
    try:
        elf = Elf(lambda offset, size: os.pread(file, size, offset))
        return _examine(elf)
    except ElfError as error:
        # Much is mapped that has no interpreter, but a damaged or 32-bit one is worth a word.
        if b"python" in path.rpartition(b"/")[2] and os.pread(file, 4, 0) == b"\x7fELF":
            return Build(problem=f"{shown(path)}: {error}")
        return Build()
    except OSError as error:
        return Build(problem=f"{shown(path)}: {error.strerror}")


def _examine(elf: Elf) -> Build:
    needed = elf.needed()
    wants_python = any("python" in name for name in needed)
    runtime = elf.symbol("_PyRuntime")
    if runtime is None and (section := elf.section(".PyRuntime")):  # 3.10 and later, stripped
        runtime = section.address
    if not runtime:
        if elf.symbol("Py_GetVersion"):
            return Build(problem=f"a Python older than 3.7: {_SUPPORTED}")
        return Build(wants_python=wants_python)
    if elf.machine not in ("x86_64", "aarch64"):
        return Build(problem=f"Python for {elf.machine}: x86_64 and aarch64 are supported")
    try:
        block = elf.content(runtime, DEBUG_OFFSETS_SIZE)
        if block.startswith(COOKIE):
            layout = from_debug_offsets(block, elf.machine)
            version = version_text(int.from_bytes(block[8:12], "little"))
        else:
            version = _version(elf)
            # Each of them is linked to its C library, and a static one is musl's as a rule.
            musl = "libc.so.6" not in needed
            layout = for_version(int(version.split(".")[1]), elf.machine, musl=musl)
    except UnknownLayoutError as error:
        return Build(problem=f"{error}: {_SUPPORTED}")
    return Build("", runtime, version, layout, tuple(elf.segments))


def version_text(number: int) -> str:
    """PY_VERSION_HEX as people write it: "3.11.7", "3.14.0rc2" (Include/patchlevel.h)."""
    level = {10: "a", 11: "b", 12: "rc"}.get(number >> 4 & 0xF)
    text = f"{number >> 24}.{number >> 16 & 0xFF}.{number >> 8 & 0xFF}"
    return f"{text}{level}{number & 0xF}" if level else text


def _version(elf: Elf) -> str:
    """The version of an interpreter without debug offsets; UnknownLayoutError if it cannot be told."""
    constant = elf.symbol("Py_Version")  # 3.11 and later
    if constant and (data := elf.content(constant, 4)):
        return version_text(int.from_bytes(data, "little"))
    # In the names that extension modules and bytecode files may have, and in sys.version.
    text = elf.section_content(".rodata")
    tag = re.search(rb"cpython-3([0-9]{1,2})\b", text)
    if tag is None:
        raise UnknownLayoutError("a Python whose version cannot be told")
    version = f"3.{int(tag[1])}"
    # PY_VERSION ends a string, which may be the end of a longer one, such as a path's.
    pattern = re.escape(version.encode()) + rb"\.[0-9]{1,2}(?=\+?\0)"
    full = {
        found[0].decode()
        for found in re.finditer(pattern, text)
        if text[found.start() - 1 : found.start()] not in _PART_OF_NUMBER
    }
    return full.pop() if len(full) == 1 else version


def shown(path: bytes) -> str:
    """A file's name in one line of text, whatever it is made of."""
    return path.decode("utf-8", "replace").replace("\n", "\\n")
