"""The rules that come with the controller: each with what makes it fire, what does not, and no data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from expanse_controller.rules.engine import FIRING, NO_DATA, OK
from expanse_controller.rules.figures import FIGURES
from expanse_controller.rules.rule import SHIPPED, shipped
from expanse_controller.rules.subject import NO_GPU
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_HELD_IDLE
from tests.controller.rules.made import LOOK, Cluster

RULES = {rule.name: rule for rule in shipped()}
WELL = {
    "processes": 9,
    "cpu_cores": 6.0,
    "gpus": 4,
    "gpu_busy": 0.97,
    "gpu_sm_active": 0.8,
    "loading": 0.05,
    "throttled": 0.1,
    "io_pressure": 0.01,
}
# By rule: figures that differ from WELL (None: absent), and how it then stands.
CASES: Mapping[str, list[tuple[dict[str, Any], str]]] = {
    "gpu_idle_cpu_busy": [
        ({"gpu_busy": 0.02, "cpu_cores": 1.0}, FIRING),
        ({"gpu_busy": 0.02, "cpu_cores": 0.5}, OK),
        ({"gpu_busy": 0.2, "cpu_cores": 30.0}, OK),
        ({"gpu_busy": None}, NO_DATA),
        ({"cpu_cores": None}, NO_DATA),
        ({"gpus": None}, NO_DATA),
    ],
    "gpu_idle_waiting_for_data": [
        ({"gpu_busy": 0.3, "loading": 2.8}, FIRING),
        ({"gpu_busy": 0.3, "loading": 1.0}, OK),
        ({"gpu_busy": 0.7, "loading": 2.8}, OK),
        ({"gpu_busy": 0.3, "loading": None}, NO_DATA),
    ],
    "launch_bound": [
        ({"gpu_busy": 0.5, "cpu_cores": 4.0}, FIRING),
        ({"gpu_busy": 0.5, "cpu_cores": 4.0, "gpu_sm_active": None, "io_pressure": None}, FIRING),
        ({"gpu_busy": 0.95, "cpu_cores": 4.0, "gpu_sm_active": 0.05}, FIRING),
        ({"gpu_busy": 0.95, "cpu_cores": 4.0, "gpu_sm_active": None}, OK),
        ({"gpu_busy": 0.5, "cpu_cores": 2.0}, OK),
        ({"gpu_busy": 0.01, "cpu_cores": 4.0}, OK),
        ({"gpu_busy": 0.5, "cpu_cores": 4.0, "loading": 1.0}, OK),
        ({"gpu_busy": 0.5, "cpu_cores": 4.0, "io_pressure": 0.4}, OK),
        ({"gpu_busy": 0.5, "cpu_cores": 4.0, "loading": None}, NO_DATA),
    ],
    "held_unused": [
        ({"gpu_busy": 0.0, "cpu_cores": 0.0, "state": JOB_STATE_HELD_IDLE, "processes": None}, FIRING),
        ({"gpu_busy": 0.0, "cpu_cores": 0.01}, FIRING),
        ({"gpu_busy": 0.0, "cpu_cores": 1.0}, OK),
        ({"gpu_busy": 0.1, "cpu_cores": 0.0}, OK),
        ({"gpu_busy": None, "cpu_cores": 0.0}, NO_DATA),
    ],
    "throttled": [
        ({"throttled": 0.9}, FIRING),
        ({"throttled": 0.9, "gpu_busy": 0.1}, OK),
        ({"throttled": 0.2}, OK),
        ({"throttled": None}, NO_DATA),
    ],
    "straggler": [
        ({"gpu_busy": 0.4}, FIRING),
        ({"gpu_busy": 0.8}, OK),
        ({"gpu_busy": None}, NO_DATA),
    ],
}


def without_absent(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if value is not None}


@pytest.mark.parametrize(
    ("name", "differing", "state"), [(name, *case) for name, cases in CASES.items() for case in cases]
)
def test_how_a_rule_stands(name: str, differing: dict[str, Any], state: str) -> None:
    rule = RULES[name]
    cluster = Cluster([rule])
    job = without_absent({**WELL, **differing})
    nodes = {"a": [job]}
    if rule.each == "node":
        nodes |= {"b": [WELL], "c": [WELL]}
    fired = 0
    looks = int(rule.for_s) // LOOK + 2  # the first has no rates yet
    for number in range(1, looks + 1):
        if number == looks:
            assert FIRING not in {one.state for one in cluster.engine.states()}
        fired += len(cluster.look(nodes))
    found = {one.node or "a": one for one in cluster.engine.states()}
    assert found["a"].state == state
    assert fired == (state == FIRING and rule.action == "trace")
    assert {e.name for e in found["a"].evidence} - {"node"} == (
        set(rule.expression.names) if state == FIRING else set()
    )
    if state == NO_DATA:
        absent = [n for n, value in differing.items() if value is None]
        reason = found["a"].reason
        assert reason == NO_GPU if "gpus" in absent else any(n in reason for n in absent)


def test_every_rule_has_a_case_of_each_kind() -> None:
    assert CASES.keys() == RULES.keys()
    for cases in CASES.values():
        assert {state for _, state in cases} == {FIRING, OK, NO_DATA}


def test_a_job_that_does_well_is_left_alone() -> None:
    cluster = Cluster(list(RULES.values()))
    for _ in range(100):
        cluster.look({name: [WELL] for name in ("a", "b", "c")})
    assert {one.state for one in cluster.engine.states()} == {OK}


def test_a_job_without_gpus_is_left_alone() -> None:
    cluster = Cluster(list(RULES.values()))
    for _ in range(100):
        cluster.look({name: [{"cpu_cores": 3.0, "loading": 3.0}] for name in ("a", "b", "c")})
    assert {one.state for one in cluster.engine.states()} == {NO_DATA}


def test_a_straggler_needs_two_peers() -> None:
    cluster = Cluster([RULES["straggler"]])
    for _ in range(20):
        cluster.look({"a": [{**WELL, "gpu_busy": 0.1}], "b": [WELL]})
    assert {one.state for one in cluster.engine.states()} == {NO_DATA}


def test_what_comes_with_the_controller_is_in_the_package() -> None:
    package = Path(__file__).resolve().parents[3] / "expanse_controller"
    assert SHIPPED.is_relative_to(package)


def document() -> str:
    return (Path(__file__).resolve().parents[3] / "docs" / "rules.md").read_text(encoding="utf-8")


def test_the_document_lists_the_figures() -> None:
    _, _, rest = document().partition("## Figures")
    rows = [line for line in rest.partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert rows == [
        f"| `{one.name}` | {one.unit or 'true or false'} | {one.over_nodes} | {one.about} |"
        for one in FIGURES.values()
    ]


def test_the_document_explains_each_rule_as_it_is() -> None:
    _, _, rest = document().partition("## Shipped rules")
    for name, rule in RULES.items():
        _, found, section = rest.partition(f"### {name}\n")
        assert found, name
        section = section.partition("\n### ")[0]
        assert rule.about in section
        assert " ".join(rule.expression.source.split()) in " ".join(section.split())
