"""GPUs in the plain tables: those of the jobs, and the view of devices."""

from __future__ import annotations

import pytest

from expanse_ebpf.top import columns, gpus, plain, table, text
from expanse_ebpf.top.deltas import Values
from expanse_ebpf.top.rates import snapshot
from expanse_ebpf.top.text import UNKNOWN, Locale
from expanse_ebpf.visibility import HIDDEN_CONFLICT, visible
from expanse_ebpf.wire.collector_pb2 import Report
from tests.top.gpu_reports import MIG, POD, UUIDS, gpu_report
from tests.top.serving import make_report


def shown(report: Report | None = None) -> Values:
    return snapshot(gpu_report(20), report or gpu_report(21), 0.1)


def titles(output: str, first: str = "JOB") -> list[str]:
    line = next(line for line in output.splitlines() if line.startswith(first + " "))
    return [title for title in line.split("  ") if title]


def row(output: str, start: str) -> list[str]:
    line = next(line for line in output.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


# ---- the table of jobs


def test_jobs_have_their_gpus() -> None:
    output = plain.render(shown())
    assert [t.strip() for t in titles(output)] == [
        *("JOB", "NAME", "USER", "CORES", "IPC", "MISS", "SWITCH/S", "WAIT", "MEMORY", "I/O", "PROCS"),
        *("GPU", "GPU%", "SM%", "GPU MEM", "POWER", "STATE", "PYTHON"),
    ]
    assert row(output, "slurm/4411")[11:17] == ["2", "68.9%", "70.0%", "49.0 GiB", "1025 W", "running"]
    assert row(output, "slurm/4412")[11:16] == ["1!?", *[UNKNOWN] * 4]
    assert row(output, "slurm/4413")[11:12] == ["1 MIG"]
    assert row(output, "slurm/4413")[16] == "held idle"


def test_without_gpus_there_are_no_columns_for_them() -> None:
    output = plain.render(snapshot(make_report(20), make_report(21)))
    assert not {"GPU", "GPU%", "SM%", "GPU MEM", "POWER"} & {t.strip() for t in titles(output)}
    report = gpu_report(21)
    for job in report.jobs:
        job.gpu.ClearField("sm_active_ns")
    assert {t.strip() for t in titles(plain.render(shown(report)))} & {"GPU", "SM%"} == {"GPU"}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_what_gpus_do_is_seen_on_ordinary_terminals(width: int) -> None:
    output = plain.render(shown(), width, 24)
    there = {t.strip() for t in titles(output)}
    assert {"GPU", "GPU%", "PYTHON", "MEMORY"} <= there
    assert there & {"IPC", "MISS", "SWITCH/S"} == set() or {"GPU MEM", "POWER"} <= there
    assert all(text.cell_width(line) <= width for line in output.splitlines())


@pytest.mark.parametrize(
    ("whole", "parts", "doubt", "expected"),
    [
        (2, 0, "", "2"),
        (0, 3, "", "3 MIG"),
        (1, 2, "", "1+2 MIG"),
        (0, 0, "", "0"),
        (2, 0, "conflicts", "2!"),
        (0, 1, "unknown", "1 MIG?"),
        (0, 0, "unknown", "0?"),
        (0, 0, "conflicts", "0!"),
        (1, 2, "conflicts unknown", "1+2 MIG!?"),
    ],
)
def test_how_many_gpus_a_job_holds(whole: int, parts: int, doubt: str, expected: str) -> None:
    gpu = {"count": whole + parts, "mig_instances": parts, "conflicts": [], "unknown": []}
    for field in doubt.split():
        gpu[field] = ["x"]
    assert columns.gpus_held({"gpu": gpu}) == expected


def test_a_figure_that_is_not_of_all_its_gpus_has_a_mark() -> None:
    report = gpu_report(21)
    report.jobs[0].unavailable["gpu"] = f"no figures of {UUIDS[1]}; see the GPU"
    report.jobs[1].unavailable["gpu"] = f"no figures of {UUIDS[2]}; see the GPU"
    output = plain.render(shown(report))
    assert row(output, "slurm/4411")[11:16] == ["2", "68.9%*", "70.0%*", "49.0 GiB*", "1025 W*"]
    assert row(output, "slurm/4412")[12:16] == [UNKNOWN] * 4  # what is not known at all needs none


@pytest.mark.parametrize("name", ["gpus", "gpu", "sm", "gpu_memory", "power"])
def test_jobs_are_sorted_by_what_their_gpus_do(name: str) -> None:
    assert name in columns.SORT_KEYS
    first = columns.sort(shown()["jobs"], name)[0]
    assert first["key"] == "slurm/4411"
    assert columns.sort(snapshot(None, make_report(1))["jobs"], name)  # nobody has any


# ---- the view of devices


def test_one_line_per_device_with_instances_below_their_gpu() -> None:
    output = plain.render(shown(), devices=True)
    lines = output.splitlines()[2:10]
    assert [t.strip() for t in titles(output, "GPU")] == [
        *("GPU", "NAME", "HELD BY", "GPU%", "SM%", "TENSOR%", "DRAM%", "MEMORY", "POWER", "TEMP", "CLOCK"),
        *("STATE", "XID", "THROTTLED BY"),
    ]
    assert [line[:18].rstrip() for line in lines[1:]] == [
        "0 GPU-0a6b7c8d",
        "1 GPU-1a6b7c8d",
        "2 GPU-2a6b7c8d",
        "3 GPU-3a6b7c8d",
        "  3/7 MIG-aaaaaaaa",
        "  3/8 MIG-bbbbbbbb",
        "4 GPU-4a6b7c8d",
    ]
    assert row(output, "0 GPU")[1:] == [
        *("NVIDIA H200", "slurm/4411", "91.8%", "70.0%", "40.0%", "50.0%", "20.0/141 GiB", "512/700 W"),
        *("64 C", "1755 MHz", "ok", "sw power cap"),
    ]
    assert row(output, "1 GPU")[-2:] == ["ok", "none"]  # idle is no throttling
    assert row(output, "2 GPU")[2] == "2 jobs!"
    assert row(output, "2 GPU")[-2:] == ["48 x3, 79", "sw power cap, hw thermal slowdown, 0x1000"]
    assert row(output, "3 GPU")[2:4] == ["1 of 2 MIG", UNKNOWN]
    assert row(output, "3/7 MIG")[1:5] == ["1g.18gb", "slurm/4413", UNKNOWN, "10.0%"]
    assert row(output, "3/8 MIG")[2] == UNKNOWN
    assert row(output, "4 GPU")[2:] == [*[UNKNOWN] * 9, "lost", UNKNOWN]
    shares = f"given to more than one job, and not as shares: {POD}, slurm/4412"
    assert f"conflict, GPU 2 GPU-2a6b7c8d: {shares}" in output
    assert f"conflict, slurm/4412: its process 4101 uses GPU-9, which {POD} holds" in output


def test_the_plain_figure_stands_where_no_samples_were_measured() -> None:
    report = gpu_report(21)
    report.gpus[0].ClearField("measured_ns")
    assert row(plain.render(shown(report), devices=True), "0 GPU")[3] == "88.0%"


@pytest.mark.parametrize(("width", "height"), [(20, 5), (1, 1), (80, 24), (40, 8), (200, 50)])
def test_it_fits_on_any_screen(width: int, height: int) -> None:
    lines = plain.render(shown(), width, height, devices=True).splitlines()
    assert len(lines) <= max(1, height - 1)
    assert max(map(len, lines)) <= width
    if width == 80:
        there = {t.strip() for t in titles("\n".join(lines), "GPU")}
        assert {"HELD BY", "GPU%", "SM%", "MEMORY", "STATE", "XID"} <= there
        assert any(line.startswith("not shown for want of room: NAME") for line in lines)
    if width == 200:
        assert any(line.endswith("0x1000") for line in lines)


def test_ascii() -> None:
    output = plain.render(shown(), locale=Locale(ascii=True), devices=True)
    assert output.isascii()
    assert row(output, "4 GPU")[2] == "-"
    assert "?" not in output


def test_names_do_not_steer_the_terminal() -> None:
    report = gpu_report(21)
    for field in ("uuid", "name", "state", "pci_bus_id", "serial", "mig_profile"):
        setattr(report.gpus[0], field, "a\x1b[2J\n\x9b1m" * 30)
    report.gpus[0].holders.add(name="p\x1b]0;x\x07\r", source="\x1b[1m")
    report.gpus[0].conflicts.append("c\x1b[31m\nd")
    report.gpus[0].throttled_ns["\x1b[5m"] = 7
    report.jobs[0].gpu.conflicts.append("e\x1b[31m\nf")
    report.jobs[0].gpu.unknown.append("\x1b[0m")
    report.nvml.up, report.nvml.code, report.nvml.reason = False, "\x1b[1m", "\n\x1b[2J"
    for devices in (False, True):
        output = plain.render(shown(report), devices=devices)
        assert not any(c < " " for c in output if c != "\n")
        assert "\x9b" not in output
    assert sum(line[:6] in [f"{i} GPU-" for i in range(9)] for line in output.splitlines()) == 4


@pytest.mark.parametrize(
    ("uuid", "short"),
    [
        (UUIDS[0], "GPU-0a6b7c8d"),
        (MIG[0], "MIG-aaaaaaaa"),
        (f"MIG-{UUIDS[1]}/7/0", "MIG-1a6b7c8d/7/0"),
        ("something else entirely", "something else …"),
        ("", UNKNOWN),
        ("GPU-\x1b[2J", "GPU-\ufffd[2J"),
    ],
)
def test_uuids_for_people(uuid: str, short: str) -> None:
    assert gpus.short_uuid(uuid) == short


def test_devices_stand_in_nvmls_order_and_orphans_by_themselves() -> None:
    report = gpu_report(21)
    report.gpus[0].index, report.gpus[1].index = 1, 0
    report.gpus[2].ClearField("index")
    report.gpus[5].parent_uuid, report.gpus[5].index = "GPU-gone", 9
    found = [(gpu["uuid"], gpu["nested"]) for gpu in gpus.rows(shown(report)["gpus"])]
    assert found == [
        *((UUIDS[i], False) for i in (1, 0, 3)),
        (MIG[1], True),
        (UUIDS[4], False),
        (MIG[0], False),
        (UUIDS[2], False),
    ]


@pytest.mark.parametrize(
    ("parent_index", "instance", "compute", "expected"),
    [(3, 9, 0, "3/9"), (3, 9, None, "3/9"), (3, 9, 1, "3/9/1"), (None, None, None, f"{UNKNOWN}/{UNKNOWN}")],
)
def test_an_instance_is_named_by_its_gpu_and_its_number(
    parent_index: int | None, instance: int | None, compute: int | None, expected: str
) -> None:
    gpu = {"uuid": MIG[0], "parent_uuid": UUIDS[3], "index": None, "parent_index": parent_index}
    gpu |= {"gpu_instance": instance, "compute_instance": compute}
    assert gpus.label(gpu) == f"{expected} MIG-aaaaaaaa"


def h100s() -> Values:
    report = gpu_report(21)
    for gpu in report.gpus[:5]:
        gpu.name = "NVIDIA H100 80GB HBM3"
        gpu.memory_used_bytes, gpu.memory_total_bytes = 64 << 30, 85_520_809_984
    del report.gpus[4:]
    return shown(report)


def test_names_and_memory_are_whole_where_there_is_room() -> None:
    rows = gpus.rows(h100s()["gpus"])
    for width, whole in ((77, {"memory"}), (197, {"memory", "name"})):
        chosen, _ = table.choose(gpus.COLUMNS, rows, width)
        found = table.widths(chosen, rows, width)
        assert sum(found.values()) + 2 * len(found) - 2 <= width
        for column in chosen:
            if column.name in whole:
                cell = text.fit(column.show(rows[0]), found[column.name])
                assert (
                    cell.strip() == {"memory": "64.0/79.6 GiB", "name": "NVIDIA H100 80GB HBM3"}[column.name]
                )
                whole = whole - {column.name}
        assert not whole


def test_conflicts_are_whole_in_print_as_far_as_there_is_room() -> None:
    lines = plain.render(shown(), 60, 24, devices=True).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("conflict, GPU 2"))
    said = " ".join(line.strip() for line in lines[at:])
    assert lines[at + 1].startswith("  ")
    words = shown()["gpus"][2]["conflicts"][0]
    assert f"conflict, GPU 2 GPU-2a6b7c8d: {words}" in said
    assert not any(line.endswith("…") for line in lines[at:])
    assert len(lines) <= 23


