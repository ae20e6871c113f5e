"""`generate` with `qkv.hf.Cache` gives what it gives with transformers' own cache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import SIZES, VOCABULARY, attending, model_of  # noqa: E402

import qkv  # noqa: E402
import qkv.hf  # noqa: E402
from qkv.hf.stored_tensor import StoredTensor  # noqa: E402

qkv.hf.enable()

BOUND = 1e-10
PAGED = {"page_size": 4}
CACHES = {"contiguous": {}, "paged": PAGED}
FAMILIES = ("llama", "mistral", "gemma2", "gpt-oss", "gpt2", "deepseek-v3", "llama4")
HEADS = {**SIZES, "n_layer": 2, "n_head": 4}
OWN_ATTENTION: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bloom": ("BloomForCausalLM", "BloomConfig", HEADS),
    "falcon": ("FalconForCausalLM", "FalconConfig", {**HEADS, "alibi": True}),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        {**HEADS, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
    ),
}
SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 0.7, "num_return_sequences": 2},
    "beam": {"do_sample": False, "num_beams": 3},
    "chunks": {"do_sample": False, "prefill_chunk_size": 3},
}


def prompts(batch: int = 3, length: int = 9) -> dict[str, Any]:
    """Prompts that are padded on the left."""
    torch.manual_seed(1)
    mask = torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        mask[row, : 2 * row] = 0
    return {"input_ids": torch.randint(3, VOCABULARY, (batch, length)), "attention_mask": mask}


def generated(
    family: str, implementation: str, inputs: dict[str, Any], cache: Any, **options: Any
) -> tuple[Any, Any]:
    """Ten tokens, beyond the window, and their logits."""
    with attending(model_of(family), implementation) as model, torch.no_grad():
        torch.manual_seed(0)  # The first call has made the model, with random numbers.
        output = model.generate(
            **inputs,
            cache=cache,
            max_new_tokens=10,
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
    return output.sequences, torch.stack(output.logits)


def same(got: tuple[Any, Any], expected: tuple[Any, Any]) -> None:
    assert torch.equal(got[0], expected[0])
    close(got[1], expected[1])


def close(got: Any, expected: Any) -> None:
    assert got.shape == expected.shape
    assert float((got - expected).abs().max()) < BOUND * max(1.0, float(expected.abs().max()))


def config_of(family: str) -> Any:
    return model_of(family).config


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_search(family: str, kind: str) -> None:
    expected = generated(family, "eager", prompts(), None, do_sample=False)
    cache = qkv.hf.Cache(config_of(family), **CACHES[kind])
    same(generated(family, "qkv", prompts(), cache, do_sample=False), expected)
    assert cache.get_seq_length() == prompts()["input_ids"].shape[1] + 9


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_ways_to_search(family: str, search: str, kind: str) -> None:
    expected = generated(family, "eager", prompts(), None, **SEARCHES[search])
    cache = qkv.hf.Cache(config_of(family), **CACHES[kind])
    same(generated(family, "qkv", prompts(), cache, **SEARCHES[search]), expected)


LONG = [
    (family, kind, beams)
    for family, kind in (("llama", "paged"), ("gemma2", "contiguous"))
    for beams in (1, 2)
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the text has")  # The model has fewer positions.
@pytest.mark.sampled(("family", "kind", "beams"), LONG, one_in=4)
def test_512_tokens_one_by_one_have_the_logits_of_all_at_once(
    family: str, kind: str, beams: int
) -> None:
    cache, ids = qkv.hf.Cache(config_of(family), **CACHES[kind]), prompts(1, 12)["input_ids"]
    with torch.no_grad():
        with attending(model_of(family), "qkv") as model:
            output = model.generate(
                ids, cache=cache, num_beams=beams, do_sample=False, min_new_tokens=500,
                max_new_tokens=500, return_dict_in_generate=True, output_logits=True,
                output_scores=True,
            )  # fmt: skip
        with attending(model_of(family), "eager") as model:
            whole = model(output.sequences).logits[0, 11:-1]
    assert output.sequences.shape == (1, 512)
    if beams == 1:
        close(torch.cat(output.logits), whole)
    else:
        new = output.sequences[0, 12:, None]
        close(output.sequences_scores, whole.log_softmax(-1).gather(-1, new).mean()[None])


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("helper", ["a model", "the prompt"])
def test_assisted_generation(family: str, helper: str, kind: str) -> None:
    """Tokens that were guessed wrong are taken back."""
    inputs = prompts(1, 12)
    inputs["input_ids"][0, 6:] = inputs["input_ids"][0, :6]
    assistant = copy.deepcopy(model_of(family))
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter += 0.05 * parameter.std() * torch.randn_like(parameter)
    model_kwargs = {"prompt_lookup_num_tokens": 4} if helper == "the prompt" else {}
    if helper == "a model":
        model_kwargs = {"assistant_model": assistant}
    expected = generated(family, "eager", inputs, None, do_sample=False)
    cache = qkv.hf.Cache(config_of(family), **CACHES[kind])
    same(generated(family, "qkv", inputs, cache, do_sample=False, **model_kwargs), expected)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_one_prompt_for_many_requests(family: str) -> None:
    """A prompt that was computed once is shared, and every request gives what it gives alone."""
    whole = prompts(4, 13)["input_ids"]
    whole[:, :9] = whole[:1, :9]
    prompt = qkv.hf.Cache(config_of(family), **PAGED)
    with attending(model_of(family), "qkv") as model, torch.no_grad():
        model(input_ids=whole[:1, :9], cache=prompt)
    full = [layer.cache for layer in prompt.layers if not layer.is_sliding]
    assert [cache.pages_held for cache in full] == [3] * len(full)
    for row in range(4):
        inputs = {"input_ids": whole[row : row + 1]}
        expected = generated(family, "eager", inputs, None, do_sample=False)
        request = copy.deepcopy(prompt) if row % 2 else prompt.fork()
        same(generated(family, "qkv", inputs, request, do_sample=False), expected)
        pages = request.layers[-1].cache.page_table[0]
        assert pages[:2].tolist() == full[-1].page_table[0, :2].tolist(), "full pages are shared"
        assert pages[2] != full[-1].page_table[0, 2], "the page that is written to is not"
    batch = prompt.fork()
    batch.batch_repeat_interleave(4)
    expected = generated(family, "eager", {"input_ids": whole}, None, do_sample=False)
    same(generated(family, "qkv", {"input_ids": whole}, batch, do_sample=False), expected)
    assert prompt.get_seq_length() == 9
    del batch, request
    assert [cache.pages_held for cache in full] == [3] * len(full)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoders_and_decoders(family: str, kind: str) -> None:
    """Keys of the encoder lie in a cache too; models read them there."""
    inputs = prompts()
    expected = generated(family, "eager", inputs, None, num_beams=2, do_sample=False)
    decoder = qkv.hf.Cache(config_of(family), **CACHES[kind])
    cache = transformers.EncoderDecoderCache(decoder, qkv.hf.Cache(config_of(family)))
    same(generated(family, "qkv", inputs, cache, num_beams=2, do_sample=False), expected)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_other_implementations_get_dense_tensors(implementation: str) -> None:
    expected = generated("llama", implementation, prompts(), None, do_sample=False)
    cache = qkv.hf.Cache(config_of("llama"), **PAGED)
    same(generated("llama", implementation, prompts(), cache, do_sample=False), expected)


def test_a_conversation_goes_on_and_is_taken_back() -> None:
    """The same cache for a second turn, cropped, and after a reset."""
    inputs = {"input_ids": prompts(1, 12)["input_ids"]}
    cache = qkv.hf.Cache(config_of("llama"), **PAGED)
    with attending(model_of("llama"), "qkv") as model, torch.no_grad():
        expected = model(**inputs).logits
        ids = inputs["input_ids"]
        first = model(input_ids=ids[:, :7], cache=cache).logits
        model(input_ids=ids[:, :4], cache=cache)
        cache.crop(-4)
        rest = model(input_ids=ids[:, 7:], cache=cache).logits
        close(torch.cat([first, rest], 1), expected)
        cache.reset()
        assert cache.get_seq_length() == cache.nbytes == 0
        close(model(input_ids=ids, cache=cache).logits, expected)


@pytest.mark.parametrize("config", [True, False], ids=["config", "no config"])
def test_pages_are_read_in_place(config: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step gathers the rows: attention gets pages, not a dense tensor."""
    seen: list[Any] = []
    attention = qkv.attention

    def attend(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append((key, value))
        return attention(query, key, value, *args, **kwargs)

    def refuse(self: StoredTensor) -> Any:
        raise AssertionError("a dense tensor was made")

    monkeypatch.setattr(qkv, "attention", attend)
    monkeypatch.setattr(StoredTensor, "dense", refuse)
    cache = qkv.hf.Cache(config_of("llama") if config else None, **PAGED)
    generated("llama", "qkv", prompts(), cache, do_sample=False)
    assert len(seen) == 20
    assert all(isinstance(rows, qkv.Paged) for pair in seen for rows in pair)
    stored = cache.layers[0].cache.read().key.pages
    assert seen[-2][0].pages.data_ptr() == stored.data_ptr()


def test_inspecting_with_a_cache() -> None:
    """Records and weights come from the dense rows."""
    inputs = {"input_ids": prompts(2, 9)["input_ids"]}
    tokens = inputs["input_ids"]
    found = []
    for cache in (qkv.hf.Cache(config_of("llama"), **PAGED), transformers.DynamicCache()):
        with attending(model_of("llama"), "qkv") as model, torch.no_grad():
            model(input_ids=tokens[:, :7], cache=cache)
            output = model(input_ids=tokens[:, 7:], cache=cache, output_attentions=True)
            found.append([weights[..., :9] for weights in output.attentions])
    for got, expected in zip(*found, strict=True):
        close(got, expected)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, PAGED], ids=CACHES)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.one_in(3)
