"""Interval bounds against brute force: what they call certain must be so for every pair.

Random expressions are evaluated over whole matrices in both types of computation; the bounds are
asked about tiles. A bound may be loose, never wrong.
"""

import numpy as np
import pytest

from qkv.errors import ArgumentError, ShapeError
from qkv.problem.language.bounds import bound, check_table_reads
from qkv.problem.language.evaluate import evaluate
from qkv.problem.language.expressions import Var, as_node
from qkv.problem.language.intervals import Interval
from qkv.problem.language.symbols import Expr, Table
from qkv.problem.tiles import TileGrid, TileKind

Q_LEN, KV_LEN, HEADS, BATCHES = 23, 31, 3, 2


def tables(rng):
    """One table of each kind that variants pass, with what is awkward in them."""
    holes = rng.normal(size=(Q_LEN, KV_LEN))
    holes[rng.random(holes.shape) < 0.5] = -np.inf
    with_nan = rng.normal(size=KV_LEN).astype(np.float32)
    with_nan[rng.random(KV_LEN) < 0.2] = np.nan
    return {
        "by_key": rng.integers(-4, 40, KV_LEN),
        "by_query": rng.integers(-4, 40, Q_LEN).astype(np.uint8),
        "by_pair": rng.random((Q_LEN, KV_LEN)) < rng.random(),
        "blocks": rng.random((HEADS, 4, 5)) < 0.5,
        "holes": holes,
        "with_nan": with_nan,
        "fine": rng.normal(size=16),
        "scalar": np.asarray(rng.integers(1, 9)),
        "huge": rng.integers(-(2**62), 2**62, KV_LEN),
    }


KINDS = {
    "by_key": "int", "by_query": "int", "by_pair": "bool", "blocks": "bool", "holes": "float",
    "with_nan": "float", "fine": "float", "scalar": "int", "huge": "int",
}  # fmt: skip


