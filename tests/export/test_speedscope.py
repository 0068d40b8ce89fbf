"""speedscope's file format, checked against the rules of its schema that these files fall under."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given

from expanse_ebpf.export.speedscope import SCHEMA, speedscope
from expanse_ebpf.wire.profile_pb2 import Profile
from tests.export.profiles import (
    HOSTILE,
    OWN,
    PERIOD,
    SECOND,
    builder,
    hostile,
    known,
    of,
    profiles,
    unhurried,
)

# From file-format-schema.json: what each object may and must hold, and of which type ("number" is any).
FILE = {
    "$schema": str,
    "exporter": str,
    "name": str,
    "activeProfileIndex": int,
    "shared": dict,
    "profiles": list,
}
REQUIRED = {"$schema", "profiles", "shared"}
FRAME = {"name": str, "file": str, "line": int, "col": int}
SAMPLED = {
    "type": str,
    "name": str,
    "unit": str,
    "startValue": int,
    "endValue": int,
    "samples": list,
    "weights": list,
}
UNITS = {"bytes", "microseconds", "milliseconds", "nanoseconds", "none", "seconds"}


def fits(value: dict[str, Any], types: dict[str, type], required: set[str]) -> None:
    assert required <= value.keys() <= types.keys()
    for key, kind in types.items():
        assert isinstance(value.get(key, kind()), kind)


def valid(text: str) -> dict[str, Any]:
    """The file, after it was checked by the schema and by what speedscope expects beyond it."""
    content: dict[str, Any] = json.loads(text)
    fits(content, FILE, REQUIRED)
    assert content["$schema"] == SCHEMA == "https://www.speedscope.app/file-format-schema.json"
    assert content["shared"].keys() == {"frames"}
    for frame in content["shared"]["frames"]:
        fits(frame, FRAME, {"name"})
    for profile in content["profiles"]:
        fits(profile, SAMPLED, set(SAMPLED))
        assert profile["type"] == "sampled"
        assert profile["unit"] in UNITS
        assert len(profile["samples"]) == len(profile["weights"])
        assert profile["endValue"] - profile["startValue"] == sum(profile["weights"])
        assert all(isinstance(weight, int) and weight > 0 for weight in profile["weights"])
        for stack in profile["samples"]:
            assert all(0 <= number < len(content["shared"]["frames"]) for number in stack)
    assert 0 <= content["activeProfileIndex"] < len(content["profiles"])
    return content


def named(content: dict[str, Any], profile: int) -> dict[str, int]:
    frames = content["shared"]["frames"]
    shown = content["profiles"][profile]
    stacks = (";".join(frames[number]["name"] for number in stack) for stack in shown["samples"])
    found: dict[str, int] = {}
    for stack, weight in zip(stacks, shown["weights"], strict=True):
        found[stack] = found.get(stack, 0) + weight
    return found


def test_time_on_cpus_and_time_waiting_are_two_profiles() -> None:
    content = valid(speedscope(known(), "train on n1"))
    assert content["name"] == "train on n1"
    assert [profile["name"] for profile in content["profiles"]] == ["on CPU", "waiting"]
    assert named(content, 0) == {
        "<module>;main;fast": 50 * PERIOD,
        "<module>;main;mid": 30 * PERIOD,
        "<module>;main;slow": 20 * PERIOD,
        "[lost]": 3 * PERIOD,
        "[native thread]": 6 * PERIOD,
    }
    assert named(content, 1) == {"<module>;main;_next_data;wait": 10 * SECOND}
    assert {"name": "fast", "file": OWN, "line": 11} in content["shared"]["frames"]
    assert {"name": "[lost]"} in content["shared"]["frames"]


def test_stacks_that_differ_in_labels_only_are_one_sample() -> None:
    content = valid(speedscope(of([("main;f", 1), ("main;f", 2)], lambda number: {"pid": number}), "x"))
    assert content["profiles"][0]["weights"] == [3 * PERIOD]


def test_the_profile_that_has_something_is_shown_first() -> None:
    made = builder()
    assert valid(speedscope(made.build(), "nothing"))["activeProfileIndex"] == 0
    made.add([("wait", "/x.py", 1, 1)], (4, 0, SECOND), {})
    assert valid(speedscope(made.build(), "waiting"))["activeProfileIndex"] == 1
    assert valid(speedscope(known(), "both"))["activeProfileIndex"] == 0


def test_hostile_names_are_just_names() -> None:
    frames = valid(speedscope(hostile(), "a\nb"))["shared"]["frames"]
    assert {frame["name"] for frame in frames} >= set(HOSTILE)


@unhurried
@given(profiles())
def test_every_profile_makes_a_valid_file_with_its_sums(profile: Profile) -> None:
    content = valid(speedscope(profile, "x"))
    for number in range(2):
        assert content["profiles"][number]["endValue"] == sum(s.value[number + 1] for s in profile.sample)
