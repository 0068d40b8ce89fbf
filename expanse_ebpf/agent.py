"""The agent's tick loop: once per interval, jobs, sources, one report, and out with it."""

from __future__ import annotations

import logging
import os
import selectors
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from math import inf
from typing import TYPE_CHECKING

import expanse_ebpf
from expanse_ebpf import own_cost, sources
from expanse_ebpf.errors import ExpanseError, UnavailableError
from expanse_ebpf.jobs import hierarchies, launch
from expanse_ebpf.jobs.identity import IdentityReader
from expanse_ebpf.jobs.paths import UnitFilter
from expanse_ebpf.jobs.table import JobTable
from expanse_ebpf.kernel import libbpf
from expanse_ebpf.kernel import lifecycle as kernel
from expanse_ebpf.kernel.slots import SLOT_OVERFLOW, SLOT_SYSTEM
from expanse_ebpf.node_socket import NodeSocket
from expanse_ebpf.ship.identity import node_identity
from expanse_ebpf.ship.sequence import first_sequence
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    TRACE_STATE_FAILED,
    ProcessesReply,
    Report,
    RunReply,
)
from expanse_ebpf.wire.service_manager import ServiceManager

if TYPE_CHECKING:
    from expanse_ebpf.config import Config
    from expanse_ebpf.jobs.adopt import Adoptions
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.ship.client import ControllerStream
    from expanse_ebpf.sources.python_watch import ProfileWatch
    from expanse_ebpf.sources.traces import TraceSource, TraceWatch
    from expanse_ebpf.wire.collector_pb2 import JobSample, TraceRequest, TraceStatus, WatchProfileRequest

_log = logging.getLogger(__name__)
_RETRY_TICKS = 60  # how often a source that could not start is tried again
_BACKLOG = 10  # reports that wait for their acknowledgement: with more of them no large ones are made
_MOST_REFUSED = 64  # windows, in one report
_SWITCHED_OFF = "switched off (sources.{})"
_SWEEP_TICKS = 60  # how often cgroups that a killed `run` has left are looked for


