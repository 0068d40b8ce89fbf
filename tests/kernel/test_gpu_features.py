"""What `check` says of GPUs: the decisions by tables, the reading with a stand-in for NVML."""

from __future__ import annotations

import errno
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from expanse_ebpf.config import Config, GpuConfig
from expanse_ebpf.kernel import gpu_features, gpu_probe
from expanse_ebpf.kernel.features import Finding
from expanse_ebpf.kernel.gpu_features import REMEDIES, Error, Gpu, Nvml
from expanse_ebpf.nvml import client, reasons
from tests.stand_ins.nvml import StandIn

H100 = "NVIDIA H100 80GB HBM3"
LOST = Error("gpu_is_lost", "the GPU has fallen off the bus (NVML error 15)")
GOOD = Nvml(driver="535.261.03", cuda="12.2", gpus=(Gpu(H100, profiler="gpm"), Gpu(H100, profiler="gpm")))


def found(gpu: GpuConfig, pods: str = "absent") -> dict[str, Finding]:
    return {f.name: f for f in gpu_probe.findings(replace(Config(), gpu=gpu), pods)}  # type: ignore[arg-type]


@pytest.fixture
def gpus(tmp_path: Path) -> StandIn:
    return StandIn(tmp_path / "nvml", devices=2)


# ---- decisions


@pytest.mark.parametrize(
    ("said", "status", "words"),
    [
        (GOOD, "ok", f"driver 535.261.03, CUDA 12.2: 2 {H100}"),
        (Nvml(driver="1", gpus=()), "ok", "driver 1, CUDA unknown: no GPU"),
        (
            GOOD._replace(gpus=(Gpu("A", 7), Gpu("A", 2), Gpu("B"))),
            "ok",
            "2 A, 1 B; MIG: 9 instances on 2 GPUs",
        ),
        (GOOD._replace(gpus=(Gpu("A", 1),)), "ok", "MIG: 1 instance on 1 GPU"),
        (
            GOOD._replace(gpus=(Gpu("A"), Gpu(failed=LOST), Gpu(failed=LOST))),
            "warning",
            "1 A; 2 GPUs without figures: the GPU has fallen off the bus (NVML error 15)",
        ),
        (Nvml(error=LOST), "warning", "the GPU has fallen off the bus (NVML error 15): no GPU figures"),
        (Nvml(error=Error("nvml_error_77", "NVML gives an error")), "warning", "NVML gives an error: no GPU"),
    ],
)
def test_nvml_is_never_required(said: Nvml, status: str, words: str) -> None:
    finding = gpu_features.nvml(said)
    assert (finding.name, finding.status) == ("nvml", status)
    assert words in finding.detail


def test_each_remedy_is_for_an_error_that_the_worker_has_a_word_for() -> None:
    assert {reasons.word(code) for code in range(-9, 1000)} >= REMEDIES.keys()


@pytest.mark.parametrize("said", [GOOD._replace(gpus=(Gpu(failed=LOST),)), Nvml(error=LOST)])
def test_what_helps_is_said(said: Nvml) -> None:
    assert gpu_features.nvml(said).remedy == "see the kernel log for its Xid"


@pytest.mark.parametrize(
    ("profilers", "wanted", "status", "words"),
    [
        (["gpm", "gpm"], True, "ok", "GPM on 2 of 2 GPUs"),
        (["gpm", "nvml"], True, "warning", "GPM on 1 of 2 GPUs: the nearest plain figures"),
        (["gpm"], False, "ok", "switched off (gpu.profiler); GPM on 1 of 1 GPU"),
    ],
)
def test_whether_there_is_gpm_is_said(profilers: list[str], wanted: bool, status: str, words: str) -> None:
    gpus = (*(Gpu("A", profiler=p) for p in profilers), Gpu(failed=LOST))
    finding = gpu_features.profiler(GOOD._replace(gpus=gpus), wanted)
    assert (finding.status, finding.detail.startswith(words)) == (status, True)


@pytest.mark.parametrize(
    ("state", "nodes", "driver", "status"),
    [
        ("open", 8, 8, "ok"),
        ("open", 8, 0, "ok"),
        ("open", 1, 8, "warning"),
        ("denied", 8, 8, "warning"),
        ("absent", 8, 8, "warning"),
    ],
)
def test_device_files_that_are_missing_are_told(state: str, nodes: int, driver: int, status: str) -> None:
    finding = gpu_features.devices(state, nodes, driver)  # type: ignore[arg-type]
    assert finding.status == status
    assert bool(finding.remedy) is (status != "ok")


@pytest.mark.parametrize(
    ("path", "state", "kubelet", "status"),
    [
        ("", "absent", False, None),
        ("", "absent", True, "ok"),
        ("/s", "absent", False, None),
        ("/s", "absent", True, "warning"),
        ("/s", "running", False, "ok"),
        ("/s", "stale", True, "warning"),
        ("/s", "denied", True, "warning"),
    ],
)
def test_the_kubelets_socket_is_missed_where_there_is_a_kubelet(
    path: str, state: str, kubelet: bool, status: str | None
) -> None:
    finding = gpu_features.pod_resources(path, state, kubelet)  # type: ignore[arg-type]
    assert (finding.status if finding else None) == status


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        (0, "ok", "v1 lists, device programs can be read (tried, 3 programs here)"),
        (errno.EPERM, "warning", "cannot be read (EPERM)"),
        (errno.E2BIG, "warning", "cannot be read (E2BIG)"),
        (99999, "warning", "cannot be read (99999)"),
    ],
)
def test_device_programs_that_cannot_be_read_are_told(code: int, status: str, words: str) -> None:
    finding = gpu_features.device_cgroups(True, 3, code)
    assert finding.status == status
    assert words in finding.detail


