"""Another program as an arm: py-spy, austin, or whatever the plan says."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from expanse_ebpf.bench.beside import Job, Seen
from expanse_ebpf.bench.child import Child, tidied, undisturbed
from expanse_ebpf.bench.plan import Arm
from expanse_ebpf.bench.usage import Measure
from expanse_ebpf.errors import UnavailableError

_STOP_S = 15.0  # to write what it has found, once the job has ended


def program(name: str) -> str:
    """The path of a program: beside this Python, where `pip` puts them, or on the PATH.

    Raises UnavailableError where there is none.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which(name, path=beside) or shutil.which(name)
    if found is None:
        raise UnavailableError(f"{name}: not found beside {sys.executable} and on the PATH: install it")
    return found


@contextmanager
def running(arm: Arm, folder: Path, *, closely: bool) -> Iterator[Peer]:
    """The program, which starts once the job runs; it has ended afterwards."""
    with tidied() as stack:
        peer = Peer(arm, folder, closely=closely)
        stack.callback(peer.close)
        yield peer


class Peer:
    """A program beside the job, and what is seen of it; the methods are those of `collector.Collector`."""

    def __init__(self, arm: Arm, folder: Path, *, closely: bool) -> None:
        self.children: list[Child] = []
        self._arm, self._closely = arm, closely
        self._output, self._folder = folder / "peer.log", folder / "peer"
        self._folder.mkdir()
        self._measure: Measure | None = None

    def begin(self) -> None:
        """Just before the job starts."""

    def started(self, pid: int) -> None:
        """The job runs, as `pid`; raises UnavailableError when the program cannot be started."""
        values = {"{pid}": str(pid), "{folder}": str(self._folder)}
        command = [program(self._arm.command[0]), *self._arm.command[1:]]
        for name, value in values.items():
            command = [part.replace(name, value) for part in command]
        with undisturbed():
            try:
                child = Child(self._arm.command[0], command, self._output)
            except (OSError, subprocess.SubprocessError) as error:
                raise UnavailableError(f"{self._arm.command[0]} cannot be started: {error}") from None
            self.children.append(child)
        self._measure = Measure(child, network=True)

    def turn(self, elapsed_s: float) -> None:
        """About twice a second while the job runs."""
        if self._closely and self._measure is not None:
            self._measure.look()

    def end(self) -> None:
        """The job has ended."""
        if self._measure is not None:
            self._measure.end()

    @property
    def cpu_s(self) -> float:
        """CPU time that it took until the job's end."""
        return self._measure.cpu_s if self._measure is not None else 0.0

    def seen(self, job: Job) -> Seen:
        """What was seen, once the program has ended."""
        seen = Seen()
        if self._measure is None:
            return seen
        (child,) = self.children
        seen.collector = self._measure.usage("collector", seen.missing)
        told = not child.ended
        code = child.stop(signal.SIGINT, _STOP_S)
        if told and code == -signal.SIGKILL:
            seen.failed = f"{child.name} did not end within {_STOP_S:.0f} s of SIGINT: {child.last_line()}"
        elif not told and code != 0:
            seen.failed = f"{child.name} failed: {child.last_words()}"
        return seen

    def close(self) -> None:
        """End it where it still runs."""
        for child in self.children:
            child.close()
