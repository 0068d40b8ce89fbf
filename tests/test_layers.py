"""Imports point downwards only: cli, agent, sources, kernel and jobs, wire."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What each package, or module at the top of expanse_ebpf, may import beside itself and LEAVES. Those in
# TOP may import everything.
LEAVES = {"", "errors", "text", "config"}
TOP = {"cli", "__main__"}
MAY_IMPORT = {
    "wire": set(),
    "kernel": {"jobs", "wire"},  # the probe asks which cgroup hierarchies there are
    "jobs": {"wire"},
    "python_stacks": {"kernel"},
    "gpu": {"kernel", "jobs", "wire"},
    "nvml": {"wire"},
    "tracing": {"kernel", "jobs", "python_stacks", "export", "wire"},
    "sources": {"kernel", "jobs", "python_stacks", "gpu", "nvml", "tracing", "export", "wire"},
    "export": {"wire"},
    "ship": {"wire"},
    "top": {"export", "wire", "ship"},
    "visibility": {"wire"},
    "node_streams": {"wire"},
    "node_client": {"node_streams"},
    "node_listener": set(),
    "node_socket": {"node_client", "node_listener", "node_streams", "visibility", "wire"},
    "own_cost": {"kernel", "sources", "wire"},
    "bench": {"kernel", "jobs", "node_client", "node_streams", "top", "ship", "export", "wire"},
    "agent": {
        *("sources", "kernel", "jobs", "export", "ship"),
        *("node_socket", "node_streams", "own_cost", "wire"),
    },
}
CONTROLLER_MAY_IMPORT = {"wire", "export"}


def imported(source: str, package: str) -> Iterator[str]:
    """Dotted names that a module of `package` imports, in functions and for type checkers too."""
    for found in ast.walk(ast.parse(source)):
        if isinstance(found, ast.Import):
            yield from (alias.name for alias in found.names)
        elif isinstance(found, ast.ImportFrom):
            above = package.split(".")[: 1 - found.level or None] if found.level else []
            base = ".".join([*above, *([found.module] if found.module else [])])
            yield from (f"{base}.{alias.name}" for alias in found.names)


def part(name: str) -> str:
    """The part of expanse_ebpf that a dotted name lies in; "" for the package itself."""
    first = name.split(".")[1] if "." in name else ""
    path = ROOT / "expanse_ebpf" / first
    return first if first and (path.is_dir() or path.with_suffix(".py").exists()) else ""


def modules(package: str) -> list[Path]:
    return sorted(p for p in (ROOT / package).rglob("*.py") if not p.stem.endswith("_pb2"))


def fault(path: Path) -> list[str]:
    """Imports of the module that its layer does not allow."""
    relative = path.relative_to(ROOT)
    package = ".".join(relative.parent.parts)
    names = [n for n in imported(path.read_text(encoding="utf-8"), package) if n.startswith("expanse_")]
    if relative.parts[0] == "expanse_controller":
        return [
            name
            for name in names
            if name.split(".")[0] == "expanse_ebpf" and part(name) not in CONTROLLER_MAY_IMPORT
        ]
    own = part(".".join(relative.with_suffix("").parts)) if relative.stem != "__init__" else part(package)
    if own in TOP:
        return []
    allowed = LEAVES if own in LEAVES else MAY_IMPORT[own] | LEAVES | {own}
    return [n for n in names if n.split(".")[0] != "expanse_ebpf" or part(n) not in allowed]


@pytest.mark.parametrize(
    "path", [*modules("expanse_ebpf"), *modules("expanse_controller")], ids=lambda p: str(p.relative_to(ROOT))
)
def test_imports_point_downwards(path: Path) -> None:
    assert fault(path) == []


def test_the_test_itself_sees_imports() -> None:
    source = (
        "def f():\n    from expanse_ebpf.cli import run\nfrom .. import ship\nimport expanse_ebpf.top.app"
    )
    names = set(imported(source, "expanse_ebpf.sources"))
    assert names == {"expanse_ebpf.cli.run", "expanse_ebpf.ship", "expanse_ebpf.top.app"}
    assert {part(n) for n in names} == {"cli", "ship", "top"}
    assert part("expanse_ebpf.__version__") == ""
