"""Longformer: a window for all tokens, and some that see and are seen by all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Self, Unpack

import numpy as np

import qkv
from qkv.arguments.declarations import Places, Size, Whole
from qkv.errors import ArgumentError
from qkv.ledger import Count, Ledger, symbols
from qkv.mechanisms.base.arrays.head_rows import split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, values
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM, select_columns
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Step
from qkv.mechanisms.base.modules.loading import (
    named_weights,
    reads_module,
    refuse_other_attributes,
    refuse_other_parameters,
    require_attributes,
)
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.base.projected import Options, ProjectedAttention
from qkv.mechanisms.sparse.sliding_window import window_pairs
from qkv.variants import GlobalTokens, SlidingWindow

__all__ = ["Longformer"]

_KNOWN = (
    "num_heads", "head_dim", "embed_dim", "dropout", "layer_id", "one_sided_attn_window_size",
)  # fmt: skip
"""Attributes of a LongformerSelfAttention, all of which are read or do nothing in evaluation."""


class Longformer(ProjectedAttention):
    """A window on both sides for every token; global tokens attend to all and all attend to them.

        s[i, j] = -inf unless |i - j| <= window or i or j is global

    Global tokens ask, are asked and answer with projections of their own when they attend
    (`q_global`, `k_global`, `v_global`); the others read them with the ordinary ones. Options
    change the scores of all rows alike; causal, a global token sees all that came before it.

    Parameters
    ----------
    embed_dim, num_heads : int
    window : int
        Tokens on each side.
    global_tokens : sequence of int
        Which tokens are global, such as that of a classifier or those of a question.
    **options
        As for `ProjectedAttention`.

    Raises
    ------
    ArgumentError
        The window is negative, or a global token is below 0; or there are global tokens, one norm
        of all heads, and fewer key heads than query heads: global keys have as many as queries.

    Notes
    -----
    About `n (2 window + 1 + 2 g)` pairs for g global tokens. Source: Beltagy et al., "Longformer"
    (2020), section 3.1.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Longformer
    >>> layer = Longformer(4, window=1, global_tokens=[0])
    >>> layer.token_mixing(np.zeros((5, 4)))[0, 3].round(2)
    array([0.25, 0.  , 0.25, 0.25, 0.25])
    """

    name = "longformer"
    paper = "Beltagy et al., Longformer: The Long-Document Transformer (2020), section 3.1"
    formula = "softmax(Q K^T / sqrt(d) + M) V, M = 0 for |i - j| <= window or i or j global"
    one_sequence_only = True

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        window: Whole,
        global_tokens: Places = (),
        **options: Unpack[Options],
    ) -> None:
        self.window, self.global_tokens = window, sorted(set(global_tokens))
        super().__init__(embed_dim, num_heads, **options)
        uneven = self.num_kv_heads != num_heads
        if self.global_tokens and self.qk_norm == "all heads" and uneven:
            raise ArgumentError(
                f"qk_norm='all heads' has a weight for num_kv_heads={self.num_kv_heads} key heads, "
                f"and the global projections make num_heads={num_heads}.",
                action="Pass qk_norm='head', or as many key heads as query heads.",
            )

    def more_shapes(self) -> dict[str, tuple[int, ...]]:
        """The projections of global tokens."""
        width = self.num_heads * self.head_dim
        kinds = {"weight": (width, self.embed_dim)} | ({"bias": (width,)} if self.bias else {})
        return {f"{s}_global.{kind}": shape for s in "qkv" for kind, shape in kinds.items()}

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        """The window, and the columns and rows of the global tokens."""
        pattern: Any = SlidingWindow(self.window, self.window)
        if self.global_tokens:
            pattern = pattern | GlobalTokens(np.array(self.global_tokens))
        return (*super().variants(query, key), pattern)

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Mix the tokens of `x` (..., n, embed_dim); an array of the same library and dtype.

        Raises
        ------
        ArgumentError
            A key was given, or a global token is beyond the last.
        """
        q, k, v = self.heads(*self.sequences(x, key, value))
        out = qkv.attention(q, k, v, *self.variants(q, k), scale=self.scale)
        if self.global_tokens:
            out = self._with_rows(out, self._global_rows(qkv.attention, x))
        return self.join(out)

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The attention weights `(..., num_heads, n, n)`; values only, without a gradient.

        Rows of global tokens are those of their own projections.
        """
        self.sequences(x, key, value)
        look, rows = self.detached(), values(x, "x")
        q, k, v = look.heads(rows, rows, rows)
        weights = qkv.inspect(q, k, v, *look.variants(q, k), scale=look.scale).weights[...]
        if self.global_tokens:

            def weights_of(*problem: Any, **keywords: Any) -> Any:
                return qkv.inspect(*problem, **keywords).weights[...]

            weights = look._with_rows(weights, look._global_rows(weights_of, rows))
        return like(weights, x)

    def problem_of(self, token: ExplainedToken) -> tuple[Any, Any, Any, tuple[Any, ...]]:
        """The global projections without the pattern for the row of a global token."""
        if token.index not in self.global_tokens:
            return super().problem_of(token)
        q, k, v = self._global_heads(token.query, token.query)
        return q, k, v, super().variants(q, k)

    def steps_before(self, token: ExplainedToken, query: Any, key: Any, value: Any) -> list[Step]:
        """Query, keys and values, with the name of the projections that made them."""
        (step,) = super().steps_before(token, query, key, value)
        if token.index not in self.global_tokens:
            return [step]
        return [replace(step, formula=re.sub(r"\b([Wb]_[qkv])\b", r"\1_global", step.formula))]

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """x for all three.

        Raises
        ------
        ArgumentError
            A key is given, or a global token is beyond the last.
        """
        if self.global_tokens and self.global_tokens[-1] >= x.shape[-2]:
            raise ArgumentError(
                f"global token {self.global_tokens[-1]} is beyond the {x.shape[-2]} rows of x.",
                action="Choose tokens of the sequence.",
            )
        return super().sequences(x, key, value)

    def _global_heads(self, asking: Any, x: Any) -> tuple[Any, Any, Any]:
        """Queries of some tokens, and keys and values of all, by the global projections."""
        return (
            self.query_or_key("q_global", asking, self.num_heads),
            self.query_or_key("k_global", x, self.num_heads),
            split_heads(self.linear("v_global", x), self.num_heads),
        )

    def _global_rows(self, compute: Callable[..., Any], x: Any) -> Any:
        """What `compute` gives for the global tokens, in order: outputs or weights."""
        tokens = np.array(self.global_tokens)
        q, k, v = self._global_heads(x[..., tokens, :], x)
        variants = super().variants(q, k)
        # Rows of one call stand side by side, if anything reads where they stand.
        reads_positions = self.causal or self.alibi or self.rope is not None
        ends = (np.flatnonzero(np.diff(tokens) != 1) + 1).tolist() if reads_positions else []
        runs = pairwise([0, *ends, len(tokens)])
        rows = [
            compute(
                q[..., first:stop, :],
                k,
                v,
                *variants,
                scale=self.scale,
                q_offset=int(tokens[first]),
            )
            for first, stop in runs
        ]
        return array_namespace(rows[0]).concat(rows, axis=-2)

    def _with_rows(self, array: Any, rows: Any) -> Any:
        """`array` (..., n, m) in which the rows of the global tokens are `rows`, in order."""
        namespace = array_namespace(array)
        n = array.shape[-2]
        is_global = np.isin(np.arange(n), self.global_tokens)
        place = np.maximum(np.cumsum(is_global) - 1, 0)
        chosen = like(is_global.astype(np.float64)[:, None], array) > 0
        return namespace.where(chosen, rows[..., place, :], array)

    def pairs(self, n: int) -> int:
        """Pairs of the ordinary rows, and of the global rows with all keys."""
        right = 0 if self.causal else self.window
        whole = window_pairs(n, self.window, right)
        tokens = np.asarray(self.global_tokens, np.int64)
        tokens, length, left = tokens[tokens < int(n)], int(n), self.window
        if not len(tokens):
            return whole
        last = length - 1
        near_row = np.minimum(tokens + right, last) - np.maximum(tokens - left, 0) + 1
        near_column = np.minimum(tokens + left, last) - np.maximum(tokens - right, 0) + 1
        row = tokens + 1 if self.causal else np.full_like(tokens, length)
        column = length - tokens if self.causal else row
        back = tokens[:, None] - tokens
        near = (-right <= back) & (back <= left)
        far = ~near & (back >= 0) if self.causal else ~near
        # Ordinary rows see the window, and what of the global tokens lies outside of it.
        ordinary = int(whole) + int((column - near_column - near_row).sum()) - int(far.sum())
        return Count(ordinary + int(row.sum()), "pairs")

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """Queries by the global projections are made for the global tokens only."""
        ledger = super().operations(tokens, batch)
        g = len(self.global_tokens)
        if not g:
            return ledger
        some, e, d, h = symbols(g=g, e=self.embed_dim, d=self.head_dim, h=self.num_heads)
        for side, rows in (("q", some), ("k", tokens), ("v", tokens)):
            more = projection(f"{side}_global", batch * rows, e, h * d, self.bias)
            if side != "v":
                more += self.norm_cost(batch * rows, h) + self.position_cost(rows) * (batch * h)
            ledger += Ledger(more.operations, more.space)
        return ledger

    @classmethod
    @reads_module
    def from_transformers(cls, module: Any, global_tokens: Sequence[int] = ()) -> Self:
        """The mechanism with the weights of a LongformerSelfAttention.

        Parameters
        ----------
        module : transformers LongformerSelfAttention
            Its output projection is a module of its own, so there is none here.
        global_tokens : sequence of int
            Which tokens are global, which the module is told at every call.

        Raises
        ------
        UnsupportedError
            The module is another, as its weights or attributes show.
        """
        require_attributes(module, ("embed_dim", "num_heads", "one_sided_attn_window_size"))
        names: dict[str, str] = {}
        for side, name in (("q", "query"), ("k", "key"), ("v", "value")):
            names |= {f"{side}_proj": name, f"{side}_global": f"{name}_global"}
        weights = named_weights(module, names)
        refuse_other_parameters(module, names.values(), cls.name)
        refuse_other_attributes(module, _KNOWN)
        return cls(
            module.embed_dim,
            module.num_heads,
            window=module.one_sided_attn_window_size,
            global_tokens=global_tokens,
            out_proj=False,
            weights=weights,
        )

    @classmethod
    def example(cls) -> Self:
        """A window of one token on each side, and the first token global."""
        weights = {
            f"{side}_global.weight": select_columns(range(first, first + EXAMPLE_HEAD_DIM))
            for side, first in (("q", 0), ("k", 4), ("v", 8))
        }
        return cls.for_example(window=1, global_tokens=[0], weights=weights)
