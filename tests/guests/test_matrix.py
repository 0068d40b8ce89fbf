"""The collector on other kernels: what they can do, and that all figures are right; docs/kernel-support.md.

With WRITE_KERNEL_SUPPORT=1 in the environment the rows of the kernels that were run are written anew.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from expanse_ebpf.kernel import features
from tests.guests import traces
from tests.guests.conftest import Node

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/kernel-support.md"
WRITE = "WRITE_KERNEL_SUPPORT"
COMMAND = f"{WRITE}=1 .venv/bin/python -m pytest tests/guests/test_matrix.py --matrix"

KERNELS = (
    *(("5.10", "amd64"), ("6.1", "amd64"), ("6.12", "amd64"), ("newest", "amd64")),
    *(("6.1", "arm64"), ("6.12", "arm64")),
)
QUICK = (("5.10", "amd64"), ("6.12", "arm64"))  # the least able kernel, and the other architecture
# What a column of the table is called, and the finding of `check` that it shows.
COLUMNS = {
    "BTF": "btf",
    "collector's programs": "collector's programs",
    "ring buffer": "bpf ring buffer",
    **{name: name for name in features.ABILITIES},
    "deep traces": "deep traces",
}
# How the functions of a program are probed, where they can be.
METHODS = {"6.1": "perf", "6.12": "uprobe_multi", "newest": "uprobe_multi"}
IN_THE_GUEST = """
set -e
cd /payload/files/inside
python3 figures.py
python3 figures_agent.py
python3 stacks.py
python3 traces.py
expanse-ebpf check --json >/out/check.json
"""

TEXT = """# Kernels

What the collector finds on Debian's kernels, written by `tests/guests/test_matrix.py`: it boots each of them
in an emulated machine and asks `expanse-ebpf check` there. A test fails when a kernel does something else
than this page says; then this writes the page anew:

    {command}

"newest" is the newest kernel in Debian sid. The collector is developed on a 6.18 kernel.

{abilities}

None of these is required but BTF, the programs and the ring buffer. Without the others:

{without}

On each of these kernels every BPF program passes the verifier and is put on its hook. Then two jobs and a
process of no job work on one CPU, and three processes on two. Context switches, page faults, run time,
run-queue wait, migrations, forks, executions and exits of each job must be those of `/proc/PID/status`,
`stat`, `schedstat` and `sched` and of the cgroup's `cpu.stat`, and the jobs with what belongs to none must
come to what `/proc/schedstat` and `/proc/stat` have for the whole machine. Cgroups that are made, removed
and renamed must be noticed, and those below a job's own be the job's. At last the whole agent watches a job
that `expanse-ebpf run` has started: its figures must be right, and nothing may be missing without a reason.
Python stacks of a process that works, of one that it has forked and of a thread that waits must have the
right names and come to the CPU time and to the time waited. A window of calls is opened on programs with
stand-ins for CUDA's libraries: each call must be counted once however the libraries call or jump to each
other, launches must have their shape and the Python stack that the program itself has seen, and
synchronisations their duration. Where there can be no deep traces, a window must say why.

## The programs' size

As of the release named. "Verified" is how many instructions the verifier went through for the program that
gave it the most work; 1,000,000 are its limit. Kernels before 5.16 do not tell.

