"""The programs that take Python stacks, in the running kernel; what their records may be; what is left."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import python_stacks as kernel
from expanse_ebpf.kernel.python_stacks import Ask, Code, Part, PythonStacks, Record, decode
from expanse_ebpf.python_stacks.interpreter import Interpreter, Interpreters
from expanse_ebpf.python_stacks.layouts import for_version
from tests.kernel.test_accounting import programs, programs_of, wait_until_gone

HEADER = Path(__file__).parents[2] / "bpf/include/python_maps.h"
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


# ---- records


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=1400))
def test_any_bytes_are_a_record_or_none(data: bytes) -> None:
    decode(data)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 8), st.binary(max_size=1400))
def test_any_bytes_of_any_kind_are_a_record_or_none(kind: int, data: bytes) -> None:
    record = decode(struct.pack("=I", kind) + data)
    if not 1 <= kind <= 6:
        assert record is None


@settings(max_examples=50, deadline=None)
@given(u32, u64, u32, u32, u32, u32)
def test_a_question(slot: int, space: int, host_pid: int, pid: int, tid: int, tries: int) -> None:
    data = struct.pack("=IIQIIII", 1, slot, space, host_pid, pid, tid, tries)
    assert decode(data) == Ask(slot, space, host_pid, pid, tid, tries)
    assert all(decode(data[:size]) is None for size in range(len(data)))


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(["name", "file", "lines"]), u64, u32, u32, st.binary(max_size=100))
def test_a_part_of_a_code_object(kind: str, code: int, length: int, state: int, content: bytes) -> None:
    number = 2 + ["name", "file", "lines"].index(kind)
    data = struct.pack("=IIQII", number, length, code, state, 0)
    assert decode(data + content) == Part(kind, code, length, state, content)
    assert all(decode(data[:size]) is None for size in range(len(data)))


@settings(max_examples=50, deadline=None)
@given(u32, u64, u64, u32, u32, u32)
def test_a_code_object(layout: int, code: int, lines: int, length: int, first: int, pid: int) -> None:
    data = struct.pack("=IIQQIIII", 5, layout, code, lines, length, first, pid, 0)
    assert decode(data) == Code(code, layout, first, lines, length, pid)


@settings(max_examples=50, deadline=None)
@given(u32, u32, u32, u32, st.integers(0, 15), st.lists(u64, max_size=128))
def test_a_stack(slot: int, row: int, pid: int, layout: int, flags: int, frames: list[int]) -> None:
    data = struct.pack("=8I", 6, slot, row, pid, layout, flags, len(frames), 0)
    data += struct.pack(f"={len(frames)}Q", *frames)
    waiting, truncated = bool(flags & 4), bool(flags & 8)
    gil = ("", "held", "waiting", "released")[flags & 3]
    assert decode(data) == kernel.Stack(row, slot, pid, layout, gil, waiting, truncated, tuple(frames))
    if frames:
        assert decode(data[:-1]) is None


def test_outcomes_and_limits_are_those_of_the_kernel_side() -> None:
    text = HEADER.read_text(encoding="utf-8")
    _, _, rest = text.partition("enum outcome {")
    listed = re.findall(r"^\t([A-Z_]+),", rest.partition("OUTCOMES =")[0], re.MULTILINE)
    assert [name.lower() for name in listed] == list(kernel.OUTCOMES)
    for name, value in {"MAX_STACKS": kernel.MAX_STACKS, "OFFSET_BITS": kernel.OFFSET_BITS}.items():
        assert f"#define {name} {value}" in text


# ---- layouts


def test_every_layout_of_a_table_fits_into_what_the_kernel_side_reads() -> None:
    for minor in range(8, 13):
        for machine in ("x86_64", "aarch64"):
            made = kernel.installed(for_version(minor, machine))
            assert made.thread_bytes <= 256
            assert made.frame_bytes <= 128
            assert made.code_bytes <= 128


@pytest.mark.parametrize("name", ["thread_frame", "frame_code", "frame_owner", "code_name"])
def test_a_layout_beyond_what_is_read_is_refused(name: str) -> None:
    layout = for_version(12, "x86_64")
    setattr(layout, name, 5000)
    with pytest.raises(UnavailableError):
        kernel.installed(layout)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 65535), min_size=40, max_size=40))
def test_any_layout_is_installed_within_bounds_or_refused(values: list[int]) -> None:
    layout = for_version(12, "x86_64")
    for (name, *_), value in zip(layout._fields_, values, strict=False):
        setattr(layout, name, value)
    try:
        made = kernel.installed(layout)
    except UnavailableError:
        return
    assert made.thread_bytes <= 256
    assert made.frame_bytes <= 128
    assert made.code_bytes <= 128
    for name in ("code_first_line", "code_file", "code_name", "code_lines"):
        assert 0 <= getattr(layout, name) - made.code_from <= made.code_bytes - 8


# ---- in the kernel


@pytest.fixture
def loaded() -> Iterator[PythonStacks]:
    made = PythonStacks(lambda record: None, 99)
    yield made
    made.close()


def test_it_loads_and_is_on_its_hooks(loaded: PythonStacks) -> None:
    loaded.load_waits()
    names = loaded.programs.keys()
    assert names == {
        "on_sample",
        "on_python_fork",
        "on_python_exec",
        "on_python_exit",
        "identify",
        "on_visit",
    }
    assert {name[:15] for name in names} <= {name for _, name in programs()}
    assert not loaded.missing
    loaded.visit(10**8)


def test_more_kinds_of_interpreter_than_there_is_room_for_are_refused(
    loaded: PythonStacks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "_MAX_LAYOUTS", 3)
    layout = for_version(12, "x86_64")
    assert [loaded.install(layout) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(UnavailableError, match="more than 3 kinds"):
        loaded.install(layout)


def test_there_is_room_for_as_many_kinds_as_there_may_be(loaded: PythonStacks) -> None:
    layout = for_version(12, "x86_64")
    for _ in range(kernel._MAX_LAYOUTS):
        last = loaded.install(layout)
    assert last == kernel._MAX_LAYOUTS - 1


def test_rows_are_cleared_and_used_again_after_a_new_beginning() -> None:
    """By then what was counted in them has been read, and no program is at one of them any more."""
    records: list[Record] = []
    made = PythonStacks(records.append, 499)
    command = "import time\nprint(flush=True)\nwhile True: pass"
    program = subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)
    try:
        assert program.stdout is not None
        program.stdout.readline()
        stand_in(made, records, program.pid)
        row = first_row(made, records)
        assert {each[0] for each in made.counted()} == {row}
        assert made.recycle() == []
        made.renew()
        # It is counted anew, in another row; what the old one has had is read before that is cleared.
        other = first_row(made, records, but=row)
        assert other != row
        list(made.counted())
        made._renewed_at = time.monotonic()
        assert made.recycle() == []
        time.sleep(kernel._GRACE_S)
        list(made.counted())
        assert row in made.recycle()
        assert row not in {each for each, _, _ in made.counted()}
        assert row in made._free
    finally:
        program.kill()
        program.communicate()
        made.close()


def stand_in(made: PythonStacks, records: list[Record], pid: int) -> None:
    """Answer for the process as the sampler would."""
    found = Interpreters().find(pid)
    assert isinstance(found, Interpreter)
    made.want(pid)
    ask = wait_for(made, records, Ask)[-1]
    assert isinstance(ask, Ask)
    made.answer(ask.space, "resolved", found.runtime, made.install(found.layout))


def first_row(made: PythonStacks, records: list[Record], but: int = -1) -> int:
    records[:] = [record for record in records if not isinstance(record, kernel.Stack) or record.row != but]
    (stack, *_) = wait_for(made, records, kernel.Stack)
    assert isinstance(stack, kernel.Stack)
    return stack.row


def wait_for(made: PythonStacks, records: list[Record], kind: type) -> list[kernel.Stack | Ask]:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        made.consume()
        found = [record for record in records if isinstance(record, kind)]
        if found:
            return found  # type: ignore[return-value]
        time.sleep(0.01)
    raise TimeoutError(f"no {kind.__name__}")


# ---- what is left


def ids(kind: str) -> set[int]:
    """Of the kernel's BPF programs, maps or links."""
    shown = subprocess.run(["bpftool", "-j", kind, "show"], capture_output=True, check=True)
    return {each["id"] for each in json.loads(shown.stdout)}


