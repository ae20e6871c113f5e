"""Scores of every head of a model against a loop over the weights that eager attention returns."""

from __future__ import annotations

import copy
import math
import warnings
from itertools import product
from typing import Any

import numpy as np
import pytest

REASON = "inspecting models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import InDouble, attending, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

FAMILIES = ["llama", "gpt2", "gemma3", "gpt-oss", "opt", "bert"]
IDS = torch.randint(3, 9, (2, 14), generator=torch.Generator().manual_seed(1))
PADDINGS = {"none": None, "left": (slice(None, 5),), "right": (slice(9, None),)}


def padded(padding: str) -> Any:
    real = torch.ones_like(IDS)
    if PADDINGS[padding]:
        real[(0, *PADDINGS[padding])] = 0
    return real


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def by_loop(weights: Any, ids: Any, real: Any) -> dict[str, float]:
    """The scores of one head, from its weights (batch, length, length), by their definitions."""
    kwargs: dict[str, list[float]] = {name: [] for name in (
        "entropy", "sink", "learned_sink", "previous", "own", "duplicate", "induction", "distance"
    )}  # fmt: skip
    for b, keys in enumerate(real):
        rows = [i for i, is_real in enumerate(keys) if is_real]
        for i in rows:
            w = [float(x) for x in weights[b, i]]
            learned = max(1 - math.fsum(w), 0.0)
            kwargs["entropy"].append(-math.fsum(x * math.log(x) for x in w if x > 0))
            kwargs["learned_sink"].append(learned)
            kwargs["sink"].append(w[rows[0]] + learned)
            kwargs["own"].append(w[i])
            kwargs["distance"].append(math.fsum(x * abs(i - j) for j, x in enumerate(w)))
            if i - 1 in rows:
                kwargs["previous"].append(w[i - 1])
            earlier = [j for j in rows if j < i and ids[b, j] == ids[b, i]]
            after = [j for j in rows if j <= i and j - 1 in rows and ids[b, j - 1] == ids[b, i]]
            if earlier:
                kwargs["duplicate"].append(math.fsum(w[j] for j in earlier))
            if after:
                kwargs["induction"].append(math.fsum(w[j] for j in after))
    return {name: mean(values) for name, values in kwargs.items()}


def inspected(model: Any, **inputs: Any) -> Any:
    with InDouble(), torch.no_grad(), qkv.hf.inspect(model, keep="weights") as record:
        model(**inputs)
    return record


def assert_same(found: Any, expected: Any) -> None:
    for one, two in zip(found.rows(), expected.rows(), strict=True):
        for name in ("kind", "also"):
            assert one.pop(name) == two.pop(name)
        assert one == pytest.approx(two, rel=1e-9, abs=1e-12)


@pytest.mark.slow
@pytest.mark.sampled(("family", "padding"), list(product(FAMILIES, PADDINGS)), one_in=6)
def test_every_score_of_every_head(family: str, padding: str) -> None:
    model, real = model_of(family), padded(padding)
    inputs = {"input_ids": IDS, "attention_mask": real}
    with attending(model, "eager"), torch.no_grad():
        eager = model(**inputs, output_attentions=True).attentions
    record = inspected(model, **inputs)
    assert len(record) == len(eager)
    for row in record.rows():
        weights = eager[row["layer"]][:, row["head"]].numpy()
        expected = by_loop(weights, IDS.numpy(), real.numpy())
        for name, value in expected.items():
            assert row[name] == pytest.approx(value, rel=1e-9, abs=1e-9), name


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "bert"])
def test_received_top_and_weights(family: str) -> None:
    model, real = model_of(family), padded("left")
    inputs = {"input_ids": IDS, "attention_mask": real}
    with attending(model, "eager"), torch.no_grad():
        eager = model(**inputs, output_attentions=True).attentions
    for layer, theirs in zip(inspected(model, **inputs), eager, strict=True):
        weights = theirs.numpy() * real.numpy()[:, None, :, None]
        np.testing.assert_allclose(layer.received, weights.sum(axis=2), atol=1e-12)
        np.testing.assert_allclose(layer.weights[...], weights, atol=1e-12)
        keys, best = layer.top
        np.testing.assert_allclose(best, -np.sort(-weights, axis=-1)[..., :4], atol=1e-12)
        seen = best > 0
        rows = np.broadcast_to(np.arange(14)[:, None], keys.shape)
        batch, head, _, _ = np.nonzero(seen)
        np.testing.assert_allclose(weights[batch, head, rows[seen], keys[seen]], best[seen])


def test_the_largest_logit_is_that_of_query_and_key() -> None:
    model = model_of("gpt2")
    calls: list[Any] = []
    with qkv.hf.observe(calls.append):
        record = inspected(model, input_ids=IDS)
    for row in record.rows():
        call, head = calls[row["layer"]], row["head"]
        scores = (call.query @ call.key.mT)[:, head].numpy() * call.query.shape[-1] ** -0.5
        seen = np.tril(np.ones((14, 14), bool))
        assert row["max_logit"] == pytest.approx(scores[:, seen].max(), rel=1e-12)


