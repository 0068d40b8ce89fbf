"""The flame graph as a file, and as a browser shows it."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from expanse_ebpf.export.flamegraph import flamegraph
from expanse_ebpf.wire.profile_pb2 import Profile
from tests.export.browser import Browser, Page, contrast
from tests.export.profiles import (
    BEGIN,
    HOSTILE,
    PERIOD,
    SECOND,
    builder,
    hostile,
    known,
    of,
    profiles,
    unhurried,
)

Open = Callable[..., Page]
BY_FUNCTION = "#processes=0"  # else a profile of several processes has a frame for each


# ---- The file


class Parts(HTMLParser):
    """The elements of a page, and what stands in its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, dict[str, str | None]] = {}
        self._inside = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._inside = f"{tag}#{dict(attrs)['id']}" if "id" in dict(attrs) else tag
        self.attributes[self._inside] = dict(attrs)

    def handle_data(self, data: str) -> None:
        self.texts[self._inside] = self.texts.get(self._inside, "") + data


def facts(profile: Profile) -> list[str]:
    return Parts(flamegraph(profile, "x")).texts["p"].strip().split(" · ")


def test_the_page_says_what_was_watched_when_and_what_is_missing() -> None:
    page = Parts(flamegraph(known(), "train <1>"))
    assert page.texts["h1"].strip() == "train <1>"
    assert page.texts["title"].strip() == "train <1>"
    assert facts(known()) == [
        "job slurm/123",
        "user anna",
        "Python 3.11",
        "2025-11-30 14:00:00 to 14:00:10 UTC (10 s)",
        "149 samples at 100 Hz",
        "without a stack: 9 (6.04% of all): native thread 6, lost 3",
    ]


@pytest.mark.parametrize(
    ("begin", "duration", "words"),
    [
        (BEGIN, 3600 * SECOND, "2025-11-30 14:00:00 to 15:00:00 UTC (60 min)"),
        (BEGIN, 86400 * SECOND, "2025-11-30 14:00:00 to 2025-12-01 14:00:00 UTC (24 h)"),
        (0, 10 * SECOND, "10 s"),
    ],
)
def test_times(begin: int, duration: int, words: str) -> None:
    assert facts(builder(begin, duration).build()) == [words, "0 samples at 100 Hz"]
    assert facts(builder(0, 0).build()) == ["0 samples at 100 Hz"]


def test_many_origins_are_shortened() -> None:
    profile = of((("f", 10 - number) for number in range(5)), lambda number: {"node": f"n{number}"})
    assert "node n0, n1, n2 and 2 more" in facts(profile)


def test_the_page_needs_nothing_from_elsewhere() -> None:
    text = flamegraph(known(), "x")
    assert not re.search(r"https?:|@import|url\(|src=|{{", text)


@unhurried
@given(profiles())
def test_no_name_gets_out_of_its_place(profile: Profile) -> None:
    title = "</title><script>{{data}}{{facts}}</script>"
    plain, page = Parts(flamegraph(builder().build(), "x")), Parts(flamegraph(profile, title))
    assert page.tags == plain.tags
    assert page.texts["title"].strip().startswith(title)
    assert page.texts["script"] == plain.texts["script"]
    # The policy names the digests of script and style, which do not depend on the profile.
    assert page.attributes["meta"] == plain.attributes["meta"]
    data = json.loads(page.texts["script#data"])
    for place in range(3):
        assert sum(data["stacks"][place + 1 :: 6]) == sum(sample.value[place] for sample in profile.sample)


# ---- In a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens a profile's page, which must not complain until the end of the test."""
    pages: list[Page] = []

    def open_page(profile: Profile, title: str = "x", fragment: str = BY_FUNCTION, **options: Any) -> Page:
        file = tmp_path / f"{len(pages)}.html"
        file.write_text(flamegraph(profile, title), encoding="utf-8")
        pages.append(browser.page(file, fragment=fragment, **options))
        return pages[-1]

    yield open_page
    for page in pages:
        page.evaluate("1")
        assert page.complaints() == []
        assert {url.partition(":")[0] for url in page.requests()} <= {"file", "data"}
        page.close()


