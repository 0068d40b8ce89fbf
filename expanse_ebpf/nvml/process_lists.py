"""The processes on one device, of all kinds together, and how busy each keeps it."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.busy import LONGEST_US, since
from expanse_ebpf.nvml.process_list import KINDS, Listed, ProcessList
from expanse_ebpf.nvml.readings import Readings

_MOST_SAMPLES = 1 << 14
_MOST_PROCESSES = 1024  # of one device
# What a process takes of a line at most; the second where NVML tells its instance. And its use.
_BYTES, _BYTES_OF_INSTANCE, _BYTES_OF_USE = 64, 104, 24


class ProcessLists:
    """NVML's lists for one device; `lists` by kind, those that the library has."""

    def __init__(self, handle: Any, lists: dict[str, ProcessList]) -> None:
        self._handle = handle
        self._lists = lists
        self._known: dict[str, list[dict[str, Any]]] = {}  # by kind, as last read
        self._seen_us = 0  # stamp of the newest sample of a process's use
        self._room = (pynvml.c_nvmlProcessUtilizationSample_t * 64)()

    def read(self, found: Readings, seldom: bool) -> tuple[list[dict[str, Any]], int]:
        """All processes, each once with its `kind`, and how many records cannot be true.

        Graphics is rare on such nodes and MPS runs on few, so those are asked for only when it is time
        for what changes seldom, and MPS always once it had clients.
        """
        rejected = 0
        for kind in KINDS:
            if kind == "compute" or seldom or (kind == "mps" and self._known.get(kind)):
                no_such_list = reasons.FUNCTION_NOT_FOUND
                listed = self._lists[kind].read(self._handle) if kind in self._lists else no_such_list
                self._known[kind] = listed.processes if isinstance(listed, Listed) else []
                if isinstance(listed, Listed):
                    rejected += listed.rejected
                elif kind == "compute" or listed in (reasons.LOST, reasons.RESET_REQUIRED):
                    found.miss("processes", listed)
        processes: dict[tuple[Any, ...], dict[str, Any]] = {}
        # A client of MPS is in the compute list as well, as a rule.
        for kind in ("mps", "compute", "graphics"):
            for process in self._known.get(kind, ()):
                key = (process["pid"], process["gpu_instance"], process["compute_instance"])
                processes.setdefault(key, {**process, "kind": kind})
        return list(processes.values()), rejected

    def utilization(self, found: Readings, room: int) -> dict[str, int]:
        """How long each process, by its pid, kept the SMs busy since the last call, in nanoseconds.

        The first call only begins. NVML finds nothing where no process was busy. More than have room in so
        many bytes are none, as some of them would be taken for all.
        """
        now_us = time.time_ns() // 1000
        before = self._seen_us = since(self._seen_us, now_us)
        count = ctypes.c_uint()
        code = self._ask(count)
        # More may come between two calls, so the room that NVML asks for need not do.
        while code == reasons.INSUFFICIENT_SIZE and len(self._room) < _MOST_SAMPLES:
            length = min(_MOST_SAMPLES, max(2 * len(self._room), count.value))
            self._room = (pynvml.c_nvmlProcessUtilizationSample_t * length)()
            code = self._ask(count)
        if code not in (0, reasons.NOT_FOUND):
            found.miss("by_process", code)
            return {}
        samples = self._room[: min(count.value, len(self._room))] if not code else []
        self._seen_us = max([before, *(sample.timeStamp for sample in samples)]) or now_us
        if not before:
            found.miss("by_process", reasons.NO_DATA)
            return {}
        use = busy_by_pid(((s.timeStamp, s.pid, s.smUtil) for s in samples), before)
        if len(use) > room // _BYTES_OF_USE:
            found.miss("by_process", reasons.TOO_MANY)
            return {}
        return use

    def _ask(self, count: ctypes.c_uint) -> int:
        # Not pynvml's function, which takes a list that has grown in between for an error.
        try:
            function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetProcessUtilization")
        except pynvml.NVMLError as error:
            return int(error.value)
        count.value = len(self._room)
        code: int = function(self._handle, self._room, ctypes.byref(count), ctypes.c_ulonglong(self._seen_us))
        return code


def shorten(processes: list[dict[str, Any]], room: int) -> list[dict[str, Any]]:
    """Those with most memory, as many as have room in so many bytes of a line; without what is not known."""
    size = _BYTES_OF_INSTANCE if any(p["gpu_instance"] is not None for p in processes) else _BYTES
    most = min(_MOST_PROCESSES, room // size)
    if len(processes) > most:
        processes = sorted(processes, key=lambda process: -(process["memory_bytes"] or 0))[:most]
    return [{name: value for name, value in p.items() if value is not None} for p in processes]


def busy_by_pid(samples: Iterable[tuple[int, int, int]], before_us: int) -> dict[str, int]:
    """Nanoseconds by pid out of (stamp in microseconds, pid, percent), in any order.

    A sample is for the time since the one before it of the same process, or since `before_us`.
    """
    added: dict[str, int] = {}
    seen: dict[int, int] = {}
    for stamp, pid, percent in sorted(samples):
        last = seen.get(pid, before_us)
        if stamp > last and 0 <= percent <= 100:
            added[str(pid)] = added.get(str(pid), 0) + min(stamp - last, LONGEST_US) * 10 * percent
            seen[pid] = stamp
    return added
