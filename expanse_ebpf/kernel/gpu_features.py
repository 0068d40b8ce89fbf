"""What this node can do for the source "gpu": the decisions, apart from the reading (see gpu_probe.py).

Nothing here is ever "missing": a node without GPUs, or with a broken driver, runs the collector all the same.
"""

from __future__ import annotations

import errno
import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from expanse_ebpf.kernel.features import PERMISSION, Finding
from expanse_ebpf.text import clean

# What helps where NVML gives no figures, by the worker's word for the error.
REMEDIES = {
    "no_permission": "run as root",
    "driver_not_loaded": "modprobe nvidia",
    "timeout": "see the kernel log",
    "library_not_found": "install it with the driver, or set gpu.library to its path",
    "library_not_loaded": "point gpu.library at the driver's libnvidia-ml.so.1",
    "gpu_is_lost": "see the kernel log for its Xid",
    "reset_required": "nvidia-smi --gpu-reset, or boot anew",
    "operating_system": "let it open /dev/nvidiactl",
    "driver_library_mismatch": (
        "load the new driver (stop what uses the GPUs, rmmod, modprobe), or start the container anew"
    ),
    "unknown_error": "see the kernel log",
}


class Error(NamedTuple):
    """Why there are no figures, as the worker says it: a word and a sentence."""

    word: str
    sentence: str


class Gpu(NamedTuple):
    """One GPU as the worker has read it."""

    name: str = ""
    instances: int | None = None  # of MIG; None: MIG is off
    profiler: str = ""  # gpm | nvml: plain figures in its place | "": not known
    failed: Error | None = None  # when it gives nothing


class Nvml(NamedTuple):
    """What one question has brought. `error`: it cannot be asked."""

    error: Error | None = None
    driver: str = ""
    cuda: str = ""
    gpus: tuple[Gpu, ...] = ()


def parse_answer(text: str) -> Nvml | None:
    """What the lines of `expanse_ebpf.nvml.worker --once --profiler` say; None when they break off."""
    found: Nvml | None = None
    gpus = []
    for line in text.splitlines():
        try:
            said = json.loads(line)
        except ValueError:  # a library that prints to stdout
            continue
        if not isinstance(said, dict):
            continue
        if "nvml" in said:
            status = said["nvml"]
            if status.get("code"):
                return Nvml(error=_error(said, status["code"]))
            found = Nvml(driver=clean(status["driver_version"], 64), cuda=clean(status["cuda_version"], 64))
            gpus += [Gpu(failed=_error(said, code)) for code in status["absent"].values()]
        elif "device" in said:
            gpus.append(_gpu(said))
        elif "end" in said and found is not None:
            return found._replace(gpus=tuple(gpus))
    return None


def _error(line: Mapping[str, Any], code: int) -> Error:
    """What a line says of the error `code` in it."""
    words = line["errors"][str(code)]
    return Error(clean(words["word"], 64), clean(words["sentence"], 200))


def _gpu(line: Mapping[str, Any]) -> Gpu:
    device = line["device"]
    failed = device.get("lost") or device.get("failed")
    if failed:
        return Gpu(failed=_error(line, failed))
    values = device["values"]
    return Gpu(
        name=clean(str(values.get("name", "GPU")), 64),
        instances=len(device.get("instances", ())) if values.get("mig_enabled") else None,
        profiler=device["profile"]["source"] if "profile" not in device["missing"] else "",
    )


def no_driver(library: bool) -> Finding:
    """No driver is loaded; `library`: NVML is installed all the same."""
    if library:
        detail = "libnvidia-ml.so.1 is installed and no NVIDIA driver is loaded: no GPU figures"
        return Finding("nvml", "warning", detail, "modprobe nvidia, where this node has such GPUs")
    return Finding("nvml", "ok", "no NVIDIA driver: no GPU figures on this node")


def switched_off() -> Finding:
    """Nobody wants to know."""
    return Finding("nvml", "ok", "switched off (sources.gpu)")


def hung(seconds: float) -> Finding:
    """NVML was asked and said nothing."""
    return Finding(
        "nvml",
        "warning",
        f"NVML has not answered within {seconds:g} s: no GPU figures until it does",
        "see the kernel log; nvidia-smi will hang too",
    )


def failed(why: str) -> Finding:
    """The process that asks NVML has ended without an answer."""
    return Finding("nvml", "warning", f"the process that asks NVML failed: {why}")


