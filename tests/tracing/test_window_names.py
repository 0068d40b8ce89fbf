"""The names that a window gives to kernels: those that the programs themselves say they have launched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.wire.collector_pb2 import Trace
from tests.stand_ins.build import COMPILER
from tests.stand_ins.cuda import CudaStandIn, Program, cuda_stand_in
from tests.stand_ins.cuda_real import NVCC, nvcc_program, real_runtime
from tests.stand_ins.real_nvml import MissingError
from tests.tracing.windows import Node, calls, into, node

# Launches as nvcc 13's code does it: with a handle that is the runtime's own, out of a function that bears
# the kernel's name. The names stand in the file, where a test puts others of the same length.
NVCC_LIKE = """
#include <stdio.h>
#include <unistd.h>
typedef struct { unsigned x, y, z; } dim3;
int __cudaGetKernel(void **, const void *);
int __cudaLaunchKernel(void *, dim3, dim3, void **, unsigned long, void *);
#define STUB(name, times) \\
    __attribute__((noinline, noclone)) static void name(void) { \\
        static void *handle; \\
        if (!handle) __cudaGetKernel(&handle, name); \\
        for (volatile int i = 0; i < times; i++) \\
            __cudaLaunchKernel(handle, (dim3){1, 1, 1}, (dim3){32, 1, 1}, 0, 0, 0); \\
        __asm__ volatile(""); \\
    }
STUBS(STUB)
#define CALL(name, times) name();
int main(void)
{
    puts("ready");
    fflush(stdout);
    getchar();
    STUBS(CALL)
    puts("done");
    fflush(stdout);
    getchar();
}
"""
NAMES = {  # as it stands in the file, and as it is told
    b"__device_stub__Z5scaleIfEvPT_i": "void scale<float>(float*, int)",
    b"plain": "plain",
    b"k" * 3000: "k" * 1023 + "…",
    b"_Z900" + b"k" * 900 + b"Pf": "k" * 900 + "(float*)",
    b'a "quoted" \\ name': 'a "quoted" \\ name',
    b"new\nline\033[2J": "new␊line␛[2J",
    "ядро_カーネル".encode(): "ядро_カーネル",
    b"no_\xff\xfe_text": "no_��_text",
}


@pytest.fixture(scope="module")
def cuda() -> CudaStandIn:
    return cuda_stand_in()


@pytest.fixture
def machine() -> Iterator[Node]:
    with node() as made:
        yield made


def traced(machine: Node, group: Path, *programs: Program) -> tuple[Trace, Counter[str]]:
    """A window from `ready` to `done` of the programs, and the kernels that they say they launched."""
    for program in programs:
        program.wait_for("ready")
    window = machine.window(group)
    window.until_open(targets=len(programs))
    for program in programs:
        program.go()
        program.wait_for("done")
    trace = window.end(stop=True)  # while they are still there: afterwards there is nobody to ask
    said = Counter[str]()
    for program in programs:
        program.go()
        for counts in program.finish():
            said.update(counts.kernels)
    return trace, said


def launches(trace: Trace) -> Counter[tuple[str, str]]:
    """Launches by the kernel's name and by why it has none."""
    events = [trace.kernels[index - 1] for index in trace.events.kernel if index]
    return Counter((kernel.name, kernel.reason) for kernel in events)


