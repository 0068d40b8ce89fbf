"""Perf events: opening, refusing, CPUs that come and go, and the self-test of the PMU."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from expanse_ebpf.config import COUNTERS
from expanse_ebpf.kernel import perf
from expanse_ebpf.kernel.cpus import online, parse_cpu_list
from expanse_ebpf.kernel.perf import HARDWARE, SOFTWARE, EventSpec, Reading

CYCLES = HARDWARE["cycles"]


class FakeOpener:
    """Opens /dev/null, or fails as `fail` says."""

    def __init__(self, fail: Callable[[EventSpec, int], int] = lambda spec, cpu: 0) -> None:
        self.fail = fail
        self.opened: list[tuple[str, int]] = []

    def __call__(self, spec: EventSpec, cpu: int, group_fd: int = -1, *, pid: int = -1) -> int:
        code = self.fail(spec, cpu)
        if code:
            raise OSError(code, os.strerror(code))
        self.opened.append((spec.name, cpu))
        return os.open(os.devnull, os.O_RDONLY)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(
    ("code", "start", "names"),
    [
        (errno.ENOENT, "unsupported(ENOENT)", ""),
        (errno.EOPNOTSUPP, "unsupported(E", ""),
        (errno.ENODEV, "unsupported(ENODEV)", ""),
        (errno.EINVAL, "unsupported(EINVAL)", ""),
        (errno.EACCES, "permission(EACCES)", "CAP_PERFMON"),
        (errno.EPERM, "permission(EPERM)", "kernel.perf_event_paranoid"),
        (errno.EMFILE, "descriptors(EMFILE)", "RLIMIT_NOFILE"),
        (errno.ENFILE, "descriptors(ENFILE)", "fs.file-max"),
        (errno.EBUSY, "busy(EBUSY)", ""),
        (errno.ENOMEM, "failed(ENOMEM)", "memory"),
    ],
)
def test_a_refusal_has_its_reason(code: int, start: str, names: str) -> None:
    why = perf.reason(OSError(code, os.strerror(code)))
    assert why.startswith(start)
    assert names in why
    assert "\n" not in why


@pytest.mark.parametrize("code", [errno.ENOENT, errno.EOPNOTSUPP, errno.EINVAL, errno.ENODEV, errno.EACCES])
def test_without_a_pmu_every_counter_is_refused_and_nothing_fails(code: int) -> None:
    before = descriptors()
    opener = FakeOpener(lambda spec, cpu: code if spec.type == perf.TYPE_HARDWARE else 0)
    tested = perf.self_test(opener=opener)
    expected = "permission" if code == errno.EACCES else "unsupported"
    assert set(tested) == set(COUNTERS)
    assert all(why.startswith(expected) for why in tested.values())

    counters = perf.open_on_cpus([*HARDWARE.values(), SOFTWARE["context-switches"]], [0, 1], opener)
    assert set(counters.refused) == set(COUNTERS)
    assert counters.cpus_missing == 0
    assert set(counters.descriptors) == {("context-switches", 0), ("context-switches", 1)}
    counters.close()
    counters.close()
    assert descriptors() == before


def test_one_cpu_that_fails_is_missing_and_the_others_count() -> None:
    before = descriptors()
    cpus = parse_cpu_list("0-3,8-11,64")
    opener = FakeOpener(lambda spec, cpu: errno.ENODEV if cpu == 9 else 0)
    counters = perf.open_on_cpus([CYCLES], cpus, opener)
    assert len(counters.descriptors) == 8
    assert counters.cpus_missing == 1
    assert list(counters.missing) == [9]
    assert counters.missing[9].startswith("unsupported(ENODEV)")
    assert not counters.refused
    counters.close()
    assert descriptors() == before


def test_a_cpu_on_which_one_event_fails_counts_none() -> None:
    before = descriptors()
    opener = FakeOpener(lambda spec, cpu: errno.EBUSY if (spec.name, cpu) == ("instructions", 1) else 0)
    counters = perf.open_on_cpus([CYCLES, HARDWARE["instructions"]], [0, 1], opener)
    assert {cpu for _, cpu in counters.descriptors} == {0}
    assert set(counters.missing) == {1}
    counters.close()
    assert descriptors() == before


def test_cpu_zero_is_not_assumed() -> None:
    opener = FakeOpener()
    counters = perf.open_on_cpus([CYCLES], parse_cpu_list("1,3"), opener)
    assert opener.opened == [("cycles", 1), ("cycles", 3)]
    counters.close()


def test_cpus_that_come_and_go_are_followed() -> None:
    before = descriptors()
    counters = perf.open_on_cpus([CYCLES], [0, 1], FakeOpener())
    assert counters.update([0, 1, 2, 3]) == [2, 3]
    assert counters.update([0, 1, 2, 3]) == []
    assert len(counters.descriptors) == 4
    assert counters.update([0, 1]) == []
    assert sorted(cpu for _, cpu in counters.descriptors) == [0, 1]
    assert descriptors() == before + 2
    counters.close()


def test_where_events_have_died_they_are_opened_anew() -> None:
    before = descriptors()
    opener = FakeOpener()
    counters = perf.open_on_cpus([CYCLES, HARDWARE["instructions"]], [0, 1, 2], opener)
    opener.opened.clear()
    assert counters.update([0, 1], dead={1, 2}) == [1]  # back already, and gone
    assert opener.opened == [("cycles", 1), ("instructions", 1)]
    assert len(counters.descriptors) == 4
    assert descriptors() == before + 4
    counters.close()


def test_a_cpu_that_was_missing_is_tried_again() -> None:
    broken = {1}
    counters = perf.open_on_cpus(
        [CYCLES], [0, 1], FakeOpener(lambda spec, cpu: errno.ENODEV if cpu in broken else 0)
    )
    assert set(counters.missing) == {1}
    broken.clear()
    assert counters.update([0, 1]) == [1]
    assert counters.missing == {}
    counters.close()


@pytest.mark.parametrize(
    ("name", "reading", "believed"),
    [
        ("cycles", Reading(30_000_000, 10_000_000, 10_000_000), True),
        ("cycles", Reading(10_000_000, 10_000_000, 10_000_000), True),  # 1 GHz, an emulator
        ("cycles", Reading(3_000_000, 10_000_000, 1_000_000), True),  # counting a tenth of the time
        ("cycles", Reading(0, 10_000_000, 10_000_000), False),
        ("cycles", Reading(0, 10_000_000, 0), False),
        ("cycles", Reading(7, 10_000_000, 10_000_000), False),
        ("cycles", Reading(10**15, 10_000_000, 10_000_000), False),
        ("instructions", Reading(12, 10_000_000, 10_000_000), False),
        ("branch_misses", Reading(12, 10_000_000, 10_000_000), True),
        ("cache_misses", Reading(0, 10_000_000, 10_000_000), False),
    ],
)
def test_a_counter_is_believed_only_when_it_is_plausible(name: str, reading: Reading, believed: bool) -> None:
    why = perf.judge(name, reading, 0.01)
    assert (why == "") is believed
    result = perf.self_test([name], FakeOpener(), lambda fd: reading, lambda: 0.01)
    assert result == {name: why}


def test_a_pmu_whose_cycles_lie_is_not_believed_at_all() -> None:
    before = descriptors()
    result = perf.self_test(
        COUNTERS, FakeOpener(), lambda fd: Reading(0, 10_000_000, 10_000_000), lambda: 0.01
    )
    assert set(result) == set(COUNTERS)
    assert all("cycles" in why or name == "cycles" for name, why in result.items())
    assert all(result.values())
    assert descriptors() == before


def test_a_reader_that_fails_is_a_reason() -> None:
    def broken(descriptor: int) -> Reading:
        raise OSError(errno.EIO, "gone")

    assert perf.self_test(["cycles"], FakeOpener(), broken, lambda: 0.01) == {
        "cycles": "cannot be read: gone"
    }


def test_the_self_test_of_this_machine_ends_with_a_verdict() -> None:
    before = descriptors()
    result = perf.self_test()
    assert set(result) == set(COUNTERS)
    pmus = [p for p in Path("/sys/bus/event_source/devices").iterdir() if p.name.startswith(("cpu", "armv8"))]
    if not pmus:
        assert all(why.startswith("unsupported(ENOENT)") for why in result.values())
    assert descriptors() == before


def test_a_real_counter_agrees_with_the_kernel() -> None:
    """The task clock of this thread against its own CPU time: two ways to one figure."""
    descriptor = perf.open_counter(SOFTWARE["task-clock"], -1, pid=0)
    try:
        start = perf.read_counter(descriptor)
        spent = perf.known_loop(0.05)
        end = perf.read_counter(descriptor)
    finally:
        os.close(descriptor)
    assert (end.value - start.value) / 1e9 == pytest.approx(spent, rel=0.1)
    assert 0 < end.running_ns <= end.enabled_ns


def test_a_real_counter_per_cpu_counts_another_threads_faults() -> None:
    counters = perf.open_on_cpus([SOFTWARE["page-faults"]], online())
    try:
        assert not counters.missing
        assert not counters.refused
        before = sum(perf.read_counter(fd).value for fd in counters.descriptors.values())
        thread = threading.Thread(target=perf.known_loop, args=(0.02,))
        thread.start()
        thread.join()
        after = sum(perf.read_counter(fd).value for fd in counters.descriptors.values())
    finally:
        counters.close()
    assert after - before >= 64  # one pass of the known loop touches 64 fresh pages


def test_a_descriptor_does_not_reach_a_child() -> None:
    descriptor = perf.open_counter(SOFTWARE["cpu-clock"], online()[0])
    try:
        assert not os.get_inheritable(descriptor)
    finally:
        os.close(descriptor)


def test_a_value_is_scaled_by_the_time_it_counted() -> None:
    assert Reading(10, 100, 50).scaled == 20
    assert Reading(10, 100, 0).scaled is None
