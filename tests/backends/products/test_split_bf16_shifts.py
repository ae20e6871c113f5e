"""Products of parts: shifts that lse needs, and values that cannot be split.

What they share with bfloat16 on tiles is in test_bf16_tiles.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from on_cpu import require_right, run

Array = NDArray[Any]
pytestmark = [pytest.mark.usefixtures("tiles", "splits_operands")]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


@pytest.mark.parametrize("gap", [3.0, 10.0, 40.0])
def test_a_key_above_the_shift_that_has_all_the_weight(gap: float) -> None:
    """The error of an exponent grows with its size, and would be that of lse, which is small."""
    bias = np.full((1, 200), -gap, np.float32)
    bias[0, 150] = 0
    query, key, value = (normal(1, n, 64, seed=seed) for seed, n in enumerate((40, 200, 200)))
    require_right((query, key, value), qkv.Bias(bias))


def test_one_value_that_cannot_be_split_changes_no_bit_elsewhere() -> None:
    """The value's block of keys is computed in another order; only its own column may show that."""
    query, key, value = (normal(1, 300, 64, seed=n) for n in range(3))
    before, lse = run(query, key, value)
    value[0, 200, 7] = 2.0**61
    after, lse_after = run(query, key, value)
    others = np.arange(64) != 7
    assert after[..., others].tobytes() == before[..., others].tobytes()
    assert lse_after.tobytes() == lse.tobytes()
