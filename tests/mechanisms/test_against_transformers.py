"""Mechanisms beside the attention modules of transformers with the same weights, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    BigBirdConfig,
    BloomConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    GPTBigCodeConfig,
    LlamaConfig,
    LongformerConfig,
    MistralConfig,
    T5Config,
)
from transformers.models.big_bird import modeling_big_bird
from transformers.models.bloom.modeling_bloom import BloomAttention, build_alibi_tensor
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention
from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention
from transformers.models.gpt_bigcode.modeling_gpt_bigcode import GPTBigCodeAttention
from transformers.models.llama.modeling_llama import LlamaAttention
from transformers.models.longformer.modeling_longformer import LongformerSelfAttention
from transformers.models.mistral.modeling_mistral import MistralAttention
from transformers.models.t5.modeling_t5 import T5Attention

import qkv
from qkv.errors import ArgumentError, UnsupportedError
from qkv.mechanisms import (
    ALiBi,
    BigBird,
    Differential,
    GroupedQuery,
    Longformer,
    Mamba,
    MultiHeadLatent,
    MultiQuery,
    RelativeBias,
    Rotary,
    SlidingWindow,
)

TOLERANCE = 1e-10
WIDTH = 24


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some modules round scores to float32 before the softmax; here they keep their type."""
    softmax = torch.nn.functional.softmax

    def exact(x: Tensor, dim: int, dtype: Any = None) -> Tensor:
        return softmax(x, dim=dim)

    monkeypatch.setattr(torch.nn.functional, "softmax", exact)


def tokens(n: int) -> Tensor:
    return torch.randn(2, n, WIDTH, dtype=torch.float64)


