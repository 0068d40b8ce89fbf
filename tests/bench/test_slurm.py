"""bench/slurm/bench.sbatch in a real SLURM on this machine. systemd is a stand-in, and mostly the kit too."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.bench.cluster import until
from tests.bench.slurm import Slurm, slurm

SCRIPT = Path(__file__).resolve().parents[2] / "bench/slurm/bench.sbatch"
UNIT = "expanse-ebpf.service"
# Says what it is told and whether the collector is active; waits while there is a file "hold".
KIT = """#!/bin/bash
echo "kit: $*"
echo "collector: $(systemctl is-active UNIT)"
[[ ! -e hold || -e deaf ]] || trap 'echo "kit: ended early"; exit 130' TERM
[[ ! -e deaf ]] || trap '' TERM
mkdir -p results && touch results/runs.jsonl
touch begun
while [[ -e hold ]]; do sleep 0.05; done
echo "kit: the report"
exit "$(cat code)"
"""
# The units that are active are files in a folder.
SYSTEMCTL = """#!/bin/bash
unit=${@: -1}
echo "$*" >>called
[[ $2 != --quiet ]] || exec >/dev/null
case $1 in
	is-active) [[ -e active/$unit ]] && echo active || { echo inactive; exit 3; } ;;
	stop) rm "active/$unit" ;;
	start) touch "active/$unit" ;;
esac
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Generator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as one:
        yield one


class Job:
    """The script in a folder of its own, with stand-ins first on its PATH."""

    def __init__(self, cluster: Slurm, folder: Path) -> None:
        self.cluster, self.folder, self.number = cluster, folder, ""
        for name, text in {"expanse-ebpf": KIT.replace("UNIT", UNIT), "systemctl": SYSTEMCTL}.items():
            (folder / "bin").mkdir(exist_ok=True)
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        (folder / "active").mkdir()
        (folder / "active" / UNIT).touch()
        (folder / "code").write_text("0")

    def submit(self, *arguments: str, options: tuple[str, ...] = (), stop: str = UNIT) -> None:
        path = f"{self.folder}/bin:{self.cluster.environment['PATH']}"
        variables = {"PATH": path, "EXPANSE_BENCH_STOP": stop}
        command = ("sbatch", "--parsable", *options, str(SCRIPT), *arguments)
        self.number = self.cluster.call(*command, cwd=self.folder, **variables).strip()

    def ended(self) -> tuple[str, str]:
        return self.cluster.ended(self.number)

    def begun(self) -> None:
        until("the kit runs", (self.folder / "begun").exists)

    @property
    def said(self) -> list[str]:
        return (self.folder / f"expanse-ebpf-bench-{self.number}.log").read_text().splitlines()

    @property
    def active(self) -> bool:
        return (self.folder / "active" / UNIT).exists()


@pytest.fixture
def job(cluster: Slurm, tmp_path: Path) -> Generator[Job]:
    one = Job(cluster, tmp_path)
    yield one
    for name in ("hold", "deaf"):
        (tmp_path / name).unlink(missing_ok=True)
    if one.number:
        one.ended()


def test_the_collector_is_away_meanwhile_and_back_afterwards(job: Job) -> None:
    job.submit("plan.toml", "results")
    assert job.ended() == ("COMPLETED", "0:0"), job.said
    assert job.said == [
        f"stopped: {UNIT}",
        "kit: bench run plan.toml -o results",
        "collector: inactive",
        "kit: the report",
        f"started again: {UNIT}",
    ]
    assert job.active


def test_it_has_the_node_to_itself(cluster: Slurm, job: Job) -> None:
    (job.folder / "hold").touch()
    job.submit("plan.toml", "results")
    job.begun()
    shown = cluster.job(job.number)
    assert (shown["NumNodes"], shown["OverSubscribe"]) == ("1", "NO")
    assert shown["NumCPUs"] == str(os.cpu_count())


def test_a_bench_in_the_folder_is_gone_on_with(job: Job) -> None:
    (job.folder / "results").mkdir()
    (job.folder / "results/runs.jsonl").touch()
    job.submit("plan.toml", "results")
    job.ended()
    assert "kit: bench run plan.toml -o results --resume" in job.said


def test_a_folder_is_named_after_the_job(job: Job) -> None:
    job.submit("plan.toml")
    job.ended()
    assert f"kit: bench run plan.toml -o expanse-ebpf-bench-{job.number}" in job.said


def test_a_unit_that_was_not_active_stays_so(job: Job) -> None:
    (job.folder / "active" / UNIT).unlink()
    job.submit("plan.toml", "results")
    assert job.ended() == ("COMPLETED", "0:0")
    assert not job.active
    assert f"not active: {UNIT}" in job.said


