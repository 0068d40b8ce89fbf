from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.top import text
from expanse_ebpf.top.text import Locale


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("train-1", "train-1"),
        ("обучение", "обучение"),
        ("\x1b[2Jx", "\ufffd[2Jx"),
        ("a\nb\tc\x7f\x9b", "a\ufffdb\ufffdc\ufffd\ufffd"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),  # a right-to-left override
        ("\ud800", "\ufffd"),
    ],
)
def test_clean(raw: str, shown: str) -> None:
    assert text.clean(raw) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_clean_text_cannot_steer_a_terminal(raw: str) -> None:
    shown = text.clean(raw)
    assert not any(unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") for c in shown)
    assert text.plain_ascii(shown).isascii()


@given(st.text(), st.integers(0, 30), st.booleans())
def test_fit_gives_exactly_the_width(raw: str, width: int, right: bool) -> None:
    clean = text.clean(raw)
    assert text.cell_width(text.fit(clean, width, right)) == width
    assert len(text.plain_ascii(text.fit(clean, width, right))) >= width


@pytest.mark.parametrize(
    ("function", "value", "shown"),
    [
        (text.number, 1.005, "1.00"),
        (text.count, 0, "0"),
        (text.count, 999.4, "999"),
        (text.count, 1234, "1.2k"),
        (text.count, 123_456, "123k"),
        (text.count, 999_900, "1.0M"),
        (text.size, 0, "0 B"),
        (text.size, 1536, "1.5 KiB"),
        (text.size, 412 << 20, "412 MiB"),
        (text.size, 2**80, "1073741824 PiB"),
        (text.size_rate, 3e6, "2.9 MiB/s"),
        (text.percent, 0.256, "25.6%"),
        (text.nanoseconds, 950, "950 ns"),
        (text.nanoseconds, 1500, "1.5 µs"),
        (text.nanoseconds, 112_000, "112 µs"),
        (text.nanoseconds, 2.5e9, "2.50 s"),
        (text.watts, 511.6, "512 W"),
        (text.joules, 950, "950 J"),
        (text.joules, 12_340, "12.3 kJ"),
        (text.joules, 123_400_000, "123 MJ"),
        (text.joules, 5e15, "5000 TJ"),
    ],
)
def test_units(function: object, value: float, shown: str) -> None:
    assert function(value) == shown  # type: ignore[operator]
    assert function(None) == text.UNKNOWN  # type: ignore[operator]


@pytest.mark.parametrize(
    ("environment", "utf8"),
    [
        ({}, False),
        ({"LANG": "en_US.UTF-8"}, True),
        ({"LANG": "C.utf8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": "C"}, False),
        ({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, True),
        ({"LANG": "en_US.UTF-8", "LC_ALL": ""}, True),
        ({"LANG": "de_DE.ISO-8859-1"}, False),
    ],
)
def test_locale(environment: dict[str, str], utf8: bool) -> None:
    assert text.locale_is_utf8(environment) is utf8


def test_sparkline() -> None:
    assert Locale().sparkline([0, 1, None, 2], 6) == "  ▁▄ ▇"
    assert Locale(ascii=True).sparkline([0, 1, None, 2], 4) == "_= #"
    assert Locale().sparkline([0, 0], 2) == "▁▁"
    assert Locale().sparkline([], 3) == "   "
    assert Locale().sparkline([5, 1, 1], 2) == "▇▇"


def test_a_sum_of_nothing_known_is_not_known() -> None:
    assert text.total([None, None]) is None
    assert text.total([None, 2.0]) == 2


def test_long_lines_are_broken_between_their_parts() -> None:
    line = "GPU 0 · NVIDIA H200 · serial 1654"
    assert text.wrap(line, 40) == [line]
    assert text.wrap(line, 33) == [line]
    assert text.wrap(line, 32) == ["GPU 0 · NVIDIA H200", "  serial 1654"]
    assert text.wrap(line, 18) == ["GPU 0", "  NVIDIA H200", "  serial 1654"]
    assert text.wrap("  a conflict in words · b", 12) == ["  a conflict", "    in words", "    b"]
    assert text.wrap("обучение модели", 8) == ["обучение", "  модели"]
    assert text.wrap("one-word-that-fits-nowhere", 5) == ["one-word-that-fits-nowhere"]
    assert text.wrap("", 5) == [""]
