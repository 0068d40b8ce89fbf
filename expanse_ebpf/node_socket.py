"""The node's Unix socket: reports for those who may see them, Python stacks, and answers to short questions.

It lives in the agent's own loop. Every file is registered in the selector with a function as its
`data`, to be called with the ready mask: `for key, mask in selector.select(): key.data(mask)`.
Root and the agent's own user see every job, anyone else the jobs that are known to be theirs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import selectors
import socket
import stat
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError, Message

from expanse_ebpf.errors import ConfigError, ExpanseError, UnavailableError
from expanse_ebpf.visibility import visible
from expanse_ebpf.wire.collector_pb2 import (
    NodeReply,
    NodeRequest,
    ProcessesReply,
    ProfilePart,
    Report,
    RunReply,
    WatchProfileRequest,
)

HISTORY = 120  # reports kept for those who come later
HISTORY_BYTES = 4 << 20  # but never more than this, whatever the number of jobs
MAX_REQUEST = 4096  # bytes
MAX_CLIENTS = 64
RESERVED = 8  # of them for root, whom nobody must be able to lock out
MAX_CLIENTS_PER_UID = 8
REQUEST_BURST, REQUESTS_PER_S = 40.0, 20.0  # of a user without root, over all their connections
MAX_PROFILES = 16  # clients without root who look at Python stacks: each makes work in every tick
MAX_PROFILES_PER_UID = 2
MAX_PENDING_ALL = HISTORY_BYTES + (4 << 20)  # bytes not yet taken by a client who sees everything
MAX_PENDING_USER = 1 << 20  # the same for anyone else
QUIET_S = 10.0  # a client that neither watches nor asks is dropped after this time

_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred
_log = logging.getLogger(__name__)

OnProcesses = Callable[[str, int, int], ProcessesReply]
OnRun = Callable[[str, int, int], RunReply]


class ProfileWatch(Protocol):
    """Python stacks that are being gathered for one client."""

    over: str  # why nothing more will come; empty: more will

    def part(self, *, up_to_now: bool = False) -> ProfilePart:
        """What has come since the last part: up to the last tick, or up to now."""

    def close(self) -> None:
        """Nobody wants them any more."""


# The user's id is None for those who see everything.
OnProfile = Callable[[WatchProfileRequest, int | None], ProfileWatch]


def frame(message: Message) -> bytes:
    """`message` as it goes over the socket: its length in 4 bytes, big-endian, then itself."""
    body = message.SerializeToString()
    return _LENGTH.pack(len(body)) + body


class _Client:
    """One connection."""

    __slots__ = (
        "closing",
        "deadline",
        "pending",
        "pending_bytes",
        "pid",
        "profile",
        "received",
        "socket",
        "uid",
        "watching",
    )

    def __init__(self, connection: socket.socket, pid: int, uid: int) -> None:
        self.socket = connection
        self.pid = pid
        self.uid = uid
        self.received = bytearray()
        self.pending: deque[memoryview] = deque()
        self.pending_bytes = 0
        self.watching = False
        self.profile: ProfileWatch | None = None
        self.closing = False  # to be closed as soon as what is pending has gone out
        self.deadline = time.monotonic() + QUIET_S


class NodeSocket:
    """The server side of the node's socket.

    `on_processes(key, run, uid)` and `on_run(name, pid, uid)` answer the two kinds of question,
    `on_profile(request, uid)` begins a stream of Python stacks; what they raise as ExpanseError goes to
    the client as its one line.
    """

    def __init__(
        self,
        path: str,
        selector: selectors.BaseSelector,
        agent_uid: int = 0,
        on_processes: OnProcesses | None = None,
        on_run: OnRun | None = None,
        on_profile: OnProfile | None = None,
    ) -> None:
        self.path = path
        self._selector = selector
        self._all_seeing = {0, agent_uid}
        self._on_processes = on_processes
        self._on_run = on_run
        self._on_profile = on_profile
        self._listener: socket.socket | None = None
        self._inode = (0, 0)
        self._spare = -1
        self._clients: list[_Client] = []
        self._allowance: dict[int, tuple[float, float]] = {}  # uid to (requests left, at which time)
        self._history: deque[bytes] = deque()
        self._history_bytes = 0
        self._last: Report | None = None

    def open(self) -> None:
        """Start to listen.

        Raises ConfigError when the path cannot be a socket, UnavailableError when another agent
        answers there or the place cannot be written.
        """
        if len(os.fsencode(self.path)) > 107:  # sun_path, with its final NUL
            raise ConfigError(
                f"agent.socket: {self.path} is longer than 107 bytes, all that a socket's path can have"
            )
        directory = Path(self.path).parent
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True)
                directory.chmod(0o755)  # whatever the umask: everyone may connect
            with _locked(self.path + ".lock"):
                self._remove_stale()
                self._listen()
        except OSError as error:
            raise UnavailableError(
                f"cannot open the node's socket {self.path}: {error.strerror}; "
                "run the agent as root or set agent.socket"
            ) from None

    def _remove_stale(self) -> None:
        try:
            mode = os.lstat(self.path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            raise ConfigError(
                f"agent.socket: {self.path} exists and is not a socket; remove it or set another"
            )
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.setblocking(False)
            code = probe.connect_ex(self.path)
        # EAGAIN is a full backlog: somebody listens, however slowly.
        if code in (0, errno.EAGAIN, errno.EINPROGRESS):
            raise UnavailableError(f"an agent already runs on {self.path}; stop it or set agent.socket")
        Path(self.path).unlink()

    def _listen(self) -> None:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.setblocking(False)
            listener.bind(self.path)
            Path(self.path).chmod(0o666)  # who may see what is decided by credentials
            status = os.lstat(self.path)
            listener.listen(MAX_CLIENTS)
        except OSError:
            listener.close()
            raise
        self._inode = (status.st_dev, status.st_ino)
        self._listener = listener
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        self._selector.register(listener, selectors.EVENT_READ, self._accept)

    def close(self) -> None:
        """Hang up on everyone and remove the socket's file; safe to call twice."""
        for client in list(self._clients):
            self._drop(client)
        if self._listener is None:
            return
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            status = os.lstat(self.path)
            if (status.st_dev, status.st_ino) == self._inode:
                Path(self.path).unlink()

    # ---- reports out

    def publish(self, report: Report) -> None:
        """Keep `report` and send every watcher what they may see of it. The caller must not change it.

        `Report.profiles` is for the controller: megabytes, which nobody here waits for. Who wants a
        profile asks for one, and gets its next part now.
        """
        if report.profiles:
            whole_report, report = report, Report()
            report.CopyFrom(whole_report)
            report.ClearField("profiles")
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
        for client in [client for client in self._clients if client.profile is not None]:
            self._send_part(client)
        self._sweep()

    def _send_part(self, client: _Client, *, up_to_now: bool = False) -> None:
        """The next part of a profile; the last one when there will be no other."""
        profile = client.profile
        if profile is None:
            return
        self._reply(client, lambda: NodeReply(profile=profile.part(up_to_now=up_to_now)))
        if profile.over and client in self._clients:
            self._end_profile(client)
            self._finish(client)

    def _end_profile(self, client: _Client) -> None:
        if client.profile is not None:
            client.profile.close()
            client.profile = None

    def _send_history(self, client: _Client, wanted: int) -> None:
        frames: list[bytes] = []
        room = self._pending_limit(client) // 2
        for whole in list(self._history)[-wanted:] if wanted else []:
            if client.uid in self._all_seeing:
                frames.append(whole)
            else:
                report = NodeReply.FromString(whole[_LENGTH.size :]).report
                frames.append(frame(NodeReply(report=visible(report, client.uid))))
        while len(frames) > 1 and sum(map(len, frames)) > room:
            del frames[: max(1, len(frames) // 8)]
        for part in frames:
            self._send(client, part)

    # ---- connections

    def _accept(self, _mask: int) -> None:
        assert self._listener is not None
        self._sweep()
        for _ in range(16):  # the rest at the next turn of the loop
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._refuse_one()
                return
            try:
                connection.setblocking(False)
                credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
                pid, uid, _gid = _CREDENTIALS.unpack(credentials)
                client = _Client(connection, pid, uid)
                self._selector.register(connection, selectors.EVENT_READ, partial(self._ready, client))
            except OSError:
                connection.close()
                continue
            full = self._full_for(uid)
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

    def _refuse_one(self) -> None:
        """Take one connection and close it when there are no descriptors left.

        It would stay in the backlog and keep the loop awake for ever.
        """
        assert self._listener is not None
        os.close(self._spare)
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        self._spare = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _sweep(self) -> None:
        now = time.monotonic()
        for client in list(self._clients):
            stays = client.watching or client.profile is not None
            if (client.closing or not stays) and now > client.deadline:
                self._drop(client)
        for uid, (left, when) in list(self._allowance.items()):
            if left + (now - when) * REQUESTS_PER_S >= REQUEST_BURST:
                del self._allowance[uid]

    def _drop(self, client: _Client) -> None:
        if client in self._clients:
            self._clients.remove(client)
            self._end_profile(client)
            self._selector.unregister(client.socket)
            client.socket.close()

    # ---- bytes in and out

    def _ready(self, client: _Client, mask: int) -> None:
        if client not in self._clients:  # dropped earlier in this turn of the loop
            return
        try:
            if mask & selectors.EVENT_WRITE:
                self._flush(client)
            if mask & selectors.EVENT_READ and not client.closing and client in self._clients:
                self._receive(client)
        except OSError:
            self._drop(client)

    def _receive(self, client: _Client) -> None:
        try:
            data = client.socket.recv(MAX_REQUEST + _LENGTH.size)
        except BlockingIOError:
            return
        if not data:
            client.watching = False
            # Who has shut down only its own side still reads: it gets what came since the last tick.
            self._send_part(client, up_to_now=True)
            if client in self._clients:
                self._end_profile(client)
                self._finish(client)
            return
        client.received += data
        while not client.closing and len(client.received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(client.received)
            if length > MAX_REQUEST:
                self._fail(client, f"a request of {length} bytes; {MAX_REQUEST} are allowed")
                return
            if len(client.received) < _LENGTH.size + length:
                return
            body = bytes(client.received[_LENGTH.size : _LENGTH.size + length])
            del client.received[: _LENGTH.size + length]
            self._answer(client, body)

    def _pending_limit(self, client: _Client) -> int:
        return MAX_PENDING_ALL if client.uid in self._all_seeing else MAX_PENDING_USER

    def _send(self, client: _Client, data: bytes) -> None:
        """Queue `data`; a client that does not read is dropped. One frame always has room."""
        if client not in self._clients:
            return
        if client.pending and client.pending_bytes + len(data) > self._pending_limit(client):
            self._drop(client)
            return
        client.pending.append(memoryview(data))
        client.pending_bytes += len(data)
        try:
            self._flush(client)
        except OSError:
            self._drop(client)

    def _flush(self, client: _Client) -> None:
        while client.pending:
            try:
                sent = client.socket.send(client.pending[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                break
            client.pending_bytes -= sent
            if sent == len(client.pending[0]):
                client.pending.popleft()
            else:
                client.pending[0] = client.pending[0][sent:]
        if client.closing and not client.pending:
            self._drop(client)
            return
        events = 0 if client.closing else selectors.EVENT_READ
        if client.pending:
            events |= selectors.EVENT_WRITE
        if self._selector.get_key(client.socket).events != events:
            self._selector.modify(client.socket, events, partial(self._ready, client))

    def _finish(self, client: _Client) -> None:
        """Close once everything pending has gone out."""
        client.closing = True
        client.deadline = time.monotonic() + QUIET_S
        self._flush(client)

    def _fail(self, client: _Client, reason: str) -> None:
        self._send(client, frame(NodeReply(error=reason)))
        if client in self._clients:
            with contextlib.suppress(OSError):
                self._finish(client)
                return
            self._drop(client)

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

    def _answer(self, client: _Client, body: bytes) -> None:
        client.deadline = time.monotonic() + QUIET_S
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
        elif kind == "profile" and self._on_profile is not None and client.profile is None:
            self._begin_profile(client, self._on_profile, request.profile)
        else:
            self._fail(client, f"the agent does not answer a request of kind {kind or 'unknown'} here")

    def _begin_profile(self, client: _Client, begin: OnProfile, request: WatchProfileRequest) -> None:
        """Begin to gather; the first part comes at once and tells the rate."""

        def first() -> NodeReply:
            client.profile = begin(request, None if client.uid in self._all_seeing else client.uid)
            return NodeReply(profile=client.profile.part())

        if client.uid not in self._all_seeing:
            others = [c.uid for c in self._clients if c.profile is not None and c.uid not in self._all_seeing]
            if others.count(client.uid) >= MAX_PROFILES_PER_UID or len(others) >= MAX_PROFILES:
                self._fail(client, "the agent already profiles for as many users as it can; try again later")
                return
        self._reply(client, first)

    def _reply(self, client: _Client, make: Callable[[], NodeReply]) -> None:
        try:
            reply = make()
        except ExpanseError as error:
            reply = NodeReply(error=str(error))
        except Exception:  # a client's question must not end the agent
            _log.exception("a question on the node's socket failed")
            reply = NodeReply(error="the agent could not answer; see its log")
        self._send(client, frame(reply))

    def _may_ask_about(self, uid: int, key: str, run: int) -> bool:
        if uid in self._all_seeing:
            return True
        return self._last is not None and any(
            f"{job.identity.scheduler}/{job.identity.id}" == key and run in (0, job.identity.run)
            for job in self._last.jobs
            if job.identity.HasField("uid") and job.identity.uid == uid
        )


@contextlib.contextmanager
def _locked(name: str) -> Iterator[None]:
    """Hold a lock file, removed in the end, so that of two agents that start at once one sees the other."""
    path = Path(name)
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # Its last holder may have removed it between our open and our lock.
            if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
                try:
                    yield
                finally:
                    path.unlink()
                return
        finally:
            os.close(descriptor)
