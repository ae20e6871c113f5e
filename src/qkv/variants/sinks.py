"""Attention sinks: a logit in the denominator of the softmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant


@dataclass(frozen=True, eq=False, repr=False)
class Sinks(Variant):
    """`exp(values[head])` enters the denominator of every row, and nothing else.

    Parameters
    ----------
    values : float or array (num_heads,)
        Logit of each query head, on the scale of the final scores.

    Raises
    ------
    ShapeError
        At the call, if there is not one value for each query head.

    Notes
    -----
    Source: gpt-oss (2025); Miller, "Attention Is Off By One" (2023), is `Sinks(0.0)`.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((1, 1, 4))
    >>> qkv.inspect(x, x, x, qkv.Sinks(0.0)).weights[...]
    array([[[0.5]]])
    """

    roles: ClassVar[Mapping[str, Role]] = {"values": "value"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True
    read_by_backend: ClassVar[bool] = True

    values: ArrayLike

    def lower(self, builder: Builder) -> None:
        builder.sink(self.values)

    def naive(self, dense: Dense) -> None:
        values = np.broadcast_to(np.asarray(self.values, np.float64), (dense.num_heads,))
        dense.sink = float(values[dense.head])

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Sinks]:
        return (cls(0.0), cls(rng.normal(size=shape.num_heads)))
