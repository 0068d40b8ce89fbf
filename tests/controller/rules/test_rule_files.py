"""Files of rules: every fault is told with its line, and none of them is an exception."""

from __future__ import annotations

from pathlib import Path

import pytest

from expanse_controller.errors import ControllerError
from expanse_controller.rules import rule
from expanse_controller.rules.rule import Fault, parse

GOOD = """\
- name: idle
  about: It does nothing.
  each: node
  when: >-
    cpu_cores < 0.1
    && peers_cpu_cores > 1.0
  for: 5m
  cooldown: 2h
  action: trace
  window: {seconds: 12.5, stacks: false}
  severity: critical
"""
LEAST = "- name: a\n  about: b\n  when: gpus > 1\n"


def test_a_rule_has_what_the_file_says() -> None:
    (one,) = parse(GOOD.encode()).rules
    assert (one.name, one.about, one.each) == ("idle", "It does nothing.", "node")
    assert one.expression.source == "cpu_cores < 0.1 && peers_cpu_cores > 1.0"
    assert (one.for_s, one.cooldown_s, one.action) == (300, 7200, "trace")
    assert (one.seconds, one.stacks, one.severity, one.line) == (12.5, False, "critical", 1)


def test_what_a_rule_does_not_say_has_a_default() -> None:
    (one,) = parse(LEAST.encode()).rules
    assert (one.each, one.for_s, one.cooldown_s, one.action) == ("job", 30, 600, "trace")
    assert (one.seconds, one.stacks, one.severity) == (0, True, "warning")


@pytest.mark.parametrize(
    ("text", "line", "said"),
    [
        ("", 1, "not a list of rules"),
        ("rules: []", 1, "not a list of rules"),
        ("- 3", 1, "is not made of 'key: value'"),
        (LEAST + "  colour: red\n", 4, "no key 'colour'; there are name, about"),
        (LEAST + "  name: c\n", 4, "'name' is there twice"),
        (LEAST + "- name: a\n  about: c\n  when: gpus > 2\n", 4, "a rule 'a' already, in line 1"),
        (LEAST + "  for: 3w\n", 4, "'for' must be a duration like 30s"),
        (LEAST + "  for: 2d\n", 4, "'for' must be at most 24h"),
        (LEAST + "  cooldown: -1m\n", 4, "'cooldown' must be a duration"),
        (LEAST + "  each: rack\n", 4, "'each' must be one of job, node; it is 'rack'"),
        (LEAST + "  action: kill\n", 4, "'action' must be one of trace, none"),
        (LEAST + "  severity: bad\n", 4, "'severity' must be one of info, warning, critical"),
        (LEAST + "  window: 25\n", 4, "window is not made of"),
        (
            LEAST + "  window:\n    seconds: 0\n",
            5,
            "'seconds' must be above 0s and at most 1h, like 25, 25s or 2m; it is '0'",
        ),
        (LEAST + "  window:\n    seconds: .nan\n", 5, "'seconds' must be above 0s"),
        (LEAST + "  window:\n    seconds: 2h\n", 5, "'seconds' must be above 0s and at most 1h"),
        (LEAST + "  window:\n    stacks: maybe\n", 5, "'stacks' must be true or false"),
        (LEAST + "  window:\n    depth: 3\n", 5, "window has no key 'depth'; there are seconds, stacks"),
        (LEAST + "  action: none\n  window: {seconds: 3}\n", 5, "with 'action: none'"),
        ("- name: a\n  when: gpus > 1\n", 1, "'about' is missing"),
        ("- name: Bad name\n  about: b\n  when: gpus > 1\n", 1, "'name' must be of a-z"),
        ("- name: a\n  about: [b]\n  when: gpus > 1\n", 2, "'about' must be a single value"),
        ("- name: a\n  about: b\n  when: gpus >\n", 3, "'when' is no CEL expression: column 7"),
        ("- name: a\n  about: b\n  when: gpu_bsy > 1\n", 3, "did you mean 'gpu_busy'?"),
        ("- name: a\n  about: b\n  when: throttled > 50\n", 3, "compares throttled with 50"),
        ("- name: a\n  about: b\n  when: gpus + 1.0\n", 3, "'when' cannot be evaluated"),
        ("- name: a\n  about: b\n  when: peers_gpu_busy > 1\n", 3, "is for rules with 'each: node'"),
        ("- name: a\n\tabout: b\n", 2, "is no YAML"),
        ("- a\n---\n- b\n", 2, "is no YAML"),
        ("- !!python/object/apply:os.system [x]\n", 1, "is not made of"),
        ("- " * 2_000, 1, "nested too deeply"),
        ("- name: a\n" + "# " + "x" * 70_000, 1, "larger than 64 KiB"),
    ],
)
def test_a_fault_is_told_with_its_line(text: str, line: int, said: str) -> None:
    found = parse(text.encode())
    assert [fault.line for fault in found.faults if said in fault.text] == [line], found.faults


def test_bytes_that_are_no_text_are_a_fault() -> None:
    assert parse(b"- name: a\n  about: \xff\n").faults == [Fault(2, "is not UTF-8")]
    assert "is no YAML" in parse(b"\0").faults[0].text


def test_all_faults_are_told_and_good_rules_stay() -> None:
    found = parse((LEAST + "- name: b\n  about: c\n  when: gpus\n  for: x\n" + GOOD).encode())
    assert [fault.line for fault in found.faults] == [6, 7]
    assert [one.name for one in found.rules] == ["a", "idle"]


@pytest.mark.parametrize(("given", "seconds"), [("25", 25), ("25s", 25), ("25m", 1500), ("12.5", 12.5)])
def test_the_length_of_a_window_is_written_as_other_durations_or_in_seconds(
    given: str, seconds: float
) -> None:
    found = parse((LEAST + f"  window: {{seconds: {given}}}\n").encode())
    assert ([one.seconds for one in found.rules], found.faults) == ([seconds], [])


@pytest.mark.parametrize("first_has_it", [True, False])
def test_a_name_given_twice_is_told_whatever_else_is_wrong(first_has_it: bool) -> None:
    rules = [LEAST, LEAST + "  for: 3w\n"]
    found = parse("".join(reversed(rules) if first_has_it else rules).encode())
    told = [fault.text for fault in found.faults]
    assert any("'for' must be" in text for text in told)
    assert any("there is a rule 'a' already, in line 1" in text for text in told)
    assert len(told) == 2


def test_there_are_not_too_many() -> None:
    text = "".join(f"- {{name: r{n}, about: b, when: gpus > 1}}\n" for n in range(102))
    found = parse(text.encode())
    assert (len(found.rules), found.faults) == (100, [Fault(101, "there are more than 100 rules")])


def test_a_file_with_a_fault_gives_no_rules_and_one_line(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(LEAST + "  for: x\n  each: y\n")
    with pytest.raises(ControllerError, match=r"rules\.yaml, line 4: .*and 1 more") as error:
        rule.load(file)
    assert str(error.value).endswith(f"; expanse-controller rules check {file} tells all")
    with pytest.raises(ControllerError, match="cannot be read: No such file"):
        rule.load(tmp_path / "absent.yaml")
    file.write_text("[]")
    assert rule.load(file) == []