class Agent:
    """One node's agent. start(), run() until a signal, stop().

    `service` is told when the first report is made, how it goes, and that the loop turns.
    """

    def __init__(self, config: Config, service: ServiceManager | None = None) -> None:
        self.config = config
        self._service = ServiceManager({}) if service is None else service
        self.newest: Report | None = None
        self._node = node_identity(config.agent)
        self._sequence = first_sequence()
        self._selector = selectors.DefaultSelector()
        self._stopping = False
        self._lifecycle: kernel.Lifecycle | None = None
        self._why_no_bpf = ""
        self._context = sources.Context(config, None)
        self._sources: list[sources.Source] = []
        self._due: dict[sources.Attentive, float] = {}  # monotonic time of each one's next beat
        self._down: dict[str, str] = {}  # sources that are not up, and why
        self._sample_ns: dict[str, int] = {}
        self._last_tick: float | None = None
        self._tick_ns = 0
        self._missed = 0
        self._last_failure = ""
        self._link = ""  # what was last said of the link to the controller
        self._unseen = 0  # events that were lost, and renames, which say too little
        self._own = own_cost.OwnCost()
        units = UnitFilter.of(config.jobs)
        pods = None
        if config.jobs.pods_url:
            from expanse_ebpf.jobs.kubernetes import PodNames

            pods = PodNames(config.jobs.pods_url)
        # Others hold no figures, and BPF cannot tell which of their cgroups a task is in.
        self._mounted = hierarchies.mounted()
        self._hierarchies = [h for h in self._mounted if h.name in kernel.HIERARCHIES]
        seen = {h.name for h in self._hierarchies}
        # The kernel's number of each hierarchy that is seen here to its name.
        self._names = {number: name for number, name in hierarchies.numbers().items() if name in seen}
        self._table = JobTable(self._hierarchies, IdentityReader(pods=pods, units=units), units)
        self._adoptions: Adoptions | None = None
        self._socket = NodeSocket(
            config.agent.socket,
            self._selector,
            agent_uid=os.geteuid(),
            on_processes=self._processes,
            on_run=self._run_for_user,
            on_profile=self._watch_profile,
            on_trace=self._watch_trace,
        )
        # What comes of commands while there are no traces
        self._no_windows: deque[TraceStatus] = deque(maxlen=_MOST_REFUSED)
        self._stream: ControllerStream | None = None

    # ---- start and stop ---------------------------------------------------------------------------

    def start(self) -> None:
        """Open everything; what this node cannot do is reported and left out.

        Raises ExpanseError only where nothing could be seen at all, or another agent runs.
        """
        self._socket.open()
        self._begin(self.config.cpu.hierarchy)
        _log.info(
            "watching %s every %g s; look with `expanse-ebpf top --socket %s`",
            self._node.name,
            self.config.agent.interval_s,
            self.config.agent.socket,
        )
        for source in self._sources:
            for reason in dict.fromkeys(source.unavailable.values()):
                parts = [part for part, why in source.unavailable.items() if why == reason]
                _log.info("not available: %s: %s", ", ".join(parts), reason)
        if self.config.agent.metrics_listen:
            from expanse_ebpf.export import prometheus

            port = prometheus.serve(
                self.config.agent.metrics_listen, prometheus.ReportCollector(lambda: self.newest)
            )
            host = self.config.agent.metrics_listen.rpartition(":")[0]
            _log.info("metrics on %s:%d", host, port)
        if self.config.controller.address:
            from expanse_ebpf.ship.client import ControllerStream

            self._stream = ControllerStream(
                self.config.controller.address, self._node, self.config.controller.max_unsent
            )
            self._stream.start()
            self._selector.register(self._stream.commands_fd, selectors.EVENT_READ, self._commands)

    def _begin(self, hierarchy: str) -> None:
        """Load the BPF programs for `hierarchy` ("auto": by looking) and start the sources."""
        telling = self._table.survey() if hierarchy == "auto" else hierarchy
        if telling not in {h.name for h in self._hierarchies}:
            names = ", ".join(h.name for h in self._hierarchies)
            raise UnavailableError(f"cpu.hierarchy: {telling!r} is not mounted here; there are {names}")
        carried: dict[str | int, list[int]] = {}
        if self._lifecycle is not None:  # a change of hierarchy: what was counted goes along
            slots = self._lifecycle.slots
            carried = {
                job.identity.cgroup: slots.total(job.slot) for job in self._table if job.slot is not None
            }
            carried |= {slot: slots.total(slot) for slot in (SLOT_SYSTEM, SLOT_OVERFLOW)}
        self._end_sources()
        try:
            self._lifecycle = kernel.Lifecycle(telling, self._number(telling), self._event)
            self._selector.register(self._lifecycle.fd, selectors.EVENT_READ, self._events)
        except ExpanseError as error:
            self._lifecycle = None
            self._why_no_bpf = _explain(error)
            _log.warning("no CPU events, and jobs are found by walking the cgroup tree: %s", self._why_no_bpf)
        self._table.begin(telling, self._lifecycle)
        if self._lifecycle is not None:
            for job in self._table:
                if job.slot is not None and job.identity.cgroup in carried:
                    self._lifecycle.slots.carry(job.slot, carried[job.identity.cgroup])
            for slot in (SLOT_SYSTEM, SLOT_OVERFLOW):
                if slot in carried:
                    self._lifecycle.slots.carry(slot, carried[slot])
        self._context = sources.Context(
            self.config, self._lifecycle, self._why_no_bpf, ships=self._ships_soon, node=self._node
        )
        wanted = [name for name, on in asdict(self.config.sources).items() if on]
        self._sources = sources.create(wanted, self._context)
        self._down = {}
        for source in self._sources:
            self._start_source(source)

    def _number(self, hierarchy: str) -> int:
        return next((number for number, name in self._names.items() if name == hierarchy), 0)

    def _start_source(self, source: sources.Source) -> None:
        try:
            source.start()
            self._down.pop(source.name, None)
            self._attend(source)
        except (ExpanseError, OSError) as error:
            if str(error) not in (self._down.get(source.name), self._why_no_bpf):
                _log.warning("source %s is off: %s", source.name, error)
            self._down[source.name] = str(error)
            self._stop_source(source)

    def _attend(self, source: sources.Source) -> None:
        """Call the source between ticks too, where it wants that."""
        if isinstance(source, sources.Attentive):
            self._selector.register(source.fd, selectors.EVENT_READ, lambda _mask: self._ready(source))
            self._due[source] = time.monotonic() + source.period_s

    def _ready(self, source: sources.Attentive) -> None:
        self._call(source, source.ready)
        if source.name == "traces":  # who has asked for a window waits for what has just come
            self._socket.wake()

    def _stop_source(self, source: sources.Source) -> None:
        if isinstance(source, sources.Attentive) and self._due.pop(source, None) is not None:
            self._selector.unregister(source.fd)
        source.stop()

    def _end_sources(self) -> None:
        for source in self._sources:
            self._stop_source(source)
        self._sources = []
        if self._lifecycle is not None:
            self._selector.unregister(self._lifecycle.fd)
            self._lifecycle.close()
            self._lifecycle = None

    def stop(self) -> None:
        """Send what is left, and leave nothing behind."""
        self._service.stopping()
        self._end_sources()
        self._socket.wake()  # a window's last word
        if self._stream is not None:
            with suppress(KeyError, ValueError):  # it was not begun, or has been stopped
                self._selector.unregister(self._stream.commands_fd)
            self._stream.stop(2.0)
        self._socket.close()
        self._selector.close()

    # ---- the loop -----------------------------------------------------------------------------------

    def run(self, ticks: int | None = None) -> None:
        """Tick until SIGTERM or SIGINT, or for so many ticks."""
        interval = self.config.agent.interval_s
        with self._signals():
            due = time.monotonic()
            while not self._stopping and ticks != 0:
                next_sign = self._service.alive()
                if time.monotonic() < due:
                    next_beat = self._beat()
                    wait = min(due - time.monotonic(), next_sign, next_beat)
                    for key, mask in self._selector.select(max(wait, 0)):
                        key.data(mask)
                    continue
                self._guarded_tick()
                if ticks is not None:
                    ticks -= 1
                due += interval
                behind = int((time.monotonic() - due) / interval)
                if behind > 0:  # suspended, or starved of CPU: no burst of ticks to catch up
                    self._missed += behind
                    due += behind * interval

    def _beat(self) -> float:
        """Call the sources whose time has come; seconds until that of the next."""
        for source, due in list(self._due.items()):
            if source.period_s and time.monotonic() >= due:
                self._call(source, source.beat)
                if source in self._due:
                    # One that takes its whole period must not take the whole CPU.
                    self._due[source] = max(due + source.period_s, time.monotonic() + source.period_s / 2)
        now = time.monotonic()
        return min((due - now for source, due in self._due.items() if source.period_s), default=inf)

    def _call(self, source: sources.Source, step: Callable[..., None], *arguments: object) -> None:
        """One step of a source, which must not take the others with it when it fails."""
        try:
            step(*arguments)
        except Exception as error:
            self._down[source.name] = f"{type(error).__name__}: {error}"
            _log.exception("source %s failed and is off for now", source.name)
            self._stop_source(source)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(reader, selectors.EVENT_READ, lambda _mask: self._drain(reader))
        former = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        handlers = {s: signal.signal(s, self._asked_to_stop) for s in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(former)
            with suppress(KeyError, ValueError):
                self._selector.unregister(reader)
            os.close(reader)
            os.close(writer)

    @staticmethod
    def _drain(fd: int) -> None:
        with suppress(BlockingIOError):
            os.read(fd, 4096)

    def _asked_to_stop(self, *_: object) -> None:
        self._stopping = True

    def _guarded_tick(self) -> None:
        try:
            report = self.tick()
            if self._service.listens:
                self._service.status(self._state(report))
                self._service.ready()
        except Exception as error:  # watching goes on whatever a job has thought of
            self._missed += 1
            self._service.status(f"the last tick failed: {error}")
            if str(error) != self._last_failure:
                self._last_failure = str(error)
                _log.exception("a tick failed; further ones that fail alike are only counted")

    def _state(self, report: Report) -> str:
        """One line for the service manager."""
        jobs = sum(job.state != JOB_STATE_ENDED for job in report.jobs) + report.host.overflow_jobs
        said = [f"{jobs} job{'' if jobs == 1 else 's'}, a report every {self.config.agent.interval_s:g} s"]
        said += [f"{name} is off: {reason}" for name, reason in self._down.items()]
        if self._stream is not None:
            said.append(self._stream.state)
        return "; ".join(said)

    def tick(self) -> Report:
        """Make one report and hand it on."""
        started = time.monotonic()
        if self._lifecycle is not None:
            self._lifecycle.consume()
            losses = self._lifecycle.losses()
            unseen = losses.lost + losses.renames
            if unseen != self._unseen:
                self._unseen = unseen
                self._table.resync()
        else:
            self._table.resync()
        if self.config.cpu.hierarchy == "auto":
            better = self._table.better_hierarchy()
            if better is not None:
                _log.info("jobs are told apart in the %s hierarchy from now on", better)
                self._begin(better)
        report = self._report(started)
        self._table.finish()
        if self._adoptions is not None:
            self._adoptions.remove_empty()
        if report.sequence % _SWEEP_TICKS == 0:
            launch.sweep(self._mounted)
        launch.clear(
            directory
            for job in self._table.left_over
            if job.identity.scheduler == "run"
            for directory in job.directories.values()
        )
        self.newest = report
        self._socket.publish(report)
        if self._stream is not None:
            self._stream.send(report)
        self._tick_ns = int((time.monotonic() - started) * 1e9)
        return report

    def _report(self, now: float) -> Report:
        report = Report(sequence=self._sequence, time_ns=time.time_ns())
        self._sequence += 1
        report.node.CopyFrom(self._node)
        if self._last_tick is not None:
            report.interval_ns = int((now - self._last_tick) * 1e9)
        self._last_tick = now
        jobs = self._table.update()
        reported = jobs[: self.config.agent.max_jobs]
        self._context.overflow[:] = jobs[len(reported) :]
        samples = []
        for job in reported:
            sample = report.jobs.add(state=job.state)
            sample.identity.CopyFrom(job.identity)
            if job.pids is not None:
                sample.processes = len(job.pids)
            samples.append((job, sample))
        report.host.overflow_jobs = len(jobs) - len(reported)
        report.host.unattributed_cgroups = self._table.unattributed
        for source in self._sources:
            self._sample(source, now, samples, report)
        for _, sample in samples:
            if not self.config.sources.python:
                sample.unavailable["python"] = _SWITCHED_OFF.format("python")
            # Its cgroup is gone, so the last of its CPU time is known to the scheduler hook alone.
            if sample.state == JOB_STATE_ENDED and sample.counters.HasField("run_ns"):
                sample.cpu_ns = max(sample.cpu_ns, sample.counters.run_ns)
        self._describe_collector(report)
        # The process that asks NVML is part of the collector, and so are those of windows.
        report.collector.cpu_ns += report.nvml.cpu_ns
        if report.nvml.pss_bytes and report.collector.HasField("pss_bytes"):
            report.collector.pss_bytes += report.nvml.pss_bytes
        for traces in self._traces():
            report.collector.cpu_ns += traces.cpu_ns
            if report.collector.HasField("pss_bytes"):
                report.collector.pss_bytes += traces.pss_bytes
        report.traces.extend(self._no_windows)
        self._no_windows.clear()
        return report

    def _sample(
        self, source: sources.Source, now: float, samples: list[tuple[Job, JobSample]], report: Report
    ) -> None:
        if source.name in self._down:
            if report.sequence % _RETRY_TICKS == 0:
                self._start_source(source)
            if source.name in self._down:
                return
        began = time.perf_counter_ns()
        self._call(source, source.sample, now, samples, report)
        self._sample_ns[source.name] = time.perf_counter_ns() - began

    def _describe_collector(self, report: Report) -> None:
        collector = report.collector
        collector.version = expanse_ebpf.__version__
        self._own.fill(collector)
        collector.tick_ns = self._tick_ns
        collector.ticks_missed = self._missed
        for source in self._sources:
            reason = self._down.get(source.name, "")
            status = collector.sources.add(name=source.name, up=not reason, reason=reason)
            status.sample_ns = self._sample_ns.get(source.name, 0)
            for part, why in source.unavailable.items():
                status.unavailable[part] = why
        if not self.config.sources.python:  # others that are switched off have not been looked for either
            collector.sources.add(name="python", reason=_SWITCHED_OFF.format("python"))
        if self._stream is not None:
            collector.reports_unsent = self._stream.unsent
            collector.reports_dropped = self._stream.dropped
            status = collector.sources.add(name="controller", up=self._stream.connected)
            status.reason = "" if self._stream.connected else self._stream.state
            self._tell_of_link(self._stream.state)

    def _tell_of_link(self, state: str) -> None:
        if state != self._link:
            _log.info("%s", state)
            self._link = state

    # ---- what comes in between ticks ------------------------------------------------------------------

    def _events(self, _mask: int) -> None:
        if self._lifecycle is not None:
            self._lifecycle.consume()

    def _event(self, event: kernel.Event) -> None:
        if event.kind == kernel.PROCESS_EXECUTED:
            self._table.executed(event.cgroup, event.pid)
            return
        name = self._names.get(event.hierarchy_id)
        if name is None:
            return
        if not event.path:  # too long to be told: look for it
            self._unseen = -1
        elif event.kind == kernel.CGROUP_REMOVED:
            self._table.removed(name, event.path, event.cgroup)
        else:
            new = self._table.made(name, event.path, event.cgroup, event.slot, inherited=event.inherited)
            if new is not None:
                for source in self._sources:
                    if source.name == "cpu" and source.name not in self._down:
                        source.jobs_changed()  # type: ignore[attr-defined]

    def _processes(self, key: str, run: int, uid: int) -> ProcessesReply:
        from expanse_ebpf.jobs import processes

        for job in self._table:
            if job.key == key and run in (0, job.identity.run):
                return ProcessesReply(processes=processes.describe(job.pids or ()))
        return ProcessesReply()

    def _watch_profile(self, request: WatchProfileRequest, uid: int | None) -> ProfileWatch:
        for source in self._sources:
            if source.name == "python":
                if source.name in self._down:
                    raise UnavailableError(f"Python stacks are not available: {self._down[source.name]}")
                return source.watch(request, uid, self._table)  # type: ignore[attr-defined, no-any-return]
        raise UnavailableError("Python stacks are switched off: set sources.python = true")

    def _traces(self) -> list[TraceSource]:
        """The source of traces; none: it is switched off."""
        return [source for source in self._sources if source.name == "traces"]  # type: ignore[misc]

    def _why_no_traces(self) -> str:
        """Why no window can be opened; empty when one can."""
        if not self.config.sources.traces:
            return "traces are switched off: set sources.traces = true"
        return f"traces are not available: {self._down['traces']}" if "traces" in self._down else ""

    def _watch_trace(self, request: TraceRequest, uid: int | None) -> TraceWatch:
        why = self._why_no_traces()
        if why:
            raise UnavailableError(why)
        return self._traces()[0].open(request, uid, self._table)

    def _commands(self, _mask: int) -> None:
        """Open the windows that the controller wants."""
        if self._stream is None:
            return
        for request in self._stream.take_commands():
            why = self._why_no_traces()
            if not why:
                self._traces()[0].command(request, self._table)
                continue
            from expanse_ebpf.sources.trace_request import first_status

            self._no_windows.append(first_status(request, TRACE_STATE_FAILED, why))

    def _ships_soon(self) -> bool:
        return self._stream is not None and self._stream.connected and self._stream.unsent < _BACKLOG

    def _run_for_user(self, name: str, pid: int, uid: int) -> RunReply:
        from expanse_ebpf.jobs.adopt import Adoptions

        if self._adoptions is None:
            self._adoptions = Adoptions()
        return RunReply(cgroup=self._adoptions.adopt(name, pid, uid)[0])


def _explain(error: ExpanseError) -> str:
    """Why the BPF programs are not loaded, with the remedy."""
    if not isinstance(error, libbpf.BpfError):
        return str(error)
    from expanse_ebpf.kernel import probe

    return f"{error.what}: {probe.explain(error.errno)}"
