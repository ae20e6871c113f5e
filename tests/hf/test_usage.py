"""A warning for models that accept the name of the implementation and never call it."""

from __future__ import annotations

import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import SIZES, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

qkv.hf.enable()

TOKENS = torch.arange(3, 13)[None]
UNUSED = {
    "bloom": ("BloomForCausalLM", "BloomConfig", {**SIZES, "n_head": 4, "n_layer": 2}),
    "deberta-v2": ("DebertaV2Model", "DebertaV2Config", SIZES),
    "swin-v2": (
        "Swinv2Model",
        "Swinv2Config",
        {"image_size": 16, "patch_size": 2, "embed_dim": 8, "depths": [1, 1], "num_heads": [2, 2],
         "window_size": 4},
    ),
}  # fmt: skip


def unused(family: str) -> tuple[Any, dict[str, Any]]:
    model_name, config_name, model_kwargs = UNUSED[family]
    config = getattr(transformers, config_name)(**model_kwargs)
    config._attn_implementation = "qkv"
    model = getattr(transformers, model_name)(config).eval()
    if family == "swin-v2":
        return model, {"pixel_values": torch.randn(1, 3, 16, 16)}
    return model, {"input_ids": TOKENS}


@pytest.mark.parametrize("family", UNUSED)
def test_a_model_that_never_calls_it_is_reported(family: str) -> None:
    model, inputs = unused(family)
    with pytest.warns(qkv.hf.NotUsedWarning, match="never calls it"):
        usage = qkv.hf.check(model, **inputs)
    assert usage.calls == {}
    assert usage.silent
    wrappers = {outer for outer in usage.silent for s in usage.silent if s.startswith(f"{outer}.")}
    assert not wrappers, "a layer is named, not the modules around it"
    assert not usage.complete


def test_bloom_would_add_a_boolean_to_its_scores() -> None:
    model, inputs = unused("bloom")
    with pytest.raises(qkv.UnsupportedError, match="computes attention itself"):
        model(**inputs)


def test_a_model_that_uses_it_passes_in_silence() -> None:
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        usage = qkv.hf.check(model, TOKENS)
    assert usage.calls == {f"model.layers.{i}.self_attn": 1 for i in range(2)}
    assert usage.silent == ()
    assert usage.complete


def test_another_implementation_is_named() -> None:
    model = model_of("llama")
    model.set_attn_implementation("sdpa")
    with pytest.warns(qkv.hf.NotUsedWarning, match='attn_implementation="sdpa"'):
        assert not qkv.hf.check(model, TOKENS).complete


def test_one_layer_that_does_not_call_it_is_named() -> None:
    class Own(torch.nn.Module):
        """A module that is no attention layer of transformers."""

        def forward(self, hidden_states: Any, **kwargs: Any) -> Any:
            return hidden_states, None

    Own.__name__ = "OwnAttention"
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    layer = model.model.layers[1]
    theirs, layer.self_attn = layer.self_attn, Own()
    try:
        with pytest.warns(qkv.hf.NotUsedWarning, match=r"model\.layers\.1\.self_attn"):
            usage = qkv.hf.check(model, TOKENS)
    finally:
        layer.self_attn = theirs
    assert usage.silent == ("model.layers.1.self_attn",)
    assert usage.calls == {"model.layers.0.self_attn": 1}


@pytest.mark.parametrize("part", ["MemoryAttentionMLP", "RelativeAttentionBias"])
def test_parts_that_help_attention_are_no_layers(part: str) -> None:
    """Edge TAM and Phi-4 multimodal have some, beside layers that do call."""
    model = model_of("llama")
    model.set_attn_implementation("qkv")
    layer = model.model.layers[0]
    theirs, layer.mlp = layer.mlp, torch.nn.Sequential(layer.mlp)
    layer.mlp.__class__ = type(part, (torch.nn.Sequential,), {})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert qkv.hf.check(model, TOKENS).complete
    finally:
        layer.mlp = theirs


def test_pages_of_continuous_batching_are_refused() -> None:
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(qkv.UnsupportedError, match="pages of its own"):
        qkv.hf.attention.attend(torch.nn.Module(), query, query, query, None, cache=object())


def test_enabling_twice_changes_nothing() -> None:
    qkv.hf.enable()
    before = dict(transformers.AttentionInterface._global_mapping)
    qkv.hf.enable()
    assert transformers.AttentionInterface._global_mapping == before


BEFORE = """
from transformers import GPT2Config, GPT2Model

GPT2Model._from_config(GPT2Config(n_embd=8, n_layer=1, n_head=2), attn_implementation="qkv")
"""


@pytest.mark.slow
def test_what_transformers_says_before_it_is_enabled_leads_to_it() -> None:
    """The guide and the docstring quote the error of a process that leaves the call out."""
    ran = subprocess.run(
        [sys.executable, "-c", BEFORE], capture_output=True, text=True, encoding="utf-8",
        timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 1
    guide = Path(__file__).parents[2].joinpath("docs", "migrate.md").read_text(encoding="utf-8")
    (quoted,) = re.findall(r"gets `(ValueError: [^`]*)` from transformers", " ".join(guide.split()))
    assert ran.stderr.splitlines()[-1].replace("`", "").startswith(quoted)
    assert "qkv.hf.enable()" in guide[guide.index(quoted.partition(": ")[2]) :]
    assert "is not supported" in " ".join((qkv.hf.enable.__doc__ or "").split())


def test_what_a_model_raises_is_the_cause() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8))
    with pytest.raises(qkv.ArgumentError, match=r"(?s)Sequential raised TypeError.*list") as raised:
        qkv.hf.check(layer, [1])
    assert isinstance(raised.value.__cause__, TypeError)
    assert ("argument 0", "list [1]") in raised.value.seen


def test_a_model_that_cannot_be_switched_is_not_told_to_be() -> None:
    """transformers leaves it with its own attention, and the advice was what had just been done."""
    torch.manual_seed(0)
    config = transformers.BloomConfig(**{**SIZES, "n_head": 4, "n_layer": 2})
    model = transformers.BloomForCausalLM(config).eval()
    model.set_attn_implementation("qkv")
    with pytest.warns(qkv.hf.NotUsedWarning, match="computes attention itself"):
        qkv.hf.check(model, input_ids=torch.tensor([[5, 6, 7]]))
