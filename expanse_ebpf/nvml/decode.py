"""The worker's lines as GpuSamples: a figure that cannot be true is left out, and says so.

A device's line has `uuid`, `time_ns` and either `lost` or `failed` (NVML's error), or: `values` (figures by
the names of GpuSample; "throttled_ns.power" is an entry of a map), `missing` (NVML's errors by name), `added`
(what the round adds to counters that are kept here), `stamp` (of the newest sample of use that was taken),
`processes` (`pid`, `memory_bytes`, `kind`, and of which MIG instance: `gpu_instance`, `compute_instance`),
`process_count` where those are not all of them, `rejected`, and where they were asked for `by_process`,
`profile` (`source`, `added`, `missing`) and `instances` (lines of MIG instances, in the same form; their
processes stand in the GPU's list).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.names import MAX_TEXT
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import GpuProfile, GpuSample

MAX_PROCESSES = 1024  # of one device
MAX_INSTANCES = 64
_TIB = 1 << 40

# What can be true, both ends included. NVML has answered with all bits set, or with what was left in
# memory, where a driver did not know.
_BOUNDS: dict[str, tuple[float, float]] = {
    "index": (0, 1023),
    "minor": (0, 1 << 20),
    "gpu_instance": (0, 1023),
    "compute_instance": (0, 1023),
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
_MOST_ADDED = 1 << 53  # by one round: 104 days, or 8 PiB
_MAPS = {"throttled_ns"}
_FIELDS = {field.name: field for field in GpuSample.DESCRIPTOR.fields}
# Those of GpuSample that are one figure of NVML's.
_FIGURES = {
    name
    for name, field in _FIELDS.items()
    if field.has_presence and field.message_type is None and name not in ("busy_ns", "measured_ns")
}
_FLAGS = {name for name in _FIGURES if _FIELDS[name].cpp_type == _FIELDS[name].CPPTYPE_BOOL}
_SHARES = {name for name in _FIGURES if _FIELDS[name].cpp_type == _FIELDS[name].CPPTYPE_DOUBLE}
_GROUPS = {"busy_ns", "processes", "by_process", "profile", "instances", *_TEXTS}
_PROFILE = {field.name for field in GpuProfile.DESCRIPTOR.fields} - {"source"}
_SOURCES = ("gpm", "nvml")
_THROTTLE_CAUSES = {"power", "thermal", "sync_boost", "board_limit", "reliability"}
_KINDS = ("compute", "graphics", "mps")
_PIDS = (1, 1 << 22)


def number(value: Any, bounds: tuple[float, float] = _COUNTER) -> int | None:
    """`value` when it is a whole number within the bounds, else None."""
    if isinstance(value, int) and not isinstance(value, bool) and bounds[0] <= value <= bounds[1]:
        return value
    return None


def mapping(value: Any) -> Mapping[str, Any]:
    """`value` when it is an object, else an empty one."""
    return value if isinstance(value, dict) else {}


def objects(value: Any) -> list[Mapping[str, Any]]:
    """The objects among the elements of `value`, none when it is no list."""
    return [element for element in value if isinstance(element, dict)] if isinstance(value, list) else []


def error_code(value: Any) -> int:
    """`value` when it can be one of NVML's errors, or of ours; else the one for anything."""
    code = number(value, (-(1 << 15), 1 << 15))
    return reasons.UNKNOWN if code is None else code


def fill(sample: GpuSample, line: Mapping[str, Any]) -> None:
    """The figures of one line, and why the others are missing."""
    for name, value in mapping(line.get("values")).items():
        _put(sample, name, value)
    for name in ("name", "mig_profile", "gpu_instance", "compute_instance"):  # of an instance
        if name in line:
            _put(sample, name, line[name])
    if (
        sample.HasField("memory_total_bytes")
        and sample.HasField("memory_used_bytes")
        and sample.memory_used_bytes > sample.memory_total_bytes
    ):
        sample.ClearField("memory_used_bytes")
        sample.unavailable["memory_used_bytes"] = reasons.sentence(reasons.ABSURD)
    for name, code in mapping(line.get("missing")).items():
        if name in _FIGURES or name in _GROUPS or _cause(name):
            sample.unavailable[name] = reasons.sentence(error_code(code))
    sample.rejected_processes = number(line.get("rejected"), (0, 1 << 31)) or 0
    processes = objects(line.get("processes"))
    _fill_processes(sample, processes)
    if (number(line.get("process_count")) or len(processes)) > min(len(processes), MAX_PROCESSES):
        # Without the number, which would change a metric's label with whatever a user starts.
        sample.unavailable["processes"] = "only some are shown, those with the most memory"


