"""Linear attention: a softmax replaced by a product of features, so that sums can be kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from qkv.errors import ShapeError, UnsupportedError
from qkv.ledger import Count, Ledger, step, symbols
from qkv.mechanisms.base.arguments import positive_integers, refuse_options
from qkv.mechanisms.base.attention_steps import token_lines
from qkv.mechanisms.base.explanation import ExplainedToken, Line, Step, dot_product, number, numbers
from qkv.mechanisms.base.namespace import array_namespace, like, values
from qkv.mechanisms.base.operations import projection
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.mechanisms.linear_time.activations import elu_plus_one
from qkv.mechanisms.linear_time.chunks import in_chunks, state_of_no_tokens
from qkv.mechanisms.linear_time.recurrent import repeated_heads

__all__ = ["Linear", "bidirectional", "chunk", "naive", "recurrent", "token_weights"]


class Linear(ProjectedAttention):
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
        weights, seed.

    Raises
    ------
    ArgumentError, ShapeError
        The sizes, or the weights, do not fit one another, or scale, rope or alibi is given.

    Notes
    -----
    O(n head_dim^2) operations for each head, and the projections; no scale. Source: Katharopoulos
    et al., "Transformers are RNNs", arXiv 2006.16236.

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

    decodes: ClassVar[bool] = True
    """Whether the features of a key are its own, so that a sum over keys can be continued."""
    block_size: ClassVar[int] = 4096
    """Tokens that are computed at once, if causal, so that they need little memory."""

    def __init__(
        self, embed_dim: int, num_heads: int = 1, *, chunk_size: int = 64, **options: Any
    ) -> None:
        positive_integers(chunk_size=chunk_size)
        refuse_options(self.name, options, "scale", "rope", "alibi")
        self.chunk_size = chunk_size
        super().__init__(embed_dim, num_heads, **options)

    def features(self, query: Any, key: Any) -> tuple[Any, Any]:
        """Positive features of query and key rows."""
        return elu_plus_one(query), elu_plus_one(key)

    def feature_cost(self, rows: int, head_dim: int) -> tuple[int, Ledger]:
        """How many features a row has, and what those of `rows` rows take."""
        each = rows * head_dim
        return head_dim, step("features", compare=each, exp=each, add=each)

    def featured(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """Features of queries and keys, and values, of as many heads as there are of queries.

        Raises
        ------
        ShapeError
            If key and value, or causal query and key, differ in length, or are empty.
        """
        query_rows, key_rows, value_rows = self.heads(x, key, value)
        if key_rows.shape[-2] != value_rows.shape[-2] or 0 in (x.shape[-2], key.shape[-2]):
            raise ShapeError(
                "key and value need as many rows as one another, and x and key one or more.",
                [("key", str(tuple(key_rows.shape))), ("value", str(tuple(value_rows.shape)))],
                "Pass sequences of one length.",
            )
        if self.causal and key_rows.shape[-2] != query_rows.shape[-2]:
            raise ShapeError(
                "causal linear attention reads as many keys as queries.",
                [("x", str(tuple(x.shape))), ("key", str(tuple(key.shape)))],
                "Pass x alone, or a mechanism with causal=False.",
            )
        times = self.num_heads // self.num_kv_heads
        query, key = self.features(query_rows, key_rows)
        return query, repeated_heads(key, times), repeated_heads(value_rows, times)

    def mix(self, query: Any, key: Any, value: Any) -> Any:
        """The output of the heads from features and values."""
        if self.causal:
            return chunk(query, key, value, chunk_size=self.chunk_size)[0]
        return bidirectional(query, key, value)

    def __call__(self, x: Any, key: Any = None, value: Any = None, /) -> Any:
        """Attend from `x` to `key` and `value`, or to itself, in linear time.

        Parameters
        ----------
        x : array (..., q_len, embed_dim)
        key, value : array (..., kv_len, kv_dim), optional
            `x` unless given; `value` is `key` unless given.

        Returns
        -------
        array (..., q_len, width)
            In the library, dtype and device of `x`.

        Raises
        ------
        ShapeError
            The arrays do not fit the weights or one another.
        """
        xp = array_namespace(x)
        alone = key is None and value is None and x.ndim > 1
        if alone and self.causal and self.decodes and x.shape[-2] > self.block_size:
            return in_chunks(lambda state, x: self.step(x, state), [x], None, self.block_size)[0]
        out = self.join(self.mix(*self.featured(*self.sequences(x, key, value))))
        # NumPy multiplies bfloat16 to float32.
        return xp.astype(out, x.dtype, copy=False)

    def step(self, x: Any, state: Any = None) -> tuple[Any, Any]:
        """Mix the next tokens of a sequence: one when decoding, several for a prompt.

        Parameters
        ----------
        x : array (..., n, embed_dim)
        state : array (..., num_heads, head_dim, head_dim + 1), optional
            What the last step returned; a sequence begins if there is none.

        Returns
        -------
        output : array (..., n, width)
            What a call with all tokens so far gives for these.
        state : array
            `sum_j phi(k_j)^T [v_j, 1]` over all tokens so far.

        Raises
        ------
        UnsupportedError
            The mechanism is not causal, or its features of one key depend on the others.
        ShapeError
            The state is of another mechanism, or for another batch.

        Examples
        --------
        >>> import numpy as np
        >>> from qkv.mechanisms import Linear
        >>> layer, x = Linear(8, causal=True), np.eye(8)
        >>> first, state = layer.step(x[:5])
        >>> rest, state = layer.step(x[5:], state)
        >>> bool(np.allclose(np.concatenate([first, rest]), layer(x)))
        True
        """
        if not (self.causal and self.decodes):
            raise UnsupportedError(
                f"{self.name} with causal={self.causal} cannot be computed token by token.",
                action="Pass the whole sequence to a call, or use Linear(..., causal=True).",
            )
        query, key, value = self.featured(x, x, x)
        shape = (*key.shape[:-2], key.shape[-1], value.shape[-1] + 1)
        state = None if state is None else like(state, x, "state")
        if state is not None and tuple(state.shape) != shape:
            raise ShapeError(
                f"the state has shape {tuple(state.shape)}, not {shape}.",
                [("x", str(tuple(x.shape)))],
                "Pass what step returned for the tokens before, of the same sequences.",
            )
        out, state = chunk(query, key, value, state, self.chunk_size)
        return array_namespace(x).astype(self.join(out), x.dtype, copy=False), state

    def token_mixing(self, x: Any, key: Any = None, value: Any = None, /) -> Any:
        """The weights `(..., num_heads, q_len, kv_len)`; values only, without a gradient."""
        given = (values(a, "x") for a in self.sequences(x, key, value))
        query, key, _ = self.detached().featured(*given)
        return like(token_weights(query, key, self.causal), x)

    def steps(self, token: ExplainedToken) -> list[Step]:
        """Projections, features, weights and sum of each head, and the output."""
        given = token.query, token.key, token.value
        steps = self.steps_before(token, *self.heads(*given))
        query, key, value = self.featured(*given)
        seen = token.kv_tokens[: token.index + 1] if self.causal else token.kv_tokens
        for head in range(self.num_heads):
            title = f"Head {head}, " if self.num_heads > 1 else ""
            rows = (query[head, token.index], key[head, : len(seen)], value[head, : len(seen)])
            steps += [Step(f"{title}{s.title}", s.formula, s.lines) for s in _steps(*rows, seen)]
        return steps + self.steps_after(self.mix(query, key, value), token.index)

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """Those of sums that are taken once; chunks do more in fewer products."""
        h, g, d = symbols(h=self.num_heads, g=self.num_kv_heads, d=self.head_dim)
        tokens = batch * tokens
        found = Ledger()
        for name, inner, outer in self._projections():
            found += projection(name, tokens, inner, outer, self.bias)
        features, ledger = self.feature_cost(tokens, d)
        pairs = tokens * features
        both: int = h + g
        found += ledger * both
        of_head = (
            step("state", multiply=pairs * d, add=pairs * (d + 1), space=features * (d + 1))
            + step("read", multiply=pairs * (d + 1), add=(pairs - tokens) * (d + 1))
            + step("divide", divide=tokens * d, space=tokens * d)
        )
        return found + of_head * h


def _steps(query: Any, key: Any, value: Any, tokens: Sequence[str]) -> list[Step]:
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
        Step("Features", "phi(q) of the token, phi(k) of each", tuple(features)),
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
    return token_weights(query, key, causal) @ value


def bidirectional(query: Any, key: Any, value: Any) -> Any:
    """Linear attention without a mask: one sum over all keys serves every query; O(n)."""
    return _divided(query @ (key.mT @ _with_ones(value)))


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
    return _in_chunks(lambda products: products, query, key, value, state, 1)


def chunk(
    query: Any, key: Any, value: Any, state: Any = None, chunk_size: int = 64
) -> tuple[Any, Any]:
    """Causal linear attention in chunks of matrix products; what `recurrent` gives.

    Within a chunk it is the parallel form, and everything before the chunk is in the state.

    Notes
    -----
    O(n (chunk_size + features) (features + v_head_dim)) operations.
    """
    return _in_chunks(array_namespace(query).tril, query, key, value, state, chunk_size)


def _in_chunks(
    masked: Callable[[Any], Any], query: Any, key: Any, value: Any, state: Any, size: int
) -> tuple[Any, Any]:
    def tokens(state: Any, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        return masked(q @ k.mT) @ v + q @ state, state + k.mT @ v

    value = _with_ones(value)
    state = state_of_no_tokens(key, value) if state is None else state
    output, state = in_chunks(tokens, (query, key, value), state, size)
    return _divided(output), state


def _with_ones(value: Any) -> Any:
    """A column of ones behind the values, whose weighted sum is the denominator."""
    xp = array_namespace(value)
    return xp.concat([value, xp.ones_like(value[..., :1])], axis=-1)


def _divided(sums: Any) -> Any:
    return sums[..., :-1] / sums[..., -1:]
