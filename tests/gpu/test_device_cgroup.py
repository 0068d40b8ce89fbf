"""Which GPUs the kernel lets a job open, by real cgroups, programs and containers."""

from __future__ import annotations

import contextlib
import errno
import json
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.gpu import device_cgroup
from expanse_ebpf.gpu.device_cgroup import DeviceCgroups
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.kernel import device_programs
from expanse_ebpf.kernel.libbpf import BpfError
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobIdentity
from tests.kernel.device_assembler import (
    ALLOW_MULTI,
    ALLOW_OVERRIDE,
    Allow,
    as_runc,
    as_systemd,
    attach,
    instruction,
)
from tests.kernel.groups import Groups

# NV-01: NVML's indexes 0..3 are the minors 2, 3, 0, 1.
GPUS = [GpuSample(uuid=f"U{index}", index=index, minor=(index + 2) % 4) for index in range(4)]
# Minor n is U2, U3, U0, U1.
COMMON = [Allow(major=1, minor=3), Allow(major=195, minor=255)]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def groups() -> Iterator[Groups]:
    made = Groups()
    yield made
    made.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cgroups(clock: Clock) -> DeviceCgroups:
    return DeviceCgroups(clock=clock)


def job(v1: Path | None = None, v2: Path | None = None, pids: set[int] | None = None) -> Job:
    made = Job(JobIdentity(scheduler="slurm", id="1"))
    made.directories = {name: str(path) for name, path in (("devices", v1), ("unified", v2)) if path}
    made.pids = None if pids is None else frozenset(pids)
    return made


def process_in(group: Path, groups: Groups) -> int:
    process = groups.start("print(flush=True)\ntime.sleep(60)", group)
    assert process.stdout is not None
    process.stdout.readline()
    return process.pid


def nodes(*minors: int) -> list[Allow]:
    return [Allow(major=195, minor=minor) for minor in minors]


# ---- v1


def limit(group: Path, *minors: int) -> None:
    (group / "devices.deny").write_text("a")
    for minor in (255, *minors):
        (group / "devices.allow").write_text(f"c 195:{minor} rwm")


def test_the_list_of_a_v1_group_tells_by_minor_number(
    groups: Groups, cgroups: DeviceCgroups
) -> None:  # NV-01
    group = groups.make("devices")
    limit(group, 0)
    assert cgroups.allowed(job(group), GPUS) == {"U2"}
    assert cgroups.reason == ""


def test_a_v1_group_that_allows_everything_says_nothing(groups: Groups, cgroups: DeviceCgroups) -> None:
    assert cgroups.allowed(job(groups.make("devices")), GPUS) is None
    assert cgroups.reason == "nothing limits its devices"


def test_denials_of_a_v1_group_that_allows_by_default_do_not_show(
    groups: Groups, cgroups: DeviceCgroups
) -> None:
    group = groups.make("devices")
    (group / "devices.deny").write_text("c 195:1 rwm")
    assert (group / "devices.list").read_text() == "a *:* rwm\n"
    assert cgroups.allowed(job(group), GPUS) is None


def test_the_groups_with_the_jobs_processes_decide(groups: Groups, cgroups: DeviceCgroups) -> None:
    top = groups.make("devices", "job")
    first, second, other = (groups.make("devices", f"job/{name}") for name in ("task_0", "task_1", "slurm"))
    limit(first, 0)
    limit(second, 2)
    limit(other, 3)
    pids = {process_in(group, groups) for group in (first, second)}
    daemon = process_in(other, groups)
    assert cgroups.allowed(job(top, pids=pids), GPUS) == {"U2", "U0"}
    assert cgroups.allowed(job(top, pids={daemon}), GPUS) == {"U1"}
    assert cgroups.allowed(job(top), GPUS) == {"U0", "U1", "U2"}
    # Nobody runs, or somewhere else: its own group, which is not limited
    assert cgroups.allowed(job(top, pids=set()), GPUS) is None
    limit(groups.make("devices", "idle"), 1)
    idle = groups.make("devices", "idle")
    assert cgroups.allowed(job(idle, pids=set()), GPUS) == {"U3"}


def test_a_list_of_unusual_length_is_no_answer(tmp_path: Path, cgroups: DeviceCgroups) -> None:
    (tmp_path / "devices.list").write_text("c 1:3 m\n" * 4096)
    assert cgroups.allowed(job(tmp_path), GPUS) == set()
    (tmp_path / "devices.list").write_text("c 1:3 m\n" * 4097)
    assert cgroups.allowed(job(tmp_path), GPUS) is None
    assert cgroups.reason == "the list of its devices is too long"


