"""The collector as an arm: an agent, and a controller beside it unless there is one elsewhere."""

from __future__ import annotations

import json
import os
import select
import signal
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from expanse_ebpf import config
from expanse_ebpf.bench import descriptors, settings, store, usage
from expanse_ebpf.bench.beside import Job, Seen
from expanse_ebpf.bench.child import Child, tidied, undisturbed
from expanse_ebpf.bench.plan import Arm, Plan
from expanse_ebpf.bench.results import Samples, Windows
from expanse_ebpf.errors import ExpanseError, UnavailableError

START_S = 30.0
_STOP_S = 15.0
_AGENT, _CONTROLLER = "the agent", "the controller"
_SHARE = 0.3  # of the run that is traced on request
_COUNT_S = 5.0  # between looks at the probes, in runs that are not watched closely
_FLUSH_S = 15.0  # for the last reports to come into the store, and for a window to end


@contextmanager
def running(
    plan: Plan, arm: Arm, folder: Path, job: str, *, closely: bool, expected_s: float | None
) -> Iterator[Collector]:
    """An agent that reports, for the job run/`job`; ended afterwards.

    Raises UnavailableError with its last line when it does not come up within START_S, and ConfigError for
    settings that it does not take.
    """
    with tidied() as stack:
        deadline = time.monotonic() + START_S
        (folder / "state").mkdir()
        controller, address = None, plan.controller
        if not address:
            controller, address = _controller(stack, arm, folder, deadline)
        window_s = _SHARE * (expected_s or 0.0) if arm.kind == "traces_on_request" else 0.0
        file = folder / "config.toml"
        tables = settings.of_arm(plan, arm, folder, job, address, closely=closely, window_s=window_s)
        file.write_text(settings.toml(tables), "utf-8")
        ready = config.load(file, environment={})
        command = [sys.executable, "-m", "expanse_ebpf", "agent", "--config", str(file)]
        agent = _start(stack, _AGENT, command, folder)
        _wait_for_report(agent, address, job, deadline)
        yield Collector(
            *(arm, job, ready, agent, controller), closely=closely, expected_s=expected_s, window_s=window_s
        )


def _start(
    stack: ExitStack, name: str, command: Sequence[str], folder: Path, pass_fds: tuple[int, ...] = ()
) -> Child:
    # What the environment sets would have its way before the arm's settings.
    prefixes = (*(f"EXPANSE_{table}_".upper() for table in config.TABLES), "NOTIFY_SOCKET", "WATCHDOG_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    output = folder / f"{name.split()[-1]}.log"
    with undisturbed():
        child = Child(name, command, output, environment=environment, pass_fds=pass_fds)
        stack.callback(child.close)
        stack.callback(child.stop, signal.SIGTERM, _STOP_S)
    return child


def _controller(stack: ExitStack, arm: Arm, folder: Path, deadline: float) -> tuple[Child, str]:
    """A controller with a store of its own, and its address."""
    command = [sys.executable, "-m", "expanse_controller", "serve", "--listen", "127.0.0.1:0"]
    command += ["--db", str(folder / "reports.db"), "--parent-death"]
    if arm.kind == "traces_by_rule":
        rules = Path(arm.rules) if arm.rules else folder / "rules.yaml"
        if not arm.rules:
            rules.write_text(settings.RULES, "utf-8")
        command += ["--rules", str(rules)]
    else:
        command.append("--no-rules")
    reader, writer = os.pipe()
    with open(reader, encoding="utf-8") as announcement:
        try:
            child = _start(stack, _CONTROLLER, [*command, "--announce", str(writer)], folder, (writer,))
        finally:
            os.close(writer)
        came, _, _ = select.select([announcement], [], [], max(0.0, deadline - time.monotonic()))
        line = announcement.readline() if came else ""  # empty when it has ended
    if not line:
        raise UnavailableError(f"the controller does not come up: {child.last_line()}")
    return child, str(json.loads(line)["listen"])


def _wait_for_report(agent: Child, address: str, node: str, deadline: float) -> None:
    from expanse_ebpf.ship import remote

    while True:
        if agent.ended:
            raise UnavailableError(f"the agent does not come up: {agent.last_words()}")
        try:
            remote.snapshot(address, node)
            return
        except UnavailableError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"nothing came from the agent to the controller within {START_S:.0f} s ({error}); "
                    f"the agent's last line: {agent.last_line()}"
                ) from None
        select.select([agent.pidfd], [], [], 0.1)


