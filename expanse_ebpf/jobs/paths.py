"""From a cgroup's path to the job that it belongs to: pure parsing, nothing is read.

A user can make cgroups below user.slice and name them as they like. SLURM and Kubernetes forms
therefore count only where root alone can make them; `run` jobs and containers of users are their own.
"""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final
from urllib.parse import quote, unquote

from expanse_ebpf.errors import ConfigError

if TYPE_CHECKING:
    from expanse_ebpf.config import JobsConfig

RUN_PREFIX: Final = "expanse-run-"
_NAME_MAX = 255  # the kernel's bound for one component
_MAX_UID = 2**32 - 2

_UID = re.compile(r"uid_([0-9]{1,10})")
_JOB = re.compile(r"job_([1-9][0-9]{0,9})")
_SLUID = re.compile(r"s[0-9A-Za-z]{13}")
_STEP = re.compile(r"step_([0-9A-Za-z_+.-]{1,64})")
_TASK = re.compile(r"task_([0-9A-Za-z_]{1,32})")

_UUID = r"[0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32}"
_KUBE_ROOT = re.compile(r"kubepods|(?:kubelet-)?kubepods\.slice")
_KUBE_QOS = re.compile(r"(?:(?:kubelet-)?kubepods-)?(burstable|besteffort)(?:\.slice)?")
_KUBE_POD = re.compile(rf"(?:(?:kubelet-)?kubepods-(?:(burstable|besteffort)-)?)?pod({_UUID})(?:\.slice)?")
# containerd without the systemd driver under a kubelet with it puts slice and container in one name
_KUBE_JOINED = re.compile(
    rf"(?:kubelet-)?kubepods-(?:(burstable|besteffort)-)?pod({_UUID})\.slice:[a-z-]{{1,32}}:([0-9a-f]{{64}})"
)
_CONTAINER = re.compile(r"([a-z][a-z-]{0,31})-([0-9a-f]{64})(?:\.scope)?")
_BARE_CONTAINER = re.compile(r"[0-9a-f]{64}")
_USER_SLICE = re.compile(r"user-([0-9]{1,10})\.slice")
_UNIT = re.compile(r".+\.(?:service|scope|socket|mount|swap)", re.DOTALL)
_ESCAPES = re.compile(r"(?:\\x[0-9a-f]{2})+")

# Directories in which container engines put theirs, named by the bare id.
_ENGINES = frozenset(("docker", "default", "moby", "k8s.io", "containerd", "libpod_parent"))
# What may stand above a "kubepods", besides slices and containers.
_KUBE_PARENTS = _ENGINES | {
    "kubelet", "kubelet.service", "containerd.service", "docker.service", "crio.service",
    "k3s", "k3s.service", "k3s-agent.service", "rke2-server.service", "rke2-agent.service",
    "container", "payload", "init.scope",
}  # fmt: skip
_ROOTS = _ENGINES | {"kubelet", "lxc", "lxc.payload", "lxc.monitor", "lxc.pivot", "init.scope"}


@dataclass(frozen=True, slots=True)
class Place:
    """Where a cgroup stands within its job."""

    scheduler: str  # slurm | kubernetes | run | unit | container
    id: str  # as in a key, but for Kubernetes always the pod's uid as the path has it
    depth: int  # so many leading components are the job's own directory
    step: str = ""  # SLURM: "batch", "extern", "interactive", "0"
    task: str = ""  # SLURM: "0", "special"
    role: str = ""  # "slurmstepd" or "conmon" where the cgroup is not the user's
    uid: int | None = None
    container: str = ""  # the deepest container's id
    pod_uid: str = ""
    qos: str = ""  # guaranteed | burstable | besteffort
    sluid: str = ""


@dataclass(frozen=True, slots=True)
class NotAJob:
    """The path is known and belongs to no job."""


NOT_A_JOB: Final = NotAJob()


