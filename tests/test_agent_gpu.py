"""GPUs from end to end: the real agent and its worker, real cgroups and processes, a stand-in for NVML.

A stand-in of NVML has no device nodes beside it, so no process here can have a GPU open: who uses one by
NVML's lists is tested in tests/gpu, on a made-up /proc.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report

from .gpu.kubelet import Kubelet
from .kernel.groups import Groups
from .stand_ins.nvml import WORKING, StandIn, uuid
from .test_agent import BURN, Node, Start, groups, job, run, start

__all__ = ["groups", "run", "start"]  # fixtures
Run = Callable[..., tuple[str, "subprocess.Popen[bytes]"]]
SLEEP = (sys.executable, "-c", "import time; time.sleep(600)")


@pytest.fixture
def gpus(tmp_path: Path) -> StandIn:
    """Four GPUs whose minors are in another order than their indexes."""
    made = StandIn(tmp_path / "nvml", devices=4, minors=(2, 3, 0, 1))
    for device in range(4):
        made.auto(device, **{**WORKING, "utilization": 20 * (device + 1), "power_mw": 100_000 * (device + 1)})
        made.gpm(device, {2: 50.0, 5: 25.0})
    return made


def agent(start: Start, gpus: StandIn, *options: str, **environment: str) -> Node:
    environment |= {"EXPANSE_SOURCES_PYTHON": "false", "EXPANSE_GPU_LIBRARY": str(gpus.library)}
    environment.setdefault("EXPANSE_GPU_POD_RESOURCES", "")
    return start(*options, **environment)


def device(snapshot: dict[str, Any], number: int) -> dict[str, Any]:
    return next(gpu for gpu in snapshot["gpus"] if gpu["uuid"] == uuid(number))


def holders(snapshot: dict[str, Any], number: int) -> list[str]:
    return [holder["key"] or holder["name"] for holder in device(snapshot, number)["holders"]]


def reports(node: Node) -> list[Report]:
    newest = node.top()["sequence"]
    found = []
    for report in client.watch(str(node.socket), 120):
        found.append(report)
        if report.sequence >= newest:
            break
    return found


@contextlib.contextmanager
def slurm_job(groups: Groups, number: int, minors: tuple[int, ...], environment: str) -> Iterator[None]:
    """A SLURM job as the v1 plugin makes it, which may open these GPUs alone."""
    rules = ["c 1:* rwm", *(f"c 195:{minor} rwm" for minor in (255, *minors))]
    steps = []
    for hierarchy in ("freezer", "devices"):
        step = Path("/sys/fs/cgroup") / hierarchy / f"slurm_{groups.tag}/uid_65534/job_{number}/step_0"
        for folder in (*reversed(step.parents[:3]), step):
            if not folder.exists():
                folder.mkdir()
                groups.directories.append(folder)
                if hierarchy == "devices" and folder == step.parent:  # before it has children
                    (folder / "devices.deny").write_text("a")
                    for rule in rules:
                        (folder / "devices.allow").write_text(rule)
        steps.append(step)
    again = f"os.execv(sys.executable, [sys.executable, '-c', {BURN!r}])"
    groups.start(f"os.environ.update(SLURM_JOB_ID='{number}', {environment})\n{again}", *steps)
    yield


def test_every_gpu_is_there_and_each_job_has_its_own(
    start: Start, run: Run, groups: Groups, gpus: StandIn
) -> None:
    node = agent(start, gpus, EXPANSE_GPU_PROFILER="true")
    with slurm_job(groups, 88, (0,), "SLURM_JOB_GPUS='0', CUDA_VISIBLE_DEVICES='0'"):
        # What the device cgroup allows is minor 0, which is NVML's third GPU.
        snapshot = node.wait_for(lambda s: s["gpus"] and holders(s, 2) == ["slurm/88"], 30)
        assert [gpu["index"] for gpu in snapshot["gpus"]] == [0, 1, 2, 3]
        assert [holders(snapshot, number) for number in (0, 1, 3)] == [[], [], []]
        # The profiler's first sample has nothing before it.
        snapshot = node.wait_for(lambda s: job(s, "slurm/88")["gpu"]["sm_active_ratio"])  # type: ignore[index]
        gpu = job(snapshot, "slurm/88")["gpu"]  # type: ignore[index]
        assert [(hold["uuid"], hold["source"], hold["sharers"]) for hold in gpu["holds"]] == [
            (uuid(2), "device_cgroup", 1)
        ]
        assert gpu["busy_ratio"] == pytest.approx(0.6, abs=0.03)
        assert gpu["sm_active_ratio"] == pytest.approx(0.5, abs=0.01)
        assert gpu["power_watts"] == 300
        assert gpu["conflicts"] == gpu["unknown"] == []
        assert device(snapshot, 3)["busy_ratio"] == pytest.approx(0.8, abs=0.03)
        assert device(snapshot, 3)["profile"]["tensor_ratio"] == pytest.approx(0.25, abs=0.01)
    assert snapshot["nvml"]["up"] is True
    assert snapshot["nvml"]["driver_version"] == "535.261.03"


def test_a_jobs_energy_and_busy_time_are_those_of_its_gpus_while_it_held_them(
    start: Start, groups: Groups, gpus: StandIn
) -> None:
    node = agent(start, gpus)
    with slurm_job(groups, 89, (1, 2), "SLURM_JOB_GPUS='1,2'"):  # NVML's fourth and first
        node.wait_for(lambda s: ((job(s, "slurm/89") or {}).get("gpu") or {}).get("energy_joules"), 30)
        node.wait_for(lambda s: job(s, "slurm/89")["gpu"]["energy_joules"] > 1500)  # type: ignore[index]
    seen = [
        (sample.gpu, {gpu.uuid: gpu for gpu in report.gpus})
        for report in reports(node)
        for sample in report.jobs
        if sample.identity.id == "89" and sample.gpu.energy_mj
    ]
    (first, gpus_then), (last, gpus_now) = seen[0], seen[-1]
    for name in ("busy_ns", "measured_ns", "energy_mj"):
        grown = sum(getattr(gpus_now[uuid(n)], name) - getattr(gpus_then[uuid(n)], name) for n in (0, 3))
        assert getattr(last, name) - getattr(first, name) == grown > 0
    assert last.power_mw == 500_000


def test_a_users_variable_names_gpus_by_uuid_and_what_is_not_there_is_told(
    start: Start, run: Run, gpus: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = agent(start, gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"{uuid(1)},{uuid(3)[:-1]}9")
    key, _ = run("visible", *SLEEP)
    snapshot = node.wait_for(lambda s: ((job(s, key) or {}).get("gpu") or {}).get("holds"), 20)
    gpu = job(snapshot, key)["gpu"]  # type: ignore[index]
    assert [(hold["uuid"], hold["source"]) for hold in gpu["holds"]] == [(uuid(1), "environment")]
    assert gpu["unknown"] == [f"{uuid(3)[:-1]}9"]
    # It does nothing on the GPU. Who keeps it busy is not known, only that it is this job's alone.
    assert holders(snapshot, 1) == [key]


def test_time_sliced_pods_share_a_gpu_whose_figures_count_once(start: Start, gpus: StandIn) -> None:
    kubelet = Kubelet()
    kubelet.give("default", "a", "nvidia.com/gpu", f"{uuid(0)}::0")
    kubelet.give("default", "b", "nvidia.com/gpu", f"{uuid(0)}::1")
    kubelet.start()
    try:
        node = agent(start, gpus, EXPANSE_GPU_POD_RESOURCES=str(kubelet.socket))
        snapshot = node.wait_for(lambda s: s["gpus"] and len(holders(s, 0)) == 2, 30)
        assert holders(snapshot, 0) == ["default/a", "default/b"]
        assert device(snapshot, 0)["conflicts"] == []
        assert [holders(snapshot, n) for n in (1, 2, 3)] == [[], [], []]
        total = sum(gpu["power_watts"] for gpu in snapshot["gpus"])
        assert total == 1000
    finally:
        kubelet.close()


def test_a_call_that_hangs_delays_neither_a_tick_nor_the_exit(start: Start, gpus: StandIn) -> None:
    node = agent(start, gpus, EXPANSE_GPU_DEADLINE_S="2")
    node.wait_for(lambda s: s["gpus"] and device(s, 3)["state"] == "ok")
    gpus.hang("nvmlDeviceGetUtilizationRates", 1)
    about = f"NVML has not answered about {uuid(1)} for 2 s"
    node.wait_for(
        lambda s: (
            about in node.said() and device(s, 1)["state"] == "silent" and device(s, 3)["state"] == "ok"
        ),
        30,
    )
    gaps = [report.interval_ns for report in reports(node) if report.interval_ns]
    assert max(gaps) < 0.75e9  # ticks of 0.5 s went on
    assert node.stop() == 0
    gpus.release()


def test_a_lost_gpu_is_one_event_and_xids_name_the_job_that_held_it(
    start: Start, groups: Groups, gpus: StandIn
) -> None:
    node = agent(start, gpus)
    with slurm_job(groups, 90, (3,), "SLURM_JOB_GPUS='3'"):  # NVML's second
        node.wait_for(lambda s: s["gpus"] and holders(s, 1) == ["slurm/90"], 30)
        gpus.event(1, 79)
        gpus.fail("*", 15, 1)
        node.wait_for(lambda s: device(s, 1)["state"] == "lost")
        events = [event for report in reports(node) for event in report.gpu_events]
        assert [(event.kind, event.uuid, event.xid) for event in events if event.kind != "xid"] == [
            ("lost", uuid(1), 0)
        ]
        (xid,) = [event for event in events if event.kind == "xid"]
        assert (xid.uuid, xid.xid) == (uuid(1), 79)
        assert [holder.id for holder in xid.holders] == ["90"]
        node.wait_for(lambda s: all(device(s, n)["state"] == "ok" for n in (0, 2, 3)))


def test_a_job_that_holds_a_gpu_and_runs_nothing_is_held_idle(
    start: Start, groups: Groups, gpus: StandIn
) -> None:
    """Its slurmstepd lives, in the extern step; the user's process has gone."""
    node = agent(start, gpus)
    with slurm_job(groups, 91, (0,), "SLURM_JOB_GPUS='0'"):
        node.wait_for(lambda s: s["gpus"] and holders(s, 2) == ["slurm/91"], 30)
        root = Path("/sys/fs/cgroup/freezer") / f"slurm_{groups.tag}" / "uid_65534" / "job_91"
        extern = root / "step_extern"
        extern.mkdir()
        groups.directories.append(extern)
        sleeper = subprocess.Popen(["sleep", "600"])
        try:
            (extern / "cgroup.procs").write_text(str(sleeper.pid))
            (worker,) = (root / "step_0" / "cgroup.procs").read_text().split()
            os.kill(int(worker), 9)
            snapshot = node.wait_for(lambda s: (job(s, "slurm/91") or {}).get("state") == "held_idle")
            assert holders(snapshot, 2) == ["slurm/91"]
            assert len(job(snapshot, "slurm/91")["gpu"]["holds"]) == 1  # type: ignore[index]
        finally:
            sleeper.kill()
            sleeper.wait()


