"""Texts with more tokens than a model has positions: said where rotary models compute on."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)


import qkv.hf  # noqa: E402

MODEL = transformers.LlamaForCausalLM(
    transformers.LlamaConfig(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=8,
    )
).eval()  # fmt: skip
qkv.hf.enable()
MODEL.set_attn_implementation("qkv")
IDS = torch.arange(3, 12)[None]


def inspected(length: int) -> None:
    with qkv.hf.inspect(MODEL), torch.no_grad():
        MODEL(IDS[:, :length])


def cached(length: int, **options: Any) -> None:
    """Two tokens, then one after another."""
    cache = qkv.hf.Cache(MODEL.config, **options)
    with torch.no_grad():
        MODEL(IDS[:, :2], cache=cache)
        for n in range(2, length):
            MODEL(IDS[:, n : n + 1], cache=cache)


WAYS = {
    "inspect": inspected,
    "cache": cached,
    "pages": lambda length: cached(length, page_size=4),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_text_beyond_the_positions_of_a_model(way: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        WAYS[way](8)
    with pytest.warns(UserWarning, match="9 tokens; the model has 8 positions") as found:
        WAYS[way](9)
    assert len(found) == 1


def gpt2(positions: int = 16) -> Any:
    config = transformers.GPT2Config(
        vocab_size=99, n_embd=16, n_layer=1, n_head=2, n_positions=positions,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).eval()


def of_sizes(name: str, **sizes: Any) -> Any:
    """A model of transformers with 16 learned positions."""
    config = getattr(transformers, f"{name}Config")(
        vocab_size=99, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=16, **sizes,
    )  # fmt: skip
    return getattr(transformers, f"{name}Model")(config).eval()


LEARNED = {
    "gpt2": (gpt2, 16),
    "bert": (lambda: of_sizes("Bert"), 16),
    "roberta": (lambda: of_sizes("Roberta", pad_token_id=1), 14),
    "opt": (lambda: of_sizes("OPT", ffn_dim=16, word_embed_proj_dim=16), 16),
}


@pytest.mark.parametrize("name", LEARNED)
def test_learned_positions_end(name: str) -> None:
    """The longest text that transformers reads is read, and one token more is refused."""
    make, positions = LEARNED[name]
    model, ids = make(), torch.arange(3, 40)[None]
    with torch.no_grad():
        model(ids[:, :positions])
        with pytest.raises((IndexError, RuntimeError)):
            model(ids[:, : positions + 1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with qkv.hf.inspect(model) as record:
                model(ids[:, :positions])
            fact = f"has {positions + 1} tokens; {type(model).__name__} has {positions} learned"
            with pytest.raises(qkv.ArgumentError, match=fact), qkv.hf.inspect(model):
                model(ids[:, : positions + 1])
    assert len(record) == 1


def test_positions_of_a_packed_text_begin_anew() -> None:
    model = gpt2()
    with torch.no_grad(), qkv.hf.inspect(model) as record:
        model(torch.arange(3, 35)[None], position_ids=torch.arange(32)[None] % 16)
    assert record[0].rows["entropy"].shape[-1] == 32


def test_a_decoder_has_positions_of_its_own() -> None:
    config = transformers.LEDConfig(
        vocab_size=99, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, attention_window=4,
        max_encoder_position_embeddings=32, max_decoder_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LEDModel(config).eval()
    ids = torch.arange(3, 35)[None]
    with (
        pytest.raises(qkv.ArgumentError, match="17 tokens; LEDModel has 16 learned"),
        qkv.hf.inspect(model),
    ):
        model(ids, decoder_input_ids=ids[:, :17])


def test_rope_is_named_for_models_that_have_it() -> None:
    with pytest.warns(UserWarning, match="set rope_parameters"):
        inspected(9)
    cache = qkv.hf.Cache(gpt2().config)
    with pytest.warns(UserWarning, match="Shorten the text") as found:
        cache.get_mask_sizes(17, 0)
    assert "rope" not in str(found[0].message)
