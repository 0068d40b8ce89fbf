"""docs/gpu-metrics.md: that it names all there is, and that its queries give dcgm-exporter's figures."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

from expanse_ebpf.export.gpu_metrics import GPU_METRICS
from expanse_ebpf.export.metrics import METRICS
from expanse_ebpf.wire.collector_pb2 import Report
from tests.export.gpus import SECOND, WATTS, gpu_node, one_gpu
from tests.export.test_prometheus import full_report, page, samples

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "gpu-metrics.md"


def rows(title: str) -> list[list[str]]:
    """The cells of the table under a heading, without its head."""
    section = re.split(r"^## ", DOCUMENT.read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = (part for part in section if part.startswith(f"{title}\n"))
    table = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


SAME = {field.strip("`"): query.strip("`") for field, _, query in rows("The same figure")}


# etc/default-counters.csv and etc/dcp-metrics-included.csv of dcgm-exporter, without the labels.
SHIPPED = {
    "DEV": """SM_CLOCK MEM_CLOCK MEMORY_TEMP GPU_TEMP POWER_USAGE TOTAL_ENERGY_CONSUMPTION
        PCIE_TX_THROUGHPUT PCIE_RX_THROUGHPUT PCIE_REPLAY_COUNTER GPU_UTIL MEM_COPY_UTIL ENC_UTIL DEC_UTIL
        XID_ERRORS POWER_VIOLATION THERMAL_VIOLATION SYNC_BOOST_VIOLATION BOARD_LIMIT_VIOLATION
        LOW_UTIL_VIOLATION RELIABILITY_VIOLATION FB_FREE FB_USED FB_RESERVED ECC_SBE_VOL_TOTAL
        ECC_DBE_VOL_TOTAL ECC_SBE_AGG_TOTAL ECC_DBE_AGG_TOTAL RETIRED_SBE RETIRED_DBE RETIRED_PENDING
        NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL NVLINK_CRC_DATA_ERROR_COUNT_TOTAL
        NVLINK_REPLAY_ERROR_COUNT_TOTAL NVLINK_RECOVERY_ERROR_COUNT_TOTAL NVLINK_BANDWIDTH_TOTAL
        VGPU_LICENSE_STATUS UNCORRECTABLE_REMAPPED_ROWS CORRECTABLE_REMAPPED_ROWS ROW_REMAP_FAILURE""",
    "PROF": """GR_ENGINE_ACTIVE SM_ACTIVE SM_OCCUPANCY PIPE_TENSOR_ACTIVE DRAM_ACTIVE PIPE_FP64_ACTIVE
        PIPE_FP32_ACTIVE PIPE_FP16_ACTIVE PCIE_TX_BYTES PCIE_RX_BYTES""",
}


def test_every_name_in_the_document_is_declared() -> None:
    names = set(re.findall(r"\bexpanse_\w+[a-z0-9]\b", DOCUMENT.read_text(encoding="utf-8")))
    assert len(names) > 50
    assert names - {metric.name for metric in METRICS} - {"expanse_gpu_profile_"} == set()


def test_every_metric_of_a_gpu_is_in_the_document() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    assert [metric.name for metric in GPU_METRICS if not re.search(rf"\b{metric.name}\b", text)] == []


def test_no_field_is_in_two_tables_and_those_of_dcgm_exporters_default_are_in_one() -> None:
    titles = ("The same figure", "The same matter in another form", "Not collected")
    fields = Counter(row[0].strip("`") for title in titles for row in rows(title))
    assert max(fields.values()) == 1
    shipped = [f"DCGM_FI_{kind}_{name}" for kind, names in SHIPPED.items() for name in names.split()]
    assert [field for field in shipped if field not in fields] == []


def promtool(tmp_path: Path, reports: tuple[Report, Report], wanted: dict[str, dict[str, float]]) -> str:
    """What promtool has to say when queries must give values, by labels in PromQL's form.

    The series begin as in the first report and grow every 15 s by what the second one has more; they are
    asked for six minutes later.
    """
    first, second = (
        {(s.name, *sorted(s.labels.items())): s.value for s in samples(page(r))} for r in reports
    )
    assert first.keys() == second.keys()
    inputs = []
    for (name, *labels), value in first.items():
        told = ",".join(f"{label}={json.dumps(text)}" for label, text in labels)
        step = second[(name, *labels)] - value
        inputs.append({"series": f"{name}{{{told}}}", "values": f"{value!r}+{step!r}x24"})
    return ask(tmp_path, inputs, {(query, "6m"): samples_ for query, samples_ in wanted.items()})


def ask(tmp_path: Path, inputs: list[dict[str, str]], wanted: dict[tuple[str, str], dict[str, float]]) -> str:
    """The same of series in promtool's form, which have a value every 15 s; `wanted` by query and time."""
    found = shutil.which("promtool", path=f"{ROOT / 'build'}:/usr/bin:/usr/local/bin")
    assert found, "promtool is missing; `make build/promtool` fetches it"
    tests = [
        {
            "expr": f"round({query}, 0.0001)",
            "eval_time": time,
            "exp_samples": [
                {"labels": labels, "value": math.floor(value * 10_000 + 0.5) / 10_000}
                for labels, value in samples_.items()
            ],
        }
        for (query, time), samples_ in wanted.items()
    ]
    content = {
        "evaluation_interval": "15s",
        "tests": [{"interval": "15s", "input_series": inputs, "promql_expr_test": tests}],
    }
    (tmp_path / "test.yaml").write_text(json.dumps(content))
    result = subprocess.run(
        [found, "test", "rules", str(tmp_path / "test.yaml")], capture_output=True, text=True, check=False
    )
    assert ("SUCCESS" in result.stdout) == (result.returncode == 0)
    return "" if result.returncode == 0 else result.stdout + result.stderr


