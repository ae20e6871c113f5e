"""Performer: softmax attention estimated by positive random features, in linear time."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.mechanisms.namespace import array_namespace

__all__ = ["orthogonal_projection", "softmax_features"]


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
    lengths = np.linalg.norm(rng.normal(size=(num_features, head_dim)), axis=1, keepdims=True)
    return lengths * np.concatenate(blocks)


def softmax_features(x: Any, projection: Any, axis: int | tuple[int, ...] = -1) -> Any:
    """Positive features whose product estimates `exp(q . k / sqrt(head_dim))` up to a factor.

    `exp(w . y - |y|^2 / 2) / sqrt(num_features)` for each row w of the projection, where y is x
    divided by the fourth root of head_dim. The largest exponent along `axis` is subtracted, which
    cancels when weights are divided by their sum.

    Parameters
    ----------
    x : array (..., n, head_dim)
    projection : array (num_features, head_dim)
    axis : int or tuple of int
        -1 for queries, whose rows may each have a factor; (-2, -1) for keys.

    Returns
    -------
    array (..., n, num_features)
    """
    xp = array_namespace(x)
    y = x * x.shape[-1] ** -0.25
    exponent = y @ projection.T - 0.5 * xp.sum(y * y, axis=-1, keepdims=True)
    largest = xp.max(exponent, axis=axis, keepdims=True)
    return xp.exp(exponent - largest) * projection.shape[0] ** -0.5
