"""How much each node may bring in."""

from __future__ import annotations

from dataclasses import dataclass

# Nodes that are remembered; past it, those that have used nothing lately are forgotten.
MAX_NODES = 10_000

Node = tuple[str, str]  # name, installation


@dataclass(slots=True)
class _Account:
    left: float
    at: float  # when that much was left


class Allowance:
    """Bytes that a node may send: `per_second` steadily, and `reserve` at once after a pause.

    The reserve is for what has waited with a node while the controller could not be reached.
    """

    def __init__(self, per_second: float, reserve: float) -> None:
        self._per_second = per_second
        self._reserve = reserve
        self._accounts: dict[Node, _Account] = {}

    def take(self, node: Node, size: int, now: float) -> bool:
        """Take `size` bytes if `node` has them left at `now`, in seconds; whether it had."""
        if len(self._accounts) > MAX_NODES:
            self._accounts = {n: a for n, a in self._accounts.items() if self._left(a, now) < self._reserve}
        account = self._accounts.setdefault(node, _Account(self._reserve, now))
        account.left, account.at = self._left(account, now), now
        if account.left < size:
            return False
        account.left -= size
        return True

    def charge(self, node: Node, size: int, now: float) -> None:
        """Take `size` bytes whether or not `node` has them left; it may owe some then."""
        account = self._accounts.setdefault(node, _Account(self._reserve, now))
        account.left, account.at = self._left(account, now) - size, now

    def left(self, node: Node, now: float) -> int:
        """How many bytes `node` may take at `now`, 0 when it owes some."""
        account = self._accounts.get(node)
        return max(0, int(self._left(account, now) if account else self._reserve))

    def _left(self, account: _Account, now: float) -> float:
        return min(self._reserve, account.left + (now - account.at) * self._per_second)
