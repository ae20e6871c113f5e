"""What a folder of a corpus may hold, and what texts and models are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import qkv

transformers = pytest.importorskip("transformers")

import qkv.hf  # noqa: E402

TEXTS = [torch.arange(1, 1 + n)[None] for n in (5, 3, 4)]


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=9, n_embd=8, n_layer=2, n_head=2, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2Model(config).eval()


def changed(path: Path, change: Callable[[dict[str, Any], dict[str, Any]], Any]) -> None:
    """The chunk with other arrays or another header."""
    with safe_open(path, "numpy") as file:
        about = json.loads(file.metadata()["qkv"])
    arrays = load_file(path)
    change(about, arrays)
    dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    save_file(dense, path, {"qkv": json.dumps(about)})


SUMS = "layers.1.sums"
CHANGES: dict[str, Callable[[dict[str, Any], dict[str, Any]], Any]] = {
    "no digests": lambda about, _: about.update(digests=[]),
    "digests of another kind": lambda about, _: about.update(digests=7),
    "fewer scores": lambda _, arrays: arrays.update({SUMS: arrays[SUMS][:, :3]}),
    "no heads": lambda _, arrays: arrays.update({SUMS: arrays[SUMS][..., 0]}),
    "counts of another text": lambda _, arrays: arrays.update(
        {"layers.0.counts": np.repeat(arrays["layers.0.counts"], 2, axis=0)}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_chunk_that_does_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    qkv.hf.inspect_corpus(model(), TEXTS, tmp_path)
    changed(sorted(tmp_path.glob("texts-*"))[1], CHANGES[name])
    with pytest.raises(qkv.FileError, match=r"texts-00000001.* is not a chunk of a corpus"):
        qkv.hf.inspect_corpus(model(), TEXTS, tmp_path)


def test_heads_of_texts_are_not_broadcast(tmp_path: Path) -> None:
    """The sums of one head were added to those of each of the two that other texts have."""
    qkv.hf.inspect_corpus(model(), TEXTS, tmp_path)
    changed(
        sorted(tmp_path.glob("texts-*"))[1],
        lambda _, arrays: arrays.update({SUMS: arrays[SUMS][..., :1]}),
    )
    with pytest.raises(qkv.ArgumentError, match=r"text 1 ran 2 layers.* of other names or heads"):
        qkv.hf.inspect_corpus(model(), TEXTS, tmp_path)


@pytest.mark.parametrize("confidence", ["0.9", None, np.array([0.9])])
def test_a_confidence_is_a_number(confidence: Any, tmp_path: Path) -> None:
    corpus = qkv.hf.inspect_corpus(model(), TEXTS, tmp_path)
    for ask in (corpus.rows, corpus.heads, lambda given: corpus.interval("own", given)):
        with pytest.raises(qkv.QkvError, match="confidence"):
            ask(confidence)


def test_a_part_in_training_mode_is_refused_and_noted(tmp_path: Path) -> None:
    """Dropout of the part gave other numbers at each run, and nothing said so."""
    ours = model()
    ours.h[1].train()
    with pytest.raises(qkv.ArgumentError, match="a part of it is in training mode"):
        qkv.hf.inspect_corpus(ours, TEXTS, tmp_path)
    with qkv.hf.inspect(ours) as record:
        ours(TEXTS[0])
    assert "Some of the model was in training mode" in str(record)


@pytest.mark.parametrize("ids", [[1, 2, 3], np.array([[1, 2, 3]])])
def test_a_mapping_of_lists_is_refused(ids: Any, tmp_path: Path) -> None:
    """The rows of a data set hold lists, which reached the model as a raw AttributeError."""
    with pytest.raises(qkv.ArgumentError, match=r"text 1 has input_ids that are a .* no tensor"):
        qkv.hf.inspect_corpus(model(), [TEXTS[0], {"input_ids": ids}], tmp_path)


def test_errors_say_which_text_they_are_of(tmp_path: Path) -> None:
    long, unknown = torch.arange(9)[None], torch.tensor([[1, 99]])
    with pytest.raises(qkv.ArgumentError, match=r"has 9 tokens(?s:.*)number of the text +1"):
        qkv.hf.inspect_corpus(model(), [TEXTS[0], long], tmp_path / "long")
    with pytest.raises(IndexError) as found:
        qkv.hf.inspect_corpus(model(), [TEXTS[0], unknown], tmp_path / "unknown")
    assert found.value.__notes__ == ["This is text 1, with inputs input_ids."]


def test_arguments_are_named_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(qkv.ArgumentError, match="tokenizer=3 is not a tokenizer"):
        qkv.hf.inspect_corpus(model(), ["a"], tmp_path, tokenizer=3)  # type: ignore[arg-type]
    with pytest.raises(qkv.ArgumentError, match="progress=3 cannot be called"):
        qkv.hf.inspect_corpus(model(), TEXTS, tmp_path, progress=3)  # type: ignore[arg-type]
    with pytest.raises(qkv.ArgumentError, match="folder='' is not a path"):
        qkv.hf.inspect_corpus(model(), TEXTS, "")
    with pytest.raises(qkv.ArgumentError, match="top=0 is not a positive integer"):
        qkv.ModelRecord("own", top=0)
