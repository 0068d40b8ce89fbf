"""What the kernel's files say of a machine. Everything here takes text, "" where there is no such file.

What cannot be told from it is None; nothing here raises.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from expanse_ebpf.text import clean

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_NAME_LENGTH = 120

# CPU implementer and part, from arch/arm64/include/asm/cputype.h: arm64 kernels give no name.
_ARM = {
    (0x41, 0xD0C): "Arm Neoverse N1",
    (0x41, 0xD40): "Arm Neoverse V1",
    (0x41, 0xD49): "Arm Neoverse N2",
    (0x41, 0xD4F): "Arm Neoverse V2",
    (0x41, 0xD84): "Arm Neoverse V3",
    (0x41, 0xD8E): "Arm Neoverse N3",
    (0xC0, 0xAC3): "Ampere-1",
}
# What machines' makers write into DMI, and what systemd-detect-virt calls it.
_MAKERS = {
    "KVM": "kvm",
    "OpenStack": "kvm",
    "Amazon EC2": "amazon",
    "Google Compute Engine": "google",
    "VMware": "vmware",
    "innotek GmbH": "oracle",
    "VirtualBox": "oracle",
    "Xen": "xen",
    "Virtual Machine": "microsoft",  # a Surface of Microsoft's is none
    "Parallels": "parallels",
    "BHYVE": "bhyve",
}
_CLOCKS = {"kvm-clock": "kvm", "hyperv_clocksource": "microsoft", "xen": "xen"}
_CPU_SENSORS = re.compile(r"coretemp|k10temp|zenpower|cpu|x86_pkg_temp|soc", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ticks:
    """CPU time of all CPUs since boot, in seconds."""

    busy_s: float  # user, nice, system and interrupts; that of guests is in user
    stolen_s: float  # by the hypervisor
    total_s: float


def ticks(stat: str) -> Ticks | None:
    """From /proc/stat."""
    words = stat.partition("\n")[0].split()
    # cpu user nice system idle iowait irq softirq steal guest guest_nice
    values = [_whole(word) for word in words[1:9]]
    if len(values) < 8 or words[0] != "cpu":
        return None
    numbers = [value / _TICKS_PER_S for value in values if value is not None]
    if len(numbers) < 8:
        return None
    user, nice, system, _, _, irq, softirq, steal = numbers
    return Ticks(user + nice + system + irq + softirq, steal, sum(numbers))


def cpu_model(cpuinfo: str) -> str | None:
    """The CPU's name, from /proc/cpuinfo; on arm64 by the numbers of its maker and part."""
    fields = _fields(cpuinfo)
    name = fields.get("model name") or fields.get("Model Name")
    if name:
        return clean(" ".join(name.split()), _NAME_LENGTH)
    maker, part = fields.get("CPU implementer", ""), fields.get("CPU part", "")
    try:
        known = _ARM.get((int(maker, 16), int(part, 16)))
    except ValueError:
        return None
    return known or clean(f"CPU of maker {maker}, part {part}", _NAME_LENGTH)


def memory_bytes(meminfo: str) -> int | None:
    """All memory, from /proc/meminfo."""
    found = re.search(r"^MemTotal:\s+(\d{1,16}) kB$", meminfo, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def frequency_mhz(cpuinfo: str, current_khz: Iterable[str]) -> float | None:
    """The mean over the CPUs, from /proc/cpuinfo or the texts of cpufreq/scaling_cur_freq.

    Without "aperfmperf" the kernel does not measure: cpuinfo then has the nominal frequency, in virtual
    machines above all, which tells nothing.
    """
    if "aperfmperf" in _fields(cpuinfo).get("flags", "").split():
        found = re.findall(r"^cpu MHz\s*: (\d{1,6}(?:\.\d{1,6})?)$", cpuinfo, re.MULTILINE)
        measured = [float(each) for each in found]
    else:
        measured = [khz / 1000 for khz in map(_whole, current_khz) if khz is not None]
    measured = [mhz for mhz in measured if 0 < mhz < 100_000]
    return sum(measured) / len(measured) if measured else None


def temperature_c(sensors: Iterable[tuple[str, str]]) -> float | None:
    """The hottest of (name, thousandths of a degree), among the CPUs' own where there are any by their names.

    A drive or a network card may be hotter than any CPU, whatever the CPUs do.
    """
    cpus: list[float] = []
    others: list[float] = []
    for name, text in sensors:
        value = _whole(text)
        if value is not None and 0 < value < 150_000:  # sensors that are not connected give 0, or anything
            (cpus if _CPU_SENSORS.search(name) else others).append(value / 1000)
    return max(cpus or others, default=None)


def virtualised(
    cpuinfo: str, *, maker: str = "", product: str = "", hypervisor: str = "", clocks: str = ""
) -> str | None:
    """The kind of virtual machine, "" for none.

    From /proc/cpuinfo, DMI's sys_vendor and product_name, /sys/hypervisor/type or the device tree's
    hypervisor/compatible, and the clock sources that are available.
    """
    flags = _fields(cpuinfo).get("flags")
    if flags is not None and "hypervisor" not in flags.split():
        return ""
    if product.strip().endswith(".metal"):  # Amazon's machines without a hypervisor have the same maker
        return ""
    for mark, kind in _MAKERS.items():
        if mark in maker or mark in product:
            return kind
    if hypervisor.strip("\0 \n"):
        return clean(hypervisor.split("\0")[0].strip().rpartition(",")[2], 32)
    for mark, kind in _CLOCKS.items():
        if any(word.startswith(mark) for word in clocks.split()):
            return kind
    if "QEMU" in maker:
        return "qemu"
    if flags is not None:
        return "unknown"  # that there is one is certain
    return "" if maker.strip() or product.strip() else None


def pmu(why: str) -> bool | None:
    """Whether hardware counters can be opened, by what the self-test says of one (see kernel/perf.py)."""
    if not why:
        return True
    return False if why.startswith(("unsupported", "not believed")) else None


def governor(texts: Iterable[str]) -> str | None:
    """The CPUs' frequency governors, each once."""
    found = {clean(text.strip(), 32) for text in texts if text.strip()}
    return ", ".join(sorted(found)[:4]) or None


def turbo(boost: str, no_turbo: str) -> bool | None:
    """From cpufreq/boost and intel_pstate/no_turbo."""
    if (off := switch(no_turbo)) is not None:
        return not off
    return switch(boost)


def switch(text: str) -> bool | None:
    """A file that holds 0 or 1."""
    return {"0": False, "1": True}.get(text.strip())


def gpu_driver(version: str) -> str | None:
    """The driver's version, from /proc/driver/nvidia/version."""
    found = re.search(r"^NVRM version:.*?\s(\d{1,5}(?:\.\d{1,5}){1,3})\s", version, re.MULTILINE)
    return found[1] if found else None


def gpu_model(information: str) -> str | None:
    """A GPU's model, from /proc/driver/nvidia/gpus/ADDRESS/information."""
    return clean(_fields(information).get("Model", ""), _NAME_LENGTH) or None


def _fields(text: str) -> Mapping[str, str]:
    """Lines of the form "name : value", the first of each name."""
    fields: dict[str, str] = {}
    for line in text.split("\n"):
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _whole(text: str) -> int | None:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
