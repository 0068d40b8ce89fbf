"""Python stacks from a real job to whoever looks: real BPF, a real agent, a real controller."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.export import pprof
from expanse_ebpf.ship import remote
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import WatchProfileRequest

from .test_agent import ME, Start, job, run, start
from .test_node_socket import as_user

__all__ = ["run", "start"]  # fixtures
Started = Callable[..., tuple[str, "subprocess.Popen[bytes]"]]

WORK = """
import os, queue, threading, time
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
def spin():
    x = 0
    for i in range(10**5):
        x += i
def train():
    while True:
        spin()
threading.Thread(target=queue.Queue().get, daemon=True).start()
train()
"""
# Prints the parts that a user without root gets, or what they are told. Nothing can be imported any more.
LOOK = """
path, key, pid = sys.argv[1:]
parts = []
request = client.WatchProfileRequest(key=key, pid=int(pid))
try:
    for part in client.profile(path, request, lambda: len(parts) > 3):
        parts.append(part.pprof.hex())
    print(json.dumps(parts))
except client.UnavailableError as error:
    print(json.dumps(str(error)))
"""


def look(uid: int, socket: Path, key: str = "", pid: int = 0) -> set[str] | str:
    """The functions that the user sees, or the answer."""
    out, _ = as_user(uid, LOOK, str(socket), key, str(pid)).communicate(timeout=60)
    answer = json.loads(out)
    if isinstance(answer, str):
        return answer
    profiles = [pprof.loads(bytes.fromhex(part)) for part in answer]
    return {frame.name for p in profiles for stack in pprof.Reader(p).stacks() for frame in stack.frames}


@pytest.mark.slow
def test_the_stacks_of_a_job_reach_top_its_owner_and_the_store(
    start: Start, run: Started, tmp_path: Path
) -> None:
    node = start("--standalone", "--db", str(tmp_path / "reports.db"))
    address = next(line.split()[-1] for line in node.said().splitlines() if "controller on" in line)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    key, process = run("stacks", sys.executable, "-S", "-c", WORK)

    def seen(snapshot: dict[str, Any]) -> Any:
        python = (job(snapshot, key) or {}).get("python")
        return python and python["hottest"] and python["waiting"] and job(snapshot, key)["uid"] == 65534

    python = job(node.wait_for(seen, 30), key)["python"]  # type: ignore[index]
    assert python["hottest"]["function"] == "spin"
    assert python["waiting"]["function"].endswith("wait")
    assert python["hottest"]["line"] in (6, 7)
    # Its owner sees it, somebody else does not.
    assert {"spin", "train"} <= set(look(65534, node.socket, key))
    assert look(65533, node.socket, key) == f"no job {key} of yours is on this node"
    (pid,) = _pids(node.socket, key)
    assert {"spin", "train"} <= set(look(65534, node.socket, pid=pid))
    assert look(65533, node.socket, pid=pid) == f"no process {pid} of yours; it may have exited"
    # What is on the socket is small; the store has it all.
    assert all(not report.profiles for report in client.watch(str(node.socket), 100, lambda: True))
    before = time.time_ns()
    process.terminate()
    process.wait(15)
    deadline = time.monotonic() + 20
    while not (stored := remote.fetch_profile(address, key)).pprof:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    assert stored.from_ns < before <= stored.to_ns
    stacks = list(pprof.Reader(pprof.loads(stored.pprof)).stacks())
    assert {s.labels["job"] for s in stacks} == {key}
    assert {"spin"} <= {s.frames[0].name for s in stacks}
    on_cpu = sum(s.values[1] for s in stacks) / 1e9
    assert on_cpu == pytest.approx(sum(s.values[0] for s in stacks if s.values[1]) * 20_408_163 / 1e9)
    command = [*ME, "profile", "--controller", address, "--job", key, "--format", "html"]
    page = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout
    assert b"spin" in page
    command = [*ME, "profile", "--controller", address, "--job", f"{key}-0"]
    unknown = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert unknown.returncode == 3
    assert b"is stored" in unknown.stderr
    assert node.stop() == 0


def _pids(socket: Path, key: str) -> list[int]:
    return [process.pid for process in client.processes(str(socket), key).processes]


@pytest.mark.slow
def test_the_command_takes_the_agents_samples_or_its_own(start: Start, run: Started) -> None:
    node = start(EXPANSE_PYTHON_JOBS="slurm/*", EXPANSE_CPU_BPF_STATS="always")
    key, process = run("chosen", sys.executable, "-S", "-c", WORK)
    snapshot = node.wait_for(lambda s: (job(s, key) or {}).get("processes"))
    chosen = job(snapshot, key)
    assert chosen is not None
    assert chosen["python"] is None
    assert chosen["unavailable"]["python"] == "left out by the setting python.jobs"
    for options in ([], ["--rate", "99"], ["--pid", str(_pids(node.socket, key)[0])]):
        which = options if "--pid" in options else ["--job", key, *options]
        command = [*ME, "profile", *which, "--duration", "1.2", "--socket", str(node.socket), "--json"]
        result = subprocess.run(command, capture_output=True, timeout=60, check=True)
        said = json.loads(result.stdout)
        assert said["running"][0]["function"] == "spin", said
        assert said["rate_hz"] == (99 if "--rate" in options else 49)
        assert said["seconds"] >= 1.2
        assert said["resolved"] >= said["samples"] * 0.8
    # Nobody looks any more. What the sampling cost is in the collector's account.
    cost = node.wait_for(lambda s: "on_sample" in {p["name"] for p in s["collector"]["bpf"]["programs"]})
    (sampling,) = (p for p in cost["collector"]["bpf"]["programs"] if p["name"] == "on_sample")
    assert sampling["ns_per_s"] > 0
    assert sampling["runs_per_s"] > 5
    after = job(node.wait_for(lambda s: job(s, key)), key)
    assert after is not None
    assert after["python"] is None
    process.terminate()
    assert node.stop() == 0


def test_an_agent_without_the_source_says_so(start: Start, run: Started) -> None:
    node = start(EXPANSE_SOURCES_PYTHON="false")
    key, _ = run("off", "sleep", "60")
    snapshot = node.wait_for(lambda s: job(s, key))
    switched_off = "switched off (sources.python)"
    assert job(snapshot, key)["unavailable"]["python"] == switched_off  # type: ignore[index]
    (source,) = (s for s in snapshot["collector"]["sources"] if s["name"] == "python")
    assert (source["up"], source["reason"]) == (False, switched_off)
    words = "switched off: set sources.python = true"
    with pytest.raises(UnavailableError, match=words):
        list(client.profile(str(node.socket), WatchProfileRequest(key=key), lambda: True))
