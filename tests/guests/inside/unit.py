"""The units of deploy/systemd, installed and put through what happens to a service.

Leaves what was seen in /out/seen.json, and the journals of both.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from unit_kit import (
    AGENT,
    BROUGHT,
    CONFIG,
    CONTROLLER,
    SOCKET,
    UNITS,
    USER,
    drop_in,
    first_reports,
    install,
    job,
    journal,
    main_pid,
    newest,
    programs,
    run,
    show,
    until,
)

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report

DELAYS = Path("/proc/sys/kernel/task_delayacct")
LIBRARY = BROUGHT / "nvml/libnvidia-ml.so.1"  # a stand-in, on the machines for which there is one
CGROUP = Path("/sys/fs/cgroup/system.slice") / AGENT
TERMINAL = next(path for path in ("/dev/ttyS0", "/dev/ttyAMA0") if Path(path).exists())
JOBS = ("unit/apart.service", "run/kept")
seen: dict[str, Any] = {}


def step(text: str) -> None:
    print(f"{time.monotonic():6.0f} {text}", flush=True)


def statuses(report: Report) -> dict[str, Any]:
    """What the report says of its sources: whether they are up, and the parts that are missing."""
    return {s.name: [s.up, s.reason, dict(s.unavailable)] for s in report.collector.sources}


def process(pid: int) -> dict[str, str]:
    """/proc/PID/status."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def births(report: Report) -> list[int]:
    return [sample.identity.run if (sample := job(key, report)) else 0 for key in JOBS]


def restarted(since: int) -> Report:
    """The first report of a main process other than `since`."""
    until("another main process", lambda: main_pid() not in (0, since) and show("ActiveState") == "active")
    report = newest()
    assert report is not None, "systemd calls it started and it does not answer"
    return report


def works(report: Report) -> bool:
    """Whether the job that never rests is seen at work, two reports later."""
    before = job(JOBS[0], report)
    later = until("two more reports", lambda: (r := newest()) and r.sequence >= report.sequence + 2 and r)
    after = job(JOBS[0], later)
    return bool(before and after and after.counters.context_switches > before.counters.context_switches)


def device_access() -> list[str]:
    """What a process in the unit's cgroup may open: the null device and the disk."""
    attempts = "for d in null vda; do (: </dev/$d) 2>/dev/null && echo $d; done; true"
    return run("sh", "-c", f"echo $$ >{CGROUP}/cgroup.procs; {attempts}").split()


def start() -> None:
    unit = [f"--unit={JOBS[0].partition('/')[2]}", f"--uid={USER}", "-p", "PrivateNetwork=yes"]
    run("systemd-run", *unit, "sh", "-c", "while :; do sleep 0.05; done")
    subprocess.Popen(["expanse-ebpf", "run", "--name", "kept", "--", "sleep", "3600"])
    seen["verify"] = run("systemd-analyze", "verify", str(UNITS / AGENT), str(UNITS / CONTROLLER))
    seen["programs before"] = len(programs())
    run("systemctl", "enable", "--now", AGENT)
    returned = time.time_ns()
    first, second = first_reports()
    # A report bears the time at which its tick began. One that is begun right after READY is older than
    # `returned` too, but when systemd heard of READY, such a tick was not half over yet.
    half_made = first.time_ns + second.collector.tick_ns // 2
    active = int(show("ActiveEnterTimestampMonotonic")) * 1000 + time.time_ns() - time.monotonic_ns()
    order = [first.time_ns, half_made, active, returned]
    step(f"begun, half made, active, returned: {[(at - order[0]) // 1000 for at in order]} us")
    seen["first report before start returned"] = order == sorted(order)
    seen["active"] = run("systemctl", "is-active", AGENT).strip()
    seen["status"] = show("StatusText")
    until("both jobs", lambda: (r := newest()) and all(births(r)))
    run("expanse-ebpf", "top", "--once")


def sandbox() -> None:
    own = process(main_pid())
    seen["process"] = {name: own[name] for name in ("CapBnd", "CapEff", "CapPrm", "NoNewPrivs", "Seccomp")}
    seen["oom score"] = Path(f"/proc/{main_pid()}/oom_score_adj").read_text().strip()
    Path("/root/secret").touch()
    os.mknod("/dev/nvidiactl", 0o20666, os.makedev(195, 255))  # without a driver behind it
    seen["probe"] = probe("probe", "")
    # Where the driver is loaded, this is what its name gives.
    seen["probe with that device"] = probe("probe", "nvidia")["open a terminal"]
    for unit in (AGENT, CONTROLLER):
        analysis = run("systemd-analyze", "security", "--no-pager", unit)
        seen[f"exposure of {unit}"] = re.findall(r"exposure level for \S+: ([\d.]+)", analysis)