{sizes}
"""

Key = tuple[str, str]
Make = Callable[..., Node]


class Table(NamedTuple):
    """A Markdown table whose rows are known by kernel and architecture."""

    titles: tuple[str, ...]
    rows: dict[Key, tuple[str, ...]]

    @classmethod
    def find(cls, titles: Iterable[str], text: str) -> Table:
        """The table with these titles, and none others, in a text; without rows when it is not there."""
        table = cls(("kernel", "architecture", *titles), {})
        _, _, rest = text.partition(table._line(table.titles))
        for line in rest.splitlines()[2:]:
            if not line.startswith("|"):
                break
            kernel, architecture, *cells = (cell.strip() for cell in line.strip("|").split("|"))
            table.rows[kernel, architecture] = tuple(cells)
        return table

    def __str__(self) -> str:
        rows = ((*key, *self.rows[key]) for key in KERNELS if key in self.rows)
        return "\n".join(map(self._line, (self.titles, ("---",) * len(self.titles), *rows)))

    @staticmethod
    def _line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"


class Document(NamedTuple):
    """docs/kernel-support.md."""

    abilities: Table
    sizes: Table

    @classmethod
    def read(cls, text: str) -> Document:
        sizes = ("release", "programs", "instructions", "verified")
        return cls(Table.find(COLUMNS, text), Table.find(sizes, text))

    def __str__(self) -> str:
        without = (
            f"- {name} (Linux {major}.{minor}): {words}."
            for name, ((major, minor), words) in features.ABILITIES.items()
        )
        return TEXT.format(
            command=COMMAND, abilities=self.abilities, without="\n".join(without), sizes=self.sizes
        )


def abilities(check: dict[str, Any]) -> tuple[str, ...]:
    """What `check --json` says of each of COLUMNS."""
    status = {finding["name"]: finding["status"] for finding in check["findings"]}
    return tuple("yes" if status[name] == "ok" else "no" for name in COLUMNS.values())


def sizes(release: str, objects: dict[str, dict[str, dict[str, int | None]]]) -> tuple[str, ...]:
    """Number of programs, instructions of all, and the most that were verified for one."""
    programs = [(name, size) for programs in objects.values() for name, size in programs.items()]
    instructions = sum(size["instructions"] or 0 for _, size in programs)
    verified, most = max((size["verified"] or 0, name) for name, size in programs)
    shown = f"{verified:,} (`{most}`)" if verified else "not told"
    return release, str(len(programs)), f"{instructions:,}", shown


def same_as_known(key: Key, known: tuple[str, ...] | None, now: tuple[str, ...]) -> None:
    """Fails when a kernel's row is not in the document, or says otherwise."""
    was = dict(zip(COLUMNS, known, strict=True)) if known and len(known) == len(COLUMNS) else None
    assert dict(zip(COLUMNS, now, strict=True)) == was, (
        f"{DOCUMENT.relative_to(ROOT)} says otherwise of {', '.join(key)}; if the kernel is right: {COMMAND}"
    )


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [pytest.param(*key, marks=() if key in QUICK else pytest.mark.matrix) for key in KERNELS],
)
def test_a_kernel_does_what_the_document_says_and_the_figures_are_right(
    guest: Make, kernel: str, arch: str, tmp_path: Path
) -> None:
    node = guest(kernel=kernel, arch=arch, limit_s=600)
    brought = [ROOT / "tests/kernel/groups.py", *traces.files(tmp_path, arch)]
    result = node.run(["bash", "-c", IN_THE_GUEST], brought).check()
    found = json.loads((result.files / "figures.json").read_text())
    agent = json.loads((result.files / "agent.json").read_text())
    assert len(found["figures"]) > 60
    stacks = json.loads((result.files / "stacks.json").read_text())
    traced = json.loads((result.files / "traces.json").read_text())
    assert all(figure["right"] for part in (found, agent, stacks, traced) for figure in part["figures"])
    assert traced["method"] == METHODS.get(kernel, "")
    why = "has no attach cookies, probes cannot be told apart: no deep traces; boot Linux 5.15 or newer"
    assert traced["refused"] == ("" if kernel in METHODS else f"{node.kernel.release} {why}")
    check = json.loads((result.files / "check.json").read_text())
    assert check["can_run"]
    document = Document.read(DOCUMENT.read_text(encoding="utf-8") if DOCUMENT.exists() else "")
    known, now = document.abilities.rows.get((kernel, arch)), abilities(check)
    if os.environ.get(WRITE):
        document.abilities.rows[kernel, arch] = now
        document.sizes.rows[kernel, arch] = sizes(node.kernel.release, found["programs"])
        DOCUMENT.write_text(str(document), encoding="utf-8")
        return
    same_as_known((kernel, arch), known, now)


def test_calls_are_traced_where_each_probe_is_a_perf_event(guest: Make, tmp_path: Path) -> None:
    """The kernel above that is left out of most runs, and this part of it alone."""
    node = guest(kernel="6.1", arch="amd64")
    brought = [ROOT / "tests/kernel/groups.py", *traces.files(tmp_path, "amd64")]
    result = node.run(["python3", "/payload/files/inside/traces.py"], brought).check()
    traced = json.loads((result.files / "traces.json").read_text())
    assert traced["method"] == "perf"
    assert len(traced["figures"]) > 60


def test_the_document_is_as_this_file_writes_it() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    document = Document.read(text)
    assert tuple(document.abilities.rows) == tuple(document.sizes.rows) == KERNELS
    assert str(document) == text, f"{DOCUMENT.relative_to(ROOT)} was changed by hand; write it by {COMMAND}"


def test_a_row_is_written_anew_and_the_others_stay() -> None:
    document = Document.read("")
    document.abilities.rows["6.1", "arm64"] = ("yes",) * len(COLUMNS)
    document.sizes.rows["6.1", "arm64"] = ("6.1.0-1-arm64", "2", "30", "40 (`b`)")
    document = Document.read(str(document))
    document.abilities.rows["5.10", "amd64"] = ("no",) * len(COLUMNS)
    document.sizes.rows["5.10", "amd64"] = ("5.10.0-1-amd64", "2", "30", "not told")
    text = str(document)
    assert Document.read(text) == document
    rows = re.findall(r"^\| (\S+ \| a\w+64) \| (\S+) ", text, re.MULTILINE)
    assert rows == [
        ("5.10 | amd64", "no"),
        ("6.1 | arm64", "yes"),
        ("5.10 | amd64", "5.10.0-1-amd64"),
        ("6.1 | arm64", "6.1.0-1-arm64"),
    ]


def test_cells_of_the_document_come_from_check_and_from_the_kernel() -> None:
    findings = [{"name": name, "status": "ok"} for name in COLUMNS.values()]
    findings[-1]["status"] = "warning"
    assert abilities({"findings": findings}) == ("yes",) * (len(COLUMNS) - 1) + ("no",)
    programs = {
        "one": {"a": {"instructions": 1000, "verified": 20}},
        "two": {"b": {"instructions": 500, "verified": 4000}},
    }
    assert sizes("6.1", programs) == ("6.1", "2", "1,500", "4,000 (`b`)")
    assert sizes("5.10", {"one": {"a": {"instructions": 7, "verified": None}}}) == (
        "5.10",
        "1",
        "7",
        "not told",
    )


def test_a_kernel_that_does_otherwise_is_told_with_the_remedy() -> None:
    yes = ("yes",) * len(COLUMNS)
    same_as_known(("6.1", "arm64"), yes, yes)
    for known in (None, yes[1:], ("no", *yes[1:])):
        with pytest.raises(
            AssertionError, match=r"kernel-support\.md says otherwise of 6\.1, arm64; .* --matrix"
        ):
            same_as_known(("6.1", "arm64"), known, yes)
