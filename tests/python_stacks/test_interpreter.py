"""Which interpreter a process runs: real processes of every version, and made-up ones in a folder."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import struct
import subprocess
import time
import uuid
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.python_stacks import interpreter, mapped_files
from expanse_ebpf.python_stacks.build import Build, examine
from expanse_ebpf.python_stacks.elf import Elf, Segment
from expanse_ebpf.python_stacks.interpreter import (
    Interpreter,
    Interpreters,
    Reason,
    Refusal,
    RefusedError,
    bias,
    fits,
    parse_maps,
)
from expanse_ebpf.python_stacks.layouts import NOWHERE, Layout, for_version
from expanse_ebpf.python_stacks.mapped_files import open_mapped
from tests.python_stacks.interpreters import Interp
from tests.python_stacks.interpreters import interpreter as made

SYSTEM = "/usr/bin/python3"
# A copy elsewhere finds its library by that.
HOME = {"PYTHONHOME": "/usr"}

# Tells what the finder should find, then waits; its threads wait in functions of their own.
PROGRAM = """
import json, os, sys, threading
told = {"version": "%d.%d.%d" % sys.version_info[:3], "threads": {}}
told["free_threaded"] = bool(getattr(sys, "abiflags", "").count("t"))
try:
    import ctypes
    told["runtime"] = ctypes.addressof(ctypes.c_char.in_dll(ctypes.pythonapi, "_PyRuntime"))
except ImportError:
    pass
ready = threading.Semaphore(0)
class Held:
    def outer(self, name):
        self.inner_ö(name)
    def inner_ö(self, name):
        told["threads"][threading.get_native_id()] = name
        ready.release()
        if name == "main":
            for _ in range(3):
                ready.acquire()
            print(json.dumps(told), flush=True)
        sys.stdin.read() if name == "main" else threading.Event().wait()
for name in ("one", "two"):
    threading.Thread(target=Held().outer, args=(name,), daemon=True).start()
Held().outer("main")
"""


@contextlib.contextmanager
def running(
    command: Sequence[str | Path], environment: Mapping[str, str] = os.environ
) -> Generator[subprocess.Popen[bytes]]:
    """A process that ends when its standard input does, or else is ended."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(environment), bufsize=0
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout
    return process.stdout.readline().decode()


