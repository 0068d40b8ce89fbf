"""Source "delays": how long a job's tasks waited for a CPU, for block I/O, for swap, for memory.

The kernel's task delay accounting, one question over generic netlink for each process (all its threads,
those that exited too, answered together). It is off by default and this source does not switch it on:
it costs every task a little. What a process gathers between the last question and its end is not seen.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.processes import in_cgroup
from expanse_ebpf.sources.netlink_parts import part

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report

SWITCH = "/proc/sys/kernel/task_delayacct"
TURN_S = 2.0  # each process is asked about so often
_ERROR = 2
_TYPE_STATS, _TYPE_AGGREGATE = 3, 5
_HEADER = struct.Struct("=IHHII")
_ATTRIBUTE = struct.Struct("=HH")
_GENERIC = 4  # bytes of the generic netlink header
_MOST_PROCESSES = 4096  # asked for one job in one turn
_NONE = (0, 0, 0, 0)


class Taken(NamedTuple):
    """What one process has waited so far, in ns, and for how long it has lived, in us."""

    delays: tuple[int, int, int, int]  # CPU, block I/O, swap, memory reclaim
    age_us: int
    # Whether it waited for anything but a CPU. The kernel tells of that wait always, of the others only
    # for processes that began after the switch was set, and for the rest it says 0.
    other: bool


def decode(stats: bytes) -> Taken | None:
    """A `struct taskstats` of any version; None where it is too old (before 7) or says nothing."""
    # Version 15 alone put a longest and a shortest delay behind each total; 16 moved them to the end.
    inserted = 16 if stats[:2] == struct.pack("=H", 15) else 0
    places = (24, 40 + inserted, 56 + 2 * inserted, 320 + 3 * inserted)
    if len(stats) < places[-1] + 8 or not _long(stats, 16):  # never on a CPU
        return None
    cpu, block_io, swap_in, reclaim = (_long(stats, place) for place in places)
    other = any(_long(stats, place - 8) for place in places[1:])
    return Taken((cpu, block_io, swap_in, reclaim), _long(stats, 144 + 3 * inserted), other)


def _long(stats: bytes, place: int) -> int:
    value: int = struct.unpack_from("=Q", stats, place)[0]
    return value


def statistics(answer: bytes) -> bytes:
    """The `struct taskstats` in the kernel's answer about a thread group; empty when there is none.

    Raises OSError when the answer is an error.
    """
    if len(answer) < _HEADER.size + 4:
        return b""
    length, kind, *_ = _HEADER.unpack_from(answer)
    if kind == _ERROR:
        (number,) = struct.unpack_from("=i", answer, _HEADER.size)
        raise OSError(-number, os.strerror(abs(number)))
    group = _attribute(answer[_HEADER.size + _GENERIC : length], _TYPE_AGGREGATE)
    return _attribute(group, _TYPE_STATS)


def _attribute(data: bytes, wanted: int) -> bytes:
    offset = 0
    while offset + _ATTRIBUTE.size <= len(data):
        length, kind = _ATTRIBUTE.unpack_from(data, offset)
        if length < _ATTRIBUTE.size:
            break
        if kind == wanted:
            return data[offset + _ATTRIBUTE.size : offset + length]
        offset += (length + 3) & ~3
    return b""


def create(context: Context) -> DelaysSource:
    """The source as the configuration wants it."""
    return DelaysSource(context.config.agent.interval_s)


class DelaysSource:
    """Asks the kernel about the processes of each job, a part of the jobs in each tick."""

    name = "delays"

    def __init__(self, interval_s: float = 1.0) -> None:
        self.unavailable: dict[str, str] = {}
        self._every = max(1, round(TURN_S / interval_s))
        self._tick = 0
        self._on_since = 0.0  # monotonic time since which the switch is known to be set
        self._socket: socket.socket | None = None
        self._question = b""
        self._jobs: dict[Job, _JobDelays] = {}

    def start(self) -> None:
        """Import pyroute2 and find the kernel's interface; raises UnavailableError."""
        reason = _switched_off()
        if reason:
            raise UnavailableError(f"delays: {reason}")
        self._on_since = time.monotonic()
        try:
            taskstats, refused = part("netlink.taskstats"), part("netlink.exceptions").NetlinkError
        except ImportError as error:
            raise UnavailableError(
                f"delays: {error}; install pyroute2, or set sources.delays = false"
            ) from None
        try:
            finder = taskstats.TaskStats()
            try:
                finder.bind()
                family = finder.prid
            finally:
                finder.close()
            # pyroute2 knows this interface's messages; its own exchange takes 170 us for a process,
            # so the question is encoded once and only the process's id in it is changed.
            question = taskstats.tcmd()
            question["header"]["type"] = family
            question["header"]["flags"] = 1
            question["cmd"], question["version"] = taskstats.TASKSTATS_CMD_GET, 1
            question["attrs"].append(["TASKSTATS_CMD_ATTR_TGID", 0])
            question.encode()
            self._question = bytes(question.data)[:-4]
            self._socket = socket.socket(
                socket.AF_NETLINK,
                socket.SOCK_RAW | socket.SOCK_CLOEXEC,
                getattr(socket, "NETLINK_GENERIC", 16),
            )
            self._socket.bind((0, 0))
            self._socket.settimeout(1.0)
            self._ask(os.getpid())
        except (OSError, refused) as error:
            self.stop()
            raise UnavailableError(
                f"delays: no task statistics: {error}; needs CAP_NET_ADMIN and the host's pid namespace"
            ) from None

    def _ask(self, pid: int) -> bytes:
        assert self._socket is not None
        self._socket.send(self._question + struct.pack("=I", pid))
        return statistics(self._socket.recv(4096))

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in each job's delays."""
        if self._socket is None:
            return
        reason = _switched_off()
        if reason:
            self.unavailable["delays"] = reason
            self._on_since = now
        else:
            self.unavailable.pop("delays", None)
        turn = self._tick % self._every
        for index, (job, sample) in enumerate(jobs):
            known = self._jobs.get(job)
            if known is None or (not reason and index % self._every == turn):
                known = self._jobs.setdefault(job, _JobDelays())
                self._turn(job, known, (now - self._on_since) * 1e6)
            known.fill(sample)
        if len(self._jobs) > len(jobs):
            for gone in self._jobs.keys() - {job for job, _ in jobs}:
                del self._jobs[gone]
        self._tick += 1

    def _turn(self, job: Job, known: _JobDelays, on_us: float) -> None:
        pids = job.pids or frozenset()
        known.forget(pids)
        for pid in sorted(pids)[:_MOST_PROCESSES]:
            try:
                stats = self._ask(pid)
                # A pid that was used anew since the processes were listed lies in another cgroup.
                if known.is_new(pid, taken := decode(stats)) and not in_cgroup(pid, job.identity.cgroup):
                    continue
                known.take(pid, taken, on_us)
            except ProcessLookupError:
                continue
            except OSError as error:
                self.unavailable["delays"] = f"no task statistics: {error.strerror or error}"
                # An answer that comes late must not be taken for that of the next question.
                self._drain()
                return

    def _drain(self) -> None:
        assert self._socket is not None
        try:
            for _ in range(1024):
                self._socket.recv(4096, socket.MSG_DONTWAIT)
        except OSError:
            return

    def stop(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None


class _JobDelays:
    """What one job's processes have waited, those that are gone included."""

    __slots__ = ("_gone", "_live", "_told", "_told_other")

    def __init__(self) -> None:
        self._live: dict[int, Taken] = {}
        self._gone: tuple[int, ...] = _NONE
        self._told = False  # whether the kernel has told of a wait for a CPU yet
        self._told_other = False  # and of the other waits

    def is_new(self, pid: int, taken: Taken | None) -> bool:
        """Whether `taken` is of a process that was not seen before under this pid."""
        before = self._live.get(pid)
        return before is None or (taken is not None and taken.age_us < before.age_us)

    def take(self, pid: int, taken: Taken | None, on_us: float) -> None:
        """Keep the newest word about a process; the switch is known to have been set for `on_us`."""
        if taken is None:
            return
        if self.is_new(pid, taken):
            self._retire(pid)
        self._live[pid] = taken
        self._told = True
        if taken.other or taken.age_us < on_us:
            self._told_other = True

    def forget(self, pids: frozenset[int]) -> None:
        """Move processes that are not in `pids` any more to those that are gone."""
        for pid in self._live.keys() - pids:
            self._retire(pid)

    def _retire(self, pid: int) -> None:
        taken = self._live.pop(pid, None)
        if taken is not None:
            self._gone = tuple(a + b for a, b in zip(self._gone, taken.delays, strict=True))

    def fill(self, sample: JobSample) -> None:
        """Write the sums into `sample`, or why there are none."""
        if not self._told:
            sample.unavailable["delays"] = "no word of its processes"
            return
        cpu, block_io, swap_in, reclaim = (
            sum(column)
            for column in zip(self._gone, *(taken.delays for taken in self._live.values()), strict=True)
        )
        sample.delays.cpu_ns = cpu
        if self._told_other:
            sample.delays.block_io_ns = block_io
            sample.delays.swap_in_ns = swap_in
            sample.delays.memory_reclaim_ns = reclaim
        else:
            sample.unavailable["delays"] = "its processes may be older than kernel.task_delayacct=1"


def _switched_off() -> str:
    """Why there is no account, with the remedy; empty when it is on."""
    try:
        with open(SWITCH, "rb", buffering=0) as file:
            on = file.read(16).strip() == b"1"
    except OSError:
        return "this kernel has no task delay accounting (CONFIG_TASK_DELAY_ACCT, 5.14 or later)"
    return "" if on else "kernel.task_delayacct is 0; run: sysctl kernel.task_delayacct=1"
