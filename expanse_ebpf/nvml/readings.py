"""What was read of one device in one round, and what was not."""

from __future__ import annotations

from typing import Any

from expanse_ebpf.nvml import reasons

# Errors that will not change while the library is loaded: not supported, no such function, another version.
UNSUPPORTED = (reasons.NOT_SUPPORTED, 13, 25)
_FLAGS = {"ecc_enabled", "remapping_pending", "remapping_failed", "persistence", "mig_enabled"}


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
            return
        self.values[name] = bool(value) if name in _FLAGS else value
        self.missing.pop(name, None)

    def miss(self, name: str, code: int) -> None:
        """Why a figure is missing; raises GpuLostError when that goes for all of them."""
        if code in (reasons.LOST, reasons.RESET_REQUIRED):
            raise GpuLostError(code)
        if name not in self.values:
            self.missing[name] = code
