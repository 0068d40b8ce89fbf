"""Devices at which a worker hung or crashed, and when each is to be asked again."""

from __future__ import annotations

from collections.abc import Collection

_RARELY_S = 300.0  # the longest pause


class Suspects:
    """By UUID, or "index N" of one that could not be opened.

    Each time that it happens again, the pause is twice as long; the first is twice `first_s`.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._found: dict[str, tuple[int, float, float]] = {}  # what happened, the pause, when it is over

    def __contains__(self, uuid: str) -> bool:
        return uuid in self._found

    def add(self, uuid: str, code: int, now: float) -> None:
        """`code` is reasons.HUNG or reasons.CRASHED."""
        _, pause_s, _ = self._found.get(uuid, (0, self._first_s, 0.0))
        pause_s = min(2 * pause_s, max(_RARELY_S, self._first_s))
        self._found[uuid] = (code, pause_s, now + pause_s)

    def clear(self, uuid: str) -> None:
        """It has answered."""
        self._found.pop(uuid, None)

    def keep(self, uuids: Collection[str]) -> None:
        """Forget all but these."""
        self._found = {uuid: found for uuid, found in self._found.items() if uuid in uuids}

    def due(self, at: float) -> str | None:
        """The one that is to be asked again at that time, the one that waits the longest."""
        again, uuid = min(((again, uuid) for uuid, (_, _, again) in self._found.items()), default=(at, None))
        return uuid if again <= at else None

    @property
    def codes(self) -> dict[str, int]:
        """What happened at each."""
        return {uuid: code for uuid, (code, _, _) in self._found.items()}
