"""Expressions against the same Python function on NumPy's numbers."""

import numpy as np
import pytest

from qkv.errors import ArgumentError
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import Const, Var, as_node, text
from qkv.problem.language.symbols import Expr, Table

SCORE, Q, K = (Expr(Var(name)) for name in ("score", "q_pos", "kv_pos"))

FORMULAS = [
    lambda s, q, k: s + q - k * 2,
    lambda s, q, k: s / (1 + abs(q - k)),
    lambda s, q, k: (q - k) // 3 + (q - k) % 4,
    lambda s, q, k: (k - 7 * q) // 5,
    lambda s, q, k: abs(-q) % 3 - k,
    lambda s, q, k: np.where(q >= k, s, -np.inf),
    lambda s, q, k: np.where((q > k) & ~(q == 3) | (k != 2), 1.5, s),
    lambda s, q, k: np.minimum(np.maximum(s, -0.5), q),
    lambda s, q, k: np.clip(s, -1, 1),
    lambda s, q, k: np.tanh(s) * np.exp(-np.abs(s)),
    lambda s, q, k: np.sqrt(np.abs(s)) + np.log(1.0 + np.abs(s)),
    lambda s, q, k: np.floor(s * 3) * 2,
    lambda s, q, k: 2.0 - s,
    lambda s, q, k: 1 / (2 + np.exp(s)),
    lambda s, q, k: (q <= k) + (q < k) * 2,
    lambda s, q, k: np.logical_and(q < k, np.logical_not(q < 2)) * 1.0,
    lambda s, q, k: ((q < 2) ^ (k < 2)) * 1.0 + (True ^ (q < k)) * s,
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_a_formula_means_what_numpy_means(formula) -> None:
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(6, 5))
    q, k = np.arange(6)[:, None] - 2, np.arange(5)[None, :]
    node = as_node(formula(SCORE, Q, K))
    values = {"score": scores, "q_pos": q, "kv_pos": k}
    got = np.broadcast_to(evaluate(node, values, {}, np.dtype(np.float64)), (6, 5))
    for i, j in np.ndindex(6, 5):
        expected = float(formula(scores[i, j], q[i, 0], k[0, j]))
        assert got[i, j] == pytest.approx(expected, rel=1e-15, abs=1e-15)


def test_floating_arithmetic_runs_in_the_type_of_computation() -> None:
    node = as_node(K * 0.1 + 1 / (Q + 3.0))
    for dtype in (np.float32, np.float64):
        got = evaluate(node, {"q_pos": 4, "kv_pos": np.arange(3)}, {}, np.dtype(dtype))
        assert got.dtype == dtype


def test_positions_are_exact_far_out() -> None:
    """Positions beyond 2**24 stay exact, where float32 would lose them."""
    node = as_node(Q - K)
    got = evaluate(node, {"q_pos": np.int64(2**31), "kv_pos": np.int64(2**31 - 1)}, {},
                   np.dtype(np.float32))  # fmt: skip
    assert got == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300, -1e300])
def test_floor_gives_an_integer_whatever_it_is_given(value: float) -> None:
    limit = 2**62
    expected = 0 if np.isnan(value) else limit if value > 0 else -limit
    node = as_node(np.floor(SCORE))
    assert evaluate(node, {"score": np.float64(value)}, {}, np.dtype(np.float64)) == expected


def test_constants_fold() -> None:
    assert as_node(Expr(as_node(2)) * 3 + 1) == Const("int", 7)
    assert as_node(np.floor(Expr(as_node(np.inf)))) == Const("int", 2**62)
    assert as_node(Expr(as_node(True)) & (Q < K)) == as_node(Q < K)
    assert as_node(Expr(as_node(False)) & (Q < K)) == Const("bool", False)


def test_equal_formulas_are_equal_nodes() -> None:
    """Caches depend on it."""
    first, second = (as_node(np.where(Q >= K, SCORE * 2.0, -np.inf)) for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)
    assert first != as_node(np.where(Q > K, SCORE * 2.0, -np.inf))


def test_an_expression_reads_as_a_formula() -> None:
    assert text(as_node((Q - K) % 3 == 1)) == "(((q_pos - kv_pos) % 3) == 1)"
    assert as_node((Q - K) % 3 == 1).variables == {"q_pos", "kv_pos"}


def test_a_finite_table_entry_stays_finite() -> None:
    """finfo(float64).min is arithmetic, not a mask, in float32 too."""
    table = Table("t", "float", (4,))
    low = np.finfo(np.float64).min
    arrays = {"t": np.array([low, -low, -np.inf, np.nan])}
    got = evaluate(table[K].node, {"kv_pos": np.arange(4)}, arrays, np.dtype(np.float32))
    np.testing.assert_array_equal(
        got, np.array([np.finfo(np.float32).min, np.finfo(np.float32).max, -np.inf, np.nan])
    )


@pytest.mark.parametrize(
    "misuse",
    [
        lambda: bool(Q < K),
        lambda: float(SCORE),
        lambda: int(Q),
        lambda: len(Q),
        lambda: list(Q),
        lambda: range(Q),
        lambda: SCORE // 2,
        lambda: SCORE % 2,
        lambda: Q & K,
        lambda: ~Q,
        lambda: np.where(Q, 1, 2),
        lambda: np.arctan(SCORE),
        lambda: np.sum(SCORE),
        lambda: np.add.reduce(SCORE),
        lambda: SCORE + "a",
        lambda: SCORE + np.nan,
        lambda: SCORE + np.arange(3),
        lambda: Table("t", "int", (3,))[SCORE],
    ],
)
def test_what_the_language_does_not_have_is_refused(misuse) -> None:
    with pytest.raises((ArgumentError, TypeError)) as caught:
        misuse()
    if isinstance(caught.value, ArgumentError):
        assert caught.value.fact
