"""What Enter shows of a GPU, and of the GPUs of a job."""

from __future__ import annotations

import pytest

from expanse_ebpf.top import detail, gpu_panel, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.rates import snapshot
from expanse_ebpf.wire.collector_pb2 import Report
from tests.top.gpu_reports import MIG, UUIDS, gpu_report


def shown(report: Report | None = None) -> Values:
    return snapshot(gpu_report(20), report or gpu_report(21), 0.1)


def device(place: int, snap: Values | None = None, width: int = 200) -> list[str]:
    snap = snap or shown()
    gpu = snap["gpus"][place]
    return [line for line, _ in gpu_panel.device_lines(gpu["uuid"], gpu, snap, snap["gpu_events"], width)]


def job(place: int, snap: Values | None = None, width: int = 200) -> list[str]:
    snap = snap or shown()
    return [line for line, _ in gpu_panel.job_lines(snap["jobs"][place], snap, width)]


def test_everything_about_a_device() -> None:
    lines = device(1)
    assert lines[:12] == [
        f"GPU 1 · NVIDIA H200 · {UUIDS[1]} · 00000000:2B:00.0 · serial 165401 · /dev/nvidia1",
        "held by slurm/4411 · resnet50 · user0 · running · source: device cgroup",
        "busy 45.9% (newest sample 88.0%) · memory read or written 41.0%",
        "memory used 30.0 GiB · free 110 GiB · reserved 1.0 GiB · in all 141 GiB",
        "power 513/700 W · energy 10.8 kJ · GPU 65 C · memory 80 C · SM clock 1755 of 1980 MHz"
        " · memory clock 3201 of 3201 MHz",
        "clocks held down by gpu idle · of the time: power 25.0%, thermal 0.0%",
        "PCIe 2.8 GiB/s sent, 954 MiB/s received, generation 5 x16, 2 replays",
        "NVLink 186 GiB/s sent, 93.1 GiB/s received, 18 links",
        "profile (gpm): SM active 70.0% · warps 30.0% · tensor 40.0% · DRAM 50.0%",
        f"  PCIe 3.7 GiB/s sent, {text.UNKNOWN} received",
        "ECC on, 3 corrected, 0 uncorrected · ever 7, 1",
        "remapped rows: 1 for corrected errors, 0 for uncorrected, pending",
    ]
    assert lines[12:] == [
        "persistence on · MIG off",
        "",
        "       PID    MEMORY KIND      JOB",
        "      4001  30.0 GiB compute   slurm/4411",
    ]


def test_holders_conflicts_events_and_processes_of_a_shared_device() -> None:
    snap = shown()
    lines = device(2, snap)
    assert lines[1:4] == [
        "held by slurm/4412 · llama-sft · user1 · running · source: device cgroup",
        "held by team/notebook · no job that this node knows · source: pod resources",
        "conflict: given to more than one job, and not as shares: team/notebook, slurm/4412",
    ]
    assert "Xid: 48 x3, 79" in lines
    assert any(line.endswith(" UTC  Xid 79, held by slurm/4412, team/notebook") for line in lines)
    assert lines[-4:] == [
        "      4100   5.0 GiB compute   slurm/4412",
        "       324   1.0 GiB mps       not known whose",
        "1 not resolved: no process that has the GPU open fits the number",
        "2 rejected: the driver's record cannot be true",
    ]
    assert not any("Xid 79" in line for line in device(1, snap))  # another's


def test_a_split_gpu_tells_of_its_instances_and_an_instance_of_its_gpu() -> None:
    whole, instance = device(3), device(5)
    assert whole[1:3] == [
        "MIG instance 3/7 MIG-aaaaaaaa 1g.18gb · held by slurm/4413",
        "MIG instance 3/8 MIG-bbbbbbbb 1g.18gb · held by nobody",
    ]
    assert instance[0] == (
        f"MIG instance 7 of GPU 3 · 1g.18gb · NVIDIA H200 MIG 1g.18gb · {MIG[0]} · /dev/nvidia3"
        " · compute instance 0 · of GPU-3a6b7c8d"
    )
    assert instance[-3:] == ["", "not known", "  power_mw: NVML gives it of the whole GPU only"]
    assert not any(line.startswith(("power", "busy", "clocks", "PCIe", "ECC")) for line in instance)


