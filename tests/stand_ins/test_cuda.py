"""The stand-ins for CUDA and NCCL: what they do, how their functions call each other, what they look like."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.stand_ins.build import HERE
from tests.stand_ins.cuda import PROGRAMS, CudaStandIn, Program, build, cuda_stand_in
from tests.stand_ins.cuda_real import NVCC, nvcc_program, real_runtime
from tests.stand_ins.real_nvml import MissingError

WITH_RUNTIME = ("shared", "static", "static_stripped", "other")
PROBED = re.compile("cuda|__cudaLaunch|cu(Launch|Graph|Mem|Module|Library|.*Sync)|nccl(All|B|Group|Re|S)")
EVERYTHING = """
    launch 2; launch 3 via=ptsz kernel=1; launch 4 via=ex kernel=2 shared=64 stream=7
    launch 5 via=cooperative kernel=3; graph 2
    copy h2d 100 1; copy d2h 200 2; copy d2d 300 3; copy default 400 4
    copy h2d 10 1 async; copy d2h 20 1 async; copy d2d 30 1 async; copy default 40 1 async
    copy2d h2d 16 4 2; copy2d d2h 16 4 1; peer 64 2; set 4096 3; set 4096 1 async
    alloc 1000 1; alloc 1000 2 how=managed; alloc 1000 3 how=async
    alloc 1000 4 how=pinned; alloc 1000 5 how=host
    sync 1; sync 2 how=stream; sync 3 how=event
"""


@pytest.fixture(params=[False, True], ids=["calls", "tail_calls"])
def either(request: pytest.FixtureRequest) -> CudaStandIn:
    return cuda_stand_in(tail_calls=request.param)


@pytest.fixture
def cuda() -> CudaStandIn:
    return cuda_stand_in()


def symbols(path: Path, *options: str) -> dict[str, str]:
    """The letter that nm has for each symbol that is defined; without the symbols' versions."""
    lines = subprocess.check_output(
        ["nm", "--defined-only", *options, path], text=True, stderr=-3
    ).splitlines()
    return {name.partition("@")[0]: letter for _, letter, name in map(str.split, lines)}


def code(path: Path, name: str) -> list[str]:
    """The instructions of one function."""
    command: list[str | Path] = ["objdump", "-d", "--no-show-raw-insn", f"--disassemble={name}", path]
    text = subprocess.check_output(command, text=True)
    return re.findall(r"^ +[0-9a-f]+:\t(.*?) *$", text.partition("section .text")[2], re.MULTILINE)


def mapped(pid: int) -> set[str]:
    return {Path(line.split()[5]).name for line in Path(f"/proc/{pid}/maps").open() if line.count("/") > 1}


# ---- calls


@pytest.mark.parametrize("variant", WITH_RUNTIME)
@pytest.mark.parametrize("route", ["exported", "inner", "none"])
def test_a_runtime_reaches_the_driver_by_its_entries_or_past_them_or_not_at_all(
    either: CudaStandIn, variant: str, route: str
) -> None:
    with either.launch(variant, "launch 10; sync 1; say done; wait", route=route) as program:
        program.wait_for("done")
        libraries = mapped(program.pid)
        program.go()
        counts = program.counts()
    assert counts.launches == 10
    assert counts.errors == 0
    assert counts.calls == {"cudaLaunchKernel": 10, "cudaDeviceSynchronize": 1}
    assert ("libcuda.so.1" in libraries) == (route != "none")
    assert counts.driver == ({"cuLaunchKernel": 10, "cuCtxSynchronize": 1} if route == "exported" else {})


