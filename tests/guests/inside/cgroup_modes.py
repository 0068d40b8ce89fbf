"""On a host with systemd: jobs of every form, what the agent says of them, and what the kernel says.

`cgroup_modes.py v1|v2` leaves in /out: reports/ (every report of the agent), seen.json, agent.log.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from truth import LIMIT_S, switches, until

from expanse_ebpf.top.feed import LocalFeed
from expanse_ebpf.wire.collector_pb2 import JobSample, Report

MODE = sys.argv[1]
EXPANSE = "/opt/expanse-ebpf/bin/expanse-ebpf"
SOCKET = "/run/expanse-ebpf/agent.sock"
OUT, FOLDER, ROOT = Path("/out"), Path("/run/told"), Path("/sys/fs/cgroup")
WORK = [sys.executable, str(Path(__file__).with_name("cgroup_modes_work.py"))]
USER = 1000
SETTLED_S = 8  # more than that after which the agent reads its slow files again
# Where SLURM of a v1 host and the kubelet with the cgroupfs driver make cgroups.
BY_HAND = ("memory", "cpu,cpuacct", "blkio", "pids", "freezer", "devices", "systemd")
POD = "11111111-2222-3333-4444-555555555555"
HAND_POD = "99999999-8888-7777-6666-555555555555"
CONTAINER, PAUSE = "a1" * 32, "b2" * 32
# Files of both worlds, as far as they are there.
FILES = (
    *("cpu.stat", "memory.current", "memory.stat", "memory.peak", "memory.max", "io.stat", "cpu.max"),
    *("cpu.pressure", "memory.pressure", "io.pressure", "cpuacct.usage", "cpuacct.stat"),
    *("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
    *("blkio.throttle.io_service_bytes_recursive", "blkio.throttle.io_serviced_recursive"),
)
SLURM = {
    "SLURM_JOB_NAME": "train", "SLURM_JOB_ACCOUNT": "lab", "SLURM_JOB_PARTITION": "gpu",
    "SLURM_ARRAY_JOB_ID": "100", "SLURM_ARRAY_TASK_ID": "1", "SLURM_JOB_GPUS": "0,1",
}  # fmt: skip


class Jobs:
    """The works that were started, by name."""

    def __init__(self) -> None:
        FOLDER.mkdir(mode=0o777)
        FOLDER.chmod(0o1777)
        Path("/scratch").chmod(0o1777)
        self.started: dict[str, subprocess.Popen[bytes]] = {}
        self.own: dict[str, str] = {}  # the component of the cgroup path that is the job's own

    def start(
        self,
        name: str,
        parts: str,
        own: str = "",
        *,
        before: Iterable[str] = (),
        enter: Iterable[Path] = (),
        uid: int = 0,
        environment: Mapping[str, str] = {},
    ) -> None:
        """Start the work, behind the command `before`, in the cgroups `enter`, as the user `uid`."""
        os.mkfifo(FOLDER / name)
        (FOLDER / name).chmod(0o666)
        entries = [folder / "cgroup.procs" for folder in enter]

        def become() -> None:
            for entry in entries:
                entry.write_text("0")
            if uid:
                os.setgroups([])
                os.setresgid(uid, uid, uid)
                os.setresuid(uid, uid, uid)

        self.own[name] = own
        self.started[name] = subprocess.Popen(
            [*before, *WORK, name, *parts.split()],
            preexec_fn=become,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
        )
        if "forever" not in parts:
            self.told(name)  # one after the other: emulated CPUs are slow

    def told(self, name: str, stretches: int = 1) -> dict[str, Any]:
        """What the work has told, once it has done so much."""

        def ready() -> Any:
            if self.started[name].poll():
                raise SystemExit(f"{name} has ended with {self.started[name].returncode}")
            try:
                told = json.loads((FOLDER / f"{name}.json").read_text())
            except (OSError, ValueError):
                return None
            return told if len(told["stretches"]) >= stretches else None

        found: dict[str, Any] = until(f"work {name}", ready)
        return found

    def go_on(self, name: str) -> None:
        """Let the work go on, or end."""
        (FOLDER / name).write_text("")

    def truth(self, name: str) -> dict[str, Any]:
        """What the kernel says of the job: of its processes, and in its cgroups."""
        told = json.loads((FOLDER / f"{name}.json").read_text())
        own = self.own[name]
        telling = "unified" if MODE == "v2" else "memory"
        folders: dict[str, str] = {}
        for line in Path(f"/proc/{told['pid']}/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            head, found, _ = path.partition(f"/{own}")
            if found and own:
                folder = ROOT / names.removeprefix("name=")
                folders[names or "unified"] = f"{folder}{head}{found}"
        files = {}
        for hierarchy, folder_name in folders.items():
            for file in FILES:
                try:
                    files[f"{hierarchy}/{file}"] = Path(folder_name, file).read_text()
                except OSError:
                    continue
        processes = processes_in(folders.get(telling, ""))
        return {
            "told": told,
            "folders": folders,
            "files": files,
            "users": sum(f"\nUid:\t{USER}\t" in Path(f"/proc/{pid}/status").read_text() for pid in processes),
            "switches": sum(map(switches, processes)),
            "own switches": switches(told["pid"]),
        }


def processes_in(top: str) -> set[int]:
    """All processes in the cgroup and below."""
    return {
        int(line)
        for folder, _, _ in os.walk(top)
        for line in Path(folder, "cgroup.procs").read_text().split()
    }


def make(path: str, hierarchies: Iterable[str] = BY_HAND) -> list[Path]:
    """Cgroups with this path: in the unified hierarchy, or in several of v1."""
    tops = [ROOT] if MODE == "v2" else [ROOT / name for name in hierarchies]
    for top in tops:
        Path(f"{top}{path}").mkdir(parents=True, exist_ok=True)
    return [Path(f"{top}{path}") for top in tops]


def enable(folder: Path, *names: str) -> None:
    """Controllers for what lies below a v2 cgroup."""
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


def systemd_scope(unit: str, cgroups_of: str, *properties: str) -> list[str]:
    """A command before another that runs it in a scope of its own."""
    accounting = ("CPUAccounting=yes", "MemoryAccounting=yes", "IOAccounting=yes", *properties)
    options = [word for one in accounting for word in ("-p", one)]
    return ["systemd-run", "-q", "--scope", f"--unit={unit}", f"--slice={cgroups_of}", *options, "--"]


def slurm_scope(node: str) -> Path:
    """The scope that a slurmd of a v2 host has systemd make, with its keeper in a cgroup of its own."""
    subprocess.Popen(
        [*systemd_scope(f"{node}_slurmstepd.scope", "system.slice", "Delegate=yes"), "sleep", "600"]
    )
    scope = ROOT / f"system.slice/{node}_slurmstepd.scope"
    pids = until("the scope", lambda: scope.exists() and (scope / "cgroup.procs").read_text().split())
    until("sleep", lambda: Path(f"/proc/{pids[0]}/comm").read_text() == "sleep\n")
    (scope / "system").mkdir()
    (scope / "system/cgroup.procs").write_text(pids[0])
    return scope


def slurm_task(number: int, node: str = "guest", hierarchies: Iterable[str] = BY_HAND) -> list[Path]:
    """The cgroups of a SLURM task, as the mode's slurmd makes them."""
    if MODE != "v2":
        return make(f"/slurm_guest/uid_{USER}/job_{number}/step_0/task_0", hierarchies)
    scope = ROOT / f"system.slice/{node}_slurmstepd.scope"
    (task,) = make(f"/system.slice/{scope.name}/job_{number}/step_0/user/task_0")
    if node == "guest":
        for folder in (task.parents[2], task.parents[1], task.parent):
            enable(folder, "cpu", "memory", "io", "pids")
    (task.parents[1] / "slurm").mkdir()
    return [task]


