"""The process that talks to NVML, so that a call that hangs or crashes takes nobody with it.

Lines of JSON: questions come in on stdin, `{"round": n, "at": seconds, …}`, and the answers to each go out
on stdout, one line for each device that is about to be opened, one for how it stands with NVML, one for each
GPU and event, and one for the end. `at` is a time of the monotonic clock at which to look; devices in `skip`
are not asked, and those that are there by "index N" not even opened (what befell them stands beside). It ends
when its stdin does, and dies with its parent.

    python -m expanse_ebpf.nvml.worker --once    # the answers to one question, for a person to read
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.device import Device
from expanse_ebpf.nvml.events import Events
from expanse_ebpf.nvml.names import by_index, has_index_alone, identifier
from expanse_ebpf.nvml.process_list import KINDS, ProcessList, read_pid_max
from expanse_ebpf.nvml.readings import GpuLostError

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_NAME = b"expanse-nvml"  # in ps and top
_LIBRARY = "libnvidia-ml.so.1"  # where none is configured
_EMPTY_S = 1.0  # how often the buffers of samples are emptied while no question is due
COUNT_S = 30.0  # how often the devices are counted
LOST_S = 5.0  # how often when one is lost: asking for it can take its time
_MOST_DEVICES = 64
# Why a device has no handle, where that will stay so for a while.
_LASTING = {
    *(reasons.LOST, reasons.RESET_REQUIRED, reasons.ABSURD),
    *(reasons.HUNG, reasons.CRASHED, reasons.TOO_MANY),
}
_MEMORY_ROUNDS = 30  # how often the process looks at its own memory
_FAILED = 3  # exit status: NVML could not be begun, as was said


class Worker:
    """NVML's devices, in the order in which they are asked.

    `seen_us` has by UUID the stamp of the newest sample of use that an earlier worker took. `opening` is told
    the index of each device before it is opened, and None after the last.
    """

    def __init__(
        self, profiler: bool, seen_us: dict[str, int], opening: Callable[[int | None], None]
    ) -> None:
        self._profiler = profiler
        self._seen_us = seen_us
        self._opening = opening
        self._closed: dict[str, int] = {}  # what befell devices that are not to be opened, by "index N"
        self._devices: dict[str, Device] = {}
        self.absent: dict[str, int] = {}  # NVML's error by "index N" of devices that it gives no handle of
        self._events = Events()
        self._look_due = 0.0  # when the devices are to be counted again
        self.status: dict[str, Any] = {}

    def begin(self, skip: Mapping[str, int]) -> int:
        """Begin with NVML; its error, 0 for none."""
        self._closed = _closed(skip)
        try:
            pynvml.nvmlInit()
            self._find()
        except pynvml.NVMLError as error:
            return int(error.value)
        self.status = {
            "driver_version": _text(pynvml.nvmlSystemGetDriverVersion),
            "nvml_version": _text(pynvml.nvmlSystemGetNVMLVersion),
            "cuda_version": _text(_cuda_version),
        }
        return 0

    def _find(self) -> None:
        """Look which devices there are; raises pynvml.NVMLError when it cannot count them."""
        lists = {}
        pid_max = read_pid_max()
        for kind in KINDS:
            with contextlib.suppress(AttributeError):
                lists[kind] = ProcessList(pynvml.nvmlLib, kind, pid_max)
        now: dict[str, Device] = {}
        absent: dict[str, int] = {}
        count = pynvml.nvmlDeviceGetCount()
        for index in range(min(count, _MOST_DEVICES)):
            name = by_index(index)
            if name in self._closed:
                absent[name] = self._closed[name]
                continue
            self._opening(index)
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                uuid = pynvml.nvmlDeviceGetUUID(handle)
            except pynvml.NVMLError as error:
                absent[name] = error.value
                continue
            except ValueError:  # a text that is none
                uuid = ""
            if not identifier(uuid) or uuid in now:
                absent[name] = reasons.ABSURD
                continue
            known = self._devices.get(uuid)
            if known is None:
                known = Device(handle, uuid, lists, self._seen_us.get(uuid, 0), profiler=self._profiler)
            self._events.register(handle, uuid)
            now[uuid] = known
        self._opening(None)
        if count > _MOST_DEVICES:
            absent[by_index(_MOST_DEVICES)] = reasons.TOO_MANY
        lost = set(absent.values()) <= _LASTING
        wait_s = 0.0 if not lost else LOST_S if absent else COUNT_S
        self._look_due = time.monotonic() + wait_s
        before, self._devices, self.absent = self._devices, now, absent
        for uuid in before.keys() - now.keys():
            self._seen_us[uuid] = before[uuid].seen_us
            before[uuid].close()

    @property
    def order(self) -> list[str]:
        """The devices as they will be asked."""
        return list(self._devices)

    def read(self, uuid: str, *, by_process: bool, room: int) -> dict[str, Any]:
        """One round of one device; `room`: bytes for each of its lists of processes."""
        try:
            answer = self._devices[uuid].read(by_process=by_process, room=room)
        except GpuLostError as error:
            answer = {"uuid": uuid, "lost": error.code}
        except pynvml.NVMLError as error:
            answer = {"uuid": uuid, "failed": error.value}
        if "values" not in answer:
            self._look_due = 0.0  # it may be there under another handle
        return answer

    def look_again(self, skip: Mapping[str, int]) -> None:
        """Count the devices again when it is time; what fails is tried again next time."""
        closed = _closed(skip)
        if closed != self._closed:
            self._closed, self._look_due = closed, 0.0
        if time.monotonic() >= self._look_due:
            with contextlib.suppress(pynvml.NVMLError):
                self._find()

    def empty_buffers(self) -> None:
        """Take the samples that would be lost if nobody asked for long."""
        for device in self._devices.values():
            device.empty_buffers()

    def events(self) -> list[dict[str, Any]]:
        """What has happened since the last call."""
        return self._events.take()


def _closed(skip: Mapping[str, int]) -> dict[str, int]:
    return {name: code for name, code in skip.items() if has_index_alone(name)}


def _text(function: Callable[[], str]) -> str:
    """What the function gives, or nothing."""
    try:
        return function()
    except (pynvml.NVMLError, ValueError):
        return ""


def _cuda_version() -> str:
    version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
    return f"{version // 1000}.{version % 1000 // 10}"


class _Answers:
    """Lines to the file descriptor `fd`; with `explain`, beside NVML's errors what they mean."""

    def __init__(self, fd: int, *, explain: bool = False) -> None:
        self._fd = fd
        self._explain = explain
        # Bytes for the lists of processes. The agent takes what a pipe holds once in a tick, and a pipe that
        # is full would hold up the rest of the round until then.
        self.room = 1 << 30
        with contextlib.suppress(OSError):  # a file
            self.room = fcntl.fcntl(fd, fcntl.F_GETPIPE_SZ) * 2 // 5

    def opening(self, index: int | None) -> None:
        """What is said of a device before it is opened; not to a person."""
        if not self._explain:
            self.say(0, opening=index)

    def say(self, number: int, **line: Any) -> None:
        """One line at once: a GPU that was read is told before the next one is asked."""
        if self._explain and (errors := _errors(line)):
            why = line.get("nvml", {}).get("why")  # stands beside the error of the beginning alone
            line["errors"] = {
                n: {"word": reasons.word(n), "sentence": why or reasons.sentence(n)} for n in errors
            }
        data = json.dumps({"round": number, **line}, separators=(",", ":")).encode() + b"\n"
        while data:
            data = data[os.write(self._fd, data) :]


