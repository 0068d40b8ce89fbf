"""The collector as an arm: from the plan to the agent's settings, and from the store to figures."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from expanse_ebpf import config
from expanse_ebpf.bench import collector, settings, store
from expanse_ebpf.bench.plan import Arm, ArmKind, Plan
from expanse_ebpf.errors import ConfigError, UnavailableError

S = 1_000_000_000


def plan(**fields: Any) -> Plan:
    return Plan("plan", (), (), **{"interval_s": 0.2, "settle_s": 0.0, **fields})


def loaded(folder: Path, arm: Arm, *, closely: bool = False, window_s: float = 0.0) -> config.Config:
    """The configuration that the agent of an arm has."""
    file = folder / "config.toml"
    tables = settings.of_arm(plan(), arm, folder, "bench-1", "h:1", closely=closely, window_s=window_s)
    file.write_text(settings.toml(tables))
    return config.load(file, environment={})


@pytest.mark.parametrize(
    ("kind", "python", "traces", "profiler"),
    [
        ("collection", False, False, False),
        ("gpu_profiler", False, False, True),
        ("python_stacks", True, False, False),
        ("both", True, False, True),
        ("traces_idle", False, True, False),
        ("traces_by_rule", False, True, False),
        ("traces_on_request", False, True, False),
    ],
)
def test_an_arm_switches_on_what_its_name_says_and_nothing_else(
    tmp_path: Path, kind: ArmKind, python: bool, traces: bool, profiler: bool
) -> None:
    of = loaded(tmp_path, Arm("arm", kind))
    assert (of.sources.python, of.sources.traces, of.gpu.profiler) == (python, traces, profiler)
    assert of.cpu == config.CpuConfig()
    assert (of.agent.interval_s, of.agent.node_name, of.controller.address) == (0.2, "bench-1", "h:1")
    for path in (of.agent.socket, of.agent.state_dir):
        assert Path(path).parent == tmp_path


def test_counters_can_be_left_out_and_bpf_run_time_is_measured_when_watched_closely(tmp_path: Path) -> None:
    of = loaded(tmp_path, Arm("arm", "collection", cpu_counters=False), closely=True)
    assert of.cpu == config.CpuConfig(counters=(), bpf_stats="always")


def test_the_plans_own_settings_come_last(tmp_path: Path) -> None:
    more: dict[str, dict[str, object]] = {
        "python": {"rate_hz": 97, "jobs": ["run/*"]},
        "cpu": {"hierarchy": 'a "quoted" \\ näme\x7f\n', "bpf_stats": "off"},
    }
    arm = Arm("arm", "python_stacks", settings=more)
    of = loaded(tmp_path, arm)
    assert (of.python.rate_hz, of.python.jobs) == (97, ("run/*",))
    assert (of.cpu.hierarchy, of.cpu.bpf_stats) == ('a "quoted" \\ näme\x7f\n', "off")
    assert loaded(tmp_path, arm, closely=True).cpu.bpf_stats == "always"


def test_a_window_may_be_as_long_as_is_asked_for(tmp_path: Path) -> None:
    arm = Arm("arm", "traces_on_request")
    assert loaded(tmp_path, arm, window_s=20).tracing == config.TracingConfig()
    assert loaded(tmp_path, arm, window_s=400).tracing.max_window_s == 400


def test_numbers_and_switches_stay_what_they_are() -> None:
    tables: dict[str, dict[str, object]] = {"a": {"b": True, "c": 1, "d": 0.5, "e": []}, "f": {}}
    assert tomllib.loads(settings.toml(tables)) == tables


def test_the_rule_is_one_that_the_controller_takes(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(settings.RULES)
    command = [sys.executable, "-m", "expanse_controller", "rules", "check", str(file)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    ("length_s", "at", "expected"),
    [
        (3.0, [0.5, 1.5, 2.5], (3, 3, 1.0)),
        (3.0, [0.5, 2.5], (3, 2, 2.0)),  # one was lost
        (3.0, [0.9, 1.9], (3, 2, 1.1)),  # the last was
        (3.5, [0.2, 1.2, 2.2, 3.2], (4, 4, 1.0)),  # one more than is due at the least
        (3.5, [0.7, 1.7, 2.7], (3, 3, 1.0)),
        (3.0, [0.999, 1.999, 3.05], (3, 3, 1.051)),  # a little late is not lost
        (3.0, [-0.4, 0.6, 1.6, 2.6, 3.6], (3, 3, 1.0)),  # before and after it there was no job
        (3.0, [1.6, 2.6], (3, 2, 1.6)),  # the first was
        (3.0, [], (3, 0, None)),
        (0.5, [0.2], (1, 1, 0.3)),
        (0.5, [], (0, 0, None)),
        (2.0, [0.1, 0.2, 0.3, 0.4, 1.4], (3, 5, 1.0)),  # more than can be
    ],
)
def test_samples_are_counted_against_those_that_were_due(
    length_s: float, at: list[float], expected: tuple[int, int, float | None]
) -> None:
    start = 1_700_000_000 * S
    times = [start + round(s * S) for s in at]
    due, received, gap_s = store.arrived(start, start + round(length_s * S), 1.0, times)
    assert (due, received, gap_s and round(gap_s, 6)) == expected


def test_run_time_is_that_between_two_looks_for_each_second_of_the_job() -> None:
    before = {"a": (5 * S, 100 * S), "b": (0, 100 * S)}
    after = {"a": (6 * S, 110 * S), "b": (2 * S, 104 * S), "new": (S, 10 * S), "off": (7, 0)}
    assert store.run_time(before, after, job_s=8.0) == pytest.approx((1 + 2 + 1) / 8)
    assert store.run_time(before, before, job_s=8.0) is None


def test_settings_that_the_agent_does_not_know_are_refused_before_it_starts(tmp_path: Path) -> None:
    arm = Arm("arm", "collection", settings={"cpu": {"nonsense": 1}})
    with (
        pytest.raises(ConfigError, match=r"cpu\.nonsense: no such setting"),
        collector.running(plan(), arm, tmp_path, "bench-1", closely=False, expected_s=None),
    ):
        pass


def test_a_controller_that_does_not_come_up_is_named_with_its_last_line(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text("- name: Nonsense\n")
    arm = Arm("arm", "traces_by_rule", rules=str(rules))
    with (
        pytest.raises(UnavailableError, match=r"the controller does not come up: .*rules\.yaml"),
        collector.running(plan(), arm, tmp_path, "bench-1", closely=False, expected_s=None),
    ):
        pass


def test_an_agent_that_does_not_come_up_is_named_with_its_last_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    arm = Arm("arm", "collection", settings={"agent": {"socket": str(tmp_path / "file" / "socket")}})
    with (
        pytest.raises(UnavailableError, match=r"the agent does not come up: exit code 1: .*file"),
        collector.running(plan(), arm, tmp_path, "bench-1", closely=False, expected_s=None),
    ):
        pass


def test_what_the_environment_sets_is_not_an_arms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXPANSE_AGENT_SOCKET", "/proc/nowhere")
    with collector.running(
        plan(), Arm("arm", "collection"), tmp_path, "bench-1", closely=False, expected_s=None
    ) as running:
        assert (tmp_path / "agent.sock").is_socket()
        agent, controller = running.children
        assert not agent.ended
        assert not controller.ended
    for child in running.children:
        assert not Path(f"/proc/{child.pid}").exists()
