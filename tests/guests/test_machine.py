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

from tests.guests import conftest, machine
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


@pytest.mark.parametrize("cgroup", ["v2", "v1", "hybrid"])
def test_cgroups_are_mounted_as_asked_without_an_init_system(guest: Make, cgroup: str) -> None:
    result = guest(cgroup=cgroup).run(["expanse-ebpf", "check"])
    assert f"\nok   cgroups: {cgroup}: " in result.output


def test_a_guest_has_a_hard_time_limit_and_says_what_it_was_doing(guest: Make) -> None:
    with pytest.raises(GuestError, match=r"not done within 25 s(?s:.*)begun"):
        guest().run(["bash", "-c", "echo begun; sleep 3600"], limit_s=25)


def test_a_complaint_of_the_kernel_fails_the_test(guest: Make) -> None:
    with pytest.raises(GuestError, match="the kernel complains"):
        guest().run(["bash", "-c", "echo 'WARNING: CPU: 0 PID: 1 at nowhere' >/dev/kmsg"])


@pytest.mark.parametrize(
    ("line", "complains"),
    [
        ("[    4.8] ------------[ cut here ]------------", True),
        ("[    4.8] WARNING: CPU: 0 PID: 107 at kernel/bpf/verifier.c:10493 bpf_check+0x2f92/0x3470", True),
        ("[    4.8] BUG: kernel NULL pointer dereference, address: 0000000000000008", True),
        ("[    4.8] Oops: 0000 [#1] SMP NOPTI", True),
        ("[    4.8] Internal error: synchronous external abort: 96000010 [#1] SMP", True),
        ("[    4.8] general protection fault, probably for non-canonical address", True),
        ("[    4.8] invalid opcode: 0000 [#1] PREEMPT SMP", True),
        ("[    4.8] UBSAN: array-index-out-of-bounds in kernel/x.c:1:2", True),
        ("[    4.8] INFO: task sh:12 blocked for more than 120 seconds.", True),
        ("[    4.8] rcu: INFO: rcu_preempt self-detected stall on CPU", False),
        ("[    4.8] EXT4-fs (vda): mounted filesystem without journal.", False),
        ("[    4.8] tsc: Fast TSC calibration failed", False),
    ],
)
def test_what_is_a_complaint(line: str, complains: bool) -> None:
    assert bool(machine.COMPLAINT.search(f"[    1.0] before\n{line}\n[    9.0] after\n")) is complains


@pytest.mark.parametrize("works", [True, False])
def test_kvm_is_used_only_where_it_is_asked_for_and_works(
    works: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wheel: Path
) -> None:
    tried: list[str] = []

    class Trial(machine.Guest):
        def __init__(self, *images: object, accelerator: str, **options: object) -> None:
            tried.append(accelerator)

        def finish(self) -> machine.Result:
            if not works:
                raise GuestError("it hangs")
            return machine.Result(0, "", tmp_path, "")

        def close(self) -> None:
            pass

    monkeypatch.setattr(conftest, "Guest", Trial)
    monkeypatch.delenv("GUESTS_KVM", raising=False)
    assert conftest.choose_accelerator(wheel, tmp_path) == "tcg"
    assert tried == []
    monkeypatch.setenv("GUESTS_KVM", "1")
    assert conftest.choose_accelerator(wheel, tmp_path) == ("kvm" if works else "tcg")
    assert tried == ["kvm"]


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
        # Not before setpriv has become qemu: until then nothing ties it to the process that started it.
        deadline = time.monotonic() + 10
        while "qemu" not in (qemu / "exe").readlink().name:
            assert time.monotonic() < deadline
            time.sleep(0.01)
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
