"""The cases of the shared example, each produced by the mechanism that it is named for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.mechanisms import (
    ALiBi,
    Causal,
    DotProduct,
    Flash,
    KVCacheDecoding,
    Mechanism,
    MultiHead,
    Ring,
    Rotary,
    ScaledDotProduct,
    Self,
    SlidingWindow,
    example_input,
)
from qkv.mechanisms.base.projected import ProjectedAttention
from qkv.samples import shared_example

CASES = json.loads(
    (Path(__file__).parents[1] / "golden" / "goldens.json").read_text(encoding="utf-8")
)["cases"]
HALF_A_UNIT = 5e-13


class SlopeOfOneHalf(ProjectedAttention):
    """The golden ALiBi case has one head with the slope 1/2; the paper has 1/256."""

    name, paper, formula = "slope", "", ""

    def variants(self, query: Any, key: Any) -> tuple[Any, ...]:
        return qkv.ALiBi(0.5), *super().variants(query, key)


MECHANISMS: list[tuple[str, Mechanism]] = [
    ("shared_example", ScaledDotProduct(4)),
    ("shared_example", Self.example()),
    ("shared_example", Flash.example()),
    ("shared_example", Ring.example()),
    ("shared_example_unscaled", DotProduct(4)),
    ("shared_example_causal", Causal.example()),
    ("shared_example_causal", KVCacheDecoding.example()),
    ("shared_example_causal", Ring.for_example(num_devices=2, causal=True)),
    ("shared_example_causal_window_2", SlidingWindow.for_example(left=1)),
    ("shared_example_causal_window_3", SlidingWindow.example()),
    ("shared_example_alibi_causal", SlopeOfOneHalf.for_example(causal=True)),
    ("shared_example_rope_interleaved", Rotary.example()),
    ("shared_example_rope_half_split", Rotary.for_example(rope=qkv.RoPE())),
]


@pytest.mark.parametrize(("name", "mechanism"), MECHANISMS)
def test_a_case_comes_out_of_its_mechanism(name: str, mechanism: Mechanism) -> None:
    exact = CASES[name]["exact"]
    example = shared_example()
    whole = isinstance(mechanism, ProjectedAttention)
    arguments = (example_input(),) if whole else (example.q, example.k, example.v)
    output = mechanism(*arguments)
    weights = mechanism.token_mixing(*arguments).reshape(5, 5)
    np.testing.assert_allclose(output, exact["output"], rtol=0, atol=HALF_A_UNIT)
    np.testing.assert_allclose(weights, exact["weights"], rtol=0, atol=HALF_A_UNIT)


def test_the_heads_of_multi_head_attention() -> None:
    exact = CASES["shared_example_multi_head"]["exact"]
    layer = MultiHead.example()
    output, weights = layer(example_input()), layer.token_mixing(example_input())
    for h in range(2):
        head = exact[f"head_{h}"]
        columns = output[:, 2 * h : 2 * h + 2]
        np.testing.assert_allclose(columns, head["output"], rtol=0, atol=HALF_A_UNIT)
        np.testing.assert_allclose(weights[h], head["weights"], rtol=0, atol=HALF_A_UNIT)


def test_alibi_of_two_heads_has_the_slopes_of_the_paper() -> None:
    layer = ALiBi.for_example(num_heads=2)
    plain = MultiHead.example().token_mixing(example_input())
    distance = abs(np.arange(5)[:, None] - np.arange(5))
    for h, slope in enumerate((1 / 16, 1 / 256)):
        expected = plain[h] * np.exp(-slope * distance)
        expected /= expected.sum(axis=1, keepdims=True)
        found = layer.token_mixing(example_input())[h]
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-14)
