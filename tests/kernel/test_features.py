"""What a node can do: the decisions by tables, the reading on this machine."""

from __future__ import annotations

import errno
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expanse_ebpf.config import COUNTERS, Config
from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.kernel import features, libbpf, probe, trials, uprobes
from expanse_ebpf.kernel.features import Finding
from expanse_ebpf.python_stacks import layouts
from expanse_ebpf.tracing import symbols

ALL = (1 << 41) - 1
BPF, PERFMON, ADMIN = 1 << 39, 1 << 38, 1 << 21


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("6.1.0-18-amd64", (6, 1)),
        ("5.10.0", (5, 10)),
        ("6.18.44-fc-v657", (6, 18)),
        ("", (0, 0)),
        ("x.y", (0, 0)),
    ],
)
def test_a_kernel_release_is_parsed(release: str, expected: tuple[int, int]) -> None:
    assert features.parse_release(release) == expected


@pytest.mark.parametrize(
    ("release", "machine", "status"),
    [
        ("5.10.0-28-amd64", "x86_64", "ok"),
        ("6.12.1", "aarch64", "ok"),
        ("5.9.16", "x86_64", "missing"),
        ("4.18.0-513.el8", "x86_64", "missing"),
        ("6.1.0", "ppc64le", "missing"),
    ],
)
def test_kernels_from_5_10_on_will_do(release: str, machine: str, status: str) -> None:
    finding = features.kernel(release, machine)
    assert finding.status == status
    assert bool(finding.remedy) is (status != "ok")


@pytest.mark.parametrize(
    ("text", "mode"),
    [
        ("none integrity [confidentiality]\n", "confidentiality"),
        ("none [integrity] confidentiality\n", "integrity"),
        ("[none] integrity confidentiality\n", "none"),
        (None, "none"),
        ("", "none"),
        ("[]", "none"),
    ],
)
def test_lockdown_is_parsed(text: str | None, mode: str) -> None:
    assert features.parse_lockdown(text) == mode
    finding = features.lockdown(text)
    assert finding.status == ("warning" if mode == "confidentiality" else "ok")
    assert ("reason=lockdown" in finding.detail) is (mode == "confidentiality")


@pytest.mark.parametrize(
    ("effective", "absent"),
    [
        (ALL, []),
        (0, list(features.CAPABILITIES)),
        (
            BPF | PERFMON,
            ["CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_SYS_ADMIN", "CAP_NET_ADMIN"],
        ),
        (ADMIN, ["CAP_SYS_PTRACE", "CAP_DAC_OVERRIDE", "CAP_CHOWN", "CAP_NET_ADMIN"]),
        (ALL & ~PERFMON & ~ADMIN, ["CAP_PERFMON", "CAP_SYS_ADMIN"]),
        (ALL & ~(1 << 12), ["CAP_NET_ADMIN"]),
        (ALL & ~(1 << 24), []),  # CAP_SYS_RESOURCE: the limits have lines of their own
    ],
)
def test_absent_capabilities_are_named(effective: int, absent: list[str]) -> None:
    assert features.absent_capabilities(effective) == absent
    finding = features.capabilities(effective)
    required = {"CAP_BPF", "CAP_PERFMON"} & set(absent)
    assert finding.status == ("missing" if required else "warning" if absent else "ok")
    assert all(name in finding.detail for name in absent)


def test_capabilities_are_read_from_status() -> None:
    assert features.parse_capabilities("Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0\n") == ALL
    assert features.parse_capabilities("CapEff:\tzz\n") == 0
    assert features.parse_capabilities("") == 0


