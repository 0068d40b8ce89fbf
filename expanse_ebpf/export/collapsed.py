"""Profiles as folded stacks, one a line: what flamegraph.pl, speedscope and many others read."""

from __future__ import annotations

from expanse_ebpf.export.pprof import NO_FRAME, Frame, Reader
from expanse_ebpf.text import clean
from expanse_ebpf.wire.profile_pb2 import Profile

# Of a name with its file: more helps nobody who looks at a graph.
MAX_TEXT = 1024


def collapsed(profile: Profile, value: str = "cpu") -> str:
    """Lines of `root;…;leaf NUMBER`, sorted, each stack once; the number is in the unit of `value`.

    Stacks that differ in their labels only are added up; those without any of `value` are left out.
    Raises ProfileError.
    """
    reader = Reader(profile)
    place = reader.index(value)
    texts = {location: text(frame) for location, frame in reader.frames.items()}
    totals: dict[str, int] = {}
    for frames, _, values in reader.samples(texts):
        if values[place]:
            line = ";".join(reversed(frames)) or NO_FRAME
            totals[line] = totals.get(line, 0) + values[place]
    return "".join(f"{line} {total}\n" for line, total in sorted(totals.items()))


def text(frame: Frame) -> str:
    """`name (file:line)` on one line and without a semicolon, as far as file and line are known."""
    place = f"{frame.file}:{frame.line}" if frame.file and frame.line else frame.file
    return clean(f"{frame.name} ({place})" if place else frame.name, MAX_TEXT).replace(";", ":")
