"""Performer: softmax attention estimated by positive random features, in linear time."""

from __future__ import annotations

import math
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from qkv.arguments.declarations import Size
from qkv.arrays import library_of
from qkv.errors import ShapeError
from qkv.ledger import Count, Ledger, matmul, step
from qkv.mechanisms.base.arrays.namespace import array_namespace, certainly_all, like
from qkv.mechanisms.base.arrays.rows import Rows, refuse_many_numbers
from qkv.mechanisms.linear_time.linear import Linear
from qkv.mechanisms.linear_time.rwkv6 import read_of_earlier

__all__ = ["Performer", "feature_exponents", "independent_projection", "orthogonal_projection"]


class Performer(Linear):
    """Softmax attention in linear time, estimated by positive random features (FAVOR+).

        o_i = sum_j w_ij v_j,  w_ij = phi(q_i) . phi(k_j) / sum_j of it
        phi(x)_a = exp(w_a . y - |y|^2 / 2) / sqrt(num_features),  y = x / head_dim^(1/4)

    For normal w, the mean of phi(q) . phi(k) is exactly exp(q . k / sqrt(head_dim)), so that
    attention is estimated without bias in numerator and denominator. The squared error falls as
    1 / num_features, and orthogonal w make it smaller than independent ones.

    Parameters
    ----------
    embed_dim, num_heads : int
    num_features : int
        Random features of each head.
    orthogonal : bool
        Whether the w are orthogonal in blocks of head_dim, or independent.
    projection : array (num_features, head_dim), optional
        The w; from the seed unless given. All heads share them, and they are not trained.
    **options
        As for `Linear`: chunk_size, causal and the others.

    Raises
    ------
    ShapeError
        `projection` is not (num_features, head_dim).

    Notes
    -----
    O(n num_features head_dim) operations for each head. Source: Choromanski et al., "Rethinking
    Attention with Performers", arXiv 2009.14794.

    Each feature of keys is divided by the largest so far, and sums are corrected when that grows,
    as in flash attention. A chunk of tokens has one divisor where that loses nothing; where keys
    grow more, every token has its own, and sums fade on their way from token to token.

    Examples
    --------
    >>> import numpy as np
    >>> from qkv.mechanisms import Performer
    >>> Performer(16, num_heads=4, num_features=32)(np.ones((2, 5, 16))).shape
    (2, 5, 16)
    """

    name = "performer"
    paper = "Choromanski et al., Rethinking Attention with Performers (2020)"
    formula = (
        "o_i = sum_j w_ij v_j, w_ij = phi(q_i) . phi(k_j) / sum_j of it, "
        "phi(x) = exp(w . x - |x|^2 / 2)"
    )
    shown_features: ClassVar[str] = (
        "phi(q) of the token, phi(k) of each. A feature of all keys is divided by the largest, "
        "that of q multiplied by it, and phi(q) divided by its largest: no weight changes"
    )

    def __init__(
        self,
        embed_dim: Size,
        num_heads: Size = 1,
        *,
        num_features: Size = 256,
        orthogonal: bool = True,
        projection: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(embed_dim, num_heads, **options)
        shape = (num_features, self.head_dim)
        if projection is None:
            refuse_many_numbers("the projection of performer", num_features * self.head_dim)
            rng = np.random.default_rng(options.get("seed", 0))
            draw = orthogonal_projection if orthogonal else independent_projection
            projection = draw(*shape, rng)
        library_of(projection, "projection")
        if tuple(projection.shape) != shape:
            raise ShapeError(
                f"projection has shape {tuple(projection.shape)}, not (num_features, head_dim).",
                [("num_features", str(num_features)), ("head_dim", str(self.head_dim))],
                f"Pass it as {shape}.",
            )
        self.num_features, self.projection = num_features, projection

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """What is kept of the past: the sums of each feature, divided by exp(largest)."""
        return {
            "sums": (self.num_heads, self.num_features, self.head_dim + 1),
            "largest": (self.num_kv_heads, 1, self.num_features),
        }

    def initial_state(self, x: Rows) -> dict[str, Any]:
        """Sums of nothing, whose largest exponent is -inf."""
        state = super().initial_state(x)
        return state | {"largest": state["largest"] - math.inf}

    def _row_features(self, rows: Any) -> Any:
        """Logarithms of features."""
        return feature_exponents(rows, like(self.projection, rows, "projection"))

    def query_features(self, query: Any, state: dict[str, Any]) -> Any:
        """Positive random features of query rows for keys divided by their largest.

        Each row is divided by its largest feature times that of keys, so that no sum is zero.
        """
        xp = array_namespace(query)
        exponent = query + self._for_queries(state["largest"])
        return self._exp(exponent - xp.max(exponent, axis=-1, keepdims=True))

    def key_features(self, key: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Positive random features of key rows, each divided by the largest of all keys so far."""
        xp = array_namespace(key)
        largest = xp.maximum(xp.max(key, axis=-2, keepdims=True), state["largest"])
        faded = xp.exp(state["largest"] - largest).mT
        sums = self._for_queries(faded) * state["sums"]
        return self._exp(key - largest), {"sums": sums, "largest": largest}

    def _chunk(
        self, state: dict[str, Any], query: Any, key: Any, value: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Attend as `Linear` does, if the largest keys grow little from first to last token.

        Otherwise the features of the first tokens would vanish, divided by those of later ones.
        """
        xp = array_namespace(key)
        little = -0.25 * math.log(float(xp.finfo(key.dtype).smallest_normal))
        first = xp.maximum(state["largest"], key[..., :1, :])
        growth = xp.max(key, axis=-2, keepdims=True) - first
        if key.shape[-2] == 1 or certainly_all(growth < little):
            return super()._chunk(state, query, key, value)
        largest = _running_largest(xp.concat([state["largest"], key], axis=-2))
        state = state | {"largest": largest[..., -1:, :]}
        key, largest = self._for_queries(key), self._for_queries(largest)
        before, largest = largest[..., :-1, :], largest[..., 1:, :]
        top = xp.max(query + largest, axis=-1, keepdims=True)
        own = xp.sum(xp.exp(query + key - top), axis=-1, keepdims=True) / self.num_features
        reads, writes = self._exp(query + before - top), self._exp(key - largest)
        earlier, sums = read_of_earlier(reads, writes, value, before - largest, state["sums"])
        return own * value + earlier, state | {"sums": sums}

    def _exp(self, exponent: Any) -> Any:
        return array_namespace(exponent).exp(exponent) * self.num_features**-0.5

    def feature_cost(self, rows: int, head_dim: int) -> tuple[int, Ledger]:
        """How many features a row has, and what those of `rows` rows take."""
        m = Count(self.num_features, "m")
        ledger = matmul("features", rows, head_dim, m)
        return m, ledger + step(
            "features",
            multiply=rows * (2 * head_dim + 1 + m),
            add=rows * (head_dim - 1),
            compare=rows * (m - 1),
            subtract=2 * rows * m,
            exp=rows * m,
        )

    @classmethod
    def example(cls) -> Self:
        """One head of four numbers on the shared five tokens, with 16 features."""
        return cls.for_example(num_features=16)


def _running_largest(rows: Any) -> Any:
    """The largest of each row and all rows before it, in every column."""
    xp, shift = array_namespace(rows), 1
    while shift < rows.shape[-2]:
        later = xp.maximum(rows[..., shift:, :], rows[..., :-shift, :])
        rows, shift = xp.concat([rows[..., :shift, :], later], axis=-2), 2 * shift
    return rows


def orthogonal_projection(
    num_features: int, head_dim: int, rng: np.random.Generator
) -> NDArray[Any]:
    """Normal random rows, orthogonal to one another within each block of `head_dim`.

    Each row has the distribution of a standard normal vector: a random direction, and the length
    of a normal vector of its own.

    Parameters
    ----------
    num_features, head_dim : int
    rng : numpy.random.Generator

    Returns
    -------
    array (num_features, head_dim), float64

    Notes
    -----
    Source: Choromanski et al., "Rethinking attention with Performers", arXiv 2009.14794, section
    2.4; Yu et al., "Orthogonal random features", arXiv 1610.09072.

    Examples
    --------
    >>> w = orthogonal_projection(3, 3, np.random.default_rng(0))
    >>> np.round(w @ w.T, 12) == np.diag(np.diag(np.round(w @ w.T, 12)))
    array([[ True,  True,  True],
           [ True,  True,  True],
           [ True,  True,  True]])
    """
    blocks = []
    for start in range(0, num_features, head_dim):
        basis, triangle = np.linalg.qr(rng.normal(size=(head_dim, head_dim)))
        # The signs make the basis uniform over all rotations and reflections.
        basis = basis * np.sign(np.diagonal(triangle))
        blocks.append(basis.T[: num_features - start])
    lengths = np.linalg.norm(rng.normal(size=(num_features, head_dim)), axis=1)
    rows: NDArray[Any] = np.concatenate(blocks) * lengths[:, None]
    return rows


def independent_projection(
    num_features: int, head_dim: int, rng: np.random.Generator
) -> NDArray[Any]:
    """Independent standard normal rows, (num_features, head_dim)."""
    return rng.normal(size=(num_features, head_dim))


def feature_exponents(x: Any, projection: Any) -> Any:
    """Logarithms of features whose products estimate `exp(q . k / sqrt(head_dim))`.

    `w . y - |y|^2 / 2` for each row w of the projection, where y is x divided by the fourth root of
    head_dim. A number may be subtracted from those of a query, and one from those of all keys: it
    cancels when weights are divided by their sum.

    Parameters
    ----------
    x : array (..., n, head_dim)
    projection : array (num_features, head_dim)

    Returns
    -------
    array (..., n, num_features)
    """
    xp = array_namespace(x)
    y = x * x.shape[-1] ** -0.25
    return y @ projection.T - 0.5 * xp.sum(y * y, axis=-1, keepdims=True)
