"""The table of live jobs, on a cgroup tree made of plain files and folders."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from expanse_ebpf.config import JobsConfig
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.jobs.hierarchies import Hierarchy
from expanse_ebpf.jobs.identity import IdentityReader
from expanse_ebpf.jobs.job import Job
from expanse_ebpf.jobs.paths import UnitFilter
from expanse_ebpf.jobs.table import JobTable
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    JOB_STATE_STARTING,
)

SLURM = "/system.slice/n1_slurmstepd.scope"
POD = "3f0c9a1e_77b2_4d15_9c60_0a51d2e4b8f7"
HEX = "b" * 64


class Slots:
    """Stands for the kernel's slots and writes down what it is told."""

    def __init__(self, count: int = 1000) -> None:
        self.free = list(range(2, count))
        self.owner: dict[int, int] = {}
        self.merged: list[tuple[int, int]] = []
        self.ended: list[int] = []
        self.changed: dict[int, int] = {}
        self.moved = 0

    def take(self) -> int:
        if not self.free:
            raise UnavailableError("none")
        return self.free.pop(0)

    def taken(self) -> None: ...

    def assign(self, cgroup: int, slot: int) -> None:
        self.owner[cgroup] = slot

    def forget(self, cgroup: int) -> None:
        self.owner.pop(cgroup, None)

    def merge(self, slot: int, heir: int) -> None:
        self.merged.append((slot, heir))

    def end(self, slot: int) -> None:
        self.ended.append(slot)

    def changes(self, slot: int) -> int:
        return self.changed.get(slot, 0)

    def moves(self) -> int:
        return self.moved


class Node:
    """A cgroup tree below `root`, a /proc beside it, and the table that watches them."""

    def __init__(self, root: Path, names: tuple[str, ...] = ("unified",)) -> None:
        self.proc = root / "proc"
        self.mounts = {name: root / name for name in names}
        for folder in (self.proc, *self.mounts.values()):
            folder.mkdir()
        hierarchies = [
            Hierarchy(name, 2, (), str(mount), "/")
            if name == "unified"
            else Hierarchy(name, 1, (name,), str(mount), "/")
            for name, mount in self.mounts.items()
        ]
        units = UnitFilter.of(JobsConfig())
        reader = IdentityReader(proc=str(self.proc), units=units)
        self.table = JobTable(hierarchies, reader, units, proc=str(self.proc))
        self.slots = Slots()
        self.numbers = itertools.count(5000)
        self.telling = names[0]

    def folder(self, path: str, hierarchy: str | None = None) -> Path:
        return self.mounts[hierarchy or self.telling] / path.lstrip("/")

    def lay(self, path: str, pids: tuple[int, ...] = (), hierarchy: str | None = None) -> Path:
        folder = self.folder(path, hierarchy)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.procs").write_text("".join(f"{pid}\n" for pid in pids))
        return folder

    def process(self, pid: int, path: str, comm: str = "python", uid: int = 1000, start: int = 77) -> None:
        folder = self.proc / str(pid)
        folder.mkdir(exist_ok=True)
        fields = " ".join(["S", "1", *["0"] * 17, str(start), "0"])
        (folder / "stat").write_text(f"{pid} ({comm}) {fields}\n")
        (folder / "status").write_text(f"Name:\t{comm}\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")
        (folder / "cgroup").write_text(f"0::{path}\n")
        (folder / "environ").write_bytes(b"")
        (folder / "cmdline").write_bytes(comm.encode() + b"\0")

    def begin(self) -> None:
        self.table.begin(self.telling, self.slots)

    def made(
        self, path: str, slot: int = 0, inherited: bool = False, hierarchy: str | None = None
    ) -> Job | None:
        """The kernel tells of a new cgroup, which is there."""
        folder = self.lay(path, hierarchy=hierarchy)
        return self.table.made(
            hierarchy or self.telling, path, folder.stat().st_ino, slot, inherited=inherited
        )

    def removed(self, path: str) -> None:
        folder = self.folder(path)
        (folder / "cgroup.procs").unlink()
        folder.rmdir()
        self.table.removed(self.telling, path)

    def tick(self) -> dict[str, int]:
        """Key to state of what would be reported now."""
        self.slots.moved += 1  # look at everything
        jobs = self.table.update()
        reported = {job.key: job.state for job in jobs}
        assert len(reported) == len(jobs), "two rows for one key"
        self.table.finish()
        return reported


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_a_job_begins_with_its_cgroup_and_keeps_the_slot_that_the_kernel_gave(node: Node) -> None:
    node.begin()
    job = node.made("/expanse-run-train", slot=17)
    assert job is not None
    assert (job.key, job.slot) == ("run/train", 17)
    assert job.identity.run == node.folder("/expanse-run-train").stat().st_ino
    assert node.slots.owner[job.identity.run] == 17
    assert node.tick() == {"run/train": JOB_STATE_STARTING}
    node.lay("/expanse-run-train", (100,))
    node.process(100, "/expanse-run-train")
    assert node.tick() == {"run/train": JOB_STATE_RUNNING}
    assert job.pids == {100}
    assert job.identity.uid == 1000


