"""Layouts, against the header files of each version: for both machines, with and without a GIL."""

from __future__ import annotations

import functools
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.python_stacks.layouts import (
    COOKIE,
    DEBUG_OFFSETS_SIZE,
    NOWHERE,
    Layout,
    UnknownLayoutError,
    for_version,
    from_debug_offsets,
)
from tests.python_stacks.interpreters import debian_headers

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).parent / "offsets.c"
COMPILERS = {"x86_64": "gcc", "aarch64": "aarch64-linux-gnu-gcc"}
if os.uname().machine == "aarch64":
    COMPILERS = {"aarch64": "gcc"}


class Headers(NamedTuple):
    """The header files of one CPython."""

    minor: int
    folder: Path | None  # None: of Debian's package
    free_threaded: bool = False


def all_headers() -> dict[str, Headers]:
    found = {}
    for folder in (Path.home() / ".pyenv/versions").glob("3.*/include/python3.*"):
        minor = int(folder.name.removeprefix("python3.").rstrip("m"))
        if 8 <= minor <= 15:
            found[f"3.{minor} pyenv"] = Headers(minor, folder)
    for minor in (13, 14, 15):
        found[f"3.{minor} debian"] = Headers(minor, None)
        found[f"3.{minor}t debian"] = Headers(minor, None, free_threaded=True)
    return found


HEADERS = all_headers()


class Compiled(NamedTuple):
    """What the headers say."""

    values: dict[str, int]
    block: bytes  # the beginning of _PyRuntime


@functools.cache
def compiled(headers: Headers, machine: str) -> Compiled:
    folder = headers.folder or debian_headers() / f"python3.{headers.minor}"
    options = ["-std=gnu11", f"-I{folder}", f"-I{folder}/internal"]
    if headers.free_threaded:
        options.append("-DPy_GIL_DISABLED=1")
    with tempfile.TemporaryDirectory() as scratch:
        if headers.folder is None:
            # pyconfig.h lies in a folder named for the machine; what it says holds for all that have 64 bits.
            (config,) = folder.parent.glob(f"*-linux-gnu/{folder.name}")
            shutil.copytree(config, f"{scratch}/{machine}-linux-gnu/{folder.name}")
            options += [f"-I{folder.parent}", f"-I{scratch}"]
        output = Path(scratch) / "offsets.o"
        subprocess.run([COMPILERS[machine], *options, "-c", SOURCE, "-o", output], check=True)
        with open(output, "rb") as file:
            return read_constants(ELFFile(file))


def read_constants(elf: ELFFile) -> Compiled:
    values, bits, block = {}, {}, b""
    for symbol in elf.get_section_by_name(".symtab").iter_symbols():
        if not re.match("layout_|bits_|debug_offsets", symbol.name):
            continue
        data = elf.get_section(symbol["st_shndx"]).data()[symbol["st_value"] :][: symbol["st_size"]]
        if symbol.name == "debug_offsets":
            block = data[:DEBUG_OFFSETS_SIZE]
        elif symbol.name.startswith("bits_"):
            bits[symbol.name.removeprefix("bits_")] = data
        else:
            values[symbol.name.removeprefix("layout_")] = int.from_bytes(data, "little")

    def field(name: str, place: int) -> int:
        return int.from_bytes(bits[name][place : place + 4], "little")

    kind = field("kind", values["text_state"])
    values["text_kind_shift"] = (kind & -kind).bit_length() - 1
    assert kind == 7 << values["text_kind_shift"]
    values["text_ascii"] = field("ascii", values["text_state"])
    if "active" in bits:
        values["thread_active"] = field("active", values["thread_status"])
    return Compiled(values, block)


def as_dict(layout: Layout) -> dict[str, int]:
    return {name: getattr(layout, name) for name, _ in layout._fields_}


@pytest.mark.parametrize("machine", COMPILERS)
@pytest.mark.parametrize("name", HEADERS)
def test_a_layout_is_what_the_headers_say(name: str, machine: str) -> None:
    headers = HEADERS[name]
    truth = compiled(headers, machine)
    if headers.minor <= 12:
        layout = for_version(headers.minor, machine)
    else:
        layout = from_debug_offsets(truth.block, machine)
    ours = as_dict(layout)
    unit = ours.pop("instruction_unit")
    assert ours == truth.values
    assert unit == (2 if headers.minor == 10 else 1)  # f_lasti of 3.10 counts instructions of two bytes
    assert headers.minor == layout.minor
    assert headers.free_threaded == layout.free_threaded


def test_the_struct_of_the_kernel_side_has_the_same_fields() -> None:
    header = (ROOT / "bpf/include/python_layout.h").read_text(encoding="utf-8")
    body = header[header.index("struct python_layout {") : header.index("};")]
    assert re.findall(r"\bu32 (\w+);", body) == [name for name, _ in Layout._fields_]
    assert int(re.search(r"#define NOWHERE (\w+)", header)[1], 16) == NOWHERE


def test_musl_has_the_same_mutex_everywhere() -> None:
    assert as_dict(for_version(9, "aarch64", musl=True)) == as_dict(for_version(9, "x86_64"))
    assert for_version(9, "aarch64").runtime_current == for_version(9, "x86_64").runtime_current + 16


@pytest.mark.parametrize("minor", [0, 7, 13, 16])
def test_other_versions_have_no_table(minor: int) -> None:
    with pytest.raises(UnknownLayoutError, match=rf"3\.{minor}"):
        for_version(minor, "x86_64")


# ---- debug offsets that are not what they should be


def a_block(version: int = 0x030D00F0, free_threaded: int = 0, entries: bytes = bytes(864)) -> bytes:
    return struct.pack("<8sQQ", COOKIE, version, free_threaded) + entries


def test_a_well_formed_block_is_taken() -> None:
    assert from_debug_offsets(a_block(), "x86_64").minor == 13


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"", "no debug offsets"),
        (b"xdebugpx" + a_block()[8:], "no debug offsets"),
        (a_block()[:23], "no debug offsets"),
        (a_block()[:24], "cut short"),
        (a_block()[:560], "cut short"),
        (a_block(0x030C01F0), "unknown version"),
        (a_block(0x031000F0), "unknown version"),
        (a_block(0x040D00F0), "unknown version"),
        (a_block(0x030F00B2), "unknown version"),  # a beta
        (a_block(free_threaded=2), "unknown version"),
        (a_block(entries=b"\xff" * 864), "beyond reason"),
        (a_block(entries=struct.pack("<108Q", *range(108, 0, -1))), "contradict"),
    ],
)
def test_other_blocks_are_refused(block: bytes, why: str) -> None:
    with pytest.raises(UnknownLayoutError, match=why):
        from_debug_offsets(block, "x86_64")


@given(
    st.sampled_from([13, 14, 15]),
    st.lists(st.one_of(st.integers(0, 70_000), st.integers(0, 2**64 - 1)), max_size=108),
    st.integers(0, 3),
)
def test_no_block_breaks_it(minor: int, entries: list[int], free_threaded: int) -> None:
    block = a_block(3 << 24 | minor << 16 | 0xF0, free_threaded, struct.pack(f"<{len(entries)}Q", *entries))
    try:
        layout = from_debug_offsets(block, "aarch64")
    except UnknownLayoutError:
        return
    for name, value in as_dict(layout).items():
        assert value == NOWHERE or value < 1 << 17, name
