"""A process that samples a job's Python stacks as the agent does; bench.python_stacks measures it.

    python -m bench.python_stacks.driver CGROUP RATE_HZ WAITS_HZ

Each line on its input is answered by one of JSON: "on" and "off" load and unload the sampler, "figures"
says what has been seen since, and what it took.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from pathlib import Path

from expanse_ebpf.jobs.hierarchies import numbers
from expanse_ebpf.kernel.lifecycle import Lifecycle
from expanse_ebpf.python_stacks.sampler import Sampler

DRAIN_S = 1.0


def watch(group: Path) -> tuple[Lifecycle, int]:
    """The accounting slots, and that of `group`."""
    number = next(number for number, name in numbers().items() if name == "unified")
    lifecycle = Lifecycle("unified", number, lambda _: None)
    slot = lifecycle.take()
    lifecycle.assign(group.stat().st_ino, slot)
    return lifecycle, slot


class Driver:
    """The sampler, while there is one, and what it has seen."""

    def __init__(self, lifecycle: Lifecycle, slot: int, rate_hz: int, waits_hz: int) -> None:
        self._lifecycle = lifecycle
        self._slot = slot
        self._rate_hz = rate_hz
        self._waits_hz = waits_hz
        self._sampler: Sampler | None = None
        self._next_visit = self._next_drain = 0.0
        self.seen: dict[str, int] = {}

    def on(self) -> None:
        self._sampler = Sampler(rate_hz=self._rate_hz, waits_hz=self._waits_hz, lifecycle=self._lifecycle)
        self._sampler.select_slots(False, {self._slot: True})
        self._next_visit = self._next_drain = time.monotonic()
        self.seen = {}

    def off(self) -> None:
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

    @property
    def waits_for(self) -> list[int]:
        """Descriptors."""
        return [0, self._sampler.fd] if self._sampler else [0]

    @property
    def timeout_s(self) -> float | None:
        if self._sampler is None:
            return None
        return max(0.0, min(self._next_visit, self._next_drain) - time.monotonic())

    def turn(self, readable: list[int]) -> None:
        """What the agent's loop does for its source "python"."""
        sampler, now = self._sampler, time.monotonic()
        if sampler is None:
            return
        if sampler.fd in readable:
            sampler.consume()
        if now >= self._next_visit:
            sampler.visit()
            self._next_visit += 1 / self._waits_hz
        if now >= self._next_drain:
            for count in sampler.drain():
                kind = "visits" if count.stack.waiting else "samples"
                key = f"{kind} {count.stack.unresolved or 'resolved'}"
                self.seen[key] = self.seen.get(key, 0) + count.samples
            self._next_drain += DRAIN_S

    def figures(self) -> dict[str, object]:
        programs = self._sampler.programs if self._sampler else {}
        return {
            "programs": {name: program.statistics() for name, program in programs.items()},
            "seen": self.seen,
            "unavailable": self._sampler.unavailable if self._sampler else {},
        }


def main() -> None:
    lifecycle, slot = watch(Path(sys.argv[1]))
    driver = Driver(lifecycle, slot, int(sys.argv[2]), int(sys.argv[3]))
    try:
        while True:
            readable, _, _ = select.select(driver.waits_for, [], [], driver.timeout_s)
            driver.turn(readable)
            if 0 not in readable:
                continue
            command = os.read(0, 100).decode().strip()
            if not command:
                return
            if command == "on":
                driver.on()
            elif command == "off":
                driver.off()
            print(json.dumps(driver.figures()), flush=True)
    finally:
        driver.off()
        lifecycle.close()


if __name__ == "__main__":
    main()
