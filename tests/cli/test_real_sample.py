"""The sample of a real model: what it holds, and that its pronouns find their nouns."""

from __future__ import annotations

import json
from importlib import resources

import numpy as np
import pytest

from qkv.samples import real_sample


def test_it_is_small_and_says_where_it_is_from() -> None:
    folder = resources.files("qkv.samples")
    about = json.loads(folder.joinpath("minilm.json").read_text(encoding="utf-8"))
    assert about["model"] == "sentence-transformers/all-MiniLM-L6-v2"
    assert "Apache License" in folder.joinpath("minilm.NOTICE.txt").read_text(encoding="utf-8")
    assert len(folder.joinpath("minilm.safetensors").read_bytes()) < 2 * 2**20
    sample = real_sample()
    assert (sample.licence, sample.layer) == ("Apache-2.0", 1)
    assert sample.source.startswith("https://")
    assert "because it was too tired" in sample.paragraph


def test_arrays_and_tokens() -> None:
    sample = real_sample()
    for array in (sample.q, sample.k, sample.v):
        assert array.shape == (12, 106, 32)
        assert array.dtype == np.float32
        assert np.isfinite(array).all()
    assert sample.tokens[0] == "[CLS]"
    assert sample.tokens[-1] == "[SEP]"
    words = "".join(sample.tokens[1:-1])
    assert words == sample.paragraph.lower().replace(" ", "")


# Read by hand in the paragraph: pronoun, how many of its kind came before, and its noun.
REFERENCES = [
    ("her", 0, "anna"),
    ("her", 1, "anna"),
    ("his", 0, "brother"),
    ("she", 0, "woman"),
    ("her", 2, "woman"),
    ("her", 3, "woman"),
    ("he", 0, "husband"),
    ("they", 0, "drivers"),
    ("their", 0, "drivers"),
    ("he", 1, "policeman"),
    ("they", 1, "neighbours"),
]


@pytest.mark.parametrize(("pronoun", "nth", "noun"), REFERENCES)
def test_head_3_finds_what_pronouns_stand_for(pronoun: str, nth: int, noun: str) -> None:
    sample = real_sample()
    row = [i for i, token in enumerate(sample.tokens) if token == pronoun][nth]
    scores = sample.q[3, row].astype(float) @ sample.k[3].astype(float).T / 32**0.5
    weights = np.exp(scores) / np.exp(scores).sum()
    weights[0] = 0.0  # a head that finds nothing rests on the first token
    assert sample.tokens[int(np.argmax(weights))] == noun
