"""The engine: `for`, `cooldown`, states, evidence, and what it does not let itself be broken by."""

from __future__ import annotations

import gc
import json
import math
import os
from pathlib import Path

import pytest

from expanse_controller.rules import engine as module
from expanse_controller.rules.engine import Engine
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED
from tests.controller.rules.made import LOOK, SECOND, Cluster, report, rule, rules, sample, view

BUSY = "cpu_cores > 1.0"


def two_rules(first: str = BUSY, second: str = BUSY) -> str:
    rest = "about: x, for: 0s, cooldown: 5m, window: {seconds: 25}"
    return "".join(
        f"- {{name: {name}, {rest}, when: {json.dumps(when)}}}\n"
        for name, when in (("first", first), ("second", second))
    )


def test_a_firing_has_all_that_a_window_needs() -> None:
    cluster = Cluster(rule(BUSY, window="{seconds: 12.5, stacks: false}"))
    job = {"cpu_cores": 2.0}
    cluster.look({"gpu001": [{**job, "run": 5}], "gpu002": [{**job, "run": 6}]})
    (firing,) = cluster.look({"gpu001": [{**job, "run": 5}], "gpu002": [{**job, "run": 6}]})
    assert (firing.rule.name, firing.key) == ("made", "slurm/7")
    assert firing.run_by_node == {"gpu001": 5, "gpu002": 6}
    assert firing.nodes == ("gpu001", "gpu002")
    request = firing.request
    assert (request.key, request.rule, request.seconds, request.stacks) == ("slurm/7", "made", 12.5, False)
    assert (request.id, request.start_ns, request.node, request.run) == ("", 0, "", 0)
    ((name, value),) = [(e.name, e.value) for e in request.evidence]
    assert (name, value) == ("cpu_cores", pytest.approx(4.0))


def test_evidence_has_every_figure_of_the_expression_at_that_moment() -> None:
    cluster = Cluster(rule("(gpus > 1 || held_idle) && has(known.loading) && known.loading > 0.1"))
    (firing,) = cluster.looks(2, gpus=2, loading=0.5)
    found = {e.name: e.value if e.HasField("value") else e.text for e in firing.request.evidence}
    assert found == {"gpus": 2.0, "held_idle": "false", "loading": pytest.approx(0.5)}
    assert list(cluster.state().evidence) == list(firing.request.evidence)
    cluster = Cluster(rule("gpus > 1 && !has(known.loading)"))
    (firing,) = cluster.looks(1, gpus=2)
    assert {e.name: e.text for e in firing.request.evidence} == {"gpus": "", "loading": "not known"}


def test_the_condition_must_hold_at_every_look_for_so_long() -> None:
    cluster = Cluster(rule(BUSY, **{"for": "30s"}))
    cluster.looks(1, cpu_cores=2.0)  # no rate yet
    for _ in range(3):  # it is true for 0, 10 and 20 s
        assert cluster.looks(1, cpu_cores=2.0) == []
        assert cluster.state().state == "ok"
    assert len(cluster.looks(1, cpu_cores=2.0)) == 1
    assert (cluster.state().state, cluster.state().since_ns) == ("firing", cluster.now_ns)


def test_one_look_at_which_it_does_not_hold_begins_the_time_anew() -> None:
    cluster = Cluster(rule("gpus > 1", **{"for": "30s"}))
    cluster.looks(3, gpus=2)
    cluster.looks(1, gpus=1)
    assert cluster.looks(3, gpus=2) == []
    assert len(cluster.looks(1, gpus=2)) == 1


def test_a_look_without_data_is_told_and_begins_the_time_anew() -> None:
    cluster = Cluster(rule("gpus > 1", **{"for": "30s"}))
    cluster.looks(3, gpus=2)
    cluster.looks(1)
    assert (cluster.state().state, cluster.state().reason) == ("no_data", "holds no known GPU")
    since = cluster.state().since_ns
    cluster.looks(1)
    assert cluster.state().since_ns == since
    assert cluster.looks(3, gpus=2) == []
    assert cluster.state().state == "ok"
    assert len(cluster.looks(1, gpus=2)) == 1
    cluster.looks(1)
    assert cluster.state().state == "no_data"


