"""The whole node's figures, and what the agent itself costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.sources import host
from expanse_ebpf.sources.host import HostSource
from expanse_ebpf.wire.collector_pb2 import HostSample, Report

TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")


def test_busy_time_is_all_but_idle_waiting_and_stolen() -> None:
    # user nice system idle iowait irq softirq steal guest guest_nice; guests are in user and nice.
    stat = b"cpu  100 10 50 9000 700 3 4 600 40 5\ncpu0 1 1 1 1 1 1 1 1 1 1\n"
    assert host.busy_ns(stat) == (100 + 10 + 50 + 3 + 4) * TICK


@pytest.mark.parametrize("stat", [b"", b"cpu 1 2 3\n", b"cpu0 1 2 3 4 5 6 7 8\n", b"cpu 1 x 3 4 5 6 7 8\n"])
def test_no_busy_time(stat: bytes) -> None:
    assert host.busy_ns(stat) is None


def test_memory_and_load() -> None:
    assert host.memory(b"MemTotal:       2048 kB\nMemFree: 1 kB\nMemAvailable:   1024 kB\n") == (
        2 << 20,
        1 << 20,
    )
    assert host.memory(b"MemTotal:       2048 kB\n") == (2 << 20, None)
    assert host.memory(b"") == (None, None)
    assert host.load(b"1.25 0.50 0.10 1/90 1234\n") == 1.25
    assert host.load(b"nan 0.50 0.10 1/90 1234\n") is None


@given(st.binary(max_size=300))
def test_any_content_is_survived(data: bytes) -> None:
    HostSample(
        cpu_busy_ns=host.busy_ns(data),
        memory_total_bytes=host.memory(data)[0],
        memory_available_bytes=host.memory(data)[1],
        load_1m=host.load(data),
    )


def test_this_machine() -> None:
    source = HostSource()
    source.start()
    try:
        report = Report()
        source.sample(0, [], report)
        before = report.host.cpu_busy_ns
        end = time.process_time() + 0.3
        while time.process_time() < end:
            pass
        source.sample(1, [], report)
        assert report.host.cpus_online >= len(os.sched_getaffinity(0))
        # The kernel counts here in clock ticks of each CPU.
        assert report.host.cpu_busy_ns - before > 200_000_000
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
        assert report.host.memory_total_bytes == pages
        assert 0 < report.host.memory_available_bytes <= pages
        assert abs(report.host.load_1m - os.getloadavg()[0]) < 5
        assert source.unavailable == {}
    finally:
        source.stop()
        source.stop()


def test_a_file_that_is_missing_leaves_its_figure_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(host._FILES, "memory", str(tmp_path / "none"))
    source = HostSource()
    source.start()
    try:
        report = Report()
        source.sample(0, [], report)
        assert not report.host.HasField("memory_total_bytes")
        assert report.host.HasField("cpu_busy_ns")
        assert "No such file" in source.unavailable["memory"]
    finally:
        source.stop()


# A process of its own: that of the tests gives memory back when it likes.
OWN_COST = """
import os, resource
from expanse_ebpf.own_cost import OwnCost
from expanse_ebpf.wire.collector_pb2 import CollectorSample
cost = OwnCost(pss_every=2)
first, second, third = CollectorSample(), CollectorSample(), CollectorSample()
cost.fill(first)
usage = resource.getrusage(resource.RUSAGE_SELF)
assert abs(first.cpu_ns / 1e9 - usage.ru_utime - usage.ru_stime) < 0.1
assert 5 << 20 < first.pss_bytes <= first.rss_bytes + (1 << 20)
block = bytearray(os.urandom(1 << 16)) * 1024
cost.fill(second)
assert second.pss_bytes == first.pss_bytes  # carried along
cost.fill(third)
assert third.pss_bytes >= first.pss_bytes + len(block) - (8 << 20)
"""


def test_own_cost() -> None:
    subprocess.run([sys.executable, "-c", OWN_COST], check=True)
