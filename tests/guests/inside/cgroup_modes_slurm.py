"""A real SLURM under systemd: a batch job with a step, an array job, one without a GPU; what the agent says.

`cgroup_modes_slurm.py v1|v2` leaves in /out what cgroup_modes.py does, and SLURM's logs. NVML's stand-in is
brought in /payload/files/nvml. There is also a unit that systemd lets open one GPU.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cgroup_modes import (
    EXPANSE,
    FOLDER,
    MODE,
    OUT,
    SETTLED_S,
    WORK,
    Jobs,
    Reports,
    as_user,
    said,
    start_agent,
    until,
)

ETC = Path("/etc/slurm")
ADDRESS = "192.0.2.10"
GPUS = 5  # one more than the jobs get
CONFIGURATION = f"""\
ClusterName=guest
SlurmctldHost=guest({ADDRESS})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/cgroup
AccountingStorageType=accounting_storage/none
PrologFlags=Contain
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SlurmctldLogFile={OUT}/slurmctld.log
SlurmdLogFile={OUT}/slurmd.log
SlurmdTimeout=0
InactiveLimit=0
NodeName=guest NodeAddr={ADDRESS} CPUs=4 RealMemory=900 Gres=gpu:{GPUS} State=UNKNOWN
PartitionName=gpu Nodes=guest Default=YES State=UP
"""
CGROUPS = f"""\
CgroupPlugin=cgroup/{MODE}
CgroupMountpoint=/sys/fs/cgroup
ConstrainRAMSpace=yes
ConstrainCores=yes
ConstrainDevices=yes
"""
# Device files need no driver to be allowed or refused.
RESOURCES = f"Name=gpu File=/dev/nvidia[0-{GPUS - 1}]\n"
NVML = Path("/run/nvml")


def make_gpus() -> None:
    """Device files, and a folder for NVML's stand-in that it can write to."""
    for name, minor in {"ctl": 255, **{str(minor): minor for minor in range(GPUS)}}.items():
        os.mknod(f"/dev/nvidia{name}", stat.S_IFCHR, os.makedev(195, minor))
        Path(f"/dev/nvidia{name}").chmod(0o666)
    shutil.copytree("/payload/files/nvml", NVML)


def start_slurm() -> None:
    """What the packages' scripts would have done, then the daemons."""
    subprocess.run(["ip", "address", "add", f"{ADDRESS}/32", "dev", "lo"], check=True)
    Path("/etc/hosts").write_text(f"127.0.0.1 localhost\n{ADDRESS} guest\n")
    for folder in (
        ETC,
        Path("/var/spool/slurmd"),
        Path("/var/spool/slurmctld"),
        Path("/run/munge"),
        Path("/run/key"),
    ):
        folder.mkdir(parents=True, exist_ok=True)
    Path("/run/munge").chmod(0o755)
    Path("/run/key").chmod(0o700)
    key = Path("/run/key/munge.key")
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (ETC / "slurm.conf").write_text(CONFIGURATION)
    (ETC / "cgroup.conf").write_text(CGROUPS)
    (ETC / "gres.conf").write_text(RESOURCES)
    places = [f"--{name}-file=/run/key/munge.{name}" for name in ("key", "pid", "log", "seed")]
    subprocess.run(["munged", "--force", "--socket=/run/munge/munge.socket.2", *places], check=True)
    for program in ("slurmctld", "slurmd", "slurmstepd"):
        Path(f"/usr/sbin/{program}").symlink_to(f"{program}-wlm")
    for daemon in ("slurmctld", "slurmd"):
        command = [
            "systemd-run",
            "-q",
            f"--unit={daemon}-here",
            "-p",
            "Delegate=yes",
            f"/usr/sbin/{daemon}",
            "-D",
        ]
        subprocess.run(command, check=True)
    until("the node", lambda: said("sinfo", "-h", "-o", "%T")["out"].strip() == "idle")


def submit(*options: str, command: str) -> int:
    """Have the user submit a job; its id."""
    batch = [*as_user(), "sbatch", "--parsable", "--chdir=/tmp", "--ntasks=1", "--mem=150", *options]
    done = subprocess.run([*batch, f"--wrap={command}"], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"sbatch: {done.stderr}")
    return int(done.stdout)


