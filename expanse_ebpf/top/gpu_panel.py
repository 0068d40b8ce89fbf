"""What the panels say of GPUs: everything about one device, and what a job holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from expanse_ebpf.top import gpus, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.text import Line

MAX_PROCESSES = 200
MAX_EVENTS = 20
_WARN = "yellow"
_UNITS = (
    ("SM active", "sm_active_ratio"),
    ("warps", "sm_occupancy_ratio"),
    ("tensor", "tensor_ratio"),
    ("FP64", "fp64_ratio"),
    ("FP32", "fp32_ratio"),
    ("FP16", "fp16_ratio"),
    ("integer", "integer_ratio"),
    ("graphics", "graphics_ratio"),
    ("DRAM", "dram_ratio"),
)


def device_lines(
    uuid: str, gpu: Values | None, snapshot: Values, events: Iterable[Values], width: int
) -> list[Line]:
    """Everything that is known of one device; `events` are the last that came, of any device."""
    if gpu is None:
        return [(f"GPU {text.clean(uuid)}", "bold"), ("The GPU is no longer here.", "")]
    lines: list[Line] = [(_title(gpu), "bold"), *_holders(gpu, snapshot)]
    lines += [(f"conflict: {text.clean(words)}", _WARN) for words in gpu["conflicts"]]
    lines += [(line, "") for line in (*_figures(gpu), *_profile(gpu["profile"]), *_health(gpu))]
    lines += _events(uuid, events)
    return [
        *wrapped(lines, width),
        ("", ""),
        *_processes(gpu, width),
        *wrapped(text.not_known(gpu["unavailable"]), width),
    ]


def wrapped(lines: Iterable[Line], width: int) -> list[Line]:
    """The lines in pieces of at most `width` columns, each with its line's style."""
    return [(part, style) for line, style in lines for part in text.wrap(line, width)]


def job_lines(job: Values, snapshot: Values, width: int) -> list[Line]:
    """What a job holds, whose word that is and what is wrong with it; nothing for a job without a GPU."""
    gpu = job["gpu"]
    if gpu is None:
        if not job["gpus"]:
            return []
        return wrapped([(text.clean(f"gpu: {_claim(job)}"), "")], width)
    devices = {device["uuid"]: device for device in snapshot["gpus"]}
    lines: list[Line] = [(_summary(gpu), "")]
    for hold in gpu["holds"]:
        device = devices.get(hold["uuid"])
        name = f"{gpus.label(device)}  {gpus.kind(device)}" if device else gpus.short_uuid(hold["uuid"])
        sharers = hold["sharers"] or 1
        alone = "held alone" if sharers == 1 else f"shared by {sharers} jobs"
        lines.append((f"  {name} · {alone} · source: {_source(hold)}", ""))
    lines += [(f"  conflict: {text.clean(words)}", _WARN) for words in gpu["conflicts"]]
    lines += [(f"  not on this node: {text.clean(name)}", _WARN) for name in gpu["unknown"]]
    if job["gpus"]:
        lines.append((text.clean(f"  {_claim(job)}"), "dim"))
    return wrapped(lines, width)


def _summary(gpu: Values) -> str:
    """How many a job holds, and what is known of their use."""
    parts = [f"gpu: {gpu['count']} held"]
    if gpu["gpus_busy"] is not None:
        parts.append(f"busy {text.number(gpu['gpus_busy'])} GPUs ({text.percent(gpu['busy_ratio'])})")
    if gpu["sm_active_ratio"] is not None:
        parts.append(f"SM active {text.percent(gpu['sm_active_ratio'])}")
    if gpu["memory_bytes"] is not None or gpu["memory_total_bytes"] is not None:
        parts.append(f"memory {text.size(gpu['memory_bytes'])} of {text.size(gpu['memory_total_bytes'])}")
    if gpu["power_watts"] is not None:
        parts.append(f"power {text.watts(gpu['power_watts'])}")
    if gpu["energy_joules"] is not None:
        parts.append(f"energy {text.joules(gpu['energy_joules'])}")
    return " · ".join(parts)


def _claim(job: Values) -> str:
    return f"its environment says {job['gpus_source'] or 'GPUs'}={','.join(job['gpus'])}"


def _source(values: Values) -> str:
    return text.clean((values["source"] or text.UNKNOWN).replace("_", " "))


