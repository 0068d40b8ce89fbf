"""What a cgroup device program says about a device, found by following its instructions.

The kernel does not tell which devices a cgroup may open; the program that decides can be read, and those
that systemd, runc, crun, NVIDIA's container toolkit and SLURM write are comparisons of the three words of
`struct bpf_cgroup_dev_ctx` and nothing else. Whatever goes beyond that is not understood, and said to be.

Encoding: Documentation/bpf/standardization/instruction-set.rst of the kernel.
"""

from __future__ import annotations

import functools
import operator
import struct
from collections.abc import Callable
from typing import NamedTuple

from expanse_ebpf.errors import UnavailableError

MAX_STEPS = 4096

# access_type of the context: BPF_DEVCG_ACC_READ | BPF_DEVCG_ACC_WRITE, of a BPF_DEVCG_DEV_CHAR.
READ_WRITE_CHARACTER = (2 | 4) << 16 | 2

_U32, _U64 = 0xFFFF_FFFF, 0xFFFF_FFFF_FFFF_FFFF
_LD, _LDX, _ST, _STX, _ALU, _JMP, _JMP32, _ALU64 = range(8)
_IMM64 = 0x18  # BPF_LD | BPF_IMM | BPF_DW
_MEM = 0x60
_REGISTER = 8  # BPF_X: the second operand is a register
_SIZES = {0x00: 4, 0x08: 2, 0x10: 1}
_MOV = 0xB0
_JA, _CALL, _EXIT = 0x00, 0x80, 0x90
_FRAME = 10
_REGISTERS = 12  # ten, the frame pointer, and the one with which the kernel blinds constants

# Each gets two unsigned operands and their width in bits; the result is cut to that width.
_ARITHMETIC: dict[int, Callable[[int, int, int], int]] = {
    0x00: lambda a, b, _: a + b,
    0x10: lambda a, b, _: a - b,
    0x20: lambda a, b, _: a * b,
    0x40: lambda a, b, _: a | b,
    0x50: lambda a, b, _: a & b,
    0x60: lambda a, b, width: a << (b % width),
    0x70: lambda a, b, width: a >> (b % width),
    0xA0: lambda a, b, _: a ^ b,
    _MOV: lambda _, b, __: b,
    0xC0: lambda a, b, width: _signed(a, width) >> (b % width),
}
_UNSIGNED: dict[int, Callable[[int, int], object]] = {
    0x10: operator.eq,
    0x20: operator.gt,
    0x30: operator.ge,
    0x40: operator.and_,
    0x50: operator.ne,
    0xA0: operator.lt,
    0xB0: operator.le,
}
_SIGNED: dict[int, Callable[[int, int], object]] = {
    0x60: operator.gt,
    0x70: operator.ge,
    0xC0: operator.lt,
    0xD0: operator.le,
}


class NotUnderstoodError(UnavailableError):
    """The program does something that cannot be followed from outside."""


class _Context:
    """Stands in a register for the pointer to the context."""


_CONTEXT = _Context()
_Value = int | _Context | None  # None: nothing was ever put there


def _signed(value: int, width: int) -> int:
    return value - (1 << width) if value >> (width - 1) else value


def _signed_comparison(compare: Callable[[int, int], object], width: int) -> Callable[[int, int], object]:
    return lambda a, b: compare(_signed(a, width), _signed(b, width))


# ---- decoding ------------------------------------------------------------------------------------

_CALCULATE, _COPY, _LOAD, _CONSTANT, _END, _JUMP, _BRANCH, _REFUSE = range(8)
_DECODED = 16  # programs that are kept decoded: it takes much more memory than the instructions


class _Step(NamedTuple):
    """An instruction taken apart; which fields count depends on `kind`."""

    kind: int
    target: int = 0
    source: int = -1  # the register of the second operand; -1: `constant` is it
    constant: int = 0  # already cut to `mask`
    jump: int = 0  # how far from the next instruction; of a load: the offset
    mask: int = _U64
    width: int = 64  # of a load: bytes
    calculate: Callable[[int, int, int], int] | None = None
    compare: Callable[[int, int], object] | None = None
    refusal: str = ""  # why it is not followed, after its number


@functools.lru_cache(maxsize=_DECODED)
def _decode(code: bytes) -> tuple[_Step, ...]:
    """Every instruction; one that cannot be followed is refused only when it is reached."""
    raw: list[tuple[int, int, int, int]] = list(
        struct.iter_unpack("<BBhi", code[: len(code) - len(code) % 8])
    )
    return tuple(
        _step(fields, raw[at + 1][3] if at + 1 < len(raw) else None) for at, fields in enumerate(raw)
    )


