"""The CUDA and NCCL functions that are probed, and where their arguments are."""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

from expanse_ebpf.export.trace_reader import COPY_KINDS as COPY_KINDS


class Layer(IntEnum):
    """Who calls whom: a function calls those of its own layer or a later one. As in bpf/gpu_calls.bpf.c."""

    NCCL = 0
    RUNTIME_WRAPPER = 1  # of the runtime, and calls or jumps to another function of it
    RUNTIME = 2
    DRIVER = 3


class Shape(IntEnum):
    """How the arguments of a launch lie. As in bpf/gpu_calls.bpf.c."""

    PLAIN = 0  # no launch: what is wanted stands in arguments by number
    RUNTIME_LAUNCH = 1  # (func, dim3 grid, dim3 block, args, shared, stream)
    RUNTIME_LAUNCH_EX = 2  # (cudaLaunchConfig_t *, func, args)
    DRIVER_LAUNCH = 3  # (f, gx, gy, gz, bx, by, bz, shared, stream, ...)
    DRIVER_LAUNCH_EX = 4  # (CUlaunchConfig *, f, ...)


class Function(NamedTuple):
    """One function. Numbers of arguments count from 0; -1: it has no such argument."""

    symbol: str
    layer: Layer
    category: str  # launch | graph | copy | set | alloc | free | sync | collective | load
    shape: Shape = Shape.PLAIN
    kind: int = -1  # of copies: cudaMemcpyKind; of collectives: index into COLLECTIVES
    kind_arg: int = -1  # where the kind is an argument
    bytes_arg: int = -1
    times_arg: int = -1  # bytes are the product of both
    shift: int = 0  # and of 2 to this
    type_arg: int = -1  # an ncclDataType_t, whose size multiplies too
    stream_arg: int = -1
    # Of collectives the communicator, of graphs the graph, of PLAIN launches the kernel where it is an
    # argument; of loads the address that the handle is written to.
    target_arg: int = -1
    name_arg: int = -1  # of loads: the kernel's name
    timed: bool = False  # its end is looked for


# Names of Function.kind and of CallTotal.kind, for the category collective.
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "send",
    "recv",
    "all_to_all",
    "gather",
    "scatter",
    "group_end",
)

_NCCL, _WRAPPER, _RUNTIME, _DRIVER = Layer


def _and(suffix: str, *functions: Function) -> tuple[Function, ...]:
    """Each function and its like for the per-thread default stream, which differs in nothing else.

    "_ptsz" is the suffix of those that take a stream, "_ptds" of those without.
    """
    return tuple(each for one in functions for each in (one, one._replace(symbol=one.symbol + suffix)))


def _copy(
    symbol: str,
    layer: Layer,
    size: int = -1,
    *,
    times: int = -1,
    kind: int = -1,
    kind_arg: int = -1,
    stream: int = -1,
) -> Function:
    """A copy. One that is not called asynchronous waits for the device, as a rule."""
    return Function(
        symbol,
        layer,
        "copy",
        kind=kind,
        kind_arg=kind_arg,
        bytes_arg=size,
        times_arg=times,
        stream_arg=stream,
        timed="Async" not in symbol,
    )


def _set(
    symbol: str, layer: Layer, size: int = -1, *, times: int = -1, shift: int = 0, stream: int = -1
) -> Function:
    return Function(symbol, layer, "set", bytes_arg=size, times_arg=times, shift=shift, stream_arg=stream)


def _alloc(symbol: str, layer: Layer, size: int = -1, *, times: int = -1, stream: int = -1) -> Function:
    """An allocation: of what was asked for, without what is added for alignment."""
    return Function(symbol, layer, "alloc", bytes_arg=size, times_arg=times, stream_arg=stream)


def _free(symbol: str, layer: Layer, *, stream: int = -1) -> Function:
    return Function(symbol, layer, "free", stream_arg=stream)


def _sync(symbol: str, layer: Layer, *, stream: int = -1) -> Function:
    return Function(symbol, layer, "sync", stream_arg=stream, timed=True)


def _collective(symbol: str, kind: str, count: int, data: int, comm: int, stream: int) -> Function:
    """A collective; its bytes are those of `count`, as the call has it for one rank."""
    return Function(
        symbol,
        _NCCL,
        "collective",
        kind=COLLECTIVES.index(kind),
        bytes_arg=count,
        type_arg=data,
        stream_arg=stream,
        target_arg=comm,
    )


