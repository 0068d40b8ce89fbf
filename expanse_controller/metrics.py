"""Prometheus text: the controller's own figures, and the newest sample of each job on each node."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from expanse_controller.errors import ControllerError
from expanse_controller.ingest import Figures
from expanse_controller.presence import LISTED_S, age_s, conflicts, is_silent
from expanse_controller.store import Boot, Store

if TYPE_CHECKING:
    from prometheus_client import Metric

    from expanse_ebpf.wire.collector_pb2 import Report

    class Families(Protocol):
        """Turns a node's report into metrics; of a node that is not `up` only that it is not."""

        def __call__(self, report: Report, /, *, up: bool = True) -> Iterable[Metric]:
            """The families of `report`."""


class ControllerCollector(Collector):
    """What a scrape of the controller shows. `families` turns a report into metrics."""

    def __init__(
        self, store: Store, figures: Figures, families: Families, windows: Counter[str] | None = None
    ) -> None:
        self._store = store
        self._figures = figures
        self._windows = Counter() if windows is None else windows
        self._families = families

    def describe(self) -> Iterable[Metric]:
        """Nothing: the names depend on what the nodes report."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics, each name once."""
        now = time.time_ns()
        boots = [boot for boot in self._store.nodes() if boot.newest]
        shared = conflicts(boots, now)
        yield from _own(self._figures, self._store.bytes())
        yield from _about_windows(self._figures, self._windows.copy())
        yield from _about_nodes(boots, shared, now)
        yield from self._of_nodes(boots, shared, now)

    def _of_nodes(self, boots: list[Boot], shared: set[str], now: int) -> Iterator[Metric]:
        merged: dict[str, Metric] = {}
        for boot in boots:
            newest = boot.newest
            if newest is None or age_s(newest, now) > LISTED_S:
                continue
            # Of a silent node only that it is silent: its last figures are not repeated for ever.
            up = not is_silent(newest, now)
            labels = {"install_id": boot.identity.install_id} if boot.identity.name in shared else {}
            for family in self._families(newest.current, up=up):
                samples = [sample._replace(labels={**sample.labels, **labels}) for sample in family.samples]
                if family.name in merged:
                    merged[family.name].samples += samples
                else:
                    family.samples = samples
                    merged[family.name] = family
        yield from merged.values()


def _own(figures: Figures, store_bytes: int) -> Iterator[Metric]:
    yield CounterMetricFamily("expanse_controller_reports_stored", "Reports stored.", value=figures.stored)
    yield CounterMetricFamily(
        "expanse_controller_reports_replayed",
        "Reports that came again after they had been stored.",
        value=figures.replayed,
    )
    refused = CounterMetricFamily(
        "expanse_controller_reports_refused", "Messages that were not stored, by reason.", labels=["reason"]
    )
    for reason, count in sorted(figures.refused.copy().items()):
        refused.add_metric([reason], count)
    yield refused
    yield CounterMetricFamily(
        "expanse_controller_jobs_refused",
        "Job samples left out of reports because their identity is absurd.",
        value=figures.jobs_refused,
    )
    yield CounterMetricFamily(
        "expanse_controller_gpus_refused",
        "GPUs, their events, and what jobs say of GPUs, left out of reports because they are absurd.",
        value=figures.gpus_refused,
    )
    yield CounterMetricFamily(
        "expanse_controller_gpu_entries_refused",
        "Holders, processes, contradictions and names left out of lists about GPUs that are too long.",
        value=figures.gpu_entries_refused,
    )
    yield CounterMetricFamily(
        "expanse_controller_profiles_stored", "Profiles of jobs stored.", value=figures.profiles
    )
    yield CounterMetricFamily(
        "expanse_controller_profile_bytes_stored", "Their size as stored.", value=figures.profile_bytes
    )
    refused = CounterMetricFamily(
        "expanse_controller_profiles_refused",
        "Profiles left out of reports, by reason.",
        labels=["reason"],
    )
    for reason, count in sorted(figures.profiles_refused.copy().items()):
        refused.add_metric([reason], count)
    yield refused
    yield GaugeMetricFamily(
        "expanse_controller_streams", "Streams from nodes now open.", value=figures.streams
    )
    yield CounterMetricFamily(
        "expanse_controller_commits",
        "Transactions that brought reports into the store.",
        value=figures.commits,
    )
    yield CounterMetricFamily(
        "expanse_controller_commit_seconds", "Time spent in those transactions.", value=figures.commit_s
    )
    yield CounterMetricFamily(
        "expanse_controller_store_errors", "Transactions that failed.", value=figures.store_errors
    )
    yield GaugeMetricFamily(
        "expanse_controller_store_bytes", "Size of the store and its log.", value=store_bytes
    )


def _about_windows(figures: Figures, ended: Counter[str]) -> Iterator[Metric]:
    windows = CounterMetricFamily(
        "expanse_controller_windows",
        "Deep traces by how they ended, or why none was opened; those of each node by themselves.",
        labels=["state"],
    )
    for state, count in sorted(ended.items()):
        windows.add_metric([state], count)
    yield windows
    yield CounterMetricFamily(
        "expanse_controller_trace_bytes_stored", "Size of traces as stored.", value=figures.trace_bytes
    )
    refused = CounterMetricFamily(
        "expanse_controller_traces_refused",
        "Statuses of deep traces and parts of them left out of reports, by reason.",
        labels=["reason"],
    )
    for reason, count in sorted(figures.traces_refused.copy().items()):
        refused.add_metric([reason], count)
    yield refused
    firings = CounterMetricFamily(
        "expanse_controller_rule_firings", "How often a rule has asked for a deep trace.", labels=["rule"]
    )
    for rule, count in sorted(figures.rule_firings.copy().items()):
        firings.add_metric([rule], count)
    yield firings


def _about_nodes(boots: list[Boot], shared: set[str], now: int) -> Iterator[Metric]:
    names = ["node", "install_id"]
    age = GaugeMetricFamily(
        "expanse_node_last_report_age_seconds", "Time since the node's newest report came.", labels=names
    )
    skew = GaugeMetricFamily(
        "expanse_node_clock_skew_seconds",
        "The node's clock minus the controller's when its newest report came, the way it took included.",
        labels=names,
    )
    conflict = GaugeMetricFamily(
        "expanse_node_identity_conflict",
        "1 when another installation reports under the same name.",
        labels=names,
    )
    for boot in boots:
        if boot.newest is None:
            continue
        labels = [boot.identity.name, boot.identity.install_id]
        age.add_metric(labels, age_s(boot.newest, now))
        skew.add_metric(labels, (boot.newest.current.time_ns - boot.newest.received_ns) / 1e9)
        conflict.add_metric(labels, float(boot.identity.name in shared))
    yield from (age, skew, conflict)


def serve(store: Store, figures: Figures, windows: Counter[str], address: str) -> int:
    """Answer scrapes on HOST:PORT in a thread; the port. Raises ControllerError.

    `windows` are those that have ended, by state.
    """
    from expanse_ebpf.export import prometheus

    collector = ControllerCollector(store, figures, prometheus.families, windows)
    try:
        return prometheus.serve(address, collector, where="--metrics-listen")
    except Exception as error:  # its class is the agent's, its text is for the operator
        raise ControllerError(str(error)) from None
