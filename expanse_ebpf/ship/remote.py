"""Questions to a controller, for the commands that look at other nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.ship.failure import cause
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import NodeSnapshot, SnapshotReply, SnapshotRequest

CONNECT_S = 3.0
MAX_REPLY_BYTES = 64 * 1024 * 1024  # two reports of each of some ten thousand nodes


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
