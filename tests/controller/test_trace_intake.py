"""What one node may bring in of traces, and for how long its windows are known without asking the store."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from expanse_controller import trace_intake
from expanse_controller.ingest import Figures
from expanse_controller.store import Store
from expanse_controller.trace_intake import TraceIntake
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    TRACE_STATE_OPEN,
    Report,
    TracePart,
    TraceState,
    TraceStatus,
)
from tests.controller import agents
from tests.controller.process import node

A, B = node("a", "i-a"), node("b", "i-b")


def status(number: int, state: TraceState = TRACE_STATE_DONE) -> TraceStatus:
    return agents.status(f"{number:016x}", state)


def part(number: int, size: int = 10, index: int = 0, parts: int = 9) -> TracePart:
    return TracePart(id=f"{number:016x}", index=index, parts=parts, data=b"x" * size)


class Taking:
    """An intake before an empty store."""

    def __init__(self, store: Store) -> None:
        self.figures = Figures()
        self.writer = ThreadPoolExecutor(1)
        self.ended: dict[str, int] = {}
        self.intake = TraceIntake(store, self.writer, self.figures)

    def take(
        self, statuses: list[TraceStatus], parts: list[TracePart], who: object = A
    ) -> tuple[list[str], list[int], Report]:
        """Final statuses and the sizes of parts that can be stored, and what stays of the report."""
        report = Report(traces=statuses, trace_parts=parts)
        final, taken = asyncio.run(self.intake.take(who, self.ended, report))  # type: ignore[arg-type]
        return [one.id for one in final], [len(one.data) for one in taken], report


@pytest.fixture
def taking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Taking]:
    monkeypatch.setattr(trace_intake, "RESERVE_BYTES", 100)
    monkeypatch.setattr(trace_intake, "BYTES_PER_MINUTE", 0)
    store = Store(tmp_path / "store.db")
    made = Taking(store)
    yield made
    made.writer.shutdown()
    store.close()


def test_what_a_window_that_is_open_says_stays_in_the_report(taking: Taking) -> None:
    final, parts, report = taking.take([status(1, TRACE_STATE_OPEN), status(2)], [part(2)])
    assert (final, parts) == ([status(2).id], [10])
    assert ([one.id for one in report.traces], len(report.trace_parts)) == ([status(1).id], 0)


def test_a_node_that_sends_too_many_bytes_is_cut_and_another_is_not(taking: Taking) -> None:
    _, parts, _ = taking.take([status(1)], [part(1, 60), part(1, 60, 1), part(1, 40, 2)])
    assert parts == [60, 40]
    assert taking.figures.traces_refused == {"allowance": 1}
    assert taking.take([status(1)], [part(1, 60)], B)[1] == [60]


def test_only_so_many_windows_are_remembered_that_have_ended(
    taking: Taking, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace_intake, "RECENT_WINDOWS", 2)
    taking.take([status(1), status(2), status(3)], [])
    assert taking.take([], [part(1), part(2), part(3)])[1] == [10, 10]
    assert taking.figures.traces_refused == {"window": 1}
    assert len(taking.ended) == 2
