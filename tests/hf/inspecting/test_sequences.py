"""Which sequence each layer reads: pictures, other sequences, and decoders, told by arguments."""

from __future__ import annotations

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

import qkv.hf
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.lab.sources.heads import heads_of_model

SCORES_OF_POSITIONS = ("previous", "own", "duplicate", "induction", "distance")


def record_of(model: torch.nn.Module, **inputs: Any) -> ModelRecord:
    with qkv.hf.inspect(model.eval()) as record, torch.no_grad():
        model(**inputs)
    return record


def unknown(layer: Any) -> set[str]:
    """Scores of the layer's heads that are NaN in all of them."""
    return {
        name for name in SCORES_OF_POSITIONS if all(math.isnan(row[name]) for row in layer.heads())
    }


def repeated(n: int, batch: int = 1) -> torch.Tensor:
    """Ids in which every token comes twice, so that each score can apply."""
    return (torch.arange(n) % (n // 2) + 3).repeat(batch, 1)


VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4,
    "image_size": 24, "patch_size": 6,
}  # fmt: skip


def pix2struct() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = hf.Pix2StructConfig(
        text_config={"vocab_size": 99, "hidden_size": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1,
                     "num_heads": 4},
        vision_config={"hidden_size": 32, "patch_embed_hidden_size": 768, "d_ff": 48, "d_kv": 8,
                       "num_hidden_layers": 1, "num_attention_heads": 4},
    )  # fmt: skip
    patches = torch.randn(1, 12, 770)
    patches[..., 0], patches[..., 1] = torch.arange(12) // 4 + 1, torch.arange(12) % 4 + 1
    inputs = {
        "flattened_patches": patches,
        "attention_mask": torch.ones(1, 12),
        "decoder_input_ids": repeated(12),  # as many as there are patches
    }
    return hf.Pix2StructForConditionalGeneration(config), inputs


def kosmos2() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = hf.Kosmos2Config(
        text_config={"vocab_size": 99, "embed_dim": 32, "layers": 1, "ffn_dim": 48,
                     "attention_heads": 4, "max_position_embeddings": 64, "image_token_index": 90},
        vision_config=VISION,
        latent_query_num=4,
    )  # fmt: skip
    places = torch.zeros(1, 8, dtype=torch.long)
    places[0, 1:5] = 1
    inputs = {
        "input_ids": repeated(8),
        "pixel_values": torch.randn(1, 3, 24, 24),
        "image_embeds_position_mask": places,
    }
    return hf.Kosmos2ForConditionalGeneration(config), inputs


def idefics2() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = hf.Idefics2Config(
        text_config=hf.MistralConfig(
            vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
            num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
        ),
        vision_config=VISION,
        perceiver_config={"hidden_size": 32, "resampler_n_latents": 4, "resampler_depth": 1,
                          "resampler_n_heads": 2, "resampler_head_dim": 8,
                          "num_key_value_heads": 1},
        image_token_id=90,
    )  # fmt: skip
    ids = repeated(12)
    ids[0, 1:5] = 90
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 3, 24, 24),
        "pixel_attention_mask": torch.ones(1, 1, 24, 24, dtype=torch.long),
    }
    return hf.Idefics2ForConditionalGeneration(config), inputs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "cross"),
    [
        (pix2struct, "encoder_decoder_attention"),
        (kosmos2, "image_to_text_projection"),
        (idefics2, "perceiver_resampler"),
    ],
)
def test_layers_with_keys_of_another_sequence_have_no_scores_of_positions(made, cross) -> None:
    model, inputs = made()
    record = record_of(model, **inputs)
    found = {layer.name: unknown(layer) for layer in record}
    others = [name for name in found if cross in name]
    assert others
    assert all(found[name] == set(SCORES_OF_POSITIONS) for name in others)
    text = [name for name in found if "text_model" in name or "decoder" in name]
    own = [name for name in text if name not in others]
    assert own
    assert all(found[name] == set() for name in own)


@pytest.mark.parametrize("family", ["CLIP", "Siglip"])
def test_rows_of_a_picture_are_no_tokens_of_the_text(family) -> None:
    """16 patches (and CLIP's class row) beside as many tokens: only the text has duplicates."""
    text = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
            "num_attention_heads": 4, "max_position_embeddings": 32, "projection_dim": 32,
            "eos_token_id": 2, "pad_token_id": 1, "bos_token_id": 0}  # fmt: skip
    config = getattr(hf, f"{family}Config")(
        text_config=text, vision_config={**VISION, "projection_dim": 32}
    )
    rows = 17 if family == "CLIP" else 16
    inputs = {
        "input_ids": torch.cat([repeated(16), torch.full((1, rows - 16), 3)], 1),
        "pixel_values": torch.randn(1, 3, 24, 24),
    }
    model = getattr(hf, f"{family}Model")(config)
    if family == "Siglip":  # Its pooling of the rows is a torch.nn.MultiheadAttention.
        with pytest.warns(qkv.hf.NotUsedWarning, match=r"vision_model\.head\.attention"):
            record = record_of(model, **inputs)
    else:
        record = record_of(model, **inputs)
    found = {layer.name: (layer.sequences, unknown(layer)) for layer in record}
    (text_layer,) = (found[name] for name in found if "text_model" in name)
    assert text_layer == (("input_ids", "input_ids"), set())
    pictures = [found[name] for name in found if "vision_model.encoder" in name]
    assert pictures == [((None, None), {"duplicate", "induction"})]


