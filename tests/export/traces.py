"""Deep traces for tests: one whose figures are known, and whatever Hypothesis thinks of."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from expanse_ebpf.wire.collector_pb2 import Evidence, Trace, TraceState

SECOND = 10**9
MS = 10**6
BEGIN = 1_764_511_200 * SECOND  # 2025-11-30 14:00:00 UTC
OWN = "/home/anna/train.py"
LIBRARY = "/opt/venv/lib/python3.11/site-packages/torch/nn/functional.py"
GEMM = "void gemm<float, 128, 64>(float const*, float*)"
RELU = "relu_kernel(float*, int)"
COMMUNICATOR = 0x7F0000001000
GRAPH = 0x7F0000002000
STREAM = 0x5500
UNKNOWN_KERNEL = 0x401230

# index, function, category, kind of the totals
FUNCTIONS = (
    "cudaLaunchKernel",
    "cudaMemcpy",
    "cudaMemcpyAsync",
    "cudaMemsetAsync",
    "cudaDeviceSynchronize",
    "ncclAllReduce",
    "cudaGraphLaunch",
    "cudaMalloc",
    "cudaFree",
)
LAUNCH, COPY, COPY_ASYNC, SET, SYNC, ALL_REDUCE, GRAPH_LAUNCH, MALLOC, FREE = range(len(FUNCTIONS))
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class TraceBuilder:
    """Collects events; figures that are None are not known."""

    def __init__(self, node: str = "gpu-1", *, begin: int = BEGIN, seconds: float = 10.0) -> None:
        self.trace = Trace(base_ns=begin, stacks=True, version="0.1.0")
        trace = self.trace
        trace.node.name, trace.node.install_id, trace.node.boot_id = node, f"install-{node}", f"boot-{node}"
        status = trace.status
        status.id, status.state = "00000000deadbeef", TraceState.TRACE_STATE_DONE
        status.identity.scheduler, status.identity.id, status.identity.run = "slurm", "123", 7
        status.from_ns, status.to_ns = begin, begin + round(seconds * SECOND)
        status.seconds, status.targets = seconds, 1
        status.traced_share, status.cost_share = 1.0, 0.004
        trace.functions.extend(FUNCTIONS)
        self._last = begin

    def event(
        self,
        time_ns: int,
        function: int,
        *,
        thread: int = 0,
        duration: int | None = None,
        size: int | None = None,
        stream: int | None = None,
        kernel: int | None = None,
        shape: int | None = None,
        stack: int | None = None,
        target: int = 0,
        kind: int | None = None,
    ) -> None:
        """One call, `time_ns` after the window's beginning."""
        events = self.trace.events
        events.time_ns.append(self.trace.base_ns + time_ns - self._last)
        self._last = self.trace.base_ns + time_ns
        events.thread.append(thread)
        events.function.append(function)
        events.target.append(target)
        for column, value in (
            ("duration_ns", duration),
            ("bytes", size),
            ("stream", stream),
            ("kernel", kernel),
            ("shape", shape),
            ("stack", stack),
            ("kind", kind),
        ):
            getattr(events, column).append(0 if value is None else value + 1)


def tables(builder: TraceBuilder, pid: int = 4242) -> None:
    """Two processes, three threads, kernels, shapes, stacks."""
    trace = builder.trace
    trace.processes.add(pid=pid, command="python train.py", state="traced", files=[0, 1])
    trace.processes.add(pid=pid + 1, command="bash job.sh", state="no_cuda", reason="maps no CUDA library")
    trace.threads.add(tid=pid, pid=pid, name="python", hits=1200, launches=900)
    trace.threads.add(tid=pid + 8, pid=pid, name="pt_autograd_0", hits=100, launches=100)
    trace.files.add(path="/opt/venv/lib/libcudart.so.12", level="runtime", symbols=12)
    trace.files.add(path="/lib/libcuda.so.1", level="driver", reason="read in part")
    trace.kernels.add(name=GEMM, module="/opt/venv/lib/libtorch_cuda.so", address=0x1000)
    trace.kernels.add(name=RELU, module="/opt/venv/lib/libtorch_cuda.so", address=0x2000)
    trace.kernels.add(address=UNKNOWN_KERNEL, module="/home/anna/run", reason="the file has no symbols")
    trace.shapes.add(grid_x=256, grid_y=2, grid_z=1, block_x=128, block_y=1, block_z=1, shared_bytes=4096)
    trace.shapes.add(grid_x=1, grid_y=1, grid_z=1, block_x=32, block_y=1, block_z=1)
    for function, file, line in (
        ("linear", LIBRARY, 1700),
        ("Net.forward", OWN, 20),
        ("<module>", OWN, 52),
        ("Net.activate", OWN, 31),
    ):
        trace.frames.add(function=function, file=file, line=line)
    trace.traced_stacks.add(frames=[0, 1, 2])
    trace.traced_stacks.add(frames=[3, 2], truncated=True)


