"""The whole agent on the kernel at hand: a job that `run` has started, as `top` and the reports show it.

Writes what was found to /out/agent.json and ends with 1 when a figure was wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from figures import Book
from truth import faults, run_ns, switches, usage_ns, wait_ns

from expanse_ebpf.kernel import features
from expanse_ebpf.top import client
from expanse_ebpf.top.rates import HARDWARE
from expanse_ebpf.wire.collector_pb2 import JobSample, Report

FOLDER = Path("/run/figures")
SOCKET = str(FOLDER / "agent.sock")
# Works a while, says so and waits to be told to go on, twice; then works until it is told to end.
WORK = """
import mmap, os, select, sys, time
print(os.getpid(), flush=True)
for turn in range(2):
    m = mmap.mmap(-1, 4096 * 500)
    for i in range(500):
        m[i * 4096] = 1
        for j in range(1500): pass
        if i % 5 == 0: time.sleep(0.001)
    for i in range(5): os.waitpid(os.posix_spawn('/bin/true', ['true'], {}), 0)
    print('done', flush=True)
    sys.stdin.readline()
while not select.select([sys.stdin], [], [], 0)[0]: pass
"""


def top(*options: str) -> dict[str, Any]:
    command = ["expanse-ebpf", "top", "--once", "--json", "--socket", SOCKET, *options]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))


def job_of(report: Report) -> JobSample | None:
    return next((j for j in report.jobs if (j.identity.scheduler, j.identity.id) == ("run", "train")), None)


def reports_after_now(count: int) -> list[Report]:
    """The next so many reports; the first may have been begun before."""
    found: list[Report] = []
    for report in client.watch(SOCKET):
        found.append(report)
        if len(found) == count:
            break
    return found


def rest(pid: int, group: Path) -> tuple[JobSample, dict[str, int]]:
    """What the agent and the kernel say of the job while it waits."""
    reading = dict.fromkeys(("switches", "faults", "run", "wait", "usage"), 0)
    while True:
        now = {
            "switches": switches(pid),
            "faults": faults(pid),
            "run": run_ns(pid),
            "wait": wait_ns(pid),
            "usage": usage_ns(group),
        }
        if now == reading:
            break
        reading = now
        time.sleep(0.2)
    job = job_of(reports_after_now(2)[-1])
    assert job is not None
    return job, reading


def compare_job(book: Book, process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None

    def line() -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    pid = int(line())
    assert line() == "done"
    path = Path(f"/proc/{pid}/cgroup").read_text().strip().rpartition(":")[2]
    group = Path(f"/sys/fs/cgroup{path}")
    book.holds("run: a cgroup of its own", path.rpartition("/")[2] not in ("", "/"))
    first, was = rest(pid, group)
    book.compare("agent: CPU time since the job's start, cpu.stat", first.cpu_ns, was["usage"], rel=0.001)
    book.compare("agent: processes", first.processes, 1)
    process.stdin.write("\n")
    process.stdin.flush()
    during = reports_after_now(3)
    assert line() == "done"
    second, now = rest(pid, group)
    grown = {name: now[name] - was[name] for name in now}
    # The children are counted in the job and not in the process.
    book.compare("agent: CPU time", second.cpu_ns - first.cpu_ns, grown["usage"], rel=0.001)
    run, usage = second.counters.run_ns - first.counters.run_ns, grown["usage"]
    book.compare("agent: run time", run, usage, rel=0.03)
    book.compare("agent: forks", second.counters.forks - first.counters.forks, 5)
    book.compare("agent: execs", second.counters.execs - first.counters.execs, 5)
    book.compare(
        "agent: switches",
        second.counters.context_switches - first.counters.context_switches,
        grown["switches"] + 5,
        grown["switches"] + 5 * 50,
        least=100,
    )
    book.compare(
        "agent: page faults",
        second.counters.page_faults - first.counters.page_faults,
        grown["faults"],
        grown["faults"] + 5 * 500,
        least=500,
    )
    sequences = [report.sequence for report in during]
    book.holds("agent: reports in order", all(b == a + 1 for a, b in pairwise(sequences)))


def cores(shown: dict[str, Any]) -> list[tuple[str, float | None]]:
    """How much of the CPUs a job uses: by its cgroup, and by the scheduler hook."""
    return [("cpu_cores", shown["cpu_cores"]), ("run_cores", shown["counters"]["run_cores"])]


def compare_snapshot(book: Book, snapshot: dict[str, Any]) -> None:
    """`top --once --json` while the job works: its figures are there, and what is not has a reason."""
    (shown,) = snapshot["jobs"]
    book.holds("top: the job runs", shown["state"] == "running")
    book.compare("top: processes", shown["processes"], 1)
    counters = shown["counters"]
    for name, figure in cores(shown):
        book.compare(f"top: {name}", figure or 0, 0, 2.1, least=1e-6)
    for name in ("context_switches_per_s", "page_faults_per_s", "migrations_per_s", "run_queue_wait_cores"):
        book.holds(f"top: {name} is known", counters[name] is not None)
    grouped = {
        "memory": shown["memory_bytes"],
        "io": shown["io"]["read_bytes_per_s"],
        "throttling": shown["throttled_ratio"],
        "pressure": shown["pressure"]["cpu"]["some_ratio"],
    }
    for name, figure in grouped.items():
        book.holds(
            f"top: {name} is known or has a reason", figure is not None or shown["unavailable"].get(name)
        )
    sources = snapshot["collector"]["sources"]
    # By its number: beside the agent there is no locked memory left to try it before Linux 5.11.
    can_trace = features.parse_release(os.uname().release) >= features.ABILITIES["attach cookies"][0]
    up = [s["name"] for s in sources if s["up"]]
    wanted = ["cpu", "cgroup", "host", "python", "gpu", *(["traces"] if can_trace else [])]
    book.holds(f"top: all sources are up {up}", up == wanted)
    why = {part: reason for source in sources for part, reason in source["unavailable"].items()}
    why.pop("waiting", None)  # looked at in stacks.py
    for name in HARDWARE:
        figure, reason = counters[f"{name}_per_s"], why.pop(name, "")
        book.holds(f"top: {name} counts, or has a reason", bool(figure) != bool(reason))
    book.holds(f"top: nothing else is missing {why}", not why)
    book.compare("top: events lost", snapshot["collector"]["events_lost"], 0, least=0)
    book.holds("top: the hook is on", snapshot["collector"]["cpu_mode"] == "hook")


def main() -> int:
    book = Book()
    FOLDER.mkdir()
    agent = subprocess.Popen(
        ["expanse-ebpf", "agent", "--socket", SOCKET, "--state-dir", str(FOLDER), "--interval", "0.5"],
        stdout=(FOLDER / "log").open("w"),
        stderr=subprocess.STDOUT,
    )
    while not Path(SOCKET).exists():
        if agent.poll() is not None:
            print((FOLDER / "log").read_text())
            return 1
        time.sleep(0.1)
    job: subprocess.Popen[str] = subprocess.Popen(
        ["expanse-ebpf", "run", "--name", "train", "--", "python3", "-S", "-c", WORK],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    compare_job(book, job)
    job.stdin.write("\n")
    job.stdin.flush()
    # On a machine with too much to do the job may not have run between two reports.
    for _ in range(20):
        reports_after_now(3)
        snapshot = top("--job", "run/train")
        if snapshot["jobs"] and all(figure for _, figure in cores(snapshot["jobs"][0])):
            break
    compare_snapshot(book, snapshot)
    job.communicate("\n")
    book.compare("run: exit code", job.returncode, 0, least=0)
    agent.send_signal(signal.SIGTERM)
    book.compare("agent: exit code", agent.wait(), 0, least=0)
    log = (FOLDER / "log").read_text()
    print(log)
    book.holds("agent: no traceback", "Traceback" not in log)
    return book.close("agent.json", top=snapshot)


if __name__ == "__main__":
    sys.exit(main())
