"""NVML's lists of processes, whose records and symbols changed between driver lines.

pynvml asks by the newest symbol alone. Here the newest that the loaded library exports is asked, with the
record that goes with it (nvml.h: nvmlProcessInfo_v1_t and nvmlProcessInfo_v2_t, whose layout `_v3` shares).
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

from expanse_ebpf.nvml.reasons import INSUFFICIENT_SIZE

KINDS = {"compute": "Compute", "graphics": "Graphics", "mps": "MPSCompute"}
_NOT_AVAILABLE = 0xFFFFFFFFFFFFFFFF  # NVML_VALUE_NOT_AVAILABLE
_NO_INSTANCE = 0xFFFFFFFF
_MOST = 16384


class _Record16(ctypes.Structure):
    _fields_ = (("pid", ctypes.c_uint), ("memory", ctypes.c_ulonglong))


class _Record24(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("memory", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


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
        for suffix, record in (("_v3", _Record24), ("_v2", _Record24), ("", _Record16)):
            if hasattr(library, name + suffix):
                self._function, self._record = getattr(library, name + suffix), record
                return
        raise AttributeError(name)

    def read(self, handle: Any) -> Listed | int:
        """The processes on the device, or NVML's error."""
        while True:
            count = ctypes.c_uint(self._room)
            records = (self._record * self._room)()
            code: int = self._function(handle, ctypes.byref(count), records)
            if code == INSUFFICIENT_SIZE and self._room < _MOST:
                self._room = min(_MOST, max(2 * self._room, count.value + 16))
                continue
            if code:
                return code
            break
        found = []
        rejected = 0
        for record in records[: min(count.value, self._room)]:
            if not 0 < record.pid <= self._pid_max:
                rejected += 1
                continue
            instances = [getattr(record, f"{n}_instance", _NO_INSTANCE) for n in ("gpu", "compute")]
            found.append(
                {
                    "pid": record.pid,
                    "memory_bytes": None if record.memory == _NOT_AVAILABLE else record.memory,
                    "gpu_instance": None if instances[0] == _NO_INSTANCE else instances[0],
                    "compute_instance": None if instances[1] == _NO_INSTANCE else instances[1],
                }
            )
        return Listed(found, rejected)


def read_pid_max(path: str = "/proc/sys/kernel/pid_max") -> int:
    """The kernel's largest pid; its own limit where that cannot be read."""
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return 1 << 22
