"""Following device programs: our verdict against the kernel's own, on real device nodes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.gpu.device_program import MAX_STEPS, DeviceProgram, NotUnderstoodError
from expanse_ebpf.kernel import device_programs
from tests.kernel.device_assembler import (
    ALLOW_MULTI,
    BLOCK,
    CHARACTER,
    MKNOD,
    PROLOGUE,
    READ,
    WRITE,
    Allow,
    as_runc,
    as_systemd,
    attach,
    instruction,
)
from tests.kernel.groups import Groups

# Nodes to be opened; numbers without a driver give ENXIO where the cgroup allows them, and EPERM where not.
NODES = [
    *((CHARACTER, 1, minor) for minor in (3, 5, 7, 8)),
    *((CHARACTER, 195, minor) for minor in (0, 1, 2, 255)),
    *((CHARACTER, 236, minor) for minor in (1, 2)),
    *((BLOCK, 195, minor) for minor in (0, 1)),
    (CHARACTER, 4095, 1048575),
]
ACCESSES = {os.O_RDONLY: READ, os.O_WRONLY: WRITE, os.O_RDWR: READ | WRITE}

# What opens nodes in a cgroup; says the error number of each.
OPENER = """
for line in sys.stdin:
    flags, path = line.rstrip("\\n").split(" ", 1)
    try:
        os.close(os.open(path, int(flags) | os.O_NONBLOCK))
        print(0, flush=True)
    except OSError as error:
        print(error.errno, flush=True)
