"""The steps of gpu_smoke that talk to NVML, each as a process of its own; prints JSON objects, one a line.

python -m bench.gpu_smoke.steps calls|buffers|events|mig [--library PATH]
python -m bench.gpu_smoke.steps watch --seconds 8 --pid PID --file FILE [--library PATH]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pynvml

CALLS, CALLS_S = 300, 1.0  # of one function, at most
# Field ids of nvml.h that change all the time: energy, power, memory temperature, time throttled by power
# and heat, NVLink's and PCIe's bytes.
FIELDS = [83, 186, 82, 74, 75, (138, 0xFFFFFFFF), (139, 0xFFFFFFFF), 197, 198]
BUFFERS = {
    "utilization": pynvml.NVML_GPU_UTILIZATION_SAMPLES,
    "memory utilization": pynvml.NVML_MEMORY_UTILIZATION_SAMPLES,
    "power": pynvml.NVML_TOTAL_POWER_SAMPLES,
}
MEMBERS = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}


def devices() -> Iterator[tuple[str, Any]]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        yield pynvml.nvmlDeviceGetUUID(handle), handle


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What the function gives; NVML's error in words."""
    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        return f"error {error.value}: {error}"


# ---- how long a call takes


def timed(function: Callable[[], Any]) -> dict[str, Any]:
    """Microseconds of a call, many times over."""
    try:
        function()
    except pynvml.NVMLError as error:
        return {"error": f"{error.value}: {error}"}
    except AttributeError as error:  # bindings older than the driver
        return {"error": str(error)}
    spent: list[float] = []
    until = time.monotonic() + CALLS_S
    while len(spent) < CALLS and time.monotonic() < until:
        began = time.perf_counter_ns()
        with contextlib.suppress(pynvml.NVMLError):
            function()
        spent.append((time.perf_counter_ns() - began) / 1e3)
    spent.sort()
    return {
        "calls": len(spent),
        "median": statistics.median(spent),
        "p99": spent[int(len(spent) * 0.99)],
        "max": spent[-1],
    }


def calls() -> dict[str, Any]:
    _, h = next(devices())
    functions: dict[str, Callable[[], Any]] = {
        "GetFieldValues (9 fields)": lambda: pynvml.nvmlDeviceGetFieldValues(h, FIELDS),
        "GetUtilizationRates": lambda: pynvml.nvmlDeviceGetUtilizationRates(h),
        "GetMemoryInfo_v2": lambda: pynvml.nvmlDeviceGetMemoryInfo(h, version=pynvml.nvmlMemory_v2),
        "GetTemperature": lambda: pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),
        "GetClockInfo (SM)": lambda: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_SM),
        "GetClockInfo (memory)": lambda: pynvml.nvmlDeviceGetClockInfo(h, pynvml.NVML_CLOCK_MEM),
        "GetCurrentClocksThrottleReasons": lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),
        "GetPowerUsage": lambda: pynvml.nvmlDeviceGetPowerUsage(h),
        "GetTotalEnergyConsumption": lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(h),
        "GetSamples (utilization)": lambda: pynvml.nvmlDeviceGetSamples(h, BUFFERS["utilization"], 0),
        "GetComputeRunningProcesses": lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(h),
        "GetGraphicsRunningProcesses": lambda: pynvml.nvmlDeviceGetGraphicsRunningProcesses(h),
        "GetMPSComputeRunningProcesses": lambda: pynvml.nvmlDeviceGetMPSComputeRunningProcesses(h),
        "GetProcessUtilization": lambda: pynvml.nvmlDeviceGetProcessUtilization(h, 0),
        "GetPersistenceMode": lambda: pynvml.nvmlDeviceGetPersistenceMode(h),
        "GetMigMode": lambda: pynvml.nvmlDeviceGetMigMode(h),
        "GetRemappedRows": lambda: pynvml.nvmlDeviceGetRemappedRows(h),
        "GetTotalEccErrors": lambda: pynvml.nvmlDeviceGetTotalEccErrors(h, 1, 0),
        "GetCurrPcieLinkGeneration": lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h),
        "GetCount": pynvml.nvmlDeviceGetCount,
        "GetUUID": lambda: pynvml.nvmlDeviceGetUUID(h),
        "GetPcieThroughput": lambda: pynvml.nvmlDeviceGetPcieThroughput(h, pynvml.NVML_PCIE_UTIL_TX_BYTES),
    }
    for name, function in functions.items():  # each told at once, since the next may hang
        print(json.dumps({name: timed(function)}), flush=True)
    return gpm_calls(h)


def gpm_calls(h: Any) -> dict[str, Any]:
    if attempt(lambda: pynvml.nvmlGpmQueryDeviceSupport(h).isSupportedDevice) != 1:
        return {"GpmSampleGet": {"error": "no GPM"}}
    first, second = pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()
    question = pynvml.c_nvmlGpmMetricsGet_t()
    question.version = pynvml.NVML_GPM_METRICS_GET_VERSION
    question.numMetrics = 2
    question.sample1, question.sample2 = first, second
    question.metrics[0].metricId, question.metrics[1].metricId = 2, 5
    found = {"GpmSampleGet": timed(lambda: pynvml.nvmlGpmSampleGet(h, first))}
    time.sleep(0.2)
    attempt(pynvml.nvmlGpmSampleGet, h, second)
    found["GpmMetricsGet (2 metrics)"] = timed(lambda: pynvml.nvmlGpmMetricsGet(question))
    return found


