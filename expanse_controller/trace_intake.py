"""What nodes say of windows and send of their traces, as it comes in: what can be stored, and what not."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from concurrent.futures import Executor
from typing import TYPE_CHECKING

from expanse_controller.allowance import Allowance
from expanse_controller.limits import MAX_REPORT_PARTS, MAX_TRACES, TRACE_REMEDIES, part_fault, status_fault
from expanse_controller.store import Store
from expanse_controller.traces import is_final
from expanse_ebpf.wire.collector_pb2 import NodeIdentity, Report, TracePart, TraceStatus

if TYPE_CHECKING:
    from expanse_controller.ingest import Figures

# A window of a node takes some MiB, and a rule may open one every minute and a half.
BYTES_PER_MINUTE = 8 << 20
RESERVE_BYTES = 256 << 20
# Windows that a node has ended whose parts may still come: of older ones the store is asked.
RECENT_WINDOWS = 256
# What is refused is told of in the log at this interval.
TELL_S = 60.0

_log = logging.getLogger(__name__)


class TraceIntake:
    """Looks at what reports bring of windows. `writer` is the one thread that writes to `store`."""

    def __init__(self, store: Store, writer: Executor, figures: Figures) -> None:
        self._store = store
        self._writer = writer
        self._figures = figures
        self._allowance = Allowance(BYTES_PER_MINUTE / 60, RESERVE_BYTES)
        self._told = -TELL_S  # when something refused was last told of

    async def take(
        self, node: NodeIdentity, ended: dict[str, int], report: Report
    ) -> tuple[list[TraceStatus], list[TracePart]]:
        """Take the final statuses and the parts out of `report` of `node`; those that can be stored.

        Statuses of windows that wait or are open stay in the report. `ended` is kept for each stream: windows
        that have ended there, and how many parts their trace has, 0 while that is not known.
        """
        refused: Counter[str] = Counter()
        final: list[TraceStatus] = []
        still: list[TraceStatus] = []
        for number, status in enumerate(report.traces):
            fault = "count" if number >= MAX_TRACES else status_fault(status)
            if fault:
                refused[fault] += 1
                continue
            kept = TraceStatus()
            kept.CopyFrom(status)
            (final if is_final(kept) else still).append(kept)
        parts = []
        for status in final:
            ended.setdefault(status.id, 0)
        while len(ended) > RECENT_WINDOWS:
            del ended[next(iter(ended))]
        for number, part in enumerate(report.trace_parts):
            fault = "count" if number >= MAX_REPORT_PARTS else await self._fault(node, ended, part)
            if fault:
                refused[fault] += 1
            else:
                parts.append(TracePart())
                parts[-1].CopyFrom(part)
        report.ClearField("traces")
        report.ClearField("trace_parts")
        report.traces.extend(still)
        self._figures.traces_refused.update(refused)
        now = time.monotonic()
        if refused and now - self._told >= TELL_S:
            self._told = now
            _log.warning(
                "node %r: parts of traces are refused, %d since the start: %s",
                node.name,
                self._figures.traces_refused.total(),
                "; ".join(
                    f"{count} ({reason}): {TRACE_REMEDIES[reason]}" for reason, count in refused.items()
                ),
            )
        return final, parts

    async def _fault(self, node: NodeIdentity, ended: dict[str, int], part: TracePart) -> str:
        fault = part_fault(part)
        if fault:
            return fault
        parts = ended.get(part.id)
        if parts is None:  # its end came on an earlier stream
            parts = await asyncio.get_running_loop().run_in_executor(
                self._writer, self._store.knows_window, node, part.id
            )
            if parts is None:
                return "window"
        if parts not in (0, part.parts):
            return "index"
        if not self._allowance.take((node.name, node.install_id), len(part.data), time.monotonic()):
            return "allowance"
        ended[part.id] = part.parts
        return ""