"""

USUAL = [
    Allow(major=1, minor=3),
    Allow(major=1, minor=5, access=READ | WRITE),
    Allow(major=1, minor=7, access=READ),
    Allow(access=MKNOD),
    Allow(major=195, minor=0, access=READ | WRITE),
    Allow(major=195, minor=255, access=READ | WRITE),
    Allow(major=236, minor=2, access=READ),
]
RULES = {
    "an allow list": USUAL,
    "nothing": [],
    "a whole major": [Allow(major=195, access=READ | WRITE)],
    "a minor of every major": [Allow(minor=3)],
    "block devices alone": [Allow(kind=BLOCK)],
    "blocks of one major, for reading": [Allow(kind=BLOCK, major=195, access=READ)],
    "everything": [Allow(kind=None)],
    "large numbers": [Allow(major=4095, minor=1048575)],
    # SLURM: what the job was not given is denied, the rest is allowed
    "a list of denials": [
        Allow(major=195, minor=0),
        Allow(major=195, minor=1, verdict=0),
        Allow(major=195, minor=2, verdict=0),
    ],
}
PROGRAMS = {
    **{
        f"{name}, as systemd": as_systemd(rules)
        for name, rules in RULES.items()
        if name not in ("everything", "a list of denials")
    },
    **{f"{name}, as runc": as_runc(rules) for name, rules in RULES.items()},
    "a list of denials, as SLURM": as_runc(RULES["a list of denials"], default=1),
    "all by default, as systemd": as_systemd([], default=1),
}


Node = tuple[int, int, int]  # kind, major, minor
Verdicts = dict[tuple[int, int, int, int], bool]  # by access and node


class Opener:
    """A process in a cgroup that opens nodes."""

    def __init__(self, groups: Groups, group: Path, folder: Path) -> None:
        self.nodes: dict[Node, Path] = {}
        for kind, major, minor in NODES:
            path = self.nodes[kind, major, minor] = folder / f"{kind}-{major}-{minor}"
            mode = stat.S_IFCHR if kind == CHARACTER else stat.S_IFBLK
            os.mknod(path, mode | 0o666, os.makedev(major, minor))
        self.process = groups.start(OPENER, group)

    def may_open(self, node: Node, flags: int) -> bool:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{flags} {self.nodes[node]}\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline()) != errno.EPERM

    def verdicts(self) -> Verdicts:
        return {
            (access, *node): self.may_open(node, flags)
            for (flags, access), node in itertools.product(ACCESSES.items(), NODES)
        }


@pytest.fixture(scope="module")
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture(scope="module")
def levels(groups: Groups) -> tuple[Path, Path]:
    """A cgroup and one in it."""
    return groups.make(name="a"), groups.make(name="a/b")


@pytest.fixture(scope="module")
def opener(groups: Groups, levels: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Opener:
    return Opener(groups, levels[1], tmp_path_factory.mktemp("nodes"))


def our_verdicts(group: Path) -> Verdicts:
    ids = device_programs.attached(str(group))
    programs = [DeviceProgram(device_programs.instructions(number)) for number in ids]
    return {
        (access, kind, major, minor): all(p.allows(major, minor, access << 16 | kind) for p in programs)
        for access, (kind, major, minor) in itertools.product(ACCESSES.values(), NODES)
    }


@pytest.mark.parametrize("name", PROGRAMS)
def test_our_verdict_is_the_kernels(name: str, levels: tuple[Path, Path], opener: Opener) -> None:
    attach(PROGRAMS[name], levels[1])  # in the place of the one before
    assert our_verdicts(levels[1]) == opener.verdicts()


def test_the_verdicts_that_are_compared_differ() -> None:
    counts = set()
    for code in PROGRAMS.values():
        program = DeviceProgram(code)
        pairs = itertools.product(ACCESSES.values(), NODES)
        counts.add(sum(program.allows(node[1], node[2], access << 16 | node[0]) for access, node in pairs))
    assert len(counts) >= 7


def test_programs_of_two_levels_have_to_agree(tmp_path: Path) -> None:
    groups = Groups()
    try:
        above, below = groups.make(name="a"), groups.make(name="a/b")
        opener = Opener(groups, below, tmp_path)
        attach(as_systemd([Allow(major=1), Allow(major=195, minor=0)]), above, ALLOW_MULTI)
        attach(as_runc([Allow(major=1, minor=3), Allow(major=195)]), below, ALLOW_MULTI)
        ours = our_verdicts(below)
        assert ours == opener.verdicts()
    finally:
        groups.close()
    assert [key for key, yes in ours.items() if yes and key[0] == READ | WRITE] == [
        (READ | WRITE, CHARACTER, 1, 3),
        (READ | WRITE, CHARACTER, 195, 0),
    ]


# A program's instructions after the prologue, as many as the kernel takes; the value lands in register 0.
WORDS = st.integers(-(2**31), 2**31 - 1)
ARITHMETIC = st.tuples(
    st.sampled_from((0x00, 0x10, 0x20, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0, 0xC0)),
    st.sampled_from((0x04, 0x07, 0x0C, 0x0F)),
    st.sampled_from((0, 2, 3, 4, 5)),
    st.sampled_from((0, 2, 3, 4, 5)),
    WORDS,
)
JUMP = st.tuples(
    st.sampled_from((0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0, 0xC0, 0xD0)),
    st.sampled_from((0x05, 0x06, 0x0D, 0x0E)),
    st.sampled_from((0, 2, 3, 4, 5)),
    st.sampled_from((0, 2, 3, 4, 5)),
    WORDS,
)


EXIT = instruction(0x95)
ALLOWED = instruction(0xB7, 0, constant=1) + EXIT


def one(step: tuple[int, int, int, int, int], offset: int) -> bytes:
    operation, form, target, source, constant = step
    by_register = bool(form & 8)
    if not by_register and operation in (0x60, 0x70, 0xC0) and form & 7 in (4, 7):
        constant &= 31  # the verifier refuses more
    return instruction(
        operation | form, target, source if by_register else 0, offset, 0 if by_register else constant
    )


@settings(max_examples=300, deadline=None)
@given(
    st.lists(ARITHMETIC, min_size=1, max_size=6),
    JUMP,
    st.sampled_from(NODES),
    st.sampled_from(sorted(ACCESSES)),
)
def test_arithmetic_and_jumps_are_the_kernels(
    levels: tuple[Path, Path],
    opener: Opener,
    steps: list[tuple[int, int, int, int, int]],
    jump: tuple[int, int, int, int, int],
    node: Node,
    flags: int,
) -> None:
    code = PROLOGUE + instruction(0xBF, 0, 4) + b"".join(one(step, 0) for step in steps)
    code += one(jump, 2) + instruction(0xB7, 0, constant=0) + EXIT + ALLOWED
    attach(code, levels[1])
    kind, major, minor = node
    verdict = opener.may_open(node, flags)
    assert DeviceProgram(code).allows(major, minor, ACCESSES[flags] << 16 | kind) == verdict
    # The verifier may have left out what it found to be never reached.
    assert our_verdicts(levels[1])[ACCESSES[flags], kind, major, minor] == verdict


@pytest.mark.parametrize("operation", [0x10, 0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0xA0, 0xB0, 0xC0, 0xD0])
@pytest.mark.parametrize("form", [0x05, 0x06, 0x0D, 0x0E])
def test_jumps_at_their_limits_are_the_kernels(
    operation: int, form: int, levels: tuple[Path, Path], opener: Opener
) -> None:
    numbers = (0, 1, 2, -1, -2, 2**31 - 1, -(2**31))
    for first, second in itertools.product(numbers, numbers):
        # From the context, so that the verifier cannot know the outcome.
        code = PROLOGUE + instruction(0xBF, 0, 4) + instruction(0x17, 0, constant=195)
        code += instruction(0x07, 0, constant=first) + instruction(0xB7, 6, constant=second)
        code += one((operation, form, 0, 6, second), 2)
        code += instruction(0xB7, 0, constant=0) + EXIT + ALLOWED
        attach(code, levels[1])
        verdict = opener.may_open((CHARACTER, 195, 0), os.O_RDWR)
        assert DeviceProgram(code).allows(195, 0) == verdict, (first, second)


# ---- what is not understood


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (instruction(0x85, constant=5) + ALLOWED, "instruction 0 calls a function"),
        (instruction(0x18, 1, 1, constant=7) + bytes(8) + ALLOWED, "instruction 0 uses a map"),
        (instruction(0x7B, 10, 1, -8) + ALLOWED, "instruction 0 stores something"),
        (instruction(0x62, 10, 0, -8) + ALLOWED, "instruction 0 stores something"),
        (instruction(0xDB, 1, 2) + ALLOWED, "instruction 0 stores something"),
        (instruction(0x61, 2, 1, 12) + ALLOWED, "instruction 0 reads beside the context"),
        (instruction(0x61, 2, 1, -4) + ALLOWED, "instruction 0 reads beside the context"),
        (instruction(0x79, 2, 1, 0) + ALLOWED, "instruction 0 (code 0x79)"),
        (instruction(0x61, 2, 10, -4) + ALLOWED, "instruction 0 (code 0x61)"),
        (instruction(0x91, 2, 1, 0) + ALLOWED, "instruction 0 (code 0x91)"),
        (instruction(0x37, 1, constant=3) + ALLOWED, "instruction 0 (code 0x37)"),
        (instruction(0xBF, 2, 1, 8) + ALLOWED, "instruction 0 (code 0xbf)"),
        (instruction(0xB7, 10) + ALLOWED, "instruction 0 (code 0xb7)"),
        (instruction(0x07, 1, constant=4) + ALLOWED, "instruction 0 calculates with a pointer"),
        (instruction(0xBC, 2, 1) + ALLOWED, "instruction 0 calculates with a pointer"),
        (instruction(0x55, 1, 0, 1) + ALLOWED, "instruction 0 calculates with a pointer"),
        (EXIT, "instruction 0 calculates with a pointer or with nothing"),
        (instruction(0xBF, 0, 1) + EXIT, "instruction 1 calculates with a pointer"),
        (instruction(0xB7, 14) + ALLOWED, "instruction 0 names a register that is not there"),
        (b"", "instruction 0 is not there"),
        (instruction(0x05, offset=-2) + ALLOWED, "instruction -1 is not there"),
        (instruction(0x18, 0, 0), "instruction 0 (code 0x18)"),
        (instruction(0x05, offset=-1) + ALLOWED, "it did not end within 4096 instructions"),
    ],
)
def test_what_goes_beyond_comparing_is_not_understood(code: bytes, reason: str) -> None:
    with pytest.raises(NotUnderstoodError, match=re.escape(reason)):
        DeviceProgram(code).allows(195, 0)


def test_only_what_is_reached_has_to_be_understood() -> None:
    code = PROLOGUE + instruction(0x55, 4, 0, 2, 195) + ALLOWED + instruction(0x85, constant=5) + ALLOWED
    program = DeviceProgram(code)
    assert program.allows(195, 0)
    with pytest.raises(NotUnderstoodError):
        program.allows(1, 3)


def test_large_constants_long_jumps_and_blinded_constants() -> None:
    wide = instruction(0x18, 6, 0, constant=-1) + instruction(0, constant=1)  # 0x1_ffff_ffff
    blinded = instruction(0xB7, 11, constant=0x1234 ^ 195) + instruction(0xA7, 11, constant=0x1234)
    code = wide + instruction(0x77, 6, constant=32)  # now 1
    code += instruction(0x61, 4, 1, 4) + blinded
    code += instruction(0x5D, 4, 11, 1) + instruction(0x06, constant=2)
    code += instruction(0xB7, 0, constant=0) + EXIT + instruction(0xBF, 0, 6) + EXIT
    assert DeviceProgram(code).allows(195, 0)
    assert not DeviceProgram(code).allows(194, 0)


def test_the_verdict_is_32_bits_wide() -> None:
    above = instruction(0x18, 0, 0, constant=0) + instruction(0, constant=1)
    assert not DeviceProgram(above + EXIT).allows(195, 0)


def test_a_program_within_the_limit_of_steps_ends() -> None:
    padding = instruction(0xB7, 0, constant=1)
    assert DeviceProgram(padding * (MAX_STEPS - 1) + EXIT).allows(195, 0)
    with pytest.raises(NotUnderstoodError, match="did not end"):
        DeviceProgram(padding * MAX_STEPS + EXIT).allows(195, 0)


LIKELY = st.tuples(
    st.sampled_from((*range(4, 256, 8), *range(5, 256, 8), *range(7, 256, 8), 0x61, 0x69, 0x71, 0x18)),
    st.integers(0, 255),
    st.integers(-9, 9),
    WORDS,
).map(lambda fields: struct.pack("<BBhi", *fields))


@given(st.one_of(st.binary(max_size=400), st.lists(LIKELY, max_size=40).map(b"".join)), st.booleans())
def test_random_instructions_end_in_a_verdict_or_are_not_understood(code: bytes, prologue: bool) -> None:
    program = DeviceProgram(PROLOGUE + code if prologue else code)
    with contextlib.suppress(NotUnderstoodError):
        assert program.allows(195, 7) in (True, False)


def test_a_verdict_is_worked_out_once() -> None:
    program = DeviceProgram(as_runc(USUAL))
    assert not program.knows(195, 0)
    assert program.allows(195, 0)
    steps = program.steps
    assert 0 < steps < MAX_STEPS
    assert program.knows(195, 0)
    assert program.allows(195, 0)
    assert program.steps == steps
    strange = DeviceProgram(instruction(0xB7, 0) * 9 + instruction(0x85, constant=5))
    for _ in range(2):
        with pytest.raises(NotUnderstoodError, match="instruction 9 calls a function"):
            strange.allows(195, 0)
    assert strange.steps == 10
