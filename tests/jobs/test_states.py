import pytest

from expanse_ebpf.jobs.paths import Place, parse
from expanse_ebpf.jobs.states import decide, process_role, user_pids
from expanse_ebpf.wire.collector_pb2 import (
    JOB_STATE_ENDED,
    JOB_STATE_HELD_IDLE,
    JOB_STATE_RUNNING,
    JOB_STATE_STARTING,
)

POD = "/kubepods/pod3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7"


@pytest.mark.parametrize(
    ("path", "comm", "uid", "role"),
    [
        ("/system.slice/slurmstepd.scope/job_1/step_extern/slurm", "slurmstepd", 0, "slurmstepd"),
        ("/system.slice/slurmstepd.scope/job_1/step_0/user/task_0", "python", 1201, "user"),
        ("/system.slice/slurmstepd.scope/job_1/step_extern/user/task_special", "sleep", 0, "slurmstepd"),
        ("/system.slice/slurmstepd.scope/job_1/step_extern/user/task_special", "sleep", 1201, "user"),
        ("/system.slice/slurmstepd.scope/job_1/step_0/user/task_0", "sleep", 0, "user"),
        ("/slurm/uid_1201/job_1", "slurmstepd", 0, "slurmstepd"),
        ("/slurm/uid_1201/job_1/step_0", "slurmstepd", 1201, "user"),  # a name that anybody can take
        ("/slurm/uid_1201/job_1/step_0", "slurmstepd", None, "user"),
        (f"{POD}/{'a' * 64}", "pause", 65535, "pause"),
        (f"{POD}/{'a' * 64}", "python", 0, "user"),
        (f"{POD}/crio-conmon-{'a' * 64}", "conmon", 0, "pause"),
        ("/expanse-run-a", "pause", 0, "user"),
    ],
)
def test_role(path, comm, uid, role):
    place = parse(path)
    assert isinstance(place, Place)
    assert process_role(place, comm, uid) == role


def test_user_pids():
    assert user_pids({1: "slurmstepd", 2: "user", 3: "pause", 4: "user"}) == {2, 4}


@pytest.mark.parametrize(
    ("scheduler", "roles", "had", "populated", "state"),
    [
        # only slurmstepd is left in the extern step: allocated, and nothing runs
        ("slurm", {10: "slurmstepd"}, False, True, JOB_STATE_HELD_IDLE),
        ("slurm", {10: "slurmstepd"}, True, None, JOB_STATE_HELD_IDLE),
        # every cgroup.procs is empty
        ("slurm", {}, True, False, JOB_STATE_ENDED),
        ("slurm", {}, True, None, JOB_STATE_ENDED),
        ("slurm", {}, False, False, JOB_STATE_STARTING),
        ("slurm", {10: "slurmstepd", 11: "user"}, True, True, JOB_STATE_RUNNING),
        ("slurm", {}, True, True, JOB_STATE_RUNNING),  # they are there and not to be seen
        ("kubernetes", {10: "pause"}, True, True, JOB_STATE_HELD_IDLE),
        ("kubernetes", {10: "pause", 11: "user"}, False, True, JOB_STATE_RUNNING),
        ("kubernetes", {}, True, False, JOB_STATE_ENDED),
        ("run", {}, False, False, JOB_STATE_STARTING),
        ("run", {5: "user"}, False, True, JOB_STATE_RUNNING),
        ("run", {}, True, False, JOB_STATE_ENDED),
        ("unit", {}, True, None, JOB_STATE_ENDED),
    ],
)
def test_state(scheduler, roles, had, populated, state):
    assert decide(scheduler, roles, had_processes=had, populated=populated) == state
