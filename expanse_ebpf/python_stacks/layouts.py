"""Where each CPython keeps what a walk needs.

From 3.13 on the interpreter says it itself, in `_Py_DebugOffsets` at the beginning of `_PyRuntime`
(Include/internal/pycore_debug_offsets.h; its own layout is told by its version field). Before that
the figures are compiled from the headers of each version and stand in a table. What the debug offsets
leave out comes from the headers as well. x86-64 and arm64 differ in nothing but the size of a mutex.
"""

from __future__ import annotations

import struct

from expanse_ebpf.kernel.python_layout import NOWHERE as NOWHERE
from expanse_ebpf.kernel.python_layout import Layout as Layout

OLDEST, NEWEST = 8, 15  # minor versions of Python 3
COOKIE = b"xdebugpy"  # what _Py_DebugOffsets begins with
DEBUG_OFFSETS_SIZE = 888  # the largest there is, 3.15's


class UnknownLayoutError(Exception):
    """This version or build has no layout here, or its debug offsets make no sense."""


_NO = NOWHERE
# Compiled from the headers of 3.8.18, 3.9.18, 3.10.13, 3.11.7 and 3.12.1 for x86-64: default builds.
_TABLE = {
    # 3.8, 3.9, 3.10, 3.11, 3.12
    "runtime_interpreters": (32, 32, 32, 40, 40),
    "runtime_current": (1368, 568, 568, 576, _NO),
    "runtime_gil": (1152, 352, 352, 360, _NO),
    "interpreter_next": (0, 0, 0, 0, 0),
    "interpreter_threads": (8, 8, 8, 16, 72),
    "interpreter_gil": (_NO, _NO, _NO, _NO, 384),
    "gil_locked": (16, 16, 16, 16, 16),
    "gil_holder": (8, 8, 8, 8, 8),
    "gil_size": (208, 208, 208, 208, 208),
    "thread_next": (8, 8, 8, 8, 8),
    "thread_interpreter": (16, 16, 16, 16, 16),
    "thread_id": (176, 176, 176, 152, 136),
    "thread_native_id": (_NO, _NO, _NO, 160, 144),
    "thread_status": (_NO, _NO, _NO, _NO, 24),
    "thread_active": (0, 0, 0, 0, 1 << 4),
    "thread_frame": (24, 24, 24, 56, 56),
    "thread_frame_via": (_NO, _NO, _NO, 8, 0),
    "frame_previous": (24, 24, 24, 48, 8),
    "frame_code": (32, 32, 32, 32, 0),
    "frame_instruction": (104, 104, 96, 56, 56),
    "frame_owner": (_NO, _NO, _NO, _NO, 70),
    "frame_shim": (_NO, _NO, _NO, _NO, 3),
    "frame_bytecode": (_NO, _NO, _NO, _NO, _NO),
    "code_first_line": (40, 40, 40, 72, 68),
    "code_file": (104, 104, 104, 112, 112),
    "code_name": (112, 112, 112, 128, 128),
    "code_lines": (120, 120, 120, 136, 136),
    "code_instructions": (_NO, _NO, _NO, 184, 192),
    "code_bytecodes": (_NO, _NO, _NO, _NO, _NO),
    "text_length": (16, 16, 16, 16, 16),
    "text_state": (32, 32, 32, 32, 32),
    "text_kind_shift": (2, 2, 2, 2, 2),
    "text_ascii": (1 << 6, 1 << 6, 1 << 6, 1 << 6, 1 << 6),
    "text_compact": (48, 48, 48, 48, 40),
    "text_wide": (72, 72, 72, 72, 56),
    "bytes_length": (16, 16, 16, 16, 16),
    "bytes_data": (32, 32, 32, 32, 32),
    "instruction_unit": (1, 1, 2, 1, 1),
}
# The state of the GIL holds two mutexes and two condition variables; in _PyRuntime, tstate_current comes
# after it. glibc's pthread_mutex_t has 48 bytes on arm64; on x86-64, and with musl, 40.
_ARM64_MUTEXES = 2 * 8


def for_version(minor: int, machine: str, *, musl: bool = False) -> Layout:
    """The layout of Python 3.8 to 3.12 on `machine`, x86_64 or aarch64; UnknownLayoutError for others."""
    if not OLDEST <= minor <= 12:
        raise UnknownLayoutError(f"no layout for Python 3.{minor}")
    layout = Layout(minor=minor, **{name: row[minor - OLDEST] for name, row in _TABLE.items()})
    if machine == "aarch64" and not musl:
        layout.gil_size += _ARM64_MUTEXES
        if layout.runtime_current != NOWHERE:
            layout.runtime_current += _ARM64_MUTEXES
    return layout


