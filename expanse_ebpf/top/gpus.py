"""The view of devices: one line per GPU, its MIG instances below it; and why there is none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from expanse_ebpf.top import text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.gpu_rates import NO_THROTTLING
from expanse_ebpf.top.table import Column, as_wide

STATES = {"silent": "no answer"}  # where the word for people is another
_STATE_STYLES = {"lost": "bold red", "silent": "yellow"}
_GIB = 1 << 30
# "GPU-" or "MIG-" and a UUID, or, with drivers before R470, "MIG-GPU-UUID/GPU INSTANCE/COMPUTE INSTANCE".
_UUID = re.compile(r"(GPU|MIG)-(?:GPU-)?([0-9a-fA-F]{8})-[0-9a-fA-F-]{27}((?:/\d+/\d+)?)")
_ABSENT = re.compile(r"gpu index (\d+)")  # what the source says of a GPU without a handle
_MOST_UUID = 16  # columns, where it has another form
_LAST = 1 << 64  # where a number is missing: behind those that there are


def short_uuid(uuid: str) -> str:
    """As much of a UUID as tells the GPUs of a node apart, for people: "GPU-5a6b7c8d"."""
    found = _UUID.fullmatch(uuid)
    if found:
        return f"{found[1]}-{found[2]}{found[3]}"
    return text.fit(text.clean(uuid), _MOST_UUID).rstrip() or text.UNKNOWN


def rows(devices: Sequence[Values]) -> list[Values]:
    """The devices in the order of NVML's indexes, each GPU's MIG instances below it and `nested`.

    A GPU has the number of them and of those that are held.
    """
    uuids = {gpu["uuid"] for gpu in devices if not gpu["parent_uuid"]}
    nested: dict[str, list[Values]] = {}
    found: list[Values] = []
    for gpu in sorted(devices, key=_place):
        if gpu["parent_uuid"] in uuids:
            nested.setdefault(gpu["parent_uuid"], []).append({**gpu, "nested": True})
        else:
            found.append({**gpu, "nested": False})
    result = []
    for gpu in found:
        instances = nested.pop(gpu["uuid"], [])
        gpu["instances"] = len(instances)
        gpu["instances_held"] = sum(bool(one["holders"] or one["other_holders"]) for one in instances)
        result += [gpu, *instances]
    return result


def _place(gpu: Values) -> tuple[Any, ...]:
    numbers = (gpu["index"], gpu["gpu_instance"], gpu["compute_instance"])
    return (*(_LAST if number is None else number for number in numbers), gpu["uuid"])


def label(gpu: Values) -> str:
    """Which device it is, in a few characters: "0 GPU-5a6b7c8d", of a MIG instance "3/9 MIG-1b2c3d4e".

    An instance has the index of its GPU and the number of its GPU instance; and that of the compute
    instance where it is not the first.
    """
    return f"{_number(gpu)} {short_uuid(gpu['uuid'])}"


def _number(gpu: Values) -> str:
    if not gpu["parent_uuid"]:
        return or_unknown(gpu["index"])
    parts = [or_unknown(gpu["parent_index"]), or_unknown(gpu["gpu_instance"])]
    return "/".join([*parts, str(gpu["compute_instance"])] if gpu["compute_instance"] else parts)


def or_unknown(number: int | None) -> str:
    """A number as it is, a dash when it is not known."""
    return text.UNKNOWN if number is None else str(number)


def kind(gpu: Values) -> str:
    """What is sold under which name, or an instance's profile."""
    return text.clean(gpu["mig_profile"] or gpu["name"] or text.UNKNOWN)


def holder_name(holder: Values) -> str:
    """Who it is: a job's key, or the name of somebody whom this node knows no job of."""
    return text.clean(holder["key"] or holder["name"] or text.UNKNOWN)


def held_by(gpu: Values) -> str:
    """Who holds a row's device: "slurm/12", "2 jobs", "1 of 7 MIG"; with "!" where the sources disagree."""
    count = len(gpu["holders"]) + gpu["other_holders"]
    if not count and gpu.get("instances"):
        words = f"{gpu['instances_held']} of {gpu['instances']} MIG"
    elif count == 1:
        words = holder_name(gpu["holders"][0]) if gpu["holders"] else "another user"
    else:
        words = f"{count} jobs" if count else text.UNKNOWN
    return words + "!" * bool(gpu["conflicts"])