def test_a_job_that_ends_is_reported_once_more_and_then_gone(node: Node) -> None:
    node.begin()
    job = node.made("/expanse-run-train", slot=17)
    assert job is not None
    node.lay("/expanse-run-train", (100,))
    node.process(100, "/expanse-run-train")
    node.tick()
    node.removed("/expanse-run-train")
    assert node.tick() == {"run/train": JOB_STATE_ENDED}
    assert node.slots.ended == [17]
    assert job.identity.run not in node.slots.owner
    assert node.tick() == {}


def test_cgroups_of_one_job_share_its_slot_in_whatever_order_they_are_heard_of(node: Node) -> None:
    node.begin()
    job = node.made(f"{SLURM}/job_7/step_0", slot=20)
    assert job is not None
    assert node.made(f"{SLURM}/job_7/step_extern", slot=21) is None
    node.made(f"{SLURM}/job_7/step_0/user", slot=20, inherited=True)
    node.made(f"{SLURM}/job_7", slot=22)
    assert set(node.slots.owner.values()) == {20}
    assert node.slots.merged == [(21, 20), (22, 20)]
    assert node.tick() == {"slurm/7": JOB_STATE_STARTING}


def test_what_is_below_a_jobs_cgroup_is_the_jobs_whatever_it_is_called(node: Node) -> None:
    node.begin()
    job = node.made("/expanse-run-train", slot=17)
    assert job is not None
    node.made("/expanse-run-train/odd name\n", slot=17, inherited=True)
    node.lay("/expanse-run-train/odd name\n", (100,))
    node.process(100, "/expanse-run-train/odd name\n")
    assert node.tick() == {"run/train": JOB_STATE_RUNNING}
    assert node.table.unattributed == 0


def test_a_pod_inside_a_container_is_a_job_of_its_own(node: Node) -> None:
    """kind: what the kernel let it inherit from the node's container is put right."""
    node.begin()
    outer = f"/docker/{'a' * 64}"
    container = node.made(outer, slot=30)
    assert container is not None
    pod_path = f"{outer}/kubepods.slice/kubepods-pod{POD}.slice"
    node.made(f"{outer}/kubepods.slice", slot=30, inherited=True)
    pod = node.made(pod_path, slot=30, inherited=True)
    assert pod is not None
    assert pod.identity.scheduler == "kubernetes"
    assert pod.slot not in (None, 30)
    assert node.slots.owner[node.folder(pod_path).stat().st_ino] == pod.slot
    node.made(f"{pod_path}/crio-{HEX}.scope", slot=pod.slot or 0, inherited=True)
    assert list(pod.identity.containers) == [HEX]


def test_unknown_cgroups_are_counted_and_spoil_nothing(node: Node) -> None:
    node.begin()
    node.made("/expanse-run-a", slot=2)
    node.made(f"{SLURM}/job_1/step_0", slot=3)
    for i in range(3):
        node.made(f"/whatever-{i}", slot=4 + i)
    assert set(node.tick()) == {"run/a", "slurm/1"}
    assert node.table.unattributed == 3
    assert node.slots.merged == [(4, 0), (5, 0), (6, 0)]
    node.removed("/whatever-0")
    assert node.table.unattributed == 2


