"""A stand-in for NVIDIA's libnvidia-ml.so.1 and its script: what NVML is to answer, call by call.

    gpus = StandIn(tmp_path, devices=2)
    gpus.set(0, utilization=70, power_mw=None)   # None: NVML does not support it
    gpus.fail("nvmlDeviceGetMemoryInfo", 15, device=1)
    ... a process loads gpus.library ...
    assert gpus.calls()["nvmlDeviceGetMemoryInfo_v2"] == 2

README.md says what there is to set. A device is an index, or (index, instance) for one of its MIG instances.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.stand_ins.build import SONAME, VARIANTS, build
from tests.stand_ins.h100 import H100, INSTANCE, PROFILES, WORKING, WORKING_GPM, Fault, Value

ALL_LINKS = 0xFFFFFFFF  # the scope of a field of NVLink that means the sum of all links
XID = 8  # nvmlEventTypeXidCriticalError
_COUNT = struct.Struct("=56sQ")  # as in nvml_script.c

Device = int | tuple[int, int]


def uuid(number: int) -> str:
    """That of a stand-in's GPU, by its index; GPUs differ in what `top` shows of it."""
    return f"GPU-{number:08d}-0000-0000-0000-{number:012d}"


def mig_uuid(number: int, instance: int) -> str:
    """That of a MIG instance."""
    return f"MIG-{number:04d}{instance:04d}-0000-0000-{instance:04d}-{number:012d}"


def _subject(device: Device) -> str:
    return str(device) if isinstance(device, int) else "{}/{}".format(*device)


