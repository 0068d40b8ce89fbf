"""Windows on jobs that do their worst, and windows that come to a bad end.

After each test nothing of the window is left, the programs have come to their own end,
and nobody has complained.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.wire.collector_pb2 import (
    TRACE_STATE_OPEN,
    TRACE_STATE_WAITING,
    NodeIdentity,
    Trace,
)
from tests.stand_ins.build import COMPILER
from tests.stand_ins.cuda import CudaStandIn, Program, cuda_stand_in
from tests.tracing.test_window import resident
from tests.tracing.windows import Node, Window, calls, events, into, node

# A program in Python that calls through ctypes.
CALLER = """
import ctypes, os, sys
word = ctypes.c_void_p
shape = [ctypes.c_uint64(1 << 32 | 1), ctypes.c_uint32(1)]
def load(path):
    return ctypes.CDLL(path)
def launch(runtime, times):
    for _ in range(times):
        assert runtime.cudaLaunchKernel(word(16), *shape, *shape, None, ctypes.c_size_t(0), None) == 0
def say(what):
    print(what, flush=True)
    sys.stdin.readline()
"""
# crowd threads|processes NUMBER: each launches three times, and is gone.
CROWD = """
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
typedef struct { unsigned x, y, z; } dim3;
int cudaLaunchKernel(const void *, dim3, dim3, void **, unsigned long, void *);
static void *launch(void *unused)
{
    (void)unused;
    for (int i = 0; i < 3; i++)
        if (cudaLaunchKernel((void *)launch, (dim3){1, 1, 1}, (dim3){1, 1, 1}, 0, 0, 0))
            abort();
    return 0;
}
int main(int count, char **words)
{
    int number = count > 2 ? atoi(words[2]) : 0;
    puts("ready");
    fflush(stdout);
    getchar();
    if (!strcmp(words[1], "threads")) {
        static pthread_t threads[4096];
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstacksize(&attributes, 65536);
        for (int i = 0; i < number; i++)
            if (pthread_create(&threads[i], &attributes, launch, 0))
                abort();
        for (int i = 0; i < number; i++)
            pthread_join(threads[i], 0);
    } else {
        for (int i = 0; i < number; i++)
            if (!fork()) {
                launch(0);
                _exit(0);
            }
        while (wait(0) > 0)
            ;
    }
    puts("done");
    fflush(stdout);
    getchar();
    return 7;
}
"""


@pytest.fixture(scope="module")
def cuda() -> CudaStandIn:
    return cuda_stand_in()


@pytest.fixture
def complaints() -> list[str]:
    """What windows and programs may write for a log."""
    return []


@pytest.fixture
def machine(capfd: pytest.CaptureFixture[str], complaints: list[str]) -> Iterator[Node]:
    with node() as made:
        yield made
        pids = [window.process.pid for window in made.open]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert capfd.readouterr().err.splitlines() == complaints


def launcher(cuda: CudaStandIn, group: Path, script: str, **options: Any) -> Program:
    """The launcher with the shared runtime: `say ready; wait` comes before the script."""
    return cuda.launch("shared", f"say ready; wait; {script}", preexec_fn=into(group), **options)


def python(cuda: CudaStandIn, group: Path, program: str, *arguments: str | Path) -> Program:
    command: list[str | Path] = [sys.executable, "-c", CALLER + program, *arguments]
    return Program(command, cuda.environment(), preexec_fn=into(group))


def crowd(folder: Path, cuda: CudaStandIn, *options: str) -> Path:
    source, program = folder / "crowd.c", folder / "crowd"
    source.write_text(CROWD)
    link = [f"-L{cuda.libraries}", f"-Wl,-rpath,{cuda.libraries}", "-lcudart"]
    subprocess.run([*COMPILER, "-O1", *options, "-o", program, source, *link], check=True)
    return program


def until(so: Callable[[], object], seconds: float = 20.0) -> None:
    """Wait for something that no descriptor tells of."""
    ends_at = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < ends_at
        time.sleep(0.01)


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except OSError:
        return False


def breakpoints(pid: int, name: str) -> list[int]:
    """Where the code of a mapped file is not as the file has it."""
    found = []
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, offset, _, _, *path = line.split(None, 5)
            if "x" in mode and path and Path(path[0]).name == name:
                start, end = (int(part, 16) for part in span.split("-"))
                code = os.pread(memory.fileno(), end - start, start)
                file = Path(path[0]).read_bytes()[int(offset, 16) :]
                found += [at for at, (a, b) in enumerate(zip(code, file, strict=False)) if a != b]
    return found


# ---- bad ends of a window's own processes


def stop_in_its_work(pid: int) -> None:
    """Stop what looks names up, once it has set its limits, and what is to become of it without a window."""
    os.kill(pid, signal.SIGSTOP)
    while not re.search(r"Max cpu time +\d", Path(f"/proc/{pid}/limits").read_text()):
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.005)
        os.kill(pid, signal.SIGSTOP)


def test_what_looks_names_up_goes_with_a_window_that_is_killed(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5; say done; wait; launch 5") as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        until(lambda: children(window.process.pid))
        (child,) = children(window.process.pid)
        stop_in_its_work(child)
        window.process.kill()
        window.process.wait()
        until(lambda: not lives(child))
        program.wait_for("done")
        until(lambda: not breakpoints(program.pid, cuda.runtime.name))
        program.go()
        assert program.counts().launches == 10


def test_a_window_outlives_what_looks_names_up(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5; say done; wait") as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        until(lambda: children(window.process.pid))
        os.kill(children(window.process.pid)[0], signal.SIGKILL)
        trace = window.end(stop=True)
        program.go()
        program.counts()
    assert calls(trace) == {"cudaLaunchKernel": 5}
    assert [kernel.reason for kernel in trace.kernels] == ["reading its file ended with signal 9"]


def test_an_agent_that_does_not_listen_any_more_ends_the_window(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5") as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        assert window.process.stdout is not None
        window.process.stdout.close()
        assert window.process.wait(10) == 1
        assert not breakpoints(program.pid, cuda.runtime.name)
        program.go()
        assert program.counts().launches == 5


@pytest.mark.parametrize("stage", ["begin", "waiting", "attach", "open", "end"])
def test_a_window_that_is_told_to_end_does_so_at_every_stage(
    machine: Node, cuda: CudaStandIn, stage: str
) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5; say done; wait") as program:
        program.wait_for("ready")
        window = machine.window(group, start_ns=time.time_ns() + 3600 * 10**9 if stage == "waiting" else 0)
        pid = window.process.pid
        if stage == "begin":
            # As soon as it can be told from what it was forked from.
            until(lambda: Path(f"/proc/{pid}/comm").read_text() == "expanse-trace\n")
        elif stage == "waiting":
            window.until(lambda status: status.state == TRACE_STATE_WAITING)
        elif stage == "attach":
            window.until(lambda status: status.state == TRACE_STATE_OPEN)
        else:
            window.until_open(targets=1)
            program.go()
            program.wait_for("done")
        if stage == "end":
            window.stop()
        window.process.terminate()
        trace = window.end()
        if stage in ("open", "end"):
            assert calls(trace) == {"cudaLaunchKernel": 5}
        assert window.state in ("done", "no_targets")
        assert window.last.reason == "ended early"
        assert not breakpoints(program.pid, cuda.runtime.name)
        program.go()


@pytest.mark.parametrize(
    "nonsense",
    [b"\xff" * (32 << 20), random.Random(1).randbytes(100_000), b"\0\0\0\2\xff\xff" * 10_000],
    ids=["length", "random", "messages"],
)
def test_what_an_agent_says_may_be_nonsense(
    machine: Node, cuda: CudaStandIn, complaints: list[str], nonsense: bytes
) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5; say done; wait") as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        before = resident(window.process.pid)
        assert window.process.stdin is not None
        window.process.stdin.write(nonsense)
        window.process.stdin.flush()
        assert resident(window.process.pid) - before < 8 << 20
        program.go()
        program.wait_for("done")
        assert calls(window.end(stop=True)) == {"cudaLaunchKernel": 5}
        program.go()
    complaints.append("the agent has said something that is no Trace")


def test_half_a_message_of_an_agent_is_left_out(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5; say done; wait") as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        assert window.process.stdin is not None
        said = Trace(node=NodeIdentity(name="n1")).SerializeToString()
        window.process.stdin.write(b"\0\0\0\0" + len(said).to_bytes(4, "big") + said + b"\0\0\1\0half")
        window.process.stdin.flush()
        program.go()
        program.wait_for("done")
        trace = window.end(stop=True)
        program.go()
    assert calls(trace) == {"cudaLaunchKernel": 5}
    assert trace.node.name == "n1"


@pytest.mark.parametrize("seconds", [1e-9, 0.0, -1.0, 0.05])
def test_a_window_may_be_as_short_as_it_likes(machine: Node, cuda: CudaStandIn, seconds: float) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5") as program:
        program.wait_for("ready")
        window = machine.window(group, seconds=seconds)
        window.end()
        assert window.state == "done"
        program.go()


def test_more_comes_than_there_is_room_for_and_the_totals_are_exact(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    script = "say ready; wait; launch 300000; sync 50; say done; wait"
    with cuda.launch("shared", script, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group, max_events=1000)
        window.until_open(targets=1)
        window.process.send_signal(signal.SIGSTOP)
        program.go()
        program.wait_for("done")
        window.process.send_signal(signal.SIGCONT)
        trace = window.end(stop=True)
        program.go()
        program.counts()
    assert calls(trace) == {"cudaLaunchKernel": 300_000, "cudaDeviceSynchronize": 50}
    assert len(trace.events.time_ns) == 1000
    assert trace.events_lost == 300_050 - 1000
    assert sum(gap.count for gap in trace.gaps) == 299_999
    assert trace.unpaired == 50  # nobody put the probes in place that see the end


# ---- what becomes of processes in a window


def test_a_stopped_process_keeps_no_window_waiting(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    with launcher(cuda, group, "launch 5") as program:
        program.wait_for("ready")
        window = machine.window(group, seconds=1.0)
        window.until_open(targets=1)
        program.process.send_signal(signal.SIGSTOP)
        program.go()
        assert calls(window.end()) == {}
        assert window.state == "done"
        assert not breakpoints(program.pid, cuda.runtime.name)
        program.process.send_signal(signal.SIGCONT)
        assert program.counts().launches == 5


def test_who_dies_in_a_call_has_a_begin_without_an_end(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    script = "say ready; wait; launch 2; sync 1"
    with cuda.launch("shared", script, sync_us=60_000_000, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        window.until(lambda status: status.launches == 2)
        program.process.kill()
        program.process.wait()
        trace = window.end()
    assert window.last.reason == "the job has ended"
    assert calls(trace) == {"cudaLaunchKernel": 2, "cudaDeviceSynchronize": 1}
    assert trace.unpaired == 1
    assert not any(trace.events.duration_ns)
    assert [process.state for process in trace.processes] == ["traced"]


def test_a_process_may_become_another_program(machine: Node, cuda: CudaStandIn) -> None:
    group = machine.job()
    program = """
