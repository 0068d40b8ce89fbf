"""What a hit of a probe costs on this machine, outside the program that it runs."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.tracing.probe_target import ProbeTarget

if TYPE_CHECKING:
    from expanse_ebpf.kernel.gpu_calls import GpuCalls

_CALLS = 2000  # that are measured: 2 ms where a hit takes 1 us


def trap_ns(calls: GpuCalls) -> float:
    """Nanoseconds of a hit, of the dearer kind: where the kernel must step over the first instruction.

    Raises UnavailableError where it cannot be measured, or where probes do not work.
    """
    cookie = calls.add_calibration()
    dearest = 0.0
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
                dearest = max(dearest, target.measure(_CALLS) - without)
                if calls.window.calibration_hits - before < _CALLS // 2:
                    raise UnavailableError("a probe on a function of this process's own is not hit")
            finally:
                calls.detach()
    return dearest
