"""Names as they lie in the memory of an interpreter."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.python_stacks.text import decode
from expanse_ebpf.wire.collector_pb2 import Process

COPIED = 1020  # bytes of one string that the kernel side copies at most
HEADERS = {True: 48, False: 72} if sys.version_info < (3, 12) else {True: 40, False: 56}


def in_memory(text: str) -> tuple[bytes, int, int, bool]:
    """The characters of `text` as this very interpreter keeps them (PEP 393), its length, kind and flag."""
    widest = max(map(ord, text), default=0)
    kind = 1 if widest < 0x100 else 2 if widest < 0x10000 else 4
    raw = ctypes.string_at(id(text) + HEADERS[text.isascii()], len(text) * kind)
    return raw, len(text), kind, text.isascii()


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("DataLoader.__next__", "DataLoader.__next__"),
        ("<listcomp>", "<listcomp>"),
        ("café.fonction", "café.fonction"),
        ("ÿ", "ÿ"),
        ("训练.前向", "训练.前向"),
        ("/data/😀/é中.py", "/data/😀/é中.py"),
        ("𠀋文", "𠀋文"),
        ("a\nb\x1b[2J\x7f", "a␊b␛[2J␡"),
        ("\x9b31m", "\ufffd31m"),
        ("x\N{RIGHT-TO-LEFT OVERRIDE}y中", "x\ufffdy中"),
        ("", ""),
        # Lone surrogates: of file names that are no UTF-8, and others.
        (os.fsdecode(b"/data/caf\xe9.py"), "/data/caf\ufffd.py"),
        (b"/data/caf\xc3\xa9.py".decode("ascii", "surrogateescape"), "/data/café.py"),
        ("\ud800", "?"),
        ("\ud83d\ude00", "??"),  # two of them are not the letter that UTF-16 writes so
        ("😀\ud83d\ude00", "😀??"),
    ],
)
def test_text_of_this_interpreter(text: str, shown: str) -> None:
    assert decode(*in_memory(text), cut=False) == shown


@pytest.mark.parametrize(("letter", "kept"), [("f", 1020), ("é", 1020), ("中", 510), ("😀", 255)])
def test_long_text_is_cut_where_the_copy_ends_and_says_so(letter: str, kept: int) -> None:
    raw, length, kind, ascii = in_memory(letter * 3000)
    assert decode(raw[:COPIED], length, kind, ascii, cut=True) == letter * kept + "…"
    assert decode(raw[:COPIED], length, kind, ascii, cut=False) == letter * kept + "…"
    assert decode(raw[:COPIED], kept, kind, ascii, cut=False) == letter * kept
    assert decode(raw[:COPIED], kept, kind, ascii, cut=True) == letter * kept + "…"
    assert decode(raw, length, kind, ascii, cut=False) == letter * 1020 + "…"


def test_half_a_character_is_none() -> None:
    raw, length, kind, ascii = in_memory("中文字")
    assert decode(raw[:5], length, kind, ascii, cut=True) == "中文…"
    raw, length, kind, ascii = in_memory("😀😃")
    assert decode(raw[:7], length, kind, ascii, cut=True) == "😀…"
    assert decode(raw[:3], length, kind, ascii, cut=True) == "…"


def test_only_as_many_characters_as_the_text_has() -> None:
    assert decode(b"leaf_a\0garbage", 6, 1, True, cut=False) == "leaf_a"


@pytest.mark.parametrize(
    ("raw", "length", "kind", "ascii", "text"),
    [
        (b"caf\xe9", 4, 1, True, "caf\ufffd"),  # not what its flag says
        (b"\xff\xff\xff\xff\x41\0\0\0", 2, 4, False, "\ufffdA"),  # beyond Unicode
        (b"\0\0\x11\0", 1, 4, False, "\ufffd"),
        (b"abcd", 4, 0, True, ""),
        (b"abcd", 4, 3, False, ""),
        (b"abcd", -1, 1, True, ""),
        (b"\0\0\0\0", 4, 1, True, ""),
    ],
)
def test_torn_text(raw: bytes, length: int, kind: int, ascii: bool, text: str) -> None:
    assert decode(raw, length, kind, ascii, cut=False) == text


@given(
    raw=st.binary(max_size=1100),
    length=st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(0, 1100),
    kind=st.integers(0, 7),
    ascii=st.booleans(),
    cut=st.booleans(),
)
def test_any_bytes_can_be_sent_and_shown(raw: bytes, length: int, kind: int, ascii: bool, cut: bool) -> None:
    text = decode(raw, length, kind, ascii, cut)
    assert len(text) <= COPIED + 1
    assert Process.FromString(Process(command=text).SerializeToString()).command == text
    assert not any(ord(letter) < 0x20 or 0x7F <= ord(letter) < 0xA0 for letter in text)


@given(st.text(st.characters(exclude_categories=["C", "Z"]), max_size=255))
def test_printable_text_is_exact(text: str) -> None:
    assert decode(*in_memory(text), cut=False) == text
