"""The CPU source: scaling, ownership of CPUs, what is missing and why."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.config import COUNTERS, Config, CpuConfig
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import perf
from expanse_ebpf.kernel.lifecycle import Lifecycle
from expanse_ebpf.sources import Context
from expanse_ebpf.sources.cpu import CpuSource, _Scaled, owned_cpus
from expanse_ebpf.wire.collector_pb2 import JobIdentity, Report
from tests.kernel.groups import Groups

SOFTWARE = tuple(
    perf.SOFTWARE[name]
    for name in ("cpu-clock", "task-clock", "page-faults", "context-switches", "cpu-migrations")
)


def test_a_counter_is_scaled_by_how_long_it_really_ran() -> None:
    scaled = _Scaled()
    assert scaled.update(0, 100, 10, 10) == (100, 1.0)
    assert scaled.update(0, 150, 20, 15) == (200, 0.5)  # 50 in half of the time
    assert scaled.update(0, 150, 30, 15) is None  # it had no register in this tick
    assert scaled.update(0, 160, 40, 20) == (240, 0.25)  # 10 in a quarter of both ticks
    assert scaled.update(0, 160, 40, 20) == (240, 1.0)  # the job did not run


def test_scaled_totals_never_fall() -> None:
    scaled = _Scaled()
    last = 0
    for value, enabled, running in [(10, 10, 1), (20, 20, 11), (30, 30, 12), (31, 90, 72)]:
        result = scaled.update(0, value, enabled, running)
        assert result is not None
        assert result[0] >= last
        last = result[0]


def job(folder: Path, slot: int | None, cpus: str, file: str = "cpuset.cpus.effective") -> Job:
    folder.mkdir()
    (folder / file).write_text(f"{cpus}\n")
    return Job(JobIdentity(), {"unified": str(folder)}, slot=slot)


@pytest.mark.parametrize(
    ("sets", "online", "owners"),
    [
        (["0-1", "2-3"], range(8), {0: 2, 1: 2, 2: 3, 3: 3}),
        (["0-1", "1-3"], range(8), None),  # CPU 1 is in both
        (["0-7"], range(8), None),  # everything: no cpuset of its own
        (["0-1", "0-7"], range(8), None),
        ([], range(8), None),
        ([""], range(8), None),
    ],
)
def test_owning_cpus_is_having_them_alone(
    sets: list[str], online: range, owners: dict[int, int] | None, tmp_path: Path
) -> None:
    jobs = [job(tmp_path / str(i), 2 + i, cpus) for i, cpus in enumerate(sets)]
    assert owned_cpus(jobs, online) == owners


def test_a_job_without_a_slot_or_a_readable_cpuset_owns_nothing(tmp_path: Path) -> None:
    assert owned_cpus([job(tmp_path / "a", None, "0-1")], range(8)) is None
    assert owned_cpus([Job(JobIdentity(), {"unified": str(tmp_path / "gone")}, slot=2)], range(8)) is None


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture
def lifecycle() -> Iterator[Lifecycle]:
    made = Lifecycle("unified", 0, lambda _: None)
    yield made
    made.close()


def sample(source: CpuSource, jobs: list[Job]) -> Report:
    report = Report()
    source.sample(time.monotonic(), [(one, report.jobs.add()) for one in jobs], report)
    return report


def test_without_a_pmu_hardware_counters_are_absent_with_their_reason(lifecycle: Lifecycle) -> None:
    """This kind of machine has none; where there is one, the same counters are there."""
    source = CpuSource(Context(Config(), lifecycle))
    source.start()
    try:
        sample(source, [])
        time.sleep(0.1)
        report = sample(source, [])
        truth = perf.self_test()
        assert source.unavailable == {name: why for name, why in truth.items() if why}
        for name in COUNTERS:
            assert report.host.system.HasField(name) == (not truth[name])
        assert report.host.system.context_switches > 0
    finally:
        source.stop()
        source.stop()


def test_counters_can_be_switched_off_one_by_one_and_as_a_group(lifecycle: Lifecycle) -> None:
    source = CpuSource(Context(Config(cpu=CpuConfig(counters=("cycles",))), lifecycle), SOFTWARE)
    source.start()
    try:
        assert set(source.unavailable) == set(COUNTERS) - {"cycles"}
        assert all("switched off" in why for why in source.unavailable.values())
        assert sample(source, []).host.system.cycles.value > 0
    finally:
        source.stop()
    source = CpuSource(Context(Config(cpu=CpuConfig(counters=())), lifecycle), SOFTWARE)
    source.start()
    try:
        assert set(source.unavailable) == set(COUNTERS)
    finally:
        source.stop()


def test_without_bpf_it_does_not_start() -> None:
    source = CpuSource(Context(Config(), None, "no BTF; boot a kernel with it"))
    with pytest.raises(UnavailableError, match="no BTF"):
        source.start()
    source.stop()


def test_jobs_with_cpus_of_their_own_are_counted_without_the_hook(
    groups: Groups, lifecycle: Lifecycle, tmp_path: Path
) -> None:
    path = groups.make()
    own = job(tmp_path / "cpuset", lifecycle.take(), "1")
    assert own.slot is not None
    lifecycle.assign(path.stat().st_ino, own.slot)
    source = CpuSource(Context(Config(cpu=CpuConfig(bpf_stats="always")), lifecycle), SOFTWARE)
    source.start()
    try:
        assert sample(source, [own]).collector.cpu_mode == "hook"
        for _ in range(3):
            report = sample(source, [own])
        assert report.collector.cpu_mode == "owned"
        assert not source._accounting.hooked  # type: ignore[union-attr]
        groups.start("while True: pass", path, cpus={1})
        first = sample(source, [own]).jobs[0]
        time.sleep(1)
        report = sample(source, [own])
        last = report.jobs[0]
        assert last.owns_cpus
        assert last.counters.cycles.value - first.counters.cycles.value == pytest.approx(
            1e9, rel=0.1
        )  # cpu-clock
        assert not last.counters.HasField("run_queue_wait_ns")
        assert "hook" in last.unavailable["run_queue_wait_ns"]
        assert not last.HasField("cpu_ns")
        runs = {p.name: p.runs for p in report.collector.programs}["on_switch"]
        time.sleep(0.3)
        assert {p.name: p.runs for p in sample(source, [own]).collector.programs}["on_switch"] == runs
        source.jobs_changed()
        assert sample(source, [own]).collector.cpu_mode == "hook"
    finally:
        source.stop()


def test_where_perf_events_have_died_new_ones_count_on(lifecycle: Lifecycle) -> None:
    """As the kernel side tells it when a CPU was away between two ticks."""
    source = CpuSource(Context(Config(), lifecycle), SOFTWARE)
    source.start()
    try:
        first = sample(source, []).host.system
        accounting, events = source._accounting, source._events
        assert accounting is not None
        assert events is not None
        old = {key: perf.read_counter(fd).enabled_ns for key, fd in events.descriptors.items()}
        struct.pack_into("=I", accounting._states, 256 + 120, 1)  # of CPU 1, events_lost
        struct.pack_into("=Q", accounting._hotplugs, 0, 1)
        second = sample(source, []).host.system
        assert source.unavailable == {"cpus": "just online, and counted from now on: 1"}
        for (name, cpu), fd in events.descriptors.items():
            assert (perf.read_counter(fd).enabled_ns < old[name, cpu]) == (cpu == 1)
        third = sample(source, []).host.system
        assert source.unavailable == {}
        assert first.cycles.value <= second.cycles.value <= third.cycles.value
        assert first.cycles.value < third.cycles.value
    finally:
        source.stop()


def test_the_programs_cost_is_measured_one_tick_in_so_many(lifecycle: Lifecycle) -> None:
    config = CpuConfig(bpf_stats="sampled", bpf_stats_every=3)
    source = CpuSource(Context(Config(cpu=config), lifecycle), SOFTWARE)
    source.start()
    try:
        measured = []
        for _ in range(7):
            report = sample(source, [])
            measured.append(max((p.measured_ns for p in report.collector.programs), default=0))
            time.sleep(0.05)
        grown = [b > a for a, b in itertools.pairwise(measured)]
        assert grown == [True, False, False, True, False, False]
        assert any(p.name == "on_switch" and p.runs > 0 for p in report.collector.programs)
    finally:
        source.stop()
