"""Variants that read their arrays in different ways, and the same scores in torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

BATCH = (3, 2)
SHAPE = (*BATCH, 2, 4, 8)
"""The shape of query, key and value: batch rows, heads, tokens, dimensions."""


class Own:
    """A variant of a number and an array, as a user writes one."""

    roles: ClassVar = {"array": "value", "number": "value"}

    def __init__(self, array: Any, number: float = 1.5) -> None:
        self.array, self.number = array, number


class NumberBesideArray(Own):
    """`number * score - array[head] * distance`."""

    def lower(self, builder: Any) -> None:
        by = builder.per_head(self.array, "array") * abs(builder.q_pos - builder.kv_pos)
        builder.mod(builder.scalar(self.number) * builder.score - by)


class ReadTwice(Own):
    """`array[head] * score - array[head] * distance`, from two tables of one array."""

    def lower(self, builder: Any) -> None:
        by = builder.per_head(self.array, "second") * abs(builder.q_pos - builder.kv_pos)
        builder.mod(builder.per_head(self.array, "first") * builder.score - by)


class OfBatchRows(Own):
    """`array[batch row] * score`."""

    def lower(self, builder: Any) -> None:
        builder.mod(builder.per_batch(self.array, "array") * builder.score)


class OfTwoArrays:
    """`array[head] * score - other[head] * distance`, of arrays that may be one."""

    roles: ClassVar = {"array": "value", "other": "value"}

    def __init__(self, array: Any) -> None:
        self.array, self.other = array, array

    def lower(self, builder: Any) -> None:
        by = builder.per_head(self.other, "other") * abs(builder.q_pos - builder.kv_pos)
        builder.mod(builder.per_head(self.array, "array") * builder.score - by)


class Reshaped(OfTwoArrays):
    """The same of arrays `(1, heads)`."""

    def lower(self, builder: Any) -> None:
        first, second = (np.asarray(a).reshape(-1) for a in (self.array, self.other))
        by = builder.per_head(second, "other") * abs(builder.q_pos - builder.kv_pos)
        builder.mod(builder.per_head(first, "array") * builder.score - by)


class Computed(Own):
    """`(2 * array)[head] * score`, where `lower` computes the doubled array."""

    def lower(self, builder: Any) -> None:
        builder.mod(builder.per_head(2 * np.asarray(self.array), "array") * builder.score)


class Example(NamedTuple):
    """A kind of variant, an array for it, and its scores by torch: `(array, score, distance)`."""

    kind: Callable[..., Any]
    array: Any
    scores: Callable[[Any, Any, Any], Any]


def _heads(array: torch.Tensor) -> torch.Tensor:
    return array[:, None, None]


def _rows(array: torch.Tensor) -> torch.Tensor:
    return array[..., None, None, None]


_rng = np.random.default_rng(5)
EXAMPLES = {
    "a number beside an array": Example(
        NumberBesideArray, _rng.random(2), lambda a, s, d: 1.5 * s - _heads(a) * d
    ),
    "an array that is read twice": Example(
        ReadTwice, _rng.random(2), lambda a, s, d: _heads(a) * s - _heads(a) * d
    ),
    "two arrays that are one": Example(
        OfTwoArrays, _rng.random(2), lambda a, s, d: _heads(a) * s - _heads(a) * d
    ),
    "one array, reshaped": Example(
        Reshaped, _rng.random((1, 2)), lambda a, s, d: _heads(a[0]) * s - _heads(a[0]) * d
    ),
    **{
        f"rows of shape {shape}": Example(
            OfBatchRows, _rng.random(shape), lambda a, s, d: _rows(a) * s
        )
        for shape in ((), (2,), (1, 2), (3, 1), (3, 2))
    },
}


def operands() -> list[Any]:
    return list(np.random.default_rng(6).normal(size=(3, *SHAPE)))


def expected(example: Example) -> tuple[Any, Any]:
    """The output, and the gradient of the sum of its squares with respect to the array."""
    query, key, value = map(torch.tensor, operands())
    array = torch.tensor(example.array, requires_grad=True)
    places = torch.arange(SHAPE[-2])
    scores = query @ key.mT / np.sqrt(SHAPE[-1])
    scores = example.scores(array, scores, abs(places[:, None] - places))
    out = scores.softmax(-1) @ value
    (gradient,) = torch.autograd.grad(out.square().sum(), array)
    return out.detach().numpy(), gradient.numpy()
