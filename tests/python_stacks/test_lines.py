"""Line tables, against what the interpreters themselves say of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from expanse_ebpf.python_stacks import lines
from expanse_ebpf.python_stacks.layouts import lines_format
from expanse_ebpf.python_stacks.lines import MAX_LINE, Lines
from tests.python_stacks.interpreters import Interp

FORMS = ("lnotab", "pairs", "locations")

# ---- every interpreter of this machine as the oracle


# Runs under each of them.
ORACLE = (Path(__file__).parent / "line_oracle.py").read_text(encoding="utf-8")


def test_every_line_is_what_the_interpreter_itself_says(interp: Interp) -> None:
    command = [*interp.command, "-I", "-B", "-W", "ignore", "-c", ORACLE]
    result = subprocess.run(command, stdout=subprocess.PIPE, timeout=100, check=True)
    told: dict[str, Any] = json.loads(result.stdout)
    form = lines_format(interp.minor)
    compared: dict[str, int] = {}
    for code in told["codes"]:
        ours = Lines(bytes.fromhex(code["table"]), form, code["first"])
        for source, runs in code["said"].items():
            for start, end, line in runs:
                # Theirs of -1 is None in Python, and 0 is no line of a file.
                expected = line if line is not None and line > 0 else None
                for offset in {start, max(start, end - 2)}:
                    assert ours.line(offset) == expected, (code["name"], source, offset, ours)
                compared[source] = compared.get(source, 0) + 1
    assert max(len(code["table"]) // 2 for code in told["codes"]) > 0x10000
    assert compared["live"] >= 26
    assert compared.get("addr2line", 0) + compared.get("co_lines", 0) > 20_000, compared
    if interp.minor >= 10:
        unlined = sum(line is None for code in told["codes"] for _, _, line in code["said"]["co_lines"])
        assert unlined > 100


# ---- tables by their definitions


Run = tuple[int, int | None]  # code units, line


def encode(form: str, first_line: int, runs: list[Run]) -> bytes:
    table = bytearray()
    if form == "lnotab":
        size = 0
        for units, line in runs:
            assert line is not None
            table += _lnotab_pairs(size, line - first_line)
            first_line, size = line, units * 2
    elif form == "pairs":
        for units, line in runs:
            growth = -128
            if line is not None:
                growth, first_line = line - first_line, line
                while growth > 127 or growth < -127:
                    step = max(-127, min(127, growth))
                    table += bytes((0, step & 255))
                    growth -= step
            table += bytes((min(units, 127) * 2, growth & 255))
            for left in range(units - 127, 0, -127):
                table += bytes((min(left, 127) * 2, 128 if line is None else 0))
    else:
        for units, line in runs:
            for left in range(units, 0, -8):
                code = 15 if line is None else 13 if left % 3 else 14
                table.append(0x80 | code << 3 | min(left, 8) - 1)
                if line is not None:
                    growth, first_line = line - first_line, line
                    table += _chunks(abs(growth) << 1 | (growth < 0))
                    table += _chunks(70) * 3 if code == 14 else b""
    return bytes(table)


def _lnotab_pairs(size: int, growth: int) -> bytes:
    pairs = bytearray()
    while size > 255:
        pairs += bytes((255, 0))
        size -= 255
    while growth > 127 or growth < -128:
        step = max(-128, min(127, growth))
        pairs += bytes((size, step & 255))
        size, growth = 0, growth - step
    return bytes(pairs + bytes((size, growth & 255)))


def _chunks(number: int) -> bytes:
    chunks = bytearray()
    while number > 63:
        chunks.append(64 | number & 63)
        number >>= 6
    return bytes((*chunks, number))


LINES = st.one_of(st.integers(1, 300), st.integers(1, 70_000))
RUNS = st.lists(st.tuples(st.integers(1, 300), LINES | st.none()), max_size=12)


@pytest.mark.parametrize("form", FORMS)
@given(first_line=LINES, runs=RUNS)
def test_what_was_encoded_is_decoded(form: str, first_line: int, runs: list[Run]) -> None:
    if form == "lnotab":
        runs = [(units, line or 1) for units, line in runs]
    code = Lines(encode(form, first_line, runs), form, first_line)
    offset = 0
    for units, line in runs:
        for at in {offset, offset + units, offset + 2 * units - 2}:
            assert code.line(at - at % 2) == line
        offset += 2 * units
    if form == "lnotab":
        assert code.line(offset) == code.line(1 << 40) == (runs[-1][1] if runs else first_line)
    else:
        assert code.line(offset) is code.line(1 << 40) is None
    assert code.line(-1) == code.line(-2) == first_line


@pytest.mark.parametrize("form", FORMS)
@given(first_line=LINES, runs=RUNS, data=st.data())
def test_what_a_cut_table_leaves_open_is_not_known(
    form: str, first_line: int, runs: list[Run], data: st.DataObject
) -> None:
    if form == "lnotab":
        runs = [(units, line or 1) for units, line in runs]
    table = encode(form, first_line, runs)
    whole = Lines(table, form, first_line)
    size = data.draw(st.integers(0, len(table)))
    cut = Lines(table[:size], form, first_line, complete=False)
    end = sum(units for units, _ in runs) * 2 + 4
    answers = [cut.line(offset) for offset in range(0, end, 2)]
    assert all(line in (None, whole.line(2 * at)) for at, line in enumerate(answers))
    # Most of it is there all the same.
    if size == len(table) and form != "lnotab":
        assert answers == [whole.line(offset) for offset in range(0, end, 2)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("limit", "size"), [(10, 12), (11, 12), (8, 100)])
def test_a_table_beyond_the_limit_is_a_cut_one(
    form: str, limit: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = encode(form, 1, [(1, line) for line in range(1, 60)])[:size]
    monkeypatch.setattr(lines, "MAX_TABLE", limit)
    ours, cut = Lines(table, form, 1), Lines(table[:limit], form, 1, complete=False)
    answers = [ours.line(offset) for offset in range(0, 100, 2)]
    assert answers == [cut.line(offset) for offset in range(0, 100, 2)]
    assert answers[0] == 1
    assert answers[-1] is None


def test_entries_of_the_same_line_are_kept_as_one() -> None:
    code = Lines(encode("locations", 1, [(40_000, 7), (1, None)]), "locations", 1)
    assert code.line(79_998) == 7
    assert code.line(80_000) is None
    held = sum(sys.getsizeof(getattr(code, slot)) for slot in Lines.__slots__)
    assert held < 500


# ---- tables that are none


@pytest.mark.parametrize("form", FORMS)
@given(
    table=st.binary(max_size=300),
    first_line=st.integers(-(1 << 70), 1 << 70),
    offsets=st.lists(st.integers(-(1 << 70), 1 << 70) | st.integers(-2, 5000), min_size=1, max_size=8),
    complete=st.booleans(),
)
@example(table=b"\xf0" + b"\x7f" * 200, first_line=1, offsets=[0], complete=True)
@example(table=b"\0\0", first_line=MAX_LINE + 1, offsets=[0], complete=True)
@example(table=b"\xe0\0", first_line=1 << 70, offsets=[0], complete=True)
@example(table=b"\xff\x7f" * 150, first_line=1, offsets=[100], complete=True)
def test_any_bytes_give_a_line_or_none(
    form: str, table: bytes, first_line: int, offsets: list[int], complete: bool
) -> None:
    code = Lines(table, form, first_line, complete)
    for offset in offsets:
        line = code.line(offset)
        assert line is None or 0 < line <= MAX_LINE
        assert code.line(offset) == line


@pytest.mark.parametrize(
    "table",
    [
        b"\x05\xe8\x00",  # does not begin with an entry
        b"\0" * 40,
        b"\xe8",  # ends within the growth of the line
        b"\xe8\x42",
        b"\xe8\x42\x80\x00",  # the next entry begins within it
        b"\xe8\x42\x42\x42\x42\x42\x42\x01",  # no end to it
    ],
)
def test_a_torn_location_gives_no_line(table: bytes) -> None:
    assert Lines(table, "locations", 7).line(0) is None


def test_what_comes_before_a_torn_location_is_known() -> None:
    code = Lines(b"\x80\x00\xd9\x00\x00\xe8\x42", "locations", 7)
    assert [code.line(offset) for offset in (0, 2, 4, 5, 6, 8)] == [7, 8, 8, 8, None, None]


def test_bytes_of_another_form_are_within_bounds() -> None:
    table = encode("locations", 5, [(8, line) for line in range(5, 2000)])
    for form in FORMS:
        assert Lines(table, form, 5).line(-1) == 5
        Lines(table, form, 5).line(3000)
