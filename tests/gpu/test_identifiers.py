import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.gpu.identifiers import Devices, Found
from expanse_ebpf.jobs.slurm import parse_cuda, parse_gpus
from expanse_ebpf.wire.collector_pb2 import GpuSample, JobIdentity

UUIDS = [f"GPU-{c * 8}-0000-0000-0000-00000000000{n}" for n, c in enumerate("abcd")]
MINORS = [2, 3, 0, 1]  # of NVML's indexes 0 to 3
MIG = "MIG-5f0a0000-1111-2222-3333-44444444444{}"


def gpus() -> list[GpuSample]:
    return [
        GpuSample(uuid=uuid, index=index, minor=MINORS[index], pci_bus_id=f"00000000:{0x1A + index:02X}:00.0")
        for index, uuid in enumerate(UUIDS)
    ]


def with_mig() -> list[GpuSample]:
    """GPU 0 with three instances: GPU instances 3 and 5, of which the latter has two compute instances."""
    devices = gpus()
    devices[0].mig_enabled = True
    return devices + [
        GpuSample(uuid=MIG.format(n), parent_uuid=UUIDS[0], gpu_instance=gi, compute_instance=ci, minor=2)
        for n, (gi, ci) in enumerate([(3, 0), (5, 0), (5, 1)])
    ]


NODE = Devices(gpus())
MIG_NODE = Devices(with_mig())
A, B, C, D = UUIDS


# ---- SLURM and the device list count by minor number, NVML otherwise ------------------------------------


@pytest.mark.parametrize(
    ("value", "by_minor", "by_index", "unknown"),
    [
        ("0,2", (C, A), (A, C), ()),
        ("0-1", (C, D), (A, B), ()),
        (f"{B},{D}", (B, D), (B, D), ()),
        (f"{B.upper()}, {D} ", (B, D), (B, D), ()),
        ("", (), (), ()),
        ("-1", (), (), ()),
        ("NoDevFiles", (), (), ()),
        ("none", (), (), ()),
        ("void", (), (), ()),
        ("all", (), (), ()),
        ("/var/run/nvidia-container-devices", (), (), ()),
        ("128", (), (), ("128",)),
        ("1,128", (D,), (B,), ("128",)),
        ("0,0,0", (C,), (A,), ()),
        ("MIG-00000000-1111-2222-3333-444444444444", (), (), ("MIG-00000000-1111-2222-3333-444444444444",)),
        (f"MIG-{A}/3/0", (), (), (f"MIG-{A}/3/0",)),
        ("GPU-bbb", (B,), (B,), ()),
        ("GPU-", (), (), ("GPU-",)),
        (B[4:], (B,), (B,), ()),
        ("0000:1b:00.0", (B,), (B,), ()),
        ("00000000:1B:00.0", (B,), (B,), ()),
        ("1b:00.0", (B,), (B,), ()),
        ("0001:1b:00.0", (), (), ("0001:1b:00.0",)),
        ("nvidia0", (C,), (C,), ()),
        ("/dev/nvidia3", (B,), (B,), ()),
        ("nvidia9", (), (), ("nvidia9",)),
        ("nvidia.com/gpu=1", (D,), (B,), ()),
        ("3-1", (), (), ("3-1",)),
        ("99999999999999999999", (), (), ("99999999999999999999",)),
    ],
)
def test_a_list_of_names(value, by_minor, by_index, unknown):
    assert NODE.named(parse_gpus(value), "SLURM_JOB_GPUS")[:2] == (by_minor, unknown)
    assert NODE.named(parse_gpus(value), "NVIDIA_VISIBLE_DEVICES")[:2] == (by_index, unknown)


def test_the_device_list_of_a_cgroup():
    assert NODE.by_minor[0] == C
    assert NODE.opened([0]) == {C}
    assert NODE.opened([0, 255, 77]) == {C}


def test_an_abbreviated_uuid_that_fits_two_names_none():
    devices = Devices([GpuSample(uuid="GPU-aa1"), GpuSample(uuid="GPU-aa2")])
    assert devices.find("GPU-aa") is None
    assert devices.find("GPU-aa2") == Found(("GPU-aa2",))


class Text(str):
    """A string that counts how often it is compared."""

    compared = 0

    def startswith(self, *arguments):
        Text.compared += 1
        return super().startswith(*arguments)

    def __lt__(self, other):
        Text.compared += 1
        return super().__lt__(other)


class Unsearched(dict):
    """A dictionary that may be asked, but not gone through."""

    def __iter__(self):
        raise AssertionError


