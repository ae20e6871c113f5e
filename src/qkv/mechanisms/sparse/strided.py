"""The strided pattern of Sparse Transformers."""

from __future__ import annotations

from typing import Any, ClassVar, Self, Unpack

from qkv.arguments.declarations import Size
from qkv.ledger import Count
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.mechanisms.sparse.sliding_window import window_pairs
from qkv.variants import SlidingWindow
from qkv.variants import Strided as EveryStride

__all__ = ["Strided"]


class Strided(ProjectedAttention):
    """Each token sees the last `stride` tokens, and before them every token a stride apart.

        s[i, j] = -inf unless j <= i and (i - j < stride or (i - j) % stride == 0)

    Two steps of it connect any token with any earlier one. With a stride near sqrt(n), a row has at
    most about 2 sqrt(n) pairs.

    Parameters
    ----------
    embed_dim, num_heads : int
    stride : int
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError
        If a size is not a positive integer.

    Notes
    -----
    Both parts of the pattern in one head, which the paper calls merged. About
    `n (stride + n / (2 stride))` pairs. Source: Child et al., "Generating Long Sequences with
    Sparse Transformers" (2019), sections 4.2 and 4.3.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Strided
    >>> Strided(4, stride=2).token_mixing(np.ones((5, 4)))[0, 4].round(2)
    array([0.25, 0.  , 0.25, 0.25, 0.25])
    """

    name = "strided"
    paper = "Child et al., Generating Long Sequences with Sparse Transformers (2019), section 4.3"
    formula = "softmax(Q K^T / sqrt(d) + M) V, M = 0 for i-j < stride or (i-j) % stride = 0, j <= i"
    fixed_options: ClassVar[Options] = {"causal": True}

    def __init__(
        self, embed_dim: Size, num_heads: Size = 1, *, stride: Size, **options: Unpack[Options]
    ) -> None:
        self.stride = stride
        super().__init__(embed_dim, num_heads, **options)

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The pattern, after the positions."""
        pattern = SlidingWindow(self.stride - 1, 0) | EveryStride(self.stride)
        return (*super().variants(query, key), pattern)

    def pairs(self, n: int) -> int:
        """Pairs of the pattern among `n` tokens: near ones, and those a stride or more away."""
        n, whole = int(n), int(n) // self.stride
        # Row i has i // stride keys a stride or more away.
        far = n * whole - self.stride * (whole * (whole + 1) // 2)
        return Count(window_pairs(n, self.stride - 1, 0) + far, "pairs")

    @classmethod
    def example(cls) -> Self:
        """A stride of two."""
        return cls.for_example(stride=2)
