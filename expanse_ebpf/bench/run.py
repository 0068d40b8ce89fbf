"""One run of a workload, beside an arm or beside nothing."""

from __future__ import annotations

import itertools
import os
import random
import secrets
import selectors
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path

from expanse_ebpf.bench import collector, machine, peer, usage, workload
from expanse_ebpf.bench.beside import Beside, Job, Seen
from expanse_ebpf.bench.child import Child, tidied, undisturbed
from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.results import Role, Run
from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.jobs import launch

LOOK_S = 0.5  # between looks at the job's memory
_KILL_S = 5.0  # for killed processes to go
_VERSION_S = 10.0


def measure(
    plan: Plan,
    of: Workload,
    arm: Arm,
    *,
    watched: bool,
    closely: bool,
    role: Role,
    pair: int,
    attempt: int,
    position: int,
    expected_s: float | None,
) -> Run:
    """Run the workload `of` once, beside `arm` where it is `watched`, and `closely` at a price.

    `expected_s` is about how long it takes, None where that is not known. What fails of the workload or of
    the arm while it runs is told in the record. Raises UnavailableError when the collector does not come up.
    Nothing that was started is left, whatever is raised meanwhile (Ctrl-C, say).
    """
    name = f"bench-{secrets.token_hex(6)}"
    with tidied() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="expanse-bench-", dir=_spool())))
        beside: Beside | None = None
        if watched:
            beside = stack.enter_context(
                _arm(plan, arm, folder, name, closely=closely, expected_s=expected_s)
            )
        time.sleep(plan.settle_s)
        watch, own_cpu_s = machine.Watch(), time.process_time()
        course = Course(workload.command(of), folder, name, beside, closely=closely)
        course.go(of.limit_s)
        watch.end()
        beside_cpu_s = beside.cpu_s if beside is not None else 0.0
        state = watch.state((course.cpu_s or 0.0) + beside_cpu_s + time.process_time() - own_cpu_s)
        seen = beside.seen(course.job) if beside is not None and not course.failed else Seen()
        seconds, failed = None, course.failed or seen.failed
        if not failed:
            try:
                seconds = workload.seconds(of, course.output, course.wall_s)
            except ValueError as error:
                failed = str(error)
        if course.cpu_s is None:
            seen.missing["job_cpu_s"] = "no cgroup of the job tells it"
        if course.memory_peak_bytes is None:
            seen.missing["job_memory_peak_bytes"] = "the run was over before anybody looked"
        if usage.on_memory(folder):
            _forget_writing(seen, f"{folder.parent} lies in memory: set TMPDIR to a folder on a disk")
    return Run(
        *(of.name, arm.name),
        role=role,
        pair=pair,
        attempt=attempt,
        position=position,
        started_ns=course.job.started_ns,
        seconds=seconds,
        wall_s=course.wall_s,
        state=state,
        job_cpu_s=course.cpu_s,
        job_memory_peak_bytes=course.memory_peak_bytes,
        watched=watched,
        collector=seen.collector,
        controller=seen.controller,
        bpf_s_per_s=seen.bpf_s_per_s,
        samples=seen.samples,
        windows=seen.windows,
        missing=seen.missing,
        failed=failed,
    )


def _spool() -> str | None:
    """Where the folders of runs lie: on a disk, since what the controller writes there is measured."""
    return None if "TMPDIR" in os.environ or not os.access("/var/tmp", os.W_OK) else "/var/tmp"


def _forget_writing(seen: Seen, why: str) -> None:
    for name in ("collector", "controller"):
        part = getattr(seen, name)
        if part is not None:
            setattr(seen, name, replace(part, disk_bytes=None))
            seen.missing[f"{name}.disk_bytes"] = why


def _arm(
    plan: Plan, arm: Arm, folder: Path, job: str, *, closely: bool, expected_s: float | None
) -> AbstractContextManager[Beside]:
    if arm.kind == "command":
        return peer.running(arm, folder, closely=closely)
    return collector.running(plan, arm, folder, job, closely=closely, expected_s=expected_s)


