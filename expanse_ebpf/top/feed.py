"""Where `top` gets reports from: the node's own agent, or a controller that has them of other nodes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import NodeSnapshot, ProcessesReply, Report

HISTORY = 120


class Feed(Protocol):
    """A source of one node's reports."""

    @property
    def where(self) -> str:
        """What it looks at, for people."""

    def reports(self, history: int, stop: Callable[[], bool]) -> Iterator[Report]:
        """Up to `history` older reports, then new ones as they come; raises UnavailableError."""

    def processes(self, key: str, run: int) -> ProcessesReply:
        """The processes of one job; raises UnavailableError."""

    def age(self, report: Report) -> float | None:
        """Seconds since `report`, just now the newest, was made; None when the clocks do not tell."""


@dataclass(frozen=True, slots=True)
class LocalFeed:
    """The agent of this node, over its Unix socket."""

    path: str

    @property
    def where(self) -> str:
        """The socket's path."""
        return self.path

    def reports(self, history: int, stop: Callable[[], bool]) -> Iterator[Report]:
        """See Feed."""
        return client.watch(self.path, history, stop)

    def processes(self, key: str, run: int) -> ProcessesReply:
        """See Feed."""
        return client.processes(self.path, key, run)

    def age(self, report: Report) -> float | None:
        """See Feed."""
        return max(0.0, time.time() - report.time_ns / 1e9)


@dataclass(slots=True)
class RemoteFeed:
    """One node as its controller knows it. An empty `node` means the only one there is."""

    address: str
    node: str
    _received_ns: int = 0

    @property
    def where(self) -> str:
        """The controller's address."""
        return f"controller {self.address}"

    def reports(self, history: int, stop: Callable[[], bool]) -> Iterator[Report]:
        """See Feed; a controller gives one older report at most."""
        from expanse_ebpf.ship import remote  # grpc, 20 MiB that a local view does without

        node = self.node or self._only(remote.snapshot(self.address))
        first = True
        for snapshot in remote.watch(self.address, node):
            self._received_ns = snapshot.received_ns
            if first and history > 1 and snapshot.HasField("previous"):
                yield snapshot.previous
            first = False
            yield snapshot.current
            if stop():
                return

    def _only(self, nodes: list[NodeSnapshot]) -> str:
        names = sorted({n.current.node.name for n in nodes})
        if not names:
            raise UnavailableError(
                f"controller {self.address} has no node; start an agent with --controller {self.address}"
            )
        if len(names) > 1:
            more = ", …" if len(names) > 8 else ""
            raise UnavailableError(
                f"controller {self.address} has {len(names)} nodes: "
                f"choose one with --node: {', '.join(names[:8])}{more}"
            )
        return names[0]

    def processes(self, key: str, run: int) -> ProcessesReply:
        """See Feed."""
        raise UnavailableError("processes are shown on the node itself only")

    def age(self, report: Report) -> float | None:
        """See Feed; by when the controller received it, since the node's own clock may be off."""
        return max(0.0, time.time() - self._received_ns / 1e9) if self._received_ns else None
