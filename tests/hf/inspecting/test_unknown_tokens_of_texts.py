"""Unknown tokens of a tokenizer are not the same token because they have the same id."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

REASON = "inspecting models of transformers needs it: pip install transformers"
torch = pytest.importorskip("torch", reason=REASON)
transformers = pytest.importorskip("transformers", reason=REASON)

from families import model_of  # noqa: E402

import qkv.hf  # noqa: E402

STRANGE = "zork blip florp gnu zap"
UNKNOWN = 2


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[UNK]": UNKNOWN, "the": 3, "cat": 4, "sat": 5}
    made = Tokenizer(models.WordLevel(vocabulary, "[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]")


def test_no_head_is_of_a_kind_for_unknown_tokens(tokenizer: Any) -> None:
    model = model_of("llama")
    record = qkv.hf.inspect(model, STRANGE, tokenizer)
    assert "5 of 5 tokens are unknown to this model" in record.summary()
    assert all(math.isnan(row["duplicate"]) for row in record.rows())
    assert not {row["kind"] for row in record.rows()} & {"duplicate", "induction"}
    # Around a call, ids say it once the record knows which one is of unknown tokens.
    inputs = tokenizer(STRANGE, return_tensors="pt")
    with qkv.hf.inspect(model) as other:
        model(**inputs)
    assert not math.isnan(other.rows()[0]["duplicate"])
    with qkv.hf.inspect(model) as other:
        other.unknown_id = UNKNOWN
        model(**inputs)
    assert math.isnan(other.rows()[0]["duplicate"])


def test_known_tokens_are_compared(tokenizer: Any) -> None:
    model = model_of("llama")
    record = qkv.hf.inspect(model, "the zork sat the zork", tokenizer, keep="weights")
    assert "2 of 5 tokens are unknown" in record.summary()
    for row in record.rows():
        weights = np.asarray(record[row["layer"]].weights[0, row["head"]])
        # "the" alone is there twice, and "zork" followed the first one.
        np.testing.assert_allclose(row["duplicate"], weights[3, 0], rtol=1e-6)
        np.testing.assert_allclose(row["induction"], weights[3, 1], rtol=1e-6)


def test_many_texts(tokenizer: Any, tmp_path: Path) -> None:
    found = qkv.hf.inspect_corpus(
        model_of("llama").eval(), [STRANGE, STRANGE + " gnu"], tmp_path, tokenizer=tokenizer
    )
    assert np.isnan(float(found.rows()[0]["duplicate"]))
