"""Keys that share a number with the query, as chunks of Llama 4, pictures in text, or a token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import ArrayLike

from qkv.problem.building.builder import Builder, Shape
from qkv.problem.dense import Dense
from qkv.variants.base import Role
from qkv.variants.masks.algebra import MaskVariant


@dataclass(frozen=True, eq=False, repr=False)
class SameGroup(MaskVariant):
    """Allowed where `q_ids[i] == kv_ids[j]`; unlike `Segments`, positions go on.

    Parameters
    ----------
    q_ids : integer array (batch, q_len)
    kv_ids : integer array (batch, kv_len)
    """

    q_ids: ArrayLike
    kv_ids: ArrayLike

    roles: ClassVar[Mapping[str, Role]] = {"q_ids": "value", "kv_ids": "value"}
    uses_batch_index: ClassVar[bool] = False

    def lower(self, builder: Builder) -> None:
        of_query = builder.broadcast(np.asarray(self.q_ids)[:, None, :, None], "q_ids")
        of_key = builder.broadcast(np.asarray(self.kv_ids)[:, None, None, :], "kv_ids")
        builder.mask(of_query == of_key)

    def naive(self, dense: Dense) -> None:
        q_ids, kv_ids = (dense.batch_entry(ids, trailing=1) for ids in (self.q_ids, self.kv_ids))
        dense.allowed &= q_ids[:, None] == kv_ids

    @classmethod
    def examples(cls, shape: Shape, rng: np.random.Generator) -> Sequence[SameGroup]:
        batch = int(np.prod(shape.batch_shape))
        rows = (rng.integers(0, 3, (batch, length)) for length in (shape.q_len, shape.kv_len))
        return (cls(*rows),)
