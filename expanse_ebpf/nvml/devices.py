"""All GPUs of this node, from one tick to the next: the worker's lines in, the report's samples out.

A GPU that was seen once stays in the reports, whatever becomes of it; that it was lost is told once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.decode import (
    MAX_INSTANCES,
    Counters,
    busy_by_pid,
    error_code,
    fill,
    mapping,
    number,
    objects,
)
from expanse_ebpf.nvml.names import has_index_alone, identifier
from expanse_ebpf.wire.collector_pb2 import GpuEvent, GpuSample, NvmlStatus

_MOST = 512  # GPUs and instances: 64 GPUs of 7 instances each
_LAST = 1 << 20  # in the order of GPUs, for one without an index
_MOST_XIDS = 64  # codes of one device
_MOST_EVENTS = 256  # in one tick
# What a GPU is known by while NVML says nothing about it.
_IDENTITY = (
    *("name", "index", "minor", "pci_bus_id", "serial", "mig_enabled"),
    *("gpu_instance", "compute_instance", "mig_profile"),
)


class _Known:
    """One GPU or MIG instance that was seen."""

    __slots__ = ("counters", "identity", "line", "lost")

    def __init__(self, uuid: str, parent: str) -> None:
        self.identity = GpuSample(uuid=uuid, parent_uuid=parent)
        self.counters = Counters()
        self.line: Mapping[str, Any] | None = None  # of this tick
        self.lost = 0  # NVML's error since it was lost; 0: it is there

    def sample(self) -> GpuSample:
        """Its sample of this tick, from its line."""
        sample = GpuSample(uuid=self.identity.uuid, parent_uuid=self.identity.parent_uuid, state="ok")
        assert self.line is not None
        sample.time_ns = number(self.line.get("time_ns")) or 0
        fill(sample, self.line)
        self.counters.fill(sample, self.line)
        for field, value in sample.ListFields():
            if field.name in _IDENTITY:
                setattr(self.identity, field.name, value)
        return sample

    def silent(self, state: str, reason: str) -> GpuSample:
        """Its sample of a tick without figures."""
        sample = GpuSample()
        sample.CopyFrom(self.identity)
        sample.state = state
        sample.unavailable["all"] = reason
        for xid, count in self.counters.xids.items():
            sample.xids[xid] = count
        return sample


class Devices:
    """Call take() for each line of a tick, then report()."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._events: list[GpuEvent] = []
        self._left_out: set[str] = set()  # GPUs of which this tick has instances for which there is no room

    def take(self, line: Mapping[str, Any], now_ns: int) -> None:
        """A line of the worker; `now_ns` by the wall clock."""
        event = mapping(line.get("event"))
        if identifier(event.get("uuid")):
            self._xid(event, now_ns)
        device = mapping(line.get("device"))
        uuid = identifier(device.get("uuid"))
        if uuid:
            instances = objects(device.get("instances"))[:MAX_INSTANCES]
            left, own = _by_instance(objects(device.get("processes")), instances)
            # Without it nobody asked: that is not the same as none being busy.
            use = {"by_process": busy_by_pid(device)} if "by_process" in device else {}
            self._take(uuid, "", {**device, "processes": left, **use})
            # Whoever reads them expects those of this very tick.
            for instance, processes in zip(instances, own, strict=True):
                missing = {**mapping(instance.get("missing"))}
                if "processes" in mapping(device.get("missing")):
                    missing["processes"] = mapping(device["missing"])["processes"]
                of_the_gpu = {
                    "time_ns": device.get("time_ns"),
                    "missing": missing,
                    "processes": processes,
                    "process_count": device.get("process_count"),
                }
                name = identifier(instance.get("uuid"))
                if name and name != uuid:
                    self._take(name, uuid, {"values": {}, **instance, **of_the_gpu})

    def _take(self, uuid: str, parent: str, line: Mapping[str, Any]) -> None:
        known = self._known.get(uuid)
        if known is None:
            if len(self._known) >= _MOST:
                self._left_out.add(parent)
                return
            known = self._known[uuid] = _Known(uuid, parent)
        known.line = line
        known.counters.add(line)

    def _xid(self, event: Mapping[str, Any], now_ns: int) -> None:
        uuid, xid = event["uuid"], number(event.get("xid"), (0, 1 << 31))
        count = number(event.get("count", 1), (1, 1 << 32))
        if xid is None or count is None:
            return
        if not any(one.kind == "xid" and (one.uuid, one.xid) == (uuid, xid) for one in self._events):
            self._event(GpuEvent(time_ns=now_ns, uuid=uuid, kind="xid", xid=xid))
        known = self._known.get(uuid)
        if known is not None and (xid in known.counters.xids or len(known.counters.xids) < _MOST_XIDS):
            known.counters.xids[xid] = known.counters.xids.get(xid, 0) + count

    def _event(self, event: GpuEvent) -> None:
        if len(self._events) < _MOST_EVENTS:
            self._events.append(event)

    def line(self, uuid: str) -> Mapping[str, Any]:
        """What the worker said of a device in this tick; empty when it said nothing."""
        known = self._known.get(uuid)
        return known.line if known is not None and known.line is not None else {}

    def report(
        self, status: NvmlStatus, listed: frozenset[str] | None, absent: Mapping[str, int], now_ns: int
    ) -> tuple[list[GpuSample], list[GpuEvent]]:
        """The samples and events of this tick, by index, each GPU before its instances.

        `listed` and `absent` are the client's.
        """
        samples = []
        for uuid, known in list(self._known.items()):
            line = known.line
            if known.identity.parent_uuid:
                parent = self.line(known.identity.parent_uuid)
                if line is None and "values" in parent:  # the GPU was divided anew
                    del self._known[uuid]
                    continue
            lost = self._lost(uuid, known, listed, absent)
            if lost and not known.lost and not known.identity.parent_uuid:
                self._event(GpuEvent(time_ns=now_ns, uuid=uuid, kind="lost"))
            elif known.lost and line is not None and "values" in line:
                self._event(GpuEvent(time_ns=now_ns, uuid=uuid, kind="back"))
                known.lost = 0
            known.lost = lost or known.lost
            if known.lost:
                samples.append(known.silent("lost", reasons.sentence(known.lost)))
            elif line is None:
                samples.append(known.silent("silent", _why_silent(uuid, known, status, listed, absent)))
            elif "values" not in line:
                samples.append(known.silent("silent", reasons.sentence(error_code(line.get("failed")))))
            else:
                samples.append(known.sample())
                if uuid in self._left_out:
                    samples[-1].unavailable["instances"] = reasons.sentence(reasons.TOO_MANY)
        order = {s.uuid: s.index if s.HasField("index") else _LAST for s in samples if not s.parent_uuid}
        samples.sort(
            key=lambda s: (
                *(order.get(s.parent_uuid or s.uuid, _LAST), s.parent_uuid or s.uuid, bool(s.parent_uuid)),
                *(s.gpu_instance, s.compute_instance, s.uuid),
            )
        )
        events, self._events = self._events, []
        return samples, events

    def _lost(
        self, uuid: str, known: _Known, listed: frozenset[str] | None, absent: Mapping[str, int]
    ) -> int:
        """NVML's error when it says in this tick that the device is not there; 0: it does not say so."""
        if known.line is not None:
            return error_code(known.line["lost"]) if "lost" in known.line else 0
        if known.identity.parent_uuid:
            parent = self._known.get(known.identity.parent_uuid)
            return parent.lost if parent is not None else 0
        if listed is None or uuid in listed:
            return 0
        # It gives the device no handle any more: it says why, or does not count it at all.
        codes = _without_handle(absent)
        if codes and not codes <= {reasons.LOST, reasons.RESET_REQUIRED}:
            return 0
        return codes.pop() if len(codes) == 1 else reasons.LOST

    def end_tick(self) -> None:
        """Forget the lines of this tick."""
        for known in self._known.values():
            known.line = None
        self._left_out.clear()


