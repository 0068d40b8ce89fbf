"""Traffic of the host and of jobs with a network namespace of their own; real namespaces and links."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from expanse_ebpf.jobs.job import Job
from expanse_ebpf.sources.link_statistics import open_socket
from expanse_ebpf.sources.network import NetworkSource
from expanse_ebpf.wire.collector_pb2 import JobIdentity, NetworkCounters, Report

PAYLOAD = 1000


class Namespace:
    """A network namespace joined to the host by a veth pair; UDP sent on the host side arrives in it."""

    def __init__(self) -> None:
        self.tag = uuid.uuid4().hex[:6]
        self.name = f"test-expanse-{self.tag}"
        self.outer, self.inner = f"tx{self.tag}", "eth0"
        self.children: list[subprocess.Popen[bytes]] = []

    def make(self) -> None:
        self.ip("netns", "add", self.name)
        self.ip("link", "add", self.outer, "type", "veth", "peer", "name", self.inner, "netns", self.name)
        self.ip("link", "set", self.outer, "up")
        self.ip("-n", self.name, "link", "set", self.inner, "up")
        self.ip("-n", self.name, "link", "set", "lo", "up")

    @staticmethod
    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    def start(self) -> int:
        """A process in the namespace."""
        child = subprocess.Popen(["ip", "netns", "exec", self.name, "sleep", "600"])
        self.children.append(child)
        own = Path("/proc/self/ns/net").stat().st_ino
        deadline = time.monotonic() + 20
        while Path(f"/proc/{child.pid}/ns/net").stat().st_ino == own:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return child.pid

    def send(self, frames: int) -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as out:
            out.bind((self.outer, 0))
            for _ in range(frames):
                out.send(b"\xff" * 6 + b"\2" * 6 + b"\x88\xb5" + b"x" * (PAYLOAD - 14))

    def end(self, index: int) -> None:
        self.children[index].kill()
        self.children[index].wait()

    def close(self) -> None:
        for index in range(len(self.children)):
            self.end(index)
        subprocess.run(["ip", "netns", "del", self.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.outer], capture_output=True, check=False)


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    made = Namespace()
    try:
        made.make()
        yield made
    finally:
        made.close()


@pytest.fixture
def source() -> Iterator[NetworkSource]:
    made = NetworkSource()
    made.start()
    try:
        yield made
    finally:
        made.stop()
        made.stop()


def sampled(source: NetworkSource, *jobs: Job) -> Report:
    report = Report()
    source.sample(time.monotonic(), [(job, report.jobs.add()) for job in jobs], report)
    return report


def counters(source: NetworkSource, job: Job) -> NetworkCounters:
    (sample,) = sampled(source, job).jobs
    assert sample.HasField("network")
    return sample.network


def job_of(*pids: int, cgroup: str = "") -> Job:
    return Job(JobIdentity(scheduler="run", id="x", cgroup=cgroup), pids=frozenset(pids))


def interfaces() -> set[str]:
    return {entry.name for entry in Path("/sys/class/net").iterdir() if entry.is_dir()}


def namespaces_of_threads() -> set[Path]:
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add((task / "ns/net").readlink())
    return found


def sysfs(interface: str, counter: str) -> int:
    return int(Path(f"/sys/class/net/{interface}/statistics/{counter}").read_text())


def test_host_interfaces(namespace: Namespace, source: NetworkSource) -> None:
    before = sampled(source).host.network
    assert "lo" not in before
    sent = before[namespace.outer].sent_bytes
    namespace.send(100)
    after = sampled(source).host.network[namespace.outer]
    assert after.sent_bytes == sysfs(namespace.outer, "tx_bytes")
    assert after.sent_bytes - sent >= 100 * PAYLOAD
    assert after.sent_packets >= 100
    assert set(before) == {name for name in interfaces() if name != "lo"}


def test_a_job_in_its_own_namespace(namespace: Namespace, source: NetworkSource) -> None:
    pid = namespace.start()
    inside, outside = job_of(pid), job_of(os.getpid())
    report = sampled(source, inside, outside)
    assert not report.jobs[1].HasField("network")
    before = report.jobs[0].network
    assert "eth0" not in report.host.network or "eth0" in interfaces()
    namespace.send(200)
    after = counters(source, inside)
    assert 200 * PAYLOAD <= after.received_bytes - before.received_bytes < 200 * PAYLOAD + 10_000
    assert after.received_packets - before.received_packets >= 200


def test_no_thread_leaves_its_namespace(namespace: Namespace, source: NetworkSource) -> None:
    job = job_of(namespace.start())
    own = Path("/proc/self/ns/net").readlink()
    threads = threading.active_count()
    counters(source, job)
    assert Path("/proc/thread-self/ns/net").readlink() == own
    # The thread that made the socket may still be on its way out of the kernel.
    deadline = time.monotonic() + 20
    while namespaces_of_threads() != {own}:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert threading.active_count() == threads
    with open_socket(None) as plain:
        assert plain.fileno() >= 0


def test_counters_go_on_over_a_restart_in_a_new_namespace(
    namespace: Namespace, source: NetworkSource
) -> None:
    job = job_of(namespace.start())
    counters(source, job)
    namespace.send(50)
    before = counters(source, job)
    namespace.end(0)
    job.pids = frozenset()
    assert counters(source, job) == before  # no process, the figures stay
    second = Namespace()
    try:
        second.make()
        job.pids = frozenset({second.start()})
        first_word = counters(source, job)
        assert first_word.received_bytes >= before.received_bytes
        second.send(30)
        after = counters(source, job)
        assert after.received_bytes - first_word.received_bytes >= 30 * PAYLOAD
    finally:
        second.close()


def test_the_namespace_is_let_go_with_its_last_process(namespace: Namespace, source: NetworkSource) -> None:
    job = job_of(namespace.start())
    counters(source, job)
    namespace.end(0)
    job.pids = frozenset()
    sampled(source, job)
    namespace.ip("netns", "del", namespace.name)
    deadline = time.monotonic() + 20
    # The pair goes once nothing holds the namespace any more.
    while Path(f"/sys/class/net/{namespace.outer}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_pid_in_another_cgroup_is_not_the_jobs(namespace: Namespace, source: NetworkSource) -> None:
    job = job_of(namespace.start(), cgroup="/test-expanse-elsewhere")
    assert not sampled(source, job).jobs[0].HasField("network")


def test_processes_that_are_gone(source: NetworkSource) -> None:
    assert not sampled(source, job_of(2**22 + 5), Job(JobIdentity())).jobs[0].HasField("network")