def test_clocks_in_words() -> None:
    def clocks(bits: int | None, causes: tuple[str, ...], share: float = 0.0) -> list[str]:
        before, report = gpu_report(20), gpu_report(21)
        for one, seconds in ((before, 0.0), (report, share)):
            gpu = one.gpus[0]
            gpu.ClearField("throttle_reasons")
            if bits is not None:
                gpu.throttle_reasons = bits
            gpu.throttled_ns.clear()
            for cause in causes:
                gpu.throttled_ns[cause] = int(seconds * 1e9)
        return [line for line in device(0, snapshot(before, report, 0.1)) if line.startswith("clocks")]

    assert clocks(0, ()) == ["clocks free"]
    assert clocks(0, ("board_limit", "sync_boost")) == ["clocks free"]
    assert clocks(0, ("board_limit", "sync_boost"), 0.25) == [
        "clocks free · held down of the time: board limit 25.0%, sync boost 25.0%"
    ]
    assert clocks(0x4, ()) == ["clocks held down by sw power cap"]
    assert clocks(None, ("power",)) == ["clocks held down of the time: power 0.0%"]
    assert clocks(None, ()) == []


def test_the_newest_sample_stands_alone_where_no_time_was_measured() -> None:
    report = gpu_report(21)
    report.gpus[0].ClearField("busy_ns")
    assert any(line.startswith("newest sample 88.0% · memory read") for line in device(0, shown(report)))


def test_a_job_says_each_reason_once() -> None:
    report = gpu_report(21)
    for name in ("gpu.busy_ns", "gpu.power_mw", "gpu.energy_mj"):
        report.jobs[0].unavailable[name] = "it is shared"
    report.jobs[0].unavailable["network"] = "no namespace of its own"
    snap = shown(report)
    lines = detail.lines("slurm/4411", snap["jobs"][0], snap, "not asked", detail.ProcessRates(), 200)
    assert [line for line, _ in lines[-4:]] == [
        "",
        "not known",
        "  gpu.busy_ns, gpu.energy_mj, gpu.power_mw: it is shared",
        "  network: no namespace of its own",
    ]


def test_a_lost_gpu_and_one_that_is_not_there_any_more() -> None:
    lines = device(4)
    assert lines == [
        f"GPU 4 · NVIDIA H200 · {UUIDS[4]} · lost",
        "held by nobody",
        "",
        "no process",
        "",
        "not known",
        "  power_mw: the GPU is lost (gpu_is_lost)",
    ]
    gone = gpu_panel.device_lines("GPU-\x1b1", None, shown(), [], 80)
    assert [line for line, _ in gone] == ["GPU GPU-\ufffd1", "The GPU is no longer here."]


def test_figures_that_are_no_profilers_say_so() -> None:
    report = gpu_report(21)
    report.gpus[0].profile.source = "nvml"
    assert any(
        line.startswith("profile (NVML's plain figures, no GPM): ") for line in device(0, shown(report))
    )


def test_other_users_are_counted_and_not_named() -> None:
    report = gpu_report(21)
    report.gpus[0].holders.add()
    report.gpus[0].processes.add()
    lines = device(0, shown(report))
    assert "held by 1 job of other users" in lines
    assert "1 of other users or of nobody known" in lines


def test_what_a_job_holds() -> None:
    assert job(0) == [
        "gpu: 2 held · busy 1.35 GPUs (68.9%) · SM active 70.0% · memory 49.0 GiB of 282 GiB"
        " · power 1025 W · energy 21.5 kJ",
        "  0 GPU-0a6b7c8d  NVIDIA H200 · held alone · source: device cgroup",
        "  1 GPU-1a6b7c8d  NVIDIA H200 · held alone · source: device cgroup",
        "  its environment says SLURM_JOB_GPUS=0,1",
    ]
    assert job(1) == [
        f"gpu: 1 held · memory {text.UNKNOWN} of 141 GiB",
        "  2 GPU-2a6b7c8d  NVIDIA H200 · shared by 2 jobs · source: device cgroup",
        "  conflict: its process 4101 uses GPU-9, which team/notebook holds",
        "  not on this node: GPU-ffffffff-0000-0000-0000-000000000000",
    ]


def test_a_job_with_nothing_but_a_claim() -> None:
    report = gpu_report(21)
    report.jobs[0].ClearField("gpu")
    report.jobs[2].ClearField("gpu")
    snap = shown(report)
    assert job(0, snap) == ["gpu: its environment says SLURM_JOB_GPUS=0,1"]
    assert job(2, snap) == []


@pytest.mark.parametrize("width", [40, 76])
def test_nothing_is_cut_off_on_narrow_terminals(width: int) -> None:
    wide, narrow = " ".join(device(2)), " ".join(device(2, width=width))
    assert all(text.cell_width(line) <= width for line in device(2, width=width) if " " in line.strip())
    for word in ("00000000:3B:00.0", "serial 165402", "memory clock 3201 of 3201 MHz", "2 replays"):
        assert word in wide
        assert all(part in narrow for part in word.split())


def test_many_processes_are_cut_short() -> None:
    report = gpu_report(21)
    for pid in range(300):
        report.gpus[0].processes.add(pid=pid, kind="compute", resolved=True)
    assert f"… {301 - gpu_panel.MAX_PROCESSES} more" in device(0, shown(report))