def shown(page: Page) -> list[dict[str, float]]:
    """For each row what is drawn there, from left to right: name and share of the width."""
    rows = page.evaluate("drawn.map(row => row.map(([l, w, n]) => [nameOf(n), w / scroller.clientWidth]))")
    return [{name: round(width, 4) for name, width in row} for row in rows]


def path(page: Page) -> list[str]:
    """The frames that lead to the one that is zoomed in on."""
    return [name.strip() for name in page.text("nav").split("\u203a")]


def place(page: Page, name: str) -> tuple[float, float]:
    """Where the middle of a frame is on the screen."""
    x, y = page.evaluate(
        f"drawn.flat().filter(d => nameOf(d[2]) === {json.dumps(name)}).map(([l, w, n]) =>"
        " [canvas.getBoundingClientRect().x + l + w / 2,"
        "  canvas.getBoundingClientRect().y + (tree.depth[n] + 0.5) * ROW - scroller.scrollTop])[0]"
    )
    return x, y


def test_widths_are_shares_of_the_time_on_cpus(opened: Open) -> None:
    page = opened(known(), "train on n1")
    share = {name: round(count / 109, 4) for name, count in (("fast", 50), ("mid", 30), ("slow", 20))}
    assert shown(page) == [
        {"all": 1.0},
        {"<module>": round(100 / 109, 4), "[native thread]": round(6 / 109, 4), "[lost]": round(3 / 109, 4)},
        {"main": round(100 / 109, 4)},
        share,
    ]
    assert page.text("h1") == "train on n1"
    assert "On CPU 1.09 s" in page.text("form")
    assert "Waiting 10 s" in page.text("form")


def test_a_switch_shows_waiting_or_both(opened: Open) -> None:
    page = opened(known())
    page.click_on("fieldset label", "Waiting")
    assert shown(page)[2:] == [{"main": 1.0}, {"_next_data": 1.0}, {"wait": 1.0}]
    page.click_on("fieldset label", "Both")
    assert shown(page)[1]["[lost]"] == round(0.03 / 11.09, 4)
    assert "on CPU" in page.text("#legend")
    page.click_on("fieldset label", "On CPU")
    assert "wait" not in str(shown(page))


def test_a_profile_of_waiting_alone_opens_there(opened: Open) -> None:
    made = builder()
    made.add([("wait", "/x.py", 1, 1)], (4, 0, SECOND), {})
    assert shown(opened(made.build())) == [{"all": 1.0}, {"wait": 1.0}]


def test_a_click_zooms_and_escape_shows_everything_again(opened: Open) -> None:
    page = opened(known())
    assert path(page) == ["all"]
    page.click(*place(page, "fast"))
    assert shown(page) == [{"all": 1.0}, {"<module>": 1.0}, {"main": 1.0}, {"fast": 1.0}]
    assert path(page) == ["all", "<module>", "main", "fast"]
    page.click_on("nav button", "main")
    assert shown(page)[3] == {"fast": 0.5, "mid": 0.3, "slow": 0.2}
    page.click(*place(page, "<module>"))  # what lies above is still there to be clicked
    assert path(page) == ["all", "<module>"]
    page.press("Escape")
    assert path(page) == ["all"]
    assert len(shown(page)[1]) == 3


def test_a_zoom_lasts_while_another_value_is_chosen(opened: Open) -> None:
    page = opened(known())
    page.click(*place(page, "main"))
    page.click_on("fieldset label", "Waiting")
    assert shown(page) == [{"all": 1.0}, {"<module>": 1.0}, {"main": 1.0}, {"_next_data": 1.0}, {"wait": 1.0}]
    page.press("Escape")
    page.click_on("fieldset label", "On CPU")
    page.click(*place(page, "fast"))
    page.click_on("fieldset label", "Waiting")  # where fast does not occur
    assert path(page) == ["all", "<module>", "main"]


