"""One client of the node's socket: its bytes in and out, which never make the agent wait."""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import deque
from typing import TYPE_CHECKING

from google.protobuf.message import Message

if TYPE_CHECKING:
    from expanse_ebpf.node_streams import Stream

MAX_REQUEST = 4096  # bytes
QUIET_S = 10.0  # a client that neither watches nor asks is dropped after this time
TAKE_S = 30.0  # and one that has not taken a message of its stream after this one

LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred


def frame(message: Message) -> bytes:
    """`message` as it goes over the socket: its length in 4 bytes, big-endian, then itself."""
    body = message.SerializeToString()
    return LENGTH.pack(len(body)) + body


class TooLongError(Exception):
    """A request that is longer than any can be; the message says how long."""


class Client:
    """One connection."""

    __slots__ = (
        "asks",
        "closing",
        "deadline",
        "head_since",
        "pending",
        "pending_bytes",
        "pid",
        "received",
        "socket",
        "stream",
        "uid",
        "watching",
    )

    def __init__(self, connection: socket.socket) -> None:
        """`connection` does not block. Raises OSError when it is gone."""
        self.socket = connection
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.pid, self.uid, _gid = _CREDENTIALS.unpack(credentials)
        self.received = bytearray()
        self.pending: deque[memoryview] = deque()
        self.pending_bytes = 0
        self.head_since = 0.0  # when the first of them came to be the first; monotonic
        self.watching = False
        self.stream: Stream | None = None
        self.asks = True  # its own side of the connection is open
        self.closing = False  # to be closed as soon as what is pending has gone out
        self.deadline = 0.0
        self.put_off()

    def put_off(self) -> None:
        """It has done something: the time until it is dropped for being quiet begins anew."""
        self.deadline = time.monotonic() + QUIET_S

    def is_late(self, now: float) -> bool:
        """Whether it is to be dropped at the monotonic time `now`."""
        if self.stream is not None and self.pending and now > self.head_since + TAKE_S:
            return True
        stays = self.watching or self.stream is not None
        return (self.closing or not stays) and now > self.deadline

    @property
    def events(self) -> int:
        """What is waited for, as a mask of the selector; 0: only that it is gone."""
        mask = selectors.EVENT_READ if self.asks and not self.closing else 0
        return mask | (selectors.EVENT_WRITE if self.pending else 0)

    def receive(self) -> bool:
        """Take in what has come; False when its side is shut down. Raises OSError."""
        try:
            data = self.socket.recv(MAX_REQUEST + LENGTH.size)
        except BlockingIOError:
            return True
        self.received += data
        return bool(data)

    def request(self) -> bytes | None:
        """The next whole request; None: it has not come yet. Raises TooLongError."""
        if len(self.received) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self.received)
        if length > MAX_REQUEST:
            raise TooLongError(f"a request of {length} bytes; {MAX_REQUEST} are allowed")
        end = LENGTH.size + length
        if len(self.received) < end:
            return None
        body = bytes(self.received[LENGTH.size : end])
        del self.received[:end]
        return body

    def queue(self, data: bytes, limit: int) -> bool:
        """Queue `data`; False when more than `limit` bytes would be pending. One message always has room."""
        if self.pending and self.pending_bytes + len(data) > limit:
            return False
        if not self.pending:
            self.head_since = time.monotonic()
        self.pending.append(memoryview(data))
        self.pending_bytes += len(data)
        return True

    def flush(self) -> None:
        """Send as much as it takes now. Raises OSError when it is gone."""
        while self.pending:
            try:
                sent = self.socket.send(self.pending[0], socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            self.pending_bytes -= sent
            if sent == len(self.pending[0]):
                self.pending.popleft()
                self.head_since = time.monotonic()
            else:
                self.pending[0] = self.pending[0][sent:]
