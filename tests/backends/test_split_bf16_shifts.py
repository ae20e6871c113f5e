"""Products of parts: the shifts of rows, and tasks of different sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv.backends.cpu.passes.forward import ForwardPass
from qkv.problem.check import check
from qkv.testing import bounds, truth

Array = NDArray[Any]
pytestmark = [pytest.mark.usefixtures("tiles", "splits_operands")]


def normal(*shape: int, dtype: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def run(*args: Any, **keywords: Any) -> tuple[Array, Array]:
    return qkv.attention(*args, backend="cpu", return_lse=True, **keywords)


def require_right(arrays: tuple[Array, ...], *variants: Any) -> None:
    out, lse = run(*arrays, *variants)
    expected = truth(*arrays, variants)
    limit = bounds(expected, arrays[0].dtype)
    assert np.abs(out.astype(float) - expected.out).max() <= limit.out
    assert np.abs(lse - expected.lse).max() <= limit.lse


def with_a_late_large_key(times: float, dtype: str) -> tuple[Array, Array, Array]:
    """Key 150 is along query 3, so that this query's score is far above those of earlier keys."""
    query, key, value = (normal(1, n, 64, dtype=dtype, seed=n) for n in (40, 200, 201))
    key[0, 150] = query[0, 3] * np.array(times, dtype)
    return query, key, value[:, :200]


def gaps(query: Array, key: Array) -> Array:
    """By how much the score of key 150 exceeds those of the first group of keys."""
    scores = query[0].astype(float) @ key[0].astype(float).T / 8
    return scores[:, 150] - scores[:, :32].max(axis=-1)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("variants", [(), (qkv.Causal("end"),), (qkv.Softcap(900.0),)], ids=str)
def test_scores_far_above_those_of_the_first_keys(dtype: str, variants: tuple[Any, ...]) -> None:
    """Weights of up to 2^700 have no place in float32: such rows are computed once more."""
    arrays = with_a_late_large_key(60.0, dtype)
    assert gaps(*arrays[:2]).max() > 400
    require_right(arrays, *variants)


@pytest.mark.parametrize("gap", [3.0, 10.0, 40.0])
def test_a_key_above_the_shift_that_has_all_the_weight(gap: float) -> None:
    """The error of an exponent grows with its size, and would be that of lse, which is small."""
    bias = np.full((1, 200), -gap, np.float32)
    bias[0, 150] = 0
    query, key, value = (normal(1, n, 64, seed=seed) for seed, n in enumerate((40, 200, 200)))
    require_right((query, key, value), qkv.Bias(bias))


def test_rows_beside_them_keep_their_bits() -> None:
    """A row whose first shift serves has the bits that it has where no row is computed twice."""
    query, key, value = with_a_late_large_key(60.0, "float32")
    small = gaps(query, key) < 2
    assert small[:16].sum() > 4
    assert not small[3]
    out, lse = run(query, key, value)
    query[0, ~small] = 0
    again, lse_again = run(query, key, value)
    assert out[0, small].tobytes() == again[0, small].tobytes()
    assert lse[0, small].tobytes() == lse_again[0, small].tobytes()


def test_rows_that_see_their_first_key_late() -> None:
    """Within one block of keys, rows begin in the first, the second and the third group of 32."""
    allowed = np.zeros((48, 130), bool)
    for row in range(48):
        allowed[row, 5 * (row % 24) : 5 * (row % 24) + 9] = True
    query, key, value = (normal(1, n, 64, seed=n) for n in (48, 130, 130))
    require_right((query, key, value), qkv.Mask(allowed))


def test_statistics_are_those_of_the_largest_score() -> None:
    arrays = with_a_late_large_key(2.0, "float32")
    found = qkv.inspect(*arrays, backend="cpu")
    expected = truth(*arrays, ()).weights[0]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = -np.where(expected > 0, expected * np.log(expected), 0).sum(axis=-1)
    np.testing.assert_allclose(found.max_weight[0], expected.max(axis=-1), rtol=3e-6)
    np.testing.assert_allclose(found.entropy[0], entropy, atol=3e-6)


@pytest.mark.parametrize("head_dim", [24, 80])
def test_bits_do_not_depend_on_what_one_task_holds(head_dim: int) -> None:
    """Each number of threads has tasks of another size, and so has a call of one head."""
    query, key, value = (normal(4, 600, head_dim, seed=n) for n in range(3))
    found, sizes = [], set()
    try:
        for threads in (1, 2, 5):
            qkv.set_num_threads(threads)
            found.append(run(query, key, value, qkv.Causal()))
            shape = ForwardPass(check(query, key, value, (qkv.Causal(),))).shape
            sizes.add(shape.q_blocks_per_task)
    finally:
        qkv.set_num_threads(None)
    alone = run(query[2:3], key[2:3], value[2:3], qkv.Causal())
    assert len(sizes) > 1
    for out, lse in found:
        assert out.tobytes() == found[0][0].tobytes()
        assert lse.tobytes() == found[0][1].tobytes()
        assert out[2].tobytes() == alone[0].tobytes()


def test_one_value_that_cannot_be_split_changes_no_bit_elsewhere() -> None:
    """Its block of keys is computed in another order; other elements of the output say whether
    anything else changed."""
    query, key, value = (normal(1, 300, 64, seed=n) for n in range(3))
    before, lse = run(query, key, value)
    value[0, 200, 7] = 2.0**61
    after, lse_after = run(query, key, value)
    others = np.arange(64) != 7
    assert after[..., others].tobytes() == before[..., others].tobytes()
    assert lse_after.tobytes() == lse.tobytes()
