"""What a hit of a probe costs on this machine, outside the program that it runs."""

from __future__ import annotations

import os
import platform
from typing import TYPE_CHECKING, NamedTuple

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.tracing.probe_target import ProbeTarget

if TYPE_CHECKING:
    from expanse_ebpf.kernel.gpu_calls import GpuCalls, Thread

_CALLS = 2000  # that are measured: 2 ms where a hit takes 1 us


class Price(NamedTuple):
    """What a hit costs, in nanoseconds, by what the kernel does about the instruction that is probed."""

    emulated: float
    stepped: float  # it is executed elsewhere, and traps once more behind it

    def traps(self, hits: int, stepped: int) -> float:
        """What so many hits cost outside the program, in nanoseconds; `stepped` of them are stepped over."""
        return stepped * self.stepped + (hits - stepped) * self.emulated

    def of(self, thread: Thread) -> float:
        """All that the thread has paid, in nanoseconds."""
        return self.traps(thread.hits, thread.stepped) + thread.program_ns


def is_stepped(code: bytes) -> bool:
    """Whether Linux must step over the instruction with which `code` begins; if in doubt, yes.

    On x86-64 it emulates pushes of registers, nops, relative jumps and calls (arch/x86/kernel/uprobes.c), on
    arm64 nothing that functions begin with.
    """
    if platform.machine() != "x86_64" or len(code) < 2:
        return True
    first, second = code[0], code[1]
    push = 0x50 <= first <= 0x57 or (first == 0x41 and 0x50 <= second <= 0x57)
    return not (push or first in (0x90, 0xE8, 0xE9, 0xEB))


def price(calls: GpuCalls) -> Price:
    """What hits cost here and now. Raises UnavailableError where probes do not work."""
    cookie = calls.add_calibration()
    costs = []
    for single_step in (False, True):
        with ProbeTarget(single_step=single_step) as target:
            without = target.measure(_CALLS)
            refused = calls.calls.attach(target.path, [(target.offset, cookie)], os.getpid())
            try:
                for reason in refused.values():
                    raise UnavailableError(
                        f"a probe on a function of this process's own is refused: {reason}"
                    )
                before = calls.window.calibration_hits
                costs.append(max(0.0, target.measure(_CALLS) - without))
                if calls.window.calibration_hits - before < _CALLS // 2:
                    raise UnavailableError("a probe on a function of this process's own is not hit")
            finally:
                calls.detach()
    return Price(*costs)
