"""What a guest boots from, without booting it."""

from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from tests.guests import image, packages


def module(folder: Path, name: str, *needs: str, packed: bool = False) -> Path:
    """A file with what is read of a kernel module."""
    data = b"\x7fELF\0license=GPL\0depends=" + ",".join(needs).encode() + b"\0name=x\0"
    path = folder / f"{name}.ko{'.xz' if packed else ''}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(lzma.compress(data) if packed else data)
    return path


def test_modules_are_loaded_after_what_they_need(tmp_path: Path) -> None:
    ring = module(tmp_path / "a", "virtio_ring")
    core = module(tmp_path / "b", "virtio", packed=True)
    disk = module(tmp_path / "a", "virtio-blk", "virtio_ring", "virtio", packed=True)
    port = module(tmp_path, "virtio_console", "virtio", "virtio_ring")
    module(tmp_path, "unwanted")
    order = image.load_order(tmp_path, ["virtio_blk", "builtin", "virtio_console"])
    assert order == [ring, core, disk, port]
    assert image.module_name(disk) == "virtio_blk"
    assert image.read_module(disk).startswith(b"\x7fELF")


def test_the_guest_gets_the_pinned_packages_of_the_product_and_no_others() -> None:
    text = image.runtime_requirements()
    names = {line.split("==")[0] for line in text.splitlines() if "==" in line}
    assert {"click", "grpcio", "protobuf", "psutil", "textual", "typing-extensions"} <= names
    assert not names & {"pytest", "mypy", "grpcio-tools", "hypothesis"}
    assert text.count("==") == len(names)
    assert text.count("--hash=sha256:") >= len(names)


def test_what_was_made_is_made_once_and_anew_for_other_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(image, "CACHE", tmp_path)
    made: list[Path] = []

    def make(folder: Path) -> None:
        made.append(folder)
        (folder / "content").write_text("x")

    first = image._kept("root", ["a", 1], make)
    assert image._kept("root", ["a", 1], make) == first
    assert (first / "content").read_text() == "x"
    assert image._kept("root", ["a", 2], make) != first
    assert len(made) == 2
    image.prune(unused_s=-1)
    assert not list((tmp_path / "root").iterdir())


def test_what_was_not_finished_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "CACHE", tmp_path)

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        image._kept("root", ["a"], fail)
    made = image._kept("root", ["a"], lambda folder: (folder / "whole").touch())
    assert [path.name for path in made.iterdir()] == ["whole"]


def test_a_package_of_another_architecture_is_found_and_unpacked(tmp_path: Path) -> None:
    with image.locked():
        (package,) = packages.Suite(image.USER_LAND, "arm64").fetch(["busybox-static"], alone=True)
    packages.unpack([package], tmp_path)
    assert (tmp_path / "bin").readlink() == Path("usr/bin")
    header = (tmp_path / "bin/busybox").read_bytes()[:20]
    assert header.startswith(b"\x7fELF")
    assert header[18] == 183  # EM_AARCH64


def test_a_package_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with image.locked(), pytest.raises(RuntimeError, match="no-such-package"):
        packages.Suite(image.USER_LAND, "arm64").fetch(["no-such-package"])