def _title(gpu: Values) -> str:
    number = gpus.or_unknown(gpu["index"])
    if gpu["parent_uuid"]:
        of = gpus.or_unknown(gpu["parent_index"])
        what = f"MIG instance {gpus.or_unknown(gpu['gpu_instance'])} of GPU {of}"
    else:
        what = f"GPU {number}"
    parts = [what, gpu["mig_profile"], gpu["name"], gpu["uuid"], gpu["pci_bus_id"]]
    if gpu["serial"]:
        parts.append(f"serial {gpu['serial']}")
    if gpu["minor"] is not None:
        parts.append(f"/dev/nvidia{gpu['minor']}")
    if gpu["parent_uuid"]:
        compute = gpus.or_unknown(gpu["compute_instance"])
        parts.append(f"compute instance {compute} · of {gpus.short_uuid(gpu['parent_uuid'])}")
    if gpu["state"] != "ok":
        parts.append(gpus.state(gpu))
    return text.clean(" · ".join(part for part in parts if part))


def _holders(gpu: Values, snapshot: Values) -> list[Line]:
    jobs = {(job["key"], job["run"]): job for job in snapshot["jobs"]}
    lines: list[Line] = []
    for holder in gpu["holders"]:
        job = jobs.get((holder["key"], holder["run"]))
        parts = [gpus.holder_name(holder)]
        if job is not None:
            parts += [job["name"] or "", job["user"] or "", (job["state"] or "").replace("_", " ")]
        elif holder["key"] is None:
            parts.append("no job that this node knows")
        parts.append(f"source: {_source(holder)}")
        lines.append((f"held by {text.clean(' · '.join(part for part in parts if part))}", ""))
    if gpu["other_holders"]:
        others = gpu["other_holders"]
        lines.append((f"held by {others} job{'s' if others > 1 else ''} of other users", "dim"))
    instances = [one for one in gpus.rows(snapshot["gpus"]) if one["parent_uuid"] == gpu["uuid"]]
    for one in instances:
        who = gpus.held_by(one) if one["holders"] or one["other_holders"] else "nobody"
        lines.append((f"MIG instance {gpus.label(one)} {gpus.kind(one)} · held by {who}", ""))
    return lines or [("held by nobody", "dim")]


def _figures(gpu: Values) -> list[str]:
    """How busy, how full, how hot, as far as it is known."""
    newest = text.percent(gpu["utilization"])
    sampled = "" if gpu["utilization"] is None else f" (newest sample {newest})"
    lines = [
        _known(
            ("busy", gpu["busy_ratio"], lambda share: text.percent(share) + sampled),
            ("newest sample", gpu["utilization"] if gpu["busy_ratio"] is None else None, text.percent),
            ("memory read or written", gpu["memory_utilization"], text.percent),
        ),
        _known(
            ("memory used", gpu["memory_used_bytes"], text.size),
            ("free", gpu["memory_free_bytes"], text.size),
            ("reserved", gpu["memory_reserved_bytes"], text.size),
            ("in all", gpu["memory_total_bytes"], text.size),
        ),
        _known(
            ("power", gpu["power_watts"], lambda _: gpus.power(gpu)),
            ("energy", gpu["energy_joules"], text.joules),
            ("GPU", gpu["temperature_c"], lambda degrees: f"{degrees} C"),
            ("memory", gpu["memory_temperature_c"], lambda degrees: f"{degrees} C"),
            ("SM clock", gpu["sm_clock_mhz"], lambda mhz: _clock(mhz, gpu["sm_clock_max_mhz"])),
            ("memory clock", gpu["memory_clock_mhz"], lambda mhz: _clock(mhz, gpu["memory_clock_max_mhz"])),
        ),
        _throttling(gpu),
        _link("PCIe", gpu["pcie"]),
        _link("NVLink", gpu["nvlink"]),
    ]
    return [line for line in lines if line]


def _known(*figures: tuple[str, float | None, Callable[[float], str]]) -> str:
    """Those of the figures that are known; empty when none is."""
    return " · ".join(f"{name} {show(value)}" for name, value, show in figures if value is not None)


def _clock(mhz: float, most: int | None) -> str:
    return f"{mhz} MHz" if most is None else f"{mhz} of {most} MHz"


def _throttling(gpu: Values) -> str:
    words = gpu["throttle_reasons"]
    shares = [
        f"{cause.replace('_', ' ')} {text.percent(share)}" for cause, share in gpu["throttled_ratio"].items()
    ]
    said = []
    if words is not None:
        reasons = ", ".join(words).replace("_", " ")
        said.append(f"clocks held down by {reasons}" if reasons else "clocks free")
    free = words == []
    if shares and not (free and not any(gpu["throttled_ratio"].values())):
        start = "" if words else "held down " if free else "clocks held down "
        said.append(f"{start}of the time: {', '.join(shares)}")
    return text.clean(" · ".join(said))


