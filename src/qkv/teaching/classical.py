"""Attention as the classical texts teach it: a class with one method for each step."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import checked_integer, checked_size
from qkv.arrays.views import view
from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.inspection.rendering.tokens import printable
from qkv.inspection.traces.explain import explain, selected_indices
from qkv.inspection.traces.steps import softmax
from qkv.inspection.traces.trace_text import bar

Array = NDArray[np.float64]


class ScaledDotProductAttention:
    """`softmax(Q K^T / sqrt(d_k)) V`, step by step, in float64 with whole matrices.

    For learning and for small inputs: `qkv.attention` computes the same without the matrices.

    Parameters
    ----------
    d_k : int
        Length of the rows of Q and K (head_dim).

    Attributes
    ----------
    d_k : int
    scale : float
        `sqrt(d_k)`, by which scores are divided.

    Raises
    ------
    ArgumentError
        If d_k is not a positive integer.
    ShapeError, DTypeError
        From the methods, if arrays do not fit d_k or one another, or are not of numbers.

    Notes
    -----
    Arrays, or nested lists, may have any leading dimensions. A score of -inf forbids its pair; a
    row with nothing else gets weights 0. Cost: `2 (d_k + d_v)` operations and three float64 numbers
    for each pair. Source: Vaswani et al. (2017), section 3.2.1.

    Examples
    --------
    >>> import qkv
    >>> layer = qkv.ScaledDotProductAttention(d_k=2)
    >>> weights, output = layer.forward([[1, 0]], [[1, 0], [0, 1]], [[1, 0], [0, 1]])
    >>> weights.round(3)
    array([[0.67, 0.33]])
    """

    def __init__(self, d_k: int) -> None:
        self.d_k = checked_size("d_k", d_k)
        self.scale = sqrt(self.d_k)

    def __repr__(self) -> str:
        return f"ScaledDotProductAttention(d_k={self.d_k})"

    def compute_scores(self, Q: Any, K: Any) -> Array:
        """`Q K^T`, `(..., q_len, kv_len)`.

        Raises
        ------
        ShapeError
            If rows do not have length d_k, or leading dimensions do not broadcast.
        """
        query, key = _matrix(Q, "Q"), _matrix(K, "K")
        for name, array in (("Q", query), ("K", key)):
            if array.shape[-1] != self.d_k:
                raise ShapeError(
                    f"{name} has rows of length {array.shape[-1]}; d_k={self.d_k}.",
                    [("Q", str(query.shape)), ("K", str(key.shape))],
                    "Pass arrays (..., length, d_k).",
                )
        return _product(query, key.swapaxes(-1, -2), "Q", "K^T")

    def scale_scores(self, scores: Any) -> Array:
        """`scores / sqrt(d_k)`."""
        return _matrix(scores, "scores") / self.scale

    def compute_weights(self, scaled_scores: Any) -> Array:
        """Softmax of each row: `exp(s - max) / sum exp(s - max)`."""
        return softmax(_matrix(scaled_scores, "scaled_scores")).weights

    def compute_output(self, weights: Any, V: Any) -> Array:
        """`weights V`, `(..., q_len, d_v)`."""
        return _product(_matrix(weights, "weights"), _matrix(V, "V"), "weights", "V")

    def forward(self, Q: Any, K: Any, V: Any) -> tuple[Array, Array]:
        """Weights `(..., q_len, kv_len)` and output `(..., q_len, d_v)`."""
        weights = self.compute_weights(self.scale_scores(self.compute_scores(Q, K)))
        return weights, self.compute_output(weights, V)

    __call__ = forward

    def explain(self, Q: Any, K: Any, V: Any, tokens: Sequence[str], query_idx: int = 0) -> None:
        """Print the four steps for one query.

        Parameters
        ----------
        Q, K, V : arrays (length, d_k), (length, d_k), (length, d_v)
            One sequence.
        tokens : sequence of str
            One for each row; bars have one `#` for each 1/40 of weight.
        query_idx : int
            Row of Q.

        Raises
        ------
        ShapeError
            If there are leading dimensions, or rows do not have length d_k.
        ArgumentError
            If `tokens` does not name each row.
        """
        query, key, value = _matrix(Q, "Q"), _matrix(K, "K"), _matrix(V, "V")
        self.compute_scores(query, key)
        if any(array.ndim != 2 for array in (query, key, value)):
            raise ShapeError(
                "explain shows one sequence; there are leading dimensions.",
                [("Q", str(query.shape)), ("K", str(key.shape)), ("V", str(value.shape))],
                "Pass one of them, as in explain(Q[0], K[0], V[0], tokens).",
            )
        if tokens is None:
            raise ArgumentError(
                "tokens=None names no rows.", action="Pass a string for each row of K."
            )
        asked = checked_integer("query_idx", query_idx)
        (q_index,) = selected_indices(asked, len(query), "query_idx", "rows of Q")
        trace = explain(
            query,
            key,
            value,
            scale=1 / self.scale,
            q_index=q_index,
            tokens=tokens,
            kv_tokens=tokens,
        )
        row = trace.heads[0].rows[0]
        names = [printable(token) for token in tokens]
        name = names[row.q_index]
        divisor = str(round(self.scale, 4))
        print(f"=== Attention trace for '{name}' (row {row.q_index}) ===")
        print(f"Q[{row.q_index}] = {_row(row.query)}")
        print("Step 1 - Raw dot products (Q @ K^T):")
        for key_name, score in zip(names, row.raw, strict=True):
            print(f"  Q[{name}] . K[{key_name}] = {score:.4f}")
        print(f"Step 2 - Scaled (/ sqrt({self.d_k}) = / {divisor}):")
        for key_name, score in zip(names, row.scaled, strict=True):
            print(f"  S[{name},{key_name}] = {score:.4f}")
        print("Step 3 - Softmax weights:")
        for key_name, weight in zip(names, row.softmax.weights, strict=True):
            print(f"  A[{name},{key_name}] = {weight:.4f} |{bar(weight)}|")
        print("Step 4 - Output (weighted sum of V):")
        print(f"  O[{name}] = {_row(row.output)}")
        print(f"  Sum of weights = {row.softmax.weights.sum():.6f}")


def _row(array: Array) -> str:
    return np.array2string(array, precision=4, max_line_width=10**6, threshold=10**6)


def _matrix(array: Any, name: str) -> Array:
    """An array of any library, or nested lists, in float64 with at least two dimensions."""
    try:
        given = np.asarray(array) if isinstance(array, list | tuple) else view(array, name)
    except ValueError:
        raise ShapeError(
            f"{name} is a list whose rows differ in length.", action="Pass rows of one length."
        ) from None
    if given.dtype.kind not in "iuf" and given.dtype.name != "bfloat16":
        raise DTypeError(
            f"{name} has dtype {given.dtype}, not numbers.",
            action=f"Pass {name} as integers or floating numbers.",
        )
    if given.ndim < 2:
        raise ShapeError(
            f"{name} has {given.ndim} dimensions; a matrix has 2 or more.",
            [(name, str(given.shape))],
            "Pass (..., rows, columns).",
        )
    return given.astype(np.float64)


def _product(a: Array, b: Array, a_name: str, b_name: str) -> Array:
    try:
        with np.errstate(all="ignore"):
            return np.asarray(a @ b)
    except ValueError:
        raise ShapeError(
            f"{a_name} {a.shape} and {b_name} {b.shape} cannot be multiplied.",
            action="The inner lengths must be equal and leading dimensions broadcast.",
        ) from None
