"""The live view, driven by Textual's pilot, with a real agent's socket behind it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Input, Static

from expanse_ebpf.errors import UnavailableError, UnknownJobError
from expanse_ebpf.top.app import TopApp
from expanse_ebpf.top.feed import LocalFeed
from expanse_ebpf.top.help import Help
from expanse_ebpf.wire.collector_pb2 import Report
from tests.top.serving import ServedNode, make_report

MakeReport = Callable[[int, int], Report]


class View:
    """A running app and the node that it looks at."""

    def __init__(self, app: TopApp, pilot: Pilot[None], node: ServedNode) -> None:
        self.app, self.pilot, self.node = app, pilot, node

    def text(self, selector: str) -> str:
        return str(self.app.screen_stack[0].query_one(selector, Static).content)

    def column(self, name: str) -> list[str]:
        table = self.app.screen_stack[0].query_one("#rows", DataTable)
        x = list(self.app.board.shown_widths).index(name)
        return [str(table.get_row_at(y)[x]).strip() for y in range(table.row_count)]

    @property
    def jobs(self) -> list[str]:
        return (
            [key.removeprefix("slurm/") for key in self.column("key")] if self.app.board.shown_widths else []
        )

    @property
    def chosen(self) -> str:
        return self.jobs[self.app.screen_stack[0].query_one("#rows", DataTable).cursor_row]

    async def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 15
        while not condition():
            assert time.monotonic() < deadline, "did not come true in time"
            await self.pilot.pause(0.02)

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause(0.08)  # longer than a drawing is put off

    async def report(self, sequence: int, jobs: int = 3, make: MakeReport = make_report) -> None:
        self.node.publish(make(sequence, jobs))
        await self.until(lambda: self.app.snapshot and self.app.snapshot["sequence"] == sequence)
        await self.pilot.pause(0.08)


@asynccontextmanager
async def view(
    tmp_path: Path, size: tuple[int, int] = (140, 30), jobs: int = 3, make: MakeReport = make_report
) -> AsyncIterator[View]:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        for sequence in range(1, 21):
            node.publish(make(sequence, jobs))
        app = TopApp(LocalFeed(path))
        async with app.run_test(size=size) as pilot:
            shown = View(app, pilot, node)
            await shown.until(lambda: app.drawn is not None and app.drawn["sequence"] == 20)
            await pilot.pause(0.08)
            yield shown


async def test_it_shows_the_jobs_their_history_and_its_own_cost(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        assert v.jobs == ["4413", "4412", "4411"]
        assert list(v.app.board.shown_widths) == [
            *(
                "key",
                "user",
                "cpu",
                "history",
                "ipc",
                "switches",
                "wait",
                "memory",
                "io",
                "processes",
            ),
            "state",
            "python",
        ]
        assert v.column("python") == [f"step{i} model.py:{88 + i} 43%" for i in (2, 1, 0)]
        assert v.text("#room") == "not shown for want of room: NAME, MISS"
        assert v.column("ipc") == ["1.40"] * 3
        assert all(len(bars) == 12 for bars in v.column("history"))  # of 19, PYTHON having the room
        assert v.text("#head").startswith("gpu017 · ")
        assert "collector 0.008 cores · 41.0 MiB PSS · BPF 112 µs per s" in v.text("#cost")


async def test_sort_keys(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        for key, order in (
            ("n", ["4411", "4412", "4413"]),
            ("m", ["4413", "4412", "4411"]),
            ("r", ["4411", "4412", "4413"]),
            ("s", ["4413", "4412", "4411"]),
            ("u", ["4411", "4412", "4413"]),
            ("w", ["4413", "4412", "4411"]),
            ("p", ["4413", "4412", "4411"]),
            ("i", ["4413", "4412", "4411"]),
            ("c", ["4413", "4412", "4411"]),
        ):
            await v.press(key)
            assert v.jobs == order, key


async def test_the_cursor_stays_on_its_job(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("down")
        assert v.chosen == "4412"
        await v.press("n", "r")
        assert v.chosen == "4412"
        await v.report(21, jobs=12)
        assert len(v.jobs) == 12
        assert v.chosen == "4412"
        await v.report(22, jobs=1)
        assert v.jobs == ["4411"]
        assert v.chosen == "4411"


async def test_filter(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("slash", *"llama")
        assert v.jobs == ["4412"]
        assert "filter: llama" in v.text("#head")
        await v.press("enter", "s")  # a key again, not a letter
        assert (v.jobs, v.app.sort_by) == (["4412"], "switches")
        await v.press("slash", "q", "escape")
        assert len(v.jobs) == 3
        assert not v.app.query_one("#filter", Input).has_class("shown")


async def test_enter_shows_a_jobs_processes_and_limits(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("down")
        await v.until(lambda: v.app.query_one("#rows", DataTable).cursor_row == 1)
        await v.press("enter")
        await v.until(lambda: "train.py" in v.text("#detail-text"))
        detail = v.text("#detail-text")
        assert v.node.asked[-1] == ("slurm/4412", 1001, 0)
        assert detail.startswith("slurm/4412 · llama-sft · user1")
        assert "of 16.0 GiB" in detail
        assert "98 samples per s, 89.8% resolved" in detail
        assert "on a CPU  43.0%  Trainer.step1  /srv/train/model.py:89" in detail
        assert "waiting   95.0%  Queue.get  /usr/lib/python3.11/queue.py:171  (standard library)" in detail
        assert "python train.py --rank 0" in detail
        assert "\x1b" not in detail
        await v.report(21)
        await v.until(lambda: len(v.node.asked) >= 2 and "0.1" in v.text("#detail-text").split("COMMAND")[1])
        await v.press("up")  # the panel follows
        await v.until(lambda: v.text("#detail-text").startswith("slurm/4413"))
        await v.press("escape")
        assert not v.app.query_one("#detail").has_class("shown")


async def test_a_job_that_ends_while_it_is_open(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("enter")
        await v.report(21, jobs=0)
        assert "no longer here" in v.text("#detail-text")


async def test_an_error_instead_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_feed: LocalFeed, _key: str, _run: int) -> None:
        raise UnavailableError("processes are shown on the node itself only")

    monkeypatch.setattr(LocalFeed, "processes", refuse)
    async with view(tmp_path) as v:
        await v.press("enter")
        await v.until(lambda: "on the node itself only" in v.text("#detail-text"))


async def test_pause_holds_the_picture_and_takes_reports_in(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("space")
        await v.report(21, jobs=5)
        assert len(v.jobs) == 3
        assert "PAUSED" in v.text("#head")
        await v.press("space")
        assert len(v.jobs) == 5
        assert "PAUSED" not in v.text("#head")


async def test_help_opens_and_closes(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("question_mark")
        assert isinstance(v.app.screen, Help)
        await v.report(21, jobs=4)  # goes on below
        assert len(v.jobs) == 4
        await v.press("escape")
        assert not isinstance(v.app.screen, Help)


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_quit(tmp_path: Path, key: str) -> None:
    async with view(tmp_path) as v:
        await v.press(key)
        await v.until(lambda: not v.app.is_running)
        assert v.app.return_code == 0
        assert v.app.failure is None


async def test_both_themes(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        dark = v.app.export_screenshot()
        await v.press("t")
        assert v.app.theme == "textual-light"
        assert v.app.export_screenshot() != dark


async def test_an_agent_that_goes_away_is_told_and_found_again(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    app = TopApp(LocalFeed(path))
    async with app.run_test(size=(120, 20)) as pilot:
        with ServedNode(path) as node:
            v = View(app, pilot, node)
            node.publish(make_report(1))
            await v.until(lambda: v.jobs)
        await v.until(lambda: "trying again" in v.text("#note"))
        assert len(v.jobs) == 3  # the last picture stays
        with ServedNode(path) as again:
            again.publish(make_report(2, jobs=4))
            await v.until(lambda: len(v.jobs) == 4)
            await v.until(lambda: not v.app.query_one("#note").has_class("shown"))


async def test_no_agent_at_all_says_how_to_start_one(tmp_path: Path) -> None:
    app = TopApp(LocalFeed(str(tmp_path / "none")))
    async with app.run_test(size=(160, 20)) as pilot:
        v = View(app, pilot, None)  # type: ignore[arg-type]
        await v.until(lambda: "start it with `expanse-ebpf agent`" in v.text("#note"))


async def test_data_that_stops_coming_becomes_stale(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        assert "running" in v.column("state")
        await v.until(lambda: set(v.column("state")) == {"stale"})
        assert v.text("#head").startswith("STALE")


async def test_an_unknown_job_ends_it_with_the_reason(tmp_path: Path) -> None:
    def require() -> None:
        raise UnknownJobError("no job slurm/1")

    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        node.publish(make_report(1))
        app = TopApp(LocalFeed(path), require=require)
        async with app.run_test() as pilot:
            await View(app, pilot, node).until(lambda: app.failure is not None)
    assert isinstance(app.failure, UnknownJobError)


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (40, 10), (80, 24), (300, 80)])
async def test_any_window(tmp_path: Path, size: tuple[int, int]) -> None:
    async with view(tmp_path, size=size, jobs=30) as v:
        await v.press("enter", "down", "slash", "x", "escape", "question_mark", "escape")
        await v.pilot.resize_terminal(70, 12)
        await v.report(21, jobs=30)
        assert len(v.jobs) == 30


async def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        report = make_report(21)
        report.jobs[0].identity.id = "[red]\x1b[2J[/]"
        report.node.name = "[b]\x07"
        v.node.publish(report)
        await v.until(lambda: "[red]\ufffd[2J[/]" in v.jobs)
        assert v.text("#head").startswith("[b]\ufffd")