def test_a_search_says_how_much_it_found(opened: Open) -> None:
    page = opened(of([("main;work;loop", 60), ("main;other;work", 20), ("main;other", 20)]))
    page.press("/")
    page.type("WORK")
    assert page.text("#found") == "80.0 % of all"
    assert page.evaluate("drawn.flat().filter(d => matching[tree.key[d[2]]]).map(d => nameOf(d[2]))") == [
        "work",
        "work",
    ]
    page.click(*place(page, "other"))
    assert page.text("#found") == "80.0 % of all, 50.0 % of this frame"
    page.press("/")
    page.type("x/loop.py")  # files too; "/" selects what was there, so it is typed over
    assert page.text("#found") == "60.0 % of all, 0.0 % of this frame"
    page.press("Escape")
    assert page.text("#found") == ""
    assert page.evaluate("controls.search.value") == ""
    assert path(page) == ["all", "main", "other"]  # the zoom is still there
    page.press("Escape")
    assert path(page) == ["all"]


def test_frames_within_frames_count_once(opened: Open) -> None:
    page = opened(of([("F;F;F", 50), ("g;F", 25), ("g", 25)]), fragment="#search=f")
    assert page.text("#found") == "75.0 % of all"


def test_a_pointed_frame_is_described(opened: Open) -> None:
    page = opened(known())
    page.point(*place(page, "fast"))
    assert page.text("#tip").splitlines() == [
        "fast",
        "/home/anna/train.py · the program",
        "line 10: 60.0 %, line 11: 40.0 %",
        "500 ms · 45.9 % of all · 50.0 % of main",
        "on CPU 500 ms · waiting 0 s · 50 samples",
    ]
    page.point(*place(page, "[lost]"))
    assert page.text("#tip").splitlines()[:2] == ["[lost]", "no Python stack"]
    page.click_on("fieldset label", "Waiting")
    page.point(*place(page, "_next_data"))
    assert page.text("#tip").splitlines()[1].endswith("/torch/utils/data/dataloader.py · library")
    page.point(*place(page, "wait"))
    assert page.text("#tip").splitlines()[1] == "/usr/lib/python3.11/threading.py · standard library"
    page.point(500, 10)
    assert page.evaluate("element('tip').hidden")


def test_keys_move_and_zoom(opened: Open) -> None:
    page = opened(known())
    page.evaluate("canvas.focus()")
    page.press("ArrowDown", "ArrowDown", "ArrowDown", "ArrowDown", "ArrowRight")
    said = page.text("#said").split("; ")
    assert said[0] == "mid"
    assert "300 ms · 27.5 % of all · 30.0 % of main" in said
    page.press("ArrowRight", "ArrowRight")
    assert page.text("#said").startswith("slow;")
    page.press("ArrowUp")
    assert page.text("#said").startswith("main;")
    page.press("Enter")
    assert path(page)[-1] == "main"
    page.press("ArrowRight", "ArrowDown", "Enter", "ArrowUp", "ArrowUp", "ArrowDown")
    assert page.text("#said").startswith("main;")
    page.press("Escape")
    assert path(page) == ["all"]
    page.click(*place(page, "mid"))
    page.press("ArrowRight")  # what lies beside it is not on the screen
    assert page.text("#said").startswith("mid;")
    page.press("ArrowUp", "ArrowDown")
    assert page.text("#said").startswith("mid;")


def test_other_ways_to_look_at_a_profile(opened: Open) -> None:
    page = opened(known())
    page.click_on("label", "By line")
    labels = "drawn[3].map(d => frames[tree.key[d[2]]].short).sort()"
    assert page.evaluate(labels) == ["train.py:10", "train.py:11", "train.py:20", "train.py:30"]
    page.click_on("label", "By line")
    page.click_on("label", "Inverted")
    rows = shown(page)
    assert rows[1]["mid"] == round(30 / 109, 4)
    assert set(rows[2]) == {"main"}
    page.point(*place(page, "fast"))
    assert "line 10: 60.0 %, line 11: 40.0 %" in page.text("#tip")
    page.click_on("label", "By process")
    page.point(*place(page, "fast"))
    assert "line 10: 60.0 %, line 11: 40.0 %" in page.text("#tip")
    page.click_on("label", "Inverted")
    page.click_on("fieldset label", "Both")
    assert set(shown(page)[1]) == {
        "process 4242, Python 3.11",
        "process 4243, Python 3.11",
        "process not known",
    }
    page.point(*place(page, "wait"))
    assert "line 327: 100.0 %" in page.text("#tip")


