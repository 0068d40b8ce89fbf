"""Stacks as they are counted: exact sums whatever is folded, and what stands in the profile."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.export import pprof
from expanse_ebpf.sources import stack_counts
from expanse_ebpf.sources.stack_counts import RecentLines, StackCounts
from tests.sources.made_up_sampler import PERIOD_NS, Count, Frame, running, stack, unresolved, waiting


def profile_of(counts: StackCounts, **labels: str) -> list[pprof.Stack]:
    made = counts.profile(rate_hz=49, time_ns=7, duration_ns=9, labels=lambda _slot: labels)
    assert (made.period, made.time_nanos, made.duration_nanos) == (PERIOD_NS, 7, 9)
    return list(pprof.Reader(made).stacks())


def test_equal_stacks_are_added_up_and_the_two_kinds_of_time_kept_apart() -> None:
    counts = StackCounts()
    for count in (running("f:3", "main:9", samples=2), running("f:3", "main:9"), waiting("f:3", "main:9")):
        counts.add(count)
    (found,) = profile_of(counts, job="slurm/1", user="ada")
    assert found.values == (4, 3 * PERIOD_NS, 250_000_000)
    assert [(f.name, f.file, f.line, f.first_line) for f in found.frames] == [
        ("f", "/srv/train.py", 3, 1),
        ("main", "/srv/train.py", 9, 1),
    ]
    labels = {"job": "slurm/1", "user": "ada", "pid": 100, "gil": "held", "python": "3.11"}
    assert found.labels == labels


def test_what_is_not_resolved_has_one_frame_in_brackets_and_its_reason() -> None:
    counts = StackCounts()
    counts.add(unresolved("changed", 3))
    (found,) = profile_of(counts)
    assert [f.name for f in found.frames] == ["[changed while read]"]
    assert found.labels == {"pid": 100, "unresolved": "changed"}
    assert found.values == (3, 3 * PERIOD_NS, 0)


def test_a_stack_that_was_cut_has_a_root_that_says_so() -> None:
    counts = StackCounts()
    counts.add(running("f:3", "g:", truncated=True))
    (found,) = profile_of(counts)
    assert [(f.name, f.line) for f in found.frames] == [("f", 3), ("g", 0), ("[truncated]", 0)]
    assert found.labels["truncated"] == 1


SOME_COUNTS = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 9), st.booleans(), st.integers(5, 6)), max_size=80
)


@given(SOME_COUNTS, st.integers(1, 12))
def test_nothing_is_lost_by_folding(seen: list[tuple[int, int, bool, int]], most: int) -> None:
    counts = StackCounts(most)
    made = [
        (waiting if waits else running)(
            f"f{number}:1", slot=slot, **{"visits" if waits else "samples": times}
        )
        for number, times, waits, slot in seen
    ]
    for count in made:
        counts.add(count)
    assert len(counts) <= most + 2
    found = profile_of(counts)
    assert sum(s.values[0] for s in found) == sum(c.samples for c in made)
    assert sum(s.values[1] for s in found) == sum(c.ns for c in made if not c.stack.waiting)
    assert sum(s.values[2] for s in found) == sum(c.ns for c in made if c.stack.waiting)
    assert counts.folded == any(s.labels.get("unresolved") == "over_budget" for s in found)
    assert counts.folded <= (len({c.stack for c in made}) > most)


def test_the_rarest_stacks_are_folded() -> None:
    counts = StackCounts(10)
    for number in range(9):
        counts.add(running(f"often{number}:1", samples=10))
    for number in range(20):
        counts.add(running(f"rare{number}:1", slot=6))
    names = {s.frames[0].name for s in profile_of(counts)}
    assert sum(name.startswith("often") for name in names) >= 5
    assert "[over budget]" in names
    assert "rare19" in names  # the newest comes in after the folding


def test_what_was_folded_keeps_the_labels_of_its_job() -> None:
    counts = StackCounts(2)
    for number in range(6):
        counts.add(running(f"f{number}:1", slot=5 + number % 2, samples=10 - number))
    made = counts.profile(rate_hz=49, time_ns=0, duration_ns=0, labels=lambda slot: {"job": f"run/{slot}"})
    by_job: Counter[str] = Counter()
    for found in pprof.Reader(made).stacks():
        by_job[str(found.labels["job"])] += found.values[0]
    assert by_job == {"run/5": 10 + 8 + 6, "run/6": 9 + 7 + 5}


def test_a_profile_that_packs_well_is_bounded_unpacked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack_counts, "MOST_PLAIN_BYTES", 20_000)
    counts = StackCounts()
    for number in range(3000):
        counts.add(running(f"f{number}:1"))
    packed = counts.packed(rate_hz=49, time_ns=0, duration_ns=0, labels=lambda _: {})
    assert pprof.loads(packed).ByteSize() <= 20_000
    assert sum(s.values[0] for s in pprof.Reader(pprof.loads(packed)).stacks()) == 3000


def test_a_packed_profile_stays_within_its_bytes() -> None:
    counts = StackCounts()
    chance = random.Random(1)
    total = 0
    for number in range(600):
        names = [f"{chance.getrandbits(200):x}:{chance.randrange(999)}" for _ in range(8)]
        counts.add(running(*names, samples=number % 7 + 1))
        total += number % 7 + 1
    whole = counts.packed(rate_hz=49, time_ns=0, duration_ns=0, labels=lambda _: {}, most_bytes=1 << 20)
    assert not counts.folded
    assert len(whole) > 100_000
    packed = counts.packed(rate_hz=49, time_ns=0, duration_ns=0, labels=lambda _: {}, most_bytes=50_000)
    assert 20_000 < len(packed) <= 50_000
    assert counts.folded
    kept = list(pprof.Reader(pprof.loads(packed)).stacks())
    assert sum(s.values[0] for s in kept) == total
    assert min(s.values[0] for s in kept) >= 5


def test_the_least_of_limits_still_gives_a_profile() -> None:
    counts = StackCounts()
    counts.add(running("f:1", samples=4))
    packed = counts.packed(rate_hz=49, time_ns=0, duration_ns=0, labels=lambda _: {}, most_bytes=1)
    (only,) = pprof.Reader(pprof.loads(packed)).stacks()
    assert (only.values[0], only.labels["unresolved"]) == (4, "over_budget")


# ---- the hottest line


def test_the_hottest_line_is_the_leafs_and_its_share_of_everything() -> None:
    recent = RecentLines()
    assert recent.hottest() is None
    recent.add(1.0, [running("f:3", "main:9", samples=6), running("g:4", "main:9", samples=2)])
    recent.add(2.0, [unresolved("changed", 2), running("f:3", "other:1", samples=2)])
    assert recent.hottest() == (("f", "/srv/train.py", 3), 8 / 12)


STANDARD = "/usr/lib/python3.11/threading.py"


def waits(*frames: tuple[str, str, int], visits: int = 1) -> Count:
    """Visits to a thread in these functions, leaf first: name, file, line."""
    made = tuple(Frame(name, file, line, 1) for name, file, line in frames)
    return Count(stack(waiting=True)._replace(frames=made), visits, visits * 250_000_000)


def test_a_wait_is_charged_to_the_program_and_idle_threads_of_libraries_come_last() -> None:
    recent = RecentLines(waits=True)
    idle = waits(("Condition.wait", STANDARD, 327), ("_worker", STANDARD, 81), visits=30)
    recent.add(1.0, [idle])
    assert recent.hottest() == (("Condition.wait", STANDARD, 327), 1.0)
    library = ("next", "/venv/lib/python3.11/site-packages/torch/data.py", 5)
    recent.add(2.0, [waits(("Condition.wait", STANDARD, 327), library, visits=6)])
    assert recent.hottest() == (library, 6 / 36)
    own = ("Trainer.step", "/srv/train.py", 18)
    recent.add(3.0, [waits(("Condition.wait", STANDARD, 327), library, own, visits=4)])
    assert recent.hottest() == (own, 4 / 40)
    on_cpu = RecentLines()
    on_cpu.add(1.0, [waits(("Condition.wait", STANDARD, 327), own)])
    assert on_cpu.hottest() == (("Condition.wait", STANDARD, 327), 1.0)


def test_two_lines_of_one_function_are_two() -> None:
    recent = RecentLines()
    recent.add(1.0, [running("f:3", samples=3), running("f:4", samples=3), running("g:7", samples=4)])
    assert recent.hottest() == (("g", "/srv/train.py", 7), 0.4)


def test_what_could_not_be_resolved_is_never_the_hottest() -> None:
    recent = RecentLines()
    recent.add(1.0, [unresolved("not_python", 50)])
    assert recent.hottest() is None
    recent.add(2.0, [running("f:")])
    assert recent.hottest() == (("f", "/srv/train.py", 0), 1 / 51)


def test_ten_seconds_count_and_no_more() -> None:
    recent = RecentLines(10.0)
    recent.add(1.0, [running("old:1", samples=100)])
    recent.add(2.0, [running("new:1")])
    recent.add(10.9, [])
    hot = recent.hottest()
    assert hot is not None
    assert hot[0][0] == "old"
    recent.add(11.0, [])
    assert recent.hottest() == (("new", "/srv/train.py", 1), 1.0)
    recent.add(30.0, [])
    assert recent.hottest() is None


def test_an_interval_longer_than_the_window_is_the_window() -> None:
    recent = RecentLines(10.0)
    recent.add(60.0, [running("a:1")])
    recent.add(120.0, [running("b:1")])
    assert recent.hottest() == (("b", "/srv/train.py", 1), 1.0)


@given(st.lists(st.tuples(st.floats(0, 9), st.lists(st.integers(0, 4), max_size=5)), max_size=20))
def test_it_is_what_adding_up_the_ticks_says(ticks: list[tuple[float, list[int]]]) -> None:
    recent = RecentLines(10.0)
    now, all_ticks = 0.0, []
    for pause, numbers in ticks:
        now += pause
        counts: list[Count] = [running(f"f{number}:1") for number in numbers]
        recent.add(now, counts)
        all_ticks.append((now, counts))
        kept: Counter[Any] = Counter(
            c.stack.frames[0].name
            for i, (when, counted) in enumerate(all_ticks)
            if when > now - 10.0 or i == len(all_ticks) - 1
            for c in counted
        )
        hot = recent.hottest()
        if not kept:
            assert hot is None
        else:
            assert hot is not None
            best = min(kept, key=lambda name: (-kept[name], name))
            assert (hot[0][0], hot[1]) == (best, kept[best] / kept.total())


def test_stacks_differ_by_process() -> None:
    assert stack("f:1", pid=1) != stack("f:1", pid=2)
