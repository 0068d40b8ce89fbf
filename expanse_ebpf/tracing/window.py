"""One window on one node, in a process of its own: begun by the agent, and gone when the window is over.

What it holds in memory, and what it does with events by the hundred thousand, is never in the agent's way. It
speaks with the agent as tracing/process.py says.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from google.protobuf.message import DecodeError

from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.export import trace_parts
from expanse_ebpf.kernel import cpus
from expanse_ebpf.kernel.gpu_calls import Call, End, GpuCalls, Inherited, Loaded, Record, Site
from expanse_ebpf.kernel.lifecycle import HIERARCHIES, Configuration
from expanse_ebpf.kernel.uprobes import MULTI
from expanse_ebpf.python_stacks.sampler import Sampler, Stack
from expanse_ebpf.text import clean
from expanse_ebpf.tracing import calibration, outcome
from expanse_ebpf.tracing.budget import CostBudget, Decision
from expanse_ebpf.tracing.functions import Layer
from expanse_ebpf.tracing.kernel_names import KernelNames
from expanse_ebpf.tracing.probes import WindowProbes
from expanse_ebpf.tracing.recording import Kernel, Recording
from expanse_ebpf.tracing.settings import WindowSettings
from expanse_ebpf.tracing.targets import Targets, processes_of
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_BUDGET,
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_PROBE_POINT,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    Trace,
    TraceReply,
    TraceStatus,
)

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NICE = -15  # it rests most of the time, and must be there at once when the probes are to come off
_NAME = b"expanse-trace"  # in ps and top
_LENGTH = struct.Struct(">I")
_MOST_QUESTION = 1 << 20
_RECORDS_S, _SCAN_S, _STATUS_S, _NAMES_S, _DRAIN_S = 0.02, 0.5, 0.5, 1.0, 1.0
_REST = 3  # times as long as a step took, before the same one is taken again
_MOST_RECORDS = 2000  # at once: some 10 ms, in which the budget is not looked at
_LOOK_UP_S = 5.0  # that are waited for the last names
_DETACH_S = 5.0  # that are waited for the probes before the trace is made
_PROMISING_S = 5.0  # a window that has found nothing to probe by then is over
# A hit costs 7 to 29 % more in a program than in the loop in which it is measured, which keeps all in the
# caches (bench/gpu_calls).
_MARGIN = 1.15
_STOPS_PER_POINT_S = 20e-6  # what putting one probe in place and taking it away costs a thread, at the most
_NO_KERNEL = frozenset(("sync", "copy", "set", "alloc", "free", "collective", "graph"))
_log = logging.getLogger("expanse-trace")


class Window:
    """The window. run() goes through all of it; what it has to say goes to `out`, frame by frame."""

    def __init__(self, settings: WindowSettings, out: IO[bytes]) -> None:
        self._settings = settings
        self._out = out
        self._stopping = ""  # why it is to end before its time
        self._given = Trace()  # what the agent has told
        self._received = bytearray()
        self._deaf = False
        self._status = TraceStatus(
            id=settings.id, state=TRACE_STATE_WAITING, start_ns=settings.start_ns, seconds=settings.seconds
        )
        self._pids: list[int] = []
        configuration = Configuration(
            HIERARCHIES.index(settings.hierarchy), settings.hierarchy_id, 0, cpus.count()
        )
        jobs = Inherited(configuration, settings.slots_fd, settings.totals_fd, settings.slot)
        self._sampler = Sampler(rate_hz=0, waits_hz=0, lifecycle=jobs)
        self._sampler.select_slots(False, {settings.slot: True})
        self._calls = GpuCalls(self._record, self._sampler.stacks, configuration)
        self._calls.window.stacks = settings.stacks
        if settings.uid is not None:
            self._calls.window.by_user, self._calls.window.uid = 1, settings.uid
        self._price = calibration.price(self._calls)
        self._probes = WindowProbes(self._calls)
        self._targets = Targets()
        self._names = KernelNames()
        self._recording = Recording(settings.max_events)
        # Without uprobe_multi each probe takes 0.1 s to come off: they cannot go and come back.
        over_cost = settings.over_cost if self._calls.method == MULTI else "close"
        self._budget = CostBudget(
            settings.cost_share, over_cost, settings.seconds, foreign_share=settings.foreign_share
        )
        self._prepared: set[int] = set()
        self._threads: dict[int, tuple[int, str]] = {}  # process and name, by row, of those that have called
        self._steps: dict[str, tuple[float, Callable[[], object]]] = {
            "records": (_RECORDS_S, self._consume),
            "sites": (_RECORDS_S, self._go_on_with_sites),
            "scan": (_SCAN_S, self._scan),
            "status": (_STATUS_S, self._say),
            "names": (_NAMES_S, self._names.resolve),
            "drain": (_DRAIN_S, self._drain),
        }
        self._due = dict.fromkeys(self._steps, 0.0)
        self._poll = select.poll()
        for fd in (0, self._calls.fd, self._sampler.fd):
            self._poll.register(fd, select.POLLIN)

    # ---- from its start to its end

    def run(self) -> None:
        """Wait for the start, trace, and tell."""
        self._say()
        self._scan()
        while self._until_start() > 0 and not self._stopping:
            self._listen(min(self._until_start(), self._next_due()))
            self._do_what_is_due()
        if not self._pids:
            self._end(TRACE_STATE_NO_TARGETS, "the job has no process here")
            return
        self._status.state = TRACE_STATE_OPEN
        self._status.from_ns = time.time_ns()
        began = time.monotonic()
        while self._step(time.monotonic() - began):
            self._listen(min(self._budget.wait_s, self._next_due()))
            self._do_what_is_due()
        self._probes.stop()
        self._status.to_ns = time.time_ns()
        # Before Linux 6.6 this takes up to half a minute, for which the agent need not wait.
        detaching = threading.Thread(target=self._probes.detach)
        detaching.start()
        detaching.join(_DETACH_S)
        while self._consume():
            pass  # no more come in
        self._names.finish(_LOOK_UP_S)
        if not self._probes.counted:
            self._end(TRACE_STATE_NO_PROBE_POINT, outcome.why_no_probe_point(self._targets))
        elif self._budget.cut:
            self._end(TRACE_STATE_BUDGET, self._budget.cut)
        else:
            missing = outcome.cut_short(self._calls, self._targets, self._probes)
            self._end(TRACE_STATE_DONE, "; ".join(filter(None, (self._stopping, missing))))
        detaching.join()

    def _until_start(self) -> float:
        return (self._settings.start_ns - time.time_ns()) / 1e9

    def _step(self, passed: float) -> bool:
        """Put probes in place or take them away, as the budget has it; whether the window goes on."""
        worst, foreign = self._costs()
        in_place = self._probes.in_place
        decision = self._budget.update(time.monotonic(), worst, foreign, in_place)
        if decision is Decision.ATTACH:
            self._probes.attach()
            self._budget.switch_s = self._calls.calls.count * _STOPS_PER_POINT_S
        elif decision is Decision.DETACH:
            self._probes.detach()
        if not self._pids:
            self._stopping = self._stopping or "the job has ended"
        if not self._probes.counted and passed > _PROMISING_S:
            return False
        return decision is not Decision.CLOSE and not self._stopping

    def _costs(self) -> tuple[float, float]:
        """Seconds that the thread has paid that paid most, and those of other jobs together."""
        threads = self._calls.threads()
        worst = max(map(self._price.of, threads), default=0.0)
        window = self._calls.window
        foreign = self._price.traps(window.foreign_hits, window.foreign_stepped)
        return worst * _MARGIN / 1e9, foreign * _MARGIN / 1e9

    # ---- between events

    def _do_what_is_due(self) -> None:
        """One thing, that which is due the longest: before the next one the budget is looked at."""
        what = min(self._due, key=self._due.__getitem__)
        began = time.monotonic()
        if self._due[what] > began:
            return
        every, step = self._steps[what]
        step()
        # What takes its time must not take all of it.
        self._due[what] = max(began + every, time.monotonic() + _REST * (time.monotonic() - began))

    def _next_due(self) -> float:
        return max(0.0, min(self._due.values()) - time.monotonic())

    def _scan(self) -> None:
        """Look for processes and files that are new."""
        self._pids = processes_of(self._settings.hierarchy, self._settings.cgroup)
        if self._settings.uid is not None:
            self._pids = [pid for pid in self._pids if _owner(pid) == self._settings.uid]
        self._probes.add(self._targets.scan(self._pids))
        if self._settings.stacks:
            traced = {pid for pid, view in self._targets.views.items() if view.state == "traced"}
            for pid in traced - self._prepared:
                self._sampler.prepare(pid)
            self._prepared = traced

    def _go_on_with_sites(self) -> None:
        self._probes.sites.go_on(attach=self._probes.in_place)

    def _drain(self) -> None:
        # Rows of stacks may be used anew after this: what has come is in the recording already.
        self._sampler.drain()
        self._recording.forget_rows()

    def _listen(self, seconds: float) -> None:
        """Wait for the kernel side or the agent, for so long at most."""
        for fd, _ in self._poll.poll(max(0.0, seconds) * 1000):
            if fd == 0:
                self._hear()
            else:
                self._due["records"] = 0.0

    def _hear(self) -> None:
        data = os.read(0, 1 << 16)
        if not data:
            self._stopping = self._stopping or "ended early"
            self._poll.unregister(0)
        self._received += b"" if self._deaf else data
        while len(self._received) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._received)
            if size <= _MOST_QUESTION and len(self._received) < _LENGTH.size + size:
                return
            body = bytes(self._received[_LENGTH.size : _LENGTH.size + size])
            del self._received[: _LENGTH.size + size]
            try:
                if size > _MOST_QUESTION:
                    raise DecodeError
                self._given.MergeFromString(body)
            except DecodeError:
                _log.warning("the agent has said something that is no Trace")
                self._deaf = True  # but for its end
                self._received.clear()

    def stop(self, *_: object) -> None:
        """End the window soon, with what there is."""
        self._stopping = self._stopping or "ended early"

    # ---- what the kernel side says

    def _consume(self) -> bool:
        """Take in what has come, some of it; whether there may be more."""
        taken = self._calls.consume(_MOST_RECORDS)
        self._sampler.consume()
        return taken == _MOST_RECORDS

    def _record(self, record: Record) -> None:
        if isinstance(record, Call):
            self._call(record)
        elif isinstance(record, End):
            self._recording.end(record)
        elif isinstance(record, Site):
            self._probes.sites.add(record.pid, record.address, attach=self._probes.in_place)
        elif isinstance(record, Loaded):
            self._names.note_handle(record.pid, record.handle, os.fsdecode(record.name))

    def _call(self, call: Call) -> None:
        index, function = self._probes.function(call.point)
        if function.category == "load":
            return
        if call.row not in self._threads:
            thread = self._calls.thread(call.row)
            self._threads[call.row] = thread.pid, outcome.thread_name(thread.pid, thread.tid)
        kernel = None
        if function.category not in _NO_KERNEL:
            pid, _ = self._threads[call.row]
            how = {Layer.DRIVER: "handle", Layer.RUNTIME_WRAPPER: "caller"}.get(function.layer, "stub")
            kernel = Kernel(pid, call.target, how)
            if kernel not in self._recording.kernels and how != "handle":
                self._names.want(pid, call.target)
        stack = 0
        if call.outcome == "resolved":
            stack = self._recording.stack_index(call.stack, self._stack)
        kind = function.kind + 1 if function.kind_arg < 0 else call.kind
        self._recording.add(call, index, kernel, kind, timed=function.timed, stack=stack)

    def _stack(self, row: int) -> tuple[Stack, bool]:
        self._sampler.consume()  # it was described before it was counted
        return self._sampler.stack(row)

    # ---- what it says

    def _say(self) -> None:
        status = self._status
        status.targets = sum(view.state == "traced" for view in self._targets.views.values())
        status.launches = sum(thread.launches for thread in self._calls.threads())
        status.cost_share = self._budget.cost_share
        if self._budget.elapsed_s:
            status.traced_share = min(self._probes.traced_s / self._budget.elapsed_s, 1.0)
        self._write(TraceReply(status=status))

    def _end(self, state: int, reason: str) -> None:
        """The last status, and the trace where there is one."""
        status = self._status
        status.state, status.reason = state, reason  # type: ignore[assignment]
        self._say()
        if state in (TRACE_STATE_NO_TARGETS, TRACE_STATE_NO_PROBE_POINT):
            return
        trace = self._given
        status.identity.CopyFrom(trace.status.identity)
        status.rule = trace.status.rule
        trace.status.CopyFrom(status)
        trace.stacks = self._settings.stacks
        seen = outcome.Seen(
            *(self._calls, self._probes, self._targets, self._recording, self._names),
            threads={row: name for row, (_, name) in self._threads.items()},
            unresolved=self._sampler.unresolved(self._settings.slot),
            price=self._price,
        )
        outcome.fill(trace, seen)
        for part in trace_parts.split(trace):
            self._write(TraceReply(part=part))

    def _write(self, reply: TraceReply) -> None:
        data = reply.SerializeToString()
        self._out.write(_LENGTH.pack(len(data)) + data)
        self._out.flush()

    def close(self) -> None:
        """Leave nothing behind."""
        self._probes.close()
        self._names.close()
        self._targets.close()
        self._calls.close()
        self._sampler.close()


def _owner(pid: int) -> int | None:
    """The user as whom the process runs; None of one that is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}").stat().st_uid
    return None


def main(arguments: list[str]) -> int:
    """The command line: the settings as JSON."""
    told: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    libc = ctypes.CDLL(None)
    # If the agent has gone already, its end of stdin is closed, which ends the window too.
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NAME, _NAME)
    with suppress(OSError):
        os.nice(_NICE)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    settings = WindowSettings.loads(arguments[0])
    out = sys.stdout.buffer
    window: Window | None = None
    try:
        window = Window(settings, out)
        signal.signal(signal.SIGTERM, window.stop)
        if told:
            window.stop()
        window.run()
    except BrokenPipeError:
        return 1  # nobody listens any more
    except (ExpanseError, OSError) as error:
        status = TraceStatus(id=settings.id, state=TRACE_STATE_FAILED, reason=clean(str(error)))
        data = TraceReply(status=status).SerializeToString()
        out.write(_LENGTH.pack(len(data)) + data)
        out.flush()
    finally:
        if window is not None:
            window.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
