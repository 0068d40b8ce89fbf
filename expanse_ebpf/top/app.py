"""The live view: a table of jobs or of GPUs, all about a chosen one, and what the collector itself costs."""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.message import Message
from textual.widgets import DataTable, Input, Static

from expanse_ebpf.errors import ExpanseError, UnavailableError
from expanse_ebpf.top import columns, detail, gpu_panel, gpus, plain, table, text
from expanse_ebpf.top.board import Board, Row, cells
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.feed import HISTORY, Feed
from expanse_ebpf.top.help import Help
from expanse_ebpf.top.rates import Rates, set_age
from expanse_ebpf.wire.collector_pb2 import ProcessesReply, Report

RETRY_S = 1.0
_LEAST_HEIGHT = 12  # of a window in which there is room to say what has no room
_MOST_EVENTS = 1000  # of GPUs, kept for the panels


class Arrived(Message):
    """A report has come."""

    def __init__(self, report: Report, age_s: float | None) -> None:
        self.report = report
        self.age_s = age_s
        super().__init__()


class Lost(Message):
    """The feed ended; it will be tried again."""

    def __init__(self, reason: str) -> None:
        self.reason = reason
        super().__init__()


class Processes(Message):
    """The processes of a job, or why there are none."""

    def __init__(self, job: Row, reply: ProcessesReply | str) -> None:
        self.job = job
        self.reply = reply
        super().__init__()


