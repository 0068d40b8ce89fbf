"""Names of functions in real processes, as BCC finds them."""

from __future__ import annotations

import ctypes
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.tracing import symbols
from expanse_ebpf.tracing.symbols import Demangler, Mapping, executable, kernel_name, lines
from tests.tracing.host_stubs import NAMES, compile_program, compile_with_library, running

COMMAND = [sys.executable, "-EsP", "-m", "expanse_ebpf.tracing.symbols"]


def look_up(pid: int, wanted: Iterable[int | str]) -> list[dict[str, Any]]:
    text = "".join(f"{each}\n" for each in wanted)
    result = subprocess.run([*COMMAND, str(pid)], input=text, text=True, capture_output=True, check=True)
    assert result.stderr == ""
    return [json.loads(line) for line in result.stdout.splitlines()]


def names(found: list[dict[str, Any]]) -> list[str]:
    return [each["name"] for each in found]


@pytest.mark.parametrize("linked", [["-pie"], ["-no-pie"], ["-static"], ["-static-pie"]], ids=lambda o: o[0])
def test_host_stubs_in_a_program_have_their_kernels_names(linked: list[str], tmp_path: Path) -> None:
    program = compile_program(tmp_path, *linked)
    with running([program]) as (pid, addresses):
        found = look_up(pid, addresses)
    assert names(found) == NAMES
    assert [each["address"] for each in found] == addresses
    assert {(each["module"], each["reason"]) for each in found} == {(str(program), "")}


def test_a_stub_in_a_library_has_the_same_offset_wherever_it_is_mapped(tmp_path: Path) -> None:
    program, library = compile_with_library(tmp_path)
    with running([program]) as (one, there), running([program]) as (other, here):
        found, again = look_up(one, there), look_up(other, here)
    assert there != here
    assert names(found) == NAMES
    assert {each["module"] for each in found} == {str(library)}
    assert [each["offset"] for each in found] == [each["offset"] for each in again]
    code = library.read_bytes()
    # The stubs are told apart by how many nops they have.
    for nops, each in enumerate(found, 1):
        assert code[each["offset"] :].lstrip(bytes.fromhex("f30f1efa")).startswith(b"\x90" * nops + b"\xc3")


def test_an_address_behind_the_beginning_is_marked(tmp_path: Path) -> None:
    with running([compile_program(tmp_path)]) as (pid, addresses):
        found = look_up(pid, [addresses[3] + 2, hex(addresses[3])])
    assert names(found) == ["plain", "plain"]
    assert [each["reason"] for each in found] == ["2 bytes after the beginning of that function", ""]


def test_a_stripped_program_has_no_symbols(tmp_path: Path) -> None:
    program = compile_program(tmp_path, "-s")
    with running([program]) as (pid, addresses):
        found = look_up(pid, addresses[:1])
    assert (found[0]["name"], found[0]["module"], found[0]["reason"]) == ("", str(program), "no symbol")
    assert 0 < found[0]["offset"] < program.stat().st_size


def test_addresses_that_are_no_code_say_so(tmp_path: Path) -> None:
    with running([compile_program(tmp_path)]) as (pid, _):
        found = look_up(pid, [0, 4096, (1 << 64) - 1])
    assert names(found) == ["", "", ""]
    assert {each["reason"] for each in found} == {"its code is in no file"}


def test_of_a_process_that_has_ended_there_is_nothing() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    (found,) = look_up(process.pid, [4096])
    assert found == {
        "address": 4096,
        "name": "",
        "module": "",
        "offset": 0,
        "reason": "the process has ended",
    }


def test_a_library_that_was_replaced_is_not_taken_for_the_new_one(tmp_path: Path) -> None:
    program, library = compile_with_library(tmp_path)
    other = tmp_path / "other"
    other.mkdir()
    stranger = library.read_bytes().replace(b"plain", b"wrong")
    with running([program]) as (pid, addresses):
        (other / "new").write_bytes(stranger)
        (other / "new").rename(library)
        replaced = look_up(pid, addresses)
        library.unlink()
        deleted = look_up(pid, addresses)
    assert replaced == deleted
    assert {(each["name"], each["reason"]) for each in deleted} == {("", "its file has been deleted")}
    assert {each["module"] for each in deleted} == {f"{library} (deleted)"}


def test_a_process_in_a_container_has_its_own_files(tmp_path: Path) -> None:
    """The same path is another file outside."""
    program, library = compile_with_library(tmp_path)
    inside = tmp_path / "inside.so"
    library.rename(inside)
    library.write_bytes(inside.read_bytes().replace(b"plain", b"wrong"))
    script = f"mount --make-rprivate / && mount --bind {inside} {library} && exec {program}"
    with running(["unshare", "-m", "sh", "-c", script]) as (pid, addresses):
        found = look_up(pid, addresses)
    assert names(found) == NAMES
    assert {each["module"] for each in found} == {str(library)}


