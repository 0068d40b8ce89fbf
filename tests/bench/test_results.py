"""The records of a bench: written line by line, read back whole, whatever ended it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.bench.results import (
    FILE,
    End,
    Machine,
    Record,
    Results,
    Role,
    Run,
    Samples,
    Session,
    State,
    Usage,
    Windows,
    line,
    parse,
)
from expanse_ebpf.errors import ConfigError, UnavailableError

STATE = State(0.5, None, 60.5, None, 0.0, 0.1)
RUN = Run(
    *("loop", "near", "arm", 1, 1, 0, 1_700_000_000_000_000_000, 10.5, 12.25, STATE, 9.0, 1 << 30, True),
    collector=Usage(0.1, 40 << 20, None, 4096),
    samples=Samples(1.0, 12, 12, 1.001, 0.5, 40),
    windows=Windows(1, 3.5, 16),
    missing={"bpf_s_per_s": "not looked at"},
)
MACHINE = Machine(
    *(1, "node", "6.18.0", "x86_64", "a CPU", 2, 1 << 30, "kvm", False, None, None, True, ("H100",), "580"),
    python="3.11",
    expanse="1",
    tools={"py-spy": "0.4"},
)
RECORDS: list[Record] = [MACHINE, Session(1, 7, 40, False), RUN, End("loop", "near", "agreed")]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_is_read_as_it_was_written(record: Record) -> None:
    assert parse(line(record)) == record
    assert "\n" not in line(record)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "walk"}, "no record of a kind"),
        ({"seconds": "ten"}, "seconds: 'ten' is not valid"),
        ({"seconds": True}, "seconds: True"),
        ({"seconds": 10**400}, "seconds: 10"),
        ({"job_memory_peak_bytes": 10**400}, "job_memory_peak_bytes: 10"),
        ({"pair": 1.5}, "pair: 1.5"),
        ({"pair": True}, "pair: True"),
        ({"role": "leg"}, "role: 'leg'"),
        ({"watched": 1}, "watched: 1"),
        ({"state": 1}, "an object is wanted for state"),
        ({"collector": {"cpu_s": 1.0}}, "missing"),
        ({"missing": {"x": 1}}, "missing: "),
        ({"colour": "red"}, "'colour' is not known in run"),
    ],
)
def test_what_is_no_record_is_refused(change: dict[str, object], message: str) -> None:
    value = {**json.loads(line(RUN)), **change}
    with pytest.raises(ValueError, match=message):
        parse(json.dumps(value))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda e: st.lists(e) | st.dictionaries(st.text(), e),
    )
)
def test_any_json_is_a_record_or_a_value_error(value: object) -> None:
    for kind in ("machine", "session", "run", "end"):
        text = json.dumps({"kind": kind, **value} if isinstance(value, dict) else value)
        with pytest.raises(ValueError):  # noqa: PT011 (what it says differs)
            parse(text)


def written(folder: Path, *records: Record) -> Results:
    results = Results(folder)
    for record in records:
        results.add(record)
    return results


def test_a_folder_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = written(tmp_path, *RECORDS)
    read = Results.read(tmp_path)
    assert read.records == made.records == RECORDS
    assert read.machine == MACHINE
    assert read.cells() == [("loop", "near")]
    assert read.end("loop", "near") == RECORDS[-1]
    assert read.end("loop", "far") is None


def test_a_line_that_was_being_written_is_left_out_and_written_over(tmp_path: Path) -> None:
    written(tmp_path, MACHINE, RUN)
    file = tmp_path / FILE
    file.write_bytes(file.read_bytes()[:-9])
    results = Results.read(tmp_path)
    assert results.records == [MACHINE]
    results.add(RECORDS[-1])
    assert Results.read(tmp_path).records == results.records == [MACHINE, RECORDS[-1]]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    written(tmp_path, MACHINE, RUN)
    file = tmp_path / FILE
    file.write_text(file.read_text().replace('"pair": 1', '"pair": "x"'))
    with pytest.raises(ConfigError, match=rf"{FILE}, line 2: pair: 'x' is not valid"):
        Results.read(tmp_path)
    file.write_bytes(b"\xff\n")
    with pytest.raises(ConfigError, match="decode"):
        Results.read(tmp_path)


def test_a_folder_without_a_bench_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no bench was run here"):
        Results.read(tmp_path)


def run(role: Role, pair: int, seconds: float | None = 10.0, attempt: int = 1) -> Run:
    return replace(RUN, role=role, pair=pair, seconds=seconds, attempt=attempt)


@pytest.mark.parametrize(
    ("runs", "pairs"),
    [
        ([run("off", 1), run("arm", 1)], [(1, 1)]),
        ([run("arm", 1), run("off", 1)], [(1, 1)]),
        ([run("off", 1)], []),
        ([run("warm_up", 0), run("warm_up", 0)], []),
        ([run("off", 1), run("arm", 1, None)], []),
        # Begun anew: the first attempt's half does not count.
        ([run("off", 1), run("arm", 1, None), run("arm", 1, attempt=2)], []),
        ([run("off", 1), run("arm", 1, attempt=2), run("off", 1, attempt=2)], [(2, 2)]),
        ([run("off", 2), run("arm", 2), run("off", 1), run("arm", 1)], [(1, 1), (1, 1)]),
    ],
)
def test_pairs_are_of_one_attempt_and_complete(
    tmp_path: Path, runs: list[Run], pairs: list[tuple[int, int]]
) -> None:
    results = written(tmp_path, *runs)
    found = results.pairs("loop", "near")
    assert [(off.attempt, arm.attempt) for off, arm in found] == pairs
    assert all((off.role, arm.role) == ("off", "arm") for off, arm in found)
    assert results.pairs("loop", "far") == []


def test_json_that_is_nested_without_end_is_refused() -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        parse('{"kind": "run", "pair": ' + "[" * 100_000 + "]" * 100_000 + "}")


def test_an_end_is_one_only_until_the_bench_goes_on(tmp_path: Path) -> None:
    end = End("loop", "near", "max_pairs")
    assert written(tmp_path, run("off", 1), end).end("loop", "near") == end
    assert written(tmp_path, run("off", 2)).end("loop", "near") is None
    again = Results.read(tmp_path)
    assert again.end("loop", "near") is None
    again.add(end)
    assert again.end("loop", "near") == end


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine\n")
    (tmp_path / FILE).symlink_to(tmp_path / "other")
    with pytest.raises(UnavailableError, match=FILE):
        Results(tmp_path).add(MACHINE)
    assert (tmp_path / "other").read_text() == "mine\n"