class UnitFilter:
    """Which systemd units are jobs, by shell patterns on the unit's name as systemd writes it."""

    __slots__ = ("_exclude", "_include")

    def __init__(self, include: Iterable[str], exclude: Iterable[str] = ()) -> None:
        self._include = _any(include)
        self._exclude = _any(exclude)

    @classmethod
    def of(cls, config: JobsConfig) -> UnitFilter:
        """The filter that the configuration asks for."""
        return cls(config.units, config.units_exclude)

    def accepts(self, name: str) -> bool:
        """Whether the unit is a job."""
        return self._include.match(name) is not None and self._exclude.match(name) is None


def _any(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(fnmatch.translate(p) for p in patterns) or r"(?!)")


@functools.cache
def _default_units() -> UnitFilter:
    from expanse_ebpf.config import JobsConfig

    return UnitFilter.of(JobsConfig())


def run_component(name: str) -> str:
    """The cgroup's name for the `run` job `name`; raises ConfigError when it cannot be one."""
    try:
        component = RUN_PREFIX + quote(name, safe="")
    except UnicodeEncodeError:
        raise ConfigError("the job's name is not UTF-8; give another with --name") from None
    if not name or not name.isprintable() or len(component) > _NAME_MAX:
        raise ConfigError(f"{name[:40]!r} cannot be a job's name: use 1 to about 200 printable characters")
    return component


def run_name(component: str) -> str | None:
    """The reverse of `run_component`; None when the component is not such a name.

    Only the one spelling that `run_component` makes counts, so that two cgroups beside each other
    never bear one name.
    """
    if not component.startswith(RUN_PREFIX):
        return None
    name = unquote(component[len(RUN_PREFIX) : _NAME_MAX + 1], errors="replace")
    try:
        return name if run_component(name) == component else None
    except ConfigError:
        return None


def unescape(name: str) -> str:
    r"""A systemd name with \x2d and the like undone, for showing."""
    return _ESCAPES.sub(lambda m: bytes.fromhex(m[0].replace("\\x", "")).decode("utf-8", "replace"), name)


def parse(path: str, units: UnitFilter | None = None) -> Place | NotAJob | None:
    """The job's place for a cgroup path as in /proc/PID/cgroup; None when the form is unknown.

    `units` None means the default configuration. Never raises; time grows with the path's length only.
    """
    if not path.startswith("/"):
        return None
    parts = [part for part in path.split("/") if part]
    if not parts:
        return NOT_A_JOB
    if ".." in parts:  # outside of this cgroup namespace: what stands above is not known
        return None
    if place := _run(parts):
        return place
    if start := _slurm_root(parts):
        return _slurm(parts, start)
    return _container(parts) or _unit(parts, units or _default_units())


def _run(parts: list[str]) -> Place | None:
    for i, part in enumerate(parts):
        if (name := run_name(part)) is not None:
            return Place("run", name, i + 1)
    return None


# ---- SLURM ---------------------------------------------------------------------------------------


def _slurm_root(parts: list[str]) -> int:
    """How many components are slurmd's own root, whose name may hold the node's; 0: not SLURM's."""

    def scope(name: str) -> bool:
        return name == "slurmstepd.scope" or name.endswith("_slurmstepd.scope")

    top = parts[0]
    if top == "slurm" or top.startswith("slurm_") or scope(top):
        return 1
    anchored = top.endswith(".slice") and top not in ("user.slice", "machine.slice")
    return 2 if anchored and len(parts) > 1 and scope(parts[1]) else 0


def _slurm(parts: list[str], at: int) -> Place | NotAJob | None:
    uid = None
    if at < len(parts) and (match := _UID.fullmatch(parts[at])):
        uid = int(match[1])
        at += 1
        if uid > _MAX_UID:
            return None
    if at == len(parts) or parts[at] == "system":
        return NOT_A_JOB
    name, depth = parts[at], at + 1
    if match := _JOB.fullmatch(name):
        place = Place("slurm", match[1], depth, uid=uid)
    elif _SLUID.fullmatch(name):
        place = Place("slurm", name, depth, uid=uid, sluid=name)
    else:
        return None
    below = parts[depth : depth + 3]
    step = _STEP.fullmatch(below[0]) if below else None
    if step is None:
        return place
    # v2 has a level between step and task: slurmstepd's own and the user's
    role = "slurmstepd" if below[1:2] == ["slurm"] else ""
    last = below[2:3] if below[1:2] == ["user"] else below[1:2]
    task = _TASK.fullmatch(last[0]) if last else None
    return replace(place, step=step[1], task=task[1] if task else "", role=role)


