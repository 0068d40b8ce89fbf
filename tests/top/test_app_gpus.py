"""GPUs in the live view: columns of the jobs, and the view of devices behind g."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from textual.containers import VerticalScroll

from expanse_ebpf.top.app import TopApp
from expanse_ebpf.top.feed import LocalFeed
from expanse_ebpf.top.help import TEXT
from expanse_ebpf.top.text import UNKNOWN
from expanse_ebpf.wire.collector_pb2 import ProcessesReply, Report
from tests.top.gpu_reports import UUIDS, gpu_report
from tests.top.serving import ServedNode, make_report
from tests.top.test_app import View, view


def devices(v: View) -> list[str]:
    return [label.strip() for label in v.column("gpu")]


async def test_jobs_show_their_gpus_and_are_sorted_by_them(tmp_path: Path) -> None:
    async with view(tmp_path, size=(200, 50), jobs=4, make=gpu_report) as v:
        assert {"gpus", "gpu", "sm", "gpu_memory", "power"} <= set(v.app.board.shown_widths)
        assert v.column("gpus") == [UNKNOWN, "1 MIG", "1!?", "2"]
        assert v.column("gpu") == [*[UNKNOWN] * 3, "68.9%"]
        assert v.column("state")[1] == "held idle"
        for key, name in (("h", "gpus"), ("b", "gpu"), ("a", "sm"), ("v", "gpu_memory"), ("e", "power")):
            await v.press("c", key)
            assert (v.app.sort_by, v.jobs[0]) == (name, "4411"), key


async def test_g_shows_the_devices_and_the_jobs_again(tmp_path: Path) -> None:
    async with view(tmp_path, size=(80, 24), make=gpu_report) as v:
        await v.press("down", "down")
        assert v.chosen == "4411"
        await v.press("g")
        assert devices(v) == [
            *("0 GPU-0a6b7c8d", "1 GPU-1a6b7c8d", "2 GPU-2a6b7c8d", "3 GPU-3a6b7c8d"),
            *("3/7 MIG-aaaaaaaa", "3/8 MIG-bbbbbbbb", "4 GPU-4a6b7c8d"),
        ]
        assert v.column("held")[:4] == ["slurm/4411", "slurm/4411", "2 jobs!", "1 of 2 MIG"]
        assert v.column("state")[-1] == "lost"
        states = list(v.app.board.shown_widths).index("state")
        assert str(v.app.board.get_row_at(6)[states].style) == "bold red"
        await v.press("down", "down", "down", "c")  # the order of jobs is nothing to devices
        assert v.app.sort_by == "cpu"
        await v.report(21, make=gpu_report)
        assert v.app.board.cursor_row == 3
        await v.press("g")
        assert (v.jobs, v.chosen) == (["4413", "4412", "4411"], "4411")
        await v.press("g")
        assert v.app.board.cursor_row == 3


@pytest.mark.parametrize(("width", "whole"), [(80, ("memory",)), (200, ("memory", "name"))])
async def test_what_has_room_is_not_cut(tmp_path: Path, width: int, whole: tuple[str, ...]) -> None:
    def h100s(sequence: int, jobs: int) -> Report:
        report = gpu_report(sequence, jobs)
        for gpu in report.gpus:
            gpu.name, gpu.memory_used_bytes = "NVIDIA H100 80GB HBM3", 64 << 30
            gpu.memory_total_bytes = 85_520_809_984
        report.gpus[2].ClearField("xids")
        return report

    async with view(tmp_path, size=(width, 24), make=h100s) as v:
        await v.press("g")
        values = {"memory": "64.0/79.6 GiB", "name": "NVIDIA H100 80GB HBM3"}
        for name in whole:
            assert v.column(name)[0] == values[name]


async def test_enter_shows_everything_about_a_gpu(tmp_path: Path) -> None:
    async with view(tmp_path, size=(80, 24), make=gpu_report) as v:
        await v.press("g", "down", "down", "enter")
        detail = v.text("#detail-text")
        assert detail.startswith(f"GPU 2 · NVIDIA H200 · {UUIDS[2]}")
        assert "conflict: given to more than one job" in detail
        assert detail.count("Xid 79, held by slurm/4412, team/notebook") == 20  # of the reports before, too
        assert v.node.asked == []  # no job's processes are asked for
        panel = v.app.query_one("#detail", VerticalScroll)
        await v.press("right_curly_bracket")
        assert panel.scroll_y > 3
        await v.press("left_curly_bracket")
        assert panel.scroll_y == 0
        await v.press("up")  # the panel follows
        assert v.text("#detail-text").startswith("GPU 1 · NVIDIA H200")
        report = gpu_report(21)
        del report.gpus[1]
        v.node.publish(report)
        await v.until(lambda: "The GPU is no longer here." in v.text("#detail-text"))
        await v.press("escape")
        assert not v.app.query_one("#detail").has_class("shown")


async def test_g_closes_the_panel_of_a_job(tmp_path: Path) -> None:
    async with view(tmp_path, make=gpu_report) as v:
        await v.press("down", "down", "enter")
        await v.until(lambda: "train.py" in v.text("#detail-text"))
        assert "gpu: 2 held · busy 1.35 GPUs (68.9%)" in v.text("#detail-text")
        await v.press("g")
        assert not v.app.query_one("#detail").has_class("shown")
        await v.press("enter")
        assert v.text("#detail-text").startswith("GPU 0")
        assert "train.py" not in v.text("#detail-text")


async def test_a_late_answer_about_a_job_makes_no_question_about_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    answer = threading.Event()

    def processes(_feed: LocalFeed, key: str, _run: int) -> ProcessesReply:
        asked.append(key)
        assert answer.wait(20)
        return ProcessesReply()

    monkeypatch.setattr(LocalFeed, "processes", processes)
    async with view(tmp_path, make=gpu_report) as v:
        await v.press("enter")
        await v.until(lambda: asked)
        await v.press("g", "enter")
        answer.set()
        await v.until(lambda: not v.app._asking)
        await v.report(21, make=gpu_report)
        assert asked == ["slurm/4413"]
        assert v.text("#detail-text").startswith("GPU 0")


async def test_the_filter_is_of_what_is_shown(tmp_path: Path) -> None:
    async with view(tmp_path, make=gpu_report) as v:
        await v.press("g", "slash", *"notebook", "enter")
        assert devices(v) == ["2 GPU-2a6b7c8d"]
        await v.press("escape")
        assert len(devices(v)) == 7


async def test_a_node_without_gpus_says_why(tmp_path: Path) -> None:
    async with view(tmp_path) as v:
        await v.press("g")
        assert v.app.board.row_count == 0
        assert v.text("#note").startswith("no GPU figures: no NVIDIA driver on this node")
        report = make_report(21)
        report.nvml.code, report.nvml.reason = "driver_library_mismatch", "reboot, or reload the driver"
        v.node.publish(report)
        await v.until(lambda: "no GPU figures: reboot, or reload the driver" in v.text("#note"))
        await v.press("enter", "down", "g")
        assert len(v.jobs) == 3
        assert v.text("#note") == "NVML is down: reboot, or reload the driver (driver_library_mismatch)"


async def test_what_is_wrong_is_told_below(tmp_path: Path) -> None:
    async with view(tmp_path, make=gpu_report) as v:
        assert v.text("#note") == (
            "GPU lost: 4 GPU-4a6b7c8d · 2 GPU conflicts; see g · 1 GPU process whose job is not known; see g"
        )
        assert "g GPUs" in v.text("#cost")
        await v.press("g")
        assert "2 GPU conflicts; Enter tells more" in v.text("#note")
        assert "g jobs" in v.text("#cost")


async def test_the_help_fits_on_an_ordinary_terminal(tmp_path: Path) -> None:
    async with view(tmp_path, size=(80, 24), make=gpu_report) as v:
        await v.press("question_mark")
        box = v.app.screen.query_one(VerticalScroll)
        assert box.max_scroll_y == 0  # a scroll bar would cut the lines
        assert "! sources disagree, ? some are not of this node" in TEXT


async def test_it_can_begin_with_the_devices(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    with ServedNode(path) as node:
        node.publish(gpu_report(1))
        app = TopApp(LocalFeed(path), devices=True)
        async with app.run_test(size=(100, 30)) as pilot:
            v = View(app, pilot, node)
            await v.until(lambda: app.board.row_count == 7)
            assert devices(v)[0] == "0 GPU-0a6b7c8d"


@pytest.mark.parametrize("size", [(20, 5), (1, 1), (80, 24), (200, 50)])
async def test_any_window(tmp_path: Path, size: tuple[int, int]) -> None:
    async with view(tmp_path, size=size, make=gpu_report) as v:
        await v.press("g", "enter", "down", "right_curly_bracket", "question_mark", "escape")
        await v.press("g", "enter", "g")
        await v.pilot.resize_terminal(70, 12)
        await v.report(21, make=gpu_report)
        assert v.app.board.row_count == 7


async def test_names_do_not_steer_the_terminal(tmp_path: Path) -> None:
    def hostile(sequence: int, jobs: int) -> Report:
        report = gpu_report(sequence, jobs)
        report.gpus[0].uuid = report.gpus[0].name = report.gpus[0].state = "[red]\x1b[2J[/]\n"
        report.gpus[0].holders[0].Clear()
        report.gpus[0].holders[0].name = "[b]\x1b]0;x\x07"
        report.gpus[0].conflicts.append("[i]\x1b[1m\n")
        return report

    async with view(tmp_path, size=(200, 50), make=hostile) as v:
        await v.press("g", "enter")
        assert devices(v)[0] == "0 [red]\ufffd[2J[/]\ufffd"
        assert v.column("held")[0] == "[b]\ufffd]0;x\ufffd!"
        everything = "".join(v.text(part) for part in ("#note", "#detail-text", "#head"))
        assert "conflict: [i]\ufffd[1m\ufffd" in everything
        assert "\x1b" not in everything