# A field's figure, in dcgm-exporter's unit, on the node that `dcgm_node` makes up.
EXPECTED: dict[str, float] = {
    "DCGM_FI_DEV_SM_CLOCK": 1755,
    "DCGM_FI_DEV_MEM_CLOCK": 2619,
    "DCGM_FI_DEV_MAX_SM_CLOCK": 1980,
    "DCGM_FI_DEV_MAX_MEM_CLOCK": 2620,
    "DCGM_FI_DEV_GPU_TEMP": 41,
    "DCGM_FI_DEV_MEMORY_TEMP": 52,
    "DCGM_FI_DEV_POWER_USAGE_INSTANT": 512.5,
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": 700,
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 123_456,
    "DCGM_FI_DEV_GPU_UTIL": 37,
    "DCGM_FI_DEV_MEM_COPY_UTIL": 21,
    "DCGM_FI_DEV_FB_USED": 30_000,
    "DCGM_FI_DEV_FB_FREE": 50_000,
    "DCGM_FI_DEV_FB_RESERVED": 600,
    "DCGM_FI_DEV_FB_TOTAL": 80_600,
    "DCGM_FI_DEV_POWER_VIOLATION": 1_500_000_000,
    "DCGM_FI_DEV_THERMAL_VIOLATION": 2_500_000_000,
    "DCGM_FI_DEV_SYNC_BOOST_VIOLATION": 3_500_000_000,
    "DCGM_FI_DEV_BOARD_LIMIT_VIOLATION": 4_500_000_000,
    "DCGM_FI_DEV_RELIABILITY_VIOLATION": 5_500_000_000,
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": 3,
    "DCGM_FI_DEV_PCIE_LINK_GEN": 5,
    "DCGM_FI_DEV_PCIE_LINK_WIDTH": 16,
    "DCGM_FI_DEV_ECC_CURRENT": 1,
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 61,
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 62,
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": 63,
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": 64,
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": 65,
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": 66,
    "DCGM_FI_DEV_ROW_REMAP_PENDING": 1,
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": 0,
    "DCGM_FI_DEV_PERSISTENCE_MODE": 1,
    "DCGM_FI_DEV_MIG_MODE": 0,
    "DCGM_EXP_XID_ERRORS_TOTAL": 26,
    "DCGM_EXP_XID_ERRORS_COUNT": 20,
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.9,
    "DCGM_FI_PROF_SM_ACTIVE": 0.8,
    "DCGM_FI_PROF_SM_OCCUPANCY": 0.7,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.6,
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": 0.1,
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": 0.2,
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 0.3,
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": 0.4,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.5,
    "DCGM_FI_PROF_PCIE_TX_BYTES": 1000,
    "DCGM_FI_PROF_PCIE_RX_BYTES": 2000,
    "DCGM_FI_PROF_NVLINK_TX_BYTES": 3000,
    "DCGM_FI_PROF_NVLINK_RX_BYTES": 4000,
}


