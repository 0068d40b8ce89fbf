import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.config import JobsConfig
from expanse_ebpf.errors import ConfigError
from expanse_ebpf.jobs.paths import (
    NOT_A_JOB,
    NotAJob,
    Place,
    UnitFilter,
    parse,
    run_component,
    run_name,
    unescape,
)

A, B, C = "a1" * 32, "b2" * 32, "c3" * 32
UID = "3f0c9a1e-77b2-4d15-9c60-0a51d2e4b8f7"
UID_ = UID.replace("-", "_")
HASH = "0123456789abcdef" * 2
SLUID = "s7Q2M4KD9WB100"
KIND = f"/system.slice/docker-{A}.scope/kubelet.slice/kubelet-kubepods.slice"


def slurm(job, depth, **more):
    return Place("slurm", job, depth, **more)


def pod(depth, qos, container="", uid=UID, **more):
    return Place("kubernetes", uid, depth, pod_uid=uid, qos=qos, container=container, **more)


def box(depth, container, **more):
    return Place("container", container, depth, container=container, **more)


SLURM = [
    (
        "/system.slice/gpu017_slurmstepd.scope/job_4411/step_0/user/task_3",
        slurm("4411", 3, step="0", task="3"),
    ),
    ("/slurm_gpu017/uid_1201/job_77/step_batch/task_0", slurm("77", 3, uid=1201, step="batch", task="0")),
    ("/slurm/uid_1201/job_77/step_extern", slurm("77", 3, uid=1201, step="extern")),
    (
        "/system.slice/slurmstepd.scope/job_8/step_interactive/slurm",
        slurm("8", 3, step="interactive", role="slurmstepd"),
    ),
    ("/slurm_HOST/uid_0/job_1/step_batch", slurm("1", 3, uid=0, step="batch")),
    ("/slurm_HOST/uid_0/job_1", slurm("1", 3, uid=0)),
    ("/slurm/uid_1201/job_77/step_extern/slurm", slurm("77", 3, uid=1201, step="extern", role="slurmstepd")),
    (
        "/system.slice/HOST_slurmstepd.scope/job_2/step_0/user/task_special",
        slurm("2", 3, step="0", task="special"),
    ),
    ("/system.slice/slurmstepd.scope/job_2", slurm("2", 3)),
    ("/system.slice/slurmstepd.scope/job_2/step_0/user", slurm("2", 3, step="0")),
    ("/system.slice/slurmstepd.scope/job_2/step_0/user/task_0/own/more", slurm("2", 3, step="0", task="0")),
    ("/slurmstepd.scope/job_2/step_1", slurm("2", 2, step="1")),
    ("/gpu.slice/n1_slurmstepd.scope/job_2/step_1", slurm("2", 3, step="1")),
    # a component of a heterogeneous job, and a step that runs over several
    ("/slurm/uid_5/job_501/step_0+1/task_0", slurm("501", 3, uid=5, step="0+1", task="0")),
    (
        f"/system.slice/slurmstepd.scope/{SLUID}/step_0/user/task_0",
        slurm(SLUID, 3, sluid=SLUID, step="0", task="0"),
    ),
    (
        f"/system.slice/n2_slurmstepd.scope/{SLUID}/step_extern/slurm",
        slurm(SLUID, 3, sluid=SLUID, step="extern", role="slurmstepd"),
    ),
    # the user's own cgroups cannot pass for slurmstepd's
    ("/system.slice/slurmstepd.scope/job_2/step_0/user/task_0/slurm", slurm("2", 3, step="0", task="0")),
    ("/slurm_gpu017", NOT_A_JOB),
    ("/slurm", NOT_A_JOB),
    ("/slurm/system", NOT_A_JOB),
    ("/slurm/uid_1201", NOT_A_JOB),
    ("/system.slice/slurmstepd.scope/system", NOT_A_JOB),
    ("/system.slice/slurmstepd.scope", NOT_A_JOB),
    ("/system.slice/gpu017_slurmstepd.scope", NOT_A_JOB),
    ("/system.slice/gpu017_slurmstepd.scope/what", None),
    ("/slurm/uid_1/job_0", None),
    ("/slurm/uid_1/job_1x", None),
    ("/slurm/uid_99999999999/job_1", None),
    ("/slurm/uid_4294967295/job_1", None),
    ("/slurm/uid_1/job_\u0661", None),  # a digit, and none of SLURM's
]
KUBERNETES = [
    (
        f"{KIND}/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{UID_}.slice/cri-containerd-{B}.scope",
        pod(6, "burstable", B),
    ),
    (f"/docker/{A}/kubepods.slice/kubepods-pod{UID_}.slice/crio-{B}.scope", pod(4, "guaranteed", B)),
    (f"/kubepods/burstable/pod{HASH}/{B}", pod(3, "burstable", B, uid=HASH)),
    (f"/kubepods/besteffort/pod{UID}/{B}", pod(3, "besteffort", B)),
    (f"/kubepods/pod{UID}/{B}", pod(2, "guaranteed", B)),
    (f"/kubepods/pod{UID}", pod(2, "guaranteed")),
    (f"/kubepods/burstable/pod{UID}/crio-{B}", pod(3, "burstable", B)),
    (f"/kubepods/burstable/pod{UID}/crio-conmon-{B}", pod(3, "burstable", role="conmon")),
    (
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{UID_}.slice/docker-{B}.scope",
        pod(3, "besteffort", B),
    ),
    (
        f"/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-{B}.scope/inner/cgroup",
        pod(2, "guaranteed", B),
    ),
    (f"/kubepods.slice/kubepods-pod{UID_}.slice/crio-{B}.scope/container", pod(2, "guaranteed", B)),
    (f"/kubepods.slice/kubepods-pod{HASH}.slice/crio-{B}.scope", pod(2, "guaranteed", B, uid=HASH)),
    (f"/docker/{A}/kubelet/kubepods/besteffort/pod{UID}/{B}", pod(6, "besteffort", B)),
    (f"/docker/{A}/docker/{B}/kubepods/besteffort/pod{UID}/{C}", pod(7, "besteffort", C)),
    (
        f"/machine.slice/libpod-{A}.scope/container/kubepods.slice/kubepods-pod{UID_}.slice",
        pod(5, "guaranteed"),
    ),
    (
        f"/kubepods/pod{HASH}/{A}/kubepods/burstable/pod{UID}/{B}",  # a cluster in a pod
        pod(6, "burstable", B),
    ),
    (f"/kubepods/pod{UID}/{A}/docker/{B}", pod(2, "guaranteed", B)),
    (f"/kubepods/pod{UID}/{A}/kubepods/burstable", pod(2, "guaranteed", A)),
    (
        f"/system.slice/containerd.service/kubepods-burstable-pod{UID_}.slice:cri-containerd:{B}",
        pod(3, "burstable", B),
    ),
    (f"/system.slice/k3s.service/kubepods/besteffort/pod{UID}/{B}", pod(5, "besteffort", B)),
    ("/kubepods", NOT_A_JOB),
    ("/kubepods/burstable", NOT_A_JOB),
    ("/kubepods.slice/kubepods-burstable.slice", NOT_A_JOB),
    ("/kubelet.slice/kubelet-kubepods.slice", NOT_A_JOB),
    ("/kubepods/podnothing", None),
    ("/kubepods/burstable/what", None),
]
CONTAINERS = [
    (f"/docker/{A}", box(2, A)),
    (f"/docker/{A}/init.scope", box(2, A)),
    (f"/docker/{A}/docker/{B}", box(4, B)),
    (f"/system.slice/docker-{A}.scope", box(2, A)),
    (f"/machine.slice/libpod-{A}.scope/container", box(2, A)),
    (f"/machine.slice/machine-libpod_pod_{B}.slice/libpod-{A}.scope", box(3, A)),
    (f"/libpod_parent/libpod-{A}", box(2, A)),
    (f"/system.slice/web.service/libpod-payload-{A}", box(3, A)),
    (f"/system.slice/nerdctl-{A}.scope", box(2, A)),
    (f"/k8s.io/{A}", box(2, A)),
    (f"/default/{A}", box(2, A)),
    (f"/system.slice/crio-{A}.scope", box(2, A)),
    (f"/machine.slice/libpod-conmon-{A}.scope", NOT_A_JOB),
    (f"/system.slice/crio-conmon-{A}.scope", NOT_A_JOB),
    ("/lxc/web", Place("container", "lxc-web", 2)),
    ("/lxc/101/ns/system.slice/ssh.service", Place("container", "lxc-101", 2)),
    ("/lxc.payload.web/init.scope", Place("container", "lxc-web", 1)),
    ("/lxc.monitor.web", NOT_A_JOB),
    ("/docker", NOT_A_JOB),
    (f"/{A}", None),
    ("/docker/buildkit", None),
]
RUN = [
    ("/expanse-run-demo", Place("run", "demo", 1)),
    ("/expanse-run-demo/inner/task", Place("run", "demo", 1)),
    ("/user.slice/user-1000.slice/user@1000.service/expanse-run-a%2Fb%20c", Place("run", "a/b c", 4)),
    ("/process/0/expanse-run-n%C3%A9", Place("run", "né", 3)),
    (f"/kubepods/pod{UID}/{A}/expanse-run-x", Place("run", "x", 4)),
    ("/expanse-run-a/expanse-run-b", Place("run", "a", 1)),  # a job within a job is part of it
    ("/expanse-run-", None),
    ("/expanse-run-%61", None),  # another spelling of "a"
    ("/expanse-run-%2f", None),
    ("/expanse-run-%FF", None),
    ("/expanse-run-%1B%5B2J", None),  # would clear the terminal
    ("/expanse-run-a b", None),
]
UNITS = [
    ("/system.slice/training.service", Place("unit", "training.service", 2)),
    ("/system.slice/training.service/worker", Place("unit", "training.service", 2)),
    ("/system.slice/system-train.slice/train@3.service", Place("unit", "train@3.service", 3)),
    (r"/gpu.slice/my\x2djob.service", Place("unit", r"my\x2djob.service", 2)),
    (r"/machine.slice/machine-qemu\x2d1\x2dvm.scope", Place("unit", r"machine-qemu\x2d1\x2dvm.scope", 2)),
    ("/", NOT_A_JOB),
    ("/init.scope", NOT_A_JOB),
    ("/system.slice", NOT_A_JOB),
    ("/-.slice/system.slice", NOT_A_JOB),
    ("/user.slice/user-1000.slice/session-3.scope", NOT_A_JOB),
    ("/system.slice/sshd.service", NOT_A_JOB),
    ("/system.slice/systemd-udevd.service/udev", NOT_A_JOB),
    ("/system.slice/slurmd.service", NOT_A_JOB),
    ("/system.slice/dbus.socket", NOT_A_JOB),
    ("/system.slice/home.mount", NOT_A_JOB),
    ("/system.slice/expanse-agent.service", NOT_A_JOB),
    ("/system.slice/what", None),
    ("/something", None),
    ("/process_api/65d459c84fc084460fe2470f67da221b", None),
    ("", None),
    ("relative/slurm/uid_1/job_2", None),
    ("/../slurm/uid_1/job_2", None),
    ("/..", None),
]
FORGED = [
    "/user.slice/user-1000.slice/user@1000.service/slurm/uid_0/job_1/step_0",
    "/user.slice/user-1000.slice/user@1000.service/slurmstepd.scope/job_1/step_0/slurm",
    "/user.slice/slurmstepd.scope/job_1",
    f"/user.slice/user-1000.slice/user@1000.service/kubepods/burstable/pod{UID}/{B}",
    f"/user.slice/user-1000.slice/kubepods.slice/kubepods-pod{UID_}.slice/cri-containerd-x.scope",
    f"/user.slice/user-1000.slice/kubepods-pod{UID_}.slice:cri-containerd:{B}",
    "/user.slice/user-1000.slice/user@1000.service/app.slice/training.service",
    "/user.slice/user-1000.slice/job_1",
]


