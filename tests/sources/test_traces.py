"""Source "traces" with windows' processes that do what a test tells them to."""

from __future__ import annotations

import os
import select
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from expanse_ebpf.config import Config, load
from expanse_ebpf.errors import ConfigError, UnavailableError
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import gpu_calls
from expanse_ebpf.sources import Attentive, Context, traces
from expanse_ebpf.sources.trace_window import PATIENCE_S
from expanse_ebpf.sources.traces import MOST_WINDOWS, REPORT_BYTES, TraceSource, TraceWatch
from expanse_ebpf.tracing import process
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_RUNNING,
    TRACE_STATE_BUDGET,
    TRACE_STATE_DONE,
    TRACE_STATE_FAILED,
    TRACE_STATE_NO_TARGETS,
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    Evidence,
    GpuHold,
    GpuSample,
    JobIdentity,
    NodeIdentity,
    Report,
    Trace,
    TracePart,
    TraceReply,
    TraceRequest,
    TraceStatus,
)
from tests.tracing.made_up_window import command

ID = "0123456789abcdef"


def job(number: int = 1, **fields: Any) -> Job:
    made = Job(
        JobIdentity(scheduler="run", id=f"train{number}", run=number, uid=1000, cgroup=f"/job{number}")
    )
    made.slot, made.state, made.pids = 4 + number, JOB_STATE_RUNNING, frozenset((os.getpid(),))
    for name, value in fields.items():
        setattr(made, name, value)
    return made


class Node:
    """A source, its jobs and the reports that it has filled in. `late`: how much later it is for reports."""

    def __init__(self, how: str, overrides: dict[str, Any]) -> None:
        self.files = [open(name, "rb") for name in ("/dev/zero", "/dev/full")]  # noqa: SIM115
        lifecycle: Any = SimpleNamespace(
            hierarchy="unified",
            configuration=SimpleNamespace(hierarchy_id=0),
            maps={
                name: SimpleNamespace(fd=file.fileno())
                for name, file in zip(("slots", "totals"), self.files, strict=True)
            },
        )
        self.ships = True
        self.overflow: list[Job] = []
        self.source = TraceSource(
            Context(
                load(None, {}, overrides),
                lifecycle,
                overflow=self.overflow,
                ships=lambda: self.ships,
                node=NodeIdentity(name="n1", install_id="i", boot_id="b"),
            ),
            command(how),
        )
        self.source.start()
        self.jobs = [job()]
        self.late = 0.0

    def tick(self, fill: Callable[[Report], None] = lambda _: None) -> Report:
        report = Report(time_ns=time.time_ns())
        samples = [(one, report.jobs.add(state=one.state)) for one in self.jobs]
        fill(report)
        self.source.sample(time.monotonic() + self.late, samples, report)
        return report

    def open(self, key: str = "run/train1", uid: int | None = None, **fields: Any) -> TraceWatch:
        return self.source.open(TraceRequest(key=key, **({"run_share": 1.0} | fields)), uid, self.jobs)

    def command(self, key: str = "run/train1", **fields: Any) -> None:
        self.source.command(TraceRequest(**({"id": ID, "key": key, "run_share": 1.0} | fields)), self.jobs)

    def turn(self, condition: Callable[[], Any], *, ticks: bool = True) -> None:
        """Let the source read, and make reports, until `condition` holds."""
        until = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < until
            if self.source.fd >= 0 and select.select([self.source.fd], [], [], 0.02)[0]:
                self.source.ready()
            if ticks:
                self.tick()

    def follow(self, watch: TraceWatch, *, until_state: int = 0) -> list[TraceReply]:
        """Everything that comes, or up to a state."""
        found: list[TraceReply] = []

        def enough() -> bool:
            found.extend(watch.replies())
            return watch.over or any(reply.status.state == until_state != 0 for reply in found)

        self.turn(enough)
        return found

    def reports_until(self, enough: Callable[[list[TraceStatus], list[TracePart]], Any]) -> list[Report]:
        reports: list[Report] = []

        def condition() -> bool:
            reports.append(self.tick())
            return bool(enough(statuses_of(reports), parts_of(reports)))

        self.turn(condition, ticks=False)
        return reports

    def pids(self) -> list[int]:
        return [one.pid for one in self.source._processes()]

    def close(self) -> None:
        self.source.stop()
        for file in self.files:
            file.close()


