from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.nvml import busy, reasons
from expanse_ebpf.nvml.busy import Busy
from expanse_ebpf.nvml.process_lists import busy_by_pid
from tests.nvml.conftest import SERVE, Asked, MakeWorker, program
from tests.stand_ins.nvml import Fault, uuid

NOW = 1_800_000_000_000_000
MS = 1000
stamps = st.integers(NOW - 20_000_000, NOW)
percents = st.integers(0, 4294967295) | st.integers(0, 100)


@st.composite
def polls(draw: st.DrawFn) -> tuple[dict[int, int], list[list[tuple[int, int]]]]:
    """What a device sampled, and what NVML answered of that: any part, in any order, again and again."""
    told = draw(st.dictionaries(stamps, percents, max_size=40))
    samples = sorted(told.items())
    answers = []
    for end in sorted(draw(st.lists(st.integers(0, len(samples)), max_size=8))):
        begin = draw(st.integers(0, end))
        answer = samples[begin:end]
        again = draw(st.lists(st.sampled_from(answer), max_size=3)) if answer else []
        answers.append(draw(st.permutations(answer + again)))
    return told, answers


@settings(deadline=None)
@given(polls())
def test_each_stamp_counts_once_and_no_more_is_busy_than_measured(
    case: tuple[dict[int, int], list[list[tuple[int, int]]]],
) -> None:
    told, answers = case
    device = Busy()
    counted = busy_ns = measured_ns = 0
    for answer in answers:
        taken = device.take(answer, NOW)
        assert 0 <= taken.busy_ns <= taken.measured_ns
        counted += taken.samples
        busy_ns += taken.busy_ns
        measured_ns += taken.measured_ns
    assert counted <= len(told)
    if told:
        assert measured_ns <= (max(told) - min(told)) * 1000
    assert busy_ns <= measured_ns


@settings(deadline=None)
@given(st.dictionaries(stamps, st.integers(0, 100), min_size=1, max_size=60), st.data())
def test_however_the_samples_come_in_the_sum_is_the_same(told: dict[int, int], data: st.DataObject) -> None:
    samples = sorted(told.items())
    at_once = Busy().take(data.draw(st.permutations(samples)), NOW)
    device = Busy()
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(samples)), max_size=5))), len(samples)]
    # NVML may tell anew what it told before.
    parts = [device.take(samples[:end], NOW) for end in cuts[1:]]
    assert at_once.samples == len(told)
    assert at_once == tuple(map(sum, zip(*parts, strict=True)))


def test_what_lies_between_two_samples_is_busy_by_the_later_one() -> None:
    device = Busy()
    assert device.take([(NOW - 300 * MS, 100)], NOW) == (1, 0, 0)  # since when is not known
    assert device.take([(NOW - 100 * MS, 0), (NOW - 200 * MS, 25)], NOW) == (2, 25_000_000, 200_000_000)


def test_a_long_gap_is_not_filled_in() -> None:
    device = Busy(NOW - 10_000 * MS)
    assert device.take([(NOW - 1000 * MS, 100)], NOW) == (1, 0, 0)
    assert device.take([(NOW - 900 * MS, 100)], NOW) == (1, 100_000_000, 100_000_000)


def test_a_share_that_cannot_be_true_covers_no_time() -> None:
    device = Busy(NOW - 300 * MS)
    taken = device.take([(NOW - 200 * MS, 4294967295), (NOW - 100 * MS, -1)], NOW)
    assert taken == (2, 0, 0)


def test_when_the_clock_is_set_back_samples_count_on_and_those_from_before_are_left_out() -> None:
    device = Busy(NOW)
    back = NOW - 3_600_000_000
    device.seen_us = busy.since(device.seen_us, back)
    assert device.seen_us == back
    # Still in NVML's buffer, with stamps of the clock before.
    assert device.take([(NOW + 100 * MS, 100)], back) == (0, 0, 0)
    assert device.take([(back + 100 * MS, 50)], back + 100 * MS) == (1, 50_000_000, 100_000_000)


def test_a_clock_that_is_a_little_behind_nvmls_was_not_set_back() -> None:
    assert busy.since(NOW + 500 * MS, NOW) == NOW + 500 * MS


@settings(deadline=None)
@given(st.lists(st.tuples(stamps, st.integers(1, 3), percents), max_size=40), stamps)
def test_no_process_was_busy_for_longer_than_there_was_time(
    samples: list[tuple[int, int, int]], before: int
) -> None:
    added = busy_by_pid(samples, before)
    newest = max([before, *(stamp for stamp, _, _ in samples)])
    assert all(0 <= busy_ns <= (newest - before) * 1000 for busy_ns in added.values())
    assert added == busy_by_pid([*reversed(samples), *samples], before)


# ---- the buffers of the library


@pytest.fixture(scope="module")
def asked(make_worker: MakeWorker) -> Asked:
    return make_worker()


@pytest.fixture
def worker(asked: Asked) -> Asked:
    """One that has taken all samples by now."""
    asked.gpus.heal()
    asked.gpus.samples(0, [])
    asked.gpus.process_samples(0, [])
    asked.ask()
    return asked


class Clock:
    """Stamps of samples in microseconds of the wall clock, in each test later than in the one before."""

    def __init__(self) -> None:
        self._now = time.time_ns() // 1000 - 60_000_000

    def later(self) -> None:
        self._now += 1_000_000

    def __call__(self, milliseconds: int) -> int:
        return self._now + milliseconds * MS


at = Clock()


@pytest.fixture(autouse=True)
def _later() -> None:
    at.later()


