"""What a window may cost the threads that it traces: probes come off when they have cost too much.

Pure: times and costs go in, decisions come out. The allowance is a line over the window's time,

    allowance(t) = cost_share * (t + burst(t)),    burst(t) = BURST_S * (1 - t / SETTLED_S), 0 after SETTLED_S

so that short windows of cheap programs are not cut, and from SETTLED_S on the share is that of the whole
window. A thread cannot pay more than all its time. So whoever asks again within `wait_s` is at most
`cost_share * BURST_S` over the line, whatever the program does: 1.2 times the share after SETTLED_S, and
less later.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

BURST_S = 1.0
SETTLED_S = 5.0
SHORTEST_ON_S = 0.05  # probes that come back stay for so long at least, at the rate that is known
_SWITCHES_AT_LEAST = 4  # what probes that come back may cost, in units of what bringing them back costs
_LONGEST_WAIT_S = 0.1
_SHORTEST_WAITS_S = (0.001, 0.05)
_MEMORY_S = 0.1  # after so much time with probes in place, most of the known rate is of that time


class Decision(Enum):
    """What is to be done with the probes now."""

    KEEP = "keep"  # as they are
    ATTACH = "attach"
    DETACH = "detach"
    CLOSE = "close"  # the window is over


class Span(NamedTuple):
    """Seconds on the caller's clock between which the probes were in place."""

    from_s: float
    to_s: float


