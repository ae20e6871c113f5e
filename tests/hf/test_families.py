"""Models of transformers with attn_implementation="qkv" against their own eager, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import (  # noqa: E402
    BATCH,
    DECODERS,
    FAMILIES,
    LENGTH,
    TRANSLATORS,
    VOCABULARY,
    attending,
    inputs_of,
    logits_of,
    model_of,
    seen,
)

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

qkv.hf.enable()

BOUND = 1e-10
PADDINGS = ("none", "left", "right")
TEXT = [*DECODERS, "t5", "bart", "bert"]


def run(family: str, implementation: str, inputs: dict[str, Any], **more: Any) -> Any:
    with attending(model_of(family), implementation) as model, torch.no_grad():
        return model(**inputs, **more)


def close(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype == torch.float64
    assert float((got - expected).abs().max()) < BOUND * max(1.0, float(expected.abs().max()))


@contextmanager
def no_dense_mask(monkeypatch: Any) -> Iterator[None]:
    """No boolean matrix is made for all pairs of queries and keys."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a dense mask was made")

    with monkeypatch.context() as patch:
        patch.setattr("qkv.hf.masks.sdpa_mask", refuse)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_eager_attention_is_far_from_uniform(family: str) -> None:
    """A wrong mask, scale or window would otherwise pass everything below."""
    output = run(family, "eager", inputs_of(family), output_attentions=True)
    layers = [
        layer
        for name in ("attentions", "decoder_attentions", "encoder_attentions", "cross_attentions")
        for layer in getattr(output, name, None) or ()
    ]
    if family == "siglip":
        layers = [*output.text_model_output.attentions, *output.vision_model_output.attentions]
    assert layers
    for weights in layers:
        rows = weights[..., weights.shape[-2] // 2 :, :]
        entropy = -(rows * rows.clamp_min(1e-300).log()).sum(-1)
        allowed = (rows > 0).sum(-1)
        assert float((entropy / allowed.clamp_min(2).log()).mean()) < 0.85


@pytest.mark.slow
@pytest.mark.sampled(("family", "kind"), list(product(TEXT, PADDINGS)), one_in=8)
def test_logits_of_padded_text(family: str, kind: str, monkeypatch: Any) -> None:
    inputs = inputs_of(family, kind)
    expected = run(family, "eager", inputs).logits
    with no_dense_mask(monkeypatch):
        got = run(family, "qkv", inputs).logits
    close(seen(family, inputs, got), seen(family, inputs, expected))


def test_a_window_of_zero_that_no_layer_uses(monkeypatch: Any) -> None:
    """Qwen2-MoE says sliding_window=0 for "none", and asks for that mask all the same."""
    model, inputs = model_of("qwen2-moe"), inputs_of("llama", "left")
    assert model.config.sliding_window == 0
    expected = run("qwen2-moe", "eager", inputs).logits
    with no_dense_mask(monkeypatch):
        got = run("qwen2-moe", "qkv", inputs).logits
    close(seen("qwen2-moe", inputs, got), seen("qwen2-moe", inputs, expected))


@pytest.mark.parametrize("family", ["whisper", "vit", "siglip"])
def test_logits_of_sound_and_pictures(family: str, monkeypatch: Any) -> None:
    inputs = inputs_of(family)
    expected = logits_of(family, run(family, "eager", inputs))
    with no_dense_mask(monkeypatch):
        close(logits_of(family, run(family, "qkv", inputs)), expected)


def generated(family: str, implementation: str, cache: str) -> tuple[Any, Any]:
    """Eight tokens, beyond the window, from left padded prompts; and their logits."""
    torch.manual_seed(0)
    inputs = inputs_of(family, "left")
    inputs.pop("decoder_input_ids", None)
    with attending(model_of(family), implementation) as model, torch.no_grad():
        output = model.generate(
            **inputs,
            max_new_tokens=8,
            do_sample=False,
            cache_implementation=cache,
            output_logits=True,
            return_dict_in_generate=True,
            disable_compile=True,
        )
    return output.sequences, torch.stack(output.logits)


@pytest.mark.slow
@pytest.mark.sampled("family", [*DECODERS, *TRANSLATORS], one_in=4)
def test_generation(family: str) -> None:
    tokens, logits = generated(family, "eager", "dynamic")
    for cache in ("dynamic", "static"):
        found = generated(family, "qkv", cache)
        assert torch.equal(found[0], tokens)
        close(found[1], logits)


@pytest.mark.slow
@pytest.mark.sampled(("family", "cache"), list(product(DECODERS, ["dynamic", "static"])), one_in=4)
def test_chunked_prefill(family: str, cache: str) -> None:
    """Three chunks and a step through a cache give what eager gives in one pass without any."""
    inputs = inputs_of(family, "left")
    tokens, mask = inputs["input_ids"], inputs["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp_min(0)

    def at(start: int, end: int) -> dict[str, Any]:
        model_kwargs = {"input_ids": tokens[:, start:end], "attention_mask": mask[:, :end]}
        return (
            model_kwargs
            if family == "opt"
            else {**model_kwargs, "position_ids": positions[:, start:end]}
        )

    expected = run(family, "eager", at(0, LENGTH), use_cache=False).logits
    config = model_of(family).config
    if cache == "static":
        kept = transformers.StaticCache(config=config, max_cache_len=LENGTH + 4)
    else:
        kept = transformers.DynamicCache(config=config)
    parts = [
        run(family, "qkv", at(start, end), cache=kept).logits
        for start, end in ((0, 6), (6, 11), (11, 12), (12, LENGTH))
    ]
    close(seen(family, inputs, torch.cat(parts, 1)), seen(family, inputs, expected))


PACKING = [name for name in DECODERS if name not in ("gpt-oss", "opt", "llama4")]
"""gpt-oss and opt do not tell their masks about positions, so eager does not separate either; the
chunks of llama4 are counted from the start of the row, and make no sense in packed ones."""


@pytest.mark.slow
@pytest.mark.parametrize("family", PACKING)
def test_packed_rows(family: str, monkeypatch: Any) -> None:
    """Sequences in one row give what eager gives for each of them alone."""
    lengths = [[5, 6, 3], [14], [1, 9, 4]]
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH))
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    with no_dense_mask(monkeypatch):
        packed = {"input_ids": tokens, "position_ids": positions, "use_cache": False}
        got = run(family, "qkv", packed).logits
    for row, sequences in enumerate(lengths):
        parts = zip(tokens[row].split(sequences), got[row].split(sequences), strict=True)
        for alone, part in parts:
            close(part, run(family, "eager", {"input_ids": alone[None]}).logits[0])