def test_the_address_keeps_what_is_shown(opened: Open) -> None:
    page = opened(known())
    page.click_on("fieldset label", "Waiting")
    page.click_on("label", "By line")
    page.click(*place(page, "_next_data"))
    page.press("/")
    page.type("wait")
    fragment = page.evaluate("location.hash")
    again = opened(known(), fragment=fragment)
    assert shown(again) == shown(page)
    for selector in ("nav", "#found"):
        assert again.text(selector) == page.text(selector) != ""
    assert again.evaluate("[controls.value.value, controls.lines.checked, controls.search.value]") == [
        "waiting",
        True,
        "wait",
    ]
    nonsense = opened(known(), fragment="#value=x&zoom=1.a.99.-1.1e9&lines=2&search=%FF&processes=__proto__")
    assert len(shown(nonsense)) == 5


def test_hostile_names_do_nothing_but_appear(opened: Open) -> None:
    page = opened(hostile(), HOSTILE[0])
    page.click_on("fieldset label", "Waiting")
    for name in [row for row in shown(page)[2] if row]:
        page.click(*place(page, name))
        page.point(*place(page, name))
        assert page.evaluate("element('tip').querySelector('b').textContent") == name
        assert page.evaluate("element('tip').querySelectorAll(':not(b, div)').length") == 0
        page.press("Escape")
    assert len(shown(page)[2]) == len(HOSTILE)
    assert page.text("h1") == HOSTILE[0]
    assert page.evaluate("[window.harmed, document.querySelectorAll('img, h1 *, nav button *').length]") == [
        None,
        0,
    ]


def test_the_policy_lets_no_other_script_run_and_no_request_out(browser: Browser, tmp_path: Path) -> None:
    file = tmp_path / "0.html"
    text = flamegraph(known(), "x")
    file.write_text(text.replace("<header>", "<header><script>window.harmed = 1</script>"), encoding="utf-8")
    page = browser.page(file)
    fetched = page.evaluate("fetch('http://127.0.0.1:9/').then(() => 'sent', () => 'refused')")
    assert (page.evaluate("window.harmed"), fetched) == (None, "refused")
    assert len(shown(page)) == 5
    breaches = " ".join(c for c in page.complaints() if "Content Security Policy" in c)
    assert "script-src" in breaches
    assert "default-src" in breaches
    page.close()


@pytest.mark.parametrize("dark", [False, True])
def test_names_can_be_read_on_every_colour(opened: Open, dark: bool) -> None:
    page = opened(known(), dark=dark)
    colours = page.evaluate(
        "Object.keys(KINDS).flatMap(kind => Array.from({ length: 50 }, (_, i) => {"
        f"  context.fillStyle = colour(kind, i / 50, {str(dark).lower()}); return context.fillStyle; }}))"
    )
    texts = [(255, 255, 255), (0xD5, 0xDB, 0xE1)] if dark else [(0x14, 0x18, 0x1D), (0x3A, 0x42, 0x4B)]
    highlight = (0x7A, 0x2A, 0x8C) if dark else (0xF0, 0xB3, 0xFF)
    backgrounds = [struct.unpack("3B", bytes.fromhex(colour[1:])) for colour in colours]
    assert len(set(backgrounds)) > 60
    assert min(contrast(a, b) for a in texts for b in [*backgrounds, highlight]) >= 4.5
    # The rest of the page, as the browser computes it.
    pairs = page.evaluate(
        "[['h1', 'body'], ['.facts', 'body'], ['#found', 'body'], ['footer', 'footer'],"
        " ['fieldset label:has(:checked)', 'fieldset label:has(:checked)'],"
        " ['label:not(:has(:checked))', 'body']].map("
        "([text, ground]) => [getComputedStyle(document.querySelector(text)).color,"
        " getComputedStyle(document.querySelector(ground)).backgroundColor])"
    )
    for pair in pairs:
        text, ground = ([int(number) for number in re.findall(r"\d+", colour)] for colour in pair)
        assert contrast(text, ground) >= 4.5, pair


