"""A first look at a node with real GPUs, in about two minutes: what the collector finds there and what not.

Each step is a process of its own with a deadline; one that fails or hangs is told and the next goes on.
Writes smoke.json, smoke.txt and the reports of each watch into the folder, and prints smoke.txt. The exit
code is 0 when every step did what it could, and when there is no driver; 1 when a step failed.
docs/gpu-runs/README.md says what to do with the outcome.

    python -m bench.gpu_smoke --out FOLDER [--library PATH] [--quick]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench.gpu_smoke import text

BEGIN_S = 30.0  # of a load: the context, and translating the kernel
LEAST_S = 4  # of a watch: the first round of each figure only begins
# What the GPU does, for how many seconds it is watched, and the share of the time in which it works.
WATCHES = {
    "idle": (8, "", 0.0),
    "fp32": (10, "fp32", 1.0),
    "fp32 half of the time": (14, "fp32", 0.5),
    "fp64": (6, "fp64", 1.0),
    "tensor": (6, "tensor", 1.0),
    "memset": (6, "memset", 1.0),
}
NO_DRIVER = (9, 12)  # NVML's errors: the driver is not loaded, there is no library
SMI = (
    *("index", "uuid", "utilization.gpu", "memory.used", "memory.total", "power.draw", "temperature.gpu"),
    *("clocks.sm", "clocks.mem", "pcie.link.gen.current", "persistence_mode", "mig.mode.current"),
)


def ask(command: list[str], deadline_s: float) -> tuple[str, str]:
    """What a command prints, and why it failed; a hanging one is killed and left behind."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except OSError as error:
        return "", f"{command[0]}: {error.strerror}"
    try:
        output, errors = process.communicate(timeout=deadline_s)
    except subprocess.TimeoutExpired:
        process.kill()
        output = ""
        with contextlib.suppress(subprocess.TimeoutExpired):
            output, _ = process.communicate(timeout=0.5)
        return output, f"no end within {deadline_s:g} s"
    if process.returncode:
        last = errors.strip().rpartition("\n")[2]
        return output, f"status {process.returncode}: {last}"
    return output, ""


