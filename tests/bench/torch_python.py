"""A Python with PyTorch, for the workload that trains: a virtual environment in the user's cache.

    python -m tests.bench.torch_python

makes it, if need be, and prints the path of its interpreter. requirements-torch.txt is written by

    pip-compile --generate-hashes --strip-extras --allow-unsafe --no-emit-index-url --no-emit-find-links \
        --no-emit-trusted-host --output-file requirements-torch.txt requirements-torch.in
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.stand_ins.real_nvml import MissingError

CACHE = Path("~/.cache/expanse-ebpf-torch").expanduser()
REQUIREMENTS = Path(__file__).with_name("requirements-torch.txt")
INSTALL_S = 1800.0  # some 3 GB
_UNUSED_S = 30 * 86400  # what no run has used for so long is thrown away


def torch_python() -> Path:
    """The interpreter; made at the first call, which takes minutes. Raises MissingError with the reason."""
    made_by = f"{sys.version_info[:2]} {Path(sys.executable).resolve()}"
    key = hashlib.sha256(REQUIREMENTS.read_bytes() + made_by.encode()).hexdigest()[:16]
    kept = CACHE / f"venv-{key}"
    if not kept.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not kept.exists():  # nor has another run made it meanwhile
                _make(kept)
    os.utime(kept)
    return kept / "bin/python"


def _make(kept: Path) -> None:
    for unused in CACHE.glob("venv-*"):
        if time.time() - unused.stat().st_mtime > _UNUSED_S:
            shutil.rmtree(unused)
    making = CACHE / f".making-{kept.name}"
    shutil.rmtree(making, ignore_errors=True)
    options = ["--quiet", "--no-cache-dir", "--disable-pip-version-check", "--require-hashes"]
    _call([sys.executable, "-m", "venv", str(making)])
    pip = [str(making / "bin/python"), "-m", "pip"]
    _call([*pip, "install", *options, "--only-binary", ":all:", "--requirement", str(REQUIREMENTS)])
    making.rename(kept)


def _call(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise MissingError(f"no PyTorch to be had: it was not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        words = (done.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise MissingError(f"no PyTorch to be had: {words}")


if __name__ == "__main__":
    print(torch_python())
