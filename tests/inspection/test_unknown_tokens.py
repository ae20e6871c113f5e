"""Tokens that a model does not know share an id, and are not the same token for that."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.cli import main
from qkv.inspection.heads.unknown_tokens import unknown_id_of
from qkv.inspection.models.model_record import ModelRecord, load
from qkv.lab.sources.heads import heads_of_model
from qkv.samples import language_model, tiny_model

STRANGE = "😀👩‍👩‍👧 hello שלום עולם مرحبا"


def by_loop(weights: Any, ids: Any, name: str) -> float:
    """`duplicate` or `induction` of one head by its definition; ids of 0 are equal to nothing."""
    back = 1 if name == "induction" else 0
    found = []
    for i in range(len(ids)):
        keys = [j for j in range(back, i + back) if ids[j - back] == ids[i] != 0 and j <= i]
        found += [math.fsum(weights[i, j] for j in keys)] if keys else []
    return math.fsum(found) / len(found) if found else math.nan


def record_of(unknown_id: int | None, seed: int = 0) -> tuple[ModelRecord, Any]:
    """Two heads on random ids of which many are 0, and the ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 4, (1, 20))
    query, key = rng.standard_normal((2, 1, 2, 20, 8))
    record = ModelRecord("random", keep="weights", unknown_id=unknown_id)
    record.tokens = ids
    record.add(query, key, qkv.Causal(), name="layer", tokens=ids)
    return record, ids[0]


def test_scores_leave_unknown_tokens_out() -> None:
    record, ids = record_of(0)
    rows, weights = record.rows(), np.asarray(record[0].weights[0])
    for head, row in enumerate(rows):
        for name in ("duplicate", "induction"):
            assert row[name] == pytest.approx(by_loop(weights[head], ids, name), rel=1e-9)
    other, _ = record_of(None)
    assert other.rows()[0]["duplicate"] != pytest.approx(rows[0]["duplicate"], rel=1e-3)
    # Only these two scores compare tokens.
    for name in ("previous", "own", "sink", "entropy", "distance"):
        assert [row[name] for row in rows] == [row[name] for row in other.rows()]


@pytest.mark.parametrize("unknown_id", ["<unk>", 3.0, [3], True])
def test_an_unknown_id_that_is_no_number_is_refused(unknown_id: Any, tmp_path: Path) -> None:
    """The text of the token was compared with the ids, equal to none of them, and left none out."""
    record, _ = record_of(None)
    record.unknown_id = unknown_id
    with pytest.raises(qkv.ArgumentError, match=r"unknown_id=.* is not a whole number"):
        record.add(*np.zeros((2, 1, 2, 20, 8)), name="layer", tokens=record.tokens)
    with pytest.raises(qkv.ArgumentError, match=r"unknown_id=.* is not a whole number"):
        record.save(tmp_path / "r.safetensors")


def test_an_unknown_id_of_numpy_is_saved(tmp_path: Path) -> None:
    record, ids = record_of(None)
    record.unknown_id = ids[0]
    record.save(tmp_path / "r.safetensors")
    assert load(tmp_path / "r.safetensors").unknown_id == int(ids[0])


def test_tokens_of_a_record_are_ids() -> None:
    record, _ = record_of(None)
    with pytest.raises(qkv.DTypeError, match="tokens has dtype <U1, and no ids"):
        record.tokens = [["a", "b"]]


@pytest.mark.parametrize(
    ("model", "text", "unknown", "count"),
    [(language_model, STRANGE, 19, 25), (tiny_model, "שלום", 4, 4), (tiny_model, "aéb", 1, 3)],
)
def test_the_summary_says_how_many_are_unknown(
    model: Any, text: str, unknown: int, count: int, tmp_path: Path
) -> None:
    record = model().inspect(text)
    assert model().encode(text).count(0) == unknown
    verb = "is" if unknown == 1 else "are"
    note = f"{unknown} of {count} tokens {verb} unknown to this model"
    assert note in record.summary()
    assert not {row["kind"] for row in record.rows()} & {"induction", "duplicate"}
    # So do a file of it, and the page.
    record.save(tmp_path / "r.safetensors")
    assert note in load(tmp_path / "r.safetensors").summary()
    assert note in heads_of_model(record).about


