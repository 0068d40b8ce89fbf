"""Names as they enter the data model."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.text import cell_width, clean, cut
from expanse_ebpf.wire.collector_pb2 import Process

REPLACEMENT = "\ufffd"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"train.py", "train.py"),
        ("обучение".encode(), "обучение"),
        ("обучение модели".encode()[:15], "обучени" + REPLACEMENT),
        (b'a"b\\c', 'a"b\\c'),
        (b"one\ntwo", "one␊two"),
        (b"\x1b[2J\x07", "␛[2J␇"),
        ("\x9b31m", REPLACEMENT + "31m"),
        (b"\0\0\0", ""),
        (b"a\0b\0", "a␀b"),
        (b"\x7f", "␡"),
        ("x\N{RIGHT-TO-LEFT OVERRIDE}y", f"x{REPLACEMENT}y"),
        (os.fsdecode(b"caf\xe9"), "caf" + REPLACEMENT),
        ("\ud800", "?"),
        (b"", ""),
    ],
)
def test_form(data: bytes | str, text: str) -> None:
    assert clean(data) == text


def test_names_that_differ_in_a_control_character_stay_different() -> None:
    assert len({clean(b"job" + bytes([code]) + b"x") for code in range(0x21)}) == 0x21


def test_a_cut_text_says_so() -> None:
    assert clean("я" * 300, 10) == "я" * 9 + "…"
    assert clean("я" * 10, 10) == "я" * 10


@given(st.one_of(st.binary(max_size=2000), st.text(max_size=500)), st.integers(1, 300))
def test_anything_can_be_sent_and_shown(data: bytes | str, limit: int) -> None:
    text = clean(data, limit)
    assert len(text) <= limit
    assert Process.FromString(Process(command=text).SerializeToString()).command == text
    assert not any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in text)
    assert clean(text, limit) == text


@given(st.text(), st.integers(0, 30))
def test_a_line_is_cut_only_where_it_is_too_wide_and_says_so(line: str, width: int) -> None:
    kept = cut(line, width)
    if cell_width(line) <= width:
        assert kept == line
    else:
        assert cell_width(kept) <= width
        assert kept == (line[: len(kept) - 1] + "…" if width else "")


def test_wide_letters_take_two_columns() -> None:
    assert cut("深い学習", 8) == "深い学習"
    assert cut("深い学習", 7) == "深い学…"
    assert cut("深い学習", 6) == "深い…"


def test_name_that_the_kernel_cut_within_a_letter() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, 'обучение модели'.encode(), 0, 0, 0);"
        "print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={"PYTHONUTF8": "1"}
    )
    try:
        assert child.stdout is not None
        child.stdout.readline()
        with open(f"/proc/{child.pid}/comm", "rb") as file:
            comm = file.read().rstrip(b"\n")
        assert len(comm) == 15
        assert clean(comm) == "обучени" + REPLACEMENT
    finally:
        child.communicate()
