"""What the controller takes from a node, and what it refuses."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from expanse_ebpf.export.pprof import VALUES
from expanse_ebpf.wire.collector_pb2 import JobIdentity, JobProfile, NodeIdentity, Report
from expanse_ebpf.wire.profile_pb2 import Profile

MAX_SEQUENCE = 2**63 - 1
MAX_JOBS = 10_000
MAX_NAME = 512
MAX_TEXT = 1024
MAX_ENTRIES = 256  # labels, containers, GPUs
MAX_IDENTITY_BYTES = 64 * 1024
# In one report; profiles beyond are refused.
MAX_PROFILES = 1000
MAX_PROFILE_BYTES = 1 << 20
# Some 40,000 stacks. Reading takes up to forty times as much memory when it is made for that.
MAX_UNPACKED_BYTES = 4 << 20
# Real profiles are packed to a sixth or less. Without this bound a few bytes would make hours of work.
MAX_RATIO = 64
MAX_PROFILE_NS = 3600 * 1_000_000_000
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


def profile_faults(profiles: Iterable[JobProfile]) -> list[str]:
    """Why each of a report's profiles cannot be stored, in one word; empty where it can.

    What takes long to check is left to the reader: whether all numbers in it refer to something.
    """
    seen: set[tuple[str, int | str, int]] = set()
    faults = []
    for profile in profiles:
        job = profile.identity
        name = (job.scheduler, job.run or job.id, profile.from_ns)
        faults.append("twice" if name in seen else _fault(profile))
        seen.add(name)
    return faults


def _fault(profile: JobProfile) -> str:
    if not _is_valid_job(profile.identity):
        return "job"
    if not 0 < profile.from_ns < profile.to_ns <= profile.from_ns + MAX_PROFILE_NS:
        return "span"
    if len(profile.pprof) > MAX_PROFILE_BYTES:
        return "size"
    limit = min(MAX_UNPACKED_BYTES, MAX_RATIO * len(profile.pprof))
    stream = zlib.decompressobj(wbits=31)
    try:
        plain = stream.decompress(profile.pprof, limit + 1)
        if len(plain) > limit:
            return "size"
        if not stream.eof or stream.unused_data:
            return "damaged"
        pprof = Profile.FromString(plain)
        texts = pprof.string_table
        found = tuple((texts[value.type], texts[value.unit]) for value in pprof.sample_type)
    except (zlib.error, DecodeError, IndexError):
        return "damaged"
    return "" if found == VALUES else "values"
