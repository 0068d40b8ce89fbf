"""Profiles: stored once, merged over any span, and refused when they are no profiles."""

from __future__ import annotations

import asyncio
import gzip
import random
import re
import sqlite3
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_controller import limits, merging, schema
from expanse_controller.allowance import Allowance
from expanse_controller.errors import ControllerError
from expanse_controller.query import Query
from expanse_controller.reader import Reader
from expanse_controller.store import EXPIRE_ROWS, OUT_OF_ORDER, REPLAYED, STORED, Item, Store
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.export import pprof
from expanse_ebpf.ship import remote
from expanse_ebpf.sources import stack_counts
from expanse_ebpf.wire import transport
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_UNSPECIFIED,
    JobProfile,
    ProfileReply,
    ProfileRequest,
    Report,
)
from expanse_ebpf.wire.profile_pb2 import Location, Profile, ValueType
from tests.controller.process import Client, Controller, client, eventually, node, report, up

SECOND = 1_000_000_000
MINUTE = 60 * SECOND
DAY = 86400 * SECOND
T = 1_800_000_000 * SECOND


def profile(samples: int = 1, name: str = "step", time_ns: int = T) -> Profile:
    builder = pprof.ProfileBuilder(period_ns=20_000_000, time_ns=time_ns, duration_ns=MINUTE)
    frames = [(name, "/srv/train.py", 12, 10), ("main", "/srv/train.py", 40, 30)]
    builder.add(frames, (samples, samples * 20_000_000, 0), {"pid": 7, "job": "slurm/123"})
    return builder.build()


PACKED = pprof.dumps(profile())


def add(made: Report, minute: int, packed: bytes = PACKED, **job: Any) -> JobProfile:
    """Add the profile of a minute after T to the report, of its first job unless another is named."""
    added = made.profiles.add(from_ns=T + minute * MINUTE, to_ns=T + (minute + 1) * MINUTE, pprof=packed)
    added.identity.CopyFrom(made.jobs[0].identity)
    for field, value in job.items():
        setattr(added.identity, field, value)
    return added


