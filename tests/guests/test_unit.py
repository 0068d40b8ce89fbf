"""The systemd units: ready when they say so, restarted after a fall, no rights but those that are needed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.guests.conftest import Node
from tests.stand_ins.nvml import StandIn, uuid

Make = Callable[..., Node]

ROOT = Path(__file__).parents[2]
UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
AGENT = ROOT / "deploy/systemd/expanse-ebpf.service"
DOCUMENT = (ROOT / "docs/systemd.md").read_text(encoding="utf-8")
INSIDE = "/payload/files/inside"
# include/uapi/linux/capability.h
BITS = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
ALLOWED = (
    "write to its state",
    "make a cgroup",
    "open /dev/null",
    "leave the network namespace",
    "give a file away",
    "open a netlink socket",
    "open an internet socket",
)
REFUSED = {
    "write to /etc": "EROFS",
    "write to /run": "EROFS",
    "write to /usr": "EROFS",
    "write to another's state": "EROFS",
    "write to the disk's root": "EROFS",
    "set a sysctl": "EROFS",
    "see a file in /root": "ENOENT",
    "open a packet socket": "EAFNOSUPPORT",
    "open the GPUs' control device": "ENXIO",  # it may, and there is no driver
}
ROUND = [
    pytest.param("6.12", "amd64", id="6.12"),
    *(
        pytest.param(kernel, arch, id=f"{kernel}-{arch}", marks=pytest.mark.matrix)
        for kernel, arch in (("5.10", "amd64"), ("6.1", "amd64"), ("newest", "amd64"), ("6.1", "arm64"))
    ),
]


def capabilities() -> list[str]:
    (named,) = re.findall(r"^CapabilityBoundingSet=(.*)$", AGENT.read_text(encoding="utf-8"), re.MULTILINE)
    return str(named).split()


def documented_exposure(unit: str) -> list[str]:
    return re.findall(rf"^\| {re.escape(unit)} \| ([\d.]+) \|$", DOCUMENT, re.MULTILINE)


@pytest.mark.parametrize(("kernel", "arch"), ROUND)
def test_a_service_that_is_ready_when_it_says_so_and_stays(
    guest: Make, kernel: str, arch: str, tmp_path: Path
) -> None:
    node = guest(kernel=kernel, arch=arch, init="systemd", limit_s=850)
    gpus = (
        [StandIn(tmp_path / "nvml", devices=2).folder] if arch == "amd64" else []
    )  # it is built for this machine
    result = node.run(["python3", f"{INSIDE}/unit.py"], [*UNITS, *gpus]).check()
    seen: dict[str, Any] = json.loads((result.files / "seen.json").read_text())
    check_start(seen)
    check_sandbox(seen)
    if gpus:
        check_gpus(seen)
    check_what_happens_to_a_service(seen)
    check_nothing_is_missing_in_the_sandbox(seen)
    check_the_controller(seen)


def check_start(seen: dict[str, Any]) -> None:
    assert seen["verify"] == ""  # systemd-analyze knows every line
    assert seen["programs before"] == 0
    assert seen["first report before start returned"]
    assert seen["active"] == "active"
    assert re.match(r"\d+ jobs?, a report every 1 s", seen["status"])
    assert seen["wrong configuration"]["state"] == ["failed", "0", "2"]
    (said,) = seen["wrong configuration"]["said"]
    assert re.match(r"error: /etc/expanse-ebpf/config.toml: agent.interval_s: 'quick'", said)


def check_sandbox(seen: dict[str, Any]) -> None:
    exactly = sum(1 << BITS[name] for name in capabilities())
    own = seen["process"]
    assert [int(own[name], 16) for name in ("CapBnd", "CapEff", "CapPrm")] == [exactly] * 3
    assert (own["NoNewPrivs"], own["Seccomp"]) == ("1", "2")
    assert seen["oom score"] == "500"
    refused = {attempt: error for attempt, error in seen["probe"].items() if error != "ok"}
    assert [attempt for attempt in seen["probe"] if attempt not in refused] == list(ALLOWED)
    assert len(refused) == 25
    refused.pop("open the kernel's log")  # by which of two ways depends on the kernel
    assert refused == {attempt: REFUSED.get(attempt, "EPERM") for attempt in refused}
    assert seen["probe with that device"] == "ok"
    for unit in UNITS:
        assert seen[f"exposure of {unit.name}"] == documented_exposure(unit.name), unit.name


def check_gpus(seen: dict[str, Any]) -> None:
    uuids = sorted(uuid(number) for number in range(2))
    assert seen["gpus"] == {
        "found": [uuids, uuids],
        "states": ["ok"],
        "restarts": 1,
        "another process": True,
        "it has its memory told": True,
        "nice": "5",
    }


def check_what_happens_to_a_service(seen: dict[str, Any]) -> None:
    reload = seen["reload"]
    assert reload.pop("reports") > 2
    assert reload.pop("devices") == [["null"], ["null"]]
    assert all(reload.values()), reload
    kill = seen["kill"]
    assert kill.pop("programs before") > 0
    assert kill == {"restarts": "1", "left of them": 0, "same jobs": True, "works": True}
    assert all(seen["restart"].values()), seen["restart"]
    assert all(seen["stuck"].values()), seen["stuck"]
    assert seen["stop"] == {"result": ["success", "1", "0", "inactive"], "programs": 0, "left": []}


def check_nothing_is_missing_in_the_sandbox(seen: dict[str, Any]) -> None:
    confined, free = seen["sources"]
    assert confined == free
    assert {name for name, (up, _, _) in free.items() if up} >= {"cpu", "cgroup", "host", "network", "gpu"}
    confined, free = seen["fields of a job"]
    assert confined == free
    assert {"counters", "memory_bytes", "network"} <= set(free)
    assert seen["programs measured"] == [True, True]


def check_the_controller(seen: dict[str, Any]) -> None:
    controller = seen["controller"]
    assert controller["active"] == "active"
    assert controller["status"].startswith("listening on 127.0.0.1:9777, store /var/lib/expanse-controller/")
    assert [int(word, 16) for word in controller["rights"]] == [0, 0, 2]
    assert not controller["root"]
    assert "connected to controller 127.0.0.1:9777" in controller["agent's status"]
    assert controller["result"] == ["success", "1", "0"]


@pytest.mark.matrix
@pytest.mark.parametrize("kernel", ["5.10", "6.12"])
def test_each_capability_is_needed_and_its_loss_is_no_other(guest: Make, kernel: str) -> None:
    node = guest(kernel=kernel, init="systemd", limit_s=850)
    result = node.run(["python3", f"{INSIDE}/unit_rights.py"], UNITS).check()
    rights = json.loads((result.files / "rights.json").read_text())
    lost = {without: {what for what, there in seen.items() if not there} for without, seen in rights.items()}
    never = {"delays"} if kernel == "5.10" else set()  # no kernel.task_delayacct
    expected = {
        "": set(),
        "CAP_SYS_ADMIN": {"program statistics", "network"},
        "CAP_NET_ADMIN": {"delays"},
        "CAP_SYS_PTRACE": {"environment", "network"},
        "CAP_DAC_OVERRIDE": {"environment", "clearing up"},
        "CAP_CHOWN": {"run --user"},
        "CAP_SYS_ADMIN CAP_NET_ADMIN": {"program statistics", "network", "delays"},
        "CAP_SYS_ADMIN CAP_NET_ADMIN CAP_BPF": {"program statistics", "network", "delays", "accounting"},
        "CAP_SYS_ADMIN CAP_NET_ADMIN CAP_PERFMON": {"program statistics", "network", "delays", "accounting"},
    }
    assert lost == {without: what | never for without, what in expected.items()}
    assert {name for without in lost for name in without.split()} == set(capabilities())
