"""The agent's side of the worker: starts it, asks it once a tick, never waits for it.

A question says when to look: a little before the next tick. What has been answered by then is in that
tick's report; what has not is missing there, with the reason. A worker that is silent past the deadline is
ended and begun anew, less and less often; so is one that cannot begin with NVML, which is how a driver that
is loaded or upgraded later is noticed: each worker loads the library that is there now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from expanse_ebpf.nvml import reasons
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import NvmlStatus

if TYPE_CHECKING:
    from expanse_ebpf.config import GpuConfig

_log = logging.getLogger(__name__)
# One of these is there once the driver is loaded, on WSL and Tegra too.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
_FIRST_S, _LONGEST_S = 1.0, 60.0  # between two beginnings of a worker that fails
_REINIT_S = 5.0  # how long all devices must fail for a worker to be begun anew
_PIPE = 1 << 20  # bytes of answers that wait for a tick
_MOST = 8 << 20  # bytes read in one tick
_END_S = 0.3  # how long its end is waited for, and then again after SIGKILL
_MARGIN_S = 0.02
_STARTING = ("starting", "NVML has not answered yet")


class Client:
    """One worker at a time. `interval_s`: between two calls of `tick`."""

    def __init__(self, config: GpuConfig, interval_s: float) -> None:
        self.status = NvmlStatus()
        self._config = config
        self._interval_s = interval_s
        self._pid = 0  # 0: no worker
        self._killed = False  # it was, and has not ended yet
        self._questions = self._answers = -1  # our ends of its pipes
        self._data = b""
        self._round = 0
        self._at: float | None = None  # when the question that is not fully answered was to be looked at
        self._order: list[str] = []  # devices of that question that have not answered yet
        self._hung: set[str] = set()  # devices at which a worker hung: asked last
        self._seen_us: dict[str, int] = {}
        self._took_s = 0.1
        self._delay_s = _FIRST_S
        self._next_begin = 0.0  # monotonic time
        self._began = 0.0
        self._reinit_s = _REINIT_S
        self._failing_since: float | None = None
        self._ended_cpu_ns = 0  # of workers that are gone
        self._own_cpu_ns = 0
        self._present = False
        self._failed_to_begin = False
        self._failures: list[int] = []  # NVML's errors for whole devices in the present round
        self._answered = False  # whether any device has answered in it
        self.absent: dict[str, int] = {}  # NVML's error by "index N" of devices that it gives no handle of
        self.listed: frozenset[str] | None = None  # UUIDs of those that it does; None: not known now
        self.status.code, self.status.reason = _STARTING

    @property
    def present(self) -> bool:
        """Whether there is anything to ask: a driver on this node, or a library that was configured."""
        return bool(self._config.library) or any(os.path.exists(file) for file in _DRIVER_FILES)  # noqa: PTH110

    def tick(self, now: float, by_process: Collection[str] = ()) -> Iterator[dict[str, Any]]:
        """The lines of devices and events that have come since the last call; then asks anew.

        `by_process`: UUIDs of GPUs of which it is wanted how busy each process keeps them.
        """
        present = self.present
        if present and not self._present:  # it appeared just now
            self._delay_s, self._next_begin = _FIRST_S, 0.0
        self._present = present
        if self._pid and not self._killed:
            yield from self._lines(now)  # before its end is seen: these may be its last words
        self._reap(now)
        late = self._at is not None and now - self._at > self._config.deadline_s
        if self._pid and not self._killed and late:
            self._hang(now)
        if self._pid == 0 and present and now >= self._next_begin:
            self._start(now)
        if self._pid and not self._killed and self._at is None:
            self._ask(now, by_process)
        self.status.cpu_ns = self._ended_cpu_ns + self._own_cpu_ns

    @property
    def waiting_for(self) -> list[str]:
        """Devices that have not answered the last question yet, in the order in which they are asked."""
        return self._order

    # ---- the process --------------------------------------------------------------------------------

    def _start(self, now: float) -> None:
        arguments = [sys.executable, "-EsP", "-m", "expanse_ebpf.nvml.worker"]
        arguments += ["--profiler"] if self._config.profiler else []
        if self._config.library:
            if not Path(self._config.library).exists():
                self._down(now, "library_not_found", f"there is no {self._config.library}")
                return
            arguments += ["--library", self._config.library]
        their_in, self._questions = os.pipe2(os.O_CLOEXEC)
        self._answers, their_out = os.pipe2(os.O_CLOEXEC)
        with contextlib.suppress(OSError):  # the user's pipes are at their limit: the usual size will do
            fcntl.fcntl(self._answers, fcntl.F_SETPIPE_SZ, _PIPE)
        os.set_blocking(self._answers, False)
        os.set_blocking(self._questions, False)
        try:
            self._pid = os.posix_spawn(
                sys.executable,
                arguments,
                os.environ,
                file_actions=[(os.POSIX_SPAWN_DUP2, their_in, 0), (os.POSIX_SPAWN_DUP2, their_out, 1)],
                setpgroup=0,  # a Ctrl-C is for the agent
                setsigdef=[signal.SIGTERM, signal.SIGINT],
            )
        except OSError as error:
            self._close()
            self._down(now, "worker_failed", f"the process that asks NVML cannot be begun: {error.strerror}")
            return
        finally:
            os.close(their_in)
            os.close(their_out)
        self._data, self._at, self._order = b"", None, []
        self._began = now
        self._failed_to_begin = False

    def _reap(self, now: float) -> None:
        """See whether the worker has ended."""
        if not self._pid:
            return
        try:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has waited for it
            pid, status = self._pid, 0
        if not pid:
            return
        killed = self._killed
        self._close()
        self._ended_cpu_ns += self._own_cpu_ns
        self._own_cpu_ns = 0
        self._pid, self._killed, self._at, self._order = 0, False, None, []
        if killed or self._failed_to_begin:
            return
        how = f"signal {status & 0x7F}" if status & 0x7F else f"status {status >> 8}"
        self._down(now, "worker_died", f"the process that asks NVML ended with {how}")

    def _close(self) -> None:
        for fd in (self._questions, self._answers):
            if fd >= 0:
                os.close(fd)
        self._questions = self._answers = -1

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        self._killed = True
        self._at = None

    def _hang(self, now: float) -> None:
        about = f" about {self._order[0]}" if self._order else ""
        if self._order:
            self._hung.add(self._order[0])
        self._down(now, "hung", f"NVML has not answered{about} for {self._config.deadline_s:g} s")
        self._kill()

    def _down(self, now: float, code: str, reason: str) -> None:
        """NVML cannot be asked; said once for as long as it stays the same."""
        if self.status.code != code:
            _log.warning("no GPU figures: %s", reason)
        self.status.up, self.status.code, self.status.reason = False, code, clean(reason)
        self.listed, self.absent = None, {}
        self._next_begin = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_S)
        self.status.restarts += 1

    def stop(self) -> None:
        """End the worker; one that hangs in the kernel is left behind."""
        if not self._pid:
            return
        self._close()
        for last in (False, True):
            until = time.monotonic() + _END_S
            while time.monotonic() < until:
                try:
                    if os.waitpid(self._pid, os.WNOHANG)[0]:
                        self._pid = 0
                        return
                except ChildProcessError:
                    self._pid = 0
                    return
                time.sleep(0.01)
            if not last:
                self._kill()
        _log.warning("the process that asks NVML, %d, cannot be ended: it hangs in the driver", self._pid)
        self._pid = 0

    # ---- questions and answers ------------------------------------------------------------------------

    def _ask(self, now: float, by_process: Collection[str]) -> None:
        self._round += 1
        lead = min(1.5 * self._took_s + _MARGIN_S, self._interval_s / 2)
        first = self._began == now
        at = now if first else now + self._interval_s - lead
        question: dict[str, Any] = {"round": self._round, "at": at}
        if first:
            question["seen"] = self._seen_us
        if by_process:
            question["by_process"] = sorted(by_process)
        if self._hung:
            question["last"] = sorted(self._hung)
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # it has ended, or will be found hanging
            os.write(self._questions, json.dumps(question).encode() + b"\n")
        self._at = at

    def _lines(self, now: float) -> Iterator[dict[str, Any]]:
        read = 0
        while read < _MOST:
            try:
                data = os.read(self._answers, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            read += len(data)
            self._data += data
        *lines, self._data = self._data.split(b"\n")
        for text in lines:
            try:
                line = json.loads(text)
            except ValueError:  # a library that prints to stdout
                continue
            if isinstance(line, dict):
                yield from self._take(now, line)

    def _take(self, now: float, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if "nvml" in line:
            self._take_status(now, line["nvml"])
        elif "end" in line:
            self._take_end(now, line)
        elif "device" in line:
            device = line["device"]
            uuid = device["uuid"]
            if uuid in self._order:
                self._order.remove(uuid)
            if device.get("stamp"):
                self._seen_us[uuid] = device["stamp"]
            if "failed" not in device:
                self._answered = True
                self._hung.discard(uuid)
            else:
                self._failures.append(device["failed"])
            yield line
        elif "event" in line:
            yield line

    def _take_status(self, now: float, nvml: dict[str, Any]) -> None:
        if nvml.get("code"):
            self._failed_to_begin = True
            self._down(now, reasons.word(nvml["code"]), reasons.sentence(nvml["code"]))
            return
        for name in ("driver_version", "nvml_version", "cuda_version"):
            setattr(self.status, name, clean(nvml[name], 64))
        self._order = list(nvml["order"])
        self.listed, self.absent = frozenset(self._order), nvml["absent"]
        self._failures = list(self.absent.values())
        self._answered = not self._order and not self._failures

    def _take_end(self, now: float, line: dict[str, Any]) -> None:
        self._at = None
        self._took_s = line["end"] / 1e9
        self.status.sample_ns = line["end"]
        self._own_cpu_ns = line["cpu_ns"]
        if line.get("pss_bytes"):
            self.status.pss_bytes = line["pss_bytes"]
        if self._answered:
            if self.status.code:
                _log.info("NVML answers again")
            self.status.up, self.status.code, self.status.reason = True, "", ""
            self._delay_s, self._reinit_s, self._failing_since = _FIRST_S, _REINIT_S, None
            return
        # Every device fails. It may pass, so they are asked on; or it takes a new beginning.
        code = max(set(self._failures), key=self._failures.count)
        if self.status.code != reasons.word(code):
            _log.warning("no GPU figures: %s", reasons.sentence(code))
        self.status.up = False
        self.status.code, self.status.reason = reasons.word(code), reasons.sentence(code)
        self._failing_since = now if self._failing_since is None else self._failing_since
        if now - self._failing_since > self._reinit_s:
            self._failing_since = now
            self._reinit_s = min(2 * self._reinit_s, _LONGEST_S)
            self.status.restarts += 1
            self._next_begin = now
            self._kill()