def test_a_file_that_is_only_inside_a_container_is_found(tmp_path: Path) -> None:
    program = compile_program(tmp_path)
    room = tmp_path / "room"
    room.mkdir()
    script = f"mount -t tmpfs none {room} && cp {program} {room}/only_here && exec {room}/only_here"
    with running(["unshare", "-m", "--propagation", "private", "sh", "-c", script]) as (pid, addresses):
        assert not (room / "only_here").exists()
        assert names(look_up(pid, addresses)) == NAMES


@pytest.mark.parametrize("damage", ["no end", "huge sections", "noise"])
def test_a_damaged_file_gives_no_wrong_names(damage: str, tmp_path: Path) -> None:
    program, library = compile_with_library(tmp_path)
    size = library.stat().st_size
    changes = {
        "no end": (40, (size - 8).to_bytes(8, "little")),  # where the sections are
        "huge sections": (58, b"\xff" * 4),  # how large each is, how many
        "noise": (size - 2000, os.urandom(2000)),  # the sections themselves
    }
    with running([program]) as (pid, addresses):
        with open(library, "r+b") as file:  # in place: it stays the file that is mapped
            place, data = changes[damage]
            os.pwrite(file.fileno(), data, place)
        text = "".join(f"{each}\n" for each in addresses)
        result = subprocess.run([*COMMAND, str(pid)], input=text, text=True, capture_output=True, check=False)
    assert result.returncode in (0, -6, -7, -11)  # where it crashes, it alone does
    for line in result.stdout.splitlines():
        assert json.loads(line)["name"] in ("", *NAMES)


def test_without_bcc_the_place_is_told_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(symbols, "_LIBRARY", "libbcc-that-is-not-there.so.0")
    program = compile_program(tmp_path)
    with running([program]) as (pid, addresses):
        (found,) = symbols.answers(pid, addresses[:1])
        assert found["reason"] == "BCC is not installed: apt-get install python3-bpfcc"
        assert found["module"] == str(program)
        (known,) = look_up(pid, addresses[:1])
        assert found["offset"] == known["offset"]


def test_names_are_demangled(tmp_path: Path) -> None:
    found = look_up(os.getpid(), ["_Z3addPf", "_Zbroken", "_ZN2ns5relu6IfLi4EEEvPT_"])
    assert names(found) == ["add(float*)", "_Zbroken", "void ns::relu6<float, 4>(float*)"]
    assert found[0]["mangled"] == "_Z3addPf"


@pytest.mark.parametrize(
    ("function", "kernel"),
    [
        ("add(float*)", "add(float*)"),
        ("__device_stub__Z3addPf", "add(float*)"),
        ("__device_stub__Z3addPf(float*)", "add(float*)"),
        ("ns::__device_stub__ZN2ns3addEPf(float*)", "ns::add(float*)"),
        ("__device_stub__add(float*)", "add(float*)"),
        ("__device_stub__Zbroken", "_Zbroken"),
        ("", ""),
    ],
)
def test_a_stubs_prefix_is_taken_off(function: str, kernel: str) -> None:
    assert kernel_name(function, Demangler()) == kernel


def test_executable_mappings_are_read() -> None:
    maps = (
        b"00400000-00401000 r--p 00000000 fe:00 7   /usr/bin/a\n"
        b"00401000-00402000 r-xp 00001000 fe:00 7   /usr/bin/a b\x1b\n"
        b"7f0000000000-7f0000001000 rwxp 00000000 00:00 0 \n"
        b"7f0000002000-7f0000003000 r-xp 00000000 00:00 0    [vdso]\n"
        b"garbage\n"
    )
    assert executable(maps) == [
        Mapping(0x401000, 0x402000, 0x1000, "/usr/bin/a b␛"),
        Mapping(0x7F0000000000, 0x7F0000001000, 0, ""),
        Mapping(0x7F0000002000, 0x7F0000003000, 0, ""),
    ]


@given(st.text())
def test_whatever_is_asked_it_is_a_bounded_list(text: str) -> None:
    for each in lines(io.StringIO(text)):
        assert isinstance(each, str) or 0 <= each < 1 << 64


def test_no_more_is_answered_than_is_bounded() -> None:
    assert list(lines(io.StringIO("0x10\n\nx\n-1\n16\n_Z1av\n"))) == [16, 16, "_Z1av"]
    assert len(list(lines(io.StringIO("1\n" * 5000)))) == symbols.MOST_LINES


def test_it_lives_within_limits_and_no_longer_than_who_asks() -> None:
    script = """
import ctypes, resource
from expanse_ebpf.tracing.symbols import _limit
_limit()
signal = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(signal))  # PR_GET_PDEATHSIG
print(signal.value, *(resource.getrlimit(what) for what in (
    resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_CORE)))
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.split() == f"9 {(1 << 30, 1 << 30)} {(10, 10)} {(0, 0)}".split()


def test_bcc_is_here() -> None:
    """Or the tests above would tell little."""
    assert ctypes.CDLL("libbcc.so.0").bcc_symcache_new
