"""Keywords of attention that are not computed here are refused; those without effect are taken."""

from __future__ import annotations

from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import EXPERTS, GROUPED, LATENT, SIZES, attending, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.attention import attend  # noqa: E402

qkv.hf.enable()

IDS = torch.arange(3, 19)[None]
SPARSE = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rotary_dim": 4,
    "dense_intermediate_size": 48,
    "shared_intermediate_size": 16,
    "mlp_layer_types": ["dense", "dense"],
    "layer_types": ["minimax_m3_sparse"] * 2,
    "index_n_heads": 2,
    "index_head_dim": 8,
    "index_block_size": 2,
    "index_topk_blocks": 2,
    "index_local_blocks": 1,
}
INDEXED = {"index_topk": 4, "index_n_heads": 4, "index_head_dim": 8}
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "block_indices": (
        "MiniMaxM3VLTextModel",
        "MiniMaxM3VLTextConfig",
        {**SIZES, **EXPERTS, **SPARSE},
    ),
    "sinks": (
        "Inkling2ForCausalLM",
        "Inkling2TextConfig",
        {**GROUPED, "moe_intermediate_size": 16},
    ),
    "indices": ("DeepseekV32ForCausalLM", "DeepseekV32Config", {**SIZES, **LATENT, **INDEXED}),
}


@pytest.mark.parametrize("keyword", REFUSED)
def test_models_that_hand_over_more_than_is_computed(keyword: str) -> None:
    """Eager computes it, sparse layers and sinks of each query; to drop it changes the logits."""
    model_name, config_name, kwargs = REFUSED[keyword]
    if not hasattr(transformers, model_name):
        pytest.skip(f"this transformers has no {model_name}")
    config = getattr(transformers, config_name)(**kwargs)
    config._experts_implementation = "eager"
    model = getattr(transformers, model_name)(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        model(IDS)
        model.set_attn_implementation("qkv")
        with pytest.raises(qkv.UnsupportedError, match=rf"Attention passes {keyword}= ") as error:
            model(IDS)
    with pytest.raises(qkv.UnsupportedError, match=f"passes {keyword}= "):
        qkv.hf.check(model, IDS)
    assert 'attn_implementation="eager"' in error.value.action
    assert error.value.seen[0][0] == keyword


def test_a_sparse_layer_that_chooses_every_key() -> None:
    """A text that is shorter than what the layer may choose."""
    _, _, kwargs = REFUSED["indices"]
    config = transformers.DeepseekV32Config(**{**kwargs, "index_topk": 16})
    config._experts_implementation = "eager"
    model = transformers.DeepseekV32ForCausalLM(config).double().eval()
    logits = {}
    for implementation in ("eager", "qkv"):
        with attending(model, implementation), torch.no_grad():
            logits[implementation] = model(IDS).logits
    torch.testing.assert_close(logits["qkv"], logits["eager"], rtol=1e-10, atol=1e-10)


def test_an_unknown_keyword() -> None:
    rows = torch.randn(1, 2, 3, 4)
    layer = torch.nn.Identity()
    with pytest.raises(qkv.UnsupportedError, match="Identity passes softcapp= to attention"):
        attend(layer, rows, rows, rows, None, softcapp=3.0)
    expected, _ = attend(layer, rows, rows, rows, None)
    found, _ = attend(layer, rows, rows, rows, None, softcapp=None, sinks=None)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_head_mask(family: str) -> None:
    """Eager attention ignores a head mask, so that the advice is what does switch heads off."""
    model = model_of(family)
    mask = torch.ones(model.config.num_hidden_layers, model.config.num_attention_heads)
    mask[0, 1] = 0
    with attending(model, "qkv"), torch.no_grad():
        with pytest.raises(qkv.UnsupportedError, match="passes head_mask= ") as error:
            model(IDS, head_mask=mask)
        assert 'qkv.hf.intervene(model, {(layer, head): "off"})' in error.value.action
        whole = model(IDS).logits
        with qkv.hf.intervene(model, {(0, 1): "off"}):
            assert not torch.allclose(model(IDS).logits, whole)


def test_keywords_for_other_parts_of_a_model() -> None:
    """What tokenizers, collators and transformers itself pass on reaches every layer."""
    model = model_of("llama")
    kwargs = {
        "token_type_ids": torch.zeros_like(IDS),
        "special_tokens_mask": torch.zeros_like(IDS),
        "cache_position": torch.arange(16),
        "num_items_in_batch": torch.tensor(16),
        "use_cache": False,
        "return_dict": True,
        "output_hidden_states": True,
        "output_router_logits": False,
    }
    logits = {}
    for implementation in ("eager", "qkv"):
        with attending(model, implementation), torch.no_grad():
            logits[implementation] = model(input_ids=IDS, **kwargs).logits
    torch.testing.assert_close(logits["qkv"], logits["eager"], rtol=1e-10, atol=1e-10)


def test_gemma4_with_an_assistant_that_reads_its_keys() -> None:
    """The model is asked for its keys by a keyword that reaches every layer."""
    if not hasattr(transformers, "Gemma4AssistantForCausalLM"):
        pytest.skip("this transformers has no assistant of Gemma 4")
    kwargs = {
        **GROUPED,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 6,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    config = transformers.Gemma4TextConfig(
        **{**kwargs, "num_hidden_layers": 4, "layer_types": kwargs["layer_types"] * 2},
        num_kv_shared_layers=2,
    )
    of_assistant = transformers.Gemma4AssistantConfig(
        text_config=transformers.Gemma4TextConfig(**kwargs, num_kv_shared_layers=2),
        backbone_hidden_size=config.hidden_size,
    )
    torch.manual_seed(0)
    model = transformers.Gemma4ForCausalLM(config).double().eval()
    assistant = transformers.Gemma4AssistantForCausalLM(of_assistant).double().eval()
    assistant.generation_config.num_assistant_tokens = 3
    with torch.no_grad():
        for parameter in (*model.parameters(), *assistant.parameters()):
            if parameter.ndim > 1:
                parameter.normal_(0, 1.6 / parameter.shape[1] ** 0.5)
    drafted: dict[str, list[Any]] = {}
    outputs = {}
    for implementation in ("eager", "qkv"):
        drafts = drafted[implementation] = []
        hook = assistant.register_forward_hook(lambda *call, kept=drafts: kept.append(call[-1]))
        with attending(assistant, implementation), attending(model, implementation):
            outputs[implementation] = model.generate(
                IDS, assistant_model=assistant, max_new_tokens=10, do_sample=False,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        hook.remove()
    got, expected = outputs["qkv"], outputs["eager"]
    assert torch.equal(got.sequences, expected.sequences)
    close = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), **close)
    pairs = zip(drafted["qkv"], drafted["eager"], strict=True)
    assert drafted["qkv"]
    for draft, by_eager in pairs:
        torch.testing.assert_close(draft.logits, by_eager.logits, **close)
