"""Where the stacks of `expanse-ebpf profile` come from: the node's agent, or this process itself."""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Protocol

from expanse_ebpf.errors import ExpanseError, UnavailableError, UnknownJobError
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, WatchProfileRequest
from expanse_ebpf.wire.profile_pb2 import Profile

if TYPE_CHECKING:
    from expanse_ebpf.config import Config
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.kernel.lifecycle import Event, Lifecycle
    from expanse_ebpf.python_stacks.sampler import Count, Sampler

PART_S = 1.0
_TURN_S = 0.2  # how soon `stop` is noticed


class Target(NamedTuple):
    """What is profiled: a job, or a process and what it forks."""

    key: str
    pid: int

    def __str__(self) -> str:
        return self.key or f"process {self.pid}"


class Part(NamedTuple):
    """The stacks of some time."""

    profile: Profile
    note: str = ""  # why there will be no more, or what is wrong with the process


class Session(Protocol):
    """Gives stacks while they are sampled."""

    rate_hz: int
    sampler: str  # who samples, in words

    def parts(self, stop: Callable[[], bool]) -> Iterator[Part]:
        """About one part a second until `stop()`, or until what is profiled has ended."""


# ---- the agent


class AgentSession:
    """The agent of this node, which samples anyway."""

    def __init__(self, path: str, target: Target) -> None:
        """Raises UnavailableError, or UnknownJobError, when it does not take the request."""
        from expanse_ebpf.top import client

        self._stop: Callable[[], bool] = lambda: False
        self._hung_up = client.HungUpError
        self.sampler = f"sampled by the agent on {path}"
        request = WatchProfileRequest(key=target.key, pid=target.pid)
        self._parts = client.profile(path, request, lambda: self._stop())
        try:
            self.rate_hz = next(self._parts).rate_hz  # the first is empty
        except UnavailableError as error:
            if str(error).startswith(("no job ", "no process ")):
                raise UnknownJobError(str(error)) from None
            raise

    def parts(self, stop: Callable[[], bool]) -> Iterator[Part]:
        """See Session."""
        self._stop = stop
        note = ""
        try:
            for part in self._parts:
                note = part.note
                yield Part(Profile.FromString(part.pprof), note)
        except self._hung_up as error:
            yield Part(Profile(), note or str(error))

    def close(self) -> None:
        """Hang up."""
        self._parts.close()


# ---- this process