def test_known_texts_have_no_note() -> None:
    assert "unknown" not in language_model().inspect("The cat sat.").summary()
    model = tiny_model()
    ids = model.repeated_sequence()
    assert 0 in ids  # among random ids it is a token as any other
    assert "unknown" not in model.inspect(ids).summary()
    assert "2 of 64 tokens are unknown" in model.inspect(ids, unknown_id=0).summary()


def test_padding_is_not_counted() -> None:
    record = ModelRecord("padded", unknown_id=0)
    record.tokens = np.array([[0, 0, 0, 5, 0, 6]])
    x = np.eye(6)[None, None]
    real = np.array([[False, False, True, True, True, True]])
    record.add(x, x, qkv.Causal(), name="layer", tokens=record.tokens, real=real)
    assert "2 of 4 tokens are unknown" in record.summary()


@pytest.mark.parametrize("kind", [np.int64, np.uint8, np.uint32])
def test_a_record_keeps_the_ids_that_it_is_given(kind: Any, tmp_path: Path) -> None:
    ids = np.array([[1, 7, 2, 7, 3, 7]], kind)
    x = np.random.default_rng(0).normal(size=(1, 1, 6, 4))
    record = ModelRecord("given", keep="weights", unknown_id=7)
    record.add(x, x, qkv.Causal(), name="layer", tokens=ids)
    np.testing.assert_array_equal(record.tokens, ids)
    assert "3 of 6 tokens are unknown" in record.sentences()[0]
    assert math.isnan(
        by_loop(record[0].weights[0, 0], np.where(ids[0] == 7, 0, ids[0]), "duplicate")
    )
    assert not record.rows()[0]["duplicate"] > 0  # No token has an equal one.
    record.save(tmp_path / "r.safetensors")
    np.testing.assert_array_equal(load(tmp_path / "r.safetensors").tokens, ids)


def test_the_id_of_a_tokenizer() -> None:
    assert unknown_id_of(SimpleNamespace(unk_token_id=7, bos_token_id=1)) == 7
    assert unknown_id_of(SimpleNamespace(unk_token_id=None)) is None
    assert unknown_id_of(None) is None
    # As GPT-2's, whose tokens are bytes and which knows everything.
    assert unknown_id_of(SimpleNamespace(unk_token_id=7, eos_token_id=7)) is None


# --- queries of a mean ---------------------------------------------------------------------------


def test_each_kind_says_over_how_many_queries(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "--model", "tiny", "--text", "abca"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line[:3] in {f"{letter}  " for letter in "IDPOS"}]
    numbers = {row[1]: row[-1] for row in rows}
    # The last "a" has an earlier one, and what followed it; the first token has none before.
    assert numbers == {"induction": "1", "duplicate": "1", "previous": "3", "own": "4", "sink": "4"}
    assert "queries" in "".join(lines)


# --- more tokens than a model was trained on -----------------------------------------------------

LONG = "She could not help smiling at him, and so they walked on together. " * 12


def test_the_last_tokens_of_a_long_text_are_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "long.txt").write_text(LONG, encoding="utf-8")
    words = ["--model", "language", "--text", str(tmp_path / "long.txt")]
    model = language_model()
    ids = model.encode(LONG)
    note = f"The model reads the last 128 of {len(ids)} tokens, as many as it was trained on."
    assert len(ids) > model.context == 128
    # The words of the lab's page.
    page = Path(__file__).parents[2] / "lab" / "src" / "panels" / "language.js"
    said = note.replace(" 128 ", " ${ids.length} ").replace(f" {len(ids)} ", " ${all.length} ")
    assert said in page.read_text(encoding="utf-8")
    assert main(["inspect", *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ids"] == ids[-128:]
    assert found["notes"] == [note]
    for command in (["inspect"], ["inspect", "--layer", "0"], ["explain", "--layer", "0"]):
        assert main([*command, *words]) == 0
        assert note in " ".join(capsys.readouterr().out.split())
    assert main(["lab", *words, "--export", str(tmp_path / "page.html")]) == 0
    assert note in (tmp_path / "page.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["inspect", *words, "--tokens", "100"]) == 0
    assert "The model reads the last" not in capsys.readouterr().out


def test_python_warns_of_a_long_text() -> None:
    model = language_model()
    ids = model.encode(LONG)
    with pytest.warns(UserWarning, match=rf"{len(ids)} tokens; .*rows of 128") as seen:
        model.inspect(LONG)
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.inspect(ids[-128:])
        tiny_model().inspect("a" * 200)  # It reads texts of any length.
