"""The report's page, as a browser shows it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench import page
from expanse_ebpf.bench.results import Results, Run
from expanse_ebpf.errors import UnavailableError
from tests.bench.records import complete, machine, results, run
from tests.export.browser import Browser, Page

Open = Callable[..., Page]
HOSTILE = {"py-spy": "<img src=x onerror=a(1)>", "traces": "<b>%{x}</b>&lt;@off"}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of results, which must not complain, nor ask for anything, until the end of the test."""
    pages: list[Page] = []

    def open_page(made: Results, **options: Any) -> Page:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(page.html(made), encoding="utf-8")
        pages.append(browser.page(file, **options))
        return pages[-1]

    yield open_page
    for each in pages:
        each.evaluate("1")
        assert each.complaints() == []
        assert {url.partition(":")[0] for url in each.requests()} <= {"file", "data"}
        each.close()


def points(shown: Page, plot: str) -> dict[str, int]:
    """How many points are drawn of each name in a plot's legend."""
    found: dict[str, int] = shown.evaluate(
        f"Object.fromEntries([...document.querySelectorAll('#{plot} .scatterlayer .trace')]"
        ".map((trace, i) => [i, trace.querySelectorAll('.point').length])"
        f".map(([i, points]) => [document.getElementById('{plot}').data[i].name, points]))"
    )
    return found


def test_plots_are_drawn_with_all_that_was_run(opened: Open) -> None:
    shown = opened(results())
    assert shown.evaluate("document.querySelectorAll('.plot .main-svg').length") >= 6
    assert points(shown, "intervals0") == {"Student's t": 3, "bootstrap": 3}
    assert points(shown, "times0") == {
        "off": 31,
        "collection": 10,
        "traces": 10,
        "py-spy": 10,
        "warm-up (does not count)": 6,
        "failed": 1,
    }
    assert shown.evaluate("document.querySelectorAll('#use0 .bars .point').length") >= 11
    assert shown.evaluate("document.getElementById('times0').data.at(-1).hovertext[0]") == (
        "run 8, pair 1<br>beside py-spy<br>1.500 s<br>failed: exit code 1: no such process"
    )
    assert "What watching costs on node7" in shown.text("h1")
    assert "29.7 % slower" in shown.text("section")
    assert shown.evaluate("document.querySelectorAll('section table').length") == 6


def test_hostile_names_do_nothing_but_appear(opened: Open) -> None:
    records = [
        replace(r, arm=HOSTILE[r.arm], workload="<i>loop</i>", failed=r.failed and "<b>{{data}}</b>")
        for r in complete(5, ("loop",))
        if isinstance(r, Run) and r.arm in HOSTILE
    ]
    shown = opened(results([machine(host="</title><script>alert(2)</script>"), *records]))
    assert shown.evaluate("document.querySelectorAll('img, h1 *, h2 *, li *, td *').length") == 0
    assert shown.evaluate("document.querySelectorAll('svg a, svg image').length") == 0
    texts = "[...document.querySelectorAll('{}')].map(each => each.textContent)"
    assert sorted(shown.evaluate(texts.format("#intervals0 .ytick text"))) == sorted(HOSTILE.values())
    assert set(HOSTILE.values()) < set(shown.evaluate(texts.format("#times0 .legendtext")))
    assert shown.evaluate("document.querySelectorAll('#times0 .legendtext *, .ytick text *').length") == 0
    assert shown.text("h2") == "<i>loop</i>"
    assert "<b>{{data}}</b>" in shown.text("section")


def test_the_policy_lets_no_other_script_run_and_no_request_out(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "0.html"
    file.write_text(page.html(results()).replace("<h1>", "<script>window.harmed = 1</script><h1>"), "utf-8")
    shown = browser.page(file)
    fetched = shown.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert (shown.evaluate("window.harmed"), fetched) == (None, "refused")
    assert points(shown, "intervals1")["bootstrap"] == 3
    shown.close()


def test_labels_follow_a_change_to_dark(opened: Open) -> None:
    shown = opened(results())
    colour = "getComputedStyle(document.querySelector('#times0 .ytick text')).fill"
    assert shown.evaluate(colour) == "rgb(20, 24, 29)"
    shown.prefer("dark")
    assert shown.evaluate(colour) == "rgb(232, 236, 240)"


def test_it_fits_a_narrow_window(opened: Open) -> None:
    shown = opened(results(), size=(340, 700))
    assert shown.evaluate("document.documentElement.scrollWidth") <= 340


def test_results_without_a_pair_have_a_page(opened: Open) -> None:
    shown = opened(results([run("loop", "near", "warm_up", 0, None, failed="no luck")]))
    assert "no interval" in shown.text("section")
    assert "no luck" in shown.text("section")
    opened(results([]))


def test_a_large_bench_is_drawn_whole(opened: Open) -> None:
    shown = opened(results(complete(40, (f"w{number}" for number in range(7)))))
    assert points(shown, "times6")["traces"] == 40


def test_without_plotly_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UnavailableError, match=r"pip install 'expanse-ebpf\[bench\]'"):
        page.html(results())
