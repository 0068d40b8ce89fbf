"""Deep traces of a job on two nodes: a controller, two agents, the commands, and a job that launches kernels.

Both agents run on this machine, each as a node of its own: both see the job, so a window is on both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pytest

from expanse_controller.rules import rule
from expanse_controller.rules.engine import LOOK_S
from expanse_controller.windows import ANSWER_S
from expanse_ebpf.ship import remote

from .conftest import MARK, ROOT, program_names, remaining
from .controller.process import COMMAND as CONTROLLER
from .controller.process import Controller, eventually
from .controller.test_metrics import named, scrape
from .export.test_perfetto import read
from .kernel.test_accounting import programs_of
from .stand_ins.cuda import PROGRAMS, CudaStandIn, cuda_stand_in
from .stand_ins.nvml import WORKING, StandIn
from .test_agent import ME, Node
from .test_agent_traces import wait_until_gone

pytestmark = pytest.mark.slow
NAMES = ("a", "b")
TIMES = 100  # steps of train.py
PER_STEP = 9  # launches
# Launches a kernel a thousand times a second, and keeps a CPU busy in between.
BUSY = """
import ctypes, time
runtime = ctypes.CDLL("libcudart.so.13")
model = ctypes.CDLL("libmodel.so")
class Dim3(ctypes.Structure):
    _fields_ = [(axis, ctypes.c_uint) for axis in "xyz"]
