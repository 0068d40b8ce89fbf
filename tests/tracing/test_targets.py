"""The files that real processes map, and the functions in them."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.jobs.hierarchies import Hierarchy
from expanse_ebpf.python_stacks import mapped_files
from expanse_ebpf.tracing import same_file, targets
from expanse_ebpf.tracing.targets import File, ProcessView, Targets, processes_of
from tests.kernel.groups import Groups

ROOT = Path(__file__).resolve().parents[2]

# Says what it has done, and does what it is told: `load PATH`, `many PATH` (some 10,000 mappings of it),
# `swap NEW` (for what was loaded), `thread` (goes on without its first thread).
PROGRAM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static char line[9000];
static void *held[9];

static int done(int fine) { printf(fine ? "done\n" : "failed: %s\n", dlerror()); return fflush(stdout); }

static void *obey(void *unused)
{
    while (fgets(line, sizeof(line), stdin)) {
        char *what = strtok(line, " \n"), *path = strtok(NULL, "\n"), *from;
        if (path && (from = strstr(path, "\\n"))) {
            *from = '\n';
            memmove(from + 1, from + 2, strlen(from + 1));
        }
        if (!strcmp(what, "load")) {
            done((held[0] = dlopen(path, RTLD_NOW | RTLD_LOCAL)) != NULL);
        } else if (!strcmp(what, "swap")) {
            dlclose(held[0]);
            done((held[0] = dlopen(path, RTLD_NOW | RTLD_LOCAL)) != NULL);
        } else if (!strcmp(what, "many")) {
            int file = open(path, O_RDONLY), fine = file >= 0;
            for (int number = 0; fine && number < 10000; number++)
                fine = mmap(NULL, 4096, number % 2 ? PROT_READ | PROT_EXEC : PROT_EXEC, MAP_PRIVATE, file,
                            number % 3 * 4096) != MAP_FAILED;
            done(fine);
        } else if (!strcmp(what, "thread")) {
            pthread_t thread;
            pthread_create(&thread, NULL, obey, NULL);
            done(1);
            pthread_exit(NULL);
        }
    }
    _exit(0);
}

#ifdef LINKED
int cudaLaunchKernel(void);
int cudaMemcpy(void);
static int (*const kept[])(void) = {cudaLaunchKernel, cudaMemcpy};
#endif

int main(int count, char **paths)
{
#ifdef LINKED
    __asm__ volatile("" : : "r"(kept[0]), "r"(kept[1]));
#endif
    for (int number = 1; number < count; number++)
        if (!dlopen(paths[number], RTLD_NOW | RTLD_LOCAL))
            return done(0), 1;
    done(1);
    obey(NULL);
    return 0;
}
"""


def compiled(output: Path, source: str, *options: str | Path) -> Path:
    output.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-O1", "-w", "-x", "c", "-", "-x", "none", *options, "-o", output]
    subprocess.run(command, input=source, text=True, check=True)
    return output


def source_of(*names: str) -> str:
    return "".join(f"int {name}(void) {{ return {number}; }}\n" for number, name in enumerate(names))


def library(output: Path, *names: str, options: tuple[str, ...] = ()) -> Path:
    """A shared library that exports functions of these names."""
    return compiled(output, source_of(*names), "-shared", "-fPIC", *options)


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("program") / "program", PROGRAM, "-ldl", "-lpthread")


