/*
 * The layout of the CPython whose headers it is compiled against, as constants in an object file: compiled
 * for any machine, and never run. Names are those of expanse_ebpf/python_stacks/layouts.py.
 */
#define Py_BUILD_CORE 1
#include "Python.h"
#include <stddef.h>
#include "frameobject.h"
#if PY_MINOR_VERSION >= 9
#include "internal/pycore_interp.h"
#include "internal/pycore_runtime.h"
#else
#include "internal/pycore_pystate.h"
#endif
#include "internal/pycore_gil.h"
#if PY_MINOR_VERSION >= 11
#include "internal/pycore_code.h"
#include "internal/pycore_frame.h"
#endif
#if PY_MINOR_VERSION >= 14
#include "internal/pycore_interpframe.h"
#include "internal/pycore_tstate.h"
#endif

#define VALUE(name, value) const unsigned long long layout_##name = (value);
#define OFFSET(name, type, member) VALUE(name, offsetof(type, member))
#define ABSENT(name) VALUE(name, 0xffffffff)

VALUE(minor, PY_MINOR_VERSION)
#ifdef Py_GIL_DISABLED
VALUE(free_threaded, 1)
#else
VALUE(free_threaded, 0)
#endif

OFFSET(runtime_interpreters, _PyRuntimeState, interpreters.head)
OFFSET(interpreter_next, PyInterpreterState, next)
#if PY_MINOR_VERSION <= 10
OFFSET(interpreter_threads, PyInterpreterState, tstate_head)
#else
OFFSET(interpreter_threads, PyInterpreterState, threads.head)
#endif
#if PY_MINOR_VERSION <= 11
OFFSET(runtime_current, _PyRuntimeState, gilstate.tstate_current)
OFFSET(runtime_gil, _PyRuntimeState, ceval.gil)
ABSENT(interpreter_gil)
ABSENT(thread_status)
VALUE(thread_active, 0)
#else
ABSENT(runtime_current)
ABSENT(runtime_gil)
#ifdef Py_GIL_DISABLED
ABSENT(interpreter_gil) /* there, but not in use */
#else
OFFSET(interpreter_gil, PyInterpreterState, ceval.gil)
#endif
OFFSET(thread_status, PyThreadState, _status)
const PyThreadState bits_active = {._status = {.active = 1}};
#endif

OFFSET(gil_locked, struct _gil_runtime_state, locked)
OFFSET(gil_holder, struct _gil_runtime_state, last_holder)
VALUE(gil_size, sizeof(struct _gil_runtime_state))

OFFSET(thread_next, PyThreadState, next)
OFFSET(thread_interpreter, PyThreadState, interp)
OFFSET(thread_id, PyThreadState, thread_id)
#if PY_MINOR_VERSION <= 10
ABSENT(thread_native_id)
OFFSET(thread_frame, PyThreadState, frame)
ABSENT(thread_frame_via)
#else
OFFSET(thread_native_id, PyThreadState, native_thread_id)
#if PY_MINOR_VERSION <= 12
OFFSET(thread_frame, PyThreadState, cframe)
OFFSET(thread_frame_via, _PyCFrame, current_frame)
#else
OFFSET(thread_frame, PyThreadState, current_frame)
ABSENT(thread_frame_via)
#endif
#endif

#if PY_MINOR_VERSION <= 10
OFFSET(frame_previous, PyFrameObject, f_back)
OFFSET(frame_code, PyFrameObject, f_code)
OFFSET(frame_instruction, PyFrameObject, f_lasti)
#elif PY_MINOR_VERSION <= 12
OFFSET(frame_previous, _PyInterpreterFrame, previous)
OFFSET(frame_code, _PyInterpreterFrame, f_code)
OFFSET(frame_instruction, _PyInterpreterFrame, prev_instr)
#else
OFFSET(frame_previous, _PyInterpreterFrame, previous)
OFFSET(frame_code, _PyInterpreterFrame, f_executable)
OFFSET(frame_instruction, _PyInterpreterFrame, instr_ptr)
#endif
#if PY_MINOR_VERSION <= 11
ABSENT(frame_owner)
ABSENT(frame_shim)
#else
OFFSET(frame_owner, _PyInterpreterFrame, owner)
#if PY_MINOR_VERSION <= 13
VALUE(frame_shim, FRAME_OWNED_BY_CSTACK)
#else
VALUE(frame_shim, FRAME_OWNED_BY_INTERPRETER)
#endif
#endif
#if PY_MINOR_VERSION >= 14 && defined(Py_GIL_DISABLED)
OFFSET(frame_bytecode, _PyInterpreterFrame, tlbc_index)
OFFSET(code_bytecodes, PyCodeObject, co_tlbc)
#else
ABSENT(frame_bytecode)
ABSENT(code_bytecodes)
#endif

OFFSET(code_first_line, PyCodeObject, co_firstlineno)
OFFSET(code_file, PyCodeObject, co_filename)
#if PY_MINOR_VERSION <= 9
OFFSET(code_lines, PyCodeObject, co_lnotab)
#else
OFFSET(code_lines, PyCodeObject, co_linetable)
#endif
#if PY_MINOR_VERSION <= 10
OFFSET(code_name, PyCodeObject, co_name)
ABSENT(code_instructions)
#else
OFFSET(code_name, PyCodeObject, co_qualname)
OFFSET(code_instructions, PyCodeObject, co_code_adaptive)
#endif

OFFSET(text_length, PyASCIIObject, length)
OFFSET(text_state, PyASCIIObject, state)
const PyASCIIObject bits_kind = {.state = {.kind = 7}};
const PyASCIIObject bits_ascii = {.state = {.ascii = 1}};
VALUE(text_compact, sizeof(PyASCIIObject))
VALUE(text_wide, sizeof(PyCompactUnicodeObject))
OFFSET(bytes_length, PyVarObject, ob_size)
OFFSET(bytes_data, PyBytesObject, ob_sval)

#if PY_MINOR_VERSION >= 14
const _Py_DebugOffsets debug_offsets = _Py_DebugOffsets_INIT("xdebugpy");
#elif PY_MINOR_VERSION == 13
#include "internal/pycore_ceval.h"
#include "internal/pycore_runtime_init.h"
_PyRuntimeState debug_offsets = _PyRuntimeState_INIT(debug_offsets, "xdebugpy"); /* they are its first member */
#endif
