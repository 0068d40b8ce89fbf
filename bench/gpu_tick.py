"""What watching GPUs costs: the agent with the source "gpu" off, on, and on with the GPU profiler.

The real agent with a real controller, and as its driver the stand-in for NVML of tests/stand_ins, with
GPUs at work and a job on each. The three take turns, in random order within each round, and each figure is
the median of the rounds with the lowest and highest; differences are those within a round. Then the source
alone: what a tick takes of the agent's own process and of the one that asks NVML, and the calls it makes.

The stand-in answers at once. A real driver takes 10 to 100 us for a call, most of them: the number of
calls to multiply that by is printed. Needs root (jobs are cgroups) and gcc (for the stand-in); some 200 s.

    python -m bench.gpu_tick [--gpus 8] [--rounds 3] [--ticks 10] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.wire_bytes import Relay
from expanse_ebpf import sources
from expanse_ebpf.config import load
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import JobIdentity, Report
from tests.stand_ins.h100 import WORKING
from tests.stand_ins.nvml import StandIn, uuid

ME = (sys.executable, "-m", "expanse_ebpf")
MODES = ("off", "on", "profiler")
WARM_UP = 7  # ticks: imports, first reads, the worker's first round
GPM = {1: 95.0, 2: 88.5, 3: 41.0, 4: 8.0, 5: 52.0, 10: 63.0, 11: 0.0, 12: 31.0, 13: 4.0}
GPM |= {20: 850.0, 21: 1200.0, 60: 9000.0, 61: 9000.0}
WORK = "import time\nwhile True:\n time.sleep(0.05)\n sum(range(3000))"
CALL_US = (10, 100)  # what a call takes with a real driver, from and to
FAST_S = 0.25  # interval of the source alone
SETTLED = 26  # ticks of it, in which new cgroups are read each time
MIB = 2**20


class Run(NamedTuple):
    """One agent, at an interval of 1 s."""

    cores: float  # the agent and its worker
    worker_cores: float
    sample_ms: float  # the source's step in the agent, wall clock, median
    round_ms: float  # the worker's last round, wall clock
    pss_mib: float  # the agent and its worker
    worker_pss_mib: float
    report: float  # bytes, serialised
    sent: float  # bytes for each report on the stream, after compression
    jobs: int  # that hold a GPU


class Alone(NamedTuple):
    """The source without an agent around it."""

    sample_ms: float  # CPU time of a tick in the agent's process, median
    dearest_ms: float
    worker_ms: float  # CPU time of a round, by the worker's own account
    stat_ms: tuple[float, float]  # all of its CPU time: its own account, /proc/PID/stat
    calls: dict[str, float]  # NVML's functions, in each tick
    seldom: dict[str, int]  # and those of the first tick, of which most come again every 30 s


# ---- a node


def working(folder: Path, gpus: int) -> StandIn:
    """A node whose GPUs are all at work."""
    node = StandIn(folder, devices=gpus)
    with node.batch():
        for gpu in range(gpus):
            node.auto(gpu, **WORKING)
            node.gpm(gpu, GPM)
    return node


@contextlib.contextmanager
def jobs(node: StandIn, gpus: int) -> Iterator[list[int]]:
    """A job for each GPU, which works now and then and which NVML lists; their processes."""
    started = []
    try:
        for gpu in range(gpus):
            command = [
                *ME,
                "run",
                "--name",
                f"bench-{os.getpid()}-{gpu}",
                "--",
                sys.executable,
                "-S",
                "-c",
                WORK,
            ]
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": uuid(gpu)}
            started.append(subprocess.Popen(command, env=environment))
        pids = [child(process.pid) for process in started]
        with node.batch():
            for gpu, pid in enumerate(pids):
                node.processes(gpu, [(pid, 60 << 30)])
        yield pids
    finally:
        for process in started:
            process.send_signal(signal.SIGTERM)
        for process in started:
            process.wait(20)


def child(pid: int) -> int:
    """The first child of a process, as soon as it has one."""
    for _ in range(500):
        found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if found:
            return int(found[0])
        time.sleep(0.02)
    sys.exit("gpu_tick: `expanse-ebpf run` has started nothing")


@contextlib.contextmanager
def controller(folder: Path) -> Iterator[tuple[str, int]]:
    """A controller; its address."""
    serve = f"{sys.executable} -m expanse_controller serve --listen 127.0.0.1:0 --parent-death --db"
    process = subprocess.Popen([*serve.split(), str(folder / "db")], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        host, port = process.stdout.readline().split("listening on ")[1].split(",")[0].rsplit(":", 1)
        yield host, int(port)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def configuration(folder: Path, mode: str, library: Path) -> Path:
    file = folder / "config.toml"
    file.write_text(
        f"[agent]\nsocket = '{folder}/s'\nstate_dir = '{folder}'\n"
        f"[sources]\npython = false\ngpu = {'false' if mode == 'off' else 'true'}\n"
        f"[gpu]\nlibrary = '{library}'\nprofiler = {'true' if mode == 'profiler' else 'false'}\n"
    )
    return file


# ---- the agent


def pss_mib(pid: int) -> float:
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in rollup.splitlines() if line.startswith("Pss:")).split()[1]) / 1024


def workers(pid: int) -> list[int]:
    """The processes that a process has started to ask NVML."""
    text = "".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [n for n in map(int, text.split()) if b"nvml.worker" in Path(f"/proc/{n}/cmdline").read_bytes()]


def run(mode: str, ticks: int, library: Path, target: tuple[str, int], node: str) -> Run:
    """An agent for so many ticks after the first few."""
    relay = Relay(target)
    with tempfile.TemporaryDirectory() as scratch:
        file = configuration(Path(scratch), mode, library)
        agent = subprocess.Popen(
            [*ME, "agent", "--config", str(file), "--controller", relay.address, "--node-name", node],
            stderr=subprocess.DEVNULL,
        )
        try:
            while not Path(f"{scratch}/s").exists():
                if agent.poll() is not None:
                    sys.exit(f"gpu_tick: the agent ended with status {agent.returncode}")
                time.sleep(0.1)
            reports: list[Report] = []
            sent = 0
            for report in client.watch(f"{scratch}/s", 1):
                reports.append(report)
                if len(reports) == WARM_UP:
                    sent = relay.sent
                if len(reports) == WARM_UP + ticks:
                    break
            sent = relay.sent - sent
            asking = workers(agent.pid)
            assert len(asking) == (mode != "off")
            worker_pss = sum(map(pss_mib, asking))
            pss = pss_mib(agent.pid) + worker_pss
        finally:
            agent.terminate()
            agent.wait(20)
    first, *rest = reports[WARM_UP - 1 :]
    last = rest[-1]
    assert mode == "off" or (last.nvml.up and last.nvml.restarts == 0 and last.gpus)
    span = last.time_ns - first.time_ns
    step = [s.sample_ns / 1e6 for r in rest for s in r.collector.sources if s.name == "gpu"]
    return Run(
        cores=(last.collector.cpu_ns - first.collector.cpu_ns) / span,
        worker_cores=(last.nvml.cpu_ns - first.nvml.cpu_ns) / span,
        sample_ms=statistics.median(step) if step else 0.0,
        round_ms=statistics.median(r.nvml.sample_ns for r in rest) / 1e6,
        pss_mib=pss,
        worker_pss_mib=worker_pss,
        report=statistics.median(r.ByteSize() for r in rest),
        sent=sent / len(rest),
        jobs=sum(bool(job.gpu.holds) for job in last.jobs),
    )


# ---- the source alone


def alone(mode: str, ticks: int, node: StandIn, pids: Sequence[int], scratch: Path) -> Alone:
    """The source by itself, a tick every FAST_S."""
    config = load(configuration(scratch, mode, node.library), overrides={"agent.interval_s": FAST_S})
    (source,) = sources.create(["gpu"], sources.Context(config, None))
    node.reset_calls()
    source.start()
    own, worker, stat = [], [], (0.0, 0.0)
    first: dict[str, int] = {}
    try:
        watched = [job_of(pid) for pid in pids]
        before_ns = 0
        for number in range(SETTLED + ticks + 1):
            time.sleep(FAST_S)
            report = Report(time_ns=time.time_ns())
            pairs = [(job, report.jobs.add(identity=job.identity)) for job in watched]
            began = time.thread_time_ns()
            source.sample(time.monotonic(), pairs, report)
            spent = time.thread_time_ns() - began
            if report.nvml.up and not first:
                first = node.calls()
            if number == SETTLED:
                node.reset_calls()
            elif number > SETTLED:
                own.append(spent / 1e6)
                worker.append((report.nvml.cpu_ns - before_ns) / 1e6)
            before_ns = report.nvml.cpu_ns
        called = node.calls()
        rounds = called["nvmlEventSetWait_v2"]  # once in each
        calls = {name: count / rounds for name, count in called.items()}
        stat = (before_ns / 1e6, sum(map(stat_ms, workers(os.getpid()))))
    finally:
        source.stop()
    return Alone(statistics.median(own), max(own), statistics.median(worker), stat, calls, first)


def job_of(pid: int) -> Job:
    """The job of `expanse-ebpf run` that a process belongs to."""
    directories = {}
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        name = controllers or "unified"
        if "expanse-run" in path:
            directories[name] = f"/sys/fs/cgroup/{name}{path}"
    job = Job(JobIdentity(scheduler="run", id=f"bench-{pid}"), directories)
    job.pids = frozenset((pid,))
    return job


def stat_ms(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK") * 1e3


REAL = """
import ctypes, sys
def pss():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pss:"))
before = pss()
code = ctypes.CDLL(sys.argv[1]).nvmlInit_v2()
print((pss() - before) / 1024, code)
"""


def real(library: Path) -> str:
    """What NVIDIA's own library takes."""
    command = [sys.executable, "-c", REAL, str(library)]
    took, code = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    return (
        f"{library.name} adds {float(took):.1f} MiB of PSS as it begins (NVML error {code}), the stand-in 0.1"
    )