# ---- Kubernetes and plain containers ----------------------------------------------------------------


def _lxc(parts: list[str]) -> Place | None:
    top = parts[0]
    if top.startswith("lxc.payload.") and len(top) > len("lxc.payload."):
        return Place("container", f"lxc-{top[len('lxc.payload.') :]}", 1)
    if top in ("lxc", "lxc.payload") and len(parts) > 1 and parts[1].isprintable():
        return Place("container", f"lxc-{parts[1]}", 2)
    return None


def _pod(depth: int, uid: str, qos: str, container: str = "") -> Place:
    uid = uid.replace("_", "-")
    return Place("kubernetes", uid, depth, pod_uid=uid, qos=qos, container=container)


def _container(parts: list[str]) -> Place | NotAJob | None:
    """The deepest pod or container on the path; NotAJob for what container engines keep for themselves."""
    users = parts[0] == "user.slice"
    owner = _USER_SLICE.fullmatch(parts[1]) if users and len(parts) > 1 else None
    uid = int(owner[1]) if owner and int(owner[1]) <= _MAX_UID else None
    trusted = not users  # only root and container engines have made what is above
    inside = False  # below a "kubepods" and not yet in a pod
    known = False
    qos, above = "", ""
    place = _lxc(parts)
    for i, part in enumerate(parts):
        parent, above = above, part
        if len(part) > _NAME_MAX:
            trusted = inside = known = False
        elif trusted and _KUBE_ROOT.fullmatch(part):
            inside = known = True
            qos = "guaranteed"  # has no level of its own
        elif inside and (match := _KUBE_QOS.fullmatch(part)):
            qos = match[1]
        elif inside and (match := _KUBE_POD.fullmatch(part)):
            place = _pod(i + 1, match[2], match[1] or qos)
            inside = False
        elif trusted and (match := _KUBE_JOINED.fullmatch(part)):
            place = _pod(i + 1, match[2], match[1] or "guaranteed", match[3])
        elif match := _CONTAINER.fullmatch(part):
            if match[1].endswith("conmon"):  # the engine's monitor beside the container
                return replace(place, role="conmon") if place and place.pod_uid else place or NOT_A_JOB
            place = _within(place, match[2], i + 1, uid)
        elif _BARE_CONTAINER.fullmatch(part) and (parent in _ENGINES or (place and place.depth == i)):
            place = _within(place, part, i + 1, uid)
        elif part not in _KUBE_PARENTS and not part.endswith(".slice"):
            trusted = inside = known = False
    return place or (NOT_A_JOB if known else None)


def _within(place: Place | None, container: str, depth: int, uid: int | None) -> Place:
    if place and place.pod_uid:
        return replace(place, container=container)
    return Place("container", container, depth, container=container, uid=uid)


# ---- systemd units ------------------------------------------------------------------------------


def _unit(parts: list[str], units: UnitFilter) -> Place | NotAJob | None:
    if parts[0] == "user.slice" or parts[0].startswith("lxc.monitor"):
        return NOT_A_JOB
    if len(parts) == 1 and parts[0] in _ROOTS:
        return NOT_A_JOB
    at = next((i for i, part in enumerate(parts) if not part.endswith(".slice")), len(parts))
    if at == len(parts):
        return NOT_A_JOB
    name = parts[at]
    if len(name) > _NAME_MAX or not name.isprintable() or not _UNIT.fullmatch(name):
        return None
    return Place("unit", name, at + 1) if units.accepts(name) else NOT_A_JOB