def test_int8_changes_logits_a_little(family: str, options: dict[str, Any]) -> None:
    """What docs/caches.md states, for tiny models with wide weights: within 3 % of the spread."""
    model = copy.deepcopy(model_of(family)).float()
    model.set_attn_implementation("qkv")
    tokens = torch.randint(3, VOCABULARY, (2, 40))
    cache = qkv.hf.Cache(model.config, dtype="int8", **options)
    with torch.no_grad():
        exact = model(input_ids=tokens).logits
        parts = [
            model(input_ids=tokens[:, a:b], cache=cache).logits
            for a, b in ((0, 30), (30, 31), (31, 40))
        ]
    change = torch.cat(parts, 1) - exact
    assert 1e-4 < float(change.norm() / (exact - exact.mean(-1, keepdim=True)).norm()) < 0.03
    whole = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=tokens, cache=whole)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    if not options and family != "gemma2":
        dim = whole.layers[0].keys.shape[-1]
        assert cache.nbytes <= 2 * held * (dim + 4) / (4 * dim) < held


class TestErrors:
    @pytest.mark.parametrize(
        "options", [{"page_size": 0}, {"page_size": 4, "num_pages": -1}, {"dtype": "int4"}]
    )
    def test_impossible_caches(self, options: dict[str, Any]) -> None:
        with pytest.raises(qkv.ArgumentError):
            qkv.hf.Cache(**options)

    def test_another_batch_gets_the_same_words_in_every_layer(self) -> None:
        said = set()
        for family, options in (("llama", {}), ("llama", PAGED), ("mistral", {})):
            cache = qkv.hf.Cache(config_of(family), **options)
            with attending(model_of(family), "qkv") as model, torch.no_grad():
                model(input_ids=prompts(2)["input_ids"], cache=cache)
                with pytest.raises(qkv.ShapeError, match=r"a batch of 3, .* one of 2") as found:
                    model(input_ids=prompts(3)["input_ids"], cache=cache)
            said.add(found.value.fact + found.value.action)
        assert len(said) == 1

    @pytest.mark.parametrize("name", OWN_ATTENTION)
    def test_models_that_compute_attention_themselves_take_no_pages(self, name: str) -> None:
        model_name, config_name, options = OWN_ATTENTION[name]
        config = getattr(transformers, config_name)(**options)
        message = f"{name} models compute attention themselves and never call qkv"
        with pytest.raises(qkv.UnsupportedError, match=message) as found:
            qkv.hf.Cache(config, page_size=4)
        assert "qkv.hf.Cache(config) serves any model" in found.value.action
        torch.manual_seed(0)
        model = getattr(transformers, model_name)(config).double().eval()
        inputs = {**prompts(), "max_new_tokens": 5, "do_sample": False}
        with torch.no_grad():
            expected = model.generate(**inputs)
            found = model.generate(**inputs, cache=qkv.hf.Cache(config))
        assert torch.equal(found, expected)

    def test_out_of_pages(self) -> None:
        cache = qkv.hf.Cache(config_of("llama"), page_size=4, num_pages=3)
        ids = prompts(1, 12)["input_ids"]
        with attending(model_of("llama"), "qkv") as model, torch.no_grad():
            expected = model(input_ids=ids).logits
            model(input_ids=ids[:, :10], cache=cache)
            with pytest.raises(qkv.ShapeError, match="1 pages are needed and 0 of 3 are free"):
                model(input_ids=ids[:, :3], cache=cache)
            rest = model(input_ids=ids[:, 10:], cache=cache).logits
        close(rest, expected[:, 10:])

    def test_training(self) -> None:
        refused = pytest.raises(qkv.UnsupportedError, match="no gradient")
        with attending(model_of("llama"), "qkv") as model, refused:
            model(**prompts(), cache=qkv.hf.Cache())

    def test_crops_and_orders_that_do_not_fit(self) -> None:
        cache = qkv.hf.Cache(**PAGED)
        rows = torch.ones(2, 1, 5, 4)
        cache.update(rows, rows, 0)
        with pytest.raises(qkv.ArgumentError, match="truncated to -1"):
            cache.crop(-6)
        with pytest.raises(qkv.ArgumentError, match=r"To forget 2 tokens, call crop\(-2\)"):
            cache.crop(2)
        theirs = transformers.DynamicCache()
        theirs.update(rows, rows, 0)
        with pytest.raises(ValueError, match="positive value"):
            theirs.crop(2)
        with pytest.raises(qkv.ArgumentError, match="no sequence 2"):
            cache.reorder_cache(torch.tensor([0, 2]))
        assert cache.get_seq_length() == 5

    def test_stored_rows_are_not_written_to(self) -> None:
        cache = qkv.hf.Cache(**PAGED)
        rows = torch.ones(2, 1, 5, 4)
        key, _ = cache.update(rows, rows, 0)
        with pytest.raises(qkv.UnsupportedError, match="writes to keys"):
            key.mul_(2.0)
        assert torch.equal(key + 0, torch.nn.functional.pad(rows, (0, 0, 0, 3)))


