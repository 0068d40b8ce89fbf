"""What the controller takes from a node, and what it refuses."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from expanse_ebpf.export.pprof import VALUES
from expanse_ebpf.wire.collector_pb2 import (
    GpuEvent,
    GpuSample,
    JobGpu,
    JobIdentity,
    JobProfile,
    NodeIdentity,
    NvmlStatus,
    Report,
    TracePart,
    TraceState,
    TraceStatus,
)
from expanse_ebpf.wire.profile_pb2 import Profile
from expanse_ebpf.wire.transport import (
    MAX_PROFILE_BYTES,
    MAX_PROFILE_PLAIN_BYTES,
    MAX_TRACE_PART_BYTES,
    MAX_TRACE_PARTS,
)

MAX_SEQUENCE = 2**63 - 1
MAX_JOBS = 10_000
MAX_NAME = 512
MAX_TEXT = 1024
MAX_ENTRIES = 256  # labels, containers, GPUs
MAX_IDENTITY_BYTES = 64 * 1024
MAX_GPUS = 512  # MIG instances among them
MAX_GPU_EVENTS = 1000
MAX_GPU_BYTES = 256 * 1024
MAX_UUID = 128
# How many entries of a list are kept of GPUs, of their events and of what a job says of them, and in how many
# bytes when the message is larger than it may be. How long these lists are is up to the nodes' users.
_GPU_LISTS = {
    "holders": (MAX_ENTRIES, 48 * 1024),
    "processes": (4096, 96 * 1024),
    "conflicts": (MAX_ENTRIES, 48 * 1024),
}
_EVENT_LISTS = {"holders": (MAX_ENTRIES, 48 * 1024)}
_JOB_GPU_LISTS = dict.fromkeys(("holds", "conflicts", "unknown"), (MAX_ENTRIES, 16 * 1024))
# In one report; profiles beyond are refused.
MAX_PROFILES = 1000
MAX_PROFILE_NS = 3600 * 1_000_000_000
_MOST_UNPACKED = 1032  # bytes that one byte of deflate can become
# Why a profile is refused, by the word under which it is counted, and what to do about it.
_UPDATE = "give that node the controller's release of expanse-ebpf"
REMEDIES = {
    "job": f"its identity is absurd; {_UPDATE}",
    "span": f"it ends before it begins, or lasts more than an hour; {_UPDATE}",
    "size": (
        f"it is larger than {MAX_PROFILE_BYTES >> 20} MiB packed or {MAX_PROFILE_PLAIN_BYTES >> 20} MiB "
        f"unpacked; {_UPDATE}"
    ),
    "damaged": f"it is not a pprof profile in gzip; {_UPDATE}",
    "values": f"it has other values than samples, cpu and waiting; {_UPDATE}",
    "twice": f"its job and beginning are in the report already; {_UPDATE}",
    "count": f"more than {MAX_PROFILES} are in one report; name fewer jobs in that node's python.jobs",
    "allowance": "that node sends too many bytes of profiles; name fewer jobs in its python.jobs",
}
# In one report.
MAX_TRACES = 256
MAX_REPORT_PARTS = 64
# Why a status of a window or a part of its trace is refused.
TRACE_REMEDIES = {
    "status": f"what it says of a window is absurd; {_UPDATE}",
    "id": f"its window's id is no 16 hexadecimal digits; {_UPDATE}",
    "size": f"it is empty or larger than {MAX_TRACE_PART_BYTES >> 10} KiB; {_UPDATE}",
    "index": f"its number is none of those, or there are more than {MAX_TRACE_PARTS}; {_UPDATE}",
    "window": f"that node has not said before how that window ended; {_UPDATE}",
    "count": f"more than {MAX_TRACES} statuses or {MAX_REPORT_PARTS} parts are in one report; {_UPDATE}",
    "allowance": "that node sends too many bytes of traces; lower its tracing.max_events",
}
_WINDOW = re.compile(r"[0-9a-f]{16}")
_ID = re.compile(r"[0-9A-Za-z_-]{1,64}")
_SCHEDULER = re.compile(r"[a-z]{1,32}")


def node_fault(node: NodeIdentity) -> str:
    """Why `node` is not fit for an identity; empty when it is."""
    if not 0 < len(node.name) <= 253 or not node.name.isprintable():
        return "the node's name is empty, too long or not printable"
    if not _ID.fullmatch(node.install_id):
        return "the installation's id is not valid"
    if not _ID.fullmatch(node.boot_id):
        return "the boot's id is not valid"
    return ""


def report_fault(report: Report, node: NodeIdentity) -> str:
    """Why `report` cannot have come from an agent on `node`, in one word; empty when it can."""
    if not 0 < report.sequence <= MAX_SEQUENCE:
        return "sequence"
    if report.time_ns <= 0:
        return "time"
    if len(report.jobs) > MAX_JOBS:
        return "jobs"
    if report.HasField("node") and report.node != node:
        return "node"
    return ""


def drop_absurd_jobs(report: Report) -> int:
    """Take the jobs whose identity cannot be stored out of `report`; how many there were."""
    absurd = [i for i, sample in enumerate(report.jobs) if not _is_valid_job(sample.identity)]
    for i in reversed(absurd):
        del report.jobs[i]
    return len(absurd)


def _is_valid_job(job: JobIdentity) -> bool:
    return (
        _SCHEDULER.fullmatch(job.scheduler) is not None
        and 0 < len(job.id) <= MAX_NAME
        and "\0" not in job.id
        and max(len(job.name), len(job.user), len(job.account), len(job.partition), len(job.array))
        <= MAX_TEXT
        and max(len(job.labels), len(job.containers), len(job.gpus)) <= MAX_ENTRIES
        and job.ByteSize() <= MAX_IDENTITY_BYTES
    )


class Dropped(NamedTuple):
    """What was taken out of a report: whole messages about GPUs, and entries of the lists in others."""

    messages: int
    entries: int


def drop_absurd_gpus(report: Report) -> Dropped:
    """Take out of `report` what it says of GPUs and cannot be, and the ends of lists that are too long.

    A job that loses its GPUs keeps everything else.
    """
    entries = sum(_shorten(gpu, _GPU_LISTS, MAX_GPU_BYTES) for gpu in report.gpus)
    entries += sum(_shorten(event, _EVENT_LISTS, MAX_IDENTITY_BYTES) for event in report.gpu_events)
    entries += sum(
        _shorten(sample.gpu, _JOB_GPU_LISTS, MAX_IDENTITY_BYTES)
        for sample in report.jobs
        if sample.HasField("gpu")
    )
    dropped = _cut(report.gpus, MAX_GPUS, _is_valid_gpu)
    dropped += _cut(report.gpu_events, MAX_GPU_EVENTS, _is_valid_event)
    for sample in report.jobs:
        if sample.HasField("gpu") and not _is_valid_job_gpu(sample.gpu):
            sample.ClearField("gpu")
            dropped += 1
    if report.HasField("nvml") and not _is_valid_nvml(report.nvml):
        report.ClearField("nvml")
        dropped += 1
    return Dropped(dropped, entries)


def _shorten(message: Any, lists: Mapping[str, tuple[int, int]], most_bytes: int) -> int:
    """Leave in each of `lists` what it may have, in bytes too if the message is too large; how many go."""
    is_large = message.ByteSize() > most_bytes
    gone = 0
    for name, (most, room) in lists.items():
        entries = getattr(message, name)
        before = len(entries)
        if is_large:
            kept = list(_fitting(entries, room))[:most]
            del entries[:]
            entries.extend(kept)
        else:
            del entries[most:]
        gone += before - len(entries)
    return gone


def _fitting(entries: Iterable[Any], room: int) -> Iterator[Any]:
    """Those of `entries`, messages or texts, that have room in so many bytes."""
    for entry in entries:
        size = len(entry.encode()) if isinstance(entry, str) else entry.ByteSize()
        if size <= room:
            room -= size
            yield entry


def _cut(messages: Any, most: int, is_valid: Callable[[Any], bool]) -> int:
    """Leave the first `most` valid ones in a repeated field; how many have gone."""
    kept = 0
    absurd = []
    for place, message in enumerate(messages):
        if kept < most and is_valid(message):
            kept += 1
        else:
            absurd.append(place)
    for place in reversed(absurd):
        del messages[place]
    return len(absurd)


def _is_uuid(text: str) -> bool:
    return 0 < len(text) <= MAX_UUID and text.isprintable()


def _is_valid_gpu(gpu: GpuSample) -> bool:
    texts = (gpu.name, gpu.parent_uuid, gpu.pci_bus_id, gpu.serial, gpu.mig_profile, gpu.state)
    return (
        _is_uuid(gpu.uuid)
        and max(map(len, texts)) <= MAX_TEXT
        and max(len(gpu.xids), len(gpu.throttled_ns), len(gpu.unavailable)) <= MAX_ENTRIES
        and gpu.ByteSize() <= MAX_GPU_BYTES
    )


def _is_valid_event(event: GpuEvent) -> bool:
    return _is_uuid(event.uuid) and len(event.kind) <= MAX_TEXT and event.ByteSize() <= MAX_IDENTITY_BYTES


def _is_valid_job_gpu(gpu: JobGpu) -> bool:
    return all(_is_uuid(hold.uuid) for hold in gpu.holds) and gpu.ByteSize() <= MAX_IDENTITY_BYTES


def _is_valid_nvml(nvml: NvmlStatus) -> bool:
    texts = (nvml.code, nvml.reason, nvml.driver_version, nvml.nvml_version, nvml.cuda_version)
    return max(map(len, texts)) <= MAX_TEXT


def status_fault(status: TraceStatus) -> str:
    """Why what a node says of a window cannot be kept, in one word; empty when it can."""
    if not _WINDOW.fullmatch(status.id):
        return "id"
    job = status.identity
    fits = (
        (_is_valid_job(job) or (not job.scheduler and job.ByteSize() <= MAX_TEXT and "\0" not in job.id))
        and status.state in TraceState.values()
        and max(len(status.reason), len(status.rule)) <= MAX_TEXT
        and all(map(math.isfinite, (status.seconds, status.traced_share, status.cost_share)))
    )
    return "" if fits else "status"


def part_fault(part: TracePart) -> str:
    """Why a part of a trace cannot be stored whatever its window, in one word; empty when it can."""
    if not _WINDOW.fullmatch(part.id):
        return "id"
    if not part.index < part.parts <= MAX_TRACE_PARTS:
        return "index"
    return "" if 0 < len(part.data) <= MAX_TRACE_PART_BYTES else "size"


class Checked(NamedTuple):
    """Why each profile cannot be stored (see REMEDIES), empty where it can; bytes unpacked to see it."""

    faults: list[str]
    unpacked: int


def checked(profiles: Iterable[JobProfile], room: int) -> Checked:
    """Look at a report's profiles, of which at most some `room` bytes may be unpacked.

    What takes long to check is left to the reader: whether all numbers in it refer to something.
    """
    seen: set[tuple[str, int | str, int]] = set()
    faults = []
    left = room
    for profile in profiles:
        job = profile.identity
        name = (job.scheduler, job.run or job.id, profile.from_ns)
        fault = "twice" if name in seen else _outer_fault(profile)
        if not fault:
            fault, unpacked = _unpacked_fault(profile.pprof, left)
            left -= unpacked
        faults.append(fault)
        seen.add(name)
    return Checked(faults, room - left)


def _outer_fault(profile: JobProfile) -> str:
    if not _is_valid_job(profile.identity):
        return "job"
    if not 0 < profile.from_ns < profile.to_ns <= profile.from_ns + MAX_PROFILE_NS:
        return "span"
    return "size" if len(profile.pprof) > MAX_PROFILE_BYTES else ""


def _unpacked_fault(packed: bytes, room: int) -> tuple[str, int]:
    """The fault, and how many bytes were unpacked to see it: those of one profile, or at most `room`."""
    limit = min(MAX_PROFILE_PLAIN_BYTES, room)
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(packed, limit + 1)
    except zlib.error:
        return "damaged", min(limit, _MOST_UNPACKED * len(packed))
    if len(plain) > limit:
        return ("size" if limit == MAX_PROFILE_PLAIN_BYTES else "allowance"), limit
    return ("damaged" if not stream.eof or stream.unused_data else _plain_fault(plain)), len(plain)


def _plain_fault(plain: bytes) -> str:
    try:
        pprof = Profile.FromString(plain)
        texts = pprof.string_table
        found = tuple((texts[value.type], texts[value.unit]) for value in pprof.sample_type)
    except (DecodeError, IndexError):
        return "damaged"
    return "" if found == VALUES else "values"
