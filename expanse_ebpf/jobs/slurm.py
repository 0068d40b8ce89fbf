"""What a job's environment says, SLURM's variables above all, and what a slurmstepd says.

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
    "SLURM_NODEID",
    "SLURM_JOB_GPUS",
    "SLURM_STEP_GPUS",
    "SLURM_SHARDS_ON_NODE",
    "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
    "CUDA_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
)
_MAX_VALUE = 4096  # bytes of one variable
_MAX_GPUS = 128  # 16 GPUs of 7 MIG instances, and some

_TITLE = re.compile(
    rb"(?:[^\0 ]*/)?slurmstepd: \[([1-9][0-9]{0,9})(?:\+[0-9]{1,9})?(?:\.([0-9A-Za-z_+]{1,64}))?\][\0 ]*"
)
_NUMBER = re.compile(r"[0-9]{1,10}")
# Label of a job that was given parts of GPUs (--gres=shard or mps), which others may have parts of too.
GPU_SHARE = "gpu_share"
_GPU_RANGE = re.compile(r"([0-9]{1,4})-([0-9]{1,4})")
# In the place of a list: none, all, or a directory in which Kubernetes' device plugin may put the list.
_NO_GPU = re.compile(r"-[0-9]+|none|void|all|nodevfiles|/(?!dev/nvidia).*", re.IGNORECASE)


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
    """The names of GPUs in a variable: indexes ("0,2", "0-3"), UUIDs, or what no GPU may be known by.

    A name is cut to 128 characters. Words that say none or all are no names.
    """
    items = value.split(",")
    if len(value) >= _MAX_VALUE:
        items.pop()  # it was cut, and half a name may be another's
    gpus: dict[str, None] = {}
    for item in map(str.strip, items):
        if len(gpus) >= _MAX_GPUS:
            break
        span = _GPU_RANGE.fullmatch(item)
        if span and int(span[1]) <= int(span[2]):
            first, last = int(span[1]), int(span[2])
            gpus.update(dict.fromkeys(str(n) for n in range(first, min(last + 1, first + _MAX_GPUS))))
        elif item and not _NO_GPU.fullmatch(item):
            gpus[clean(item, 128)] = None
    return list(gpus)[:_MAX_GPUS]


def parse_cuda(value: str) -> list[str]:
    """The names in CUDA_VISIBLE_DEVICES, which ends for CUDA where the first item is that names no GPU."""
    items = value.split(",")
    end = next(
        (n for n, item in enumerate(items) if not item.strip() or _NO_GPU.fullmatch(item.strip())), None
    )
    return parse_gpus(",".join(items[:end]))


def fill_visible_gpus(identity: JobIdentity, environment: dict[str, str]) -> None:
    """Take the GPUs that CUDA or NVIDIA's container runtime was told of into `identity`."""
    cuda = parse_cuda(environment.get("CUDA_VISIBLE_DEVICES", ""))
    given = parse_gpus(environment.get("NVIDIA_VISIBLE_DEVICES", ""))
    # What is given to a container is counted from 0 in it: of the two it is the runtime's list then.
    if cuda and not (given and all(_NUMBER.fullmatch(name) for name in cuda)):
        _set_gpus(identity, "CUDA_VISIBLE_DEVICES", cuda)
    else:
        _set_gpus(identity, "NVIDIA_VISIBLE_DEVICES", given)


def _fill_gpus(identity: JobIdentity, environment: dict[str, str]) -> None:
    """Take the GPUs of a SLURM job from the variable that tells most."""
    job = parse_gpus(environment.get("SLURM_JOB_GPUS", ""))
    step = parse_gpus(environment.get("SLURM_STEP_GPUS", ""))
    # SLURM sets the job's list in the batch script, so that on the job's other nodes it is the first one's.
    # The step's list is made on each node.
    if environment.get("SLURM_NODEID", "0") != "0" or not set(step) <= set(job):
        job = []
    if any(name.startswith("MIG-") for name in parse_cuda(environment.get("CUDA_VISIBLE_DEVICES", ""))):
        job = step = []  # SLURM's lists have its own count of MIG instances, from which nobody can tell them
    if job:
        _set_gpus(identity, "SLURM_JOB_GPUS", job)
    elif step:
        _set_gpus(identity, "SLURM_STEP_GPUS", step)
    else:
        fill_visible_gpus(identity, environment)


def _set_gpus(identity: JobIdentity, variable: str, gpus: list[str]) -> None:
    del identity.gpus[:]
    identity.gpus.extend(gpus)
    identity.gpus_source = variable if gpus else ""


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
    _fill_gpus(identity, environment)
    if _NUMBER.fullmatch(environment.get("SLURM_SHARDS_ON_NODE", "")):
        identity.labels[GPU_SHARE] = "shard"
    elif _NUMBER.fullmatch(environment.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "")):
        identity.labels[GPU_SHARE] = "mps"
    return True