runtime = load("libcudart.so.13")
launch(runtime, 1)
say("ready")
launch(runtime, 20)
os.execv(sys.argv[1], [sys.argv[1], "say again; wait; launch 30; launch 4 kernel=1; say done; wait"])
"""
    with python(cuda, group, program, cuda.program("launcher-static")) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("again")
        file = Path(f"/proc/{running.pid}/exe").readlink().name
        until(lambda: breakpoints(running.pid, file))  # found, among the files that are mapped now
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        assert running.counts().launches == 34
    assert calls(trace) == {"cudaLaunchKernel": 54}
    assert trace.processes[0].launches == 54
    assert len(trace.processes) == 1
    names = {kernel.name for kernel in trace.kernels}
    assert {"void scale<float>(float*, int)", "add(float const*, float const*, float*, int)"} <= names


@pytest.mark.parametrize(("what", "number"), [("threads", 2000), ("processes", 300)])
def test_a_crowd_is_counted_to_the_last(
    machine: Node, cuda: CudaStandIn, tmp_path: Path, what: str, number: int
) -> None:
    program = crowd(tmp_path, cuda)
    group = machine.job()
    with cuda.start(program, what, str(number), preexec_fn=into(group)) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        running.output()
        assert running.process.returncode == 7
    assert calls(trace) == {"cudaLaunchKernel": 3 * number}
    assert events(trace) == calls(trace)
    assert len(trace.threads) == number
    assert {thread.launches for thread in trace.threads} == {3}
    assert sum(process.launches for process in trace.processes) == 3 * number
    assert len({thread.pid for thread in trace.threads}) == (1 if what == "threads" else number)


def test_a_container_s_processes_and_files_are_found(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    # With process ids and mounts of its own: the program and its libraries lie where this side has nothing.
    group = machine.job()
    (tmp_path / "image").mkdir()
    script = "launch 1; say ready; wait; launch 5 kernel=1; launch 2 via=driver:plain; say done; wait"
    inside = f"""
