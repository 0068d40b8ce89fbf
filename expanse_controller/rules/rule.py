"""Rules as they stand in a file, checked."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from expanse_controller.errors import ControllerError
from expanse_controller.rules.expression import Expression, ExpressionError
from expanse_controller.rules.figures import FIGURES
from expanse_controller.rules.syntax import line as in_one_line

MAX_BYTES = 64 * 1024
MAX_RULES = 100
MAX_ABOUT = 500
SHIPPED = Path(__file__).parent / "shipped.yaml"

_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
_DURATION = re.compile(r"([0-9]{1,6})(s|m|h|d)")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,6})?")
MAX_FOR_S, MAX_COOLDOWN_S, MAX_WINDOW_S = 86400.0, 30 * 86400.0, 3600.0


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule; docs/rules.md says what its parts mean."""

    name: str
    about: str
    each: str  # job | node
    expression: Expression
    for_s: float
    cooldown_s: float
    action: str  # trace | none
    seconds: float  # of the window; 0: as the nodes have it set
    stacks: bool
    severity: str  # info | warning | critical
    line: int  # of the file, where it begins


class Fault(NamedTuple):
    """What is wrong in a file, and in which line."""

    line: int
    text: str


@dataclass(slots=True)
class Checked:
    """A file's rules; those with a fault are not among them."""

    rules: list[Rule] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)


class _WrongError(ValueError):
    """A value that a key cannot have; the message says which it can."""


def parse(data: bytes) -> Checked:
    """Check the text of a rules file. Never raises for what is in it."""
    import yaml

    found = Checked()
    if len(data) > MAX_BYTES:
        found.faults.append(Fault(1, f"the file is larger than {MAX_BYTES >> 10} KiB"))
        return found
    try:
        root = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
    except UnicodeDecodeError as error:
        found.faults.append(Fault(data.count(b"\n", 0, error.start) + 1, "is not UTF-8"))
        return found
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        words = " ".join(filter(None, (error.problem, error.context)))
        found.faults.append(Fault(mark.line + 1 if mark else 1, f"is no YAML: {in_one_line(words)}"))
        return found
    except RecursionError:
        found.faults.append(Fault(1, "is no YAML: nested too deeply"))
        return found
    except (yaml.YAMLError, ValueError) as error:
        found.faults.append(Fault(1, f"is no YAML: {in_one_line(str(error))}"))
        return found
    if not isinstance(root, yaml.SequenceNode):
        found.faults.append(Fault(1, "the file is not a list of rules: begin each with '- name: …'"))
        return found
    lines: dict[str, int] = {}
    for node in root.value[:MAX_RULES]:
        rule, name, line = _rule(node, found.faults), _name_of(node), node.start_mark.line + 1
        if name in lines:
            found.faults.append(Fault(line, f"there is a rule {name!r} already, in line {lines[name]}"))
            continue
        if name:
            lines[name] = line
        if rule:
            found.rules.append(rule)
    if len(root.value) > MAX_RULES:
        line = root.value[MAX_RULES].start_mark.line + 1
        found.faults.append(Fault(line, f"there are more than {MAX_RULES} rules"))
    found.faults.sort()
    return found


def load(path: Path) -> list[Rule]:
    """The rules of a file. Raises ControllerError with the first fault."""
    found = parse(read(path))
    if found.faults:
        first = found.faults[0]
        more = f" (and {len(found.faults) - 1} more)" if len(found.faults) > 1 else ""
        raise ControllerError(
            f"{path}, line {first.line}: {first.text}{more}; "
            f"expanse-controller rules check {shlex.quote(str(path))} tells all"
        )
    return found.rules


