import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expanse_ebpf.gpu.identifiers import Devices, Named
from expanse_ebpf.gpu.ownership import SOURCES, Claims, Ownership, Who, resolve
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobIdentity

A, B, C, D = "GPU-a", "GPU-b", "GPU-c", "GPU-d"
MIG = ["MIG-0", "MIG-1"]  # instances of A
SLURM_1 = Who("slurm", "1", 11)
SLURM_2 = Who("slurm", "2", 12)
RUN = Who("run", "train", 13)
POD_1 = Who("kubernetes", "ml/one", 14)
POD_2 = Who("kubernetes", "ml/two", 15)
STRANGER = Who(name="ml/elsewhere")

# NVML's index 0 to 3 are minors 2, 3, 0 and 1
NODE = Devices([GpuSample(uuid=u, index=n, minor=(2, 3, 0, 1)[n]) for n, u in enumerate((A, B, C, D))])
MIG_NODE = Devices(
    [GpuSample(uuid=u, index=n, minor=n, mig_enabled=n == 0) for n, u in enumerate((A, B))]
    + [GpuSample(uuid=u, parent_uuid=A, gpu_instance=n + 1, compute_instance=0) for n, u in enumerate(MIG)]
)


def claims(variable: str = "", *names: str, node: Devices = NODE, **others) -> Claims:
    """Claims of a job whose environment has `names` in `variable`."""
    slurm, environment = node.of(JobIdentity(gpus=names, gpus_source=variable))
    return Claims(slurm=slurm, environment=environment, **others)


def holds(found: Ownership, who: Who) -> list[tuple[str, str, int]]:
    return [(h.uuid, h.source, h.sharers) for h in found.jobs[who].holds]


def holders(found: Ownership, uuid: str) -> list[tuple[str, str]]:
    return [(h.name or f"{h.scheduler}/{h.id}", h.source) for h in found.devices[uuid].holders]


def one(job: Claims, node: Devices = NODE) -> tuple[list[tuple[str, str, int]], list[str], list[str]]:
    """(holds, conflicts, unknown) of a job that is alone on the node."""
    found = resolve(node, {SLURM_1: job})
    return holds(found, SLURM_1), found.jobs[SLURM_1].conflicts, found.jobs[SLURM_1].unknown


# ---- one job, the forms of its claims ---------------------------------------------------------------


def test_the_device_list_allows_a_minor():
    job = Claims(device_cgroup=NODE.opened([0]))
    assert one(job) == ([(C, "device_cgroup", 1)], [], [])


@pytest.mark.parametrize(
    ("variable", "names", "expected", "unknown"),
    [
        ("SLURM_JOB_GPUS", ["0", "2"], [A, C], []),
        ("SLURM_STEP_GPUS", ["1"], [D], []),
        ("SLURM_JOB_GPUS", [B, D], [B, D], []),
        ("SLURM_JOB_GPUS", ["128"], [], ["128"]),
        ("SLURM_JOB_GPUS", ["0", "128"], [C], ["128"]),
        ("CUDA_VISIBLE_DEVICES", ["0"], [A], []),
        ("CUDA_VISIBLE_DEVICES", ["GPU-b"], [B], []),
        ("NVIDIA_VISIBLE_DEVICES", ["1", "2"], [B, C], []),
        ("CUDA_VISIBLE_DEVICES", ["MIG-nowhere"], [], ["MIG-nowhere"]),
        ("", [], [], []),
    ],
)
def test_the_environment_alone(variable, names, expected, unknown):
    source = "slurm" if variable.startswith("SLURM") else "environment"
    assert one(claims(variable, *names)) == ([(uuid, source, 1) for uuid in expected], [], unknown)


def test_a_job_that_holds_and_runs_nothing_holds():
    assert one(claims("SLURM_JOB_GPUS", "0"))[0] == [(C, "slurm", 1)]


def test_processes_and_then_open_files_tell_where_nobody_else_does():
    assert one(Claims(processes={B: 7}, open_files=frozenset({B, C})))[0] == [(B, "processes", 1)]
    assert one(Claims(open_files=frozenset({B, C})))[0] == [(B, "open_files", 1), (C, "open_files", 1)]


def test_a_process_tells_more_than_the_environment():
    assert one(claims("CUDA_VISIBLE_DEVICES", A, B, processes={B: 7})) == ([(B, "processes", 1)], [], [])


