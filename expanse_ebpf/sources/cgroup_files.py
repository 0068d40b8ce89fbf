"""What stands in the cgroup files of both worlds; pure parsing, bytes in, figures out.

Each parser returns None for a figure that the text does not hold, never a sentinel and never 0 for
"unknown". Times come out in nanoseconds, sizes in bytes, pressure in microseconds.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_NS_PER_TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
_TOP = 1 << 64
# v1 writes "no limit" as LONG_MAX rounded down to a page, and pages have up to 64 KiB.
_UNLIMITED = (1 << 63) - (1 << 21)

Figures = tuple[int | float | None, ...]


def number(data: bytes) -> int | None:
    """A whole number that fits 64 bits, surrounding white space allowed."""
    data = data.strip()
    if not data.isdigit() or len(data) > 20:
        return None
    value = int(data)
    return value if value < _TOP else None


def field(data: bytes, key: bytes) -> int | None:
    """The number behind `key` at the beginning of a line: `KEY NUMBER…`."""
    if data.startswith(key + b" "):
        start = 0
    else:
        start = data.find(b"\n" + key + b" ") + 1
        if start == 0:
            return None
    words = data[start + len(key) : start + len(key) + 64].split(None, 1)
    return number(words[0]) if words else None


def limit(data: bytes) -> int | None:
    """memory.max, memory.limit_in_bytes: None when there is no limit."""
    value = number(data)
    return None if value is None or value >= _UNLIMITED else value


def quota(data: bytes) -> float | None:
    """cpu.max as a number of CPUs: `200000 100000` is 2.0, `max 100000` None."""
    words = data.split()
    return cores(words[0], words[1]) if len(words) == 2 else None


def cores(quota_us: bytes, period_us: bytes) -> float | None:
    """A quota over its period (cpu.cfs_quota_us, cpu.cfs_period_us) as a number of CPUs; -1 is none."""
    quota, period = number(quota_us), number(period_us)
    return quota / period if quota and period else None


def _scaled(value: int | None, factor: int) -> int | None:
    return None if value is None or value * factor >= _TOP else value * factor


def one(data: bytes) -> Figures:
    """A file that holds one number."""
    return (number(data),)


def cpu_stat(data: bytes) -> Figures:
    """v2 cpu.stat: CPU time, its user and system part, time throttled, periods throttled.

    The first three are there in every v2 cgroup, even with no controller enabled.
    """
    return (
        _scaled(field(data, b"usage_usec"), 1000),
        _scaled(field(data, b"user_usec"), 1000),
        _scaled(field(data, b"system_usec"), 1000),
        _scaled(field(data, b"throttled_usec"), 1000),
        field(data, b"nr_throttled"),
    )


def cpuacct_stat(data: bytes) -> Figures:
    """v1 cpuacct.stat: user and system time, in the kernel's clock ticks."""
    return _scaled(field(data, b"user"), _NS_PER_TICK), _scaled(field(data, b"system"), _NS_PER_TICK)


def throttling(data: bytes) -> Figures:
    """v1 cpu.stat: time throttled (already in ns there), periods throttled."""
    return field(data, b"throttled_time"), field(data, b"nr_throttled")


def memory_stat(data: bytes) -> Figures:
    """v2 memory.stat: anonymous memory, page cache (shared memory counts as cache)."""
    return field(data, b"anon"), field(data, b"file")


def memory_stat_v1(data: bytes) -> Figures:
    """v1 memory.stat: anonymous memory, page cache, the tightest limit up to the root."""
    found = field(data, b"hierarchical_memory_limit")
    return (
        field(data, b"total_rss"),
        field(data, b"total_cache"),
        None if found is None or found >= _UNLIMITED else found,
    )


def oom_kills(data: bytes) -> Figures:
    """`oom_kill` of v2 memory.events and v1 memory.oom_control."""
    return (field(data, b"oom_kill"),)


def pressure(data: bytes) -> Figures:
    """A pressure file: stalled time of some and of all tasks, in microseconds."""
    some, full = None, None
    for line in data.split(b"\n", 3)[:3]:
        total = number(line.rpartition(b" total=")[2])
        if line.startswith(b"some "):
            some = total
        elif line.startswith(b"full "):
            full = total
    return some, full


# Says of `MAJOR:MINOR` that the device's I/O shows up a second time at the devices below it.
Stacked = Callable[[bytes], bool]


def io_stat(data: bytes, stacked: Stacked) -> Figures:
    """v2 io.stat: bytes read, bytes written, reads, writes, over all devices that are not stacked."""
    totals = [0, 0, 0, 0]
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        device, _, rest = line.partition(b" ")
        if b":" not in device or stacked(device):
            continue
        for word in rest.split():
            key, _, value = word.partition(b"=")
            index = _IO_KEYS.get(key)
            if index is not None:
                totals[index] += number(value) or 0
    return tuple(total if total < _TOP else None for total in totals)


_IO_KEYS = {b"rbytes": 0, b"wbytes": 1, b"rios": 2, b"wios": 3}


def blkio(data: bytes, stacked: Stacked) -> Figures:
    """v1 blkio.throttle files: read, written (bytes or operations), over devices that are not stacked.

    Nothing but zeros says nothing: many kernels (6.1, not yet 5.10) count only what goes to devices on
    which some cgroup has a limit.
    """
    read = written = 0
    for line in data[: data.rfind(b"\n") + 1].splitlines():
        words = line.split()
        if len(words) != 3 or b":" not in words[0] or stacked(words[0]):
            continue
        if words[1] == b"Read":
            read += number(words[2]) or 0
        elif words[1] == b"Write":
            written += number(words[2]) or 0
    told = read or written
    return (read if told and read < _TOP else None), (written if told and written < _TOP else None)


class Rising:
    """A cumulative figure that must never fall.

    A value below the last one is held back once: if the next is in order again, it was a bad reading;
    if the next is low as well, the kernel's counter began anew and goes on from what was reached.
    """

    __slots__ = ("_base", "_last", "_suspect")

    def __init__(self) -> None:
        self._base = self._last = 0
        self._suspect = False

    def feed(self, raw: int) -> int:
        """The figure after the reading `raw`."""
        if raw >= self._last:
            self._last = raw
            self._suspect = False
        elif self._suspect:
            self._base += self._last
            self._last = raw
            self._suspect = False
        else:
            self._suspect = True
        return self._base + self._last

    @property
    def value(self) -> int:
        """The figure after the last reading."""
        return self._base + self._last
