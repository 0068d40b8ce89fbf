"""Windows through the controller: asked for, opened on every node at once, followed, stored and listed."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import pytest

from expanse_controller.ingest import MAX_WAITING_BYTES, Figures, Ingest
from expanse_controller.reader import Reader
from expanse_controller.rules.engine import Firing
from expanse_controller.rules.watch import RuleWatch
from expanse_controller.store import Item, Store
from expanse_controller.windows import ANSWER_S, LONGEST_S, START_S, RefusedError, Windows
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.ship import remote
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_BUDGET,
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_PROBE_POINT,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    Evidence,
    Hello,
    RuleState,
    TraceReply,
    TraceRequest,
    Upstream,
)
from tests.controller.agents import ID, Agent, parts_of, status
from tests.controller.process import Controller, client, eventually, node, report, up
from tests.controller.test_metrics import named, scrape

KEY = "slurm/123"
SECOND = 1_000_000_000


class Follower:
    """Somebody who asks for a window and reads what comes, in a thread."""

    def __init__(self, address: str, key: str = KEY, **request: Any) -> None:
        self.replies: list[TraceReply] = []
        self._thread = ThreadPoolExecutor(1)
        self._done: Future[None] = self._thread.submit(
            self._read, remote.trace(address, TraceRequest(key=key, **request))
        )

    def _read(self, replies: Iterable[TraceReply]) -> None:
        self.replies.extend(replies)

    def wait(self) -> None:
        """Until the stream has ended; raises what it ended with."""
        try:
            self._done.result(30)
        finally:
            self._thread.shutdown()

    def states(self, name: str) -> list[int]:
        """The node's states, each once."""
        found = [r.status.state for r in self.replies if r.node == name and r.HasField("status")]
        return [state for i, state in enumerate(found) if found[i - 1 : i] != [state]]

    def data(self, name: str) -> list[bytes]:
        return [r.part.data for r in self.replies if r.node == name and r.HasField("part")]


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as running:
        yield running


def rows(db: Path, what: str = "window, part, data") -> list[tuple[Any, ...]]:
    with sqlite3.connect(db) as connection:
        return connection.execute(
            f"SELECT {what} FROM traces LEFT JOIN trace_parts ON trace = traces.id ORDER BY traces.id, part"
        ).fetchall()


def refused(controller: Controller) -> dict[str, float]:
    found = named(scrape(controller.metrics), "expanse_controller_traces_refused_total")
    return {dict(labels)["reason"]: value for labels, value in found.items()}


def test_window_of_two_nodes_begins_at_the_same_time_and_both_traces_come(controller: Controller) -> None:
    with Agent(controller.address, "a", run=7) as a, Agent(controller.address, "b", run=8) as b:
        a.report()
        b.report()
        before = time.time_ns()
        follower = Follower(controller.address, seconds=3, stacks=True, cost_share=0.01)
        first, second = a.command(), b.command()
        assert first.start_ns == second.start_ns
        assert before < first.start_ns <= time.time_ns() + 2 * SECOND
        assert first.id == second.id
        assert len(bytes.fromhex(first.id)) == 8
        assert [(c.key, c.run, c.seconds, c.stacks, c.cost_share) for c in (first, second)] == [
            (KEY, run, 3, True, 0.01) for run in (7, 8)
        ]
        a.trace(first.id, b"one", b"two")
        b.report(status(first.id, TRACE_STATE_OPEN))
        b.report(status(first.id, TRACE_STATE_NO_PROBE_POINT, from_ns=0, reason="nothing to probe"))
        follower.wait()
    assert follower.states("a") == [TRACE_STATE_WAITING, TRACE_STATE_OPEN, TRACE_STATE_DONE]
    assert follower.states("b") == [TRACE_STATE_WAITING, TRACE_STATE_OPEN, TRACE_STATE_NO_PROBE_POINT]
    assert (follower.data("a"), follower.data("b")) == ([b"one", b"two"], [])
    of_a = [reply for reply in follower.replies if reply.node == "a"]
    assert [reply.HasField("part") for reply in of_a] == [False] * (len(of_a) - 2) + [True] * 2
    listed = remote.traces(controller.address, KEY)
    assert [(trace.node, trace.status.state, trace.bytes) for trace in listed] == [
        ("b", TRACE_STATE_NO_PROBE_POINT, 0),
        ("a", TRACE_STATE_DONE, 6),
    ]
    stored = list(remote.stored_traces(controller.address, first.id))
    assert [(reply.node, reply.part.data) for reply in stored] == [
        *(("a", data) for data in (b"", b"one", b"two")),
        ("b", b""),
    ]
    ended = named(scrape(controller.metrics), "expanse_controller_windows_total")
    assert {dict(k)["state"]: v for k, v in ended.items()} == {"done": 1, "no_probe_point": 1}


