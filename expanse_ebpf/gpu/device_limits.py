"""What limits the devices of one cgroup: a v1 group's list, or the BPF programs that decide for a v2 cgroup.

To follow programs is the dear part. Those of equal instructions are followed once, whatever their number is,
and no more than an allowance for a round, which the caller gives. Lists of equal text are read once too.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import TypeVar

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.gpu.device_program import DeviceProgram
from expanse_ebpf.gpu.device_rules import DevicesList, Limits, parse_devices_list
from expanse_ebpf.kernel import device_programs
from expanse_ebpf.kernel.libbpf import BpfError

_MAX_LIST_BYTES = 1 << 15  # no more than parse_devices_list() takes, at 8 bytes a line
_MAX_IDS = 4096
_MAX_PROGRAMS = 512  # of different instructions
_MAX_LISTS = 512  # of different texts
_MAX_KEPT_BYTES = 4096  # of a list; longer ones are read anew each time

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")


class UnreadError(UnavailableError):
    """It cannot be read now, or no more; what was read before may still be true."""


class LimitsReader:
    """Reads the limits of cgroups; `steps` is how many instructions may still be followed in this round."""

    def __init__(self) -> None:
        self.steps = 0
        # By the kernel's id. It hands ids out in a circle of 2^31 (idr_alloc_cyclic), so none is met again.
        self._by_id: dict[int, DeviceProgram] = {}
        self._by_code: dict[bytes, DeviceProgram] = {}
        self._by_text: dict[bytes, DevicesList] = {}

    def read(self, hierarchy: str, directory: str) -> Limits:
        """The limits of a cgroup of the hierarchy "devices" or "unified".

        Raises OSError when it cannot be read, UnreadError when it changes meanwhile, UnavailableError or
        BpfError when it is not to be had.
        """
        if hierarchy == "devices":
            with open(f"{directory}/devices.list", "rb") as file:
                text = file.read(_MAX_LIST_BYTES + 1)
            if len(text) > _MAX_LIST_BYTES:
                raise UnavailableError("the list of its devices is too long")
            return self._list(text)
        for _ in range(2):  # a program may be replaced between two calls
            try:
                programs = [self._program(number) for number in device_programs.attached(directory)]
                return _Programs(programs, self)
            except BpfError as error:
                if error.errno in (errno.EINVAL, errno.ENOSYS):  # a kernel without programs for cgroups
                    return _Programs((), self)
                if error.errno == errno.EPERM:
                    raise UnavailableError(
                        f"{error.what} is not permitted: it takes CAP_SYS_ADMIN and CAP_NET_ADMIN, and "
                        "constants that are not blinded (sysctl net.core.bpf_jit_harden)"
                    ) from None
                if error.errno != errno.ENOENT:
                    raise
        raise UnreadError("the programs that limit its devices change while they are read")

    def _list(self, text: bytes) -> DevicesList:
        known = self._by_text.get(text)
        if known is None:
            known = DevicesList(parse_devices_list(text.decode("ascii", "replace")))
            if len(text) <= _MAX_KEPT_BYTES:
                _keep(self._by_text, text, known, _MAX_LISTS)
        return known

    def _program(self, number: int) -> DeviceProgram:
        program = self._by_id.get(number)
        if program is None:
            code = device_programs.instructions(number)
            program = self._by_code.get(code)
            if program is None:
                program = DeviceProgram(code)
                _keep(self._by_code, code, program, _MAX_PROGRAMS)
            _keep(self._by_id, number, program, _MAX_IDS)
        return program


def _keep(some: dict[_Key, _Value], key: _Key, value: _Value, most: int) -> None:
    """Put it among `some`, from which the oldest goes when there are too many."""
    if len(some) >= most:
        del some[next(iter(some))]
    some[key] = value


class _Programs:
    """The limits of a v2 cgroup: all of its programs have to allow."""

    def __init__(self, programs: Sequence[DeviceProgram], reader: LimitsReader) -> None:
        self._programs = programs
        self._reader = reader

    def allows(self, major: int, minor: int) -> bool:
        """See Limits; raises UnreadError when the round's allowance is used up."""
        return all(self._ask(program, major, minor) for program in self._programs)

    def _ask(self, program: DeviceProgram, major: int, minor: int) -> bool:
        if self._reader.steps <= 0 and not program.knows(major, minor):
            raise UnreadError("the programs that limit its devices were not followed yet")
        before = program.steps
        try:
            return program.allows(major, minor)
        finally:
            self._reader.steps -= program.steps - before
