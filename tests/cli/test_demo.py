"""`expanse-ebpf demo`."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.cli import demo


@pytest.fixture
def running() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "expanse_ebpf", "demo", "--seconds", "10"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            process.communicate(timeout=90)  # it ends by itself, and what it has started with it


@pytest.mark.slow
def test_the_line_for_another_terminal_makes_a_flame_graph_of_the_job(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert running.stdout is not None
    lines = iter(running.stdout.readline, "")
    said = next(line for line in lines if line.startswith("the agent's socket is "))
    socket = said.removeprefix("the agent's socket is ").partition(";")[0]
    assert Path(socket).is_socket()
    command = shlex.split(next(lines))
    assert command[command.index("--socket") + 1] == socket
    done = subprocess.run(
        [*command, "--duration", "2"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "demo_training.py" in (tmp_path / "demo.html").read_text()
    assert "demo over: " in running.communicate(timeout=90)[0]


@pytest.mark.parametrize(
    ("program", "on_the_path", "name"),
    [
        ("/opt/x y/bin/expanse-ebpf", False, "'/opt/x y/bin/expanse-ebpf'"),
        ("/usr/bin/expanse-ebpf", True, "expanse-ebpf"),
        ("/opt/expanse_ebpf/__main__.py", True, shlex.join([sys.executable, "-m", "expanse_ebpf"])),
    ],
)
def test_the_command_is_one_that_can_be_typed(
    program: str, on_the_path: bool, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(demo.shutil, "which", lambda found: found if on_the_path else None)
    assert demo._my_name() == name
