"""The heads of the small model that carry the repeat, and those that do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import qkv
from qkv.inspection.models.model_record import ModelRecord
from qkv.interventions import HeadInputs, changed_heads
from qkv.samples import tiny_model
from qkv.samples.decoder import EPSILON

MODEL = tiny_model()
IDS = MODEL.repeated_sequence()
SECOND = slice(33, None)
"""Losses of the second period, but for that of its second character: the pair before it stood at
the very beginning, where no head could read a previous character."""


def induction_heads() -> list[tuple[int, int]]:
    record = ModelRecord("tiny")
    for layer, (query, key, _, variants) in enumerate(MODEL.attention_inputs(IDS)):
        record.add(query, key, *variants, name=str(layer), tokens=[IDS])
    return [(row["layer"], row["head"]) for row in record.rows() if row["kind"] == "induction"]


def test_induction_heads_carry_the_repeat() -> None:
    heads = induction_heads()
    assert heads
    plain = MODEL.loss(IDS)
    off = MODEL.loss(IDS, dict.fromkeys(heads, "off"))
    # Random characters: a guess costs log(97) = 4.57 nats, a repeated one next to nothing.
    assert plain[SECOND].mean() < 0.05
    assert off[SECOND].mean() > 3
    assert plain[:31].mean() > 3
    predicted = MODEL.logits(IDS).argmax(axis=1)[33:-1]
    changed = MODEL.logits(IDS, dict.fromkeys(heads, "off")).argmax(axis=1)[33:-1]
    assert np.mean(predicted == IDS[34:]) > 0.9
    assert np.mean(changed == IDS[34:]) < 0.5


def test_heads_that_are_off_by_hand() -> None:
    """The last layer again in NumPy, with the weights from the definition."""
    states = list(MODEL._states(IDS))
    (_, _, _, _), (query, key, value, _) = MODEL.attention_inputs(IDS)
    scores = query @ key.swapaxes(1, 2) / np.sqrt(query.shape[-1])
    scores = np.where(np.tri(len(IDS), dtype=bool), scores, -np.inf)
    exp = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = exp / exp.sum(axis=-1, keepdims=True) @ value
    out[2] = 0
    out[1] = np.tri(len(IDS)) / np.arange(1, len(IDS) + 1)[:, None] @ value[1]
    last = states[1] + out.swapaxes(0, 1).reshape(len(IDS), -1) @ MODEL._layers[1]["out"].T
    norm = last / np.sqrt((last**2).mean(axis=1, keepdims=True) + EPSILON)
    found = MODEL.logits(IDS, {(1, 2): "off", (1, 1): "uniform"})
    np.testing.assert_allclose(found, norm @ MODEL._unembedding.T, atol=1e-3)


def test_weights_of_the_same_text_change_nothing() -> None:
    found = MODEL.logits(IDS, {(1, head): IDS for head in range(4)})
    np.testing.assert_array_equal(found, MODEL.logits(IDS))


def test_weights_of_another_repeat_still_carry_it() -> None:
    """Where an induction head reads depends on the period, not on the characters."""
    other = MODEL.repeated_sequence(seed=5)
    assert MODEL.loss(IDS, dict.fromkeys(induction_heads(), other))[SECOND].mean() < 0.1


@pytest.mark.parametrize(
    ("changes", "fact"),
    [
        ({(2, 0): "off"}, "layer 2"),
        ({(0, 4): "off"}, "head 4"),
        ({(0, 0): "on"}, "is not a change of a head"),
        ({(0, 0): [1, 2]}, "2 queries"),
        ({(0, 0): [1.5] * len(IDS)}, "not one row of whole numbers"),
        ({(0, 0): [IDS]}, "not one row of whole numbers"),
    ],
)
def test_wrong_changes(changes: Any, fact: str) -> None:
    with pytest.raises(qkv.QkvError, match=fact):
        MODEL.logits(IDS, changes)


@pytest.mark.parametrize("method", ["logits", "loss"])
@pytest.mark.parametrize("changes", [np.zeros(3), []])
def test_changes_that_are_no_dict(method: str, changes: Any) -> None:
    """An array was asked whether it is true."""
    with pytest.raises(qkv.QkvError, match=r"changes=.* is not a (dict by layer|Mapping)"):
        getattr(MODEL, method)(IDS, changes=changes)


def test_the_loss_is_that_of_the_logits() -> None:
    logits = MODEL.logits(IDS).astype(np.float64)
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    expected = [-np.log(probabilities[i, IDS[i + 1]]) for i in range(len(IDS) - 1)]
    np.testing.assert_allclose(MODEL.loss(IDS), expected, atol=1e-9)


@pytest.mark.parametrize("lowest", [-np.inf, np.finfo(np.float32).min])
@pytest.mark.parametrize(
    "made", [lambda bias: bias, qkv.Bias, lambda bias: qkv.Bias(bias.tolist())]
)
def test_equal_weights_only_over_keys_that_a_bias_allows(made: Any, lowest: float) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, 5, 4)).astype(np.float32)
    allowed = np.tri(5, dtype=bool)
    bias = np.where(allowed, rng.normal(size=(5, 5)), lowest).astype(np.float32)
    found = changed_heads(x, HeadInputs(x, x, (made(bias),)), x, {0: "uniform"})
    expected = [x[0, : i + 1].mean(axis=0) for i in range(5)]
    np.testing.assert_allclose(found[0], expected, rtol=1e-5, atol=1e-6)


OTHER = np.ones((1, 5, 4))


@pytest.mark.parametrize(
    ("changes", "error", "fact"),
    [
        ({0.5: "off"}, qkv.ArgumentError, "0.5 is not a whole number"),
        ({"0": "off"}, qkv.ArgumentError, "'0' is not a whole number"),
        ([(0, "off")], qkv.ArgumentError, "not a Mapping"),
        ({0: None}, qkv.ArgumentError, "None is not a change of a head"),
        ({0: np.zeros(3)}, qkv.ArgumentError, "is not a change of a head"),
        ({1: HeadInputs(OTHER, OTHER, ())}, qkv.ShapeError, "has num_heads=1, this one 2"),
        (
            {1: HeadInputs(*[np.ones((3, 2, 5, 4))] * 2, ())},
            qkv.ShapeError,
            r"the batch is \(3,\), else \(\)",
        ),
    ],
)
def test_wrong_changes_of_a_layer(changes: Any, error: type[Exception], fact: str) -> None:
    x = np.ones((2, 5, 4))
    with pytest.raises(error, match=fact):
        changed_heads(x, HeadInputs(x, x, ()), x, changes)
