"""Made-up GPUs for a made-up report: whole, shared, lost and split ones."""

from __future__ import annotations

from expanse_ebpf.wire.collector_pb2 import GpuSample, Report
from tests.top.serving import SECOND, make_report

UUIDS = tuple(f"GPU-{i}a6b7c8d-1234-5678-9abc-def01234567{i}" for i in range(5))
MIG = ("MIG-aaaaaaaa-1111-5678-9abc-def012345670", "MIG-bbbbbbbb-2222-5678-9abc-def012345670")
POD = "team/notebook"
GIB = 1 << 30


def gpu_report(sequence: int, jobs: int = 3, interval_s: float = 1.0, pmu: bool = True) -> Report:
    """`make_report` with GPUs: 0 and 1 of job 4411, 2 shared by 4412 and a pod, 3 split, 4 lost.

    Job 4413, which runs nothing, holds the first of the two MIG instances of GPU 3.
    """
    report = make_report(sequence, jobs, interval_s, pmu)
    seconds = sequence * interval_s
    report.nvml.up, report.nvml.driver_version, report.nvml.cuda_version = True, "580.65.06", "13.0"
    report.nvml.cpu_ns, report.nvml.pss_bytes = int(seconds * 2e6), 20 << 20
    for i, uuid in enumerate(UUIDS[:4]):
        _whole(report.gpus.add(uuid=uuid, index=i, minor=i, state="ok"), i, seconds)
    lost = report.gpus.add(uuid=UUIDS[4], index=4, name="NVIDIA H200", state="lost")
    lost.unavailable["power_mw"] = "the GPU is lost (gpu_is_lost)"
    report.gpus[3].mig_enabled = True
    for field in ("busy_ns", "measured_ns", "utilization", "profile"):
        report.gpus[3].ClearField(field)
    report.gpus[3].unavailable["busy_ns"] = "not supported with MIG"
    for i, uuid in enumerate(MIG):
        _instance(report.gpus.add(uuid=uuid, state="ok"), i, seconds)
    _owners(report, seconds)
    return report


def _whole(gpu: GpuSample, i: int, seconds: float) -> None:
    gpu.name, gpu.pci_bus_id, gpu.serial = "NVIDIA H200", f"00000000:{i + 1}B:00.0", f"16540{i}"
    gpu.busy_ns, gpu.measured_ns = int(seconds * 0.9 * SECOND / (i + 1)), int(seconds * 0.98 * SECOND)
    gpu.utilization, gpu.memory_utilization = 0.88, 0.41
    gpu.memory_used_bytes, gpu.memory_total_bytes = (10 * i + 20) * GIB, 141 * GIB
    gpu.memory_free_bytes, gpu.memory_reserved_bytes = (120 - 10 * i) * GIB, GIB
    gpu.power_mw, gpu.power_limit_mw, gpu.energy_mj = 512_000 + i * 1000, 700_000, int(seconds * 512_000)
    gpu.temperature_c, gpu.memory_temperature_c = 64 + i, 80
    gpu.sm_clock_mhz, gpu.sm_clock_max_mhz = 1755, 1980
    gpu.memory_clock_mhz, gpu.memory_clock_max_mhz = 3201, 3201
    gpu.throttle_reasons = (0x4, 0x1, 0x4 | 0x40 | 0x1000, 0)[i]
    gpu.throttled_ns["power"], gpu.throttled_ns["thermal"] = int(seconds * 0.25 * SECOND), 0
    gpu.pcie_sent_bytes, gpu.pcie_received_bytes = int(seconds * 3e9), int(seconds * 1e9)
    gpu.pcie_generation, gpu.pcie_width, gpu.pcie_replays = 5, 16, 2
    gpu.nvlinks, gpu.nvlink_sent_bytes, gpu.nvlink_received_bytes = (
        18,
        int(seconds * 2e11),
        int(seconds * 1e11),
    )
    gpu.ecc_enabled, gpu.ecc_corrected, gpu.ecc_uncorrected = True, 3, 0
    gpu.ecc_corrected_lifetime, gpu.ecc_uncorrected_lifetime = 7, 1
    gpu.remapped_rows_corrected, gpu.remapped_rows_uncorrected, gpu.remapping_pending = 1, 0, i == 1
    gpu.persistence, gpu.mig_enabled = True, False
    profile = gpu.profile
    profile.source, profile.measured_ns = "gpm", int(seconds * SECOND)
    profile.sm_active_ns, profile.sm_occupancy_ns = int(seconds * 0.7 * SECOND), int(seconds * 0.3 * SECOND)
    profile.tensor_ns, profile.dram_ns = int(seconds * 0.4 * SECOND), int(seconds * 0.5 * SECOND)
    profile.pcie_sent_bytes = int(seconds * 4e9)


