"""The Prometheus page: what is on it, that it obeys the conventions, and that nothing can break it."""

from __future__ import annotations

import math
import re
import shutil
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.export.declaration import JOB
from expanse_ebpf.export.metrics import METRICS
from expanse_ebpf.export.prometheus import LABEL_LIMIT, ReportCollector, clean, serve
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    BpfProgram,
    Counters,
    HardwareCounter,
    JobSample,
    NetworkCounters,
    Report,
    SourceStatus,
)
from tests.export.gpus import gpu_node

PLACE = ("line", "share")
ROOT = Path(__file__).resolve().parents[2]


def filled(message: Any, number: int = 7) -> Any:
    """`message` with every number, text and message field set."""
    for field in message.DESCRIPTOR.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is not None:
            if not field.is_repeated:
                filled(getattr(message, field.name), number)
        elif not field.is_repeated:
            if field.name == "running_ratio":
                value: Any = 0.5
            elif field.enum_type is not None:
                value = JOB_STATE_RUNNING
            elif field.cpp_type == field.CPPTYPE_STRING:
                value = field.name
            elif field.cpp_type == field.CPPTYPE_BOOL:
                value = True
            else:
                value = number
            setattr(message, field.name, value)
    return message


def job(number: int, run: int = 1, **fields: Any) -> JobSample:
    sample = JobSample(state=JOB_STATE_RUNNING, cpu_ns=1_500_000_000, **fields)
    sample.identity.scheduler = "slurm"
    sample.identity.id = str(number)
    sample.identity.run = run
    return sample


def full_report() -> Report:
    """A report that has everything."""
    report: Report = filled(Report())
    report.node.name = "gpu017"
    report.jobs.append(filled(JobSample()))
    report.host.network["eth0"].CopyFrom(filled(NetworkCounters()))
    report.collector.programs.append(BpfProgram(name="on_switch", run_ns=5, runs=2, measured_ns=10))
    report.collector.sources.append(SourceStatus(name="cpu", up=True, unavailable={"cycles": "no PMU"}))
    report.collector.sources.append(SourceStatus(name="delays", reason="kernel.task_delayacct is 0"))
    report.jobs[0].python.unresolved["changed"] = 3
    report.jobs[0].unavailable["io_read_bytes"] = "no io controller"
    report.jobs[0].gpu.holds.add(uuid="uuid", source="slurm", sharers=1)
    report.nvml.up = False
    gpu = filled(report.gpus.add())
    gpu.state, gpu.parent_uuid = "ok", ""
    gpu.holders.add(scheduler="slurm", id="7", run=3, source="slurm")
    gpu.throttled_ns["power"] = 9
    gpu.xids[79] = 1
    gpu.unavailable["energy_mj"] = "not supported"
    return report


def page(report: Report) -> str:
    registry = CollectorRegistry()
    registry.register(ReportCollector(lambda: report))
    return generate_latest(registry).decode()


def samples(text: str) -> list[Sample]:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(text: str, name: str) -> dict[tuple[str, ...], float]:
    """Values of the metric by the labels that it adds to the job's or the node's own."""
    own = len(JOB) if name.startswith("expanse_job_") else 1
    more = next(metric.labels for metric in METRICS if metric.name == name)[own:]
    return {tuple(s.labels[label] for label in more): s.value for s in samples(text) if s.name == name}


def series(text: str) -> list[tuple[str, tuple[tuple[str, str], ...]]]:
    return [(s.name, tuple(sorted(s.labels.items()))) for s in samples(text)]


# ---- conventions


def findings(text: str) -> Iterable[str]:
    """What a linter of the exposition would say."""
    for family in text_string_to_metric_families(text):
        name = family.name + ("_total" if family.type == "counter" else "")
        if not family.documentation:
            yield f"{name}: no help"
        if not re.fullmatch(r"expanse_[a-z0-9]+(_[a-z0-9]+)*", name):
            yield f"{name}: not a name of ours"
        if {s.name for s in family.samples} != {name}:
            yield f"{name}: samples of another name"
        if family.type not in ("counter", "gauge"):
            yield f"{name}: type {family.type}"
        if family.type == "gauge" and re.search("_(total|count|sum|bucket)$", name):
            yield f"{name}: a gauge with a counter's or a histogram's suffix"
        if re.search("_(gauge|counter|ns|us|ms|microseconds|kb|mb|kib|mib|percent|pct|ghz|mhz)(_|$)", name):
            yield f"{name}: type or unit that is not a base unit in the name"
        if "_cpu_" in name and "seconds" in name and family.type != "counter":
            yield f"{name}: CPU time is a counter"


def test_lint_of_the_full_page_finds_nothing() -> None:
    assert list(findings(page(full_report()))) == []