def test_a_job_that_is_over_before_the_next_tick_is_identified_by_its_first_execution(node: Node) -> None:
    node.begin()
    job = node.made("/expanse-run-quick", slot=4)
    assert job is not None
    node.process(100, "/expanse-run-quick")
    assert not job.identity.HasField("uid") or job.identity.uid == 0  # the directory's owner
    node.table.executed(job.identity.run, 100)
    assert job.identity.uid == 1000


def test_a_slice_is_neither_a_job_nor_unknown(node: Node) -> None:
    node.begin()
    node.made("/system.slice", slot=9)
    assert node.tick() == {}
    assert node.table.unattributed == 0
    assert node.slots.merged == [(9, 0)]


def test_an_allocation_without_processes_of_the_user_is_held_not_over(node: Node) -> None:
    path = f"{SLURM}/job_8/step_extern/slurm"
    node.lay(path, (300,))
    node.process(300, path, comm="slurmstepd", uid=0)
    node.begin()
    assert node.tick() == {"slurm/8": JOB_STATE_HELD_IDLE}
    (job,) = node.table
    assert job.pids == frozenset()
    assert [node.tick() for _ in range(70)][-1] == {"slurm/8": JOB_STATE_HELD_IDLE}


def test_cgroups_left_over_from_former_jobs_are_not_jobs_until_somebody_moves_in(node: Node) -> None:
    node.lay(f"{SLURM}/job_9/step_0")
    node.begin()
    assert [node.tick() for _ in range(70)][-1] == {}
    node.lay(f"{SLURM}/job_9/step_0", (400,))
    node.process(400, f"{SLURM}/job_9/step_0")
    assert node.tick() == {"slurm/9": JOB_STATE_RUNNING}


def test_a_job_whose_cgroup_stays_empty_is_over_and_comes_back_if_used_again(node: Node) -> None:
    node.begin()
    node.made(f"{SLURM}/job_9/step_0", slot=5)
    node.lay(f"{SLURM}/job_9/step_0", (400,))
    node.process(400, f"{SLURM}/job_9/step_0")
    assert node.tick() == {"slurm/9": JOB_STATE_RUNNING}
    node.lay(f"{SLURM}/job_9/step_0")
    assert node.tick() == {"slurm/9": JOB_STATE_ENDED}
    assert node.tick() == {}
    assert node.slots.ended == []  # whoever runs there again is still accounted
    node.lay(f"{SLURM}/job_9/step_0", (401,))
    node.process(401, f"{SLURM}/job_9/step_0")
    assert node.tick() == {"slurm/9": JOB_STATE_RUNNING}


def test_a_recycled_id_is_another_run(node: Node) -> None:
    node.begin()
    path = f"{SLURM}/job_501"
    first = node.made(path, slot=5)
    assert first is not None
    node.tick()
    keep = node.folder("/keep-the-inode-busy")
    node.folder(path).rename(keep)  # so that the next folder cannot get the same inode
    node.table.removed(node.telling, path)
    second = node.made(path, slot=6)
    assert second is not None
    assert (second.identity.id, second.slot) == (first.identity.id, 6)
    assert second.identity.run != first.identity.run
    assert {job.identity.run for job in node.table.update()} == {first.identity.run, second.identity.run}
    node.table.finish()
    assert [job.identity.run for job in node.table.update()] == [second.identity.run]


def test_a_run_that_is_over_stays_over_when_its_successor_has_the_same_path(node: Node) -> None:
    node.begin()
    path = "/system.slice/g.service"
    first = node.made(path, slot=5)
    assert first is not None
    node.lay(path, (400,))
    node.process(400, path)
    node.tick()
    node.lay(path)
    assert node.tick() == {"unit/g.service": JOB_STATE_ENDED}
    node.removed(path)
    second = node.made(path, slot=6)
    node.lay(path, (401,))
    node.process(401, path)
    assert node.tick() == {"unit/g.service": JOB_STATE_RUNNING}
    assert list(node.table) == [second]
    assert node.slots.ended == [5]