mount -t tmpfs none {tmp_path}/image && cp -r {cuda.folder}/. {tmp_path}/image/ &&
exec {tmp_path}/image/bin/launcher-shared 'dlopen {tmp_path}/image/lib/libcuda.so.1; {script}'
"""
    command: list[str | Path] = ["unshare", "--fork", "--pid", "--mount", "--kill-child", "sh", "-c", inside]
    environment = {**os.environ, "STAND_IN_ROUTE": "none"}
    with Program(command, environment, preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        program.wait_for("done")
        trace = window.end(stop=True)
        program.go()
        assert program.counts().pid == 1
    assert calls(trace) == {"cudaLaunchKernel": 5, "cuLaunchKernel": 2}
    (process,) = [process for process in trace.processes if process.state == "traced"]
    assert process.launches == 7
    assert process.pid > 1
    assert "add(float const*, float const*, float*, int)" in {kernel.name for kernel in trace.kernels}


def test_a_process_that_calls_from_everywhere_does_not_make_a_window_late(
    machine: Node, cuda: CudaStandIn
) -> None:
    # To find a place takes reading its mappings, of which it has very many.
    program = """
import mmap, struct, tempfile
held = [mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE * (i % 2)) for i in range(20000)]
runtime = load("libcudart.so.13")
launch(runtime, 1)
target = ctypes.cast(runtime.cudaDeviceSynchronize, word).value
call = bytes.fromhex("554889e548b8") + struct.pack("<Q", target) + bytes.fromhex("ffd05dc3")
if os.uname().machine == "aarch64":  # stp; ldr x16, target; blr x16; ldp; ret
    call = bytes.fromhex("fd7bbfa99000005800023fd6fd7bc1a8c0035fd6") + struct.pack("<Q", target)
