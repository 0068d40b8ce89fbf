from __future__ import annotations

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.nvml.process_list import Listed, parse, read_pid_max
from expanse_ebpf.nvml.reasons import ABSURD
from tests.nvml.conftest import Asked, MakeWorker, Round
from tests.stand_ins.nvml import Fault, uuid

GIB = 1 << 30
TWO = [(4242, GIB), (4343, 2 * GIB)]


def pairs(found: Round) -> list[tuple[int, int | None]]:
    return [
        (process.pid, process.memory_bytes if process.HasField("memory_bytes") else None)
        for process in found.gpu().processes
    ]


@pytest.mark.parametrize("variant", ["v3", "v3_long", "v3_short", "v2", "unsuffixed"])
def test_processes_are_read_from_whatever_records_the_library_gives(
    make_worker: MakeWorker, variant: str
) -> None:
    worker = make_worker(variant=variant)
    worker.gpus.processes(0, TWO)
    assert pairs(worker.ask()) == TWO
    worker.gpus.processes(0, TWO[:1])
    assert pairs(worker.ask()) == TWO[:1]
    worker.gpus.processes(0, [(pid, pid * 4096) for pid in range(1, 1001)])
    assert pairs(worker.ask()) == [(pid, pid * 4096) for pid in range(1, 1001)]
    worker.gpus.processes(0, [])
    assert pairs(worker.ask()) == []


def test_a_library_without_the_lists_gives_everything_else(make_worker: MakeWorker) -> None:
    found = make_worker(variant="none").ask()
    assert found.gpu().state == "ok"
    assert found.gpu().power_mw == 70_000
    assert set(found.gpu().unavailable) == {"processes"}
    assert "no such function" in found.gpu().unavailable["processes"]


@pytest.fixture(scope="module")
def asked(make_worker: MakeWorker) -> Asked:
    return make_worker()


@pytest.fixture
def worker(asked: Asked) -> Asked:
    with asked.gpus.batch():
        asked.gpus.heal()
        asked.gpus.set(0, understated=None)
        for kind in ("compute", "graphics", "mps"):
            asked.gpus.processes(0, [], kind)
    return asked


def test_a_pid_that_cannot_be_one_is_rejected_and_counted(worker: Asked) -> None:
    worker.gpus.processes(0, [(4242, GIB), (read_pid_max() + 1, GIB), (0, GIB), (4294967295, GIB)])
    found = worker.ask()
    assert pairs(found) == [(4242, GIB)]
    assert found.gpu().rejected_processes == 3


def test_memory_that_nvml_does_not_know_or_that_cannot_be_is_missing(worker: Asked) -> None:
    worker.gpus.processes(0, [(4242, None), (4343, 1 << 62)])
    assert pairs(worker.ask()) == [(4242, None), (4343, None)]


def test_the_room_for_the_list_grows_with_it(worker: Asked) -> None:
    worker.gpus.set(0, understated=100)
    worker.gpus.processes(0, [(pid, GIB) for pid in range(1, 601)])
    assert [pid for pid, _ in pairs(worker.ask())] == list(range(1, 601))


def test_more_processes_than_a_report_has_room_for_are_said_to_be_more(worker: Asked) -> None:
    worker.gpus.processes(0, [(pid, GIB) for pid in range(1, 3001)])
    found = worker.ask()
    assert len(found.gpu().processes) == 1024
    assert found.gpu().unavailable["processes"] == "only some are shown, those with the most memory"


def test_each_process_is_listed_once_with_what_it_does(worker: Asked) -> None:
    worker.gpus.processes(0, [(1, GIB), (2, GIB), (3, GIB)])
    worker.gpus.processes(0, [(2, GIB)], "mps")  # a client of MPS is in both lists
    worker.gpus.processes(0, [(3, GIB), (4, 7)], "graphics")
    kinds = {process.pid: process.kind for process in worker.ask().gpu().processes}
    assert kinds == {1: "compute", 2: "mps", 3: "compute", 4: "graphics"}


def test_a_list_that_fails_leaves_the_other_figures(worker: Asked) -> None:
    worker.gpus.processes(0, Fault(999))
    found = worker.ask()
    assert found.gpu().power_mw == 70_000
    assert "NVML error 999" in found.gpu().unavailable["processes"]


# ---- records


def test_records_of_no_known_length_are_not_guessed_at() -> None:
    assert parse(struct.pack("=I4xQ3I", 4242, GIB, 0, 0, 0).ljust(80, b"\xa5"), 1, 1 << 22) == ABSURD


def test_records_that_were_announced_and_not_written_are_not_guessed_at() -> None:
    assert parse(b"\xa5" * 400, 3, 1 << 22) == ABSURD


@settings(deadline=None)
@given(st.binary(max_size=400), st.integers(0, 12))
def test_whatever_the_library_writes_is_taken_or_rejected(data: bytes, count: int) -> None:
    found = parse(data.ljust(480, b"\xa5"), count, 1 << 22)
    if isinstance(found, Listed):
        assert len(found.processes) + found.rejected == count
        assert all(0 < process["pid"] <= 1 << 22 for process in found.processes)


def test_where_the_largest_pid_cannot_be_read_it_is_the_kernels_own_limit() -> None:
    assert read_pid_max("/nonexistent") == 1 << 22


def test_the_lists_of_all_devices_have_room_where_nobody_reads(make_worker: MakeWorker) -> None:
    worker = make_worker("--profiler", devices=64)
    biggest, last = 80 << 30, read_pid_max()
    with worker.gpus.batch():
        for number in range(64):
            pids = range(last - 999, last + 1)
            worker.gpus.processes(number, [(pid, biggest + pid) for pid in pids])
            if number % 2:
                worker.gpus.mig(number, [{} for _ in range(7)])
    worker.ask()
    worker.gpus.reset_calls()
    shared = [uuid(number) for number in range(64)]
    question = {"round": 2, "at": 0.0, "by_process": shared}
    worker.process.ask(json.dumps(question).encode() + b"\n")
    worker.gpus.wait_for_call("nvmlEventSetWait_v2")  # the last of a round
    found = worker.ask()
    sample = found.gpu()
    assert 64 <= len(sample.processes) < 256
    assert sample.processes[0].memory_bytes == biggest + last
    assert min(p.memory_bytes for p in sample.processes) == biggest + last - len(sample.processes) + 1
    assert sample.unavailable["processes"] == "only some are shown, those with the most memory"
