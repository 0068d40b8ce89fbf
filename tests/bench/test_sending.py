"""What of a bench's results may leave the machine: figures and kinds, and no name whatever."""

from __future__ import annotations

import getpass
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expanse_ebpf.bench import machine, sending, sending_form
from expanse_ebpf.bench.plan import Arm, Plan, Workload
from expanse_ebpf.bench.results import (
    End,
    Machine,
    Record,
    Results,
    Role,
    Run,
    Samples,
    Session,
    State,
    Usage,
    Windows,
)
from expanse_ebpf.errors import ConfigError

BEGIN_NS = 1_700_000_000_000_000_000
XEON = "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz"


def run(workload: str, arm: str, role: Role, *, failed: str = "", after_s: float = 1.0) -> Run:
    return Run(
        *(workload, arm, role, 1, 1, 0, BEGIN_NS + int(after_s * 1e9), None if failed else 10.5, 12.25),
        State(0.5, None, 60.5, None, 0.0, 0.1),
        *(9.0, 1 << 30, role != "off"),
        collector=Usage(0.1, 40 << 20, None, 4096),
        samples=Samples(1.0, 12, 12, 1.001, 0.5, 40),
        windows=Windows(1, 3.5, 16),
        missing={"bpf_s_per_s": failed},
        failed=failed,
    )


def records(text: str = "", *, workload: str = "train", arm: str = "near", cpu: str = XEON) -> list[Record]:
    """A bench whose every string that is free is `text`."""
    return [
        Machine(
            *(BEGIN_NS, text, text or "6.18.5+deb13-amd64", text or "x86_64", cpu, 2, (8 << 30) - 4096),
            *(text or "kvm", False, text or "performance", None, True, (text or "NVIDIA H100 80GB HBM3",)),
            *(text or "580.65.06", text or "3.11.2", text or "0.1.0"),
            tools={text or "/opt/bin/py-spy": text or "py-spy 0.4.1", "py-spy": text or "py-spy 0.4.1"},
        ),
        Session(BEGIN_NS, 424_242, 40, False),
        run(workload, arm, "off"),
        run(workload, arm, "arm", failed=text),
        End(workload, arm, "agreed", text),
    ]


def results(made: list[Record]) -> Results:
    kept = Results(Path("/folder"))
    kept.records = made
    return kept


def sent(made: list[Record], plan: Plan | None = None) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(sending.document(results(made), plan))
    return value


PLAN = Plan(
    "secret-plan",
    (Workload("train", "resnet50", steps=5, images="/data/people"), Workload("eval", "resnet50")),
    (
        Arm("near", "collection", cpu_counters=False, settings={"agent": {"node_name": "secret-node"}}),
        Arm("far", "command", command=("/opt/bin/py-spy", "--secret")),
        Arm("own", "command", command=("/srv/secret-profiler",)),
    ),
    seed=31_337,
    controller="secret-host:9777",
)


def test_names_become_kinds_that_are_numbered_where_there_are_several() -> None:
    made = [*records(), run("eval", "far", "arm"), run("gone", "own", "arm"), run("switches", "both", "arm")]
    document = sent(made, PLAN)
    assert [(each["workload"], each["arm"]) for each in document["runs"]] == [
        ("resnet50-1", "collection"),
        ("resnet50-1", "collection"),
        ("resnet50-2", "py-spy"),
        ("other", "command"),
        ("switches", "both"),
    ]
    assert document["arms"][0] == {"arm": "collection", "cpu_counters": False, "other_settings": True}
    assert document["workloads"][0]["own_images"] is True
    assert document["plan"]["controller_elsewhere"] is True


def test_without_the_plan_only_names_that_are_kinds_say_what_was_run() -> None:
    document = sent([*records(), run("switches", "py-spy", "arm")])
    assert [(each["workload"], each["arm"]) for each in document["runs"]][1:] == [
        ("other", "other"),
        ("switches", "py-spy"),
    ]


def test_the_figures_stay_and_times_count_from_the_begin() -> None:
    document = sent([*records(), run("train", "near", "arm", after_s=3600.25)], PLAN)
    first, last = document["runs"][0], document["runs"][-1]
    assert (first["begin_s"], last["begin_s"]) == (1.0, 3600.2)
    assert (last["seconds"], last["wall_s"], last["pair"], last["role"]) == (10.5, 12.25, 1, "arm")
    assert last["collector"] == {"cpu_s": 0.1, "pss_peak_bytes": 40 << 20, "sent_bytes": 4096}
    assert last["samples"]["longest_gap_s"] == 1.001
    assert last["state"] == {"load_1m": 0.5, "temperature_c": 60.5, "steal_share": 0.0, "other_cores": 0.1}
    assert document["sessions"] == [{"begin_s": 0.0, "max_pairs": 40, "resumed": False}]
    assert document["ends"] == [{"workload": "resnet50-1", "arm": "collection", "reason": "agreed"}]


