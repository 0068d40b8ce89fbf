"""Taking reports from the nodes' streams into the store."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from expanse_controller.allowance import Allowance
from expanse_controller.limits import (
    MAX_PROFILES,
    REMEDIES,
    checked,
    drop_absurd_gpus,
    drop_absurd_jobs,
    node_fault,
    report_fault,
)
from expanse_controller.store import OUT_OF_ORDER, STORED, Item, Store
from expanse_controller.trace_intake import TraceIntake
from expanse_controller.windows import Windows
from expanse_ebpf.wire.collector_pb2 import (
    Acknowledgement,
    Downstream,
    JobProfile,
    NodeIdentity,
    Report,
    TracePart,
    TraceRequest,
    TraceStatus,
    Upstream,
)

# Reports that come within this time are committed together. It is a part of the age of the newest
# sample in the store, and what a report waits for its acknowledgement.
BATCH_S = 0.1
BATCH_REPORTS = 500
# Streams wait once so many reports are not stored yet, or so many bytes of traces.
MAX_WAITING = 2000
MAX_WAITING_BYTES = 16 << 20

# Of profiles from one node: two hundred jobs with 10 KiB a minute, and what fifty of them bring after an
# hour without the controller.
PROFILE_BYTES_PER_MINUTE = 2 << 20
PROFILE_RESERVE_BYTES = 32 << 20
# So many bytes that are unpacked count as one. Real profiles are packed to a sixth or less, with very long
# names to a fiftieth; what is made for it to a thousandth, and a few bytes would make hours of work.
PLAIN_PER_BYTE = 64
# Refused profiles are told of in the log at this interval.
TELL_S = 60.0

STOPPING = "it is stopping"

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Figures:
    """What the controller counts of itself."""

    stored: int = 0
    replayed: int = 0
    refused: Counter[str] = field(default_factory=Counter)  # by reason
    jobs_refused: int = 0
    gpus_refused: int = 0
    gpu_entries_refused: int = 0
    profiles: int = 0
    profile_bytes: int = 0
    profiles_refused: Counter[str] = field(default_factory=Counter)  # by reason
    trace_bytes: int = 0
    traces_refused: Counter[str] = field(default_factory=Counter)  # statuses and parts, by reason
    rule_firings: Counter[str] = field(default_factory=Counter)  # by rule
    streams: int = 0
    commits: int = 0
    commit_s: float = 0.0
    store_errors: int = 0


@dataclass(slots=True, eq=False)
class _Stream:
    """One node's stream, as the committer sees it."""

    node: NodeIdentity
    handled: int = 0  # highest sequence that is stored or refused for good
    waiting: int = 0  # reports taken and not committed
    failure: str = ""
    commands: deque[TraceRequest] = field(default_factory=deque)  # that are still to be sent
    ended: dict[str, int] = field(default_factory=dict)  # windows, see TraceIntake
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def name(self) -> tuple[str, str]:
        """Name and installation of the node."""
        return self.node.name, self.node.install_id

    def command(self, request: TraceRequest) -> None:
        """Send a command down."""
        self.commands.append(request)
        self.changed.set()


