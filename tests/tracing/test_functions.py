"""The table of functions, against NVIDIA's headers and library."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from expanse_ebpf.tracing.functions import COLLECTIVES, COPY_KINDS, FUNCTIONS, Function, Layer, Shape
from tests.stand_ins.cuda_real import PACKAGE_13, real_runtime
from tests.stand_ins.real_nvml import MissingError

BY_SYMBOL = {each.symbol: each for each in FUNCTIONS}
# What CUDA 13 has no more.
OLD = {"cudaLaunch", "cudaLaunch_ptsz", "cudaLaunchCooperativeKernelMultiDevice", "cudaThreadSynchronize"}
OF_CATEGORY = re.compile(
    r"(__cuda|cuda|cu)(Launch|GraphLaunch|Memcpy|Memset|Malloc|HostAlloc|Free|MemAlloc|MemHostAlloc|MemFree|MemCreate"
    r"|MemRelease|ArrayCreate|Array3DCreate|ArrayDestroy|MipmappedArrayCreate|MipmappedArrayDestroy"
    r"|(Device|Stream|Event|Ctx)Synchronize)"
)
OTHERS = {"cudaLaunchHostFunc", "cudaLaunchHostFunc_ptsz", "cuLaunchHostFunc", "cuLaunchHostFunc_ptsz"}

# By what the headers call the parameter.
NAMES = {
    "bytes_arg": {"count", "ByteCount", "bytesize", "size", "width", "Width", "WidthInBytes", "N"},
    "times_arg": {"height", "Height"},
    "kind_arg": {"kind"},
    "stream_arg": {"stream", "hStream"},
    "target_arg": {"graphExec", "hGraphExec", "hGraph", "comm", "f", "hfunc", "pKernel"},
    "name_arg": {"name"},
    "type_arg": {"datatype"},
}
# A number of copies, a size in elements, and what comes behind a structure that is passed by value or at
# another place in another version.
NOT_TOLD = {
    "bytes_arg": r"cudaMemcpyBatchAsync|cuMemcpyBatchAsync|cudaMallocArray",
    "times_arg": r"cudaMallocArray",
    "stream_arg": r"cudaMemset3DAsync|cudaMemcpyBatchAsync|cudaMemcpy3DBatchAsync",
    "target_arg": r"cudaLaunch",
}

Prototype = list[tuple[str, str]]


def prototypes(text: str) -> dict[str, list[Prototype]]:
    """The functions that a header declares, under each name all of them: (type, name) of each parameter."""
    text = re.sub(r"/\*.*?\*/|//[^\n]*", " ", text, flags=re.DOTALL)
    found: dict[str, list[Prototype]] = {}
    for name, inside in re.findall(r"(?:CUDARTAPI|CUDAAPI)\s+(\w+)\s*\(([^;{]*?)\)\s*;", text):
        parameters = []
        for each in re.sub(r"__dv\([^)]*\)|=[^,]*", "", inside).split(","):
            match = re.fullmatch(r"\s*(.*?[\s*])(\w+)\s*", each, re.DOTALL)
            if match:
                parameters.append((match[1].strip(), match[2]))
        found.setdefault(name, []).append(parameters)
    return found


@pytest.fixture(scope="module")
def runtime() -> Path:
    """The library of CUDA 13; its headers lie beside it."""
    try:
        return real_runtime(PACKAGE_13)
    except MissingError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def headers(runtime: Path) -> dict[str, list[Prototype]]:
    found: dict[str, list[Prototype]] = {}
    for name in ("cuda_runtime_api.h", "cuda.h"):
        found |= prototypes(header(runtime, name))
    return found


def header(runtime: Path, name: str) -> str:
    return (runtime.parents[1] / "include" / name).read_text(errors="replace")


def declared(symbol: str, headers: Mapping[str, list[Prototype]]) -> list[Prototype]:
    name = re.sub(r"_pt[ds][sz]$", "", symbol).removeprefix("__")
    return headers.get(name) or headers.get(name.removesuffix("_v2"), [])


def fault(function: Function, prototype: Prototype) -> list[str]:
    """What of the table is not as the prototype has it."""
    faults = []
    by_value = [
        place for place, (kind, _) in enumerate(prototype) if re.match(r"(struct|dim3)\b[^*]*$", kind)
    ]
    for field, names in NAMES.items():
        number = getattr(function, field)
        places = [place for place, (_, name) in enumerate(prototype) if name in names]
        left_out = field in NOT_TOLD and re.match(NOT_TOLD[field], function.symbol)
        expected = -1 if left_out or not places else places[0]
        if number != expected:
            faults.append(f"{field} is {number}, not {expected}")
        if number >= 0 and any(place < number for place in by_value):
            faults.append(f"{field} comes behind a structure")
    return faults


@pytest.mark.parametrize("symbol", [each.symbol for each in FUNCTIONS if each.shape is Shape.PLAIN])
def test_arguments_are_where_the_headers_have_them(symbol: str, headers: dict[str, list[Prototype]]) -> None:
    if BY_SYMBOL[symbol].layer is Layer.NCCL or symbol in OLD:
        return
    choice = declared(symbol, headers)
    assert choice, "no such function"
    faults = [fault(BY_SYMBOL[symbol], prototype) for prototype in choice]
    assert [] in faults, faults


SHAPES = {
    Shape.RUNTIME_LAUNCH: ["func", "gridDim", "blockDim", "args", "sharedMem", "stream"],
    Shape.RUNTIME_LAUNCH_EX: ["config", "func", "args"],
    Shape.DRIVER_LAUNCH: [
        "f",
        *(f"{what}Dim{axis}" for what in ("grid", "block") for axis in "XYZ"),
        "sharedMemBytes",
        "hStream",
    ],
    Shape.DRIVER_LAUNCH_EX: ["config", "f"],
}


def test_launches_have_the_shapes_that_the_headers_have(headers: dict[str, list[Prototype]]) -> None:
    for function in FUNCTIONS:
        if function.shape is not Shape.PLAIN:
            wanted = SHAPES[function.shape]
            choice = declared(function.symbol, headers)
            assert choice
            for prototype in choice:
                assert [name for _, name in prototype][: len(wanted)] == wanted, function.symbol


def test_the_runtime_exports_what_is_in_the_table_and_nothing_else_of_its_kind(runtime: Path) -> None:
    lines = subprocess.run(["nm", "-D", runtime], capture_output=True, text=True, check=True).stdout
    exported = {line.split()[-1].partition("@")[0] for line in lines.splitlines() if " T " in line}
    ours = {each.symbol for each in FUNCTIONS if each.layer in (Layer.RUNTIME, Layer.RUNTIME_WRAPPER)}
    assert ours - exported == OLD
    assert {name for name in exported if OF_CATEGORY.match(name)} - OTHERS == ours - OLD


def test_the_driver_exports_what_its_header_maps_its_names_to(
    runtime: Path, headers: dict[str, list[Prototype]]
) -> None:
    text = header(runtime, "cuda.h")
    mapped = dict(
        re.findall(
            r"#\s*define\s+(cu\w+)\s+((?:__CUDA_API_PT\w+\()?cu\w+\)?)[ \t]*\n",
            text.partition("#define CUDA_VERSION")[0],
        )
    )
    exported: set[str] = set()
    for name in headers:
        if not name.startswith("cuda") and OF_CATEGORY.match(name) and not re.search(r"_pt[ds][sz]$", name):
            wrapped = re.fullmatch(r"(?:__CUDA_API_(PT\w+)\()?(\w+)\)?", mapped.get(name, name))
            assert wrapped is not None
            exported.add(wrapped[2])
            if wrapped[1]:
                exported.add(f"{wrapped[2]}_{wrapped[1].lower()}")
    ours = {each.symbol for each in FUNCTIONS if each.layer is Layer.DRIVER and each.category != "load"}
    # Of CUDA 12, which libcuda.so.1 goes on to export.
    ours -= {f"cuMemcpy{kind}BatchAsync{suffix}" for kind in ("", "3D") for suffix in ("", "_ptsz")}
    assert exported - OTHERS == ours


# As NCCL's documentation has them ("Collective Communication Functions", "Point To Point").
NCCL = {
    "ncclAllReduce": "sendbuff recvbuff count datatype op comm stream",
    "ncclAllGather": "sendbuff recvbuff count datatype comm stream",
    "ncclReduceScatter": "sendbuff recvbuff count datatype op comm stream",
    "ncclBroadcast": "sendbuff recvbuff count datatype root comm stream",
    "ncclBcast": "buff count datatype root comm stream",
    "ncclReduce": "sendbuff recvbuff count datatype op root comm stream",
    "ncclSend": "sendbuff count datatype peer comm stream",
    "ncclRecv": "recvbuff count datatype peer comm stream",
    "ncclAlltoAll": "sendbuff recvbuff count datatype comm stream",
    "ncclGather": "sendbuff recvbuff count datatype root comm stream",
    "ncclScatter": "sendbuff recvbuff count datatype root comm stream",
    "ncclGroupEnd": "",
}


def test_collectives_are_as_nccl_has_them() -> None:
    collectives = [each for each in FUNCTIONS if each.layer is Layer.NCCL]
    assert {each.symbol for each in collectives} == set(NCCL)
    for function in collectives:
        assert fault(function, [("", name) for name in NCCL[function.symbol].split()]) == []
        words = re.sub(
            r"([a-z])(?=[A-Z])|(?<=l)(?=toA)", r"\1_", function.symbol.removeprefix("nccl")
        ).lower()
        assert COLLECTIVES[function.kind] == ("broadcast" if words == "bcast" else words)


def test_every_symbol_is_there_once() -> None:
    assert len(BY_SYMBOL) == len(FUNCTIONS)
    assert {each.category for each in FUNCTIONS} == {
        "launch", "graph", "copy", "set", "alloc", "free", "sync", "collective", "load",
    }  # fmt: skip


def test_what_waits_for_the_device_is_timed_and_a_launch_never() -> None:
    timed = {each.symbol for each in FUNCTIONS if each.timed}
    assert timed == {
        each.symbol
        for each in FUNCTIONS
        if each.category in ("sync", "load") or (each.category == "copy" and "Async" not in each.symbol)
    }
    assert {"cudaMemcpy", "cuMemcpyDtoH_v2", "cudaStreamSynchronize_ptsz", "cuModuleGetFunction"} <= timed


def test_kinds_of_copies_are_those_of_their_names() -> None:
    for symbol, kind in (
        ("cuMemcpyHtoD_v2", "host_to_device"),
        ("cuMemcpyDtoHAsync_v2_ptsz", "device_to_host"),
        ("cuMemcpyHtoA_v2", "host_to_device"),  # an array is the device's
        ("cuMemcpyAtoHAsync_v2", "device_to_host"),
        ("cuMemcpyDtoD_v2_ptds", "device_to_device"),
        ("cudaMemcpyPeerAsync", "device_to_device"),
        ("cuMemcpy", "default"),
    ):
        assert COPY_KINDS[BY_SYMBOL[symbol].kind] == kind
    for each in FUNCTIONS:
        letters = re.search(r"Memcpy([HDA])to([HDA])", each.symbol)
        if letters:
            ends = ["host" if letter == "H" else "device" for letter in letters.groups()]
            assert COPY_KINDS[each.kind] == f"{ends[0]}_to_{ends[1]}"
        assert each.kind < 0 or each.kind_arg < 0
        assert each.category == "copy" or each.kind_arg < 0


def test_sets_are_sized_by_their_elements() -> None:
    for each in FUNCTIONS:
        bits = re.match(r"cuMemsetD(?:2D)?(8|16|32)", each.symbol)
        assert 8 << each.shift == (int(bits[1]) if bits else 8), each.symbol
