"""What is said of a window, as text and as JSON."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from expanse_ebpf.export.trace_reader import Reader, TraceError
from expanse_ebpf.export.trace_summary import Summary, gap_quantiles
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import Evidence, Trace, TraceState
from tests.export.profiles import unhurried
from tests.export.traces import (
    ALL_REDUCE,
    BEGIN,
    COMMUNICATOR,
    GEMM,
    LAUNCH,
    LIBRARY,
    MS,
    OWN,
    RELU,
    SECOND,
    TraceBuilder,
    known,
    odd,
    tables,
)


def text(*traces: Trace, width: int | None = None) -> str:
    return "\n".join(Summary.of(traces).lines(width))


# ---- the figures


def test_the_window_is_said_with_its_time_share_and_cost() -> None:
    content = Summary.of([known()]).as_json()
    assert content["window"] == "00000000deadbeef"
    assert content["job"] == "slurm/123"
    assert content["node"] == "gpu-1"
    assert content["state"] == "done"
    assert (content["from_ns"], content["to_ns"]) == (BEGIN, BEGIN + 10 * SECOND)
    assert content["traced_seconds"] == 8.0
    assert (content["traced_share"], content["cost_share"]) == (0.8, 0.004)
    assert content["evidence"] == {"GPU utilisation": 0.04}
    price = content["price"]
    assert (price["hits"], price["trap_ns"], price["program_ns_per_hit"]) == (2000, 900.0, 1200.0)
    assert content["targets"] == 1
    assert content["untraced"] == [
        {
            "node": "gpu-1",
            "pid": 4243,
            "command": "bash job.sh",
            "state": "no_cuda",
            "reason": "maps no CUDA library",
        }
    ]


def test_launches_are_exact_and_their_rate_is_of_the_traced_time() -> None:
    trace = known()
    trace.events.Clear()  # every event lost
    trace.events_lost = 1201
    content = Summary.of([trace]).as_json()
    assert content["launches"] == 800
    assert content["launches_per_second"] == 100.0
    assert content["launch_functions"] == {
        "cudaLaunchKernel": {"calls": 800, "nested": 800},
        "cudaGraphLaunch": {"calls": 1},
    }
    assert content["kernels"] == content["lines"] == []
    assert content["missing"]["events"] == "0 of 1201 were kept; the others are counted alone"


def test_kernels_and_lines_are_ranked_by_launches() -> None:
    content = Summary.of([known()]).as_json()
    assert content["kernels"] == [
        {"name": GEMM, "launches": 480},
        {"name": RELU, "launches": 240},
        {"name": "[kernel at 0x401230]", "launches": 80},
    ]
    assert content["unnamed_kernels"] == {"the file has no symbols": 80}
    # The library's line is charged to the program's that called it.
    assert content["lines"] == [
        {"function": "Net.forward", "file": OWN, "line": 20, "launches": 480},
        {"function": "Net.activate", "file": OWN, "line": 31, "launches": 240},
    ]
    assert content["lines_of_launches"] == 720
    assert content["stacks_unresolved"] == {"native_thread": 80}


def test_a_line_is_a_librarys_where_no_program_called_it() -> None:
    trace = known()
    for frame in trace.frames:
        frame.file = LIBRARY
    lines = Summary.of([trace]).as_json()["lines"]
    assert [(line["function"], line["launches"]) for line in lines] == [
        ("linear", 480),
        ("Net.activate", 240),
    ]


def test_copies_collectives_and_synchronisations_have_bytes_and_time() -> None:
    content = Summary.of([known()]).as_json()
    assert content["copies"] == {
        "host_to_device": {"calls": 80, "bytes": 80 << 20, "timed": 80, "seconds": 0.16},
        "device_to_host": {"calls": 80, "bytes": 80 * 4096},
    }
    assert content["collectives"] == {"all_reduce": {"calls": 80, "bytes": 80 << 22, "communicators": 1}}
    categories = content["categories"]
    assert categories["sync"] == {"calls": 80, "timed": 72, "seconds": 3.6}
    assert categories["set"] == {"calls": 80, "bytes": 80 * 512}
    assert categories["alloc"] == {"calls": 3, "bytes": 3 << 20}
    assert categories["free"] == {"calls": 2}
    assert content["sync_busiest_thread"] == "python (4242)"
    assert content["sync_busiest_thread_share"] == 0.45
    unseen = "8 of 160 ends unseen: the first call from each place is not watched yet"
    assert content["missing"]["times"] == unseen
    assert content["missing"]["/lib/libcuda.so.1"] == "read in part"


def test_communicators_are_told_apart_and_bytes_that_are_not_known_are_said() -> None:
    builder = TraceBuilder()
    tables(builder)
    trace = builder.trace
    for place in range(4):
        builder.event(place, ALL_REDUCE, target=COMMUNICATOR + place % 2)
    trace.totals.add(
        function="ncclAllReduce", category="collective", kind="all_reduce", calls=4, sized=3, bytes=30
    )
    content = Summary.of([trace]).as_json()
    expected = {"calls": 4, "bytes": 30, "calls_without_bytes": 1, "communicators": 2}
    assert content["collectives"]["all_reduce"] == expected
    assert "4  all reduce, 30 B in the 3 whose size is known, 2 communicators" in text(trace)


def test_what_is_not_known_is_absent() -> None:
    trace = Trace()
    trace.status.state = TraceState.TRACE_STATE_NO_TARGETS
    trace.status.reason = "no such job"
    content = Summary.of([trace]).as_json()
    absent = {
        "from_ns",
        "traced_seconds",
        "launches_per_second",
        "launch_gap_ns",
        "price",
        "job",
        "rule",
        "nodes",
    }
    assert not absent & content.keys()
    assert content["launches"] == 0
    assert content["state"] == "no_targets"
    assert "no_targets (no such job)" in text(trace)


def test_without_stacks_it_is_said_why_there_are_no_lines() -> None:
    trace = known()
    trace.stacks = False
    assert Summary.of([trace]).as_json()["missing"]["lines"] == "stacks were not asked for"


# ---- gaps


def gaps(*buckets: tuple[int, int]) -> Trace:
    trace = Trace()
    for up_to_ns, count in buckets:
        trace.gaps.add(up_to_ns=up_to_ns, count=count)
    return trace


def test_gaps_are_spread_evenly_over_their_bucket() -> None:
    assert gap_quantiles([gaps((100, 100))]) == {"median": 50.0, "p90": 90.0, "p99": 99.0}
    found = gap_quantiles([gaps((1000, 0), (2000, 80), (4000, 20))])
    assert found == {"median": 1625.0, "p90": 3000.0, "p99": 3900.0}
    assert gap_quantiles([gaps((4000, 20), (2000, 80), (1000, 0))]) == found  # in any order
    assert gap_quantiles([gaps((1000, 0), (2000, 80)), gaps((1000, 0), (2000, 0), (4000, 20))]) == found


def test_a_gap_in_a_bucket_without_a_bound_is_not_known() -> None:
    found = gap_quantiles([gaps((1000, 60), ((1 << 64) - 1, 40))])
    assert found["median"] == pytest.approx(833.3, abs=0.1)
    assert found["p90"] is None
    trace = known()
    trace.ClearField("gaps")
    trace.gaps.add(up_to_ns=1000, count=60)
    trace.gaps.add(up_to_ns=(1 << 64) - 1, count=40)
    assert Summary.of([trace]).as_json()["launch_gap_ns"].keys() == {"median"}
    assert "beyond the last bucket p90" in text(trace)


def test_without_a_gap_there_is_no_median() -> None:
    assert gap_quantiles([gaps(), gaps((1000, 0))]) == {}


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60))
@unhurried
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values: list[int]) -> None:
    bounds = [1 << exponent for exponent in range(11)]
    buckets = [
        (high, sum(low <= v < high for v in values)) for low, high in zip([0, *bounds], bounds, strict=False)
    ]
    found = gap_quantiles([gaps(*buckets)])
    for key, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99)):
        rank = next(r for r in range(1, len(values) + 1) if r >= share * len(values))
        true = sorted(values)[rank - 1]
        high = next(bound for bound in bounds if true < bound)
        assert (high // 2 if high > 1 else 0) <= (found[key] or 0) <= high


# ---- several nodes


def test_nodes_are_added_up_and_each_has_its_own_figures() -> None:
    content = Summary.of([known("gpu-1"), known("gpu-2")]).as_json()
    assert content["launches"] == 1600
    assert content["launches_per_second"] == 200.0  # at the same time
    assert content["targets"] == 2
    assert content["copies"]["host_to_device"]["bytes"] == 160 << 20
    assert content["kernels"][0] == {"name": GEMM, "launches": 960}
    assert "node" not in content
    assert [(n["node"], n["launches"], n["launches_per_second"]) for n in content["nodes"]] == [
        ("gpu-1", 800, 100.0),
        ("gpu-2", 800, 100.0),
    ]
    assert content["missing"]["gpu-2: times"].startswith("8 of 160 ends unseen")


def test_a_node_unlike_the_others_stands_out() -> None:
    slow = known("gpu-3")
    slow.totals[0].calls = 400
    lines = Summary.of([known("gpu-1"), slow, known("gpu-2")]).lines()
    nodes = [line for line in lines if line.startswith("node ")]
    assert nodes[0].startswith("node gpu-3: done, 400 launches, 50/s (0.50 of the median)")
    assert [line.split(":")[0] for line in nodes] == ["node gpu-3", "node gpu-1", "node gpu-2"]
    assert not any("of the median" in line for line in nodes[1:])
    assert lines[0] == "slurm/123 on 3 nodes, window 00000000deadbeef: done"


def test_a_node_that_saw_nothing_is_there_with_its_reason() -> None:
    other = Trace()
    other.node.name, other.status.reason = "gpu-2", "no CUDA library"
    other.status.state = TraceState.TRACE_STATE_NO_PROBE_POINT
    summary = Summary.of([known(), other])
    assert summary.as_json()["state"] == "done and no_probe_point"
    assert summary.lines()[-1] == "node gpu-2: no_probe_point, 0 launches (no CUDA library)"


# ---- as text


def test_the_text_says_it_all() -> None:
    trace = known()
    trace.status.rule = "gpu-idle"
    trace.evidence.append(Evidence(name="who", text="rank 0"))
    trace.foreign_hits, trace.events_lost = 12, 99
    assert text(trace).splitlines() == [
        "slurm/123 on gpu-1, window 00000000deadbeef: done",
        "opened by the rule gpu-idle: GPU utilisation 0.04, who rank 0",
        "2025-11-30 14:00:00 UTC, 10.0 s",
        "traced for 80.0% of it; cost the busiest thread 0.4% of its time",
        "2000 probe hits: 900 ns in the kernel and 1.2 µs in the tracer each",
        "1 process traced",
        "  not traced: 4243 bash job.sh: maps no CUDA library",
        "800 launches, 100/s, and 1 of graphs",
        "  from one to the next: 623 µs median, 64 ms p90, 122 ms p99",
        "        800  cudaLaunchKernel, 800 more inside other calls",
        "          1  cudaGraphLaunch",
        "kernels, of 800 launches (1201 of 1300 events were kept):",
        f"   60.0%  {GEMM}",
        f"   30.0%  {RELU}",
        "   10.0%  [kernel at 0x401230]",
        "  80 launches of kernels without a name: the file has no symbols",
        "Python lines, of 720 launches (1201 of 1300 events were kept) with a stack:",
        f"   66.7%  Net.forward  {OWN}:20",
        f"   33.3%  Net.activate  {OWN}:31",
        "launches without a stack: 80 native thread",
        "80 synchronisations, 3.60 s in the 72 whose end was seen",
        "  most in python (4242): 45.0% of the traced time",
        "copies:",
        "         80  host to device, 80.0 MiB, 160 ms in 80 of them",
        "         80  device to host, 320 KiB",
        "collectives:",
        "         80  all reduce, 320 MiB, 1 communicator",
        "80 fills, 40.0 KiB",
        "3 allocations, 3.0 MiB",
        "2 frees",
        "/lib/libcuda.so.1: read in part",
        "events: 1201 of 1300 were kept; the others are counted alone",
        "times: 8 of 160 ends unseen: the first call from each place is not watched yet",
        "12 hits by other jobs that map the same files",
    ]


def test_no_line_is_wider_than_asked_for() -> None:
    trace = known()
    trace.kernels[0].name = "长" * 200
    lines = text(trace, width=60).splitlines()
    assert max(len(line) for line in lines) == 60
    (wide,) = (line for line in lines if "长" in line)
    assert wide.endswith("长…")
    assert 58 <= len(wide) + wide.count("长") <= 60


def test_at_80_columns_no_main_figure_is_lost() -> None:
    trace = known()
    trace.threads[0].name = "x" * 15
    trace.frames[1].file = "/home/anna/" + "deep/" * 30 + "train.py"
    found = text(trace, width=80)
    for line in text(trace).splitlines():
        if "train.py" not in line and "libtorch" not in line:
            assert line in found
    assert "%  Net.forward  …" in found
    assert "/train.py:20\n" in found
    assert all(len(line) <= 80 for line in found.splitlines())
    nodes = [line for line in text(known("gpu-1"), known("gpu-2"), width=80).splitlines() if "node " in line]
    assert all("45.0% in syncs" in line for line in nodes[-2:])


def test_calls_that_were_only_inside_others_are_not_told_as_none() -> None:
    trace = known()
    trace.totals.add(function="cuLaunchKernel", category="launch", nested=1864)
    for category in ("copy", "set", "alloc", "free", "collective"):
        trace.totals.add(function=category, category=category, kind="device_to_device", nested=3)
    trace.totals.add(function="never", category="launch")
    found = text(trace)
    assert "  cuLaunchKernel: only inside other calls (1864)" in found.splitlines()
    assert "never" not in found
    assert "device to device" not in found
    only = Trace()
    for category in ("copy", "set", "alloc", "free", "sync", "collective"):
        only.totals.add(function=category, category=category, kind="x", nested=3)
    assert [line for line in text(only).splitlines() if "0" in line] == ["0 processes traced", "0 launches"]


@pytest.mark.parametrize(
    ("unseen", "calls", "told"),
    [(2, 500, False), (5, 500, False), (6, 5000, True), (2, 30, True), (0, 0, False)],
)
def test_a_few_ends_that_were_not_seen_are_not_worth_a_word(unseen: int, calls: int, told: bool) -> None:
    trace = known()
    trace.unpaired = unseen
    for total in trace.totals:
        total.timed = 0
        if total.category == "sync":
            total.calls, total.timed = calls, calls - unseen
    content = Summary.of([trace]).as_json()
    assert ("times" in content["missing"]) == told
    assert content["unpaired"] == unseen


def test_without_a_gpus_utilisation_it_is_said_why() -> None:
    trace = known()
    assert "GPU utilisation" not in Summary.of([trace]).as_json()["missing"]
    del trace.counters[0]
    assert Summary.of([trace]).as_json()["missing"]["GPU utilisation"] == (
        "NVML tells it of no GPU that the job holds"
    )
    del trace.counters[:]
    missing = Summary.of([trace, known("gpu-2")]).as_json()["missing"]
    assert missing["gpu-1: GPU utilisation"] == "no figures came while the window was open"
    assert "gpu-2: GPU utilisation" not in missing


def test_a_name_cannot_steer_a_terminal() -> None:
    trace = known()
    for place in ("evil\x1b[2J", "\u202eevil"):
        trace.kernels[0].name = trace.frames[1].function = trace.threads[0].name = place
        trace.status.reason = trace.processes[1].command = trace.processes[1].reason = place
        trace.node.name = trace.totals[0].function = trace.totals[1].kind = place
        assert all(line.isprintable() for line in Summary.of([trace, known()]).lines())


# ---- odd traces


def test_no_trace_at_all_is_refused() -> None:
    with pytest.raises(TraceError, match="no trace"):
        Summary.of([])


def test_a_trace_that_does_not_hold_together_is_refused() -> None:
    trace = known()
    trace.events.kernel[0] = 99
    with pytest.raises(TraceError, match=r"events\.kernel points beyond"):
        Summary.of([known(), trace])


@given(odd(), odd())
@unhurried
def test_odd_traces_are_summed_up_or_refused(one: Trace, other: Trace) -> None:
    with contextlib.suppress(TraceError):
        for traces in ([one], [one, other]):
            summary = Summary.of(traces)
            json.dumps(summary.as_json(), allow_nan=False)
            for width in (None, 1, 40):
                assert all(clean(line, 1 << 20) == line for line in summary.lines(width))


@given(odd())
@unhurried
def test_every_event_of_an_odd_trace_is_read_once(trace: Trace) -> None:
    try:
        reader = Reader(trace)
    except TraceError:
        assume(False)
    events = list(reader.events())
    assert len(events) == len(reader)
    assert sorted(event.time_ns for event in events) == [event.time_ns for event in events]
    assert sorted(event.thread for event in events) == sorted(trace.events.thread)


def test_a_launch_that_took_its_own_time_is_counted_once() -> None:
    builder = TraceBuilder()
    tables(builder)
    builder.event(0, LAUNCH, kernel=0, duration=MS)
    builder.trace.totals.add(function="cudaLaunchKernel", category="launch", calls=1)
    content = Summary.of([builder.trace]).as_json()
    assert (content["launches"], content["kernels_of_launches"]) == (1, 1)
