import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import ConfigError
from expanse_ebpf.jobs import identity as identity_module
from expanse_ebpf.jobs.hierarchies import choose, mounted, parse_proc_cgroup
from expanse_ebpf.jobs.identity import IdentityReader, parse_stat, parse_uid
from expanse_ebpf.jobs.kubernetes import Pod
from expanse_ebpf.jobs.paths import Place, parse
from expanse_ebpf.jobs.states import decide, process_role, user_pids
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JOB_STATE_HELD_IDLE, JobIdentity
from expanse_ebpf.wire.keys import matches, parse_key

SLUID = "s7Q2M4KD9WB100"
ROOT = "/system.slice/slurmstepd.scope"
UID = "3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7"
B = "b2" * 32


class Node:
    """A made-up /proc and cgroup tree."""

    def __init__(self, base: Path) -> None:
        self.proc = base / "proc"
        self.cgroup = base / "cgroup"
        self.proc.mkdir()
        self.cgroup.mkdir()
        self.reader = IdentityReader(str(self.proc))

    def directory(self, path: str) -> Path:
        directory = self.cgroup / path.lstrip("/")
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "cgroup.procs").touch()
        return directory

    def process(self, pid, path, comm="python", *, start=100, uid=1201, environ=None, cmdline=b"", exe=""):
        """A process in the cgroup `path`; an earlier one with this pid has ended."""
        with open(self.directory(path) / "cgroup.procs", "a") as file:
            file.write(f"{pid}\n")
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        (folder / "cgroup").write_text(f"3:cpuset:/\n0::{path}\n")
        fields = " ".join(["0"] * 18)
        (folder / "stat").write_text(f"{pid} ({comm}) S {fields} {start} 0 0\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t0\t0\t0\nGid:\t0\t0\t0\t0\n")
        (folder / "cmdline").write_bytes(cmdline)
        data = b"".join(f"{k}={v}\0".encode() for k, v in (environ or {}).items())
        (folder / "environ").write_bytes(data)
        if exe:
            (folder / "exe").unlink(missing_ok=True)
            (folder / "exe").symlink_to(exe)

    def identify(self, path: str, *pids: int, run: int = 42) -> JobIdentity:
        place = parse(path)
        assert isinstance(place, Place)
        own = "/" + "/".join(path.split("/")[1 : place.depth + 1])
        return self.reader.identify(place, path, run, str(self.cgroup) + own, pids)


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


# ---- SLURM ---------------------------------------------------------------------------------------


def test_slurm_job(node):
    path = "/slurm_gpu017/uid_1201/job_501/step_batch"
    node.process(
        10,
        path,
        environ={
            "SLURM_JOB_ID": "501",
            "SLURM_ARRAY_JOB_ID": "500",
            "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_JOB_NAME": "resnet",
            "SLURM_JOB_ACCOUNT": "physics",
            "SLURM_JOB_PARTITION": "gpu",
            "SLURM_JOB_GPUS": "0",
            "SLURM_JOB_USER": "somebody",
            "USER": "somebody",
        },
    )
    found = node.identify(path, 10)
    assert found == JobIdentity(
        scheduler="slurm",
        id="501",
        run=42,
        name="resnet",
        user="1201",
        uid=1201,
        account="physics",
        partition="gpu",
        array="500_1",
        id_source="cgroup",
        gpus=["0"],
        gpus_source="SLURM_JOB_GPUS",
        cgroup="/slurm_gpu017/uid_1201/job_501",
    )
    assert node.reader.complete(found)


def test_slurm_job_before_its_first_process(node):
    path = f"{ROOT}/job_7"
    node.directory(path)
    found = node.identify(path)
    assert (found.id, found.name, found.HasField("uid")) == ("7", "", False)
    assert not node.reader.complete(found)


def test_owner_on_v2_is_the_users_and_not_slurmstepds(node):
    job = f"{ROOT}/job_7"
    node.process(10, f"{job}/step_extern/slurm", "slurmstepd", uid=0, start=1)
    node.process(11, f"{job}/step_extern/user/task_special", "sleep", uid=0, start=2)
    assert not node.identify(job, 10, 11).HasField("uid")
    node.process(12, f"{job}/step_0/user/task_0", "slurmstepd", uid=0, start=3)  # not the user's yet
    assert not node.identify(job, 10, 11, 12).HasField("uid")
    node.process(13, f"{job}/step_0/user/task_0", "python", uid=1201, start=4)
    assert node.identify(job, 10, 11, 12, 13).uid == 1201


