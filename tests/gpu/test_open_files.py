import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.gpu import open_files
from expanse_ebpf.gpu.open_files import (
    NOTHING,
    Opened,
    OpenFiles,
    parse_majors,
    parse_mig_minors,
    parse_nspid,
)
from tests.gpu.made_up_proc import MadeUpProc

EVERYTHING = 1 << 30


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def proc(tmp_path: Path) -> MadeUpProc:
    return MadeUpProc(tmp_path)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(proc: MadeUpProc, clock: Clock) -> OpenFiles:
    return OpenFiles(str(proc.path), clock)


# ---- texts ----

MIG_MINORS = """config 1
monitor 2
gpu0/gi0/access 3
gpu0/gi0/ci0/access 4
gpu0/gi3/access 30
gpu0/gi3/ci0/access 31
gpu7/gi14/ci7/access 1078
gpu0/gi3/ci0/ 32
gpux/gi3/access 33
gpu0/gi3/access -1
"""


def test_mig_minors():
    assert parse_mig_minors(MIG_MINORS) == {
        3: (0, 0, None),
        4: (0, 0, 0),
        30: (0, 3, None),
        31: (0, 3, 0),
        1078: (7, 14, 7),
    }


@pytest.mark.parametrize(
    ("status", "numbers"),
    [
        (b"Name:\tx\nNSpid:\t645400\t324\nNSpgid:\t7\n", (645400, 324)),
        (b"NSpid:\t9\n", (9,)),
        (b"Name:\tNSpid:\t9\n", ()),
        (b"NSpid:\n", ()),
        (b"", ()),
        (b"NSpid:" + b"\t1" * 40 + b"\n", ()),
    ],
)
def test_numbers_in_every_namespace(status, numbers):
    assert parse_nspid(status) == numbers


def test_majors():
    text = "Character devices:\n  1 mem\n195 nvidia\n509 nvidia-caps\n\nBlock devices:\n  7 loop\n"
    assert parse_majors(text) == {"mem": 1, "nvidia": 195, "nvidia-caps": 509}


@given(st.text(), st.binary())
def test_hostile_texts_never_raise(text, data):
    for end in ("", " 30\n", "/access 3"):
        parse_mig_minors(text + end)
        parse_majors(text + end)
    parse_nspid(b"NSpid:\t" + data)


# ---- which links count ----


@pytest.mark.parametrize(
    ("links", "expected"),
    [
        (["/dev/nvidia0", "/dev/nvidia3", "/dev/nvidia3"], Opened(frozenset({0, 3}))),
        (["/dev/nvidiactl", "/dev/nvidia255", "/dev/nvidia254", "/dev/nvidia-modeset"], NOTHING),
        (["/dev/nvidia253"], Opened(frozenset({253}))),
        (["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"], Opened(uvm=True)),
        (["/dev/nvidia-uvm-tools"], NOTHING),
        (["/dev/nvidia-caps/nvidia-cap31", "/dev/nvidia0"], Opened(frozenset({0}), frozenset({31}))),
        (["/run/nvidia/driver/dev/nvidia1"], Opened(frozenset({1}))),
        (["/dev/nvidia1 (deleted)"], Opened(frozenset({1}))),
        (
            ["/home/u/nvidia1.txt", "/dev/nvidia1x", "/dev/xnvidia1", "socket:[195]", "anon_inode:nvidia0"],
            NOTHING,
        ),
        (["/dev/null", "/dev/pts/3", "/dev/shm/nvidia0"], NOTHING),
        ([], NOTHING),
    ],
)
def test_links(proc, files, links, expected):
    proc.process(77, *links, numbers=(77, 4), program="/opt/conda/bin/python3.12 (deleted)")
    files.look({77})
    if expected.any:
        expected = expected._replace(numbers=(77, 4), program="python3.12")
    assert files.of(77) == expected


def test_the_first_thread_has_exited(proc, files):
    proc.process(77, "/dev/nvidia0", thread=79)
    files.look({77})
    assert files.of(77).minors == {0}