class Running:
    """The program at work."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.pid = process.pid
        self.heard()

    def tell(self, *words: str | Path) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(" ".join(map(str, words)).replace("\n", "\\n") + "\n")
        self.process.stdin.flush()
        self.heard()

    def heard(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "done\n"


@contextlib.contextmanager
def running(*command: str | Path) -> Iterator[Running]:
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


def descriptors() -> set[str]:
    """Of this process, by what is open."""
    found = set()
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.add(f"{each.name} {each.readlink()}")
    return found


@pytest.fixture
def follower() -> Iterator[Targets]:
    before = descriptors()
    made = Targets()
    yield made
    made.close()
    assert descriptors() <= before


def names(file: File) -> set[str]:
    return {point.function.symbol for point in file.points}


def view(follower: Targets, pid: int) -> ProcessView:
    found = follower.views[pid]
    assert found.pid == pid
    return found


# ---- points


def test_points_are_where_the_functions_are_in_the_file(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    wanted = ["cudaLaunchKernel", "cudaMemcpyAsync_ptsz", "cuLaunchKernel", "ncclAllReduce"]
    path = library(tmp_path / "some.so", *wanted, "cudaLaunchHostFunc", "other")
    with running(program, path) as process:
        (file,) = follower.scan([process.pid])
        assert view(follower, process.pid).state == "traced"
        assert view(follower, process.pid).files == (file.key,)
    assert (file.path, file.levels, file.reason) == (str(path), ("runtime", "driver", "nccl"), "")
    check_places(file, path, ".dynsym")
    assert names(file) == set(wanted)
    assert Path(file.attach_path).stat().st_ino == path.stat().st_ino


def check_places(file: File, path: Path, table: str) -> None:
    """Against pyelftools."""
    elf = ELFFile(io.BytesIO(path.read_bytes()))
    code = next(each for each in elf.iter_segments() if each["p_type"] == "PT_LOAD" and each["p_flags"] & 1)
    symbols = elf.get_section_by_name(table)
    for point in file.points:
        into = symbols.get_symbol_by_name(point.function.symbol)[0]["st_value"] - code["p_vaddr"]
        expected = (code["p_offset"] + into, into, code["p_filesz"] - into)
        assert (point.offset, point.below, point.above) == expected
    assert [point.offset for point in file.points] == sorted(point.offset for point in file.points)


def test_two_names_of_one_place_are_one_point(program: Path, tmp_path: Path, follower: Targets) -> None:
    source = source_of("cudaLaunchKernel") + (
        'int __cudaLaunchKernel(void) __attribute__((alias("cudaLaunchKernel")));\n'
        'int cuLaunchKernel(void) __attribute__((alias("cudaLaunchKernel")));\n'
    )
    path = compiled(tmp_path / "some.so", source, "-shared", "-fPIC")
    with running(program, path) as process:
        (file,) = follower.scan([process.pid])
    assert [point.function.symbol for point in file.points] == ["__cudaLaunchKernel"]
    assert file.levels == ("runtime",)


def test_what_is_no_function_or_is_not_defined_here_is_no_point(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    source = "int cudaMalloc = 3; int cudaFree(void); int other(void) { return cudaFree(); }"
    path = compiled(tmp_path / "some.so", source, "-shared", "-fPIC", "-Wl,-z,lazy")
    used = compiled(
        tmp_path / "used", PROGRAM + source_of("cudaFree"), "-rdynamic", "-ldl", "-lpthread", "-s"
    )
    with running(used, path) as process:
        (file,) = follower.scan([process.pid])
        assert (file.path, names(file)) == (str(used), {"cudaFree"})


# ---- where they are found


@pytest.mark.parametrize("hash_style", ["gnu", "sysv"])
def test_the_runtime_is_found_under_any_name(
    program: Path, tmp_path: Path, follower: Targets, hash_style: str
) -> None:
    path = library(
        tmp_path / "a\nb.bin", "cudaLaunchKernel", options=(f"-Wl,--hash-style={hash_style}", "-s")
    )
    with running(program) as process:
        process.tell("load", path)
        (file,) = follower.scan([process.pid])
        assert names(file) == {"cudaLaunchKernel"}
        assert file.path == str(path).replace("\n", "\u240a")


@pytest.mark.parametrize("option", ["-pie", "-no-pie"])
def test_a_static_runtime_is_found_in_the_program(option: str, tmp_path: Path, follower: Targets) -> None:
    runtime = compiled(tmp_path / "runtime.o", source_of("cudaLaunchKernel", "cudaMemcpy"), "-c")
    linked = compiled(tmp_path / "linked", PROGRAM, "-DLINKED", runtime, option, "-ldl", "-lpthread")
    with running(linked) as process:
        (file,) = follower.scan([process.pid])
        assert (file.path, names(file)) == (str(linked), {"cudaLaunchKernel", "cudaMemcpy"})
    check_places(file, linked, ".symtab")


def test_where_the_runtime_is_stripped_the_driver_is_left(tmp_path: Path, follower: Targets) -> None:
    runtime = compiled(tmp_path / "runtime.o", source_of("cudaLaunchKernel", "cudaMemcpy"), "-c")
    linked = compiled(tmp_path / "linked", PROGRAM, "-DLINKED", runtime, "-ldl", "-lpthread", "-s")
    driver = library(tmp_path / "libcuda.so.1", "cuLaunchKernel", options=("-s",))
    with running(linked) as process:
        assert follower.scan([process.pid]) == []
        assert view(follower, process.pid).state == "no_cuda"
        process.tell("load", driver)
        (file,) = follower.scan([process.pid])
        assert file.levels == ("driver",)
        assert view(follower, process.pid).state == "traced"


def test_a_hidden_runtime_in_a_library_is_found_unless_it_is_stripped(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    options = ("-fvisibility=hidden",)
    hidden = library(tmp_path / "hidden.so", "cudaLaunchKernel", options=options)
    stripped = library(tmp_path / "stripped.so", "cudaLaunchKernel", options=(*options, "-s"))
    with running(program, hidden, stripped) as process:
        (file,) = follower.scan([process.pid])
        assert file.path == str(hidden)


def test_a_deleted_library_is_found_while_it_is_mapped(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    inode = path.stat().st_ino
    with running(program, path) as process:
        path.unlink()
        library(path, "cudaMalloc")  # not what is mapped
        (file,) = follower.scan([process.pid])
        assert names(file) == {"cudaLaunchKernel"}
        assert Path(file.attach_path).stat().st_ino == inode


def test_a_file_is_one_under_all_its_names_and_copies_are_others(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    first = library(tmp_path / "one/libcudart.so.13", "cudaLaunchKernel")
    second = tmp_path / "two/libcudart.so.13"
    second.parent.mkdir()
    shutil.copy2(first, second)
    third = tmp_path / "hard"
    third.hardlink_to(first)
    fourth = tmp_path / "symbolic"
    fourth.symlink_to(first)
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(running(program, path)).pid for path in (first, second, third, fourth)]
        files = follower.scan(pids)
        assert {file.key[1] for file in files} == {first.stat().st_ino, second.stat().st_ino}
        assert len(files) == len(follower.files) == 2
        keys = [follower.views[pid].files for pid in pids]
        assert keys[0] == keys[2] == keys[3] != keys[1]
        assert follower.scan(pids) == []


def test_files_of_other_mount_namespaces_are_found(program: Path, tmp_path: Path, follower: Targets) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    inside = tmp_path / "inside"
    inside.mkdir()
    script = f"mount -t tmpfs none {inside} && cp {path} {inside}/x.so && exec {program} {inside}/x.so"
    with running("unshare", "-m", "sh", "-c", script) as process:
        (file,) = follower.scan([process.pid])
        assert file.path == f"{inside}/x.so"
        assert Path(file.attach_path).stat().st_ino != path.stat().st_ino


OVERLAYS = """
mount -t tmpfs none {0} && cd {0} && mkdir lower own{{1,2,3}} one two image && cp {1} lower/x.so &&
mkdir own{{1,2}}/{{upper,work}} &&
mount -t overlay -o lowerdir=lower,upperdir=own1/upper,workdir=own1/work none one &&
mount -t overlay -o lowerdir=lower,upperdir=own2/upper,workdir=own2/work none two &&
exec {2} {3}
"""


@pytest.mark.parametrize("paths", ["one/x.so two/x.so", "two/x.so lower/x.so", "lower/x.so one/x.so"])
def test_a_file_below_two_overlays_is_one(
    paths: str, program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    inside = tmp_path / "inside"
    inside.mkdir()
    both = " ".join(f"{inside}/{each}" for each in paths.split())
    script = OVERLAYS.format(inside, path, program, both)
    with running("unshare", "-m", "bash", "-c", script) as process:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert all(each in maps for each in both.split())  # both are mapped
        (file,) = follower.scan([process.pid])
        assert view(follower, process.pid).files == (file.key,)


def test_files_that_only_look_alike_behind_overlays_are_two(
    program: Path, tmp_path: Path, follower: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two mounts of one image."""
    first = library(tmp_path / "one.so", "cudaLaunchKernel")
    second = tmp_path / "two.so"
    shutil.copy2(first, second)
    monkeypatch.setattr(targets, "stamp", lambda _: (1, 2, 3, 4))
    monkeypatch.setattr(targets, "on_overlay", lambda _: True)
    with running(program, first, second) as process:
        assert len(follower.scan([process.pid])) == 2


