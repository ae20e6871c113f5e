"""Heads changed while a model runs, against forward hooks written by hand on eager attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

REASON = "changing heads of models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import DECODERS, InDouble, attending, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

GENERATOR = torch.Generator().manual_seed(2)
IDS, OTHER = torch.randint(3, 60, (2, 2, 9), generator=GENERATOR)
REAL = torch.ones_like(IDS)
REAL[0, :3] = 0

# The layer that joins the heads, and where a family keeps its projections of values.
JOINS = ("o_proj", "out_proj", "c_proj", "dense")
VALUES = {"llama", "mistral", "gemma2", "gpt-oss", "opt", "qwen3"}


def joins(model: Any) -> list[Any]:
    """The output projections, in the order of the layers."""
    found = []
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        inside = parent.endswith(("attn", "attention", "attention.output", "self_attention"))
        if last in JOINS and inside:
            found.append(module)
    return found


@contextmanager
def by_hand(model: Any, layer: int, head: int, weights: Any) -> Iterator[None]:
    """Replace what a head writes, before its layer's output projection; None writes 0."""
    heads = model.config.num_attention_heads
    values: list[Any] = []

    def keep(module: Any, args: Any, output: Any) -> None:
        values[:] = [output]

    def write(module: Any, args: Any) -> Any:
        joined = args[0].clone()
        width = joined.shape[-1] // heads
        here = slice(head * width, (head + 1) * width)
        if weights is None:
            joined[..., here] = 0
        else:
            value = values[0]
            kv_head = head * (value.shape[-1] // width) // heads
            joined[..., here] = weights @ value[..., kv_head * width : (kv_head + 1) * width]
        return (joined, *args[1:])

    hooks = [joins(model)[layer].register_forward_pre_hook(write)]
    if weights is not None:
        projections = [m for name, m in model.named_modules() if name.endswith("v_proj")]
        hooks.append(projections[layer].register_forward_hook(keep))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def logits(model: Any, ids: Any = IDS, real: Any = REAL) -> Any:
    with torch.no_grad():
        return model(input_ids=ids, attention_mask=real, use_cache=False).logits[real.bool()]


@pytest.mark.parametrize("family", [*DECODERS, "bert"])
def test_a_head_that_is_off(family: str) -> None:
    model = model_of(family)
    with attending(model, "eager"):
        plain = logits(model)
        with by_hand(model, 1, 2, None):
            expected = logits(model)
        with qkv.hf.intervene(model, {(1, 2): "off"}):
            found = logits(model)
        after = logits(model)
    assert (expected - plain).abs().max() > 1e-3, "the head changes nothing, so this shows nothing"
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(after, plain)
    assert model.config._attn_implementation == "eager"


def allowed(family: str, layer: int) -> Any:
    """The pairs that the masks of a family allow, (batch, length, length)."""
    i, j = torch.arange(9)[:, None], torch.arange(9)
    mask = j <= i
    sliding = {"mistral": True, "gemma2": layer == 0, "gpt-oss": layer == 0}.get(family, False)
    if sliding:
        mask = mask & (i - j < 5)
    return mask & REAL[:, None, :].bool()


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("family", sorted(VALUES))
def test_a_head_that_is_uniform(family: str, layer: int) -> None:
    model = model_of(family)
    mask = allowed(family, layer).double()
    uniform = mask / mask.sum(dim=-1, keepdim=True).clamp(min=1)
    with attending(model, "eager"):
        with by_hand(model, layer, 3, uniform):
            expected = logits(model)
        with qkv.hf.intervene(model, {(layer, 3): "uniform"}):
            found = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("family", sorted(VALUES))
def test_a_head_with_the_weights_of_another_prompt(family: str) -> None:
    model = model_of(family)
    inputs = {"input_ids": OTHER, "attention_mask": REAL, "use_cache": False}
    with attending(model, "eager"), torch.no_grad():
        weights = model(**inputs, output_attentions=True).attentions[1][:, 1]
        with by_hand(model, 1, 1, weights):
            expected = logits(model)
        with qkv.hf.intervene(model, {(1, 1): qkv.hf.CopyFrom(**inputs)}):
            found = logits(model)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_several_heads_and_calls_and_a_gradient() -> None:
    model = model_of("llama")
    with attending(model, "eager"):
        with by_hand(model, 0, 1, None), by_hand(model, 1, 3, None):
            expected = model(input_ids=IDS, labels=IDS)
            expected.loss.backward()
        gradient = model.model.embed_tokens.weight.grad.clone()
        model.zero_grad()
        with qkv.hf.intervene(model, {(0, 1): "off", (1, 3): "off"}):
            logits(model)
            found = model(input_ids=IDS, labels=IDS)
            found.loss.backward()
        torch.testing.assert_close(found.loss, expected.loss)
        torch.testing.assert_close(model.model.embed_tokens.weight.grad, gradient)
        model.zero_grad()


def test_generation_counts_layers_anew() -> None:
    model = model_of("llama")
    options = {"max_new_tokens": 4, "do_sample": False}
    with attending(model, "eager"):
        with by_hand(model, 1, 2, None):
            expected = model.generate(IDS, **options)
        with qkv.hf.intervene(model, {(1, 2): "off"}):
            found = model.generate(IDS, **options)
    assert torch.equal(found, expected)


def test_the_model_is_as_it_was_after_an_error() -> None:
    model = model_of("gpt2")
    with attending(model, "eager"):
        plain = logits(model)
        hooks = len(model._forward_pre_hooks)
        with pytest.raises(ZeroDivisionError), qkv.hf.intervene(model, {(0, 0): "off"}):
            1 / 0  # noqa: B018
        with (
            pytest.raises(qkv.ArgumentError, match="head 9"),
            qkv.hf.intervene(model, {(0, 9): "off"}),
        ):
            logits(model)
        short = qkv.hf.CopyFrom(input_ids=IDS[:, :4])
        with (
            pytest.raises(qkv.ShapeError, match="4 queries"),
            qkv.hf.intervene(model, {(0, 0): short}),
        ):
            logits(model)
        assert torch.equal(logits(model), plain)
        assert len(model._forward_pre_hooks) == hooks
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({(0, 0): "on"}, "is not a change of a head"),
        ({0: "off"}, "is not a pair of layer and head"),
        ({(True, 0): "off"}, "is not a pair of layer and head"),
        ({(0, -1): "off"}, "negative number; layers and heads count from 0"),
        ({(-1, 0): "off"}, "negative number; layers and heads count from 0"),
        ({(7, 0): "off"}, "layer 7 does not exist"),
        (None, "changes=None is not a dict"),
        ([1, 2], "is not a dict"),
        ({(0, 0): np.zeros(3)}, "is not a change of a head"),
    ],
)
def test_wrong_changes(changes: Any, fact: str) -> None:
    model = model_of("llama")
    with InDouble(), pytest.raises(qkv.ArgumentError, match=fact), qkv.hf.intervene(model, changes):
        logits(model)


