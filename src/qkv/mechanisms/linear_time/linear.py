"""Linear attention: a softmax replaced by a product of features, so that sums can be kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from qkv.arguments.declarations import Size
from qkv.errors import ShapeError
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arguments import refuse_one_by_one, refuse_options, refuse_other_batches
from qkv.mechanisms.base.arrays.head_rows import split_heads
from qkv.mechanisms.base.arrays.namespace import array_namespace, like, values, widened
from qkv.mechanisms.base.arrays.rows import Rows
from qkv.mechanisms.base.explanations.attention_steps import token_lines
from qkv.mechanisms.base.explanations.explanation import (
    ExplainedToken,
    Line,
    Step,
    dot_product,
    number,
    numbers,
)
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.mechanisms.linear_time.recurrences.activations import elu_plus_one
from qkv.mechanisms.linear_time.recurrences.chunks import (
    blocks_of_rows,
    causal_product,
    in_chunks,
    state_of_no_tokens,
)
from qkv.mechanisms.linear_time.recurrences.recurrent import repeated_heads
from qkv.mechanisms.linear_time.recurrences.stateful import StatefulMechanism

__all__ = ["Linear", "chunk", "naive", "recurrent", "token_weights"]


class Linear(StatefulMechanism, ProjectedAttention):
    """Linear attention: weights are products of positive features, so sums can be taken first.

        o_i = sum_j (phi(q_i) . phi(k_j)) v_j / sum_j phi(q_i) . phi(k_j),   phi(x) = elu(x) + 1
            = phi(q_i) (sum_j phi(k_j)^T v_j) / (phi(q_i) . sum_j phi(k_j))

    The sum over j does not depend on i: n tokens take O(n), where softmax takes O(n^2). Causal,
    the sum grows token by token, and decoding keeps it in place of all keys and values.

    Parameters
    ----------
    embed_dim, num_heads : int
    chunk_size : int
        Tokens in a chunk, if causal; changes speed and rounding only.
    **options
        As for `ProjectedAttention`: num_kv_heads, head_dim, kv_dim, causal, bias, out_proj,
        qk_norm, qk_norm_eps, weights, seed.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another, or scale, rope, alibi, softcap or sinks
        is given.

    Notes
    -----
    O(n head_dim^2) operations for each head, and the projections; no scale. Features of numbers
    below -104 are 0 in float32; where no product of a query with a key is above 0, the output is
    NaN. Source: Katharopoulos et al., "Transformers are RNNs", arXiv 2006.16236.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Linear
    >>> Linear(16, num_heads=4, causal=True)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "linear"
    paper = "Katharopoulos et al., Transformers are RNNs (2020)"
    formula = "o_i = sum_j w_ij v_j, w_ij = phi(q_i) . phi(k_j) / sum_j of it, phi(x) = elu(x) + 1"

    refused_options = ("scale", "rope", "alibi", "softcap", "sinks")
    block_size: ClassVar[int] = 4096
    shown_features: ClassVar[str] = "phi(q) of the token, phi(k) of each"

    def __init__(
        self, embed_dim: Size, num_heads: Size = 1, *, chunk_size: Size = 64, **options: Any
    ) -> None:
        refuse_options(self.name, options, *self.refused_options)
        self.chunk_size = chunk_size
        super().__init__(embed_dim, num_heads, **options)

    def _row_features(self, rows: Any) -> Any:
        """What is made of query or key rows one by one, before they are cut into chunks."""
        return elu_plus_one(rows)

    def query_features(self, query: Any, state: dict[str, Any]) -> Any:
        """Positive features of query rows, for keys in the scale of the state."""
        return query

    def key_features(self, key: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Positive features of the next key rows, and the state in the same scale."""
        return key, state

    def feature_cost(self, rows: int, head_dim: int) -> tuple[int, Ledger]:
        """How many features a row has, and what those of `rows` rows take."""
        each = rows * head_dim
        return head_dim, step("features", compare=each, exp=each, add=each)

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past, for one sequence: `sum_j phi(k_j)^T [v_j, 1]` of each head."""
        return {"sums": (self.num_heads, self.head_dim, self.head_dim + 1)}

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of.

        Raises
        ------
        ShapeError
            If key and value, or causal query and key, differ in length, if one is empty, or if
            their leading dimensions do not broadcast.
        """
        query, key, value = super().sequences(x, key, value)
        refuse_other_batches(query, key, value)
        n, kv_len, v_len = (array.shape[-2] for array in (query, key, value))
        if kv_len != v_len or 0 in (n, kv_len):
            raise ShapeError(
                "key and value need as many rows as one another, and x and key one or more.",
                [
                    ("x", str(tuple(x.shape))),
                    ("key", str(tuple(key.shape))),
                    ("value", str(tuple(value.shape))),
                ],
                "Pass a token or more, and one value for each key.",
            )
        return query, key, value

    def queries(self, x: Any) -> Any:
        """What `query_features` reads, for each head."""
        return self._row_features(widened(self.query_or_key("q_proj", x, self.num_heads)))

    def keys_and_values(self, key: Any, value: Any) -> tuple[Any, Any]:
        """What `key_features` reads, for each key head, and the values of each query head."""
        keys = self._row_features(widened(self.query_or_key("k_proj", key, self.num_kv_heads)))
        rows = widened(split_heads(self.linear("v_proj", value), self.num_kv_heads))
        return keys, self._for_queries(rows)

    def _for_queries(self, heads: Any) -> Any:
        """Each key or value head as often as query heads read it."""
        return repeated_heads(heads, self.num_heads // self.num_kv_heads)

    def featured(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Features of all queries and keys, and values, of as many heads as queries have."""
        keys, rows = self.keys_and_values(key, value)
        features, state = self.key_features(keys, self.initial_state(x))
        return self.query_features(self.queries(x), state), self._for_queries(features), rows

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Attend from `x` to `key` and `value`, or to itself; see `AttentionMechanism`."""
        x, key, value = self.sequences(x, key, value)
        state = self.initial_state(x)
        if self.causal:
            return in_chunks(self._causal, [x, key, value], state, self.block_size)[0]
        blocks = (blocks_of_rows(array, self.block_size) for array in (key, value))
        for k, v in zip(*blocks, strict=True):
            keys, rows = self.keys_and_values(k, v)
            features, state = self.key_features(keys, state)
            state["sums"] = state["sums"] + self._for_queries(features).mT @ _with_ones(rows)

        def read(state: dict[str, Any], x: Any) -> tuple[Any, Any]:
            query = self.query_features(self.queries(x), state)
            return self._joined(_divided(query @ state["sums"]), x), state

        return in_chunks(read, [x], state, self.block_size)[0]

    def check(self, x: Any) -> None:
        """Refuse what cannot be computed token by token.

        Raises
        ------
        UnsupportedError
            The mechanism is not causal.
        ShapeError
            `x` has no tokens or no rows.
        """
        refuse_one_by_one(self.name, causal=self.causal)
        self.sequences(x, None, None)

    def next_tokens(self, state: dict[str, Any], x: Any) -> tuple[Any, dict[str, Any]]:
        """The output of one block of tokens, and the state after them."""
        return self._causal(state, x, x, x)

    def _causal(
        self, state: dict[str, Any], x: Any, key: Any, value: Any
    ) -> tuple[Any, dict[str, Any]]:
        """The output of the next tokens, and the state after them."""
        keys, rows = self.keys_and_values(key, value)
        inputs = (self.queries(x), keys, _with_ones(rows))
        sums, state = in_chunks(self._chunk, inputs, state, self.chunk_size)
        return self._joined(_divided(sums), x), state

    def _chunk(
        self, state: dict[str, Any], query: Any, key: Any, value: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Weighted sums of `value`, whose last column is ones, for the tokens of one chunk."""
        features, state = self.key_features(key, state)
        query, features = self.query_features(query, state), self._for_queries(features)
        out, sums = _tokens(state["sums"], query, features, value)
        return out, state | {"sums": sums}

    def _joined(self, out: Any, x: Any) -> Any:
        return self.join(array_namespace(x).astype(out, x.dtype, copy=False))

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The weights `(..., num_heads, q_len, kv_len)`; values only, without a gradient."""
        look = self.detached()
        given = [values(a, "x") for a in self.sequences(x, key, value)]
        if not self.causal:
            query, key, _ = look.featured(*given)
            return like(token_weights(query, key, causal=False), x)
        # With a value of its own for each token, the outputs are the weights.
        query, (key, rows) = look.queries(given[0]), look.keys_and_values(*given[1:])
        each = np.broadcast_to(
            np.eye(x.shape[-2], dtype=rows.dtype), (*rows.shape[:-1], x.shape[-2])
        )
        state = look.initial_state(given[0])
        sums = state["sums"][..., :1] * np.zeros(x.shape[-2] + 1, rows.dtype)
        inputs = (query, key, _with_ones(each))
        return like(
            _divided(in_chunks(look._chunk, inputs, state | {"sums": sums}, self.chunk_size)[0]), x
        )

    def steps(self, token: ExplainedToken) -> list[Step]:
        """Projections, features, weights and sum of each head, and the output."""
        given = token.query, token.key, token.value
        steps = self.steps_before(token, *self.heads(*given))
        seen = token.kv_tokens[: token.index + 1] if self.causal else token.kv_tokens
        query, key, value = self.featured(given[0], *(a[: len(seen)] for a in given[1:]))
        for head in range(self.num_heads):
            title = f"Head {head}, " if self.num_heads > 1 else ""
            rows = (query[head, token.index], key[head], value[head])
            shown = _steps(*rows, seen, self.shown_features)
            steps += [Step(f"{title}{s.title}", s.formula, s.lines) for s in shown]
        out = naive(query, key, value, causal=False)
        return steps + self.steps_after(out, token.index)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of sums that are taken once; chunks do more in fewer products."""
        h, g, d = symbols(h=self.num_heads, g=self.num_kv_heads, d=self.head_dim)
        tokens = batch * tokens
        ledger = Ledger()
        for name, inner, outer in self._projections():
            ledger += projection(name, tokens, inner, outer, self.bias)
        ledger += self.norm_cost(tokens, h) + self.norm_cost(tokens, g)
        features, of_features = self.feature_cost(tokens, d)
        pairs = tokens * features
        both: int = h + g
        ledger += of_features * both
        of_head = (
            step("state", multiply=pairs * d, add=pairs * (d + 1), space=batch * features * (d + 1))
            + step("read", multiply=pairs * (d + 1), add=(pairs - tokens) * (d + 1))
            + step("divide", divide=tokens * d, space=tokens * d)
        )
        return ledger + of_head * h


def _steps(
    query: Any, key: Any, value: Any, tokens: Sequence[str], shown_features: str
) -> list[Step]:
    """Features, their products, weights and output of one row of one head."""
    features = [Line("phi(q)", query.tolist()), *token_lines(tokens, key)]
    products = key @ query
    total = float(products.sum())
    weights = products / total
    parts = [
        Line(token, (w * row).tolist(), f"{number(float(w))} * {numbers(row)}")
        for token, w, row in zip(tokens, weights, value, strict=True)
    ]
    return [
        Step("Features", shown_features, tuple(features)),
        Step(
            "Products",
            "phi(q) . phi(k)",
            tuple(dot_product(t, query, row) for t, row in zip(tokens, key, strict=True)),
        ),
        Step(
            "Weights",
            f"w = product / sum, sum = {number(total)}",
            tuple(
                Line(t, float(w), f"{number(float(p))} / {number(total)}")
                for t, p, w in zip(tokens, products, weights, strict=True)
            ),
        ),
        Step(
            "Output",
            "o = sum_j w[j] v[j]",
            (*parts, Line("o", (weights @ value).tolist(), "their sum")),
        ),
    ]


def token_weights(query: Any, key: Any, causal: bool) -> Any:
    """The weights `w[i,j] = query[i] . key[j] / sum_j query[i] . key[j]`, (..., n, n).

    Parameters
    ----------
    query, key : arrays (..., n, features)
        Features, already positive.
    causal : bool
        Whether row i stops at j = i.

    Examples
    --------
    >>> import numpy as np
    >>> token_weights(np.ones((2, 1)), np.ones((2, 1)), causal=True)
    array([[1. , 0. ],
           [0.5, 0.5]])
    """
    xp = array_namespace(query)
    products = query @ key.mT
    if causal:
        products = xp.tril(products)
    return products / xp.sum(products, axis=-1, keepdims=True)


def naive(query: Any, key: Any, value: Any, causal: bool) -> Any:
    """Linear attention through its n x n weights; O(n^2), the parallel form of the definition."""
    weights = token_weights(query, key, causal)
    return causal_product(weights, value) if causal else weights @ value


def recurrent(query: Any, key: Any, value: Any, state: Any = None) -> tuple[Any, Any]:
    """Causal linear attention token by token, as decoding does it.

    Parameters
    ----------
    query, key : arrays (..., n, features)
    value : array (..., n, v_head_dim)
    state : array (..., features, v_head_dim + 1), optional
        What an earlier call returned: `sum_j key[j]^T [value[j], 1]` over the tokens before.

    Returns
    -------
    output : array (..., n, v_head_dim)
    state : array
        With the tokens of this call.
    """
    return chunk(query, key, value, state, 1)


def chunk(
    query: Any, key: Any, value: Any, state: Any = None, chunk_size: int = 64
) -> tuple[Any, Any]:
    """Causal linear attention in chunks of matrix products; what `recurrent` gives.

    Within a chunk it is the parallel form, and everything before the chunk is in the state.

    Notes
    -----
    O(n (chunk_size + features) (features + v_head_dim)) operations.
    """
    value = _with_ones(value)
    state = state_of_no_tokens(key, value) if state is None else state
    output, state = in_chunks(_tokens, (query, key, value), state, chunk_size)
    return _divided(output), state


def _tokens(state: Any, query: Any, key: Any, value: Any) -> tuple[Any, Any]:
    """Weighted sums for the tokens of one chunk, and the state after them."""
    return causal_product(query @ key.mT, value) + query @ state, state + key.mT @ value


def _with_ones(value: Any) -> Any:
    """A column of ones behind the values, whose weighted sum is the denominator."""
    xp = array_namespace(value)
    return xp.concat([value, xp.ones_like(value[..., :1])], axis=-1)


def _divided(sums: Any) -> Any:
    return sums[..., :-1] / sums[..., -1:]
