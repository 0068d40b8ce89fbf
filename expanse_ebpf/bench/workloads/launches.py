"""A CUDA program that launches kernels, small ones and many, by ctypes and the driver API.

Between launches it computes, by as much as makes the wanted rate on a CPU that takes 15 ns for a step of
Python and 3 µs for a launch: the work is always the same, and the rate is what comes of it. After every 100
launches it waits for the GPU. The last line is `seconds S`: what all launches but the first 100 took; those
are beyond --steps.
"""

from __future__ import annotations

import argparse
import ctypes
import signal
import sys
import time
from typing import Any

SECONDS = 5  # without --steps, about
TOGETHER = 100  # launches, between two waits
STEP_NS, LAUNCH_NS = 15, 3000  # on a CPU of 2020
BLOCKS, THREADS = 1, 1

# Adds one to a word of memory.
PTX = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry tiny(.param .u64 memory)
{
    .reg .b64 %rd<2>;
    .reg .b32 %r<2>;
    ld.param.u64 %rd1, [memory];
    ld.global.u32 %r1, [%rd1];
    add.u32 %r1, %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
\0"""


class Driver:
    """The driver's functions; raises OSError without a library, RuntimeError for an error."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self("cuInit", 0)
        # A stand-in has neither devices nor contexts.
        if hasattr(self._library, "cuDevicePrimaryCtxRetain"):
            device, context = ctypes.c_int(), ctypes.c_void_p()
            self("cuDeviceGet", ctypes.byref(device), 0)
            self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
            self("cuCtxSetCurrent", context)

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call one of them."""
        if code := getattr(self._library, name)(*arguments):
            raise RuntimeError(f"{name} gives the CUDA error {code}")

    def function(self, name: str) -> Any:
        """One of them, for who looks at its errors."""
        return getattr(self._library, name)


def measured(driver: Driver, steps: int, pause: int) -> float:
    """Seconds that so many launches take, with `pause` steps of Python before each."""
    module, kernel, memory = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_uint64()
    driver("cuModuleLoadData", ctypes.byref(module), PTX)
    driver("cuModuleGetFunction", ctypes.byref(kernel), module, b"tiny")
    driver("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(4))
    driver("cuMemsetD32_v2", memory, 0, ctypes.c_size_t(1))
    launch = driver.function("cuLaunchKernel")
    parameters = (ctypes.c_void_p * 1)(ctypes.addressof(memory))
    shape = (kernel, BLOCKS, 1, 1, THREADS, 1, 1, 0, None, parameters, None)

    def launched(count: int) -> None:
        for number in range(1, count + 1):
            for _ in range(pause):
                pass
            if launch(*shape):
                driver("cuLaunchKernel", *shape)
            if not number % TOGETHER:
                driver("cuCtxSynchronize")
        driver("cuCtxSynchronize")

    launched(TOGETHER)
    began = time.perf_counter()
    launched(steps)
    return time.perf_counter() - began


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--library", default="libcuda.so.1", help="the driver's (default: %(default)s)")
    parser.add_argument("--rate-hz", type=int, default=10_000, help="a second, about (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=0, help=f"launches (default: those of {SECONDS} s)")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    signal.signal(signal.SIGINT, lambda number, _: sys.exit(128 + number))
    pause = max(0, 10**9 // options.rate_hz - LAUNCH_NS) // STEP_NS
    try:
        seconds = measured(Driver(options.library), options.steps or SECONDS * options.rate_hz, pause)
    except (AttributeError, OSError, RuntimeError) as error:
        sys.exit(f"launches: {error}")
    print(f"seconds {seconds:.6f}")


if __name__ == "__main__":
    main()
