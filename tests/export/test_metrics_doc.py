"""docs/metrics.md says what the code does."""

from __future__ import annotations

from pathlib import Path

from expanse_controller.ingest import Figures
from expanse_controller.metrics import ControllerCollector
from expanse_controller.store import Store
from expanse_ebpf.export.metrics import METRICS, markdown

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "metrics.md"


def tables() -> str:
    return DOCUMENT.read_text(encoding="utf-8").partition("<!-- tables -->\n")[2]


def test_the_document_holds_the_tables_of_the_code() -> None:
    agent, _, _ = tables().partition("## The controller")
    assert agent.strip() == markdown().strip(), (
        "run: .venv/bin/python -m expanse_ebpf.export.metrics, and put the output below `<!-- tables -->`"
    )


def test_the_document_holds_what_the_controller_shows_of_itself(tmp_path: Path) -> None:
    store = Store(tmp_path / "store.db")
    try:
        families = list(ControllerCollector(store, Figures(), lambda _: ()).collect())
    finally:
        store.close()
    wanted = set()
    for family in families:
        name = family.name + ("_total" if family.type == "counter" else "")
        wanted.add((f"`{name}`", family.type, family.documentation))
    _, _, controller = tables().partition("## The controller")
    rows = [[cell.strip() for cell in line.split("|")] for line in controller.splitlines()]
    assert {(row[1], row[2], row[5]) for row in rows if len(row) == 7 and row[1].startswith("`")} == wanted


def test_no_name_is_declared_twice_and_each_has_help_and_source() -> None:
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    assert [m.name for m in METRICS if not m.help.endswith(".") or not m.source] == []


def test_every_unit_in_a_name_is_the_declared_unit() -> None:
    for metric in METRICS:
        stem = metric.name.removesuffix("_total")
        for unit in ("seconds", "bytes", "ratio", "cores", "watts", "joules", "celsius", "hertz"):
            assert (stem.endswith(f"_{unit}")) == (metric.unit == unit), metric.name
