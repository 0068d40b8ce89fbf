"""The jobs of a real SLURM under systemd and the GPUs it gives them, by SLURM's and the kernel's own word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobSample, Report
from tests.guests.conftest import Node
from tests.guests.test_cgroup_modes import MIB, key, line
from tests.stand_ins.nvml import StandIn, uuid

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
MEMORY = {"step": 21, "array-1": 23, "array-2": 24, "without": 22}  # MiB
GPUS = {"step": 2, "array-1": 1, "array-2": 1, "without": 0}  # that each has asked for
# Of each GPU by NVML's index. SLURM and the device cgroup know nothing but these.
MINORS = (3, 4, 0, 2, 1)


class Seen:
    """What the guest has brought back."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.cgroup = cgroup
        self.told: dict[str, Any] = json.loads((folder / "seen.json").read_text())
        self.reports = [Report.FromString(p.read_bytes()) for p in sorted((folder / "reports").iterdir())]
        (self.settled,) = [report for report in self.reports if report.sequence == self.told["settled"]]
        self.jobs = {
            sample.identity.id: sample for sample in self.settled.jobs if sample.identity.scheduler == "slurm"
        }
        self.top: dict[str, Any] = json.loads(self.told["top"]["out"])
        # SLURM's own word: number, number as shown, user, partition, name, state.
        self.queue = {number: (shown, *rest) for number, shown, *rest in self.told["queue"]}

    def job(self, work: str) -> JobSample:
        """The sample of the job that the work is."""
        return self.jobs[self.told["ids"][work]]

    def shown(self, one: str) -> dict[str, Any]:
        """The job with this key as `top` gives it."""
        (job,) = [job for job in self.top["jobs"] if job["key"] == one]
        found: dict[str, Any] = job
        return found

    def openable(self, work: str) -> set[str]:
        """The GPUs that the kernel has let processes of the work's job open, which they have tried."""
        opened = self.told["opened"]
        minors = {*opened[work], *(opened["batch"] if work == "step" else ())}
        return {uuid(MINORS.index(minor)) for minor in minors}


@pytest.fixture(scope="module", params=["v2", pytest.param("v1", marks=pytest.mark.matrix)])
def seen(
    request: pytest.FixtureRequest, wheel: Path, accelerator: str, tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    folder = tmp_path_factory.mktemp("slurm")
    gpus = StandIn(folder / "nvml", devices=len(MINORS), minors=MINORS)
    options = {"cgroup": request.param, "init": "systemd", "accelerator": accelerator}
    options |= {"cpus": 4, "memory_mib": 1536, "limit_s": 800}
    node = Node(folder, wheel, "amd64", "6.1", options, PACKAGES)
    command = ["python3", "/payload/files/inside/cgroup_modes_slurm.py", request.param]
    return Seen(node.run(command, [gpus.folder]).check().files, request.param)


def test_the_jobs_are_those_of_the_queue(seen: Seen) -> None:
    assert seen.jobs.keys() == seen.queue.keys()
    assert len(seen.jobs) == len(MEMORY)
    for number, (shown, user, partition, name, state) in seen.queue.items():
        identity = seen.jobs[number].identity
        assert state == "RUNNING"
        assert (identity.user, identity.partition, identity.name) == (user, partition, name)
        assert identity.array == (shown if "_" in shown else "")
        assert identity.uid == 1000
        job = seen.shown(f"slurm/{number}")
        assert (job["user"], job["partition"], job["name"]) == (user, partition, name)
        assert job["array"] == (shown if "_" in shown else None)


@pytest.mark.parametrize("work", MEMORY)
def test_what_a_job_has_used_is_the_kernels(seen: Seen, work: str) -> None:
    job, before, after = seen.job(work), seen.told["before"][work], seen.told["after"][work]
    assert before["users"] == job.processes
    used = sum(stretch["cpu_s"] for stretch in before["told"]["stretches"])
    least = used - before["told"]["earlier"]["cpu_s"]
    assert job.cpu_ns / 1e9 >= least - 0.05
    assert job.counters.run_ns / 1e9 >= least - 0.05
    if seen.cgroup == "v2":
        usage = [line(look["files"]["unified/cpu.stat"], "usage_usec") for look in (before, after)]
        assert usage[0] <= job.cpu_ns // 1000 <= usage[1]
    elif "cpu" in job.unavailable:  # slurmstepd took long before it entered the cpuacct cgroup
        assert job.cpu_ns == job.counters.run_ns
    else:
        usage = [int(look["files"]["cpu,cpuacct/cpuacct.usage"]) for look in (before, after)]
        assert usage[0] <= job.cpu_ns <= usage[1]
    assert job.memory_anon_bytes >= MEMORY[work] * MIB
    assert job.memory_limit_bytes == 150 * MIB


def test_the_end_of_every_job_is_told_once(seen: Seen) -> None:
    for number in seen.queue:
        ends = [
            sample.state == JOB_STATE_ENDED
            for report in seen.reports
            for sample in report.jobs
            if key(sample) == f"slurm/{number}"
        ]
        assert ends.count(True) == 1
        assert ends[-1]


@pytest.mark.parametrize("work", GPUS)
def test_a_job_holds_the_gpus_that_the_kernel_lets_it_open(seen: Seen, work: str) -> None:
    openable = seen.openable(work)
    assert len(openable) == GPUS[work]  # SLURM has limited it
    gpu = seen.shown(f"slurm/{seen.told['ids'][work]}")["gpu"]
    if not openable:
        assert gpu is None
        return
    # v1's list of devices says nothing of what is denied; SLURM's variable does.
    source = "device_cgroup" if seen.cgroup == "v2" else "slurm"
    assert {(hold["uuid"], hold["source"]) for hold in gpu["holds"]} == {(one, source) for one in openable}
    assert gpu["conflicts"] == gpu["unknown"] == []
    # Each work's own process has one GPU. CUDA's variable counts from 0 within what SLURM has given.
    variables = seen.told["before"][work]["told"]["variables"]
    assert (len(seen.told["opened"][work]), variables["CUDA_VISIBLE_DEVICES"]) == (1, "0")
    named = variables["SLURM_JOB_GPUS"].split(",")
    assert {uuid(MINORS.index(int(minor))) for minor in named} == openable


def test_a_unit_holds_the_gpu_that_systemd_lets_it_open(seen: Seen) -> None:
    openable = seen.openable("closed")
    assert openable == {uuid(MINORS.index(seen.told["free"]))}
    holds = seen.shown("unit/closed.service")["gpu"]["holds"]
    assert {(hold["uuid"], hold["source"]) for hold in holds} == {(one, "device_cgroup") for one in openable}


def test_each_gpu_has_one_holder_and_no_conflict(seen: Seen) -> None:
    expected = {
        one: [f"slurm/{number}"] for work, number in seen.told["ids"].items() for one in seen.openable(work)
    }
    expected |= {one: ["unit/closed.service"] for one in seen.openable("closed")}
    found = {gpu["uuid"]: [holder["key"] for holder in gpu["holders"]] for gpu in seen.top["gpus"]}
    assert found == expected
    assert len(found) == len(MINORS)
    assert not any(gpu["conflicts"] for gpu in seen.top["gpus"])
