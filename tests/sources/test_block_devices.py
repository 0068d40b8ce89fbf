"""Devices that stand on others."""

from __future__ import annotations

from pathlib import Path

import pytest

from expanse_ebpf.sources.block_devices import Devices


@pytest.mark.parametrize(
    ("device", "stacked"),
    [
        (b"259:0", False),  # a disk
        (b"259:1", False),  # its partition has no folder of that kind at all
        (b"253:0", True),  # device mapper on it
        (b"7:0", True),  # a loop device
        (b"1:99", False),  # gone
        (b"../..", False),
        (b"", False),
        (b"9" * 100, False),
        (b"\xff:\xff", False),
    ],
)
def test_device(tmp_path: Path, device: bytes, stacked: bool) -> None:
    for folder in ("259:0/slaves", "259:1", "253:0/slaves/nvme0n1", "7:0/slaves", "7:0/loop"):
        (tmp_path / folder).mkdir(parents=True)
    assert Devices(str(tmp_path)).stacked(device) is stacked


def test_looked_up_once(tmp_path: Path) -> None:
    devices = Devices(str(tmp_path))
    assert not devices.stacked(b"253:0")
    (tmp_path / "253:0/slaves/sda").mkdir(parents=True)
    assert not devices.stacked(b"253:0")
