from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.gpu.identifiers import Devices
from expanse_ebpf.gpu.open_files import Opened, OpenFiles
from expanse_ebpf.gpu.processes import PID_MAX, Credited, credit
from expanse_ebpf.wire.collector_pb2 import GpuProcess, GpuSample
from tests.gpu.made_up_proc import MadeUpProc

A, B = "GPU-a", "GPU-b"
MIG = ["MIG-0", "MIG-1"]
CAPS = {30: (0, 1, None), 31: (0, 1, 0), 40: (0, 2, None), 41: (0, 2, 0)}
SSHD = "/usr/sbin/sshd"


class Node:
    """GPU A is /dev/nvidia0, B /dev/nvidia1; A may have MIG instances."""

    def __init__(self, proc: MadeUpProc) -> None:
        self.proc = proc
        self.files = OpenFiles(str(proc.path))
        self.owners: dict[int, str | None] = {}
        self.samples = {A: GpuSample(uuid=A, minor=0), B: GpuSample(uuid=B, minor=1)}

    def with_mig(self) -> None:
        for n, uuid in enumerate(MIG):
            self.samples[uuid] = GpuSample(uuid=uuid, parent_uuid=A, gpu_instance=n + 1, compute_instance=0)

    def process(self, pid: int, job: str, *opened: str, **others) -> None:
        self.proc.process(pid, *opened, **others)
        self.owners[pid] = job or None

    def nvml(self, uuid: str, *pids: int, kind: str = "compute") -> None:
        self.samples[uuid].processes.extend(GpuProcess(pid=pid, kind=kind, memory_bytes=pid) for pid in pids)

    def credit(self) -> dict[str, dict[str, int]]:
        self.files.look(self.owners)
        return self.credit_without_looking().uses

    def credit_without_looking(self) -> Credited[str]:
        samples = list(self.samples.values())
        return credit(samples, Devices(samples), self.owners, self.files, CAPS)

    def said(self, uuid: str) -> list[tuple[int, str, bool]]:
        return [(p.pid, p.job, p.resolved) for p in self.samples[uuid].processes]


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(MadeUpProc(tmp_path))


# ---- numbers of one namespace or another ----


def test_a_number_of_the_agents_own_namespace(node):
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.nvml(A, 100)
    assert node.credit() == {"slurm/1": {A: 100}}
    assert node.said(A) == [(100, "slurm/1", True)]
    assert node.samples[A].unresolved_processes == 0


def test_a_number_of_a_containers_namespace(node):
    node.process(324, "unit/ssh.service", program=SSHD)
    node.process(645400, "slurm/1", "/dev/nvidia0", numbers=(645400, 324))
    node.nvml(A, 324)
    assert node.credit() == {"slurm/1": {A: 645400}}
    assert node.said(A) == [(645400, "slurm/1", True)]


def test_without_the_container_the_number_is_nobodys(node):
    node.process(324, "unit/ssh.service", program=SSHD)
    node.nvml(A, 324)
    assert node.credit() == {}
    assert node.said(A) == [(324, "", False)]
    assert node.samples[A].unresolved_processes == 1


def test_two_containers_with_one_number(node):
    node.process(645400, "slurm/1", "/dev/nvidia0", numbers=(645400, 324))
    node.process(645500, "slurm/2", "/dev/nvidia0", numbers=(645500, 324))
    node.nvml(A, 324)
    assert node.credit() == {}
    assert node.samples[A].unresolved_processes == 1
    node.nvml(A, 324)  # both of them, and not known which memory is whose
    assert node.credit() == {}


def test_two_containers_on_two_gpus(node):
    node.process(645400, "slurm/1", "/dev/nvidia0", numbers=(645400, 324))
    node.process(645500, "slurm/2", "/dev/nvidia1", numbers=(645500, 324))
    node.nvml(A, 324)
    node.nvml(B, 324)
    assert node.credit() == {"slurm/1": {A: 645400}, "slurm/2": {B: 645500}}


def test_a_number_that_fits_here_and_in_a_container(node):
    node.process(324, "slurm/1", "/dev/nvidia0")
    node.process(645400, "slurm/2", "/dev/nvidia0", numbers=(645400, 324))
    node.nvml(A, 324)
    assert node.credit() == {}
    assert node.said(A) == [(324, "", False)]