file = tempfile.TemporaryFile()
file.write(call.ljust(32, b"\\0") * 600)
file.flush()
code = mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
base = ctypes.addressof(ctypes.c_char.from_buffer(code))
say("ready")
for number in range(600):
    ctypes.CFUNCTYPE(None)(base + 32 * number)()
say("done")
"""
    group = machine.job()
    with python(cuda, group, program) as running:
        running.wait_for("ready")
        window = machine.window(group, seconds=2.0)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end()
        running.go()
        running.output()
    assert calls(trace) == {"cudaDeviceSynchronize": 600}
    assert window.last.to_ns - window.last.from_ns < 10e9  # rather than a minute
    assert "the end of calls is not seen at" in window.last.reason


# ---- files


def test_files_that_were_deleted_are_probed_all_the_same(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    shutil.copytree(cuda.folder, tmp_path / "cuda", symlinks=True)
    made = CudaStandIn(tmp_path / "cuda")
    group = machine.job()
    with made.launch(
        "shared", "launch 1; say ready; wait; launch 5; say done; wait", preexec_fn=into(group)
    ) as program:
        program.wait_for("ready")
        shutil.rmtree(made.folder)
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        program.wait_for("done")
        trace = window.end(stop=True)
        program.go()
        program.counts()
    assert calls(trace) == {"cudaLaunchKernel": 5}
    assert [(kernel.name, kernel.reason) for kernel in trace.kernels] == [("", "its file has been deleted")]


def test_a_library_that_has_no_name_is_probed(machine: Node, cuda: CudaStandIn) -> None:
    program = """