def test_the_page_follows_a_change_to_dark(opened: Open) -> None:
    page = opened(known())
    before = page.picture()
    page.prefer("dark")
    grey = page.evaluate("[...context.getImageData(200, 5, 1, 1).data]")
    assert grey == [77, 77, 77, 255]  # of what has no stack, 30 % of white
    assert page.picture() != before


@pytest.mark.parametrize("size", [(320, 568), (700, 400), (2560, 1440)])
def test_it_fits_narrow_and_wide_windows(opened: Open, size: tuple[int, int]) -> None:
    page = opened(known(), "a-title-without-any-blank" * 10)
    page.resize(*size)
    assert page.evaluate("document.documentElement.scrollWidth") <= size[0]
    assert page.evaluate("canvas.clientHeight") >= 100
    assert shown(page)[3]["fast"] == round(50 / 109, 4)
    page.point(*place(page, "[lost]"))  # at the right edge
    left, right = page.evaluate("(box => [box.left, box.right])(element('tip').getBoundingClientRect())")
    assert 0 <= left < right <= size[0]


def test_a_deep_stack_can_be_scrolled_to_its_end(opened: Open) -> None:
    page = opened(of([(";".join(f"f{number}" for number in range(129)), 1)]))
    assert page.evaluate("scroller.scrollHeight") >= 130 * 20
    page.evaluate("scroller.scrollTop = 1000")
    page.evaluate("select(60)")
    below = page.evaluate("element('tip').getBoundingClientRect().top - canvas.getBoundingClientRect().top")
    assert 60 * 20 - 1000 < below - 20 < 60 * 20 - 1000 + 30
    page.evaluate("select(129)")
    assert page.evaluate("scroller.scrollTop + scroller.clientHeight") >= 130 * 20
    page.point(*place(page, "f128"))
    assert page.text("#tip").splitlines()[0] == "f128"


def test_processes_are_apart_when_there_are_several(opened: Open) -> None:
    page = opened(known(), fragment="")
    assert set(shown(page)[1]) == {"process 4242, Python 3.11", "process not known"}
    assert page.evaluate("controls.processes.checked")
    assert page.text("#legend").splitlines()[-1] == "process"
    page.point(*place(page, "process 4242, Python 3.11"))
    assert page.text("#tip").splitlines()[1] == "process"
    page.click_on("label", "By process")
    assert page.evaluate("location.hash") == BY_FUNCTION
    assert "process" not in page.text("#legend")
    assert "main" in shown(opened(known(), fragment=BY_FUNCTION))[2]
    one = opened(of([("main;work", 5)], lambda _: {"pid": 7}), fragment="")
    assert "main" in shown(one)[1]
    assert not one.evaluate("controls.processes.checked")


def test_a_process_is_named_by_what_is_known_of_it() -> None:
    def names(*labels: dict[str, str | int]) -> list[str]:
        profile = of([(f"f{number}", 1) for number in range(len(labels))], lambda number: labels[number])
        found: list[str] = json.loads(Parts(flamegraph(profile, "x")).texts["script#data"])["processes"]
        return found

    reason: dict[str, str | int] = {"pid": 7, "unresolved": "starting"}
    assert names(reason, {"pid": 7, "python": "3.13t"}) == ["process 7, Python 3.13t"]
    assert names({"pid": 7}, {}, {"pid": "x"}, {"pid": 8}) == ["process 7", "process 8"]
    assert names({"pid": 7, "node": "a"}, {"pid": 7, "node": "b", "python": "3.8"}) == [
        "process 7 on a",
        "process 7 on b, Python 3.8",
    ]
    assert names({"pid": 7, "job": "slurm/1_0"}, {"pid": 7, "job": "slurm/1_1"}) == [
        "process 7 of slurm/1_0",
        "process 7 of slurm/1_1",
    ]


def test_the_title_says_on_which_node_it_was() -> None:
    def title(*nodes: str) -> str:
        profile = of([(node, 1) for node in nodes], lambda number: {"node": nodes[number]})
        return Parts(flamegraph(profile, "slurm/1")).texts["h1"].strip()

    assert title() == "slurm/1"
    assert title("gpu<1>") == "slurm/1 on gpu<1>"
    assert title("a", "b", "a") == "slurm/1 on 2 nodes"


