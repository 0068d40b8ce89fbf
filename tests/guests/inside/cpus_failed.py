"""A CPU that has never been online fails to come up, and then comes.

Usage: cpus_failed.py; the guest is booted with maxcpus=1.
"""

from __future__ import annotations

import itertools
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from truth import until

from expanse_ebpf.errors import UnavailableError
from expanse_ebpf.top import client
from expanse_ebpf.wire.collector_pb2 import Report

SOCKET = "/run/expanse-ebpf/agent.sock"
CPU = Path("/sys/devices/system/cpu/cpu1")


def newest() -> Report:
    """The agent's, as soon as it answers."""

    def ask() -> Report | None:
        with suppress(UnavailableError):
            return next(iter(client.watch(SOCKET, 0)), None)
        return None

    return until("the agent answers", ask)


def fail_at(step: str) -> None:
    """Have the CPU's way up break off at a step, by the name that the kernel gives it."""
    lines = Path("/sys/devices/system/cpu/hotplug/states").read_text().splitlines()
    numbers = {name.strip(): number.strip() for number, name in (line.split(":", 1) for line in lines)}
    (CPU / "hotplug/fail").write_text(numbers[step])


def main() -> None:
    agent = subprocess.Popen(["expanse-ebpf", "agent", "--interval", "0.5"])
    reports = [newest()]
    fail_at("smpboot/threads:online")
    try:
        (CPU / "online").write_text("1")
    except OSError as error:
        print(f"it does not come up: {error.strerror}")
    else:
        raise AssertionError("it came up")
    time.sleep(2)
    reports.append(newest())
    (CPU / "hotplug/fail").write_text("-1")
    (CPU / "online").write_text("1")
    for _ in range(3):
        time.sleep(1)
        reports.append(newest())
    assert reports[-1].host.cpus_online == 2
    for then, now in itertools.pairwise(reports):
        ran = now.host.system.run_ns - then.host.system.run_ns
        passed = now.time_ns - then.time_ns
        print(f"{ran} ns run in {passed} ns")
        assert 0 <= ran <= 2.1 * passed
    agent.terminate()
    assert agent.wait() == 0
    print("done")


if __name__ == "__main__":
    main()
