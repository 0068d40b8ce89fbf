"""The node's Unix socket: reports, Python stacks and traces for those who may see them, and short answers.

It lives in the agent's own loop. Every file is registered in the selector with a function as its
`data`, to be called with the ready mask: `for key, mask in selector.select(): key.data(mask)`.
Root and the agent's own user see every job, anyone else the jobs that are known to be theirs.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Callable
from functools import partial

from google.protobuf.message import DecodeError

from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.node_client import LENGTH, Client, TooLongError, frame
from expanse_ebpf.node_listener import Listener
from expanse_ebpf.node_streams import (
    OnProfile,
    OnTrace,
    ProfileStream,
    Stream,
    TraceStream,
    checked,
    no_room,
)
from expanse_ebpf.visibility import visible
from expanse_ebpf.wire.collector_pb2 import (
    NodeReply,
    NodeRequest,
    ProcessesReply,
    Report,
    RunReply,
    TraceRequest,
)

HISTORY = 120  # reports kept for those who come later
HISTORY_BYTES = 4 << 20  # but never more than this, whatever the number of jobs
MAX_CLIENTS = 64
RESERVED = 8  # of them for root, whom nobody must be able to lock out
MAX_CLIENTS_PER_UID = 8
REQUEST_BURST, REQUESTS_PER_S = 40.0, 20.0  # of a user without root, over all their connections
MAX_PROFILES = 16  # clients without root who look at Python stacks: each makes work in every tick
MAX_PROFILES_PER_UID = 2
MAX_TRACES = 4  # and with a window open, each of which costs a job something
MAX_TRACES_PER_UID = 1
MAX_PENDING_ALL = HISTORY_BYTES + (4 << 20)  # bytes not yet taken by a client who sees everything
MAX_PENDING_USER = 1 << 20  # the same for anyone else

_log = logging.getLogger(__name__)

OnProcesses = Callable[[str, int, int], ProcessesReply]
OnRun = Callable[[str, int, int], RunReply]


class NodeSocket:
    """The server side of the node's socket.

    `on_processes(key, run, uid)` and `on_run(name, pid, uid)` answer the two kinds of question,
    `on_profile(request, uid)` begins a stream of Python stacks, `on_trace(request, uid)` opens a window; what
    they raise as ExpanseError goes to the client as its one line.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        agent_uid: int = 0,
        on_processes: OnProcesses | None = None,
        on_run: OnRun | None = None,
        on_profile: OnProfile | None = None,
        on_trace: OnTrace | None = None,
    ) -> None:
        self.path = path
        self._selector = selector
        self._all_seeing = {0, agent_uid}
        self._on_processes = on_processes
        self._on_run = on_run
        self._on_profile = on_profile
        self._on_trace = on_trace
        self._listener = Listener(path, MAX_CLIENTS)
        self._clients: list[Client] = []
        self._allowance: dict[int, tuple[float, float]] = {}  # uid to (requests left, at which time)
        self._history: deque[bytes] = deque()
        self._history_bytes = 0
        self._last: Report | None = None

    def open(self) -> None:
        """Start to listen.

        Raises ConfigError when the path cannot be a socket, UnavailableError when another agent
        answers there or the place cannot be written.
        """
        self._listener.open()
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Hang up on everyone and remove the socket's file; safe to call twice."""
        for client in list(self._clients):
            self._drop(client)
        if self._listener.is_open:
            self._selector.unregister(self._listener)
            self._listener.close()

    # ---- reports out

    def publish(self, report: Report) -> None:
        """Keep `report` and send every watcher what they may see of it. The caller must not change it.

        `Report.profiles` and `Report.trace_parts` are for the controller: megabytes, which nobody here waits
        for. Who wants a profile or a trace asks for one, and gets what has come of it now.
        """
        if report.profiles or report.trace_parts:
            whole_report, report = report, Report()
            report.CopyFrom(whole_report)
            report.ClearField("profiles")
            report.ClearField("trace_parts")
        whole = frame(NodeReply(report=report))
        self._last = report
        self._history.append(whole)
        self._history_bytes += len(whole)
        while len(self._history) > HISTORY or (
            len(self._history) > 2 and self._history_bytes > HISTORY_BYTES
        ):
            self._history_bytes -= len(self._history.popleft())
        by_uid: dict[int, bytes] = {}
        for client in list(self._clients):
            if not client.watching:
                continue
            if client.uid in self._all_seeing:
                self._send(client, whole)
                continue
            if client.uid not in by_uid:
                by_uid[client.uid] = frame(NodeReply(report=visible(report, client.uid)))
            self._send(client, by_uid[client.uid])
        for client in list(self._clients):
            if client.stream is not None:
                client.stream.tick()
                self._serve(client)
        self._sweep()

    def wake(self) -> None:
        """Send what has come of windows: for who gives it to call, but not from within a TraceWatch."""
        for client in list(self._clients):
            if isinstance(client.stream, TraceStream):
                self._serve(client)

    def _serve(self, client: Client) -> None:
        """The stream's next messages, each when the one before has gone out; hang up after the last."""
        while client.stream is not None and not client.pending and not client.closing:
            reply = self._told(client.stream.next)
            if reply is None and not client.stream.over:
                return
            if reply is not None:
                self._send(client, frame(reply))
            if reply is None or reply.HasField("error"):
                self._end_stream(client)
                self._finish(client)

    def _end_stream(self, client: Client) -> None:
        if client.stream is not None:
            stream, client.stream = client.stream, None
            self._told(stream.close)

    def _send_history(self, client: Client, wanted: int) -> None:
        frames: list[bytes] = []
        room = self._pending_limit(client) // 2
        for whole in list(self._history)[-wanted:] if wanted else []:
            if client.uid in self._all_seeing:
                frames.append(whole)
            else:
                report = NodeReply.FromString(whole[LENGTH.size :]).report
                frames.append(frame(NodeReply(report=visible(report, client.uid))))
        while len(frames) > 1 and sum(map(len, frames)) > room:
            del frames[: max(1, len(frames) // 8)]
        for part in frames:
            self._send(client, part)

    # ---- connections

    def _accept(self, _mask: int) -> None:
        self._sweep()
        for connection in self._listener.accept():
            try:
                client = Client(connection)
                self._selector.register(connection, selectors.EVENT_READ, partial(self._ready, client))
            except OSError:
                connection.close()
                continue
            full = self._full_for(client.uid)
            self._clients.append(client)
            if full:
                self._fail(client, full)

    def _full_for(self, uid: int) -> str:
        """Why one more connection of `uid` is refused; empty when it is not."""
        if len(self._clients) >= MAX_CLIENTS:
            return f"the agent already serves {MAX_CLIENTS} clients; close one and try again"
        if uid in self._all_seeing:
            return ""
        if sum(client.uid not in self._all_seeing for client in self._clients) >= MAX_CLIENTS - RESERVED:
            return "the agent already serves as many users as it can; try again later"
        if sum(client.uid == uid for client in self._clients) >= MAX_CLIENTS_PER_UID:
            return f"you already have {MAX_CLIENTS_PER_UID} connections to the agent; close one and try again"
        return ""

    def _sweep(self) -> None:
        now = time.monotonic()
        for client in list(self._clients):
            if client.is_late(now):
                self._drop(client)
        for uid, (left, when) in list(self._allowance.items()):
            if left + (now - when) * REQUESTS_PER_S >= REQUEST_BURST:
                del self._allowance[uid]

    def _drop(self, client: Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._end_stream(client)
            self._selector.unregister(client.socket)
            client.socket.close()

    # ---- bytes in and out

    def _ready(self, client: Client, mask: int) -> None:
        if client not in self._clients:  # dropped earlier in this turn of the loop
            return
        if not mask:  # nothing was waited for but that it is gone
            self._drop(client)
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(client)
                self._serve(client)
            if mask & selectors.EVENT_READ and not client.closing and client in self._clients:
                self._receive(client)
        except OSError:
            self._drop(client)

    def _receive(self, client: Client) -> None:
        if not client.receive():
            self._hear_no_more(client)
            return
        try:
            while not client.closing and (body := client.request()) is not None:
                self._answer(client, body)
        except TooLongError as error:
            self._fail(client, str(error))

    def _hear_no_more(self, client: Client) -> None:
        """Who has shut down only its own side still reads: it gets what there is of its stream."""
        client.watching = client.asks = False
        if client.stream is None:
            self._finish(client)
            return
        failure = self._told(client.stream.stop)
        if failure is not None:
            self._fail(client, failure.error)
            return
        self._serve(client)
        if client in self._clients:
            self._flush(client)

    def _pending_limit(self, client: Client) -> int:
        return MAX_PENDING_ALL if client.uid in self._all_seeing else MAX_PENDING_USER

    def _send(self, client: Client, data: bytes) -> None:
        """Queue `data`; a client that does not read is dropped."""
        if client not in self._clients:
            return
        if not client.queue(data, self._pending_limit(client)):
            self._drop(client)
            return
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _flush(self, client: Client) -> None:
        client.flush()
        if client.closing and not client.pending:
            self._drop(client)
        elif self._selector.get_key(client.socket).events != client.events:
            self._selector.modify(client.socket, client.events, partial(self._ready, client))

    def _finish(self, client: Client) -> None:
        """Close once everything pending has gone out."""
        if client in self._clients:
            client.closing = True
            client.put_off()
            try:
                self._flush(client)
            except OSError:
                self._drop(client)

    def _fail(self, client: Client, reason: str) -> None:
        self._send(client, frame(NodeReply(error=reason)))
        self._finish(client)

    # ---- requests

    def _allowed(self, uid: int) -> bool:
        """Whether `uid` may ask once more now: asking makes the agent work, so users share it fairly."""
        if uid in self._all_seeing:
            return True
        now = time.monotonic()
        left, when = self._allowance.get(uid, (REQUEST_BURST, now))
        left = min(REQUEST_BURST, left + (now - when) * REQUESTS_PER_S) - 1
        self._allowance[uid] = (max(left, 0.0), now)
        return left >= 0

    def _answer(self, client: Client, body: bytes) -> None:
        client.put_off()
        if not self._allowed(client.uid):
            self._fail(client, f"more than {REQUESTS_PER_S:.0f} requests per second; ask more slowly")
            return
        try:
            request = NodeRequest.FromString(body)
        except DecodeError:
            self._fail(client, "the request is not a NodeRequest; use a client of the agent's own version")
            return
        kind = request.WhichOneof("request")
        if kind == "watch" and not client.watching:
            client.watching = True
            self._send_history(client, min(request.watch.history, HISTORY))
        elif kind == "processes" and self._on_processes is not None:
            if self._may_ask_about(client.uid, request.processes.key, request.processes.run):
                ask = partial(self._on_processes, request.processes.key, request.processes.run, client.uid)
                self._reply(client, lambda: NodeReply(processes=ask()))
            else:
                error = f"no job {request.processes.key} of yours is on this node"
                self._send(client, frame(NodeReply(error=error)))
        elif kind == "run" and self._on_run is not None:
            run = partial(self._on_run, request.run.name, client.pid, client.uid)
            self._reply(client, lambda: NodeReply(run=run()))
        elif kind == "profile" and self._on_profile is not None and client.stream is None:
            profile = partial(self._on_profile, request.profile)
            if self._full(client.uid, ProfileStream, MAX_PROFILES_PER_UID, MAX_PROFILES):
                self._fail(client, "the agent already profiles for as many users as it can; try again later")
                return
            self._begin(client, lambda uid: ProfileStream(profile(uid)))
        elif kind == "trace" and self._on_trace is not None and client.stream is None:
            trace = self._on_trace
            if self._full(client.uid, TraceStream, MAX_TRACES_PER_UID, MAX_TRACES):
                self._refuse(client, request.trace)
                return
            self._begin(client, lambda uid: TraceStream(trace(checked(request.trace), uid)))
        else:
            self._fail(client, f"the agent does not answer a request of kind {kind or 'unknown'} here")

    def _begin(self, client: Client, make: Callable[[int | None], Stream]) -> None:
        """Begin a stream; what it has already goes out at once."""

        def begin() -> None:
            client.stream = make(None if client.uid in self._all_seeing else client.uid)

        failure = self._told(begin)
        if failure is not None:
            self._send(client, frame(failure))
        self._serve(client)

    def _full(self, uid: int, kind: type[ProfileStream | TraceStream], own: int, most: int) -> bool:
        """Whether `uid` has `own` streams of that kind, or all users without root have `most`."""
        if uid in self._all_seeing:
            return False
        others = [
            c.uid for c in self._clients if isinstance(c.stream, kind) and c.uid not in self._all_seeing
        ]
        return others.count(uid) >= own or len(others) >= most

    def _refuse(self, client: Client, asked: TraceRequest) -> None:
        """Say why no window is opened for a user without root, as the source does for other reasons."""
        streams = [c.stream for c in self._clients if c.uid == client.uid]
        own = next((stream.status for stream in streams if isinstance(stream, TraceStream)), None)
        self._send(client, frame(NodeReply(trace=no_room(asked, own))))
        self._finish(client)

    def _reply(self, client: Client, make: Callable[[], NodeReply]) -> None:
        reply = self._told(make)
        assert reply is not None
        self._send(client, frame(reply))

    def _told(self, call: Callable[[], NodeReply | None]) -> NodeReply | None:
        """What `call` gives, or how it failed: a client's question must not end the agent."""
        try:
            return call()
        except ExpanseError as error:
            return NodeReply(error=str(error))
        except Exception:
            _log.exception("a question on the node's socket failed")
            return NodeReply(error="the agent could not answer; see its log")

    def _may_ask_about(self, uid: int, key: str, run: int) -> bool:
        if uid in self._all_seeing:
            return True
        return self._last is not None and any(
            f"{job.identity.scheduler}/{job.identity.id}" == key and run in (0, job.identity.run)
            for job in self._last.jobs
            if job.identity.HasField("uid") and job.identity.uid == uid
        )
