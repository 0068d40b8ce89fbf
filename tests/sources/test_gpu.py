"""The source as a whole: the real worker on a stand-in for NVML, a made-up /proc, a real kubelet's API."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from expanse_ebpf.config import GpuConfig
from expanse_ebpf.gpu.claims import ClaimReader
from expanse_ebpf.gpu.pod_resources import PodResources
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.nvml import client
from expanse_ebpf.nvml.client import Client
from expanse_ebpf.sources.gpu import GpuSource
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobIdentity, JobSample, Report

from ..gpu.kubelet import Kubelet
from ..gpu.made_up_proc import MadeUpProc
from ..stand_ins.nvml import StandIn, mig_uuid, uuid

INTERVAL_S = 0.15
GIB = 1 << 30
DEVICES = (
    "Character devices:\n  1 mem\n195 nvidia\n508 nvidia-caps\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n"
)


class Machine:
    """GPUs, jobs and a source that looks at them; tick() is one report."""

    def __init__(self, folder: Path, gpus: StandIn, kubelet: Kubelet | None, profiler: bool) -> None:
        self.gpus = gpus
        (folder / "proc").mkdir()
        self.proc = MadeUpProc(folder / "proc")
        (folder / "proc" / "devices").write_text(DEVICES)
        self.jobs: list[Job] = []
        config = GpuConfig(library=str(gpus.library), profiler=profiler)
        pods = (
            partial(PodResources, str(kubelet.socket), every_s=0.05, keep_s=1.0)
            if kubelet is not None
            else None
        )
        self.source = GpuSource(
            Client(config, INTERVAL_S), ClaimReader(pods, str(folder / "proc")), profiler=profiler
        )
        self.source.start()

    def job(self, key: str, *pids: int, gpus: str = "", variable: str = "CUDA_VISIBLE_DEVICES") -> Job:
        scheduler, _, name = key.partition("/")
        identity = JobIdentity(scheduler=scheduler, id=name, run=len(self.jobs) + 1)
        if gpus:
            identity.gpus.extend(gpus.split(","))
            identity.gpus_source = variable
        job = Job(identity, pids=frozenset(pids))
        self.jobs.append(job)
        return job

    def tick(self) -> Report:
        time.sleep(INTERVAL_S)
        report = Report(time_ns=time.time_ns())
        pairs = []
        for job in self.jobs:
            sample = report.jobs.add()
            sample.identity.CopyFrom(job.identity)
            pairs.append((job, sample))
        self.source.sample(time.monotonic(), pairs, report)
        return report

    def until(self, condition: Callable[[Report], object], seconds: float = 15) -> Report:
        deadline = time.monotonic() + seconds
        while True:
            report = self.tick()
            if report.gpus and condition(report):
                return report
            assert time.monotonic() < deadline, str(report)[:4000]


Make = Callable[..., Machine]


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Make]:
    made: list[Machine] = []

    def make(
        devices: int = 2, kubelet: Kubelet | None = None, profiler: bool = False, **more: object
    ) -> Machine:
        gpus = StandIn(tmp_path / "nvml", devices=devices, **more)  # type: ignore[arg-type]
        made.append(Machine(tmp_path, gpus, kubelet, profiler))
        return made[-1]

    yield make
    for one in made:
        one.source.stop()


@pytest.fixture
def kubelet() -> Iterator[Kubelet]:
    made = Kubelet().start()
    yield made
    made.close()


def of(report: Report, number: int) -> GpuSample:
    return next(gpu for gpu in report.gpus if gpu.uuid == uuid(number))


def sample(report: Report, job: Job) -> JobSample:
    return next(s for s in report.jobs if s.identity == job.identity)


def test_a_node_without_a_driver_has_no_gpus_and_that_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_DRIVER_FILES", ("/proc/driver/no-such-driver",))
    source = GpuSource(Client(GpuConfig(), 1.0), ClaimReader(None))
    source.start()
    report = Report()
    source.sample(time.monotonic(), [], report)
    source.stop()
    assert not report.gpus
    assert not report.HasField("nvml")
    assert source.unavailable == {}


def test_a_number_of_a_container_is_credited_to_the_process_that_has_the_gpu_open(machine: Make) -> None:
    """The case of faults: NVML says 324, which here is sshd, and in a container is pid 645400."""
    node = machine()
    node.proc.process(324, "/dev/null", program="/usr/sbin/sshd")
    node.proc.process(645400, "/dev/nvidia0", numbers=(645400, 324))
    sshd = node.job("unit/sshd.service", 324)
    training = node.job("container/abc", 645400)
    node.gpus.processes(0, [(324, 3 * GIB)])
    report = node.until(lambda r: of(r, 0).processes and of(r, 0).processes[0].resolved)
    (process,) = of(report, 0).processes
    assert (process.pid, process.job, process.memory_bytes) == (645400, "container/abc", 3 * GIB)
    assert of(report, 0).unresolved_processes == 0
    assert sample(report, training).gpu.memory_bytes == 3 * GIB
    assert [(h.uuid, h.source) for h in sample(report, training).gpu.holds] == [(uuid(0), "processes")]
    assert not sample(report, sshd).HasField("gpu")


def test_without_that_process_the_number_is_nobodys(machine: Make) -> None:
    node = machine()
    node.proc.process(324, "/dev/null", program="/usr/sbin/sshd")
    sshd = node.job("unit/sshd.service", 324)
    node.gpus.processes(0, [(324, 3 * GIB)])
    report = node.until(lambda r: of(r, 0).unresolved_processes)
    assert of(report, 0).unresolved_processes == 1
    assert of(report, 0).processes[0].job == ""
    assert not sample(report, sshd).HasField("gpu")


def test_two_containers_with_that_number_are_no_coin_toss(machine: Make) -> None:
    node = machine()
    for pid in (645400, 645500):
        node.proc.process(pid, "/dev/nvidia0", numbers=(pid, 324))
    jobs = [node.job(f"container/{pid}", pid) for pid in (645400, 645500)]
    node.gpus.processes(0, [(324, 3 * GIB)])
    for _ in range(4):
        report = node.tick()
    assert of(report, 0).unresolved_processes == 1
    assert all(not sample(report, job).gpu.HasField("memory_bytes") for job in jobs)


def test_two_jobs_on_one_gpu_each_have_the_use_of_their_own_processes(machine: Make) -> None:
    node = machine()
    now = time.time_ns() // 1000 - 5_000_000
    for pid in (4000, 4001, 5000):
        node.proc.process(pid, "/dev/nvidia0")
    first, second = node.job("run/first", 4000, 4001), node.job("run/second", 5000)
    node.gpus.processes(0, [(4000, GIB), (4001, GIB), (5000, 5 * GIB)])
    node.gpus.samples(0, [(now, 80)])
    node.gpus.process_samples(0, [(now, 4000, 1, 0)])
    node.until(lambda r: len(of(r, 0).holders) == 2 and sample(r, first).gpu.HasField("busy_ns"))
    later = now + 1_000_000
    with node.gpus.batch():
        node.gpus.samples(0, [(now, 80), (later, 80)])
        node.gpus.process_samples(0, [(later, 4000, 20, 5), (later, 4001, 10, 5), (later, 5000, 50, 5)])
    report = node.until(lambda r: sample(r, second).gpu.busy_ns)
    gpus = [sample(report, job).gpu for job in (first, second)]
    assert [gpu.busy_ns for gpu in gpus] == [300_000_000, 500_000_000]
    assert [gpu.measured_ns for gpu in gpus] == [10**9, 10**9]
    assert [gpu.memory_bytes for gpu in gpus] == [2 * GIB, 5 * GIB]
    assert [hold.sharers for gpu in gpus for hold in gpu.holds] == [2, 2]
    for job in (first, second):
        assert not sample(report, job).gpu.HasField("power_mw")
        assert "not its alone" in sample(report, job).unavailable["gpu.power_mw"]


def test_a_variable_alone_makes_nobody_elses_work_the_jobs(machine: Make) -> None:
    """The GPU is 80 % busy, for a process that is of no job."""
    node = machine()
    now = time.time_ns() // 1000 - 5_000_000
    job = node.job("run/idle", 4000, gpus=uuid(0))
    node.proc.process(4000)
    node.proc.process(9000, "/dev/nvidia0")
    node.gpus.processes(0, [(9000, GIB)])
    node.gpus.samples(0, [(now, 80)])
    node.gpus.process_samples(0, [(now, 9000, 1, 0)])
    for _ in range(4):
        report = node.tick()
    with node.gpus.batch():
        node.gpus.samples(0, [(now, 80), (now + 10**6, 80)])
        node.gpus.process_samples(0, [(now + 10**6, 9000, 80, 5)])
    report = node.until(lambda r: of(r, 0).busy_ns)
    assert [holder.id for holder in of(report, 0).holders] == ["idle"]
    gpu = sample(report, job).gpu
    for name in ("busy_ns", "power_mw", "energy_mj"):
        assert not gpu.HasField(name)
        assert f"gpu.{name}" in sample(report, job).unavailable


def test_time_of_a_process_that_nobody_knows_may_be_any_jobs(machine: Make) -> None:
    node = machine()
    now = time.time_ns() // 1000 - 5_000_000
    jobs = [node.job(f"run/{name}", pid) for name, pid in (("a", 4000), ("b", 5000))]
    for pid in (4000, 5000):
        node.proc.process(pid, "/dev/nvidia0")
    node.gpus.processes(0, [(4000, GIB), (5000, GIB)])
    node.gpus.process_samples(0, [(now, 4000, 1, 0)])
    node.until(lambda r: len(of(r, 0).holders) == 2 and sample(r, jobs[0]).gpu.HasField("busy_ns"))
    with node.gpus.batch():
        node.gpus.processes(0, [(4000, GIB), (5000, GIB), (55, GIB)])
        node.gpus.process_samples(0, [(now + 10**6, 55, 90, 0)])
    report = node.until(lambda r: of(r, 0).unresolved_processes)
    for job in jobs:
        assert not sample(report, job).gpu.HasField("busy_ns")
        assert "not known of every process" in sample(report, job).unavailable["gpu.busy_ns"]


def test_two_users_jobs_of_the_same_name_are_two_jobs(machine: Make) -> None:
    node = machine()
    node.proc.process(100, "/dev/nvidia0")
    node.proc.process(200, "/dev/null")
    alice, bob = node.job("run/train", 100), node.job("run/train", 200)
    node.gpus.processes(0, [(100, 7 * GIB)])
    report = node.until(lambda r: sample(r, alice).gpu.holds)
    assert sample(report, alice).gpu.memory_bytes == 7 * GIB
    assert not sample(report, bob).HasField("gpu")


def test_who_has_the_whole_gpu_does_not_get_what_another_does_on_an_instance(machine: Make) -> None:
    node = machine()
    node.gpus.mig(0, [{}, {}])
    whole = node.job("slurm/1", gpus="0", variable="SLURM_JOB_GPUS")
    whole.identity.gpus[:] = [uuid(0)]
    part = node.job("slurm/2", gpus=mig_uuid(0, 0), variable="SLURM_STEP_GPUS")
    report = node.until(lambda r: sample(r, part).gpu.holds and sample(r, whole).gpu.holds)
    for _ in range(3):
        report = node.tick()
    assert not sample(report, whole).gpu.HasField("energy_mj")
    assert "not its alone" in sample(report, whole).unavailable["gpu.power_mw"]


def test_a_source_that_failed_and_was_started_again_asks_the_kubelet_again(
    machine: Make, kubelet: Kubelet
) -> None:
    kubelet.give("default", "a", "nvidia.com/gpu", uuid(0))
    node = machine(kubelet=kubelet)
    node.job("kubernetes/default/a")
    node.until(lambda r: of(r, 0).holders)
    node.source.stop()
    node.source.start()
    report = node.until(lambda r: of(r, 0).state == "ok" and of(r, 0).holders)
    assert of(report, 0).holders[0].id == "default/a"


def test_an_empty_list_beside_a_full_memory_is_not_taken_for_nobody(machine: Make) -> None:
    """As in a container without the node's pid namespace."""
    node = machine()
    job = node.job("slurm/5", gpus="1", variable="SLURM_JOB_GPUS")
    report = node.until(lambda r: sample(r, job).gpu.holds)
    assert sample(report, job).gpu.memory_bytes == 0
    assert sample(report, job).gpu.HasField("memory_bytes")
    node.gpus.set(1, memory_used=64 * GIB)
    report = node.until(lambda r: of(r, 1).memory_used_bytes == 64 * GIB)
    assert not sample(report, job).gpu.HasField("memory_bytes")