@pytest.mark.parametrize("route", ["exported", "inner", "none"])
def test_every_function_of_the_runtime_works_and_reaches_its_counterpart(
    either: CudaStandIn, route: str
) -> None:
    script = f"{EVERYTHING}; launch 6 via=wrapper; launch 7 via=wrapper_ptsz; launch 8 via=handle"
    with either.launch("shared", script, route=route) as program:
        counts = program.counts()
    assert counts.errors == 0
    assert counts.launches == 2 + 3 + 4 + 5 + 6 + 7 + 8
    assert counts.calls == {
        "cudaLaunchKernel": 2,
        "cudaLaunchKernel_ptsz": 3,
        "cudaLaunchKernelExC": 4,
        "cudaLaunchCooperativeKernel": 5,
        "__cudaLaunchKernel": 6 + 8,
        "__cudaLaunchKernel_ptsz": 7,
        "__cudaGetKernel": 1,
        "cudaGraphLaunch": 2,
        "cudaMemcpy": 10,
        "cudaMemcpyAsync": 4,
        "cudaMemcpy2D": 3,
        "cudaMemcpyPeer": 2,
        "cudaMemset": 3,
        "cudaMemsetAsync": 1,
        "cudaMalloc": 1,
        "cudaMallocManaged": 2,
        "cudaMallocAsync": 3,
        "cudaMallocHost": 4,
        "cudaHostAlloc": 5,
        "cudaFree": 3,
        "cudaFreeAsync": 3,
        "cudaFreeHost": 9,
        "cudaDeviceSynchronize": 1,
        "cudaStreamSynchronize": 2,
        "cudaEventSynchronize": 3,
    }
    assert counts.bytes["cudaMemcpy"] == 100 + 400 + 900 + 1600
    assert counts.bytes["cudaMemcpy2D"] == 3 * 64
    assert counts.bytes["cudaMallocAsync"] == 3000
    assert counts.kernels == {
        "void scale<float>(float*, int)": 2 + 6 + 7 + 8,
        "add(float const*, float const*, float*, int)": 3,
        "void model::forward<128>(float const*, float*)": 4,
        "fill(float*, int)": 5,
    }
    reached = {**of_driver_alone(), "cuLaunchKernel": 2 + 6 + 8, "cuLaunchKernel_ptsz": 3 + 7}
    for ours, theirs in (("cuMemsetD32_v2", "cuMemsetD8_v2"), ("cuMemsetD32Async", "cuMemsetD8Async")):
        reached[theirs] = reached.pop(ours)
    assert counts.driver == (reached if route == "exported" else {})


def of_driver_alone() -> dict[str, int]:
    """What EVERYTHING calls where there is no runtime."""
    return {
        "cuLaunchKernel": 2,
        "cuLaunchKernel_ptsz": 3,
        "cuLaunchKernelEx": 4,
        "cuLaunchCooperativeKernel": 5,
        "cuGraphLaunch": 2,
        "cuMemcpyHtoD_v2": 1,
        "cuMemcpyDtoH_v2": 2,
        "cuMemcpyDtoD_v2": 3,
        "cuMemcpy": 4,
        "cuMemcpyHtoDAsync_v2": 1,
        "cuMemcpyDtoHAsync_v2": 1,
        "cuMemcpyDtoDAsync_v2": 1,
        "cuMemcpyAsync": 1,
        "cuMemcpy2D_v2": 3,
        "cuMemcpyPeer": 2,
        "cuMemsetD32_v2": 3,
        "cuMemsetD32Async": 1,
        "cuMemAlloc_v2": 1,
        "cuMemAllocManaged": 2,
        "cuMemAllocAsync": 3,
        "cuMemAllocHost_v2": 4,
        "cuMemHostAlloc": 5,
        "cuMemFree_v2": 3,
        "cuMemFreeAsync": 3,
        "cuMemFreeHost": 9,
        "cuCtxSynchronize": 1,
        "cuStreamSynchronize": 2,
        "cuEventSynchronize": 3,
    }


def test_every_function_of_the_driver_works(either: CudaStandIn) -> None:
    script = f"{EVERYTHING}; alloc 10 6 how=create; module matmul; launch 7 kernel=module"
    with either.launch("driver", script) as program:
        counts = program.counts()
    assert counts.errors == 0
    assert counts.launches == 2 + 3 + 4 + 5 + 7
    modules = {"cuModuleLoadData": 1, "cuModuleGetFunction": 1}
    memory = {"cuMemCreate": 6, "cuMemRelease": 6}
    expected = {**of_driver_alone(), **modules, **memory, "cuLaunchKernel": 2 + 7}
    assert counts.calls == expected
    assert counts.driver == expected
    assert sum(counts.kernels.values()) == counts.launches - 7


