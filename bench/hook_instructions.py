"""What the accounting hook and its flush cost in instructions, kernel and all, counted by a PMU.

In an emulated arm64 guest whose clock is its count of instructions (qemu -icount), so that the figures
repeat: they depend on the kernel and the processor's instruction set, not on the machine that measures.
Two processes of one real-time priority wake each other in turn; in the case "idle" one sleeps, and half
of the switches are to the idle task and half back. "above empty" is the difference to a program that
does nothing on the same hook. Each boot measures everything anew.

Usage: python -m bench.hook_instructions [--kernel 6.1] [--boots 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.guests import image
from tests.guests.conftest import INSIDE, Node

ROOT = Path(__file__).resolve().parent.parent
TIMES = 2000  # messages each way per case, and runs per program
COUNTERS = (0, 1, 2)
CASES = {"same job": "within a job", "idle": "to idle and back", "another job": "to another job"}
PROGRAMS = {"flush": "flush of one CPU", "scan": "scan for CPUs to flush"}


def compile_programs(folder: Path) -> list[Path]:
    """The C programs of tests/guests/inside/ and the BPF programs that do nothing, for arm64."""
    made = []
    for source in sorted(INSIDE.glob("pmu_*.c")):
        made.append(folder / source.stem)
        compiler = ["aarch64-linux-gnu-gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-static"]
        subprocess.run([*compiler, "-o", made[-1], source], check=True)
    made.append(folder / "empty.aarch64.bpf.o")
    compiler = ["clang", "-target", "bpf", "-mcpu=v3", "-O2", "-g", f"-I{ROOT}/bpf/include"]
    subprocess.run([*compiler, "-c", ROOT / "bench/empty.bpf.c", "-o", made[-1]], check=True)
    return made


def measure(node: Node, programs: list[Path], times: int = TIMES) -> dict[str, float]:
    """One boot: instructions per switch or run, by "CASE, HOOK"."""
    command = ["python3", "/payload/files/inside/pmu_hook.py", str(times)]
    output = node.run(command, programs).check().output
    figures: dict[str, float] = json.loads(output.splitlines()[-1])
    return figures


def above_empty(figures: dict[str, float]) -> dict[str, float]:
    """What is ours of each figure with a program of ours."""
    empty = {case: f"{case}, empty program" for case in CASES} | dict.fromkeys(PROGRAMS, "run, empty program")
    return {
        f"{case}, {counters} counters": figures[f"{case}, {counters} counters"] - figures[of]
        for case, of in empty.items()
        for counters in COUNTERS
    }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernel", default="6.1", choices=image.KERNELS)
    parser.add_argument("--boots", default=3, type=int)
    parser.add_argument("--json", action="store_true", help="every boot's figures instead of the table")
    options = parser.parse_args()
    boots = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        programs, wheel = compile_programs(folder), image.build_wheel(folder)
        node = Node(folder / "guest", wheel, "arm64", options.kernel, {"icount": True, "cpus": 1})
        for i in range(options.boots):
            print(f"boot {i + 1}/{options.boots}", file=sys.stderr)
            boots.append(measure(node, programs))
    if options.json:
        print(json.dumps({"kernel": node.kernel.release, "times": TIMES, "boots": boots}))
        return
    print(f"instructions, kernel {node.kernel.release}: median of {len(boots)} boots (lowest to highest)")
    columns = ("no hook", "empty program", *(f"above empty, {n} counters" for n in COUNTERS))
    print(f"{'switch':24}" + "".join(f"{column:>27}" for column in columns))
    ours = [above_empty(figures) for figures in boots]

    def row(case: str, hooks: tuple[str, ...]) -> str:
        cells = [spread([figures[f"{case}, {hook}"] for figures in boots]) for hook in hooks]
        cells += [spread([figures[f"{case}, {n} counters"] for figures in ours]) for n in COUNTERS]
        return "".join(f"{cell:>27}" for cell in cells)

    for case, label in CASES.items():
        print(f"{label:24}{row(case, ('no hook', 'empty program'))}")
    for program, label in PROGRAMS.items():
        print(f"{label:24}{'':54}{row(program, ())}")


if __name__ == "__main__":
    main()
