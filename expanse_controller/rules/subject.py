"""What a rule is asked about: a job, or a job's part on one node, with its figures."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from expanse_controller.rules.figures import FIGURES, GPUS, PEERS, Span, medians_of_others, of_job

NAMED = 3  # nodes that a reason names at most
NO_GPU = "holds no known GPU"


class Part(NamedTuple):
    """A job on one node."""

    node: str
    run: int
    span: Span
    is_silent: bool  # its newest report is too old to say anything of now
    age_s: float


class Subject(NamedTuple):
    """Figures that are known, and of those that are not the nodes that they are missing from."""

    values: dict[str, float | bool]
    missing: Mapping[str, Sequence[str]]
    has_no_gpu: bool = False  # none that is known, on any of its nodes

    def reason(self, names: frozenset[str]) -> str:
        """Which of the figures are not known, in words; empty: all are."""
        if names <= self.values.keys():
            return ""
        absent = sorted(names - self.values.keys())
        if self.has_no_gpu and any(FIGURES[name].is_gpu for name in absent):
            return NO_GPU
        nodes = list(dict.fromkeys(node for name in absent for node in self.missing.get(name, ())))
        more = f" and {len(nodes) - NAMED} more" if len(nodes) > NAMED else ""
        where = f" (of {', '.join(nodes[:NAMED])}{more})" if nodes else ""
        return f"not known: {', '.join(absent)}{where}"


def of_all(parts: Sequence[Part], names: Collection[str]) -> Subject:
    """The job, with those of the figures `names` that it can have."""
    values: dict[str, float | bool] = {
        "nodes": float(len(parts)),
        "age_s": max(part.age_s for part in parts),
    }
    missing: dict[str, Sequence[str]] = {}
    silent = [part.node for part in parts if part.is_silent]
    spans = [part.span for part in parts]
    for name in names:
        figure = FIGURES[name]
        if figure.term is None:
            continue
        if silent:
            missing[name] = silent
            continue
        value = of_job(figure, spans)
        if isinstance(value, list):
            missing[name] = [parts[i].node for i in value] if len(parts) > 1 else ()
        else:
            values[name] = value
    has_no_gpu = not silent and not any(span.new[GPUS] for span in spans)
    return Subject(values, missing, has_no_gpu)


def of_each(parts: Sequence[Part], names: Collection[str]) -> list[Subject]:
    """The job's part on each node, with its peers' figures."""
    peers = [name for name in names if name.startswith(PEERS)]
    wanted = dict.fromkeys([*names, *(name.removeprefix(PEERS) for name in peers)])
    subjects = [of_all([part], wanted) for part in parts]
    for name in peers:
        own = [subject.values.get(name.removeprefix(PEERS)) for subject in subjects]
        for subject, median in zip(subjects, medians_of_others(own), strict=True):
            if median is not None:
                subject.values[name] = median
    for subject in subjects:
        subject.values["nodes"] = float(len(parts))
    return subjects
