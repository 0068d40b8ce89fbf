"""Jobs of every form under systemd, with cgroup v2 or v1 alone, against the kernel's own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, JobSample, Report
from tests.guests.conftest import Node

POD = "11111111-2222-3333-4444-555555555555"
HAND_POD = "99999999-8888-7777-6666-555555555555"
CONTAINER, PAUSE = "a1" * 32, "b2" * 32
# The works of inside/cgroup_modes.py: the job that each is, its owner, and its user's processes.
JOBS = {
    "alone": ("run/alone", "root", 3),
    "inner": ("run/inner", "root", 1),
    "pressed": ("run/pressed", "root", 1),
    "disk": ("run/disk", "root", 1),
    "slurm-101": ("slurm/101", "user", 1),
    "slurm-102": ("slurm/102", "user", 1),
    "pod": (f"kubernetes/{POD}", "root", 1),
    "hand-pod": (f"kubernetes/{HAND_POD}", "root", 2),
    "trainer": ("unit/trainer.service", "root", 1),
    "plain": ("unit/plain.service", "root", 1),
    "asked": ("run/asked", "user", 1),
    "delegated": ("run/delegated", "user", 1),
    "managed": ("run/managed", "user", 1),
    "mover": ("slurm/202", "user", 2),
}
# Their memory in MiB.
MEMORY = {
    "alone": 20, "pressed": 21, "inner": 27, "slurm-101": 21, "slurm-102": 22, "pod": 22, "hand-pod": 23,
    "trainer": 28, "plain": 29, "asked": 24, "delegated": 25, "managed": 26,
}  # fmt: skip
MIB = 1 << 20
# With no controller of their own on v2: SLURM's other node, and where a process stands in the way.
BARE = ("slurm-102", "asked", "delegated")


class Seen:
    """What one guest has brought back."""

    def __init__(self, folder: Path, mode: str, kernel: str) -> None:
        self.mode = mode
        self.kernel = kernel
        self.log = (folder / "agent.log").read_text()
        self.reports = [Report.FromString(p.read_bytes()) for p in sorted((folder / "reports").iterdir())]
        told = json.loads((folder / "seen.json").read_text())
        self.told: dict[str, Any] = told
        self.before: dict[str, dict[str, Any]] = told["before"]
        self.after: dict[str, dict[str, Any]] = told["after"]
        (settled,) = [report for report in self.reports if report.sequence == told["settled"]]
        self.settled = settled
        self.jobs = {key(sample): sample for sample in settled.jobs}

    def job(self, work: str) -> JobSample:
        """The sample of the job that the work is."""
        return self.jobs[JOBS[work][0]]

    def files(self, name: str) -> Iterator[tuple[str, str, str]]:
        """(work, text, text of the second look) of the jobs' cgroup files of this name."""
        for work in JOBS:
            if name in self.before[work]["files"]:
                yield work, self.before[work]["files"][name], self.after[work]["files"][name]


def key(sample: JobSample) -> str:
    return f"{sample.identity.scheduler}/{sample.identity.id}"


def line(text: str, name: str) -> int:
    """The number behind a word of a cgroup file."""
    return next(int(row.split()[1]) for row in text.splitlines() if row.split()[0] == name)


def total(text: str, share: str) -> int:
    """Stalled microseconds in a pressure file."""
    return next(int(row.rpartition("total=")[2]) for row in text.splitlines() if row.startswith(share))


def summed(text: str, word: str) -> int:
    """One figure of io.stat over the devices."""
    pairs = (pair.split("=") for row in text.splitlines() for pair in row.split()[1:])
    return sum(int(pair[1]) for pair in pairs if pair[0] == word)


