"""A sampler that is driven as an agent does it, over programs that a test starts."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from expanse_ebpf.jobs.hierarchies import numbers
from expanse_ebpf.kernel.lifecycle import Event, Lifecycle
from expanse_ebpf.python_stacks.sampler import Frame, Sampler, Stack
from tests.kernel.groups import Groups

_JOINING = 'echo $$ > "$0/cgroup.procs" && exec "$@"'


class Program:
    """A process, and what it writes to its standard output."""

    def __init__(
        self,
        command: Sequence[str],
        group: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        session: bool = False,
    ) -> None:
        """`group` is a cgroup. A `session` of its own is to the scheduler one program among others."""
        if group is not None:
            command = ["sh", "-c", _JOINING, str(group), *command]
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            env={**os.environ, **(environment or {})},
            # Of its own, so that what it forks can be ended with it.
            process_group=None if session else 0,
            start_new_session=session,
        )
        self.pid = self.process.pid

    def lines(self) -> list[str]:
        """The lines that it has written so far."""
        text = os.pread(self._output.fileno(), 1 << 20, 0).decode()
        return text[: text.rfind("\n") + 1].splitlines()

    @property
    def ready(self) -> bool:
        """Whether it has written its first line."""
        return bool(self.lines())

    @property
    def words(self) -> list[str]:
        """Its first line, without the pid."""
        return self.lines()[0].split()[1:]

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def cpu_s(self) -> float:
        """CPU time of all its threads so far (seconds)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        """End it and its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, 9)
        self.process.wait()
        self._output.close()


class Driver:
    """A sampler and all that it has counted."""

    def __init__(
        self,
        *,
        rate_hz: int = 99,
        waits_hz: int = 0,
        lifecycle: Lifecycle | None = None,
        drain_s: float = 0.5,
    ) -> None:
        self.sampler = Sampler(rate_hz=rate_hz, waits_hz=waits_hz, lifecycle=lifecycle)
        self.samples: Counter[Stack] = Counter()
        self.ns: Counter[Stack] = Counter()
        # Samples and visits that have a stack, by pid.
        self.running: Counter[int] = Counter()
        self.waiting: Counter[int] = Counter()
        self.total: Counter[int] = Counter()  # samples on a CPU by slot, those that were forgotten included
        self.programs: list[Program] = []
        self._lifecycle = lifecycle
        self._drain_s = drain_s
        self._visit_s = 1 / waits_hz if waits_hz else float("inf")
        self._next_drain = self._next_visit = time.monotonic()

    def stop_visits(self) -> None:
        """Leave visits to the test."""
        self._next_visit = float("inf")

    def start(
        self,
        command: Sequence[str],
        group: Path | None = None,
        environment: Mapping[str, str] | None = None,
        *,
        session: bool = False,
    ) -> Program:
        """Start a program, selected by its pid where there are no jobs."""
        program = Program(command, group, environment, session=session)
        self.programs.append(program)
        if self._lifecycle is None:
            self.sampler.select_pid(program.pid)
        return program

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> bool:
        """Go on for so long, or until then; whether that was reached."""
        end = time.monotonic() + seconds
        while (now := time.monotonic()) < end:
            if until():
                return True
            wake = min(self._next_drain, self._next_visit, end, now + 0.05)
            if select.select([self.sampler.fd], [], [], max(0, wake - now))[0]:
                self.sampler.consume()
            if self._lifecycle is not None:
                self._lifecycle.consume()
            if time.monotonic() >= self._next_visit:
                self.sampler.visit()
                self._next_visit = time.monotonic() + self._visit_s
            if time.monotonic() >= self._next_drain:
                self.drain()
                self._next_drain = time.monotonic() + self._drain_s
        return until()

    def until_ready(self, *programs: Program, seconds: float = 60) -> None:
        """Go on until these, or all, have written their first line."""
        waited = programs or self.programs
        self.run(seconds, lambda: all(each.ready or each.ended for each in waited))
        for program in waited:
            assert program.ready, f"not a word from {program.process.args!r}"

    def until_ended(self, *programs: Program, seconds: float = 60) -> None:
        """Go on until these, or all, have ended; then drain."""
        waited = programs or self.programs
        assert self.run(seconds, lambda: all(each.ended for each in waited))
        self.drain()

    def drain(self) -> None:
        for stack, samples, ns in self.sampler.drain():
            assert samples >= 0
            assert ns >= 0
            self.samples[stack] += samples
            self.ns[stack] += ns
            if not stack.unresolved:
                (self.waiting if stack.waiting else self.running)[stack.pid] += samples
            if not stack.waiting:
                self.total[stack.slot] += samples

    def forget(self) -> None:
        """Leave out of the counts what was counted so far."""
        self.drain()
        for counts in (self.samples, self.ns, self.running, self.waiting):
            counts.clear()

    # ---- what was counted

    def seen(
        self, pid: int | None = None, *, waiting: bool = False, slot: int | None = None
    ) -> Counter[Stack]:
        """Samples (of a process, of a job) by stack, resolved ones."""
        return Counter(
            {
                stack: samples
                for stack, samples in self.samples.items()
                if samples
                and not stack.unresolved
                and stack.waiting == waiting
                and pid in (None, stack.pid)
                and slot in (None, stack.slot)
            }
        )

    def unresolved(self, slot: int = 0, *, waiting: bool = False) -> Counter[str]:
        """Samples without a stack, by reason."""
        found: Counter[str] = Counter()
        for stack, samples in self.samples.items():
            if stack.unresolved and stack.waiting == waiting and stack.slot == slot:
                found[stack.unresolved] += samples
        return found

    def close(self) -> None:
        self.sampler.close()
        for program in self.programs:
            program.close()


class Jobs:
    """Jobs as an agent has them: cgroups with slots."""

    def __init__(self) -> None:
        self.groups = Groups()
        self.events: list[Event] = []
        number = next(number for number, name in numbers().items() if name == "unified")
        self.lifecycle = Lifecycle("unified", number, self.events.append)

    def make(self, name: str = "a") -> tuple[Path, int]:
        """A job's cgroup, and its slot."""
        group = self.groups.make(name=name)
        slot = self.lifecycle.take()
        self.lifecycle.assign(group.stat().st_ino, slot)
        return group, slot

    def close(self) -> None:
        self.lifecycle.close()
        self.groups.close()