def dcgm_node(grown: int) -> Report:
    """A node with one GPU, `grown` times 15 s after its first report. No two figures are the same."""
    mib, ns = 1 << 20, 15 * SECOND * grown
    report = one_gpu(
        sm_clock_mhz=1755,
        memory_clock_mhz=2619,
        sm_clock_max_mhz=1980,
        memory_clock_max_mhz=2620,
        temperature_c=41,
        memory_temperature_c=52,
        power_mw=512_500,
        power_limit_mw=700_000,
        energy_mj=123_456,
        utilization=0.37,
        memory_utilization=0.21,
        memory_used_bytes=30_000 * mib,
        memory_free_bytes=50_000 * mib,
        memory_reserved_bytes=600 * mib,
        memory_total_bytes=80_600 * mib,
        pcie_replays=3,
        pcie_generation=5,
        pcie_width=16,
        ecc_enabled=True,
        ecc_corrected=61,
        ecc_uncorrected=62,
        ecc_corrected_lifetime=63,
        ecc_uncorrected_lifetime=64,
        remapped_rows_corrected=65,
        remapped_rows_uncorrected=66,
        remapping_pending=True,
        remapping_failed=False,
        persistence=True,
        mig_enabled=False,
        xids={79: 2 + grown},
    )
    gpu = report.gpus[0]
    for number, cause in enumerate(("power", "thermal", "sync_boost", "board_limit", "reliability"), 1):
        gpu.throttled_ns[cause] = number * SECOND + SECOND // 2
    profile = gpu.profile
    profile.source, profile.measured_ns = "gpm", ns
    tenths = {"graphics": 9, "sm_active": 8, "sm_occupancy": 7, "tensor": 6, "dram": 5, "integer": 4}
    for name, part in {**tenths, "fp16": 3, "fp32": 2, "fp64": 1}.items():
        setattr(profile, f"{name}_ns", ns * part // 10)
    for number, name in enumerate(("pcie_sent", "pcie_received", "nvlink_sent", "nvlink_received"), 1):
        setattr(profile, f"{name}_bytes", 15 * grown * number * 1000)
    return report


def test_the_queries_of_the_document_give_dcgm_exporters_figures(tmp_path: Path) -> None:
    assert SAME.keys() == EXPECTED.keys()
    wanted = {f"sum({SAME[field]})": {"{}": value} for field, value in EXPECTED.items()}
    assert promtool(tmp_path, (dcgm_node(0), dcgm_node(1)), wanted) == ""


def test_a_wrong_figure_would_be_found(tmp_path: Path) -> None:
    said = promtool(tmp_path, (dcgm_node(0),) * 2, {"sum(expanse_gpu_power_watts)": {"{}": 512}})
    assert "got: {} 5.125E+02" in said


def examples() -> list[str]:
    """The document's queries, each in one line."""
    found = re.findall(r"^```promql\n(.*?)^```", DOCUMENT.read_text(encoding="utf-8"), re.M | re.S)
    return [" ".join(example.split()) for example in found]


def test_the_examples_of_the_document_work(tmp_path: Path) -> None:
    models, jobs, free, job_busy, _, busy = examples()
    later = gpu_node()
    for gpu in later.gpus:
        if not gpu.parent_uuid:
            gpu.busy_ns += 3 * SECOND
            gpu.measured_ns += 15 * SECOND
    training = next(j.gpu for j in later.jobs if j.identity.id == "4711")
    training.busy_ns += 6 * SECOND
    training.measured_ns += 30 * SECOND
    wanted = {
        models: {'{name="NVIDIA H100 80GB HBM3"}': sum(WATTS)},
        jobs: {
            '{scheduler="kubernetes",job_id="default/a"}': 350,
            '{scheduler="kubernetes",job_id="default/b"}': 350,
            '{scheduler="slurm",job_id="4711"}': 650 + 600,
            '{name="default/elsewhere"}': 90,
        },
        free: {"{}": 80 + 75 + 70},  # not GPU 7, of which an instance is held
        job_busy: {'{node="gpu017",scheduler="slurm",job_id="4711",run="3"}': 0.2},
        f"sum({busy})": {"{}": 8 * 0.2},
    }
    assert promtool(tmp_path, (gpu_node(), later), wanted) == ""


def test_the_first_xid_is_seen_as_later_ones_are(tmp_path: Path) -> None:
    alarm = examples()[4]
    new, old, growing = (f'{{xid="{xid}"}}' for xid in (79, 13, 31))
    inputs = [
        {"series": f"expanse_gpu_xid_events_total{new}", "values": "_x39 1x40"},  # from 10 min on
        {"series": f"expanse_gpu_xid_events_total{old}", "values": "3x80"},
        {"series": f"expanse_gpu_xid_events_total{growing}", "values": "0x39 1x40"},
    ]
    wanted = {
        (f"ceil({query} > 0)", time): samples_
        for query in (alarm, f"({SAME['DCGM_EXP_XID_ERRORS_COUNT']})")
        for time, samples_ in (("9m", {}), ("12m", {new: 1.0, growing: 1.0}), ("16m", {}))
    }
    assert ask(tmp_path, inputs, wanted) == ""


def test_the_forms_of_the_document_parse_and_find_series(tmp_path: Path) -> None:
    forms = [row[1].strip("`") for row in rows("The same matter in another form")]
    assert len(forms) > 5
    wanted = {f"count(({form}) * 0 + 1) > bool 0": {"{}": 1} for form in forms}
    assert promtool(tmp_path, (full_report(), full_report()), wanted) == ""
