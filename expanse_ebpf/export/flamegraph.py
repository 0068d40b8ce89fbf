"""Profiles as one HTML file with a flame graph: `flamegraph.html` with the profile inside.

The file needs no network and its content security policy forbids it one; nothing but the script of the
template runs in it, whatever the names of functions are.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.resources import files

from expanse_ebpf.export.origin import Origins
from expanse_ebpf.export.pprof import NO_FRAME, UNRESOLVED, Frame, Reader, Stack
from expanse_ebpf.text import clean
from expanse_ebpf.wire.profile_pb2 import Profile

MAX_TEXT = 1024
# Labels that say where the samples come from, and what they are called on the page.
ORIGINS = {"job": "job", "node": "node", "user": "user", "python": "Python"}
# What a thread had to do with its interpreter's lock, by the number that the page has for it; 0: not known.
GIL = {"held": 1, "waiting": 2, "released": 3}


def flamegraph(profile: Profile, title: str) -> str:
    """A page for a browser. Raises ProfileError."""
    reader = Reader(profile)
    places = [reader.index(value) for value in ("samples", "cpu", "waiting")]
    stacks = [
        Stack(frames or (Frame(NO_FRAME, "", 0, 0),), tuple([values[place] for place in places]), labels)
        for frames, values, labels in reader.stacks()
    ]
    found = _labels(stacks)
    data = _data(stacks, many_jobs=len(found["job"]) > 1)
    template = files(__package__).joinpath("flamegraph.html").read_text(encoding="utf-8")
    parts = {
        "policy": _policy(template),
        "title": html.escape(clean(title) + _where(found["node"])),
        "facts": html.escape(" · ".join([*_origins(found), *_times(profile), *_counts(stacks, profile)])),
        "why": html.escape(_why_empty(stacks)),
        # Neither "</script>" nor "<!--" can stand in it, the only ways out of a script element.
        "data": json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c"),
    }
    # In one pass: what is filled in is not searched for more places.
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def _policy(template: str) -> str:
    """A policy that lets nothing but the template's own script and style in, which it names by digest."""
    rules = ["default-src 'none'", "base-uri 'none'", "form-action 'none'", "img-src data:"]
    for kind in ("script", "style"):
        (content,) = re.findall(rf"<{kind}>(.*?)</{kind}>", template, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        rules.append(f"{kind}-src 'sha256-{digest}'")
    return "; ".join(rules)


def _labels(stacks: Iterable[Stack]) -> dict[str, Counter[str]]:
    """The samples of each job, node, user and Python of a profile."""
    found: dict[str, Counter[str]] = {key: Counter() for key in ORIGINS}
    for _, values, labels in stacks:
        for key in found.keys() & labels.keys():
            found[key][clean(str(labels[key]))] += values[0]
    return found


def _where(nodes: Counter[str]) -> str:
    """The node of a profile, or how many there are, as the end of a title; empty where none is known."""
    if len(nodes) > 1:
        return f" on {len(nodes)} nodes"
    return "".join(f" on {node}" for node in nodes)


def _origins(found: dict[str, Counter[str]]) -> list[str]:
    """The jobs, nodes, users and Pythons of a profile, the most frequent first."""
    said = []
    for key, counts in found.items():
        names = sorted(counts, key=lambda name: (-counts[name], name))
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        if names:
            said.append(f"{ORIGINS[key]} {', '.join(names[:3])}{more}")
    return said


def _times(profile: Profile) -> list[str]:
    """When the samples were taken, in UTC, as far as it is known."""
    seconds = profile.duration_nanos / 1e9
    if seconds < 100:
        said = f"{seconds:.3g} s"
    else:
        said = f"{seconds / 60:.3g} min" if seconds < 6000 else f"{seconds / 3600:,.3g} h"
    if not profile.time_nanos:
        return [said] if seconds else []
    begin = datetime.fromtimestamp(profile.time_nanos / 1e9, UTC)
    end = datetime.fromtimestamp((profile.time_nanos + profile.duration_nanos) / 1e9, UTC)
    until = f"{end:%H:%M:%S}" if begin.date() == end.date() else f"{end:%Y-%m-%d %H:%M:%S}"
    return [f"{begin:%Y-%m-%d %H:%M:%S} to {until} UTC ({said})"]


def _counts(stacks: Iterable[Stack], profile: Profile) -> list[str]:
    """How many samples there are, and how many have no stack and why."""
    total, unresolved = _unresolved(stacks)
    rate = f" at {1e9 / profile.period:.3g} Hz" if profile.period else ""
    said = [f"{total:,} samples{rate}"]
    if missing := unresolved.total():
        said.append(f"without a stack: {missing:,} ({missing / total:.2%} of all): {_listed(unresolved)}")
    return said


def _unresolved(stacks: Iterable[Stack]) -> tuple[int, Counter[str]]:
    """The number of samples, and of those without a stack by reason."""
    total = 0
    unresolved: Counter[str] = Counter()
    for _, (samples, *_), labels in stacks:
        total += samples
        if UNRESOLVED in labels:
            unresolved[clean(str(labels[UNRESOLVED])).replace("_", " ")] += samples
    return total, unresolved


def _listed(unresolved: Counter[str]) -> str:
    return ", ".join(f"{reason} {count:,}" for reason, count in unresolved.most_common() if count)


def _why_empty(stacks: Iterable[Stack]) -> str:
    """Why there is no Python stack in a profile; empty when there is one."""
    seen = [labels for _, values, labels in stacks if any(values)]
    if not seen:
        return "There are no samples: nothing ran or waited in this time."
    if not all(UNRESOLVED in labels for labels in seen):
        return ""
    return f"No Python stack could be read: {_listed(_unresolved(stacks)[1])}."


class _Processes:
    """The processes of a profile by number; 0: not known which."""

    def __init__(self, many_jobs: bool) -> None:
        self._many_jobs = many_jobs
        self._numbers: dict[tuple[str, int, str], int] = {}
        self._pythons: dict[int, str] = {}

    def number(self, labels: dict[str, str | int]) -> int:
        pid = labels.get("pid")
        if not isinstance(pid, int) or not pid:
            return 0
        key = (str(labels.get("node", "")), pid, str(labels.get("job", "")) if self._many_jobs else "")
        number = self._numbers.setdefault(key, len(self._numbers) + 1)
        if "python" in labels:
            self._pythons.setdefault(number, str(labels["python"]))
        return number

    def names(self) -> list[str]:
        """What each is called, from number 1 on: its pid and what else is known of it."""
        return [
            clean(
                f"process {pid}"
                + (f" of {job}" if job else "")
                + (f" on {node}" if node else "")
                + (f", Python {self._pythons[number]}" if number in self._pythons else "")
            )
            for (node, pid, job), number in self._numbers.items()
        ]


def _data(stacks: Iterable[Stack], many_jobs: bool) -> dict[str, list[str] | list[int]]:
    """What the script of the template draws.

    `texts`; `frames`: the numbers of name and file in `texts`, the line and the Origin of each; `nodes`: the
    tree of all stacks, as parent and frame for each node but the first, the root; `processes`: names of the
    processes 1, 2, …; `stacks`: node of the leaf, samples, CPU ns, waiting ns, process (0: not known) and
    the number in GIL.
    """
    processes, origins = _Processes(many_jobs), Origins()
    texts: dict[str, int] = {}
    frames: dict[Frame, int] = {}
    nodes: dict[tuple[int, int], int] = {}
    totals: dict[tuple[int, int, int], list[int]] = {}
    for stack, values, labels in stacks:
        node = 0
        if stack:
            origins.learn(stack[-1])
        for frame in reversed(stack):
            number = frames.setdefault(frame, len(frames))
            node = nodes.setdefault((node, number), len(nodes) + 1)
        place = (node, processes.number(labels), GIL.get(str(labels.get("gil")), 0))
        total = totals.setdefault(place, [0, 0, 0])
        total[:] = [a + b for a, b in zip(total, values, strict=True)]
    flat_frames = [
        number
        for frame in frames
        for number in (
            texts.setdefault(clean(frame.name, MAX_TEXT), len(texts)),
            texts.setdefault(clean(frame.file, MAX_TEXT), len(texts)),
            frame.line,
            int(origins.of(frame.file)),
        )
    ]
    return {
        "texts": [*texts],
        "frames": flat_frames,
        "nodes": [number for node in nodes for number in node],
        "processes": processes.names(),
        "stacks": [n for (node, *rest), total in totals.items() for n in (node, *total, *rest)],
    }
