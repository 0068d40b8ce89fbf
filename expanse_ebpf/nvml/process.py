"""The worker as the agent sees it: a process with a pipe for questions and one for answers."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
from collections.abc import Sequence

_COMMAND = ("-EsP", "-m", "expanse_ebpf.nvml.worker")
_PIPE = 1 << 20  # bytes of answers that wait for a tick
_MOST = 8 << 20  # bytes read in one tick, and of one line


class Process:
    """A worker with these arguments, begun now. Raises OSError when that cannot be."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self._data = b""
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            their_in, self._questions = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, their_in)
            ours.callback(os.close, self._questions)
            self._answers, their_out = os.pipe2(os.O_CLOEXEC)
            theirs.callback(os.close, their_out)
            ours.callback(os.close, self._answers)
            with contextlib.suppress(OSError):  # the user's pipes are at their limit: the usual size will do
                fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE)
            os.set_blocking(self._answers, False)
            os.set_blocking(self._questions, False)
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, *_COMMAND, "--parent", str(os.getpid()), *arguments],
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, their_in, 0), (os.POSIX_SPAWN_DUP2, their_out, 1)],
                setpgroup=0,  # a Ctrl-C is for the agent
                setsigmask=[],
                setsigdef=[signal.SIGTERM, signal.SIGINT],
            )
            ours.pop_all()

    def ask(self, question: bytes) -> None:
        """Send one line, or nothing: a worker that has ended or takes no more is found out by its silence."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._questions, question)

    def answers(self) -> list[bytes]:
        """The whole lines that have come; never waits."""
        parts = [self._data]
        size = 0
        while size < _MOST:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            size += len(data)
            parts.append(data)
        *lines, rest = b"".join(parts).split(b"\n")
        self._data = rest if len(rest) <= _MOST else b""
        return lines

    def ended(self) -> str:
        """How it has ended, e.g. "with signal 11"; empty while it runs."""
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return ""
            self.kill()  # what the library has begun, while its number is the group's for certain
            _, status = os.waitpid(self.pid, 0)
        except ChildProcessError:  # somebody else has waited for it
            return "unseen"
        return f"with signal {status & 0x7F}" if status & 0x7F else f"with status {status >> 8}"

    def close(self) -> None:
        """Let it end: it does when there can be no more questions."""
        for fd in (self._questions, self._answers):
            if fd >= 0:
                os.close(fd)
        self._questions = self._answers = -1

    def kill(self) -> None:
        """End it and what it has begun, unless it hangs in the kernel; before ended() says that it has."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
