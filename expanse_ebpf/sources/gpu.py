"""Source "gpu": every NVIDIA GPU of the node, and which job holds and uses it.

What NVML says comes from a process of its own (expanse_ebpf/nvml), who holds what is worked out here by
expanse_ebpf/gpu; docs/gpu.md has the rules.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.devices import Devices

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report


def create(context: Context) -> GpuSource:
    """The source as the configuration wants it."""
    return GpuSource(Client(context.config.gpu, context.config.agent.interval_s))


class GpuSource:
    """The node's GPUs. A node without a driver has none, and that is no failure."""

    name = "gpu"

    def __init__(self, client: Client) -> None:
        self.unavailable: dict[str, str] = {}
        self._client = client
        self._devices = Devices()

    def start(self) -> None:
        """Nothing yet: the worker is begun in the first tick in which there is a driver."""

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in the GPUs, what happened to them, and each job's share."""
        lines = list(self._client.tick(now))
        if not self._client.present and not self._client.status.restarts:
            return
        for line in lines:
            self._devices.take(line, time.time_ns())
        report.nvml.CopyFrom(self._client.status)
        self.unavailable = {
            f"gpu {name}": reasons.sentence(code) for name, code in self._client.absent.items()
        }
        samples, events = self._devices.report(
            self._client.status, self._client.listed, self._client.absent, report.time_ns
        )
        report.gpus.extend(samples)
        report.gpu_events.extend(events)
        self._devices.end_tick()

    def stop(self) -> None:
        """End the worker."""
        self._client.stop()
