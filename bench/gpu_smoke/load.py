"""Keeps one GPU busy in a known way, with nothing but the driver's libcuda.so.1: no compiler, no toolkit.

The kernels are PTX, which the driver translates for whatever GPU there is. Prints a JSON object when the
work begins, and another when it has ended.

    python -m bench.gpu_smoke.load --kind fp32 --seconds 10 --duty 0.5

KIND: fp32, fp64 and tensor keep those pipes of all SMs busy, memset writes memory. With a duty of D the GPU
works for D of each 0.2 s.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Callable

KINDS = ("fp32", "fp64", "tensor", "memset")
PERIOD_S = 0.2
BLOCKS_PER_SM, THREADS = 8, 256
MEMSET_BYTES = 1 << 30
_MULTIPROCESSORS = 16  # CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT

# Every thread works until %globaltimer, in nanoseconds, is `span` later than when it began. The result
# goes to memory in a case that never comes, so that the work is not optimised away.
_PTX = """
.version 7.0
.target sm_{arch}
.address_size 64
.visible .entry work(.param .u64 span, .param .u64 result)
{{
    .reg .pred %p<3>;
    .reg .b64 %rd<6>;
    .reg .b32 %r<8>;
    .reg .f32 %f<8>;
    .reg .f64 %d<4>;
    ld.param.u64 %rd1, [span];
    ld.param.u64 %rd4, [result];
    mov.u64 %rd2, %globaltimer;
    add.u64 %rd2, %rd2, %rd1;
    mov.f32 %f1, 0f3F800000;
    mov.f32 %f2, 0f3F800000;
    mov.f32 %f3, 0f3F800000;
    mov.f32 %f4, 0f3F800000;
    mov.f64 %d1, 0d3FF0000000000000;
    mov.b32 %r1, 0;
AGAIN:
{body}
    mov.u64 %rd3, %globaltimer;
    setp.lt.u64 %p1, %rd3, %rd2;
    @%p1 bra AGAIN;
    cvt.rn.f32.f64 %f5, %d1;
    add.f32 %f1, %f1, %f5;
    add.f32 %f1, %f1, %f2;
    add.f32 %f1, %f1, %f3;
    add.f32 %f1, %f1, %f4;
    setp.eq.f32 %p2, %f1, 0fBF800000;
    @%p2 st.global.f32 [%rd4], %f1;
    ret;
}}
"""
_BODIES = {
    # Four chains, so that the pipe need not wait for the last result.
    "fp32": "".join(f"    fma.rn.f32 %f{n}, %f{n}, %f{n}, %f{n};\n" for n in (1, 2, 3, 4)) * 32,
    "fp64": "    fma.rn.f64 %d1, %d1, %d1, %d1;\n" * 32,
    "tensor": "    mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
    "{%f1, %f2, %f3, %f4}, {%r1, %r1, %r1, %r1}, {%r1, %r1}, {%f1, %f2, %f3, %f4};\n" * 32,
}
_ARCHITECTURE = {"tensor": 80}


def ptx(kind: str) -> str:
    """The text of the kernel."""
    return _PTX.format(arch=_ARCHITECTURE.get(kind, 70), body=_BODIES[kind])


class Cuda:
    """The driver API, as far as it is used here; raises OSError where it is not, RuntimeError for errors."""

    def __init__(self, ordinal: int) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")
        self("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self("cuDeviceGet", ctypes.byref(device), ordinal)
        self("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self("cuCtxSetCurrent", context)
        raw = (ctypes.c_ubyte * 16)()
        self("cuDeviceGetUuid", raw, device)
        self.uuid = f"GPU-{uuid.UUID(bytes=bytes(raw))}"
        count = ctypes.c_int()
        self("cuDeviceGetAttribute", ctypes.byref(count), _MULTIPROCESSORS, device)
        self.multiprocessors = count.value

    def __call__(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown').decode()} (CUDA error {code})")

    def memory(self, size: int) -> ctypes.c_uint64:
        """So many bytes on the GPU."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        return address


def work(cuda: Cuda, kind: str) -> Callable[[float], None]:
    """Something that keeps the GPU busy for a number of seconds and then returns."""
    if kind == "memset":
        address = cuda.memory(MEMSET_BYTES)

        def set_memory(seconds: float) -> None:
            until = time.monotonic() + seconds
            while time.monotonic() < until:
                for _ in range(4):
                    cuda("cuMemsetD32Async", address, 1, ctypes.c_size_t(MEMSET_BYTES // 4), None)
                cuda("cuCtxSynchronize")

        return set_memory
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), ptx(kind).encode() + b"\0")
    cuda("cuModuleGetFunction", ctypes.byref(function), module, b"work")
    result = cuda.memory(4)

    def spin(seconds: float) -> None:
        span = ctypes.c_uint64(int(seconds * 1e9))
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(span), ctypes.addressof(result))
        grid = (cuda.multiprocessors * BLOCKS_PER_SM, 1, 1)
        cuda("cuLaunchKernel", function, *grid, THREADS, 1, 1, 0, None, arguments, None)
        cuda("cuCtxSynchronize")

    return spin


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=KINDS, default="fp32")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--duty", type=float, default=1.0, help="share of the time, 0 to 1")
    parser.add_argument("--device", type=int, default=0, help="by PCI bus, as nvidia-smi counts")
    options = parser.parse_args()
    os.environ["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
    try:
        cuda = Cuda(options.device)
        busy = work(cuda, options.kind)
    except (OSError, AttributeError, RuntimeError) as error:
        sys.exit(f"load: {error}")
    print(json.dumps({"uuid": cuda.uuid, "pid": os.getpid(), "kind": options.kind}), flush=True)
    asked_to_end: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: asked_to_end.append(number))
    began = time.monotonic()
    worked = 0.0
    while (now := time.monotonic()) - began < options.seconds and not asked_to_end:
        busy(PERIOD_S * options.duty)
        worked += time.monotonic() - now
        time.sleep(max(0.0, now + PERIOD_S - time.monotonic()))
    print(json.dumps({"duty": worked / (time.monotonic() - began)}), flush=True)


if __name__ == "__main__":
    main()