def statuses_of(reports: list[Report]) -> list[TraceStatus]:
    return [status for report in reports for status in report.traces]


def parts_of(reports: list[Report]) -> list[TracePart]:
    return [part for report in reports for part in report.trace_parts]


def states(replies: list[TraceReply]) -> list[int]:
    return [reply.status.state for reply in replies if reply.HasField("status")]


def trace_of(parts: list[TracePart]) -> Trace:
    assert [part.index for part in parts] == list(range(parts[0].parts))
    return Trace.FromString(zlib.decompress(b"".join(part.data for part in parts)))


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


Make = Callable[..., Node]


@pytest.fixture
def make(request: pytest.FixtureRequest) -> Iterator[Make]:
    made: list[Node] = []

    def make(how: str = "trace", **overrides: Any) -> Node:
        names = {name.replace("__", "."): value for name, value in overrides.items()}
        made.append(Node(how, {"controller.address": "localhost:1"} | names))
        return made[-1]

    yield make
    for node in made:
        node.close()


# ---- life


def test_without_bpf_or_on_an_old_kernel_it_cannot_start_and_says_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = TraceSource(Context(Config(), None, "CAP_BPF is missing"))
    with pytest.raises(UnavailableError, match="CAP_BPF is missing"):
        source.start()
    source.stop()
    lifecycle: Any = object()
    monkeypatch.setattr(gpu_calls, "supported", lambda: "Linux is too old")
    source = traces.create(Context(Config(), lifecycle))
    with pytest.raises(UnavailableError, match="Linux is too old"):
        source.start()
    source.stop()


def test_while_no_window_is_open_nothing_runs(make: Make) -> None:
    node = make()
    assert isinstance(node.source, Attentive)
    assert (node.source.period_s, node.source.fd >= 0) == (0.0, True)
    node.source.beat()
    node.source.ready()
    report = node.tick()
    assert (list(report.traces), list(report.trace_parts)) == ([], [])
    assert (node.source.cpu_ns, node.source.pss_bytes, node.pids()) == (0, 0, [])


# ---- one who asks on the node


def test_who_asks_sees_the_window_from_its_beginning_to_its_trace(make: Make) -> None:
    node = make()
    watch = node.open(seconds=60, stacks=True, cost_share=0.5, start_ns=time.time_ns() + 500_000_000)
    (first,) = watch.replies()
    assert (first.node, first.status.state, first.status.seconds) == ("n1", TRACE_STATE_WAITING, 60)
    assert (first.status.identity.id, len(first.status.id)) == ("train1", 16)
    started = node.follow(watch, until_state=TRACE_STATE_OPEN)
    assert started[-1].status.targets == 2
    watch.stop()
    rest = node.follow(watch)
    assert states(rest) == [TRACE_STATE_DONE]
    assert (rest[0].status.id, rest[0].status.launches) == (first.status.id, 7)
    assert rest[0].status.start_ns == first.status.start_ns
    parts = [reply.part for reply in rest[1:]]
    assert {part.id for part in parts} == {first.status.id}
    trace = trace_of(parts)
    assert (trace.node.name, trace.status.identity.cgroup, trace.status.rule) == ("n1", "/job1", "")
    settings = process.WindowSettings.loads(trace.status.reason)
    assert (settings.slot, settings.cgroup, settings.hierarchy, settings.stacks) == (
        5,
        "/job1",
        "unified",
        True,
    )
    assert (settings.seconds, settings.cost_share, settings.start_ns) == (60, 0.5, first.status.start_ns)
    assert (settings.over_cost, settings.max_events) == ("cycle", 200_000)
    assert watch.replies() == []


