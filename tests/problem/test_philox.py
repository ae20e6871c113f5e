"""Philox4x32-10 against the known answers that its authors publish with Random123."""

import numpy as np
import pytest

from qkv.problem.philox import dropout_factors, philox
from qkv.problem.spec import Dropout

KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter, key, words) -> None:
    assert tuple(int(w) for w in philox(counter, key[0] | key[1] << 32)) == words


def test_counters_broadcast() -> None:
    together = philox((np.arange(5)[None, :], np.arange(3)[:, None], 7, 9), 12345)[0]
    assert together.shape == (3, 5)
    for i, j in np.ndindex(3, 5):
        assert together[i, j] == philox((j, i, 7, 9), 12345)[0]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    """The share is within four standard deviations of a binomial."""
    n = 400
    factors = dropout_factors(
        Dropout(p, 42), 0, 0, np.arange(n)[:, None], np.arange(n)[None], np.dtype(np.float64)
    )
    dropped = (factors == 0).mean()
    assert abs(dropped - p) <= 4 * np.sqrt(p * (1 - p)) / n
    np.testing.assert_allclose(factors[factors != 0], 1 / (1 - p))
