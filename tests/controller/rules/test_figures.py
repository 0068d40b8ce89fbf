"""Figures: what they are made of, and that what is missing or cannot be true is not known."""

from __future__ import annotations

import math
import random
import statistics
from typing import Any

import pytest

from expanse_controller.columns import COLUMNS, values
from expanse_controller.rules.figures import FIGURES, READ, Span, medians_of_others, of_job, reading
from expanse_controller.rules.history import History, JobReading, NodeReading
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_HELD_IDLE, JobSample
from tests.controller.rules.made import SECOND, Cluster, rule, sample

FULL = {
    "processes": 3,
    "cpu_cores": 1.5,
    "memory": (30, 40),
    "run_queue_wait": 0.25,
    "cpu_pressure": 0.1,
    "memory_pressure": 0.2,
    "io_pressure": 0.3,
    "loading": 0.8,
    "hottest": 0.625,
    "gpus": 2,
    "gpu_busy": 0.5,
    "gpu_sm_active": 0.125,
    "throttled": 0.75,
    "gpu_power": 700.0,
}


def span(seconds: float = 10.0, **figures: Any) -> Span:
    return Span(reading(sample(100 + seconds, **figures)), reading(sample(100, **figures)), seconds)


def known(name: str, *spans: Span) -> float | bool | None:
    """The figure, None when it is not known."""
    value = of_job(FIGURES[name], spans)
    return None if isinstance(value, list) else value


def test_a_reading_is_what_the_store_has() -> None:
    one = sample(100, **FULL)
    assert dict(zip(READ, reading(one), strict=True)) == {
        name: value for name, value in zip(COLUMNS, values(one), strict=True) if name in READ
    }


@pytest.mark.parametrize(
    ("name", "one", "two"),
    [
        ("processes", 3, 6),
        ("held_idle", False, False),
        ("cpu_cores", 1.5, 3.0),
        ("run_queue_wait", 0.25, 0.5),
        ("cpu_pressure", 0.1, 0.1),
        ("memory_pressure", 0.2, 0.2),
        ("io_pressure", 0.3, 0.3),
        ("memory_share", 0.75, 0.75),
        ("gpus", 2, 4),
        ("gpu_busy", 0.5, 0.5),
        ("gpu_sm_active", 0.125, 0.125),
        ("gpu_power", 700, 1400),
        ("throttled", 0.75, 0.75),
        ("loading", 0.8, 1.6),
        ("python_hottest_share", 0.625, 0.625),
    ],
)
def test_figures_of_a_job_on_one_node_and_on_two(name: str, one: float, two: float) -> None:
    assert known(name, span(**FULL)) == pytest.approx(one)
    assert known(name, span(**FULL), span(**FULL)) == pytest.approx(two)


def test_gpus_weigh_the_same_wherever_they_are() -> None:
    spans = (span(gpus=1, gpu_busy=1.0, throttled=1.0), span(gpus=3, gpu_busy=0.0, throttled=0.0))
    assert known("gpu_busy", *spans) == pytest.approx(0.25)
    assert known("throttled", *spans) == pytest.approx(0.25)


def test_the_fullest_node_tells_of_memory_and_held_idle_means_everywhere() -> None:
    assert known("memory_share", span(memory=(1, 4)), span(memory=(3, 4))) == 0.75
    idle = span(state=JOB_STATE_HELD_IDLE)
    assert known("held_idle", idle) is True
    assert known("held_idle", idle, span()) is False


def test_a_node_on_which_the_job_holds_no_gpu_does_not_matter_to_gpu_figures() -> None:
    with_gpu, without = span(gpus=2, gpu_busy=0.5, cpu_cores=1.0), span(cpu_cores=1.0)
    assert known("gpu_busy", with_gpu, without) == 0.5
    assert known("gpus", without, with_gpu) == 2
    assert known("gpu_busy", without) is None
    assert of_job(FIGURES["gpu_busy"], (without, without)) == [0, 1]
    assert of_job(FIGURES["gpu_busy"], (with_gpu, span(gpus=1))) == [1]
    given_back = span(gpus=0, throttled=0.0)
    assert known("gpu_busy", with_gpu, given_back) == 0.5
    assert (known("gpus", given_back), known("gpu_busy", given_back)) == (0, None)


