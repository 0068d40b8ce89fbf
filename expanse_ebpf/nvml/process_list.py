"""NVML's lists of processes, whose records and symbols changed between driver lines.

pynvml asks by the newest symbol alone, for records of one length. Here the newest symbol that the loaded
library exports is asked, and how long its records are is seen by how far it wrote: the same symbol gave
longer ones in the first drivers of the 535 line. All records begin alike (nvml.h: nvmlProcessInfo_v1_t,
16 bytes; nvmlProcessInfo_v2_t, 24; nvmlProcessDetail_v1_t, 32): pid, padding, memory, and from the second
on the GPU instance and the compute instance.
"""

from __future__ import annotations

import ctypes
import struct
from pathlib import Path
from typing import Any, NamedTuple

from expanse_ebpf.nvml.reasons import ABSURD, INSUFFICIENT_SIZE

KINDS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
_LENGTHS = (16, 24, 32, 40)  # the last: the next one, should there be any
_BEGIN = struct.Struct("=I4xQ")
_INSTANCES = struct.Struct("=II")
_UNTOUCHED = b"\xa5"  # what no record ends in: the last bytes are a high end of a small number, or all ones
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE
_NO_INSTANCE = 0xFFFFFFFF
_MOST = 16384


class Listed(NamedTuple):
    """The processes of one kind on one device."""

    # pid, memory_bytes (None: not told), gpu_instance and compute_instance (None: none)
    processes: list[dict[str, Any]]
    rejected: int  # records that cannot be true


class ProcessList:
    """One of NVML's lists. `library` is the loaded libnvidia-ml; AttributeError when it has no such list."""

    def __init__(self, library: ctypes.CDLL, kind: str, pid_max: int) -> None:
        self._pid_max = pid_max
        self._room = 64
        name = f"nvmlDeviceGet{KINDS[kind]}RunningProcesses"
        for suffix in ("_v3", "_v2", ""):
            if hasattr(library, name + suffix):
                self._function = getattr(library, name + suffix)
                return
        raise AttributeError(name)

    def read(self, handle: Any) -> Listed | int:
        """The processes on the device, or NVML's error."""
        while True:
            count = ctypes.c_uint(self._room)
            size = self._room * _LENGTHS[-1]
            buffer = ctypes.create_string_buffer(_UNTOUCHED * size, size)
            code: int = self._function(handle, ctypes.byref(count), buffer)
            if code == INSUFFICIENT_SIZE and self._room < _MOST:
                self._room = min(_MOST, max(2 * self._room, count.value + 16))
                continue
            if code:
                return code
            return parse(buffer.raw, min(count.value, self._room), self._pid_max)


def parse(buffer: bytes, count: int, pid_max: int) -> Listed | int:
    """`count` records of whatever length; ABSURD when they have none that is known."""
    if not count:
        return Listed([], 0)
    length, rest = divmod(len(buffer.rstrip(_UNTOUCHED)), count)
    if rest or length not in _LENGTHS:
        return ABSURD
    found = []
    rejected = 0
    for offset in range(0, count * length, length):
        pid, memory = _BEGIN.unpack_from(buffer, offset)
        gpu = compute = _NO_INSTANCE
        if length > _BEGIN.size:
            gpu, compute = _INSTANCES.unpack_from(buffer, offset + _BEGIN.size)
        if not 0 < pid <= pid_max:
            rejected += 1
            continue
        found.append(
            {
                "pid": pid,
                "memory_bytes": None if memory == _NOT_AVAILABLE else memory,
                "gpu_instance": None if gpu == _NO_INSTANCE else gpu,
                "compute_instance": None if compute == _NO_INSTANCE else compute,
            }
        )
    return Listed(found, rejected)


def read_pid_max(path: str = "/proc/sys/kernel/pid_max") -> int:
    """The kernel's largest pid; its own limit where that cannot be read."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 1 << 22
