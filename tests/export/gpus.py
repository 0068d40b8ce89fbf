"""Made-up nodes with GPUs."""

from __future__ import annotations

from typing import Any

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_RUNNING, GpuSample, JobSample, Report

SECOND = 1_000_000_000
GIB = 1 << 30
WATTS = (700, 650, 600, 90, 80, 75, 70, 65)


def uuid(number: int) -> str:
    """A GPU's UUID."""
    return f"GPU-{number:08x}-0000-4000-8000-000000000000"


def instance_uuid(number: int) -> str:
    """The UUID of an instance of GPU 7."""
    return f"MIG-{number:08x}-0000-4000-8000-000000000000"


def job(report: Report, scheduler: str, identifier: str, run: int) -> JobSample:
    """Add a job to the report."""
    sample = report.jobs.add(state=JOB_STATE_RUNNING, cpu_ns=SECOND)
    sample.identity.scheduler, sample.identity.id, sample.identity.run = scheduler, identifier, run
    return sample


def hold(gpu: GpuSample, source: str, *samples: JobSample) -> None:
    """Let the jobs hold the GPU or instance together."""
    for sample in samples:
        i = sample.identity
        gpu.holders.add(scheduler=i.scheduler, id=i.id, run=i.run, source=source)
        sample.gpu.holds.add(uuid=gpu.uuid, source=source, sharers=len(samples))


def gpu(report: Report, number: int) -> GpuSample:
    """Add GPU `number` to the report."""
    made = report.gpus.add(
        uuid=uuid(number),
        name="NVIDIA H100 80GB HBM3",
        index=number,
        minor=7 - number,
        pci_bus_id=f"00000000:{number + 16:02X}:00.0",
        state="ok",
        time_ns=1_800_000_000 * SECOND,
        busy_ns=(number + 1) * 100 * SECOND,
        measured_ns=1000 * SECOND,
        utilization=number / 10,
        memory_used_bytes=number * GIB,
        memory_free_bytes=(79 - number) * GIB,
        memory_reserved_bytes=GIB,
        memory_total_bytes=80 * GIB,
        power_mw=WATTS[number] * 1000,
        power_limit_mw=700_000,
        energy_mj=123_456_789,
        temperature_c=41,
        sm_clock_mhz=1980,
        memory_clock_mhz=2619,
        throttle_reasons=0x4,
        mig_enabled=number == 7,
    )
    made.throttled_ns["power"] = 5 * SECOND
    made.xids[13] = 2
    made.profile.source = "gpm"
    made.profile.measured_ns, made.profile.sm_active_ns = 900 * SECOND, 450 * SECOND
    return made


def one_gpu(**fields: Any) -> Report:
    """The report of a node with one GPU that answers."""
    report = Report()
    report.node.name = "gpu017"
    report.gpus.add(uuid=uuid(0), state="ok", **fields)
    return report


def gpu_node(allocated: bool = True) -> Report:
    """The node's report. When `allocated`: GPU 0 is shared by two pods, 1 and 2 are of one SLURM job, an
    instance of 7 is of another, 3 of a pod that is not known here, and 4, 5 and 6 are free."""
    report = Report(sequence=1, time_ns=1_800_000_000 * SECOND, interval_ns=2 * SECOND)
    report.node.name = "gpu017"
    report.nvml.up = True
    report.nvml.driver_version = "580.65.06"
    devices = [gpu(report, number) for number in range(8)]
    instances = [
        report.gpus.add(
            uuid=instance_uuid(number),
            parent_uuid=uuid(7),
            name="NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            mig_profile="1g.10gb",
            gpu_instance=7 + number,
            compute_instance=0,
            state="ok",
            memory_used_bytes=GIB,
            memory_total_bytes=10 * GIB,
            unavailable={"power_mw": "not of a MIG instance"},
        )
        for number in range(2)
    ]
    if allocated:
        pods = [job(report, "kubernetes", f"default/{name}", run) for run, name in enumerate("ab", 1)]
        hold(devices[0], "pod_resources", *pods)
        training = job(report, "slurm", "4711", 3)
        hold(devices[1], "device_cgroup", training)
        hold(devices[2], "device_cgroup", training)
        training.gpu.busy_ns, training.gpu.measured_ns = 250 * SECOND, 1000 * SECOND
        training.gpu.energy_mj, training.gpu.power_mw = 7_500, 1_250_000
        devices[3].holders.add(name="default/elsewhere", source="pod_resources")
        small = job(report, "slurm", "4712", 4)
        hold(instances[0], "slurm", small)
        small.gpu.unknown.append("128")
        small.gpu.conflicts.append("slurm says 128, the device cgroup GPU 7")
    return report
