"""Names that a window collects: without waiting, whatever becomes of who looks them up."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.tracing import kernel_names
from expanse_ebpf.tracing.kernel_names import KernelName, KernelNames
from tests.tracing.host_stubs import NAMES, compile_program, compile_with_library, running


@pytest.fixture
def names() -> Iterator[KernelNames]:
    with contextlib.closing(KernelNames()) as made:
        yield made


def lookups() -> list[int]:
    """The processes that look something up for this one."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return [
        int(pid)
        for pid in children
        if b"expanse_ebpf.tracing.symbols" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def wait_until_looking() -> int:
    ends_at = time.monotonic() + 5
    while not (found := lookups()):
        assert time.monotonic() < ends_at
    return found[0]


def test_addresses_become_names(names: KernelNames, tmp_path: Path) -> None:
    program = compile_program(tmp_path)
    with running([program]) as (pid, addresses):
        for address in (*addresses, addresses[0], 16):
            names.want(pid, address)
        assert names.name(pid, addresses[0], False).reason == "the window ended before it was looked up"
        names.finish(20)
    found = [names.name(pid, address, False) for address in addresses]
    assert [each.name for each in found] == NAMES
    assert {(each.module, each.reason) for each in found} == {(str(program), "")}
    assert names.name(pid, 16, False) == KernelName("", "", 0, "its code is in no file")
    assert lookups() == []


def test_a_kernel_of_several_processes_is_one(names: KernelNames, tmp_path: Path) -> None:
    program, _ = compile_with_library(tmp_path)
    with running([program]) as (one, there), running([program]) as (other, here):
        for pid, addresses in ((one, there), (other, here)):
            for address in addresses:
                names.want(pid, address)
        names.finish(20)
    found = {names.name(one, address, False) for address in there}
    assert found == {names.name(other, address, False) for address in here}
    assert len({each.key for each in found}) == len(NAMES)


def test_kernels_without_names_are_told_apart(names: KernelNames, tmp_path: Path) -> None:
    with running([compile_program(tmp_path, "-s")]) as (pid, addresses):
        for address in addresses:
            names.want(pid, address)
        names.finish(20)
    found = [names.name(pid, address, False) for address in addresses]
    assert {(each.name, each.reason) for each in found} == {("", "no symbol")}
    assert len({each.key for each in found}) == len(addresses)


def test_looking_up_never_waits(names: KernelNames, tmp_path: Path) -> None:
    with running([compile_program(tmp_path)]) as (pid, addresses):
        names.want(pid, addresses[0])
        names.resolve()
        looking = wait_until_looking()
        os.kill(looking, signal.SIGSTOP)
        begin = time.monotonic()
        for _ in range(10):
            names.want(pid, addresses[1])
            names.resolve()
        assert time.monotonic() - begin < 1
        assert names.name(pid, addresses[0], False).name == ""
        os.kill(looking, signal.SIGCONT)
        names.finish(20)
    assert [names.name(pid, address, False).name for address in addresses[:2]] == NAMES[:2]


def test_the_end_of_who_looks_up_is_the_reason_of_its_addresses_alone(
    names: KernelNames, tmp_path: Path
) -> None:
    program = compile_program(tmp_path)
    with running([program]) as (one, there), running([program]) as (other, here):
        names.want(one, there[0])
        names.resolve()
        looking = wait_until_looking()
        os.kill(looking, signal.SIGSEGV)
        names.want(other, here[0])
        names.finish(20)
    assert names.name(one, there[0], False).reason == "reading its file ended with signal 11"
    assert names.name(other, here[0], False).name == NAMES[0]