@pytest.mark.parametrize("variant", ["shared", "static", "other"])
def test_launches_by_the_runtime_have_the_names_of_their_kernels(
    machine: Node, cuda: CudaStandIn, variant: str
) -> None:
    script = (
        "say ready; wait; launch 3 kernel=0; launch 4 kernel=1 via=ptsz; launch 2 kernel=2 via=ex;"
        " launch 5 kernel=3 via=cooperative; threads 2; launch 6 kernel=1"
    )
    group = machine.job()
    with cuda.launch(variant, f"{script}; say done; wait", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        for _ in range(2):
            program.wait_for("done")
        trace = window.end(stop=True)
        program.go(2)
        said = program.counts().kernels
    assert launches(trace) == {(name, ""): count for name, count in said.items()}
    assert len(trace.kernels) == 4
    assert {kernel.module for kernel in trace.kernels} == {str(cuda.program(f"launcher-{variant}"))}


def test_the_runtime_s_own_handles_have_the_name_of_the_function_that_launches(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    program = nvcc_like(tmp_path, cuda, list(NAMES))
    group = machine.job()
    trace, _ = traced(machine, group, cuda.start(program, preexec_fn=into(group)))
    assert calls(trace) == {"__cudaLaunchKernel": sum(range(1, len(NAMES) + 1))}
    assert launches(trace) == {(name, ""): count for count, name in enumerate(NAMES.values(), 1)}


def nvcc_like(folder: Path, cuda: CudaStandIn, names: list[bytes], *options: str) -> Path:
    """A program that launches the first of those kernels once, the second twice, and so on."""
    # No longer than the names that are to stand there.
    stands = [f"s{number}".ljust(len(name), "_") for number, name in enumerate(names)]
    stubs = " ".join(f"X({name}, {count})" for count, name in enumerate(stands, 1))
    source, program = folder / "nvcc_like.c", folder / "nvcc-like"
    source.write_text(f"#define STUBS(X) {stubs}\n{NVCC_LIKE}")
    link = [f"-L{cuda.libraries}", f"-Wl,-rpath,{cuda.libraries}", "-lcudart"]
    subprocess.run([*COMPILER, "-O1", *options, "-o", program, source, *link], check=True)
    code = program.read_bytes()
    for stand, name in zip(stands, names, strict=True):
        code = code.replace(f"\0{stand}\0".encode(), b"\0" + name + b"\0")
    program.write_bytes(code)
    return program


def test_handles_have_names_where_the_window_has_seen_their_load(machine: Node, cuda: CudaStandIn) -> None:
    # The first load in the window tells where loads return to: it is the next ones that are seen.
    names = {
        "_Z6matmulPfi": "matmul(float*, int)",
        "triton_poi_fused_0": "triton_poi_fused_0",
        "no_\udcff": "no_�",
    }
    loads = "; ".join(f"module {name}; launch {count} kernel=module" for count, name in enumerate(names, 1))
    script = f"module early; say ready; wait; launch 9 kernel=module; module first; say first; wait; {loads}"
    group = machine.job()
    with cuda.launch("driver", f"{script}; say done; wait", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        program.wait_for("first")
        window.until(lambda status: status.launches >= 9)
        program.go()
        program.wait_for("done")
        trace = window.end(stop=True)
        program.go()
        program.counts()
    assert launches(trace) == {
        ("", "its module was loaded before the window"): 9,
        **{(name, ""): count for count, name in enumerate(names.values(), 1)},
    }


def test_a_kernel_of_two_processes_is_one_wherever_they_have_it(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    script = "say ready; wait; launch 3 kernel=1; launch 2 kernel=2; say done; wait"
    programs = [cuda.launch("shared", script, preexec_fn=into(group)) for _ in range(2)]
    with programs[0], programs[1]:
        bases = {Path(f"/proc/{program.pid}/maps").read_text().partition("-")[0] for program in programs}
        trace, said = traced(machine, group, *programs)
    assert len(bases) == 2
    assert launches(trace) == {(name, ""): count for name, count in said.items()}
    assert sorted(said.values()) == [4, 6]
    assert len(trace.kernels) == 2


def test_kernels_without_a_symbol_say_so_and_are_told_apart(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    program = nvcc_like(tmp_path, cuda, [b"one", b"two"], "-s")
    group = machine.job()
    trace, _ = traced(machine, group, cuda.start(program, preexec_fn=into(group)))
    assert launches(trace) == {("", "no symbol"): 3}
    assert {kernel.module for kernel in trace.kernels} == {str(program)}
    assert len({kernel.address for kernel in trace.kernels}) == 2


def test_nvidias_own_runtime_is_counted_call_by_call(machine: Node) -> None:
    try:
        library = real_runtime()
    except MissingError as error:
        pytest.skip(str(error))
    program = """
import ctypes, sys
runtime = ctypes.CDLL(sys.argv[1])
launch, shape = runtime.cudaLaunchKernel, [ctypes.c_uint64(1 << 32 | 1), ctypes.c_uint32(1)]
word = ctypes.c_void_p
def call(times):
    for _ in range(times):
        launch(word(16), *shape, *shape, None, ctypes.c_size_t(0), None)
call(1)
print("ready", flush=True)
input()
call(1000)
for _ in range(20):
    runtime.cudaMemcpy(None, None, ctypes.c_size_t(8), 4)
    runtime.cudaDeviceSynchronize()
print("done", flush=True)
input()
"""
    group = machine.job()
    command: list[str | Path] = [sys.executable, "-c", program, library]
    trace, _ = traced(machine, group, Program(command, {**os.environ}, preexec_fn=into(group)))
    assert calls(trace) == {"cudaLaunchKernel": 1000, "cudaMemcpy": 20, "cudaDeviceSynchronize": 20}
    assert launches(trace) == {("", "its code is in no file"): 1000}
    assert {total.function: total.bytes for total in trace.totals if total.bytes} == {"cudaMemcpy": 160}


def test_a_name_that_stands_for_gigabytes_is_left_as_it_is() -> None:
    digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    numbers = [*digits, *(first + second for first in digits for second in digits)][:40]
    # Each part is a pair of the part before it, twice.
    bomb = f"_Z1fISt4pairIiiE{''.join(f'S_IS{number}_S{number}_E' for number in numbers)}Evv"
    command = [sys.executable, "-m", "expanse_ebpf.tracing.symbols", "0"]
    lines = subprocess.run(
        command, input=f"{bomb}\n_Z3addPf\n", capture_output=True, text=True, check=True
    ).stdout
    assert [json.loads(line)["name"] for line in lines.splitlines()] == [bomb, "add(float*)"]


# What follows needs the CUDA toolkit, which no Debian package brings: without it there is nothing to trace.
if NVCC:

    @pytest.mark.parametrize("driver", ["stand-in", "none"])
    @pytest.mark.parametrize("cudart", ["shared", "static"])
    def test_a_program_made_by_nvcc_has_its_launches_and_names(
        machine: Node, cuda: CudaStandIn, tmp_path: Path, cudart: str, driver: str
    ) -> None:
        program = nvcc_program(tmp_path, cudart=cudart)
        environment = cuda.environment() if driver == "stand-in" else {**os.environ}
        environment["LD_PRELOAD"] = str(waits_at_its_end(tmp_path))
        group = machine.job()
        trace, _ = traced(machine, group, Program([program], environment, preexec_fn=into(group)))
        assert calls(trace) == {"__cudaLaunchKernel": 10, "cudaMemcpy": 1}
        assert launches(trace) == {("void scale<float>(float*, int)", ""): 10}
        assert [kernel.module for kernel in trace.kernels] == [str(program)]

    def waits_at_its_end(folder: Path) -> Path:
        """A library that has a program say `done` at its end, and wait."""
        source, library = folder / "end.c", folder / "end.so"
        source.write_text(
            "#include <stdio.h>\n"
            '__attribute__((destructor)) void end(void) { puts("done"); fflush(stdout); getchar(); }\n'
        )
        subprocess.run([*COMPILER, "-shared", "-o", library, source], check=True)
        return library
