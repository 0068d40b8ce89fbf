"""Snapshot, Watch, Jobs and Series as a client sees them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from expanse_controller.columns import COLUMNS
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.ship import remote
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JOB_STATE_RUNNING, NodeSnapshot, Report
from tests.controller.process import Client, Controller, client, eventually, node, report, up

SECOND = 1_000_000_000


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    with Controller(tmp_path / "reports.db") as running:
        yield running


@pytest.fixture
def nodes(controller: Controller) -> Iterator[Client]:
    with client(controller.address) as made:
        yield made


def test_snapshot_has_the_last_two_reports_of_each_node(controller: Controller, nodes: Client) -> None:
    nodes.send(*(up(report(n)) for n in (1, 2, 3)), hello=node("b", "i-b"))
    nodes.send(up(report(9)), hello=node("a", "i-a"))
    a, b = remote.snapshot(controller.address)
    assert (a.current.node, a.current.sequence, a.HasField("previous")) == (node("a", "i-a"), 9, False)
    assert (b.current.sequence, b.previous.sequence) == (3, 2)
    assert abs(b.received_ns - time.time_ns()) < 60 * SECOND
    assert [s.current.sequence for s in remote.snapshot(controller.address, "a")] == [9]


def test_snapshot_shows_the_new_boot_and_outlives_the_controller(tmp_path: Path) -> None:
    with Controller(tmp_path / "x.db") as first, client(first.address) as nodes:
        nodes.send(up(report(1000)), hello=node(boot="before"))
        nodes.send(up(report(5)), hello=node(boot="after"))
        assert [s.current.sequence for s in nodes.snapshot()] == [5]
        assert first.terminate()[0] == 0
    with Controller(tmp_path / "x.db") as second, client(second.address) as nodes:
        (snapshot,) = nodes.snapshot("gpu001")
        assert (snapshot.current.sequence, snapshot.current.node.boot_id) == (5, "after")


def test_watch_begins_with_now_and_goes_on(controller: Controller, nodes: Client) -> None:
    nodes.send(up(report(1)), hello=node())
    view = remote.watch(controller.address, "gpu001")
    assert next(view).current.sequence == 1
    seen: list[NodeSnapshot] = []
    reading = threading.Thread(target=lambda: seen.append(next(view)), daemon=True)
    reading.start()
    nodes.send(up(report(1)), hello=node("other", "i-2"))
    nodes.send(up(report(2)), hello=node())
    reading.join(20)
    assert [(s.previous.sequence, s.current.sequence) for s in seen] == [(1, 2)]
    view.close()


def test_watch_ends_with_one_line_when_the_controller_does(controller: Controller, nodes: Client) -> None:
    nodes.send(up(report(1)), hello=node())
    view = remote.watch(controller.address)
    next(view)
    controller.terminate()
    with pytest.raises(UnavailableError) as caught:
        next(view)
    assert controller.address in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("address", "cause"),
    [("127.0.0.1:1", "connection refused"), ("no-such-host.invalid:9", "does not resolve")],
)
@pytest.mark.parametrize("ask", [remote.snapshot, lambda a: next(remote.watch(a))], ids=["snapshot", "watch"])
def test_unreachable_controller_is_one_line(address: str, cause: str, ask: object) -> None:
    with pytest.raises(UnavailableError) as caught:
        ask(address)  # type: ignore[operator]
    text = str(caught.value)
    assert address in text
    assert cause in text
    assert "\n" not in text


def test_unknown_node_is_one_line(controller: Controller) -> None:
    with pytest.raises(UnavailableError, match="no report from node 'nope'"):
        remote.snapshot(controller.address, "nope")


def test_jobs_are_found_by_key_and_by_array_task(nodes: Client) -> None:
    made = report(1, id="501", array="500_1", run=10)
    other = made.jobs.add(state=JOB_STATE_RUNNING)
    other.identity.scheduler, other.identity.id, other.identity.run = "kubernetes", "ml/train-0", 11
    nodes.send(up(made), hello=node())
    assert [j.identity.run for j in nodes.jobs(key="slurm/501").jobs] == [10]
    assert [j.identity.run for j in nodes.jobs(key="slurm/500_1").jobs] == [10]
    assert [j.identity.run for j in nodes.jobs(key="kubernetes/ml/train-0").jobs] == [11]
    assert list(nodes.jobs(key="run/501").jobs) == []
    assert len(nodes.jobs().jobs) == 2
    assert len(nodes.jobs(limit=1).jobs) == 1


@pytest.mark.parametrize(
    ("key", "runs"),
    [
        ("slurm/500", [10, 11]),
        ("slurm/500_2", [11]),
        ("slurm/s7Q2M4KD9WB100", [10]),
        ("kubernetes/ml/train-0", [12]),
        ("kubernetes/3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7", [12]),
        (f"container/{'ab' * 6}", [13]),
        (f"container/{'ab' * 32}", [13]),
        ("unit/a.service", [14]),
        ("run/500", []),
        ("slurm/50", []),
    ],
)
def test_every_form_of_a_key(key: str, runs: list[int], nodes: Client) -> None:
    made = report(1, id="501", array="500_1", run=10)
    made.jobs[0].identity.sluid = "s7Q2M4KD9WB100"
    for run, scheduler, name in (
        (11, "slurm", "502"),
        (12, "kubernetes", "ml/train-0"),
        (13, "container", "ab" * 32),
        (14, "unit", "a.service"),
    ):
        identity = made.jobs.add(state=JOB_STATE_RUNNING).identity
        identity.scheduler, identity.id, identity.run = scheduler, name, run
    made.jobs[1].identity.array = "500_2"
    made.jobs[2].identity.pod_uid = "3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7"
    nodes.send(up(made), hello=node())
    assert sorted(j.identity.run for j in nodes.jobs(key=key).jobs) == runs


def test_runs_of_one_job_and_its_end(nodes: Client) -> None:
    first, second = report(1, run=10), report(2, run=10)
    second.jobs[0].state = JOB_STATE_ENDED
    third = report(3, run=20)
    nodes.send(up(first), up(second), up(third), hello=node())
    newest, oldest = nodes.jobs(key="slurm/123").jobs
    assert (newest.identity.run, newest.state) == (20, JOB_STATE_RUNNING)
    assert (oldest.identity.run, oldest.state) == (10, JOB_STATE_ENDED)
    assert (oldest.first_ns, oldest.last_ns) == (first.time_ns, second.time_ns)
    assert [j.identity.run for j in nodes.jobs(live_only=True).jobs] == [20]
    assert [j.identity.run for j in nodes.jobs(live_only=True, key="slurm/999").jobs] == []
    # Series: the newest run unless one is named.
    assert len(nodes.series("slurm/123").points) == 1
    assert len(nodes.series("slurm/123", run=10).points) == 2


def test_pod_whose_name_becomes_known_stays_one_job(nodes: Client) -> None:
    early = report(1, scheduler="kubernetes", id="0f2d-uid", run=77)
    late = report(2, scheduler="kubernetes", id="ml/train-0", run=77)
    nodes.send(up(early), up(late), hello=node())
    (job,) = nodes.jobs().jobs
    assert (job.identity.id, job.first_ns, job.last_ns) == ("ml/train-0", early.time_ns, late.time_ns)
    assert len(nodes.series("kubernetes/ml/train-0").points) == 2


def test_series_has_every_column_and_leaves_out_what_is_absent(nodes: Client) -> None:
    made = report(1)
    sample = made.jobs[0]
    sample.counters.cycles.value, sample.counters.cycles.running_ratio = 1000, 0.5
    sample.counters.migrations = 0
    sample.io_pressure.some_us = 3
    sample.network.sent_bytes = 4
    sample.delays.swap_in_ns = 5
    nodes.send(up(made), hello=node())
    (point,) = nodes.series("slurm/123").points
    assert point.time_ns == made.time_ns
    assert dict(point.values) == {
        "state": 2,
        "processes": 2,
        "cpu_ns": 1e9,
        "cycles": 1000,
        "cycles_running_ratio": 0.5,
        "migrations": 0,
        "io_pressure_some_us": 3,
        "network_received_bytes": 0,
        "network_sent_bytes": 4,
        "network_received_packets": 0,
        "network_sent_packets": 0,
        "network_dropped_packets": 0,
        "network_error_packets": 0,
        "delay_swap_in_ns": 5,
    }
    assert set(point.values) <= set(COLUMNS)


def test_series_bounds_and_fields(nodes: Client) -> None:
    begin = time.time_ns()
    made = [report(n, time_ns=begin + n * SECOND) for n in range(1, 11)]
    nodes.send(*map(up, made), hello=node())
    reply = nodes.series(
        "slurm/123", from_ns=begin + 3 * SECOND, to_ns=begin + 5 * SECOND, fields=["cpu_ns", "memory_bytes"]
    )
    assert [dict(p.values) for p in reply.points] == [{"cpu_ns": n * 1e9} for n in (3, 4, 5)]
    assert reply.job.node == "gpu001"
    assert len(nodes.series("slurm/123", node="gpu001").points) == 10


@pytest.mark.parametrize(
    ("key", "request_", "code", "words"),
    [
        ("slurm/123", {"fields": ["cpu"]}, grpc.StatusCode.INVALID_ARGUMENT, "no such field: 'cpu'"),
        ("slurm/123", {"fields": ["1); DROP TABLE x"]}, grpc.StatusCode.INVALID_ARGUMENT, "no such field"),
        ("slurm", {}, grpc.StatusCode.INVALID_ARGUMENT, "is not a job's key"),
        ("slurm/999", {}, grpc.StatusCode.NOT_FOUND, "no job 'slurm/999' is stored"),
        (
            "slurm/123",
            {"node": "nix"},
            grpc.StatusCode.NOT_FOUND,
            "no node 'nix' has 'slurm/123'; there are: gpu001",
        ),
        ("slurm/123", {"run": 1}, grpc.StatusCode.NOT_FOUND, "no job"),
    ],
)
def test_wrong_question_is_told_in_one_line(
    key: str, request_: dict[str, object], code: grpc.StatusCode, words: str, nodes: Client
) -> None:
    nodes.send(up(report(1)), hello=node())
    with pytest.raises(grpc.RpcError) as caught:
        nodes.series(key, **request_)
    assert caught.value.code() is code
    assert words in caught.value.details()
    assert "\n" not in caught.value.details()


def test_long_series_is_thinned_and_keeps_its_end(nodes: Client) -> None:
    begin = 1_700_000_000 * SECOND
    messages = (up(report(n, time_ns=begin + n * SECOND)) for n in range(1, 3001))
    nodes.send(*messages, hello=node())
    full = nodes.series("slurm/123", fields=["cpu_ns"])
    assert len(full.points) == 3000
    thin = nodes.series("slurm/123")  # all columns
    assert 1000 <= len(thin.points) < 3000
    assert thin.points[-1].time_ns == begin + 3000 * SECOND
    assert len({b.time_ns - a.time_ns for a, b in zip(thin.points, thin.points[1:], strict=False)}) == 1


def test_request_that_is_no_message_is_refused(nodes: Client) -> None:
    for path in ("Snapshot", "Jobs", "Series"):
        call = nodes.channel.unary_unary(f"/expanse.v1.Query/{path}", None, None)
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff", timeout=10)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_clock_that_is_ahead_loses_nothing(nodes: Client) -> None:
    ahead = report(1, time_ns=time.time_ns() + 600 * SECOND)
    nodes.send(up(ahead), hello=node())
    assert [p.time_ns for p in nodes.series("slurm/123").points] == [ahead.time_ns]
    assert len(nodes.jobs(live_only=True).jobs) == 1


def test_node_without_jobs_is_known(nodes: Client) -> None:
    nodes.send(up(Report(sequence=1, time_ns=time.time_ns())), hello=node())
    assert eventually(nodes.snapshot)[0].current.sequence == 1


def test_document_lists_the_columns() -> None:
    document = Path(__file__).resolve().parents[2] / "docs" / "controller.md"
    _, _, fields = document.read_text(encoding="utf-8").partition("## Fields of a series")
    assert [line[3:-1] for line in fields.splitlines() if line.startswith("- `")] == list(COLUMNS)