def start_slurm(jobs: Jobs) -> None:
    """Two jobs with their slurmstepd; the second has fewer controllers."""
    if MODE == "v2":
        slurm_scope("other")
        enable(slurm_scope("guest"), "cpu", "memory", "io", "pids")
    for number, node, hierarchies in (
        (101, "guest", BY_HAND),
        (102, "other", ("memory", "freezer", "systemd")),
    ):
        task = slurm_task(number, node, hierarchies)
        stepd([folder.parents[1] / "slurm" if MODE == "v2" else folder.parent for folder in task])
        jobs.start(
            f"slurm-{number}",
            f"cpu=0.6 memory={number - 80}",
            f"job_{number}",
            enter=task,
            uid=USER,
            environment=SLURM | {"SLURM_JOB_ID": str(number)},
        )


def stepd(folders: list[Path]) -> None:
    """A process of root's with slurmstepd's name."""
    program = Path("/run/slurmstepd")
    if not program.exists():
        program.symlink_to("/usr/bin/sleep")
    entries = [folder / "cgroup.procs" for folder in folders]
    HELPERS.append(
        subprocess.Popen(
            [program, "600"], preexec_fn=lambda: [entry.write_text("0") for entry in entries] and None
        )
    )


HELPERS: list[subprocess.Popen[bytes]] = []


