"""Causal attention: a query sees keys at its own position and before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from qkv.problem.building.builder import Align, Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, repr=False)
class Causal(MaskVariant):
    """A query attends to keys with `kv_pos <= q_pos`.

    Parameters
    ----------
    align : "start", "end" or None
        Where the query rows stand among the keys, stated for the whole problem: "start" puts row 0
        at position 0 (torch, JAX), "end" puts the last row at the last key (flash-attn,
        decoding). None reads `q_offset`; with unequal lengths and neither given, the call raises
        AmbiguityError.

    Notes
    -----
    Source: Vaswani et al., "Attention Is All You Need" (2017), section 3.2.3. Tiles above the
    diagonal are skipped: half the work of full attention.

    Examples
    --------
    >>> import numpy as np, qkv
    >>> x = np.eye(3)
    >>> qkv.attention(x, x, x, qkv.Causal())[0]
    array([1., 0., 0.])
    """

    roles: ClassVar[Mapping[str, Role]] = {"align": "static"}
    uses_batch_index: ClassVar[bool] = False
    positions_only: ClassVar[bool] = True

    align: Align | None = None

    def lower(self, builder: Builder) -> None:
        if self.align is not None:
            builder.align(self.align)
        builder.mask(builder.kv_pos <= builder.q_pos)

    def naive(self, dense: Dense) -> None:
        for i, q_pos in enumerate(dense.q_pos):
            for j, kv_pos in enumerate(dense.kv_pos):
                if kv_pos > q_pos:
                    dense.allowed[i, j] = False

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[Causal]:
        return (cls(),)