def test_root_may_own_a_job(node):
    path = f"{ROOT}/job_7/step_0/user/task_0"
    node.process(12, path, uid=0)
    found = node.identify(path, 12)
    assert found.HasField("uid")
    assert (found.uid, found.user) == (0, "root")


def test_environment_of_another_job_is_passed_over(node):
    job = f"{ROOT}/job_501"
    node.process(
        10, f"{job}/step_0/user/task_0", start=1, environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "not mine"}
    )
    assert node.identify(job, 10).name == ""
    node.process(
        11, f"{job}/step_0/user/task_0", start=2, environ={"SLURM_JOB_ID": "501", "SLURM_JOB_NAME": "mine"}
    )
    assert (node.identify(job, 10, 11).id, node.identify(job, 10, 11).name) == ("501", "mine")


class TestSluid:
    """The job's directory bears a 14-character id instead of job_N."""

    job = f"{ROOT}/{SLUID}"

    def tree(self, node, cmdline=b"slurmstepd: [905312.0]\0", environ=None):
        node.process(10, f"{self.job}/step_0/slurm", "slurmstepd", uid=0, cmdline=cmdline)
        node.process(11, f"{self.job}/step_0/user/task_0", environ=environ)

    def jobs(self, node):
        found = {
            node.identify(path, *pids).id
            for path, pids in ((f"{self.job}/step_0/slurm", [10]), (f"{self.job}/step_0/user/task_0", [11]))
        }
        assert len(found) == 1
        return found.pop()

    def test_slurmstepd_gives_the_number(self, node):
        self.tree(node)
        found = node.identify(self.job, 10, 11)
        assert (found.id, found.sluid, found.id_source) == ("905312", SLUID, "slurmstepd")
        assert self.jobs(node) == "905312"

    def test_without_its_title_the_sluid_is_the_id(self, node):
        self.tree(node, cmdline=b"")
        found = node.identify(self.job, 10, 11)
        assert (found.id, found.sluid, found.id_source) == (SLUID, SLUID, "sluid")
        assert not node.reader.complete(found)
        assert self.jobs(node) == SLUID

    def test_the_jobs_own_word_does_not_count(self, node):
        self.tree(node, environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "forged"})
        found = node.identify(self.job, 10, 11)
        assert (found.id, found.id_source, found.name) == ("905312", "slurmstepd", "")
        assert self.jobs(node) == "905312"

    def test_the_environment_counts_once_the_number_is_known(self, node):
        self.tree(node, environ={"SLURM_JOB_ID": "905312", "SLURM_JOB_NAME": "mine"})
        found = node.identify(self.job, 11)
        assert (found.id, found.name, found.uid) == ("905312", "mine", 1201)
        assert node.reader.complete(found)

    def test_a_user_cannot_pose_as_slurmstepd(self, node):
        self.tree(node, cmdline=b"")
        title = b"slurmstepd: [1.0]\0"
        node.process(
            12, f"{self.job}/step_0/user/task_0", "slurmstepd", cmdline=title, exe="/home/u/slurmstepd"
        )
        # nor by a program of root's that they may start
        node.process(
            13, f"{self.job}/step_0/user/task_0", "slurmstepd", uid=0, cmdline=title, exe="/usr/bin/sudo"
        )
        node.process(14, f"{self.job}/step_0/user/task_0/slurm", cmdline=title)
        assert node.identify(self.job, 10, 11, 12, 13, 14).id == SLUID

    def test_root_with_slurmstepds_program_is_believed(self, node):
        node.process(
            10,
            f"{self.job}/step_0",
            "slurmstepd",
            uid=0,
            cmdline=b"slurmstepd: [905312.0]\0",
            exe="/usr/sbin/slurmstepd",
        )
        assert node.identify(self.job, 10).id == "905312"


class TestStateFromATree:
    """Whether slurmstepd lives decides, not an empty list of processes."""

    job = f"{ROOT}/job_9"

    def look(self, node, populated):
        roles = {}
        for procs in (node.cgroup / self.job[1:]).rglob("cgroup.procs"):
            place = parse("/" + str(procs.parent.relative_to(node.cgroup)))
            assert isinstance(place, Place)
            for pid in map(int, procs.read_text().split()):
                comm, _start = parse_stat((node.proc / str(pid) / "stat").read_bytes())
                uid = parse_uid((node.proc / str(pid) / "status").read_bytes())
                roles[pid] = process_role(place, comm, uid)
        return user_pids(roles), decide("slurm", roles, had_processes=True, populated=populated)

    def test_held_with_nothing_running(self, node):
        node.process(10, f"{self.job}/step_extern/slurm", "slurmstepd", uid=0)
        assert self.look(node, populated=True) == (frozenset(), JOB_STATE_HELD_IDLE)

    def test_left_over(self, node):
        for path in (self.job, f"{self.job}/step_extern/slurm", f"{self.job}/step_0/user/task_0"):
            node.directory(path)
        assert self.look(node, populated=False) == (frozenset(), JOB_STATE_ENDED)


