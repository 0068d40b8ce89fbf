"""Windows, real ones, on programs that know exactly what they have called."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path

import pytest

from expanse_ebpf.wire.collector_pb2 import Trace
from tests.stand_ins.cuda import Counts, CudaStandIn, Program, cuda_stand_in
from tests.tracing.windows import Node, Window, calls, events, into, node

# A line for each way to call. `say ready; wait` comes before them.
WAYS = """
launch 5; launch 4 via=ptsz; launch 3 via=wrapper; launch 2 via=wrapper_ptsz; launch 6 via=cooperative
launch 7 via=ex; launch 3 via=driver:plain; launch 2 via=driver:ptsz; launch 1 via=driver:ex
launch 4 via=driver:cooperative; graph 9
copy h2d 4096 5; copy d2h 100 2; copy d2d 7 1; copy h2h 8 1; copy default 16 2; copy h2d 4096 5 async
copy2d h2d 128 4 3; peer 64 2; set 256 3; set 256 2 async
alloc 1024 2; alloc 10 1 how=managed; alloc 11 1 how=async; alloc 12 1 how=pinned; alloc 13 1 how=host
sync 3; sync 2 how=stream; sync 1 how=event
""".strip().replace("\n", "; ")


@pytest.fixture(scope="module")
def cuda() -> CudaStandIn:
    return cuda_stand_in(tail_calls=False)


@pytest.fixture
def machine() -> Iterator[Node]:
    with node() as made:
        yield made


def traced(
    machine: Node, program: Program, group: Path, **options: object
) -> tuple[Window, list[Counts], Trace]:
    """A window around all that the program does after it has said `ready`."""
    with program:
        program.wait_for("ready")
        window = machine.window(group, **options)
        window.until_open(targets=1)
        program.go()
        counts = program.finish()
        return window, counts, window.end(stop=True)


@pytest.mark.parametrize("route", ["exported", "inner", "none"])
@pytest.mark.parametrize("tail_calls", [False, True], ids=["calls", "jumps"])
def test_each_call_is_counted_once_however_the_layers_nest(
    machine: Node, route: str, tail_calls: bool
) -> None:
    group = machine.job()
    made = cuda_stand_in(tail_calls=tail_calls)
    # One launch before: the runtime loads the driver at its first call.
    ways = WAYS if route != "none" else WAYS.partition("launch 3 via=driver")[0] + "graph 9; sync 3"
    script = f"dlopen {made.driver}; launch 1; say ready; wait; {ways}"
    program = made.launch("shared", script, route=route, preexec_fn=into(group))
    _, (counts,), trace = traced(machine, program, group)
    expected = dict(counts.calls)
    expected["cudaLaunchKernel"] -= 1
    assert calls(trace) == expected
    assert events(trace) == expected
    sized = {total.function: total.bytes for total in trace.totals if total.sized}
    known = {function: size for function, size in counts.bytes.items() if function in sized}
    summed = Counter[str]()
    for total in trace.totals:
        summed[total.function] += total.bytes
    assert {function: summed[function] for function in known} == known
    assert trace.events_lost == 0


def test_a_launch_has_its_grid_block_shared_memory_and_stream(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    shape = "grid=3,2,5 block=64,4,2 shared=4096 stream=0x1234"
    ways = (
        "plain",
        "ptsz",
        "wrapper",
        "cooperative",
        "ex",
        "driver:plain",
        "driver:ex",
        "driver:cooperative",
    )
    script = "; ".join(f"launch 1 via={way} {shape}" for way in ways)
    script = f"dlopen {cuda.driver}; launch 1; say ready; wait; {script}"
    program = cuda.launch("shared", script, preexec_fn=into(group))
    _, _, trace = traced(machine, program, group)
    assert len(trace.events.time_ns) == len(ways)
    for shape_index, stream in zip(trace.events.shape, trace.events.stream, strict=True):
        at = trace.shapes[shape_index - 1]
        assert (at.grid_x, at.grid_y, at.grid_z) == (3, 2, 5)
        assert (at.block_x, at.block_y, at.block_z) == (64, 4, 2)
        assert at.shared_bytes == 4096
        assert stream == 0x1234 + 1


@pytest.mark.parametrize(
    ("variant", "level"), [("static", "runtime"), ("static_stripped", "driver"), ("other", "runtime")]
)
def test_a_runtime_is_found_wherever_it_is_linked(
    machine: Node, cuda: CudaStandIn, variant: str, level: str
) -> None:
    group = machine.job()
    program = cuda.launch(variant, "launch 1; say ready; wait; launch 10", preexec_fn=into(group))
    window, _, trace = traced(machine, program, group)
    assert window.state == "done"
    function = "cudaLaunchKernel" if level == "runtime" else "cuLaunchKernel"
    assert calls(trace) == {function: 10}
    assert level in {file.level for file in trace.files if file.symbols}


@pytest.mark.parametrize(
    ("variant", "script"),
    [("none", "say ready; wait"), ("static_stripped", "launch 1; say ready; wait; launch 1")],
)
def test_without_any_symbol_there_is_no_probe_point_and_no_trace(
    machine: Node, cuda: CudaStandIn, variant: str, script: str
) -> None:
    group = machine.job()
    with cuda.launch(variant, script, route="none", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group, seconds=1.0)
        assert window.end() == Trace()
        assert window.state == "no_probe_point"
        assert window.last.reason == "1 process: nothing of CUDA or NCCL is loaded"
        program.go()


def test_a_job_without_processes_has_no_targets(machine: Node) -> None:
    window = machine.window(machine.job())
    assert window.end() == Trace()
    assert window.state == "no_targets"


def test_copies_of_a_library_are_each_probed_once_and_links_are_one(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    group = machine.job()
    folders = [tmp_path / name for name in ("one", "two", "three")]
    for folder in folders[:2]:
        shutil.copytree(cuda.folder, folder, symlinks=True)
    for part in ("bin", "lib"):
        (folders[2] / part).mkdir(parents=True)
        for file in (folders[0] / part).iterdir():
            if file.is_symlink():
                (folders[2] / part / file.name).symlink_to(file.readlink())
            else:
                os.link(file, folders[2] / part / file.name)
    programs = [
        CudaStandIn(folder).launch("shared", "launch 1; say ready; wait; launch 10", preexec_fn=into(group))
        for folder in folders
    ]
    for program in programs:
        program.wait_for("ready")
    window = machine.window(group)
    window.until_open(targets=3)
    for program in programs:
        program.go()
        program.finish()
    trace = window.end(stop=True)
    assert calls(trace) == {"cudaLaunchKernel": 30}
    assert sum(file.level == "runtime" for file in trace.files) == 2


def test_a_library_that_is_loaded_in_the_window_is_followed(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    library = cuda.libraries / "libcudart.so"
    script = f"say ready; wait; dlopen {library}; say loaded; wait; launch 10"
    with cuda.launch("none", script, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until(lambda status: status.traced_share > 0)
        program.go()
        program.wait_for("loaded")
        window.until_open(targets=1)
        program.go()
        program.finish()
        assert calls(window.end(stop=True)) == {"cudaLaunchKernel": 10}


def test_all_processes_of_a_job_are_traced_and_those_without_cuda_are_named(
    machine: Node, cuda: CudaStandIn
) -> None:
    group = machine.job()
    shell = f"{cuda.program('launcher-shared')} 'launch 1; fork 2; say ready; wait; launch 5' & wait $!"
    with Program(
        ["/bin/sh", "-c", f"exec 3<&0; {shell.replace(' &', ' <&3 &')}"],
        cuda.environment(),
        preexec_fn=into(group),
    ) as program:
        for _ in range(2):
            program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=3)
        program.go(2)
        program.finish()
        trace = window.end(stop=True)
    launches = sorted((process.state, process.launches) for process in trace.processes)
    assert launches == [("no_cuda", 0), ("traced", 0), ("traced", 5), ("traced", 5)]
    assert calls(trace) == {"cudaLaunchKernel": 10}


def test_other_jobs_that_map_the_same_files_are_not_counted(machine: Node, cuda: CudaStandIn) -> None:
    mine, theirs = machine.job("mine"), machine.job("theirs")
    script = "launch 1; say ready; wait; launch 20"
    with (
        cuda.launch("shared", script, preexec_fn=into(mine)) as program,
        cuda.launch("shared", script, preexec_fn=into(theirs)) as other,
    ):
        program.wait_for("ready")
        other.wait_for("ready")
        window = machine.window(mine)
        window.until_open(targets=1)
        for each in (other, program):
            each.go()
            each.finish()
        trace = window.end(stop=True)
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert trace.foreign_hits >= 20
    assert {thread.pid for thread in trace.threads} == {program.pid}


def test_a_user_sees_what_runs_as_that_user_and_not_the_rest_of_the_job(
    machine: Node, cuda: CudaStandIn
) -> None:
    group = machine.job()
    uid = 65534
    Path(cuda.folder).parent.chmod(0o755)

    def as_the_user() -> None:
        into(group)()
        os.setuid(uid)

    script = "launch 1; say ready; wait; launch 20"
    with (
        cuda.launch("shared", script, preexec_fn=as_the_user) as program,
        cuda.launch("shared", script, preexec_fn=into(group)) as other,
    ):
        program.wait_for("ready")
        other.wait_for("ready")
        window = machine.window(group, uid=uid)
        window.until_open(targets=1)
        for each in (other, program):
            each.go()
            each.finish()
        trace = window.end(stop=True)
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert [process.pid for process in trace.processes] == [program.pid]
    assert {thread.pid for thread in trace.threads} == {program.pid}


@pytest.mark.parametrize("how", ["device", "stream", "event"])
def test_synchronisations_have_their_duration(machine: Node, cuda: CudaStandIn, how: str) -> None:
    group = machine.job()
    script = f"launch 1; say ready; wait; sync 10 how={how}"
    program = cuda.launch("shared", script, sync_us=20_000, preexec_fn=into(group))
    _, _, trace = traced(machine, program, group)
    (total,) = [total for total in trace.totals if total.calls]
    assert (total.category, total.calls, total.timed) == ("sync", 10, 10)
    durations = [duration - 1 for duration in trace.events.duration_ns if duration]
    assert len(durations) == 10
    assert sum(durations) == total.time_ns
    assert all(20_000_000 <= duration < 2_000_000_000 for duration in durations)
    assert trace.unpaired == 0


@pytest.mark.slow
def test_begins_without_ends_are_counted_and_have_no_duration(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with cuda.launch("shared", "launch 1; say ready; wait", preexec_fn=into(group)) as keeper:
        keeper.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        before = resident(window.process.pid)
        with cuda.start("crasher-shared", "longjmp", "sync", "10000", preexec_fn=into(group)) as program:
            program.go()
            program.finish()
        after = resident(window.process.pid)
        keeper.go()
        keeper.finish()
        trace = window.end(stop=True)
    (total,) = [total for total in trace.totals if total.calls]
    assert total.calls == 10_001  # the last one comes back, and may be seen to
    assert trace.unpaired == total.calls - total.timed >= 10_000
    assert sum(map(bool, trace.events.duration_ns)) == total.timed
    assert after - before < 5 << 20


def resident(pid: int) -> int:
    """Bytes of memory that are the process's."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("stacks", [False, True], ids=["without", "with"])