def nvml(said: Nvml) -> Finding:
    """The driver, its GPUs and which of them give nothing."""
    if said.error:
        remedy = REMEDIES.get(said.error.word, "")
        return Finding("nvml", "warning", f"{said.error.sentence}: no GPU figures", remedy)
    good = [gpu for gpu in said.gpus if not gpu.failed]
    names = Counter(gpu.name for gpu in good)
    detail = f"driver {said.driver}, CUDA {said.cuda or 'unknown'}: "
    detail += ", ".join(f"{count} {name}" for name, count in names.items()) or "no GPU"
    divided = [gpu.instances for gpu in good if gpu.instances is not None]
    if divided:
        detail += f"; MIG: {_count(sum(divided), 'instance')} on {_count(len(divided), 'GPU')}"
    broken = Counter(gpu.failed for gpu in said.gpus if gpu.failed)
    if not broken:
        return Finding("nvml", "ok", detail)
    for error, count in broken.items():
        detail += f"; {_count(count, 'GPU')} without figures: {error.sentence}"
    return Finding("nvml", "warning", detail, REMEDIES.get(next(iter(broken)).word, ""))


def profiler(said: Nvml, wanted: bool) -> Finding:
    """Whether the GPUs have GPM, for `gpu.profiler`."""
    good = [gpu for gpu in said.gpus if not gpu.failed]
    with_gpm = sum(gpu.profiler == "gpm" for gpu in good)
    detail = f"GPM on {with_gpm} of {_count(len(good), 'GPU')}"
    if not wanted:
        return Finding("gpu profiler", "ok", f"switched off (gpu.profiler); {detail}")
    if with_gpm == len(good):
        return Finding("gpu profiler", "ok", detail)
    return Finding(
        "gpu profiler", "warning", f"{detail}: the nearest plain figures stand in, marked source=nvml"
    )


def devices(control: Literal["open", "denied", "absent"], nodes: int, driver: int) -> Finding:
    """The device files: /dev/nvidiactl, and how many of /dev/nvidiaN to how many GPUs of the driver."""
    if control == "absent":
        return Finding(
            "gpu devices",
            "warning",
            "no /dev/nvidiactl",
            "nvidia-modprobe -c 0; in a container mount the node's /dev",
        )
    if control == "denied":
        return Finding("gpu devices", "warning", "/dev/nvidiactl may not be opened", "run as root")
    detail = f"/dev/nvidiactl and {nodes} of /dev/nvidiaN"
    if nodes < driver:
        return Finding(
            "gpu devices",
            "warning",
            f"{detail}, of {_count(driver, 'GPU')}: NVML is silent about the others",
            "nvidia-modprobe -c 0 -c 1 and so on; in a container mount the node's /dev",
        )
    return Finding("gpu devices", "ok", detail)


def pod_resources(
    path: str, state: Literal["running", "absent", "stale", "denied"], kubelet: bool
) -> Finding | None:
    """The kubelet's socket; None where there is neither a kubelet nor a socket."""
    name = "pod resources"
    if not path:
        if not kubelet:
            return None
        return Finding(name, "ok", "switched off (gpu.pod_resources): GPUs are not known by pod")
    if state == "running":
        return Finding(name, "ok", f"{path} answers")
    if state == "absent":
        if not kubelet:
            return None
        return Finding(
            name,
            "warning",
            f"there is a kubelet and no {path}: which pod holds which GPU is known from cgroups alone",
            "mount the directory /var/lib/kubelet/pod-resources, or set gpu.pod_resources",
        )
    words = "nobody answers on" if state == "stale" else "no permission to open"
    return Finding(
        name, "warning", f"{words} {path}", "start the kubelet" if state == "stale" else "run as root"
    )


def device_cgroups(v1: bool, read: int, code: int) -> Finding:
    """Whether it can be told which devices a cgroup may open.

    `v1`: there is a list for each. `read`: device programs of v2 that were read for a trial, `code`: the
    error's number of the first that could not be.
    """
    name = "device cgroups"
    if code in PERMISSION:
        return Finding(
            name,
            "warning",
            f"device programs cannot be read ({errno.errorcode[code]}): other sources tell whose GPUs are",
            "grant CAP_SYS_ADMIN and CAP_NET_ADMIN; sysctl net.core.bpf_jit_harden=0 or 1",
        )
    if code:
        return Finding(
            name, "warning", f"device programs cannot be read ({errno.errorcode.get(code, str(code))})"
        )
    lists = "v1 lists, " if v1 else ""
    return Finding(name, "ok", f"{lists}device programs can be read (tried, {_count(read, 'program')} here)")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