def test_what_asks_nvml_is_counted_in_the_collectors_own_cost(start: Start, gpus: StandIn) -> None:
    node = agent(start, gpus)
    snapshot = node.wait_for(lambda s: s["nvml"] and s["nvml"]["up"])
    report = reports(node)[-1]
    fields = Path(f"/proc/{node.process.pid}/stat").read_text().rpartition(")")[2].split()
    agents_own_ns = (int(fields[11]) + int(fields[12])) * 10**9 // os.sysconf("SC_CLK_TCK")
    assert report.nvml.cpu_ns > 20_000_000  # it has imported pynvml
    assert report.collector.cpu_ns > agents_own_ns
    assert report.collector.pss_bytes > report.nvml.pss_bytes > 0
    assert snapshot["nvml"]["restarts"] == 0


def test_when_nvml_cannot_begin_everything_else_goes_on(start: Start, run: Run, gpus: StandIn) -> None:
    gpus.fail("nvmlInit", 18)
    node = agent(start, gpus)
    key, _ = run("busy", sys.executable, "-c", BURN)
    snapshot = node.wait_for(lambda s: (job(s, key) or {}).get("cpu_cores") and s["nvml"], 20)
    assert (snapshot["nvml"]["up"], snapshot["nvml"]["code"]) == (False, "driver_library_mismatch")
    assert snapshot["gpus"] == []
    gaps = [report.interval_ns for report in reports(node) if report.interval_ns]
    assert max(gaps) < 0.75e9