class OwnSession:
    """Samples by itself, as an agent would, the one job or process alone."""

    def __init__(self, target: Target, rate_hz: int, config: Config) -> None:
        """Raises UnavailableError when that cannot be done here, UnknownJobError when it is not there."""
        self.rate_hz = rate_hz
        self.sampler = "sampled by this command"
        self._target = target
        self._waits_hz = config.python.waits_hz
        self._next_visit = time.monotonic() if self._waits_hz else inf
        self._stack = ExitStack()
        self._selector = self._stack.enter_context(selectors.DefaultSelector())
        self._jobs: _Jobs | None = None
        try:
            if target.key:
                self._jobs = _Jobs(target.key, config)
                self._stack.callback(self._jobs.close)
                self._selector.register(self._jobs.lifecycle.fd, selectors.EVENT_READ, self._jobs.consume)
            else:
                from expanse_ebpf.sources.python_watch import status

                found = status(target.pid)
                if found is None:
                    raise UnknownJobError(f"no process {target.pid}; it may have exited")
                self._target = Target("", found.tgid)
            self._sampler = self._load(self._jobs.lifecycle if self._jobs else None)
            self._stack.callback(self._sampler.close)
            self._selector.register(self._sampler.fd, selectors.EVENT_READ, self._sampler.consume)
            if self._jobs is None:
                self._sampler.select_pid(self._target.pid)
                self._seen = {self._target.pid}
        except BaseException as error:
            self._stack.close()
            raise explained(error) from None

    def _load(self, lifecycle: Lifecycle | None) -> Sampler:
        from expanse_ebpf.python_stacks.sampler import Sampler

        return Sampler(rate_hz=self.rate_hz, waits_hz=self._waits_hz, lifecycle=lifecycle)

    def parts(self, stop: Callable[[], bool]) -> Iterator[Part]:
        """See Session."""
        try:
            over = self._look()
            self._sampler.drain()
            began = time.monotonic()
            while not stop() and not over:
                self._serve(began + PART_S, stop)
                now = time.monotonic()
                over = self._look()
                yield self._part(now - began, over)
                began = now
        finally:
            self.close()

    def _serve(self, until: float, stop: Callable[[], bool]) -> None:
        """Answer the kernel side, and look at waiting threads, until a monotonic time."""
        while (now := time.monotonic()) < until and not stop():
            for key, _ in self._selector.select(max(0.0, min(until, self._next_visit, now + _TURN_S) - now)):
                key.data()
            if (now := time.monotonic()) >= self._next_visit:
                self._sampler.visit()
                self._next_visit = max(self._next_visit, now - 1) + 1 / self._waits_hz

    def _look(self) -> str:
        """Follow what comes and goes; why it is over, empty when it is not."""
        if self._jobs is not None:
            self._jobs.update()
            self._sampler.select_slots(False, dict.fromkeys(self._jobs.found, True))
            return self._jobs.over
        from expanse_ebpf.sources.python_watch import lives

        self._seen = {pid for pid in self._seen if lives(pid)}
        return "" if self._seen else "the process has ended"

    def _part(self, seconds: float, over: str) -> Part:
        from expanse_ebpf.sources.python_watch import told
        from expanse_ebpf.sources.stack_counts import StackCounts

        counts = StackCounts()
        labels = self._jobs.found if self._jobs is not None else {}
        for count in self._sampler.drain():
            if self._jobs is None or count.stack.slot in labels:
                counts.add(count)
                self._notice(count)
        duration = round(seconds * 1e9)
        profile = counts.profile(
            rate_hz=self.rate_hz,
            time_ns=time.time_ns() - duration,
            duration_ns=duration,
            labels=lambda slot: labels.get(slot, {}),
        )
        refusals, pid = self._sampler.refusals, self._target.pid
        return Part(profile, (told(refusals.get(pid)) if pid else "") or over)

    def _notice(self, count: Count) -> None:
        if self._jobs is None and count.stack.pid:
            self._seen.add(count.stack.pid)

    @property
    def unavailable(self) -> dict[str, str]:
        """Parts that are missing, and why."""
        return self._sampler.unavailable

    def close(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        self._stack.close()


class _Jobs:
    """The jobs that a key means, kept as the agent does: by lifecycle events."""

    def __init__(self, key: str, config: Config) -> None:
        """Raises UnknownJobError when there is none."""
        from expanse_ebpf.jobs import hierarchies
        from expanse_ebpf.jobs.identity import IdentityReader
        from expanse_ebpf.jobs.paths import UnitFilter
        from expanse_ebpf.jobs.table import JobTable
        from expanse_ebpf.kernel import lifecycle
        from expanse_ebpf.wire.keys import parse_key

        parse_key(key)
        self._key = key
        self.found: dict[int, dict[str, str]] = {}  # by slot; the labels of its stacks
        self.over = ""
        units = UnitFilter.of(config.jobs)
        mounted = [h for h in hierarchies.mounted() if h.name in lifecycle.HIERARCHIES]
        numbers = hierarchies.numbers()
        self._names = {number: name for number, name in numbers.items() if name in {h.name for h in mounted}}
        self._table = JobTable(mounted, IdentityReader(units=units), units)
        wanted = config.cpu.hierarchy
        telling = self._table.survey() if wanted == "auto" else wanted
        if telling not in self._names.values():
            raise UnavailableError(f"cpu.hierarchy: {telling!r} is not mounted here")
        number = next(number for number, name in self._names.items() if name == telling)
        self.lifecycle = lifecycle.Lifecycle(telling, number, self._event)
        try:
            self._table.begin(telling, self.lifecycle)
            self.update()
            if not self.found:
                raise UnknownJobError(
                    f"no job {key} on this node; `expanse-ebpf top --once` lists those there are"
                )
        except BaseException:
            self.lifecycle.close()
            raise

    def consume(self) -> None:
        """Handle the events that have come."""
        self.lifecycle.consume()

    def _event(self, event: Event) -> None:
        from expanse_ebpf.kernel import lifecycle

        name = self._names.get(event.hierarchy_id)
        if event.kind == lifecycle.PROCESS_EXECUTED:
            self._table.executed(event.cgroup, event.pid)
        elif name is not None and not event.path:
            self._table.resync()
        elif name is not None and event.kind == lifecycle.CGROUP_REMOVED:
            self._table.removed(name, event.path, event.cgroup)
        elif name is not None:
            self._table.made(name, event.path, event.cgroup, event.slot, inherited=event.inherited)

    def update(self) -> None:
        """Find the jobs anew."""
        from expanse_ebpf.sources.python_watch import labels
        from expanse_ebpf.wire.keys import matches

        self.consume()
        jobs: Iterable[Job] = [job for job in self._table.update() if matches(job.identity, self._key)]
        if jobs or not self.found:
            self.found = {job.slot: labels(job) for job in jobs if job.slot is not None}
        self.over = "" if any(job.state != JOB_STATE_ENDED for job in jobs) else "the job has ended"
        self._table.finish()

    def close(self) -> None:
        """Take everything out of the kernel."""
        self.lifecycle.close()


def explained(error: BaseException) -> BaseException:
    """An error of loading BPF programs with its remedy; another as it is."""
    from expanse_ebpf.kernel.libbpf import BpfError

    if not isinstance(error, BpfError):
        return error
    from expanse_ebpf.kernel import probe

    return UnavailableError(f"{error.what}: {probe.explain(error.errno)}")


# ---- which of the two


def local(
    path: str, target: Target, rate_hz: int | None, config: Config, named: bool = False
) -> AgentSession | OwnSession:
    """The agent at `path` where it samples what is wanted at that rate (None: any); else this process.

    With `named` there has to be one at `path`. Raises what says most: that there is no such job or
    process, or why neither can do it.
    """
    from expanse_ebpf.top.client import NoAgentError

    try:
        agent = AgentSession(path, target)
    except ExpanseError as error:
        if named and isinstance(error, NoAgentError):
            raise
        why: ExpanseError = error
    else:
        if rate_hz in (None, agent.rate_hz):
            return agent
        agent.close()
        why = UnavailableError(f"the agent samples at {agent.rate_hz} Hz")
    try:
        own = OwnSession(target, rate_hz or config.python.rate_hz, config)
        own.sampler += f": {why.cause if isinstance(why, NoAgentError) else why}"
        return own
    except UnavailableError as error:
        if isinstance(why, UnknownJobError):
            raise why from None
        raise UnavailableError(f"{why}; profiling without it: {error}") from None