def said(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(line(process))
    return told


def found(pid: int, finder: Interpreters | None = None, tid: int | None = None) -> Interpreter:
    result = (finder or Interpreters()).find(pid, tid)
    assert isinstance(result, Interpreter), result
    return result


# ---- every interpreter


def test_every_interpreter_is_found(interp: Interp) -> None:
    with running(interp.run(PROGRAM)) as process:
        told = said(process)
        result = found(process.pid)
        assert result.version == told["version"]
        assert result.minor == interp.minor == int(told["version"].split(".")[1])
        assert result.free_threaded == interp.free_threaded == told["free_threaded"]
        assert result.runtime == told.get("runtime", result.runtime)
        assert Path(result.path).exists()
        stacks = walk(process.pid, result)
    held = ["Held.inner_ö", "Held.outer"] if interp.minor >= 11 else ["inner_ö", "outer"]
    assert len(stacks) == 3
    for tid, name in told["threads"].items():
        stack = stacks[int(tid)] if interp.minor >= 11 else stacks[None, name]
        own = [function for function, file in stack if file == "<string>"]
        assert own == (held if name != "main" else [*held, "<module>"])


def wait_for_rest(pid: int) -> None:
    """Until none of its threads does anything."""

    def times() -> list[str]:
        stats = sorted(Path(f"/proc/{pid}/task").glob("*/stat"))
        lines = [stat.read_text().rpartition(") ")[2].split() for stat in stats]
        assert lines
        # State, user and system time; what runs has no equal.
        return [f"{line[0]} {line[11]} {line[12]}" if line[0] == "S" else uuid.uuid4().hex for line in lines]

    wait_until(lambda: times() == [time.sleep(0.02), times()][1])


def walk(pid: int, interp: Interpreter) -> dict[Any, list[tuple[str, str]]]:
    """The stacks of all threads, leaf first, as (name, file), by native id; before 3.11 by their order.

    The walk of the kernel side in its simplest form: whether all offsets are right, on a process at rest.
    """
    layout = interp.layout
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)

    def number(address: int, size: int = 8) -> int:
        return int.from_bytes(os.pread(memory, size, address), "little")

    def text(address: int) -> str:
        state = number(address + layout.text_state, 4)
        kind = state >> layout.text_kind_shift & 7
        data = address + (layout.text_compact if state & layout.text_ascii else layout.text_wide)
        raw = os.pread(memory, number(address + layout.text_length) * kind, data)
        return raw.decode({1: "latin-1", 2: "utf-16-le", 4: "utf-32-le"}[kind])

    stacks: dict[Any, list[tuple[str, str]]] = {}
    wait_for_rest(pid)
    try:
        state = number(interp.runtime + layout.runtime_interpreters)
        assert number(state + layout.interpreter_next) == 0
        order = ["two", "one", "main"]
        thread = number(state + layout.interpreter_threads)
        while thread:
            frame = number(thread + layout.thread_frame)
            if layout.thread_frame_via != NOWHERE:
                frame = number(frame + layout.thread_frame_via)
            stack = []
            while frame:
                owner = number(frame + layout.frame_owner, 1) if layout.frame_owner != NOWHERE else 0
                if owner < layout.frame_shim:
                    code = number(frame + layout.frame_code) & ~3
                    name, file = number(code + layout.code_name), number(code + layout.code_file)
                    stack.append((text(name), text(file)))
                    assert number(code + layout.code_first_line, 4) < 10_000
                    lines = number(code + layout.code_lines)
                    assert 0 < number(lines + layout.bytes_length) < 100_000
                    if layout.code_instructions != NOWHERE:
                        begin = code + layout.code_instructions
                        if layout.frame_bytecode != NOWHERE:
                            own = number(frame + layout.frame_bytecode, 4)
                            begin = number(number(code + layout.code_bytecodes) + 8 + own * 8)
                        assert 0 <= number(frame + layout.frame_instruction) - begin < 10_000
                frame = number(frame + layout.frame_previous)
            nth = order.pop(0)
            native = layout.thread_native_id
            stacks[number(thread + native) if native != NOWHERE else (None, nth)] = stack
            if layout.thread_status != NOWHERE:
                assert not number(thread + layout.thread_status, 4) & layout.thread_active  # all of them wait
            thread = number(thread + layout.thread_next)
    finally:
        os.close(memory)
    return stacks


def test_a_fork_is_found_as_well(interp: Interp) -> None:
    program = """
import os, sys
if not os.fork():
    print(os.getpid(), flush=True)
    sys.stdin.read()
    os._exit(0)
os.wait()
"""
    with running(interp.run(program)) as process:
        child = int(line(process))
        finder = Interpreters()
        assert found(process.pid, finder) == found(child, finder)


SUB_INTERPRETER = """
try:
    import _interpreters as interpreters
except ImportError:
    import _xxsubinterpreters as interpreters
import sys
made = interpreters.create()
print(len(interpreters.list_all()), flush=True)
sys.stdin.read()
"""


def test_a_sub_interpreter_without_threads_is_none_the_worse(interp: Interp) -> None:
    with running(interp.run(SUB_INTERPRETER)) as process:
        assert line(process) == "2\n"
        assert found(process.pid).minor == interp.minor


# ---- files under other names, stripped, gone


WAIT = "import sys; print(sys.version_info[1], flush=True); sys.stdin.read()"


@pytest.mark.parametrize("name", ["trainer", "py th;on3", "new\nline", "back\\012slash", "gone (deleted)"])
@pytest.mark.parametrize("deleted", [False, True])
def test_what_a_file_is_called_does_not_matter(name: str, deleted: bool, tmp_path: Path) -> None:
    copy = tmp_path / name
    shutil.copy(SYSTEM, copy)
    with running([copy, "-c", WAIT], os.environ | HOME) as process:
        line(process)
        if deleted:
            copy.unlink()
        result = found(process.pid)
    assert result.path == str(copy).replace("\n", "\\n")
    assert result.version == found_version(SYSTEM)


