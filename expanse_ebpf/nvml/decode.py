"""The worker's lines as GpuSamples: a figure that cannot be true is left out, and says so.

A device's line has `uuid`, `time_ns` and either `lost` or `failed` (NVML's error), or: `values` (figures by
the names of GpuSample; "throttled_ns.power" is an entry of a map), `missing` (NVML's errors by name), `added`
(what the round adds to counters that are kept here), `stamp` (of the newest sample of use that was taken),
`processes`, `rejected`, and where they were asked for `by_process`, `profile` (`source`, `added`, `missing`)
and `instances` (lines of MIG instances, in the same form).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expanse_ebpf.nvml import reasons
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import GpuProfile, GpuSample

MAX_PROCESSES = 1024  # of one device
MAX_INSTANCES = 64
_MAX_TEXT = 128
_TIB = 1 << 40

# What can be true, both ends included. NVML has answered with all bits set, or with what was left in
# memory, where a driver did not know.
_BOUNDS: dict[str, tuple[float, float]] = {
    "index": (0, 1023),
    "minor": (0, 1 << 20),
    "gpu_instance": (0, 1023),
    "compute_instance": (0, 1023),
    "utilization": (0, 1),
    "memory_utilization": (0, 1),
    "memory_used_bytes": (0, 64 * _TIB),
    "memory_free_bytes": (0, 64 * _TIB),
    "memory_reserved_bytes": (0, 64 * _TIB),
    "memory_total_bytes": (1, 64 * _TIB),
    "power_mw": (0, 20_000_000),
    "power_limit_mw": (1, 20_000_000),
    "energy_mj": (0, 1 << 60),
    "temperature_c": (-60, 200),
    "memory_temperature_c": (1, 200),  # 0: this board does not measure it
    "sm_clock_mhz": (0, 100_000),
    "memory_clock_mhz": (0, 100_000),
    "sm_clock_max_mhz": (0, 100_000),
    "memory_clock_max_mhz": (0, 100_000),
    "pcie_generation": (0, 16),
    "pcie_width": (0, 64),
    "nvlinks": (0, 255),
}
_TEXTS = ("name", "pci_bus_id", "serial", "mig_profile")
_COUNTER = (0, (1 << 63) - 1)
_MAPS = {"throttled_ns"}
_FIELDS = {f.name: f for f in GpuSample.DESCRIPTOR.fields}
_PROFILE = {f.name for f in GpuProfile.DESCRIPTOR.fields} - {"source"}


def number(value: Any, bounds: tuple[float, float] = _COUNTER) -> Any:
    """`value` when it is a number within the bounds, else None."""
    if isinstance(value, (int, float)) and bounds[0] <= value <= bounds[1]:
        return value
    return None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def fill(sample: GpuSample, line: Mapping[str, Any]) -> None:
    """The figures of one line, and why the others are missing."""
    values = mapping(line.get("values"))
    for name, value in values.items():
        _put(sample, name, value)
    for name in _TEXTS:
        if isinstance(line.get(name), str):
            setattr(sample, name, clean(line[name], _MAX_TEXT))
    for name in ("gpu_instance", "compute_instance"):
        if name in line:
            _put(sample, name, line[name])
    if sample.HasField("memory_used_bytes") and sample.memory_used_bytes > sample.memory_total_bytes:
        sample.ClearField("memory_used_bytes")
        sample.unavailable["memory_used_bytes"] = reasons.sentence(reasons.ABSURD)
    for name, code in mapping(line.get("missing")).items():
        sample.unavailable[name.partition(".")[0]] = reasons.sentence(code)
    sample.rejected_processes = number(line.get("rejected", 0)) or 0
    _fill_processes(sample, line)


def _put(sample: GpuSample, name: str, value: Any) -> None:
    name, _, entry = name.partition(".")
    field = _FIELDS.get(name)
    if field is None:
        return
    if name in _MAPS:
        if number(value) is not None:
            sample.throttled_ns[entry] = value
        return
    if name in _TEXTS:
        setattr(sample, name, clean(str(value), _MAX_TEXT))
    elif isinstance(value, bool):
        setattr(sample, name, value)
    elif number(value, _BOUNDS.get(name, _COUNTER)) is None:
        sample.unavailable[name] = reasons.sentence(reasons.ABSURD)
    else:
        setattr(sample, name, value)


def _fill_processes(sample: GpuSample, line: Mapping[str, Any]) -> None:
    processes = line.get("processes", [])
    for process in processes[:MAX_PROCESSES]:
        added = sample.processes.add(pid=process["pid"], kind=process["kind"])
        memory = number(process["memory_bytes"], _BOUNDS["memory_used_bytes"])
        if memory is not None:
            added.memory_bytes = memory
    if len(processes) > MAX_PROCESSES:
        sample.unavailable["processes"] = f"{len(processes)} processes: {MAX_PROCESSES} are shown"


class Counters:
    """The counters of one device that are kept here, since NVML has only what is new."""

    __slots__ = ("busy", "profile", "profile_source", "xids")

    def __init__(self) -> None:
        self.busy: dict[str, int] = {}  # busy_ns, measured_ns
        self.profile: dict[str, int] = {}  # by the names of GpuProfile
        self.profile_source = ""
        self.xids: dict[int, int] = {}

    def add(self, line: Mapping[str, Any]) -> None:
        """What the line adds."""
        for name in ("busy_ns", "measured_ns"):
            more = number(mapping(line.get("added")).get(name))
            if more is not None:
                self.busy[name] = self.busy.get(name, 0) + more
        profile = mapping(line.get("profile"))
        if profile:
            self.profile_source = profile["source"]
            for name, more in mapping(profile["added"]).items():
                if name in _PROFILE and number(more) is not None:
                    self.profile[name] = self.profile.get(name, 0) + more

    def fill(self, sample: GpuSample, line: Mapping[str, Any]) -> None:
        """Write those that the line has a word about into `sample`."""
        if mapping(line.get("added")):
            for name, total in self.busy.items():
                setattr(sample, name, total)
        profile = mapping(line.get("profile"))
        if profile:
            sample.profile.source = self.profile_source
            for name, code in mapping(profile["missing"]).items():
                sample.unavailable[f"profile.{name}"] = reasons.sentence(code)
            for name in mapping(profile["added"]):
                if name in self.profile:
                    setattr(sample.profile, name, self.profile[name])
        for xid, count in self.xids.items():
            sample.xids[xid] = count
