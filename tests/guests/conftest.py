"""The fixture `guest`: another kernel, architecture, cgroup mode or init system, for the length of a test."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.guests import image
from tests.guests.machine import Guest, GuestError, Result

HERE = Path(__file__).parent
INSIDE = HERE / "inside"  # programs that run in the guest, there in /payload/files/inside


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("slow")
            item.add_marker(pytest.mark.timeout(1800))  # the guest's own limit comes first


class Node:
    """A kind of guest. Each run() or start() boots one anew, from the same untouched images."""

    def __init__(
        self,
        folder: Path,
        wheel: Path,
        arch: str,
        kernel: str,
        options: dict[str, Any],
        packages: tuple[str, ...] = (),
    ) -> None:
        self.arch = arch
        self.kernel = image.kernel(kernel, arch)
        self._folder = folder
        self._wheel = wheel
        self._options = options
        self._packages = packages
        self._boots = 0
        self._running: list[Guest] = []

    def start(self, command: Sequence[str], files: Iterable[Path] = (), **options: Any) -> Guest:
        """Boot and begin `command`; `files` lie in /payload/files there. See Guest for the options."""
        self._boots += 1
        folder = self._folder / f"boot-{self._boots}"
        folder.mkdir(parents=True)
        payload = image.payload(self._wheel, [INSIDE, *files], command, folder)
        root = image.root(self.arch, self._packages)
        running = Guest(self.kernel, root, payload, folder, arch=self.arch, **(self._options | options))
        self._running.append(running)
        return running

    def run(self, command: Sequence[str], files: Iterable[Path] = (), **options: Any) -> Result:
        """Boot, run `command` to its end and power off."""
        with self.start(command, files, **options) as running:
            return running.finish()

    def close(self) -> None:
        """End what still runs."""
        for running in self._running:
            running.close()


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel, of the working tree."""
    image.prune()
    return image.build_wheel(tmp_path_factory.mktemp("wheel"))


def choose_accelerator(wheel: Path, folder: Path) -> str:
    """Emulation ("tcg"), or "kvm" where GUESTS_KVM=1 asks for it and a guest shows that it works here.

    Nested virtualisation that is there and yet faults on some instructions is common, hence the trial.
    """
    if os.environ.get("GUESTS_KVM") != "1":
        return "tcg"
    trial = ["python3", "-c", "import grpc; print(sum(number * 0.5 for number in range(10**7)))"]
    payload = image.payload(wheel, [], trial, folder)
    kernel, root = image.kernel("6.1", "amd64"), image.root("amd64")
    try:
        with Guest(kernel, root, payload, folder, arch="amd64", accelerator="kvm", limit_s=60) as running:
            running.finish().check()
    except GuestError as error:
        print(f"guests: KVM failed its trial, so they are emulated: {error}", file=sys.stderr)
        return "tcg"
    return "kvm"


@pytest.fixture(scope="session")
def accelerator(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> str:
    return choose_accelerator(wheel, tmp_path_factory.mktemp("kvm"))


@pytest.fixture
def guest(tmp_path: Path, wheel: Path, accelerator: str) -> Generator[Callable[..., Node]]:
    """Make a kind of guest: `guest(kernel="6.1", arch="arm64", cgroup="v2", init="systemd")`.

    `kernel` is one of image.KERNELS, `arch` "amd64" or "arm64", `cgroup` "v2", "v1" or "hybrid", `init`
    "none" or "systemd"; `packages` are Debian packages that it needs besides; the other options are those
    of Guest.
    """
    made: list[Node] = []

    def make(
        *, kernel: str = "6.1", arch: str = "amd64", packages: tuple[str, ...] = (), **options: Any
    ) -> Node:
        if arch == "amd64":
            options.setdefault("accelerator", accelerator)
        made.append(Node(tmp_path / f"guest-{len(made)}", wheel, arch, kernel, options, packages))
        return made[-1]

    yield make
    for node in made:
        node.close()