def test_command_is_there_soon_on_a_link_that_is_idle(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        made = agent.made()
        made.interval_ns = 60 * SECOND
        agent._stream.send(made)
        agent.all_stored()
        time.sleep(0.5)  # nothing is owed by anybody
        follower = Follower(controller.address)
        begin = time.monotonic()
        command = agent.command()
        assert time.monotonic() - begin < 2
        agent.trace(command.id, b"x")
        follower.wait()
    assert follower.data("gpu001") == [b"x"]


def test_unknown_job_is_one_answer_and_no_error(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report()
        for key, request in (("slurm/9", {}), (KEY, {"run": 5})):
            (reply,) = remote.trace(controller.address, TraceRequest(key=key, **request))
            assert reply.status.state == TRACE_STATE_NO_TARGETS
            assert reply.status.reason == f"no node has a live job {key}"
            assert (reply.node, reply.status.identity.scheduler) == ("", "slurm")
        assert agent.commands(0) == []
    assert rows(controller.db) == []


def test_a_job_that_is_not_on_the_node_is_told_with_the_nodes_it_is_on(controller: Controller) -> None:
    with Agent(controller.address, "b", run=7) as b, Agent(controller.address, "a", run=8) as a:
        a.report()
        b.report()
        (reply,) = remote.trace(controller.address, TraceRequest(key=KEY, node="gpu999"))
        assert reply.status.state == TRACE_STATE_NO_TARGETS
        assert reply.status.reason == f"{KEY} is not on node gpu999; it is on: a, b"
        (reply,) = remote.trace(controller.address, TraceRequest(key=KEY, node="gpu999", run=8))
        assert reply.status.reason == f"{KEY} is not on node gpu999; it is on: a"
        (reply,) = remote.trace(controller.address, TraceRequest(key="slurm/9", node="a"))
        assert reply.status.reason == "no node has a live job slurm/9"
        assert (a.commands(0), b.commands(0)) == ([], [])


@pytest.mark.parametrize(
    "request_", [{"key": "nonsense"}, {"seconds": -1}, {"seconds": float("nan")}, {"cost_share": 2}]
)
def test_absurd_request_is_refused(request_: dict[str, Any], controller: Controller) -> None:
    with pytest.raises(UnavailableError, match=r"not a job's key|seconds must lie"):
        list(remote.trace(controller.address, TraceRequest(**{"key": KEY, **request_})))


def test_one_window_of_a_job_at_a_time(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report()
        follower = Follower(controller.address)
        first = agent.command()
        (reply,) = remote.trace(controller.address, TraceRequest(key=KEY))
        assert reply.status.state == TRACE_STATE_BUDGET
        assert first.id in reply.status.reason
        agent.trace(first.id, b"x")
        follower.wait()
        again = Follower(controller.address)
        second = agent.command()
        assert second.id != first.id
        agent.trace(second.id, b"y")
        again.wait()
    assert again.data("gpu001") == [b"y"]


def test_node_that_is_not_connected_fails_alone(controller: Controller) -> None:
    with Agent(controller.address, "a") as here, Agent(controller.address, "b") as gone:
        here.report()
        gone.report()
        gone.hang_up()
        eventually(lambda: scrape(controller.metrics)["expanse_controller_streams", frozenset()] == 1)
        follower = Follower(controller.address)
        here.trace(here.command().id, b"x")
        follower.wait()
    assert follower.states("b") == [TRACE_STATE_FAILED]
    assert follower.data("a") == [b"x"]
    reasons = {trace.node: trace.status.reason for trace in remote.traces(controller.address)}
    assert reasons == {"a": "", "b": "b is not connected to the controller"}


def test_node_that_comes_back_hears_of_the_window_until_it_has_spoken_of_it(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report()
        follower = Follower(controller.address)
        first = agent.command()
        agent.reconnect()
        assert agent.command() == first
        agent.report(status(first.id, TRACE_STATE_OPEN, start_ns=time.time_ns()))
        agent.reconnect()
        agent.report(status(first.id), parts=parts_of(first.id, b"one", b"two")[:1])
        assert agent.commands(0) == []
        agent.reconnect()
        agent.report(parts=parts_of(first.id, b"one", b"two")[1:])
        follower.wait()
    assert follower.data("gpu001") == [b"one", b"two"]
    assert refused(controller) == {}


def test_hanging_up_does_not_stop_a_window(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report()
        replies = remote.trace(controller.address, TraceRequest(key=KEY))
        assert next(iter(replies)).status.state == TRACE_STATE_WAITING
        replies.close()  # type: ignore[attr-defined]
        window = agent.command().id
        agent.trace(window, b"x")
    assert [trace.bytes for trace in remote.traces(controller.address, window=window)] == [1]


def test_killed_controller_keeps_the_parts_it_had_and_takes_the_others_later(tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    with Controller(db) as first, Agent(first.address) as agent:
        agent.report()
        follower = Follower(first.address, seconds=7)
        window = agent.command().id
        data = [b"one", b"two", b"three"]
        agent.report(status(window), parts=parts_of(window, *data)[:1])
        eventually(lambda: follower.data("gpu001"))
        first.kill()
        with pytest.raises(UnavailableError, match=f"is lost: .*the nodes go on with window {window}"):
            follower.wait()
        assert rows(db) == [(window, 0, b"one")]
        agent.send(parts=parts_of(window, *data)[1:2])
        with Controller(db, port=first.port) as second:
            agent.all_stored()
            agent.report(parts=parts_of(window, *data)[2:])
            stored = list(remote.stored_traces(second.address, window))
            assert [reply.part.data for reply in stored[1:]] == data
            assert stored[0].status == status(window)


def test_window_of_a_killed_controller_fails_until_the_node_speaks(tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    with Controller(db) as first, Agent(first.address) as agent:
        agent.report()
        follower = Follower(first.address)
        window = agent.command().id
        first.kill()
        with pytest.raises(UnavailableError):
            follower.wait()
        with Controller(db, port=first.port) as second:
            (listed,) = remote.traces(second.address)
            assert listed.status.state == TRACE_STATE_FAILED
            assert "the controller was restarted" in listed.status.reason
            agent.trace(window, b"x")
            (listed,) = remote.traces(second.address)
            assert (listed.status.state, listed.bytes) == (TRACE_STATE_DONE, 1)


def test_follower_of_a_controller_that_stops_is_told_so(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report()
        follower = Follower(controller.address)
        agent.command()
        code, errors = controller.terminate()
        with pytest.raises(UnavailableError, match="it is stopping"):
            follower.wait()
    assert code == 0
    assert "Traceback" not in errors


def test_replays_are_stored_once(tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    made = [report(n) for n in range(1, 4)]
    made[1].traces.append(status())
    made[1].trace_parts.extend(parts_of(ID, b"one", b"two")[:1])
    made[2].trace_parts.extend(parts_of(ID, b"one", b"two")[1:])
    messages = [up(m) for m in made]
    once = [(ID, 0, b"one"), (ID, 1, b"two")]
    with Controller(db) as first, client(first.address) as nodes:
        for _ in range(2):
            assert nodes.send(*messages, hello=node())[-1] == 3
        first.kill()
    assert rows(db) == once
    with Controller(db) as second, client(second.address) as nodes:
        assert nodes.send(*messages, hello=node())[-1] == 3
        # It is not kept with the newest report.
        assert not nodes.snapshot()[0].current.trace_parts
        second.kill()
    assert rows(db) == once


def test_windows_that_nodes_open_by_themselves_are_listed_the_newest_first(controller: Controller) -> None:
    ids = [f"{n:016x}" for n in range(3)]
    with Agent(controller.address) as agent:
        for window in ids:
            agent.report(status(window))
        other = status("f" * 16, TRACE_STATE_NO_TARGETS, from_ns=0)
        other.identity.id = "999"
        agent.report(other)
    address = controller.address
    assert [t.status.id for t in remote.traces(address, KEY)] == ids[::-1]
    assert [t.status.id for t in remote.traces(address, KEY, limit=2)] == ids[:0:-1]
    assert [t.status.id for t in remote.traces(address, window=ids[1])] == [ids[1]]
    assert len(remote.traces(address)) == 4
    with Agent(address, "late") as agent:  # a node may take its word about an end back
        agent.report(status(ids[0]))
        agent.report(status(ids[0], TRACE_STATE_FAILED, reason="its process ended"))
    states = {t.node: (t.status.state, t.status.reason) for t in remote.traces(address, window=ids[0])}
    assert states == {"gpu001": (TRACE_STATE_DONE, ""), "late": (TRACE_STATE_FAILED, "its process ended")}
    assert remote.traces(address, "slurm/77") == []
    with pytest.raises(remote.NotStoredError, match="no window 'feed' is stored"):
        list(remote.stored_traces(address, "feed"))


def test_open_windows_stay_in_the_newest_report(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report(status("1" * 16, TRACE_STATE_OPEN), status("2" * 16))
    with client(controller.address) as nodes:
        assert [s.id for s in nodes.snapshot()[0].current.traces] == ["1" * 16]


@pytest.mark.parametrize(
    ("reason", "part"),
    [
        ("id", {"id": "../../etc/passwd"}),
        ("id", {"id": ""}),
        ("size", {"data": b""}),
        ("size", {"data": b"x" * (transport.MAX_TRACE_PART_BYTES + 1)}),
        ("index", {"parts": 0}),
        ("index", {"index": 2}),
        ("index", {"parts": transport.MAX_TRACE_PARTS + 1}),
        ("index", {"index": 1, "parts": 3}),  # there were two
        ("window", {"id": "9" * 16}),
    ],
)
def test_hostile_part_is_counted_and_left_out(
    reason: str, part: dict[str, Any], controller: Controller
) -> None:
    first, second = parts_of(ID, b"one", b"two")
    with Agent(controller.address) as agent:
        agent.report(status(), parts=[first])
        hostile = parts_of(ID, b"bad", b"")[0]
        hostile.index = 1
        for name, value in part.items():
            setattr(hostile, name, value)
        if "data" not in part and "index" not in part:
            hostile.index = 0
        agent.report(parts=[hostile, second])
    assert refused(controller) == {reason: 1}
    assert rows(controller.db) == [(ID, 0, b"one"), (ID, 1, b"two")]


def test_part_of_another_nodes_window_is_refused(controller: Controller) -> None:
    with Agent(controller.address, "a") as a, Agent(controller.address, "b") as b:
        a.report(status())
        b.report(parts=parts_of(ID, b"not mine"))
    assert refused(controller) == {"window": 1}


def test_crowd_of_parts_and_statuses_is_cut(controller: Controller) -> None:
    with Agent(controller.address) as agent:
        agent.report(
            *(status(f"{n:016x}") for n in range(257)),
            parts=[part for n in range(65) for part in parts_of(f"{n:016x}", b"x")],
        )
    assert refused(controller) == {"count": 2}
    assert len(remote.traces(controller.address, limit=1000)) == 256


@pytest.mark.parametrize(
    ("reason", "fields"),
    [
        ("id", {"id": "G" * 16}),
        ("status", {"reason": "x" * 2000}),
        ("status", {"seconds": float("inf")}),
        ("status", {"state": 99}),
    ],
)
def test_absurd_status_is_counted_and_left_out(
    reason: str, fields: dict[str, Any], controller: Controller
) -> None:
    with Agent(controller.address) as agent:
        bad = status()
        for name, value in fields.items():
            setattr(bad, name, value)
        agent.report(bad, status("1" * 16))
    assert refused(controller) == {reason: 1}
    assert [trace.status.id for trace in remote.traces(controller.address)] == ["1" * 16]


def test_answers_about_traces_take_only_requests(controller: Controller) -> None:
    with client(controller.address) as nodes:
        for path in (transport.TRACES, transport.RULES):
            with pytest.raises(grpc.RpcError) as error:
                nodes.channel.unary_unary(path, None, None)(b"\xff\xff", timeout=10)
            assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert nodes.channel.unary_unary(transport.RULES, None, None)(b"", timeout=10) == b""


# ---- without a process: what would take minutes


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "inner.db")
    yield made
    made.close()


def item(name: str, number: int, *statuses: Any, age_s: float = 0.0, run: int = 7, **more: Any) -> Item:
    made = report(number, run=run)
    return Item(node(name, f"i-{name}"), made, time.time_ns() - int(age_s * 1e9), (), statuses, **more)


class Opened:
    """Windows of a store, opened without a server."""

    def __init__(self, store: Store) -> None:
        self.writer = ThreadPoolExecutor(1)
        self.windows = Windows(store, self.writer)
        self.store = store
        self.sent: list[tuple[str, TraceRequest]] = []

    def connect(self, *names: str) -> None:
        for name in names:
            self.windows.connected(
                (name, f"i-{name}"), lambda command, name=name: self.sent.append((name, command))
            )

    def bring(self, made: Item) -> None:
        self.store.write([made])
        self.windows.stored(made)

    async def open(self, **request: Any) -> Any:
        return await self.windows.open(TraceRequest(key=KEY, **request), self.windows.find(KEY))

    def listed(self) -> dict[str, tuple[int, str]]:
        reader = Reader(self.store.path)
        found = {t.node: (t.status.state, t.status.reason) for _, t in reader.traces(None, "", 0)}
        reader.close()
        return found


async def nothing(*_: Any) -> None:
    return None


def test_silent_nodes_get_a_reason_each(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("here", 1), item("mute", 1), item("gone", 1, age_s=40)])
        opened.connect("here", "mute", "gone")
        window = await opened.open(seconds=10)
        assert {name for name, _ in opened.sent} == {"here", "mute"}
        opened.bring(item("here", 2, status(window.id, from_ns=1), parts=parts_of(window.id, b"x")))
        now = time.monotonic()
        await opened.windows.look(now + START_S + 10 + ANSWER_S - 1)
        assert not window.has_ended
        await opened.windows.look(now + START_S + 10 + ANSWER_S + 1)
        assert window.has_ended
        replies = [r async for r in opened.windows.follow(window, nothing)]
        expected = {
            "here": (TRACE_STATE_DONE, ""),
            "mute": (TRACE_STATE_FAILED, "no answer"),
            "gone": (TRACE_STATE_FAILED, "no report from gone for 40 s"),
        }
        assert {r.node: (r.status.state, r.status.reason) for r in replies} == expected
        assert opened.listed() == expected
        assert opened.windows.outcomes == {"done": 1, "failed": 2}
        # It is forgotten: the next may be opened.
        await opened.open()

    asyncio.run(played())


def test_node_that_falls_silent_in_its_window(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open(seconds=10)
        opened.bring(
            Item(node("a", "i-a"), with_status(2, status(window.id, TRACE_STATE_OPEN)), time.time_ns())
        )
        await opened.windows.look(time.monotonic() + 25 + ANSWER_S + 1)
        assert opened.listed() == {"a": (TRACE_STATE_FAILED, "no answer from a since its window was open")}
        # Its own word comes late, and is what counts.
        opened.bring(item("a", 3, status(window.id)))
        assert opened.listed() == {"a": (TRACE_STATE_DONE, "")}

    asyncio.run(played())


def with_status(number: int, told: Any) -> Any:
    made = report(number, run=7)
    made.traces.append(told)
    return made


def test_trace_that_does_not_come_whole_ends_the_stream_after_some_reports(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open()
        opened.bring(item("a", 2, status(window.id), parts=parts_of(window.id, b"1", b"2")[:1]))
        for number in (3, 4):
            opened.bring(item("a", number))
            assert not window.has_ended
        opened.bring(item("a", 5))
        assert window.has_ended

    asyncio.run(played())


def test_what_a_node_says_last_of_a_windows_end_is_what_counts(store: Store) -> None:
    """It calls a window done, and then loses the rest of its trace."""

    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open()
        opened.bring(item("a", 2, status(window.id), parts=parts_of(window.id, b"1", b"2")[:1]))
        opened.bring(item("a", 3, status(window.id, TRACE_STATE_FAILED, reason="its trace is not whole")))
        expected = (TRACE_STATE_FAILED, "its trace is not whole")
        assert opened.listed() == {"a": expected}
        late = Item(node("a", "i-a"), with_status(4, status(window.id, TRACE_STATE_OPEN)), time.time_ns())
        opened.bring(late)
        for number in (5, 6, 7):
            opened.bring(item("a", number))
        assert window.has_ended
        replies = [r async for r in opened.windows.follow(window, nothing)]
        assert [(r.status.state, r.status.reason) for r in replies] == [expected]

    asyncio.run(played())


def test_node_whose_agent_was_started_anew_is_not_waited_for(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1), item("b", 1)])
        opened.connect("a", "b")
        window = await opened.open(seconds=25)
        for name in "ab":
            told = with_status(2, status(window.id, TRACE_STATE_OPEN))
            opened.bring(Item(node(name, f"i-{name}"), told, time.time_ns()))
        for number in (3, 4):
            opened.bring(item("a", number))
        await opened.windows.look(time.monotonic())
        assert not window.targets["a", "i-a"].has_ended
        opened.bring(item("a", 5))
        await opened.windows.look(time.monotonic())
        assert opened.listed()["a"] == (
            TRACE_STATE_FAILED,
            "a says nothing of it any more: its agent was started anew, or gave it up",
        )
        assert not window.targets["b", "i-b"].has_ended

    asyncio.run(played())


def test_reports_that_a_node_held_back_while_its_link_was_cut_do_not_end_a_trace(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open()
        opened.bring(item("a", 2, status(window.id)))
        for number in range(3, 13):
            held = item("a", number)
            held.report.collector.reports_unsent = number
            opened.bring(held)
        assert not window.has_ended
        opened.bring(item("a", 13, parts=parts_of(window.id, b"1")))
        assert window.has_ended

    asyncio.run(played())


def test_two_installations_with_one_name_are_told_apart(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        twins = [node("a", "0123456789"), node("a", "abcdefghij")]
        store.write([Item(twin, report(1, run=7), time.time_ns()) for twin in twins])
        for twin in twins:
            opened.windows.connected((twin.name, twin.install_id), lambda command: None)
        window = await opened.open()
        for twin, data in zip(twins, (b"1", b"2"), strict=True):
            ended = [status(window.id)]
            opened.bring(Item(twin, report(2), time.time_ns(), (), ended, parts_of(window.id, data)))
        reader = Reader(store.path)

        async def part(*place: Any) -> Any:
            return reader.trace_part(*place)

        replies = [reply async for reply in opened.windows.follow(window, part)]
        found = {reply.node: reply.part.data for reply in replies if reply.HasField("part")}
        assert found == {"a (01234567)": b"1", "a (abcdefgh)": b"2"}
        assert {trace.node for _, trace in reader.traces(None, "", 0)} == set(found)
        reader.close()

    asyncio.run(played())


def test_parts_come_after_the_final_status_whoever_is_slow(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open()
        reader = Reader(store.path)

        async def part(*place: Any) -> Any:
            return reader.trace_part(*place)

        replies = opened.windows.follow(window, part)
        assert (await anext(replies)).status.state == TRACE_STATE_WAITING
        opened.bring(item("a", 2, status(window.id), parts=parts_of(window.id, b"1", b"2")))
        rest = [reply async for reply in replies]
        reader.close()
        assert [(r.status.state, r.part.data) for r in rest] == [
            (TRACE_STATE_DONE, b""),
            (0, b"1"),
            (0, b"2"),
        ]

    asyncio.run(played())


def test_node_cannot_hold_a_job_for_ever(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        window = await opened.open()
        endless = status(window.id, TRACE_STATE_WAITING, from_ns=0, seconds=1e300, start_ns=2**62)
        opened.bring(Item(node("a", "i-a"), with_status(2, endless), time.time_ns()))
        await opened.windows.look(time.monotonic() + START_S + LONGEST_S + ANSWER_S + 1)
        assert window.has_ended

    asyncio.run(played())


def test_parts_of_the_longest_window_are_waited_for(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1)])
        opened.connect("a")
        now = time.monotonic()
        window = await opened.open(seconds=LONGEST_S)
        await opened.windows.look(now + START_S + LONGEST_S + ANSWER_S / 2)
        assert not window.has_ended
        running = status(window.id, TRACE_STATE_OPEN, from_ns=time.time_ns(), seconds=LONGEST_S)
        opened.bring(Item(node("a", "i-a"), with_status(2, running), time.time_ns()))
        await opened.windows.look(now + LONGEST_S + ANSWER_S / 2)
        assert not window.has_ended

    asyncio.run(played())


def test_each_nodes_window_is_counted_once_by_how_it_ended_at_last(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1), item("b", 1)])
        opened.connect("a", "b")
        window = await opened.open()
        lost = status(window.id, TRACE_STATE_FAILED, reason="its trace is not whole")
        opened.bring(item("a", 2, status(window.id)))
        assert not opened.windows.outcomes
        opened.bring(item("a", 3, lost))
        await opened.windows.look(time.monotonic() + 600)
        assert window.has_ended
        assert opened.windows.outcomes == {"failed": 2}  # b has said nothing
        opened.bring(item("b", 4, status(window.id)))
        # A window that it opened by itself.
        opened.bring(item("b", 5, status(ID)))
        opened.bring(item("b", 6, status(ID, TRACE_STATE_FAILED)))
        assert opened.windows.outcomes == {"failed": 2, "done": 1}

    asyncio.run(played())


def test_windows_are_listed_by_their_beginning_the_newest_first(store: Store) -> None:
    early, late, last = "a" * 16, "b" * 16, "c" * 16
    begins = [(last, "x", 300), (early, "x", 100), (late, "x", 200), (late, "y", 210), (early, "y", 110)]
    for number, (window, name, begin) in enumerate(begins, 1):
        store.write([item(name, number, status(window, from_ns=begin * SECOND))])
    with closing(Reader(store.path)) as reader:
        found = [(t.status.id, t.node) for _, t in reader.traces(None, "", 0)]
        assert found == [(last, "x"), (late, "y"), (late, "x"), (early, "y"), (early, "x")]
        assert [(t.status.id, t.node) for _, t in reader.traces(None, "", 1)] == [(last, "x")]


def test_the_log_counts_nodes_in_words(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    async def played(*names: str) -> None:
        opened = Opened(store)
        store.write([item(name, 1) for name in names])
        opened.connect(*names)
        await opened.open()

    with caplog.at_level("INFO"):
        asyncio.run(played("a"))
        assert caplog.messages[-1].endswith(f"of {KEY} on 1 node")
        asyncio.run(played("a", "b"))
        assert caplog.messages[-1].endswith(f"of {KEY} on 2 nodes")


def test_several_jobs_of_a_key_and_several_links_of_a_node(store: Store) -> None:
    async def played() -> None:
        opened = Opened(store)
        made = report(1, run=7)
        made.jobs.add(state=2).identity.CopyFrom(made.jobs[0].identity)
        made.jobs[1].identity.run = 9
        ended = made.jobs.add(state=4)
        ended.identity.CopyFrom(made.jobs[0].identity)
        ended.identity.run = 11
        store.write([Item(node("a", "i-a"), made, time.time_ns())])
        opened.connect("a", "a")
        await opened.open()
        assert [command.run for _, command in opened.sent] == [9]
        with pytest.raises(RefusedError, match="still open"):
            await opened.open()

    asyncio.run(played())


def test_traces_age_as_samples_do_and_take_their_parts_along(store: Store) -> None:
    day = 86400 * SECOND
    now = time.time_ns()
    for number, days in ((1, 9), (2, 8), (3, 1)):
        made = report(number, time_ns=now - days * day)
        window = f"{number:016x}"
        store.write(
            [Item(node(), made, now - days * day, (), [status(window)], parts_of(window, b"1", b"2"))]
        )
    while store.expire(7 * 86400, now):
        pass
    assert [row[0] for row in rows(store.path)] == [f"{3:016x}"] * 2
    with sqlite3.connect(store.path) as connection:
        assert connection.execute("SELECT count(*) FROM trace_parts").fetchone() == (2,)


class Context:
    """The server's side of a call, as far as a stream of reports needs it."""

    async def send_initial_metadata(self, _: Any) -> None: ...

    async def write(self, _: bytes) -> None: ...


def test_traces_of_all_nodes_at_once_wait_for_the_store(store: Store) -> None:
    nodes, reports = 8, 3

    async def sent(name: str) -> AsyncIterator[bytes]:
        yield Upstream(hello=Hello(node=node(name, f"i-{name}"))).SerializeToString()
        for number in range(reports):
            made = report(number + 1)
            if not number:
                made.traces.append(status())
            for index in range(7):
                part = made.trace_parts.add(id=ID, index=number * 7 + index, parts=7 * reports)
                part.data = bytes(transport.MAX_TRACE_PART_BYTES)
            yield up(made)

    async def played() -> None:
        opened = Opened(store)
        ingest = Ingest(store, opened.writer, opened.writer, opened.windows, lambda _: None)
        streams = [asyncio.create_task(ingest.stream(sent(str(n)), Context())) for n in range(nodes)]
        for _ in range(200):
            await asyncio.sleep(0)
        waiting = sum(len(part.data) for _, made in ingest._batch for part in made.parts)
        assert MAX_WAITING_BYTES <= waiting < MAX_WAITING_BYTES + 7 * transport.MAX_TRACE_PART_BYTES
        committing = asyncio.create_task(ingest.commit())
        await asyncio.gather(*streams)
        ingest.stop()
        await committing
        assert ingest.figures.trace_bytes == nodes * reports * 7 * transport.MAX_TRACE_PART_BYTES
        assert ingest.figures.stored == nodes * reports

    asyncio.run(played())
    assert len(rows(store.path, "part")) == nodes * reports * 7


class OneFiring:
    """Rules of which one fires."""

    def __init__(self, firing: Firing) -> None:
        self.firing = firing
        self.said: list[str] = []
        self.seen: list[str] = []

    errors: Mapping[str, int] = {"idle": 3}
    overlooked = 7

    def look(self, nodes: Iterable[Any], now_ns: int) -> list[Firing]:
        self.seen = [view.name for view in nodes if view.age_s < 10 and view.current]
        return [self.firing]

    def opened(self, firing: Firing, window: str) -> None:
        self.said.append(window)

    def refused(self, firing: Firing, reason: str) -> None:
        self.said.append(reason)

    def states(self) -> list[RuleState]:
        return [RuleState(rule="idle", window=self.said[0])]


def test_rule_that_fires_opens_a_window_with_its_evidence(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    class Idle:
        name = "idle"

    async def played() -> None:
        opened = Opened(store)
        store.write([item("a", 1), item("b", 1), item("c", 1, run=8)])
        opened.connect("a", "b", "c")
        request = TraceRequest(key=KEY, seconds=5, rule="idle", evidence=[Evidence(name="gpu", value=0.1)])
        firing = Firing(Idle(), KEY, {"a": 7, "c": 7}, ("a", "c"), request)  # type: ignore[arg-type]
        engine: Any = OneFiring(firing)
        watch, figures = RuleWatch(store, opened.windows, engine), Figures()
        await watch.look(engine, figures)
        await watch.look(engine, figures)
        (state,) = await watch.states()
        watch.close()
        assert sorted(engine.seen) == ["a", "b", "c"]
        # b is not asked for, and c has another run of the job by now.
        ((name, command),) = opened.sent
        assert (name, command.rule, command.seconds) == ("a", "idle", 5)
        assert engine.said[0] == command.id == state.window
        assert f"window {command.id} of that job is still open" in engine.said[1]
        # It looked twice, and says once what could not be evaluated or looked at.
        told = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert [line.partition(";")[0] for line in told] == [
            "rule idle cannot be evaluated for some jobs",
            "rules do not look at 7 jobs: there are too many",
        ]
        assert figures.rule_firings == {"idle": 2}
        reader = Reader(store.path)
        ((_, trace),) = reader.traces(None, command.id, 0)
        reader.close()
        assert [(e.name, e.value) for e in trace.evidence] == [("gpu", 0.1)]
        assert trace.status.rule == "idle"
        # The node's own word leaves the evidence.
        opened.bring(item("a", 2, status(command.id, rule="idle")))
        reader = Reader(store.path)
        ((_, trace),) = reader.traces(None, command.id, 0)
        reader.close()
        assert (trace.status.state, len(trace.evidence)) == (TRACE_STATE_DONE, 1)

    asyncio.run(played())
