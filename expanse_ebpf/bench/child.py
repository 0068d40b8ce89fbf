"""Processes that the kit starts: the job, collectors, other programs. None outlives its run."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_MOST_OUTPUT = 1 << 20
_INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP wait until this is over."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    came: list[int] = []
    before = {n: signal.signal(n, lambda number, _: came.append(number)) for n in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        if came:
            signal.raise_signal(came[0])


@contextmanager
def tidied() -> Iterator[ExitStack]:
    """A stack that is unwound whatever happens, and whole, however often Ctrl-C is pressed."""
    stack = ExitStack()
    try:
        yield stack
    finally:
        with undisturbed():
            stack.close()


class Child:
    """A process in a session of its own, which a terminal's Ctrl-C does not reach.

    What it prints goes to the file `output`. Its figures in /proc stay readable until `wait` or `stop`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        output: Path,
        *,
        join: Callable[[], None] | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Start it; `join` is called in the child first. Raises OSError and subprocess.SubprocessError."""
        self.name = name
        self._output = output
        libc = ctypes.CDLL(None)  # loaded before the fork: the child should do as little as it can

        def become() -> None:
            libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell may have had it ignored
            if join is not None:
                join()

        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=environment,
                pass_fds=pass_fds,
                start_new_session=True,
                preexec_fn=become,
            )
        self.pid = self._process.pid
        self.pidfd = os.pidfd_open(self.pid)  # readable once it has ended

    @property
    def ended(self) -> bool:
        """Whether it has; it stays in /proc."""
        if self._process.returncode is not None:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def wait(self) -> int:
        """Its exit code, or the negative number of the signal that ended it, once it has ended."""
        return self._process.wait()

    def stop(self, number: signal.Signals, patience_s: float) -> int:
        """End it and its process group by the signal, by SIGKILL after `patience_s` seconds; as `wait`."""
        if self._process.returncode is None:
            # Until it is waited for, even ended, its number is nobody else's.
            os.killpg(self.pid, number)
            select.select([self.pidfd], [], [], patience_s)
            os.killpg(self.pid, signal.SIGKILL)
        return self._process.wait()

    def close(self) -> None:
        """Kill it where it still runs, and forget it; safe to call twice."""
        self.stop(signal.SIGKILL, 0)
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def output(self) -> str:
        """The end of what it has printed."""
        with open(self._output, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_OUTPUT))
            return file.read(_MOST_OUTPUT).decode(errors="replace")

    def last_line(self) -> str:
        """The last line that it has printed, at most 300 characters of it."""
        lines = [line.strip() for line in self.output().splitlines() if line.strip()]
        return lines[-1][-300:] if lines else "it said nothing"

    def last_words(self) -> str:
        """How it ended and its last line, for a message. It must have ended."""
        code = self.wait()
        how = f"exit code {code}" if code >= 0 else f"ended by {_signal_name(-code)}"
        return f"{how}: {self.last_line()}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