def test_others_hold_it_where_their_names_are_not_to_be_seen() -> None:
    report = gpu_report(21)
    del report.gpus[0].holders[:]
    report.gpus[0].holders.add()
    report.gpus[1].holders.add()
    output = plain.render(shown(report), devices=True)
    assert row(output, "0 GPU")[2] == "another user"
    assert row(output, "1 GPU")[2] == "2 jobs"


def test_filter() -> None:
    rows = gpus.rows(shown()["gpus"])
    for wanted, found in (
        ("gpu-2a6b", [2]),
        ("4411", [0, 1]),
        ("NOTEBOOK", [2]),
        ("lost", [6]),
        ("1g.18gb", [4, 5]),
        ("h200", [0, 1, 2, 3, 4, 5, 6]),
    ):
        assert [i for i, gpu in enumerate(rows) if gpus.matches(gpu, wanted)] == found, wanted


# ---- what is wrong, and why there is nothing


def test_trouble_is_named() -> None:
    lines = plain.trouble(shown())
    assert lines[:3] == [
        "GPU lost: 4 GPU-4a6b7c8d",
        "2 GPU conflicts; see --gpus",
        "1 GPU process whose job is not known; see --gpus",
    ]
    report = gpu_report(21)
    report.gpus[0].state = report.gpus[1].state = "silent"
    report.gpus[0].conflicts.append("another")
    report.gpus[0].unresolved_processes = 2
    for job in report.jobs[:2]:
        job.gpu.conflicts.append("one that only the job knows of")
    report.nvml.up, report.nvml.code, report.nvml.reason = False, "hung", "no answer in 5 s"
    assert gpus.trouble(shown(report), "see g") == [
        "NVML is down: no answer in 5 s (hung)",
        "GPU lost: 4 GPU-4a6b7c8d",
        "NVML has no answer of GPU: 0 GPU-0a6b7c8d, 1 GPU-1a6b7c8d",
        "5 GPU conflicts; see g",
        "3 GPU processes whose job is not known; see g",
    ]
    assert not gpus.trouble(snapshot(None, make_report(1)), "see g")


