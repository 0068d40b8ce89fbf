"""The real agent on a node with a PMU: which descriptors it holds, what its programs call, what it reports.

Usage: pmu_agent.py COUNTERS, which is the setting cpu.counters as TOML; writes /out/figures.json. Two jobs
take the CPU in turn meanwhile.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from pmu_kit import Ring, counters, make_group
from truth import run_ns, switches

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import libbpf
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report

SOCKET = "/tmp/agent.sock"
NAMES = ("a", "b")
CALL = 0x85  # the opcode of a call; of a helper when the source register is 0
READ = "bpf_perf_event_read_value"


def helper_offset(name: str) -> int:
    """What stands in a loaded program's call of a helper: its distance from the kernel's base for calls."""
    address = {}
    for line in Path("/proc/kallsyms").read_text().splitlines():
        place, _, symbol = line.split()[:3]
        if symbol in (name, "__bpf_call_base"):
            address[symbol] = int(place, 16)
    return address[name] - address["__bpf_call_base"]


def instructions(number: int) -> bytes:
    """A loaded program by its id, as the kernel has it."""
    library = libbpf.library()
    fd = library.bpf_prog_get_fd_by_id(ctypes.c_uint32(number))
    assert fd >= 0
    code = b""
    for _ in range(2):  # first to learn the length
        info, size = libbpf.ProgramInfo(), ctypes.c_uint32(ctypes.sizeof(libbpf.ProgramInfo))
        buffer = ctypes.create_string_buffer(len(code) or 1)
        if code:
            info.xlated_prog_len, info.xlated_prog_insns = len(code), ctypes.addressof(buffer)
        assert library.bpf_obj_get_info_by_fd(fd, ctypes.byref(info), size) == 0
        code = buffer.raw if code else bytes(info.xlated_prog_len)
    os.close(fd)
    return code


def calls(code: bytes, offset: int) -> int:
    """How often a program calls the helper at `offset`."""
    parsed = struct.iter_unpack("=BBhi", code)
    return sum(op == CALL and registers >> 4 == 0 and imm == offset for op, registers, _, imm in parsed)


def descriptors(pid: int) -> dict[str, Any]:
    """The agent's perf events, and the calls of READ in each of its programs."""
    offset = helper_offset(READ)
    events, programs = 0, {}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            target = str(fd.readlink())
            events += target == "anon_inode:[perf_event]"
            if target == "anon_inode:bpf-prog":
                info = Path(f"/proc/{pid}/fdinfo/{fd.name}").read_text().split()
                number = int(info[info.index("prog_id:") + 1])
                programs[number] = calls(instructions(number), offset)
    return {"perf events": events, "programs": len(programs), "reading": sorted(programs.values())}


def report(names: Collection[str] = NAMES) -> Report:
    """The first report whose tick begins from now on and that has jobs with these names."""
    now = time.time_ns()
    for found in client.watch(SOCKET):
        if found.time_ns > now and {job.identity.name for job in found.jobs} >= set(names):
            return found
    raise AssertionError("the agent hung up")


def kernels_own(pid: int) -> dict[str, int]:
    return {"run_ns": run_ns(pid), "context_switches": switches(pid)}


def main() -> None:
    Path("/tmp/config.toml").write_text(f"[agent]\ninterval_s = 0.3\n[cpu]\ncounters = {sys.argv[1]}\n")
    command = [
        "expanse-ebpf",
        "agent",
        "--config",
        "/tmp/config.toml",
        "--socket",
        SOCKET,
        "--state-dir",
        "/tmp",
    ]
    # The clock of Python stacks would be one more perf event for each CPU.
    agent = subprocess.Popen(command, env=os.environ | {"EXPANSE_SOURCES_PYTHON": "false"})
    while not Path(SOCKET).exists():
        time.sleep(0.1)
    report(())  # its programs are loaded now
    groups = [make_group(f"expanse-run-{name}") for name in NAMES]
    ring = Ring(300, (100_000, 50_000), groups)
    pids = [process.pid for process in ring.processes]
    before, was = report(), [kernels_own(pid) for pid in pids]
    ring.go()
    ring.wait()
    after, now = report(), [kernels_own(pid) for pid in pids]
    figures = {
        "held": descriptors(agent.pid),
        "unavailable": {source.name: dict(source.unavailable) for source in after.collector.sources},
        "before": {job.identity.name: counters(job.counters) for job in before.jobs},
        "after": {job.identity.name: counters(job.counters) for job in after.jobs},
        "system": counters(after.host.system),
        "kernel": {
            name: {figure: b[figure] - a[figure] for figure in b}
            for name, a, b in zip(NAMES, was, now, strict=True)
        },
    }
    Path("/out/figures.json").write_text(json.dumps(figures))
    ring.close()
    agent.terminate()
    assert agent.wait() == 0


if __name__ == "__main__":
    try:
        main()
    except UnavailableError as error:
        raise SystemExit(str(error)) from error
