"""The findings of gpu_smoke as text."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.gpu_smoke.summary import RATES, SHARES


def no_driver(found: dict[str, Any]) -> str:
    """When NVML cannot be asked."""
    code = found["nvml error"]
    if code in (9, 12):
        why = "no driver: the NVIDIA driver is not loaded" if code == 9 else "no driver: no libnvidia-ml.so.1"
        return f"{why} (NVML error {code})\n"
    return f"NVML cannot be asked: error {code}\n"


def text(found: dict[str, Any]) -> str:
    """All of it, on some pages."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['when']}, Linux {found['kernel']}, {'root' if found['root'] else 'not root'}"
    if "nvml" in found:
        nvml = found["nvml"]
        yield f"driver {nvml['driver_version']}, NVML {nvml['nvml_version']}, CUDA {nvml['cuda_version']}"
        for uuid, code in nvml["absent"].items():
            yield f"no handle of {uuid}: NVML error {code}"
        for device in found["devices"]:
            yield from _device(device)
    yield from _calls(found["calls"])
    for name in ("buffers", "events", "mig"):
        yield from ("", name)
        for key, value in _flat(found[name]):
            yield f"  {key}: {value}"
    for name, watch in found["watches"].items():
        if watch:
            yield from _watch(name, watch)
    for title in ("skipped", "failed"):
        if found[title]:
            yield ""
        for name, why in found[title].items():
            yield f"{title}: {name}: {why}"


def _device(device: dict[str, Any]) -> Iterator[str]:
    values = device.get("values", {})
    yield ""
    yield f"{device['uuid']} {values.get('name', '')}"
    if "values" not in device:
        yield f"  {device}"
    for name, value in sorted(values.items()):
        yield f"  {name:32}{value}"
    for name, code in sorted(device.get("missing", {}).items()):
        yield f"  {name:32}missing: NVML error {code}"
    for name, code in sorted(device.get("profile", {}).get("missing", {}).items()):
        yield f"  profile.{name:24}missing: NVML error {code}"
    for instance in device.get("instances", ()):
        yield f"  instance {instance['uuid']} {instance.get('mig_profile', '')}: {instance['values']}"


def _calls(calls: dict[str, Any]) -> Iterator[str]:
    yield from ("", f"{'us a call':36}{'median':>10}{'p99':>10}{'most':>10}")
    for name, call in calls.items():
        if "error" in call:
            yield f"  {name:34}{call['error']}"
        else:
            yield f"  {name:34}{call['median']:10.1f}{call['p99']:10.1f}{call['max']:10.1f}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(inner, f"{path}, {key}" if path else str(key))
    else:
        yield path, value


def _watch(name: str, watch: dict[str, Any]) -> Iterator[str]:
    yield from (
        "",
        f"== {name}: {watch['reports']} reports, NVML {'up' if watch['nvml']['up'] else watch['nvml']}",
    )
    rounds, cpu = watch["a round, ms"], watch["the worker, CPU ms a round"]
    if rounds and cpu:
        yield (
            f"  a round: {statistics.median(rounds):.2f} ms, at most {max(rounds):.2f}; the worker's CPU "
            f"{statistics.median(cpu):.2f} ms, PSS {watch['the worker, PSS in MiB']:.1f} MiB"
        )
    if watch["pid of the load"]:
        yield f"  load: pid {watch['pid of the load']}, at work for {watch['worked'] or 0:.3f} of it"
        yield f"  it holds {watch['GPUs of the load']} {watch['conflicts of the load']}"
        yield f"  its open files: {watch['its open files']}"
    for line in (*watch["events"], *watch["the source's own reasons"].items()):
        yield f"  {line}"
    for uuid, gpu in watch["gpus"].items():
        yield from _gpu(uuid, gpu, watch["nvidia-smi"])


def _gpu(uuid: str, gpu: dict[str, Any], smi: dict[str, Any]) -> Iterator[str]:
    yield f"  {uuid} {gpu['name']}, {gpu['seconds']:.1f} s"
    if "busy" in gpu:
        yield (
            f"    busy {gpu['busy']:.3f} of the time measured, which is "
            f"{gpu['measured, share of the time']:.3f} of all; utilization, mean "
            f"{gpu.get('utilization, mean', float('nan')):.3f}"
        )
    if "energy by its counter, W" in gpu:
        yield (
            f"    power {gpu.get('power_mw, mean', float('nan')) / 1e3:.1f} W, "
            f"by the energy counter {gpu['energy by its counter, W']:.1f} W"
        )
    profile = gpu["profile"]
    shares = ", ".join(f"{name} {profile[name]:.3f}" for name in SHARES if name in profile)
    rates = ", ".join(f"{n} {profile[f'{n}, MiB/s']:.1f}" for n in RATES if f"{n}, MiB/s" in profile)
    yield f"    profile by {profile['source'] or 'nothing'}: {shares}; MiB/s: {rates}"
    yield f"    processes {gpu['processes']}, unresolved {gpu['unresolved']}; holders {gpu['holders']}"
    if gpu["missing"]:
        yield f"    missing: {gpu['missing']}"
    if uuid in smi:
        nearest = min(gpu["moments"], key=lambda moment: abs(moment["time"] - smi["time"]))
        pairs = ", ".join(f"{n} {v:g} / {smi[uuid].get(n)}" for n, v in nearest.items() if n in smi[uuid])
        yield f"    here / nvidia-smi, {smi['time'] - nearest['time']:+.1f} s later: {pairs}"
    elif "missing" in smi:
        yield f"    nvidia-smi: {smi['missing']}"
