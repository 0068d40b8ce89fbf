"""Which nodes are there, and which of them claim the same name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from expanse_controller.store import Boot, Newest

MIN_SILENCE_S = 5.0
CONFLICT_S = 60.0
LISTED_S = 24 * 3600.0
LABEL_CHARACTERS = 8  # of an installation's id


def age_s(newest: Newest, now_ns: int) -> float:
    """Seconds since the node's newest report came."""
    return max(0.0, (now_ns - newest.received_ns) / 1e9)


def is_silent(newest: Newest, now_ns: int) -> bool:
    """Whether the node has missed two reports (and 5 s)."""
    return age_s(newest, now_ns) > max(MIN_SILENCE_S, 2 * newest.current.interval_ns / 1e9)


def conflicts(boots: Sequence[Boot], now_ns: int) -> set[str]:
    """Names that more than one installation reported under within the last minute."""
    heard = Counter(
        boot.identity.name for boot in boots if boot.newest and age_s(boot.newest, now_ns) <= CONFLICT_S
    )
    return {name for name, installations in heard.items() if installations > 1}


def labelled(name: str, install_id: str) -> str:
    """The name of one of several installations that have it."""
    return f"{name} ({install_id[:LABEL_CHARACTERS]})"
