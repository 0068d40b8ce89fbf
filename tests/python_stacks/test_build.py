"""What files are taken for: interpreters made of a few lines of C, so that each can be wrong in one way."""

from __future__ import annotations

import os
import random
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.python_stacks.build import Build, examine, shown, version_text
from expanse_ebpf.python_stacks.layouts import DEBUG_OFFSETS_SIZE, for_version

RUNTIME = 'char _PyRuntime[4096] __attribute__((section(".PyRuntime"))) = {CONTENT};'
COOKIE = """'x','d','e','b','u','g','p','y'"""
ARM64 = "aarch64-linux-gnu-gcc"

Compile = Callable[..., Path]


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    folder = tmp_path_factory.mktemp("builds")

    def make(source: str, *options: str, compiler: str = "gcc", name: str = "program") -> Path:
        output = folder / name
        command = [compiler, "-xc", "-", "-Os", "-shared", "-fPIC", "-o", output, *options]
        subprocess.run(command, input=source, text=True, check=True)
        return output

    return make


def examined(path: Path, name: str = "") -> Build:
    file = os.open(path, os.O_RDONLY)
    try:
        return examine(file, os.fsencode(name or path))
    finally:
        os.close(file)


def an_interpreter(content: str = "1", more: str = "") -> str:
    return RUNTIME.replace("CONTENT", content) + more


def debug_offsets(version: int, flag: int = 0) -> str:
    block = struct.pack("<QQ", version, flag)
    return ",".join([COOKIE, *(str(byte) for byte in block)])


@pytest.mark.parametrize("options", [(), ("-s",), ("-Wl,--hash-style=sysv",)])
def test_the_version_is_a_constant_from_3_11_on(compiled: Compile, options: tuple[str, ...]) -> None:
    source = an_interpreter(more="const unsigned long Py_Version = 0x030b07f0;")
    build = examined(compiled(source, *options))
    assert build.problem == ""
    assert build.version == "3.11.7"
    assert build.layout is not None
    assert bytes(build.layout) == bytes(for_version(11, os.uname().machine, musl=True))
    assert build.runtime % 32 == 0
    assert build.segments


@pytest.mark.parametrize(
    ("texts", "version"),
    [
        (("x.cpython-39-x86_64-linux-gnu.so", "Python-3.9.18"), "3.9.18"),
        (("cpython-310", "/opt/3.10.13"), "3.10.13"),
        (("cpython-38", "3.8.20+"), "3.8.20"),
        (("cpython-310",), "3.10"),
        (("cpython-310", "13.10.5", "5.3.10.2"), "3.10"),
        (("cpython-310", "/opt/3.10.13", "3.10.12"), "3.10"),  # they contradict each other
        (("cpython-310", "3.10.13-x"), "3.10"),
    ],
)
def test_before_that_it_stands_in_texts(compiled: Compile, texts: tuple[str, ...], version: str) -> None:
    constants = "".join(f'const char text{n}[] = "{text}";' for n, text in enumerate(texts))
    build = examined(compiled(an_interpreter(more=constants)))
    assert build.version == version
    assert build.layout is not None
    assert build.layout.minor == int(version.split(".")[1])


def test_from_3_13_on_the_debug_offsets_tell_it(compiled: Compile) -> None:
    build = examined(compiled(an_interpreter(debug_offsets(0x030E02F0, 1))))
    assert build.version == "3.14.2"
    assert build.layout is not None
    assert (build.layout.minor, build.layout.free_threaded) == (14, 1)


def test_the_section_is_enough(compiled: Compile) -> None:
    source = "static " + an_interpreter(debug_offsets(0x030D00F0)) + "char *use(void) { return _PyRuntime; }"
    build = examined(compiled(source, "-s"))
    assert build.version == "3.13.0"
    assert build.runtime