def probe(name: str, driver: str) -> dict[str, str]:
    """What unit_probe.py finds in a unit that differs from the agent's by its command alone.

    `driver` in the names of allowed devices becomes the name of the terminal's driver.
    """
    text = (BROUGHT / AGENT).read_text()
    if driver:
        assert f"char-{driver}" in text
        text = text.replace(f"char-{driver}", "char-tty")
    stranger = show("MainPID", JOBS[0].partition("/")[2])
    program = BROUGHT / "inside/unit_probe.py"
    command = f"/opt/expanse-ebpf/bin/python3 {program} {TERMINAL} {stranger}"
    for pattern, to in (
        (r"^ExecStart=.*$", f"ExecStart={command}\nStandardOutput=truncate:/run/probe.json"),
        (r"^Type=.*$", "Type=oneshot"),
        (r"^(Restart|Watchdog|TimeoutAbort|NotifyAccess)\w*=.*\n", ""),
        (r"^(Runtime|State)Directory=.*$", rf"\1Directory={name}"),
    ):
        text, count = re.subn(pattern, to, text, flags=re.MULTILINE)
        assert count, pattern
    (UNITS / f"{name}.service").write_text(text)
    run("systemctl", "daemon-reload")
    run("systemctl", "start", f"{name}.service")
    return dict(json.loads(Path("/run/probe.json").read_text()))


def gpus() -> None:
    """What the stand-in for NVML has told the agent, and what became of the process that asks it."""
    report = until("figures of GPUs", lambda: (r := newest()) and r.nvml.up and r)
    worker = asking()
    os.kill(worker, signal.SIGKILL)
    again = until("another process", lambda: (r := newest()) and r.nvml.restarts and r.nvml.up and r)
    seen["gpus"] = {
        "found": [sorted(gpu.uuid for gpu in r.gpus) for r in (report, again)],
        "states": sorted({gpu.state for gpu in again.gpus}),
        "restarts": again.nvml.restarts,
        "another process": asking() not in (0, worker),
        "it has its memory told": again.nvml.pss_bytes > 1 << 20,
        "nice": Path(f"/proc/{asking()}/stat").read_text().rpartition(")")[2].split()[16],
    }


def asking() -> int:
    """The process in the unit that asks NVML."""
    pids = (CGROUP / "cgroup.procs").read_text().split()
    return next((int(p) for p in pids if b"nvml.worker" in Path(f"/proc/{p}/cmdline").read_bytes()), 0)


def reload() -> None:
    pid, loaded, before = main_pid(), programs(), newest()
    assert before is not None
    devices = device_access()
    reports: list[Report] = []
    ended = threading.Event()

    def follow() -> None:
        reports.extend(client.watch(SOCKET, 1, ended.is_set))

    follower = threading.Thread(target=follow)
    follower.start()
    run("systemctl", "daemon-reload")
    run("systemctl", "daemon-reexec")
    at_work = works(before)
    ended.set()
    follower.join()
    steps = {later.sequence - earlier.sequence for earlier, later in pairwise(reports)}
    switches = [s.counters.context_switches if (s := job(JOBS[0], r)) else -1 for r in reports]
    seen["reload"] = {
        "same process": main_pid() == pid and show("NRestarts") == "0",
        "same programs": programs() == loaded,
        "reports": len(reports),
        "no gap": steps == {1} and all(all(births(r)) for r in reports),
        "counts rise": switches == sorted(switches) and at_work,
        "devices": [devices, device_access()],
    }


def kill() -> None:
    pid, loaded, before = main_pid(), programs(), newest()
    assert before is not None
    os.kill(pid, signal.SIGKILL)
    report = restarted(pid)
    seen["kill"] = {
        "restarts": show("NRestarts"),
        "programs before": len(loaded),
        "left of them": len(loaded & programs()),
        "same jobs": births(report) == births(before) and 0 not in births(before),
        "works": works(report),
    }