def test_python_stacks_come_with_launches_on_request(machine: Node, cuda: CudaStandIn, stacks: bool) -> None:
    group = machine.job()
    program = cuda.train("20", preexec_fn=into(group))
    _, (counts,), trace = traced(machine, program, group, stacks=stacks)
    assert calls(trace) == {"cudaLaunchKernel": counts.launches}
    if not stacks:
        assert not trace.traced_stacks
        return
    found = Counter[tuple[tuple[str, int], ...]]()
    for index in trace.events.stack:
        frames = [trace.frames[frame] for frame in trace.traced_stacks[index - 1].frames]
        found[tuple((frame.function.rpartition(".")[2], frame.line) for frame in frames)] += 1
    assert dict(found) == {
        tuple((name, line) for name, line in stack["frames"]): stack["launches"] for stack in counts.stacks
    }
    assert not trace.stacks_unresolved


def test_collectives_have_operation_bytes_and_communicator(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    kinds = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "bcast", "reduce", "send", "recv")
    script = "; ".join(f"collective {kind} 1024 3 type=7" for kind in kinds)
    program = cuda.launch(
        "shared",
        f"dlopen {cuda.nccl}; collective send 4 1; say ready; wait; {script}",
        preexec_fn=into(group),
    )
    _, (counts,), trace = traced(machine, program, group)
    for total in trace.totals:
        if total.category == "collective" and total.calls:
            assert total.bytes == 3 * 1024 * 4, total.function  # floats
            assert total.kind
    seen = {name: count for name, count in calls(trace).items() if name.startswith("nccl")}
    expected = {name: count for name, count in counts.calls.items() if name in seen}
    expected["ncclSend"] -= 1
    assert seen == expected
    assert all(target for target, f in zip(trace.events.target, trace.events.function, strict=True)
               if trace.functions[f].startswith("ncclAll"))  # fmt: skip