def test_every_gpu_open_says_nothing():
    assert one(Claims(open_files=frozenset({A, B, C, D})))[0] == []
    only = Devices([GpuSample(uuid=A)])
    assert one(Claims(open_files=frozenset({A})), only)[0] == [(A, "open_files", 1)]
    # one instance of the first, all of the second: every GPU of that node
    assert one(Claims(open_files=frozenset({MIG[0], B})), MIG_NODE)[0] == []


def test_no_claim_no_hold():
    assert one(Claims()) == ([], [], [])


# ---- sources that contradict each other ---------------------------------------------------------------


def test_the_device_cgroup_against_cuda_visible_devices():
    job = claims("CUDA_VISIBLE_DEVICES", B, C, device_cgroup=frozenset({B}))
    assert one(job) == (
        [(B, "device_cgroup", 1)],
        ["CUDA_VISIBLE_DEVICES names GPU-c, which the device cgroup does not allow"],
        [],
    )


def test_numbers_count_from_0_again_within_what_was_given():
    job = claims("CUDA_VISIBLE_DEVICES", "0", "1", device_cgroup=frozenset({C, D}))
    assert one(job) == ([(C, "device_cgroup", 1), (D, "device_cgroup", 1)], [], [])


def test_a_process_where_the_job_holds_nothing():
    job = claims("SLURM_JOB_GPUS", "0", processes={C: 1, D: 4242})
    assert one(job)[1] == ["its process 4242 uses GPU-d, which it does not hold"]


def test_open_files_beyond_what_was_given():
    job = claims("SLURM_STEP_GPUS", "0", open_files=frozenset({C, D}))
    assert one(job)[1] == ["it has GPU-d open, which SLURM_STEP_GPUS does not name"]
    job = claims("SLURM_STEP_GPUS", "0", open_files=frozenset({A, B, C, D}))
    assert one(job)[1] == []


def test_a_process_beyond_the_environment():
    job = claims("CUDA_VISIBLE_DEVICES", A, processes={B: 7})
    assert one(job)[1] == ["its process 7 uses GPU-b, which CUDA_VISIBLE_DEVICES does not name"]
    assert one(claims("CUDA_VISIBLE_DEVICES", "0", processes={B: 7}))[1] == []


@pytest.mark.parametrize(
    ("variable", "names", "conflicts"),
    [
        ("SLURM_JOB_GPUS", ["0", "1"], []),
        (
            "SLURM_JOB_GPUS",
            ["0", A],
            [
                "SLURM_JOB_GPUS names GPU-a, which the device cgroup does not allow",
                "the device cgroup allows GPU-d, which SLURM_JOB_GPUS does not name",
            ],
        ),
        ("SLURM_JOB_GPUS", ["0"], ["the device cgroup allows GPU-d, which SLURM_JOB_GPUS does not name"]),
        ("SLURM_JOB_GPUS", ["0", "128"], []),  # 128 may be the other one
        ("SLURM_STEP_GPUS", ["0"], []),  # of one step
        ("SLURM_JOB_GPUS", ["2", "3"], []),  # by NVML's order they are C and D
        ("SLURM_STEP_GPUS", ["2"], []),
        ("SLURM_JOB_GPUS", ["2"], ["the device cgroup allows GPU-d, which SLURM_JOB_GPUS does not name"]),
    ],
)
def test_slurms_list_beside_the_device_cgroup(variable, names, conflicts):
    job = claims(variable, *names, device_cgroup=frozenset({C, D}))
    assert one(job)[:2] == ([(C, "device_cgroup", 1), (D, "device_cgroup", 1)], conflicts)


def test_the_kubelet_beside_the_device_cgroup():
    job = Claims(device_cgroup=frozenset({A, B}), pod_resources=[(B, ""), (C, "")])
    assert one(job)[:2] == (
        [(A, "device_cgroup", 1), (B, "device_cgroup", 1)],
        [
            "the kubelet gave it GPU-c, which the device cgroup does not allow",
            "the device cgroup allows GPU-a, which the kubelet did not give it",
        ],
    )


@pytest.mark.parametrize("nothing", [{"device_cgroup": frozenset()}, {"pod_resources": []}])
def test_a_job_that_was_given_nothing_holds_nothing(nothing):
    job = claims("CUDA_VISIBLE_DEVICES", A, processes={A: 7}, **nothing)
    assert one(job)[0] == []
    assert one(job)[1][0] == "its process 7 uses GPU-a, which it does not hold"
    assert one(job)[1][1].startswith("CUDA_VISIBLE_DEVICES names GPU-a, which the ")


