"""What is wrong with how an expression is written, in plain words: usual slips by name, else where it is."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

MAX_TEXT = 200

_TOKEN = re.compile(
    r"""(?P<text>"[^"]*"|'[^']*')|(?P<open>["'])|(?P<number>\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|\.\d+)"""
    r"|(?P<name>[A-Za-z_]\w*)|(?P<sign>=>|=<|<>|==|<=|>=|!=|&&|\|\||\S)"
)
_KNOWN = re.compile(r"\bknown\s*\.\s*(?=[A-Za-z_])")
_COMPARISONS = frozenset(("<", "<=", ">", ">=", "==", "!="))
_CALCULATIONS = frozenset("+-*/%")
_INSTEAD = {
    "=": "== to compare",
    "=>": ">=",
    "=<": "<=",
    "<>": "!=",
    "&": "&&",
    "|": "||",
    "and": "&&",
    "or": "||",
    "not": "!",
}


class _Token(NamedTuple):
    kind: str
    text: str
    column: int  # from 1


def line(text: str) -> str:
    """`text` in one line of at most MAX_TEXT characters, cut between words."""
    whole = " ".join(text.split())
    if len(whole) <= MAX_TEXT:
        return whole
    kept = whole[: MAX_TEXT - 1]
    return f"{kept.rpartition(' ')[0] or kept[:-1]} …"


def complaint(source: str, raised: str) -> str:
    """Why `source` is no expression. `raised`: what the parser says of it."""
    tokens = _tokens(source)
    for place, token in enumerate(tokens):
        if token.kind == "open":
            return f"column {token.column}: the text that begins here has no end"
        if token.text == "%" and place and tokens[place - 1].kind == "number":
            share = float(tokens[place - 1].text) / 100
            return (
                f"column {token.column + 1}: something is missing after %; "
                f"a share is 0 to 1: write {min(share, 1.0):.6g}"
            )
        instead = _INSTEAD.get(token.text.lower())
        if instead and token.kind in ("name", "sign"):
            return f"column {token.column}: {token.text!r} is not known here: write {instead}"
    found = re.search(r"ERROR: <input>:\d+:(\d+): (?:Syntax error: )?([^\n]*)", raised)
    return f"column {found[1]}: {_plain(found[2])}" if found else line(raised)


def slip(source: str, shares: Collection[str], flags: Collection[str]) -> str:
    """What can be evaluated and makes no sense: a share compared with more than 1, a flag with a number.

    `shares` and `flags` are names of figures. Empty: nothing of the kind.
    """
    tokens = _tokens(_KNOWN.sub(lambda found: " " * len(found[0]), source))
    for name, number, place in _beside_numbers(tokens):
        if name in flags:
            return f"compares {name} with {number}; it is true or false: write {name} or !{name}"
        around = [tokens[i].text for i in (place - 1, place + 3) if 0 <= i < len(tokens)]
        if name in shares and float(number) > 1 and not _CALCULATIONS.intersection(around):
            value = float(number)
            hint = f": write {value / 100:.6g} for {number} %" if value <= 100 else ""
            return f"compares {name} with {number}; a share is 0 to 1{hint}"
    return ""


def is_chained(source: str) -> bool:
    """Whether two comparisons stand in a row, as in `1 < gpus < 4`."""
    depth = 0
    compared: dict[int, bool] = {}
    for token in _tokens(source):
        if token.text in "([{":
            depth += 1
            compared[depth] = False
        elif token.text in ")]}":
            depth -= 1
        elif token.text in ("&&", "||", "?", ":", ","):
            compared[depth] = False
        elif token.text in _COMPARISONS:
            if compared.get(depth):
                return True
            compared[depth] = True
    return False


def _beside_numbers(tokens: list[_Token]) -> Iterator[tuple[str, str, int]]:
    """Comparisons of a name with a number: name, number, and the first token's place."""
    for place, (left, middle, right) in enumerate(zip(tokens, tokens[1:], tokens[2:], strict=False)):
        if middle.text in _COMPARISONS and {left.kind, right.kind} == {"name", "number"}:
            name, number = (left, right) if left.kind == "name" else (right, left)
            yield name.text, number.text, place


def _tokens(source: str) -> list[_Token]:
    return [
        _Token(str(found.lastgroup), found[0], found.start() - source.rfind("\n", 0, found.start()))
        for found in _TOKEN.finditer(source)
    ]


def _plain(said: str) -> str:
    """The parser's complaint without its lists of what might stand there instead."""
    inner = re.search(r'msg: "([^"]*)"', said)
    text = inner[1] if inner else said
    if found := re.match(r"missing '(.+?)' at ", text):
        return f"{found[1]} is missing"
    if "'<EOF>' expecting" in text:
        return "something is missing at the end"
    if found := re.match(r"token recognition error at: '(.*)'$", text):
        return f"{line(found[1].strip())!r} is not known here"
    if found := re.match(r"(?:mismatched|extraneous) input '(.*?)' expecting (.*)", text):
        what = line(found[1])
        # An end, or an operator: what stands before could have ended here.
        return (
            f"{what!r} does not belong here"
            if "<EOF>" in found[2]
            else f"something is missing before {what!r}"
        )
    return line(text.partition(" expecting ")[0])