def test_links_that_are_no_text(proc, files):
    proc.process(77, "/dev/nvidia0")
    (proc.path / "77/fd/9").symlink_to(os.fsdecode(b"/dev/\xffnvidia1"))
    files.look({77})
    assert files.of(77).minors == {0}


# ---- real descriptors ----

HOLDER = """
import os, sys
held = [os.open(path, int(flags)) for path, flags in zip(sys.argv[1::2], sys.argv[2::2])]
os.write(1, b"ready")
os.read(0, 1)
"""


class Holders:
    """Real processes that hold files open."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []

    def hold(self, *paths: Path, flags: int = os.O_RDONLY) -> int:
        arguments = [text for path in paths for text in (str(path), str(flags))]
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.processes.append(process)
        ready, _, _ = select.select([process.stdout], [], [], 60)
        assert ready
        assert os.read(process.stdout.fileno(), 5) == b"ready"
        return process.pid

    def end(self) -> None:
        for process in self.processes:
            process.communicate(b"x", timeout=60)
        self.processes.clear()


@pytest.fixture
def holders() -> Iterator[Holders]:
    made = Holders()
    yield made
    made.end()


def device(path: Path, major: int, minor: int) -> Path:
    os.mknod(path, 0o600 | 0o020000, os.makedev(major, minor))
    return path


def look(pid: int) -> Opened | None:
    files = OpenFiles()
    files.look({pid})
    return files.of(pid)


def test_a_device_under_another_name(holders, tmp_path, monkeypatch):
    """The memory devices (major 1) stand in for GPUs, since every machine has them."""
    monkeypatch.setattr(open_files, "GPU_MAJOR", 1)
    pid = holders.hold(
        device(tmp_path / "my-nvidia", 1, 3), device(tmp_path / "nvidia7", 1, 5), Path("/dev/full")
    )
    found = look(pid)
    assert found.minors == {3, 5, 7}  # /dev/full is 1:7, and "nvidia7" is 1:5 whatever its name
    assert found.numbers[0] == pid
    assert found.program == Path(sys.executable).resolve().name


def test_a_name_is_no_device(holders, tmp_path):
    (tmp_path / "nvidia0").write_text("")
    pid = holders.hold(tmp_path / "nvidia0", device(tmp_path / "nvidia1", 1, 3))
    assert look(pid) == NOTHING


def test_a_device_that_was_only_located(holders, tmp_path):
    node = device(tmp_path / "nvidia4", 195, 4)
    pid = holders.hold(node, flags=os.O_PATH)
    assert Path(f"/proc/{pid}/fd/3").stat().st_rdev == os.makedev(195, 4)
    assert look(pid) == NOTHING


def test_a_device_that_was_removed(holders, tmp_path, monkeypatch):
    monkeypatch.setattr(open_files, "GPU_MAJOR", 1)
    node = device(tmp_path / "nvidia3", 1, 3)
    pid = holders.hold(node)
    node.unlink()
    assert look(pid).minors == {3}


def test_a_real_process_that_ends(holders):
    pid = holders.hold(Path("/dev/null"))
    files = OpenFiles()
    files.look({pid})
    assert files.of(pid) == NOTHING
    holders.end()
    files.look(set())
    assert files.of(pid) is None


# ---- a few at a time ----


def test_a_process_is_looked_at_again_after_a_while(proc, files, clock):
    proc.process(77)
    files.look({77})
    proc.process(77, "/dev/nvidia0")
    clock.now += 29
    assert files.look({77}) == 0
    assert files.of(77) == NOTHING
    clock.now += 1
    files.look({77})
    assert files.of(77).minors == {0}
    files.look({77})
    clock.now += 10
    proc.process(77)
    files.hurry(77)
    files.hurry(78)
    files.look({77})
    assert files.of(77) == NOTHING


def test_the_budget_is_kept_and_everyone_has_a_turn(proc, files):
    for pid in range(100, 120):
        proc.process(pid, *(["/dev/null"] * 300), "/dev/nvidia0")
    calls = 0
    while any(files.of(pid) is None for pid in range(100, 120)):
        assert files.look(range(100, 120), budget=500) <= 502
        calls += 1
        assert calls <= 13  # 20 processes of 303
    assert calls >= 12
    assert all(files.of(pid).minors == {0} for pid in range(100, 120))


def test_processes_without_descriptors_cost_too(proc, files):
    for pid in range(100, 150):
        proc.process(pid)
    assert files.look(range(100, 150), budget=20) == 20
    assert sum(files.of(pid) is not None for pid in range(100, 150)) == 10


def test_a_process_of_many_descriptors_takes_several_calls(proc, files, monkeypatch):
    monkeypatch.setattr(open_files, "_MAX_DESCRIPTORS", 600)
    proc.process(77, *(["/dev/null"] * 800))
    assert files.look({77}, budget=200) == 200
    assert files.of(77) is None
    files.look({77}, budget=200)
    files.look({77}, budget=200)
    assert files.look({77}, budget=200) == 2  # of 602 in all: the other 200 are not looked at
    assert files.of(77) == NOTHING


def test_new_processes_do_not_keep_the_old_ones_from_their_turn(proc, files, clock):
    proc.process(77)
    files.look({77})
    proc.process(77, "/dev/nvidia0")
    clock.now += 31
    for pid in range(1, 41):  # each tick ten more, of which five are looked at
        proc.process(1000 + pid, "/dev/null")
    pids = {77}
    for tick in range(4):
        pids |= set(range(1001 + 10 * tick, 1011 + 10 * tick))
        files.look(pids, budget=15)
        clock.now += 1
    assert files.of(77).minors == {0}


def test_another_process_of_the_same_pid(proc, files, clock):
    proc.process(77, "/dev/nvidia0", start=5)
    files.look({77})
    proc.process(77, start=9)
    assert files.of(77) is None
    files.look({77})
    assert files.of(77) == NOTHING


@pytest.mark.parametrize("first", ["/dev/nvidia0", "/dev/null"])
def test_a_pid_that_changes_hands_during_the_look(proc, files, first):
    for pid in (77, 78):
        proc.process(pid, *([first] * 11), start=5)
    files.look({77, 78}, budget=5)
    proc.process(77, *(["/dev/null"] * 11), "/dev/nvidia1", start=9)
    files.look({77, 78}, budget=10)
    assert files.of(77) != Opened(frozenset({0}))
    files.look({77, 78})  # at once, and not in 30 s
    assert files.of(77).minors == {1}


def test_the_dead_are_forgotten(proc, files):
    proc.process(77, *(["/dev/null"] * 10), "/dev/nvidia0")
    files.look({77}, budget=5)
    assert files.look(set(), budget=5) == 0
    proc.end(77)
    files.look({77, 78})
    assert files.of(77) == NOTHING
    files.look(set())
    assert files._processes == {}


def test_capabilities_of_a_real_major(holders, tmp_path, monkeypatch):
    """With /proc/devices at hand only the driver's own major numbers count."""
    monkeypatch.setattr(open_files, "_read", reading("Character devices:\n  1 nvidia-caps\n"))
    pid = holders.hold(device(tmp_path / "nvidia-cap30", 1, 3))
    assert look(pid).caps == {3}
    monkeypatch.setattr(open_files, "_read", reading("Character devices:\n  1 mem\n"))
    assert look(pid) == NOTHING