def test_it_fires_again_after_its_cooldown_and_not_before() -> None:
    cluster = Cluster(rule("gpus > 1", cooldown="2m"))
    fired = [bool(cluster.looks(1, gpus=2)) for _ in range(25)]
    assert [i for i, is_fired in enumerate(fired) if is_fired] == [0, 12, 24]
    assert cluster.state().since_ns == cluster.now_ns - 24 * LOOK * SECOND
    assert cluster.engine.fired == {"made": 3}


def test_a_cooldown_goes_on_while_the_rule_is_not_true_or_the_job_away() -> None:
    cluster = Cluster(rule("gpus > 1", cooldown="2m"))
    assert cluster.looks(1, gpus=2)
    cluster.looks(1, gpus=1)
    cluster.look({"gpu001": []})
    assert cluster.engine.states() == []
    assert not any(cluster.looks(1, gpus=2) for _ in range(9))
    assert cluster.looks(1, gpus=2)


def test_each_job_has_a_cooldown_of_its_own() -> None:
    cluster = Cluster(rule("gpus > 1"))
    one, two = {"key": "slurm/1", "gpus": 2}, {"key": "slurm/2", "gpus": 2}
    assert [f.key for f in cluster.look({"gpu001": [one]})] == ["slurm/1"]
    assert [f.key for f in cluster.look({"gpu001": [one, two]})] == ["slurm/2"]


def test_one_job_has_one_window_at_a_time() -> None:
    cluster = Cluster(rules(two_rules("gpus > 1", "gpus > 1")))
    (firing,) = cluster.looks(1, gpus=2)
    cluster.engine.opened(firing, "0123456789abcdef")
    first, second = cluster.engine.states()
    assert (first.rule, first.window, first.reason) == ("first", "0123456789abcdef", "")
    assert (second.state, second.window) == ("firing", "")
    assert second.reason == "waits until another window of this job has ended"
    assert not any(cluster.looks(1, gpus=2) for _ in range(9))  # 25 s, and what nodes make a rule wait
    (firing,) = cluster.looks(1, gpus=2)
    assert firing.rule.name == "second"
    cluster.engine.opened(firing, "f" * 16)
    assert [(s.window, s.reason) for s in cluster.engine.states()] == [
        ("0123456789abcdef", ""),
        ("f" * 16, ""),
    ]


def test_a_window_whose_length_is_left_to_the_nodes_is_waited_for_as_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "BETWEEN_S", 0.0)
    text = two_rules("gpus > 1", "gpus > 1").replace(", window: {seconds: 25}", "")
    cluster = Cluster(rules(text))
    fired = [[firing.rule.name for firing in cluster.looks(1, gpus=2)] for _ in range(4)]
    assert fired == [["first"], [], [], ["second"]]


def test_a_refusal_is_told_and_makes_room_for_another_rule() -> None:
    cluster = Cluster(rules(two_rules("gpus > 1", "gpus > 1")))
    (firing,) = cluster.looks(1, gpus=2)
    cluster.engine.refused(firing, "no node has it")
    (other,) = cluster.looks(1, gpus=2)
    assert other.rule.name == "second"
    assert cluster.engine.states()[0].reason == "no node has it"
    assert cluster.looks(1, gpus=2) == []


def test_a_rule_whose_window_was_refused_fires_again_before_its_cooldown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_S", 25.0)
    cluster = Cluster(rule("gpus > 1", cooldown="1h"))
    (firing,) = cluster.looks(1, gpus=2)
    cluster.engine.refused(firing, "a window of the job is open already")
    fired = [len(cluster.looks(1, gpus=2)) for _ in range(4)]
    assert fired == [0, 0, 1, 0]


