"""Sequences in one row whose cumulative lengths are given, as flash attention takes them."""

from __future__ import annotations

from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import SIZES, VOCABULARY, attending, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.attention import attend  # noqa: E402

qkv.hf.enable()

LENGTHS = [5, 9, 10]
EDGES = torch.tensor([0, 5, 14, 24], dtype=torch.int32)
KEYWORDS = {
    "cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES, "max_length_q": 10, "max_length_k": 10,
}  # fmt: skip
POSITIONS = torch.cat([torch.arange(length) for length in LENGTHS])[None]


def tokens(count: int = 24) -> Any:
    return torch.randint(3, VOCABULARY, (1, count), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss", "opt"])
def test_each_sequence_is_as_eager_has_it_alone(family: str, use_cache: bool) -> None:
    """gpt-oss and OPT do not tell their masks of positions; with a cache no model does."""
    ids = tokens()
    with torch.no_grad(), attending(model_of(family), "eager") as model:
        alone = [model(part, use_cache=False).logits[0] for part in ids.split(LENGTHS, 1)]
    with torch.no_grad(), attending(model_of(family), "qkv") as model:
        got = model(ids, position_ids=POSITIONS, use_cache=use_cache, **KEYWORDS).logits[0]
    expected = torch.cat(alone)
    assert float((got - expected).abs().max()) < 1e-10 * float(expected.abs().max())


@pytest.mark.slow
def test_a_compiled_model() -> None:
    model, inputs = model_of("gpt-oss"), {"position_ids": POSITIONS, "use_cache": False, **KEYWORDS}
    model.set_attn_implementation("qkv")
    with torch.no_grad():
        expected = model(tokens(), **inputs).logits
        got = torch.compile(model, backend="aot_eager")(tokens(), **inputs).logits
    torch.compiler.reset()
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_training_on_flattened_texts() -> None:
    """The loss and the gradients of texts in one row are those of the texts in a padded batch."""
    features = [{"input_ids": part[0].tolist()} for part in tokens().split(LENGTHS, 1)]
    flat = transformers.DataCollatorWithFlattening(
        return_tensors="pt", return_flash_attn_kwargs=True
    )(features)
    padded = torch.zeros(3, 10, dtype=torch.int64)
    labels = torch.full((3, 10), -100)
    for row, feature in enumerate(features):
        ids = torch.tensor(feature["input_ids"])
        padded[row, : len(ids)] = labels[row, : len(ids)] = ids
    batch = {"input_ids": padded, "labels": labels, "attention_mask": (labels >= 0).long()}
    results = []
    for implementation, inputs in (("eager", batch), ("qkv", flat)):
        with attending(model_of("gpt-oss"), implementation) as model:
            model.zero_grad(set_to_none=True)
            loss = model(**inputs, use_cache=False).loss
            loss.backward()
            gradient = model.model.layers[0].self_attn.q_proj.weight.grad
            results.append((loss.item(), gradient.clone()))
            model.zero_grad(set_to_none=True)
    (expected, gradient), (loss, found) = results
    assert abs(loss - expected) < 1e-10 * expected
    assert float((found - gradient).abs().max()) < 1e-10 * float(gradient.abs().max())


def test_pictures_have_rows_of_their_own() -> None:
    """LLaVA hands the lengths of its text to the layers that read pictures too."""
    text = {**SIZES, "num_key_value_heads": 4}
    vision = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "image_size": 12,
        "num_attention_heads": 4, "patch_size": 6, "projection_dim": 32,
    }  # fmt: skip
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**text),
        vision_config=transformers.CLIPVisionConfig(**vision),
        image_token_index=VOCABULARY - 1, vision_feature_layer=-1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    model.set_attn_implementation("qkv")
    ids = tokens().clamp_max(VOCABULARY - 2)
    ids[0, 2:6] = VOCABULARY - 1
    inputs = {"input_ids": ids, "pixel_values": torch.randn(1, 3, 12, 12), "use_cache": False}
    by_positions = {**inputs, "position_ids": POSITIONS}
    seen: list[Any] = []
    with torch.no_grad():
        expected = model(**by_positions).logits
        with qkv.hf.observe(seen.append):
            got = model(**by_positions, **KEYWORDS).logits
    assert torch.equal(got, expected)
    assert [call.variants == () for call in seen] == [True, True, False, False]


@pytest.mark.parametrize("broken", ["batch", "count", "keys", "padding"])
def test_what_the_lengths_do_not_fit_is_refused(broken: str) -> None:
    layer = torch.nn.Module()
    query = torch.randn(2 if broken == "batch" else 1, 2, 24, 4)
    edges = {"cu_seq_lens_q": EDGES, "cu_seq_lens_k": EDGES}
    key, mask = query, None
    if broken == "count":
        edges["cu_seq_lens_q"] = EDGES[:-1]
    if broken == "keys":
        key = torch.randn(1, 2, 30, 4)
    if broken == "padding":
        real = torch.ones(1, 24, dtype=torch.int64)
        real[0, :3] = 0
        mask = qkv.hf.state_mask(1, 24, 24, attention_mask=real)
    with pytest.raises(qkv.UnsupportedError, match="packed into one row"):
        attend(layer, query, key, key, mask, **edges)
