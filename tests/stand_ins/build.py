"""Compiles the stand-ins: that for libnvidia-ml.so.1 here, those for CUDA in cuda.py."""

from __future__ import annotations

import atexit
import functools
import subprocess
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
SONAME = "libnvidia-ml.so.1"
# Which symbols the library has; see README.md.
VARIANTS = {
    "v3": (),
    "v3_long": ("-DRECORD_V3=nvmlProcessDetail_v1_t",),
    "v3_short": ("-DRECORD_V3=nvmlProcessInfo_v1_t",),
    "v2": ("-DPROCESS_LISTS=2",),
    "unsuffixed": ("-DPROCESS_LISTS=1",),
    "none": ("-DPROCESS_LISTS=0",),
    "no_gpm": ("-DWITHOUT_GPM",),
    "old": ("-DPROCESS_LISTS=1", "-DWITHOUT_GPM", "-DOLD_DRIVER"),
}
COMPILER = ["gcc", "-std=gnu11", "-fPIC", "-pthread", "-Wall", "-Wextra", "-Werror"]


@functools.cache
def workshop() -> Path:
    """Where libraries are compiled; goes with the process."""
    folder = tempfile.TemporaryDirectory(prefix="expanse-stand-in-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


@functools.cache
def build(variant: str) -> Path:
    """The library in one of the VARIANTS, compiled once in a process; works where it is copied to."""
    library = workshop() / variant / SONAME
    library.parent.mkdir()
    command = [*COMPILER, "-O1", "-shared", "-fvisibility=hidden"]
    command += [f"-Wl,-soname,{SONAME}", "-Wl,-z,defs", *VARIANTS[variant]]
    sources = sorted(HERE.glob("nvml*.c"))
    subprocess.run([*command, "-o", library, *sources, "-ldl"], check=True)
    return library
