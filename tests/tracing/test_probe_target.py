"""The function that a probe is tried on: its code, what it costs, and that real probes find it."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.perf import SYSCALLS
from expanse_ebpf.tracing import probe_target
from expanse_ebpf.tracing.probe_target import CODE, ProbeTarget

SOURCES = {
    "x86_64": {
        "push": "push %rbp; mov %rsp, %rbp; pop %rbp; ret",
        "room": "sub $8, %rsp; add $8, %rsp; ret",
        "loop": """
            .equ function, loop - 0x20
            loop: push %rbx; mov %rdi, %rbx; test %rbx, %rbx; je 2f
            1: call function; dec %rbx; jnz 1b
            2: pop %rbx; ret""",
    },
    "aarch64": {
        "push": "stp x29, x30, [sp, #-16]!; mov x29, sp; ldp x29, x30, [sp], #16; ret",
        "room": "sub sp, sp, #16; add sp, sp, #16; ret",
        "loop": """
            .equ function, loop - 0x20
            loop: stp x29, x30, [sp, #-32]!; mov x29, sp; str x19, [sp, #16]; mov x19, x0; cbz x19, 2f
            1: bl function; subs x19, x19, #1; b.ne 1b
            2: ldr x19, [sp, #16]; ldp x29, x30, [sp], #32; ret""",
    },
}


@pytest.mark.parametrize("part", ["push", "room", "loop"])
@pytest.mark.parametrize("machine", SOURCES)
def test_the_machine_code_is_what_an_assembler_makes(machine: str, part: str, tmp_path: Path) -> None:
    compiled, section = tmp_path / "code.o", tmp_path / "text"
    # The function stands before the loop, as in the file.
    source = f".zero 0x20\n{SOURCES[machine][part]}\n"
    clang = ["clang", f"--target={machine}-linux-gnu", "-c", "-x", "assembler", "-o", compiled, "-"]
    subprocess.run(clang, input=source, text=True, check=True)
    objcopy = shutil.which("llvm-objcopy") or "llvm-objcopy-14"
    subprocess.run([objcopy, "-O", "binary", "--only-section=.text", compiled, section], check=True)
    assert section.read_bytes()[0x20:].hex() == getattr(CODE[machine], part).hex()


@pytest.fixture(params=[False, True], ids=["emulated", "single-stepped"])
def target(request: pytest.FixtureRequest) -> Iterator[ProbeTarget]:
    with ProbeTarget(single_step=request.param) as made:
        yield made


@pytest.fixture
def hits(target: ProbeTarget) -> Iterator[PerfProbe]:
    with PerfProbe(target.path, target.offset) as probe:
        yield probe


class PerfProbe:
    """A uprobe by perf_event_open(2) that counts hits of this thread."""

    def __init__(self, path: str, offset: int) -> None:
        name = ctypes.create_string_buffer(os.fsencode(path))
        number = int(Path("/sys/bus/event_source/devices/uprobe/type").read_text())
        # struct perf_event_attr up to config2 (PERF_ATTR_SIZE_VER1): uprobe_path and probe_offset
        attributes = struct.pack(
            "=IIQQQQQIIQQ", number, 72, 0, 0, 0, 0, 0, 0, 0, ctypes.addressof(name), offset
        )
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.syscall(SYSCALLS[platform.machine()], attributes, 0, -1, -1, ctypes.c_ulong(8))
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "perf_event_open")

    def count(self) -> int:
        return int.from_bytes(os.read(self.fd, 8), sys.byteorder)

    def __enter__(self) -> PerfProbe:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def test_a_call_costs_a_few_nanoseconds(target: ProbeTarget) -> None:
    assert 0.2 < target.measure(500_000) < 100


def test_a_probe_sees_every_call(target: ProbeTarget, hits: PerfProbe) -> None:
    target.call()
    assert hits.count() == 1
    target.call_loop(1000)
    assert hits.count() == 1001
    target.call_loop(0)
    target.call_loop(-1)
    assert hits.count() == 1001


def test_the_loop_calls_as_often_as_measure_says(target: ProbeTarget, hits: PerfProbe) -> None:
    target.measure(5000)
    assert hits.count() == 5000
    target.measure(1)
    assert hits.count() == 5005  # a call in each round


def test_a_probe_shows_in_what_a_call_takes(target: ProbeTarget) -> None:
    without = target.measure(500_000)
    with PerfProbe(target.path, target.offset):
        probed = target.measure(5000)
    assert probed > without + 50
    assert target.measure(500_000) < without + 50


def test_other_threads_run_while_it_loops(target: ProbeTarget) -> None:
    with PerfProbe(target.path, target.offset) as probe:
        looping = threading.Thread(target=target.call_loop, args=(50_000,))
        looping.start()
        steps = 0
        while looping.is_alive():
            steps += 1
        looping.join()
        assert probe.count() == 0  # the probe counts this thread alone
    assert steps > 100


@pytest.mark.parametrize(("single_step", "part"), [(False, "push"), (True, "room")])
def test_the_function_stands_at_its_offset(single_step: bool, part: str) -> None:
    code: bytes = getattr(CODE[platform.machine()], part)
    with ProbeTarget(single_step=single_step) as target:
        assert Path(target.path).read_bytes()[target.offset :].startswith(code)


def open_files() -> set[str]:
    return {file.name for file in Path("/proc/self/fd").iterdir()}


def test_it_is_this_processs_alone_and_gone_afterwards() -> None:
    files = open_files()
    target = ProbeTarget()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "probe-target" in line]
    assert [line.split()[1] for line in mapped] == ["r-xp"]
    assert not os.get_inheritable(int(target.path.rpartition("/")[2]))
    target.close()
    target.close()
    assert "probe-target" not in Path("/proc/self/maps").read_text()
    assert open_files() == files
    for call in (target.call, lambda: target.call_loop(1), lambda: target.measure(1)):
        with pytest.raises(ValueError, match="no longer there"):
            call()


def no_memfd(*_: object) -> int:
    raise OSError(errno.EACCES, os.strerror(errno.EACCES))


def test_without_memfds_it_is_a_file_without_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    with ProbeTarget() as target:
        assert "(deleted)" in str(Path(target.path).readlink())
        with PerfProbe(target.path, target.offset) as probe:
            target.call_loop(10)
            assert probe.count() == 10


def test_where_files_may_not_be_executed_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    files = open_files()
    monkeypatch.setattr(os, "memfd_create", no_memfd)
    monkeypatch.setattr(probe_target, "_FOLDERS", ("/nowhere", "/proc"))
    with pytest.raises(UnavailableError, match=r"memfd: Permission denied.*/nowhere: No such file"):
        ProbeTarget()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", tmp_path], check=True)
    try:
        monkeypatch.setattr(probe_target, "_FOLDERS", (str(tmp_path), "/dev/shm"))
        with ProbeTarget() as target:
            assert str(Path(target.path).readlink()).startswith("/dev/shm")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    assert open_files() == files


def test_another_architecture_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(UnavailableError, match="riscv64"):
        ProbeTarget()
