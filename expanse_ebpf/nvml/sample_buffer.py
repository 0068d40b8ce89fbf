"""NVML's own buffers of utilisation samples."""

from __future__ import annotations

import ctypes
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.busy import Busy, Taken
from expanse_ebpf.nvml.readings import UNSUPPORTED, Readings

# Which member of nvmlValue_t holds a value, by nvmlValueType_t.
VALUE_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
_ROOM = 256  # NVML keeps a hundred or so
_MOST = 1 << 16


class SampleBuffer:
    """One buffer of one device; `kind` as in nvmlSamplingType_t, `seen_us` as in Busy."""

    def __init__(self, handle: Any, kind: int, seen_us: int = 0) -> None:
        self._handle = handle
        self._kind = kind
        self._busy = Busy(seen_us)
        self._room = (pynvml.c_nvmlSample_t * _ROOM)()
        self._unsupported = 0
        self._hoard: list[Taken] = []  # taken and not handed on yet

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
        hoard, self._hoard = self._hoard, []
        return Taken(*(sum(column) for column in zip(*hoard, strict=True))) if hoard else Taken(0, 0, 0)

    def empty(self) -> int:
        """Take what NVML has before it runs over; NVML's error, 0 for none."""
        code = self._unsupported
        count = ctypes.c_uint()
        value_type = ctypes.c_uint()
        while not code:
            count.value = len(self._room)
            # Not pynvml's function, which asks twice: how many, and which.
            code = pynvml._nvmlGetFunctionPointer("nvmlDeviceGetSamples")(
                self._handle,
                ctypes.c_uint(self._kind),
                ctypes.c_ulonglong(self._busy.seen_us),
                ctypes.byref(value_type),
                ctypes.byref(count),
                self._room,
            )
            if code != reasons.INSUFFICIENT_SIZE or not len(self._room) < count.value <= _MOST:
                break
            self._room = (pynvml.c_nvmlSample_t * count.value)()
            code = 0
        if code in (reasons.NOT_FOUND, reasons.NO_DATA):  # nothing new
            return 0
        if code:
            if code in UNSUPPORTED:
                self._unsupported = code
            return code
        member = VALUE_MEMBERS.get(value_type.value, "uiVal")
        samples = self._room[: min(count.value, len(self._room))]
        self._hoard.append(
            self._busy.take((s.timeStamp, int(getattr(s.sampleValue, member))) for s in samples)
        )
        return 0