def test_who_asks_may_let_it_cost_their_own_job_more_and_no_other(make: Make) -> None:
    node = make(tracing__cost_share=0.005)
    watch = node.open(seconds=60, cost_share=0.5)
    watch.stop()
    trace = trace_of([reply.part for reply in node.follow(watch) if reply.HasField("part")])
    settings = process.WindowSettings.loads(trace.status.reason)
    assert (settings.cost_share, settings.foreign_share) == (0.5, 0.005)


def test_a_window_ends_by_itself(make: Make) -> None:
    node = make()
    replies = node.follow(node.open(seconds=0.1))
    assert TRACE_STATE_DONE in states(replies)
    assert replies[-1].HasField("part")
    node.turn(lambda: not node.pids())


@pytest.mark.parametrize("shown", ["run/train9", "run/train2"])
def test_what_is_not_the_users_is_not_there(make: Make, shown: str) -> None:
    node = make()
    node.jobs.append(job(2))
    node.jobs[1].identity.uid = 1001
    watch = node.open(shown, uid=1000)
    replies = node.follow(watch)
    assert states(replies) == [TRACE_STATE_NO_TARGETS]
    assert (replies[0].node, replies[0].status.identity.id) == ("n1", shown[4:])
    assert not replies[0].status.identity.HasField("uid")
    assert node.pids() == []
    assert list(node.tick().traces) == []  # the controller has not asked
    watch.stop()
    watch.close()
    assert states(node.follow(node.open(uid=1000, seconds=0.1)))[-1] == TRACE_STATE_DONE


def test_a_job_without_a_slot_or_a_key_that_is_none_cannot_be_traced(make: Make) -> None:
    node = make()
    node.jobs[0].slot = None
    (reply,) = node.follow(node.open())
    assert (reply.status.state, "slot" in reply.status.reason) == (TRACE_STATE_FAILED, True)
    with pytest.raises(ConfigError):
        node.open("train")


def test_of_windows_that_were_shortened_it_is_said_in_every_status(make: Make) -> None:
    node = make(tracing__max_window_s=1.0, tracing__window_s=1.0)
    replies = node.follow(node.open(seconds=9))
    assert {reply.status.seconds for reply in replies if reply.HasField("status")} == {1.0}
    assert all(
        reply.status.reason.startswith("shortened to 1 s") for reply in replies if reply.HasField("status")
    )


def test_two_jobs_at_once_and_one_window_each(make: Make) -> None:
    node = make()
    node.jobs.append(job(2))
    one, two = node.open(seconds=60), node.open("run/train2", seconds=60)
    (second,) = node.follow(node.open(seconds=60))
    assert second.status.state == TRACE_STATE_BUDGET
    (first,) = one.replies()[:1]
    assert second.status.reason.startswith(f"window {first.status.id} of the job is open already, until ")
    node.follow(one, until_state=TRACE_STATE_OPEN)
    node.follow(two, until_state=TRACE_STATE_OPEN)
    one.stop()
    trace = trace_of([reply.part for reply in node.follow(one) if reply.HasField("part")])
    assert trace.status.identity.id == "train1"
    assert not two.over
    two.stop()
    trace = trace_of([reply.part for reply in node.follow(two) if reply.HasField("part")])
    assert trace.status.identity.id == "train2"
    assert states(node.follow(node.open(seconds=0.1)))[-1] == TRACE_STATE_DONE


def test_a_node_has_only_so_many_windows_at_a_time(make: Make) -> None:
    node = make()
    node.jobs = [job(number) for number in range(1, MOST_WINDOWS + 2)]
    watches = [node.open(f"run/train{number}", seconds=60) for number in range(1, MOST_WINDOWS + 1)]
    last = f"run/train{MOST_WINDOWS + 1}"
    (refused,) = node.follow(node.open(last))
    assert (refused.status.state, "4 windows" in refused.status.reason) == (TRACE_STATE_BUDGET, True)
    watches[0].close()
    node.turn(lambda: len(node.pids()) < MOST_WINDOWS)
    assert states(node.follow(node.open(last, seconds=0.1)))[-1] == TRACE_STATE_DONE


