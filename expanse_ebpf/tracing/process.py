"""A window's process as the agent sees it: begun, listened to and ended without ever waiting for it.

Both ways go frames: 4 bytes of length, big-endian, and a message; TraceReply comes from it, Trace goes to it.
It ends its window when it can get no more, and itself when it has told of that.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import signal
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from expanse_ebpf.text import clean
from expanse_ebpf.tracing.settings import WindowSettings
from expanse_ebpf.wire.collector_pb2 import Trace, TraceReply

COMMAND = (sys.executable, "-EsP", "-m", "expanse_ebpf.tracing.window")
LENGTH = struct.Struct(">I")
MOST_FRAME = 1 << 20  # bytes of one message
TERM_S, KILL_S = 5.0, 30.0  # from stop() to SIGTERM, and to SIGKILL
_MOST_READ = 2 << 20  # bytes in one call: the next report waits meanwhile
_MOST_PENDING = 1 << 20  # bytes that it has not taken
_MOST_LINES, _MOST_LINE = 100, 400  # in the log; characters
_SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED: the CPU time that a process has run for
_FIRST_COPY = 10  # of descriptors: above those that are put in place by number

_log = logging.getLogger(__name__)


class WindowProcess:
    """A window's process, begun now; raises OSError when that cannot be.

    The two maps in `settings` are the agent's descriptors; the process gets copies. `command` is what is run,
    with the settings as one more argument. `answers` and `errors` are to be looked at when they are readable.
    """

    def __init__(self, settings: WindowSettings, command: Sequence[str] = COMMAND) -> None:
        self.broken = ""  # what was wrong with what it said; nothing more is read then
        self.at_end = False  # it will say no more
        self.last_words = ""  # the newest line that it has written for the log
        self._id = settings.id
        self._data = bytearray()
        self._line = b""
        self._lines = 0
        self._pending = bytearray()
        self._stopped: float | None = None  # monotonic time
        self._terminated = False
        self._how = ""
        self._cpu_ns = 0
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            their_in, self._questions = _pipe(theirs, ours)
            self.answers, their_out = _pipe(ours, theirs)
            self.errors, their_err = _pipe(ours, theirs)
            for fd in (self._questions, self.answers, self.errors):
                os.set_blocking(fd, False)
            copies = []
            for fd in (settings.slots_fd, settings.totals_fd):
                copies.append(fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_COPY))  # inherited, as others are not
                theirs.callback(os.close, copies[-1])
            told = replace(settings, slots_fd=copies[0], totals_fd=copies[1])
            self.pid = os.posix_spawn(
                command[0],
                [*command, told.dumps()],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_DUP2, their_in, 0),
                    (os.POSIX_SPAWN_DUP2, their_out, 1),
                    (os.POSIX_SPAWN_DUP2, their_err, 2),
                ],
                setpgroup=0,  # a Ctrl-C is for the agent, and what it begins ends with it
                setsigmask=[],
                setsigdef=[signal.SIGTERM, signal.SIGINT, signal.SIGPIPE],
            )
            ours.pop_all()

    # ---- what it says

    def read(self) -> Iterator[TraceReply]:
        """What it has said since the last time; never waits. `broken` and `at_end`: no more can come."""
        size = 0
        while size < _MOST_READ and not self.at_end and not self.broken and self.answers >= 0:
            try:
                data = os.read(self.answers, 1 << 16)
            except BlockingIOError:
                return
            self.at_end = not data
            size += len(data)
            self._data += data
            yield from self._frames()
        if self.at_end and self._data and not self.broken:
            self.broken = "has said half a message"

    def _frames(self) -> Iterator[TraceReply]:
        while len(self._data) >= LENGTH.size and not self.broken:
            (length,) = LENGTH.unpack_from(self._data)
            if length > MOST_FRAME:
                self.broken = f"has announced a message of {length} bytes"
                return
            end = LENGTH.size + length
            if len(self._data) < end:
                return
            body = bytes(self._data[LENGTH.size : end])
            del self._data[:end]
            try:
                yield TraceReply.FromString(body)
            except DecodeError:
                self.broken = "has said something that is no TraceReply"

    def read_errors(self) -> bool:
        """Pass what it has written for the log on; whether there will be more."""
        if self.errors < 0:
            return False
        try:
            data = os.read(self.errors, 1 << 14)
        except BlockingIOError:
            return True
        *lines, self._line = (self._line + (data or b"\n")).split(b"\n")
        if len(self._line) > 4 * _MOST_LINE:
            lines, self._line = [*lines, self._line], b""
        for line in filter(None, lines):
            self.last_words = clean(line, _MOST_LINE)
            self._lines += 1
            if self._lines <= _MOST_LINES:
                _log.info("window %s: %s", self._id, self.last_words)
            elif self._lines == _MOST_LINES + 1:
                _log.info("window %s: says too much; the rest is left out", self._id)
        return bool(data)

    # ---- what it is told

    def tell(self, trace: Trace) -> bool:
        """Send `trace`, as far as it goes now, the rest by flush(). False: too much waits, it is left out."""
        body = trace.SerializeToString()
        if len(body) > MOST_FRAME or len(self._pending) + len(body) > _MOST_PENDING or self._questions < 0:
            return False
        self._pending += LENGTH.pack(len(body)) + body
        self.flush()
        return True

    def flush(self) -> None:
        """Send what waits, as far as it goes now."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            while self._pending and self._questions >= 0:
                del self._pending[: os.write(self._questions, self._pending)]

    # ---- its end

    def stop(self) -> None:
        """Have it end its window now. What it says goes on until it is done; see press()."""
        if self._questions >= 0:
            os.close(self._questions)
            self._questions = -1
            self._stopped = time.monotonic()

    def press(self, now: float) -> str:
        """Of one that was stopped: remind it after a while, kill it after more; why it was killed, if so."""
        if self._stopped is None:
            return ""
        if not self._terminated and now - self._stopped > TERM_S:
            self._terminated = True
            self._signal(signal.SIGTERM)
        if now - self._stopped > KILL_S:
            self.kill()
            return f"did not end within {KILL_S:g} s of being told to"
        return ""

    def kill(self) -> None:
        """End it and what it has begun, unless it hangs in the kernel."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if not self._how:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def ended(self) -> str:
        """How it has ended, e.g. "with signal 9"; empty while it runs. What it has begun ends with it."""
        if self._how:
            return self._how
        try:
            if os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return ""
            self.kill()  # what it has begun, while its number is the group's for certain
            _, status, usage = os.wait4(self.pid, 0)
        except ChildProcessError:  # somebody else has waited for it
            self._how = "unseen"
            return self._how
        self._cpu_ns = max(self._cpu_ns, round((usage.ru_utime + usage.ru_stime) * 1e9))
        self._how = f"with signal {status & 0x7F}" if status & 0x7F else f"with status {status >> 8}"
        return self._how

    def close(self) -> None:
        """Let go of the pipes; safe to call twice. One that runs finds its window's end in that."""
        for fd in (self._questions, self.answers, self.errors):
            if fd >= 0:
                os.close(fd)
        self._questions = self.answers = self.errors = -1

    # ---- what it costs

    @property
    def cpu_ns(self) -> int:
        """CPU time that it has used, with what it has begun once that is over."""
        if not self._how:
            with contextlib.suppress(OSError):
                self._cpu_ns = max(self._cpu_ns, time.clock_gettime_ns((~self.pid << 3) | _SCHEDULER_CLOCK))
        return self._cpu_ns

    @property
    def pss_bytes(self) -> int | None:
        """Its memory; None: not known, or it has ended."""
        try:
            with open(f"/proc/{self.pid}/smaps_rollup", "rb", buffering=0) as file:
                lines = file.read(4096).splitlines()
        except OSError:
            return None
        found = [line.split()[1] for line in lines if line.startswith(b"Pss:")]
        return int(found[0]) * 1024 if found else None


def _pipe(reads: contextlib.ExitStack, writes: contextlib.ExitStack) -> tuple[int, int]:
    """A pipe's ends, each to be closed by the one whose it is."""
    reader, writer = os.pipe2(os.O_CLOEXEC)
    reads.callback(os.close, reader)
    writes.callback(os.close, writer)
    return reader, writer
