"""Linear attention, Performer and Linformer against loops written from their papers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkv.errors import ArgumentError, DTypeError, ShapeError
from qkv.mechanisms import Linear, Linformer, Performer, example_input
from qkv.mechanisms.linear_time.performer import independent_projection, orthogonal_projection

GOLDENS = Path(__file__).parents[1] / "golden" / "goldens.json"
HALF_A_UNIT = 5e-13
WIDTH, HEADS, KV_HEADS, HEAD_DIM, N = 24, 4, 2, 6, 70

close = np.testing.assert_allclose


def golden() -> dict[str, Any]:
    cases = json.loads(GOLDENS.read_text(encoding="utf-8"))["cases"]
    exact: dict[str, Any] = cases["shared_example_linear_elu1"]["exact"]
    return exact


@pytest.mark.parametrize("causal", [False, True])
def test_the_shared_example(causal: bool) -> None:
    exact, prefix = golden(), "causal_" if causal else ""
    mechanism = Linear.for_example(causal=causal)
    x = example_input()
    close(mechanism(x), exact[f"{prefix}output"], rtol=0, atol=HALF_A_UNIT)
    close(mechanism.token_mixing(x)[0], exact[f"{prefix}weights"], rtol=0, atol=HALF_A_UNIT)


def random_weights(mechanism: Any) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: (0.5 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
        for name, weight in mechanism.weights.items()
    }


def rows_of(w: dict[str, torch.Tensor], x: torch.Tensor, side: str, head: int) -> torch.Tensor:
    """Query, key or value rows of one query head."""
    own = head if side == "q" else head // (HEADS // KV_HEADS)
    columns = slice(own * HEAD_DIM, (own + 1) * HEAD_DIM)
    return x @ w[f"{side}_proj.weight"][columns].T + w[f"{side}_proj.bias"][columns]


def attend(w: dict[str, torch.Tensor], x: torch.Tensor, similarity: Any, causal: bool) -> Any:
    """Equation 3 of "Transformers are RNNs", token by token, for any similarity of two rows."""
    heads = []
    for head in range(HEADS):
        q, k, v = (rows_of(w, x, side, head) for side in "qkv")
        rows = []
        for i in range(len(x)):
            last = i + 1 if causal else len(x)
            weights = torch.stack([similarity(q[i], k[j]) for j in range(last)])
            rows.append((weights / weights.sum()) @ v[:last])
        heads.append(torch.stack(rows))
    return torch.cat(heads, dim=-1) @ w["out_proj.weight"].T + w["out_proj.bias"]


def elu_similarity(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return (torch.nn.functional.elu(q) + 1) @ (torch.nn.functional.elu(k) + 1)


def favor_similarity(projection: torch.Tensor) -> Any:
    """Equation 5 of the Performer paper, for rows divided by head_dim ** (1 / 4)."""

    def features(x: torch.Tensor) -> torch.Tensor:
        y = x / HEAD_DIM**0.25
        return torch.exp(projection @ y - y @ y / 2) / len(projection) ** 0.5

    return lambda q, k: features(q) @ features(k)


def agree(mechanism: Any, w: dict[str, torch.Tensor], reference: Any, n: int = 20) -> None:
    """Outputs, and gradients of x and of all weights."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64, requires_grad=True)
    for weight in w.values():
        weight.requires_grad_()
    right, found = reference(w, x), mechanism(x)
    close(found.detach(), right.detach(), rtol=0, atol=1e-10)
    cotangent = torch.randn(right.shape, generator=generator, dtype=torch.float64)
    inputs = [x, *w.values()]
    for name, ours, theirs in zip(
        ["x", *w],
        torch.autograd.grad(found, inputs, cotangent),
        torch.autograd.grad(right, inputs, cotangent),
        strict=True,
    ):
        close(ours, theirs, rtol=0, atol=1e-10 * (1 + theirs.abs().max()), err_msg=name)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_its_loop(causal: bool) -> None:
    options = {"num_kv_heads": KV_HEADS, "causal": causal, "chunk_size": 8}
    w = random_weights(Linear(WIDTH, HEADS, **options))
    mechanism = Linear(WIDTH, HEADS, weights=w, **options)
    agree(mechanism, w, lambda w, x: attend(w, x, elu_similarity, causal))


@pytest.mark.parametrize("causal", [False, True])
def test_performer_is_its_loop(causal: bool) -> None:
    options = {"num_kv_heads": KV_HEADS, "causal": causal, "chunk_size": 8, "num_features": 16}
    w = random_weights(Performer(WIDTH, HEADS, **options))
    mechanism = Performer(WIDTH, HEADS, weights=w, seed=3, **options)
    similarity = favor_similarity(torch.from_numpy(mechanism.projection))
    agree(mechanism, w, lambda w, x: attend(w, x, similarity, causal))


