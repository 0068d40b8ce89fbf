"""Run a command of the package as the user nobody, without any capability."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import expanse_ebpf

NOBODY = 65534
PACKAGES = Path(expanse_ebpf.__file__).parents[1]
MAIN = "from expanse_ebpf.cli import main; main()"


def _closed(path: Path) -> Path | None:
    """The first folder on the way to `path` that others may not enter."""
    return next((p for p in [*reversed(path.parents), path] if not p.stat().st_mode & stat.S_IXOTH), None)


def argv(*arguments: str) -> list[str]:
    """`expanse-ebpf ARGUMENTS` as nobody.

    Python may stand in a folder that only root can enter; in a mount namespace of the command's own
    such a folder is covered by an open one with nothing but Python in it.
    """
    script = ["set -e", "mount -t tmpfs none /mnt"]
    places = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), PACKAGES}
    for number, place in enumerate(sorted(places)):
        closed = _closed(place)
        if closed is not None:
            script += [
                f"mkdir /mnt/{number}",
                f"mount --bind '{place}' /mnt/{number}",
                f"mount -t tmpfs -o mode=755 none '{closed}'",
                f"mkdir -p '{place}'",
                f"mount --bind /mnt/{number} '{place}'",
            ]
    script.append(f"cd /; PYTHONPATH='{PACKAGES}' PYTHONDONTWRITEBYTECODE=1 exec \"$@\"")
    drop = [
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "--inh-caps=-all",
        "--bounding-set=-all",
    ]
    return [
        *("unshare", "--mount", "--propagation", "private", "sh", "-c", "\n".join(script), "sh"),
        *("setpriv", *drop, os.fspath(sys.executable), "-c", MAIN, *arguments),
    ]
