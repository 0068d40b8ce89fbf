"""CPUs that go and come, clocks that stop and jump, and many CPUs: no gap in the sums, no absurd rate."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.guests.conftest import Node

Make = Callable[..., Node]

INSIDE = "/payload/files/inside"
matrix = pytest.mark.matrix


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [
        ("6.12", "amd64"),
        pytest.param("5.10", "amd64", marks=matrix),
        pytest.param("6.1", "amd64", marks=matrix),
        pytest.param("newest", "amd64", marks=matrix),
        pytest.param("6.1", "arm64", marks=matrix),
        pytest.param("6.12", "arm64", marks=matrix),
    ],
)
def test_nothing_is_lost_or_counted_twice_when_a_cpu_goes_and_comes(
    kernel: str, arch: str, guest: Make
) -> None:
    """Seen to go or not, with the switch hook and without, and with an agent that starts in between."""
    node = guest(kernel=kernel, arch=arch, cpus=3)
    result = node.run(["python3", f"{INSIDE}/cpus.py", "hook", "late", "owned"]).check()
    assert result.output.endswith("done\n")


@pytest.mark.parametrize(
    ("kernel", "arch"),
    [("6.12", "arm64"), *(pytest.param(k, "amd64", marks=matrix) for k in ("5.10", "6.12"))],
)
def test_the_agent_follows_cpus_and_clocks(kernel: str, arch: str, guest: Make) -> None:
    """Also when the wall clock is set. A stop of the machine it merely outlives: its clocks stop as well."""
    node = guest(kernel=kernel, arch=arch, cpus=3)
    with node.start(["python3", f"{INSIDE}/cpus_agent.py", "hotplug", "stopped", "stepped"]) as running:
        running.wait_for("stop me")
        running.pause(5)
        result = running.finish().check()
    assert result.output.endswith("done\n")


@pytest.mark.parametrize("kernel", ["6.12", pytest.param("5.10", marks=matrix)])
def test_the_agent_outlives_a_suspend_to_ram(kernel: str, guest: Make) -> None:
    """Its clock stops, the wall clock does not, and all CPUs but one go and come on the way."""
    node = guest(kernel=kernel, cpus=3)
    result = node.run(["python3", f"{INSIDE}/cpus_agent.py", "asleep"]).check()
    assert result.output.endswith("done\n")


@matrix
def test_sixteen_cpus(guest: Make) -> None:
    node = guest(kernel="6.12", cpus=16, limit_s=600)
    result = node.run(["python3", f"{INSIDE}/cpus.py", "hook", "owned"]).check()
    assert result.output.endswith("done\n")


@matrix
def test_the_agent_on_sixteen_cpus(guest: Make) -> None:
    node = guest(kernel="6.12", arch="arm64", cpus=16, limit_s=600)
    result = node.run(["python3", f"{INSIDE}/cpus_agent.py", "hotplug"]).check()
    assert result.output.endswith("done\n")


@matrix
@pytest.mark.parametrize("script", ["cpus.py late hook", "cpus_agent.py hotplug"])
def test_more_cpus_can_come_than_there_are(script: str, guest: Make) -> None:
    """Tables by CPU have room for all that are possible."""
    name, *kinds = script.split()
    node = guest(kernel="6.12", cpus=16, parameters="maxcpus=2")
    result = node.run(["python3", f"{INSIDE}/{name}", *kinds]).check()
    assert result.output.endswith("done\n")


@matrix
def test_a_cpu_that_fails_to_come_up_has_not_run_since_the_beginning_of_time(guest: Make) -> None:
    node = guest(kernel="6.1", cpus=2, parameters="maxcpus=1")
    result = node.run(["python3", f"{INSIDE}/cpus_failed.py"]).check()
    assert result.output.endswith("done\n")