def test_samples_out_of_order_count_once_over_several_polls(worker: Asked) -> None:
    worker.gpus.samples(0, [(at(0), 0)])
    before = worker.ask().gpu()
    worker.gpus.samples(0, [(at(100), 50), (at(140), 100), (at(120), 0)])
    first = worker.ask().gpu()
    assert first.measured_ns - before.measured_ns == 140_000_000
    assert first.busy_ns - before.busy_ns == 50_000_000 + 20_000_000
    assert worker.ask().gpu().measured_ns == first.measured_ns  # nothing is new
    worker.gpus.samples(0, [(at(100), 50), (at(140), 100), (at(120), 0), (at(150), 100)])
    after = worker.ask().gpu()
    assert (after.busy_ns - first.busy_ns, after.measured_ns - first.measured_ns) == (10_000_000, 10_000_000)


@pytest.mark.parametrize("code", [6, 21])
def test_a_buffer_with_nothing_new_adds_nothing_and_is_no_failure(worker: Asked, code: int) -> None:
    worker.gpus.samples(0, Fault(code))
    found = worker.ask()
    assert found.line()["added"] == {"busy_ns": 0, "measured_ns": 0}
    assert not found.gpu().unavailable


def test_a_worker_takes_what_is_later_than_the_stamp_it_was_given(make_worker: MakeWorker) -> None:
    samples = [(at(-300 + 100 * i), 100) for i in range(4)]
    first = make_worker()
    first.gpus.samples(0, samples[:2])
    stamp = first.ask().line()["stamp"]
    assert stamp == samples[1][0]
    second = make_worker()
    second.gpus.samples(0, samples)
    line = second.ask(seen={uuid(0): stamp}).line()
    assert line["added"] == {"busy_ns": 200_000_000, "measured_ns": 200_000_000}


def test_a_stamp_from_before_the_clock_was_set_back_is_no_stamp(make_worker: MakeWorker) -> None:
    worker = make_worker()
    worker.gpus.samples(0, [])
    now = time.time_ns() // 1000
    assert now <= worker.ask(seen={uuid(0): now + 3_600_000_000}).line()["stamp"] < now + 60_000_000


# ---- how busy each process keeps a GPU


def by_process(worker: Asked) -> dict[str, int]:
    found: dict[str, int] = worker.ask(by_process=[uuid(0)]).line()["by_process"]
    return found


@pytest.fixture
def sharing(make_worker: MakeWorker) -> Asked:
    """A worker that was asked for it once."""
    worker = make_worker()
    worker.gpus.process_samples(0, [(at(0), 4242, 100, 0)])
    assert by_process(worker) == {}
    return worker


@pytest.mark.parametrize("busy_before", [False, True])
def test_the_first_answer_only_begins_and_says_so(make_worker: MakeWorker, busy_before: bool) -> None:
    worker = make_worker()
    worker.gpus.process_samples(0, [(at(0), 4242, 100, 0)] if busy_before else [])
    found = worker.ask(by_process=[uuid(0)])
    assert found.line()["by_process"] == {}
    assert found.gpu().unavailable["by_process"] == reasons.sentence(reasons.NO_DATA)
    assert "by_process" not in worker.ask().line()
    begun_us = at(0) if busy_before else time.time_ns() // 1000
    worker.gpus.process_samples(0, [(begun_us + 100 * MS, 4242, 100, 0)])
    assert by_process(worker)["4242"] == pytest.approx(100_000_000, rel=0 if busy_before else 0.9)


def test_each_sample_of_a_process_counts_once(sharing: Asked) -> None:
    worker = sharing
    worker.gpus.process_samples(0, [(at(100), 4242, 50, 0), (at(140), 4343, 100, 0), (at(120), 4242, 0, 0)])
    # 4242: half of 100 ms, and nothing of 20 ms
    assert by_process(worker) == {"4242": 50_000_000, "4343": 140_000_000}
    assert by_process(worker) == {}
    worker.gpus.process_samples(0, [(at(100), 4242, 50, 0), (at(150), 4343, 100, 0)])
    assert by_process(worker) == {"4343": 10_000_000}


def test_more_processes_than_there_was_room_for_are_asked_for_again(sharing: Asked) -> None:
    worker = sharing
    worker.gpus.set(0, understated=7)
    worker.gpus.process_samples(0, [(at(100), pid, 10, 0) for pid in range(1, 1001)])
    assert by_process(worker) == {str(pid): 10_000_000 for pid in range(1, 1001)}


def test_no_busy_process_is_no_failure_and_another_error_is_one(sharing: Asked) -> None:
    worker = sharing
    assert by_process(worker) == {}
    assert "by_process" not in worker.ask(by_process=[uuid(0)]).gpu().unavailable
    worker.gpus.process_samples(0, Fault(4))
    found = worker.ask(by_process=[uuid(0)])
    assert "NVML error 4" in found.gpu().unavailable["by_process"]


def test_a_use_by_more_processes_than_there_is_room_for_is_missing(make_worker: MakeWorker) -> None:
    text = "from expanse_ebpf.nvml import process_lists\nprocess_lists._BYTES_OF_USE = 1 << 18\n"
    worker = make_worker(command=program(f"{text}{SERVE}"))  # room for one
    worker.gpus.process_samples(0, [(at(0), 4242, 100, 0)])
    worker.ask(by_process=[uuid(0)])
    worker.gpus.process_samples(0, [(at(100), pid, 10, 0) for pid in (4242, 4343)])
    found = worker.ask(by_process=[uuid(0)])
    assert found.line()["by_process"] == {}
    assert found.gpu().unavailable["by_process"] == reasons.sentence(reasons.TOO_MANY)
    worker.gpus.process_samples(0, [(at(200), 4242, 10, 0)])
    assert by_process(worker) == {"4242": 10_000_000}
