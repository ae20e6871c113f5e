"""Scaled rotary embeddings against transformers: frequencies, factors, and whole attention."""

import json
import math
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    Gemma3TextConfig,
    LlamaConfig,
    Phi3Config,
    modeling_rope_utils,
)
from transformers.models.gemma4.modeling_gemma4 import Gemma4TextRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.phi3.modeling_phi3 import Phi3Attention

import qkv

TYPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "yarn without truncation": {
        "factor": 32.0, "original_max_position_embeddings": 128, "truncate": False,
        "beta_fast": 20.0, "beta_slow": 2.0,
    },
    "yarn with mscale": {
        "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn with a factor": {
        "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.8,
    },
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "longrope": {
        "factor": 8.0, "original_max_position_embeddings": 64, "short_factor": None,
        "long_factor": None,
    },
    "longrope with a factor": {
        "original_max_position_embeddings": 64, "short_factor": None, "long_factor": None,
        "attention_factor": 1.25,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
each_type = pytest.mark.parametrize("name", TYPES)

MAX_POSITION = 512


def parameters(name, dim):
    """`rope_parameters` of a configuration."""
    given = dict(TYPES[name], rope_type=name.split()[0], rope_theta=50000.0)
    if "longrope" in name:
        rng = np.random.default_rng(3)
        given["short_factor"] = rng.uniform(1, 2, dim // 2).tolist()
        given["long_factor"] = rng.uniform(1, 40, dim // 2).tolist()
    return given


def config_of(name, head_dim=32, kind=LlamaConfig, dim=None, **more):
    return kind(
        hidden_size=4 * head_dim, num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=MAX_POSITION, rope_parameters=parameters(name, dim or head_dim),
        pad_token_id=0, **more,
    )  # fmt: skip


class WideTorch:
    """torch in which the functions of transformers find float64 where they ask for float32."""

    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


def transformers_frequencies(config, seq_len=None):
    rope_type = config.rope_parameters["rope_type"]
    if rope_type == "default":
        dim, base = config.head_dim, config.rope_parameters["rope_theta"]
        return 1.0 / (base ** (np.arange(0, dim, 2) / dim)), 1.0
    function = modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type]
    inv_freq, factor = function(config, device="cpu", seq_len=seq_len)
    return inv_freq.numpy(), factor


LENGTHS = pytest.mark.parametrize("seq_len", [None, 40, 700])


@each_type
@LENGTHS
@pytest.mark.parametrize("head_dim", [32, 128])
def test_frequencies_of_transformers_in_float64(name, seq_len, head_dim, monkeypatch) -> None:
    monkeypatch.setattr(modeling_rope_utils, "torch", WideTorch())
    config = config_of(name, head_dim)
    inv_freq, factor = transformers_frequencies(config, seq_len)
    rope = qkv.RoPE.from_hf_config(config, seq_len=seq_len)
    # transformers takes powers of LongRoPE in float32 whatever the type: one, and one product.
    rtol = 2 * 2.0**-23 if "longrope" in name else 1e-10
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=rtol, atol=0)
    np.testing.assert_allclose(rope.attention_factor, factor, rtol=1e-10)


@each_type
@LENGTHS
def test_frequencies_of_transformers_as_it_computes_them(name, seq_len) -> None:
    """The exponent of the base is rounded to float32, which counts log(base) times; then five
    operations."""
    config = config_of(name, 80)
    inv_freq, factor = transformers_frequencies(config, seq_len)
    rope = qkv.RoPE.from_hf_config(config.to_dict(), seq_len=seq_len)
    rtol = (math.log(50000.0) + 5) * 2.0**-24
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=rtol, atol=0)
    np.testing.assert_allclose(rope.attention_factor, factor, rtol=1e-10)


def constructed(name, dim):
    """The same by the constructor, with the parameters of TYPES as arguments."""
    given = parameters(name, dim)
    kind, base = given.pop("rope_type"), given.pop("rope_theta")
    if kind == "dynamic":
        given.update(seq_len=700, max_position_embeddings=MAX_POSITION)
    if kind == "longrope":
        given.update(seq_len=700)
        given.setdefault("factor", 8.0)
    maker = {"dynamic": qkv.RoPE.dynamic_ntk}.get(kind) or getattr(qkv.RoPE, kind)
    return maker(dim, base=base, layout="interleaved", **given)


@pytest.mark.parametrize("name", [n for n in TYPES if n not in ("default", "proportional")])
def test_constructors_take_what_configurations_hold(name) -> None:
    rope, config = constructed(name, 32), config_of(name)
    read = qkv.RoPE.from_hf_config(config, seq_len=700)
    np.testing.assert_array_equal(rope.inv_freq, read.inv_freq)
    assert rope.attention_factor == read.attention_factor
    assert (rope.layout, read.layout) == ("interleaved", "half_split")


@pytest.mark.parametrize("factor", [1e308, 1e280])
def test_a_base_beyond_float64_is_refused(factor: float) -> None:
    """The power overflows, or its product with the base does."""
    with pytest.raises(qkv.ArgumentError, match="beyond the range of float64"):
        qkv.RoPE.ntk_aware(32, factor, base=1e12)


@pytest.mark.parametrize("given", [[1, [2]], ["a"] * 4, [1j] * 4, [10**400] * 4])
def test_frequencies_that_are_no_real_numbers_are_refused(given: list) -> None:
    x = np.ones((4, 8), np.float32)
    with pytest.raises(qkv.DTypeError, match="inv_freq"):
        qkv.attention(x, x, x, qkv.RoPE(inv_freq=given))
    with pytest.raises(qkv.DTypeError, match="inv_freq"):
        qkv.RoPE(inv_freq=given).rotate(x, 0)


def test_ntk_aware_is_dynamic_at_the_length_of_its_factor(monkeypatch) -> None:
    monkeypatch.setattr(modeling_rope_utils, "torch", WideTorch())
    config = config_of("dynamic")
    config.rope_parameters["factor"] = 1.0
    inv_freq, _ = transformers_frequencies(config, seq_len=6 * MAX_POSITION)
    rope = qkv.RoPE.ntk_aware(32, 6.0, base=50000.0)
    np.testing.assert_allclose(rope.inv_freq, inv_freq, rtol=1e-10)
    # The fastest pair stays, the slowest is interpolated by the whole factor.
    plain = 50000.0 ** (-np.arange(16) / 16)
    np.testing.assert_allclose(rope.inv_freq[[0, -1]], plain[[0, -1]] / [1, 6], rtol=1e-12)


def test_nothing_changes_within_the_length_of_training() -> None:
    plain = 10000.0 ** (-np.arange(16) / 16)
    for seq_len in (1, 512):
        np.testing.assert_array_equal(
            qkv.RoPE.dynamic_ntk(32, 4.0, 512, seq_len).inv_freq, qkv.RoPE().frequencies(32)
        )
    np.testing.assert_allclose(qkv.RoPE.linear(32, 1.0).inv_freq, plain, rtol=1e-15)
    yarn = qkv.RoPE.yarn(32, 1.0, 512)
    np.testing.assert_allclose(yarn.inv_freq, plain, rtol=1e-15)
    assert yarn.attention_factor == 1.0


# --- whole attention -----------------------------------------------------------------------------


def wide(module):
    """Weights so large that few keys share the weight of a row."""
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.25)
    return module.double()