@pytest.mark.parametrize(
    "text",
    ["", "[]\n3\nsome library says hello\n", json.dumps({"round": 1, "end": 3}), json.dumps({"round": 1})],
)
def test_an_answer_that_breaks_off_is_none(text: str) -> None:
    assert gpu_features.parse_answer(text) is None


# ---- reading


def test_the_signs_of_a_driver_are_those_that_the_agent_looks_for() -> None:
    assert gpu_probe.DRIVER_FILES == client._DRIVER_FILES


def test_gpus_are_told_by_the_process_that_the_agent_uses(gpus: StandIn) -> None:
    gpus.mig(1, [{}, {}])
    said = found(GpuConfig(library=str(gpus.library), profiler=True))
    expected = f"driver 535.261.03, CUDA 12.2: 2 {H100}; MIG: 2 instances on 1 GPU"
    assert said["nvml"] == Finding("nvml", "ok", expected)
    assert said["gpu profiler"] == Finding("gpu profiler", "ok", "GPM on 2 of 2 GPUs")


def test_gpus_without_gpm_are_told(gpus: StandIn) -> None:
    gpus.install("no_gpm")
    said = found(GpuConfig(library=str(gpus.library), profiler=True))
    assert said["gpu profiler"].detail.startswith("GPM on 0 of 2 GPUs")
    assert said["gpu profiler"].status == "warning"


def test_a_gpu_that_fails_is_told_beside_one_that_does_not(gpus: StandIn) -> None:
    gpus.fail("*", 15, device=1)
    said = found(GpuConfig(library=str(gpus.library)))
    assert said["nvml"].status == "warning"
    assert f"1 {H100}; 1 GPU without figures: {reasons.sentence(15)}" in said["nvml"].detail
    assert said["gpu profiler"].detail == "switched off (gpu.profiler); GPM on 1 of 1 GPU"


def test_a_gpu_whose_profiler_fails_is_not_taken_for_one_that_has_it(gpus: StandIn) -> None:
    gpus.fail("nvmlGpmSampleGet", 999, device=0)
    said = found(GpuConfig(library=str(gpus.library), profiler=True))
    assert said["gpu profiler"].detail.startswith("GPM on 1 of 2 GPUs")


@pytest.mark.parametrize("code", [9, 12, 18, 77, 999])
def test_why_nvml_cannot_begin_is_told(gpus: StandIn, code: int) -> None:
    gpus.fail("nvmlInit", code)
    said = found(GpuConfig(library=str(gpus.library)))
    assert said["nvml"].detail == f"{reasons.sentence(code)}: no GPU figures"
    assert (said["nvml"].status, bool(said["nvml"].remedy)) == ("warning", code != 77)
    assert "gpu profiler" not in said


def test_nvml_that_crashes_takes_nobody_with_it(gpus: StandIn) -> None:
    gpus.crash("nvmlInit")
    said = found(GpuConfig(library=str(gpus.library)))["nvml"]
    assert said == Finding("nvml", "warning", "the process that asks NVML failed: it ended with signal 11")


def test_nvml_that_hangs_is_left(gpus: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "DEADLINE_S", 0.5)
    gpus.hang("nvmlDeviceGetMemoryInfo")
    began = time.monotonic()
    said = found(GpuConfig(library=str(gpus.library)))["nvml"]
    assert said.detail.startswith("NVML has not answered within 0.5 s")
    assert time.monotonic() - began < 5
    lines = [child.cmdline() for child in psutil.Process().children()]
    assert not [line for line in lines if str(gpus.library) in line]  # none is left


def test_what_a_process_says_last_is_told() -> None:
    script = "import sys; print('out'); print('a\\nb\\x1b', file=sys.stderr); sys.exit(3)"
    assert gpu_probe.ask([sys.executable, "-c", script], 20) == ("out\n", "it ended with status 3, b␛")


def test_a_library_that_is_configured_and_not_there_is_told(tmp_path: Path) -> None:
    said = found(GpuConfig(library=str(tmp_path / "none.so")))["nvml"]
    assert (said.status, "gpu.library" in said.detail) == ("warning", True)


def test_without_a_driver_no_process_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_probe, "DRIVER_FILES", ("/proc/no/such/driver",))
    monkeypatch.setattr(gpu_probe, "ask", None)  # is not called
    monkeypatch.setattr(gpu_probe, "_is_installed", lambda: False)
    assert found(GpuConfig()) == {"nvml": gpu_features.no_driver(False)}
    monkeypatch.setattr(gpu_probe, "_is_installed", lambda: True)
    assert found(GpuConfig())["nvml"].status == "warning"
    off = replace(Config(), sources=replace(Config().sources, gpu=False), gpu=GpuConfig(library="/x"))
    assert gpu_probe.findings(off, "absent") == [gpu_features.switched_off()]


def test_device_files_are_counted(tmp_path: Path) -> None:
    assert gpu_probe._devices(tmp_path, tmp_path / "driver").detail == "no /dev/nvidiactl"
    for name in ("nvidiactl", "nvidia0", "nvidia10", "nvidia-uvm", "nvidia-caps", "nvidia-modeset"):
        (tmp_path / name).touch()
    assert gpu_probe._devices(tmp_path, tmp_path / "driver").detail == "/dev/nvidiactl and 2 of /dev/nvidiaN"
    for gpu in ("0000:18:00.0", "0000:2a:00.0", "0000:3a:00.0"):
        (tmp_path / "driver/gpus" / gpu).mkdir(parents=True)
    assert gpu_probe._devices(tmp_path, tmp_path / "driver").status == "warning"


def test_device_programs_of_this_machine_are_read_for_real() -> None:
    finding = gpu_probe._device_cgroups()
    assert (finding.name, finding.status) == ("device cgroups", "ok")
    assert "can be read" in finding.detail