def test_the_machine_is_the_files(compiled: Compile) -> None:
    source = an_interpreter(more="const unsigned long Py_Version = 0x030b07f0;")
    build = examined(compiled(source, "-Wl,--no-as-needed", "-lc", compiler=ARM64))
    assert build.layout is not None
    assert build.layout.runtime_current == for_version(11, "x86_64").runtime_current + 16
    # Without that libc it is musl's.
    build = examined(compiled(source, "-nostdlib", compiler=ARM64))
    assert build.layout is not None
    assert build.layout.runtime_current == for_version(11, "x86_64").runtime_current


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        (an_interpreter(more='const char tag[] = "cpython-37";'), "no layout for Python 3.7: 3.8 to 3.15"),
        (an_interpreter(debug_offsets(0x031000F0)), "unknown version (0x31000f0): 3.8 to 3.15 are supported"),
        (an_interpreter(), "a Python whose version cannot be told"),
        (an_interpreter(more="const unsigned long Py_Version = 0x030d00f0;"), "no layout for Python 3.13"),
        (an_interpreter(f"{debug_offsets(0x030D00F0)},[40]=1,[46]=1"), "debug offsets beyond reason"),
        ("void Py_GetVersion(void) {}", "a Python older than 3.7"),
    ],
)
def test_what_cannot_be_read_says_so(compiled: Compile, source: str, problem: str) -> None:
    build = examined(compiled(source))
    assert problem in build.problem
    assert "\n" not in build.problem
    assert build.layout is None


def test_other_programs_are_none(compiled: Compile, tmp_path: Path) -> None:
    assert examined(Path("/bin/sh")) == Build()
    assert examined(compiled("extern char _PyRuntime[]; char *use(void) { return _PyRuntime; }")) == Build()
    for content in (b"", b"#!/bin/sh\n", bytes(100), b"\x7fELF"):
        (tmp_path / "file").write_bytes(content)
        assert examined(tmp_path / "file") == Build()


def test_a_damaged_python_is_told_from_other_files(tmp_path: Path) -> None:
    (tmp_path / "python3").write_bytes(b"\x7fELF\x01\x01" + bytes(100))
    assert examined(tmp_path / "python3").problem.endswith("not a 64-bit little-endian ELF file")
    (tmp_path / "python3.zip").write_bytes(b"PK" + bytes(100))
    assert examined(tmp_path / "python3.zip") == Build()


def test_a_program_that_waits_for_libpython(compiled: Compile) -> None:
    library = compiled("int answer;", "-Wl,-soname,libpython3.11.so.1.0", name="libpython3.11.so")
    options = ["-L", str(library.parent), "-Wl,--no-as-needed", "-lpython3.11"]
    assert examined(compiled("int other;", *options)).wants_python


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.randoms(use_true_random=False), changes=st.integers(1, 12))
def test_no_damage_breaks_it(compiled: Compile, tmp_path: Path, seed: random.Random, changes: int) -> None:
    path = tmp_path / "whole"
    if not path.exists():
        compiled(an_interpreter(debug_offsets(0x030E02F0))).rename(path)
    data = bytearray(path.read_bytes())
    (sections,) = struct.unpack_from("<Q", data, 40)
    runtime = data.index(b"xdebugpy")
    for _ in range(changes):
        near = seed.choice([0, 64, 0x200, sections, runtime, len(data) // 2])
        place = min(near + seed.randrange(DEBUG_OFFSETS_SIZE), len(data) - 1)
        data[place] = seed.choice([0, 1, 255, seed.randrange(256)])
    (tmp_path / "python3").write_bytes(data)
    build = examined(tmp_path / "python3")
    assert not (build.problem and build.layout)


@pytest.mark.parametrize(
    ("number", "text"),
    [(0x030B07F0, "3.11.7"), (0x030E00C2, "3.14.0rc2"), (0x031000A1, "3.16.0a1"), (0x030F01B3, "3.15.1b3")],
)
def test_versions_as_people_write_them(number: int, text: str) -> None:
    assert version_text(number) == text


def test_names_are_shown_in_one_line() -> None:
    assert shown(b"/tmp/a\nb\xff\xc3\xa9") == "/tmp/a\\nb\N{REPLACEMENT CHARACTER}é"
