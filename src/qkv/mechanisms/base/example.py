"""The shared five-token example as one input that every mechanism can read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.samples import shared_example

__all__ = ["EXAMPLE_HEAD_DIM", "EXAMPLE_WIDTH", "example_input", "example_tokens", "select_columns"]

EXAMPLE_HEAD_DIM = 4
"""Length of a row of Q, K and V in the shared example."""

EXAMPLE_WIDTH = 3 * EXAMPLE_HEAD_DIM
"""embed_dim of the shared example: columns 0 to 3 are Q, 4 to 7 are K, 8 to 11 are V."""


def example_input() -> NDArray[Any]:
    """The five tokens as x = [Q | K | V], (5, 12), float64.

    The shared example is given as Q, K and V. Projections that select the columns of each
    (`select_columns`) turn this x into exactly those numbers, so that mechanisms with projections
    and without are compared on the same five tokens.

    Examples
    --------
    >>> example_input()[0]
    array([1., 0., 1., 0., 0., 1., 0., 1., 1., 0., 0., 0.])
    """
    example = shared_example()
    return np.concatenate([example.q, example.k, example.v], axis=1)


def example_tokens() -> tuple[str, ...]:
    """The names of the five tokens.

    Examples
    --------
    >>> example_tokens()
    ('The', 'cat', 'sat', 'on', 'mat')
    """
    return shared_example().tokens


def select_columns(columns: Iterable[int], width: int = EXAMPLE_WIDTH) -> NDArray[Any]:
    """The projection weight (len(columns), width) for which `x @ weight.T` is `x[:, columns]`.

    Examples
    --------
    >>> select_columns([1, 2], width=3)
    array([[0., 1., 0.],
           [0., 0., 1.]])
    """
    return np.eye(width)[list(columns)]
