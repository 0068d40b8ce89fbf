"""CPU time that the sources "cgroup" and "host" take per tick with 50 jobs.

Makes 50 real cgroups, each in every hierarchy of this machine that has figures and with a process in it
that works now and then, and prints the median and the dearest tick beside the target. Needs root.

    python -m bench.sources_tick [--jobs 50] [--ticks 200] [--interval 1.0]
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path

from expanse_ebpf.jobs.job import Job
from expanse_ebpf.sources.cgroup import CgroupSource
from expanse_ebpf.sources.host import HostSource
from expanse_ebpf.wire.collector_pb2 import JobIdentity, Report

TARGET_MS = 5.0  # for all sources together
ROOT = Path("/sys/fs/cgroup")
HIERARCHIES = ("unified", "memory", "cpuacct", "cpu", "blkio", "pids")
# A few short bursts a second, so that the files change between ticks as those of real jobs do.
WORK = "i=0; while :; do i=$((i+1)); [ $((i % 500)) = 0 ] && sleep 0.2; done"


def roots() -> dict[str, Path]:
    """The hierarchies that are mounted here; on a pure v2 host, the one at the top."""
    if (ROOT / "cgroup.controllers").exists():
        return {"unified": ROOT}
    return {name: ROOT / name for name in HIERARCHIES if (ROOT / name / "cgroup.procs").exists()}


def measure(jobs: list[Job], ticks: int, interval_s: float) -> tuple[list[float], int]:
    """CPU time of each tick in ms, and the size of the last report in bytes."""
    sources = (CgroupSource(interval_s), HostSource())
    for source in sources:
        source.start()
    spent, size = [], 0
    try:
        for _ in range(ticks):
            time.sleep(0.02)
            report = Report()
            pairs = [(job, report.jobs.add()) for job in jobs]
            before = time.process_time_ns()
            for source in sources:
                source.sample(time.monotonic(), pairs, report)
            spent.append((time.process_time_ns() - before) / 1e6)
            size = report.ByteSize()
    finally:
        for source in sources:
            source.stop()
    return spent, size


def remove(directory: Path) -> None:
    """Remove a cgroup whose last process may still be on its way out."""
    for _ in range(100):
        try:
            return directory.rmdir()
        except OSError:
            time.sleep(0.02)
    sys.exit(f"sources_tick: {directory} could not be removed")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--ticks", type=int, default=200)
    parser.add_argument("--interval", type=float, default=1.0)
    arguments = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("sources_tick: cgroups can be made by root only; run it with sudo")
    tag = f"test-expanse-bench-{uuid.uuid4().hex[:8]}"
    made: list[Path] = []
    children: list[subprocess.Popen[bytes]] = []
    jobs = []
    try:
        for index in range(arguments.jobs):
            directories = {name: root / f"{tag}-{index}" for name, root in roots().items()}
            for directory in directories.values():
                directory.mkdir()
                made.append(directory)
            child = subprocess.Popen(["sh", "-c", WORK], start_new_session=True)
            children.append(child)
            for directory in directories.values():
                (directory / "cgroup.procs").write_text(str(child.pid))
            identity = JobIdentity(scheduler="run", id=str(index))
            jobs.append(Job(identity, {name: str(path) for name, path in directories.items()}))
        spent, size = measure(jobs, arguments.ticks, arguments.interval)
    finally:
        for child in children:
            os.killpg(child.pid, signal.SIGKILL)  # its `sleep` as well
            child.wait()
        for directory in made:
            remove(directory)
    first, rest = spent[0], spent[1:]
    print(f"sources cgroup + host, {arguments.jobs} jobs in {', '.join(roots())}: CPU time per tick")
    print(f"  median {statistics.median(rest):.2f} ms, dearest {max(rest):.2f} ms, first {first:.2f} ms")
    print(f"  target for all sources together: at most {TARGET_MS:.0f} ms")
    print(f"  their part of a report: {size} bytes")


if __name__ == "__main__":
    main()
