from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from expanse_ebpf.nvml import process
from expanse_ebpf.nvml.process import Process
from tests.nvml.conftest import program

Begin = Callable[[str], Process]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    begun: list[Process] = []

    def begin(text: str) -> Process:
        monkeypatch.setattr(process, "_COMMAND", program(text))
        begun.append(Process([]))
        return begun[-1]

    yield begin
    for worker in begun:
        worker.kill()
        worker.close()
        end_of(worker)


def open_files() -> list[str]:
    return sorted(file.name for file in Path("/proc/self/fd").iterdir())


def end_of(worker: Process) -> str:
    until = time.monotonic() + 10
    while not (how := worker.ended()):
        assert time.monotonic() < until
        time.sleep(0.005)
    return how


def answers(worker: Process, count: int) -> list[bytes]:
    found: list[bytes] = []
    until = time.monotonic() + 20
    while len(found) < count:
        assert time.monotonic() < until
        select.select([worker._answers], [], [], 1)
        found += worker.answers()
    return found


def test_a_line_that_comes_in_parts_is_one_line(begin: Begin) -> None:
    worker = begin("print('half a', end='', flush=True); sys.stdin.readline(); print(' line', flush=True)")
    select.select([worker._answers], [], [], 10)
    assert worker.answers() == []
    worker.ask(b"go on\n")
    assert answers(worker, 1) == [b"half a line"]


def test_a_line_without_an_end_is_not_kept(begin: Begin) -> None:
    worker = begin(
        "sys.stdout.write('x' * (30 << 20)); print(); print('and on', flush=True); sys.stdin.read()"
    )
    until = time.monotonic() + 20
    found: list[bytes] = []
    while b"and on" not in found:
        assert time.monotonic() < until
        select.select([worker._answers], [], [], 1)
        found += worker.answers()
        assert len(worker._data) <= 8 << 20


def test_how_it_ended_is_told_once_it_has(begin: Begin) -> None:
    worker = begin("sys.exit(sys.stdin.readline() and 7)")
    assert worker.ended() == ""
    worker.ask(b"end\n")
    assert end_of(worker) == "with status 7"
    killed = begin("sys.stdin.read()")
    killed.kill()
    assert end_of(killed) == "with signal 9"


def test_a_question_to_one_that_has_ended_is_no_failure(begin: Begin) -> None:
    worker = begin("")
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    worker.ask(b"are you there\n")
    assert worker.answers() == []


def test_what_cannot_be_begun_leaves_no_files_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    before = open_files()
    for _ in range(3):
        with pytest.raises(FileNotFoundError):
            Process([])
    assert open_files() == before


def test_one_that_has_ended_leaves_no_files_open(begin: Begin) -> None:
    before = open_files()
    worker = begin("sys.stdin.read()")
    worker.close()
    assert end_of(worker) == "with status 0"
    assert open_files() == before


@pytest.mark.parametrize("how", ["killed", "ends"])
def test_what_the_library_has_begun_ends_with_it(begin: Begin, how: str) -> None:
    text = "import os, subprocess\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\n"
    worker = begin(f"{text}{'os._exit(3)' if how == 'ends' else 'sys.stdin.read()'}")
    pid = int(answers(worker, 1)[0])
    if how == "killed":
        worker.kill()
    assert end_of(worker) == ("with signal 9" if how == "killed" else "with status 3")
    until = time.monotonic() + 10
    stat = Path(f"/proc/{pid}/stat")
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.005)
