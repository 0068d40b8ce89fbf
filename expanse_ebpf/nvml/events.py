"""What happens to the GPUs, as NVML tells it: XID errors.

In MIG mode the event is of the whole GPU too: what befell an instance may have befallen its neighbours.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
from collections import Counter
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons

_MOST, _LONGEST_S = 100_000, 0.1  # in one round
_MOST_KINDS = 256  # of GPU and code


class Events:
    """NVML's queue of events, of those GPUs that were registered."""

    def __init__(self) -> None:
        self._set: Any = None
        self._registered: dict[int, str] = {}  # UUID by the handle's address: a lost GPU has no other name
        self._said_that_more = False
        self._refused: set[int] = set()  # of which it was said that they have no events

    def register(self, handle: Any, uuid: str) -> None:
        """Ask for the device's events; one that has none, or NVML without them, is none the worse."""
        address = _address(handle)
        if address in self._registered:
            return
        try:
            if self._set is None:
                self._set = pynvml.nvmlEventSetCreate()
            wanted = pynvml.nvmlEventTypeXidCriticalError & pynvml.nvmlDeviceGetSupportedEventTypes(handle)
            if wanted:
                pynvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
            self._registered[address] = uuid
        except pynvml.NVMLError as error:
            if address not in self._refused:
                print(f"no events of {uuid}: {reasons.sentence(error.value)}", file=sys.stderr)
            self._refused.add(address)

    def take(self) -> list[dict[str, Any]]:
        """What has happened since the last call: `uuid`, `xid` and the `count` of equal ones.

        All of it, unless it is a flood: what is left for the next call would be told of whoever holds the GPU
        by then.
        """
        found: Counter[tuple[str, int]] = Counter()
        until = time.monotonic() + _LONGEST_S
        left = _MOST
        while self._set is not None:
            if not left or len(found) >= _MOST_KINDS or time.monotonic() > until:
                self._say_that_there_are_more()
                break
            left -= 1
            event = pynvml.c_nvmlEventData_t()
            code = self._next(event)
            if code:
                if code != reasons.TIMEOUT:
                    self._begin_anew()
                break
            uuid = self._registered.get(_address(event.device))
            if uuid is not None and event.eventType & pynvml.nvmlEventTypeXidCriticalError:
                found[uuid, event.eventData] += 1
        return [{"uuid": uuid, "xid": xid, "count": count} for (uuid, xid), count in found.items()]

    def _say_that_there_are_more(self) -> None:
        if not self._said_that_more:
            print("more Xid errors than can be taken in time: some are told later", file=sys.stderr)
        self._said_that_more = True

    def _next(self, event: Any) -> int:
        for name in ("nvmlEventSetWait_v2", "nvmlEventSetWait"):  # older ones lack MIG's numbers alone
            try:
                wait = pynvml._nvmlGetFunctionPointer(name)
            except pynvml.NVMLError:
                continue
            code: int = wait(self._set, ctypes.byref(event), ctypes.c_uint(0))
            return code
        return reasons.FUNCTION_NOT_FOUND

    def _begin_anew(self) -> None:
        """One lost GPU keeps NVML from telling of the others: they are to be registered without it."""
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlEventSetFree(self._set)
        self._set = None
        self._registered.clear()


def _address(handle: Any) -> int:
    return ctypes.cast(handle, ctypes.c_void_p).value or 0
