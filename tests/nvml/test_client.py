from __future__ import annotations

import _ctypes
import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml import client, reasons
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.suspects import Suspects
from expanse_ebpf.wire.collector_pb2 import GpuSample
from tests.nvml.conftest import EAGER, SERVE, MakeNode, Node, program
from tests.stand_ins.nvml import StandIn, uuid

LONGEST_TICK_S = 0.1  # generous: a tick waits for nothing


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def begun(node: Node, span_s: float) -> list[float]:
    """When workers are begun in that time, each of which ends by itself; a clock of our own goes by."""
    first = now = time.monotonic() - span_s  # all that is asked is due
    found = []
    while now - first < span_s:
        before = len(node.workers)
        node.tick_at(now)
        if len(node.workers) > before:
            found.append(now - first)
            node.wait_until_it_has_ended()
        now += 0.25
    return found


# ---- a library that fails or is not there


@pytest.mark.parametrize(
    ("code", "word"),
    [
        (9, "driver_not_loaded"),
        (18, "driver_library_mismatch"),
        (999, "unknown_error"),
        (77, "nvml_error_77"),
    ],
)
def test_why_nvml_does_not_begin_is_said(make_node: MakeNode, code: int, word: str) -> None:
    node = make_node()
    node.gpus.fail("nvmlInit", code)
    status = node.until(lambda found: found.status.code not in ("", "starting")).status
    assert (status.up, status.code, status.reason) == (False, word, reasons.sentence(code))