file = os.memfd_create("no\\nname \\x1b[2J")
os.write(file, open(sys.argv[1], "rb").read())
runtime = load(f"/proc/self/fd/{file}")
launch(runtime, 1)
say("ready")
launch(runtime, 20)
say("done")
"""
    group = machine.job()
    with python(cuda, group, program, cuda.runtime) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        running.output()
        assert running.process.returncode == 0
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert all(file.path.isprintable() for file in trace.files)


def test_a_library_may_go_and_come_again_in_a_window(machine: Node, cuda: CudaStandIn) -> None:
    load = f"dlopen {cuda.other}"
    script = f"{load}; launch 1; say ready; wait; launch 5; dlclose; say gone; wait; {load}; launch 6"
    group = machine.job()
    with cuda.launch("none", f"{script}; sync 3; dlclose", route="none", preexec_fn=into(group)) as program:
        program.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        program.go()
        program.wait_for("gone")
        window.until(lambda status: status.launches == 5)
        program.go()
        assert program.counts().launches == 12
        trace = window.end(stop=True)
    assert calls(trace) == {"cudaLaunchKernel": 11, "cudaDeviceSynchronize": 3}


def test_a_library_of_very_many_symbols_is_searched_to_the_end(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    source, library = tmp_path / "many.c", tmp_path / "libmany.so"
    nothing = "".join(
        f".globl cudaNothing{i}; .type cudaNothing{i},@function; cudaNothing{i}: ret\n"
        for i in range(100_000)
    )
    source.with_suffix(".s").write_text(f'.text\n{nothing}.section .note.GNU-stack,"",@progbits\n')
    source.write_text(
        "typedef struct { unsigned x, y, z; } dim3;\n"
        "int cudaLaunchKernel(const void *f, dim3 g, dim3 b, void **a, unsigned long n, void *s)\n"
        "{ (void)f, (void)g, (void)b, (void)a, (void)n, (void)s; return 0; }\n"
    )
    subprocess.run([*COMPILER, "-shared", "-o", library, source, source.with_suffix(".s")], check=True)
    program = (
        'runtime = load(sys.argv[1]); launch(runtime, 1); say("ready"); launch(runtime, 20); say("done")'
    )
    group = machine.job()
    with python(cuda, group, program, library) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        running.output()
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert [file.symbols for file in trace.files] == [1]


def test_files_of_garbage_are_told_of_and_the_others_are_probed(
    machine: Node, cuda: CudaStandIn, tmp_path: Path
) -> None:
    random_bytes = random.Random(2)
    header = cuda.runtime.read_bytes()[:64]
    for number in range(40):
        # What looks like a library, with some of its header as it should be.
        kept = header[: (6, 20, 40, 64)[number % 4]]
        (tmp_path / f"libcudart.so.{number}").write_bytes(kept + random_bytes.randbytes(100_000))
    whole = bytearray(cuda.runtime.read_bytes())
    for number in range(40, 80):
        for _ in range(20):
            whole[random_bytes.randrange(64, len(whole))] = random_bytes.randrange(256)
        (tmp_path / f"libcuda.so.{number}").write_bytes(whole)
    program = """
import mmap
held = []
for name in os.listdir(sys.argv[1]):
    with open(f"{sys.argv[1]}/{name}", "rb") as file:
        held.append(mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_EXEC))
runtime = load("libcudart.so.13")
launch(runtime, 1)
say("ready")
launch(runtime, 20)
say("done")
"""
    group = machine.job()
    with python(cuda, group, program, tmp_path) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        running.output()
        assert running.process.returncode == 0
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert len(trace.files) > 40


def test_what_a_process_calls_itself_does_no_harm(machine: Node, cuda: CudaStandIn) -> None:
    program = """
ctypes.CDLL(None).prctl(15, b"\\x1b[2J\\n\\xff\\"'", 0, 0, 0)
runtime = load("libcudart.so.13")
launch(runtime, 1)
say("ready")
launch(runtime, 20)
say("done")
"""
    group = machine.job()
    with python(cuda, group, program, "\033[2J\n\udcff" + "x" * 100_000, "y" * 1000) as running:
        running.wait_for("ready")
        window = machine.window(group)
        window.until_open(targets=1)
        running.go()
        running.wait_for("done")
        trace = window.end(stop=True)
        running.go()
        running.output()
    assert calls(trace) == {"cudaLaunchKernel": 20}
    assert len(trace.processes[0].command) <= 1024
    assert trace.processes[0].command.isprintable()
    (thread,) = trace.threads
    assert thread.name == "␛[2J␊�\"'"


# ---- several windows


def test_windows_at_once_see_each_its_own_and_all_of_it(machine: Node, cuda: CudaStandIn) -> None:
    groups = [machine.job("one"), machine.job("two")]
    script = "launch 1; say ready; wait; {}; say done; wait"
    programs = [
        cuda.launch("shared", script.format(f"launch {number}; sync {number}"), preexec_fn=into(group))
        for group, number in zip(groups, (30, 50), strict=True)
    ]
    with programs[0], programs[1]:
        for program in programs:
            program.wait_for("ready")
        windows: list[Window] = [machine.window(group) for group in (*groups, groups[0])]
        for window in windows:
            window.until_open(targets=1)
        for program in programs:
            program.go()
            program.wait_for("done")
        traces = [windows[2].end(stop=True)]
        traces += [window.end(stop=True) for window in windows[:2]]
        for program in programs:
            program.go()
            program.counts()
    expected = [{"cudaLaunchKernel": number, "cudaDeviceSynchronize": number} for number in (30, 30, 50)]
    assert [calls(trace) for trace in traces] == expected
    assert all(trace.foreign_hits for trace in traces)