@pytest.mark.parametrize(
    ("code", "release", "effective", "lockdown", "memlock", "wanted", "unwanted"),
    [
        (errno.EPERM, "5.4.0", ALL, None, 65536, ["memlock", "64 KiB", "EPERM"], ["CAP_BPF"]),
        (errno.EPERM, "6.1.0", ALL, None, 65536, ["EPERM"], ["memlock"]),
        (errno.EPERM, "5.4.0", ALL, None, -1, ["EPERM"], ["memlock"]),
        (errno.EPERM, "6.1.0", 0, None, 65536, ["CAP_BPF", "CAP_PERFMON"], ["memlock"]),
        (errno.EPERM, "5.4.0", 0, None, 65536, ["CAP_BPF", "CAP_PERFMON"], ["memlock"]),
        (errno.EACCES, "6.1.0", BPF, None, 0, ["CAP_PERFMON", "EACCES"], ["CAP_BPF"]),
        (errno.EPERM, "6.1.0", ALL, "none integrity [confidentiality]", 0, ["lockdown"], ["memlock"]),
        (errno.EPERM, "6.1.0", ALL, "none [integrity] confidentiality", 0, ["EPERM"], ["lockdown"]),
        (errno.ENOMEM, "6.1.0", ALL, None, -1, ["memory", "cgroup"], ["memlock"]),
        (errno.E2BIG, "5.10.0", ALL, None, -1, ["too large", "verifier"], []),
        (errno.ENOSYS, "6.1.0", ALL, None, -1, ["CONFIG_BPF_SYSCALL"], []),
        (errno.EINVAL, "6.1.0", ALL, None, -1, ["5.10"], []),
        (errno.EIO, "6.1.0", ALL, None, -1, ["EIO"], []),
        (99999, "", 0, None, None, ["99999"], []),
    ],
)
def test_a_load_error_has_cause_and_remedy(
    code: int,
    release: str,
    effective: int,
    lockdown: str | None,
    memlock: int | None,
    wanted: list[str],
    unwanted: list[str],
) -> None:
    text = features.explain_load_error(code, release, effective, lockdown, memlock)
    assert all(word in text for word in wanted)
    assert not any(word in text for word in unwanted)
    assert "; " in text  # cause and remedy
    assert "\n" not in text


@given(st.integers(1, 140), st.text(max_size=20), st.integers(0, ALL), st.none() | st.text(max_size=40))
def test_any_load_error_has_one_line(code: int, release: str, effective: int, lockdown: str | None) -> None:
    assert "\n" not in features.explain_load_error(code, release, effective, lockdown, None)


def test_a_seccomp_filter_is_named_only_when_nothing_else_explains_it() -> None:
    assert "seccomp" in features.explain_load_error(errno.EPERM, "6.1.0", ALL, seccomp=True)
    assert "seccomp" not in features.explain_load_error(errno.EPERM, "6.1.0", 0, seccomp=True)


@pytest.mark.parametrize(
    ("release", "soft", "hard", "may_raise", "status"),
    [
        ("5.10.0", 65536, 65536, False, "warning"),
        ("5.10.0", 65536, 65536, True, "ok"),
        ("5.10.0", 65536, -1, False, "ok"),
        ("5.10.0", -1, -1, False, "ok"),
        ("5.11.0", 65536, 65536, False, "ok"),
        ("6.18.0", 65536, 65536, False, "ok"),
    ],
)
def test_memlock_binds_only_old_kernels(
    release: str, soft: int, hard: int, may_raise: bool, status: str
) -> None:
    assert features.memlock(release, soft, hard, may_raise).status == status


@pytest.mark.parametrize(
    ("soft", "hard", "cpus", "may_raise", "status"),
    [
        (1024, 4096, 2, False, "ok"),
        (1024, 1024, 256, False, "warning"),
        (1024, 1024, 256, True, "ok"),
        (1024, 524288, 256, False, "ok"),
        (-1, -1, 8192, False, "ok"),
    ],
)
def test_open_files_must_do_for_every_cpu(
    soft: int, hard: int, cpus: int, may_raise: bool, status: str
) -> None:
    assert features.descriptors(soft, hard, cpus, 5, may_raise).status == status


def test_the_pmu_is_never_required() -> None:
    unsupported = dict.fromkeys(COUNTERS, "unsupported(ENOENT)")
    assert features.pmu(unsupported).status == "warning"
    assert "no PMU" in features.pmu(unsupported).detail
    assert "permission(EACCES)" in features.pmu(dict.fromkeys(COUNTERS, "permission(EACCES): …")).detail
    assert features.pmu(dict.fromkeys(COUNTERS, "")).status == "ok"
    assert features.pmu({}).status == "ok"
    mixed = features.pmu({"cycles": "", "cache_misses": "unsupported(ENOENT)"})
    assert mixed.status == "warning"
    assert "cycles pass" in mixed.detail
    assert "cache_misses: unsupported(ENOENT)" in mixed.detail


@pytest.mark.parametrize(
    ("value", "effective", "status"),
    [(4, ALL, "ok"), (2, 0, "warning"), (-1, 0, "ok"), (0, 0, "ok"), (None, ALL, "warning")],
)
def test_paranoia_binds_only_the_unprivileged(value: int | None, effective: int, status: str) -> None:
    assert features.perf_paranoid(value, effective).status == status