def rotation(n: int, dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines in float64, laid out as Llama takes them."""
    angles = torch.arange(n)[:, None] * base ** (
        -torch.arange(0, dim, 2, dtype=torch.float64) / dim
    )
    both = torch.cat([angles, angles], -1)[None]
    return both.cos(), both.sin()


def causal(n: int) -> Tensor:
    """0 where a pair is allowed, else the lowest float."""
    lowest = torch.finfo(torch.float64).min
    return torch.full((n, n), lowest, dtype=torch.float64).triu(1)[None, None]


def same(
    mechanism: Any,
    module: Callable[[Tensor], Tensor],
    n: int = 11,
    of: torch.nn.Module | None = None,
) -> None:
    """Equal outputs, equal gradients of x and of the weights, and the same output from NumPy."""
    x = tokens(n)
    theirs_by_name = {} if of is None else dict(of.named_parameters())
    weights = getattr(mechanism, "weights", {})
    pairs = [
        (weight.requires_grad_(), parameter)
        for weight in weights.values()
        for parameter in theirs_by_name.values()
        if weight.shape == parameter.shape and torch.equal(weight, parameter)
    ]
    assert of is None or len(pairs) >= 3, "weights that were loaded as they are"
    cotangent = torch.randn(2, n, WIDTH, dtype=torch.float64)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    out, expected = mechanism(ours), module(theirs)
    torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
    (out * cotangent).sum().backward()
    (expected * cotangent).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=TOLERANCE)
    for weight, parameter in pairs:
        torch.testing.assert_close(weight.grad, parameter.grad, rtol=0, atol=TOLERANCE)
    for weight, _ in pairs:
        weight.requires_grad_(False).grad = None
    np.testing.assert_allclose(
        mechanism(x.numpy()), expected.detach().numpy(), rtol=0, atol=TOLERANCE
    )


@pytest.mark.slow
@pytest.mark.parametrize("decoder", [False, True])
def test_t5(decoder: bool) -> None:
    config = T5Config(
        d_model=WIDTH, d_kv=5, num_heads=3, relative_attention_num_buckets=8,
        relative_attention_max_distance=9, is_decoder=decoder, dropout_rate=0.0,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).double()
    torch.nn.init.normal_(module.relative_attention_bias.weight)
    mask = causal(11) if decoder else None
    same(RelativeBias.from_transformers(module), lambda x: module(x, mask=mask)[0], of=module)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_llama(kv_heads: int) -> None:
    config = LlamaConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=kv_heads, head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = LlamaAttention(config, 0).double()
    positions = rotation(11, 6, 500.0)
    for cls in (Rotary, GroupedQuery):
        same(
            cls.from_transformers(module), lambda x: module(x, positions, causal(11))[0], of=module
        )
        module.zero_grad()


@pytest.mark.slow
def test_mistral() -> None:
    config = MistralConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        sliding_window=3, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = MistralAttention(config, 0).double()
    positions, lowest = rotation(11, 6, 500.0), torch.finfo(torch.float64).min
    beyond = torch.full((11, 11), lowest, dtype=torch.float64).tril(-3)
    same(
        SlidingWindow.from_transformers(module),
        lambda x: module(x, positions, causal(11) + beyond)[0],
        of=module,
    )
    config.sliding_window = None
    with pytest.raises(ArgumentError, match="no sliding_window"):
        SlidingWindow.from_transformers(module)


@pytest.mark.slow
@pytest.mark.usefixtures("softmax_in_float64")
def test_bloom() -> None:
    module = BloomAttention(BloomConfig(hidden_size=WIDTH, n_head=6), layer_idx=0).double().eval()
    alibi = build_alibi_tensor(torch.ones(2, 11), 6, torch.float64)

    def forward(x: Tensor) -> Tensor:
        return module(x, torch.zeros_like(x), alibi, causal(11))[0]

    same(ALiBi.from_transformers(module), forward)


def test_gpt_bigcode() -> None:
    config = GPTBigCodeConfig(n_embd=WIDTH, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0)
    config._attn_implementation = "sdpa"
    module = GPTBigCodeAttention(config, layer_idx=0).double()
    same(
        MultiQuery.from_transformers(module),
        lambda x: module(x, attention_mask=causal(11))[0],
    )


@pytest.mark.slow
@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("global_tokens", [(), (0,), (2, 9)])
def test_longformer(global_tokens: tuple[int, ...]) -> None:
    config = LongformerConfig(
        hidden_size=WIDTH, num_attention_heads=3, attention_window=[4],
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    module = LongformerSelfAttention(config, 0).double()
    n = 12
    mask = torch.zeros(2, n, dtype=torch.float64)
    mask[:, list(global_tokens)] = 10000.0

    def forward(x: Tensor) -> Tensor:
        return module(
            x,
            attention_mask=mask,
            is_index_masked=mask < 0,
            is_index_global_attn=mask > 0,
            is_global_attn=bool(global_tokens),
        )[0]

    same(Longformer.from_transformers(module, global_tokens), forward, n, of=module)


def test_big_bird() -> None:
    config = BigBirdConfig(
        hidden_size=WIDTH, num_attention_heads=3, block_size=2, num_random_blocks=2,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    module = modeling_big_bird.BigBirdBlockSparseAttention(config, seed=3).double().train()
    n = 28
    blocks = n // 2
    # The module's own draw of the random blocks, of all but the first and the last row.
    np.random.seed(3)  # noqa: NPY002 - what the module itself draws from
    plan, count = module._get_rand_attn_plan(n, 2, 2)
    middle = np.stack(
        module._bigbird_block_rand_mask_with_head(
            n, n, 2, 2, 3, plan_from_length=plan, plan_num_rand_blocks=count
        )
    )
    random_blocks = np.zeros((3, blocks, 2), np.int64)
    random_blocks[:, 1:-1] = middle
    masks = modeling_big_bird.BigBirdModel.create_masks_for_block_sparse_attn(
        torch.ones(2, n, dtype=torch.float64), 2
    )
    names = ("from_blocked_mask", "band_mask", "from_mask", "to_mask")
    blocked, band, from_mask, to_mask = masks
    arguments = dict(zip(names, (blocked, band, from_mask, to_mask), strict=True))
    arguments["to_blocked_mask"] = blocked
    same(
        BigBird.from_transformers(module, random_blocks),
        lambda x: module(x, **arguments)[0],
        n,
        of=module,
    )


def deepseek(**more: Any) -> DeepseekV3Attention:
    config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4, kv_lora_rank=8,
        qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 300.0}, **more,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = DeepseekV3Attention(config, 0).double()
    # Its own norm computes in float32; torch's keeps the type.
    for name in ("q_a_layernorm", "kv_a_layernorm"):
        norm = getattr(module, name, None)
        if norm is not None:
            exact = torch.nn.RMSNorm(norm.weight.shape[0], norm.variance_epsilon).double()
            torch.nn.init.normal_(exact.weight, 1.0, 0.2)
            setattr(module, name, exact)
    return module


@pytest.mark.parametrize("q_lora_rank", [None, 10])
@pytest.mark.parametrize("interleave", [True, False])
def test_deepseek_v3(q_lora_rank: int | None, interleave: bool) -> None:
    module = deepseek(q_lora_rank=q_lora_rank, rope_interleave=interleave)
    positions = rotation(11, 4, 300.0)

    def forward(x: Tensor) -> Tensor:
        return module(x, positions, causal(11))[0]

    mechanism = MultiHeadLatent.from_transformers(module)
    same(mechanism, forward, of=module)
    same(mechanism.absorbed, forward)


def test_deepseek_decodes_in_the_absorbed_form() -> None:
    module = deepseek(q_lora_rank=None)
    mechanism = MultiHeadLatent.from_transformers(module)
    x = tokens(7)
    latents, outputs = None, []
    for t in range(7):
        out, latents = mechanism.step(x[:, t : t + 1], latents)
        outputs.append(out)
    expected = module(x, rotation(7, 4, 300.0), causal(7))[0]
    torch.testing.assert_close(torch.cat(outputs, 1), expected, rtol=0, atol=TOLERANCE)
    assert latents is not None
    assert latents.shape == (2, 7, 12)


def test_diff_llama() -> None:
    config = DiffLlamaConfig(
        hidden_size=WIDTH, num_attention_heads=8, num_key_value_heads=4, head_dim=6,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = DiffLlamaAttention(config, layer_idx=2).double()
    positions = rotation(11, 6, 500.0)
    # The module takes exp(lambda_q . lambda_k) in float32, where only exp(0) is exact.
    with torch.no_grad():
        for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
            getattr(module, name).zero_()
    same(
        Differential.from_transformers(module),
        lambda x: module(x, positions, causal(11))[0],
        of=module,
    )


def test_the_lambda_of_diff_llama_to_its_own_rounding() -> None:
    config = DiffLlamaConfig(
        hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
        lambda_std_dev=0.5, rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    module = DiffLlamaAttention(config, layer_idx=2).double()
    x = tokens(11)
    expected = module(x, rotation(11, 6, 500.0), causal(11))[0]
    out = Differential.from_transformers(module)(x)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


def test_a_module_without_the_weights_is_named() -> None:
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4)
    with pytest.raises(ArgumentError, match="LlamaAttention has no query"):
        Longformer.from_transformers(_with_sizes(LlamaAttention(config, 0)))


def _with_sizes(module: Any) -> Any:
    module.embed_dim, module.num_heads, module.one_sided_attn_window_size = WIDTH, 4, 2
    return module


def test_the_weights_are_copies() -> None:
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4)
    module = LlamaAttention(config, 0)
    mechanism = Rotary.from_transformers(module)
    with torch.no_grad():
        module.q_proj.weight.zero_()
    assert mechanism.weights["q_proj.weight"].abs().sum() > 0
    assert isinstance(mechanism.rope, qkv.RoPE)


# Models that do more than Llama, each beside its whole model, which makes masks and positions.


def whole(name: str, **options: Any) -> Any:
    """A model of two layers with wide weights, and what its attention modules get and give."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, pad_token_id=0,
        num_attention_heads=4, num_key_value_heads=2, **options,
    )  # fmt: skip
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(config).eval()
    for parameter_name, parameter in model.named_parameters():
        std, mean = (0.3, 0.0) if parameter.ndim > 1 else (0.4, float("norm" in parameter_name))
        torch.nn.init.normal_(parameter, mean, std)
    seen: list[tuple[Any, Tensor, Tensor]] = []

    def see(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        seen.append((module, args[0] if args else kwargs["hidden_states"], out[0]))

    for module in list(model.modules()):
        if type(module).__name__.endswith("Attention"):
            module.register_forward_hook(see, with_kwargs=True)
    with torch.no_grad():
        model(input_ids=torch.randint(1, 60, (2, 24)))
    return seen


WINDOW = {"sliding_window": 5}
ALL: list[tuple[str, dict[str, Any], list[Any]]] = [
    ("GptOss", {"head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1, **WINDOW},
     [SlidingWindow, GroupedQuery]),
    ("Gemma2", {"head_dim": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 3.0, **WINDOW},
     [SlidingWindow, GroupedQuery]),
    ("Gemma3Text", {"head_dim": 8, **WINDOW,
                    "layer_types": ["sliding_attention", "full_attention"]},
     [SlidingWindow, Rotary]),
    ("Qwen2", {}, [GroupedQuery, Rotary]),
    ("Qwen3", {"head_dim": 8}, [GroupedQuery, Rotary]),
    ("Olmo2", {}, [GroupedQuery, Rotary]),
    ("Cohere", {}, [GroupedQuery, Rotary]),
    ("Cohere2", {"head_dim": 8, **WINDOW, "layer_types": ["sliding_attention", "full_attention"]},
     [SlidingWindow, GroupedQuery]),
    ("Helium", {"head_dim": 8}, [GroupedQuery, Rotary]),
    ("Ernie4_5", {"head_dim": 8}, [GroupedQuery, Rotary]),
    ("Glm", {"head_dim": 8}, [GroupedQuery, Rotary]),
    ("Llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0,
                                   "original_max_position_embeddings": 16}},
     [GroupedQuery, Rotary]),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options", "loaders"), ALL, ids=[name for name, *_ in ALL])
def test_what_a_loader_accepts_is_what_the_layer_computes(name, options, loaders) -> None:
    for (module, x, out), cls in zip(whole(name, **options), loaders, strict=True):
        found = cls.from_transformers(module)(x)
        torch.testing.assert_close(found, out, rtol=0, atol=2e-5 * float(out.abs().max()))


def modules_of(name: str, **options: Any) -> Any:
    return whole(name, **options)[0][0]


@pytest.mark.parametrize(
    ("cls", "name", "options", "words"),
    [
        (GroupedQuery, "Mistral", WINDOW, "a window of 5 tokens"),
        (Rotary, "GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1, **WINDOW}, "window"),
        (SlidingWindow, "Llama", {}, "no sliding_window"),
        (GroupedQuery, "Cohere", {"use_qk_norm": True}, "not an RMSNorm"),
        (GroupedQuery, "NanoChat", {}, "computes something that grouped-query does not"),
        (GroupedQuery, "Olmo", {"clip_qkv": 0.5}, "computes something that grouped-query does not"),
        (GroupedQuery, "Llama",
         {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "change with the length of the text"),
    ],
)  # fmt: skip
def test_what_a_loader_cannot_represent_is_refused(cls, name, options, words) -> None:
    with pytest.raises((UnsupportedError, ArgumentError), match=words):
        cls.from_transformers(modules_of(name, **options))


def test_following_the_advice_for_frequencies_that_change_gives_the_layer() -> None:
    """The error names a call; its result is compared with the whole model."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    module, x, out = whole("Llama", rope_parameters=rope)[0]
    with pytest.raises(UnsupportedError) as caught:
        GroupedQuery.from_transformers(module)
    assert "rope=qkv.RoPE.from_hf_config(module.config, seq_len=...)" in caught.value.action
    given = qkv.RoPE.from_hf_config(module.config, seq_len=x.shape[1])
    found = GroupedQuery.from_transformers(module, rope=given)(x)
    torch.testing.assert_close(found, out, rtol=0, atol=2e-5 * float(out.abs().max()))


def test_other_classes_of_t5_and_of_mamba_are_refused() -> None:
    from transformers.models.longt5.modeling_longt5 import LongT5LocalAttention

    local = LongT5LocalAttention(
        transformers.LongT5Config(d_model=WIDTH, d_kv=5, num_heads=3), True
    )
    with pytest.raises(UnsupportedError, match="attributes that its loader does not know"):
        RelativeBias.from_transformers(local)
    config = transformers.FalconMambaConfig(hidden_size=WIDTH, state_size=8, num_hidden_layers=1)
    with pytest.raises(UnsupportedError, match="computes something that mamba does not"):
        Mamba.from_transformers(transformers.FalconMambaModel(config).layers[0].mixer)


def test_weights_that_are_offloaded_are_refused() -> None:
    config = LlamaConfig(hidden_size=WIDTH, num_attention_heads=4, num_key_value_heads=4)
    with torch.device("meta"):
        module = LlamaAttention(config, 0)
    with pytest.raises(UnsupportedError, match="device meta"):
        Rotary.from_transformers(module)