# Where _Py_DebugOffsets of 3.13, 3.14 and 3.15 has what is wanted, in bytes; compiled from the headers of
# 3.13.18, 3.14.10 and 3.15.2. Each entry is 8 bytes that hold an offset or a size.
_DEBUG_OFFSETS = {
    "runtime_interpreters": (40, 40, 40),  # runtime_state.interpreters_head
    "interpreter_next": (64, 64, 64),
    "interpreter_threads": (72, 72, 72),  # interpreter_state.threads_head
    "interpreter_gil": (112, 120, 120),  # interpreter_state.ceval_gil
    "gil_locked": (136, 144, 144),  # these two are offsets in the interpreter state:
    "gil_holder": (144, 152, 152),  # interpreter_state.gil_runtime_state is to be taken off
    "thread_next": (168, 192, 192),
    "thread_interpreter": (176, 200, 200),
    "thread_id": (192, 216, 240),
    "thread_native_id": (200, 224, 248),
    "thread_status": (216, 240, 264),
    "thread_frame": (184, 208, 208),  # thread_state.current_frame
    "frame_previous": (232, 256, 320),
    "frame_code": (240, 264, 328),  # interpreter_frame.executable
    "frame_instruction": (248, 272, 336),  # interpreter_frame.instr_ptr
    "frame_owner": (264, 288, 352),
    "code_first_line": (312, 352, 416),
    "code_file": (280, 320, 384),
    "code_name": (296, 336, 400),  # code_object.qualname
    "code_lines": (304, 344, 408),
    "code_instructions": (344, 384, 448),  # code_object.co_code_adaptive
    "text_length": (552, 632, 728),
    "text_state": (544, 624, 720),
    "text_compact": (560, 640, 736),  # unicode_object.asciiobject_size
    "bytes_length": (520, 600, 696),
    "bytes_data": (528, 608, 704),
}
_GIL_STATE = (120, 128, 128)  # interpreter_state.gil_runtime_state
_TLBC_INDEX = (0, 304, 368)  # interpreter_frame.tlbc_index, free-threaded builds from 3.14 on
_CO_TLBC = (0, 392, 456)  # code_object.co_tlbc, likewise
_VERSION_AND_BUILD = struct.Struct("<8sQQ")


def from_debug_offsets(block: bytes, machine: str) -> Layout:
    """The layout that the beginning of `_PyRuntime` of 3.13, 3.14 or 3.15 tells, for x86_64 or aarch64.

    `block` may come out of any process. UnknownLayoutError when it has no such version or is damaged.
    """
    if len(block) < _VERSION_AND_BUILD.size or not block.startswith(COOKIE):
        raise UnknownLayoutError("no debug offsets")
    _cookie, version, free_threaded = _VERSION_AND_BUILD.unpack_from(block)
    major, minor, level = version >> 24, version >> 16 & 0xFF, version >> 4 & 0xF
    # Until its release candidates a version still changes (level: 10 alpha, 11 beta, 12 candidate, 15 final).
    if major != 3 or not 13 <= minor <= NEWEST or level < 12 or free_threaded not in (0, 1):
        raise UnknownLayoutError(f"debug offsets of an unknown version ({version:#x})")

    def entry(place: tuple[int, int, int]) -> int:
        (value,) = struct.unpack_from("<Q", block, place[minor - 13])
        # The largest true one is some thousands: the list of threads in an interpreter state.
        if value >= 1 << 16:
            raise UnknownLayoutError("debug offsets beyond reason")
        return int(value)

    try:
        layout = Layout(minor=minor, free_threaded=free_threaded, instruction_unit=1)
        for name, place in _DEBUG_OFFSETS.items():
            setattr(layout, name, entry(place))
        gil = entry(_GIL_STATE)
        bytecodes = bool(free_threaded and minor >= 14)
        layout.frame_bytecode = entry(_TLBC_INDEX) if bytecodes else NOWHERE
        layout.code_bytecodes = entry(_CO_TLBC) if bytecodes else NOWHERE
    except struct.error:
        raise UnknownLayoutError("debug offsets cut short") from None
    if not gil <= min(layout.gil_locked, layout.gil_holder):
        raise UnknownLayoutError("debug offsets that contradict each other")
    layout.gil_locked -= gil
    layout.gil_holder -= gil
    # The rest stands in the headers only.
    layout.runtime_current = layout.runtime_gil = NOWHERE
    # struct _gil_runtime_state (pycore_gil.h, later pycore_interp_structs.h); free-threaded: `enabled` first.
    layout.gil_size = 208 + (8 if free_threaded else 0) + (_ARM64_MUTEXES if machine == "aarch64" else 0)
    if free_threaded:
        # It is there but not used, unless a module or PYTHON_GIL=1 asks for it.
        layout.interpreter_gil = NOWHERE
    layout.thread_active = 1 << 4  # cpython/pystate.h: initialized, bound, unbound, bound_gilstate, active
    layout.thread_frame_via = NOWHERE
    # enum _frameowner: 3.13 FRAME_OWNED_BY_CSTACK; later FRAME_OWNED_BY_INTERPRETER (3.14 has CSTACK as 4).
    layout.frame_shim = 3
    # cpython/unicodeobject.h: `interned` has 2 bits; free-threaded from 3.14 on a byte of its own.
    layout.text_kind_shift = 8 if bytecodes else 2
    layout.text_ascii = 1 << layout.text_kind_shift + 4  # after 3 bits of kind and `compact`
    layout.text_wide = layout.text_compact + 16  # struct PyCompactUnicodeObject: utf8_length, utf8
    return layout


def lines_format(minor: int) -> str:
    """Which form of line table Python 3.`minor` has: lnotab | pairs | locations (see lines.py)."""
    return "lnotab" if minor < 10 else "pairs" if minor == 10 else "locations"
