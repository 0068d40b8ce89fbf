"""Which source line an instruction belongs to: the line tables of code objects, in their three forms.

A table is copied from the memory of somebody else's process, so it may be torn, cut or made on purpose:
whatever it holds, the answer is a line or None, in bounded time and memory.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterator

MAX_TABLE = 4 << 20  # bytes that are looked at: some 800,000 instructions of 3.11 and later
MAX_LINE = 0x7FFFFFFF  # CPython keeps lines in a C int
NO_LINE = 0  # in what the readers below yield

_UNIT = 2  # bytes of a code unit
# Codes of PEP 657's entries: below 10 the line stays, 10 to 12 move it on by 0 to 2.
_ONE_LINE, _NO_COLUMNS, _NO_LOCATION = 10, 13, 15
_MAX_CHUNKS = 6  # of 6 bits each: as many as a C int can need


class Lines:
    """The lines of one code object, from its line table and co_firstlineno.

    `form` is what layouts.lines_format() says: lnotab (3.8, 3.9), pairs (3.10) or locations (3.11 on).
    `complete` is False where only the beginning of the table is there; what the rest of it could still
    change is then not known.
    """

    __slots__ = ("_complete", "_first_line", "_read", "_runs", "_table")

    def __init__(self, table: bytes, form: str, first_line: int, complete: bool = True) -> None:
        self._read = _READERS[form]
        self._table = table[:MAX_TABLE]
        self._first_line = first_line
        self._complete = complete and len(table) <= MAX_TABLE
        self._runs: array[int] | None = None

    def line(self, offset: int) -> int | None:
        """The line of the instruction at `offset`, in bytes from the beginning of the bytecode.

        A negative offset is a frame that has not begun: it is at the first line. None: no line (PEP 626;
        also 0, which the first instruction of a module has from 3.11 on), or beyond what is known.
        """
        if offset < 0:
            return self._first_line if 0 < self._first_line <= MAX_LINE else None
        if self._runs is None:
            self._runs = _packed(self._read(self._table, self._first_line, self._complete))
            self._table = b""  # the runs are no longer than it was, as a rule
        found = bisect_right(self._runs, offset << 32 | 0xFFFFFFFF)
        return (self._runs[found - 1] & 0xFFFFFFFF or None) if found else None


def _packed(runs: Iterator[tuple[int, int]]) -> array[int]:
    """Runs of instructions of the same line, as (first offset << 32 | line), ascending.

    Tables have an entry for each change of column as well: of 3.11 to 3.13's own library 106 to 147
    bytes for each code object, but only 12 runs.
    """
    packed: list[int] = []
    before = -1
    for start, line in runs:
        known = line if 0 < line <= MAX_LINE else NO_LINE
        if packed and packed[-1] >> 32 == start:
            packed[-1] = start << 32 | known  # what came before it was empty
        elif known != before:
            packed.append(start << 32 | known)
        before = known
    return array("Q", packed)


def _lnotab(table: bytes, line: int, complete: bool) -> Iterator[tuple[int, int]]:
    """Growth of offset and of line, the latter signed (CPython 3.9, Objects/lnotab_notes.txt).

    Nothing tells the end of the bytecode: the last line goes on.
    """
    start = 0
    yield start, line
    for size, growth in zip(table[::2], table[1::2], strict=False):
        start += size
        line += growth - 256 if growth > 127 else growth
        yield start, line
    if not complete:  # the next pair may change the line at this very offset
        yield start, NO_LINE


def _pairs(table: bytes, line: int, complete: bool) -> Iterator[tuple[int, int]]:
    """Length of a run in bytes and growth of line before it, -128 for no line (PEP 626)."""
    start = 0
    for size, growth in zip(table[::2], table[1::2], strict=False):
        if growth == 0x80:
            yield start, NO_LINE
        else:
            line += growth - 256 if growth > 127 else growth
            yield start, line
        start += size
    yield start, NO_LINE


def _locations(table: bytes, line: int, complete: bool) -> Iterator[tuple[int, int]]:
    """Entries of one byte `1 code:4 length-1:3` and the rest of a location (PEP 657, Objects/locations.md).

    Only the first byte of an entry has its highest bit set, so what is of no use here is stepped over.
    """
    start = 0
    for position, first in enumerate(table):
        if first < 0x80:
            if position == 0:  # no beginning of an entry: this is no line table
                break
            continue
        code = first >> 3 & 15
        if code == _NO_LOCATION:
            yield start, NO_LINE
        else:
            if code >= _NO_COLUMNS:
                growth = _signed(table[position + 1 : position + 1 + _MAX_CHUNKS])
                if growth is None:
                    break
                line += growth
            elif code > _ONE_LINE:
                line += code - _ONE_LINE
            yield start, line
        start += ((first & 7) + 1) * _UNIT
    yield start, NO_LINE


def _signed(chunks: bytes) -> int | None:
    """A number in chunks of 6 bits, the lowest first, its sign in the lowest bit; None: it does not end."""
    value = 0
    for place, chunk in enumerate(chunks):
        if chunk > 0x7F:  # the next entry
            return None
        value |= (chunk & 63) << 6 * place
        if not chunk & 64:
            return -(value >> 1) if value & 1 else value >> 1
    return None


_READERS = {"lnotab": _lnotab, "pairs": _pairs, "locations": _locations}
