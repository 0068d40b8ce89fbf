"""What goes on coming over the node's socket for one client: Python stacks, or a window and its trace.

A stream is asked for its next message when the one before has gone out, so a slow client costs the agent one
message, however many there are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_BUDGET,
    NodeReply,
    ProfilePart,
    TraceReply,
    TraceRequest,
    TraceStatus,
    WatchProfileRequest,
)
from expanse_ebpf.wire.keys import parse_key

# Of a window, as anybody may ask for it: the least and the most; the settings may allow less.
WINDOW_S = (0.1, 3600.0)
COST_SHARE = (0.0001, 1.0)
RUN_SHARE = (0.001, 1.0)


class ProfileWatch(Protocol):
    """Python stacks that are being gathered for one client."""

    over: str  # why nothing more will come; empty: more will

    def part(self, *, up_to_now: bool = False) -> ProfilePart:
        """What has come since the last part: up to the last tick, or up to now."""

    def close(self) -> None:
        """Nobody wants them any more."""


class TraceWatch(Protocol):
    """A window that was opened for one client."""

    over: bool  # nothing more will come

    def replies(self) -> list[TraceReply]:
        """What has come since the last call, which is made when the client has taken all of that."""

    def stop(self) -> None:
        """The client has seen enough: the window ends now, and its trace comes."""

    def close(self) -> None:
        """The client is gone, or has everything; a window that is still open ends."""


# The user's id is None for those who see everything.
OnProfile = Callable[[WatchProfileRequest, int | None], ProfileWatch]
OnTrace = Callable[[TraceRequest, int | None], TraceWatch]


class Stream(Protocol):
    """Messages for one client."""

    @property
    def over(self) -> bool:
        """Whether nothing comes any more once `next` has nothing."""

    def tick(self) -> None:
        """A report has been made."""

    def next(self) -> NodeReply | None:
        """The next message; None when there is none now."""

    def stop(self) -> None:
        """The client has shut down its own side: it wants what there is up to now, and no more."""

    def close(self) -> None:
        """Nothing goes out any more."""


class ProfileStream:
    """A part at once, which tells the rate, then one per tick; the last one up to when it was enough."""

    def __init__(self, watch: ProfileWatch) -> None:
        self._watch = watch
        self._due = True
        self._stopped = False
        self.over = False

    def tick(self) -> None:
        """See Stream."""
        self._due = True

    def next(self) -> NodeReply | None:
        """See Stream."""
        if not self._due or self.over:
            return None
        self._due = False
        part = self._watch.part(up_to_now=self._stopped)
        self.over = self._stopped or bool(self._watch.over)
        return NodeReply(profile=part)

    def stop(self) -> None:
        """See Stream."""
        self._due = self._stopped = True

    def close(self) -> None:
        """See Stream."""
        self._watch.close()


class TraceStream:
    """How the window stands, whenever that changes; in the end its trace, part by part."""

    def __init__(self, watch: TraceWatch) -> None:
        self._watch = watch
        self._taken: deque[TraceReply] = deque()
        self.status = TraceStatus()  # the last that was told

    @property
    def over(self) -> bool:
        """See Stream."""
        return self._watch.over and not self._taken

    def tick(self) -> None:
        """See Stream."""

    def next(self) -> NodeReply | None:
        """See Stream."""
        if not self._taken:
            self._taken.extend(self._watch.replies())
        if not self._taken:
            return None
        reply = self._taken.popleft()
        if reply.HasField("status"):
            self.status = reply.status
        return NodeReply(trace=reply)

    def stop(self) -> None:
        """See Stream."""
        self._watch.stop()

    def close(self) -> None:
        """See Stream."""
        self._watch.close()


def no_room(asked: TraceRequest, own: TraceStatus | None) -> TraceReply:
    """The one answer to a user who has the window `own` already, or whom others leave no room (None)."""
    why = "users have as many windows open on this node as they may; try again when one has ended"
    if own is not None:
        job = f" of {own.identity.scheduler}/{own.identity.id}" if own.identity.id else ""
        which = f" ({own.id}{job})" if own.id else ""
        why = f"you have a window open already{which}; wait for its end, or end it with Ctrl-C"
    status = TraceStatus(state=TRACE_STATE_BUDGET, reason=why)
    status.identity.scheduler, _, status.identity.id = clean(asked.key).partition("/")
    return TraceReply(status=status)


def checked(asked: TraceRequest) -> TraceRequest:
    """A window that a client of this node may ask for.

    Built from named parts: which window it is, when it begins and which rule opens it is for the
    controller to say. Raises ConfigError for a key that is none, and for figures out of range.
    """
    parse_key(asked.key)
    for name, value, (least, most) in (
        ("seconds", asked.seconds, WINDOW_S),
        ("cost_share", asked.cost_share, COST_SHARE),
        ("run_share", asked.run_share, RUN_SHARE),
    ):
        if value != 0 and not least <= value <= most:  # not a number is neither
            raise ConfigError(f"{name} of a window: {value:g} is not between {least:g} and {most:g}")
    return TraceRequest(
        key=asked.key,
        run=asked.run,
        seconds=asked.seconds,
        stacks=asked.stacks,
        cost_share=asked.cost_share,
        run_share=asked.run_share,
    )