@pytest.mark.parametrize(
    ("inode", "levels", "status"),
    [(0xEFFFFFFC, 1, "ok"), (4026532211, 2, "warning"), (4026532211, 1, "warning"), (None, 1, "warning")],
)
def test_a_nested_pid_namespace_is_told(inode: int | None, levels: int, status: str) -> None:
    finding = features.pid_namespace(inode, levels)
    assert finding.status == status
    assert ("nested_pid_ns" in finding.detail) is (status == "warning" and inode is not None)


@pytest.mark.parametrize(
    ("name", "code", "release", "status", "words"),
    [
        ("bpf_loop", 0, "5.10.0", "ok", "works (tried)"),  # backported
        (
            "bpf_loop",
            errno.EINVAL,
            "5.16.9",
            "warning",
            "not in this kernel (tried: EINVAL), Linux 5.17 has it",
        ),
        ("bpf_loop", errno.EINVAL, "5.17.0", "warning", "refused (tried: EINVAL)"),
        ("uprobe_multi links", errno.EINVAL, "6.5.0-1", "warning", "Linux 6.6 has it"),
        ("uprobe_multi links", errno.EOPNOTSUPP, "6.6.0", "warning", "refused (tried: ENOTSUP)"),
        ("sleepable task iterator", errno.EINVAL, "5.10.0", "warning", "Linux 5.18 has it"),
        ("sleepable task iterator", errno.EPERM, "6.12.1", "warning", "refused (tried: EPERM)"),
        ("attach cookies", 0, "5.14.0-427.el9", "ok", "works (tried)"),  # backported
        (
            "attach cookies",
            errno.EINVAL,
            "5.10.0",
            "warning",
            "Linux 5.15 has it; probes cannot be told apart",
        ),
        ("sleepable task iterator", 99999, "6.12.1", "warning", "99999"),
    ],
)
def test_an_ability_that_is_missing_says_from_when_on_and_what_it_means(
    name: str, code: int, release: str, status: str, words: str
) -> None:
    finding = features.ability(name, code, release)
    assert (finding.name, finding.status) == (name, status)
    assert words in finding.detail
    assert finding.detail.endswith(features.ABILITIES[name][1]) is (status == "warning")


def test_the_rest_of_the_decisions() -> None:
    assert features.btf(False).status == "missing"
    assert features.libbpf(None).status == "missing"
    assert features.objects(["a.o"], ["a.o", "b.o"]).detail == "no b.o"
    assert features.objects(["a.o", "b.o"], ["a.o"]).status == "ok"
    assert features.bpf_part("x", 0, "").status == "ok"
    assert features.bpf_part("x", errno.EINVAL, "cause; remedy")[2:] == ("cause", "remedy")
    assert features.unprivileged_bpf(0).status == "warning"
    assert features.unprivileged_bpf(2).status == "ok"
    assert features.user_namespace(1).status == "warning"
    assert features.headers(False, False).status == "warning"
    assert features.headers(False, True).status == "ok"
    assert features.delay_accounting(0, False).status == "ok"
    assert features.delay_accounting(0, True).status == "warning"
    assert features.delay_accounting(None, True).status == "warning"
    assert features.delay_accounting(1, True).status == "ok"
    assert features.cgroups(None, [], "none mounted; mount one")[1:] == (
        "missing",
        "none mounted",
        "mount one",
    )
    assert features.controller("", "").status == "ok"
    assert features.controller("h:1", "refused").status == "warning"
    assert features.agent("/x", "denied").status == "warning"


@pytest.mark.parametrize(
    ("enabled", "why_not", "waiting", "release", "finding"),
    [
        (True, "", 0, "6.1.0", ("ok", "on CPUs and waiting, CPython 3.8 to 3.15 (tried)", "")),
        (
            True,
            "",
            errno.EINVAL,
            "5.10.0",
            (
                "warning",
                "on CPUs, CPython 3.8 to 3.15 (tried); waiting threads are not seen: needs Linux 5.18",
                "",
            ),
        ),
        (
            True,
            "",
            errno.EPERM,
            "6.1.0",
            (
                "warning",
                "on CPUs, CPython 3.8 to 3.15 (tried); waiting threads are not seen: refused (EPERM)",
                "",
            ),
        ),
        (
            True,
            "loading: no CAP_PERFMON; grant it",
            0,
            "6.1.0",
            ("warning", "Python stacks are not sampled: loading: no CAP_PERFMON", "grant it"),
        ),
        (False, "", 0, "6.1.0", ("ok", "switched off (sources.python)", "")),
    ],
)
def test_python_stacks(
    enabled: bool, why_not: str, waiting: int, release: str, finding: tuple[str, str, str]
) -> None:
    assert features.python_stacks(enabled, why_not, waiting, release) == ("python stacks", *finding)


