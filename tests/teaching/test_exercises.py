"""Answers that are right, answers that usual mistakes give, and what is not an answer at all."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from fractions import Fraction
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.exercises import EXERCISES, check
from qkv.exercises.written import readings

GOLDENS = json.loads(
    Path(__file__).parents[1].joinpath("golden", "goldens.json").read_text(encoding="utf-8")
)["cases"]
WRITTEN = json.loads(Path(__file__).with_name("written_answers.json").read_text(encoding="utf-8"))
SHARED = GOLDENS["shared_example"]["exact"]
UNSCALED = GOLDENS["shared_example_unscaled"]["exact"]
HAND = GOLDENS["exercise_hand_compute"]["exact"]
V = np.array(GOLDENS["shared_example"]["v"])


def identical() -> np.ndarray:
    q = np.array([[1, 0], [0, 1], [0.6, 0.8]])
    e = np.array([[exp(a @ b / 2**0.5) for b in q] for a in q])
    return e / e.sum(axis=1, keepdims=True)


RIGHT: dict[str, Any] = {
    "003.1": HAND["output"],
    "003.2": SHARED["weights"][2],
    "003.3": SHARED["weights"],
    "003.4": ([0, 0, 0, 0, 0], [10, 0, 0, 0, 0]),
    "003.5": (True, False),
    "003.6": UNSCALED["weights"],
    "003.7": identical(),
    "003.8": 2 * log(3 * 0.99 / 0.01),
    "003.9": 32,
    "003.10": 2_048_000_000,
    "003.11": [V[0], SHARED["output"][1]],
}


def test_every_exercise_has_an_answer_here() -> None:
    assert [exercise.name for exercise in EXERCISES] == list(RIGHT)
    assert all(e.title and e.question and e.answer and e.hint and e.solution for e in EXERCISES)


@pytest.mark.parametrize("name", RIGHT)
def test_right_answers(name: str) -> None:
    verdict = check(name, RIGHT[name])
    assert verdict, verdict
    assert str(verdict).startswith("right: ")


def test_the_page_has_every_exercise_and_its_answer() -> None:
    page = (Path(__file__).parents[2] / "docs/exercises.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)[1:]
    for exercise, section in zip(EXERCISES, sections, strict=True):
        assert section.startswith(f"{exercise.name} {exercise.title}\n\n{exercise.question}\n")
        assert f'assert check("{exercise.name}", ' in section


@pytest.mark.parametrize("name", [n for n in RIGHT if n not in ("003.4", "003.5", "003.10")])
def test_two_decimals_are_enough_and_one_is_not(name: str) -> None:
    right = np.array(RIGHT[name], float)
    assert check(name, right.round(2))
    wrong = check(name, right + 0.02)
    assert not wrong
    assert "off" in wrong.why or "too large" in wrong.why


@pytest.mark.parametrize(
    ("name", "answer", "why"),
    [
        ("003.1", HAND["weights"], "these are the weights; multiply them by V"),
        ("003.1", HAND["raw"], "these are the scores"),
        ("003.2", UNSCALED["weights"][2], "without the divisor"),
        ("003.2", np.array(SHARED["weights"])[:, 2], "a column"),
        ("003.2", SHARED["scaled"][2], "these are the scores"),
        ("003.2", SHARED["weights"][1], 'the row of "cat"'),
        ("003.2", SHARED["output"][2], "4 numbers are given; 5 numbers are asked for"),
        ("003.3", np.array(SHARED["weights"]).T, "transposed"),
        ("003.3", UNSCALED["weights"], "without the divisor"),
        ("003.4", ([10, 0, 0, 0, 0], [0, 0, 0, 0, 0]), "in the other order"),
        ("003.4", ([0, 0, 0, 0, 0], [1, 0, 0, 0, 0]), "one far larger score"),
        ("003.4", ([3, 0, 0, 0, 0], [10, 0, 0, 0, 0]), "nearly equal scores"),
        ("003.5", (False, False), "q_j . k_i: symmetric"),
        ("003.5", (True, True), "divided by its own sum"),
        ("003.6", SHARED["weights"], "with the divisor; leave it out"),
        ("003.7", np.eye(3), "other keys get weight too"),
        ("003.8", log(297), "leaves out the divisor"),
        ("003.9", 8, "8 is right for variance 1"),
        ("003.9", 16, "not sigma^2"),
        ("003.9", 31, "31 is too small."),
        ("003.8", 11.4, "11.4 is too large by less than 1 %; write it with more digits."),
        ("003.10", 2.05e9, "2.05e+09 is too large by less than 1 %; write it with more digits."),
        ("003.10", 1_000_000, "n^2, the number of scores"),
        ("003.10", 512_000_000, "one product"),
        ("003.10", 1_024_000_000, "this is half"),
        ("003.11", [SHARED["output"][1], V[0]], "in the other order"),
        ("003.11", [V[0], UNSCALED["output"][1]], "without the divisor"),
        ("003.11", [V[1], SHARED["output"][1]], 'the value of "cat" itself'),
    ],
)
def test_usual_mistakes_are_named(name: str, answer: Any, why: str) -> None:
    verdict = check(name, answer)
    assert not verdict
    assert why in verdict.why
    assert str(verdict) == f"wrong: {verdict.why}"


def over_columns(q: Any, k: Any, divisor: float) -> np.ndarray:
    """A softmax along the wrong axis: shares of each key's column."""
    powers = np.exp(np.array(q) @ np.array(k).T / divisor)
    return np.asarray(powers / powers.sum(axis=0))


