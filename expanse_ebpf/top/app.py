"""The live view: a table of jobs, the processes of a chosen one, and what the collector itself costs."""

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
from textual.coordinate import Coordinate
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import DataTable, Input, Static

from expanse_ebpf.errors import ExpanseError, UnavailableError
from expanse_ebpf.top import columns, detail, plain, text
from expanse_ebpf.top.feed import HISTORY, Feed
from expanse_ebpf.top.rates import Rates, Values, set_age
from expanse_ebpf.wire.collector_pb2 import ProcessesReply, Report

RETRY_S = 1.0
JobRun = tuple[str, int]  # key and run
_LEAST_HEIGHT = 12  # of a window in which there is room to say what has no room
_DIM_STATES = {"ended", "starting"}
_WARN_STATES = {"held_idle": "yellow", "stale": "red"}

HELP = """\
[b]Jobs[/b]
  ↑ ↓ PgUp PgDn    choose
  Enter            processes and details of the chosen job
  Esc              close them; clear the filter
  /                filter by key, name, user or state

[b]Order[/b]
  c cores   m memory   i I/O   s switches   w wait
  p processes   n key   u user   y Python   r reverse

[b]View[/b]
  Space   pause     t  light or dark     ?  this     q  quit

[b]Columns[/b]
  CORES      CPUs kept busy         HISTORY  the same, over time
  IPC        instructions per cycle MISS     cache misses per reference
  SWITCH/S   context switches       WAIT     tasks waiting for a CPU
  I/O        bytes read and written
  PYTHON     the line that was on a CPU most in the last 10 s, or,
             below half a core, where the program waits
  A dash stands where a figure is not known.
"""


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

    def __init__(self, job: JobRun, reply: ProcessesReply | str) -> None:
        self.job = job
        self.reply = reply
        super().__init__()


