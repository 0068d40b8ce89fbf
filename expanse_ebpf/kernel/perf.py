"""Perf events: perf_event_open(2), the events that are counted, and whether the PMU tells the truth.

A descriptor that `open_on_cpus` gives can be put into a BPF perf event array as it is; one that samples
runs a BPF program instead (see kernel/python_stacks.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import resource
import struct
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

from expanse_ebpf.config import COUNTERS

SYSCALLS = {"x86_64": 298, "aarch64": 241}

TYPE_HARDWARE, TYPE_SOFTWARE = 0, 1
FORMAT_ENABLED, FORMAT_RUNNING = 1, 2
FLAG_CLOEXEC = 8
_EXCLUDE_IDLE, _FREQUENCY = 1 << 7, 1 << 10  # bits of struct perf_event_attr
_ATTR_SIZE = 64  # PERF_ATTR_SIZE_VER0: nothing newer is needed, and every kernel takes it

# A loop on one core cannot run slower or faster than this, per second of CPU time. Wide, so that
# emulators and deeply throttled cores pass; a PMU that does not count, or counts another CPU, fails.
PLAUSIBLE_PER_SECOND = {"cycles": (2e7, 2e10), "instructions": (2e6, 1e11)}

_OTHER_FILES = 256  # maps, programs, sockets, cgroup files
_FALSE = "not believed"


class EventSpec(NamedTuple):
    """One perf event: `type` and `config` as perf_event_open(2) has them."""

    name: str
    type: int
    config: int


class Reading(NamedTuple):
    """A counter's raw value, and for how long (ns) it was wanted and was really counting."""

    value: int
    enabled_ns: int
    running_ns: int

    @property
    def scaled(self) -> int | None:
        """The value for the whole time; None when it never counted."""
        return self.value * self.enabled_ns // self.running_ns if self.running_ns else None


HARDWARE = {
    name: EventSpec(name, TYPE_HARDWARE, config)
    for name, config in zip(COUNTERS, (0, 1, 2, 3, 5), strict=True)
}
SOFTWARE = {
    name: EventSpec(name, TYPE_SOFTWARE, config)
    for name, config in (
        ("cpu-clock", 0),
        ("task-clock", 1),
        ("page-faults", 2),
        ("context-switches", 3),
        ("cpu-migrations", 4),
    )
}


class Opener(Protocol):
    """What opens one event on one CPU, or for one thread; raises OSError."""

    def __call__(self, spec: EventSpec, cpu: int, group_fd: int = -1, *, pid: int = -1) -> int:
        """The new descriptor."""


def open_counter(spec: EventSpec, cpu: int, group_fd: int = -1, *, pid: int = -1, frequency: int = 0) -> int:
    """A descriptor that counts `spec` from now on; raises OSError.

    `pid` -1 counts everything on `cpu`; `pid` 0 with `cpu` -1 counts the calling thread. A read gives
    value, time enabled and time running, 8 bytes each. With `frequency` it samples as well, so many times
    a second, unless the CPU is idle.
    """
    number = SYSCALLS.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"perf events are not supported on {platform.machine()}")
    # type, size, config, sample period or frequency, sample type, read format, bits; the rest stays 0.
    attr = struct.pack(
        *("=IIQQQQQ16x", spec.type, _ATTR_SIZE, spec.config, frequency, 0, FORMAT_ENABLED | FORMAT_RUNNING),
        _EXCLUDE_IDLE | _FREQUENCY if frequency else 0,
    )
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor: int = libc.syscall(
        ctypes.c_long(number),
        ctypes.create_string_buffer(attr, _ATTR_SIZE),
        ctypes.c_int(pid),
        ctypes.c_int(cpu),
        ctypes.c_int(group_fd),
        ctypes.c_ulong(FLAG_CLOEXEC),
    )
    if descriptor < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return descriptor


def read_counter(descriptor: int) -> Reading:
    """What the counter stands at; raises OSError."""
    data = os.read(descriptor, 24)
    if len(data) < 24:
        # The kernel gives an empty read for an event in error state, e.g. a pinned one that lost its place.
        raise OSError(errno.EIO, "the event is in error state")
    return Reading(*struct.unpack("=QQQ", data))


def reason(error: OSError) -> str:
    """Why an event could not be opened, in one line."""
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    if code in (errno.ENOENT, errno.EOPNOTSUPP, errno.ENODEV, errno.EINVAL, errno.ENOSYS):
        return f"unsupported({name})"
    if code in (errno.EACCES, errno.EPERM):
        return f"permission({name}): needs CAP_PERFMON, or kernel.perf_event_paranoid of 0 or less"
    if code in (errno.EMFILE, errno.ENFILE):
        limit = "RLIMIT_NOFILE" if code == errno.EMFILE else "fs.file-max"
        return f"descriptors({name}): {limit} is too low for one descriptor per CPU and event"
    if code == errno.EBUSY:
        return "busy(EBUSY): another tool holds the counter exclusively"
    return f"failed({name}): {error.strerror or 'unknown error'}"


