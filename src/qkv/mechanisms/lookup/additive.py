"""Additive attention."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from qkv.arguments.declarations import Size, Whole
from qkv.errors import ShapeError
from qkv.inspection.traces.steps import softmax
from qkv.ledger import Count, Ledger, matmul, step, symbols
from qkv.ledger import softmax as softmax_ledger
from qkv.mechanisms.base.arguments import refuse_other_batches
from qkv.mechanisms.base.arrays.namespace import (
    array_namespace,
    like,
    recomputed,
    values,
    widened,
)
from qkv.mechanisms.base.arrays.rows import Arrays, Rows
from qkv.mechanisms.base.example import EXAMPLE_HEAD_DIM
from qkv.mechanisms.base.explanations.attention_steps import softmax_and_output, token_lines
from qkv.mechanisms.base.explanations.explanation import ExplainedToken, Line, Step, dot_product
from qkv.mechanisms.base.mechanism import Mechanism
from qkv.mechanisms.base.operations import projection
from qkv.samples import shared_example

__all__ = ["Additive"]

BLOCK_NUMBERS = 2**20
"""How many numbers of tanh are held at once, for each sequence of a batch."""


class Additive(Mechanism):
    """Scores by a small network with one hidden layer instead of a dot product.

        s[i, j] = v . tanh(W q_i + U k_j),   out[i] = sum_j softmax(s[i])[j] v_j

    Query and key may differ in width. tanh keeps scores within the sum of |v|, so they need no
    scale.

    Parameters
    ----------
    embed_dim : int
        Width of query rows.
    hidden_dim : int, optional
        Width of the hidden layer, `embed_dim` unless given.
    kv_dim : int, optional
        Width of key rows, `embed_dim` unless given.
    weights : mapping of str to array, optional
        `q_proj.weight` (hidden_dim, embed_dim) is W, `k_proj.weight` (hidden_dim, kv_dim) is U,
        `score.weight` (1, hidden_dim) is v; random by default.
    seed : int

    Raises
    ------
    ArgumentError
        If a size is not a positive integer.

    Notes
    -----
    `n m hidden_dim` values of tanh for n queries and m keys, in blocks of rows and keys, so that at
    most 2**20 of them for each sequence of a batch, and the scores of some rows, are in memory at
    once; torch's backward pass computes them again block by block. Source: Bahdanau et al. (2015),
    section 3.1 and appendix A.1.2.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Additive
    >>> Additive(4, hidden_dim=8)(np.ones((3, 4)), np.ones((5, 4)), np.ones((5, 2))).shape
    (3, 2)
    """

    name = "additive"
    paper = "Bahdanau et al., NMT by Jointly Learning to Align and Translate (2015)"
    formula = "softmax(v . tanh(W q + U k)) V"

    def __init__(
        self,
        embed_dim: Size,
        *,
        hidden_dim: Size | None = None,
        kv_dim: Size | None = None,
        weights: Arrays | None = None,
        seed: Whole = 0,
    ) -> None:
        self.embed_dim = embed_dim
        self.hidden_dim = embed_dim if hidden_dim is None else hidden_dim
        self.kv_dim = embed_dim if kv_dim is None else kv_dim
        shapes = {
            "q_proj.weight": (self.hidden_dim, embed_dim),
            "k_proj.weight": (self.hidden_dim, self.kv_dim),
            "score.weight": (1, self.hidden_dim),
        }
        super().__init__(shapes, weights, seed)

    def __call__(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """Attend from `x` to `key` and `value`, or to itself.

        Parameters
        ----------
        x : array (..., q_len, embed_dim)
        key : array (..., kv_len, kv_dim), optional
            `x` unless given.
        value : array (..., kv_len, v_dim), optional
            `key` unless given.

        Returns
        -------
        array (..., q_len, v_dim)
        """
        query, key, value = self.sequences(x, key, value)
        if key.shape[-2] != value.shape[-2] or not key.shape[-2]:
            raise ShapeError(
                f"key has {key.shape[-2]} rows and value {value.shape[-2]}.",
                [("key", str(tuple(key.shape))), ("value", str(tuple(value.shape)))],
                "Pass one row or more, and as many of one as of the other.",
            )
        hidden_q, hidden_k = self.linear("q_proj", query), self.linear("k_proj", key)
        vector = self.weight("score.weight", x)
        namespace = array_namespace(x)
        rows = recomputed(_output_rows, x)
        block = max(1, min(128, BLOCK_NUMBERS // max(key.shape[-2] * self.hidden_dim, 1)))
        outputs = [
            rows(hidden_q[..., first : first + block, :], hidden_k, value, vector)
            for first in range(0, max(x.shape[-2], 1), block)
        ]
        return namespace.concat(outputs, axis=-2)

    def sequences(self, x: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
        """What queries, keys and values are made of.

        Raises
        ------
        ShapeError
            Their leading dimensions do not broadcast.
        """
        given = super().sequences(x, key, value)
        refuse_other_batches(*given)
        return given

    def token_mixing(self, x: Rows, key: Rows | None = None, value: Rows | None = None, /) -> Any:
        """The attention weights `(..., q_len, kv_len)`; values only, without a gradient.

        Parameters
        ----------
        x, key, value : array
            As for a call.
        """
        look = self.detached()
        query, key, _ = (values(array, "x") for array in self.sequences(x, key, value))
        return like(_weights(*look._hidden(query, key)), x)

    def _hidden(self, query: Any, key: Any) -> tuple[Any, Any, Any]:
        return (
            self.linear("q_proj", query),
            self.linear("k_proj", key),
            self.weight("score.weight", query),
        )

    def steps(self, token: ExplainedToken) -> list[Step]:
        """The hidden layer, its activation, and the softmax of the scores."""
        query, key, value = (a.astype(np.float64) for a in (token.query, token.key, token.value))
        row, kv_names = token.index, token.kv_tokens
        hidden_q, hidden_k, vector = self._hidden(query, key)
        activations = np.tanh(hidden_q[row] + hidden_k)
        scores = activations @ vector[0]
        query_line = Line(f"W q of {token.name}", hidden_q[row].tolist())
        keys = token_lines([f"U k of {name}" for name in kv_names], hidden_k)
        sums = zip(kv_names, activations, strict=True)
        lines = tuple(dot_product(name, vector[0], activation) for name, activation in sums)
        return [
            Step("Hidden layer", "W q and U k", (query_line, *keys)),
            Step("Activation", "tanh(W q + U k)", token_lines(kv_names, activations)),
            Step("Scores", "s = v . tanh(W q + U k)", lines),
            *softmax_and_output(softmax(scores), value, kv_names),
        ]

    def operations(self, tokens: Count, batch: int) -> Ledger:
        """The operations of a hidden row for each pair; values are as wide as keys."""
        e, c, a = self._sizes()
        pairs = tokens * tokens
        scores = (
            step("hidden", add=pairs * a, tanh=pairs * a)
            + step("score", multiply=pairs * a, add=pairs * (a - 1), space=pairs)
            + softmax_ledger("softmax", tokens, tokens)
            + matmul("av", tokens, tokens, c)
        )
        ledger = scores * batch + Ledger(parameters=Count(1) * a)
        rows: int = batch * tokens
        return ledger + projection("q_proj", rows, e, a) + projection("k_proj", rows, c, a)

    def widths(self) -> tuple[int, int]:
        """A query, a key and a value are read, and a row as long as a value is written."""
        e, c, _ = self._sizes()
        return e + 2 * c, c

    def _sizes(self) -> tuple[Count, Count, Count]:
        e, c, a = symbols(e=self.embed_dim, c=self.kv_dim, a=self.hidden_dim)
        return e, e if self.kv_dim == self.embed_dim else c, a

    @classmethod
    def example(cls) -> Self:
        """W and U are the identity and v is ones: `s = sum of tanh(q + k)`."""
        eye = np.eye(EXAMPLE_HEAD_DIM)
        ones = np.ones((1, EXAMPLE_HEAD_DIM))
        weights = {"q_proj.weight": eye, "k_proj.weight": eye, "score.weight": ones}
        return cls(EXAMPLE_HEAD_DIM, weights=weights)

    @classmethod
    def example_arguments(cls) -> tuple[Any, ...]:
        """Q, K and V of the shared five tokens."""
        example = shared_example()
        return example.q, example.k, example.v


def _weights(hidden_q: Any, hidden_k: Any, vector: Any) -> Any:
    """The softmax over keys of `vector . tanh(hidden_q + hidden_k)`, in blocks of keys."""
    namespace = array_namespace(hidden_q)
    rows, keys = hidden_q.shape[-2], hidden_k.shape[-2]
    block = max(1, BLOCK_NUMBERS // max(rows * vector.shape[-1], 1))
    scores = namespace.concat(
        [
            namespace.matmul(
                namespace.tanh(
                    hidden_q[..., :, None, :] + hidden_k[..., None, first : first + block, :]
                ),
                vector[0],
            )
            for first in range(0, max(keys, 1), block)
        ],
        axis=-1,
    )
    if not keys:
        return scores
    # Sums of more than 65,504 terms are infinite in float16.
    scores = widened(scores)
    exps = namespace.exp(scores - namespace.max(scores, axis=-1, keepdims=True))
    return exps / namespace.sum(exps, axis=-1, keepdims=True)


def _output_rows(hidden_q: Any, hidden_k: Any, value: Any, vector: Any) -> Any:
    namespace = array_namespace(value)
    out = namespace.matmul(_weights(hidden_q, hidden_k, vector), widened(value))
    return namespace.astype(out, value.dtype)
