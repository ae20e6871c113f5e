"""Dropout, large scores and threads in kernels of Triton."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import qkv
from devices import DEVICE
from qkv.testing import cases, check_case

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**40 + 1, 2**63 + 11, 2**64 - 1])
def test_dropout_has_the_mask_of_other_backends(seed):
    query = torch.randn(2, 3, 5, 8, generator=torch.Generator().manual_seed(0))
    unit = torch.eye(70).expand(2, 3, 70, 70)  # The output is the weights.
    keys = torch.zeros(2, 3, 70, 8)
    found = qkv.attention(
        query.to(DEVICE), keys.to(DEVICE), unit.to(DEVICE), qkv.Dropout(0.3, seed),
        backend="triton",
    )  # fmt: skip
    expected = qkv.attention(*(t.numpy() for t in (query, keys, unit)), qkv.Dropout(0.3, seed))
    np.testing.assert_array_equal(found.cpu().numpy() == 0, expected == 0)


def test_a_factor_of_dropout_may_be_beyond_float16():
    query, value = torch.zeros(2, 1, 600, 8).half()
    dropout = qkv.Dropout(0.99999, 5)
    value = value + 1
    found = qkv.attention(
        query.to(DEVICE), query.to(DEVICE), value.to(DEVICE), dropout, backend="triton"
    )
    kept = qkv.attention(query.double().numpy(), query.double().numpy(), value.double().numpy(),
                         dropout)  # fmt: skip
    assert (kept > 0).any()
    np.testing.assert_allclose(found.cpu().double().numpy(), kept, rtol=1e-3)


@pytest.mark.parametrize("name", ["scores of some 300", "scores of some 2000"])
def test_the_backward_pass_has_the_scores_of_the_forward_pass(name):
    # One weight of these rows is near 1, and a gradient of scores is a small difference.
    (case,) = [case for case in cases() if case.name == name]
    assert check_case("triton", case, "float32", what="gradients")


def test_threads_call_at_once():
    def output(seed):
        generator = torch.Generator().manual_seed(seed)
        query, key, value = torch.randn(3, 2, 40, 8, generator=generator).to(DEVICE)
        mask = qkv.SlidingWindow(9, 3)  # torch's own kernels have none.
        return qkv.attention(query, key, value, mask, backend="triton").cpu()

    alone = [output(seed) for seed in range(3)]
    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(output, [0, 1, 2] * 2))
    for n, found in enumerate(together):
        assert torch.equal(found, alone[n % 3])