def test_a_name_that_nobody_has_is_not_compared_with_every_device():
    devices = Devices([GpuSample(uuid=f"GPU-{number:06x}-0000") for number in range(0, 4096, 2)])
    devices._sorted = [(Text(lower), uuid) for lower, uuid in devices._sorted]
    devices._devices = Unsearched(devices._devices)
    Text.compared = 0
    assert devices.find("gpu-000801") is None
    assert devices.find("gpu-000802") == Found(("GPU-000802-0000",))
    assert devices.find("gpu-0008") is None
    assert devices.find("gpu-0") is None
    assert devices.find("gpu-ffffff") is None
    assert Text.compared < 5 * 20


@given(
    st.lists(st.text("aAb-", max_size=4).map(lambda end: f"GPU-{end}"), max_size=9),
    st.text("ab-", min_size=1, max_size=3),
)
def test_the_beginning_of_exactly_one_uuid_names_it(uuids, beginning):
    found = Devices([GpuSample(uuid=uuid) for uuid in uuids]).find(f"gpu-{beginning}")
    fits = {uuid for uuid in uuids if uuid.lower().startswith(f"gpu-{beginning}")}
    if len(fits) == 1:
        assert found == Found(tuple(fits))
    elif f"gpu-{beginning}" not in {uuid.lower() for uuid in uuids}:
        assert found is None


def test_devices_are_the_same_until_one_of_their_names_is_another():
    samples = with_mig()
    devices = Devices(samples)
    later = with_mig()
    later[1].memory_used_bytes = 1 << 30
    later[1].holders.add(id="slurm/1")
    assert devices.same(later)
    assert not devices.same(later[:-1])
    assert not devices.same(reversed(later))  # their order is that of the report
    for change in (
        {"uuid": "GPU-new"},
        {"minor": 9},
        {"index": 9},
        {"pci_bus_id": "0000:ff:00.0"},
        {"parent_uuid": A},
        {"gpu_instance": 9},
        {"compute_instance": 9},
    ):
        changed = with_mig()
        changed[2].MergeFrom(GpuSample(**change))
        assert not devices.same(changed), change
    without = with_mig()
    without[2].ClearField("minor")  # it is 0
    assert not devices.same(without)


def test_an_uuid_that_begins_like_another_is_itself():
    devices = Devices([GpuSample(uuid="GPU-aa"), GpuSample(uuid="GPU-aab")])
    assert devices.find("GPU-aa") == Found(("GPU-aa",))


def test_two_gpus_with_one_number_have_none():
    devices = Devices([GpuSample(uuid="GPU-1", minor=0, index=0), GpuSample(uuid="GPU-2", minor=0, index=1)])
    assert devices.find("0", "minor") is None
    assert devices.find("1", "index") == Found(("GPU-2",))


def test_a_gpu_without_numbers_is_not_number_0():
    devices = Devices([GpuSample(uuid="GPU-1")])
    assert devices.find("0", "minor") is None
    assert devices.find("0", "index") is None


# ---- shares ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "found"),
    [
        (f"{A}::0", Found((A,), "0")),
        (f"{MIG.format(0)}::12", Found((MIG.format(0),), "12")),
        ("GPU-nobody::0", None),
        ("nvidia2/vgpu1", Found((A,), "vgpu1")),
        ("nvidia2/gi3", Found((MIG.format(0),))),
        ("nvidia2/gi3/vgpu0", Found((MIG.format(0),), "vgpu0")),
        ("nvidia2/gi5", Found((MIG.format(1), MIG.format(2)))),
        ("nvidia2/gi4", None),
        ("nvidia7/gi3", None),
        (MIG.format(2), Found((MIG.format(2),))),
        ("MIG-5f0a", None),  # three begin like that
        (f"MIG-{A}/5/1", Found((MIG.format(2),))),
        (f"MIG-{A[4:]}/5/1", Found((MIG.format(2),))),
        (f"MIG-{A}/5/2", None),
        ("MIG-GPU-aaaa/3/0", Found((MIG.format(0),))),
        ("MIG-GPU-nobody/3/0", None),
    ],
)
def test_instances_and_shares(name, found):
    assert MIG_NODE.find(name) == found


def test_shares_in_a_list():
    named = NODE.named([f"{A}::1", f"{A}::0", B], "NVIDIA_VISIBLE_DEVICES")
    assert named.uuids == (A, B)
    assert named.replicas == ((A, "1"), (A, "0"))


def test_an_old_drivers_name_of_an_instance():
    name = f"MIG-{A}/1/0"
    devices = Devices([GpuSample(uuid=A, minor=0), GpuSample(uuid=name, parent_uuid=A)])
    assert devices.find(name) == Found((name,))


# ---- which variable ----