def test_a_rule_without_an_action_fires_and_opens_nothing() -> None:
    cluster = Cluster(rule("gpus > 1", action="none"))
    assert cluster.looks(3, gpus=2) == []
    assert (cluster.state().state, cluster.engine.fired) == ("firing", {"made": 1})
    assert [e.value for e in cluster.state().evidence] == [2.0]


def test_a_rule_that_looks_at_each_node_tells_of_the_node_and_traces_all() -> None:
    cluster = Cluster(rule("cpu_cores < 0.5 * peers_cpu_cores", each="node", cooldown="1m"))
    nodes = {"a": [{"cpu_cores": 2.0}], "b": [{"cpu_cores": 0.2}], "c": [{"cpu_cores": 2.0}]}
    cluster.look(nodes)
    assert {s.state for s in cluster.engine.states()} == {"no_data"}
    (firing,) = cluster.look(nodes)
    assert firing.nodes == ("a", "b", "c")
    assert (firing.request.evidence[0].name, firing.request.evidence[0].text) == ("node", "b")
    assert [(s.node, s.state) for s in cluster.engine.states()] == [("b", "firing"), ("a", "ok"), ("c", "ok")]
    cluster.engine.opened(firing, "a" * 16)
    assert [s.window for s in cluster.engine.states()] == ["a" * 16, "", ""]


def test_two_peers_are_needed() -> None:
    cluster = Cluster(rule("cpu_cores < 0.5 * peers_cpu_cores", each="node"))
    for _ in range(2):
        cluster.look({"a": [{"cpu_cores": 2.0}], "b": [{"cpu_cores": 0.1}]})
    assert {(s.state, s.reason) for s in cluster.engine.states()} == {
        ("no_data", "not known: peers_cpu_cores")
    }


def test_a_figure_that_one_node_lacks_is_not_known_of_the_job() -> None:
    cluster = Cluster(rule("cpu_cores < 9.0"))
    for _ in range(2):
        cluster.look({"a": [{"cpu_cores": 2.0}], "b": [{}]})
    assert (cluster.state().state, cluster.state().reason) == ("no_data", "not known: cpu_cores (of b)")


def test_a_silent_node_makes_no_data_until_it_is_gone() -> None:
    cluster = Cluster(rule("gpus > 1"))
    old, new = report(100, sample(100, gpus=2)), report(200, sample(200, gpus=2))

    def look(age_s: float) -> None:
        cluster.engine.look([view("a", old, age_s), view("b", new)], cluster.now_ns)

    look(20)
    assert cluster.state().state == "firing"
    look(31)
    assert (cluster.state().state, cluster.state().reason) == ("no_data", "not known: gpus (of a)")
    look(301)
    assert cluster.state().state == "firing"
    by_age = Engine(rule("age_s > 60.0"))
    by_age.look([view("a", old, 61)], 0)
    assert by_age.states()[0].state == "firing"


def test_a_report_that_came_before_gives_a_rate_at_the_first_look() -> None:
    engine = Engine(rule(BUSY))
    before, now = report(100, sample(100, cpu_cores=2.0)), report(110, sample(110, cpu_cores=2.0))
    assert len(engine.look([view("a", now, previous=before)], 0)) == 1


def test_jobs_that_have_ended_are_not_looked_at() -> None:
    cluster = Cluster(rule("gpus > 1"))
    assert cluster.looks(2, gpus=2, state=JOB_STATE_ENDED) == []
    assert cluster.engine.states() == []


def test_one_rule_that_cannot_be_evaluated_does_not_stop_the_others() -> None:
    cluster = Cluster(rules(two_rules("int(cpu_cores * 1e15) > 1", BUSY)))
    for _ in range(2):
        cluster.looks(1, cpu_cores=1e6)
    first, second = sorted(cluster.engine.states(), key=lambda state: state.rule)
    assert first.state == "no_data"
    assert first.reason.startswith("cannot be evaluated: ")
    assert second.state == "firing"
    assert cluster.engine.errors == {"first": 1}


