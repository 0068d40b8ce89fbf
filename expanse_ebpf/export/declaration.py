"""How a metric is declared: its name, unit, meaning, labels, and how it is read."""

from __future__ import annotations

from typing import NamedTuple

from expanse_ebpf.export.readers import MEGA, MICRO, MILLI, NANO, Reader, figure
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobSample, Report

NODE = ("node",)
# `job` and `instance` belong to whoever scrapes. `run` keeps two runs of one job id apart: without it a
# requeued job's counters would go backwards, and its old and new run could meet on one page.
JOB = ("node", "scheduler", "job_id", "run")
# Of GPUs and MIG instances alike: indexes and minor numbers change, and mean different things to NVML, to
# the kernel and in a container.
GPU = ("node", "uuid")

# What a field of the data model is counted in, by the end of its name, in the unit of its metric.
_DIVISORS = {"ns": NANO, "us": MICRO, "mj": MILLI, "mw": MILLI, "mhz": MEGA}


class Metric(NamedTuple):
    """One metric family."""

    name: str  # as on the page; what ends in _total is a counter, in _info always 1, the rest are gauges
    unit: str
    help: str
    source: str  # where the figure comes from
    labels: tuple[str, ...]
    read: Reader  # from a JobSample or a GpuSample when the labels begin with JOB or GPU, else from a Report

    @property
    def kind(self) -> str:
        """`counter`, `info` or `gauge`."""
        return {"total": "counter", "info": "info"}.get(self.name.rpartition("_")[2], "gauge")


def job_metric(name: str, unit: str, text: str, source: str, read: Reader | str, *labels: str) -> Metric:
    """A metric of a job; `read` may be a field's path, whose suffix says what it is counted in."""
    if isinstance(read, str):
        read = figure(JobSample, read, _divisor(read))
    return Metric(f"expanse_job_{name}", unit, text, source, JOB + labels, read)


def gpu_metric(name: str, unit: str, text: str, source: str, read: Reader | str, *labels: str) -> Metric:
    """A metric of a GPU or a MIG instance; `read` as for a node."""
    if isinstance(read, str):
        path = read.rstrip("!")
        read = figure(GpuSample, path, _divisor(path), positive=path != read)
    return Metric(f"expanse_gpu_{name}", unit, text, source, GPU + labels, read)


def node_metric(name: str, unit: str, text: str, source: str, read: Reader | str, *labels: str) -> Metric:
    """A metric of a node; `read` as for a job. A path with a `!`: 0 means that nobody has set it."""
    if isinstance(read, str):
        path = read.rstrip("!")
        read = figure(Report, path, _divisor(path), positive=path != read)
    return Metric(f"expanse_{name}", unit, text, source, NODE + labels, read)


def _divisor(path: str) -> float:
    return _DIVISORS.get(path.rpartition("_")[2], 1)