def test_a_removal_that_was_not_heard_of_still_ends_the_run(node: Node) -> None:
    node.begin()
    path = f"{SLURM}/job_501"
    first = node.made(path, slot=5)
    assert first is not None
    second = node.table.made(node.telling, path, first.identity.run + 1, 6, inherited=False)
    assert second is not None
    jobs = {job.identity.run: job.state for job in node.table.update()}
    assert jobs[first.identity.run] == JOB_STATE_ENDED
    assert jobs[second.identity.run] != JOB_STATE_ENDED
    node.table.finish()
    assert node.slots.ended == [5]


def test_a_removal_that_is_heard_of_too_late_ends_nobody_else(node: Node) -> None:
    node.begin()
    path = f"{SLURM}/job_501"
    first = node.made(path, slot=5)
    assert first is not None
    second = node.table.made(node.telling, path, first.identity.run + 1, 6, inherited=False)
    assert second is not None
    node.table.removed(node.telling, path, first.identity.run)
    node.table.update()
    node.table.finish()
    assert [job.identity.run for job in node.table.update()] == [second.identity.run]


def test_a_users_job_that_lies_elsewhere_in_other_hierarchies_is_found_there(tmp_path: Path) -> None:
    node = Node(tmp_path, ("unified", "memory"))
    node.begin()
    job = node.made("/expanse-run-a", slot=2)
    assert job is not None
    node.made("/session/7/expanse-run-a", hierarchy="memory")
    assert job.directories["memory"] == str(node.mounts["memory"] / "session/7/expanse-run-a")


def test_after_lost_events_the_tree_is_compared(node: Node) -> None:
    node.begin()
    node.made("/expanse-run-gone", slot=2)
    node.made("/expanse-run-stays", slot=3)
    node.tick()
    folder = node.folder("/expanse-run-gone")
    (folder / "cgroup.procs").unlink()
    folder.rmdir()
    node.lay("/expanse-run-new", (500,))
    node.process(500, "/expanse-run-new")
    node.table.resync()
    assert node.tick() == {
        "run/gone": JOB_STATE_ENDED,
        "run/stays": JOB_STATE_STARTING,
        "run/new": JOB_STATE_RUNNING,
    }
    node.table.resync()
    assert set(node.tick()) == {"run/stays", "run/new"}


def test_the_hierarchy_that_tells_jobs_apart_is_found_by_looking(tmp_path: Path) -> None:
    node = Node(tmp_path, ("unified", "freezer"))
    node.lay("/slurm_n1/uid_0/job_1/step_batch", (800,), hierarchy="freezer")
    for i in range(3):
        node.lay(f"/expanse-run-left-over-{i}")  # without a process
    assert node.table.survey() == "freezer"


def test_jobs_that_show_up_in_another_hierarchy_alone_change_the_choice(tmp_path: Path) -> None:
    node = Node(tmp_path, ("unified", "freezer"))
    node.begin()
    node.made("/slurm_n1/uid_0/job_1/step_batch", hierarchy="freezer")
    node.made("/slurm_n1/uid_0/job_1", hierarchy="freezer")
    node.lay("/slurm_n1/uid_0/job_1/step_batch", (600,), hierarchy="freezer")
    answers = []
    for _ in range(4):
        node.tick()
        answers.append(node.table.better_hierarchy())
    assert answers == [None, None, "freezer", None]
    node.telling = "freezer"
    node.begin()
    node.lay("/slurm_n1/uid_0/job_1/step_batch", (600,))
    node.process(600, "/slurm_n1/uid_0/job_1/step_batch")
    assert node.tick() == {"slurm/1": JOB_STATE_RUNNING}
    assert node.table.better_hierarchy() is None


