"""Decoding steps that layers and further steps take from one another."""

from __future__ import annotations

import threading
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import GROUPED, VOCABULARY  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.masks import state_mask  # noqa: E402

SIZES = {**GROUPED, "num_hidden_layers": 4, "intermediate_size": 48}
MODELS: dict[str, Any] = {
    "full": ("Llama", {}),
    "window": ("Mistral", {"sliding_window": 6}),
    "both": ("Gemma3Text", {"sliding_window": 6, "layer_types": [
        "sliding_attention", "full_attention"] * 2}),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _enabled() -> None:
    qkv.hf.enable()


def _model(kind: str, implementation: str) -> Any:
    name, settings = MODELS[kind]
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    config._attn_implementation = implementation
    suffix = "ForCausalLM"
    model_class = getattr(transformers, f"{name.removesuffix('Text')}{suffix}", None) or getattr(
        transformers, f"{name}{suffix}"
    )
    model = model_class(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 1.5 / parameter.shape[-1] ** 0.5)
    return model


def _generated(model: Any, padded: bool, new: int = 12) -> Any:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(2, VOCABULARY, (3, 9), generator=generator)
    seen = torch.ones_like(tokens)
    if padded:
        seen[1, :4] = 0
        seen[2, :8] = 0
    return model.generate(
        tokens,
        attention_mask=seen,
        max_new_tokens=new,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )


def _count_front_door(monkeypatch: Any) -> list[int]:
    """The number of query rows of every call of `qkv.attention`."""
    rows: list[int] = []
    attention = qkv.attention

    def counted(query: Any, *rest: Any, **options: Any) -> Any:
        rows.append(query.shape[2])
        return attention(query, *rest, **options)

    monkeypatch.setattr(qkv, "attention", counted)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
def test_generated_logits_are_those_of_sdpa(kind: str, padded: bool, monkeypatch: Any) -> None:
    expected = _generated(_model(kind, "sdpa"), padded)
    model = _model(kind, "qkv")
    _generated(model, padded)
    rows = _count_front_door(monkeypatch)
    found = _generated(model, padded)
    assert torch.equal(found.sequences, expected.sequences)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)
    if not padded:
        assert rows.count(1) <= 2, "steps of one token were bound anew in every layer"


def _call(mask: Any, kv_len: int, **keywords: Any) -> tuple[Any, Any]:
    """A layer's output and what torch gives, for random rows."""
    torch.manual_seed(kv_len)
    query, key, value = (
        torch.randn(1, heads, n, 8, dtype=torch.float64)
        for heads, n in ((4, 1), (2, kv_len), (2, kv_len))
    )
    module = torch.nn.Identity()
    out, _ = qkv.hf.attention.attend(module, query, key, value, mask, scaling=0.3, **keywords)
    scores = query @ key.repeat_interleave(2, 1).mT * 0.3
    softcap = keywords.get("softcap")
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    bias = keywords.get("position_bias")
    if bias is not None:
        scores = scores + bias
    if mask is not None:
        scores = scores.masked_fill(~mask.pattern.dense(), -torch.inf)
    sinks = keywords.get("s_aux")
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(1, 4, 1, 1)], -1)
        value = torch.cat([value, torch.zeros(1, 2, 1, 8, dtype=torch.float64)], 2)
    return out, (scores.softmax(-1) @ value.repeat_interleave(2, 1)).transpose(1, 2)


def _mask(kv_len: int, q_offset: int | None = None, skip: bool = False) -> Any:
    place = kv_len - 1 if q_offset is None else q_offset
    sizes = {"batch_size": 1, "q_length": 1, "kv_length": kv_len, "q_offset": place}
    return state_mask(**sizes, allow_is_causal_skip=skip)


@pytest.mark.parametrize("skip", [False, True], ids=["a mask", "no mask"])
def test_softcap_bias_and_sinks_of_a_layer_are_used(skip: bool) -> None:
    bias = torch.linspace(-2, 2, 4 * 40, dtype=torch.float64).view(1, 4, 1, 40)
    sinks = [torch.tensor([x, 0.0, 1.0, -x], dtype=torch.float64) for x in (0.5, 2.0)]
    halves = torch.tensor([0.5, 0.0, 1.0, -0.5], dtype=torch.float16)
    of_equal_bytes = halves.view(torch.bfloat16)
    says: list[dict[str, Any]] = [
        {}, {"softcap": 2.0}, {"softcap": 5.0}, {"s_aux": sinks[0]}, {"s_aux": sinks[1]},
        {"s_aux": halves}, {"s_aux": of_equal_bytes},
    ]  # fmt: skip
    for kv_len in (5, 6, 7, 7, 9, 30):
        mask = _mask(kv_len, skip=skip)
        assert (mask is None) == skip
        for keywords in [*says, {"position_bias": bias[..., :kv_len]}] * 3:
            torch.testing.assert_close(*_call(mask, kv_len, **keywords), rtol=1e-12, atol=1e-12)
            sinks[1] += 0.25  # A parameter may change in place.


def test_the_place_of_the_query_is_heard() -> None:
    for q_offset in (3, 9, 4, 4, 11):
        for _ in range(3):
            torch.testing.assert_close(*_call(_mask(12, q_offset), 12), rtol=1e-12, atol=1e-12)


def test_a_mask_that_is_written_to_holds() -> None:
    mask = _mask(8)
    for _ in range(3):
        _call(mask, 8)
    mask[..., 2] = False
    out, expected = _call(mask, 8)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_a_step() -> None:
    mask = _mask(8)
    for _ in range(3):
        _call(mask, 8)
    query, key, value = (torch.randn(1, 2, n, 8, requires_grad=True) for n in (1, 8, 8))
    out, _ = qkv.hf.attention.attend(torch.nn.Identity(), query, key, value, mask)
    out.sum().backward()
    assert query.grad is not None
    assert value.grad is not None
    assert float(value.grad.sum()) == pytest.approx(16)


@pytest.mark.parametrize("skip", [False, True], ids=["a mask", "no mask"])
def test_observers_see_every_layer(skip: bool) -> None:
    mask = _mask(8, skip=skip)
    for _ in range(3):
        _call(mask, 8)
    seen: list[Any] = []
    with qkv.hf.observe(seen.append):
        _call(mask, 8)
    (call,) = seen
    assert (call.q_offset, call.kv_offset) == (7, 0)


def test_threads_do_not_share_a_step() -> None:
    model = _model("full", "qkv")
    expected = [_generated(model, padded).sequences for padded in (False, True)]
    found: list[list[Any]] = [[], []]

    def job(n: int) -> None:
        for _ in range(4):
            found[n].append(_generated(model, bool(n)).sequences)

    threads = [threading.Thread(target=job, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(f, expected[n]) for n in range(2) for f in found[n])
    assert [len(f) for f in found] == [4, 4]
