"""Source "python": which Python lines a job's time goes to, on CPUs and waiting.

The kernel side samples and counts whole stacks (`expanse_ebpf.python_stacks`). Here the counts are
given to their jobs: figures for each report, a profile for each job and minute where there is a
controller to send it to, and parts for those who look at a job through the node's socket.
"""

from __future__ import annotations

import fnmatch
import logging
import re
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel.slots import SLOT_OVERFLOW, SLOT_SYSTEM
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobIdentity
from expanse_ebpf.wire.keys import names

if TYPE_CHECKING:
    from expanse_ebpf.config import PythonConfig
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.kernel.libbpf import Program
    from expanse_ebpf.python_stacks.sampler import Count, Sampler
    from expanse_ebpf.sources import Context
    from expanse_ebpf.sources.data_loaders import DataLoaders
    from expanse_ebpf.sources.python_watch import ProfileWatch
    from expanse_ebpf.sources.stack_counts import StackCounts
    from expanse_ebpf.wire.collector_pb2 import JobSample, Report, WatchProfileRequest

ALL_STACKS = 20_000  # that are kept of all jobs together, a job having its part of them
LEAST_STACKS = 200  # of a job, whatever the number of jobs
REPORT_BYTES = 2 << 20  # of profiles in one report; a message has at most 4 MiB
PACK_S = 0.01  # no profile is begun later than that in a tick; each takes some 5 to 20 ms
LONGEST_S = 3000.0  # of a profile; the controller takes an hour
_log = logging.getLogger(__name__)
_NO_JOB = re.compile("(?!)")
_MINUTE_NS = 60 * 10**9
_FOLDED = "more different stacks than fit into a profile; the rarest are folded into [over budget]"


def create(context: Context) -> PythonSource:
    """The source, not started yet."""
    return PythonSource(context)


class Choice:
    """Which jobs the configuration wants profiled."""

    def __init__(self, config: PythonConfig) -> None:
        self.everything = "*" in config.jobs and not config.users and not config.namespaces
        self._jobs = _pattern(config.jobs) or _NO_JOB
        self._users, self._namespaces = _pattern(config.users), _pattern(config.namespaces)

    def against(self, identity: JobIdentity) -> str:
        """The setting that leaves the job out, as a reason; empty when it is to be profiled."""
        if self.everything:
            return ""
        keys = [f"{identity.scheduler}/{name}" for name in names(identity)]
        users = [identity.user, *([str(identity.uid)] if identity.HasField("uid") else [])]
        kubernetes = identity.scheduler == "kubernetes"
        namespaces = [identity.id.partition("/")[0]] if kubernetes and "/" in identity.id else []
        for setting, pattern, candidates in (
            ("jobs", self._jobs, keys),
            ("users", self._users, users),
            ("namespaces", self._namespaces, namespaces),
        ):
            if pattern is not None and not any(map(pattern.match, candidates)):
                return f"left out by the setting python.{setting}"
        return ""


def _pattern(patterns: Sequence[str]) -> re.Pattern[str] | None:
    """One expression for shell patterns; None for no patterns: anything goes."""
    return re.compile("|".join(map(fnmatch.translate, patterns))) if patterns else None