class Course:
    """A job's run from its start to its end, with what runs beside it."""

    def __init__(
        self, command: Sequence[str], folder: Path, name: str, beside: Beside | None, *, closely: bool
    ) -> None:
        self.job = Job(name, 0)
        self.wall_s = 0.0
        self.cpu_s: float | None = None
        self.memory_peak_bytes: int | None = None
        self.output = ""
        self.failed = ""
        self._command, self._file, self._beside = command, folder / "job.log", beside
        self._closely = closely

    def go(self, limit_s: float) -> None:
        """Start the job, and wait for its end or that of its time; none of its processes is left then."""
        with tidied() as stack:
            with undisturbed():
                cgroups = launch.for_root(self.job.name)
                stack.callback(_clear, cgroups)
            try:
                if self._beside is not None:
                    self._beside.begin()
                self.job = self.job._replace(started_ns=time.time_ns())
                began = time.monotonic()
                child = _start(stack, self._command, self._file, cgroups)
                if self._beside is not None:
                    self._beside.started(child.pid)
                self.failed = self._watch(child, cgroups, began, limit_s)
            except (OSError, subprocess.SubprocessError) as error:
                self.failed = f"{self._command[0]} cannot be started: {error}"
                return
            except UnavailableError as error:
                self.failed = str(error)
                return
            self.wall_s = time.monotonic() - began
            self.job = self.job._replace(ended_ns=time.time_ns())
            if self._beside is not None and not self.failed:
                self._beside.end()
            self.cpu_s = usage.cgroup_cpu_s(cgroups.directories)
            if not self.failed and child.wait() != 0:
                self.failed = child.last_words()
            self.output = child.output()

    def _watch(self, child: Child, cgroups: launch.Cgroups, began: float, limit_s: float) -> str:
        """Until the job ends; why the run is worth nothing, if it is not."""
        beside = self._beside.children if self._beside is not None else []
        with selectors.DefaultSelector() as selector:
            for each in (child, *beside):
                selector.register(each.pidfd, selectors.EVENT_READ, each)
            due = began
            while True:
                due += random.uniform(0.5, 1.5) * LOOK_S if self._closely else LOOK_S
                until = min(due, began + limit_s)
                ended = [key.data for key, _ in selector.select(max(0.0, until - time.monotonic()))]
                if child in ended:
                    return ""
                if ended:
                    return f"{ended[0].name} ended before the job: {ended[0].last_words()}"
                if time.monotonic() >= began + limit_s:
                    return f"it took longer than limit_s, {limit_s:g} s"
                memory = usage.anonymous_bytes(launch.pids_of(cgroups.directories[:1]))
                self.memory_peak_bytes = max(memory, self.memory_peak_bytes or 0)
                if self._beside is not None:
                    self._beside.turn(time.monotonic() - began)


def _start(stack: ExitStack, command: Sequence[str], output: Path, cgroups: launch.Cgroups) -> Child:
    with undisturbed():
        child = Child("the job", command, output, join=cgroups.join)
        stack.callback(child.close)
    return child


def _clear(cgroups: launch.Cgroups) -> None:
    """Kill what is in the job's cgroups, and remove them."""
    deadline = time.monotonic() + _KILL_S
    while launch.signal_all(cgroups.directories, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.02)  # some may be forking still
    cgroups.discard(launch.SETTLE_S)


# ---- before a bench


def check(plan: Plan) -> None:
    """Raise an ExpanseError for what would make the plan's runs fail, or be worth nothing."""
    if os.geteuid() != 0:
        raise ConfigError("a bench loads BPF programs and makes cgroups: run it as root")
    others = collectors()
    if others:
        pids = ", ".join(map(str, others))
        raise UnavailableError(
            f"a collector runs on this node already (pid {pids}): the runs beside nothing would not be so; "
            "stop it for the time of the bench"
        )
    for arm in plan.arms:
        if arm.kind == "command":
            peer.program(arm.command[0])
        if arm.kind == "traces_by_rule" and plan.controller:
            raise ConfigError(
                f"arms.{arm.name}: the rules of the controller {plan.controller} are its own: "
                "leave `controller` out of the plan"
            )
    for each in plan.workloads:
        workload.check(each)


def collectors() -> list[int]:
    """Agents of this collector that run on this node, by pid."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (folder / "cmdline").read_bytes()[:4096].split(b"\0")
        except OSError:
            continue
        if is_agent([argument.decode(errors="replace") for argument in arguments]):
            found.append(int(folder.name))
    return sorted(found)


def is_agent(arguments: Sequence[str]) -> bool:
    """Whether a command line is an agent's: `python -m expanse_ebpf agent`, or `expanse-ebpf agent`."""
    for before, argument in itertools.pairwise(arguments):
        if argument == "agent" and (before == "expanse_ebpf" or Path(before).name == "expanse-ebpf"):
            return True
    return False


def tools(plan: Plan) -> dict[str, str]:
    """The programs of the plan's peer arms, and the first line that each says of its version."""
    found = {}
    for arm in plan.arms:
        if arm.kind == "command":
            found[arm.command[0]] = version(peer.program(arm.command[0]))
    return found


def version(path: str) -> str:
    """What a program says of its version; "unknown" where it says nothing."""
    try:
        said = subprocess.run(
            [path, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_VERSION_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = (said.stdout + said.stderr).decode(errors="replace").split("\n")
    return lines[0].strip()[:100] or "unknown"