def test_the_lint_can_find_something() -> None:
    bad = (
        "# HELP expanse_x_ms Bad.\n# TYPE expanse_x_ms gauge\nexpanse_x_ms 1\n"
        "# TYPE expanse_y_total gauge\nexpanse_y_total 1\n"
    )
    assert len(list(findings(bad))) == 3


@pytest.mark.parametrize("report", [full_report(), gpu_node()], ids=["full", "GPUs"])
def test_promtool_finds_nothing(report: Report) -> None:
    promtool = shutil.which("promtool", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    assert promtool, "promtool is missing; `make build/promtool` fetches it"
    result = subprocess.run(
        [promtool, "check", "metrics"], input=page(report), capture_output=True, text=True, check=False
    )
    assert (result.stdout + result.stderr, result.returncode) == ("", 0)


def test_every_declared_metric_is_on_the_full_page_with_its_labels_and_type() -> None:
    text = page(full_report())
    labels = {s.name: set(s.labels) for s in samples(text)}
    assert labels == {metric.name: set(metric.labels) for metric in METRICS}
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    assert types == {m.name: "counter" if m.kind == "counter" else "gauge" for m in METRICS}


def test_two_equal_runs_give_the_same_names() -> None:
    assert series(page(full_report())) == series(page(full_report()))


def test_every_number_of_a_report_is_on_the_page() -> None:
    """Each field, changed alone, must change the page."""
    not_exported = {"Report.sequence", "JobSample.state"}
    # A line of code that changes every few seconds would be a new series each time.
    not_exported |= {f"JobSample.python.{kind}_{part}" for kind in ("hottest", "waiting") for part in PLACE}

    def numbers(message: Any, path: str) -> Iterable[tuple[Any, Any, str]]:
        for field in message.DESCRIPTOR.fields:
            if field.message_type is None and not field.is_repeated:
                if field.cpp_type not in (field.CPPTYPE_STRING, field.CPPTYPE_ENUM):
                    yield message, field, f"{path}.{field.name}"
            elif field.message_type is not None and not field.is_repeated:
                yield from numbers(getattr(message, field.name), f"{path}.{field.name}")

    report = full_report()
    before = page(report)
    unseen = []
    for message, field, path in [
        *numbers(report, "Report"),
        *numbers(report.jobs[0], "JobSample"),
        *numbers(report.gpus[0], "GpuSample"),
    ]:
        value = getattr(message, field.name)
        changed = (
            not value if isinstance(value, bool) else value / 2 if isinstance(value, float) else value + 1000
        )
        setattr(message, field.name, changed)
        if page(report) == before:
            unseen.append(path)
        setattr(message, field.name, value)
    assert set(unseen) <= not_exported


# ---- figures


def test_python_samples_and_those_without_a_stack_by_reason() -> None:
    report = Report()
    report.jobs.append(job(1))
    assert "python" not in page(report)
    python = report.jobs[0].python
    python.samples, python.lost = 490, 0
    python.unresolved["changed"] = 4
    text = page(report)
    assert values(text, "expanse_job_python_samples_total") == {(): 490}
    assert values(text, "expanse_job_python_unresolved_total") == {("changed",): 4, ("lost",): 0}
    for number in range(500):
        python.unresolved[f"reason {number}"] = 1
    assert len(values(page(report), "expanse_job_python_unresolved_total")) == 51


def test_units_are_base_units() -> None:
    report = Report()
    report.jobs.append(job(1, memory_bytes=4096, throttled_ns=250_000_000))
    report.jobs[0].io_pressure.full_us = 2_500_000
    text = page(report)
    assert values(text, "expanse_job_cpu_seconds_total") == {(): 1.5}
    assert values(text, "expanse_job_cpu_throttled_seconds_total") == {(): 0.25}
    assert values(text, "expanse_job_memory_bytes") == {(): 4096}
    assert values(text, "expanse_job_pressure_seconds_total") == {("io", "full"): 2.5}


def test_what_is_absent_stays_absent_and_zero_stays_zero() -> None:
    report = Report()
    report.jobs.append(job(1, oom_kills=0))
    text = page(report)
    assert values(text, "expanse_job_oom_kills_total") == {(): 0}
    names = {s.name for s in samples(text)}
    assert not names & {"expanse_job_memory_bytes", "expanse_job_processes", "expanse_host_load1"}
    assert not any("cycles" in name or "network" in name or "overflow_cycles" in name for name in names)


@pytest.mark.parametrize("ratio", [0.0, math.nan, -1.0, 17.0])
def test_a_hardware_counter_that_never_ran_is_absent(ratio: float) -> None:
    report = Report()
    report.jobs.append(job(1))
    report.jobs[0].counters.cycles.CopyFrom(HardwareCounter(value=0, running_ratio=ratio))
    report.jobs[0].counters.instructions.CopyFrom(HardwareCounter(value=9, running_ratio=0.25))
    text = page(report)
    assert values(text, "expanse_job_cycles_total") == {}
    assert values(text, "expanse_job_instructions_total") == {(): 9}
    assert values(text, "expanse_job_hardware_running_ratio") == {("instructions",): 0.25}


def test_job_state_is_one_of_four() -> None:
    report = Report()
    report.jobs.append(job(1))
    report.jobs[0].state = JOB_STATE_HELD_IDLE
    assert values(page(report), "expanse_job_state") == {
        ("starting",): 0,
        ("running",): 0,
        ("held_idle",): 1,
        ("ended",): 0,
    }


def test_sources_say_why_they_are_down_and_programs_of_one_name_add_up() -> None:
    report = full_report()
    report.collector.programs.append(BpfProgram(name="on_switch", run_ns=7, runs=1, measured_ns=10))
    text = page(report)
    assert values(text, "expanse_source_up") == {("cpu",): 1, ("delays",): 0}
    assert set(values(text, "expanse_source_unavailable_info")) == {
        ("cpu", "cycles", "no PMU"),
        ("delays", "all", "kernel.task_delayacct is 0"),
    }
    assert values(text, "expanse_bpf_program_runs_total") == {("on_switch",): 3}
    assert values(text, "expanse_unavailable_jobs") == {("io_read_bytes", "no io controller"): 1}


# ---- nothing can break the page


def test_jobs_that_collide_leave_one_and_are_counted() -> None:
    """Two jobs with the same labels, one without an id, and two good ones with three unknown cgroups."""
    report = Report()
    report.host.unattributed_cgroups = 3
    report.jobs.extend([job(1), job(1, memory_bytes=5), job(2), JobSample(cpu_ns=1), job(1, run=2)])
    text = page(report)
    assert len(set(series(text))) == len(series(text))
    keys = [(s.labels["job_id"], s.labels["run"]) for s in samples(text) if s.name == "expanse_job_info"]
    assert keys == [("1", "1"), ("2", "1"), ("1", "2")]
    assert values(text, "expanse_job_memory_bytes") == {}  # of the job that was left out
    assert values(text, "expanse_duplicate_jobs") == {(): 2}
    assert values(text, "expanse_unattributed_cgroups") == {(): 3}


ODD_NAMES = [
    'say "hello"',
    "back\\slash",
    "two\nlines",
    "trailing backslash \\",
    "\\n is not a newline",
    'a="b",c="d"} 7',
    b"\xd0\xbe\xd0\xb1\xd1\x83\xd1\x87\xd0\xb5\xd0\xbd\xd0\xb8\xd0".decode("utf-8", "replace"),
    "обучение модели",
    " # blanks ",
    "{}",
]


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_round_trip(name: str) -> None:
    report = Report()
    report.jobs.append(job(1))
    report.jobs[0].identity.name = name
    report.jobs[0].identity.id = name
    info = next(s for s in samples(page(report)) if s.name == "expanse_job_info")
    assert (info.labels["name"], info.labels["job_id"]) == (name, name)


def test_a_name_cut_within_a_letter_keeps_its_whole_letters() -> None:
    comm = "обучение модели".encode()[:15]
    assert clean(comm.decode("utf-8", "replace")) == "обучени\ufffd"
    assert clean(comm.decode("utf-8", "surrogateescape")) == "обучени\ufffd"


def test_unfit_characters_are_replaced_and_long_values_cut() -> None:
    assert clean("\0") == "\ufffd"
    assert clean("a\x1b[31m\r") == "a\ufffd[31m\ufffd"
    assert len(clean("x" * 10_000)) == LABEL_LIMIT


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=12), st.text(max_size=12), st.integers(0, 3)), max_size=6))
def test_any_names_give_a_page_that_parses_without_duplicates(names: list[tuple[str, str, int]]) -> None:
    report = Report()
    for identifier, name, run in names:
        sample = report.jobs.add(cpu_ns=1)
        sample.identity.scheduler = "run"
        sample.identity.id, sample.identity.name, sample.identity.run = identifier, name, run
        report.collector.sources.add(name=name, reason=identifier)
        report.host.network[name].received_bytes = 1
    text = page(report)
    assert len(set(series(text))) == len(series(text))
    wanted = {(clean(i), str(run)) for i, _, run in names if i}
    assert {
        (s.labels["job_id"], s.labels["run"]) for s in samples(text) if s.name == "expanse_job_info"
    } == wanted


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200))
def test_a_report_of_random_bytes_never_raises(data: bytes) -> None:
    report = full_report()
    try:
        report.MergeFromString(data)
    except Exception:
        return  # not a Report, and refused long before the page
    samples(page(report))


