"""MIG: the instances that a GPU is divided into, and what NVML tells of each.

Of an instance NVML has its identity, memory and processes (those stand in its GPU's list); power, clocks,
temperature and utilisation belong to the whole GPU. Activity comes from GPM alone, per GPU instance.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.gpm import Gpm
from expanse_ebpf.nvml.readings import UNSUPPORTED, Readings

_PROFILE = re.compile(r"MIG (\S{1,32})$")
_MOST = 64
# What NVML says of the memory of an instance that was destroyed.
_GONE = (reasons.INVALID_ARGUMENT, reasons.NOT_SUPPORTED, reasons.NOT_FOUND)


class _GoneError(Exception):
    pass


class _Instance:
    def __init__(self, parent: Any, handle: Any, *, profiler: bool) -> None:
        self.handle = handle
        self.identity: dict[str, Any] = {
            "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "gpu_instance": pynvml.nvmlDeviceGetGpuInstanceId(handle),
            "compute_instance": pynvml.nvmlDeviceGetComputeInstanceId(handle),
            "name": "",
        }
        # An instance without a name is one all the same.
        with contextlib.suppress(pynvml.NVMLError, ValueError):
            self.identity["name"] = pynvml.nvmlDeviceGetName(handle)
        profile = _PROFILE.search(self.identity["name"])
        self.identity["mig_profile"] = profile[1] if profile else ""
        self._gpm: Gpm | None = None
        self._no_gpm = 0  # NVML's error
        if profiler:
            try:
                self._gpm = Gpm(parent, self.identity["gpu_instance"])
            except pynvml.NVMLError as error:
                self._no_gpm = error.value

    def read(self, *, last_try: bool) -> dict[str, Any]:
        """One round; raises _GoneError when there is no such instance, unless it is the `last_try`."""
        found = Readings()
        try:
            memory = pynvml.nvmlDeviceGetMemoryInfo(self.handle)
            found.put("memory_total_bytes", memory.total)
            found.put("memory_free_bytes", memory.free)
            found.put("memory_used_bytes", memory.used)
        except pynvml.NVMLError as error:
            if error.value in _GONE and not last_try:
                raise _GoneError from None
            for name in ("memory_total_bytes", "memory_free_bytes", "memory_used_bytes"):
                found.miss(name, error.value)
        result: dict[str, Any] = {**self.identity, "values": found.values, "missing": found.missing}
        if self._gpm is not None:
            try:
                added, missing = self._gpm.read()
                result["profile"] = {"source": "gpm", "added": added, "missing": missing}
            except pynvml.NVMLError as error:
                if error.value in UNSUPPORTED:
                    self._no_gpm = error.value
                    self.close()
                else:
                    found.miss("profile", error.value)
        if self._no_gpm:
            found.miss("profile", self._no_gpm)
        return result

    def close(self) -> None:
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None


class Instances:
    """The instances of one GPU."""

    def __init__(self, handle: Any, *, profiler: bool) -> None:
        self._handle = handle
        self._profiler = profiler
        self._instances: dict[str, _Instance] = {}  # by UUID

    def read(self, found: Readings, seldom: bool) -> list[dict[str, Any]]:
        """One round of each instance; they are looked for anew when `seldom`, or when one has gone.

        Why they cannot be told is "instances" in `found`.
        """
        try:
            if seldom or not self._instances:
                self._find()
            try:
                return [instance.read(last_try=False) for instance in self._instances.values()]
            except _GoneError:
                self._find()
            return [instance.read(last_try=True) for instance in self._instances.values()]
        except pynvml.NVMLError as error:
            found.miss("instances", error.value)
            return []

    def _find(self) -> None:
        now: dict[str, _Instance] = {}
        for place in range(min(pynvml.nvmlDeviceGetMaxMigDeviceCount(self._handle), _MOST)):
            try:
                handle = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(self._handle, place)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
                known = self._instances.get(uuid)
                if known is None:
                    known = _Instance(self._handle, handle, profiler=self._profiler)
                known.handle = handle
                now[uuid] = known
            except (pynvml.NVMLError, ValueError):
                continue  # there is none at this place
        before, self._instances = self._instances, now
        for uuid in before.keys() - now.keys():
            before[uuid].close()

    def close(self) -> None:
        """Give NVML's samples back."""
        while self._instances:
            self._instances.popitem()[1].close()
