"""Decoding token by token with a cache of keys and values."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from qkv._dynamo import is_reading
from qkv.arrays import library_of
from qkv.cache import Cache, ContiguousCache
from qkv.ledger import Count, symbols
from qkv.mechanisms.base.arrays.namespace import array_namespace
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.projected import Options, ProjectedAttention

__all__ = ["KVCacheDecoding"]


class KVCacheDecoding(ProjectedAttention):
    """Causal attention one token at a time: only the new token is projected, earlier ones are kept.

        K = [K_cache, k_t],  V = [V_cache, v_t],  out_t = softmax(q_t K^T / sqrt(d)) V

    Earlier rows of a causal model do not change when a token is added, so their keys and values
    need not be computed again: a step costs n instead of n squared, and the result is that of
    `Causal`. It differs from full attention, in which tokens read later ones too.

    Parameters
    ----------
    embed_dim, num_heads : int
    **options
        As for `ProjectedAttention`; always causal.

    Notes
    -----
    Calling it decodes all tokens of x one by one; `step` decodes what comes next. Rows of a cache
    are written in place, which carries no gradient: where torch or JAX follows one, a call computes
    all tokens at once as training does (`Causal`), and `step` refuses. Source: Shazeer, "Fast
    Transformer Decoding" (2019), section 2.4.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Causal, KVCacheDecoding
    >>> layer, whole, x = KVCacheDecoding(8, 2), Causal(8, 2), np.eye(8)
    >>> first, cache = layer.step(x[:5])
    >>> rest, cache = layer.step(x[5:], cache)
    >>> bool(np.allclose(np.concatenate([first, rest]), whole(x)))
    True
    """

    name = "kv-cache-decoding"
    paper = "Shazeer, Fast Transformer Decoding (2019), section 2.4"
    formula = "out_t = softmax(q_t K^T / sqrt(d)) V, K = [K_cache, k_t], V = [V_cache, v_t]"
    one_sequence_only = True
    fixed_options: ClassVar[Options] = {"causal": True}

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Decode the tokens of `x` (..., n, embed_dim) one by one.

        Raises
        ------
        ArgumentError
            A key was given.
        """
        self.sequences(x, key, value)
        if is_reading() or not x.shape[-2]:
            return super().__call__(x)
        if library_of(x, "x").is_tracked(self.linear("k_proj", x)):
            return super().__call__(x)
        cache, outputs = None, []
        for t in range(x.shape[-2]):
            out, cache = self.step(x[..., t : t + 1, :], cache)
            outputs.append(out)
        return array_namespace(x).concat(outputs, axis=-2)

    def step(self, x: Rows, cache: Cache | None = None) -> tuple[Any, Cache]:
        """Decode the next tokens.

        Parameters
        ----------
        x : array (..., n, embed_dim)
            The next tokens; usually one, several for a prompt.
        cache : qkv.cache.Cache, optional
            What the last step returned, or an empty cache of any kind; a new `ContiguousCache` by
            default. Keys and values of x are appended to it.

        Returns
        -------
        (array, qkv.cache.Cache)
            Output of the tokens, and the cache.

        Raises
        ------
        UnsupportedError
            torch or JAX follows the gradient of x or of a weight.
        """
        q, k, v = self.heads(x, x, x)
        cache = ContiguousCache() if cache is None else cache
        rows = cache.append(k, v)
        return self.join(rows.attention(q, *self.variants(q, k), scale=self.scale)), cache

    def numbers_moved(self, tokens: Count, batch: int, parameters: int) -> tuple[int, int]:
        """Every step reads all weights and the whole cache, and writes a row to it."""
        read, written = super().numbers_moved(tokens, batch, parameters)
        g, d = symbols(g=self.num_kv_heads, d=self.head_dim)
        row = batch * tokens * g * d
        return read + row * (tokens + 1) + (tokens - 1) * parameters, written + 2 * row

    @classmethod
    def example(cls) -> Self:
        """One head."""
        return cls.for_example()