def test_ten_at_a_time_of_many_jobs_keep_the_page_small() -> None:
    newest = [Report()]
    collector = ReportCollector(lambda: newest[0])
    sizes = set()
    for first in range(0, 5000, 10):
        report = Report(sequence=first + 1, interval_ns=10**9)
        report.jobs.extend(job(number) for number in range(first, first + 10))
        newest[0] = report
        sizes.add(sum(len(family.samples) for family in collector.collect()))
    assert len(sizes) == 1
    report = Report(sequence=5001)
    newest[0] = report
    assert not any("expanse_job_" in family.name for family in collector.collect())


def test_jobs_past_the_limit_are_one_bucket_and_a_number() -> None:
    report = Report()
    report.jobs.extend(job(number) for number in range(1000))
    report.host.overflow_jobs = 200
    report.host.overflow.CopyFrom(Counters(page_faults=12))
    text = page(report)
    assert len([s for s in samples(text) if s.name == "expanse_job_info"]) == 1000
    assert values(text, "expanse_overflow_jobs") == {(): 200}
    assert values(text, "expanse_overflow_page_faults_total") == {(): 12}


def test_reasons_are_bounded() -> None:
    report = Report()
    report.jobs.extend(job(n, unavailable={"cpu_ns": f"pid {n} is gone"}) for n in range(300))
    rows = values(page(report), "expanse_unavailable_jobs")
    assert len(rows) <= 51
    assert sum(rows.values()) == 300


