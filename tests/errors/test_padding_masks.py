"""A mask of (batch, kv_len), as tokenizers give it: the error has the call to write."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import qkv

X = np.random.default_rng(0).normal(size=(2, 4, 6, 8))


def raised(*arguments: Any) -> qkv.QkvError:
    with pytest.raises((qkv.ShapeError, qkv.DTypeError)) as caught:
        qkv.attention(*arguments)
    return caught.value


@pytest.mark.parametrize("dtype", [np.int64, bool])
def test_a_padding_mask_of_two_dimensions(dtype) -> None:
    """`attention_mask` of Hugging Face, (batch, kv_len): the message means it."""
    given = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]], dtype)
    x = np.random.default_rng(0).normal(size=(2, 4, 5, 8))
    keys = np.random.default_rng(1).normal(size=(2, 4, 6, 8))
    name = "array" if dtype is np.int64 else "mask"
    error = raised(x, keys, keys, given)
    assert ("int64" if dtype is np.int64 else "(2, 6)") in error.fact
    as_mask = "qkv.Mask(array.astype(bool)[:, None, None, :])"
    written = as_mask if dtype is np.int64 else "mask[:, None, None, :]"
    assert written in error.action
    assert f"qkv.KeyLengths({name}.sum(-1))" in error.action
    names = {"qkv": qkv, "array": given, "mask": given}
    masked = qkv.attention(x, keys, keys, eval(written, names), backend="reference")
    alone = qkv.attention(x[1], keys[1, :, :3], keys[1, :, :3], backend="reference")
    np.testing.assert_allclose(masked[1], alone, rtol=0, atol=1e-12)
    assert (
        masked == qkv.attention(x, keys, keys, qkv.KeyLengths([6, 3]), backend="reference")
    ).all()


def test_a_padding_mask_with_padding_on_the_left() -> None:
    """Lengths would not say what it means."""
    given = np.array([[1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1]], bool)
    error = raised(X[:, :, :5], X, X, given)
    assert "mask[:, None, None, :]" in error.action
    assert "KeyLengths" not in error.action


def test_tensors() -> None:
    torch = pytest.importorskip("torch", reason="the words of torch")
    x, given = torch.from_numpy(X), torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0]])
    error = raised(x[:, :, :5], x, x, given)
    assert "torch.float32" not in error.fact
    assert "qkv.Mask(array.to(torch.bool)[:, None, None, :])" in error.action
    masked = qkv.attention(
        x, x, x, qkv.Mask(given.to(torch.bool)[:, None, None, :]), backend="blocked"
    )
    assert torch.equal(
        masked, qkv.attention(x, x, x, qkv.KeyLengths(given.sum(-1)), backend="blocked")
    )


def test_a_bias_for_each_batch_row() -> None:
    error = raised(X[:, :, :5], X, X, np.zeros((2, 6)))
    assert "bias[:, None, None, :]" in error.action
    assert "KeyLengths" not in error.action


def test_a_boolean_bias() -> None:
    error = raised(X, X, X, qkv.Bias(np.ones((6, 6), bool)))
    assert error.fact == "a bias has dtype bool, not a floating type."
    assert error.action.startswith("Pass qkv.Mask(array.astype(bool)) if 1 means may attend")


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_padding_mask_as_lengths(library: str) -> None:
    """Both calls of the message mean what the mask does."""
    xp = pytest.importorskip(library, reason="arrays of both libraries")
    x, mask = xp.asarray(X), xp.asarray([[True] * 6, [True] * 3 + [False] * 3])
    error = raised(x, x, x, qkv.KeyLengths(mask))
    assert "boolean mask of shape (2, 6)" in error.fact
    written = re.findall(r"qkv\.KeyLengths\(.*?\(-1\)\)|mask\[.*?\]", error.action)
    assert len(written) == 2
    expected = qkv.attention(x, x, x, qkv.KeyLengths([6, 3]), backend="reference")
    for call in written:
        variant = eval(call, {"qkv": qkv, "mask": mask})
        assert (qkv.attention(x, x, x, variant, backend="reference") == expected).all()


def test_padding_behind_packed_sequences() -> None:
    """Cumulative lengths that leave the padding out: the message says to count it."""
    x = np.random.default_rng(0).normal(size=(3, 1, 2, 10, 8))
    error = raised(*x, qkv.Segments.from_cu_seqlens([0, 4, 7]), qkv.Causal())
    assert "cumulative lengths that end at 10" in error.action
    x[:, :, :, 7:] = np.nan
    packed = qkv.attention(*x, qkv.Segments.from_cu_seqlens([0, 4, 7, 10]), qkv.Causal())
    for rows in (slice(0, 4), slice(4, 7)):
        q, k, v = x[:, 0, :, rows]
        scores = np.tril(np.exp(q @ k.mT / np.sqrt(8)))
        expected = scores @ v / scores.sum(-1, keepdims=True)
        np.testing.assert_allclose(packed[0, :, rows], expected, rtol=0, atol=1e-12)
