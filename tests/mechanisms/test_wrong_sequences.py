"""Sequences that do not fit one another: errors speak of what a caller of mechanisms passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import qkv
from qkv.errors import ArgumentError, ShapeError
from qkv.mechanisms import (
    Additive,
    ALiBi,
    BigBird,
    Causal,
    Cross,
    DotProduct,
    Flash,
    Hard,
    Linear,
    Linformer,
    MultiHead,
    MultiHeadLatent,
    Performer,
    RelativeBias,
    Rotary,
    ScaledDotProduct,
    SlidingWindow,
    Soft,
    Strided,
)

LATENT: dict[str, Any] = {
    "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4,
}  # fmt: skip
X = np.random.default_rng(0).normal(size=(5, 8))


@pytest.mark.parametrize("kv_len", [0, 3, 7])
@pytest.mark.parametrize(
    "layer",
    [
        Causal(8, 2),
        Cross(8, 2, rope=qkv.RoPE()),
        MultiHead(8, 2, alibi=True),
        MultiHeadLatent(8, 2, causal=False, **LATENT),
        RelativeBias(8, 2),
        Rotary(8, 2),
        ALiBi(8, 2),
        SlidingWindow(8, 2, left=1),
        Strided(8, 2, stride=2),
        BigBird(8, 2, block=2),
        BigBird(8, 2, block=2, random_blocks=np.zeros((2, 3, 1), int)),
        Flash(8, 2, causal=True),
        Linear(8, 2, causal=True),
        Performer(8, 2, causal=True),
    ],
    ids=lambda layer: layer.name,
)
def test_positions_need_as_many_keys_as_queries(layer: Any, kv_len: int) -> None:
    key = np.resize(X, (kv_len, 8))
    for ask in (layer, layer.token_mixing, lambda x, key: layer.explain(x, key=key)):
        with pytest.raises(ShapeError, match=f"{layer.name} compares") as caught:
            ask(X, key)
        assert "Pass q_offset" not in str(caught.value)
        assert "block mask" not in str(caught.value)


def test_latent_rows_make_keys_and_values_alike() -> None:
    layer = MultiHeadLatent(8, 2, **LATENT)
    np.testing.assert_array_equal(layer(X, X, X), layer(X))
    for ask in (layer, layer.token_mixing):
        with pytest.raises(ArgumentError, match="another value is given"):
            ask(X, X, X + 1)
    with pytest.raises(ArgumentError, match="another value is given"):
        layer.explain(X, value=X + 1)


@pytest.mark.parametrize(
    ("layer", "given", "message"),
    [
        (MultiHead(8), ((5, 7),), "reads x as rows of 8"),
        (Cross(8, kv_dim=6), ((5, 8), (3, 8)), "reads key as rows of 6"),
        (MultiHead(8), ((5, 8), (3, 8), (3, 7)), "reads value as rows of 8"),
        (Linear(8), ((5, 7),), "reads x as rows of 8"),
        (Linformer(8, max_len=5), ((5, 7),), "reads x as rows of 8"),
        (Additive(8, kv_dim=6), ((5, 8), (3, 8)), "reads key as rows of 6"),
        (MultiHeadLatent(8, 2, causal=False, **LATENT), ((5, 8), (5, 6)), "reads key as rows of 8"),
        (DotProduct(4), ((5, 8),), "reads x as rows of 4"),
        (ScaledDotProduct(4), ((5, 8),), "reads x as rows of 4"),
        (Soft(4), ((5, 4), (5, 8)), "reads key as rows of 4"),
        (Hard(4), ((5, 4), (5, 8)), "reads key as rows of 4"),
    ],
    ids=lambda case: getattr(case, "name", None),
)
def test_rows_of_another_width_are_those_of_the_argument(
    layer: Any, given: tuple[tuple[int, ...], ...], message: str
) -> None:
    arrays = [np.ones(shape) for shape in given]
    name = message.split()[1]
    for ask in (layer, layer.token_mixing):
        with pytest.raises(ShapeError, match=message) as caught:
            ask(*arrays)
        assert f"Pass {name} as" in str(caught.value)


@pytest.mark.parametrize("convert", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
@pytest.mark.parametrize(
    "layer",
    [Additive(4), Hard(4), Hard(4, k=2), Linear(4), Performer(4), Linformer(4, max_len=9)],
    ids=lambda layer: layer.name,
)
def test_batches_that_do_not_broadcast_are_refused(layer: Any, convert: Any) -> None:
    x, key = np.ones((2, 2, 5, 4)), np.ones((3, 2, 7, 4))
    for ask in (layer, layer.token_mixing):
        with pytest.raises(ShapeError, match="do not broadcast"):
            ask(convert(x), convert(key))


@pytest.mark.parametrize("layer", [DotProduct(4), ScaledDotProduct(4), Soft(4, 2.0), Hard(4, 2)])
def test_heads_that_are_given_share_key_heads_in_groups(layer: Any) -> None:
    rng = np.random.default_rng(0)
    query, (key, value) = rng.normal(size=(3, 4, 5, 4)), rng.normal(size=(2, 3, 2, 7, 4))
    whole, mixing = layer(query, key, value), layer.token_mixing(query, key, value)
    for b, h in np.ndindex(3, 4):
        alone = query[b, h], key[b, h // 2], value[b, h // 2]
        np.testing.assert_allclose(whole[b, h], layer(*alone), rtol=0, atol=1e-13)
        np.testing.assert_allclose(mixing[b, h], layer.token_mixing(*alone), rtol=0, atol=1e-13)
    for ask in (layer, layer.token_mixing):
        with pytest.raises(ShapeError, match="not a multiple of num_kv_heads=3"):
            ask(query, np.ones((3, 3, 7, 4)))


def test_an_explanation_names_the_array_that_does_not_fit() -> None:
    layer = MultiHead(8)
    with pytest.raises(
        ArgumentError, match=r"kv_tokens=\['a'\] are not names of the 3 rows of key"
    ):
        layer.explain(X, key=X[:3], kv_tokens=["a"])
    with pytest.raises(ShapeError, match=r"key has shape \(1, 5, 8\)"):
        layer.explain(X, key=X[None])
    with pytest.raises(ShapeError, match=r"value has shape \(1, 5, 8\)"):
        next(Flash(8).tiles(X, X, X[None]))
