"""`expanse-ebpf check`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cli import nobody
from tests.stand_ins.nvml import StandIn


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", nobody.MAIN, "check", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def test_root_on_this_machine_can_run_the_collector() -> None:
    done = check()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "the collector can run"
    assert all(line.split()[0] in ("ok", "warn") for line in lines[:-1])
    assert done.stderr == ""


def test_json_has_every_finding_and_the_verdict() -> None:
    done = check("--json")
    document = json.loads(done.stdout)
    assert document["can_run"] is True
    assert {"name", "status", "detail", "remedy"} == set(document["findings"][0])
    assert {
        "kernel",
        "btf",
        "cgroups",
        "pmu",
        "capabilities",
        "lockdown",
        "memlock",
        "nvml",
        "kernel headers",
        "bpf_loop",
        "uprobe_multi links",
        "sleepable task iterator",
        "python stacks",
        "attach cookies",
        "deep traces",
        "names of GPU kernels",
    } <= {finding["name"] for finding in document["findings"]}


def test_nobody_is_told_which_capabilities_are_missing() -> None:
    done = subprocess.run(nobody.argv("check"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    naming = [line for line in done.stdout.splitlines() if "CAP_BPF" in line and "CAP_PERFMON" in line]
    assert len(naming) == 1
    assert naming[0].startswith("fail capabilities:")
    assert "Traceback" not in done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("the collector cannot run: ")


def test_nobody_gets_the_same_verdict_as_json() -> None:
    done = subprocess.run(nobody.argv("check", "--json"), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert json.loads(done.stdout)["can_run"] is False


def test_a_bad_configuration_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[agent]\ninterval_s = 'soon'\n")
    done = check("--config", str(file))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "interval_s" in done.stderr


def test_an_unreachable_controller_is_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("[controller]\naddress = '127.0.0.1:1'\n")
    done = check("--config", str(file))
    assert done.returncode == 0
    assert any(line.startswith("warn controller: 127.0.0.1:1 ") for line in done.stdout.splitlines())


def test_gpus_are_named(tmp_path: Path) -> None:
    gpus = StandIn(tmp_path / "nvml", devices=8)
    file = tmp_path / "config.toml"
    file.write_text(f"[gpu]\nlibrary = '{gpus.library}'\n")
    done = check("--config", str(file))
    assert done.returncode == 0
    assert "ok   nvml: driver 535.261.03, CUDA 12.2: 8 NVIDIA H100 80GB HBM3" in done.stdout.splitlines()
    assert any(line.startswith("ok   device cgroups: ") for line in done.stdout.splitlines())
