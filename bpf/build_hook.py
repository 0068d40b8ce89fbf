"""Build hook: compile the BPF programs for each architecture and generate the protobuf code.

Run by hatchling for wheels and editable installs, or directly (``python bpf/build_hook.py``)
to refresh the generated files in a working tree.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BPF = ROOT / "bpf"
OBJECTS = ROOT / "expanse_ebpf" / "kernel" / "objects"
WIRE = ROOT / "expanse_ebpf" / "wire"

# The machine names as os.uname() gives them, and libbpf's names for the same.
ARCHITECTURES = {"x86_64": "x86", "aarch64": "arm64"}


class BuildError(Exception):
    """A tool is missing or a source does not compile; the message names the remedy."""


def compile_bpf() -> list[Path]:
    """Compile every ``bpf/*.bpf.c`` for every architecture; returns the objects written."""
    clang = shutil.which("clang")
    if clang is None:
        raise BuildError(
            "clang is not installed: it compiles the BPF programs (Debian: apt-get install clang)"
        )
    OBJECTS.mkdir(exist_ok=True)
    written = []
    half_written = OBJECTS / f".{os.getpid()}.tmp"
    for source in sorted(BPF.glob("*.bpf.c")):
        for machine, target in ARCHITECTURES.items():
            output = OBJECTS / f"{source.name.removesuffix('.bpf.c')}.{machine}.bpf.o"
            command = [
                clang,
                *("-target", "bpf", "-mcpu=v3", f"-D__TARGET_ARCH_{target}"),
                *("-O2", "-g", "-Wall", "-Wextra", "-Werror", "-Wno-unused-parameter"),
                *("-ferror-limit=5", "-fmacro-backtrace-limit=2"),
                # Paths inside the debug information must not depend on where the tree lies.
                *(f"-ffile-prefix-map={ROOT}=.", f"-I{BPF / 'include'}"),
                *("-c", str(source), "-o", str(half_written)),
            ]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode != 0:
                half_written.unlink(missing_ok=True)
                raise BuildError(
                    f"{source.relative_to(ROOT)} does not compile for {machine}:\n{explain(result.stderr)}"
                )
            # In one step: an interrupted build leaves the old object, and so does one beside a running agent.
            half_written.replace(output)
            written.append(output)
    for stale in set(OBJECTS.glob("*.bpf.o")) - set(written):
        stale.unlink()
    return written


def explain(stderr: str) -> str:
    """What clang said, with the remedy where a header of libbpf is missing."""
    remedy = (
        "(Debian: apt-get install libbpf-dev)" if "'bpf/" in stderr and "file not found" in stderr else ""
    )
    return f"{stderr.rstrip()}\n{remedy}".rstrip()


def generate_wire() -> list[Path]:
    """Generate a protobuf module and its type stub from every ``.proto``; returns what was written."""
    from grpc_tools import protoc

    sources = sorted(WIRE.glob("*.proto"))
    names = [str(source.relative_to(ROOT)) for source in sources]
    status = protoc.main(["protoc", f"-I{ROOT}", f"--python_out={ROOT}", f"--pyi_out={ROOT}", *names])
    if status != 0:
        raise BuildError(f"protoc failed with status {status} on {' '.join(names)}")
    return [WIRE / f"{source.stem}_pb2.{kind}" for source in sources for kind in ("py", "pyi")]


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script, where hatchling is not needed
    pass
else:

    class BuildHook(BuildHookInterface):  # type: ignore[type-arg]
        """Generates what the wheel ships and the tree does not hold."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            """Called by hatchling before each wheel or editable build."""
            if self.target_name != "wheel":
                return
            try:
                compile_bpf()
                generate_wire()
            except BuildError as error:
                self.app.abort(f"error: {error}")


if __name__ == "__main__":
    try:
        for path in [*compile_bpf(), *generate_wire()]:
            print(path.relative_to(ROOT))
    except BuildError as error:
        sys.exit(f"error: {error}")