# Every symbol that CUDA 9 to 13 and NCCL 2 export for these categories. Left out is what belongs to CUDA 3
# (driver functions whose successor ends in _v2: they have 32-bit addresses), and figures are left out where
# they are not among the arguments: those of copies told by a structure, and those of structures that are
# passed by value, which are no integer arguments.
FUNCTIONS: tuple[Function, ...] = (
    # ---- launches
    *_and(
        "_ptsz",
        # In CUDA 13 what the compiler writes for <<<>>> calls the first, which jumps to the second.
        Function("__cudaLaunchKernel", _WRAPPER, "launch", Shape.RUNTIME_LAUNCH),
        Function("cudaLaunchKernel", _RUNTIME, "launch", Shape.RUNTIME_LAUNCH),
        Function("cudaLaunchKernelExC", _RUNTIME, "launch", Shape.RUNTIME_LAUNCH_EX),
        Function("cudaLaunchCooperativeKernel", _RUNTIME, "launch", Shape.RUNTIME_LAUNCH),
        Function("cudaLaunch", _RUNTIME, "launch", target_arg=0),  # up to CUDA 9
    ),
    Function("cudaLaunchCooperativeKernelMultiDevice", _RUNTIME, "launch"),  # up to CUDA 12
    *_and(
        "_ptsz",
        Function("cuLaunchKernel", _DRIVER, "launch", Shape.DRIVER_LAUNCH),
        Function("cuLaunchKernelEx", _DRIVER, "launch", Shape.DRIVER_LAUNCH_EX),
        Function("cuLaunchCooperativeKernel", _DRIVER, "launch", Shape.DRIVER_LAUNCH),
    ),
    Function("cuLaunchCooperativeKernelMultiDevice", _DRIVER, "launch"),
    Function("cuLaunch", _DRIVER, "launch", target_arg=0),
    Function("cuLaunchGrid", _DRIVER, "launch", target_arg=0),
    Function("cuLaunchGridAsync", _DRIVER, "launch", stream_arg=3, target_arg=0),
    # ---- graphs
    *_and(
        "_ptsz",
        Function("cudaGraphLaunch", _RUNTIME, "graph", stream_arg=1, target_arg=0),
        Function("cuGraphLaunch", _DRIVER, "graph", stream_arg=1, target_arg=0),
    ),
    # ---- copies: the runtime's
    *_and(
        "_ptds",
        _copy("cudaMemcpy", _RUNTIME, 2, kind_arg=3),
        _copy("cudaMemcpyToSymbol", _RUNTIME, 2, kind_arg=4),
        _copy("cudaMemcpyFromSymbol", _RUNTIME, 2, kind_arg=4),
        _copy("cudaMemcpy2D", _RUNTIME, 4, times=5, kind_arg=6),
        _copy("cudaMemcpyToArray", _RUNTIME, 4, kind_arg=5),
        _copy("cudaMemcpyFromArray", _RUNTIME, 4, kind_arg=5),
        _copy("cudaMemcpyArrayToArray", _RUNTIME, 6, kind_arg=7),
        _copy("cudaMemcpy2DToArray", _RUNTIME, 5, times=6, kind_arg=7),
        _copy("cudaMemcpy2DFromArray", _RUNTIME, 5, times=6, kind_arg=7),
        _copy("cudaMemcpy2DArrayToArray", _RUNTIME, 6, times=7, kind_arg=8),
        _copy("cudaMemcpy3D", _RUNTIME),
        _copy("cudaMemcpy3DPeer", _RUNTIME, kind=3),
    ),
    _copy("cudaMemcpyPeer", _RUNTIME, 4, kind=3),
    *_and(
        "_ptsz",
        _copy("cudaMemcpyAsync", _RUNTIME, 2, kind_arg=3, stream=4),
        _copy("cudaMemcpyToSymbolAsync", _RUNTIME, 2, kind_arg=4, stream=5),
        _copy("cudaMemcpyFromSymbolAsync", _RUNTIME, 2, kind_arg=4, stream=5),
        _copy("cudaMemcpy2DAsync", _RUNTIME, 4, times=5, kind_arg=6, stream=7),
        _copy("cudaMemcpyToArrayAsync", _RUNTIME, 4, kind_arg=5, stream=6),
        _copy("cudaMemcpyFromArrayAsync", _RUNTIME, 4, kind_arg=5, stream=6),
        _copy("cudaMemcpy2DToArrayAsync", _RUNTIME, 5, times=6, kind_arg=7, stream=8),
        _copy("cudaMemcpy2DFromArrayAsync", _RUNTIME, 5, times=6, kind_arg=7, stream=8),
        _copy("cudaMemcpy3DAsync", _RUNTIME, stream=1),
        _copy("cudaMemcpy3DPeerAsync", _RUNTIME, kind=3, stream=1),
        # The stream's number is another in CUDA 12 and 13.
        _copy("cudaMemcpyBatchAsync", _RUNTIME),
        _copy("cudaMemcpy3DBatchAsync", _RUNTIME),
    ),
    _copy("cudaMemcpyPeerAsync", _RUNTIME, 4, kind=3, stream=5),
    # ---- copies: the driver's
    *_and(
        "_ptds",
        _copy("cuMemcpy", _DRIVER, 2, kind=4),
        _copy("cuMemcpyPeer", _DRIVER, 4, kind=3),
        _copy("cuMemcpyHtoD_v2", _DRIVER, 2, kind=1),
        _copy("cuMemcpyDtoH_v2", _DRIVER, 2, kind=2),
        _copy("cuMemcpyDtoD_v2", _DRIVER, 2, kind=3),
        _copy("cuMemcpyHtoA_v2", _DRIVER, 3, kind=1),
        _copy("cuMemcpyAtoH_v2", _DRIVER, 3, kind=2),
        _copy("cuMemcpyDtoA_v2", _DRIVER, 3, kind=3),
        _copy("cuMemcpyAtoD_v2", _DRIVER, 3, kind=3),
        _copy("cuMemcpyAtoA_v2", _DRIVER, 4, kind=3),
        _copy("cuMemcpy2D_v2", _DRIVER),
        _copy("cuMemcpy2DUnaligned_v2", _DRIVER),
        _copy("cuMemcpy3D_v2", _DRIVER),
        _copy("cuMemcpy3DPeer", _DRIVER, kind=3),
    ),
    *_and(
        "_ptsz",
        _copy("cuMemcpyAsync", _DRIVER, 2, kind=4, stream=3),
        _copy("cuMemcpyPeerAsync", _DRIVER, 4, kind=3, stream=5),
        _copy("cuMemcpyHtoDAsync_v2", _DRIVER, 2, kind=1, stream=3),
        _copy("cuMemcpyDtoHAsync_v2", _DRIVER, 2, kind=2, stream=3),
        _copy("cuMemcpyDtoDAsync_v2", _DRIVER, 2, kind=3, stream=3),
        _copy("cuMemcpyHtoAAsync_v2", _DRIVER, 3, kind=1, stream=4),
        _copy("cuMemcpyAtoHAsync_v2", _DRIVER, 3, kind=2, stream=4),
        _copy("cuMemcpy2DAsync_v2", _DRIVER, stream=1),
        _copy("cuMemcpy3DAsync_v2", _DRIVER, stream=1),
        _copy("cuMemcpy3DPeerAsync", _DRIVER, kind=3, stream=1),
        _copy("cuMemcpyBatchAsync", _DRIVER, stream=8),
        _copy("cuMemcpyBatchAsync_v2", _DRIVER, stream=7),
        _copy("cuMemcpy3DBatchAsync", _DRIVER, stream=4),
        _copy("cuMemcpy3DBatchAsync_v2", _DRIVER, stream=3),
    ),
    # ---- sets
    *_and(
        "_ptds",
        _set("cudaMemset", _RUNTIME, 2),
        _set("cudaMemset2D", _RUNTIME, 3, times=4),
        _set("cudaMemset3D", _RUNTIME),
        _set("cuMemsetD8_v2", _DRIVER, 2),
        _set("cuMemsetD16_v2", _DRIVER, 2, shift=1),
        _set("cuMemsetD32_v2", _DRIVER, 2, shift=2),
        _set("cuMemsetD2D8_v2", _DRIVER, 3, times=4),
        _set("cuMemsetD2D16_v2", _DRIVER, 3, times=4, shift=1),
        _set("cuMemsetD2D32_v2", _DRIVER, 3, times=4, shift=2),
    ),
    *_and(
        "_ptsz",
        _set("cudaMemsetAsync", _RUNTIME, 2, stream=3),
        _set("cudaMemset2DAsync", _RUNTIME, 3, times=4, stream=5),
        _set("cudaMemset3DAsync", _RUNTIME),
        _set("cuMemsetD8Async", _DRIVER, 2, stream=3),
        _set("cuMemsetD16Async", _DRIVER, 2, shift=1, stream=3),
        _set("cuMemsetD32Async", _DRIVER, 2, shift=2, stream=3),
        _set("cuMemsetD2D8Async", _DRIVER, 3, times=4, stream=5),
        _set("cuMemsetD2D16Async", _DRIVER, 3, times=4, shift=1, stream=5),
        _set("cuMemsetD2D32Async", _DRIVER, 3, times=4, shift=2, stream=5),
    ),
    # ---- memory
    _alloc("cudaMalloc", _RUNTIME, 1),
    _alloc("cudaMallocManaged", _RUNTIME, 1),
    _alloc("cudaMallocHost", _RUNTIME, 1),
    _alloc("cudaHostAlloc", _RUNTIME, 1),
    _alloc("cudaMallocPitch", _RUNTIME, 2, times=3),
    _alloc("cudaMalloc3D", _RUNTIME),
    _alloc("cudaMallocArray", _RUNTIME),
    _alloc("cudaMalloc3DArray", _RUNTIME),
    _alloc("cudaMallocMipmappedArray", _RUNTIME),
    *_and(
        "_ptsz",
        _alloc("cudaMallocAsync", _RUNTIME, 1, stream=2),
        _alloc("cudaMallocFromPoolAsync", _RUNTIME, 1, stream=3),
    ),
    _alloc("cuMemAlloc_v2", _DRIVER, 1),
    _alloc("cuMemAllocManaged", _DRIVER, 1),
    _alloc("cuMemAllocHost_v2", _DRIVER, 1),
    _alloc("cuMemHostAlloc", _DRIVER, 1),
    _alloc("cuMemAllocPitch_v2", _DRIVER, 2, times=3),
    _alloc("cuMemCreate", _DRIVER, 1),
    _alloc("cuArrayCreate_v2", _DRIVER),
    _alloc("cuArray3DCreate_v2", _DRIVER),
    _alloc("cuMipmappedArrayCreate", _DRIVER),
    *_and(
        "_ptsz",
        _alloc("cuMemAllocAsync", _DRIVER, 1, stream=2),
        _alloc("cuMemAllocFromPoolAsync", _DRIVER, 1, stream=3),
    ),
    _free("cudaFree", _RUNTIME),
    _free("cudaFreeHost", _RUNTIME),
    _free("cudaFreeArray", _RUNTIME),
    _free("cudaFreeMipmappedArray", _RUNTIME),
    _free("cuMemFree_v2", _DRIVER),
    _free("cuMemFreeHost", _DRIVER),
    _free("cuMemRelease", _DRIVER),
    _free("cuArrayDestroy", _DRIVER),
    _free("cuMipmappedArrayDestroy", _DRIVER),
    *_and("_ptsz", _free("cudaFreeAsync", _RUNTIME, stream=1), _free("cuMemFreeAsync", _DRIVER, stream=1)),
    # ---- waiting for the device
    _sync("cudaDeviceSynchronize", _RUNTIME),
    _sync("cudaThreadSynchronize", _RUNTIME),  # up to CUDA 12
    _sync("cudaEventSynchronize", _RUNTIME),
    _sync("cuCtxSynchronize", _DRIVER),
    _sync("cuCtxSynchronize_v2", _DRIVER),
    _sync("cuEventSynchronize", _DRIVER),
    *_and(
        "_ptsz",
        _sync("cudaStreamSynchronize", _RUNTIME, stream=0),
        _sync("cuStreamSynchronize", _DRIVER, stream=0),
    ),
    # ---- NCCL; the last three since 2.28
    _collective("ncclAllReduce", "all_reduce", 2, 3, 5, 6),
    _collective("ncclAllGather", "all_gather", 2, 3, 4, 5),
    _collective("ncclReduceScatter", "reduce_scatter", 2, 3, 5, 6),
    _collective("ncclBroadcast", "broadcast", 2, 3, 5, 6),
    _collective("ncclBcast", "broadcast", 1, 2, 4, 5),
    _collective("ncclReduce", "reduce", 2, 3, 6, 7),
    _collective("ncclSend", "send", 1, 2, 4, 5),
    _collective("ncclRecv", "recv", 1, 2, 4, 5),
    _collective("ncclAlltoAll", "all_to_all", 2, 3, 4, 5),
    _collective("ncclGather", "gather", 2, 3, 5, 6),
    _collective("ncclScatter", "scatter", 2, 3, 5, 6),
    Function("ncclGroupEnd", _NCCL, "collective", kind=COLLECTIVES.index("group_end")),
    # ---- kernels' names
    Function("cuModuleGetFunction", _DRIVER, "load", target_arg=0, name_arg=2, timed=True),
    Function("cuLibraryGetKernel", _DRIVER, "load", target_arg=0, name_arg=2, timed=True),
)