def favor_in_logarithms(mechanism: Any, x: np.ndarray) -> np.ndarray:
    """The same equation with a softmax over all pairs of a key and a feature; no proj. of output.

    Nothing overflows or vanishes in it, however large the rows are.
    """
    w, projection = mechanism.weights, np.float64(mechanism.projection)
    heads = []
    for head in range(HEADS):
        own = head // (HEADS // KV_HEADS)
        rows = {}
        for side, of in (("q", head), ("k", own), ("v", own)):
            columns = slice(of * HEAD_DIM, (of + 1) * HEAD_DIM)
            rows[side] = x @ w[f"{side}_proj.weight"][columns].T + w[f"{side}_proj.bias"][columns]
        q, k = (rows[side] / HEAD_DIM**0.25 for side in "qk")
        q, k = (y @ projection.T - (y * y).sum(-1, keepdims=True) / 2 for y in (q, k))
        out = []
        for i in range(len(x)):
            exponents = q[i] + k[: i + 1]
            weights = np.exp(exponents - exponents.max()).sum(-1)
            out.append(weights @ rows["v"][: i + 1] / weights.sum())
        heads.append(np.stack(out))
    return np.concatenate(heads, axis=-1)


def large_performer(**more: Any) -> Any:
    options = {"num_kv_heads": KV_HEADS, "causal": True, "num_features": 16, "out_proj": False}
    return Performer(WIDTH, HEADS, seed=3, **options, **more)


@pytest.mark.parametrize("chunk_size", [1, 5, 64])
@pytest.mark.parametrize("factor", [1, 10, 100, 1000])
def test_performer_reads_rows_of_any_size(factor: int, chunk_size: int) -> None:
    mechanism = large_performer(chunk_size=chunk_size)
    x = np.random.default_rng(0).normal(size=(N, WIDTH)) * factor
    x[1::3] /= factor
    right, tolerance = favor_in_logarithms(mechanism, x), 1e-11 * factor**2
    close(mechanism(x), right, rtol=0, atol=tolerance)
    first, state = mechanism.step(x[:33])
    second, _ = mechanism.step(x[33:], state)
    close(np.concatenate([first, second]), right, rtol=0, atol=tolerance)
    if chunk_size == 5:
        tensor = torch.from_numpy(x)
        close(mechanism(tensor), right, rtol=0, atol=tolerance)
        mixing = mechanism.token_mixing(x)
        assert (np.triu(mixing, 1) == 0).all()
        close(mixing.sum(-1), 1, rtol=0, atol=1e-12)
        explained = mechanism.explain(x, index=4).steps[-1].lines[-1].value
        close(explained, right[4], rtol=0, atol=tolerance)


@pytest.mark.parametrize("factor", [1, 10, 30])
def test_gradients_of_performer_are_finite_for_rows_of_any_size(factor: int) -> None:
    """Gradients in float32 are near differences of the formula in float64."""
    mechanism = large_performer()
    x = np.random.default_rng(0).normal(size=(N, WIDTH)) * factor
    x[1::3] /= factor
    tensor = torch.tensor(x, dtype=torch.float32, requires_grad=True)
    (found,) = torch.autograd.grad(mechanism(tensor).sum(), tensor)
    assert found.isfinite().all()
    wide = torch.tensor(x, requires_grad=True)
    (right,) = torch.autograd.grad(mechanism(wide).sum(), wide)
    close(found, right, rtol=0, atol=1e-4 * factor * float(right.abs().max()))
    step = 1e-6
    for i, c in ((0, 0), (5, 3), (N - 1, 7)):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[i, c] += sign * step
            ends.append(favor_in_logarithms(mechanism, moved).sum())
        slope = (ends[0] - ends[1]) / (2 * step)
        close(float(right[i, c]), slope, rtol=1e-4, atol=1e-4 * factor)


