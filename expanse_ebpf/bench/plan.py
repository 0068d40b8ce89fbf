"""A plan: which workloads are run beside which arms, and when there are enough pairs. Read from TOML."""

from __future__ import annotations

import re
import tomllib
import types
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from expanse_ebpf import config
from expanse_ebpf.bench import plan_checks as checks
from expanse_ebpf.bench.results import OFF
from expanse_ebpf.errors import ConfigError

WorkloadKind = Literal["resnet50", "data_loader", "switches", "launches", "command"]
ArmKind = Literal[
    "collection",
    "gpu_profiler",
    "python_stacks",
    "both",
    "traces_idle",
    "traces_by_rule",
    "traces_on_request",
    "command",
]


@dataclass(frozen=True, slots=True)
class Workload:
    """What is run, again and again. The same amount of work each time; the time is what is measured."""

    name: str
    kind: WorkloadKind
    command: tuple[str, ...] = ()  # of the kind "command"; of the others made from the fields below
    time_pattern: str = ""  # regular expression whose group has the seconds; "": to its exit
    python: str = ""  # interpreter of the kinds in Python; "": the one that runs this kit
    device: Literal["cpu", "cuda"] = "cpu"  # of resnet50
    cpus: int = 0  # threads or workers; 0: as many as there are CPUs
    steps: int = 0  # how much work; 0: the kind's own default
    batch: int = 0  # of resnet50 and data_loader
    images: str = ""  # a folder of images by class, such as Imagenette; "": made up, of the same shape
    library: str = "libcuda.so.1"  # of launches: where the driver's functions are
    rate_hz: int = 10_000  # of launches
    limit_s: float = 3600.0  # a run that takes longer is ended, and failed


