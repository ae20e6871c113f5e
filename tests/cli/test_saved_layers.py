"""`qkv inspect RECORD --layer N`: one layer of a saved record of a model, from its kept weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.samples.tiny import tiny_model

RNG = np.random.default_rng(0)
QUERY, KEY = RNG.normal(size=(2, 4, 9, 8)), RNG.normal(size=(2, 2, 9, 8))


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["inspect", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(list(words)) == 2
    return capsys.readouterr().err


@pytest.fixture
def two_texts(tmp_path: Path) -> str:
    """Layer 1 of two is kept, of a batch of two texts; the first row of the second is padding."""
    record = qkv.ModelRecord("own", keep=[1])
    real = np.ones((2, 9), bool)
    real[1, 0] = False
    for number in range(2):
        record.add(QUERY, KEY, qkv.Causal(), name=f"layer {number}", scale=0.5, real=real)
    record.texts = list("abcdefghi")
    record.save(tmp_path / "r.safetensors")
    return str(tmp_path / "r.safetensors")


@pytest.mark.parametrize("layer", ["1", "-1"])
@pytest.mark.parametrize("batch", [0, 1])
def test_the_weights_are_those_of_the_definition(
    layer: str, batch: int, two_texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--layer", layer, "--head", "3", "--query", "6", "--batch", str(batch)]
    report = json_of(capsys, two_texts, *place)
    assert report["tokens"] == (None if batch else list("abcdefghi"))
    exp = np.exp(0.5 * QUERY[batch, 3, 6] @ KEY[batch, 1, :7].T)
    weights = exp / exp.sum()
    (head,) = report["heads"]
    assert head["entropy"] == pytest.approx(-(weights * np.log(weights)).sum(), rel=1e-5)
    best = np.argsort(-weights)
    assert [pair["kv_index"] for pair in head["pairs"]] == best.tolist()
    np.testing.assert_allclose([p["weight"] for p in head["pairs"]], weights[best], rtol=1e-5)


def test_it_prints_what_the_model_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same is printed of a layer that `--layer` kept when the record was saved."""
    text, path = "the cat and the cat", str(tmp_path / "r.safetensors")
    tiny_model().inspect(text, keep="weights").save(path)
    of_model = ["--model", "tiny", "--text", text, "--layer", "1"]
    for more in ([], ["--head", "2"], ["--head", "2", "--query", "9"]):
        assert main(["inspect", *of_model, *more]) == 0
        expected = capsys.readouterr().out.partition("Next: ")[0]
        assert main(["inspect", path, "--layer", "1", *more]) == 0
        shown, _, following = capsys.readouterr().out.partition("Next: ")
        assert shown == expected
    assert main(["inspect", path, "--layer", "1"]) == 0
    *_, following = capsys.readouterr().out.partition("Next: ")
    assert following.startswith(f"qkv inspect {path} --layer 1 --query ")
    for layer in ("1", "-1"):
        assert main(["inspect", *of_model[:-1], layer, "--save", path]) == 0
        capsys.readouterr()
        expected = {**json_of(capsys, *of_model), "source": path}
        assert json_of(capsys, path, "--layer", "1") == expected


def test_a_layer_that_was_not_kept(
    two_texts: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = complaint(capsys, "inspect", two_texts, "--layer", "0")
    assert "has the scores of layer 0, and not its query and key" in said
    assert 'keep="weights" or keep=[0]' in said
    assert "qkv inspect --model NAME --layer 0 --save FILE" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "2"], "Choose from 0 to 1."),
        (["--layer", "1", "--head", "4"], "Choose from 0 to 3."),
        (["--layer", "1", "--batch", "2"], "Choose from 0 to 1."),
        (["--layer", "1", "--top", "0"], "--top 0 shows nothing"),
        (["--layer", "1", "--save", "a"], "--save goes with --model, not with"),
        (["--layer", "1", "--text", "a"], "--text goes with --model, not with"),
        (["--layer", "1", "--scale", "2"], "--scale goes with a file of arrays"),
        (["--layer", "1", "--layout", "blhd"], "--layout goes with a file of arrays"),
        (["--layer", "1", "--causal"], "--causal goes with a file of arrays"),
        (["--head", "1"], "Say which with --layer N"),
        (["--batch", "1"], "--batch goes with"),
    ],
)
def test_words_that_do_not_fit(
    words: list[str], message: str, two_texts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in complaint(capsys, "inspect", two_texts, *words)


def test_the_arithmetic_needs_values(two_texts: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "explain", two_texts, "--layer", "1")
    assert "is a record of a model, which holds no value rows" in said
    assert "qkv explain --model NAME --layer 1" in said