def test_what_a_user_may_not_read_of_conflicts_is_counted_all_the_same() -> None:
    report = gpu_report(21)
    seen = visible(report, 1001)  # who has job 4412
    lines = gpus.conflicts(snapshot(None, seen))
    assert lines == [
        f"conflict, GPU 2 GPU-2a6b7c8d: {HIDDEN_CONFLICT}",
        f"conflict, slurm/4412: {HIDDEN_CONFLICT}",
    ]


def test_a_gpu_without_figures_has_one_name_everywhere() -> None:
    report = gpu_report(21)
    source = report.collector.sources.add(name="gpu", up=True)
    source.unavailable["gpu index 5"] = "it is lost"
    source.unavailable[f"gpu {UUIDS[0]}"] = "NVML did not answer"
    source.unavailable["pod-resources"] = "denied"
    lines = plain.trouble(shown(report))
    for line in (
        "not known: the GPU with NVML's index 5: it is lost",
        "not known: GPU GPU-0a6b7c8d: NVML did not answer",
        "not known: pod-resources: denied",
    ):
        assert line in lines


def test_a_silent_gpu_is_one_that_has_no_answer() -> None:
    report = gpu_report(21)
    report.gpus[0].state = "silent"
    assert "no answer" in row(plain.render(shown(report), devices=True), "0 GPU")


def test_why_there_is_no_gpu_to_show() -> None:
    def said(report: Report) -> str:
        output = plain.render(snapshot(None, report), devices=True)
        return output.splitlines()[2]

    report = make_report(1)
    assert said(report) == "no GPU figures: no NVIDIA driver on this node, or the source gpu is switched off"
    source = report.collector.sources.add(name="gpu", up=True)
    assert said(report) == "no GPU figures: no NVIDIA driver on this node"
    source.up, source.reason = False, "switched off"
    assert said(report) == "no GPU figures: switched off"
    report.nvml.up, report.nvml.code, report.nvml.reason = (
        False,
        "driver_not_loaded",
        "the driver is not loaded",
    )
    assert said(report) == "no GPU figures: the driver is not loaded (driver_not_loaded)"
    report.nvml.up = True
    assert said(report) == "no GPU: NVML lists none, or the jobs that were asked for hold none"