def test_what_the_threads_had_to_do_with_the_lock_is_told(opened: Open) -> None:
    made = builder()
    counts = (("held", 6), ("waiting", 3), ("released", 1), ("", 10))
    for gil, count in counts:
        made.add([("f", "/x.py", 1, 1)], (count, count * PERIOD, SECOND), {"gil": gil})
    made.add([("g", "/x.py", 1, 1)], (20, 20 * PERIOD, 0), {"gil": "__proto__"})
    page = opened(made.build())
    page.point(*place(page, "f"))
    assert "GIL: held 30.0 %, waited for 15.0 %, released 5.0 %" in page.text("#tip").splitlines()
    page.point(*place(page, "all"))
    assert "GIL: held 15.0 %, waited for 7.5 %, released 2.5 %" in page.text("#tip").splitlines()
    page.point(*place(page, "g"))
    assert "GIL" not in page.text("#tip")
    page.click_on("fieldset label", "Waiting")
    page.point(*place(page, "f"))
    assert "GIL: held 25.0 %, waited for 25.0 %, released 25.0 %" in page.text("#tip").splitlines()


@pytest.mark.parametrize("dark", [False, True])
def test_a_stack_that_is_cut_is_not_shown_as_none(opened: Open, dark: bool) -> None:
    made = builder()
    made.add([("f", "/x.py", 1, 1), ("[truncated]", "", 0, 0)], (1, PERIOD, 0), {"truncated": 1})
    made.add([("[truncated]", "/x.py", 1, 1)], (1, PERIOD, 0), {})
    page = opened(made.build(), dark=dark)
    assert page.evaluate("frames.slice(0, 3).map(f => f.kind)") == ["cut", "own", "own"]
    assert page.evaluate(f"colour('cut', 0, {str(dark).lower()}) !== colour('none', 0, {str(dark).lower()})")
    assert "the stack is deeper" in page.text("#legend")
    assert "the stack is deeper" not in opened(known(), dark=dark).text("#legend")


def test_a_page_without_a_python_stack_says_why(opened: Open) -> None:
    made = builder()
    for reason, count in (("not_python", 9), ("starting", 2)):
        made.add([(f"[{reason}]", "", 0, 0)], (count, count * PERIOD, 0), {"unresolved": reason})
    said = "No Python stack could be read: not python 9, starting 2."
    assert opened(made.build()).text("#why") == said
    made.add([("f", "/x.py", 1, 1)], (1, PERIOD, 0), {})
    page = opened(made.build())
    assert page.text("#why") == ""
    assert page.evaluate("element('why').offsetHeight") == 0


def test_an_empty_profile_says_so(opened: Open) -> None:
    for fragment in ("", "#value=both&search=x"):
        page = opened(builder().build(), fragment=fragment)
        assert page.text("#why") == "There are no samples: nothing ran or waited in this time."
        assert shown(page) == [{"all": 1.0}]
        page.point(*place(page, "all"))
        assert page.text("#tip").splitlines()[1] == "0 s · 0.0 % of all"


def test_twenty_thousand_stacks_stay_usable(opened: Open) -> None:
    """What is drawn is bounded by the screen, and each stack is in it."""
    source = random.Random(1)
    made = builder()
    for _ in range(20_000):
        branches = [min(int(source.expovariate(0.7)), 9) for _ in range(25)]
        stack = [(f"f{depth}_{branch}", f"/x/{branch}.py", 1, 1) for depth, branch in enumerate(branches)]
        made.add(stack[::-1], (1, PERIOD, 0), {"pid": 1})
    page = opened(made.build(), size=(1400, 800))
    assert page.evaluate("[stacks.length > 15000, tree.samples[0], tree.parent.length > 50000]") == [
        True,
        20_000,
        True,
    ]
    assert page.evaluate("drawn.flat().length") < 30_000
    assert page.evaluate(
        "drawn.every(row => row.every(([left], i) => !i || left >= row[i - 1][0] + row[i - 1][1] - 1e-6))"
    )
    page.press("/")
    page.type("f3_0")
    found = float(page.text("#found").split()[0])
    assert 45 < found < 56  # 1 - exp(-0.7) is 50.3 %
    page.click(*place(page, "f0_1"))
    assert path(page) == ["all", "f0_1"]
