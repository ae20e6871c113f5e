"""Numbers of the classical teaching texts, recomputed in float64 outside of this program.

`goldens.json` holds what is right (`exact`) and what the texts print wrongly (`errata`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import qkv
from qkv.backends import backends
from qkv.ledger import attention_operations, ledger, score_entries

GOLDENS = json.loads(Path(__file__).with_name("goldens.json").read_text(encoding="utf-8"))
HALF_A_UNIT = 5e-13
LINEAR = "shared_example_linear_elu1"

close = partial(np.testing.assert_allclose, rtol=0, atol=HALF_A_UNIT)


@dataclass(frozen=True)
class Case:
    """One case: arrays of one head, or of several in front."""

    name: str
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    scale: float
    variants: tuple[Any, ...]
    exact: dict[str, np.ndarray]
    tokens: list[str] | None

    def __str__(self) -> str:
        return self.name

    @property
    def call(self) -> partial[Any]:
        return partial(qkv.attention, self.q, self.k, self.v, *self.variants, scale=self.scale)


def numbers(nested: Any) -> np.ndarray:
    """Nested lists in which null is -inf."""
    array = np.array(nested, np.float64)  # null becomes NaN, and no golden number is NaN
    return np.where(np.isnan(array), -np.inf, array)


def variants_of(case: dict[str, Any]) -> tuple[Any, ...]:
    found: list[Any] = []
    if "rope" in case:
        found.append(qkv.RoPE(**case["rope"]))
    if "bias" in case:
        assert case["bias"] == "-0.5*(i-j)"
        found.append(qkv.ALiBi(0.5))
    mask = case.get("mask", "")
    window = re.search(r"sees itself and (\d+) keys before it", mask)
    assert mask == "" or mask.startswith("causal")
    if mask:
        found.append(qkv.Causal())
    if window:
        found.append(qkv.SlidingWindow(int(window[1]), 0))
    return tuple(found)


def load(name: str) -> Case:
    case = GOLDENS["cases"][name]
    exact = case["exact"]
    if "scores" in case:
        q, k = np.ones((1, 1)), numbers(case["scores"])[:, None]
        exact = {key: [row] for key, row in exact.items()}
    else:
        q, k = numbers(case["q"]), numbers(case["k"])
    v = numbers(case["v"])
    scale = case.get("scale", 2**-0.5)
    if scale == "1/sqrt(2)":
        scale = 2**-0.5
    if "head_0" in exact:
        q, k, v = (a.reshape(5, 2, 2).swapaxes(0, 1) for a in (q, k, v))
        exact = {key: [exact["head_0"][key], exact["head_1"][key]] for key in exact["head_0"]}
    wanted = {key: numbers(value) for key, value in exact.items()}
    return Case(name, q, k, v, scale, variants_of(case), wanted, case.get("tokens"))


CASES = [load(name) for name in GOLDENS["cases"] if name != LINEAR]
PLAN = qkv.plan(*np.ones((3, 2, 2)))
ACCEPTING = [b.name for b in backends() if not PLAN.refusals.get(b.name)]
per_case = pytest.mark.parametrize("case", CASES, ids=str)


def test_every_case_is_there() -> None:
    assert len(CASES) == 14
    assert {"blocked", "reference"} <= set(ACCEPTING)


@per_case
@pytest.mark.parametrize("backend", ["auto", *ACCEPTING])
def test_attention(case: Case, backend: str) -> None:
    output, lse = case.call(return_lse=True, backend=backend)
    close(output, case.exact["output"])
    if "lse" in case.exact:
        close(lse, case.exact["lse"])


@per_case
def test_inspect(case: Case) -> None:
    record = qkv.inspect(case.q, case.k, case.v, *case.variants, scale=case.scale)
    close(record.output, case.exact["output"])
    close(record.weights[...], case.exact["weights"])
    if "lse" in case.exact:
        close(record.lse, case.exact["lse"])
        close(record.entropy, case.exact["entropy_nats"])


@per_case
def test_explain(case: Case) -> None:
    trace = qkv.explain(
        case.q, case.k, case.v, *case.variants, scale=case.scale, tokens=case.tokens
    )
    rows = [row for head in trace.heads for row in head.rows]
    shape = case.exact["weights"].shape

    def traced(field: Any) -> np.ndarray:
        return np.array([field(row) for row in rows]).reshape(*shape[:-1], -1)

    close(traced(lambda row: row.softmax.weights), case.exact["weights"])
    close(traced(lambda row: row.output), case.exact["output"])
    if "lse" in case.exact:
        close(traced(lambda row: row.raw), case.exact["raw"])
        close(traced(lambda row: row.products.sum(axis=1)), case.exact["raw"])
        close(traced(lambda row: row.scores), case.exact["scaled"])
        close(traced(lambda row: row.softmax.lse)[..., 0], case.exact["lse"])
        close(traced(lambda row: row.softmax.entropy)[..., 0], case.exact["entropy_nats"])


@per_case
def test_classical_class(case: Case) -> None:
    layer = qkv.ScaledDotProductAttention(case.q.shape[-1])
    exact = case.exact
    # Single steps are given numbers that are themselves rounded.
    near = partial(close, atol=5 * HALF_A_UNIT)
    if "raw" in exact and not any(isinstance(v, qkv.RoPE) for v in case.variants):
        close(layer.compute_scores(case.q, case.k), exact["raw"])
        near(layer.compute_weights(exact["scaled"]), exact["weights"])
    near(layer.compute_output(exact["weights"], case.v), exact["output"])
    if not case.variants and abs(case.scale * layer.scale - 1) < 1e-12:
        near(layer.scale_scores(exact["raw"]), exact["scaled"])
        weights, output = layer.forward(case.q, case.k, case.v)
        close(weights, exact["weights"])
        close(output, exact["output"])


def test_trace_bars() -> None:
    case = GOLDENS["cases"]["shared_example"]
    for token, bars in case["trace_bars"].items():
        text = qkv.explain(
            *(numbers(case[name]) for name in "qkv"),
            tokens=case["tokens"],
            q_index=case["tokens"].index(token),
        ).text()
        assert [len(bar) for bar in re.findall(r"\|(#*) *\|", text)] == bars


PRINTED = {
    "raw": lambda row: row.raw,
    "weights": lambda row: row.softmax.weights,
    "output": lambda row: row.output,
}
ERRATA = [
    (case, wrong)
    for case in CASES
    for wrong in GOLDENS["cases"][case.name].get("errata", ())
    if "printed" in wrong and wrong["what"].split("[")[0] in PRINTED
]


def test_every_printed_error_is_looked_for() -> None:
    assert len(ERRATA) == 7


@pytest.mark.parametrize(
    ("case", "wrong"), ERRATA, ids=lambda x: x.get("what", "") if isinstance(x, dict) else str(x)
)
def test_no_errata(case: Case, wrong: dict[str, Any]) -> None:
    what, *index = re.findall(r"\w+", wrong["what"].split(" ")[0])
    trace = qkv.explain(case.q, case.k, case.v, *case.variants, scale=case.scale)
    ours = PRINTED[what](trace.heads[0].rows[int(index[0])])
    for i in index[1:]:
        ours = ours[int(i)]
    digits = max(len(str(x).partition(".")[2]) for x in np.atleast_1d(wrong["printed"]).tolist())
    assert np.any(np.round(ours, digits) != wrong["printed"])
    exact = case.exact[what][tuple(map(int, index))]
    assert np.all(np.round(ours, digits) == np.round(exact, digits))


def test_a_row_that_adds_to_one_only_by_rounding_is_printed_as_it_is() -> None:
    text = qkv.explain(*(load("textbook_3x3").__dict__[n] for n in "qkv"), q_index=2).text()
    assert "0.5035" in text
    assert "0.5034" not in text


def test_self_attention_is_equivariant_not_invariant() -> None:
    case = load("shared_example")
    order = np.array([3, 0, 4, 1, 2])
    moved = qkv.attention(case.q[order], case.k[order], case.v[order])
    close(moved, case.exact["output"][order])
    assert np.abs(moved - case.exact["output"]).max() > 0.1


@pytest.mark.parametrize(
    ("name", "sizes"), [("example_3x3", (3, 3, 3, 3)), ("shared_example", (5, 5, 4, 4))]
)
def test_operation_ledger(name: str, sizes: tuple[int, int, int, int]) -> None:
    counted = ledger(*sizes)
    assert {**counted.counts, "total": counted.total} == GOLDENS["operation_ledger"][name]


def test_ledger_without_keys_has_no_operations() -> None:
    assert ledger(4, 0, 8, 8).total == 0


def test_operations() -> None:
    assert attention_operations(1000 * 1000, 512, 512) == GOLDENS["flops"]["n1000_d512"]
    # "10 billion operations" for n = 100,000 is the number of scores, not the work.
    assert attention_operations(100_000**2, 64, 64) == 2_560_000_000_000


def test_score_entries() -> None:
    for n, entries in GOLDENS["score_matrix_entries"].items():
        assert score_entries(int(n), int(n)) == entries
    for n, size in GOLDENS["fp16_bytes_per_head"].items():
        assert score_entries(int(n), int(n)) * np.dtype(np.float16).itemsize == size


@pytest.mark.parametrize("model", GOLDENS["real_world_scale"], ids=lambda m: m["model"])
def test_real_world_scale(model: dict[str, Any]) -> None:
    n, heads, layers = model["tokens"], model["heads"], model["layers"]
    assert score_entries(n, n, num_heads=heads, num_layers=layers) == model["score_entries"]
    multiplies = ledger(n, n, model["head_dim"], model["head_dim"])["qk_multiply"]
    assert multiplies * heads * layers == model["qk_multiply_adds"]
    assert model["printed"] == pytest.approx(model["score_entries"], rel=0.011)


@pytest.mark.parametrize("d_k", [4, 16, 64, 128, 512, 1024])
def test_softmax_saturates_without_the_scale(d_k: int) -> None:
    layer = qkv.ScaledDotProductAttention(d_k)
    logits = np.random.default_rng(d_k).normal(size=(200_000, 5)) * np.sqrt(d_k)

    def means(weights: np.ndarray) -> dict[str, float]:
        logs = np.log(np.where(weights > 0, weights, 1))
        return {
            "max_weight": weights.max(axis=1).mean(),
            "entropy_nats": -(weights * logs).sum(axis=1).mean(),
            "gradient_trace": (weights * (1 - weights)).sum(axis=1).mean(),
        }

    golden = GOLDENS["saturation"]
    assert means(layer.compute_weights(logits)) == pytest.approx(
        golden["unscaled"][str(d_k)], abs=0.003
    )
    scaled = layer.compute_weights(layer.scale_scores(logits))
    assert means(scaled) == pytest.approx(golden["scaled_any_d_k"], abs=0.003)


def test_gradient_of_a_saturated_runner_up() -> None:
    trace = qkv.explain(*(np.array(a, float) for a in ([[1]], [[10], [0]], [[0], [0]])), grad=True)
    wanted = GOLDENS["saturation"]["runner_up_gradient_at_delta_10"]
    assert trace.heads[0].rows[0].back.jacobian[1, 1] == pytest.approx(wanted, rel=1e-4)