BUSYBOX = Path("/bin/busybox")


def test_a_container_of_runc(tmp_path: Path, cgroups: DeviceCgroups) -> None:
    name = f"test-expanse-{uuid.uuid4().hex[:8]}"
    (tmp_path / "rootfs/bin").mkdir(parents=True)
    shutil.copy(BUSYBOX, tmp_path / "rootfs/bin/busybox")
    subprocess.run(["runc", "spec", "--bundle", str(tmp_path)], check=True)
    spec = json.loads((tmp_path / "config.json").read_text())
    spec["process"] |= {"terminal": False, "args": ["/bin/busybox", "sleep", "60"]}
    spec["linux"]["cgroupsPath"] = f"/{name}/inner"
    spec["linux"]["resources"] = {
        "devices": [
            {"allow": False, "access": "rwm"},
            *(
                {"allow": True, "type": "c", "major": 195, "minor": minor, "access": "rw"}
                for minor in (255, 1, 2)
            ),
        ]
    }
    (tmp_path / "config.json").write_text(json.dumps(spec))
    runc = ["runc", "--root", str(tmp_path / "runc")]
    try:
        command = [*runc, "run", "--detach", "--bundle", str(tmp_path), name]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=30)
        pod = Path("/sys/fs/cgroup/devices") / name
        pids = {int(pid) for pid in (pod / "inner/cgroup.procs").read_text().split()}
        assert cgroups.allowed(job(pod, pids=pids), GPUS) == {"U3", "U0"}
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=False)
        for hierarchy in Path("/sys/fs/cgroup").iterdir():
            for left in (hierarchy / name / "inner", hierarchy / name):
                with contextlib.suppress(OSError):
                    left.rmdir()


# ---- v2


@pytest.mark.parametrize("write", [as_systemd, as_runc])
def test_the_program_of_a_v2_group_tells(write: object, groups: Groups, cgroups: DeviceCgroups) -> None:
    group = groups.make()
    attach(write([*COMMON, *nodes(0, 3)]), group)  # type: ignore[operator]
    assert cgroups.allowed(job(v2=group), GPUS) == {"U2", "U1"}


def test_a_v2_group_without_programs_says_nothing(groups: Groups, cgroups: DeviceCgroups) -> None:
    assert cgroups.allowed(job(v2=groups.make()), GPUS) is None
    assert cgroups.reason == "nothing limits its devices"


def test_a_privileged_container_says_nothing(groups: Groups, cgroups: DeviceCgroups) -> None:
    group = groups.make()
    attach(as_runc([Allow(kind=None)]), group)
    assert cgroups.allowed(job(v2=group), GPUS) is None


def test_ancestors_have_to_allow_as_well(groups: Groups, cgroups: DeviceCgroups) -> None:
    above, below = groups.make(name="a"), groups.make(name="a/b")
    attach(as_systemd([*COMMON, *nodes(0, 1, 2)]), above, ALLOW_MULTI)
    attach(as_runc([*COMMON, *nodes(1, 2, 3)]), below, ALLOW_MULTI)
    assert cgroups.allowed(job(v2=below), GPUS) == {"U3", "U0"}


def test_slurm_denies_what_a_step_was_not_given(groups: Groups, cgroups: DeviceCgroups) -> None:
    top = groups.make(name="job")
    user, own = (groups.make(name=f"job/step_0/{name}") for name in ("user", "slurm"))
    task = groups.make(name="job/step_0/user/task_0")
    denials = [Allow(major=195, minor=minor, verdict=0) for minor in (0, 2, 3)]
    attach(as_runc([*nodes(1), *denials], default=1), top, ALLOW_OVERRIDE)
    attach(as_runc([*nodes(1), *denials], default=1), user, ALLOW_OVERRIDE)
    process = process_in(task, groups)
    process_in(own, groups)
    running, idle = job(v2=top, pids={process}), job(v2=top, pids=set())
    assert cgroups.allowed(running, GPUS) == {"U3"}
    assert cgroups.allowed(idle, GPUS) == {"U3"}