@pytest.mark.parametrize(
    ("value", "uuids", "unknown"),
    [
        ("0,-1,1", (A,), ()),
        ("1,128,0", (B,), ("128",)),
        ("NoDevFiles,0", (), ()),
        (",0", (), ()),
        (f"{C},GPU-nobody,{A}", (C,), ("GPU-nobody",)),
    ],
)
def test_cuda_reads_up_to_the_first_that_is_none(value, uuids, unknown):
    assert NODE.named(parse_cuda(value), "CUDA_VISIBLE_DEVICES")[:2] == (uuids, unknown)


def test_other_lists_are_read_to_their_end():
    assert NODE.named(["1", "128", "0"], "NVIDIA_VISIBLE_DEVICES")[:2] == ((B, A), ("128",))
    assert NODE.named(["1", "128", "0"], "SLURM_JOB_GPUS")[:2] == ((D, C), ("128",))


def test_numbers_that_may_count_from_0_anew_are_marked():
    named = NODE.named(["0", B, "2", C], "CUDA_VISIBLE_DEVICES")
    assert named.by_index == {A}  # C is named by its UUID too
    assert named.variable == "CUDA_VISIBLE_DEVICES"
    assert NODE.named(["0"], "SLURM_JOB_GPUS").by_index == frozenset()


def test_slurms_list_by_the_other_order():
    assert NODE.named(["0", "2"], "SLURM_STEP_GPUS").otherwise == ()  # the same two
    assert NODE.named(["0"], "SLURM_STEP_GPUS").otherwise == (A,)
    assert NODE.named(["3", "9"], "SLURM_STEP_GPUS").otherwise == ()


def test_slurms_numbers_say_nothing_where_it_counts_instances():
    named = MIG_NODE.named(["0", B], "SLURM_JOB_GPUS")
    assert (named.uuids, named.unknown, named.unclear) == ((B,), (), ("0",))


def test_the_identity_tells_which_list_it_is():
    slurm, other = NODE.of(JobIdentity(gpus=["0"], gpus_source="SLURM_JOB_GPUS"))
    assert (slurm.uuids, other.uuids) == ((C,), ())
    slurm, other = NODE.of(JobIdentity(gpus=["0"], gpus_source="CUDA_VISIBLE_DEVICES"))
    assert (slurm.uuids, other.uuids) == ((), (A,))


# ---- device files ----

CAPS = {30: (2, 3, None), 31: (2, 3, 0), 50: (2, 5, None), 51: (2, 5, 0), 52: (2, 5, 1), 90: (0, 3, None)}


@pytest.mark.parametrize(
    ("caps", "found"),
    [
        ([], {A}),
        ([30, 31], {MIG.format(0)}),
        ([30], {MIG.format(0)}),
        ([50], {A}),  # one of two compute instances, not known which
        ([50, 52], {MIG.format(2)}),
        ([30, 31, 50, 51], {MIG.format(0), MIG.format(1)}),
        ([1, 2, 999], {A}),
        ([90], {A}),  # another GPU's
    ],
)
def test_capabilities_tell_the_instance(caps, found):
    assert MIG_NODE.opened([2], caps, CAPS) == found


def test_capabilities_without_the_gpu_are_nothing():
    assert MIG_NODE.opened([], [30, 31], CAPS) == frozenset()


def test_family():
    assert MIG_NODE.parent(MIG.format(0)) == A
    assert MIG_NODE.parent(A) == MIG_NODE.parent("nobody") == ""
    assert MIG_NODE.related(A, MIG.format(0))
    assert MIG_NODE.related(MIG.format(0), A)
    assert not MIG_NODE.related(MIG.format(0), MIG.format(1))
    assert not MIG_NODE.related(A, B)


texts = st.text(max_size=40) | st.sampled_from(
    ["0", "::", "nvidia0/gi", "MIG-", "GPU-", ":", "/", ",", "-", "="]
)


@given(st.lists(texts, max_size=6).map("".join), st.sampled_from(["minor", "index"]))
def test_hostile_names_never_raise(value, numbering):
    for node in (NODE, MIG_NODE, Devices([])):
        node.find(value, numbering)
        for variable in ("SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"):
            for names in ([value], parse_gpus(value), parse_cuda(value)):
                assert set(node.named(names, variable).uuids) <= set(node)


@given(
    st.lists(st.builds(GpuSample, uuid=texts, parent_uuid=texts, pci_bus_id=texts, minor=st.integers(0, 3)))
)
def test_absurd_devices_never_raise(samples):
    devices = Devices(samples)
    assert set(devices) == {s.uuid for s in samples} - {""}
    assert devices.same(samples)
    devices.named(["0", "1", "2", "3", "GPU-a"], "SLURM_JOB_GPUS")
    devices.opened(range(4), range(99), CAPS)
