"""What can be the name of a device, for the worker and the agent alike."""

from __future__ import annotations

from typing import Any

from expanse_ebpf.text import clean

MAX_TEXT = 128  # characters of a name


def identifier(value: Any) -> str:
    """`value` when it can be the name of a device, else an empty text."""
    return value if isinstance(value, str) and value == clean(value, MAX_TEXT) else ""


def by_index(index: int) -> str:
    """What a device is called that has no other name yet."""
    return f"index {index}"


def has_index_alone(name: str) -> bool:
    """Whether it is one of by_index()."""
    return name.startswith("index ")
