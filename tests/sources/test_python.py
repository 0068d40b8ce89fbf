"""Source "python" with a sampler that says what a test tells it to."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from expanse_ebpf.config import Config, load
from expanse_ebpf.errors import ConfigError, UnavailableError, UnknownJobError
from expanse_ebpf.export import pprof
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.python_stacks.interpreter import Reason, Refusal
from expanse_ebpf.python_stacks.sampler import Count, Frame, Stack
from expanse_ebpf.sources import Attentive, Context, python, python_watch
from expanse_ebpf.sources.python import Choice, PythonSource
from expanse_ebpf.sources.python_watch import ProcessTree, lives, status
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_RUNNING,
    JobIdentity,
    Report,
    WatchProfileRequest,
)
from tests.sources.made_up_sampler import PERIOD_NS, MadeUpSampler, install, running, unresolved, waiting

MINUTE = 60 * 10**9


def job(number: int = 1, slot: int | None = 5, **fields: Any) -> Job:
    identity = JobIdentity(scheduler="slurm", id=str(number), run=number, user="ada", uid=1000)
    for name, value in fields.items():
        setattr(identity, name, value)
    made = Job(identity)
    made.slot, made.state = slot, JOB_STATE_RUNNING
    return made


class Node:
    """A source, its jobs, and the reports that it has filled in."""

    def __init__(self, samplers: type[MadeUpSampler], overrides: dict[str, Any]) -> None:
        self.ships = True
        self.overflow: list[Job] = []
        config = load(None, {}, {"controller.address": "localhost:1", **overrides})
        lifecycle: Any = object()
        self.source = PythonSource(
            Context(config, lifecycle, overflow=self.overflow, ships=lambda: self.ships)
        )
        self.source.start()
        self.sampler = samplers.made[-1]
        self.jobs: list[Job] = []
        self.now, self.time_ns = self.source._before, 29_000_000 * MINUTE

    def tick(self, *counts: Any, seconds: float = 1.0) -> Report:
        """One report, so many seconds after the last, with these counts."""
        self.now += seconds
        self.time_ns += round(seconds * 1e9)
        self.sampler.counts += counts
        report = Report(time_ns=self.time_ns)
        samples = [(one, report.jobs.add(state=one.state)) for one in self.jobs]
        self.source.sample(self.now, samples, report)
        return report


def names_of(packed: bytes) -> dict[str, tuple[int, ...]]:
    """Leaf function to values."""
    return {s.frames[0].name: s.values for s in pprof.Reader(pprof.loads(packed)).stacks()}


@pytest.fixture
def samplers(monkeypatch: pytest.MonkeyPatch) -> type[MadeUpSampler]:
    return install(monkeypatch)


@pytest.fixture
def node(samplers: type[MadeUpSampler], monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    monkeypatch.setattr(python, "PACK_S", 60.0)  # however slow the machine is
    made = Node(samplers, {})
    made.jobs.append(job())
    yield made
    made.source.stop()


# ---- life


def test_without_bpf_it_cannot_start_and_says_why() -> None:
    source = PythonSource(Context(Config(), None, "CAP_BPF is missing"))
    with pytest.raises(UnavailableError, match="CAP_BPF is missing"):
        source.start()
    source.stop()


def test_it_starts_with_the_configured_rates_and_stops_twice(samplers: type[MadeUpSampler]) -> None:
    made = Node(samplers, {"python.rate_hz": 99, "python.waits_hz": 5})
    assert (made.sampler.rate_hz, made.sampler.waits_hz) == (99, 5)
    assert isinstance(made.source, Attentive)
    assert (made.source.fd, made.source.period_s) == (made.sampler.fd, 0.2)
    made.source.beat()
    made.sampler.wake()
    made.source.ready()
    assert (made.sampler.visits, made.sampler.consumed) == (1, 1)
    made.source.stop()
    made.source.stop()
    assert made.sampler.closed
    made.source.beat()
    made.source.ready()
    made.tick()


@pytest.mark.parametrize("waits_hz", [0, 4])
def test_nobody_is_visited_where_that_is_off_or_cannot_be(
    samplers: type[MadeUpSampler], monkeypatch: pytest.MonkeyPatch, waits_hz: int
) -> None:
    class Old(samplers):  # type: ignore[misc, valid-type]
        def __init__(self, **arguments: Any) -> None:
            super().__init__(**arguments)
            self.unavailable["waiting"] = "needs kernel 5.18"

    if waits_hz:
        monkeypatch.setattr(sys.modules["expanse_ebpf.python_stacks.sampler"], "Sampler", Old)
    made = Node(samplers, {"python.waits_hz": waits_hz})
    assert made.source.period_s == 0
    assert made.source.unavailable == ({"waiting": "needs kernel 5.18"} if waits_hz else {})
    made.source.stop()


class Program:
    """Of BPF; what it has cost while the kernel measured."""

    def __init__(self) -> None:
        self.cost = (700, 7)

    def statistics(self) -> tuple[int, int]:
        return self.cost


def test_its_programs_cost_stands_beside_that_of_the_others(node: Node) -> None:
    """While the source "cpu", which is asked first, has the kernel measure."""
    program = Program()
    node.sampler.programs = {"python_sample": program}

    def report(measured_ns: int | None, *cost: int) -> list[tuple[str, int, int, int]]:
        program.cost = (cost[0], cost[1])
        made = Report(time_ns=node.time_ns)
        if measured_ns is not None:
            made.collector.programs.add(name="on_switch", run_ns=1, runs=1, measured_ns=measured_ns)
        node.source.sample(node.now, [], made)
        found = made.collector.programs[0 if measured_ns is None else 1 :]
        return [(p.name, p.run_ns, p.runs, p.measured_ns) for p in found]

    assert report(None, 700, 7) == []
    assert report(1000, 900, 9) == [("python_sample", 200, 2, 1000)]
    assert report(1000, 950, 10) == [("python_sample", 200, 2, 1000)]  # not measured any more
    assert report(3000, 1700, 17) == [("python_sample", 1000, 10, 3000)]
    assert report(None, 1700, 17) == []  # the source "cpu" is down
    # Newly loaded ones begin anew, and are not charged for the time before.
    node.source.stop()
    node.source.start()
    node.sampler = node.source._sampler  # type: ignore[assignment]
    node.sampler.programs = {"python_sample": program}
    assert report(5000, 40, 4) == []
    assert report(6000, 50, 5) == [("python_sample", 10, 1, 1000)]


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        ("train", True),
        ("slurm", True),
        ("run/train", False),
        ("*train", False),
        ("run?x", False),
        ("[rs]un", False),
    ],
)
def test_a_pattern_that_can_match_no_job_is_told_at_the_start(
    samplers: type[MadeUpSampler], caplog: pytest.LogCaptureFixture, pattern: str, warned: bool
) -> None:
    made = Node(samplers, {"python.jobs": pattern})
    made.source.stop()
    assert (f"python.jobs: '{pattern}' can match no job" in caplog.text) is warned


# ---- figures


def test_counters_rise_and_unresolved_ones_stand_beside(node: Node) -> None:
    first = node.tick(running("f:3", samples=5), unresolved("changed", 2), unresolved("lost", 3))
    assert (first.jobs[0].python.samples, first.jobs[0].python.lost) == (10, 3)
    assert dict(first.jobs[0].python.unresolved) == {"changed": 2}
    second = node.tick(running("f:3", samples=1), waiting("g:4", visits=4), unresolved("changed", 1))
    assert (second.jobs[0].python.samples, dict(second.jobs[0].python.unresolved)) == (12, {"changed": 3})
    assert "python" not in second.jobs[0].unavailable


def test_a_job_without_samples_has_none_and_that_is_known(node: Node) -> None:
    sample = node.tick().jobs[0]
    assert sample.python.HasField("samples")
    assert (sample.python.samples, sample.python.hottest_function) == (0, "")
    assert not sample.unavailable


def test_the_hottest_lines_of_both_kinds(node: Node) -> None:
    report = node.tick(
        running("Trainer.step:88", "main:9", samples=3),
        running("collate:12", "main:9", samples=1),
        waiting("Queue.get:171", visits=3),
        waiting("wait:3", visits=1),
    )
    p = report.jobs[0].python
    assert (p.hottest_function, p.hottest_file, p.hottest_line) == ("Trainer.step", "/srv/train.py", 88)
    assert (p.waiting_function, p.waiting_file, p.waiting_line) == ("Queue.get", "/srv/train.py", 171)
    assert (p.hottest_share, p.waiting_share) == (0.75, 0.75)


def test_names_that_a_job_has_thought_of_do_no_harm(node: Node) -> None:
    name = "f\ud800\x1b[2J" + "x" * 5000
    p = node.tick(running(f"{name}:1")).jobs[0].python
    assert len(p.hottest_function) <= 256
    assert p.hottest_function.isprintable()


@pytest.mark.parametrize(
    ("reason", "words"),
    [("not_python", "not Python"), ("opted_out", "opted out"), ("unsupported", "unsupported")],
)
def test_a_job_of_which_nothing_is_resolved_says_why(node: Node, reason: str, words: str) -> None:
    sample = node.tick(unresolved(reason, 9), unresolved("starting", 1)).jobs[0]
    assert words in sample.unavailable["python"]
    assert sample.python.samples == 10
    assert "python" not in node.tick(running("f:1")).jobs[0].unavailable


def test_counts_go_to_the_job_of_their_slot(node: Node) -> None:
    node.jobs.append(job(2, slot=6))
    report = node.tick(running("f:1", samples=2), running("g:1", slot=6, samples=3))
    assert [j.python.samples for j in report.jobs] == [2, 3]
    assert [j.python.hottest_function for j in report.jobs] == ["f", "g"]


def test_counts_of_a_job_that_is_told_of_a_tick_later_are_not_lost(node: Node) -> None:
    node.tick(running("f:1", slot=9, samples=7))
    node.jobs.append(job(2, slot=9))
    assert node.tick(running("f:1", slot=9)).jobs[1].python.samples == 8


def test_counts_of_a_slot_that_no_job_claims_are_let_go(node: Node) -> None:
    for _ in range(5):
        node.tick(running("f:1", slot=9))
    assert len(node.source._unclaimed) == 1
    node.jobs.append(job(2, slot=9))
    assert node.tick().jobs[1].python.samples == 1


def test_what_was_lost_so_far_that_nobody_knows_whose_it_is_is_said(node: Node) -> None:
    node.tick(unresolved("lost", 3, slot=0))
    node.tick(unresolved("lost", 4, slot=0))
    assert not node.source.unavailable.get("lost", "").startswith("7")
    node.tick()
    assert node.source.unavailable["lost"].startswith("7 samples")


def test_a_slot_that_is_given_out_again_starts_at_0(node: Node) -> None:
    node.tick(running("f:1", samples=5))
    node.jobs[0].state = JOB_STATE_ENDED
    assert node.tick(running("f:1")).jobs[0].python.samples == 6
    node.jobs[:] = [job(2)]
    assert node.tick(running("g:1")).jobs[0].python.samples == 1
    assert set(node.source._stacks) == {node.jobs[0]}


# ---- which jobs


def test_everything_but_what_is_no_jobs_is_selected_by_default(node: Node) -> None:
    node.tick()
    node.tick()
    assert node.sampler.selections == [(True, {0: False, 1: False})]


def test_jobs_past_the_limit_and_without_a_slot_are_not_sampled(node: Node) -> None:
    node.jobs.append(job(2, slot=None))
    node.overflow.append(job(3, slot=8))
    report = node.tick()
    assert node.sampler.selections[-1] == (True, {0: False, 1: False, 8: False})
    assert report.jobs[1].unavailable["python"] == "no accounting slot was free"
    assert not report.jobs[1].HasField("python")


def test_selection_changes_with_the_jobs_and_only_then(samplers: type[MadeUpSampler]) -> None:
    made = Node(samplers, {"python.jobs": "slurm/2*"})
    made.jobs += [job(1, slot=5), job(23, slot=6)]
    report = made.tick()
    made.tick()
    assert made.sampler.selections == [(False, {}), (False, {6: True})]
    assert report.jobs[0].unavailable["python"] == "left out by the setting python.jobs"
    assert not report.jobs[0].HasField("python")
    assert report.jobs[1].HasField("python")
    made.jobs.pop()
    made.tick()
    assert made.sampler.selections[-1] == (False, {})
    made.source.stop()


@pytest.mark.parametrize(
    ("settings", "identity", "against"),
    [
        ({}, {}, ""),
        ({"jobs": "slurm/1"}, {}, ""),
        ({"jobs": "run/*"}, {}, "python.jobs"),
        ({"jobs": "run/*,slurm/5_*"}, {"id": "7", "array": "5_2"}, ""),
        ({"jobs": ""}, {}, "python.jobs"),
        ({"users": "a*,bob"}, {}, ""),
        ({"users": "1000"}, {"user": ""}, ""),
        ({"users": "bob"}, {}, "python.users"),
        ({"users": "ada", "jobs": "run/*"}, {}, "python.jobs"),
        ({"namespaces": "ml-*"}, {}, "python.namespaces"),
        ({"namespaces": "ml-*"}, {"scheduler": "kubernetes", "id": "ml-a/pod"}, ""),
        ({"namespaces": "ml-a"}, {"scheduler": "kubernetes", "id": "ml-a/pod"}, ""),
        ({"namespaces": "ml-*"}, {"scheduler": "kubernetes", "id": "web/ml-a"}, "python.namespaces"),
        ({"namespaces": "*"}, {"scheduler": "kubernetes", "id": "0a1b"}, "python.namespaces"),
    ],
)
def test_what_the_settings_choose(settings: dict[str, str], identity: dict[str, Any], against: str) -> None:
    config = load(None, {}, {f"python.{name}": value for name, value in settings.items()})
    said = Choice(config.python).against(job(1, **identity).identity)
    assert said == (f"left out by the setting {against}" if against else "")


# ---- a profile for each job and minute


def test_a_profile_goes_out_when_the_minute_turns(node: Node) -> None:
    for _ in range(59):
        assert not node.tick(running("f:1")).profiles
    report = node.tick(waiting("g:2"))
    assert report.time_ns % MINUTE == 0
    (profile,) = report.profiles
    assert profile.identity == node.jobs[0].identity
    assert profile.to_ns == report.time_ns
    assert profile.to_ns - profile.from_ns == MINUTE
    assert names_of(profile.pprof) == {
        "f": (59, 59 * PERIOD_NS, 0),
        "g": (1, 0, 250_000_000),
    }
    packed = pprof.loads(profile.pprof)
    assert (packed.time_nanos, packed.duration_nanos) == (profile.from_ns, MINUTE)
    (labels,) = {(s.labels["job"], s.labels["user"]) for s in pprof.Reader(packed).stacks()}
    assert labels == ("slurm/1", "ada")


def test_the_next_minute_begins_where_the_last_ended(node: Node) -> None:
    profiles = [p for _ in range(180) for p in node.tick(running("f:1")).profiles]
    assert len(profiles) == 3
    for earlier, later in pairwise(profiles):
        assert later.from_ns == pytest.approx(earlier.to_ns, abs=1000)  # of 1e18
    assert [names_of(p.pprof)["f"][0] for p in profiles] == [60, 60, 60]


def test_a_job_that_ends_sends_what_it_has_at_once(node: Node) -> None:
    node.tick(running("f:1"))
    node.jobs[0].state = JOB_STATE_ENDED
    (profile,) = node.tick(running("f:1")).profiles
    assert names_of(profile.pprof)["f"][0] == 2
    node.jobs.clear()
    assert not [p for _ in range(130) for p in node.tick().profiles]


def test_a_job_of_which_nothing_is_python_sends_nothing(node: Node) -> None:
    assert not [p for _ in range(130) for p in node.tick(unresolved("not_python")).profiles]
    assert not [p for _ in range(130) for p in node.tick().profiles]
    sent = [p for _ in range(61) for p in node.tick(unresolved("opted_out")).profiles]
    assert len(sent) == 1


def test_without_a_controller_nothing_is_kept(samplers: type[MadeUpSampler]) -> None:
    made = Node(samplers, {"controller.address": ""})
    made.jobs.append(job())
    assert not [p for _ in range(130) for p in made.tick(running("f:1")).profiles]
    (stacks,) = made.source._stacks.values()
    assert len(stacks.span) == 0
    assert made.tick(running("f:1")).jobs[0].python.samples == 131
    made.source.stop()


def test_while_the_controller_is_away_profiles_grow_longer_instead_of_more(node: Node) -> None:
    node.ships = False
    assert not [p for _ in range(150) for p in node.tick(running("f:1")).profiles]
    node.ships = True
    profiles = [p for _ in range(60) for p in node.tick(running("f:1")).profiles]
    assert [names_of(p.pprof)["f"][0] for p in profiles] == [180]
    assert profiles[0].to_ns - profiles[0].from_ns == 180 * 10**9


def test_a_profile_is_no_longer_than_the_controller_takes(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python, "LONGEST_S", 3030.0)  # not at a tick, where rounding would decide
    node.ships = False
    for _ in range(100):
        node.tick(running("f:1"), seconds=60)
    node.ships = True
    profiles = [p for _ in range(3) for p in node.tick(running("f:1"), seconds=60).profiles]
    assert [p.to_ns - p.from_ns for p in profiles][:2] == [51 * MINUTE, 51 * MINUTE]
    assert sum(names_of(p.pprof)["f"][0] for p in profiles) == 103


def test_a_job_that_came_and_went_in_one_tick_has_a_span(node: Node) -> None:
    node.tick()
    node.jobs.append(job(2, slot=6))
    node.jobs[1].state = JOB_STATE_ENDED
    (profile,) = node.tick(running("f:1", slot=6)).profiles
    assert profile.to_ns - profile.from_ns == 10**9


def test_profiles_of_jobs_that_end_meanwhile_wait_within_bounds(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python, "ALL_STACKS", 10)
    node.ships = False
    for number in range(2, 20):
        node.jobs[:] = [job(number, slot=number)]
        node.tick(running("f:1", slot=number), running("g:1", slot=number))
        node.jobs[0].state = JOB_STATE_ENDED
        node.tick()
    assert len(node.source._outgoing) == 5
    assert node.source.unavailable["profiles"].startswith("13 profiles of jobs were dropped")
    node.ships = True
    sent = [p.identity.id for _ in range(9) for p in node.tick().profiles]
    assert sent == ["15", "16", "17", "18", "19"]


def test_what_a_report_holds_is_bounded_and_the_rest_comes_with_the_next(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(python, "PACK_S", 0.0)
    node.jobs += [job(number, slot=4 + number) for number in (2, 3)]
    counts = [running("f:1", slot=slot) for slot in (5, 6, 7)]
    reports = [node.tick(*counts) for _ in range(123)]
    sent = [(i, p.identity.id) for i, report in enumerate(reports) for p in report.profiles]
    assert [i for i, _ in sent] == [59, 60, 61, 119, 120, 121]
    assert [name for _, name in sent] == ["1", "2", "3", "1", "2", "3"]
    monkeypatch.setattr(python, "PACK_S", 1e9)
    monkeypatch.setattr(python, "REPORT_BYTES", (1 << 20) + 100)  # room for one, whatever its size
    sizes = [len(node.tick(*counts).profiles) for _ in range(60)]
    assert (sum(sizes), max(sizes)) == (3, 1)


def test_a_profile_that_was_folded_says_so(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "ALL_STACKS", 4)
    monkeypatch.setattr(python, "LEAST_STACKS", 4)
    for second in range(59):
        report = node.tick(running(f"f{second}:1"))
        assert not report.jobs[0].unavailable
    report = node.tick()
    assert "folded into [over budget]" in report.jobs[0].unavailable["python"]
    found = names_of(report.profiles[0].pprof)
    assert len(found) <= 5
    assert sum(values[0] for values in found.values()) == 59


# ---- those who look


def ask(**fields: Any) -> WatchProfileRequest:
    return WatchProfileRequest(**fields)


def test_a_watcher_gets_what_comes_from_now_on(node: Node) -> None:
    node.tick(running("early:1"))
    node.sampler.counts.append(running("before:1", samples=2))
    watch = node.source.watch(ask(key="slurm/1"), None, node.jobs)
    first = watch.part()
    assert (first.rate_hz, names_of(first.pprof)) == (49, {})
    report = node.tick(running("f:1", samples=3), running("f:1", slot=6))
    assert report.jobs[0].python.samples == 6  # the others are the job's all the same
    part = watch.part()
    assert names_of(part.pprof) == {"f": (3, 3 * PERIOD_NS, 0)}
    assert not part.note
    assert pprof.loads(part.pprof).duration_nanos > 0
    node.sampler.counts.append(running("late:1"))
    assert names_of(watch.part().pprof) == {}
    assert set(names_of(watch.part(up_to_now=True).pprof)) == {"late"}
    watch.close()
    watch.close()
    node.tick(running("f:1"))
    assert names_of(watch.part().pprof) == {}


def test_a_job_that_is_left_out_is_sampled_while_somebody_looks(samplers: type[MadeUpSampler]) -> None:
    made = Node(samplers, {"python.jobs": "run/*"})
    made.jobs.append(job())
    made.tick()
    watch = made.source.watch(ask(key="slurm/1"), None, made.jobs)
    assert made.sampler.selections[-1] == (False, {5: True})
    report = made.tick(running("f:1"))
    assert set(names_of(watch.part().pprof)) == {"f"}
    assert not report.jobs[0].HasField("python")
    assert "python.jobs" in report.jobs[0].unavailable["python"]
    watch.close()
    made.tick()
    assert made.sampler.selections[-1] == (False, {})
    made.source.stop()


def test_a_job_past_the_limit_can_be_looked_at(node: Node) -> None:
    node.overflow.append(job(3, slot=8))
    node.tick()
    watch = node.source.watch(ask(key="slurm/3"), None, [*node.jobs, *node.overflow])
    assert node.sampler.selections[-1] == (True, {0: False, 1: False})
    node.tick(running("f:1", slot=8))
    assert not watch.over
    assert set(names_of(watch.part().pprof)) == {"f"}


def test_a_watch_is_over_when_its_job_has_ended(node: Node) -> None:
    watch = node.source.watch(ask(key="slurm/1"), None, node.jobs)
    node.tick()
    assert not watch.over
    node.jobs[0].state = JOB_STATE_ENDED
    node.tick(running("f:1"))
    assert watch.over == "the job has ended"
    part = watch.part()
    assert (part.note, set(names_of(part.pprof))) == ("the job has ended", {"f"})


def test_a_key_can_mean_several_jobs_and_their_labels_stay_theirs(node: Node) -> None:
    node.jobs[:] = [job(7, slot=5, array="500_1"), job(8, slot=6, array="500_2", user="bob")]
    watch = node.source.watch(ask(key="slurm/500"), None, node.jobs)
    node.tick(running("f:1", slot=5), running("f:1", slot=6))
    stacks = pprof.Reader(pprof.loads(watch.part().pprof)).stacks()
    assert {(s.labels["job"], s.labels["user"]) for s in stacks} == {("slurm/7", "ada"), ("slurm/8", "bob")}


@pytest.mark.parametrize(
    ("request_", "uid", "error", "words"),
    [
        (ask(key="slurm/2"), None, UnknownJobError, "no job slurm/2 is on this node"),
        (ask(key="slurm/1", run=4), None, UnknownJobError, "no job slurm/1 is"),
        (ask(key="slurm/1"), 1001, UnknownJobError, "no job slurm/1 of yours"),
        (ask(key="nonsense"), None, ConfigError, "not a job's key"),
        (ask(), None, ConfigError, "not a job's key"),
        (ask(pid=2**31 - 1), None, UnknownJobError, "no process 2147483647; it may have exited"),
        (ask(pid=-5), None, UnknownJobError, "no process -5"),
        (ask(pid=1), 1000, UnknownJobError, "no process 1 of yours"),
        (ask(pid=1), None, UnknownJobError, "process 1 belongs to no job"),
    ],
)
def test_what_cannot_be_looked_at_is_said_in_one_line(
    node: Node, request_: WatchProfileRequest, uid: int | None, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        node.source.watch(request_, uid, node.jobs)
    assert "\n" not in str(caught.value)
    assert not node.source._watches


def test_a_job_without_a_slot_cannot_be_looked_at(node: Node) -> None:
    with pytest.raises(UnavailableError, match="no accounting slot was free for slurm/4"):
        node.source.watch(ask(key="slurm/4"), None, [*node.jobs, job(4, slot=None)])


def test_a_user_may_look_at_their_own_job(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    uids = {100: {1000}, 101: {1000, 0}}  # 101 runs a set-uid program; 102 is gone
    monkeypatch.setattr(
        python_watch,
        "status",
        lambda pid: python_watch.Status(pid, 1, frozenset(uids[pid])) if pid in uids else None,
    )
    node.jobs[0].identity.run = 77
    watch = node.source.watch(ask(key="slurm/1", run=77), 1000, node.jobs)
    node.tick(running("f:1"), running("of_root:1", pid=101), running("of_whom:1", pid=102))
    assert set(names_of(watch.part().pprof)) == {"f"}
    uids[100] = {0}  # it has executed one since
    node.tick(running("f:1"))
    assert not names_of(watch.part().pprof)
    node.jobs[0].identity.ClearField("uid")
    with pytest.raises(UnknownJobError):
        node.source.watch(ask(key="slurm/1"), 1000, node.jobs)


def test_a_source_that_stops_ends_what_is_looked_at(node: Node) -> None:
    watch = node.source.watch(ask(key="slurm/1"), None, node.jobs)
    node.source.stop()
    assert "stopped" in watch.part(up_to_now=True).note
    with pytest.raises(UnavailableError, match="not sampled at the moment"):
        node.source.watch(ask(key="slurm/1"), None, node.jobs)


# ---- processes

FAMILY = """
import os, sys, time
child = os.fork()
if child == 0:
    grandchild = os.fork()
    if grandchild:
        print(os.getpid(), grandchild, flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.fixture
def family() -> Iterator[tuple[int, int, int]]:
    """A process, its child and its grandchild."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", FAMILY], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdout is not None
            child, grandchild = map(int, process.stdout.readline().split())
            yield process.pid, child, grandchild
        finally:
            os.killpg(process.pid, 9)


def test_a_process_is_looked_at_with_what_it_forks(node: Node, family: tuple[int, int, int]) -> None:
    parent, child, grandchild = family
    node.jobs[0].pids = frozenset([child])
    watch = node.source.watch(ask(pid=child), None, node.jobs)
    node.tick(
        *(running(f"f{i}:1", pid=pid) for i, pid in enumerate([parent, child, grandchild, 1, 2**31 - 1]))
    )
    assert set(names_of(watch.part().pprof)) == {"f1", "f2"}
    assert not watch.over


def test_a_process_of_another_job_is_not_in_the_tree(node: Node, family: tuple[int, int, int]) -> None:
    parent, child, _ = family
    node.jobs.append(job(2, slot=6))
    node.jobs[0].pids = frozenset([parent])
    watch = node.source.watch(ask(pid=parent), None, node.jobs)
    node.tick(running("mine:1", pid=child), running("other:1", pid=child, slot=6))
    assert set(names_of(watch.part().pprof)) == {"mine"}


def test_what_is_not_resolved_is_shown_where_the_job_has_no_other_process(
    node: Node, family: tuple[int, int, int]
) -> None:
    _, child, grandchild = family
    node.jobs[0].pids = frozenset([child, grandchild])
    whole, part = (node.source.watch(ask(pid=pid), None, node.jobs) for pid in (child, grandchild))
    node.tick(unresolved("changed", 3, pid=0))
    assert names_of(whole.part().pprof)["[changed while read]"][0] == 3
    assert names_of(part.part().pprof) == {}


def test_why_a_process_has_no_stacks_is_told_with_the_parts(node: Node, family: tuple[int, int, int]) -> None:
    node.jobs[0].pids = frozenset([family[0]])
    watch = node.source.watch(ask(pid=family[0]), None, node.jobs)
    node.sampler.refusals[family[0]] = Refusal(Reason.UNSUPPORTED, "Python 3.7")
    node.tick()
    assert watch.part().note == "unsupported interpreter: Python 3.7"
    node.sampler.refusals[family[0]] = Refusal(Reason.EXITED, "it has exited")
    node.tick()
    assert watch.part().note == ""


def test_a_process_lives_as_long_as_one_of_its_threads(tmp_path: Any) -> None:
    def process(pid: int, state: str, *threads: int) -> None:
        (tmp_path / str(pid) / "task").mkdir(parents=True)
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a) Z (b) {state} 1 2 3")
        for thread in threads:
            (tmp_path / str(pid) / "task" / str(thread)).mkdir()

    process(1, "S", 1)
    process(2, "Z", 2)
    process(3, "Z", 3, 4)
    assert [lives(pid, str(tmp_path)) for pid in (1, 2, 3, 4)] == [True, False, True, False]


def test_a_watch_is_over_when_its_processes_are_gone(node: Node) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        node.jobs[0].pids = frozenset([process.pid])
        watch = node.source.watch(ask(pid=process.pid), None, node.jobs)
        node.tick()
        assert not watch.over
        process.kill()
    node.tick(running("f:1", pid=process.pid))
    part = watch.part()
    assert (part.note, set(names_of(part.pprof))) == ("the process has ended", {"f"})


def test_another_users_process_is_not_in_a_users_tree(tmp_path: Any) -> None:
    def process(pid: int, parent: int, uids: str) -> None:
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "status").write_text(
            f"Name:\tx\nTgid:\t{pid}\nPPid:\t{parent}\nUid:\t{uids}\n"
        )

    process(10, 1, "1000\t1000\t1000\t1000")
    process(11, 10, "1000\t1000\t1000\t1000")
    process(12, 10, "1000\t0\t0\t0")
    process(13, 12, "1000\t1000\t1000\t1000")
    process(14, 11, "1000\t1000\t1000\t1000")
    for uid, wanted in ((1000, {10, 11, 14}), (None, {10, 11, 12, 13, 14})):
        tree = ProcessTree(10, uid, str(tmp_path))
        assert {pid for pid in (14, 13, 12, 11, 10, 15, 1) if pid in tree} == wanted
    with pytest.raises(UnknownJobError):
        ProcessTree(12, 1000, str(tmp_path))
    with pytest.raises(UnknownJobError):
        ProcessTree(10, 1001, str(tmp_path))


def test_a_status_that_is_no_status_is_none(tmp_path: Any) -> None:
    for number, text in enumerate(["", "Tgid:\tx\nPPid:\t1\nUid:\t0\n", "Tgid: 1\nUid: 0\n"]):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "status").write_text(text)
        assert status(number, str(tmp_path)) is None
    assert status(99, str(tmp_path)) is None
    own = status(os.getpid())
    assert own is not None
    assert (own.tgid, own.parent) == (os.getpid(), os.getppid())


# ---- time inside data loaders


def loading(seconds: float, *, waits: bool, slot: int = 5) -> Count:
    loader = "/opt/site-packages/torch/utils/data/dataloader.py"
    inside = (Frame("_BaseDataLoaderIter.__next__", loader, 1, 1), Frame("main", "/srv/train.py", 2, 1))
    return Count(Stack(slot, 100, waits, "held", "3.11", False, inside, ""), 1, int(seconds * 1e9))


def test_time_in_data_loaders_grows_with_both_waiting_and_running_threads(node: Node) -> None:
    assert not node.tick(unresolved("not_python")).jobs[0].python.HasField("loading_ns")
    report = node.tick(running("f:1"), waiting("g:2"))
    assert report.jobs[0].python.HasField("loading_ns")
    assert report.jobs[0].python.loading_ns == 0
    node.tick(loading(0.5, waits=True), loading(0.25, waits=False), running("f:1"))
    assert node.tick(loading(1, waits=True)).jobs[0].python.loading_ns == 1_750_000_000
    assert node.tick().jobs[0].python.loading_ns == 1_750_000_000


def test_where_waiting_threads_are_not_seen_the_time_in_loaders_is_not_known(
    samplers: type[MadeUpSampler],
) -> None:
    made = Node(samplers, {"python.waits_hz": 0})
    made.jobs.append(job())
    report = made.tick(running("f:1"), loading(1, waits=False))
    assert report.jobs[0].python.samples == 2
    assert not report.jobs[0].python.HasField("loading_ns")
    made.source.stop()
