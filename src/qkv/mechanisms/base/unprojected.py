"""The base of mechanisms that attend without projections."""

from __future__ import annotations

from typing import Any, Self

from qkv.arguments.declarations import Size
from qkv.ledger import Count, Ledger, attention_ledger, symbols
from qkv.mechanisms.base.arguments import refuse_other_widths
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM
from qkv.samples import shared_example

__all__ = ["UnprojectedAttention"]


class UnprojectedAttention(AttentionMechanism):
    """Attention without learned weights: query, key and value come from the caller.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.
    scale : float, optional
        What scores are multiplied by, `head_dim ** -0.5` unless given.

    Raises
    ------
    ArgumentError
        head_dim is not a positive integer.
    """

    def __init__(self, head_dim: Size, *, scale: float | None = None) -> None:
        self.head_dim, self.scale = head_dim, scale
        super().__init__({})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(head_dim={self.head_dim})"

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Query, key and value.

        Raises
        ------
        ShapeError
            Rows of query or key are not of length head_dim.
        """
        query, key, value = super().sequences(x, key, value)
        refuse_other_widths(self.name, "x", query, self.head_dim)
        refuse_other_widths(self.name, "key", key, self.head_dim)
        return query, key, value

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of attention over all pairs."""
        (d,) = symbols(d=self.head_dim)
        scaled = self.scale != 1
        return attention_ledger(tokens * tokens, tokens, d, d, scaled=scaled) * batch

    def widths(self) -> tuple[int, int]:
        """Query, key and value are read, and a row as long is written."""
        (d,) = symbols(d=self.head_dim)
        return 3 * d, d

    @classmethod
    def example(cls) -> Self:
        """Rows of four numbers."""
        return cls(EXAMPLE_HEAD_DIM)

    @classmethod
    def example_arguments(cls) -> tuple[Any, ...]:
        """Q, K and V of the shared five tokens."""
        example = shared_example()
        return example.q, example.k, example.v
