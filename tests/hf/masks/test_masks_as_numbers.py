"""Models that compute with the mask they are given, in the way they do with eager's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import InDouble, padding  # noqa: E402
from test_masks import PATTERNS  # noqa: E402
from transformers.masking_utils import eager_mask, sdpa_mask  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.masks import state_mask  # noqa: E402

qkv.hf.enable()

PICTURE = 100


def wide(model: Any) -> Any:
    """Random weights with which attention is far from uniform."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            of_lookup = "embed" in name
            fan_in = 1 if of_lookup or parameter.ndim < 2 else parameter.shape[1]
            drawn = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
            parameter.copy_(drawn * 1.6 / fan_in**0.5 if parameter.ndim > 1 else drawn * 0.2 + 1)
    return model.eval()


@cache
def deepseek_v4() -> Any:
    config = transformers.DeepseekV4Config(
        vocab_size=128, hidden_size=32, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, q_lora_rank=16, o_lora_rank=8, o_groups=2,
        index_n_heads=4, index_head_dim=8, index_topk=4, sliding_window=6, n_routed_experts=4,
        n_shared_experts=1, num_experts_per_tok=2, moe_intermediate_size=16,
        max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    )  # fmt: skip
    config._experts_implementation = "eager"
    return wide(transformers.DeepseekV4ForCausalLM(config).double())


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_dense_mask_is_that_of_eager(pattern: str) -> None:
    """Made without vmap, which does not run inside of an operation on a tensor subclass."""
    seen = torch.ones(3, 14, dtype=torch.bool)
    seen[1, :4] = False
    arguments = {
        "batch_size": 3, "q_length": 6, "kv_length": 14, "q_offset": 8,
        "mask_function": PATTERNS[pattern], "attention_mask": seen,
    }  # fmt: skip
    for function, config, options in (
        (sdpa_mask, transformers.LlamaConfig(), {"allow_is_causal_skip": False}),
        (eager_mask, deepseek_v4().config, {"dtype": torch.float16}),
    ):
        expected = function(**arguments, **options)
        mask = state_mask(**arguments, dtype=torch.float16, config=config, use_vmap=True)
        assert mask.dtype is expected.dtype
        assert torch.equal(torch.cat([mask, mask], -1), torch.cat([expected, expected], -1))


@pytest.mark.slow
def test_deepseek_v4() -> None:
    """The layers of DeepSeek V4 append to the mask what they add to scores, in the mask's type."""
    model = deepseek_v4()
    ids = torch.randint(3, 100, (1, 17), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("eager", "qkv"):
        model.set_attn_implementation(name)
        with torch.no_grad(), InDouble():
            logits = model(ids, use_cache=False).logits
            tokens = model.generate(ids, max_new_tokens=6, do_sample=False)
        found[name] = logits, tokens
    largest = float(found["eager"][0].abs().max())
    assert float((found["qkv"][0] - found["eager"][0]).abs().max()) < 1e-9 * largest
    assert torch.equal(found["qkv"][1], found["eager"][1])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"dtype": "int8"}])
def test_a_model_that_changes_the_values_of_its_cache(options: dict[str, Any]) -> None:
    """DiffLlama: its keys lie in pages or as int8, its values are a tensor of its own."""
    config = transformers.DiffLlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.DiffLlamaForCausalLM(config).eval()
    ids = torch.randint(3, 60, (2, 9), generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("eager", "qkv"):
        model.set_attn_implementation(name)
        cache = qkv.hf.Cache(config, **options) if name == "qkv" else None
        with torch.no_grad():
            parts = [ids[:, :6], ids[:, 6:7], ids[:, 7:8], ids[:, 8:]]
            cache = cache or transformers.DynamicCache(config=config)
            found[name] = torch.cat([model(part, cache=cache).logits for part in parts], 1)
    bound = 0.02 if "dtype" in options else 1e-4
    largest = float(found["eager"].abs().max())
    assert float((found["qkv"] - found["eager"]).abs().max()) < bound * largest


def gemma4() -> tuple[Any, dict[str, Any]]:
    """Pictures inside text, the tokens of each of which attend to one another."""
    text = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8,
        "sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128,
        "num_kv_shared_layers": 1, "use_bidirectional_attention": "vision", "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "patch_size": 6,
        "pooling_kernel_size": 2, "position_embedding_size": 64,
    }  # fmt: skip
    special = {
        "image_token_id": PICTURE, "boi_token_id": 101, "eoi_token_id": 102, "video_token_id": 103,
        "audio_token_id": 104, "boa_token_id": 105, "eoa_token_index": 106,
    }  # fmt: skip
    config = transformers.Gemma4Config(
        text_config=text, vision_config=vision, audio_config=None, **special
    )
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(3, 90, (2, 14), generator=generator)
    ids[:, 4:8] = PICTURE
    places = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
    return wide(transformers.Gemma4ForConditionalGeneration(config)), {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "pixel_values": torch.rand(2, 16, 3 * 36, generator=generator),
        "image_position_ids": places.flip(-1).reshape(1, 16, 2).expand(2, 16, 2).contiguous(),
        "mm_token_type_ids": (ids == PICTURE).long(),
    }


def test_gemma4_generates_from_pictures() -> None:
    """Gemma 4 slices its masks, which makes them dense inside of an operation."""
    model, inputs = gemma4()
    found = {}
    for name in ("eager", "qkv"):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found[name] = model.generate(
                **inputs, max_new_tokens=4, do_sample=False, eos_token_id=None, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
    assert torch.equal(found["qkv"].sequences, found["eager"].sequences)
    logits, expected = (torch.stack(found[name].logits) for name in ("qkv", "eager"))
    assert float((logits - expected).abs().max()) < 1e-3 * float(expected.abs().max())


@pytest.mark.slow
def test_a_mask_of_the_users_over_pages() -> None:
    """The mask has a column for each token, although the last page has room for more."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, initializer_range=0.4,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(3, 60, (3, 9), generator=torch.Generator().manual_seed(1))
    allowed = torch.ones(9, 9, dtype=torch.bool).tril()
    allowed = allowed & padding("left", 9).bool()[:, None, None] | torch.eye(9, dtype=torch.bool)
    for mask in (allowed, torch.where(allowed, 0.0, torch.finfo(torch.float32).min)):
        model.set_attn_implementation("eager")
        added = torch.where(allowed, 0.0, torch.finfo(torch.float32).min)
        with torch.no_grad():
            expected = model(ids, attention_mask=added, use_cache=False).logits
        model.set_attn_implementation("qkv")
        cache = qkv.hf.Cache(config, page_size=4)
        with torch.no_grad():
            first = model(ids[:, :7], attention_mask=mask[:, :, :7, :7], cache=cache).logits
            rest = model(ids[:, 7:], attention_mask=mask[:, :, 7:], cache=cache).logits
        found = torch.cat([first, rest], 1)
        assert float((found - expected).abs().max()) < 1e-4 * float(expected.abs().max())
