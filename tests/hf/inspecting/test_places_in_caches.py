"""Scores that compare positions, where a cache holds the tokens before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

REASON = "inspecting models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import VOCABULARY, InDouble, attending, model_of  # noqa: E402

import qkv.hf  # noqa: E402

qkv.hf.enable()

IDS = torch.randint(3, VOCABULARY, (2, 14), generator=torch.Generator().manual_seed(2))
BEFORE = 10
FIRST = (0, 7)
REAL = torch.arange(14) >= torch.tensor(FIRST)[:, None]

CACHES = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=20),
    "qkv": qkv.hf.Cache,
}


def inspected(model: Any, cache: Any, mask: Any) -> Any:
    """The record of the last tokens, whose keys come after those of a cache."""
    with attending(model, "qkv"), torch.no_grad():
        model(input_ids=IDS[:, :BEFORE], attention_mask=REAL[:, :BEFORE], cache=cache)
        with InDouble(), qkv.hf.inspect(model) as record:
            model(input_ids=IDS[:, BEFORE:], attention_mask=mask, cache=cache)
    return record


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("family", ["mistral", "gpt-oss"])
def test_caches_of_windows_that_have_dropped_keys(family: str, cache: str) -> None:
    """The oldest key that is left is not the first token, and padding is still known."""
    model = model_of(family)
    with attending(model, "eager"), torch.no_grad():
        eager = model(input_ids=IDS, attention_mask=REAL, output_attentions=True).attentions
    record = inspected(model, CACHES[cache](model.config), REAL)
    for layer, theirs in zip(record, eager, strict=True):
        weights, rows = theirs.numpy()[:, :, BEFORE:], layer.rows
        learned = 1 - weights.sum(axis=-1)
        away = abs(np.arange(BEFORE, 14)[:, None] - np.arange(14))
        first = np.stack([weights[b, :, :, first] for b, first in enumerate(FIRST)])
        np.testing.assert_allclose(rows["sink"], first + learned, atol=1e-9)
        np.testing.assert_allclose(rows["distance"], (weights * away).sum(axis=-1), atol=1e-9)
        for name, offset in (("previous", BEFORE - 1), ("own", BEFORE)):
            expected = weights.diagonal(offset, 2, 3)
            np.testing.assert_allclose(rows[name], expected, atol=1e-9)


@pytest.mark.parametrize("numbers", [False, True])
def test_a_mask_of_four_dimensions_does_not_say_where_new_tokens_stand(numbers: bool) -> None:
    mask = torch.ones(14, 14, dtype=torch.bool).tril()[BEFORE:] & REAL[:, None, None]
    lowest = torch.tensor(torch.finfo(torch.float64).min, dtype=torch.float64)
    given = torch.where(mask, 0 * lowest, lowest) if numbers else mask
    model = model_of("llama")
    told, untold = (
        inspected(model, transformers.DynamicCache(config=model.config), each)
        for each in (REAL, given)
    )
    for known, unknown in zip(told, untold, strict=True):
        np.testing.assert_allclose(unknown.rows["entropy"], known.rows["entropy"], atol=1e-9)
        for name in ("previous", "own", "distance", "duplicate", "induction"):
            assert np.isnan(unknown.rows[name]).all(), name


@pytest.mark.parametrize("page_size", [None, 4])
def test_the_first_tokens_of_a_cache_are_its_first_keys(page_size: int | None) -> None:
    """A mask of four dimensions needs to say no more, and pages may have room for more tokens."""
    mask = torch.ones(14, 14, dtype=torch.bool).tril() & REAL[:, None, None]
    model, records = model_of("llama"), []
    for cache, given in ((None, REAL), (qkv.hf.Cache(model.config, page_size=page_size), mask)):
        with attending(model, "qkv"), torch.no_grad(), qkv.hf.inspect(model) as record:
            model(input_ids=IDS, attention_mask=given, cache=cache)
        records.append(record)
    for told, found in zip(*records, strict=True):
        real = REAL.numpy()[:, None]
        for name in ("previous", "own", "distance"):
            expected = np.where(real, told.rows[name], 0)
            np.testing.assert_allclose(np.where(real, found.rows[name], 0), expected, atol=1e-9)
