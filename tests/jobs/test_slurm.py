import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.jobs.slurm import (
    GPU_SHARE,
    VARIABLES,
    fill,
    fill_visible_gpus,
    parse_cuda,
    parse_environment,
    parse_gpus,
    parse_stepd_title,
)
from expanse_ebpf.wire.collector_pb2 import JobIdentity


def environ(**values: str) -> bytes:
    return b"".join(f"{name}={value}\0".encode() for name, value in values.items())


@pytest.mark.parametrize(
    ("cmdline", "expected"),
    [
        (b"slurmstepd: [905312.0]\0", ("905312", "0")),
        (b"slurmstepd: [905312.batch]", ("905312", "batch")),
        (b"slurmstepd: [123.extern] \0\0\0", ("123", "extern")),
        (b"slurmstepd: [123.interactive]\0", ("123", "interactive")),
        (b"slurmstepd: [123]\0", ("123", "")),
        (b"slurmstepd: [123+1.0]\0", ("123", "0")),
        (b"/usr/sbin/slurmstepd: [9.0]\0", ("9", "0")),
        (b"slurmstepd: [0.0]\0", None),
        (b"slurmstepd: [12345678901.0]\0", None),
        (b"slurmstepd: [1.0]\0--more\0", None),
        (b"python\0slurmstepd: [1.0]\0", None),
        (b"slurmstepd", None),
        (b"", None),
    ],
)
def test_stepd_title(cmdline, expected):
    assert parse_stepd_title(cmdline) == expected


@given(st.binary())
def test_hostile_titles_never_raise(data):
    assert parse_stepd_title(data) is None
    parse_stepd_title(b"slurmstepd: [" + data + b"]")


def test_environment_has_the_wanted_variables_only():
    data = environ(PATH="/bin", SLURM_JOB_ID="7", XSLURM_JOB_NAME="no", SLURM_JOB_NAME="train", SECRET="x")
    assert parse_environment(data) == {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train"}


def test_the_first_of_duplicates_counts():
    assert parse_environment(b"SLURM_JOB_ID=1\0SLURM_JOB_ID=2\0") == {"SLURM_JOB_ID": "1"}


def test_a_value_that_looks_like_a_variable_is_none():
    assert parse_environment(b"X=SLURM_JOB_ID=1\0") == {}


def test_bytes_that_are_no_text():
    assert parse_environment(b"SLURM_JOB_NAME=a\xff\x1b[2Jb")["SLURM_JOB_NAME"] == "a\ufffd\u241b[2Jb"


def test_long_values_are_cut():
    data = b"SLURM_JOB_NAME=" + b"x" * 1_000_000 + b"\0SLURM_JOB_ID=4\0"
    found = parse_environment(data)
    assert found["SLURM_JOB_NAME"] == "x" * 4096
    assert found["SLURM_JOB_ID"] == "4"


@given(
    st.binary(max_size=300)
    | st.lists(st.sampled_from(VARIABLES) | st.text(max_size=5)).map("=\0".join).map(str.encode)
)
def test_hostile_environments_never_raise(data):
    found = parse_environment(data)
    identity = JobIdentity(scheduler="slurm", id=found.get("SLURM_JOB_ID", ""))
    fill(identity, found)
    identity.SerializeToString()


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,2", ["0", "2"]),
        ("0-3", ["0", "1", "2", "3"]),
        ("GPU-U1,GPU-U3", ["GPU-U1", "GPU-U3"]),
        ("MIG-5f0a/1/0", ["MIG-5f0a/1/0"]),
        ("0,0", ["0"]),
        ("0, 1 ,", ["0", "1"]),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("none", []),
        ("void", []),
        ("all", []),
        ("/var/run/nvidia-container-devices", []),
        ("0,-1,1", ["0", "1"]),
        ("128", ["128"]),
        ("GPU-", ["GPU-"]),
        ("0000:3b:00.0,nvidia0/gi1", ["0000:3b:00.0", "nvidia0/gi1"]),
        ("/dev/nvidia0", ["/dev/nvidia0"]),
        ("GPU-U1::0,MIG-5f0a::1", ["GPU-U1::0", "MIG-5f0a::1"]),
        ("0-9999", [str(n) for n in range(128)]),
        ("9-0", ["9-0"]),
        ("\udcff\x1b", ["\ufffd\u241b"]),
        ("x" * 500, ["x" * 127 + "…"]),
    ],
)
def test_gpus(value, expected):
    assert parse_gpus(value) == expected


def test_a_list_that_was_cut_ends_with_a_whole_name():
    data = environ(SLURM_JOB_GPUS=",".join(f"GPU-{n:080}" for n in range(60)))
    found = parse_gpus(parse_environment(data)["SLURM_JOB_GPUS"])
    assert found == [f"GPU-{n:080}" for n in range(48)]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("0,-1,1", ["0"]),
        ("1,,0", ["1"]),
        ("NoDevFiles,0", []),
        ("2,none,0", ["2"]),
        ("1,128,0", ["1", "128", "0"]),  # whether there is a 128 is not known here
        ("GPU-8a,GPU-7b", ["GPU-8a", "GPU-7b"]),
        ("", []),
    ],
)
def test_what_cuda_reads(value, expected):
    assert parse_cuda(value) == expected


