"""What went wrong with the link to the controller, in a few words."""

from __future__ import annotations

# What gRPC's text contains, and what a person is told. The first that fits is taken.
_CAUSES = (
    ("Connection refused", "connection refused"),
    ("DNS resolution failed", "its name does not resolve"),
    ("Domain name not found", "its name does not resolve"),
    ("Network is unreachable", "network is unreachable"),
    ("No route to host", "no route to host"),
    ("Deadline Exceeded", "no answer in time"),
    ("Too many pings", "it allows fewer keepalive pings than are sent"),
    ("Timeout", "no answer in time"),
    ("timed out", "no answer in time"),
    ("Connection reset", "connection closed"),
    ("Socket closed", "connection closed"),
    ("Broken pipe", "connection closed"),
    ("GOAWAY", "connection closed"),
    ("Method not found", "what answers there is not an expanse-controller"),
    ("HTTP2", "what answers there is not an expanse-controller"),
    ("SETTINGS frame", "what answers there is not an expanse-controller"),
    ("Failed parsing HTTP", "what answers there is not an expanse-controller"),
)
_MAX_TEXT = 200


def cause(code: str, details: str) -> str:
    """The cause of a failed call, from the name of its status code and its details."""
    for sign, words in _CAUSES:
        if sign in details:
            return words
    text = " ".join(details.split())
    return (text or code.lower().replace("_", " "))[:_MAX_TEXT]
