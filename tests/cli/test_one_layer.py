"""`--layer` with `--model`: one layer of a model, its heads, its rows and their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkv.cli import main
from qkv.samples.tiny import tiny_model

TEXT = "the cat and the cat"


def json_of(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def tiny_weights(layer: int, head: int, row: int) -> list[float]:
    """A row of weights of the tiny model's last layer, from the definition in float64."""
    model = tiny_model()
    query, key, *_ = list(model.attention_inputs(model.repeated_sequence()))[layer]
    scores = [
        sum(float(a) * float(b) for a, b in zip(query[head, row], k, strict=True)) / 4
        for k in key[head, : row + 1]
    ]
    exp = np.exp(np.array(scores) - max(scores))
    return [*(exp / exp.sum()), *[0.0] * (key.shape[1] - row - 1)]


def test_a_row_of_a_head(capsys: pytest.CaptureFixture[str]) -> None:
    place = ["--model", "tiny", "--layer", "1", "--head", "2", "--query", "40"]
    wanted = tiny_weights(1, 2, 40)
    (head,) = json_of(capsys, "inspect", *place)["heads"]
    assert head["head"] == 2
    for pair in head["pairs"]:
        assert pair["weight"] == pytest.approx(wanted[pair["kv_index"]], abs=1e-5)
    (traced,) = json_of(capsys, "explain", *place)["heads"]
    np.testing.assert_allclose(traced["rows"][0]["softmax"]["weights"], wanted, atol=1e-12)
    assert main(["explain", *place]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("tiny, layer 1 of 0..1\n")
    assert "=== '/' (row 40, head 2, batch 0) ===" in shown


def test_layers_count_from_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", "--model", "tiny", "--layer"]
    assert json_of(capsys, *words, "-1") == json_of(capsys, *words, "1")
    assert main([*words, "1", "--query", "all"]) == 0
    every = capsys.readouterr().out
    assert main([*words, "1"]) == 0
    assert capsys.readouterr().out == every
    assert "Next: qkv inspect --model tiny --layer 1 --query" in every


def test_rotation_and_window_are_in_the_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--model", "tiny", "--layer", "0", "--query", "20"]) == 0
    shown = capsys.readouterr().out
    assert "Dot products: R q . R k" in shown
    assert "SlidingWindow" in shown


def test_a_layer_of_transformers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The weights are those of the model's own eager attention."""
    torch = pytest.importorskip("torch", reason="models of transformers need torch")
    transformers = pytest.importorskip("transformers", reason="it is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="it is not installed")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    bytes_of = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[])
    )
    bytes_of.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_of.decoder = tokenizers.decoders.ByteLevel()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=1.0, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaModel(config).eval()
    model.save_pretrained(tmp_path)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bytes_of)
    tokenizer.save_pretrained(tmp_path)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        wanted = model(input_ids=ids, output_attentions=True).attentions[1][0].numpy()
    (tmp_path / "t.txt").write_text(TEXT, encoding="utf-8")
    words = ["--model", str(tmp_path), "--text", str(tmp_path / "t.txt"), "--layer", "1"]
    traced = json_of(capsys, "explain", *words, "--head", "3", "--query", "17")["heads"][0]
    weights = traced["rows"][0]["softmax"]["weights"]
    np.testing.assert_allclose(weights, wanted[3, 17], atol=2e-5)
    heads = json_of(capsys, "inspect", *words, "--query", "17")["heads"]
    for head in heads:
        for pair in head["pairs"]:
            at = head["head"], 17, pair["kv_index"]
            assert pair["weight"] == pytest.approx(wanted[at], abs=2e-5)
    assert [head["head"] for head in heads] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "0"], "--layer goes with --model"),
        (["a.npz", "--text", "t"], "--text goes with --model"),
        (["--model", "tiny", "a.npz"], "the file 'a.npz' and --model tiny are two inputs"),
        (["--model", "tiny", "--causal"], "--causal goes with a file of arrays"),
        (["--model", "tiny", "--layer", "5"], "Choose from 0 to 1."),
        (["--model", "tiny", "--head", "5"], "Choose from 0 to 3."),
        (["--model", "tiny", "--query", "99"], "Choose from 0 to 63."),
        (["--model", "tiny", "--query", "all"], "Choose one with --query, 0 to 63"),
        (["--model", "tiny", "--mechanism", "causal"], "--model does not go with --mechanism"),
        (["--top", "0"], "--top 0 shows nothing"),
    ],
)
def test_words_of_explain(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert "qkv inspect --help" not in err


# --- long files ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def long_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray, np.ndarray]:
    path = tmp_path_factory.mktemp("long") / "long.npz"
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 20_000, 8)).astype("f4")
    np.savez(path, q=q, k=k, v=v)
    return str(path), q[0], k[0]


def test_a_long_file_shows_the_keys_with_most_weight(
    long_file: tuple[str, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    path, query, key = long_file
    scores = key.astype(float) @ query[5].astype(float) / np.sqrt(8)
    weights = np.exp(scores - scores.max()) / np.exp(scores - scores.max()).sum()
    best = sorted(np.argsort(-weights)[:3])
    assert main(["explain", path, "--query", "5", "--top", "3"]) == 0
    shown = capsys.readouterr().out
    share = weights[best].sum()
    assert (
        f"Of 20,000 keys, the 3 with most weight are shown; together they have {share:.4f}" in shown
    )
    softmax = shown.split("Softmax")[1].split("weights add to")[0]
    rows = [line.split() for line in softmax.splitlines()[2:] if line.strip()]
    assert [int(row[1]) for row in rows] == best
    assert [float(row[5]) for row in rows] == [round(w, 4) for w in weights[best]]
    assert main(["explain", path, "--causal", "--grad", "--query", "1"]) == 2
    assert "Leave out --grad" in capsys.readouterr().err
    assert main(["explain", path]) == 0
    assert len(capsys.readouterr().out) < 20_000


def test_all_rows_of_a_long_file_are_refused(
    long_file: tuple[str, np.ndarray, np.ndarray], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["explain", long_file[0], "--query", "all"]) == 2
    assert "Choose one with --query, 0 to 19999" in capsys.readouterr().err