def opened(names: Iterable[str]) -> dict[str, list[int]]:
    """The minors of the GPUs that the kernel has let these works open, and the batch script."""
    found = {name: json.loads((FOLDER / f"{name}.json").read_text())["gpus"] for name in names}
    allowed = re.findall(r"nvidia(\d): No such device", (FOLDER / "batch").read_text())
    return found | {"batch": list(map(int, allowed))}


def start_unit(jobs: Jobs, free: int) -> None:
    """A unit that systemd lets open the GPU of this minor alone."""
    policy = ("-p", "DevicePolicy=closed", "-p", f"DeviceAllow=/dev/nvidia{free} rw")
    unit = ["systemd-run", "-q", "--pipe", "--wait", "--unit=closed", *policy, "--"]
    jobs.start("closed", f"gpus={GPUS}", "closed.service", before=unit)


def main() -> None:
    seen: dict[str, Any] = {}
    make_gpus()
    start_agent(f"EXPANSE_GPU_LIBRARY={NVML}/libnvidia-ml.so.1")
    reports = Reports()
    reports.next()
    jobs = Jobs()
    start_slurm()
    work = " ".join(WORK)
    names = ("step", "array-1", "array-2", "without")
    for name in names:
        os.mkfifo(FOLDER / name)
        (FOLDER / name).chmod(0o666)
    tried = f"gpus={GPUS}"
    # The batch script may open both of the job's GPUs, the step one of them. The shell says why it could not.
    by_shell = f"for gpu in /dev/nvidia[0-{GPUS - 1}]; do true <>$gpu; done 2>{FOLDER}/batch"
    batch = submit(
        "--job-name=train", "--gres=gpu:2",
        command=f"{by_shell}; srun --mem=0 --gres=gpu:1 {work} step cpu=0.8 memory=21 switches=200 {tried}",
    )  # fmt: skip
    array = submit(
        "--job-name=sweep", "--array=1-2", "--gres=gpu:1",
        command=f"exec {work} array-$SLURM_ARRAY_TASK_ID cpu=0.$((SLURM_ARRAY_TASK_ID * 4)) "
        f"memory=$((SLURM_ARRAY_TASK_ID + 22)) {tried}",
    )  # fmt: skip
    without = submit("--job-name=plain", command=f"exec {work} without cpu=0.6 memory=22 {tried}")
    try:
        for name in names:
            until(f"work {name}", (FOLDER / f"{name}.json").exists)
    except SystemExit:
        for command in (("squeue",), ("scontrol", "show", "job"), ("tail", "-n30", f"{OUT}/slurmd.log")):
            print(said(*command)["out"])
        raise
    queue = said("squeue", "-h", "-r", "-o", "%A|%i|%u|%P|%j|%T")["out"].split()
    seen["queue"] = [line.split("|") for line in queue]
    raw = {line[1]: line[0] for line in seen["queue"]}
    ids = {"step": str(batch), "array-1": raw[f"{array}_1"], "array-2": raw[f"{array}_2"]}
    ids["without"] = str(without)
    seen["ids"] = ids
    taken = opened(names)
    seen["free"] = min({*range(GPUS)}.difference(*taken.values()), default=0)
    start_unit(jobs, seen["free"])
    seen["opened"] = taken | opened(["closed"])
    for name, number in ids.items():
        jobs.own[name] = f"job_{number}"
    time.sleep(SETTLED_S)
    # A job may be older than its limit, and limits are read every 20 s.
    until("the limits", lambda: all(job.memory_limit_bytes for job in reports.slurm()))
    seen["before"] = {name: jobs.truth(name) for name in (*names, "closed")}
    seen["settled"] = reports.next().sequence
    seen["after"] = {name: jobs.truth(name) for name in names}
    seen["top"] = said(EXPANSE, "top", "--once", "--json")
    for name in (*names, "closed"):
        jobs.go_on(name)
    until("the jobs' end", lambda: not reports.slurm())
    reports.close()
    (OUT / "seen.json").write_text(json.dumps(seen))
    subprocess.run(["systemctl", "stop", "expanse-agent", "slurmd-here", "slurmctld-here"], check=True)


if __name__ == "__main__":
    main()
