"""Keys of equal weight: `top(k)` lists them by rising index, on every backend."""

import numpy as np
import pytest

import qkv
from qkv.inspection.weights.statistics import by_weight

BACKENDS = ("cpu", "blocked", "reference")


def near_ties(kv_len, dtype=np.float32):
    """Scores that fall by single units in the last place: most weights round to one number."""
    key = (1 + 2.0**-23 * np.arange(kv_len, 0, -1))[:, None].astype(dtype)
    return np.ones((5, 1), dtype), key


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rising", [True, False])
def test_equal_weights_have_rising_indices(backend, rising) -> None:
    query, key = near_ties(24)
    key = key[::-1].copy() if rising else key
    indices, weights = qkv.inspect(query, key, key, scale=1.0, backend=backend).top(24)
    assert (np.diff(weights) <= 0).all()
    ties = np.diff(weights) == 0
    assert ties.sum() > 20
    assert (np.diff(indices)[ties] > 0).all()
    assert (np.sort(indices) == np.arange(24)).all()


def test_backends_agree_about_ties() -> None:
    query, key = near_ties(24)
    found = [
        qkv.inspect(query, key, key, scale=1.0, backend=backend).top(24)[0] for backend in BACKENDS
    ]
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])


def test_what_is_missing_stays_last() -> None:
    """Weights of 0 are equal too: those of real keys come before the padding."""
    indices = np.array([[3, 9, 4, -1, -1], [2, 1, 0, 7, -1]])
    weights = np.array([[0.5, 0.0, 0.0, 0.0, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0]])
    by_weight(indices, weights)
    assert indices.tolist() == [[3, 4, 9, -1, -1], [0, 1, 2, 7, -1]]
    assert weights[:, 0].tolist() == [0.5, 0.25]


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_scores_are_chosen_by_index(backend) -> None:
    query, key = np.zeros((3, 4), np.float32), np.ones((50, 4), np.float32)
    indices, _ = qkv.inspect(query, key, key, backend=backend).top(6)
    assert (indices == np.arange(6)).all()
