"""NVIDIA's own libnvidia-ml.so.1 and libcuda.so.1; without a driver they have symbols and words."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from tests.guests.packages import CACHE, Suite

_SUITE = "bookworm"
# In non-free; driver line 535.
_NVML, _CUDA = "libnvidia-ml1", "libcuda1"


class MissingError(Exception):
    """The library is not to be had on this machine; says why."""


def real_library() -> Path:
    """libnvidia-ml.so out of Debian's package, kept in the user's cache; raises MissingError."""
    return _fetched(_NVML, "libnvidia-ml.so.*")


def real_driver() -> Path:
    """libcuda.so, likewise."""
    return _fetched(_CUDA, "libcuda.so.*.*")


def _fetched(name: str, library: str) -> Path:
    missing = [program for program in ("apt-get", "dpkg", "dpkg-deb") if shutil.which(program) is None]
    if missing:
        raise MissingError(f"NVIDIA's library comes out of a Debian package, and there is no {missing[0]}")
    folder = CACHE / "nvml"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
            (package,) = Suite(_SUITE, architecture, "non-free").fetch([name], alone=True)
            _unpack(package, folder / package.stem, name)
            (found,) = (path for path in (folder / package.stem).rglob(library) if not path.is_symlink())
            return found
        except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            raise MissingError(f"Debian's package {name} is not to be had: {error}") from error


def _unpack(package: Path, folder: Path, name: str) -> None:
    if not folder.exists():
        for old in folder.parent.glob(f"{name}_*"):
            shutil.rmtree(old)
        scratch = folder.with_name(f"{folder.name}.new")
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        scratch.rename(folder)
