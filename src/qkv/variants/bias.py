"""An array added to the scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv.errors import DTypeError
from qkv.problem.builder import Builder, Shape, kind_of_array
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant


@dataclass(frozen=True, eq=False, repr=False)
class Bias(Variant):
    """`score + array`; an entry of exactly -inf forbids the pair. A bare floating array means this.

    Parameters
    ----------
    array : floating array that broadcasts to (..., num_heads, q_len, kv_len)
        Read in place, by row. A large finite entry such as -1e9 is ordinary arithmetic: a row
        that has nothing else still attends, uniformly.
    """

    roles: ClassVar[Mapping[str, Role]] = {"array": "in_place"}
    uses_batch_index: ClassVar[bool] = False

    array: ArrayLike

    def lower(self, builder: Builder) -> None:
        array = np.asarray(self.array)
        if kind_of_array(array, "a bias") != "float":
            raise DTypeError(
                f"a bias has dtype {array.dtype}, not a floating type.",
                action="Pass array.astype(np.float32) to add it, or Mask(array.astype(bool)).",
            )
        bias = builder.broadcast(array, "bias")
        builder.mask(bias != -np.inf)
        builder.mod(builder.score + bias)

    def naive(self, dense: Dense) -> None:
        bias = np.broadcast_to(dense.here(self.array), dense.scores.shape).astype(np.float64)
        dense.allowed &= ~np.isneginf(bias)
        dense.scores = dense.scores + bias

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Bias]:
        full = rng.normal(size=shape.scores).astype(np.float32)
        holes = rng.normal(size=(shape.q_len, shape.kv_len))
        holes[rng.random(holes.shape) < 0.3] = -np.inf
        finite = np.where(rng.random((shape.kv_len,)) < 0.5, float(np.finfo(np.float32).min), 0.0)
        return (cls(full), cls(holes), cls(finite))
