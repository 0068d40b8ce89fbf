"""Looking at all jobs by all rules, now and then: how each rule stands, and what is to be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from expanse_controller.rules.expression import KNOWN, EvaluationError, context
from expanse_controller.rules.figures import reading
from expanse_controller.rules.history import History, JobReading, NodeReading, newest
from expanse_controller.rules.rule import Rule
from expanse_controller.rules.subject import Part, Subject, of_all, of_each
from expanse_controller.windows import USUAL_S
from expanse_ebpf.wire.collector_pb2 import JOB_STATE_ENDED, Evidence, Report, RuleState, TraceRequest

LOOK_S = 10.0  # so often
# A node's figures are of now until its newest report is so old, or three reports.
SILENT_S = 30.0
# A node that was silent for so long has no part in its jobs any more.
GONE_S = 300.0
MAX_JOBS = 50_000  # that are looked at, each node's counted by itself
MAX_STATES_BYTES = 3 << 20  # of states that are told of: an answer has to fit gRPC's 4 MiB
MAX_FIRED = 100_000  # firings that are remembered for their cooldown
# From the end of a window to the next that another rule may open for the same job: nodes make a rule wait for
# `tracing.pause_s` (60 s), from the end that they have seen, and a window that they refuse costs a cooldown.
BETWEEN_S = 75.0
RETRY_S = 60.0  # after a window that could not be opened

FIRING, OK, NO_DATA = "firing", "ok", "no_data"
STATES = (FIRING, NO_DATA, OK)  # in the order in which they are told


class NodeView(NamedTuple):
    """A node's last two reports, and how long ago the newer one came."""

    name: str
    install_id: str
    previous: Report | None
    current: Report
    age_s: float


class Firing(NamedTuple):
    """A rule that has become true for a job, and the window that it asks for."""

    rule: Rule
    key: str  # of the job
    run_by_node: Mapping[str, int]
    nodes: tuple[str, ...]
    request: TraceRequest  # seconds, stacks, rule, evidence and key are filled in; id and start are not


@dataclass(slots=True)
class _Standing:
    """How a rule stands with a job, or with its part on a node."""

    state: str
    since_ns: int  # wall clock, as all times here
    true_since_ns: int | None = None
    reason: str = ""
    evidence: tuple[Evidence, ...] = ()  # of the last firing
    window: str = ""


_Place = tuple[int, str, str]  # of a standing: the rule's number, the job's key, the node


