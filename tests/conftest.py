"""What holds for every test: no skip counts as a pass in CI, and nothing is left behind on the machine."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CGROUPS = Path("/sys/fs/cgroup")
# Inherited by everything that the tests start, so that a process can be told from anybody else's even
# when its parent is gone.
MARK = "TESTS_OF_EXPANSE"
PATIENCE_S = 5.0  # for what ends on its own


def pytest_addoption(parser: pytest.Parser) -> None:
    in_ci = os.environ.get("CI", "").lower() in ("1", "true", "yes")
    parser.addoption(
        "--strict-run",
        action="store_true",
        default=in_ci,
        help="a skipped test, or anything left behind, fails the run (default where CI=true)",
    )
    parser.addoption("--matrix", action="store_true", help="boot every kernel, not only the telling ones")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--matrix"):
        left_out = [item for item in items if item.get_closest_marker("matrix")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _refuse_skip(report, item.config)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _refuse_skip(report, collector.config)
    return report


def _refuse_skip(report: pytest.TestReport | pytest.CollectReport, config: pytest.Config) -> None:
    if report.outcome == "skipped" and not hasattr(report, "wasxfail") and config.getoption("--strict-run"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped where every test must run: {reason}"


# ---- what must not be left behind


def leftover_cgroups() -> set[str]:
    """Cgroups of Expanse's own jobs and of its tests, in every hierarchy."""
    return {
        folder
        for folder, _, _ in os.walk(CGROUPS)
        if os.path.basename(folder).startswith(("expanse", "test-expanse"))  # noqa: PTH119 (thousands of them)
    }


def program_names(sources: Iterable[str]) -> set[str]:
    """The BPF programs that C sources define, cut to 15 bytes as the kernel keeps them."""
    pattern = re.compile(r'SEC\("[^"]+"\)\s+int\s+(?:BPF_\w+\s*\(\s*)?(\w+)')
    return {name[:15] for source in sources for name in pattern.findall(source)}


def leftover_programs() -> set[str]:
    """BPF programs in the kernel with our names, as NAME (id ID)."""
    bpftool = shutil.which("bpftool", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if bpftool is None or os.geteuid() != 0:
        return set()
    ours = program_names(path.read_text(encoding="utf-8") for path in (ROOT / "bpf").glob("*.bpf.c"))
    result = subprocess.run([bpftool, "-j", "prog", "show"], capture_output=True, text=True, check=False)
    programs = json.loads(result.stdout) if result.returncode == 0 and result.stdout.strip() else []
    found = {p["id"]: f"{p['name']} (id {p['id']})" for p in programs if p.get("name") in ours}
    return {name for number, name in found.items() if number not in held_by_strangers()} if found else set()


def held_by_strangers() -> set[int]:
    """Ids of BPF programs held by processes that these tests did not start."""
    needle = f"{MARK}=".encode()
    held: set[int] = set()
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if needle not in (folder / "environ").read_bytes():
                    for file in (folder / "fdinfo").iterdir():
                        lines = file.read_text().splitlines()
                        held |= {int(line.split()[1]) for line in lines if line.startswith("prog_id:")}
    return held


def leftover_processes(mark: str) -> set[str]:
    """Processes whose environment has the mark, this one aside."""
    needle = f"{MARK}={mark}".encode()
    found = set()
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if needle not in (folder / "environ").read_bytes().split(b"\0"):
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            continue
        if "multiprocessing.resource_tracker" not in command:  # ends with the process that it serves
            found.add(f"{command} (pid {folder.name})")
    return found


def remaining(find: Callable[[], set[str]], before: set[str]) -> set[str]:
    """What `find` finds, `before` aside, once it has had time to go."""
    deadline = time.monotonic() + PATIENCE_S
    while (left := find() - before) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


class Leftovers:
    """Compares the machine before the tests with the machine after them."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        os.environ[MARK] = self.mark
        self.kinds: dict[str, Callable[[], set[str]]] = {
            "process": lambda: leftover_processes(self.mark),
            "cgroup": leftover_cgroups,
            "BPF program": leftover_programs,
        }
        self.before = {kind: find() for kind, find in self.kinds.items()}
        self.found: list[str] = []

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        gc.collect()
        for kind, find in self.kinds.items():
            self.found += [
                f"left behind: {kind} {what}" for what in sorted(remaining(find, self.before[kind]))
            ]
        if (
            self.found
            and session.config.getoption("--strict-run")
            and session.exitstatus == pytest.ExitCode.OK
        ):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.found:
            terminalreporter.section("left behind by the tests", red=True, bold=True)
            for line in self.found:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    # Not in a run inside a test: the outer run looks at the end.
    if MARK not in os.environ and not config.getoption("--collect-only"):
        config.pluginmanager.register(Leftovers(), "leftovers")


@pytest.fixture(scope="session", autouse=True)
def _nodes_of_gpus() -> Generator[None, None, None]:
    """NVIDIA's own library makes device files where it is begun by root, with or without a driver."""
    before = set(Path("/dev").glob("nvidia*"))
    yield
    for node in set(Path("/dev").glob("nvidia*")) - before:
        node.unlink()
