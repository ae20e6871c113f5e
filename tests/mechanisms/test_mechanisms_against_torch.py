"""Mechanisms beside torch's own modules and beside loops from the papers, in float64."""

from __future__ import annotations

from math import exp, sqrt, tanh
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import qkv
from qkv.errors import ArgumentError, UnsupportedError
from qkv.mechanisms import (
    MECHANISMS,
    Additive,
    Cross,
    Differential,
    Flash,
    GroupedQuery,
    Hard,
    KVCacheDecoding,
    Linformer,
    MultiHead,
    Self,
    SlidingWindow,
    Soft,
    Strided,
)
from qkv.mechanisms.base.projected import ProjectedAttention

TOLERANCE = 1e-10
N, WIDTH, HEADS = 9, 12, 3


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def close(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


def of_torch(bias: bool = True, **more: Any) -> torch.nn.MultiheadAttention:
    module = torch.nn.MultiheadAttention(WIDTH, HEADS, bias=bias, batch_first=True, **more)
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter)
    return module.double()


def distances() -> Tensor:
    return torch.arange(N)[:, None] - torch.arange(N)


I_MINUS_J = distances()
PATTERNS: dict[str, tuple[type[ProjectedAttention], dict[str, Any], Tensor | None]] = {
    "full": (MultiHead, {}, None),
    "flash": (Flash, {}, None),
    "self": (Self, {}, None),
    "causal": (MultiHead, {"causal": True}, I_MINUS_J >= 0),
    "decoding": (KVCacheDecoding, {}, I_MINUS_J >= 0),
    "window": (SlidingWindow, {"left": 2, "right": 1}, (I_MINUS_J <= 2) & (I_MINUS_J >= -1)),
    "strided": (
        Strided,
        {"stride": 3},
        (I_MINUS_J >= 0) & ((I_MINUS_J < 3) | (I_MINUS_J % 3 == 0)),
    ),
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_multi_head_attention_of_torch_with_gradients(pattern: str) -> None:
    cls, options, allowed = PATTERNS[pattern]
    module = of_torch()
    layer = cls.from_torch(module, **options)
    weights = {name: weight.requires_grad_() for name, weight in layer.weights.items()}
    x = rows(2, N, WIDTH)
    again = x.detach().clone().requires_grad_()
    mask = None if allowed is None else ~allowed
    expected, expected_weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)
    out = layer(again)
    close(out, expected)
    close(layer.token_mixing(again), expected_weights.detach())
    cotangent = torch.randn_like(out)
    (expected * cotangent).sum().backward()
    (out * cotangent).sum().backward()
    close(again.grad, x.grad)
    close(weights["out_proj.weight"].grad, module.out_proj.weight.grad)
    assert module.in_proj_weight.grad is not None
    for side, part in zip("qkv", module.in_proj_weight.grad.chunk(3), strict=True):
        close(weights[f"{side}_proj.weight"].grad, part)


def test_cross_attention_of_torch() -> None:
    module = of_torch(kdim=5, vdim=5, bias=False)
    x, context = rows(2, N, WIDTH), rows(2, 4, 5)
    for cls in (Cross, MultiHead, Flash):
        close(cls.from_torch(module)(x, context), module(x, context, context)[0])


def test_weights_that_a_module_of_torch_does_not_have_are_given() -> None:
    module = of_torch(bias=False)
    with pytest.raises(ArgumentError, match=r"missing\s+e_proj.weight, f_proj.weight"):
        Linformer.from_torch(module, max_len=N, num_mixtures=N)
    eye = torch.eye(N, dtype=torch.float64)
    mixtures = {"e_proj.weight": eye, "f_proj.weight": eye}
    layer = Linformer.from_torch(module, max_len=N, num_mixtures=N, weights=mixtures)
    x = rows(2, N, WIDTH)
    close(layer(x), module(x, x, x)[0])


def test_modules_of_torch_with_rows_of_their_own_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="bias_k"):
        MultiHead.from_torch(of_torch(add_bias_kv=True))


def test_grouped_queries_beside_torch() -> None:
    layer = GroupedQuery(WIDTH, 6, 2)
    x = rows(2, N, WIDTH)
    q, k, v = layer.heads(x, x, x)
    expected = scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2).flatten(-2)
    close(layer(x), layer.linear("out_proj", expected))


def bahdanau(s: Any, h: Any, values: Any, W: Any, U: Any, v: Any) -> np.ndarray:
    """Section 3.1 and appendix A.1.2 of the paper, one number at a time."""
    out = np.zeros((len(s), values.shape[1]))
    for i in range(len(s)):
        energies = []
        for j in range(len(h)):
            hidden = [
                tanh(sum(W[a, c] * s[i, c] for c in range(s.shape[1]))
                     + sum(U[a, c] * h[j, c] for c in range(h.shape[1])))
                for a in range(len(v))
            ]  # fmt: skip
            energies.append(sum(v[a] * hidden[a] for a in range(len(v))))
        total = sum(exp(e) for e in energies)
        for j in range(len(h)):
            out[i] += exp(energies[j]) / total * values[j]
    return out