class Collector:
    """An agent at work, and what is seen of it while a job runs: `begin`, some `turn`, `end`, `seen`."""

    def __init__(
        self,
        arm: Arm,
        job: str,
        ready: config.Config,
        agent: Child,
        controller: Child | None,
        *,
        closely: bool,
        expected_s: float | None,
        window_s: float,
    ) -> None:
        self._arm, self._job, self._config = arm, job, ready
        self._agent, self._controller = agent, controller
        self.children = [child for child in (agent, controller) if child is not None]
        self._closely = closely
        self._wish_s = window_s
        self._wish_at_s = (expected_s or 0.0) / 3
        self._address = ready.controller.address
        self._measures = {child.name: usage.Measure(child, network=child is agent) for child in self.children}
        self._ages: list[float] = []
        self._probes: list[int | None] = []
        self._counted = 0.0
        self._programs: dict[str, tuple[int, int]] = {}
        self._request: Request | None = None

    def begin(self) -> None:
        """Just before the job starts."""
        if self._closely:
            self._programs = store.programs(store.newest(self._address, self._job).collector)
        self._count()
        for measure in self._measures.values():
            measure.begin()

    def started(self, pid: int) -> None:
        """The job runs; nothing is started for it."""

    def turn(self, elapsed_s: float) -> None:
        """About twice a second while the job runs."""
        if self._wish_s and self._request is None and elapsed_s >= self._wish_at_s:
            self._request = Request(self._config.agent.socket, f"run/{self._job}", self._wish_s)
        if self._closely:
            for measure in self._measures.values():
                measure.look()
            self._look_at_age()
        if self._closely or elapsed_s > self._counted + _COUNT_S:
            self._counted = elapsed_s
            self._count()

    def end(self) -> None:
        """The job has ended."""
        for measure in self._measures.values():
            measure.end()
        self._count()
        if self._request is not None:
            self._request.over.set()

    @property
    def cpu_s(self) -> float:
        """CPU time that agent and controller took from begin to end."""
        return sum(measure.cpu_s for measure in self._measures.values())

    def seen(self, job: Job) -> Seen:
        """What was seen, once the last of it is in the store."""
        seen = Seen()
        seen.collector = self._measures[_AGENT].usage("collector", seen.missing)
        if self._controller is None:
            seen.missing["controller"] = "it runs elsewhere"
        else:
            seen.controller = self._measures[_CONTROLLER].usage("controller", seen.missing)
            seen.missing["controller.sent_bytes"] = "it answers, and sends nothing of its own"
        try:
            self._wait_for_the_last(job)
            seen.samples = self._samples(job)
            if self._closely:
                seen.bpf_s_per_s = store.run_time(
                    self._programs,
                    store.programs(store.newest(self._address, self._job).collector),
                    (job.ended_ns - job.started_ns) / 1e9,
                )
                if not self._ages:
                    seen.missing["samples.age_median_s"] = "the run was over before anybody looked"
                if seen.bpf_s_per_s is None:
                    seen.missing["bpf_s_per_s"] = "the kernel has measured no BPF program"
            else:
                why = "looked at in the warm-up run alone, since looking costs"
                seen.missing |= dict.fromkeys(("bpf_s_per_s", "samples.age_median_s"), why)
            if self._config.sources.traces:
                self._windows(seen)
        except UnavailableError as error:
            seen.failed = f"the store gives no answer: {error}"
        return seen

    # ---- while the job runs

    def _look_at_age(self) -> None:
        with suppress(UnavailableError):
            report = store.newest(self._address, self._job)
            if any(job.identity.id == self._job for job in report.jobs):
                self._ages.append((time.time_ns() - report.time_ns) / 1e9)

    def _count(self) -> None:
        if self._config.sources.traces:
            self._probes.append(descriptors.probes(usage.tree(self._agent.pid)))

    # ---- afterwards

    def _wait_for_the_last(self, job: Job) -> None:
        """Until a report from after the job's end is stored, and no window of it is open."""
        deadline = time.monotonic() + 2 * self._config.agent.interval_s + _FLUSH_S
        while time.monotonic() < deadline:
            report = store.newest(self._address, self._job)
            going_on = any(window.identity.id == self._job and not window.to_ns for window in report.traces)
            if report.time_ns > job.ended_ns and not going_on:
                break
            time.sleep(0.1)
        if self._request is not None:
            self._request.join(_FLUSH_S)

    def _samples(self, job: Job) -> Samples:
        interval_s = self._config.agent.interval_s
        times = store.series(self._address, f"run/{self._job}", job.started_ns)
        expected, received, gap_s = store.arrived(job.started_ns, job.ended_ns, interval_s, times)
        age_s = statistics.median(self._ages) if self._ages else None
        return Samples(interval_s, expected, received, gap_s, age_s, len(self._ages))

    def _windows(self, seen: Seen) -> None:
        from expanse_ebpf.ship import remote

        found = [t.status for t in remote.traces(self._address, f"run/{self._job}") if t.node == self._job]
        # One that found nothing to probe was open, and saw nothing.
        opened = [status for status in found if status.from_ns and status.targets]
        traced_s = sum(s.traced_share * max(0, s.to_ns - s.from_ns) / 1e9 for s in opened)
        if None in self._probes:
            seen.missing["windows"] = "this kernel (before 6.6) does not tell which links are probes"
        else:
            # Probes that are taken off now and then are hardly met by looking; the trace itself tells.
            most = [n for n in self._probes if n is not None]
            most += [store.points(self._address, status.id, self._job) for status in opened]
            seen.windows = Windows(len(opened), traced_s, max(most))
        if self._arm.kind == "traces_idle":
            if opened or any(self._probes):
                seen.failed = "probes were attached, or a window was open, though nobody asked for one"
        elif not opened:
            reasons = [status.reason for status in found if status.reason]
            refused = self._request.refusal if self._request is not None else ""
            why = refused or (reasons[-1] if reasons else "the run was over before there could be one")
            seen.failed = f"nothing was traced: {why}"


class Request(threading.Thread):
    """Asks the agent for a window, in a thread that waits for it."""

    def __init__(self, socket: str, key: str, seconds: float) -> None:
        super().__init__(daemon=True)
        self.over = threading.Event()
        self.refusal = ""
        self._socket, self._key, self._seconds = socket, key, seconds
        self.start()

    def run(self) -> None:
        """Until the window has ended; the trace itself is not kept."""
        from expanse_ebpf.top import client
        from expanse_ebpf.wire.collector_pb2 import TraceRequest

        # A third into the run the usual share would allow a window of half the length.
        request = TraceRequest(key=self._key, seconds=self._seconds, run_share=1.0)
        try:
            for reply in client.trace(self._socket, request, self.over.is_set):
                if reply.HasField("status") and not reply.status.from_ns:
                    self.refusal = reply.status.reason
        except ExpanseError as error:
            self.refusal = str(error)