def test_a_softmax_over_the_wrong_axis_is_named() -> None:
    x = GOLDENS["shared_example"]
    hand, rows = np.array([[1, 1], [1, 0]]), [[1, 0], [0, 1], [0.6, 0.8]]
    mixed = over_columns(x["q"], x["k"], 2)
    wrong = {
        "003.1": over_columns(np.eye(2), hand, 1) @ hand,
        "003.2": mixed[2],
        "003.3": mixed,
        "003.6": over_columns(x["q"], x["k"], 1),
        "003.7": over_columns(rows, rows, 2**0.5),
        "003.11": [V[0], mixed[1] @ V],
    }
    for name, answer in wrong.items():
        why = check(name, answer).why
        assert "over columns; the weights of each query must add up to 1." in why, (name, why)
    assert "transposed" in check("003.6", np.array(UNSCALED["weights"]).T).why


def traps(name: str) -> dict[str, Any]:
    shape = np.shape(RIGHT[name])
    numbers = np.zeros(shape)
    with_nan = np.where(np.arange(numbers.size).reshape(shape) == 0, np.nan, numbers)
    return {
        "NaN": with_nan,
        "infinity": np.where(np.isnan(with_nan), np.inf, numbers),
        "a string": "0.25",
        "strings": np.full(shape, "a"),
        "nothing": None,
        "an object": object(),
        "a dictionary": {"a": 1},
        "one axis more": numbers[None],
        "a ragged list": [[1.0], [1.0, 2.0]],
        "complex numbers": numbers + 1j,
        "no numbers": [],
    }


@pytest.mark.parametrize("trap", traps("003.1"))
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_no_answer_is_wrong_and_says_why(name: str, trap: str) -> None:
    verdict = check(name, traps(name)[trap])
    assert not verdict
    assert verdict.why.endswith(".")


def test_reasons_of_traps() -> None:
    assert "nan at row 0, column 0" in check("003.1", [[np.nan, 0], [0, 0]]).why
    assert "is 0.2 at index 1." in check("003.2", [0.2] * 5).why
    assert "the answer is of type bytes; one number" in check("003.9", b"32").why
    assert (
        "3 rows of 2 numbers are given; 2 rows of 2 numbers are asked for."
        in check("003.1", np.ones((3, 2))).why
    )
    assert "yes and no are given; one number is asked for" in check("003.9", True).why
    assert "an array of shape (2, 2, 2) is given" in check("003.1", np.ones((2, 2, 2))).why
    assert "words are given; 5 numbers" in check("003.2", ["0.15"] * 5).why
    assert "words are given; 5 numbers" in check("003.2", [0.15, None, 0.25, 0.15, 0.2]).why
    assert "the answer has inf at index 0" in check("003.2", [10**400] * 5).why


