from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import selectors
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf import node_client, node_socket
from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.export import pprof
from expanse_ebpf.node_client import frame
from expanse_ebpf.node_socket import NodeSocket
from expanse_ebpf.top import client
from expanse_ebpf.visibility import visible
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_DONE,
    NodeReply,
    NodeRequest,
    ProcessesRequest,
    ProfilePart,
    RunRequest,
    TraceReply,
    TraceRequest,
    WatchProfileRequest,
    WatchRequest,
)
from tests.cli.tracing_node import WINDOW, MadeUpWindow, TracingNode, made_trace, parts, status
from tests.top.serving import ServedNode, make_report

ROOT = Path(__file__).parents[1]
# Prints, as one JSON line, what this user sees of two reports and of a question about a job.
LOOK = """
import json, sys
from itertools import islice
from expanse_ebpf.errors import ExpanseError
from expanse_ebpf.top import client
path, key = sys.argv[1:]
reports = list(islice(client.watch(path, history=2), 2))
try:
    asked = len(client.processes(path, key).processes)
except ExpanseError as error:
    asked = str(error)
print(json.dumps({
    "jobs": [[j.identity.id for j in r.jobs] for r in reports],
    "cpus": reports[-1].host.cpus_online,
    "overflow": reports[-1].host.overflow.page_faults,
    "pss": reports[-1].collector.pss_bytes,
    "asked": asked,
}))
"""
# Watches over as many connections as it may, says how many, and holds them until its input ends.
CROWD = """
from expanse_ebpf.errors import UnavailableError
held = []
for _ in range(int(sys.argv[2])):
    watching = client.watch(sys.argv[1], history=1)
    try:
        next(watching)
    except UnavailableError:
        continue
    held.append(watching)
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[str]:
    """A socket's path that every user can reach, which pytest's own folders are not."""
    directory = tempfile.mkdtemp(prefix="expanse-test-")
    Path(directory).chmod(0o755)
    yield f"{directory}/agent.sock"
    shutil.rmtree(directory)


@pytest.fixture
def node(path: str) -> Iterator[ServedNode]:
    with ServedNode(path) as served:
        yield served


@contextlib.contextmanager
def connected(path: str) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(10)
        connection.connect(path)
        yield connection


def replies(connection: socket.socket) -> Iterator[NodeReply]:
    """Replies until the server hangs up."""
    while True:
        head = read(connection, 4)
        if len(head) < 4:
            return
        yield NodeReply.FromString(read(connection, struct.unpack(">I", head)[0]))


def read(connection: socket.socket, size: int) -> bytes:
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < size and (more := connection.recv(size - len(data))):
            data += more
    return data


def eventually(condition: object, seconds: float = 10) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def as_user(uid: int, code: str, *arguments: str) -> subprocess.Popen[str]:
    """Python that becomes `uid` after its imports, since another user may not be able to read them."""
    become = (
        "import os, sys, json, socket\n"
        "from expanse_ebpf.top import client\n"
        f"os.setgroups([]); os.setresgid({uid}, {uid}, {uid}); os.setresuid({uid}, {uid}, {uid})\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", become + code, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


# ---- reports


def test_history_comes_first_then_each_new_report(node: ServedNode, path: str) -> None:
    for sequence in range(1, 6):
        node.publish(make_report(sequence))
    watching = client.watch(path, history=3)
    assert [r.sequence for r in islice(watching, 3)] == [3, 4, 5]
    node.publish(make_report(6))
    assert next(watching) == node.server._last


def test_without_history_only_new_reports_come(node: ServedNode, path: str) -> None:
    node.publish(make_report(1))
    with connected(path) as connection:
        connection.sendall(frame(NodeRequest(watch=WatchRequest())))
        eventually(lambda: any(c.watching for c in node.server._clients))
        node.publish(make_report(2))
        assert next(replies(connection)).report.sequence == 2


def test_history_is_bounded_by_number_and_by_bytes(node: ServedNode, monkeypatch: pytest.MonkeyPatch) -> None:
    for sequence in range(1, node_socket.HISTORY + 30):
        node.publish(make_report(sequence, jobs=0))
    assert len(node.server._history) == node_socket.HISTORY
    monkeypatch.setattr(node_socket, "HISTORY_BYTES", 10_000)
    node.publish(make_report(1000))
    assert node.server._history_bytes == sum(map(len, node.server._history)) <= 10_000


# ---- who sees what


@pytest.mark.parametrize(("uid", "own"), [(1000, ["4411"]), (65534, [])])
def test_another_user_sees_only_their_own_jobs(node: ServedNode, path: str, uid: int, own: list[str]) -> None:
    node.publish(make_report(1))
    unknown = make_report(2)
    unknown.jobs[2].identity.ClearField("uid")
    node.publish(unknown)
    out, _ = as_user(uid, LOOK, path, "slurm/4412").communicate(timeout=60)
    seen = json.loads(out)
    assert seen["jobs"] == [own, own]
    assert (seen["cpus"], seen["pss"], seen["overflow"]) == (64, 41 << 20, 0)
    assert seen["asked"] == "no job slurm/4412 of yours is on this node"
    assert node.asked == []


def test_a_user_may_ask_about_their_own_job(node: ServedNode, path: str) -> None:
    for sequence in (1, 2):
        node.publish(make_report(sequence))
    out, _ = as_user(1000, LOOK, path, "slurm/4411").communicate(timeout=60)
    assert json.loads(out)["asked"] == 5
    assert node.asked == [("slurm/4411", 0, 1000)]


def test_root_and_the_agents_own_user_see_everything(path: str) -> None:
    with ServedNode(path, agent_uid=1000) as node:
        for sequence in (1, 2):
            node.publish(make_report(sequence))
        out, _ = as_user(1000, LOOK, path, "slurm/4412").communicate(timeout=60)
        seen = json.loads(out)
        assert seen["jobs"] == [["4411", "4412", "4413"]] * 2
        assert (seen["overflow"], seen["asked"]) == (12345, 5)
        assert len(next(client.watch(path, history=1)).jobs) == 3


def test_a_report_is_filtered_once_per_user(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(node_socket, "visible", lambda report, uid: calls.append(uid) or visible(report, uid))
    node.server._all_seeing = {4242}
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(path)) for _ in range(3)]
        for connection in connections:
            connection.sendall(frame(NodeRequest(watch=WatchRequest())))
        eventually(lambda: sum(c.watching for c in node.server._clients) == 3)
        node.publish(make_report(1))
        assert [next(replies(c)).report.sequence for c in connections] == [1, 1, 1]
    assert calls == [0]


# ---- questions


def test_errors_of_an_answer_reach_the_client_as_one_line(node: ServedNode, path: str) -> None:
    with pytest.raises(UnavailableError, match=r"^no job slurm/0 on this node$"):
        client.processes(path, "slurm/0")


def test_a_fault_in_an_answer_does_not_end_the_agent(node: ServedNode, path: str) -> None:
    with pytest.raises(UnavailableError, match="see its log"):
        client.processes(path, "slurm/boom")
    assert len(client.processes(path, "slurm/4411", 7).processes) == 5
    assert node.asked[-1] == ("slurm/4411", 7, 0)


def test_run_knows_the_caller_by_credentials(node: ServedNode, path: str) -> None:
    reply = client.ask(path, NodeRequest(run=RunRequest(name="train")))
    assert reply.run.cgroup == f"/expanse/0/train/{os.getpid()}"


def test_an_agent_without_answers_says_so(path: str) -> None:
    with ServedNode(path) as node:
        node.server._on_run = None
        with pytest.raises(UnavailableError, match="kind run"):
            client.ask(path, NodeRequest(run=RunRequest(name="x")))


# ---- Python stacks


def function(part: ProfilePart) -> str:
    """The one function in a part; empty when there is none."""
    return "".join(s.frames[0].name for s in pprof.Reader(pprof.loads(part.pprof)).stacks())


def ask(**fields: object) -> bytes:
    return frame(NodeRequest(profile=WatchProfileRequest(**fields)))  # type: ignore[arg-type]


def test_a_part_comes_at_once_then_one_per_tick_and_the_last_when_enough(node: ServedNode, path: str) -> None:
    enough = False
    parts = client.profile(path, WatchProfileRequest(key="slurm/4411", run=7), lambda: enough)
    first = next(parts)
    assert (function(first), first.rate_hz) == ("", 49)
    (watch,) = node.watches
    assert (watch.request, watch.uid) == (WatchProfileRequest(key="slurm/4411", run=7), None)
    for number in (1, 2):
        node.publish(make_report(number))
        assert function(next(parts)) == f"part{number}"
    enough = True
    assert [function(part) for part in parts] == ["part3"]
    assert watch.asked == [False, False, False, True]
    eventually(lambda: watch.closed == 1 and node.clients() == 0)
    node.publish(make_report(3))
    assert watch.parts == 4


def test_a_client_who_hangs_up_is_watched_for_no_longer(node: ServedNode, path: str) -> None:
    with connected(path) as connection:
        connection.sendall(ask(pid=1))
        next(replies(connection))
    eventually(lambda: node.watches[0].closed and node.clients() == 0)
    node.publish(make_report(1))


def test_what_has_ended_is_told_and_hung_up_on(node: ServedNode, path: str) -> None:
    parts = client.profile(path, WatchProfileRequest(key="slurm/4411"), lambda: False)
    next(parts)
    node.watches[0].over = "the job has ended"
    node.publish(make_report(1))
    last = next(parts)
    assert (function(last), last.note) == ("part1", "the job has ended")
    with pytest.raises(client.HungUpError):
        next(parts)
    assert node.watches[0].closed == 1


def test_a_question_about_stacks_that_cannot_be_answered_is_one_line(node: ServedNode, path: str) -> None:
    for key, words in (("slurm/0", "no job slurm/0 on this node"), ("slurm/boom", "see its log")):
        with pytest.raises(UnavailableError, match=words):
            next(client.profile(path, WatchProfileRequest(key=key), lambda: False))
    eventually(lambda: node.clients() == 0)
    node.server._on_profile = None
    with pytest.raises(UnavailableError, match="kind profile"):
        next(client.profile(path, WatchProfileRequest(key="slurm/4411"), lambda: False))


def test_who_looks_at_stacks_is_not_dropped_for_being_quiet(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_client, "QUIET_S", 0.05)
    parts = client.profile(path, WatchProfileRequest(key="slurm/4411"), lambda: False)
    next(parts)
    time.sleep(0.1)
    for number in (1, 2):
        node.publish(make_report(number))
        assert function(next(parts)) == f"part{number}"
    parts.close()


def test_two_requests_on_one_connection_are_refused(node: ServedNode, path: str) -> None:
    with connected(path) as connection:
        connection.sendall(ask(key="slurm/4411") * 2)
        answers = list(replies(connection))
    assert [answer.WhichOneof("reply") for answer in answers] == ["profile", "error"]
    eventually(lambda: node.watches[0].closed == 1)
    assert len(node.watches) == 1


def test_users_ask_in_their_own_name_and_only_so_many_at_a_time(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node.server._all_seeing = set()
    with contextlib.ExitStack() as stack:

        def begin() -> NodeReply:
            connection = stack.enter_context(connected(path))
            connection.sendall(ask(key="slurm/4411"))
            return next(replies(connection))

        for _ in range(node_socket.MAX_PROFILES_PER_UID):
            assert begin().WhichOneof("reply") == "profile"
        assert "as many users as it can" in begin().error
        monkeypatch.setattr(node_socket, "MAX_PROFILES_PER_UID", 99)
        monkeypatch.setattr(node_socket, "MAX_PROFILES", 3)
        assert begin().WhichOneof("reply") == "profile"
        assert "as many users as it can" in begin().error
        node.server._all_seeing = {0}
        assert begin().WhichOneof("reply") == "profile"
        assert [watch.uid for watch in node.watches] == [0, 0, 0, None]


def test_profiles_of_a_report_stay_with_the_controller(node: ServedNode, path: str) -> None:
    report = make_report(1)
    report.profiles.add(pprof=b"x" * 1_000_000, from_ns=1, to_ns=2)
    node.publish(report)
    seen = next(client.watch(path, history=1))
    assert not seen.profiles
    assert len(seen.jobs) == 3
    assert node.server._history_bytes < 100_000
    assert len(report.profiles) == 1
    assert not visible(report, 1000).profiles
    assert visible(report, 1000).jobs[0].HasField("python")


# ---- windows


@pytest.fixture
def tracing(path: str) -> Iterator[TracingNode]:
    with TracingNode(path) as served:
        yield served


def trace(**fields: object) -> bytes:
    return frame(NodeRequest(trace=TraceRequest(**{"key": "slurm/4411", **fields})))  # type: ignore[arg-type]


@contextlib.contextmanager
def window(node: TracingNode) -> Iterator[tuple[MadeUpWindow, socket.socket, Iterator[NodeReply]]]:
    """A window that has just been opened, its client, and what that gets."""
    with connected(node.path) as connection:
        number = len(node.windows)
        connection.sendall(trace())
        eventually(lambda: len(node.windows) > number)
        yield node.windows[number], connection, replies(connection)


def told(reason: str = "") -> TraceReply:
    return TraceReply(status=status(reason=reason))


def test_what_comes_of_a_window_is_told_when_it_comes_and_at_each_tick(tracing: TracingNode) -> None:
    tracing.begin = lambda made: made.waiting.append(told("at once"))
    with window(tracing) as (made, _, heard):
        assert (made.request, made.uid) == (TraceRequest(key="slurm/4411"), None)
        assert next(heard).trace == told("at once")
        made.waiting.append(told("with the report"))
        tracing.publish(make_report(1))
        assert next(heard).trace == told("with the report")
        tracing.do(lambda: made.waiting.extend([told("a"), told("b")]))
        assert [next(heard).trace.status.reason for _ in "ab"] == ["a", "b"]
        final, pieces = TraceReply(status=status(TRACE_STATE_DONE)), parts(made_trace(), 100)
        tracing.do(lambda: made.end([final, *pieces]))
        assert [reply.trace for reply in heard] == [final, *pieces]  # and then it hangs up
        assert made.closed == 1
    assert made.stops == 0
    eventually(lambda: tracing.clients() == 0)


def test_who_has_seen_enough_of_a_window_still_gets_its_trace(tracing: TracingNode) -> None:
    with window(tracing) as (made, connection, heard):
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: made.stops == 1)
        tracing.publish(make_report(1))
        tracing.do(lambda: made.waiting.append(told("ends")))
        assert next(heard).trace == told("ends")
        assert made.closed == 0
        tracing.do(lambda: made.end(parts(made_trace(), 100)))
        assert [reply.trace for reply in heard] == parts(made_trace(), 100)
    assert (made.stops, made.closed) == (1, 1)


def test_the_loop_sleeps_while_a_client_that_has_shut_down_its_side_waits(tracing: TracingNode) -> None:
    with window(tracing) as (made, connection, _):
        connection.shutdown(socket.SHUT_WR)
        eventually(lambda: made.stops == 1)
        (client,) = tracing.server._clients
        assert tracing._selector.get_key(client.socket).events == 0
        with selectors.DefaultSelector() as selector:  # as the agent's own, which is in use
            selector.register(client.socket, selectors.EVENT_READ)
            selector.modify(client.socket, 0)
            assert selector.select(0) == []


@pytest.mark.parametrize("half_closed", [False, True])
def test_a_client_that_is_killed_ends_its_window(tracing: TracingNode, half_closed: bool) -> None:
    code = "import time\nc = client._connect(sys.argv[1])\nc.sendall(bytes.fromhex(sys.argv[2]))\n"
    code += "c.shutdown(1)\n" if half_closed else ""
    process = as_user(0, code + "time.sleep(60)", tracing.path, trace().hex())
    try:
        eventually(lambda: tracing.windows and tracing.windows[0].stops == half_closed, 30)
        assert tracing.windows[0].closed == 0
        process.kill()
        eventually(lambda: tracing.windows[0].closed == 1)
        assert tracing.clients() == 0
    finally:
        process.kill()
        process.communicate()


def test_parts_are_asked_for_when_those_before_have_gone_out(tracing: TracingNode) -> None:
    trace_of_megabytes = made_trace(padding=os.urandom(4 << 20))
    pieces = parts(trace_of_megabytes, level=0)
    assert len(pieces) > 8

    def begin(made: MadeUpWindow) -> None:
        made.at_a_time = 1
        made.end(pieces)

    tracing.begin = begin
    with window(tracing) as (made, _, heard):
        (client,) = tracing.server._clients
        for sequence in range(1, 4):
            tracing.publish(make_report(sequence))  # nothing more goes out for that
            assert client.pending_bytes <= (512 << 10) + 100
            assert len(made.waiting) >= len(pieces) - 2
        assert [reply.trace for reply in heard] == pieces
        assert made.closed == 1


def test_a_client_that_takes_no_part_is_dropped_in_time(
    tracing: TracingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    with window(tracing) as (made, _, _):
        (client,) = tracing.server._clients
        tracing.do(lambda: made.end(parts(made_trace(padding=os.urandom(1 << 20)), level=0)))
        assert client.pending
        tracing.publish(make_report(1))
        assert (made.closed, tracing.clients()) == (0, 1)
        monkeypatch.setattr(node_client, "TAKE_S", -1.0)
        tracing.publish(make_report(2))
        assert (made.closed, tracing.clients()) == (1, 0)


def test_a_quiet_window_does_not_count_as_a_quiet_client(
    tracing: TracingNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_client, "QUIET_S", -1.0)
    with window(tracing) as (made, _, heard):
        tracing.publish(make_report(1))
        tracing.do(lambda: made.end([told("at last")]))
        assert next(heard).trace == told("at last")


def test_two_users_have_a_window_each_and_no_more(
    tracing: TracingNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = (
        "c = client._connect(sys.argv[1])\nc.sendall(bytes.fromhex(sys.argv[2]))\n"
        "print(client._receive(c, sys.argv[1]).trace.status.reason, flush=True)\nsys.stdin.read()"
    )
    tracing.begin = lambda made: made.waiting.append(told("opened"))
    users = [as_user(uid, code, path, trace(stacks=True).hex()) for uid in (2000, 2001)]
    try:
        assert [user.stdout.readline() for user in users if user.stdout] == ["opened\n"] * 2
        assert sorted(made.uid or 0 for made in tracing.windows) == [2000, 2001]
        assert all(made.request.stacks for made in tracing.windows)
        state = code.replace("status.reason", "status")
        again = as_user(2000, state, path, trace(key="run/x").hex()).communicate(timeout=60)[0]
        assert "TRACE_STATE_BUDGET" in again
        assert f"you have a window open already ({WINDOW} of slurm/4411); wait for its end" in again
        assert 'id: "x"' in again
        assert len(tracing.windows) == 2
        monkeypatch.setattr(node_socket, "MAX_TRACES", 2)
        third = as_user(2002, state, path, trace().hex()).communicate(timeout=60)[0]
        assert "TRACE_STATE_BUDGET" in third
        assert "users have as many windows open on this node as they may; try again" in third
        with window(tracing) as (made, _, _):  # root has its own room
            assert made.uid is None
    finally:
        for user in users:
            user.communicate(timeout=30)
    eventually(lambda: tracing.clients() == 0)
    assert [made.closed for made in tracing.windows] == [1, 1, 1]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"key": ""}, "'' is not a job's key"),
        ({"key": "slurm/x"}, "'slurm/x' is not a job's key"),
        ({"seconds": math.nan}, "seconds of a window: nan is not between 0.1 and 3600"),
        ({"seconds": math.inf}, "seconds of a window: inf"),
        ({"seconds": -1.0}, "seconds of a window: -1"),
        ({"seconds": 1e9}, "seconds of a window: 1e+09"),
        ({"cost_share": math.nan}, "cost_share of a window: nan"),
        ({"cost_share": 1.5}, "cost_share of a window: 1.5 is not between 0.0001 and 1"),
        ({"run_share": -0.3}, "run_share of a window: -0.3"),
        ({"key": "slurm/0"}, "no job slurm/0 on this node"),
        ({"key": "run/boom"}, "see its log"),
        ({"key": "run/" + "x" * 5000}, "a request of 5010 bytes; 4096 are allowed"),
    ],
)
def test_a_window_that_cannot_be_is_refused_in_one_line(
    tracing: TracingNode, fields: dict[str, object], words: str
) -> None:
    with connected(tracing.path) as connection:
        connection.sendall(trace(**fields))
        reply = next(replies(connection))
    assert words in reply.error
    assert "\n" not in reply.error
    assert tracing.windows == []
    eventually(lambda: tracing.clients() == 0)


def test_ten_megabytes_of_key_are_refused_unread(tracing: TracingNode) -> None:
    with connected(tracing.path) as connection:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(trace(key="run/" + "x" * 10_000_000))
        # What was sent and not read makes the kernel reset the connection; the answer comes before that.
        head = connection.recv(4)
        assert "are allowed" in NodeReply.FromString(connection.recv(struct.unpack(">I", head)[0])).error
    eventually(lambda: tracing.clients() == 0)


def test_what_is_for_a_controller_to_say_does_not_get_through(tracing: TracingNode) -> None:
    asked = TraceRequest(
        key="slurm/4411", id="0" * 16, rule="mine", start_ns=1 << 62, node="other", seconds=5
    )
    asked.run, asked.cost_share, asked.run_share, asked.stacks = 7, 0.05, 0.5, True
    asked.evidence.add(name="made up", value=1)
    data = asked.SerializeToString() + b"\xfa\x7f\x03abc"  # field 2047, which nobody knows
    body = NodeRequest.FromString(b"\x2a" + bytes([len(data)]) + data).SerializeToString()
    with connected(tracing.path) as connection:
        connection.sendall(struct.pack(">I", len(body)) + body)
        eventually(lambda: tracing.windows)
        assert tracing.windows[0].request == TraceRequest(
            key="slurm/4411", run=7, seconds=5, cost_share=0.05, run_share=0.5, stacks=True
        )


def test_a_window_whose_source_fails_is_told_and_closed(tracing: TracingNode) -> None:
    with window(tracing) as (made, _, heard):
        made.replies = None  # type: ignore[method-assign, assignment]
        tracing.publish(make_report(1))
        (reply,) = heard
        assert "see its log" in reply.error
        assert made.closed == 1
    assert tracing.failure is None


def test_one_connection_has_one_stream(tracing: TracingNode) -> None:
    with connected(tracing.path) as connection:
        connection.sendall(trace() + ask(key="slurm/4411"))
        (reply,) = replies(connection)
        assert "does not answer a request of kind profile here" in reply.error
    assert [made.closed for made in tracing.windows] == [1]


def test_an_agent_that_opens_no_windows_says_so(node: ServedNode) -> None:
    with connected(node.path) as connection:
        connection.sendall(trace())
        assert "kind trace" in next(replies(connection)).error


def test_traces_of_a_report_stay_with_the_controller_and_statuses_do_not(node: ServedNode, path: str) -> None:
    report = make_report(1)
    report.traces.add(id="1" * 16).identity.CopyFrom(report.jobs[0].identity)
    report.trace_parts.add(id="1" * 16, parts=1, data=b"x" * 500_000)
    node.publish(report)
    seen = next(client.watch(path, history=1))
    assert (len(seen.traces), len(seen.trace_parts), len(report.trace_parts)) == (1, 0, 1)
    assert node.server._history_bytes < 100_000


# ---- hostile and slow clients


def test_a_malformed_request_is_answered_then_hung_up_on(node: ServedNode, path: str) -> None:
    for request in (
        b"\0\0\0\3\xff\xff\xff",
        b"\0\0\0\0",
        struct.pack(">I", 1 << 31) + b"x",
        b"GET / HTTP/1.1\r\n\r\n",
    ):
        with connected(path) as connection:
            connection.sendall(request)
            answers = list(replies(connection))  # ends, so the server did hang up
            assert len(answers) == 1
            assert answers[0].error
    eventually(lambda: node.clients() == 0)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=80).map(lambda body: struct.pack(">I", len(body)) + body),
        st.lists(st.sampled_from(["slurm/4411", "", "x" * 500, "\0"]), max_size=4).map(
            lambda keys: b"".join(frame(NodeRequest(processes=ProcessesRequest(key=key))) for key in keys)
        ),
    ),
    st.booleans(),
)
def test_any_bytes_leave_the_server_alive(node: ServedNode, data: bytes, half_close: bool) -> None:
    if node.server._last is None:
        node.publish(make_report(1))
    with connected(node.path) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.sendall(data)
        if half_close:
            connection.shutdown(socket.SHUT_WR)
            for reply in replies(connection):
                assert reply.WhichOneof("reply")
    assert node.failure is None
    assert next(client.watch(node.path, history=1)).sequence == 1


def test_a_client_that_does_not_read_is_dropped(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "MAX_PENDING_ALL", 200_000)
    with connected(path) as deaf, connected(path) as reader:
        for connection in (deaf, reader):
            connection.sendall(frame(NodeRequest(watch=WatchRequest())))
        eventually(lambda: sum(c.watching for c in node.server._clients) == 2)
        listening = replies(reader)
        for sequence in range(1, 40):
            node.publish(make_report(sequence, jobs=60))
            assert next(listening).report.sequence == sequence
        assert node.clients() == 1


def test_a_quiet_client_is_dropped_and_a_watcher_is_not(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_client, "QUIET_S", 0.05)
    with connected(path) as quiet, connected(path) as watcher:
        watcher.sendall(frame(NodeRequest(watch=WatchRequest())))
        quiet.sendall(b"\0\0")  # a beginning does not count
        eventually(lambda: node.clients() == 2 and any(c.watching for c in node.server._clients))
        time.sleep(0.1)
        node.publish(make_report(1))
        assert next(replies(watcher)).report.sequence == 1
        assert list(replies(quiet)) == []


def test_a_client_that_hangs_up_is_forgotten(node: ServedNode, path: str) -> None:
    with connected(path) as connection:
        connection.sendall(frame(NodeRequest(watch=WatchRequest())))
        eventually(lambda: node.clients() == 1)
    eventually(lambda: node.clients() == 0)


def test_users_cannot_lock_out_root(node: ServedNode, path: str) -> None:
    node.publish(make_report(1))
    crowds: list[subprocess.Popen[str]] = []
    held: list[int] = []
    try:
        for uid in range(2000, 2008):
            crowds.append(as_user(uid, CROWD, path, "10"))
            assert crowds[-1].stdout is not None
            held.append(int(crowds[-1].stdout.readline()))
        assert held[0] == node_socket.MAX_CLIENTS_PER_UID
        assert sum(held) == node_socket.MAX_CLIENTS - node_socket.RESERVED
        assert next(client.watch(path, history=1)).sequence == 1
    finally:
        for crowd in crowds:
            crowd.communicate(timeout=30)


def test_a_user_who_asks_too_fast_is_told_so(
    node: ServedNode, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_socket, "REQUEST_BURST", 3.0)
    monkeypatch.setattr(node_socket, "REQUESTS_PER_S", 0.001)
    node.publish(make_report(1))
    node.server._all_seeing = set()
    ask = frame(NodeRequest(processes=ProcessesRequest(key="slurm/4411")))
    with connected(path) as connection:
        connection.sendall(ask * 5)
        errors = [reply.error for reply in replies(connection)]
    assert len(errors) == 4
    assert "more slowly" in errors[-1]


def test_a_full_table_of_descriptors_does_not_keep_the_loop_awake(path: str) -> None:
    selector = selectors.DefaultSelector()
    server = NodeSocket(path, selector)
    server.open()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held: list[int] = []
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        try:
            resource.setrlimit(
                resource.RLIMIT_NOFILE, (max(int(p.name) for p in Path("/proc/self/fd").iterdir()) + 8, hard)
            )
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.dup(0))
            for key, mask in selector.select(5):
                key.data(mask)
            assert selector.select(0) == []
        finally:
            for fd in held:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert connection.recv(1) == b""
    server.close()
    selector.close()


# ---- opening and closing


def test_everyone_may_connect_and_close_removes_the_file(path: str) -> None:
    inner = f"{Path(path).parent}/run/agent.sock"
    before = os.umask(0o077)
    try:
        with ServedNode(inner):
            assert stat.S_IMODE(Path(inner).stat().st_mode) == 0o666
            assert stat.S_IMODE(Path(inner).parent.stat().st_mode) == 0o755
            assert [p.name for p in Path(inner).parent.iterdir()] == ["agent.sock"]
    finally:
        os.umask(before)
    assert list(Path(inner).parent.iterdir()) == []


def test_a_stale_socket_is_replaced(path: str) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    with ServedNode(path) as node:
        node.publish(make_report(1))
        assert next(client.watch(path, history=1)).sequence == 1


def test_a_live_agent_is_left_alone(node: ServedNode, path: str) -> None:
    node.publish(make_report(1))
    with selectors.DefaultSelector() as selector:
        second = NodeSocket(path, selector)
        with pytest.raises(UnavailableError, match="an agent already runs"):
            second.open()
        second.close()
    assert next(client.watch(path, history=1)).sequence == 1


def test_close_leaves_another_agents_socket(path: str) -> None:
    with ServedNode(path):
        Path(path).unlink()
        with socket.socket(socket.AF_UNIX) as other:
            other.bind(path)
    assert Path(path).is_socket()


@pytest.mark.parametrize("name", ["file", "x" * 110])
def test_a_path_that_cannot_be_a_socket_is_a_configuration_error(path: str, name: str) -> None:
    place = f"{Path(path).parent}/{name}"
    with contextlib.suppress(OSError):
        Path(place).write_text("precious")
    with selectors.DefaultSelector() as selector, pytest.raises(ConfigError, match=r"agent\.socket"):
        NodeSocket(place, selector).open()
    if name == "file":
        assert Path(place).read_text() == "precious"


def test_a_place_that_cannot_be_written_is_told_with_its_cause(path: str) -> None:
    Path(path).write_text("")
    with selectors.DefaultSelector() as selector, pytest.raises(UnavailableError, match="File exists"):
        NodeSocket(f"{path}/agent.sock", selector).open()