@pytest.mark.parametrize("route", ["exported", "inner", "none"])
def test_what_is_copied_and_set_is_so_on_the_device(cuda: CudaStandIn, route: str) -> None:
    program = """
import ctypes, sys
cuda = ctypes.CDLL(sys.argv[1])
size, pointer = ctypes.c_size_t, ctypes.c_void_p
text = ctypes.create_string_buffer(b"0123456789abcdef", 16)
back = ctypes.create_string_buffer(16)
memory = pointer()
assert cuda.cudaMalloc(ctypes.byref(memory), size(16)) == 0
assert cuda.cudaMemcpy(memory, text, size(16), 1) == 0
assert cuda.cudaMemset(pointer(memory.value + 2), ord("x"), size(3)) == 0
assert cuda.cudaMemcpy2D(back, size(4), memory, size(8), size(4), size(2), 2) == 0
assert cuda.cudaMemcpyAsync(pointer(ctypes.addressof(back) + 8), memory, size(8), 2, pointer(0)) == 0
assert cuda.cudaFree(memory) == 0
print(back.raw.decode())
"""
    command: list[str | Path] = [sys.executable, "-c", program, cuda.runtime]
    assert (
        subprocess.check_output(command, text=True, env=cuda.environment(route=route)) == "01xx89ab01xxx567\n"
    )


def test_a_program_with_a_runtime_may_call_the_driver_too(either: CudaStandIn) -> None:
    script = "dlopen libcuda.so.1; module matmul; launch 1; launch 2 kernel=module; launch 3 via=driver:ex"
    with either.launch("shared", script) as program:
        counts = program.counts()
    modules = {"cuModuleLoadData": 1, "cuModuleGetFunction": 1}
    assert counts.errors == 0
    assert counts.calls == {**modules, "cudaLaunchKernel": 1, "cuLaunchKernel": 2, "cuLaunchKernelEx": 3}
    assert counts.driver == {**modules, "cuLaunchKernel": 1 + 2, "cuLaunchKernelEx": 3}


def test_forked_processes_end_when_their_parent_is_killed(cuda: CudaStandIn) -> None:
    with cuda.launch("none", "fork 1; say begun; repeat 0; sleep 1000") as program:
        program.wait_for("begun")
        program.process.kill()
        assert program.output() == ""  # which comes once nobody has the pipe any more


def test_what_makes_no_sense_is_an_error(cuda: CudaStandIn) -> None:
    with cuda.launch("shared", "launch 3 grid=0,1,1; launch 2 block=32,0,1; launch 1") as program:
        assert program.counts().errors == 5


def test_without_a_driver_every_call_is_an_error(cuda: CudaStandIn, tmp_path: Path) -> None:
    shutil.copy(cuda.runtime, tmp_path / "libcudart.so.13")
    environment = cuda.environment(LD_LIBRARY_PATH=str(tmp_path))
    script = "launch 5; copy h2d 10 1; sync 1"
    with Program(
        [cuda.program("launcher-none"), f"dlopen libcudart.so.13; {script}"], environment
    ) as program:
        assert program.counts().errors == 7


def test_synchronising_takes_as_long_as_it_is_told(cuda: CudaStandIn) -> None:
    before = time.monotonic()
    with cuda.launch("shared", "sync 2; sync 1 how=stream; sync 1 how=event", sync_us=100_000) as program:
        assert program.counts().errors == 0
    assert time.monotonic() - before >= 0.4


# ---- the launcher's script


def test_a_fork_makes_processes_that_count_for_themselves(cuda: CudaStandIn) -> None:
    script = "launch 4; fork 3; dlopen libcudart.so; launch 5; say ready; wait"
    with cuda.launch("shared", script) as program:
        program.go(3)
        first, second, third, parent = sorted(
            program.finish(), key=lambda counts: counts.launches, reverse=True
        )
    assert parent.pid == program.pid
    assert parent.launches == parent.driver["cuLaunchKernel"] == 4
    for child in (first, second, third):
        assert child.launches == child.driver["cuLaunchKernel"] == 5
    assert len({first.pid, second.pid, third.pid, parent.pid}) == 4


def test_threads_share_one_count(cuda: CudaStandIn) -> None:
    with cuda.launch("shared", "launch 1; threads 4; repeat 3; launch 100; copy h2d 8 1") as program:
        counts = program.counts()
    assert counts.calls == {"cudaLaunchKernel": 1 + 4 * 3 * 100, "cudaMemcpy": 12}
    assert counts.driver == {"cuLaunchKernel": 1 + 4 * 3 * 100, "cuMemcpyHtoD_v2": 12}