class Engine:
    """All rules, and how each stands with each job.

    `look` belongs to one thread at a time; `states` and `counts` give what the last look made of it, in any.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)
        self.fired: Counter[str] = Counter()  # by rule
        self.errors: Counter[str] = Counter()  # evaluations that failed, by rule
        self.overlooked = 0  # jobs past MAX_JOBS in it
        self._names = {
            each: {name for rule in rules if rule.each == each for name in rule.expression.names}
            for each in ("job", "node")
        }
        self._optional = {name for rule in rules for name in rule.expression.optional}
        self._history = History()
        self._standings: dict[_Place, _Standing] = {}
        self._fired: dict[tuple[str, str], tuple[int, _Place]] = {}  # by rule and job: when and where
        self._busy: dict[str, tuple[int, int]] = {}  # jobs with a window by a rule: from and until when

    def look(self, nodes: Iterable[NodeView], now_ns: int) -> list[Firing]:
        """Evaluate all rules against the newest figures; the windows to be opened now.

        Each becomes true in `states` too, as do rules that open none. `now_ns`: wall clock.
        """
        views = [node for node in nodes if node.age_s <= GONE_S]
        for node in views:
            if node.previous is not None and not self._history.knows((node.name, node.install_id)):
                self._history.spans(_read(node, node.previous))
        fired = self.step((_read(node, node.current) for node in views), now_ns)
        return [firing for firing in fired if firing.rule.action == "trace"]

    def opened(self, firing: Firing, window_id: str) -> None:
        """The window that `firing` asked for has been opened."""
        standing = self._standing(firing)
        if standing is not None:
            standing.window, standing.reason = window_id, ""

    def refused(self, firing: Firing, reason: str) -> None:
        """It has not, for this reason. The rule may fire again soon, whatever its cooldown."""
        self._busy.pop(firing.key, None)
        place = (firing.rule.name, firing.key)
        if place in self._fired:
            at_ns, where = self._fired[place]
            self._fired[place] = at_ns - round(max(0.0, firing.rule.cooldown_s - RETRY_S) * 1e9), where
        standing = self._standing(firing)
        if standing is not None:
            standing.reason = reason

    def states(self) -> list[RuleState]:
        """How the rules stand: what fires first, then what has no data; at most MAX_STATES_BYTES."""
        found = sorted(self._standings.items(), key=lambda item: (STATES.index(item[1].state), item[0]))
        told, room = [], MAX_STATES_BYTES
        for (number, key, node), standing in found:
            state = RuleState(
                rule=self.rules[number].name,
                key=key,
                node=node,
                state=standing.state,
                reason=standing.reason,
                since_ns=standing.since_ns,
                evidence=standing.evidence if standing.state == FIRING else (),
                window=standing.window,
            )
            room -= state.ByteSize()
            if room < 0:
                break
            told.append(state)
        return told

    def standings(self) -> Iterator[tuple[tuple[str, str, str], str, str]]:
        """Rule, job and node (empty: the job as a whole), the state, and why it is so."""
        for (number, key, node), standing in self._standings.items():
            yield (self.rules[number].name, key, node), standing.state, standing.reason

    def counts(self) -> Counter[tuple[str, str]]:
        """How many jobs (or nodes of jobs) there are by rule and state."""
        return Counter((rule, state) for (rule, _, _), state, _ in self.standings())

    def step(self, nodes: Iterable[NodeReading], now_ns: int) -> list[Firing]:
        """As `look`, of what was read from reports already; with the rules that open no window."""
        jobs = self._jobs(nodes)
        self._forget(now_ns)
        standings: dict[_Place, _Standing] = {}
        fired = [
            firing for key, parts in jobs.items() for firing in self._look_at(key, parts, now_ns, standings)
        ]
        self._standings = standings
        return fired

    # ---- one look

    def _jobs(self, nodes: Iterable[NodeReading]) -> dict[str, list[Part]]:
        taken, self.overlooked = newest(nodes, MAX_JOBS)
        jobs: dict[str, list[Part]] = {}
        for node in taken:
            is_silent = node.age_s > max(SILENT_S, 3 * node.interval_s)
            for job, span in self._history.spans(node):
                jobs.setdefault(job.key, []).append(Part(node.name, job.run, span, is_silent, node.age_s))
        self._history.keep({(node.name, node.install_id) for node in taken})
        return jobs

    def _forget(self, now_ns: int) -> None:
        cooldown_ns = {rule.name: rule.cooldown_s * 1e9 for rule in self.rules}
        self._fired = {
            place: fired
            for place, fired in list(self._fired.items())[-MAX_FIRED:]
            if 0 <= now_ns - fired[0] < cooldown_ns[place[0]]
        }
        self._busy = {key: span for key, span in self._busy.items() if span[0] <= now_ns < span[1]}

    def _look_at(
        self, key: str, parts: Sequence[Part], now_ns: int, standings: dict[_Place, _Standing]
    ) -> list[Firing]:
        subjects = self._subjects(parts)
        made: dict[int, Any] = {}  # contexts by subject: one may stand for the job and for its only node
        firings = []
        for number, rule in enumerate(self.rules):
            for node, subject in subjects[rule.each]:
                place = (number, key, node)
                standing = self._standings.get(place) or _Standing(OK, now_ns)
                standings[place] = standing
                reason, is_true = subject.reason(rule.expression.figures), False
                if not reason:
                    if id(subject) not in made:
                        made[id(subject)] = context(subject.values, self._optional)
                    try:
                        is_true = rule.expression.evaluate(made[id(subject)])
                    except EvaluationError as error:
                        self.errors[rule.name] += 1
                        reason = f"cannot be evaluated: {error}"
                _stand(standing, rule, is_true, reason, now_ns)
                if standing.state == FIRING and self._is_due(rule, key, standing, now_ns):
                    standing.evidence = _evidence(rule, subject, node)
                    standing.reason = ""
                    self._fired.pop((rule.name, key), None)
                    self._fired[rule.name, key] = now_ns, place
                    self.fired[rule.name] += 1
                    firings.append(_firing(rule, key, parts, standing.evidence))
        return firings

    def _subjects(self, parts: Sequence[Part]) -> dict[str, list[tuple[str, Subject]]]:
        """What the rules look at, by their `each`: nodes and figures."""
        names = self._names
        if len(parts) == 1:
            one = of_all(parts, names["job"] | names["node"])
            return {"job": [("", one)], "node": [(parts[0].node, one)]}
        each = of_each(parts, names["node"]) if names["node"] else []
        return {
            "job": [("", of_all(parts, names["job"]))],
            "node": [(part.node, one) for part, one in zip(parts, each, strict=False)],
        }

    def _is_due(self, rule: Rule, key: str, standing: _Standing, now_ns: int) -> bool:
        """Whether a rule that is true does something now; a job that gets a window is busy from now on."""
        if (rule.name, key) in self._fired:
            return False
        if rule.action != "trace":
            return True
        if key in self._busy:
            standing.reason = "waits until another window of this job has ended"
            return False
        self._busy[key] = now_ns, now_ns + int(((rule.seconds or USUAL_S) + BETWEEN_S) * 1e9)
        return True

    def _standing(self, firing: Firing) -> _Standing | None:
        _, place = self._fired.get((firing.rule.name, firing.key), (0, None))
        return self._standings.get(place) if place else None


def _stand(standing: _Standing, rule: Rule, is_true: bool, reason: str, now_ns: int) -> None:
    """What this look makes of a rule's state. `reason`: why there are no data; empty: there are."""
    state = OK
    if reason or not is_true:
        standing.true_since_ns = None
        state = NO_DATA if reason else OK
    else:
        if standing.true_since_ns is None or standing.true_since_ns > now_ns:  # the clock was set back
            standing.true_since_ns = now_ns
        if now_ns - standing.true_since_ns >= rule.for_s * 1e9:
            state = FIRING
    if state != standing.state:
        standing.state, standing.since_ns, standing.reason = state, now_ns, ""
    if state == NO_DATA:
        standing.reason = reason