def test_a_beginning_that_fails_is_tried_again_more_and_more_rarely_and_said_once(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    node.gpus.fail("nvmlInit", 18)
    times = begun(node, 200)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[0] < 3
    assert 60 <= max(gaps) < 62  # the cap
    assert len(times) <= 9
    assert node.client.status.code == "driver_library_mismatch"
    assert len(warnings(caplog)) == 1


def test_a_driver_that_is_upgraded_later_is_noticed(make_node: MakeNode) -> None:
    node = make_node()
    node.gpus.fail("nvmlInit", 18)
    node.until(lambda found: found.status.code == "driver_library_mismatch")
    node.gpus.heal()
    found = node.until_all_is_well()
    assert (found.status.code, found.status.reason) == ("", "")
    assert found.status.driver_version == "535.261.03"


def test_a_library_that_appears_later_is_begun_with_at_once(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(installed=False)
    for second in range(200):  # whatever the pauses would have grown to
        found = node.tick_at(second)
    assert found.status.code == "library_not_found"
    assert found.status.reason == f"there is no {node.gpus.library}"
    assert node.workers == []
    assert len(warnings(caplog)) == 1
    node.gpus.install()
    node.tick()
    assert len(node.workers) == 1
    until = time.monotonic() + 10
    while "nvmlEventSetWait_v2" not in node.gpus.calls():  # the last call of a round
        assert time.monotonic() < until
        time.sleep(0.005)
    assert node.tick().states == ["ok"]


def test_a_driver_that_appears_ends_the_pause(
    make_node: MakeNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_DRIVER_FILES", (str(tmp_path / "version"),))
    node = make_node()
    node.gpus.fail("nvmlInit", 9)
    assert len(begun(node, 100)) < 10
    node.gpus.heal()
    (tmp_path / "version").touch()
    before = len(node.workers)
    node.tick()
    assert len(node.workers) == before + 1
    node.until_all_is_well()


def test_where_there_is_no_driver_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_DRIVER_FILES", (str(tmp_path / "version"),))
    one = Client(GpuConfig(), 1.0)
    assert not one.present
    for second in range(100):
        assert one.tick(second) == []
    assert one._worker is None
    one.stop()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("text", "{} cannot be loaded: file too short"),
        ("folder", "{} cannot be loaded: cannot read file data: Is a directory"),
        ("another library", "{} is not NVML: it has no nvmlInit"),
    ],
)
def test_a_library_that_is_none_is_said_to_be(
    make_node: MakeNode,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    what: str,
    why: str,
) -> None:
    node = make_node(installed=False)
    library = node.gpus.library
    if what == "text":
        library.write_text("no library")
    elif what == "folder":
        library.mkdir()
    else:
        library.symlink_to(_ctypes.__file__)
    found = node.until(lambda found: found.status.code not in ("", "starting"))
    assert (found.status.up, found.status.code) == (False, "library_not_loaded")
    assert found.status.reason == why.format(library)
    assert warnings(caplog) == [f"no GPU figures: {why.format(library)}"]  # there, and nowhere else
    assert capfd.readouterr() == ("", "")


def test_a_system_without_nvml_has_no_library(make_node: MakeNode, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "worker._LIBRARY = 'libthere-is-none.so.1'\nworker.pynvml.nvmlInit = fail\n"
    head = "def fail(): raise worker.pynvml.NVMLError(12)\n"
    node = make_node(command=program(f"{head}{text}{SERVE}"))
    monkeypatch.setattr(node.client, "_config", GpuConfig())
    monkeypatch.setattr(client, "_DRIVER_FILES", (str(node.gpus.folder),))
    status = node.until(lambda found: found.status.code not in ("", "starting")).status
    assert (status.code, status.reason) == ("library_not_found", reasons.sentence(12))


def test_a_program_that_cannot_be_begun_is_a_reason(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    node = make_node()
    found = node.tick()
    assert found.status.code == "worker_failed"
    assert "No such file" in found.status.reason


# ---- all devices fail


def test_when_every_device_fails_for_long_a_new_worker_tries(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client, "_REINIT_S", 0.4)
    node = make_node(devices=2)
    node.until_all_is_well()
    node.gpus.fail("*", 999, 0)
    node.gpus.fail("*", 999, 1)
    found = node.until(lambda found: found.status.restarts == 1)
    assert found.states == ["silent", "silent"]
    assert (found.status.up, found.status.code) == (False, "unknown_error")
    node.until(lambda found: found.status.restarts == 2)  # after twice the time
    assert len(warnings(caplog)) == 1
    node.gpus.heal()
    node.until_all_is_well()
    assert len(node.workers) <= 3


def test_one_device_that_fails_is_silent_and_the_others_go_on(make_node: MakeNode) -> None:
    node = make_node(devices=2)
    node.until_all_is_well()
    node.gpus.fail("*", 999, 0)
    node.until(lambda found: found.gpu(0).state == "silent")
    for _ in range(3):
        found = node.until(lambda found: found.gpu(1).state == "ok")
        assert found.states == ["silent", "ok"]
        assert found.status.up
    assert found.gpu(0).unavailable["all"] == reasons.sentence(999)


def test_a_device_that_failed_at_first_has_all_its_figures_once_it_answers(make_node: MakeNode) -> None:
    node = make_node()
    with node.gpus.batch():
        node.gpus.fail("*", 999, 0)
        for function in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"):
            node.gpus.fail(function, 0, 0)
    node.until(lambda found: found.states == ["silent"])
    node.gpus.heal()
    found = node.until_all_is_well()
    assert found.gpu().power_limit_mw == 700_000  # which is read now and then
    assert found.gpu().name == "NVIDIA H100 80GB HBM3"


# ---- a call that hangs


def test_the_others_figures_go_on_while_a_call_for_one_device_hangs(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node(devices=3, deadline_s=0.6)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature", 1)
    found = node.until(lambda found: found.gpu(1).state == "silent")
    assert found.gpu(0).state == "ok"  # which was asked before it, in the same tick
    found = node.until(lambda found: found.status.code == "hung")
    assert found.status.reason == f"NVML has not answered about {uuid(1)} for 0.6 s"
    found = node.until(lambda found: found.states == ["ok", "silent", "ok"])
    assert found.gpu(1).unavailable["all"] == reasons.sentence(reasons.HUNG)
    assert found.gpu(1).name
    assert node.client.absent == {uuid(1): reasons.HUNG}
    assert found.status.up
    # It is tried now and then, which costs the others nothing.
    node.gpus.reset_calls()
    until = time.monotonic() + 20
    tries: set[int] = set()
    while len(tries) < 2:
        found = node.tick()
        assert (found.states, found.status.up) == (["ok", "silent", "ok"], True)
        if node.client._probe is not None:
            tries.add(node.client._probe.process.pid)
        assert time.monotonic() < until
    assert len(node.workers) == 2
    assert found.status.restarts == 1
    assert node.longest_s < LONGEST_TICK_S
    assert len(warnings(caplog)) == 1
    node.gpus.release()
    node.until_all_is_well()
    assert node.client.absent == {}


def test_a_device_that_hangs_again_is_asked_more_and_more_rarely() -> None:
    suspects = Suspects(5.0)
    now, pauses = 0.0, []
    for _ in range(8):
        suspects.add(uuid(0), reasons.HUNG, now)
        began = now
        while suspects.due(now) is None:
            now += 1
        pauses.append(now - began)
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 300]
    suspects.clear(uuid(0))
    assert suspects.due(now) is None
    suspects.add(uuid(0), reasons.HUNG, now)
    suspects.add(uuid(1), reasons.HUNG, now - 1)
    assert suspects.due(now + 10) == uuid(1)  # which waits the longest


def test_a_device_that_answers_again_has_its_figures(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.6)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature", 0)
    node.until(lambda found: found.states == ["silent", "ok"])
    node.gpus.fail("nvmlInit", 18)  # which the one that runs does not notice
    node.gpus.release()
    node.until(lambda _: node.client._probe is not None)
    node.until(lambda _: node.client._probe is None)
    assert node.client.absent == {uuid(0): reasons.HUNG}  # there was no answer
    node.gpus.heal()
    node.until_all_is_well()
    assert len(node.workers) == 2


def test_a_try_that_crashes_is_one_without_an_answer(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.6)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature", 0)
    node.until(lambda found: found.states == ["silent", "ok"])
    node.gpus.crash("nvmlDeviceGetTemperature", 0)
    node.gpus.release()
    node.until(lambda _: node.client.absent == {uuid(0): reasons.CRASHED})
    assert node.tick().states == ["silent", "ok"]
    assert len(node.workers) == 2


def test_a_device_is_not_tried_while_a_process_hangs_there_for_good(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make_node(devices=2, deadline_s=0.2)
    node.until_all_is_well()
    monkeypatch.setattr(client.Process, "kill", lambda _: None)
    node.gpus.hang("nvmlDeviceGetTemperature", 0)
    node.until(lambda found: found.states == ["silent", "ok"])
    for _ in range(10):  # more than the first pause
        node.tick()
        assert node.client._probe is None
    node.gpus.release()  # it ends, as the questions have
    node.until_all_is_well()


def test_stop_ends_a_try_too(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.6)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature", 0)
    node.until(lambda _: node.client._probe is not None)
    assert node.client._probe is not None
    pid = node.client._probe.process.pid
    node.client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_when_every_device_hangs_it_is_said_that_nvml_does(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.6)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature")
    found = node.until(lambda found: len(node.client.absent) == 2)
    for _ in range(3):
        found = node.tick()
        assert found.states == ["silent", "silent"]
        assert (found.status.up, found.status.code) == (False, "hung")
    node.gpus.release()
    node.until_all_is_well()


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_a_beginning_that_hangs_is_ended_and_tried_again_after_a_pause(
    make_node: MakeNode, function: str
) -> None:
    node = make_node(deadline_s=0.2, begin_s=1.0)
    node.gpus.hang(function)
    found = node.until(lambda found: found.status.code == "hung")
    assert found.status.reason == "NVML has not answered for 1 s"
    assert not node.client._worker
    assert node.client._next_begin > time.monotonic() + 0.5
    assert node.longest_s < LONGEST_TICK_S
    node.gpus.release()
    node.until_all_is_well()
    assert len(node.workers) == 2


def test_a_beginning_that_takes_longer_than_the_deadline_is_no_hang(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.7)
    with node.gpus.batch():
        node.gpus.delay("nvmlInit", 1000)
        node.gpus.delay("nvmlDeviceGetHandleByIndex", 900, 1)
        node.gpus.delay("nvmlDeviceGetTemperature", 400, 1)
    while not (found := node.tick()).samples:
        assert (found.status.up, found.status.code) == (False, "starting")
    assert (found.status.up, found.status.code) == (True, "")  # with the first of them
    node.gpus.heal()
    assert node.until_all_is_well().status.restarts == 0
    assert len(node.workers) == 1


def test_a_device_may_be_tried_where_a_beginning_takes_long(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.3)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetTemperature", 0)
    node.until(lambda found: found.states == ["silent", "ok"])
    with node.gpus.batch():
        node.gpus.delay("nvmlInit", 1000)
        node.gpus.release("nvmlDeviceGetTemperature", 0)
    node.until_all_is_well()
    assert len(node.workers) == 2


def test_a_round_that_is_slow_and_goes_on_is_no_hang_and_counts_once(make_node: MakeNode) -> None:
    node = make_node(devices=3, deadline_s=1.0, interval_s=0.2)
    for number in range(3):
        node.gpus.auto(number, utilization=50)
    first = node.until_all_is_well()
    node.gpus.delay("nvmlDeviceGetTemperature", 450)  # 1.35 s a round
    answers: dict[str, list[GpuSample]] = {uuid(number): [] for number in range(3)}
    partial = 0
    until = time.monotonic() + 60
    while min(map(len, answers.values())) < 3:
        found = node.tick()
        assert time.monotonic() < until
        assert (found.status.up, found.status.restarts) == (True, 0)
        came = [sample for sample in found.samples.values() if sample.state == "ok"]
        partial += 0 < len(came) < 3
        for sample in came:
            answers[sample.uuid].append(sample)
    assert partial >= 3  # each in the tick in which it came
    assert node.client.absent == {}
    for name, samples in answers.items():
        assert samples == sorted(samples, key=lambda sample: sample.time_ns)
        grown = samples[-1].measured_ns - first.samples[name].measured_ns
        # A device's buffer is looked at up to a second before its time is taken down.
        assert abs(grown - (samples[-1].time_ns - first.samples[name].time_ns)) <= 1_200_000_000
        assert samples[-1].busy_ns * 2 == samples[-1].measured_ns


def test_a_cause_that_is_known_stays_when_the_process_does_not_end(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    text = "import atexit, time\natexit.register(time.sleep, 600)\n"  # as a library's destructor may
    node = make_node(deadline_s=0.3, command=program(f"{text}{SERVE}"))
    node.gpus.fail("nvmlInit", 18)
    node.until(lambda found: found.status.code == "driver_library_mismatch")
    while len(node.workers) < 3:
        assert node.tick().status.code == "driver_library_mismatch"
    assert len(warnings(caplog)) == 1


# ---- a device that cannot be opened


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceRegisterEvents"])
@pytest.mark.parametrize(("how", "code"), [("hang", reasons.HUNG), ("crash", reasons.CRASHED)])
def test_a_device_that_cannot_be_opened_leaves_the_others_their_figures(
    make_node: MakeNode, function: str, how: str, code: int
) -> None:
    node = make_node(devices=3, deadline_s=0.6, begin_s=1.5)
    getattr(node.gpus, how)(function, 1)
    found = node.until(lambda found: found.status.code in ("hung", "worker_died"))
    assert "about the GPU of index 1" in found.status.reason
    found = node.until(lambda found: found.status.up and found.states == ["ok", "ok"])
    assert node.client.absent == {"index 1": code}
    assert set(found.samples) == {uuid(0), uuid(2)}
    for _ in range(5):  # that goes on
        assert node.until(lambda found: found.states == ["ok", "ok"]).status.restarts == 1
    with node.gpus.batch():
        node.gpus.release()
        node.gpus.heal()
    node.until(lambda found: found.states == ["ok"] * 3)
    assert node.client.absent == {}
    assert len(node.workers) == 2
    assert node.longest_s < LONGEST_TICK_S


def test_a_device_that_hangs_when_it_is_opened_again_is_silent_and_not_lost(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=0.6, begin_s=1.5, command=EAGER)
    node.until_all_is_well()
    node.gpus.hang("nvmlDeviceGetHandleByIndex", 0)
    node.until(lambda found: found.status.code == "hung")
    found = node.until(lambda found: found.states == ["silent", "ok"])
    assert found.gpu(0).unavailable["all"] == reasons.sentence(reasons.HUNG)
    for _ in range(3):
        assert node.tick().events == []
    node.gpus.release()
    node.until_all_is_well()


def test_when_no_device_can_be_opened_it_is_said_that_nvml_hangs(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_REINIT_S", 0.5)
    node = make_node(devices=2, deadline_s=0.6, begin_s=0.6)
    node.gpus.hang("nvmlDeviceGetHandleByIndex")
    node.until(lambda _: len(node.client.absent) == 2)
    for _ in range(15):
        found = node.tick()
        assert (found.status.up, found.status.code) == (False, "hung")
    assert len(node.workers) == 3  # a new one would not do more than the last
    node.gpus.release()
    node.until(lambda found: found.states == ["ok", "ok"])


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("GPU-\x1b[31mred", reasons.ABSURD),
        (uuid(1), reasons.ABSURD),
        ("G" * 10_000, reasons.INSUFFICIENT_SIZE),  # by NVML itself
    ],
)
def test_a_device_whose_name_is_none_is_said_to_be_there(make_node: MakeNode, name: str, code: int) -> None:
    node = make_node(devices=3)
    node.gpus.set(2, uuid=name)
    found = node.until_all_is_well()
    assert set(found.samples) == {uuid(0), uuid(1)}
    assert node.client.absent == {"index 2": code}


def test_more_devices_than_can_be_told_are_said_to_be_more(make_node: MakeNode) -> None:
    node = make_node(devices=3, command=program(f"worker._MOST_DEVICES = 2\n{SERVE}"))
    assert len(node.until_all_is_well().samples) == 2
    assert node.client.absent == {"index 2": reasons.TOO_MANY}


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetTemperature"])
def test_stop_takes_less_than_a_second_while_a_call_hangs(make_node: MakeNode, function: str) -> None:
    node = make_node()
    node.gpus.hang(function)
    node.tick()
    until = time.monotonic() + 10
    while not any(name.startswith(function) for name in node.gpus.calls()):
        assert time.monotonic() < until
        time.sleep(0.005)
    pid = node.worker
    began = time.monotonic()
    node.client.stop()
    assert time.monotonic() - began < 1
    assert not Path(f"/proc/{pid}").exists()


def test_stop_ends_a_worker_that_answers_at_once(make_node: MakeNode) -> None:
    node = make_node()
    node.until_all_is_well()
    pid = node.worker
    began = time.monotonic()
    node.client.stop()
    assert time.monotonic() - began < 0.3
    assert not Path(f"/proc/{pid}").exists()


def test_an_agent_that_was_suspended_does_not_take_its_worker_for_hung(make_node: MakeNode) -> None:
    node = make_node(deadline_s=1.0)
    node.until_all_is_well()
    pid = node.worker
    os.kill(pid, signal.SIGSTOP)
    node.tick()
    node.tick_at(time.monotonic() + 60)
    os.kill(pid, signal.SIGCONT)
    assert node.worker == pid
    assert node.client.status.restarts == 0


def test_workers_that_hang_in_the_kernel_are_not_joined_by_more(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing that a test can do keeps SIGKILL from a process, so it is not sent.
    node = make_node(deadline_s=0.2, begin_s=0.2)
    monkeypatch.setattr(client, "_FIRST_S", 0.01)
    monkeypatch.setattr(client.Process, "kill", lambda _: None)
    node.gpus.hang("nvmlInit")
    found = node.until(lambda found: "cannot be ended" in found.status.reason)
    assert [str(pid) in found.status.reason for pid in node.workers] == [True, True]
    for _ in range(10):
        node.tick()
    assert len(node.workers) == 2
    node.gpus.release()  # they end, as the questions have
    node.until_all_is_well()
    monkeypatch.undo()


# ---- a worker that dies


def test_a_worker_that_crashes_each_time_is_begun_more_and_more_rarely(
    make_node: MakeNode, caplog: pytest.LogCaptureFixture
) -> None:
    node = make_node()
    node.gpus.crash("nvmlInit")
    times = begun(node, 100)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert len(times) <= 7
    assert node.client.status.code == "worker_died"
    assert node.client.status.reason == "the process that asks NVML ended with signal 11"
    assert node.client.status.restarts == len(times)
    assert len(warnings(caplog)) == 1


def test_a_worker_that_dies_after_each_first_answer_is_begun_more_and_more_rarely(
    make_node: MakeNode,
) -> None:
    once = f"""
import os
answer = worker._answer
worker._answer = lambda *arguments: os._exit(answer(*arguments) or 5)
{SERVE}"""
    node = make_node(command=program(once))
    times = begun(node, 100)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert 4 <= len(times) <= 7
    assert node.client.status.reason == "the process that asks NVML ended with status 5"


def test_a_worker_that_has_lived_for_long_is_begun_anew_soon(
    make_node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_FIRST_S", 0.05)
    node = make_node()
    for _ in range(3):
        node.until_all_is_well()
        os.kill(node.worker, signal.SIGKILL)
        node.wait_until_it_has_ended()
        node.tick()
    assert node.client._delay_s > 0.05
    node.until(lambda _: node.client._delay_s == 0.05)


def test_a_device_at_which_the_worker_crashes_leaves_the_others_their_figures(make_node: MakeNode) -> None:
    node = make_node(devices=2, deadline_s=2.0)
    node.until_all_is_well()
    node.gpus.crash("nvmlDeviceGetTemperature", 0)
    found = node.until(lambda found: found.status.code == "worker_died")
    assert found.status.reason.endswith(f"with signal 11 about {uuid(0)}")
    found = node.until(lambda found: found.states == ["silent", "ok"])
    assert found.gpu(0).unavailable["all"] == reasons.sentence(reasons.CRASHED)
    node.gpus.heal()
    node.until_all_is_well()
    assert len(node.workers) <= 3


def test_no_sample_counts_twice_when_the_worker_is_killed(make_node: MakeNode) -> None:
    node = make_node(interval_s=0.2)
    node.gpus.auto(0, utilization=50)
    first = node.until(lambda found: found.states == ["ok"] and found.gpu().measured_ns > 0).gpu()
    for _ in range(2):
        os.kill(node.worker, signal.SIGKILL)
        node.wait_until_it_has_ended()
        last = node.until(lambda found: found.states == ["ok"] and found.status.up).gpu()
    last = node.until(lambda found: found.states == ["ok"]).gpu()
    grown = last.measured_ns - first.measured_ns
    # All samples of the time, each once: one is made every 100 ms. A pause is no gap, as NVML kept them.
    assert abs(grown - (last.time_ns - first.time_ns)) <= 200_000_000
    assert last.busy_ns * 2 == last.measured_ns
    assert node.client.status.restarts == 2


def test_what_a_worker_answered_before_it_died_is_reported(make_node: MakeNode) -> None:
    node = make_node()
    node.until_all_is_well()
    calls = node.gpus.calls()["nvmlEventSetWait_v2"]
    node.client.tick(time.monotonic() - 1)  # asks
    until = time.monotonic() + 10
    while node.gpus.calls()["nvmlEventSetWait_v2"] == calls:
        assert time.monotonic() < until
        time.sleep(0.005)
    os.kill(node.worker, signal.SIGKILL)
    node.wait_until_it_has_ended()
    assert node.tick().states == ["ok"]


AGENT = """
import json, sys, time
from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.nvml.suspects import Suspects
client = Client(GpuConfig(library=sys.argv[1]), 0.1)
while True:
    try:
        client.tick(time.monotonic())
        print(json.dumps([client._worker.pid, client.status.up]), flush=True)
        time.sleep(0.1)
    except KeyboardInterrupt:
        pass
"""


def says(agent: subprocess.Popen[str]) -> tuple[int, bool]:
    assert agent.stdout is not None
    pid, up = json.loads(agent.stdout.readline())
    return pid, up


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 10
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return  # nobody waits for it
        except FileNotFoundError:
            return
        assert time.monotonic() < until, f"process {pid} is still there"
        time.sleep(0.01)


@pytest.mark.parametrize("hangs", [False, True])
def test_the_worker_ends_with_an_agent_that_is_killed(tmp_path: Path, hangs: bool) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    if hangs:
        gpus.hang("nvmlDeviceGetTemperature")
    command = [sys.executable, "-c", AGENT, gpus.library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        pid, up = says(agent)
        while not (gpus.calls().get("nvmlDeviceGetTemperature") if hangs else up):
            _, up = says(agent)
        agent.kill()
    wait_until_gone(pid)


def test_an_interrupt_from_the_terminal_is_for_the_agent_alone(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    command = [sys.executable, "-c", AGENT, gpus.library]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as agent:
        pid, up = says(agent)
        while not up:
            _, up = says(agent)
        os.killpg(agent.pid, signal.SIGINT)
        for _ in range(5):
            assert says(agent) == (pid, True)
        agent.kill()
    wait_until_gone(pid)


# ---- answers that are none

KEYS = ("nvml", "device", "event", "end")


@pytest.mark.parametrize(
    "text",
    [
        "print('nothing of JSON')",
        "print('[' * 100000)",
        "print('9' * 100000)",
        "print('[1]'); print('null'); print('true'); print('{}'); print('\"text\"')",
        *(f"print('{{\"{key}\": {value}}}')" for key in KEYS for value in ("[]", "1", "null", "{}")),
        'print(\'{"nvml": {"order": [[], {}, null, 7], "absent": [1]}}\')',
        'print(\'{"nvml": {"code": "12"}}\')',
        'print(\'{"nvml": {"order": ["GPU-1"]}}\'); print(\'{"device": {"uuid": "GPU-1"}}\')',
        'print(\'{"nvml": {"order": ["\\\\ud800"]}}\'); print(\'{"device": {"uuid": "\\\\ud800"}}\')',
        "sys.stdout.write('x' * (20 << 20))",
        "sys.stdout.buffer.write(bytes(range(256)) * 1000)",
        '[print(\'{"nvml": {"order": ["GPU-%d"]}}\' % i) for i in range(20000)]',
        'print(\'{"end": 1e308, "cpu_ns": NaN}\'); print(\'{"end": -5, "cpu_ns": -1, "pss_bytes": 1e400}\')',
    ],
)
def test_a_worker_that_talks_nonsense_is_no_harm(make_node: MakeNode, text: str) -> None:
    node = make_node(
        deadline_s=0.3, begin_s=0.3, command=program(f"{text}\nsys.stdout.flush()\nsys.stdin.read()")
    )
    found = node.until(
        lambda found: found.status.restarts > 0 or found.status.code not in ("starting", "hung")
    )
    for sample in found.samples.values():
        sample.SerializeToString()


def test_what_the_library_prints_does_not_stand_in_the_answers(make_node: MakeNode) -> None:
    noisy = f"""
import os, pynvml
counts = pynvml.nvmlDeviceGetTemperature
def noisy(*arguments):
    os.write(1, b"a word without an end")
    return counts(*arguments)
pynvml.nvmlDeviceGetTemperature = noisy
{SERVE}"""
    node = make_node(command=program(noisy))
    node.until_all_is_well()
    for _ in range(3):
        node.until(lambda found: found.states == ["ok"])
    assert node.client.status.restarts == 0


def test_more_answers_than_a_pipe_holds_arrive_and_nothing_is_taken_for_hung(make_node: MakeNode) -> None:
    node = make_node(devices=3, deadline_s=2.0)
    for number in range(3):
        node.gpus.processes(number, [(pid, 1 << 30) for pid in range(1, 12_001)])
    seen = set()
    while len(seen) < 3:
        found = node.tick()
        seen |= {name for name, sample in found.samples.items() if len(sample.processes) == 1024}
    assert node.client.status.restarts == 0


def test_answers_that_come_late_are_asked_for_earlier(make_node: MakeNode) -> None:
    node = make_node(interval_s=0.4)
    node.until_all_is_well()
    margin_s = node.client._margin_s
    os.kill(node.worker, signal.SIGSTOP)  # as on a node whose CPUs are busy
    node.until(lambda found: found.states == ["silent"])
    os.kill(node.worker, signal.SIGCONT)
    assert node.client._margin_s > margin_s

    def shrinks() -> bool:
        before = node.client._margin_s
        node.tick()
        return node.client._margin_s < before

    assert any(shrinks() for _ in range(20))