class CostBudget:
    """The budget of one window of `seconds`: `cost_share` of its time, of the thread that paid most.

    `over_cost` tells what happens over it: the probes come off until they can be back for a while
    ("cycle"), or the window is over ("close"). `switch_s` is what taking the probes off and on again costs
    a thread; it may be set anew when that has been measured. `foreign_share` is the same as `cost_share` for
    processes of other jobs, which nobody has asked; 0: the same share.
    """

    def __init__(
        self,
        cost_share: float,
        over_cost: str,
        seconds: float,
        switch_s: float = 0.0,
        foreign_share: float = 0.0,
    ) -> None:
        if not 0 < cost_share <= 1:
            raise ValueError(f"a share of the time is between 0 and 1, not {cost_share}")
        if over_cost not in ("cycle", "close"):
            raise ValueError(f'over the cost a window does "cycle" or "close", not "{over_cost}"')
        self.switch_s = switch_s
        self.cut = ""  # why the window was over before its time
        # Seconds after which update() wants to be asked again, at the latest. 0: when it is done.
        self.wait_s = 0.0
        self._share, self._over_cost, self._seconds = cost_share, over_cost, seconds
        self._foreign_weight = cost_share / foreign_share if foreign_share else 1.0
        low, high = _SHORTEST_WAITS_S
        self._shortest_wait_s = min(max(cost_share * BURST_S, low), high)
        self._spans: list[Span] = []
        self._attached_at: float | None = None
        self._from_s: float | None = None
        self._now_s = 0.0
        self._cost_s = self._foreign_s = self._switched_s = 0.0
        self._rate: float | None = None  # cost per second with the probes in place

    def update(
        self, now_s: float, worst_thread_cost_s: float, foreign_cost_s: float, attached: bool
    ) -> Decision:
        """What is to be done. Costs are seconds since the window began, of the thread that paid most and of
        all processes of other jobs together, which are given no more than it. The first call begins the
        window; `attached` tells whether the probes are in place now.
        """
        if self._from_s is None:
            self._from_s = self._now_s = now_s
        passed = max(now_s - self._now_s, 0.0)
        self._now_s += passed
        before = self._paid_s
        self._cost_s = max(self._cost_s, worst_thread_cost_s)
        self._foreign_s = max(self._foreign_s, foreign_cost_s)
        if attached and self._attached_at is not None and passed:
            self._learn((self._paid_s - before) / passed, passed)
        self._note(attached)
        decision = self._decide(attached)
        self.wait_s = self._wait(decision, attached)
        return decision

    @property
    def elapsed_s(self) -> float:
        """How long the window has been open."""
        return 0.0 if self._from_s is None else self._now_s - self._from_s

    @property
    def left_s(self) -> float:
        """What may still be spent now; below 0 where it was too much."""
        elapsed = self.elapsed_s
        burst = BURST_S * max(1 - elapsed / SETTLED_S, 0.0)
        return self._share * (elapsed + burst) - self._paid_s - self._switched_s

    @property
    def cost_share(self) -> float:
        """The share of the window's time that the thread paid that paid most."""
        return self._cost_s / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def traced_share(self) -> float:
        """The share of the window's time with the probes in place."""
        traced = sum(span.to_s - span.from_s for span in self.spans)
        return traced / self.elapsed_s if self.elapsed_s else 0.0

    @property
    def spans(self) -> list[Span]:
        """When the probes were in place, up to now."""
        if self._attached_at is None:
            return list(self._spans)
        return [*self._spans, Span(self._attached_at, self._now_s)]

    @property
    def _paid_s(self) -> float:
        """What has been spent of the allowance, in a traced thread's seconds."""
        return max(self._cost_s, self._foreign_s * self._foreign_weight)

    def _learn(self, rate: float, seconds: float) -> None:
        weight = 1.0 if self._rate is None else min(seconds / _MEMORY_S, 1.0)
        self._rate = rate * weight + (self._rate or 0.0) * (1 - weight)

    def _note(self, attached: bool) -> None:
        if attached and self._attached_at is None:
            self._attached_at = self._now_s
            if self._spans:  # the first time is the window's own, and cannot be saved
                self._switched_s += self.switch_s
        elif not attached and self._attached_at is not None:
            self._spans.append(Span(self._attached_at, self._now_s))
            self._attached_at = None

    def _decide(self, attached: bool) -> Decision:
        ends_in = self._seconds - self.elapsed_s
        if ends_in <= 0:
            return Decision.CLOSE
        if attached:
            if self.left_s > self._reserve_s:
                return Decision.KEEP
            if self._over_cost == "cycle":
                return Decision.DETACH
            self.cut = self._too_much()
            return Decision.CLOSE
        if not self._spans:
            return Decision.ATTACH
        lasts = ends_in >= SHORTEST_ON_S + self.switch_s
        return Decision.ATTACH if lasts and self.left_s >= self._wanted_s else Decision.KEEP

    @property
    def _reserve_s(self) -> float:
        """What is still spent, at the known rate, if the probes stay: until the next look and in going."""
        return (self._rate or 0.0) * (self._shortest_wait_s + self.switch_s)

    @property
    def _wanted_s(self) -> float:
        """What must be there for the probes to be worth bringing back."""
        on = max((self._rate or 0.0) * SHORTEST_ON_S, self.switch_s * _SWITCHES_AT_LEAST)
        return self.switch_s + on + self._reserve_s

    def _wait(self, decision: Decision, attached: bool) -> float:
        if decision is not Decision.KEEP:
            return 0.0
        if attached:
            # What is left can be spent by one thread in so long at the soonest. Others may be many threads.
            wait = self.left_s / max(1.0, self._rate or 0.0)
        else:
            wait = (self._wanted_s - self.left_s) / self._share
        return min(max(wait, self._shortest_wait_s), _LONGEST_WAIT_S, self._seconds - self.elapsed_s)

    def _too_much(self) -> str:
        foreign = self._foreign_s * self._foreign_weight > self._cost_s
        whose = "processes of other jobs" if foreign else "a thread"
        share = (self._foreign_s if foreign else self._cost_s) / self.elapsed_s if self.elapsed_s else 1.0
        allowed = self._share / self._foreign_weight if foreign else self._share
        return f"it cost {whose} {share:.2%} of the time, {allowed:.2%} are allowed"
