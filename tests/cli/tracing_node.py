"""A node's socket that opens made-up windows: what comes of one is what the test puts into it."""

from __future__ import annotations

import queue
import selectors
import socket
import threading
import zlib
from collections.abc import Callable, Iterable

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    Trace,
    TraceReply,
    TraceRequest,
    TraceState,
    TraceStatus,
)
from tests.top.serving import ServedNode

WINDOW = "8c1f0a9d2b7e4410"
BASE_NS = 1_796_000_000_000_000_000


def status(state: TraceState = TRACE_STATE_OPEN, reason: str = "", **figures: float) -> TraceStatus:
    """How a window on slurm/4411 stands."""
    found = TraceStatus(id=WINDOW, state=state, reason=reason, seconds=2, targets=1, **figures)  # type: ignore[arg-type]
    found.identity.scheduler, found.identity.id, found.identity.run = "slurm", "4411", 1000
    found.identity.uid = 1000
    if state > TRACE_STATE_OPEN:
        found.from_ns, found.to_ns = BASE_NS, BASE_NS + 2 * 10**9
    return found


def made_trace(node: str = "gpu017", launches: int = 10, padding: bytes = b"") -> Trace:
    """A trace of one thread that launches one kernel every millisecond."""
    trace = Trace(version="0.1.0", base_ns=BASE_NS)
    trace.status.CopyFrom(status(TRACE_STATE_DONE, launches=launches, traced_share=1.0, cost_share=0.003))
    trace.node.name = node
    trace.processes.add(
        pid=4100, command="python train.py", state="traced", calls=launches, launches=launches
    )
    trace.threads.add(tid=4100, pid=4100, name="python", hits=launches, launches=launches)
    trace.files.add(path="/srv/libcudart.so.12", level="runtime", symbols=30)
    trace.processes[0].files.append(0)
    trace.totals.add(function="cudaLaunchKernel", category="launch", calls=launches)
    trace.spans.add(from_ns=BASE_NS, to_ns=BASE_NS + 2 * 10**9)
    trace.kernels.add(name="void gemm<float>(float const*)", module="/srv/train.so", address=0x1000)
    trace.shapes.add(grid_x=8, grid_y=1, grid_z=1, block_x=256, block_y=1, block_z=1)
    trace.functions.append("cudaLaunchKernel")
    trace.gaps.add(up_to_ns=1 << 20, count=max(0, launches - 1))
    events = trace.events
    for i in range(launches):
        events.time_ns.append(1_000_000 if i else 5_000_000)
        events.thread.append(0)
        events.function.append(0)
        events.duration_ns.append(0)
        events.bytes.append(0)
        events.stream.append(1)
        events.kernel.append(1)
        events.shape.append(1)
        events.stack.append(0)
        events.target.append(0)
        events.kind.append(0)
    if padding:
        trace.counters.add(name=padding.hex(), unit="x")
    return trace


def parts(trace: Trace, size: int = 512 << 10, node: str = "", level: int = 6) -> list[TraceReply]:
    """The trace as replies, cut into pieces of at most `size` bytes."""
    packed = zlib.compress(trace.SerializeToString(), level)
    pieces = [packed[at : at + size] for at in range(0, len(packed), size)]
    found = [TraceReply(node=node) for _ in pieces]
    for index, (reply, piece) in enumerate(zip(found, pieces, strict=True)):
        reply.part.id, reply.part.index, reply.part.parts, reply.part.data = WINDOW, index, len(pieces), piece
    return found


class MadeUpWindow:
    """A window whose replies are put in by the test; `at_stop` comes when the client has had enough."""

    def __init__(self, request: TraceRequest, uid: int | None, at_stop: Iterable[TraceReply] = ()) -> None:
        self.request, self.uid = request, uid
        self.over = False
        self.waiting: list[TraceReply] = []
        self.at_stop = list(at_stop)
        self.stops = self.closed = self.asked = 0
        self.at_a_time = 1 << 30  # replies in one answer

    def replies(self) -> list[TraceReply]:
        """See TraceWatch."""
        self.asked += 1
        found = self.waiting[: self.at_a_time]
        del self.waiting[: self.at_a_time]
        return found

    def stop(self) -> None:
        """See TraceWatch."""
        self.stops += 1
        if self.at_stop:
            self.end(self.at_stop)

    def end(self, replies: Iterable[TraceReply]) -> None:
        """These are the last."""
        self.waiting.extend(replies)
        self.over = True

    def close(self) -> None:
        """See TraceWatch."""
        self.closed += 1


class TracingNode(ServedNode):
    """A ServedNode that opens windows. `begin` is called with each, in the loop's thread."""

    def __init__(self, path: str, agent_uid: int = 0) -> None:
        super().__init__(path, agent_uid)
        self.windows: list[MadeUpWindow] = []
        self.begin: Callable[[MadeUpWindow], None] = lambda _window: None
        self.server._on_trace = self._trace
        self._actions: queue.SimpleQueue[tuple[Callable[[], object], threading.Event]] = queue.SimpleQueue()
        self._doing, self._to_do = socket.socketpair()
        self._selector.register(self._doing, selectors.EVENT_READ, self._act)

    def _act(self, _mask: int) -> None:
        self._doing.recv(1)
        action, done = self._actions.get()
        action()
        done.set()

    def do(self, action: Callable[[], object]) -> None:
        """Do something in the loop's thread, as a source does, and wait until it is done."""

        def act() -> None:
            action()
            self.server.wake()

        done = threading.Event()
        self._actions.put((act, done))
        self._to_do.send(b"x")
        assert done.wait(10), self.failure

    def __exit__(self, *arguments: object) -> None:
        super().__exit__(*arguments)
        self._doing.close()
        self._to_do.close()

    def _trace(self, request: TraceRequest, uid: int | None) -> MadeUpWindow:
        if request.key == "slurm/0":
            raise UnavailableError("no job slurm/0 on this node")
        if request.key == "run/boom":
            raise RuntimeError("a fault")
        window = MadeUpWindow(request, uid)
        self.begin(window)
        self.windows.append(window)
        return window
