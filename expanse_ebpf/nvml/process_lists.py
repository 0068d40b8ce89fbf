"""The processes on one device, of all kinds together, and how busy each keeps it."""

from __future__ import annotations

from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.busy import LONGEST_US
from expanse_ebpf.nvml.process_list import KINDS, Listed, ProcessList
from expanse_ebpf.nvml.readings import Readings


class ProcessLists:
    """NVML's lists for one device; `lists` by kind, those that the library has."""

    def __init__(self, handle: Any, lists: dict[str, ProcessList]) -> None:
        self._handle = handle
        self._lists = lists
        self._known: dict[str, list[dict[str, Any]]] = {}  # by kind, as last read
        self._seen_us = 0  # stamp of the newest sample of a process's use

    def read(self, found: Readings, seldom: bool) -> tuple[list[dict[str, Any]], int]:
        """All processes, each once with its `kind`, and how many records cannot be true.

        Graphics is rare on such nodes and MPS runs on few, so those are asked for only when it is time
        for what changes seldom, and MPS always once it had clients.
        """
        rejected = 0
        for kind in KINDS:
            if kind == "compute" or seldom or (kind == "mps" and self._known.get(kind)):
                listed = self._lists[kind].read(self._handle) if kind in self._lists else 13
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

    def utilization(self, found: Readings) -> dict[str, int]:
        """How long each process, by its pid, kept the SMs busy since the last call, in nanoseconds.

        The first call only begins. NVML finds nothing where no process was busy.
        """
        try:
            samples = pynvml.nvmlDeviceGetProcessUtilization(self._handle, self._seen_us)
        except pynvml.NVMLError as error:
            if error.value not in (0, reasons.NOT_FOUND):  # 0: there is room for none and there is none
                found.miss("by_process", error.value)
            return {}
        added: dict[str, int] = {}
        before = self._seen_us
        for sample in samples:
            if sample.timeStamp <= before or not 0 <= sample.smUtil <= 100:
                continue
            self._seen_us = max(self._seen_us, sample.timeStamp)
            if before:
                span = min(sample.timeStamp - before, LONGEST_US)
                pid = str(sample.pid)
                added[pid] = added.get(pid, 0) + span * 10 * sample.smUtil
        return added
