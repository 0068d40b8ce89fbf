"""The GPU profiler: NVML's GPU performance monitoring (GPM), on Hopper and later.

GPM gives means over the time between two samples. They are turned into the time in which a unit was
active, which can be added up: a report that is lost then loses resolution and no quantity.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pynvml

from expanse_ebpf.nvml.reasons import ABSURD

# nvml.h, nvmlGpmMetricId_t: percentages of the time or of the most there can be.
_SHARES = {
    1: "graphics_ns",
    2: "sm_active_ns",
    3: "sm_occupancy_ns",
    4: "integer_ns",
    5: "tensor_ns",
    10: "dram_ns",
    11: "fp64_ns",
    12: "fp32_ns",
    13: "fp16_ns",
}
# MiB per second.
_RATES = {
    20: "pcie_sent_bytes",
    21: "pcie_received_bytes",
    61: "nvlink_sent_bytes",
    60: "nvlink_received_bytes",
}
_METRICS = (*_SHARES, *_RATES)
_MIB = 1 << 20
_MOST_MIB = 1e8  # per second: 100 TiB/s, which nothing reaches
_SLACK = 101.0  # percent, for rounding


def supported(handle: Any) -> bool:
    """Whether the device has GPM; raises pynvml.NVMLError when that cannot be told."""
    return bool(pynvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice)


class Gpm:
    """The profile of one GPU, or of one GPU instance where `gpu_instance` is given."""

    def __init__(self, handle: Any, gpu_instance: int | None = None) -> None:
        self._handle = handle
        self._gpu_instance = gpu_instance
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self._taken_ns = 0  # monotonic time of the older sample; 0: there is none
        self._question = pynvml.c_nvmlGpmMetricsGet_t()
        self._question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        self._question.numMetrics = len(_METRICS)
        for place, metric in enumerate(_METRICS):
            self._question.metrics[place].metricId = metric

    def read(self) -> tuple[dict[str, int], dict[str, int]]:
        """What the time since the last call has added, and NVML's error for each figure that is missing.

        The first call only begins, and adds nothing. Raises pynvml.NVMLError when there is no sample.
        """
        before, after = self._samples
        if self._gpu_instance is None:
            pynvml.nvmlGpmSampleGet(self._handle, after)
        else:
            pynvml.nvmlGpmMigSampleGet(self._handle, self._gpu_instance, after)
        now = time.monotonic_ns()
        began, self._taken_ns = self._taken_ns, now
        self._samples = [after, before]
        if not began:
            return {}, {}
        self._question.sample1, self._question.sample2 = before, after
        try:
            pynvml.nvmlGpmMetricsGet(self._question)
        except pynvml.NVMLError:
            self._taken_ns = 0  # what lies between two samples that do not fit is not known
            raise
        return _added(self._question, now - began)

    def close(self) -> None:
        """Give the samples back to NVML."""
        for sample in self._samples:
            with contextlib.suppress(pynvml.NVMLError):
                pynvml.nvmlGpmSampleFree(sample)
        self._samples = []


def _added(answer: Any, span_ns: int) -> tuple[dict[str, int], dict[str, int]]:
    added = {"measured_ns": span_ns}
    missing: dict[str, int] = {}
    for place, metric in enumerate(_METRICS):
        got = answer.metrics[place]
        name = _SHARES.get(metric) or _RATES[metric]
        limit = _SLACK if metric in _SHARES else _MOST_MIB
        if got.nvmlReturn:
            missing[name] = got.nvmlReturn
        elif not 0 <= got.value <= limit:  # nor is one that is no number
            missing[name] = ABSURD
        elif metric in _SHARES:
            added[name] = int(min(got.value, 100.0) / 100 * span_ns)
        else:
            added[name] = int(got.value * _MIB * span_ns / 1e9)
    return added, missing