# ---- other kinds -----------------------------------------------------------------------------------


class Names:
    available = True

    def __init__(self, *pods: Pod) -> None:
        self.pods = {pod.uid: pod for pod in pods}

    def lookup(self, pod_uid: str) -> Pod | None:
        return self.pods.get(pod_uid)


def test_pod(node):
    path = f"/kubepods/burstable/pod{UID}/{B}"
    node.process(10, path, uid=1000)
    node.reader = IdentityReader(str(node.proc), pods=Names())
    unnamed = node.identify(path, 10)
    assert (unnamed.id, unnamed.pod_uid, unnamed.qos, list(unnamed.containers)) == (
        UID,
        UID,
        "burstable",
        [B],
    )
    assert not node.reader.complete(unnamed)
    node.reader = IdentityReader(
        str(node.proc),
        pods=Names(Pod("train-0", "ml", UID, labels={"app": "train"}, containers={B: "worker"})),
    )
    named = node.identify(path, 10)
    assert (named.id, named.name, dict(named.labels)) == ("ml/train-0", "train-0", {"app": "train"})
    assert list(named.containers) == ["worker"]
    assert named.cgroup == f"/kubepods/burstable/pod{UID}"
    assert node.reader.complete(named)
    node.reader = IdentityReader(str(node.proc))
    assert node.reader.complete(node.identify(path, 10))


def test_run_job_belongs_to_the_owner_of_its_cgroup(node):
    path = "/expanse-run-a%20b"
    directory = node.directory(path)
    node.process(10, path, uid=0)
    os.chown(directory, 1201, -1)
    found = node.identify(path, 10)
    assert (found.id, found.name, found.uid) == ("a b", "a b", 1201)
    os.chown(directory, 0, -1)
    assert node.identify(path, 10).uid == 0
    node.process(11, path, uid=1000, start=1)  # the command itself, older than what it started
    assert node.identify(path, 10, 11).uid == 1000
    assert not node.reader.complete(node.identify(path))


def test_unit_and_container(node):
    unit = r"/system.slice/my\x2djob.service"
    node.process(10, unit, uid=33)
    found = node.identify(unit, 10)
    assert (found.id, found.name, found.uid) == (r"my\x2djob.service", "my-job.service", 33)
    box = f"/docker/{B}"
    node.process(11, box, uid=0)
    found = node.identify(box, 11)
    assert (found.id, found.name, list(found.containers)) == (B, B[:12], [B])
    rootless = f"/user.slice/user-1000.slice/user@1000.service/libpod-{B}.scope/container"
    node.process(12, rootless, uid=100999)
    assert node.identify(rootless, 12).uid == 1000


@pytest.mark.parametrize(
    "path",
    [
        "/expanse-run-train",
        "/system.slice/train.service",
        f"/docker/{B}",
        f"/kubepods/burstable/pod{UID}/{B}",
    ],
)
def test_gpus_in_the_environment_of_the_oldest_process(node, path):
    node.process(10, path, start=9, environ={"CUDA_VISIBLE_DEVICES": "3"})
    node.process(
        11, path, start=5, environ={"SLURM_JOB_GPUS": "7", "NVIDIA_VISIBLE_DEVICES": "GPU-8a,GPU-7b"}
    )
    found = node.identify(path, 10, 11)
    assert (found.gpus_source, list(found.gpus)) == ("NVIDIA_VISIBLE_DEVICES", ["GPU-8a", "GPU-7b"])
    node.process(11, path, start=5)
    found = node.identify(path, 10, 11)
    assert (found.gpus_source, list(found.gpus)) == ("", [])
    node.process(11, path, start=5, environ={"CUDA_VISIBLE_DEVICES": "0,-1,1"})
    found = node.identify(path, 10, 11)
    assert (found.gpus_source, list(found.gpus)) == ("CUDA_VISIBLE_DEVICES", ["0"])


def test_gpus_are_not_taken_from_slurmstepd_nor_from_a_pause_process(node):
    step = f"{ROOT}/job_7/step_0"
    node.process(
        10, f"{step}/slurm", "slurmstepd", uid=0, environ={"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0"}
    )
    assert list(node.identify(step, 10).gpus) == []
    pod = f"/kubepods/burstable/pod{UID}/{B}"
    node.process(11, pod, "pause", environ={"CUDA_VISIBLE_DEVICES": "0"})
    assert list(node.identify(pod, 11).gpus) == []