@pytest.mark.sampled("family", list(FAMILIES), one_in=6)
def test_gradients_of_all_parameters(family: str) -> None:
    inputs = inputs_of(family, "right")
    gradients = []
    for implementation in ("eager", "qkv"):
        with attending(model_of(family), implementation) as model:
            model.zero_grad(set_to_none=True)
            logits = logits_of(family, model(**inputs))
            (seen(family, inputs, logits) ** 2).sum().backward()
            gradients.append({n: p.grad for n, p in model.named_parameters()})
            model.zero_grad(set_to_none=True)
    expected, got = gradients
    missing = {name for name, gradient in expected.items() if gradient is None}
    assert {name for name, gradient in got.items() if gradient is None} == missing
    largest = max(float(g.abs().max()) for g in expected.values() if g is not None)
    for name in expected.keys() - missing:
        assert float((got[name] - expected[name]).abs().max()) < BOUND * max(1.0, largest), name


@pytest.mark.sampled("family", list(FAMILIES), one_in=6)
def test_weights_are_offered_lazily(family: str) -> None:
    inputs = inputs_of(family)
    expected = run(family, "eager", inputs, output_attentions=True)
    got = run(family, "qkv", inputs, output_attentions=True)
    if family == "siglip":
        expected, got = expected.text_model_output, got.text_model_output
    names = [n for n in expected if n.endswith("attentions")]
    assert names
    for name in names:
        for ours, theirs in zip(getattr(got, name), getattr(expected, name), strict=True):
            assert isinstance(ours, qkv.hf.LayerWeights)
            assert ours.shape == theirs.shape
            close(ours[...], theirs)
            close(ours[1, :, -2:, ::3], theirs[1, :, -2:, ::3])
            close(ours.sum(-2), theirs.sum(-2))
            close(ours.mean(-1, keepdim=True), theirs.mean(-1, keepdim=True))
            close(ours.amax(-1), theirs.amax(-1))
            assert torch.equal(ours.argmax(-1), ours[...].argmax(-1))


