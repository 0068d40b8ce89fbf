from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.top import client
from expanse_ebpf.top.feed import LocalFeed
from expanse_ebpf.wire.collector_pb2 import NodeReply, ProfilePart, WatchProfileRequest
from tests.top.serving import ServedNode, make_report


@contextmanager
def answering(path: Path, answer: bytes) -> Iterator[str]:
    """Something that takes connections, says `answer` to each and hangs up."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                connection.recv(4096)
                connection.sendall(answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield str(path)
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)


def test_no_agent_is_one_line_with_the_remedy(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with pytest.raises(
        UnavailableError, match=f"^no agent answers on {path}: start it with `expanse-ebpf agent`"
    ):
        next(client.watch(path))
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with pytest.raises(UnavailableError, match="no agent answers"):
        client.processes(path, "slurm/1")


def test_a_path_that_is_no_socket(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / ("x" * 200)):
        with pytest.raises(UnavailableError, match="--socket"):
            next(client.watch(str(place)))


def test_an_agent_that_goes_away_ends_the_watch_with_an_error(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        node.publish(make_report(1))
        watching = client.watch(path, history=5)
        assert next(watching).sequence == 1
    with pytest.raises(UnavailableError, match="hung up"):
        next(watching)


def test_stop_ends_the_watch_without_a_new_report(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    stop = threading.Event()
    with ServedNode(path) as node:
        node.publish(make_report(1))
        watching = LocalFeed(path).reports(1, stop.is_set)
        assert next(watching).sequence == 1
        stop.set()
        assert list(watching) == []


def test_a_part_that_has_half_come_when_it_is_enough_is_not_lost(tmp_path: Path) -> None:
    """The agent sends a part's rest, and the last part, once the client says that it has enough."""
    bodies = [NodeReply(profile=ProfilePart(note=note)).SerializeToString() for note in ("one", "two")]
    one, two = (struct.pack(">I", len(body)) + body for body in bodies)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "agent.sock"))
    listener.listen()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(10)
            connection.recv(4096)
            connection.sendall(one[:6])
            while connection.recv(4096):  # until the client shuts down its side
                pass
            connection.sendall(one[6:] + two)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        parts = client.profile(str(tmp_path / "agent.sock"), WatchProfileRequest(), lambda: True)
        assert [part.note for part in parts] == ["one", "two"]
    finally:
        thread.join(20)
        listener.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=60).map(lambda body: struct.pack(">I", len(body)) + body),
        st.just(b"\xff" * 8),
        st.just(b"\0\0\0\0"),
    )
)
def test_whatever_answers_the_client_raises_one_kind_of_error(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "agent.sock", answer) as path, pytest.raises(UnavailableError):
        for _ in client.watch(path):
            pass
