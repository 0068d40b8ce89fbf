"""A node's socket with made-up reports behind it, served by the agent's own NodeSocket in a thread."""

from __future__ import annotations

import math
import selectors
import socket
import sys
import threading
import time

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.export import pprof
from expanse_ebpf.node_socket import NodeSocket
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    ProcessesReply,
    ProfilePart,
    Report,
    RunReply,
    WatchProfileRequest,
)

SECOND = 10**9
NAMES = ("resnet50", "llama-sft", "обучение модели", "eval", "preprocess", "whisper", "diffusion", "tokenise")
BOOT = "boot-1"


def make_report(sequence: int, jobs: int = 3, interval_s: float = 1.0, pmu: bool = True) -> Report:
    """Report number `sequence` (from 1) of a node with `jobs` jobs, the i-th using about i + 1 cores."""
    report = Report(sequence=sequence, time_ns=time.time_ns())
    report.node.name, report.node.install_id, report.node.boot_id = "gpu017", "install-1", BOOT
    report.interval_ns = int(interval_s * SECOND) if sequence > 1 else 0
    seconds = sequence * interval_s
    for i in range(jobs):
        cores = i + 1
        job = report.jobs.add(state=JOB_STATE_RUNNING, processes=4 + i)
        job.identity.scheduler, job.identity.id, job.identity.run = "slurm", str(4411 + i), 1000 + i
        job.identity.name, job.identity.user, job.identity.uid = NAMES[i % len(NAMES)], f"user{i}", 1000 + i
        used = seconds * cores + 0.3 * cores * math.sin(seconds / 4 + i)
        job.cpu_ns = int(used * SECOND) + SECOND
        job.cpu_user_ns = int(job.cpu_ns * 0.8)
        job.cpu_system_ns = job.cpu_ns - job.cpu_user_ns
        job.memory_bytes = (i + 1) * 700 << 20
        job.memory_limit_bytes = 16 << 30
        job.io_read_bytes = int(seconds * (i + 1) * 3e6)
        job.io_write_bytes = int(seconds * 2e5)
        job.counters.context_switches = int(seconds * 1500 * cores)
        job.counters.page_faults = int(seconds * 90)
        job.counters.migrations = int(seconds * 7)
        job.counters.run_queue_wait_ns = int(seconds * 0.05 * cores * SECOND)
        python = job.python
        python.samples, python.lost = int(seconds * 49 * cores), 0
        python.unresolved["changed"] = int(seconds * 5 * cores)
        python.hottest_function, python.hottest_file = f"Trainer.step{i}", "/srv/train/model.py"
        python.hottest_line, python.hottest_share = 88 + i, 0.43
        python.waiting_function, python.waiting_file = "Queue.get", "/usr/lib/python3.11/queue.py"
        python.waiting_line, python.waiting_share = 171, 0.95
        if pmu:
            job.counters.cycles.value = int(seconds * 3e9 * cores)
            job.counters.instructions.value = int(seconds * 4.2e9 * cores)
            job.counters.cache_references.value = int(seconds * 1e7)
            job.counters.cache_misses.value = int(seconds * 2e6)
            for name in ("cycles", "instructions", "cache_references", "cache_misses"):
                getattr(job.counters, name).running_ratio = 1.0
        else:
            job.unavailable["cycles"] = "no PMU: ENOENT"
    if jobs > 2:
        report.jobs[2].state = JOB_STATE_HELD_IDLE
    report.host.cpus_online = 64
    report.host.cpu_busy_ns = int(seconds * 7 * SECOND)
    report.host.memory_total_bytes, report.host.memory_available_bytes = 256 << 30, 200 << 30
    report.host.load_1m = 6.5
    report.host.overflow.page_faults = 12345
    collector = report.collector
    collector.version, collector.cpu_ns, collector.pss_bytes = "0.1.0", int(seconds * 8e6), 41 << 20
    collector.programs.add(
        name="on_switch", run_ns=sequence * 112_000, runs=sequence * 2000, measured_ns=int(seconds * 1e9)
    )
    collector.sources.add(name="cpu", up=True)
    collector.sources.add(name="network", up=False, reason="switched off")
    return report


