"""What was read of one device in one round, and what was not."""

from __future__ import annotations

import math
from typing import Any

from expanse_ebpf.nvml import reasons

# Errors that last: not supported, no such function, another version. MIG is what changes the first.
UNSUPPORTED = (reasons.NOT_SUPPORTED, reasons.FUNCTION_NOT_FOUND, reasons.VERSION_MISMATCH)
_FLAGS = {"ecc_enabled", "remapping_pending", "remapping_failed", "persistence", "mig_enabled"}
# Which member of nvmlValue_t holds a value, by nvmlValueType_t.
_MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def value_of(union: Any, kind: int) -> int | float | None:
    """The number in an nvmlValue_t, given its nvmlValueType_t; None when it is none."""
    value: int | float = getattr(union, _MEMBERS.get(kind, "ullVal"))
    return value if math.isfinite(value) else None


class GpuLostError(Exception):
    """Nothing more can be asked about the device; `code` is NVML's."""

    def __init__(self, code: int) -> None:
        super().__init__(reasons.sentence(code))
        self.code = code


class Readings:
    """Figures by name, and NVML's error for each that is missing."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.missing: dict[str, int] = {}

    def put(self, name: str, value: Any) -> None:
        """A figure; None where this driver has none."""
        if value is None:
            self.miss(name, reasons.NOT_SUPPORTED)
        elif name in _FLAGS and value not in (0, 1):
            self.miss(name, reasons.ABSURD)
        else:
            self.values[name] = bool(value) if name in _FLAGS else value
            self.missing.pop(name, None)

    def miss(self, name: str, code: int) -> None:
        """Why a figure is missing; raises GpuLostError when that goes for all of them."""
        if code in (reasons.LOST, reasons.RESET_REQUIRED):
            raise GpuLostError(code)
        if name not in self.values:
            self.missing[name] = code
