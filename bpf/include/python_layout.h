/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where CPython keeps what a walk needs, for one build of the interpreter. User space fills it in from
 * its tables or from the interpreter's own debug offsets: see expanse_ebpf/kernel/python_layout.py,
 * which has the same fields in the same order, with their meaning and source.
 */
#ifndef EXPANSE_PYTHON_LAYOUT_H
#define EXPANSE_PYTHON_LAYOUT_H

#include "kernel_types.h"

#define NOWHERE 0xffffffff /* this build has no such field */

struct python_layout {
	/* In _PyRuntime. */
	u32 runtime_interpreters;
	u32 runtime_current;
	u32 runtime_gil;
	/* In an interpreter state. */
	u32 interpreter_next;
	u32 interpreter_threads;
	u32 interpreter_gil;
	/* In the GIL's state. */
	u32 gil_locked;
	u32 gil_holder;
	u32 gil_size;
	/* In a thread state. */
	u32 thread_next;
	u32 thread_interpreter;
	u32 thread_id;
	u32 thread_native_id;
	u32 thread_status;
	u32 thread_active;
	u32 thread_frame;
	u32 thread_frame_via;
	/* In a frame. */
	u32 frame_previous;
	u32 frame_code;
	u32 frame_instruction;
	u32 frame_owner;
	u32 frame_shim;
	u32 frame_bytecode;
	/* In a code object. */
	u32 code_first_line;
	u32 code_file;
	u32 code_name;
	u32 code_lines;
	u32 code_instructions;
	u32 code_bytecodes;
	/* In strings and bytes. */
	u32 text_length;
	u32 text_state;
	u32 text_kind_shift;
	u32 text_ascii;
	u32 text_compact;
	u32 text_wide;
	u32 bytes_length;
	u32 bytes_data;
	/* What it is. */
	u32 minor;
	u32 instruction_unit;
	u32 free_threaded;
};

#endif