class StandIn:
    """The library and its script in `folder`, at first a node of idle H100s.

    `minors` gives each GPU the number of its device file, `installed=False` leaves the library away.
    """

    def __init__(
        self,
        folder: Path,
        devices: int = 8,
        variant: str = "v3",
        *,
        minors: Sequence[int] | None = None,
        installed: bool = True,
    ) -> None:
        self.folder = folder
        self.library = folder / SONAME
        folder.mkdir(parents=True, exist_ok=True)
        self._statements: dict[tuple[str, str], str] = {}
        self._events = 0
        self._batches = 0
        with self.batch():
            self.system(
                devices=devices,
                driver_version="535.261.03",
                nvml_version="12.535.261.03",
                cuda_version=12020,
            )
            for device in range(devices):
                self.set(
                    device,
                    uuid=uuid(device),
                    serial=f"16{device:011d}",
                    minor=minors[device] if minors else device,
                    pci_bus_id=f"{device // 16:08X}:{0x18 + 8 * (device % 16):02X}:00.0",
                    **H100,
                )
        if installed:
            self.install(variant)

    def install(self, variant: str = "v3") -> None:
        """Put the library there, or another one in its place; who has loaded the old one keeps that."""
        self.remove()
        (self.folder / "calls").unlink(missing_ok=True)  # another variant has other functions
        new = self.folder / f"{SONAME}.new"
        shutil.copy(build(variant), new)
        new.replace(self.library)

    def remove(self) -> None:
        """Take the library away."""
        self.library.unlink(missing_ok=True)

    # ---- writing the script

    @contextlib.contextmanager
    def batch(self) -> Iterator[None]:
        """Many changes that the library sees at once."""
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            self._write()

    def _write(self) -> None:
        if self._batches:
            return
        lines = [f"{subject} {name} {value}\n" for (subject, name), value in self._statements.items()]
        new = self.folder / "script.new"
        new.write_text("".join(lines))
        # Its time tells the library that this is another file. The kernel's own is too coarse for that.
        os.utime(new, ns=(0, time.time_ns()))
        new.replace(self.folder / "script")

    def say(self, subject: str, name: str, value: Value | None) -> None:
        """One statement of the script as README.md has it; None takes it back."""
        if value is None:
            self._statements.pop((subject, name), None)
        else:
            self._statements[subject, name] = str(value)
        self._write()

    # ---- what is there

    def system(self, **attributes: Value | None) -> None:
        """Of the node: devices, driver_version, nvml_version, cuda_version. No `devices`: no driver."""
        with self.batch():
            for name, value in attributes.items():
                self.say("system", name, value)

    def set(self, device: Device, **attributes: Value | None) -> None:
        """Attributes of a GPU or instance; None takes one away, so that NVML does not support it."""
        with self.batch():
            for name, value in attributes.items():
                self.say(_subject(device), name, value)

    def mig(self, device: int, instances: Sequence[Mapping[str, Value] | None]) -> None:
        """Cut a GPU into instances, by their attributes; {} is a 1g.10gb, None a gap. No list, no MIG."""
        with self.batch():
            for key in [key for key in self._statements if key[0].startswith(f"{device}/")]:
                del self._statements[key]
            self.set(device, mig_mode=1 if instances else 0)
            for number, instance in enumerate(instances):
                if instance is not None:
                    profile = PROFILES[int(str(instance.get("gpu_slices", 1)))]
                    own: dict[str, Value] = {"name": f"{H100['name']} MIG {profile}"}
                    own["gpu_instance"] = 7 + number
                    own["uuid"] = mig_uuid(device, number)
                    self.set((device, number), **(INSTANCE | own | dict(instance)))

    def field(self, device: Device, field_id: int, value: Value | None, scope: int = 0) -> None:
        """What nvmlDeviceGetFieldValues gives: unsigned long long, or "TYPE VALUE" such as "double 1.5"."""
        self.say(_subject(device), f"field.{field_id}.{scope}", value)

    def samples(
        self, device: Device, samples: Iterable[tuple[int, int]] | Fault, kind: str = "utilization"
    ) -> None:
        """NVML's buffer: (time in us, percent) in the order given."""
        self.say(_subject(device), f"samples.{kind}", _list(samples))

    def process_samples(self, device: Device, samples: Iterable[tuple[int, int, int, int]] | Fault) -> None:
        """Per-process utilisation: (time in us, pid, SM percent, memory percent)."""
        whole = samples if isinstance(samples, Fault) else [(*sample, 0, 0) for sample in samples]
        self.say(_subject(device), "process_samples", _list(whole))

    def processes(
        self, device: Device, processes: Iterable[tuple[int, int | None]] | Fault, kind: str = "compute"
    ) -> None:
        """A list of compute, graphics or mps: (pid, bytes), None where NVML does not know the memory."""
        self.say(_subject(device), f"processes.{kind}", _list(processes))

    def event(
        self, device: int, xid: int, *, kind: int = XID, instance: tuple[int, int] | None = None
    ) -> None:
        """Something happens now. Event sets that this GPU is registered with tell of it once."""
        self._events += 1
        where = " {} {}".format(*instance) if instance else ""
        self.say(str(device), f"event.{self._events}", f"{kind} {xid}{where}")

    def gpm(self, device: Device, metrics: Mapping[int, Value | None]) -> None:
        """What GPM gives for metric ids; Fault(code) is the error of one of them, None takes it away."""
        with self.batch():
            for metric, value in metrics.items():
                self.say(_subject(device), f"gpm.{metric}", value)

    def auto(self, device: Device, **attributes: Value) -> None:
        """Let a GPU work: a sample of `utilization` each 100 ms; NAME grows by NAME_rate a second.

        The energy grows by the power.
        """
        now = time.time_ns() // 1000
        with self.batch():
            for name in ("samples.utilization", "samples.memory_utilization"):
                self.say(_subject(device), name, None)
            rate = attributes.get("power_mw", self._statements.get((_subject(device), "power_mw"), 0))
            self.set(device, auto=now, **({"energy_mj_rate": rate} | attributes))

    # ---- what goes wrong

    def fail(self, function: str, code: int, device: Device | None = None) -> None:
        """An error for a function ("*": all), of one GPU or everywhere; without _vN for all versions."""
        self._order("fail", function, device, code)

    def heal(self, function: str | None = None, device: Device | None = None) -> None:
        """Take back what `fail`, `delay` and `crash` said: all, or that of a function, a GPU, or both."""
        self._take_back(("fail", "delay", "crash"), function, device)

    def hang(self, function: str, device: Device | None = None) -> None:
        """Keep callers until `release`, 120 s at most. `calls` counts a call before it hangs."""
        self._order("hang", function, device, 1)

    def release(self, function: str | None = None, device: Device | None = None) -> None:
        """Let those go that hang, like `heal`."""
        self._take_back(("hang",), function, device)

    def delay(self, function: str, milliseconds: int, device: Device | None = None) -> None:
        """Let a function take its time; 0 for none."""
        self._order("delay", function, device, milliseconds or None)

    def crash(self, function: str, device: Device | None = None) -> None:
        """Let a call end its process by a segmentation fault, until `heal`."""
        self._order("crash", function, device, 1)

    def _take_back(self, verbs: tuple[str, ...], function: str | None, device: Device | None) -> None:
        with self.batch():
            for subject, name in list(self._statements):
                verb, _, of = name.partition(".")
                if (
                    verb in verbs
                    and function in (None, of)
                    and (device is None or subject == _subject(device))
                ):
                    del self._statements[subject, name]

    def _order(self, verb: str, function: str, device: Device | None, value: int | None) -> None:
        self.say("*" if device is None else _subject(device), f"{verb}.{function}", value)

    # ---- what was called

    def calls(self) -> dict[str, int]:
        """How often each function was called by now, in all processes; without those that were not."""
        counted: dict[str, int] = {}
        with contextlib.suppress(FileNotFoundError), (self.folder / "calls").open("rb") as file:
            for name, count in _COUNT.iter_unpack(file.read()):
                if count:
                    counted[name.rstrip(b"\0").decode()] = count
        return counted

    def reset_calls(self) -> None:
        """Begin to count anew."""
        with contextlib.suppress(FileNotFoundError), (self.folder / "calls").open("r+b") as file:
            counts = mmap.mmap(file.fileno(), 0)
            for offset in range(_COUNT.size - 8, len(counts), _COUNT.size):
                counts[offset : offset + 8] = bytes(8)
            counts.close()

    def wait_for_call(self, function: str, count: int = 1, timeout_s: float = 20) -> None:
        """Until a function was called `count` times since `reset_calls`, or hangs in the last of them."""
        deadline = time.monotonic() + timeout_s
        while self.calls().get(function, 0) < count:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{function} was not called {count} times: {self.calls()}")
            time.sleep(0.005)


def _list(items: Iterable[tuple[int | None, ...]] | Fault) -> Value:
    if isinstance(items, Fault):
        return items
    return " ".join(":".join("-" if part is None else str(part) for part in item) for item in items)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Make a folder with a library whose GPUs work, and print its path."
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--variant", choices=VARIANTS, default="v3")
    options = parser.parse_args()
    gpus = StandIn(options.folder, devices=options.devices, variant=options.variant)
    with gpus.batch():
        for device in range(options.devices):
            gpus.auto(device, **WORKING)
            gpus.gpm(
                device,
                WORKING_GPM,
            )
    print(gpus.library)


if __name__ == "__main__":
    main()