def test_the_order_of_trust():
    everything = {
        "device_cgroup": frozenset({A}),
        "pod_resources": [(A, "")],
        "slurm": NODE.named([A], "SLURM_JOB_GPUS"),
        "processes": {A: 7},
        "environment": NODE.named([A], "CUDA_VISIBLE_DEVICES"),
        "open_files": frozenset({A}),
    }
    assert tuple(everything) == SOURCES
    while everything:
        assert one(Claims(**everything)) == ([(A, next(iter(everything)), 1)], [], [])
        del everything[next(iter(everything))]


def test_devices_that_have_gone_are_unknown():
    job = Claims(pod_resources=[("GPU-gone", "0"), (A, "")])
    assert one(job) == ([(A, "pod_resources", 1)], [], ["GPU-gone"])


# ---- several jobs ----------------------------------------------------------------------------------------


def test_pods_that_share_in_time():
    found = resolve(
        NODE,
        {
            POD_2: Claims(pod_resources=[(A, "1")]),
            POD_1: Claims(device_cgroup=frozenset({A}), pod_resources=[(A, "0")]),
            STRANGER: Claims(pod_resources=[(A, "2"), (A, "3")]),
        },
    )
    assert holders(found, A) == [
        ("ml/elsewhere", "pod_resources"),
        ("kubernetes/ml/one", "device_cgroup"),
        ("kubernetes/ml/two", "pod_resources"),
    ]
    assert holds(found, POD_1) == [(A, "device_cgroup", 3)]
    assert holds(found, POD_2) == [(A, "pod_resources", 3)]
    assert found.devices[A].conflicts == []
    assert found.devices[A].holders[1].run == 14
    assert list(found.devices) == [A, B, C, D]
    assert holders(found, B) == []


def test_two_jobs_that_were_both_given_a_gpu():
    found = resolve(
        NODE,
        {POD_1: Claims(pod_resources=[(A, "")]), SLURM_1: Claims(device_cgroup=frozenset({A}))},
    )
    assert holders(found, A) == [("kubernetes/ml/one", "pod_resources"), ("slurm/1", "device_cgroup")]
    assert holds(found, SLURM_1) == [(A, "device_cgroup", 2)]
    assert found.devices[A].conflicts == [
        "given to more than one job, and not as shares: "
        "kubernetes/ml/one (pod_resources), slurm/1 (device_cgroup)"
    ]


def test_two_jobs_whose_slurm_lists_name_one_gpu():
    found = resolve(NODE, {SLURM_2: claims("SLURM_JOB_GPUS", "2"), SLURM_1: claims("SLURM_STEP_GPUS", "2")})
    assert holders(found, A) == [("slurm/1", "slurm"), ("slurm/2", "slurm")]
    assert len(found.devices[A].conflicts) == 1


def test_a_list_in_the_environment_takes_no_gpu_from_whom_it_was_given_to():
    found = resolve(
        NODE, {SLURM_2: claims("SLURM_JOB_GPUS", "2"), SLURM_1: Claims(device_cgroup=frozenset({A}))}
    )
    assert holders(found, A) == [("slurm/1", "device_cgroup")]
    assert found.jobs[SLURM_2].conflicts == ["SLURM_JOB_GPUS names GPU-a, which slurm/1 holds"]


def test_a_list_in_the_environment_takes_no_gpu_from_whose_process_is_on_it():
    found = resolve(NODE, {SLURM_1: claims("SLURM_JOB_GPUS", "2"), RUN: Claims(processes={A: 77})})
    assert holders(found, A) == [("run/train", "processes"), ("slurm/1", "slurm")]
    assert found.devices[A].conflicts == [
        "allotted to one job, and used by another: run/train (processes), slurm/1 (slurm)"
    ]


def test_a_share_beside_a_whole_gpu_is_a_conflict():
    found = resolve(NODE, {POD_1: Claims(pod_resources=[(A, "0")]), POD_2: Claims(pod_resources=[(A, "")])})
    assert len(found.devices[A].conflicts) == 1


