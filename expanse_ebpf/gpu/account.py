"""What a job's GPUs did while it held them, added up: pure arithmetic on samples.

A GPU that is a job's alone does all it does for that job. Of any other, only what NVML tells by process is
the job's own: use and memory, not power. NVML tells no use of a MIG instance; its profile does.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from expanse_ebpf.wire.collector_pb2 import GpuHold, GpuSample, JobGpu

_BY_PROCESS = "NVML does not tell by process how busy it keeps a GPU that is not its alone"
_INSTANCE_USE = "NVML tells no use of a MIG instance without the profiler (gpu.profiler)"
_STRANGER = "it is not known of every process on a GPU that is not its alone whose it is"
_NO_USE = "NVML has not told yet how busy it is"
_SHARED_INSTANCE = "several MIG instances lie in one GPU instance, of which alone there is a profile"
_NOT_WHOLE = "a GPU, or a part of one, is not its alone, and power is measured of whole GPUs"
_NO_GPM = "needs the profiler (gpu.profiler) and a GPU that has GPM"
_NOT_ALONE = "a GPU is not its alone, and the profiler tells of whole GPUs"
_NO_THROTTLING = "NVML does not tell for how long its GPUs were throttled"
# Causes that are no lack of power, no heat and no fault: one GPU waits for another, or has nothing to do.
_NO_BRAKES = ("sync_boost", "idle", "gpu_idle")
_MOST_MW = 20_000_000  # of any GPU: a reading of the energy that has grown faster is none
_SLACK_S = 10  # for clocks that were set
_MOST = (1 << 63) - 1


class Totals(NamedTuple):
    """The counters of a device at one moment, as far as they are known."""

    busy_ns: int | None
    measured_ns: int | None
    sm_active_ns: int | None
    profiled_ns: int | None
    energy_mj: int | None
    time_ns: int  # by the wall clock
    alone: bool  # whether it worked for the job alone then

    @classmethod
    def of(cls, sample: GpuSample, *, alone: bool) -> Totals:
        """Those of a sample; the use of a MIG instance is that of its profile."""
        source = sample.profile if sample.HasField("profile") else None
        gpm = source if source is not None and source.source == "gpm" else None
        instance = bool(sample.parent_uuid)
        return cls(
            _of(gpm, "graphics_ns") if instance else _of(sample, "busy_ns"),
            _of(gpm, "measured_ns") if instance else _of(sample, "measured_ns"),
            _of(gpm, "sm_active_ns"),
            _of(gpm, "measured_ns"),
            _of(sample, "energy_mj"),
            sample.time_ns,
            alone,
        )


def _of(message: object | None, name: str) -> int | None:
    if message is None or not message.HasField(name):  # type: ignore[attr-defined]
        return None
    value: int = getattr(message, name)
    return value


class _Throttling(NamedTuple):
    """For how long a GPU's clocks had been held down at one moment."""

    by_cause: Mapping[str, int]  # nanoseconds
    time_ns: int  # by the wall clock