@pytest.mark.parametrize(("text", "wanted"), WRITTEN["read"])
def test_a_text_is_read_as_it_is_meant(text: str, wanted: list[Any]) -> None:
    found = readings(text)
    assert len(found) == len(wanted)
    for given, meant in zip(found, wanted, strict=True):
        assert np.shape(given) == np.shape(meant)
        assert np.asarray(given).dtype == (bool if np.asarray(meant).dtype == bool else float)
        np.testing.assert_allclose(given, meant, rtol=1e-12)


@pytest.mark.parametrize(
    "text", [*WRITTEN["unclear"], *WRITTEN["endless"], *WRITTEN["mixed"], "", " \n"]
)
def test_a_text_that_means_nothing_is_not_checked_and_says_why(text: str) -> None:
    """Such a text is not called wrong either: what it was meant to say may be right."""
    words = "could not be read as a number or a list of numbers"
    if text in WRITTEN["endless"]:
        words = "a finite number"
    elif text in WRITTEN["mixed"]:
        words = "some of the numbers have % and others have not"
    elif not text.strip():
        words = "nothing is written."
    verdict = check("003.8", text)
    assert not verdict
    assert not verdict.checked
    assert words in verdict.why
    assert str(verdict) == f"not checked: {verdict.why}"


@pytest.mark.parametrize(("text", "name"), WRITTEN["nameless"].items())
def test_a_word_without_a_value_is_named(text: str, name: str) -> None:
    verdict = check("003.8", text)
    assert not verdict.checked
    assert f'"{name}" has no value here' in verdict.why


@pytest.mark.parametrize("text", ["(" * 10_000 + "1", "-" * 100_000 + "1", "=" * 100_000])
def test_a_text_of_any_depth_is_read_at_once(text: str) -> None:
    assert "could not be read" in check("003.9", text).why


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("003.2", "0.25", "one number is given; 5 numbers are asked for"),
        ("003.2", "0.5, 0.25", "2 numbers are given; 5 numbers are asked for"),
        ("003.1", "1 0.5 1; 1 0.73 2", "2 rows of 3 numbers are given; 2 rows of 2 numbers are"),
        (
            "003.1",
            "1 0.5; 1",
            "the rows of the answer differ in length; 2 rows of 2 numbers are asked for",
        ),
        ("003.2", "yes", "yes and no are given; 5 numbers are asked for"),
        ("003.5", "1, 0", "two of yes and no are asked for"),
        ("003.9", "4 8", "2 numbers are given; one number is asked for"),
    ],
)
def test_a_text_of_another_form_is_not_checked(name: str, text: str, why: str) -> None:
    """The text may be a right answer that was read in another way than it was meant."""
    verdict = check(name, text)
    assert not verdict.checked
    assert why in verdict.why


@pytest.mark.parametrize("text", ["7 sigma^2", "6 n^2 d", "÷31", "30 %"])
def test_an_answer_that_was_read_and_is_not_right_is_wrong(text: str) -> None:
    verdict = check("003.10" if "n" in text else "003.9", text)
    assert not verdict
    assert verdict.checked
    assert str(verdict).startswith("wrong: ")


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.name)
def test_the_solutions_are_right_as_they_are_typed(exercise: Any) -> None:
    assert check(exercise.name, exercise.solved)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("003.1", "1 0.5; 1 0.73"),
        ("003.1", "1 0,5; 1 0,73"),
        ("003.2", "0,15 0,25 0,25 0,15 0,20"),
        ("003.4", "1 1 1 1 1\n12 0 0 0 0"),
        ("003.5", "y, n"),
        ("003.5", "symmetric, but not the weights"),
        ("003.2", "15 %, 25 %, 25 %, 15 %, 20 %"),
        ("003.2", "15% 25% 25% 15% 20%"),
        ("003.8", "2log(297)"),
        ("003.9", "8 sigma^2"),
        ("003.9", "8σ²"),
        ("003.9", "sqrt(d_k) sigma^2"),
        ("003.9", "σ² √d_k"),
        ("003.9", "√(d_kσ⁴)"),
        ("003.9", "÷32"),
        ("003.9", "/ 32"),
        ("003.9", "divide by √64 × 4"),
        ("003.9", "By 32"),
        ("003.10", "4 n^2 d"),
        ("003.10", "4n²d"),
        ("003.10", "4dn²"),
        ("003.10", "4nnd"),
        ("003.10", "4 N² D = 2 048 000 000"),
        ("003.10", "2 * 2 * n * n * d"),
        ("003.10", "4 × 1000² × 512"),
        ("003.10", "4 x 1,000^2 x 512"),
        ("003.10", "2.048 · 10⁹"),
        ("003.8", "c = 11.39"),
        ("003.8", "2 * np.log(297)"),
        ("003.8", "11,388"),
        ("003.8", "[11.387]"),
        ("003.2", "[[0.15, 0.25, 0.25, 0.15, 0.20]]"),
        ("003.4", "[[[1, 1, 1, 1, 1], [12, 0, 0, 0, 0]]]"),
        ("003.10", "2.048.000.000"),
    ],
)
def test_answers_of_people_are_right(name: str, text: str) -> None:
    verdict = check(name, text)
    assert verdict, verdict