def test_what_happens_to_a_gpu_is_in_the_log(machine: Make, caplog: pytest.LogCaptureFixture) -> None:
    node = machine()
    job = node.job("slurm/5", gpus="1", variable="SLURM_JOB_GPUS")
    node.until(lambda r: sample(r, job).gpu.holds)
    node.gpus.event(1, 79)
    node.until(lambda r: r.gpu_events)
    assert f"GPU {uuid(1)}: Xid 79; held by slurm/5" in caplog.text


def test_a_gpu_on_which_only_the_jobs_processes_are_works_for_it_alone(machine: Make) -> None:
    node = machine()
    node.proc.process(4000, "/dev/nvidia0")
    job = node.job("run/a", 4000)
    node.gpus.processes(0, [(4000, GIB)])
    report = node.until(lambda r: sample(r, job).gpu.HasField("power_mw"))
    assert sample(report, job).gpu.power_mw == 70_000
    node.gpus.processes(0, [(4000, GIB), (9000, GIB)])
    report = node.until(lambda r: of(r, 0).unresolved_processes)
    assert not sample(report, job).gpu.HasField("power_mw")


def test_every_gpu_is_reported_whether_pods_hold_one_or_none(machine: Make, kubelet: Kubelet) -> None:
    """K8-03: shares in time, one of eight GPUs given out, then none."""
    kubelet.give("default", "a", "nvidia.com/gpu", f"{uuid(0)}::0")
    kubelet.give("default", "b", "nvidia.com/gpu", f"{uuid(0)}::1")
    node = machine(devices=8, kubelet=kubelet)
    pods = [node.job(f"kubernetes/default/{name}") for name in "ab"]
    report = node.until(lambda r: len(of(r, 0).holders) == 2)
    assert [holder.id for holder in of(report, 0).holders] == ["default/a", "default/b"]
    assert of(report, 0).conflicts == []
    for pod in pods:
        (hold,) = sample(report, pod).gpu.holds
        assert (hold.uuid, hold.source, hold.sharers) == (uuid(0), "pod_resources", 2)
        assert not sample(report, pod).gpu.HasField("power_mw")  # of the GPU, and there once
    assert len(report.gpus) == 8
    assert sum(gpu.power_mw for gpu in report.gpus) == 8 * 70_000
    kubelet.pods.clear()
    report = node.until(lambda r: not of(r, 0).holders)
    assert [gpu.uuid for gpu in report.gpus] == [uuid(n) for n in range(8)]
    assert all(gpu.state == "ok" and gpu.power_mw == 70_000 for gpu in report.gpus)


