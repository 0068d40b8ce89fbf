"""Perfetto's file format: read back, and given to Perfetto's own trace processor."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as form

from expanse_ebpf.export import perfetto
from expanse_ebpf.export.trace_reader import TraceError
from expanse_ebpf.wire.collector_pb2 import Trace
from tests.export.browser import Browser
from tests.export.profiles import unhurried
from tests.export.trace_processor import TraceProcessor
from tests.export.traces import (
    BEGIN,
    COMMUNICATOR,
    COPY,
    GEMM,
    LAUNCH,
    MS,
    OWN,
    SECOND,
    STREAM,
    SYNC,
    TraceBuilder,
    known,
    large,
    odd,
    tables,
)

Load = Callable[[bytes], TraceProcessor]
BEGIN_TYPE, END_TYPE, INSTANT_TYPE, COUNTER_TYPE = 1, 2, 3, 4


class Seen(NamedTuple):
    """An event as the file has it, its numbers looked up."""

    time: int
    track: int
    type: int
    name: str
    category: str
    arguments: dict[str, Any]
    stack: list[tuple[str, str, int]]  # outermost first
    value: float


def read(data: bytes) -> tuple[dict[int, Any], list[Seen]]:
    """Descriptors of tracks by their number, and events in the order of the file."""
    tracks: dict[int, Any] = {}
    events: list[Seen] = []
    interned: dict[tuple[int, str, int], Any] = {}
    for packet in form.Trace.FromString(data).packet:
        sequence = packet.trusted_packet_sequence_id
        if packet.sequence_flags & 1:
            assert packet.trace_packet_defaults.timestamp_clock_id == 1
            assert not any(key[0] == sequence for key in interned)
        for table, entries in packet.interned_data.ListFields():
            for entry in entries:
                assert interned.setdefault((sequence, table.name, entry.iid), entry) is entry
        if packet.HasField("track_descriptor"):
            described = packet.track_descriptor
            assert described.uuid not in tracks
            assert not described.parent_uuid or described.parent_uuid in tracks
            tracks[described.uuid] = described
        elif packet.HasField("track_event"):
            assert packet.track_event.track_uuid in tracks
            events.append(seen(packet, lambda table, iid, at=sequence: interned[at, table, iid]))  # type: ignore[misc]
    return tracks, events


def seen(packet: Any, look_up: Callable[[str, int], Any]) -> Seen:
    event = packet.track_event
    arguments = {}
    for argument in event.debug_annotations:
        field = argument.WhichOneof("value")
        value = getattr(argument, field)
        if field == "string_value_iid":
            value = look_up("debug_annotation_string_values", value).str.decode()
        arguments[look_up("debug_annotation_names", argument.name_iid).name] = value
    stack = []
    if event.callstack_iid:
        for iid in look_up("callstacks", event.callstack_iid).frame_ids:
            frame = look_up("frames", iid)
            look_up("mappings", frame.mapping_id)
            function = look_up("function_names", frame.function_name_id).str.decode()
            stack.append(
                (function, look_up("source_paths", frame.source_path_iid).str.decode(), frame.line_number)
            )
    return Seen(
        packet.timestamp,
        event.track_uuid,
        event.type,
        look_up("event_names", event.name_iid).name if event.name_iid else "",
        look_up("event_categories", event.category_iids[0]).name if event.category_iids else "",
        arguments,
        stack,
        event.double_counter_value,
    )


def by_track(events: list[Seen]) -> dict[int, list[Seen]]:
    found: dict[int, list[Seen]] = defaultdict(list)
    for event in events:
        found[event.track].append(event)
    return found


def check_order(events: list[Seen]) -> None:
    """On each track time does not go back, and slices end as many times as they begin, never before."""
    for on_track in by_track(events).values():
        assert all(one.time <= other.time for one, other in itertools.pairwise(on_track))
        step = {BEGIN_TYPE: 1, END_TYPE: -1}
        depths = list(itertools.accumulate(step.get(event.type, 0) for event in on_track))
        assert min(depths) >= 0
        assert depths[-1] == 0


# ---- read back


def test_tracks_are_named_after_processes_threads_and_what_they_show() -> None:
    tracks, events = read(perfetto.dumps([known()]))
    processes = {t.process.pid: t.process for t in tracks.values() if t.HasField("process")}
    assert {pid: p.process_name for pid, p in processes.items()} == {
        4242: "python train.py",
        4243: "bash job.sh",
    }
    assert list(processes[4242].process_labels) == ["slurm/123", "gpu-1"]
    threads = {
        (t.thread.pid, t.thread.tid): t.thread.thread_name for t in tracks.values() if t.HasField("thread")
    }
    assert threads == {(4242, 4242): "python", (4242, 4250): "pt_autograd_0"}
    (node,) = (t.uuid for t in tracks.values() if t.name == "node gpu-1")
    below = {t.name for t in tracks.values() if t.parent_uuid == node}
    assert below == {"window", "probes in place", "GPU 0 utilisation", "CPU cores", "launches"}
    units = {t.name: t.counter.unit_name for t in tracks.values() if t.HasField("counter")}
    assert units == {"GPU 0 utilisation": "%", "CPU cores": "cores", "launches": "1/s"}
    check_order(events)


def test_a_launch_is_an_instant_that_says_where_and_how() -> None:
    _, events = read(perfetto.dumps([known()]))
    launches = [event for event in events if event.category == "launch"]
    assert len(launches) == 800
    gemm = next(event for event in launches if event.name == GEMM and "stream" in event.arguments)
    assert gemm.type == INSTANT_TYPE
    assert gemm.time == BEGIN + 2 * SECOND + 10 * MS
    assert gemm.arguments | {"python": ""} == {
        "function": "cudaLaunchKernel",
        "module": "/opt/venv/lib/libtorch_cuda.so",
        "grid": "256 x 2 x 1",
        "block": "128 x 1 x 1",
        "shared_bytes": 4096,
        "stream": 0,
        "python": "",
    }
    assert gemm.arguments["python"].endswith(f"← Net.forward ({OWN}:20) ← <module> ({OWN}:52)")
    assert gemm.stack[:2] == [("<module>", OWN, 52), ("Net.forward", OWN, 20)]
    assert gemm.stack[2][0] == "linear"
    relu = next(event for event in launches if event.name.startswith("relu"))
    assert relu.arguments["stream"] == STREAM
    assert relu.arguments["python"].endswith("← …")  # it was cut
    nameless = next(event for event in launches if event.name == "[kernel at 0x401230]")
    assert nameless.arguments["no name because"] == "the file has no symbols"
    assert not nameless.stack
    assert "python" not in nameless.arguments


def test_calls_whose_end_was_seen_are_slices_and_others_say_so() -> None:
    tracks, events = read(perfetto.dumps([known()]))
    (main,) = (uuid for uuid, t in tracks.items() if t.thread.tid == 4242)
    on_main = by_track(events)[main]
    durations: dict[str, list[int]] = defaultdict(list)
    began: list[Seen] = []
    for event in on_main:
        if event.type == BEGIN_TYPE:
            began.append(event)
        elif event.type == END_TYPE:
            first = began.pop()
            durations[first.name].append(event.time - first.time)
    assert durations == {"cudaMemcpy": [2 * MS] * 80, "cudaDeviceSynchronize": [50 * MS] * 72}
    open_ended = [event for event in on_main if event.arguments.get("end") == "not seen"]
    assert Counter(event.name for event in open_ended) == {"cudaDeviceSynchronize": 8}
    assert {event.type for event in open_ended} == {INSTANT_TYPE}
    copies = {e.name: e.arguments for e in events if e.category == "copy"}
    assert copies["cudaMemcpy"]["kind"] == "host_to_device"
    assert copies["cudaMemcpy"]["bytes"] == 1 << 20
    assert copies["cudaMemcpyAsync"] == {"kind": "device_to_host", "bytes": 4096, "stream": STREAM}
    (reduced,) = {tuple(e.arguments.items()) for e in events if e.category == "collective"}
    expected = {"stream": STREAM, "bytes": 1 << 22, "operation": "all_reduce", "communicator": COMMUNICATOR}
    assert dict(reduced) == expected
    assert [e.arguments["bytes"] for e in events if e.category == "set"] == [512] * 80
    assert [e.arguments["graph"] for e in events if e.category == "graph"] == [0x7F0000002000]


def test_where_nothing_was_traced_there_is_no_launch_rate_and_no_span() -> None:
    tracks, events = read(perfetto.dumps([known()]))
    names = {uuid: track.name for uuid, track in tracks.items()}
    spans = [e.time for e in events if names[e.track] == "probes in place"]
    assert spans == [BEGIN + at * SECOND for at in (2, 5, 5, 10)]
    rate = [(e.time, e.value) for e in events if names[e.track] == "launches"]
    assert [time for time, _ in rate] == [BEGIN + at * SECOND // 10 for at in range(20, 100)]
    assert {value for _, value in rate[:-1]} == {100.0}
    assert rate[-1][1] == 110.0  # the graph's
    utilisation = [(e.time, e.value) for e in events if names[e.track] == "GPU 0 utilisation"]
    assert utilisation == [(BEGIN + at * SECOND, 4.0 + at) for at in range(10)]
    (window,) = (e for e in events if e.name == "window 00000000deadbeef")
    assert window.arguments["traced_share"] == 0.8
    assert window.arguments["evidence GPU utilisation"] == 0.04
    assert window.arguments["state"] == "done"


def test_spans_that_overlap_are_one() -> None:
    builder = TraceBuilder()
    for begin, end in ((5, 7), (0, 2), (1, 4), (2, 3), (7, 8)):
        builder.trace.spans.add(from_ns=BEGIN + begin, to_ns=BEGIN + end)
    tracks, events = read(perfetto.dumps([builder.trace]))
    (spans,) = (uuid for uuid, track in tracks.items() if track.name == "probes in place")
    assert [e.time - BEGIN for e in by_track(events)[spans]] == [0, 4, 5, 7, 7, 8]


def test_slices_that_overlap_on_one_thread_nest() -> None:
    builder = TraceBuilder()
    tables(builder)
    builder.event(0, COPY, duration=100)
    builder.event(50, SYNC, duration=500)  # seems to end after what it is in
    builder.event(60, LAUNCH, kernel=0)
    builder.event(60, COPY, duration=0)
    builder.event(70, SYNC, duration=1 << 62, thread=1)
    trace = builder.trace
    trace.ClearField("spans")
    tracks, events = read(perfetto.dumps([trace]))
    check_order(events)
    (main,) = (uuid for uuid, t in tracks.items() if t.thread.tid == 4242)
    ends = [e.time - BEGIN for e in by_track(events)[main] if e.type == END_TYPE]
    assert ends == [60, 100, 100]
    assert max(e.time for e in events) < 1 << 63


def test_equal_process_ids_of_two_nodes_stay_apart() -> None:
    data = perfetto.dumps([known("gpu-1"), known("gpu-2", begin=BEGIN + 5 * MS)])
    tracks, events = read(data)
    names = sorted(t.process.process_name for t in tracks.values() if t.process.pid == 4242)
    assert names == ["python train.py (gpu-1)", "python train.py (gpu-2)"]
    assert {packet.machine_id for packet in form.Trace.FromString(data).packet} == {0, 1}
    assert sum(event.category == "launch" for event in events) == 1600
    check_order(events)


def test_names_out_of_a_trace_cannot_steer_anything() -> None:
    trace = known()
    trace.kernels[0].name = "evil\x1b[31m\u202e" + "x" * 5000
    _, events = read(perfetto.dumps([trace]))
    (kernel,) = {e.name for e in events if e.name.startswith("evil")}
    assert kernel.isprintable()
    assert len(kernel) <= 1024


def test_a_trace_without_any_event_is_a_file_too() -> None:
    _, events = read(perfetto.dumps([Trace()]))
    assert events == []
    assert perfetto.dumps([]) == b""


def damaged() -> Generator[tuple[Trace, str]]:
    for column in ("thread", "function", "kernel", "shape", "stack"):
        trace = known()
        getattr(trace.events, column)[3] = 99
        yield trace, f"events.{column} points beyond"
    for column in ("thread", "function", "duration_ns", "kind"):
        trace = known()
        getattr(trace.events, column).append(0)
        yield trace, f"events.{column} has 1202 entries instead of 1201"
    trace = known()
    trace.traced_stacks[0].frames.append(4)
    yield trace, "traced_stacks.frames points beyond"
    trace = known()
    trace.counters[0].value.append(1.0)
    yield trace, "counters.value has 11 entries"
    for delta in (-(1 << 62), (1 << 63) - 1):
        trace = known()
        trace.events.time_ns[2] = delta
        yield trace, "a time in it is out of range"
    trace = known()
    trace.threads[0].tid = 1 << 31
    yield trace, "a process id in it is out of range"
    trace = known()
    trace.spans[0].to_ns = 1
    yield trace, "ends before it begins"


@pytest.mark.parametrize(
    ("trace", "reason"), list(damaged()), ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_trace_that_does_not_hold_together_is_refused_in_one_line(trace: Trace, reason: str) -> None:
    with pytest.raises(TraceError, match=reason) as caught:
        next(perfetto.chunks([known(), trace]))  # before anything is written
    assert "\n" not in str(caught.value)


@given(odd())
@unhurried
def test_an_odd_trace_is_written_in_order_or_refused(trace: Trace) -> None:
    with contextlib.suppress(TraceError):
        _, events = read(perfetto.dumps([trace]))
        check_order(events)
        count = len(trace.events.time_ns)
        assert sum(event.category != "" for event in events) == count


def test_events_out_of_order_are_put_in_order() -> None:
    builder = TraceBuilder()
    tables(builder)
    for at in (300, 100, 200):
        builder.event(at, LAUNCH, kernel=0)
    _, events = read(perfetto.dumps([builder.trace]))
    assert [e.time - BEGIN for e in events if e.name == GEMM] == [100, 200, 300]


def test_a_large_trace_is_written_in_pieces() -> None:
    sizes = [len(chunk) for chunk in perfetto.chunks([large(20_000)])]
    assert max(sizes) < 1 << 20
    assert len(sizes) >= 10


# ---- Perfetto's own word


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Generator[Browser]:
    opened = Browser(tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


@pytest.fixture
def load(browser: Browser, tmp_path: Path) -> Generator[Load]:
    loaded: list[TraceProcessor] = []

    def processor(data: bytes) -> TraceProcessor:
        loaded.append(TraceProcessor(browser, tmp_path, data))
        return loaded[-1]

    yield processor
    for one in loaded:
        one.close()


def errors(processor: TraceProcessor) -> dict[str, int]:
    rows = processor.query("select name, value from stats where severity != 'info' and value > 0")
    return {row["name"]: row["value"] for row in rows}


def without_stacks(data: bytes) -> bytes:
    """Without what Perfetto reads since its version 53 alone; the processor here is one older."""
    file = form.Trace.FromString(data)
    for packet in file.packet:
        packet.track_event.ClearField("callstack_iid") if packet.HasField("track_event") else None
    return bytes(file.SerializeToString())


@pytest.mark.slow
def test_the_trace_processor_reads_it_without_a_complaint(load: Load) -> None:
    processor = load(without_stacks(perfetto.dumps([known()])))
    assert errors(processor) == {}
    rows = processor.query(
        "select thread.name as thread, process.pid, slice.category, count(*) as n, sum(slice.dur) as dur"
        " from slice join thread_track on thread_track.id = slice.track_id join thread using (utid)"
        " join process using (upid) group by 1, 2, 3"
    )
    found = {(row["thread"], row["pid"], row["category"]): (row["n"], row["dur"]) for row in rows}
    assert found == {
        ("python", 4242, "launch"): (720, 0),
        ("python", 4242, "copy"): (160, 160 * MS),
        ("python", 4242, "set"): (80, 0),
        ("python", 4242, "collective"): (80, 0),
        ("python", 4242, "sync"): (80, 3600 * MS),
        ("python", 4242, "graph"): (1, 0),
        ("pt_autograd_0", 4242, "launch"): (80, 0),
    }
    assert processor.query("select count(*) as n from slice where dur < 0 or depth > 0") == [{"n": 0}]
    (bounds,) = processor.query("select start_ts, end_ts from trace_bounds")
    assert bounds == {"start_ts": BEGIN, "end_ts": BEGIN + 10 * SECOND}
    rows = processor.query(
        "select t.name, t.unit, count(*) as n, avg(value) as mean from counter"
        " join counter_track t on t.id = counter.track_id group by 1, 2"
    )
    assert {row["name"]: (row["unit"], row["n"], round(row["mean"], 3)) for row in rows} == {
        "GPU 0 utilisation": ("%", 10, 8.5),
        "CPU cores": ("cores", 10, 1.0),
        "launches": ("1/s", 80, 100.125),
    }
    rows = processor.query(
        "select key, display_value as value from slice join args using (arg_set_id)"
        f" where slice.name = '{GEMM}' and ts = {BEGIN + 2 * SECOND + 10 * MS}"
    )
    arguments = {row["key"]: row["value"] for row in rows}
    assert arguments["debug.grid"] == "256 x 2 x 1"
    assert arguments["debug.shared_bytes"] == "4096"
    assert "Net.forward" in arguments["debug.python"]
    rows = processor.query(
        "select slice.ts, slice.dur from slice join track on track.id = slice.track_id"
        " where track.name = 'probes in place' order by ts"
    )
    assert [(row["ts"] - BEGIN, row["dur"]) for row in rows] == [
        (2 * SECOND, 3 * SECOND),
        (5 * SECOND, 5 * SECOND),
    ]


@pytest.mark.slow
def test_the_trace_processor_keeps_nodes_apart_on_one_line_of_time(load: Load) -> None:
    later = known("gpu-2", begin=BEGIN + 5 * MS)
    processor = load(without_stacks(perfetto.dumps([known(), later])))
    assert errors(processor) == {}
    rows = processor.query(
        "select process.name, count(*) as n, min(ts) as first from slice"
        " join thread_track on thread_track.id = slice.track_id join thread using (utid)"
        " join process using (upid) where category = 'launch' group by 1 order by 1"
    )
    assert [(row["name"], row["n"], row["first"] - BEGIN) for row in rows] == [
        ("python train.py (gpu-1)", 800, 2010 * MS),
        ("python train.py (gpu-2)", 800, 2015 * MS),
    ]


@pytest.mark.slow
def test_the_trace_processor_knows_the_stacks(load: Load) -> None:
    """They are given to it as samples: those of events are read since version 53, by the same tables."""
    data = perfetto.dumps([known()])
    # What it does not know yet is counted as an extension; nothing else is amiss.
    assert errors(load(data)) == {"unknown_extension_fields": 800}
    file = form.Trace.FromString(data)
    for packet in file.packet:
        stack = packet.track_event.callstack_iid
        if stack:
            packet.ClearField("track_event")
            packet.perf_sample.pid = packet.perf_sample.tid = 4242
            packet.perf_sample.callstack_iid = stack
    processor = load(file.SerializeToString())
    assert errors(processor) == {}
    rows = processor.query(
        "select f.name, count(*) as n from perf_sample join stack_profile_callsite c on c.id = callsite_id"
        " join stack_profile_frame f on f.id = c.frame_id group by 1"
    )
    assert {row["name"]: row["n"] for row in rows} == {"linear": 480, "Net.activate": 320}
    rows = processor.query(
        "select f.name, p.name as caller from stack_profile_callsite c"
        " join stack_profile_frame f on f.id = c.frame_id"
        " join stack_profile_callsite q on q.id = c.parent_id join stack_profile_frame p on p.id = q.frame_id"
    )
    assert {(row["caller"], row["name"]) for row in rows} == {
        ("<module>", "Net.forward"),
        ("Net.forward", "linear"),
        ("<module>", "Net.activate"),
    }


@pytest.mark.slow
def test_the_trace_processor_reads_a_large_trace(load: Load) -> None:
    processor = load(without_stacks(perfetto.dumps([large(20_000)])))
    assert errors(processor) == {}
    rows = processor.query("select category, count(*) as n from slice where category != '' group by 1")
    assert {row["category"]: row["n"] for row in rows} == {"launch": 19_800, "sync": 200}