@pytest.mark.parametrize("name", sorted(name for name, figure in FIGURES.items() if figure.term))
def test_what_a_sample_does_not_have_is_not_known(name: str) -> None:
    empty = Span(reading(JobSample()), reading(JobSample()), 10.0)
    assert known(name, empty) is (False if name == "held_idle" else None)


@pytest.mark.parametrize("name", ["cpu_cores", "gpu_busy", "loading", "throttled", "run_queue_wait"])
def test_a_counter_that_began_anew_and_a_first_sample_give_no_rate(name: str) -> None:
    old, new = reading(sample(100, **FULL)), reading(sample(3, **FULL))
    assert known(name, Span(new, old, 10.0)) is None
    assert known(name, Span(new, None, 0.0)) is None


def test_what_cannot_be_true_is_not_known() -> None:
    assert known("gpu_busy", span(gpus=1, gpu_busy=1.04)) == 1.0  # its parts are not read at one moment
    assert known("gpu_busy", span(gpus=1, gpu_busy=1.5)) is None
    assert known("io_pressure", span(io_pressure=300)) is None
    for share in (math.nan, math.inf, -1.0, 2.0):
        assert known("python_hottest_share", span(hottest=share)) is None
    huge = sample(1, cpu_cores=1.0)
    huge.cpu_ns = 2**64 - 1
    assert known("cpu_cores", Span(reading(huge), reading(sample(1, cpu_cores=1.0)), 10.0)) is None


def test_median_of_the_others() -> None:
    draw = random.Random(3)
    for count in range(1, 12):
        parts = [draw.choice([None, draw.randrange(4) / 4, draw.random()]) for _ in range(count)]
        for place, median in enumerate(medians_of_others(parts)):
            others = [p for i, p in enumerate(parts) if i != place and p is not None]
            assert median == (statistics.median(others) if len(others) >= 2 else None)


def node(t: float, cpu_cores: float = 1.0, run: int = 1, interval_s: float = 1.0) -> NodeReading:
    job = JobReading("slurm/7", run, reading(sample(t, cpu_cores=cpu_cores)))
    return NodeReading("gpu001", "install", int(t * SECOND), interval_s, 0.0, [job])


def test_rates_are_over_about_ten_seconds_however_often_is_looked() -> None:
    history = History()
    seconds = [history.spans(node(100 + t))[0][1].seconds for t in range(60)]
    assert seconds[:4] == [0, 0, 0, 0]
    assert all(9 <= s <= 15 for s in seconds[9:])
    assert history.readings() <= 3


def test_no_rate_over_a_second_nor_over_minutes() -> None:
    history = History()
    assert history.spans(node(100))[0][1].old is None
    assert history.spans(node(103))[0][1].old is None
    assert history.spans(node(400))[0][1].old is None
    assert history.spans(node(410))[0][1].seconds == 10


def test_slow_nodes_have_rates_from_report_to_report() -> None:
    history = History()
    for t in (100, 220, 340):
        found = history.spans(node(t, interval_s=120.0))
    assert found[0][1].seconds == 120


def test_a_clock_that_is_set_back_begins_anew() -> None:
    history = History()
    history.spans(node(1000))
    history.spans(node(1010))
    assert history.spans(node(500))[0][1].old is None
    assert history.spans(node(510))[0][1].seconds == 10


def test_another_run_of_a_job_is_another_history_and_the_newest_run_counts() -> None:
    history = History()
    history.spans(node(100, run=1))
    assert history.spans(node(110, run=2))[0][1].old is None
    both = node(120, run=2)
    both = both._replace(jobs=[*node(120, run=3).jobs, *both.jobs])
    ((job, _),) = history.spans(both)
    assert job.run == 3


def test_every_figure_can_be_asked_for() -> None:
    for name, figure in FIGURES.items():
        when = f"{name} >= 0.0" if figure.is_number else f"{name} == false"
        cluster = Cluster(rule(when, each="node" if figure.over_nodes == "peers" else "job"))
        for _ in range(2):
            cluster.look({f"gpu00{n}": [FULL] for n in range(3)})
        found = {state.state for state in cluster.engine.states()}
        missing = {"gpu_memory_share", "python_waiting_share", "io_read", "io_write"}
        assert found == ({"no_data"} if name in missing else {"firing"}), name
