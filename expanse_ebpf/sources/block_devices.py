"""Which block devices stand on others, so that the kernel counts their I/O more than once."""

from __future__ import annotations

import os


class Devices:
    """Answers for `MAJOR:MINOR`, each device looked up in sysfs once."""

    def __init__(self, sysfs: str = "/sys/dev/block") -> None:
        self._sysfs = sysfs
        self._stacked: dict[bytes, bool] = {}

    def stacked(self, device: bytes) -> bool:
        """Whether `MAJOR:MINOR` is a device-mapper, RAID or loop device; looked up once per device."""
        known = self._stacked.get(device)
        if known is None:
            known = len(device) < 32 and self._look(device.decode("ascii", "replace"))
            if len(self._stacked) > 4096:
                self._stacked.clear()
            self._stacked[device] = known
        return known

    def _look(self, device: str) -> bool:
        try:
            if not device.replace(":", "").isdigit():
                return False
            base = f"{self._sysfs}/{device}"
            return os.path.isdir(f"{base}/loop") or bool(os.listdir(f"{base}/slaves"))  # noqa: PTH112, PTH208
        except (OSError, ValueError):
            return False