def test_no_question_gives_its_answer_away() -> None:
    for exercise in EXERCISES:
        words = exercise.title + exercise.question + exercise.answer
        assert exercise.solved not in words
        assert str(check(exercise.name, "half")).count(exercise.solved) == 0
    why = check("003.5", "1, 0").why
    assert "(True, False)" not in why
    assert "yes, no" not in why


def test_questions_are_in_words_of_readers() -> None:
    """A reader who never programmed knows what is asked for, and in which form."""
    words = re.compile(r"\b(array|boolean|tuple|dtype|float|shape|argument)s?\b|\(\d+, \d+\)")
    for exercise in EXERCISES:
        for text in (exercise.title, exercise.question, exercise.answer, exercise.hint):
            assert not words.search(text), (exercise.name, text)


def test_arrays_of_other_libraries_and_pictures_are_answers() -> None:
    import torch
    from matplotlib.figure import Figure

    assert check("003.6", torch.tensor(UNSCALED["weights"], requires_grad=True))
    assert check("003.6", torch.tensor(UNSCALED["weights"]).bfloat16())
    assert check("003.9", np.array([32.0]))
    assert check("003.3", Figure().subplots().imshow(SHARED["weights"]))


def test_numbers_of_any_exact_type_are_answers() -> None:
    """Hand computation is often done with fractions."""
    row = [0.15, 0.25, 0.25, 0.15, 0.2]
    assert check("003.2", [Fraction(x) for x in row])
    assert check("003.2", np.array([Decimal(str(x)) for x in row]))
    assert check("003.1", [[1, Fraction(1, 2)], [1, Decimal("0.73")]])
    assert check("003.9", Fraction(32))
    assert check("003.9", Decimal(32))


def test_tables_and_masked_arrays_are_answers() -> None:
    class Table:
        """What a DataFrame of pandas is to NumPy."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
            return np.array([[1, 0.5], [1, 0.73]], dtype)

    assert check("003.1", Table())
    assert check("003.1", np.ma.array([[1, 0.5], [1, 0.73]]))
    hidden = np.ma.array([[1, 0.5], [1, 0.73]], mask=[[0, 0], [0, 1]])
    assert "the answer has nan at row 1, column 1" in check("003.1", hidden).why


def test_single_elements_of_other_libraries_are_answers() -> None:
    import jax.numpy as jnp
    import torch

    row = torch.tensor([0.15, 0.25, 0.25, 0.15, 0.2], requires_grad=True)
    assert check("003.2", list(row))
    assert check("003.2", row[None])
    scores = jnp.eye(2)
    assert check("003.5", (jnp.allclose(scores, scores.T), jnp.allclose(scores, scores + 1)))
    assert check("003.5", torch.tensor([True, False]))
    assert check("003.5", [torch.tensor(True), False])
    assert not check("003.5", [torch.tensor(True), torch.tensor(True)])


def test_operations_counted_one_by_one_are_right_too() -> None:
    assert check("003.10", int(qkv.cost.ledger(1000, 1000, 512, 512).total))
    assert check("003.10", 2.048e9)


def test_an_exercise_that_does_not_exist() -> None:
    with pytest.raises(qkv.ArgumentError, match=r"no exercise '003\.12'"):
        check("003.12", 1)