@pytest.mark.parametrize(("path", "expected"), SLURM + KUBERNETES + CONTAINERS + RUN + UNITS)
def test_form(path, expected):
    assert parse(path) == expected


@pytest.mark.parametrize("path", FORGED)
def test_a_user_cannot_pose_as_a_scheduler(path):
    assert parse(path) == NOT_A_JOB


def test_a_service_cannot_pose_as_a_scheduler():
    base = "/system.slice/web.service"
    web = Place("unit", "web.service", 2)
    assert parse(f"{base}/kubepods/burstable/pod{UID}/{B}") == web
    assert parse(f"{base}/slurmstepd.scope/job_1/step_0") == web
    assert parse(f"{base}/x.slice/kubepods-pod{UID_}.slice:cri-containerd:{B}") == web


def test_a_users_container_is_that_users():
    session = "/user.slice/user-1000.slice/user@1000.service/user.slice"
    assert parse(f"{session}/libpod-{A}.scope/container") == box(5, A, uid=1000)
    # and what claims to be a pod within it is a container of the same user
    place = parse(f"{session}/docker-{A}.scope/kubepods/pod{UID}/crio-{B}.scope")
    assert isinstance(place, Place)
    assert (place.scheduler, place.uid, place.pod_uid) == ("container", 1000, "")