def _without_handle(absent: Mapping[str, int]) -> set[int]:
    """NVML's errors for devices that it gives no handle of."""
    return {code for name, code in absent.items() if has_index_alone(name)} - {reasons.TOO_MANY}


def _why_silent(
    uuid: str,
    known: _Known,
    status: NvmlStatus,
    listed: frozenset[str] | None,
    absent: Mapping[str, int],
) -> str:
    device = known.identity.parent_uuid or uuid
    if device in absent:  # it is asked rarely
        return reasons.sentence(absent[device])
    codes = _without_handle(absent)
    if listed is not None and device not in listed and codes:
        return reasons.sentence(max(codes))
    return status.reason or "NVML has not answered in time"


def _by_instance(
    processes: list[Mapping[str, Any]], instances: list[Mapping[str, Any]]
) -> tuple[list[Mapping[str, Any]], list[list[Mapping[str, Any]]]]:
    """The processes of none of the instances, and those of each.

    NVML lists a process on its GPU, with the numbers of its GPU instance and its compute instance. One
    without the second, or with numbers of an instance that is not known, is the GPU's unless only one fits.
    """
    left: list[Mapping[str, Any]] = []
    own: list[list[Mapping[str, Any]]] = [[] for _ in instances]
    for process in processes:
        gpu, compute = process.get("gpu_instance"), process.get("compute_instance")
        fits = [
            place
            for place, instance in enumerate(instances)
            if gpu is not None
            and instance.get("gpu_instance") == gpu
            and compute in (None, instance.get("compute_instance"))
        ]
        (own[fits[0]] if len(fits) == 1 else left).append(process)
    return left, own
