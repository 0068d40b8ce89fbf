"""`bench.gpu_smoke`, which has to run at the first try on a machine that is lent for minutes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu_smoke import __main__ as smoke
from bench.gpu_smoke import load
from tests.stand_ins.h100 import WORKING
from tests.stand_ins.nvml import StandIn

ROOT = Path(__file__).resolve().parents[1]
# libcuda.so.1 without a GPU: takes only what the real one would, and "tensor" not even that.
CUDA = """
#include <stdint.h>
#include <string.h>
#include <unistd.h>
int cuInit(unsigned f) { return f; }
int cuDeviceGet(int *d, int o) { *d = 40 + o; return 0; }
int cuDevicePrimaryCtxRetain(void **c, int d) { *c = (void *)1; return d != 40; }
int cuCtxSetCurrent(void *c) { return c != (void *)1; }
int cuDeviceGetUuid(char *u, int d) { memset(u, 0, 16); return d != 40; }
int cuDeviceGetAttribute(int *v, int a, int d) { *v = 132; return a != 16 || d != 40; }
int cuGetErrorString(int c, const char **s) { *s = "refused"; return !c; }
int cuMemAlloc_v2(uint64_t *a, size_t n) { *a = n; return 0; }
int cuMemsetD32Async(uint64_t a, unsigned v, size_t n, void *stream)
{
    return a != 4 * n || n != 1 << 28 || v != 1 || stream;
}
int cuCtxSynchronize(void) { usleep(1000); return 0; }
int cuModuleLoadData(void **m, const char *t) { *m = (void *)2; return !!strstr(t, "mma.sync"); }
int cuModuleGetFunction(void **f, void *m, const char *n)
{
    *f = (void *)3;
    return m != (void *)2 || strcmp(n, "work");
}
int cuLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, void *stream, uint64_t **p, void **extra)
{
    if (f != (void *)3 || gx != 132 * 8 || gy * gz != 1 || bx != 256 || by * bz != 1)
        return 9;
    if (shared || stream || extra || *p[1] != 4)
        return 10;
    usleep(*p[0] / 1000);
    return 0;
}
"""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds that library."""
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(CUDA)
    build = ["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"]
    subprocess.run(build, cwd=folder, check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def run(out: Path, *arguments: str, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    command = [sys.executable, "-m", "bench.gpu_smoke", "--quick", "--out", str(out), *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert (out / "smoke.txt").read_text() == done.stdout.removesuffix("\n"), done.stderr
    return done.returncode, json.loads((out / "smoke.json").read_text()), done.stdout


@pytest.mark.slow
def test_every_step_says_what_it_found(tmp_path: Path, cuda: dict[str, str]) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=2)
    gpus.auto(0, **WORKING)
    gpus.gpm(0, {2: 88.5})
    gpus.fail("nvmlDeviceGetTemperature", 3)
    status, found, text = run(tmp_path / "out", "--library", str(gpus.library), env=cuda)
    assert (status, found["failed"]) == (0, {})
    assert found["skipped"] == {"tensor": "load: cuModuleLoadData: refused (CUDA error 1)"}
    assert found["calls"]["GetTemperature"] == {"error": "3: Not Supported"}
    assert found["calls"]["GetPowerUsage"]["calls"] == 300
    assert "temperature_c                   missing: NVML error 3" in text
    (first, second) = (device["uuid"] for device in found["devices"])
    assert found["buffers"][first]["utilization"]["us between, median"] == 100_000
    assert found["events"][second]["Xid registration"] == "works"
    assert found["mig"][second]["GPM"] == 1
    assert list(found["watches"]) == ["idle", "fp32", "fp32 half of the time", "fp64", "memset"]
    for name, watch in found["watches"].items():
        gpu = watch["gpus"][first]
        assert gpu["busy"] == pytest.approx(0.87)
        assert gpu["profile"]["sm_active"] == pytest.approx(0.885)
        assert gpu["energy by its counter, W"] == pytest.approx(610, rel=0.05)
        assert (watch["worked"] is None) is (name == "idle")
        lines = (tmp_path / "out" / f"reports-{name.replace(' ', '-')}.jsonl").read_text().splitlines()
        assert len(lines) == watch["reports"] == 5
    assert 0.4 < found["watches"]["fp32 half of the time"]["worked"] < 0.75
    assert found["watches"]["fp64"]["worked"] > 0.9


@pytest.mark.slow
def test_a_step_that_crashes_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    gpus.crash("nvmlEventSetCreate")  # the worker's too
    status, found, text = run(tmp_path / "out", "--library", str(gpus.library))
    assert status == 1
    assert found["failed"] == {"worker": "status -11: ", "events": "status -11: "}
    assert found["calls"]["GetUUID"]["calls"] == 300
    assert found["watches"]["idle"]["nvml"]["code"] == "worker_died"
    assert "failed: events: status -11" in text


def test_a_step_that_hangs_is_left_and_has_said_what_came_before(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    gpus.hang("nvmlDeviceGetMemoryInfo")
    smoking = smoke.Smoke(tmp_path, str(gpus.library), quick=True)
    said = smoking.step("calls", deadline_s=2.0)
    assert {"GetUtilizationRates"} <= said.keys() < {"GetUtilizationRates", "GetFieldValues (9 fields)", "x"}
    assert smoking.failed == {"calls": "no end within 2 s"}


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [(9, 0, "no driver: the NVIDIA driver is not loaded"), (12, 0, "no driver"), (18, 1, "error 18")],
)
def test_without_a_driver_there_is_nothing_to_do(tmp_path: Path, code: int, status: int, words: str) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=1)
    gpus.fail("nvmlInit", code)
    got, found, text = run(tmp_path / "out", "--library", str(gpus.library))
    assert (got, found["nvml error"]) == (status, code)
    assert words in text


def test_kernels_are_told_to_the_driver_as_text() -> None:
    for kind in load.KINDS[:3]:
        text = load.ptx(kind)
        assert text.count("AGAIN") == 2
        assert "{{" not in text
        assert text.isascii()
