"""A SLURM of one node on this machine, without cgroups and without systemd, that leaves nothing behind.

The programs are those of Debian's packages, unpacked into a folder and not installed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Callable, Generator, Sequence
from pathlib import Path

from tests.bench.cluster import until
from tests.bench.control_plane import free_ports
from tests.guests.image import locked
from tests.guests.packages import Suite, unpack

_SUITE = "bookworm"
_PACKAGES = (
    *("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2"),
    *("libhwloc15", "liblua5.1-0"),
)
CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ctld}
SlurmdPort={slurmd}
SlurmUser=root
SlurmdUser=root
PluginDir={root}/usr/lib/{triplet}/slurm-wlm
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdSpoolDir={folder}/spool
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=INFINITE State=UP
"""


class Slurm:
    """A cluster that is up; commands are run with `environment`, which has its programs first on the PATH."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """What a command says; AssertionError when it fails."""
        environment = self.environment | variables
        done = subprocess.run(command, env=environment, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """What SLURM says of a job, by name."""
        words = self.call("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def ended(self, number: str, limit_s: float = 120.0) -> tuple[str, str]:
        """A job's state and exit code once its script has ended."""
        going_on = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        until(f"job {number} ends", lambda: self.job(number)["JobState"] not in going_on, limit_s)
        # Its script may be at its end yet when it was cancelled.
        until("the node is idle", lambda: self.call("sinfo", "-h", "-o", "%T").strip() == "idle", limit_s)
        return self.job(number)["JobState"], self.job(number)["ExitCode"]


@contextlib.contextmanager
def slurm(folder: Path) -> Generator[Slurm]:
    """A cluster of one's own, whose files are in `folder`."""
    root = folder / "root"
    with locked():
        architecture = _said("dpkg", "--print-architecture")
        unpack(Suite(_SUITE, architecture).fetch(_PACKAGES, alone=True), root)
    triplet = f"{os.uname().machine}-linux-gnu"
    environment = os.environ | {
        "PATH": f"{root}/usr/bin:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{root}/usr/lib/{triplet}:{root}/usr/lib/{triplet}/slurm-wlm",
        "SLURM_CONF": str(folder / "slurm.conf"),
    }
    ctld, slurmd = free_ports(2)
    host = socket.gethostname().partition(".")[0]
    places = {"folder": folder, "root": root, "triplet": triplet, "host": host}
    text = CONFIGURATION.format(**places, ctld=ctld, slurmd=slurmd, cpus=os.cpu_count())
    (folder / "slurm.conf").write_text(text)
    for name in ("spool", "state", "munge"):
        (folder / name).mkdir()
    munge = folder / "munge"
    munge.chmod(0o711)
    (munge / "key").write_bytes(os.urandom(128))
    (munge / "key").chmod(0o400)
    files = [f"--{name}-file={munge}/{name}" for name in ("key", "pid", "log", "seed")]
    sbin = root / "usr/sbin"
    daemons = (
        [f"{sbin}/munged", "--foreground", "--force", f"--socket={munge}/socket", *files],
        [f"{sbin}/slurmctld-wlm", "-D"],
        [f"{sbin}/slurmd-wlm", "-D", "-N", host, "-d", f"{sbin}/slurmstepd-wlm"],
    )
    made = Slurm(folder, environment)
    with contextlib.ExitStack() as stack:
        for command in daemons:
            stack.enter_context(_running(command, environment, folder))
            if "munged" in command[0]:
                until("munged answers", (munge / "socket").exists)
        try:
            until("the node is idle", _idle(made))
        except AssertionError:
            raise AssertionError((folder / "slurmctld.log").read_text()[-3000:]) from None
        yield made
        made.call("scancel", "--user=root")
        until("no job is left", lambda: not made.call("squeue", "-h"))


def _idle(made: Slurm) -> Callable[[], bool]:
    def looks() -> bool:
        with contextlib.suppress(AssertionError):
            return made.call("sinfo", "-h", "-o", "%T").strip() == "idle"
        return False

    return looks


@contextlib.contextmanager
def _running(command: Sequence[str], environment: dict[str, str], folder: Path) -> Generator[None]:
    log = folder / f"{Path(command[0]).name}.said"
    with (
        open(log, "wb") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as process,
    ):
        try:
            yield
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def _said(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
