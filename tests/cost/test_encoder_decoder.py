"""Models of an encoder and a decoder, against the models of transformers and torch's counter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qkv.cost import model_cost, read_config
from qkv.errors import ArgumentError, QkvError, UnsupportedError

T5 = {"vocab_size": 96, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 3, "num_heads": 4}
BART = {
    "vocab_size": 96, "d_model": 32, "encoder_layers": 3, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 8, "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40, "max_position_embeddings": 64,
}  # fmt: skip
WHISPER = BART | {"num_mel_bins": 20, "max_source_positions": 30, "max_target_positions": 16}
CONFIGS = [
    ("t5", T5),
    ("t5", T5 | {"num_decoder_layers": 2, "feed_forward_proj": "gated-gelu"}),
    ("t5", T5 | {"tie_word_embeddings": False}),
    ("mt5", T5),
    ("bart", BART),
    ("mbart", BART),
    ("whisper", WHISPER),
]


def made(kind: str, extra: dict[str, Any], folder: Path, device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = AutoConfig.for_model(kind, **extra, **special)
    config._attn_implementation = "eager"
    config.save_pretrained(folder)
    maker = AutoModelForSpeechSeq2Seq if kind == "whisper" else AutoModelForSeq2SeqLM
    with torch.device(device):
        return maker.from_config(config).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "extra"), CONFIGS)
@pytest.mark.parametrize("decode", [False, True])
def test_parameters_are_those_that_transformers_makes(
    kind: str, extra: dict[str, Any], decode: bool, tmp_path: Path
) -> None:
    model = made(kind, extra, tmp_path, "meta")
    ours = read_config(tmp_path)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert model_cost(ours, 8, decode=decode).parameters == wanted
    assert ours.encoder is not None


@pytest.mark.parametrize("kind", ["t5", "mt5"])
def test_a_feed_forward_layer_that_is_left_out_is_that_of_the_family(
    kind: str, tmp_path: Path
) -> None:
    model = made(kind, T5, tmp_path, "meta")
    fields = json.loads((tmp_path / "config.json").read_text())
    for name in ("feed_forward_proj", "is_gated_act", "dense_act_fn"):
        fields.pop(name, None)
    wanted = sum(parameter.numel() for parameter in model.parameters())
    assert model_cost(read_config(fields), 8).parameters == wanted


@pytest.mark.parametrize(("kind", "extra"), [CONFIGS[0], CONFIGS[1], CONFIGS[4]])
def test_products_are_those_that_torch_counts(
    kind: str, extra: dict[str, Any], tmp_path: Path
) -> None:
    """Torch counts two operations for each multiply-add, pairs that are masked, and all logits."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    batch, n, m = 2, 5, 7
    model = made(kind, extra, tmp_path, "cpu")
    tokens = {
        "input_ids": torch.ones(batch, m, dtype=torch.int64),
        "decoder_input_ids": torch.ones(batch, n, dtype=torch.int64),
    }
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(**tokens, use_cache=False)
    ours = read_config(tmp_path)
    cost = model_cost(ours, n, batch=batch, source=m, dtype="float32")
    counts = {k: int(c) for k, c in cost.ledger.counts.items() if k.endswith("_multiply")}
    products = sum(c for k, c in counts.items() if "_proj" in k) + n * counts["head_multiply"]
    if "gated" in str(extra.get("feed_forward_proj")):
        # What a gate multiplies number by number is not a product of matrices.
        products -= batch * 48 * (3 * m + 2 * n)
    encoder, decoder = ours.encoder.layers[0].attention, ours.layers[0].attention
    pairs = len(ours.encoder.layers) * m * m * encoder.num_heads * encoder.head_dim
    pairs += len(ours.layers) * (n * n + n * m) * decoder.num_heads * decoder.head_dim
    assert 2 * (products + 2 * batch * pairs) == counter.get_total_flops()