def their_turns(inv_freq, factor, length):
    """cos and sin as transformers makes them, in float64."""
    angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.as_tensor(inv_freq)
    both = torch.cat([angles, angles], -1)[None]
    return both.cos() * factor, both.sin() * factor


def heads_of(rows, config):
    return rows.unflatten(-1, (-1, config.head_dim)).transpose(1, 2)


def whole_attention(layer, config, projections, monkeypatch):
    """Output and gradients of a layer of transformers, and of qkv on its projections.

    Its eager form takes the softmax in float32; torch's own function stays in float64.
    """
    length = 48
    hidden = torch.randn(2, length, config.hidden_size, dtype=torch.float64, requires_grad=True)
    future = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)
    rope, rtol = qkv.RoPE.from_hf_config(config), 1e-10
    with monkeypatch.context() as patched:
        patched.setattr(modeling_rope_utils, "torch", WideTorch())
        inv_freq, factor = transformers_frequencies(config)
    if config.rope_parameters["rope_type"] == "longrope":
        rope = replace(rope, inv_freq=inv_freq)  # transformers rounds these to float32
    turns = their_turns(inv_freq, factor, length)
    expected, _ = layer(hidden, turns, attention_mask=future[None, None])

    q, k, v = (heads_of(rows, config) for rows in projections(layer, hidden))
    out = qkv.attention(q, k, v, rope, qkv.Causal())
    # The case is only worth something if the weights are far from uniform.
    seen = qkv.inspect(*(t.detach() for t in (q, k, v)), rope, qkv.Causal())
    assert seen.max_weight[:, :, -8:].mean() > 0.3
    got = layer.o_proj(out.transpose(1, 2).flatten(2))
    torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * expected.abs().max().item())

    direction = torch.randn_like(expected)
    leaves = [hidden, *layer.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(got, leaves, direction),
        torch.autograd.grad(expected, leaves, direction),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol * theirs.abs().max().item())


