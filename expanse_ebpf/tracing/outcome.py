"""Writing what a window has seen into its Trace."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import expanse_ebpf
from expanse_ebpf.kernel.gpu_calls import gap_bound_ns
from expanse_ebpf.text import clean
from expanse_ebpf.tracing.functions import COLLECTIVES, COPY_KINDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from expanse_ebpf.kernel.gpu_calls import GpuCalls, Thread, Total
    from expanse_ebpf.tracing.calibration import Price
    from expanse_ebpf.tracing.kernel_names import KernelNames
    from expanse_ebpf.tracing.probes import WindowProbes
    from expanse_ebpf.tracing.recording import Recording
    from expanse_ebpf.tracing.targets import Targets
    from expanse_ebpf.wire.collector_pb2 import Trace

_LONGEST_TEXT = 256
_MOST_REASONS = 3  # that are told in one sentence
_IN_WORDS = {"no_cuda": "nothing of CUDA or NCCL is loaded", "exited": "it has exited"}


class Seen(NamedTuple):
    """All that a window has seen."""

    calls: GpuCalls
    probes: WindowProbes
    targets: Targets
    recording: Recording
    names: KernelNames
    threads: Mapping[int, str]  # names, by row
    unresolved: Mapping[str, int]  # launches by why their stack was not walked
    price: Price


def fill(trace: Trace, seen: Seen) -> None:
    """Write everything. To be called after the probes have been taken away."""
    calls, probes, recording = seen.calls, seen.probes, seen.recording
    trace.version = expanse_ebpf.__version__
    wall_ns = time.time_ns() - time.monotonic_ns()
    base_ns = probes.spans[0][0] if probes.spans else time.monotonic_ns()
    trace.base_ns = base_ns + wall_ns
    for begin, end in probes.spans:
        trace.spans.add(from_ns=begin + wall_ns, to_ns=end + wall_ns)
    threads = calls.threads()
    _processes(trace, seen.targets, threads, probes.refused)
    for thread in threads:
        name = seen.threads.get(thread.row, "")
        trace.threads.add(
            tid=thread.tid, pid=thread.pid, name=name, hits=thread.hits, launches=thread.launches
        )
    _totals(trace, calls, probes)
    for bucket, count in calls.gaps():
        trace.gaps.add(up_to_ns=gap_bound_ns(bucket), count=count)
    trace.unpaired = sum(total.calls - total.timed for total in _timed(calls, probes))
    trace.foreign_hits = calls.window.foreign_hits
    trace.events_lost = calls.window.events_lost + recording.lost
    for reasons in (seen.unresolved, recording.unresolved):
        for reason, count in reasons.items():
            trace.stacks_unresolved[reason] += count
    _price(trace, seen, threads)
    trace.functions.extend(counted.function.symbol for counted in probes.counted)
    recording.fill(trace, base_ns, range(len(threads)), _kernels(trace, recording, seen.names))


def _price(trace: Trace, seen: Seen, threads: Sequence[Thread]) -> None:
    price, probes = trace.price, seen.probes
    price.emulated_ns, price.stepped_ns = seen.price
    price.method, price.points = seen.calls.method, probes.most
    price.hits = sum(thread.hits for thread in threads)
    price.stepped_hits = sum(thread.stepped for thread in threads)
    price.program_ns = sum(thread.program_ns for thread in threads)
    if price.hits:
        price.trap_ns = seen.price.traps(price.hits, price.stepped_hits) / price.hits
    price.attach_ms, price.detach_ms = probes.attach_ns / 1e6, probes.detach_ns / 1e6


def _kernels(trace: Trace, recording: Recording, names: KernelNames) -> list[int]:
    """Write the kernels; the index that each of the recording's has there."""
    indexes: dict[object, int] = {}
    found = []
    for kernel in recording.kernels:
        known = names.name(kernel.pid, kernel.address, kernel.how == "handle")
        # A file's kernel is the same in all processes.
        key = known.key if known.name or known.module else kernel
        if key not in indexes:
            indexes[key] = len(indexes)
            # The address is in the function that launches it, which bears its name: see Recording.
            reason = "" if kernel.how == "caller" and known.name else known.reason
            trace.kernels.add(name=known.name, module=known.module, address=kernel.address, reason=reason)
        found.append(indexes[key])
    return found


