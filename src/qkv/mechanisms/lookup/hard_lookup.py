"""Hard look-up: the value of the best key, or a mixture of the k best."""

from __future__ import annotations

from typing import Any

from qkv.arguments.declarations import Size
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arguments import broadcastable
from qkv.mechanisms.base.arrays.namespace import array_namespace, widened
from qkv.mechanisms.base.unprojected import UnprojectedAttention
from qkv.variants import Mask

__all__ = ["Hard"]


class Hard(UnprojectedAttention):
    """The softmax over the `k` keys of the largest scores; for k = 1, the value of the arg max.

        out[i] = sum over j in top_k(q[i] K^T) of softmax(q[i] K^T / sqrt(head_dim))[j] v[j]

    Ties go to the lower index. With k = 1 the output does not change with small changes of query
    and key, so their gradients are zero and only values can be learned.

    Parameters
    ----------
    head_dim : int
        Length of query and key rows.
    k : int
        How many keys answer.

    Raises
    ------
    ArgumentError
        `k` is not a positive integer.

    Notes
    -----
    Holds the q_len x kv_len scores while it ranks them. Sources: Xu et al., "Show, Attend and Tell"
    (2015), section 4.1, for one key; Gupta et al., "Memory-efficient Transformers via Top-k
    Attention" (2021) for several.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Hard
    >>> x = np.array([[1.0, 0.0], [0.6, 0.8]])
    >>> Hard(2)(x, x, np.array([[10.0], [20.0]]))
    array([[10.],
           [20.]])
    """

    name = "hard"
    paper = "Xu et al., Show, Attend and Tell (2015); Gupta et al., Top-k Attention (2021)"
    formula = "V[argmax(Q K^T)], or softmax over the k largest of Q K^T / sqrt(d)"

    def __init__(self, head_dim: Size, k: Size = 1) -> None:
        self.k = k
        super().__init__(head_dim)

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The mask of each query's k best keys; none if query and key do not fit.

        `qkv.attention` then says why.
        """
        namespace = array_namespace(query)
        heads, kv_heads = (rows.shape[-3] if rows.ndim > 2 else 1 for rows in (query, key))
        grouped = heads % kv_heads == 0 if kv_heads else not heads
        leads = broadcastable(tuple(query.shape[:-3]), tuple(key.shape[:-3]))
        if not (grouped and leads):
            return ()
        if kv_heads > 1:
            key = namespace.repeat(key, heads // kv_heads, axis=-3)
        query, key = widened(query), widened(key)
        # A matrix product may round the scores of equal keys differently, and ties would be none.
        scores = query[..., :1] * key[..., None, :, 0]
        for d in range(1, query.shape[-1]):
            scores = scores + query[..., d, None] * key[..., None, :, d]
        # The rank of a key is the place of its index in the order of falling scores.
        order = namespace.argsort(-scores, axis=-1, stable=True)
        rank = namespace.argsort(order, axis=-1, stable=True)
        return (Mask(rank < self.k),)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """All scores are computed; only the k best enter the softmax and the sum.

        They are found with `k (n - 1)` comparisons a row.
        """
        d, k = symbols(d=self.head_dim, k=min(self.k, int(tokens)))
        pairs, chosen = tokens * tokens, tokens * k
        ledger = (
            step("qk", multiply=pairs * d, add=pairs * (d - 1), space=pairs)
            + step("top_k", compare=chosen * (tokens - 1), space=chosen)
            + step("scale", divide=chosen)
            + step("softmax", subtract=chosen, exp=chosen, add=chosen - tokens, divide=chosen)
            + step("av", multiply=chosen * d, add=(chosen - tokens) * d, space=tokens * d)
        )
        return ledger * batch
