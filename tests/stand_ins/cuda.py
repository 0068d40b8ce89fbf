"""Stand-ins for libcuda.so.1, libcudart.so.13 and libnccl.so.2, and programs that call them and count."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from tests.stand_ins.build import COMPILER, HERE, workshop

PROGRAMS = HERE / "cuda_programs"
RUNTIME_SONAME = "libcudart.so.13"
# Functions begin with their frame, as NVIDIA's do.
FRAMES = ["-O2", "-fno-omit-frame-pointer", "-fno-shrink-wrap"]
LIBRARY = ["-shared", "-fvisibility=hidden", "-Wl,-z,defs", "-Wl,-rpath,$ORIGIN"]
# How the launcher gets its CUDA; see README.md.
LAUNCHERS = ("shared", "static", "static_stripped", "driver", "other", "none")


@dataclass(frozen=True, slots=True)
class Counts:
    """What a process says of itself at its end."""

    pid: int
    launches: int = 0
    errors: int = 0  # calls that gave an error
    calls: dict[str, int] = field(default_factory=dict)  # by the function that the program itself called
    bytes: dict[str, int] = field(default_factory=dict)
    kernels: dict[str, int] = field(default_factory=dict)  # launches by demangled name
    driver: dict[str, int] = field(default_factory=dict)  # calls of exported entries of libcuda.so.1
    stacks: list[dict[str, Any]] = field(default_factory=list)  # of train.py: launches by Python stack


class Program:
    """A running program. What it has started ends with it, at the latest when the context does."""

    def __init__(self, command: list[str | Path], environment: dict[str, str], **options: Any) -> None:
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self.pid = self.process.pid

    @property
    def _stdin(self) -> IO[str]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def _stdout(self) -> IO[str]:
        assert self.process.stdout is not None
        return self.process.stdout

    def wait_for(self, word: str) -> None:
        """Until it says WORD; raises EOFError when it ends before."""
        for line in self._stdout:
            if line.strip() == word:
                return
        raise EOFError(f"ended with {self.process.wait()} before it said {word}")

    def go(self, times: int = 1) -> None:
        """Lets it (and as many others that it has forked) go on from `wait`."""
        self._stdin.write("\n" * times)
        self._stdin.flush()

    def output(self, *, end: bool = False, timeout_s: float = 60.0) -> str:
        """Waits for its end, after SIGTERM if that is said, and gives what it still had to say."""
        if end:
            self.process.send_signal(signal.SIGTERM)
        timer = threading.Timer(timeout_s, self.process.kill)
        timer.start()
        try:
            output, _ = self.process.communicate()
        finally:
            timer.cancel()
        return str(output)

    def finish(self, *, end: bool = False, timeout_s: float = 60.0) -> list[Counts]:
        """`output`, which gives the counts of all its processes."""
        lines = self.output(end=end, timeout_s=timeout_s).splitlines()
        return [Counts(**json.loads(line)) for line in lines if line.startswith("{")]

    def counts(self, *, end: bool = False) -> Counts:
        """`finish`, of a program that is one process and does not fail."""
        (counts,) = self.finish(end=end)
        assert self.process.returncode == 0, self.process.returncode
        return counts

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@dataclass(frozen=True, slots=True)
class CudaStandIn:
    """What `build` made. `folder` can be copied; its parts find each other."""

    folder: Path

    @property
    def libraries(self) -> Path:
        return self.folder / "lib"

    @property
    def driver(self) -> Path:
        return self.libraries / "libcuda.so.1"

    @property
    def runtime(self) -> Path:
        """The file itself; libcudart.so and libcudart.so.13 are links to it."""
        return self.libraries / f"{RUNTIME_SONAME}.0.0"

    @property
    def other(self) -> Path:
        """A library that is not called after the runtime but has it inside, symbols and all."""
        return self.libraries / "libother.so"

    @property
    def nccl(self) -> Path:
        return self.libraries / "libnccl.so.2"

    def program(self, name: str) -> Path:
        """`launcher-VARIANT` with one of LAUNCHERS; `crasher` and `hammer` with `-shared` or `-static`."""
        return self.folder / "bin" / name

    def environment(self, *, route: str = "exported", sync_us: int = 0, **more: str) -> dict[str, str]:
        """The caller's, with what the stand-ins read."""
        said = {"STAND_IN_ROUTE": route, "STAND_IN_SYNC_US": str(sync_us)}
        return {**os.environ, "LD_LIBRARY_PATH": str(self.libraries), **said, **more}

    def start(
        self, program: str | Path, *arguments: str, route: str = "exported", sync_us: int = 0, **options: Any
    ) -> Program:
        """A program by its name or path; `options` are Popen's."""
        path = program if isinstance(program, Path) else self.program(program)
        environment = self.environment(route=route, sync_us=sync_us)
        return Program([path, *arguments], environment, **options)

    def launch(self, variant: str, script: str, **options: Any) -> Program:
        """The launcher, with a script."""
        return self.start(f"launcher-{variant}", script, **options)

    def train(self, *arguments: str, python: str = sys.executable, **options: Any) -> Program:
        """cuda_programs/train.py, which see; says `ready` and waits for `go` before it begins."""
        return self.start(Path(python), str(PROGRAMS / "train.py"), *arguments, **options)