def _errors(line: dict[str, Any]) -> set[int]:
    """NVML's errors for which a line has no figures: of all GPUs, of those without a handle, of one."""
    nvml, device = line.get("nvml", {}), line.get("device", {})
    found = {nvml.get("code"), *nvml.get("absent", {}).values(), device.get("lost"), device.get("failed")}
    return found - {None}


def _begin(answers: _Answers, question: dict[str, Any], library: str, profiler: bool) -> Worker | None:
    why = _load(library or _LIBRARY)
    worker = Worker(profiler, question.get("seen", {}), answers.opening)
    code = reasons.NOT_LOADED if why else worker.begin(question.get("skip", {}))
    if code:
        answers.say(question["round"], nvml={"code": code, **({"why": why} if why else {})})
        return None
    return worker


def _load(library: str) -> str:
    """Load NVML; why that cannot be. Empty when it is loaded, and when there is none among the system's."""
    try:  # what is loaded already is found by its SONAME, whoever asks for libnvidia-ml.so.1
        loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        name, _, reason = str(error).partition(": ")  # of the library, or of one that it needs
        if name == _LIBRARY and reason.endswith("No such file or directory"):
            return ""
        about = reason if name == library else str(error)
        return f"{library} cannot be loaded: {about}"
    if not any(hasattr(loaded, name) for name in ("nvmlInit_v2", "nvmlInit")):
        return f"{library} is not NVML: it has no nvmlInit"
    return ""


