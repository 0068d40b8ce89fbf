"""From what a cgroup may open to GPUs: device numbers, pure rules. Which cgroups: device_cgroup.py.

- A GPU is allowed when /dev/nvidiaN may be opened for reading and writing.
- A MIG instance is allowed when its GPU's node and the capabilities of its GPU instance and its compute
  instance (/dev/nvidia-caps/nvidia-capN) are. Its GPU itself is allowed when all its instances are.
- Where everything is allowed, this node's devices and others that it has not got, nothing is said about
  who holds what: the answer is None and not "all".
- A GPU whose minor number is not known is in no answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.gpu.open_files import GPU_MAJOR, MigMinors
from expanse_ebpf.wire.collector_pb2 import GpuSample

# A node that no GPU has: the driver numbers them from 0 to 247; 254 and 255 are nodes of its own.
_ABSENT_NODE = 253
_MAX_RULES = 4096


class Limits(Protocol):
    """What decides about a cgroup's devices."""

    def allows(self, major: int, minor: int) -> bool:
        """Whether this character device may be opened for reading and writing; raises UnavailableError."""


# ---- v1 ------------------------------------------------------------------------------------------


class Rule(NamedTuple):
    """A line of devices.list; a number that is None stands for all."""

    kind: str  # a | b | c
    major: int | None
    minor: int | None
    access: str  # of "rwm"


def parse_devices_list(text: str) -> list[Rule]:
    """The rules in a v1 group's devices.list; lines of another form and those beyond 4096 are left out."""
    rules: list[Rule] = []
    for line in text.split("\n"):
        words = line.split(" ")
        if len(words) != 3 or words[0] not in ("a", "b", "c") or len(rules) >= _MAX_RULES:
            continue
        major, colon, minor = words[1].partition(":")
        if colon and all(part == "*" or _is_number(part) for part in (major, minor)):
            rules.append(Rule(words[0], _number(major), _number(minor), words[2]))
    return rules


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10


def _number(text: str) -> int | None:
    return None if text == "*" else int(text)


class DevicesList:
    """The limits of a v1 group.

    The list holds what is allowed. While a group allows by default, the kernel prints `a *:* rwm` and
    none of the exceptions (devcgroup_seq_show): then it says nothing, although a device may be denied.
    """

    def __init__(self, rules: Iterable[Rule]) -> None:
        # One rule has to grant all of the access (match_exception); block devices are not asked about.
        self._granted = {
            (r.major, r.minor) for r in rules if r.kind != "b" and "r" in r.access and "w" in r.access
        }

    def allows(self, major: int, minor: int) -> bool:
        """See Limits."""
        granting = ((major, minor), (major, None), (None, minor), (None, None))
        return not self._granted.isdisjoint(granting)


# ---- GPUs and their device numbers ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The device numbers of MIG capabilities."""

    major: int | None = None
    minors: Mapping[tuple[int, int | None, int | None], int] = field(
        default_factory=dict
    )  # by GPU, instances

    @classmethod
    def of(cls, majors: Mapping[str, int], mig_minors: MigMinors) -> Capabilities:
        """From what read_majors() and read_mig_minors() have found, which may be nothing."""
        minors = {place: minor for minor, place in mig_minors.items() if place[1] is not None}
        return cls(majors.get("nvidia-caps"), minors)


class _Instance(NamedTuple):
    uuid: str
    minor: int  # of its GPU
    capabilities: tuple[int | None, int | None]  # minors; None: not known


class DeviceNumbers:
    """The GPUs and MIG instances of the node, as far as device numbers tell them."""

    def __init__(self, samples: Iterable[GpuSample], capabilities: Capabilities) -> None:
        self._major = capabilities.major
        self._absent_capability = max(capabilities.minors.values(), default=0) + 1
        self._instances: list[_Instance] = []
        self._parts: dict[str, set[str]] = {}  # GPU to its instances
        gpus: dict[str, int] = {}
        for sample in samples:
            if sample.parent_uuid:
                self._parts.setdefault(sample.parent_uuid, set()).add(sample.uuid)
            if not sample.HasField("minor"):
                continue
            if sample.parent_uuid:
                gpu, compute = (sample.minor, sample.gpu_instance), sample.compute_instance
                pair = capabilities.minors.get((*gpu, None)), capabilities.minors.get((*gpu, compute))
                self._instances.append(_Instance(sample.uuid, sample.minor, pair))
            else:
                gpus[sample.uuid] = sample.minor
        self._undivided = {uuid: minor for uuid, minor in gpus.items() if uuid not in self._parts}
        self._nodes = {*gpus.values(), *(i.minor for i in self._instances)}

    def allowed(self, limits: Limits) -> frozenset[str] | None:
        """The GPUs without instances, and the instances, that `limits` allow; None: they say nothing.

        Raises UnavailableError when they do not tell.
        """
        nodes = {minor for minor in self._nodes if limits.allows(GPU_MAJOR, minor)}
        every_node = nodes == self._nodes and limits.allows(GPU_MAJOR, _ABSENT_NODE)
        reachable = [i for i in self._instances if i.minor in nodes]
        # All instances and not the reachable ones: SLURM denies those of others and allows what is left.
        every_capability = not reachable or (
            all(self._capable(limits, i.capabilities) for i in self._instances)
            and self._capable(limits, (self._absent_capability,))
        )
        if every_node and every_capability:
            return None
        if every_node and self._undivided:
            raise UnavailableError("its devices are limited for MIG instances and not for GPUs")
        if every_capability and len({i.minor for i in reachable}) < len(reachable):
            raise UnavailableError("its devices are limited for GPUs and not for MIG instances")
        return frozenset(
            {uuid for uuid, minor in self._undivided.items() if minor in nodes}
            | {i.uuid for i in reachable if self._capable(limits, i.capabilities)}
        )

    def with_whole(self, allowed: frozenset[str]) -> frozenset[str]:
        """`allowed` and the GPUs of which all instances are in it."""
        return allowed | {gpu for gpu, parts in self._parts.items() if parts <= allowed}

    def _capable(self, limits: Limits, minors: tuple[int | None, ...]) -> bool:
        major = self._major
        if major is None or None in minors:
            raise UnavailableError("the device numbers of MIG instances are not known")
        return all(minor is not None and limits.allows(major, minor) for minor in minors)
