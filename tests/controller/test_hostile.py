"""What a broken or hostile node sends must not reach others."""

from __future__ import annotations

import re
import sqlite3
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.wire.collector_pb2 import (
    GpuEvent,
    GpuHold,
    GpuHolder,
    GpuProcess,
    GpuSample,
    NodeIdentity,
    Report,
    Upstream,
)
from tests.controller.process import Client, Controller, client, node, report, up


def metric(controller: Controller, name: str) -> float:
    with urllib.request.urlopen(f"http://{controller.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def absurd_reports() -> dict[str, tuple[str, Report]]:
    crowd = report(9)
    for _ in range(10_000):
        crowd.jobs.add()
    other = report(9)
    other.node.name = "somebody-else"
    return {
        "no sequence": ("sequence", report(0)),
        "sequence past SQLite's range": ("sequence", report(2**63)),
        "before 1970": ("time", report(9, time_ns=-5)),
        "too many jobs": ("jobs", crowd),
        "another node's": ("node", other),
    }


@pytest.mark.parametrize("case", absurd_reports())
def test_absurd_report_is_counted_and_the_stream_goes_on(
    case: str, controller: Controller, nodes: Client
) -> None:
    reason, absurd = absurd_reports()[case]
    name = f'expanse_controller_reports_refused_total{{reason="{reason}"}}'
    before = metric(controller, name)
    sender = node(name=f"absurd-{abs(hash(case)) % 1000}", install=case.replace(" ", "-").replace("'", ""))
    assert nodes.send(up(absurd), up(report(10)), hello=sender)[-1] == 10
    assert metric(controller, name) == before + 1
    assert nodes.snapshot(sender.install_id)[0].current.sequence == 10


@pytest.mark.parametrize(
    "identity",
    [
        {"scheduler": ""},
        {"scheduler": "SLURM; DROP"},
        {"id": ""},
        {"id": "x" * 600},
        {"id": "a\0b"},
        {"name": "n" * 2000},
        {"cgroup": "c" * 70_000},
    ],
    ids=lambda identity: "-".join(identity),
)
def test_absurd_job_is_left_out_and_the_others_stay(
    identity: dict[str, str], controller: Controller, nodes: Client
) -> None:
    name = "expanse_controller_jobs_refused_total"
    before = metric(controller, name)
    sender = node(name="mixed", boot=f"boot-{before:.0f}")
    made = report(1, **identity)
    good = made.jobs.add(state=2)
    good.identity.scheduler, good.identity.id, good.identity.run = "run", "good", 1
    assert nodes.send(up(made), hello=sender) == [1]
    assert metric(controller, name) == before + 1
    (snapshot,) = nodes.snapshot("mixed")
    assert [job.identity.id for job in snapshot.current.jobs] == ["good"]


def absurd_gpus() -> dict[str, Report]:
    def made(**fields: Any) -> Report:
        one = report(1)
        one.gpus.add(**{"uuid": "GPU-bad", **fields})
        return one

    kinds = {
        "no UUID": made(uuid=""),
        "a UUID of control characters": made(uuid="GPU\n1"),
        "a long UUID": made(uuid="G" * 200),
        "a long name": made(name="n" * 2000),
        "many codes": made(xids=dict.fromkeys(range(300), 1)),
        "many causes": made(throttled_ns={str(n): 1 for n in range(300)}),
        "many reasons": made(unavailable={str(n): "x" for n in range(300)}),
        "many bytes": made(unavailable={str(n): "x" * 2000 for n in range(200)}),
        "an event without a UUID": report(1),
        "an event of a long kind": report(1),
        "a job that holds what has no UUID": report(1),
        "NVML with a long reason": report(1),
    }
    kinds["an event without a UUID"].gpu_events.add(kind="lost")
    kinds["a job that holds what has no UUID"].jobs[0].gpu.holds.add()
    kinds["an event of a long kind"].gpu_events.add(uuid="GPU-1", kind="k" * 2000)
    kinds["NVML with a long reason"].nvml.reason = "x" * 5000
    return kinds


@pytest.mark.parametrize("case", absurd_gpus())
def test_absurd_gpu_is_left_out_and_everything_else_stays(
    case: str, controller: Controller, nodes: Client
) -> None:
    name = "expanse_controller_gpus_refused_total"
    before = metric(controller, name)
    made = absurd_gpus()[case]
    made.gpus.add(uuid="GPU-good", power_mw=7)
    made.gpu_events.add(uuid="GPU-good", kind="xid", xid=79)
    sender = node(name="gpus", boot=f"boot-{before:.0f}")
    assert nodes.send(up(made), hello=sender) == [1]
    assert metric(controller, name) == before + 1
    (snapshot,) = nodes.snapshot("gpus")
    kept = snapshot.current
    assert [gpu.uuid for gpu in kept.gpus] == ["GPU-good"]
    assert [(event.uuid, event.xid) for event in kept.gpu_events] == [("GPU-good", 79)]
    assert [job.identity.id for job in kept.jobs] == ["123"]
    assert not kept.jobs[0].HasField("gpu")
    assert not kept.HasField("nvml")


LONG_NAME = "\U0001f600" * 256  # 1 KiB, as the agent lets it be


def long_lists() -> dict[str, tuple[Report, int]]:
    """Reports as users can make them where the agent does not bound its lists, and how many entries stay."""
    kinds = {
        "257 jobs claim a GPU": (report(1), 256),
        "processes of a long name": (report(1), 94),
        "5000 processes": (report(1), 4096),
        "300 contradictions": (report(1), 256),
        "70 holders of long names see an Xid": (report(1), 47),
        "300 holders see an Xid": (report(1), 256),
        "a name larger than an event": (report(1), 1),
        "a job that holds 300": (report(1), 256),
        "a job that names what there is not": (report(1), 256),
        "a job that names it at length": (report(1), 1),
    }
    jobs = [GpuHolder(scheduler="slurm", id=str(n), run=n, source="slurm") for n in range(300)]
    named = [GpuHolder(scheduler="run", id=LONG_NAME, run=n, source="slurm") for n in range(70)]
    listed = [GpuProcess(pid=n, kind="compute", job=f"run/{LONG_NAME}") for n in range(300)]
    event = {"uuid": "GPU-1", "kind": "xid", "xid": 31}
    kinds["257 jobs claim a GPU"][0].gpus.add(uuid="GPU-1", holders=jobs[:257])
    kinds["processes of a long name"][0].gpus.add(uuid="GPU-1", processes=listed)
    kinds["5000 processes"][0].gpus.add(uuid="GPU-1", processes=[GpuProcess(pid=n) for n in range(5000)])
    kinds["300 contradictions"][0].gpus.add(uuid="GPU-1", conflicts=["x"] * 300)
    kinds["70 holders of long names see an Xid"][0].gpu_events.add(**event, holders=named)
    kinds["300 holders see an Xid"][0].gpu_events.add(**event, holders=jobs)
    large = [GpuHolder(name="n" * 70_000), *jobs[:1]]
    kinds["a name larger than an event"][0].gpu_events.add(**event, holders=large)
    kinds["a job that holds 300"][0].jobs[0].gpu.holds.extend([GpuHold(uuid="GPU-1")] * 300)
    kinds["a job that names what there is not"][0].jobs[0].gpu.unknown.extend(["x"] * 300)
    kinds["a job that names it at length"][0].jobs[0].gpu.unknown.extend(["x" * 70_000, "y"])
    return kinds


def lists(made: Report) -> list[Any]:
    """All lists about GPUs in a report that are not empty."""
    parts: list[Any] = [*made.gpus, *made.gpu_events, *(job.gpu for job in made.jobs)]
    names = ("holders", "processes", "conflicts", "holds", "unknown")
    return [found for part in parts for name in names if (found := getattr(part, name, None))]


@pytest.mark.parametrize("case", long_lists())
def test_lists_that_users_make_long_lose_their_end_and_nothing_else(
    case: str, controller: Controller, nodes: Client
) -> None:
    refused, entries = "expanse_controller_gpus_refused_total", "expanse_controller_gpu_entries_refused_total"
    before = {name: metric(controller, name) for name in (refused, entries)}
    made, stay = long_lists()[case]
    sender = node(name="lists", boot=f"boot-{before[entries]:.0f}")
    assert nodes.send(up(made), hello=sender) == [1]
    (snapshot,) = nodes.snapshot("lists")
    kept = snapshot.current
    assert metric(controller, refused) == before[refused]
    assert metric(controller, entries) == before[entries] + len(lists(made)[0]) - stay
    assert list(map(len, lists(kept))) == [stay]
    for part in (kept, made):
        for found in lists(part):
            del found[:]
    assert [list(kept.gpus), list(kept.gpu_events)] == [list(made.gpus), list(made.gpu_events)]
    assert kept.jobs[0].HasField("gpu") == made.jobs[0].HasField("gpu")


def test_gpus_past_the_limit_go_and_the_others_stay(controller: Controller, nodes: Client) -> None:
    name = "expanse_controller_gpus_refused_total"
    before = metric(controller, name)
    made = report(1)
    made.gpus.extend(GpuSample(uuid=f"GPU-{number}" if number else "") for number in range(556))
    made.gpu_events.extend(GpuEvent(uuid=f"GPU-{number}", kind="lost") for number in range(1100))
    assert nodes.send(up(made), hello=node(name="crowded", install="crowded")) == [1]
    assert metric(controller, name) == before + 44 + 100
    (snapshot,) = nodes.snapshot("crowded")
    assert [gpu.uuid for gpu in snapshot.current.gpus] == [f"GPU-{number}" for number in range(1, 513)]
    assert len(snapshot.current.gpu_events) == 1000


def test_figures_past_the_range_are_absent_not_wrong(nodes: Client) -> None:
    made = report(1, id="9001", run=2**64 - 1)
    made.jobs[0].memory_bytes = 2**64 - 1
    made.jobs[0].io_read_bytes = 2**63 - 1
    nodes.send(up(made), hello=node(name="9001", install="9001"))
    series = nodes.series("slurm/9001", run=2**64 - 1, fields=["memory_bytes", "io_read_bytes"])
    assert dict(series.points[0].values) == {"io_read_bytes": float(2**63 - 1)}
    assert series.job.identity.run == 2**64 - 1


@pytest.mark.parametrize(
    "hello",
    [
        NodeIdentity(),
        NodeIdentity(name="n", install_id="i"),
        NodeIdentity(name="n\n", install_id="i", boot_id="b"),
        NodeIdentity(name="n" * 300, install_id="i", boot_id="b"),
        NodeIdentity(name="n", install_id="../../etc", boot_id="b"),
    ],
)
def test_hello_without_a_valid_identity_is_refused(hello: NodeIdentity, nodes: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        nodes.send(hello=hello)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_report_before_hello_is_refused(nodes: Client) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        nodes.send(up(report(1)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "Hello" in caught.value.details()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), max_size=5))
def test_any_bytes_leave_the_stream_alive(nodes: Client, messages: list[bytes]) -> None:
    last = up(report(2**62))
    assert nodes.send(*messages, last, hello=node(name="fuzz", install="fuzz"))[-1] == 2**62


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_reports_with_flipped_bytes_leave_the_stream_alive(nodes: Client, data: st.DataObject) -> None:
    raw = bytearray(up(report(1)))
    for position in data.draw(st.lists(st.integers(0, len(raw) - 1), max_size=6)):
        raw[position] = data.draw(st.integers(0, 255))
    last = up(report(2**63 - 1))
    assert nodes.send(bytes(raw), last, hello=node(name="flip", install="flip"))[-1] == 2**63 - 1


def test_first_message_of_any_bytes_ends_only_that_stream(nodes: Client) -> None:
    for raw in (b"", b"\xff", Upstream().SerializeToString(), b"\x0a\x05abc"):
        with pytest.raises(grpc.RpcError):
            nodes.send(raw)
    assert nodes.send(up(report(1)), hello=node(name="after", install="after")) == [1]


def test_installations_with_one_name_are_kept_apart(controller: Controller, nodes: Client) -> None:
    for install, seconds in (("clone-a", 10), ("clone-b", 5000)):
        made = [report(1, id="9002"), report(2, id="9002")]
        for r in made:
            r.jobs[0].cpu_ns = seconds + r.sequence
        nodes.send(*map(up, made), hello=node(name="9002", install=install))
    assert [s.current.node.install_id for s in nodes.snapshot("9002")] == ["clone-a", "clone-b"]
    assert [s.current.node.install_id for s in nodes.snapshot("clone-b")] == ["clone-b"]
    assert len(nodes.jobs(key="slurm/9002").jobs) == 2
    for install in ("clone-a", "clone-b"):
        assert (
            metric(controller, f'expanse_node_identity_conflict{{install_id="{install}",node="9002"}}') == 1
        )
    points = nodes.series("slurm/9002", fields=["cpu_ns"]).points
    assert [p.values["cpu_ns"] for p in points] in ([11, 12], [5001, 5002])


def test_store_that_cannot_be_written_leaves_the_reports_with_the_node(tmp_path: Path) -> None:
    db = tmp_path / "reports.db"
    with Controller(db) as controller, client(controller.address) as sender:
        sender.send(up(report(1)), hello=node())
        blocker = sqlite3.connect(db, isolation_level=None)
        blocker.execute("BEGIN IMMEDIATE")  # the writer gives up waiting after 5 s
        with pytest.raises(grpc.RpcError) as caught:
            sender.send(up(report(2)), hello=node())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "store cannot be written" in caught.value.details()
        blocker.execute("ROLLBACK")
        blocker.close()
        assert sender.send(up(report(2)), hello=node()) == [2]
