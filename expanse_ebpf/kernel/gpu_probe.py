"""Reading and trying what this node can do for the source "gpu"; the decisions are in gpu_features.py.

NVML may hang, crash or kill, so it is asked by a process of its own, which is left behind when it cannot
be ended: this one goes on.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Literal

from expanse_ebpf.config import Config
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs import hierarchies
from expanse_ebpf.jobs.hierarchies import Hierarchy
from expanse_ebpf.kernel import device_programs, gpu_features
from expanse_ebpf.kernel.features import Finding
from expanse_ebpf.kernel.libbpf import BpfError
from expanse_ebpf.text import clean

# As in expanse_ebpf/nvml/client.py, which this package may not import.
DRIVER_FILES = ("/proc/driver/nvidia/version", "/dev/dxg", "/dev/nvhost-ctrl-gpu")
DEADLINE_S = 5.0
_END_S = 0.3  # how long the end of a process that was killed is waited for
_KUBELET = "/var/lib/kubelet"


def findings(config: Config, pod_resources: Literal["running", "absent", "stale", "denied"]) -> list[Finding]:
    """What there is to say of GPUs; one line where there are none.

    `pod_resources`: how it stands with the socket of that name.
    """
    if not config.sources.gpu:
        return [gpu_features.switched_off()]
    driver = [file for file in DRIVER_FILES if Path(file).exists()]
    if not driver and not config.gpu.library:
        return [gpu_features.no_driver(_is_installed())]
    found = _nvml(config)
    if DRIVER_FILES[0] in driver:  # others have other device files
        found.append(_devices(Path("/dev"), Path("/proc/driver/nvidia")))
    kubelet = Path(_KUBELET).is_dir() or "KUBERNETES_SERVICE_HOST" in os.environ
    pods = gpu_features.pod_resources(config.gpu.pod_resources, pod_resources, kubelet)
    return [*found, *([pods] if pods else []), _device_cgroups()]


def _is_installed() -> bool:
    try:
        ctypes.CDLL("libnvidia-ml.so.1")  # which begins nothing
    except OSError:
        return False
    return True


def _nvml(config: Config) -> list[Finding]:
    library = config.gpu.library
    if library and not Path(library).exists():
        return [gpu_features.failed(f"there is no {clean(library)} (gpu.library)")]
    command = [sys.executable, "-EsP", "-m", "expanse_ebpf.nvml.worker", "--once", "--profiler"]
    command += ["--library", library] if library else []
    answer = ask(command, DEADLINE_S)
    if answer is None:
        return [gpu_features.hung(DEADLINE_S)]
    output, why = answer
    said = gpu_features.parse_answer(output)
    if said is None:
        return [gpu_features.failed(why)]
    found = [gpu_features.nvml(said)]
    if any(not gpu.failed for gpu in said.gpus):
        found.append(gpu_features.profiler(said, config.gpu.profiler))
    return found


def ask(command: list[str], deadline_s: float) -> tuple[str, str] | None:
    """What the command has printed, and how it ended, in words; None when it has not ended in time."""
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # One that hangs in the kernel does not end; waiting for it would hang as well.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return None
    how = f"signal {-process.returncode}" if process.returncode < 0 else f"status {process.returncode}"
    last = clean(errors.decode("utf-8", "replace").strip().rpartition("\n")[2], 200)
    return output.decode("utf-8", "replace"), f"it ended with {how}{f', {last}' if last else ''}"


def _devices(devices: Path, driver: Path) -> Finding:
    """The device files in `devices`, the GPUs in /proc/driver/nvidia."""
    control = devices / "nvidiactl"
    state: Literal["open", "denied", "absent"] = "absent"
    if control.exists():
        state = "open" if os.access(control, os.R_OK | os.W_OK) else "denied"
    nodes = sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in _names(devices))
    return gpu_features.devices(state, nodes, len(_names(driver / "gpus")))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)  # noqa: PTH208 (names are all that is wanted)
    except OSError:
        return []


def _device_cgroups() -> Finding:
    """Read the device programs that decide for this very process, for a trial."""
    try:
        mounted = hierarchies.mounted()
    except UnavailableError:
        mounted = []
    v1 = any("devices" in hierarchy.controllers for hierarchy in mounted)
    read = 0
    for hierarchy in mounted:
        if hierarchy.name != "unified":
            continue
        try:
            for number in device_programs.attached(_own_cgroup(hierarchy)):
                device_programs.instructions(number)
                read += 1
        except BpfError as error:
            if error.errno not in (errno.EINVAL, errno.ENOSYS):  # else a kernel without such programs
                return gpu_features.device_cgroups(v1, read, error.errno)
        except OSError as error:
            return gpu_features.device_cgroups(v1, read, error.errno or errno.EIO)
        except UnavailableError:  # without libbpf, which has a line of its own
            continue
    return gpu_features.device_cgroups(v1, read, 0)


def _own_cgroup(hierarchy: Hierarchy) -> str:
    """This process's cgroup in the hierarchy of v2; the top of it where it lies elsewhere."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace").splitlines():
            directory = hierarchy.directory(line[3:]) if line.startswith("0::") else None
            if directory is not None and Path(directory).is_dir():
                return directory
    return hierarchy.mount
