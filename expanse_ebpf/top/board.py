"""The table on the screen: it changes only what differs and keeps the cursor on its row."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from expanse_ebpf.top import table, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.table import Column

Row = tuple[str, int]  # what a row is of: a job's key and run; a GPU's UUID and 0


def cells(columns: Sequence[Column], row: Values, widths: dict[str, int], dim: bool) -> list[Text]:
    """One row's cells, each as wide as its column."""
    return [
        Text(
            text.fit(table.cell(column, row, widths[column.name]), widths[column.name], column.right),
            style=column.style(row) or ("dim" if dim else ""),
            no_wrap=True,
        )
        for column in columns
    ]


class Board(DataTable[Text]):
    """Rows of one kind, jobs or devices; which kind may change from one picture to the next."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, cursor_type="row", cursor_foreground_priority="renderable")
        self.shown_widths: dict[str, int] = {}  # of the columns on the screen, by name
        self.shown_rows: dict[Row, list[Text]] = {}
        self._shown_titles: list[str] = []
        self._other = False  # the next picture is of other rows
        self._wanted: Row | None = None

    def row_at(self, y: int) -> Row | None:
        """What line `y` is of; None where there is none."""
        order = list(self.shown_rows)
        return order[y] if 0 <= y < len(order) == self.row_count else None

    def turn_to(self, row: Row | None) -> None:
        """The next picture is of other rows, with the cursor on `row`, or on the first."""
        self._other, self._wanted = True, row

    def show(
        self,
        columns: Sequence[Column],
        titles: list[str],
        widths: dict[str, int],
        rows: dict[Row, list[Text]],
    ) -> None:
        """The new picture; `rows` have a cell for each of `columns`."""
        same = widths == self.shown_widths and titles == self._shown_titles
        if same and list(rows) == list(self.shown_rows):
            for y, (row, new) in enumerate(rows.items()):
                for x, cell in enumerate(new):
                    if cell != self.shown_rows[row][x]:
                        self.update_cell_at(Coordinate(y, x), cell)
        else:
            self._rebuild(columns, titles, widths, rows)
        self.shown_widths, self._shown_titles, self.shown_rows = widths, titles, rows

    def _rebuild(
        self,
        columns: Sequence[Column],
        titles: list[str],
        widths: dict[str, int],
        rows: dict[Row, list[Text]],
    ) -> None:
        """All rows anew, with the cursor on the row that it was on."""
        at, scroll = self.cursor_row, self.scroll_y
        selected = self.row_at(at)
        if self._other:
            at, scroll, selected = 0, 0.0, self._wanted
            self._other = False
        self.clear(columns=True)
        for column, title in zip(columns, titles, strict=True):
            width = widths[column.name]
            self.add_column(Text(title, justify="right" if column.right else "left"), width=width)
        for new in rows.values():
            self.add_row(*new)
        order = list(rows)
        if selected in rows:
            self.move_cursor(row=order.index(selected), scroll=False)
        elif order:
            self.move_cursor(row=min(at, len(order) - 1), scroll=False)
        self.scroll_to(y=scroll, animate=False)