def test_no_unit_is_touched_that_is_not_named(job: Job) -> None:
    job.submit("plan.toml", "results", stop="")
    assert job.ended() == ("COMPLETED", "0:0")
    assert job.active
    assert (job.folder / "called").read_text().splitlines() == [f"is-active {UNIT}"]  # the kit's stand-in
    assert "collector: active" in job.said


def test_a_kit_that_fails_fails_the_job(job: Job) -> None:
    (job.folder / "code").write_text("1")
    job.submit("plan.toml", "results")
    assert job.ended() == ("FAILED", "1:0")
    assert job.active


def test_a_unit_that_does_not_start_again_fails_the_job(job: Job) -> None:
    systemctl = job.folder / "bin/systemctl"
    systemctl.write_text(SYSTEMCTL.replace('touch "active/$unit"', "exit 1"))
    job.submit("plan.toml", "results")
    assert job.ended() == ("FAILED", "1:0")
    assert f"error: {UNIT} does not start" in job.said[-1]


@pytest.mark.parametrize(
    ("options", "state"),
    [([], "CANCELLED"), (["--signal=TERM", "--batch"], "FAILED")],
    ids=["every process is told", "only the script is told"],
)
def test_scancel_ends_the_kit_and_starts_the_collector(
    options: list[str], state: str, cluster: Slurm, job: Job
) -> None:
    (job.folder / "hold").touch()
    job.submit("plan.toml", "results")
    job.begun()
    assert not job.active
    cluster.call("scancel", *options, job.number)
    assert job.ended()[0] == state
    assert job.active
    assert job.said[-2:] == ["kit: ended early", f"started again: {UNIT}"]


@pytest.mark.slow
def test_a_kit_that_does_not_end_is_killed_in_time(cluster: Slurm, job: Job) -> None:
    (job.folder / "hold").touch()
    (job.folder / "deaf").touch()
    job.submit("plan.toml", "results")
    job.begun()
    cluster.call("scancel", job.number)
    assert job.ended()[0] == "CANCELLED"
    assert job.active
    assert job.said[-1] == f"started again: {UNIT}"


@pytest.mark.slow
def test_the_limit_of_time_ends_the_kit_and_starts_the_collector(job: Job) -> None:
    (job.folder / "hold").touch()
    job.submit("plan.toml", "results", options=("--time=1",))
    assert job.ended() == ("FAILED", "143:0")  # before SLURM has ended it, which is a TIMEOUT
    assert job.active
    assert job.said[-2:] == ["kit: ended early", f"started again: {UNIT}"]


@pytest.mark.parametrize(
    ("arguments", "variables", "user", "says"),
    [
        ([], {"SLURM_JOB_ID": "1"}, 0, "the plan is missing"),
        (["plan.toml"], {}, 0, "this is for sbatch"),
        (["plan.toml"], {"SLURM_JOB_ID": "1"}, 65534, "submit this as root"),
        (["plan.toml"], {"SLURM_JOB_ID": "1", "PATH": "/nowhere"}, 0, "no expanse-ebpf on the PATH"),
    ],
)
def test_it_says_what_it_needs(
    arguments: list[str], variables: dict[str, str], user: int, says: str, tmp_path: Path
) -> None:
    command = ["/bin/bash", "-s", "--", *arguments]
    environment = {"PATH": os.environ["PATH"], "EXPANSE_BENCH_STOP": UNIT} | variables
    with open(SCRIPT, "rb") as script:
        done = subprocess.run(
            command,
            stdin=script,
            env=environment,
            user=user,
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""


PLAN = f"""
name = "tiny"
settle_s = 0.2
[stopping]
min_pairs = 5
max_pairs = 5
[workloads.nothing]
kind = "command"
command = ["{sys.executable}", "-c", "sum(range(10_000_000))"]
[arms.collection]
kind = "collection"
"""


@pytest.mark.slow
def test_the_real_kit_runs_in_it(job: Job) -> None:
    (job.folder / "plan.toml").write_text(PLAN)
    (job.folder / "bin/expanse-ebpf").unlink()
    (job.folder / "bin/expanse-ebpf").symlink_to(Path(sys.executable).with_name("expanse-ebpf"))
    job.submit("plan.toml", "results")
    assert job.ended() == ("COMPLETED", "0:0"), job.said
    report = subprocess.run(
        [job.folder / "bin/expanse-ebpf", "bench", "report", job.folder / "results"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert ", 5 pairs" in report
    assert set(report.splitlines()) <= set(job.said)
    assert job.active
