"""The running controller: its threads, its sockets and its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sqlite3
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from expanse_controller import metrics
from expanse_controller.errors import ControllerError
from expanse_controller.ingest import Ingest
from expanse_controller.presence import conflicts
from expanse_controller.query import Query
from expanse_controller.reader import Reader
from expanse_controller.rules.watch import RuleWatch, engine_of
from expanse_controller.store import SETTLE_S, Store
from expanse_controller.windows import Windows
from expanse_ebpf.wire import transport

if TYPE_CHECKING:
    from expanse_controller.rules.rule import Rule

GRACE_S = 1.0  # for the last acknowledgements and the ends of the streams
UPKEEP_S = 5.0

_log = logging.getLogger(__name__)

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Listening:
    """Where the controller answers, with the ports that were really taken."""

    listen: str
    metrics: str  # empty: nowhere


async def serve(
    db: Path,
    listen: Address,
    metrics_listen: Address | None,
    keep_s: float,
    on_listening: Callable[[Listening], None],
    rules: Sequence[Rule] = (),
) -> None:
    """Run until SIGTERM or SIGINT. Raises ControllerError when it cannot start.

    `rules` are looked at now and then, and open windows.
    """
    store = Store(db)
    reader: Reader | None = None
    writer = ThreadPoolExecutor(1, "store")
    asker = ThreadPoolExecutor(1, "query")
    checker = ThreadPoolExecutor(1, "profiles")
    windows = Windows(store, writer)
    watch = RuleWatch(store, windows, engine_of(rules))
    server: grpc.aio.Server | None = None
    tasks: list[asyncio.Task[None]] = []
    try:
        reader = Reader(db)
        query = Query(store, reader, asker, windows, watch.states)
        ingest = Ingest(store, writer, checker, windows, query.stored)
        server = grpc.aio.server(options=transport.server_options())
        server.add_generic_rpc_handlers(_handlers(ingest, query))
        port = _bind(server, *listen)
        metrics_at = ""
        if metrics_listen:
            metrics_port = metrics.serve(store, ingest.figures, windows.outcomes, _text(*metrics_listen))
            metrics_at = _text(metrics_listen[0], metrics_port)
        stopped = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stopped.set)
        await server.start()
        committing = asyncio.create_task(ingest.commit())
        tasks = [
            committing,
            asyncio.create_task(_upkeep(store, writer, keep_s)),
            asyncio.create_task(windows.tend()),
            asyncio.create_task(watch.run(ingest.figures)),
        ]
        committing.add_done_callback(lambda _: stopped.set())
        on_listening(Listening(_text(listen[0], port), metrics_at))
        await stopped.wait()
        # What has come is stored and acknowledged before the streams end.
        ingest.stop()
        await query.end()
        await committing
    finally:
        if server is not None:
            await server.stop(GRACE_S)
        for task in tasks:
            task.cancel()
        writer.shutdown()
        asker.shutdown()
        checker.shutdown()
        watch.close()
        if reader is not None:
            reader.close()
        store.close()


def _handlers(ingest: Ingest, query: Query) -> tuple[Any, ...]:
    """Bytes in, bytes out: a message that cannot be parsed must not end a stream by itself."""
    return (
        grpc.method_handlers_generic_handler(
            transport.COLLECTOR, {"Stream": grpc.stream_stream_rpc_method_handler(ingest.stream)}
        ),
        grpc.method_handlers_generic_handler(
            transport.QUERY,
            {
                "Snapshot": grpc.unary_unary_rpc_method_handler(query.snapshot),
                "Watch": grpc.unary_stream_rpc_method_handler(query.watch),
                "Jobs": grpc.unary_unary_rpc_method_handler(query.jobs),
                "Series": grpc.unary_unary_rpc_method_handler(query.series),
                "Profile": grpc.unary_unary_rpc_method_handler(query.profile),
                "Trace": grpc.unary_stream_rpc_method_handler(query.trace),
                "Traces": grpc.unary_unary_rpc_method_handler(query.traces),
                "StoredTraces": grpc.unary_stream_rpc_method_handler(query.stored_traces),
                "Rules": grpc.unary_unary_rpc_method_handler(query.rules),
            },
        ),
    )


def _bind(server: grpc.aio.Server, host: str, port: int) -> int:
    # gRPC does not tell why it could not bind; a socket of our own does.
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ControllerError(
            f"{_text(host, port)} cannot be listened on: {error.strerror}; give another --listen"
        ) from None
    try:
        taken: int = server.add_insecure_port(_text(host, port))
    except RuntimeError:
        taken = 0
    if not taken:
        raise ControllerError(f"{_text(host, port)} cannot be listened on; give another --listen")
    return taken


def _text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _upkeep(store: Store, writer: ThreadPoolExecutor, keep_s: float) -> None:
    """Everything that is done now and then. A batch at a time, so that commits are not held up."""
    loop = asyncio.get_running_loop()
    settled = 0.0
    known: set[str] = set()
    while True:
        await asyncio.sleep(UPKEEP_S)
        now_ns = time.time_ns()
        shared = conflicts(store.nodes(), now_ns)
        for name in sorted(shared - known):
            _log.warning(
                "more than one installation reports as node %r; their data is kept apart. Give each node "
                "its own name, and remove the copied install_id from a cloned one",
                name,
            )
        known = shared
        if time.monotonic() - settled < SETTLE_S:
            continue
        settled = time.monotonic()
        with contextlib.suppress(sqlite3.Error):  # a full disk is told by the commits
            await loop.run_in_executor(writer, store.settle)
            while await loop.run_in_executor(writer, store.expire, keep_s, now_ns):
                await asyncio.sleep(0.05)
