"""pprof's message: what is in it, sums of profiles, and what is not a profile."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
import tracemalloc
import zlib
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.export.collapsed import collapsed
from expanse_ebpf.export.flamegraph import flamegraph
from expanse_ebpf.export.pprof import ProfileError, Reader, dumps, hottest, loads, merge
from expanse_ebpf.export.speedscope import speedscope
from expanse_ebpf.wire.profile_pb2 import Profile
from tests.export.profiles import (
    BEGIN,
    HOSTILE,
    LABELS,
    OWN,
    PERIOD,
    SECOND,
    builder,
    damaged,
    known,
    of,
    profiles,
    says,
    unhurried,
)

ROOT = Path(__file__).resolve().parents[2]


def pprof(*arguments: str, profile: Profile, folder: Path) -> str:
    """What `go tool pprof` prints about a profile."""
    tool = shutil.which("pprof", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    assert tool, "pprof is missing; `make build/pprof` fetches it"
    file = folder / "profile.pb.gz"
    file.write_bytes(dumps(profile))
    command = [tool, *arguments, str(file)]
    environment = {"PPROF_TMPDIR": str(folder), "TZ": "UTC"}
    result = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    return result.stdout


def top(text: str) -> dict[str, tuple[str, str]]:
    """Function: flat and cumulative share, from `pprof -top`."""
    rows = re.findall(r"^ *\S+ +(\S+%?) +\S+% +\S+ +(\S+%?) {2}(.*)$", text, re.MULTILINE)
    return {name: (flat, cumulative) for flat, cumulative, name in rows}


# ---- What stands in a profile


def test_equal_stacks_are_added_up_and_others_are_not() -> None:
    made = builder()
    stack = [("leaf", "/x.py", 3, 1), ("main", "/x.py", 9, 7)]
    made.add(stack, (1, PERIOD, 0), {"pid": 7, "job": "slurm/1", "user": ""})
    made.add(iter(stack), (2, 2 * PERIOD, 5), {"job": "slurm/1", "pid": 7})
    made.add(stack, (1, PERIOD, 0), {"pid": 8, "job": "slurm/1"})
    made.add(stack[:1], (4, 4 * PERIOD, 0), {})
    found = list(Reader(made.build()).stacks())
    assert [(values, labels) for _, values, labels in found] == [
        ((3, 3 * PERIOD, 5), {"pid": 7, "job": "slurm/1"}),
        ((1, PERIOD, 0), {"pid": 8, "job": "slurm/1"}),
        ((4, 4 * PERIOD, 0), {}),
    ]
    assert found[0].frames == tuple(stack)
    assert found[0].frames[1].line == 9


def test_the_message_has_what_readers_of_pprof_look_for() -> None:
    profile = known()
    text = profile.string_table
    assert text[0] == ""
    assert len(set(text)) == len(text)
    assert [(text[v.type], text[v.unit]) for v in profile.sample_type] == [
        ("samples", "count"),
        ("cpu", "nanoseconds"),
        ("waiting", "nanoseconds"),
    ]
    assert text[profile.default_sample_type] == "cpu"
    assert profile.period_type == profile.sample_type[1]
    assert (profile.period, profile.time_nanos, profile.duration_nanos) == (PERIOD, BEGIN, 10 * SECOND)
    functions = {f.id: f for f in profile.function}
    assert 0 not in functions
    for location in profile.location:
        (line,) = location.line
        assert location.id
        assert text[functions[line.function_id].name]
    first = profile.sample[0]
    assert text[functions[profile.location[first.location_id[0] - 1].line[0].function_id].name] == "fast"
    assert {text[x.key]: text[x.str] or x.num for x in first.label} == LABELS
    # One function, however many of its lines were seen.
    assert [text[f.name] for f in profile.function].count("fast") == 1


def test_a_profile_can_be_built_again_while_it_grows() -> None:
    made = builder()
    made.add([("f", "/x.py", 1, 1)], (1, PERIOD, 0), {})
    before = made.build()
    made.add([("f", "/x.py", 1, 1)], (1, PERIOD, 0), {})
    made.duration_ns = 20 * SECOND
    assert before.sample[0].value[0] == 1
    assert made.build().sample[0].value[0] == 2
    assert made.build().duration_nanos == 20 * SECOND


def test_a_lone_surrogate_in_a_name_costs_only_itself() -> None:
    made = builder()
    made.add([("bad\udcff", "/x.py", 1, 1)], (1, PERIOD, 0), {"user": "\ud800"})
    ((frames, _, labels),) = Reader(loads(dumps(made.build()))).stacks()
    assert (frames[0].name, labels) == ("bad?", {"user": "?"})


def test_sums_end_at_what_the_format_can_hold() -> None:
    made = builder()
    for _ in range(3):
        made.add([("f", "/x.py", 1, 1)], ((1 << 63) - 1, 1 << 62, 0), {})
    assert list(made.build().sample[0].value) == [(1 << 63) - 1, (1 << 63) - 1, 0]


# ---- What Go's pprof makes of it


def test_pprof_shows_the_right_functions_and_shares(tmp_path: Path) -> None:
    text = pprof("-top", profile=known(), folder=tmp_path)
    assert "Type: cpu" in text
    assert "Duration: 10s, Total samples = 1090ms (10.90%)" in text
    # 109 samples, nine of them without a stack.
    assert top(text) == {
        "fast": ("45.87%", "45.87%"),
        "mid": ("27.52%", "27.52%"),
        "slow": ("18.35%", "18.35%"),
        "[native thread]": ("5.50%", "5.50%"),
        "[lost]": ("2.75%", "2.75%"),
        "main": ("0%", "91.74%"),
        "<module>": ("0%", "91.74%"),
    }


def test_pprof_shows_waiting_and_samples_as_other_values(tmp_path: Path) -> None:
    waiting = pprof("-top", "-sample_index=waiting", profile=known(), folder=tmp_path)
    assert top(waiting)["wait"] == ("100%", "100%")
    assert "fast" not in waiting
    samples = pprof("-top", "-sample_index=samples", profile=known(), folder=tmp_path)
    assert top(samples)["wait"] == ("26.85%", "26.85%")  # 40 of 149


def test_pprof_chooses_by_label_and_tells_lines_apart(tmp_path: Path) -> None:
    focused = pprof("-top", "-tagfocus=unresolved=lost", profile=known(), folder=tmp_path)
    assert top(focused) == {"[lost]": ("2.75%", "2.75%")}
    by_line = pprof("-top", "-lines", profile=known(), folder=tmp_path)
    assert top(by_line)[f"fast {OWN}:11"] == ("18.35%", "18.35%")


def test_pprof_leaves_pythons_names_as_they_are(tmp_path: Path) -> None:
    """It takes what looks mangled for C++: "<module>" would be shown as "<unknown>"."""
    python = ["<module>", "<lambda>", "<listcomp>", "f.<locals>.<lambda>", "C[int].m", "Ça.naïve", "_Z3foov"]
    text = pprof("-top", profile=of((name, 10 + n) for n, name in enumerate(python)), folder=tmp_path)
    assert set(top(text)) == set(python)


def test_pprof_takes_names_that_are_meant_to_harm(tmp_path: Path) -> None:
    profile = of((name.replace(";", ""), 1) for name in HOSTILE)
    assert "Showing nodes accounting for" in pprof("-top", profile=profile, folder=tmp_path)


# ---- Sums


def test_minutes_of_a_job_add_up() -> None:
    minutes = []
    for minute in range(3):
        made = builder(BEGIN + minute * 60 * SECOND, 60 * SECOND)
        made.add([("f", "/x.py", 1, 1)], (1, PERIOD, 0), {"pid": 7})
        made.add([(f"only_{minute}", "/x.py", 2, 1)], (5, 0, SECOND), {"pid": 7})
        minutes.append(made.build())
    total = merge(reversed(minutes))
    assert (total.time_nanos, total.duration_nanos) == (BEGIN, 180 * SECOND)
    found = {frames[0].name: values for frames, values, _ in Reader(total).stacks()}
    only = (5, 0, SECOND)
    assert found == {"f": (3, 3 * PERIOD, 0), "only_0": only, "only_1": only, "only_2": only}


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([(10, 5), (15, 5)], (10, 10)),
        ([(10, 5), (100, 5)], (10, 95)),  # with a gap
        ([(10, 20), (15, 5)], (10, 20)),  # one within the other, as of two nodes
        ([(0, 7), (10, 5)], (10, 5)),  # time not known
        ([(0, 7), (0, 9)], (0, 9)),
        ([], (0, 0)),
    ],
)
def test_a_sum_reaches_from_the_earliest_to_the_latest(
    times: list[tuple[int, int]], expected: tuple[int, int]
) -> None:
    total = merge(builder(begin, duration).build() for begin, duration in times)
    assert (total.time_nanos, total.duration_nanos) == expected


def test_a_change_of_the_rate_keeps_cpu_time_right() -> None:
    slow = Profile()
    slow.CopyFrom(known())
    slow.period = 2 * PERIOD
    total = merge([slow, known()])
    assert total.period == 2 * PERIOD
    assert sum(s.value[1] for s in total.sample) == 2 * sum(s.value[1] for s in known().sample)


def test_profiles_with_other_values_are_refused_and_empty_ones_add_nothing() -> None:
    other = known()
    other.sample_type[1].unit = other.sample_type[0].unit
    with pytest.raises(
        ProfileError, match=r"other values cannot be added up: samples in count, cpu in count"
    ):
        merge([known(), other])
    assert says(merge([Profile(), known(), Profile()])) == says(known())
    assert says(merge([])) == ((0, 0, 0), {})


@unhurried
@given(profiles(), profiles(), profiles())
def test_sums_do_not_depend_on_order_and_grouping(a: Profile, b: Profile, c: Profile) -> None:
    total = says(merge([a, b, c]))
    assert says(merge([merge([a, b]), c])) == total
    assert says(merge([a, merge([c, b])])) == total
    assert says(merge([c, a, b])) == total
    assert says(merge([a])) == says(a)


@unhurried
@given(profiles(), profiles())
def test_nothing_is_lost_in_a_sum(a: Profile, b: Profile) -> None:
    before = [sum(s.value[place] for p in (a, b) for s in p.sample) for place in range(3)]
    after = [sum(s.value[place] for s in merge([a, b]).sample) for place in range(3)]
    if max(before) < 1 << 63:
        assert after == before


# ---- Files


@unhurried
@given(profiles())
def test_what_is_written_is_read_again(profile: Profile) -> None:
    assert loads(dumps(profile)) == profile
    assert loads(profile.SerializeToString()) == profile
    assert dumps(loads(dumps(profile))) == dumps(profile)


def refused(data: bytes, limit: int = 1 << 20) -> str:
    with pytest.raises(ProfileError) as caught:
        loads(data, limit)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_bomb_is_not_unpacked() -> None:
    bomb = zlib.compress(bytes(64 << 20), 1, wbits=31)
    assert len(bomb) < 300_000
    tracemalloc.start()
    try:
        assert refused(bomb) == f"the profile is larger than {1 << 20} bytes"
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert "larger" in refused(known().SerializeToString(), limit=100)
    assert "larger" in refused(dumps(known()), limit=100)
    size = known().ByteSize()
    assert loads(dumps(known()), limit=size) == known()
    assert "larger" in refused(dumps(known()), limit=size - 1)


def test_a_part_of_a_file_is_no_profile() -> None:
    data = dumps(known())
    for end in range(2, len(data)):
        assert refused(data[:end])
    assert "something follows it" in refused(data + b"x")
    assert "something follows it" in refused(data + data)
    assert refused(b"#!/bin/sh\n") == "this is not a profile in pprof's format"
    assert loads(b"") == Profile()  # an empty message is one


@unhurried
@given(st.integers(0, 1 << 20), st.integers(1, 255))
def test_a_damaged_file_is_refused_or_still_a_profile(place: int, change: int) -> None:
    for data in (bytearray(dumps(known())), bytearray(known().SerializeToString())):
        data[place % len(data)] ^= change
        with contextlib.suppress(ProfileError):
            use(loads(bytes(data)))


@unhurried
@given(damaged())
def test_numbers_that_point_nowhere_raise_one_error_everywhere(profile: Profile) -> None:
    try:
        loads(dumps(profile))
    except ProfileError:
        with pytest.raises(ProfileError):
            list(Reader(profile).stacks())
        with pytest.raises(ProfileError):
            merge([known(), profile])
    use(profile)


@unhurried
@given(profiles())
def test_whatever_a_profile_holds_it_can_be_exported(profile: Profile) -> None:
    for export in (collapsed, hottest, partial(flamegraph, title="x"), partial(speedscope, name="x")):
        export(profile)


def use(profile: Profile) -> None:
    """Everything that reads profiles, of which none may fail otherwise than by ProfileError."""
    for export in (
        collapsed,
        hottest,
        lambda p: merge([p]),
        partial(flamegraph, title="x"),
        partial(speedscope, name="x"),
    ):
        with contextlib.suppress(ProfileError):
            export(profile)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda p: p.sample[0].value.pop(), "values that are listed"),
        (lambda p: p.sample[0].value.__setitem__(0, -1), "values that are listed"),
        (lambda p: p.sample[0].location_id.append(99), "no text or location 99"),
        (lambda p: p.sample[0].location_id.extend([1] * 5000), "more than 4096 frames"),
        (lambda p: [p.sample[0].label.add() for _ in range(65)], "too many labels"),
        (lambda p: setattr(p.sample[0].label[0], "key", -1), "no text or location -1"),
        (lambda p: setattr(p.function[0], "name", 999), "no text or function 999"),
        (lambda p: setattr(p.location[0].line[0], "function_id", 99), "no text or function 99"),
        (lambda p: p.location[0].line.add(), "not one line of one function"),
        (lambda p: p.location[0].ClearField("line"), "not one line of one function"),
        (lambda p: setattr(p, "duration_nanos", -1), "is negative"),
        (lambda p: p.string_table.extend([""] * (1 << 20)), "more than 1048576"),
    ],
)
def test_the_error_says_what_is_wrong(spoil: object, words: str) -> None:
    profile = known()
    assert callable(spoil)
    spoil(profile)
    assert words in refused(profile.SerializeToString(), limit=1 << 24)


# ---- The hottest line


def test_the_hottest_line_is_a_leaf_with_its_share_of_everything() -> None:
    # fast has 50 samples, but 30 and 20 on two lines; mid has 30 on one: the name decides among equals.
    assert hottest(known()) == ("fast", OWN, 10, 30 / 109)
    # It waits in threading.py, for a library, for the line of the program that wanted the data.
    assert hottest(known(), "waiting") == ("main", OWN, 48, 1.0)


def test_what_was_not_resolved_is_never_the_hottest_but_belongs_to_the_whole() -> None:
    made = builder()
    made.add([("[lost]", "", 0, 0)], (90, 90 * PERIOD, 0), {"unresolved": "lost"})
    assert hottest(made.build()) is None
    made.add([("f", "/x.py", 3, 1)], (6, 6 * PERIOD, 0), {"pid": 1})
    made.add([("f", "/x.py", 3, 1), ("g", "/x.py", 9, 8)], (4, 4 * PERIOD, 0), {"pid": 2})
    assert hottest(made.build()) == ("f", "/x.py", 3, 0.1)
    assert hottest(made.build(), "waiting") is None


def test_an_unknown_value_is_named() -> None:
    with pytest.raises(ProfileError, match="no value 'gpu': it has samples, cpu, waiting"):
        hottest(known(), "gpu")