def _evidence(rule: Rule, subject: Subject, node: str) -> tuple[Evidence, ...]:
    """The figures that the rule asks for, as they are now, and the node if it looks at each."""
    found = [Evidence(name="node", text=node)] if node else []
    for name in rule.expression.names:
        value = subject.values.get(name)
        if value is None:
            found.append(Evidence(name=name, text=f"not {KNOWN}"))
        elif isinstance(value, bool):
            found.append(Evidence(name=name, text=str(value).lower()))
        else:
            found.append(Evidence(name=name, value=value))
    return tuple(found)


def _firing(rule: Rule, key: str, parts: Sequence[Part], evidence: Sequence[Evidence]) -> Firing:
    request = TraceRequest(
        key=key, seconds=rule.seconds, stacks=rule.stacks, rule=rule.name, evidence=evidence
    )
    run_by_node = {part.node: part.run for part in parts}
    return Firing(rule, key, run_by_node, tuple(sorted(run_by_node)), request)


def _read(node: NodeView, report: Report) -> NodeReading:
    jobs = [
        JobReading(f"{s.identity.scheduler}/{s.identity.id}", s.identity.run, reading(s))
        for s in report.jobs
        if s.state != JOB_STATE_ENDED
    ]
    return NodeReading(node.name, node.install_id, report.time_ns, report.interval_ns / 1e9, node.age_s, jobs)
