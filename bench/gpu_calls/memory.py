"""What a window takes of memory: of the agent, of its own process, and of the program that is looked at."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from bench.gpu_calls.stage import Extent, own_pages, until_mapped
from bench.python_stacks.running import pss_bytes, say
from expanse_ebpf.top import client
from tests.stand_ins.cuda import CudaStandIn, cuda_stand_in

ME = (sys.executable, "-m", "expanse_ebpf")
RATE = 10_000
_SETTLED = 8  # reports of the agent: imports, first reads
_LOOK_S = 0.1


def private(pid: int) -> dict[str, tuple[int, int]]:
    """By file: what a process has of its mappings for itself, and the anonymous part of it, in bytes."""
    found: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    path = ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):
            path = rest[4].rpartition("/")[2] if len(rest) > 4 else ""
        elif name in ("Private_Dirty:", "Private_Clean:"):
            found[path][0] += int(rest[0]) << 10
        elif name == "Anonymous:":
            found[path][1] += int(rest[0]) << 10
    return {path: (own, anonymous) for path, (own, anonymous) in found.items()}


@contextlib.contextmanager
def agent(folder: Path) -> Iterator[int]:
    file = folder / "config.toml"
    file.write_text(
        f"[agent]\nsocket = '{folder}/s'\nstate_dir = '{folder}'\n[sources]\npython = false\ngpu = false\n"
    )
    process = subprocess.Popen([*ME, "agent", "--config", str(file)], stderr=subprocess.DEVNULL)
    try:
        while not (folder / "s").exists():
            if process.poll() is not None:
                sys.exit(f"gpu_calls: the agent ended with status {process.returncode}")
            time.sleep(0.1)
        yield process.pid
    finally:
        process.terminate()
        process.wait(20)


@contextlib.contextmanager
def job(cuda: CudaStandIn, name: str) -> Iterator[int]:
    """A hammer as a job; the hammer's pid."""
    command = [*ME, "run", "--name", name, "--", str(cuda.program("hammer-shared")), str(RATE), "3600"]
    process = subprocess.Popen(command, env=cuda.environment(), stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not (found := children.read_text().split()):
            if time.monotonic() > until:
                sys.exit("gpu_calls: `expanse-ebpf run` has started nothing")
            time.sleep(0.02)
        until_mapped(int(found[0]), "libcuda.so.1")
        yield int(found[0])
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def window_of(agent: int) -> int:
    """The window's process, 0 while there is none."""
    for path in Path(f"/proc/{agent}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            with suppress(OSError):
                if b"tracing.window" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
    return 0


def memory(extent: Extent) -> dict[str, Any]:
    """Of the agent before, in and after a window through the real commands, and of the others."""
    say(f"memory: a window of {extent.memory_s:g} s")
    cuda, name = cuda_stand_in(), f"bench-{os.getpid()}"
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        target = stack.enter_context(job(cuda, name))
        collector = stack.enter_context(agent(folder))
        for number, report in enumerate(client.watch(f"{folder}/s", 1)):
            if number >= _SETTLED and any(each.identity.id == name for each in report.jobs):
                break
        row: dict[str, Any] = {"agent_before_bytes": pss_bytes(collector)}
        before = private(target)
        said = [f"--seconds={extent.memory_s:g}", "--share=100%", "--cost=100%", f"--socket={folder}/s"]
        trace = subprocess.Popen(
            [*ME, "trace", f"run/{name}", *said, "--json"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        most = {"agent": 0, "window": 0}
        within = before
        while trace.poll() is None:
            most["agent"] = max(most["agent"], pss_bytes(collector))
            process = window_of(collector)
            if process:
                with suppress(OSError, ValueError):
                    most["window"] = max(most["window"], pss_bytes(process))
            now = private(target)
            within = max(within, now, key=lambda each: sum(anonymous for _, anonymous in each.values()))
            time.sleep(_LOOK_S)
        if trace.returncode:
            assert trace.stderr is not None
            sys.exit(f"gpu_calls: the window failed: {trace.stderr.read().decode().strip()}")
        after = private(target)
        time.sleep(2)
        row |= {
            "agent_within_bytes": most["agent"],
            "agent_after_bytes": pss_bytes(collector),
            "window_bytes": most["window"],
            "target_within": _added(before, within),
            "target_after": _added(before, after),
            "target_later": _added(before, private(target)),
            "pages_later": {path.name: own_pages(target, path.name) for path in (cuda.runtime, cuda.driver)},
        }
    return {"memory": row}


def _added(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]]) -> dict[str, int]:
    """By file, the anonymous bytes that there are more."""
    return {
        path or "no file": more
        for path, (_, anonymous) in after.items()
        if (more := anonymous - before.get(path, (0, 0))[1])
    }