def _instance(gpu: GpuSample, i: int, seconds: float) -> None:
    gpu.parent_uuid, gpu.name, gpu.mig_profile = UUIDS[3], "NVIDIA H200 MIG 1g.18gb", "1g.18gb"
    gpu.minor, gpu.gpu_instance, gpu.compute_instance = 3, 7 + i, 0
    gpu.memory_used_bytes, gpu.memory_total_bytes = GIB, 16 * GIB
    gpu.unavailable["power_mw"] = "NVML gives it of the whole GPU only"
    gpu.profile.source, gpu.profile.measured_ns = "gpm", int(seconds * SECOND)
    gpu.profile.sm_active_ns = int(seconds * 0.1 * SECOND)


def _owners(report: Report, seconds: float) -> None:
    gpus = {gpu.uuid: gpu for gpu in report.gpus}
    holds = ((UUIDS[0], 1), (UUIDS[1], 1)), ((UUIDS[2], 2),), ((MIG[0], 1),)
    for job, held in zip(report.jobs, holds, strict=False):
        identity = job.identity
        for uuid, sharers in held:
            job.gpu.holds.add(uuid=uuid, source="device_cgroup", sharers=sharers)
            gpus[uuid].holders.add(
                scheduler=identity.scheduler, id=identity.id, run=identity.run, source="device_cgroup"
            )
        job.gpu.memory_total_bytes = sum(gpus[uuid].memory_total_bytes for uuid, _ in held)
    if len(report.jobs) > 0:
        gpu = report.jobs[0].gpu
        gpu.busy_ns, gpu.measured_ns = int(seconds * 1.35 * SECOND), int(seconds * 1.96 * SECOND)
        gpu.sm_active_ns, gpu.profiled_ns = int(seconds * 1.4 * SECOND), int(seconds * 2 * SECOND)
        gpu.energy_mj, gpu.power_mw, gpu.memory_bytes = int(seconds * 1_025_000), 1_025_000, 49 * GIB
        report.jobs[0].identity.gpus.extend(["0", "1"])
        report.jobs[0].identity.gpus_source = "SLURM_JOB_GPUS"
        gpus[UUIDS[0]].processes.add(
            pid=4000, memory_bytes=19 * GIB, kind="compute", job="slurm/4411", resolved=True
        )
        gpus[UUIDS[1]].processes.add(
            pid=4001, memory_bytes=30 * GIB, kind="compute", job="slurm/4411", resolved=True
        )
    shared = gpus[UUIDS[2]]
    shared.holders.add(name=POD, source="pod_resources")
    shared.processes.add(pid=4100, memory_bytes=5 * GIB, kind="compute", job="slurm/4412", resolved=True)
    shared.processes.add(pid=324, memory_bytes=GIB, kind="mps")
    shared.unresolved_processes, shared.rejected_processes = 1, 2
    shared.conflicts.append(f"given to more than one job, and not as shares: {POD}, slurm/4412")
    shared.xids[79], shared.xids[48] = 1, 3
    if len(report.jobs) > 1:
        report.jobs[1].gpu.conflicts.append(f"its process 4101 uses GPU-9, which {POD} holds")
        report.jobs[1].gpu.unknown.append("GPU-ffffffff-0000-0000-0000-000000000000")
    event = report.gpu_events.add(time_ns=report.time_ns, uuid=UUIDS[2], kind="xid", xid=79)
    event.holders.extend(shared.holders)
