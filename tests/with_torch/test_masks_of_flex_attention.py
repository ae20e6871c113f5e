"""Masks that FlexAttention's own functions make, against the mask computed by torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks
from torch.testing import assert_close

import qkv

GENERATOR = torch.Generator().manual_seed(0)
QUERY, KEY, VALUE = (
    torch.randn(2, 2, 9, 8, generator=GENERATOR, dtype=torch.float64) for _ in range(3)
)
DOCUMENT = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2, 2])


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def same_document(b: Any, h: Any, i: Any, j: Any) -> Any:
    return DOCUMENT[i] == DOCUMENT[j]


def of_a_head(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (h == 1) & (j < 2 + b)


MASKS = {
    "and": and_masks(causal, same_document),
    "or": or_masks(and_masks(causal, same_document), of_a_head),
    "noop": noop_mask,
    "and of nothing": and_masks(),
    "or of nothing": or_masks(),
}


def by_hand(mask_mod: Any) -> torch.Tensor:
    allowed = create_mask(mask_mod, 2, 2, 9, 9, device="cpu")
    scores = (QUERY @ KEY.mT * 8**-0.5).masked_fill(~allowed, -torch.inf)
    # A row that may attend to nothing is 0.
    return scores.softmax(-1).nan_to_num() @ VALUE


@pytest.mark.parametrize("name", MASKS)
def test_masks_that_flex_attention_joins(name: str) -> None:
    found = qkv.attention(QUERY, KEY, VALUE, qkv.Mask(MASKS[name]))
    assert_close(found, by_hand(MASKS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.one_in(2)
def test_masks_that_flex_attention_joins_in_one_graph(name: str) -> None:
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q: qkv.attention(q, KEY, VALUE, qkv.Mask(MASKS[name])),
        backend="eager",
        fullgraph=True,
    )
    assert_close(compiled(QUERY), by_hand(MASKS[name]))


def test_arrays_of_more_than_one_entry_are_not_made_in_a_mask() -> None:
    mask = qkv.Mask(lambda b, h, i, j: b.new_ones((2,), dtype=torch.bool))
    with pytest.raises(qkv.ArgumentError, match=r"shape \(2,\) is made inside"):
        qkv.attention(QUERY, KEY, VALUE, mask)


@pytest.mark.parametrize("mode", ["floor", "trunc", None])
@pytest.mark.parametrize("divisor", [4, 1.5])
def test_division_rounds_as_torch_does(mode: Any, divisor: float) -> None:
    def mod(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + torch.div(i - j, divisor, rounding_mode=mode) + torch.div(j, 2)

    found = qkv.attention(QUERY, KEY, VALUE, qkv.ScoreMod(mod))
    heads = torch.arange(2)[:, None, None]
    scores = mod(QUERY @ KEY.mT * 8**-0.5, 0, heads, torch.arange(9)[:, None], torch.arange(9))
    assert_close(found, scores.double().softmax(-1) @ VALUE, rtol=1e-6, atol=1e-6)


def test_a_keyword_that_is_not_taken_is_named() -> None:
    mod = qkv.ScoreMod(lambda s, b, h, i, j: torch.div(s, 2, rounding_mode="up"))
    with pytest.raises(qkv.ArgumentError, match="rounding_mode='up' is not known"):
        qkv.attention(QUERY, KEY, VALUE, mod)
    mod = qkv.ScoreMod(lambda s, b, h, i, j: torch.sub(s, j, alpha=2))
    with pytest.raises(qkv.ArgumentError, match="sub takes no alpha"):
        qkv.attention(QUERY, KEY, VALUE, mod)
