"""The report: the same figures as text, as Markdown and as JSON; what is missing or failed is told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from expanse_ebpf.bench import figures, report, statistics
from expanse_ebpf.bench.results import End, Record, Results, Run, Samples, Usage, Windows
from expanse_ebpf.text import cell_width
from tests.bench.records import MIB, PEER, complete, machine, results, run, state


def cell(*runs: Record) -> figures.Cell:
    return figures.cell(results(runs), "loop", "near")


def pair(number: int, off_s: float, arm_s: float, **changes: object) -> tuple[Run, Run]:
    return run("loop", "near", "off", number, off_s), run("loop", "near", "arm", number, arm_s, **changes)


def test_the_comparison_is_that_of_the_statistics() -> None:
    times = [(10.0, 11.0), (10.0, 11.2), (10.1, 11.0)]
    found = cell(*(each for no, both in enumerate(times, 1) for each in pair(no, *both)))
    assert found.comparison == statistics.compare(times)
    assert (found.pairs, found.stopped) == (3, "not finished")


def test_resource_use_is_that_of_the_runs_that_count() -> None:
    warm = run(
        *("loop", "near", "warm_up", 0, 9.0),
        collector=Usage(900.0, 70 * MIB, None, None),
        bpf_s_per_s=0.0005,
        samples=Samples(1.0, 9, 1, 8.0, 0.6, 30),
    )
    runs = [warm]
    for number, (cpu_s, sent, received, gap_s) in enumerate(
        [(1.0, 10240, 9, 1.1), (3.0, 30720, 10, 2.5), (2.0, 20480, 10, 1.0)], 1
    ):
        runs += pair(
            *(number, 10.0, 10.0),
            wall_s=10.0,
            collector=Usage(cpu_s, 40 * MIB, 5120, sent),
            controller=Usage(cpu_s / 10, 50 * MIB, 0, None),
            samples=Samples(1.0, 10, received, gap_s, None, 0),
            windows=Windows(number, 3.0, 10 * number),
            job_memory_peak_bytes=(200 + number) * MIB,
        )
    found = cell(*runs)
    assert found.values == pytest.approx(
        {
            "collector_cores": 0.2,
            "collector_pss_bytes": 70 * MIB,
            "job_memory_added_bytes": 2 * MIB,
            "sent_bytes_per_s": 2048,
            "disk_bytes_per_s": 512,
            "bpf_s_per_s": 0.0005,
            "samples_received": 29,
            "samples_expected": 30,
            "longest_gap_s": 2.5,
            "age_s": 0.6,
            "controller_cores": 0.02,
            "controller_pss_bytes": 50 * MIB,
            "controller_disk_bytes_per_s": 0,
            "windows_opened": 2,
            "traced_share": 0.3,
            "probes_most": 30,
        }
    )
    low, high = found.memory_interval or (0, 0)
    assert low < 2 * MIB < high


def test_what_is_missing_has_a_reason_and_is_never_0() -> None:
    found = figures.cell(results(), "loop", PEER)
    assert "sent_bytes_per_s" not in found.values
    assert found.missing["sent_bytes_per_s"] == "does not go with this arm"
    why = {"collector.sent_bytes": "a connection was closed", "windows": "an old\x1b[31m kernel"}
    runs = [*pair(1, 10.0, 10.0, missing=why, collector=Usage(1.0, None, 0, None), windows=None)]
    found = cell(*runs)
    assert found.missing["sent_bytes_per_s"] == "a connection was closed"
    assert found.missing["probes_most"] == found.missing["traced_share"] == why["windows"]
    assert found.missing["job_memory_added_bytes"].startswith("needs two pairs")
    assert not found.missing.keys() & found.values.keys()
    assert {m.name for m in figures.MEASURES} == found.missing.keys() | found.values.keys()
    shown = report.text(results(runs))
    assert "a connection was closed" in shown
    assert "\x1b" not in shown
    assert "network sent, KiB/s" in shown
    line = next(line for line in shown.splitlines() if line.startswith("network sent, KiB/s"))
    assert line.split()[-1] == report.UNKNOWN


@pytest.mark.parametrize(
    ("written", "shown"), [(0, "0.00"), (1, "<0.01"), (10_240, "1.00"), (None, report.UNKNOWN)]
)
def test_0_is_shown_as_0_and_nothing_else_is(written: int | None, shown: str) -> None:
    runs = pair(1, 10.0, 10.0, wall_s=10.0, collector=Usage(1.0, MIB, written, None))
    rows = {row[0]: row[1] for row in report.resource_rows([cell(*runs)])}
    assert rows["disk written, KiB/s"] == shown


def test_failed_runs_are_listed_and_runs_that_do_not_count_are_counted() -> None:
    made = results()
    shown = report.text(made)
    assert shown.count("failed: py-spy, pair 1, attempt 1, beside py-spy: exit code 1: no such process") == 2
    assert "136 runs: 120 in pairs that count, 12 warm-up, 2 failed, 2 thrown away" in shown
    assert json.loads(report.as_json(made))["runs"] == {
        "all": 136,
        "counted": 120,
        "warm_up": 12,
        "failed": 2,
        "thrown_away": 2,
    }


def test_an_arm_that_never_ran_well_is_in_the_report() -> None:
    why = "pair 1 failed 3 times: no \x1b[2Jluck"
    records: list[Record] = [
        run("loop", "near", "warm_up", 0, None, failed="no luck"),
        End("loop", "near", "failed", why),
    ]
    made = results(records)
    assert report.given_up(made) == ["loop beside near: pair 1 failed 3 times: no \u241b[2Jluck"]
    shown = report.text(made)
    assert "near: no interval: no pair is complete; given up: pair 1 failed 3 times" in shown
    assert "failed: near, warm-up, beside near: no luck" in shown
    assert report.given_up(results()) == []


@pytest.mark.parametrize(
    ("records", "warning"),
    [
        ([machine(), machine(kernel="6.19")], "kernel differs between sessions: 6.18.5, 6.19"),
        ([machine(governor="powersave")], "the frequency governor is powersave, not performance"),
        (
            [
                machine(),
                run("w", "a", "off", 1, 9.0, state=state(steal_share=0.031)),
                run("w", "a", "arm", 1, 9),
            ],
            "the hypervisor took more than 2 % of the CPUs in 1 of 2 runs, up to 3.1 %",
        ),
        (
            [machine(cpus=4), run("w", "a", "off", 1, 9.0, state=state(other_cores=0.1))],
            "other programs used more than 2 % of the CPUs in 1 of 1 runs, up to 2.5 %",
        ),
        (
            [
                machine(),
                run("w", "a", "off", 1, 9.0),
                run("w", "a", "arm", 1, 9.0),
                End("w", "a", "max_pairs"),
            ],
            "1 of 1 comparisons have fewer than 8 pairs: a first look",
        ),
    ],
)
def test_a_machine_that_was_not_as_it_should_be_is_warned_of(records: list[Record], warning: str) -> None:
    made = results(records)
    assert figures.warnings(made) == [warning]
    assert f"WARNING: {warning}" in report.text(made)
    assert json.loads(report.as_json(made))["warnings"] == [warning]


def test_a_machine_as_it_should_be_is_not_warned_of() -> None:
    calm = run("w", "a", "off", 1, 9.0, state=state(other_cores=0.07, steal_share=None))
    assert figures.warnings(results([machine(cpus=4, governor=None), machine(cpus=4), calm])) == []


def test_the_json_has_the_figures_of_the_tables(tmp_path: Path) -> None:
    made = results(complete(3), tmp_path)
    document = json.loads(report.as_json(Results.read(tmp_path)))
    assert document == json.loads(report.as_json(made))
    assert document["machine"]["host"] == "node7"
    assert document["form"] == 1
    shown = report.text(made)
    for each in document["cells"]:
        found = figures.cell(made, each["workload"], each["arm"])
        assert found.comparison is not None
        assert each["interval"] == [found.comparison.interval.low, found.comparison.interval.high]
        assert each["bootstrap"] is None or len(each["bootstrap"]) == 2
        assert each["sentence"] in shown
        assert each["resources"].keys() >= {m.name for m in figures.MEASURES}
        assert all(each["resources"][name] is None for name in each["missing"])


def test_every_line_fits_and_many_arms_are_put_below_each_other() -> None:
    records = complete(3, ("a-very-long-name-of-a-workload-" * 3,))
    records += [
        changed
        for number in range(9)
        for each in records
        if isinstance(each, Run) and (changed := replace(each, arm=f"{each.arm}-{number}-" + "長い" * 20))
    ]
    shown = report.text(results(records))
    assert max(map(cell_width, shown.splitlines())) <= report.WIDTH
    assert shown.count("resource use") > 3


def test_markdown_takes_no_name_for_markup() -> None:
    records = [replace(r, arm="a|b*<i>`") if isinstance(r, Run) else r for r in complete(2, ("x_y_z",))]
    shown = report.markdown(results(records))
    assert "### x\\_y\\_z" in shown
    assert "| a\\|b\\*\\<i\\>\\` |" in shown
    tables = [line for line in shown.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in tables} == {7, 3}  # of the one and the other table


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, 0.0, -1.0])
def test_nonsense_in_the_records_breaks_nothing(nonsense: float) -> None:
    odd = pair(1, 10.0, 10.0, bpf_s_per_s=nonsense, collector=Usage(nonsense, 1, 1, 1))
    odd = (odd[0], replace(odd[1], seconds=nonsense, wall_s=nonsense))
    made = results([*odd, *pair(2, 10.0, 10.0)])
    assert "a time must be a finite number above 0" in report.text(made)
    assert json.loads(report.as_json(made))["cells"][0]["percent"] is None


def test_results_without_a_run_or_a_machine_are_reported() -> None:
    assert report.text(results([])).startswith("0 runs")
    assert json.loads(report.as_json(results([])))["machine"] is None