def test_when_the_client_is_gone_the_window_ends(make: Make) -> None:
    node = make()
    watch = node.open(seconds=60)
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    watch.close()
    reports = node.reports_until(lambda said, parts: parts and said[-1].state == TRACE_STATE_DONE)
    assert trace_of(parts_of(reports)).node.name == "n1"
    assert watch.replies() == []
    node.turn(lambda: not node.pids())


def test_a_slow_client_gets_the_newest_status_and_holds_no_more_than_its_part(make: Make) -> None:
    node = make("large6", controller__address="")
    watch = node.open(seconds=0.1)
    node.turn(lambda: node.source._windows and node.source._windows[0].paused)
    node.late = PATIENCE_S + 10
    for _ in range(3):
        node.tick()
        node.source.ready()
    held = node.source._windows[0].untaken
    assert traces.MOST_HELD <= held <= traces.MOST_HELD + 3 * (1 << 20)
    found: list[TraceReply] = []
    node.turn(lambda: found.extend(watch.replies()) or watch.over, ticks=False)
    assert states(found) == [TRACE_STATE_DONE]
    assert len(trace_of([reply.part for reply in found[1:]]).functions[0]) == 2 * (6 << 20)


# ---- what the controller wants


def test_a_command_shows_in_the_reports_with_its_trace(make: Make) -> None:
    node = make()
    node.command(seconds=0.3, rule="slow", evidence=[Evidence(name="busy", value=0.25), Evidence(text="x")])
    reports = node.reports_until(lambda said, parts: parts)
    said = statuses_of(reports)
    assert (said[0].state, said[0].rule, said[0].identity.id) == (TRACE_STATE_WAITING, "slow", "train1")
    assert [status.state for status in said].count(TRACE_STATE_DONE) == 1
    assert {status.id for status in said} | {part.id for part in parts_of(reports)} == {ID}
    trace = trace_of(parts_of(reports))
    assert (trace.status.rule, trace.evidence[0].value, trace.evidence[1].text) == ("slow", 0.25, "x")
    assert not trace.evidence[1].HasField("value")
    assert list(node.tick().traces) == []


def test_one_that_waits_or_is_open_is_in_every_report(make: Make) -> None:
    node = make()
    node.command(seconds=60)
    node.reports_until(lambda said, parts: said[-1].state == TRACE_STATE_OPEN)
    for _ in range(3):
        assert [status.state for status in node.tick().traces] == [TRACE_STATE_OPEN]


@pytest.mark.parametrize(
    ("fields", "state", "words"),
    [
        ({"key": "run/other"}, TRACE_STATE_NO_TARGETS, "no job run/other is on this node"),
        ({"key": "nonsense"}, TRACE_STATE_FAILED, "is not a job's key"),
        ({"id": "no id\x1b"}, TRACE_STATE_FAILED, "16 hexadecimal digits"),
        ({"start_ns": 2**62}, TRACE_STATE_FAILED, "clocks"),
        ({"run": 7}, TRACE_STATE_NO_TARGETS, "no job"),
    ],
)
def test_a_command_that_cannot_be_is_answered_once(
    make: Make, fields: dict[str, Any], state: int, words: str
) -> None:
    node = make()
    node.command(**fields)
    (status,) = node.tick().traces
    assert (status.state, words in status.reason) == (state, True)
    assert status.id.isprintable()
    assert list(node.tick().traces) == []
    assert node.pids() == []


def test_no_command_opens_a_window_where_that_is_switched_off(make: Make) -> None:
    node = make(tracing__commands=False)
    node.command()
    (status,) = node.tick().traces
    assert (status.state, status.id) == (TRACE_STATE_FAILED, ID)
    assert "tracing.commands" in status.reason
    assert states(node.follow(node.open(seconds=0.1)))[-1] == TRACE_STATE_DONE


def test_a_command_that_comes_twice_opens_one_window(make: Make) -> None:
    node = make()
    node.command(seconds=0.1)
    node.command(seconds=0.1)
    reports = node.reports_until(lambda said, parts: parts)
    node.command(seconds=0.1)
    assert list(node.tick().traces) == []
    assert {status.state for status in statuses_of(reports)} <= {
        TRACE_STATE_WAITING,
        TRACE_STATE_OPEN,
        TRACE_STATE_DONE,
    }