def test_additive_attention_beside_a_loop_from_the_paper() -> None:
    layer = Additive(4, hidden_dim=6, kv_dim=3)
    rng = np.random.default_rng(0)
    s, h, values = rng.normal(size=(5, 4)), rng.normal(size=(7, 3)), rng.normal(size=(7, 2))
    W, U, v = (layer.weights[f"{name}.weight"] for name in ("q_proj", "k_proj", "score"))
    expected = bahdanau(s, h, values, W, U, v[0])
    np.testing.assert_allclose(layer(s, h, values), expected, rtol=0, atol=1e-13)
    np.testing.assert_allclose(layer.token_mixing(s, h, values) @ values, expected, atol=1e-13)


def test_additive_attention_in_blocks_has_the_gradients_of_autograd(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("qkv.mechanisms.lookup.additive.BLOCK_NUMBERS", 64)
    query, key, value = rows(2, 11, 4), rows(2, 13, 4), rows(2, 13, 3)
    names = {"q_proj.weight": (6, 4), "k_proj.weight": (6, 4), "score.weight": (1, 6)}
    weights = {name: rows(*shape) for name, shape in names.items()}
    layer = Additive(4, hidden_dim=6, weights=weights)
    W, U, v = weights.values()
    hidden = (query @ W.T)[:, :, None] + (key @ U.T)[:, None]
    expected = (hidden.tanh() @ v[0]).softmax(-1) @ value
    out = layer(query, key, value)
    close(out, expected)
    leaves = [query, key, value, *weights.values()]
    cotangent = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, leaves, cotangent),
        torch.autograd.grad(expected, leaves, cotangent),
        strict=True,
    ):
        close(ours, theirs)