def test_dropout_draws_a_seed_for_each_layer_from_torch() -> None:
    model = model_of("llama")
    inputs = inputs_of("llama")
    calls: list[qkv.hf.LayerCall] = []
    layers = [layer.self_attn for layer in model.model.layers]
    try:
        model.train()
        for layer in layers:
            layer.attention_dropout = 0.3
        outputs = []
        for seed in (5, 5, 6):
            torch.manual_seed(seed)
            with qkv.hf.observe(calls.append):
                outputs.append(run("llama", "qkv", inputs).logits)
    finally:
        model.eval()
        for layer in layers:
            layer.attention_dropout = 0.0
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])
    drops = [v for call in calls for v in call.variants if isinstance(v, qkv.Dropout)]
    assert [drop.p for drop in drops] == [0.3] * 6
    assert [d.seed for d in drops[:2]] == [d.seed for d in drops[2:4]]
    assert len({drop.seed for drop in drops}) == 4
    run("llama", "qkv", inputs)
    assert len(calls) == 6  # not observed any more


@pytest.mark.slow
@pytest.mark.sampled("family", ["llama", "mistral", "gemma2"], one_in=3)
def test_activation_checkpointing(family: str) -> None:
    """Layers that are computed a second time in the backward pass, masks included."""
    inputs = inputs_of(family, "left")
    model = model_of(family)
    model.set_attn_implementation("qkv")
    gradients = []
    try:
        model.train()
        for checkpointing in (False, True):
            if checkpointing:
                model.activation_checkpointing_enable({"use_reentrant": False})
            model.zero_grad(set_to_none=True)
            (seen(family, inputs, model(**inputs, use_cache=False).logits) ** 2).sum().backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
    finally:
        model.activation_checkpointing_disable()
        model.zero_grad(set_to_none=True)
        model.eval()
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.sampled("family", ["llama", "gemma3", "bert"], one_in=3)
def test_compiled_models(family: str) -> None:
    """Masks are dense while torch traces: nothing can be read from a padding mask then."""
    inputs = inputs_of(family, "left")
    expected = run(family, "qkv", inputs).logits
    model = model_of(family)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        got = compiled(**inputs).logits
    torch.compiler.reset()
    assert float((got - expected).abs().max()) < 1e-4  # norms are in float32 here


TEXT_OF_THREE_PARAGRAPHS = """\
Attention weighs what is far as easily as what is near: every row of the output is a mean of all
values, with weights that depend on how well a query and a key agree.

A window keeps the work proportional to the length.

Softmax is blind to a shift of all scores, so the largest may be taken away first. Nothing overflows
then, and what is small enough to vanish had no share worth mentioning; the sum is carried along
from block to block, and corrected whenever a larger score is met."""


def test_sentence_embeddings_in_float32() -> None:
    """The shape of all-MiniLM-L6-v2: mean pooling over real tokens, then unit length."""
    config = transformers.BertConfig(
        vocab_size=256,
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        initializer_range=0.1,
    )
    model = transformers.BertModel(config, add_pooling_layer=False).eval()
    paragraphs = TEXT_OF_THREE_PARAGRAPHS.split("\n\n")
    encoded = [torch.tensor(list(paragraph.encode())) for paragraph in paragraphs]
    tokens = torch.nn.utils.rnn.pad_sequence(encoded, batch_first=True)
    real = (tokens > 0).long()
    embeddings = {}
    for implementation in ("eager", "qkv"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            states = model(tokens, attention_mask=real).last_hidden_state
        mean = (states * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        embeddings[implementation] = torch.nn.functional.normalize(mean)
    assert float((embeddings["qkv"] - embeddings["eager"]).abs().max()) < 1e-5
    assert float((embeddings["eager"][0] - embeddings["eager"][1]).abs().max()) > 1e-2


@pytest.mark.sampled("family", ["llama", "gemma2", "gpt-oss", "t5"], one_in=4)
def test_bfloat16_is_no_worse_than_eager(family: str) -> None:
    inputs = inputs_of(family, "left")
    truth = seen(family, inputs, run(family, "eager", inputs).logits)
    narrow = copy.deepcopy(model_of(family)).to(torch.bfloat16)
    errors = {}
    for implementation in ("eager", "qkv"):
        narrow.set_attn_implementation(implementation)
        with torch.no_grad():
            logits = narrow(**inputs).logits
        assert logits.dtype == torch.bfloat16
        errors[implementation] = (seen(family, inputs, logits).double() - truth).norm()
    assert errors["qkv"] <= 2 * errors["eager"]