@dataclass(frozen=True, slots=True)
class Arm:
    """What runs beside the workload."""

    name: str
    kind: ArmKind
    cpu_counters: bool = True
    # Of the kind "command": started once the job runs, and ended by SIGINT after it. {pid} is the job's first
    # process, {folder} an empty folder that is removed afterwards.
    command: tuple[str, ...] = ()
    rules: str = ""  # of traces_by_rule: a file of rules; "": one that opens a window on any running job
    # More of the agent's settings, by table and name as in its configuration file.
    settings: dict[str, dict[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stopping:
    """When there are enough pairs: the last `centres` estimates lie within `within_points` of each other."""

    min_pairs: int = 8
    max_pairs: int = 40
    centres: int = 3
    within_points: float = 0.5  # percentage points


@dataclass(frozen=True, slots=True)
class Plan:
    """A whole bench."""

    name: str
    workloads: tuple[Workload, ...]
    arms: tuple[Arm, ...]
    seed: int | None = None  # of the order of runs; None: drawn, and recorded
    interval_s: float = 1.0  # between the collector's samples
    settle_s: float = 2.0  # of rest before each run, and for the collector once it is up
    controller: str = ""  # HOST:PORT of a controller elsewhere; "": one beside the agent, on this machine
    stopping: Stopping = field(default_factory=Stopping)


_MOST_BYTES = 1 << 20


def load(path: Path) -> Plan:
    """The plan in a file; raises ConfigError that names the key.

    Files that it names are looked for from the folder in which the plan lies.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(_MOST_BYTES + 1).decode()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"{path}: too long for a plan")
    return _anchored(parse(text, path.name), path.absolute().parent)


def parse(text: str, name: str) -> Plan:
    """The plan in a TOML document called `name`; raises ConfigError that names the key."""
    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise ConfigError(f"{name}: not valid TOML: {error}") from None
    try:
        return _plan(document, Path(name).stem)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    except (OverflowError, ValueError):  # from a whole number that is too long for a float or a message
        raise ConfigError(f"{name}: a number in it is too large") from None


# ---- tables


def _plan(document: dict[str, Any], name: str) -> Plan:
    tables = {"workloads": Workload, "arms": Arm}
    made = _values(Plan, {key: value for key, value in document.items() if key not in tables}, "")
    made.setdefault("name", re.sub(r"[^A-Za-z0-9._-]", "-", name)[:64] or "plan")
    checks.check_name(made["name"], "name")
    if made.get("controller"):
        config.split_address(made["controller"], "controller")
    stopping = made.setdefault("stopping", Stopping())
    if stopping.max_pairs < stopping.min_pairs:
        checks.wrong("stopping.max_pairs", stopping.max_pairs, f"at least min_pairs, {stopping.min_pairs}")
    for key, cls in tables.items():
        content = _table(document.get(key, {}), key)
        if not content:
            raise ConfigError(f"{key}: there is none; write a table [{key}.NAME]")
        made[key] = tuple(_named(cls, each, value, checks.key(key, each)) for each, value in content.items())
    return Plan(**made)


def _named(cls: type[Workload] | type[Arm], name: str, value: Any, where: str) -> Workload | Arm:
    """A workload or an arm."""
    checks.check_name(name, where)
    if cls is Arm and name == OFF:
        raise ConfigError(f"{where}: this is what every arm is compared with; give another name")
    made = _values(cls, value, where)
    if "kind" not in made:
        raise ConfigError(f"{where}.kind: is missing")
    fitting = (checks.OF_WORKLOADS if cls is Workload else checks.OF_ARMS)[made["kind"]] | {"kind"}
    if cls is Workload:
        fitting |= {"limit_s"}
    for key in made.keys() - fitting:
        raise ConfigError(f"{where}.{key}: does not go with the kind {made['kind']!r}")
    if made["kind"] == "command":
        checks.check_command(made.get("command", ()), f"{where}.command", placeholders=cls is Arm)
    checks.check_pattern(made.get("time_pattern", ""), f"{where}.time_pattern")
    checks.check_settings(made.get("settings", {}), f"{where}.settings")
    return cls(name, **made)


def _values(cls: type[Any], content: Any, where: str) -> dict[str, Any]:
    """The fields of `cls` that stand in a table, each of its type and within its limits."""
    kinds = typing.get_type_hints(cls)
    if cls in (Workload, Arm):
        del kinds["name"]  # which is the table's own
    made = {}
    for key, value in _table(content, where).items():
        if key not in kinds:
            known = ", ".join(kinds)
            raise ConfigError(f"{checks.key(where, key)}: no such key; there are {known}")
        made[key] = _value(kinds[key], value, checks.key(where, key))
        if isinstance(made[key], (int, float)):
            checks.check_range(key, made[key], checks.key(where, key))
    return made


def _value(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        return _value(arguments[0], value, where)
    if kind is Stopping:
        return Stopping(**_values(Stopping, value, where))
    if origin is dict:  # settings, which are looked at as a whole
        return {
            table: _table(content, checks.key(where, table))
            for table, content in _table(value, where).items()
        }
    if origin is Literal:
        if value not in arguments:
            checks.wrong(where, value, f"one of {', '.join(arguments)}")
    elif origin is tuple:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            checks.wrong(where, value, "a list of strings")
        return tuple(value)
    elif kind is float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            checks.wrong(where, value, "a number")
    elif not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        checks.wrong(where, value, {str: "a string", int: "a whole number", bool: "true or false"}[kind])
    return value


def _table(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        checks.wrong(where, value, "a table")
    return value


# ---- files


def _anchored(plan: Plan, folder: Path) -> Plan:
    """The plan with every path absolute."""

    def path(text: str) -> str:
        return str(folder / text) if text else ""

    def found(text: str) -> str:  # what has no slash is looked for elsewhere: on PATH, among the libraries
        return path(text) if "/" in text else text

    def command(parts: tuple[str, ...]) -> tuple[str, ...]:
        return (found(parts[0]), *parts[1:]) if parts else ()

    workloads = tuple(
        replace(
            each,
            command=command(each.command),
            python=found(each.python),
            images=path(each.images),
            library=found(each.library),
        )
        for each in plan.workloads
    )
    arms = tuple(replace(each, command=command(each.command), rules=path(each.rules)) for each in plan.arms)
    return replace(plan, workloads=workloads, arms=arms)
