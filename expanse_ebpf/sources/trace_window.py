"""One window on this node: how it stands, what its process has said, and what is still to be handed on."""

from __future__ import annotations

import math
import time
from collections import deque
from typing import TYPE_CHECKING

from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    Trace,
    TracePart,
    TraceReply,
    TraceState,
    TraceStatus,
)
from expanse_ebpf.wire.transport import MAX_TRACE_PART_BYTES, MAX_TRACE_PARTS

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.tracing.process import WindowProcess

PATIENCE_S = 30.0  # beyond a window's length, and then again for each part of its trace
_MOST_REASON = 600  # characters


class Window:
    """What becomes of one request on this node.

    `job` and `process` are None for one that was refused. `note` is said in every status. `watched`: somebody
    takes `replies`; `ships`: `parts` go to the controller.
    """

    def __init__(
        self,
        status: TraceStatus,
        node: str,
        job: Job | None = None,
        process: WindowProcess | None = None,
        *,
        watched: bool = False,
        by_user: bool = False,
        ships: bool = False,
    ) -> None:
        self.status = status
        self.job = job
        self.process = process
        self.replies: deque[TraceReply] = deque()
        self.parts: deque[TracePart] = deque()
        self.over = process is None  # nothing more will come of it
        self.reported = False  # whether its last status has been in a report
        self.paused = False  # its process is not listened to: too much waits to be taken
        self.closed_s = 0.0  # monotonic time of its last status
        self.cpu: tuple[float, int] | None = None  # when its job had how much CPU time, for a counter
        self._node = node
        self._note = status.reason
        self.by_user = by_user  # without root
        self._watched = watched
        self._ships = ships
        self._opened_s = 0.0
        self._taken = 0  # parts
        self._expected = 0
        now_s, now_ns = time.monotonic(), time.time_ns()
        wait_s = max(0, status.start_ns - now_ns) / 1e9
        self._deadline = now_s + wait_s + status.seconds + PATIENCE_S
        self._tell()

    @property
    def final(self) -> bool:
        """Whether it has had its last status."""
        return self.status.state >= TRACE_STATE_DONE

    @property
    def traced_s(self) -> float:
        """For how long its probes may have been in place, in seconds; up to now for one that is open."""
        if not self._opened_s:
            return 0.0
        seen = (self.closed_s if self.final else time.monotonic()) - self._opened_s
        said = (self.status.to_ns - self.status.from_ns) / 1e9
        return min(seen, said) if self.final and self.status.from_ns > 0 and said > 0 else seen

    @property
    def _owed(self) -> bool:
        """Whether more of its trace is to come."""
        return self._taken < self._expected or (not self._expected and self.status.state == TRACE_STATE_DONE)

    # ---- what its process says

    def listen(self) -> None:
        """Take what its process has said since the last time."""
        if self.process is None or self.over:
            return
        for reply in self.process.read():
            if reply.HasField("status"):
                self._take_status(reply.status)
            if reply.HasField("part"):
                self._take_part(reply.part)
            if self.over:
                return
        if self.process.broken:
            self.process.kill()
            self.end(self.process.broken)
        elif self.process.at_end and self.final and not self._owed:
            self.over = True

    def _take_status(self, said: TraceStatus) -> None:
        if self.final:
            return
        status = TraceStatus()
        status.CopyFrom(said)
        was = self.status
        status.id, status.rule, status.start_ns, status.seconds = was.id, was.rule, was.start_ns, was.seconds
        status.identity.CopyFrom(was.identity)
        if said.state not in TraceState.values() or said.state < TRACE_STATE_WAITING:
            status.state = TRACE_STATE_FAILED
        for name in ("traced_share", "cost_share"):
            if not 0 <= getattr(status, name) < math.inf:
                status.ClearField(name)
        status.reason = _joined(self._note, said.reason)
        self.status = status
        if status.state == TRACE_STATE_OPEN:
            self._opened_s = self._opened_s or time.monotonic()
        elif self.final:
            self._deadline = time.monotonic() + PATIENCE_S
        self._tell()

    def _take_part(self, part: TracePart) -> None:
        fits = 1 <= part.parts <= MAX_TRACE_PARTS and part.parts == (self._expected or part.parts)
        fits = fits and part.index == self._taken and len(part.data) <= MAX_TRACE_PART_BYTES
        if not (self.final and fits):
            self.over = True
            if self.process is not None:
                self.process.kill()
            self._fail("what its process has said of its trace does not fit together")
            return
        self._taken, self._expected = self._taken + 1, part.parts
        self._deadline = time.monotonic() + PATIENCE_S
        one = TracePart(id=self.status.id, index=part.index, parts=part.parts, data=part.data)
        if self._ships:
            self.parts.append(one)
        if self._watched:
            self.replies.append(TraceReply(node=self._node, part=one))
        self.over = self._taken == self._expected

    def end(self, why: str) -> None:
        """Its process is gone, or of no use: `why`."""
        if self.over:
            return
        self.over = True
        if not self.final:
            self._fail(f"the window's process {why}")
        elif self._owed:
            self._fail(f"its trace is not whole: the window's process {why}")

    def tick(self, now: float) -> None:
        """See after its process at monotonic time `now`; one that hangs is killed."""
        process = self.process
        if process is None or self.over:
            return
        how = process.ended()
        if how:
            self.listen()  # its last words, up to as much as is taken at a time
            if self.over or process.at_end:
                process.read_errors()
                words = f": {process.last_words}" if process.last_words else ""
                self.end(f"ended {how}{words}")
                return
        if self.paused:
            self._deadline = max(self._deadline, now + PATIENCE_S)
        late = process.press(now) if not self.final else ""
        if not late and now > self._deadline:
            process.kill()
            late = f"has said nothing more for {PATIENCE_S:g} s after it was to end"
        if late:
            self.end(late)

    def tell(self, trace: Trace) -> None:
        """Send its process what belongs into its trace, and what of the former did not go."""
        if self.process is None or self.final:
            return
        if trace.ListFields():
            self.process.tell(trace)
        else:
            self.process.flush()

    def stop(self) -> None:
        """End it now, with what there is."""
        if self.process is not None and not self.final:
            self.process.stop()

    # ---- what is handed on

    @property
    def untaken(self) -> int:
        """Bytes of parts that wait for the one who watches."""
        return sum(len(reply.part.data) for reply in self.replies)

    @property
    def held(self) -> int:
        """Bytes that wait for the controller."""
        return sum(len(part.data) for part in self.parts)

    def unwatch(self) -> None:
        """Nobody takes its replies any more."""
        self._watched = False
        self.replies.clear()

    def drop(self, why: str) -> None:
        """Nothing of its trace goes to the controller any more."""
        self.parts.clear()
        self._ships = False
        self._note = _joined(self._note, why)
        self.status.reason = _joined(self.status.reason, why)
        self.reported = False

    def _fail(self, reason: str) -> None:
        """What was well until now is not; a second last word, where it had one."""
        self.parts.clear()
        self._ships = False
        self.status.state = TRACE_STATE_FAILED
        self.status.reason = _joined(self._note, reason)
        self.reported = False
        self._tell()

    def _tell(self) -> None:
        if self.final and not self.closed_s:
            self.closed_s = time.monotonic()
        if not self._watched:
            return
        if self.replies and self.replies[-1].HasField("status"):
            self.replies.pop()  # who takes them slowly needs the newest alone
        reply = TraceReply(node=self._node)
        reply.status.CopyFrom(self.status)
        self.replies.append(reply)


def _joined(*reasons: str) -> str:
    return clean("; ".join(filter(None, reasons)), _MOST_REASON)
