"""The text of cgroup files, v1 and v2."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.sources import cgroup_files as parse

TICK = 1_000_000_000 // os.sysconf("SC_CLK_TCK")
V2_CPU = b"usage_usec 7000\nuser_usec 5000\nsystem_usec 2000\nnice_usec 0\n"
V2_CPU_LIMITED = V2_CPU + b"core_sched.force_idle_usec 0\nnr_periods 30\nnr_throttled 4\nthrottled_usec 250\n"
IO = b"8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n253:0 rbytes=1 wbytes=1 rios=1 wios=1\n"
BLKIO = (
    b"8:0 Read 4096\n8:0 Write 8192\n8:0 Sync 1\n8:0 Total 12288\n253:0 Read 5\n253:0 Write 6\nTotal 12299\n"
)


def nothing_stacked(device: bytes) -> bool:
    return False


@pytest.mark.parametrize(
    ("parser", "data", "figures"),
    [
        (parse.one, b"123\n", (123,)),
        (parse.one, b"max\n", (None,)),
        (parse.one, b"-1\n", (None,)),
        (parse.one, b"", (None,)),
        (parse.one, b"18446744073709551615\n", (2**64 - 1,)),
        (parse.one, b"18446744073709551616\n", (None,)),
        (parse.cpu_stat, V2_CPU, (7_000_000, 5_000_000, 2_000_000, None, None)),
        (parse.cpu_stat, V2_CPU_LIMITED, (7_000_000, 5_000_000, 2_000_000, 250_000, 4)),
        (parse.cpu_stat, b"", (None,) * 5),
        (parse.cpuacct_stat, b"user 12\nsystem 3\n", (12 * TICK, 3 * TICK)),
        (
            parse.throttling,
            b"nr_periods 9\nnr_throttled 2\nthrottled_time 77\nnr_bursts 0\nburst_time 0\n",
            (77, 2),
        ),
        (parse.memory_stat, b"anon 4096\nfile 8192\nanon_thp 1\nfile_mapped 2\n", (4096, 8192)),
        (
            parse.memory_stat_v1,
            b"cache 1\nrss 2\nhierarchical_memory_limit 9223372036854771712\n"
            b"total_cache 8192\ntotal_rss 4096\ntotal_rss_huge 7\n",
            (4096, 8192, None),
        ),
        (
            parse.memory_stat_v1,
            b"cache 1\nhierarchical_memory_limit 1073741824\ntotal_cache 0\ntotal_rss 0\n",
            (0, 0, 1 << 30),
        ),
        (parse.oom_kills, b"low 0\nhigh 0\nmax 5\noom 2\noom_kill 1\noom_group_kill 0\n", (1,)),
        (parse.oom_kills, b"oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", (3,)),
        (parse.oom_kills, b"oom_kill_disable 0\nunder_oom 0\n", (None,)),
        (
            parse.pressure,
            b"some avg10=0.00 avg60=0.00 avg300=0.00 total=11\n"
            b"full avg10=0.00 avg60=0.00 avg300=0.00 total=7\n",
            (11, 7),
        ),
        (parse.pressure, b"some avg10=0.00 avg60=0.00 avg300=0.00 total=11\n", (11, None)),
        (parse.pressure, b"", (None, None)),
    ],
)
def test_form(parser: Callable[[bytes], parse.Figures], data: bytes, figures: parse.Figures) -> None:
    assert parser(data) == figures


@pytest.mark.parametrize(
    ("data", "limit"),
    [
        (b"max\n", None),
        (b"9223372036854771712\n", None),  # 4 KiB pages
        (b"9223372036854710272\n", None),  # 64 KiB pages
        (b"9223372036854775807\n", None),
        (b"18446744073709551615\n", None),
        (b"-1\n", None),
        (b"", None),
        (b"1073741824\n", 1073741824),
        (b"0\n", 0),
    ],
)
def test_no_limit_is_no_value(data: bytes, limit: int | None) -> None:
    assert parse.limit(data) == limit


@pytest.mark.parametrize(
    ("data", "cores"),
    [
        (b"max 100000\n", None),
        (b"200000 100000\n", 2.0),
        (b"50000 100000\n", 0.5),
        (b"1 0\n", None),
        (b"", None),
    ],
)
def test_quota(data: bytes, cores: float | None) -> None:
    assert parse.quota(data) == cores


def test_quota_v1() -> None:
    assert parse.cores(b"-1\n", b"100000\n") is None
    assert parse.cores(b"150000\n", b"100000\n") == 1.5


def test_io_counts_devices_once() -> None:
    assert parse.io_stat(IO, nothing_stacked) == (4097, 8193, 2, 3)
    assert parse.io_stat(IO, lambda device: device == b"253:0") == (4096, 8192, 1, 2)
    assert parse.io_stat(b"", nothing_stacked) == (0, 0, 0, 0)
    assert parse.io_stat(b"8:0 rbytes=5\n8:16 rbytes=7 wby", nothing_stacked) == (5, 0, 0, 0)
    assert parse.blkio(BLKIO, nothing_stacked) == (4101, 8198)
    assert parse.blkio(BLKIO, lambda device: device == b"253:0") == (4096, 8192)
    assert parse.blkio(b"Total 0\n", nothing_stacked) == (None, None)
    zeros = b"8:0 Read 0\n8:0 Write 0\n8:0 Total 0\nTotal 0\n"
    assert parse.blkio(zeros, nothing_stacked) == (None, None)
    assert parse.blkio(zeros.replace(b"Write 0", b"Write 9"), nothing_stacked) == (0, 9)


@given(
    st.binary(max_size=400)
    | st.lists(st.sampled_from([V2_CPU_LIMITED, IO, BLKIO, b"max ", b" ", b"\n", b"9" * 30])).map(b"".join)
)
def test_anything_gives_figures_that_fit(data: bytes) -> None:
    figures: list[int | float | None] = [
        parse.limit(data),
        parse.quota(data),
        parse.field(data, b"nr_throttled"),
    ]
    for parser in (
        parse.one,
        parse.cpu_stat,
        parse.cpuacct_stat,
        parse.throttling,
        parse.memory_stat,
        parse.memory_stat_v1,
        parse.oom_kills,
        parse.pressure,
    ):
        figures += parser(data)
    figures += parse.io_stat(data, nothing_stacked)
    figures += parse.blkio(data, nothing_stacked)
    assert all(figure is None or 0 <= figure < 2**64 for figure in figures)


@pytest.mark.parametrize(
    ("readings", "figures"),
    [
        ([1000, 1050, 0, 1100], [1000, 1050, 1050, 1100]),  # one bad reading
        ([1000, 10, 20, 35], [1000, 1000, 1020, 1035]),  # the counter began anew
        ([400, 520], [400, 520]),
        ([5, 3, 7, 2, 9], [5, 5, 7, 7, 9]),
    ],
)
def test_a_cumulative_figure_never_falls(readings: list[int], figures: list[int]) -> None:
    rising = parse.Rising()
    assert [rising.feed(reading) for reading in readings] == figures


@given(st.lists(st.integers(0, 2**40)))
def test_whatever_is_read_it_never_falls(readings: list[int]) -> None:
    rising = parse.Rising()
    figures = [rising.feed(reading) for reading in readings]
    assert figures == sorted(figures)