def held_by(pid: int) -> dict[str, set[int]]:
    """Ids of the BPF objects that a process holds."""
    found: dict[str, set[int]] = {"prog": set(), "map": set(), "link": set()}
    for file in Path(f"/proc/{pid}/fdinfo").iterdir():
        for line in file.read_text().splitlines():
            name, _, number = line.partition(":")
            if name in ("prog_id", "map_id", "link_id"):
                found[name.removesuffix("_id")].add(int(number))
    return found


SAMPLING = """
import gc
from expanse_ebpf.python_stacks.sampler import Sampler
sampler = Sampler(waits_hz=4)
sampler.visit()
print(*sampler.programs, flush=True)
input()
sampler.close()
del sampler  # memory that is mapped goes with it
gc.collect()
print(flush=True)
input()
"""


@pytest.mark.parametrize("way", ["close", "kill -9"])
def test_nothing_is_left_in_the_kernel(way: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SAMPLING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        assert "on_sample" in process.stdout.readline()
        held = held_by(process.pid)
        assert all(held[kind] & ids(kind) for kind in held)
        if way == "close":
            process.stdin.write("\n")
            process.stdin.flush()
            process.stdout.readline()
            assert not any(held_by(process.pid).values())
            assert not any("perf_event" in str(fd) for fd in descriptors(process.pid))
        else:
            process.kill()
            process.wait()
        wait_until_gone(held["prog"])
        deadline = time.monotonic() + 10
        while left := {kind: held[kind] & ids(kind) for kind in ("map", "link") if held[kind] & ids(kind)}:
            assert time.monotonic() < deadline, f"still in the kernel: {left}"
            time.sleep(0.1)
        process.kill()


def descriptors(pid: int) -> set[str]:
    return {str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()}


def test_what_cannot_be_loaded_whole_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: PythonStacks) -> None:
        raise UnavailableError("no CPU")

    before = programs_of(os.getpid())
    monkeypatch.setattr(PythonStacks, "follow_cpus", refuse)
    with pytest.raises(UnavailableError):
        PythonStacks(lambda record: None, 99)
    assert programs_of(os.getpid()) == before
