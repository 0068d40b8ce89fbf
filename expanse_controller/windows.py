"""Windows of deep traces: opened on all nodes of a job at once, and followed to the end on each."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field

from expanse_controller.errors import ControllerError
from expanse_controller.presence import age_s, is_silent, labelled
from expanse_controller.store import Boot, Item, Store
from expanse_controller.traces import is_final
from expanse_ebpf.wire import keys
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    TRACE_STATE_BUDGET,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_WAITING,
    JobIdentity,
    TracePart,
    TraceReply,
    TraceRequest,
    TraceState,
    TraceStatus,
)

# From the request to the common start: in this time the command has reached every node.
START_S = 2.0
# After a window's end a node is waited for so long, or for two of its reports where that is longer.
ANSWER_S = 30.0
# A window's length where neither the request nor the node has told it: the nodes' own default.
USUAL_S = 25.0
# However long a node says that its window is, no window is taken to be longer.
LONGEST_S = 3600.0
# A job of a node that has been silent for longer is not looked for there.
STALE_S = 600.0
# So many reports without a word of an open window, or without a part after its end, mean that none comes.
QUIET_REPORTS = 3
# Reports that have waited behind more others do not count: while its link is cut a node holds back its parts.
QUEUED_REPORTS = 1
MAX_OPEN = 256
MAX_COUNTED = 10_000  # windows of nodes that are remembered, so that each is counted once
MAX_NAMED = 8  # nodes, where the one that was asked for does not have the job
LOOK_S = 1.0

Node = tuple[str, str]  # name, installation
Send = Callable[[TraceRequest], None]
ReadPart = Callable[[str, int, int], Awaitable[TracePart | None]]  # window, row of the boot, number

_log = logging.getLogger(__name__)


class RefusedError(ControllerError):
    """No window is opened; `state` says which kind of reason it is."""

    def __init__(self, state: TraceState, reason: str) -> None:
        super().__init__(reason)
        self.state = state


@dataclass(slots=True, eq=False)
class Place:
    """A job on one of its nodes, now."""

    boot: Boot
    identity: JobIdentity
    fault: str  # why the node cannot be asked; empty: it can

    @property
    def node(self) -> Node:
        """Name and installation."""
        return self.boot.identity.name, self.boot.identity.install_id


@dataclass(slots=True, eq=False)
class Target:
    """One node's part in a window."""

    place: Place
    command: TraceRequest
    status: TraceStatus
    opened: float  # s, monotonic
    deadline: float  # likewise: when nothing is waited for any more
    heard: bool = False
    has_ended: bool = False
    arrived: set[int] = field(default_factory=set)  # parts in the store
    parts: int = 0  # of how many; 0: not known
    quiet: int = 0  # reports without a word of it, and since its end without a part


@dataclass(slots=True, eq=False)
class Window:
    """A window on some nodes, followed until each has ended it."""

    id: str
    jobs: frozenset[tuple[str, str]]  # scheduler and id
    targets: dict[Node, Target]
    followers: set[asyncio.Event] = field(default_factory=set)

    @property
    def has_ended(self) -> bool:
        """Whether nothing more comes from any node."""
        return all(target.has_ended for target in self.targets.values())

    def label(self, node: Node) -> str:
        """What the node is called: two installations may have one name."""
        name, install_id = node
        shared = sum(other == name for other, _ in self.targets) > 1
        return labelled(name, install_id) if shared else name


