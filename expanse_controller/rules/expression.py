"""Expressions of rules, in CEL (cel.dev): what they may say, and what they are worth."""

from __future__ import annotations

import difflib
import random
import re
import sys
import time
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from expanse_controller.rules.syntax import complaint, is_chained, line, slip

MAX_LENGTH = 2000
KNOWN = "known"  # `has(known.NAME)`: for figures that a rule can do without
# Nothing that loops or grows: the time an evaluation takes is bounded by the expression's length.
_ALLOWED = frozenset(
    (
        *("_&&_", "_||_", "!_", "_?_:_", "_<_", "_<=_", "_>_", "_>=_", "_==_", "_!=_"),
        *("_+_", "_-_", "_*_", "_/_", "-_", "@in", "double", "int"),
    )
)
_FIELD = re.compile(rf"\b{KNOWN}\b(?:\s*\.\s*([A-Za-z_]\w*))?")
# Bool, int and float are told apart by CEL; a comparison of a double with 2 works, `2 * x` does not.
_MIXED = "does not coerce"
_TRIALS = 64
_TRIAL_VALUES = (0.01, 0.3, 0.99, 1.0, 7.0, 1000.0)

Value = float | bool


class ExpressionError(ValueError):
    """What is wrong with an expression, in one line."""


class EvaluationError(Exception):
    """Why an expression has no value, in one line."""


def _cel() -> Any:
    """The module `cel` without its command line, which would bring 12 MiB of terminal tools."""
    if "cel" not in sys.modules:
        sys.modules["cel.cli"] = ModuleType("cel.cli")
    import cel

    return cel


def context(values: Mapping[str, Value], optional: Collection[str] = ()) -> Any:
    """What expressions are evaluated against, made once for all rules.

    `optional`: the figures that some rule has behind `known.`.
    """
    known = {name: values[name] for name in optional if name in values}
    return _cel().Context({**values, KNOWN: known})


class Expression:
    """A checked expression. `figures`: those that must be known; `optional`: those behind `known.`.

    `figures` maps the names that there are to whether they are numbers (else they are true or false); those
    of them that lie between 0 and 1 are `shares`. Raises ExpressionError.
    """

    def __init__(self, source: str, figures: Mapping[str, bool], shares: Collection[str] = ()) -> None:
        self.source = source
        if len(source) > MAX_LENGTH:
            raise ExpressionError(f"is longer than {MAX_LENGTH} characters")
        try:
            self._program = _cel().compile(source)
        except ValueError as error:
            raise ExpressionError(f"is no CEL expression: {complaint(source, str(error))}") from None
        functions = set(self._program.references()["functions"])
        if functions - _ALLOWED:
            name = min(functions - _ALLOWED).strip("_")
            raise ExpressionError(
                f"uses {name!r}; there are comparisons, && || ! ?:, + - * /, in, double() and int()"
            )
        names = set(self._program.variables())
        fields = _FIELD.findall(source) if KNOWN in names else []
        if "" in fields:
            raise ExpressionError(f"uses {KNOWN} without a name: write {KNOWN}.gpu_busy, for example")
        for name in sorted((names - {KNOWN}) | set(fields)):
            if name not in figures:
                raise ExpressionError(f"asks for {name!r}, which is no figure; {_nearest(name, figures)}")
        self.figures = frozenset(names - {KNOWN})
        self.optional = frozenset(set(fields) - names)
        self.names = tuple(sorted(self.figures | self.optional))
        if not self.names:
            raise ExpressionError(f"asks for no figure; there are {', '.join(sorted(figures))}")
        senseless = slip(source, shares, [name for name, is_number in figures.items() if not is_number])
        if senseless:
            raise ExpressionError(senseless)
        self.mean_s = self._try(figures)

    def evaluate(self, made: Any) -> bool:
        """Its value in a `context`, which must have all of `figures`. Raises EvaluationError."""
        try:
            value = self._program.execute(made)
        except (KeyboardInterrupt, SystemExit):
            raise
        except KeyError as error:
            name = error.args[0] if error.args else ""
            raise EvaluationError(f"{KNOWN}.{name} is absent: has({KNOWN}.{name}) asks for that") from None
        except BaseException as error:  # a panic in the module is no Exception
            raise EvaluationError(line(str(error))) from None
        if not isinstance(value, bool):
            raise EvaluationError(f"its value is {line(repr(value))}, which is neither true nor false")
        return value

    def _try(self, figures: Mapping[str, bool]) -> float:
        """Evaluate it with many values; the time that one takes, in seconds. Raises ExpressionError."""
        draw = random.Random(1)
        spent_s = 0.0
        for _ in range(_TRIALS):
            values: dict[str, Value] = {
                name: draw.choice(_TRIAL_VALUES) if is_number else draw.random() < 0.5
                for name, is_number in figures.items()
                if name in self.figures or draw.random() < 0.5
            }
            made = context(values, self.optional)
            begin = time.perf_counter()
            try:
                self.evaluate(made)
            except EvaluationError as error:
                raise ExpressionError(f"cannot be evaluated: {self._remedy(str(error))}") from None
            spent_s += time.perf_counter() - begin
        return spent_s / _TRIALS

    def _remedy(self, error: str) -> str:
        """What to write instead where CEL says at length that types differ; else what it says."""
        if is_chained(self.source):
            return "two comparisons in a row: write 1.0 < gpus && gpus < 4.0"
        return "write 2.0 and not 2 in a calculation" if _MIXED in error else error


def _nearest(name: str, names: Collection[str]) -> str:
    close = difflib.get_close_matches(name, names, 1, 0.5)
    return f"did you mean {close[0]!r}?" if close else f"there are {', '.join(sorted(names))}"
