"""What a cgroup device program says about a device, found by following its instructions.

The kernel does not tell which devices a cgroup may open; the program that decides can be read, and those
that systemd, runc, crun, NVIDIA's container toolkit and SLURM write are comparisons of the three words of
`struct bpf_cgroup_dev_ctx` and nothing else. Whatever goes beyond that is not understood, and said to be.

Encoding: Documentation/bpf/standardization/instruction-set.rst of the kernel.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable

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


class DeviceProgram:
    """A program of type BPF_PROG_TYPE_CGROUP_DEVICE, by its instructions (8 bytes each)."""

    def __init__(self, code: bytes) -> None:
        self._code = list(struct.iter_unpack("<BBhi", code[: len(code) - len(code) % 8]))
        self._verdicts: dict[tuple[int, int, int], bool] = {}

    def allows(self, major: int, minor: int, access_type: int = READ_WRITE_CHARACTER) -> bool:
        """Whether it lets the device be opened; raises NotUnderstoodError."""
        asked = (access_type, major, minor)
        verdict = self._verdicts.get(asked)
        if verdict is None:
            verdict = self._verdicts[asked] = self._run(struct.pack("<III", *asked))
        return verdict

    def _run(self, context: bytes) -> bool:
        registers: list[_Value] = [None] * _REGISTERS
        registers[1] = _CONTEXT
        at = 0
        for _ in range(MAX_STEPS):
            if not 0 <= at < len(self._code):
                raise NotUnderstoodError(f"instruction {at} is not there")
            code, names, offset, constant = self._code[at]
            kind = code & 7
            target, source = names & 15, names >> 4
            if target >= _REGISTERS or source >= _REGISTERS:
                raise NotUnderstoodError(f"instruction {at} names a register that is not there")
            if kind in (_ALU, _ALU64):
                registers[target] = self._calculate(at, registers)
            elif kind == _LDX:
                registers[target] = self._load(at, registers[source], context)
            elif code == _IMM64 and source == 0 and at + 1 < len(self._code):
                registers[target] = constant & _U32 | (self._code[at + 1][3] & _U32) << 32
                at += 1
            elif code == _JMP | _EXIT:
                return self._number(at, registers[0]) & _U32 != 0  # the kernel looks at 32 bits
            elif code == _JMP | _JA:
                at += offset
            elif code == _JMP32 | _JA:
                at += constant
            elif kind in (_JMP, _JMP32):
                if self._holds(at, registers):
                    at += offset
            else:
                raise self._unknown(at)
            at += 1
        raise NotUnderstoodError(f"it did not end within {MAX_STEPS} instructions")

    def _calculate(self, at: int, registers: list[_Value]) -> _Value:
        code, names, offset, constant = self._code[at]
        target, source = names & 15, names >> 4
        operation = _ARITHMETIC.get(code & 0xF0)
        # An offset makes it another operation: a signed one, or a move that extends the sign.
        if operation is None or offset or target == _FRAME:
            raise self._unknown(at)
        moves = code & 0xF0 == _MOV
        if moves and code & 7 == _ALU64 and code & _REGISTER and isinstance(registers[source], _Context):
            return _CONTEXT
        width, mask = (64, _U64) if code & 7 == _ALU64 else (32, _U32)
        second = self._number(at, registers[source]) if code & _REGISTER else constant
        first = 0 if moves else self._number(at, registers[target])
        return operation(first & mask, second & mask, width) & mask

    def _load(self, at: int, pointer: _Value, context: bytes) -> int:
        code, names, offset, _ = self._code[at]
        size = _SIZES.get(code & 0x18)
        if code & 0xE0 != _MEM or size is None or names & 15 == _FRAME or not isinstance(pointer, _Context):
            raise self._unknown(at)
        if not 0 <= offset <= len(context) - size:
            raise NotUnderstoodError(f"instruction {at} reads beside the context")
        return int.from_bytes(context[offset : offset + size], "little")

    def _holds(self, at: int, registers: list[_Value]) -> bool:
        code, names, _, constant = self._code[at]
        unsigned, signed = _UNSIGNED.get(code & 0xF0), _SIGNED.get(code & 0xF0)
        if unsigned is None and signed is None:
            raise self._unknown(at)
        width, mask = (64, _U64) if code & 7 == _JMP else (32, _U32)
        first = self._number(at, registers[names & 15]) & mask
        second = (self._number(at, registers[names >> 4]) if code & _REGISTER else constant) & mask
        if unsigned is not None:
            return bool(unsigned(first, second))
        assert signed is not None
        return bool(signed(_signed(first, width), _signed(second, width)))

    def _number(self, at: int, value: _Value) -> int:
        if not isinstance(value, int):
            raise NotUnderstoodError(f"instruction {at} calculates with a pointer or with nothing")
        return value

    def _unknown(self, at: int) -> NotUnderstoodError:
        code, names, *_ = self._code[at]
        if code == _JMP | _CALL:
            return NotUnderstoodError(f"instruction {at} calls a function")
        if code == _IMM64 and names >> 4:
            return NotUnderstoodError(f"instruction {at} uses a map")
        if code & 7 in (_ST, _STX):
            return NotUnderstoodError(f"instruction {at} stores something")
        return NotUnderstoodError(f"instruction {at} (code {code:#04x}) is not among those that are followed")