def test_a_script_without_end_is_counted_when_it_is_ended(cuda: CudaStandIn) -> None:
    with cuda.launch("shared", "launch 1; say begun; repeat 0; launch 100 every_us=100") as program:
        program.wait_for("begun")
        counts = program.counts(end=True)
    assert counts.launches >= 1
    assert counts.calls["cudaLaunchKernel"] == counts.driver["cuLaunchKernel"] == counts.launches


def test_forked_processes_are_ended_with_their_parent(cuda: CudaStandIn) -> None:
    with cuda.launch("shared", "fork 2; launch 1; say begun; repeat 0; sleep 1000") as program:
        program.wait_for("begun")
        program.wait_for("begun")
        assert sorted(counts.launches for counts in program.finish(end=True)) == [0, 1, 1]


def test_a_script_says_how_it_ends(cuda: CudaStandIn) -> None:
    with cuda.launch("none", "launch 0; exit 9; launch 1") as program:
        assert [counts.launches for counts in program.finish()] == [0]
        assert program.process.returncode == 9
    with cuda.launch("none", "launch 1", stderr=subprocess.PIPE) as program:
        assert program.finish() == []
        assert program.process.returncode == 3


def test_a_library_may_come_late_and_go(cuda: CudaStandIn) -> None:
    script = f"say before; wait; dlopen {cuda.other}; launch 6; say with; wait; dlclose; say without; wait"
    with cuda.launch("none", script, route="none") as program:
        program.wait_for("before")
        assert not {name for name in mapped(program.pid) if name.startswith(("libcu", "libother"))}
        program.go()
        program.wait_for("with")
        assert "libother.so" in mapped(program.pid)
        program.go()
        program.wait_for("without")
        assert "libother.so" not in mapped(program.pid)
        program.go()
        assert program.counts().calls == {"cudaLaunchKernel": 6}


