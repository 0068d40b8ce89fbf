"""The Prometheus page: Reports turned into metric families, and the server that shows them.

Importing this imports prometheus_client and an HTTP server; only an agent that is told to listen for
scrapes should.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from expanse_ebpf.config import split_address
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.export.declaration import Metric
from expanse_ebpf.export.gpu_metrics import GPU_METRICS
from expanse_ebpf.export.gpu_readers import MAX_GPUS
from expanse_ebpf.export.metrics import JOB_METRICS, METRICS, NODE_METRICS
from expanse_ebpf.wire.collector_pb2 import Report

LABEL_LIMIT = 1024  # characters; the stores that scrape cut or refuse longer values
# Halves of surrogate pairs have no UTF-8 form, and control characters no agreed one; a newline does.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def clean(text: str) -> str:
    """`text` as a label value that every scraper can read."""
    return _UNFIT.sub("\ufffd", text)[:LABEL_LIMIT]


class _Page:
    """Families under construction. Of two samples with the same labels the first one stays."""

    def __init__(self) -> None:
        self._samples: dict[str, dict[tuple[str, ...], float]] = {metric.name: {} for metric in METRICS}

    def add(self, metric: Metric, own: tuple[str, ...], sample: Any) -> None:
        """What `metric` reads in `sample`, labelled with `own` first."""
        series = self._samples[metric.name]
        for labels, value in metric.read(sample):
            series.setdefault((*own, *map(clean, labels)), value)

    def put(self, name: str, labels: tuple[str, ...], value: float) -> None:
        """One figure that is in no report."""
        self._samples[name].setdefault(labels, value)

    def families(self) -> Iterator[Family]:
        """The families that have samples."""
        for metric in METRICS:
            series = self._samples[metric.name]
            if series:
                family = _empty(metric)
                for labels, value in series.items():
                    family.add_sample(metric.name, dict(zip(metric.labels, labels, strict=True)), value)
                yield family


def _empty(metric: Metric) -> Family:
    base = metric.name.removesuffix("_total").removesuffix("_info")
    return Family(base, metric.help, metric.kind)


def families(report: Report, *, up: bool = True) -> Iterator[Family]:
    """The families of one node's report; of a node that is not `up` only when it last reported.

    No two samples have the same labels, whatever the report holds. What it lacks is not there.
    """
    page = _Page()
    name = clean(report.node.name) or "unknown"
    page.put("expanse_node_up", (name,), int(up))
    for metric in NODE_METRICS:
        if up or metric.name == "expanse_report_timestamp_seconds":
            page.add(metric, (name,), report)
    if up:
        keys = set()
        for job in report.jobs:
            i = job.identity
            key = (name, clean(i.scheduler), clean(i.id), str(i.run))
            if i.scheduler and i.id and key not in keys:
                keys.add(key)
                for metric in JOB_METRICS:
                    page.add(metric, key, job)
        page.put("expanse_duplicate_jobs", (name,), len(report.jobs) - len(keys))
        uuids: set[str] = set()
        for gpu in report.gpus:
            uuid = clean(gpu.uuid)
            if uuid and uuid not in uuids and len(uuids) < MAX_GPUS:
                uuids.add(uuid)
                for metric in GPU_METRICS:
                    page.add(metric, (name, uuid), gpu)
        if report.gpus:
            page.put("expanse_unlisted_gpus", (name,), len(report.gpus) - len(uuids))
    return page.families()


class ReportCollector(Collector):
    """What prometheus_client asks for the page at each scrape.

    `newest` gives the newest report (None: there is none yet). When it stays the same for more than two
    of its intervals the node is shown as down: its last figures are not repeated for ever.
    """

    def __init__(
        self, newest: Callable[[], Report | None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._newest = newest
        self._clock = clock
        self._seen: tuple[int, float] | None = None  # sequence, since when

    def describe(self) -> Iterator[Family]:
        """All families, empty: the names by which a scrape can ask for some of them."""
        return map(_empty, METRICS)

    def collect(self) -> Iterator[Family]:
        """The page."""
        report = self._newest()
        if report is None:
            return iter(())
        now = self._clock()
        if self._seen is None or self._seen[0] != report.sequence:
            self._seen = (report.sequence, now)
        # A second more: reports and scrapes are not in step.
        patience = 2 * report.interval_ns / 1e9 + 1
        return families(report, up=now - self._seen[1] <= patience)


class _Handler(WSGIRequestHandler):
    timeout = 10  # seconds that a peer may keep silent

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the peer's affair
            super().handle()

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not logged."""


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, family: socket.AddressFamily, address: tuple[str, int]) -> None:
        self.address_family = family
        self._free = threading.Semaphore(8)  # connections at a time; more are closed
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks the name service for the host's full name, which can take seconds.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def serve(address: str, *collectors: Collector, where: str = "agent.metrics_listen") -> int:
    """Serve the collectors' page on HOST:PORT from a daemon thread; returns the port (port 0: any).

    Raises ConfigError for what is no address and UnavailableError when it cannot be listened on, which may
    change: its interface may not be up yet. Both begin with `where`.
    """
    host, port = split_address(address, where)
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    try:
        family, _, _, _, target = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = _Server(family, (str(target[0]), port))
    except OSError as error:
        raise UnavailableError(
            f"{where}: cannot listen on {address}: {error.strerror}; give another address or port"
        ) from None
    server.set_app(make_wsgi_app(registry))
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return int(server.server_port)
