"""Which Python interpreter a process runs, and where its state is.

Everything is read through /proc/PID: the process may be in another mount or PID namespace, and its files
may be renamed or deleted. An interpreter is told by what a file holds, `_PyRuntime`, and not by what the
file is called. Looked at are the executable and those mapped files that have "python" in their names,
extension modules (`….cpython-311-….so`) left out; an interpreter inside some other library is not seen.

What a file holds is found out once. Its layout is tried on the first live process that runs it; a build
whose lists do not fit is refused, since a wrong layout would give wrong names.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from expanse_ebpf.python_stacks.build import Build, examine, shown
from expanse_ebpf.python_stacks.elf import Segment
from expanse_ebpf.python_stacks.layouts import COOKIE, NOWHERE, Layout
from expanse_ebpf.python_stacks.mapped_files import (
    Mapping,
    another_thread,
    living_name,
    open_mapped,
    open_program,
    parse_line,
    read_maps,
)

_MOST_FILES = 1024  # that are remembered
# Of one process; a job may map what it likes, and what is looked at costs time.
_MOST_CANDIDATES = 12
_MOST_MAPPINGS = 512
_MOST_INTERPRETERS, _MOST_THREADS = 32, 64  # which a layout is tried on
_HIGHEST_THREAD_ID = 1 << 22  # PID_MAX_LIMIT of the kernel
_PF_KTHREAD = 0x00200000  # include/linux/sched.h
_TRIES = 3  # a list of threads may change while it is read


class Reason(StrEnum):
    """Why a process has no interpreter that can be read."""

    NOT_PYTHON = "not_python"
    STARTING = "starting"  # it will have one: look again in a moment
    UNSUPPORTED = "unsupported"
    UNREADABLE = "unreadable"
    NOT_PERMITTED = "not_permitted"
    EXITED = "exited"
    OPTED_OUT = "opted_out"  # said by the process itself, see sampler.py


@dataclass(frozen=True)
class Interpreter:
    """An interpreter in a process."""

    version: str  # "3.11.7"; "3.9" if the file does not tell the rest
    minor: int
    free_threaded: bool
    runtime: int  # the address of _PyRuntime in the process
    layout: Layout
    path: str  # of the file that has it, as /proc names it to us


@dataclass(frozen=True)
class Refusal:
    """Why there is none, with a line for a person."""

    reason: Reason
    detail: str


class RefusedError(Exception):
    """Carries a refusal as far as Interpreters.find()."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