def busy(gpu: Values) -> float | None:
    """The share of time in which it was busy: measured over the interval, else NVML's newest figure."""
    share: float | None = gpu["utilization"] if gpu["busy_ratio"] is None else gpu["busy_ratio"]
    return share


def state(gpu: Values) -> str:
    """How it is with the device, in a word or two."""
    word = gpu["state"] or text.UNKNOWN
    return text.clean(STATES.get(word, word))


def throttling(gpu: Values) -> list[str] | None:
    """Why its clocks are held down, in words; an idle GPU's are not."""
    words = gpu["throttle_reasons"]
    return None if words is None else [w.replace("_", " ") for w in words if w != NO_THROTTLING]


def _throttling(gpu: Values) -> str:
    words = throttling(gpu)
    return text.UNKNOWN if words is None else ", ".join(words) or "none"


def xids(gpu: Values) -> str:
    """Its Xid events by code: "79, 48 x3"."""
    return ", ".join(code + (f" x{number}" if number > 1 else "") for code, number in gpu["xids"].items())


def memory(gpu: Values) -> str:
    """Memory in use of all that there is, in GiB."""
    used, total = gpu["memory_used_bytes"], gpu["memory_total_bytes"]
    if used is None and total is None:
        return text.UNKNOWN
    return f"{_gib(used)}/{_gib(total)} GiB"


def _gib(value: int | None) -> str:
    return text.number(None if value is None else value / _GIB, 1 if value and value < 100 * _GIB else 0)


def power(gpu: Values) -> str:
    """Power, of what it may take."""
    limit = gpu["power_limit_watts"]
    of = "" if limit is None else f"/{limit:.0f}"
    return text.UNKNOWN if gpu["power_watts"] is None else f"{gpu['power_watts']:.0f}{of} W"


def _temperature(gpu: Values) -> str:
    return text.UNKNOWN if gpu["temperature_c"] is None else f"{gpu['temperature_c']} C"


def _clock(gpu: Values) -> str:
    return text.UNKNOWN if gpu["sm_clock_mhz"] is None else f"{gpu['sm_clock_mhz']} MHz"


def _profile(field: str) -> Callable[[Values], Any]:
    return lambda gpu: gpu["profile"] and gpu["profile"][field]


def _ratio(name: str, title: str, field: str, rank: int) -> Column:
    value = _profile(field)
    return Column(name, title, 7, lambda g: text.percent(value(g)), value, rank, needs=value)


def _any_state(gpu: Values) -> str:
    return _STATE_STYLES.get(gpu["state"], "")


def _warning(wrong: Callable[[Values], object]) -> Callable[[Values], str]:
    return lambda gpu: "yellow" if wrong(gpu) else ""


def _label(gpu: Values) -> str:
    return ("  " if gpu["nested"] else "") + label(gpu)


def _index(gpu: Values) -> Any:
    return gpu["index"]


COLUMNS: tuple[Column, ...] = (
    Column("gpu", "GPU", 16, _label, _index, -1, right=False, least=18, usual=as_wide(_label, 8, 24)),
    Column("name", "NAME", 20, kind, kind, 9, right=False, least=20, usual=as_wide(kind, 4, 40)),
    Column(
        "held",
        "HELD BY",
        24,
        held_by,
        held_by,
        1,
        right=False,
        least=10,
        usual=as_wide(held_by, 10, 60),
        style=_warning(lambda g: g["conflicts"]),
    ),
    Column("busy", "GPU%", 6, lambda g: text.percent(busy(g)), busy, 0, style=lambda _: "bold"),
    _ratio("sm", "SM%", "sm_active_ratio", 4),
    _ratio("tensor", "TENSOR%", "tensor_ratio", 7),
    _ratio("dram", "DRAM%", "dram_ratio", 7),
    Column(
        "memory", "MEMORY", 13, memory, lambda g: g["memory_used_bytes"], 2, usual=as_wide(memory, 12, 18)
    ),
    Column("power", "POWER", 11, power, lambda g: g["power_watts"], 5),
    Column("temperature", "TEMP", 5, _temperature, lambda g: g["temperature_c"], 5),
    Column("clock", "CLOCK", 8, _clock, lambda g: g["sm_clock_mhz"], 8),
    Column("state", "STATE", 9, state, state, 1, right=False, usual=as_wide(state, 5, 10), style=_any_state),
    Column(
        "xids",
        "XID",
        10,
        xids,
        xids,
        3,
        right=False,
        needs=lambda g: g["xids"] or None,
        usual=as_wide(xids, 3, 16),
        style=lambda _: "red",
    ),
    Column(
        "throttling",
        "THROTTLED BY",
        20,
        _throttling,
        _throttling,
        6,
        right=False,
        least=12,
        usual=as_wide(_throttling, 12, 80),
        style=_warning(throttling),
    ),
)