def throttle(text: str, word: str) -> int:
    """One figure of a blkio.throttle file over the devices."""
    rows = (row.split() for row in text.splitlines())
    return sum(int(row[2]) for row in rows if len(row) == 3 and row[1] == word)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("6.1", "amd64", "v2"), id="v2"),
        pytest.param(("6.1", "amd64", "v1"), id="v1"),
        pytest.param(("6.12", "arm64", "v2"), id="v2-6.12-arm64", marks=pytest.mark.matrix),
        pytest.param(("5.10", "amd64", "v1"), id="v1-5.10", marks=pytest.mark.matrix),
    ],
)
def seen(
    request: pytest.FixtureRequest, wheel: Path, accelerator: str, tmp_path_factory: pytest.TempPathFactory
) -> Seen:
    kernel, arch, cgroup = request.param
    options = {"cgroup": cgroup, "init": "systemd", "limit_s": 800}
    if arch == "amd64":
        options["accelerator"] = accelerator
    node = Node(tmp_path_factory.mktemp("cgroups"), wheel, arch, kernel, options)
    result = node.run(["python3", "/payload/files/inside/cgroup_modes.py", cgroup]).check()
    return Seen(result.files, cgroup, kernel)


def test_the_mode_is_recognised(seen: Seen) -> None:
    (finding,) = [f for f in seen.told["check"]["findings"] if f["name"] == "cgroups"]
    assert finding["status"] == "ok"
    assert finding["detail"].startswith(f"{seen.mode}: ")
    assert seen.told["check"]["can_run"]
    assert "Traceback" not in seen.log


def test_every_job_has_its_key_its_owner_and_its_processes(seen: Seen) -> None:
    known = {JOBS[work][0]: JOBS[work][1:] for work in JOBS}
    found = {k: (job.identity.user, job.processes) for k, job in seen.jobs.items() if k in known}
    assert found == known
    for work, (_, owner, processes) in JOBS.items():
        if owner == "user" and work != "mover":  # the kernel's own word, as far as users tell them apart
            assert seen.after[work]["users"] == processes, work


def test_what_is_no_job_is_none(seen: Seen) -> None:
    others = {"run/outer", "run/steady", "slurm/103", "slurm/201", "unit/delegated.service"}
    others |= {"unit/guest-command.service"}
    assert seen.jobs.keys() - {one for one, _, _ in JOBS.values()} <= others
    assert seen.jobs.keys() >= others - {"slurm/103"}
    assert seen.settled.host.unattributed_cgroups == 0
    assert seen.settled.collector.events_lost == 0


def test_slurm_and_kubernetes_jobs_have_their_names(seen: Seen) -> None:
    identity = seen.job("slurm-101").identity
    assert (identity.name, identity.account, identity.partition) == ("train", "lab", "gpu")
    assert (identity.array, list(identity.gpus), identity.uid) == ("100_1", ["0", "1"], 1000)
    pod = seen.job("pod").identity
    assert (pod.pod_uid, pod.qos, set(pod.containers)) == (POD, "burstable", {CONTAINER, PAUSE})
    pod = seen.job("hand-pod").identity
    assert (pod.pod_uid, pod.qos, list(pod.containers)) == (HAND_POD, "besteffort", [CONTAINER])


def test_cpu_time_is_what_the_job_has_used(seen: Seen) -> None:
    for work in JOBS.keys() - {"mover"}:
        told = seen.after[work]["told"]
        used = sum(stretch["cpu_s"] for stretch in told["stretches"])
        # What there was before the program began may have been in another cgroup; where there are other
        # processes (slurmstepd, pause), what they took to begin counts too.
        most = float("inf") if work in ("slurm-101", "slurm-102", "pod") else used + 0.2
        for counted in (seen.job(work).cpu_ns, seen.job(work).counters.run_ns):
            assert used - told["earlier"]["cpu_s"] - 0.05 <= counted / 1e9 <= most, work


def test_what_run_starts_is_counted_by_the_scheduler_hook_from_its_beginning(seen: Seen) -> None:
    for work in ("alone", "inner", "pressed", "disk", "asked", "delegated", "managed"):
        job = seen.job(work)
        # The hook counts some of each switch too, and a switch takes long in an emulator short of CPU.
        assert job.counters.run_ns / 1e9 == pytest.approx(job.cpu_ns / 1e9, abs=0.2), work