@pytest.mark.parametrize(
    ("enabled", "why_not", "method", "finding"),
    [
        (
            True,
            "",
            "uprobe_multi",
            ("ok", "calls of CUDA functions are probed by uprobe_multi links (tried)", ""),
        ),
        (
            True,
            "",
            "perf",
            ("ok", "calls of CUDA functions are probed by a perf event for each function (tried)", ""),
        ),
        (
            True,
            "5.10.0 has no attach cookies; boot Linux 5.15 or newer",
            "",
            (
                "warning",
                "calls of CUDA functions cannot be traced: 5.10.0 has no attach cookies",
                "boot Linux 5.15 or newer",
            ),
        ),
        (False, "", "", ("ok", "switched off (sources.traces)", "")),
    ],
)
def test_deep_traces(enabled: bool, why_not: str, method: str, finding: tuple[str, str, str]) -> None:
    assert features.deep_traces(enabled, why_not, method) == ("deep traces", *finding)


def test_without_bcc_kernels_have_no_names_and_the_package_is_named() -> None:
    finding = features.kernel_names(False)
    assert finding.status == "warning"
    assert "libbcc.so.0" in finding.detail
    assert "python3-bpfcc" in finding.remedy
    assert features.kernel_names(True).status == "ok"
    assert probe.BCC == symbols._LIBRARY


def test_the_pythons_that_are_named_are_those_with_a_layout() -> None:
    assert f"CPython 3.{layouts.OLDEST} to 3.{layouts.NEWEST}" == features.PYTHONS


# ---- this machine


TRIALS = (
    trials.load_trivial_program,
    trials.make_ring_buffer,
    trials.load_loop,
    trials.link_uprobe_multi,
    trials.link_sleepable_task_iterator,
    trials.load_attach_cookie,
)


def test_this_machine_loads_programs_for_real() -> None:
    assert trials.load_trivial_program() == 0
    assert trials.make_ring_buffer() == 0
    assert probe.load_objects() == (0, "")


@pytest.mark.parametrize(("name", "trial"), list(zip(features.ABILITIES, TRIALS[2:], strict=True)))
def test_abilities_are_tried_for_real(name: str, trial: Callable[[], int]) -> None:
    """Kernels that lack them are in tests/guests/test_matrix.py."""
    release = os.uname().release
    has_it = features.parse_release(release) >= features.ABILITIES[name][0]
    assert (trial() == 0) is has_it
    assert features.ability(name, trial(), release) in probe.findings(Config())


def test_python_stacks_are_sampled_for_real() -> None:
    can_wait = features.parse_release(os.uname().release) >= (5, 18)
    why_not, waiting = probe.load_python_stacks()
    assert (why_not, waiting == 0) == ("", can_wait)
    by_name = {finding.name: finding for finding in probe.findings(Config())}
    assert by_name["python stacks"].status == ("ok" if can_wait else "warning")
    assert "python_stacks" in by_name["bpf objects"].detail
    assert "python_waits" in by_name["bpf objects"].detail


