"""`qkv inspect`, `explain` and `lab` of a record that was saved: the record's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import qkv
from qkv.cli import main
from qkv.lab import open_file

RNG = np.random.default_rng(0)
Q = RNG.normal(size=(2, 20, 4, 8)).astype(np.float32)
K = RNG.normal(size=(2, 25, 2, 8)).astype(np.float32)
BIAS = RNG.normal(size=(20, 25)).astype(np.float32)


@pytest.fixture(scope="module")
def record() -> qkv.Record:
    """A record of tensors, in the other layout, with variants and options of every kind."""
    query, key = torch.from_numpy(Q), torch.from_numpy(K)
    return qkv.inspect(
        query,
        key,
        key,
        qkv.Causal(),
        torch.from_numpy(BIAS),
        layout="blhd",
        scale=0.5,
        q_offset=torch.tensor([5, 2]),
        backend="blocked",
    )


@pytest.fixture
def path(record: qkv.Record, tmp_path: Path) -> str:
    record.save(tmp_path / "r.safetensors")
    return str(tmp_path / "r.safetensors")


@pytest.mark.parametrize("batch", [0, 1])
def test_inspect_prints_what_the_record_says(
    batch: int, record: qkv.Record, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", path, "--batch", str(batch)]) == 0
    printed, said = capsys.readouterr().out, record.summary(batch=batch)
    # The name of the file is longer than what `summary` says in its place.
    assert "causal, float32[20, 25]" in printed
    assert _table_of_heads(printed) == _table_of_heads(said)


def _table_of_heads(text: str) -> list[str]:
    _, _, table = text.partition("head  entropy")
    return table.splitlines()[:6]


def test_its_json_has_the_weights_of_the_definition(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", path, "--json", "--query", "7", "--head", "3", "--batch", "1"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["q_offset"], data["scale"], data["causal"]) == (2, 0.5, True)
    assert data["variants"] == ["Causal()", "float32[20, 25]"]
    scores = 0.5 * Q[1, 7, 3].astype(float) @ K[1, :, 1].astype(float).T + BIAS[7]
    exp = np.where(np.arange(25) <= 7 + 2, np.exp(scores), 0)
    weights = exp / exp.sum()
    best = np.argsort(-weights)[:8]
    (head,) = data["heads"]
    assert [pair["kv_index"] for pair in head["pairs"]] == best.tolist()
    np.testing.assert_allclose([p["weight"] for p in head["pairs"]], weights[best], rtol=1e-5)
    np.testing.assert_allclose(
        head["entropy"], -(weights[:10] * np.log(weights[:10])).sum(), rtol=1e-5
    )


def test_explain_has_its_variants(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", path, "--query", "7", "--head", "3", "--batch", "1", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["heads"][0]["rows"][0]
    scores = 0.5 * Q[1, 7, 3].astype(float) @ K[1, :, 1].astype(float).T + BIAS[7]
    exp = np.where(np.arange(25) <= 7 + 2, np.exp(scores), 0)
    np.testing.assert_allclose(row["softmax"]["weights"], exp / exp.sum(), rtol=1e-9)


def test_the_page_shows_the_record(record: qkv.Record, path: str, tmp_path: Path) -> None:
    heads = open_file(path).heads
    assert heads is not None
    np.testing.assert_array_equal(heads.layers[0].entropy(), record.entropy[0])
    page = tmp_path / "page.html"
    assert main(["inspect", path, "--html", str(page)]) == 0
    assert "r.safetensors" in page.read_text()


@pytest.mark.parametrize(
    "words",
    [["--causal"], ["--scale", "2"], ["--q-offset", "3"], ["--layout", "blhd"], ["--text", "a"]],
)
@pytest.mark.parametrize("command", ["inspect", "explain"])
def test_options_that_a_record_has_itself_are_refused(
    command: str, words: list[str], path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, path, *words]) == 2
    assert f"{words[0]} goes with" in capsys.readouterr().err


@pytest.mark.parametrize("of_a_model", [False, True])
def test_the_lab_takes_no_variants_for_a_record(
    of_a_model: bool, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if of_a_model:
        model = qkv.ModelRecord("m")
        model.add(Q.swapaxes(1, 2), Q.swapaxes(1, 2), name="layer 0")
        model.save(path)
    assert main(["lab", path, "--causal", "--export", f"{path}.html"]) == 2
    assert "is a saved record, which has its variants" in capsys.readouterr().err


def test_what_it_cannot_be_read_as_is_refused(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", path]) == 2
    assert "Read it with qkv.Record.load" in capsys.readouterr().err


@pytest.mark.parametrize("queries", ["decoder_input_ids", None])
def test_queries_of_another_sequence_are_not_named_as_keys(
    queries: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Query 1 of a decoder was shown as token 1 of what its encoder had read."""
    record = qkv.ModelRecord("both", keep="weights")
    sequences = (queries, "input_ids")
    record.add(Q[:1, :3, :2].swapaxes(1, 2), K[:1, :4].swapaxes(1, 2), name="cross",
               one_sequence=False, sequences=sequences)  # fmt: skip
    record.texts, record.decoder_texts = ["read", "by", "the", "encoder"], ["and", "its", "answer"]
    file = str(tmp_path / "both.safetensors")
    record.save(file)
    assert main(["inspect", file, "--layer", "0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == record.texts
    named = {pair["q_index"]: pair["q_token"] for of in found["heads"] for pair in of["pairs"]}
    known = dict(enumerate(record.decoder_texts))
    assert named == {row: known[row] if queries else None for row in named}
    assert main(["inspect", file, "--layer", "0", "--query", "1"]) == 0
    context = capsys.readouterr().out.splitlines()[1]
    assert context == ("query 1: and [its] answer" if queries else "query 1")