def _processes(
    trace: Trace,
    targets: Targets,
    threads: Sequence[Thread],
    refused: Mapping[str, Mapping[str, str]],
) -> None:
    files: dict[tuple[int | str, ...], int] = {}
    for file in targets.files:
        why = file.reason
        for symbol, reason in list(refused.get(file.path, {}).items())[:_MOST_REASONS]:
            why = f"{why}; {symbol}: {reason}".removeprefix("; ")
        files[file.key] = len(files)
        trace.files.add(
            path=clean(file.path, _LONGEST_TEXT),
            level="+".join(file.levels),
            symbols=len(file.points) - len(refused.get(file.path, {})),
            reason=why,
        )
    by_process: dict[int, list[Thread]] = {}
    for thread in threads:
        by_process.setdefault(thread.pid, []).append(thread)
    for view in targets.views.values():
        own = by_process.pop(view.pid, [])
        trace.processes.add(
            pid=view.pid,
            command=view.command,
            state=view.state,
            reason=view.reason,
            files=[files[key] for key in view.files if key in files],
            calls=sum(thread.calls for thread in own),
            launches=sum(thread.launches for thread in own),
        )
    # Others have called, though nobody has looked at them.
    for pid, own in by_process.items():
        trace.processes.add(
            pid=pid,
            state="exited" if pid else "unreadable",
            reason="it came and went between two looks" if pid else "its process id is not seen from here",
            calls=sum(thread.calls for thread in own),
            launches=sum(thread.launches for thread in own),
        )


def _totals(trace: Trace, calls: GpuCalls, probes: WindowProbes) -> None:
    for function, first, kinds in probes.counted:
        if function.category == "load":
            continue
        for kind in range(kinds):
            total = calls.total(first + kind)
            if total.calls or total.nested:
                trace.totals.add(
                    function=function.symbol,
                    category=function.category,
                    kind=kind_name(function.category, kind if kinds > 1 else function.kind),
                    **total._asdict(),
                )


def _timed(calls: GpuCalls, probes: WindowProbes) -> Iterator[Total]:
    for function, first, kinds in probes.counted:
        if function.timed and function.category != "load":
            yield from (calls.total(first + kind) for kind in range(kinds))


def kind_name(category: str, kind: int) -> str:
    """The name of a copy's or a collective's kind; "" where it has none."""
    names = {"copy": COPY_KINDS, "collective": COLLECTIVES}.get(category, ())
    return names[kind] if 0 <= kind < len(names) else ""


def thread_name(pid: int, tid: int) -> str:
    """As /proc has it; "" of one that has ended."""
    with suppress(OSError), open(f"/proc/{pid}/task/{tid}/comm", "rb") as file:
        return clean(file.read(64).rstrip(b"\n"), 32)
    return ""


def cut_short(calls: GpuCalls, targets: Targets, probes: WindowProbes) -> str:
    """What is missing in a trace that should be there; empty when nothing is."""
    said = []
    if calls.window.unplaced:
        said.append(f"{calls.window.unplaced} calls are not counted: too many threads have called")
    if targets.left_out:
        said.append(f"{targets.left_out} processes were not looked at: the job has too many")
    if calls.window.sites_lost or probes.sites.refused:
        count = calls.window.sites_lost + sum(probes.sites.refused.values())
        why = next(iter(probes.sites.refused), "too many places")
        said.append(f"the end of calls is not seen at {count} places: {why}")
    return "; ".join(said)


def why_no_probe_point(targets: Targets) -> str:
    """In one sentence, why nothing could be probed."""
    reasons: dict[str, int] = {}
    for view in targets.views.values():
        reason = view.reason or _IN_WORDS.get(view.state, view.state.replace("_", " "))
        reasons[reason] = reasons.get(reason, 0) + 1
    count = len(targets.views)
    said = [
        reason if number == count else f"{reason} ({number} of {count})"
        for reason, number in list(reasons.items())[:_MOST_REASONS]
    ]
    return f"{count} process{'' if count == 1 else 'es'}: {'; '.join(said)}"
