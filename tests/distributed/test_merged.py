"""Partials merged on one rank, beside softmax over all keys in float64."""

import numpy as np
import pytest
from numpy.typing import NDArray

from qkv.distributed.calls.parts import Merged
from qkv.partial import Partial

ROWS, KEYS, DIM = 5000, 12, 8


def softmax_over(scores: NDArray[np.float64], value: NDArray[np.float64]) -> Partial:
    """Attention of rows over some keys, by its definition; rows that see none are empty."""
    with np.errstate(all="ignore"):
        lse = np.logaddexp.reduce(scores, axis=-1)
        weights = np.where(np.isneginf(lse)[..., None], 0, np.exp(scores - lse[..., None]))
        out = np.where(weights[..., None] == 0, 0, weights[..., None] * value).sum(axis=-2)
    return Partial(out, lse)


@pytest.mark.parametrize("rows", [slice(None), slice(1000, 6000)])
@pytest.mark.parametrize("unseen", [0.0, 0.9])
def test_merging_is_softmax_over_all_keys(rows: slice, unseen: float) -> None:
    rng = np.random.default_rng(0)
    scores = 20 * rng.standard_normal((2, ROWS, KEYS))
    scores[rng.random(scores.shape) < unseen] = -np.inf
    value = rng.standard_normal((2, 1, KEYS, DIM))
    whole = ROWS if rows.start is None else 7000
    merged = Merged.empty((2, whole, DIM), np.dtype(np.float64))
    for start in range(0, KEYS, 4):
        keys = slice(start, start + 4)
        merged.add(rows, softmax_over(scores[..., keys], value[..., keys, :]))
    right = softmax_over(scores, value)
    np.testing.assert_allclose(merged.out[:, rows], right.out, atol=1e-12)
    np.testing.assert_allclose(merged.lse[:, rows], right.lse, atol=1e-12)
    others = np.ones(whole, bool)
    others[rows] = False
    assert not merged.out[:, others].any()
    assert np.isneginf(merged.lse[:, others]).all()


def test_a_part_without_keys_is_not_read() -> None:
    merged = Merged.empty((1, 3, 2), np.dtype(np.float64))
    unseen = Partial(np.full((1, 3, 2), np.nan), np.full((1, 3), -np.inf))
    seen = Partial(np.ones((1, 3, 2)), np.array([[0.0, 1.0, -np.inf]]))
    for part, right in ((unseen, [0, 0, 0]), (seen, [1, 1, 0]), (unseen, [1, 1, 0])):
        merged.add(slice(None), part)
        np.testing.assert_array_equal(merged.out[0, :, 0], right)


@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("hidden", [np.nan, np.inf])
def test_what_is_not_finite_stays_where_its_share_underflows(hidden: float, first: bool) -> None:
    """An allowed value reaches the output, however small its weight is: 0 times NaN is NaN."""
    merged = Merged.empty((1, 1, 1), np.dtype(np.float64))
    seen = Partial(np.ones((1, 1, 1)), np.array([[1000.0]]))
    odd = Partial(np.full((1, 1, 1), hidden), np.array([[-1000.0]]))
    for part in (odd, seen) if first else (seen, odd):
        merged.add(slice(None), part)
    assert np.isnan(merged.out).all()


def test_means_of_the_largest_number_are_finite() -> None:
    """Shares add up to one but for rounding, which made it infinite."""
    rng, largest = np.random.default_rng(0), np.finfo(np.float64).max
    for sign in (1, -1):
        merged = Merged.empty((1, 500, 1), np.dtype(np.float64))
        for lse in rng.normal(scale=3, size=(3, 1, 500)):
            merged.add(slice(None), Partial(np.full((1, 500, 1), sign * largest), lse))
        np.testing.assert_allclose(merged.out / (sign * largest), 1, rtol=1e-15)