def found_version(python: str) -> str:
    command = [python, "-c", "import platform; print(platform.python_version())"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_a_file_that_takes_the_place_of_another(tmp_path: Path) -> None:
    """An upgrade while the old one runs: both have the same name then."""
    finder = Interpreters()
    newer = made("musl").command[0]
    place = Path(newer).parent  # where that one finds its library
    copy = place / f"python.{os.getpid()}"
    try:
        shutil.copy(SYSTEM, copy)
        with running([copy, "-c", WAIT], os.environ | HOME) as old:
            line(old)
            shutil.copy(newer, f"{copy}.new")
            Path(f"{copy}.new").rename(copy)
            with running([copy, "-c", WAIT]) as new:
                line(new)
                assert found(old.pid, finder).version == found_version(SYSTEM)
                assert found(new.pid, finder).version == found_version(newer)
                assert found(old.pid, finder).path == found(new.pid, finder).path == str(copy)
    finally:
        copy.unlink()


@pytest.mark.parametrize("kind", ["musl", "free-threaded"])
def test_a_stripped_one_is_found_by_its_section(kind: str) -> None:
    original = made(kind)
    # Beside the original, where it finds its library.
    copy = f"{original.command[0]}.stripped.{os.getpid()}"
    subprocess.run(["strip", "--strip-all", "-o", copy, original.command[0]], check=True)
    try:
        with running([copy, "-c", WAIT]) as stripped, running(original.run(WAIT)) as whole:
            assert line(stripped) == line(whole) == f"{original.minor}\n"
            assert found(stripped.pid).version == found(whole.pid).version
    finally:
        Path(copy).unlink()


def test_one_without_sections_is_found_by_its_dynamic_symbols(tmp_path: Path) -> None:
    data = bytearray(Path(SYSTEM).read_bytes())
    data[40:48], data[60:64] = bytes(8), bytes(4)  # e_shoff; e_shnum, e_shstrndx
    copy = tmp_path / "bare"
    copy.write_bytes(data)
    copy.chmod(0o755)
    with running([copy, "-c", WAIT], os.environ | HOME) as process:
        line(process)
        assert found(process.pid).version == found_version(SYSTEM)


def test_one_that_is_started_by_the_loader() -> None:
    """The executable is the loader then."""
    elf = subprocess.run(["readelf", "-lW", SYSTEM], check=True, capture_output=True, text=True).stdout
    loader = elf.partition("interpreter: ")[2].partition("]")[0]
    with running([loader, SYSTEM, "-c", WAIT]) as process:
        line(process)
        assert found(process.pid).path == str(Path(SYSTEM).resolve())


def test_a_mapped_copy_of_its_own_file_does_not_mislead() -> None:
    """A file may be mapped as data too, before or after its code."""
    interp = made("free-threaded")
    more = """
import mmap
file = open("/proc/self/exe", "rb")
mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
"""
    with running(interp.run(more + PROGRAM)) as process:
        told = said(process)
        maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        assert sum(" 00000000 " in line and line.endswith(interp.command[0]) for line in maps) == 2
        assert found(process.pid).runtime == told.get("runtime", found(process.pid).runtime)
        assert len(walk(process.pid, found(process.pid))) == 3


def test_a_file_that_only_its_own_mounts_have(tmp_path: Path) -> None:
    mount = f"mount -t tmpfs none {tmp_path} && cp {SYSTEM} {tmp_path}/hidden"
    script = f"{mount} && exec {tmp_path}/hidden -c '{WAIT}'"
    with running(["unshare", "-m", "sh", "-c", script], os.environ | HOME) as process:
        line(process)
        assert not (tmp_path / "hidden").exists()
        result = found(process.pid)
        assert Path(result.path).name == "hidden"
        assert result.version == found_version(SYSTEM)


SHARED = sorted((Path.home() / ".pyenv/versions").glob("3.[89].*/lib/libpython3.[89].so.1.0"))


@pytest.mark.parametrize("library", SHARED[:1], ids=lambda path: path.name)
@pytest.mark.parametrize("way", ["map_files", "root"])
def test_a_shared_library_that_only_its_own_mounts_have(
    library: Path, way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = library.parents[1] / "bin/python3"
    mount = f"mount -t tmpfs none {tmp_path} && cp {library} {tmp_path}/libpython"
    script = f"{mount} && LD_PRELOAD={tmp_path}/libpython exec {python} -c '{WAIT}'"
    with running(["unshare", "-m", "sh", "-c", script]) as process:
        line(process)
        if way == "root":  # as without CAP_SYS_ADMIN
            monkeypatch.setattr(interpreter, "open_mapped", without_map_files)
        assert found(process.pid).path == f"{tmp_path}/libpython"


def without_map_files(task: str, process: str, path: bytes, mapping: mapped_files.Mapping) -> int | None:
    return open_mapped(task, "/nowhere", path, mapping)


# ---- processes that change


RAW_EXIT = """
import ctypes, threading
threading.Thread(target=lambda: (print(threading.get_native_id(), flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).syscall(60 if sys.maxsize and os.uname().machine == "x86_64" else 93, 0)
"""


def test_a_main_thread_that_has_ended_hides_nothing() -> None:
    with running([SYSTEM, "-c", "import os, sys" + RAW_EXIT]) as process:
        tid = int(line(process))
        status = Path(f"/proc/{process.pid}/status")
        wait_until(lambda: "Z (zombie)" in status.read_text())
        finder = Interpreters()
        assert found(process.pid, finder) == found(process.pid, finder, tid)
        assert Path(f"/proc/{process.pid}/maps").read_text() == ""


def wait_until(condition: Any) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_exec_changes_the_answer() -> None:
    finder = Interpreters()
    musl = made("musl")
    then = f"import os, sys; print(1, flush=True); sys.stdin.readline(); os.execv('{musl.command[0]}', "
    script = f"read go; exec {SYSTEM} -c \"{then}['{musl.command[0]}', '-c', '{WAIT}'])\""
    with running(["sh", "-c", script]) as process:
        assert process.stdin
        refused = finder.find(process.pid)
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.NOT_PYTHON
        assert refused.detail.endswith("sh is not Python")
        process.stdin.write(b"go\n")
        line(process)
        assert found(process.pid, finder).version == found_version(SYSTEM)
        process.stdin.write(b"go\n")
        line(process)
        assert found(process.pid, finder).path == musl.command[0]


def test_a_known_file_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    finder = Interpreters()
    with running([SYSTEM, "-c", WAIT]) as one, running([SYSTEM, "-c", WAIT]) as two:
        line(one)
        line(two)
        first = found(one.pid, finder)
        monkeypatch.setattr(interpreter, "examine", None)
        monkeypatch.setattr(interpreter, "fits", None)
        second = found(two.pid, finder)
        assert second.layout is first.layout


def test_a_known_file_is_an_interpreter_before_it_has_begun() -> None:
    """So that the first sample finds it, if the file has been tried on another process."""
    finder = Interpreters()
    with running([SYSTEM, "-c", WAIT]) as process:
        line(process)
        known = found(process.pid, finder)
    with stopped_at_exec([SYSTEM, "-c", WAIT]) as pid:
        assert found(pid, finder) == known
        unknown = Interpreters().find(pid)
        assert isinstance(unknown, Refusal)
        assert unknown.reason is Reason.STARTING


@contextlib.contextmanager
def stopped_at_exec(command: list[str]) -> Generator[int]:
    """A process that has executed a program and not yet run an instruction of it."""
    import ctypes

    trace_me, detach = 0, 17
    libc = ctypes.CDLL(None, use_errno=True)
    pid = os.fork()
    if not pid:
        libc.ptrace(trace_me, 0, None, None)
        os.execv(command[0], command)
    try:
        _, status = os.waitpid(pid, 0)
        assert os.WIFSTOPPED(status)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        libc.ptrace(detach, pid, None, None)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("library", SHARED[:1], ids=lambda path: path.name)
def test_a_program_whose_libpython_is_not_loaded_yet(library: Path) -> None:
    with stopped_at_exec([str(library.parents[1] / f"bin/{library.name[3:12]}")]) as pid:
        refused = Interpreters().find(pid)
    assert refused == Refusal(Reason.STARTING, "its libpython is not loaded yet")


# ---- processes that have none


def test_a_process_that_is_no_more() -> None:
    process = subprocess.Popen(["true"])
    wait_until(lambda: "Z (zombie)" in Path(f"/proc/{process.pid}/status").read_text())
    assert Interpreters().find(process.pid) == Refusal(Reason.EXITED, "it has exited")
    process.wait()
    assert Interpreters().find(process.pid) == Refusal(Reason.EXITED, "it has exited")


def test_a_process_of_somebody_else() -> None:
    with running([SYSTEM, "-c", WAIT]) as process:
        line(process)
        os.seteuid(65534)
        try:
            refused = Interpreters().find(process.pid)
        finally:
            os.seteuid(0)
        assert isinstance(refused, Refusal)
        assert refused.reason is Reason.NOT_PERMITTED


# ---- processes that are made up


LAYOUT = for_version(9, "x86_64")
RUNTIME, STATE, THREAD, SECOND = 0x4000, 0x8000, 0xA000, 0xB000


class Memory:
    """A process's memory with the lists of a Python 3.9, as a file."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.layout = layout
        self.values = {
            RUNTIME + layout.runtime_interpreters: STATE,
            RUNTIME + layout.runtime_interpreters + 8: STATE,
            STATE + layout.interpreter_threads: THREAD,
            THREAD + layout.thread_next: SECOND,
            SECOND: THREAD,
        }
        for thread in (THREAD, SECOND):
            self.values[thread + layout.thread_interpreter] = STATE
            self.values[thread + layout.thread_id] = 0x7F0000000700
        if layout.runtime_current != NOWHERE:
            self.values[RUNTIME + layout.runtime_current + 8] = STATE
            self.gil = RUNTIME + layout.runtime_gil
        else:
            self.gil = 0xC000
            self.values[STATE + layout.interpreter_gil] = self.gil

    def bytes(self) -> bytes:
        data = bytearray(0x10000)
        for address, value in self.values.items():
            struct.pack_into("<Q", data, address, value)
        return bytes(data)

    def fits(self, path: Path) -> bool:
        path.write_bytes(self.bytes())
        file = os.open(path, os.O_RDONLY)
        try:
            return fits(self.layout, file, RUNTIME)
        finally:
            os.close(file)


LISTS = Layout.thread_status.offset  # the fields before it are about the lists of interpreters and threads
MADE_UP = [for_version(minor, "x86_64") for minor in (9, 10, 11, 12)]


@pytest.mark.parametrize("layout", MADE_UP, ids=lambda layout: f"3.{layout.minor}")
def test_lists_that_agree_fit(layout: Layout, tmp_path: Path) -> None:
    assert Memory(layout).fits(tmp_path / "memory")


@pytest.mark.parametrize("layout", MADE_UP, ids=lambda layout: f"3.{layout.minor}")
def test_lists_that_contradict_each_other_do_not(layout: Layout, tmp_path: Path) -> None:
    memory = Memory(layout)
    changes = {
        THREAD: SECOND,
        SECOND: 0,
        THREAD + layout.thread_interpreter: THREAD,
        SECOND + layout.thread_interpreter: 0,
        THREAD + layout.thread_next: 1 << 61,
        STATE + layout.interpreter_threads: 0xFFFF_FFFF_FFFF_FFF0,
        STATE + layout.interpreter_next: 1 << 62,
        RUNTIME + layout.runtime_interpreters: 1,
        memory.gil + layout.gil_locked: 2,
    }
    if layout.runtime_current != NOWHERE:
        changes[RUNTIME + layout.runtime_current + 8] = SECOND
    else:
        changes[STATE + layout.interpreter_gil] = 1 << 62
    if layout.thread_native_id != NOWHERE:
        changes[SECOND + layout.thread_native_id] = (1 << 22) + 1
    for address, value in changes.items():
        memory = Memory(layout)
        memory.values[address] = value
        with contextlib.suppress(RefusedError):  # beyond the end of the file
            assert not memory.fits(tmp_path / "memory"), hex(address)


@pytest.mark.parametrize("layout", MADE_UP, ids=lambda layout: f"3.{layout.minor}")
def test_an_interpreter_that_is_being_made_does_not_matter(layout: Layout, tmp_path: Path) -> None:
    """It is the first in the list and has no thread yet, nor a GIL."""
    memory = Memory(layout)
    memory.values[RUNTIME + layout.runtime_interpreters] = 0xE000
    memory.values[0xE000 + layout.interpreter_next] = STATE
    assert memory.fits(tmp_path / "memory")


@pytest.mark.parametrize(
    "address", [RUNTIME + LAYOUT.runtime_interpreters, STATE + LAYOUT.interpreter_threads]
)
def test_lists_that_are_empty_are_about_to_be_filled(address: int, tmp_path: Path) -> None:
    memory = Memory()
    memory.values[address] = 0
    with pytest.raises(RefusedError) as error:
        memory.fits(tmp_path / "memory")
    assert error.value.refusal.reason is Reason.STARTING


@given(changes=st.dictionaries(st.sampled_from(sorted(Memory().values)), st.integers(0, 2**64 - 1)))
def test_no_memory_breaks_it(changes: dict[int, int], tmp_path_factory: pytest.TempPathFactory) -> None:
    memory = Memory()
    memory.values |= changes
    with contextlib.suppress(RefusedError):
        memory.fits(tmp_path_factory.getbasetemp() / "memory")


def test_a_layout_of_another_version_is_never_taken(interp: Interp, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(interp.run(WAIT)) as process:
        line(process)
        own = found(process.pid).layout
        for minor in range(8, 13):
            other = for_version(minor, os.uname().machine)
            if bytes(other)[:LISTS] == bytes(own)[:LISTS]:
                continue
            with monkeypatch.context() as patch:
                patch.setattr(interpreter, "examine", functools.partial(examined_as, other))
                refused = Interpreters().find(process.pid)
            assert isinstance(refused, Refusal), minor
            assert refused.reason in (Reason.UNSUPPORTED, Reason.STARTING)


def examined_as(layout: Layout, file: int, path: bytes) -> Build:
    build = examine(file, path)
    return build._replace(layout=layout) if build.layout else build


def test_a_kernel_thread(tmp_path: Path) -> None:
    task = tmp_path / "7/task/7"
    task.mkdir(parents=True)
    for name in ("mem", "maps"):
        (task / name).touch()
    flags = 0x00208040
    (task / "stat").write_text(f"7 (a) b) S 2 0 0 0 -1 {flags} 0 0")
    assert Interpreters().find(7, proc=str(tmp_path)) == Refusal(Reason.NOT_PYTHON, "a kernel thread")


@dataclass
class MadeUp:
    """A process in a folder, whose program is a few lines of C and whose memory is a file."""

    folder: Path

    def __post_init__(self) -> None:
        self.task = self.folder / "7/task/7"
        self.task.mkdir(parents=True)
        program = self.folder / "program"
        # Debug offsets of 3.14.0, with the head of the list of interpreters at 0x800.
        content = "'x','d','e','b','u','g','p','y',240,0,14,3,[41]=8"
        source = f"""
char _PyRuntime[4096] __attribute__((section(".PyRuntime"))) = {{{content}}};
int code(void) {{ return 1; }}
"""
        command = ["gcc", "-xc", "-", "-shared", "-fPIC", "-nostdlib", "-o", program]
        subprocess.run(command, input=source, text=True, check=True)
        (self.task / "exe").symlink_to(program)
        with open(program, "rb") as file:
            self.elf = Elf(lambda offset, size: os.pread(file.fileno(), size, offset))
            self.runtime = 0x10000 + (self.elf.symbol("_PyRuntime") or 0)
        (code,) = (segment for segment in self.elf.segments if segment.executable)
        start = 0x10000 + code.address
        inode = program.stat().st_ino
        line = f"{start:08x}-{start + 0x1000:08x} r-xp {code.offset:08x} fe:00 {inode} {program}\n"
        (self.task / "maps").write_text(line)
        self.remember(b"")

    def remember(self, content: bytes) -> None:
        """Have that where its runtime should be."""
        (self.task / "mem").write_bytes(bytes(self.runtime) + content if content else b"")

    def find(self, finder: Interpreters) -> Interpreter | Refusal:
        return finder.find(7, proc=str(self.folder))


def test_a_runtime_that_is_not_where_it_should_be(tmp_path: Path) -> None:
    process = MadeUp(tmp_path)
    process.remember(bytes(4096))
    detail = "its runtime is not where it should be"
    assert process.find(Interpreters()) == Refusal(Reason.UNREADABLE, detail)


def test_a_program_that_another_has_just_replaced(tmp_path: Path) -> None:
    """Its memory is then read as nothing, also when its file is known."""
    process = MadeUp(tmp_path)
    replaced = Refusal(Reason.STARTING, "it has just executed another program")
    finder = Interpreters()
    assert process.find(finder) == replaced
    process.remember(b"xdebugpy" + bytes(4088))
    starting = process.find(finder)
    assert starting == Refusal(Reason.STARTING, "its interpreter is not initialised yet")
    finder._tried.update(finder._builds)  # as if another process had run it
    known = process.find(finder)
    assert isinstance(known, Interpreter)
    assert known.runtime == process.runtime
    process.remember(b"")
    assert process.find(finder) == replaced


def test_a_file_that_was_written_over(tmp_path: Path) -> None:
    """It has the same name, place and size."""
    process = MadeUp(tmp_path)
    process.remember(b"xdebugpy" + bytes(4088))
    finder = Interpreters()

    def version() -> str:
        process.find(finder)
        finder._tried.update(finder._builds)
        result = process.find(finder)
        assert isinstance(result, Interpreter)
        return result.version

    assert version() == "3.14.0"
    program = tmp_path / "program"
    data = program.read_bytes().replace(b"y\xf0\0\x0e", b"y\xf0\0\x0d")
    assert len(data) == program.stat().st_size
    program.write_bytes(data)
    os.utime(program, (1, 1))
    assert version() == "3.13.0"


def test_lists_that_change_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [False, True]
    monkeypatch.setattr(interpreter, "fits", lambda *of: answers.pop(0))
    with running([SYSTEM, "-c", WAIT]) as process:
        line(process)
        found(process.pid)


def test_what_is_remembered_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreter, "_MOST_FILES", 2)
    finder = Interpreters()
    for number in range(4):
        process = MadeUp(tmp_path / str(number))
        process.remember(b"xdebugpy" + bytes(4088))
        process.find(finder)
        finder._tried.update(finder._builds)
        assert isinstance(process.find(finder), Interpreter)
    assert len(finder._builds) == len(finder._tried) == 2


def test_a_file_is_opened_only_if_it_is_the_one_that_is_mapped(tmp_path: Path) -> None:
    task = tmp_path / "7/task/7"
    task.mkdir(parents=True)
    (task / "root").symlink_to("/")
    library, waiting = tmp_path / "libpython", tmp_path / "fifo"
    library.touch()
    os.mkfifo(waiting)

    def opened(path: Path, inode: int) -> bool:
        mapping = mapped_files.Mapping(0x1000, 0x2000, 0, inode)
        file = open_mapped(str(task), str(tmp_path / "7"), os.fsencode(path), mapping)
        if file is not None:
            os.close(file)
        return file is not None

    assert opened(library, library.stat().st_ino)
    assert not opened(library, library.stat().st_ino + 1)
    assert not opened(waiting, waiting.stat().st_ino)  # nor does it wait for a writer
    assert not opened(tmp_path / "gone", 1)


# ---- where a file has come to lie

CODE, DATA = Segment(0x3A10, 0x405A10, 0x800, True), Segment(0, 0x400000, 0x1000, False)


@pytest.mark.parametrize(
    ("mappings", "expected"),
    [
        ([(0x7000000, 0x7001000, 0x3000)], 0x7000000 - 0x405000),
        ([(0x405000, 0x406000, 0x3000)], 0),
        # Something else of it is executable too.
        ([(0x1000000, 0x1001000, 0), (0x7000000, 0x7001000, 0x3000)], 0x7000000 - 0x405000),
        # A larger page than the file was made for.
        ([(0x7000000, 0x7010000, 0)], 0x7000000 - 0x402000),
        # Its code in two parts, of which the second is another one's beginning.
        ([(0x7000000, 0x7001000, 0x3000), (0x7001000, 0x7002000, 0x4000)], 0x7000000 - 0x405000),
    ],
)
def test_the_bias_is_that_of_the_code(mappings: list[tuple[int, int, int]], expected: int) -> None:
    assert bias((DATA, CODE), [mapped_files.Mapping(*each, 1) for each in mappings]) == expected


def test_code_that_is_not_mapped_from_the_file_has_no_bias() -> None:
    with pytest.raises(RefusedError):
        bias((DATA, CODE), [mapped_files.Mapping(0x7000000, 0x7001000, 0x4000, 1)])


# ---- /proc/PID/maps

PROGRAM_NAME = b"/opt/my py"
MAPS = b"""\
00400000-00500000 r--p 00000000 fe:01 77                                 /opt/my py
00500000-00600000 r-xp 00100000 fe:01 77                                 /opt/my py
7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n\
7f0000001000-7f0000002000 r-xp 00000000 fe:01 78                         /not/opt/my py
7f0000001000-7f0000002000 r-xp 00000000 fe:01 78                         /not /opt/my py
7f0000002000-7f0000003000 r-xp 00000000 fe:01 79                         /usr/lib/libpython3.11.so.1.0
7f0000003000-7f0000004000 r-xp 00001000 fe:01 80 /usr/lib/_x.cpython-311-x86_64-linux-gnu.so
7f0000004000-7f0000005000 r--p 00000000 fe:01 81                         /data/python.bin
7f0000005000-7f0000006000 r-xp 00000000 fe:01 82 /usr/lib/python3.11/site-packages/y.so
7f0000006000-7f0000007000 r-xp 00000000 fe:01 83                         /a;b/lib python\\012.so (deleted)
7ffd00000000-7ffd00001000 r-xp 00000000 00:00 0                          [vdso]
"""


def test_the_mappings_of_what_may_be_an_interpreter() -> None:
    files = parse_maps(MAPS, PROGRAM_NAME)
    assert list(files) == [PROGRAM_NAME, b"/usr/lib/libpython3.11.so.1.0", b"/a;b/lib python\n.so (deleted)"]
    assert [tuple(each) for each in files[PROGRAM_NAME]] == [
        (0x500000, 0x600000, 0x100000, 77),
    ]


def test_many_files_are_not_looked_at() -> None:
    """A job may map what it likes: libpython is found all the same."""
    line = b"1000-2000 r-xp 0 0:0 1 /%s\n"
    others = b"".join(line % b"%d.python" % number for number in range(200))
    files = parse_maps(others + line % b"libpython3.so" + line % b"a" + others, b"/a")
    assert list(files)[:2] == [b"/a", b"/libpython3.so"]
    assert len(files) < 20
    (mappings,) = parse_maps(line % b"a" * 10_000, b"/a").values()
    assert len(mappings) < 1000


@given(st.binary(), st.binary(min_size=1))
def test_any_text_is_taken(text: bytes, program: bytes) -> None:
    parse_maps(text, program)


MAPPINGS = st.lists(
    st.tuples(
        st.integers(0, 2**47), st.integers(0, 2**40), st.integers(0, 2**50), st.integers(0, 2**63),
        st.text(st.characters(exclude_categories=["Cs"], exclude_characters="/\0"), max_size=8),
    ),
    max_size=6,
)  # fmt: skip


@given(MAPPINGS)
def test_every_line_is_read_exactly(mappings: list[tuple[int, int, int, int, str]]) -> None:
    text, expected = b"", {}
    for start, size, offset, inode, name in mappings:
        path = f"/lib/{name}python".encode()
        written = path.replace(b"\n", b"\\012")
        text += b"%08x-%08x r-xp %08x fd:01 %-26d %s\n" % (start, start + size, offset, inode, written)
        if b".cpython-" not in path:
            # A backslash and digits in a name cannot be told from a newline; nobody has them.
            expected.setdefault(written.replace(b"\\012", b"\n"), []).append(
                (start, start + size, offset, inode)
            )
    files = parse_maps(text, b"/bin/sh")
    assert {path: [tuple(each) for each in found] for path, found in files.items()} == expected
