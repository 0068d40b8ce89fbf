"""Real windows on the programs of tests/stand_ins, as the agent begins them."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from expanse_ebpf.jobs.hierarchies import mounted, numbers
from expanse_ebpf.tracing.settings import WindowSettings
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    Trace,
    TraceReply,
    TraceState,
    TraceStatus,
)
from tests.python_stacks.driver import Jobs

_LENGTH = struct.Struct(">I")


@dataclass
class Window:
    """A window's process and what it has said."""

    process: subprocess.Popen[bytes]
    statuses: list[TraceStatus] = field(default_factory=list)
    data: bytes = b""

    def replies(self) -> Iterator[TraceReply]:
        """What it says, until its end."""
        out = self.process.stdout
        assert out is not None
        while head := out.read(_LENGTH.size):
            reply = TraceReply.FromString(out.read(*_LENGTH.unpack(head)))
            if reply.HasField("status"):
                self.statuses.append(reply.status)
            else:
                self.data += reply.part.data
            yield reply

    def until(self, done: Callable[[TraceStatus], bool]) -> TraceStatus:
        """The first status of which that is so."""
        for _ in self.replies():
            if self.statuses and done(self.statuses[-1]):
                return self.statuses[-1]
        raise AssertionError(f"it ended before: {self.statuses[-1:]}")

    def until_open(self, targets: int = 0) -> TraceStatus:
        """Its status when probes are in place, in so many processes at least."""
        return self.until(
            lambda s: s.state == TRACE_STATE_OPEN and s.targets >= targets and s.traced_share > 0
        )

    def stop(self) -> None:
        """Have it end now."""
        assert self.process.stdin is not None
        self.process.stdin.close()

    def end(self, *, stop: bool = False) -> Trace:
        """Its trace, once it has ended; an empty one where it made none."""
        if stop:
            self.stop()
        for _ in self.replies():
            pass
        assert self.process.wait() == 0
        return Trace.FromString(zlib.decompress(self.data)) if self.data else Trace()

    @property
    def last(self) -> TraceStatus:
        return self.statuses[-1]

    @property
    def state(self) -> str:
        return TraceState.Name(self.last.state).removeprefix("TRACE_STATE_").lower()


class Node:
    """Jobs, and windows on them."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs
        self.open: list[Window] = []

    def job(self, name: str = "a") -> Path:
        """The cgroup of a new job."""
        group, slot = self.jobs.make(name)
        self._slots = {**getattr(self, "_slots", {}), group: slot}
        return group

    def settings(self, group: Path, **options: object) -> WindowSettings:
        unified = next(h for h in mounted() if h.name == "unified")
        cgroup = unified.path(str(group))
        assert cgroup is not None
        number = next(number for number, name in numbers().items() if name == "unified")
        maps = self.jobs.lifecycle.maps
        settings = WindowSettings(
            "0123456789abcdef", self._slots[group], "unified", number, cgroup,
            maps["slots"].fd, maps["totals"].fd, seconds=60.0, cost_share=1.0,
        )  # fmt: skip
        return replace(settings, **options)  # type: ignore[arg-type]

    def window(self, group: Path, **options: object) -> Window:
        """A window on the job, begun now. It lasts until it is stopped, and may cost what it does."""
        settings = self.settings(group, **options)
        fds = (settings.slots_fd, settings.totals_fd)
        for fd in fds:
            os.set_inheritable(fd, True)
        process = subprocess.Popen(
            [sys.executable, "-m", "expanse_ebpf.tracing.window", settings.dumps()],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=fds,
        )  # fmt: skip
        window = Window(process)
        self.open.append(window)
        return window

    def close(self) -> None:
        for window in self.open:
            if window.process.poll() is None:
                window.process.kill()
            window.process.wait()
            for stream in (window.process.stdin, window.process.stdout):
                assert stream is not None
                stream.close()


@contextlib.contextmanager
def node() -> Iterator[Node]:
    """A node, until the end of the block."""
    jobs = Jobs()
    made = Node(jobs)
    try:
        yield made
    finally:
        made.close()
        jobs.close()


def into(group: Path) -> Callable[[], None]:
    """For Popen's preexec_fn: the program begins in that cgroup."""
    procs = str(group / "cgroup.procs")

    def enter() -> None:
        with open(procs, "w") as file:
            file.write("0")

    return enter


def calls(trace: Trace) -> dict[str, int]:
    """Calls by function, as counted in the kernel."""
    found: Counter[str] = Counter()
    for total in trace.totals:
        found[total.function] += total.calls
    return {function: count for function, count in found.items() if count}


def events(trace: Trace) -> dict[str, int]:
    """The same, as told one by one."""
    found = Counter(trace.functions[index] for index in trace.events.function)
    return dict(found)


__all__ = ["TRACE_STATE_DONE", "Node", "Window", "calls", "events", "into", "node"]