class _JobStacks:
    """What was sampled of one job."""

    __slots__ = (
        "_keeps",
        "_loaders",
        "fresh",
        "loading_ns",
        "lost",
        "running",
        "samples",
        "since",
        "span",
        "unresolved",
        "waiting",
        "worth",
    )

    def __init__(self, now: float, keeps: bool, loaders: DataLoaders | None) -> None:
        """`loaders`: whose time is added up; None: it is not known, for threads that wait are not seen."""
        from expanse_ebpf.sources.stack_counts import RecentLines

        self._loaders = loaders
        self.loading_ns: int | None = None  # not known before there is any stack
        self.fresh: list[Count] = []  # since the last tick
        self.samples = 0
        self.lost = 0
        self.unresolved: dict[str, int] = {}
        self.running = RecentLines()
        self.waiting = RecentLines(waits=True)
        self._keeps = keeps
        self.begin(now)

    def begin(self, now: float) -> None:
        """Start a new profile at monotonic time `now` (seconds)."""
        from expanse_ebpf.sources.stack_counts import StackCounts

        self.span: StackCounts = StackCounts()
        self.since = now
        self.worth = False  # whether there is anything in it that somebody could want to see

    def tick(self, now: float, most: int) -> None:
        """Take in what is fresh; keep at most so many stacks."""
        self.span.most = most
        for count in self.fresh:
            stack = count.stack
            if stack.frames and self._loaders is not None:
                loads = self._loaders.hold(stack.frames)
                self.loading_ns = (self.loading_ns or 0) + (count.ns if loads else 0)
            if not stack.waiting:
                self.samples += count.samples
                if stack.unresolved == "lost":
                    self.lost += count.samples
                elif stack.unresolved:
                    self.unresolved[stack.unresolved] = (
                        self.unresolved.get(stack.unresolved, 0) + count.samples
                    )
            if self._keeps:
                self.span.add(count)
                self.worth |= stack.unresolved != "not_python"
        self.running.add(now, [count for count in self.fresh if not count.stack.waiting])
        self.waiting.add(now, [count for count in self.fresh if count.stack.waiting])
        self.fresh.clear()

    def fill(self, sample: JobSample) -> None:
        """Write the figures into `sample`."""
        from expanse_ebpf.sources.stack_counts import in_words

        python = sample.python
        python.samples, python.lost = self.samples, self.lost
        if self.loading_ns is not None:
            python.loading_ns = self.loading_ns
        for reason, number in self.unresolved.items():
            python.unresolved[reason] = number
        if self.unresolved and self.samples == sum(self.unresolved.values()) + self.lost:
            main = max(self.unresolved, key=lambda reason: self.unresolved[reason])
            sample.unavailable["python"] = in_words(main)
        hot = self.running.hottest()
        if hot is not None:
            (function, file, python.hottest_line), python.hottest_share = hot
            python.hottest_function, python.hottest_file = clean(function), clean(file)
        hot = self.waiting.hottest()
        if hot is not None:
            (function, file, python.waiting_line), python.waiting_share = hot
            python.waiting_function, python.waiting_file = clean(function), clean(file)


class _ProgramCost:
    """What the sampler's BPF programs cost, while the kernel measures (the source "cpu" has it do so).

    It counts from this source's first report on: the programs may be younger than the measuring.
    """

    def __init__(self) -> None:
        self._first: dict[str, tuple[int, int]] | None = None
        self._first_ns = self._measured_ns = 0
        self._seen: dict[str, tuple[int, int]] = {}

    def fill(self, report: Report, programs: Mapping[str, Program]) -> None:
        """Add each program to those that are in the report, when something was measured."""
        measured_ns = max((program.measured_ns for program in report.collector.programs), default=0)
        if self._first is None or measured_ns != self._measured_ns:
            self._seen = {name: program.statistics() for name, program in programs.items()}
            self._measured_ns = measured_ns
        if self._first is None:
            self._first, self._first_ns = self._seen, measured_ns
        if measured_ns <= self._first_ns:
            return
        for name, (ns, runs) in self._seen.items():
            first_ns, first_runs = self._first.get(name, (0, 0))
            report.collector.programs.add(
                name=name,
                run_ns=max(0, ns - first_ns),
                runs=max(0, runs - first_runs),
                measured_ns=measured_ns - self._first_ns,
            )


class _Outgoing(NamedTuple):
    """A profile that waits for its report."""

    job: Job
    identity: JobIdentity
    counts: StackCounts
    to_ns: int
    duration_ns: int


