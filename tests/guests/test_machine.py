"""The guests themselves: what goes in, what comes out, and that nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.guests.conftest import Node
from tests.guests.machine import GuestError

Make = Callable[..., Node]


def test_a_command_runs_and_its_exit_code_output_and_files_come_back(guest: Make, tmp_path: Path) -> None:
    brought = tmp_path / "an odd name"
    brought.write_text("brought along")
    script = (
        'echo "to $1"; echo oops >&2; cp "/payload/files/an odd name" /out/; mkdir /out/d; '
        "uname -rm >/out/d/k; exit 7"
    )
    node = guest(kernel="6.1")
    result = node.run(["bash", "-c", script, "-", "it's $HOME"], [brought])
    assert result.exit_code == 7
    assert result.output == "to it's $HOME\noops\n"
    assert (result.files / "an odd name").read_text() == "brought along"
    assert (result.files / "d/k").read_text() == f"{node.kernel.release} x86_64\n"
    with pytest.raises(GuestError, match="exit code 7"):
        result.check()


def test_a_guest_has_a_hard_time_limit_and_says_what_it_was_doing(guest: Make) -> None:
    with pytest.raises(GuestError, match=r"not done within 25 s(?s:.*)begun"):
        guest().run(["bash", "-c", "echo begun; sleep 3600"], limit_s=25)


def test_a_complaint_of_the_kernel_fails_the_test(guest: Make) -> None:
    with pytest.raises(GuestError, match="the kernel complains"):
        guest().run(["bash", "-c", "echo 'WARNING: CPU: 0 PID: 1 at nowhere' >/dev/kmsg"])


def test_a_guest_that_panics_ends(guest: Make) -> None:
    with pytest.raises(GuestError, match=r"ended without a result(?s:.*)sysrq"):
        guest().run(["bash", "-c", "echo c >/proc/sysrq-trigger; sleep 60"])


def test_the_guest_ends_with_the_tests_even_when_those_are_killed(tmp_path: Path, wheel: Path) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.guests.conftest import Node\n"
        "node = Node(Path(sys.argv[1]), Path(sys.argv[2]), 'amd64', '6.1', {})\n"
        "print(node.start(['sleep', '600'])._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    outer = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path / "g", wheel], stdout=subprocess.PIPE, text=True
    )
    assert outer.stdout is not None
    qemu = Path("/proc") / outer.stdout.readline().strip()
    try:
        assert b"qemu" in (qemu / "cmdline").read_bytes()
    finally:
        os.kill(outer.pid, signal.SIGKILL)
        outer.communicate()
    deadline = time.monotonic() + 10
    while alive(qemu) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(qemu)


def alive(process: Path) -> bool:
    """Whether it is there and no zombie that waits to be reaped."""
    try:
        return bool((process / "cmdline").read_bytes())
    except OSError:
        return False