class Smoke:
    """The steps, and what they have found."""

    def __init__(self, out: Path, library: str, quick: bool) -> None:
        self.out = out
        self.found: dict[str, Any] = {}
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self._library = library
        self._quick = quick

    def step(self, name: str, deadline_s: float = 20.0) -> dict[str, Any]:
        """Run a step of bench.gpu_smoke.steps; what it says, as far as it came."""
        command = [sys.executable, "-m", "bench.gpu_smoke.steps", name, "--library", self._library]
        print(f"{name} …", file=sys.stderr)
        output, why = ask(command, deadline_s)
        said: dict[str, Any] = {}
        with contextlib.suppress(ValueError):  # a library that prints, or the step was killed amid a line
            for line in output.splitlines():
                said |= json.loads(line)
        if why or not said:
            self.failed[name] = why or "it said nothing"
        return said

    def begin(self) -> int:
        """What there is; NVML's error, 0 for none or when that cannot be told."""
        self.found["when"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.found["kernel"] = f"{platform.release()} {platform.machine()}"
        self.found["python"] = platform.python_version()
        self.found["root"] = os.geteuid() == 0
        with contextlib.suppress(OSError):
            self.found["driver's own words"] = Path("/proc/driver/nvidia/version").read_text().strip()
        self.found["device files"] = sorted(map(str, Path("/dev").glob("nvidia*")))
        command = [sys.executable, "-EsP", "-m", "expanse_ebpf.nvml.worker", "--once", "--profiler"]
        command += ["--library", self._library] if self._library else []
        output, why = ask(command, 20.0)
        lines = [
            json.loads(line)
            for line in output.splitlines()
            if line.startswith('{"round"') and line[-1] == "}"
        ]
        nvml = next((line["nvml"] for line in lines if "nvml" in line), None)
        if nvml is None:
            self.failed["worker"] = why
            return 0
        if nvml.get("code"):
            return int(nvml["code"])
        self.found["nvml"] = nvml
        self.found["devices"] = [line["device"] for line in lines if "device" in line]
        return 0

    def measure(self) -> None:
        """Everything that needs a GPU."""
        for name in ("calls", "buffers", "events", "mig"):
            self.found[name] = self.step(name)
        self.found["watches"] = {}
        for name, (seconds, kind, duty) in WATCHES.items():
            length = LEAST_S if self._quick else seconds
            load = Load(kind, length + 20, duty)
            watch = None
            if load.why:
                self.skipped[name] = load.why
            else:
                watch = self._watch(name, length, load.pid)
            worked = load.end()
            if watch is not None:
                self.found["watches"][name] = {**watch, "worked": worked}

    def _watch(self, name: str, seconds: int, pid: int) -> Any:
        print(f"{name}, {seconds} s …", file=sys.stderr)
        file = self.out / f"reports-{name.replace(' ', '-')}.jsonl"
        command = [sys.executable, "-m", "bench.gpu_smoke.steps", "watch", "--seconds", str(seconds)]
        command += ["--pid", str(pid), "--file", str(file), "--library", self._library]
        watch = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds / 2 + 1)  # to the middle of it, all figures flowing
        smi = self._nvidia_smi()
        try:
            output, errors = watch.communicate(timeout=seconds + 20)
            found = json.loads(output)
        except (subprocess.TimeoutExpired, ValueError):
            watch.kill()
            last = errors.strip().rpartition("\n")[2] if watch.returncode else "no end"
            self.failed[f"watch: {name}"] = last
            return None
        found["nvidia-smi"] = smi
        return found

    def _nvidia_smi(self) -> Any:
        """NVIDIA's own tool at the same time; by UUID."""
        if self._library:
            return {"missing": "it would ask another library"}
        output, why = ask(
            ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader,nounits"], 15.0
        )
        if why:
            return {"missing": why}
        rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines()]
        return {
            "time": time.time(),
            **{row[1]: dict(zip(SMI, row, strict=True)) for row in rows if len(row) > 1},
        }


class Load:
    """Work on the first GPU; `pid` of who does it, and `why` it cannot be had. No kind: nobody (0)."""

    def __init__(self, kind: str, seconds: float, duty: float) -> None:
        self.pid, self.why = 0, ""
        self._process: subprocess.Popen[str] | None = None
        if not kind:
            return
        command = [sys.executable, "-m", "bench.gpu_smoke.load", "--kind", kind]
        command += ["--seconds", str(seconds), "--duty", str(duty)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        if not select.select([self._process.stdout], [], [], BEGIN_S)[0]:
            self.why = f"the load has not begun within {BEGIN_S:g} s"
        elif not self._process.stdout.readline():
            self.why = self._process.stderr.read().strip().rpartition("\n")[2] or "the load has ended"
        else:
            self.pid = self._process.pid

    def end(self) -> float | None:
        """The share of the time in which it has worked; None when it does not tell."""
        if self._process is None:
            return None
        self._process.terminate()
        try:
            return float(json.loads(self._process.communicate(timeout=5)[0])["duty"])
        except (subprocess.TimeoutExpired, ValueError):
            self._process.kill()
            return None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder, made if it is not there")
    parser.add_argument("--library", default="", help="NVML's path; the system's own if not given")
    parser.add_argument("--quick", action="store_true", help="shorter watches, to see that it runs")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    smoke = Smoke(options.out, options.library, options.quick)
    code = smoke.begin()
    try:
        if code == 0:
            smoke.measure()
    finally:  # whatever happens, what was found on a machine that is lent for minutes is kept
        smoke.found |= {"failed": smoke.failed, "skipped": smoke.skipped, "nvml error": code}
        (options.out / "smoke.json").write_text(json.dumps(smoke.found, indent=1))
    said = text.no_driver(smoke.found) if code else text.text(smoke.found)
    (options.out / "smoke.txt").write_text(said)
    print(said)
    sys.exit(1 if smoke.failed or code not in (0, *NO_DRIVER) else 0)


if __name__ == "__main__":
    main()
