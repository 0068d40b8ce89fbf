"""What the worker reads of one GPU: figures by the names of GpuSample, or why each is missing.

As few calls as possible, since each goes to the driver: one call for all that nvmlDeviceGetFieldValues
has, single ones for the rest, and what changes rarely only now and then.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pynvml

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.mig import Instances
from expanse_ebpf.nvml.process_list import ProcessList
from expanse_ebpf.nvml.process_lists import ProcessLists, shorten
from expanse_ebpf.nvml.profile import Profile
from expanse_ebpf.nvml.readings import UNSUPPORTED, Readings, value_of
from expanse_ebpf.nvml.sample_buffer import SampleBuffer

SELDOM_S = 30.0  # how often what changes rarely is read
_ALL_LINKS = 0xFFFFFFFF
_KIB = 1024

# Field ids of nvml.h to (name of the figure, factor to its unit). A name with a dot is an entry of a map.
_FIELDS: dict[tuple[int, int], tuple[str, int]] = {
    (83, 0): ("energy_mj", 1),
    (186, 0): ("power_mw", 1),
    (82, 0): ("memory_temperature_c", 1),
    (74, 0): ("throttled_ns.power", 1),
    (75, 0): ("throttled_ns.thermal", 1),
    (76, 0): ("throttled_ns.sync_boost", 1),
    (77, 0): ("throttled_ns.board_limit", 1),
    (79, 0): ("throttled_ns.reliability", 1),
    (138, _ALL_LINKS): ("nvlink_sent_bytes", _KIB),
    (139, _ALL_LINKS): ("nvlink_received_bytes", _KIB),
    (197, 0): ("pcie_sent_bytes", 1),
    (198, 0): ("pcie_received_bytes", 1),
}
_SELDOM_FIELDS: dict[tuple[int, int], tuple[str, int]] = {
    (1, 0): ("ecc_enabled", 1),
    (3, 0): ("ecc_corrected", 1),
    (4, 0): ("ecc_uncorrected", 1),
    (5, 0): ("ecc_corrected_lifetime", 1),
    (6, 0): ("ecc_uncorrected_lifetime", 1),
    (142, 0): ("remapped_rows_corrected", 1),
    (143, 0): ("remapped_rows_uncorrected", 1),
    (144, 0): ("remapping_pending", 1),
    (145, 0): ("remapping_failed", 1),
    (91, 0): ("nvlinks", 1),
    (94, 0): ("pcie_replays", 1),
}


class Device:
    """One GPU and its MIG instances.

    `seen_us`: stamp of the newest sample of its use that was ever taken, 0 for none.
    """

    def __init__(
        self, handle: Any, uuid: str, lists: dict[str, ProcessList], seen_us: int, *, profiler: bool
    ) -> None:
        self.uuid = uuid
        self.handle = handle
        self._processes = ProcessLists(handle, lists)
        self._samples = SampleBuffer(handle, pynvml.NVML_GPU_UTILIZATION_SAMPLES, seen_us)
        self._profile = Profile(handle) if profiler else None
        self._instances = Instances(handle, profiler=profiler)
        self._unsupported: dict[str, int] = {}  # figures that this GPU has not got
        self._seldom = Readings()
        self._seldom_due = 0.0

    @property
    def seen_us(self) -> int:
        """Stamp of the newest sample of its use that was taken."""
        return self._samples.seen_us

    def read(self, *, by_process: bool, room: int) -> dict[str, Any]:
        """One round, in the form that decode.py takes; raises GpuLostError when the GPU has gone.

        `by_process`: also how busy each process kept it. `room`: bytes for each of the lists of processes.
        """
        now = time.monotonic()
        seldom = now >= self._seldom_due
        if seldom:
            self._unsupported.clear()  # MIG may have been turned on or off
            self._samples.ask_again()
        found = Readings()
        self._fields(_FIELDS, found)
        self._single(found)
        failed = _failure(found)
        if failed:
            return {"uuid": self.uuid, "failed": failed}
        if seldom:
            self._read_seldom()
            self._seldom_due = now + SELDOM_S
        found.values.update(self._seldom.values)
        found.missing.update(self._seldom.missing)
        result: dict[str, Any] = {"uuid": self.uuid, "values": found.values, "missing": found.missing}
        taken = self._samples.take(found, "busy_ns")
        result["added"] = (
            {} if taken is None else {"busy_ns": taken.busy_ns, "measured_ns": taken.measured_ns}
        )
        result["stamp"] = self._samples.seen_us
        processes, result["rejected"] = self._processes.read(found, seldom)
        result["processes"] = shorten(processes, room)
        if len(processes) > len(result["processes"]):
            result["process_count"] = len(processes)
        if by_process:
            result["by_process"] = self._processes.utilization(found, room)
        if self._profile is not None:
            result["profile"] = self._profile.read(found)
        if found.values.get("mig_enabled"):
            result["instances"] = self._instances.read(found, seldom)
        return result

    def empty_buffers(self) -> None:
        """Take the samples that would be lost if nobody asked for long."""
        self._samples.empty()
        if self._profile is not None:
            self._profile.empty_buffer()

    def close(self) -> None:
        """Give back what NVML holds for it."""
        if self._profile is not None:
            self._profile.close()
        self._instances.close()

    # ---- single figures -------------------------------------------------------------------------

    def _try(self, found: Readings, names: tuple[str, ...], function: Callable[[], tuple[Any, ...]]) -> None:
        """The figures that `function` gives. One that is not supported is not asked for again."""
        known = self._unsupported.get(names[0])
        if known is None:
            try:
                for name, value in zip(names, function(), strict=True):
                    found.put(name, value)
                return
            except pynvml.NVMLError as error:
                known = int(error.value)
                if known in UNSUPPORTED:
                    self._unsupported[names[0]] = known
            except ValueError:  # a text that is none
                known = reasons.ABSURD
        for name in names:
            found.miss(name, known)

    def _single(self, found: Readings) -> None:
        h = self.handle
        self._try(found, ("utilization", "memory_utilization"), lambda: _utilization(h))
        self._try(
            found,
            ("memory_total_bytes", "memory_reserved_bytes", "memory_free_bytes", "memory_used_bytes"),
            lambda: _memory(h),
        )
        self._try(
            found,
            ("temperature_c",),
            lambda: (pynvml.nvmlDeviceGetTemperature(h, pynvml.NVML_TEMPERATURE_GPU),),
        )
        for name, clock in (
            ("sm_clock_mhz", pynvml.NVML_CLOCK_SM),
            ("memory_clock_mhz", pynvml.NVML_CLOCK_MEM),
        ):
            self._try(found, (name,), partial(_one, pynvml.nvmlDeviceGetClockInfo, h, clock))
        self._try(
            found, ("throttle_reasons",), lambda: (pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(h),)
        )
        # Older GPUs and drivers have these as single calls alone.
        if "power_mw" not in found.values:
            self._try(found, ("power_mw",), lambda: (pynvml.nvmlDeviceGetPowerUsage(h),))
        if "energy_mj" not in found.values:
            self._try(found, ("energy_mj",), lambda: (pynvml.nvmlDeviceGetTotalEnergyConsumption(h),))

    def _read_seldom(self) -> None:
        h = self.handle
        found = self._seldom = Readings()
        self._fields(_SELDOM_FIELDS, found)
        single: tuple[tuple[str, Callable[[], Any]], ...] = (
            ("name", lambda: pynvml.nvmlDeviceGetName(h)),
            ("serial", lambda: pynvml.nvmlDeviceGetSerial(h)),
            ("index", lambda: pynvml.nvmlDeviceGetIndex(h)),
            ("minor", lambda: pynvml.nvmlDeviceGetMinorNumber(h)),
            ("pci_bus_id", lambda: _text(pynvml.nvmlDeviceGetPciInfo(h).busId)),
            ("persistence", lambda: pynvml.nvmlDeviceGetPersistenceMode(h)),
            ("mig_enabled", lambda: pynvml.nvmlDeviceGetMigMode(h)[0]),
            ("power_limit_mw", lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(h)),
            ("sm_clock_max_mhz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_SM)),
            ("memory_clock_max_mhz", lambda: pynvml.nvmlDeviceGetMaxClockInfo(h, pynvml.NVML_CLOCK_MEM)),
            ("pcie_generation", lambda: pynvml.nvmlDeviceGetCurrPcieLinkGeneration(h)),
            ("pcie_width", lambda: pynvml.nvmlDeviceGetCurrPcieLinkWidth(h)),
        )
        for name, function in single:
            self._try(found, (name,), partial(_one, function))
        if "pcie_replays" not in found.values:
            self._try(found, ("pcie_replays",), lambda: (pynvml.nvmlDeviceGetPcieReplayCounter(h),))
        if "remapped_rows_corrected" not in found.values:
            names = ("corrected", "uncorrected")
            self._try(
                found,
                (*(f"remapped_rows_{n}" for n in names), "remapping_pending", "remapping_failed"),
                lambda: tuple(pynvml.nvmlDeviceGetRemappedRows(h)),
            )
        for kind, error in (("corrected", 0), ("uncorrected", 1)):  # nvmlMemoryErrorType_t
            for suffix, counter in (("", 0), ("_lifetime", 1)):  # nvmlEccCounterType_t
                name = f"ecc_{kind}{suffix}"
                if name not in found.values:
                    total = partial(_one, pynvml.nvmlDeviceGetTotalEccErrors, h, error, counter)
                    self._try(found, (name,), total)

    def _fields(self, fields: dict[tuple[int, int], tuple[str, int]], found: Readings) -> None:
        wanted = [key for key, (name, _) in fields.items() if f"field {name}" not in self._unsupported]
        for key in fields.keys() - set(wanted):
            name = fields[key][0]
            found.miss(name, self._unsupported[f"field {name}"])
        if not wanted:
            return
        try:
            answers = pynvml.nvmlDeviceGetFieldValues(self.handle, wanted)
        except pynvml.NVMLError as error:
            for key in wanted:
                found.miss(fields[key][0], error.value)
            return
        for key, answer in zip(wanted, answers, strict=True):
            name, factor = fields[key]
            if answer.nvmlReturn == 0:
                value = value_of(answer.value, answer.valueType)
                if value is None:
                    found.miss(name, reasons.ABSURD)
                else:
                    found.put(name, int(value) * factor)
                continue
            # Not known to an older driver, which calls that an invalid argument.
            if answer.nvmlReturn in (reasons.NOT_SUPPORTED, reasons.INVALID_ARGUMENT):
                self._unsupported[f"field {name}"] = reasons.NOT_SUPPORTED
            found.miss(name, answer.nvmlReturn)


def _failure(found: Readings) -> int:
    """NVML's error when it answered to nothing, 0 otherwise."""
    if found.values:
        return 0
    codes = Counter(code for code in found.missing.values() if code not in UNSUPPORTED)
    return codes.most_common(1)[0][0] if codes else 0


def _one(function: Callable[..., Any], *arguments: Any) -> tuple[Any]:
    return (function(*arguments),)


def _utilization(handle: Any) -> tuple[float, float]:
    rates = pynvml.nvmlDeviceGetUtilizationRates(handle)
    return rates.gpu / 100, rates.memory / 100


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value


def _memory(handle: Any) -> tuple[int, int | None, int, int]:
    """Total, reserved, free and used bytes; only the second form of the question tells what is reserved."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
    except pynvml.NVMLError as error:
        if error.value not in UNSUPPORTED:
            raise
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return memory.total, None, memory.free, memory.used
    return memory.total, memory.reserved, memory.free, memory.used