class Random:
    """Random expressions of bounded depth."""

    def __init__(self, rng, arrays):
        self.rng = rng
        self.table = {n: Table(n, KINDS[n], a.shape) for n, a in arrays.items()}
        self.q, self.k = Expr(Var("q_index")), Expr(Var("kv_index"))
        self.head, self.batch = Expr(Var("head")), Expr(Var("batch"))

    def pick(self, *makers):
        return makers[self.rng.integers(len(makers))]()

    def integer(self, depth):
        t = self.table
        if depth == 0:
            return self.pick(
                lambda: self.q,
                lambda: self.k,
                lambda: self.q - self.k,
                lambda: self.head,
                lambda: self.batch,
                lambda: Expr(as_node(int(self.rng.integers(-6, 30)))),
                lambda: t["by_key"][self.k],
                lambda: t["by_query"][self.q],
                lambda: t["scalar"][()],
                lambda: t["huge"][self.k],
            )
        a, b = self.integer(depth - 1), self.integer(int(self.rng.integers(depth)))
        return self.pick(
            lambda: a + b,
            lambda: a - b,
            lambda: a * b,
            lambda: a // int(self.rng.integers(1, 9)),
            lambda: a // np.maximum(b, 1),
            lambda: a % int(self.rng.integers(1, 9)),
            lambda: a % np.maximum(b, 1),
            lambda: np.minimum(a, b),
            lambda: np.maximum(a, b),
            lambda: -a,
            lambda: abs(a),
            lambda: np.where(self.condition(depth - 1), a, b),
            lambda: np.floor(self.number(depth - 1)),
            lambda: t["by_key"][np.clip(a, 0, KV_LEN - 1)],
        )

    def number(self, depth):
        t = self.table
        if depth == 0:
            return self.pick(
                lambda: Expr(as_node(float(self.rng.choice([0.0, 0.1, 0.3, -2.5, 1e30, 1e300])))),
                lambda: self.k * 0.1,
                lambda: self.q / 3,
                lambda: t["holes"][self.q, self.k],
                lambda: t["with_nan"][self.k],
                lambda: t["fine"][np.clip(self.q - self.k, 0, 15)],
            )
        a, b = self.number(depth - 1), self.number(int(self.rng.integers(depth)))
        return self.pick(
            lambda: a + b,
            lambda: a - b,
            lambda: a * b,
            lambda: a / b,
            lambda: np.minimum(a, b),
            lambda: np.maximum(a, b),
            lambda: -a,
            lambda: abs(a),
            lambda: np.exp(a),
            lambda: np.log(a),
            lambda: np.sqrt(a),
            lambda: np.tanh(a),
            lambda: np.where(self.condition(depth - 1), a, b),
            lambda: a * self.integer(depth - 1),
            lambda: self.integer(depth - 1) / 10,
        )

    def condition(self, depth):
        t = self.table
        if depth == 0:
            return self.pick(
                lambda: self.k <= self.q,
                lambda: t["by_pair"][self.q, self.k],
                lambda: t["blocks"][self.head, self.q // 6, self.k // 7],
                lambda: t["holes"][self.q, self.k] != -np.inf,
                lambda: t["with_nan"][self.k] != -np.inf,
                lambda: t["by_query"][self.q] == t["by_key"][self.k],
            )
        a, b = self.integer(depth - 1), self.integer(depth - 1)
        x, y = self.number(depth - 1), self.number(int(self.rng.integers(depth)))
        return self.pick(
            lambda: a < b,
            lambda: a <= b,
            lambda: a == b,
            lambda: a != b,
            lambda: x < y,
            lambda: x <= y,
            lambda: x == y,
            lambda: x != y,
            lambda: x <= a,
            lambda: self.condition(depth - 1) & self.condition(depth - 1),
            lambda: self.condition(depth - 1) | self.condition(depth - 1),
            lambda: ~self.condition(depth - 1),
        )


def everywhere(node, arrays, batch, head, dtype):
    """The expression at every pair."""
    variables = {
        "q_index": np.arange(Q_LEN)[:, None],
        "kv_index": np.arange(KV_LEN)[None, :],
        "batch": batch,
        "head": head,
    }
    return np.broadcast_to(evaluate(node, variables, arrays, np.dtype(dtype)), (Q_LEN, KV_LEN))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.one_in(3)
def test_tiles_are_never_classified_wrongly(seed: int) -> None:
    rng = np.random.default_rng(seed)
    certain = 0
    for _ in range(150):
        arrays = tables(rng)
        node = Random(rng, arrays).condition(int(rng.integers(1, 5))).node
        block_q, block_kv = (int(n) for n in rng.integers(1, 12, 2))
        batch, head = int(rng.integers(BATCHES)), int(rng.integers(HEADS))
        grid = TileGrid(node, arrays, Q_LEN, KV_LEN, block_q, block_kv)
        kinds = grid.classify(batch, head)
        certain += int((kinds != TileKind.PARTIAL).sum())
        for dtype in (np.float32, np.float64):
            allowed = everywhere(node, arrays, batch, head, dtype)
            for i, j in np.ndindex(*kinds.shape):
                tile = allowed[i * block_q : (i + 1) * block_q, j * block_kv : (j + 1) * block_kv]
                if kinds[i, j] == TileKind.FULL:
                    assert tile.all(), Expr(node)
                elif kinds[i, j] == TileKind.EMPTY:
                    assert not tile.any(), Expr(node)
    assert certain > 2000, "bounds that are never certain prove nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_numbers_lie_within_their_bounds(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    for _ in range(300):
        arrays = tables(rng)
        make = Random(rng, arrays)
        depth = int(rng.integers(1, 5))
        node = (make.integer(depth) if rng.random() < 0.7 else make.number(depth)).node
        q, k = sorted(rng.integers(0, Q_LEN, 2)), sorted(rng.integers(0, KV_LEN, 2))
        known = bound(
            node,
            {
                "q_index": Interval.of(q[0], q[1]),
                "kv_index": Interval.of(k[0], k[1]),
                "batch": Interval.of(1, 1),
                "head": Interval.of(2, 2),
            },
            arrays,
        )
        for dtype in (np.float32, np.float64):
            values = everywhere(node, arrays, 1, 2, dtype)[q[0] : q[1] + 1, k[0] : k[1] + 1]
            real = values[~np.isnan(values)]
            assert (known.low <= real).all(), Expr(node)
            assert (real <= known.high).all(), Expr(node)
            if np.isnan(values).any():
                assert np.any(known.nan), Expr(node)


SCORE, KEY = Expr(Var("score")), Expr(Var("kv_index"))
ROW = {"kv_index": Interval.of(0, 9), "q_index": Interval.of(0, 9)}


@pytest.mark.parametrize(
    "index",
    [
        # float32 rounds 9 * 0.33333333 up to 3, float64 does not.
        np.floor(KEY * 0.33333333),
        # NaN becomes 0 in floor, which is below the range that clip promises.
        np.floor(np.clip(SCORE, 1.0, 3.0)) - 1,
        KEY - 7,
        KEY,
        np.floor(SCORE),
    ],
    ids=str,
)
def test_an_index_that_could_leave_its_table_is_refused(index) -> None:
    table = Table("t", "float", (3,))
    with pytest.raises(ShapeError, match="may reach"):
        check_table_reads([table[index].node], ROW, {"t": np.zeros(3)})


@pytest.mark.parametrize(
    "index",
    [
        np.clip(KEY, 0, 2),
        np.clip(np.floor(SCORE), 0, 2),
        np.floor(np.clip(SCORE, 0.0, 2.0)),
        np.floor(KEY * 0.25),
        KEY % 3,
        KEY // 4,
        np.where(KEY < 3, 1, 0),
    ],
    ids=str,
)
def test_an_index_that_stays_inside_is_accepted(index) -> None:
    table = Table("t", "float", (3,))
    check_table_reads([table[index].node], ROW, {"t": np.zeros(3)})


@pytest.mark.parametrize("divisor", [KEY, KEY - 1, Expr(as_node(0)), Expr(as_node(-2))], ids=str)
def test_a_divisor_that_may_be_below_one_is_refused(divisor) -> None:
    for quotient in (KEY // divisor, KEY % divisor):
        with pytest.raises(ArgumentError, match="divisor of an integer division may be below 1"):
            bound(quotient.node, ROW, {})


def test_a_causal_schedule_is_exact() -> None:
    """Every tile above the diagonal empty, on it partial, below it full."""
    node = (Expr(Var("kv_index")) <= Expr(Var("q_index"))).node
    kinds = TileGrid(node, {}, 1000, 1000, 100, 100).classify(0, 0)
    i, j = np.indices(kinds.shape)
    np.testing.assert_array_equal(kinds, np.where(j < i, 2, np.where(j > i, 0, 1)))


def test_a_window_and_lengths_are_exact() -> None:
    q, k = Expr(Var("q_index")), Expr(Var("kv_index"))
    lengths = Table("lens", "int", (2,))
    node = ((q - k <= 64) & (k <= q) & (k < lengths[Expr(Var("batch"))])).node
    arrays = {"lens": np.array([512, 130])}
    for batch in range(2):
        kinds = TileGrid(node, arrays, 512, 512, 64, 64).classify(batch, 0)
        rows, columns = np.arange(512)[:, None], np.arange(512)[None, :]
        allowed = (rows - columns <= 64) & (columns <= rows) & (columns < arrays["lens"][batch])
        blocks = allowed.reshape(8, 64, 8, 64)
        exact = np.where(blocks.all((1, 3)), 2, np.where(blocks.any((1, 3)), 1, 0))
        assert (kinds[exact == 0] == TileKind.EMPTY).all()
        assert (kinds[exact == 2] == TileKind.FULL).all()