def test_cpu_time_is_the_kernels_to_the_last_count(seen: Seen) -> None:
    compared = []
    for work, before, after in seen.files("unified/cpu.stat"):
        if seen.mode == "v2":
            job = seen.job(work)
            for name, value in (
                ("usage", job.cpu_ns),
                ("user", job.cpu_user_ns),
                ("system", job.cpu_system_ns),
            ):
                assert line(before, f"{name}_usec") <= value // 1000 <= line(after, f"{name}_usec"), work
            compared.append(work)
    for work, before, after in seen.files("cpu,cpuacct/cpuacct.usage"):
        assert int(before) <= seen.job(work).cpu_ns <= int(after), work
        compared.append(work)
    # On v1 one job is in memory and freezer alone: its time is the scheduler hook's.
    missing = set() if seen.mode == "v2" else {"slurm-102"}
    assert set(compared) == JOBS.keys() - missing
    for work in missing:
        assert "cpu" in seen.job(work).unavailable
        assert seen.job(work).cpu_ns == seen.job(work).counters.run_ns


def test_a_process_that_moves_counts_where_it_is(seen: Seen) -> None:
    session, first, second = (s["cpu_s"] for s in seen.after["mover"]["told"]["stretches"])
    assert session > 0.9
    for one, used in (("slurm/201", first), ("slurm/202", second)):
        job = seen.jobs[one]
        for counted in (job.cpu_ns, job.counters.run_ns):  # with those that keep the job alive
            assert used - 0.1 <= counted / 1e9 <= used + 0.5
    assert 100 <= seen.jobs["slurm/201"].counters.context_switches < 400
    assert seen.jobs["slurm/202"].counters.context_switches < 100


def test_context_switches_are_the_processes_own(seen: Seen) -> None:
    for work in JOBS.keys() - {"mover", "pressed", "disk"}:  # these had processes that are gone
        truth, counted = seen.after[work], seen.job(work).counters.context_switches
        least = truth["own switches"] - truth["told"]["earlier"]["switches"]
        assert least - 5 <= counted <= truth["switches"] + 5, work
    assert seen.job("alone").counters.context_switches >= 400
    assert seen.job("inner").counters.context_switches >= 150


def test_memory_is_the_kernels(seen: Seen) -> None:
    with_memory = JOBS.keys() - set(BARE) if seen.mode == "v2" else JOBS.keys()
    names = ("unified/memory.current", "unified/memory.stat", "anon", "file", "unified/memory.peak")
    if seen.mode != "v2":
        names = (
            *("memory/memory.usage_in_bytes", "memory/memory.stat", "total_rss", "total_cache"),
            "memory/memory.max_usage_in_bytes",
        )
    now, stat, anon, file, peak = names
    assert {work for work, _, _ in seen.files(now)} == with_memory
    for work, before, after in seen.files(now):
        assert seen.job(work).memory_bytes == pytest.approx(
            int(before), abs=abs(int(after) - int(before)) + 65536
        )
    for work, before, after in seen.files(stat):
        job = seen.job(work)
        for name, value in ((anon, job.memory_anon_bytes), (file, job.memory_file_bytes)):
            low, high = sorted((line(before, name), line(after, name)))
            assert low - 65536 <= value <= high + 65536, work
        assert MEMORY.get(work, 0) * MIB <= job.memory_anon_bytes, work
    for work, before, _ in seen.files(peak):
        # The kernel lets two CPUs write it at once, so that it may fall again; ours does not.
        assert int(before) <= seen.job(work).memory_peak_bytes <= int(before) + 4 * MIB, work
    assert seen.job("disk").memory_limit_bytes == 24 * MIB
    assert not seen.job("alone").HasField("memory_limit_bytes")


