"""CPU lists."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.kernel.cpus import online, parse_cpu_list


@pytest.mark.parametrize(
    ("text", "cpus"),
    [
        ("0-3,8-11,64", [0, 1, 2, 3, 8, 9, 10, 11, 64]),
        ("0", [0]),
        ("1,3", [1, 3]),
        ("0-1\n", [0, 1]),
        ("", []),
        ("\n", []),
        ("3-1", []),
        ("2,2,1", [1, 2]),
        ("0,x,-1,2-,7", [0, 7]),
        ("0-99999999999", []),
        ("²", []),
    ],
)
def test_form(text: str, cpus: list[int]) -> None:
    assert parse_cpu_list(text) == cpus


@given(st.sets(st.integers(0, 5000), min_size=1))
def test_every_list_comes_back(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(map(str, cpus))) == sorted(cpus)


@given(st.text(max_size=300))
def test_anything_is_bounded(text: str) -> None:
    cpus = parse_cpu_list(text)
    assert cpus == sorted(set(cpus))
    assert len(cpus) <= 65536


def test_cpus_that_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "online"
    for text, cpus in (("0-1\n", [0, 1]), ("0-3\n", [0, 1, 2, 3]), ("0-1\n", [0, 1])):
        file.write_text(text)
        assert online(str(file)) == cpus


def test_this_machine() -> None:
    assert set(os.sched_getaffinity(0)) <= set(online())


def test_without_the_file(tmp_path: Path) -> None:
    assert online(str(tmp_path / "none")) == list(range(os.cpu_count() or 1))
