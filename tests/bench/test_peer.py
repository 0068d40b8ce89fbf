"""Another program as an arm."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.bench import peer
from expanse_ebpf.bench.beside import Job, Seen
from expanse_ebpf.bench.plan import Arm
from expanse_ebpf.errors import UnavailableError
from tests.controller.process import eventually


@pytest.fixture
def job() -> Iterator[subprocess.Popen[bytes]]:
    """A Python program that works until it is told to end."""
    source = "import select\nwhile not select.select([0], [], [], 0)[0]: sum(range(10000))"
    process = subprocess.Popen([sys.executable, "-c", source], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.communicate()


def beside(command: list[str], folder: Path, job: subprocess.Popen[bytes], *, until: str = "") -> Seen:
    """What is seen of a program beside the job, which goes on until the program has made the file `until`."""
    with peer.running(Arm("peer", "command", command=tuple(command)), folder, closely=True) as running:
        running.begin()
        running.started(job.pid)
        (child,) = running.children
        if until:
            subprocess.run(
                ["timeout", "20", "sh", "-c", f"until [ -e {folder}/peer/{until} ]; do sleep 0.05; done"],
                check=True,
            )
        running.turn(0.5)
        running.end()
        seen = running.seen(Job("bench-1", 0, 1))
    assert not Path(f"/proc/{child.pid}").exists()
    return seen


def test_a_program_is_found_beside_python_and_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (
        peer.program(Path(sys.executable).name)
        == f"{Path(sys.executable).parent}/{Path(sys.executable).name}"
    )
    own = tmp_path / "a-profiler-of-ours"
    with pytest.raises(UnavailableError, match="a-profiler-of-ours: not found"):
        peer.program(own.name)
    own.touch(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert peer.program(own.name) == str(own)


def test_it_knows_the_jobs_process_and_an_empty_folder_and_is_ended_by_an_interrupt(
    tmp_path: Path, job: subprocess.Popen[bytes]
) -> None:
    said = tmp_path / "said"
    script = (
        "trap 'echo interrupted >>$1; exit 0' INT; ls {folder} >$1; echo pid {pid} >>$1; : >{folder}/there; "
        "while :; do sleep 0.05; done"
    )
    seen = beside(["sh", "-c", script, "sh", str(said)], tmp_path, job, until="there")
    assert said.read_text().split("\n") == [f"pid {job.pid}", "interrupted", ""]
    assert seen.failed == ""
    assert seen.missing == {}
    assert seen.collector is not None
    assert (seen.collector.sent_bytes, seen.controller, seen.samples) == (0, None, None)
    assert seen.collector.pss_peak_bytes
    assert seen.collector.cpu_s >= 0


def test_one_that_does_not_listen_is_killed_and_fails(
    tmp_path: Path, job: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer, "_STOP_S", 0.2)
    script = "trap '' INT; echo deaf; : >{folder}/there; while :; do sleep 0.05; done"
    seen = beside(["sh", "-c", script], tmp_path, job, until="there")
    assert seen.failed == "sh did not end within 0 s of SIGINT: deaf"


def test_one_that_ends_with_an_error_fails_with_its_last_line(
    tmp_path: Path, job: subprocess.Popen[bytes]
) -> None:
    with peer.running(
        Arm("peer", "command", command=("sh", "-c", "echo no; exit 3")), tmp_path, closely=False
    ) as it:
        it.started(job.pid)
        os.waitid(os.P_PID, it.children[0].pid, os.WEXITED | os.WNOWAIT)
        it.end()
        seen = it.seen(Job("bench-1", 0, 1))
    assert seen.failed == "sh failed: exit code 3: no"
    assert seen.missing.keys() == {"collector.pss_peak_bytes", "collector.sent_bytes"}


def test_what_it_has_started_ends_with_it(tmp_path: Path, job: subprocess.Popen[bytes]) -> None:
    script = "sleep 60 & echo $! >{folder}/new; mv {folder}/new {folder}/there; wait"
    beside(["sh", "-c", script], tmp_path, job, until="there")
    below = int((tmp_path / "peer" / "there").read_text())
    eventually(lambda: not Path(f"/proc/{below}/exe").exists())  # the kernel kills in its own time


@pytest.mark.parametrize(
    "command",
    [
        "py-spy record -r 49 -f raw -o {folder}/stacks --subprocesses --pid {pid}",
        "austin -C -i 20408 -o {folder}/stacks -p {pid}",
    ],
)
def test_profilers_look_at_the_job(tmp_path: Path, job: subprocess.Popen[bytes], command: str) -> None:
    arm = Arm("peer", "command", command=tuple(command.split()))
    with peer.running(arm, tmp_path, closely=True) as it:
        it.started(job.pid)
        eventually(lambda: it.children[0].output())  # it has found the process
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(1.5)
        it.turn(1.5)
        it.end()
        job.communicate(b"\n")
        seen = it.seen(Job("bench-1", 0, 1))
        assert "<module>" in (tmp_path / "peer" / "stacks").read_text(errors="replace")
    assert seen.failed == ""
    assert seen.collector is not None
    assert seen.collector.cpu_s > 0
