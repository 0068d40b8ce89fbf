"""Probes in files: many at once by a uprobe_multi link, or one by one where there is none (before 6.6)."""

from __future__ import annotations

import errno
import os
import platform
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import addressof, c_uint64, create_string_buffer

from expanse_ebpf.kernel import bpf_call, libbpf, trials
from expanse_ebpf.kernel.bpf_call import LINK_CREATE, TRACE_UPROBE_MULTI
from expanse_ebpf.kernel.features import ABILITIES

MULTI, PERF = "uprobe_multi", "perf"
_AT_ONCE = 32  # links that are taken away
NO_PLACE = "its first instruction takes no probe"

_ENOTSUPP = 524  # of include/linux/errno.h: user space has no such error

# struct link_create of bpf(2) for uprobe_multi: program, target, attach type, flags; path, offsets, reference
# counters, cookies, their number, flags, pid.
_LINK = struct.Struct("=IIIIQQQQIII")


def method() -> str:
    """How this kernel takes probes: MULTI or PERF."""
    return PERF if trials.link_uprobe_multi() else MULTI


def supported() -> str:
    """Why no probe can be told from another one here, and the remedy after "; ". Empty when they can be.

    It is tried: there are older kernels by their number that have it.
    """
    if trials.load_attach_cookie() != errno.EINVAL:  # another error says nothing of the kernel
        return ""
    (major, minor), without = ABILITIES["attach cookies"]
    return f"{platform.release()} has no attach cookies, {without}; boot Linux {major}.{minor} or newer"


def _reason(code: int) -> str:
    return NO_PLACE if code == _ENOTSUPP else os.strerror(code)


class Probes:
    """The probes of one program, put in place file by file."""

    def __init__(self, program: libbpf.Program, by: str) -> None:
        """`by` is MULTI (the program must be loaded for TRACE_UPROBE_MULTI) or PERF."""
        self._program = program
        self._by = by
        self._links: list[int] = []
        self.count = 0  # that are in place

    def attach(self, path: str, places: Sequence[tuple[int, int]], pid: int = 0) -> dict[int, str]:
        """Put a probe at each of `places` (offset in the file at `path`, cookie), for process `pid` or all.

        Gives those offsets at which the kernel refused, and why.
        """
        if self._by == MULTI and len(places) > 1:
            try:
                self._links.append(self._multi(path, places, pid))
                self.count += len(places)
                return {}
            except OSError:
                pass  # one bad place spoils them all: each by itself
        refused = {}
        for offset, cookie in places:
            try:
                if self._by == MULTI:
                    self._links.append(self._multi(path, [(offset, cookie)], pid))
                else:
                    self._links.append(self._program.probe(path, offset, cookie, pid))
                self.count += 1
            except OSError as error:
                refused[offset] = _reason(error.errno or errno.EIO)
            except libbpf.BpfError as error:
                refused[offset] = _reason(error.errno)
        return refused

    def _multi(self, path: str, places: Sequence[tuple[int, int]], pid: int) -> int:
        name = create_string_buffer(os.fsencode(path))
        offsets = (c_uint64 * len(places))(*(offset for offset, _ in places))
        cookies = (c_uint64 * len(places))(*(cookie for _, cookie in places))
        attributes = _LINK.pack(
            *(self._program.fd, 0, TRACE_UPROBE_MULTI, 0),
            *(addressof(name), addressof(offsets), 0, addressof(cookies), len(places), 0, pid),
        )
        return bpf_call.bpf(LINK_CREATE, attributes)

    def detach(self) -> None:
        """Take all away; safe when there is none."""
        links, self._links = self._links, []
        if links:
            # The kernel waits, some 30 ms for each, until no CPU can be in the probe any more: side by side.
            with ThreadPoolExecutor(min(_AT_ONCE, len(links))) as threads:
                list(threads.map(os.close if self._by == MULTI else libbpf.unlink, links))
        self.count = 0