def test_a_process_is_in_a_list_once(node):
    node.process(324, "slurm/1", "/dev/nvidia0")
    node.process(645400, "slurm/2", "/dev/nvidia0", numbers=(645400, 324))
    node.nvml(A, 324, 645400)  # the latter is certain, and so is the former then
    assert node.credit() == {"slurm/1": {A: 324}, "slurm/2": {A: 645400}}


def test_numbers_of_both_kinds_in_one_list(node):
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.process(645400, "slurm/2", "/dev/nvidia0", numbers=(645400, 20, 7))
    node.nvml(A, 7, 100)
    assert node.credit() == {"slurm/1": {A: 100}, "slurm/2": {A: 645400}}


def test_two_numbers_that_only_one_process_fits(node):
    node.process(645400, "slurm/1", "/dev/nvidia0", numbers=(645400, 324))
    node.nvml(A, 324, 645400)
    assert node.credit() == {}
    assert node.samples[A].unresolved_processes == 2


def test_a_process_of_no_job_is_known_and_nobodys(node):
    node.process(50, "", "/dev/nvidia0")
    node.process(645400, "slurm/2", "/dev/nvidia0", numbers=(645400, 50))
    node.nvml(A, 50)
    assert node.credit() == {}
    assert node.samples[A].unresolved_processes == 1  # it might be the other's
    del node.owners[645400]
    node.samples[A].ClearField("unresolved_processes")
    assert node.credit() == {}
    assert node.said(A) == [(50, "", True)]
    assert node.samples[A].unresolved_processes == 0


# ---- which GPU ----


def test_another_gpu_open_is_not_enough(node):
    node.process(100, "slurm/1", "/dev/nvidia1", "/dev/nvidia-uvm", "/dev/nvidiactl")
    node.nvml(A, 100)
    assert node.credit() == {}


def test_a_gpu_that_was_opened_since_the_last_look(node):
    node.process(100, "slurm/1")
    node.nvml(A, 100)
    assert node.credit() == {}
    node.process(100, "slurm/1", "/dev/nvidia0")
    assert node.credit() == {"slurm/1": {A: 100}}


def test_instances(node):
    node.with_mig()
    node.process(100, "slurm/1", "/dev/nvidia0", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (30, 31)))
    node.process(200, "slurm/2", "/dev/nvidia0", *(f"/dev/nvidia-caps/nvidia-cap{n}" for n in (40, 41)))
    node.nvml(MIG[0], 100, 200)
    node.nvml(A, 100, 200)
    assert node.credit() == {"slurm/1": {A: 100, MIG[0]: 100}, "slurm/2": {A: 200}}


def test_an_instance_of_a_process_whose_rights_are_not_known(node):
    node.with_mig()
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.nvml(MIG[1], 100)
    assert node.credit() == {"slurm/1": {MIG[1]: 100}}


# ---- MPS ----


def test_mps(node):
    server = "/usr/bin/nvidia-cuda-mps-server"
    node.process(90, "", "/dev/nvidia0", "/dev/nvidia-uvm", program=server)
    node.process(100, "slurm/1", "/dev/nvidia-uvm")
    node.process(200, "slurm/2", "/dev/nvidia0")
    node.process(300, "slurm/3")
    node.nvml(A, 90)
    node.nvml(A, 100, 200, 300, kind="mps")
    assert node.credit() == {"slurm/1": {A: 100}, "slurm/2": {A: 200}}
    assert node.said(A) == [
        (90, "", True),
        (100, "slurm/1", True),
        (200, "slurm/2", True),
        (300, "", False),
    ]


def test_a_program_that_calls_itself_the_mps_server_is_its_jobs_all_the_same(node):
    node.process(90, "slurm/1", "/dev/nvidia0", program="/tmp/nvidia-cuda-mps-server")
    node.nvml(A, 90)
    assert node.credit() == {"slurm/1": {A: 90}}
    assert node.said(A) == [(90, "slurm/1", True)]


def test_a_number_of_a_process_that_was_not_looked_at_yet_is_not_taken_for_anothers(node):
    node.process(300, "unit/other", "/dev/nvidia0", numbers=(300, 4242))
    node.files.look(node.owners)
    node.process(4242, "slurm/1", "/dev/nvidia0")
    node.files.look(node.owners, budget=0)
    node.nvml(A, 4242)
    assert node.credit_without_looking().uses == {}
    assert node.samples[A].unresolved_processes == 1


