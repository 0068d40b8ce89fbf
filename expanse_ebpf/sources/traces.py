"""Source "traces": windows in which every CUDA and NCCL call of a job is seen.

Each window has a process of its own (expanse_ebpf/tracing), which is there as long as the window. Here is
decided whether and for how long one is opened; what it says is handed on to those who asked and to the
controller. Nothing is in the kernel, and no process runs, while no window is open.
"""

from __future__ import annotations

import logging
import os
import re
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.jobs.identity import parse_stat
from expanse_ebpf.sources.trace_request import (
    Plan,
    RefusedError,
    Traced,
    evidence,
    first_status,
    open_already,
    plan,
    wanted,
)
from expanse_ebpf.sources.trace_window import Window
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    TRACE_STATE_BUDGET,
    TRACE_STATE_FAILED,
    TRACE_STATE_WAITING,
    NodeIdentity,
    Trace,
    TraceCounter,
    TraceReply,
    TraceRequest,
    TraceStatus,
)

if TYPE_CHECKING:
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.sources import Context
    from expanse_ebpf.tracing.process import WindowProcess
    from expanse_ebpf.wire.collector_pb2 import GpuSample, JobSample, Report

MOST_WINDOWS = 4  # at a time
MOST_OF_USERS = 2  # of them, for users without root: nobody must be able to lock out root and the controller
REPORT_BYTES = 1 << 20  # of parts in one report
MOST_HELD = 2 << 20  # bytes of a window's parts that wait to be taken; no more are read then
MOST_WAITING = 8 << 20  # bytes of all parts that wait for a controller which cannot be reached
END_S = 3.0  # how long the end of its processes is waited for
_MOST_LOOKED_AT = 64  # processes of a job, for its age
_KNOWN = 256  # ids of windows that are remembered
_REFUSED = 64  # refusals in a report
_ID = re.compile(r"[0-9a-f]{16}")
_AWAY = "its trace was dropped: the controller could not be reached"

_log = logging.getLogger(__name__)


def create(context: Context) -> TraceSource:
    """The source, not started yet."""
    return TraceSource(context)


class TraceWatch:
    """A window as the one who has asked for it sees it. `taken` is called when there is room for more."""

    def __init__(self, window: Window, taken: Callable[[Window], None]) -> None:
        self.over = False  # all that there will be has been taken
        self._window = window
        self._taken = taken

    def replies(self) -> list[TraceReply]:
        """What has come since the last call."""
        found = list(self._window.replies)
        self._window.replies.clear()
        self._taken(self._window)
        self.over = self._window.over
        return found

    def stop(self) -> None:
        """End the window now; replies go on until its trace is told."""
        self._window.stop()

    def close(self) -> None:
        """Nobody looks any more: the window ends."""
        self._window.unwatch()
        self._window.stop()
        self._taken(self._window)