REALLY_READ = open_files._read


def reading(devices: str):
    def changed(path: str, limit: int) -> bytes:
        return devices.encode() if path.endswith("/devices") else REALLY_READ(path, limit)

    return changed


# ---- nobody keeps others waiting ----


def test_a_job_of_many_descriptors_does_not_keep_another_one_waiting(proc, files):
    groups = dict.fromkeys(range(100, 130), "evil")
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * 1000))
    files.look(groups.keys(), 200, groups)
    for pid in (500, 501):
        proc.process(pid, *(["/dev/null"] * 40), "/dev/nvidia0")
        groups[pid] = "victim"
    assert files.look(groups.keys(), 200, groups) <= 202
    assert files.of(500).minors == {0}
    assert files.of(501).minors == {0}


def test_looks_again_are_shared_out_as_first_looks_are(proc, files, clock):
    groups = dict.fromkeys(range(100, 110), "evil") | {500: "victim"}
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * 100))
    files.look(groups.keys(), EVERYTHING, groups)
    clock.now += 30
    proc.process(500, "/dev/nvidia0")
    files.look(groups.keys(), 200, groups)
    assert files.of(500).minors == {0}


def test_with_more_jobs_than_the_budget_has_parts_each_has_its_turn(proc, files):
    groups = {pid: pid for pid in range(300, 320)}
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * 500))
    for pid in range(200, 230):
        proc.process(pid, *(["/dev/null"] * 20), "/dev/nvidia0")
        groups[pid] = pid
    calls = 0
    while any(files.of(pid) is None for pid in range(200, 230)):
        assert files.look(groups.keys(), 300, groups) <= 302
        calls += 1
        assert calls <= 12  # 20 parts of 64 and 30 of 23, at least 4 of them in each call
    assert all(files.of(pid) is None for pid in range(300, 320))


