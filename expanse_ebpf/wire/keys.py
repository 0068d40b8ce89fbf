"""Keys of jobs, as people write them: `slurm/123`, `kubernetes/NAMESPACE/POD`, `run/NAME` and so on."""

from __future__ import annotations

import re

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.wire.collector_pb2 import JobIdentity

_UUID = r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}"
_FORMS = {
    "slurm": re.compile(r"[0-9]{1,10}(?:[_+][0-9]{1,10})?|s[0-9A-Za-z]{13}"),
    "kubernetes": re.compile(rf"[^/\s]+/[^/\s]+|{_UUID}"),
    "run": re.compile(r".+", re.DOTALL),
    "unit": re.compile(r"[^/]+"),
    "container": re.compile(r"[0-9a-f]{12,64}|lxc-[^/]+"),
}
KEY_FORMS = (
    "slurm/123, slurm/500_1, kubernetes/NAMESPACE/POD, kubernetes/UID, run/NAME, unit/NAME or "
    "container/ID (12 hex digits or more)"
)


class BadKeyError(ConfigError):
    """What was given is no job's key; the message names the forms."""


def parse_key(key: str) -> tuple[str, str]:
    """(scheduler, rest) of a job's key; raises BadKeyError."""
    scheduler, slash, rest = key.partition("/")
    form = _FORMS.get(scheduler)
    if not slash or form is None or not form.fullmatch(rest):
        raise BadKeyError(f"{key[:80]!r} is not a job's key: use {KEY_FORMS}")
    return scheduler, rest


def names(identity: JobIdentity) -> set[str]:
    """Everything that can stand behind `SCHEDULER/` for this job, ids of containers in full."""
    found = {identity.id, identity.array, identity.sluid, identity.pod_uid}
    het_job = identity.labels.get("het_job", "")  # `labels[…]` would add the key
    # An array's id, or a heterogeneous job's, means all of its parts.
    found |= {het_job, identity.array.rpartition("_")[0], het_job.rpartition("+")[0]}
    return found - {""}


def may_be_cut(scheduler: str, name: str) -> bool:
    """Whether `name` can be the beginning of a longer one: a container's id, as engines show it."""
    return scheduler == "container" and not name.startswith("lxc-")


def matches(identity: JobIdentity, wanted_key: str) -> bool:
    """Whether the job is one that `wanted_key` means; raises BadKeyError when that is no key."""
    scheduler, wanted = parse_key(wanted_key)
    if identity.scheduler != scheduler:
        return False
    return wanted in names(identity) or (may_be_cut(scheduler, wanted) and identity.id.startswith(wanted))