def test_linformer_is_its_loop() -> None:
    options = {"num_kv_heads": KV_HEADS, "max_len": 25, "num_mixtures": 5}
    w = random_weights(Linformer(WIDTH, HEADS, **options))
    mechanism = Linformer(WIDTH, HEADS, weights=w, **options)

    def reference(w: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Equation 7 of the paper; a shorter sequence uses the first columns of E and F."""
        heads = []
        for head in range(HEADS):
            q, k, v = (rows_of(w, x, side, head) for side in "qkv")
            mixed_k = w["e_proj.weight"][:, : len(x)] @ k
            mixed_v = w["f_proj.weight"][:, : len(x)] @ v
            heads.append(torch.softmax(q @ mixed_k.T / HEAD_DIM**0.5, dim=-1) @ mixed_v)
        return torch.cat(heads, dim=-1) @ w["out_proj.weight"].T + w["out_proj.bias"]

    agree(mechanism, w, reference)


@pytest.mark.slow
@pytest.mark.parametrize("draw", [independent_projection, orthogonal_projection])
def test_the_error_of_performer_features_is_that_of_the_paper(draw: Any) -> None:
    """Lemma 2: with m independent features, the mean squared error of the kernel SM(x, y) is
    exp(|x + y|^2) SM(x, y)^2 (1 - exp(-|x + y|^2)) / m; theorem 2: less with orthogonal ones."""
    rng = np.random.default_rng(0)
    d, draws = 8, 4000
    x, y = rng.normal(size=(2, d)) * 0.35
    kernel, both = math.exp(x @ y), float((x + y) @ (x + y))
    measured = {}
    for m in (8, 32, 128):
        w = np.stack([draw(m, d, rng) for _ in range(draws)])
        shift = (x @ x + y @ y) / 2
        estimates = np.exp(w @ (x + y) - shift).mean(axis=1)
        assert abs(estimates.mean() - kernel) < 4 * estimates.std() / draws**0.5
        lemma = math.exp(both) * kernel**2 * (1 - math.exp(-both)) / m
        measured[m] = float(((estimates - kernel) ** 2).mean()) / lemma
    if draw is independent_projection:
        close(list(measured.values()), 1, rtol=0.15)
    else:
        assert all(ratio < 0.85 for ratio in measured.values())


def test_performer_comes_closer_to_softmax_attention_with_more_features() -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, WIDTH))
    errors = {}
    for m in (16, 64, 256, 1024):
        squares = []
        for seed in range(8):
            performer = Performer(WIDTH, HEADS, num_features=m, seed=seed)
            w = {name: 0.5 * array for name, array in performer.weights.items()}
            performer.weights = w
            q, k = (
                np.moveaxis((x @ w[f"{side}_proj.weight"].T).reshape(N, HEADS, HEAD_DIM), 1, 0)
                for side in "qk"
            )
            scores = np.exp(q @ k.swapaxes(-1, -2) / HEAD_DIM**0.5)
            right = scores / scores.sum(-1, keepdims=True)
            squares.append(((performer.token_mixing(x) - right) ** 2).mean())
        errors[m] = np.mean(squares)
    for fewer, more in ((16, 64), (64, 256), (256, 1024)):
        assert 3 < errors[fewer] / errors[more] < 5.5


def test_the_seed_decides_the_features() -> None:
    first, again, other = (Performer(WIDTH, HEADS, seed=seed).projection for seed in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).any()


def test_rows_of_a_block_are_orthogonal() -> None:
    w = orthogonal_projection(20, 8, np.random.default_rng(0))
    for block in (w[:8], w[8:16], w[16:]):
        products = block @ block.T
        close(products - np.diag(np.diag(products)), 0, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "options", "error", "message"),
    [
        (Linear, {"scale": 2.0}, ArgumentError, "scale"),
        (Linear, {"alibi": True}, ArgumentError, "alibi"),
        (Linear, {"chunk_size": 0}, ArgumentError, "chunk_size=0"),
        (Performer, {"num_features": 0}, ArgumentError, "num_features=0"),
        (Performer, {"projection": np.ones((3, 3))}, ShapeError, r"\(3, 3\)"),
        (Performer, {"projection": [[1.0]]}, DTypeError, "projection is a list"),
        (Linformer, {"causal": True}, ArgumentError, "causal"),
        (Linformer, {"max_len": 0}, ArgumentError, "max_len=0"),
    ],
)
def test_what_does_not_fit_is_refused(
    cls: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        cls(WIDTH, HEADS, **options)


def test_sequences_that_do_not_fit_are_refused() -> None:
    x = np.ones((9, WIDTH))
    with pytest.raises(ShapeError, match="max_len=8"):
        Linformer(WIDTH, HEADS, max_len=8)(x)
    with pytest.raises(ShapeError, match="as many keys"):
        Linear(WIDTH, HEADS, causal=True)(x, x[:5])
    with pytest.raises(ShapeError, match="one or more"):
        Linear(WIDTH, HEADS)(x[:0])
