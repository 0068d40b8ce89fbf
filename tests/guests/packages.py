"""Debian packages of any suite and architecture: found, downloaded and unpacked, never installed.

Everything is done by apt itself with a state of its own, so the machine's packages do not matter and are
not touched. Nothing out of a package is run.
"""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "expanse-ebpf-guests"
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
_REFRESH_S = 7 * 86400  # how old the lists of packages may grow
# Where a merged /usr has links. They must be there before the first package is unpacked.
_MERGED = ("bin", "sbin", "lib", "lib64")


def mirror() -> str:
    """The address of the Debian mirror that this machine uses."""
    listing = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(ORIGIN)|$(LABEL)|$(REPO_URI)", "Created-By: Packages"],
        check=True,
        capture_output=True,
        text=True,
    )
    for line in listing.stdout.splitlines():
        origin, label, address = line.split("|", 2)
        if origin == label == "Debian":
            return address
    raise RuntimeError("apt knows no Debian mirror on this machine")


class Suite:
    """One suite of Debian, such as "bookworm", for one Debian architecture, such as "arm64"."""

    def __init__(self, name: str, architecture: str, component: str = "main") -> None:
        other = "" if component == "main" else f"-{component}"
        self.folder = CACHE / "apt" / f"{name}-{architecture}{other}"
        self._environment = os.environ | {"APT_CONFIG": str(self.folder / "apt.conf")}
        for folder in ("lists/partial", "cache/archives/partial"):
            (self.folder / folder).mkdir(parents=True, exist_ok=True)
        source = f"deb [signed-by={KEYRING}] {mirror()} {name} {component}\n"
        (self.folder / "sources.list").write_text(source)
        settings = {
            "APT::Architecture": architecture,
            "APT::Architectures": architecture,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": "root",
            "APT::Update::Error-Mode": "any",  # else an update that could fetch nothing is none the worse
            "Acquire::Check-Valid-Until": "false",  # no updates come for a suite that is old enough
            "Acquire::Languages": "none",
            "Dir::Cache": f"{self.folder}/cache",
            "Dir::Etc::SourceList": f"{self.folder}/sources.list",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": f"{self.folder}/lists",
            "Dir::State::status": "/dev/null",
        }
        text = "".join(f'{name} "{value}";\n' for name, value in settings.items())
        (self.folder / "apt.conf").write_text(text)
        self._refresh()

    def _apt(self, *arguments: str, cwd: Path | None = None) -> str:
        done = subprocess.run(
            arguments,
            cwd=cwd,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(arguments[:3])} for {self.folder.name}: {done.stderr.strip()}")
        return done.stdout

    def _refresh(self) -> None:
        stamp = self.folder / "refreshed"
        if stamp.exists() and time.time() - stamp.stat().st_mtime < _REFRESH_S:
            return
        try:
            self._apt("apt-get", "-qq", "update")
        except RuntimeError:
            if not stamp.exists():
                raise
            return  # what is known will do
        stamp.touch()
        self._apt("apt-get", "-qq", "autoclean")

    def needed_by(self, package: str, pattern: str) -> list[str]:
        """Names of the packages matching `pattern` that `package` needs, directly or not."""
        listing = self._apt(
            *("apt-cache", "depends", "--recurse", "--no-recommends", "--no-suggests", "--no-enhances"),
            *("--no-conflicts", "--no-breaks", "--no-replaces", package),
        )
        return sorted({line for line in listing.splitlines() if re.fullmatch(pattern, line)})

    def fetch(self, names: Sequence[str], *, alone: bool = False) -> list[Path]:
        """The packages and, unless `alone`, all that they depend on, as files; kept in the cache."""
        archives = self.folder / "cache" / "archives"
        if alone:
            listing = self._apt("apt-get", "-qq", "--print-uris", "download", *names)
        else:
            # With nothing in the cache, or apt would name only what it still has to fetch.
            empty = f"Dir::Cache::Archives={self.folder}/none/"
            listing = self._apt("apt-get", "-qq", "-y", "--print-uris", "-o", empty, "install", *names)
        files = [archives / line.split()[1] for line in listing.splitlines() if line.startswith("'")]
        if not all(file.exists() for file in files):
            if alone:
                self._apt("apt-get", "-qq", "download", *names, cwd=archives)
            else:
                self._apt("apt-get", "-qq", "-y", "--download-only", "install", *names)
        return files


def unpack(packages: Sequence[Path], root: Path) -> None:
    """Unpack into `root`, which has a merged /usr afterwards."""
    for name in _MERGED:
        (root / "usr" / name).mkdir(parents=True, exist_ok=True)
        if not (root / name).is_symlink():
            (root / name).symlink_to(f"usr/{name}")
    for package in packages:
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE) as source:
            tar = subprocess.run(
                ["tar", "-x", "--keep-directory-symlink", "-C", root], stdin=source.stdout, check=False
            )
        if source.returncode or tar.returncode:
            package.unlink()  # to be fetched anew by the next run
            raise RuntimeError(f"{package.name} could not be unpacked")
