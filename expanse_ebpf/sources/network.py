"""Source "network": traffic of the host's interfaces, and of jobs with a network namespace of their own.

The kernel's link statistics by pyroute2, whose parts are imported when the source starts. Loopback is left
out: what a host or a job sends to itself goes over no network. Jobs that share a namespace (containers
of one pod) each show all of its traffic.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.processes import in_cgroup
from expanse_ebpf.sources.cgroup_files import Rising
from expanse_ebpf.sources.link_statistics import Counts, Links, load, open_socket
from expanse_ebpf.wire.collector_pb2 import NetworkCounters

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report

_FIELDS = (
    "received_bytes",
    "sent_bytes",
    "received_packets",
    "sent_packets",
    "dropped_packets",
    "error_packets",
)
_RECHECK_S = 5.0  # a process can change its namespace while it lives


def create(context: Context) -> NetworkSource:
    """The source as the configuration wants it."""
    return NetworkSource(context.config.agent.interval_s)


class NetworkSource:
    """Reads link statistics over one netlink socket for each namespace."""

    name = "network"

    def __init__(self, interval_s: float = 1.0) -> None:
        self.unavailable: dict[str, str] = {}
        self._recheck_every = max(1, round(_RECHECK_S / interval_s))
        self._tick = 0
        self._host: Links | None = None
        self._own_namespace = 0
        self._jobs: dict[Job, _JobNetwork] = {}

    def start(self) -> None:
        """Import pyroute2 and open the host's socket; raises UnavailableError."""
        try:
            load()
        except ImportError as error:
            raise UnavailableError(
                f"network: {error}; install pyroute2, or set sources.network = false"
            ) from None
        try:
            self._own_namespace = os.stat("/proc/self/ns/net").st_ino  # noqa: PTH116
            self._host = Links(open_socket(None))
        except OSError as error:
            raise UnavailableError(f"network: no netlink socket: {error.strerror}") from None

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in the traffic of the host and of the jobs."""
        if self._host is None:
            return
        try:
            for name, counts in self._host.by_name().items():
                _write(report.host.network[name], counts)
            self.unavailable.pop("host", None)
        except OSError as error:
            self.unavailable["host"] = f"link statistics: {error.strerror or error}"
        recheck = self._tick % self._recheck_every
        for index, (job, sample) in enumerate(jobs):
            known = self._jobs.get(job)
            if known is None:
                known = self._jobs[job] = _JobNetwork()
            known.follow(job, self._own_namespace, index % self._recheck_every == recheck)
            total = known.counts()
            if total is not None:
                _write(sample.network, total)
        if len(self._jobs) > len(jobs):
            for gone in self._jobs.keys() - {job for job, _ in jobs}:
                self._jobs.pop(gone).close()
        self._tick += 1

    def stop(self) -> None:
        """Close every socket."""
        while self._jobs:
            self._jobs.popitem()[1].close()
        if self._host is not None:
            self._host.close()
            self._host = None


def _write(message: NetworkCounters, counts: Counts) -> None:
    for name, value in zip(_FIELDS, counts, strict=True):
        setattr(message, name, value)


class _JobNetwork:
    """The namespace of one job: found by its processes, read through a socket made in it.

    The socket keeps the namespace and its devices alive, so it is closed as soon as no process of the
    job is left in it.
    """

    __slots__ = ("_before", "_interfaces", "_links", "_namespace", "_pid", "_pids", "_seen")

    def __init__(self) -> None:
        self._pids: frozenset[int] | None = None
        self._pid = 0  # the process that the namespace was found by
        self._namespace = 0
        self._links: Links | None = None
        self._before: Counts = (0,) * len(_FIELDS)  # what earlier namespaces of the job had
        self._interfaces: dict[int, tuple[Rising, ...]] = {}
        self._seen = False

    def follow(self, job: Job, own_namespace: int, recheck: bool) -> None:
        """Bring the socket up to date with the job's processes."""
        pids = job.pids or frozenset()
        if self._links is not None and _namespace(self._pid) == self._namespace and self._pid in pids:
            return
        if not recheck and self._pids == pids:
            return
        self._pids = pids
        self.close()
        # Processes come and go by the hundred in some jobs; the oldest tell enough.
        for pid in sorted(pids)[:32]:
            namespace = _namespace(pid)
            if namespace in (0, own_namespace):
                continue
            try:
                descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            except OSError:
                continue
            try:
                # A pid that was used anew since the job's processes were listed lies in another cgroup.
                if os.fstat(descriptor).st_ino == namespace and in_cgroup(pid, job.identity.cgroup):
                    self._links = Links(open_socket(descriptor))
                    if namespace != self._namespace:
                        self._before = self._totals()
                        self._interfaces = {}
                    self._pid, self._namespace = pid, namespace
                    return
            except OSError:
                continue
            finally:
                os.close(descriptor)

    def counts(self) -> Counts | None:
        """Traffic since the job began, over all its interfaces so far; None when it never had its own."""
        if self._links is not None:
            try:
                for index, counts in self._links.by_index().items():
                    rising = self._interfaces.get(index)
                    if rising is None:
                        rising = self._interfaces[index] = tuple(Rising() for _ in counts)
                    for figure, value in zip(rising, counts, strict=True):
                        figure.feed(value)
                self._seen = True
            except OSError:
                self.close()
        return self._totals() if self._seen else None

    def _totals(self) -> Counts:
        columns = zip(
            self._before, *([r.value for r in rising] for rising in self._interfaces.values()), strict=True
        )
        return tuple(sum(column) for column in columns)

    def close(self) -> None:
        """Let the namespace go."""
        if self._links is not None:
            self._links.close()
            self._links = None


def _namespace(pid: int) -> int:
    """The inode of the process's network namespace; 0 when it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino  # noqa: PTH116
    except OSError:
        return 0
