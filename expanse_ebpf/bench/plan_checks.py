"""What in a plan makes sense: which fields go together, and within which limits.

All here raise ConfigError that begins with the key, `where`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from expanse_ebpf import config
from expanse_ebpf.errors import ConfigError
from expanse_ebpf.text import clean

# Which fields go with which kind, beside those that go with all of them.
OF_WORKLOADS: dict[str, frozenset[str]] = {
    "resnet50": frozenset({"python", "device", "cpus", "steps", "batch", "images"}),
    "data_loader": frozenset({"python", "cpus", "steps", "batch"}),
    "switches": frozenset({"python", "cpus", "steps"}),
    "launches": frozenset({"python", "library", "rate_hz", "steps"}),
    "command": frozenset({"command", "time_pattern"}),
}
_COLLECTOR: Final = frozenset({"cpu_counters", "settings"})
OF_ARMS: dict[str, frozenset[str]] = {
    "collection": _COLLECTOR,
    "gpu_profiler": _COLLECTOR,
    "python_stacks": _COLLECTOR,
    "both": _COLLECTOR,
    "traces_idle": _COLLECTOR,
    "traces_by_rule": _COLLECTOR | {"rules"},
    "traces_on_request": _COLLECTOR,
    "command": frozenset({"command"}),
}
LIMITS: dict[str, tuple[float, float]] = {
    "cpus": (0, 65536),
    "steps": (0, 10**12),
    "batch": (0, 65536),
    "rate_hz": (1, 10**7),
    "limit_s": (0.1, 7 * 86400),
    "interval_s": (0.1, 3600),
    "settle_s": (0, 3600),
    "seed": (0, 2**32 - 1),
    # The statistics' levels were found within these: see docs/benchmark-statistics.md.
    "min_pairs": (5, 10_000),
    "max_pairs": (5, 10_000),
    "centres": (2, 5),
    "within_points": (0.001, 100),
}
# What the bench sets: a node's name, socket and folder for each run, the plan's interval and controller.
_OWN_SETTINGS = {
    "agent": {"interval_s", "socket", "state_dir", "node_name"},
    "controller": {"address"},
}
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")


def wrong(where: str, value: object, wanted: str) -> NoReturn:
    """Raise the ConfigError for a value that is not what is wanted."""
    raise ConfigError(f"{where}: {value!r:.60} is not {wanted}")


def key(where: str, name: str) -> str:
    """The key `name` in the table `where`, as a person reads it."""
    shown = name if _NAME.fullmatch(name) else f"{name!r:.60}"
    return f"{where}.{shown}" if where else shown


def check_range(name: str, value: float, where: str) -> None:
    """A number within its limits, if the field `name` has any."""
    low, high = LIMITS.get(name, (value, value))
    if not low <= value <= high:
        wrong(where, value, f"between {low:g} and {high:g}")


def check_name(name: str, where: str) -> None:
    """A name that can be a folder's, a job's and a column's."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"{where}: a name has 1 to 64 of the characters A-Z a-z 0-9 . _ -")


def check_command(command: Sequence[str], where: str, *, placeholders: bool) -> None:
    """A program and its arguments; an arm's may have placeholders."""
    if not command or not command[0]:
        raise ConfigError(f"{where}: is missing; give the program and its arguments")
    for number, part in enumerate(command):
        if "\0" in part:
            wrong(where, part, "something that an argument can be")
        found = set(_PLACEHOLDER.findall(part)) if placeholders else set()
        if found - {"pid", "folder"}:
            wrong(where, part, "filled in: only {pid} and {folder} are")
        if found and number == 0:
            wrong(where, part, "a program; placeholders stand in its arguments")


def check_pattern(pattern: str, where: str) -> None:
    """A regular expression with exactly one group."""
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{where}: {pattern!r:.60} is not a regular expression: {error}") from None
    if pattern and groups != 1:
        wrong(where, pattern, f"a regular expression with one group, for the seconds; it has {groups}")


def check_settings(settings: Mapping[str, Mapping[str, object]], where: str) -> None:
    """Settings of the agent, by the configuration's own rules."""
    values = {}
    for table, content in settings.items():
        if table not in config.TABLES:
            known = ", ".join(config.TABLES)
            raise ConfigError(f"{key(where, table)}: no such table of the configuration; there are {known}")
        for name, value in content.items():
            place = key(key(where, table), name)
            if name in _OWN_SETTINGS.get(table, ()):
                raise ConfigError(f"{place}: the bench sets this one itself")
            if not isinstance(value, (str, bool, int, float, list)):
                wrong(place, value, "a setting")
            values[f"{table}.{name}"] = value
    try:
        config.load(Path(os.devnull), {}, values)
    except ConfigError as error:
        raise ConfigError(f"{where}.{clean(str(error))}") from None