stub = ctypes.c_void_p.in_dll(model, "kernels")
launch = runtime.cudaLaunchKernel
launch.argtypes = (ctypes.c_void_p, Dim3, Dim3, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
one = Dim3(1, 1, 1)
def step():
    launch(stub, one, one, None, 0, None)
    until = time.monotonic() + 0.001
    while time.monotonic() < until: pass
print("ready", flush=True)
while True: step()
"""
RULE = """
- name: idle_while_busy
  about: The GPU stands still while a CPU works.
  when: gpus >= 1.0 && gpu_busy < 0.1 && cpu_cores >= 0.2
  for: 5s
  cooldown: 15s
  window: {seconds: 2, stacks: true}
"""


@dataclass
class Cluster:
    """A controller and its nodes."""

    folder: Path
    controller: Controller
    nodes: dict[str, Node]

    @property
    def address(self) -> str:
        return self.controller.address

    def trace(self, key: str, *options: str) -> subprocess.Popen[str]:
        """`expanse-ebpf trace`, for as much of the run and at what cost it likes."""
        command = [*ME, "trace", key, "--controller", self.address, "--share", "100%", "--cost", "100%"]
        return subprocess.Popen(
            [*command, "--json", *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def listed(self, *options: str) -> Any:
        """What `expanse-ebpf traces --json` prints."""
        return said(*ME, "traces", "--controller", self.address, "--json", *options)

    def rules(self) -> list[dict[str, Any]]:
        """What `expanse-controller rules show --json` prints."""
        return states(self.address)

    def window_processes(self) -> list[int]:
        return [pid for node in self.nodes.values() for pid in windows_of(node.process.pid)]

    def both_have(self, key: str) -> None:
        """Wait until the controller knows the job on every node."""

        def known() -> bool:
            reports = [snapshot.current for snapshot in remote.snapshot(self.address)]
            jobs = [{f"run/{job.identity.id}" for job in report.jobs if job.processes} for report in reports]
            return len(jobs) == len(NAMES) and all(key in of_node for of_node in jobs)

        eventually(known)


def said(*command: str) -> Any:
    result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def states(address: str) -> list[dict[str, Any]]:
    """How the rules stand, by `expanse-controller rules show`."""
    return list(said(*CONTROLLER, "rules", "show", "--controller", address, "--json")["states"])


@pytest.fixture(scope="module")
def cuda() -> CudaStandIn:
    return cuda_stand_in()


@pytest.fixture
def gpu(tmp_path: Path) -> StandIn:
    """One GPU, which does nothing."""
    made = StandIn(tmp_path / "nvml", devices=1)
    made.auto(0, **{**WORKING, "utilization": 0})
    return made


Start = Callable[..., Node]


@pytest.fixture
def start(tmp_path: Path, gpu: StandIn) -> Iterator[Start]:
    nodes: list[Node] = []

    def one(name: str, *options: str) -> Node:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        environment = {
            "EXPANSE_AGENT_NODE_NAME": name,
            "EXPANSE_GPU_LIBRARY": str(gpu.library),
            "EXPANSE_GPU_POD_RESOURCES": "",
            "EXPANSE_TRACING_RUN_SHARE": "1",
            "EXPANSE_TRACING_COST_SHARE": "1",
        }
        nodes.append(Node(folder, environment, options))
        return nodes[-1]

    yield one
    for node in nodes:
        if node.process.poll() is None:
            assert node.stop() == 0, node.said()
        assert "Traceback" not in node.said()
    assert remaining(probes, set()) == set()


@pytest.fixture
def cluster(tmp_path: Path, start: Start) -> Iterator[Callable[..., Cluster]]:
    made: list[Cluster] = []

    def one(*options: str) -> Cluster:
        controller = Controller(tmp_path / "reports.db", *options)
        made.append(Cluster(tmp_path, controller, {}))
        for name in NAMES:
            made[-1].nodes[name] = start(name, "--controller", controller.address)
        return made[-1]

    yield one
    for each in made:
        for node in each.nodes.values():
            if node.process.poll() is None:
                node.stop()
        each.controller.kill()


@dataclass
class Job:
    """What runs under `expanse-ebpf run`."""

    key: str
    process: subprocess.Popen[str]
    pid: int

    def finish(self) -> tuple[int, str]:
        """Let it go on; its exit code and what it prints."""
        out, _ = self.process.communicate("\n", timeout=60)
        return self.process.returncode, out


Run = Callable[..., Job]


@pytest.fixture
def run(cuda: CudaStandIn) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def one(name: str, *command: str, **environment: str) -> Job:
        name = f"{name}-{os.getpid()}"
        process = subprocess.Popen(
            [*ME, "run", "--name", name, "--", sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=cuda.environment(**environment),
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        (pid,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return Job(f"run/{name}", process, int(pid))

    yield one
    for process in started:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=15)


def train(run: Run, name: str) -> Job:
    return run(name, str(PROGRAMS / "train.py"), str(TIMES))


def probes() -> set[str]:
    """The programs of windows that are in the kernel, and their links; not those of somebody else."""
    names = program_names([(ROOT / "bpf/gpu_calls.bpf.c").read_text()])
    assert {"on_call", "on_return"} <= names
    found = set()
    ids = {p["id"] for p in bpftool("prog") if p.get("name") in names}
    ids -= held_by_others() if ids else set()
    found |= {f"program {number}" for number in ids}
    return found | {f"link {link['id']}" for link in bpftool("link") if link.get("prog_id") in ids}


def held_by_others() -> set[int]:
    """Programs of processes that this run of the tests has not begun: another run's windows, say."""
    own = f"{MARK}={os.environ.get(MARK, '')}".encode()
    held: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if own not in (folder / "environ").read_bytes().split(b"\0"):
                held |= programs_of(int(folder.name))
    return held


def bpftool(what: str) -> list[dict[str, Any]]:
    shown = subprocess.run(["bpftool", "-j", what, "show"], capture_output=True, check=True)
    return list(json.loads(shown.stdout or "[]"))


def breakpoints(pid: int) -> int:
    """Bytes of the code of a process that are not those of its files."""
    changed = 0
    with open(f"/proc/{pid}/mem", "rb", 0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            found = re.match(r"(\w+)-(\w+) r-xp (\w+) \S+ \d+ +(/.*)", line)
            if not found:
                continue
            begin, end, offset = (int(part, 16) for part in found.groups()[:3])
            memory.seek(begin)
            with open(found[4], "rb") as file:
                file.seek(offset)
                there = file.read(end - begin)
            here = memory.read(len(there))
            changed += sum(a != b for a, b in zip(here, there, strict=True)) if here != there else 0
    return changed


def wait_until_open(stream: IO[str], names: tuple[str, ...] = NAMES) -> None:
    """Until `trace` says that the window is open on these nodes."""
    missing = {f"{name}: open" for name in names}
    while missing:
        line = stream.readline()
        assert line, f"it ended before {missing}"
        missing.discard(line.strip())


def windows_of(agent: int) -> list[int]:
    """Processes of windows that this agent has begun."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"tracing.window" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def told_apart(output: str) -> dict[str, Any]:
    """What train.py says of itself, its pid aside."""
    said = json.loads(output)
    del said["pid"]
    return dict(said)


def test_a_window_is_on_both_nodes_at_the_same_time_and_both_traces_come(
    cluster: Callable[..., Cluster], run: Run
) -> None:
    here = cluster()
    untraced = train(run, "untraced").finish()
    job = train(run, "traced")
    here.both_have(job.key)
    assert breakpoints(job.pid) == 0
    file = here.folder / "traced.pftrace"
    command = here.trace(job.key, "--seconds", "20", "--stacks", "-o", str(file))
    assert command.stderr is not None
    wait_until_open(command.stderr)
    assert breakpoints(job.pid) > 0
    assert len(here.window_processes()) == 2
    assert probes()
    # `top` says so
    seen = here.nodes["a"].wait_for(lambda s: any(j["key"] == job.key and j["window"] for j in s["jobs"]))
    window = next(j["window"] for j in seen["jobs"] if j["key"] == job.key)
    assert (window["state"], window["rule"], window["seconds"]) == ("open", None, 20)
    # Without a file of rules the shipped ones are looked at.
    eventually(lambda: {state["rule"] for state in here.rules()} == {r.name for r in rule.shipped()})
    code, output = job.finish()
    # It is as if nobody had looked on.
    assert (code, told_apart(output)) == (untraced[0], told_apart(untraced[1]))
    assert code == 0
    launches = told_apart(output)["launches"]
    assert launches == TIMES * PER_STEP
    out, errors = command.communicate(timeout=60)
    assert command.returncode == 0, errors
    found = json.loads(out)
    assert found["window"] == window["id"]
    assert [node["node"] for node in found["nodes"]] == list(NAMES)
    for node in found["nodes"]:
        assert (node["state"], node["launches"], node["lost"]) == ("done", launches, None)
    of_nodes = {figures["node"]: figures["launches"] for figures in found["summary"]["nodes"]}
    assert of_nodes == dict.fromkeys(NAMES, launches)
    begins = [node["from_ns"] for node in found["nodes"]]
    listed = here.listed(job.key)
    assert {(trace["window"], trace["node"]) for trace in listed} == {(window["id"], name) for name in NAMES}
    assert all(trace["bytes"] for trace in listed)
    (start_ns,) = {starts(here, window["id"])[name] for name in NAMES}
    assert all(0 <= begin - start_ns < 0.3e9 for begin in begins), [begin - start_ns for begin in begins]
    tracks, events = read(file.read_bytes())
    assert {f"node {name}" for name in NAMES} <= {track.name for track in tracks.values()}
    assert sum(event.category == "launch" for event in events) == 2 * launches
    again = here.folder / "again.pftrace"
    stored = here.listed("--window", window["id"], "-o", str(again))
    assert stored == {**found, "file": str(again)}
    assert again.read_bytes() == file.read_bytes()


def starts(here: Cluster, window: str) -> dict[str, int]:
    """When the window was to begin on each node."""
    return {trace.node: trace.status.start_ns for trace in remote.traces(here.address, window=window)}


def test_a_rule_opens_a_window_with_its_evidence_where_the_jobs_budget_allows_it(
    cluster: Callable[..., Cluster], run: Run, tmp_path: Path
) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(RULE)
    here = cluster("--rules", str(file), "--metrics-listen", "127.0.0.1:0")
    job, looked_at = (run(name, "-c", BUSY, CUDA_VISIBLE_DEVICES="0") for name in ("busy", "looked-at"))
    for one in (job, looked_at):
        here.both_have(one.key)
    # Somebody has had a window of the second job when the rule wants one.
    command = here.trace(looked_at.key, "--seconds", "1")
    _, errors = command.communicate(timeout=30)
    assert command.returncode == 0, errors

    def firing(one: Job) -> dict[str, Any] | None:
        return next((state for state in here.rules() if state["job"] == one.key and state["window"]), None)

    def by_rule(one: Job) -> list[dict[str, Any]] | None:
        """The rule's window on both nodes, once it is over."""
        found = [trace for trace in here.listed(one.key) if trace["rule"]]
        return found if found and not {trace["state"] for trace in found} & {"waiting", "open"} else None

    first = patient(lambda: firing(job), 60)  # the third look: a rate needs two, and the rule 5 s
    fired = time.monotonic()
    assert (first["rule"], first["state"], first["reason"]) == ("idle_while_busy", "firing", "")
    evidence = first["evidence"]
    assert (evidence["gpus"], evidence["gpu_busy"]) == (2, 0)
    assert evidence["cpu_cores"] >= 0.2
    for trace in patient(lambda: by_rule(job), 20):
        assert (trace["window"], trace["rule"]) == (first["window"], "idle_while_busy")
        assert (trace["state"], trace["reason"]) == ("done", None)
        assert {one["name"]: one["value"] for one in trace["evidence"]} == evidence
        assert trace["launches"] > 100
    eventually(lambda: all(trace["bytes"] for trace in here.listed(job.key)))
    found = here.listed("--window", first["window"])
    assert {node["node"] for node in found["nodes"]} == set(NAMES)
    assert found["summary"]["lines"][0]["function"] == "step"
    refused = patient(lambda: by_rule(looked_at), 20)
    assert [trace["node"] for trace in refused] == ["b", "a"]
    for trace in refused:
        assert (trace["state"], trace["from_ns"], trace["bytes"]) == ("budget", None, None)
        why = r"a rule may open the job's next window in \d+ s \(tracing\.pause_s\)"
        assert re.fullmatch(why, trace["reason"])
    listed = [*ME, "traces", looked_at.key, "--controller", here.address]
    table = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
    assert table.count("tracing.pause_s") == 2
    # By the next look the rule is still true, and its cooldown is not over.
    patient(lambda: time.monotonic() > fired + LOOK_S + 1, 60)

    def still() -> dict[str, Any] | None:
        """The rule's state, looks at which a busy machine had no figure of a GPU aside."""
        return state if (state := firing(job)) and state["state"] == "firing" else None

    assert patient(still, 60)["window"] == first["window"]
    firings = named(scrape(here.controller.metrics), "expanse_controller_rule_firings_total")
    assert {dict(labels)["rule"]: value for labels, value in firings.items()} == {"idle_while_busy": 2}
    assert breakpoints(job.pid) == 0


def patient(condition: Callable[[], Any], seconds: float) -> Any:
    """As `eventually`, for what the rules' clock has a part in."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, "it has not come true"
        time.sleep(0.3)
    return value


def test_of_a_node_whose_agent_is_killed_no_probe_stays_and_the_others_trace_comes(
    cluster: Callable[..., Cluster], run: Run, start: Start
) -> None:
    here = cluster("--no-rules")
    job = run("killed", "-c", BUSY)
    here.both_have(job.key)
    seconds = 8
    command = here.trace(job.key, "--seconds", str(seconds))
    assert command.stderr is not None
    wait_until_open(command.stderr)
    dead = here.nodes["a"]
    orphans = windows_of(dead.process.pid)
    assert len(orphans) == 1
    dead.process.kill()
    dead.process.wait()
    wait_until_gone(orphans)
    start("a", "--controller", here.address)  # as systemd does it
    out, errors = command.communicate(timeout=seconds + ANSWER_S + 10)
    assert command.returncode == 0, errors
    assert "a: failed: a says nothing of it any more: its agent was started anew" in errors
    found = json.loads(out)
    assert [(node["node"], node["state"]) for node in found["nodes"]] == [("a", "failed"), ("b", "done")]
    assert found["nodes"][1]["launches"] == found["summary"]["launches"] > 100
    assert {(trace["node"], trace["state"]) for trace in here.listed(job.key)} == {
        ("a", "failed"),
        ("b", "done"),
    }
    assert breakpoints(job.pid) == 0
    assert remaining(probes, set()) == set()
    assert job.process.poll() is None


def test_a_controller_that_is_killed_in_a_window_gets_its_traces_once_it_runs_again(
    cluster: Callable[..., Cluster], run: Run
) -> None:
    here = cluster("--no-rules")
    job = run("goes-on", "-c", BUSY)
    here.both_have(job.key)
    command = here.trace(job.key, "--seconds", "3")
    assert command.stderr is not None
    wait_until_open(command.stderr)
    here.controller.kill()
    out, errors = command.communicate(timeout=20)
    lost = re.search(r"the nodes go on with window ([0-9a-f]{16}), and it is stored once", errors)
    assert (command.returncode, out) == (1, "")
    assert lost, errors
    processes = here.window_processes()
    assert len(processes) == 2
    wait_until_gone(processes)
    assert breakpoints(job.pid) == 0
    here.controller = Controller(here.controller.db, "--no-rules", port=here.controller.port)
    patient(lambda: all(trace["bytes"] for trace in here.listed(job.key)), 30)
    found = here.listed("--window", lost[1])
    assert [(node["node"], node["state"]) for node in found["nodes"]] == [("a", "done"), ("b", "done")]
    assert all(figures["launches"] > 100 for figures in found["summary"]["nodes"])


def test_the_controller_beside_an_agent_has_the_shipped_rules(start: Start, run: Run, tmp_path: Path) -> None:
    node = start("alone", "--standalone", "--db", str(tmp_path / "alone.db"))
    address = next(line.split()[-1] for line in node.said().splitlines() if "controller on" in line)
    job = run("alone", "-c", BUSY, CUDA_VISIBLE_DEVICES="0")

    def looked_at() -> set[str]:
        return {state["rule"] for state in states(address) if state["job"] == job.key}

    patient(lambda: looked_at() == {one.name for one in rule.shipped()}, 40)
