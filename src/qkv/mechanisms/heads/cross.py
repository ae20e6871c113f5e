"""Cross-attention."""

from __future__ import annotations

from typing import Any

from qkv.arguments.declarations import Size
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, symbols
from qkv.mechanisms.base.example import example_input
from qkv.mechanisms.base.operations import traffic
from qkv.mechanisms.base.projected import ProjectedAttention

__all__ = ["Cross"]


class Cross(ProjectedAttention):
    """Queries of one sequence, keys and values of another.

        Q = X W_Q,  K = C W_K,  V = C W_V

    A decoder reads the output of an encoder this way, and text reads an image.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`; `kv_dim` is the width of the other sequence.

    Raises
    ------
    ArgumentError
        When called, the other sequence is missing.

    Notes
    -----
    `n m` pairs for n queries and m keys. Source: Vaswani et al. (2017), section 3.2.3,
    encoder-decoder attention.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Cross
    >>> Cross(8, num_heads=2, kv_dim=6)(np.ones((5, 8)), np.ones((3, 6))).shape
    (5, 8)
    """

    name = "cross"
    paper = "Vaswani et al., Attention Is All You Need (2017), section 3.2.3"
    formula = "softmax(Q K^T / sqrt(d)) V, Q = X W_Q, K = C W_K, V = C W_V"

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """x, the other sequence for keys, and the same for values unless they are given.

        Raises
        ------
        ArgumentError
            The other sequence is missing.
        """
        if key is None:
            raise ArgumentError(
                "cross-attention was given one sequence.",
                action="Pass the other one too: mechanism(x, context).",
            )
        return super().sequences(x, key, value)

    def cost(
        self, n: Size, batch: Size = 1, dtype: str = "float32", kv_len: Size | None = None
    ) -> Ledger:
        """Operations, parameters and bytes for `batch` pairs of sequences.

        Parameters
        ----------
        n, batch : int
            Queries, and pairs of sequences.
        dtype : str
            The type in which arrays are stored.
        kv_len : int, optional
            Rows of the other sequence, `n` unless given.

        Raises
        ------
        ArgumentError
            The mechanism is causal, and the sequences differ in length.
        """
        kv_len = n if kv_len is None else kv_len
        if self.causal and kv_len != n:
            raise ArgumentError(
                f"n={n} and kv_len={kv_len}: which keys a causal query sees is not said.",
                action="Pass kv_len=n, or use causal=False.",
            )
        tokens, m, h = symbols(n=n, m=kv_len, h=self.num_heads)
        b = 1 if batch == 1 else Count(batch, "b")
        pairs = self.pairs(tokens) if self.causal else tokens * m
        ledger = self.operations_between(tokens, m, ((pairs, h),), b)
        ledger += Ledger(parameters=Count(self.parameters - int(ledger.parameters)))
        read, written = self.widths()
        read = b * (tokens * read + m * self._projections()[1][1]) + ledger.parameters
        return ledger + traffic(read, b * tokens * written, dtype)

    @classmethod
    def example_arguments(cls) -> tuple[Any, ...]:
        """The five tokens, which read the first three."""
        return example_input(), example_input()[:3]
