"""A process that has loaded an NVML library, as programs do: the module pynvml, unmodified, on top of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from tests.stand_ins.nvml import StandIn

_PROGRAM = """
import ctypes, json, sys
library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
import pynvml as n

def plain(value):
    if isinstance(value, bytes):
        return value.decode()
    if isinstance(value, n.nvmlFriendlyObject):
        return plain(vars(value))
    if isinstance(value, ctypes.Structure):
        return {name: plain(getattr(value, name)) for name, *_ in value._fields_}
    if isinstance(value, ctypes.Union):
        return value.uiVal if value.ullVal >> 32 == 0xdeadbeef else value.ullVal
    if isinstance(value, ctypes.c_uint):
        return value.value
    if isinstance(value, (list, tuple, ctypes.Array)):
        return [plain(part) for part in value]
    if isinstance(value, dict):
        return {name: plain(part) for name, part in value.items()}
    return value if isinstance(value, (int, float, str, type(None))) else repr(value)

def gpu(index):
    return n.nvmlDeviceGetHandleByIndex(index)

def instance(index, place):
    return n.nvmlDeviceGetMigDeviceHandleByIndex(gpu(index), place)

names = dict(globals())
for line in sys.stdin:
    try:
        code = json.loads(line)
        try:
            answer = plain(eval(code, names))
        except SyntaxError:
            answer = exec(code, names)
        print(json.dumps([answer, None]), flush=True)
    except n.NVMLError as error:
        print(json.dumps([None, error.value]), flush=True)
"""


class NvmlError(Exception):
    """pynvml has raised; the argument is NVML's code."""


class Caller:
    """Evaluates what it is given: `n` is pynvml, `library` the loaded one, gpu(0) and instance(0, 1) handles.

    Raises NvmlError, and EOFError with the process's exit status when it has ended.
    """

    def __init__(self, library: Path, *, begin: bool = True) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, library],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if begin:
            self("n.nvmlInit()")

    def ask(self, code: str) -> None:
        """Begin with something; `answer` gives what has come of it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EOFError(self.process.wait())
        answer, error = json.loads(line)
        if error is not None:
            raise NvmlError(error)
        return answer

    def __call__(self, code: str) -> Any:
        self.ask(code)
        return self.answer()

    def error(self, code: str) -> int | None:
        """NVML's code for what it is asked, None when that works."""
        try:
            self(code)
        except NvmlError as error:
            return int(error.args[0])
        return None

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


class Call(Protocol):
    """Begins a Caller that ends with the test."""

    def __call__(self, gpus: StandIn, *, begin: bool = True) -> Caller: ...
