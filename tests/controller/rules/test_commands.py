"""`expanse-controller rules …` and the options of `serve`, as their user sees them."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from expanse_controller.rules.figures import FIGURES
from expanse_controller.rules.rule import SHIPPED, shipped
from expanse_controller.store import Item, Store
from tests.controller.process import COMMAND, Controller, client, eventually, node, up
from tests.controller.rules.made import LOOK, report, sample

BAD = "- name: a\n  about: b\n  when: gpu_bsy > 1\n  for: 3w\n"
ALWAYS = "- name: always\n  about: b\n  when: gpus > 1\n  for: 0s\n  action: none\n"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)
    assert "Traceback" not in done.stderr
    return done


def as_json(*arguments: str) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


def test_check_tells_each_fault_and_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(BAD)
    done = run("rules", "check", str(file))
    assert (done.returncode, done.stderr) == (1, "")
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{file}:3: 'when' asks for 'gpu_bsy'")
    assert second.startswith(f"{file}:4: 'for' must be a duration")
    done = run("rules", "check", str(file), "--json")
    assert done.returncode == 1
    assert [fault["line"] for fault in json.loads(done.stdout)["faults"]] == [3, 4]


def test_check_shows_the_rules_of_a_good_file() -> None:
    done = run("rules", "check", str(SHIPPED))
    assert done.returncode == 0
    told = done.stdout.split("\n\n")
    assert [one.partition(":")[0] for one in told] == [rule.name for rule in shipped()]
    assert told[0].splitlines() == [
        "gpu_idle_cpu_busy: The GPUs stand still while the CPUs work.",
        "  each job; for 2m; cooldown 30m; window of 25s with stacks; warning",
        "    gpus >= 1.0 && gpu_busy < 0.1 && cpu_cores >= 0.9",
    ]
    found = as_json("rules", "check", str(SHIPPED))
    assert found["faults"] == []
    assert found["rules"][0]["for_s"] == 120
    assert found["rules"][0]["window"] == {"seconds": 25, "stacks": True}


def test_check_of_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run("rules", "check", str(tmp_path / "absent"))
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: {tmp_path}/absent cannot be read: No such file or directory; give another file\n"
    )


def test_what_a_window_does_not_set_is_null(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text("- name: a\n  about: b\n  when: gpus > 1\n")
    (found,) = as_json("rules", "check", str(file))["rules"]
    assert found["window"] == {"seconds": None, "stacks": True}


@pytest.mark.parametrize("command", [(), ("serve",), ("rules",), ("rules", "dry-run"), ("rules", "show")])
def test_help_fits_a_terminal_and_its_sentences_are_whole(command: tuple[str, ...]) -> None:
    text = run(*command, "--help").stdout
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in text.partition("\n")[2]


def test_list_shows_rules_and_figures() -> None:
    text = run("rules", "list").stdout
    assert max(map(len, text.splitlines())) <= 80
    for rule in shipped():
        begin = text.index(f"{rule.name}: ")
        asked = [line for line in text[begin:].split("\n\n")[0].splitlines() if line.startswith("    ")]
        assert " ".join(line.strip() for line in asked) == rule.expression.source
        assert all(line.strip().startswith(("&&", "||")) for line in asked[1:])
    assert all(name in text for name in (*FIGURES, *(rule.name for rule in shipped())))
    found = as_json("rules", "list")
    assert [one["name"] for one in found["figures"]] == list(FIGURES)


def test_dry_run_over_a_store(tmp_path: Path) -> None:
    store, rules = Store(tmp_path / "reports.db"), tmp_path / "rules.yaml"
    rules.write_text(ALWAYS)
    for turn in range(6):
        made = report(LOOK * turn, sample(LOOK * turn, key="run/evil\x1b[2J", gpus=2))
        store.write([Item(node(), made, made.time_ns)])
    store.close()
    arguments = ("rules", "dry-run", "--db", str(store.path), "--rules", str(rules))
    found = as_json(*arguments)
    ((fired,), (state,)) = found["fired"], found["states"]
    assert (fired["rule"], fired["job"], fired["nodes"]) == ("always", "run/evil\x1b[2J", ["gpu001"])
    assert fired["evidence"] == {"gpus": 2.0}
    assert (state["firing_s"], state["ok_s"], state["no_data_s"]) == (60, 0, 0)
    text = run(*arguments).stdout
    assert "\x1b" not in text
    assert "2027-01-15 08:00:00Z  always" in text
    assert text.startswith("2027-01-15 08:00:00Z to 2027-01-15 08:00:50Z, looked at 6 times, every 10s\n")
    assert " 1m " in text
    assert run(*arguments, "--to", "1m").stdout == "no samples in that time\n"
    assert as_json(*arguments, "--from", "2027-01-15T08:00:25+00:00")["looks"] == 3


def test_dry_run_tells_in_one_line_what_has_no_data(tmp_path: Path) -> None:
    store, rules = Store(tmp_path / "reports.db"), tmp_path / "rules.yaml"
    rules.write_text(ALWAYS.replace("gpus > 1", "gpus > 1.0 && throttled < 0.5"))
    for turn in range(6):
        jobs = [sample(LOOK * turn, key=f"slurm/{n}", run=n, processes=1) for n in (1, 2)]
        jobs += [sample(LOOK * turn, key="slurm/3", run=3, gpus=2)]
        jobs += [sample(LOOK * turn, key="slurm/4", run=4, gpus=2, throttled=0.1)]
        made = report(LOOK * turn, *jobs)
        store.write([Item(node(), made, made.time_ns)])
    store.close()
    dry = ("rules", "dry-run", "--db", str(store.path), "--rules", str(rules))
    text = run(*dry).stdout
    last = text.splitlines()[-1]
    assert last == "no data: 2 jobs hold no known GPU; 1 job, not known: throttled (--all lists them)"
    assert "slurm/4" in text
    assert not any(f"slurm/{n}" in text for n in (1, 2, 3))
    everything = run(*dry, "--all").stdout
    assert all(f"slurm/{n}" in everything for n in (1, 2, 3, 4))
    assert "no data:" not in everything
    one = run(*dry, "--job", "slurm/2").stdout.splitlines()
    assert one[-2].split() == ["RULE", "JOB", "FIRING", "NO_DATA", "OK", "REASON"]
    assert one[-1].split(None, 5) == ["always", "slurm/2", "0s", "1m", "0s", "holds no known GPU"]
    assert [state["job"] for state in as_json(*dry, "--job", "slurm/2")["states"]] == ["slurm/2"]
    assert run(*dry, "--job", "slurm/9").stdout == "no samples of slurm/9 in that time\n"
    assert "is not a job's key" in run(*dry, "--job", "9").stderr


def test_a_time_that_is_none_is_refused() -> None:
    done = run("rules", "dry-run", "--from", "yesterday")
    assert done.returncode == 2
    assert "'yesterday' is neither a time (2026-01-31T12:00) nor an age (90m)" in done.stderr


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    done = run("rules", "dry-run", "--db", str(tmp_path / "absent.db"))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "is not there" in done.stderr


@pytest.mark.slow
def test_show_tells_how_rules_stand_with_a_running_controller(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(ALWAYS)
    with (
        Controller(tmp_path / "reports.db", "--rules", str(rules)) as controller,
        client(controller.address) as nodes,
    ):
        nodes.send(up(report(0, sample(0, gpus=2))), hello=node())
        (state,) = eventually(lambda: as_json("rules", "show", "--controller", controller.address)["states"])
        assert (state["rule"], state["job"], state["state"]) == ("always", "slurm/7", "firing")
        assert state["evidence"] == {"gpus": 2.0}
        assert "always" in run("rules", "show", "--controller", controller.address).stdout
        absent = run("rules", "show", "--controller", controller.address, "--job", "slurm/8").stdout
        assert absent == "no rule has looked at slurm/8 yet\n"
        assert controller.terminate() == (0, "")


def test_show_without_a_controller_is_one_line() -> None:
    done = run("rules", "show", "--controller", "127.0.0.1:1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr == (
        "error: controller 127.0.0.1:1 cannot be reached: connection refused; check the address and that "
        "expanse-controller serve runs there\n"
    )


def test_a_controller_does_not_start_with_bad_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(BAD)
    serve = ("serve", "--listen", "127.0.0.1:0", "--db", str(tmp_path / "reports.db"))
    done = run(*serve, "--rules", str(rules))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "line 3: 'when' asks for 'gpu_bsy'" in done.stderr
    assert f"expanse-controller rules check {rules} tells all" in done.stderr
    done = run(*serve, "--rules", str(rules), "--no-rules")
    assert done.returncode == 2
    assert "exclude each other" in done.stderr


def test_a_controller_without_rules_has_no_states(tmp_path: Path) -> None:
    with Controller(tmp_path / "reports.db", "--no-rules") as controller:
        assert as_json("rules", "show", "--controller", controller.address) == {"states": []}
        assert "cel" not in Path(f"/proc/{controller.process.pid}/maps").read_text()
        assert run("rules", "show", "--controller", controller.address).stdout.startswith("no rule has")


@pytest.mark.slow
def test_the_shipped_rules_are_looked_at_unless_others_are_given(tmp_path: Path) -> None:
    with Controller(tmp_path / "reports.db") as controller, client(controller.address) as nodes:
        nodes.send(up(report(0, sample(0, gpus=2))), hello=node())
        found = eventually(lambda: as_json("rules", "show", "--controller", controller.address)["states"])
        assert {one["rule"] for one in found} == {rule.name for rule in shipped()}
        assert controller.terminate() == (0, "")
