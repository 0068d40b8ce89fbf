"""The agent's side of the worker: begins it, asks it once a tick, never waits for it.

A question says when to look: a little before the next tick. What has been answered by then is in that
tick's report; what has not is missing there, with the reason. A worker that is silent past the deadline is
ended, and the next one does not ask the device at which it hung, or does not even open it, so that the
others' figures go on. That is asked rarely, by a process of its own, until it answers.
A worker that cannot begin with NVML, or dies, is begun anew less and less often. Each loads the library
that is there now: so a driver that is loaded or upgraded later is noticed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.decode import error_code, mapping, number
from expanse_ebpf.nvml.names import by_index, identifier
from expanse_ebpf.nvml.patience import Patience
from expanse_ebpf.nvml.probe import Probe
from expanse_ebpf.nvml.process import Process
from expanse_ebpf.nvml.suspects import Suspects
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import NvmlStatus

if TYPE_CHECKING:
    from expanse_ebpf.config import GpuConfig

_log = logging.getLogger(__name__)
# One of these is there once the driver is loaded, on WSL and Tegra too. Not /dev/nvidiactl: libnvidia-ml
# makes that even where there is no driver.
_DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
_FIRST_S, _LONGEST_S = 1.0, 60.0  # between two beginnings of a worker that fails
_REINIT_S = 5.0  # how long all devices must fail for a worker to be begun anew
_MOST_ENDING = 2  # workers that were killed and hang in the kernel
_END_S = 0.3  # how long a worker's end is waited for, and then again after SIGKILL
_MARGIN_S, _CALMER = 0.02, 0.98  # by which a question goes ahead of the next tick; by how much that shrinks
_MOST_DEVICES = 64
_MOST_WHY = 300  # characters of the worker's own reason
_LONGEST_ROUND_NS = 1 << 40
_STARTING = ("starting", "NVML has not answered yet")


class Client:
    """One worker at a time. `interval_s`: between two calls of `tick`."""

    def __init__(self, config: GpuConfig, interval_s: float) -> None:
        self.status = NvmlStatus()
        self.status.code, self.status.reason = _STARTING
        self.listed: frozenset[str] | None = None  # UUIDs that NVML gives a handle of; None: not known now
        self._config = config
        self._interval_s = interval_s
        self._worker: Process | None = None
        self._ending: list[Process] = []  # workers that were killed and have not ended yet
        self._ticked = 0.0  # monotonic time
        # The present round
        self._round = 0
        self._at: float | None = None  # when NVML was to be looked at; None: all is answered
        self._patience = Patience(config.deadline_s, 0.0)  # with this worker
        self._opening = ""  # the device that it opens, by index
        self._order: list[str] = []  # devices that have not answered yet
        self._skipped: frozenset[str] = frozenset()
        self._absent: dict[str, int] = {}
        self._failures: list[int] = []  # NVML's errors for whole devices
        self._answered = False  # whether any device has
        self._took_s = 0.1
        self._margin_s = _MARGIN_S
        # What outlives a worker
        self._seen_us: dict[str, int] = {}  # stamps of the newest samples
        self._suspects = Suspects(config.deadline_s)
        self._probe: Probe | None = None
        self._files: frozenset[str] = frozenset()
        self._began = 0.0
        self._failed_to_begin = False
        self._delay_s = _FIRST_S
        self._next_begin = 0.0
        self._reinit_s = _REINIT_S
        self._failing_since: float | None = None
        self._ended_cpu_ns = 0
        self._own_cpu_ns = 0

    @property
    def present(self) -> bool:
        """Whether there is anything to ask: a driver on this node, or a library that was configured."""
        return bool(self._config.library or self._present_files())

    @property
    def absent(self) -> dict[str, int]:
        """What is not asked: NVML's error by "index N" of a device, reasons.HUNG or CRASHED also by UUID."""
        return self._absent | self._suspects.codes

    def tick(self, now: float, by_process: Collection[str] = ()) -> list[dict[str, Any]]:
        """The lines of devices and events that have come since the last call; then asks anew.

        `by_process`: UUIDs of GPUs of which it is wanted how busy each process keeps them.
        """
        before, self._files = self._files, self._present_files()
        if self._files - before:  # the driver or the library has appeared just now
            self._delay_s, self._next_begin = _FIRST_S, 0.0
        lines: list[dict[str, Any]] = []
        if self._worker is not None:
            # Before its end is seen: these may be its last words.
            lines.extend(self._lines(now, self._worker))
            if how := self._worker.ended():
                self._died(now, how)
            elif self._is_late(now):
                if self._failed_to_begin:  # that is the cause, and not that it does not end
                    self._end(self._worker)
                else:
                    self._hung(now, self._worker)
            elif self._fails_for_long(now):
                self._reinit_s = min(2 * self._reinit_s, _LONGEST_S)
                self.status.restarts += 1
                self._end(self._worker)
        self._ask_a_suspect(now)
        self._ticked = now
        self._ending = [worker for worker in self._ending if not worker.ended()]
        if self._worker is None and self._can_begin() and now >= self._next_begin:
            self._begin(now)
        if self._worker is not None and self._at is None:
            self._margin_s = max(_MARGIN_S, self._margin_s * _CALMER)
            self._ask(now, self._worker, by_process)
        elif self._worker is not None and self._at != self._began:  # late, as where the CPUs are busy
            self._margin_s = min(2 * self._margin_s, self._interval_s / 2)
        self.status.cpu_ns = self._ended_cpu_ns + self._own_cpu_ns
        return lines

    # ---- the process --------------------------------------------------------------------------------

    def _present_files(self) -> frozenset[str]:
        """Those of the driver and the library that was configured."""
        files = (*_DRIVER_FILES, self._config.library)
        return frozenset(file for file in files if os.path.exists(file))  # noqa: PTH110

    def _can_begin(self) -> bool:
        library = self._config.library
        if library and library not in self._files:
            self._say_down("library_not_found", f"there is no {library}")
            return False
        return bool(self._files)

    def _begin(self, now: float) -> None:
        if len(self._ending) >= _MOST_ENDING:
            pids = " and ".join(str(worker.pid) for worker in self._ending)
            self._say_down("hung", f"the processes {pids} hang in the NVIDIA driver and cannot be ended")
            return
        try:
            self._worker = Process(self._arguments())
        except OSError as error:
            self._down(now, "worker_failed", f"the process that asks NVML cannot be begun: {error.strerror}")
            return
        self._at, self._order, self._opening = None, [], ""
        self._patience = Patience(self._config.deadline_s, now)
        self._began, self._failed_to_begin, self._failing_since = now, False, None

    def _arguments(self) -> list[str]:
        profiler = ["--profiler"] if self._config.profiler else []
        return profiler + (["--library", self._config.library] if self._config.library else [])

    def _ask_a_suspect(self, now: float) -> None:
        """Whether one of the devices that are not asked any more answers again."""
        probe = self._probe
        if probe is None:
            uuid = self._suspects.due(now)
            # As long as a process hangs in the kernel there, another one would as well.
            is_there = self.listed is not None and uuid in self.listed | self._absent.keys()
            if uuid is not None and self.listed is not None and is_there and not self._ending:
                # One that cannot be begun now is tried in the next tick.
                with contextlib.suppress(OSError):
                    patience = Patience(self._config.deadline_s, now)
                    skip = self.listed | self._suspects.codes.keys()
                    self._probe = Probe(self._arguments(), uuid, skip, patience)
            return
        if now - self._ticked > self._interval_s + self._config.deadline_s:
            probe.patience.wait(now)
        outcome = probe.outcome(now)
        if outcome is None:
            return
        if outcome:
            self._suspects.add(probe.device, outcome, now)
        else:
            _log.info("NVML answers again about %s", probe.device)
            self._suspects.clear(probe.device)
        self._ended_cpu_ns += probe.cpu_ns
        if not probe.ended:
            probe.process.kill()
            self._ending.append(probe.process)
        probe.process.close()
        self._probe = None

    def _over(self) -> None:
        """The worker is none any more."""
        if self._worker is not None:
            self._worker.close()
        self._worker, self._at, self._order, self._opening = None, None, [], ""
        self._ended_cpu_ns += self._own_cpu_ns
        self._own_cpu_ns = 0

    def _end(self, worker: Process) -> None:
        worker.kill()
        self._over()
        self._ending.append(worker)

    def _died(self, now: float, how: str) -> None:
        if not self._failed_to_begin:
            about = self._suspect(now, reasons.CRASHED)
            self._down(now, "worker_died", f"the process that asks NVML ended {how}{about}")
        self._over()

    def _is_late(self, now: float) -> bool:
        if self._at is None:
            return False
        if now - self._ticked > self._interval_s + self._config.deadline_s:
            self._patience.wait(now)  # nobody has listened for so long: it may have been suspended too
        return self._patience.is_over(now)

    def _fails_for_long(self, now: float) -> bool:
        return self._failing_since is not None and now - self._failing_since > self._reinit_s

    def _hung(self, now: float, worker: Process) -> None:
        about = self._suspect(now, reasons.HUNG)
        reason = f"NVML has not answered{about} for {self._patience.limit_s:g} s"
        others = self.listed is not None and any(uuid not in self._suspects for uuid in self.listed)
        if about and (others or self._opening):
            # The others' figures are to go on.
            self._say_down("hung", reason)
            self.status.restarts += 1
            self._next_begin = now
        else:
            self._down(now, "hung", reason)
        self._end(worker)

    def _suspect(self, now: float, code: int) -> str:
        """Take down at which device it happened; the words for that."""
        name = self._opening or next(iter(self._order), "")
        if not name:
            return ""
        self._suspects.add(name, code, now)
        return f" about the GPU of {name}" if self._opening else f" about {name}"

    def _down(self, now: float, code: str, reason: str) -> None:
        """The worker is of no use: the next one is begun after a while."""
        self._say_down(code, reason)
        self._next_begin = now + self._delay_s
        self._delay_s = min(2 * self._delay_s, _LONGEST_S)
        self.status.restarts += 1

    def _say_down(self, code: str, reason: str) -> None:
        """NVML cannot be asked; in the log once for as long as it stays the same."""
        if self.status.code != code:
            _log.warning("no GPU figures: %s", reason)
        self.status.up, self.status.code, self.status.reason = False, code, clean(reason)
        self.listed, self._absent = None, {}

    def stop(self) -> None:
        """End the worker; one that hangs in the kernel is left behind."""
        workers = [*self._ending]
        if self._worker is not None:
            workers.append(self._worker)
        if self._probe is not None:
            workers.append(self._probe.process)
            self._probe.process.close()
            self._probe = None
        self._over()
        for last in (False, True):
            until = time.monotonic() + _END_S
            while workers := [worker for worker in workers if not worker.ended()]:
                if time.monotonic() > until:
                    break
                time.sleep(0.01)
            if not last:
                for worker in workers:
                    worker.kill()
        for worker in workers:
            _log.warning("process %d, which asks NVML, hangs in the driver and cannot be ended", worker.pid)
        self._ending = []

    # ---- questions and answers ------------------------------------------------------------------------

    def _ask(self, now: float, worker: Process, by_process: Collection[str]) -> None:
        import json  # not on a node without GPUs

        self._round += 1
        lead = min(1.5 * self._took_s + self._margin_s, self._interval_s / 2)
        first = self._began == now
        self._at = now if first else now + self._interval_s - lead
        self._patience.wait(self._at)
        question: dict[str, Any] = {"round": self._round, "at": self._at}
        if first:
            question["seen"] = self._seen_us
        if by_process:
            question["by_process"] = sorted(by_process)
        self._skipped = frozenset(self._suspects.codes)
        if self._skipped:
            question["skip"] = self._suspects.codes
        worker.ask(json.dumps(question).encode() + b"\n")

    def _lines(self, now: float, worker: Process) -> Iterator[dict[str, Any]]:
        import json

        for text in worker.answers():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(line, dict):
                yield from self._take(now, line)

    def _take(self, now: float, line: dict[str, Any]) -> Iterator[dict[str, Any]]:
        if not line.keys() & {"nvml", "end", "device", "event", "opening"}:
            return
        self._patience.hear(line, now)
        if "opening" in line:
            index = number(line["opening"], (0, _MOST_DEVICES))
            self._opening = "" if index is None else by_index(index)
        elif "nvml" in line:
            self._take_status(now, mapping(line["nvml"]))
        elif "end" in line:
            self._take_end(now, line)
        elif "device" in line:
            if self._take_device(mapping(line["device"])):
                yield line
        else:
            yield line

    def _take_status(self, now: float, nvml: Mapping[str, Any]) -> None:
        self._opening = ""
        code = error_code(nvml.get("code", 0))
        if code:
            self._failed_to_begin = True
            why = nvml.get("why")
            told = clean(why, _MOST_WHY) if isinstance(why, str) and why else reasons.sentence(code)
            self._down(now, reasons.word(code), told)
            return
        for name in ("driver_version", "nvml_version", "cuda_version"):
            value = nvml.get(name)
            setattr(self.status, name, clean(value, 64) if isinstance(value, str) else "")
        order = nvml.get("order")
        listed = [uuid for uuid in order if identifier(uuid)] if isinstance(order, list) else []
        self.listed = frozenset(listed[:_MOST_DEVICES])
        self._order = [uuid for uuid in listed[:_MOST_DEVICES] if uuid not in self._skipped]
        absent = list(mapping(nvml.get("absent")).items())[:_MOST_DEVICES]
        self._absent = {name: error_code(error) for name, error in absent if identifier(name)}
        self._suspects.keep(self.listed | self._absent.keys())
        self._failures = [code for name, code in self._absent.items() if name not in self._suspects]
        self._answered = not self.listed and not self._absent

    def _take_device(self, device: Mapping[str, Any]) -> bool:
        """Whether it is an answer to what was asked."""
        uuid = device.get("uuid")
        if uuid not in self._order:
            return False
        self._order.remove(uuid)
        stamp = number(device.get("stamp"))
        if stamp and (uuid in self._seen_us or len(self._seen_us) < _MOST_DEVICES):
            self._seen_us[uuid] = stamp
        if "failed" in device:
            self._failures.append(error_code(device["failed"]))
        else:
            self._answered = True
            self._is_well()  # however long the rest of the round takes
        return True

    def _take_end(self, now: float, line: Mapping[str, Any]) -> None:
        self._at, self._order = None, []
        took_ns = number(line["end"], (0, _LONGEST_ROUND_NS)) or 0
        self._took_s = took_ns / 1e9
        self.status.sample_ns = took_ns
        self._own_cpu_ns = number(line.get("cpu_ns"), (0, 1 << 60)) or 0
        pss = number(line.get("pss_bytes"))
        if pss:
            self.status.pss_bytes = pss
        if self._answered:
            self._is_well()
            self._reinit_s, self._failing_since = _REINIT_S, None
            if now - self._began > self._delay_s:  # it has lived for longer than the next one would wait
                self._delay_s = _FIRST_S
            return
        # Every device fails. It may pass, so they are asked on; or it takes a new beginning.
        codes = self._failures or list(self._suspects.codes.values())
        code = max(set(codes), key=codes.count) if codes else reasons.UNKNOWN
        if self.status.code != reasons.word(code):
            _log.warning("no GPU figures: %s", reasons.sentence(code))
        self.status.up = False
        self.status.code, self.status.reason = reasons.word(code), reasons.sentence(code)
        if self._failures and self._failing_since is None:
            self._failing_since = now

    def _is_well(self) -> None:
        """A device has answered, or there is none."""
        if self.status.code and self.status.code != _STARTING[0]:
            _log.info("NVML answers again")
        self.status.up, self.status.code, self.status.reason = True, "", ""