def build(folder: Path, *, tail_calls: bool = False, machine: str = "") -> CudaStandIn:
    """Compiles all of it, in some seconds.

    With `tail_calls` a function jumps to what does its work where its arguments allow it; without, it calls.
    `machine` is the prefix of another machine's tools, such as "aarch64-linux-gnu-".
    """
    made = CudaStandIn(folder)
    made.libraries.mkdir(parents=True)
    made.program("").mkdir()
    compiler = [f"{machine}{COMPILER[0]}", *COMPILER[1:], *FRAMES]
    tail = "-foptimize-sibling-calls" if tail_calls else "-fno-optimize-sibling-calls"
    _build_libraries(made, [*compiler, tail], f"{machine}ar")
    _build_programs(made, [*compiler, "-fno-optimize-sibling-calls"])
    return made


def cuda_stand_in(*, tail_calls: bool = False) -> CudaStandIn:
    """What `build` makes, once in a process; goes with it."""
    return _built(tail_calls)


@functools.cache
def _built(tail_calls: bool) -> CudaStandIn:
    return build(workshop() / ("cuda-tail-calls" if tail_calls else "cuda"), tail_calls=tail_calls)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True)


def _build_libraries(made: CudaStandIn, compiler: list[str], ar: str) -> None:
    device = HERE / "cuda_device.c"
    runtime = [HERE / "cuda_runtime.c", HERE / "cuda_nvcc.c", device]
    library = [*compiler, *LIBRARY]
    _run(*library, "-Wl,-soname,libcuda.so.1", "-o", made.driver, HERE / "cuda_driver.c", device)
    exports = f"-Wl,--version-script={HERE / 'cuda_runtime.map'}"
    named = [f"-Wl,-soname,{RUNTIME_SONAME}", exports, "-Wl,-Bsymbolic-functions"]
    _run(*library, *named, "-o", made.runtime, *runtime, "-ldl")
    named = ["-Wl,-soname,libother.so", "-Wl,-Bsymbolic-functions"]
    _run(*library, *named, "-o", made.other, *runtime, "-ldl")
    hidden = _archive(made.libraries / "libcudart_hidden.a", [*compiler, "-DHIDDEN"], runtime, ar)
    _archive(made.libraries / "libcudart_static.a", compiler, runtime, ar)
    named = ["-Wl,-soname,libnccl.so.2", "-DHIDDEN"]
    _run(*library, *named, "-o", made.nccl, HERE / "nccl.c", hidden, "-ldl")
    for link, target in (
        ("libcuda.so", "libcuda.so.1"),
        ("libcudart.so", RUNTIME_SONAME),
        (RUNTIME_SONAME, made.runtime.name),
        ("libnccl.so", "libnccl.so.2"),
    ):
        (made.libraries / link).symlink_to(target)


def _objects(folder: Path, compiler: list[str], sources: list[Path]) -> list[Path]:
    folder.mkdir()
    objects = [folder / f"{source.stem}.o" for source in sources]
    for source, made in zip(sources, objects, strict=True):
        _run(*compiler, "-c", "-o", made, source)
    return objects


def _archive(archive: Path, compiler: list[str], sources: list[Path], ar: str) -> Path:
    folder = archive.with_suffix("")
    _run(ar, "rcs", archive, *_objects(folder, [*compiler, "-fvisibility=hidden"], sources))
    shutil.rmtree(folder)
    return archive


def _build_programs(made: CudaStandIn, compiler: list[str]) -> None:
    link = ["-pthread", f"-L{made.libraries}", "-Wl,-rpath,$ORIGIN/../lib"]
    static = ["-l:libcudart_static.a", "-ldl"]
    variants = {
        "shared": ("-DLINKED_RUNTIME", ["-lcudart", "-ldl"]),
        "static": ("-DLINKED_RUNTIME", static),
        "static_stripped": ("-DLINKED_RUNTIME", [*static, "-s"]),
        "driver": ("-DLINKED_DRIVER", ["-lcuda", "-ldl"]),
        "other": ("-DLINKED_RUNTIME", ["-lother", "-ldl"]),
        "none": ("-DLINKED_NOTHING", ["-ldl"]),
    }
    common = [PROGRAMS / f"{name}.c" for name in ("kernels", "launcher", "launches", "transfers")]
    scratch = made.folder / "parts"
    kernels, *others = _objects(scratch, compiler, common)

    def program(name: str, variant: str, source: str, *objects: Path) -> None:
        define, libraries = variants[variant]
        parts = [PROGRAMS / source, kernels, *objects]
        _run(*compiler, define, *link, "-o", made.program(f"{name}-{variant}"), *parts, *libraries)

    for variant in LAUNCHERS:
        program("launcher", variant, "calls.c", *others)
    for variant in ("shared", "static"):
        program("crasher", variant, "crasher.c")
    for variant in ("shared", "static", "driver"):
        program("hammer", variant, "hammer.c")
    _run(*compiler, "-shared", "-o", made.libraries / "libmodel.so", kernels)
    shutil.rmtree(scratch)


def main(arguments: list[str]) -> None:
    """The command line: a folder that there is not yet."""
    made = build(Path(arguments[0]).absolute())
    print(f"LD_LIBRARY_PATH={made.libraries}; programs in {made.program('')}")


if __name__ == "__main__":
    main(sys.argv[1:])
