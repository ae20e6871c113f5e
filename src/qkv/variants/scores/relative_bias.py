"""T5's learned bias of the distance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any, ClassVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from qkv.arguments.declarations import is_integer, shown
from qkv.arguments.readable_checks import array_shape, as_array
from qkv.errors import ArgumentError, ShapeError
from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role, Variant

_FARTHEST = 2**24


@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Variant):
    """`score + table[bucket(kv_pos - q_pos), head]`.

    Parameters
    ----------
    table : floating array (num_buckets, num_heads)
        The learned embedding, as T5 stores it.
    bidirectional : bool
        Half of the buckets for keys after the query (encoder), or none (decoder).
    max_distance : int
        Distances from here on share the last bucket.

    Raises
    ------
    ShapeError
        If the table is not (num_buckets, num_heads), or has too few buckets.
    ArgumentError
        If max_distance is not beyond the buckets of one distance each, or above 2**24.

    Notes
    -----
    Half of a direction's buckets hold one distance each, the others grow logarithmically. Source:
    Raffel et al., "T5" (2020), section 2.1 and the published code.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x, table = np.zeros((1, 2, 4)), np.zeros((4, 1))
    >>> table[3] = np.log(3.0)  # keys one or more after the query
    >>> qkv.inspect(x, x, x, qkv.RelativeBias(table)).weights[0].round(2)
    array([[0.25, 0.75],
           [0.5 , 0.5 ]])
    """

    roles: ClassVar[Mapping[str, Role]] = {
        "table": "in_place",
        "bidirectional": "static",
        "max_distance": "static",
    }
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    table: ArrayLike
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.bidirectional, bool | np.bool_):
            raise ArgumentError(
                f"bidirectional={shown(self.bidirectional)} is not a bool.",
                action="Pass True or False.",
            )
        shape = array_shape("table", self.table)
        per_side = shape[0] // (2 if self.bidirectional else 1) if len(shape) == 2 else 0
        if per_side < 2:
            raise ShapeError(
                f"a relative bias table has shape {shape}; it must be "
                f"(num_buckets, num_heads) with at least {4 if self.bidirectional else 2} buckets.",
                action="Pass the weight of T5's relative_attention_bias.",
            )
        if not is_integer(self.max_distance) or self.max_distance <= per_side // 2:
            raise ArgumentError(
                f"max_distance={shown(self.max_distance)} is not beyond the {per_side // 2} exact "
                "buckets of a direction.",
                action="Pass T5's relative_attention_max_distance (128).",
            )
        if self.max_distance > _FARTHEST:
            raise ArgumentError(
                f"max_distance={shown(self.max_distance)} is above {_FARTHEST}; the bucket of each "
                "distance is kept.",
                action="Pass T5's relative_attention_max_distance (128).",
            )

    def lower(self, builder: Builder) -> None:
        table = as_array("table", self.table)
        if table.shape[1] != builder.shape.num_heads:
            raise ShapeError(
                f"the relative bias table has {table.shape[1]} heads; "
                f"num_heads={builder.shape.num_heads}.",
                action="Pass a table (num_buckets, num_heads).",
            )
        far = int(self.max_distance)
        distances = np.arange(-far, far + 1)
        buckets = relative_buckets(distances, len(table), self.bidirectional, far)
        bucket_of = builder.table(buckets, "bucket of distance")
        bound = builder.scalar(far, "max_distance")
        clipped = (builder.kv_pos - builder.q_pos + bound).clip(0, bound + bound)
        bias = builder.table(table, "relative bias")[bucket_of[clipped], builder.head]
        builder.mod(builder.score + bias)

    def naive(self, dense: Dense) -> None:
        table = np.asarray(self.table, np.float64)
        buckets = relative_buckets(
            -dense.distance, len(table), self.bidirectional, self.max_distance
        )
        dense.scores = dense.scores + table[buckets, dense.head]

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[RelativeBias]:
        table = rng.normal(size=(32, shape.num_heads)).astype(np.float32)
        return (cls(table), cls(table, bidirectional=False, max_distance=64))


def relative_buckets(
    relative: NDArray[Any], num_buckets: int, bidirectional: bool, max_distance: int
) -> NDArray[np.int64]:
    """T5's bucket of each `kv_pos - q_pos`, in the float32 arithmetic of the published code."""
    relative = np.asarray(relative, np.int64)
    offset = np.zeros_like(relative)
    if bidirectional:
        num_buckets //= 2
        offset = (relative > 0) * num_buckets
        relative = np.abs(relative)
    else:
        relative = -np.minimum(relative, 0)
    exact = num_buckets // 2
    ratio = np.maximum(relative, exact).astype(np.float32) / np.float32(exact)
    growth = np.log(ratio) / np.float32(log(max_distance / exact))
    far = exact + (growth * np.float32(num_buckets - exact)).astype(np.int64)
    return offset + np.where(relative < exact, relative, np.minimum(far, num_buckets - 1))
