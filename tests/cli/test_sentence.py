"""A sentence in the place of a file is read by a model that comes with qkv."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qkv.cli import main
from qkv.samples import language_model

TEXT = "Elizabeth could not help smiling at her"


def test_a_sentence_is_read_by_the_language_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", TEXT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "language"
    assert "".join(found["tokens"]) == TEXT
    weights = np.asarray(language_model().inspect(TEXT, keep="weights")[1].weights[0, 1])
    before = float(np.diagonal(weights, -1).mean())
    assert before > 0.5
    # `--model language` reads the same text in the usual way.
    assert main(["inspect", "--model", "language", "--text", TEXT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == found
    assert main(["inspect", TEXT]) == 0
    out = capsys.readouterr().out
    assert "language, 4 layers, 16 heads" in out
    assert f"layer 1 head 1    {before:.2f}" in out


def test_one_head_of_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--layer", "1", "--head", "1", "--query", "3", "--json"]
    assert main(["inspect", TEXT, *words]) == 0
    pairs = json.loads(capsys.readouterr().out)["heads"][0]["pairs"]
    weights = np.asarray(language_model().inspect(TEXT, keep="weights")[1].weights[0, 1, 3])
    best = np.argsort(-weights)[: len(pairs)]
    np.testing.assert_allclose([each["weight"] for each in pairs], weights[best], atol=1e-6)


def test_another_model_reads_a_sentence_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "the cat. the cat.", "--model", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == list("the cat. the cat.")
    assert main(["inspect", "--model", "language", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["tokens"]
    assert "".join(first).startswith("It is a truth universally acknowledged,")


def test_the_lab_opens_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["lab", TEXT, "--export", str(page)]) == 0
    html = page.read_text(encoding="utf-8")
    begin = html.index('id="qkv-data">') + len('id="qkv-data">')
    data = json.loads(html[begin : html.index("</script>", begin)])
    model = data["results"]["model"]
    assert (model["model"], "".join(model["tokens"])) == ("language", TEXT)
    assert data["view"]["panel"] == "inspect"


def test_a_sentence_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    """The last token, in the head that is most clearly of one kind."""
    assert main(["explain", TEXT, "--json"]) == 0
    (head,) = json.loads(capsys.readouterr().out)["heads"]
    record = language_model().inspect(TEXT, keep="weights")
    kinds = ("induction", "duplicate", "previous", "own", "sink")
    best = max(
        ((row[kind], row["layer"], row["head"]) for row in record.heads() for kind in kinds),
        key=lambda entry: float(np.nan_to_num(entry[0])),
    )
    layer = best[1]
    assert head["head"] == best[2]
    wanted = np.asarray(record[layer].weights[0, head["head"]])[-1]
    weights = head["rows"][0]["softmax"]["weights"]
    np.testing.assert_allclose(weights, wanted, atol=1e-6)
    assert main(["explain", TEXT]) == 0
    out = capsys.readouterr().out
    kind = f"head {best[2]}, which puts {best[0]:.2f} of its weight on"
    assert out.startswith(f"language, layer {layer} of 0..3: {kind}")
    assert f"=== ' her' (row {len(wanted) - 1}, head {best[2]}" in out


def test_one_head_of_a_sentence_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", TEXT, "--layer", "1", "--query", "3", "--json"]) == 0
    (head,) = json.loads(capsys.readouterr().out)["heads"]
    weights = np.asarray(language_model().inspect(TEXT, keep="weights")[1].weights[0, 0, 3])
    traced = head["rows"][0]["softmax"]["weights"]
    np.testing.assert_allclose(traced, weights, atol=1e-6)
    # Arrays are explained from the first row on, as before.
    assert main(["explain", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["heads"][0]["rows"][0]["q_index"] == 0
    assert main(["explain", TEXT, "--mechanism", "flash"]) == 2
    assert "FILE does not go with --mechanism" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["inspect", "explain"])
@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([TEXT, "--text", "another"], "and --text are two texts"),
        ([TEXT, "--causal"], "--causal goes with a file of arrays"),
        (["no such file.npz"], "cannot be read"),
        (["nothing"], "there is no file 'nothing'"),
        (["no.npz"], "cannot be read"),
        (["  "], "the text is empty"),
    ],
)
def test_what_is_no_sentence(
    command: str, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([command, *words]) == 2
    assert message in capsys.readouterr().err