@contextlib.contextmanager
def driving(**options: int | float | Lifecycle | None) -> Iterator[Driver]:
    """A driver, until the end of the block."""
    driver = Driver(**options)  # type: ignore[arg-type]
    try:
        yield driver
    finally:
        driver.close()


@contextlib.contextmanager
def jobs_of_a_node(**options: int | float) -> Iterator[tuple[Jobs, Driver]]:
    """Jobs and a driver that looks at them."""
    jobs = Jobs()
    try:
        with driving(lifecycle=jobs.lifecycle, **options) as driver:
            yield jobs, driver
    finally:
        jobs.close()


def names(stack: Stack) -> tuple[str, ...]:
    """The functions of a stack, from the outermost."""
    return tuple(frame.name for frame in reversed(stack.frames))


def places(stack: Stack) -> tuple[tuple[str, int | None], ...]:
    """Functions and lines of a stack, from the outermost."""
    return tuple((frame.name, frame.line) for frame in reversed(stack.frames))


def by(key: Callable[[Stack], object], counts: Mapping[Stack, int]) -> Counter[object]:
    """Samples added up by what `key` makes of their stacks."""
    found: Counter[object] = Counter()
    for stack, samples in counts.items():
        found[key(stack)] += samples
    return found


def leaves(counts: Mapping[Stack, int]) -> Counter[object]:
    """Samples by the name of the innermost function."""
    return by(lambda stack: stack.frames[0].name, counts)


def frames(counts: Iterable[Stack]) -> set[Frame]:
    """All frames of the stacks."""
    return {frame for stack in counts for frame in stack.frames}
