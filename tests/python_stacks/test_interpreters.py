"""The interpreters that the tests are given."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.python_stacks.interpreters import Interp, names

PROGRAM = """
import os, sys, threading
print(sys.version_info[1], __file__, threading.current_thread().name, os.path.dirname(__file__))
"""


def test_there_is_one_of_each_kind() -> None:
    known = names()
    assert {"3.13 debian", "3.14 debian", "3.15 debian", "free-threaded", "musl"} <= set(known)
    assert len(known) == len(set(known))


def test_an_interpreter_runs_files_and_texts(interp: Interp, tmp_path: Path) -> None:
    with interp.file(PROGRAM, tmp_path, "näme.py") as path:
        ran = subprocess.run([*interp.command, path], capture_output=True, text=True, check=True)
        minor, name, thread, folder = ran.stdout.split()
        outside = Path(f"{interp.root or ''}{name}")
        assert (int(minor), name, thread) == (interp.minor, path, "MainThread")
        assert outside.read_text(encoding="utf-8") == PROGRAM
    assert not interp.root or not Path(f"{interp.root}{folder}").exists()
    ran = subprocess.run(
        interp.run("import sys; print(sys.argv)", "a"), capture_output=True, text=True, check=True
    )
    assert ran.stdout == "['-c', 'a']\n"
