"""Tables and durations as people read them."""

from __future__ import annotations

from typing import Any

import pytest

from expanse_controller.rules import words


def state(job: str, state: str, reason: str = "", **more: Any) -> dict[str, Any]:
    one = {"rule": "idle", "job": job, "node": "", "state": state, "since_ns": 1_800_000_000 * 10**9}
    return {**one, "reason": reason, "window": "", "evidence": {}, **more}


@pytest.mark.parametrize(
    ("seconds", "told"),
    [
        (0, "0s"),
        (10, "10s"),
        (120, "2m"),
        (340, "5m40s"),
        (3600, "1h"),
        (93_600, "1d2h"),
        (90_061, "1d1h1m1s"),
        (12.5, "12.5s"),
    ],
)
def test_durations_have_one_form(seconds: float, told: str) -> None:
    assert words.span(seconds) == told


def test_what_fires_and_what_is_well_is_listed_and_the_rest_is_one_line() -> None:
    found = [
        state("slurm/1", "firing", window="0123456789abcdef", evidence={"gpus": 2.0}),
        *(state(f"slurm/{n}", "no_data", "holds no known GPU") for n in range(10, 22)),
        *(state(f"slurm/{n}", "no_data", f"not known: cpu_cores (of n{n})") for n in (30, 31)),
        state("slurm/40", "no_data", "a"),
        state("slurm/41", "no_data", "b"),
        state("slurm/2", "ok"),
    ]
    text = words.states(found, everything=False)
    heading, firing, well, last = text.splitlines()
    assert heading.split() == ["STATE", "RULE", "JOB", "SINCE", "WINDOW", "FIGURES"]
    assert firing.split()[-3:] == ["0123456789abcdef", "gpus", "2"]
    assert well.startswith("ok ")
    assert last == (
        "no data: 12 jobs hold no known GPU; 2 jobs, not known: cpu_cores; 1 job, a; 1 for other reasons "
        "(--all lists them)"
    )
    assert len(words.states(found, everything=True).splitlines()) == 1 + len(found)
    assert words.states(found[1:2], everything=False) == (
        "no data: 1 job holds no known GPU (--all lists them)"
    )


def test_a_reason_stands_under_its_heading() -> None:
    found = [
        state("slurm/1", "firing", window="0123456789abcdef"),
        state("slurm/3", "no_data", "not known: gpu_busy"),
    ]
    heading, _, absent = words.states(found, everything=True).splitlines()
    assert absent.index("not known") == heading.index("REASON") != heading.index("WINDOW")
    heading, absent = words.states(found[1:], everything=True).splitlines()
    assert "WINDOW" not in heading
    assert absent.index("not known") == heading.index("REASON")


def test_no_states_are_told_as_such() -> None:
    assert words.states([], everything=False) == "no rule has looked at a job yet"


@pytest.mark.parametrize("width", [80, 60, 120])
def test_figures_are_wrapped_at_the_width(width: int) -> None:
    lines = words.figures(width).splitlines()
    assert max(map(len, lines)) <= max(width, 71)
    assert len(lines) > len(words.figures(1000).splitlines()) or width == 120


def test_what_others_wrote_is_harmless_in_the_line_about_no_data() -> None:
    text = words.states([state("run/x", "no_data", "cannot be evaluated: \x1b[2J")], everything=False)
    assert "\x1b" not in text