def test_while_the_kubelet_is_away_figures_go_on(machine: Make, kubelet: Kubelet) -> None:
    """K8-01: a kubelet that is started anew makes its socket anew."""
    kubelet.give("default", "a", "nvidia.com/gpu", uuid(0))
    node = machine(kubelet=kubelet)
    pod = node.job("kubernetes/default/a")
    node.until(lambda r: of(r, 0).holders)
    kubelet.stop()
    report = node.until(lambda r: not of(r, 0).holders)
    assert of(report, 0).power_mw == 70_000
    assert not sample(report, pod).gpu.holds
    assert "kubelet" in node.source.unavailable["pod-resources"]
    kubelet.pods.clear()
    kubelet.give("default", "b", "nvidia.com/gpu", uuid(1))
    node.job("kubernetes/default/b")
    kubelet.start()
    report = node.until(lambda r: of(r, 1).holders)
    assert of(report, 1).holders[0].id == "default/b"
    assert not of(report, 0).holders
    assert "pod-resources" not in node.source.unavailable


def test_what_the_kubelet_gives_and_the_node_has_not_is_named(machine: Make, kubelet: Kubelet) -> None:
    kubelet.give("default", "a", "nvidia.com/gpu", "GPU-ffffffff-0000-0000-0000-000000000000")
    node = machine(kubelet=kubelet)
    pod = node.job("kubernetes/default/a")
    report = node.until(lambda r: sample(r, pod).gpu.unknown)
    assert sample(report, pod).gpu.unknown == ["GPU-ffffffff-0000-0000-0000-000000000000"]
    assert not sample(report, pod).gpu.holds


