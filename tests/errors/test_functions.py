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


class Documents:
    """A variant as users write it who forget that arrays become tables."""

    def __init__(self, document: Any) -> None:
        self.document = document

    def lower(self, b: Any) -> None:
        b.mask(self.document[b.q_index] == self.document[b.kv_index])


@pytest.mark.parametrize("document", [np.arange(6) // 4, torch.arange(6) // 4], ids=type)
def test_an_array_that_lower_does_not_make_a_table(document: Any) -> None:
    error = refused(lambda: qkv.attention(X, X, X, Documents(document)))
    assert error.fact == "Documents.lower indexes an array with an expression."
    assert "b.table(" in error.action


def test_an_index_error_of_lower_is_left_as_it_is() -> None:
    class Own:
        def lower(self, b: Any) -> None:
            (1, 2)[3]

    with pytest.raises(IndexError, match="tuple index"):
        qkv.attention(X, X, X, Own())


HEADS = np.array([0.5, 1.5])
TENSOR = torch.tensor([0.5, 1.5])
ONE = torch.nn.Parameter(torch.tensor([[0.3]]))
LIST = [0.5, 1.5]


@pytest.mark.parametrize(
    "function",
    [
        lambda s, b, h, q, k: s * TENSOR.exp()[h],
        lambda s, b, h, q, k: s * (TENSOR * 2)[h],
        lambda s, b, h, q, k: s * (2 - HEADS)[h],
        lambda s, b, h, q, k: s * (-HEADS)[h],
        # It did not end: NumPy took the table for a sequence of sequences.
        lambda s, b, h, q, k: s * np.exp(HEADS)[h],
        lambda s, b, h, q, k: s * np.sum(HEADS),
        lambda s, b, h, q, k: s * HEADS,
        lambda s, b, h, q, k: torch.where(q >= k, s, TENSOR),
        lambda s, b, h, q, k: s * (HEADS << 1)[h],
        lambda s, b, h, q, k: s * (1 ^ HEADS)[h],
        lambda s, b, h, q, k: s * (+HEADS)[h],
        lambda s, b, h, q, k: s * divmod(HEADS, 2)[0][h],
        lambda s, b, h, q, k: s * round(HEADS)[h],
        lambda s, b, h, q, k: s * float(HEADS),
        lambda s, b, h, q, k: s * [1, 2][HEADS],
        lambda s, b, h, q, k: s * 2 if HEADS else s,
    ],
)
def test_an_array_that_a_score_mod_uses_whole(function: Any) -> None:
    error = refused(lambda: qkv.attention(X, X, X, qkv.ScoreMod(function)))
    assert error.fact.startswith("an array of shape (2,) is used whole in a function")
    assert "w[head] * 2" in error.action


def test_an_array_of_one_entry_is_read_at_it() -> None:
    x = torch.from_numpy(X)
    error = refused(lambda: qkv.attention(x, x, x, qkv.ScoreMod(lambda s, b, h, q, k: s * ONE)))
    assert error.action == "Write w[0, 0] for its only entry."
    found = qkv.attention(x, x, x, qkv.ScoreMod(lambda s, b, h, q, k: s * ONE[0, 0]))
    right = qkv.attention(x, x, x, scale=ONE.item() * 8**-0.5)
    torch.testing.assert_close(found, right)


def test_an_array_of_one_false_entry_is_not_true() -> None:
    off = np.array([False])
    error = refused(
        lambda: qkv.attention(X, X, X, qkv.ScoreMod(lambda s, b, h, q, k: 9 * s if off else s))
    )
    assert error.action == "Write w[0] for its only entry."


def test_an_index_before_the_first_entry_is_named_as_it_is() -> None:
    error = refused(
        lambda: qkv.attention(X, X, X, qkv.ScoreMod(lambda s, b, h, q, k: s * HEADS[-3])),
        qkv.ShapeError,
    )
    assert error.fact == "index 0 of table t0 may reach -3 to -3; it has 2 entries there."


def test_an_array_is_not_written_to() -> None:
    def writes(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        HEADS[0] = 1.0
        return s * HEADS[h]

    error = refused(lambda: qkv.attention(X, X, X, qkv.ScoreMod(writes)))
    assert "does not support item assignment" in str(error)


def test_a_list_is_to_be_an_array() -> None:
    error = refused(lambda: qkv.attention(X, X, X, qkv.ScoreMod(lambda s, b, h, q, k: s * LIST[h])))
    assert "index of a list" in error.fact
    assert "w = np.array(values)" in error.action


def test_functions_of_a_mask_read_arrays_of_their_own() -> None:
    """Functions without a closure were once left alone, and their array was not found."""
    found = qkv.attention(X, X, X, qkv.Mask(lambda b, h, q, k: near(b, h, q, k) & odd(q + k)))
    odd_pair = (ROWS + KEYS) % 2 == 1
    np.testing.assert_array_equal(found, qkv.attention(X, X, X, (abs(ROWS - KEYS) < 3) & odd_pair))


ODD = np.arange(11) % 2 == 1


def odd(number: Any) -> Any:
    return ODD[number]


def test_a_function_of_a_mask_may_call_itself() -> None:
    limits = np.array([2, 3, 4])

    def below(pos: Any, limit: int = 2) -> Any:
        return pos < limits[limit] if limit == 0 else (pos < limits[limit]) & below(pos, limit - 1)

    found = qkv.attention(X, X, X, qkv.Mask(lambda b, h, q, k: below(k)))
    np.testing.assert_array_equal(found, qkv.attention(X, X, X, KEYS < 2))


@pytest.mark.parametrize("as_array", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
@pytest.mark.parametrize("kind", ["score mod", "mask"])
def test_a_variable_that_has_no_value_yet_is_named(kind: str, as_array: Any) -> None:
    x = as_array(X)
    if kind == "mask":
        variant: Any = qkv.Mask(lambda b, h, i, j: i - j < late)
    else:
        variant = qkv.ScoreMod(lambda s, b, h, i, j: s * late)
    error = refused(lambda: qkv.attention(x, x, x, variant))
    assert "it reads  late" in str(error)
    late = 3
    qkv.attention(x, x, x, variant)