class TraceSource:
    """Source "traces". `command` is what a window's process is; empty: expanse_ebpf.tracing.window."""

    name = "traces"

    def __init__(self, context: Context, command: Sequence[str] = ()) -> None:
        self.unavailable: dict[str, str] = {}
        self.fd = -1
        self.period_s = 0.0
        self._config = context.config.tracing
        self._lifecycle = context.lifecycle
        self._why_no_bpf = context.why_no_bpf
        self._ships = context.ships
        self._reports = bool(context.config.controller.address)
        self._node = context.node or NodeIdentity()
        self._overflow = context.overflow
        self._command = tuple(command)
        self._epoll: select.epoll | None = None
        self._heard: dict[int, Window] = {}  # by the descriptors that are looked at
        self._windows: list[Window] = []  # of which something is still to come or to be told
        self._ending: list[WindowProcess] = []  # whose windows are over
        self._refused: deque[TraceStatus] = deque(maxlen=_REFUSED)
        self._known: deque[str] = deque(maxlen=_KNOWN)
        self._since: dict[Job, float] = {}  # monotonic time at which a job was first seen
        self._traced: dict[Job, Traced] = {}
        self._ended_cpu_ns = 0

    def start(self) -> None:
        """Get ready; raises UnavailableError where no window can be opened."""
        if self._lifecycle is None:
            raise UnavailableError(self._why_no_bpf)
        from expanse_ebpf.kernel import gpu_calls

        reason = gpu_calls.supported()
        if reason:
            raise UnavailableError(reason)
        self._epoll = select.epoll()
        self.fd = self._epoll.fileno()

    # ---- requests

    def open(self, request: TraceRequest, uid: int | None, jobs: Iterable[Job]) -> TraceWatch:
        """Open a window for the user `uid` (None: may see everything) on one of `jobs`.

        Where none is opened the watch has one status, which says why. Raises ConfigError for what is no key.
        """
        own = TraceRequest()
        own.CopyFrom(request)
        own.id = os.urandom(8).hex()
        self._known.append(own.id)
        try:
            window = self._open(own, uid, jobs, watched=True)
        except RefusedError as error:
            status = first_status(own, error.state, error.reason)
            window = Window(status, self._node.name, watched=True)
        return TraceWatch(window, self._attend)

    def command(self, request: TraceRequest, jobs: Iterable[Job]) -> None:
        """Open a window that the controller wants; what comes of it stands in the reports."""
        if request.id in self._known:
            return  # sent once more
        self._known.append(clean(request.id, 32))
        try:
            if not self._config.commands:
                why = "the controller may not open windows on this node (tracing.commands)"
                raise RefusedError(TRACE_STATE_FAILED, why)
            if not _ID.fullmatch(request.id):
                raise RefusedError(TRACE_STATE_FAILED, "a window's id is 16 hexadecimal digits")
            self._open(request, None, jobs, watched=False)
        except RefusedError as error:
            self._refused.append(first_status(request, error.state, error.reason))
        except ConfigError as error:
            self._refused.append(first_status(request, TRACE_STATE_FAILED, str(error)))

    def _open(self, request: TraceRequest, uid: int | None, jobs: Iterable[Job], *, watched: bool) -> Window:
        """Begin a window's process; raises RefusedError, and ConfigError for what is no key."""
        job = wanted(request, uid, jobs)
        slot = job.slot
        if slot is None:
            why = "no accounting slot was free for the job: its processes cannot be told from others"
            raise RefusedError(TRACE_STATE_FAILED, why)
        for other in self._windows:
            if other.job is job and not other.over:
                raise open_already(other.status, time.time_ns())
        if len(self._processes()) >= MOST_WINDOWS:
            why = f"{MOST_WINDOWS} windows are open on this node; try again when one has ended"
            raise RefusedError(TRACE_STATE_BUDGET, why)
        if (
            uid is not None
            and sum(window.by_user for window in self._windows if not window.over) >= MOST_OF_USERS
        ):
            why = f"users have {MOST_OF_USERS} windows open on this node; try again when one has ended"
            raise RefusedError(TRACE_STATE_BUDGET, why)
        now = time.monotonic()
        may_be = plan(
            request,
            self._config,
            self._traced.get(job, Traced()),
            local=watched,
            age_s=self._age_s(job, now),
            now_s=now,
            now_ns=time.time_ns(),
        )
        try:
            process = self._process(request, may_be, job, slot, uid)
        except OSError as error:
            why = f"the window's process cannot be begun: {error.strerror}"
            raise RefusedError(TRACE_STATE_FAILED, why) from None
        status = first_status(request, TRACE_STATE_WAITING, may_be.reason)
        status.identity.CopyFrom(job.identity)
        status.start_ns, status.seconds = may_be.start_ns, may_be.seconds
        window = Window(
            status,
            self._node.name,
            job,
            process,
            watched=watched,
            by_user=uid is not None,
            ships=self._reports,
        )
        first = Trace(node=self._node, evidence=evidence(request))
        first.status.identity.CopyFrom(job.identity)
        first.status.rule = status.rule
        window.tell(first)
        self._windows.append(window)
        self._attend(window)
        _log.info("window %s: %.3g s of %s", request.id, may_be.seconds, job.key)
        return window

    def _process(
        self, request: TraceRequest, may_be: Plan, job: Job, slot: int, uid: int | None
    ) -> WindowProcess:
        from expanse_ebpf.tracing.process import COMMAND, WindowProcess
        from expanse_ebpf.tracing.settings import WindowSettings

        lifecycle = self._lifecycle
        if lifecycle is None or self._epoll is None:
            raise RefusedError(
                TRACE_STATE_FAILED, "no window can be opened at the moment; see the agent's log"
            )
        settings = WindowSettings(
            id=request.id,
            slot=slot,
            hierarchy=lifecycle.hierarchy,
            hierarchy_id=lifecycle.configuration.hierarchy_id,
            cgroup=job.identity.cgroup,
            slots_fd=lifecycle.maps["slots"].fd,
            totals_fd=lifecycle.maps["totals"].fd,
            seconds=may_be.seconds,
            start_ns=may_be.start_ns,
            stacks=request.stacks,
            cost_share=may_be.cost_share,
            foreign_share=self._config.cost_share,  # whatever the one who asks lets their own job pay
            over_cost=self._config.over_cost,
            max_events=self._config.max_events,
            uid=uid,
        )
        return WindowProcess(settings, self._command or COMMAND)

    def _age_s(self, job: Job, now: float) -> float:
        """For how long the job has run: since it was first seen, or its oldest process began, in seconds."""
        ages = [now - self._since.get(job, now)]
        ticks = os.sysconf("SC_CLK_TCK")
        up_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        for pid in sorted(job.pids or ())[:_MOST_LOOKED_AT]:
            with suppress(OSError), open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
                found = parse_stat(file.read(4096))
                if found is not None:
                    ages.append(up_s - found[1] / ticks)
        return max(ages)

    # ---- what the processes say

    def ready(self) -> None:
        """Read what the windows' processes have said."""
        for fd, _ in self._epoll.poll(0) if self._epoll is not None else ():
            window = self._heard.get(fd)
            if window is None or window.process is None:
                continue
            if fd == window.process.answers:
                window.listen()
                self._attend(window)
            elif not window.process.read_errors():
                self._ignore(fd)

    def beat(self) -> None:
        """Nothing is done by the clock alone."""

    def _attend(self, window: Window) -> None:
        """Look at what the window's process says while there is room for it; let it go after the last."""
        process = window.process
        if process is None or self._epoll is None:
            return
        if window.over:
            self._let_go(window, process)
            return
        ships = self._ships()
        if not ships and sum(one.held for one in self._windows) > MOST_WAITING:
            self._drop(window)
        window.paused = window.untaken >= MOST_HELD or (ships and window.held >= MOST_HELD)
        self._listen(window, process.errors, wanted=not process.at_end)
        self._listen(window, process.answers, wanted=not (process.at_end or window.paused))

    def _listen(self, window: Window, fd: int, *, wanted: bool) -> None:
        if not wanted:
            self._ignore(fd)
        elif fd not in self._heard and self._epoll is not None:
            self._epoll.register(fd, select.EPOLLIN)
            self._heard[fd] = window

    def _ignore(self, fd: int) -> None:
        if self._heard.pop(fd, None) is not None and self._epoll is not None:
            self._epoll.unregister(fd)

    def _let_go(self, window: Window, process: WindowProcess) -> None:
        process.read_errors()
        self._ignore(process.answers)
        self._ignore(process.errors)
        if window.job is not None:
            traced = self._traced.setdefault(window.job, Traced())
            traced.seconds += window.traced_s
            traced.last_s = window.closed_s
        process.stop()
        process.close()
        self._ending.append(process)
        window.process = None

    # ---- once a tick

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in `Report.traces` and `Report.trace_parts`, and give the windows their counters."""
        live = {job: sample for job, sample in jobs if job.state != JOB_STATE_ENDED}
        present = [*live, *(job for job in self._overflow if job.state != JOB_STATE_ENDED)]
        self._since = {job: self._since.get(job, now) for job in present}
        self._traced = {job: traced for job, traced in self._traced.items() if job in self._since}
        gpus = {gpu.uuid: gpu for gpu in report.gpus} if self._windows else {}
        for window in self._windows:
            if window.job not in self._since:
                window.stop()  # the job has ended: its slot will be another one's
            elif window.job in live:
                window.tell(_counters(now, report.time_ns, window, live[window.job], gpus))
            window.tick(now)
            self._attend(window)
        for process in self._ending:
            process.press(now)
        self._reap()
        self._report(report)

    def _report(self, report: Report) -> None:
        report.traces.extend(self._refused)
        self._refused.clear()
        room = REPORT_BYTES if self._ships() else 0
        for window in self._windows:
            if not window.reported:
                report.traces.append(window.status)
                window.reported = window.final
            while window.parts and len(window.parts[0].data) <= room:
                part = window.parts.popleft()
                room -= len(part.data)
                report.trace_parts.append(part)
            self._attend(window)  # there may be room again
        self._windows = [w for w in self._windows if w.process or w.parts or not w.reported]

    def _drop(self, window: Window) -> None:
        window.drop(_AWAY)
        self.unavailable["parts"] = f"window {window.status.id}: {_AWAY}"

    # ---- what it costs

    @property
    def cpu_ns(self) -> int:
        """CPU time of all windows' processes, those that have ended included."""
        return self._ended_cpu_ns + sum(process.cpu_ns for process in self._processes())

    @property
    def pss_bytes(self) -> int:
        """Memory of the windows' processes."""
        return sum(process.pss_bytes or 0 for process in self._processes())

    def _processes(self) -> list[WindowProcess]:
        return [*(w.process for w in self._windows if w.process is not None), *self._ending]

    def _reap(self) -> None:
        for process in [process for process in self._ending if process.ended()]:
            self._ended_cpu_ns += process.cpu_ns
            self._ending.remove(process)

    # ---- its end

    def stop(self) -> None:
        """End all windows, and their processes with them; one that hangs in the kernel is left behind."""
        for window in self._windows:
            if window.process is not None:
                window.process.kill()
                window.end("was ended: the agent has stopped tracing")
                self._let_go(window, window.process)
        until = time.monotonic() + END_S
        self._reap()
        while self._ending and time.monotonic() < until:
            time.sleep(0.005)
            self._reap()
        for process in self._ending:
            _log.warning("process %d, which had a window open, cannot be ended", process.pid)
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None
        self._heard.clear()
        self.fd = -1


def _counters(
    now: float, time_ns: int, window: Window, sample: JobSample, gpus: Mapping[str, GpuSample]
) -> Trace:
    """What belongs beside the events of this tick."""
    points: list[tuple[str, str, float]] = []
    for hold in sample.gpu.holds:
        gpu = gpus.get(hold.uuid)
        if gpu is not None and gpu.HasField("utilization"):
            name = f"GPU {gpu.index if gpu.HasField('index') else clean(gpu.uuid, 64)} utilisation"
            points.append((name, "%", 100 * gpu.utilization))
    if sample.HasField("cpu_ns"):
        then, used_ns = window.cpu or (now, sample.cpu_ns)
        if now > then and sample.cpu_ns >= used_ns:
            points.append(("CPU cores", "cores", (sample.cpu_ns - used_ns) / (now - then) / 1e9))
        window.cpu = (now, sample.cpu_ns)
    return Trace(
        counters=[
            TraceCounter(name=name, unit=unit, time_ns=[time_ns], value=[value])
            for name, unit, value in points
        ]
    )