def test_commands_that_are_refused_do_not_pile_up(make: Make) -> None:
    node = make()
    for number in range(1000):
        node.command("run/other", id=f"{number:016x}")
    assert len(node.tick().traces) == 64
    assert len(node.source._known) == 256


def test_a_large_trace_goes_into_several_reports(make: Make) -> None:
    node = make("large5")
    node.command(seconds=0.1)
    window = node.source._windows[0]
    node.turn(lambda: window.paused or window.over, ticks=False)
    assert not window.over
    assert window.held <= traces.MOST_HELD + (3 << 20)
    reports = node.reports_until(lambda said, parts: parts and parts[-1].index == parts[-1].parts - 1)
    sizes = [sum(len(part.data) for part in report.trace_parts) for report in reports]
    assert max(sizes) <= REPORT_BYTES
    assert sum(size > 0 for size in sizes) >= 5
    assert len(trace_of(parts_of(reports)).functions[0]) == 2 * (5 << 20)


def test_parts_wait_for_the_controller(make: Make) -> None:
    node = make("large3")
    node.ships = False
    node.command(seconds=0.1)
    reports = node.reports_until(lambda said, parts: node.source._windows[0].over)
    assert parts_of(reports) == []
    node.turn(lambda: not node.pids())  # its process need not wait
    node.ships = True
    reports = node.reports_until(lambda said, parts: parts and parts[-1].index == parts[-1].parts - 1)
    assert len(trace_of(parts_of(reports)).functions[0]) == 2 * (3 << 20)


def test_when_the_controller_is_away_for_too_much_a_trace_is_dropped_and_that_is_said(make: Make) -> None:
    node = make("large12")
    node.ships = False
    node.command(seconds=0.1)
    reports = node.reports_until(lambda said, parts: said and "dropped" in said[-1].reason)
    last = statuses_of(reports)[-1]
    assert (last.state, last.id) == (TRACE_STATE_DONE, ID)
    assert ID in node.source.unavailable["parts"]
    node.turn(lambda: not node.source._windows and not node.pids())
    node.ships = True
    assert list(node.tick().trace_parts) == []


def test_without_a_controller_no_parts_are_kept(make: Make) -> None:
    node = make(controller__address="")
    replies = node.follow(node.open(seconds=0.1))
    assert replies[-1].HasField("part")
    assert list(node.tick().trace_parts) == []
    assert node.source._windows == []


# ---- budget


def test_the_runs_share_holds_over_several_windows_of_a_job(make: Make) -> None:
    node = make(tracing__run_share=0.5)
    node.jobs[0].pids = None  # of unknown age: first seen with the first report
    (refused,) = node.follow(node.open(run_share=0.5, seconds=5))
    assert (refused.status.state, "possible in 1 s" in refused.status.reason) == (TRACE_STATE_BUDGET, True)
    node.tick()
    node.source._since[node.jobs[0]] -= 4.0
    watch = node.open(run_share=0.5, seconds=60)
    (first,) = watch.replies()
    assert 4.0 <= first.status.seconds < 4.5
    assert first.status.reason.startswith("shortened to 4.")
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    until = time.monotonic() + 0.4
    node.turn(lambda: time.monotonic() > until)
    watch.stop()
    node.follow(watch)
    used = node.source._traced[node.jobs[0]].seconds
    assert 0.3 < used < 2
    (again,) = [node.open(run_share=0.5, seconds=60).replies()[0]]
    age = time.monotonic() - node.source._since[node.jobs[0]]
    assert again.status.seconds == pytest.approx((0.5 * age - used) / 0.5, abs=0.2)


def test_the_oldest_process_tells_how_long_a_job_has_run(make: Make) -> None:
    node = make()
    node.tick()
    ages = [node.source._age_s(node.jobs[0], time.monotonic())]
    node.jobs[0].pids = frozenset((os.getpid(), 1, 2**30))
    ages.append(node.source._age_s(node.jobs[0], time.monotonic()))
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    own = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    assert ages[0] == pytest.approx(own, abs=0.5)
    assert ages[1] > ages[0]