@pytest.mark.slow
@pytest.mark.sampled("name", list(TYPES), one_in=4)
def test_llama_attention(name, monkeypatch) -> None:
    config = config_of(name, attn_implementation="sdpa")
    layer = wide(LlamaAttention(config, layer_idx=0))

    def projections(layer, hidden):
        return layer.q_proj(hidden), layer.k_proj(hidden), layer.v_proj(hidden)

    whole_attention(layer, config, projections, monkeypatch)


def test_phi3_attention_where_a_part_of_each_head_is_rotated(monkeypatch) -> None:
    """The attention factor holds for that part alone, so it is no scale of the scores."""
    config = config_of(
        "longrope", kind=Phi3Config, dim=16, partial_rotary_factor=0.5, attn_implementation="sdpa"
    )
    rope = qkv.RoPE.from_hf_config(config)
    assert (len(rope.inv_freq), rope.attention_factor > 1.1) == (8, True)
    layer = wide(Phi3Attention(config, layer_idx=0))

    def projections(layer, hidden):
        return layer.qkv_proj(hidden).split([128, 64, 64], -1)

    whole_attention(layer, config, projections, monkeypatch)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
def test_the_factor_is_a_value_and_not_structure(backend) -> None:
    """A call that differs in nothing else from an earlier one has its own factor."""
    q, k, v = np.random.default_rng(0).normal(size=(3, 2, 20, 16))
    inv_freq = qkv.RoPE().frequencies(16)
    for factor in (1.0, 1.5, 0.5, 1.5):
        rope = qkv.RoPE(inv_freq=inv_freq, attention_factor=factor)
        got = qkv.attention(q, k, v, rope, backend=backend)
        expected = qkv.attention(q, k, v, qkv.RoPE(), scale=factor**2 / 4, backend=backend)
        np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


# --- configurations ------------------------------------------------------------------------------


def test_config_json_of_every_age() -> None:
    """Fields as models have published them; frequencies by the formula of each paper."""
    old = {
        "hidden_size": 4096, "num_attention_heads": 32, "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "rope_scaling": {
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
    }  # fmt: skip
    rope = qkv.RoPE.from_hf_config(json.loads(json.dumps(old)))
    np.testing.assert_array_equal(rope.inv_freq, qkv.RoPE.llama3(128).inv_freq)
    neox = {"hidden_size": 64, "num_attention_heads": 2, "rotary_pct": 0.25, "rotary_emb_base": 1e3}
    np.testing.assert_allclose(
        qkv.RoPE.from_hf_config(neox).inv_freq, [1.0, 1e3**-0.25, 1e3**-0.5, 1e3**-0.75]
    )
    gptj = {"n_embd": 4096, "n_head": 16, "rotary_dim": 64}
    assert qkv.RoPE.from_hf_config(gptj, layout="interleaved").inv_freq.shape == (32,)
    deepseek = {
        "qk_rope_head_dim": 64, "rope_interleave": True, "rope_theta": 10000,
        "max_position_embeddings": 163840,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32,
            "beta_slow": 1, "original_max_position_embeddings": 4096,
        },
    }  # fmt: skip
    rope = qkv.RoPE.from_hf_config(deepseek)
    assert (rope.layout, rope.attention_factor, len(rope.inv_freq)) == ("interleaved", 1.0, 32)