def _link(name: str, link: Values) -> str:
    """A link's traffic and what it is like; empty where nothing is known of it."""
    if all(value is None for value in link.values()):
        return ""
    parts = [
        f"{name} {text.size_rate(link['sent_bytes_per_s'])} sent",
        f"{text.size_rate(link['received_bytes_per_s'])} received",
    ]
    if link.get("generation") is not None or link.get("width") is not None:
        parts.append(f"generation {text.count(link['generation'])} x{text.count(link['width'])}")
    if link.get("links") is not None:
        parts.append(f"{link['links']} links")
    if link.get("replays") is not None:
        parts.append(f"{link['replays']} replays")
    return ", ".join(parts)


def _profile(profile: Values | None) -> list[str]:
    """Activity of the units, and whether a profiler or NVML's plain figures say so."""
    if profile is None:
        return []
    units = [f"{name} {text.percent(profile[field])}" for name, field in _UNITS if profile[field] is not None]
    source = profile["source"] or text.UNKNOWN
    origin = "NVML's plain figures, no GPM" if source == "nvml" else source
    lines = [text.clean(f"profile ({origin}): {' · '.join(units) or text.UNKNOWN}")]
    lines += [
        f"  {line}" for line in (_link("PCIe", profile["pcie"]), _link("NVLink", profile["nvlink"])) if line
    ]
    return lines


def _health(gpu: Values) -> list[str]:
    """ECC, rows, Xids and modes, as far as they are known."""
    ecc, rows = gpu["ecc"], gpu["remapped_rows"]
    lines = []
    if any(value is not None for value in ecc.values()):
        mode = {None: "", True: "on, ", False: "off, "}[ecc["enabled"]]
        lines.append(
            f"ECC {mode}{_plain(ecc['corrected'])} corrected, {_plain(ecc['uncorrected'])} uncorrected"
            f" · ever {_plain(ecc['corrected_lifetime'])}, {_plain(ecc['uncorrected_lifetime'])}"
        )
    if any(value is not None for value in rows.values()):
        flags = [word for word in ("pending", "failed") if rows[word]]
        lines.append(
            f"remapped rows: {_plain(rows['corrected'])} for corrected errors,"
            f" {_plain(rows['uncorrected'])} for uncorrected" + "".join(f", {flag}" for flag in flags)
        )
    if gpu["xids"]:
        lines.append(f"Xid: {gpus.xids(gpu)}")
    modes = [
        f"{name} {'on' if gpu[field] else 'off'}"
        for name, field in (("persistence", "persistence"), ("MIG", "mig_enabled"))
        if gpu[field] is not None
    ]
    return [*lines, *([" · ".join(modes)] if modes else [])]


def _plain(value: int | None) -> str:
    return text.UNKNOWN if value is None else str(value)


def _events(uuid: str, events: Iterable[Values]) -> list[Line]:
    lines: list[Line] = []
    for event in [event for event in events if event["uuid"] == uuid][-MAX_EVENTS:]:
        time = (event["time"] or text.UNKNOWN).partition(".")[0].replace("T", " ")
        what = f"Xid {event['xid']}" if event["kind"] == "xid" else event["kind"] or text.UNKNOWN
        who = [gpus.holder_name(holder) for holder in event["holders"]]
        who += ["another user's job"] * event["other_holders"]
        held = f", held by {', '.join(who)}" if who else ""
        lines.append((text.clean(f"{time} UTC  {what}{held}"), "" if event["kind"] == "back" else "red"))
    return lines


def _processes(gpu: Values, width: int) -> list[Line]:
    order: Sequence[Values] = sorted(gpu["processes"], key=lambda p: (-(p["memory_bytes"] or 0), p["pid"]))
    lines: list[Line] = []
    if order:
        lines.append((f"{'PID':>10} {'MEMORY':>9} {'KIND':<9} JOB", "bold"))
    for process in order[:MAX_PROCESSES]:
        kind = text.fit(text.clean(process["kind"] or text.UNKNOWN), 9)
        job = text.clean(process["job"] or ("of no job" if process["resolved"] else "not known whose"))
        head = f"{process['pid']:>10} {text.size(process['memory_bytes']):>9} {kind} "
        lines.append((head + text.fit(job, max(8, width - len(head))).rstrip(), ""))
    if len(order) > MAX_PROCESSES:
        lines.append((f"… {len(order) - MAX_PROCESSES} more", "dim"))
    for count, words in (
        (gpu["other_processes"], "of other users or of nobody known"),
        (gpu["unresolved_processes"], "not resolved: no process that has the GPU open fits the number"),
        (gpu["rejected_processes"], "rejected: the driver's record cannot be true"),
    ):
        if count:
            lines += wrapped([(f"{count} {words}", "dim")], width)
    if not lines and "processes" not in gpu["unavailable"]:
        lines.append(("no process", "dim"))
    return lines