class MadeUpWatch:
    """Stacks for one client: in each part one sample of a function that is named after the part."""

    def __init__(self, request: WatchProfileRequest, uid: int | None) -> None:
        self.request, self.uid = request, uid
        self.over = ""
        self.parts = 0
        self.asked: list[bool] = []  # of each part, whether it is to reach up to now
        self.closed = 0

    def part(self, *, up_to_now: bool = False) -> ProfilePart:
        """See ProfileWatch."""
        builder = pprof.ProfileBuilder(period_ns=20_408_163, time_ns=self.parts * SECOND, duration_ns=SECOND)
        if self.parts:
            builder.add([(f"part{self.parts}", "/srv/train.py", 7, 1)], (1, 20_408_163, 0), {"pid": 7})
        self.parts += 1
        self.asked.append(up_to_now)
        return ProfilePart(pprof=builder.build().SerializeToString(), note=self.over, rate_hz=49)

    def close(self) -> None:
        """See ProfileWatch."""
        self.closed += 1


class ServedNode:
    """A NodeSocket at `path` in a thread of its own; reports go out by `publish`, or by themselves."""

    def __init__(self, path: str, agent_uid: int = 0) -> None:
        self.path = path
        self.asked: list[tuple[str, int, int]] = []
        self.failure: BaseException | None = None
        self._selector = selectors.DefaultSelector()
        self.watches: list[MadeUpWatch] = []
        self.server = NodeSocket(path, self._selector, agent_uid, self._processes, self._run, self._profile)
        self._work: list[tuple[Report, threading.Event]] = []
        self._end = False
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._loop, daemon=True)

    def _processes(self, key: str, run: int, uid: int) -> ProcessesReply:
        self.asked.append((key, run, uid))
        if key == "slurm/0":
            raise UnavailableError("no job slurm/0 on this node")
        if key == "slurm/boom":
            raise RuntimeError("a fault")
        reply = ProcessesReply()
        for i in range(5):
            reply.processes.add(
                pid=4000 + i,
                command=f"python train.py --rank {i}\x1b[2J",
                user="user0",
                cpu_seconds=time.monotonic() * (i + 1) / 6,
                rss_bytes=(300 + i) << 20,
                threads=12,
                state="running",
                started_ns=1,
            )
        return reply

    def _run(self, name: str, pid: int, uid: int) -> RunReply:
        return RunReply(cgroup=f"/expanse/{uid}/{name}/{pid}")

    def _profile(self, request: WatchProfileRequest, uid: int | None) -> MadeUpWatch:
        if request.key == "slurm/0":
            raise UnavailableError("no job slurm/0 on this node")
        if request.key == "slurm/boom":
            raise RuntimeError("a fault")
        self.watches.append(MadeUpWatch(request, uid))
        return self.watches[-1]

    def _loop(self) -> None:
        try:
            while not self._end:
                for key, mask in self._selector.select(1.0):
                    if key.data is None:
                        self._woken.recv(4096)
                    else:
                        key.data(mask)
                while self._work:
                    report, done = self._work.pop(0)
                    self.server.publish(report)
                    done.set()
        except BaseException as error:
            self.failure = error
            raise
        finally:
            self.server.close()

    def __enter__(self) -> ServedNode:
        self.server.open()
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        self._thread.start()
        return self

    def publish(self, report: Report) -> None:
        """Publish in the loop's thread and wait until that is done."""
        done = threading.Event()
        self._work.append((report, done))
        self._wake.send(b"x")
        assert done.wait(10), self.failure

    def clients(self) -> int:
        """Connections that are open."""
        return len(self.server._clients)

    def __exit__(self, *_: object) -> None:
        self._end = True
        self._wake.send(b"x")
        self._thread.join(10)
        self._selector.close()
        self._wake.close()
        self._woken.close()
        assert self.failure is None, self.failure


def main() -> None:
    """Serve at a path until killed: `python -m tests.top.serving PATH [JOBS] [INTERVAL] [gpus]`."""
    from tests.top.gpu_reports import gpu_report

    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 8
    interval = float(sys.argv[3]) if len(sys.argv) > 3 else 1.0
    make = gpu_report if "gpus" in sys.argv[4:] else make_report
    with ServedNode(sys.argv[1]) as node:
        for sequence in range(1, 10**6):
            node.publish(make(sequence, jobs, interval))
            if sequence > 60:
                time.sleep(interval)


if __name__ == "__main__":
    main()