def test_additive_attention_stores_no_tanh_for_the_way_back() -> None:
    n, hidden = 256, 16
    query, key = rows(n, 4), rows(n, 4)
    stored = 0

    def keep(tensor: Tensor) -> Tensor:
        nonlocal stored
        stored = max(stored, tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        Additive(4, hidden_dim=hidden)(query, key)
    assert 0 < stored <= n * hidden, "not the n x n x hidden_dim values of tanh"


def test_a_hard_look_up_beside_a_loop() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.normal(size=(6, 4)), rng.normal(size=(8, 4)), rng.normal(size=(8, 3))
    for count in (1, 3):
        expected = np.zeros((6, 3))
        for i in range(6):
            scores = [float(q[i] @ k[j]) / sqrt(4) for j in range(8)]
            best = sorted(range(8), key=lambda j: (-scores[j], j))[:count]
            total = sum(exp(scores[j]) for j in best)
            expected[i] = sum(exp(scores[j]) / total * v[j] for j in best)
        np.testing.assert_allclose(Hard(4, count)(q, k, v), expected, rtol=0, atol=1e-13)


def test_ties_of_a_hard_look_up_go_to_the_lower_index() -> None:
    same = np.ones((3, 2))
    value = np.array([[1.0], [2.0], [3.0]])
    np.testing.assert_array_equal(Hard(2)(same, same, value), np.ones((3, 1)))
    rng = np.random.default_rng(0)
    for dim, n, m in ((5, 7, 7), (8, 13, 37), (33, 1, 37), (64, 50, 501)):
        key, places = rng.normal(size=(1, dim)).repeat(m, 0), np.arange(m, dtype=float)[:, None]
        query = rng.normal(size=(n, dim))
        for given in ((query, key, places), tuple(map(torch.tensor, (query, key, places)))):
            assert not np.asarray(Hard(dim)(*given)).any()
            np.testing.assert_allclose(Hard(dim, k=3)(*given), 1.0, rtol=0, atol=1e-9)


def test_a_soft_look_up_becomes_a_hard_one_as_it_cools() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(6, 4)) for _ in range(3))
    hard = Hard(4)(q, k, v)
    errors = [abs(Soft(4, t)(q, k, v) - hard).max() for t in (1.0, 0.1, 0.001)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 1e-12


def test_differential_attention_beside_a_loop_from_the_paper() -> None:
    layer = Differential(8, num_heads=4, lambda_init=0.6, causal=True)
    x = np.random.default_rng(0).normal(size=(5, 8))
    w = layer.weights
    q, k, v = (x @ w[f"{s}_proj.weight"].T + w[f"{s}_proj.bias"] for s in "qkv")
    strength = exp(w["lambda_q1"] @ w["lambda_k1"]) - exp(w["lambda_q2"] @ w["lambda_k2"]) + 0.6

    def weights(head: int, i: int) -> np.ndarray:
        columns = slice(2 * head, 2 * head + 2)
        scores = [q[i, columns] @ k[j, columns] / sqrt(2) for j in range(i + 1)]
        exps = np.array([exp(s) for s in scores])
        return exps / exps.sum()

    joined = np.zeros((5, 8))
    for pair in range(2):
        first, second = v[:, 2 * pair : 2 * pair + 2], v[:, 2 * pair + 4 : 2 * pair + 6]
        values = np.concatenate([first, second], axis=1)
        for i in range(5):
            row = (weights(pair, i) - strength * weights(pair + 2, i)) @ values[: i + 1]
            normal = row / sqrt((row * row).mean() + 1e-5)
            joined[i, 4 * pair : 4 * pair + 4] = 0.4 * normal
    expected = joined @ w["out_proj.weight"].T + w["out_proj.bias"]
    np.testing.assert_allclose(layer(x), expected, rtol=0, atol=1e-12)


def test_every_tile_of_flash_is_attention_over_the_keys_so_far() -> None:
    layer = Flash(WIDTH, 2, block_q=4, block_kv=3, causal=True, rope=qkv.RoPE())
    x = np.random.default_rng(0).normal(size=(N, WIDTH))
    q, k, v = layer.heads(x, x, x)
    seen = 0
    for tile in layer.tiles(x):
        keys = slice(0, tile.kv_rows.stop)
        expected, lse = qkv.attention(
            q[tile.head, tile.q_rows],
            k[tile.head, keys],
            v[tile.head, keys],
            *layer.variants(q, k),
            q_offset=tile.q_rows.start,
            return_lse=True,
        )
        some = tile.row_sum > 0
        found = tile.accumulator[some] / tile.row_sum[some, None]
        np.testing.assert_allclose(found, expected[some], rtol=0, atol=1e-13)
        found_lse = tile.row_max[some] + np.log(tile.row_sum[some])
        np.testing.assert_allclose(found_lse, lse[some], rtol=0, atol=1e-13)
        seen += 1
    # Tiles of queries end at 4, 8 and 9 and meet 2, 3 and 3 tiles of keys, in each head.
    assert seen == 2 * (2 + 3 + 3)


def test_flash_explains_keys_of_another_sequence() -> None:
    layer = Flash(WIDTH, 2, block_q=4, block_kv=3)
    rng = np.random.default_rng(0)
    x, context = rng.normal(size=(N, WIDTH)), rng.normal(size=(5, WIDTH))
    found = layer.explain(x, index=7, key=context, kv_tokens=list("abcde"))
    names = [line.label for step in found.steps for line in step.lines if " of " in line.label]
    assert names == [f"s of {token}" for token in "abcde"] * 2
    np.testing.assert_allclose(found.steps[-1].lines[-1].value, layer(x, context)[7], atol=1e-13)


def test_flash_shows_tiles_and_explains_tokens_of_long_sequences() -> None:
    """Scores are those of one tile of queries at a time, and no trace of all rows is made."""
    layer, x = Flash(64, causal=True), np.random.default_rng(0).normal(size=(700, 64))
    out = layer.explain(x, index=300).steps[-1].lines[-1].value
    np.testing.assert_allclose(out, layer(x)[300], rtol=0, atol=1e-13)
    blocks = {(tile.q_rows.start, tile.kv_rows.start) for tile in layer.tiles(x)}
    assert blocks == {(128 * i, 128 * j) for i in range(6) for j in range(i + 1)}


def test_decoding_a_prompt_and_then_token_by_token() -> None:
    layer = KVCacheDecoding(WIDTH, HEADS, num_kv_heads=1, rope=qkv.RoPE())
    whole = MultiHead(
        WIDTH, HEADS, num_kv_heads=1, rope=qkv.RoPE(), causal=True, weights=layer.weights
    )
    x = rows(2, N, WIDTH)
    with torch.no_grad():
        outputs, cache = layer.step(x[:, :4])
        parts = [outputs]
        for t in range(4, N):
            out, cache = layer.step(x[:, t : t + 1], cache)
            parts.append(out)
    assert cache.read().key.shape == (2, 1, N, WIDTH // HEADS)
    close(torch.cat(parts, 1), whole(x))
    with pytest.raises(UnsupportedError, match="differentiates"):
        layer.step(x)
    close(torch.autograd.grad(layer(x).sum(), x)[0], torch.autograd.grad(whole(x).sum(), x)[0])


@pytest.mark.parametrize("name", ["multi-head", "linear", "rwkv4", "rwkv6", "mamba", "gated-delta"])
def test_sequences_are_mapped_by_torch(name: str) -> None:
    """vmap has no rule for `torch.moveaxis` of integers, and named it in its error."""
    layer = MECHANISMS[name](8)  # type: ignore[call-arg, arg-type]
    x = torch.randn(3, N, 8, dtype=torch.float64)
    expected = np.stack([layer(one) for one in x.numpy()])
    close(torch.func.vmap(layer)(x), torch.as_tensor(expected))


def test_gradients_of_additive_attention_by_transforms_of_torch() -> None:
    """A checkpoint in their way failed with an error about hooks of saved tensors."""
    layer = Additive(4, hidden_dim=6)
    w, u, v = (torch.as_tensor(layer.weights[f"{k}.weight"]) for k in ("q_proj", "k_proj", "score"))

    def by_hand(x: Tensor) -> Tensor:
        scores = torch.tanh((x @ w.T)[:, None] + x @ u.T) @ v[0]
        return torch.softmax(scores, -1) @ x

    x = torch.randn(N, 4, dtype=torch.float64)
    close(torch.func.jacrev(layer)(x), torch.autograd.functional.jacobian(by_hand, x))