def _step(fields: tuple[int, int, int, int], following: int | None) -> _Step:
    code, names, offset, constant = fields
    kind, target, source = code & 7, names & 15, names >> 4
    if target >= _REGISTERS or source >= _REGISTERS:
        return _Step(_REFUSE, refusal="names a register that is not there")
    if code == _IMM64 and source == 0 and following is not None:
        return _Step(_CONSTANT, target, constant=constant & _U32 | (following & _U32) << 32)
    if code == _JMP | _EXIT:
        return _Step(_END)
    if code in (_JMP | _JA, _JMP32 | _JA):
        return _Step(_JUMP, jump=offset if code == _JMP | _JA else constant)
    mask, width = (_U64, 64) if kind in (_ALU64, _JMP) else (_U32, 32)
    second = source if code & _REGISTER else -1
    operation = code & 0xF0
    # An offset makes it another operation: a signed one, or a move that extends the sign.
    if kind in (_ALU, _ALU64) and operation in _ARITHMETIC and not offset and target != _FRAME:
        what = _COPY if operation == _MOV else _CALCULATE
        return _Step(what, target, second, constant & mask, 0, mask, width, _ARITHMETIC[operation])
    if kind in (_JMP, _JMP32) and (operation in _UNSIGNED or operation in _SIGNED):
        compare = _UNSIGNED.get(operation) or _signed_comparison(_SIGNED[operation], width)
        return _Step(_BRANCH, target, second, constant & mask, offset, mask, width, compare=compare)
    size = _SIZES.get(code & 0x18)
    refusal = _refusal(code, names)
    if kind == _LDX and code & 0xE0 == _MEM and size is not None and target != _FRAME:
        return _Step(_LOAD, target, source, jump=offset, width=size, refusal=refusal)
    return _Step(_REFUSE, refusal=refusal)


def _refusal(code: int, names: int) -> str:
    if code == _JMP | _CALL:
        return "calls a function"
    if code == _IMM64 and names >> 4:
        return "uses a map"
    if code & 7 in (_ST, _STX):
        return "stores something"
    return f"(code {code:#04x}) is not among those that are followed"


# ---- following -----------------------------------------------------------------------------------


class DeviceProgram:
    """A program of type BPF_PROG_TYPE_CGROUP_DEVICE, by its instructions (8 bytes each)."""

    def __init__(self, code: bytes) -> None:
        self.steps = 0  # instructions that were followed so far
        self._code = code
        self._verdicts: dict[tuple[int, int, int], bool | NotUnderstoodError] = {}

    def knows(self, major: int, minor: int, access_type: int = READ_WRITE_CHARACTER) -> bool:
        """Whether allows() can tell without following the program."""
        return (access_type, major, minor) in self._verdicts

    def allows(self, major: int, minor: int, access_type: int = READ_WRITE_CHARACTER) -> bool:
        """Whether it lets the device be opened; raises NotUnderstoodError."""
        asked = (access_type, major, minor)
        verdict = self._verdicts.get(asked)
        if verdict is None:
            try:
                verdict = self._run(struct.pack("<III", *asked))
            except NotUnderstoodError as error:
                verdict = error
            self._verdicts[asked] = verdict
        if isinstance(verdict, NotUnderstoodError):
            raise NotUnderstoodError(str(verdict))
        return verdict

    def _run(self, context: bytes) -> bool:
        steps = _decode(self._code)
        registers: list[_Value] = [None] * _REGISTERS
        registers[1] = _CONTEXT
        at = 0
        for _ in range(MAX_STEPS):
            if not 0 <= at < len(steps):
                raise NotUnderstoodError(f"instruction {at} is not there")
            self.steps += 1
            step = steps[at]
            kind, target, source, second, jump, mask, width, calculate, compare, refusal = step
            if kind == _BRANCH:
                first = registers[target]
                operand = second if source < 0 else registers[source]
                if not (isinstance(first, int) and isinstance(operand, int)):
                    raise _no_number(at)
                assert compare is not None
                if compare(first & mask, operand & mask):
                    at += jump
            elif kind in (_CALCULATE, _COPY):
                operand = second if source < 0 else registers[source]
                first = 0 if kind == _COPY else registers[target]
                if kind == _COPY and mask == _U64 and operand is _CONTEXT:
                    registers[target] = _CONTEXT
                elif not (isinstance(first, int) and isinstance(operand, int)):
                    raise _no_number(at)
                else:
                    assert calculate is not None
                    registers[target] = calculate(first & mask, operand & mask, width) & mask
            elif kind == _LOAD:
                registers[target] = _load(at, step, registers[source], context)
            elif kind == _CONSTANT:
                registers[target] = second
                at += 1
            elif kind == _JUMP:
                at += jump
            elif kind == _END:
                if not isinstance(registers[0], int):
                    raise _no_number(at)
                return registers[0] & _U32 != 0  # the kernel looks at 32 bits
            else:
                raise NotUnderstoodError(f"instruction {at} {refusal}")
            at += 1
        raise NotUnderstoodError(f"it did not end within {MAX_STEPS} instructions")


def _load(at: int, step: _Step, pointer: _Value, context: bytes) -> int:
    if not isinstance(pointer, _Context):
        raise NotUnderstoodError(f"instruction {at} {step.refusal}")
    if not 0 <= step.jump <= len(context) - step.width:
        raise NotUnderstoodError(f"instruction {at} reads beside the context")
    return int.from_bytes(context[step.jump : step.jump + step.width], "little")


def _no_number(at: int) -> NotUnderstoodError:
    return NotUnderstoodError(f"instruction {at} calculates with a pointer or with nothing")