class Windows:
    """The windows that are open. Belongs to the event loop; `writer` is the store's thread."""

    def __init__(self, store: Store, writer: Executor) -> None:
        self.outcomes: Counter[str] = Counter()  # final states, each node's by itself and once
        self._counted: dict[tuple[str, Node], None] = {}  # windows of nodes that are in `outcomes`
        self._store = store
        self._writer = writer
        self._open: dict[str, Window] = {}
        self._links: dict[Node, dict[Send, None]] = {}
        self._stopping = False

    # ---- the nodes' streams

    def connected(self, node: Node, send: Send) -> None:
        """A stream of `node` has begun: `send` puts a command on it."""
        self._links.setdefault(node, {})[send] = None
        # What went down a stream that was cut may not have arrived; nodes know a window by its id.
        for window in self._open.values():
            target = window.targets.get(node)
            if target and not target.heard and not target.has_ended:
                send(target.command)

    def disconnected(self, node: Node, send: Send) -> None:
        """That stream has ended."""
        links = self._links.get(node, {})
        links.pop(send, None)
        if not links:
            self._links.pop(node, None)

    def stored(self, item: Item) -> None:
        """A report is in the store: what it says of windows."""
        node = (item.node.name, item.node.install_id)
        for status in item.traces:
            window = self._open.get(status.id)
            target = window and window.targets.get(node)
            if not target or target.has_ended:  # else it is counted with the last word, once it has ended
                self._count(node, status)
        for window in list(self._open.values()):
            target = window.targets.get(node)
            if target is None or target.has_ended:
                continue
            for status in (*item.report.traces, *item.traces):
                # A node may take its first last word back: a trace that was done may get lost on its way.
                if status.id == window.id and (is_final(status) or not is_final(target.status)):
                    self._heard(target, status)
                    target.quiet = -1  # this report is none of them
            parts = [part for part in item.parts if part.id == window.id and part.index not in target.arrived]
            for part in parts:
                target.arrived.add(part.index)
                target.parts = part.parts
            if parts:
                target.quiet = 0
            elif item.report.collector.reports_unsent <= QUEUED_REPORTS:
                target.quiet += 1
            if is_final(target.status):
                whole = 0 < target.parts <= len(target.arrived)
                if whole or target.quiet >= QUIET_REPORTS or not target.status.from_ns:
                    target.has_ended = True
                    self._count(node, target.status)
                if parts:
                    target.deadline = time.monotonic() + _patience_s(target.place.boot)
            elif target.heard and target.quiet >= QUIET_REPORTS:
                target.deadline = time.monotonic()  # an agent tells of an open window in every report
            self._changed(window)

    def _heard(self, target: Target, status: TraceStatus) -> None:
        target.heard = True
        target.status = status
        left = 0.0 if status.from_ns else max(0.0, (status.start_ns - time.time_ns()) / 1e9)
        length = 0.0 if is_final(status) else left + max(0.0, status.seconds)
        target.deadline = min(
            time.monotonic() + length + _patience_s(target.place.boot), _latest(target.place, target.opened)
        )

    def _count(self, node: Node, status: TraceStatus) -> None:
        """Count how a window ended on `node`, unless that is counted already."""
        if (status.id, node) in self._counted:
            return
        self._counted[status.id, node] = None
        while len(self._counted) > MAX_COUNTED:
            del self._counted[next(iter(self._counted))]
        self.outcomes[_word(status.state)] += 1

    # ---- opening

    def find(self, key: str, run: int = 0, nodes: Collection[str] = ()) -> list[Place]:
        """Where a job is alive, by the nodes' newest reports; of several that `key` means a node's newest.

        `run` 0 is any, `nodes` are names or installations, none: all. Raises keys.BadKeyError.
        """
        keys.parse_key(key)
        now, found = time.time_ns(), []
        for boot in self._store.nodes():
            newest = boot.newest
            if newest is None or (
                nodes and boot.identity.name not in nodes and boot.identity.install_id not in nodes
            ):
                continue
            age = age_s(newest, now)
            alive = [
                sample.identity
                for sample in newest.current.jobs
                if age <= STALE_S
                and sample.state != JOB_STATE_ENDED
                and run in (0, sample.identity.run)
                and keys.matches(sample.identity, key)
            ]
            if alive:
                place = Place(boot, max(alive, key=lambda identity: identity.run), "")
                if is_silent(newest, now):
                    place.fault = f"no report from {boot.identity.name} for {age:.0f} s"
                elif place.node not in self._links:
                    place.fault = f"{boot.identity.name} is not connected to the controller"
                found.append(place)
        return sorted(found, key=lambda place: place.node)

    async def open(self, request: TraceRequest, places: Sequence[Place]) -> Window:
        """Ask the nodes for a window that begins at the same time on all of them. Raises RefusedError.

        Of `request` all is passed on but its id and times, which are made here, and its run and node, which
        differ from node to node.
        """
        try:
            jobs = self._allowed(request, places)
        except RefusedError as error:
            self.outcomes[_word(error.state)] += 1
            raise
        identifier = secrets.token_hex(8)
        start_ns = time.time_ns() + int(START_S * 1e9)
        window = Window(identifier, jobs, {})
        for place in places:
            window.targets[place.node] = _target(identifier, start_ns, request, place)
        self._open[identifier] = window  # before anything is waited for: there is one of a job
        try:
            rows = [(target.place.boot, target.status) for target in window.targets.values()]
            await asyncio.get_running_loop().run_in_executor(
                self._writer, self._store.open_window, rows, request.evidence
            )
        except BaseException as error:
            del self._open[identifier]
            if isinstance(error, sqlite3.Error):
                raise RefusedError(TRACE_STATE_FAILED, f"the store cannot be written: {error}") from None
            raise
        for node, target in window.targets.items():
            if target.has_ended:
                self._count(node, target.status)
                continue
            for send in list(self._links.get(node, ()))[-1:]:  # the newest: an older one may be a dead link
                send(target.command)
        _log.info(
            "window %s of %s on %s%s",
            identifier,
            request.key,
            "1 node" if len(places) == 1 else f"{len(places)} nodes",
            f", by rule {request.rule}" if request.rule else "",
        )
        return window

    def _allowed(self, request: TraceRequest, places: Sequence[Place]) -> frozenset[tuple[str, str]]:
        """The jobs of a window that may be opened. Raises RefusedError."""
        if not places:
            raise RefusedError(TRACE_STATE_NO_TARGETS, self._nowhere(request))
        jobs = frozenset((place.identity.scheduler, place.identity.id) for place in places)
        for other in self._open.values():
            if jobs & other.jobs and not other.has_ended:
                raise RefusedError(
                    TRACE_STATE_BUDGET, f"window {other.id} of that job is still open; wait for its end"
                )
        if len(self._open) >= MAX_OPEN:
            raise RefusedError(TRACE_STATE_BUDGET, f"{MAX_OPEN} windows are open; wait for the end of some")
        return jobs

    def _nowhere(self, request: TraceRequest) -> str:
        """Why no node is asked."""
        key = request.key[:200]
        names = sorted({place.node[0] for place in self.find(request.key, request.run)})
        if not request.node or not names:
            return f"no node has a live job {key}"
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return f"{key} is not on node {request.node[:200]}; it is on: {', '.join(names[:MAX_NAMED])}{more}"

    # ---- to the end

    async def follow(self, window: Window, read_part: ReadPart) -> AsyncIterator[TraceReply]:
        """Each node's status as it changes and its parts as they are stored, until all nodes have ended.

        Raises ControllerError when the controller stops before.
        """
        sent: dict[Target, TraceStatus] = {}
        parts: Counter[Target] = Counter()
        changed = asyncio.Event()
        window.followers.add(changed)
        try:
            while True:
                changed.clear()
                at_end = window.has_ended  # looked at before: what comes while something is sent is sent too
                for node, target in window.targets.items():
                    status, name = target.status, window.label(node)
                    if sent.get(target) is not status:
                        sent[target] = status
                        yield TraceReply(node=name, status=status)
                    while is_final(status) and parts[target] in target.arrived:
                        part = await read_part(window.id, target.place.boot.id, parts[target])
                        parts[target] += 1
                        if part is not None:
                            yield TraceReply(node=name, part=part)
                if at_end:
                    return
                if self._stopping:
                    raise ControllerError(f"it is stopping; window {window.id} goes on, and is stored")
                await changed.wait()
        finally:
            window.followers.discard(changed)

    async def tend(self) -> None:
        """Give up nodes that do not answer, as long as the controller runs."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look(time.monotonic())

    async def look(self, now: float) -> None:
        """Give up nodes whose time has passed at `now` (s, monotonic), and forget windows that have ended."""
        silent: list[tuple[Boot, TraceStatus]] = []
        for window in list(self._open.values()):
            for node, target in window.targets.items():
                if target.has_ended or now < target.deadline:
                    continue
                target.has_ended = True
                if not is_final(target.status):
                    target.status = _failed(target.status, _why_given_up(node[0], target))
                    silent.append((target.place.boot, target.status))
                self._count(node, target.status)
                self._changed(window)
            if window.has_ended:
                del self._open[window.id]
        if silent:
            with contextlib.suppress(sqlite3.Error):  # a full disk is told by the commits
                await asyncio.get_running_loop().run_in_executor(self._writer, self._store.end_window, silent)

    def end(self) -> None:
        """Let the followers' streams end."""
        self._stopping = True
        for window in self._open.values():
            self._changed(window)

    @staticmethod
    def _changed(window: Window) -> None:
        for follower in window.followers:
            follower.set()


