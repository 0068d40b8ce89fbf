from __future__ import annotations

import pytest

from expanse_ebpf.nvml import reasons
from expanse_ebpf.nvml.gpm import _METRICS as METRICS
from expanse_ebpf.nvml.gpm import _SHARES as SHARES
from expanse_ebpf.wire.collector_pb2 import GpuProfile, GpuSample
from tests.nvml.conftest import Asked, MakeWorker
from tests.stand_ins.nvml import Fault, Value

MIB = 1 << 20
GPM: dict[int, Value | None] = {
    **{metric: 10.0 * place for place, metric in enumerate(SHARES)},
    20: 850.0,
    21: 1200.0,
    60: 9000.0,
    61: 8000.0,
}
ALL_BITS = 1.8446744073709552e19
ABSURD_SHARES = ["nan", "inf", -1.0, 101.5, ALL_BITS]


@pytest.fixture(scope="module")
def asked(make_worker: MakeWorker) -> Asked:
    return make_worker("--profiler")


@pytest.fixture
def worker(asked: Asked) -> Asked:
    asked.gpus.heal()
    asked.gpus.gpm(0, GPM)
    asked.ask()
    return asked


def grown(worker: Asked) -> tuple[GpuProfile, GpuSample]:
    """By how much the counters have grown in one round, and its sample."""
    before, sample = worker.ask().gpu().profile, worker.ask().gpu()
    added = GpuProfile(source=sample.profile.source)
    for field, value in sample.profile.ListFields():
        if field.name != "source":
            setattr(added, field.name, value - getattr(before, field.name))
    return added, sample


def test_shares_are_turned_into_the_time_in_which_the_unit_was_active(worker: Asked) -> None:
    added, sample = grown(worker)
    assert added.source == "gpm"
    assert added.measured_ns > 0
    for metric, name in SHARES.items():
        expected = GPM[metric] / 100 * added.measured_ns  # type: ignore[operator]
        assert getattr(added, name) == pytest.approx(expected, abs=2), name
    assert not sample.unavailable


def test_rates_are_turned_into_bytes(worker: Asked) -> None:
    added, _ = grown(worker)
    second = added.measured_ns / 1e9
    assert added.pcie_sent_bytes == pytest.approx(850 * MIB * second, abs=2)
    assert added.pcie_received_bytes == pytest.approx(1200 * MIB * second, abs=2)
    assert added.nvlink_received_bytes == pytest.approx(9000 * MIB * second, abs=2)
    assert added.nvlink_sent_bytes == pytest.approx(8000 * MIB * second, abs=2)


def test_the_first_round_only_begins(make_worker: MakeWorker) -> None:
    worker = make_worker("--profiler")
    worker.gpus.gpm(0, GPM)
    assert worker.ask().gpu().profile == GpuProfile(source="gpm")
    assert worker.ask().gpu().profile.sm_active_ns > 0


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("code", [3, 999])
def test_a_metric_that_nvml_does_not_give_is_missing_alone(worker: Asked, metric: int, code: int) -> None:
    worker.gpus.gpm(0, {metric: Fault(code)})
    sample = worker.ask().gpu()
    (name,) = sample.unavailable
    assert sample.unavailable[name] == reasons.sentence(code)
    assert not sample.profile.HasField(name.removeprefix("profile."))  # type: ignore[arg-type]
    assert len(sample.profile.ListFields()) == 2 + len(METRICS) - 1


@pytest.mark.parametrize("value", ABSURD_SHARES)
def test_a_share_that_cannot_be_true_is_not_taken(worker: Asked, value: Value) -> None:
    worker.gpus.gpm(0, {2: value})
    sample = worker.ask().gpu()
    assert sample.unavailable["profile.sm_active_ns"] == reasons.sentence(reasons.ABSURD)
    assert not sample.profile.HasField("sm_active_ns")
    assert sample.profile.HasField("tensor_ns")


@pytest.mark.parametrize("value", ["nan", -1.0, ALL_BITS])
def test_a_rate_that_cannot_be_true_is_not_taken(worker: Asked, value: Value) -> None:
    worker.gpus.gpm(0, {20: value})
    assert not worker.ask().gpu().profile.HasField("pcie_sent_bytes")


def test_a_rounded_share_is_at_most_the_whole(worker: Asked) -> None:
    worker.gpus.gpm(0, {2: 100.4})
    added, _ = grown(worker)
    assert added.sm_active_ns == added.measured_ns


@pytest.mark.parametrize("function", ["nvmlGpmSampleGet", "nvmlGpmMetricsGet"])
def test_a_round_without_gpm_says_so_and_the_next_ones_go_on(worker: Asked, function: str) -> None:
    before = worker.ask().gpu()
    worker.gpus.fail(function, 999)
    sample = worker.ask().gpu()
    assert sample.unavailable["profile"] == reasons.sentence(999)
    assert sample.profile == GpuProfile(source="gpm")
    assert sample.power_mw == before.power_mw
    worker.gpus.heal()
    worker.ask()
    assert worker.ask().gpu().profile.sm_active_ns > before.profile.sm_active_ns


# ---- without GPM


@pytest.mark.parametrize("how", ["no such function", "not supported", "not at all"])
def test_where_there_is_no_gpm_the_nearest_plain_figures_are_given_and_marked(
    make_worker: MakeWorker, how: str
) -> None:
    worker = make_worker("--profiler", variant="no_gpm" if how == "no such function" else "v3")
    worker.gpus.set(0, gpm_supported=0 if how == "not supported" else 1)
    if how == "not at all":  # it says that it has GPM, and has not
        worker.gpus.fail("nvmlGpmSampleGet", 3)
    worker.gpus.auto(0, memory_utilization=40, pcie_tx_kbps=1000, pcie_rx_kbps=2000)
    worker.ask()
    before = worker.ask().gpu().profile
    sample = worker.ask().gpu()
    assert sample.profile.source == "nvml"
    assert sample.profile.pcie_received_bytes - before.pcie_received_bytes == pytest.approx(
        2 * (sample.profile.pcie_sent_bytes - before.pcie_sent_bytes), rel=0.5
    )
    assert sample.profile.dram_ns == pytest.approx(0.4 * sample.profile.measured_ns, abs=50)
    only_gpm = {f"profile.{name}" for name in SHARES.values() if name not in ("graphics_ns", "dram_ns")}
    assert set(sample.unavailable) == only_gpm


def test_a_plain_rate_that_cannot_be_true_is_not_taken(make_worker: MakeWorker) -> None:
    worker = make_worker("--profiler", variant="no_gpm")
    worker.gpus.set(0, pcie_tx_kbps=4294967295)
    worker.ask()
    sample = worker.ask().gpu()
    assert not sample.profile.HasField("pcie_sent_bytes")
    assert sample.unavailable["profile.pcie_sent_bytes"] == reasons.sentence(reasons.ABSURD)
