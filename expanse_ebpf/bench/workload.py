"""From a plan's workload to a command, and from what the command said to the time that is compared."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from expanse_ebpf.bench.plan import Workload
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.text import clean

_SCRIPTS = Path(__file__).with_name("workloads")
# Numbers of the plan that are options of the scripts; 0 leaves the script's own default.
_OPTIONS = {
    "resnet50": ("cpus", "steps", "batch"),
    "data_loader": ("cpus", "steps", "batch"),
    "switches": ("cpus", "steps"),
    "launches": ("steps", "rate_hz"),
}
_SECONDS = r"^seconds (\d+\.\d+)$"  # the scripts' last line
# What a Python must be able to do for a workload, and what helps it.
_TRIALS = {
    "resnet50": (
        "import torch, torchvision",
        "install torch and torchvision, or name another `python`",
    ),
    "launches": (
        "import ctypes, sys; ctypes.CDLL(sys.argv[1])",
        "install NVIDIA's driver, or name another `library`",
    ),
}
_TRIAL_S = 120.0  # importing PyTorch from a cold disk takes a while


def command(workload: Workload) -> list[str]:
    """The command line, ready to be executed."""
    if workload.kind == "command":
        return list(workload.command)
    made = [workload.python or sys.executable, str(_SCRIPTS / f"{workload.kind}.py")]
    for name in _OPTIONS[workload.kind]:
        if value := getattr(workload, name):
            made += [f"--{name.replace('_', '-')}", str(value)]
    if workload.kind == "resnet50":
        made += ["--device", workload.device]
        if workload.images:
            made += ["--images", workload.images]
    elif workload.kind == "launches":
        made += ["--library", workload.library]
    return made


def check(workload: Workload) -> None:
    """Raise UnavailableError, with the remedy, when the workload cannot run on this machine."""
    where = f"workloads.{workload.name}"
    program = command(workload)[0]
    if shutil.which(program) is None:
        raise UnavailableError(f"{where}: {clean(program)} is no program that can be executed here")
    if workload.images and not _has_classes(workload.images):
        raise UnavailableError(
            f"{where}.images: {clean(workload.images)} is no folder with a folder of images for each class"
        )
    if workload.kind not in _TRIALS:
        return
    statement, remedy = _TRIALS[workload.kind]
    trial = [program, "-c", statement, workload.library]
    try:
        done = subprocess.run(
            trial, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRIAL_S, check=False
        )
        said = done.stderr.decode(errors="replace") if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        said = str(error)
    if said:
        last = clean(said.strip().splitlines()[-1])
        raise UnavailableError(f"{where}: {clean(program)} cannot run it: {last}; {remedy}")


def _has_classes(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return any(entry.is_dir() for entry in entries)
    except OSError:
        return False


def seconds(workload: Workload, output: str, wall_s: float) -> float:
    """The time that is compared, of a run that ended well; raises ValueError with the reason for none.

    `output` is what the run printed, `wall_s` the seconds from its start to its exit.
    """
    pattern = workload.time_pattern if workload.kind == "command" else _SECONDS
    if not pattern:
        return wall_s
    # The last match: a program that reports again and again has its whole time in the last line.
    found = [match[1] for match in re.finditer(pattern, output, re.MULTILINE)]
    if not found:
        raise ValueError(f"nothing in its output matches '{clean(pattern)}'")
    try:
        value = float(found[-1])
    except (TypeError, ValueError):
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{clean(str(found[-1]))!r} in its output is no time in seconds")
    return value
