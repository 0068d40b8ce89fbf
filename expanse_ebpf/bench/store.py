"""What the controller has of a job, and what follows from it: samples that came, windows, BPF run time."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

from expanse_ebpf.errors import UnavailableError

_LATE = 0.1  # of an interval, by which a sample may come later than it is due
_MOST_TRACE = 256 << 20  # bytes, unpacked


def newest(address: str, node: str) -> Any:
    """A node's newest Report; raises UnavailableError."""
    from expanse_ebpf.ship import remote

    return remote.snapshot(address, node)[0].current


def series(address: str, key: str, from_ns: int) -> list[int]:
    """When the stored samples of a job were taken, in ns since the epoch; raises UnavailableError."""
    from expanse_ebpf.wire import transport
    from expanse_ebpf.wire.collector_pb2 import SeriesReply, SeriesRequest

    grpc = transport.import_grpc()
    with grpc.insecure_channel(address, options=transport.client_options()) as channel:
        ask = channel.unary_unary(
            transport.SERIES,
            request_serializer=SeriesRequest.SerializeToString,
            response_deserializer=SeriesReply.FromString,
        )
        try:
            reply = ask(SeriesRequest(key=key, from_ns=from_ns, fields=["processes"]), timeout=10)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return []
            raise UnavailableError(f"controller {address}: {error.details()}") from None
    return [point.time_ns for point in reply.points]


def points(address: str, window: str, node: str) -> int:
    """At how many places a window had its probes at the most, by its stored trace; 0 where there is none."""
    from google.protobuf.message import DecodeError

    from expanse_ebpf.ship import remote
    from expanse_ebpf.wire.collector_pb2 import Trace

    parts = {
        reply.part.index: reply.part.data
        for reply in remote.stored_traces(address, window)
        if reply.node == node and reply.HasField("part")
    }
    packed = b"".join(data for _, data in sorted(parts.items()))
    try:
        return Trace.FromString(zlib.decompressobj().decompress(packed, _MOST_TRACE)).price.points
    except (zlib.error, DecodeError):
        return 0


# ---- figures


def arrived(
    started_ns: int, ended_ns: int, interval_s: float, times: Sequence[int]
) -> tuple[int, int, float | None]:
    """(due, come, longest gap in seconds) of samples taken at `times` while a job ran.

    Where the run is no multiple of the interval, one more may come than is due at the least; then it was due.
    The gap is also that from the start to the first and from the last to the end; None without a sample.
    """
    until = ended_ns + int(_LATE * interval_s * 1e9)
    came = sorted(time_ns for time_ns in times if started_ns <= time_ns <= until)
    due = int((ended_ns - started_ns) / 1e9 / interval_s)
    if not came:
        return due, 0, None
    edges = [started_ns, *came, max(ended_ns, came[-1])]
    gap_ns = max(later - earlier for earlier, later in itertools.pairwise(edges))
    return max(due, min(len(came), due + 1)), len(came), gap_ns / 1e9


def programs(collector: Any) -> dict[str, tuple[int, int]]:
    """(run time, time in which it was measured) in ns of each BPF program, of a CollectorSample."""
    return {program.name: (program.run_ns, program.measured_ns) for program in collector.programs}


def run_time(
    before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], job_s: float
) -> float | None:
    """Seconds in BPF programs for each second of a job that ran between two looks; None: not measured.

    The looks are a report's interval from the job's begin and end. What programs do meanwhile, on a machine
    at rest, counts as the job's, which is little; to divide by the time between the looks would hide much.
    """
    total, known = 0.0, False
    for name, (run_ns, measured_ns) in after.items():
        run_before, measured_before = before.get(name, (0, 0))
        if measured_ns > measured_before:
            known = True
            total += (run_ns - run_before) / 1e9 / job_s
    return total if known else None
