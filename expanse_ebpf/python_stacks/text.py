"""Names of functions and files: the characters of `str` objects as they lie in a process's memory."""

from __future__ import annotations

from typing import Literal

from expanse_ebpf.text import clean

MAX_CHARACTERS = 1020  # the kernel side copies as many bytes of a string at most

# Characters are in the machine's own byte order (PEP 393).
_FORMS: dict[int, Literal["B", "H", "I"]] = {1: "B", 2: "H", 4: "I"}


def decode(raw: bytes, length: int, kind: int, ascii: bool, cut: bool) -> str:
    """The text of a compact str, safe to store and show; never an error.

    `raw` are the bytes of its characters, as many as were copied; `length` is the str's own length in
    characters, `kind` the bytes of each (1, 2 or 4: Latin-1, UCS-2, UCS-4), `ascii` its flag. A text
    that is not whole ends in "…". What cannot be a character becomes U+FFFD, bytes that Python could
    not decode (lone surrogates) become what they were where that is UTF-8, control characters become
    visible ones, as everywhere (expanse_ebpf.text). "" where nothing can be made of it.
    """
    form = _FORMS.get(kind)
    if form is None or length <= 0:
        return ""
    count = min(length, len(raw) // kind, MAX_CHARACTERS)
    codes = memoryview(raw)[: count * kind].cast(form)
    # Not the UTF-16 and UTF-32 codecs: they join two lone surrogates and stop at what is no character.
    limit = 0x80 if ascii else 0x110000
    text = clean("".join([chr(code) if code < limit else "\ufffd" for code in codes]), MAX_CHARACTERS)
    return text + "…" if cut or count < length else text
