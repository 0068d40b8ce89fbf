"""A program with host stubs of kernels as nvcc makes them, in itself and in a library."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

KERNELS = """
extern "C" __attribute__((noinline)) void __device_stub__Z3mulPfi(float *, int) { asm volatile("nop"); }
__attribute__((noinline)) void __device_stub__Z3subPfi(float *, int) { asm volatile("nop; nop"); }
namespace ns {
template <typename T> __attribute__((noinline)) void add(T *, int) { asm volatile("nop; nop; nop"); }
}
template void ns::add<float>(float *, int);
extern "C" __attribute__((noinline)) void plain(void) { asm volatile("nop; nop; nop; nop"); }
void *stubs[] = {(void *)__device_stub__Z3mulPfi, (void *)__device_stub__Z3subPfi,
    (void *)(void (*)(float *, int))ns::add<float>, (void *)plain};
"""
NAMES = ["mul(float*, int)", "sub(float*, int)", "void ns::add<float>(float*, int)", "plain"]
MAIN = """
#include <cstdio>
#include <unistd.h>
extern void *stubs[4];
int main() {
    for (void *each : stubs) printf("%p\\n", each);
    fflush(stdout);
    pause();
}
"""


def compile_program(folder: Path, *options: str) -> Path:
    """The program with its stubs in itself."""
    return _compile(folder / "program", MAIN + KERNELS, *options)


def compile_with_library(folder: Path) -> tuple[Path, Path]:
    """The program, and the library that it has its stubs from."""
    library = _compile(folder / "libkernels.so", KERNELS, "-shared", "-fPIC")
    return _compile(folder / "program", MAIN, str(library), f"-Wl,-rpath,{folder}"), library


def _compile(output: Path, source: str, *options: str) -> Path:
    command = ["clang++", "-O1", "-x", "c++", "-", "-x", "none", "-o", output, *options]
    subprocess.run(command, input=source, text=True, check=True)
    return output


@contextlib.contextmanager
def running(command: Sequence[str | Path]) -> Iterator[tuple[int, list[int]]]:
    """The pid of the program and the addresses of its stubs; `command` must become the program."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.pid, [int(process.stdout.readline(), 16) for _ in NAMES]
        finally:
            process.kill()
