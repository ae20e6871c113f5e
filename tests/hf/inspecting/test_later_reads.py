"""Weights that are read after the layer has run are those it had, whatever its cache does then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import VOCABULARY, attending, model_of  # noqa: E402

import qkv.hf  # noqa: E402

qkv.hf.enable()

BOUND = 1e-10
IDS, OTHERS = torch.randint(3, VOCABULARY, (2, 1, 7), generator=torch.Generator().manual_seed(5))


def own(**options: Any) -> Callable[[Any], Any]:
    return lambda config: qkv.hf.Cache(config, **options)


CACHES: dict[str, Callable[[Any], Any]] = {
    "dynamic": lambda config: transformers.DynamicCache(config=config),
    "static": lambda config: transformers.StaticCache(config=config, max_cache_len=20),
    "contiguous": own(),
    "pages": own(page_size=4),
}


def attentions(family: str, implementation: str, **options: Any) -> list[Any]:
    """The weights of eight steps of generation, read when all of them are done."""
    with attending(model_of(family), implementation) as model, torch.no_grad():
        steps = model.generate(
            IDS,
            max_new_tokens=8,
            do_sample=False,
            output_attentions=True,
            return_dict_in_generate=True,
            disable_compile=True,
            **options,
        ).attentions
        return [torch.as_tensor(layer[...]) for step in steps for layer in step]


def close(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for got, want in zip(found, expected, strict=True):
        assert float((got - want).abs().max()) < BOUND


@pytest.mark.parametrize("family", ["mistral", "gpt-oss"])
def test_static_caches_of_windows(family: str) -> None:
    """Static caches of windows move all keys by one in every step."""
    static = {"cache_implementation": "static"}
    close(attentions(family, "qkv", **static), attentions(family, "eager", **static))


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 4])
def test_beams(page_size: int | None) -> None:
    """Beams change places, and give pages back."""
    cache = qkv.hf.Cache(model_of("llama").config, page_size=page_size)
    found = attentions("llama", "qkv", num_beams=3, cache=cache)
    expected = attentions("llama", "eager", num_beams=3)
    # With pages there are keys that are not tokens yet.
    close([got[..., : want.shape[-1]] for got, want in zip(found, expected)], expected)  # noqa: B905


@pytest.mark.parametrize("cache", CACHES)
def test_tokens_that_are_taken_back(cache: str) -> None:
    with attending(model_of("llama"), "eager") as model, torch.no_grad():
        expected = model(IDS, output_attentions=True).attentions
    with attending(model_of("llama"), "qkv") as model, torch.no_grad():
        kept = CACHES[cache](model.config)
        found = model(IDS, output_attentions=True, cache=kept).attentions
        kept.crop(-4)
        model(OTHERS[:, :4], cache=kept)
        close([torch.as_tensor(layer[...])[..., :7] for layer in found], list(expected))


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("cache", ["static", "contiguous", "pages"])
def test_observed_calls(cache: str, without_gradients: Any) -> None:
    """Observed calls are of the layer's own tensors, and say so when these have been written to."""
    seen: list[Any] = []
    kept: list[Any] = []

    def observe(call: Any) -> None:
        seen.append(call)
        kept.append(call.kept())

    with attending(model_of("llama"), "qkv") as model, without_gradients():
        expected = model(IDS, output_attentions=True).attentions
        store = CACHES[cache](model.config)
        with qkv.hf.observe(observe):
            model(IDS, cache=store)
        assert seen[0].inspect().weights[...][..., :7] == pytest.approx(expected[0].numpy())
        store.crop(-4)
        model(OTHERS[:, :4], cache=store)
        for compute in (seen[0].inspect, seen[0].output, seen[0].kept):
            with pytest.raises(qkv.UnsupportedError, match="written to"):
                compute()
        for call, weights in zip(kept, expected, strict=True):
            assert call.inspect().weights[...][..., :7] == pytest.approx(weights.numpy())