def _answer(answers: _Answers, worker: Worker, question: dict[str, Any]) -> None:
    number = question["round"]
    began = time.monotonic_ns()
    by_process, skip = question.get("by_process", []), question.get("skip", {})
    worker.look_again(skip)
    order = worker.order
    answers.say(number, nvml={**worker.status, "order": order, "absent": worker.absent})
    for uuid in order:
        if uuid not in skip:
            device = worker.read(uuid, by_process=uuid in by_process, room=answers.room // len(order))
            answers.say(number, device={**device, "time_ns": time.time_ns()})
    for event in worker.events():
        answers.say(number, event=event)
    own = {"cpu_ns": time.process_time_ns()}
    if number % _MEMORY_ROUNDS == 1:
        own["pss_bytes"] = _own_pss()
    answers.say(number, end=time.monotonic_ns() - began, **own)


def _own_pss() -> int:
    with contextlib.suppress(OSError, ValueError), open("/proc/self/smaps_rollup", "rb") as file:
        for line in file:
            if line.startswith(b"Pss:"):
                return int(line.split()[1]) * 1024
    return 0


class _Questions:
    """Lines from stdin. None: there will be no more."""

    def __init__(self) -> None:
        self._data = b""

    def next(self, timeout_s: float) -> dict[str, Any] | None:
        """The next question; an empty one when none has come in time."""
        while b"\n" not in self._data:
            if not select.select([0], [], [], timeout_s)[0]:
                return {}
            data = os.read(0, 65536)
            if not data:
                return None
            self._data += data
        line, _, self._data = self._data.partition(b"\n")
        question: dict[str, Any] = json.loads(line)
        return question


def _serve(library: str, profiler: bool) -> int:
    answers = _Answers(os.dup(1))
    os.dup2(2, 1)  # what the library prints is not to stand in an answer
    questions = _Questions()
    worker: Worker | None = None
    while True:
        question = questions.next(_EMPTY_S)
        if question is None:
            return 0
        if not question:
            if worker is not None:
                worker.empty_buffers()
            continue
        if worker is None:
            worker = _begin(answers, question, library, profiler)
            if worker is None:
                return _FAILED
        while (wait := question["at"] - time.monotonic()) > 0:
            # A sleep that ends when stdin does.
            poller = select.poll()
            poller.register(0, 0)  # hang-ups are told always
            if poller.poll(min(wait, _EMPTY_S) * 1000):
                return 0
            if wait > _EMPTY_S:
                worker.empty_buffers()
        _answer(answers, worker, question)


def _become_a_child_of(parent: int) -> None:
    """End with the parent, and have nothing of it but stdin, stdout and stderr."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it has gone already
        sys.exit(0)
    libc.prctl(_PR_SET_NAME, _NAME)
    os.closerange(3, 1 << 20)


def main(arguments: list[str]) -> int:
    """The command line: --library PATH, --profiler, and --parent PID or --once."""
    library = arguments[arguments.index("--library") + 1] if "--library" in arguments else ""
    profiler = "--profiler" in arguments
    if "--once" in arguments:
        question = {"round": 1, "at": 0.0}
        answers = _Answers(1, explain=True)
        worker = _begin(answers, question, library, profiler)
        if worker is None:
            return _FAILED
        _answer(answers, worker, question)
        return 0
    _become_a_child_of(int(arguments[arguments.index("--parent") + 1]))
    with contextlib.suppress(BrokenPipeError):
        return _serve(library, profiler)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
