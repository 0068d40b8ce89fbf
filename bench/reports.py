"""Reports as a node with a training job makes them, for benchmarks of what comes after the agent."""

from __future__ import annotations

import random
import time

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_RUNNING, NodeIdentity, Report

SECOND = 1_000_000_000


def node(number: int = 1) -> NodeIdentity:
    """An identity as a node has it; the ids are as long as real ones."""
    return NodeIdentity(
        name=f"gpu{number:03}",
        install_id=f"{number:08x}-4a1b-4c2d-8e3f-0123456789ab",
        boot_id=f"{number:08x}-9f8e-4d7c-8b6a-ba9876543210",
    )


def report(sender: NodeIdentity, sequence: int, tick: int, jobs: int = 1, interval_s: float = 1.0) -> Report:
    """The report of tick number `tick`: every figure an agent fills in, of magnitudes as in a day's run."""
    noise = random.Random(tick)
    seconds = 40_000 + tick * interval_s
    made = Report(
        node=sender,
        sequence=sequence,
        time_ns=time.time_ns(),
        interval_ns=int(interval_s * SECOND) + noise.randrange(-200_000, 200_000),
    )

    def count(per_second: float) -> int:
        return int(per_second * seconds * (1 + noise.random() / 1e6))

    for number in range(jobs):
        sample = made.jobs.add(state=JOB_STATE_RUNNING, processes=17)
        job = sample.identity
        job.scheduler, job.id, job.run = "slurm", str(4_812_300 + number), 7_340_000 + number
        job.name, job.user, job.uid = "resnet50-imagenette", "a.researcher", 20_013
        job.account, job.partition, job.id_source = "vision-lab", "gpu", "cgroup"
        job.gpus.append("GPU-5a6b7c8d-1234-5678-9abc-def012345678")
        job.cgroup = f"/system.slice/slurmstepd.scope/job_{job.id}"
        sample.cpu_ns, sample.cpu_user_ns, sample.cpu_system_ns = count(7.3e9), count(6.1e9), count(1.2e9)
        for name, rate in (
            ("cycles", 2.2e10),
            ("instructions", 3.1e10),
            ("cache_references", 4e8),
            ("cache_misses", 6e7),
            ("branch_misses", 3e7),
        ):
            counter = getattr(sample.counters, name)
            counter.value, counter.running_ratio = count(rate), 0.8 + noise.random() / 5
        for name, rate in (
            ("page_faults", 9e3),
            ("context_switches", 2.5e4),
            ("migrations", 120),
            ("run_queue_wait_ns", 4e7),
            ("run_ns", 7.3e9),
            ("forks", 0.2),
            ("execs", 0.05),
        ):
            setattr(sample.counters, name, count(rate))
        sample.memory_bytes = 38_000_000_000 + noise.randrange(500_000_000)
        sample.memory_peak_bytes, sample.memory_limit_bytes = 41_873_408_000, 128 << 30
        sample.memory_anon_bytes = 21_000_000_000 + noise.randrange(500_000_000)
        sample.memory_file_bytes, sample.oom_kills = 16_000_000_000 + noise.randrange(500_000_000), 0
        sample.io_read_bytes, sample.io_write_bytes = count(9e7), count(2e6)
        sample.io_read_ops, sample.io_write_ops = count(800), count(30)
        sample.cpu_limit_cores, sample.throttled_ns, sample.throttled_periods = 16, 0, 0
        for pressure in (sample.cpu_pressure, sample.memory_pressure, sample.io_pressure):
            pressure.some_us, pressure.full_us = count(3e4), count(1e3)
    host = made.host
    host.cpus_online, host.cpu_busy_ns, host.load_1m = 64, count(8e9), 7.5 + noise.random()
    host.memory_total_bytes, host.memory_available_bytes = 512 << 30, (400 << 30) + noise.randrange(1 << 30)
    host.system.context_switches, host.system.run_ns, host.system.page_faults = (
        count(3e3),
        count(3e8),
        count(500),
    )
    own = made.collector
    own.version, own.cpu_mode = "0.1.0", "hook"
    own.cpu_ns, own.pss_bytes, own.rss_bytes = count(4e6), 46_137_344, 58_720_256
    own.tick_ns, own.events_submitted = 3_100_000 + noise.randrange(900_000), count(0.4)
    for name in (
        "sched_switch",
        "cgroup_mkdir",
        "cgroup_rmdir",
        "process_exec",
        "process_fork",
        "process_exit",
    ):
        own.programs.add(
            name=name, run_ns=count(2e5), runs=count(6e3), measured_ns=int(seconds / 30) * SECOND
        )
    for name in ("cpu", "cgroup", "host"):
        own.sources.add(name=name, up=True, sample_ns=400_000 + noise.randrange(300_000))
    return made
