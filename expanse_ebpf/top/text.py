"""Figures and names as text for a terminal."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from expanse_ebpf import text as figures
from expanse_ebpf.text import cell_width as cell_width
from expanse_ebpf.text import fit as fit

_UNSAFE = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
_BARS = "▁▂▃▄▅▆▇"  # no full block: rows above each other stay apart
_ASCII_BARS = "_.-=+*#"
Line = tuple[str, str]  # a line of a panel and its style
UNKNOWN = "\N{EN DASH}"  # stands where a figure is not known
_ASCII = {UNKNOWN: "-", "…": "~", "·": "|", "µ": "u", "↓": "v", "↑": "^", "─": "-"}


def clean(text: str) -> str:
    """`text` without anything that could steer a terminal: such characters become U+FFFD."""
    if text.isascii() and text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c) in _UNSAFE else c for c in text)


def wrap(line: str, width: int) -> list[str]:
    """Clean text in lines of at most `width` columns, broken at " · " if possible, later ones indented."""
    body = line.lstrip()
    start = line[: len(line) - len(body)]
    indent = start + "  "
    lines: list[str] = []
    current = ""
    for item in body.split(" · "):
        for sign, piece in _pieces(item, width - len(indent)):
            if current and cell_width(current + sign + piece) <= width:
                current += sign + piece
            else:
                lines += [current] * bool(current)
                current = (indent if lines else start) + piece
    return [*lines, current]


def not_known(reasons: Mapping[str, str]) -> list[Line]:
    """What is missing and why, as the end of a panel; fields that share a reason share a line."""
    if not reasons:
        return []
    by_reason: dict[str, list[str]] = {}
    for field, reason in sorted(reasons.items()):
        by_reason.setdefault(reason, []).append(field)
    lines: list[Line] = [("", ""), ("not known", "bold")]
    lines += [
        (f"  {clean(', '.join(fields))}: {clean(reason)}", "dim") for reason, fields in by_reason.items()
    ]
    return lines


def _pieces(item: str, width: int) -> list[tuple[str, str]]:
    """What is not to be broken, each with what stands before it: the item, or its words where it is long."""
    if cell_width(item) <= width:
        return [(" · ", item)]
    first, *words = item.split(" ")
    return [(" · ", first), *((" ", word) for word in words)]


def plain_ascii(text: str) -> str:
    """`text` in ASCII alone, of the same width."""
    if text.isascii():
        return text
    return "".join(c if c.isascii() else _ASCII.get(c, "?" * cell_width(c)) for c in text)


@dataclass(frozen=True, slots=True)
class Locale:
    """What the terminal can show."""

    ascii: bool = False

    def text(self, text: str) -> str:
        """`text` as it can be shown."""
        return plain_ascii(text) if self.ascii else text

    def sparkline(self, values: Sequence[float | None], width: int) -> str:
        """The newest `width` values as bars, the highest of them full; a gap where a value is missing."""
        newest = list(values)[-width:]
        known = [v for v in newest if v is not None]
        top = max(known, default=0.0)
        bars = _ASCII_BARS if self.ascii else _BARS
        line = "".join(
            " " if v is None else bars[min(len(bars) - 1, int(v / top * len(bars)))] if top > 0 else bars[0]
            for v in newest
        )
        return line.rjust(width)


def locale_is_utf8(environment: Mapping[str, str]) -> bool:
    """Whether the user's locale says UTF-8. Python itself would take "C" for it."""
    for name in ("LC_ALL", "LC_CTYPE", "LANG"):
        value = environment.get(name)
        if value:
            return "utf-8" in value.lower() or "utf8" in value.lower()
    return False


def number(value: float | None, digits: int = 2) -> str:
    """A plain figure, a dash when it is not known."""
    return UNKNOWN if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """A rate or a count with k, M, G: "950", "12.3k"."""
    return UNKNOWN if value is None else figures.count(value)


def size(value: float | None) -> str:
    """Bytes in binary units: "412 MiB"."""
    return UNKNOWN if value is None else figures.size(value)


def size_rate(value: float | None) -> str:
    """Bytes per second."""
    return UNKNOWN if value is None else f"{size(value)}/s"


def percent(value: float | None) -> str:
    """A ratio as a percentage."""
    return UNKNOWN if value is None else figures.percent(value)


def watts(value: float | None) -> str:
    """Power: "512 W"."""
    return UNKNOWN if value is None else f"{value:.0f} W"


def joules(value: float | None) -> str:
    """Energy: "950 J", "12.3 kJ"."""
    if value is None:
        return UNKNOWN
    unit = ""
    for unit in ("", "k", "M", "G", "T"):
        if value < 999.5 or unit == "T":
            break
        value /= 1000
    return f"{value:.1f} {unit}J" if unit and value < 99.95 else f"{value:.0f} {unit}J"


def nanoseconds(value: float | None) -> str:
    """A time given in nanoseconds, in the unit that suits it: "112 µs"."""
    return UNKNOWN if value is None else figures.nanoseconds(value)


def total(values: Sequence[float | None]) -> float | None:
    """The sum of what is known; None when nothing is."""
    known = [v for v in values if v is not None]
    return math.fsum(known) if known else None
