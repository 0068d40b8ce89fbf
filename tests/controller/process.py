"""A real controller in a process of its own, and nodes that talk to it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc

from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_RUNNING,
    Downstream,
    Hello,
    JobsReply,
    JobsRequest,
    NodeIdentity,
    NodeSnapshot,
    ProfileReply,
    ProfileRequest,
    Report,
    SeriesReply,
    SeriesRequest,
    SnapshotReply,
    SnapshotRequest,
    Upstream,
)

COMMAND = [sys.executable, "-c", "from expanse_controller.cli import main; main()"]
PATIENCE_S = 20.0


def eventually(condition: Callable[[], Any]) -> Any:
    """The first true value of `condition()`; fails after a time that only a fault needs."""
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, "it has not come true"
        time.sleep(0.02)
    return value


class Controller:
    """`expanse-controller serve` on a free port, or on the one that an earlier one had."""

    def __init__(self, db: Path, *arguments: str, port: int = 0) -> None:
        self.db = db
        self.process = subprocess.Popen(
            [*COMMAND, "serve", "--listen", f"127.0.0.1:{port}", "--db", str(db), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        found = re.search(r"listening on (127\.0\.0\.1:(\d+))(?:, metrics on (\S+))?, store", line)
        if not found:
            raise AssertionError(f"{line!r} {self.process.communicate()}")
        self.address, self.port, self.metrics = found[1], int(found[2]), found[3]

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def kill(self) -> None:
        """As the kernel's OOM killer does it."""
        self.process.kill()
        self.process.communicate()

    def terminate(self) -> tuple[int, str]:
        """Exit code and stderr after SIGTERM."""
        self.process.terminate()
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode, errors


def node(name: str = "gpu001", install: str = "install-1", boot: str = "boot-1") -> NodeIdentity:
    return NodeIdentity(name=name, install_id=install, boot_id=boot)


def report(sequence: int, *, time_ns: int | None = None, **job: Any) -> Report:
    """A report with one job, which used `sequence` seconds of CPU."""
    made = Report(sequence=sequence, time_ns=time_ns or time.time_ns(), interval_ns=1_000_000_000)
    sample = made.jobs.add(state=JOB_STATE_RUNNING, processes=2, cpu_ns=sequence * 1_000_000_000 % 2**63)
    sample.identity.scheduler, sample.identity.id, sample.identity.run = "slurm", "123", 4711
    for name, value in job.items():
        setattr(sample.identity, name, value)
    return made


class Client:
    """Calls of the controller without the agent's own client between."""

    def __init__(self, address: str) -> None:
        self.channel = grpc.insecure_channel(address, options=transport.client_options())

    def snapshot(self, name: str = "") -> list[NodeSnapshot]:
        call = self.channel.unary_unary(
            transport.SNAPSHOT, SnapshotRequest.SerializeToString, SnapshotReply.FromString
        )
        return list(call(SnapshotRequest(node=name), timeout=10).nodes)

    def jobs(self, **request: Any) -> JobsReply:
        call = self.channel.unary_unary(transport.JOBS, JobsRequest.SerializeToString, JobsReply.FromString)
        reply: JobsReply = call(JobsRequest(**request), timeout=10)
        return reply

    def series(self, key: str, **request: Any) -> SeriesReply:
        call = self.channel.unary_unary(
            transport.SERIES, SeriesRequest.SerializeToString, SeriesReply.FromString
        )
        reply: SeriesReply = call(SeriesRequest(key=key, **request), timeout=10)
        return reply

    def profile(self, key: str, **request: Any) -> ProfileReply:
        call = self.channel.unary_unary(
            transport.PROFILE, ProfileRequest.SerializeToString, ProfileReply.FromString
        )
        reply: ProfileReply = call(ProfileRequest(key=key, **request), timeout=60)
        return reply

    def send(self, *messages: bytes, hello: NodeIdentity | None = None) -> list[int]:
        """Send the messages on one stream, hang up, and return the acknowledgements."""
        first = [Upstream(hello=Hello(node=hello)).SerializeToString()] if hello else []
        call = self.channel.stream_stream(transport.STREAM, None, Downstream.FromString)
        return [m.acknowledgement.sequence for m in call(iter([*first, *messages]), timeout=10)]


@contextlib.contextmanager
def client(address: str) -> Iterator[Client]:
    made = Client(address)
    with made.channel:
        yield made


def up(made: Report) -> bytes:
    return Upstream(report=made).SerializeToString()
