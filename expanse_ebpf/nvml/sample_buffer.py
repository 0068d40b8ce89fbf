"""NVML's own buffers of utilisation samples."""

from __future__ import annotations

import ctypes
import time
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.busy import Busy, Taken, since
from expanse_ebpf.nvml.readings import UNSUPPORTED, Readings, value_of

_ROOM = 256  # NVML keeps a hundred or so
_NOTHING = Taken(0, 0, 0)
_NO_SHARE = -1  # in the place of a value that is no number


class SampleBuffer:
    """One buffer of one device; `kind` as in nvmlSamplingType_t, `seen_us` as in Busy."""

    def __init__(self, handle: Any, kind: int, seen_us: int = 0) -> None:
        self._handle = handle
        self._kind = kind
        self._busy = Busy(seen_us)
        self._room = (pynvml.c_nvmlSample_t * _ROOM)()
        self._unsupported = 0
        self._kept = _NOTHING  # taken and not handed on yet

    @property
    def seen_us(self) -> int:
        """Stamp of the newest sample that was taken."""
        return self._busy.seen_us

    def take(self, found: Readings, name: str) -> Taken | None:
        """What is new; None with the reason in `found`, under `name`, when NVML does not tell."""
        code = self.empty()
        if code:
            found.miss(name, code)
            return None
        kept, self._kept = self._kept, _NOTHING
        return kept

    def empty(self) -> int:
        """Take what NVML has before it runs over; NVML's error, 0 for none."""
        if self._unsupported:
            return self._unsupported
        now_us = time.time_ns() // 1000
        self._busy.seen_us = since(self._busy.seen_us, now_us)
        count = ctypes.c_uint(len(self._room))
        value_type = ctypes.c_uint()
        # Not pynvml's function, which asks twice: how many, and which.
        try:
            function = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetSamples")
        except pynvml.NVMLError as error:
            self._unsupported = int(error.value)
            return self._unsupported
        code: int = function(
            self._handle,
            ctypes.c_uint(self._kind),
            ctypes.c_ulonglong(self._busy.seen_us),
            ctypes.byref(value_type),
            ctypes.byref(count),
            self._room,
        )
        if code in (reasons.NOT_FOUND, reasons.NO_DATA):  # nothing new
            return 0
        if code:
            if code in UNSUPPORTED:
                self._unsupported = code
            return code
        samples = self._room[: min(count.value, len(self._room))]
        values = (value_of(sample.sampleValue, value_type.value) for sample in samples)
        taken = self._busy.take(
            [
                (sample.timeStamp, _NO_SHARE if value is None else int(value))
                for sample, value in zip(samples, values, strict=True)
            ],
            now_us,
        )
        self._kept = Taken(*(a + b for a, b in zip(self._kept, taken, strict=True)))
        return 0

    def ask_again(self) -> None:
        """What was not supported may be now, as when MIG was turned off."""
        self._unsupported = 0
