"""What the machine is, and how it was doing. What cannot be found out is None; nothing here raises for it."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import expanse_ebpf
from expanse_ebpf.bench import machine_texts as texts
from expanse_ebpf.bench.results import Machine, State
from expanse_ebpf.kernel import cpus, perf

_ROOT = Path("/")
_MOST_BYTES = 4 << 20  # of one file; /proc/cpuinfo has some 2 KiB for each CPU
_CPUS = "sys/devices/system/cpu"
_GPU_DRIVER = "proc/driver/nvidia/version"
_GPU_DEADLINE_S = 20.0  # without its persistence daemon the driver begins with each GPU anew

# In a process of its own: NVML can hang for good. An own program, since nvidia-smi is not in every container.
_ASK_GPUS = """
import pynvml as n
n.nvmlInit()
for i in range(n.nvmlDeviceGetCount()):
    try:
        print(n.nvmlDeviceGetTemperature(n.nvmlDeviceGetHandleByIndex(i), n.NVML_TEMPERATURE_GPU))
    except n.NVMLError:
        pass
"""


def describe(tools: Mapping[str, str], root: Path = _ROOT) -> Machine:
    """The machine and its software; `tools` are the programs of peer arms and their versions.

    `root` is the folder in which proc and sys lie.
    """
    system = os.uname()
    cpuinfo = _read(root, "proc/cpuinfo")
    return Machine(
        time_ns=time.time_ns(),
        host=system.nodename,
        kernel=system.release,
        architecture=system.machine,
        cpu=texts.cpu_model(cpuinfo) or f"unknown {system.machine}",
        cpus=len(cpus.online(str(root / _CPUS / "online"))),
        memory_bytes=texts.memory_bytes(_read(root, "proc/meminfo")) or _memory_bytes(),
        virtualised=texts.virtualised(
            cpuinfo,
            maker=_read(root, "sys/class/dmi/id/sys_vendor"),
            product=_read(root, "sys/class/dmi/id/product_name"),
            hypervisor=_read(root, "sys/hypervisor/type")
            or _read(root, "proc/device-tree/hypervisor/compatible"),
            clocks=_read(root, "sys/devices/system/clocksource/clocksource0/available_clocksource"),
        ),
        pmu=texts.pmu(perf.self_test(("cycles",))["cycles"]),
        governor=texts.governor(_all(root, f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_governor")),
        turbo=texts.turbo(
            _read(root, f"{_CPUS}/cpufreq/boost"), _read(root, f"{_CPUS}/intel_pstate/no_turbo")
        ),
        smt=texts.switch(_read(root, f"{_CPUS}/smt/active")),
        gpus=tuple(
            texts.gpu_model(each) or "unknown" for each in _all(root, "proc/driver/nvidia/gpus/*/information")
        ),
        driver=texts.gpu_driver(_read(root, _GPU_DRIVER)),
        python=platform.python_version(),
        expanse=expanse_ebpf.__version__,
        tools=dict(tools),
    )


class Watch:
    """The machine's state from now, just before a run, until `end`, or else until `state` is asked for."""

    def __init__(self, root: Path = _ROOT) -> None:
        self._root = root
        self._load_1m = os.getloadavg()[0]
        self._frequency_mhz = texts.frequency_mhz(
            _read(root, "proc/cpuinfo"), _all(root, f"{_CPUS}/cpu[0-9]*/cpufreq/scaling_cur_freq")
        )
        self._temperature_c = texts.temperature_c(_sensors(root))
        self._gpu_temperature_c = gpu_temperature_c() if (root / _GPU_DRIVER).exists() else None
        self._over: tuple[texts.Ticks | None, float] | None = None
        # Last, so that what it took to look at all this does not count.
        self._began = time.monotonic()
        self._before, _ = self._now()

    def _now(self) -> tuple[texts.Ticks | None, float]:
        return texts.ticks(_read(self._root, "proc/stat")), time.monotonic() - self._began

    def end(self) -> None:
        """The run is over: what is done from now on is no part of its state."""
        self._over = self._now()

    def state(self, excluded_cpu_s: float) -> State:
        """What was seen; `excluded_cpu_s` is the CPU time of job, arm and kit since the watch began.

        The kernel adds CPU time up in ticks of some milliseconds: on a short run, `other_cores` is rough.
        """
        after, elapsed_s = self._over or self._now()
        return State(
            self._load_1m,
            self._frequency_mhz,
            self._temperature_c,
            self._gpu_temperature_c,
            *during(self._before, after, elapsed_s, excluded_cpu_s),
        )


def during(
    before: texts.Ticks | None, after: texts.Ticks | None, elapsed_s: float, excluded_cpu_s: float
) -> tuple[float | None, float | None]:
    """(steal_share, other_cores) between two readings, see `State`."""
    if before is None or after is None or elapsed_s <= 0:
        return None, None
    total, stolen = after.total_s - before.total_s, after.stolen_s - before.stolen_s
    # The kernel does not promise that these rise.
    steal_share = stolen / total if total > 0 and 0 <= stolen <= total else None
    busy = after.busy_s - before.busy_s
    return steal_share, max(0.0, (busy - excluded_cpu_s) / elapsed_s) if busy >= 0 else None


def gpu_temperature_c(environment: Mapping[str, str] | None = None) -> float | None:
    """The hottest GPU's, in °C.

    To be asked only where a driver is loaded: NVML makes /dev/nvidiactl where there is none.
    """
    try:
        process = subprocess.Popen(
            (sys.executable, "-EsP", "-c", _ASK_GPUS),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
    except OSError:
        return None
    try:
        output, _ = process.communicate(timeout=_GPU_DEADLINE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver it may not even die
            process.wait(1)
        return None
    # In the form of the kernel's sensors.
    return texts.temperature_c(("gpu", f"{line}000") for line in output.decode("ascii", "replace").split())


def _read(root: Path, name: str) -> str:
    """A file's text, bounded; "" when it cannot be read."""
    try:
        with open(root / name, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST_BYTES)
    except OSError:
        return ""


def _all(root: Path, pattern: str) -> Iterable[str]:
    """The texts of the files that match."""
    return [_read(root, str(path.relative_to(root))) for path in _found(root, pattern)]


def _found(root: Path, pattern: str) -> list[Path]:
    try:
        return sorted(root.glob(pattern))
    except OSError:
        return []


def _sensors(root: Path) -> Iterator[tuple[str, str]]:
    """(name, text) of every temperature that the kernel gives."""
    for pattern, name in (("thermal/thermal_zone*/temp", "type"), ("hwmon/hwmon*/temp*_input", "name")):
        for path in _found(root / "sys/class", pattern):
            folder = path.parent.relative_to(root)
            yield _read(root, str(folder / name)), _read(root, str(folder / path.name))


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