class OpenCounters:
    """Descriptors of some events on some CPUs.

    A CPU on which an event fails that others can open is `missing` as a whole, so that the events of a
    CPU stay comparable. An event that fails on every CPU is `refused` and takes no CPU with it.
    """

    def __init__(self, specs: Sequence[EventSpec], opener: Opener = open_counter) -> None:
        self.specs = tuple(specs)
        self.descriptors: dict[tuple[str, int], int] = {}
        self.missing: dict[int, str] = {}  # CPU to reason
        self.refused: dict[str, str] = {}  # event to reason
        self._opener = opener

    @property
    def cpus_missing(self) -> int:
        """How many online CPUs are not counted."""
        return len(self.missing)

    def update(self, cpus: Iterable[int], dead: Collection[int] = ()) -> list[int]:
        """Follow the online list: open on CPUs that came, close on those that went, try missing ones again.

        An event stops for good when its CPU goes offline, even if that comes back: on CPUs in `dead` they
        are closed and opened anew. The CPUs on which descriptors were opened now. Never raises for an
        event that does not open.
        """
        online = set(cpus)
        for name, cpu in [key for key in self.descriptors if key[1] not in online or key[1] in dead]:
            self._close(name, cpu)
        counted = {cpu for _, cpu in self.descriptors}
        failures: dict[tuple[str, int], str] = {}
        tried = sorted(online - counted)
        wanted = [spec for spec in self.specs if not counted or spec.name not in self.refused]
        _make_room(len(tried) * len(wanted))
        for cpu in tried:
            for spec in wanted:
                try:
                    self.descriptors[spec.name, cpu] = self._opener(spec, cpu)
                except OSError as error:
                    failures[spec.name, cpu] = reason(error)
        if not counted:
            self.refused = {
                spec.name: failures[spec.name, tried[0]]
                for spec in wanted
                if tried and all((spec.name, cpu) in failures for cpu in tried)
            }
        self.missing = {}
        for (name, cpu), why in failures.items():
            if name not in self.refused:
                self.missing.setdefault(cpu, why)
        for name, cpu in [key for key in self.descriptors if key[1] in self.missing]:
            self._close(name, cpu)
        return [cpu for cpu in tried if any((spec.name, cpu) in self.descriptors for spec in wanted)]

    def _close(self, name: str, cpu: int) -> None:
        os.close(self.descriptors.pop((name, cpu)))

    def close(self) -> None:
        """Close every descriptor; safe to call twice."""
        while self.descriptors:
            os.close(self.descriptors.popitem()[1])


def _make_room(descriptors: int) -> None:
    """Raise the soft limit on open files to the hard one when it would not do for so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < descriptors + _OTHER_FILES:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def open_on_cpus(
    specs: Sequence[EventSpec], cpus: Iterable[int], opener: Opener = open_counter
) -> OpenCounters:
    """`specs` opened on each of `cpus`; what does not open is in the result with its reason."""
    counters = OpenCounters(specs, opener)
    counters.update(cpus)
    return counters


def known_loop(seconds: float = 0.01) -> float:
    """Keep this thread busy for about `seconds` of CPU time; the CPU time really taken, in seconds.

    Beside arithmetic it touches fresh pages, so that cache references and misses cannot honestly be 0.
    """
    import mmap

    start = time.thread_time()
    total = 0
    while (spent := time.thread_time() - start) < seconds:
        with mmap.mmap(-1, 1 << 18) as pages:
            pages[:: mmap.PAGESIZE] = bytes(len(pages) // mmap.PAGESIZE)
        for number in range(2000):
            total ^= number * number
    return spent


def judge(name: str, reading: Reading, cpu_seconds: float) -> str:
    """Why a counter that was open during `cpu_seconds` of the known loop is not believed; empty: it is."""
    if reading.running_ns <= 0:
        return "never counted: no counter register was free (another tool, or the NMI watchdog, holds it)"
    if reading.value <= 0:
        return f"{_FALSE}: counted nothing during a known loop"
    low, high = PLAUSIBLE_PER_SECOND.get(name, (0.0, float("inf")))
    rate = (reading.scaled or 0) / max(cpu_seconds, 1e-9)
    if not low <= rate <= high:
        return f"{_FALSE}: counted {rate:.3g} per second during a known loop"
    return ""


def self_test(
    counters: Iterable[str] = COUNTERS,
    opener: Opener = open_counter,
    reader: Callable[[int], Reading] = read_counter,
    loop: Callable[[], float] = known_loop,
) -> dict[str, str]:
    """Whether each hardware counter tells the truth: its name to the reason why not, or to "".

    Takes about 10 ms of CPU time per counter that opens, one at a time, since several at once may have
    to share registers and then not be scheduled at all in so short a time. When cycles or instructions
    open but lie, no other counter of that PMU is believed either.
    """
    result: dict[str, str] = {}
    counters = tuple(counters)
    for name in counters:
        try:
            descriptor = opener(HARDWARE[name], -1, pid=0)
        except OSError as error:
            result[name] = reason(error)
            continue
        try:
            spent = loop()
            result[name] = judge(name, reader(descriptor), spent)
        except OSError as error:
            result[name] = f"cannot be read: {error.strerror}"
        finally:
            os.close(descriptor)
        if name in PLAUSIBLE_PER_SECOND and result[name].startswith(_FALSE):
            return {other: result[name] if other == name else f"{name} {result[name]}" for other in counters}
    return result
