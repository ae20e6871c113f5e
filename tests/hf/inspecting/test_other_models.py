"""Interventions and records are of the model that is named, however and wherever it is called."""

from __future__ import annotations

import threading
from typing import Any

import pytest

REASON = "changing heads of models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import BOTH, SIZES, T5, VOCABULARY  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402

qkv.hf.enable()

IDS = torch.randint(3, VOCABULARY, (1, 9), generator=torch.Generator().manual_seed(3))
WIDE = {**SIZES, "initializer_range": 0.4}


def llama(seed: int) -> Any:
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE)).eval()


def logits(model: Any, ids: Any = IDS) -> Any:
    with torch.no_grad():
        return model(ids).logits


def silenced(model: Any, layer: int, head: int) -> Any:
    """Logits with what a head writes set to 0, by a hook of torch on eager attention."""
    model.set_attn_implementation("eager")
    projection = model.model.layers[layer].self_attn.o_proj
    size = projection.in_features // model.config.num_attention_heads

    def silence(module: Any, args: Any) -> Any:
        changed = args[0].clone()
        changed[..., head * size : (head + 1) * size] = 0
        return (changed,)

    hook = projection.register_forward_pre_hook(silence)
    try:
        return logits(model)
    finally:
        hook.remove()


def close(found: Any, expected: Any) -> bool:
    return bool(torch.allclose(found, expected, atol=1e-4, rtol=1e-4))


def test_a_model_that_is_not_named_stays_as_it_is() -> None:
    named, other = llama(0), llama(1)
    expected = silenced(named, 1, 2)
    other.set_attn_implementation("qkv")
    plain = logits(other)
    with qkv.hf.intervene(named, {(1, 2): "off"}):
        assert torch.equal(logits(other), plain)
        assert close(logits(named), expected)
        assert torch.equal(logits(other), plain)
        # The other model's layers are not counted, and the second call is as the first.
        assert close(logits(named), expected)


def test_other_models_do_not_make_a_layer_exist() -> None:
    named, other = llama(0), llama(1)
    other.set_attn_implementation("qkv")

    def run() -> None:
        with qkv.hf.intervene(named, {(77, 0): "off"}):
            logits(named)
            for _ in range(40):
                logits(other)

    with pytest.raises(qkv.ArgumentError, match="layer 77 does not exist"):
        run()


def test_other_threads() -> None:
    """One of the same model has the same layers changed; one of another has not."""
    named, other = llama(0), llama(1)
    expected = silenced(named, 1, 2)
    other.set_attn_implementation("qkv")
    plain, found, rest = logits(other), [], []
    with qkv.hf.intervene(named, {(1, 2): "off"}):
        threads = [
            threading.Thread(target=lambda: found.extend(logits(named) for _ in range(5))),
            threading.Thread(target=lambda: found.extend(logits(named) for _ in range(5))),
            threading.Thread(target=lambda: rest.extend(logits(other) for _ in range(5))),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 10
    assert all(close(each, expected) for each in found)
    assert all(torch.equal(each, plain) for each in rest)


def test_calls_that_run_no_hooks() -> None:
    """sentence-transformers calls its model in this way."""
    model = llama(0)
    expected = silenced(model, 1, 2)
    with qkv.hf.intervene(model, {(1, 2): "off"}), torch.no_grad():
        for _ in range(3):
            assert close(model.forward(IDS).logits, expected)
            assert close(model.lm_head(model.model(IDS).last_hidden_state), expected)
    assert "forward" not in vars(model)
    with qkv.hf.inspect(model) as record, torch.no_grad():
        model.forward(IDS)
    assert len(record) == SIZES["num_hidden_layers"]


@pytest.mark.slow
def test_an_encoder_that_runs_alone_keeps_its_numbers() -> None:
    """`generate` calls the encoder once, and then the decoder again and again."""
    torch.manual_seed(0)
    config = transformers.T5Config(**{**BOTH, **T5, "initializer_factor": 4.0})
    model = transformers.T5ForConditionalGeneration(config).eval()
    with qkv.hf.inspect(model) as record, torch.no_grad():
        model(input_ids=IDS, decoder_input_ids=IDS[:, :4])
    (layer,) = [
        i for i, each in enumerate(record) if each.name == "decoder.block.0.layer.0.SelfAttention"
    ]
    with torch.no_grad():
        plain = model.get_encoder()(IDS).last_hidden_state
        with qkv.hf.intervene(model, {(layer, 0): "off"}):
            states = model.get_encoder()(IDS).last_hidden_state
            changed = model(input_ids=IDS, decoder_input_ids=IDS[:, :4]).logits
    assert close(states, plain)
    assert not close(changed, model(input_ids=IDS, decoder_input_ids=IDS[:, :4]).logits)


def test_a_layer_that_is_called_many_times() -> None:
    """ALBERT's: its calls are counted in each run of the model, or of the part that holds them."""
    torch.manual_seed(0)
    sizes = {**WIDE, "num_hidden_layers": 3, "embedding_size": 16}
    model = transformers.AlbertModel(transformers.AlbertConfig(**sizes)).eval()
    with qkv.hf.intervene(model, {(2, 0): "off"}), torch.no_grad():
        first = model(IDS).last_hidden_state
        assert torch.equal(model.forward(IDS).last_hidden_state, first)
    with qkv.hf.intervene(model, {(0, 0): "off"}), torch.no_grad():
        assert not close(model(IDS).last_hidden_state, first)


def test_a_record_has_no_layers_of_other_runs() -> None:
    model, other = llama(0), llama(1)
    other.set_attn_implementation("qkv")
    with qkv.hf.inspect(model) as record, torch.no_grad():
        logits(other)
        model(IDS)
        model.model(IDS)
        logits(other)
    assert len(record) == SIZES["num_hidden_layers"]
