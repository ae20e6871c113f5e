"""The sizes of a problem, as its variants see them."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """Sizes of query, key and value, broadcast; `draws` is the number of draws of values."""

    batch_shape: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    draws: int = 1

    @property
    def scores(self) -> tuple[int, ...]:
        """`(*batch_shape, num_heads, q_len, kv_len)`."""
        return (*self.batch_shape, self.num_heads, self.q_len, self.kv_len)
