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
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["RULE", "EACH", "FOR", "COOLDOWN", "ACTION", "SEVERITY", "ASKS"]
    assert [line.split()[0] for line in lines[1:]] == [rule.name for rule in shipped()]
    assert "gpu_busy < 0.1 && cpu_cores >= 0.9" in lines[1]
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


def test_list_shows_rules_and_figures() -> None:
    text = run("rules", "list").stdout
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
    assert run(*arguments, "--to", "1m").stdout == "no samples in that time\n"
    assert as_json(*arguments, "--from", "2027-01-15T08:00:25+00:00")["looks"] == 3


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
        assert controller.terminate() == (0, "")


def test_show_without_a_controller_is_one_line() -> None:
    done = run("rules", "show", "--controller", "127.0.0.1:1")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "the controller at 127.0.0.1:1 does not answer" in done.stderr


def test_a_controller_does_not_start_with_bad_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    rules.write_text(BAD)
    serve = ("serve", "--listen", "127.0.0.1:0", "--db", str(tmp_path / "reports.db"))
    done = run(*serve, "--rules", str(rules))
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "line 3: 'when' asks for 'gpu_bsy'" in done.stderr
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
