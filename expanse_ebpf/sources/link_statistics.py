"""Link statistics of one network namespace, over a netlink socket that was made in it.

pyroute2's messages are used over a socket of our own, with
RTM_GETSTATS: a reply of that kind holds the counters alone and is decoded in a twelfth of the time of
a link's whole description, which is asked for only when an interface is new.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

from expanse_ebpf.sources.netlink_parts import part
from expanse_ebpf.text import clean

Counts = tuple[int, ...]  # bytes in, bytes out, packets in, packets out, dropped, errors

_GETLINK, _GETSTATS = 18, 94
_DONE, _ERROR = 3, 2
_REQUEST_DUMP = 0x301
_FLAG_LOOPBACK = 0x8
_LINK_64 = 1  # filter_mask of IFLA_STATS_LINK_64
_CLONE_NEWNET = 0x40000000
_NAMES_EVERY = 60  # dumps after which names are read anew, since interfaces can be renamed
_MOST = 65536  # messages in one answer
_HEADER = struct.Struct("=IHHII")


def open_socket(namespace: int | None) -> socket.socket:
    """A route netlink socket in the network namespace of that descriptor; None: in the caller's own.

    A socket stays in the namespace in which it was made. It is made in a thread that lives for this
    call only, so no other thread ever leaves its namespace. Raises OSError.
    """
    if namespace is None:
        return _socket()
    made: list[socket.socket] = []
    failed: list[OSError] = []

    def make() -> None:
        try:
            if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET) != 0:
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
            made.append(_socket())
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=make, name="netns")
    thread.start()
    thread.join()
    if not made:
        raise failed[0] if failed else OSError("no socket in that network namespace")
    return made[0]


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, socket.NETLINK_ROUTE)
    try:
        made.bind((0, 0))
        made.settimeout(1.0)
    except OSError:
        made.close()
        raise
    return made


def load() -> tuple[Any, Any]:
    """pyroute2's messages of links and of link statistics; raises ImportError."""
    return part("netlink.rtnl.ifinfmsg").ifinfmsg, part("netlink.rtnl.ifstatsmsg").ifstatsmsg


class Links:
    """The interfaces behind one socket, loopback left out."""

    def __init__(self, netlink: socket.socket) -> None:
        self._link, self._stats = load()
        self._socket = netlink
        self._sequence = 0
        self._dumps = 0
        self._names: dict[int, str] = {}  # loopback bears the name ""

    def by_index(self) -> dict[int, Counts]:
        """The counters by interface index; raises OSError."""
        found: dict[int, Counts] = {}
        for message in self._dump(_GETSTATS, self._stats, filter_mask=_LINK_64):
            counts = message.get_attr("IFLA_STATS_LINK_64")
            if counts is not None:
                found[message["ifindex"]] = (
                    counts["rx_bytes"],
                    counts["tx_bytes"],
                    counts["rx_packets"],
                    counts["tx_packets"],
                    counts["rx_dropped"] + counts["tx_dropped"],
                    counts["rx_errors"] + counts["tx_errors"],
                )
        if self._dumps % _NAMES_EVERY == 0 or not self._names.keys() >= found.keys():
            self._names = {}
            for message in self._dump(_GETLINK, self._link):
                loopback = message["flags"] & _FLAG_LOOPBACK
                self._names[message["index"]] = (
                    "" if loopback else clean(str(message.get_attr("IFLA_IFNAME")), 16)
                )
        self._dumps += 1
        return {index: counts for index, counts in found.items() if self._names.get(index)}

    def by_name(self) -> dict[str, Counts]:
        """The counters by interface name; raises OSError."""
        return {self._names[index]: counts for index, counts in self.by_index().items()}

    def _dump(self, kind: int, message_class: Any, **fields: int) -> Iterator[Any]:
        self._sequence += 1
        request = message_class()
        request["header"]["type"] = kind
        request["header"]["flags"] = _REQUEST_DUMP
        request["header"]["sequence_number"] = self._sequence
        for name, value in fields.items():
            request[name] = value
        request.encode()
        self._socket.send(bytes(request.data))
        for _ in range(_MOST):
            data = self._socket.recv(1 << 16)
            offset = 0
            while offset + _HEADER.size <= len(data):
                length, kind, _, sequence, _ = _HEADER.unpack_from(data, offset)
                if length < _HEADER.size or offset + length > len(data):
                    raise OSError("damaged netlink answer")
                # An answer that was given up earlier may still lie in the socket.
                if sequence == self._sequence:
                    if kind == _DONE:
                        return
                    if kind == _ERROR:
                        (number,) = struct.unpack_from("=i", data, offset + _HEADER.size)
                        raise OSError(-number, os.strerror(-number))
                    message = message_class(data, offset=offset)
                    message.decode()
                    yield message
                offset += (length + 3) & ~3

    def close(self) -> None:
        """Close the socket, which lets its namespace go."""
        self._socket.close()
