"""A bench's course: which runs it makes, when it stops, what it keeps. The runs are made up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench import session
from expanse_ebpf.bench.results import End, Machine, Results, Run, Session, State
from expanse_ebpf.errors import ConfigError

PLAN = """
seed = 5
[stopping]
min_pairs = 8
max_pairs = 12
[workloads.loop]
kind = "command"
command = ["true"]
[workloads.other]
kind = "command"
command = ["true"]
[arms.near]
kind = "collection"
[arms.far]
kind = "python_stacks"
"""
CELLS = {("loop", "near"), ("loop", "far"), ("other", "near"), ("other", "far")}
HERE = Machine(
    *(1, "node", "6.18.0", "x86_64", "a CPU", 2, 1 << 30, None, None, None, None, None, (), None, "3.11"),
    expanse="1",
)

Seconds = Callable[[Run], float | str]


class Said:
    """What a person would see."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, float | None, float | None, float]] = []
        self.kept: list[str] = []

    def begins(self, text: str, least_s: float | None, most_s: float | None, share: float) -> None:
        self.begun.append((text, least_s, most_s, share))

    def says(self, text: str) -> None:
        self.kept.append(text)


class Stage:
    """A folder, a plan, and runs that take as long as a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.plan = folder / "out", folder / "plan.toml"
        self.plan.write_text(PLAN)
        self.seconds: Seconds = lambda run: 10.0
        self.said = Said()
        self.machine = HERE
        monkeypatch.setattr(session.run, "measure", self.measure)
        monkeypatch.setattr(session.run, "check", lambda plan: None)
        monkeypatch.setattr(session.run, "tools", lambda plan: {})
        monkeypatch.setattr(session.machine, "describe", lambda tools: self.machine)

    def measure(self, plan: Any, workload: Any, arm: Any, **given: Any) -> Run:
        given.pop("closely")
        expected = given.pop("expected_s")
        assert expected is None or expected == 11.0
        empty = Run(
            *(workload.name, arm.name),
            **given,
            **dict.fromkeys(("seconds", "job_cpu_s", "job_memory_peak_bytes")),
            started_ns=0,
            wall_s=11.0,
            state=State(0.0, None, None, None, None, None),
        )
        values = {name: getattr(empty, name) for name in Run.__slots__}
        taken = self.seconds(empty)
        values.update({"failed": taken} if isinstance(taken, str) else {"seconds": taken})
        return Run(**values)

    def go(self, *, resume: bool = False, seed: int | None = None, max_pairs: int | None = None) -> Results:
        with session.opened(
            self.plan, self.folder, resume=resume, seed=seed, max_pairs=max_pairs, progress=self.said
        ) as bench:
            bench.go()
        results = Results.read(self.folder)
        assert results.records == bench.results.records
        return results


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def ends(results: Results) -> dict[tuple[str, str], str]:
    return {cell: end.reason if (end := results.end(*cell)) else "" for cell in CELLS}


def noise(run: Run) -> float:
    """10 s, and a tenth more or less beside an arm, so that estimates go on swinging."""
    return 10.0 if run.role != "arm" else 10.0 * (1.4 if run.pair % 2 else 1 / 1.4)


def test_where_all_agree_it_ends_with_the_least_of_pairs(stage: Stage) -> None:
    results = stage.go()
    assert ends(results) == dict.fromkeys(CELLS, "agreed")
    assert {len(results.pairs(*cell)) for cell in CELLS} == {8}
    assert sum("no measurable difference" in line for line in stage.said.kept) == len(CELLS)


def test_where_they_do_not_it_goes_on_to_the_most(stage: Stage) -> None:
    stage.seconds = noise
    results = stage.go()
    assert ends(results) == dict.fromkeys(CELLS, "max_pairs")
    assert {len(results.pairs(*cell)) for cell in CELLS} == {12}


def test_an_arm_that_agrees_stops_while_the_others_go_on(stage: Stage) -> None:
    stage.seconds = lambda run: noise(run) if run.arm == "far" else 10.0
    results = stage.go(max_pairs=10)
    assert ends(results) == {cell: "agreed" if cell[1] == "near" else "max_pairs" for cell in CELLS}
    assert [len(results.pairs("loop", arm)) for arm in ("near", "far")] == [8, 10]


def test_a_pair_is_run_back_to_back_and_warm_up_comes_first(stage: Stage) -> None:
    runs = list(stage.go().runs)
    met: set[tuple[str, str]] = set()
    left = iter(runs)
    for run in left:
        if run.role == "warm_up":
            assert run.pair == 0
            met.add((run.workload, run.arm if run.watched else "nothing"))
            continue
        assert {(run.workload, "nothing"), (run.workload, run.arm)} <= met
        second = next(left)
        assert (second.workload, second.arm, second.pair) == (run.workload, run.arm, run.pair)
        assert {run.role, second.role} == {"off", "arm"}
        assert (run.position, second.position) == (0, 1)
        assert [r.watched for r in (run, second)] == [r.role == "arm" for r in (run, second)]
    assert sum(run.role == "warm_up" for run in runs) == 2 + 4
    assert {r.role for r in runs if r.position == 0 and r.pair} == {"off", "arm"}


def test_what_is_interrupted_goes_on_where_it_was(stage: Stage) -> None:
    whole = [(r.workload, r.arm, r.role, r.pair) for r in stage.go().runs if r.pair]
    counted = itertools.count()

    def seconds(run: Run) -> float:
        if next(counted) == 25:
            raise KeyboardInterrupt
        return 10.0

    stage.folder = stage.folder.with_name("again")
    stage.seconds = seconds
    with pytest.raises(KeyboardInterrupt):
        stage.go()
    before = list(Results.read(stage.folder).runs)
    assert len(before) == 25
    stage.seconds = lambda run: 10.0
    results = stage.go(resume=True)
    assert ends(results) == dict.fromkeys(CELLS, "agreed")
    assert {len(results.pairs(*cell)) for cell in CELLS} == {8}
    # Each pair has the order that it had in the bench that was not interrupted.
    orders = {(r.workload, r.arm, r.pair, r.role): r.position for r in results.runs if r.pair}
    assert orders == {(w, a, pair, role): i % 2 for i, (w, a, role, pair) in enumerate(whole)}
    assert [type(r) for r in results.records if not isinstance(r, (Run, End))] == [Machine, Session] * 2


def test_half_a_pair_is_not_completed_later(stage: Stage) -> None:
    def seconds(run: Run) -> float:
        if run.pair == 2 and run.position == 1:
            raise KeyboardInterrupt
        return 10.0

    stage.seconds = seconds
    with pytest.raises(KeyboardInterrupt):
        stage.go()
    half = list(Results.read(stage.folder).runs)[-1]
    stage.seconds = lambda run: 11.0
    results = stage.go(resume=True)
    pair = results.pairs(half.workload, half.arm)[1]
    assert [(run.seconds, run.attempt) for run in pair] == [(11.0, 2)] * 2


def test_a_failed_run_has_its_pair_begun_anew(stage: Stage) -> None:
    failed = []

    def seconds(run: Run) -> float | str:
        if (run.arm, run.pair, run.role, run.attempt) == ("far", 3, "off", 1):
            failed.append(run)
            return "exit code 1"
        return 10.0

    stage.seconds = seconds
    results = stage.go()
    assert len(failed) == 2
    assert ends(results) == dict.fromkeys(CELLS, "agreed")
    assert {run.attempt for pair in results.pairs("loop", "far") for run in pair if run.pair == 3} == {2}
    assert sum("exit code 1" in line for line in stage.said.kept) == 2


def test_what_fails_again_and_again_is_given_up_alone_and_tried_again_later(stage: Stage) -> None:
    stage.seconds = lambda run: "it broke" if run.role == "arm" and run.arm == "far" else 10.0
    results = stage.go()
    assert ends(results) == {cell: "failed" if cell[1] == "far" else "agreed" for cell in CELLS}
    assert "it broke" in (results.end("loop", "far") or End("", "", "failed")).detail
    assert sum(run.role == "arm" for run in results.runs if run.arm == "far") == 2 * 3
    stage.seconds = lambda run: 10.0
    assert ends(stage.go(resume=True)) == dict.fromkeys(CELLS, "agreed")


def test_a_workload_that_fails_by_itself_is_not_run_beside_anything(stage: Stage) -> None:
    stage.seconds = lambda run: "no such file" if run.workload == "other" else 10.0
    results = stage.go()
    assert not any(run.watched for run in results.runs if run.workload == "other")
    assert ends(results) == {cell: "failed" if cell[0] == "other" else "agreed" for cell in CELLS}


def test_a_bench_that_is_done_has_nothing_to_resume_but_more_pairs(stage: Stage) -> None:
    stage.seconds = noise
    before = len(list(stage.go(max_pairs=8).runs))
    assert len(list(stage.go(resume=True, max_pairs=8).runs)) == before
    results = stage.go(resume=True, max_pairs=9)
    assert {len(results.pairs(*cell)) for cell in CELLS} == {9}


def test_the_seed_is_on_record_and_stays(stage: Stage) -> None:
    results = stage.go(seed=9)
    assert [r.seed for r in results.records if isinstance(r, Session)] == [9]
    with pytest.raises(ConfigError, match="--seed: the bench began with 9"):
        stage.go(resume=True, seed=8)
    assert [r.seed for r in stage.go(resume=True).records if isinstance(r, Session)] == [9, 9]


def test_without_a_seed_one_is_drawn(stage: Stage) -> None:
    stage.plan.write_text(PLAN.replace("seed = 5", ""))
    stage.seconds = lambda run: "no"
    seeds = set()
    for n in range(3):
        stage.folder = stage.folder.with_name(str(n))
        seeds |= {r.seed for r in stage.go().records if isinstance(r, Session)}
    assert len(seeds) == 3


@pytest.mark.parametrize(
    ("change", "resume", "message"),
    [
        ("", False, "a bench was run here; go on with --resume"),
        ("plan", True, "another plan"),
        ("folder", True, "no bench to resume"),
        ("machine", True, "began with kernel '6.18.0', here it is '6.19.0'"),
        ("most", True, "--max-pairs: 7 is less than the plan's 8"),
    ],
)
def test_what_cannot_go_together_is_refused(stage: Stage, change: str, resume: bool, message: str) -> None:
    stage.seconds = lambda run: "no"
    stage.go()
    if change == "plan":
        stage.plan.write_text(PLAN + "\n")
    elif change == "folder":
        stage.folder = stage.folder.with_name("none")
    elif change == "machine":
        stage.machine = Machine(**{n: getattr(HERE, n) for n in Machine.__slots__} | {"kernel": "6.19.0"})
    records = len(Results.read(stage.folder).records) if stage.folder.exists() else 0
    with pytest.raises(ConfigError, match=message):
        stage.go(resume=resume, max_pairs=7 if change == "most" else None)
    assert not stage.folder.exists() or len(Results.read(stage.folder).records) == records


def test_two_do_not_work_in_one_folder(stage: Stage) -> None:
    def seconds(run: Run) -> float:
        with pytest.raises(ConfigError, match="another bench is running in it"):
            stage.go(resume=True)
        raise KeyboardInterrupt

    stage.seconds = seconds
    with pytest.raises(KeyboardInterrupt):
        stage.go()


def test_the_outlook_narrows_to_nothing(stage: Stage) -> None:
    stage.go()
    first, last = stage.said.begun[0], stage.said.begun[-1]
    assert first == ("loop beside nothing (warm-up)", None, None, 0.0) or first[1:] == (None, None, 0.0)
    _, least, most, shares = zip(*stage.said.begun, strict=True)
    known = [(a, b) for a, b in zip(least, most, strict=True) if a is not None and b is not None]
    assert all(a <= b for a, b in known)
    assert known[0][0] > known[-1][0] == 2 * (2.0 + 11.0)
    assert shares[-1] > 0.7
    assert list(shares) == sorted(shares)
    assert "(pair 8)" in last[0]


def test_a_link_where_the_plan_goes_is_not_followed(stage: Stage) -> None:
    other = stage.plan.with_name("other")
    other.write_text("mine")
    stage.folder.mkdir()
    (stage.folder / "plan.toml").symlink_to(other)
    with pytest.raises(ConfigError, match="symbolic link"):
        stage.go()
    assert other.read_text() == "mine"


def test_an_arm_that_cannot_be_made_ready_is_given_up_alone(stage: Stage) -> None:
    def seconds(run: Run) -> float:
        if run.arm == "far" and run.watched:
            raise ConfigError("cpu.counters: no such counter")
        return 10.0

    stage.seconds = seconds
    results = stage.go()
    assert ends(results) == {cell: "failed" if cell[1] == "far" else "agreed" for cell in CELLS}