@pytest.mark.parametrize(
    ("intruder", "conflict"),
    [
        (Claims(processes={A: 77, B: 78}), "its process 77 uses GPU-a, which slurm/1 holds"),
        (claims("CUDA_VISIBLE_DEVICES", "0", "1"), "CUDA_VISIBLE_DEVICES names GPU-a, which slurm/1 holds"),
        (Claims(open_files=frozenset({A, B})), "it has GPU-a open, which slurm/1 holds"),
    ],
)
def test_who_uses_what_another_was_given_does_not_hold_it(intruder, conflict):
    found = resolve(NODE, {RUN: intruder, SLURM_1: Claims(device_cgroup=frozenset({A}))})
    assert holders(found, A) == [("slurm/1", "device_cgroup")]
    assert [uuid for uuid, *_ in holds(found, RUN)] == [B]
    assert found.jobs[RUN].conflicts == [conflict]
    assert found.jobs[SLURM_1].conflicts == found.devices[A].conflicts == []


def test_several_users_of_what_nobody_was_given_share():
    found = resolve(NODE, {RUN: Claims(processes={A: 1}), SLURM_1: claims("CUDA_VISIBLE_DEVICES", A)})
    assert holders(found, A) == [("run/train", "processes"), ("slurm/1", "environment")]
    assert holds(found, RUN) == [(A, "processes", 2)]
    assert found.devices[A].conflicts == found.jobs[RUN].conflicts == []


def test_clients_of_mps_share():
    found = resolve(NODE, {RUN: Claims(processes={A: 1}), SLURM_1: Claims(processes={A: 2})})
    assert [h.sharers for who in (RUN, SLURM_1) for h in found.jobs[who].holds] == [2, 2]


# ---- MIG ----


def test_instances_of_one_gpu_are_devices_of_their_own():
    found = resolve(
        MIG_NODE,
        {
            SLURM_1: Claims(device_cgroup=frozenset({MIG[0]})),
            SLURM_2: claims("CUDA_VISIBLE_DEVICES", MIG[1], node=MIG_NODE),
        },
    )
    assert holders(found, MIG[0]) == [("slurm/1", "device_cgroup")]
    assert holders(found, MIG[1]) == [("slurm/2", "environment")]
    assert holders(found, A) == []
    assert [held.conflicts for held in found.devices.values()] == [[]] * 4
    assert holds(found, SLURM_1) == [(MIG[0], "device_cgroup", 1)]


def test_a_process_on_an_instance_is_on_its_gpu_too():
    assert one(Claims(processes={A: 7, MIG[0]: 7}), MIG_NODE)[0] == [(MIG[0], "processes", 1)]
    assert one(Claims(device_cgroup=frozenset({MIG[0]}), processes={A: 7}), MIG_NODE)[1] == []
    wrong = Claims(device_cgroup=frozenset({MIG[0]}), processes={MIG[1]: 7})
    assert one(wrong, MIG_NODE)[1] == ["its process 7 uses MIG-1, which it does not hold"]


def test_the_whole_gpu_by_a_source_that_cannot_tell():
    whole = claims("CUDA_VISIBLE_DEVICES", A, node=MIG_NODE)
    alone = resolve(MIG_NODE, {RUN: whole})
    assert holders(alone, A) == [("run/train", "environment")]
    assert alone.jobs[RUN].conflicts == alone.devices[A].conflicts == []
    found = resolve(MIG_NODE, {RUN: whole, SLURM_1: Claims(device_cgroup=frozenset({MIG[1]}))})
    assert holders(found, A) == [("run/train", "environment")]
    assert found.jobs[RUN].conflicts == ["it has all of GPU-a by environment, but slurm/1 has MIG-1 of it"]
    assert found.devices[A].conflicts == ["run/train has all of it by environment, but slurm/1 has MIG-1"]
    assert found.jobs[SLURM_1].conflicts == []


def test_the_whole_gpu_by_a_better_source_than_the_instance():
    found = resolve(
        MIG_NODE,
        {
            SLURM_1: Claims(device_cgroup=frozenset({A})),
            RUN: claims("CUDA_VISIBLE_DEVICES", MIG[0], node=MIG_NODE),
        },
    )
    assert holders(found, A) == [("slurm/1", "device_cgroup")]
    assert holders(found, MIG[0]) == [("run/train", "environment")]
    assert found.jobs[SLURM_1].conflicts == found.devices[A].conflicts == []


