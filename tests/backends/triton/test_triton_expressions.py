"""Score mods and masks in kernels of Triton, beside the same in NumPy."""

import numpy as np
import pytest

import qkv
from devices import DEVICE

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

BATCH, HEADS, LENGTH = 2, 6, 9


def operands():
    rng = np.random.default_rng(2)
    return [rng.normal(size=(BATCH, HEADS, LENGTH, 8)) for _ in range(3)]


def written_out(mod, allowed=True):
    """Output in float64."""
    query, key, value = operands()
    scores = np.einsum("bhid,bhjd->bhij", query, key) / 8**0.5
    with np.errstate(divide="ignore"):
        scores = mod(scores, *np.ogrid[:BATCH, :HEADS, :LENGTH, :LENGTH])
    scores = np.where(allowed, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True) @ value


def by_kernels(*variants):
    """Output, after the gradients were computed too."""
    tensors = [torch.tensor(a, dtype=torch.float32, device=DEVICE) for a in operands()]
    tensors = [t.requires_grad_() for t in tensors]
    out = qkv.attention(*tensors, *variants, backend="triton")
    gradients = torch.autograd.grad(out.sum(), tensors)
    assert all(bool(g.isfinite().all()) for g in gradients)
    return out.detach().cpu().numpy()


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: s + (h * 2**31 + b * 2**33) % 7,
        lambda s, b, h, q, k: s + np.where(k > q, 3, 5) * 2**30 % 11,
        lambda s, b, h, q, k: s + np.where(k > q, 2**30, 7) * 8 % 11,
        lambda s, b, h, q, k: s + ((k > q) & (h > 2)) * 2**33 % 11,
        lambda s, b, h, q, k: s - (q - k) * 2**35 // 3 % 7,
        lambda s, b, h, q, k: s + abs(h - 4) * 2**31 % 13,
    ],
)
def test_whole_numbers_have_64_bits(mod):
    np.testing.assert_allclose(by_kernels(qkv.ScoreMod(mod)), written_out(mod), atol=3e-6)


@pytest.mark.parametrize(
    "mod",
    [
        lambda s, b, h, q, k: np.where((h * 0.5 > 1) & (k > q), s, 2 * s),
        lambda s, b, h, q, k: np.where((b * 1.0 == 1) | (k > q), s, 2 * s),
        lambda s, b, h, q, k: np.where(1 / -(s * 0) > 0, s, 2 * s),
    ],
    ids=["head", "batch", "negative zero"],
)
def test_conditions_on_floating_numbers(mod):
    np.testing.assert_allclose(by_kernels(qkv.ScoreMod(mod)), written_out(mod), atol=3e-6)


@pytest.mark.parametrize("shape", [(1, 1), (HEADS, 1, 1), (BATCH, 1, 1, 1)])
def test_a_bias_without_rows_beside_a_mask(shape):
    bias = np.random.default_rng(3).normal(size=shape).astype(np.float32)
    mask = np.tri(LENGTH, dtype=bool)
    found = by_kernels(qkv.Mask(mask), qkv.Bias(bias))
    np.testing.assert_allclose(found, written_out(lambda s, *_: s + bias, mask), atol=3e-6)


def test_an_entry_of_a_table_may_lie_far_from_the_first():
    tables = pytest.importorskip("qkv.backends.torch.triton.tables")
    memory = torch.empty(2**31 + 1, dtype=torch.bool)
    memory[0], memory[-1] = False, True
    column = memory.as_strided((2, 1), (2**31, 1))
    found = tables.as_read(column.numpy(), column, "int32", torch.device("cpu"))
    assert found.stride(0) < 2**31
    assert found.flatten().tolist() == [False, True]