def test_the_machine_is_described_by_models_and_numbers_of_versions() -> None:
    assert sent(records())["machine"] == {
        "kernel": "6.18.5",
        "architecture": "x86_64",
        "cpu": XEON,
        "cpus": 2,
        "memory_gib": 8,
        "virtualised": "kvm",
        "pmu": False,
        "governor": "performance",
        "smt": True,
        "gpus": ["NVIDIA H100 80GB HBM3"],
        "driver": "580.65.06",
        "python": "3.11.2",
        "expanse": "0.1.0",
        "tools": {"py-spy": "0.4.1"},
    }


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        *((name, name) for name in ("AMD EPYC 9B14 96-Core Processor", "Neoverse-N1", "NVIDIA L40S")),
        *((name, name) for name in ("NVIDIA A100-SXM4-80GB", "12th Gen Intel(R) Core(TM) i7-12700K")),
        *((name, name) for name in ("QEMU Virtual CPU version 2.5+", "Tesla V100-SXM2-16GB")),
        ("Intel Xeon Processor (Skylake, IBRS)", "Intel Xeon Processor (Skylake IBRS)"),
        ("Intel(R) Xeon(R) of bob@host.example.org CPU", "Intel(R) Xeon(R) CPU"),
        ("AMD /home/bob EPYC 10.1.2.3 fe80::1 9B14", "AMD EPYC 9B14"),
        ("gpu-node-17", "other"),
        ("H100", "other"),
        ("", "other"),
    ],
)
def test_of_a_model_the_words_stay_that_belong_to_one(name: str, kept: str) -> None:
    assert sent(records(cpu=name))["machine"]["cpu"] == kept


def test_a_model_s_name_is_bounded() -> None:
    assert len(sent(records(cpu="Intel Xeon " * 50))["machine"]["cpu"]) <= 64


@pytest.mark.parametrize(
    ("text", "category"),
    [
        ("it took longer than limit_s, 60 s", "limit"),
        ("exit code 1: /home/bob/train.py failed", "exit"),
        ("ended by SIGKILL: bob", "signal"),
        ("py-spy ended before the job: exit code 1", "arm"),
        ("py-spy failed: it ended by SIGSEGV", "arm"),
        ("nothing was traced: bob's job had no GPU", "arm"),
        ("bob's disk is full", "other"),
    ],
)
def test_of_a_failure_the_category_is_sent(text: str, category: str) -> None:
    failed = sent([*records(), run("train", "near", "arm", failed=text)])["runs"][-1]
    assert failed["failed"] == category
    assert "seconds" not in failed


def test_without_a_run_there_is_nothing_to_send() -> None:
    with pytest.raises(ConfigError, match="no run yet"):
        sending.document(results(records()[:2]), None)


# ---- no name whatever

WORD = st.from_regex(r"[a-z]{3,8}", fullmatch=True)
HOST = st.builds("{}-{}.{}.example".format, WORD, st.integers(0, 999), WORD)
HOSTILE = st.one_of(
    HOST,
    st.builds("/home/{}/{}.py".format, WORD, WORD),
    st.builds("{}@{}".format, WORD, HOST),
    st.ip_addresses().map(str),
    st.from_regex(r"[0-9a-f]{2}(:[0-9a-f]{2}){5}", fullmatch=True),
    st.uuids().map(str),
    st.uuids().map(lambda value: value.hex),
    st.text(min_size=3, max_size=40),
)
NAME = st.from_regex(r"[a-z]{3}[A-Za-z0-9._-]{0,61}", fullmatch=True)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(HOSTILE, NAME, NAME, st.booleans(), st.booleans())
def test_no_string_of_the_records_is_in_what_is_sent(
    text: str, workload: str, arm: str, planned: bool, beside_a_model: bool
) -> None:
    plan = Plan(
        text,
        (Workload(workload, "command", command=(text,), time_pattern=text, images=text, python=text),),
        (Arm(arm, "command", command=(f"{text}/{text}", text), rules=text),),
        controller=text,
    )
    cpu = f"Intel(R) Xeon(R) {text} CPU" if beside_a_model else text
    made = records(text, workload=workload, arm=arm, cpu=cpu)
    body = sending.document(results(made), plan if planned else None).decode()
    # What is there without any of them, such as the name of a field, is no leak.
    plain = sending.document(results(records(workload="x", arm="x")), None).decode()
    plain += " ".join((*sending_form.WORKLOADS, *sending_form.ARMS, "exit limit signal"))
    for hostile in (text, workload, arm):
        # Nor are white space and lone marks, which stand between words and figures, and figures themselves.
        if hostile in plain or not re.search("[A-Za-z]{3}|[.:/@].*[.:/@].*[.:/@]", hostile):
            continue
        assert hostile not in body
        assert json.dumps(hostile)[1:-1] not in body
    assert sending.checked(body.encode()) == body.encode()


