"""The GPU profiler of one device: GPM, or the nearest plain figures where there is none."""

from __future__ import annotations

import time
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.gpm import Gpm, supported
from expanse_ebpf.nvml.readings import UNSUPPORTED, Readings
from expanse_ebpf.nvml.sample_buffer import SampleBuffer

_ONLY_GPM = ("sm_active_ns", "sm_occupancy_ns", "tensor_ns", "fp64_ns", "fp32_ns", "fp16_ns", "integer_ns")
_MOST_KIB = 1 << 30  # per second: 1 TiB/s, which no PCIe link reaches
_LONGEST_NS = 15_000_000_000  # a rate is not taken to have held for longer than this


class Profile:
    """What the profiler adds to the counters of one device."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self._gpm: Gpm | None = None
        self._has_gpm: bool | None = None  # None: not asked yet
        self._memory = SampleBuffer(handle, pynvml.NVML_MEMORY_UTILIZATION_SAMPLES)
        self._read_ns = 0  # monotonic time

    def read(self, found: Readings) -> dict[str, Any]:
        """{"source", "added", "missing"}; what fails as a whole is "profile" in `found`."""
        try:
            if self._has_gpm is None:
                self._has_gpm = supported(self._handle)
            if self._has_gpm:
                if self._gpm is None:
                    self._gpm = Gpm(self._handle)
                added, missing = self._gpm.read()
                return {"source": "gpm", "added": added, "missing": missing}
        except pynvml.NVMLError as error:
            if error.value not in UNSUPPORTED:
                found.miss("profile", error.value)
                return {"source": "gpm", "added": {}, "missing": {}}
            self.close()
            self._has_gpm = False
        return self._plain(found)

    def _plain(self, found: Readings) -> dict[str, Any]:
        added: dict[str, int] = {}
        missing = dict.fromkeys(_ONLY_GPM, reasons.NOT_SUPPORTED)
        taken = self._memory.take(found, "profile")
        if taken is not None:
            # The share of time in which memory was read or written, not of its bandwidth.
            added["dram_ns"], added["measured_ns"] = taken.busy_ns, taken.measured_ns
        now = time.monotonic_ns()
        before, self._read_ns = self._read_ns, now
        for name, counter in (
            ("pcie_sent_bytes", pynvml.NVML_PCIE_UTIL_TX_BYTES),
            ("pcie_received_bytes", pynvml.NVML_PCIE_UTIL_RX_BYTES),
        ):
            try:  # KiB per second, of the last 20 ms, for which the call waits
                rate = pynvml.nvmlDeviceGetPcieThroughput(self._handle, counter)
            except pynvml.NVMLError as error:
                missing[name] = error.value
                continue
            if rate > _MOST_KIB:
                missing[name] = reasons.ABSURD
            elif before:
                added[name] = rate * 1024 * min(now - before, _LONGEST_NS) // 1_000_000_000
        return {"source": "nvml", "added": added, "missing": missing}

    def empty_buffer(self) -> None:
        """Take the samples that would be lost if nobody asked for long."""
        if self._has_gpm is False:
            self._memory.empty()

    def close(self) -> None:
        """Give NVML's samples back."""
        if self._gpm is not None:
            self._gpm.close()
            self._gpm = None
