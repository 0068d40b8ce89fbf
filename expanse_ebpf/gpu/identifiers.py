"""Every name that a GPU goes by, and the UUID that it means.

SLURM and the device cgroup count as /dev does (minor numbers), NVML and CUDA in the order of the PCI bus, and
a variable may have UUIDs, of which CUDA takes the beginning too. Inside the agent a GPU is its UUID alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from expanse_ebpf.text import clean

if TYPE_CHECKING:
    from expanse_ebpf.wire.collector_pb2 import GpuSample, JobIdentity

Numbering = Literal["minor", "index"]
_Key = TypeVar("_Key")

# SLURM's own lists. What names a GPU by number in any other variable counts as NVML does.
SLURM_VARIABLES = ("SLURM_JOB_GPUS", "SLURM_STEP_GPUS")

_MAX_NAME = 256
_NUMBER = re.compile(r"[0-9]{1,4}")
_SHARED = re.compile(r"(.+)::([0-9]{1,6})")  # NVIDIA's device plugin: one of several shares in time or by MPS
# GKE's device plugin: "nvidia0", "nvidia0/gi1", "nvidia0/vgpu1", "nvidia0/gi1/vgpu1"; the file's name too
_GKE = re.compile(r"(?:/dev/)?nvidia([0-9]{1,3})(?:/gi([0-9]{1,4}))?(?:/vgpu([0-9]{1,6}))?")
_OLD_MIG = re.compile(r"mig-(?:gpu-)?([0-9a-z-]+)/([0-9]{1,4})/([0-9]{1,4})")  # drivers before R470
_PCI = re.compile(r"(?:([0-9a-f]{1,8}):)?([0-9a-f]{2}):([0-9a-f]{2})\.([0-7])")
_CDI = re.compile(r"[0-9a-z.-]+/[0-9a-z._-]+=(.+)")  # "nvidia.com/gpu=0" of the container device interface


class Found(NamedTuple):
    """What one name means: UUIDs, several where it is a GPU instance of several compute instances."""

    uuids: tuple[str, ...]
    replica: str = ""  # which share of a GPU that several have; empty: it names no share


class Named(NamedTuple):
    """The GPUs that a list names."""

    uuids: tuple[str, ...] = ()  # each once, in the list's order
    unknown: tuple[str, ...] = ()  # names that no GPU of the node has
    replicas: tuple[tuple[str, str], ...] = ()  # (UUID, share) of names of shares
    by_index: frozenset[str] = frozenset()  # UUIDs that a number alone names, which may count from 0 anew
    otherwise: tuple[str, ...] = ()  # SLURM's list read by NVML's order, where that is another
    unclear: tuple[str, ...] = ()  # numbers of SLURM's on a node with MIG, where it counts instances too
    variable: str = ""  # where the list is from


NO_LIST = Named()


class _Device(NamedTuple):
    """What tells a device from others. Numbers that are not known are None."""

    uuid: str
    parent: str  # of a MIG instance: its GPU
    minor: int | None
    nvml_index: int | None
    pci: str
    gpu_instance: int | None
    compute_instance: int | None


def _device(sample: GpuSample) -> _Device:
    return _Device(
        sample.uuid,
        sample.parent_uuid,
        sample.minor if sample.HasField("minor") else None,
        sample.index if sample.HasField("index") else None,
        sample.pci_bus_id,
        sample.gpu_instance if sample.HasField("gpu_instance") else None,
        sample.compute_instance if sample.HasField("compute_instance") else None,
    )


class Devices:
    """The node's GPUs and MIG instances by all their names. Nothing here raises on whatever name.

    To make one takes a while; it is as good for later samples as long as same() says so.
    """

    def __init__(self, samples: Iterable[GpuSample]) -> None:
        self._made_of = tuple(map(_device, samples))
        self._devices = {device.uuid: device for device in self._made_of if device.uuid}
        gpus = [device for device in self._devices.values() if not device.parent]
        self.by_minor = _unique((d.minor, d.uuid) for d in gpus if d.minor is not None)
        self._by_index = _unique((d.nvml_index, d.uuid) for d in gpus if d.nvml_index is not None)
        self._by_pci = _unique((pci, d.uuid) for d in gpus if (pci := _pci(d.pci)))
        # Without the prefix a UUID is as good.
        self._by_uuid = _unique((name, uuid) for uuid in self._devices for name in _spellings(uuid))
        self._sorted = sorted((uuid.lower(), uuid) for uuid in self._devices)
        self._instances: dict[str, list[str]] = {}
        for device in self._devices.values():
            if device.parent:
                self._instances.setdefault(device.parent, []).append(device.uuid)

    def same(self, samples: Iterable[GpuSample]) -> bool:
        """Whether these are the same devices, with the same names and in the same order."""
        return self._made_of == tuple(map(_device, samples))

    def __iter__(self) -> Iterator[str]:
        return iter(self._devices)

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._devices

    def instances(self, uuid: str) -> Sequence[str]:
        """The MIG instances of a GPU."""
        return self._instances.get(uuid, ())

    def parent(self, uuid: str) -> str:
        """The GPU of a MIG instance; empty for a GPU."""
        device = self._devices.get(uuid)
        return device.parent if device is not None else ""

    def related(self, one: str, other: str) -> bool:
        """Whether two UUIDs are of one device, or of a GPU and an instance of it."""
        return one == other or self.parent(one) == other or self.parent(other) == one

    # ---- names ----------------------------------------------------------------------------------

    def find(self, name: str, numbering: Numbering = "index") -> Found | None:
        """What `name` means; None when no GPU here has it, or when it may be one of several."""
        name = name.strip()[:_MAX_NAME].lower()
        if cdi := _CDI.fullmatch(name):
            name = cdi[1]
        if share := _SHARED.fullmatch(name):
            found = self._find(share[1], numbering)
            return Found(found, share[2]) if found else None
        if gke := _GKE.fullmatch(name):
            uuid = self.by_minor.get(int(gke[1]), "")
            found = self._of_instance(uuid, int(gke[2])) if gke[2] else (uuid,) * bool(uuid)
            return Found(found, f"vgpu{gke[3]}" if gke[3] else "") if found else None
        found = self._find(name, numbering)
        return Found(found) if found else None

    def _find(self, name: str, numbering: Numbering) -> tuple[str, ...]:
        if _NUMBER.fullmatch(name):
            uuid = (self.by_minor if numbering == "minor" else self._by_index).get(int(name))
        elif old := _OLD_MIG.fullmatch(name):
            parent = self._by_uuid.get(old[1]) or self._begins(f"gpu-{old[1]}")
            uuid = self._by_uuid.get(name) or next(
                iter(self._of_instance(parent or "", int(old[2]), int(old[3]))), None
            )
        elif pci := _pci(name):
            uuid = self._by_pci.get(pci)
        else:
            uuid = self._by_uuid.get(name) or self._begins(name)
        return (uuid,) if uuid else ()

    def _begins(self, name: str) -> str | None:
        """The one device whose UUID begins like that."""
        if not name.startswith(("gpu-", "mig-")) or len(name) < 5:
            return None
        first = bisect_left(self._sorted, (name, ""))
        found = [uuid for lower, uuid in self._sorted[first : first + 2] if lower.startswith(name)]
        return found[0] if len(found) == 1 else None

    def _of_instance(self, gpu: str, gi: int, ci: int | None = None) -> tuple[str, ...]:
        """The MIG devices in a GPU instance of `gpu`, or in a compute instance of it."""
        return tuple(
            uuid
            for uuid in self.instances(gpu)
            if (device := self._devices[uuid]).gpu_instance == gi
            and (ci is None or device.compute_instance == ci)
        )

    # ---- lists ----------------------------------------------------------------------------------

    def named(self, names: Iterable[str], variable: str) -> Named:
        """The GPUs that `names`, the items of `variable`, mean."""
        if variable in SLURM_VARIABLES:
            return self._slurm(list(names))._replace(variable=variable)
        found = self._named(names, "index", stops=variable == "CUDA_VISIBLE_DEVICES")
        return found._replace(variable=variable)

    def of(self, identity: JobIdentity) -> tuple[Named, Named]:
        """What a job's environment names: in SLURM's own list, and in CUDA's or its container's."""
        found = self.named(identity.gpus, clean(identity.gpus_source, 64))
        return (found, NO_LIST) if found.variable in SLURM_VARIABLES else (NO_LIST, found)

    def _slurm(self, names: list[str]) -> Named:
        unclear: tuple[str, ...] = ()
        if self._instances:
            unclear = tuple(name for name in names if _NUMBER.fullmatch(name))
            names = [name for name in names if name not in unclear]
        found = self._named(names, "minor")
        by_index = self._named(names, "index")
        differs = not by_index.unknown and set(by_index.uuids) != set(found.uuids)
        return found._replace(unclear=unclear, otherwise=by_index.uuids if differs else ())

    def _named(self, names: Iterable[str], numbering: Numbering, *, stops: bool = False) -> Named:
        uuids: dict[str, None] = {}
        unknown: dict[str, None] = {}
        replicas: dict[tuple[str, str], None] = {}
        by_index: set[str] = set()
        by_name: set[str] = set()
        for name in names:
            found = self.find(name, numbering)
            if found is None:
                unknown[clean(name, 128)] = None
                if stops:
                    break
                continue
            uuids.update(dict.fromkeys(found.uuids))
            (by_index if _NUMBER.fullmatch(name.strip()) else by_name).update(found.uuids)
            replicas.update({(uuid, found.replica): None for uuid in found.uuids if found.replica})
        return Named(
            tuple(uuids),
            tuple(unknown),
            tuple(replicas),
            frozenset(by_index - by_name) if numbering == "index" else frozenset(),
        )

    # ---- device files ---------------------------------------------------------------------------

    def opened(
        self,
        minors: Collection[int],
        caps: Collection[int] = (),
        mig_minors: Mapping[int, tuple[int, int | None, int | None]] | None = None,
    ) -> frozenset[str]:
        """What can be used with the device files of these minors.

        `caps` are minors of capability devices, which `mig_minors` (see open_files.parse_mig_minors) places.
        With one for an instance it is that instance, and not the GPU.
        """
        rights: dict[int, set[tuple[int, int | None]]] = {}
        for cap in caps:
            gpu, gi, ci = (mig_minors or {}).get(cap, (-1, None, None))
            if gi is not None:
                rights.setdefault(gpu, set()).add((gi, ci))
        found: set[str] = set()
        for minor in minors:
            uuid = self.by_minor.get(minor)
            if uuid is None:
                continue
            instances: set[str] = set()
            for gi, ci in rights.get(minor, ()):
                # Without the compute instance's file the GPU instance's is of no use, unless it has only one.
                of_gi = self._of_instance(uuid, gi, ci)
                if ci is not None or len(of_gi) == 1:
                    instances.update(of_gi)
            found |= instances or {uuid}
        return frozenset(found)


def _unique(pairs: Iterable[tuple[_Key, str]]) -> dict[_Key, str]:
    """The pairs as a mapping, without the keys that two UUIDs have."""
    found: dict[_Key, str] = {}
    twice = set()
    for key, uuid in pairs:
        if found.setdefault(key, uuid) != uuid:
            twice.add(key)
    return {key: uuid for key, uuid in found.items() if key not in twice}


def _spellings(uuid: str) -> tuple[str, ...]:
    """How a UUID may be written, in small letters."""
    lower = uuid.lower()
    if lower.startswith(("gpu-", "mig-")):
        return lower, lower[4:]
    return lower, f"gpu-{lower}"


def _pci(text: str) -> tuple[int, int, int, int] | None:
    """Domain, bus, device and function of a PCI address; NVML writes domains of 8 digits, Linux of 4."""
    match = _PCI.fullmatch(text.strip().lower())
    if not match:
        return None
    return int(match[1] or "0", 16), int(match[2], 16), int(match[3], 16), int(match[4])
