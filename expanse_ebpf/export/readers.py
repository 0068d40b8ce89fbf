"""How the figures of a metric are read out of a Report.

A reader yields one row per series: the values of the labels that the metric adds to the node's or the
job's own, and the figure. What is absent in the Report yields no row; nothing raises, whatever the
Report holds, since reports also come over the network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    JOB_STATE_STARTING,
    JobSample,
    Report,
)

Row = tuple[tuple[str, ...], float]
Reader = Callable[[Any], Iterable[Row]]

NANO, MICRO, MILLI = 1e9, 1e6, 1e3
# Dividing by it is exact for whole numbers: it is off by less than half of what a double can tell apart.
MEGA = 1e-6
STATES = {
    JOB_STATE_STARTING: "starting",
    JOB_STATE_RUNNING: "running",
    JOB_STATE_HELD_IDLE: "held_idle",
    JOB_STATE_ENDED: "ended",
}
# More reasons than this are not told apart: a reason may hold text of the kernel's or of a job's.
MAX_REASONS = 50


def _descriptor(message: type[Any], path: str) -> Any:
    """The field at `path`; raises KeyError, when a metric is declared, if the data model has none."""
    descriptor = message.DESCRIPTOR
    *parents, leaf = path.split(".")
    for name in parents:
        descriptor = descriptor.fields_by_name[name].message_type
    return descriptor.fields_by_name[leaf]


def figure(message: type[Any], path: str, divisor: float = 1, *, positive: bool = False) -> Reader:
    """Reads the number at `path`; no row when it or a message on the way is absent.

    `positive`: a field without presence, for which 0 means that nobody has set it.
    """
    *parents, leaf = path.split(".")
    has_presence = _descriptor(message, path).has_presence

    def read(sample: Any) -> Iterator[Row]:
        for name in parents:
            if not sample.HasField(name):
                return
            sample = getattr(sample, name)
        value = getattr(sample, leaf)
        if (sample.HasField(leaf) if has_presence else value or not positive) and math.isfinite(value):
            yield (), value / divisor if divisor != 1 else value

    return read


def cases(*readers: tuple[tuple[str, ...], Reader]) -> Reader:
    """One family of several figures, told apart by label values."""

    def read(sample: Any) -> Iterator[Row]:
        for labels, reader in readers:
            for extra, value in reader(sample):
                yield (*labels, *extra), value

    return read


def hardware(message: type[Any], path: str, attribute: str) -> Reader:
    """A hardware counter's value or running ratio; no row when it never ran: that is not 0 events."""
    _descriptor(message, f"{path}.{attribute}")
    names = path.split(".")

    def read(sample: Any) -> Iterator[Row]:
        for name in names:
            if not sample.HasField(name):
                return
            sample = getattr(sample, name)
        if 0 < sample.running_ratio <= 1:
            yield (), getattr(sample, attribute)

    return read


def python_unresolved(job: JobSample) -> Iterator[Row]:
    """Samples without a Python stack, by reason; those that were lost are among them."""
    if job.HasField("python"):
        reasons = dict(sorted(job.python.unresolved.items())[:MAX_REASONS])
        if job.python.HasField("lost"):
            reasons["lost"] = job.python.lost
        yield from (((reason,), number) for reason, number in reasons.items())


def interfaces(field: str) -> Reader:
    """A network counter of the host, by interface."""

    def read(report: Report) -> Iterator[Row]:
        for interface, counters in report.host.network.items():
            yield (interface,), getattr(counters, field)

    return read


JOB_INFO = (
    *("name", "user", "uid", "account", "partition", "array", "sluid", "id_source", "pod_uid", "qos"),
    *("gpus", "gpus_source", "cgroup"),
)


def job_info(job: JobSample) -> Iterator[Row]:
    """The values of JOB_INFO."""
    i = job.identity
    uid = str(i.uid) if i.HasField("uid") else ""
    gpus = ",".join(i.gpus)
    who = (i.name, i.user, uid, i.account, i.partition, i.array, i.sluid, i.id_source, i.pod_uid, i.qos)
    yield (*who, gpus, i.gpus_source, i.cgroup), 1


def job_state(job: JobSample) -> Iterator[Row]:
    """1 for the state that the job is in, 0 for the others; none for a state that is not known here."""
    if job.state in STATES:
        yield from (((name,), int(job.state == state)) for state, name in STATES.items())


def unavailable(samples: str, most: int) -> Reader:
    """How many of the report's `samples` (jobs or gpus) lack a field, by field and reason.

    Past `most` pairs the rest is not told apart: a reason may hold text of the kernel's or of a job's.
    """

    def read(report: Report) -> Iterator[Row]:
        counts: dict[tuple[str, ...], int] = {}
        for sample in getattr(report, samples):
            for field, reason in sample.unavailable.items():
                row = (field, reason)
                if row not in counts and len(counts) >= most:
                    row = ("other", "other")
                counts[row] = counts.get(row, 0) + 1
        yield from counts.items()

    return read


def load(report: Report) -> Iterator[Row]:
    """The host's load."""
    # A load of 0 is real; whether anybody read it shows in the number of CPUs.
    if report.host.HasField("load_1m") and math.isfinite(report.host.load_1m):
        yield (), report.host.load_1m


def programs(field: str, divisor: float = 1) -> Reader:
    """A figure of the BPF programs, added up over programs of one name."""

    def read(report: Report) -> Iterator[Row]:
        sums: dict[tuple[str, ...], float] = {}
        for program in report.collector.programs:
            sums[(program.name,)] = sums.get((program.name,), 0) + getattr(program, field)
        yield from ((labels, value / divisor) for labels, value in sums.items())

    return read


def sources(field: str, divisor: float = 1) -> Reader:
    """A figure of the sources of samples."""

    def read(report: Report) -> Iterator[Row]:
        for source in report.collector.sources:
            yield (source.name,), getattr(source, field) / divisor

    return read


def source_missing(report: Report) -> Iterator[Row]:
    """What the sources cannot give, and why."""
    for source in report.collector.sources:
        if not source.up:
            yield (source.name, "all", source.reason or "no reason given"), 1
        yield from (((source.name, part, reason), 1) for part, reason in source.unavailable.items())


def text(message: str, *fields: str) -> Reader:
    """1, with string fields of the report's `message` as labels."""

    def read(report: Report) -> Iterator[Row]:
        if report.HasField(message):
            part = getattr(report, message)
            yield tuple(getattr(part, field) for field in fields), 1

    return read


def jobs(report: Report) -> Iterator[Row]:
    """The number of jobs."""
    yield (), len(report.jobs)


def nothing(_: Report) -> Iterator[Row]:
    """For metrics that are known only to whoever makes the page."""
    return iter(())
