"""Heads changed in every family, encoder-decoders and pictures too, against torch written by hand.

The truth is transformers' own eager attention. Each family calls it as a function of its module; a
wrapper around that function computes the other output of one head in plain torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REASON = "changing heads of models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import FAMILIES, TRANSLATORS, attending, inputs_of, logits_of, model_of, seen  # noqa: E402

import qkv.hf  # noqa: E402

HEAD = 2


def other_inputs(inputs: dict[str, Any]) -> dict[str, Any]:
    """Another prompt of the same shape, with the same padding."""
    found = dict(inputs)
    for name, x in inputs.items():
        if name.endswith("input_ids"):
            found[name] = torch.where(x >= 3, (x - 3 + 11) % 57 + 3, x)
        elif x.is_floating_point():
            found[name] = x.roll(5, dims=-1)
    return found


def by_hand(weights: Any, value: Any) -> Any:
    """`weights @ value` of one head, from the key-value head that it shares with others."""
    heads_of_a_group = weights.shape[1] // value.shape[1]
    return weights[:, HEAD] @ value[:, HEAD // heads_of_a_group]


@contextmanager
def eager_by_hand(
    model: Any, change: str | None, layer: int = -1, copied: Any = None
) -> Iterator[list[Any]]:
    """Eager attention with one head of one call changed; gives the weights of all calls."""
    calls: list[Any] = []
    replaced: dict[Any, Any] = {}
    modules = {sys.modules[type(module).__module__] for module in model.modules()}

    def wrapped(original: Any) -> Any:
        def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, *a: Any, **k: Any):  # type: ignore[no-untyped-def]
            output, weights = original(module, query, key, value, mask, *a, **k)
            here = len(calls) == layer
            calls.append(weights.detach())
            if not here:
                return output, weights
            output = output.clone()
            if change == "off":
                output[:, :, HEAD] = 0
            elif change == "uniform":
                allowed = torch.ones_like(weights) if mask is None else (mask > -1e30) + 0 * weights
                allowed = allowed.to(weights.dtype).expand_as(weights)
                even = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
                output[:, :, HEAD] = by_hand(even, value)
            else:
                output[:, :, HEAD] = by_hand(copied[layer], value)
            return output, weights

        return attend

    for module in modules:
        original = getattr(module, "eager_attention_forward", None)
        if original is not None:
            replaced[module] = original
            module.eager_attention_forward = wrapped(original)
    try:
        yield calls
    finally:
        for module, original in replaced.items():
            module.eager_attention_forward = original


def interrupted(run: Callable[[], Any]) -> None:
    run()
    raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_every_layer_and_family(family: str) -> None:
    model = model_of(family)
    torch.manual_seed(3)
    inputs = inputs_of(family, "left")
    other = other_inputs(inputs)
    said = {} if family in ("vit", "siglip") else {"use_cache": False}

    def outcome() -> Any:
        return seen(family, inputs, logits_of(family, model(**inputs, **said)))

    with attending(model, "eager"), torch.no_grad():
        with eager_by_hand(model, None) as copied:
            model(**other, **said)
        plain = outcome()
        # Encoder, then own and other tokens of each decoder layer.
        assert len(copied) == {"siglip": 4}.get(family, 6 if family in TRANSLATORS else 2)
        for layer in range(len(copied)):
            for change in ("off", "uniform", "copy"):
                with eager_by_hand(model, change, layer, copied):
                    expected = outcome()
                asked = qkv.hf.CopyFrom(**other, **said) if change == "copy" else change
                with qkv.hf.intervene(model, {(layer, HEAD): asked}):  # type: ignore[dict-item]
                    found = outcome()
                scale = max(1.0, float(expected.abs().max()))
                assert float((found - expected).abs().max()) < 1e-9 * scale, (layer, change)
                moved = float((expected - plain).abs().max())
                assert moved > 1e-4, (
                    f"layer {layer}, {change}: nothing changes, which shows nothing"
                )
        assert torch.equal(outcome(), plain)
        with pytest.raises(KeyboardInterrupt), qkv.hf.intervene(model, {(0, HEAD): "uniform"}):
            interrupted(lambda: model(**inputs, **said))
        assert torch.equal(outcome(), plain)
    assert model.config._attn_implementation == "eager"
    assert not model._forward_pre_hooks