@pytest.mark.parametrize("share", [math.nan, math.inf, -math.inf, 1e308])
def test_figures_that_cannot_be_are_no_data(share: float) -> None:
    cluster = Cluster(rule("python_hottest_share < 1.0"))
    cluster.looks(2, hottest=share)
    assert cluster.state().state == "no_data"


def test_largest_counters_break_nothing() -> None:
    engine = Engine(rule("cpu_cores < 0.0 || gpus < 0.0 || throttled < 0.0", each="node"))
    for t in (100, 110):
        huge = sample(t, cpu_cores=1.0, gpus=1, throttled=1.0)
        huge.cpu_ns = huge.gpu.throttled_ns = 2**64 - 1
        engine.look([view(name, report(t, huge)) for name in ("a", "b", "c")], t * SECOND)
    assert {s.state for s in engine.states()} == {"no_data"}


def test_a_clock_that_goes_back_does_not_fire_early() -> None:
    cluster = Cluster(rule("gpus > 1", **{"for": "30s"}))
    cluster.looks(2, gpus=2)
    cluster.t = 50.0
    assert cluster.looks(3, gpus=2) == []
    assert len(cluster.looks(1, gpus=2)) == 1
    cluster.t = 50.0
    assert cluster.looks(1, gpus=1) == []
    assert len(cluster.looks(4, gpus=2)) == 1


def test_states_are_told_with_those_that_fire_first_and_not_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cluster = Cluster(rule("gpus > 1"))
    cluster.look(
        {"gpu001": [{"key": f"slurm/{n}", **({"gpus": n} if n else {})} for n in range(4)]},
    )
    assert [(s.key, s.state) for s in cluster.engine.states()] == [
        ("slurm/2", "firing"),
        ("slurm/3", "firing"),
        ("slurm/0", "no_data"),
        ("slurm/1", "ok"),
    ]
    assert cluster.engine.counts() == {("made", "firing"): 2, ("made", "no_data"): 1, ("made", "ok"): 1}
    three = sum(state.ByteSize() for state in cluster.engine.states()[:3])
    monkeypatch.setattr(module, "MAX_STATES_BYTES", three)
    assert [s.state for s in cluster.engine.states()] == ["firing", "firing", "no_data"]
    monkeypatch.setattr(module, "MAX_STATES_BYTES", three - 1)
    assert [s.state for s in cluster.engine.states()] == ["firing", "firing"]


def test_jobs_past_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_JOBS", 3)
    cluster = Cluster(rule("gpus > 1"))
    jobs = [{"key": f"slurm/{n}", "gpus": 1} for n in range(4)]
    cluster.look({"a": jobs, "b": jobs[:2]})
    assert (len(cluster.engine.states()), cluster.engine.overlooked) == (2, 4)


@pytest.mark.slow
def test_memory_is_that_of_the_newest_jobs() -> None:
    engine = Engine(rules(two_rules("gpus > 1", "cpu_cores < 0.5")))
    reports = []
    for turn in range(4):
        numbers = range(turn * 10_000, (turn + 1) * 10_000)
        t = 100 + LOOK * turn
        reports.append(report(t, *(sample(t, key=f"slurm/{n}", run=n, gpus=2) for n in numbers)))
    used = []
    for one in reports:
        engine.look([view("a", one)], one.time_ns)
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
        used.append(resident)
    assert (len(engine._standings), engine._history.readings()) == (20_000, 10_000)
    # What remains of earlier jobs is when they fired, for their cooldown: some 4 MB of 10,000.
    assert used[-1] - used[1] < 15_000_000


def test_firings_are_forgotten_after_their_cooldown(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(rule("gpus > 1", cooldown="1m"))
    for n in range(20):
        cluster.look({"a": [{"key": f"slurm/{n}", "gpus": 2}]})
    assert len(cluster.engine._fired) == 6
    monkeypatch.setattr(module, "MAX_FIRED", 2)
    cluster.look({"a": []})
    assert len(cluster.engine._fired) == 2
