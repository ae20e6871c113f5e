"""Options that single mechanisms have: what each changes, and that all views of a call agree."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import qkv
from qkv.mechanisms import MECHANISMS
from qkv.mechanisms.base.attention import AttentionMechanism
from qkv.mechanisms.linear_time.recurrences.recurrent import RecurrentMechanism

Array = NDArray[Any]
WIDTH, N = 8, 7
SHARED = {"self", "embed_dim", "num_heads", "head_dim", "options", "weights", "seed"}
"""Parameters of all mechanisms, which other tests try."""
SIZES: dict[str, dict[str, Any]] = {
    "grouped-query": {"num_kv_heads": 1},
    "multi-head-latent": {
        "kv_lora_rank": 6, "qk_nope_head_dim": 3, "qk_rope_head_dim": 4, "v_head_dim": 5,
    },
    "relative-bias": {"num_buckets": 8, "max_distance": 16},
    "sliding-window": {"left": 2},
    "strided": {"stride": 3},
    "longformer": {"window": 1},
    "big-bird": {"block": 1, "num_random": 1},
    "linear": {"causal": True},
    "linformer": {"max_len": N, "num_mixtures": 3},
    "performer": {"num_features": 6, "causal": True},
    "flash": {"block_q": 4, "block_kv": 4},
    "ring": {"num_devices": 2},
}  # fmt: skip
VALUES: dict[str, dict[str, Any]] = {
    "additive": {"hidden_dim": 5, "kv_dim": 8},
    "soft": {"temperature": 0.5},
    "hard": {"k": 3},
    "grouped-query": {"num_kv_heads": 2},
    "multi-head-latent": {
        "kv_lora_rank": 4, "qk_nope_head_dim": 5, "qk_rope_head_dim": 2, "v_head_dim": 3,
        "q_lora_rank": 4, "rope": qkv.RoPE(base=50.0), "causal": False, "latent_norm": False,
        "eps": 0.5, "bias": True, "out_proj": False, "scale": 0.9,
    },
    "relative-bias": {"num_buckets": 6, "max_distance": 5},
    "sliding-window": {"left": 1, "right": 2},
    "strided": {"stride": 2},
    "longformer": {"window": 2, "global_tokens": [0, 4]},
    "big-bird": {
        "block": 2, "num_random": 0, "random_seed": 7,
        "random_blocks": np.array([[[3], [4], [-1], [1], [2], [0], [5]]] * 2),
    },
    "differential": {"lambda_init": 0.6, "normalize": False, "eps": 0.5},
    "linear": {"chunk_size": 2},
    "performer": {
        "num_features": 9, "orthogonal": False,
        "projection": np.random.default_rng(8).normal(size=(6, 4)),
    },
    "linformer": {"max_len": N + 2, "num_mixtures": 2},
    "rwkv4": {"hidden_dim": 6, "out_proj": False, "chunk_size": 3},
    "rwkv6": {
        "mix_rank": 3, "decay_rank": 5, "norm_epsilon": 0.5, "out_proj": False, "chunk_size": 2,
    },
    "mamba": {
        "inner_dim": 6, "state_size": 5, "conv_kernel": 2, "time_step_rank": 3, "bias": True,
        "conv_bias": False, "out_proj": False, "chunk_size": 3,
    },
    "mamba2": {
        "state_size": 5, "num_groups": 2, "conv_kernel": 2, "time_step_limit": (0.3, 0.5),
        "norm_epsilon": 0.5, "bias": True, "conv_bias": False, "out_proj": False, "chunk_size": 3,
    },
    "gated-delta": {
        "num_key_heads": 1, "v_head_dim": 3, "conv_kernel": 2, "norm_epsilon": 0.5,
        "out_proj": False, "chunk_size": 3,
    },
    "flash": {"block_q": 2, "block_kv": 3},
    "ring": {"num_devices": 3},
}  # fmt: skip
SAME_OUTPUT = {"chunk_size", "block_q", "block_kv", "num_devices"}
"""Options that change the order of additions only."""
CASES = [(name, option) for name, options in VALUES.items() for option in options]


def made(name: str, options: dict[str, Any]) -> Any:
    """The mechanism with random weights, which depend on their shapes alone."""
    cls: Any = MECHANISMS[name]
    heads = {"num_heads": 2} if "num_heads" in inspect.signature(cls).parameters else {}
    layer = cls(WIDTH, **heads, **options)
    if not layer.weights:
        return layer
    rng = np.random.default_rng(3)
    weights = {key: 0.7 * rng.normal(size=w.shape) for key, w in layer.weights.items()}
    return cls(WIDTH, **heads, **options, weights=weights)


def test_every_option_is_tried() -> None:
    for name, cls in MECHANISMS.items():
        own = set(inspect.signature(cls).parameters) - SHARED
        assert own == set(VALUES.get(name, ())), name


@pytest.mark.parametrize(("name", "option"), CASES)
def test_an_option_changes_the_output_and_every_view_of_it(name: str, option: str) -> None:
    sizes, value = SIZES.get(name, {}), VALUES[name][option]
    before, after = made(name, sizes), made(name, sizes | {option: value})
    x = np.random.default_rng(1).normal(size=(N, WIDTH))
    out = after(x)
    if option in SAME_OUTPUT:
        np.testing.assert_allclose(out, before(x), rtol=0, atol=1e-12)
    elif out.shape == before(x).shape and option != "kv_dim":
        assert abs(out - before(x)).max() > 1e-3
    for index in (0, 4):
        last = after.explain(x, index=index).steps[-1].lines[-1].value
        np.testing.assert_allclose(last, out[index], rtol=0, atol=1e-11)
    cost = after.cost(N)
    assert int(cost.parameters) == after.parameters == sum(w.size for w in after.weights.values())
    mixing = after.token_mixing(x)
    if isinstance(after, RecurrentMechanism):
        state = after.initial_state(x)
        inputs, gate = after.projected(x, state)
        given = inputs["value"]
        values = given.T[..., None] if given.ndim == 2 else given
        mixed = mixing @ values
        mixed = mixed[..., 0].T if given.ndim == 2 else mixed
        np.testing.assert_allclose(after.join(mixed, gate), out, rtol=0, atol=1e-10)
    elif isinstance(after, AttentionMechanism) and name not in ("longformer", "differential"):
        # Rows of Longformer have different values, and those of Linformer are mixed already.
        values = after.heads(x, x, x)[2]
        if name == "linformer":
            values = after.linear("v_proj", x).reshape(N, 2, 4).transpose(1, 0, 2)
        if values.ndim == 3:
            values = values.repeat(2 // values.shape[0], 0)
        np.testing.assert_allclose(after.join(mixing @ values), out, rtol=0, atol=1e-11)
        if hasattr(after, "pairs_of_heads") and name not in ("linear", "performer", "linformer"):
            pairs = [int(p) for p, count in after.pairs_of_heads(N) for _ in range(int(count))]
            assert pairs == [np.count_nonzero(of_head) for of_head in mixing]
            assert int(cost["softmax_exp"]) == sum(pairs)