def stick() -> None:
    """Stopped, it gives no sign of life. Less patience than the unit's own, but enough for a slow machine."""
    drop_in("[Service]\nWatchdogSec=15\n")
    before = main_pid()
    run("systemctl", "restart", AGENT)
    pid = main_pid()
    report = newest()
    seen["restart"] = {"another process": pid not in (0, before), "answers": report is not None}
    signs = {show("WatchdogTimestampMonotonic")}
    until("signs of life", lambda: signs.add(show("WatchdogTimestampMonotonic")) or len(signs) > 3)
    seen["restart"]["stays"] = main_pid() == pid
    said = show("InvocationID")
    os.kill(pid, signal.SIGSTOP)
    report = restarted(pid)
    run("journalctl", "--sync")
    text = run("journalctl", "--no-pager", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={said}")
    text += run("journalctl", "--no-pager", "-o", "cat", f"INVOCATION_ID={said}")
    seen["stuck"] = {
        "watchdog": "Watchdog timeout" in text,
        "says where": "Fatal Python error: Aborted" in text and "in run" in text,
        "works": works(report),
    }
    drop_in("")


def stop() -> None:
    run("systemctl", "stop", AGENT)
    seen["stop"] = {
        "result": [show(name) for name in ("Result", "ExecMainCode", "ExecMainStatus", "ActiveState")],
        "programs": len(programs()),
        "left": [str(path) for path in (Path(SOCKET).parent, CGROUP) if path.exists()],
    }


def unconfined() -> None:
    """The same configuration outside of the unit sees the same."""
    run("systemctl", "start", AGENT)
    inside = until("sources", lambda: (r := newest()) and works(r) and newest())
    seen["sources"] = [statuses(inside)]
    run("systemctl", "stop", AGENT)
    socket = "/run/free.sock"
    command = ["expanse-ebpf", "agent", "--socket", socket, "--state-dir", "/run/free"]
    with subprocess.Popen(command) as free:
        first = until("the free agent", lambda: newest(socket))
        later = until("more of it", lambda: (r := newest(socket)) and r.sequence > first.sequence + 2 and r)
        free.terminate()
    seen["sources"].append(statuses(later))
    samples = [job(JOBS[0], report) for report in (inside, later)]
    seen["fields of a job"] = [sorted(f.name for f, _ in s.ListFields()) if s else [] for s in samples]
    seen["programs measured"] = [len(report.collector.programs) > 0 for report in (inside, later)]


def misconfigure() -> None:
    right = CONFIG.read_text()
    CONFIG.write_text('[agent]\ninterval_s = "quick"\n')
    run("systemctl", "start", AGENT, fails=True)
    # In between two tries it would be "activating".
    seen["wrong configuration"] = {
        "state": [show("ActiveState"), show("NRestarts"), show("ExecMainStatus")],
        "said": [line for line in journal().splitlines() if "error:" in line or "Traceback" in line],
    }
    CONFIG.write_text(right)


def controller() -> None:
    run("systemctl", "enable", "--now", CONTROLLER)
    seen["controller"] = {
        "active": run("systemctl", "is-active", CONTROLLER).strip(),
        "status": show("StatusText", CONTROLLER),
        "rights": [process(main_pid(CONTROLLER))[name] for name in ("CapBnd", "CapEff", "Seccomp")],
        "root": process(main_pid(CONTROLLER))["Uid"].split()[0] == "0",
    }
    drop_in("[Service]\nEnvironment=EXPANSE_CONTROLLER_ADDRESS=127.0.0.1:9777\n")
    run("systemctl", "start", AGENT)
    until("the link", lambda: "connected" in (text := show("StatusText")) and "not" not in text)
    seen["controller"]["agent's status"] = show("StatusText")
    ask = ["expanse-ebpf", "top", "--once", "--json", "--controller", "127.0.0.1:9777", "--job", JOBS[0]]
    until("delivery", lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0)
    run("systemctl", "stop", AGENT, CONTROLLER)
    names = ("Result", "ExecMainCode", "ExecMainStatus")
    seen["controller"]["result"] = [show(name, CONTROLLER) for name in names]
    drop_in("")


def main() -> None:
    install()
    CONFIG.parent.mkdir()
    settings = "[sources]\nnetwork = true\ndelays = true\n"
    if LIBRARY.exists():
        settings += f"[gpu]\nlibrary = '{LIBRARY}'\n"
    CONFIG.write_text(settings)
    if DELAYS.exists():
        DELAYS.write_text("1")
    try:
        parts = [start, sandbox, reload, kill, stick, stop, unconfined, misconfigure, controller]
        if LIBRARY.exists():
            parts.insert(2, gpus)
        for part in parts:
            step(part.__name__)
            part()
    finally:
        Path("/out/seen.json").write_text(json.dumps(seen, indent=1))
        run("sh", "-c", "journalctl --no-pager -u 'expanse-*' >/out/journal")
    step("end")


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:
        sys.exit(str(error))