def matches(gpu: Values, wanted: str) -> bool:
    """Whether the text of a filter is in the device's UUID, name, state or in who holds it."""
    wanted = wanted.casefold()
    words = [
        gpu["uuid"],
        kind(gpu),
        gpu["name"] or "",
        state(gpu),
        label(gpu),
        *map(holder_name, gpu["holders"]),
    ]
    return any(wanted in word.casefold() for word in words)


def is_dim(gpu: Values) -> bool:
    """Whether there are no figures of it."""
    return gpu["state"] in _STATE_STYLES


def absent(snapshot: Values) -> str:
    """Why there is no GPU to show, in a sentence."""
    nvml = snapshot["nvml"]
    if nvml is not None:
        if not nvml["up"]:
            return f"no GPU figures: {nvml_reason(nvml)}"
        return "no GPU: NVML lists none, or the jobs that were asked for hold none"
    sources = [s for s in snapshot["collector"]["sources"] if s["name"] == "gpu"]
    if not sources:
        return "no GPU figures: no NVIDIA driver on this node, or the source gpu is switched off"
    up, reason = sources[0]["up"], text.clean(sources[0]["reason"] or "no reason given")
    return f"no GPU figures: {'no NVIDIA driver on this node' if up else reason}"


def nvml_reason(nvml: Values) -> str:
    """Why NVML gives nothing."""
    reason = text.clean(nvml["reason"] or "no reason given")
    return reason + (f" ({text.clean(nvml['code'])})" if nvml["code"] else "")


def missing_part(name: str) -> str:
    """What a source has no figures of, for people: a GPU as elsewhere on the screen."""
    index = _ABSENT.fullmatch(name)
    if index:  # it has no UUID as long as NVML gives no handle of it
        return f"the GPU with NVML's index {index[1]}"
    return f"GPU {short_uuid(name[4:])}" if name.startswith("gpu GPU-") else name


def trouble(snapshot: Values, where: str) -> list[str]:
    """What is wrong with GPUs: one line each, mostly none. `where` says where to see more."""
    nvml, devices = snapshot["nvml"], snapshot["gpus"]
    lines = []
    if nvml is not None and not nvml["up"]:
        lines.append(f"NVML is down: {nvml_reason(nvml)}")
    for word in ("lost", "silent"):
        labels = [label(gpu) for gpu in rows(devices) if gpu["state"] == word]
        if labels:
            said = "GPU lost" if word == "lost" else "NVML has no answer of GPU"
            lines.append(f"{said}: {', '.join(labels[:4])}{', …' if len(labels) > 4 else ''}")
    contradictions = len(conflicts(snapshot))
    if contradictions:
        lines.append(f"{contradictions} GPU conflict{'s' if contradictions > 1 else ''}; {where}")
    unresolved = sum(gpu["unresolved_processes"] for gpu in devices)
    if unresolved:
        processes = "processes" if unresolved > 1 else "process"
        lines.append(f"{unresolved} GPU {processes} whose job is not known; {where}")
    return lines


def conflicts(snapshot: Values) -> list[str]:
    """Contradictions between the sources, as each device and each job tells of them."""
    lines = [
        f"conflict, GPU {label(gpu)}: {text.clean(words)}"
        for gpu in rows(snapshot["gpus"])
        for words in gpu["conflicts"]
    ]
    return lines + [
        f"conflict, {text.clean(job['key'])}: {text.clean(words)}"
        for job in snapshot["jobs"]
        if job["gpu"]
        for words in job["gpu"]["conflicts"]
    ]
