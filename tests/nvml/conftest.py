"""A worker that is asked directly, and a node's GPUs from a worker to the samples of a tick."""

from __future__ import annotations

import contextlib
import json
import os
import select
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pytest

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml import patience, process
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.devices import Devices
from expanse_ebpf.nvml.process import Process
from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuSample, NvmlStatus
from tests.stand_ins.nvml import StandIn, uuid

PATIENCE_S = 20.0


def program(text: str) -> tuple[str, ...]:
    """The arguments for a worker that does this instead."""
    return ("-EsP", "-c", f"import sys\nfrom expanse_ebpf.nvml import device, worker\n{text}")


SERVE = "sys.exit(worker.main(sys.argv[1:]))"
# One for which nothing is seldom due, as a test has no time to wait for that.
EAGER = program(f"device.SELDOM_S = worker.COUNT_S = worker.LOST_S = 0.0\n{SERVE}")


@dataclass
class Round:
    """What a worker has answered, or a tick has given."""

    status: NvmlStatus
    samples: dict[str, GpuSample] = field(default_factory=dict)
    events: list[GpuEvent] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)

    def gpu(self, number: int = 0) -> GpuSample:
        return self.samples[uuid(number)]

    def line(self, number: int = 0) -> dict[str, Any]:
        found: dict[str, Any]
        (found,) = (
            line["device"] for line in self.lines if line.get("device", {}).get("uuid") == uuid(number)
        )
        return found

    @property
    def states(self) -> list[str]:
        return [sample.state for sample in self.samples.values() if not sample.parent_uuid]


class Asked:
    """A worker that answers when it is asked, and no client between."""

    def __init__(self, gpus: StandIn, *arguments: str) -> None:
        self.gpus = gpus
        self.opened: list[int] = []  # indexes of devices
        self.process = Process(["--library", str(gpus.library), *arguments])
        self._devices = Devices()
        self._number = 0

    def ask(self, **question: Any) -> Round:
        """One round."""
        self._number += 1
        self.process.ask(json.dumps({"round": self._number, "at": 0.0, **question}).encode() + b"\n")
        found = Round(NvmlStatus(up=True))
        until = time.monotonic() + PATIENCE_S
        while not found.lines or not found.lines[-1].keys() & {"end", "code"}:
            left = until - time.monotonic()
            assert left > 0, "the worker does not answer"
            select.select([self.process._answers], [], [], left)
            for line in map(json.loads, self.process.answers()):
                if "opening" not in line:
                    found.lines.append(line)
                elif line["opening"] is not None:
                    self.opened.append(line["opening"])
            if found.lines and "code" in found.lines[0].get("nvml", {}):
                return found
        nvml = found.lines[0]["nvml"]
        for line in found.lines:
            self._devices.take(line, time.time_ns())
        samples, found.events = self._devices.report(
            found.status, frozenset(nvml["order"]), nvml["absent"], time.time_ns()
        )
        self._devices.end_tick()
        found.samples = {sample.uuid: sample for sample in samples}
        return found

    def close(self) -> None:
        self.process.close()
        until = time.monotonic() + PATIENCE_S
        while not self.process.ended():
            if time.monotonic() > until:
                self.process.kill()
            time.sleep(0.005)


class Node:
    """The GPUs of a node, tick by tick."""

    def __init__(self, gpus: StandIn, interval_s: float, config: GpuConfig) -> None:
        self.gpus = gpus
        self.interval_s = interval_s
        self.client = Client(config, interval_s)
        self.devices = Devices()
        self.longest_s = 0.0  # that a tick took
        self.workers: list[int] = []  # pids of all that were begun
        self._next = time.monotonic()

    def tick(self) -> Round:
        """The next one, when it is time for it."""
        time.sleep(max(0.0, self._next - time.monotonic()))
        self._next = max(self._next + self.interval_s, time.monotonic())
        return self.tick_at(time.monotonic())

    def tick_at(self, now: float) -> Round:
        """One for which it is `now`."""
        began = time.monotonic()
        lines = self.client.tick(now)
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        if self.worker and self.worker not in self.workers:
            self.workers.append(self.worker)
        for line in lines:
            self.devices.take(line, time.time_ns())
        status = NvmlStatus()
        status.CopyFrom(self.client.status)
        samples, events = self.devices.report(
            self.client.status, self.client.listed, self.client.absent, time.time_ns()
        )
        self.devices.end_tick()
        return Round(status, {sample.uuid: sample for sample in samples}, events, lines)

    def until(self, holds: Callable[[Round], bool]) -> Round:
        """Ticks until one is as wanted."""
        limit = time.monotonic() + PATIENCE_S
        while not holds(found := self.tick()):
            assert time.monotonic() < limit, f"not in {PATIENCE_S:g} s; at the end {found}"
        return found

    def until_all_is_well(self) -> Round:
        return self.until(lambda found: found.status.up and set(found.states) == {"ok"})

    @property
    def worker(self) -> int:
        """The pid of the worker, 0 when there is none."""
        return self.client._worker.pid if self.client._worker is not None else 0

    def wait_until_it_has_ended(self) -> None:
        """The worker, which is not looked after meanwhile: a signal was sent, or it crashes."""
        os.waitid(os.P_PID, self.worker, os.WEXITED | os.WNOWAIT)


class MakeWorker(Protocol):
    def __call__(
        self, *arguments: str, devices: int = 1, variant: str = "v3", command: tuple[str, ...] = EAGER
    ) -> Asked: ...


@pytest.fixture(scope="session")
def make_worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeWorker]:
    with contextlib.ExitStack() as stack:

        def make(
            *arguments: str, devices: int = 1, variant: str = "v3", command: tuple[str, ...] = EAGER
        ) -> Asked:
            gpus = StandIn(tmp_path_factory.mktemp("nvml"), devices=devices, variant=variant)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(process, "_COMMAND", command)
                worker = Asked(gpus, *arguments)
            stack.callback(worker.close)
            return worker

        yield make


class MakeNode(Protocol):
    def __call__(
        self,
        *,
        devices: int = 1,
        variant: str = "v3",
        interval_s: float = 0.1,
        deadline_s: float = 5.0,
        profiler: bool = False,
        installed: bool = True,
        command: tuple[str, ...] | None = None,
        begin_s: float = 60.0,
    ) -> Node: ...


@pytest.fixture
def make_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeNode]:
    nodes: list[Node] = []

    def make(
        *,
        devices: int = 1,
        variant: str = "v3",
        interval_s: float = 0.1,
        deadline_s: float = 5.0,
        profiler: bool = False,
        installed: bool = True,
        command: tuple[str, ...] | None = None,
        begin_s: float = 60.0,
    ) -> Node:
        if command is not None:
            monkeypatch.setattr(process, "_COMMAND", command)
        monkeypatch.setattr(patience, "_BEGIN_S", begin_s)
        monkeypatch.setattr(patience, "_OPEN_S", begin_s)
        gpus = StandIn(tmp_path / f"nvml{len(nodes)}", devices=devices, variant=variant, installed=installed)
        config = GpuConfig(profiler=profiler, library=str(gpus.library), deadline_s=deadline_s)
        nodes.append(Node(gpus, interval_s, config))
        return nodes[-1]

    yield make
    for node in nodes:
        node.gpus.release()
        node.client.stop()