class PythonSource:
    """Source "python". Jobs past `agent.max_jobs` are sampled only while somebody looks at them."""

    name = "python"

    def __init__(self, context: Context) -> None:
        self._config = context.config.python
        self._lifecycle = context.lifecycle
        self._why_no_bpf = context.why_no_bpf
        self._overflow = context.overflow
        self._ships = context.ships
        self._keeps = bool(context.config.controller.address)
        self._choice = Choice(self._config)
        for pattern in self._config.jobs:
            if not any(c in pattern for c in "/*?["):
                _log.warning(
                    "python.jobs: %r can match no job: keys are like run/train and slurm/123", pattern
                )
        self._cost = _ProgramCost()
        self.unavailable: dict[str, str] = {}
        self.fd = -1
        self.period_s = 0.0
        self._sampler: Sampler | None = None
        self._selected: tuple[bool, dict[int, bool]] | None = None
        self._by_slot: dict[int, Job] = {}  # those that are sampled
        self._stacks: dict[Job, _JobStacks] = {}  # those that the configuration wants
        self._unclaimed: list[Count] = []  # of slots that are no known job's, or not yet
        self._watches: list[ProfileWatch] = []
        self._loaders: DataLoaders | None = None
        self._before = 0.0  # monotonic time of the last sample
        self._minute = 0
        self._outgoing: deque[_Outgoing] = deque()
        self._dropped = 0  # profiles
        self._lost = 0  # samples

    def start(self) -> None:
        """Load the sampler; raises UnavailableError or BpfError."""
        if self._lifecycle is None:
            raise UnavailableError(self._why_no_bpf)
        from expanse_ebpf.python_stacks.sampler import Sampler
        from expanse_ebpf.sources.data_loaders import DataLoaders

        self._sampler = Sampler(
            rate_hz=self._config.rate_hz, waits_hz=self._config.waits_hz, lifecycle=self._lifecycle
        )
        self._cost = _ProgramCost()
        self.unavailable = self._sampler.unavailable
        self.fd = self._sampler.fd
        waits = self._config.waits_hz and "waiting" not in self.unavailable
        self.period_s = 1 / self._config.waits_hz if waits else 0.0
        self._loaders = DataLoaders() if waits else None
        self._before = time.monotonic()
        self._choose(list(self._stacks))

    def ready(self) -> None:
        """Look up processes that have just come."""
        if self._sampler is not None:
            self._sampler.consume()

    def beat(self) -> None:
        """Read the stacks of threads that wait."""
        if self._sampler is not None:
            self._sampler.visit()

    def sample(self, now: float, jobs: Sequence[tuple[Job, JobSample]], report: Report) -> None:
        """Fill in `JobSample.python` and, when a minute is over or a job, `Report.profiles`."""
        reasons = self._choose([job for job, _ in jobs])
        held, self._unclaimed = self._unclaimed, []
        for count in held:
            # A slot that is no job's even now is that of a cgroup which turned out not to be one.
            if not self._take(count) and count.stack.unresolved == "lost":
                self._lost += count.samples
                self.unavailable["lost"] = f"{self._lost} samples of which not even the job is known"
        self._collect()
        most = max(LEAST_STACKS, ALL_STACKS // max(1, len(self._stacks)))
        for job, sample in jobs:
            stacks = self._stacks.get(job)
            if stacks is None:
                sample.unavailable["python"] = reasons[job]
            else:
                stacks.tick(now, most)
                stacks.fill(sample)
        if self._sampler is not None:
            self._cost.fill(report, self._sampler.programs)
        self._end_spans(now, report)
        self._send(report, dict(jobs))
        self._before = now
        if self._watches:
            self._look_after_watches([*(job for job, _ in jobs), *self._overflow])

    def _look_after_watches(self, jobs: Sequence[Job]) -> None:
        from expanse_ebpf.sources.python_watch import told

        for watch in self._watches:
            watch.look(jobs)
            if watch.tree is not None and self._sampler is not None:
                watch.note = told(self._sampler.refusals.get(watch.tree.pid))

    # ---- which jobs

    def _choose(self, jobs: Sequence[Job]) -> dict[Job, str]:
        """Select the jobs to be sampled; those that are not in the reports, and why."""
        default = self._choice.everything
        exceptions = {SLOT_SYSTEM: False, SLOT_OVERFLOW: False} if default else {}
        reasons: dict[Job, str] = {}
        self._by_slot = {}
        for job, reason in [
            *((job, self._choice.against(job.identity)) for job in jobs),
            *((job, "past the limit agent.max_jobs") for job in self._overflow),
        ]:
            if job.slot is None:
                reasons[job] = "no accounting slot was free"
                continue
            if reason:
                reasons[job] = reason
            elif job not in self._stacks:
                self._stacks[job] = _JobStacks(self._before, self._keeps, self._loaders)
            wanted = not reason or any(watch.wants(job) for watch in self._watches)
            if wanted:
                self._by_slot[job.slot] = job
            if wanted != default:
                exceptions[job.slot] = wanted
        sampled = set(self._by_slot.values())
        for gone in [job for job in self._stacks if job in reasons or job not in sampled]:
            del self._stacks[gone]
        if self._sampler is not None and self._selected != (default, exceptions):
            self._sampler.select_slots(default, exceptions)
            self._selected = (default, exceptions)
        return reasons

    # ---- what was counted

    def _collect(self) -> None:
        """Give what was counted since the last time to its jobs."""
        if self._sampler is not None:
            self._unclaimed += [count for count in self._sampler.drain() if not self._take(count)]

    def _take(self, count: Count) -> bool:
        job = self._by_slot.get(count.stack.slot)
        if job is None:
            return False
        stacks = self._stacks.get(job)
        if stacks is not None:
            stacks.fresh.append(count)
        for watch in self._watches:
            watch.take(job, count)
        return True

    # ---- a profile for each job and minute

    def _end_spans(self, now: float, report: Report) -> None:
        """Put aside the profiles of jobs that have ended, and at a new minute those of all jobs.

        While the controller cannot be reached profiles grow instead, beyond the minute: kept in memory
        one by one they would be more than an agent may hold.
        """
        minute = report.time_ns // _MINUTE_NS
        turned = minute != self._minute and self._minute != 0
        ships = self._ships()
        self._minute = minute
        waiting = {outgoing.job for outgoing in self._outgoing}
        for job, stacks in self._stacks.items():
            wanted = turned and (ships or now - stacks.since > LONGEST_S) and job not in waiting
            if job.state != JOB_STATE_ENDED and not wanted:
                continue
            if stacks.worth:
                identity = JobIdentity()
                identity.CopyFrom(job.identity)
                duration = round((now - stacks.since) * 1e9)
                self._outgoing.append(_Outgoing(job, identity, stacks.span, report.time_ns, duration))
            stacks.begin(now)
        while len(self._outgoing) > 1 and sum(len(out.counts) for out in self._outgoing) > ALL_STACKS:
            self._outgoing.popleft()
            self._dropped += 1
            self.unavailable["profiles"] = (
                f"{self._dropped} profiles of jobs were dropped: the controller was away for too long"
            )

    def _send(self, report: Report, samples: Mapping[Job, JobSample]) -> None:
        """Put as many profiles as fit, and as there is time to pack, into `report`."""
        if not self._outgoing or not self._ships():
            return
        from expanse_ebpf.sources.python_watch import labels
        from expanse_ebpf.sources.stack_counts import MOST_BYTES

        began, room = time.monotonic(), REPORT_BYTES
        while (
            self._outgoing
            and room >= MOST_BYTES
            and (not report.profiles or time.monotonic() - began < PACK_S)
        ):
            job, identity, counts, to_ns, duration_ns = self._outgoing.popleft()
            from_ns = to_ns - duration_ns
            own = labels(job)
            data = counts.packed(
                rate_hz=self._config.rate_hz,
                time_ns=from_ns,
                duration_ns=duration_ns,
                labels=lambda _slot, own=own: own,  # type: ignore[misc]
            )
            room -= len(data)
            report.profiles.add(identity=identity, from_ns=from_ns, to_ns=to_ns, pprof=data)
            if counts.folded and job in samples:
                samples[job].unavailable["python"] = _FOLDED

    # ---- those who look

    def watch(self, request: WatchProfileRequest, uid: int | None, jobs: Iterable[Job]) -> ProfileWatch:
        """Begin to gather what `request` asks for, for the user `uid` (None: may see everything).

        Raises UnavailableError where the source is not running, UnknownJobError where there is no such
        job or process (of the user's) among `jobs`, ConfigError for what is no key.
        """
        if self._sampler is None:
            raise UnavailableError("Python stacks are not sampled at the moment; see the agent's log")
        from expanse_ebpf.sources.python_watch import ProfileWatch, wanted

        everybody = list(jobs)
        wants, tree = wanted(request, uid, everybody)
        self._collect()  # what was sampled before is not for this one
        watch = ProfileWatch(wants, tree, uid, self._config.rate_hz, self._collect, self._unwatch)
        self._watches.append(watch)
        past = set(self._overflow)
        self._choose([job for job in everybody if job not in past])
        return watch

    def _unwatch(self, watch: ProfileWatch) -> None:
        if watch in self._watches:
            self._watches.remove(watch)

    def stop(self) -> None:
        """Take everything out of the kernel; safe to call twice."""
        for watch in self._watches:
            watch.over = "the agent has stopped sampling Python stacks"
        self.fd, self.period_s, self._selected = -1, 0.0, None
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None