def test_io_is_the_kernels(seen: Seen) -> None:
    disk = seen.job("disk")
    # Of v1's cgroups Linux 6.1 counts I/O on devices with a limit alone.
    if seen.mode == "v2" or seen.kernel == "5.10":
        assert disk.io_read_bytes >= 90 * MIB  # 32 MiB three times; some pages may have stayed
        # What the kernel's own threads write back is nobody's on v1.
        assert disk.io_write_bytes >= (32 * MIB if seen.mode == "v2" else MIB)
    if seen.mode == "v2":
        for work, before, _ in seen.files("unified/io.stat"):
            job = seen.job(work)
            assert (job.io_read_bytes, job.io_write_bytes) == (
                summed(before, "rbytes"),
                summed(before, "wbytes"),
            )
            assert (job.io_read_ops, job.io_write_ops) == (summed(before, "rios"), summed(before, "wios"))
        return
    for work, before, _ in seen.files("blkio/blkio.throttle.io_service_bytes_recursive"):
        job = seen.job(work)
        told = (throttle(before, "Read"), throttle(before, "Write"))
        if any(told):
            assert (job.io_read_bytes, job.io_write_bytes) == told
        else:
            assert not job.HasField("io_read_bytes")
            assert not job.HasField("io_write_bytes")
            assert "devices with a limit" in job.unavailable["io"]


def test_pressure_is_the_kernels_where_there_is_one(seen: Seen) -> None:
    if seen.mode != "v2":
        for job in seen.jobs.values():
            for kind in ("cpu_pressure", "memory_pressure", "io_pressure"):
                assert not job.HasField(kind)
            assert "v1 has no pressure figures" in job.unavailable["pressure"]
        return
    for kind in ("cpu", "memory", "io"):
        compared = 0
        for work, before, after in seen.files(f"unified/{kind}.pressure"):
            stalls = getattr(seen.job(work), f"{kind}_pressure")
            assert total(before, "some") <= stalls.some_us <= total(after, "some"), (work, kind)
            assert total(before, "full") <= stalls.full_us <= total(after, "full"), (work, kind)
            compared += 1
        assert compared == len(JOBS)
    # Three processes that share a CPU for three seconds of work: for two of them at least one waits.
    assert seen.job("pressed").cpu_pressure.some_us > 1_500_000
    # It read 32 MiB from the disk within 24 MiB of memory.
    assert seen.job("disk").memory_pressure.some_us > 0
    assert seen.job("disk").io_pressure.some_us > 0


GROUPS = {"cpu": "cpu_ns", "memory": "memory_bytes", "io": "io_read_bytes", "throttling": "throttled_periods"}


def test_nothing_is_missing_without_a_reason(seen: Seen) -> None:
    for one, job in seen.jobs.items():
        for group, field in GROUPS.items():
            known = job.HasField(field)  # type: ignore[arg-type]
            assert known or group in job.unavailable, (one, group)
            assert not known or group not in job.unavailable or group == "cpu", (one, group)  # the hook knows
    if seen.mode == "v2":
        for work in BARE:
            job = seen.job(work)
            assert job.unavailable["memory"] == "the memory controller is not on in its cgroup"
            assert job.unavailable["io"] == "the io controller is not on in its cgroup"
            assert not job.HasField("memory_peak_bytes")
            assert not job.HasField("memory_anon_bytes")
            assert not job.HasField("oom_kills")
    else:
        reasons = dict(seen.job("slurm-102").unavailable)
        assert reasons["cpu"] == "no cpuacct cgroup of its own"
        assert reasons["io"] == "no blkio cgroup of its own"
        assert reasons["throttling"] == "no cpu cgroup of its own"


