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

from expanse_ebpf.gpu import device_cgroup, device_limits
from expanse_ebpf.gpu.device_cgroup import DeviceCgroups
from expanse_ebpf.gpu.device_program import DeviceProgram
from expanse_ebpf.gpu.device_rules import Rule
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


def test_a_job_that_makes_many_cgroups_stays_within_its_own(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock
) -> None:
    top = groups.make(name="a")
    attach(as_systemd(nodes(0)), top)
    known = job(v2=top)
    assert cgroups.allowed(known, GPUS) == {"U2"}
    for number in range(257):
        groups.make(name=f"a/{number}")
    clock.now += 60
    assert cgroups.allowed(known, GPUS) == {"U2"}
    assert DeviceCgroups().allowed(known, GPUS) == {"U2"}


def test_many_cgroups_of_a_job_whose_own_is_not_limited(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_MAX_CGROUPS", 3)
    top, below = groups.make(name="a"), groups.make(name="a/b")
    groups.make(name="a/c")
    attach(as_systemd(nodes(0)), below)
    known = job(v2=top, pids={process_in(below, groups)})
    assert cgroups.allowed(known, GPUS) == {"U2"}
    groups.make(name="a/d")
    clock.now += 60
    assert cgroups.allowed(known, GPUS) == {"U2"}
    assert not cgroups.limited(known)
    other = DeviceCgroups()
    assert other.allowed(known, GPUS) is None
    assert other.reason == "it has more than 3 cgroups"
    assert other.limited(known)


def test_what_a_job_had_stays_known_when_its_cgroup_is_gone(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock
) -> None:
    v1, v2 = groups.make("devices", "job"), groups.make(name="job")
    limit(v1, 3)
    attach(as_systemd(nodes(3)), v2)
    jobs = [job(v1), job(v2=v2), job(v1, v2)]
    for one in jobs:
        assert cgroups.allowed(one, GPUS) == {"U1"}
        one.pids = frozenset()
    v1.rmdir()
    v2.rmdir()
    for _ in range(3):
        for one in jobs:
            assert cgroups.allowed(one, GPUS) == {"U1"}
            assert cgroups.reason == ""
            assert not cgroups.limited(one)
        clock.now += 20


def test_what_a_job_had_stays_known_when_its_processes_have_ended(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock
) -> None:
    top, below = groups.make("devices", "job"), groups.make("devices", "job/task_0")
    limit(below, 3)
    known = job(top, pids={process_in(below, groups)})
    assert cgroups.allowed(known, GPUS) == {"U1"}
    known.pids = frozenset()  # its own cgroup is not limited
    clock.now += 60
    assert cgroups.allowed(known, GPUS) == {"U1"}
    other = groups.make("devices", "job/task_1")
    known.pids = frozenset({process_in(other, groups)})
    assert cgroups.allowed(known, GPUS) is None
    assert not cgroups.limited(known)


def test_nothing_limits_is_not_the_same_as_not_known(groups: Groups, cgroups: DeviceCgroups) -> None:
    free, strange, gone = groups.make(name="a"), groups.make(name="b"), groups.make(name="c") / "gone"
    attach(instruction(0x85, constant=5) + instruction(0xB7, 0, constant=1) + instruction(0x95), strange)
    jobs = [job(v2=group) for group in (free, strange, gone)]
    assert [cgroups.allowed(one, GPUS) for one in jobs] == [None] * 3
    assert [cgroups.limited(one) for one in jobs] == [False, True, True]
    assert not cgroups.limited(job())


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
    assert cgroups.allowed(known, GPUS) == {"U2"}
    other = DeviceCgroups()
    assert other.allowed(known, GPUS) is None
    assert other.reason == "its cgroups have ended while they were read"


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

    clock.now += 5
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


# ---- many jobs


def made_up(folder: Path, minor: int, below: int = 0) -> Job:
    """A job with a v1 group, which is made up, and some groups below that."""
    for name in ("", *(f"/{number}" for number in range(below))):
        group = Path(f"{folder}{name}")
        group.mkdir()
        (group / "devices.list").write_text(f"c 195:{minor} rwm\n")
        (group / "cgroup.procs").write_text("")
    return job(folder)


class Calls:
    """Counts the calls of a function of the module."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.first: list[object] = []  # arguments
        real = getattr(device_cgroup, name)

        def count(*arguments: object) -> object:
            self.first.append(arguments[0])
            return real(*arguments)

        monkeypatch.setattr(device_cgroup, name, count)

    def taken(self) -> list[object]:
        first, self.first = self.first, []
        return first


def test_the_devices_are_looked_through_once_for_all_jobs(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [made_up(tmp_path / str(number), number % 4) for number in range(8)]
    keys = Calls("_key", monkeypatch)
    for _ in range(3):
        cgroups.look(jobs, GPUS)
        assert [cgroups.allowed(one, GPUS) for one in jobs] == [{"U2"}, {"U3"}, {"U0"}, {"U1"}] * 2
        clock.now += 10
    assert len(keys.first) == 3
    assert cgroups.allowed(jobs[0], list(GPUS[:2])) == set()  # other devices than those of the round
    cgroups.look(jobs, GPUS)
    one_more = made_up(tmp_path / "more", 0)
    assert cgroups.allowed(one_more, GPUS) == {"U2"}


def test_the_capabilities_that_the_caller_has_read_are_taken(
    groups: Groups, cgroups: DeviceCgroups, tmp_path: Path, clock: Clock
) -> None:
    (tmp_path / "devices").write_text("Character devices:\n236 nvidia-caps\n")
    samples = [GpuSample(uuid="A", minor=0)]
    samples += [
        GpuSample(uuid=f"A{i}", parent_uuid="A", minor=0, gpu_instance=i, compute_instance=0) for i in (1, 2)
    ]
    group = groups.make()
    attach(as_runc([*nodes(0), Allow(major=236, minor=7), Allow(major=236, minor=8)]), group)
    known, cgroups = job(v2=group), DeviceCgroups(str(tmp_path), clock)
    cgroups.look([known], samples, {7: (0, 1, None), 8: (0, 1, 0), 9: (0, 2, None), 10: (0, 2, 0)})
    assert cgroups.allowed(known, samples) == {"A1"}


def test_no_more_instructions_are_followed_in_a_round_than_its_allowance(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_STEPS", 60)
    jobs = []
    for number in range(8):
        group = groups.make(name=str(number))
        attach(as_runc([*nodes(number % 4), Allow(major=number)]), group)
        jobs.append(job(v2=group))
    real = DeviceProgram._run
    followed = [0]

    def count(self: DeviceProgram, context: bytes) -> bool:
        before = self.steps
        try:
            return real(self, context)
        finally:
            followed[0] += self.steps - before

    monkeypatch.setattr(DeviceProgram, "_run", count)
    rounds = 0
    while any(cgroups.limited(one) for one in jobs) or not rounds:
        followed[0] = 0
        cgroups.look(jobs, GPUS)
        assert 0 < followed[0] < 120
        for number, one in enumerate(jobs):
            answer = cgroups.allowed(one, GPUS)
            assert answer == {f"U{(number + 2) % 4}"} or (answer is None and cgroups.limited(one))
        clock.now += 1
        rounds += 1
    assert 3 < rounds < 40


def test_what_was_known_counts_until_a_new_program_is_followed(
    groups: Groups, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = groups.make()
    attach(as_systemd(nodes(0)), group)
    known = job(v2=group)
    assert cgroups.allowed(known, GPUS) == {"U2"}
    attach(as_systemd(nodes(1)), group)
    clock.now += 30
    monkeypatch.setattr(device_cgroup, "_STEPS", 1)
    answers = []
    for _ in range(8):  # a device in each
        answers.append(cgroups.allowed(known, GPUS))
        clock.now += 1
    assert answers[0] == {"U2"}
    assert answers[-1] == {"U3"}


def test_equal_programs_are_followed_once(
    groups: Groups, cgroups: DeviceCgroups, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [job(v2=groups.make(name=str(number))) for number in range(6)]
    for number, one in enumerate(jobs):
        attach(as_runc([*COMMON, *nodes(number % 2)]), Path(one.directories["unified"]))
    runs = [0]
    real = DeviceProgram._run

    def count(self: DeviceProgram, context: bytes) -> bool:
        runs[0] += 1
        return real(self, context)

    monkeypatch.setattr(DeviceProgram, "_run", count)
    cgroups.look(jobs, GPUS)
    assert [cgroups.allowed(one, GPUS) for one in jobs] == [{"U2"}, {"U3"}] * 3
    assert runs[0] == 2 * 4  # the GPUs; that one is denied is enough


def test_equal_lists_are_read_once(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    real = device_limits.parse_devices_list

    def count(text: str) -> list[Rule]:
        read.append(text)
        return real(text)

    monkeypatch.setattr(device_limits, "parse_devices_list", count)
    jobs = [made_up(tmp_path / str(number), number % 2) for number in range(6)]
    for _ in range(3):
        cgroups.look(jobs, GPUS)
        clock.now += 30
    assert [cgroups.allowed(one, GPUS) for one in jobs] == [{"U2"}, {"U3"}] * 3
    assert sorted(read) == ["c 195:0 rwm\n", "c 195:1 rwm\n"]


def test_what_is_kept_of_programs_and_lists_is_bounded(
    groups: Groups, tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_MAX_IDS", "_MAX_PROGRAMS", "_MAX_LISTS"):
        monkeypatch.setattr(device_limits, name, 3)
    jobs = [made_up(tmp_path / str(number), number) for number in range(5)]
    for number in range(5):
        group = groups.make(name=str(number))
        attach(as_runc([*nodes(number), Allow(major=1)]), group)
        jobs.append(job(v2=group))
    for _ in range(2):
        cgroups.look(jobs, GPUS)
        assert [cgroups.allowed(one, GPUS) for one in jobs] == [{"U2"}, {"U3"}, {"U0"}, {"U1"}, set()] * 2
        clock.now += 30
    reader = cgroups._reader
    assert len(reader._by_id) == len(reader._by_code) == len(reader._by_text) == 3
    (tmp_path / "0/devices.list").write_text("c 195:0 rwm\n" + "c 1:3 m\n" * 600)
    assert cgroups.allowed(jobs[0], [*GPUS]) == {"U2"}
    assert max(map(len, reader._by_text)) < 4096


def test_the_cgroups_of_many_jobs_are_looked_at_in_turn(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_STATES", 20)
    jobs = [made_up(tmp_path / str(number), 0, below=9) for number in range(4)]
    for _ in range(3):
        clock.now += 5
        cgroups.look(jobs, GPUS)
    states = Calls("state", monkeypatch)
    (tmp_path / "3/7/new").mkdir()
    (tmp_path / "3/7/devices.list").write_text("c 195:1 rwm\n")
    (tmp_path / "3/7/cgroup.procs").write_text("1\n")
    rounds = 0
    clock.now += 1
    while cgroups.allowed(jobs[3], GPUS) != {"U3"}:
        cgroups.look(jobs, GPUS)
        assert len(states.taken()) <= 20
        clock.now += 1
        rounds += 1
        assert rounds <= 5


def test_no_more_cgroups_are_read_in_a_round_than_its_allowance_and_every_job_has_its_turn(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_CGROUPS", 30)
    jobs = [made_up(tmp_path / str(number), 0, below=9) for number in range(12)]
    trees = Calls("read_tree", monkeypatch)
    for _ in range(4):
        cgroups.look(jobs, GPUS)
        assert len(trees.taken()) == 3
        clock.now += 1
    assert [cgroups.allowed(one, GPUS) for one in jobs] == [{"U2"}] * 12


def test_jobs_that_change_all_the_time_keep_no_other_waiting(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_cgroup, "_CGROUPS", 10)
    restless = [made_up(tmp_path / str(number), 0, below=5) for number in range(5)]
    cgroups.look(restless, GPUS)
    trees = Calls("read_tree", monkeypatch)
    newcomer: Job | None = None
    for tick in range(60):
        clock.now += 1
        for one in restless:
            (Path(one.directories["devices"]) / f"new-{tick}").mkdir()
            if tick:
                (Path(one.directories["devices"]) / f"new-{tick - 1}").rmdir()
        if tick == 30:
            newcomer = made_up(tmp_path / "newcomer", 1)
        cgroups.look([*restless, *([newcomer] if newcomer else [])], GPUS)
        if tick == 34:
            assert newcomer is not None
            assert cgroups.allowed(newcomer, GPUS) == {"U3"}
            assert str(tmp_path / "newcomer") in trees.first


def test_a_job_that_changes_all_the_time_is_read_now_and_then(
    tmp_path: Path, cgroups: DeviceCgroups, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    restless = made_up(tmp_path / "restless", 0)
    trees = Calls("read_tree", monkeypatch)
    for tick in range(90):
        (tmp_path / f"restless/new-{tick}").mkdir()
        cgroups.look([restless], GPUS)
        clock.now += 1
    # In each 30 s 5 times after a change, and then every 5 s
    assert len(trees.first) <= 3 * (5 + 6)