@pytest.mark.slow
def test_packed_rows_are_sequences_of_their_own() -> None:
    model = model_of("llama")
    ids = IDS[:1]
    places = torch.arange(14)[None] % 7
    packed = inspected(model, input_ids=ids, position_ids=places, use_cache=False)
    apart = inspected(model, input_ids=ids.reshape(2, 7))
    assert_same(packed, apart)


def test_encoder_and_decoder_have_their_own_tokens() -> None:
    model, ids, answers = model_of("bart"), IDS, IDS[:, :9].flip(1)
    with attending(model, "eager"), torch.no_grad():
        eager = model(input_ids=ids, decoder_input_ids=answers, output_attentions=True)
    record = inspected(model, input_ids=ids, decoder_input_ids=answers)
    names = [layer.name for layer in record]
    for which, given, weights in (
        ("encoder.layers.1.self_attn", ids, eager.encoder_attentions[1]),
        ("decoder.layers.1.self_attn", answers, eager.decoder_attentions[1]),
    ):
        (layer,) = [record[i] for i, name in enumerate(names) if name.endswith(which)]
        for head, row in enumerate(layer.heads()):
            expected = by_loop(weights[:, head].numpy(), given.numpy(), np.ones(given.shape))
            assert {name: row[name] for name in expected} == pytest.approx(expected, rel=1e-9)
    (cross,) = [record[i] for i, name in enumerate(names) if "layers.1.encoder_attn" in name]
    assert all(math.isnan(row["induction"]) for row in cross.heads())
    np.testing.assert_allclose(
        cross.received, eager.cross_attentions[1].sum(dim=2).numpy(), atol=1e-12
    )


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "qkv"])
def test_the_model_has_its_implementation_again(implementation: str) -> None:
    qkv.hf.enable()
    model = model_of("llama")
    model.set_attn_implementation(implementation)
    inspected(model, input_ids=IDS)
    assert model.config._attn_implementation == implementation
    with pytest.raises(IndexError), qkv.hf.inspect(model) as record:
        model(IDS + 10_000)
    assert model.config._attn_implementation == implementation
    assert len(record) == 0
    assert not model._forward_pre_hooks


def test_parts_have_theirs_again_too() -> None:
    model = model_of("siglip")
    model.set_attn_implementation({"": "sdpa", "text_config": "eager", "vision_config": "sdpa"})
    pixels = torch.randn(2, 3, 24, 24).double()
    with pytest.warns(qkv.hf.NotUsedWarning, match="head.attention"):
        record = inspected(model, input_ids=IDS, pixel_values=pixels)
    assert model.config.text_config._attn_implementation == "eager"
    assert model.config.vision_config._attn_implementation == "sdpa"
    pictures = [layer for layer in record if "vision" in layer.name]
    assert pictures
    assert all(math.isnan(row["induction"]) for layer in pictures for row in layer.heads())


