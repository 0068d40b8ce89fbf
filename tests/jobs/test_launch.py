"""Cgroups of `run` jobs, on this machine's real hierarchies."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.jobs import adopt, launch
from expanse_ebpf.jobs.adopt import Adoptions
from expanse_ebpf.jobs.hierarchies import Hierarchy, mounted
from expanse_ebpf.jobs.launch import Cgroups, LaunchError, NameTakenError

NOBODY = 65534


def everywhere(component: str) -> list[str]:
    """Cgroups of this name in any hierarchy, at the top or below our own."""
    parents = {h.mount for h in mounted()}
    parents.update(launch.parents(mounted(), launch.CONTROLLERS, launch.cgroup_of("self")))
    return [path for parent in parents if Path(path := f"{parent}/{component}").is_dir()]


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-launch-{uuid4().hex[:12]}"
    yield name
    component = f"expanse-run-{name}"
    launch.signal_all(everywhere(component), signal.SIGKILL)
    launch.remove(everywhere(component))


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def run(*argv: str, uid: int | None = None) -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen(argv, user=uid, group=uid, extra_groups=[] if uid else None))
        return started[-1]

    yield run
    for process in started:
        process.kill()
        process.wait()


def cgroups_of(pid: int) -> dict[str, str]:
    return launch.cgroup_of(pid)


def usable() -> list[Hierarchy]:
    return [
        h for h in mounted() if h.version == 2 or launch.CONTROLLERS.issuperset(h.controllers or (h.name,))
    ]


def test_a_job_has_a_cgroup_in_every_hierarchy_and_in_systemds(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    process = start("sleep", "60")
    cgroups = launch.for_root(name)
    assert {str(Path(d).parent) for d in cgroups.directories} == {h.mount for h in usable()}
    cgroups.join(process.pid)
    assert launch.pids_of(cgroups.directories) == {process.pid}
    where = cgroups_of(process.pid)
    assert all(where[h.name] == f"/expanse-run-{name}" for h in usable())
    assert all(Path(d, "cgroup.procs").read_text().split() == [str(process.pid)] for d in cgroups.directories)

    process.kill()
    process.wait()
    assert cgroups.discard(2) == []
    assert everywhere(f"expanse-run-{name}") == []


def test_a_name_can_be_used_by_one_job_at_a_time(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    first = launch.for_root(name)
    with pytest.raises(NameTakenError):  # its maker lives, no process yet
        launch.for_root(name)
    process = start("sleep", "60")
    first.join(process.pid)
    first.close()
    with pytest.raises(NameTakenError):  # its maker is gone, a process lives
        launch.for_root(name)
    assert launch.pids_of(first.directories) == {process.pid}
    process.kill()
    process.wait()
    second = launch.for_root(name)
    second.discard()


def test_a_stale_cgroup_is_made_anew(name: str) -> None:
    first = launch.for_root(name)
    births = [Path(d).stat().st_ino for d in first.directories]
    below = Path(first.directories[0], "left")
    below.mkdir()
    first.close()
    second = launch.for_root(name)
    assert second.directories == first.directories
    assert all(Path(d).stat().st_ino != birth for d, birth in zip(second.directories, births, strict=True))
    assert not below.exists()
    second.discard()


def test_a_sweep_takes_what_is_neither_locked_nor_lived_in(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    cgroups = launch.for_root(name)
    assert not set(launch.sweep(mounted())) & set(cgroups.directories)  # locked
    process = start("sleep", "60")
    cgroups.join(process.pid)
    cgroups.close()
    assert not set(launch.sweep(mounted())) & set(cgroups.directories)  # lived in
    process.kill()
    process.wait()

    def swept() -> bool:
        launch.sweep(mounted())
        return not everywhere(f"expanse-run-{name}")

    eventually(swept)


def test_a_name_is_not_taken_by_somebody_who_sweeps(name: str) -> None:
    """Two runs that start at once, and the agent, look into each other's cgroups for a moment."""
    directory = Path("/sys/fs/cgroup/unified", f"expanse-run-{name}")
    directory.mkdir()
    descriptor = os.open(directory, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    sweeper = threading.Timer(0.1, os.close, [descriptor])
    sweeper.start()
    try:
        cgroups = launch.for_root(name)
    finally:
        sweeper.join()
    assert str(directory) in cgroups.directories
    cgroups.discard()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_made_is_left_out(name: str, tmp_path: Path) -> None:
    unified = next(h.mount for h in mounted() if h.version == 2)
    cgroups = Cgroups(name, ["/proc/self", unified], "help yourself")
    assert cgroups.directories == [f"{unified}/expanse-run-{name}"]
    cgroups.discard()
    with pytest.raises(LaunchError, match="help yourself"):
        Cgroups(name, ["/proc/self"], "help yourself")
    with pytest.raises(LaunchError, match="hierarchy"):
        Cgroups(name, [], "help yourself")


@pytest.mark.parametrize("bad", ["", "a\nb", "x" * 250, "é" * 100, "\x00", "\udc80"])
def test_a_bad_name_is_refused_before_anything_is_made(bad: str) -> None:
    with pytest.raises(ConfigError):
        launch.for_root(bad)


def test_signals_reach_processes_in_cgroups_below(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    cgroups = launch.for_root(name)
    below = Path(cgroups.directories[0], "a", "b")
    below.mkdir(parents=True)
    process = start("sleep", "60")
    (below / "cgroup.procs").write_text(str(process.pid))
    assert launch.pids_of(cgroups.directories) == {process.pid}
    assert launch.remove(cgroups.directories[:1], 0) == cgroups.directories[:1]
    assert launch.signal_all(cgroups.directories, signal.SIGTERM) == 1
    assert process.wait() == -signal.SIGTERM
    assert cgroups.discard(2) == []


def test_controllers_are_enabled_where_they_are_available(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu pids hugetlb\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    (tmp_path / "cgroup.procs").write_text("1\n")
    launch.enable_controllers(str(tmp_path))
    assert (tmp_path / "cgroup.subtree_control").read_text() in ("+pids", "+cpu+pids")
    # Not the root of the hierarchy, and processes in it: children with controllers would be unusable.
    (tmp_path / "cgroup.type").write_text("domain\n")
    (tmp_path / "cgroup.subtree_control").write_text("")
    launch.enable_controllers(str(tmp_path))
    assert (tmp_path / "cgroup.subtree_control").read_text() == ""
    launch.enable_controllers(str(tmp_path / "none"))


# ---- users


def test_a_users_process_is_adopted(name: str, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    adoptions = Adoptions()
    process = start("sleep", "60", uid=NOBODY)
    before = cgroups_of(process.pid)
    directories = adoptions.adopt(name, process.pid, NOBODY)
    where = cgroups_of(process.pid)
    for h in mounted():
        if h.version == 2 or adopt.CONTROLLERS.issuperset(h.controllers or ("none",)):
            # Below where it was: whatever limited it still does.
            assert where[h.name] == f"{before[h.name].rstrip('/')}/expanse-run-{name}"
        else:
            assert where[h.name] == before[h.name]
    assert Path(directories[0]).stat().st_uid == NOBODY
    assert all(f.stat().st_uid == 0 for d in directories for f in Path(d).iterdir() if f.is_file())
    assert adoptions.remove_empty() == []

    with pytest.raises(LaunchError, match=f"in the job run/{name} already"):
        adoptions.adopt(f"{name}-2", process.pid, NOBODY)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 5
    removed: list[str] = []
    while len(removed) < len(directories) and time.monotonic() < deadline:
        removed += adoptions.remove_empty()
        time.sleep(0.01)
    assert sorted(removed) == sorted(directories)
    assert not any(Path(d).exists() for d in directories)


def test_the_owner_can_neither_change_nor_fill_the_cgroup(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    adoptions = Adoptions()
    process = start("sleep", "60", uid=NOBODY)
    directories = adoptions.adopt(name, process.pid, NOBODY)
    for directory in directories:
        for attempt in (
            f"chmod u+w {directory}; mkdir {directory}/x",
            f"echo 0 > {directory}/cgroup.procs",
            f"echo 5 > {directory}/cgroup.max.descendants",
            f"rmdir {directory}",
        ):
            tried = start("sh", "-c", f"exec 2>/dev/null; {attempt}", uid=NOBODY)
            assert tried.wait() != 0, attempt
    assert launch.pids_of(directories) == {process.pid}


def test_a_process_of_another_user_is_refused(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    adoptions = Adoptions()
    process = start("sleep", "60")  # root's
    with pytest.raises(LaunchError, match="not only this user's"):
        adoptions.adopt(name, process.pid, NOBODY)
    process.kill()
    process.wait()
    with pytest.raises(LaunchError, match="has ended"):
        adoptions.adopt(name, process.pid, NOBODY)
    for nothing in (0, -1):
        with pytest.raises(LaunchError, match="pid namespace"):
            adoptions.adopt(name, nothing, NOBODY)
    assert everywhere(f"expanse-run-{name}") == []


def test_a_zombie_is_refused(name: str, start: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = start("true", uid=NOBODY)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(LaunchError, match="has ended"):
        Adoptions().adopt(name, process.pid, NOBODY)
    assert everywhere(f"expanse-run-{name}") == []


def test_a_user_has_a_bounded_number_of_jobs(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    adoptions = Adoptions(max_per_uid=1)
    first, second = start("sleep", "60", uid=NOBODY), start("sleep", "60", uid=NOBODY)
    adoptions.adopt(name, first.pid, NOBODY)
    other = name[:-1] + "-"
    with pytest.raises(LaunchError, match="you have 1 jobs already"):
        adoptions.adopt(other, second.pid, NOBODY)
    assert everywhere(f"expanse-run-{other}") == []


def test_a_directory_that_was_made_again_is_not_the_agents_to_remove(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    adoptions = Adoptions()
    process = start("sleep", "60", uid=NOBODY)
    adoptions.adopt(name, process.pid, NOBODY)
    process.kill()
    process.wait()
    cgroups = launch.for_root(name)  # reuses the place, with no process in it yet
    assert not set(adoptions.remove_empty()) & set(cgroups.directories)
    assert all(Path(d).exists() for d in cgroups.directories)
    cgroups.discard()


def test_uids_are_parsed() -> None:
    assert adopt.parse_uids("Name:\tx\nUid:\t1000\t1000\t1000\t1000\n") == {1000}
    assert adopt.parse_uids("Uid:\t1000\t0\t0\t0\n") == {1000, 0}
    assert adopt.parse_uids("") == set()


@pytest.mark.parametrize(
    ("path", "refused"),
    [
        ("/slurm/uid_1000/job_7/step_0", True),
        ("/kubepods/besteffort/pod01234567-89ab-cdef-0123-456789abcdef/" + "a" * 64, True),
        ("/docker/" + "a" * 64, True),
        ("/expanse-run-x", True),
        ("/user.slice/user-1000.slice/session-3.scope", False),
        ("/", False),
    ],
)
def test_a_process_in_a_schedulers_job_stays_there(path: str, refused: bool) -> None:
    if refused:
        with pytest.raises(LaunchError, match="already"):
            adopt._refuse_jobs({"freezer": path})
    else:
        adopt._refuse_jobs({"freezer": path})


def test_a_job_that_nests_its_cgroups_deeply_is_seen_and_removed_whole(
    name: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    unified = next(h for h in mounted() if h.version == 2)
    top = Path(unified.mount) / f"expanse-run-{name}"
    deepest = top.joinpath(*["x"] * 40)
    deepest.mkdir(parents=True)
    process = start("sleep", "60")
    (deepest / "cgroup.procs").write_text(str(process.pid))
    assert launch.pids_of([str(top)]) == {process.pid}
    assert launch.clear([str(top)]) == []  # somebody is in
    assert launch.signal_all([str(top)], signal.SIGKILL) == 1
    process.wait()
    assert launch.remove([str(top)]) == []
    assert not top.exists()
