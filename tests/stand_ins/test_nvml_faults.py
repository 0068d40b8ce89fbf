"""The stand-in for libnvidia-ml.so.1: errors, calls that hang or crash, and what a test sees of it all."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.stand_ins.caller import Call, Caller
from tests.stand_ins.nvml import StandIn, mig_uuid, uuid

# ---- what goes wrong

POWER = "n.nvmlDeviceGetPowerUsage(gpu({}))"
NAME = "n.nvmlDeviceGetName(gpu({}))"


def errors(nvml: Caller) -> list[int | None]:
    return [nvml.error(question.format(device)) for question in (POWER, NAME) for device in (0, 1)]


def test_functions_fail_for_one_gpu_or_for_all(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    gpus.fail("nvmlDeviceGetPowerUsage", 999)
    assert errors(nvml) == [999, 999, None, None]
    gpus.fail("nvmlDeviceGetPowerUsage", 4, device=1)
    assert errors(nvml) == [999, 4, None, None]
    gpus.fail("nvmlDeviceGetName", 17, device=0)
    assert errors(nvml) == [999, 4, 17, None]
    gpus.heal("nvmlDeviceGetPowerUsage", device=1)
    assert errors(nvml) == [999, 999, 17, None]
    gpus.heal(device=0)
    assert errors(nvml) == [999, 999, None, None]
    gpus.fail("nvmlDeviceGetName", 17)
    gpus.heal("nvmlDeviceGetPowerUsage")
    assert errors(nvml) == [None, None, 17, 17]
    gpus.heal()
    assert errors(nvml) == [None] * 4


def test_a_name_without_a_version_means_all(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    questions = ("n.nvmlDeviceGetMemoryInfo(gpu(0))", "n.nvmlDeviceGetMemoryInfo(gpu(0), n.nvmlMemory_v2)")
    gpus.fail("nvmlDeviceGetMemoryInfo_v2", 13)
    assert [nvml.error(question) for question in questions] == [None, 13]
    gpus.heal()
    gpus.fail("nvmlDeviceGetMemoryInfo", 4)
    assert [nvml.error(question) for question in questions] == [4, 4]


def test_a_gpu_that_is_lost(gpus: StandIn, call: Call) -> None:
    gpus.mig(1, [{}])
    nvml = call(gpus)
    nvml("whole, part = gpu(1), instance(1, 0)")
    gpus.fail("*", 15, device=1)
    assert nvml("n.nvmlDeviceGetCount()") == 2
    for question in (
        *("gpu(1)", "n.nvmlDeviceGetName(whole)", "n.nvmlDeviceGetMemoryInfo(part)"),
        f"n.nvmlDeviceGetHandleByUUID(b'{uuid(1)}')",
        f"n.nvmlDeviceGetHandleByUUID(b'{mig_uuid(1, 0)}')",
        "n.nvmlDeviceGetHandleByPciBusId(b'0000:20:00.0')",
    ):
        assert nvml.error(question) == 15, question
    assert nvml.error("n.nvmlDeviceGetName(gpu(0))") is None
    gpus.heal(device=1)
    assert nvml("n.nvmlDeviceGetUUID(whole)") == uuid(1)


def test_what_is_said_of_one_function_of_a_gpu_leaves_its_instances_alone(gpus: StandIn, call: Call) -> None:
    gpus.mig(0, [{}])
    nvml = call(gpus)
    gpus.fail("nvmlDeviceGetMemoryInfo", 4, device=0)
    assert nvml.error("n.nvmlDeviceGetMemoryInfo(gpu(0))") == 4
    assert nvml.error("n.nvmlDeviceGetMemoryInfo(instance(0, 0))") is None
    gpus.fail("nvmlDeviceGetMemoryInfo", 6, device=(0, 0))
    assert nvml.error("n.nvmlDeviceGetMemoryInfo(instance(0, 0))") == 6


@pytest.mark.parametrize("begin", ["n.nvmlInit()", "n.nvmlInitWithFlags(1)"])
def test_beginning_fails(gpus: StandIn, call: Call, begin: str) -> None:
    nvml = call(gpus, begin=False)
    nvml("n._LoadNvmlLibrary()")
    assert nvml.error("n.nvmlDeviceGetCount()") == 1
    gpus.fail("nvmlInit", 18)
    assert nvml.error(begin) == 18
    assert nvml("library.nvmlInit_v2()") == 18
    assert nvml.error("n.nvmlDeviceGetCount()") == 1
    assert nvml("n.nvmlErrorString(18)") == "Driver/library version mismatch"
    gpus.heal()
    assert nvml.error(begin) is None
    assert nvml("n.nvmlDeviceGetCount()") == 2


def test_a_call_hangs_until_it_is_released(gpus: StandIn, call: Call) -> None:
    nvml, other = call(gpus), call(gpus)
    gpus.hang("nvmlDeviceGetPowerUsage", device=1)
    assert nvml(POWER.format(0)) == 70_000
    gpus.reset_calls()
    nvml.ask(POWER.format(1))
    gpus.wait_for_call("nvmlDeviceGetPowerUsage")
    assert other(NAME.format(1)) != ""
    gpus.set(1, power_mw=5)  # a script that is written anew releases nobody
    gpus.fail("nvmlDeviceGetName", 4)
    gpus.heal()
    with pytest.raises(TimeoutError):
        gpus.wait_for_call("nvmlDeviceGetPowerUsage", 2, timeout_s=0.1)
    assert nvml.process.poll() is None
    gpus.release()
    assert nvml.answer() == 5


def test_a_thread_may_go_on_while_another_hangs(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    gpus.hang("nvmlDeviceGetPowerUsage")
    gpus.reset_calls()
    nvml("import threading")
    nvml("threading.Thread(target=n.nvmlDeviceGetPowerUsage, args=[gpu(0)], daemon=True).start()")
    gpus.wait_for_call("nvmlDeviceGetPowerUsage")
    assert nvml(NAME.format(0)) != ""
    gpus.release("nvmlDeviceGetPowerUsage")


def test_a_hanging_process_can_be_ended(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    gpus.hang("*")
    gpus.reset_calls()
    nvml.ask("n.nvmlDeviceGetCount()")
    gpus.wait_for_call("nvmlDeviceGetCount_v2")
    nvml.process.terminate()
    assert nvml.process.wait(timeout=10) == -signal.SIGTERM


def test_a_call_crashes(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    gpus.crash("nvmlDeviceGetPowerUsage", device=0)
    assert nvml(POWER.format(1)) == 70_000
    with pytest.raises(EOFError, match=f"^-{signal.SIGSEGV:d}$"):
        nvml(POWER.format(0))
    gpus.heal()
    assert call(gpus)(POWER.format(0)) == 70_000


def test_a_call_takes_its_time(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    gpus.delay("nvmlDeviceGetPowerUsage", 150, device=0)
    took = "(lambda t: [n.nvmlDeviceGetPowerUsage(gpu(%d)), time.monotonic() - t][1])(time.monotonic())"
    nvml("import time")
    assert nvml(took % 0) >= 0.15
    gpus.delay("nvmlDeviceGetPowerUsage", 0, device=0)
    assert nvml(took % 0) < 0.15


# ---- counts, the script, the library's place


def test_calls_are_counted_over_all_processes(gpus: StandIn, call: Call) -> None:
    assert gpus.calls() == {}
    nvml, other = call(gpus), call(gpus)
    assert gpus.calls() == {"nvmlInitWithFlags": 2}
    gpus.reset_calls()
    assert gpus.calls() == {}
    for caller in (nvml, other, nvml):
        caller(POWER.format(0))
    gpus.fail("nvmlDeviceGetName", 4)
    nvml.error(NAME.format(1))
    assert gpus.calls() == {
        "nvmlDeviceGetHandleByIndex_v2": 4,
        "nvmlDeviceGetPowerUsage": 3,
        "nvmlDeviceGetName": 1,
    }


def test_changes_in_a_batch_are_seen_together(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    with gpus.batch():
        gpus.set(0, power_mw=1)
        with gpus.batch():
            gpus.set(1, power_mw=2)
        assert [nvml(POWER.format(device)) for device in (0, 1)] == [70_000, 70_000]
    assert [nvml(POWER.format(device)) for device in (0, 1)] == [1, 2]


def test_no_change_is_missed_however_fast_they_come(gpus: StandIn, call: Call) -> None:
    nvml = call(gpus)
    times = set()
    for power in range(1, 100):
        for value in (0, power):
            gpus.set(0, power_mw=value)
            times.add((gpus.folder / "script").stat().st_mtime_ns)
        assert nvml(POWER.format(0)) == power
    assert len(times) == 2 * 99  # the same inode may come twice, the same time must not


def test_the_library_can_come_later_and_be_replaced(tmp_path: Path, call: Call) -> None:
    gpus = StandIn(tmp_path, devices=1, installed=False)
    assert not gpus.library.exists()
    assert gpus.calls() == {}
    gpus.install("no_gpm")
    nvml = call(gpus)
    assert nvml.error("n.nvmlGpmSampleAlloc()") == 13
    gpus.install("v3")
    assert nvml("n.nvmlDeviceGetCount()") == 1  # the old one works on, for who has it
    assert nvml.error("n.nvmlGpmSampleAlloc()") == 13
    assert call(gpus).error("n.nvmlGpmSampleAlloc()") is None
    gpus.remove()
    assert not gpus.library.exists()


def test_two_libraries_in_one_process_keep_to_their_own_scripts(tmp_path: Path, call: Call) -> None:
    one, two = StandIn(tmp_path / "one", devices=1), StandIn(tmp_path / "two", devices=2)
    nvml = call(one)
    nvml(f"other, count = ctypes.CDLL({str(two.library)!r}), ctypes.c_uint()")
    assert nvml("[other.nvmlInit_v2(), other.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value]") == [
        0,
        0,
        2,
    ]
    assert nvml("n.nvmlDeviceGetCount()") == 1


def test_a_folder_for_looking_at_things_by_hand(tmp_path: Path, call: Call) -> None:
    command = [sys.executable, "-m", "tests.stand_ins.nvml", str(tmp_path / "by hand"), "--devices", "3"]
    printed = subprocess.check_output(command, text=True, cwd=ROOT).strip()
    nvml = Caller(Path(printed))
    try:
        assert nvml("n.nvmlDeviceGetCount()") == 3
        assert nvml("n.nvmlDeviceGetUtilizationRates(gpu(2)).gpu") == 87
        first = nvml("n.nvmlDeviceGetTotalEnergyConsumption(gpu(2))")
        while nvml("n.nvmlDeviceGetTotalEnergyConsumption(gpu(2))") == first:
            time.sleep(0.01)
    finally:
        nvml.close()