class Account:
    """The counters of one job."""

    __slots__ = ("_before", "_energy_mj", "_sums", "_throttled", "_throttled_ns")

    def __init__(self) -> None:
        self._throttled: dict[str, _Throttling] = {}  # of each GPU that it held in the last tick
        self._throttled_ns: int | None = None  # None: no GPU has told
        self._sums = {"busy_ns": 0, "measured_ns": 0, "sm_active_ns": 0, "profiled_ns": 0}
        self._energy_mj = 0
        self._before: dict[str, Totals] = {}  # of each GPU that it held in the last tick

    def tick(
        self,
        holds: Sequence[GpuHold],
        samples: Mapping[str, GpuSample],
        alone: Collection[str],
        own_ns: Mapping[str, int | None],
        result: JobGpu,
        missing: dict[str, str],
    ) -> None:
        """Add what the job's GPUs have done since the last tick, and write all of it into `result`.

        `samples` by UUID, those of GPUs that have answered in this tick. `alone`: UUIDs of those that work
        for this job only. `own_ns`: how long its own processes kept the others busy since then, None where
        somebody on one is not known; none where NVML does not tell. Why a figure is missing goes into
        `missing`.
        """
        self._add_throttling(holds, samples, result, missing)
        before, self._before = self._before, {}
        # With all of its instances a job has the GPU itself, whose figures are theirs too.
        whole_gpus = {hold.uuid for hold in holds}
        holds = [h for h in holds if h.uuid not in samples or samples[h.uuid].parent_uuid not in whole_gpus]
        instances: dict[tuple[str, int], int] = {}  # MIG instances in each GPU instance
        for instance in samples.values():
            if instance.parent_uuid:
                place = (instance.parent_uuid, instance.gpu_instance)
                instances[place] = instances.get(place, 0) + 1
        for hold in holds:
            sample = samples.get(hold.uuid)
            if sample is None:
                if hold.uuid in before:  # it is silent: what it did meanwhile is told when it answers again
                    self._before[hold.uuid] = before[hold.uuid]
                continue
            shared = hold.uuid not in alone or instances.get((sample.parent_uuid, sample.gpu_instance), 1) > 1
            now = self._before[hold.uuid] = Totals.of(sample, alone=not shared)
            self._why_missing(hold, sample, now, own_ns, shared, missing)
            then = before.get(hold.uuid)
            # What it did between being shared and not is of both kinds, and nobody's then.
            if then is not None and then.alone == now.alone:
                self._add(now, then, own_ns.get(hold.uuid))
        for name, total in self._sums.items():
            if name not in missing:
                setattr(result, name, total)
        answered = [samples[hold.uuid] for hold in holds if hold.uuid in samples]
        if any(sample.parent_uuid or sample.uuid not in alone for sample in answered):
            missing["energy_mj"] = missing["power_mw"] = _NOT_WHOLE
        elif holds or self._energy_mj:
            result.energy_mj = self._energy_mj
            known = [sample.power_mw for sample in answered if sample.HasField("power_mw")]
            if len(known) == len(holds):
                result.power_mw = sum(known)
        sizes = [sample.memory_total_bytes for sample in answered]
        if sizes and len(sizes) == len(holds) and all(sizes):
            result.memory_total_bytes = sum(sizes)

    def _why_missing(
        self,
        hold: GpuHold,
        sample: GpuSample,
        now: Totals,
        own_ns: Mapping[str, int | None],
        shared: bool,
        missing: dict[str, str],
    ) -> None:
        if now.sm_active_ns is None or shared:
            reason = _NO_GPM
            if now.sm_active_ns is not None:
                reason = _SHARED_INSTANCE if sample.parent_uuid else _NOT_ALONE
            missing["sm_active_ns"] = missing["profiled_ns"] = reason
        if sample.parent_uuid:
            if now.busy_ns is None or shared:
                missing["busy_ns"] = missing["measured_ns"] = (
                    _SHARED_INSTANCE if now.busy_ns is not None else _INSTANCE_USE
                )
        elif shared and own_ns.get(hold.uuid) is None:
            missing["busy_ns"] = missing["measured_ns"] = _STRANGER if hold.uuid in own_ns else _BY_PROCESS
        elif now.busy_ns is None:
            missing["busy_ns"] = missing["measured_ns"] = sample.unavailable.get("busy_ns", _NO_USE)

    def _add(self, now: Totals, then: Totals, own_ns: int | None) -> None:
        def more(name: str) -> int:
            new, old = getattr(now, name), getattr(then, name)
            # A counter that began anew: how much it lost is not known.
            return max(0, new - old) if new is not None and old is not None else 0

        if now.alone:
            for name in self._sums:
                self._grow(name, more(name))
            seconds = max(0, now.time_ns - then.time_ns) // 10**9 + _SLACK_S
            energy = more("energy_mj")
            if energy <= seconds * _MOST_MW:
                self._energy_mj = min(self._energy_mj + energy, _MOST)
        elif own_ns is not None:
            measured = more("measured_ns")
            self._grow("measured_ns", measured)
            self._grow("busy_ns", min(own_ns, measured))

    def _add_throttling(
        self,
        holds: Sequence[GpuHold],
        samples: Mapping[str, GpuSample],
        result: JobGpu,
        missing: dict[str, str],
    ) -> None:
        """The time for which its GPUs were throttled while it held them, shared ones in full.

        Causes overlap, so of each GPU and tick the longest of them counts. An instance has its GPU's clocks.
        """
        now: dict[str, _Throttling] = {}
        for hold in holds:
            uuid = samples[hold.uuid].parent_uuid or hold.uuid if hold.uuid in samples else hold.uuid
            gpu = samples.get(uuid)
            if gpu is not None and gpu.throttled_ns:
                causes = {cause: ns for cause, ns in gpu.throttled_ns.items() if cause not in _NO_BRAKES}
                now[uuid] = _Throttling(causes, gpu.time_ns)
            elif uuid in self._throttled:  # it is silent
                now[uuid] = self._throttled[uuid]
        for uuid, (by_cause, time_ns) in now.items():
            then = self._throttled.get(uuid)
            grown = 0
            if then is not None:
                grown = max((ns - then.by_cause.get(cause, ns) for cause, ns in by_cause.items()), default=0)
                most = max(0, time_ns - then.time_ns) + _SLACK_S * 10**9
                grown = grown if 0 < grown <= most else 0  # else it has begun anew, or is no true reading
            self._throttled_ns = min((self._throttled_ns or 0) + grown, _MOST)
        self._throttled = now
        if self._throttled_ns is not None:
            result.throttled_ns = self._throttled_ns
        elif any(hold.uuid in samples for hold in holds):
            missing["throttled_ns"] = _NO_THROTTLING

    def _grow(self, name: str, by: int) -> None:
        self._sums[name] = min(self._sums[name] + by, _MOST)
