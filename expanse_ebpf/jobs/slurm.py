"""What a SLURM job's environment and its slurmstepd say about it.

The environment is the job's own claim: it gives names and the GPU list, never the job's id or owner.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from expanse_ebpf.text import clean

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import JobIdentity

VARIABLES = (
    "SLURM_JOB_ID",
    "SLURM_JOBID",
    "SLURM_JOB_NAME",
    "SLURM_JOB_ACCOUNT",
    "SLURM_JOB_PARTITION",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_HET_JOB_ID",
    "SLURM_HET_JOB_OFFSET",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "CUDA_VISIBLE_DEVICES",
)
_MAX_VALUE = 4096  # bytes of one variable
_MAX_GPUS = 64

_TITLE = re.compile(
    rb"(?:[^\0 ]*/)?slurmstepd: \[([1-9][0-9]{0,9})(?:\+[0-9]{1,9})?(?:\.([0-9A-Za-z_+]{1,64}))?\][\0 ]*"
)
_NUMBER = re.compile(r"[0-9]{1,10}")
_GPU = re.compile(r"[0-9]{1,4}|(?:GPU|MIG)-[0-9A-Za-z/-]{1,96}")
_GPU_RANGE = re.compile(r"([0-9]{1,4})-([0-9]{1,4})")


def parse_environment(data: bytes) -> dict[str, str]:
    """The SLURM variables in a /proc/PID/environ; of several with one name the first, as getenv has it.

    Searched rather than split: an exported environment can be megabytes of which a dozen values count.
    """
    data = b"\0" + data
    found = {}
    for name in VARIABLES:
        start = data.find(b"\0%s=" % name.encode())
        if start >= 0:
            start += len(name) + 2
            end = data.find(b"\0", start, start + _MAX_VALUE + 1)
            value = data[start : end if end >= 0 else start + _MAX_VALUE]
            found[name] = clean(value.decode("utf-8", "replace"), _MAX_VALUE)
    return found


def parse_stepd_title(cmdline: bytes) -> tuple[str, str] | None:
    """(job, step) from a slurmstepd's /proc/PID/cmdline ("slurmstepd: [905312.0]"); step "" when it has none.

    Any process can give itself such a title: the caller says whether this one is slurmstepd.
    """
    match = _TITLE.fullmatch(cmdline[:512])
    return (match[1].decode(), (match[2] or b"").decode()) if match else None


def parse_gpus(value: str) -> list[str]:
    """GPUs in a device variable: indexes ("0,2", "0-3") or UUIDs; anything else is left out."""
    gpus: dict[str, None] = {}
    for item in value.split(","):
        item = item.strip()
        if span := _GPU_RANGE.fullmatch(item):
            first, last = int(span[1]), int(span[2])
            gpus.update(dict.fromkeys(str(n) for n in range(first, min(last + 1, first + _MAX_GPUS))))
        elif _GPU.fullmatch(item):
            gpus[item] = None
    return list(gpus)[:_MAX_GPUS]


def fill(identity: JobIdentity, environment: dict[str, str]) -> bool:
    """Take names, array, accounts and GPUs from a job process's environment; False: it is another job's."""
    job = environment.get("SLURM_JOB_ID") or environment.get("SLURM_JOBID")
    if job != identity.id:
        return False
    identity.name = clean(environment.get("SLURM_JOB_NAME", ""))
    identity.account = clean(environment.get("SLURM_JOB_ACCOUNT", ""))
    identity.partition = clean(environment.get("SLURM_JOB_PARTITION", ""))
    array, task = environment.get("SLURM_ARRAY_JOB_ID", ""), environment.get("SLURM_ARRAY_TASK_ID", "")
    if _NUMBER.fullmatch(array) and _NUMBER.fullmatch(task):
        identity.array = f"{array}_{task}"
    leader, offset = environment.get("SLURM_HET_JOB_ID", ""), environment.get("SLURM_HET_JOB_OFFSET", "")
    if _NUMBER.fullmatch(leader) and _NUMBER.fullmatch(offset):
        identity.labels["het_job"] = f"{leader}+{offset}"
    # SLURM's own lists count GPUs as the node does; inside a constrained job CUDA's begins at 0 again
    for variable in ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES"):
        if gpus := parse_gpus(environment.get(variable, "")):
            del identity.gpus[:]
            identity.gpus.extend(gpus)
            break
    return True