@pytest.mark.parametrize(
    ("cuda", "nvidia", "source", "gpus"),
    [
        ("GPU-a", "GPU-b", "CUDA_VISIBLE_DEVICES", ["GPU-a"]),
        ("1", "", "CUDA_VISIBLE_DEVICES", ["1"]),
        ("1", "all", "CUDA_VISIBLE_DEVICES", ["1"]),
        ("0", "GPU-b", "NVIDIA_VISIBLE_DEVICES", ["GPU-b"]),  # number 0 of the container is GPU-b
        ("0,GPU-a", "GPU-b", "CUDA_VISIBLE_DEVICES", ["0", "GPU-a"]),
        ("", "2,3", "NVIDIA_VISIBLE_DEVICES", ["2", "3"]),
        ("-1", "2", "NVIDIA_VISIBLE_DEVICES", ["2"]),
        ("", "void", "", []),
        ("", "", "", []),
    ],
)
def test_what_is_visible(cuda, nvidia, source, gpus):
    identity = JobIdentity(gpus=["9"], gpus_source="SLURM_JOB_GPUS")
    fill_visible_gpus(identity, {"CUDA_VISIBLE_DEVICES": cuda, "NVIDIA_VISIBLE_DEVICES": nvidia})
    assert (identity.gpus_source, list(identity.gpus)) == (source, gpus)


def test_fill():
    identity = JobIdentity(scheduler="slurm", id="501")
    assert fill(
        identity,
        parse_environment(
            environ(
                SLURM_JOB_ID="501",
                SLURM_JOB_NAME="resnet",
                SLURM_JOB_ACCOUNT="physics",
                SLURM_JOB_PARTITION="gpu",
                SLURM_ARRAY_JOB_ID="500",
                SLURM_ARRAY_TASK_ID="1",
                SLURM_HET_JOB_ID="500",
                SLURM_HET_JOB_OFFSET="1",
                SLURM_JOB_GPUS="2,3",
                SLURM_STEP_GPUS="2",
                CUDA_VISIBLE_DEVICES="0,1",
            )
        ),
    )
    assert (identity.name, identity.account, identity.partition) == ("resnet", "physics", "gpu")
    assert identity.array == "500_1"
    assert identity.labels["het_job"] == "500+1"
    assert (identity.gpus_source, list(identity.gpus)) == ("SLURM_JOB_GPUS", ["2", "3"])
    assert identity.id == "501"
    assert identity.user == ""


@pytest.mark.parametrize(
    ("values", "source", "gpus"),
    [
        ({"SLURM_STEP_GPUS": "1", "CUDA_VISIBLE_DEVICES": "0"}, "SLURM_STEP_GPUS", ["1"]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-U1"}, "CUDA_VISIBLE_DEVICES", ["GPU-U1"]),
        ({"NVIDIA_VISIBLE_DEVICES": "GPU-U1"}, "NVIDIA_VISIBLE_DEVICES", ["GPU-U1"]),
        ({"SLURM_JOB_GPUS": "", "CUDA_VISIBLE_DEVICES": "NoDevFiles"}, "", []),
        ({"SLURM_JOB_GPUS": "128"}, "SLURM_JOB_GPUS", ["128"]),
        ({}, "", []),
        # a step on another node than the batch script has that one's list beside its own
        ({"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "2"}, "SLURM_STEP_GPUS", ["2"]),
        (
            {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "0", "SLURM_NODEID": "1"},
            "SLURM_STEP_GPUS",
            ["0"],
        ),
        (
            {"SLURM_JOB_GPUS": "0,1", "SLURM_NODEID": "1", "CUDA_VISIBLE_DEVICES": "3"},
            "CUDA_VISIBLE_DEVICES",
            ["3"],
        ),
        (
            {"SLURM_JOB_GPUS": "0,1", "SLURM_STEP_GPUS": "0", "SLURM_NODEID": "0"},
            "SLURM_JOB_GPUS",
            ["0", "1"],
        ),
        # SLURM's own lists count instances
        ({"SLURM_JOB_GPUS": "3", "CUDA_VISIBLE_DEVICES": "MIG-5f0a"}, "CUDA_VISIBLE_DEVICES", ["MIG-5f0a"]),
    ],
)
def test_which_variable_gives_the_gpus(values, source, gpus):
    identity = JobIdentity(scheduler="slurm", id="1")
    assert fill(identity, {"SLURM_JOB_ID": "1", **values})
    assert (identity.gpus_source, list(identity.gpus)) == (source, gpus)


@pytest.mark.parametrize("job", [{"SLURM_JOB_ID": "1"}, {"SLURM_JOB_ID": "1", "SLURM_JOBID": "501"}, {}])
def test_an_environment_of_another_job_gives_nothing(job):
    identity = JobIdentity(scheduler="slurm", id="501")
    before = identity.SerializeToString()
    assert not fill(identity, {**job, "SLURM_JOB_NAME": "theirs", "SLURM_JOB_GPUS": "0"})
    assert identity.SerializeToString() == before


def test_older_name_of_the_job_id():
    identity = JobIdentity(scheduler="slurm", id="501")
    assert fill(identity, {"SLURM_JOBID": "501", "SLURM_JOB_NAME": "a"})
    assert identity.name == "a"


@pytest.mark.parametrize(
    ("variables", "share"),
    [
        ({"SLURM_SHARDS_ON_NODE": "2"}, "shard"),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, "mps"),
        ({"SLURM_SHARDS_ON_NODE": "2", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "50"}, "shard"),
        ({"SLURM_SHARDS_ON_NODE": ""}, None),
        ({"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "half"}, None),
        ({}, None),
    ],
)
def test_shares_of_gpus(variables, share):
    identity = JobIdentity(id="1")
    assert fill(identity, {"SLURM_JOB_ID": "1", "SLURM_JOB_GPUS": "0", **variables})
    assert dict(identity.labels).get(GPU_SHARE) == share