# ---- what is printed


def middle(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def table(rounds: list[dict[str, Run]]) -> None:
    """A line for each figure: the medians, and what one adds to the other within its round."""
    lines: tuple[tuple[str, Callable[[Run], float], str, str], ...] = (
        ("collector, cores", lambda r: r.cores, ".4f", "0.01; with the profiler 0.015"),
        ("  of them the process that asks NVML", lambda r: r.worker_cores, ".4f", ""),
        ("collector, PSS in MiB", lambda r: r.pss_mib, ".1f", "48; with the profiler 60"),
        ("  of it the process that asks NVML", lambda r: r.worker_pss_mib, ".1f", ""),
        ("the source's step in a tick, ms", lambda r: r.sample_ms, ".2f", ""),
        ("a round of the process, ms", lambda r: r.round_ms, ".2f", ""),
        ("a report, bytes", lambda r: r.report, ".0f", ""),
        ("  sent for it, bytes of the stream", lambda r: r.sent, ".0f", "1024"),
    )
    print(f"{'':38}{'off':>9}{'on':>9}{'profiler':>10}   {'on - off':28}{'profiler - on':28}target")
    for name, figure, form, target in lines:
        by_mode = {mode: [figure(each[mode]) for each in rounds] for mode in MODES}
        off, on, profiler = (statistics.median(values) for values in by_mode.values())
        added = [
            middle([a - b for a, b in zip(by_mode[more], by_mode[less], strict=True)], form)
            for more, less in (("on", "off"), ("profiler", "on"))
        ]
        cells = f"{off:9{form}}{on:9{form}}{profiler:10{form}}   {added[0]:28}{added[1]:28}{target}"
        print(f"{name:38}{cells}".rstrip())


def show_alone(found: dict[str, Alone], gpus: int) -> None:
    for mode, each in found.items():
        print(f"\nthe source alone, {mode}, {gpus} GPUs, CPU time of a tick:")
        print(f"  agent's process {each.sample_ms:.2f} ms (dearest {each.dearest_ms:.2f})", end=", ")
        print(f"process that asks NVML {each.worker_ms:.2f} ms")
        print(
            f"  all of that process's time: {each.stat_ms[0]:.0f} ms by its own account, "
            f"{each.stat_ms[1]:.0f} ms by /proc/PID/stat"
        )
        total = sum(each.calls.values())
        least, most = (total * us / 1e6 for us in CALL_US)
        print(f"  NVML calls in a tick: {total:.1f}, {total / gpus:.2f} for a GPU")
        for name, count in sorted(each.calls.items(), key=lambda item: -item[1]):
            print(f"    {count:7.2f}  {name}")
        extra = {name: n - each.calls.get(name, 0) for name, n in each.seldom.items()}
        print(f"  more in the first tick: {sum(extra.values()):.0f}; most of them again every 30 s")
        print(
            f"  the stand-in answers at once; with {CALL_US[0]} to {CALL_US[1]} us a call of a real driver "
            f"these are {least * 1e3:.1f} to {most * 1e3:.1f} ms a tick,\n"
            f"  up to {least:.4f} to {most:.4f} cores at an interval of 1 s, on top of the figures above"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ticks", type=int, default=10, help="seconds that each agent is measured for")
    parser.add_argument("--real", type=Path, metavar="LIBRARY", help="NVIDIA's own NVML, for its memory")
    parser.add_argument("--quick", action="store_true", help="to see that it runs; the figures mean nothing")
    options = parser.parse_args()
    if os.geteuid() != 0:
        sys.exit("gpu_tick: cgroups can be made by root only; run it with sudo")
    rounds_wanted, ticks = (1, 3) if options.quick else (options.rounds, options.ticks)
    order = random.Random()
    rounds: list[dict[str, Run]] = []
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        node = working(scratch / "nvml", options.gpus)
        with controller(scratch) as target, jobs(node, options.gpus) as pids:
            found = {m: alone(m, 3 * ticks, node, pids, scratch) for m in MODES[1:]}
            for number in range(rounds_wanted):
                each = {}
                for mode in order.sample(MODES, len(MODES)):
                    print(f"round {number + 1}/{rounds_wanted}: {mode:8}", end="\r", file=sys.stderr)
                    each[mode] = run(mode, ticks, node.library, target, f"bench-{number}-{mode}")
                rounds.append(each)
    held = rounds[-1]["on"].jobs
    print(
        f"{options.gpus} GPUs (stand-in), {options.gpus} jobs of which {held} hold one, interval 1 s; ",
        end="",
    )
    print(f"median of {len(rounds)} (lowest to highest), {ticks} ticks each\n")
    table(rounds)
    if options.real:
        print(f"\n{real(options.real)}")
    show_alone(found, options.gpus)


if __name__ == "__main__":
    main()