def test_pages_tell_files_apart(tmp_path: Path) -> None:
    for name, content in (("one", b"x" * 5000), ("other", b"x" * 5000), ("empty", b"")):
        (tmp_path / name).write_bytes(content)
    with contextlib.ExitStack() as stack:
        one, again, other, empty = (
            stack.enter_context((tmp_path / name).open("rb")).fileno()
            for name in ("one", "one", "other", "empty")
        )
        assert same_file.same_pages(one, again) is True
        assert same_file.same_pages(one, other) is False
        assert same_file.same_pages(one, empty) is None
        assert not same_file.on_overlay(one)


# ---- processes that change


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_library_that_is_loaded_later_is_found(program: Path, tmp_path: Path, follower: Targets) -> None:
    path = library(tmp_path / "libcudart.so.13", "cudaLaunchKernel")
    with running(program) as process:
        assert follower.scan([process.pid]) == []
        assert view(follower, process.pid) == ProcessView(process.pid, str(program), "no_cuda", "", ())
        process.tell("load", path)
        (file,) = follower.scan([process.pid])
        assert file.path == str(path)
        assert view(follower, process.pid).state == "traced"
    assert view(follower, process.pid).state == "traced"  # although it has ended


def test_a_process_is_looked_at_again_after_a_while_only(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []

    def counting(task: str) -> bytes:
        looks.append(task)
        return mapped_files.read_maps(task)

    monkeypatch.setattr(targets, "read_maps", counting)
    first = library(tmp_path / "first.so", "other")
    second = library(tmp_path / "second.so", "cudaMalloc", options=("-Wl,--build-id=none",))
    clock = Clock()
    follower = Targets(clock=clock)
    with contextlib.closing(follower), running(program) as process:
        process.tell("load", first)
        assert follower.scan([process.pid]) == []
        size = Path(f"/proc/{process.pid}/statm").read_text().split()[0]
        process.tell("swap", second)
        assert Path(f"/proc/{process.pid}/statm").read_text().split()[0] == size
        clock.now = 4.9
        assert follower.scan([process.pid]) == []
        assert len(looks) == 1
        clock.now = 5.1
        assert [names(file) for file in follower.scan([process.pid])] == [{"cudaMalloc"}]
        assert len(looks) == 2


def test_a_process_whose_first_thread_has_ended_is_followed(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    with running(program) as process:
        process.tell("thread")
        while "Z (zombie)" not in Path(f"/proc/{process.pid}/status").read_text():
            os.sched_yield()
        assert follower.scan([process.pid]) == []
        assert view(follower, process.pid).state == "no_cuda"
        process.tell("load", path)
        (file,) = follower.scan([process.pid])
        assert names(file) == {"cudaLaunchKernel"}


def test_a_process_that_has_ended_is_said_to(follower: Targets) -> None:
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from now on
    try:
        assert follower.scan([gone.pid]) == []
        assert view(follower, gone.pid).state == "exited"
    finally:
        gone.wait()
    again = Targets()
    again.scan([gone.pid])
    assert view(again, gone.pid) == ProcessView(gone.pid, "", "exited", "it has exited", ())


# ---- what cannot be probed


def test_a_library_that_is_called_like_cuda_and_has_nothing_is_told(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = library(tmp_path / "libcudart-7.so.13", "other")
    with running(program, path) as process:
        assert follower.scan([process.pid]) == []
        found = view(follower, process.pid)
        assert found.state == "no_probe_point"
        (file,) = follower.files
        assert found.files == (file.key,)
        assert (file.path, file.points, file.attach_path) == (str(path), (), "")
        assert found.reason == f"{path}: {file.reason}" == f"{path}: {targets._NO_FUNCTION}"


def test_a_process_that_has_a_gpu_open_is_told(program: Path, follower: Targets) -> None:
    script = f"mount -t tmpfs none /dev && touch /dev/nvidia0 && exec {program} 7</dev/nvidia0"
    with running("unshare", "-m", "sh", "-c", script) as process:
        assert follower.scan([process.pid]) == []
        assert view(follower, process.pid).state == "no_probe_point"
        assert "uses a GPU" in view(follower, process.pid).reason


def damaged(path: Path, output: Path) -> Path:
    """A copy that runs, but whose table of sections is none."""
    data = bytearray(path.read_bytes())
    data[58] += 1  # e_shentsize
    output.write_bytes(data)
    output.chmod(0o755)
    return output


def test_a_damaged_program_does_not_hide_its_libraries(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    program = damaged(program, tmp_path / "damaged")
    with running(program) as process:
        assert follower.scan([process.pid]) == []
        found = view(follower, process.pid)
        assert (found.state, found.reason) == ("unreadable", f"{program}: sections beyond reason")
        process.tell("load", path)
        (file,) = follower.scan([process.pid])
        assert names(file) == {"cudaLaunchKernel"}
        found = view(follower, process.pid)
        assert (found.state, found.reason) == ("traced", f"{program}: sections beyond reason")


def test_a_damaged_library_has_those_functions_that_are_found_and_says_why_not_all(
    program: Path, tmp_path: Path, follower: Targets
) -> None:
    path = damaged(library(tmp_path / "whole.so", "cudaLaunchKernel"), tmp_path / "libcudart.so.12")
    with running(program, path) as process:
        (file,) = follower.scan([process.pid])
        assert (names(file), file.reason) == ({"cudaLaunchKernel"}, "sections beyond reason")


SCAN = """
import sys
from expanse_ebpf.tracing.targets import Targets
follower = Targets()
files = follower.scan([int(sys.argv[1])])
view = follower.views[int(sys.argv[1])]
print([file.path for file in files], view.state, view.reason, sep="|")
"""


def scanned_by(pid: int, *options: str) -> list[str]:
    """What another user's scan finds: files, state, reason."""
    command = ["setpriv", *options, sys.executable, "-c", SCAN, str(pid)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.strip().split("|")


def test_a_program_that_may_not_be_read_does_not_hide_its_libraries(program: Path, tmp_path: Path) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    secret = tmp_path / "secret"
    shutil.copy(program, secret)
    os.chown(secret, 1, 1)
    secret.chmod(0o111)
    with running(secret, path) as process:
        files, state, reason = scanned_by(process.pid, "--bounding-set=-dac_override,-dac_read_search")
    assert (files, state) == (repr([str(path)]), "traced")
    assert reason == f"{secret}: it cannot be opened"


def test_a_process_of_somebody_else_is_unreadable(program: Path) -> None:
    with running(program) as process:
        options = ["--bounding-set=-all", "--inh-caps=-all", "--reuid=65534", "--clear-groups"]
        files, state, reason = scanned_by(process.pid, *options)
    assert (files, state) == ("[]", "unreadable")
    assert reason == "its memory may not be read by this user"


# ---- bounds


def test_ten_thousand_mappings_are_no_obstacle(program: Path, tmp_path: Path, follower: Targets) -> None:
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    with running(program) as process:
        process.tell("many", path)
        assert Path(f"/proc/{process.pid}/maps").read_text().count("some.so") >= 10_000
        (file,) = follower.scan([process.pid])
        assert file.path == str(path)


def test_lines_of_other_mappings_are_left_out() -> None:
    line = b"7f00-7f01 %s 00000000 fe:01 %d                       %s\n"
    text = b"".join(
        line % each
        for each in (
            (b"r-xp", 5, b"/lib/a"),
            (b"r-xp", 5, b"/lib/a"),
            (b"r--p", 6, b"/lib/x"),
            (b"--xs", 7, b"/lib/b (deleted)"),
            (b"r-xp", 0, b"[vdso]"),
            (b"r-xs", 8, b"/dev/nvidiactl"),
            (b"r-xs", 9, b"/dev/shm/c"),
        )
    )
    found = targets._files_in(text + b"7f00-7f01 r-xp 00000000 fe:01 10" + bytes(100))
    assert list(found) == [
        (b"fe:01", 5, b"/lib/a"),
        (b"fe:01", 7, b"/lib/b (deleted)"),
        (b"fe:01", 9, b"/dev/shm/c"),
    ]


@given(st.binary(max_size=300))
def test_any_text_is_taken(text: bytes) -> None:
    targets._files_in(text)
    targets._files_in(b"7f00-7f01 r-xp 00000000 fe:01 5 /" + text)


def test_too_many_files_are_told_and_not_held(
    program: Path, tmp_path: Path, follower: Targets, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(targets, "_MOST_FILES", 2)
    paths = [library(tmp_path / f"{number}.so", "cudaLaunchKernel") for number in range(3)]
    with running(program, *paths) as process:
        assert len(follower.scan([process.pid])) == 2
        assert "more than 2 files" in view(follower, process.pid).reason
        assert sum(bool(file.attach_path) for file in follower.files) == 2


def test_too_many_processes_are_counted(
    program: Path, monkeypatch: pytest.MonkeyPatch, follower: Targets
) -> None:
    monkeypatch.setattr(targets, "_MOST_PROCESSES", 2)
    with contextlib.ExitStack() as stack:
        pids = [stack.enter_context(running(program)).pid for _ in range(3)]
        follower.scan(pids)
        assert (len(follower.views), follower.left_out) == (2, 1)
        # Those that are gone make room.
        follower.scan(pids[2:])
        assert pids[2] in follower.views


class Slow(Clock):
    """Time passes while mappings are read: so many seconds each time."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = list(seconds)

    def read_maps(self, task: str) -> bytes:
        self.now += self.seconds.pop(0)
        return mapped_files.read_maps(task)


def test_what_a_scan_has_no_time_for_is_left_for_the_next(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Slow(2.5, 0)
    monkeypatch.setattr(targets, "read_maps", clock.read_maps)
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    follower = Targets(clock=clock)
    with contextlib.closing(follower), running(program, path) as one, running(program, path) as other:
        assert len(follower.scan([one.pid, other.pid])) == 1
        assert list(follower.views) == [min(one.pid, other.pid)]
        assert follower.scan([one.pid, other.pid]) == []
        assert [each.state for each in follower.views.values()] == ["traced"] * 2


def test_one_process_may_take_several_scans(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Slow(9, 0)
    monkeypatch.setattr(targets, "read_maps", clock.read_maps)
    path = library(tmp_path / "some.so", "cudaLaunchKernel")
    follower = Targets(clock=clock)
    with contextlib.closing(follower), running(program, path) as process:
        assert follower.scan([process.pid]) == []
        assert follower.views == {}
        (file,) = follower.scan([process.pid])
        assert view(follower, process.pid).files == (file.key,)


# ---- the processes of a job


@pytest.mark.parametrize("hierarchy", ["unified", "freezer"])
def test_processes_are_those_of_the_cgroup_and_below_it(program: Path, hierarchy: str) -> None:
    groups = Groups()
    try:
        top, below = groups.make(hierarchy, "job"), groups.make(hierarchy, "job/step/task")
        with running(program) as one, running(program) as other, running(program):
            (top / "cgroup.procs").write_text(str(one.pid))
            (below / "cgroup.procs").write_text(str(other.pid))
            assert processes_of(hierarchy, f"/{top.name}") == sorted([one.pid, other.pid])
            assert processes_of(hierarchy, f"/{top.name}/step") == [other.pid]
            assert processes_of(hierarchy, f"/{top.name}/none") == []
            assert processes_of("no such", f"/{top.name}") == []
    finally:
        groups.close()


def test_controllers_of_one_mount_are_found_under_each_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = [
        Hierarchy("cpu", 1, ("cpu", "cpuacct"), "/cgroup/cpu", "/"),
        Hierarchy("unified", 2, ("memory",), "/cgroup/unified", "/"),
    ]
    monkeypatch.setattr(targets, "mounted", lambda: mounts)
    targets._directory.cache_clear()
    try:
        assert targets._directory("cpuacct", "/a") == "/cgroup/cpu/a"
        assert targets._directory("memory", "/a") is None  # jobs are told apart in `unified` there
        assert targets._directory("unified", "/a") == "/cgroup/unified/a"
    finally:
        targets._directory.cache_clear()