def test_python_stacks_that_cannot_be_sampled_keep_nothing_else_from_running(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise libbpf.BpfError("loading python_stacks", errno.EPERM)

    with monkeypatch.context() as without:
        without.setattr("expanse_ebpf.kernel.python_stacks.PythonStacks.load_waits", refuse)
        assert probe.load_python_stacks() == ("", errno.EPERM)
    monkeypatch.setattr("expanse_ebpf.kernel.python_stacks.PythonStacks", refuse)
    why_not, _ = probe.load_python_stacks()
    assert why_not.startswith("loading python_stacks: Operation not permitted (EPERM): ")
    found = {finding.name: finding for finding in probe.findings(Config())}
    assert found["python stacks"].status == "warning"
    assert found["collector's programs"].status == "ok"
    monkeypatch.setattr(probe, "load_python_stacks", refuse)  # is not called
    off = replace(Config(), sources=replace(Config().sources, python=False))
    assert "switched off" in {f.name: f for f in probe.findings(off)}["python stacks"].detail


def test_a_function_is_probed_for_real_and_nothing_is_left() -> None:
    gc.collect()
    before = set(Path("/proc/self/fd").iterdir())
    assert probe.load_gpu_calls() == ("", uprobes.method())
    gc.collect()
    assert set(Path("/proc/self/fd").iterdir()) == before
    by_name = {finding.name: finding for finding in probe.findings(Config())}
    assert by_name["deep traces"] == features.deep_traces(True, "", uprobes.method())
    assert by_name["names of GPU kernels"].status == "ok"
    assert "gpu_calls" in by_name["bpf objects"].detail


def test_deep_traces_that_cannot_be_keep_nothing_else_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise libbpf.BpfError("loading gpu_calls", errno.EPERM)

    def deep_traces() -> Finding:
        found = {finding.name: finding for finding in probe.findings(Config())}
        assert found["collector's programs"].status == "ok"
        assert found.keys() & {"names of GPU kernels"} == set()  # of no use then
        assert found["deep traces"].status == "warning"
        return found["deep traces"]

    with monkeypatch.context() as old:
        old.setattr(trials, "load_attach_cookie", lambda: errno.EINVAL)
        assert "has no attach cookies, probes cannot be told apart" in deep_traces().detail
        assert deep_traces().remedy == "boot Linux 5.15 or newer"
    with monkeypatch.context() as refusing:
        refusing.setattr(uprobes.Probes, "attach", lambda self, path, places: {0: "no such thing"})
        assert "a probe in a file is refused: no such thing" in deep_traces().detail
    monkeypatch.setattr("expanse_ebpf.kernel.gpu_calls.GpuCalls", refuse)
    assert "loading gpu_calls: Operation not permitted (EPERM)" in deep_traces().detail
    monkeypatch.setattr(probe, "load_gpu_calls", refuse)  # is not called
    off = replace(Config(), sources=replace(Config().sources, traces=False))
    assert "switched off" in {f.name: f for f in probe.findings(off)}["deep traces"].detail


def test_trials_leave_no_descriptor() -> None:
    program = "import os; from expanse_ebpf.kernel import trials; before = os.listdir('/proc/self/fd')\n"
    program += f"for name in {[trial.__name__ for trial in TRIALS]}: getattr(trials, name)()\n"
    program += "print(os.listdir('/proc/self/fd') == before)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


def test_a_process_without_capabilities_is_refused_for_real() -> None:
    program = "import os; from expanse_ebpf.kernel import trials; os.setgid(65534); os.setuid(65534)\n"
    program += f"print(*(getattr(trials, n)() for n in {[trial.__name__ for trial in TRIALS]}))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(errno.EPERM)] * len(TRIALS)


def test_where_nothing_can_be_loaded_no_abilities_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def told() -> set[str]:
        return {finding.name for finding in probe.findings(Config())} & features.ABILITIES.keys()

    def missing() -> None:
        raise UnavailableError("libbpf.so.1 is not installed")

    assert told() == features.ABILITIES.keys()
    with monkeypatch.context() as without:
        without.setattr(trials, "load_trivial_program", lambda: errno.EPERM)
        assert not told()
    monkeypatch.setattr(probe.libbpf, "version", missing)
    assert not told()


def test_the_findings_have_one_line_each_and_a_name_of_their_own(tmp_path: Path) -> None:
    found = probe.findings(Config())
    assert len({finding.name for finding in found}) == len(found)
    assert all("\n" not in "".join(finding) for finding in found)
    assert all(finding.remedy for finding in found if finding.status == "missing")
    by_name = {finding.name: finding for finding in found}
    assert by_name["cgroups"].detail.split(":")[0] in ("v1", "v2", "hybrid")


@pytest.mark.parametrize("nested", [False, True])
def test_the_pid_namespace_is_recognised_for_real(nested: bool) -> None:
    program = "from expanse_ebpf.kernel import features, probe\n"
    program += "status = probe.read('/proc/self/status')\n"
    program += (
        "print(features.pid_namespace(probe._inode('/proc/self/ns/pid'), probe._levels(status)).status)"
    )
    unshare = ["unshare", "--pid", "--fork", "--mount-proc"] if nested else []
    done = subprocess.run(
        [*unshare, sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    own = os.stat("/proc/self/ns/pid").st_ino == features.INITIAL_PID_NAMESPACE  # noqa: PTH116
    assert done.stdout.strip() == ("ok" if own and not nested else "warning")


def test_a_controller_is_reached_or_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert probe._unreachable(f"127.0.0.1:{port}") == ""
    assert "refused" in probe._unreachable(f"127.0.0.1:{port}")
    assert probe._unreachable("no.such.host.invalid:1")
    assert probe._unreachable(f"{'x' * 70}.invalid:1")


def test_an_agents_socket_is_told_from_a_stale_one(tmp_path: Path) -> None:
    path = str(tmp_path / "agent.sock")
    assert probe._socket_state(path) == "absent"
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    assert probe._socket_state(path) == "running"
    server.close()
    assert probe._socket_state(path) == "stale"
    assert probe._socket_state("/" + "x" * 200) == "absent"
