"""Masks and biases of the caller's over pages have a column for each token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv

RNG = np.random.default_rng(0)


def expected(query: Any, key: Any, value: Any, allowed: Any, bias: Any) -> Any:
    """Attention by its definition, sequence by sequence."""
    out = np.zeros((*query.shape[:-1], value.shape[-1]))
    for index in np.ndindex(query.shape[:-1]):
        batch, head, row = index
        scores = key[batch, head] @ query[index] / np.sqrt(query.shape[-1]) + bias[row]
        weights = np.where(allowed[row], np.exp(scores), 0.0)
        out[index] = weights / weights.sum() @ value[batch, head]
    return out


@pytest.mark.parametrize("kind", ["bare mask", "Mask", "bare bias", "Bias", "tensor"])
@pytest.mark.parametrize("dtype", [None, "int8"])
def test_over_the_tokens(kind: str, dtype: str | None) -> None:
    query = RNG.normal(size=(2, 3, 4, 8))
    key, value = RNG.normal(size=(2, 2, 3, 10, 8))
    allowed = RNG.random((4, 10)) < 0.6
    allowed[:, 0] = True
    bias = np.zeros((4, 10))
    variant: Any = allowed
    if "ias" in kind:
        allowed, bias = np.ones((4, 10), bool), RNG.normal(size=(4, 10))
        variant = bias
    if kind in ("Mask", "Bias"):
        variant = getattr(qkv, kind)(variant)
    if kind == "tensor":
        variant = pytest.importorskip("torch", reason="pip install torch").from_numpy(allowed)
    cache = qkv.cache.PagedCache(page_size=4, dtype=dtype)
    rows = cache.append(key, value)
    out = rows.attention(query, variant, q_offset="end")
    bound = 1e-12 if dtype is None else 0.1
    assert np.abs(out - expected(query, key, value, allowed, bias)).max() < bound


ROWS, COLUMNS = np.arange(10)[:, None], np.arange(10)
ARRAY = (np.random.default_rng(1).random((10, 10)) < 0.5) | np.eye(10, dtype=bool)
IDS = np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
BLOCKS = (np.random.default_rng(2).random((5, 5)) < 0.4) | np.eye(5, dtype=bool)
IS_SAME = IDS[:, None] == IDS
JOINED: dict[str, tuple[Any, Any]] = {
    "and": (qkv.Causal() & qkv.Mask(ARRAY), (COLUMNS <= ROWS) & ARRAY),
    "or": (qkv.Causal() | ARRAY, (COLUMNS <= ROWS) | ARRAY),
    "not": (~qkv.Mask(~ARRAY), ARRAY),
    "segments": (qkv.Segments(IDS), IS_SAME),
    "segments of keys": (qkv.Segments(IDS, IDS[::-1]), IDS[:, None] == IDS[::-1]),
    "segments of a batch": (qkv.Segments(np.stack([IDS, IDS])), IS_SAME),
    "one of two": (qkv.Segments(IDS) | ARRAY, IS_SAME | ARRAY),
    "blocks": (qkv.BlockSparse(BLOCKS, 2, 2), BLOCKS[ROWS // 2, COLUMNS // 2]),
}


@pytest.mark.parametrize("name", JOINED)
def test_variants_with_arrays_over_the_tokens(name: str) -> None:
    query = RNG.normal(size=(2, 3, 10, 8))
    key, value = RNG.normal(size=(2, 2, 3, 10, 8))
    variant, allowed = JOINED[name]
    rows = qkv.cache.PagedCache(page_size=4).append(key, value)
    out = rows.attention(query, variant)
    assert np.abs(out - expected(query, key, value, allowed, np.zeros((10, 10)))).max() < 1e-12


@pytest.mark.parametrize("kind", ["mask", "bias"])
def test_one_dimension_over_the_tokens(kind: str) -> None:
    query = RNG.normal(size=(2, 3, 10, 8))
    key, value = RNG.normal(size=(2, 2, 3, 10, 8))
    allowed, bias = np.ones((10, 10), bool), np.zeros((10, 10))
    variant = ARRAY[0] if kind == "mask" else RNG.normal(size=10)
    if kind == "mask":
        allowed = allowed & variant
    else:
        bias = bias + variant
    rows = qkv.cache.PagedCache(page_size=4).append(key, value)
    out = rows.attention(query, variant)
    assert np.abs(out - expected(query, key, value, allowed, bias)).max() < 1e-12


def test_random_blocks_are_drawn_among_tokens() -> None:
    """Rows of pages that hold no token are no blocks to draw from."""
    query = RNG.normal(size=(1, 2, 10, 8))
    key, value = RNG.normal(size=(2, 1, 2, 10, 8))
    blocks = qkv.RandomBlocks(2, 2)
    out = qkv.cache.PagedCache(page_size=8).append(key, value).attention(query, blocks)
    of_tokens = qkv.attention(query, key, value, qkv.RandomBlocks(2, 2, length=10))
    assert np.abs(out - of_tokens).max() < 1e-12


def test_over_all_rows_it_still_works() -> None:
    query, key = RNG.normal(size=(2, 1, 1, 6, 8))
    rows = qkv.cache.PagedCache(page_size=4).append(key, key)
    allowed = np.tril(np.ones((6, 8), bool))
    full = expected(query, key, key, allowed[:, :6], np.zeros((6, 6)))
    assert np.abs(rows.attention(query, allowed) - full).max() < 1e-12


def test_of_another_length_it_is_refused() -> None:
    query, key = RNG.normal(size=(2, 1, 1, 6, 8))
    rows = qkv.cache.PagedCache(page_size=4).append(key, key)
    with pytest.raises(qkv.ShapeError, match="does not broadcast"):
        rows.attention(query, np.ones((6, 5), bool))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_by_name() -> None:
    torch = pytest.importorskip("torch", reason="pip install torch")
    query, key = RNG.normal(size=(2, 1, 1, 6, 8))
    rows = qkv.cache.PagedCache(page_size=4).append(key, key)
    nested = torch.nested.nested_tensor([torch.ones(6, 6)])
    with pytest.raises(qkv.DTypeError, match="nested tensor"):
        rows.attention(query, nested)


def test_of_no_sequences_it_is_refused() -> None:
    none = np.ones((0, 2, 3, 8), np.float32)
    rows = qkv.cache.PagedCache(page_size=4).append(none, none)
    with pytest.raises(qkv.ShapeError, match="does not broadcast"):
        rows.attention(none, np.ones((3, 3), bool))


@pytest.mark.parametrize("kind", [qkv.Mask, qkv.Bias, lambda array: array])
def test_integers_are_refused_by_their_own_shape(kind: Any) -> None:
    key = RNG.normal(size=(1, 1, 6, 8))
    rows = qkv.cache.PagedCache(page_size=4).append(key, key)
    with pytest.raises(qkv.QkvError) as caught:
        rows.attention(key, kind(np.ones((6, 6), np.int64)))
    assert "int64" in str(caught.value)
    assert "8" not in str(caught.value).replace("int64", "")
