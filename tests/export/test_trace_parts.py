"""Traces cut into parts and put together again."""

from __future__ import annotations

import contextlib
import random
import tracemalloc
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.export import trace_parts
from expanse_ebpf.export.trace_parts import join, split
from expanse_ebpf.export.trace_reader import TraceError
from expanse_ebpf.wire.collector_pb2 import Trace, TracePart
from expanse_ebpf.wire.transport import MAX_TRACE_PART_BYTES
from tests.export.profiles import unhurried
from tests.export.traces import known, odd


def bulky() -> Trace:
    """One that cannot be packed: three parts."""
    trace = known()
    source = random.Random(1)
    trace.functions.extend(source.randbytes(1000).hex() for _ in range(1200))
    return trace


@given(odd())
@unhurried
def test_what_was_cut_is_put_together_as_it_was(trace: Trace) -> None:
    assert join(split(trace)) == trace


def test_a_large_trace_has_parts_that_fit_a_report() -> None:
    trace = bulky()
    parts = split(trace)
    assert [part.index for part in parts] == list(range(len(parts)))
    assert len(parts) == 3 == parts[0].parts
    assert all(len(part.data) == MAX_TRACE_PART_BYTES for part in parts[:-1])
    assert {part.id for part in parts} == {trace.status.id}
    assert join(iter(parts)) == trace


def test_an_empty_trace_has_one_part() -> None:
    (part,) = split(Trace())
    assert join([part]) == Trace()


def test_parts_that_are_missing_double_or_in_disorder_are_refused() -> None:
    one, two, three = split(bulky())
    for parts, reason in (
        ([], "there is no part"),
        ([one, two], "2 of its 3 parts"),
        ([one, three], "part 1 of the trace is missing: part 2 came instead"),
        ([two, one, three], "part 0 of the trace is missing: part 1 came instead"),
        ([one, two, two, three], "part 1 of the trace has come twice"),
        ([one, two, three, one], "part 0 of the trace has come twice"),
        ([one, two, three, three], "part 2 of the trace has come twice"),
    ):
        with pytest.raises(TraceError, match=reason):
            join(parts)


def changed(part: TracePart, **values: object) -> TracePart:
    copy = TracePart()
    copy.CopyFrom(part)
    for field, value in values.items():
        setattr(copy, field, value)
    return copy


def test_parts_that_do_not_belong_together_are_refused() -> None:
    one, two, three = split(bulky())
    for parts, reason in (
        ([one, changed(two, id="another"), three], "mixed"),
        ([one, changed(two, parts=4), three], "it has 3, or 4"),
        ([one, two, three, changed(three, index=3)], "one too many"),
        ([changed(one, data=one.data + b"x"), two, three], "part 0 of the trace is larger"),
        ([one, changed(two, data=two.data[:-1]), three], "damaged"),
        ([one, two, changed(three, data=three.data[:-1])], "its end is missing"),
        ([one, two, changed(three, data=three.data + b"x")], "something follows"),
    ):
        with pytest.raises(TraceError, match=reason):
            join(parts)


def test_a_trace_that_grows_beyond_the_limit_is_refused_before_it_is_there() -> None:
    bomb = TracePart(parts=1, data=zlib.compress(bytes(64 << 20)))
    assert len(bomb.data) < MAX_TRACE_PART_BYTES
    tracemalloc.start()
    try:
        with pytest.raises(TraceError, match="larger than 1000 bytes"):
            join([bomb], limit=1000)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    size = known().ByteSize()
    assert join(split(known()), limit=size) == known()
    with pytest.raises(TraceError, match="larger"):
        join(split(known()), limit=size - 1)
    assert trace_parts.UNPACKED_BYTES == 256 << 20


@given(st.binary(max_size=64), st.booleans())
@unhurried
def test_bytes_that_are_no_trace_raise_nothing_else(data: bytes, packed: bool) -> None:
    part = TracePart(parts=1, data=zlib.compress(data) if packed else data)
    with contextlib.suppress(TraceError):
        assert isinstance(join([part]), Trace)