def test_known_and_unknown_paths_are_told_apart():
    seen = [
        parse(path)
        for path in (
            "/slurm/uid_1/job_2/step_0",
            f"/kubepods/pod{UID}",
            "/one",
            "/two/job_1",
            "/docker/short",
        )
    ]
    assert sum(isinstance(place, Place) for place in seen) == 2
    assert sum(place is None for place in seen) == 3


def test_units_are_chosen_by_pattern():
    units = UnitFilter(("train*.service", "*.mount"), ("train-test*",))
    assert parse("/system.slice/training.service", units) == Place("unit", "training.service", 2)
    assert parse("/system.slice/home.mount", units) == Place("unit", "home.mount", 2)
    assert parse("/system.slice/train-test.service", units) == NOT_A_JOB
    assert parse("/system.slice/web.service", units) == NOT_A_JOB
    assert parse("/system.slice/web.service", UnitFilter(())) == NOT_A_JOB
    assert UnitFilter.of(JobsConfig(units=("a.service",), units_exclude=())).accepts("a.service")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("plain", "plain"),
        (r"my\x2djob", "my-job"),
        (r"n\xc3\xa9", "né"),
        (r"\xzz", r"\xzz"),
        (r"é\x2d", "é-"),
    ],
)
def test_unescape(name, shown):
    assert unescape(name) == shown