def test_nothing_is_attached_outside_a_window_and_nothing_is_left(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with cuda.launch("shared", "launch 1; say ready; wait; launch 1", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        before = breakpoints(program.pid)
        window = machine.window(group)
        window.until_open(targets=1)
        assert breakpoints(program.pid) > before
        window.process.kill()
        window.process.wait()
        deadline = time.monotonic() + 10
        while breakpoints(program.pid) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert breakpoints(program.pid) == before == 0
        program.go()


def breakpoints(pid: int) -> int:
    """Bytes of code in memory that are not those of the files that they are from."""
    count = 0
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, offset, _, inode, *path = line.split(None, 5)
            if "x" not in mode or inode == "0":
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            content = os.pread(memory.fileno(), end - start, start)
            file = Path(path[0]).read_bytes()[int(offset, 16) :][: end - start]
            count += sum(a != b for a, b in zip(content, file, strict=False))
    return count


def test_over_the_budget_the_probes_come_off_and_on_and_the_totals_are_those_of_the_spans(
    machine: Node, cuda: CudaStandIn
) -> None:
    group = machine.job()
    script = "launch 1; say ready; wait; launch 1000000 every_us=500"
    with cuda.launch("shared", script, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group, seconds=8.0, cost_share=0.003)
        window.until_open(targets=1)
        program.go()
        trace = window.end()
        program.finish(end=True)
    assert window.state == "done"
    assert len(trace.spans) > 1
    assert window.last.traced_share < 0.9
    traced = sum(span.to_ns - span.from_ns for span in trace.spans)
    assert traced == pytest.approx(
        window.last.traced_share * (window.last.to_ns - window.last.from_ns), rel=0.1
    )
    assert sum(total.calls for total in trace.totals) == trace.processes[0].calls
    # A gap is between launches of one span.
    assert sum(gap.count for gap in trace.gaps) <= trace.processes[0].launches - len(trace.spans)
    times = absolute(trace)
    assert all(any(span.from_ns <= t <= span.to_ns for span in trace.spans) for t in times)


def absolute(trace: Trace) -> list[int]:
    """When each event was, wall clock."""
    return [trace.base_ns + t for t in accumulate(trace.events.time_ns)]


def test_over_the_budget_a_window_is_closed_where_that_is_asked_for(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    script = "launch 1; say ready; wait; repeat 0; launch 1000"
    with cuda.launch("shared", script, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group, seconds=30.0, cost_share=0.01, over_cost="close")
        window.until_open(targets=1)
        program.go()
        trace = window.end()
        program.finish(end=True)
    assert window.state == "budget"
    assert "1.00%" in window.last.reason
    assert len(trace.spans) == 1


def test_events_past_the_limit_are_counted_and_the_totals_stay_exact(
    machine: Node, cuda: CudaStandIn
) -> None:
    group = machine.job()
    program = cuda.launch("shared", "launch 1; say ready; wait; launch 3000", preexec_fn=into(group))
    _, _, trace = traced(machine, program, group, max_events=1000)
    assert calls(trace) == {"cudaLaunchKernel": 3000}
    assert len(trace.events.time_ns) == 1000
    assert trace.events_lost == 2000
    assert sum(gap.count for gap in trace.gaps) == 2999


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["plain", "longjmp", "context", "thread", "fork"])
@pytest.mark.parametrize("call", ["launch", "wrapper", "copy", "sync"])
def test_a_window_never_changes_what_becomes_of_a_program(
    machine: Node, cuda: CudaStandIn, mode: str, call: str
) -> None:
    command = [str(cuda.program("crasher-shared")), mode, call, "20"]

    def runs(count: int, group: Path | None) -> list[tuple[int, str]]:
        """Exit code and output of each run."""
        found = []
        for _ in range(count):
            done = subprocess.run(
                command, env=cuda.environment(), input="\n", capture_output=True, text=True, timeout=60,
                preexec_fn=into(group) if group else None,
            )  # fmt: skip
            found.append((done.returncode, done.stdout))
        return found

    expected = runs(1, None)
    group = machine.job()
    with cuda.launch("shared", "launch 1; say ready; wait", preexec_fn=into(group)) as keeper:
        keeper.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        assert runs(50, group) == expected * 50
        assert expected[0][0] == 7  # it came to its end
        keeper.go()
        keeper.finish()
        trace = window.end(stop=True)
    assert sum(total.calls for total in trace.totals) >= 50


def test_a_window_ends_with_its_job(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with cuda.launch("shared", "launch 1; say ready; wait; launch 3", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        program.finish()
        trace = window.end()
    assert window.state == "done"
    assert window.last.reason == "the job has ended"
    assert calls(trace) == {"cudaLaunchKernel": 3}


def test_windows_begin_at_the_time_that_is_said(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with cuda.launch("shared", "launch 1; say ready; wait", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        start = time.time_ns() + 3 * 10**9
        window = machine.window(group, start_ns=start, seconds=0.5)
        trace = window.end()
        program.go()
    assert {status.state for status in window.statuses[:1]} == {1}
    assert 0 <= window.last.from_ns - start < 0.2e9
    assert abs(trace.spans[0].from_ns - start) < 0.5e9