def test_systemds_units_do_not_hide_a_job_and_do_not_take_the_choice_back(tmp_path: Path) -> None:
    node = Node(tmp_path, ("memory", "freezer"))
    for number in range(3):
        node.lay(f"/system.slice/web-{number}.service", (700 + number,), hierarchy="memory")
    assert node.table.survey() == "memory"
    node.begin()
    job = "/slurm_n1/uid_0/job_1"
    node.made(job, hierarchy="freezer")
    node.lay(job, (600,), hierarchy="freezer")
    answers = []
    for _ in range(3):
        node.table.update()
        answers.append(node.table.better_hierarchy())
    assert answers == [None, None, "freezer"]
    node.telling = "freezer"
    node.begin()
    node.process(600, job)
    assert node.tick() == {"slurm/1": JOB_STATE_RUNNING}
    assert node.table.better_hierarchy() is None
    node.removed(job)
    node.tick()
    assert [node.table.better_hierarchy() for _ in range(40)] == [None] * 40


def test_units_change_the_choice_where_no_job_has_been_seen(tmp_path: Path) -> None:
    node = Node(tmp_path, ("freezer", "memory"))
    node.begin()
    unit = "/system.slice/web.service"
    node.made(unit, hierarchy="memory")
    node.lay(unit, (700,), hierarchy="memory")
    node.table.update()
    assert [node.table.better_hierarchy() for _ in range(3)] == [None, None, "memory"]


def test_a_process_that_becomes_the_pause_program_is_not_the_users_any_more(node: Node) -> None:
    node.begin()
    pod = "/kubepods/pod11111111-2222-3333-4444-555555555555"
    job = node.made(pod, slot=2)
    assert job is not None
    cgroup = node.lay(f"{pod}/{'a1' * 32}", (500,)).stat().st_ino
    node.made(f"{pod}/{'a1' * 32}")
    node.process(500, f"{pod}/{'a1' * 32}", comm="runc:[2:INIT]")
    node.lay(f"{pod}/{'a1' * 32}", (500,))
    node.tick()
    assert job.pids == {500}
    node.process(500, f"{pod}/{'a1' * 32}", comm="pause")
    node.table.executed(cgroup, 500)
    node.tick()
    assert job.pids == frozenset()


def test_a_job_knows_its_directories_in_all_hierarchies_in_any_order(tmp_path: Path) -> None:
    node = Node(tmp_path, ("unified", "memory", "cpuacct"))
    node.begin()
    node.made("/expanse-run-a", hierarchy="memory")
    job = node.made("/expanse-run-a", slot=2)
    assert job is not None
    node.made("/expanse-run-a", hierarchy="cpuacct")
    assert job.directories == {name: str(mount / "expanse-run-a") for name, mount in node.mounts.items()}


def test_without_a_free_slot_a_job_is_still_a_job(node: Node) -> None:
    node.slots.free.clear()
    node.begin()
    job = node.made("/expanse-run-a", slot=1)
    assert job is not None
    assert job.slot is None
    assert node.tick() == {"run/a": JOB_STATE_STARTING}


def test_a_cgroup_that_vanishes_while_it_is_looked_at_is_no_error(node: Node) -> None:
    node.begin()
    node.made("/expanse-run-a", slot=2)
    node.lay("/expanse-run-a", (700,))  # and the process has no folder in /proc
    assert node.tick() == {"run/a": JOB_STATE_RUNNING}
    folder = node.folder("/expanse-run-a")
    (folder / "cgroup.procs").unlink()
    folder.rmdir()
    assert node.tick() == {"run/a": JOB_STATE_ENDED}
    node.table.removed(node.telling, "/expanse-run-a")
    assert node.tick() == {}


def test_five_thousand_jobs_one_after_the_other_leave_nothing(node: Node) -> None:
    node.begin()
    for i in range(5000):
        node.made(f"/expanse-run-{i}", slot=2 + i % 500)
        if i >= 10:
            node.removed(f"/expanse-run-{i - 10}")
        if i % 5 == 0:
            node.tick()
    for i in range(4990, 5000):
        node.removed(f"/expanse-run-{i}")
    node.tick()
    assert node.tick() == {}
    state = vars(node.table)
    sizes = {name: len(value) for name, value in state.items() if isinstance(value, (dict, set))}
    assert {name: n for name, n in sizes.items() if n > 2} == {}
    assert node.slots.owner == {}