def known(node: str = "gpu-1", *, steps: int = 100, pid: int = 4242, begin: int = BEGIN) -> Trace:
    """Each step, 100 ms: 6 GEMMs, 3 ReLUs and a nameless kernel 1 ms apart, copies, a collective, a sync.

    Of 10 s the probes are in place for 8, and the launches of the first 20 steps are not there.
    """
    builder = TraceBuilder(node, begin=begin, seconds=steps / 10)
    tables(builder, pid)
    trace = builder.trace
    first = steps // 5
    for step in range(first, steps):
        at = step * 100 * MS
        builder.event(at, COPY, duration=2 * MS, size=1 << 20, kind=HOST_TO_DEVICE, stack=1)
        for place in range(10):
            kernel = 0 if place < 6 else 1 if place < 9 else 2
            builder.event(
                at + (10 + place) * MS,
                LAUNCH,
                thread=int(place == 9),
                stream=STREAM if place else 0,
                kernel=kernel,
                shape=min(kernel, 1),
                stack=(0, 1, None)[kernel],
            )
        builder.event(at + 30 * MS, COPY_ASYNC, size=4096, kind=DEVICE_TO_HOST, stream=STREAM)
        builder.event(at + 31 * MS, SET, size=512, stream=STREAM)
        builder.event(at + 32 * MS, ALL_REDUCE, size=1 << 22, stream=STREAM, target=COMMUNICATOR)
        # The end of every tenth is not seen.
        builder.event(at + 40 * MS, SYNC, duration=None if step % 10 == 9 else 50 * MS)
    builder.event(steps * 100 * MS - 5 * MS, GRAPH_LAUNCH, stream=STREAM, target=GRAPH)
    n = steps - first
    unseen = sum(step % 10 == 9 for step in range(first, steps))
    for function, category, calls, size, timed, time_ns, kind in (
        (LAUNCH, "launch", 10 * n, None, 0, 0, ""),
        (COPY, "copy", n, n << 20, n, n * 2 * MS, "host_to_device"),
        (COPY_ASYNC, "copy", n, n * 4096, 0, 0, "device_to_host"),
        (SET, "set", n, n * 512, 0, 0, ""),
        (SYNC, "sync", n, None, n - unseen, (n - unseen) * 50 * MS, ""),
        (ALL_REDUCE, "collective", n, n << 22, 0, 0, "all_reduce"),
        (GRAPH_LAUNCH, "graph", 1, None, 0, 0, ""),
        (MALLOC, "alloc", 3, 3 << 20, 0, 0, ""),
        (FREE, "free", 2, None, 0, 0, ""),
    ):
        trace.totals.add(
            function=FUNCTIONS[function],
            category=category,
            calls=calls,
            bytes=size or 0,
            sized=0 if size is None else calls,
            timed=timed,
            time_ns=time_ns,
            kind=kind,
        )
    trace.totals[0].nested = 10 * n
    trace.unpaired = unseen
    trace.gaps.add(up_to_ns=1 * MS, count=8 * n)
    trace.gaps.add(up_to_ns=2 * MS, count=0)
    trace.gaps.add(up_to_ns=128 * MS, count=2 * n - 2)
    trace.stacks_unresolved["native_thread"] = n
    trace.status.launches = 10 * n
    trace.status.traced_share = 0.8
    begin_ns, end_ns = trace.status.from_ns, trace.status.to_ns
    trace.spans.add(from_ns=begin_ns + first * 100 * MS, to_ns=begin_ns + steps // 2 * 100 * MS)
    trace.spans.add(from_ns=begin_ns + steps // 2 * 100 * MS, to_ns=end_ns)
    trace.price.trap_ns, trace.price.hits, trace.price.program_ns = 900.0, 25 * n, 30_000 * n
    trace.price.points, trace.price.method = 24, "uprobe_multi"
    trace.evidence.append(Evidence(name="GPU utilisation", value=0.04))
    times = [begin_ns + i * SECOND for i in range(int(steps / 10))]
    trace.counters.add(
        name="GPU 0 utilisation", unit="%", time_ns=times, value=[4.0 + i for i in range(len(times))]
    )
    trace.counters.add(name="CPU cores", unit="cores", time_ns=times, value=[1.0] * len(times))
    return trace


def large(events: int = 200_000, node: str = "gpu-1") -> Trace:
    """Many launches from two threads, with stacks, 25 s."""
    builder = TraceBuilder(node, seconds=25.0)
    tables(builder)
    trace = builder.trace
    for index in range(200):
        trace.kernels.add(name=f"kernel_{index}(float*)", module="/x.so", address=index + 1)
    for index in range(500):
        trace.frames.add(function=f"layer_{index}", file=OWN, line=index + 1)
        trace.traced_stacks.add(frames=[4 + index, 0, 1, 2, *range(4, 24)])
    step = 25 * SECOND // events
    for index in range(events):
        if index % 100 == 99:
            builder.event(index * step, SYNC, duration=step // 2)
        else:
            builder.event(
                index * step,
                LAUNCH,
                thread=index % 2,
                stream=STREAM,
                kernel=index % 203,
                shape=index % 2,
                stack=index % 502,
            )
    trace.totals.add(function=FUNCTIONS[LAUNCH], category="launch", calls=events - events // 100)
    trace.totals.add(function=FUNCTIONS[SYNC], category="sync", calls=events // 100, timed=events // 100)
    trace.spans.add(from_ns=trace.status.from_ns, to_ns=trace.status.to_ns)
    return trace


# ---- whatever Hypothesis thinks of

_numbers = st.one_of(st.integers(0, 4), st.integers(0, (1 << 64) - 1))
_names = st.one_of(st.sampled_from([*FUNCTIONS, "launch", "sync", "copy", ""]), st.text(max_size=6))


@st.composite
def odd(draw: st.DrawFn) -> Trace:
    """Well-formed messages with odd names and figures; every second one does not hold together."""
    wild = draw(st.booleans())
    entries, count = draw(st.integers(1, 4)), draw(st.integers(0, 5))
    index = st.integers(0, entries - 1 + wild)
    signed = st.integers(-(1 << 63), (1 << 63) - 1)
    times = st.one_of(st.integers(0, 1 << 62), signed) if wild else st.integers(0, 1 << 62)
    steps = st.one_of(st.integers(-10, 10**9), signed) if wild else st.integers(-10, 10**9)
    pids = st.integers(0, (1 << (32 if wild else 31)) - 1)
    shares = st.floats() if wild else st.floats(0, 1)

    def column(values: st.SearchStrategy[int], length: int = count) -> Sequence[int]:
        length += draw(st.sampled_from([0] * 9 + [1])) if wild else 0
        return draw(st.lists(values, min_size=length, max_size=length))

    trace = Trace(base_ns=draw(st.one_of(st.just(BEGIN), times)), stacks=draw(st.booleans()))
    status = trace.status
    status.id, status.state = draw(_names), draw(st.integers(0, 9))  # type: ignore[assignment]
    status.from_ns, status.to_ns = draw(st.one_of(st.just(BEGIN), times)), draw(times)
    status.traced_share, status.cost_share = draw(shares), draw(shares)
    trace.node.name = draw(_names)
    trace.price.trap_ns, trace.price.hits = draw(st.floats()), draw(_numbers)
    trace.functions.extend(draw(st.lists(_names, min_size=entries, max_size=entries)))
    for _ in range(entries):
        trace.threads.add(tid=draw(pids), pid=draw(pids), name=draw(_names))
        trace.processes.add(pid=draw(pids), command=draw(_names), state=draw(_names), files=[draw(index)])
        trace.files.add(path=draw(_names), reason=draw(_names))
        trace.kernels.add(name=draw(_names), address=draw(_numbers))
        trace.shapes.add(grid_x=draw(index))
        trace.frames.add(function=draw(_names), file=draw(_names), line=draw(index))
        trace.traced_stacks.add(frames=draw(st.lists(index, max_size=3)))
        total = trace.totals.add(function=draw(_names), category=draw(_names), kind=draw(_names))
        total.calls, total.bytes, total.sized = draw(_numbers), draw(_numbers), draw(_numbers)
        total.timed, total.time_ns = draw(_numbers), draw(_numbers)
        trace.gaps.add(up_to_ns=draw(_numbers), count=draw(_numbers))
        begin, end = sorted((draw(times), draw(times)))
        trace.spans.add(from_ns=begin, to_ns=end)
        points = column(times, 2)
        trace.counters.add(name=draw(_names), time_ns=points, value=[draw(st.floats()), 1.0])
        trace.stacks_unresolved[draw(_names)] = draw(_numbers)
    events = trace.events
    events.time_ns.extend(draw(st.lists(steps, min_size=count, max_size=count)))
    for name in ("thread", "function", "kernel", "shape", "stack", "kind"):
        getattr(events, name).extend(column(index))
    for name in ("duration_ns", "bytes", "stream", "target"):
        getattr(events, name).extend(column(_numbers))
    return trace
