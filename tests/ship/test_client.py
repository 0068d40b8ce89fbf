"""The stream against servers that are not as they should be."""

from __future__ import annotations

import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from expanse_ebpf.ship.client import ControllerStream
from expanse_ebpf.ship.failure import cause
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import Acknowledgement, Downstream, Upstream
from tests.controller.process import eventually, node, report


class Server:
    """A Collector service whose answers a test decides."""

    def __init__(self, answer: Any, options: transport.Options = ()) -> None:
        self.calls = 0
        self.seen: list[int] = []
        self._answer = answer
        self.server = grpc.server(ThreadPoolExecutor(8), options=options)
        handler = grpc.stream_stream_rpc_method_handler(
            self._stream, Upstream.FromString, Downstream.SerializeToString
        )
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(transport.COLLECTOR, {"Stream": handler}),)
        )
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def _stream(self, requests: Iterator[Upstream], context: grpc.ServicerContext) -> Iterator[Downstream]:
        self.calls += 1
        hello = next(requests)
        assert hello.hello.node == node()
        context.send_initial_metadata(())
        yield from self._answer(self, requests, context)


def acknowledge(server: Server, requests: Iterator[Upstream], _: Any) -> Iterator[Downstream]:
    for message in requests:
        server.seen.append(message.report.sequence)
        yield Downstream(acknowledgement=Acknowledgement(sequence=message.report.sequence))


@pytest.fixture
def stopped() -> Iterator[list[Any]]:
    """Streams and servers that are stopped after the test, in order."""
    things: list[Any] = []
    yield things
    for thing in things:
        if isinstance(thing, ControllerStream):
            thing.stop(0)
        else:
            thing.server.stop(0).wait()


def test_reports_arrive_in_order_without_the_node_in_each(stopped: list[Any]) -> None:
    bodies: list[bool] = []

    def look(server: Server, requests: Iterator[Upstream], context: Any) -> Iterator[Downstream]:
        def seen() -> Iterator[Upstream]:
            for message in requests:
                bodies.append(message.report.HasField("node"))
                yield message

        yield from acknowledge(server, seen(), context)

    server = Server(look)
    stream = ControllerStream(server.address, node())
    stopped += [stream, server]
    stream.start()
    made = [report(n) for n in range(1, 51)]
    for r in made:
        r.node.CopyFrom(node())
        stream.send(r)
    eventually(lambda: stream.unsent == 0)
    assert server.seen == list(range(1, 51))
    assert bodies == [False] * 50
    assert made[0].HasField("node")  # the caller's report is left as it was


def test_after_a_cut_what_is_not_acknowledged_comes_again_in_order(stopped: list[Any]) -> None:
    def cut(server: Server, requests: Iterator[Upstream], context: Any) -> Iterator[Downstream]:
        if server.calls > 1:
            yield from acknowledge(server, requests, context)
            return
        for message in requests:
            server.seen.append(message.report.sequence)
            if message.report.sequence == 4:
                yield Downstream(acknowledgement=Acknowledgement(sequence=2))
            if message.report.sequence == 6:
                context.abort(grpc.StatusCode.UNAVAILABLE, "the disk is full")

    server = Server(cut)
    stream = ControllerStream(server.address, node())
    stopped += [stream, server]
    for number in range(1, 9):
        stream.send(report(number))
    stream.start()
    eventually(lambda: "the disk is full" in stream.state)
    assert stream.state == f"controller {server.address} is lost: the disk is full"
    eventually(lambda: stream.unsent == 0)
    assert server.seen[:6] == [1, 2, 3, 4, 5, 6]
    assert server.seen[6:] == [3, 4, 5, 6, 7, 8]
    assert stream.dropped == 0


