"""Answers about nodes, jobs and windows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from expanse_controller import merging
from expanse_controller.columns import COLUMNS
from expanse_controller.errors import ControllerError
from expanse_controller.ingest import STOPPING
from expanse_controller.presence import LISTED_S, age_s, is_silent
from expanse_controller.reader import MAX_TRACES, Part, Reader
from expanse_controller.store import Boot, Store
from expanse_controller.windows import LONGEST_S, RefusedError, Window, Windows, refusal
from expanse_ebpf.wire import keys
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JobsReply,
    JobsRequest,
    NodeSnapshot,
    ProfileReply,
    ProfileRequest,
    RulesReply,
    RulesRequest,
    RuleState,
    SeriesReply,
    SeriesRequest,
    SnapshotReply,
    SnapshotRequest,
    TracePart,
    TraceReply,
    TraceRequest,
    TracesReply,
    TracesRequest,
)

_M = TypeVar("_M", bound=Message)


class Query:
    """The Query service. `thread` is the one that `reader` belongs to; `states` tells how the rules stand."""

    def __init__(
        self,
        store: Store,
        reader: Reader,
        thread: Executor,
        windows: Windows,
        states: Callable[[], Awaitable[list[RuleState]]],
    ) -> None:
        self._store = store
        self._reader = reader
        self._thread = thread
        self._windows = windows
        self._states = states
        self._opening: set[asyncio.Task[Window]] = set()
        self._watchers: set[_Watcher] = set()
        self._ended = False
        # Each takes a CPU; one with a long span must not hold up all others.
        self._merging = asyncio.Semaphore(2)
        self._merges: set[asyncio.Task[tuple[bytes, int]]] = set()

    async def snapshot(self, raw: bytes, context: Any) -> bytes:
        """The last two reports of the nodes that reported within a day, or of the one that is named."""
        request = await _parsed(SnapshotRequest, raw, context)
        reply = SnapshotReply(nodes=[_snapshot(boot) for boot in self._nodes(request.node)])
        return reply.SerializeToString()

    async def watch(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """As `snapshot`, then each new report; a slow watcher gets the newest of each node only."""
        request = await _parsed(SnapshotRequest, raw, context)
        watcher = _Watcher(request.node)
        self._watchers.add(watcher)
        try:
            for boot in self._nodes(request.node):
                yield _snapshot(boot).SerializeToString()
            while not self._ended:
                await watcher.changed.wait()
                watcher.changed.clear()
                fresh, watcher.fresh = watcher.fresh, set()
                for boot in self._store.nodes():
                    if (boot.identity.name, boot.identity.install_id) in fresh:
                        yield _snapshot(boot).SerializeToString()
        finally:
            self._watchers.discard(watcher)

    async def jobs(self, raw: bytes, context: Any) -> bytes:
        """Jobs, those seen last first."""
        request = await _parsed(JobsRequest, raw, context)
        key = await _key(request.key, context) if request.key else None
        only = None
        if request.live_only:
            now = time.time_ns()
            only = [
                job.id
                for boot in self._store.nodes()
                if boot.newest and not is_silent(boot.newest, now)
                for job in list(boot.jobs.values())
                if job.state != JOB_STATE_ENDED and job.last_ns == boot.time_ns
            ]
        jobs = await self._read(self._reader.jobs, key, request.limit, self._store.live_jobs(), only)
        return JobsReply(jobs=jobs).SerializeToString()

    async def series(self, raw: bytes, context: Any) -> bytes:
        """One run of a job over time: counters as they are stored, cumulative, and gauges."""
        request = await _parsed(SeriesRequest, raw, context)
        key = await _key(request.key, context)
        unknown = sorted(set(request.fields) - set(COLUMNS))
        if unknown:
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"no such field: {', '.join(unknown)[:200]!r}; there are {', '.join(COLUMNS)}",
            )
        found = await self._read(
            self._reader.series,
            key,
            request.run,
            request.node,
            request.from_ns,
            request.to_ns,
            tuple(dict.fromkeys(request.fields)) or COLUMNS,
            self._store.live_jobs(),
        )
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, await self._absence(request, key))
        job, points = found
        return SeriesReply(job=job, points=points).SerializeToString()

    async def profile(self, raw: bytes, context: Any) -> bytes:
        """The sum of a job's profiles over a span of time, those that reach into it included."""
        request = await _parsed(ProfileRequest, raw, context)
        key = await _key(request.key, context)
        found = await self._read(
            self._reader.profiles,
            key,
            request.run,
            request.node,
            request.from_ns,
            request.to_ns,
            merging.MAX_PARTS,
            self._store.live_jobs(),
        )
        if found is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, await self._absence(request, key))
        job, parts = found
        reply = ProfileReply(job=job)
        if parts:
            size = sum(part.bytes for part in parts)
            if len(parts) > merging.MAX_PARTS or size > merging.MAX_BYTES:
                await context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"more than {merging.MAX_PARTS} profiles or {merging.MAX_BYTES >> 20} MiB of them lie in "
                    f"that span; {merging.REMEDY}",
                )
            try:
                reply.pprof, reply.parts = await self._merged(parts)
            except ControllerError as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except _StoppingError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, STOPPING)
            reply.from_ns = min(part.from_ns for part in parts)
            reply.to_ns = max(part.to_ns for part in parts)
        return reply.SerializeToString()

    async def trace(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """Open a window on a job's nodes and follow it; it goes on when the asker hangs up."""
        request = await _parsed(TraceRequest, raw, context)
        await _key(request.key, context)
        shares = (request.cost_share, request.run_share)
        if not 0 <= request.seconds <= LONGEST_S or not all(0 <= share <= 1 for share in shares):
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"seconds must lie between 0 and {LONGEST_S:g}, and shares between 0 and 1",
            )
        request.ClearField("rule")
        request.ClearField("evidence")
        nodes = (request.node,) if request.node else ()
        try:
            places = self._windows.find(request.key, request.run, nodes)
            opening = asyncio.create_task(self._windows.open(request, places))
            self._opening.add(opening)
            opening.add_done_callback(self._opened)
            window = await asyncio.shield(opening)
        except RefusedError as error:
            yield refusal(request.key, error).SerializeToString()
            return
        try:
            async for reply in self._windows.follow(window, self._part):
                yield reply.SerializeToString()
        except ControllerError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _opened(self, opening: asyncio.Task[Window]) -> None:
        self._opening.discard(opening)
        if not opening.cancelled():
            opening.exception()  # who has hung up does not hear of it, nor need the log

    async def traces(self, raw: bytes, context: Any) -> bytes:
        """Windows that are stored, the newest first."""
        request = await _parsed(TracesRequest, raw, context)
        key = await _key(request.key, context) if request.key else None
        found = await self._read(self._reader.traces, key, request.id, request.limit)
        return TracesReply(traces=[trace for _, trace in found]).SerializeToString()

    async def stored_traces(self, raw: bytes, context: Any) -> AsyncIterator[bytes]:
        """Status and parts of one window, node by node."""
        request = await _parsed(TracesRequest, raw, context)
        if not request.id:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "which window? its id is missing")
        found = await self._read(self._reader.traces, None, request.id, MAX_TRACES)
        if not found:
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"no window {request.id[:100]!r} is stored; the list has their ids"
            )
        for boot, trace in sorted(found, key=lambda entry: entry[1].node):
            yield TraceReply(node=trace.node, status=trace.status).SerializeToString()
            number = 0
            while part := await self._part(request.id, boot, number):
                yield TraceReply(node=trace.node, part=part).SerializeToString()
                number += 1

    async def rules(self, raw: bytes, context: Any) -> bytes:
        """How each rule stands with each job."""
        await _parsed(RulesRequest, raw, context)
        return RulesReply(states=await self._states()).SerializeToString()

    async def _part(self, window: str, boot: int, number: int) -> TracePart | None:
        part: TracePart | None = await self._read(self._reader.trace_part, window, boot, number)
        return part

    def stored(self, nodes: set[tuple[str, str]]) -> None:
        """Tell the watchers that these nodes (name, installation) have new reports."""
        for watcher in self._watchers:
            fresh = {node for node in nodes if watcher.node in ("", *node)}
            if fresh:
                watcher.fresh |= fresh
                watcher.changed.set()

    async def end(self) -> None:
        """Let the watchers' streams end, and give up what is being merged."""
        self._ended = True
        self._windows.end()
        for watcher in self._watchers:
            watcher.changed.set()
        merges = list(self._merges)
        for merge in merges:
            merge.cancel()
        await asyncio.gather(*merges, return_exceptions=True)

    async def _merged(self, parts: list[Part]) -> tuple[bytes, int]:
        """Sum and number of the profiles. Raises ControllerError; _StoppingError when `end` comes first."""

        async def merged() -> tuple[bytes, int]:
            async with self._merging:
                return await merging.merged(self._store.path, [(part.row, part.job) for part in parts])

        if self._ended:
            raise _StoppingError
        merge = asyncio.create_task(merged())
        self._merges.add(merge)
        try:
            return await merge
        except asyncio.CancelledError:
            # Only the merge was, not the call: gRPC logs calls that the server itself cancels as faults.
            if self._ended and merge.cancelled():
                raise _StoppingError from None
            raise
        finally:
            self._merges.discard(merge)

    def _nodes(self, node: str) -> list[Boot]:
        now = time.time_ns()
        return [
            boot
            for boot in sorted(self._store.nodes(), key=lambda b: (b.identity.name, b.identity.install_id))
            if (node in (boot.identity.name, boot.identity.install_id))
            or (not node and boot.newest and age_s(boot.newest, now) <= LISTED_S)
        ]

    async def _absence(self, request: SeriesRequest | ProfileRequest, key: tuple[str, str]) -> str:
        """Why nothing is found."""
        nodes = await self._read(self._reader.nodes, key) if request.node else []
        if nodes and request.node not in nodes:
            job, node = request.key[:200], request.node[:200]
            return f"no node {node!r} has {job!r}; there are: {', '.join(nodes)}"
        return f"no job {request.key[:200]!r} is stored"

    async def _read(self, function: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)


class _StoppingError(Exception):
    """The controller ends before the answer is ready."""


class _Watcher:
    def __init__(self, node: str) -> None:
        self.node = node
        self.fresh: set[tuple[str, str]] = set()
        self.changed = asyncio.Event()


def _snapshot(boot: Boot) -> NodeSnapshot:
    newest = boot.newest
    assert newest is not None
    return NodeSnapshot(previous=newest.previous, current=newest.current, received_ns=newest.received_ns)


async def _parsed(kind: type[_M], raw: bytes, context: Any) -> _M:
    try:
        return kind.FromString(raw)
    except DecodeError:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is not a {kind.__name__}")
        raise


async def _key(text: str, context: Any) -> tuple[str, str]:
    try:
        return keys.parse_key(text)
    except keys.BadKeyError as error:
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        raise
