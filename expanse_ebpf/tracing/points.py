"""The places in a file where its CUDA and NCCL functions begin."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from expanse_ebpf.python_stacks.elf import Elf, ElfError
from expanse_ebpf.tracing.functions import FUNCTIONS, Function, Layer

_MOST_POINTS = 1024  # of one file: the functions with all their copies in an unstripped library

_BY_NAME = {each.symbol: each for each in FUNCTIONS}
_LEVELS = {
    Layer.RUNTIME_WRAPPER: "runtime",
    Layer.RUNTIME: "runtime",
    Layer.DRIVER: "driver",
    Layer.NCCL: "nccl",
}


class Point(NamedTuple):
    """A place to probe."""

    function: Function
    offset: int  # in the file
    below: int  # bytes of the file's executable segment before the function and from it on: a caller
    above: int  # within them is in the same file


def find_points(elf: Elf, *, listing: bool = True) -> tuple[tuple[Point, ...], str]:
    """The functions of a file, in order of their places, and what could not be searched.

    `listing`: also those that are not exported, which takes reading the table of all symbols.
    """
    found: set[tuple[str, int]] = set()
    problems: list[str] = []
    try:
        found |= set(elf.exported(_BY_NAME).items())
    except ElfError as error:
        problems.append(str(error))
    try:
        if listing:
            found |= elf.listed(_BY_NAME)
        else:
            problems.append("what it does not export was not searched")
    except ElfError as error:
        problems.append(str(error))
    points: dict[int, Point] = {}
    for name, address in found:
        point = _point(elf, _BY_NAME[name], address)
        if point is None:
            continue
        # Two names of one place are one function; all that it calls is of the outer one's layers.
        other = points.get(point.offset)
        if other is None or _rank(point) < _rank(other):
            points[point.offset] = point
    if len(points) > _MOST_POINTS:
        problems.append(f"it has {len(points)} functions, of which {_MOST_POINTS} are probed")
    return tuple(points[offset] for offset in sorted(points)[:_MOST_POINTS]), "; ".join(problems)


def _rank(point: Point) -> tuple[int, str]:
    return point.function.layer, point.function.symbol


def _point(elf: Elf, function: Function, address: int) -> Point | None:
    for segment in elf.segments:
        into = address - segment.address
        if segment.executable and 0 <= into < segment.size:
            return Point(function, segment.offset + into, into, segment.size - into)
    return None


def levels(points: Collection[Point]) -> tuple[str, ...]:
    """Which libraries the functions are of: runtime, driver, nccl."""
    present = {_LEVELS[point.function.layer] for point in points}
    return tuple(each for each in ("runtime", "driver", "nccl") if each in present)