class Help(ModalScreen[None]):
    """What the keys do."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,question_mark,q,enter,space", "dismiss", "Close")
    ]
    CSS = """
    Help { align: center middle; }
    Help > VerticalScroll { width: 78; max-width: 100%; height: auto; max-height: 100%;
        border: round $primary; padding: 0 2; background: $surface; }
    Help Static { width: auto; height: auto; }
    """

    def compose(self) -> ComposeResult:
        """One box."""
        with VerticalScroll():
            yield Static(HELP)


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
    #jobs { height: 1fr; scrollbar-size-vertical: 1; scrollbar-size-horizontal: 0; background: $background; }
    #jobs > .datatable--header { background: $background; color: $text-muted; text-style: bold; }
    #jobs > .datatable--cursor { background: $primary 30%; text-style: none; }
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
            )
        ),
    ]

    def __init__(
        self,
        feed: Feed,
        keep: Callable[[Report], Report] = lambda report: report,
        require: Callable[[], None] = lambda: None,
        sort: str = "cpu",
    ) -> None:
        super().__init__()
        self.failure: ExpanseError | None = None
        self.feed = feed
        self.keep = keep
        self.require = require
        self.sort_by = sort
        self.reversed = False
        self.paused = False
        self.filter_text = ""
        self.snapshot: Values | None = None  # the newest
        self.drawn: Values | None = None  # the one on the screen, older while paused
        self.open_job: JobRun | None = None
        self.lost = ""
        self._rates = Rates()
        self._history: dict[JobRun, deque[float | None]] = {}
        self._last: tuple[str, int] = ("", -1)  # boot and sequence of the newest report
        self._interval_s = 0.0
        self._arrived_at: float | None = None
        self._age_then: float | None = None
        self._widths: dict[str, int] = {}  # of the columns on the screen, by name
        self._titles: list[str] = []
        self._rows: dict[JobRun, list[Text]] = {}
        self._processes: ProcessesReply | str | None = None
        self._process_rates = detail.ProcessRates()
        self._asking = False
        self._draw_pending = False
        self._stop = threading.Event()

    # ---- life

    def compose(self) -> ComposeResult:
        """From top to bottom."""
        yield Static(id="head", markup=False)
        yield DataTable[Text](id="jobs", cursor_type="row", cursor_foreground_priority="renderable")
        with VerticalScroll(id="detail", can_focus=False):
            yield Static(id="detail-text", markup=False)
        yield Static(id="room", markup=False)
        yield Static(id="note", markup=False)
        yield Input(id="filter", placeholder="filter", compact=True)
        yield Static(id="cost", markup=False)

    def on_mount(self) -> None:
        """Begin to follow the feed."""
        self.table.focus()
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
    def table(self) -> DataTable[Text]:
        """The table of jobs."""
        return self.query_one("#jobs", DataTable)

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
        self._interval_s = report.interval_ns / 1e9
        self._arrived_at, self._age_then = time.monotonic(), message.age_s
        seen: set[JobRun] = set()
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
        self._draw_jobs(snapshot)
        self._draw_detail(snapshot)

    def _head(self, line: str) -> None:
        self.screen_stack[0].query_one("#head", Static).update(Text(line, no_wrap=True))
        cost = "" if self.drawn is None else plain.own_cost(self.drawn)
        keys = "? help   / filter   q quit"
        room = self.size.width - 2 - text.cell_width(cost) - len(keys)
        if room <= 2:  # how to get help, and out, is always there
            keys = "? q"
            room = self.size.width - 2 - text.cell_width(cost) - len(keys)
        line = cost + " " * room + keys if room > 0 else keys
        self.screen_stack[0].query_one("#cost", Static).update(Text(line, no_wrap=True))

    def _draw_note(self) -> None:
        note = self.screen_stack[0].query_one("#note", Static)
        message = f"{self.lost} (trying again)" if self.lost else ""
        if not message and self.drawn is None:
            message = f"waiting for the first report from {self.feed.where}"
        elif not message and self.drawn is not None and not self.drawn["jobs"]:
            message = "no jobs; `expanse-ebpf run --name NAME -- CMD` starts one"
        note.update(Text(message, no_wrap=True))
        note.set_class(bool(message), "shown")

    def _draw_jobs(self, snapshot: Values) -> None:
        jobs = [job for job in snapshot["jobs"] if columns.matches(job, self.filter_text)]
        jobs = columns.sort(jobs, self.sort_by, self.reversed)
        table = self.screen_stack[0].query_one("#jobs", DataTable)
        chosen, left_out = columns.choose(jobs, self.size.width - 3, history=True, sort=self.sort_by)
        self._draw_left_out(left_out if jobs else [])
        titles = [self._title(column) for column in chosen]
        widths = self._fit(chosen, jobs)
        rows = {_run(job): self._cells(job, chosen, widths) for job in jobs}
        if widths == self._widths and titles == self._titles and list(rows) == list(self._rows):
            for y, (run, cells) in enumerate(rows.items()):
                for x, cell in enumerate(cells):
                    if cell != self._rows[run][x]:
                        table.update_cell_at(Coordinate(y, x), cell)
        else:
            self._rebuild(table, chosen, titles, widths, rows)
        self._widths, self._titles, self._rows = widths, titles, rows

    def _draw_left_out(self, left_out: list[columns.Column]) -> None:
        line = self.screen_stack[0].query_one("#room", Static)
        line.update(Text(columns.left_out_line(left_out), no_wrap=True))
        line.set_class(bool(left_out) and self.size.height >= _LEAST_HEIGHT, "shown")

    def _rebuild(
        self,
        table: DataTable[Text],
        chosen: list[columns.Column],
        titles: list[str],
        widths: dict[str, int],
        rows: dict[JobRun, list[Text]],
    ) -> None:
        """All rows anew, with the cursor on the job that it was on."""
        old = list(self._rows)
        at = table.cursor_row
        selected = old[at] if 0 <= at < len(old) else None
        scroll = table.scroll_y
        table.clear(columns=True)
        for column, title in zip(chosen, titles, strict=True):
            width = widths[column.name]
            table.add_column(Text(title, justify="right" if column.right else "left"), width=width)
        for cells in rows.values():
            table.add_row(*cells)
        order = list(rows)
        if selected in rows:
            table.move_cursor(row=order.index(selected), scroll=False)
        elif order:
            table.move_cursor(row=min(at, len(order) - 1), scroll=False)
        table.scroll_to(y=scroll, animate=False)

    def _title(self, column: columns.Column) -> str:
        arrow = ("↑" if self.reversed else "↓") if column.name == self.sort_by else ""
        return arrow + column.title if column.right else column.title + arrow

    def _fit(self, chosen: list[columns.Column], jobs: list[Values]) -> dict[str, int]:
        """Each column's width: the history takes what is left over, and a lone key all there is."""
        room = self.size.width - 3
        widths = columns.widths(chosen, jobs, room)
        spare = max(0, room - sum(width + 2 for width in widths.values()) + 2)
        if columns.HISTORY in widths:
            widths[columns.HISTORY] += min(spare, HISTORY // 2)
        elif len(chosen) <= 2:
            widths["key"] += spare
        return widths

    def _cells(self, job: Values, chosen: list[columns.Column], widths: dict[str, int]) -> list[Text]:
        state = job["state"]
        style = "dim" if state in _DIM_STATES or state == "stale" else ""
        cells = []
        for column in chosen:
            width = widths[column.name]
            if column.name == columns.HISTORY:
                line = text.Locale().sparkline(self._history.get(_run(job), ()), width)
                cells.append(Text(line, style=style or "dim cyan", no_wrap=True))
                continue
            shown = text.fit(columns.cell(column, job, width), width, column.right)
            cell_style = style
            if column.name == "state" and state in _WARN_STATES:
                cell_style = _WARN_STATES[state]
            elif column.name == "cpu" and not style:
                cell_style = "bold"
            cells.append(Text(shown, style=cell_style, no_wrap=True))
        return cells

    def _draw_detail(self, snapshot: Values) -> None:
        panel = self.screen_stack[0].query_one("#detail")
        panel.set_class(self.open_job is not None, "shown")
        if self.open_job is None:
            return
        job = next((j for j in snapshot["jobs"] if _run(j) == self.open_job), None)
        lines = detail.lines(self.open_job[0], job, self._processes, self._process_rates, self.size.width - 4)
        body = Text("\n").join(Text(line, style=style, no_wrap=True) for line, style in lines)
        self.screen_stack[0].query_one("#detail-text", Static).update(body)
        if job is not None and not self.paused:
            self._ask_processes()

    # ---- processes of the chosen job

    def _ask_processes(self) -> None:
        if self._asking or self.open_job is None:
            return
        self._asking = True
        threading.Thread(target=self._fetch_processes, args=(self.open_job,), daemon=True).start()

    def _fetch_processes(self, job: JobRun) -> None:
        """Runs in a thread of its own."""
        try:
            self.post_message(Processes(job, self.feed.processes(*job)))
        except UnavailableError as error:
            self.post_message(Processes(job, str(error)))

    def on_processes(self, message: Processes) -> None:
        """Show them if the job is still the open one."""
        self._asking = False
        if message.job != self.open_job:
            self._ask_processes()
            return
        changed = self._processes is None
        self._processes = message.reply
        if isinstance(message.reply, ProcessesReply):
            self._process_rates.add(message.reply, time.monotonic())
        if changed:
            self._draw_soon()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Enter, or a click: open the job, or close it when it is the open one."""
        order = list(self._rows)
        if 0 <= event.cursor_row < len(order):
            job = order[event.cursor_row]
            self._open(None if job == self.open_job else job)

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """The open panel follows the cursor."""
        order = list(self._rows)
        if (
            self.open_job is not None
            and self.table.row_count == len(order)
            and 0 <= event.cursor_row < len(order)
        ):
            self._open(order[event.cursor_row])

    def _open(self, job: JobRun | None) -> None:
        if job != self.open_job:
            self.open_job, self._processes, self._process_rates = job, None, detail.ProcessRates()
            self._draw_soon()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """A click on a title sorts by it, a second one turns the order around."""
        name = list(self._widths)[event.column_index]
        if name == self.sort_by:
            self.action_reverse()
        else:
            self.action_sort("cpu" if name == columns.HISTORY else name)

    # ---- keys

    def action_sort(self, name: str) -> None:
        """Sort by the column `name`."""
        self.sort_by, self.reversed = name, False
        self._draw_soon()

    def action_reverse(self) -> None:
        """Turn the order around."""
        self.reversed = not self.reversed
        self._draw_soon()

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
        if field.has_class("shown") or (self.open_job is None and self.filter_text):
            field.value = self.filter_text = ""
            field.remove_class("shown")
            self.table.focus()
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
        self.table.focus()


def _run(job: Values) -> JobRun:
    return job["key"], job["run"]
