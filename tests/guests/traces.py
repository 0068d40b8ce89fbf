"""What inside/traces.py needs in a guest: parts of these tests, and the stand-ins for CUDA."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.stand_ins import cuda

ROOT = Path(__file__).resolve().parents[2]
_TESTS = (
    *("__init__.py", "kernel/__init__.py", "kernel/groups.py", "python_stacks/__init__.py"),
    *("python_stacks/driver.py", "tracing/__init__.py", "tracing/windows.py", "stand_ins/__init__.py"),
    *("stand_ins/build.py", "stand_ins/cuda.py", "stand_ins/cuda_programs/train.py"),
)
_COMPILERS = {"amd64": "", "arm64": "aarch64-linux-gnu-"}


def files(folder: Path, arch: str) -> list[Path]:
    """Made in `folder`, for guests of that architecture."""
    for name in _TESTS:
        copy = folder / "tests" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "tests" / name, copy)
    made = [
        cuda.build(folder / f"cuda-{kind}", tail_calls=kind == "jumps", machine=_COMPILERS[arch]).folder
        for kind in ("calls", "jumps")
    ]
    return [folder / "tests", *made]