def test_copies_of_the_runtime_are_files_of_their_own(cuda: CudaStandIn, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        shutil.copy(cuda.runtime, tmp_path / name / "libcudart.so.13")
        with cuda.launch("none", f"dlopen {tmp_path / name}/libcudart.so.13; launch 3") as program:
            assert program.counts().driver == {"cuLaunchKernel": 3}


# ---- symbols and code


def test_each_variant_has_the_symbols_that_it_is_to_have(cuda: CudaStandIn) -> None:
    stripped = cuda.program("launcher-static_stripped")
    assert symbols(cuda.program("launcher-static"))["cudaLaunchKernel"] == "T"
    assert "cudaLaunchKernel" not in symbols(cuda.program("launcher-static"), "-D")
    assert not symbols(stripped)
    assert not [name for name in symbols(stripped, "-D") if name.startswith(("cu", "__cu"))]
    assert not [name for name in symbols(cuda.program("launcher-none")) if name.startswith(("cu", "__cu"))]
    assert symbols(cuda.other, "-D")["cudaLaunchKernel"] == "T"
    assert symbols(cuda.nccl, "-D")["ncclAllReduce"] == "T"
    assert not [name for name in symbols(cuda.nccl, "-D") if "cuda" in name]
    assert symbols(cuda.nccl)["cudaLaunchKernelExC"] == "t"
    kernels = {"_Z5scaleIfEvPT_i": "T", "_Z3addPKfS0_Pfi": "T", "_ZL4fillPfi": "t"}
    assert kernels.items() <= symbols(cuda.program("launcher-shared")).items()


def test_names_and_versions_of_the_libraries_are_those_of_the_real_ones(cuda: CudaStandIn) -> None:
    for library, name in (
        (cuda.driver, "libcuda.so.1"),
        (cuda.runtime, "libcudart.so.13"),
        (cuda.nccl, "libnccl.so.2"),
    ):
        text = subprocess.check_output(["readelf", "-d", library], text=True)
        assert f"Library soname: [{name}]" in text
        assert (cuda.libraries / name).resolve() == library.resolve()
    names = subprocess.check_output(["nm", "-D", cuda.runtime], text=True)
    assert "T cudaLaunchKernel@@libcudart.so.13" in names


@pytest.mark.parametrize("name", ["cudaLaunchKernel", "cudaLaunchKernel_ptsz"])
def test_the_wrapper_of_a_launch_is_a_frame_and_a_jump(either: CudaStandIn, name: str) -> None:
    for path in (either.runtime, either.other, either.nccl, either.program("launcher-static")):
        *frame, jump = code(path, f"__{name}")[:4]
        assert frame == ["push   %rbp", "mov    %rsp,%rbp", "pop    %rbp"], path
        assert re.fullmatch(rf"jmp +[0-9a-f]+ <{name}(@@.*)?>", jump), path


def test_functions_begin_as_those_of_the_real_libraries_do(either: CudaStandIn) -> None:
    for path in (either.driver, either.runtime, either.nccl):
        names = [name for name in symbols(path, "-D") if PROBED.match(name)]
        assert len(names) >= 9
        assert {name for name in names if code(path, name)[0] != "push   %rbp"} == set()


@pytest.mark.parametrize(("tail_calls", "word"), [(False, "call"), (True, "jmp")])
def test_functions_call_or_jump_to_what_does_their_work(tail_calls: bool, word: str) -> None:
    cuda = cuda_stand_in(tail_calls=tail_calls)
    inner = [line for line in code(cuda.driver, "cuLaunchKernel") if "<device_cuLaunchKernel>" in line]
    assert [line.split()[0] for line in inner] == [word]
    outer = [line for line in code(cuda.runtime, "cudaStreamSynchronize") if re.match(r"\w+ +\*", line)]
    assert [line.split()[0] for line in outer] == [word]


def test_everything_compiles_for_arm64(tmp_path: Path) -> None:
    made = build(tmp_path / "arm64", tail_calls=True, machine="aarch64-linux-gnu-")
    command: list[str | Path] = [
        "aarch64-linux-gnu-objdump",
        "-d",
        "--disassemble=__cudaLaunchKernel",
        made.runtime,
    ]
    assert re.search(r"\tb\t[0-9a-f]+ <cudaLaunchKernel", subprocess.check_output(command, text=True))


# ---- NCCL


@pytest.mark.parametrize("route", ["exported", "inner", "none"])
def test_a_collective_launches_one_kernel_by_a_runtime_of_its_own(either: CudaStandIn, route: str) -> None:
    kinds = ("all_reduce", "reduce_scatter", "all_gather", "reduce", "broadcast", "bcast", "send", "recv")
    collectives = "; ".join(f"collective {kind} 1024 {times}" for times, kind in enumerate(kinds, 1))
    with either.launch("none", f"dlopen libnccl.so.2; {collectives}", route=route) as program:
        counts = program.counts()
    assert counts.errors == 0
    assert list(counts.calls.values()) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {"ncclAllReduce": 1, "ncclBcast": 6, "ncclRecv": 8}.items() <= counts.calls.items()
    assert counts.driver == ({"cuLaunchKernelEx": 36} if route == "exported" else {})


def test_a_group_launches_one_kernel_at_its_end(cuda: CudaStandIn) -> None:
    with cuda.launch(
        "none", "dlopen libnccl.so.2; collective send 8 5 group; collective recv 8 2"
    ) as program:
        counts = program.counts()
    assert counts.calls == {"ncclGroupStart": 1, "ncclSend": 5, "ncclGroupEnd": 1, "ncclRecv": 2}
    assert counts.driver == {"cuLaunchKernelEx": 1 + 2}


def test_functions_of_nccl_have_a_second_name_at_the_same_address(cuda: CudaStandIn) -> None:
    lines = [
        line.split() for line in subprocess.check_output(["nm", "-D", cuda.nccl], text=True).splitlines()
    ]
    addresses = {line[2]: line[0] for line in lines if line[-2] == "T"}
    functions = [name for name in addresses if name.startswith("nccl")]
    assert len(functions) >= 15
    assert all(addresses[name] == addresses[f"p{name}"] for name in functions)


# ---- other programs


@pytest.mark.parametrize("variant", ["shared", "static"])
@pytest.mark.parametrize("call", ["launch", "wrapper", "copy", "sync"])
@pytest.mark.parametrize(
    ("mode", "inside", "back", "other"),
    [
        ("plain", 20, 20, 0),
        ("longjmp", 20, 0, 0),
        ("context", 40, 20, 19),
        ("thread", 20, 0, 0),
        ("fork", 20, 20, 0),
    ],
)
def test_odd_ends_of_a_call_are_no_crash_of_their_own(
    either: CudaStandIn, variant: str, call: str, mode: str, inside: int, back: int, other: int
) -> None:
    with either.start(f"crasher-{variant}", mode, call, "20") as program:
        program.wait_for("ready")
        program.go()
        output = program.output()
    counts = f"21 calls, {inside} inside, {back} and {other} came back, 0 failed"
    assert output == f"{mode} {call}: {counts}\n"
    assert program.process.returncode == 7


@pytest.mark.parametrize("variant", ["shared", "static", "driver"])
def test_the_hammer_keeps_to_its_rate_and_says_what_a_launch_takes(cuda: CudaStandIn, variant: str) -> None:
    with cuda.start(f"hammer-{variant}", "1000", "0.5") as program:
        said = json.loads(program.output())
    assert 1 < said["launches"] <= 502
    assert said["errors"] == 0
    assert said["seconds"] >= 0.5
    assert 0 < said["median_ns"] <= said["p99_ns"]
    with cuda.start(f"hammer-{variant}", "0", "60") as program:
        time.sleep(0.2)
        unlimited = json.loads(program.output(end=True))
    assert unlimited["seconds"] < 60


def test_python_says_which_stack_has_launched_how_often(cuda: CudaStandIn) -> None:
    with cuda.train("7") as program:
        program.wait_for("ready")
        program.go()
        counts = program.counts()
    assert counts.launches == counts.driver["cuLaunchKernel"] == 7 * (3 + 1 + 5)
    lines = (PROGRAMS / "train.py").read_text().splitlines()
    innermost: Counter[str] = Counter()
    for stack in counts.stacks:
        (function, line), *_, outermost = stack["frames"]
        assert lines[line - 1].strip().startswith("launch(")
        assert outermost[0] == "<module>"
        innermost[function] += stack["launches"]
    assert innermost == {"linear": 14, "activation": 7, "backward": 7, "step": 35}


# ---- NVIDIA's own


def test_the_real_runtime_gives_errors_and_nothing_worse() -> None:
    try:
        library = real_runtime()
    except MissingError as error:
        pytest.skip(str(error))
    assert {"cudaLaunchKernel", "cudaMemcpy", "cudaStreamSynchronize"} <= symbols(library, "-D").keys()
    launcher = cuda_stand_in().program("launcher-none")
    with Program([launcher, f"dlopen {library}; launch 3; sync 1 how=stream"], {**os.environ}) as running:
        counts = running.counts()
    assert counts.launches == 3
    assert counts.errors == 4


# What follows needs the CUDA toolkit, which no Debian package brings: without it there is nothing to compare.
if NVCC:

    @pytest.mark.parametrize("cudart", ["shared", "static"])
    def test_a_program_made_by_nvcc_fails_without_a_gpu_and_does_not_crash(
        tmp_path: Path, cudart: str
    ) -> None:
        with Program([nvcc_program(tmp_path, cudart=cudart)], {**os.environ}) as program:
            program.wait_for("ready")
            program.go()
            assert program.output().startswith("10 of 10 launches failed, the copy gave ")
        assert program.process.returncode == 0

    def test_a_program_made_by_nvcc_works_with_the_stand_in(either: CudaStandIn, tmp_path: Path) -> None:
        with either.start(nvcc_program(tmp_path, cudart="shared")) as program:
            program.wait_for("ready")
            program.go()
            assert program.output() == "0 of 10 launches failed, the copy gave 0\n"

    def test_prototypes_are_those_of_nvidias_headers(tmp_path: Path) -> None:
        source = tmp_path / "compare.c"
        source.write_text(
            "#include <cuda.h>\n"
            "#include <cuda_runtime_api.h>\n"
            '#include "cuda_runtime_abi.h"\n'
            "#define PROTOTYPE(name, inner, ...) PROTOTYPE_(name, __VA_ARGS__)\n"
            "#define PROTOTYPE_(name, parameters, arguments) CUresult name parameters;\n"
            "DRIVER_FUNCTIONS(PROTOTYPE)\n"
        )
        command: list[str | Path] = ["gcc", "-std=gnu11", "-fsyntax-only", "-I", HERE, source]
        for toolkit in (Path(str(NVCC)).resolve().parents[1], Path("/usr/local/cuda")):
            command += ["-I", toolkit / "include"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
