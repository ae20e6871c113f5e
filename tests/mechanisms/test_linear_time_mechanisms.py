"""What all linear-time mechanisms promise: token mixing, explanations, costs and errors."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from qkv.errors import QkvError
from qkv.mechanisms import (
    RWKV4,
    RWKV6,
    GatedDelta,
    Linear,
    Linformer,
    Mamba,
    Mamba2,
    Performer,
    example_input,
    example_tokens,
)

CLASSES = [Linear, Performer, Linformer, RWKV4, RWKV6, Mamba, Mamba2, GatedDelta]
RECURRENT = [RWKV4, RWKV6, Mamba, Mamba2, GatedDelta]

OPTIONS: dict[Any, dict[str, Any]] = {
    Linear: {"num_heads": 2, "causal": True},
    Performer: {"num_heads": 2, "num_features": 8},
    Linformer: {"num_heads": 2, "max_len": 1000, "num_mixtures": 3},
    RWKV4: {"hidden_dim": 6},
    RWKV6: {"num_heads": 2, "mix_rank": 2, "decay_rank": 3},
    Mamba: {"state_size": 3},
    Mamba2: {"num_heads": 4, "state_size": 6, "num_groups": 2},
    GatedDelta: {"num_heads": 4, "num_key_heads": 2, "head_dim": 3, "v_head_dim": 5},
}

POISONS = (np.nan, np.nan, np.inf, -np.inf)

close = np.testing.assert_allclose


def made(cls: Any) -> Any:
    return cls(8, **OPTIONS[cls], seed=1)


@pytest.mark.parametrize("cls", RECURRENT)
def test_token_mixing_times_values_is_what_the_heads_give(cls: Any) -> None:
    mechanism = made(cls)
    x = np.random.default_rng(0).normal(size=(2, 30, 8))
    inputs, gate = mechanism.project(x, mechanism.initial_state(x))
    value = inputs["value"]
    channels = value.ndim == 3
    heads = np.moveaxis(value, -1, -2)[..., None] if channels else value
    out = mechanism.token_mixing(x) @ heads
    joined = mechanism.join(np.moveaxis(out[..., 0], -1, -2) if channels else out, gate)
    close(mechanism(x), joined, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [Linear, Performer, Linformer])
def test_token_mixing_times_values_is_the_output(cls: Any) -> None:
    mechanism = cls.example()
    x = example_input()
    close(mechanism.token_mixing(x)[0] @ x[:, 8:], mechanism(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("cls", [Linear, *RECURRENT])
def test_later_tokens_change_nothing_before_them(cls: Any) -> None:
    mechanism = made(cls)
    x = np.random.default_rng(0).normal(size=(30, 8))
    changed = np.concatenate([x[:20], x[20:] + 1])
    close(mechanism(changed)[:20], mechanism(x)[:20], rtol=0, atol=1e-14)
    mixing = mechanism.token_mixing(x)
    assert (np.triu(mixing, 1) == 0).all()


@pytest.mark.parametrize(
    "library", [np.asarray, torch.from_numpy, pytest.param(jnp.asarray, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("cls", [Linear, Performer, *RECURRENT])
def test_later_tokens_that_are_not_finite_reach_nothing_before_them(cls: Any, library: Any) -> None:
    """The token itself has to show it, whatever the chunks are."""
    x = np.random.default_rng(0).normal(size=(4, 30, 8)).astype(np.float32)
    changed, places = x.copy(), (20, 29, 20, 29)
    for row, (first, poison) in enumerate(zip(places, POISONS, strict=True)):
        changed[row, first] = poison
    options = OPTIONS[cls] | ({"causal": True} if cls is Performer else {})
    for size in (7,) if library is jnp.asarray else (1, 7, 64):
        mechanism = cls(8, **options, seed=1, chunk_size=size)
        with np.errstate(all="ignore"):
            right, found = mechanism(library(x)), mechanism(library(changed))
            mixing = np.asarray(mechanism.token_mixing(library(changed)))
            explained = mechanism.explain(changed[1], index=3).steps[-1].lines[-1].value
        right, found = np.asarray(right), np.asarray(found)
        for row, first in enumerate(places):
            close(found[row, :first], right[row, :first], rtol=0, atol=1e-5)
            assert np.isfinite(mixing[row][..., :first, :]).all()
            assert not np.isfinite(found[row, first]).all()
        close(explained, right[1, 3], rtol=0, atol=1e-5)


@pytest.mark.parametrize("cls", CLASSES)
@pytest.mark.parametrize("index", [0, 3])
def test_an_explanation_ends_with_the_output(cls: Any, index: int) -> None:
    for mechanism, x in ((cls.example(), example_input()), (made(cls), np.ones((5, 8)))):
        explained = mechanism.explain(x, example_tokens(), index=index)
        last = explained.steps[-1].lines[-1]
        close(last.value, mechanism(x)[index], rtol=0, atol=1e-12)
        assert explained.token == example_tokens()[index]
        assert str(explained)
        assert explained.to_json()


@pytest.mark.parametrize("cls", CLASSES)
def test_costs_are_linear_and_count_every_parameter(cls: Any) -> None:
    mechanism = made(cls)
    one, two, four = (int(mechanism.cost(n).total) for n in (1000, 2000, 4000))
    assert four - two == 2 * (two - one)
    found = mechanism.cost(1000, batch=3, dtype="bfloat16")
    assert int(found.parameters) == mechanism.parameters
    assert int(found.bytes_written) == 3 * 1000 * mechanism(np.ones((1, 8))).shape[-1] * 2
    assert int(found.bytes_read) == (3 * 1000 * 8 + mechanism.parameters) * 2


def test_projections_and_states_are_counted_one_by_one() -> None:
    """Counts of loops over n = 5 tokens, written out."""
    n, e, h, d = 5, 8, 2, 4
    ledger = Linear(e, h, causal=True, bias=False).cost(n)
    assert int(ledger["q_proj_multiply"]) == sum(1 for _ in np.ndindex(n, h * d, e))
    # phi(k)^T [v, 1] and phi(q) S of every token of every head.
    assert int(ledger["state_multiply"]) == sum(1 for _ in np.ndindex(n, h, d, d))
    assert int(ledger["read_multiply"]) == sum(1 for _ in np.ndindex(n, h, d, d + 1))
    ledger = Mamba2(e, h, head_dim=d, state_size=3).cost(n)
    read = sum(1 for _ in np.ndindex(n, h, d, 3))
    assert int(ledger["read_multiply"]) == read + n * h * d


@pytest.mark.parametrize("cls", RECURRENT)
@pytest.mark.parametrize("shape", [(5, 7), (0, 8), (8,)])
def test_inputs_that_do_not_fit_are_refused(cls: Any, shape: tuple[int, ...]) -> None:
    for call in (made(cls), made(cls).token_mixing, made(cls).explain):
        with pytest.raises(QkvError, match=r"8") as refused:
            call(np.ones(shape))
        assert str(shape) in str(refused.value)


@pytest.mark.parametrize("cls", RECURRENT)
def test_the_number_of_tokens_in_a_chunk_changes_nothing(cls: Any) -> None:
    x = np.random.default_rng(0).normal(size=(2, 30, 8))
    right = made(cls)(x)
    for size in (1, 4, 32):
        other = cls(8, **OPTIONS[cls], seed=1, chunk_size=size)
        close(other(x), right, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (RWKV4, {"hidden_dim": 0}, "hidden_dim=0"),
        (RWKV4, {"chunk_size": 0}, "chunk_size=0"),
        (Mamba, {"state_size": 0}, "state_size=0"),
        (Mamba2, {"num_heads": 3}, "num_heads=3"),
        (Mamba2, {"num_heads": 4, "num_groups": 3}, "num_groups=3"),
        (GatedDelta, {"num_heads": 4, "num_key_heads": 3}, "num_key_heads=3"),
        (GatedDelta, {"weights": {"A_log": np.ones(1)}}, "in_proj_qkvz"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(cls: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(QkvError, match=message):
        cls(8, **options)