# ---- pids that are used again ------------------------------------------------------------------------


def test_a_pid_that_is_used_again_gives_the_new_job(node):
    a, b = f"{ROOT}/job_1/step_0/user/task_0", f"{ROOT}/job_2/step_0/user/task_0"
    node.process(100, a, start=5, uid=1201, environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "A"})
    assert node.identify(a, 100).name == "A"
    node.process(100, b, start=9, uid=1202, environ={"SLURM_JOB_ID": "2", "SLURM_JOB_NAME": "B"})
    later = node.identify(b, 100)
    assert (later.id, later.name, later.uid) == ("2", "B", 1202)
    # and A, whose pid it no longer is, gets nothing of it
    late = node.identify(a, 100)
    assert (late.name, late.HasField("uid")) == ("", False)


@pytest.mark.parametrize("after", ["stat", "status", "cgroup", "environ"])
@pytest.mark.parametrize("heir", ["job_1", "job_2"])
def test_a_pid_that_changes_hands_while_it_is_read_gives_nothing(node, after, heir):
    a, b = f"{ROOT}/job_1/step_0/user/task_0", f"{ROOT}/{heir}/step_0/user/task_0"
    node.process(100, a, start=5, uid=1201, environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "A"})
    changed = False

    def read(path: str, limit: int) -> bytes:
        nonlocal changed
        data = identity_module._read(path, limit)
        if path.endswith(f"/{after}") and not changed:
            changed = True
            # the new owner claims to be of the same job
            node.process(100, b, start=9, uid=1202, environ={"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "B"})
        return data

    node.reader = IdentityReader(str(node.proc), read=read)
    found = node.identify(a, 100)
    assert changed
    assert found.name == ""
    assert not found.HasField("uid") or found.uid == 1201


def test_the_same_process_that_left_the_job_gives_nothing(node):
    path = f"{ROOT}/job_1/step_0/user/task_0"
    node.process(100, path)
    (node.proc / "100/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_11/step_0\n")
    assert not node.identify(path, 100).HasField("uid")


def test_processes_that_have_gone_or_make_no_sense(node):
    path = f"{ROOT}/job_1/step_0/user/task_0"
    node.process(100, path)
    for pid, name, content in ((101, "stat", b""), (102, "status", b"Uid:\tx"), (103, "cgroup", b"\xff")):
        node.process(pid, path)
        (node.proc / str(pid) / name).write_bytes(content)
    node.process(104, path)
    (node.proc / "104/environ").unlink()
    found = node.identify(path, 99, 101, 102, 103, 104)
    assert found.uid == 1201  # of 104


def test_only_a_few_processes_are_read(node):
    path = f"{ROOT}/job_1/step_0/user/task_0"
    seen = set()

    def read(name: str, limit: int) -> bytes:
        seen.add(name.split("/")[-2])
        raise FileNotFoundError(name)

    node.reader = IdentityReader(str(node.proc), read=read)
    node.identify(path, *range(1, 10_000))
    assert len(seen) <= 32


@given(st.binary(max_size=200))
def test_hostile_proc_files_never_raise(data):
    parse_stat(data)
    parse_stat(b"1 (" + data + b") S " + b"0 " * 18 + b"7 0")
    parse_uid(data)
    parse_uid(b"Uid:\t" + data + b"\n")
    parse_proc_cgroup(data.decode("utf-8", "replace"))


def test_stat_of_a_process_with_a_bracket_in_its_name():
    assert parse_stat(b"7 (a) S 1 (b) R " + b"0 " * 18 + b"55 0 0") == ("a) S 1 (b", 55)


def test_names_that_protobuf_would_refuse(node):
    place = Place("unit", "a\udcff\x1b.service", 2)
    found = node.reader.identify(place, "/system.slice/a\udcff\x1b.service", 1, "/nowhere", [])
    assert found.id == "a\ufffd\u241b.service"
    found.SerializeToString()


@pytest.fixture
def real_job() -> Iterator[tuple[str, Path]]:
    """A SLURM job's cgroups in the hierarchy that is preferred here: path and directory of a step."""
    hierarchies = mounted()
    name = choose({}, hierarchies)
    hierarchy = next(h for h in hierarchies if h.name == name)
    parts = [f"slurm_expanse-test-{os.getpid()}", "uid_1201", "job_77", "step_0"]
    made = [Path(hierarchy.mount, *parts[: n + 1]) for n in range(len(parts))]
    try:
        for directory in made:
            directory.mkdir()
        path = hierarchy.path(str(made[-1]))
        assert path is not None
        yield path, made[-1]
    finally:
        for directory in reversed(made):
            if directory.exists():
                removed(directory)


def removed(directory: Path) -> None:
    for _ in range(100):  # EBUSY for a moment after the last process has gone
        try:
            directory.rmdir()
            return
        except OSError:
            time.sleep(0.02)
    directory.rmdir()


def test_a_real_job(real_job):
    path, directory = real_job
    program = "import sys, time; sys.stdin.readline(); print(flush=True); time.sleep(60)"
    child = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NAME": "real",
            "SLURM_ARRAY_JOB_ID": "70",
            "SLURM_ARRAY_TASK_ID": "3",
        },
    )
    try:
        assert child.stdin is not None
        assert child.stdout is not None
        reader = IdentityReader()
        place = parse(path)
        assert isinstance(place, Place)
        run = directory.parent.stat().st_ino
        before = reader.identify(place, path, run, str(directory.parent), [child.pid])
        assert (before.id, before.uid, before.name) == ("77", 1201, "")  # it is not in the job yet
        (directory / "cgroup.procs").write_text(str(child.pid))
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        found = reader.identify(place, path, run, str(directory.parent), [child.pid])
        assert (found.name, found.array, found.run) == ("real", "70_3", run)
        assert reader.complete(found)
        process = reader._process(child.pid, path)
        assert process is not None
        assert (process.uid, process.role) == (os.getuid(), "user")
    finally:
        child.kill()
        child.communicate()


