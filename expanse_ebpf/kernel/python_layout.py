"""What the programs that read Python stacks must be told of an interpreter: where it keeps what."""

from __future__ import annotations

import ctypes

NOWHERE = 0xFFFFFFFF  # this build has no such field


class Layout(ctypes.Structure):
    """struct python_layout of bpf/include/python_layout.h: offsets in bytes unless said otherwise."""

    _fields_ = [
        (name, ctypes.c_uint32)
        for name in (
            "runtime_interpreters",  # pointer to the first interpreter state (interpreters.head)
            "runtime_current",  # before 3.12: pointer to the thread state that runs (gilstate.tstate_current)
            "runtime_gil",  # before 3.12: the GIL's state itself (ceval.gil); else NOWHERE
            "interpreter_next",
            "interpreter_threads",  # pointer to the newest thread state
            "interpreter_gil",  # from 3.12 on: pointer to the GIL's state (ceval.gil); else NOWHERE
            "gil_locked",  # int: 1 while it is held
            "gil_holder",  # pointer to the thread state that held it last
            "gil_size",  # size of the state: a thread that waits for the GIL waits on a futex in it
            "thread_next",
            "thread_interpreter",
            "thread_id",  # pthread_self()
            "thread_native_id",  # kernel's thread id in the process's own pid namespace; before 3.11 NOWHERE
            "thread_status",  # from 3.12 on: bit field _status, of 4 bytes; else NOWHERE
            "thread_active",  # bit mask of `active` in it: set while the thread is attached
            "thread_frame",  # pointer to the frame, or (3.11, 3.12) to a cframe
            "thread_frame_via",  # in a cframe: pointer to the frame; NOWHERE: thread_frame is the frame's
            "frame_previous",
            "frame_code",  # pointer to the code object (3.14 on: tagged in its lowest bits)
            "frame_instruction",  # 3.11 on: pointer to the instruction; before: int f_lasti
            "frame_owner",  # one byte; before 3.12 NOWHERE
            "frame_shim",  # an owner of this value or above is no Python function's frame
            "frame_bytecode",  # free-threaded 3.14 on: int tlbc_index, which bytecode is run; else NOWHERE
            "code_first_line",  # int
            "code_file",
            "code_name",  # qualified name; before 3.11 the plain name
            "code_lines",  # line table, a bytes object (3.8, 3.9: co_lnotab)
            "code_instructions",  # 3.11 on: first instruction (co_code_adaptive); before NOWHERE
            "code_bytecodes",  # with frame_bytecode: pointer to an array of size, then pointers to bytecode
            "text_length",  # of a str object: Py_ssize_t, characters
            "text_state",  # bit field of 4 bytes
            "text_kind_shift",  # bits: the 3 bits of `kind` (bytes per character) begin here
            "text_ascii",  # bit mask of `ascii` in the state
            "text_compact",  # sizeof(PyASCIIObject): where the characters of ASCII strings are
            "text_wide",  # sizeof(PyCompactUnicodeObject): where those of other compact strings are
            "bytes_length",  # of a bytes object: Py_ssize_t
            "bytes_data",
            "minor",  # the y of Python 3.y
            "instruction_unit",  # bytes per unit of f_lasti (3.10: 2); 3.11 on: 1, offsets are in bytes
            "free_threaded",  # 1: a build without a GIL
        )
    ]
