"""The stream against servers that are not as they should be."""

from __future__ import annotations

import select
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from expanse_ebpf.ship.client import MAX_COMMANDS, ControllerStream
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import Acknowledgement, Downstream, TraceRequest, Upstream
from expanse_ebpf.wire.failure import cause
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


def window(number: int) -> TraceRequest:
    return TraceRequest(id=f"{number:016x}", key="slurm/123")


class Commanding(Server):
    """A controller that sends what it is given, and acknowledges nothing."""

    def __init__(self) -> None:
        self.given: list[list[Downstream]] = []
        self.more = threading.Semaphore(0)
        super().__init__(Commanding._give)

    def give(self, *messages: Downstream) -> None:
        self.given.append(list(messages))
        self.more.release()

    def _give(self, _: Iterator[Upstream], context: Any) -> Iterator[Downstream]:
        while context.is_active():
            if self.more.acquire(timeout=0.05):
                yield from self.given.pop(0)


def readable(stream: ControllerStream, timeout: float) -> bool:
    return bool(select.select([stream.commands_fd], [], [], timeout)[0])


@pytest.fixture
def commanding(stopped: list[Any]) -> tuple[Commanding, ControllerStream]:
    server = Commanding()
    stream = ControllerStream(server.address, node())
    stopped += [stream, server]
    stream.start()
    eventually(lambda: stream.connected)
    return server, stream


def test_commands_come_in_order_and_wake_a_selector(commanding: tuple[Commanding, ControllerStream]) -> None:
    server, stream = commanding
    assert not readable(stream, 0)
    assert stream.take_commands() == []
    server.give(Downstream(trace=window(1)))
    assert readable(stream, 10)
    assert stream.take_commands() == [window(1)]
    assert not readable(stream, 0)
    server.give(*(Downstream(trace=window(n)) for n in (2, 3)))
    taken: list[TraceRequest] = []
    eventually(lambda: taken.extend(stream.take_commands()) or len(taken) == 2)
    assert taken == [window(2), window(3)]


def test_command_that_comes_again_is_taken_once(commanding: tuple[Commanding, ControllerStream]) -> None:
    server, stream = commanding
    server.give(*(Downstream(trace=window(n)) for n in (1, 1, 2)))
    eventually(lambda: len(stream._commands) == 2)
    assert stream.take_commands() == [window(1), window(2)]
    server.give(*(Downstream(trace=window(n)) for n in (1, 3)))
    assert readable(stream, 10)
    assert stream.take_commands() == [window(3)]


def test_what_is_no_command_is_left_out_with_one_line(
    commanding: tuple[Commanding, ControllerStream], caplog: pytest.LogCaptureFixture
) -> None:
    server, stream = commanding
    unknown = Downstream.FromString(b"\xba\x3e\x00")  # a field that this release does not have
    bad = Downstream(trace=TraceRequest(id="../x", key="slurm/1"))
    server.give(unknown, bad, Downstream(), Downstream(trace=window(1)))
    assert readable(stream, 10)
    assert stream.take_commands() == [window(1)]
    assert [record.message for record in caplog.records] == [
        f"controller {server.address} asks for something that this release does not know; it is left out"
    ]


def test_flood_of_commands_is_cut(commanding: tuple[Commanding, ControllerStream]) -> None:
    server, stream = commanding
    server.give(*(Downstream(trace=window(n)) for n in range(MAX_COMMANDS + 20)))
    server.give(Downstream(acknowledgement=Acknowledgement(sequence=1)))
    stream.send(report(1))
    eventually(lambda: stream.unsent == 0)
    assert stream.take_commands() == [window(n) for n in range(MAX_COMMANDS)]


def test_stop_closes_the_descriptor_once(commanding: tuple[Commanding, ControllerStream]) -> None:
    server, stream = commanding
    descriptor = stream.commands_fd
    server.give(Downstream(trace=window(1)))
    assert readable(stream, 10)
    stream.stop(0)
    assert not Path(f"/proc/self/fd/{descriptor}").exists()
    assert stream.commands_fd == -1
    assert stream.take_commands() == [window(1)]
    stream.stop(0)


def test_waiting_stream_does_not_poll(commanding: tuple[Commanding, ControllerStream]) -> None:
    _, stream = commanding
    assert stream._thread is not None
    status = Path(f"/proc/self/task/{stream._thread.native_id}/status")

    def waits() -> int:
        found = [line for line in status.read_text().splitlines() if line.startswith("voluntary_ctxt")]
        return int(found[0].split()[1])

    before = waits()
    time.sleep(1.0)
    assert waits() - before <= 3  # gRPC's own way would be ten


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
