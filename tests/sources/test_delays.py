"""Delay accounting: the structure of every version, and the real kernel with its switch on and off."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.sources import delays
from expanse_ebpf.sources.delays import DelaysSource, Taken, decode, statistics
from expanse_ebpf.wire.collector_pb2 import JobIdentity, JobSample, Report

SWITCH = Path(delays.SWITCH)


@pytest.fixture
def switch() -> Iterator[Path]:
    before = SWITCH.read_text()
    try:
        yield SWITCH
    finally:
        SWITCH.write_text(before)


@pytest.fixture
def source(switch: Path) -> Iterator[DelaysSource]:
    switch.write_text("1")
    made = DelaysSource(interval_s=60)  # every tick is a turn
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.stop()


class Children:
    """Processes that are started together and ended whatever happens."""

    def __init__(self) -> None:
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, code: str) -> int:
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE)
        self.all.append(child)
        return child.pid

    def close(self) -> None:
        for child in self.all:
            child.kill()
            child.communicate()


@pytest.fixture
def children() -> Iterator[Children]:
    made = Children()
    try:
        yield made
    finally:
        made.close()


def sampled(source: DelaysSource, job: Job) -> JobSample:
    report = Report()
    source.sample(time.monotonic(), [(job, report.jobs.add())], report)
    return report.jobs[0]


def job_of(*pids: int) -> Job:
    return Job(JobIdentity(scheduler="run", id="x"), pids=frozenset(pids))


def waited_ns(pid: int) -> int:
    """Run-queue wait of a process of one thread as the scheduler tells it."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])


def taskstats(version: int, *, size: int, **places: int) -> bytes:
    stats = bytearray(size)
    struct.pack_into("=H", stats, 0, version)
    for name, value in places.items():
        struct.pack_into("=Q", stats, int(name[2:]), value)
    return bytes(stats)


@pytest.mark.parametrize(
    ("stats", "taken"),
    [
        (
            taskstats(13, size=416, at16=9, at24=1, at40=2, at56=3, at320=4, at144=5),
            Taken((1, 2, 3, 4), 5, False),
        ),
        (
            taskstats(16, size=560, at16=9, at24=1, at40=2, at56=3, at320=4, at144=5),
            Taken((1, 2, 3, 4), 5, False),
        ),
        (
            taskstats(15, size=560, at16=9, at24=1, at56=2, at88=3, at368=4, at192=5),
            Taken((1, 2, 3, 4), 5, False),
        ),
        (taskstats(16, size=560, at16=9, at312=1), Taken((0, 0, 0, 0), 0, True)),
        (taskstats(15, size=560, at16=9, at80=1), Taken((0, 0, 0, 0), 0, True)),
        (taskstats(13, size=416, at24=1), None),  # never on a CPU: nothing was accounted
        (taskstats(6, size=312, at16=9), None),  # too old to know of reclaim
        (b"", None),
        (b"\x0d", None),
    ],
)
def test_every_version(stats: bytes, taken: Taken | None) -> None:
    assert decode(stats) == taken


@given(st.binary(max_size=700))
def test_any_answer_is_survived(data: bytes) -> None:
    decode(data)
    try:
        assert isinstance(statistics(data), bytes)
    except OSError:
        return


def test_waiting_for_a_cpu(source: DelaysSource, children: Children) -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"import os\nos.sched_setaffinity(0, {{{cpu}}})\nprint(flush=True)\nwhile True: pass\n"
    pids = [children.start(code) for _ in range(2)]
    for child in children.all:
        assert child.stdout is not None
        child.stdout.readline()
    time.sleep(0.5)
    job = job_of(*pids)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(0.1)
    sample = sampled(source, job)
    waited = sum(waited_ns(pid) for pid in pids)
    assert sample.delays.cpu_ns > 200_000_000
    assert abs(sample.delays.cpu_ns - waited) <= 0.03 * waited
    assert sample.delays.HasField("swap_in_ns")
    assert sample.delays.HasField("memory_reclaim_ns")
    assert not sample.unavailable


def test_waiting_for_a_disk(source: DelaysSource, children: Children, tmp_path: Path) -> None:
    code = (
        "import mmap, os, sys\n"
        f"fd = os.open({str(tmp_path / 'data')!r}, os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)\n"
        "block = mmap.mmap(-1, 1 << 20)\n"
        "for _ in range(16): os.write(fd, block)\n"
        "print(flush=True)\nimport time; time.sleep(600)\n"
    )
    pid = children.start(code)
    stdout = children.all[0].stdout
    assert stdout is not None
    assert stdout.readline() == b"\n"
    assert sampled(source, job_of(pid)).delays.block_io_ns > 0


def test_what_a_process_waited_stays_when_it_is_gone(source: DelaysSource, children: Children) -> None:
    code = "print(flush=True)\nimport time; time.sleep(600)\n"
    pids = [children.start(code) for _ in range(2)]
    for child in children.all:
        assert child.stdout is not None
        child.stdout.readline()
    job = job_of(*pids)
    before = sampled(source, job).delays
    assert before.cpu_ns > 0
    children.all[0].kill()
    children.all[0].wait()
    assert sampled(source, job).delays.cpu_ns >= before.cpu_ns  # the list of processes may lag
    job.pids = frozenset(pids[1:])
    assert sampled(source, job).delays.cpu_ns >= before.cpu_ns
    job.pids = frozenset()
    assert sampled(source, job).delays.cpu_ns >= before.cpu_ns


def test_a_pid_that_is_used_anew_adds_up() -> None:
    job = delays._JobDelays()
    job.take(7, Taken((100, 10, 1, 0), 5_000_000, True), 0)
    job.take(7, Taken((120, 10, 1, 0), 6_000_000, True), 0)
    job.take(7, Taken((30, 0, 0, 2), 1_000, True), 0)
    sample = JobSample()
    job.fill(sample)
    assert (sample.delays.cpu_ns, sample.delays.block_io_ns) == (150, 10)
    assert (sample.delays.swap_in_ns, sample.delays.memory_reclaim_ns) == (1, 2)


def test_a_process_of_another_cgroup_is_not_the_jobs(source: DelaysSource) -> None:
    job = job_of(os.getpid())
    job.identity.cgroup = "/test-expanse-elsewhere"
    assert not sampled(source, job).HasField("delays")


def test_a_process_older_than_the_switch_has_no_account_of_waits_for_devices(
    switch: Path, children: Children
) -> None:
    switch.write_text("0")
    pid = children.start("print(flush=True)\nimport time; time.sleep(600)\n")
    stdout = children.all[0].stdout
    assert stdout is not None
    stdout.readline()
    switch.write_text("1")
    source = DelaysSource(interval_s=60)
    source.start()
    try:
        sample = sampled(source, job_of(pid))
        assert sample.delays.HasField("cpu_ns")  # told always, and 0 where it never had to wait
        assert not sample.delays.HasField("block_io_ns")
        assert "task_delayacct" in sample.unavailable["delays"]
    finally:
        source.stop()


def test_the_switch_is_off(switch: Path) -> None:
    switch.write_text("0")
    source = DelaysSource()
    with pytest.raises(UnavailableError, match=r"^delays: .* sysctl kernel.task_delayacct=1$"):
        source.start()
    assert switch.read_text() == "0\n"
    source.stop()


def test_the_switch_goes_off_meanwhile(source: DelaysSource, switch: Path) -> None:
    switch.write_text("0")
    sampled(source, job_of())
    assert "task_delayacct" in source.unavailable["delays"]
    switch.write_text("1")
    sampled(source, job_of())
    assert source.unavailable == {}
