"""Reading the device programs of cgroups, from the kernel itself."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.kernel import device_programs
from expanse_ebpf.kernel.libbpf import BpfError

from .device_assembler import ALLOW_MULTI, ALLOW_OVERRIDE, Allow, as_runc, as_systemd, attach, load, number
from .groups import Groups

NULL = as_systemd([Allow(major=1, minor=3)])
ZERO = as_runc([Allow(major=1, minor=5)])


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


def test_a_cgroup_without_programs_has_none(groups: Groups) -> None:
    assert device_programs.attached(str(groups.make())) == ()


def test_programs_of_ancestors_count_unless_they_are_overridden(groups: Groups) -> None:
    above = groups.make(name="a")
    below = groups.make(name="a/b/c")
    first = attach(NULL, above, ALLOW_MULTI)
    assert device_programs.attached(str(below)) == (first,)
    second = attach(ZERO, below, ALLOW_MULTI)
    assert sorted(device_programs.attached(str(below))) == sorted((first, second))
    assert device_programs.attached(str(above)) == (first,)

    above = groups.make(name="o")
    below = groups.make(name="o/b")
    attach(NULL, above, ALLOW_OVERRIDE)
    own = attach(ZERO, below, ALLOW_OVERRIDE)
    assert device_programs.attached(str(below)) == (own,)


def test_more_programs_than_usual_are_all_there(groups: Groups) -> None:
    group = groups.make()
    ids = {attach(NULL, group, ALLOW_MULTI) for _ in range(64)}
    assert set(device_programs.attached(str(group))) == ids
    assert len(ids) == 64


def test_instructions_are_those_that_were_loaded() -> None:
    for code in (NULL, ZERO):
        fd = load(code)
        try:
            assert device_programs.instructions(number(fd)) == code
        finally:
            os.close(fd)


def test_no_descriptor_is_left_open(groups: Groups) -> None:
    group = str(groups.make())
    own = attach(NULL, Path(group))
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(3):
        device_programs.attached(group)
        device_programs.instructions(own)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_program_that_is_gone_is_not_found() -> None:
    fd = load(NULL)
    gone = number(fd)
    os.close(fd)

    def instructions() -> int:
        try:
            device_programs.instructions(gone)
        except BpfError as error:
            return error.errno
        return 0

    # The kernel frees it a moment after the last descriptor is closed.
    while (code := instructions()) == 0:
        os.sched_yield()
    assert code == errno.ENOENT


def test_a_cgroup_that_is_gone_is_not_found(groups: Groups) -> None:
    with pytest.raises(FileNotFoundError):
        device_programs.attached(f"{groups.make()}/gone")


def test_what_is_no_cgroup_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BpfError) as caught:
        device_programs.attached(str(tmp_path))
    assert caught.value.errno == errno.EBADF


AS_NOBODY = """
import os, sys
from expanse_ebpf.kernel import device_programs, libbpf
libbpf.library()
os.setgroups([])
os.setuid(65534)
calls = (device_programs.attached, sys.argv[1]), (device_programs.instructions, int(sys.argv[2]))
for call, argument in calls:
    try:
        print(call(argument))
    except libbpf.BpfError as error:
        print(error.errno)
"""


def test_without_rights_the_kernel_shows_nothing(groups: Groups) -> None:
    group = groups.make()
    own = attach(NULL, group)
    command = [sys.executable, "-c", AS_NOBODY, str(group), str(own)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.split() == [str(errno.EPERM)] * 2


def test_a_program_is_not_taken_when_only_its_length_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with blinded constants: the kernel takes the pointer back and says nothing."""
    fd = load(NULL)
    real = device_programs._info

    def hidden(descriptor: int, what: str, info: object) -> object:
        got = real(descriptor, what, info)  # type: ignore[arg-type]
        got.xlated_prog_insns = 0
        return got

    monkeypatch.setattr(device_programs, "_info", hidden)
    try:
        with pytest.raises(BpfError) as caught:
            device_programs.instructions(number(fd))
    finally:
        os.close(fd)
    assert caught.value.errno == errno.EPERM


def test_a_program_of_unusual_length_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_programs, "_MAX_INSTRUCTIONS", 8)
    fd = load(NULL)
    try:
        with pytest.raises(BpfError) as caught:
            device_programs.instructions(number(fd))
    finally:
        os.close(fd)
    assert caught.value.errno == errno.E2BIG