def test_logits_do_not_change() -> None:
    model = model_of("gemma3")
    with attending(model, "eager"), torch.no_grad():
        expected = model(IDS).logits
        with qkv.hf.inspect(model):
            found = model(IDS).logits
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_a_model_that_computes_attention_itself() -> None:
    config = transformers.Swinv2Config(
        image_size=16, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    model = transformers.Swinv2Model(config).eval()
    pixels = torch.randn(1, 3, 16, 16)
    before = model.config._attn_implementation
    with (
        pytest.raises(qkv.UnsupportedError, match="Swinv2Model computes its attention itself"),
        qkv.hf.inspect(model),
    ):
        model(pixels)
    assert model.config._attn_implementation == before


def compiled_call(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = torch.compile(model.forward, backend="eager")
    return model


WRAPPERS = {
    "model.compile": compiled_call,
    "forward": compiled_forward,
    "torch.compile": lambda model: torch.compile(model, backend="eager"),
    "Sequential": torch.nn.Sequential,
    "DataParallel": torch.nn.DataParallel,
}


@pytest.mark.slow
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_model_that_is_compiled_or_inside_another_module(wrapper: str) -> None:
    model = model_of("llama")
    expected = inspected(model, input_ids=IDS)
    wrapped = WRAPPERS[wrapper](copy.deepcopy(model))
    with torch.no_grad():
        before = wrapped(IDS).logits
        with InDouble(), qkv.hf.inspect(wrapped) as found:
            wrapped(IDS)
        after = wrapped(IDS).logits
    assert [layer.name for layer in found] == [layer.name for layer in expected]
    assert_same(found, expected)
    assert torch.equal(before, after)


@pytest.mark.parametrize("count", [0, 2])
def test_a_module_without_one_model(count: int) -> None:
    parts = torch.nn.Sequential(*[copy.deepcopy(model_of("llama")) for _ in range(count)])
    fact = f"Sequential has {count} models of transformers inside"
    with pytest.raises(qkv.ArgumentError, match=fact) as found, qkv.hf.inspect(parts):
        pass
    assert ("record.add(query, key" in found.value.action) == (count == 0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_backward_computes_anew_is_not_recorded_again(reentrant: bool) -> None:
    model = copy.deepcopy(model_of("llama")).train()
    kwargs = {"input_ids": IDS, "labels": IDS, "use_cache": False}
    with torch.no_grad(), qkv.hf.inspect(model) as expected:
        model(**kwargs)
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    with qkv.hf.inspect(model) as record:
        model(**kwargs).loss.backward()
    assert [layer.name for layer in record] == [f"model.layers.{i}.self_attn" for i in (0, 1)]
    assert_same(record, expected)
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


def test_a_model_that_is_not_on_the_cpu() -> None:
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
    with torch.device("meta"):
        model = transformers.GPT2Model(config)
    with pytest.raises(qkv.UnsupportedError, match="on the device meta"), qkv.hf.inspect(model):
        pass


def test_one_call_to_a_record() -> None:
    model = model_of("llama")
    with pytest.raises(qkv.ArgumentError, match="was not called"), qkv.hf.inspect(model):
        pass
    with pytest.raises(qkv.ArgumentError, match="called twice"):
        call_twice(model)


def call_twice(model: Any) -> None:
    with qkv.hf.inspect(model):
        model(IDS)
        model(IDS)


def test_a_cache_of_earlier_tokens() -> None:
    """The ids of those are not known: no duplicates and induction, and the rest as without it."""
    model = model_of("llama")
    whole = inspected(model, input_ids=IDS)
    with InDouble(), torch.no_grad():
        model.set_attn_implementation("eager")
        past = model(IDS[:, :10], use_cache=True)["cache"]
    record = inspected(model, input_ids=IDS[:, 10:], cache=past)
    for layer, long in zip(record, whole, strict=True):
        for name, row in layer.rows.items():
            if name in ("duplicate", "induction"):
                assert np.isnan(row).all()
            else:
                np.testing.assert_allclose(row, long.rows[name][:, :, 10:], rtol=1e-9, atol=1e-9)


def test_a_static_cache_is_longer_than_its_tokens() -> None:
    model = model_of("llama")
    expected = inspected(model, input_ids=IDS)
    cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    found = inspected(model, input_ids=IDS, cache=cache)
    assert found[0].received.shape[-1] == 32
    assert_same(found, expected)
    before = found[0].weights[..., :14]
    with torch.no_grad():
        cache.layers[0].keys.zero_()
    np.testing.assert_array_equal(found[0].weights[..., :14], before)


def test_weights_are_stored_on_request() -> None:
    model = model_of("llama")
    with torch.no_grad(), qkv.hf.inspect(model, keep=[1]) as record:
        model(IDS)
    assert record[1].weights.shape == (2, 4, 14, 14)
    with pytest.raises(qkv.ArgumentError, match=r"keep=\[0\]"):
        record[0].weights  # noqa: B018


def test_layers_to_keep_that_are_not_there() -> None:
    model = model_of("gpt2")
    with (
        pytest.raises(qkv.ArgumentError, match="layer 9 does not exist") as found,
        qkv.hf.inspect(model, keep=[1, 9]),
    ):
        model(IDS)
    assert found.value.action == "Choose from 0 to 1."
    with pytest.raises(qkv.ArgumentError, match=r"keep=\[-1\]"), qkv.hf.inspect(model, keep=[-1]):
        model(IDS)


@pytest.mark.slow
def test_training_and_bfloat16() -> None:
    """Scores are those before dropout; gradients still flow."""
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=20, attn_pdrop=0.5)
    model = transformers.GPT2LMHeadModel(config).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qkv.hf.inspect(model) as record:
            model(IDS, labels=IDS).loss.backward()
        assert model.transformer.h[0].attn.c_attn.weight.grad is not None
        with torch.no_grad(), qkv.hf.inspect(model.eval()) as expected:
            model(IDS)
        with torch.no_grad(), qkv.hf.inspect(model.bfloat16()) as coarse:
            model(IDS)
    assert record[0].rows["entropy"].dtype == coarse[0].rows["entropy"].dtype == np.float32
    for one, two in zip(coarse.rows(), expected.rows(), strict=True):
        assert one["entropy"] == pytest.approx(two["entropy"], rel=0.02)


def test_a_text_is_inspected_in_one_call() -> None:
    """The record is that of a `with`, and has the tokens as text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["the", "cat", "sat", "mat"]
    made = Tokenizer(models.WordLevel({word: 3 + i for i, word in enumerate(words)}, "the"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made)
    model = model_of("gpt2")
    record = qkv.hf.inspect(model, "the cat sat the mat", tokenizer, keep="weights")
    with qkv.hf.inspect(model) as wanted:
        model(torch.tensor([[3, 4, 5, 3, 6]]))
    assert record.texts == ["the", "cat", "sat", "the", "mat"]
    assert [row["entropy"] for row in record.rows()] == [row["entropy"] for row in wanted.rows()]
    assert record[0].weights[0, 0].shape == (5, 5)
    for given in (("a text",), (None, tokenizer)):
        with pytest.raises(qkv.ArgumentError, match="a text and its tokenizer go together"):
            qkv.hf.inspect(model, *given)
