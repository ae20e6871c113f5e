"""Linformer: attention to a fixed number of mixtures of keys and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import numpy as np

import qkv
from qkv.arguments.declarations import Size
from qkv.errors import ShapeError
from qkv.ledger import Count, Ledger, matmul, symbols
from qkv.mechanisms.base.arguments import refuse_options
from qkv.mechanisms.base.arrays.head_rows import join_heads, split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, widened
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.attention_steps import attention_steps, token_lines
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Step
from qkv.mechanisms.base.operations import traffic
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.mechanisms.linear_time.recurrences.chunks import in_chunks

__all__ = ["Linformer"]


class Linformer(ProjectedAttention):
    """Attention to k mixtures of all keys and values in place of n of them.

        out = softmax(Q (E K)^T / sqrt(head_dim)) (F V),   E and F (k, n)

    Weight matrices of trained models are close to matrices of low rank, so that k can stay fixed
    while n grows. E and F are learned for one length, which is the longest sequence that fits, and
    they mix all positions, so that there is no causal form.

    Parameters
    ----------
    embed_dim, num_heads : int
    max_len : int
        Tokens that E and F have columns for. A shorter sequence uses the first of them.
    num_mixtures : int
        k, how many mixtures there are.
    **options
        As for `ProjectedAttention`, without causal, rope and alibi; a norm of keys comes before
        they are mixed. The weights include `e_proj.weight` and `f_proj.weight` (num_mixtures,
        max_len), which all heads share.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another, or causal, rope or alibi is given.

    Notes
    -----
    O(n num_mixtures head_dim) operations for each head; E and F have `2 num_mixtures max_len`
    numbers, and more in the cost of more tokens. Source: Wang et al., "Linformer: Self-Attention
    with Linear Complexity", arXiv 2006.04768.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Linformer
    >>> Linformer(16, num_heads=4, max_len=8, num_mixtures=3)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "linformer"
    paper = "Wang et al., Linformer: Self-Attention with Linear Complexity (2020)"
    formula = "softmax(Q (E K)^T / sqrt(d)) (F V)"
    refused_options = ("causal", "rope", "alibi")

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        max_len: Size = 512,
        num_mixtures: Size = 256,
        **options: Any,
    ) -> None:
        refuse_options(self.name, options, *self.refused_options)
        self.max_len, self.num_mixtures = max_len, num_mixtures
        super().__init__(embed_dim, num_heads, **options)

    block_size: ClassVar[int] = 4096
    """Tokens that are projected and mixed at once, so that they stay in the caches."""

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """The mixtures of keys and of values."""
        shape = (self.num_mixtures, self.max_len)
        return {"e_proj.weight": shape, "f_proj.weight": shape}

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of.

        Raises
        ------
        ShapeError
            Key and value differ in length.
        """
        query, key, value = super().sequences(x, key, value)
        if key.shape[-2:-1] != value.shape[-2:-1]:
            raise ShapeError(
                "key and value have as many rows as one another.",
                [("key", str(tuple(key.shape))), ("value", str(tuple(value.shape)))],
                "Pass one value for each key.",
            )
        return query, key, value

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Attend from `x` to the mixtures of `key` and `value`, or of itself.

        Arrays and errors are those of `AttentionMechanism`; kv_len is at most max_len.
        """
        x, key, value = self.sequences(x, key, value)
        k, v = self._mixed_keys(key), self._mixed_values(value)

        def read(_: None, x: Any) -> tuple[Any, None]:
            q = self.query_or_key("q_proj", x, self.num_heads)
            return self.join(qkv.attention(q, k, v, *self.variants(q, k), scale=self.scale)), None

        if x.ndim < 2 or x.shape[-2] <= self.block_size:
            return read(None, x)[0]
        return in_chunks(read, [x], None, self.block_size)[0]

    def heads(self, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Queries, and the mixtures of keys and of values, of every head."""
        q = self.query_or_key("q_proj", query, self.num_heads)
        return q, self._mixed_keys(key), self._mixed_values(value)

    def _mixed_keys(self, key: Any) -> Any:
        """`E K` of each kv head, `(..., num_kv_heads, num_mixtures, head_dim)`."""
        return self._mixtures(
            "e_proj", key, lambda rows: self.query_or_key("k_proj", rows, self.num_kv_heads)
        )

    def _mixed_values(self, value: Any) -> Any:
        """`F V` of each kv head."""
        return self._mixtures(
            "f_proj",
            value,
            lambda rows: split_heads(self.linear("v_proj", rows), self.num_kv_heads),
        )

    def _mixtures(self, mixtures: str, rows: Any, heads_of: Callable[[Any], Any]) -> Any:
        """Heads of rows, mixed block by block."""
        n = rows.shape[-2] if rows.ndim > 1 else 0
        if n > self.max_len:
            raise ShapeError(
                f"{n} tokens are more than max_len={self.max_len}.",
                action=f"Pass at most {self.max_len} tokens, or build it for a longer max_len.",
            )
        weight = like(self.weights[f"{mixtures}.weight"], widened(rows), mixtures)
        mixed_rows = 0
        for start in range(0, max(n, 1), self.block_size):
            block = rows if n <= self.block_size else rows[..., start : start + self.block_size, :]
            columns = weight[:, start : min(start + self.block_size, n)]
            mixed_rows = mixed_rows + columns @ widened(heads_of(block))
        return array_namespace(rows).astype(mixed_rows, rows.dtype, copy=False)

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The weights of the mixtures times F, `(..., num_heads, q_len, kv_len)`.

        The matrix for which a head gives `M @ V`; its rows need not add up to one.
        """
        weights = super().token_mixing(x, key, value)
        kv_len = self.sequences(x, key, value)[2].shape[-2]
        return like(weights @ like(self.detached().weights["f_proj.weight"], x)[:, :kv_len], x)

    def steps(self, token: ExplainedToken) -> list[Step]:
        """Projections, the mixtures, attention to them, and the output."""
        given = token.query, token.key, token.value
        steps = self.steps_before(token, *super().heads(*given))
        q, k, v = self.heads(*given)
        mixtures = [f"mixture {i}" for i in range(self.num_mixtures)]
        for name, symbol, heads in (("keys", "E K", k), ("values", "F V", v)):
            steps.append(Step(f"Mix {name}", symbol, token_lines(mixtures, join_heads(heads))))
        variants = self.variants(q, k)
        trace = qkv.explain(q, k, v, *variants, scale=self.scale, q_index=token.index)
        steps += attention_steps(trace, mixtures)
        out = qkv.attention(q, k, v, *variants, scale=self.scale)
        return steps + self.steps_after(out, token.index)

    def pairs(self, n: int) -> int:
        """`n` queries with `num_mixtures` keys each."""
        pairs: int = n * Count(self.num_mixtures, "k")
        return pairs

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of the mixtures, and of attention to them."""
        k, g, d = symbols(k=self.num_mixtures, g=self.num_kv_heads, d=self.head_dim)
        heads: int = 2 * g * batch
        return matmul("mixtures", k, tokens, d) * heads + super().operations(tokens, batch)

    def cost(self, n: Size, batch: Size = 1, dtype: str = "float32") -> Ledger:
        """Operations, parameters and bytes; for more than max_len tokens, with longer E and F.

        Parameters and errors are those of `Mechanism.cost`.
        """
        more = 2 * self.num_mixtures * max(n - self.max_len, 0)
        longer = Ledger(parameters=Count(more)) + traffic(more, 0, dtype)
        return super().cost(n, batch, dtype) + longer

    @classmethod
    def example(cls) -> Self:
        """Two mixtures on the shared five tokens: the mean of three, and of the last two."""
        means = np.array([[1 / 3, 1 / 3, 1 / 3, 0, 0], [0, 0, 0, 1 / 2, 1 / 2]])
        weights: Mapping[str, Any] = {"e_proj.weight": means, "f_proj.weight": means}
        return cls.for_example(max_len=5, num_mixtures=2, weights=weights)
