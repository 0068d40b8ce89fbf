"""`expanse-ebpf bench run` and `report`, whole: a real collector beside real jobs."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.bench import plan, sending
from expanse_ebpf.bench.results import Results, Run
from expanse_ebpf.bench.run import collectors
from tests.bench.test_sending import own_names

ME = [sys.executable, "-m", "expanse_ebpf", "bench"]
SECRET = "of-one-customer"
PLAN = f"""
settle_s = 0.1
[stopping]
min_pairs = 5
max_pairs = 5
[workloads.{SECRET}]
kind = "command"
command = ["{sys.executable}", "-c", "import time; time.sleep(0.7); print('took', 0.7 + time.time() % 1e-3)"]
time_pattern = '^took (\\S+)$'
[arms.near]
kind = "collection"
"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.geteuid() != 0, reason="a bench needs root")]


def bench(*arguments: object, check: bool = True) -> subprocess.CompletedProcess[str]:
    command = [*ME, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=check, timeout=100)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a whole bench."""
    made: Path = tmp_path_factory.mktemp("bench")
    (made / "plan.toml").write_text(PLAN)
    done = bench("run", made / "plan.toml", "-o", made / "out", "--seed", 3)
    assert f"{SECRET} beside near" in done.stderr
    assert "5 pairs" in done.stdout
    assert collectors() == []
    return made


def told(folder: Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(bench("report", folder / "out", "--json").stdout)
    return answer


def test_what_was_measured_is_told_from_the_records(folder: Path) -> None:
    report = told(folder)
    (cell,) = report["cells"]
    assert (cell["workload"], cell["arm"], cell["pairs"]) == (SECRET, "near", 5)
    assert report["sessions"][0]["seed"] == 3
    assert abs(cell["percent"]) < 1  # what is printed is not what the machine makes of it
    runs = list(Results.read(folder / "out").runs)
    assert all(run.seconds is not None and 0.7 <= run.seconds < 0.702 for run in runs)
    assert all(run.samples is not None and run.collector is not None for run in runs if run.watched)
    assert not any(run.collector for run in runs if not run.watched)


def test_one_that_is_done_is_not_run_again(folder: Path) -> None:
    before = list(Results.read(folder / "out").runs)
    done = bench("run", folder / "plan.toml", "-o", folder / "out", "--resume", "--json")
    assert list(Results.read(folder / "out").runs) == before
    assert json.loads(done.stdout)["cells"] == told(folder)["cells"]


def test_a_page_is_written_that_needs_nothing_else(folder: Path) -> None:
    bench("report", folder / "out", "--html", folder / "page.html")
    page = (folder / "page.html").read_text()
    assert SECRET in page
    assert "Plotly" in page


def test_nothing_in_what_would_be_sent_tells_whose_it_is(folder: Path) -> None:
    out = folder / "out"
    body = sending.document(Results.read(out), plan.load(out / "plan.toml")).decode()
    assert '"seconds"' in body
    assert [name for name in {*own_names(), SECRET, "customer"} if name in body] == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["Ctrl-C", "a terminal that goes"])
def test_an_early_end_keeps_what_is_done_and_leaves_nothing_running(
    number: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "plan.toml").write_text(PLAN)
    command = [*ME, "run", str(tmp_path / "plan.toml"), "-o", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "(pair 2)" in line:
                break
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"\b[2-8] in pairs that count", output)
    assert "--resume" in errors
    assert collectors() == []
    assert not list(Path("/sys/fs/cgroup").glob("*/expanse-run-bench-*"))
    assert "ended early" not in bench("report", tmp_path / "out").stderr
    assert 4 <= len([run for run in Results.read(tmp_path / "out").runs if isinstance(run, Run)]) < 13
    bench("run", tmp_path / "plan.toml", "-o", tmp_path / "out", "--resume")
    assert len(Results.read(tmp_path / "out").pairs(SECRET, "near")) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "none.toml"), "none.toml: "),
        (("run", "plan.toml", "--resume"), "--resume needs -o DIR"),
        (("report", "nothing"), "no bench was run here"),
        (("report", "nothing", "--json", "--markdown"), "two forms of the same"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = bench(*arguments, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
