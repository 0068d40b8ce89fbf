"""Tables in general: columns with a rank, and which of them, how wide, fit into a terminal.

The first column says which row it is: it stays whatever happens, and gives way in width when nothing else
can.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from expanse_ebpf.top import text
from expanse_ebpf.top.deltas import Values

_MOST_TEXT = 20  # columns of a terminal, in print, for a name that somebody chose
_GAP = 2  # blanks between columns
_LEAST = 4  # of the first column


@dataclass(frozen=True, slots=True)
class Column:
    """One column: how a row's value is shown, what it is sorted by, and how dear it is."""

    name: str
    title: str
    width: int  # columns of the terminal, as a rule
    show: Callable[[Values], str]
    order: Callable[[Values], Any]  # None sorts last, numbers downwards, text upwards
    rank: int  # columns of a high rank go first where there is no room
    right: bool = True
    needs: Callable[[Values], Any] | None = None  # shown only when this is known of at least one row
    least: int | None = None  # what it can do with; with it the column takes what room there is
    usual: Callable[[Sequence[Values]], int] | None = None  # a width that goes by the rows
    shorten: Callable[[Values, int], str] | None = None  # `show` for so many columns of the terminal
    style: Callable[[Values], str] = lambda _: ""  # in the live view


Need = Callable[[Column, Sequence[Values]], int]


def usual(column: Column, rows: Sequence[Values]) -> int:
    """The width of a column whose figures come and go: it should not jump with them."""
    return column.usual(rows) if column.usual else column.width


def as_wide(show: Callable[[Values], str], least: int, most: int) -> Callable[[Sequence[Values]], int]:
    """A column as wide as what is in it, for what changes seldom."""

    def width(rows: Sequence[Values]) -> int:
        needed = max((text.cell_width(show(row)) for row in rows), default=0)
        return max(least, min(most, needed))

    return width


def printed(column: Column, rows: Sequence[Values]) -> int:
    """The width that a column has in print, with just these values."""
    return max([len(column.title), *(text.cell_width(column.show(row)) for row in rows)])


def cell(column: Column, row: Values, width: int) -> str:
    """The row's value in at most about `width` columns."""
    return column.shorten(row, width) if column.shorten else column.show(row)


def choose(
    columns: Sequence[Column],
    rows: Sequence[Values],
    width: int | None,
    keep: str = "",
    need: Need = usual,
) -> tuple[list[Column], list[Column]]:
    """The columns that make sense for these rows, and fit into `width` columns of the terminal; the others.

    The first, and the one that is named `keep`, are always there.
    """
    chosen = [c for c in columns if not c.needs or any(c.needs(row) is not None for row in rows)]
    left_out: list[Column] = []
    while width is not None and sum(_least(c, need(c, rows)) + _GAP for c in chosen) - _GAP > width:
        spare = [c for c in chosen if c is not columns[0] and c.name != keep]
        if not spare:
            break
        left_out.append(max(spare, key=lambda c: (c.rank, c.width)))
        chosen.remove(left_out[-1])
    return chosen, sorted(left_out, key=list(columns).index)


def left_out_line(left_out: Sequence[Column]) -> str:
    """Which columns a wider terminal would show; empty for none."""
    titles = ", ".join(column.title for column in left_out)
    return f"not shown for want of room: {titles}" if titles else ""


def _least(column: Column, needed: int) -> int:
    """What a column can do with where there is little room."""
    return needed if column.least is None else min(needed, column.least)


def widths(
    columns: Sequence[Column], rows: Sequence[Values], room: int | None, need: Need = usual
) -> dict[str, int]:
    """The width of each column; in all, with two blanks between them, no more than `room`, as a rule."""
    needed = {column.name: need(column, rows) for column in columns}
    if room is None:
        return needed
    found = {column.name: _least(column, needed[column.name]) for column in columns}
    spare = room - sum(width + _GAP for width in found.values()) + _GAP
    for name in (column.name for column in columns if column.least is not None):
        if spare > 0:
            more = min(spare, needed[name] - found[name])
            found[name] += more
            spare -= more
    if spare < 0:  # the name of the row gives way, the figures do not
        found[columns[0].name] = max(_LEAST, found[columns[0].name] + spare)
    return found


def lines(
    columns: Sequence[Column], rows: Sequence[Values], width: int | None, keep: str = ""
) -> tuple[list[str], str]:
    """The table in print, its titles first, and a line that says what has no room in it."""

    def need(column: Column, rows: Sequence[Values]) -> int:
        needed = printed(column, rows)
        a_text = not column.right and column.least is None
        return min(needed, max(column.width, _MOST_TEXT)) if a_text and width is not None else needed

    chosen, left_out = choose(columns, rows, width, keep, need)
    found = widths(chosen, rows, width, need)
    cells = [[c.title for c in chosen]]
    cells += [[cell(c, row, found[c.name]) for c in chosen] for row in rows]
    gap = " " * _GAP
    drawn = [
        gap.join(text.fit(one, found[c.name], c.right) for one, c in zip(row, chosen, strict=True))
        for row in cells
    ]
    return drawn, left_out_line(left_out)