def test_slurms_numbers_on_a_node_with_instances():
    job = claims("SLURM_JOB_GPUS", "1", node=MIG_NODE)
    assert one(job, MIG_NODE) == ([], [], ["1 (SLURM counts MIG instances too)"])
    job.device_cgroup = frozenset({MIG[1]})
    assert one(job, MIG_NODE) == ([(MIG[1], "device_cgroup", 1)], [], [])


# ---- bounds ----


def test_the_answer_is_bounded():
    names = [f"GPU-{n:03}-{'x' * 300}" for n in range(64)]
    many = Devices([GpuSample(uuid=name) for name in names])
    job = Claims(
        device_cgroup=frozenset(names[:1]),
        processes=dict.fromkeys(names, 9),
        environment=Named(unknown=tuple(f"{'y' * 300}{n}" for n in range(64))),
    )
    _, conflicts, unknown = one(job, many)
    for found, more in ((conflicts, 43), (unknown, 44)):
        assert len(found) == 21
        assert max(map(len, found)) == 200
        assert found[-1] == f"… and {more} more"
    jobs = {Who("run", f"{n:02}" + "z" * 50): Claims(device_cgroup=frozenset(names)) for n in range(8)}
    assert all(len(line) <= 200 for line in resolve(many, jobs).devices[names[0]].conflicts)


names = st.sampled_from([A, B, C, D, *MIG, "GPU-gone", "\ud800", "x" * 500])
named = st.builds(
    Named,
    uuids=st.lists(names, max_size=4).map(tuple),
    unknown=st.lists(names, max_size=3).map(tuple),
    by_index=st.frozensets(names),
    otherwise=st.lists(names, max_size=2).map(tuple),
    unclear=st.lists(names, max_size=2).map(tuple),
    variable=st.sampled_from(["SLURM_JOB_GPUS", "SLURM_STEP_GPUS", "CUDA_VISIBLE_DEVICES", ""]),
)
any_claims = st.builds(
    Claims,
    device_cgroup=st.none() | st.frozensets(names),
    pod_resources=st.none() | st.lists(st.tuples(names, st.sampled_from(["", "0", "1"])), max_size=4),
    slurm=named,
    environment=named,
    processes=st.dictionaries(names, st.integers(1, 9)),
    open_files=st.frozensets(names),
)
whos = st.builds(
    Who,
    st.sampled_from(["slurm", "kubernetes", "run", ""]),
    st.text(max_size=3),
    st.integers(0, 2**64 - 1),
    st.text(max_size=3) | st.just("\ud800"),
)


@settings(max_examples=150)
@given(st.dictionaries(whos, any_claims, max_size=5), st.sampled_from([NODE, MIG_NODE, Devices([])]))
def test_any_claims(jobs, node):
    found = resolve(node, jobs)
    assert list(found.devices) == list(node)
    assert set(found.jobs) == set(jobs)
    for who, claimed in jobs.items():
        it = found.jobs[who]
        named_anywhere = {
            *(claimed.device_cgroup or ()),
            *(uuid for uuid, _ in claimed.pod_resources or ()),
            *claimed.slurm.uuids,
            *claimed.processes,
            *claimed.environment.uuids,
            *claimed.open_files,
        }
        assert {h.uuid for h in it.holds} <= named_anywhere & set(node)
        assert len({h.source for h in it.holds}) <= 1
        if claimed.device_cgroup is not None:
            assert {h.uuid for h in it.holds} <= claimed.device_cgroup
        for hold in it.holds:
            assert hold.sharers == len(found.devices[hold.uuid].holders) >= 1
        assert len(it.conflicts) <= 21
        assert len(it.unknown) <= 21
    holding = sum(len(it.holds) for it in found.jobs.values())
    assert holding == sum(len(held.holders) for held in found.devices.values())
    assert resolve(node, dict(reversed(jobs.items()))) == found


def test_jobs_that_slurm_gave_shares_of_one_gpu_are_no_conflict():
    shares = [Claims(device_cgroup=frozenset([A]), shared=True) for _ in range(2)]
    found = resolve(NODE, {SLURM_1: shares[0], SLURM_2: shares[1]})
    assert holders(found, A) == [("slurm/1", "device_cgroup"), ("slurm/2", "device_cgroup")]
    assert found.devices[A].conflicts == []
    found = resolve(NODE, {SLURM_1: shares[0], SLURM_2: Claims(device_cgroup=frozenset([A]))})
    assert len(found.devices[A].conflicts) == 1  # the other one was given all of it
