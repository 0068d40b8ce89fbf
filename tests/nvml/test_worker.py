from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.process import _COMMAND as COMMAND
from tests.nvml.conftest import Asked, MakeWorker
from tests.stand_ins.nvml import StandIn, uuid

# What a round asks of each device when nothing is due that is read now and then.
OF_A_DEVICE = {
    "nvmlDeviceGetFieldValues": 1,  # energy, power, memory's temperature, throttled times, NVLink, PCIe
    "nvmlDeviceGetUtilizationRates": 1,
    "nvmlDeviceGetMemoryInfo_v2": 1,
    "nvmlDeviceGetTemperature": 1,
    "nvmlDeviceGetClockInfo": 2,  # SM, memory
    "nvmlDeviceGetCurrentClocksThrottleReasons": 1,
    "nvmlDeviceGetSamples": 1,  # utilisation
    "nvmlDeviceGetComputeRunningProcesses_v3": 1,
}
WITH_GPM = {"nvmlGpmSampleGet": 1, "nvmlGpmMetricsGet": 1}
OF_A_ROUND = {"nvmlEventSetWait_v2": 1}
OF_AN_INSTANCE = {"nvmlDeviceGetMemoryInfo": 1}
OF_AN_INSTANCE_WITH_GPM = {"nvmlGpmMigSampleGet": 1, "nvmlGpmMetricsGet": 1}
# In MIG mode these are not supported, so they are not asked for.
NOT_IN_MIG = {"nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples"}
DEVICES, ROUNDS = 3, 10


def calls_of_rounds(worker: Asked) -> dict[str, int]:
    worker.ask()
    worker.ask()
    worker.gpus.reset_calls()
    for _ in range(ROUNDS):
        worker.ask()
    return worker.gpus.calls()


@pytest.mark.parametrize("profiler", [False, True])
def test_a_round_asks_no_more_than_it_must(make_worker: MakeWorker, profiler: bool) -> None:
    worker = make_worker(*(["--profiler"] if profiler else []), devices=DEVICES, command=COMMAND)
    expected = {name: ROUNDS * DEVICES * n for name, n in OF_A_DEVICE.items()}
    expected |= {name: ROUNDS * DEVICES * n for name, n in WITH_GPM.items() if profiler}
    expected |= {name: ROUNDS * n for name, n in OF_A_ROUND.items()}
    assert calls_of_rounds(worker) == expected


def test_a_round_asks_no_more_than_it_must_of_instances(make_worker: MakeWorker) -> None:
    worker = make_worker("--profiler", command=COMMAND)
    worker.gpus.mig(0, [{}, {}])
    worker.gpus.gpm(0, {2: 50.0})
    expected: dict[str, int] = {}
    for times, calls in (
        (1, {name: n for name, n in OF_A_DEVICE.items() if name not in NOT_IN_MIG}),
        (1, WITH_GPM),
        (1, OF_A_ROUND),
        (2, OF_AN_INSTANCE),
        (2, OF_AN_INSTANCE_WITH_GPM),
    ):
        for name, n in calls.items():
            expected[name] = expected.get(name, 0) + ROUNDS * times * n
    assert calls_of_rounds(worker) == expected


def test_what_a_device_has_not_got_is_not_asked_for_in_every_round(make_worker: MakeWorker) -> None:
    worker = make_worker(command=COMMAND)
    with worker.gpus.batch():
        worker.gpus.set(0, temperature_c=None, power_mw=None, energy_mj=None, clock_sm=None)
        worker.gpus.say("0", "samples.utilization", None)
    expected = {name: ROUNDS * n for name, n in (OF_A_DEVICE | OF_A_ROUND).items()}
    del expected["nvmlDeviceGetTemperature"], expected["nvmlDeviceGetSamples"]
    expected["nvmlDeviceGetClockInfo"] = ROUNDS
    assert calls_of_rounds(worker) == expected


def test_devices_in_skip_are_not_asked(make_worker: MakeWorker) -> None:
    worker = make_worker(devices=3)

    def asked(**question: dict[str, int]) -> list[str]:
        lines = worker.ask(**question).lines
        assert sorted(lines[0]["nvml"]["order"]) == [uuid(0), uuid(1), uuid(2)]
        return [line["device"]["uuid"] for line in lines if "device" in line]

    assert asked() == [uuid(0), uuid(1), uuid(2)]
    assert asked(skip={uuid(1): reasons.HUNG}) == [uuid(0), uuid(2)]


