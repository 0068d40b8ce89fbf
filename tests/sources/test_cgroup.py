"""The source "cgroup" on real cgroups of this machine, and on plain files that stand in for v2's."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.jobs.job import Job
from expanse_ebpf.sources.cgroup import CgroupSource
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobIdentity, JobSample, Report
from tests.kernel.groups import Groups

V1 = ("memory", "cpuacct", "cpu", "blkio", "pids")
LOOP = "print(flush=True)\nwhile True: pass\n"
TOUCH = "data = bytearray(os.urandom(1 << 20)) * 64\nprint(flush=True)\nsys.stdin.read()\n"


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def source() -> Iterator[CgroupSource]:
    made = CgroupSource(interval_s=60)  # every tick is a slow one
    made.start()
    try:
        yield made
    finally:
        made.stop()


def job_in(directories: dict[str, Path]) -> Job:
    return Job(
        JobIdentity(scheduler="run", id="x"),
        directories={name: str(path) for name, path in directories.items()},
    )


def sampled(source: CgroupSource, *jobs: Job) -> list[JobSample]:
    report = Report()
    pairs = [(job, report.jobs.add()) for job in jobs]
    source.sample(time.monotonic(), pairs, report)
    return [sample for _, sample in pairs]


def descriptors() -> set[str]:
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.add(str(entry.readlink()))
        except OSError:
            continue
    return {path for path in found if "/sys/fs/cgroup" in path}


def usage_ns(directories: dict[str, Path]) -> int:
    return int((directories["cpuacct"] / "cpuacct.usage").read_text())


@pytest.mark.parametrize("hierarchies", [("unified", *V1), V1, ("unified",)], ids=["hybrid", "v1", "v2"])
def test_cpu_time_of_a_loop(groups: Groups, source: CgroupSource, hierarchies: tuple[str, ...]) -> None:
    directories = {name: groups.make(name) for name in (*hierarchies, "cpuacct")}
    child = groups.start(LOOP, *directories.values())
    assert child.stdout is not None
    child.stdout.readline()
    job = job_in({name: directories[name] for name in hierarchies})
    time.sleep(0.5)
    low = usage_ns(directories)
    (sample,) = sampled(source, job)
    high = usage_ns(directories)
    # The v2 figure is in whole microseconds and may lag by a clock tick.
    assert low - 20_000_000 <= sample.cpu_ns <= high + 20_000_000
    assert sample.cpu_ns > 200_000_000
    assert abs(sample.cpu_user_ns + sample.cpu_system_ns - sample.cpu_ns) < 50_000_000
    assert "cpu" not in sample.unavailable
    before = sample.cpu_ns
    time.sleep(0.2)
    assert sampled(source, job)[0].cpu_ns > before + 50_000_000


def test_memory_that_was_touched(groups: Groups, source: CgroupSource) -> None:
    directory = groups.make("memory")
    child = groups.start(TOUCH, directory)
    assert child.stdout is not None
    child.stdout.readline()
    (sample,) = sampled(source, job_in({"memory": directory}))
    assert 64 << 20 <= sample.memory_bytes < 128 << 20
    assert 64 << 20 <= sample.memory_anon_bytes <= sample.memory_bytes
    assert sample.memory_peak_bytes >= sample.memory_anon_bytes
    assert sample.HasField("memory_file_bytes")
    assert sample.oom_kills == 0
    assert not sample.HasField("memory_limit_bytes")
    assert dict(sample.unavailable) == {
        "cpu": "no cpuacct cgroup of its own",
        "io": "no blkio cgroup of its own",
        "throttling": "no cpu cgroup of its own",
        "pressure": "no unified cgroup of its own, and v1 has no pressure figures",
    }


def test_a_cpu_cgroup_that_a_job_was_not_in_all_the_time(tmp_path: Path, source: CgroupSource) -> None:
    job, usage, stat = job_in({}), tmp_path / "cpuacct.usage", tmp_path / "cpuacct.stat"

    def sample_with(hooked_s: float, in_cgroup_s: float | None = None) -> JobSample:
        if in_cgroup_s is not None:
            job.directories = {"cpuacct": str(tmp_path)}
            usage.write_text(f"{in_cgroup_s * 1e9:.0f}\n")
            stat.write_text(f"user {in_cgroup_s * 100:.0f}\nsystem 0\n")
        sample = JobSample(cpu_ns=int(hooked_s * 1e9))
        source.sample(time.monotonic(), [(job, sample)], Report())
        return sample

    assert sample_with(5).cpu_ns == 5_000_000_000
    # Made for it later: what was before is known from the hook.
    made = sample_with(5.25, 0.25)
    assert made.cpu_ns == 5_000_000_000
    assert not made.HasField("cpu_user_ns")
    assert "hook" in made.unavailable["cpu"]
    assert sample_with(6.25, 1.25).cpu_ns == 6_000_000_000
    # It is moved out again, and goes on.
    assert sample_with(8.5, 1.25).cpu_ns == 8_500_000_000
    assert sample_with(8.6, 1.25).cpu_ns == 8_600_000_000
    # It comes back; then the hook is off for a while.
    assert sample_with(9.0, 1.65).cpu_ns == 9_000_000_000
    assert sample_with(0, 1.75).cpu_ns == 9_100_000_000
    assert sample_with(9.1, 1.85).cpu_ns == 9_200_000_000


def test_cpu_time_from_before_is_kept_when_the_hook_is_off_meanwhile(
    tmp_path: Path, source: CgroupSource
) -> None:
    job = job_in({})
    for hooked_s in (50, 0, 52):
        if hooked_s == 52:
            (tmp_path / "cpuacct.usage").write_text("3000000000\n")
            job.directories = {"cpuacct": str(tmp_path)}
        sample = JobSample(cpu_ns=hooked_s * 1_000_000_000)
        source.sample(time.monotonic(), [(job, sample)], Report())
    assert sample.cpu_ns == 50_000_000_000


@pytest.mark.parametrize("hierarchy", ["cpuacct", "unified"])
def test_two_accounts_of_a_long_job_drift_apart(tmp_path: Path, source: CgroupSource, hierarchy: str) -> None:
    job = job_in({hierarchy: tmp_path})
    for counted_s, hooked_s in ((6000.1, 6001.101), (6000.2, 6001.199), (6000.3, 6001.302)):
        (tmp_path / "cpuacct.usage").write_text(f"{counted_s * 1e9:.0f}\n")
        (tmp_path / "cpuacct.stat").write_text(f"user {counted_s * 100:.0f}\nsystem 0\n")
        usec = f"{counted_s * 1e6:.0f}"
        (tmp_path / "cpu.stat").write_text(f"usage_usec {usec}\nuser_usec {usec}\nsystem_usec 0\n")
        sample = JobSample(cpu_ns=int(hooked_s * 1e9))
        source.sample(time.monotonic(), [(job, sample)], Report())
        assert sample.cpu_ns == round(counted_s * 1e9)
        assert sample.HasField("cpu_user_ns")
        assert "cpu" not in sample.unavailable


def test_a_cpu_cgroup_of_the_jobs_own_knows_best(tmp_path: Path, source: CgroupSource) -> None:
    (tmp_path / "cpuacct.usage").write_text("7000000000\n")
    (tmp_path / "cpuacct.stat").write_text("user 600\nsystem 100\n")
    job = job_in({"cpuacct": tmp_path})
    for hooked_ns in (0, 3_000_000_000, 7_900_000_000):  # an agent younger than the job; times of reading
        sample = JobSample(cpu_ns=hooked_ns)
        source.sample(time.monotonic(), [(job, sample)], Report())
        assert (sample.cpu_ns, sample.cpu_user_ns) == (7_000_000_000, 6_000_000_000)
        assert "cpu" not in sample.unavailable


def test_what_is_switched_off_is_named(tmp_path: Path, source: CgroupSource) -> None:
    (tmp_path / "cpu.stat").write_text("usage_usec 5\nuser_usec 3\nsystem_usec 2\n")
    (tmp_path / "cgroup.controllers").write_text("cpu pids\n")
    (sample,) = sampled(source, job_in({"unified": tmp_path}))
    assert sample.unavailable["memory"] == "the memory controller is not on in its cgroup"
    assert sample.unavailable["io"] == "the io controller is not on in its cgroup"
    assert sample.unavailable["throttling"] == "its cgroup has no throttling counters"
    assert not sample.HasField("memory_bytes")


def test_limits_set_above_the_job(groups: Groups, source: CgroupSource) -> None:
    above = {name: groups.make(name, "a") for name in ("memory", "cpu")}
    below = {name: groups.make(name, "a/job") for name in above}
    (sample,) = sampled(source, job_in(below))
    assert not sample.HasField("memory_limit_bytes")
    assert not sample.HasField("cpu_limit_cores")
    (above["memory"] / "memory.limit_in_bytes").write_text(str(1 << 30))
    (above["cpu"] / "cpu.cfs_quota_us").write_text("150000")
    (sample,) = sampled(source, job_in(below))
    assert sample.memory_limit_bytes == 1 << 30
    assert sample.cpu_limit_cores == 1.5
    (below["memory"] / "memory.limit_in_bytes").write_text(str(1 << 29))
    (below["cpu"] / "cpu.cfs_quota_us").write_text("50000")
    (sample,) = sampled(source, job_in(below))
    assert sample.memory_limit_bytes == 1 << 29
    assert sample.cpu_limit_cores == 0.5


def test_throttling_by_a_quota(groups: Groups, source: CgroupSource) -> None:
    directories = {name: groups.make(name) for name in ("unified", "cpu", "cpuacct")}
    (directories["cpu"] / "cpu.cfs_quota_us").write_text("20000")
    child = groups.start(LOOP, *directories.values())
    assert child.stdout is not None
    child.stdout.readline()
    time.sleep(0.7)
    (sample,) = sampled(source, job_in(directories))
    assert sample.cpu_limit_cores == 0.2
    assert sample.throttled_periods >= 2
    assert sample.throttled_ns > 50_000_000
    assert sample.HasField("cpu_pressure")
    assert sample.cpu_pressure.HasField("some_us")


def test_io_of_a_job(groups: Groups, source: CgroupSource, tmp_path: Path) -> None:
    directory = groups.make("blkio")
    device = tmp_path.stat().st_dev
    job = job_in({"blkio": directory})
    (sample,) = sampled(source, job)
    assert not sample.HasField("io_write_bytes")  # "Total 0" is no word about any device
    assert "devices with a limit only" in sample.unavailable["io"]
    # A limit that limits nothing makes the kernel count.
    limit = directory / "blkio.throttle.write_bps_device"
    limit.write_text(f"{os.major(device)}:{os.minor(device)} {1 << 50}")
    file = tmp_path / "data"
    child = groups.start(
        "import mmap\n"
        f"fd = os.open({str(file)!r}, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600)\n"
        "block = mmap.mmap(-1, 1 << 20)\n"
        "for _ in range(4): os.write(fd, block)\n"
        "print(flush=True)\nsys.stdin.read()\n",
        directory,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "\n"
    (sample,) = sampled(source, job)
    assert 4 << 20 <= sample.io_write_bytes < 6 << 20
    assert sample.io_write_ops >= 4
    assert sample.io_read_bytes < 4 << 20
    assert "io" not in sample.unavailable


def test_a_kill_for_memory_in_a_step_is_kept_when_the_step_is_gone(
    groups: Groups, source: CgroupSource
) -> None:
    step = groups.make("memory", "a/step")
    job = job_in({"memory": step.parent})
    assert sampled(source, job)[0].oom_kills == 0
    (step / "memory.limit_in_bytes").write_text(str(16 << 20))
    child = groups.start("data = bytearray(os.urandom(1 << 20)) * 256\n", step)
    assert child.wait() == -9
    assert sampled(source, job)[0].oom_kills == 1
    assert "oom_kill 0" in (step.parent / "memory.oom_control").read_text()
    step.rmdir()
    assert sampled(source, job)[0].oom_kills == 1


def test_the_last_sample_of_a_removed_cgroup(groups: Groups, source: CgroupSource) -> None:
    directories = {name: groups.make(name) for name in ("unified", *V1)}
    child = groups.start(
        "while time.process_time() < 0.4: pass\nprint(flush=True)\nsys.stdin.read()\n", *directories.values()
    )
    assert child.stdout is not None
    child.stdout.readline()
    job = job_in(directories)
    (before,) = sampled(source, job)
    assert descriptors()
    child.communicate("")
    for directory in directories.values():
        directory.rmdir()
    job.state = JOB_STATE_ENDED
    (last,) = sampled(source, job)
    assert last.cpu_ns >= before.cpu_ns > 200_000_000
    assert last.throttled_periods == before.throttled_periods
    assert last.memory_peak_bytes == before.memory_peak_bytes
    for gauge in ("memory_bytes", "memory_anon_bytes", "memory_file_bytes", "cpu_limit_cores"):
        assert not last.HasField(gauge), gauge
    assert last.unavailable["memory"] == "its cgroup is gone"
    assert descriptors() == set()


def test_one_hierarchy_lost_is_not_all_lost(groups: Groups, source: CgroupSource) -> None:
    directories = {name: groups.make(name) for name in ("unified", "memory", "cpuacct")}
    job = job_in(directories)
    assert sampled(source, job)[0].HasField("memory_bytes")
    directories["memory"].rmdir()
    (sample,) = sampled(source, job)
    assert not sample.HasField("memory_bytes")
    assert sample.HasField("cpu_ns")


def test_a_cgroup_that_comes_later(groups: Groups, source: CgroupSource) -> None:
    job = job_in({"freezer": groups.make("freezer")})
    (sample,) = sampled(source, job)
    assert not sample.HasField("cpu_ns")
    assert dict(sample.unavailable) == {"cgroup": "no cgroup of its own in a hierarchy with figures"}
    job.directories["memory"] = str(groups.make("memory"))
    job.directories["cpuacct"] = str(groups.make("cpuacct"))
    (sample,) = sampled(source, job)
    assert sample.HasField("memory_bytes")
    assert sample.HasField("cpu_ns")
    assert "cgroup" not in sample.unavailable


def test_descriptors_of_a_job_that_left_are_closed(groups: Groups, source: CgroupSource) -> None:
    jobs = [job_in({name: groups.make(name, part) for name in ("unified", "memory")}) for part in ("a", "b")]
    sampled(source, *jobs)
    both = descriptors()
    sampled(source, jobs[0])
    assert {path for path in both if path.startswith(jobs[0].directories["memory"])} <= descriptors()
    assert not any(path.startswith(tuple(jobs[1].directories.values())) for path in descriptors())
    source.stop()
    source.stop()
    assert descriptors() == set()


def test_slow_files_are_read_in_turns_and_carried_along(groups: Groups) -> None:
    source = CgroupSource(interval_s=1)
    try:
        job = job_in({"memory": groups.make("memory")})
        assert not sampled(source, job)[0].HasField("memory_limit_bytes")
        Path(job.directories["memory"], "memory.limit_in_bytes").write_text(str(1 << 30))
        seen = [sampled(source, job)[0].HasField("memory_limit_bytes") for _ in range(12)]
        assert seen == sorted(seen)
        assert not seen[0]
        assert seen[5]
    finally:
        source.stop()


@pytest.mark.parametrize(
    ("text", "limit"),
    [("max\n", None), ("9223372036854771712\n", None), (None, None), ("1073741824\n", 1 << 30)],
)
def test_no_sentinel_in_v2(tmp_path: Path, source: CgroupSource, text: str | None, limit: int | None) -> None:
    (tmp_path / "memory.current").write_text("536870912\n")
    if text is not None:
        (tmp_path / "memory.max").write_text(text)
    (sample,) = sampled(source, job_in({"unified": tmp_path}))
    assert sample.memory_bytes == 536870912
    assert sample.HasField("memory_limit_bytes") == (limit is not None)
    assert limit is None or 100 * sample.memory_bytes / sample.memory_limit_bytes == 50.0


def test_v2_files(tmp_path: Path, source: CgroupSource) -> None:
    pod = tmp_path / "pod"
    job = pod / "job"
    job.mkdir(parents=True)
    (pod / "memory.max").write_text("4096\n")
    (pod / "cpu.max").write_text("300000 100000\n")
    for name, text in {
        "cpu.stat": "usage_usec 9\nuser_usec 5\nsystem_usec 4\nnr_throttled 2\nthrottled_usec 1\n",
        "cpu.max": "max 100000\n",
        "memory.current": "2048\n",
        "memory.max": "max\n",
        "memory.peak": "4000\n",
        "memory.stat": "anon 1024\nfile 512\n",
        "memory.events": "oom 1\noom_kill 1\n",
        "io.stat": "8:0 rbytes=1 wbytes=2 rios=3 wios=4\n",
        "cpu.pressure": "some avg10=0.00 total=5\nfull avg10=0.00 total=6\n",
        "memory.pressure": "some avg10=0.00 total=7\nfull avg10=0.00 total=8\n",
        "io.pressure": "some avg10=0.00 total=9\nfull avg10=0.00 total=10\n",
    }.items():
        (job / name).write_text(text)
    (sample,) = sampled(source, job_in({"unified": job}))
    expected = JobSample(
        cpu_ns=9000,
        cpu_user_ns=5000,
        cpu_system_ns=4000,
        throttled_ns=1000,
        throttled_periods=2,
        memory_bytes=2048,
        memory_peak_bytes=4000,
        memory_limit_bytes=4096,
        memory_anon_bytes=1024,
        memory_file_bytes=512,
        oom_kills=1,
        io_read_bytes=1,
        io_write_bytes=2,
        io_read_ops=3,
        io_write_ops=4,
        cpu_limit_cores=3.0,
        cpu_pressure={"some_us": 5, "full_us": 6},
        memory_pressure={"some_us": 7, "full_us": 8},
        io_pressure={"some_us": 9, "full_us": 10},
    )
    assert sample == expected
    # A bad reading does not make a counter fall.
    (job / "cpu.stat").write_text("usage_usec 0\nuser_usec 0\nsystem_usec 0\n")
    assert sampled(source, job_in({"unified": job}))[0].cpu_ns == 0  # of a new run: from the beginning


def test_a_single_bad_reading_is_held_back(tmp_path: Path, source: CgroupSource) -> None:
    job = job_in({"unified": tmp_path})
    seen = []
    for usage in (1000, 1050, 0, 1100):
        (tmp_path / "cpu.stat").write_text(f"usage_usec {usage}\n")
        seen.append(sampled(source, job)[0].cpu_ns)
    assert seen == [1_000_000, 1_050_000, 1_050_000, 1_100_000]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(content=st.binary(max_size=300))
def test_any_content_is_survived(tmp_path: Path, content: bytes) -> None:
    source = CgroupSource(60)
    for name in (
        "cpu.stat",
        "memory.current",
        "io.stat",
        "memory.max",
        "cpu.max",
        "cpu.pressure",
        "memory.stat",
    ):
        (tmp_path / name).write_bytes(content)
    job = job_in({"unified": tmp_path, "memory": tmp_path, "cpu": Path("/\0"), "blkio": Path("/nowhere")})
    for _ in range(2):
        (sample,) = sampled(source, job)
        sample.SerializeToString()
    source.stop()
