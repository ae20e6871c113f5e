"""The check of each exercise: the right answer, and the usual mistakes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.errors import QkvError
from qkv.exercises.verdict import NotNumbersError, Numbers, Verdict, array_of, numbers_in
from qkv.exercises.written import UnreadableError, readings
from qkv.inspection.traces.steps import softmax
from qkv.ledger import attention_operations, ledger
from qkv.samples import shared_example
from qkv.teaching.classical import ScaledDotProductAttention

__all__ = ["NAMES", "numbers_of", "verdict_on"]

Array = NDArray[np.float64]


def _weights(q: Array, k: Array, scale: float) -> Array:
    return softmax(q @ k.T * scale).weights


_OVER_COLUMNS = "this comes of a softmax over columns; the weights of each query must add up to 1."


def _over_columns(scores: Array) -> Array:
    return softmax(scores.T).weights.T


@cache
def _hand_computation() -> Numbers:
    q, k = np.eye(2), np.array([[1.0, 1.0], [1.0, 0.0]])
    weights = _weights(q, k, 1.0)
    return Numbers(
        weights @ k,
        "the scores are [[1, 1], [1, 0]], so the first token mixes both values equally.",
        {
            "these are the weights; multiply them by V.": weights,
            "this divides by sqrt(2); the exercise asks for no divisor.": _weights(q, k, sqrt(0.5))
            @ k,
            "these are the scores; take the softmax of each row, and multiply by V.": q @ k.T,
            _OVER_COLUMNS: _over_columns(q @ k.T) @ k,
        },
    )


@cache
def _row_of_sat() -> Numbers:
    x = shared_example()
    weights, _ = ScaledDotProductAttention(4).forward(x.q, x.k, x.v)
    scores = x.q @ x.k.T
    return Numbers(
        weights[2],
        '"cat" and "sat" have the largest scores, both 1, and get equal weights of 0.2505.',
        {
            "this is without the divisor; divide the scores by 2.": _weights(x.q, x.k, 1)[2],
            'this is what each token gives to "sat", a column; pass the row.': weights[:, 2],
            "these are the scores; take their softmax.": scores[2] / 2,
            "these are scores without the divisor; divide, then take their softmax.": scores[2],
            'this is the row of "cat"; rows are counted from 0.': weights[1],
            _OVER_COLUMNS: _over_columns(scores / 2)[2],
        },
    )


@cache
def _plot() -> Numbers:
    x = shared_example()
    weights = _weights(x.q, x.k, 0.5)
    return Numbers(
        weights,
        "each row adds up to 1, and each token looks where its query points.",
        {
            "this is transposed; queries go down and keys across.": weights.T,
            "this is without the divisor; divide the scores by sqrt(4) = 2.": _weights(x.q, x.k, 1),
            "these are scores; plot their softmax.": x.q @ x.k.T / 2,
            _OVER_COLUMNS: _over_columns(x.q @ x.k.T / 2),
        },
    )


@cache
def _without_scale() -> Numbers:
    x = shared_example()
    weights, scaled = (_weights(x.q, x.k, scale) for scale in (1.0, 0.5))
    return Numbers(
        weights,
        f"the largest weight grows from {scaled.max():.2f} to {weights.max():.2f}.",
        {
            "this is with the divisor; leave it out.": scaled,
            "this multiplies by sqrt(4); leave the scores as they are.": _weights(x.q, x.k, 2.0),
            "these are the scores; take the softmax of each row.": x.q @ x.k.T,
            "this is transposed; queries go down and keys across.": weights.T,
            _OVER_COLUMNS: _over_columns(x.q @ x.k.T),
        },
    )


@cache
def _identical() -> Numbers:
    q = np.array([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8]])
    return Numbers(
        _weights(q, q, sqrt(0.5)),
        "rows of equal length score highest with themselves, so each token gives itself most.",
        {
            "this is without the divisor; divide the scores by sqrt(2).": _weights(q, q, 1.0),
            "this divides by 2; d_k is 2, so the divisor is sqrt(2).": _weights(q, q, 0.5),
            "identical Q and K do not give the unit matrix: other keys get weight too.": np.eye(3),
            "these are the scores; take the softmax of each row.": q @ q.T * sqrt(0.5),
            _OVER_COLUMNS: _over_columns(q @ q.T * sqrt(0.5)),
        },
    )


@cache
def _orthogonal() -> Numbers:
    c = 2 * log(297)
    return Numbers(
        c,
        f"exp(c / 2) = 0.99 (exp(c / 2) + 3), so c = 2 log(297) = {c:.3f}.",
        {
            "this leaves out the divisor; scores are c / sqrt(4).": c / 2,
            "this divides by d_k = 4, not by its root.": 2 * c,
            "this counts 4 other keys; there are 3.": 2 * log(396),
        },
    )


@cache
def _variance() -> Numbers:
    return Numbers(
        32.0,
        "a dot product has variance d_k sigma^4, so the divisor is sqrt(64) * 4 = 32.",
        {
            "8 is right for variance 1; here products of two entries have variance sigma^4.": 8.0,
            "each term is a product of two entries, whose variance is sigma^4, not sigma^2.": 16.0,
            "1024 is the variance of the scores; divide by its root.": 1024.0,
        },
        letters={"sigma": 2.0, "d_k": 64.0, "dk": 64.0, "d": 64.0},
        before=("/", "by", "divide by", "divided by"),
    )


@cache
def _operations() -> Numbers:
    n, d = 1000, 512
    products = attention_operations(n * n, d, d)
    return Numbers(
        products,
        "4 n^2 d = 2,048,000,000: two products of n * n * d multiply-adds each.",
        {
            "this is n^2, the number of scores; each takes 4 d operations.": n * n,
            "this counts multiply-adds of one product; there are two of them.": n * n * d,
            "this is half: two products, and a multiply-add counts as two.": 2 * n * n * d,
        },
        near=0.5,
        letters={"n": float(n), "d": float(d)},
        too={
            "counted one by one, with the softmax; the two products take 4 n^2 d.": int(
                ledger(n, n, d, d).total
            )
        },
    )


@cache
def _dictionary() -> Numbers:
    x = shared_example()
    scores = x.q @ x.k.T / 2
    hard, soft = x.v[scores[1].argmax()], softmax(scores).weights[1] @ x.v
    return Numbers(
        [hard, soft],
        'the best key is that of "The"; attention returns a mixture in which it weighs 0.40.',
        {
            "the rows are in the other order: hard, then soft.": [soft, hard],
            "the soft one is without the divisor; divide the scores by sqrt(4) = 2.": [
                hard,
                _weights(x.q, x.k, 1.0)[1] @ x.v,
            ],
            _OVER_COLUMNS: [hard, _over_columns(scores)[1] @ x.v],
            'the hard one is the value of "cat" itself; its best key is that of "The".': [
                x.v[1],
                soft,
            ],
        },
    )


def _entropy(answer: Any) -> Verdict:
    scores = numbers_in(answer, (2, 5))
    high, low = softmax(scores).entropy
    entropies = f"the entropies are {high:.3f} and {low:.3f} nats"
    if high < 0.99 * log(5):
        hint = (
            "the rows are in the other order."
            if low >= 0.99 * log(5)
            else ("the first must be at least 0.99 log(5) = 1.593: nearly equal scores give it.")
        )
        return Verdict(False, f"{entropies}; {hint}")
    if low >= 0.01:
        return Verdict(
            False,
            f"{entropies}; the second must be below 0.01: one far larger score gives it.",
        )
    return Verdict(True, f"{entropies}: equal scores spread, one far above the others chooses.")


def _same_projection(answer: Any) -> Verdict:
    try:
        given = array_of(answer)
    except (ValueError, TypeError, RuntimeError, QkvError):
        given = np.empty(0)
    if given.shape != (2,) or given.dtype != bool:
        raise NotNumbersError(
            "two of yes and no are asked for, for the scores and then for the weights; in Python "
            "True and False."
        )
    scores, weights = given
    if not scores:
        return Verdict(False, "with W_Q = W_K, q_i . k_j = q_i . q_j = q_j . k_i: symmetric.")
    if weights:
        return Verdict(
            False, "each row is divided by its own sum, and the sums differ: not symmetric."
        )
    return Verdict(True, "q_i . q_j is symmetric; each row of weights is divided by its own sum.")


_NUMBERS: dict[str, Callable[[], Numbers]] = {
    "003.1": _hand_computation,
    "003.2": _row_of_sat,
    "003.3": _plot,
    "003.6": _without_scale,
    "003.7": _identical,
    "003.8": _orthogonal,
    "003.9": _variance,
    "003.10": _operations,
    "003.11": _dictionary,
}

_OTHERS: dict[str, Callable[[Any], Verdict]] = {"003.4": _entropy, "003.5": _same_projection}

NAMES = tuple(sorted((*_NUMBERS, *_OTHERS), key=lambda name: int(name.partition(".")[2])))
"""The exercises, in order."""


def numbers_of(name: str) -> Numbers | None:
    """The numbers that an exercise asks for; None where many answers are right."""
    return _NUMBERS[name]() if name in _NUMBERS else None


def verdict_on(name: str, answer: Any) -> Verdict:
    """Whether an answer is right; of what a text may mean, what is right, or of the form asked for.

    An array of another form is wrong, not an error; a text of another form is not checked, since it
    may have been meant in another way than it was read.
    """
    numbers = numbers_of(name)
    check = _OTHERS[name] if numbers is None else numbers.check
    is_text = isinstance(answer, str)
    try:
        meanings = _readings(answer, numbers) if is_text else [answer]
    except UnreadableError as reason:
        return Verdict(False, str(reason), checked=False)
    formed: list[Verdict] = []
    others: list[Verdict] = []
    for each in meanings:
        try:
            formed.append(check(each))
        except NotNumbersError as reason:
            others.append(Verdict(False, str(reason), checked=not is_text))
    return next((each for each in formed if each), [*formed, *others][0])


def _readings(text: str, numbers: Numbers | None) -> list[Any]:
    return readings(text) if numbers is None else readings(text, numbers.letters, numbers.before)
