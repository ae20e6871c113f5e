"""The base of mechanisms that attend without projections."""

from __future__ import annotations

from typing import Any, Self

from qkv.ledger import Count, Ledger, symbols
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM
from qkv.mechanisms.base.mechanism import positive_integers
from qkv.mechanisms.base.operations import attention_over_pairs, traffic
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

    def __init__(self, head_dim: int, *, scale: float | None = None) -> None:
        positive_integers(head_dim=head_dim)
        self.head_dim, self.scale = head_dim, scale
        super().__init__({})

    def __repr__(self) -> str:
        return f"{type(self).__name__}(head_dim={self.head_dim})"

    def cost(self, n: int, batch: int = 1, dtype: str = "float32") -> Ledger:
        """Operations and bytes for `batch` sequences of `n` queries, keys and values.

        Query, key and value are read once and the output is written once; scores stay in registers.

        Parameters
        ----------
        n, batch : int
        dtype : str
            The type in which arrays are stored.
        """
        positive_integers(n=n, batch=batch)
        tokens, d = symbols(n=n, d=self.head_dim)
        b = 1 if batch == 1 else Count(batch, "b")
        scaled = self.scale != 1
        found = attention_over_pairs(tokens * tokens, tokens, d, d, scaled=scaled) * b
        return found + traffic(3 * b * tokens * d, b * tokens * d, dtype)

    @classmethod
    def example(cls) -> Self:
        """Rows of four numbers."""
        return cls(EXAMPLE_HEAD_DIM)

    @classmethod
    def example_arguments(cls) -> tuple[Any, ...]:
        """Q, K and V of the shared five tokens."""
        example = shared_example()
        return example.q, example.k, example.v
