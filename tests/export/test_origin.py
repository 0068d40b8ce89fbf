"""Whose code a frame is, and which frame a wait is charged to."""

from __future__ import annotations

import queue
import sysconfig
import threading
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.export import origin
from expanse_ebpf.export.origin import Origin, Origins


class Frame(NamedTuple):
    name: str
    file: str


@pytest.mark.parametrize(
    ("file", "whose"),
    [
        (threading.__file__, Origin.STANDARD),
        (queue.__file__, Origin.STANDARD),
        (f"{sysconfig.get_path('stdlib')}/concurrent/futures/thread.py", Origin.STANDARD),
        ("/opt/conda/lib/python3.13t/asyncio/base_events.py", Origin.STANDARD),
        ("/usr/lib64/python3.9/selectors.py", Origin.STANDARD),
        ("/app/lib/python311.zip/threading.py", Origin.STANDARD),
        ("<frozen importlib._bootstrap>", Origin.STANDARD),
        (pytest.__file__, Origin.LIBRARY),
        ("/usr/lib/python3/dist-packages/numpy/core.py", Origin.LIBRARY),
        ("/srv/train.py", Origin.PROGRAM),
        ("train.py", Origin.PROGRAM),
        ("<string>", Origin.PROGRAM),
        ("/home/ada/python3.11/train.py", Origin.PROGRAM),
        ("/srv/queue.py", Origin.PROGRAM),
        ("/srv/threading.py", Origin.PROGRAM),
        ("", Origin.NONE),
    ],
)
def test_whose_a_file_is(file: str, whose: Origin) -> None:
    assert Origins().of(file) is whose


def test_a_wait_is_charged_to_the_innermost_frame_of_the_program() -> None:
    standard, library = Frame("wait", threading.__file__), Frame("next", pytest.__file__)
    own, outer = Frame("step", "/srv/train.py"), Frame("main", "/srv/train.py")
    cut = Frame("[truncated]", "")
    assert Origins().charged([standard, library, own, outer, cut]) == 2
    assert Origins().charged([own, standard, outer]) == 0
    assert Origins().charged([standard, library, standard, library]) == 1
    assert Origins().charged([standard, standard, cut]) == 0


def test_the_command_line_of_a_process_of_multiprocessing_is_not_the_programs() -> None:
    line, own = Frame("<module>", "<string>"), Frame("work", "/srv/train.py")
    start = Frame("spawn_main", f"{sysconfig.get_path('stdlib')}/multiprocessing/spawn.py")
    wait = Frame("wait", threading.__file__)
    assert Origins().charged([wait, start, line]) == 0
    assert Origins().charged([wait, own, start, line]) == 1
    assert Origins().charged([wait, line]) == 1
    assert Origins().charged([line]) == 0


@pytest.mark.parametrize("bootstrap", ["Thread._bootstrap", "_bootstrap"])
def test_where_an_interpreter_lies_that_was_not_installed_is_learnt(bootstrap: str) -> None:
    origins = Origins()
    place = "/home/ada/src/cpython/Lib"
    wait, run = Frame("wait", f"{place}/threading.py"), Frame("run", "/srv/train.py")
    assert origins.charged([wait, run]) == 0
    assert origins.charged([wait, run, Frame(bootstrap, f"{place}/threading.py")]) == 1
    assert origins.charged([wait, run]) == 1
    assert origins.of(f"{place}/json/decoder.py") is Origin.STANDARD
    assert origins.of(f"{place}rary/x.py") is Origin.PROGRAM
    # A program that calls a file like that does not make itself a library.
    assert origins.charged([Frame("f", "/srv/a.py"), Frame("main", "/srv/threading.py")]) == 0
    assert origins.of("/srv/a.py") is Origin.PROGRAM


@given(st.lists(st.tuples(st.text(max_size=9), st.text(max_size=30)), min_size=1, max_size=9))
def test_any_names_have_a_place_and_little_is_kept(frames: list[tuple[str, str]]) -> None:
    origins = Origins()
    for number in range(2 * origin._MOST_FILES):
        root = Frame("_bootstrap", f"/{number}/threading.py")
        origins.charged([Frame("f", f"/srv/{number}.py"), root])
    assert 0 <= origins.charged([Frame(*frame) for frame in frames]) < len(frames)
    assert len(origins._known) <= origin._MOST_FILES
    assert len(origins._roots) <= origin._MOST_ROOTS
