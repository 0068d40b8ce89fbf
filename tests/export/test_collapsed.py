"""Folded stacks."""

from __future__ import annotations

import re

import pytest
from hypothesis import given

from expanse_ebpf.export.collapsed import collapsed
from expanse_ebpf.export.pprof import ProfileError, merge
from expanse_ebpf.wire.profile_pb2 import Profile
from tests.export.profiles import OWN, PERIOD, builder, hostile, known, of, profiles, unhurried


def read(text: str) -> list[tuple[list[str], int]]:
    """As flamegraph.pl takes a line apart: the number behind the last blank, the rest at semicolons."""
    found = []
    for line in text.splitlines():
        stack, number = re.fullmatch(r"(.*)\s+(\d+)", line).groups()  # type: ignore[union-attr]
        found.append((stack.split(";"), int(number)))
    return found


def test_stacks_stand_root_first_with_file_and_line() -> None:
    main = f"<module> ({OWN}:60);main ({OWN}:52)"
    assert collapsed(known()) == (
        f"{main};fast ({OWN}:10) {30 * PERIOD}\n"
        f"{main};fast ({OWN}:11) {20 * PERIOD}\n"
        f"{main};mid ({OWN}:20) {30 * PERIOD}\n"
        f"{main};slow ({OWN}:30) {20 * PERIOD}\n"
        f"[lost] {3 * PERIOD}\n"
        f"[native thread] {6 * PERIOD}\n"
    )


def test_waiting_is_another_value() -> None:
    ((stack, number),) = read(collapsed(known(), "waiting"))
    assert number == 10 * 10**9
    assert stack[-1] == "wait (/usr/lib/python3.11/threading.py:327)"
    assert sum(number for _, number in read(collapsed(known(), "samples"))) == 149
    with pytest.raises(ProfileError, match="no value 'gpu'"):
        collapsed(known(), "gpu")


def test_stacks_that_differ_in_labels_only_are_one_line() -> None:
    profile = of([("main;f", 1), ("main;f", 2)], lambda number: {"pid": number})
    assert len(profile.sample) == 2
    assert collapsed(profile, "samples") == "main (/x/main.py:1);f (/x/f.py:1) 3\n"


def test_what_is_not_known_is_left_out_of_a_frame() -> None:
    made = builder()
    made.add([("f", "/x.py", 0, 0), ("g", "", 7, 0)], (1, PERIOD, 0), {})
    made.add([], (2, PERIOD, 0), {})
    assert collapsed(made.build(), "samples") == "[no Python frame] 2\ng;f (/x.py) 1\n"


def test_no_name_can_make_another_frame_or_line() -> None:
    text = collapsed(hostile(), "samples")
    assert "a:b␊c␉d 12 (a:b␊c␉d 12:1) 7\n" in text
    for stack, _ in read(text):
        assert len(stack) == 2
        assert len(stack[0]) <= 1024


@unhurried
@given(profiles())
def test_lines_hold_the_whole_value_in_an_order_of_their_own(profile: Profile) -> None:
    text = collapsed(profile, "samples")
    found = read(text)
    assert sum(number for _, number in found) == sum(sample.value[0] for sample in profile.sample)
    assert text.splitlines() == sorted(text.splitlines(), key=lambda line: line.rpartition(" ")[0])
    backwards = Profile()
    backwards.CopyFrom(profile)
    backwards.ClearField("sample")
    backwards.sample.extend(reversed(profile.sample))
    assert collapsed(backwards, "samples") == text
    assert collapsed(merge([backwards]), "samples") == text