def t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = hf.T5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    inputs = {"input_ids": repeated(8), "decoder_input_ids": repeated(8) + 10}
    return hf.T5ForConditionalGeneration(config), inputs


def test_the_page_of_a_model_of_two_sequences_has_the_words_of_each(tmp_path) -> None:
    model, inputs = t5()
    record = record_of(model, **inputs)
    assert [layer.sequences for layer in record] == [
        ("input_ids", "input_ids"),
        ("decoder_input_ids", "decoder_input_ids"),
        ("decoder_input_ids", "input_ids"),
    ]
    record.texts = [f"in{i}" for i in range(8)]
    page = heads_of_model(record).summary(lambda layer: 0)
    assert page["tokens"] == record.texts
    assert [layer.get("tokens", "of all") for layer in page["layers"]] == ["of all", None, "of all"]
    record.decoder_texts = [f"out{i}" for i in range(8)]
    record.save(tmp_path / "two.safetensors")
    page = heads_of_model(load(tmp_path / "two.safetensors")).summary(lambda layer: 0)
    assert [layer.get("tokens", "of all") for layer in page["layers"]] == [
        "of all", record.decoder_texts, "of all"
    ]  # fmt: skip


def test_the_decoder_is_scored_with_its_own_tokens() -> None:
    """The encoder's tokens repeat, the decoder's do not: no score of theirs is the encoder's."""
    model, inputs = t5()
    inputs["decoder_input_ids"] = torch.arange(8)[None] + 20
    encoder, decoder, _ = record_of(model, **inputs)
    assert "duplicate" not in unknown(encoder)
    assert {"duplicate", "induction"} <= unknown(decoder)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_both_sides_of_cross_attention(side: str) -> None:
    """Padded queries do not count, and the sink is the first real key, as in eager's weights."""
    model, inputs = t5()
    model.double().eval()
    masks = {"attention_mask": torch.ones(2, 8, dtype=torch.long)}
    masks["decoder_attention_mask"] = masks["attention_mask"].clone()
    for mask, count in zip(masks.values(), (3, 4), strict=True):
        mask[0, slice(None, count) if side == "left" else slice(-count, None)] = 0
    inputs = {**{name: ids.repeat(2, 1) for name, ids in inputs.items()}, **masks}
    model.set_attn_implementation("eager")
    with torch.no_grad():
        (weights,) = model(**inputs, output_attentions=True).cross_attentions
    cross = record_of(model, **inputs)[2]
    kv_real, q_real = (mask.numpy().astype(bool) for mask in masks.values())
    first = np.argmax(kv_real, axis=1)
    for head, row in enumerate(cross.heads()):
        w = weights[:, head].numpy()
        entropy = -(w * np.log(np.where(w > 0, w, 1))).sum(-1)
        assert row["entropy"] == pytest.approx(entropy[q_real].mean(), rel=1e-9)
        sink = np.stack([w[b, :, first[b]] for b in (0, 1)])
        assert row["sink"] == pytest.approx(sink[q_real].mean(), rel=1e-9)
        received = (w * q_real[..., None]).sum(1)
        np.testing.assert_allclose(cross.received[:, head], received, atol=1e-12)
    assert (np.isnan(cross.rows["entropy"]).all(axis=1) == ~q_real).all()


def test_layers_that_never_call_qkv_are_named() -> None:
    config = hf.LongT5Config(
        vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, encoder_attention_type="local",
    )  # fmt: skip
    model = hf.LongT5ForConditionalGeneration(config)
    ids = repeated(8)
    with pytest.warns(qkv.hf.NotUsedWarning, match=r"encoder\.block\.0.*has the 2 others alone"):
        record = record_of(model, input_ids=ids, decoder_input_ids=ids)
    assert all("decoder" in layer.name for layer in record)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, inputs = t5()
        record_of(model, **inputs)


def test_a_head_that_rests_where_nothing_repeats_is_an_induction_head() -> None:
    """Weights made by hand: 0.9 on what followed this token before, else all on the first token."""
    ids = np.array([5, 6, 7, 8, 9, 10, 6, 7, 11, 12, 13, 14])
    n = len(ids)
    wanted = np.zeros((n, n))
    for i in range(n):
        followers = [j for j in range(1, i + 1) if ids[j - 1] == ids[i]]
        if followers:
            wanted[i, followers[-1]], wanted[i, 0] = 0.9, 0.1
        else:
            wanted[i, 0] = 1.0
    with np.errstate(divide="ignore"):
        scores = np.maximum(np.log(wanted), -60.0)
    record = qkv.ModelRecord("by hand")
    record.add(
        scores[None, None], np.eye(n)[None, None], qkv.Causal(), name="layer", scale=1.0,
        tokens=ids[None],
    )  # fmt: skip
    (row,) = record.rows()
    assert (row["kind"], row["also"]) == ("induction", "sink")
    np.testing.assert_allclose(row["induction"], 0.9, rtol=1e-6)
    np.testing.assert_allclose(row["sink"], (10 + 2 * 0.1) / 12, rtol=1e-6)
