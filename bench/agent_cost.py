"""What the agent costs: CPU time per tick and memory with 1 and with 50 jobs, and how even its ticks are.

The real command with a real controller beside it; jobs are real cgroups in every hierarchy, each with a
process that does a little.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from expanse_ebpf.jobs.hierarchies import mounted
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report

ME = (sys.executable, "-m", "expanse_ebpf")
TICKS = 40
WARM_UP = 12  # ticks: imports, first reads, the first look at PSS
WORK = "import time\nwhile True:\n time.sleep(0.05)\n sum(range(3000))"


def jobs(count: int) -> tuple[list[Path], list[subprocess.Popen[bytes]]]:
    folders, processes = [], []
    for i in range(count):
        own = []
        for hierarchy in mounted():
            if hierarchy.named:
                continue
            folder = Path(hierarchy.mount) / f"expanse-run-bench-{os.getpid()}-{i}"
            folder.mkdir()
            own.append(folder)
            if hierarchy.name == "cpuset":
                for file in ("cpuset.cpus", "cpuset.mems"):
                    (folder / file).write_text((folder.parent / file).read_text())
        join = "".join(f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n" for folder in own)
        processes.append(subprocess.Popen([sys.executable, "-S", "-c", join + WORK]))
        folders += own
    return folders, processes


def measure(count: int, options: list[str]) -> list[Report]:
    """The last TICKS reports of an agent that watches `count` jobs."""
    folders, processes = jobs(count)
    with tempfile.TemporaryDirectory() as scratch:
        command = [*ME, "agent", "--socket", f"{scratch}/s", "--state-dir", scratch, *options]
        if "--standalone" in options:
            command += ["--db", f"{scratch}/db"]
        agent = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        try:
            while not Path(f"{scratch}/s").exists():
                time.sleep(0.1)
            reports = []
            for report in client.watch(f"{scratch}/s", 1):
                reports.append(report)
                print(f"{count} jobs: tick {len(reports)}/{WARM_UP + TICKS}", end="\r", file=sys.stderr)
                if len(reports) == WARM_UP + TICKS:
                    return reports[WARM_UP:]
            raise SystemExit("the agent hung up")
        finally:
            agent.terminate()
            agent.wait(20)
            for process in processes:
                process.kill()
                process.wait()
            for folder in folders:
                folder.rmdir()


def main() -> None:
    print(
        f"{'jobs':>4} {'options':32} {'ms per tick':>18} {'cores':>7} {'PSS MiB':>8} "
        f"{'report bytes':>12} {'longest gap':>12}"
    )
    for count, options in ((1, ["--standalone"]), (50, ["--standalone"]), (50, [])):
        reports = measure(count, options)
        first, last = reports[0], reports[-1]
        spent = [(b.collector.cpu_ns - a.collector.cpu_ns) / 1e6 for a, b in itertools.pairwise(reports)]
        gaps = [(b.time_ns - a.time_ns) / 1e9 for a, b in itertools.pairwise(reports)]
        cores = (last.collector.cpu_ns - first.collector.cpu_ns) / (last.time_ns - first.time_ns)
        pss = max(r.collector.pss_bytes for r in reports) / 2**20
        size = statistics.median(r.ByteSize() for r in reports)
        assert len(last.jobs) >= count
        middle = f"{statistics.median(spent):.2f} (max {max(spent):.2f})"
        label = " ".join(options) or "no controller"
        print(f"{count:4} {label:32} {middle:>18} {cores:7.4f} {pss:8.1f} {size:12.0f} {max(gaps):11.3f}s")
    print("targets: 5 ms per tick with 50 jobs; 0.01 cores, 48 MiB (collection); gap <= 1.1 intervals (1 s)")


if __name__ == "__main__":
    main()