class TopApp(App[None]):
    """The live view of one node. What ended it against the user's will is in `failure`."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { layout: vertical; overflow: hidden hidden; }
    #head, #cost, #note, #room { height: 1; width: 100%; padding: 0 1; }
    #head, #cost, #note, #room { text-wrap: nowrap; text-overflow: ellipsis; }
    #head { text-style: bold; background: $primary-muted; color: $text; }
    #cost { color: $text-muted; background: $panel; }
    #room { display: none; color: $text-muted; }
    #note { display: none; color: $text-warning; background: $warning-muted; }
    #room.shown, #note.shown { display: block; }
    #rows { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; background: $background; }
    #rows > .datatable--header { background: $background; color: $text-muted; text-style: bold; }
    #rows > .datatable--cursor { background: $primary 30%; text-style: none; }
    #detail { display: none; height: 45%; border-top: solid $primary; padding: 0 1; }
    #detail { scrollbar-size-vertical: 1; }
    #detail.shown { display: block; }
    #detail Static { width: auto; height: auto; }
    #filter { display: none; height: 1; border: none; padding: 0 1; background: $boost; }
    #filter.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c,ctrl+q", "quit", show=False, priority=True),
        Binding("slash", "filter", "filter"),
        Binding("space", "pause", "pause"),
        Binding("question_mark", "help", "help"),
        Binding("escape", "leave", "back"),
        Binding("g", "devices", "GPUs or jobs"),
        Binding("left_curly_bracket,left_square_bracket", "page(-1)", "page up in the panel"),
        Binding("right_curly_bracket,right_square_bracket", "page(1)", "page down in the panel"),
        Binding("t", "light", "light or dark"),
        Binding("r", "reverse", "reverse"),
        *(
            Binding(key, f"sort('{name}')", name)
            for key, name in (
                ("c", "cpu"),
                ("m", "memory"),
                ("i", "io"),
                ("s", "switches"),
                ("w", "wait"),
                ("p", "processes"),
                ("n", "key"),
                ("u", "user"),
                ("y", "python"),
                ("h", "gpus"),
                ("b", "gpu"),
                ("a", "sm"),
                ("v", "gpu_memory"),
                ("e", "power"),
            )
        ),
    ]

    def __init__(
        self,
        feed: Feed,
        keep: Callable[[Report], Report] = lambda report: report,
        require: Callable[[], None] = lambda: None,
        sort: str = "cpu",
        devices: bool = False,
    ) -> None:
        super().__init__()
        self.failure: ExpanseError | None = None
        self.feed = feed
        self.keep = keep
        self.require = require
        self.sort_by = sort
        self.devices = devices  # the GPUs are on the screen, not the jobs
        self.reversed = False
        self.paused = False
        self.filter_text = ""
        self.snapshot: Values | None = None  # the newest
        self.drawn: Values | None = None  # the one on the screen, older while paused
        self.open_row: Row | None = None  # the one whose panel is open
        self.lost = ""
        self._rates = Rates()
        self._history: dict[Row, deque[float | None]] = {}
        self._last: tuple[str, int] = ("", -1)  # boot and sequence of the newest report
        self._interval_s = 0.0
        self._arrived_at: float | None = None
        self._age_then: float | None = None
        self._events: deque[Values] = deque(maxlen=_MOST_EVENTS)
        self._left_at: Row | None = None  # where the cursor was in the other view
        self._processes: ProcessesReply | str | None = None
        self._process_rates = detail.ProcessRates()
        self._asking = False
        self._draw_pending = False
        self._stop = threading.Event()

    # ---- life

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static(id="head", markup=False)
        yield Board(id="rows")
        with VerticalScroll(id="detail", can_focus=False):
            yield Static(id="detail-text", markup=False)
        yield Static(id="room", markup=False)
        yield Static(id="note", markup=False)
        yield Input(id="filter", placeholder="filter", compact=True)
        yield Static(id="cost", markup=False)

    def on_mount(self) -> None:
        """Begin to follow the feed."""
        self.board.focus()
        self._draw()
        self.set_interval(1.0, self._look_at_age)
        threading.Thread(target=self._follow, daemon=True).start()
        if threading.current_thread() is threading.main_thread():
            import asyncio

            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.exit)

    def on_unmount(self) -> None:
        """Let the thread go."""
        self._stop.set()

    @property
    def board(self) -> Board:
        """The table of jobs or GPUs."""
        return self.screen_stack[0].query_one("#rows", Board)

    def _follow(self) -> None:
        """Runs in a thread of its own: reports in, again and again."""
        while not self._stop.is_set():
            try:
                for report in self.feed.reports(HISTORY, self._stop.is_set):
                    self.post_message(Arrived(report, self.feed.age(report)))
                    if self._stop.is_set():
                        return
                self.post_message(Lost(f"{self.feed.where}: the reports ended"))
            except ExpanseError as error:
                self.post_message(Lost(str(error)))
            self._stop.wait(RETRY_S)

    def on_arrived(self, message: Arrived) -> None:
        """Take a report in; several at once are drawn once."""
        report = message.report
        mark = (report.node.boot_id, report.sequence)
        if mark[0] == self._last[0] and mark[1] <= self._last[1]:
            return  # known from before the connection was lost
        self._last = mark
        self.lost = ""
        self.snapshot = self._rates.add(self.keep(report), message.age_s)
        self._events.extend(self.snapshot["gpu_events"])
        self._interval_s = report.interval_ns / 1e9
        self._arrived_at, self._age_then = time.monotonic(), message.age_s
        seen: set[Row] = set()
        for job in self.snapshot["jobs"]:
            seen.add(_run(job))
            self._history.setdefault(_run(job), deque(maxlen=HISTORY)).append(job["cpu_cores"])
        for gone in self._history.keys() - seen:
            del self._history[gone]
        self._draw_soon()

    def on_lost(self, message: Lost) -> None:
        """Say so; the thread tries again."""
        self.lost = text.clean(message.reason)
        self._draw_soon()

    def _look_at_age(self) -> None:
        if self.snapshot is None or self._arrived_at is None:
            return
        # Where the clocks tell nothing, the time since it came is what its age is at least.
        age = (self._age_then or 0.0) + time.monotonic() - self._arrived_at
        stale = self.snapshot["stale"]
        set_age(self.snapshot, age, self._interval_s)
        if stale or self.snapshot["stale"]:
            self._draw_soon()

    # ---- drawing

    def _draw_soon(self) -> None:
        if not self._draw_pending:
            self._draw_pending = True
            self.set_timer(0.03, self._draw)

    def on_resize(self, _event: events.Resize) -> None:
        """Other columns may fit now."""
        self._draw_soon()

    def _draw(self) -> None:
        self._draw_pending = False
        if not self.is_running or not self.screen_stack:
            return
        if not self.paused:
            self.drawn = self.snapshot
        snapshot = self.drawn
        self._draw_note()
        if snapshot is None:
            self._head("expanse-ebpf")
            return
        try:
            self.require()
        except ExpanseError as error:
            self.failure = error
            self.exit()
            return
        marks = " · ".join(
            mark
            for mark, on in (
                ("PAUSED", self.paused),
                (f"filter: {text.clean(self.filter_text)}", self.filter_text),
            )
            if on
        )
        line = plain.headline(snapshot, date=False)
        self._head(f"{marks} · {line}" if marks else line)
        self._draw_rows(snapshot)
        self._draw_detail(snapshot)

    def _head(self, line: str) -> None:
        self.screen_stack[0].query_one("#head", Static).update(Text(line, no_wrap=True))
        cost = "" if self.drawn is None else plain.own_cost(self.drawn)
        keys = f"? help   {self._other_view()}/ filter   q quit"
        room = self.size.width - 2 - text.cell_width(cost) - len(keys)
        if room <= 2:  # how to get help, and out, is always there
            keys = "? q"
            room = self.size.width - 2 - text.cell_width(cost) - len(keys)
        line = cost + " " * room + keys if room > 0 else keys
        self.screen_stack[0].query_one("#cost", Static).update(Text(line, no_wrap=True))

    def _other_view(self) -> str:
        if self.devices:
            return "g jobs   "
        return "g GPUs   " if self.drawn is not None and self.drawn["gpus"] else ""

    def _draw_note(self) -> None:
        note = self.screen_stack[0].query_one("#note", Static)
        message = f"{self.lost} (trying again)" if self.lost else ""
        if not message and self.drawn is None:
            message = f"waiting for the first report from {self.feed.where}"
        elif not message and self.drawn is not None:
            message = self._what_is_missing(self.drawn)
        note.update(Text(message, no_wrap=True))
        note.set_class(bool(message), "shown")

    def _what_is_missing(self, snapshot: Values) -> str:
        if self.devices and not snapshot["gpus"]:
            return gpus.absent(snapshot)
        wrong = gpus.trouble(snapshot, "Enter tells more" if self.devices else "see g")
        if not self.devices and not snapshot["jobs"]:
            wrong.insert(0, "no jobs; `expanse-ebpf run --name NAME -- CMD` starts one")
        return " · ".join(wrong)

    def _draw_rows(self, snapshot: Values) -> None:
        room = self.size.width - 3
        if self.devices:
            rows = [gpu for gpu in gpus.rows(snapshot["gpus"]) if gpus.matches(gpu, self.filter_text)]
            chosen, left_out = table.choose(gpus.COLUMNS, rows, room)
        else:
            rows = [job for job in snapshot["jobs"] if columns.matches(job, self.filter_text)]
            rows = columns.sort(rows, self.sort_by, self.reversed)
            chosen, left_out = table.choose(columns.COLUMNS, rows, room, self.sort_by)
        self._draw_left_out(left_out if rows else [])
        titles = [self._title(column) for column in chosen]
        widths = self._fit(chosen, rows)
        if self.devices:
            drawn = {(gpu["uuid"], 0): cells(chosen, gpu, widths, gpus.is_dim(gpu)) for gpu in rows}
        else:
            drawn = {_run(job): self._cells(job, chosen, widths) for job in rows}
        self.board.show(chosen, titles, widths, drawn)

    def _draw_left_out(self, left_out: list[table.Column]) -> None:
        line = self.screen_stack[0].query_one("#room", Static)
        line.update(Text(table.left_out_line(left_out), no_wrap=True))
        line.set_class(bool(left_out) and self.size.height >= _LEAST_HEIGHT, "shown")

    def _title(self, column: table.Column) -> str:
        sorts = column.name == self.sort_by and not self.devices
        arrow = ("↑" if self.reversed else "↓") if sorts else ""
        return arrow + column.title if column.right else column.title + arrow

    def _fit(self, chosen: list[table.Column], rows: list[Values]) -> dict[str, int]:
        """Each column's width: the history takes what is left over, and a lone first column all there is."""
        room = self.size.width - 3
        widths = table.widths(chosen, rows, room)
        spare = max(0, room - sum(width + 2 for width in widths.values()) + 2)
        if columns.HISTORY in widths:
            widths[columns.HISTORY] += min(spare, HISTORY // 2)
        elif len(chosen) <= 2:
            widths[chosen[0].name] += spare
        return widths

    def _cells(self, job: Values, chosen: list[table.Column], widths: dict[str, int]) -> list[Text]:
        dim = columns.is_dim(job)
        drawn = cells(chosen, job, widths, dim)
        for x, column in enumerate(chosen):
            if column.name == columns.HISTORY:
                history = self._history.get(_run(job), ())
                line = text.Locale().sparkline(history, widths[column.name])
                drawn[x] = Text(line, style="dim" if dim else "dim cyan", no_wrap=True)
        return drawn

    def _draw_detail(self, snapshot: Values) -> None:
        panel = self.screen_stack[0].query_one("#detail")
        panel.set_class(self.open_row is not None, "shown")
        if self.open_row is None:
            return
        lines = self._device_lines(snapshot) if self.devices else self._job_lines(snapshot)
        body = Text("\n").join(Text(line, style=style, no_wrap=True) for line, style in lines)
        self.screen_stack[0].query_one("#detail-text", Static).update(body)

    def _device_lines(self, snapshot: Values) -> list[text.Line]:
        assert self.open_row is not None
        uuid = self.open_row[0]
        gpu = next((gpu for gpu in snapshot["gpus"] if gpu["uuid"] == uuid), None)
        return gpu_panel.device_lines(uuid, gpu, snapshot, self._events, self.size.width - 4)

    def _job_lines(self, snapshot: Values) -> list[text.Line]:
        assert self.open_row is not None
        job = next((j for j in snapshot["jobs"] if _run(j) == self.open_row), None)
        if job is not None and not self.paused:
            self._ask_processes()
        key, width = self.open_row[0], self.size.width - 4
        return detail.lines(key, job, snapshot, self._processes, self._process_rates, width)

    # ---- processes of the chosen job

    def _ask_processes(self) -> None:
        if self._asking or self.open_row is None or self.devices:
            return
        self._asking = True
        threading.Thread(target=self._fetch_processes, args=(self.open_row,), daemon=True).start()

    def _fetch_processes(self, job: Row) -> None:
        """Runs in a thread of its own."""
        try:
            self.post_message(Processes(job, self.feed.processes(*job)))
        except UnavailableError as error:
            self.post_message(Processes(job, str(error)))

    def on_processes(self, message: Processes) -> None:
        """Show them if the job is still the open one."""
        self._asking = False
        if message.job != self.open_row or self.devices:
            self._ask_processes()
            return
        changed = self._processes is None
        self._processes = message.reply
        if isinstance(message.reply, ProcessesReply):
            self._process_rates.add(message.reply, time.monotonic())
        if changed:
            self._draw_soon()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter, or a click: open the row, or close it when it is the open one."""
        row = self.board.row_at(event.cursor_row)
        if row is not None:
            self._open(None if row == self.open_row else row)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """The open panel follows the cursor."""
        row = self.board.row_at(event.cursor_row)
        if self.open_row is not None and row is not None:
            self._open(row)

    def _open(self, row: Row | None) -> None:
        if row != self.open_row:
            self.query_one("#detail", VerticalScroll).scroll_home(animate=False)
            self.open_row, self._processes, self._process_rates = row, None, detail.ProcessRates()
            self._draw_soon()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """A click on a title sorts by it, a second one turns the order around."""
        name = list(self.board.shown_widths)[event.column_index]
        if name == self.sort_by:
            self.action_reverse()
        else:
            self.action_sort("cpu" if name == columns.HISTORY else name)

    # ---- keys

    def action_sort(self, name: str) -> None:
        """Sort the jobs by the column `name`; GPUs stand in NVML's order."""
        if not self.devices:
            self.sort_by, self.reversed = name, False
            self._draw_soon()

    def action_reverse(self) -> None:
        """Turn the order of the jobs around."""
        if not self.devices:
            self.reversed = not self.reversed
            self._draw_soon()

    def action_devices(self) -> None:
        """The node's GPUs, or the jobs again, with the cursor where it was there."""
        self._open(None)
        here = self.board.row_at(self.board.cursor_row)
        self.board.turn_to(self._left_at)
        self.devices, self._left_at = not self.devices, here
        self._draw_soon()

    def action_page(self, pages: int) -> None:
        """Turn pages of the open panel, back where `pages` is below 0."""
        panel = self.query_one("#detail", VerticalScroll)
        panel.scroll_relative(y=pages * max(1, panel.size.height - 1), animate=False)

    def action_pause(self) -> None:
        """Hold the picture; reports are still taken in."""
        self.paused = not self.paused
        self._draw_soon()

    def action_light(self) -> None:
        """The other theme."""
        self.theme = "textual-light" if self.theme == "textual-dark" else "textual-dark"

    def action_help(self) -> None:
        """Show the keys."""
        self.push_screen(Help())

    def action_filter(self) -> None:
        """Type a filter."""
        field = self.query_one("#filter", Input)
        field.add_class("shown")
        field.value = self.filter_text
        field.focus()

    def action_leave(self) -> None:
        """Close what is open: the filter's field, the panel, the filter."""
        field = self.query_one("#filter", Input)
        if field.has_class("shown") or (self.open_row is None and self.filter_text):
            field.value = self.filter_text = ""
            field.remove_class("shown")
            self.board.focus()
            self._draw_soon()
        else:
            self._open(None)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Filter while it is typed."""
        self.filter_text = event.value
        self._draw_soon()

    def on_input_submitted(self, _event: Input.Submitted) -> None:
        """Keep the filter and go back to the table."""
        self.query_one("#filter", Input).remove_class("shown")
        self.board.focus()


def _run(job: Values) -> Row:
    return job["key"], job["run"]
