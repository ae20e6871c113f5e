"""Recurrent mechanisms token by token, with a state from call to call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from qkv.errors import ArgumentError, DTypeError, ShapeError, UnsupportedError
from qkv.mechanisms import (
    RWKV4,
    RWKV6,
    GatedDelta,
    KVCacheDecoding,
    Linear,
    Linformer,
    Mamba,
    Mamba2,
    MultiHeadLatent,
    Performer,
)

OPTIONS: dict[Any, dict[str, Any]] = {
    Linear: {"num_heads": 2, "num_kv_heads": 1, "causal": True},
    RWKV4: {"hidden_dim": 6},
    RWKV6: {"num_heads": 2, "mix_rank": 2, "decay_rank": 3},
    Mamba: {"state_size": 3},
    Mamba2: {"num_heads": 4, "state_size": 6, "num_groups": 2},
    Performer: {"num_heads": 2, "num_kv_heads": 1, "causal": True, "num_features": 4},
    GatedDelta: {"num_heads": 4, "num_key_heads": 2, "head_dim": 3, "v_head_dim": 5},
}
CLASSES = list(OPTIONS)
N = 13

close = np.testing.assert_allclose


def made(cls: Any, **more: Any) -> Any:
    return cls(8, **OPTIONS[cls], seed=1, **more)


def draw(*shape: int) -> Any:
    return np.random.default_rng(0).normal(size=shape)


def whole(mechanism: Any, x: Any) -> Any:
    """The output by the n x n matrix of token weights, without chunks and states."""
    mixing = mechanism.token_mixing(x)
    if isinstance(mechanism, Linear):
        return mechanism.join(mixing @ mechanism.featured(x, x, x)[2])
    inputs, gate = mechanism.project(x, mechanism.initial_state(x))
    value = inputs["value"]
    if value.ndim > x.ndim:
        return mechanism.join(mixing @ value, gate)
    return mechanism.join(np.einsum("...cij,...jc->...ic", mixing, value), gate)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("lengths", [[1] * N, [N], [5, 1, 7]])
def test_steps_give_what_the_parallel_form_gives(cls: Any, lengths: list[int]) -> None:
    mechanism, x = made(cls, chunk_size=4), draw(2, N, 8)
    rows, state, start = [], None, 0
    for n in lengths:
        out, state = mechanism.step(x[:, start : start + n], state)
        rows.append(out)
        start += n
    found = np.concatenate(rows, axis=-2)
    close(found, whole(mechanism, x), rtol=0, atol=1e-11)
    close(found, mechanism(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", CLASSES)
def test_blocks_change_nothing(cls: Any) -> None:
    mechanism, x = made(cls), draw(2, N, 8)
    right = mechanism(x)
    mechanism.block_size = 4
    close(mechanism(x), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [Linear, Performer, Linformer])
def test_blocks_of_attention_to_all_tokens_change_nothing(cls: Any) -> None:
    options: dict[Any, dict[str, Any]] = {
        Performer: {"num_features": 4},
        Linformer: {"max_len": N, "num_mixtures": 3},
    }
    mechanism = cls(8, 2, num_kv_heads=1, **options.get(cls, {}))
    x, key, value = draw(2, N, 8), draw(2, 7, 8)[..., ::-1], draw(2, 7, 8)
    right, across = mechanism(x), mechanism(x, key, value)
    mechanism.block_size = 4
    close(mechanism(x), right, rtol=0, atol=1e-12)
    close(mechanism(x, key, value), across, rtol=0, atol=1e-12)


def test_keys_whose_features_differ_by_more_than_the_exponent_range() -> None:
    """Nothing would be left of the first key's features, divided by the largest of all keys."""
    mechanism, x = made(Performer), draw(N, 8)
    x[:1] *= 200
    right = mechanism(x[:1])
    mechanism.block_size = 1
    found = mechanism(x)
    assert np.isfinite(found).all()
    close(found[:1], right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", CLASSES)
def test_a_step_leaves_its_state_as_it_was(cls: Any) -> None:
    mechanism, x = made(cls), draw(N, 8)
    _, state = mechanism.step(x[:5])
    first, _ = mechanism.step(x[5:], state)
    second, _ = mechanism.step(x[5:], state)
    assert (first == second).all()


STEPPED: dict[str, Any] = {
    **{cls.name: lambda cls=cls: made(cls) for cls in CLASSES},
    **{
        f"{cls.name} without projection": lambda cls=cls: made(cls, out_proj=False)
        for cls in CLASSES
    },
    "no convolution": lambda: Mamba2(8, num_heads=4, state_size=6, conv_kernel=1),
    KVCacheDecoding.name: lambda: KVCacheDecoding(8, 2),
    MultiHeadLatent.name: lambda: MultiHeadLatent(
        8, 2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4
    ),
}


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", STEPPED)
def test_buffers_that_are_written_again_change_no_later_token(name: str, library: str) -> None:
    """Every token is written over the last one, and every output is overwritten once it is read."""
    mechanism, x = STEPPED[name](), draw(2, N, 8)
    right = np.asarray(mechanism(x))
    for length in (1, 2):
        buffer = np.empty((2, length, 8))
        given = torch.from_numpy(buffer) if library == "torch" else buffer
        state = None
        for start in range(0, N - 1, length):
            buffer[...] = x[:, start : start + length]
            out, state = mechanism.step(given, state)
            buffer[...] = np.nan
            close(out, right[:, start : start + length], rtol=0, atol=1e-11)
            out[...] = np.nan


@pytest.mark.parametrize("cls", CLASSES)
def test_a_state_does_not_grow(cls: Any) -> None:
    mechanism, x = made(cls), draw(N, 8)
    short, long = (jax.tree.leaves(mechanism.step(x[:n])[1]) for n in (1, N))
    assert [a.shape for a in short] == [a.shape for a in long]


@pytest.mark.slow
@pytest.mark.sampled("cls", CLASSES, one_in=4)
def test_tensors_and_jax_arrays_decode(cls: Any) -> None:
    mechanism, x = made(cls), np.float32(draw(2, N, 8))
    right = mechanism(x)
    tensor = torch.tensor(x, requires_grad=True)
    _, state = mechanism.step(tensor[:, :9])
    second, _ = mechanism.step(tensor[:, 9:], state)
    assert isinstance(second, torch.Tensor)
    close(second.detach().numpy(), right[:, 9:], rtol=0, atol=1e-5)
    (gradient,) = torch.autograd.grad(second.sum(), tensor)  # through the state too
    (expected,) = torch.autograd.grad(mechanism(tensor)[:, 9:].sum(), tensor)
    assert float(gradient[:, :9].abs().max()) > 0
    close(gradient.numpy(), expected.numpy(), rtol=0, atol=2e-4)
    step = jax.jit(mechanism.step)
    _, state = step(jnp.asarray(x[:, :9]))
    second, _ = step(jnp.asarray(x[:, 9:]), state)
    close(np.asarray(second), right[:, 9:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", CLASSES)
def test_states_that_do_not_fit_are_refused(cls: Any) -> None:
    mechanism = made(cls)
    _, state = mechanism.step(draw(3, 4, 8))
    with pytest.raises(ShapeError, match="state"):
        mechanism.step(draw(2, 1, 8), state)
    with pytest.raises(ArgumentError, match="state"):
        mechanism.step(draw(3, 1, 8), {"nothing": draw(1)})
    with pytest.raises(ArgumentError, match="state"):
        mechanism.step(draw(3, 1, 8), 3)
    with pytest.raises(DTypeError, match="not an array"):
        mechanism.step(draw(3, 1, 8), {name: [1.0] for name in state})
    with pytest.raises(DTypeError, match="floating"):
        mechanism.step(np.ones((3, 1, 8), int))


@pytest.mark.parametrize("cls", CLASSES)
def test_the_output_has_the_dtype_of_x(cls: Any) -> None:
    x = draw(2, N, 8).astype(ml_dtypes.bfloat16)
    mechanism = made(cls)
    out = mechanism(x)
    assert out.dtype == x.dtype
    # bfloat16 keeps eight bits.
    right = mechanism(np.float64(x))
    assert abs(np.float64(out) - right).max() < 0.1 * abs(right).max()


def test_what_is_no_recurrence_is_refused() -> None:
    for mechanism in (Linear(8), Performer(8, num_features=4)):
        with pytest.raises(UnsupportedError, match="token by token"):
            mechanism.step(draw(1, 8))


LATENT = {"kv_lora_rank": 4, "qk_nope_head_dim": 3, "qk_rope_head_dim": 2, "v_head_dim": 5}


def test_latent_rows_are_those_of_the_tokens() -> None:
    layer, x = MultiHeadLatent(8, 2, **LATENT), np.ones((5, 8))
    latents = layer.latents(x)
    close(layer.absorbed(x[3:], latents), layer(x)[3:], rtol=1e-12)
    for wrong in (latents[:3], latents[:, 1:], latents[None]):
        with pytest.raises(ShapeError, match="latents have shape"):
            layer.absorbed(x, wrong)
    with pytest.raises(DTypeError, match="latents have dtype float32"):
        layer.absorbed(x, latents.astype(np.float32))
    with pytest.raises(UnsupportedError, match="token by token"):
        MultiHeadLatent(8, 2, causal=False, **LATENT).step(x)


@pytest.mark.parametrize("layer", [RWKV4(4), Mamba(4, state_size=3)], ids=["rwkv4", "mamba"])
def test_token_weights_where_a_decay_is_infinite(layer: Any) -> None:
    """Nothing is left of a token at the next one: weights of other tokens are 0."""
    name = "time_decay" if isinstance(layer, RWKV4) else "A_log"
    layer.weights[name][:] = 95.0
    x = np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32)
    with np.errstate(over="ignore"):
        assert np.isfinite(layer(x)).all()
        assert np.isfinite(layer.token_mixing(x)).all()


def test_a_state_without_arrays_is_named() -> None:
    layer, x = Mamba(4, state_size=3), np.ones((2, 4))
    with pytest.raises(DTypeError, match="conv of the state is None"):
        layer.step(x, {"conv": None, "scan": None})