def test_what_is_urgent_comes_first(proc, files, clock):
    pids = {*range(100, 130), 500}
    for pid in pids:
        proc.process(pid, *(["/dev/null"] * 100))
    files.look(pids, EVERYTHING)
    clock.now += 40
    files.look(pids, 50)  # in the midst of one
    proc.process(500, "/dev/nvidia0")
    files.hurry(500)
    files.look(pids, 50)
    assert files.of(500).minors == {0}


def test_what_is_urgent_and_begun_is_begun_anew(proc, files, clock):
    proc.process(77, *(["/dev/null"] * 100))
    files.look({77}, 50)
    proc.process(77, *(["/dev/null"] * 100), "/dev/nvidia0")
    files.hurry(77)
    files.look({77}, 104)
    assert files.of(77).minors == {0}


def test_what_is_always_urgent_leaves_others_their_half(proc, files, clock):
    groups = {100: "evil", 101: "evil", **dict.fromkeys(range(200, 210), "victim")}
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * (1000 if pid < 200 else 40)))
    for _ in range(10):
        files.hurry(100)
        files.hurry(101)
        assert files.look(groups.keys(), 100, groups) <= 102
        clock.now += 1
    assert all(files.of(pid) == NOTHING for pid in range(200, 210))


def test_one_that_was_just_looked_at_is_not_urgent(proc, files, clock):
    groups = {100: "evil", 200: "victim"}
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * 40))
    files.look({100}, EVERYTHING, groups)
    clock.now += 1
    files.hurry(100)
    assert not files._processes[100].urgent
    proc.process(100, "/dev/nvidia0")
    files.look({100}, EVERYTHING, groups)  # but it is due
    assert files.of(100).minors == {0}


def test_a_process_is_recognised_once_after_each_call(proc, files, monkeypatch):
    proc.process(77, "/dev/nvidia0")
    files.look({77})
    read = []

    def count(path: str, limit: int) -> bytes:
        read.append(path)
        return REALLY_READ(path, limit)

    monkeypatch.setattr(open_files, "_read", count)
    for _ in range(5):
        assert files.of(77).minors == {0}
    assert read == [f"{proc.path}/77/stat"]
    files.look({77})
    proc.restart(77, 9)
    assert files.of(77) is None


def test_what_is_begun_takes_little_memory(proc, files):
    groups = {pid: pid for pid in range(100, 103)}
    for pid in groups:
        proc.process(pid, *(["/dev/null"] * 2000))
    files.look(groups.keys(), 300, groups)
    assert len(files._looks) == 3
    assert all(look.numbers.buffer_info()[1] * look.numbers.itemsize < 8000 for look in files._looks.values())


def test_the_drivers_list_of_capabilities(tmp_path):
    with pytest.raises(OSError, match="mig-minors"):
        open_files.read_mig_minors(str(tmp_path))
    (tmp_path / "driver/nvidia-caps").mkdir(parents=True)
    (tmp_path / "driver/nvidia-caps/mig-minors").write_text("gpu0/gi3/access 30\n")
    assert open_files.read_mig_minors(str(tmp_path)) == {30: (0, 3, None)}