def read(path: Path) -> bytes:
    """A rules file's bytes, no more than need be to see that it is too large. Raises ControllerError."""
    try:
        with path.open("rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise ControllerError(f"{path} cannot be read: {error.strerror}; give another file") from None


def shipped() -> list[Rule]:
    """The rules that come with the controller."""
    return load(SHIPPED)


def duration_s(text: str) -> float | None:
    """A duration like `30s`, `10m`, `2h` or `1d`, in seconds; None when it is none."""
    found = _DURATION.fullmatch(text)
    return float(found[1]) * _UNITS[found[2]] if found else None


# ---- one rule


def _rule(node: Any, faults: list[Fault]) -> Rule | None:
    """The rule that a node of YAML's tree is; None with its faults told where it is none."""
    line, before = node.start_mark.line + 1, len(faults)
    given = _entries(node, "a rule", _KEYS, faults)
    if given is None:
        return None
    faults += [Fault(line, f"{name!r} is missing") for name in ("name", "about", "when") if name not in given]
    window: Mapping[str, Any] = {}
    if "window" in given:
        window = _entries(given["window"], "window", _WINDOW_KEYS, faults) or {}
    scalars = {**{name: given[name] for name in given if name != "window"}, **window}
    values = {name: _value(name, value, faults) for name, value in scalars.items()}
    if values.get("action") == "none" and "window" in given:
        faults.append(Fault(given["window"].start_mark.line + 1, "'window' says nothing with 'action: none'"))
    expression = values.get("when")
    if isinstance(expression, Expression) and values.get("each", "job") == "job":
        for name in expression.names:
            if FIGURES[name].over_nodes == "peers":
                where = given["when"].start_mark.line + 1
                faults.append(Fault(where, f"'when': {name!r} is for rules with 'each: node'"))
    if len(faults) > before:
        return None
    return Rule(
        name=values["name"],
        about=values["about"],
        each=values.get("each", "job"),
        expression=values["when"],
        for_s=values.get("for", 30.0),
        cooldown_s=values.get("cooldown", 600.0),
        action=values.get("action", "trace"),
        seconds=values.get("seconds", 0.0),
        stacks=values.get("stacks", True),
        severity=values.get("severity", "warning"),
        line=line,
    )


def _name_of(node: Any) -> str:
    """The name that a rule has, whatever else is wrong with it; empty: none that a rule may have."""
    for key, value in node.value if node.id == "mapping" else ():
        if key.value == "name" and value.id == "scalar" and _NAME.fullmatch(value.value):
            return str(value.value)
    return ""


def _entries(node: Any, what: str, keys: Mapping[str, Any], faults: list[Fault]) -> dict[str, Any] | None:
    """The nodes in a mapping by their keys, which must be among `keys`; None where it is no mapping."""
    if node.id != "mapping":
        faults.append(Fault(node.start_mark.line + 1, f"{what} is not made of 'key: value'"))
        return None
    found: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        name = key.value if key.id == "scalar" else ""
        if name not in keys:
            known = ", ".join(keys)
            faults.append(Fault(line, f"{what} has no key {in_one_line(str(name))!r}; there are {known}"))
        elif name in found:
            faults.append(Fault(line, f"{name!r} is there twice"))
        else:
            found[name] = value
    return found


def _value(name: str, node: Any, faults: list[Fault]) -> Any:
    """The value of a key, checked; None with the fault told where it cannot be."""
    try:
        if node.id != "scalar":
            raise _WrongError("must be a single value")
        return (_KEYS | _WINDOW_KEYS)[name](node)
    except _WrongError as error:
        faults.append(Fault(node.start_mark.line + 1, f"{name!r} {error}"))
        return None


def _a_name(node: Any) -> str:
    if not _NAME.fullmatch(node.value):
        raise _WrongError("must be of a-z, 0-9 and _, begin with a letter and have at most 64 characters")
    return str(node.value)


def _a_sentence(node: Any) -> str:
    if not 0 < len(node.value) <= MAX_ABOUT or not node.value.isprintable():
        raise _WrongError(f"must be one line of at most {MAX_ABOUT} characters")
    return str(node.value)


def _one_of(words: Sequence[str], node: Any) -> str:
    if node.value not in words:
        raise _WrongError(f"must be one of {', '.join(words)}; it is {in_one_line(node.value)!r}")
    return str(node.value)


def _a_duration(most_s: float, node: Any) -> float:
    seconds = duration_s(node.value)
    if seconds is None:
        raise _WrongError(f"must be a duration like 30s, 10m, 2h or 1d; it is {in_one_line(node.value)!r}")
    if seconds > most_s:
        raise _WrongError(f"must be at most {most_s / 3600:g}h")
    return seconds


def _seconds(node: Any) -> float:
    given = float(node.value) if _NUMBER.fullmatch(node.value) else duration_s(node.value)
    if given is None or not 0 < given <= MAX_WINDOW_S:
        raise _WrongError(
            f"must be above 0s and at most {MAX_WINDOW_S / 3600:g}h, like 25, 25s or 2m; "
            f"it is {in_one_line(node.value)!r}"
        )
    return given


def _a_switch(node: Any) -> bool:
    if node.value not in ("true", "false"):
        raise _WrongError("must be true or false")
    return bool(node.value == "true")


def _an_expression(node: Any) -> Expression:
    try:
        shares = {name for name, figure in FIGURES.items() if figure.is_share}
        return Expression(node.value, {name: one.is_number for name, one in FIGURES.items()}, shares)
    except ExpressionError as error:
        raise _WrongError(str(error)) from None


_KEYS: dict[str, Callable[[Any], Any]] = {
    "name": _a_name,
    "about": _a_sentence,
    "each": partial(_one_of, ("job", "node")),
    "when": _an_expression,
    "for": partial(_a_duration, MAX_FOR_S),
    "cooldown": partial(_a_duration, MAX_COOLDOWN_S),
    "action": partial(_one_of, ("trace", "none")),
    "window": _a_sentence,  # a mapping, see _WINDOW_KEYS
    "severity": partial(_one_of, ("info", "warning", "critical")),
}
_WINDOW_KEYS: dict[str, Callable[[Any], Any]] = {"seconds": _seconds, "stacks": _a_switch}
