"""The wheel and the metadata that make the two commands installable."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
MACHINES = {"x86_64", "aarch64"}


def untracked() -> str:
    """What git would call new or changed, ignored files aside."""
    command = ["git", "-C", str(ROOT), "status", "--porcelain"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the tree, in which nothing has been generated yet."""
    folder = tmp_path_factory.mktemp("wheel")
    tree = folder / "tree"
    unwanted = ("__pycache__", "objects", "*_pb2.*")
    tree.mkdir()
    for name in ("bpf", "expanse_ebpf", "expanse_controller"):
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns(*unwanted))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_the_wheel_is_for_every_machine(wheel: Path) -> None:
    assert wheel.name == f"expanse_ebpf-{PROJECT['project']['version']}-py3-none-any.whl"


def test_every_bpf_program_is_in_the_wheel_for_each_machine(wheel: Path, names: set[str]) -> None:
    programs = [path.name.removesuffix(".bpf.c") for path in (ROOT / "bpf").glob("*.bpf.c")]
    assert programs
    wanted = {f"expanse_ebpf/kernel/objects/{p}.{m}.bpf.o" for p in programs for m in MACHINES}
    assert {name for name in names if name.endswith(".o")} == wanted
    with zipfile.ZipFile(wheel) as archive:
        for name in wanted:
            header = archive.read(name)[:20]
            assert header[:4] == b"\x7fELF"
            assert int.from_bytes(header[18:20], "little") == 247  # EM_BPF
            assert str(ROOT).encode() not in archive.read(name)


def test_the_wheel_has_the_generated_code_the_types_the_page_and_the_licences(names: set[str]) -> None:
    assert {
        "expanse_ebpf/wire/collector_pb2.py",
        "expanse_ebpf/wire/collector_pb2.pyi",
        "expanse_ebpf/wire/profile_pb2.py",
        "expanse_ebpf/wire/profile_pb2.pyi",
        "expanse_ebpf/export/flamegraph.html",
        "expanse_ebpf/py.typed",
        "expanse_controller/py.typed",
    } <= names
    licences = {name.partition("/licenses/")[2] for name in names if "/licenses/" in name}
    assert licences == {"LICENSE", "bpf/LICENSE"}


def test_the_wheel_has_every_module_and_no_test(names: set[str]) -> None:
    packages = ("expanse_ebpf", "expanse_controller")
    modules = {str(path.relative_to(ROOT)) for name in packages for path in (ROOT / name).rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert {name.partition("/")[0] for name in names} - {*packages} == {
        next(name.partition("/")[0] for name in names if name.endswith("/METADATA"))
    }


def test_the_wheel_names_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(next(n for n in archive.namelist() if n.endswith("entry_points.txt"))).decode()
    parser = configparser.ConfigParser()
    parser.read_string(text)
    assert dict(parser["console_scripts"]) == {
        "expanse-ebpf": "expanse_ebpf.cli:main",
        "expanse-controller": "expanse_controller.cli:main",
    }


def test_building_in_the_tree_leaves_nothing_that_git_sees() -> None:
    before = untracked()
    result = subprocess.run(
        [sys.executable, "bpf/build_hook.py"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert untracked() == before


def test_a_source_that_does_not_compile_is_named_without_a_traceback(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for name in ("bpf", "expanse_ebpf/wire"):
        shutil.copytree(ROOT / name, tree / name)
    (tree / "expanse_ebpf/kernel").mkdir()
    (tree / "bpf/broken.bpf.c").write_text("int here is no program;\n")
    result = subprocess.run(
        [sys.executable, "bpf/build_hook.py"], cwd=tree, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert result.stderr.startswith("error: bpf/broken.bpf.c does not compile for x86_64:\n")
    assert "Traceback" not in result.stderr
    assert not list((tree / "expanse_ebpf/kernel/objects").glob("broken*"))


def test_without_clang_the_build_says_what_to_install(tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": str(tmp_path)}
    result = subprocess.run(
        [sys.executable, "bpf/build_hook.py"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "apt-get install clang" in result.stderr


# ---- requirements.txt


def test_every_dependency_is_pinned_with_hashes_and_no_address() -> None:
    text = (ROOT / "requirements.txt").read_text(encoding="utf-8")
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", text, re.MULTILINE)
    lines = [line for line in text.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(entries) == len(lines)
    pinned = {re.sub("[-_.]+", "-", name).lower() for name, _, _ in entries}
    project = PROJECT["project"]
    for requirement in [*project["dependencies"], *project["optional-dependencies"]["dev"]]:
        assert re.split("[<>=!~ ]", requirement)[0].lower() in pinned
    assert "://" not in text
    assert "--index-url" not in text


def test_generated_code_suits_the_protobuf_that_is_asked_for() -> None:
    """Generated code refuses a runtime that is older than its generator."""
    code = (ROOT / "expanse_ebpf/wire/collector_pb2.py").read_text(encoding="utf-8")
    numbers = re.search(r"PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", code)
    assert numbers
    version = ".".join(numbers.groups())
    assert any(d.startswith(f"protobuf>={version},") for d in PROJECT["project"]["dependencies"]), version


# ---- the Makefile


def make(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_make_alone_lists_every_target_that_is_for_people() -> None:
    result = make()
    assert result.returncode == 0
    assert {"run", "test", "lint", "build", "clean"} <= set(
        re.findall(r"^  make (\S+) ", result.stdout, re.M)
    )


def test_ci_runs_make_test_as_a_strict_shell_script() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text(encoding="utf-8")
    assert "make test" in script.read_text(encoding="utf-8")


def test_a_missing_debian_package_is_named_to_a_user_who_is_not_root(tmp_path: Path) -> None:
    """What the Makefile does before it builds, without building: as nobody, in a tree of its own."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    (tmp_path / "Makefile").write_text(
        re.sub("^TEST_PACKAGES := .*", "TEST_PACKAGES := no-such-package", text, flags=re.M)
    )
    tmp_path.chmod(0o755)
    command = "cd / && exec setpriv --reuid=65534 --regid=65534 --clear-groups make -f - test-packages"
    result = subprocess.run(
        ["bash", "-c", command],
        input=(tmp_path / "Makefile").read_text(encoding="utf-8"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode != 0
    assert "error: Debian packages are missing; as root: apt-get install no-such-package" in result.stderr