def test_who_takes_too_long_is_ended(
    names: KernelNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running([compile_program(tmp_path)]) as (pid, addresses):
        names.want(pid, addresses[0])
        monkeypatch.setattr(kernel_names, "_DEADLINE_S", 0.5)
        names.resolve()
        os.kill(wait_until_looking(), signal.SIGSTOP)
        names.finish(20)
    assert names.name(pid, addresses[0], False).reason == "its file took more than 0 s to read"
    assert lookups() == []


def test_no_more_than_two_look_up_at_once(names: KernelNames) -> None:
    for pid in range(1, 6):
        names.want(pid, 16)
    names.resolve()
    os.kill(wait_until_looking(), signal.SIGSTOP)
    names.resolve()
    looking = lookups()
    assert 1 <= len(looking) <= 2
    for pid in looking:
        os.kill(pid, signal.SIGCONT)
    names.finish(20)
    assert {names.name(pid, 16, False).name for pid in range(1, 6)} == {""}


def test_what_is_still_looking_ends_with_the_window(names: KernelNames) -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    names.want(os.getpid(), 16)
    names.resolve()
    os.kill(wait_until_looking(), signal.SIGSTOP)
    names.close()
    assert lookups() == []
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    assert names.name(os.getpid(), 16, False).reason == "the window ended before it was looked up"


def test_handles_have_the_names_that_their_loads_gave(names: KernelNames) -> None:
    names.note_handle(7, 0x500, "_Z3addPf")
    names.note_handle(7, 0x600, "triton_kernel\n")
    names.note_handle(8, 0x500, "_Zbroken")
    assert names.name(7, 0x500, True).name == "_Z3addPf"
    names.finish(20)
    assert names.name(7, 0x500, True) == KernelName("add(float*)", "", 0, "")
    assert names.name(7, 0x600, True).name == "triton_kernel␊"
    assert names.name(8, 0x500, True).name == "_Zbroken"
    assert names.name(8, 0x600, True).reason == "its module was loaded before the window"
    names.note_handle(7, 0x500, "another")  # the handle is used again
    assert names.name(7, 0x500, True).name == "another"


def test_a_name_that_fits_on_no_line_is_left_as_it_is(names: KernelNames) -> None:
    names.note_handle(7, 1, "_Z3addPf\n16")
    names.note_handle(7, 2, "_Z" + "9" * 100_000)
    names.resolve()
    assert lookups() == []
    assert names.name(7, 1, True).name == "_Z3addPf␊16"
    assert len(names.name(7, 2, True).name) == 1024


def test_what_is_kept_is_bounded(names: KernelNames, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_names, "MOST_KERNELS", 3)
    for address in range(16, 21):
        names.want(os.getpid(), address)
        names.note_handle(7, address, f"kernel_{address}")
    names.finish(20)
    assert names.name(os.getpid(), 18, False).reason == "its code is in no file"
    assert names.name(os.getpid(), 19, False).reason.startswith("more than ")
    assert [names.name(7, address, True).name for address in (18, 19)] == ["kernel_18", ""]


def test_more_than_one_process_answers_are_looked_up_in_turns(names: KernelNames) -> None:
    addresses = range(16, 16 + kernel_names.MOST_LINES + 10)
    for address in addresses:
        names.want(os.getpid(), address)
    names.finish(30)
    assert {names.name(os.getpid(), address, False).reason for address in addresses} == {
        "its code is in no file"
    }


def test_where_nothing_can_be_started_that_is_the_reason(
    names: KernelNames, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    names.want(os.getpid(), 16)
    names.resolve()
    assert names.name(os.getpid(), 16, False).reason == "symbols cannot be read: No such file or directory"
    assert len(list(Path("/proc/self/fd").iterdir())) == files
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        names.want(os.getpid(), 17)
        names.resolve()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert names.name(os.getpid(), 17, False).reason == "symbols cannot be read: Too many open files"


def test_answers_that_were_not_asked_for_are_not_taken(
    names: KernelNames, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = tmp_path / "python"
    stand_in.write_text(
        """#!/bin/sh
echo '{"address": 99, "name": "x", "module": "", "offset": 0, "reason": ""}'
echo '{"address": [16], "name": "x"}'
echo '{"address": 16, "name": 5}'
echo '{"address": 17, "name": "x", "module": null, "offset": 0, "reason": ""}'
echo '[]'
echo 'nonsense'
echo '{"address": 18, "name": "kernel\\\\u001b[2J", "module": "/m", "offset": 3, "reason": ""}'
printf '{"address": 19'
"""
    )
    stand_in.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(stand_in))
    for address in range(16, 20):
        names.want(1, address)
    names.finish(20)
    assert names.name(1, 18, False) == KernelName("kernel␛[2J", "/m", 3, "")
    reasons = {names.name(1, address, False).reason for address in (16, 19)}
    assert reasons == {"reading its file ended with status 0"}
    assert names.name(1, 99, False).name == ""
