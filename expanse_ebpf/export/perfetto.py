"""Deep traces as files for Perfetto (https://ui.perfetto.dev), several nodes on one line of time.

The form: protos/perfetto/trace/trace_packet.proto and track_event/track_event.proto of Perfetto, as the
package `perfetto` has them. Each node is a machine of its own there, so that equal process ids do not meet.
Time is the nodes' wall clocks: they agree as well as the nodes keep time.

What a launch does on the GPU is not seen, nor how long it takes the host: it is an instant. A call whose
end was seen is a slice.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from expanse_ebpf.export.trace_reader import END_OF_TIME, LAUNCHES, Event, Reader, copy_kind, name
from expanse_ebpf.wire.collector_pb2 import Trace, TraceState

_REALTIME = 1  # BuiltinClock.BUILTIN_CLOCK_REALTIME
_CLEARED, _NEEDED = 1, 2  # TracePacket.SequenceFlags
_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # TrackEvent.Type
_PACKETS = 2000  # that are held before they are written
_MOST_FORMS = 5000  # of events that are remembered
_RATE_NS = 100_000_000  # each point of the launch rate is over so long
_LONGEST_RATE_NS = 3 * 3600 * 10**9  # no window is so long
_TARGETS = {"collective": "communicator", "graph": "graph"}
_MAPPING = 1  # that all frames are said to lie in: Perfetto has no frame without one


def dumps(traces: Sequence[Trace]) -> bytes:
    """The file. Raises TraceError."""
    return b"".join(chunks(traces))


def chunks(traces: Sequence[Trace]) -> Iterator[bytes]:
    """The file in pieces of less than 1 MiB, as a rule. Raises TraceError, before the first one."""
    readers = [Reader(trace) for trace in traces]
    for number, reader in enumerate(readers):
        yield from _Node(reader, number, alone=len(readers) == 1).chunks()


class _Node:
    """One node's packets, a sequence of their own."""

    def __init__(self, reader: Reader, number: int, *, alone: bool) -> None:
        # Only who writes a trace pays for it.
        from perfetto.protos.perfetto.trace import perfetto_trace_pb2

        self._pb = perfetto_trace_pb2
        self._reader = reader
        self._trace = reader.trace
        self._plain = self._pb.TracePacket(trusted_packet_sequence_id=number + 1, sequence_flags=_NEEDED)
        if number:
            self._plain.machine_id = number
        self._suffix = "" if alone else f" ({reader.node})"
        self._file = self._pb.Trace()
        self._texts: dict[tuple[str, str], int] = {}
        self._new = self._pb.InternedData()  # what the next packet has to tell
        self._calls: dict[tuple[object, ...], Any] = {}
        self._parts: dict[tuple[str, int], Any] = {}
        self._frames: set[int] = set()
        self._threads: list[int] = []  # the track of each

    def chunks(self) -> Iterator[bytes]:
        self._begin()
        self._name_tracks()
        self._window()
        counters: dict[str, tuple[str, list[tuple[int, float]]]] = {}
        for counter in self._trace.counters:
            _, points = counters.setdefault(name(counter.name), (name(counter.unit), []))
            points += zip(counter.time_ns, counter.value, strict=True)
        for title, (unit, points) in counters.items():
            self._counter(title, unit, sorted(points))
            yield self._written()
        launches: Counter[int] = Counter()
        for event in self._events():
            if self._reader.functions[event.function].category in LAUNCHES:
                launches[event.time_ns // _RATE_NS] += 1
            if len(self._file.packet) >= _PACKETS:
                yield self._written()
        self._counter("launches", "1/s", self._rates(launches), "rate")
        yield self._written()

    def _written(self) -> bytes:
        data: bytes = self._file.SerializeToString()
        self._file = self._pb.Trace()  # one that is cleared keeps its memory
        return data

    # ---- packets

    def _packet(self, like: Any = None) -> Any:
        packet = self._file.packet.add()
        packet.CopyFrom(self._plain if like is None else like)
        return packet

    def _event(self, time_ns: int, like: Any) -> None:
        packet = self._packet(like)
        packet.timestamp = time_ns
        if self._new.ByteSize():
            packet.interned_data.CopyFrom(self._new)
            self._new = self._pb.InternedData()

    def _begin(self) -> None:
        packet = self._packet()
        packet.sequence_flags = _CLEARED
        packet.first_packet_on_sequence = True
        packet.trace_packet_defaults.timestamp_clock_id = _REALTIME
        packet = self._packet()
        packet.clock_snapshot.primary_trace_clock = _REALTIME
        packet.clock_snapshot.clocks.add(clock_id=_REALTIME, timestamp=max(1, self._trace.base_ns))

    def _iid(self, table: str, text: str, *, field: str = "name") -> int:
        """The number of a text in a table of InternedData."""
        number = self._texts.get((table, text))
        if number is None:
            number = self._texts[table, text] = len(self._texts) + 1
            value = text.encode() if field == "str" else text
            getattr(self._new, table).add(iid=number, **{field: value})
        return number

    def _argument(self, event: Any, key: str, value: object) -> None:
        """Add an argument. A text is stored once."""
        argument = event.debug_annotations.add(name_iid=self._iid("debug_annotation_names", key))
        if isinstance(value, str):
            argument.string_value_iid = self._iid("debug_annotation_string_values", value, field="str")
        elif isinstance(value, float):
            argument.double_value = value
        elif isinstance(value, _Handle):
            argument.pointer_value = value
        elif isinstance(value, int):
            argument.uint_value = value

    # ---- tracks

    def _uuid(self, *parts: object) -> int:
        """The number of a track, the same in every file."""
        node = self._trace.node
        text = "/".join(map(str, (self._trace.status.id, node.name, node.install_id, node.boot_id, *parts)))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") | 1

    def _track(self, *parts: object, parent: int = 0, title: str = "") -> Any:
        track = self._packet().track_descriptor
        track.uuid = self._uuid(*parts)
        if parent:
            track.parent_uuid = parent
        if title:
            track.name = title
        return track

    def _name_tracks(self) -> None:
        trace, reader = self._trace, self._reader
        self._track("node", title=f"node {reader.node}")
        commands = {thread.pid: "" for thread in trace.threads}
        commands |= {process.pid: name(process.command) for process in trace.processes}
        for pid, command in commands.items():
            process = self._track("process", pid).process
            process.pid = pid
            process.process_name = (command or f"process {pid}") + self._suffix
            process.process_labels.extend(filter(None, (reader.job, reader.node)))
        seen = set()
        for thread in trace.threads:
            uuid = self._uuid("thread", thread.pid, thread.tid)
            self._threads.append(uuid)
            if uuid not in seen:
                seen.add(uuid)
                described = self._track("thread", thread.pid, thread.tid).thread
                described.pid, described.tid = thread.pid, thread.tid
                described.thread_name = name(thread.name) or f"thread {thread.tid}"

    def _slices(self, title: str) -> Any:
        """The form of an event on a track of the node's, which is made."""
        uuid = self._track(title, parent=self._uuid("node"), title=title).uuid
        packet = self._packet()
        self._file.packet.pop()
        packet.track_event.track_uuid = uuid
        return packet

    def _window(self) -> None:
        """The window itself, and when the probes were in place: where they were not, nothing was seen."""
        trace = self._trace
        begin, end = self._reader.span
        if end:
            packet = self._slices("window")
            event = packet.track_event
            event.name_iid = self._iid("event_names", f"window {name(trace.status.id)}".strip())
            for key, value in self._facts():
                self._argument(event, key, value)
            self._slice(begin, end, packet)
        packet = self._slices("probes in place")
        packet.track_event.name_iid = self._iid("event_names", "traced")
        for begin, end in self._reader.spans:
            self._slice(begin, end, packet)

    def _facts(self) -> Iterator[tuple[str, object]]:
        trace, status = self._trace, self._trace.status
        states = TraceState.DESCRIPTOR.values_by_number
        state = states.get(status.state)
        yield "state", state.name.removeprefix("TRACE_STATE_").lower() if state else str(status.state)
        for key, text in (("reason", status.reason), ("rule", status.rule), ("job", self._reader.job)):
            if text:
                yield key, name(text)
        for evidence in trace.evidence:
            known = evidence.value if evidence.HasField("value") else name(evidence.text)
            yield f"evidence {name(evidence.name)}", known
        yield "traced_share", status.traced_share
        yield "cost_share", status.cost_share
        yield "events_lost", trace.events_lost
        yield "collector", name(trace.version)

    def _slice(self, begin: int, end: int, packet: Any) -> None:
        packet.track_event.type = _BEGIN
        self._event(begin, packet)
        self._end(end, packet.track_event.track_uuid)

    def _end(self, time_ns: int, track: int) -> None:
        packet = self._packet()
        packet.timestamp = time_ns
        packet.track_event.type = _END
        packet.track_event.track_uuid = track

    def _counter(
        self, title: str, unit: str, points: Iterable[tuple[int, float]], kind: str = "counter"
    ) -> None:
        points = [(time, value) for time, value in points if math.isfinite(value)]
        if not points:
            return
        track = self._track(kind, title, parent=self._uuid("node"), title=title)
        track.counter.unit_name = unit
        for time, value in points:
            packet = self._packet()
            packet.timestamp = time
            event = packet.track_event
            event.type, event.track_uuid, event.double_counter_value = _COUNTER, track.uuid, value

    def _rates(self, launches: Counter[int]) -> Iterator[tuple[int, float]]:
        """Launches per second of traced time; where nothing was traced there is no point."""
        spans = self._reader.spans or [self._reader.span]
        if sum(end - begin for begin, end in spans) > _LONGEST_RATE_NS:
            return
        traced: Counter[int] = Counter()
        for begin, end in spans:
            for place in range(begin // _RATE_NS, end // _RATE_NS + 1):
                inside = min(end, (place + 1) * _RATE_NS) - max(begin, place * _RATE_NS)
                traced[place] += max(0, inside)
        for place in sorted(traced):
            if traced[place] >= _RATE_NS // 10:  # of less the rate would be chance
                yield place * _RATE_NS, launches[place] * 1e9 / traced[place]

    # ---- calls

    def _events(self) -> Iterator[Event]:
        """Write the calls in the order of time and give each event back."""
        ends: list[tuple[int, int, int]] = []  # what is open: its end, the later begun first, its thread
        inner: dict[int, list[int]] = {}  # the ends of each thread's
        for number, event in enumerate(self._reader.events()):
            self._close(ends, inner, event.time_ns)
            self._event(event.time_ns, self._call(event))
            if event.duration_ns is not None:
                open_here = inner.setdefault(event.thread, [])
                # Slices of a thread nest: one that seems to end after the call around it ends with it.
                latest = open_here[-1] if open_here else END_OF_TIME
                end = min(event.time_ns + event.duration_ns, latest)
                open_here.append(end)
                heapq.heappush(ends, (end, -number, event.thread))
            yield event
        self._close(ends, inner, END_OF_TIME)

    def _close(self, ends: list[tuple[int, int, int]], inner: dict[int, list[int]], until: int) -> None:
        while ends and ends[0][0] <= until:
            end, _, thread = heapq.heappop(ends)
            inner[thread].pop()
            self._end(end, self._threads[thread])

    def _call(self, event: Event) -> Any:
        """The packet of a call, but for its time: equal calls share one."""
        key = (event.duration_ns is None, *event[1:3], *event[4:])
        packet = self._calls.get(key)
        if packet is None:
            if len(self._calls) >= _MOST_FORMS:
                self._calls.clear()
            packet = self._calls[key] = self._pb.TracePacket()
            packet.CopyFrom(self._plain)
            self._describe(packet.track_event, event)
        return packet

    def _describe(self, call: Any, event: Event) -> None:
        function = self._reader.functions[event.function]
        call.type = _INSTANT if event.duration_ns is None else _BEGIN
        call.track_uuid = self._threads[event.thread]
        call.category_iids.append(self._iid("event_categories", function.category))
        if event.kernel is None:
            call.name_iid = self._iid("event_names", function.name)
        else:
            call.MergeFrom(self._part("kernel", event.kernel, self._kernel))
            self._argument(call, "function", function.name)
        if event.shape is not None:
            call.MergeFrom(self._part("shape", event.shape, self._shape))
        for key, value in self._arguments(event):
            self._argument(call, key, value)
        if event.stack is not None:
            call.MergeFrom(self._part("stack", event.stack, self._stack))

    def _arguments(self, event: Event) -> Iterator[tuple[str, object]]:
        function = self._reader.functions[event.function]
        if event.stream is not None:
            yield "stream", _Handle(event.stream)
        if event.bytes is not None:
            yield "bytes", event.bytes
        if function.category == "collective" and function.kind:
            yield "operation", function.kind
        if event.kind is not None and function.category == "copy":
            yield "kind", copy_kind(event.kind)
        if event.target is not None:
            yield _TARGETS.get(function.category, "target"), _Handle(event.target)
        if event.duration_ns is None and function.timed:
            yield "end", "not seen"

    def _part(self, table: str, index: int, make: Callable[[Any, int], None]) -> Any:
        """What every event says that points to one entry of a table."""
        part = self._parts.get((table, index))
        if part is None:
            part = self._parts[table, index] = self._pb.TrackEvent()
            make(part, index)
        return part

    def _kernel(self, call: Any, index: int) -> None:
        kernel = self._trace.kernels[index]
        call.name_iid = self._iid("event_names", self._reader.kernel_name(index))
        if kernel.module:
            self._argument(call, "module", name(kernel.module))
        if not kernel.name and kernel.reason:
            self._argument(call, "no name because", name(kernel.reason))

    def _shape(self, call: Any, index: int) -> None:
        shape = self._trace.shapes[index]
        self._argument(call, "grid", f"{shape.grid_x} x {shape.grid_y} x {shape.grid_z}")
        self._argument(call, "block", f"{shape.block_x} x {shape.block_y} x {shape.block_z}")
        self._argument(call, "shared_bytes", shape.shared_bytes)

    def _stack(self, call: Any, index: int) -> None:
        """As an argument, and as a stack that Perfetto can add up, which it does since its version 53."""
        stack = self._trace.traced_stacks[index]
        frames = self._reader.frames(index)
        places = [f"{frame.name} ({frame.place})" for frame in frames] + ["…"] * stack.truncated
        self._argument(call, "python", " ← ".join(places))
        if not frames:
            return
        if not self._frames:
            path = self._iid("mapping_paths", "python", field="str")
            self._new.mappings.add(iid=_MAPPING, path_string_ids=[path])
        for place, frame in zip(stack.frames, frames, strict=True):
            if place not in self._frames:
                self._frames.add(place)
                self._new.frames.add(
                    iid=place + 1,
                    mapping_id=_MAPPING,
                    rel_pc=place,  # Perfetto tells frames of one function apart by it
                    function_name_id=self._iid("function_names", frame.name, field="str"),
                    source_path_iid=self._iid("source_paths", frame.file, field="str"),
                    line_number=frame.line,
                )
        outermost_first = [place + 1 for place in reversed(stack.frames)]
        self._new.callstacks.add(iid=index + 1, frame_ids=outermost_first)
        call.callstack_iid = index + 1


class _Handle(int):
    """Shown as an address."""