# ---- buffers, events, MIG


def buffers() -> dict[str, Any]:
    return {
        uuid: {name: buffer(handle, kind) for name, kind in BUFFERS.items()} for uuid, handle in devices()
    }


def buffer(handle: Any, kind: int) -> Any:
    """How often NVML samples, and how much it keeps."""
    got = attempt(pynvml.nvmlDeviceGetSamples, handle, kind, 0)
    if isinstance(got, str):
        return got
    value_type, samples = got
    stamps = [sample.timeStamp for sample in samples]
    if len(stamps) < 2:
        return f"{len(stamps)} samples"
    values = [getattr(sample.sampleValue, MEMBERS.get(value_type, "uiVal")) for sample in samples]
    between = [b - a for a, b in itertools.pairwise(sorted(stamps))]
    return {
        "samples": len(stamps),
        "us between, median": statistics.median(between),
        "us between, least": min(between),
        "us between, most": max(between),
        "in order": stamps == sorted(stamps),
        "age of the newest, ms": time.time() * 1e3 - max(stamps) / 1e3,
        "values, least and most": [min(values), max(values)],
    }


def events() -> dict[str, Any]:
    found = {}
    for uuid, handle in devices():
        supported = attempt(pynvml.nvmlDeviceGetSupportedEventTypes, handle)
        each: dict[str, Any] = {"supported": supported if isinstance(supported, str) else hex(supported)}
        try:
            chosen = pynvml.nvmlEventSetCreate()
            pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, chosen)
            each["Xid registration"] = "works"
            each["wait"] = attempt(lambda: pynvml.nvmlEventSetWait_v2(chosen, 0).eventType)  # noqa: B023
            pynvml.nvmlEventSetFree(chosen)
        except pynvml.NVMLError as error:
            each["Xid registration"] = f"error {error.value}: {error}"
        found[uuid] = each
    return found


def mig() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for uuid, handle in devices():
        each: dict[str, Any] = {"mode, now and after a reset": attempt(pynvml.nvmlDeviceGetMigMode, handle)}
        each["GPM"] = attempt(lambda h=handle: pynvml.nvmlGpmQueryDeviceSupport(h).isSupportedDevice)
        most = attempt(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)
        instances = []
        for place in range(most if isinstance(most, int) else 0):
            with contextlib.suppress(pynvml.NVMLError):
                instance = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)
                instances.append(f"{pynvml.nvmlDeviceGetUUID(instance)} {pynvml.nvmlDeviceGetName(instance)}")
        found[uuid] = {**each, "most instances": most, "instances": instances}
    with contextlib.suppress(OSError):
        minors = Path("/proc/driver/nvidia-caps/mig-minors").read_text()
        found["mig-minors, lines"] = len(minors.splitlines())
    return found


# ---- the source itself


def watch(seconds: float, pid: int, file: Path, library: str) -> dict[str, Any]:
    """The source "gpu" at an interval of 1 s, with the load's process as the only job."""
    from bench.gpu_smoke.summary import summary
    from expanse_ebpf import sources
    from expanse_ebpf.config import Config, GpuConfig
    from expanse_ebpf.jobs.job import Job
    from expanse_ebpf.wire.collector_pb2 import JobIdentity, Report

    config = replace(Config(), gpu=GpuConfig(profiler=True, library=library, pod_resources=""))
    (source,) = sources.create(["gpu"], sources.Context(config, None))
    job = Job(JobIdentity(scheduler="run", id="load"))
    job.pids = frozenset((pid,))
    reports = []
    source.start()
    try:
        began = time.monotonic()
        for number in range(int(seconds) + 1):
            time.sleep(max(0.0, began + number - time.monotonic()))
            report = Report(sequence=number, time_ns=time.time_ns())
            pairs = [(job, report.jobs.add(identity=job.identity))] if pid else []
            source.sample(time.monotonic(), pairs, report)
            reports.append(report)
        open_files = nvidia_files(pid) if pid else []
    finally:
        source.stop()
    found = summary(reports, pid)
    found["its open files"] = open_files
    found["the source's own reasons"] = source.unavailable
    write(file, reports)
    return found


def write(file: Path, reports: list[Any]) -> None:
    from google.protobuf.json_format import MessageToDict

    lines = (json.dumps(MessageToDict(r, preserving_proto_field_name=True)) for r in reports)
    file.write_text("".join(f"{line}\n" for line in lines))


def nvidia_files(pid: int) -> list[str]:
    found = set()
    with contextlib.suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(descriptor))  # noqa: PTH115 (no path: it may be a socket)
    return sorted(name for name in found if "nvidia" in name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    steps: dict[str, Callable[[], Any]] = {f.__name__: f for f in (calls, buffers, events, mig)}
    parser.add_argument("step", choices=(*steps, "watch"))
    parser.add_argument("--library", default="")
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--pid", type=int, default=0)
    parser.add_argument("--file", type=Path)
    options = parser.parse_args()
    if options.step == "watch":  # which has a process for NVML
        print(json.dumps(watch(options.seconds, options.pid, options.file, options.library)))
        return
    if options.library:  # pynvml then finds it by its SONAME
        ctypes.CDLL(options.library, mode=ctypes.RTLD_GLOBAL)
    pynvml.nvmlInit()
    print(json.dumps(steps[options.step]()))


if __name__ == "__main__":
    main()