def _put(sample: GpuSample, name: str, value: Any) -> None:
    cause = _cause(name)
    if cause:
        if number(value) is None:
            sample.unavailable[name] = reasons.sentence(reasons.ABSURD)
        else:
            sample.throttled_ns[cause] = value
    elif name in _TEXTS:
        if isinstance(value, str):
            setattr(sample, name, clean(value, MAX_TEXT))
    elif name in _FIGURES:
        if _can_be(name, value):
            setattr(sample, name, value)
        else:
            sample.unavailable[name] = reasons.sentence(reasons.ABSURD)


def _can_be(name: str, value: Any) -> bool:
    if name in _FLAGS:
        return isinstance(value, bool)
    if name in _SHARES:
        return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1
    return number(value, _BOUNDS.get(name, _COUNTER)) is not None


def _cause(name: str) -> str:
    """That of "throttled_ns.CAUSE", else nothing."""
    group, _, cause = name.partition(".")
    return cause if group in _MAPS and cause in _THROTTLE_CAUSES else ""


def _fill_processes(sample: GpuSample, processes: Sequence[Mapping[str, Any]]) -> None:
    for process in processes[:MAX_PROCESSES]:
        pid, kind = number(process.get("pid"), _PIDS), process.get("kind")
        if pid is None or kind not in _KINDS:
            sample.rejected_processes += 1
            continue
        added = sample.processes.add(pid=pid, kind=kind)
        memory = number(process.get("memory_bytes"), _BOUNDS["memory_used_bytes"])
        if memory is not None:
            added.memory_bytes = memory


def busy_by_pid(line: Mapping[str, Any]) -> dict[str, int]:
    """`by_process` of a line, as far as it can be true."""
    return {
        pid: busy_ns
        for pid, busy_ns in mapping(line.get("by_process")).items()
        if pid.isdecimal()
        and len(pid) <= len(str(_PIDS[1]))
        and number(busy_ns, (0, _MOST_ADDED)) is not None
    }


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
        added = mapping(line.get("added"))
        busy, measured = (number(added.get(name), (0, _MOST_ADDED)) for name in ("busy_ns", "measured_ns"))
        if busy is not None and measured is not None and busy <= measured:
            _add(self.busy, {"busy_ns": busy, "measured_ns": measured})
        profile = mapping(line.get("profile"))
        if profile.get("source") not in _SOURCES:
            return
        if self.profile_source != profile["source"]:  # the same names mean something else now
            self.profile_source = profile["source"]
            self.profile.clear()
        more = mapping(profile.get("added")).items()
        _add(self.profile, {name: n for name, n in more if name in _PROFILE and _is_addend(n)})

    def fill(self, sample: GpuSample, line: Mapping[str, Any]) -> None:
        """Write those that the line has a word about into `sample`."""
        if mapping(line.get("added")):
            for name, total in self.busy.items():
                setattr(sample, name, total)
        profile = mapping(line.get("profile"))
        if profile:
            sample.profile.source = self.profile_source
            for name, code in mapping(profile.get("missing")).items():
                if name in _PROFILE:
                    sample.unavailable[f"profile.{name}"] = reasons.sentence(error_code(code))
            for name in mapping(profile.get("added")):
                if name in self.profile:
                    setattr(sample.profile, name, self.profile[name])
        for xid, count in self.xids.items():
            sample.xids[xid] = count


def _is_addend(value: Any) -> bool:
    return number(value, (0, _MOST_ADDED)) is not None


def _add(totals: dict[str, int], more: Mapping[str, int]) -> None:
    for name, added in more.items():
        totals[name] = min(totals.get(name, 0) + added, _COUNTER[1])
