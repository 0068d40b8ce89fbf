"""Expressions: what is refused when they are read, and what they are worth."""

from __future__ import annotations

import pytest

from expanse_controller.rules.expression import EvaluationError, Expression, ExpressionError, context
from expanse_controller.rules.syntax import MAX_TEXT, line

FIGURES = {"gpu_busy": True, "gpus": True, "cpu_cores": True, "held_idle": False}


def read(source: str) -> Expression:
    return Expression(source, FIGURES, {"gpu_busy"})


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("", "is no CEL expression: column 1"),
        ("gpu_busy <", "is no CEL expression: column 11"),
        ("gpu_busy < 1 2", "is no CEL expression"),
        ("gpu_bsy < 0.1", "'gpu_bsy', which is no figure; did you mean 'gpu_busy'?"),
        ("zzz > 1", "there are cpu_cores, gpu_busy, gpus, held_idle"),
        ("known.gpu_bsy < 0.1", "'gpu_bsy', which is no figure"),
        ("gpu_busy", "neither true nor false"),
        ("gpus > 1.0 ? 3 : true", "neither true nor false"),
        ("gpus > 900.0 && cpu_cores > 1.0 ? 3.0 : true", "neither true nor false"),
        ("gpu_busy < 10%", "column 15: something is missing after %; a share is 0 to 1: write 0.1"),
        ("50% < gpu_busy", "column 4: something is missing after %; a share is 0 to 1: write 0.5"),
        ("gpus % 2.0 == 0.0", "uses '%'; there are comparisons"),
        ("gpus = 1", "column 6: '=' is not known here: write == to compare"),
        ("gpus => 1", "column 6: '=>' is not known here: write >="),
        ("gpus > 1 and gpu_busy < 0.5", "column 10: 'and' is not known here: write &&"),
        ("gpus > 1 OR gpu_busy < 0.5", "column 10: 'OR' is not known here: write ||"),
        ("gpus > 1\n  & gpus < 2", "column 3: '&' is not known here: write &&"),
        ("not held_idle", "column 1: 'not' is not known here: write !"),
        ("(gpus > 1", "column 10: ) is missing"),
        ("gpus > 1)", "column 9: ')' does not belong here"),
        ("gpus > 1 gpus < 2", "column 10: 'gpus' does not belong here"),
        ("gpu_busy < ,5", "column 12: something is missing before ','"),
        ("gpus > 1;", "column 9: ';' is not known here"),
        ("gpus > 'abc", "column 8: the text that begins here has no end"),
        ("1.0 < gpus < 4.0", "two comparisons in a row"),
        ("held_idle == 1", "write held_idle or !held_idle"),
        ("gpu_busy > 50", "compares gpu_busy with 50; a share is 0 to 1: write 0.5 for 50 %"),
        ("gpus > 1.0 && 1.5 < known.gpu_busy", "compares gpu_busy with 1.5; a share is 0 to 1"),
        ("gpus * 2 > cpu_cores", "write 2.0 and not 2 in a calculation"),
        ("gpu_busy < 0.05 && gpus * 2 > cpu_cores", "write 2.0 and not 2"),
        (
            "held_idle > 1.0",
            "compares held_idle with 1.0; it is true or false: write held_idle or !held_idle",
        ),
        ("[1, 2].all(x, x > gpus)", "there are comparisons"),
        ('gpus > 0.0 && "aaaa".matches("(a*)*b")', "uses 'matches'"),
        ("size([gpus]) > 0", "uses 'size'"),
        ("known == known", "without a name"),
        ("known.gpus > 1.0", "has(known.gpus)"),
        ("true", "asks for no figure"),
        ("1 / 0 > gpus", "division by zero"),
        ("gpus > 0.0" + " && gpus > 0.0" * 200, "longer than 2000 characters"),
        ("(" * 900 + "gpus" + ")" * 900 + " > 1.0", "is no CEL expression"),
    ],
)
def test_what_is_wrong_is_said_when_it_is_read(source: str, said: str) -> None:
    with pytest.raises(ExpressionError) as error:
        read(source)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert "expecting" not in str(error.value)


def test_what_is_long_is_cut_between_words() -> None:
    assert line("one\ntwo") == "one two"
    cut = line("word " * 100)
    assert len(cut) <= MAX_TEXT
    assert set(cut.split()) == {"word", "…"}
    assert len(line("x" * 1000)) <= MAX_TEXT


@pytest.mark.parametrize(
    ("source", "values", "is_true"),
    [
        ("gpus >= 1.0 && gpu_busy < 0.1", {"gpus": 1.0, "gpu_busy": 0.05}, True),
        ("gpus >= 1.0 && gpu_busy < 0.1", {"gpus": 0.0, "gpu_busy": 0.05}, False),
        ("gpus > 1", {"gpus": 2.0}, True),
        ("held_idle || cpu_cores < 0.1", {"held_idle": True, "cpu_cores": 3.0}, True),
        ("(cpu_cores - 1.0) / gpus > double(1)", {"cpu_cores": 5.0, "gpus": 2.0}, True),
        ("2.0 * gpu_busy > 1.5", {"gpu_busy": 0.8}, True),
        ("cpu_cores - gpu_busy < 1.5 * gpus", {"gpu_busy": 0.8, "cpu_cores": 2.0, "gpus": 1.0}, True),
        ("(gpus > 1.0) == (cpu_cores < 3.0)", {"gpus": 2.0, "cpu_cores": 1.0}, True),
        ("gpus in [1.0, 8.0]", {"gpus": 8.0}, True),
        ("!" * 1000 + "held_idle", {"held_idle": True}, True),
    ],
)
def test_values(source: str, values: dict[str, float | bool], is_true: bool) -> None:
    assert read(source).evaluate(context(values)) is is_true


def test_a_figure_behind_known_may_be_absent() -> None:
    one = read("gpus > 0.0 && (!has(known.gpu_busy) || known.gpu_busy < 0.5)")
    assert (one.figures, one.optional, one.names) == ({"gpus"}, {"gpu_busy"}, ("gpu_busy", "gpus"))
    for values, is_true in (
        ({"gpus": 1.0}, True),
        ({"gpus": 1.0, "gpu_busy": 0.2}, True),
        ({"gpus": 1.0, "gpu_busy": 0.9}, False),
    ):
        assert one.evaluate(context(values, one.optional)) is is_true


def test_what_shows_at_work_only_is_an_error_of_its_own() -> None:
    with pytest.raises(EvaluationError, match="overflow"):
        read("int(gpus * 1000.0) > 1").evaluate(context({"gpus": 1e300}))
    with pytest.raises(EvaluationError):  # 0/0 is not a number, and that cannot be compared
        read("cpu_cores / gpus > 1.0").evaluate(context({"gpus": 0.0, "cpu_cores": 0.0}))
