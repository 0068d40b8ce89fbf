"""The programs to be measured, run for real and small."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import expanse_ebpf.bench
from tests.bench.torch_python import torch_python
from tests.python_stacks.interpreters import interpreter, names
from tests.stand_ins.cuda import cuda_stand_in
from tests.stand_ins.real_nvml import MissingError

SCRIPTS = Path(expanse_ebpf.bench.__file__).with_name("workloads")
SMALL = {"switches": ["--steps", "400"], "data_loader": ["--steps", "4", "--batch", "2"]}
ENDLESS = {"switches": ["--steps", "1000000000"], "data_loader": ["--steps", "1000000"]}


def ran(script: str, *options: str, python: str | Path = sys.executable) -> list[str]:
    """The lines of a run that ended well."""
    command = [python, SCRIPTS / f"{script}.py", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def seconds(lines: list[str]) -> float:
    found = re.fullmatch(r"seconds (\d+\.\d{6})", lines[-1])
    assert found, lines
    return float(found[1])


@pytest.mark.parametrize("script", SMALL)
@pytest.mark.parametrize("cpus", [1, 2])
def test_the_last_line_is_what_the_loop_took(script: str, cpus: int) -> None:
    began = time.monotonic()
    taken = seconds(ran(script, *SMALL[script], "--cpus", str(cpus)))
    assert 0 < taken < time.monotonic() - began


@pytest.mark.parametrize("script", SMALL)
def test_more_work_takes_longer(script: str) -> None:
    many = [str(50 * int(option)) if option.isdigit() else option for option in SMALL[script][:2]]
    assert seconds(ran(script, *SMALL[script])) < seconds(ran(script, *many, *SMALL[script][2:]))


def test_the_work_is_the_same_each_time() -> None:
    losses = {ran("data_loader", *SMALL["data_loader"])[0] for _ in range(2)}
    assert len(losses) == 1
    assert losses != {ran("data_loader", "--steps", "5", "--batch", "2")[0]}


@pytest.mark.parametrize("script", ENDLESS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda n: n.name)
def test_none_of_its_processes_outlives_it(script: str, number: signal.Signals) -> None:
    command = [sys.executable, str(SCRIPTS / f"{script}.py"), *ENDLESS[script], "--cpus", "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            me = psutil.Process(process.pid)
            wanted = {"switches": 2, "data_loader": 1}[script]
            while len(children := me.children(recursive=True)) < wanted or not busy(children):
                assert process.poll() is None
                time.sleep(0.01)
            process.send_signal(number)
            assert process.wait(20) == (-number if number == signal.SIGKILL else 128 + number)
            _, alive = psutil.wait_procs(children, timeout=20)
            assert alive == []
        finally:
            process.kill()


def busy(processes: list[psutil.Process]) -> bool:
    """Whether each has got to work."""
    return all(sum(process.cpu_times()[:2]) >= 0.05 for process in processes)


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS.glob("[a-z]*.py")])
def test_each_says_what_it_does(script: str) -> None:
    said = "\n".join(ran(script, "--help"))
    assert "`seconds S`" in said
    assert "--steps" in said


@pytest.mark.parametrize("script", SMALL)
def test_an_old_python_runs_it_too(script: str) -> None:
    old = interpreter(names()[0])
    assert seconds(ran(script, *SMALL[script], python=old.command[0])) > 0


# ---- launches


def test_launches_are_as_many_as_were_asked_for() -> None:
    library = str(cuda_stand_in().driver)
    counted = (
        "import ctypes, runpy, sys\n"
        "script, library = sys.argv[1], sys.argv[-1]\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(script, run_name='__main__')\n"
        "print(ctypes.CDLL(library).stand_in_calls(b'cuLaunchKernel'))\n"
    )
    options = ["--steps", "250", "--rate-hz", "20000", "--library", library]
    command = [sys.executable, "-c", counted, str(SCRIPTS / "launches.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    *lines, calls = done.stdout.splitlines()
    assert seconds(lines) > 0
    assert int(calls) == 250 + 100  # the first hundred are not timed


def test_launches_without_a_driver_say_so() -> None:
    command = [sys.executable, str(SCRIPTS / "launches.py"), "--library", "/no/libcuda.so.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "launches: /no/libcuda.so.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_rate_decides_how_much_is_computed_between_launches() -> None:
    library = str(cuda_stand_in().driver)
    slow, fast = (
        seconds(ran("launches", "--steps", "300", "--rate-hz", rate, "--library", library))
        for rate in ("500", "100000")
    )
    assert slow > 5 * fast  # by what is asked for, 200 times


# ---- with PyTorch

PICTURES = """
import sys
from pathlib import Path
from PIL import Image
for name in ("cat", "dog"):
    folder = Path(sys.argv[1], name)
    folder.mkdir()
    for number in range(3):
        Image.new("RGB", (64, 48), (number, 90, 200)).save(folder / f"{number}.jpeg")
"""


@pytest.fixture(scope="module")
def torch() -> Path:
    try:
        return torch_python()
    except MissingError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@pytest.mark.timeout(2400)  # the first time, PyTorch is installed
@pytest.mark.parametrize("images", ["made up", "of a folder"])
def test_resnet50_trains(torch: Path, images: str, tmp_path: Path) -> None:
    options = ["--batch", "2", "--steps", "1", "--cpus", "2"]
    if images != "made up":
        subprocess.run([torch, "-c", PICTURES, tmp_path], check=True, timeout=60)
        options += ["--images", str(tmp_path)]
    lines = ran("resnet50", *options, python=torch)
    assert re.fullmatch(r"loss \d+\.\d{4}", lines[-2])
    assert seconds(lines) > 0