# ---- keys --------------------------------------------------------------------------------------


TASK = JobIdentity(scheduler="slurm", id="501", array="500_1")
LAST = JobIdentity(scheduler="slurm", id="500", array="500_2")
OTHER = JobIdentity(scheduler="slurm", id="5001", array="5000_1")
HET = JobIdentity(scheduler="slurm", id="601", labels={"het_job": "600+1"})
NEW = JobIdentity(scheduler="slurm", id="905312", sluid=SLUID)
POD = JobIdentity(scheduler="kubernetes", id="ml/train-0", pod_uid=UID)
RUN = JobIdentity(scheduler="run", id="a/b c")
BOX = JobIdentity(scheduler="container", id=B)
UNIT = JobIdentity(scheduler="unit", id="train.service")
ALL = [TASK, LAST, OTHER, HET, NEW, POD, RUN, BOX, UNIT]


@pytest.mark.parametrize(
    ("key", "jobs"),
    [
        ("slurm/501", [TASK]),
        ("slurm/500_1", [TASK]),
        ("slurm/500", [TASK, LAST]),
        ("slurm/5000", [OTHER]),
        ("slurm/50", []),
        ("slurm/600", [HET]),
        ("slurm/600+1", [HET]),
        ("slurm/601", [HET]),
        (f"slurm/{SLUID}", [NEW]),
        ("slurm/905312", [NEW]),
        ("kubernetes/ml/train-0", [POD]),
        (f"kubernetes/{UID}", [POD]),
        ("kubernetes/ml/train", []),
        ("run/a/b c", [RUN]),
        ("run/a", []),
        (f"container/{B[:12]}", [BOX]),
        (f"container/{B}", [BOX]),
        (f"container/{'0' * 12}", []),
        ("unit/train.service", [UNIT]),
        ("unit/train", []),
    ],
)
def test_matches(key, jobs):
    assert [job for job in ALL if matches(job, key)] == jobs


def test_both_runs_of_a_task_are_found():
    again = JobIdentity(scheduler="slurm", id="501", array="500_1", run=7)
    assert [job for job in (TASK, again, LAST) if matches(job, "slurm/500_1")] == [TASK, again]


@pytest.mark.parametrize(
    "key",
    [
        "",
        "501",
        "slurm",
        "slurm/",
        "slurm/abc",
        "slurm/1.0",
        "slurm/1/2",
        "kubernetes/x",
        "kubernetes/a/b/c",
        "run/",
        "container/abc",
        "container/xyz",
        f"container/{B}0",
        "unit/",
        "pbs/1",
        "unit/a/b",
        "slurm/-1",
    ],
)
def test_what_is_no_key_is_said_with_the_forms(key):
    with pytest.raises(ConfigError, match=r"slurm/123.*kubernetes/NAMESPACE/POD.*run/NAME.*container/ID"):
        matches(TASK, key)
    with pytest.raises(ConfigError):
        parse_key(key)
