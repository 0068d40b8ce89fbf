"""Questions to a controller, for the commands that look at other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from expanse_ebpf.errors import UnavailableError, UnknownJobError
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import (
    NodeSnapshot,
    ProfileReply,
    ProfileRequest,
    SnapshotReply,
    SnapshotRequest,
    StoredTrace,
    TraceReply,
    TraceRequest,
    TracesReply,
    TracesRequest,
)
from expanse_ebpf.wire.failure import cause

CONNECT_S = 3.0
MERGE_S = 240.0  # a long span is merged for minutes
_NOBODY = "-"  # no node's name
# Answers about the question itself; the link is not at fault.
_REFUSALS = ("NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
MAX_REPLY_BYTES = 64 * 1024 * 1024  # two reports of each of some ten thousand nodes


class NotStoredError(UnavailableError):
    """The controller knows no such job, or not of that node."""

    exit_code = UnknownJobError.exit_code


def snapshot(address: str, node: str = "", timeout: float = CONNECT_S) -> list[NodeSnapshot]:
    """The newest report, and the one before it, of `node` (name or installation id), or of all nodes.

    Raises UnavailableError when the controller at `address` (HOST:PORT) does not answer within
    `timeout` seconds or knows no such node.
    """
    with _channel(address) as channel:
        nodes = _snapshot(channel, node, timeout)
    if node and not nodes:
        raise UnavailableError(_unknown(address, node))
    return nodes


def watch(address: str, node: str = "", timeout: float = CONNECT_S) -> Iterator[NodeSnapshot]:
    """What `snapshot` gives, then each new report as it is stored, until the caller closes the iterator.

    Raises UnavailableError when the controller cannot be reached within `timeout` seconds, knows no
    such node, or is lost later.
    """
    with _channel(address) as channel:
        # A stream has no deadline, so a call that has one finds out whether the controller is there.
        if not _snapshot(channel, node, timeout) and node:
            raise UnavailableError(_unknown(address, node))
        ask = channel.unary_stream(
            transport.WATCH,
            request_serializer=SnapshotRequest.SerializeToString,
            response_deserializer=NodeSnapshot.FromString,
        )
        call = ask(SnapshotRequest(node=node))
        try:
            for message in call:  # noqa: UP028 - the call object is no generator, `yield from` would not close it
                yield message
        finally:
            call.cancel()
    raise UnavailableError(f"controller {address} ended the view; repeat the command once it runs again")


def fetch_profile(
    address: str,
    key: str,
    run: int = 0,
    node: str = "",
    from_ns: int = 0,
    to_ns: int = 0,
    timeout: float = MERGE_S,
) -> ProfileReply:
    """The Python stacks of the job `key` ("slurm/123") over a span of time, on all its nodes or on one.

    Times are nanoseconds since 1970 UTC, `to_ns` 0 is now. `run` 0 is the newest. The reply's `pprof` is
    packed by gzip, and empty when nothing is stored of that span. Raises UnavailableError when the
    controller at `address` (HOST:PORT) cannot be reached or will not merge as much, NotStoredError when
    it knows no such job.
    """
    with _channel(address) as channel:
        _snapshot(channel, _NOBODY, CONNECT_S)  # whether it is there is told soon
        ask = channel.unary_unary(
            transport.PROFILE,
            request_serializer=ProfileRequest.SerializeToString,
            response_deserializer=ProfileReply.FromString,
        )
        request = ProfileRequest(key=key, run=run, node=node, from_ns=from_ns, to_ns=to_ns)
        with _refusals(address):
            reply: ProfileReply = ask(request, timeout=timeout)
        return reply


def trace(address: str, request: TraceRequest, timeout: float = CONNECT_S) -> Iterator[TraceReply]:
    """Open a window on the nodes of the job `request.key`: their statuses as they come, then their parts.

    The controller makes the id and the start. An answer without a node says that no window is opened, and
    why. Closing the iterator does not end the window. Raises UnavailableError when the controller cannot be
    reached within `timeout` seconds, does not take the request, or is lost later.
    """
    grpc = transport.import_grpc()
    with _channel(address) as channel:
        _snapshot(channel, _NOBODY, timeout)  # a stream has no deadline
        ask = channel.unary_stream(
            transport.TRACE,
            request_serializer=TraceRequest.SerializeToString,
            response_deserializer=TraceReply.FromString,
        )
        call, window = ask(request), ""
        try:
            with _refusals(address):
                for reply in call:
                    window = window or reply.status.id
                    yield reply
        except grpc.RpcError as error:
            if not window:
                raise
            reason = cause(error.code().name, error.details() or "")
            raise UnavailableError(
                f"controller {address} is lost: {reason}; the nodes go on with window {window}, and it is "
                "stored once the controller runs again"
            ) from None
        finally:
            call.cancel()


def traces(
    address: str, key: str = "", window: str = "", limit: int = 0, timeout: float = CONNECT_S
) -> list[StoredTrace]:
    """Windows that are stored, the newest first: of the job `key` or of all, or the nodes of one `window`.

    `limit` 0 is the controller's own. Raises UnavailableError.
    """
    with _channel(address) as channel, _refusals(address):
        ask = channel.unary_unary(
            transport.TRACES,
            request_serializer=TracesRequest.SerializeToString,
            response_deserializer=TracesReply.FromString,
        )
        return list(ask(TracesRequest(key=key, id=window, limit=limit), timeout=timeout).traces)


def stored_traces(address: str, window: str, timeout: float = CONNECT_S) -> Iterator[TraceReply]:
    """What is stored of a window, node by node: the status, then the parts where there is a trace.

    Raises UnavailableError when the controller cannot be reached within `timeout` seconds or is lost,
    NotStoredError when it knows no such window.
    """
    with _channel(address) as channel:
        _snapshot(channel, _NOBODY, timeout)
        ask = channel.unary_stream(
            transport.STORED_TRACES,
            request_serializer=TracesRequest.SerializeToString,
            response_deserializer=TraceReply.FromString,
        )
        call = ask(TracesRequest(id=window))
        try:
            with _refusals(address):
                yield from call
        finally:
            call.cancel()


def _snapshot(channel: Any, node: str, timeout: float) -> list[NodeSnapshot]:
    ask = channel.unary_unary(
        transport.SNAPSHOT,
        request_serializer=SnapshotRequest.SerializeToString,
        response_deserializer=SnapshotReply.FromString,
    )
    return list(ask(SnapshotRequest(node=node), timeout=timeout).nodes)


def _unknown(address: str, node: str) -> str:
    return (
        f"controller {address} has no report from node {node!r}; check its name, or that its agent ships here"
    )


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    """Turns what the controller says of the question itself into an error of its own."""
    grpc = transport.import_grpc()
    try:
        yield
    except grpc.RpcError as error:
        if error.code().name in _REFUSALS:
            kind = NotStoredError if error.code().name == "NOT_FOUND" else UnavailableError
            raise kind(f"controller {address}: {error.details()}") from None
        raise


@contextmanager
def _channel(address: str) -> Iterator[Any]:
    """A channel whose failed calls raise UnavailableError."""
    grpc = transport.import_grpc()
    options = (*transport.client_options(), ("grpc.max_receive_message_length", MAX_REPLY_BYTES))
    with grpc.insecure_channel(address, options=options) as channel:
        try:
            yield channel
        except grpc.RpcError as error:
            reason = cause(error.code().name, error.details() or "")
            raise UnavailableError(
                f"controller {address} cannot be reached: {reason}; check the address and that "
                "expanse-controller serve runs there"
            ) from None
