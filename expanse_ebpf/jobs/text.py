"""Text from outside the agent, made fit for a label, a terminal and protobuf."""

from __future__ import annotations


def clean(text: str, limit: int = 256) -> str:
    """`text` cut to `limit` characters, with U+FFFD for control characters and lone surrogates.

    Names come from cgroups, environments and the kubelet: an escape sequence in one must not reach a
    terminal, and protobuf refuses surrogates.
    """
    text = text[:limit]
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