def test_a_rule_pauses_and_a_persons_window_counts_too(make: Make) -> None:
    node = make()
    node.follow(node.open(seconds=0.1))
    node.command(rule="slow", seconds=0.1)
    (status,) = node.tick().traces
    assert (status.state, "tracing.pause_s" in status.reason) == (TRACE_STATE_BUDGET, True)
    assert states(node.follow(node.open(seconds=0.1)))[-1] == TRACE_STATE_DONE


def test_what_is_known_of_jobs_goes_with_them(make: Make) -> None:
    node = make()
    node.follow(node.open(seconds=0.1))
    assert len(node.source._traced) == len(node.source._since) == 1
    node.overflow[:], node.jobs = node.jobs, []
    node.tick()
    assert len(node.source._traced) == len(node.source._since) == 1
    node.overflow[0].state = JOB_STATE_ENDED
    node.tick()
    assert (node.source._traced, node.source._since) == ({}, {})


def test_a_window_ends_with_its_job(make: Make) -> None:
    node = make()
    watch = node.open(seconds=60)
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    node.jobs[0].state = JOB_STATE_ENDED
    assert states(node.follow(watch)) == [TRACE_STATE_DONE]


# ---- counters


def test_the_windows_get_the_jobs_figures_tick_by_tick(make: Make) -> None:
    node = make()
    watch = node.open(seconds=60)
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    cpu_ns = 10**12
    stamps = []

    def fill(report: Report) -> None:
        stamps.append(report.time_ns)
        report.gpus.extend(
            [
                GpuSample(uuid="GPU-a", index=3, utilization=0.75),
                GpuSample(uuid="GPU-b", index=4, utilization=0.5),
                GpuSample(uuid="GPU-c", index=5),
            ]
        )
        report.jobs[0].cpu_ns = cpu_ns
        report.jobs[0].gpu.holds.extend(GpuHold(uuid=uuid) for uuid in ("GPU-a", "GPU-c", "GPU-z"))

    for late in (0.0, 1000.0, 2000.0):
        node.source._windows[0]._deadline += 1000
        node.late = late
        node.tick(fill)
        cpu_ns += 2 * 1000 * 10**9
    node.late = 0
    watch.stop()
    trace = trace_of([reply.part for reply in node.follow(watch) if reply.HasField("part")])
    figures: dict[tuple[str, str], list[float]] = {}
    for counter in trace.counters:
        figures.setdefault((counter.name, counter.unit), []).extend(counter.value)
    assert figures["GPU 3 utilisation", "%"] == [75, 75, 75]
    assert figures["CPU cores", "cores"] == pytest.approx([2, 2], rel=0.01)
    assert len(figures) == 2
    assert {stamp for counter in trace.counters for stamp in counter.time_ns} == set(stamps)


# ---- processes that do as they like


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("dies", "the window's process ended with signal 9"),
        ("absent", "the window's process ended with status 3: no such module"),
        ("length", "has announced a message of 4294967295 bytes"),
        ("bytes", "no TraceReply"),
        ("half", "its trace is not whole"),
        ("bare", "its trace is not whole"),
        ("wrong", "does not fit together"),
    ],
)
def test_a_process_that_goes_wrong_fails_its_window_with_the_reason(make: Make, how: str, words: str) -> None:
    node = make(how)
    watch = node.open(seconds=0.1)
    replies = node.follow(watch)
    assert replies[-1].status.state == TRACE_STATE_FAILED
    assert words in replies[-1].status.reason
    node.turn(lambda: not node.pids())
    assert list(node.tick().trace_parts) == []
    assert states(node.follow(node.open(seconds=0.1)))[-1] == TRACE_STATE_FAILED