class Interpreters:
    """Finds interpreters; remembers what it has seen in which file."""

    def __init__(self) -> None:
        self._builds: dict[tuple[int, ...], Build] = {}
        self._tried: set[tuple[int, ...]] = set()  # their layout has fitted a live process

    def find(self, pid: int, tid: int | None = None, proc: str = "/proc") -> Interpreter | Refusal:
        """The interpreter of a process, or why there is none.

        `tid` is a thread that lives, for a process whose main thread has ended; without it one is looked
        for if need be.
        """
        task = f"{proc}/{pid}/task/{tid or pid}"
        try:
            return self._find(task, f"{proc}/{tid or pid}")
        except RefusedError as error:
            return error.refusal
        except PermissionError:
            return Refusal(Reason.NOT_PERMITTED, "its memory may not be read by this user")
        except (FileNotFoundError, ProcessLookupError):
            if tid is None and (other := another_thread(f"{proc}/{pid}/task", pid)):
                return self.find(pid, other, proc)
            return _without_memory(task)
        except OSError as error:
            return Refusal(Reason.UNREADABLE, f"its files in /proc cannot be read: {error.strerror}")

    def _find(self, task: str, process: str) -> Interpreter:
        # Memory comes first: the descriptor keeps to the program of this moment. If another is executed
        # meanwhile, then what is read through it is nothing, not something wrong.
        memory = os.open(f"{task}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            maps = read_maps(task)
            if not maps:  # of a kernel's thread, and of one that has ended
                raise ProcessLookupError
            program = os.fsencode(Path(f"{task}/exe").readlink())
            return self._choose(task, process, memory, program, parse_maps(maps, program))
        finally:
            os.close(memory)

    def _choose(
        self, task: str, process: str, memory: int, program: bytes, files: dict[bytes, list[Mapping]]
    ) -> Interpreter:
        """The interpreter among the mapped files that may hold one."""
        refusal = RefusedError(Reason.NOT_PYTHON, f"{shown(program)} is not Python")
        for path, mappings in files.items():
            file = open_program(task) if path == program else open_mapped(task, process, path, mappings[0])
            if file is None:
                continue
            try:
                found = os.fstat(file)
                key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
                build = self._builds.get(key)
                if build is None:
                    build = examine(file, path)
                    self._remember(key, build)
            finally:
                os.close(file)
            if build.problem:
                refusal = RefusedError(Reason.UNSUPPORTED, build.problem)
            elif build.layout:
                runtime = build.runtime + bias(build.segments, mappings)
                self._try(key, build.layout, build.version, memory, runtime)
                path = living_name(task, path)
                minor, free_threaded = build.layout.minor, bool(build.layout.free_threaded)
                return Interpreter(build.version, minor, free_threaded, runtime, build.layout, shown(path))
            elif build.wants_python and refusal.refusal.reason is Reason.NOT_PYTHON:
                refusal = RefusedError(Reason.STARTING, "its libpython is not loaded yet")
        raise refusal

    def _remember(self, key: tuple[int, ...], build: Build) -> None:
        if len(self._builds) >= _MOST_FILES:
            oldest = next(iter(self._builds))
            del self._builds[oldest]
            self._tried.discard(oldest)
        self._builds[key] = build

    def _try(self, key: tuple[int, ...], layout: Layout, version: str, memory: int, runtime: int) -> None:
        """See that the program is still there, and once per file that the layout is that of the process."""
        beginning = _read(memory, runtime, len(COOKIE))
        if layout.minor >= 13 and beginning != COOKIE:
            raise RefusedError(Reason.UNREADABLE, "its runtime is not where it should be")
        if key not in self._tried:
            if not any(fits(layout, memory, runtime) for _ in range(_TRIES)):
                raise RefusedError(Reason.UNSUPPORTED, f"this build of Python {version} has another layout")
            self._tried.add(key)


# ---- files


def parse_maps(text: bytes, program: bytes) -> dict[bytes, list[Mapping]]:
    """The code of files that may hold an interpreter, from /proc/PID/maps: of the program and of python's.

    Names are as readlink() gives them; the kernel writes a newline in them as \\012.
    """
    files: dict[bytes, list[Mapping]] = {}
    ending = b" " + program.replace(b"\n", b"\\012")
    count = 0
    for line in text.split(b"\n"):
        name = line[line.rfind(b"/") :]
        its_own = line.endswith(ending)
        if not its_own and (b"python" not in name or b".cpython-" in name):
            continue
        found = parse_line(line)
        if found is None or count >= _MOST_MAPPINGS:
            continue
        count += 1
        mapping, _, path = found
        if path == ending[1:]:
            path = program
        elif its_own:
            continue  # the end of a longer name
        else:
            path = path.replace(b"\\012", b"\n")
        files.setdefault(path, []).append(mapping)

    def rank(path: bytes) -> int:
        """The likely ones first, since not all of them may be looked at."""
        return 0 if path == program else 1 if path.rpartition(b"/")[2].startswith(b"libpython") else 2

    return {path: files[path] for path in sorted(files, key=rank)[:_MOST_CANDIDATES]}


def bias(segments: tuple[Segment, ...], mappings: list[Mapping]) -> int:
    """What has been added to the file's addresses: by its code, since data may be mapped by anyone."""
    for segment in segments:
        for mapping in mappings:
            into = segment.offset - mapping.offset
            if segment.executable and 0 <= into < mapping.end - mapping.start:
                return mapping.start + into - segment.address
    raise RefusedError(Reason.UNREADABLE, "its interpreter is mapped in an unusual way")


# ---- processes


def fits(layout: Layout, memory: int, runtime: int) -> bool:
    """Whether the lists of interpreters and threads in a process's memory are as the layout says.

    RefusedError (starting) if they are still empty.
    """
    bound = 0
    try:
        interpreter = _pointer(memory, runtime + layout.runtime_interpreters)
        for _ in range(_MOST_INTERPRETERS):
            if not interpreter:
                break
            threads = _bound_threads(layout, memory, interpreter)
            # A sub-interpreter may have none, and then perhaps no GIL either.
            if threads is None or (threads and not _gil_fits(layout, memory, runtime, interpreter)):
                return False
            bound += threads
            interpreter = _pointer(memory, interpreter + layout.interpreter_next)
    except OSError:
        return False  # no such address
    if not bound:
        raise RefusedError(Reason.STARTING, "its interpreter is not initialised yet")
    return True


def _bound_threads(layout: Layout, memory: int, interpreter: int) -> int | None:
    """How many of an interpreter's thread states have a thread; None if they are no such list."""
    bound = previous = 0
    thread = _pointer(memory, interpreter + layout.interpreter_threads)
    for _ in range(_MOST_THREADS):
        if not thread:
            break
        # `prev` is the first member of PyThreadState in every version.
        if _pointer(memory, thread) != previous:
            return None
        if _pointer(memory, thread + layout.thread_interpreter) != interpreter:
            return None
        native_id = layout.thread_native_id
        if native_id != NOWHERE and _pointer(memory, thread + native_id) > _HIGHEST_THREAD_ID:
            return None
        bound += _pointer(memory, thread + layout.thread_id) != 0  # 0 while a thread is being made
        previous, thread = thread, _pointer(memory, thread + layout.thread_next)
    return bound


def _gil_fits(layout: Layout, memory: int, runtime: int, interpreter: int) -> bool:
    if layout.runtime_current != NOWHERE:
        # autoInterpreterState follows tstate_current (3.8: and `getframe`), `main` the head of the list.
        automatic = _pointer(memory, runtime + layout.runtime_current + (16 if layout.minor == 8 else 8))
        if automatic != _pointer(memory, runtime + layout.runtime_interpreters + 8):
            return False
        gil = runtime + layout.runtime_gil
    elif layout.interpreter_gil != NOWHERE:
        gil = _pointer(memory, interpreter + layout.interpreter_gil)
    else:
        return True
    (locked,) = struct.unpack("<i", _read(memory, gil + layout.gil_locked, 4))
    return locked in (-1, 0, 1)


def _pointer(memory: int, address: int) -> int:
    return int.from_bytes(_read(memory, address, 8), "little")


def _read(memory: int, address: int, size: int) -> bytes:
    """OSError for an address that is not mapped; RefusedError if the program is no more."""
    if not 4096 <= address < 1 << 62:  # NULL with an offset is no address either
        raise OSError("no address")
    data = os.pread(memory, size, address)
    if not data:
        raise RefusedError(Reason.STARTING, "it has just executed another program")
    if len(data) < size:
        raise OSError("at the end of a mapping")
    return data


def _without_memory(task: str) -> Refusal:
    """What a thread without memory is."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        # proc(5): after the name in brackets come state, ppid, pgrp, session, tty, tpgid, flags.
        fields = Path(f"{task}/stat").read_bytes().rpartition(b") ")[2].split()
        if int(fields[6]) & _PF_KTHREAD:
            return Refusal(Reason.NOT_PYTHON, "a kernel thread")
    return Refusal(Reason.EXITED, "it has exited")
