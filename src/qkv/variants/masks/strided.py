"""Every n-th key, counted from the query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.arguments.declarations import is_integer, shown
from qkv.errors import ArgumentError
from qkv.problem.building.builder import INDEX_LIMIT, Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, repr=False)
class Strided(MaskVariant):
    """Allowed where `(q_pos - kv_pos) % stride == 0`.

    The strided pattern of Sparse Transformers is
    `Causal() & (SlidingWindow(stride - 1, 0) | Strided(stride))`.

    Parameters
    ----------
    stride : int
        Distance between allowed keys, 1 or more.

    Raises
    ------
    ArgumentError
        If the stride is not a whole number of 1 or more.

    Notes
    -----
    Source: Child et al., "Generating Long Sequences with Sparse Transformers" (2019), section 4.2.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.zeros((4, 8))
    >>> qkv.inspect(x, x, x, qkv.Causal() & qkv.Strided(2)).weights[3]
    array([0. , 0.5, 0. , 0.5])
    """

    roles: ClassVar[Mapping[str, Role]] = {"stride": "static"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    stride: int

    def __post_init__(self) -> None:
        if not is_integer(self.stride) or not 1 <= self.stride <= INDEX_LIMIT:
            raise ArgumentError(
                f"Strided stride={shown(self.stride)} is not a whole number of 1 or more.",
                action="Pass the distance between allowed keys.",
            )

    def lower(self, builder: Builder) -> None:
        stride = builder.scalar(int(self.stride), "stride")
        builder.mask((builder.q_pos - builder.kv_pos) % stride == 0)

    def naive(self, dense: Dense) -> None:
        for i, q_pos in enumerate(dense.q_pos):
            for j, kv_pos in enumerate(dense.kv_pos):
                if abs(int(q_pos) - int(kv_pos)) % self.stride:
                    dense.allowed[i, j] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Strided]:
        return (cls(1), cls(4))