def test_send_does_not_wait_for_a_controller_that_takes_nothing(stopped: list[Any]) -> None:
    release = threading.Event()

    def stuck(server: Server, requests: Iterator[Upstream], _: Any) -> Iterator[Downstream]:
        release.wait(60)
        yield from acknowledge(server, requests, _)

    server = Server(stuck)
    stream = ControllerStream(server.address, node(), max_unsent=50)
    stopped += [stream, server]
    stream.start()
    eventually(lambda: stream.connected)
    for number in range(1, 201):
        stream.send(report(number, cgroup="x" * 20_000))  # more than the link's window holds
    assert (stream.unsent, stream.dropped) == (50, 150)
    release.set()
    eventually(lambda: stream.unsent == 0)
    assert server.seen == sorted(server.seen)
    assert server.seen[-50:] == list(range(151, 201))
    assert stream.dropped == 150


def test_server_without_the_service(stopped: list[Any]) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    stream = ControllerStream(f"127.0.0.1:{port}", node())
    stopped.append(stream)
    stream.start()
    eventually(lambda: "is not an expanse-controller" in stream.state)
    assert not stream.connected
    server.stop(0).wait()


def test_peer_that_speaks_another_protocol(stopped: list[Any]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        stream = ControllerStream(f"127.0.0.1:{listener.getsockname()[1]}", node())
        stopped.append(stream)
        stream.start()
        stream.send(report(1))
        peer, _ = listener.accept()
        peer.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
        peer.close()
        eventually(lambda: "cannot be reached" in stream.state)
    assert "\n" not in stream.state
    assert stream.unsent == 1


def test_stop_ends_its_threads_whatever_the_state() -> None:
    before = threading.active_count()
    server = Server(acknowledge)
    running = threading.active_count()
    never_started = ControllerStream(server.address, node())
    never_started.send(report(1))
    never_started.stop(0)
    unreachable = ControllerStream("127.0.0.1:1", node())
    unreachable.start()
    unreachable.send(report(1))
    unreachable.stop(0.1)
    unreachable.stop(0.1)
    connected = ControllerStream(server.address, node())
    connected.start()
    eventually(lambda: connected.connected)
    connected.stop(1)
    eventually(lambda: threading.active_count() <= running + 1)
    server.server.stop(0).wait()
    assert before <= running


def test_client_and_server_settings_are_a_matching_pair() -> None:
    client, server = dict(transport.client_options()), dict(transport.server_options())
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    permit = "grpc.keepalive_permit_without_calls"
    assert client[permit] == server[permit]
    assert client["grpc.enable_http_proxy"] == 0


def test_idle_link_is_pinged_and_not_cut(stopped: list[Any]) -> None:
    ping_s = 0.4
    server = Server(acknowledge, transport.server_options(min_ping_s=ping_s / 3))
    stream = ControllerStream(server.address, node(), ping_s=ping_s)
    stopped += [stream, server]
    stream.start()
    eventually(lambda: stream.connected)
    time.sleep(5 * ping_s)
    assert stream.connected
    assert server.calls == 1


def test_proxy_of_the_environment_is_not_used(stopped: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    server = Server(acknowledge)
    stream = ControllerStream(server.address, node())
    stopped += [stream, server]
    stream.start()
    stream.send(report(1))
    eventually(lambda: stream.unsent == 0)


def test_helper_processes_beside_a_live_stream(stopped: list[Any]) -> None:
    server = Server(acknowledge)
    stream = ControllerStream(server.address, node())
    stopped += [stream, server]
    stream.start()
    for number in range(1, 21):
        stream.send(report(number))
        assert subprocess.run(["true"], timeout=20).returncode == 0
    eventually(lambda: stream.unsent == 0)
    assert server.calls == 1


@pytest.mark.parametrize(
    ("code", "details", "words"),
    [
        (
            "UNAVAILABLE",
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to "
            "remote host: connect: Connection refused (111)",
            "connection refused",
        ),
        (
            "UNAVAILABLE",
            "DNS resolution failed for nowhere:1: Domain name not found",
            "its name does not resolve",
        ),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "no answer in time"),
        ("UNAVAILABLE", "Socket closed", "connection closed"),
        ("INTERNAL", "", "internal"),
        ("UNKNOWN", "two\nlines " + "x" * 500, "two lines " + "x" * 190),
    ],
)
def test_cause(code: str, details: str, words: str) -> None:
    assert cause(code, details) == words