def test_a_pod_without_a_gpu_that_uses_one_is_a_conflict(machine: Make, kubelet: Kubelet) -> None:
    kubelet.give("default", "a", "nvidia.com/gpu", uuid(0))
    node = machine(kubelet=kubelet)
    node.proc.process(7000, "/dev/nvidia0")
    owner = node.job("kubernetes/default/a")
    intruder = node.job("kubernetes/default/b", 7000)
    node.gpus.processes(0, [(7000, GIB)])
    report = node.until(lambda r: sample(r, intruder).gpu.conflicts)
    assert [holder.id for holder in of(report, 0).holders] == ["default/a"]
    assert "7000" in sample(report, intruder).gpu.conflicts[0]
    assert not sample(report, owner).gpu.conflicts
    assert sample(report, intruder).gpu.memory_bytes == GIB


def test_a_job_on_a_gpu_that_falls_silent_says_so(machine: Make) -> None:
    node = machine()
    job = node.job("slurm/5", gpus="1", variable="SLURM_JOB_GPUS")
    node.until(lambda r: sample(r, job).gpu.HasField("power_mw"))
    node.gpus.fail("*", 999, 1)
    report = node.until(lambda r: of(r, 1).state == "silent")
    assert uuid(1) in sample(report, job).unavailable["gpu"]
    assert not sample(report, job).gpu.HasField("power_mw")
    assert [hold.uuid for hold in sample(report, job).gpu.holds] == [uuid(1)]
    assert of(report, 0).state == "ok"


