"""Training with attention dropout: eager, with checkpoints, compiled, against the formula."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import numpy as np
import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from transformers import AttentionInterface, AttentionMaskInterface  # noqa: E402
from transformers.masking_utils import eager_mask  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.testing import truth  # noqa: E402

qkv.hf.enable()

# torch's compiler uses what torch has deprecated.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

BOUND = 1e-10
VOCABULARY, BATCH, LENGTH = 61, 3, 14
DROPOUT = 0.1
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "initializer_range": 0.2,
}


def model_of(family: str) -> Any:
    """Two layers, wide, in float64, that drop attention weights and nothing else."""
    torch.manual_seed(0)
    if family == "gpt2":
        config = transformers.GPT2Config(
            **SIZES, n_inner=48, attn_pdrop=DROPOUT, resid_pdrop=0.0, embd_pdrop=0.0
        )
        model = transformers.GPT2Model(config)
    elif family == "bert":
        config = transformers.BertConfig(
            **SIZES, attention_probs_dropout_prob=DROPOUT, hidden_dropout_prob=0.0
        )
        model = transformers.BertModel(config, add_pooling_layer=False)
    else:
        config = transformers.LlamaConfig(**SIZES, num_key_value_heads=2, attention_dropout=DROPOUT)
        model = transformers.LlamaModel(config)
    model.config.use_cache = False
    model.set_attn_implementation("qkv")
    return model.double().train()


def loss_of(model: Callable[..., Any]) -> Any:
    """The loss of rows of which some are padded."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
    real = torch.ones(BATCH, LENGTH, dtype=torch.long)
    real[1, 10:] = 0
    states = model(input_ids=tokens, attention_mask=real).last_hidden_state
    along = torch.randn(states.shape, generator=generator, dtype=states.dtype)
    return (states * along * real[..., None]).sum()


def gradients(model: Any, loss: Any) -> list[Any]:
    model.zero_grad(set_to_none=True)
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@contextmanager
def written_out(model: Any, drops: list[qkv.Dropout]) -> Iterator[None]:
    """The model with attention as the formula says; each call drops what the next of these says."""
    rest = iter(drops)

    def attend(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any
    ) -> tuple[Any, None]:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        arrays = [x.detach().numpy() for x in (query, key, value)]
        factors = np.array(truth(*arrays, [next(rest)]).factors)
        weights = (query @ key.mT * scaling + mask).softmax(-1) * torch.from_numpy(factors)
        return (weights @ value).transpose(1, 2), None

    AttentionInterface.register("written out", attend)
    AttentionMaskInterface.register("written out", eager_mask)
    model.set_attn_implementation("written out")
    try:
        yield
    finally:
        model.set_attn_implementation("qkv")


WAYS = {
    "plain": (None, False),
    "checkpoints": (False, False),
    "reentrant checkpoints": (True, False),
    "compiled": (None, True),
    "compiled checkpoints": (False, True),
}


@pytest.mark.slow
@pytest.mark.sampled(("family", "way"), list(product(["gpt2", "bert", "llama"], WAYS)), one_in=5)
def test_gradients_are_those_of_what_was_dropped(family: str, way: str) -> None:
    """Gradients use the very weights that the forward pass has dropped, in each layer others."""
    reentrant, compiled = WAYS[way]
    model = model_of(family)
    calls: list[qkv.hf.LayerCall] = []
    torch.manual_seed(3)
    with qkv.hf.observe(calls.append), torch.no_grad():
        loss_of(model)
    drops = [v for call in calls for v in call.variants if isinstance(v, qkv.Dropout)]
    assert len({drop.seed for drop in drops}) == 2
    assert {drop.p for drop in drops} == {DROPOUT}
    with written_out(model, drops):
        right_loss = loss_of(model)
        right = gradients(model, right_loss)
    if reentrant is not None:
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    torch.manual_seed(3)
    loss = loss_of(run)
    found = gradients(model, loss)
    torch.compiler.reset()
    assert abs(loss.item() - right_loss.item()) <= BOUND * abs(right_loss.item())
    for got, exact in zip(found, right, strict=True):
        assert float((got - exact).abs().max()) <= BOUND * max(1, float(exact.abs().max()))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_each_step_drops_others_and_the_loss_falls(compiled: bool) -> None:
    model = model_of("gpt2")
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    losses = []
    for seed in (4, None, 4):
        if seed is not None:
            torch.manual_seed(seed)
        losses.append(loss_of(run).item())
    assert losses[0] == losses[2] != losses[1]
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(30):
        optimiser.zero_grad()
        loss = loss_of(run)
        loss.backward()
        optimiser.step()
    torch.compiler.reset()
    assert loss.item() < losses[0] - 100, f"from {losses[0]:.0f} to {loss.item():.0f}"