def test_containers_of_a_pod_are_taken_together(groups: Groups, cgroups: DeviceCgroups) -> None:
    pod = groups.make(name="pod")
    containers = [groups.make(name=f"pod/{name}") for name in ("pause", "worker", "evaluator")]
    for container, minors in zip(containers, ((), (0,), (1,)), strict=True):
        attach(as_runc([*COMMON, *nodes(*minors)]), container)
    pause, *pids = (process_in(container, groups) for container in containers)
    assert cgroups.allowed(job(v2=pod, pids=set(pids)), GPUS) == {"U2", "U3"}
    assert cgroups.allowed(job(v2=pod, pids={pause}), GPUS) == set()


def test_both_hierarchies_have_to_allow(groups: Groups, cgroups: DeviceCgroups) -> None:
    v1, v2 = groups.make("devices"), groups.make()
    limit(v1, 0, 1)
    assert cgroups.allowed(job(v1, v2), GPUS) == {"U2", "U3"}
    attach(as_systemd([*COMMON, *nodes(1, 2)]), v2)
    assert cgroups.allowed(job(v1, v2), GPUS) == {"U3"}
    assert cgroups.allowed(job(groups.make("devices", "b"), v2), GPUS) == {"U3", "U0"}


def test_mig_instances_by_the_capabilities_in_proc(groups: Groups, clock: Clock, tmp_path: Path) -> None:
    (tmp_path / "driver/nvidia-caps").mkdir(parents=True)
    (tmp_path / "devices").write_text("Character devices:\n236 nvidia-caps\n")
    (tmp_path / "driver/nvidia-caps/mig-minors").write_text(
        "".join(f"gpu0/gi{i}/access {i}0\ngpu0/gi{i}/ci0/access {i}1\n" for i in (1, 2))
    )
    samples = [GpuSample(uuid="A", minor=0)]
    samples += [
        GpuSample(uuid=f"A{i}", parent_uuid="A", minor=0, gpu_instance=i, compute_instance=0) for i in (1, 2)
    ]
    group = groups.make()
    capabilities = [Allow(major=236, minor=minor) for minor in (20, 21)]
    attach(as_runc([*COMMON, *nodes(0), *capabilities]), group)
    cgroups = DeviceCgroups(str(tmp_path), clock)
    assert cgroups.allowed(job(v2=group), samples) == {"A2"}
    other = DeviceCgroups(str(tmp_path / "nothing"), clock)
    assert other.allowed(job(v2=group), samples) is None
    assert other.reason == "the device numbers of MIG instances are not known"


# ---- what cannot be told


def test_a_program_that_is_not_understood_is_no_answer(groups: Groups, cgroups: DeviceCgroups) -> None:
    group = groups.make()
    call = instruction(0x85, constant=5)  # bpf_ktime_get_ns
    attach(call + instruction(0xB7, 0, constant=1) + instruction(0x95), group)
    assert cgroups.allowed(job(v2=group), GPUS) is None
    assert cgroups.reason == (
        "the program that limits its devices is not understood: instruction 0 calls a function"
    )


def test_a_job_that_is_gone_or_has_no_cgroup_of_its_own(groups: Groups, cgroups: DeviceCgroups) -> None:
    for hierarchy in ("devices", "unified"):
        gone = groups.make(hierarchy) / "gone"
        known = job(gone) if hierarchy == "devices" else job(v2=gone)
        assert cgroups.allowed(known, GPUS) is None
        assert cgroups.reason == "its cgroup cannot be read: No such file or directory"
    assert cgroups.allowed(job(), GPUS) is None
    assert cgroups.reason == "nothing limits its devices"
    assert cgroups.allowed(job(), []) is None
    assert cgroups.reason == "this node has no GPU"


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.EPERM, "is not permitted: it takes CAP_SYS_ADMIN and CAP_NET_ADMIN"),
        (errno.EINVAL, "nothing limits its devices"),
        (errno.ENOMEM, "reading: Cannot allocate memory"),
    ],
)
def test_what_the_kernel_refuses_is_said(
    code: int, reason: str, groups: Groups, cgroups: DeviceCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: str) -> tuple[int, ...]:
        raise BpfError("reading", code)

    monkeypatch.setattr(device_programs, "attached", refuse)
    assert cgroups.allowed(job(v2=groups.make()), GPUS) is None
    assert reason in cgroups.reason