def refusal(key: str, error: RefusedError) -> TraceReply:
    """The one answer to a request that opens no window."""
    scheduler, _, name = key.partition("/")
    status = TraceStatus(state=error.state, reason=str(error))
    status.identity.scheduler, status.identity.id = scheduler, name
    return TraceReply(status=status)


def _target(identifier: str, start_ns: int, request: TraceRequest, place: Place) -> Target:
    command = TraceRequest()
    command.CopyFrom(request)
    command.id, command.start_ns, command.node = identifier, start_ns, ""
    command.key, command.run = f"{place.identity.scheduler}/{place.identity.id}", place.identity.run
    status = TraceStatus(
        id=identifier,
        identity=place.identity,
        state=TRACE_STATE_WAITING,
        rule=request.rule,
        start_ns=start_ns,
        seconds=request.seconds,
    )
    length = START_S + (request.seconds or USUAL_S) + _patience_s(place.boot)
    now = time.monotonic()
    target = Target(place, command, status, now, min(now + length, _latest(place, now)))
    if place.fault:
        target.status, target.has_ended = _failed(status, place.fault), True
    return target


def _latest(place: Place, opened: float) -> float:
    """When a node is given up whatever it says (s, monotonic): the longest window and its parts' way."""
    return opened + START_S + LONGEST_S + _patience_s(place.boot)


def _patience_s(boot: Boot) -> float:
    interval_s = boot.newest.current.interval_ns / 1e9 if boot.newest else 0.0
    return max(ANSWER_S, 2 * min(interval_s, STALE_S))


def _failed(status: TraceStatus, reason: str) -> TraceStatus:
    failed = TraceStatus()
    failed.CopyFrom(status)
    failed.state, failed.reason = TRACE_STATE_FAILED, reason
    return failed


def _why_given_up(name: str, target: Target) -> str:
    if not target.heard:
        return "no answer"
    if target.quiet >= QUIET_REPORTS:
        return f"{name} says nothing of it any more: its agent was started anew, or gave it up"
    return f"no answer from {name} since its window was {_word(target.status.state)}"


def _word(state: TraceState) -> str:
    return TraceState.Name(state).removeprefix("TRACE_STATE_").lower()
