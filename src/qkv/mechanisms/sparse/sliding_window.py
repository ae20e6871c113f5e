"""Attention within a window."""

from __future__ import annotations

from typing import Any, Self, Unpack

from qkv.arguments.declarations import Size, Whole
from qkv.errors import ArgumentError
from qkv.ledger import symbols
from qkv.mechanisms.base.llama import LlamaAttention, window_of
from qkv.mechanisms.base.projected import Options
from qkv.variants import SlidingWindow as Window

__all__ = ["SlidingWindow", "window_pairs"]


class SlidingWindow(LlamaAttention):
    """Each token sees the `left` tokens before it, itself, and the `right` tokens after it.

        s[i, j] = -inf unless i - left <= j <= i + right

    Time and memory grow with n instead of n squared; stacked layers reach further than one window.

    Parameters
    ----------
    embed_dim, num_heads : int
    left, right : int
        How many tokens before and after. `right=0` is causal, as in Mistral, where a window of W
        is `left = W - 1`.
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError
        left or right is negative.

    Notes
    -----
    About `n (left + right + 1)` pairs. Source: Beltagy et al., "Longformer" (2020), section 3.1;
    Child et al. (2019).

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import SlidingWindow
    >>> SlidingWindow(4, left=1, right=0).token_mixing(np.ones((3, 4)))[0].round(2)
    array([[1. , 0. , 0. ],
           [0.5, 0.5, 0. ],
           [0. , 0.5, 0.5]])
    """

    name = "sliding-window"
    paper = "Beltagy et al., Longformer: The Long-Document Transformer (2020), section 3.1"
    formula = "softmax(Q K^T / sqrt(d) + M) V, M[i, j] = 0 for i - left <= j <= i + right"
    compares_positions = True

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        left: Whole,
        right: Whole = 0,
        **options: Unpack[Options],
    ) -> None:
        self.left, self.right = left, right
        super().__init__(embed_dim, num_heads, **options)

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The window, after the positions."""
        return (*super().variants(query, key), Window(self.left, self.right))

    def pairs(self, n: int) -> int:
        """Pairs within the window among `n` tokens."""
        left, right = symbols(l=self.left, r=self.right)
        return window_pairs(n, left, right if self.right and not self.causal else 0)

    @classmethod
    def options_of(cls, module: Any) -> dict[str, Any]:
        """The window of a MistralAttention, or of another module whose config has one.

        Raises
        ------
        ArgumentError
            Its config has no window.
        """
        window = window_of(module)
        if window is None:
            raise ArgumentError(
                f"this layer of {type(module).__name__} has no sliding_window.",
                action="Use Rotary for a layer that sees all earlier tokens.",
            )
        return {"left": window - 1}

    @classmethod
    def example(cls) -> Self:
        """Each token sees itself and the two before it."""
        return cls.for_example(left=2, right=0)


def window_pairs(n: int, left: int, right: int) -> int:
    """How many pairs of `n` tokens are within a window; tokens at the ends have fewer.

    Examples
    --------
    >>> window_pairs(5, 2, 0)
    12
    """
    left, right = min(left, n - 1), min(right, n - 1)
    return n * (left + right + 1) - left * (left + 1) // 2 - right * (right + 1) // 2
