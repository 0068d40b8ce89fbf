"""A window's trace on its way: cut into parts that fit a report, and put together again."""

from __future__ import annotations

import zlib
from collections.abc import Iterable

from google.protobuf.message import DecodeError

from expanse_ebpf.export.trace_reader import TraceError
from expanse_ebpf.text import clean
from expanse_ebpf.wire.collector_pb2 import Trace, TracePart
from expanse_ebpf.wire.transport import MAX_TRACE_PART_BYTES

# More than any real trace has: one of 2,000,000 events takes some 40 MiB.
UNPACKED_BYTES = 256 << 20


def split(trace: Trace) -> list[TracePart]:
    """The parts, in their order; at least one."""
    data = zlib.compress(trace.SerializeToString(deterministic=True), 6)
    pieces = [data[at : at + MAX_TRACE_PART_BYTES] for at in range(0, len(data), MAX_TRACE_PART_BYTES)]
    return [
        TracePart(id=trace.status.id, index=index, parts=len(pieces), data=piece)
        for index, piece in enumerate(pieces)
    ]


def join(parts: Iterable[TracePart], limit: int = UNPACKED_BYTES) -> Trace:
    """The trace that was cut into `parts`, which have to come whole and in their order.

    Raises TraceError when they do not, when they are damaged, or when the trace is larger than `limit` bytes.
    """
    first: TracePart | None = None
    count = 0
    unpacked = bytearray()
    stream = zlib.decompressobj()
    for part in parts:
        if first is None:
            first = part
        _fits(part, first, count)
        count += 1
        try:
            unpacked += stream.decompress(part.data, limit + 1 - len(unpacked))
        except zlib.error as error:
            raise TraceError(f"the trace is damaged: {error}") from None
        if len(unpacked) > limit:
            raise TraceError(f"the trace is larger than {limit} bytes")
    if first is None:
        raise TraceError("there is no part of the trace")
    if count != first.parts:
        raise TraceError(f"the trace is not whole: {count} of its {first.parts} parts are there")
    if not stream.eof or stream.unused_data:
        raise TraceError("the trace is damaged: its end is missing, or something follows it")
    try:
        return Trace.FromString(bytes(unpacked))
    except DecodeError:
        raise TraceError("the trace is damaged: what was packed is no trace") from None


def _fits(part: TracePart, first: TracePart, place: int) -> None:
    """Raises TraceError unless `part` is the one that belongs to `place`."""
    if part.id != first.id:
        raise TraceError(f"parts of two traces are mixed: {clean(first.id)} and {clean(part.id)}")
    if part.parts != first.parts:
        raise TraceError(f"parts of one trace disagree: it has {first.parts}, or {part.parts}")
    if part.index < place:
        raise TraceError(f"part {part.index} of the trace has come twice, or too late")
    if part.index > place:
        raise TraceError(f"part {place} of the trace is missing: part {part.index} came instead")
    if part.index >= part.parts:
        raise TraceError(f"part {part.index} of the trace is one too many: it has {part.parts}")
    if len(part.data) > MAX_TRACE_PART_BYTES:
        raise TraceError(f"part {part.index} of the trace is larger than {MAX_TRACE_PART_BYTES} bytes")