# ---- a node that falls silent


def test_a_report_that_stays_the_same_ends_after_two_intervals() -> None:
    now = 100.0
    report = Report(sequence=5, time_ns=1, interval_ns=2 * 10**9)
    report.jobs.append(job(1))
    collector = ReportCollector(lambda: report, clock=lambda: now)

    def names() -> set[str]:
        return {family.name for family in collector.collect()}

    assert "expanse_job_cpu_seconds" in names()
    now += 4
    assert "expanse_job_cpu_seconds" in names()
    now += 2
    assert names() == {"expanse_node_up", "expanse_report_timestamp_seconds"}
    report.sequence = 6
    assert "expanse_job_cpu_seconds" in names()


# ---- the server


def get(port: int, path: str = "/metrics") -> tuple[int, str]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as reply:
        return reply.status, reply.read().decode()


def test_serve_shows_the_page_and_before_the_first_report_an_empty_one() -> None:
    newest: list[Report | None] = [None]
    port = serve("127.0.0.1:0", ReportCollector(lambda: newest[0]))
    assert get(port) == (200, "")
    newest[0] = full_report()
    status, text = get(port)
    assert status == 200
    assert values(text, "expanse_job_cpu_seconds_total") == {(): 7e-9}


def test_a_scrape_can_ask_for_some_families() -> None:
    port = serve("127.0.0.1:0", ReportCollector(full_report))
    _, text = get(port, "/metrics?name[]=expanse_job_cpu_seconds_total&name[]=expanse_node_info")
    assert {s.name for s in samples(text)} == {"expanse_job_cpu_seconds_total", "expanse_node_info"}


def test_silent_and_rude_peers_do_not_stop_the_page(capfd: pytest.CaptureFixture[str]) -> None:
    port = serve("127.0.0.1:0", ReportCollector(full_report))
    peers = [socket.create_connection(("127.0.0.1", port)) for _ in range(3)]
    peers[0].sendall(b"\x00\xff garbage\r\n\r\n")
    peers[1].sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    peers[1].close()
    status, _ = get(port)
    assert status == 200
    with pytest.raises(urllib.error.HTTPError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", data=b"x", timeout=10)
    for peer in peers:
        peer.close()
    assert "Traceback" not in capfd.readouterr().err


def test_more_connections_than_the_limit_are_closed() -> None:
    port = serve("127.0.0.1:0", ReportCollector(full_report))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(8)]
    with socket.create_connection(("127.0.0.1", port)) as one_more:
        one_more.settimeout(10)
        assert one_more.recv(1) == b""
    for peer in silent:
        peer.close()


def test_a_port_that_is_taken_is_one_line_with_the_remedy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(
            UnavailableError, match=re.escape(f"agent.metrics_listen: cannot listen on {address}: ")
        ) as e:
            serve(address)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("nowhere", ConfigError),
        ("127.0.0.1:99999", ConfigError),
        ("203.0.113.7:0", UnavailableError),  # not this machine's, or not yet
        ("host.invalid:1", UnavailableError),
    ],
)
def test_addresses_that_cannot_be(address: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        serve(address)
