"""What the programs about the systemd units share."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import truth

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import libbpf
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import JobSample, Report

AGENT, CONTROLLER = "expanse-ebpf.service", "expanse-controller.service"
SOCKET = "/run/expanse-ebpf/agent.sock"
CONFIG = Path("/etc/expanse-ebpf/config.toml")
UNITS = Path("/etc/systemd/system")
BROUGHT = Path("/payload/files")
USER = 1000
_TRACING = (7, 17, 26)  # BPF_PROG_TYPE_PERF_EVENT, …RAW_TRACEPOINT, …TRACING: systemd itself loads none


def until(what: str, ready: Callable[[], Any]) -> Any:
    """What `ready` gives as soon as it gives something; when it does not, how the units are."""
    try:
        return truth.until(what, ready)
    except SystemExit:
        subprocess.run(["systemctl", "status", "--no-pager", "-l", AGENT, CONTROLLER], check=False)
        raise


def run(*command: str, fails: bool = False) -> str:
    """What the command says; it must end well, or, with `fails`, must not."""
    result = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
    if bool(result.returncode) != fails:
        raise SystemExit(f"{' '.join(command)}: exit code {result.returncode}\n{result.stdout}")
    return result.stdout


def show(name: str, unit: str = AGENT) -> str:
    """One of the unit's properties."""
    return run("systemctl", "show", "--value", "-p", name, unit).strip()


def main_pid(unit: str = AGENT) -> int:
    return int(show("MainPID", unit))


def journal(unit: str = AGENT) -> str:
    """What the unit has said since its last start or attempt at one."""
    run("journalctl", "--sync")
    return run(
        "journalctl", "--no-pager", "-o", "cat", f"_SYSTEMD_INVOCATION_ID={show('InvocationID', unit)}"
    )


def install() -> None:
    """As the head of the unit files says; the virtual environment is there already."""
    for unit in (AGENT, CONTROLLER):
        (UNITS / unit).write_text((BROUGHT / unit).read_text())
    run("systemctl", "daemon-reload")


def drop_in(text: str, unit: str = AGENT) -> None:
    """As `systemctl edit` would make it; no text: none."""
    file = UNITS / f"{unit}.d/override.conf"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text) if text else file.unlink(missing_ok=True)
    run("systemctl", "daemon-reload")


def newest(socket: str = SOCKET) -> Report | None:
    """The agent's last report; None where no agent answers."""
    try:
        return next(client.watch(socket, 1))
    except UnavailableError:
        return None


def first_reports() -> tuple[Report, Report]:
    """The first two reports of the agent, which has not run for long."""
    reports = client.watch(SOCKET, 100)
    first, second = next(reports), next(reports)
    if first.interval_ns or second.sequence != first.sequence + 1:
        raise SystemExit("the agent's first report is not among those that it has kept")
    return first, second


def job(key: str, report: Report | None) -> JobSample | None:
    """The job in the report."""
    for sample in report.jobs if report is not None else ():
        if f"{sample.identity.scheduler}/{sample.identity.id}" == key:
            return sample
    return None


def programs() -> set[int]:
    """The numbers of all BPF programs of the kinds that the agent loads."""
    return {number for number, kind in _loaded() if kind in _TRACING}


def _loaded() -> Iterator[tuple[int, int]]:
    lib = libbpf.library()
    number = ctypes.c_uint32()
    while lib.bpf_prog_get_next_id(number, ctypes.byref(number)) == 0:
        fd = lib.bpf_prog_get_fd_by_id(number)
        if fd < 0:  # it has gone meanwhile
            continue
        info, size = (ctypes.c_uint32 * 64)(), ctypes.c_uint32(256)
        lib.bpf_obj_get_info_by_fd(fd, ctypes.byref(info), size)
        os.close(fd)
        yield number.value, info[0]
