"""Models of float32 under autocast, whose rotated queries and keys are wider than their values."""

from __future__ import annotations

import copy
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import inputs_of, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

qkv.hf.enable()

IDS = inputs_of("llama")["input_ids"]
NARROW = 0.05  # The spread of bfloat16 in weights of two layers.


def llama(implementation: str) -> Any:
    model = copy.deepcopy(model_of("llama")).float()
    model.set_attn_implementation(implementation)
    return model


def test_weights_are_read_inside_and_outside() -> None:
    found, expected = {}, {}
    for layers, implementation in ((expected, "eager"), (found, "qkv")):
        model = llama(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            weights = model(IDS, output_attentions=True).attentions
            layers["inside"] = weights[0].mean(1)
        layers["outside"] = weights[0].mean(1)
        (weights[0] ** 2).sum().backward()
        layers["gradient"] = model.model.layers[0].self_attn.q_proj.weight.grad
    assert found["inside"].dtype == torch.float32
    assert float((found["outside"].detach().sum(-1) - 1).abs().max()) < 1e-5
    for name, want in expected.items():
        error = (found[name] - want).detach().norm() / want.detach().norm()
        assert float(error) < NARROW, name


def test_observed_calls_are_those_that_are_computed() -> None:
    model, calls = llama("qkv"), []
    with torch.no_grad(), qkv.hf.observe(lambda call: calls.append(call.kept())):
        with torch.autocast("cpu", torch.bfloat16):
            model(IDS)
        outside = calls[0].output()
    assert calls[0].query.dtype == calls[0].value.dtype == torch.bfloat16
    assert torch.equal(outside, qkv.attention(*_operands(calls[0]), qkv.Causal()).transpose(1, 2))
    assert calls[0].inspect().entropy.shape == (len(IDS), 4, IDS.shape[1])


def _operands(call: Any) -> Any:
    return call.query, call.key, call.value


@pytest.mark.parametrize("options", [{}, {"page_size": 4}, {"dtype": "int8"}])
def test_a_cache_of_qkv(options: dict[str, Any]) -> None:
    model = llama("qkv")
    cache = qkv.hf.Cache(model.config, **options)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(IDS, use_cache=False).logits[:, 8:].double()
        model(IDS[:, :8], cache=cache)
        steps = [model(IDS[:, n : n + 1], cache=cache).logits for n in range(8, IDS.shape[1])]
    found = torch.cat(steps, 1).double()
    assert float((found - expected).norm() / expected.norm()) < NARROW