def test_prompts_are_one_or_as_many_as_are_run() -> None:
    model = model_of("llama")
    with InDouble():
        wanted = qkv.hf.intervene(model, {(0, 0): qkv.hf.CopyFrom(input_ids=IDS[:1])})
        with wanted, torch.no_grad():
            both = model(input_ids=IDS).logits
            alone = model(input_ids=IDS[1:]).logits
        torch.testing.assert_close(both[1:], alone)
        with (
            pytest.raises(qkv.ShapeError, match=r"the batch is \(2,\), else \(1,\)"),
            qkv.hf.intervene(model, {(0, 0): qkv.hf.CopyFrom(input_ids=IDS)}),
        ):
            model(input_ids=IDS[:1])


def test_numbers_of_numpy() -> None:
    """Tables of pandas give such numbers."""
    model = model_of("llama")
    with InDouble():
        with qkv.hf.intervene(model, {(1, 2): "off"}):
            expected = logits(model)
        with qkv.hf.intervene(model, {(np.int64(1), np.int64(2)): "off"}):
            assert torch.equal(logits(model), expected)


def test_a_model_that_ignores_the_implementation() -> None:
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM(config).eval()
    with (
        pytest.raises(qkv.UnsupportedError, match="never calls qkv"),
        qkv.hf.intervene(model, {(0, 0): "off"}),
    ):
        model(input_ids=IDS)


@pytest.mark.parametrize("what", ["inspect", "intervene"])
def test_a_model_that_is_set_to_another_implementation_inside(what: str) -> None:
    """The mistake is the caller's, and not one of the model."""
    model = model_of("llama")
    done = qkv.hf.inspect(model) if what == "inspect" else qkv.hf.intervene(model, {(0, 0): "off"})
    before = model.config._attn_implementation

    def run() -> None:
        with done:
            model.set_attn_implementation("eager")
            model(input_ids=IDS)

    with pytest.raises(qkv.UnsupportedError, match="set to 'eager' inside of the `with`"):
        run()
    assert model.config._attn_implementation == before


@pytest.mark.parametrize("first", ["a call", "a copied prompt"])
def test_another_implementation_inside_is_noticed_after_calls_of_qkv(first: str) -> None:
    """Layers that had been called once were taken for layers that were changed."""
    model = model_of("llama")
    change = "off" if first == "a call" else qkv.hf.CopyFrom(input_ids=OTHER)

    def run() -> None:
        with qkv.hf.intervene(model, {(0, 0): change}):
            if first == "a call":
                model(input_ids=IDS)
            model.set_attn_implementation("eager")
            model(input_ids=IDS)

    calls = r" in 1 of 2 calls\." if first == "a call" else r"\."
    with pytest.raises(qkv.UnsupportedError, match=f"'eager' inside.*nothing was changed{calls}"):
        run()
