"""Expressions that use an intermediate result more than once, and very long ones."""

import copy
import gc
import pickle
from functools import reduce

import numpy as np
import pytest

import qkv
from qkv.problem.language import nodes
from qkv.problem.language.bounds import bound
from qkv.problem.language.derivative import derivative
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import (
    SCORE,
    Const,
    Load,
    Op,
    Var,
    children,
    constant,
    operation,
    substitute,
    text,
    upwards,
    walk,
)
from qkv.problem.language.intervals import Interval

REUSES = 16


def doubled(x, times):
    """Each result is used twice: as many nodes as `times`, twice to that power as a tree."""
    for _ in range(times):
        x = x + x
    return x


def hashed(x, y, rounds):
    """A hash of two integers, as masks draw random pairs with it."""
    for i in range(rounds):
        x = (x * 31 + y * (17 + i)) % 1009
        y = (y * 13 + x * x) % 1013
    return x


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.fixture
def visits(monkeypatch):
    """How often anyone has looked below a node."""
    seen = []

    def counted(node):
        seen.append(node)
        return children(node)

    monkeypatch.setattr(nodes, "children", counted)
    return seen


def test_equal_nodes_are_one() -> None:
    made = [operation("add", Var("q_pos"), constant(2)) for _ in range(2)]
    assert made[0] is made[1]
    assert Load("t", "int", (made[0],)) is Load("t", "int", (made[1],))
    assert pickle.loads(pickle.dumps(made[0])) is made[0]
    assert copy.deepcopy(made[0]) is made[0]
    numbers = constant(0), constant(0.0), constant(-0.0), constant(False), constant(float("nan"))
    assert len(set(numbers)) == 5
    assert constant(float("nan")) is numbers[4]


@pytest.mark.slow
def test_unused_nodes_are_freed() -> None:
    """All but the latest, which calls like the last ones make again."""
    for i in range(20_000):
        operation("mul", Var("score"), constant(i + 0.123))
    gc.collect()
    assert len(nodes._NODES) < 15_000


def test_each_node_is_visited_once(visits) -> None:
    node = SCORE
    for _ in range(REUSES):
        node = operation("add", operation("mul", node, constant(0.5)), node)
    count = 2 * REUSES + 2
    for visit in (
        lambda: list(walk(node)),
        lambda: list(upwards(node)),
        lambda: substitute(node, {"score": Var("q_pos")}),
        lambda: evaluate(node, {"score": np.float64(1)}, {}, np.dtype(float)),
        lambda: bound(node, {"score": Interval.of(0, 1)}, {}),
        lambda: derivative(node),
        lambda: text(node),
    ):
        visits.clear()
        visit()
        # Of what is rebuilt, both the old and the new nodes are looked at.
        assert len(visits) <= 3 * count


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.parametrize("q_len", [1, 24])
def test_a_call_visits_few_nodes(visits, backend, q_len) -> None:
    """A score that uses a result 16 times took 44 seconds, and 16 at each later call."""
    decay = qkv.ScoreMod(lambda s, b, h, q, k: doubled(s * 2.0**-REUSES, REUSES))
    query, key, value = normal(q_len, 8), normal(24, 8, seed=1), normal(24, 8, seed=2)
    for _ in range(3):
        visits.clear()
        found = qkv.attention(query, key, value, decay, q_offset="end", backend=backend)
        assert len(visits) < 100 * REUSES
    plain = qkv.attention(query, key, value, backend=backend)
    np.testing.assert_allclose(found, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["cpu", "blocked", "reference"])
@pytest.mark.parametrize("q_len", [3, 40])
def test_a_mask_that_is_a_hash(visits, backend, q_len) -> None:
    rounds = 8
    keep = qkv.ScoreMod(lambda s, b, h, q, k: np.where(hashed(q, k, rounds) < 500, s, -np.inf))
    query, key, value = normal(q_len, 8), normal(50, 8, seed=1), normal(50, 8, seed=2)
    found = qkv.attention(query, key, value, keep, q_offset=0, backend=backend)
    assert len(visits) < 10_000
    allowed = np.array([[hashed(i, j, rounds) < 500 for j in range(50)] for i in range(q_len)])
    expected = qkv.attention(query, key, value, allowed, backend="reference")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_shared_parts(visits) -> None:
    bent = qkv.ScoreMod(lambda s, b, h, q, k: reduce(lambda x, _: x - 0.1 * x * x, range(12), s))
    arrays = [normal(20, 4, seed=seed).astype(float) for seed in range(3)]
    for backend in ("cpu", "blocked"):
        _, pullback = qkv.vjp(*arrays, bent, backend=backend)
        gradient = pullback(np.ones((20, 4))).query
        step = 1e-6 * np.ones_like(arrays[0])
        ends = [
            qkv.attention(arrays[0] + sign * step, *arrays[1:], bent, backend=backend).sum()
            for sign in (1, -1)
        ]
        assert abs((ends[0] - ends[1]) / 2 - (gradient * step).sum()) < 1e-10
    assert len(visits) < 100_000


DEPTH = 10_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "depth"), [("blocked", DEPTH), ("reference", DEPTH), ("cpu", DEPTH // 8)]
)
def test_many_steps(backend, depth) -> None:
    """Python's limit of recursion was 1,000."""

    def far(s, b, h, q, k):
        for i in range(depth):
            s = s + 1e-4 * ((q - k) % (1 + i % 7))
        return s

    query = normal(5, 4)
    found = qkv.attention(query, query, query, qkv.ScoreMod(far), backend=backend)
    steps = np.arange(5)[:, None] - np.arange(5)
    bias = sum(np.mod(steps, 1 + i % 7) * 1e-4 for i in range(depth))
    expected = qkv.attention(query, query, query, bias, backend="reference")
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


def test_long_expressions_are_pickled() -> None:
    node = SCORE
    for i in range(DEPTH):
        index = operation("mod", operation("sub", Var("q_pos"), Var("kv_pos")), constant(1 + i % 7))
        node = operation("add", node, Load("table", "float", (index,)))
    assert pickle.loads(pickle.dumps(node)) is node
    scalar = Load("scalar", "int", ())
    assert pickle.loads(pickle.dumps([scalar, scalar])) == [scalar, scalar]


def test_a_long_text_is_cut() -> None:
    node = SCORE
    for i in range(DEPTH):
        node = Op("add", "float", (node, Const("float", float(i))))
    assert len(text(node)) < 5000
    assert len(repr(node)) < 5000
    assert text(operation("add", Var("q_pos"), constant(1))) == "(q_pos + 1)"
