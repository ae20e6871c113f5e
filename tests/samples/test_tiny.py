"""The tiny model: what it computes, what its heads do, how it learned, and that its script runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from importlib import resources
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

import qkv
from qkv.samples import TinyModel, language_model, tiny_model
from scripts import script_module

Array = NDArray[np.float64]

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_tiny_model.py"
SAMPLES = ROOT / "src" / "qkv" / "samples"
VOCABULARY, WIDTH, HEADS, HEAD_DIM, WINDOW = 97, 64, 4, 16, 16
HELD_OUT = (101, 102, 103, 104)
"""Seeds of sequences that training and its curve have not seen."""


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return script_module(SCRIPT)


@pytest.fixture(scope="module")
def curve() -> dict[str, Array]:
    data = json.loads((SAMPLES / "tiny_loss.json").read_text(encoding="utf-8"))
    return {name: np.array(column) for name, column in data.items()}


# --- the model, from its definition --------------------------------------------------------------


def norm(x: Array) -> Array:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6)


def turned(rows: Array) -> Array:
    """RoPE: entries i and i + 8 as a complex number, turned by position / 10000 ** (i / 8)."""
    half = HEAD_DIM // 2
    angles = np.outer(np.arange(rows.shape[1]), 10000.0 ** (-np.arange(half) / half))
    z = (rows[..., :half] + 1j * rows[..., half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], axis=-1)


def written_out(ids: list[int]) -> tuple[list[Array], Array]:
    """The weights (heads, length, length) of both layers, and the logits, in float64."""
    stored = load_file(SAMPLES / "tiny.safetensors")
    table = {name: tensor.double().numpy() for name, tensor in stored.items()}
    distance = np.subtract.outer(np.arange(len(ids)), np.arange(len(ids)))
    allowed = [(distance >= 0) & (distance < WINDOW), distance >= 0]
    x = table["embedding.weight"][ids]
    weights = []
    for layer in range(2):
        q, k, v = (
            (norm(x) @ table[f"layers.{layer}.{role}_proj.weight"].T)
            .reshape(len(ids), HEADS, HEAD_DIM)
            .swapaxes(0, 1)
            for role in "qkv"
        )
        if layer == 0:
            q, k = turned(q), turned(k)
        scores = np.where(allowed[layer], q @ k.swapaxes(1, 2) / HEAD_DIM**0.5, -np.inf)
        w = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights.append(w / w.sum(axis=-1, keepdims=True))
        out = (weights[-1] @ v).swapaxes(0, 1).reshape(x.shape)
        x = x + out @ table[f"layers.{layer}.out_proj.weight"].T
    return weights, norm(x) @ table["unembedding.weight"].T


def losses(logits: Array, ids: list[int]) -> Array:
    """Negative log probability of each character but the first."""
    logits = logits.astype(np.float64)
    lse = np.log(np.exp(logits - logits.max()).sum(axis=-1)) + logits.max()
    return (lse[:-1] - logits[np.arange(len(ids) - 1), ids[1:]]).astype(np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("length", [1, 15, 64, 300])
def test_logits_are_those_of_the_definition_and_of_the_model_that_was_trained(
    script: ModuleType, length: int
) -> None:
    model = tiny_model()
    ids = [int(i) for i in np.random.default_rng(length).integers(0, VOCABULARY, length)]
    logits = model.logits(ids)
    assert logits.shape == (length, VOCABULARY)
    assert logits.dtype == np.float32
    _, expected = written_out(ids)
    tolerance = 1e-5 * np.abs(expected).max()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=tolerance)

    trained = script.Transformer()
    trained.load_state_dict(load_file(SAMPLES / "tiny.safetensors"))
    with torch.no_grad():
        in_torch = trained(torch.tensor([ids]))[0].numpy()
    np.testing.assert_allclose(logits, in_torch, rtol=0, atol=tolerance)


def test_what_each_layer_attends_with() -> None:
    model = tiny_model()
    ids = model.repeated_sequence(20, seed=7)
    expected, _ = written_out(ids)
    inputs = list(model.attention_inputs(ids))
    assert len(inputs) == 2
    for (query, key, value, variants), weights in zip(inputs, expected, strict=True):
        for array in (query, key, value):
            assert array.shape == (HEADS, len(ids), HEAD_DIM)
            assert array.dtype == np.float32
        record = qkv.inspect(query, key, value, *variants)
        np.testing.assert_allclose(record.weights[...], weights, atol=1e-5)


# --- its heads -----------------------------------------------------------------------------------


def head_scores(model: TinyModel, period: int) -> tuple[Array, Array]:
    """The weight of each head on the character that a head of its layer looks for.

    A head of layer 0 looks for the previous character; one of layer 1, in the second half, for the
    one after the earlier occurrence of the present one.
    """
    previous, induction = np.zeros((2, HEADS))
    for seed in HELD_OUT:
        (first, second), _ = written_out(model.repeated_sequence(period, seed))
        previous += first.diagonal(-1, 1, 2).mean(axis=1)
        induction += second.diagonal(1 - period, 1, 2)[:, 1:].mean(axis=1)
    return previous / len(HELD_OUT), induction / len(HELD_OUT)


@pytest.mark.parametrize("period", [32, 200])
def test_a_head_looks_back_and_a_head_finds_what_came_next(period: int) -> None:
    """The period is the one that the model was trained on, or six times that."""
    previous, induction = head_scores(tiny_model(), period)
    assert previous.max() >= 0.8
    assert induction.max() >= 0.6


def test_what_repeats_is_known_and_what_does_not_is_not() -> None:
    model = tiny_model()
    for seed in HELD_OUT:
        ids = model.repeated_sequence(32, seed)
        lost = losses(model.logits(ids), ids)
        assert lost[:31].mean() > 4.0, "random characters cannot be known"
        assert lost[32:].mean() < 0.5


def test_it_repeats_real_text() -> None:
    model = tiny_model()
    ids = model.encode("Zwölf Boxkämpfer jagen Viktor quer.\nZwölf Boxkämpfer jagen Vik")
    assert model.tokens(model.logits(ids)[-3:].argmax(axis=-1)) == ["i", "k", "t"]


# --- its curve -----------------------------------------------------------------------------------


def test_the_loss_falls_all_at_once_when_both_heads_are_there(curve: dict[str, Array]) -> None:
    step, again = curve["step"], curve["loss again"]
    assert again[0] == pytest.approx(np.log(VOCABULARY), abs=0.3)
    assert again[-1] < 0.3
    before, after = np.flatnonzero(again > 3.5)[-1], np.flatnonzero(again < 1.0)[0]
    assert step[after] - step[before] < 0.1 * step[-1]
    for head in ("previous-token head", "induction head"):
        assert curve[head][before] < 0.3
        assert curve[head][after] > 0.4


def test_the_curve_ends_where_the_model_is(script: ModuleType, curve: dict[str, Array]) -> None:
    trained = script.Transformer()
    trained.load_state_dict(load_file(SAMPLES / "tiny.safetensors"))
    at_the_end = (curve["previous-token head"][-1], curve["induction head"][-1])
    assert script.best_heads(trained) == pytest.approx(at_the_end, abs=1e-3)
    ids, repeats = script.repeated_sequences(torch.Generator().manual_seed(HELD_OUT[0]))
    with torch.no_grad():
        lost, again = script.next_token_losses(trained, ids), repeats[:, 1:]
    assert lost[again].mean().item() == pytest.approx(curve["loss again"][-1], abs=0.1)
    assert lost[~again].mean().item() == pytest.approx(curve["loss first time"][-1], abs=0.3)


def test_the_page_shows_the_curve_and_runs(script: ModuleType, curve: dict[str, Array]) -> None:
    drawn = (ROOT / "docs" / "tiny_loss.svg").read_text(encoding="utf-8")
    assert drawn == script.picture({name: column.tolist() for name, column in curve.items()})
    page = (ROOT / "docs" / "tiny-model.md").read_text(encoding="utf-8")
    assert "](tiny_loss.svg)" in page
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(block, {})  # its assertions


# --- its script ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_few_steps_of_the_script(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--steps", "8", "--into"]
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        subprocess.run([*command, str(tmp_path / name)], check=True, timeout=300)
    once, again = (tmp_path / name / "tiny.safetensors" for name in ("once", "again"))
    assert once.read_bytes() == again.read_bytes(), "the same machine makes the same bytes"

    curve = json.loads((tmp_path / "once" / "tiny_loss.json").read_text())
    assert curve["step"] == [1, 8]
    assert np.isfinite(curve["loss again"]).all()
    assert curve["loss again"][-1] < curve["loss again"][0]
    ElementTree.parse(tmp_path / "once" / "tiny_loss.svg")
    made, shipped = load_file(once), load_file(SAMPLES / "tiny.safetensors")
    assert {n: t.shape for n, t in made.items()} == {n: t.shape for n, t in shipped.items()}


# --- its edges -----------------------------------------------------------------------------------


def test_it_is_small_and_needs_no_framework() -> None:
    assert len(resources.files("qkv.samples").joinpath("tiny.safetensors").read_bytes()) < 2e6
    program = (
        "import sys, qkv.samples; m = qkv.samples.tiny_model(); m.logits(m.encode('to be'));"
        "print({'torch', 'jax', 'transformers'} & set(sys.modules))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"


def test_characters() -> None:
    model = tiny_model()
    assert model.name == "tiny"
    text = "".join(map(chr, range(32, 127))) + "\n"
    ids = model.encode(text)
    assert sorted(ids) == list(range(1, VOCABULARY))
    assert "".join(model.tokens(ids)) == text
    assert model.encode("ä\t") == [0, 0]
    assert model.tokens([0]) == ["\ufffd"]


def test_no_characters() -> None:
    model = tiny_model()
    assert model.logits(model.encode("")).shape == (0, VOCABULARY)
    assert [query.shape for query, *_ in model.attention_inputs([])] == [(HEADS, 0, HEAD_DIM)] * 2


@pytest.mark.parametrize(
    ("ids", "fact"),
    [([3, 97], "0 to 96"), ([-1], "0 to 96"), ([0.5], "whole number"), ([[1, 2]], "whole number")],
)
def test_ids_that_are_none(ids: list[object], fact: str) -> None:
    model = tiny_model()
    for use in (model.logits, model.tokens, lambda given: list(model.attention_inputs(given))):
        with pytest.raises(qkv.ArgumentError, match=fact):
            use(ids)


def test_a_text_is_taken_where_ids_are() -> None:
    tiny, text = tiny_model(), "qkv makes #7"
    for use in (tiny.logits, tiny.loss, lambda given: next(tiny.attention_inputs(given))[0]):
        np.testing.assert_array_equal(use(text), use(tiny.encode(text)))
        np.testing.assert_array_equal(use(np.array(tiny.encode(text))), use(text))
    language, sentence = language_model(), "She could not"
    found = language.next_probabilities(sentence)
    np.testing.assert_array_equal(found, language.next_probabilities(language.encode(sentence)))
    assert tiny.inspect(np.array(tiny.encode(text))).texts == list(text)


def test_layers_that_are_not_there() -> None:
    model = tiny_model()
    assert model.inspect("the cat", keep=[1])[1].weights.shape == (1, HEADS, 7, 7)
    for use in (
        lambda: model.inspect("the cat", keep=[0, 9]),
        lambda: model.logits("the cat", {(9, 0): "off"}),
        lambda: model.inspect("the cat").layer(9),
    ):
        with pytest.raises(qkv.ArgumentError, match="layer 9 does not exist") as found:
            use()
        assert found.value.action == "Choose from 0 to 1."
    with pytest.raises(qkv.ArgumentError, match=r"keep=\[-1\] counts from the last layer"):
        model.inspect("the cat", keep=[-1])
