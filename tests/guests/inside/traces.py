"""A window of calls of CUDA functions on the kernel at hand, over programs that know what they have called.

Ends with 1 when a figure was wrong; what was compared is in /out/traces.json. In /payload/files lie the parts
of tests/ that are used here, and the stand-ins for CUDA: `cuda-calls`, and `cuda-jumps`, whose functions jump
to what does their work. Everything is in one window, since the beginning of one takes its time here.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, "/payload/files")
from figures import Book

from expanse_ebpf.kernel import gpu_calls, uprobes
from expanse_ebpf.wire.collector_pb2 import Trace
from tests.kernel.groups import ROOT
from tests.stand_ins.cuda import Counts, CudaStandIn, Program
from tests.tracing.windows import Node, calls, events, into, node

FILES = Path("/payload/files")
SHAPE = "grid=3,2,5 block=64,4,2 shared=4096 stream=0x1234"
SHAPED = ("plain", "wrapper", "cooperative", "ex", "driver:plain", "driver:ex", "driver:cooperative")
# A line for each way to call. The runtime loads the driver at the launch before.
WAYS = f"""
launch 5; launch 4 via=ptsz; launch 3 via=wrapper; launch 2 via=wrapper_ptsz; launch 6 via=cooperative
launch 7 via=ex; launch 3 via=driver:plain; launch 2 via=driver:ptsz; launch 1 via=driver:ex; graph 9
{"; ".join(f"launch 1 via={way} {SHAPE}" for way in SHAPED)}
copy h2d 4096 5; copy d2h 100 2; copy h2d 4096 5 async; copy2d h2d 128 4 3; peer 64 2; set 256 3
alloc 1024 2; alloc 10 1 how=managed; alloc 11 1 how=async; sync 3
""".strip().replace("\n", "; ")
# Long enough for an emulated machine to put a probe where the first one returns to, as a rule.
SYNC_US = 2_000_000
Stack = tuple[tuple[str, int], ...]


def refused(book: Book, machine: Node, reason: str) -> None:
    """Where calls cannot be told apart a window says so, and fails as nothing else."""
    window = machine.window(machine.job())
    book.holds("without the kernel's support there is no trace", window.end() == Trace())
    book.holds("the window has failed", window.state == "failed")
    book.holds(f"the reason: {window.last.reason!r}", window.last.reason == reason)


def start(cuda: dict[str, CudaStandIn], group: Path) -> dict[str, Program]:
    """Programs in the job, each ready for its calls: libraries that call and that jump, by both routes."""
    programs = {}
    for kind, made in cuda.items():
        script = f"dlopen {made.driver}; launch 1; say ready; wait; {WAYS}"
        for route in ("exported", "inner"):
            programs[f"{kind}, {route}"] = made.launch(
                "shared", script, route=route, sync_us=SYNC_US, preexec_fn=into(group)
            )
    programs["python"] = cuda["calls"].train("10", preexec_fn=into(group))
    for program in programs.values():
        program.wait_for("ready")
    return programs


def all_is_counted(book: Book, trace: Trace, counts: dict[str, Counts]) -> None:
    expected = Counter[str]()
    processes = {process.pid: process for process in trace.processes}
    for name, said in counts.items():
        own = Counter(said.calls)
        own["cudaLaunchKernel"] -= name != "python"  # the one before the window
        expected += own
        book.compare(f"{name}: calls", processes[said.pid].calls, own.total())
    found, told = calls(trace), events(trace)
    for function in sorted(expected.keys() | found.keys() | told.keys()):
        book.compare(f"{function}: calls", found.get(function, 0), expected[function])
        book.compare(f"{function}: events", told.get(function, 0), expected[function])
    book.compare("calls inside others", sum(total.nested for total in trace.totals), 1, float("inf"))
    book.nothing("events lost", trace.events_lost)
    book.nothing("hits of others", trace.foreign_hits)


def launches_have_their_shape(book: Book, trace: Trace, launchers: int) -> None:
    shapes = Counter[tuple[int, ...]]()
    for index, stream in zip(trace.events.shape, trace.events.stream, strict=True):
        if index:
            at = trace.shapes[index - 1]
            grid, block = (at.grid_x, at.grid_y, at.grid_z), (at.block_x, at.block_y, at.block_z)
            shapes[*grid, *block, at.shared_bytes, stream - 1] += 1
    wanted = (3, 2, 5, 64, 4, 2, 4096, 0x1234)
    book.compare("launches of that shape, on that stream", shapes[wanted], len(SHAPED) * launchers)
    print(shapes)


def synchronisations_last(book: Book, trace: Trace, launchers: int) -> None:
    (total,) = [total for total in trace.totals if total.category == "sync" and total.calls]
    book.compare("synchronisations", total.calls, 3 * launchers)
    # The end of a process's first one may have come before its probe, where the machine is slow.
    book.compare("synchronisations whose end was seen", total.timed, 2 * launchers, 3 * launchers)
    book.compare("time in them", total.time_ns, total.timed * SYNC_US * 1000, float("inf"))
    durations = [
        duration - 1
        for duration, function in zip(trace.events.duration_ns, trace.events.function, strict=True)
        if duration and trace.functions[function] == total.function  # copies have some as well
    ]
    book.compare("durations", len(durations), total.timed)
    book.compare("durations, in all", sum(durations), total.time_ns)


def stacks_are_pythons_own(book: Book, trace: Trace, said: Counts) -> None:
    found = Counter[Stack]()
    for index, thread in zip(trace.events.stack, trace.events.thread, strict=True):
        if trace.threads[thread].pid == said.pid:
            frames = [trace.frames[at] for at in trace.traced_stacks[index - 1].frames] if index else []
            found[tuple((frame.function.rpartition(".")[2], frame.line) for frame in frames)] += 1
    own = {tuple((name, line) for name, line in each["frames"]): each["launches"] for each in said.stacks}
    for stack in sorted(own.keys() | found.keys()):
        book.compare(f"launches from {stack}", found[stack], own.get(stack, 0))
    print(dict(trace.stacks_unresolved))


def main() -> int:
    book = Book()
    (ROOT / "unified").mkdir(exist_ok=True)  # an ordinary cgroup, where there is one hierarchy alone
    with node() as machine:
        reason = gpu_calls.supported()
        if reason:
            refused(book, machine, reason)
            return book.close("traces.json", method="", refused=reason)
        group = machine.job()
        cuda = {kind: CudaStandIn(FILES / f"cuda-{kind}") for kind in ("calls", "jumps")}
        programs = start(cuda, group)
        began = time.monotonic()
        window = machine.window(group, seconds=600.0, stacks=True)
        window.until_open(targets=len(programs))
        print(f"open after {time.monotonic() - began:.1f} s", flush=True)
        for program in programs.values():
            program.go()
        counts = {name: program.counts() for name, program in programs.items()}
        print(f"called after {time.monotonic() - began:.1f} s", flush=True)
        trace = window.end(stop=True)
    book.holds(f"the window is done: {window.last}", window.state == "done")
    all_is_counted(book, trace, counts)
    launches_have_their_shape(book, trace, len(programs) - 1)
    synchronisations_last(book, trace, len(programs) - 1)
    stacks_are_pythons_own(book, trace, counts["python"])
    book.holds("a kernel has a name or a reason", all(each.name or each.reason for each in trace.kernels))
    book.holds("probes as the kernel takes them", trace.price.method == uprobes.method())
    print(trace.price)
    return book.close("traces.json", method=trace.price.method, refused="")


if __name__ == "__main__":
    sys.exit(main())
