"""Names as they enter the data model: always valid, printable, bounded text.

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
