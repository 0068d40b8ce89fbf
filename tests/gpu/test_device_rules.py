"""From device numbers to GPUs and MIG instances."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.gpu.device_rules import Capabilities, DeviceNumbers, DevicesList, Rule, parse_devices_list
from expanse_ebpf.gpu.open_files import parse_majors, parse_mig_minors
from expanse_ebpf.wire.collector_pb2 import GpuSample

# ---- devices.list


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("a *:* rwm\n", [Rule("a", None, None, "rwm")]),
        ("c 195:0 rwm\nc 195:* r\nb 8:0 rw\n", [
            Rule("c", 195, 0, "rwm"), Rule("c", 195, None, "r"), Rule("b", 8, 0, "rw"),
        ]),
        ("c *:* m", [Rule("c", None, None, "m")]),
        ("", []),
        ("c 195 rwm\nc 195:x rw\nd 1:1 rw\nc 1:1\nc 1:1 rw extra", []),
        ("c -1:0 rw\nc ²:0 rw\nc 99999999999:1 r", []),
        ("\0\xff\nc 1:3 rwm\r\n", [Rule("c", 1, 3, "rwm\r")]),
    ],
)  # fmt: skip
def test_a_list_of_devices_is_read(text: str, rules: list[Rule]) -> None:
    assert parse_devices_list(text) == rules


def test_a_list_without_end_is_cut() -> None:
    assert len(parse_devices_list("c 1:3 rwm\n" * 100_000)) == 4096


@given(st.text(max_size=200))
def test_no_list_raises(text: str) -> None:
    DevicesList(parse_devices_list(text)).allows(195, 0)


@pytest.mark.parametrize(
    ("text", "allowed"),
    [
        ("c 195:0 rwm", True),
        ("c 195:0 rw", True),
        ("c 195:* rw", True),
        ("c *:0 rw", True),
        ("a *:* rwm", True),
        ("c 195:0 r", False),
        ("c 195:0 r\nc 195:* w", False),  # one rule has to grant it all
        ("c 195:1 rwm", False),
        ("b 195:0 rwm", False),
        ("", False),
    ],
)
def test_a_device_is_allowed_by_one_rule_for_reading_and_writing(text: str, allowed: bool) -> None:
    assert DevicesList(parse_devices_list(text)).allows(195, 0) is allowed


# ---- GPUs


def gpu(uuid: str, minor: int | None) -> GpuSample:
    return GpuSample(uuid=uuid, minor=minor)


def instance(uuid: str, parent: str, minor: int, gi: int, ci: int) -> GpuSample:
    return GpuSample(uuid=uuid, parent_uuid=parent, minor=minor, gpu_instance=gi, compute_instance=ci)


PROC_DEVICES = "Character devices:\n  1 mem\n195 nvidia\n236 nvidia-caps\n\nBlock devices:\n  7 nvidia-caps\n"
MIG_MINORS = """config 1
monitor 2
gpu0/gi1/access 12
gpu0/gi1/ci0/access 13
gpu0/gi2/access 21
gpu0/gi2/ci0/access 22
gpu0/gi2/ci1/access 23
gpu1/gi1/access 147
gpu1/gi1/ci0/access 148
"""
CAPABILITIES = Capabilities.of(parse_majors(PROC_DEVICES), parse_mig_minors(MIG_MINORS))

# NV-01: NVML's indexes 0..3 are the minors 2, 3, 0, 1.
PLAIN = [gpu("U0", 2), gpu("U1", 3), gpu("U2", 0), gpu("U3", 1)]
# GPU A is in three instances, B in one, C in none.
MIXED = [
    gpu("A", 0),
    instance("A1", "A", 0, 1, 0),
    instance("A2", "A", 0, 2, 0),
    instance("A3", "A", 0, 2, 1),
    gpu("B", 1),
    instance("B1", "B", 1, 1, 0),
    gpu("C", 2),
]
COMMON = "c 195:255 rw\nc 195:254 rw\nc 1:3 rwm\n"


def allowed(
    samples: list[GpuSample], text: str, capabilities: Capabilities = CAPABILITIES
) -> set[str] | None:
    devices = DeviceNumbers(samples, capabilities)
    said = devices.allowed(DevicesList(parse_devices_list(COMMON + text)))
    return None if said is None else set(devices.with_whole(said))


def lines(*minors: int, major: int = 236) -> str:
    return "".join(f"c {major}:{minor} rw\n" for minor in minors)


def nodes(*minors: int) -> str:
    return lines(*minors, major=195)


def test_the_minor_number_and_not_nvmls_index_tells_a_gpu() -> None:  # NV-01
    assert allowed(PLAIN, nodes(0)) == {"U2"}
    assert allowed(PLAIN, nodes(2, 3)) == {"U0", "U1"}
    assert allowed(PLAIN, "") == set()


def test_every_gpu_one_by_one_is_an_answer_and_a_wildcard_is_none() -> None:
    assert allowed(PLAIN, nodes(0, 1, 2, 3)) == {"U0", "U1", "U2", "U3"}
    assert allowed(PLAIN, "c 195:* rw") is None
    assert allowed(PLAIN, "c *:* rwm") is None
    assert allowed(PLAIN, "a *:* rwm") is None


class Denials:
    """As SLURM has it in v2: everything that others were not given."""

    def __init__(self, *denied: tuple[int, int]) -> None:
        self.denied = denied

    def allows(self, major: int, minor: int) -> bool:
        return (major, minor) not in self.denied


def test_where_some_are_denied_the_others_are_an_answer() -> None:
    plain = DeviceNumbers(PLAIN, CAPABILITIES)
    assert plain.allowed(Denials((195, 1), (195, 2))) == {"U1", "U2"}
    assert plain.allowed(Denials(*((195, m) for m in range(4)))) == set()
    assert plain.allowed(Denials((1, 3))) is None


def test_a_gpu_without_a_known_minor_is_in_no_answer() -> None:
    assert allowed([*PLAIN, gpu("lost", None)], nodes(0)) == {"U2"}
    assert allowed([*PLAIN, gpu("lost", None)], nodes(0, 1, 2, 3)) == {"U0", "U1", "U2", "U3"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (nodes(0) + lines(12, 13), {"A1"}),
        (nodes(0) + lines(21, 22), {"A2"}),
        (nodes(0) + lines(21, 22, 23), {"A2", "A3"}),
        (nodes(0) + lines(12, 13, 21, 22, 23), {"A", "A1", "A2", "A3"}),
        (nodes(0) + lines(12), set()),  # without the compute instance
        (nodes(0) + lines(13), set()),  # without the GPU instance
        (lines(12, 13), set()),  # without the GPU
        (nodes(0), set()),
        (nodes(1) + lines(147, 148), {"B", "B1"}),
        (nodes(2), {"C"}),
        (nodes(2) + lines(12, 13), {"C"}),
        (nodes(0, 2) + lines(12, 13), {"A1", "C"}),
    ],
)
def test_an_instance_takes_its_gpu_and_both_capabilities(text: str, expected: set[str]) -> None:
    assert allowed(MIXED, text) == expected


def test_capabilities_that_tell_nothing_apart_are_no_answer() -> None:
    with pytest.raises(UnavailableError, match="not for MIG instances"):
        allowed(MIXED, nodes(0) + "c 236:* rw")
    assert allowed(MIXED, nodes(1) + "c 236:* rw") == {"B", "B1"}  # there is but one
    assert allowed(MIXED, nodes(2) + "c 236:* rw") == {"C"}
    with pytest.raises(UnavailableError, match="not for GPUs"):
        allowed(MIXED, "c 195:* rw\n" + lines(12, 13))
    assert allowed(MIXED, "c 195:* rw\nc 236:* rw") is None
    divided = [sample for sample in MIXED if sample.uuid != "C"]
    assert allowed(divided, "c 195:* rw\n" + lines(12, 13)) == {"A1"}


def test_denied_instances_leave_those_of_the_job() -> None:
    others = [(236, minor) for minor in (21, 22, 23, 147, 148)]
    devices = DeviceNumbers(MIXED, CAPABILITIES)
    assert devices.allowed(Denials(*others, (195, 1), (195, 2))) == {"A1"}
    # All of A's instances are the job's, and B's are not
    assert devices.allowed(Denials((236, 147), (236, 148), (195, 1), (195, 2))) == {"A1", "A2", "A3"}


@pytest.mark.parametrize(
    "capabilities",
    [
        Capabilities(),
        Capabilities.of({}, parse_mig_minors(MIG_MINORS)),
        Capabilities.of(parse_majors(PROC_DEVICES), {}),
        Capabilities.of(parse_majors(PROC_DEVICES), parse_mig_minors("gpu0/gi1/access 12\n")),
        Capabilities.of(parse_majors("Block devices:\n236 nvidia-caps\n"), parse_mig_minors(MIG_MINORS)),
    ],
)
def test_without_the_numbers_of_capabilities_nothing_is_guessed(capabilities: Capabilities) -> None:
    with pytest.raises(UnavailableError, match="device numbers of MIG instances are not known"):
        allowed(MIXED, nodes(0) + lines(12, 13), capabilities)
    assert allowed(MIXED, nodes(2), capabilities) == {"C"}
    assert allowed(PLAIN, nodes(0), capabilities) == {"U2"}


def test_a_gpu_is_not_whole_while_an_instance_is_not_known() -> None:
    unknown = GpuSample(uuid="A4", parent_uuid="A", gpu_instance=9, compute_instance=0)
    text = nodes(0) + lines(12, 13, 21, 22, 23)
    assert allowed([*MIXED, unknown], text) == {"A1", "A2", "A3"}