def test_a_job_of_too_many_cgroups_is_no_answer(
    groups: Groups, cgroups: DeviceCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_MAX_CGROUPS", 3)
    top = groups.make(name="a")
    attach(as_systemd(nodes(0)), top)
    for name in ("a/b", "a/c"):
        groups.make(name=name)
    assert cgroups.allowed(job(v2=top), GPUS) == {"U2"}
    groups.make(name="a/d")
    assert cgroups.allowed(job(v2=top), GPUS) is None
    assert cgroups.reason == "it has more than 3 cgroups"


def test_a_program_that_is_replaced_while_it_is_read(
    groups: Groups, cgroups: DeviceCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.make()
    attach(as_systemd(nodes(0)), group)
    real = device_programs.attached
    answers = [(2**31 - 1,)]

    def attached(directory: str) -> tuple[int, ...]:
        return answers.pop() if answers else real(directory)

    monkeypatch.setattr(device_programs, "attached", attached)
    assert cgroups.allowed(job(v2=group), GPUS) == {"U2"}
    assert not answers


def test_cgroups_that_end_while_they_are_read(
    groups: Groups, cgroups: DeviceCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    top, first, second = (groups.make(name=name) for name in ("a", "a/b", "a/c"))
    attach(as_systemd(nodes(0)), second)
    known = job(v2=top, pids={process_in(first, groups), process_in(second, groups)})
    real = device_programs.attached
    gone = {str(first)}

    def attached(directory: str) -> tuple[int, ...]:
        if directory in gone:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        return real(directory)

    monkeypatch.setattr(device_programs, "attached", attached)
    assert cgroups.allowed(known, GPUS) == {"U2"}
    gone.add(str(second))
    assert cgroups.allowed(known, GPUS) is None
    assert cgroups.reason == "its cgroups have ended while they were read"


# ---- reading again


class Reads:
    """Counts how often the kernel is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queries: list[str] = []
        self.programs: list[int] = []
        attached, instructions = device_programs.attached, device_programs.instructions

        def count(directory: str) -> tuple[int, ...]:
            self.queries.append(directory)
            return attached(directory)

        def count_program(number: int) -> bytes:
            self.programs.append(number)
            return instructions(number)

        monkeypatch.setattr(device_programs, "attached", count)
        monkeypatch.setattr(device_programs, "instructions", count_program)


def test_an_answer_is_kept_for_30_s_once_it_has_settled(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.make()
    attach(as_systemd(nodes(0)), group)
    reads = Reads(monkeypatch)
    known = job(v2=group)
    for _ in range(8):  # in the first seconds its limits may still be on their way
        assert cgroups.allowed(known, GPUS) == {"U2"}
        clock.now += 1
    assert len(reads.queries) == 5
    attach(as_systemd(nodes(1)), group)
    assert cgroups.allowed(known, GPUS) == {"U2"}
    clock.now += 30
    assert cgroups.allowed(known, GPUS) == {"U3"}
    assert cgroups.allowed(known, GPUS) == {"U3"}
    assert len(reads.queries) == 6
    assert len(reads.programs) == 2  # each program once


def test_a_new_cgroup_new_devices_or_first_processes_are_seen_at_once(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = groups.make(name="a")
    attach(as_systemd(nodes(0, 1)), top, ALLOW_MULTI)
    known = job(v2=top, pids=set())
    reads = Reads(monkeypatch)

    def settled() -> int:
        clock.now += 10
        cgroups.allowed(known, GPUS)
        del reads.queries[:]
        cgroups.allowed(known, GPUS)
        return len(reads.queries)

    cgroups.allowed(known, GPUS)
    assert settled() == 0
    assert cgroups.allowed(known, GPUS[:3]) == {"U2"}
    assert settled() == 0

    below = groups.make(name="a/b")
    cgroups.allowed(known, GPUS)
    assert len(reads.queries) == 1
    attach(as_systemd(nodes(0)), below, ALLOW_MULTI)
    assert settled() == 0

    known.pids = frozenset((process_in(below, groups),))
    assert cgroups.allowed(known, GPUS) == {"U2"}
    assert settled() == 0

    known.directories["devices"] = str(groups.make("devices"))
    limit(Path(known.directories["devices"]), 1)
    assert cgroups.allowed(known, GPUS) == set()


def test_jobs_that_nobody_asks_about_are_forgotten(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock
) -> None:
    group = groups.make()
    for _ in range(200):
        cgroups.allowed(job(v2=group), GPUS)
        clock.now += 10
    assert len(cgroups._answers) < 20
