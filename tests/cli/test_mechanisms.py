"""`qkv compare` and `qkv explain --mechanism`, by their output."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from qkv.cli import main
from qkv.mechanisms import MECHANISMS
from qkv.samples import shared_example


def test_compare_is_a_table_of_all_mechanisms(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in MECHANISMS:
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert len(line.split()) >= 9, "on one line: weights, output and difference"
    causal = next(line for line in lines if line.startswith("causal "))
    # The row of "sat" in the golden numbers of causal attention.
    assert causal.split()[1:6] == ["0.23", "0.38", "0.38", "0.00", "0.00"]


def test_compare_as_json_has_every_matrix(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "scaled-dot-product", "multi-head", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["tokens"] == list(shared_example().tokens)
    full, heads = data["mechanisms"]
    assert full["mechanism"] == "scaled-dot-product"
    assert full["difference_from_full_attention"] == 0
    example = shared_example()
    scores = example.q @ example.k.T / 2
    weights = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(full["token_mixing"], weights[None], rtol=0, atol=1e-14)
    assert np.shape(heads["token_mixing"]) == (2, 5, 5)
    expected = abs(np.array(heads["output"]) - weights @ example.v).max()
    assert heads["difference_from_full_attention"] == pytest.approx(expected, abs=1e-14)


def test_compare_says_which_mechanisms_differ_by_their_mask(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["compare", "flash", "kv-cache-decoding", "causal", "rwkv6"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no token reads a later one" in said
    assert "so they differ: kv-cache-decoding, causal, rwkv6." in said
    assert main(["compare", "--json"]) == 0
    for each in json.loads(capsys.readouterr().out)["mechanisms"]:
        mixing = np.array(each["token_mixing"])
        square = mixing.shape[-1] == mixing.shape[-2]
        later = [
            row[j] for head in mixing for i, row in enumerate(head) for j in range(i + 1, len(row))
        ]
        assert each["causal"] == (square and not any(later)), each["mechanism"]
    assert main(["compare", "flash"]) == 0
    assert "later one" not in capsys.readouterr().out


def test_compare_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "causel"]) == 2
    assert "there is no mechanism 'causel'" in capsys.readouterr().err
    file = tmp_path / "picture.doc"
    assert main(["compare", "causal", "--plot", str(file)]) == 2
    assert "does not end in .pdf, .png, .svg" in capsys.readouterr().err
    assert not file.exists()


@pytest.mark.parametrize("name", ["scaled-dot-product", "cross", "flash"])
def test_explain_a_mechanism(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "--mechanism", name]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{name}: ")
    assert "'The'" in text
    assert main(["explain", "--mechanism", name, "--query", "all", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [one["token"] for one in data] == list(shared_example().tokens)


def test_explain_refuses_what_does_not_go_with_a_mechanism(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word in ("--causal", "--scale=2", "--scale=0", "--head=1", "--head=0", "file.npz"):
        assert main(["explain", "--mechanism", "flash", word]) == 2
        named = "FILE" if word == "file.npz" else word.partition("=")[0]
        assert f"{named} does not go with --mechanism" in capsys.readouterr().err
    assert main(["explain", "--mechanism", "flash", "--query", "7"]) == 2
    assert "--query 7 does not exist" in capsys.readouterr().err