class Ingest:
    """The Collector service. `writer` is the one thread that writes to `store`, `checker` looks at profiles.

    `on_stored` is called in the event loop with the nodes that have new reports, after each commit.
    """

    def __init__(
        self,
        store: Store,
        writer: Executor,
        checker: Executor,
        windows: Windows,
        on_stored: Callable[[set[tuple[str, str]]], None],
    ) -> None:
        self.figures = Figures()
        self._store = store
        self._writer = writer
        self._checker = checker
        self._windows = windows
        self._on_stored = on_stored
        self._batch: list[tuple[_Stream, Item]] = []
        self._streams: set[_Stream] = set()
        self._arrived = asyncio.Event()
        self._drained = asyncio.Event()
        self._full = asyncio.Event()
        self._waiting_bytes = 0  # of traces in the batch
        self._stopping = False
        self._allowance = Allowance(PROFILE_BYTES_PER_MINUTE / 60, PROFILE_RESERVE_BYTES)
        self._told = -TELL_S  # when a refused profile was last told of
        self._traces = TraceIntake(store, writer, self.figures)

    # ---- the streams

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """One node's stream; ends when the node hangs up or the store fails."""
        node = await self._greeted(requests, context)
        await context.send_initial_metadata(())
        stream = _Stream(node)
        self._streams.add(stream)
        self.figures.streams = len(self._streams)
        if self._stopping:
            stream.failure = STOPPING
            stream.changed.set()
        self._windows.connected(stream.name, stream.command)
        reading = asyncio.create_task(self._read(requests, stream))
        reading.add_done_callback(lambda _: stream.changed.set())
        sent = 0
        try:
            while True:
                await stream.changed.wait()
                stream.changed.clear()
                if stream.handled > sent:
                    sent = stream.handled
                    reply = Downstream(acknowledgement=Acknowledgement(sequence=sent))
                    await context.write(reply.SerializeToString())
                while stream.commands:
                    await context.write(Downstream(trace=stream.commands.popleft()).SerializeToString())
                if stream.failure:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, stream.failure)
                if reading.done() and not stream.waiting and stream.handled <= sent:
                    return
        finally:
            self._windows.disconnected(stream.name, stream.command)
            self._streams.discard(stream)
            self.figures.streams = len(self._streams)
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reading

    async def _greeted(self, requests: AsyncIterator[bytes], context: Any) -> NodeIdentity:
        """Who the node says it is; ends the call when it does not say so first."""
        fault = "the first message must be a Hello"
        async for raw in requests:
            with contextlib.suppress(DecodeError):
                message = Upstream.FromString(raw)
                if message.HasField("hello"):
                    node = NodeIdentity()
                    node.CopyFrom(message.hello.node)
                    fault = node_fault(node)
                    if not fault:
                        return node
            break
        self.figures.refused["hello"] += 1
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, fault)
        raise AssertionError("abort() does not return")

    async def _read(self, requests: AsyncIterator[bytes], stream: _Stream) -> None:
        async for raw in requests:
            received_ns = time.time_ns()
            # Before the message is unpacked: all nodes of a job send their traces at the same time.
            while not stream.failure and (
                len(self._batch) >= MAX_WAITING or self._waiting_bytes >= MAX_WAITING_BYTES
            ):
                self._drained.clear()
                await self._drained.wait()
            try:
                message = Upstream.FromString(raw)
            except DecodeError:
                self.figures.refused["malformed"] += 1
                continue
            if not message.HasField("report"):
                self.figures.refused["no report"] += 1
                continue
            report = message.report
            fault = report_fault(report, stream.node)
            if fault:
                self.figures.refused[fault] += 1
                if fault != "sequence" and not stream.waiting:
                    # Without an acknowledgement the node would send it again for ever.
                    stream.handled = max(stream.handled, report.sequence)
                    stream.changed.set()
                continue
            self.figures.jobs_refused += drop_absurd_jobs(report)
            dropped = drop_absurd_gpus(report)
            self.figures.gpus_refused += dropped.messages
            self.figures.gpu_entries_refused += dropped.entries
            report.node.CopyFrom(stream.node)
            profiles: Sequence[JobProfile] = ()
            traces: Sequence[TraceStatus] = ()
            parts: Sequence[TracePart] = ()
            taken_out = bool(report.profiles or report.traces or report.trace_parts)
            if report.traces or report.trace_parts:
                traces, parts = await self._traces.take(stream.node, stream.ended, report)
            if report.profiles:
                profiles = await self._profiles(report)
            if taken_out:
                # The message would keep the room of what was taken out as long as it lives.
                report = Report.FromString(report.SerializeToString())
            stream.waiting += 1
            self._batch.append((stream, Item(stream.node, report, received_ns, profiles, traces, parts)))
            self._arrived.set()
            self._waiting_bytes += _trace_bytes(self._batch[-1][1])
            if len(self._batch) >= BATCH_REPORTS or self._waiting_bytes >= MAX_WAITING_BYTES:
                self._full.set()

    async def _profiles(self, report: Report) -> list[JobProfile]:
        """Take the profiles out of `report`; those that can be stored."""
        node, now = (report.node.name, report.node.install_id), time.monotonic()
        figures = self.figures
        refused: dict[str, list[str]] = {}  # the jobs, by reason
        profiles = []
        for number, profile in enumerate(report.profiles):
            if number >= MAX_PROFILES:
                refused.setdefault("count", []).append(_key(profile))
            elif self._allowance.take(node, len(profile.pprof), now):
                profiles.append(JobProfile())
                profiles[-1].CopyFrom(profile)
            else:
                refused.setdefault("allowance", []).append(_key(profile))
        report.ClearField("profiles")
        loop = asyncio.get_running_loop()
        packed = sum(len(profile.pprof) for profile in profiles)
        room = PLAIN_PER_BYTE * (packed + self._allowance.left(node, now))
        faults, unpacked = await loop.run_in_executor(self._checker, checked, profiles, room)
        self._allowance.charge(node, max(0, unpacked // PLAIN_PER_BYTE - packed), now)
        for profile, fault in zip(profiles, faults, strict=True):
            if fault:
                refused.setdefault(fault, []).append(_key(profile))
        figures.profiles_refused.update({reason: len(keys) for reason, keys in refused.items()})
        if refused and now - self._told >= TELL_S:
            self._told = now
            _log.warning(
                "node %r: profiles are refused, %d since the start: %s",
                node[0],
                figures.profiles_refused.total(),
                "; ".join(
                    f"{len(keys)} ({reason}), the first of job {keys[0]!r}: {REMEDIES[reason]}"
                    for reason, keys in refused.items()
                ),
            )
        return [profile for profile, fault in zip(profiles, faults, strict=True) if not fault]

    # ---- the store

    async def commit(self) -> None:
        """Commit batches until `stop`, what has come by then included; then end the streams."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            if not self._stopping:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._full.wait(), BATCH_S)
            self._full.clear()
            while self._batch:
                batch, self._batch = self._batch[:BATCH_REPORTS], self._batch[BATCH_REPORTS:]
                self._waiting_bytes = sum(_trace_bytes(item) for _, item in self._batch)
                await self._commit(loop, batch)
                self._drained.set()
            if self._stopping:
                break
        for stream in self._streams:
            stream.failure = STOPPING
            stream.changed.set()

    def stop(self) -> None:
        """Make `commit` return once everything that has come is stored."""
        self._stopping = True
        self._full.set()
        self._arrived.set()

    async def _commit(self, loop: asyncio.AbstractEventLoop, batch: list[tuple[_Stream, Item]]) -> None:
        begin = time.monotonic()
        try:
            outcomes = await loop.run_in_executor(
                self._writer, self._store.write, [item for _, item in batch]
            )
        except sqlite3.Error as error:
            self.figures.store_errors += 1
            _log.error("%s cannot be written: %s; reports stay with the nodes", self._store.path, error)
            for stream, _ in batch:
                stream.waiting -= 1
                stream.failure = f"its store cannot be written: {error}"
                stream.changed.set()
            return
        self.figures.commits += 1
        self.figures.commit_s += time.monotonic() - begin
        nodes = set()
        for (stream, item), outcome in zip(batch, outcomes, strict=True):
            if outcome == STORED:
                self.figures.stored += 1
                self.figures.profiles += len(item.profiles)
                self.figures.profile_bytes += sum(len(profile.pprof) for profile in item.profiles)
                self.figures.trace_bytes += _trace_bytes(item)
                self._windows.stored(item)
                nodes.add((item.node.name, item.node.install_id))
            elif outcome == OUT_OF_ORDER:
                self.figures.refused["out of order"] += 1
            else:
                self.figures.replayed += 1
            stream.waiting -= 1
            stream.handled = max(stream.handled, item.report.sequence)
            stream.changed.set()
        self._on_stored(nodes)


def _trace_bytes(item: Item) -> int:
    return sum(len(part.data) for part in item.parts)


def _key(profile: JobProfile) -> str:
    """The job's key, for a line of the log: it may be absurd."""
    return f"{profile.identity.scheduler}/{profile.identity.id}"[:100]