def test_a_job_that_ends_leaves_nothing_behind(machine: Make) -> None:
    node = machine()
    job = node.job("run/a", gpus=uuid(1))
    node.until(lambda r: of(r, 1).holders)
    node.jobs.remove(job)
    report = node.until(lambda r: not of(r, 1).holders)
    assert of(report, 1).state == "ok"
    assert node.source._accounts == {}


def test_a_process_of_no_job_may_be_the_one_that_nvml_means(machine: Make) -> None:
    """The host's own process 324 has the GPU open, and so has 324 of a container."""
    node = machine()
    node.proc.process(324, "/dev/nvidia0", program="/usr/bin/Xorg")
    node.proc.process(645400, "/dev/nvidia0", numbers=(645400, 324))
    job = node.job("container/abc", 645400)
    node.gpus.processes(0, [(324, GIB)])
    for _ in range(5):
        report = node.tick()
    assert of(report, 0).unresolved_processes == 1
    assert not sample(report, job).gpu.HasField("memory_bytes")


def test_another_jobs_process_on_a_gpu_that_was_given_out_does_work_that_is_not_the_owners(
    machine: Make, kubelet: Kubelet
) -> None:
    kubelet.give("default", "a", "nvidia.com/gpu", uuid(0))
    node = machine(kubelet=kubelet)
    node.proc.process(7000, "/dev/nvidia0")
    owner = node.job("kubernetes/default/a")
    report = node.until(lambda r: sample(r, owner).gpu.HasField("power_mw"))
    node.job("run/intruder", 7000)
    node.gpus.processes(0, [(7000, GIB)])
    report = node.until(lambda r: of(r, 0).processes and of(r, 0).processes[0].job)
    assert not sample(report, owner).gpu.HasField("power_mw")
    assert [hold.sharers for hold in sample(report, owner).gpu.holds] == [1]