def test_steps_after_inference_mode() -> None:
    """Memory that was made in inference mode is written to outside it."""
    make: Callable[[], Any]
    for make in (qkv.hf.Cache, lambda: qkv.hf.Cache(**PAGED)):
        cache = make()
        rows = torch.ones(1, 1, 3, 4)
        with torch.inference_mode():
            cache.update(rows, rows, 0)
        with torch.no_grad():
            key, _ = cache.update(rows, rows, 0)
        assert torch.equal((key + 0)[:, :, :6], torch.ones(1, 1, 6, 4))


@pytest.mark.parametrize("paged", [False, True])
def test_int8_rows_are_rounded_once(paged: bool) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-127, 128, size=(5, 2, 4, 16)).astype(np.int8)
    scales = rng.uniform(0.01, 0.1, size=(5, 2, 4)).astype(np.float32)
    offset = rng.normal(size=(2, 16)).astype(np.float32)
    exact = values * scales.astype(np.float64)[..., None] + offset[:, None]
    rows: Any = qkv.Quantized(*map(torch.from_numpy, (values, scales, offset)))
    if paged:
        rows = qkv.Paged(rows, np.array([[3, 1]]))
        exact = exact[[3, 1]].transpose(1, 0, 2, 3).reshape(1, 2, 8, 16)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        found = StoredTensor(rows, None, dtype).dense()
        assert found.dtype == dtype
        error = np.abs(found.double().numpy() - exact)
        assert (error <= 0.51 * torch.finfo(dtype).eps * np.abs(exact) + 3e-7).all()


def test_layers_that_were_cut_off() -> None:
    """The types of such layers stay in the configuration, which `DynamicCache` takes as well."""
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3}, head_dim=8, sliding_window=6, layer_types=types
    )
    config.num_hidden_layers = 2
    assert len(qkv.hf.Cache(config).layers) == 2
    assert len(transformers.DynamicCache(config=config).layers) == 2