def test_a_process_that_opened_the_gpu_after_it_was_looked_at_is_not_robbed_of_it(tmp_path):
    """Another one has the same number in a container of its own, and the GPU open."""
    clock = [0.0]
    node = Node(MadeUpProc(tmp_path))
    node.files = OpenFiles(str(tmp_path), lambda: clock[0])
    node.process(4242, "slurm/1")
    node.process(300, "unit/other", "/dev/nvidia0", numbers=(300, 4242))
    node.files.look(node.owners)
    clock[0] = 10
    node.proc.process(4242, "/dev/nvidia0")
    node.nvml(A, 4242)
    assert node.credit_without_looking().uses == {}
    node.samples[A].processes[0].pid = 4242
    assert node.credit() == {}  # looked at now: it fits both
    assert node.files.of(4242).minors == {0}


def test_who_is_on_a_device_and_what_is_not_known_of_that(node):
    node.process(100, "slurm/1", "/dev/nvidia0", numbers=(100, 7))
    node.process(200, "", "/dev/nvidia1")
    node.nvml(A, 7, 999)
    node.nvml(B, 200)
    node.files.look(node.owners)
    found = node.credit_without_looking()
    assert found.users == {A: {"slurm/1", None}, B: {None}}
    assert found.numbers == {A: {7: "slurm/1"}}
    assert found.memory == {"slurm/1": 7}


def test_unified_memory_alone_counts_for_clients_of_mps_alone(node):
    node.process(100, "slurm/1", "/dev/nvidia-uvm")
    node.nvml(A, 100)
    assert node.credit() == {}


def test_one_process_in_two_lists(node):
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.nvml(A, 100)
    node.nvml(A, 100, kind="graphics")
    assert node.credit() == {"slurm/1": {A: 100}}
    assert node.samples[A].unresolved_processes == 0


# ---- what cannot be ----


def test_numbers_that_no_process_can_have(node):
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.nvml(A, 0, 100, PID_MAX + 1, 4294967295)
    assert node.credit() == {"slurm/1": {A: 100}}
    assert node.said(A) == [(100, "slurm/1", True)]
    assert node.samples[A].processes[0].memory_bytes == 100
    assert node.samples[A].rejected_processes == 3
    assert node.samples[A].unresolved_processes == 0


def test_another_process_of_the_same_pid(node):
    node.process(100, "slurm/1", "/dev/nvidia0")
    node.files.look(node.owners)
    node.proc.restart(100, 99)
    node.nvml(A, 100)
    assert node.credit_without_looking().uses == {}


class Looked:
    """Processes as OpenFiles would know them."""

    def __init__(self, processes):
        self.of = processes.get

    def hurry(self, pid):
        pass

    def fresh(self, pid):
        return True


opened = st.tuples(st.frozensets(st.integers(0, 1)), st.booleans(), st.integers(1, 6))


@given(
    st.dictionaries(st.integers(1, 6), opened),
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 6), st.sampled_from(["compute", "mps"]))),
)
def test_whatever_nvml_says(processes, listed):
    known = {
        pid: Opened(minors, uvm=uvm, numbers=(pid, number))
        for pid, (minors, uvm, number) in processes.items()
    }
    samples = [GpuSample(uuid=A, minor=0), GpuSample(uuid=B, minor=1)]
    for uuid, pid, kind in listed:
        samples[uuid == B].processes.append(GpuProcess(pid=pid, kind=kind, memory_bytes=pid))
    owners = {pid: f"run/{pid}" for pid in known}
    uses = credit(samples, Devices(samples), owners, Looked(known)).uses
    for minor, sample in enumerate(samples):
        credited = [(p.kind, p.pid) for p in sample.processes if p.job]
        assert len(credited) == len(set(credited))
        assert sample.unresolved_processes == sum(not p.resolved for p in sample.processes)
        wanted = sum(uuid == sample.uuid for uuid, *_ in listed)
        assert len(sample.processes) + sample.rejected_processes == wanted
        for process in sample.processes:
            if process.job:
                files = known[process.pid]
                assert minor in files.minors or (process.kind == "mps" and files.uvm)
                assert process.memory_bytes in files.numbers  # the number that NVML said
                assert uses[process.job][sample.uuid] == process.pid


@pytest.mark.parametrize("incomplete", ["processes that cannot be true", "a list that is cut, or none"])
def test_whoever_is_on_a_list_that_is_not_whole_is_not_known(node, incomplete):
    if incomplete.startswith("processes"):
        node.nvml(A, PID_MAX + 1)
    else:
        node.samples[A].unavailable["processes"] = "not supported"
    assert node.credit_without_looking().users == {A: {None}, B: set()}
