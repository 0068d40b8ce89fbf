"""Names as they enter the data model: always valid, printable, bounded text; and figures as people read them.

Names of processes, cgroups, interfaces and command lines are bytes that a user chooses. They are
cleaned here once, so that nothing behind it (protobuf, a metrics page, a terminal) can fail on them or
be steered by them.
"""

from __future__ import annotations

# C0 controls become the picture of the same control (newline: U+240A), so two names that differ stay
# different. C1 controls can start an escape sequence as well; the rest moves or hides text on a screen.
_TABLE: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20)}
_TABLE |= {0x7F: 0x2421}
_TABLE |= dict.fromkeys(
    (*range(0x80, 0xA0), 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)), "\ufffd"
)


def clean(data: bytes | str, limit: int = 256) -> str:
    """`data` as text that is safe to store, send and show; at most `limit` characters, never an error.

    What is not UTF-8 becomes U+FFFD, leading and trailing NULs go, control characters become visible
    ones. A text that was cut ends in "…".
    """
    raw = _encoded(data) if isinstance(data, str) else data
    # A character has at most 4 bytes; one more character tells that there was more.
    text = raw.strip(b"\0")[: 4 * (limit + 1)].decode("utf-8", "replace")
    if not text.isprintable():
        text = text.translate(_TABLE)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _encoded(text: str) -> bytes:
    try:
        # Undecodable bytes in a `str` from the operating system are lone surrogates.
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


# ---- lines of a terminal


def cell_width(text: str) -> int:
    """How many columns of a terminal clean text takes."""
    if text.isascii():
        return len(text)
    import unicodedata  # a library of its own, which the agent can do without

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def cut(text: str, width: int) -> str:
    """`text`, or as much of it as fits `width` columns with "…" behind it."""
    if cell_width(text) <= width:
        return text
    kept: list[str] = []
    room = width - 1
    for c in text:
        room -= cell_width(c)
        if room < 0:
            break
        kept.append(c)
    return "".join(kept) + "…" if width > 0 else ""


def fit(text: str, width: int, right: bool = False) -> str:
    """`text` cut or filled to exactly `width` columns."""
    text = cut(text, width)
    fill = " " * (width - cell_width(text))
    return fill + text if right else text + fill


# ---- figures


def percent(share: float) -> str:
    """A ratio as a percentage."""
    return f"{share * 100:.1f}%"


def count(value: float) -> str:
    """A rate or a count with k, M, G: "950", "12.3k"."""
    for unit in ("", "k", "M", "G"):
        if value < 999.5:
            return f"{value:.0f}{unit}" if not unit or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1000
    return f"{value:.0f}T"


def size(value: float) -> str:
    """Bytes in binary units: "412 MiB"."""
    unit = "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB", "PiB"):
        if value < 1023.5 or unit == "PiB":
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" or value >= 99.95 else f"{value:.1f} {unit}"


def nanoseconds(value: float) -> str:
    """A time given in nanoseconds, in the unit that suits it: "112 µs"."""
    for unit in ("ns", "µs", "ms"):
        if value < 999.5:
            return f"{value:.0f} {unit}" if value >= 9.95 or unit == "ns" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.2f} s"
