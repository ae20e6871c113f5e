"""What the lines of a mechanism's class show beside them, against the formulas."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qkv.lab.small_examples.code_lines import class_lines
from qkv.mechanisms import MECHANISMS
from qkv.samples import shared_example


def values_of_class(name: str) -> dict[str, NDArray[Any]]:
    """What the lines of a class show, by line: the numbers of each token."""
    found = class_lines(name)
    assert len(found["values"]) == len(found["lines"])
    return {
        line.strip(): np.array([[float(n) for n in text.split(", ")] for text in values])
        for line, values in zip(found["lines"], found["values"], strict=True)
        if values is not None and ";" not in values[0] and "|" not in values[0]
    }


def test_the_lines_of_a_class_show_what_they_make() -> None:
    tracing = sys.gettrace()
    example = shared_example()
    scores = example.q @ example.k.T
    hard = values_of_class("hard")
    line = "scores = scores + query[..., d, None] * key[..., None, :, d]"
    np.testing.assert_allclose(hard[line], scores, atol=5.1e-5)
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranks = np.argsort(order, axis=-1, kind="stable")
    rank = "rank = namespace.argsort(order, axis=-1, stable=True)"
    np.testing.assert_array_equal(hard[rank], ranks)
    # A line that ran once for each token shows what it made of that token.
    decoding = values_of_class("kv-cache-decoding")
    weights = np.tril(np.exp(scores / 2))
    causal = weights / weights.sum(axis=-1, keepdims=True) @ example.v
    outputs = [shown for line, shown in decoding.items() if line.startswith("return array_name")]
    np.testing.assert_allclose(outputs[-1], causal, atol=5.1e-5)
    assert sys.gettrace() is tracing


def test_the_classes_that_compute_show_numbers() -> None:
    thin = {"self", "causal", "cross", "multi-head", "multi-query", "grouped-query", "dot-product"}
    thin |= {"scaled-dot-product", "soft", "rotary", "alibi", "sliding-window", "strided", "flash"}
    for name in MECHANISMS:
        values = class_lines(name)["values"]
        assert any(values) is (name not in thin), name