def test_a_killed_window_fails_and_the_others_go_on(make: Make) -> None:
    node = make()
    node.jobs.append(job(2))
    one, two = node.open(seconds=60), node.open("run/train2", seconds=60)
    node.follow(one, until_state=TRACE_STATE_OPEN)
    node.follow(two, until_state=TRACE_STATE_OPEN)
    os.kill(node.pids()[0], signal.SIGKILL)
    (failed,) = node.follow(one)
    assert (failed.status.state, failed.status.reason) == (
        TRACE_STATE_FAILED,
        "the window's process ended with signal 9",
    )
    two.stop()
    assert states(node.follow(two)) == [TRACE_STATE_DONE]


def test_one_that_hangs_is_killed_some_time_after_its_windows_length(make: Make) -> None:
    node = make("hangs")
    watch = node.open(seconds=5)
    replies = node.follow(watch, until_state=TRACE_STATE_OPEN)
    node.late = 5 + PATIENCE_S - 3
    node.tick()
    assert not any(state > TRACE_STATE_OPEN for state in states(watch.replies()))
    node.late += 4
    replies = node.follow(watch)
    assert replies[-1].status.state == TRACE_STATE_FAILED
    assert "30 s after it was to end" in replies[-1].status.reason
    node.turn(lambda: not node.pids())


def test_one_that_does_not_stop_when_told_is_killed(make: Make) -> None:
    node = make("hangs")
    watch = node.open(seconds=100)
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    watch.stop()
    node.late = process.KILL_S + 1
    replies = node.follow(watch)
    assert "did not end within 30 s" in replies[-1].status.reason
    node.turn(lambda: not node.pids())


def test_no_targets_is_said_without_a_trace(make: Make) -> None:
    replies = (node := make("no_targets")).follow(node.open())
    assert states(replies)[-1] == TRACE_STATE_NO_TARGETS
    assert replies[-1].status.reason == "nobody is there"
    assert not any(reply.HasField("part") for reply in replies)


def test_what_a_process_says_of_itself_is_bounded(make: Make) -> None:
    node = make("lies")
    status = node.follow(node.open())[-1].status
    assert (status.state, len(status.reason)) == (TRACE_STATE_FAILED, 600)
    assert status.reason.isprintable()
    assert (status.traced_share, status.cost_share) == (0, 0)


def test_without_a_process_the_window_fails(make: Make, tmp_path: Path) -> None:
    node = make()
    node.source._command = (str(tmp_path / "none"),)
    (reply,) = node.follow(node.open())
    assert reply.status.reason == "the window's process cannot be begun: No such file or directory"


# ---- what it costs, and its end


def test_the_processes_cost_is_the_sources(make: Make) -> None:
    node = make()
    watch = node.open(seconds=60)
    node.follow(watch, until_state=TRACE_STATE_OPEN)
    running = node.source.cpu_ns
    assert running > 1_000_000
    assert node.source.pss_bytes > 1 << 20
    watch.stop()
    seen = [running]
    node.turn(lambda: seen.append(node.source.cpu_ns) or (watch.replies(), not node.pids())[1])
    assert seen == sorted(seen)
    assert node.source.pss_bytes == 0
    assert node.source.cpu_ns >= running


@pytest.mark.parametrize("how", ["trace", "hangs"])
def test_with_the_source_all_windows_end(make: Make, how: str) -> None:
    node = make(how)
    node.jobs.append(job(2))
    watches = [node.open(seconds=60), node.open("run/train2", seconds=60)]
    for watch in watches:
        node.follow(watch, until_state=TRACE_STATE_OPEN)
    pids = node.pids()
    node.source.stop()
    assert not any(map(alive, pids))
    for watch in watches:
        replies = watch.replies()
        assert watch.over
        assert replies[-1].status.state == TRACE_STATE_FAILED
        assert "the agent has stopped" in replies[-1].status.reason
        watch.close()
    assert node.source.fd == -1
    node.source.stop()
    (refused,) = node.follow(node.open())
    assert (refused.status.state, "at the moment" in refused.status.reason) == (TRACE_STATE_FAILED, True)
    node.source.start()
    assert states(node.follow(node.open(seconds=60), until_state=TRACE_STATE_OPEN))[-1] == TRACE_STATE_OPEN