def test_the_end_of_every_job_is_told_once_with_its_last_figures(seen: Seen) -> None:
    for work, (one, _, _) in JOBS.items():
        samples = [job for report in seen.reports for job in report.jobs if key(job) == one]
        assert [job.state for job in samples].count(JOB_STATE_ENDED) == 1, work
        assert samples[-1].state == JOB_STATE_ENDED, work
        assert samples[-1].cpu_ns >= seen.job(work).cpu_ns, work
        assert len({job.identity.run for job in samples}) == 1, work
    assert seen.told["left"] == ["unit/guest-command.service"]
    assert {work: code for work, code in seen.told["codes"].items() if code} == {"steady": 128 + 15}


def test_counters_never_fall(seen: Seen) -> None:
    last: dict[tuple[str, int], tuple[int, ...]] = {}
    for report in seen.reports:
        for job in report.jobs:
            figures = (job.cpu_ns, job.counters.run_ns, job.counters.context_switches, job.io_read_bytes)
            one = (key(job), job.identity.run)
            before = last.get(one, figures)
            assert all(a <= b for a, b in zip(before, figures, strict=True)), (one, before, figures)
            last[one] = figures


def test_top_shows_the_jobs_and_what_they_do_now(seen: Seen) -> None:
    assert seen.told["top"]["code"] == 0
    top = json.loads(seen.told["top"]["out"])
    jobs = {job["key"]: job for job in top["jobs"]}
    assert jobs.keys() >= {one for one, _, _ in JOBS.values()} | {"run/steady"}
    steady = jobs["run/steady"]
    assert 0.2 < steady["cpu_cores"] <= 2.1
    assert (steady["state"], steady["processes"], steady["user"]) == ("running", 1, "root")
    for one, job in jobs.items():
        if one in {key for key, _, _ in JOBS.values()}:
            assert job["cpu_cores"] == pytest.approx(0, abs=0.05), one
            assert (job["memory_bytes"] is None) == ("memory" in job["unavailable"]), one
    assert top["host"]["cpu_cores"] <= 2.1


def test_an_ordinary_user_sees_their_own_jobs_alone(seen: Seen) -> None:
    assert seen.told["top of user"]["code"] == 0
    jobs = json.loads(seen.told["top of user"]["out"])["jobs"]
    theirs = {one for one, owner, _ in JOBS.values() if owner == "user"}
    assert {job["key"] for job in jobs} - {"slurm/103"} == theirs | {"slurm/201", "unit/delegated.service"}


@pytest.mark.parametrize(
    ("what", "code", "words"),
    [
        ("user without --user", 125, "Permission denied; run it as root, or with --user"),
        ("user without an agent", 125, "no agent answers on /run/nobody"),
        ("user in a SLURM job", 125, "this process is in the job slurm/103 already; start it without `run`"),
        ("name taken", 125, "a job of this name runs already; give another --name"),
        ("no such command", 127, "/no/such/command: command not found"),
        ("exit code", 42, ""),
        ("signal", 128 + 9, ""),
    ],
)
def test_what_run_refuses_and_passes_on(seen: Seen, what: str, code: int, words: str) -> None:
    said = seen.told["commands"][what]
    assert (said["code"], said["out"]) == (code, "")
    assert words in said["error"]
    assert said["error"].count("\n") == bool(words)


def test_without_pressure_accounting_the_reason_is_told(guest: Callable[..., Node]) -> None:
    script = (
        "expanse-ebpf agent --socket /run/a --ticks 30 2>/out/log & "
        "expanse-ebpf run --name quiet -- sleep 30 & "
        "until expanse-ebpf top --socket /run/a --once --json --job run/quiet >/out/top; do sleep 0.5; done"
    )
    result = guest(kernel="6.1", cgroup="v2", parameters="psi=0").run(["bash", "-c", script])
    (job,) = json.loads((result.files / "top").read_text())["jobs"]
    assert job["unavailable"]["pressure"] == "the kernel's pressure accounting is off; boot with psi=1"
    assert job["pressure"]["cpu"] == {"some_ratio": None, "full_ratio": None}