def of_minute(minute: int, samples: int = 1, name: str = "step", **job: Any) -> Report:
    """The report that brings the profile of a minute after T, just after it has ended."""
    begin = T + minute * MINUTE
    made = report(minute + 1, time_ns=begin + MINUTE + SECOND // 2, **job)
    add(made, minute, pprof.dumps(profile(samples, name, begin)))
    return made


def taken(reply: ProfileReply) -> dict[str, int]:
    """Samples by the function at the leaf."""
    merged = pprof.loads(reply.pprof)
    functions = {f.id: merged.string_table[f.name] for f in merged.function}
    names = {place.id: functions[place.line[0].function_id] for place in merged.location}
    found: dict[str, int] = {}
    for sample in merged.sample:
        name = names[sample.location_id[0]]
        found[name] = found.get(name, 0) + sample.value[0]
    return found


def rows(db: Path) -> list[tuple[int, int]]:
    """What each stored profile covers, in minutes after T."""
    with sqlite3.connect(db) as connection:
        found = connection.execute("SELECT from_ns, to_ns FROM profiles ORDER BY job, from_ns")
        return [((begin - T) // MINUTE, (end - T) // MINUTE) for begin, end in found]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(tmp_path / "x.db")
    yield made
    made.close()


# ---- stored once


def test_acknowledged_profile_is_in_the_file_at_once(tmp_path: Path) -> None:
    with Controller(tmp_path / "x.db") as running, client(running.address) as sender:
        assert sender.send(up(of_minute(0)), hello=node()) == [1]
        running.kill()
    assert rows(tmp_path / "x.db") == [(0, 1)]


def test_replay_before_and_after_a_crash_is_stored_once(tmp_path: Path) -> None:
    db = tmp_path / "x.db"
    made = [up(of_minute(minute)) for minute in range(5)]
    with Controller(db) as running, client(running.address) as sender:
        assert sender.send(*made[:3], hello=node())[-1] == 3
        assert sender.send(*made[:4], hello=node())[-1] == 4
        running.kill()
    # Where the boot stood had been written with the first report only: the rest comes as if new.
    with Controller(db) as running, client(running.address) as sender:
        assert sender.send(*made, hello=node())[-1] == 5
        reply = sender.profile("slurm/123")
        assert (reply.parts, taken(reply)) == (5, {"step": 5})
        running.kill()
    assert rows(db) == [(n, n + 1) for n in range(5)]


def test_live_view_does_not_carry_profiles(controller: Controller, nodes: Client) -> None:
    sender = node("view", "view")
    assert nodes.send(up(of_minute(0, id="1")), up(of_minute(1, id="1")), hello=sender)[-1] == 2
    (snapshot,) = nodes.snapshot("view")
    assert [len(snapshot.previous.jobs), len(snapshot.current.jobs)] == [1, 1]
    assert not snapshot.previous.profiles
    assert not snapshot.current.profiles


def test_profile_without_a_sample_is_found_by_its_job(nodes: Client) -> None:
    made = of_minute(3, id="50")
    add(made, 3, id="51", run=51)
    nodes.send(up(made), hello=node("over", "over"))
    reply = nodes.profile("slurm/51")
    assert (reply.parts, reply.job.state) == (1, JOB_STATE_UNSPECIFIED)
    assert (reply.job.first_ns, reply.job.last_ns) == (T + 3 * MINUTE, made.time_ns)
    later = report(9, id="50", time_ns=T + 5 * MINUTE)
    add(later, 4, id="51", run=51)
    nodes.send(up(later), hello=node("over", "over"))
    reply = nodes.profile("slurm/51")
    assert (reply.parts, reply.job.last_ns) == (2, later.time_ns)


def test_last_profile_of_a_job_that_has_ended(nodes: Client) -> None:
    last = report(2, id="60", time_ns=T + MINUTE)
    last.jobs[0].state = JOB_STATE_ENDED
    late = report(3, id="61", run=61, time_ns=T + MINUTE + SECOND)
    add(late, 0, id="60", run=last.jobs[0].identity.run)
    nodes.send(up(report(1, id="60", time_ns=T)), up(last), up(late), hello=node("ended", "ended"))
    reply = nodes.profile("slurm/60")
    assert (reply.parts, reply.job.state, reply.job.last_ns) == (1, JOB_STATE_ENDED, last.time_ns)


# ---- refused


def _packed(**changes: Any) -> bytes:
    made = profile()
    made.MergeFrom(Profile(**changes))
    return pprof.dumps(made)


def _big() -> bytes:
    """Packed to more than a MiB, and a profile."""
    return _packed(string_table=[random.Random(1).randbytes(1_200_000).hex()])


ROOM = 1 << 30
BOMB = gzip.compress(bytes(transport.MAX_PROFILE_PLAIN_BYTES + 1))
DAMAGED = {
    "empty": b"",
    "plain": profile().SerializeToString(),
    "no gzip": b"\x1f\x8b" + bytes(100),
    "cut": PACKED[:-9],
    "no check sum": PACKED[:-1],
    "wrong check sum": PACKED[:-8] + bytes(8),
    "more behind": PACKED + b"x",
    "two in one": PACKED + PACKED,
    "gzip of no profile": gzip.compress(b"\xff" * 50),
    "text that is not there": _packed(sample_type=[ValueType(type=99)]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_profile_is_refused(case: str) -> None:
    made = report(1)
    add(made, 0, DAMAGED[case])
    assert limits.checked(made.profiles, ROOM).faults == ["damaged"]


@pytest.mark.parametrize(
    ("fault", "packed"),
    [
        ("size", _big()),
        ("size", BOMB),
        ("values", gzip.compress(b"")),
        ("values", _packed(sample_type=[ValueType()])),
        ("", _packed(string_table=["x" * 4_000_000])),
        ("", _packed(string_table=[random.Random(1).randbytes(300_000).hex(), "x" * 2_000_000])),
    ],
    ids=["large", "bomb", "no values", "one value too many", "packed very well", "packed well"],
)
def test_size_and_values(fault: str, packed: bytes) -> None:
    made = report(1)
    add(made, 0, packed)
    assert limits.checked(made.profiles, ROOM).faults == [fault]


@pytest.mark.parametrize(
    ("from_ns", "to_ns", "fault"),
    [
        (T, T, "span"),
        (T, T - 1, "span"),
        (0, T, "span"),
        (-5, 5, "span"),
        (T, T + limits.MAX_PROFILE_NS + 1, "span"),
        (T, 2**63 - 1, "span"),
        (-(2**63), 2**63 - 1, "span"),
        (T, T + limits.MAX_PROFILE_NS, ""),
        (2**63 - 2, 2**63 - 1, ""),
    ],
)
def test_absurd_span_is_refused(from_ns: int, to_ns: int, fault: str) -> None:
    made = report(1)
    added = add(made, 0)
    added.from_ns, added.to_ns = from_ns, to_ns
    assert limits.checked(made.profiles, ROOM).faults == [fault]


def test_absurd_job_and_what_comes_twice_are_refused() -> None:
    made = report(1)
    add(made, 0)
    add(made, 0, name="told again")
    add(made, 1)
    add(made, 2, scheduler="SLURM; DROP")
    add(made, 3, id="")
    assert limits.checked(made.profiles, ROOM).faults == ["", "twice", "", "job", "job"]


def refused(controller: Controller) -> dict[str, float]:
    with urllib.request.urlopen(f"http://{controller.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    name = "expanse_controller_profiles_refused_total"
    return {
        reason: float(count) for reason, count in re.findall(rf'^{name}{{reason="(\w+)"}} (\S+)$', text, re.M)
    }


def test_refused_profiles_do_no_harm_to_the_rest_of_the_report(controller: Controller, nodes: Client) -> None:
    before = refused(controller)
    made = of_minute(0, id="70", run=70)
    for packed in (*DAMAGED.values(), BOMB):
        add(made, 0, packed, id="71", run=71)
    add(made, 0, id="71", run=72).to_ns = 0
    good = add(made, 0, id="73", run=73)
    sender = node("mixed-profiles", "mixed-profiles")
    assert nodes.send(up(made), hello=sender) == [1]
    assert (nodes.profile("slurm/70").parts, nodes.profile("slurm/73").parts) == (1, 1)
    assert len(nodes.series("slurm/70").points) == 1
    with pytest.raises(grpc.RpcError) as caught:
        nodes.profile("slurm/71")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    after = refused(controller)
    # All but the first of one job and minute are refused as such, whatever is in them.
    assert {k: v - before.get(k, 0) for k, v in after.items() if v != before.get(k, 0)} == {
        "damaged": 1,
        "twice": len(DAMAGED),
        "span": 1,
    }
    assert good.identity.id == "73"


def test_more_profiles_than_a_node_can_have(controller: Controller, nodes: Client) -> None:
    before = refused(controller)
    made = report(1, time_ns=T + MINUTE, id="80", run=80)
    for number in range(limits.MAX_PROFILES + 7):
        add(made, 0, id="80", run=80 + number)
    assert nodes.send(up(made), hello=node("crowd", "crowd")) == [1]
    after = refused(controller)
    assert after["count"] - before.get("count", 0) == 7
    assert nodes.profile("slurm/80", run=80 + limits.MAX_PROFILES - 1).parts == 1
    with pytest.raises(grpc.RpcError) as caught:
        nodes.profile("slurm/80", run=80 + limits.MAX_PROFILES)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


def test_node_that_floods_is_cut_and_others_are_not(tmp_path: Path) -> None:
    with (
        Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as running,
        client(running.address) as sender,
    ):
        junk = bytes(1_000_000)  # counts all the same: looking at it has a price
        messages = []
        for number in range(15):
            made = report(number + 1, time_ns=T + MINUTE + number)
            for part in range(4):
                add(made, number * 4 + part, junk)
            messages.append(up(made))
        messages.append(up(of_minute(200)))
        assert sender.send(*messages, hello=node("flood", "flood"))[-1] == 201
        found = refused(running)
        # What fits into the reserve; a minute brings two more.
        assert found["damaged"] >= 33
        assert found["allowance"] >= 20
        sender.send(up(of_minute(0, id="9")), hello=node("calm", "calm"))
        assert sender.profile("slurm/9").parts == 1
        code, errors = running.terminate()
    assert code == 0
    (line,) = errors.splitlines()
    assert "node 'flood': profiles are refused, 4 since the start: 4 (damaged), the first of job " in line
    assert (
        " 'slurm/123': it is not a pprof profile in gzip; give that node the controller's release of " in line
    )


def longest_names(count: int) -> Profile:
    """Stacks with names that pack more than sixty to one."""
    builder = pprof.ProfileBuilder(period_ns=20_000_000, time_ns=T, duration_ns=MINUTE)
    for number in range(count):
        text = f"generated_{number:04}_" + "长" * 230
        builder.add([(text, f"/{text}.py", 1, 1)], (1, 20_000_000, 0), {})
    return builder.build()


def test_what_the_agent_packs_is_stored_however_long_its_names_are(nodes: Client) -> None:
    """Agent and controller have one bound, and how well a profile packs is none of its own."""
    made = longest_names(2500)
    packed = pprof.dumps(made)
    assert 0.75 < made.ByteSize() / transport.MAX_PROFILE_PLAIN_BYTES < 1
    assert made.ByteSize() > 60 * len(packed)
    brought = report(1, time_ns=T + MINUTE, id="85", run=85)
    add(brought, 0, packed)
    nodes.send(up(brought), hello=node("long-names", "long-names"))
    assert sum(taken(nodes.profile("slurm/85")).values()) == 2500
    assert (stack_counts.MOST_BYTES, stack_counts.MOST_PLAIN_BYTES) == (
        transport.MAX_PROFILE_BYTES,
        transport.MAX_PROFILE_PLAIN_BYTES,
    )


def test_no_more_is_unpacked_than_there_is_room_for() -> None:
    made = report(1)
    large = _packed(string_table=["x" * 1_000_000])
    for minute in range(4):
        add(made, minute, large)
    plain = len(gzip.decompress(large))
    assert limits.checked(made.profiles, 4 * plain) == ([""] * 4, 4 * plain)
    room = 2 * plain + 10
    assert limits.checked(made.profiles, room) == (["", "", "allowance", "allowance"], room)
    broken = report(1)
    add(broken, 0, BOMB[:-8] + bytes(8))  # seen at its end only
    faults, unpacked = limits.checked(broken.profiles, ROOM)
    assert (faults, unpacked) == (["damaged"], transport.MAX_PROFILE_PLAIN_BYTES)


def test_what_unpacks_to_much_counts_for_more(tmp_path: Path) -> None:
    """32 MiB at once are 2 GiB unpacked, and some 530 profiles that have 4 MiB each."""
    with (
        Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as running,
        client(running.address) as sender,
    ):
        bomb = gzip.compress(bytes(4_000_000))  # zeros are no profile
        for number in range(3):
            made = report(number + 1, time_ns=T + MINUTE + number, id="86", run=86)
            for part in range(250):
                add(made, number * 250 + part, bomb)
            sender.send(up(made), hello=node("bombs", "bombs"))
        found = refused(running)
        assert found["damaged"] + found["allowance"] == 750
        assert 530 <= found["damaged"] < 650
        assert "the first of job 'slurm/86': it is not a pprof" in running.terminate()[1]


def test_allowance() -> None:
    made = Allowance(per_second=10, reserve=100)
    a, b = ("a", "1"), ("b", "1")
    assert made.take(a, 100, 0.0)
    assert not made.take(a, 1, 0.0)
    assert made.take(b, 100, 0.0)
    assert not made.take(a, 51, 5.0)
    assert made.take(a, 50, 5.0)
    assert not made.take(a, 101, 1000.0)
    assert made.take(a, 100, 1000.0)
    assert made.take(a, 0, 1000.0)


def test_allowance_can_be_owed() -> None:
    made = Allowance(per_second=10, reserve=100)
    a = ("a", "1")
    assert made.left(a, 0.0) == 100
    made.charge(a, 150, 0.0)
    assert made.left(a, 0.0) == 0
    assert not made.take(a, 1, 5.0)
    assert (made.left(a, 6.0), made.take(a, 10, 6.0), made.left(a, 6.0)) == (10, True, 0)


def test_allowance_forgets_who_has_used_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("expanse_controller.allowance.MAX_NODES", 3)
    made = Allowance(per_second=1, reserve=10)
    for number in range(5):
        assert made.take((str(number), ""), 10, 0.0)
    assert len(made._accounts) == 5  # all of them owe
    assert not made.take(("0", ""), 1, 0.5)
    assert made.take(("9", ""), 10, 60.0)
    assert list(made._accounts) == [("9", "")]


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_profile_with_flipped_bytes_is_refused_or_can_be_read(data: st.DataObject) -> None:
    raw = bytearray(profile().SerializeToString())
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=4)):
        raw[position] = data.draw(st.integers(0, 255))
    made = report(1)
    add(made, 0, gzip.compress(bytes(raw)))
    (fault,) = limits.checked(made.profiles, ROOM).faults
    assert fault in ("", "damaged", "values")
    if not fault:
        merging._unchecked(made.profiles[0].pprof)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_no_profile(data: bytes) -> None:
    made = report(1)
    add(made, 0, data)
    add(made, 1, gzip.compress(data))
    assert limits.checked(made.profiles, ROOM).faults[0] == "damaged"
    assert limits.checked(made.profiles, ROOM).faults[1] in ("damaged", "values")


# ---- merged


@pytest.fixture(scope="module")
def gaps(nodes: Client) -> str:
    """A job with profiles of the minutes 0 to 4 and 10 to 12, of as many samples as its number and one."""
    minutes = (*range(5), *range(10, 13))
    made = (up(of_minute(m, m + 1, f"f{m}", id="300", run=300)) for m in minutes)
    nodes.send(*made, hello=node("gaps", "gaps"))
    return "slurm/300"


@pytest.mark.parametrize(
    ("begin", "end", "minutes"),
    [
        (0, 0, [0, 1, 2, 3, 4, 10, 11, 12]),
        (T, T + 5 * MINUTE, [0, 1, 2, 3, 4]),
        (T + MINUTE, T + 3 * MINUTE, [1, 2]),
        (T + MINUTE + 1, T + 3 * MINUTE, [1, 2]),
        (T + 2 * MINUTE - 1, T + 2 * MINUTE, [1]),
        (T + 2 * MINUTE, T + 2 * MINUTE + 1, [2]),
        (T + 3 * MINUTE, T + 11 * MINUTE, [3, 4, 10]),
        (T + 12 * MINUTE + SECOND, 0, [12]),
        (T + 5 * MINUTE, T + 10 * MINUTE, []),
        (T + 13 * MINUTE, 0, []),
        (1, T, []),
        (T + 4 * MINUTE, T + MINUTE, []),
        (-(2**63), 2**63 - 1, [0, 1, 2, 3, 4, 10, 11, 12]),
        (-(2**63), -(2**63), []),
        (2**63 - 1, 2**63 - 1, []),
    ],
)
def test_any_span(begin: int, end: int, minutes: list[int], gaps: str, controller: Controller) -> None:
    reply = remote.fetch_profile(controller.address, gaps, from_ns=begin, to_ns=end)
    assert reply.job.identity.id == "300"
    assert reply.job.node == "gaps"
    assert reply.parts == len(minutes)
    if not minutes:
        assert (reply.pprof, reply.from_ns, reply.to_ns) == (b"", 0, 0)
        return
    assert taken(reply) == {f"f{m}": m + 1 for m in minutes}
    assert (reply.from_ns, reply.to_ns) == (T + minutes[0] * MINUTE, T + (minutes[-1] + 1) * MINUTE)
    merged = pprof.loads(reply.pprof)
    assert (merged.time_nanos, merged.duration_nanos) == (reply.from_ns, reply.to_ns - reply.from_ns)


def test_nodes_of_one_job_are_merged_and_its_earlier_run_is_not(nodes: Client) -> None:
    # Before it was requeued it ran on "a" and "b", then on "b" and "c"; each run has another number.
    for minute, name, run in ((0, "a", 401), (0, "b", 402), (5, "b", 403), (5, "c", 404)):
        made = of_minute(minute, run - 400, f"{name}{run}", id="400", run=run)
        nodes.send(up(made), hello=node(f"multi-{name}", f"multi-{name}"))
    reply = nodes.profile("slurm/400")
    assert (taken(reply), reply.parts, reply.job.node) == ({"b403": 3, "c404": 4}, 2, "")
    reply = nodes.profile("slurm/400", node="multi-c")
    assert (taken(reply), reply.job.node) == ({"c404": 4}, "multi-c")
    # On a node that the newest run is not on, its own newest is meant.
    assert taken(nodes.profile("slurm/400", node="multi-a")) == {"a401": 1}
    assert taken(nodes.profile("slurm/400", run=402)) == {"b402": 2}
    assert nodes.profile("slurm/400", from_ns=T + 5 * MINUTE).parts == 2
    assert nodes.profile("slurm/400", to_ns=T + 5 * MINUTE).parts == 0


def test_run_that_begins_in_the_report_of_the_last_ones_end(nodes: Client) -> None:
    first = of_minute(0, 1, "old", id="410", run=410)
    both = of_minute(1, 2, "old", id="410", run=410)
    both.jobs[0].state = JOB_STATE_ENDED
    both.jobs.add().CopyFrom(report(1, id="410", run=411).jobs[0])
    later = of_minute(2, 4, "new", id="410", run=411)
    nodes.send(up(first), up(both), up(later), hello=node("again", "again"))
    reply = nodes.profile("slurm/410")
    assert (taken(reply), reply.job.identity.run) == ({"new": 4}, 411)
    assert taken(nodes.profile("slurm/410", run=410)) == {"old": 3}


def test_tasks_of_an_array_are_merged(nodes: Client) -> None:
    made = of_minute(0, 1, "one", id="501", run=501, array="500_1")
    late = of_minute(9, 2, "two", id="502", run=502, array="500_2")
    nodes.send(up(made), up(late), hello=node("array", "array"))
    assert taken(nodes.profile("slurm/500")) == {"one": 1, "two": 2}
    assert taken(nodes.profile("slurm/500_1")) == {"one": 1}


def test_stored_profile_that_does_not_hold_together_is_left_out(nodes: Client) -> None:
    made = of_minute(0, 5, id="600", run=600)
    # A location of a function that is not there: too dear to look for when it comes in.
    add(made, 1, _packed(location=[Location(id=9, line=[{"function_id": 77}])]))
    nodes.send(up(made), up(of_minute(2, 6, id="600", run=600)), hello=node("torn", "torn"))
    reply = nodes.profile("slurm/600")
    assert (reply.parts, taken(reply)) == (2, {"step": 11})
    reply = nodes.profile("slurm/600", from_ns=T + MINUTE, to_ns=T + 2 * MINUTE)
    assert (reply.parts, reply.pprof, reply.job.identity.id) == (0, b"", "600")


@pytest.mark.parametrize(
    ("key", "request_", "words"),
    [
        ("slurm", {}, "is not a job's key"),
        ("slurm/999", {}, "no job 'slurm/999' is stored"),
        ("slurm/999", {"node": "gaps"}, "no job 'slurm/999' is stored"),
        ("slurm/300", {"node": "nix"}, "no node 'nix' has 'slurm/300'; there are: gaps"),
        ("slurm/300", {"node": "gaps", "run": 1}, "no job 'slurm/300' is stored"),
        ("slurm/300", {"run": 1}, "no job 'slurm/300' is stored"),
    ],
)
def test_wrong_question_is_one_line(
    key: str, request_: dict[str, Any], words: str, gaps: str, controller: Controller
) -> None:
    with pytest.raises(UnavailableError) as caught:
        remote.fetch_profile(controller.address, key, **request_)
    text = str(caught.value)
    assert text.startswith(f"controller {controller.address}: ")
    assert words in text
    assert "reached" not in text
    assert "\n" not in text


def test_unreachable_controller_is_one_line() -> None:
    with pytest.raises(UnavailableError, match=r"^controller 127\.0\.0\.1:1 cannot be reached: "):
        remote.fetch_profile("127.0.0.1:1", "slurm/1")


def test_request_that_is_no_message_is_refused(nodes: Client) -> None:
    call = nodes.channel.unary_unary("/expanse.v1.Query/Profile", None, None)
    with pytest.raises(grpc.RpcError) as caught:
        call(b"\xff\xff", timeout=10)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# ---- bounds of a question


class Aborted(Exception):  # noqa: N818 - no error, but how a call ends
    """What `abort` of a gRPC context does."""


class Context:
    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(code, details)


def ask(store: Store, reader: Reader, **request: Any) -> ProfileReply:
    async def asked() -> bytes:
        query = Query(store, reader, None, None, None)  # type: ignore[arg-type]
        return await query.profile(ProfileRequest(key="slurm/123", **request).SerializeToString(), Context())

    return ProfileReply.FromString(asyncio.run(asked()))


@pytest.fixture
def minutes(store: Store) -> Iterator[Reader]:
    """Ten minutes of a job."""
    made = [of_minute(minute) for minute in range(10)]
    store.write([Item(node(), r, T, list(r.profiles)) for r in made])
    reader = Reader(store.path)
    yield reader
    reader.close()


@pytest.mark.parametrize("limit", ["MAX_PARTS", "MAX_BYTES"])
def test_span_with_too_much_in_it_is_refused_with_the_remedy(
    limit: str, store: Store, minutes: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(store, minutes).parts == 10
    first = "SELECT length(pprof) FROM profiles ORDER BY from_ns LIMIT 9"
    sizes = [size for (size,) in store._db.execute(first)]
    monkeypatch.setattr(merging, limit, len(sizes) if limit == "MAX_PARTS" else sum(sizes))
    with pytest.raises(Aborted, match="lie in that span; ask for a shorter span or for one node") as caught:
        ask(store, minutes)
    assert caught.value.args[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ask(store, minutes, to_ns=T + 9 * MINUTE).parts == 9


@pytest.mark.parametrize(("limit", "value"), [("MERGE_S", -1.0), ("MAX_MEMORY_BYTES", 1)])
def test_merging_that_takes_too_much_ends(
    limit: str, value: float, store: Store, minutes: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = schema.open_reader(store.path)
    places = connection.execute("SELECT id, job FROM profiles").fetchall()
    assert len(merging._Parts(connection, places).merged().sample) == 1
    monkeypatch.setattr(merging, limit, value)
    with pytest.raises(ControllerError, match=f"merging took? .*{merging.REMEDY}|merging takes .*one node"):
        merging._Parts(connection, places).merged()
    connection.close()


def test_profile_that_has_expired_or_been_replaced_is_left_out(store: Store, minutes: Reader) -> None:
    places = store._db.execute("SELECT id, job FROM profiles").fetchall()
    row, job = places[0]
    packed, number = asyncio.run(merging.merged(store.path, [*places, (row, job + 1), (10**9, job)]))
    assert (number, taken(ProfileReply(pprof=packed))) == (10, {"step": 10})
    assert asyncio.run(merging.merged(store.path, [(10**9, job)])) == (b"", 0)


def test_store_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ControllerError, match=r"^unable to open database file$"):
        asyncio.run(merging.merged(tmp_path / "no" / "x.db", [(1, 1)]))


def test_process_that_cannot_be_started_is_told(
    store: Store, minutes: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/dev/null")
    with pytest.raises(Aborted, match="merging cannot begin: Permission denied; ask again later"):
        ask(store, minutes)


def test_question_that_is_given_up_leaves_no_process(store: Store, minutes: Reader) -> None:
    places = store._db.execute("SELECT id, job FROM profiles").fetchall()
    before = set(psutil.Process().children())

    async def give_up() -> None:
        merge = asyncio.create_task(merging.merged(store.path, places * 20_000))
        while set(psutil.Process().children()) == before:
            await asyncio.sleep(0.01)
        merge.cancel()
        with pytest.raises(asyncio.CancelledError):
            await merge

    asyncio.run(give_up())
    assert set(psutil.Process().children()) == before


def test_controller_ends_while_it_merges(tmp_path: Path) -> None:
    with Controller(tmp_path / "x.db") as running, client(running.address) as sender:
        sender.send(*(up(of_minute(minute)) for minute in range(50)), hello=node())
        call = sender.channel.unary_unary(
            transport.PROFILE, ProfileRequest.SerializeToString, ProfileReply.FromString
        )
        first = call.future(ProfileRequest(key="slurm/123"))
        controller = psutil.Process(running.process.pid)
        # Before its own program runs, the controller would stand still with it.
        merge = eventually(
            lambda: next((c for c in controller.children() if merging.__name__ in c.cmdline()), None)
        )
        merge.suspend()
        others = [call.future(ProfileRequest(key="slurm/123")) for _ in range(10)]
        for given_up in others[:5]:
            given_up.cancel()
        assert running.terminate() == (0, "")
        assert psutil.wait_procs([merge], timeout=20)[1] == []
        assert first.exception().details() == "it is stopping"


# ---- upkeep


def write(store: Store, sequence: int, age_ns: int, skew_ns: int = 0, **job: Any) -> None:
    """One report of a job, `age_ns` before T, with a profile of the minute before."""
    made = report(sequence, time_ns=T - age_ns + skew_ns, **job)
    added = add(made, 0)
    added.from_ns, added.to_ns = made.time_ns - MINUTE, made.time_ns
    store.write([Item(node(), made, T - age_ns, list(made.profiles))])


def count(store: Store, table: str) -> int:
    number: int = store._db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
    return number


def test_old_profiles_go_in_batches(store: Store) -> None:
    total = EXPIRE_ROWS["profiles"] + 20
    for sequence in range(1, total + 1):
        write(store, sequence, 10 * DAY - sequence, run=1)
    write(store, total + 1, 0, run=2)
    store.settle()
    assert store.expire(7 * 86400, T)
    assert (count(store, "profiles"), count(store, "samples"), count(store, "jobs")) == (21, 21, 2)
    while store.expire(7 * 86400, T):
        pass
    assert (count(store, "profiles"), count(store, "samples"), count(store, "jobs")) == (1, 1, 1)


@pytest.mark.parametrize("skew", [-30 * DAY, 30 * DAY])
def test_profiles_of_a_node_whose_clock_is_wrong_live_as_long_as_others(store: Store, skew: int) -> None:
    for sequence, age in ((1, 8 * DAY), (2, 6 * DAY), (3, 0)):
        write(store, sequence, age, skew)
    while store.expire(7 * 86400, T):
        pass
    assert count(store, "profiles") == 2


def test_profile_that_claims_the_far_future_ages_with_its_report(store: Store) -> None:
    made = report(1, time_ns=T - 8 * DAY)
    add(made, 0).to_ns = 2**63 - 1
    store.write([Item(node(), made, T - 8 * DAY, list(made.profiles))])
    write(store, 2, 0)
    while store.expire(7 * 86400, T):
        pass
    assert count(store, "profiles") == 1


def test_profiles_of_a_node_that_is_gone_for_good_go(store: Store) -> None:
    write(store, 1, 9 * DAY)
    while store.expire(7 * 86400, T):
        pass
    assert (count(store, "profiles"), count(store, "boots"), count(store, "jobs")) == (0, 0, 0)


def test_report_that_is_not_stored_brings_no_profile(store: Store) -> None:
    made = [of_minute(minute) for minute in (5, 2, 8)]
    made[2].sequence = 1  # its numbers began too low
    found = store.write([Item(node(), r, T, list(r.profiles)) for r in made])
    assert found == [STORED, REPLAYED, OUT_OF_ORDER]
    assert count(store, "profiles") == 1


def test_failed_transaction_leaves_no_profile(store: Store) -> None:
    write(store, 1, 0)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 2}")
    made = report(2, time_ns=T + SECOND, run=9)
    add(made, 3, _packed(string_table=[random.Random(1).randbytes(20_000).hex()]))
    with pytest.raises(sqlite3.OperationalError, match="full"):
        store.write([Item(node(), made, T, list(made.profiles))])
    assert (count(store, "profiles"), count(store, "jobs"), count(store, "samples")) == (1, 1, 1)
    store._db.execute("PRAGMA max_page_count = 100000")
    assert store.write([Item(node(), made, T, list(made.profiles))]) == [STORED]
    assert (count(store, "profiles"), count(store, "jobs")) == (2, 2)
