"""What the units and the documentation say of GPUs."""

from __future__ import annotations

import re
import tomllib
from dataclasses import fields
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from expanse_ebpf.config import Config, GpuConfig
from expanse_ebpf.nvml import client, device, reasons

ROOT = Path(__file__).resolve().parents[1]
UNIT = (ROOT / "deploy/systemd/expanse-ebpf.service").read_text(encoding="utf-8")
DOCUMENT = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
# Lines of /proc/devices, of drivers from 470 on.
DEVICES = """
195 nvidia
195 nvidia-frontend
195 nvidia-modeset
195 nvidiactl
234 nvidia-caps-imex-channels
236 nvidia-nvswitch
237 nvidia-nvlink
238 nvidia-caps
511 nvidia-uvm
"""
OTHERS = ("1 mem", "4 tty", "10 misc", "226 drm", "229 hvc", "254 gpiochip")


def is_allowed(line: str) -> bool:
    """As systemd reads it: a number is the major, a name a pattern for those in /proc/devices."""
    major, name = line.split()
    patterns = re.findall(r"^DeviceAllow=char-(\S+) rw$", UNIT, re.MULTILINE)
    return any(pattern == major if pattern.isdigit() else fnmatchcase(name, pattern) for pattern in patterns)


@pytest.mark.parametrize("line", DEVICES.strip().splitlines())
def test_the_unit_lets_the_agent_open_each_of_the_drivers_devices(line: str) -> None:
    assert is_allowed(line)


@pytest.mark.parametrize("line", OTHERS)
def test_the_unit_lets_it_open_no_others(line: str) -> None:
    assert not is_allowed(line)


def test_gpus_are_allowed_before_their_driver_is_loaded() -> None:
    assert is_allowed("195 not-there-yet")


def test_the_kubelets_directory_is_mounted_and_not_its_socket() -> None:
    """A kubelet that is started anew makes a new socket, and a mount of the old one leads nowhere."""
    files = [*(ROOT / "deploy").rglob("*"), *(ROOT / "docs").glob("*.md")]
    texts = [file.read_text(encoding="utf-8") for file in files if file.is_file()]
    paths = [
        path
        for text in texts
        for path in re.findall(r"hostPath:\s*\{?\s*path:\s*\"?([^\s,}\"]+)", text)
        if "pod-resources" in path
    ]
    assert paths
    assert all(path.endswith("/pod-resources") for path in paths)
    assert GpuConfig().pod_resources.startswith(f"{paths[0]}/")


def table(heading: str) -> dict[str, list[str]]:
    """The rows of the first table below a heading, by the text in their first cell's quotes."""
    section = DOCUMENT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.*)\|$", section, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_every_setting_is_documented_with_its_default() -> None:
    settings = table("Settings")
    assert settings.pop("[gpu]")[0] == "default"  # the table's head
    documented = {name: tomllib.loads(f"x = {cells[0].strip('`')}")["x"] for name, cells in settings.items()}
    assert documented == {f.name: getattr(Config().gpu, f.name) for f in fields(GpuConfig)}


def test_every_word_for_why_nvml_is_silent_is_documented() -> None:
    source = Path(client.__file__).read_text(encoding="utf-8")
    words = {word for word, _ in (*reasons._CODES.values(), *reasons._OWN.values())}
    words |= set(re.findall(r"_down\((?:now, )?\"(\w+)\"", source)) | {client._STARTING[0]}
    assert len(words) > 20
    assert table("Why there are no figures").keys() - {"nvml_error_N"} == words


def test_every_figure_that_is_read_in_each_tick_is_documented() -> None:
    section = DOCUMENT.split("\n## What is collected\n")[1].split("\nRead every 30 s")[0]
    for name, _ in device._FIELDS.values():
        name, _, cause = name.partition(".")
        assert name in section
        assert cause in section
