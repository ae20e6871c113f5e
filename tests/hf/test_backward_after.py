"""Backward passes that begin after the `with`, of models that compute their layers again."""

from __future__ import annotations

from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

import qkv.hf  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

IDS = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(0))
WAYS = {
    "intervene": lambda model: qkv.hf.intervene(model, {(0, 1): "off"}),
    "inspect": qkv.hf.inspect,
}


def model(reentrant: bool | None) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.4,
    )
    made = transformers.LlamaForCausalLM(config).train()
    if reentrant is not None:
        made.gradient_checkpointing_enable({"use_reentrant": reentrant})
    return made


def gradient(way: str, reentrant: bool | None, inside: bool) -> Any:
    made = model(reentrant)
    with WAYS[way](made):
        loss = made(input_ids=IDS, labels=IDS, use_cache=False).loss
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    return made.model.layers[0].self_attn.q_proj.weight.grad


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_layers_that_are_computed_again_outside_are_refused(way: str, reentrant: bool) -> None:
    """Gradients were those of heads that are on: 1.9 off. Inside they are right."""
    expected = gradient(way, None, inside=True)
    assert torch.equal(gradient(way, None, inside=False), expected)
    assert float((gradient(way, reentrant, inside=True) - expected).abs().max()) < 1e-5
    with pytest.raises(qkv.UnsupportedError, match="backward inside of the `with`"):
        gradient(way, reentrant, inside=False)
