"""Where timed calls return to: a plain probe there sees their end, and leaves the caller's stack alone."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.kernel.gpu_calls import GpuCalls
from expanse_ebpf.python_stacks import mapped_files
from expanse_ebpf.tracing.calibration import is_stepped

if TYPE_CHECKING:
    from expanse_ebpf.kernel.uprobes import Probes

_MOST = 512  # of a window
# A process may have very many mappings, and call from everywhere: after so long, others have their turn.
_TURN_S = 0.01
_REST = 4  # times as long
_TOO_LATE = "the window was over before they were looked up"


class _Place(NamedTuple):
    pid: int
    device: int
    inode: int
    offset: int
    cookie: int


class Sites:
    """The places of one window, with a descriptor for each file that they are in."""

    def __init__(self, probes: Probes) -> None:
        self._refused: dict[str, int] = {}
        self._probes = probes
        self._taken = 0  # places that were looked up or wait for it
        self._waiting: deque[tuple[int, int]] = deque()
        self._turn_s = self._again_at = 0.0
        self._files: dict[tuple[int, int], int] = {}  # (device, inode) to an open descriptor
        self._places: set[_Place] = set()

    @property
    def refused(self) -> dict[str, int]:
        """Places that have no probe, by why."""
        return {**self._refused, **({_TOO_LATE: len(self._waiting)} if self._waiting else {})}

    def add(self, pid: int, address: int, *, attach: bool) -> None:
        """Take up the place at `address` of process `pid`, and put the probe there if `attach`.

        The probe is for that process alone: others may come to the same place, in the interpreter's own call
        of C functions for one, far more often.
        """
        if self._taken >= _MOST:
            self._refuse(f"more than {_MOST} places")
            return
        self._taken += 1
        self._waiting.append((pid, address))
        self.go_on(attach=attach)

    def go_on(self, *, attach: bool) -> None:
        """Take up places that wait; to be called again and again, since it never takes long."""
        while self._waiting and (began := time.monotonic()) >= self._again_at:
            self._take_up(*self._waiting.popleft(), attach=attach)
            self._turn_s += time.monotonic() - began
            if self._turn_s >= _TURN_S:
                self._again_at = time.monotonic() + _REST * self._turn_s
                self._turn_s = 0.0

    def _take_up(self, pid: int, address: int, *, attach: bool) -> None:
        try:
            place = self._find(pid, address)
        except OSError as error:
            self._refuse(error.strerror or "not readable")
            return
        if place is None:
            self._refuse("not in a file")
        elif place not in self._places:
            self._places.add(place)
            if attach:
                self._attach(place)

    def attach(self) -> None:
        """Put all probes in place."""
        for place in list(self._places):
            self._attach(place)

    def _attach(self, place: _Place) -> None:
        path = f"/proc/self/fd/{self._files[place.device, place.inode]}"
        for reason in self._probes.attach(path, [(place.offset, place.cookie)], place.pid).values():
            self._places.discard(place)  # the process may be gone, too
            self._refuse(reason)

    def _refuse(self, reason: str) -> None:
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def _find(self, pid: int, address: int) -> _Place | None:
        process = f"/proc/{pid}"
        for line in mapped_files.read_maps(process).split(b"\n"):
            parsed = mapped_files.parse_line(line)
            if parsed is None or not parsed[0].start <= address < parsed[0].end:
                continue
            mapping, _, path = parsed
            found = mapped_files.open_mapped(process, process, path, mapping)
            if found is None:
                return None
            status = os.fstat(found)
            key = (status.st_dev, status.st_ino)
            if key in self._files:
                os.close(found)
            else:
                self._files[key] = found
            offset = address - mapping.start + mapping.offset
            stepped = is_stepped(os.pread(self._files[key], 2, offset))
            return _Place(pid, *key, offset, GpuCalls.return_cookie(stepped=stepped))
        return None

    def close(self) -> None:
        """Close the files; the probes stay."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()