def told(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def own_names() -> set[str]:
    """All by which this machine, its user and this test could be known."""
    interfaces = told("ip", "-o", "address") + told("ip", "-o", "link") if Path("/sbin/ip").exists() else ""
    found = {
        *(socket.gethostname(), socket.getfqdn(), os.uname().nodename, os.uname().release),
        *(getpass.getuser(), str(Path.home()), str(Path.cwd()), sys.prefix, sys.executable),
        *(
            Path(p).read_text().strip()
            for p in ("/proc/sys/kernel/random/boot_id", "/proc/sys/kernel/hostname")
        ),
        *(p.read_text().strip() for p in Path("/sys/class/net").glob("*/address")),
        *re.findall(r"inet6? ([0-9a-f.:]+)", interfaces),
        *re.findall(r"link/\w+ ([0-9a-f:]{17})", interfaces),
        *(p.name for p in Path("/sys/class/net").iterdir()),
        *re.findall(r"[0-9a-f:]{32}", Path("/proc/net/if_inet6").read_text() if socket.has_ipv6 else ""),
        *re.findall(r"\d+\.\d+\.\d+\.\d+", Path("/proc/net/fib_trie").read_text()),
    }
    for path in (Path("/etc/machine-id"), Path("/sys/class/dmi/id/product_uuid")):
        if path.exists():
            found.add(path.read_text().strip())
    return {each for each in found if len(each) >= 3}


def test_nothing_by_which_this_machine_is_known_is_sent_of_it() -> None:
    names = own_names()
    described = machine.describe({sys.executable: sys.version})
    assert described.host in (socket.gethostname(), os.uname().nodename)
    place = " ".join(sorted(names))
    made = [
        described,
        *records(place, workload=socket.gethostname(), arm=getpass.getuser())[1:],
        *(run(name[:64], name[:64], "arm", failed=name) for name in sorted(names)),
    ]
    body = sending.document(results(made), replace(PLAN, name=place, controller=place)).decode()
    assert f'"cpus": {described.cpus}' in body
    assert [name for name in sorted(names) if name in body] == []


# ---- documents from a file


def test_what_was_kept_is_the_same_when_it_is_built_anew() -> None:
    body = sending.document(results(records("exit code 1")), PLAN)
    assert sending.checked(body) == body
    assert sending.checked(json.dumps(json.loads(body)).encode()) == body


@pytest.mark.parametrize(
    ("where", "value", "words"),
    [
        (("host",), "secret", "'host' is not known"),
        (("machine", "host"), "secret", "'machine.host' is not known"),
        (("machine", "cpu"), "secret", "machine.cpu has a value that is never sent"),
        (("machine", "cpu"), "Intel secret", "machine.cpu has a value"),
        (("machine", "tools", "secret"), "1.0", "'machine.tools.secret' is not known"),
        (("machine", "kernel"), "6.1.0-secret", "machine.kernel has a value"),
        (("machine", "cpus"), True, "machine.cpus has a value"),
        (("machine", "cpus"), "2", "machine.cpus has a value"),
        (("machine", "pmu"), None, "machine.pmu has a value"),
        (("machine", "gpus"), "secret", "machine.gpus has a value"),
        (("runs", 0), "secret", "runs has a value"),
        (("runs", 0, "workload"), "secret", "runs.workload has a value"),
        (("runs", 0, "workload"), "resnet50-1\n", "runs.workload has a value"),
        (("runs", 0, "seconds"), float("inf"), "runs.seconds has a value"),
        (("runs", 0, "missing"), {"seconds": "secret"}, "'runs.missing' is not known"),
        (("form",), 2, "its form is another than 1"),
        (("form",), True, "form has a value"),
    ],
)
def test_a_file_with_anything_else_is_refused(where: tuple[Any, ...], value: object, words: str) -> None:
    document = sent(records(), PLAN)
    place: Any = document
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = value
    with pytest.raises(ValueError, match=words) as caught:
        sending.checked(json.dumps(document).encode())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[]", b"{}", b"1" * 5000, b"[" * 100_000])
def test_what_is_no_document_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"it is not JSON|it has no number of its form"):
        sending.checked(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_document_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"^it "):
        sending.checked(data)