def test_layers_that_differ() -> None:
    config = Gemma3TextConfig(head_dim=16)
    with pytest.raises(qkv.ArgumentError, match="sliding_attention"):
        qkv.RoPE.from_hf_config(config)
    for layer_type in ("full_attention", "sliding_attention"):
        base = config.rope_parameters[layer_type]["rope_theta"]
        rope = qkv.RoPE.from_hf_config(config, layer_type=layer_type)
        np.testing.assert_allclose(rope.inv_freq, base ** (-np.arange(8) / 8), rtol=1e-14)


@pytest.mark.parametrize(
    ("config", "fact"),
    [
        ({}, "num_attention_heads"),
        ({"num_attention_heads": 4}, "hidden_size"),
        ({"head_dim": 7}, "7 entries"),
        ({"head_dim": 8, "rope_scaling": {"rope_type": "su"}}, "'su'"),
        ({"head_dim": 8, "rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"head_dim": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "max_position"),
        ({"head_dim": 8, "rope_scaling": "linear"}, "str"),
        (
            {"head_dim": 8, "max_position_embeddings": 64, "rope_scaling": {
                "rope_type": "longrope", "factor": 2.0, "short_factor": [1, 1, 1, 1]}},
            "long_factor",
        ),
    ],
)  # fmt: skip
def test_configurations_that_say_too_little(config, fact) -> None:
    with pytest.raises(qkv.ArgumentError) as caught:
        qkv.RoPE.from_hf_config(config)
    assert fact in caught.value.fact
    assert caught.value.action


@pytest.mark.parametrize(
    ("model", "layer_type"),
    [("mistral4", None), ("deepseek_v4", "main"), ("dots3_note_text", "sliding_attention")],
)
def test_the_rotated_part_of_latent_attention_is_not_divided_again(model, layer_type):
    """`partial_rotary_factor` says there how much of a whole head `qk_rope_head_dim` is."""
    config = CONFIG_MAPPING[model]()
    folder = type(config).__module__.rpartition(".")[0]
    code = import_module(f"{folder}.modeling_{folder.rpartition('.')[2]}")
    name = next(n for n in vars(code) if n.endswith("RotaryEmbedding"))
    rotary = getattr(code, name)(config)
    prefix = f"{layer_type}_" if layer_type else ""
    expected = getattr(rotary, f"{prefix}inv_freq")
    rope = qkv.RoPE.from_hf_config(config, layer_type=layer_type)
    np.testing.assert_allclose(rope.inv_freq, expected, rtol=2e-6)


def test_layers_with_heads_of_different_sizes_are_read_from_their_own_configuration():
    config = CONFIG_MAPPING["gemma4_text"]()
    with pytest.raises(qkv.ArgumentError, match="differ in their head_dim") as caught:
        qkv.RoPE.from_hf_config(config, layer_type="full_attention")
    assert "per_layer_config" in str(caught.value)
    rotary = Gemma4TextRotaryEmbedding(config)
    for layer_type in ("full_attention", "sliding_attention"):
        of_layer = config.per_layer_config[config.layer_types.index(layer_type)]
        rope = qkv.RoPE.from_hf_config(of_layer, layer_type=layer_type)
        expected = getattr(rotary, f"{layer_type}_inv_freq")
        np.testing.assert_allclose(rope.inv_freq, expected, rtol=2e-6)