def test_the_cache_of_a_step_is_that_of_transformers(tmp_path: Path) -> None:
    import torch

    model, batch, n, m = made("bart", BART, tmp_path, "cpu"), 2, 5, 7
    with torch.no_grad():
        output = model(
            input_ids=torch.ones(batch, m, dtype=torch.int64),
            decoder_input_ids=torch.ones(batch, n, dtype=torch.int64),
            use_cache=True,
        )
        cache = getattr(output, "cache", None) or output.past_key_values
    held = 0
    for side in (cache.self_attention_cache, cache.cross_attention_cache):
        held += sum(la.keys.numel() + la.values.numel() for la in side.layers)
    for decode in (False, True):
        cost = model_cost(read_config(tmp_path), n, batch=batch, source=m, decode=decode)
        assert cost.kv_cache_bytes == 2 * held
    # One step runs no encoder: its operations do not depend on how the source was read.
    longer = model_cost(read_config(tmp_path), n, batch=batch, source=2 * m, decode=True)
    grown = longer.operations - cost.operations
    assert 0 < grown < 20 * len(cost.model.layers) * batch * m * 8 * 4


def test_the_published_sizes() -> None:
    """T5 in arXiv 1910.10683, BART in 1910.13461, Whisper in 2212.04356."""
    t5 = {"model_type": "t5", "is_encoder_decoder": True, "vocab_size": 32128, "d_model": 768,
          "d_kv": 64, "d_ff": 3072, "num_layers": 12, "num_heads": 12}  # fmt: skip
    assert round(model_cost(read_config(t5)).parameters / 1e6) in range(220, 224)
    bart = {"model_type": "bart", "is_encoder_decoder": True, "vocab_size": 50265, "d_model": 1024,
            "encoder_layers": 12, "decoder_layers": 12, "encoder_attention_heads": 16,
            "decoder_attention_heads": 16, "encoder_ffn_dim": 4096, "decoder_ffn_dim": 4096,
            "max_position_embeddings": 1024}  # fmt: skip
    assert round(model_cost(read_config(bart)).parameters / 1e6) in range(400, 410)
    whisper = bart | {"model_type": "whisper", "vocab_size": 51865, "d_model": 1280,
                      "encoder_layers": 32, "decoder_layers": 32, "encoder_attention_heads": 20,
                      "decoder_attention_heads": 20, "encoder_ffn_dim": 5120,
                      "decoder_ffn_dim": 5120, "num_mel_bins": 80, "max_source_positions": 1500,
                      "max_target_positions": 448}  # fmt: skip
    assert round(model_cost(read_config(whisper)).parameters / 1e6) in range(1540, 1551)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"model_type": "pegasus_x"}, UnsupportedError, "t5, mt5, bart, mbart, whisper"),
        ({"encoder_layers": None}, ArgumentError, "no encoder_layers"),
        ({"decoder_attention_heads": 5}, ArgumentError, "5 heads do not divide"),
        ({"encoder_ffn_dim": -1}, ArgumentError, "intermediate_size is -1"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    change: dict[str, Any], error: type[QkvError], words: str
) -> None:
    with pytest.raises(error, match=words):
        read_config({**BART, "model_type": "bart", "is_encoder_decoder": True, **change})


def test_a_source_needs_an_encoder() -> None:
    with pytest.raises(ArgumentError, match="no encoder"):
        model_cost("gpt-2", source=3)
    bart = read_config({**BART, "model_type": "bart", "is_encoder_decoder": True})
    with pytest.raises(ArgumentError, match="source=0"):
        model_cost(bart, source=0)


@pytest.mark.parametrize(("kind", "extra"), [CONFIGS[0], CONFIGS[3], CONFIGS[4], CONFIGS[6]])
def test_configs_that_leave_out_that_there_is_an_encoder(kind: str, extra: dict[str, Any]) -> None:
    """transformers takes these families for an encoder and a decoder then."""
    left_out = read_config({**extra, "model_type": kind})
    assert left_out == read_config({**extra, "model_type": kind, "is_encoder_decoder": True})
    usual = {"num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    decoder = {**extra, **usual, "model_type": kind, "is_encoder_decoder": False}
    assert read_config(decoder).encoder is None


def test_t5_divides_no_scores() -> None:
    """Raffel et al. scale the weights that queries are made with instead, once and for all."""
    for kind, divides in (("t5", False), ("mt5", False), ("bart", True)):
        config = {**(T5 if kind != "bart" else BART), "model_type": kind}
        cost = model_cost(read_config(config), 8, source=6)
        assert any("scale" in name for name in cost.ledger.counts) is divides
