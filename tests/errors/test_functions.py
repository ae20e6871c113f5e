"""Functions of scores and pairs as FlexAttention has them: the error has what to write here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

import qkv
from qkv.errors import ArgumentError, KeywordError

X = np.random.default_rng(0).normal(size=(2, 6, 8))
ROWS, KEYS = np.indices((6, 6))


def near(batch: Any, head: Any, q_idx: Any, kv_idx: Any) -> Any:
    return abs(q_idx - kv_idx) < 3


RIGHT = qkv.attention(X, X, X, abs(ROWS - KEYS) < 3)
BLOCK_MASK = create_block_mask(near, None, None, 6, 6, device="cpu")


def refused(call: Any, kind: type[qkv.QkvError] = ArgumentError) -> qkv.QkvError:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def test_a_mask_mod_and_a_score_mod_are_told_apart() -> None:
    error = refused(lambda: qkv.attention(X, X, X, near))
    assert error.action == "Pass qkv.Mask(near)."
    np.testing.assert_array_equal(qkv.attention(X, X, X, qkv.Mask(near)), RIGHT)
    error = refused(lambda: qkv.attention(X, X, X, lambda s, b, h, q, k: s))
    assert error.action == "Pass qkv.ScoreMod(fn)."
    error = refused(lambda: qkv.attention(X, X, X, lambda *arguments: 0.0))
    assert error.action == "Pass qkv.ScoreMod(fn)."


def test_one_where_the_other_is_wanted_is_named() -> None:
    error = refused(lambda: qkv.ScoreMod(lambda b, h, q, k: q >= k))
    assert error.fact == "the score mod takes (b, h, q, k), not five arguments."
    assert error.action.startswith("Pass qkv.Mask(fn)")
    error = refused(lambda: qkv.Mask(lambda s, b, h, q, k: q >= k))
    assert error.fact == "the mask takes (s, b, h, q, k), not four arguments."
    assert error.action.startswith("Pass qkv.ScoreMod(fn)")
    error = refused(lambda: qkv.Mask(lambda q, k: q >= k))
    assert error.fact == "the mask takes (q, k), not four arguments."
    assert error.action.startswith("Write fn(batch, head, q_pos, kv_pos)")


def test_keywords_of_flex_attention() -> None:
    error = refused(lambda: qkv.attention(X, X, X, mask_mod=near), KeywordError)
    assert error.action == "Write qkv.attention(q, k, v, qkv.Mask(mask_mod))."
    error = refused(lambda: qkv.attention(X, X, X, block_mask=BLOCK_MASK), KeywordError)
    assert error.action == "Write qkv.attention(q, k, v, qkv.Mask(block_mask.mask_mod))."


@pytest.mark.parametrize("x", [X, torch.from_numpy(X)], ids=["numpy", "torch"])
@pytest.mark.parametrize("wrapped", [lambda mask: mask, qkv.Mask], ids=["bare", "Mask"])
def test_a_block_mask_has_a_mask_mod(x: Any, wrapped: Any) -> None:
    error = refused(lambda: qkv.attention(x, x, x, wrapped(BLOCK_MASK)))
    assert "BlockMask" in error.fact
    assert error.action == "Pass qkv.Mask(block_mask.mask_mod)."
    found = qkv.attention(x, x, x, qkv.Mask(BLOCK_MASK.mask_mod))
    np.testing.assert_array_equal(np.asarray(found), RIGHT)
