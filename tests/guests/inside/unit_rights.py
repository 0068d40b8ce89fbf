"""What the agent can no longer do when one of the unit's capabilities is taken away.

Leaves /out/rights.json: by the capabilities that were missing ("" for none, "A B" for two) what was seen.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

from unit_kit import AGENT, BROUGHT, CONFIG, USER, drop_in, install, job, newest, run, until

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, Report

SLURM = Path("/sys/fs/cgroup/system.slice/guest_slurmstepd.scope/job_7/step_0/user/task_0")
LEFT = Path("/sys/fs/cgroup/expanse-run-left")
DELAYS = Path("/proc/sys/kernel/task_delayacct")
# The first stand for the others too, which show only without them what they are there for.
BROAD, NARROW = ("CAP_SYS_ADMIN", "CAP_NET_ADMIN"), ("CAP_BPF", "CAP_PERFMON")


def start_jobs() -> None:
    """A unit with a network of its own and a SLURM job of a user."""
    unit = ["--unit=apart", f"--uid={USER}", "-p", "PrivateNetwork=yes"]
    run("systemd-run", *unit, "sh", "-c", "while :; do sleep 0.1; done")
    SLURM.mkdir(parents=True)
    start = f"echo $$ >{SLURM}/cgroup.procs; exec setpriv --reuid={USER} --clear-groups sleep 3600"
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_ACCOUNT": "lab"}
    subprocess.Popen(["sh", "-c", start], env=environment)


def cleans_up() -> bool:
    """Whether the cgroup goes that a killed `expanse-ebpf run` has left."""
    LEFT.mkdir()
    with subprocess.Popen(["sh", "-c", f"echo $$ >{LEFT}/cgroup.procs; exec sleep 3600"]) as left:
        until("the job", lambda: (sample := job("run/left", newest())) and sample.processes)
        left.kill()

    def over(report: Report | None) -> bool:
        sample = job("run/left", report)
        return sample is None or sample.state == JOB_STATE_ENDED

    last = until("its end", lambda: over(report := newest()) and report)
    until("one report more", lambda: (report := newest()) and report.sequence > last.sequence)
    try:
        LEFT.rmdir()
    except FileNotFoundError:
        return True
    return False


def seen() -> dict[str, bool]:
    """What of all this the agent tells, two reports after its start."""
    first = newest()
    assert first is not None, "the agent is ready and does not answer"
    report = until("reports", lambda: (r := newest()) and r.sequence >= first.sequence + 2 and r)
    apart, slurm = job("unit/apart.service", report), job("slurm/7", report)
    user = ["setpriv", f"--reuid={USER}", "--clear-groups", "expanse-ebpf", "run", "--user", "--name", "mine"]
    return {
        "accounting": bool(apart and apart.counters.HasField("context_switches")),
        "program statistics": len(report.collector.programs) > 0,
        "network": bool(apart and apart.HasField("network")),
        "delays": bool(apart and apart.delays.HasField("cpu_ns")),
        "owner": bool(apart and apart.identity.uid == USER),
        "environment": bool(slurm and slurm.identity.account == "lab"),
        "clearing up": cleans_up(),
        "run --user": subprocess.run([*user, "--", "true"], check=False).returncode == 0,
    }


install()
CONFIG.parent.mkdir()
CONFIG.write_text("[sources]\nnetwork = true\ndelays = true\n")
if DELAYS.exists():
    DELAYS.write_text("1")
start_jobs()
(named,) = re.findall(r"^CapabilityBoundingSet=(.*)$", (BROUGHT / AGENT).read_text(), re.MULTILINE)
sets = [
    ("",),
    *((one,) for one in named.split() if one not in NARROW),
    BROAD,
    *((*BROAD, one) for one in NARROW),
]
rights = {}
for missing in map(" ".join, sets):
    drop_in(f"[Service]\nCapabilityBoundingSet=~{missing}\n" if missing else "")
    run("systemctl", "restart", AGENT)
    rights[missing] = seen()
    print(missing or "all there", [what for what, there in rights[missing].items() if not there], flush=True)
Path("/out/rights.json").write_text(json.dumps(rights))
