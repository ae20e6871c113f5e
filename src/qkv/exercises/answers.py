"""The check of each exercise: the right answer, and the usual mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from math import log, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arrays.views import view
from qkv.classical import ScaledDotProductAttention
from qkv.errors import QkvError
from qkv.exercises.written import UnreadableError, readings
from qkv.inspection.traces.steps import softmax
from qkv.ledger import attention_operations, ledger
from qkv.samples import shared_example

__all__ = ["NAMES", "Verdict", "numbers_of", "verdict_on"]

Array = NDArray[np.float64]

_NEAR = 0.0051
"""Half a unit of the second decimal, and a little for numbers whose third decimal is 5."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether an answer is right, and why.

    Attributes
    ----------
    right : bool
    why : str
        In one or two sentences.

    Examples
    --------
    >>> import qkv
    >>> print(qkv.exercises.check("003.2", 0.0))
    wrong: the answer has shape (); (5,) is asked for.
    """

    right: bool
    why: str

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        return f"{'right' if self.right else 'wrong'}: {self.why}"


class _NotNumbersError(Exception):
    """An answer of another form than was asked for; its text is the reason."""


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a right answer, and those of usual mistakes.

    Attributes
    ----------
    right : array, or nested lists
    why : str
        What a right answer is told.
    mistakes : dict of str to array
        Numbers that are wrong, by the reason.
    near : float
        By how much a right number may be off.
    too : dict of str to array
        Other numbers that are right, by what they are told.
    """

    right: Any
    why: str
    mistakes: dict[str, Any]
    near: float = _NEAR
    too: dict[str, Any] = field(default_factory=dict)

    def check(self, answer: Any) -> Verdict:
        """Right if all numbers are near; else a usual mistake, or what is furthest off."""
        wanted = np.asarray(self.right, np.float64)
        given = _numbers(answer, wanted.shape)
        for why, right in {self.why: wanted, **self.too}.items():
            if np.abs(given - right).max() <= self.near:
                return Verdict(True, why)
        for reason, wrong in self.mistakes.items():
            if np.abs(given - np.asarray(wrong)).max() <= self.near:
                return Verdict(False, reason)
        if wanted.ndim == 0:
            side = "small" if given < wanted else "large"
            return Verdict(False, f"{float(given):g} is too {side}.")
        off = np.abs(given - wanted)
        where = tuple(int(i) for i in np.unravel_index(int(off.argmax()), off.shape))
        count, place = int((off > self.near).sum()), _place(where)
        return Verdict(
            False,
            f"{count} of {off.size} numbers are off; "
            f"the furthest is {given[where]:.4g} at {place}.",
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, for a page that checks answers itself."""

        def listed(numbers: dict[str, Any]) -> list[dict[str, Any]]:
            return [
                {"why": why, "numbers": np.asarray(some, np.float64).tolist()}
                for why, some in numbers.items()
            ]

        right = listed({self.why: self.right, **self.too})
        return {"right": right, "mistakes": listed(self.mistakes), "near": self.near}


def _numbers(answer: Any, shape: tuple[int, ...]) -> Array:
    """An answer as float64 numbers of a shape, all of them finite."""
    if hasattr(answer, "get_array"):  # An image, as matplotlib's imshow returns it.
        answer = np.ma.filled(answer.get_array().astype(np.float64), np.nan)
    if isinstance(answer, bool | np.bool_):
        raise _NotNumbersError("the answer is True or False; pass numbers.")
    plain = isinstance(answer, list | tuple | int | float | np.generic)
    try:
        array = np.asarray(answer) if plain else view(answer, "answer")
    except (ValueError, TypeError, RuntimeError, QkvError):
        raise _NotNumbersError(
            f"the answer is no array of numbers of shape {shape}; it is of type "
            f"{type(answer).__name__}, or its rows differ in length."
        ) from None
    if array.dtype.kind not in "iuf" and array.dtype.name != "bfloat16":
        raise _NotNumbersError(f"the answer holds {array.dtype}, not numbers.")
    if array.shape != shape:
        raise _NotNumbersError(f"the answer has shape {array.shape}; {shape} is asked for.")
    numbers = array.astype(np.float64)
    if not np.isfinite(numbers).all():
        first = tuple(int(i) for i in np.argwhere(~np.isfinite(numbers))[0])
        where = f" at {_place(first)}" if first else ""
        raise _NotNumbersError(f"the answer has {numbers[first]}{where}; numbers are asked for.")
    return numbers


def _place(where: tuple[int, ...]) -> str:
    """An index as it is read, from 0 on."""
    if len(where) == 2:
        return f"row {where[0]}, column {where[1]}"
    return f"index {', '.join(map(str, where))}"


def _weights(q: Array, k: Array, scale: float) -> Array:
    return softmax(q @ k.T * scale).weights


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
            "this is a softmax over columns; each query's row must add up to 1.": softmax(
                (x.q @ x.k.T / 2).T
            ).weights.T,
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
            'the hard one is the value of "cat" itself; its best key is that of "The".': [
                x.v[1],
                soft,
            ],
        },
    )


def _entropy(answer: Any) -> Verdict:
    scores = _numbers(answer, (2, 5))
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
    given = list(answer) if isinstance(answer, list | tuple | np.ndarray) else []
    if len(given) != 2 or not all(isinstance(each, bool | np.bool_) for each in given):
        raise _NotNumbersError(
            "two of yes and no are asked for, for the scores and then for the weights; in Python "
            "True and False."
        )
    scores, weights = map(bool, given)
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

    An answer of another form is wrong, not an error.
    """
    try:
        meanings = readings(answer) if isinstance(answer, str) else [answer]
    except UnreadableError as reason:
        return Verdict(False, str(reason))
    numbers = numbers_of(name)
    check = _OTHERS[name] if numbers is None else numbers.check
    formed: list[Verdict] = []
    others: list[Verdict] = []
    for each in meanings:
        try:
            formed.append(check(each))
        except _NotNumbersError as reason:
            others.append(Verdict(False, str(reason)))
    return next((each for each in formed if each), [*formed, *others][0])
