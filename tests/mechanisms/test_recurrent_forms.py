"""The recurrent and the chunked form of each recurrence against a loop from its definition."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from qkv.mechanisms.linear_time import linear, mamba, mamba2, rwkv4, rwkv6
from qkv.mechanisms.linear_time.recurrences import delta_rule
from qkv.mechanisms.linear_time.recurrences.chunks import decays_between
from qkv.mechanisms.linear_time.recurrences.scan import (
    in_segments,
    joined_segments,
    linear_scan,
    segments,
)

Array = NDArray[Any]
Inputs = dict[str, Array]

BATCH, HEADS, N, D, D_V = 2, 3, 77, 8, 5

close = np.testing.assert_allclose


def linear_loop(query: Array, key: Array, value: Array) -> Array:
    out = np.zeros_like(value)
    for i in range(len(query)):
        weights = np.array([query[i] @ key[j] for j in range(i + 1)])
        out[i] = (weights / weights.sum()) @ value[: i + 1]
    return out


def mamba2_loop(query: Array, key: Array, value: Array, log_decay: Array) -> Array:
    state, out = np.zeros((key.shape[1], value.shape[1])), np.zeros_like(value)
    for t in range(len(query)):
        state = np.exp(log_decay[t]) * state + np.outer(key[t], value[t])
        out[t] = query[t] @ state
    return out


def gated_delta_loop(
    query: Array, key: Array, value: Array, log_decay: Array, beta: Array
) -> Array:
    state, out = np.zeros((key.shape[1], value.shape[1])), np.zeros_like(value)
    identity = np.eye(key.shape[1])
    for t in range(len(query)):
        kept = identity - beta[t] * np.outer(key[t], key[t])
        state = np.exp(log_decay[t]) * kept @ state + beta[t] * np.outer(key[t], value[t])
        out[t] = query[t] @ state
    return out


def rwkv6_loop(
    receptance: Array, key: Array, value: Array, log_decay: Array, bonus: Array
) -> Array:
    state, out = np.zeros((key.shape[1], value.shape[1])), np.zeros_like(value)
    for t in range(len(key)):
        new = np.outer(key[t], value[t])
        out[t] = receptance[t] @ (state + np.diag(bonus[0]) @ new)
        state = np.diag(np.exp(log_decay[t])) @ state + new
    return out


def rwkv4_loop(key: Array, value: Array, decay: Array, bonus: Array) -> Array:
    out = np.zeros_like(value)
    for t in range(len(key)):
        for c in range(key.shape[1]):
            scores = [key[j, c] - (t - 1 - j) * decay[c] for j in range(t)]
            scores = np.array([*scores, key[t, c] + bonus[c]])
            weights = np.exp(scores - scores.max())
            out[t, c] = weights @ value[: t + 1, c] / weights.sum()
    return out


def mamba_loop(x: Array, step: Array, a: Array, b: Array, c: Array) -> Array:
    state, out = np.zeros_like(a), np.zeros_like(x)
    for t in range(len(x)):
        state = np.exp(step[t][:, None] * a) * state + np.outer(step[t] * x[t], b[t])
        out[t] = state @ c[t]
    return out


def draw(*names: str, seed: int = 0) -> Inputs:
    """Inputs by name, with the signs and sizes that models give them."""
    rng = np.random.default_rng(seed)
    unit = rng.normal(size=(BATCH, HEADS, N, D))
    everything = {
        "query": rng.normal(size=(BATCH, HEADS, N, D)),
        "receptance": rng.normal(size=(BATCH, HEADS, N, D)),
        "key": unit / np.linalg.norm(unit, axis=-1, keepdims=True),
        "value": rng.normal(size=(BATCH, HEADS, N, D_V)),
        "log_decay": -np.exp(rng.normal(size=(BATCH, HEADS, N))),
        "beta": rng.random((BATCH, HEADS, N)),
        "bonus": rng.normal(size=(HEADS, 1, D)),
    }
    return {name: everything[name] for name in names}


def positive(inputs: Inputs) -> Inputs:
    return inputs | {"query": abs(inputs["query"]), "key": abs(inputs["key"])}


def by_channel(inputs: Inputs) -> Inputs:
    rng = np.random.default_rng(1)
    decays = -np.exp(rng.normal(size=(BATCH, HEADS, N, D)))
    return inputs | {"log_decay": decays}


def channels_of_rwkv4() -> Inputs:
    rng = np.random.default_rng(2)
    key, value = rng.normal(size=(2, BATCH, N, D)) * 3
    return {
        "key": key,
        "value": value,
        "decay": np.exp(rng.normal(size=D)),
        "bonus": rng.normal(size=D),
    }


def channels_of_mamba() -> Inputs:
    rng = np.random.default_rng(3)
    return {
        "x": rng.normal(size=(BATCH, N, D)),
        "step": np.exp(rng.normal(size=(BATCH, N, D)) - 1),
        "a": -np.exp(rng.normal(size=(D, 4))),
        "b": rng.normal(size=(BATCH, N, 4)),
        "c": rng.normal(size=(BATCH, N, 4)),
    }


CASES: dict[str, tuple[Any, Callable[..., Array], Inputs]] = {
    "linear": (linear, linear_loop, positive(draw("query", "key", "value"))),
    "mamba2": (mamba2, mamba2_loop, draw("query", "key", "value", "log_decay")),
    "gated_delta": (
        delta_rule,
        gated_delta_loop,
        draw("query", "key", "value", "log_decay", "beta"),
    ),
    "rwkv6": (
        rwkv6,
        rwkv6_loop,
        by_channel(draw("receptance", "key", "value", "log_decay", "bonus")),
    ),
    "rwkv4": (rwkv4, rwkv4_loop, channels_of_rwkv4()),
    "mamba": (mamba, mamba_loop, channels_of_mamba()),
}

WITHOUT_TOKENS = {"bonus", "decay", "a"}
WITHOUT_FEATURES = {"mamba2": {"log_decay"}, "gated_delta": {"log_decay", "beta"}}


def tokens_of(name: str, inputs: Inputs, where: slice) -> Inputs:
    """The inputs of some tokens."""
    found = {}
    for key, array in inputs.items():
        if key in WITHOUT_TOKENS:
            found[key] = array
        elif key in WITHOUT_FEATURES.get(name, ()):
            found[key] = array[..., where]
        else:
            found[key] = array[..., where, :]
    return found


def loop(name: str) -> Array:
    """The loop over each sequence of each head."""
    _, definition, inputs = CASES[name]
    channels = name in ("rwkv4", "mamba")
    shape = (BATCH,) if channels else (BATCH, HEADS)
    out = []
    for index in np.ndindex(*shape):
        own = {
            key: array[index[1:]]
            if key == "bonus" and not channels
            else (array if key in WITHOUT_TOKENS else array[index])
            for key, array in inputs.items()
        }
        out.append(definition(**own))
    return np.reshape(out, (*shape, *out[0].shape))


@pytest.mark.parametrize("name", CASES)
def test_both_forms_give_what_the_definition_gives(name: str) -> None:
    module, _, inputs = CASES[name]
    right = loop(name)
    close(module.recurrent(**inputs)[0], right, rtol=0, atol=1e-12)
    for size in (1, 16, 64, 128):
        close(module.chunk(**inputs, chunk_size=size)[0], right, rtol=0, atol=1e-12)


PARALLEL: dict[str, Callable[..., Array]] = {
    "linear": lambda query, key: linear.token_weights(query, key, causal=True),
    "mamba2": lambda query, key, log_decay: np.tril(query @ key.mT * decays_between(log_decay)),
    "gated_delta": delta_rule.token_weights,
    "rwkv6": rwkv6.token_weights,
}


@pytest.mark.parametrize("name", PARALLEL)
def test_token_weights_give_what_the_definition_gives(name: str) -> None:
    inputs = dict(CASES[name][2])
    value = inputs.pop("value")
    close(PARALLEL[name](**inputs) @ value, loop(name), rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["mamba2", "gated_delta", "rwkv6"])
@pytest.mark.parametrize("decay", [1e5, np.inf])
def test_token_weights_after_a_token_that_forgets_everything(name: str, decay: float) -> None:
    """Differences of sums over all tokens lost their digits after it, or were NaN."""
    inputs = dict(CASES[name][2])
    inputs["log_decay"] = inputs["log_decay"].copy()
    inputs["log_decay"][:, :, 9] = -decay
    value = inputs.pop("value")
    right = CASES[name][0].recurrent(value=value, **inputs)[0]
    close(PARALLEL[name](**inputs) @ value, right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("step", [1e5, 1e300])
def test_token_weights_of_mamba_after_a_long_step(step: float) -> None:
    inputs = dict(CASES["mamba"][2])
    inputs["step"], x = inputs["step"].copy(), inputs.pop("x").copy()
    inputs["step"][:, 9], x[:, 9] = step, 0
    found = np.einsum("...cij,...jc->...ic", mamba.token_weights(**inputs), x)
    close(found, mamba.recurrent(x=x, **inputs)[0], rtol=0, atol=1e-12)


def test_linear_attention_without_a_mask_gives_what_the_definition_gives() -> None:
    inputs = CASES["linear"][2]
    products = np.einsum("bhid,bhjd->bhij", inputs["query"], inputs["key"])
    right = np.einsum("bhij,bhje->bhie", products, inputs["value"])
    right /= products.sum(-1)[..., None]
    close(linear.naive(**inputs, causal=False), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("name", CASES)
def test_no_number_that_is_not_finite_reaches_an_earlier_token(name: str, poison: float) -> None:
    """The number is in any of the inputs, and the definition says which tokens are not reached."""
    module, definition, inputs = CASES[name]
    own = {key: a if key in WITHOUT_TOKENS else a[(0,) * (a.ndim - 2)] for key, a in inputs.items()}
    for key in inputs.keys() & WITHOUT_FEATURES.get(name, set()):
        own[key] = inputs[key][0, 0]
    if name == "rwkv6":
        own["bonus"] = inputs["bonus"][0]
    for key in own.keys() - WITHOUT_TOKENS:
        changed = own | {key: own[key].copy()}
        changed[key][40] = -poison if key == "log_decay" else poison
        with np.errstate(all="ignore"):
            right = definition(**changed)
            batched = {n: a if n in ("decay", "a") else a[None] for n, a in changed.items()}
            for size in (1, 16, 64, 128):
                found = module.chunk(**batched, chunk_size=size)[0][0]
                close(found[:40], right[:40], rtol=0, atol=1e-12, err_msg=f"{key}, {size}")
                assert (np.isfinite(found) <= np.isfinite(right)).all(), (key, size)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("later", ["recurrent", "chunk"])
def test_a_state_continues_where_an_earlier_call_stopped(name: str, later: str) -> None:
    module, _, inputs = CASES[name]
    first, state = module.chunk(**tokens_of(name, inputs, slice(0, 40)), chunk_size=16)
    rest = tokens_of(name, inputs, slice(40, N))
    second, _ = getattr(module, later)(**rest, state=state)
    close(np.concatenate([first, second], axis=-2), loop(name), rtol=0, atol=1e-12)


def some_float32(name: str) -> Inputs:
    inputs = tokens_of(name, CASES[name][2], slice(0, 20))
    return {key: np.float32(array) for key, array in inputs.items()}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", ["recurrent", "chunk"])
def test_tensors_give_the_same(name: str, form: str) -> None:
    algorithm, inputs = getattr(CASES[name][0], form), some_float32(name)
    tensors = {key: torch.from_numpy(array) for key, array in inputs.items()}
    found, _ = algorithm(**tensors)
    assert isinstance(found, torch.Tensor)
    close(found.numpy(), algorithm(**inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.slow
@pytest.mark.sampled("name", list(CASES), one_in=3)
def test_jax_arrays_give_the_same_compiled(name: str) -> None:
    algorithm, inputs = partial(CASES[name][0].chunk, chunk_size=16), some_float32(name)
    found, _ = jax.jit(algorithm)(**inputs)
    close(np.asarray(found), algorithm(**inputs)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("chunk_size", [1, 16])
def test_rwkv4_takes_keys_that_exp_does_not(chunk_size: int) -> None:
    key = np.array([[0.0], [5000.0], [-5000.0], [4000.0], [0.0]])
    value = np.arange(5.0)[:, None]
    decay, bonus = np.array([700.0]), np.array([800.0])
    with np.errstate(all="raise", under="ignore"):
        out, state = rwkv4.chunk(key, value, decay, bonus, chunk_size=chunk_size)
    assert np.isfinite(out).all()
    assert all(np.isfinite(part).all() for part in state)
    close(out, rwkv4_loop(key, value, decay, bonus), rtol=1e-12)


@pytest.mark.parametrize("rate", [1e-9, 1.0, 1e3])
def test_decays_of_any_strength_stay_finite(rate: float) -> None:
    inputs = draw("receptance", "key", "value", "bonus") | {
        "log_decay": np.full((BATCH, HEADS, N, D), -rate)
    }
    with np.errstate(all="raise", under="ignore"):
        found, _ = rwkv6.chunk(**inputs)
    close(found, rwkv6.recurrent(**inputs)[0], rtol=0, atol=1e-10)
    inputs = draw("query", "key", "value") | {"log_decay": np.full((BATCH, HEADS, N), -rate)}
    with np.errstate(all="raise", under="ignore"):
        found, _ = mamba2.chunk(**inputs)
    close(found, mamba2.recurrent(**inputs)[0], rtol=0, atol=1e-10)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 100])
def test_the_inverse_of_a_triangular_matrix_keeps_its_digits(n: int) -> None:
    # A power series in this matrix would have terms up to binomial(n, n / 2).
    lower = np.tril(np.ones((n, n)), -1)
    right = np.eye(n) - np.eye(n, k=-1)
    assert (delta_rule.inverse_of_unit_lower(lower) == right).all()
    rng = np.random.default_rng(n)
    lower = np.tril(rng.normal(size=(2, n, n)), -1) / np.sqrt(n)
    right = np.linalg.inv(np.eye(n) + lower)
    close(delta_rule.inverse_of_unit_lower(lower), right, rtol=0, atol=1e-10)


def test_keys_written_again_are_replaced() -> None:
    """All keys are one key and every error is corrected, so that a token reads its own value."""
    key = np.full((1, 100, 4), 0.5)
    value = np.random.default_rng(0).normal(size=(1, 100, 3))
    nothing, everything = np.zeros((1, 100)), np.ones((1, 100))
    out, _ = delta_rule.chunk(key, key, value, nothing, everything)
    close(out, value, rtol=0, atol=1e-12)


def scanned(decay: Array, increment: Array, state: Array, size: int, *ring: Any) -> Array:
    """All states of a scan, and those before each segment checked against the ones after."""
    rows = []
    for where, length in segments(len(decay), size):
        inputs = (in_segments(array[where], length) for array in (decay, increment))
        states = list(linear_scan(*inputs, state, *ring))
        rows.append(joined_segments(states[1:]))
        close(states[0], np.stack([state, *states[-1][:-1]]), rtol=0, atol=1e-13)
        state = states[-1][-1]
    return np.concatenate(rows)


@pytest.mark.parametrize("n", [1, 2, 3, 10, 64, 101])
@pytest.mark.parametrize("size", [1, 16, 50, 200])
def test_a_scan_is_its_loop(n: int, size: int) -> None:
    rng = np.random.default_rng(n)
    decay, increment = rng.random((n, 3)), rng.normal(size=(n, 3))
    start = state = rng.normal(size=3)
    right = []
    for d, b in zip(decay, increment, strict=True):
        state = d * state + b
        right.append(state)
    close(scanned(decay, increment, start, size), right, rtol=0, atol=1e-13)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_a_scan_for_the_largest_is_its_loop(n: int) -> None:
    rng = np.random.default_rng(n)
    loss, score = -rng.random((n, 3)), rng.normal(size=(n, 3))
    start = state = np.full(3, -np.inf)
    right = []
    for d, b in zip(loss, score, strict=True):
        state = np.maximum(state + d, b)
        right.append(state)
    found = scanned(loss, score, start, 16, np.maximum, operator.add)
    close(found, right, rtol=0, atol=1e-13)
