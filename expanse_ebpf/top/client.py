"""The client side of the node's Unix socket."""

from __future__ import annotations

import math
import socket
import struct
import time
from collections.abc import Callable, Generator, Iterator

from google.protobuf.message import DecodeError

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.wire.collector_pb2 import (
    NodeReply,
    NodeRequest,
    ProcessesReply,
    ProcessesRequest,
    ProfilePart,
    Report,
    TraceReply,
    TraceRequest,
    WatchProfileRequest,
    WatchRequest,
)

MAX_REPLY = 64 << 20  # bytes; no report comes near it
ANSWER_S = 10.0  # how long a question may take
SILENCE_S = 60.0  # an agent says how a window stands every second; in the end it resolves names
_LENGTH = struct.Struct(">I")
_NO_AGENT = "what answers on {} is not an agent; name its socket with --socket"
_TURN_S = 0.2  # how soon `stop` is noticed


class HungUpError(UnavailableError):
    """The agent has closed the connection."""


class NoAgentError(UnavailableError):
    """Nobody can be reached at the socket; `cause` is the message without its remedy."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause + remedy)
        self.cause = cause


def watch(path: str, history: int = 0, stop: Callable[[], bool] | None = None) -> Iterator[Report]:
    """The last `history` reports of the agent at `path`, then each new one until `stop()` is true.

    Raises UnavailableError when no agent answers, or when it goes away.
    """
    with _connect(path) as connection:
        _send(connection, path, NodeRequest(watch=WatchRequest(history=history)))
        while True:
            reply = _receive(connection, path, stop=stop)
            if reply is None:
                return
            yield reply.report
            if stop is not None and stop():
                return


def profile(
    path: str, request: WatchProfileRequest, stop: Callable[[], bool]
) -> Generator[ProfilePart, None, None]:
    """Python stacks as they are sampled: one part per tick of the agent at `path`.

    The first part comes at once, is empty and tells the rate. When `stop()` has become true the last one
    follows, up to that moment. Raises UnavailableError when no agent answers, and for what cannot be
    profiled for this user; HungUpError when the agent goes away, and after the last part of what has ended.
    """
    stopped = False

    def noticed() -> bool:
        nonlocal stopped
        stopped = stopped or stop()
        return stopped

    try:
        for reply in _stream(path, NodeRequest(profile=request), noticed, then_s=ANSWER_S):
            yield reply.profile
    except HungUpError:
        if not stopped:
            raise


def trace(path: str, request: TraceRequest, stop: Callable[[], bool]) -> Generator[TraceReply, None, None]:
    """A window that the agent at `path` opens: how it stands, and in the end its trace, part by part.

    When `stop()` has become true the window ends, and what there is follows. Raises UnavailableError when no
    agent answers, or it says nothing for SILENCE_S, and for what cannot be traced for this user.
    """
    heard = False
    try:
        for reply in _stream(path, NodeRequest(trace=request), stop, SILENCE_S, SILENCE_S):
            heard = True
            yield reply.trace
    except HungUpError:  # after the last part
        if not heard:
            raise


def processes(path: str, key: str, run: int = 0) -> ProcessesReply:
    """The processes of the job `key` ("slurm/123"), of its run `run` (0: the newest).

    Raises UnavailableError when no agent answers or the job is not there for this user.
    """
    return ask(path, NodeRequest(processes=ProcessesRequest(key=key, run=run))).processes


def ask(path: str, request: NodeRequest) -> NodeReply:
    """The agent's one answer to `request`; raises UnavailableError, also when the answer is an error."""
    with _connect(path) as connection:
        _send(connection, path, request)
        reply = _receive(connection, path, deadline=time.monotonic() + ANSWER_S)
        assert reply is not None  # only `stop` ends without a reply
        return reply


def _stream(
    path: str, request: NodeRequest, stop: Callable[[], bool], first_s: float = math.inf, then_s: float = 0.0
) -> Generator[NodeReply, None, None]:
    """All replies to `request` until HungUpError; once `stop()` is true the agent knows that it is enough.

    Raises UnavailableError when it says nothing for `first_s`, or for `then_s` after that.
    """
    with _connect(path) as connection:
        _send(connection, path, request)
        heard, patience, told = time.monotonic(), first_s, False

        def look() -> bool:
            nonlocal heard, patience, told
            if stop() and not told:
                told, heard, patience = True, time.monotonic(), then_s
                connection.shutdown(socket.SHUT_WR)
            if time.monotonic() > heard + patience:
                raise UnavailableError(
                    f"the agent on {path} has said nothing for {patience:.0f} s; see its log"
                )
            return False  # a reply that has come in part must not be lost

        while True:
            reply = _receive(connection, path, stop=look)
            assert reply is not None  # `look` ends nothing
            yield reply
            heard = time.monotonic()
            look()


def _connect(path: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(ANSWER_S)
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError, NotADirectoryError):
        connection.close()
        raise NoAgentError(
            f"no agent answers on {path}",
            ": start it with `expanse-ebpf agent` as root, or name its socket with --socket",
        ) from None
    except PermissionError:
        connection.close()
        raise NoAgentError(
            f"you may not open {path}: permission denied",
            "; ask for read and write access to it, or become root",
        ) from None
    except OSError as error:
        connection.close()
        raise NoAgentError(
            f"cannot connect to {path}: {error.strerror or error}",
            "; name the agent's socket with --socket",
        ) from None
    return connection


def _send(connection: socket.socket, path: str, request: NodeRequest) -> None:
    body = request.SerializeToString()
    try:
        connection.sendall(_LENGTH.pack(len(body)) + body)
    except OSError:
        # It may have said why before it hung up; the reader will see that.
        return


def _receive(
    connection: socket.socket,
    path: str,
    stop: Callable[[], bool] | None = None,
    deadline: float | None = None,
) -> NodeReply | None:
    """The next reply; None when `stop()` became true before it came."""
    received = bytearray()
    wanted, header = _LENGTH.size, True
    while len(received) < wanted:
        connection.settimeout(_TURN_S)
        try:
            data = connection.recv(min(wanted - len(received), 1 << 20))
        except TimeoutError:
            if stop is not None and stop():
                return None
            if deadline is not None and time.monotonic() > deadline:
                raise UnavailableError(
                    f"the agent on {path} gave no answer within {ANSWER_S:.0f} s; see its log"
                ) from None
            continue
        except OSError:
            data = b""
        if not data:
            raise HungUpError(f"the agent on {path} hung up; see whether it still runs")
        received += data
        if header and len(received) == wanted:
            (length,) = _LENGTH.unpack(received)
            if length > MAX_REPLY:
                raise UnavailableError(_NO_AGENT.format(path))
            received.clear()
            wanted, header = length, False
    try:
        reply = NodeReply.FromString(bytes(received))
    except DecodeError:
        raise UnavailableError(_NO_AGENT.format(path)) from None
    kind = reply.WhichOneof("reply")
    if kind is None:
        raise UnavailableError(f"the agent on {path} gave an answer unknown here; use its own version of top")
    if kind == "error":
        raise UnavailableError(reply.error)
    return reply
