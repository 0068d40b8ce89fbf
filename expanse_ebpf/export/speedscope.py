"""Profiles in speedscope's own file format, which its web page and editors' extensions open.

The format: https://www.speedscope.app/file-format-schema.json
"""

from __future__ import annotations

import json
from typing import Any

from expanse_ebpf import __version__
from expanse_ebpf.export.pprof import Reader
from expanse_ebpf.text import clean
from expanse_ebpf.wire.profile_pb2 import Profile

SCHEMA = "https://www.speedscope.app/file-format-schema.json"


def speedscope(profile: Profile, name: str) -> str:
    """A file with two profiles, time on CPUs and time waiting; `name` is shown as its title.

    Stacks that differ in their labels only are added up. Raises ProfileError.
    """
    reader = Reader(profile)
    numbers = {location: number for number, location in enumerate(reader.frames)}
    totals: dict[tuple[int, ...], tuple[int, int]] = {}
    cpu, waiting = reader.index("cpu"), reader.index("waiting")
    for stack, _, values in reader.samples(numbers):
        before = totals.get(stack[::-1], (0, 0))
        totals[stack[::-1]] = before[0] + values[cpu], before[1] + values[waiting]
    # Sorted, so that stacks with the same beginning lie side by side.
    profiles = [
        _sampled(title, {stack: total[place] for stack, total in sorted(totals.items()) if total[place]})
        for place, title in enumerate(("on CPU", "waiting"))
    ]
    content = {
        "$schema": SCHEMA,
        "exporter": f"expanse-ebpf {__version__}",
        "name": clean(name),
        "activeProfileIndex": int(not profiles[0]["samples"] and bool(profiles[1]["samples"])),
        "shared": {"frames": [_frame(*frame[:3]) for frame in reader.frames.values()]},
        "profiles": profiles,
    }
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def _sampled(title: str, totals: dict[tuple[int, ...], int]) -> dict[str, Any]:
    return {
        "type": "sampled",
        "name": title,
        "unit": "nanoseconds",
        "startValue": 0,
        "endValue": sum(totals.values()),
        "samples": list(totals),
        "weights": list(totals.values()),
    }


def _frame(name: str, file: str, line: int) -> dict[str, str | int]:
    frame: dict[str, str | int] = {"name": name}
    if file:
        frame["file"] = file
    if line:
        frame["line"] = line
    return frame