def test_a_pod_that_the_kubelet_has_not_told_of_yet_is_not_said_to_have_none(
    machine: Make, kubelet: Kubelet
) -> None:
    node = machine(kubelet=kubelet)
    node.until(lambda r: kubelet.calls > 1)
    node.proc.process(7000, "/dev/nvidia0")
    kubelet.answering.clear()
    calls = kubelet.calls
    pod = node.job("kubernetes/default/new", 7000)
    node.gpus.processes(0, [(7000, GIB)])
    report = node.until(lambda r: sample(r, pod).gpu.holds)
    assert [hold.source for hold in sample(report, pod).gpu.holds] == ["processes"]
    assert sample(report, pod).gpu.conflicts == []
    kubelet.answering.set()
    report = node.until(lambda r: sample(r, pod).gpu.conflicts)  # two answers later it has none for certain
    assert kubelet.calls >= calls + 2


def test_open_files_tell_where_nothing_else_does(machine: Make) -> None:
    node = machine()
    node.proc.process(4000, "/dev/nvidia1")
    job = node.job("run/a", 4000)
    report = node.until(lambda r: sample(r, job).gpu.holds)
    assert [(h.uuid, h.source) for h in sample(report, job).gpu.holds] == [(uuid(1), "open_files")]


def test_a_capability_that_is_open_tells_the_mig_instance(machine: Make) -> None:
    node = machine()
    node.gpus.mig(0, [{"gpu_instance": 1}, {"gpu_instance": 2}])
    caps = node.proc.path / "driver" / "nvidia-caps"
    caps.mkdir(parents=True)
    lines = [f"gpu0/gi{gi}/access {10 * gi}\ngpu0/gi{gi}/ci0/access {10 * gi + 1}\n" for gi in (1, 2)]
    (caps / "mig-minors").write_text("".join(lines))
    node.proc.process(4000, "/dev/nvidia0", "/dev/nvidia-caps/nvidia-cap20", "/dev/nvidia-caps/nvidia-cap21")
    job = node.job("run/a", 4000)
    report = node.until(lambda r: sample(r, job).gpu.holds)
    assert [h.uuid for h in sample(report, job).gpu.holds] == [mig_uuid(0, 1)]


def test_why_capabilities_and_cgroups_do_not_tell_is_said(machine: Make, tmp_path: Path) -> None:
    node = machine()
    node.gpus.mig(0, [{}])
    job = node.job("slurm/5")
    job.directories["devices"] = str(tmp_path / "gone")
    node.until(lambda r: len(r.gpus) == 3)
    for _ in range(2):  # and goes on being said
        node.tick()
        assert "mig-minors" in node.source.unavailable["mig capabilities"]
        assert "slurm/5" in node.source.unavailable["device cgroup"]


def test_without_use_by_process_the_use_of_a_shared_gpu_is_absent(machine: Make) -> None:
    node = machine()
    node.gpus.fail("nvmlDeviceGetProcessUtilization", 999)
    jobs = [node.job(f"run/{name}", pid) for name, pid in (("a", 4000), ("b", 5000))]
    for pid in (4000, 5000):
        node.proc.process(pid, "/dev/nvidia0")
    node.gpus.processes(0, [(4000, GIB), (5000, GIB)])
    node.until(lambda r: len(of(r, 0).holders) == 2)
    for _ in range(3):
        report = node.tick()
    for job in jobs:
        assert not sample(report, job).gpu.HasField("busy_ns")
        assert "does not tell by process" in sample(report, job).unavailable["gpu.busy_ns"]
