"""The controller's Prometheus page."""

from __future__ import annotations

import time
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from expanse_controller.ingest import Figures
from expanse_controller.metrics import ControllerCollector
from expanse_controller.store import Item, Store
from expanse_ebpf.export.prometheus import families
from tests.controller.process import Controller, client, node, report, up
from tests.export.gpus import WATTS, gpu_node, uuid

SECOND = 1_000_000_000
Series = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(address: str) -> Series:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as page:
        text = page.read().decode()
    series: Series = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in series, f"{key} twice"
            series[key] = sample.value
    assert text.count("# TYPE expanse_job_cpu_seconds_total ") <= 1
    return series


def named(series: Series, name: str) -> dict[frozenset[tuple[str, str]], float]:
    return {labels: value for (found, labels), value in series.items() if found == name}


def test_page_has_every_node_and_the_controllers_own_figures(tmp_path: Path) -> None:
    with (
        Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as controller,
        client(controller.address) as nodes,
    ):
        for name, seconds in (("a", 3), ("b", 4)):
            message = up(report(seconds))
            nodes.send(message, message, hello=node(name, f"i-{name}"))
        series = scrape(controller.metrics)
    cpu = {dict(k)["node"]: v for k, v in named(series, "expanse_job_cpu_seconds_total").items()}
    assert cpu == {"a": 3.0, "b": 4.0}
    assert series["expanse_controller_reports_stored_total", frozenset()] == 2
    assert series["expanse_controller_reports_replayed_total", frozenset()] == 2
    assert series["expanse_controller_store_bytes", frozenset()] > 0
    assert set(named(series, "expanse_node_identity_conflict").values()) == {0.0}


def test_installations_with_one_name_have_series_of_their_own(tmp_path: Path) -> None:
    with (
        Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as controller,
        client(controller.address) as nodes,
    ):
        for install, seconds in (("clone-a", 3), ("clone-b", 4)):
            nodes.send(up(report(seconds)), hello=node("twin", install))
        series = scrape(controller.metrics)
    cpu = {dict(k)["install_id"]: v for k, v in named(series, "expanse_job_cpu_seconds_total").items()}
    assert cpu == {"clone-a": 3.0, "clone-b": 4.0}
    assert set(named(series, "expanse_node_identity_conflict").values()) == {1.0}


def test_gpus_of_every_node_are_on_the_page_once_each(tmp_path: Path) -> None:
    with (
        Controller(tmp_path / "x.db", "--metrics-listen", "127.0.0.1:0") as controller,
        client(controller.address) as nodes,
    ):
        for name in ("a", "b"):
            made = gpu_node()
            made.node.CopyFrom(node(name, f"i-{name}"))
            made.time_ns = time.time_ns()
            nodes.send(up(made), hello=made.node)
            (snapshot,) = nodes.snapshot(name)
            assert snapshot.current.gpus == made.gpus
            assert snapshot.current.nvml == made.nvml
        series = scrape(controller.metrics)
        points = nodes.series("slurm/4711", node="a", fields=["gpus", "gpu_busy_ns", "gpu_energy_mj"]).points
    power = {
        (dict(k)["node"], dict(k)["uuid"]): v for k, v in named(series, "expanse_gpu_power_watts").items()
    }
    assert power == {(name, uuid(n)): watts for name in ("a", "b") for n, watts in enumerate(WATTS)}
    assert set(named(series, "expanse_nvml_up").values()) == {1.0}
    held = {dict(k)["job_id"]: v for k, v in named(series, "expanse_job_gpus").items()}
    assert held == {"default/a": 1, "default/b": 1, "4711": 2, "4712": 1}
    assert [dict(point.values) for point in points] == [
        {"gpus": 2, "gpu_busy_ns": 250 * SECOND, "gpu_energy_mj": 7500}
    ]


def test_silent_node_ages_and_its_jobs_go(tmp_path: Path) -> None:
    store = Store(tmp_path / "x.db")
    now = time.time_ns()
    # Silence is two intervals, and five seconds at least.
    for name, age, interval in (("gone", 6, 1), ("slow", 50, 30), ("here", 4, 1), ("forgotten", 90_000, 1)):
        made = report(1, time_ns=now + 600 * SECOND)
        made.node.CopyFrom(node(name, f"i-{name}"))
        made.interval_ns = interval * SECOND
        store.write([Item(made.node, made, now - age * SECOND)])
    page = {family.name: family for family in ControllerCollector(store, Figures(), families).collect()}
    store.close()
    jobs = {sample.labels["node"] for sample in page["expanse_job_cpu_seconds"].samples}
    assert jobs == {"slow", "here"}
    alive = {s.labels["node"]: s.value for s in page["expanse_node_up"].samples}
    assert alive == {"slow": 1, "here": 1, "gone": 0}
    ages = {s.labels["node"]: s.value for s in page["expanse_node_last_report_age_seconds"].samples}
    assert 6 <= ages["gone"] < 60
    skews = {s.labels["node"]: s.value for s in page["expanse_node_clock_skew_seconds"].samples}
    assert abs(skews["here"] - 604) < 1
