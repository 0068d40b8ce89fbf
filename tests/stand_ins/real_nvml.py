"""NVIDIA's own libnvidia-ml.so.1, to hold the stand-in against; without a driver it has symbols and words."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
from pathlib import Path

from tests.guests.packages import CACHE, Suite

_SUITE = "bookworm"
_PACKAGE = "libnvidia-ml1"  # in non-free; driver line 535


class MissingError(Exception):
    """The library is not to be had on this machine; says why."""


def real_library() -> Path:
    """The library out of Debian's package, kept in the user's cache; raises MissingError."""
    missing = [program for program in ("apt-get", "dpkg", "dpkg-deb") if shutil.which(program) is None]
    if missing:
        raise MissingError(f"NVIDIA's library comes out of a Debian package, and there is no {missing[0]}")
    folder = CACHE / "nvml"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            architecture = subprocess.check_output(["dpkg", "--print-architecture"], text=True).strip()
            (package,) = Suite(_SUITE, architecture, "non-free").fetch([_PACKAGE], alone=True)
            return _library_in(package, folder / package.stem)
        except (RuntimeError, ValueError, subprocess.CalledProcessError) as error:
            raise MissingError(f"Debian's package {_PACKAGE} is not to be had: {error}") from error


def _library_in(package: Path, folder: Path) -> Path:
    if not folder.exists():
        for old in folder.parent.glob(f"{_PACKAGE}_*"):
            shutil.rmtree(old)
        scratch = folder.with_name(f"{folder.name}.new")
        subprocess.run(["dpkg-deb", "-x", package, scratch], check=True)
        scratch.rename(folder)
    (library,) = (path for path in folder.rglob("libnvidia-ml.so.*") if not path.is_symlink())
    return library
