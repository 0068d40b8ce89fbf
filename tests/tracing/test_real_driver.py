"""NVIDIA's own libcuda.so.1, without a driver: every call fails, in the functions that are probed."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from expanse_ebpf.python_stacks.elf import Elf
from expanse_ebpf.tracing.functions import FUNCTIONS, Layer
from expanse_ebpf.tracing.points import find_points
from tests.stand_ins.cuda import Program
from tests.stand_ins.real_nvml import MissingError, real_driver
from tests.tracing.windows import calls, into, node

# What it has not got yet, or no longer.
NEWER = {"cuCtxSynchronize_v2"} | {
    f"cuMemcpy{which}BatchAsync{version}{stream}"
    for which in ("", "3D")
    for version in ("", "_v2")
    for stream in ("", "_ptsz")
}
CALLS = """
import ctypes, json, os, sys
driver = ctypes.CDLL(sys.argv[1])
print("ready", flush=True)
sys.stdin.readline()
failed = 0
for _ in range(25):
    failed += driver.cuLaunchKernel(None, 2, 3, 4, 32, 1, 1, 0, None, None, None) != 0
for _ in range(5):
    failed += driver.cuMemcpyHtoD_v2(ctypes.c_uint64(0), None, ctypes.c_size_t(4096)) != 0
    failed += driver.cuCtxSynchronize() != 0
print(json.dumps({"pid": os.getpid(), "errors": failed}))
"""


@pytest.fixture(scope="module")
def driver() -> Path:
    try:
        return real_driver()
    except MissingError as error:
        pytest.skip(str(error))


def test_it_has_the_functions_of_the_driver_that_are_probed(driver: Path) -> None:
    with open(driver, "rb") as file:

        def read(offset: int, size: int) -> bytes:
            file.seek(offset)
            return file.read(size)

        points, problems = find_points(Elf(read))
    assert problems == ""
    wanted = {function.symbol for function in FUNCTIONS if function.layer is Layer.DRIVER}
    assert wanted - {point.function.symbol for point in points} <= NEWER


def test_what_it_hands_out_by_name_are_the_functions_that_are_probed(driver: Path) -> None:
    """So what the runtime calls after cuGetProcAddress comes by the probes."""
    library = ctypes.CDLL(str(driver))
    per_thread = 2  # CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM
    for name, flags, exported in (
        ("cuLaunchKernel", 0, "cuLaunchKernel"),
        ("cuLaunchKernel", per_thread, "cuLaunchKernel_ptsz"),
        ("cuLaunchKernelEx", 0, "cuLaunchKernelEx"),
        ("cuGraphLaunch", 0, "cuGraphLaunch"),
        ("cuMemcpyHtoD", 0, "cuMemcpyHtoD_v2"),
        ("cuMemcpyHtoDAsync", 0, "cuMemcpyHtoDAsync_v2"),
        ("cuMemAlloc", 0, "cuMemAlloc_v2"),
        ("cuStreamSynchronize", 0, "cuStreamSynchronize"),
        ("cuCtxSynchronize", 0, "cuCtxSynchronize"),
    ):
        given, status = ctypes.c_void_p(), ctypes.c_int()
        error = library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(given), 12000, ctypes.c_uint64(flags), ctypes.byref(status)
        )
        assert (error, status.value) == (0, 0)
        assert given.value == ctypes.cast(getattr(library, exported), ctypes.c_void_p).value, name


def test_its_calls_are_counted(driver: Path, tmp_path: Path) -> None:
    script = tmp_path / "calls.py"
    script.write_text(CALLS)
    with node() as machine:
        group = machine.job()
        command: list[str | Path] = [sys.executable, script, driver]
        with Program(command, {}, preexec_fn=into(group)) as program:
            program.wait_for("ready")
            window = machine.window(group)
            window.until_open(targets=1)
            program.go()
            (counts,) = program.finish()
        trace = window.end(stop=True)
    assert counts.errors == 35
    assert calls(trace) == {"cuLaunchKernel": 25, "cuMemcpyHtoD_v2": 5, "cuCtxSynchronize": 5}
    (copied,) = [total.bytes for total in trace.totals if total.category == "copy"]
    assert copied == 5 * 4096
    shape = trace.shapes[0]
    assert (shape.grid_x, shape.grid_y, shape.grid_z, shape.block_x) == (2, 3, 4, 32)
    assert trace.price.stepped_hits >= 35  # each begins with a comparison, which is stepped over
