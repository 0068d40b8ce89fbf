"""From a plan's workload to a command, and to the time of a run."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench import workload
from expanse_ebpf.bench.plan import Workload
from expanse_ebpf.errors import UnavailableError

OWN = Workload("own", "command", command=("/bin/true", "--fast"))


def test_a_command_is_run_as_it_stands() -> None:
    assert workload.command(OWN) == ["/bin/true", "--fast"]


@pytest.mark.parametrize(
    ("made", "options"),
    [
        (Workload("w", "switches"), []),
        (Workload("w", "switches", cpus=2, steps=9), ["--cpus", "2", "--steps", "9"]),
        (Workload("w", "data_loader", steps=9, batch=4), ["--steps", "9", "--batch", "4"]),
        (Workload("w", "resnet50"), ["--device", "cpu"]),
        (
            Workload("w", "resnet50", device="cuda", images="/i", cpus=3),
            ["--cpus", "3", "--device", "cuda", "--images", "/i"],
        ),
        (
            Workload("w", "launches", steps=5, library="/l.so", rate_hz=7),
            ["--steps", "5", "--rate-hz", "7", "--library", "/l.so"],
        ),
    ],
)
def test_a_script_gets_what_the_plan_says(made: Workload, options: list[str]) -> None:
    python, script, *rest = workload.command(made)
    assert python == sys.executable
    assert Path(script).name == f"{made.kind}.py"
    assert Path(script).is_file()
    assert rest == options


def test_it_runs_under_the_python_that_the_plan_names() -> None:
    assert workload.command(Workload("w", "switches", python="/opt/python"))[0] == "/opt/python"


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Workload("w", "command", command=("/no/such",)), "/no/such is no program"),
        (Workload("w", "command", command=("/etc/passwd",)), "/etc/passwd is no program"),
        (Workload("w", "switches", python="/no/python"), "/no/python is no program"),
        (Workload("w", "resnet50", images="/no/images"), "w.images: /no/images is no folder"),
        (Workload("w", "resnet50"), "No module named 'torch'; install torch and torchvision"),
        (Workload("w", "launches", library="/no/libcuda.so"), "/no/libcuda.so.*install NVIDIA's driver"),
    ],
)
def test_what_is_missing_is_told_with_the_remedy(made: Workload, message: str) -> None:
    with pytest.raises(UnavailableError, match=message) as raised:
        workload.check(made)
    assert str(raised.value).startswith("workloads.w")


def test_what_can_run_is_not_refused(tmp_path: Path) -> None:
    workload.check(OWN)
    workload.check(Workload("w", "switches"))
    workload.check(Workload("w", "launches", library="libc.so.6"))
    assert not workload._has_classes(str(tmp_path))
    (tmp_path / "dog").mkdir()
    assert workload._has_classes(str(tmp_path))


@pytest.mark.parametrize(
    ("fields", "output", "seconds"),
    [
        ({}, "took 3 s", 9.5),
        ({"time_pattern": r"took (\S+) s"}, "took 3 s", 3.0),
        ({"time_pattern": r"took (\S+) s"}, "took 3 s\ntook 4.5 s\nbye", 4.5),
        ({"time_pattern": r"^(\d+)$"}, "x 1\n2\n3 x", 2.0),
        ({"kind": "switches", "command": ()}, "together 1.000000\nseconds 2.500000\n", 2.5),
    ],
)
def test_the_time_is_the_last_that_is_told_or_that_of_the_exit(
    fields: dict[str, Any], output: str, seconds: float
) -> None:
    made = Workload(**{"name": "own", "kind": "command", "command": ("x",), **fields})
    assert workload.seconds(made, output, 9.5) == seconds


@pytest.mark.parametrize(
    ("pattern", "output", "message"),
    [
        (r"took (\S+) s", "took", r"nothing in its output matches 'took (\S+) s'"),
        (r"took (\S+) s", "took long s", "'long' in its output is no time"),
        (r"took (\S+) s", "took nan s", "'nan' in its output is no time"),
        (r"took (\S+) s", "took 0 s", "'0' in its output is no time"),
        (r"took (\S+) s", "took -1 s", "'-1' in its output is no time"),
        (r"took( \S+)?", "took", "'None' in its output is no time"),
    ],
)
def test_what_is_no_time_is_refused(pattern: str, output: str, message: str) -> None:
    made = Workload("own", "command", command=("x",), time_pattern=pattern)
    with pytest.raises(ValueError, match=re.escape(message)):
        workload.seconds(made, output, 9.5)