def test_a_worker_looks_when_it_is_asked_to(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.ask()
    at = time.monotonic() + 0.3
    worker.ask(at=at)
    assert 0 <= time.monotonic() - at < 5


def test_the_buffers_are_emptied_between_questions_that_are_far_apart(make_worker: MakeWorker) -> None:
    worker = make_worker(command=COMMAND)
    worker.gpus.auto(0, utilization=50)
    before = worker.ask().gpu()
    worker.gpus.reset_calls()
    after = worker.ask(at=time.monotonic() + 2.5).gpu()
    assert worker.gpus.calls()["nvmlDeviceGetSamples"] >= 3
    span_ns = after.time_ns - before.time_ns
    assert abs((after.measured_ns - before.measured_ns) - span_ns) <= 200_000_000


def test_the_buffers_are_emptied_while_there_is_no_question(make_worker: MakeWorker) -> None:
    worker = make_worker(command=COMMAND)
    worker.ask()
    worker.gpus.reset_calls()
    until = time.monotonic() + 10
    while not worker.gpus.calls().get("nvmlDeviceGetSamples"):
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_worker_ends_when_there_can_be_no_more_questions(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.ask()
    worker.process.ask(f'{{"round": 2, "at": {time.monotonic() + 100}}}\n'.encode())
    worker.process.close()
    until = time.monotonic() + 10
    while not (how := worker.process.ended()):
        assert time.monotonic() < until
        time.sleep(0.005)
    assert how == "with status 0"


def test_a_worker_has_nothing_of_the_agents_but_three_files(make_worker: MakeWorker, tmp_path: Path) -> None:
    with (tmp_path / "secret").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        high = os.dup2(file.fileno(), 700)
        worker = make_worker()
        worker.ask()
        open_files = {
            int(entry.name): str(entry.readlink())
            for entry in Path(f"/proc/{worker.process.pid}/fd").iterdir()
        }
        os.close(high)
    assert {0, 1, 2} <= open_files.keys()
    assert not [name for name in open_files.values() if "secret" in name]
    # And what it opened itself: where its answers go now.
    assert all(name.startswith("pipe:") for fd, name in open_files.items() if fd > 2)
    assert len(open_files) == 4


def test_what_it_is_can_be_seen_in_ps(make_worker: MakeWorker) -> None:
    worker = make_worker(command=COMMAND)
    worker.ask()
    proc = Path(f"/proc/{worker.process.pid}")
    assert (proc / "comm").read_text() == "expanse-nvml\n"
    assert b"expanse_ebpf.nvml.worker" in (proc / "cmdline").read_bytes().split(b"\0")


def test_a_worker_lives_below_a_parent_that_is_process_1(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    agent = f"""
import os, time
assert os.getpid() == 1
from expanse_ebpf.config import GpuConfig
from expanse_ebpf.nvml.client import Client
client = Client(GpuConfig(library={str(gpus.library)!r}), 0.1)
until = time.monotonic() + 10
while not client.status.up and time.monotonic() < until:
    client.tick(time.monotonic())
    time.sleep(0.05)
client.stop()
print(client.status.up, client.status.restarts)
"""
    command = ["unshare", "--pid", "--fork", "--mount-proc", sys.executable, "-c", agent]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout, result.stderr) == ("True 0\n", "")


def test_a_person_can_ask_once(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    command = [sys.executable, "-m", "expanse_ebpf.nvml.worker", "--once", "--library", str(gpus.library)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [next(iter(line.split('"')[3:])) for line in result.stdout.splitlines()] == [
        "nvml",
        "device",
        "end",
    ]
    gpus.fail("nvmlInit", 9)
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, json.loads(result.stdout)["nvml"]) == (3, {"code": 9})


def test_a_person_is_told_what_the_errors_mean(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=3)
    command = [sys.executable, "-m", "expanse_ebpf.nvml.worker", "--once", "--library", str(gpus.library)]
    gpus.fail("nvmlDeviceGetHandleByIndex", 17, device=0)
    gpus.fail("nvmlDeviceGetMemoryInfo", 15, device=1)
    told = [json.loads(line) for line in subprocess.check_output(command, text=True).splitlines()]
    assert [line.get("errors") for line in told] == [
        {"17": {"word": "operating_system", "sentence": reasons.sentence(17)}},
        {"15": {"word": "gpu_is_lost", "sentence": reasons.sentence(15)}},
        None,
        None,
    ]
    gpus.fail("nvmlInit", 9)
    begun = subprocess.run(command, capture_output=True, text=True, check=False)
    words = {"word": "driver_not_loaded", "sentence": "the NVIDIA driver is not loaded (NVML error 9)"}
    assert json.loads(begun.stdout) == {"round": 1, "nvml": {"code": 9}, "errors": {"9": words}}
    gpus.library.write_text("no library")
    begun = subprocess.run(command, capture_output=True, text=True, check=False)
    (said,) = json.loads(begun.stdout)["errors"].values()
    why = f"{gpus.library} cannot be loaded: file too short"
    assert said == {"word": "library_not_loaded", "sentence": why}


def test_its_own_memory_and_time_are_told(make_worker: MakeWorker) -> None:
    end = make_worker().ask().lines[-1]
    assert 1 << 20 < end["pss_bytes"] < 1 << 28
    assert 1_000_000 < end["cpu_ns"] < 60_000_000_000
    assert 0 < end["end"] < 10_000_000_000


def test_versions_that_nvml_does_not_tell_are_left_out(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.gpus.fail("nvmlSystemGetDriverVersion", 999)
    worker.gpus.fail("nvmlSystemGetCudaDriverVersion", 999)
    nvml = worker.ask().lines[0]["nvml"]
    assert (nvml["driver_version"], nvml["nvml_version"], nvml["cuda_version"]) == ("", "12.535.261.03", "")