def start_pods(jobs: Jobs) -> None:
    """A pod of the systemd driver with its pause container, and one of the cgroupfs driver."""
    cgroups = f"kubepods-burstable-pod{POD.replace('-', '_')}.slice"
    scope = f"cri-containerd-{CONTAINER}.scope"
    jobs.start("pod", "cpu=0.8 memory=22", cgroups, before=systemd_scope(scope, cgroups))
    Path("/run/pause").symlink_to("/usr/bin/sleep")
    pause = systemd_scope(f"cri-containerd-{PAUSE}.scope", cgroups)
    HELPERS.append(subprocess.Popen([*pause, "/run/pause", "600"]))
    if MODE == "v2":
        for part in ("kubepods", "kubepods/besteffort", f"kubepods/besteffort/pod{HAND_POD}"):
            (ROOT / part).mkdir()
            enable(ROOT / part, "cpu", "memory", "io", "pids")
    folders = make(f"/kubepods/besteffort/pod{HAND_POD}/{CONTAINER}")
    jobs.start("hand-pod", "cpu=0.5 memory=23 children=1", f"pod{HAND_POD}", enter=folders)


def run(name: str, *options: str) -> list[str]:
    """`expanse-ebpf run` before another command."""
    return [EXPANSE, "run", "--name", name, *options, "--"]


SESSIONS = itertools.count(7)


def in_session() -> list[str]:
    """A command before another that runs it in a new session of the user's."""
    return systemd_scope(f"session-{next(SESSIONS)}.scope", f"user-{USER}.slice")


def as_user() -> list[str]:
    return ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]


def start_user_manager() -> None:
    """The user's own systemd; PAM has no settings here, since no package's script has run."""
    Path("/etc/pam.d/systemd-user").write_text(
        "account required pam_permit.so\nsession required pam_permit.so\n"
    )
    drop_in = Path("/run/systemd/system/user@.service.d/runtime.conf")
    drop_in.parent.mkdir(parents=True)
    drop_in.write_text("[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i\n")
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "start", f"user@{USER}.service"], check=True)


def start_users(jobs: Jobs) -> None:
    """Jobs that an ordinary user starts: through the agent, in a delegated service, in their own systemd."""
    jobs.start(
        "asked", "cpu=0.5 memory=24", "expanse-run-asked",
        before=[*in_session(), *as_user(), *run("asked", "--user")],
    )  # fmt: skip
    delegated = ["systemd-run", "-q", "--pipe", "--wait", f"--uid={USER}", "--unit=delegated", "-p"]
    jobs.start(
        "delegated", "cpu=0.4 memory=25", "expanse-run-delegated",
        before=[*delegated, "Delegate=yes", "--", *run("delegated", "--user")],
    )  # fmt: skip
    start_user_manager()
    managed = ["env", f"XDG_RUNTIME_DIR=/run/user/{USER}", "systemd-run", "-q", "--user", "--scope", "--"]
    jobs.start(
        "managed", "cpu=0.3 memory=26", "expanse-run-managed",
        before=[*as_user(), *managed, *run("managed", "--user")],
    )  # fmt: skip


def said(*command: str, environment: Mapping[str, str] = {}) -> dict[str, Any]:
    """Exit code and output of a command."""
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    return {"code": done.returncode, "out": done.stdout, "error": done.stderr}


def refusals() -> dict[str, Any]:
    """What an ordinary user, and root, cannot have."""
    (task,) = slurm_task(103, hierarchies=("memory",))
    in_slurm = ["sh", "-c", f'echo $$ >{task}/cgroup.procs; exec "$@"', "-", *as_user()]
    return {
        "user without --user": said(*in_session(), *as_user(), *run("refused"), "true"),
        "user without an agent": said(
            *in_session(), *as_user(), *run("refused", "--user", "--socket", "/run/nobody"), "true"
        ),
        "user in a SLURM job": said(*in_slurm, *run("refused", "--user"), "true"),
        "name taken": said(*run("alone"), "true"),
        "no such command": said(*run("refused"), "/no/such/command"),
        "exit code": said(*run("coded"), "sh", "-c", "exit 42"),
        "signal": said(*run("coded"), "sh", "-c", "kill -9 $$"),
    }


def move(jobs: Jobs) -> None:
    """A process that does one stretch in a session, the next in one job and the last in another."""
    parts = "cpu=0.9 then cpu=0.6 switches=100 then cpu=0.3"
    jobs.start("mover", parts, before=[*in_session(), *as_user()])
    for stretch, number in ((1, 201), (2, 202)):
        told = jobs.told("mover", stretch)
        for folder in slurm_task(number):
            (folder / "cgroup.procs").write_text(str(told["pid"]))
            stay = subprocess.Popen(
                ["sleep", "600"], user=USER
            )  # or the job would end when the process moves on
            HELPERS.append(stay)
            (folder / "cgroup.procs").write_text(str(stay.pid))
        jobs.go_on("mover")
    jobs.told("mover", 3)
    jobs.own["mover"] = "job_202"