@pytest.mark.parametrize("name", ["", "a\nb", "\x1b[2J", "\udcff", "é" * 100])
def test_names_that_no_run_can_have(name):
    with pytest.raises(ConfigError):
        run_component(name)


@given(st.text(min_size=1, max_size=60).filter(str.isprintable))
def test_run_names_come_back(name):
    try:
        component = run_component(name)
    except ConfigError:
        assert len(name.encode()) * 3 > 255 - len("expanse-run-")
        return
    assert "/" not in component
    assert run_name(component) == name
    assert parse(f"/any.slice/{component}/below") == Place("run", name, 2)


@given(st.text(max_size=300))
def test_only_one_spelling_of_a_run_name_counts(text):
    name = run_name("expanse-run-" + text)
    assert name is None or run_component(name) == "expanse-run-" + text


PIECES = st.one_of(
    st.sampled_from(["slurm", "slurm_x", "system.slice", "user.slice", "slurmstepd.scope", "uid_1", "job_2"]),
    st.sampled_from(
        ["step_0", "user", "task_1", SLUID, "x.service", "", "..", "expanse-run-x", "expanse-run-%ff"]
    ),
    st.sampled_from(["kubepods", "kubepods.slice", "burstable", f"pod{UID}", A, "docker", "lxc"]),
    st.sampled_from([f"docker-{A}.scope", f"libpod-conmon-{A}.scope", f"kubepods-pod{UID_}.slice"]),
    st.sampled_from(["a\nb", "..job_1", "user-1.slice", "user-99999999999.slice"]),
    st.text(max_size=20),
)


@given(st.text() | st.lists(PIECES, max_size=12).map("/".join).map("/{}".format))
def test_parse_never_raises_and_says_one_of_three_things(path):
    place = parse(path)
    assert place is None or isinstance(place, (Place, NotAJob))
    if isinstance(place, Place):
        parts = [part for part in path.split("/") if part]
        assert place.id
        assert 1 <= place.depth <= len(parts)
        assert place.uid is None or 0 <= place.uid < 2**32 - 1
        # the job's own directory is the same job's
        own = parse("/" + "/".join(parts[: place.depth]))
        assert isinstance(own, Place)
        assert (own.scheduler, own.id, own.depth) == (place.scheduler, place.id, place.depth)


@pytest.mark.parametrize(
    "path",
    [
        "/" * 1_000_000,
        "/a" * 300_000,
        "/" + "a" * 1_000_000,
        "/kubepods" * 100_000,
        f"/docker/{A}" * 10_000,
        "/x.slice" * 100_000,
        "/expanse-run-" + "%61" * 300_000,
        "/slurm/uid_1/job_" + "1" * 1_000_000,
        "/system.slice/" + "a-" * 300_000 + ".service",
        "/" + "a" * 500_000 + "_slurmstepd.scope",
        "/kubepods/pod" + "0" * 1_000_000,
        "/" + "kubelet-" * 200_000 + "kubepods.slice",
    ],
    ids=range(12),
)
def test_hostile_sizes(path):
    """Anything worse than linear would run into the time-out here."""
    parse(path)


def test_a_job_is_found_under_a_thousand_levels():
    assert parse("/slurm/uid_1/job_2/step_0" + "/x" * 1000) == slurm("2", 3, uid=1, step="0")