class Reports:
    """Every report that the agent makes from now on."""

    def __init__(self) -> None:
        self.all: list[Report] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """No more."""
        self._closed.set()
        self._thread.join()

    def _follow(self) -> None:
        (OUT / "reports").mkdir()
        for report in LocalFeed(SOCKET).reports(0, self._closed.is_set):
            self.all.append(report)
            (OUT / f"reports/{len(self.all):04}.pb").write_bytes(report.SerializeToString())

    def next(self) -> Report:
        """One that is made after this call."""
        here = len(self.all)
        until("a report", lambda: len(self.all) > here + 1)
        return self.all[-1]

    def job_keys(self) -> set[str]:
        """The jobs of the newest."""
        return {f"{job.identity.scheduler}/{job.identity.id}" for job in self.all[-1].jobs}

    def slurm(self) -> list[JobSample]:
        """SLURM's jobs in the newest."""
        return [job for job in self.all[-1].jobs if job.identity.scheduler == "slurm"]


def start_agent(*variables: str) -> None:
    """The agent as a service, with these NAME=VALUE in its environment.

    Without Python stacks, which stacks.py looks at: what a job does before the agent has heard of a cgroup
    inside another job's is the other job's, and an emulator makes long moments of it.
    """
    agent = ["systemd-run", "-q", "--unit=expanse-agent", "-E", "EXPANSE_SOURCES_PYTHON=false"]
    agent += [word for variable in variables for word in ("-E", variable)]
    agent += ["-p", "RuntimeDirectory=expanse-ebpf", "-p"]
    subprocess.run([*agent, f"StandardError=file:{OUT}/agent.log", EXPANSE, "agent"], check=True)
    until("the agent", Path(SOCKET).exists)


def main() -> None:
    seen: dict[str, Any] = {"check": json.loads(said(EXPANSE, "check", "--json")["out"])}
    start_agent()
    reports = Reports()
    reports.next()  # the socket is there before the hook
    jobs = Jobs()
    # As long as a unit wants it, v1's systemd leaves alone what others have in this hierarchy.
    subprocess.run(
        ["systemd-run", "-q", "--unit=expanse-io", "-p", "IOAccounting=yes", "sleep", "900"], check=True
    )

    jobs.start("alone", "cpu=1.0 switches=400 memory=20 children=2", "expanse-run-alone", before=run("alone"))
    jobs.start(
        "inner", "cpu=0.4 switches=150 memory=27", "expanse-run-inner", before=[*run("outer"), *run("inner")]
    )
    jobs.start("pressed", "spinners=3 memory=21", "expanse-run-pressed", before=run("pressed"))
    jobs.start("disk", "then disk=32", "expanse-run-disk", before=run("disk"))
    start_slurm(jobs)
    start_pods(jobs)
    service = ["systemd-run", "-q", "--pipe", "--wait"]
    accounted = [word for name in ("CPU", "IO") for word in ("-p", f"{name}Accounting=yes")]
    jobs.start(
        "trainer",
        "cpu=0.5 memory=28",
        "trainer.service",
        before=[*service, *accounted, "--unit=trainer", "--"],
    )
    jobs.start("plain", "cpu=0.5 memory=29", "plain.service", before=[*service, "--unit=plain", "--"])
    jobs.start("excluded", "cpu=0.2", before=[*service, "--unit=ssh-work", "--"])
    start_users(jobs)
    move(jobs)

    limit = ("memory.max", ROOT) if MODE == "v2" else ("memory.limit_in_bytes", ROOT / "memory")
    (limit[1] / "expanse-run-disk" / limit[0]).write_text(str(24 << 20))
    jobs.go_on("disk")
    jobs.told("disk", 2)
    jobs.start("steady", "forever", "expanse-run-steady", before=run("steady"))
    jobs.told("steady", 0)
    seen["commands"] = refusals()
    time.sleep(SETTLED_S)
    before = {name: jobs.truth(name) for name in jobs.started}
    seen["settled"] = reports.next().sequence
    seen["before"], seen["after"] = before, {name: jobs.truth(name) for name in jobs.started}
    seen["top"] = said(EXPANSE, "top", "--once", "--json")
    seen["top of user"] = said(*in_session(), *as_user(), EXPANSE, "top", "--once", "--json")

    told = json.loads((FOLDER / "steady.json").read_text())
    os.kill(told["pid"], signal.SIGTERM)
    for name in jobs.started.keys() - {"steady"}:
        jobs.go_on(name)
    for helper in HELPERS:
        helper.terminate()
    seen["codes"] = {name: started.wait(LIMIT_S) for name, started in jobs.started.items()}
    until("the jobs' end", lambda: reports.job_keys() <= {"unit/guest-command.service"})
    seen["left"] = sorted(reports.job_keys())
    (OUT / "seen.json").write_text(json.dumps(seen))
    reports.close()
    subprocess.run(["systemctl", "stop", "expanse-agent"], check=True)


if __name__ == "__main__":
    main()
